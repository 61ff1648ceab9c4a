"""Signals: Ctrl-C and SIGTERM stop a run, SIGUSR1 saves it, or stops it if a hook requeues the job.

A single process acts on a signal at the next boundary. Several processes agree first: see
:mod:`fnloop._loop.consensus`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import attrs

from fnloop._core.state import TrainState
from fnloop._core.stops import INTERRUPTED, REQUEUED, TERMINATED
from fnloop._display.log import log

__all__ = ["Abandoned", "Interrupts", "handling"]

_CHILD = getattr(signal, "SIGCHLD", None)  # sent to a process when one that it started has ended


class Abandoned(Exception):
    """A boundary is left to the run that continues. The run ends as usual after a signal.

    Either an evaluation has no time left, because a scheduler ends this job soon, or the signal
    came during the last update.
    """


class Interrupts:
    """The requests received as signals.

    Args:
        single_process: whether this is the only process. Otherwise requests wait until all
            processes agree.
    """

    def __init__(self, single_process: bool = True) -> None:
        self.single_process = single_process
        self.stop: str | None = None
        self.save = False
        self.usr1_stops = False  # whether SIGUSR1 also stops the run
        self.requested = [False, False]  # to stop, to save: what all processes agree on first
        self._told = False  # whether it was said that the run does not end at once
        self.done = False  # whether the state says that the run has ended because of it
        self._usual_on_child: Any = None  # the handler of SIGCHLD that ``_on_child`` has replaced

    def stop_on_usr1(self) -> None:
        """Let SIGUSR1 stop the run, also one that came before."""
        self.usr1_stops = True
        if self.save:
            self.ask_to_save()

    def ask_to_save(self) -> None:
        """Obey SIGUSR1. A run that ends is saved."""
        self.save = not self.usr1_stops
        if self.usr1_stops:
            self.stop = self.stop or REQUEUED

    def terminate(self) -> None:
        """Obey SIGTERM. A job that is about to be requeued still is."""
        self.stop = REQUEUED if self.stop == REQUEUED else TERMINATED

    def check_time_left(self, *, over: bool) -> None:
        """Raise if a signal has asked the run to end, and it does not wait.

        A scheduler waits for some seconds only. After Ctrl-C an evaluation is completed, but not
        that with which the run ends.

        Args:
            over: whether a hook has stopped the run.
        """
        if self.stop is not None and (over or self.stop != INTERRUPTED):
            raise Abandoned
        if self.stop is not None and not self._told:
            self._told = True
            log.warning(
                "fit: Ctrl-C ends the run after the evaluation; a second one ends it at once, and "
                "then the evaluation has no record"
            )

    def apply(self, state: TrainState) -> TrainState:
        """Return the state with the reason to stop, if a signal gave one."""
        if self.stop is None or state.stop is not None:
            return state
        self.done = True
        return attrs.evolve(state, stop=self.stop)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.stop == INTERRUPTED:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the boundary
        if number in (signal.SIGINT, signal.SIGTERM) or self.usr1_stops:
            self._ignore_dead_workers()
        if number == signal.SIGINT:
            self.stop = INTERRUPTED
        elif not self.single_process:
            self.requested[number != signal.SIGTERM] = True
        elif number == signal.SIGTERM:
            self.terminate()
        else:
            self.ask_to_save()

    def _ignore_dead_workers(self) -> None:
        """Keep torch from raising, wherever the run is, when a worker of a loader dies.

        The signal may have been sent to the workers too. A loader whose workers are dead raises
        when it is asked for a batch.
        """
        if _CHILD is None or self._usual_on_child is not None:
            return
        if callable(usual := signal.getsignal(_CHILD)):
            self._usual_on_child = usual
            signal.signal(_CHILD, self._on_child)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):
            self._usual_on_child(number, frame)

    def restore(self) -> None:
        """Let dead workers raise again."""
        if self._usual_on_child is None or _CHILD is None:
            return
        if signal.getsignal(_CHILD) == self._on_child:
            signal.signal(_CHILD, self._usual_on_child)


@contextlib.contextmanager
def handling(single_process: bool = True) -> Iterator[Interrupts]:
    """Record signals instead of terminating, unless the program installed its own handlers.

    With several processes, Ctrl-C is left alone: it reaches all of them and their launcher at once,
    and the launcher ends them.
    """
    interrupts = Interrupts(single_process)
    usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    if single_process:
        usual[signal.SIGINT] = signal.default_int_handler
    if hasattr(signal, "SIGUSR1"):
        usual[signal.SIGUSR1] = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread():
        usual = {}  # only the main thread may install handlers
    taken = {number: old for number, old in usual.items() if signal.getsignal(number) == old}
    for number in taken:
        signal.signal(number, interrupts)
    try:
        yield interrupts
    finally:
        for number, old in taken.items():
            signal.signal(number, old)
        interrupts.restore()
        terminated = interrupts.stop == TERMINATED or interrupts.requested[0]
        if terminated and not interrupts.done and signal.SIGTERM in taken:
            signal.raise_signal(signal.SIGTERM)  # it came too late for the run
