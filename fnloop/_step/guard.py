"""Guards: they look at an update before it is applied, and may leave it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._step.backward import commutes_with_scaling
from fnloop._step.engine import engine_of
from fnloop._step.host import Judge, decide

__all__ = ["guarding", "sees_whole_updates"]


def guarding(examine: Callable[[TrainState, Output], tuple[Tensor, Judge]]) -> Wrap:
    """Return the wrap of the gradient ring that leaves out what a guard finds wrong.

    Args:
        examine: ``(state, out) -> flag, judge``, as ``decide`` takes them.
    """

    def wrap(step: Step) -> Step:
        def guarded(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is not None and engine_of(state).calls_every_batch:
                return state, out  # with several processes, others may have to decide
            return decide(state, out, *examine(state, out))

        return guarded

    return commutes_with_scaling(wrap)


def sees_whole_updates(name: str) -> Callable[[Sequence[Middleware]], None]:
    """Return the check of a guard: that no middleware after it changes what it has judged.

    ``accumulate`` may be listed after it if it acts inside of it all the same, which it cannot if
    there is another middleware between it and backward.

    Args:
        name: the name of the guard.
    """

    def check(listed: Sequence[Middleware]) -> None:
        at = next(i for i, member in enumerate(listed) if member.name == name)
        between = [m for m in listed[:at] if m.gradient is not None and m.name != "amp"]
        for member in listed[at + 1 :]:
            scales = member.name in ("amp", "sam") and member.gradient is not None
            if scales or (between and member.window > 1):
                raise ValueError(
                    f"{listed[at]!r} judges whole updates: list it after {member!r}, which acts "
                    "more than once in each, or scales its gradients"
                )

    return check
