"""spike_guard: losses far above the median of the last ones, and where they were."""

import copy
import math

import attrs
import pytest
import torch
from torch.optim import lr_scheduler
from toy_runs import noting, of, xs

import fnloop as fl
from fnloop.testing import Toy, assert_same, toy

NAN = math.nan


def is_batch(model, batch):
    """The loss is the batch, and the gradient 1."""
    return model.w - model.w.detach() + batch.mean()


def halved(i, total):
    return 0.5**i


def fitted(losses, *members, state=None, **settings):
    step, settings = fl.pipeline(*members)(is_batch), {"epochs": 1, "hooks": (), **settings}
    return fl.fit(step, state or toy(), xs(*losses), **settings)


def where(state):
    return [(s["epoch"], s["batch"], s["step"], s["loss"]) for s in state.extra.get("spikes", ())]


def test_a_loss_above_ratio_times_the_median_is_left_out():
    state = fitted([1, 2, 3, 4, 4.5, 9], fl.spike_guard(3, 2.0))  # medians 2, 3, 4
    assert (state.step, state.skipped, where(state)) == (5, 1, [(0, 5, 5, 9.0)])
    assert state.model.w.item() == -5.0 and state.extra["spikes"][0]["median"] == 4.0
    assert state.history.latest("train/loss") == pytest.approx(2.9)


@pytest.mark.parametrize(("window", "losses", "spikes"), [
    (3, [1, 99, 1, 2.0], []),  # neither the limit itself nor the first updates
    (3, [1, 99, 1, 2.001], [2.001]),
    (2, [1, 3, 2.5], [2.5]),  # of an even number, the lower one of the middle counts
    (3, [1, 1, 1, 5, 5, 1.5, 1.5, 1.5, 2.5], [5.0, 5.0]),  # spikes are none of the last losses
    *((2, [-2, -2, loss], []) for loss in (-3.0, -1.5)),
    *((2, [-2, -2, loss], [loss]) for loss in (0.5, NAN)),
])  # fmt: skip
def test_which_losses_are_spikes(window, losses, spikes):
    state = fitted(losses, fl.spike_guard(window, 2.0))
    assert [spike[-1] for spike in where(state)] == pytest.approx(spikes, nan_ok=True)
    assert (state.step, state.skipped) == (len(losses) - len(spikes), len(spikes))


DECAYS = fl.torch_scheduler(lambda o, run: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)))
AROUND = fl.ema(0.5), fl.clip(0.5), fl.schedule(fl.schedules.linear())
LOSSES = [1, 1.1, 1.2, 1.3, 1.4, 9, 1.5, 1.6, 1.7]


@pytest.mark.parametrize(("members", "guard", "without"), [
    (AROUND, fl.spike_guard(4), LOSSES[:5] + LOSSES[6:]),
    (AROUND, fl.spike_guard(4, then="back"), LOSSES[:4] + LOSSES[6:]),
    ((fl.swa(1, every=1), DECAYS), fl.spike_guard(4, then="back"), LOSSES[:4] + LOSSES[6:]),
], ids=["out", "back", "back with slots"])  # fmt: skip
def test_it_equals_the_run_without_these_batches(members, guard, without):
    new = lambda: of(Toy(), torch.optim.AdamW, lr=0.1)
    one = fitted(LOSSES, *members, guard, steps=7, state=new())
    two = fitted(without, *members, steps=7, state=new())
    assert (one.step, two.step, two.skipped) == (7, 7, 0)
    assert one.skipped == len(LOSSES) - len(without)
    same = ("batch", "epoch", "samples", "history")
    one = attrs.evolve(one, skipped=0, **{name: getattr(two, name) for name in same})
    assert_same(attrs.evolve(one, slots={name: one.slots[name] for name in two.slots}), two)


@pytest.mark.parametrize(("then", "losses", "reached", "stop"), [
    ("stop", [1, 1, 1, 5, 1, 1], (3, 1, 4), "the loss 5 is above 2 times 1, the median"),
    ("skip", [1, 1, 5, 1, 5, 5, 1, 1], (3, 3, 6),
        "2 updates in a row had a loss above 2 times the median"),
    ("back", [1, 1, *[9] * 12], (2, 10, 12), "it went back to step 2 10 times"),
])  # fmt: skip
def test_the_run_ends_and_may_be_continued(then, losses, reached, stop):
    guard = fl.spike_guard(2, 2.0, then=then)
    state = fitted(losses, guard)
    assert (state.step, state.skipped, state.batch) == reached
    assert state.stop == f"spike_guard: {stop}"
    state = fitted(losses, guard, state=attrs.evolve(state, stop=None))
    assert state.step + state.skipped == len(losses) and (state.epoch, state.stop) == (1, None)


