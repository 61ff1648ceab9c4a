"""Epochs that a hook ends early, and counters that it may not change."""

import attrs
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy, toy_loss

ONES = [torch.ones(1)] * 5
STEP = fl.pipeline()(toy_loss)


def ends_at(*positions):

    def end(state):
        return attrs.evolve(state, ends="epoch") if state.batch in positions else state

    return end


def test_a_hook_ends_the_epoch_which_is_evaluated_and_whose_hooks_are_called():
    seen, called = [], []

    def note(state):
        assert state.ends is None or "epoch" not in state.events
        seen.append((state.step, state.epoch, state.batch, sorted(state.events)))
        return state

    hooks = ends_at(2), note, fl.every(epochs=1)(lambda state: called.append(state.step) or state)
    state = fl.fit(STEP, toy(), {"train": ONES, "valid": ONES[:1]}, epochs=2, hooks=hooks)
    assert (state.step, state.epoch, state.batch, state.ends) == (4, 2, 0, None)
    assert [(r.step, r.epoch) for r in state.history] == [(2, 1), (4, 2)]
    assert state.history["valid/loss"] == (-2.0, -4.0) and called == [2, 4]
    assert seen == [
        (1, 0, 1, ["update"]), (2, 0, 2, ["update"]), (2, 1, 0, ["epoch", "record"]),
        (3, 1, 1, ["update"]), (4, 1, 2, ["update"]), (4, 2, 0, ["end", "epoch", "record"]),
    ]  # fmt: skip


def test_the_next_epoch_draws_as_any_second_epoch():
    loader = torch.utils.data.DataLoader(torch.arange(10.0), batch_size=2, shuffle=True)
    seen = []
    step = fl.pipeline()(lambda m, batch: (seen.append(batch.tolist()), toy_loss(m, batch))[1])
    fl.fit(step, toy(), loader, epochs=2, hooks=(ends_at(2),))
    early, seen[:] = seen[2:], []
    fl.fit(step, toy(), loader, epochs=2, hooks=())
    assert early == seen[5:7]


def test_it_is_kept_when_the_run_ends_at_the_same_update_and_changes_nothing_at_an_epochs_end():
    state = fl.fit(STEP, toy(), ONES, steps=2, hooks=(ends_at(2),))
    assert (state.step, state.epoch, state.ends) == (2, 0, "epoch")
    state = fl.fit(STEP, state, ONES, steps=4, hooks=())
    assert (state.step, state.epoch, state.batch) == (4, 1, 2)
    state = fl.fit(STEP, toy(), ONES, epochs=2, hooks=(ends_at(0, 5),))
    assert (state.step, state.epoch, state.ends) == (10, 2, None)


@pytest.mark.parametrize(("name", "value"), [
    *((name, 99) for name in ("step", "epoch", "batch", "samples", "skipped", "seed")),
    *(("phases", ()), ("updates", {"": 7}), ("ends", "run")),
])  # fmt: skip
def test_a_hook_may_change_no_counter_and_end_nothing_but_an_epoch(name, value):
    change = fl.every(steps=1)(lambda state: attrs.evolve(state, **{name: value}))
    said = r"set state.ends to .run." if name == "ends" else f"changed state.{name} from .*ends=.ep"
    with pytest.raises(ValueError, match=said):
        fl.fit(STEP, toy(), ONES, hooks=(change,), phase="a")


# --- the length of the run


def halved(optimizer, run):
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=run.total_steps)


@pytest.mark.parametrize("ended", [ends_at(2), ends_at(2, 5)])
@pytest.mark.parametrize("rate", [fl.torch_scheduler(halved), fl.schedule(schedules.linear())])
def test_a_run_that_continues_has_the_length_that_was_planned(rate, ended, caplog):
    step = fl.pipeline(fl.accumulate(2), rate)(toy_loss)

    def script(state, *hooks):
        state = fl.fit(step, state, [*ONES, *ONES], epochs=3, hooks=(ended, *hooks), phase="a")
        if state.phases[0].done:  # as a script that was not interrupted
            state = fl.fit(step, state, ONES, epochs=3, hooks=(ended, *hooks), phase="b")
        return state

    whole, rounds = script(toy()), 0
    pressed = fl.every(steps=1)(lambda state: attrs.evolve(state, stop="interrupted"))
    state = script(toy(), pressed)
    while not (len(state.phases) == 2 and state.phases[1].done) and (rounds := rounds + 1) < 30:
        state = script(state, pressed)
    assert_same(state, whole)
    assert state.history["train/lr"] == whole.history["train/lr"]
    assert "was planned for" not in caplog.text


