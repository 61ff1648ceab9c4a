"""Hooks that several test files use."""

import os
import signal

import attrs

import fnloop as fl
from fnloop._loop import peers


class Notes:
    """A hook that records the steps at which it is called."""

    def __init__(self):
        self.steps = []
        self.closed = 0

    def __call__(self, state):
        self.steps.append(state.step)
        return state

    def __repr__(self):
        return "notes"

    def close(self):
        self.closed += 1


def stop_at(step):
    """Stop the run after a step."""
    return fl.when(lambda state: state.step == step)(
        lambda state: attrs.evolve(state, stop="enough")
    )


def start_again():
    """Let other runs begin after one that was interrupted, as a script that is started again."""
    peers.forget_interruption()


def signal_at(step, number=signal.SIGTERM):
    """Send this process a signal after a step."""

    def send(state):
        os.kill(os.getpid(), number)
        return state

    return fl.when(lambda state: state.step == step)(send)


def raise_at(step, error=KeyError):
    """Raise an exception after a step."""

    def fail(state):
        raise error("no")

    return fl.when(lambda state: state.step == step)(fail)
