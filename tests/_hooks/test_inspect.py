"""inspect: the outputs of the evaluation that a run makes anyway."""

import os
import signal

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

VALID = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]


class Looks:
    """What a function of ``inspect`` has been given: the step, and the batches."""

    def __init__(self):
        self.seen = []

    def __call__(self, state, outputs):
        self.seen.append((state.step, [out.aux["batch"].tolist() for out in outputs]))

    @property
    def steps(self):
        return [step for step, _ in self.seen]


def loss_fn(model, batch):
    loss, aux = toy_loss(model, batch)
    return loss, {**aux, "batch": batch}


def run(*hooks, updates=3, loaders=None, loss=loss_fn, **settings):
    given = {"train": [torch.ones(1)] * updates, "valid": VALID} if loaders is None else loaders
    return fl.fit(fl.pipeline()(loss), toy(), given, hooks=hooks, **settings)


def test_it_is_given_one_output_per_batch_in_order_after_each_evaluation():
    looks, found = Looks(), []

    def look(state, outputs):
        looks(state, outputs)
        found.append((state.history[-1].metrics["valid/loss"], outputs))

    run(fl.inspect(look), epochs=2)
    whole = [[1.0, 2.0], [3.0]]
    assert looks.seen == [(3, whole), (6, whole)]
    loss, outputs = found[0]  # w is -3
    assert loss == sum(out.loss.item() * out.weight for out in outputs) / 3 == -6.0
    assert [out.aux["output"].tolist() for out in outputs] == [[-3.0, -6.0], [-9.0]]
    assert all(not out.metrics for out in outputs)


def test_there_is_no_second_pass():
    calls = []

    def counted(model, batch):
        calls.append(model.training)
        return loss_fn(model, batch)

    run(fl.inspect(Looks()), fl.inspect(Looks()), loss=counted)
    assert calls == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("loader", "seen"), [("valid", [[1.0, 2.0], [3.0]]), ("test", [[3.0]])], ids=["first", "last"]
)
def test_another_loader_is_left_alone(loader, seen):
    looks = Looks()
    loaders = {"train": [torch.ones(1)], "valid": VALID, "test": VALID[1:]}
    run(fl.inspect(looks, loader=loader), loaders=loaders)
    assert looks.seen == [(1, seen)]


@pytest.mark.parametrize(("every", "evaluate_every", "steps"), [
    (fl.every(epochs=2), fl.every(epochs=1), [6, 12]),
    (fl.every(steps=1), fl.every(epochs=1), [3, 6, 9, 12]),
    (fl.every(steps=4), fl.every(epochs=1), [6, 9, 12]),  # due at 4, 8 and 12
    (fl.every(epochs=1), fl.every(steps=4), [4, 8, 12]),  # due at 3, 6, 9 and 12
    (fl.every(steps=5), fl.every(steps=5), [5, 10]), (fl.every(steps=1000), fl.every(epochs=1), []),
    (fl.when(lambda state: state.step == 5), fl.every(epochs=1), [6]),
    (fl.every(seconds=1000), fl.every(epochs=1), []),
    (fl.at_start(), fl.at_start() | fl.every(epochs=1), [0]),
    (fl.at_end(), fl.every(epochs=1), [12]),
], ids=repr)  # fmt: skip
def test_where_there_is_no_evaluation_it_waits_for_the_next(every, evaluate_every, steps):
    looks = Looks()
    run(fl.inspect(looks, every=every), epochs=4, evaluate_every=evaluate_every)
    assert looks.steps == steps


def test_where_it_is_not_due_nothing_is_kept(monkeypatch):
    from fnloop._loop import evaluate

    copies = []
    copy = evaluate.copy_to_cpu
    monkeypatch.setattr(evaluate, "copy_to_cpu", lambda tree: copies.append(1) or copy(tree))
    run(fl.inspect(Looks(), every=fl.every(epochs=3)), epochs=5)
    assert len(copies) == 2  # the batches of one evaluation


def test_what_it_returns_is_ignored():
    assert run(fl.inspect(lambda state, outputs: 3)).step == 3


def test_the_closing_evaluation_of_a_stopped_run_is_seen():
    looks = Looks()
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    state = run(fl.inspect(looks, every=fl.every(steps=2)), stop, epochs=9)
    assert state.history[-1].closing and looks.steps == [2]
    looks = Looks()
    run(fl.inspect(looks, every=fl.every(steps=2)), steps=2)
    assert looks.steps == [2]


