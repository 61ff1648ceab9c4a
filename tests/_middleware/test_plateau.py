"""The learning rate on a plateau: Keras's, torch's and ignite's cases, and a run of it."""

import math

import attrs
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

ONE = [torch.ones(1)]


def rates(values, *, members=(), first=False, state=None, **settings):
    """Return the rate of each epoch, whose evaluation gives the next of these values."""
    values = iter(values)
    losses = {"train": lambda model: model.w * 0, "valid": lambda model: model.w * 0 + next(values)}

    def loss_fn(model, batch):
        return losses["train" if model.training else "valid"](model)

    lowers = fl.plateau("valid/loss", **{"factor": 0.5, **settings})
    step = fl.pipeline(*((lowers, *members) if first else (*members, lowers)))(loss_fn)
    seen = []

    def note(state):
        seen.append(state.history[-1].metrics["train/lr"])
        return state

    with pytest.raises(StopIteration):
        fl.fit(step, state or toy(), {"train": ONE, "valid": ONE}, epochs=100, hooks=(note,))
    return seen


def test_the_rate_is_lowered_after_as_many_evaluations_as_patience():
    assert rates([1.0, 1.0, 1.0, 1.0, 1.0], patience=1) == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert rates([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], patience=2) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_an_improvement_begins_again_to_wait():
    values = [1.0, 1.0, 0.9, 0.9, 0.9]
    assert rates([*values, 0.9], patience=2) == [1.0] * 5 + [0.5]


def test_less_than_min_delta_is_not_an_improvement():
    assert rates([1.0, 0.95, 0.9], patience=1, min_delta=0.1) == [1.0, 1.0, 0.5]
    assert rates([1.0, 0.75, 0.5], patience=1, min_delta=0.1) == [1.0, 1.0, 1.0]


def test_a_metric_that_should_rise():
    assert rates([1.0, 2.0, 3.0, 3.0, 3.0], patience=1, mode="max") == [1.0] * 4 + [0.5]


def test_the_rate_stays_above_its_least():
    assert rates([1.0] * 6, patience=1, min_ratio=0.3) == [1.0, 1.0, 0.5, 0.3, 0.3, 0.3]


