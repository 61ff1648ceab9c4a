"""What backward starts from, and the gradients that a window finds and leaves."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Output, Step
from fnloop._step.weighted_sum import Weight, at_least_float32

__all__ = ["LossRoot", "NoGradientError", "restore_gradients", "stash_gradients"]


class LossRoot:
    """The step that computes the loss, and the number that backward starts from.

    Args:
        forward: the step.
        scale: ``state -> factor of the gradients``, on the device; or None.
        may_skip: whether the step may skip a batch on some processes only.
    """

    __slots__ = ("forward", "may_skip", "scale")

    def __init__(
        self,
        forward: Step,
        scale: Callable[[TrainState], Tensor] | None = None,
        may_skip: bool = False,
    ) -> None:
        self.forward, self.scale, self.may_skip = forward, scale, may_skip

    def root(self, state: TrainState, out: Output, relative_weight: Weight | None) -> Tensor:
        """Return the number that backward starts from: loss × relative weight × scale."""
        root = out.loss
        if not root.requires_grad:
            _fail_without_gradient(state)
        if relative_weight is not None:
            root = root * relative_weight
        return root if self.scale is None else at_least_float32(root) * self.scale(state)


def stash_gradients(state: TrainState) -> list[Tensor | None] | None:
    """Set aside gradients left by an earlier call of the step within the same update, if any."""
    params = parameters(state)
    gradients = [p.grad for p in params]
    if all(gradient is None for gradient in gradients):
        return None
    for p in params:
        p.grad = None
    return gradients


def restore_gradients(state: TrainState, stashed: list[Tensor | None] | None) -> None:
    """Add stashed gradients to the present ones."""
    for p, gradient in zip(parameters(state), stashed or (), strict=False):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient


class NoGradientError(ValueError):
    """The loss has no gradient because gradients are disabled while the step runs."""


def _fail_without_gradient(state: TrainState) -> None:
    if not torch.is_grad_enabled():
        raise NoGradientError(
            "the loss has no gradient: gradients are switched off while the step runs"
        )
    if any(p.requires_grad for p in state.model.parameters()):
        hint = (
            "it was computed without the model's parameters, or detached "
            "(.item(), .detach(), torch.no_grad)"
        )
    else:
        hint = "every parameter of the model has requires_grad=False"
    raise ValueError(f"the loss has no gradient: {hint}")