@pytest.mark.parametrize("evaluate_every", [fl.every(epochs=1), fl.every(epochs=1) | fl.at_end()])
@pytest.mark.parametrize(("every", "steps"), [
    (fl.at_end(), [6]), (fl.every(epochs=1) | fl.at_end(), [3, 6]), (fl.every(epochs=1), [3, 6]),
])  # fmt: skip
def test_the_end_of_a_run_that_a_hook_stops_at_an_evaluation_is_seen_once(
    evaluate_every, every, steps
):
    looks, made = Looks(), {"evaluate_every": evaluate_every, "epochs": 9}
    stop = fl.when(lambda state: state.epoch == 2)(lambda state: attrs.evolve(state, stop="enough"))
    state = run(fl.inspect(looks, every=every), stop, **made)
    assert looks.steps == steps and [r.step for r in state.history] == [3, 6]
    assert looks.seen[-1] == (6, [[1.0, 2.0], [3.0]])
    assert_same(state, run(stop, **made))


@pytest.mark.parametrize(("every", "epochs", "steps"), [
    (fl.at_end(), 3, [9]),  # the last record has no evaluation of this loader
    (fl.at_end(), 4, [12]),  # it has one
    (fl.every(epochs=1) | fl.at_end(), 3, [6, 9]),
    (fl.every(epochs=1), 3, [6]),  # what is due at an update waits for an evaluation
    (fl.at_start() | fl.at_end(), 1, [3]),
])  # fmt: skip
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_end_is_seen_where_this_loader_is_not_evaluated(every, epochs, steps, wrapped):
    looks, evaluated = Looks(), []

    def noting(model, batch):
        if not model.training and model is not None:
            evaluated.append(batch.tolist())
        return loss_fn(model, batch)

    loaders = {"train": [torch.ones(1)] * 3, "other": [torch.zeros(1)], "valid": VALID}
    moments = {"other": fl.every(epochs=1), "valid": fl.every(epochs=2)}
    given = {"loaders": loaders, "evaluate_every": moments, "epochs": epochs, "loss": noting}
    plain = run(**given)
    without = evaluated.count([3.0])
    evaluated.clear()
    hook = fl.inspect(looks, every=every)
    state = run(fl.on_main(hook) if wrapped else hook, **given)
    assert looks.steps == steps and looks.seen[-1][1] == [[1.0, 2.0], [3.0]]
    again = epochs % 2 and "at_end" in repr(every)
    assert evaluated.count([3.0]) == without + bool(again)
    assert_same(state, plain)
    assert ("valid/loss" in state.history[-1].metrics) is (epochs == 4)


def test_at_the_end_of_a_stopped_run_it_can_be_wrapped():
    looks = Looks()
    stop = fl.when(lambda state: state.epoch == 2)(lambda state: attrs.evolve(state, stop="enough"))
    run(stop, fl.at_end()(fl.inspect(looks)), epochs=9)
    assert looks.seen == [(6, [[1.0, 2.0], [3.0]])]


def test_a_stop_at_an_evaluation_makes_no_second_one_for_a_hook_that_is_not_due():
    looks = Looks()
    stop = fl.when(lambda state: state.epoch == 2)(lambda state: attrs.evolve(state, stop="enough"))
    run(fl.inspect(looks, every=fl.every(epochs=5)), stop, epochs=9)
    assert looks.steps == []


def test_a_loader_that_fills_one_tensor_again_does_not_change_what_was_seen():
    def loader():
        batch = torch.zeros(1)
        for i in range(3):
            yield batch.fill_(i)

    looks = Looks()
    run(fl.inspect(looks), loaders=([torch.ones(1)], loader))
    assert looks.seen == [(1, [[0.0], [1.0], [2.0]])]


def test_nested_values_are_copied_without_what_a_view_is_of():
    def nested(model, batch):
        loss, _ = loss_fn(model, batch)
        big = torch.arange(1000.0)
        return loss, {"parts": [(big[:2], {"name": "a"})], "count": 3}

    found = []
    run(fl.inspect(lambda state, outputs: found.extend(outputs)), loss=nested)
    ((view, named),) = found[0].aux["parts"]
    assert (view.tolist(), named, found[0].aux["count"]) == ([0.0, 1.0], {"name": "a"}, 3)
    assert view.untyped_storage().nbytes() == 8


def test_it_sees_what_an_average_evaluates_first():
    """A middleware that evaluates twice returns the output of the model itself."""

    @fl.middleware("evaluation")
    def again():
        return lambda step: lambda state, b: (step(state, 2 * b), step(state, b))[1]

    looks = Looks()
    step = fl.pipeline(again())(loss_fn)
    fl.fit(step, toy(), ([torch.ones(1)], VALID), hooks=(fl.inspect(looks),))
    assert looks.seen == [(1, [[1.0, 2.0], [3.0]])]


# --- within other hooks


def test_it_can_be_wrapped():
    looks, first, main = Looks(), Looks(), Looks()
    hooks = (
        fl.every(epochs=2)(fl.inspect(looks)),
        fl.every(epochs=1)(fl.once(fl.inspect(first), name="first")),
        fl.on_main(fl.inspect(main)),
    )
    run(*hooks, epochs=4)
    assert (looks.steps, first.steps, main.steps) == ([6, 12], [3], [3, 6, 9, 12])


