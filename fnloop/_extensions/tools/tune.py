"""What could make a run faster, and the time that each change saves."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Step
from fnloop._extensions.middleware.compiled import compiled
from fnloop._extensions.middleware.precision import amp, channels_last
from fnloop._extensions.stacks.states import check_one_model
from fnloop._extensions.tools.hints import fused_hint
from fnloop._step.pipeline import pipeline
from fnloop.extend import (
    PipelineStep,
    Reader,
    Rehearsal,
    checks,
    containers,
    isolated,
    optimizers,
    short_traceback,
    tables,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Time what could be changed about a run, on snapshots of its state.

FASTER = 0.97  # a change that is not faster than this is noise
MOST_OF_CALL = 1000  # updates that a call may make, with ``tbptt``
AS_IT_IS, TOGETHER, AT_HAND = "as it is", "together", "batches at hand"
_HOW_READ = {True: "a batch at once", False: "one by one"}


@attrs.frozen
class Trial:
    """What a change has come to.

    Args:
        name: the change.
        seconds: per update, the median of its rounds; None if it failed.
        ratio: to the time of the run as it is, the median over rounds; None if it failed.
        loss: how its losses compare with those of the run as it is, in words; or why it failed.
    """

    name: str
    seconds: float | None
    ratio: float | None
    loss: str


@attrs.frozen
class Reading:
    """How the batches of a loader are read.

    Args:
        data: the class of its data set.
        at_once: whether the samples of a batch are read at once, as rows.
        seconds: per batch.
        by_torch: per batch, with torch's own loader.
    """

    data: str
    at_once: bool
    seconds: float
    by_torch: float


@attrs.frozen(repr=False)
class Advice(tables.Shown):
    """What :func:`tune` has measured: it prints as a table, with the lines to write.

    Args:
        trials: one for each change, the first as it is.
        lines: what to write for the fastest.
        reading: how the batches are read, of a DataLoader without workers; else None.
    """

    trials: tuple[Trial, ...]
    lines: tuple[str, ...]
    reading: Reading | None = None

    def _parts(self) -> list[str | tables.Table[Trial] | tables.Table[Reading]]:
        columns: list[tables.Column[Trial]] = [
            tables.Column("change", lambda t: t.name, left=True),
            tables.Column(
                "ms/update", lambda t: "" if t.seconds is None else f"{t.seconds * 1e3:.3g}"
            ),
            tables.Column("ratio", lambda t: "" if t.ratio is None else f"{t.ratio:.2f}"),
            tables.Column("losses", lambda t: t.loss, left=True),
        ]
        return [tables.Table(columns, self.trials), "", *self._reading_parts(), *self.lines]

    def _reading_parts(self) -> list[str | tables.Table[Trial] | tables.Table[Reading]]:
        if self.reading is None:
            return []
        columns: list[tables.Column[Reading]] = [
            tables.Column("data", lambda r: r.data, left=True),
            tables.Column("samples are read", lambda r: _HOW_READ[r.at_once], left=True),
            tables.Column("µs/batch", lambda r: f"{r.seconds * 1e6:.3g}"),
            tables.Column("torch", lambda r: f"{r.by_torch * 1e6:.3g}"),
            tables.Column("ratio", lambda r: f"{r.seconds / r.by_torch:.2f}"),
        ]
        return [tables.Table(columns, [self.reading]), ""]


@short_traceback
def tune(step: Step, state: TrainState, loader: object, *, seconds: float = 10.0) -> Advice:
    """Find what makes a run faster: time some changes, and print the code to use.

    These are tried where they are possible and not in use: a fused optimizer, ``channels_last()``,
    ``amp("bf16")``, ``compiled()`` (if there is a compiler, and time: ``seconds`` of at least 5),
    workers (or none), prefetching; and how fast the run would be if all batches were at hand, which
    says what the loader costs. The changes take turns. Those that are 3 % faster are then tried
    together. On a machine that others use too, give it more seconds.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state.
        loader: the training loader, which can be read more than once.
        seconds: how long to measure, about. Compiling comes on top, and each change makes two
            updates at least.

    Returns:
        A value that prints as a table: for each change the time of an update, its ratio to that of
        the run as it is, and whether the losses agree (a change of precision or of order rounds in
        another way); how the samples of a ``DataLoader`` without workers are read, with the time of
        a batch beside that of torch's own loader; and the lines to write. It has ``trials``,
        ``reading`` and ``lines``.

    Raises:
        StaleStateError: the state has been advanced already.
        TypeError: an argument has the wrong type, or the loader is an iterator.
        ValueError: ``seconds`` is not above 0.
        NotImplementedError: there are several processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> advice = tune(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, seconds=0.01)
        >>> advice.trials[0].name, advice.trials[0].ratio
        ('as it is', 1.0)

    Notes:
        Every trial trains a snapshot: the state, all generators and the position of the loader stay
        as they are. What a loss function keeps by itself is not copied.

        A batch is read at once where samples are rows, and ``collate_fn`` is torch's: of a
        ``TensorDataset``, a tensor, a NumPy array or memmap, a Hugging Face ``Dataset`` without a
        transform or its column in torch format, and of ``Subset``, ``StackDataset`` and
        ``ConcatDataset`` of these. It has the same bits. A data set of your own is asked for each
        sample, or for all of a batch if it has ``__getitems__``, as torch does.
    """
    trial = Rehearsal.of("tune", step, state, loader, alone="tune")
    check_one_model(state, "tune")
    seconds = checks.number("tune", "seconds", seconds, "how long to measure", above=0)
    if isinstance(loader, Iterator):
        raise TypeError(
            "tune reads the loader more than once; got an iterator, which can be read only once: "
            "pass what it was made from, or list(itertools.islice(loader, 20))"
        )
    if state.backend.world_size > 1:
        raise NotImplementedError(
            "tune measures one process: call it in a script that is started without torchrun"
        )
    with _silent(), Reader.unmoved(loader):
        return _Bench(Setting(trial), seconds).measure()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep the logger silent."""
    silent, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = silent


