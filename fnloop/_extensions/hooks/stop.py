"""Hooks that stop a run: by a metric, a loss that is not finite, or time."""

from __future__ import annotations

import itertools
import logging
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from numbers import Integral

import attrs
import torch
from torch import Tensor

from fnloop._backend.collectives import broadcast
from fnloop._core.metrics import Mean
from fnloop._core.records import Record
from fnloop._core.runs import RunInfo
from fnloop._core.several import models_of
from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints.format import NUMBER, PARTS, check_shape
from fnloop._hooks.hook import Hook, every
from fnloop.extend import (
    BuiltIn,
    Call,
    Fold,
    Metrics,
    Monitored,
    Stop,
    checks,
    collectives,
    containers,
    engine_of,
    isolated,
    reprs,
    tables,
    with_slot,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Which update made the training loss infinite or NaN, without a read from the device in between.
#
# At each boundary it is noted where the loader is, and whether the running loss is finite: a
# tensor, which is not read. When the loss is found not to be finite, all of them are read at once.

KEY = "nonfinite"  # state.extra["nonfinite"]


@attrs.frozen
class _Mark:
    """A boundary: the counters of the state, and whether the running loss was finite there.

    That is a tensor if it is not read.
    """

    step: int
    epoch: int
    batch: int
    samples: int
    finite: bool | Tensor


class Trail:
    """The boundaries since the loss was last known to be finite, the oldest first."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []

    def begin(self, state: TrainState) -> None:
        """Begin where a run begins."""
        self._marks = []
        self.note(state)

    def note(self, state: TrainState) -> None:
        """Note a boundary."""
        loss: object = state.metrics.get("loss")
        finite: bool | Tensor = True
        if isinstance(loss, Mean):
            total = loss.total
            finite = total.isfinite().all() if isinstance(total, Tensor) else math.isfinite(total)
        mark = _Mark(state.step, state.epoch, state.batch, state.samples, finite)
        self._marks.append(mark)

    def forget(self) -> None:
        """Forget the boundaries before the newest one: the loss is finite."""
        self._marks = [attrs.evolve(mark, finite=True) for mark in self._marks[-1:]]

    def find(self, state: TrainState) -> dict[str, object] | None:
        """Return where the loss stopped to be finite, and which samples it was of. A collective.

        Args:
            state: the state of the newest boundary.

        Returns:
            The position of the first batch of the update, ``state.step`` after it, and the indices
            of the samples of each of its batches; None if it was before the first mark.
        """
        device = state.backend.device
        every = [torch.as_tensor(mark.finite, device=device) for mark in self._marks]
        flags = torch.stack(every).tolist() if every else []
        known = flags.index(False) if False in flags else len(flags)
        place = min(collectives.gather_objects(known, "the hook halt_on_nonfinite"))
        if not 0 < place < len(flags):
            return None
        before, after = self._marks[place - 1 : place + 1]
        found = {"epoch": before.epoch, "batch": before.batch, "step": after.step}
        return {**found, "indices": _indices(state, before, after)}


def _indices(state: TrainState, before: _Mark, after: _Mark) -> list[object] | None:
    """Return the indices of the samples of the batches between two marks, if they are known."""
    run = state.run
    if run is None:
        return None
    batches = after.batch - before.batch
    if after.epoch != before.epoch or batches <= 0:  # at its end; or a hook went back since
        batches = run.window
    rounds = -(-batches // state.backend.data_size)
    with isolated(state.backend.device):
        own = run.live.indices_at(before.epoch, before.batch, before.samples)
        mine = [containers.map_leaves(index, _plain) for index in itertools.islice(own, rounds)]
    every = collectives.gather_shares(mine, "the hook halt_on_nonfinite")
    found = [index for round_ in itertools.zip_longest(*every) for index in round_]
    known = [index for index in found if index is not None and index != []]
    return known or None


def _plain(index: object) -> object:
    if isinstance(index, Integral):
        return int(index)
    return index if isinstance(index, float | str) else repr(index)


def describe_place(place: Mapping[str, object]) -> str:
    """Return where the loss stopped to be finite, in words."""
    text = f"at step {place['step']} (epoch {place['epoch']}, batch {place['batch']}"
    if place["indices"] is None:
        return f"{text})"
    names = [str(name) for name in _flat(place["indices"])]
    return f"{text}, sample{'s' * (len(names) > 1)} {checks.join_names(names, 8)})"


def _flat(index: object) -> list[object]:
    if isinstance(index, Mapping):
        return [f"{name} {i}" for name, part in index.items() for i in _flat(part)]
    if isinstance(index, list | tuple):
        return [i for part in index for i in _flat(part)]
    return [index]


# --------------------------------------------------------------------------------------------------
# Stop a run early, by a metric or by a loss that is not finite.


@attrs.frozen
class _Wait:
    """The reference value, its record, and the number of evaluations that did not improve on it."""

    reference: float
    record: Record
    evaluations: int = 0


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class early_stop(Hook):
    """Stop when a metric has not improved for ``patience`` evaluations.

    The decision is a function of the history, so a resumed run stops where an uninterrupted one
    would. NaN is worse than any number. Closing records, which a run appends if it ends between two
    evaluations, do not count.

    Args:
        key: the metric, such as "valid/loss".
        patience: evaluations without improvement after which to stop; at least 1. 1 stops at the
            first evaluation without improvement (0 in some libraries).
        min_delta: the least improvement, in the units of the metric: a value must be better by more
            than this to count.
        relative: whether ``min_delta`` is a share of the value that is compared with: 0.01 is 1 %.
        baseline: a value that has to be beaten too. Evaluations that do not beat it count as ones
            without improvement.
        start_from_epoch: the epochs of a warm-up: an evaluation counts if more than these are
            complete.
        mode: "min" if lower is better, "max" if higher. With None, the name after the loader's
            decides: "loss" and "error" should fall; "acc", "f1", "auc", "precision" and "recall"
            should rise. Any other name needs a mode.
        reference: the value that a new one is compared with: "accepted", the last one that counted
            as an improvement, so that small gains add up; or "best", the best value so far, so that
            each gain alone must exceed ``min_delta``.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as the metric is worse than this, or NaN.
        min_epochs: ``state.epoch`` before which the run is never stopped.
        min_steps: ``state.step`` before which the run is never stopped.
        check_finite: whether to stop as soon as the metric is NaN or infinite.
        since: which evaluations count: those of the "phase", if the run has phases, or of the whole
            "run".

    Returns:
        A hook.

    Raises:
        TypeError: key is not a str, or check_finite is not a bool.
        ValueError: a setting is out of range, or mode is None and the name of the metric does not
            imply one.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At its first evaluation: your own middleware or hook, which might add it, has not
            added it. The message lists the metrics that exist.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline()(toy_loss)      # each update lowers the loss
        >>> stop = early_stop("train/loss", patience=2, mode="max")
        >>> state = fl.fit(step, toy(), [torch.ones(1)], epochs=100, hooks=(stop,))
        >>> state.epoch, state.stop
        (3, 'early_stop: train/loss has not improved for 2 evaluations (best 0.0000, epoch 1)')

    Source: Prechelt, 1998, https://doi.org/10.1007/3-540-49430-8_3

    Replaces: lightning.EarlyStopping, keras.EarlyStopping,
    pytorch_accelerated.EarlyStoppingCallback, transformers.EarlyStoppingCallback,
    fastnlp.EarlyStopCallback
    """

    key: str
    patience: int = 3
    min_delta: float = 0.0
    mode: str | None = None
    reference: str = attrs.field(default="accepted", kw_only=True)
    relative: bool = attrs.field(default=False, kw_only=True)
    baseline: float | None = attrs.field(default=None, kw_only=True)
    start_from_epoch: int = attrs.field(default=0, kw_only=True)
    stopping_threshold: float | None = attrs.field(default=None, kw_only=True)
    divergence_threshold: float | None = attrs.field(default=None, kw_only=True)
    min_epochs: int = attrs.field(default=0, kw_only=True)
    min_steps: int = attrs.field(default=0, kw_only=True)
    check_finite: bool = attrs.field(default=True, kw_only=True)
    since: str = attrs.field(default="phase", kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks.make_plain(self)
        owner = "early_stop"
        self._watched = Monitored(owner, self.key, self.mode, self.since)
        self.monitors = self.key
        meaning = "a number of evaluations"
        if type(self.patience) is int and self.patience == 0:
            meaning += " (1 stops at the first one without improvement; some libraries call that 0)"
        checks.integer(owner, "patience", self.patience, meaning)
        checks.number(owner, "min_delta", self.min_delta, "the least improvement", least=0)
        checks.choice(owner, "reference", self.reference, ("accepted", "best"))
        checks.flag(owner, "relative", self.relative)
        values = ("baseline", "stopping_threshold", "divergence_threshold")
        for name, value in checks.fields_of(self, values).items():
            if value is not None:
                checks.number(owner, name, value, "a value of the metric, or None", finite=False)
        numbers = ("start_from_epoch", "min_epochs", "min_steps")
        for name, value in checks.fields_of(self, numbers).items():
            unit = "updates" if name == "min_steps" else "epochs"
            checks.integer(owner, name, value, f"a number of {unit}", least=0)
        checks.flag(owner, "check_finite", self.check_finite)
        self._waited = Fold(self._wait, None)  # caches the last result, so copies are safe

    def __repr__(self) -> str:
        return repr(Call.of(early_stop, self))

    def __call__(self, state: TrainState) -> TrainState:
        if self._watched.measured(state) is None or state.history[-1].closing:
            return state
        reason = self._find_reason(state)
        if reason is None or state.epoch < self.min_epochs or state.step < self.min_steps:
            return state
        return attrs.evolve(state, stop=f"early_stop: {self.key} {reason}")

    def _wait(self, before: _Wait | None, record: Record) -> _Wait | None:
        if not self._watched.counts(record):
            return before
        if self.start_from_epoch and record.epoch <= self.start_from_epoch:
            return before
        value = record.metrics[self.key]
        evaluations = 1 if before is None else before.evaluations + 1
        if before is None or self._improves(value, before.reference):
            beaten = self.baseline is None or self._improves(value, self.baseline)
            return _Wait(value, record, 0 if beaten else evaluations)
        if self.reference == "best" and self._watched.better(value, before.reference):
            return _Wait(value, record, evaluations)
        return attrs.evolve(before, evaluations=evaluations)

    def _improves(self, value: float, reference: float) -> bool:
        """Return whether a value is better than another by more than ``min_delta``."""
        share = self.relative and math.isfinite(reference)  # of inf, it would be NaN
        margin = self.min_delta * (abs(reference) if share else 1.0)
        least = reference - margin if self._watched.mode == "min" else reference + margin
        return self._watched.better(value, least)

    def _find_reason(self, state: TrainState) -> str | None:
        """Return why to stop, or None."""
        newest = state.history[-1].metrics[self.key]
        better = self._watched.better
        direction = f"({'lower' if self._watched.mode == 'min' else 'higher'} is better)"
        good, bad = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(newest):
            return f"is not finite: {newest}"
        written = reprs.format_metric(self.key, newest)
        if good is not None and better(newest, good):
            return f"reached {written}, better than {good:g} {direction}"
        if bad is not None and better(bad, newest):
            return f"diverged to {written}, worse than {bad:g} {direction}"
        wait = self._waited(state.history, self._watched.first(state))
        if wait is None or wait.evaluations < self.patience:
            return None
        # With min_delta, later values may be better than an accepted one, but not by enough.
        best = "best" if self.reference == "best" or not self.min_delta else "compared with"
        share = f" {self.min_delta:.4g} of it" if self.relative else f" {self.min_delta:g}"
        least = f" by more than{share}" if self.min_delta else ""
        if self.baseline is not None and not self._improves(wait.reference, self.baseline):
            least = f" on the baseline {self.baseline:g}{least}"
        where = _place(wait.record, state)
        return (
            f"has not improved{least} for {reprs.format_count(wait.evaluations, 'evaluation')} "
            f"({best} {reprs.format_metric(self.key, wait.reference)}, {where})"
        )


def _place(record: Record, state: TrainState) -> str:
    """Return where a record is: its epoch if it was made at the end of one, otherwise its step."""
    at = next(n for n, r in enumerate(state.history) if r.epoch == record.epoch)
    # The first of its epoch was made when that ended, unless a phase began by leaving the epoch.
    left = any(p.epoch == record.epoch and p.records <= at for p in state.phases)
    ended = record.epoch > 0 and not left and state.history[at].step == record.step
    return f"epoch {record.epoch}" if ended else f"step {record.step}"


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class halt_on_nonfinite(BuiltIn):
    """Stop when the training loss has become NaN or infinite.

    NaN propagates into the running mean of the epoch. The mean is read every ``steps`` updates and
    at every record, with no device reads in between; a record of ``record_every`` has the mean
    since the last record. By then the bad update has reached the parameters: go back to a
    checkpoint or a snapshot. The mean begins again with every epoch.

    Args:
        steps: applied updates between two reads; at least 1.
        keep: whether to find out which update and which samples it was. It costs a kernel in each
            update.
        raises: whether to raise instead of stopping. The error has the state of that boundary, as
            each that ends a run: ``error.state``.

    Returns:
        A hook.

    Raises:
        ValueError: steps is below 1.
        TypeError: keep or raises is not a bool.
        FloatingPointError: in a run, with ``raises``: the loss is not finite.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([float("nan")])] * 3
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), batches, hooks=(halt_on_nonfinite(),))
        >>> state.stop
        'halt_on_nonfinite: the training loss became nan between steps 1 and 3; ...'
        >>> hooks = (halt_on_nonfinite(keep=True),)
        >>> fl.fit(fl.pipeline()(toy_loss), toy(), batches, hooks=hooks).extra["nonfinite"]
        {'epoch': 0, 'batch': 0, 'step': 1, 'indices': None}

    Notes:
        To find the line that makes it, run that part again ``with
        torch.autograd.detect_anomaly():`` around ``fit``, for a NaN in backward. For one in
        forward, register a hook with each module that raises if ``not output.isfinite().all()``:
        ``module.register_forward_hook(hook)``. Both errors say in which batch it was, and come
        before the update is applied.

        With ``keep`` it also finds out which update it was. It notes after every update whether the
        mean is finite, in a tensor that is not read, and reads all of them when it stops. Then
        ``state.extra["nonfinite"]`` has the position of the first batch of that update, ``{"epoch",
        "batch", "step", "indices"}``: ``step`` is ``state.step`` after it, and ``indices`` are
        those of the samples of each of its batches; None if they are not taken by index.
        ``state.stop`` names them too. A run that was resumed knows of its own updates only.
        ``fnloop.debug.replay(folder, ..., update=step)`` makes the update again, and finds out
        which of the samples it was. Keep checkpoints from before it: ``checkpoint(folder,
        keep=None)``.

    Replaces: keras.TerminateOnNaN, pytorch_accelerated.TerminateOnNaNCallback
    """

    steps: int = 100
    keep: bool = attrs.field(default=False, kw_only=True)
    raises: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks.make_plain(self)
        checks.integer("halt_on_nonfinite", "steps", self.steps, "the updates between two reads")
        checks.flag("halt_on_nonfinite", "keep", self.keep)
        checks.flag("halt_on_nonfinite", "raises", self.raises)
        self._trail, self._when = Trail(), every(steps=self.steps)

    def __repr__(self) -> str:
        flags = {"keep": self.keep, "raises": self.raises}
        given = {name: True for name, flag in flags.items() if flag}
        return repr(Call(halt_on_nonfinite, (), {"steps": self.steps, **given}))

    def begin(self, state: TrainState) -> TrainState:
        """Note where the run begins."""
        if self.keep:
            self._trail.begin(state)
        return state

    def poll(self, state: TrainState) -> TrainState:
        """Note where the run is, even at a boundary where the hook itself is not called."""
        if self.keep:
            self._trail.note(state)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        self.poll(state)
        loss, which = self._read(state)
        if loss is None:
            return state
        if math.isfinite(loss):
            self._trail.forget()
            return state
        place = self._trail.find(state) if self.keep else None
        where = self._interval(state) if place is None else describe_place(place)
        reason = f"halt_on_nonfinite: the training loss{which} became {loss} {where}"
        if self.raises:
            raise FloatingPointError(reason)
        extra = state.extra if place is None else {**state.extra, KEY: place}
        return attrs.evolve(state, stop=reason, extra=extra)

    def _read(self, state: TrainState) -> tuple[float | None, str]:
        """Return the mean loss, and of which models it is. Of a stack it is a bad one, if any."""
        models = models_of(state.model)
        losses = self._losses(state, [f"{name}/loss" for name in models] or ["loss"])
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return next(iter(losses), None), ""
        which = f" of {checks.join_names([models[i] for i in bad])}" if models else ""
        return losses[bad[0]], which

    def _losses(self, state: TrainState, names: Sequence[str]) -> Sequence[float]:
        """Return means of the epoch, or bad ones since the last record; nothing if unread."""
        if "record" in state.events:
            metrics = state.history[-1].metrics
            if f"train/{names[0]}" in metrics:
                return [metrics[f"train/{name}"] for name in names]
            recent = [metrics.get(f"recent/{name}", 0.0) for name in names]
            if not all(map(math.isfinite, recent)):
                return recent
        if self._when.due(state) and "loss" in state.metrics:
            running = engine_of(state).reduce({"loss": state.metrics["loss"]})
            return [*Metrics(running).read().values()]  # a host read
        return ()

    def _interval(self, state: TrainState) -> str:
        """Return between which steps it was, as the records say."""
        # Only the records are certain: this hook may not have run at each of them.
        before, finite = 0, True
        for record in state.history.since(closing=False):
            if record.step >= state.step:
                continue
            losses = {name: record.metrics.get(name, 0.0) for name in ("train/loss", "recent/loss")}
            whole = "train/loss" in record.metrics  # of the epoch so far, not of an interval
            finite = (finite or whole) and all(map(math.isfinite, losses.values()))
            before = record.step if finite else before
        before = max([before, *(phase.step for phase in state.phases)])
        if before + 1 == state.step:
            return f"at step {state.step}"
        offer = "; to stop at once: halt_on_nonfinite(steps=1)" if self.steps > 1 else ""
        return f"between steps {before + 1} and {state.step}{offer}"


# --------------------------------------------------------------------------------------------------
# Stop a run when its time is up.

SLOT = "time_limit"  # holds the seconds that the run has taken, in a list
_SECONDS_IN = {"hours": 3600, "minutes": 60, "seconds": 1}
SPARE = 60.0  # seconds that are left to SLURM, besides what was measured
_UNKNOWN = (
    'time_limit(per="job"): the end of this job is not known (SLURM_JOB_END_TIME is not set), so '
    "there is no limit"
)


class time_limit(BuiltIn):
    """Stop when the run, or this job, has used its time: ``time_limit(hours=8)``.

    The run ends after the update in which the time is up. Evaluations and hooks count, and so does
    the time of earlier jobs of the run, but not the time between two jobs.

    Args:
        *given: nothing; it is an error to give a time without its unit.
        hours, minutes, seconds: the limit is their sum. With ``per="job"`` and none of them, it is
            the end of the SLURM job (``SLURM_JOB_END_TIME``), less twice the longest time between
            two updates so far, with evaluations and saves, less a minute: what comes next, and
            the last save, have to fit in. Where no end is known, there is no limit, and a warning
            says so.
        per: "run" counts all of the run. The time is saved with the state, so a script that is
            started again does not get more, and continues only if the limit was raised. "job"
            counts what this process has taken, and stops as a signal does: without a last
            evaluation, and the same script, started again, continues. No other run of the script
            begins after it. Several runs of a job have one limit if they share one hook.

    Returns:
        A hook. List it before ``checkpoint``.

    Raises:
        TypeError: none of the three is given for a run, or a time without its name.
        ValueError: one of them is below 0, their sum is 0, or ``per`` is something else.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, ones = fl.pipeline()(toy_loss), [torch.ones(1)]
        >>> state = fl.fit(step, toy(), ones, epochs=10**9, hooks=(time_limit(seconds=1e-9),))
        >>> state.step, state.stop
        (1, 'time_limit: the run has taken its 0.0s')

    Replaces: lightning.Timer
    """

    untried = "its time begins with the run"

    slot = SLOT

    def __init__(
        self,
        *given: object,
        hours: float = 0.0,
        minutes: float = 0.0,
        seconds: float = 0.0,
        per: str = "run",
    ) -> None:
        if given:
            raise TypeError(
                f"time_limit({given[0]!r}) does not say in which unit: write "
                f"time_limit(hours={given[0]!r}), minutes= or seconds="
            )
        given_times = {"hours": hours, "minutes": minutes, "seconds": seconds}
        self._times = {
            name: checks.number("time_limit", name, value, "a time", least=0)
            for name, value in given_times.items()
        }
        self.per = checks.choice("time_limit", "per", per, ("run", "job"))
        self.limit = sum(self._times[unit] * length for unit, length in _SECONDS_IN.items())
        if not self.limit and per == "run":
            raise TypeError(
                "time_limit expects a time above 0, such as time_limit(hours=8); or per='job' "
                "alone, for the end of the SLURM job"
            )
        self._began: float | None = None  # what the clock said at time 0
        self._end = math.inf  # what the clock will say at the end of the job
        self._taken = self._longest = 0.0  # so far, and between two calls

    def __repr__(self) -> str:
        given = {name: time for name, time in self._times.items() if time}
        return repr(Call(time_limit, (), given | ({"per": "job"} if self.per == "job" else {})))

    def take_back(self, state: TrainState) -> TrainState:
        """Return the state without a stop of this hook, if the limit was raised since."""
        stopped = Stop.kind_of(state.stop) == "limit"
        raised = self.per == "run" and _taken_in(state)[0] < self.limit
        return attrs.evolve(state, stop=None) if stopped and raised else state

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: the clock continues from the time that was taken so far."""
        if self.per == "run":
            self._taken = _taken_in(state)[0]
        self._began = RunInfo.now(state.run) - self._taken
        if not self.limit:
            left = broadcast(_time_left())  # of the main process: all stop after the same update
            self._end = RunInfo.now(state.run) + left
            if left == math.inf and state.backend.main:
                log.warning(_UNKNOWN)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if self._began is None:  # it is called outside of a run
            self.begin(state)
        before = self._taken
        state = self._note(state)
        if not self.limit:
            if before:  # the first update may compile
                self._longest = max(self._longest, self._taken - before)
            return self._stop_before_end(state)
        if self._taken < self.limit or state.stop is not None:
            return state
        what, kind = ("the run", "limit") if self.per == "run" else ("this job", "job")
        reason = f"time_limit: {what} has taken its {tables.format_duration(self.limit)}"
        return attrs.evolve(state, stop=Stop(reason, kind))

    def flush(self, state: TrainState) -> TrainState:
        """Note the time that was taken since, such as that of an evaluation which a signal cut."""
        return state if self._began is None else self._note(state)

    def _note(self, state: TrainState) -> TrainState:
        """Note the time that was taken so far. Return the state, which knows that of a run."""
        self._taken = RunInfo.now(state.run) - (self._began or 0.0)
        if self.per == "job":
            return state
        if SLOT not in state.slots:
            state = with_slot(state, SLOT, [0.0])
        state.slots[SLOT][0] = self._taken
        return state

    def _stop_before_end(self, state: TrainState) -> TrainState:
        """Return the state, stopped if the time until the job ends may be too short for more."""
        left = self._end - RunInfo.now(state.run)
        if left > SPARE + 2 * self._longest or state.stop is not None:
            return state
        reason = f"time_limit: this job ends in {tables.format_duration(max(left, 0.0))}"
        return attrs.evolve(state, stop=Stop(reason, "job"))


