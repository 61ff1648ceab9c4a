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


@pytest.mark.parametrize(("values", "settings", "expected"), [
    # 10 % of 1 is 0.1, and 0.95 does not improve on it. Of 100 it is 10.
    ([1, 0.95, 0.9], {"min_delta": 0.1, "relative": True}, [1, 1, 0.5]),
    ([100, 95, 89, 81], {"min_delta": 0.1, "relative": True}, [1, 1, 0.5, 0.5]),
    # A share of the magnitude: -0.95 is not above -1 + 0.1.
    ([-1, -0.95, -0.85], {"min_delta": 0.1, "relative": True, "mode": "max"}, [1, 1, 0.5]),
    ([math.inf, math.inf, math.inf, 1], {"relative": True}, [1, 1, 0.5, 0.25]),
    ([-math.inf, 1, 1], {"relative": True}, [1, 1, 0.5]),
    ([1] * 5, {"min_value": 0.3}, [1, 1, 0.5, 0.3, 0.3]),
    ([1] * 4, {"min_value": 0.3, "min_ratio": 0.4}, [1, 1, 0.5, 0.4]),  # whichever is higher
])  # fmt: skip
def test_shares_and_the_lowest_rate(values, settings, expected):
    assert rates(values, **{"patience": 1, **settings}) == expected


def test_the_lowest_rate_does_not_raise_what_a_warm_up_sets():
    """Rates of 0.1, 0.2, 0.6 and 0.8 without plateau, which halves from the third on."""
    warm_up = fl.schedule(lambda i, total: (0.1, 0.2, 0.6, 0.8)[i % 4])
    found = rates([1.0] * 4, patience=1, min_value=0.3, members=(warm_up,))
    assert found == [0.1, 0.2, 0.3, 0.3]


@pytest.mark.parametrize("capturable", [False, True])
def test_the_lowest_rate_of_a_rate_on_the_device(capturable):
    rate = torch.tensor(1.0) if capturable else 1.0
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=rate))
    loss_fn = lambda model, batch: model.weight.sum() * 0
    lowest = lowers(min_value=0.4)
    state = fitted([1], lowest, loss_fn=loss_fn, state=state, epochs=4)
    assert state.history["train/lr"] == pytest.approx((1.0, 1.0, 0.5, 0.4))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("patience", "cooldown"), [(0, 0), (1, 0), (2, 1), (0, 3)])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_it_equals_torch(mode, patience, cooldown, seed):
    """Its patience and its cooldown are one less."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.rand(30, generator=generator) + 0.5).tolist()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    given = {"factor": 0.5, "threshold": 0.05, "min_lr": 0.1, "eps": 0.0}
    theirs = lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, patience=patience, cooldown=cooldown, **given
    )
    expected = []
    for value in values:
        expected.append(optimizer.param_groups[0]["lr"])
        theirs.step(value)
    ours = {"patience": patience + 1, "cooldown": cooldown + 1, "min_delta": 0.05}
    found = rates(values, mode=mode, relative=True, min_value=0.1, **ours)
    assert found == pytest.approx(expected, rel=1e-12)
    assert len({*expected}) > 2  # it was lowered more than once


# --- for some groups


def in_groups(*, two=False):
    """A model whose weight is in the group "body", and whose bias is in the group "head"."""
    model = torch.nn.Linear(1, 1)
    body, head = (
        {"params": [model.weight], "name": "body"},
        {"params": [model.bias], "name": "head"},
    )
    sgd = torch.optim.SGD
    given = {"a": sgd([body], lr=1.0), "b": sgd([head], lr=1.0)} if two else sgd([body, head], 1.0)
    return fl.TrainState.create(model, given)


def zero(model, batch):
    return (model.weight + model.bias).sum() * 0


@pytest.mark.parametrize("two", [False, True])
def test_it_lowers_the_groups_that_are_named(two):
    state = fitted([1], lowers(only="head"), loss_fn=zero, state=in_groups(two=two), epochs=3)
    names = ("train/lr/a/body", "train/lr/b/head") if two else ("train/lr/body", "train/lr/head")
    assert [state.history[name] for name in names] == [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5)]


def test_two_of_them_lower_different_groups():
    quick = fl.plateau("train/loss", factor=0.1, patience=1, mode="max", only=["body"])
    step = (lowers(only="head"), quick)
    state = fitted([1], *step, loss_fn=zero, state=in_groups(), epochs=3)
    assert state.history["train/lr/body"] == (1.0, 1.0, 0.1)
    assert state.history["train/lr/head"] == (1.0, 1.0, 0.5)


@pytest.mark.parametrize(("members", "said"), [
    ((lowers(only="head"), lowers(only=("body", "head"))), "both lower lr of one optimizer"),
    ((lowers(only="head"), fl.plateau("train/loss")), "both lower lr of one optimizer"),
    ((fl.torch_scheduler(lambda opt, run: None, only="head"), lowers()), "use schedule with plat"),
])  # fmt: skip
def test_what_would_act_twice_on_a_group_is_refused_when_composing(members, said):
    with pytest.raises(ValueError, match=said):
        fl.pipeline(*members)


def test_a_group_that_one_names_and_its_optimizer_the_other_is_refused_when_a_run_starts():
    step = fl.pipeline(lowers(only="b"), lowers(only="head"))(zero)
    with pytest.raises(ValueError, match="both lower lr of one parameter group"):
        fl.fit(step, in_groups(two=True), [1], epochs=1, hooks=())


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
