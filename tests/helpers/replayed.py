"""Runs that are recorded, to be compared with what replay makes of their checkpoints."""

import fnloop as fl
from fnloop.debug import replay
from fnloop.testing import assert_same


def recorded(folder, step, state, loaders, saved, **settings):
    """Train, with checkpoints after some updates and at the end. Return the states of boundaries.

    Args:
        folder: where the checkpoints are.
        step, state, loaders, settings: what ``fit`` is given.
        saved: the updates after which a checkpoint is saved; 0 is the beginning.
    """
    states = [fl.snapshot(state)]

    def keep(state):
        states.append(fl.snapshot(state))
        return state

    moment = fl.when(lambda state: state.step in saved)
    moment = fl.at_start() | moment if 0 in saved else moment
    saves = moment(fl.checkpoint(folder, keep=None))
    hooks = (keep, saves, *settings.pop("hooks", ()))
    fl.fit(step, state, loaders, hooks=hooks, **settings)
    return states


def check(folder, step, state, loaders, states, saved, update):
    """Replay an update, and compare the states before and after it with those of the run."""
    made = replay(folder, step, state, loaders, update=update)
    first = max(i for i, s in enumerate(states) if s.step in saved and s.step < update)
    at = next(i for i in range(first, len(states)) if states[i].step == update)
    for mine, its in ((made.before, states[at - 1]), (made.after, states[at])):
        assert_same(mine, its)
        assert {k: m.compute() for k, m in mine.metrics.items()} == {
            k: m.compute() for k, m in its.metrics.items()
        }
    assert state.step == 0
    fl.snapshot(state)  # it is not stale
    return made
