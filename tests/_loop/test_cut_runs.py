"""A run that is cut anywhere and continued is the run that was not, whatever hooks it has.

The table is of hooks, of when to record and to evaluate, of middleware, of targets, and of what
cuts the run: at every batch, of training and of evaluation, and at every call of a hook.
"""

import os
import signal

import attrs
import pytest
import torch
from loop_cases import Boom, boom, press, terminate
from sample_hooks import stop_at

import fnloop as fl
from fnloop._hooks.hook import Hook
from fnloop.testing import assert_same, toy, toy_loss

TRAIN = [torch.tensor([x]) for x in (2.0, -1.0, 3.0, -2.0, 1.0)]
LOADERS = {"train": TRAIN, "valid": [torch.tensor([2.0, -1.0])], "test": [torch.tensor([-1.0])]}


class Killed(BaseException):
    """The process was killed here."""


class Cuts:
    """Counts the points at which a run may be cut, and cuts it at one of them."""

    def __init__(self, at=None, how=None):
        self.at, self.how, self.points = at, how, []

    def __call__(self, point):
        self.points.append(point)
        if len(self.points) - 1 == self.at:
            self.how()


class CutHook(Hook):
    """A hook at whose calls a run may be cut."""

    def __init__(self, cuts):
        self.cuts = cuts

    def __call__(self, state):
        self.cuts("hook")
        return state

    flush = __call__


def kill():
    raise Killed


# --- the table


def stop_after_a_skip():
    return fl.when(lambda s: s.skipped == 1)(lambda s: attrs.evolve(s, stop="enough"))


def end_epoch_at(batch):
    return fl.when(lambda s: s.batch == batch)(lambda s: attrs.evolve(s, ends="epoch"))


# --- the table


HOOKS = {  # each makes hooks; ``note`` is one that notes its calls, ``see`` is for inspect
    "none": lambda note, see: (),
    "stop": lambda note, see: (stop_at(2), fl.at_end()(note)),
    "stop at an epoch's end": lambda note, see: (stop_at(4), fl.restore_best("valid/loss")),
    "stop after a skip": lambda note, see: (stop_after_a_skip(), fl.at_end()(note)),
    "stop, epoch ended": lambda note, see: (end_epoch_at(2), stop_at(3)),
    "early_stop": lambda note, see: (
        *(fl.early_stop("valid/loss", patience=1), fl.restore_best("valid/loss")),
        fl.at_end()(note),
    ),
    "restore_best": lambda note, see: (fl.restore_best("valid/loss", "max"),),
    "ended epochs": lambda note, see: (end_epoch_at(2), fl.every(epochs=1)(note)),
    "when_improved": lambda note, see: (fl.when_improved("valid/loss")(note),),
    "moments": lambda note, see: (
        *(fl.at_start()(note), fl.every(steps=3)(note)),
        (fl.every(epochs=2) | fl.at_end())(note),
    ),
    "inspect": lambda note, see: (fl.inspect(see), stop_at(6)),
    "inspect the end": lambda note, see: (fl.inspect(see, every=fl.at_end()), stop_at(3)),
    "halt_on_nonfinite": lambda note, see: (fl.halt_on_nonfinite(1), stop_at(5)),
}
RECORDS = (None, fl.every(steps=1) | fl.every(epochs=1), fl.every(steps=2))
EVALUATIONS = (
    fl.every(epochs=1),
    fl.at_start() | fl.every(steps=2),
    {"valid": fl.every(steps=2), "test": fl.at_end()},
    {"valid": fl.every(epochs=1), "test": fl.every(epochs=2) | fl.at_end()},
)
TARGETS = ({"epochs": 2}, {"steps": 5}, {"epochs": 3, "steps": 6})
MEMBERS = (
    (),
    (fl.accumulate(2), fl.ema(0.5)),
    (fl.schedule(fl.schedules.linear()),),
    (fl.plateau("valid/loss", patience=1),),
    (fl.clip(1.0), fl.accumulate(2)),
)


def rows():
    """Return two rows for each way to make hooks, with each cut; the other settings take turns.

    One cut of each row is tried at once, and the others are long.
    """
    found = []
    for n, name in enumerate([*HOOKS, *HOOKS]):
        record_every, evaluate_every = RECORDS[n % 3], EVALUATIONS[n % 4]
        members, targets = MEMBERS[n % 5], TARGETS[n // 2 % 3]
        given = {"record_every": record_every, "evaluate_every": evaluate_every, **targets}
        label = f"{name}, {record_every}, {evaluate_every}, {fl.pipeline(*members)}, {targets}"
        for i, how in enumerate((kill, terminate, press, boom)):
            marks = [] if i == n % 4 else [pytest.mark.long]
            row = name, members, given, how
            found.append(pytest.param(*row, id=f"{label}, {how.__name__}", marks=marks))
    return found


def train(folder, cuts, calls, name, members, given, state=None):
    """Train, or continue; from the newest checkpoint if there is a folder for them."""

    def loss_fn(model, batch):
        cuts("training" if model.training else "evaluation")
        if model.training and batch is TRAIN[1]:
            return fl.skip("it is to be skipped")
        return toy_loss(model, batch)

    def note(state):
        calls.append(("note", state.step, state.model.w.item(), len(state.history)))
        return state

    def see(state, outputs):
        calls.append(("see", state.step, state.model.w.item(), len(outputs)))

    saves = () if folder is None else (fl.every(steps=1)(fl.checkpoint(folder)),)
    hooks = (*HOOKS[name](note, see), *saves, CutHook(cuts))
    state = toy() if state is None else state
    state = state if folder is None else fl.resume(folder, state)
    return fl.fit(fl.pipeline(*members)(loss_fn), state, LOADERS, hooks=hooks, **given)


def continued(folder, point, how, row):
    """Cut a run at a point, and continue it. Return the state that it ends with, and its calls."""
    before, after, state = [], [], None
    try:
        state = train(folder, Cuts(point, how), before, *row)
    except (Killed, KeyboardInterrupt):
        pass
    except Boom as error:
        state = error.state
    return train(folder, Cuts(), after, *row, None if folder else state), after


@pytest.mark.slow
@pytest.mark.parametrize(("name", "members", "given", "how"), rows())
def test_a_run_that_is_cut_and_continued_is_the_one_that_was_not(
    name, members, given, how, tmp_path, monkeypatch
):
    """After a kill and SIGTERM it is continued by another process, otherwise by the same one."""
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)  # it came too late for the run
    monkeypatch.setattr(os, "fsync", lambda file: None)  # takes most of the time
    row, cuts, calls = (name, members, given), Cuts(), []
    whole = train(None, cuts, calls, *row)
    assert {"training", "evaluation", "hook"} == {*cuts.points}
    for point, at in enumerate(cuts.points):
        if how is boom and at == "hook":
            continue  # the hooks after it are not called at that boundary
        folder = tmp_path / str(point) if how in (kill, terminate) else None
        found, after = continued(folder, point, how, row)
        assert_same(found, whole)
        assert [r.closing for r in found.history] == [r.closing for r in whole.history]
        assert after == calls[len(calls) - len(after) :], (point, at)
