import contextlib
import logging
import os
import random
import signal
import threading
import time

import attrs
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import fnloop as fl
from fnloop.testing import Toy, assert_same, small, stochastic, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def fit(state=None, loaders=None, **kwargs):
    return fl.fit(
        step, state or toy(), [ONE] * 3 if loaders is None else loaders, **{"hooks": (), **kwargs}
    )


def generators():
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), keys.tolist(), rest, random.getstate()


# --- targets


@pytest.mark.parametrize(
    ("targets", "steps", "epochs", "batch"),
    [
        ({}, 3, 1, 0),
        ({"epochs": 2}, 6, 2, 0),
        ({"steps": 4}, 4, 1, 1),
        ({"epochs": 2, "steps": 4}, 4, 1, 1),
        ({"epochs": 1, "steps": 4}, 3, 1, 0),
        (
            {"steps": 3},
            3,
            1,
            0,
        ),  # the end of an epoch is one state: not the beginning of an empty one
        ({"epochs": 0}, 0, 0, 0),
    ],
)
def test_targets_are_absolute_and_the_smaller_wins(targets, steps, epochs, batch):
    state = fit(**targets)
    assert (state.step, state.epoch, state.batch) == (steps, epochs, batch)
    assert state.run is None


def test_a_second_call_with_the_same_target_says_that_there_is_nothing_to_do(caplog):
    state = fit(epochs=2)
    with caplog.at_level(logging.WARNING, "fnloop"):
        again = fit(state, epochs=2)
    assert again is state
    assert (
        "nothing to do: the state is at epoch 2, step 6, and the target is epochs=2. Targets are absolute"
        in caplog.text
    )


def test_without_a_target_it_is_the_rest_of_the_epoch_or_one_more():
    state = fit(fit(steps=2))
    assert (state.step, state.epoch) == (3, 1)
    assert fit(state).epoch == 2


def test_five_epochs_are_two_and_three_more():
    problem = stochastic()
    make = lambda: fl.pipeline(fl.accumulate(2), fl.clip(0.1))(problem.loss_fn)
    whole = fl.fit(make(), problem.state(), problem.batches, epochs=5, hooks=())
    part = fl.fit(make(), problem.state(), problem.batches, epochs=2, hooks=())
    assert_same(whole, fl.fit(make(), part, problem.batches, epochs=5, hooks=()))


@pytest.mark.parametrize("bad", [{"epochs": 1.5}, {"epochs": -1}, {"steps": True}, {"steps": "10"}])
def test_a_bad_target_is_named(bad):
    with pytest.raises(ValueError, match=r"as an int >= 0, the target for state\."):
        fit(**bad)


# --- loaders


@pytest.mark.parametrize(
    ("loaders", "keys"),
    [
        ([ONE, ONE], ("train/loss",)),
        (([ONE], [ONE]), ("train/loss", "valid/loss")),
        (([ONE], None), ("train/loss",)),
        ({"train": [ONE], "dev": [ONE], "test": [ONE]}, ("train/loss", "dev/loss", "test/loss")),
        (lambda: (ONE for _ in range(2)), ("train/loss",)),
        (range(0), None),
    ],
)
def test_loaders_come_in_many_forms(loaders, keys):
    if keys is None:
        with pytest.raises(ValueError, match="gave no batch in epoch 1"):
            fit(loaders=loaders)
    else:
        assert fit(loaders=loaders).history.keys() == keys


@pytest.mark.parametrize(
    "call", [fl.evaluate, lambda step, *args: fl.predict(lambda model, batch: batch, *args)]
)
def test_one_loader_is_evaluated_at_a_time(call):
    with pytest.raises(
        TypeError, match=r"must be one iterable of batches; got a mapping with \['a', 'b'\]"
    ):
        call(step, toy(), {"a": [ONE], "b": [ONE]})


def test_an_iterator_can_be_read_once():
    iterator = iter([ONE] * 3)
    state = fit(loaders=iterator)
    assert state.step == 3
    with pytest.raises(
        ValueError, match=r"gave no batch in epoch 2\. An iterator can be read once: pass a list"
    ):
        fit(state, loaders=iterator)
    with pytest.raises(ValueError, match="which can't start again: pass a function"):
        fit(fit(steps=2), loaders=iter([ONE] * 3))


def test_a_generator_function_goes_on_in_the_middle_of_its_epoch():
    batches = lambda: (torch.tensor([x]) for x in (1.0, 2.0, 4.0))
    state = fit(loaders=batches, steps=2)
    assert (state.model.w.item(), state.batch) == (-3.0, 2)
    state = fit(state, loaders=batches)
    assert (state.model.w.item(), state.epoch) == (-7.0, 1)


@pytest.mark.parametrize(
    ("loaders", "error", "message"),
    [
        ({"valid": [ONE]}, ValueError, r"""one named "train" to train on; got \['valid'\]"""),
        ({"train": [ONE], "a/b": [ONE]}, ValueError, "without a slash"),
        ((ONE, ONE), TypeError, r"fit\(step, state, \[batch\]\)"),
        (3, TypeError, "must be an iterable of batches"),
        ([torch.utils.data.DataLoader([ONE])] * 2, TypeError, r"write a pair \(train, valid\)"),
        ({"train": [ONE], "valid": 3}, TypeError, "the valid loader must be an iterable"),
        (
            torch.utils.data.TensorDataset(ONE),
            TypeError,
            "the train loader is a TensorDataset.*wrap it in a DataLoader",
        ),
    ],
)
def test_bad_loaders_are_named(loaders, error, message):
    with pytest.raises(error, match=message):
        fit(loaders=loaders)


# --- records and evaluation


def test_epoch_means_are_exact_over_uneven_batches():
    data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
    state = fit(toy(w=1.0, lr=0.0), loaders=(data, data))
    assert state.history["train/loss"] == state.history["valid/loss"] == (4.0,)


def test_a_record_says_where_it_was_made():
    state = fit(epochs=2)
    assert [(r.epoch, r.step) for r in state.history] == [(1, 3), (2, 6)]
    assert 0 < state.history[0].seconds < state.history[1].seconds


