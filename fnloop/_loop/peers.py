"""The other processes of a run, what they agree on, and the signals that each gets."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol

import attrs
import torch

from fnloop._backend.collectives import (
    DIVERGED,
    ORDER_MISMATCH,
    all_reduce_max,
    explain_lost,
    gather_from_all,
    here,
    start_all_reduce_max,
)
from fnloop._core.runs import INTERRUPTED, REQUEUED, TERMINATED, Stop
from fnloop._core.state import (
    TrainState,
    check_alike_in,
    check_counters_alike,
    compared_of,
    count_items,
    items_to_send,
)
from fnloop._core.types import EVALUATION, Call, Middleware, wraps_of
from fnloop._display.screen import log
from fnloop._display.tables import is_interactive
from fnloop._hooks.hook import BuiltIn, Hook
from fnloop._loop.made_with import members_of
from fnloop._step.pipeline import PipelineStep

# --------------------------------------------------------------------------------------------------
# The other processes of a run, or their absence. Chosen once, when the run begins.
#
# What several processes agree on, such as to stop, is in `consensus`.


class Peers(Protocol):
    """What a run does together with its other processes."""

    @property
    def alone(self) -> bool:
        """Whether there are none."""
        ...

    @property
    def clock(self) -> Callable[[], float] | None:
        """Seconds since the run began, the same in every process; None in a single process."""
        ...

    def poll(self, state: TrainState, interrupts: Interrupts) -> None:
        """Exchange requests to stop or to save, if it is time to."""
        ...

    def hurry(self) -> None:
        """Exchange requests soon: what follows may take longer than what came before."""
        ...

    def barrier(self, state: TrainState, interrupts: Interrupts, order: int) -> TrainState:
        """Wait for all processes at the end of an epoch, and check that they have not diverged.

        Returns the state; that of several processes knows its items.
        """
        ...

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        ...


class Alone:
    """A single process: there is nothing to exchange."""

    alone, clock = True, None

    def poll(self, state: TrainState, interrupts: Interrupts) -> None: ...

    def hurry(self) -> None: ...

    def barrier(self, state: TrainState, interrupts: Interrupts, order: int) -> TrainState:
        return state

    def explain(self, error: BaseException) -> None: ...


def is_alone(state: TrainState) -> bool:
    """Return whether a single process trains this state."""
    return state.backend.world_size == 1


def peers_of(state: TrainState) -> Peers:
    """Return the other processes of a run that begins with this state."""
    return Alone() if is_alone(state) else Consensus(state)


# --- the pipelines of all processes

_SAME = "the comparison of the pipelines"


def check_same_run(step: PipelineStep, hooks: Iterable[Hook], state: TrainState) -> None:
    """Raise in every process if they have different steps, or hooks that save. A collective.

    It is the first exchange of a run: what follows depends on the settings of middleware, and all
    processes take part in a save.

    Raises:
        RuntimeError: the settings of a middleware differ, or a process lacks one, or such a hook.
    """
    if is_alone(state):
        return
    made = [("step", type(step).__name__, f"a {type(step).__name__}")]
    for member in members_of(step):
        if (settings := _settings_of(member)) is not None:
            made.append((member.name, repr(settings), f"{member!r:.200}"))
    # Their folders may differ, on machines of their own.
    made += [
        ("hook", type(hook).__name__, f"{hook!r:.200}")
        for hook in hooks
        if BuiltIn.parts_saved([hook])
    ]
    mark = zlib.crc32(repr([each[:2] for each in made]).encode())
    most, least = all_reduce_max([mark, -mark], _SAME)
    if most == -least:
        return
    first, *others = gather_from_all(made, _SAME)
    for rank, every in enumerate(others, 1):
        for mine, theirs in itertools.zip_longest(first, every):
            if mine is None or theirs is None or mine[:2] != theirs[:2]:
                _raise_different(rank, mine, theirs)


def _settings_of(member: Middleware) -> object | None:
    """Return what can be compared of a middleware; None of a user's that acts around updates only.

    Settings of a user's middleware may be those of its process, such as a path.
    """
    if member.call is not None and member.call.factory.__module__.startswith("fnloop."):
        return comparable(member.call)
    inside = {*wraps_of(member)} - {"step", EVALUATION}
    return member.name if inside else None


def comparable(value: object) -> object:
    """Return what of a setting is the same in all processes: plain data, of the rest the names."""
    call = value if isinstance(value, Call) else getattr(value, "call", None)
    if isinstance(value, functools.partial):
        call = Call(value.func, value.args, value.keywords)
    if isinstance(call, Call):
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            bound = inspect.signature(call.factory).bind(*call.args, **call.kwargs)
            bound.apply_defaults()
            call = Call(call.factory, (), bound.arguments)
        return [comparable(call.factory), comparable(call.args), comparable(call.kwargs)]
    if isinstance(value, int | float):  # 1 is 1.0
        return float(value)
    if value is None or isinstance(value, str | torch.dtype):
        return value
    if isinstance(value, Mapping):
        return [[comparable(key), comparable(part)] for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [*map(comparable, value)]
    if isinstance(value, Set):  # of strings, in another order in each process
        return sorted(repr(comparable(part)) for part in value)
    return getattr(value, "__qualname__", type(value).__qualname__)


_Made = tuple[str, str, str]  # the name of a middleware, what is compared, and what is shown


def _raise_different(rank: int, first: _Made | None, other: _Made | None) -> NoReturn:
    if made := first if other is None else other if first is None else None:
        has, lacks = (rank, 0) if first is None else (0, rank)
        said = f"process {has} has {made[2]}, and process {lacks} does not"
    else:
        assert first is not None and other is not None
        shown = 1 if first[2] == other[2] else 2
        said = f"process {rank} has {other[shown]} where process 0 has {first[shown]}"
    raise RuntimeError(
        f"{DIVERGED}: {said}. All processes must make the same pipeline, with the same settings, "
        "and list the same hooks"
    )


# --------------------------------------------------------------------------------------------------
# What several processes of a run agree on between updates.
#
# They must stop after the same update, although a signal may reach any one of them at any time. So
# they exchange pending requests periodically and read the result at a later boundary: no process
# blocks.

PERIOD = 0.1  # seconds between two exchanges, in the long run
LONGEST_GAP = 1024  # boundaries between two exchanges


class Consensus:
    """The other processes of a run: all act on a request seen by one, after the same update.

    They also share a clock. An exchange is begun at one boundary and read at a later one, so its
    result is there by then. The number of boundaries between them follows from the time that they
    took, which is exchanged too, so it is the same everywhere.

    Args:
        state: the state at the beginning of the run.
    """

    alone = False

    def __init__(self, state: TrainState) -> None:
        self._began = time.monotonic()
        self._agreed_time = 0.0
        self._boundaries, self._next, self._gap = 0, 1, 1
        self._last, self._since = 0, 0  # the boundary of the last exchange; how many it spanned
        self._result: Callable[[], list[float]] | None = None
        self._sent = [False, False]  # the requests in the exchange that is under way
        here.step, here.thread = state.step, threading.get_ident()

    def clock(self) -> float:
        """Return the seconds since the run began, as of the last exchange."""
        return self._agreed_time

    def poll(self, state: TrainState, interrupts: Interrupts) -> None:
        """Read the last exchange and begin another, if it is time to."""
        self._boundaries += 1
        here.step = state.step
        if self._boundaries >= self._next:
            self._receive(interrupts)
            self._send(state, interrupts)

    def hurry(self) -> None:
        """Exchange at the next boundaries: those that follow may be further apart in time."""
        self._next, self._gap = self._boundaries + 1, 1
        self._last, self._since = self._next, 0  # what was measured before says nothing about them

    def barrier(self, state: TrainState, interrupts: Interrupts, order: int) -> TrainState:
        """Wait for all processes at the end of an epoch, and compare them, in one message.

        Args:
            state: the state.
            interrupts: what was requested of this process.
            order: a checksum of the order of the data.

        Returns:
            The state, which knows its items.

        Raises:
            RuntimeError: this process has stopped while the others continued; or the processes have
                different weights or different data.
        """
        self._receive(interrupts)
        end = "the end of an epoch" if state.stop is None else f"the end of its run ({state.stop})"
        mine = self._requests(interrupts), order, compared_of(state), items_to_send(state)
        every = gather_from_all(mine, end)
        requests, orders, compared, items = zip(*every, strict=True)
        check_counters_alike([each.counters for each in compared])
        if {*orders} != {order}:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")
        check_alike_in(state, compared)
        self._obey(interrupts, *map(max, zip(*requests, strict=True)))
        self.hurry()
        return count_items(state, sent=items)

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        explain_lost(error)

    def _requests(self, interrupts: Interrupts) -> list[float]:
        """Return the requests to pass on, and the time; note that they are sent."""
        self._sent = [*interrupts.requested]
        return [*self._sent, time.monotonic() - self._began]

    def _send(self, state: TrainState, interrupts: Interrupts) -> None:
        """Begin an exchange.

        Args:
            state: its counters must be the same everywhere.
            interrupts: the requests to pass on.
        """
        same = (state.step, state.skipped, state.epoch)
        # The largest of -x is the smallest of x: one reduction finds both.
        facts = [*self._requests(interrupts), *same, *(-value for value in same)]
        self._result = start_all_reduce_max(facts, "the exchange between two updates")
        self._last, self._since = self._boundaries, self._boundaries - self._last
        self._next = self._boundaries + self._gap

    def _receive(self, interrupts: Interrupts) -> None:
        """Read the result of the exchange that is under way."""
        if self._result is None:
            return
        (stop, save, now, *same), self._result = self._result(), None
        most, least = same[: len(same) // 2], [-value for value in same[len(same) // 2 :]]
        check_counters_alike([least, most])
        self._adapt_gap(now - self._agreed_time)
        self._obey(interrupts, stop, save, now)

    def _obey(self, interrupts: Interrupts, stop: float, save: float, now: float) -> None:
        """Do what was requested of any process, and set the clock."""
        self._agreed_time = now
        # A request that came during the exchange is not in it.
        pairs = zip(interrupts.requested, self._sent, strict=True)
        interrupts.requested = [requested and not sent for requested, sent in pairs]
        if save:
            interrupts.ask_to_save()
        if stop:
            interrupts.terminate()

    def _adapt_gap(self, took: float) -> None:
        """Choose the number of boundaries to the next exchange, by the time of the last ones."""
        if self._since and took > 0:
            wanted = int(PERIOD * self._since / took)
            # In steps, because the last ones may have been out of the ordinary.
            self._gap = max(min(wanted, self._gap * 16, LONGEST_GAP), self._gap // 8, 1)


# --------------------------------------------------------------------------------------------------
# Signals: Ctrl-C and SIGTERM stop a run, SIGUSR1 saves it, or stops it if a hook requeues the job.
#
# A single process acts on a signal at the next boundary. Several processes agree first: see
# `consensus`.

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
