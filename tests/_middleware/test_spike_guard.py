"""spike_guard: losses far above the median of the last ones, and where they were."""

import copy
import functools
import math

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, toy

NAN = math.nan


def is_batch(model, batch):
    """The loss is the batch, and the gradient 1."""
    return model.w - model.w.detach() + batch.mean()


def halved(i, total):
    return 0.5**i


def fitted(losses, *members, state=None, **settings):
    batches = [torch.tensor([float(x)]) for x in losses]
    step = fl.pipeline(*members)(is_batch)
    settings = {"epochs": 1, "hooks": (), **settings}
    return fl.fit(step, state or toy(lr=1.0), batches, **settings)


def where(state):
    return [(s["epoch"], s["batch"], s["step"], s["loss"]) for s in state.extra.get("spikes", ())]


def test_a_loss_above_ratio_times_the_median_is_left_out():
    state = fitted([1, 2, 3, 4, 4.5, 9], fl.spike_guard(3, 2.0))  # medians 2, 3, 4
    assert (state.step, state.skipped, where(state)) == (5, 1, [(0, 5, 5, 9.0)])
    assert state.model.w.item() == -5.0 and state.extra["spikes"][0]["median"] == 4.0
    assert state.history.latest("train/loss") == pytest.approx(2.9)


def test_the_limit_itself_is_not_a_spike_and_the_first_updates_are_not():
    assert fitted([1, 99, 1, 2.0], fl.spike_guard(3, 2.0)).skipped == 0
    assert fitted([1, 99, 1, 2.001], fl.spike_guard(3, 2.0)).skipped == 1


def test_of_an_even_number_the_lower_one_of_the_middle_counts():
    assert where(fitted([1, 3, 2.5], fl.spike_guard(2, 2.0))) == [(0, 2, 2, 2.5)]


def test_a_spike_does_not_become_one_of_the_last_losses():
    state = fitted([1, 1, 1, 5, 5, 1.5, 1.5, 1.5, 2.5], fl.spike_guard(3, 2.0))
    assert [s[-1] for s in where(state)] == [5.0, 5.0] and state.step == 7


@pytest.mark.parametrize(("loss", "skipped"), [(-3.0, 0), (-1.5, 0), (0.5, 1), (NAN, 1)])
def test_losses_may_be_negative(loss, skipped):
    assert fitted([-2, -2, loss], fl.spike_guard(2, 2.0)).skipped == skipped


def test_it_equals_the_run_without_these_batches():
    losses = [1, 1, 1, 7, 1.1, 1.2, 9, 1]
    members = (fl.ema(0.5), fl.clip(0.5), fl.schedule(fl.schedules.linear()))
    one = fitted(losses, *members, fl.spike_guard(2), steps=6)
    two = fitted([x for x in losses if x < 7], *members, steps=6)
    assert torch.equal(one.model.w, two.model.w) and one.step == two.step == 6
    assert torch.equal(one.slots["ema"]["w"], two.slots["ema"]["w"])
    assert one.history["train/loss"] == two.history["train/loss"]


def test_with_stop_the_run_ends_there_and_may_be_continued():
    guard, losses = fl.spike_guard(2, 2.0, then="stop"), [1, 1, 1, 5, 1, 1]
    state = fitted(losses, guard)
    assert (state.step, state.batch, where(state)) == (3, 4, [(0, 3, 3, 5.0)])
    assert state.stop == "spike_guard: the loss 5 is above 2 times 1, the median"
    state = fitted(losses, guard, state=attrs.evolve(state, stop=None))
    assert (state.step, state.epoch, state.stop) == (5, 1, None)


def test_a_whole_window_of_spikes_stops_the_run():
    state = fitted([1, 1, 5, 1, 5, 5, 5, 5], fl.spike_guard(2, 2.0))
    assert (state.skipped, state.batch) == (3, 6)
    assert state.stop == "spike_guard: 2 updates in a row had a loss above 2 times the median"


def test_a_restart_continues_with_the_same_losses(tmp_path):
    losses, guard = [1, 1, 1, 7, 1.1, 9, 1.2, 1.3], fl.spike_guard(3, 2.0)
    pause = fl.when(lambda s: s.step + s.skipped == 4)(lambda s: attrs.evolve(s, stop="pause"))
    state = fitted(losses, guard, hooks=(pause,), epochs=2)
    path = fl.save(attrs.evolve(state, stop=None), tmp_path / "a")
    resumed = fitted(losses, guard, state=fl.restore(path, toy(lr=1.0)), epochs=2)
    whole = fitted(losses, guard, epochs=2, state=toy(lr=1.0))
    assert where(resumed) == where(whole) and len(where(whole)) == 4
    assert torch.equal(resumed.model.w, whole.model.w)


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


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"window": 0}, ValueError, "window as an int >= 1"),
        ({"window": 1.5}, TypeError, "window as an int"),
        ({"ratio": 1}, ValueError, "ratio > 1"),
        ({"ratio": "2"}, TypeError, "ratio as a number > 1"),
        ({"then": "wait"}, ValueError, "then"),
    ],
)
def test_settings_are_checked(settings, error, match):
    with pytest.raises(error, match=f"spike_guard expects {match}"):
        fl.spike_guard(**settings)


