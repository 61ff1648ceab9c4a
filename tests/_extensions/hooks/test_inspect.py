"""inspect: the outputs of the evaluation that a run makes anyway."""

import pytest
import torch
from sample_hooks import stop_at
from toy_runs import fit

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

VALID = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
WHOLE = [[1.0, 2.0], [3.0]]
LOADERS = {"train": [torch.ones(1)] * 3, "valid": VALID}


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


def run(*hooks, loss=loss_fn, members=(), **settings):
    return fit(*hooks, step=fl.pipeline(*members)(loss), **{"loaders": LOADERS, **settings})


def test_it_is_given_one_output_per_batch_in_order_after_each_evaluation():
    looks, found = Looks(), []

    def look(state, outputs):
        looks(state, outputs)
        found.append((state.history[-1].metrics["valid/loss"], outputs))

    run(fl.inspect(look), epochs=2)
    assert looks.seen == [(3, WHOLE), (6, WHOLE)]
    loss, outputs = found[0]  # w is -3
    assert loss == sum(out.loss.item() * out.weight for out in outputs) / 3 == -6.0
    assert [out.aux["output"].tolist() for out in outputs] == [[-3.0, -6.0], [-9.0]]
    assert all(not out.metrics for out in outputs)


def test_there_is_no_second_pass_and_each_hook_has_a_list_of_its_own():
    calls, looks, clears = [], Looks(), fl.inspect(lambda state, outputs: outputs.clear())
    counted = lambda model, batch: calls.append(model.training) or loss_fn(model, batch)
    run(clears, fl.inspect(looks), loss=counted)
    assert calls == [True] * 3 + [False] * 2 and looks.seen == [(3, WHOLE)]
    moment = fl.every(seconds=1000)
    assert fl.inspect(looks, every=moment).every is not fl.inspect(looks, every=moment).every


@pytest.mark.parametrize(("loader", "seen"), [("valid", WHOLE), ("test", WHOLE[1:])])
def test_another_loader_is_left_alone(loader, seen):
    looks = Looks()
    run(fl.inspect(looks, loader=loader), loaders={**LOADERS, "test": VALID[1:]})
    assert looks.seen == [(3, seen)]


def test_where_it_is_not_due_nothing_is_kept(monkeypatch):
    from fnloop._loop import evaluate

    copies = []
    copy = evaluate.copy_to_cpu
    monkeypatch.setattr(evaluate, "copy_to_cpu", lambda tree: copies.append(1) or copy(tree))
    run(fl.inspect(Looks(), every=fl.every(epochs=3)), epochs=5)
    assert len(copies) == 2  # the batches of one evaluation


# --- the end of a run


@pytest.mark.parametrize("evaluate_every", [fl.every(epochs=1), fl.every(epochs=1) | fl.at_end()])
@pytest.mark.parametrize(("hook", "steps"), [
    (lambda looks: fl.inspect(looks, every=fl.at_end()), [6]),
    (lambda looks: fl.inspect(looks, every=fl.every(epochs=1) | fl.at_end()), [3, 6]),
    (lambda looks: fl.inspect(looks, every=fl.every(epochs=1)), [3, 6]),
    (lambda looks: fl.inspect(looks, every=fl.every(epochs=5)), []),  # not due
    (lambda looks: fl.at_end()(fl.inspect(looks)), [6]),
])  # fmt: skip
def test_the_end_of_a_run_that_a_hook_stops_at_an_evaluation_is_seen_once(
    evaluate_every, hook, steps
):
    looks, made = Looks(), {"evaluate_every": evaluate_every, "epochs": 9}
    state = run(hook(looks), stop_at(6), **made)
    assert looks.seen == [(step, WHOLE) for step in steps]
    assert_same(state, run(stop_at(6), **made))


@pytest.mark.parametrize("targets", [{"epochs": 9}, {"steps": 2}], ids=["stop", "target"])
def test_the_closing_evaluation_within_an_epoch_is_seen(targets):
    looks = Looks()
    state = run(fl.inspect(looks, every=fl.every(steps=2)), stop_at(2), **targets)
    assert state.history[-1].closing and looks.steps == [2]


