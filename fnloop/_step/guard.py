"""Guards: they look at an update before it is applied, and may leave it out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from fnloop._backend.fsdp import local_part
from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._step.backward import commutes_with_scaling
from fnloop._step.engine import engine_of
from fnloop._step.host import Judge, decide

__all__ = ["guarding", "sees_whole_updates"]


def guarding(examine: Callable[[TrainState, Output], tuple[Tensor, Judge]]) -> Wrap:
    """Return the wrap of the gradient ring that leaves out what a guard finds wrong.

    Such an update leaves no trace: the buffers of the model, such as running statistics, are as
    they were before its forward, and so is what it would carry on.

    Args:
        examine: ``(state, out) -> flag, judge``, as ``decide`` takes them.
    """

    def wrap(step: Step) -> Step:
        def guarded(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            buffers = [local_part(buffer) for buffer in state.model.buffers()]
            kept = [buffer.clone() for buffer in buffers]
            new, out = step(state, batch)
            if out.skip is not None and engine_of(state).calls_every_batch:
                return new, out  # with several processes, others may have to decide
            flag, judge = examine(new, out)
            judge = functools.partial(_take_back, judge, buffers, kept)
            new, judged = decide(new, out, flag, judge)
            return (new if judged.skip == out.skip else state), judged

        return guarded

    return commutes_with_scaling(wrap)


def _take_back(
    judge: Judge, buffers: Sequence[Tensor], kept: Sequence[Tensor], state: TrainState, flag: bool
) -> str | None:
    """Ask the judge; for an update that it leaves out, take back what the forward has changed."""
    skip = judge(state, flag)
    if skip is not None:
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)
    return skip


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
