"""What a run knows of itself: its facts and clocks, where a stream is, why it stopped."""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypedDict, TypeVar

import attrs
from torch import Tensor

from fnloop._core.records import Record
from fnloop._display import reprs

# --------------------------------------------------------------------------------------------------
# How the batches of an epoch are grouped into updates.


class Stretch(NamedTuple):
    """Updates of an epoch that take equally many batches.

    Args:
        batch: the position in the epoch where it begins.
        window: the batches of each update, of all processes together.
    """

    batch: int
    window: int


@attrs.frozen
class Windows:
    """The windows of an epoch: its stretches, in their order. The last one has no end.

    Example:
        >>> windows = Windows.by_update({0: 1, 3: 4}, batch=2, update=2)
        >>> windows.updates(3), windows.updates(9)       # 1 + 1 + 1, and then 4 + 2
        (3, 5)
        >>> windows.updates_of(7, begin=2)
        3
        >>> [*itertools.islice(windows.sizes(2), 3)]
        [1, 4, 4]
    """

    stretches: tuple[Stretch, ...]

    @staticmethod
    def always(window: int) -> Windows:
        """Return windows that never vary."""
        return Windows((Stretch(0, window),))

    @staticmethod
    def by_update(sizes: Mapping[int, int], batch: int, update: int) -> Windows:
        """Return windows that vary with the update.

        Args:
            sizes: the batches of an update, by the first update that has them, from 0 on.
            batch: a position in the epoch.
            update: the updates before this position, of this epoch and of those before it.
        """
        firsts = sorted(sizes)
        begin, first = batch, update  # from there back to where the epoch has begun
        while begin > 0 and first > 0:
            since = firsts[bisect.bisect_left(firsts, first) - 1]
            several = min(first - since, -(-begin // sizes[since]))
            begin, first = begin - several * sizes[since], first - several
        found, since = [], first
        window = sizes[firsts[bisect.bisect_right(firsts, first) - 1]]
        for number in [n for n in firsts if n > first]:
            found.append(Stretch(begin, window))
            begin, since, window = begin + (number - since) * window, number, sizes[number]
        return Windows((*found, Stretch(begin, window)))

    @property
    def largest(self) -> int:
        """The batches of the largest window."""
        return max(each.window for each in self.stretches)

    def sizes(self, batch: int) -> Iterator[int]:
        """Yield how many batches each update takes, from a position on."""
        for each, following in itertools.zip_longest(self.stretches, self.stretches[1:]):
            while following is None or batch < following.batch:
                yield each.window
                batch += each.window

    def updates(self, batch: int) -> int:
        """Return how many updates an epoch has up to a position; one that has begun counts."""
        begin = self.stretches[0].batch
        return self.updates_of(batch - begin, begin)

    def updates_of(self, batches: int, begin: int = 0) -> int:
        """Return how many updates a number of batches makes, from a position on."""
        made = 0
        for each, following in itertools.zip_longest(self.stretches, self.stretches[1:]):
            room = batches if following is None else min(batches, following.batch - begin)
            if room > 0:
                made, begin, batches = made - (-room // each.window), begin + room, batches - room
        return made


_OF_ONE_BATCH = Windows.always(1)


class Notices:
    """Where parts of a run tell what happens in it, for hooks that write it down.

    Attributes:
        listeners: each is called with ``(state, event, facts)``.
    """

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: list[Callable[[object, str, Mapping[str, object]], None]] = []

    def tell(self, state: object, event: str, **facts: object) -> None:
        """Tell of an event, with the state after it."""
        for listener in self.listeners:
            listener(state, event, facts)


# --------------------------------------------------------------------------------------------------
# What moves while a run lasts, and the facts about it.

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
        resumed: since when time counts as training: after a boundary, or after the newest fetch.
    """

    __slots__ = (
        "_began", "_ended", "evaluated", "newest", "recorded", "resumed", "trained", "waited"
    )  # fmt: skip

    def __init__(self) -> None:
        self.waited = self.trained = 0.0
        self.evaluated: float | None = None
        self.newest: object = None
        self.recorded = True
        self.resumed = time.perf_counter()
        self.begin(0.0)

    def waiting_once(self, parts: Sequence[Item]) -> Iterator[Item]:
        """Yield parts that came with one fetch. The time it took counts for the first of them."""
        waited = self.waited
        for part in parts:
            yield part
            self.waited = 0.0
        self.waited = waited  # for what surrounds all of them

    def begin(self, spent: float) -> None:
        """Begin a run. ``spent`` is what was spent in those before it."""
        self._began, self._ended = time.monotonic() - spent, math.inf

    def spent(self) -> float:
        """Return the time spent in this run, until its end, and in those before it."""
        return min(time.monotonic(), self._ended) - self._began

    def end(self) -> None:
        """End the run."""
        self._ended = time.monotonic()


def _unknown(epoch: int, batch: int) -> Position | None:
    return None


def _no_indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
    return iter(())


def local_clock() -> float:
    """Return a time in seconds, of this process."""
    return time.monotonic()


@attrs.frozen(eq=False)
class Live:
    """What moves while a run lasts: its clocks, and where its parts ask and tell each other.

    Args:
        clock: seconds since a moment of the run, the same in every process.
        position_at: ``(epoch, batch) -> where the training loader was after this batch``, or None.
        indices_at: ``(epoch, batch, samples) -> which samples of its dataset each batch of this
            process has``, from that position on; nothing where that is unknown. It may draw from
            the global generators.
        made_with: returns what the run is made with, as its checkpoints keep it.
        stopwatch: what the run has waited for.
        notices: where parts of the run tell what happens in it.
    """

    clock: Callable[[], float] = local_clock
    position_at: Callable[[int, int], Position | None] = _unknown
    indices_at: Callable[[int, int, int], Iterator[object]] = _no_indices
    made_with: Callable[[], Mapping[str, object]] = dict
    stopwatch: Stopwatch = attrs.field(factory=Stopwatch)
    notices: Notices = attrs.field(factory=Notices)


LEFT_OUT = "ends"  # the slot with the number of updates left out because hooks ended epochs early


@attrs.frozen(repr=False)
class RunInfo:
    """Facts about the current run and epoch, such as ``total_steps``.

    Args:
        epochs: the target for ``state.epoch``, or None.
        total_steps: what ``state.step`` will be at the end, or None if that cannot be known.
        steps_per_epoch: updates in the epoch, or None if the training loader has no length.
        batches_per_epoch: batches in the epoch, or None.
        window: batches per update, of all processes together; where that varies within an epoch,
            the most.
        evaluated: the names of the loaders that are evaluated.
        precision: what ``amp`` computes in, or else accelerate: "bf16" or "fp16"; None: neither.
        first_step: ``state.step`` when the phase began; 0 without phases.
        total_items: the target for ``state.items``, or None.
        first_items: ``state.items`` when the phase began; 0 without phases.
        turns: the names of the turns of ``alternate``; none for another step.
        models: the names of the models of a stack; none for another state.
        loader: the name of the loader that is being evaluated; None in training.
        hook_slots: the names of the slots that the run and its hooks keep, and not the step.
        reported: the names of the numbers that hooks say they add to records.
        windows: how the batches of the epoch are grouped into updates.
        live: what moves while the run lasts, such as its stopwatch.

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
    precision: str | None = None
    first_step: int = 0
    turns: tuple[str, ...] = ()
    total_items: int | None = None
    first_items: float = 0
    models: tuple[str, ...] = ()
    loader: str | None = attrs.field(default=None, repr=False)
    hook_slots: frozenset[str] = attrs.field(default=frozenset({LEFT_OUT}), repr=False)
    reported: frozenset[str] = attrs.field(default=frozenset(), repr=False)
    windows: Windows = attrs.field(default=_OF_ONE_BATCH, repr=False)
    live: Live = attrs.field(factory=Live, eq=False, repr=False)

    @staticmethod
    def now(run: RunInfo | None) -> float:
        """Return a time in seconds, the same in every process of a run; None: there is no run."""
        return local_clock() if run is None else run.live.clock()

    def __repr__(self) -> str:
        return reprs.record_text("RunInfo", self._facts())

    def _repr_html_(self) -> str:
        facts = self._facts() | {"evaluated": ", ".join(self.evaluated)}
        return reprs.facts("RunInfo", {k: v for k, v in facts.items() if v not in (None, "")})

    def _facts(self) -> dict[str, object]:
        rare = ("precision", "first_step", "turns", "models", "total_items", "first_items")
        facts = attrs.asdict(self, filter=lambda field, value: bool(field.repr))
        return {name: fact for name, fact in facts.items() if fact or name not in rare}


# --------------------------------------------------------------------------------------------------
# Why a run has ended before its target, and what it leaves to the run that continues it.

INTERRUPTIONS = ("interrupted", "job", "requeued")


class Stop(str):
    """Why a run has ended before its target: a str, equal to the reason, that knows its kind.

    Args:
        reason: the reason, as ``state.stop`` shows it.
        kind: what has stopped the run. "hook": a hook. "guard": a middleware that skips updates.
            "limit": the time of the run is over. The others are interruptions: the same script,
            started again, continues the run. "interrupted": Ctrl-C or SIGTERM. "job": the time of
            the job is over. "requeued": SIGUSR1.

    Example:
        >>> stop = Stop("my_limit: the budget is spent", "limit")
        >>> stop, Stop.kind_of(stop), Stop.kind_of("enough"), Stop.interrupts("SIGTERM")
        ('my_limit: the budget is spent', 'limit', 'hook', True)
    """

    KINDS: ClassVar[tuple[str, ...]] = ("hook", "guard", "limit", *INTERRUPTIONS)

    kind: str

    def __new__(cls, reason: str, kind: str = "hook") -> Stop:
        stop = super().__new__(cls, reason)
        stop.kind = kind
        return stop

    def __reduce__(self) -> tuple[type[Stop], tuple[str, str]]:
        return Stop, (str(self), self.kind)

    @staticmethod
    def kind_of(stop: str | None) -> str | None:
        """Return the kind of a stop. A plain str is that of a hook, unless it is of a signal."""
        if stop is None or isinstance(stop, Stop):
            return None if stop is None else stop.kind
        return _SIGNALS.get(stop, "hook")

    @staticmethod
    def interrupts(stop: str | None) -> bool:
        """Return whether a run has only ended for now: the same script continues it."""
        return Stop.kind_of(stop) in INTERRUPTIONS

    @staticmethod
    def ends_job(stop: str | None) -> bool:
        """Return whether a run has only ended because the time of its job is over."""
        return Stop.kind_of(stop) in ("job", "requeued")

    @staticmethod
    def ends_run(stop: str | None) -> bool:
        """Return whether a run ends for this reason: what is due at its end is made."""
        return stop is not None and not Stop.interrupts(stop)

    @staticmethod
    def ends_phase(stop: str | None) -> bool:
        """Return whether a phase that ends for this reason, or at its target, is done."""
        return stop is None or (Stop.ends_run(stop) and Stop.kind_of(stop) != "limit")


INTERRUPTED, TERMINATED = Stop("interrupted", "interrupted"), Stop("SIGTERM", "interrupted")
REQUEUED = Stop("SIGUSR1", "requeued")
_SIGNALS = {str(stop): stop.kind for stop in (INTERRUPTED, TERMINATED, REQUEUED)}


def first_stop(before: str | None, after: str | None) -> str | None:
    """Return the stop that stays, of that before a hook and that after it.

    The first reason to end the run stays. A hook may take it back, and it may end a run that was
    only interrupted, because it decides only once.
    """
    return before if after is not None and Stop.ends_run(before) else after


# --------------------------------------------------------------------------------------------------
# What a run does next. `TrainState.todo` is a list of actions: a run takes the first off, does it,
# and gets a state with a new list. They are plain data, and a checkpoint has them.


class Action:
    """What a run does next.

    Attributes:
        of_boundary: whether it is of a boundary: what follows depends on what it does.
        updates: whether an update follows it.
        can_wait: whether an interrupted run leaves it to the one that continues it. The records of
            a boundary that has begun are made, and its hooks are called, first.
        of_end: whether it is at a boundary because the run ends.
    """

    of_boundary = updates = can_wait = of_end = False


@attrs.frozen
class Start(Action):
    """Before the first update: evaluate, and call the hooks of that moment."""

    of_boundary = updates = can_wait = True


@attrs.frozen
class Update(Action):
    """Update until something is due after an update, or the epoch ends."""

    updates = can_wait = True


@attrs.frozen
class Boundary(Action):
    """Decide what is due after an update, and put it on the list.

    Args:
        ended: whether the epoch ends here.
    """

    ended: bool = False
    of_boundary = updates = True


class Kind(NamedTuple):
    """A kind of records.

    Args:
        trained: what the names of the metrics of training begin with that it has: those of the
            epoch, and those of the interval of ``record_every``.
        begins_interval: whether the next interval begins with it.
    """

    trained: tuple[str, ...]
    begins_interval: bool


@attrs.frozen
class Append(Action):
    """Append a record.

    Args:
        kind: "epoch": of an epoch that has ended. "evaluation": within one. "recent": of
            ``record_every``, with no "train/..." metrics. "numbers": of those of hooks alone, so
            that no other metric has a value more. "closing": because the run ends here.
        names: the loaders to evaluate for it, and the numbers of hooks that are due.
    """

    KINDS: ClassVar[Mapping[str, Kind]] = {
        "epoch": Kind(Record.TRAINED, True),
        "evaluation": Kind(Record.TRAINED, True),
        "recent": Kind(Record.TRAINED[1:], True),
        "numbers": Kind((), False),
        "closing": Kind(Record.TRAINED, False),
    }

    kind: str
    names: tuple[str, ...] = ()
    of_boundary = True

    @property
    def of_end(self) -> bool:
        """Whether it is a closing record."""
        return self.kind == "closing"

    can_wait = of_end


@attrs.frozen
class Collect(Action):
    """Evaluate loaders for the hooks that ask for outputs at the end.

    What these evaluations come to is in no record. The numbers that hooks make of the outputs are
    in a closing record. Outputs that are kept until then are not saved: the run that continues
    evaluates again.
    """

    loaders: tuple[str, ...]
    of_boundary = can_wait = of_end = True


@attrs.frozen
class Call(Action):
    """Call a hook, and then those after it.

    Args:
        stage: "start", "boundary" or "end". All hooks are called at a boundary, and at the start if
            there is a record; else those that may be due there.
        nth: which of the hooks of the stage, from 0.
    """

    stage: str
    nth: int = 0
    of_boundary = True

    @property
    def of_end(self) -> bool:
        """Whether it is a call at the end."""
        return self.stage == "end"


@attrs.frozen
class Meet(Action):
    """Leave an epoch: all processes wait for each other, and compare what they have come to.

    Args:
        ended: whether the epoch has ended; else the run ends within it, or a hook has gone back.
    """

    ended: bool


@attrs.frozen
class End(Action):
    """The end of the run: the closing record, and the hooks of that moment."""

    can_wait = True


@attrs.frozen
class Flush(Action):
    """Let the hooks complete what they keep, such as the last save.

    Args:
        stop: why the run has ended; None: it is at its target, or SIGUSR1 asked for a save.
    """

    stop: str | None = None


Todo = tuple[Action, ...]

RAN, CLOCK = "ran", "clock"  # the notes in `TrainState.noted`, before a number


def pending(todo: Todo) -> Todo:
    """Return what is left to do of a boundary that has begun."""
    return tuple(itertools.takewhile(lambda action: action.of_boundary, todo))


def reason_of(todo: Todo) -> str | None:
    """Return why the run has ended, if its end is still to be made."""
    return todo[-1].stop if todo and isinstance(todo[-1], Flush) else None


def with_reason(todo: Todo, stop: str | None) -> Todo:
    """Return actions that say why the run has ended, if it has, as a guard ends it."""
    if Stop.ends_run(stop) and reason_of(todo) is None:
        return (*todo, Flush(stop))
    return todo


# --------------------------------------------------------------------------------------------------
# The position of a stream in the middle of an epoch, as plain data.


UNKNOWN = -1  # in the place of a checksum


class _Known(TypedDict):
    epoch: int
    batch: int
    shards: int
    keeper: str
    state: object
    next: int | None


class Position(_Known, total=False):
    """Where the training loader was after a batch. A checkpoint holds it.

    Args:
        epoch: the epoch.
        batch: how many batches were drawn; with ``shards`` above 1, by this process.
        shards: how many processes read a part of their own; 1 if each reads the whole stream.
        keeper: the name of the class that knows it; empty if the loader is read again up to there.
        state: what its ``state_dict`` returned.
        next: a checksum of the batch that came next; None if there was none, ``UNKNOWN`` if that
            was not known yet.
        size: how many samples or batches the loader has, and of which of the two; None if that is
            not known. Positions of older versions do not have it, nor what follows.
        own: the states of generators of its own when the epoch began, by their paths.
        later: their states at the position.
        order: a checksum of the indices that a sampler of the user's has given so far.
        indices: these indices, unless there are too many.
    """

    size: list[int | str] | None
    own: dict[str, object]
    later: dict[str, object]
    order: int
    indices: Tensor