@pytest.mark.parametrize("guard_first", [True, False])
def test_where_it_would_not_see_whole_updates_it_is_refused(guard_first):
    inside = [fl.clip(1.0), fl.spike_guard()]
    with pytest.raises(ValueError, match=r"spike_guard\(\) judges whole updates"):
        fl.pipeline(*inside[:: -1 if guard_first else 1], fl.accumulate(2))


def test_two_runs_of_one_step_do_not_share_losses():
    step = fl.pipeline(fl.spike_guard(2))(is_batch)
    batches = [torch.tensor([x]) for x in (1.0, 1.0, 9.0)]
    one = fl.fit(step, toy(), batches, hooks=())
    assert_same(one, fl.fit(step, toy(), batches, hooks=()))


# --- then="back"


def test_it_goes_back_to_a_snapshot_and_trains_on_other_data():
    """A snapshot after every second update, so after the fourth; the fifth is undone."""
    state = fitted([1, 1, 1, 1, 1, 9, 1, 1], fl.spike_guard(2, 2.0, then="back"))
    assert where(state) == [(0, 5, 5, 9.0)]
    assert (state.step, state.skipped, state.model.w.item()) == (6, 2, -6.0)
    assert state.epoch == 1 and state.stop is None


def test_it_equals_the_run_without_the_batches_since_the_snapshot():
    losses = [1, 1.1, 1.2, 1.3, 1.4, 9, 1.5, 1.6, 1.7]
    members = (fl.ema(0.5), fl.clip(0.5), fl.schedule(fl.schedules.linear()))
    new = functools.partial(updated_by, torch.optim.AdamW)
    one = fitted(losses, *members, fl.spike_guard(4, then="back"), steps=7, state=new())
    two = fitted(losses[:4] + losses[6:], *members, steps=7, state=new())
    assert (one.step, one.skipped, two.step, two.skipped) == (7, 2, 7, 0)
    assert torch.equal(one.model.w, two.model.w)
    assert torch.equal(one.slots["ema"]["w"], two.slots["ema"]["w"])
    assert str(one.optimizer.state_dict()) == str(two.optimizer.state_dict())


@pytest.mark.parametrize(
    "members",
    [
        (fl.swa(1, every=1),),
        (
            fl.torch_scheduler(
                lambda o, run: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1))
            ),
        ),
    ],
    ids=repr,
)
def test_a_slot_and_the_settings_go_back_too(members):
    losses = [1, 1.1, 1.2, 1.3, 1.4, 9, 1.5, 1.6, 1.7]
    one = fitted(losses, *members, fl.spike_guard(4, then="back"), steps=7)
    two = fitted(losses[:4] + losses[6:], *members, steps=7)
    name = members[0].name
    assert one.model.w.item() == two.model.w.item()
    assert one.optimizer.param_groups[0]["lr"] == two.optimizer.param_groups[0]["lr"]
    if name == "swa":
        assert torch.equal(one.slots["swa"]["w"], two.slots["swa"]["w"])
        assert one.slots["swa"].count == two.slots["swa"].count


def test_buffers_and_state_that_came_after_the_snapshot_go_back():
    """The third batch is the first that trains the bias, and the fourth is a spike."""

    def loss_fn(model, batch):
        size = batch.mean()
        return (model(batch.expand(2, 1)).mean() if size > 1 else model[1].weight.sum()) * 0 + size

    def new():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return fl.TrainState.create(model, optimizer, seed=0)

    batches = [torch.tensor([x]) for x in (1.0, 1.0, 1.5, 9.0)]
    step = fl.pipeline(fl.spike_guard(2, then="back"))(loss_fn)
    state = fl.fit(step, new(), batches, hooks=())
    assert (state.step, state.skipped) == (2, 2)
    assert state.model[0].running_mean.item() == 0.0 and state.model[0].num_batches_tracked == 0
    assert {*state.optimizer.state} == {state.model[1].weight}


def test_the_median_and_the_count_are_those_of_the_snapshot():
    state = fitted([1, 1, 1, 1.8, 1.8, 9, 3], fl.spike_guard(3, then="back"))
    assert [s[-1] for s in where(state)] == [9.0, 3.0]  # 3 is not above twice 1.8
    state = fitted([1, 1, 1, 9, 1, 9], fl.spike_guard(2, then="back"))
    assert (state.step, state.skipped) == (2, 4)  # one update after a return makes no snapshot


def test_a_new_snapshot_may_be_gone_back_to_as_often():
    state = fitted([1, 1, *[9] * 9, 1, 1, *[9] * 9], fl.spike_guard(2, then="back"))
    assert (state.step, state.skipped, state.stop) == (4, 18, None)