def test_a_wrapper_that_does_not_call_it_drops_the_outputs():
    hook, kept = fl.inspect(Looks()), []

    def later(state):
        kept.append(hook._now.outputs)
        return state

    run(fl.every(epochs=2)(hook), later, epochs=1)
    assert kept == [None] * 3


def test_it_is_asked_again_where_a_wrapper_calls_it_between_evaluations():
    """Due at 4, called at 2, 4 and 6, and evaluated at 3 and 6."""
    looks = Looks()
    run(fl.every(steps=2)(fl.inspect(looks, every=fl.when(lambda s: s.step == 4))), epochs=2)
    assert looks.steps == [6]


def test_another_run_does_not_wait_for_what_an_earlier_one_waited_for():
    def interrupt(state):
        raise KeyboardInterrupt

    looks, due = Looks(), [True]
    hook = fl.inspect(looks, every=fl.when(lambda state: bool(due) and due.pop()))
    run(hook, fl.every(steps=2)(interrupt))
    assert not due  # it was due at the first update
    run(hook)
    assert looks.steps == []


def test_each_hook_has_a_list_and_a_clock_of_its_own():
    looks, moment = Looks(), fl.every(seconds=1000)
    run(fl.inspect(lambda state, outputs: outputs.clear()), fl.inspect(looks))
    assert looks.seen == [(3, [[1.0, 2.0], [3.0]])]
    assert fl.inspect(looks, every=moment).every is not fl.inspect(looks, every=moment).every


def test_its_moment_is_checked_when_a_run_begins():
    loaders = {"train": lambda: iter([torch.ones(1)]), "valid": VALID}
    with pytest.raises(ValueError, match="the training loader has no length"):
        run(fl.inspect(Looks(), every=fl.every(epochs=0.5)), loaders=loaders)


def test_an_error_of_the_function_names_the_hook():
    def explode(state, outputs):
        raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError) as info:
        run(fl.inspect(explode))
    assert info.value.__notes__[-1] == "while in inspect(explode), train, epoch 1, batch 3, step 3"
    assert len(info.value.state.history) == 1


# --- wrong arguments


@pytest.mark.parametrize(("loader", "loaders", "message"), [
    ("valdi", None, r"this run evaluates; those are: valid. Did you mean 'valid'\?"),
    ("valid", [torch.ones(1)], "it evaluates none"), ("train", None, '"seen": train'),
])  # fmt: skip
def test_a_loader_that_is_not_evaluated_is_refused_before_the_first_update(
    loader, loaders, message
):
    state = toy()
    given = {"train": [torch.ones(1)], "valid": VALID} if loaders is None else loaders
    with pytest.raises(KeyError, match=message):
        fl.fit(fl.pipeline()(loss_fn), state, given, hooks=(fl.inspect(Looks(), loader=loader),))
    assert state.model.w.item() == 0.0


def test_a_run_that_never_evaluates_refuses_it():
    with pytest.raises(KeyError, match="it evaluates none"):
        run(fl.inspect(Looks()), evaluate_every=None)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: fl.inspect(3), "inspect expects fn as a function"),
    (lambda: fl.inspect(lambda state: None), "inspect expects fn as a function"),
    (lambda: fl.inspect(Looks(), loader=3), "inspect expects loader"),
    (lambda: fl.inspect(Looks(), every=3), "inspect expects every as every"),
    (lambda: fl.inspect(Looks(), every=fl.every), "inspect expects every as every"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def show(state, outputs): ...


def test_it_shows_and_compares_as_it_was_typed():
    assert repr(fl.inspect(show)) == "inspect(show)"
    other = fl.inspect(show, loader="test", every=fl.every(steps=2))
    assert repr(other) == "inspect(show, loader='test', every=every(steps=2))"
    assert fl.inspect(show) == fl.inspect(show) != other


def test_an_evaluation_that_a_signal_cuts_is_seen_when_it_is_made():
    """It is cut in the second loader, after that of the hook. A run that continues makes both."""
    calls = []

    def cut(model, batch):
        if not model.training and batch.numel() == 2 and not calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(model, batch)

    def see(state, outputs):
        calls.append((state.step, len(state.history)))

    loaders = {"train": [torch.ones(1)] * 3, "valid": [torch.ones(1)], "test": [torch.ones(2)] * 2}
    settings = {"loaders": loaders, "hooks": (fl.inspect(see),)}
    state = fl.fit(fl.pipeline()(cut), toy(), **settings)
    assert (state.step, state.stop, calls) == (3, "SIGTERM", [])
    fl.fit(fl.pipeline()(toy_loss), state, **settings)
    assert calls == [(3, 1)]
