"""Stopping early: pure functions of the history."""

from __future__ import annotations

import math

import attrs

from fnloop._core.call import Call
from fnloop._core.history import Fold
from fnloop._core.monitor import better, check_monitored, mode_of
from fnloop._core.record import Record
from fnloop._core.state import RECORD, UPDATE, TrainState
from fnloop._display.checks import choice, flag, integer, metric_name, number
from fnloop._step.engine import engine_of

__all__ = ["early_stop", "halt_on_nonfinite"]


@attrs.frozen(repr=False)
class early_stop:
    """Stop when a metric has not improved for ``patience`` evaluations.

    A function of the history: what it keeps is a cache of it, so it holds after a resume. NaN is worse than anything. Closing
    records, which a run makes where it ends between two evaluations, do not count.

    Args:
        key: the metric, such as "valid/loss".
        patience: evaluations without improvement after which to stop; at least 1, which others call 0.
        min_delta: by how much better a value must be to be an improvement; equal is none.
        mode: "min" if lower is better, "max" if higher. None is by the name after the loader's: "loss" and "error" are to fall;
            "acc", "f1", "auc", "precision" and "recall" are to rise. A name that does not say it needs a mode.
        reference: what a value is compared with: "accepted", the last value that was an improvement, so that small
            gains add up; or "best", the best value so far, so that each gain must exceed ``min_delta`` by itself.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as it is worse than this, or NaN.
        min_epochs: never stop before so many epochs are completed.
        min_steps: never stop before so many updates are applied.
        check_finite: stop as soon as the metric is NaN or infinite.

    Returns:
        A hook.

    Raises:
        ValueError: a setting is out of range, or mode is None and the name does not say it.
        KeyError: when a run starts: there is no such loader. At its first evaluation: there is no such metric. The message
            names those that there are.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> worse = [torch.ones(1)]             # every update lowers w by 1, so this loss goes down without end
        >>> stop = early_stop("train/loss", patience=2, mode="max")
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), worse, epochs=100, hooks=(stop,))
        >>> state.epoch, state.stop
        (3, 'early_stop: train/loss has not improved on 0 for 2 evaluations (higher is better)')

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
    _waited: Fold = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        metric_name("early_stop", "key", self.key)
        of = "a number of evaluations"
        if type(self.patience) is int and self.patience == 0:
            of += " (1 is what others call 0: stop at the first one without improvement)"
        integer("early_stop", "patience", self.patience, of)
        number("early_stop", "min_delta", self.min_delta, "in the direction of mode", least=0)
        choice("early_stop", "reference", self.reference, ("accepted", "best"))
        for name in ("stopping_threshold", "divergence_threshold"):
            if getattr(self, name) is not None:
                number(
                    "early_stop",
                    name,
                    getattr(self, name),
                    "a value of the metric, or None",
                    finite=False,
                )
        integer("early_stop", "min_epochs", self.min_epochs, "a number of epochs", least=0)
        integer("early_stop", "min_steps", self.min_steps, "a number of updates", least=0)
        flag("early_stop", "check_finite", self.check_finite)
        mode_of("early_stop", self.key, self.mode)  # checks it
        object.__setattr__(self, "_waited", Fold(self._wait, None))

    def poll(self, state: TrainState) -> TrainState:
        """Check the name of the metric as soon as it can be known, also where the hook is called rarely."""
        if RECORD in state.events:
            check_monitored("early_stop", self.key, state)
        return state

    @property
    def monitors(self) -> str:
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
        if (
            RECORD not in state.events
            or not check_monitored("early_stop", self.key, state)
            or state.history[-1].closing
        ):
            return state
        reason = self._verdict(state)
        if reason is None or state.epoch < self.min_epochs or state.step < self.min_steps:
            return state
        return attrs.evolve(state, stop=f"early_stop: {self.key} {reason}")

    def _wait(self, before: tuple[float, int] | None, record: Record) -> tuple[float, int] | None:
        """Return what the next value is compared with, and how many did not improve on it."""
        if record.closing or self.key not in record.metrics:
            return before
        value, mode = record.metrics[self.key], mode_of("early_stop", self.key, self.mode)
        if before is None:
            return value, 0
        reference, waited = before
        margin = -self.min_delta if mode == "min" else self.min_delta
        improved = better(value, reference + margin, mode)
        if improved or (self.reference == "best" and better(value, reference, mode)):
            reference = value
        return reference, 0 if improved else waited + 1

    def _verdict(self, state: TrainState) -> str | None:
        """Return why to stop, or None."""
        newest, mode = (
            state.history[-1].metrics[self.key],
            mode_of("early_stop", self.key, self.mode),
        )
        direction = "(lower is better)" if mode == "min" else "(higher is better)"
        if self.check_finite and not math.isfinite(newest):
            return f"is not finite: {newest}"
        if self.stopping_threshold is not None and better(newest, self.stopping_threshold, mode):
            return f"reached {newest:g}, better than {self.stopping_threshold:g} {direction}"
        if self.divergence_threshold is not None and better(
            self.divergence_threshold, newest, mode
        ):
            return f"diverged to {newest:g}, worse than {self.divergence_threshold:g} {direction}"
        reference, waited = self._waited(state.history)
        if waited >= self.patience:
            evaluations = "1 evaluation" if waited == 1 else f"{waited} evaluations"
            return f"has not improved on {reference:g} for {evaluations} {direction}"
        return None


@attrs.frozen
class halt_on_nonfinite:
    """Stop when the training loss has become NaN or infinite.

    It looks at the running mean of the epoch, in which a NaN stays, every so many updates and at every record: one host
    read then, none between. The parameters hold the bad update already; go back to a checkpoint or a snapshot.

    Args:
        steps: applied updates between two looks; at least 1.

    Returns:
        A hook.

    Raises:
        ValueError: steps is below 1.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([float("nan")])] * 3
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), batches, hooks=(halt_on_nonfinite(),))
        >>> state.stop
        'halt_on_nonfinite: the training loss became nan between steps 1 and 3; to stop at once: halt_on_nonfinite(steps=1)'
    """

    steps: int = 100

    def __attrs_post_init__(self) -> None:
        integer("halt_on_nonfinite", "steps", self.steps, "the updates between two looks")

    def __call__(self, state: TrainState) -> TrainState:
        if RECORD in state.events:
            loss = state.history[-1].metrics.get("train/loss", 0.0)
        elif UPDATE in state.events and state.step % self.steps == 0 and "loss" in state.metrics:
            merged = engine_of(state).merge_metrics({"loss": state.metrics["loss"]})
            loss = merged["loss"].compute()  # a host read, once every `steps` updates
        else:
            return state
        if math.isfinite(loss):
            return state
        # The last report is all that is known for certain; another run may have made it, without this hook.
        before = next(
            (r.step for r in reversed(state.history) if r.step < state.step and not r.closing), 0
        )
        reason = f"halt_on_nonfinite: the training loss became {loss} "
        if before + 1 == state.step:
            return attrs.evolve(state, stop=f"{reason}at step {state.step}")
        offer = "; to stop at once: halt_on_nonfinite(steps=1)" if self.steps > 1 else ""
        return attrs.evolve(
            state, stop=f"{reason}between steps {before + 1} and {state.step}{offer}"
        )
