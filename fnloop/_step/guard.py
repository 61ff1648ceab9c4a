"""Guards: they look at an update before it is applied, and may leave it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._step.backward import Commuting
from fnloop._step.engine import engine_of
from fnloop._step.host import Judge, decide
from fnloop._step.pieces import RETRY

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

    return Commuting(wrap)


def sees_whole_updates(name: str) -> Callable[[Sequence[Middleware]], None]:
    """Return the check of a guard: that no middleware after it changes what it has judged.

    ``accumulate`` may be listed after it where it is inserted inside of it all the same: where all
    of the gradient ring that is listed before ``accumulate`` lets it through to backward.

    Args:
        name: the name of the guard.
    """

    def check(listed: Sequence[Middleware]) -> None:
        at = next(i for i, member in enumerate(listed) if member.name == name)
        for i, member in enumerate(listed[at + 1 :], at + 1):
            scales = member.name in ("amp", "sam") and member.gradient is not None
            if scales or (member.window > 1 and not all(map(_lets_through, listed[:i]))):
                raise ValueError(
                    f"{listed[at]!r} judges whole updates: list it after {member!r}, which acts "
                    "more than once in each, or scales its gradients"
                )

    return check


def _lets_through(member: Middleware) -> bool:
    """Return whether a later gradient step may be inserted between a middleware and backward."""
    return (
        member.gradient is None
        or isinstance(member.gradient, Commuting)
        or member.name in ("amp", "microbatch", RETRY)  # they are about backward alone
    )