# --- measuring


@attrs.define
class _Contender:
    """A setting that is timed, and its seconds per update, round by round."""

    name: str
    setting: Setting
    times: list[float] = attrs.field(factory=list)
    losses: dict[str, float] = attrs.field(factory=dict)
    error: str = ""


def _contender(
    name: str, now: Setting, changes: Sequence[Callable[[Setting], Setting]]
) -> _Contender:
    """Return the contender of some changes, or that of an error if they cannot be made."""
    try:
        return _Contender(name, functools.reduce(lambda made, change: change(made), changes, now))
    except Exception as error:
        return _Contender(name, now, error=_in_short(error))


def _in_short(error: Exception) -> str:
    message = str(error).strip().partition("\n")[0]
    return f"fails: {type(error).__name__}: {message:.60}"


class _Bench:
    """Times settings in turn.

    Args:
        now: the setting as it is.
        seconds: how long to measure.
    """

    def __init__(self, now: Setting, seconds: float) -> None:
        self.now, self.seconds, self.state = now, seconds, now.trial.state
        self.updates = 1  # in each round

    def measure(self) -> Advice:
        changes = changes_of(self.now, self.state, self.seconds)
        base = _Contender(AS_IT_IS, self.now)
        singles = [_contender(name, self.now, [change]) for name, change in changes.items()]
        contenders = [base, *singles, _Contender(AT_HAND, self.now.reading(self._at_hand()))]
        estimate, _ = self._time(base.setting)
        share = self.seconds / (5 * len(contenders))  # at least five rounds, if time allows
        self.updates = min(max(1, int(share / max(estimate, 1e-6)) - 2), 500)
        self._rounds(contenders, self.seconds * 2 / 3)
        ratios = _ratios(contenders, base)
        faster = [c for c in singles if not c.error and ratios[c.name] < FASTER]
        best = min(faster, key=lambda c: ratios[c.name], default=base)
        if len(faster) > 1:
            both = _contender(TOGETHER, self.now, [changes[c.name] for c in faster])
            again = _Contender(AS_IT_IS, self.now)
            self._rounds([again, both], self.seconds / 3)
            ratios |= _ratios([both], again)
            if not both.error and ratios[TOGETHER] < ratios[best.name]:
                best = both
            contenders.append(both)
        trials = tuple(_trial(c, base, ratios) for c in contenders)
        return Advice(trials, self._lines(best), self._reading())

    def _reading(self) -> Reading | None:
        """Return how the batches are read, and the time of torch's loader; None with workers."""
        loader = self.now.loader
        with isolated(self.state.backend.device):
            source = self.now.trial.source(self.state)
            if (how := source.reader.how_read()) is None or not isinstance(loader, DataLoader):
                return None
            seconds = _seconds_per_batch(source.batches(self.state.epoch, 0, 0))
            by_torch = _seconds_per_batch(loader)
        return Reading(*how, seconds, by_torch) if seconds and by_torch else None

    def _lines(self, best: _Contender) -> tuple[str, ...]:
        """Return what to write for a setting."""
        if best.name == AS_IT_IS:
            return ("Nothing that was tried is faster.",)
        step = best.setting.trial.step
        changed = (f"step = {step!r}",) if step is not self.now.trial.step else ()
        return (*changed, *best.setting.lines)

    def _rounds(self, contenders: Sequence[_Contender], seconds: float) -> None:
        """Time contenders in turn for some seconds, one round at least, after one to warm up."""
        ends = math.inf
        while not contenders[0].times or time.perf_counter() < ends:
            for c in contenders:
                self._try(c, warm_up=ends == math.inf)
            ends = min(ends, time.perf_counter() + seconds)

    def _try(self, contender: _Contender, warm_up: bool) -> None:
        """Time a contender once. The run as it is may raise; that a change does is its result."""
        if contender.error:
            return
        try:
            taken, contender.losses = self._time(contender.setting)
        except Exception as error:
            if contender.setting is self.now:
                raise
            contender.error = _in_short(error)
            return
        if not warm_up:
            contender.times.append(taken)

    def _time(self, setting: Setting) -> tuple[float, dict[str, float]]:
        """Return the seconds per update of a copy of the state, and its losses."""
        state, stamps, losses = setting.copy(), [], {}
        workers = setting.loader.num_workers if isinstance(setting.loader, DataLoader) else 0
        left_out = 1 + 2 * workers  # the first, and those that workers had time to prepare
        device = state.backend.device

        def stamp(state: TrainState) -> TrainState:
            if device.type != "cpu" and len(stamps) in (left_out - 1, left_out + self.updates - 1):
                torch.get_device_module(device).synchronize()
            stamps.append(time.perf_counter())
            if len(stamps) == 1 + self.updates:  # of the same updates in every trial
                losses.update(_losses(state))
            ends = len(stamps) == left_out + self.updates
            return attrs.evolve(state, stop="enough") if ends else state

        most = state.step + MOST_OF_CALL * (left_out + self.updates)
        trial = attrs.evolve(setting.trial, step=_without_others(setting.trial.step))
        trial.train(
            state, steps=most, hooks=(stamp,), evaluate_every=None, prefetch=setting.prefetch
        )
        return (stamps[-1] - stamps[left_out - 1]) / (len(stamps) - left_out), losses

    def _at_hand(self) -> list[object]:
        """Return a few windows of batches, on the host as a loader gives them."""
        source = self.now.trial.source(self.state)
        each = source.rounds_of(source.batches_in_update(self.now.trial.step.window))
        batches, _ = self.now.trial.read(source, 4 * each)
        return [containers.to_device(batch, torch.device("cpu")) for batch in batches]