def test_the_end_of_an_epoch_that_a_phase_left_does_not_end_one_of_the_next_phase():
    stop = lambda state: attrs.evolve(state, stop="enough", ends="epoch")
    state = fl.fit(STEP, toy(), ONES, phase="a", hooks=(fl.every(steps=2)(stop),))
    assert (state.step, state.ends) == (2, "epoch")
    state = fl.fit(STEP, state, ONES, phase="b", hooks=())
    assert (state.step, state.epoch, state.ends) == (7, 2, None)


# --- data that shrank before a resume: an epoch whose position is beyond its end is over


def batches(n):
    return [torch.ones(2)] * n


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(batches(self.n))


def generator(n):
    def made():
        yield from batches(n)

    return made


LOADERS = {  # n -> a loader of n batches
    "a list": batches,
    "a map-style loader": lambda n: DataLoader(torch.ones(2 * n), batch_size=2),
    "a shuffling loader": lambda n: DataLoader(torch.ones(2 * n), batch_size=2, shuffle=True),
    "a loader that drops the last": lambda n: DataLoader(torch.ones(2 * n + 1), 2, drop_last=True),
}
STREAMS = {  # without a length
    "an iterable loader": lambda n: DataLoader(Stream(n), batch_size=None),
    "a generator function": generator,
}


@pytest.fixture
def paused(tmp_path):
    """Return a function that restores a state after 3 of 4 batches of the first epoch."""

    def make(loader):
        step = fl.pipeline()(toy_loss)
        state = fl.fit(step, toy(), loader(4), steps=3, hooks=(), evaluate_every=None)
        return fl.restore(fl.save(state, tmp_path / "a"), toy())

    return make


@pytest.mark.parametrize("loader", [*LOADERS.values(), *STREAMS.values()], ids=[*LOADERS, *STREAMS])
@pytest.mark.parametrize("left", [3, 2, 1])
def test_an_epoch_whose_position_is_beyond_the_data_ends_without_an_update(paused, loader, left):
    """Three updates were made and none follows in this epoch. Its record is that of the three."""
    state = paused(loader)
    assert (state.step, state.epoch, state.batch) == (3, 0, 3)
    ended = fl.fit(fl.pipeline()(toy_loss), state, loader(left), epochs=1, hooks=())
    assert (ended.step, ended.epoch, ended.batch, ended.model.w.item()) == (3, 1, 0, -3.0)
    record = ended.history[-1]
    assert (record.epoch, record.step, record.metrics["train/loss"]) == (1, 3, -1.0)  # of 0, -1, -2
    more = fl.fit(fl.pipeline()(toy_loss), ended, loader(left), epochs=2, hooks=())
    assert (more.step, more.epoch, more.model.w.item()) == (3 + left, 2, -3.0 - left)


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_the_length_of_the_run_excludes_missing_updates_of_the_epoch_that_is_over(paused, loader):
    """Three updates were made and an epoch of two follows. Both subtract the total, 5."""
    step = fl.pipeline(fl.schedule(lambda i, total: total))(toy_loss)
    state = fl.fit(step, paused(loader), loader(2), epochs=2, hooks=())
    assert (state.step, state.epoch, state.model.w.item()) == (5, 2, -3.0 - 5.0 - 5.0)


def test_empty_data_end_the_epoch_and_are_an_error_in_the_next(paused):
    state = fl.fit(fl.pipeline()(toy_loss), paused(batches), [], epochs=1, hooks=())
    assert (state.step, state.epoch) == (3, 1)
    with pytest.raises(ValueError, match="gave no batch in epoch 2"):
        fl.fit(fl.pipeline()(toy_loss), state, [], epochs=2, hooks=())
