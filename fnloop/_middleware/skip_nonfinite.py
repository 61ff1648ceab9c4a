"""Leave out updates whose loss or gradients are not finite."""

from __future__ import annotations

import functools
import math

import attrs
from torch import Tensor
from torch.nn.utils import get_total_norm

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import local_part
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, parameters
from fnloop._core.stops import Stop
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._display import checks
from fnloop._display.html import format_count
from fnloop._step.guard import guarding, sees_whole_updates
from fnloop._step.host import Judge

__all__ = ["skip_nonfinite"]

NAME = "skip_nonfinite"


@attrs.define
class Streak:
    """The slot of ``skip_nonfinite``, changed in place.

    Args:
        skipped: how many updates in a row it has left out.
    """

    skipped: int = 0


@middleware("gradient")
def skip_nonfinite(limit: int = 10) -> Middleware:
    """Leave out updates whose loss or gradients are infinite or NaN.

    Such an update changes nothing but the position in the data and ``state.skipped``: parameters,
    ``state.step``, schedules, averages and metrics stay as they are, and so do the buffers of the
    model, such as running statistics. So a run equals one whose loader does not have these batches.
    It looks at the whole window of ``accumulate``, on all processes, and at gradients that ``amp``
    has unscaled. This needs one device-to-host read per update. An update that overflowed in fp16
    is left out by ``amp`` already, and does not count here.

    List it after what may make gradients that are not finite, such as ``clip``.

    Args:
        limit: updates in a row that may be left out; then the run stops, and ``state.stop`` says
            so. To continue it, ``attrs.evolve(state, stop=None)``.

    Returns:
        A middleware of the gradient and the step ring.

    Raises:
        TypeError: the limit is not an int.
        ValueError: it is below 1. When composing: ``amp("fp16")`` or ``sam`` is listed after it, or
            ``accumulate`` after it and another middleware of gradients.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([x]) for x in (1.0, float("nan"), 2.0)]
        >>> state = fl.fit(fl.pipeline(skip_nonfinite())(toy_loss), toy(), batches, hooks=())
        >>> state.model.w.item(), state.step, state.skipped
        (-3.0, 2, 1)
    """
    checks.integer(NAME, "limit", limit, "updates in a row", wrong_type=TypeError)
    return Middleware(
        NAME,
        gradient=guarding(_examine),
        step=_stop_after(limit),
        init=lambda state: Streak(),
        check=sees_whole_updates(NAME),
    )


def _examine(state: TrainState, out: Output) -> tuple[Tensor, Judge]:
    """Return whether the loss or a gradient is not finite, on the device, and who judges."""
    found = out.loss.isfinite()
    gradients = [local_part(p.grad) for p in parameters(state) if p.grad is not None]
    values = [torch_compat.sparse_values(g) if g.is_sparse else g for g in gradients]
    if values:  # the largest magnitude is NaN if any element is
        found = found & get_total_norm(values, math.inf).isfinite().to(found.device)
    return ~found, functools.partial(_judge, out.loss)


def _judge(loss: Tensor, state: TrainState, bad: bool) -> str | None:
    if not bad:
        return None
    state.slots[NAME].skipped += 1
    value = float(loss)
    what = "a gradient is not finite" if math.isfinite(value) else f"the loss is {value}"
    return f"{NAME}: {what}"


def _stop_after(limit: int) -> Wrap:
    def stopping(step: Step) -> Step:
        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            streak: Streak = state.slots[NAME]
            if out.skip is None:
                streak.skipped = 0
            elif streak.skipped >= limit:
                streak.skipped = 0  # a run that is continued has as many again
                reason = f"{NAME}: {format_count(limit, 'update')} in a row had a loss or gradients"
                state = attrs.evolve(state, stop=Stop(f"{reason} that are not finite", "guard"))
            return state, out

        return counted

    return stopping