@pytest.mark.parametrize(
    ("cooldown", "expected"),
    [
        (0, [1, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (1, [1, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),  # the evaluation that ends it counts
        (2, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]),
        (3, [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]),
    ],
)
def test_cooldown_counts_as_in_keras(cooldown, expected):
    assert rates([1.0] * 7, patience=1, cooldown=cooldown) == expected


def by_keras(values, factor, patience, min_delta, cooldown):
    """The rates of Keras's ReduceLROnPlateau.on_epoch_end, line by line."""
    best, wait, resting, rate, found = math.inf, 0, 0, 1.0, []
    for value in values:
        found.append(rate)
        if resting > 0:
            resting, wait = resting - 1, 0
        if value < best - min_delta:
            best, wait = value, 0
        elif resting <= 0:
            wait += 1
            if wait >= patience:
                rate, resting, wait = rate * factor, cooldown, 0
    return found


@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize("cooldown", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_it_equals_keras(patience, cooldown, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 8, (30,), generator=generator).div(8).tolist()
    settings = {"patience": patience, "cooldown": cooldown, "min_delta": 0.125}
    assert rates(values, **settings) == by_keras(values, 0.5, **settings)


@pytest.mark.parametrize("threshold", [0.0, 0.25])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_it_equals_torch_whose_patience_is_one_less(patience, threshold):
    values = [1.0, 0.5, 0.5, 0.5, 0.75, 0.25, 0.125, 0.25, 0.25, 0.25, 0.5, 0.25]
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer, expected = torch.optim.SGD([parameter], lr=1.0), []
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=patience - 1, threshold=threshold, threshold_mode="abs"
    )
    for value in values:
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step(value)
    assert rates(values, patience=patience, min_delta=threshold) == expected


@pytest.mark.parametrize(
    ("values", "mode", "patience", "threshold", "after"),
    [
        (  # its test: an accuracy, which has to rise by more than 1.99
            *([3, 7, 7, 9, 10, 11, 8, 8, 4, 7], "max", 1, 1.99),
            [1, 1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.25],
        ),
        # its test, and its documentation: there the least gain is a tenth of the best value
        ([10, 9, 9, 9, 8.1], "min", 2, 1.0, [1, 1, 1, 0.5, 0.5]),
        ([10, 5, 3, 4, 4, 4, 5, 1], "min", 3, 0.3, [1, 1, 1, 1, 1, 1, 0.5, 0.5]),
    ],
)
def test_it_equals_ignite_whose_patience_is_one_less(values, mode, patience, threshold, after):
    settings = {"mode": mode, "patience": patience + 1, "min_delta": threshold}
    assert rates([*values, 0], **settings) == [1, *after]


LOSSES = (1.0, 0.5, 0.5, 0.75, 0.25, 0.25, 0.5, 0.5)  # of eight epochs


@pytest.mark.parametrize("kept", [None, "snapshot", "checkpoint"])
@pytest.mark.parametrize("split", range(1, 8))
@pytest.mark.parametrize("scheduled", [False, True])
def test_it_equals_torch_at_any_split_of_the_run(kept, split, scheduled, tmp_path):
    other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        other, factor=0.5, patience=1, threshold=0.0
    )
    after = [theirs.step(loss) or other.param_groups[0]["lr"] for loss in LOSSES]
    assert after == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]

    def loss_fn(model, batch):
        w = model.w * batch.sum()
        return w if model.training else w.detach() * 0 + LOSSES[running.epoch]

    def run(state, epochs):
        nonlocal running
        running = state
        for _ in range(epochs - state.epoch):
            running = fl.fit(step, running, loaders, epochs=running.epoch + 1, hooks=())
        return running

    running, loaders = toy(), {"train": ONE, "valid": ONE}
    lowers = fl.plateau("valid/loss", 0.5, patience=2, min_delta=0.0)
    members = (fl.schedule(lambda i, total: 0.5),) if scheduled else ()
    step = fl.pipeline(*members, lowers)(loss_fn)
    state = first = run(running, split)
    rate = first.optimizer.param_groups[0]["lr"]
    state = fl.snapshot(state) if kept == "snapshot" else state
    state = fl.restore(fl.save(state, tmp_path / "a"), toy()) if kept == "checkpoint" else state
    state = run(state, 8)
    expected = [rate * (0.5 if scheduled else 1) for rate in [1.0, *after[:-1]]]
    assert state.history["train/lr"] == tuple(expected)  # update i: after epoch i - 1
    assert state.model.w.item() == -sum(expected)
    if kept == "snapshot":  # the first branch keeps its own rate
        assert first.optimizer.param_groups[0]["lr"] == rate


# --- with others


@pytest.mark.parametrize("first", [True, False])
def test_it_multiplies_what_a_schedule_sets_in_either_order(first):
    halves = fl.schedule(lambda i, total: 1 / (i + 1))
    found = rates([1.0] * 4, patience=1, members=(halves,), first=first)
    assert found == [1.0, 1 / 2, 1 / 3 * 0.5, 1 / 4 * 0.25]


def test_every_group_of_every_optimizer_keeps_its_proportion():
    model = torch.nn.Linear(1, 1)
    named = {
        "a": torch.optim.SGD([model.weight], lr=4.0),
        "b": torch.optim.SGD([model.bias], lr=torch.tensor(2.0)),
    }
    state, step = (
        fl.TrainState.create(model, named),
        fl.pipeline(fl.plateau("train/loss", factor=0.5, patience=1, mode="max"))(
            lambda model, batch: -model.weight.sum() * 0
        ),
    )
    state = fl.fit(step, state, ONE, epochs=3, hooks=())
    assert state.history["train/lr/a"] == (4.0, 4.0, 2.0)
    assert state.history["train/lr/b"] == (2.0, 2.0, 1.0)


def test_a_resumed_run_continues_with_the_same_rate(tmp_path):
    def run(state, epochs):
        lowers = fl.plateau("train/loss", factor=0.5, patience=1, mode="max")
        return fl.fit(fl.pipeline(lowers)(toy_loss), state, ONE, epochs=epochs, hooks=())

    half = run(toy(), 4)
    resumed = run(fl.restore(fl.save(half, tmp_path / "half"), toy()), 8)
    assert_same(resumed, run(toy(), 8))
    assert resumed.history["train/lr"][-1] == 1 / 64