@pytest.mark.parametrize(("every", "epochs", "steps", "passes"), [
    (fl.at_end(), 3, [9], 2),  # the last record has no evaluation of this loader
    (fl.at_end(), 4, [12], 2),  # it has one
    (fl.every(epochs=1) | fl.at_end(), 3, [6, 9], 2),
    (fl.every(epochs=1), 3, [6], 1),  # what is due at an update waits for an evaluation
    (fl.at_start() | fl.at_end(), 1, [3], 1),
])  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.on_main])
def test_the_end_is_seen_where_this_loader_is_not_evaluated(every, epochs, steps, passes, wrap):
    """It is evaluated after every second epoch."""
    looks, evaluated = Looks(), []

    def noting(model, batch):
        if not model.training:
            evaluated.append(batch.tolist())
        return loss_fn(model, batch)

    loaders = {"train": LOADERS["train"], "other": [torch.zeros(1)], "valid": VALID}
    moments = {"other": fl.every(epochs=1), "valid": fl.every(epochs=2)}
    given = {"loaders": loaders, "evaluate_every": moments, "epochs": epochs}
    state = run(wrap(fl.inspect(looks, every=every)), loss=noting, **given)
    assert looks.steps == steps and looks.seen[-1][1] == WHOLE
    assert evaluated.count([3.0]) == passes
    assert_same(state, run(**given))
    assert ("valid/loss" in state.history[-1].metrics) is (epochs == 4)


# --- what is kept


def test_outputs_are_copied_without_what_a_view_is_of():
    def loader():
        batch = torch.zeros(1)
        for i in range(3):
            yield batch.fill_(i)  # one tensor again and again

    def nested(model, batch):
        loss, _ = loss_fn(model, batch)
        big = torch.arange(1000.0)
        return loss, {"batch": batch, "parts": [(big[:2], {"name": "a"})], "count": 3}

    looks, found = Looks(), []
    see = fl.inspect(lambda state, outputs: found.extend(outputs))
    run(fl.inspect(looks), see, loaders=(LOADERS["train"], loader), loss=nested)
    assert looks.seen == [(3, [[0.0], [1.0], [2.0]])]
    ((view, named),) = found[0].aux["parts"]
    assert (view.tolist(), named, found[0].aux["count"]) == ([0.0, 1.0], {"name": "a"}, 3)
    assert view.untyped_storage().nbytes() == 8


def test_it_sees_what_an_average_evaluates_first():
    """A middleware that evaluates twice returns the output of the model itself."""

    @fl.middleware("evaluation")
    def again():
        return lambda step: lambda state, b: (step(state, 2 * b), step(state, b))[1]

    looks = Looks()
    run(fl.inspect(looks), members=(again(),))
    assert looks.seen == [(3, WHOLE)]


# --- within other hooks


def test_it_can_be_wrapped():
    looks, first, main, asked = Looks(), Looks(), Looks(), Looks()
    moment = fl.when(lambda state: state.step == 4)
    hooks = (
        fl.every(epochs=2)(fl.inspect(looks)),
        fl.every(epochs=1)(fl.once(fl.inspect(first), name="first")),
        fl.on_main(fl.inspect(main)),
        # due at 4, called at 2, 4 and 6, and evaluated at 3 and 6
        fl.every(steps=2)(fl.inspect(asked, every=moment)),
    )
    run(*hooks, epochs=4)
    assert (looks.steps, first.steps, main.steps) == ([6, 12], [3], [3, 6, 9, 12])
    assert asked.steps == [6]


def test_what_a_wrapper_or_an_earlier_run_left_is_dropped():
    hook, kept = fl.inspect(Looks()), []
    run(fl.every(epochs=2)(hook), lambda state: kept.append(hook._outputs) or state)
    assert kept == [None] * 3

    looks, due = Looks(), [True]
    hook = fl.inspect(looks, every=fl.when(lambda state: bool(due) and due.pop()))
    with pytest.raises(ZeroDivisionError):
        run(hook, fl.every(steps=2)(lambda state: 1 / 0))
    assert not due  # it was due at the first update
    run(hook)
    assert looks.steps == []


# --- arguments


@pytest.mark.parametrize(("hook", "settings", "message"), [
    (fl.inspect(Looks(), loader="valdi"), {}, r"evaluates; those are: valid. Did you mean 'valid'"),
    (fl.inspect(Looks()), {"loaders": [torch.ones(1)]}, "it evaluates none"),
    (fl.inspect(Looks()), {"evaluate_every": None}, "it evaluates none"),
    (fl.inspect(Looks(), loader="train"), {}, '"seen": train'),
    (fl.inspect(Looks(), every=fl.every(epochs=0.5)), {"loaders": (lambda: iter(VALID), VALID)},
        "the training loader has no length"),
])  # fmt: skip
def test_what_a_run_never_makes_is_refused_before_the_first_update(hook, settings, message):
    state = toy()
    with pytest.raises((KeyError, ValueError), match=message):
        run(hook, state=state, **settings)
    assert state.model.w.item() == 0.0