def updated_by(make):
    model = toy().model
    return fl.TrainState.create(model, make(model.parameters(), lr=0.1), seed=0)


def test_the_model_and_the_optimizer_stay_the_same_objects():
    state = updated_by(torch.optim.AdamW)
    model, optimizer = state.model, state.optimizer
    moments = []
    note = fl.when(lambda s: s.step == 1)(lambda s: moments.extend(moments_of(s)) or s)
    guard, losses = fl.spike_guard(2, then="back"), [1, 1, 1, 9, 1]
    state = fitted(losses, guard, state=state, hooks=(note,))
    assert state.model is model and state.optimizer is optimizer and state.skipped == 2
    assert [*map(id, moments)] == [*map(id, moments_of(state))]


def moments_of(state):
    return state.optimizer.state[state.model.w].values()


@pytest.mark.parametrize("pause", range(1, 9))
def test_a_restart_at_any_update_goes_back_to_the_same_snapshot(pause, tmp_path):
    losses = [1, 1.1, 1.2, 1.3, 1.4, 9, 1.5, 1.6, 9]
    scheduler = fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.StepLR(o, 2))
    step = (fl.ema(0.5), scheduler, fl.spike_guard(2, then="back"))
    new = functools.partial(updated_by, torch.optim.AdamW)

    def halt(state):
        done = state.step + state.skipped == pause
        return attrs.evolve(state, stop="pause") if done else state

    whole = fitted(losses, *step, state=new(), epochs=2)
    state = fitted(losses, *step, state=new(), epochs=2, hooks=(halt,))
    path = fl.save(attrs.evolve(state, stop=None), tmp_path / "a")
    resumed = fitted(losses, *step, state=fl.restore(path, new()), epochs=2)
    assert len(where(whole)) == 4 and where(resumed) == where(whole)
    assert (resumed.step, resumed.skipped) == (whole.step, whole.skipped)
    assert resumed.history["train/loss"][-1] == whole.history["train/loss"][-1]
    plain = {"run_id": "", "history": fl.History()}  # the pause made a record
    assert_same(attrs.evolve(resumed, **plain), attrs.evolve(whole, **plain))


def test_the_tenth_return_to_one_snapshot_stops_the_run():
    state = fitted([1, 1, *[9] * 12], fl.spike_guard(2, then="back"))
    assert (state.step, state.skipped, len(where(state))) == (2, 10, 10)
    assert state.stop == "spike_guard: it went back to step 2 10 times"
    state = attrs.evolve(state, stop=None)
    state = fitted([9] * 30, fl.spike_guard(2, then="back"), state=state)
    assert (state.skipped, len(where(state))) == (20, 20) and state.stop is not None


def test_a_turn_does_not_go_back():
    step = fl.pipeline(fl.spike_guard(then="back"))(is_batch)
    with pytest.raises(ValueError, match=r"spike_guard.*goes back with the whole model"):
        fl.alternate({"a": step})


def test_a_snapshot_of_other_parameters_is_not_gone_back_to():
    guard = fl.spike_guard(2, then="back")
    state = fitted([1, 1], guard, state=updated_by(torch.optim.SGD))
    state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(()))]})
    with pytest.raises(ValueError, match="the snapshot is of a state with other parameters"):
        fitted([9], guard, state=state, epochs=2)


# --- what does not go back: the records, and what hooks know of them


def test_the_best_weights_since_the_snapshot_are_kept():
    """w is -1, -2, -3, then -2 again: of |w + 3|, the best is that of -3."""

    def loss_fn(model, batch):
        return is_batch(model, batch) if model.training else (model.w + 3).abs()

    loaders = {"train": [torch.tensor([x]) for x in (1.0, 1.0, 1.0, 9.0)], "valid": [torch.ones(1)]}
    step = fl.pipeline(fl.spike_guard(2, then="back"))(loss_fn)
    given = {"hooks": (fl.restore_best("valid/loss"),), "evaluate_every": fl.every(steps=1)}
    state = fl.fit(step, toy(lr=1.0), loaders, **given)
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
@pytest.mark.parametrize(
    "members",
    [
        [fl.schedule(fl.schedules.exponential(0.5))],
        [fl.plateau("train/loss", factor=0.5, patience=1)],
        [fl.plateau("train/loss", factor=0.5, patience=1, since="run"), fl.schedule(halved)],
        [fl.schedule(halved), fl.schedule(halved, field="momentum")],
        [fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))],
    ],
    ids=repr,
)
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

    def loss_fn(model, batch):
        if not model.training:
            raise OSError("the evaluation failed")
        return model.w - model.w.detach() + batch.mean()

    batches = [torch.tensor([x]) for x in (1.0, 1.0, 1.0, 9.0)]
    step = fl.pipeline(fl.spike_guard(window=2, then="back"))(clock.timed(loss_fn, 10.0))
    with pytest.raises(OSError) as raised:
        fl.fit(step, toy(), (batches, batches), hooks=(fl.time_limit(seconds=100),))
    assert raised.value.state.slots["time_limit"] == [30.0]