def test_a_phase_begins_without_it_unless_the_run_counts():
    def run(since):
        lowers = fl.plateau("train/loss", factor=0.5, patience=1, mode="max", since=since)
        step = fl.pipeline(lowers)(toy_loss)
        state = fl.fit(step, toy(), ONE, epochs=3, hooks=(), phase="a")
        return fl.fit(step, state, ONE, epochs=3, hooks=(), phase="b").history["train/lr"]

    assert run("phase") == (1.0, 1.0, 0.5) * 2
    assert run("run") == (1.0, 1.0, 0.5, 0.25, 0.125, 0.0625)


def test_closing_records_do_not_count():
    lowers = fl.plateau("train/loss", factor=0.5, patience=1, mode="max")
    step, state = fl.pipeline(lowers)(toy_loss), toy()
    for steps in (1, 2, 3, 4, 5, 6):  # each but the last ends between two epochs
        state = fl.fit(step, state, ONE * 2, steps=steps, hooks=())
    assert [r.metrics["train/lr"] for r in state.history if not r.closing] == [1.0, 1.0, 0.5]


def test_not_a_number_is_not_an_improvement():
    nan = math.nan
    assert rates([nan, nan, 1.0, nan, 1.0], patience=2) == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates([1.0, nan, nan], patience=1) == [1.0, 1.0, 0.5]


# --- what cannot be


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.plateau(3), TypeError, "key"),
        (lambda: fl.plateau("valid/thing"), ValueError, "mode"),
        (lambda: fl.plateau("valid/loss", 1.0), ValueError, "factor below 1"),
        (lambda: fl.plateau("valid/loss", 0), ValueError, "factor"),
        (lambda: fl.plateau("valid/loss", patience=0), ValueError, "patience"),
        (lambda: fl.plateau("valid/loss", min_ratio=2), ValueError, "min_ratio"),
        (lambda: fl.plateau("valid/loss", cooldown=-1), ValueError, "cooldown"),
        (lambda: fl.plateau("valid/loss", since="epoch"), ValueError, "since"),
        (
            lambda: fl.pipeline(fl.torch_scheduler(lambda o, r: None), fl.plateau("valid/loss")),
            ValueError,
            "use schedule with plateau",
        ),
    ],
)
def test_what_cannot_be_is_refused_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_metric_that_there_is_not_is_named():
    step = fl.pipeline(fl.plateau("train/los", mode="min"))(toy_loss)
    with pytest.raises(KeyError, match="Did you mean 'train/loss'"):
        fl.fit(step, toy(), ONE, epochs=2, hooks=())
    step = fl.pipeline(fl.plateau("valid/loss"))(toy_loss)
    with pytest.raises(KeyError, match="valid"):
        fl.fit(step, toy(), ONE, epochs=2, hooks=())


def test_nothing_of_it_is_left_in_the_groups_after_an_update():
    step = fl.pipeline(fl.plateau("train/loss"))(toy_loss)
    state, _ = step(toy(), torch.ones(1))
    assert "set_by_schedule_ratio" not in state.optimizer.param_groups[0]
    with pytest.raises(ZeroDivisionError):
        fl.pipeline(fl.plateau("train/loss"))(lambda m, b: 1 / 0 if m else m)(
            attrs.evolve(state), torch.ones(1)
        )
    assert "set_by_schedule_ratio" not in state.optimizer.param_groups[0]


@pytest.mark.parametrize("first", [fl.plateau("train/loss"), fl.accumulate(1)])
def test_after_a_scheduler_of_torch_it_multiplies_the_initial_rate(first):
    cycle = fl.torch_scheduler(lambda opt, run: OneCycleLR(opt, 0.5, total_steps=run.total_steps))
    lowers = fl.plateau("train/loss", factor=0.5, patience=1, mode="max")
    state = fl.fit(fl.pipeline(first)(toy_loss), toy(), ONE, epochs=1, hooks=(), phase="a")
    state = fl.fit(fl.pipeline(cycle)(toy_loss), state, ONE, epochs=3, hooks=(), phase="b")
    state = fl.fit(fl.pipeline(lowers)(toy_loss), state, ONE, epochs=3, hooks=(), phase="c")
    assert state.history["train/lr"][-3:] == (1.0, 1.0, 0.5)