@pytest.mark.parametrize(
    ("when_to", "evaluated", "records"),
    [
        (fl.every(epochs=1), [3, 6, 9, 12], [3, 6, 9, 12]),
        (fl.every(epochs=2), [6, 12], [3, 6, 9, 12]),
        (fl.every(epochs=0.5), [2, 3, 5, 6, 8, 9, 11, 12], [2, 3, 5, 6, 8, 9, 11, 12]),
        (fl.every(steps=5), [5, 10], [3, 5, 6, 9, 10, 12]),
        (fl.when(lambda state: state.step in (4, 12)), [4, 12], [3, 4, 6, 9, 12]),
        (None, [], [3, 6, 9, 12]),
    ],
    ids=repr,
)
def test_evaluation_happens_when_it_is_due_and_each_epoch_has_a_record(when_to, evaluated, records):
    state = fit(loaders=([ONE] * 3, [ONE]), epochs=4, evaluate_every=when_to)
    assert [r.step for r in state.history] == records
    assert [r.step for r in state.history if "valid/loss" in r.metrics] == evaluated


def test_a_record_in_the_middle_of_an_epoch_has_the_running_mean():
    """w is 0, -1, -2: the losses are 0, -1, -2, and their running means 0, -0.5, -1."""
    state = fit(evaluate_every=fl.every(steps=1))
    assert state.history["train/loss"] == (0.0, -0.5, -1.0)


def test_an_interrupted_epoch_has_the_mean_of_all_of_it():
    state = fit(fit(steps=2))
    assert [(r.step, r.metrics["train/loss"], r.closing) for r in state.history] == [
        (2, -0.5, True),
        (3, -1.0, False),
    ]


@pytest.mark.parametrize("wrong", [2, "epoch", lambda state: True])
def test_when_to_evaluate_is_said_by_every_or_when(wrong):
    with pytest.raises(
        TypeError, match=r"every\(epochs=1\), every\(steps=100\), when\(predicate\) or None"
    ):
        fit(evaluate_every=wrong)


def test_evaluate_touches_nothing():
    problem = stochastic()
    make = fl.pipeline()(problem.loss_fn)
    state = fl.fit(make, problem.state(), problem.batches, hooks=())
    state.model[1].eval()
    before, drawn = fl.snapshot(state), generators()
    first = fl.evaluate(make, state, problem.batches)
    assert first == fl.evaluate(make, state, problem.batches)
    assert generators() == drawn
    assert [m.training for m in state.model] == [True, False, True, True, True]
    assert_same(state, before)


def test_evaluation_during_training_changes_nothing_of_it():
    problem = stochastic()
    make = fl.pipeline()(problem.loss_fn)
    shuffled = torch.utils.data.DataLoader(problem.batches, batch_size=None, shuffle=True)
    plain = fl.fit(make, problem.state(), shuffled, epochs=2, hooks=())
    watched = fl.fit(
        make,
        problem.state(),
        {"train": shuffled, "valid": shuffled},
        epochs=2,
        hooks=(lambda state: (torch.rand(3), state)[1],),
        evaluate_every=fl.every(steps=2),
    )
    for mine, theirs in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_empty_evaluation_is_an_error():
    with pytest.raises(ValueError, match="gave no batch"):
        fl.evaluate(step, toy(), [])


def test_evaluating_a_new_state_does_not_make_a_scheduler_that_sets_its_learning_rate():
    warm = fl.torch_scheduler(lambda opt, run: torch.optim.lr_scheduler.ConstantLR(opt, 0.1))
    state = toy(lr=1.0)
    fl.evaluate(fl.pipeline(warm)(toy_loss), state, [ONE])
    assert (state.optimizer.param_groups[0]["lr"], dict(state.slots)) == (1.0, {})


def test_an_evaluation_tells_a_dataset_of_no_epoch():
    class Told(torch.utils.data.TensorDataset):
        def set_epoch(self, epoch):
            told.append(epoch)

    told: list[int] = []
    data = torch.utils.data.DataLoader(Told(torch.ones(2)))
    first = fl.pipeline()(
        lambda model, batch: toy_loss(model, batch[0] if isinstance(batch, list) else batch)
    )
    fl.evaluate(first, toy(), data)
    fl.fit(first, toy(), ([ONE], data), epochs=2, hooks=())
    assert told == []


def test_predict_is_lazy_and_in_order():
    asked = []

    def batches():
        for x in (1.0, 2.0, 3.0):
            asked.append(x)
            yield torch.tensor([x])

    results = fl.predict(lambda model, batch: model(batch).item(), toy(w=2.0), batches)
    assert next(results) == 2.0 and asked == [1.0]
    assert list(results) == [4.0, 6.0]


def test_between_predictions_the_model_is_as_it_was():
    state = toy()
    for flag in fl.predict(
        lambda model, batch: (model.training, torch.is_grad_enabled()), state, [ONE, ONE]
    ):
        assert flag == (False, False)
        assert state.model.training and torch.is_grad_enabled()


def test_predict_wants_a_function_first():
    with pytest.raises(
        TypeError, match=r"predict\(lambda model, batch: model\(batch\), state, loader\)"
    ):
        fl.predict(toy(), lambda model, batch: batch, [ONE])


# --- run


def test_run_yields_after_every_epoch_and_at_the_end():
    states = fl.run(step, toy(), [ONE] * 3, steps=7, hooks=())
    assert [(s.step, s.epoch, s.run) for s in states] == [(3, 1, None), (6, 2, None), (7, 2, None)]


def test_a_run_at_its_target_yields_the_state_once():
    state = fit(epochs=1)
    assert list(fl.run(step, state, [ONE] * 3, epochs=1, hooks=())) == [state]


def test_a_run_closes_an_epoch_that_bare_steps_have_used_up():
    state = toy()
    for _ in range(5):
        state, _ = step(state, ONE)
    assert (state.step, state.epoch, state.batch) == (5, 0, 5)
    state = fit(state, [ONE] * 5, epochs=2)
    assert (state.step, state.epoch, state.batch, state.model.w.item()) == (10, 2, 0, -10.0)


