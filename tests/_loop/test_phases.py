"""Runs made of phases: targets that count from where a phase began, and scripts started again."""

import logging
import signal

import attrs
import pytest
import torch
from sample_hooks import stop_at
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop._extensions.checkpoints.counters import decode_phases
from fnloop._extensions.checkpoints.format import STATE_SHAPE, check_shape
from fnloop.testing import assert_same, toy, toy_loss

ONES = [torch.ones(1)] * 4  # the gradient is 1
ENDED = {"name": "a", "step": 0, "epoch": 0, "records": 0, "stop": None, "done": True, "skipped": 0}
PLAIN = fl.pipeline()(toy_loss)
LINEAR = fl.schedule(lambda i, total: 1 - i / total)
HALVING = fl.torch_scheduler(lambda opt, _: lr_scheduler.ExponentialLR(opt, 0.5))
PLATEAU = fl.plateau("recent/loss", 0.5, patience=1, min_delta=1e9)


def fit(state, phase, step=PLAIN, batches=ONES, hooks=(), **targets):
    return fl.fit(step, state, batches, hooks=hooks, phase=phase, **targets)


# --- targets and counters


def test_targets_count_from_where_a_phase_began():
    state = toy()
    for name, targets in zip(
        "abc", ({"epochs": 2}, {"steps": 3}, {"epochs": 1, "steps": 9}), strict=True
    ):
        state = fit(state, name, **targets)
    found = [(p.name, p.step, p.epoch, p.records, p.done) for p in state.phases]
    assert found == [("a", 0, 0, 0, True), ("b", 8, 2, 2, True), ("c", 11, 3, 3, True)]
    assert (state.step, state.epoch, state.batch, state.model.w.item()) == (15, 4, 0, -15.0)


def test_a_phase_is_one_epoch_without_targets_and_begins_after_a_run_without_one():
    state = fl.fit(PLAIN, toy(), ONES, steps=2, hooks=())
    state = fit(state, "a")
    assert (state.step, state.epoch, state.batch) == (6, 2, 0)  # the epoch that was left counts
    state = fl.fit(PLAIN, state, ONES, epochs=3, hooks=())  # absolute again
    assert (state.step, state.epoch) == (10, 3)


def test_a_phase_has_other_draws_and_metrics_than_the_epoch_that_was_left():
    loader = torch.utils.data.DataLoader(torch.arange(64.0), batch_size=8, shuffle=True)
    seen, given = [], {"lr": 0.0, "w": 1.0}  # the loss is the mean of the batch
    step = fl.pipeline()(lambda model, x: seen.append(x.tolist()) or toy_loss(model, x))
    state = fit(toy(**given), "a", step, loader, steps=2)
    state = fit(state, "b", step, loader, steps=1)
    means = [sum(batch) / 8 for batch in seen]
    assert len({tuple(batch) for batch in seen}) == 3
    assert [r.metrics["train/loss"] for r in state.history] == [(means[0] + means[1]) / 2, means[2]]
    # those of the second epoch of any run with this seed
    first, seen[:] = seen[2], []
    fl.fit(step, toy(), loader, epochs=2, hooks=())
    assert seen[8] == first


# --- schedules


def rates(step, state, *phases):
    before = len(state.history)
    for name, epochs in phases:
        state = fit(state, name, step, epochs=epochs, record_every=fl.every(steps=1))
    return [round(r.metrics["recent/lr"], 4) for r in state.history[before:]], state


def test_a_schedule_counts_from_where_its_phase_began(caplog):
    step = fl.pipeline(LINEAR)(toy_loss)
    seen, state = rates(step, toy(), ("a", 1), ("b", 2))
    assert seen == [1.0, 0.75, 0.5, 0.25, *(1 - i / 8 for i in range(8))]
    assert not caplog.records
    assert (state.slots["schedule(lr)"], state.history[-1].step) == (8, 12)


def test_skipped_updates_of_an_earlier_phase_do_not_lengthen_a_schedule():
    def loss_fn(model, batch):
        calls.append(1)
        return fl.skip("first") if len(calls) == 1 else toy_loss(model, batch)

    calls, totals = [], []
    factor = lambda i, total: totals.append((i, total)) or 1.0
    step = fl.pipeline(fl.schedule(factor))(loss_fn)
    state = fit(toy(), "a", step, epochs=1)
    assert (state.step, state.skipped, state.phases[0].skipped) == (3, 1, 0)
    totals.clear()
    state = fit(state, "b", step, epochs=1)
    assert totals == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert state.phases[1].skipped == 1