def _taken_in(state: TrainState) -> list[float]:
    """Return the seconds that the run has taken, in a list.

    Raises:
        CheckpointError: what a checkpoint had in its place is something else.
    """
    taken = state.slots.get(SLOT, [0.0])
    check_shape(taken, [NUMBER], f'state.slots["{SLOT}"]')
    return taken or [0.0]


def _time_left() -> float:
    """Return the seconds until the SLURM job ends; infinity if that is not known."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdigit() else math.inf


# --------------------------------------------------------------------------------------------------
# Give a SLURM job back to its queue before its time is over.

SCONTROL_SECONDS = 60  # how long ``scontrol`` may take
_OUTSIDE = "requeue: this is not a SLURM job (SLURM_JOB_ID is not set): SIGUSR1 only saves"


class requeue(BuiltIn):
    """Requeue a SLURM job when its time is nearly over: ``#SBATCH --requeue --signal=USR1@120``.

    On SIGUSR1 the run ends as on SIGTERM, after the current update and with ``state.stop ==
    "SIGUSR1"``. ``checkpoint`` saves it, and then the main process calls ``scontrol requeue`` with
    the id of the job. The job starts again, and the same script continues. A job that ends by
    ``time_limit(per="job")`` is requeued too. A run that has reached its target is not.

    List it after ``checkpoint``. ``torchrun`` passes the signal on if it is started with
    ``--signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout 120``.

    Returns:
        A hook.

    Raises:
        ValueError: when a run begins: no ``checkpoint`` of all parts is listed before it.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 4
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hooks = (fl.every(epochs=1)(fl.checkpoint(folder)), requeue())
        ...     state = fl.fit(step, fl.resume(folder, toy()), batches, epochs=1, hooks=hooks)
        >>> state.step, state.stop
        (4, None)

    Notes:
        Outside of SLURM, the hook only says so, and SIGUSR1 saves as usual. If ``scontrol`` fails,
        an error is logged, and the run ends anyway: its checkpoint is kept.
    """

    def __init__(self) -> None:
        self._job: str | None = None  # the id, until it is requeued

    def __repr__(self) -> str:
        return "requeue()"

    @property
    def ends_run_on_usr1(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether SIGUSR1 ends the run, and does not only save it: in a SLURM job."""
        return self._job is not None

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise if no hook before it saves the state completely.

        Raises:
            ValueError: there is none.
        """
        before = hooks[: self.place_in(hooks)]
        if not any(self.parts_saved([hook]) >= {*PARTS} for hook in before):
            raise ValueError(
                "requeue() saves nothing by itself, so each job would start from zero: list "
                "checkpoint(folder) before it, of all parts"
            )

    def begin(self, state: TrainState) -> TrainState:
        """Find out which job this is."""
        self._job = broadcast(_job_of(os.environ))  # the same in every process
        if self._job is None and state.backend.main:
            log.info(_OUTSIDE)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Requeue the job, if it ends before its run does."""
        over = "end" in state.events and not state.phases  # another phase may follow
        if self._job is not None and Stop.ends_job(state.stop) and not over:
            job, self._job = self._job, None
            if state.backend.main:
                _requeue(job)
        return state


def _job_of(environment: Mapping[str, str]) -> str | None:
    """Return how ``scontrol`` names this job; None outside of SLURM."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return environment.get("SLURM_JOB_ID") or None


def _requeue(job: str) -> None:
    """Call ``scontrol requeue``. Log what came of it."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False
        )
        failed = done.returncode and f"exit status {done.returncode}: {done.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if not failed:
        log.info("requeue: the job %s is in the queue again", job)
        return
    log.error(
        "requeue: '%s' failed (%s). The run is saved and ends here: submit the job again",
        *(" ".join(command), failed),
    )