def test_leaving_a_run_closes_its_hooks():
    class Closes:
        closed = 0

        def __call__(self, state):
            return state

        def close(self):
            self.closed += 1

    hook = Closes()
    for _ in fl.run(step, toy(), [ONE] * 3, epochs=5, hooks=(hook,)):
        break
    assert hook.closed == 1


def test_a_state_of_a_run_that_is_used_up_elsewhere_ends_the_run():
    states = fl.run(step, toy(), [ONE] * 3, epochs=5, hooks=())
    fit(next(states))
    with pytest.raises(fl.StaleStateError):
        next(states)


def test_run_checks_its_arguments_at_once():
    with pytest.raises(ValueError, match="as an int >= 0"):
        fl.run(step, toy(), [ONE], epochs=-1)


# --- hooks


def test_hooks_run_in_the_listed_order_behind_update_and_evaluation():
    seen = []

    def note(name):
        return lambda state: (seen.append((name, state.step, len(state.history))), state)[1]

    fit(loaders=([ONE] * 2, [ONE]), hooks=(note("a"), note("b")))
    assert seen == [("a", 1, 0), ("b", 1, 0), ("a", 2, 1), ("b", 2, 1)]


def test_a_hook_that_stops_lets_the_others_finish():
    seen = []
    stop = lambda state: attrs.evolve(state, stop="enough")
    state = fit(hooks=(stop, lambda state: (seen.append(state.stop), state)[1]), epochs=9)
    assert (state.step, state.stop, seen) == (1, "enough", ["enough"])


def test_a_stopped_run_stays_stopped_until_it_is_told_to_go_on(caplog):
    state = fit(hooks=(lambda state: attrs.evolve(state, stop="enough"),))
    assert fit(state) is state
    assert (
        "nothing to do: the run was stopped (enough). To continue, pass attrs.evolve(state, stop=None)"
        in caplog.text
    )
    assert fit(attrs.evolve(state, stop=None)).epoch == 1


def test_a_hook_may_go_back_to_a_snapshot():
    kept = fl.snapshot(toy(w=7.0))
    back = fl.when(lambda state: state.step == 2 and state.model is not kept.model)(
        lambda state: kept
    )
    state = fit(hooks=(back,), epochs=1)
    assert (state.model.w.item(), state.step, state.epoch) == (4.0, 3, 1)


def test_a_gradient_that_a_hook_leaves_is_not_of_the_next_update():
    def probe(state):
        toy_loss(state.model, 100 * ONE)[0].backward()
        return state

    assert fit(hooks=(probe,)).model.w.item() == -3.0


def test_parameters_that_a_hook_adds_are_trained_from_then_on():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.bias)
    state = fl.TrainState.create(model, torch.optim.SGD([model.weight], lr=1.0))

    def add(state):
        state.optimizer.add_param_group({"params": [model.bias]})
        return state

    hooks = (fl.when(lambda state: state.step == 2)(add),)
    fl.fit(fl.pipeline()(lambda m, b: m(b).mean()), state, [torch.ones(1, 1)] * 3, hooks=hooks)
    assert (model.bias.item(), model.bias.grad) == (-1.0, None)


def test_a_parameter_outside_the_optimizer_keeps_no_gradient():
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD([model.weight], lr=1.0))
    fl.fit(fl.pipeline()(lambda m, b: m(b).mean()), state, [torch.ones(1, 1)] * 3, hooks=())
    assert model.bias.grad is None


def test_a_hook_that_returns_an_old_state_is_named():
    kept = []

    def old(state):
        kept.append(state)
        return kept[0]

    with pytest.raises(fl.StaleStateError) as error:
        fit(hooks=(old,))
    assert "old, train" in error.value.__notes__[0]
    assert error.value.state.step == 2
    assert fit(error.value.state).model.w.item() == -3.0


def test_two_checkpoint_hooks_on_one_folder_are_refused(tmp_path):
    saves = (fl.checkpoint(tmp_path / "a"), fl.every(steps=1)(fl.checkpoint(tmp_path / "a")))
    with pytest.raises(ValueError, match=r"two checkpoint hooks share .*give each its own folder"):
        fit(hooks=saves)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_hook_that_goes_back_goes_back_in_the_data_too(at):
    """Back from update ``at`` to the state behind update 1, once: the run is the one that goes on from there."""
    kept, loaders = [], [torch.tensor([x]) for x in (1.0, 2.0, 4.0)]
    halving = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)

    def keep(state):
        kept.append(fl.snapshot(state))
        return state

    hooks = (
        fl.once(fl.when(lambda state: state.step == 1)(keep).hook),
        fl.when(lambda state: state.step == at)(fl.once(lambda state: kept[0], name="back")),
    )
    state = fl.fit(halving, toy(), loaders, epochs=2, hooks=hooks)
    slots = {name: value for name, value in state.slots.items() if not name.startswith("once:")}
    assert_same(
        attrs.evolve(state, slots=slots), fl.fit(halving, toy(), loaders, epochs=2, hooks=())
    )


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        (fl.progress(), TypeError, "hooks as a tuple"),
        ((fl.progress,), TypeError, r"Call it: progress\(...\)"),
        (
            (lambda state, out: state,),
            TypeError,
            "a hook takes the state and nothing else, but <lambda> takes",
        ),
        ((3,), TypeError, "a hook is a function state -> state; got 3"),
        ((lambda state: None,), TypeError, "returned None. Did you forget 'return state'"),
    ],
)
def test_bad_hooks_are_named(hooks, error, message):
    with pytest.raises(error, match=message):
        fit(hooks=hooks)


def test_the_default_hooks_report_and_halt(capsys):
    state = fl.fit(step, toy(), [ONE * float("nan")] * 3, epochs=5)
    assert state.stop.startswith("halt_on_nonfinite: the training loss became nan")
    assert "epoch 1  step 3  train/loss nan" in capsys.readouterr().err


# --- interruptions


def interrupting(at, how):
    def loss_fn(model, batch):
        if batch[0] == at:
            how()
        return toy_loss(model, batch)

    return fl.pipeline()(loss_fn)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def raise_interrupt():
    raise KeyboardInterrupt


NUMBERS = [torch.tensor([float(x)]) for x in (1, 2, 3)]


