"""Why a run has ended before its target, and what it leaves to the run that continues it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

INTERRUPTIONS = ("interrupted", "job", "requeued")
KINDS = ("hook", "guard", "limit", *INTERRUPTIONS)


class Stop(str):
    """Why a run has ended before its target: a str, equal to the reason, that knows its kind.

    Args:
        reason: the reason, as ``state.stop`` shows it.
        kind: what has stopped the run. "hook": a hook. "guard": a middleware that skips updates.
            "limit": the time of the run is over. The others are interruptions: the same script,
            started again, continues the run. "interrupted": Ctrl-C or SIGTERM. "job": the time of
            the job is over. "requeued": SIGUSR1.
    """

    kind: str

    def __new__(cls, reason: str, kind: str = "hook") -> Stop:
        stop = super().__new__(cls, reason)
        stop.kind = kind
        return stop

    def __reduce__(self) -> tuple[type[Stop], tuple[str, str]]:
        return Stop, (str(self), self.kind)


INTERRUPTED, TERMINATED = Stop("interrupted", "interrupted"), Stop("SIGTERM", "interrupted")
REQUEUED = Stop("SIGUSR1", "requeued")
_SIGNALS = {str(stop): stop.kind for stop in (INTERRUPTED, TERMINATED, REQUEUED)}
# What the reasons of a time limit began with, in checkpoints without kinds.
_LIMITS = {"time_limit: this job": "job", "time_limit: the run": "limit"}


def kind_of(stop: str | None) -> str | None:
    """Return the kind of a stop. A plain str is that of a hook, unless it is that of a signal."""
    if stop is None or isinstance(stop, Stop):
        return None if stop is None else stop.kind
    return _SIGNALS.get(stop, "hook")


def is_interruption(stop: str | None) -> bool:
    """Return whether a run has only ended for now: the same script, started again, continues it."""
    return kind_of(stop) in INTERRUPTIONS


def ends_job(stop: str | None) -> bool:
    """Return whether a run has only ended because the time of its job is over."""
    return kind_of(stop) in ("job", "requeued")


def ends_run(stop: str | None) -> bool:
    """Return whether a run ends for this reason: what is due at its end is made."""
    return stop is not None and not is_interruption(stop)


def ends_phase(stop: str | None) -> bool:
    """Return whether a phase that ends for this reason, or at its target, is done."""
    return stop is None or (ends_run(stop) and kind_of(stop) != "limit")


def first_stop(before: str | None, after: str | None) -> str | None:
    """Return the stop that stays, of that before a hook and that after it.

    The first reason to end the run stays. A hook may take it back, and it may end a run that was
    only interrupted, because it decides only once.
    """
    return before if after is not None and ends_run(before) else after


# --- what is left


@attrs.frozen
class Boundary:
    """The boundary of the newest update is left: its record, and then its hooks."""


@attrs.frozen
class End:
    """The end of the run is left: the closing record, the hooks ``at_end()``, and then the flush.

    Args:
        stop: why the run has ended; None: it is at its target.
    """

    stop: str | None = None


@attrs.frozen
class Flush:
    """The last save of the run is left, and whatever else hooks complete at its end."""


Left = tuple[Boundary | End | Flush, ...]
BOUNDARY, FLUSH = Boundary(), Flush()


def end_in(left: Left) -> End | None:
    """Return the end of the run, if it is left."""
    return next((action for action in left if isinstance(action, End)), None)


# --- in checkpoints


def encode_stop(stop: str | None) -> dict[str, str]:
    """Return the kind of a stop as JSON."""
    return {} if stop is None else {"stop_kind": str(kind_of(stop))}


def decode_stop(reason: object, kind: object, name: str = "stop") -> Stop | None:
    """Return a stop from its reason and its kind, which checkpoints of before do not have.

    Raises:
        TypeError: they are something else.
    """
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise TypeError(f"{name} is {reason!r:.60}")
    if kind is None:
        limits = (kind for began, kind in _LIMITS.items() if reason.startswith(began))
        kind = next(limits, kind_of(reason))
    if kind not in KINDS:
        raise TypeError(f"the kind of {name} is {kind!r:.60}")
    return Stop(reason, str(kind))


def encode_left(left: Left) -> list[dict[str, object]]:
    """Return what is left as JSON."""
    return [
        {"end": action.stop, **encode_stop(action.stop)}
        if isinstance(action, End)
        else {"boundary" if action == BOUNDARY else "flush": True}
        for action in left
    ]


def decode_left(saved: object) -> Left:
    """Return what is left from JSON.

    Raises:
        TypeError: it was not written by :func:`encode_left`.
    """
    if not isinstance(saved, Sequence) or isinstance(saved, str):
        raise TypeError(f"left is {saved!r:.60}")
    return tuple(map(_decode_action, saved))


def _decode_action(saved: object) -> Boundary | End | Flush:
    match saved:
        case {"boundary": True}:
            return BOUNDARY
        case {"flush": True}:
            return FLUSH
        case {"end": reason, **more}:
            return End(decode_stop(reason, more.get("stop_kind"), "the end that is left"))
    raise TypeError(f"left has {saved!r:.60}")


def left_in_events(events: Sequence[str]) -> tuple[frozenset[str], Left]:
    """Return the events of a boundary and what is left, from a checkpoint that has both in one.

    Before 0.2, "pending" stood for the boundary, and "stop: ..." for the end and its reason.
    """
    reason = next((event.removeprefix("stop: ") for event in events if event[:6] == "stop: "), None)
    left: Left = (BOUNDARY,) if "pending" in events else ()
    left += () if reason is None else (End(decode_stop(reason, None)),)
    known = (event for event in events if event != "pending" and event[:6] != "stop: ")
    return frozenset(known), left