@pytest.mark.parametrize("make", [
    lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, T_max=run.total_steps),
    lambda opt, run: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=run.total_steps),
    lambda opt, run: lr_scheduler.StepLR(opt, run.steps_per_epoch, gamma=0.1),
])  # fmt: skip
@pytest.mark.parametrize("saved", [True, False])
def test_a_scheduler_of_torch_is_made_again_for_each_phase(make, saved, tmp_path):
    step = fl.pipeline(fl.torch_scheduler(make))(toy_loss)
    first, state = rates(step, toy(), ("a", 2))
    if saved:
        state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    second, _ = rates(step, state, ("b", 2))
    assert first == second
    assert len(set(first)) > 1


@pytest.mark.parametrize(("member", "field", "before", "after"), [
    (HALVING, "lr", [1.0, 0.5, 0.25, 0.125], [8.0, 4.0, 2.0, 1.0] * 2),
    (LINEAR, "lr", [1.0, 0.75, 0.5, 0.25], [8.0, 6.0, 4.0, 2.0] * 2),
    (LINEAR, "initial_lr", [1.0, 0.75, 0.5, 0.25], [8.0, 6.0, 4.0, 2.0] * 2),
    (PLATEAU, "lr", [1.0, 1.0, 0.5, 0.25], [8.0, 8.0, 4.0, 2.0] * 2),
], ids=repr)  # fmt: skip
def test_a_rate_that_was_set_between_two_phases_is_that_of_the_next(member, field, before, after):
    step = fl.pipeline(member)(toy_loss)
    seen, state = rates(step, toy(), ("a", 1))
    state.optimizer.param_groups[0][field] = 8.0
    more, state = rates(step, state, ("b", 1), ("c", 1))
    assert (seen, more) == (before, after)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("member", [
    fl.schedule(lambda i, total: 0.0),
    fl.torch_scheduler(lambda opt, run: lr_scheduler.ConstantLR(opt, 0.5, 99)),
    fl.plateau("train/loss", 0.5, patience=1, min_delta=100.0),
])  # fmt: skip
def test_a_phase_without_a_schedule_has_the_initial_rates(member, saved, tmp_path):
    state = fit(toy(lr=1.0), "a", fl.pipeline(member)(toy_loss), epochs=3)
    assert state.optimizer.param_groups[0]["lr"] < 1
    if saved:
        state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    assert rates(PLAIN, state, ("b", 1))[0] == [1.0] * 4


@pytest.mark.parametrize("field", ["momentum", "weight_decay"])
def test_other_settings_return_to_their_initial_values_too(field):
    model = toy().model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, weight_decay=0.25)
    initial = dict(optimizer.param_groups[0])
    step = fl.pipeline(fl.schedule(lambda i, total: 2.0, field))(toy_loss)
    state = fit(fl.TrainState.create(model, optimizer), "a", step)
    assert optimizer.param_groups[0][field] == 2 * initial[field]
    fit(state, "b")
    assert optimizer.param_groups[0] == {**initial, f"initial_{field}": initial[field]}