def _without_others(step: PipelineStep) -> PipelineStep:
    """Return a step without what watches other metrics than those of training, as ``plateau``."""
    if not step.has_all_rings:
        return step
    members = step.pipeline.middleware
    kept = [m for m in members if m.monitors is None or m.monitors.startswith("train/")]
    return step if len(kept) == len(members) else step.listing(kept)


def _seconds_per_batch(batches: Iterable[object]) -> float | None:
    """Return the median of some, without the first, which opens the loader; None if too few."""
    times, left = [], iter(batches)
    for _ in range(20):
        began = time.perf_counter()
        if next(left, None) is None:
            break
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) if len(times) > 1 else None


def _losses(state: TrainState) -> dict[str, float]:
    """Return the mean losses of an epoch, so far or at its end."""
    return {k: metric.compute() for k, metric in state.metrics.items() if k.endswith("loss")}


def _ratios(contenders: Sequence[_Contender], base: _Contender) -> dict[str, float]:
    """Return the medians of the ratios to a contender of the same rounds, by name."""
    return {
        c.name: statistics.median(
            mine / theirs for mine, theirs in zip(c.times, base.times, strict=True)
        )
        for c in contenders
        if not c.error
    }


def _trial(contender: _Contender, base: _Contender, ratios: dict[str, float]) -> Trial:
    name = contender.name
    if contender.error:
        return Trial(name, None, None, contender.error)
    losses = "" if name in (AS_IT_IS, AT_HAND) else _compared(contender.losses, base.losses)
    return Trial(name, statistics.median(contender.times), ratios[name], losses)