@pytest.mark.parametrize(("window", "spikes"), [(2, [6.0]), (4, [])])
def test_another_window_after_a_restart_takes_the_newest_losses(window, spikes):
    state = fitted([9, 9, 1, 1, 1], fl.spike_guard(3))
    state = fitted([6], fl.spike_guard(window), state=state, epochs=2)
    assert [s[-1] for s in where(state)] == spikes


def test_of_a_window_of_batches_the_mean_counts():
    state = fitted([1, 1, 1, 5, 9, 1], fl.accumulate(2), fl.spike_guard(2, 2.0))
    assert where(state) == [(0, 4, 2, 5.0)]  # the means are 1, 3 and 5
    state = fitted([1, 1, 1, 5, 9, 1], fl.spike_guard(1, 2.0), fl.accumulate(2))
    assert where(state) == [(0, 2, 1, 3.0)] and state.stop.startswith("spike_guard: 1 update in")


def test_buffers_and_state_that_came_after_the_snapshot_go_back():
    """The third batch is the first that trains the bias, and the fourth is a spike."""

    def loss_fn(model, batch):
        size = batch.mean()
        return (model(batch.expand(2, 1)).mean() if size > 1 else model[1].weight.sum()) * 0 + size

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
    step = fl.pipeline(fl.spike_guard(2, then="back"))(loss_fn)
    state = fl.fit(step, of(model, lr=0.1, momentum=0.9), xs(1, 1, 1.5, 9), hooks=())
    assert (state.step, state.skipped) == (2, 2)
    assert state.model[0].running_mean.item() == 0.0 and state.model[0].num_batches_tracked == 0
    assert {*state.optimizer.state} == {state.model[1].weight}


@pytest.mark.parametrize(("window", "losses", "steps", "spikes"), [
    (2, [1, 1, 1, 1, 1, 9, 1, 1], 6, [9.0]),  # snapshots of 2 and 4; the fifth is undone
    (3, [1, 1, 1, 1.8, 1.8, 9, 3], 3, [9.0, 3.0]),  # 3 is not above twice 1.8
    (2, [1, 1, 1, 9, 1, 9], 2, [9.0, 9.0]),  # one update after a return makes no snapshot
    (2, [1, 1, *[9] * 9, 1, 1, *[9] * 9], 4, [9.0] * 18),  # a new one may be used as often
])  # fmt: skip
def test_the_median_and_the_count_are_those_of_the_snapshot(window, losses, steps, spikes):
    state = fitted(losses, fl.spike_guard(window, 2.0, then="back"))
    assert (state.step, state.step + state.skipped) == (steps, len(losses))
    assert [spike[-1] for spike in where(state)] == spikes
    assert (state.model.w.item(), state.epoch, state.stop) == (-steps, 1, None)


def test_the_model_and_the_optimizer_stay_the_same_objects():
    moments_of = lambda state: [*state.optimizer.state[state.model.w].values()]
    state = of(Toy(), torch.optim.AdamW, lr=0.1)
    model, optimizer = state.model, state.optimizer
    note, moments = noting(moments_of)
    guard = fl.spike_guard(2, then="back")
    state = fitted([1, 1, 1, 9, 1], guard, state=state, hooks=(note,))
    assert state.model is model and state.optimizer is optimizer and state.skipped == 2
    assert [*map(id, moments[0])] == [*map(id, moments_of(state))]


def test_a_snapshot_of_other_parameters_is_not_gone_back_to():
    guard = fl.spike_guard(2, then="back")
    state = fitted([1, 1], guard, state=toy())
    state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(()))]})
    with pytest.raises(ValueError, match="the snapshot is of a state with other parameters"):
        fitted([9], guard, state=state, epochs=2)