@pytest.mark.parametrize("saved", [True, False])
def test_a_rate_that_is_a_tensor_begins_each_phase_at_its_initial_value(saved, tmp_path):
    def create():
        model = toy().model
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
        return fl.TrainState.create(model, optimizer, seed=0)

    cycle = fl.torch_scheduler(lambda o, run: lr_scheduler.OneCycleLR(o, 1.0, run.total_steps))
    state, seen = create(), []
    for name, member in zip("abc", (LINEAR, cycle, PLATEAU), strict=True):
        found, state = rates(fl.pipeline(member)(toy_loss), state, (name, 1))
        seen.append(found)
        if saved:
            state = fl.restore(fl.save(state, tmp_path / name), create())
    assert seen[0] == [0.5, 0.375, 0.25, 0.125]
    assert seen[1] == rates(fl.pipeline(cycle)(toy_loss), create(), ("b", 1))[0]
    assert seen[2] == [0.5, 0.5, 0.25, 0.125]
    assert isinstance(state.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert rates(PLAIN, state, ("d", 1))[0] == [0.5] * 4


# --- scripts that are started again


def test_a_phase_that_has_ended_is_passed_over_and_one_at_its_target_ends(tmp_path, caplog):
    state = fit(toy(), "a", epochs=1, hooks=(fl.checkpoint(tmp_path / "run"),))
    (phase,) = fl.resume(tmp_path / "run", toy()).phases
    assert phase == fl.Phase("a", 0, 0, 0, done=True)
    assert fit(state, "a", epochs=3).step == 4
    assert "nothing to do: the phase 'a' has ended" in caplog.text
    fit(state, "b", epochs=0, steps=3)
    message = "the phase 'b' began at epoch 1, step 4, and is at its target, epochs=0, steps=3. It"
    assert f"nothing to do: {message} ends here" in caplog.text
    assert "absolute" not in caplog.text


def test_ctrl_c_does_not_end_a_phase():
    def press(state):
        if state.step == 2:
            raise KeyboardInterrupt
        return state

    state = fit(toy(), "a", hooks=(press,), epochs=1)
    assert (state.stop, state.phases[0].done) == ("interrupted", False)
    with pytest.raises(
        ValueError,
        match=r"'a', begun at step 0, has not ended: it was interrupted at step 2 \(interrupted\), "
        r"so 'b' cannot begin\. Start the script again to continue it",
    ):
        fit(state, "b", epochs=1)
    with pytest.raises(ValueError, match=r"so fit was called without a phase|without a phase"):
        fl.fit(PLAIN, state, ONES, hooks=())
    assert fit(state, "a", epochs=1).step == 4


def test_a_phase_can_be_ended_by_hand():
    stop = fl.when(lambda state: state.step == 2)(lambda s: attrs.evolve(s, stop="interrupted"))
    state = fit(toy(), "a", hooks=(stop,), epochs=1)
    with pytest.raises(ValueError, match=r"has not ended, so .b. cannot.*the next phase"):
        fit(attrs.evolve(state, stop=None), "b", epochs=1)
    branch = fl.snapshot(attrs.evolve(state, stop="enough"))
    state = fit(attrs.evolve(state, stop="enough"), "a", epochs=1)
    assert (state.step, state.phases[0].stop, state.phases[0].done) == (2, "enough", True)
    assert fit(state, "b", epochs=1).step == 6
    state = fit(branch, "b", epochs=1)  # without the detour
    found = [(p.name, p.step, p.stop, p.done) for p in state.phases]
    assert found == [("a", 0, "enough", True), ("b", 2, None, True)]
    assert (state.step, state.stop) == (6, None)


def test_a_rolled_back_state_is_in_the_phase_of_its_snapshot():
    kept = []

    def back(state):
        if state.step == 5 and len(kept) == 1:
            kept.append(None)
            return kept[0]
        if state.step == 4 and not kept:
            kept.append(fl.snapshot(state))
        return state

    state = fit(toy(), "a", epochs=1)
    state = fit(state, "b", hooks=(back,), epochs=1)
    assert (state.step, [p.name for p in state.phases]) == (8, ["a", "b"])


# --- names and damage


@pytest.mark.parametrize(
    "saved", [3, [3], [{"name": "a"}], [{**ENDED, "step": -1}], [{**ENDED, "done": 1}]]
)
def test_damaged_phases_are_refused(saved):
    with pytest.raises(fl.CheckpointError, match=r"a\.json is damaged: phases"):
        check_shape({"history": [], "phases": saved}, STATE_SHAPE, "a.json")
    assert decode_phases({"phases": [ENDED]}) == (fl.Phase("a", 0, 0, 0, done=True),)


def test_progress_says_which_phase_it_is_and_how_long(capsys):
    state = fit(toy(), "a", epochs=2)
    fit(state, "b", hooks=(fl.progress(),), epochs=3)
    shown = "".join(capsys.readouterr())
    for part in ("phase b", "3 epochs of 4 updates", "3/5"):  # the last are those of the state
        assert part in shown


# --- a script that is started again in its second phase


@pytest.mark.parametrize("saved", [True, False], ids=["from a checkpoint", "in memory"])
@pytest.mark.parametrize("epochs", [1, 9], ids=["at its target", "stopped before it"])
def test_a_phase_that_is_over_leaves_the_best_weights_of_the_next_one_alone(
    tmp_path, saved, epochs
):
    """They are put back at its end, not where the script passes over the first."""
    rates = fl.schedule(lambda i, total: (1.0, -1.0, -1.0, 5.0)[i])  # b: -2, -1, 0, -5
    loaders = (ONES[:1], ONES[:1])

    def script(state, folder, *more):
        hooks = (fl.restore_best("valid/loss"), fl.checkpoint(tmp_path / folder))
        first = hooks if epochs == 1 else (*hooks, stop_at(1))
        state = fit(state, "a", batches=loaders, hooks=first, epochs=epochs)
        step = fl.pipeline(rates)(toy_loss)
        return fit(state, "b", step, loaders, (*hooks, *more), epochs=4)

    press = fl.when(lambda s: s.epoch == 3)(lambda s: attrs.evolve(s, stop="interrupted"))
    part = script(toy(), "a", press)
    assert part.model.w.item() == -1.0  # its best are those of the epoch before, -2
    part = fl.resume(tmp_path / "a", toy()) if saved else part
    whole = script(toy(), "whole")
    assert_same(script(part, "a"), whole)
    assert whole.model.w.item() == -5.0


def test_a_boundary_that_was_left_belongs_to_the_newest_phase():
    """The first phase evaluates each epoch, the second does not."""

    def loss_fn(model, batch):
        if model.w.item() == -5.0 and model.training:
            signal.raise_signal(signal.SIGTERM)
        return toy_loss(model, batch)

    def script(state, step):
        state = fit(state, "a", step, (ONES, ONES), epochs=1)
        return fit(state, "b", step, (ONES, ONES), steps=2, evaluate_every=None)

    part = script(toy(), fl.pipeline()(loss_fn))
    assert (part.step, part.stop, len(part.history)) == (6, "SIGTERM", 1)
    found = [(r.step, r.closing, sorted(r.metrics)) for r in script(part, PLAIN).history]
    both = ["train/loss", "train/lr"]
    assert found == [(4, False, [*both, "valid/loss"]), (6, True, both)]


def test_a_snapshot_from_before_the_phase_is_not_gone_back_to():
    kept = fl.snapshot(toy())
    state = fit(toy(), "a")
    back = lambda state: kept
    with pytest.raises(ValueError, match="went back to a snapshot from before the phase 'b' began"):
        fit(state, "b", hooks=(back,))


# --- the order in which a program names its phases, and those that it passes over


def in_order(state, *names):
    for name in names:
        state = fl.fit(PLAIN, state, ONES[:1], hooks=(), phase=name, steps=1)
    return state


def began(state):
    return [phase.name for phase in state.phases]


@pytest.fixture
def restored(tmp_path):
    """Return a function that restores the end of the phases a and b, as another process does."""
    path = fl.save(in_order(toy(), "a", "b"), tmp_path / "ab")
    return lambda: fl.restore(path, toy())


def test_a_phase_that_was_inserted_before_one_that_had_ended_is_refused(restored, tmp_path, caplog):
    state = in_order(restored(), "a", "new")  # it cannot be known yet
    assert began(state) == ["a", "b", "new"]
    assert "'new' begins where 'b' ended, which this program has not named" in caplog.text
    message = (
        "this program names 'new' before 'b', but in this run 'b' had ended when 'new' began, at "
        r"step 2. To keep the run, write fit\(..., phase='b'\) before fit\(..., phase='new'\)"
    )
    with pytest.raises(ValueError, match=message):
        in_order(state, "b")
    with pytest.raises(ValueError, match=message):  # at once, not at the first epoch
        fl.run(PLAIN, state, ONES[:1], hooks=(), phase="b")
    path = fl.save(state, tmp_path / "abn")  # the script is started again
    with pytest.raises(ValueError, match="out of order"):
        in_order(fl.restore(path, toy()), "a", "new", "b")
    assert began(in_order(fl.restore(path, toy()), "a", "b", "new", "c")) == ["a", "b", "new", "c"]


IN_ORDER = {
    "abc": "the script, started again", "aabbcc": "cells of a notebook, each run twice",
    "abcabc": "all cells, run twice", "abacbc": "an earlier cell again",
    "bc": "a script that does not name the first", "cc": "a second script, twice", "bbcb": "both",
}  # fmt: skip


@pytest.mark.parametrize("names", IN_ORDER)
@pytest.mark.parametrize("kept", [True, False])
def test_a_script_a_resumed_run_and_a_cell_that_is_run_twice_are_in_order(
    names, kept, restored, caplog
):
    state = restored()
    for name in names:
        state = in_order(state, name)
        state = fl.snapshot(state) if kept else state
    assert (began(state), state.step) == (["a", "b", "c"], 3)
    assert "has not named" not in caplog.text


def test_a_phase_that_is_no_longer_in_the_script_is_only_a_warning(restored, caplog):
    assert began(in_order(restored(), "a", "c", "d", "a", "c")) == ["a", "b", "c", "d"]
    assert [r.levelname for r in caplog.records if "has not named" in r.message] == ["WARNING"]


def test_what_a_script_passes_over_on_its_way_is_not_a_warning(restored, caplog):
    caplog.set_level(logging.INFO, "fnloop")

    def told(state, name):
        caplog.clear()
        in_order(state, name)
        return [(r.levelname, r.message) for r in caplog.records]

    passed = "fit: nothing to do: the phase 'a' has ended"
    assert told(restored(), "a") == [("INFO", passed)]
    assert told(in_order(restored(), "a"), "a") == [("WARNING", passed)]  # a cell, run twice
    assert told(restored(), "b") == [("WARNING", passed.replace("'a'", "'b'"))]  # the end of it


def test_the_names_that_a_program_has_given_are_not_saved(restored):
    state = in_order(toy(), "a", "b")
    assert [phase.named for phase in state.phases] == [True, True]
    assert [phase.named for phase in restored().phases] == [False, False]
    assert state.phases == restored().phases