def test_ctrl_c_ends_the_run_behind_the_running_update_and_returns():
    state = fl.fit(interrupting(2, press), toy(), NUMBERS, hooks=())
    assert (state.step, state.model.w.item(), state.stop) == (2, -3.0, "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    state = fl.fit(step, state, NUMBERS, hooks=())  # the same script goes on
    assert (state.step, state.epoch, state.stop, state.model.w.item()) == (3, 1, None, -6.0)


def test_an_interrupt_that_is_raised_returns_the_state_before_the_update():
    state = fl.fit(interrupting(2, raise_interrupt), toy(), NUMBERS, hooks=())
    assert (state.step, state.model.w.item(), state.stop, state.model.w.grad) == (
        1,
        -1.0,
        "interrupted",
        None,
    )


def test_a_second_ctrl_c_raises_and_loses_nothing():
    with pytest.raises(KeyboardInterrupt) as error:
        fl.fit(interrupting(2, lambda: (press(), press())), toy(), NUMBERS, hooks=())
    assert error.value.state.step == 1
    assert fit(error.value.state, NUMBERS).model.w.item() == -6.0


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
def test_a_signal_in_the_hooks_at_an_epochs_end_ends_the_run_there(how, reason):
    hook = fl.when(lambda state: state.step == 3)(lambda state: (how(), state)[1])
    states = list(fl.run(step, toy(), [ONE] * 3, epochs=3, hooks=(hook,)))
    assert [(s.step, s.epoch, s.stop) for s in states] == [(3, 1, reason)]
    assert fit(hooks=(hook,)).stop == reason  # at the last boundary of the run too


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
def test_a_loader_that_dies_of_the_signal_that_stops_the_run_is_no_error(how, reason):
    def dies():
        yield from NUMBERS[:2]
        raise RuntimeError("DataLoader worker exited unexpectedly")

    state = fl.fit(interrupting(2, how), toy(), dies, hooks=())
    assert (state.step, state.model.w.item(), state.stop) == (2, -3.0, reason)
    state = fit(state, NUMBERS)
    assert (state.step, state.epoch, state.stop, state.model.w.item()) == (3, 1, None, -6.0)


def test_hooks_see_an_interruption():
    seen = []
    fl.fit(
        interrupting(2, press),
        toy(),
        NUMBERS,
        hooks=(lambda state: (seen.append(state.stop), state)[1],),
    )
    assert seen == [None, "interrupted"]


# --- exceptions


class Boom(Exception):
    pass


def raising(error, at=2.0):
    def explode(model, batch):
        if batch[0] == at:
            raise error
        return toy_loss(model, batch)

    return explode


@pytest.mark.parametrize(
    "error", [Boom("x"), StopIteration("x"), KeyError("x"), SystemExit(3)], ids=repr
)
def test_an_exception_keeps_its_type_says_where_and_carries_the_state(error):
    with pytest.raises(type(error)) as caught:
        fl.fit(fl.pipeline(fl.clip(9.0))(raising(error)), toy(), NUMBERS, epochs=2, hooks=())
    assert caught.value is error
    assert caught.value.__notes__ == [
        "while in the loss function explode, train, epoch 1, batch 1, step 1"
    ]
    assert (error.state.step, error.state.batch, error.state.run) == (1, 1, None)
    assert fit(error.state, NUMBERS).model.w.item() == -6.0
    del error.__notes__


def failing_middleware(ring):
    @fl.middleware(ring)
    def fails(at):
        def wrap(step):
            def failing(state, batch):
                state, out = step(state, batch)
                if batch[0] == at:
                    raise Boom
                return state, out

            return failing

        return wrap

    return fails(2.0)


def test_the_note_names_the_middleware():
    with pytest.raises(Boom) as error:
        fl.fit(
            fl.pipeline(failing_middleware("gradient"), fl.clip(1.0))(toy_loss),
            toy(),
            NUMBERS,
            hooks=(),
        )
    assert error.value.__notes__ == ["while in fails(2.0), train, epoch 1, batch 1, step 1"]


class Uncombinable:
    def combine(self, other):
        raise Boom

    def compute(self):
        return 0.0


@pytest.mark.parametrize(
    ("member", "error", "steps"),
    [
        (failing_middleware("step"), Boom, 2),
        (fl.metric(odd=lambda aux, batch: Uncombinable()), Boom, 2),
        (fl.torch_scheduler(lambda opt, run: OneCycleLR(opt, 1.0, total_steps=3)), ValueError, 4),
    ],
    ids=["step ring", "metric", "scheduler"],
)
def test_what_is_raised_behind_an_update_carries_the_state_with_it(member, error, steps):
    data = [*NUMBERS, *NUMBERS]
    with pytest.raises(error) as caught:
        fl.fit(fl.pipeline(member)(toy_loss), toy(), data, hooks=())
    state = caught.value.state
    assert (state.step, state.batch, state.run) == (steps, steps, None)
    before = state.model.w.item()
    state = fit(attrs.evolve(state, slots={}, metrics={}), data)
    assert state.step == 6
    if error is Boom:
        assert (before, state.model.w.item()) == (-3.0, -12.0)


def test_the_note_names_loaders_and_hooks():
    def broken():
        yield ONE
        raise Boom

    with pytest.raises(Boom) as error:
        fit(loaders=broken)
    assert error.value.__notes__ == [
        "while in the training loader, train, epoch 1, batch 1, step 1"
    ]
    with pytest.raises(Boom) as error:
        fit(loaders=([ONE], broken))
    assert error.value.__notes__ == ["while in the valid loader, epoch 1, batch 1, step 1"]
    with pytest.raises(Boom) as error:
        fl.fit(fl.pipeline()(raising(Boom())), toy(), ([ONE], NUMBERS), hooks=())
    assert error.value.__notes__ == [
        "while in the loss function explode, valid, epoch 1, batch 1, step 1"
    ]

    def bad_hook(state):
        raise Boom

    with pytest.raises(Boom) as error:
        fit(hooks=(bad_hook,))
    assert error.value.__notes__ == ["while in bad_hook, train, epoch 1, batch 1, step 1"]


# --- an update that fails half-way


def two_weights(optimizer):
    """Two weights whose gradients are the batch: plain descent with lr=1 takes it off both."""
    model = torch.nn.ParameterDict(
        {"a": torch.nn.Parameter(torch.zeros(1)), "b": torch.nn.Parameter(torch.zeros(1))}
    )
    loss = lambda model, batch: ((model["a"] + model["b"]) * batch).mean()
    return fl.TrainState.create(model, optimizer(model.parameters())), fl.pipeline()(loss)


def half_way(error, at=2):
    """Descent that fails between its first and its second weight, in its n-th step."""

    class HalfWay(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            for p in self.param_groups[0]["params"]:
                with torch.no_grad():
                    p -= p.grad
                if self.steps == at:
                    error()

    return lambda parameters: HalfWay(parameters, lr=1.0)


def boom():
    raise Boom


def alarm():
    """Raise as torch does for a worker that has died: from the handler of a signal."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: boom())
    try:
        os.kill(os.getpid(), signal.SIGALRM)
        sum(range(10**6))
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(boom, Boom), (alarm, Boom), (raise_interrupt, KeyboardInterrupt)],
    ids=["step", "signal", "ctrl-c"],
)
def test_an_update_that_fails_half_way_leaves_no_state(error, kind):
    state, make = two_weights(half_way(error))
    kept = []
    keep = lambda state: (kept.append((state, fl.snapshot(state))), state)[1]
    with pytest.raises(kind) as caught:
        fl.fit(make, state, NUMBERS, hooks=(keep,))
    assert not hasattr(caught.value, "state")
    where, torn = caught.value.__notes__
    assert where == "while in the optimizer's step, train, epoch 1, batch 1, step 1"
    assert (
        "between two updates, so this exception has no attribute state. Go back to a checkpoint or to a snapshot"
        in torn
    )
    (last, snapshot) = kept[-1]
    assert [p.item() for p in last.model.values()] == [
        -3.0,
        -1.0,
    ]  # torn: one weight has made two steps
    for use in (
        lambda: fl.fit(make, last, NUMBERS),
        lambda: fl.snapshot(last),
        lambda: make(last, NUMBERS[0]),
    ):
        with pytest.raises(
            fl.StaleStateError,
            match=r"of this state \(step 1, epoch 0\) failed half-way.*checkpoint",
        ):
            use()
    again = fl.fit(
        make,
        attrs.evolve(snapshot, optimizer=torch.optim.SGD(snapshot.model.parameters(), lr=1.0)),
        NUMBERS,
    )
    assert [p.item() for p in again.model.values()] == [-6.0, -6.0]


def test_a_bare_step_that_fails_half_way_leaves_no_state():
    state, make = two_weights(half_way(boom, at=1))
    with pytest.raises(Boom):
        make(state, NUMBERS[0])
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        make(state, NUMBERS[0])


@pytest.mark.parametrize(
    ("member", "fails", "kind"),
    [((), True, Boom), ((fl.amp("fp16", init_scale=2.0**127),), False, ValueError)],
    ids=["loss function", "fp16 overflow"],
)
def test_an_exception_while_lbfgs_looks_for_its_step_leaves_no_state(member, fails, kind):
    """LBFGS has tried other weights when it evaluates the loss for the second time."""
    calls = []

    def loss_fn(model, batch):
        calls.append(model.w.item())
        if fails and len(calls) == 2:
            raise Boom
        return (model(batch) - 3).square().mean()

    model = Toy(w=5.0)
    state = fl.TrainState.create(model, torch.optim.LBFGS(model.parameters(), max_iter=4))
    with pytest.raises(kind) as caught:
        fl.fit(fl.pipeline(*member)(loss_fn), state, [ONE], hooks=())
    assert not hasattr(caught.value, "state")
    assert "between two updates" in caught.value.__notes__[-1]


def test_an_update_that_is_left_out_changes_nothing_and_keeps_its_state():
    leaves_out = fl.Middleware(
        "leaves_out", gradient=lambda step: lambda state, batch: skipping(*step(state, batch))
    )
    skipping = lambda state, out: (state, attrs.evolve(out, skip="no reason"))
    with pytest.raises(Boom) as caught:
        fl.fit(
            fl.pipeline(leaves_out, failing_middleware("step"))(toy_loss), toy(), NUMBERS, hooks=()
        )
    assert (caught.value.state.step, caught.value.state.skipped, caught.value.state.batch) == (
        0,
        2,
        2,
    )
    assert (
        fit(attrs.evolve(caught.value.state, slots={}), NUMBERS).model.w.item() == -3.0
    )  # the third batch alone


def test_a_hook_that_uses_the_state_up_and_fails_leaves_none():
    with pytest.raises(Boom) as caught:
        fit(hooks=(lambda state: (step(state, ONE), boom()),))
    assert not hasattr(caught.value, "state")


# --- a boundary that fails


def failing_once(at):
    """Batches to evaluate whose n-th pass fails, once."""
    passes = []

    def batches():
        passes.append(1)
        yield torch.tensor([2.0])
        if len(passes) == at:
            raise Boom
        yield torch.tensor([4.0])

    return batches


@pytest.mark.parametrize(
    ("when_to", "fails_at", "position"),
    [
        (fl.every(epochs=1), 1, (3, 0, 3)),
        (fl.every(epochs=1), 2, (6, 1, 3)),
        (fl.every(steps=3), 1, (3, 0, 3)),  # the end of an epoch, by its steps
        (fl.every(steps=2), 1, (2, 0, 2)),  # within an epoch
        (fl.every(epochs=2), 1, (6, 1, 3)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("interrupt", [False, True], ids=["exception", "ctrl-c"])
def test_a_run_that_continues_after_a_failed_evaluation_repeats_it(
    when_to, fails_at, position, interrupt, monkeypatch
):
    if interrupt:
        monkeypatch.setitem(globals(), "Boom", KeyboardInterrupt)
    settings = {"epochs": 2, "evaluate_every": when_to}
    whole = fit(loaders=(NUMBERS, failing_once(0)), **settings)
    loaders = (NUMBERS, failing_once(fails_at))
    if interrupt:
        state = fit(loaders=loaders, **settings)
        assert state.stop == "interrupted"
    else:
        with pytest.raises(Boom) as caught:
            fit(loaders=loaders, **settings)
        state = caught.value.state
    assert (state.step, state.epoch, state.batch) == position
    assert list(state.metrics) == ["loss"]
    assert_same(fit(state, loaders, **settings), whole)


@pytest.mark.parametrize(
    "when_to", [fl.every(epochs=1), fl.every(steps=3), fl.every(steps=2)], ids=repr
)
def test_a_run_that_continues_from_a_file_after_a_failed_evaluation_repeats_it(when_to, tmp_path):
    settings = {"epochs": 2, "evaluate_every": when_to}
    whole = fit(loaders=(NUMBERS, failing_once(0)), **settings)
    loaders = (NUMBERS, failing_once(1))
    with pytest.raises(Boom) as caught:
        fit(loaders=loaders, **settings)
    restored = fl.restore(fl.save(caught.value.state, tmp_path / "a"), toy())
    assert_same(fit(restored, loaders, **settings), whole)


def test_a_hook_that_fails_does_so_after_the_record():
    with pytest.raises(Boom) as caught:
        fit(loaders=([ONE] * 3, [ONE]), hooks=(lambda state: state if state.step < 3 else boom(),))
    assert caught.value.__notes__ == [
        "while in <lambda>, train, epoch 1, batch 3, step 3"
    ]  # the epoch that has just ended
    state = caught.value.state
    assert (state.epoch, state.batch, len(state.history)) == (1, 0, 1)


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
def test_a_loader_to_evaluate_that_dies_of_the_signal_that_stops_the_run_is_no_error(how, reason):
    def dies():
        yield ONE
        how()
        raise RuntimeError("DataLoader worker exited unexpectedly")

    state = fit(loaders=([ONE] * 3, dies), epochs=2)
    assert (state.step, state.epoch, state.batch, state.stop, len(state.history)) == (
        3,
        0,
        3,
        reason,
        0,
    )
    whole = fit(loaders=([ONE] * 3, [ONE]), epochs=2)
    assert_same(fit(state, ([ONE] * 3, [ONE]), epochs=2), whole)


class Told:
    """A hook that wants to know of a failure."""

    def __init__(self, fails=False):
        self.fails, self.told = fails, []

    def __call__(self, state):
        return state

    def failed(self, state, error):
        self.told.append((state.step, state.run, type(error), list(error.__notes__)))
        if self.fails:
            raise OSError("disk full")


def test_hooks_are_told_of_a_failure_and_cannot_hide_it():
    first, second = Told(fails=True), Told()
    with pytest.raises(Boom) as caught:
        fl.fit(
            fl.pipeline()(raising(Boom())),
            toy(),
            NUMBERS,
            hooks=(fl.every(epochs=9)(first), second),
        )
    note = "while in the loss function explode, train, epoch 1, batch 1, step 1"
    assert first.told == [(1, None, Boom, [note])]
    assert second.told[0][:3] == (1, None, Boom)
    assert caught.value.__notes__[0] == note
    assert "failed too: OSError: disk full" in caught.value.__notes__[1]


def test_hooks_are_not_told_without_a_state_nor_of_an_interruption():
    hook = Told()
    state, make = two_weights(half_way(boom))
    with pytest.raises(Boom):
        fl.fit(make, state, NUMBERS, hooks=(hook,))
    with pytest.raises(KeyboardInterrupt):
        fl.fit(interrupting(2, lambda: (press(), press())), toy(), NUMBERS, hooks=(hook,))
    assert hook.told == []


# --- closing records


def ends(history):
    """Where records were made, what they say of the two loaders, and whether they are closing ones."""
    return [
        (r.step, r.metrics.get("train/loss"), r.metrics.get("valid/loss"), r.closing)
        for r in history
    ]


@pytest.mark.parametrize(
    ("settings", "records"),
    [
        # w is 0, -1, -2, ... before each update, and so is the training loss: its mean over n updates is -(n - 1) / 2
        ({"steps": 2}, [(2, -0.5, -2.0, True)]),
        ({"steps": 3}, [(3, -1.0, -3.0, False)]),  # an epoch's end has its record anyway
        ({"steps": 5}, [(3, -1.0, -3.0, False), (5, -3.5, -5.0, True)]),
        ({"steps": 2, "evaluate_every": None}, [(2, -0.5, None, True)]),
        ({"steps": 2, "evaluate_every": fl.every(steps=2)}, [(2, -0.5, -2.0, False)]),
        (
            {"steps": 2, "evaluate_every": fl.every(steps=1)},
            [(1, 0.0, -1.0, False), (2, -0.5, -2.0, False)],
        ),
        ({"epochs": 1, "evaluate_every": fl.every(epochs=2)}, [(3, -1.0, None, False)]),
    ],
    ids=repr,
)
def test_a_run_that_ends_between_two_records_makes_one_at_its_end(settings, records):
    assert ends(fit(loaders=([ONE] * 3, [ONE]), **settings).history) == records


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_run_that_a_hook_stops_makes_a_record_too(at):
    stop = fl.when(lambda state: state.step == at)(lambda state: attrs.evolve(state, stop="enough"))
    state = fit(loaders=([ONE] * 3, [ONE]), epochs=2, hooks=(stop,))
    assert (state.step, state.stop, "record" in state.events) == (at, "enough", True)
    assert ends(state.history)[-1][0] == at
    assert state.history[-1].metrics["valid/loss"] == -at
    assert state.history[-1].closing is (at != 3)


def test_an_endless_stream_ends_with_a_record():
    def endless():
        while True:
            yield ONE

    assert ends(fit(loaders=(endless, [ONE]), steps=4).history) == [(4, -1.5, -4.0, True)]


@pytest.mark.parametrize("how", [press, terminate, raise_interrupt])
def test_an_interrupted_run_makes_no_record(how):
    assert (
        fl.fit(interrupting(2, how), toy(), (NUMBERS, [ONE]), epochs=1, hooks=()).history
        == fl.History()
    )


def test_a_closing_record_resets_nothing_and_stays_where_it_is():
    loaders = ([ONE] * 3, [ONE])
    part = fit(loaders=loaders, steps=2)
    assert part.metrics["loss"].compute() == -0.5
    assert fit(part, loaders, steps=2) is part
    state = fit(part, loaders, epochs=2)
    assert [(r.step, r.closing) for r in state.history] == [(2, True), (3, False), (6, False)]
    assert_same(state, fit(loaders=loaders, epochs=2))


def test_hooks_see_the_closing_record_at_the_target_and_flush_sees_that_of_a_stop():
    class Sees:
        def __init__(self):
            self.seen, self.flushed = [], []

        def __call__(self, state):
            self.seen.append(("record" in state.events, len(state.history)))
            return state

        def flush(self, state):
            self.flushed.append(("record" in state.events, len(state.history)))
            return state

    hook = Sees()
    fit(loaders=[ONE] * 5, steps=2, hooks=(hook,))
    assert (hook.seen, hook.flushed) == ([(False, 0), (True, 1)], [(True, 1)])
    hook = Sees()
    fit(
        loaders=[ONE] * 5,
        hooks=(hook, fl.when(lambda s: s.step == 2)(lambda s: attrs.evolve(s, stop="enough"))),
    )
    assert (hook.seen, hook.flushed) == ([(False, 0), (False, 0)], [(True, 1)])


@pytest.mark.parametrize("stops", [False, True], ids=["target", "stop"])
def test_an_evaluation_that_fails_at_the_end_of_a_run_loses_nothing(stops):
    loaders = ([ONE] * 5, failing_once(1))
    stop = fl.when(lambda state: stops and state.step == 2)(
        lambda state: attrs.evolve(state, stop="enough")
    )
    with pytest.raises(Boom) as caught:
        fit(loaders=loaders, steps=2 + stops, hooks=(stop,))
    state = caught.value.state
    assert (state.step, state.batch, state.model.w.item(), state.stop) == (
        2,
        2,
        -2.0,
        "enough" if stops else None,
    )
    if not stops:
        assert ends(fit(state, loaders, steps=2).history) == [(2, -0.5, -6.0, True)]  # of -4 and -8


def test_a_closing_record_says_so_in_tables_and_files(tmp_path):
    state = fit(loaders=[ONE] * 3, steps=2)
    (row,) = state.history.to_dicts()
    assert row == {
        "epoch": 0,
        "step": 2,
        "train/loss": -0.5,
        "seconds": row["seconds"],
        "closing": True,
    }
    assert fl.restore(fl.save(state, tmp_path / "a"), toy()).history == state.history
    assert all("closing" not in row for row in fit(loaders=[ONE] * 3).history.to_dicts())


def test_the_seconds_of_records_never_fall(monkeypatch):
    clock = iter([100.0, 109.0, 50.0, 60.0])
    monkeypatch.setattr("fnloop._loop.fit.time.monotonic", lambda: next(clock, 61.0))
    assert [r.seconds for r in fit(epochs=3).history] == [9.0, 9.0, 9.0]


def test_a_stop_iteration_in_a_dataset_does_not_end_the_epoch_quietly():
    class Short(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 2:
                raise StopIteration
            return torch.ones(1)

    with pytest.raises(RuntimeError, match="StopIteration"):
        fit(loaders=torch.utils.data.DataLoader(Short()))


# --- generators and modes


def test_the_callers_generators_are_given_back():
    problem = stochastic()
    loader = torch.utils.data.DataLoader(problem.batches, batch_size=None, shuffle=True)
    make = fl.pipeline()(problem.loss_fn)
    drawn = generators()
    for state in fl.run(make, problem.state(), (loader, loader), epochs=2, hooks=()):
        assert generators() == drawn
        list(fl.predict(lambda model, batch: torch.rand(1), state, loader))
        make.evaluate(state, problem.batches[0])
    assert generators() == drawn
    with pytest.raises(Boom):
        fl.fit(fl.pipeline()(raising(Boom())), toy(), NUMBERS, hooks=())
    assert generators() == drawn


def test_python_and_numpy_draws_resume_in_the_middle_of_an_epoch():
    def draws(model, batch):
        return (model.w * random.random() * np.random.rand() * torch.rand(())).mean(), {"weight": 1}

    make = fl.pipeline()(draws)
    whole = fl.fit(make, toy(), [ONE] * 5, epochs=2, hooks=())
    parts = fl.fit(make, toy(), [ONE] * 5, steps=2, hooks=())
    (
        random.random(),
        np.random.rand(),
        torch.rand(1),
    )  # what the caller draws in between doesn't matter
    parts = fl.fit(make, parts, [ONE] * 5, steps=7, hooks=())
    assert_same(whole, fl.fit(make, parts, [ONE] * 5, epochs=2, hooks=()))


def test_frozen_submodules_stay_in_evaluation_mode():
    problem = stochastic()
    state = problem.state()
    state.model[1].eval()
    before = state.model[1].running_mean.clone()
    state = fl.fit(
        fl.pipeline()(problem.loss_fn),
        state,
        (problem.batches, problem.batches),
        epochs=2,
        hooks=(),
    )
    assert torch.equal(state.model[1].running_mean, before)
    assert [m.training for m in state.model] == [True, False, True, True, True]


def test_a_model_in_evaluation_mode_as_a_whole_is_trained_in_training_mode(caplog):
    problem = stochastic()
    expected = fl.fit(fl.pipeline()(problem.loss_fn), problem.state(), problem.batches, hooks=())
    state = problem.state()
    state.model.eval()
    state = fl.fit(fl.pipeline()(problem.loss_fn), state, problem.batches, hooks=())
    assert "model.train()" in caplog.text
    assert_same(state, expected)


def test_pending_gradients_do_not_leak_into_a_run():
    state = toy()
    state.model.w.grad = torch.tensor(100.0)
    assert fit(state).model.w.item() == -3.0


def test_several_runs_in_one_process_do_not_talk_to_each_other():
    one, two = toy(), toy()
    runs = [fl.run(step, s, [ONE] * 3, epochs=2, hooks=()) for s in (one, two)]
    assert [s.model.w.item() for pair in zip(*runs, strict=True) for s in pair] == [
        -3.0,
        -3.0,
        -6.0,
        -6.0,
    ]


def test_a_parameter_that_only_the_loss_has_is_trained():
    scale = torch.nn.Parameter(torch.tensor(0.0))
    model = Toy()
    state = fl.TrainState.create(model, torch.optim.SGD([*model.parameters(), scale], lr=1.0))
    state = fl.fit(
        fl.pipeline(fl.clip(10.0))(lambda m, b: (m(b) + scale * 2).mean()),
        state,
        [ONE] * 3,
        hooks=(),
    )
    assert (scale.item(), scale.grad) == (-6.0, None)


def test_law_problems_are_reproducible():
    assert_same(small().state(), small().state())


def test_an_error_in_the_evaluation_loader_names_the_loader():
    def broken():
        yield torch.ones(1)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone") as caught:
        fl.fit(
            fl.pipeline()(toy_loss), toy(), {"train": [torch.ones(1)], "valid": broken}, hooks=()
        )
    assert caught.value.__notes__ == ["while in the valid loader, epoch 1, batch 1, step 1"]


def test_an_error_in_making_a_slot_has_a_note_and_the_state():
    def init(state):
        raise OSError("no slot")

    member = fl.Middleware("a", init=init)
    with pytest.raises(OSError, match="no slot") as caught:
        fl.fit(fl.pipeline(member)(toy_loss), toy(w=3.0), [torch.ones(1)], hooks=())
    assert caught.value.__notes__ == [
        "while in what a middleware keeps, train, epoch 1, batch 0, step 0"
    ]
    assert caught.value.state.model.w.item() == 3.0


def test_all_hooks_are_closed_whatever_goes_wrong_with_one():
    closed = []

    class Closes:
        def __init__(self, name):
            self.name = name

        def __call__(self, state):
            return state

        def close(self):
            closed.append(self.name)
            if self.name == "a":
                raise OSError("stuck")

    with pytest.raises(OSError, match="stuck"):
        fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=(Closes("a"), Closes("b")))
    assert closed == ["a", "b"]


# --- threads


def thread_of(task):
    """Return a thread that is at work, and a list with what it has raised."""
    raised = []

    def work():
        try:
            task()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, raised


def drawing_loss(model, batch):
    return (model.w * batch).mean() * random.random() * torch.rand(())


BORROWERS = {
    "fit": lambda: fl.fit(step, toy(), [ONE], hooks=()),
    "run": lambda: list(fl.run(step, toy(), [ONE], hooks=())),
    "evaluate": lambda: fl.evaluate(step, toy(), [ONE]),
    "predict": lambda: list(fl.predict(lambda model, batch: batch, toy(), [ONE])),
    "step.evaluate": lambda: step.evaluate(toy(), ONE),
}


@pytest.mark.parametrize("name", BORROWERS)
def test_while_one_thread_is_in_a_run_another_is_refused_and_neither_number_changes(name):
    entered, leave = threading.Event(), threading.Event()

    def hold(state):
        entered.set()
        assert leave.wait(10)
        return state

    def long_run():
        states.append(
            fl.fit(
                fl.pipeline()(drawing_loss),
                toy(),
                [ONE] * 4,
                epochs=2,
                hooks=(fl.every(epochs=1)(hold),),
            )
        )

    alone, states, before = (
        fl.fit(fl.pipeline()(drawing_loss), toy(), [ONE] * 4, epochs=2, hooks=()),
        [],
        generators(),
    )
    thread, raised = thread_of(long_run)
    assert entered.wait(10)
    with pytest.raises(
        RuntimeError,
        match=r"another thread of this process is inside one of them.*one after the other, or each in a process",
    ):
        BORROWERS[name]()
    leave.set()
    thread.join()
    assert raised == []
    assert_same(states[0], alone)
    assert generators() == before
    BORROWERS[name]()  # now it is free


def test_a_run_that_raises_lets_go():
    thread, raised = thread_of(
        lambda: fl.fit(fl.pipeline()(raising(Boom("x"), at=1.0)), toy(), [ONE], hooks=())
    )
    thread.join()
    assert isinstance(raised[0], Boom)
    fit()
    thread, raised = thread_of(fit)  # and one after the other, in threads of their own
    thread.join()
    assert raised == []


def test_another_thread_is_refused_between_two_epochs_of_a_fit_too():
    started, states = threading.Event(), []

    class Slow(list):
        """A loader that gives other threads a chance at every beginning of an epoch."""

        def __iter__(self):
            started.set()
            time.sleep(0.01)
            return super().__iter__()

    thread, raised = thread_of(
        lambda: states.append(fl.fit(step, toy(), Slow([ONE]), epochs=10, hooks=()))
    )
    assert started.wait(10)
    refused = 0
    while thread.is_alive() and not states:
        with contextlib.suppress(RuntimeError):
            fit()
            continue
        refused += 1
    thread.join()
    assert raised == [] and states[0].epoch == 10
    assert refused > 0


def test_nested_runs_and_interleaved_ones_of_one_thread_are_right():
    make = fl.pipeline()(drawing_loss)
    alone = [fl.fit(make, toy(w=w), [ONE] * 3, epochs=3, hooks=()) for w in (1.0, 2.0)]
    one, two = (fl.run(make, toy(w=w), [ONE] * 3, epochs=3, hooks=()) for w in (1.0, 2.0))
    for pair in zip(one, two, strict=True):
        fl.evaluate(make, pair[0], [ONE])
    for state, expected in zip(pair, alone, strict=True):
        assert_same(state, expected)

    def nested(state):
        fl.fit(make, toy(), [ONE], hooks=())
        return state

    assert_same(
        fl.fit(make, toy(w=1.0), [ONE] * 3, epochs=3, hooks=(fl.every(epochs=1)(nested),)), alone[0]
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_of_a_process_that_is_in_a_run_may_run_by_itself():
    def fork(state):
        if (child := os.fork()) == 0:
            status = 1
            try:
                thread, raised = thread_of(
                    fit
                )  # its own, and the one that was in a run is not there
                thread.join()
                status = len(raised)
            finally:
                os._exit(status)
        statuses.append(os.waitpid(child, 0)[1])
        return state

    statuses = []
    fit(hooks=(fl.once(fork),))
    assert statuses == [0]
