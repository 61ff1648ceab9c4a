"""Stopping early: pure functions of the history."""

from __future__ import annotations

import math

import attrs

from fnloop._history import better
from fnloop._processes import merged
from fnloop._state import RECORD, UPDATE, TrainState
from fnloop._types import Call

__all__ = ["early_stop", "halt_on_nonfinite"]


@attrs.frozen(repr=False)
class early_stop:
    """Stop when a metric has not improved for ``patience`` evaluations.

    A function of the history: it keeps nothing, so it holds after a resume. NaN is worse than anything.

    Args:
        key: the metric, such as "valid/loss".
        patience: evaluations without improvement after which to stop; at least 1.
        min_delta: by how much better a value must be to be an improvement; equal is none.
        mode: "min" if lower is better, "max" if higher.
        reference: what a value is compared with: "accepted", the last value that was an improvement, so that small
            gains add up; or "best", the best value so far, so that each gain must exceed ``min_delta`` by itself.
        stopping_threshold: stop as soon as the metric is better than this.
        divergence_threshold: stop as soon as it is worse than this, or NaN.
        min_epochs: never stop before so many epochs are completed.
        min_steps: never stop before so many updates are applied.

    Returns:
        A hook.

    Raises:
        ValueError: a setting is out of range.
        KeyError: at the first evaluation: there is no such metric; the message names those that there are.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> worse = [torch.ones(1)]             # every update lowers w by 1, so this loss goes down without end
        >>> stop = early_stop("train/loss", patience=2, mode="max")
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), worse, epochs=100, hooks=(stop,))
        >>> state.epoch, state.stop
        (3, 'early_stop: train/loss has not improved on 0 for 2 evaluations')

    Source: Prechelt, 1998, https://doi.org/10.1007/3-540-49430-8_3
    """

    key: str
    patience: int = 3
    min_delta: float = 0.0
    mode: str = "min"
    reference: str = attrs.field(default="accepted", kw_only=True)
    stopping_threshold: float | None = attrs.field(default=None, kw_only=True)
    divergence_threshold: float | None = attrs.field(default=None, kw_only=True)
    min_epochs: int = attrs.field(default=0, kw_only=True)
    min_steps: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.key, str):
            raise TypeError(f'early_stop expects the name of a metric, such as "valid/loss"; got {self.key!r}')
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"early_stop expects patience >= 1, a number of evaluations; got {self.patience!r}")
        if not self.min_delta >= 0:
            raise ValueError(f"early_stop expects min_delta >= 0; got {self.min_delta!r}. Its direction follows from mode")
        if self.reference not in ("accepted", "best"):
            raise ValueError(f'early_stop expects reference="accepted" or "best"; got {self.reference!r}')
        better(0.0, 0.0, self.mode)  # checks the mode

    def __repr__(self) -> str:
        settings = {f.name: getattr(self, f.name) for f in attrs.fields(early_stop)}
        changed = {f.name: settings[f.name] for f in attrs.fields(early_stop) if settings[f.name] != f.default}
        key = changed.pop("key")
        return repr(Call(early_stop, (key,), changed))

    def __call__(self, state: TrainState) -> TrainState:
        if RECORD not in state.news or not self._evaluated(state):
            return state
        if state.epoch < self.min_epochs or state.step < self.min_steps:
            return state
        reason = self._verdict(state.history[self.key])
        return attrs.evolve(state, stop=f"early_stop: {self.key} {reason}") if reason else state

    def _evaluated(self, state: TrainState) -> bool:
        """Say whether the newest record has the metric; if it should have it and has not, say what there is."""
        metrics = state.history[-1].metrics
        if self.key in metrics:
            return True
        loader = self.key.split("/", 1)[0]
        expected = ("train", *(state.run.evaluated if state.run else ()))  # a record may have nothing of one of them
        waits = loader in expected and not any(name.startswith(f"{loader}/") for name in metrics)
        if not waits and self.key not in state.history.keys():  # noqa: SIM118  # no mapping
            raise KeyError(f"early_stop: there is no metric {self.key!r}; there are: {', '.join(metrics)}")
        return False

    def _improves(self, value: float, reference: float) -> bool:
        margin = -self.min_delta if self.mode == "min" else self.min_delta
        return better(value, reference + margin, self.mode)

    def _verdict(self, values: tuple[float, ...]) -> str | None:
        newest = values[-1]
        if self.stopping_threshold is not None and better(newest, self.stopping_threshold, self.mode):
            return f"reached {newest:g}, better than {self.stopping_threshold:g}"
        if self.divergence_threshold is not None and better(self.divergence_threshold, newest, self.mode):
            return f"diverged to {newest:g}, worse than {self.divergence_threshold:g}"
        reference, waited = values[0], 0
        for value in values[1:]:
            improved = self._improves(value, reference)
            waited = 0 if improved else waited + 1
            if improved or (self.reference == "best" and better(value, reference, self.mode)):
                reference = value
        if waited >= self.patience:
            return f"has not improved on {reference:g} for {waited} evaluations"
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
        'halt_on_nonfinite: the training loss became nan between steps 1 and 3'
    """

    steps: int = 100

    def __attrs_post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"halt_on_nonfinite expects steps >= 1, the updates between two looks; got {self.steps!r}")

    def __call__(self, state: TrainState) -> TrainState:
        if RECORD in state.news:
            loss = state.history[-1].metrics.get("train/loss", 0.0)
        elif UPDATE in state.news and state.step % self.steps == 0 and "loss" in state.metrics:
            loss = merged({"loss": state.metrics["loss"]})["loss"].compute()  # a host read, once in so many updates
        else:
            return state
        if math.isfinite(loss):
            return state
        before = max((r.step for r in state.history if r.step < state.step), default=0)  # all that is known for certain
        interval = f"between steps {before + 1} and {state.step}" if before + 1 < state.step else f"at step {state.step}"
        return attrs.evolve(state, stop=f"halt_on_nonfinite: the training loss became {loss} {interval}")
