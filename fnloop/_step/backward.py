"""The three steps in the middle of a pipeline: forward, backward and update; and what becomes of what they report.

Backward takes a window of batches where ``accumulate`` asks for it, or where there are several processes. Each batch counts by
its weight, the number of items that its loss is the mean of, so the gradient is that of the mean over all items of the window,
over a ragged last window, unequal token counts and all processes. Gradients add up in ``.grad`` as autograd does: backward
starts from loss × weight / (a reference weight), and one division at the end makes the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.collectives import start_all_reduce_max, start_all_reduce_sum
from fnloop._backend.watchdog import waiting_for_all
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._step.distributed import DistributedEngine, Weight, engine_of
from fnloop._step.weighted_sum import (
    WeightedSum,
    at_least_float32,
    divide,
    in_wide_dtype,
    valid_weight,
    weight_on_device,
)

__all__ = ["Backward", "NoGradientError", "commutes_with_scaling"]


class Backward:
    """The step that fills ``.grad``, starting from the loss; the loss that it reports is never scaled.

    Args:
        forward: the step inside.
        scale: ``state -> what the gradients are to be multiplied by``, on the device; or None.
        may_skip: whether a step inside may leave a batch out, in one process and not in another.
    """

    def __init__(
        self,
        forward: Step,
        scale: Callable[[TrainState], Tensor] | None = None,
        may_skip: bool = False,
    ) -> None:
        self.forward, self.scale, self.may_skip = forward, scale, may_skip

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Run forward and backward of one batch."""
        __tracebackhide__ = True
        if (joint := engine_of(state)) is not None:
            return self._over_processes(joint, state, (batch,))
        state, out = self.forward(state, batch)
        if out.skip is not None:
            return state, attrs.evolve(out, loss=out.loss.detach())
        share = (
            in_wide_dtype(valid_weight(out.weight) > 0, out.loss)
            if isinstance(out.weight, Tensor)
            else None
        )  # 1, or 0
        self._start(state, out, share).backward()
        return state, Output(out.loss.detach(), out.weight, out.aux, out.metrics)

    def over(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        """Run forward and backward of a window, so that ``.grad`` is the gradient of the mean over its items."""
        __tracebackhide__ = True
        if (joint := engine_of(state)) is not None:
            return self._over_processes(joint, state, window)
        total, before = WeightedSum(), _aside(state)
        for batch in window:
            state, out = self.forward(state, batch)
            if out.skip is None:
                self._start(state, out, total.share(out)).backward()
            total.add(out)
        if total.weight is None:
            _back(state, before)
            return state, attrs.evolve(out, loss=out.loss.detach())
        divide([p.grad for p in parameters(state)], total.weight, total.reference)
        _back(state, before)
        return state, total.output()

    def _over_processes(
        self, joint: DistributedEngine, state: TrainState, window: Sequence[Batch]
    ) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        total, known, items, before, rounds, applied = (
            WeightedSum(),
            False,
            None,
            None,
            len(window),
            None,
        )
        size, borrowed = 0, ()  # XXX
        joint.open(state)
        for n, batch in enumerate(window, 1):
            mine, last = not joint.borrowed(borrowed, n - 1, rounds), n == rounds
            joint.begin(last)
            if joint.blank is not None and joint.training.leaves_out(not mine):
                out = joint.blank
            elif joint.training.needed is None:
                state, out = joint.training.hear(self.forward, state, batch)
            else:
                state, out = self.forward(state, batch)
            if joint.blank is None:
                joint.blank = Output(torch.zeros_like(out.loss), weight_on_device(out) * 0)
            if n == 1:
                known = not self.may_skip and joint.known(out, size)
                before = _aside(state) if rounds > 1 or not known else None
                total.reference = None if known else joint.reference(weight_on_device(out))
            if known:
                joint.check(out, size)
            if not mine and out is not joint.blank:
                start = out.loss * 0
            elif not mine or out.skip is not None:
                start = joint.nothing(state, out.loss)
            else:
                start = self._start(state, out, None if known else total.share(out))
                joint.partial.update(out.metrics)
                if rounds > 1 or not known:
                    total.add(out)
            if last:
                skippable = self.may_skip or (not known and joint.counts_on_host(out))
                items = (
                    None
                    if known
                    else start_all_reduce_sum(
                        weight_on_device(out, 0 if total.weight is None else total.weight)
                    )
                )
                start = joint.join(state, start, touch=rounds > 1)
                applied = start_all_reduce_max([total.weight is not None]) if skippable else None
            start.backward()
        joint.finish(state, touched=rounds > 1)
        joint.borrows = not mine
        joint.draw(state, together=True)
        if applied is not None and not _heard(applied)[0]:
            return state, Output(
                out.loss.detach(), 0, out.aux, {}, out.skip or "left out by every process"
            )
        if known:
            joint.items = size * rounds * joint.size
            if rounds == 1:
                return state, Output(out.loss.detach(), out.weight, out.aux, out.metrics)
            divide([p.grad for p in parameters(state)], rounds)
        else:
            joint.items = items()  # type: ignore[misc]
            divide([p.grad for p in parameters(state)], joint.items, total.reference * joint.size)  # type: ignore[operator]
        _back(state, before)
        if total.weight is None:
            return state, Output(torch.zeros_like(out.loss), 0, out.aux)
        return state, total.output()

    def _start(self, state: TrainState, out: Output, share: Weight | None) -> Tensor:
        """Return the number that backward starts from: the loss × what its batch counts for × the scale."""
        start = out.loss
        if not start.requires_grad:
            _fail_without_gradient(state)
        if share is not None:
            start = start * share
        return start if self.scale is None else at_least_float32(start) * self.scale(state)

    def within(self, wrap: Wrap) -> Step:
        """Put a gradient step directly around this one."""
        return wrap(self)


def _heard(agreement: Callable[..., list[float]]) -> list[float]:
    with waiting_for_all("an agreement"):
        return agreement()


def _aside(state: TrainState) -> list[Tensor | None] | None:
    """Set gradients aside that are there already, of an earlier call of the step by a middleware, if any are."""
    params = parameters(state)
    grads = [p.grad for p in params]
    if all(grad is None for grad in grads):
        return None
    for p in params:
        p.grad = None
    return grads


def _back(state: TrainState, before: list[Tensor | None] | None) -> None:
    """Add to the gradients what was set aside."""
    for p, grad in zip(parameters(state), before or (), strict=False):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad


def commutes_with_scaling(wrap: Wrap) -> Wrap:
    """Mark a gradient ring's wrap as one that at most multiplies gradients by a number that is the same for a whole
    window.

    Such steps commute, so a later one may still be put directly around backward: ``step.within(wrap)``. That is how
    ``accumulate`` adds gradients up in place, and fp16 gradients are unscaled once per window, in whichever order the
    two are listed.
    """

    def wrapped(step: Any) -> Step:
        made: Any = wrap(step)
        if hasattr(step, "within"):
            made.within = lambda inner: wrapped(step.within(inner))
        return made

    return wrapped


class NoGradientError(ValueError):
    """The loss has no gradient, since gradients are switched off while the step runs."""


def _fail_without_gradient(state: TrainState) -> None:
    if not torch.is_grad_enabled():
        raise NoGradientError(
            "the loss has no gradient: gradients are switched off while the step runs"
        )
    trainable = any(p.requires_grad for p in state.model.parameters())
    hint = (
        "it was computed without the model's parameters, or detached (.item(), .detach(), torch.no_grad)"
        if trainable
        else "every parameter of the model has requires_grad=False"
    )
    raise ValueError(f"the loss has no gradient: {hint}")
