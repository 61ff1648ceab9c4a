"""The other processes of a run, or their absence, and the signals that stop it or save it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, Protocol

import attrs

from fnloop._core.runs import INTERRUPTED, REQUEUED, TERMINATED, Stop, local_clock
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware
from fnloop._display.reprs import is_interactive
from fnloop._display.screen import log
from fnloop._extensions import extensions
from fnloop._hooks.hook import Hook

# --------------------------------------------------------------------------------------------------
# The other processes of a run, or their absence. Chosen once, when the run begins.
#
# What several processes agree on, such as to stop, is an extension.


class Peers(Protocol):
    """What a run does together with its other processes."""

    @property
    def alone(self) -> bool:
        """Whether there are none."""
        ...

    def clock(self) -> float:
        """Return the seconds since a moment of the run, the same in every process."""
        ...

    def compare(self, kind: str, members: Sequence[Middleware], saving: Sequence[Hook]) -> None:
        """Raise in every process if they have different steps, or hooks that save.

        It is the first exchange of a run: what follows depends on the settings of middleware, and
        all processes take part in a save.

        Args:
            kind: the name of the class of the step.
            members: its middleware.
            saving: the hooks that save.
        """
        ...

    def begin(self, state: TrainState) -> None:
        """Start the clock: loaders are open, and the run begins with this state."""
        ...

    def poll(self, state: TrainState, requested: list[bool]) -> Sequence[bool] | None:
        """Exchange requests to stop and to save, if it is time to.

        Args:
            state: the newest state.
            requested: those of this process. Those that were sent are taken out.

        Returns:
            Those of any process; None if there is nothing new.
        """
        ...

    def hurry(self) -> None:
        """Exchange requests soon: what follows may take longer than what came before."""
        ...

    def barrier(
        self, state: TrainState, requested: list[bool], order: int, items: float
    ) -> tuple[Sequence[bool] | None, Iterable[float]]:
        """Wait for all processes at the end of an epoch, and check that they have not diverged.

        Args:
            state: the state.
            requested: as of :meth:`poll`.
            order: a checksum of the order of the data.
            items: the items that this process has counted.

        Returns:
            What :meth:`poll` returns, and the items of each process.
        """
        ...

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        ...


class Alone:
    """A single process: there is nothing to exchange."""

    alone = True

    def clock(self) -> float:
        return local_clock()

    def compare(self, kind: str, members: Sequence[Middleware], saving: Sequence[Hook]) -> None: ...

    def begin(self, state: TrainState) -> None: ...

    def poll(self, state: TrainState, requested: list[bool]) -> None: ...

    def hurry(self) -> None: ...

    def barrier(
        self, state: TrainState, requested: list[bool], order: int, items: float
    ) -> tuple[None, Iterable[float]]:
        return None, [items]

    def explain(self, error: BaseException) -> None: ...


def is_alone(state: TrainState) -> bool:
    """Return whether a single process trains this state."""
    return state.backend.world_size == 1


def peers_of(state: TrainState) -> Peers:
    """Return the other processes of a run that begins with this state."""
    if is_alone(state):
        return Alone()
    (make,) = extensions("peers of a run")
    return make()


# --------------------------------------------------------------------------------------------------
# Signals: Ctrl-C and SIGTERM stop a run, SIGUSR1 saves it, or stops it if a hook requeues the job.
#
# A single process acts on a signal at the next boundary. Several processes agree first.

# What ``signal`` calls: it makes an enum of each number and of each handler, which takes 9 times
# as long as to install one.
_signals: ModuleType = getattr(signal, "_signal", signal)
# Sent to a process when one that it started has ended.
_CHILD = None if sys.platform == "win32" else signal.SIGCHLD


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

    def obey(self, stop: bool, save: bool) -> None:
        """Do what a process has asked all of them for."""
        if save:
            self.ask_to_save()
        if stop:
            self.terminate()

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
    usual: dict[int, Any] = {}
    if single_process:  # the first to be installed, because it may come during the others
        usual[signal.SIGINT] = signal.default_int_handler
    usual[signal.SIGTERM] = _signals.SIG_DFL
    if sys.platform != "win32":
        usual[signal.SIGUSR1] = _signals.SIG_DFL
    if threading.current_thread() is not threading.main_thread():
        usual = {}  # only the main thread may install handlers
    taken = {number: old for number, old in usual.items() if _signals.getsignal(number) == old}
    try:
        for number in taken:
            _signals.signal(number, interrupts)
        yield interrupts
    finally:
        for number, old in taken.items():
            _signals.signal(number, old)
        interrupts.restore()
        terminated = interrupts.stop == TERMINATED or interrupts.requested[0]
        if terminated and not interrupts.done and signal.SIGTERM in taken:
            signal.raise_signal(signal.SIGTERM)  # it came too late for the run


# --------------------------------------------------------------------------------------------------
# After a run was interrupted, no other run begins in this process.
#
# A script of several stages would train the next one on what is not finished, save it, and end as
# if it were complete. So it ends here. Started again, it continues the run that was interrupted.


@attrs.frozen
class _Interrupted:
    """The run of this process that was interrupted last.

    Args:
        run: its ``run_id``, which its snapshots have, and what is restored of it.
        step: the update after which it was interrupted.
        stop: by what.
    """

    run: str
    step: int
    stop: str


_interrupted: list[_Interrupted] = []  # at most one


def note_interruption(state: TrainState) -> None:
    """Note that a run has ended only for now, if so: by a signal, or with the time of its job.

    A hook that returns a reason of its own has ended a run for good.
    """
    if isinstance(state.stop, Stop) and Stop.interrupts(state.stop):
        _interrupted[:] = [_Interrupted(state.run_id, state.step, state.stop)]


def forget_interruption() -> None:
    """Let any run begin: the one that was interrupted has continued, or its caller raises."""
    _interrupted.clear()


def check_may_begin(state: TrainState) -> None:
    """Raise if another run of this process was interrupted. Take that back if it continues.

    In an interactive session the user decides what comes next.

    Raises:
        KeyboardInterrupt: it was interrupted by Ctrl-C.
        SystemExit: by something else; with the status of a process that the signal ends.
    """
    found = next(iter(_interrupted), None)
    if found is None or found.run == state.run_id or is_interactive():
        forget_interruption()
        return
    text = (
        f"no other run begins after one was interrupted ({found.stop}, at step {found.step}), "
        "because it may need what that one has not finished. Start the script again: it continues"
    )
    if found.stop == INTERRUPTED:
        raise KeyboardInterrupt(text)
    if state.backend.main:
        log.warning("fit: %s", text)
    raise SystemExit(128 + (signal.SIGUSR1 if found.stop == REQUEUED else signal.SIGTERM))
