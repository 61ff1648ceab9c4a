"""Facts about a run, fixed when it starts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import attrs

from fnloop._core.elapsed import Mark
from fnloop._core.position import Position
from fnloop._display import html

__all__ = ["RunInfo", "Stopwatch", "now", "waiting_once"]

Item = TypeVar("Item")


class Stopwatch:
    """The times of a run, in seconds: what it has waited for, and what it has taken.

    Middleware and hooks may read it.

    Attributes:
        waited: the time that the batches of the running update were waited for.
        trained: the time of all updates of the run, with that of waiting for their batches, and
            without evaluations and hooks. A device may still be at work.
        evaluated: the time of the newest evaluation, the longest of all processes; None before it.
        newest: the mark at which the newest update ended; None if an evaluation came after it.
        recorded: whether a record was made; set to False by what looks at it.
    """

    __slots__ = (
        "_began", "_ended", "_resumed", "evaluated", "newest", "recorded", "trained", "waited"
    )  # fmt: skip

    def __init__(self) -> None:
        self.waited = self.trained = 0.0
        self.evaluated: float | None = None
        self.newest: Mark | None = None
        self.recorded = True
        self.resume()
        self.begin(0.0)

    def begin(self, spent: float) -> None:
        """Begin a run. ``spent`` is what was spent in those before it."""
        self._began, self._ended = time.monotonic() - spent, math.inf

    def spent(self) -> float:
        """Return the time spent in this run, until its end, and in those before it."""
        return min(time.monotonic(), self._ended) - self._began

    def end(self) -> None:
        """End the run."""
        self._ended = time.monotonic()

    def resume(self) -> None:
        """Begin to count what follows as training."""
        self._resumed = time.perf_counter()

    def next(self, feed: Iterator[Item], default: Item) -> Item:
        """Return the next item, or the default; note how long it was waited for."""
        __tracebackhide__ = True
        began = time.perf_counter()
        item = next(feed, default)
        now = time.perf_counter()
        self.waited = now - began
        self.trained += now - self._resumed
        self._resumed = now
        return item


def waiting_once(run: RunInfo | None, parts: Sequence[Item]) -> Iterator[Item]:
    """Yield parts that came with one fetch. The time it took counts for the first of them."""
    if run is None:
        yield from parts
        return
    watch = run.stopwatch
    waited = watch.waited
    for part in parts:
        yield part
        watch.waited = 0.0
    watch.waited = waited  # for what surrounds all of them


def _unknown(epoch: int, batch: int) -> Position | None:
    return None


def _no_indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
    return iter(())


@attrs.frozen(repr=False)
class RunInfo:
    """Facts about the current run, fixed when it starts.

    Args:
        epochs: the target for ``state.epoch``, or None.
        total_steps: what ``state.step`` will be at the end, or None if that cannot be known.
        steps_per_epoch: updates in an epoch, or None if the training loader has no length.
        batches_per_epoch: batches in an epoch, or None.
        window: batches per update, of all processes together.
        evaluated: the names of the loaders that are evaluated.
        clock: seconds since a moment of the run, the same in every process; None where there is one
            process, which has a clock of its own.
        loader: the name of the loader that is being evaluated; None in training.
        stopwatch: what the run has waited for.
        first_step: ``state.step`` when the phase began; 0 without phases.
        position_at: ``(epoch, batch) -> where the training loader was after this batch``, or None.
        indices_at: ``(epoch, batch, samples) -> which samples of its dataset each batch of this
            process has``, from that position on; nothing where that is unknown. It may draw from
            the global generators.
        precision: what ``amp`` computes in, or else accelerate: "bf16" or "fp16"; None: neither.
        hook_slots: the names of the slots that hooks keep, and not the step.
        turns: the names of the turns of ``alternate``; none for another step.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.run.epochs, state.run.steps_per_epoch, state.run.total_steps)
        ...     return state
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 5
        >>> state = fl.fit(step, toy(), batches, epochs=2, hooks=(fl.once(show),))
        2 5 10
    """

    epochs: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    batches_per_epoch: int | None = None
    window: int = 1
    evaluated: tuple[str, ...] = ()
    clock: Callable[[], float] | None = attrs.field(default=None, eq=False)
    loader: str | None = None
    stopwatch: Stopwatch = attrs.field(factory=Stopwatch, eq=False)
    precision: str | None = None
    first_step: int = 0
    position_at: Callable[[int, int], Position | None] = attrs.field(default=_unknown, eq=False)
    indices_at: Callable[[int, int, int], Iterator[object]] = attrs.field(
        default=_no_indices, eq=False
    )
    hook_slots: frozenset[str] = frozenset()
    turns: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return html.record_text("RunInfo", self._facts())

    def _repr_html_(self) -> str:
        facts = self._facts() | {"evaluated": ", ".join(self.evaluated)}
        return html.facts("RunInfo", {k: v for k, v in facts.items() if v not in (None, "")})

    def _facts(self) -> dict[str, object]:
        hidden = ("clock", "hook_slots", "indices_at", "loader", "position_at", "stopwatch")
        rare = ("precision", "first_step", "turns")
        facts = attrs.asdict(self, filter=lambda field, value: field.name not in hidden)
        return {name: fact for name, fact in facts.items() if fact or name not in rare}


def now(run: RunInfo | None) -> float:
    """Return a time in seconds, the same in every process of a run."""
    clock = None if run is None else run.clock
    return time.monotonic() if clock is None else clock()
