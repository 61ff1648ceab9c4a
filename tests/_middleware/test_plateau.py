"""The learning rate on a plateau: Keras's, torch's and ignite's cases, and a run of it."""

import math

import pytest
import torch
from torch.optim import lr_scheduler
from toy_runs import ONE, fitted, noting

import fnloop as fl
from fnloop.testing import toy_loss


def lowers(**settings):
    """Return one that halves the rate after each epoch but the first: the loss falls."""
    return fl.plateau("train/loss", factor=0.5, patience=1, mode="max", **settings)


def rates(values, *, members=(), first=False, **settings):
    """Return the rate of each epoch, whose evaluation gives the next of these values."""
    values = iter(values)

    def loss_fn(model, batch):
        return model.w * 0 if model.training else model.w * 0 + float(next(values))

    members = [*members, fl.plateau("valid/loss", **{"factor": 0.5, **settings})]
    note, seen = noting(lambda state: state.history[-1].metrics["train/lr"])
    with pytest.raises(StopIteration):
        loaders, members = {"train": [ONE], "valid": [ONE]}, members[:: -1 if first else 1]
        fitted(loaders, *members, loss_fn=loss_fn, epochs=100, hooks=(note,))
    return seen


NAN = math.nan


@pytest.mark.parametrize(("values", "settings", "expected"), [
    ([1, 0.95, 0.9], {"min_delta": 0.1}, [1, 1, 0.5]),
    ([1, 2, 3, 3.05, 3], {"mode": "max", "min_delta": 0.1}, [1, 1, 1, 1, 0.5]),
    ([1] * 6, {"min_ratio": 0.3}, [1, 1, 0.5, 0.3, 0.3, 0.3]),
    # NaN does not count as an improvement.
    ([NAN, NAN, 1, NAN, 1], {"patience": 2}, [1, 1, 1, 1, 1]),
    ([1, NAN, NAN], {}, [1, 1, 0.5]),
    # A test of ignite, whose patience is one less.
    ([3, 7, 7, 9, 10, 11, 8, 8, 4, 7, 0], {"mode": "max", "patience": 2, "min_delta": 1.99},
        [1] * 8 + [0.5, 0.5, 0.25]),
])  # fmt: skip
def test_the_rate_of_each_epoch(values, settings, expected):
    assert rates(values, **{"patience": 1, **settings}) == expected


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


@pytest.mark.parametrize("first", [True, False])
def test_it_multiplies_what_a_schedule_sets_in_either_order(first):
    halves = fl.schedule(lambda i, total: 1 / (i + 1))
    found = rates([1.0] * 4, patience=1, members=(halves,), first=first)
    assert found == [1.0, 1 / 2, 1 / 3 * 0.5, 1 / 4 * 0.25]


def test_every_group_of_every_optimizer_keeps_its_proportion():
    model = torch.nn.Linear(1, 1)
    a = torch.optim.SGD([model.weight], lr=4.0)
    b = torch.optim.SGD([model.bias], lr=torch.tensor(2.0))
    state, loss_fn = fl.TrainState.create(model, {"a": a, "b": b}), lambda m, b: m.weight.sum() * 0
    state = fitted([1], lowers(), loss_fn=loss_fn, state=state, epochs=3)
    assert state.history["train/lr/a"] == (4.0, 4.0, 2.0)
    assert state.history["train/lr/b"] == (2.0, 2.0, 1.0)


@pytest.mark.parametrize(("since", "expected"), [
    ("phase", (1.0, 1.0, 0.5) * 2), ("run", (1.0, 1.0, 0.5, 0.25, 0.125, 0.0625)),
])  # fmt: skip
def test_a_phase_begins_without_it_unless_the_run_counts(since, expected):
    state = fitted([1], lowers(since=since), epochs=3, phase="a")
    state = fitted([1], lowers(since=since), state=state, epochs=3, phase="b")
    assert state.history["train/lr"] == expected


def test_closing_records_do_not_count():
    state = None
    for steps in (1, 2, 3, 4, 5, 6):  # each but the last ends between two epochs
        state = fitted([1, 1], lowers(), state=state, steps=steps)
    assert [r.metrics["train/lr"] for r in state.history if not r.closing] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(("key", "said"), [
    ("train/los", "Did you mean 'train/loss'"), ("valid/loss", "valid"),
])  # fmt: skip
def test_a_metric_that_there_is_not_is_named(key, said):
    with pytest.raises(KeyError, match=said):
        fitted([1], fl.plateau(key, mode="min"), epochs=2)


def test_nothing_of_it_is_left_in_the_groups_after_an_update():
    state = fitted([1], fl.plateau("train/loss"))
    assert "set_by_schedule_ratio" not in state.optimizer.param_groups[0]
    with pytest.raises(ZeroDivisionError):
        fl.pipeline(fl.plateau("train/loss"))(lambda model, batch: 1 / 0)(state, ONE)
    assert "set_by_schedule_ratio" not in state.optimizer.param_groups[0]


def test_a_skipped_update_leaves_the_rate_as_it_was():
    """The third update would be made with half of it."""
    updates = iter((toy_loss, toy_loss, lambda model, batch: fl.skip("no")))
    loss_fn = lambda model, batch: next(updates)(model, batch)
    state = fitted([1], lowers(), loss_fn=loss_fn, epochs=3)
    assert (state.skipped, state.optimizer.param_groups[0]["lr"]) == (1, 1.0)


@pytest.mark.parametrize("first", [fl.plateau("train/loss"), fl.accumulate(1)])
def test_after_a_scheduler_of_torch_it_multiplies_the_initial_rate(first):
    cycle = lambda opt, run: lr_scheduler.OneCycleLR(opt, 0.5, total_steps=run.total_steps)
    state = fitted([1], first, phase="a")
    state = fitted([1], fl.torch_scheduler(cycle), state=state, epochs=3, phase="b")
    state = fitted([1], lowers(), state=state, epochs=3, phase="c")
    assert state.history["train/lr"][-3:] == (1.0, 1.0, 0.5)
