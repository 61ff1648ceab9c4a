"""Facts about a run, fixed when it starts."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from fnloop._display import html

__all__ = ["RunInfo"]


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

    def __repr__(self) -> str:
        return html.record_text("RunInfo", self._facts())

    def _repr_html_(self) -> str:
        facts = self._facts() | {"evaluated": ", ".join(self.evaluated)}
        return html.facts("RunInfo", {k: v for k, v in facts.items() if v not in (None, "")})

    def _facts(self) -> dict[str, object]:
        return {name: value for name, value in attrs.asdict(self).items() if name != "clock"}