def test_nor_one_of_parameters_of_another_shape():
    """A weight of one element would go into each of two."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(1))
    loss_fn = lambda model, batch: (model.w - model.w.detach()).sum() + batch.mean()

    def lengthen(state):
        if state.step == 2:
            model.w = torch.nn.Parameter(torch.zeros(2))
            state.optimizer.param_groups[0]["params"] = [model.w]
        return state

    step = fl.pipeline(fl.spike_guard(2, then="back"))(loss_fn)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="the snapshot is of a state with other parameters"):
        fl.fit(step, state, xs(1, 1, 9), hooks=(lengthen,))


def test_the_best_weights_since_the_snapshot_are_kept():
    """w is -1, -2, -3, then -2 again: of |w + 3|, the best is that of -3."""
    loss_fn = lambda model, batch: is_batch(model, batch) if model.training else (model.w + 3).abs()
    step = fl.pipeline(fl.spike_guard(2, then="back"))(loss_fn)
    given = {"hooks": (fl.restore_best("valid/loss"),), "evaluate_every": fl.every(steps=1)}
    state = fl.fit(step, toy(), (xs(1, 1, 1, 9), xs(1)), **given)
    assert (state.step, state.skipped) == (2, 2)
    assert state.history["valid/loss"][:3] == (2.0, 1.0, 0.0)
    assert state.model.w.item() == -3.0


def test_updates_left_out_of_an_epoch_are_still_counted():
    """Two of four are, in two epochs; the snapshot is of between, and a spike follows in each."""
    ended = fl.when(lambda s: s.epoch < 2 and s.batch == 2)(lambda s: attrs.evolve(s, ends="epoch"))
    state = fitted([1, 9, 1, 1], fl.spike_guard(3, then="back"), epochs=3, hooks=(ended,))
    assert [(s["epoch"], s["step"]) for s in state.extra["spikes"]] == [(1, 3), (2, 4)]
    assert state.slots["ends"] == 4


def test_a_phase_goes_back_no_further_than_to_its_beginning():
    members = (fl.spike_guard(2, then="back"), fl.schedule(lambda i, total: (1.0, 0.5, 0.25)[i]))
    first = fitted([1, 1, 1], *members[:1], phase="a")  # a snapshot after its second update
    state = fitted([1, 9, 1], *members, state=first, phase="b")
    assert (state.step, state.skipped) == (4, 2)  # 3, then 4, back to 3, and 4
    assert state.model.w.item() == -4.0  # each update of b is its first, with a rate of 1


@pytest.mark.parametrize("guard_at", [0, 1, 2])
@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("members", [
    [fl.schedule(fl.schedules.exponential(0.5))],
    [fl.plateau("train/loss", factor=0.5, patience=1)],
    [fl.plateau("train/loss", factor=0.5, patience=1, since="run"), fl.schedule(halved)],
    [fl.schedule(halved), fl.schedule(halved, field="momentum")],
    [fl.torch_scheduler(lambda o, run: lr_scheduler.ExponentialLR(o, 0.5))],
], ids=repr)  # fmt: skip
def test_rates_go_back_in_a_later_phase_in_every_order(members, guard_at, rate):
    """Phase b goes back to its beginning: it equals one whose loader lacks the first batches."""
    guarded = [*members[:guard_at], fl.spike_guard(3, then="back"), *members[guard_at:]]

    def trained(members, b):
        model = toy().model
        optimizer = torch.optim.SGD(model.parameters(), lr=copy.deepcopy(rate), momentum=0.5)
        state = fl.TrainState.create(model, optimizer, seed=0)
        for name, losses in {"a": [1, 1, 1, 1], "b": b, "c": [1, 1]}.items():
            state = fitted(losses, *members, state=state, phase=name)
        return state

    one = trained(guarded, [1, 1, 9, 1, 1])
    two = trained(members, [1, 1])
    assert (one.step, one.skipped) == (8, 3) and (two.step, two.skipped) == (8, 0)
    assert one.model.w.item() == two.model.w.item()
    assert str(one.optimizer.state_dict()) == str(two.optimizer.state_dict())


def test_going_back_does_not_turn_back_the_clock_of_a_time_limit(clock):
    """The evaluation after it fails, before the hook is called again."""
    loss_fn = lambda model, batch: is_batch(model, batch) if model.training else 1 / 0
    step = fl.pipeline(fl.spike_guard(window=2, then="back"))(clock.timed(loss_fn, 10.0))
    with pytest.raises(ZeroDivisionError) as raised:
        loaders = xs(1, 1, 1, 9), xs(1)
        fl.fit(step, toy(), loaders, hooks=(fl.time_limit(seconds=100),))
    assert raised.value.state.slots["time_limit"] == [30.0]