def _compared(mine: dict[str, float], theirs: dict[str, float]) -> str:
    """Return how losses differ, in words."""
    apart = max(
        (abs(mine[name] - value) / max(abs(value), 1e-12) for name, value in theirs.items()),
        default=0.0,
    )
    return f"apart by {apart:.1g}" if apart else "the same bits"


# --------------------------------------------------------------------------------------------------
# What could be changed about a run to make it faster, where it is possible and not in use.

WORTH_COMPILING = 5.0  # seconds: a shorter measurement does not wait for a compiler


@attrs.frozen
class Setting:
    """What is timed.

    Args:
        trial: runs of the step and the loader.
        fused: whether optimizers are fused, where they can be.
        prefetch: how many windows are fetched ahead.
        lines: what to write for all of it but the step.
    """

    trial: Rehearsal
    fused: bool = False
    prefetch: int = 1
    lines: tuple[str, ...] = ()

    @property
    def loader(self) -> object:
        """The training loader."""
        return self.trial.loaders["train"]

    def copy(self) -> TrainState:
        """Return a copy of the state, at the beginning of its epoch."""
        state = self.trial.copy()
        for optimizer in filter(could_be_fused, optimizers(state).values()) if self.fused else ():
            for group in optimizer.param_groups:
                group["fused"] = True
        return state

    def written(self, lines: Sequence[str], **changes: object) -> Setting:
        """Return it with changes, and the lines that make them."""
        changed: Setting = attrs.evolve(self, lines=(*self.lines, *lines), **changes)
        return changed

    def reading(self, loader: object, *lines: str) -> Setting:
        """Return it with another loader, and the lines that make it."""
        return self.written(lines, trial=attrs.evolve(self.trial, loaders={"train": loader}))

    def listing(
        self, first: tuple[Middleware, ...] = (), last: tuple[Middleware, ...] = ()
    ) -> Setting:
        """Return it with more middleware in its step."""
        step = self.trial.step
        members = pipeline(*first, *step.pipeline.middleware, *last).middleware
        return attrs.evolve(self, trial=attrs.evolve(self.trial, step=step.listing(members)))


def changes_of(
    now: Setting, state: TrainState, seconds: float
) -> dict[str, Callable[[Setting], Setting]]:
    """Return what could be changed, by name: functions from a setting to another.

    Args:
        now: the setting.
        state: the state.
        seconds: how long will be measured.
    """
    found: dict[str, Callable[[Setting], Setting]] = {}
    lines = [
        f"{type(optimizer).__name__}(..., fused=True)"
        for optimizer in optimizers(state).values()
        if could_be_fused(optimizer)
    ]
    if lines:
        found["fused"] = lambda s: s.written(lines, fused=True)
    step = now.trial.step
    if step.has_all_rings:
        names = {m.name for m in step.pipeline.middleware}
        if "amp" not in names and state.backend.precision is None:
            found["bf16"] = lambda s: s.listing(first=(amp("bf16"),))
        if "channels_last" not in names and any(p.ndim == 4 for p in state.model.parameters()):
            found["channels_last"] = lambda s: s.listing(last=(channels_last(),))
        if "compiled" not in names and seconds >= WORTH_COMPILING and _has_compiler():
            found["compiled"] = lambda s: s.listing(last=(compiled(),))
    found |= _changes_of_loading(now.loader, state)
    if step.fetches_late:
        found.pop("prefetch=4", None)
    return found


def could_be_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a fused form that was not asked for, nor refused."""
    return "fused=True" in (fused_hint(optimizer) or "")


def _has_compiler() -> bool:
    """Return whether ``torch.compile`` finds a compiler of C++, which it needs on any device."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "cl"))))


def _changes_of_loading(
    loader: object, state: TrainState
) -> dict[str, Callable[[Setting], Setting]]:
    found: dict[str, Callable[[Setting], Setting]] = {}
    by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    workers = loader.num_workers if isinstance(loader, DataLoader) else 0
    if by_index:
        n = 0 if workers else min(4, os.cpu_count() or 1)
        line = f"DataLoader(..., num_workers={n}{', persistent_workers=True' if n else ''})"
        found[f"{n} workers"] = lambda s: s.reading(_with_workers(s.loader, n), line)
    if workers or state.backend.device.type != "cpu":
        found["prefetch=4"] = lambda s: s.written(["fit(..., prefetch=4)"], prefetch=4)
    return found


def _with_workers(loader: object, n: int) -> object:
    changed = copy.copy(loader)
    changed.num_workers = n  # type: ignore[attr-defined]
    return changed
