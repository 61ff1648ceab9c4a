"""Stop a run early, by a metric or by a loss that is not finite."""

from __future__ import annotations

import math

import attrs

from fnloop._core.call import Call
from fnloop._core.events import RECORD, UPDATE
from fnloop._core.history import Fold
from fnloop._core.monitor import better, check_monitored, mode_of
from fnloop._core.phase import SINCE, first_record
from fnloop._core.record import Record
from fnloop._core.state import TrainState
from fnloop._display.checks import choice, flag, integer, metric_name, number
from fnloop._display.html import format_count
from fnloop._hooks.nonfinite import KEY, Trail, describe_place
from fnloop._hooks.wrapper import Hook
from fnloop._step.engine import engine_of

__all__ = ["early_stop", "halt_on_nonfinite"]


@attrs.frozen
class _Wait:
    """The reference value, its record, and the number of evaluations that did not improve on it."""

    reference: float
    record: Record
    evaluations: int = 0


@attrs.frozen(repr=False)
class early_stop(Hook):
    """Stop when a metric has not improved for ``patience`` evaluations.

    The decision is a function of the history, so a resumed run stops where an uninterrupted one
    would. NaN is worse than any number. Closing records, which a run appends if it ends between two
    evaluations, do not count.

    Args:
        key: the metric, such as "valid/loss".
        patience: evaluations without improvement after which to stop; at least 1. Some libraries
            call this 0.
        min_delta: the least improvement, in the units of the metric: a value must be better by more
            than this to count.
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
            At its first evaluation: there is none, where a middleware or a hook of your own might
            have added it. The message lists those that exist.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline()(toy_loss)      # each update lowers the loss
        >>> stop = early_stop("train/loss", patience=2, mode="max")
        >>> state = fl.fit(step, toy(), [torch.ones(1)], epochs=100, hooks=(stop,))
        >>> state.epoch, state.stop
        (3, 'early_stop: train/loss has not improved for 2 evaluations (best 0, epoch 1)')

    Source: Prechelt, 1998, https://doi.org/10.1007/3-540-49430-8_3
    """

    key: str
    patience: int = 3
    min_delta: float = 0.0
    mode: str | None = None
    reference: str = attrs.field(default="accepted", kw_only=True)
    stopping_threshold: float | None = attrs.field(default=None, kw_only=True)
    divergence_threshold: float | None = attrs.field(default=None, kw_only=True)
    min_epochs: int = attrs.field(default=0, kw_only=True)
    min_steps: int = attrs.field(default=0, kw_only=True)
    check_finite: bool = attrs.field(default=True, kw_only=True)
    since: str = attrs.field(default="phase", kw_only=True)
    _waited: Fold = attrs.field(init=False, eq=False)  # caches the last result, so copies are safe

    def __attrs_post_init__(self) -> None:
        owner = "early_stop"
        metric_name(owner, "key", self.key)
        meaning = "a number of evaluations"
        if type(self.patience) is int and self.patience == 0:
            meaning += " (1 stops at the first one without improvement; some libraries call that 0)"
        integer(owner, "patience", self.patience, meaning)
        number(owner, "min_delta", self.min_delta, "the least improvement", least=0)
        choice(owner, "reference", self.reference, ("accepted", "best"))
        for name in ("stopping_threshold", "divergence_threshold"):
            if (value := getattr(self, name)) is not None:
                number(owner, name, value, "a value of the metric, or None", finite=False)
        integer(owner, "min_epochs", self.min_epochs, "a number of epochs", least=0)
        integer(owner, "min_steps", self.min_steps, "a number of updates", least=0)
        flag(owner, "check_finite", self.check_finite)
        choice(owner, "since", self.since, SINCE)
        mode_of(owner, self.key, self.mode)  # checks it
        object.__setattr__(self, "_waited", Fold(self._wait, None))

    @property
    def monitors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metric that is watched."""
        return self.key

    def __repr__(self) -> str:
        fields = [f for f in attrs.fields(early_stop) if f.init]
        changed = {
            f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default
        }
        key = changed.pop("key")
        return repr(Call(early_stop, (key,), changed))

    def __call__(self, state: TrainState) -> TrainState:
        if RECORD not in state.events or not check_monitored("early_stop", self.key, state):
            return state
        if state.history[-1].closing:
            return state
        reason = self._find_reason(state)
        if reason is None or state.epoch < self.min_epochs or state.step < self.min_steps:
            return state
        return attrs.evolve(state, stop=f"early_stop: {self.key} {reason}")

    def poll(self, state: TrainState) -> TrainState:
        """Check the name of the metric, even at a boundary where the hook itself is not called."""
        if RECORD in state.events:
            check_monitored("early_stop", self.key, state)
        return state

    def _wait(self, before: _Wait | None, record: Record) -> _Wait | None:
        if record.closing or self.key not in record.metrics:
            return before
        value, mode = record.metrics[self.key], mode_of("early_stop", self.key, self.mode)
        if before is None:
            return _Wait(value, record)
        margin = -self.min_delta if mode == "min" else self.min_delta
        if better(value, before.reference + margin, mode):
            return _Wait(value, record)
        evaluations = before.evaluations + 1
        if self.reference == "best" and better(value, before.reference, mode):
            return _Wait(value, record, evaluations)
        return attrs.evolve(before, evaluations=evaluations)

    def _find_reason(self, state: TrainState) -> str | None:
        """Return why to stop, or None."""
        newest = state.history[-1].metrics[self.key]
        mode = mode_of("early_stop", self.key, self.mode)
        direction = "(lower is better)" if mode == "min" else "(higher is better)"
        good, bad = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(newest):
            return f"is not finite: {newest}"
        if good is not None and better(newest, good, mode):
            return f"reached {newest:g}, better than {good:g} {direction}"
        if bad is not None and better(bad, newest, mode):
            return f"diverged to {newest:g}, worse than {bad:g} {direction}"
        wait = self._waited(state.history, first_record(state.phases, self.since))
        if wait.evaluations < self.patience:
            return None
        # With min_delta, later values may be better than an accepted one, but not by enough.
        best = "best" if self.reference == "best" or not self.min_delta else "compared with"
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        where = _place(wait.record, state)
        return (
            f"has not improved{least} for {format_count(wait.evaluations, 'evaluation')} ({best} "
            f"{wait.reference:.4g}, {where})"
        )


def _place(record: Record, state: TrainState) -> str:
    """Return where a record is: its epoch if it was made at the end of one, otherwise its step."""
    at = next(n for n, r in enumerate(state.history) if r.epoch == record.epoch)
    # The first of its epoch was made when that ended, unless a phase began by leaving the epoch.
    left = any(p.epoch == record.epoch and p.records <= at for p in state.phases)
    ended = record.epoch > 0 and not left and state.history[at].step == record.step
    return f"epoch {record.epoch}" if ended else f"step {record.step}"


@attrs.frozen(repr=False)
class halt_on_nonfinite(Hook):
    """Stop when the training loss has become NaN or infinite.

    NaN propagates into the running mean of the epoch. The mean is read every ``steps`` updates and
    at every record, with no device reads in between; a record of ``record_every`` has the mean
    since the last record. By then the bad update has reached the parameters: go back to a
    checkpoint or a snapshot. The mean begins again with every epoch, and so with every phase: there
    is nothing that ``since`` could change.

    To find the line that makes it, run that part again ``with torch.autograd.detect_anomaly():``
    around ``fit``, for a NaN in backward. For one in forward, register a hook with each module that
    raises if ``not output.isfinite().all()``: ``module.register_forward_hook(hook)``. Both errors
    say in which batch it was, and come before the update is applied.

    With ``keep`` it also finds out which update it was. It notes after every update whether the
    mean is finite, in a tensor that is not read, and reads all of them when it stops. Then
    ``state.extra["nonfinite"]`` has the position of the first batch of that update, ``{"epoch",
    "batch", "step", "indices"}``: ``step`` is ``state.step`` after it, and ``indices`` are those of
    the samples of each of its batches; None if they are not taken by index. ``state.stop`` names
    them too. A run that was resumed knows of its own updates only. ``fnloop.debug.replay(folder,
    ..., update=step)`` makes the update again, and finds out which of the samples it was. Keep
    checkpoints from before it: ``checkpoint(folder, keep=None)``.

    Args:
        steps: applied updates between two reads; at least 1.
        keep: whether to find out which update and which samples it was. It costs a kernel in each
            update.

    Returns:
        A hook.

    Raises:
        ValueError: steps is below 1.
        TypeError: keep is not a bool.

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
    """

    steps: int = 100
    keep: bool = attrs.field(default=False, kw_only=True)
    _trail: Trail = attrs.field(init=False, eq=False, factory=Trail)

    def __attrs_post_init__(self) -> None:
        integer("halt_on_nonfinite", "steps", self.steps, "the updates between two reads")
        flag("halt_on_nonfinite", "keep", self.keep)

    def __repr__(self) -> str:
        kept = {"keep": True} if self.keep else {}
        return repr(Call(halt_on_nonfinite, (), {"steps": self.steps, **kept}))

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
        if self.keep:
            self._trail.note(state)
        loss = self._read(state)
        if loss is None or math.isfinite(loss):
            if loss is not None:
                self._trail.forget()
            return state
        place = self._trail.find(state) if self.keep else None
        reason = f"halt_on_nonfinite: the training loss became {loss} "
        if place is not None:
            extra = {**state.extra, KEY: place}
            return attrs.evolve(state, stop=reason + describe_place(place), extra=extra)
        return attrs.evolve(state, stop=reason + self._interval(state))

    def _read(self, state: TrainState) -> float | None:
        """Return the mean loss of the epoch, or a bad one since the last record; None if unread."""
        if RECORD in state.events:
            metrics = state.history[-1].metrics
            if "train/loss" in metrics:
                return metrics["train/loss"]
            if not math.isfinite(recent := metrics.get("recent/loss", 0.0)):
                return recent
        if UPDATE in state.events and state.step % self.steps == 0 and "loss" in state.metrics:
            running = {"loss": state.metrics["loss"]}
            return engine_of(state).merge_metrics(running)["loss"].compute()  # a host read
        return None

    def _interval(self, state: TrainState) -> str:
        """Return between which steps it was, as the records say."""
        # Only the records are certain: this hook may not have run at each of them.
        before, finite = 0, True
        for record in state.history:
            if record.closing or record.step >= state.step:
                continue
            losses = {name: record.metrics.get(name, 0.0) for name in ("train/loss", "recent/loss")}
            whole = "train/loss" in record.metrics  # of the epoch so far, not of an interval
            finite = (finite or whole) and all(map(math.isfinite, losses.values()))
            before = record.step if finite else before
        if state.phases:
            before = max(before, state.phases[-1].step)
        if before + 1 == state.step:
            return f"at step {state.step}"
        offer = "; to stop at once: halt_on_nonfinite(steps=1)" if self.steps > 1 else ""
        return f"between steps {before + 1} and {state.step}{offer}"
