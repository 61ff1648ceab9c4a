"""What backward starts from, and the gradients that a window finds and leaves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import utils

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import by_mesh, full, local_part
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Output, Step
from fnloop._step.weighted_sum import Weight, at_least_float32, in_wide_dtype, valid_weight

__all__ = [
    "NO_GRADIENT",
    "LossRoot",
    "NoGradientError",
    "clip_to_norm_",
    "nan_unless_finite",
    "restore_gradients",
    "stash_gradients",
    "total_norm",
]

NO_GRADIENT = "the loss has no gradient"


class LossRoot:
    """The step that computes the loss, and the number that backward starts from.

    It makes the gradient of one batch in one process: see :class:`fnloop._step.engine.BatchPass`.

    Args:
        forward: the step.
        scale: ``state -> factor of the gradients``, on the device; or None.
        may_skip: whether the step may skip a batch on some processes only.
        create_graph: whether gradients have a graph of their own.
        name: the name of the loss function.
    """

    __slots__ = ("create_graph", "forward", "may_skip", "name", "scale")

    def __init__(
        self,
        forward: Step,
        scale: Callable[[TrainState], Tensor] | None = None,
        may_skip: bool = False,
        create_graph: bool = False,
        name: str = "the loss function",
    ) -> None:
        self.forward, self.scale, self.may_skip = forward, scale, may_skip
        self.create_graph, self.name = create_graph, name

    def root(self, state: TrainState, out: Output, relative_weight: Weight | None) -> Tensor:
        """Return the number that backward starts from: loss × relative weight × scale."""
        root = out.loss
        if not root.requires_grad:
            _fail_without_gradient(state)
        if relative_weight is not None:
            root = root * relative_weight
        return root if self.scale is None else at_least_float32(root) * self.scale(state)

    def backward(self, state: TrainState, out: Output) -> Output:
        __tracebackhide__ = True
        if out.skip is not None:
            return attrs.evolve(out, loss=out.loss.detach())
        relative = None
        if isinstance(out.weight, Tensor):  # on the device: 1, or 0 for a batch without items
            relative = in_wide_dtype(valid_weight(out.weight) > 0, out.loss)
        root = self.root(state, out, relative)
        if self.create_graph:
            _backward_with_graph(root)
        else:
            root.backward()
        return Output(out.loss.detach(), out.weight, out.aux, out.metrics)


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


def _backward_with_graph(root: Tensor) -> None:
    with warnings.catch_warnings():
        # The warning is of a leak of memory. The gradients are removed after the update.
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        root.backward(create_graph=True)


class NoGradientError(ValueError):
    """The loss has no gradient because gradients are disabled while the step runs."""


def _fail_without_gradient(state: TrainState) -> None:
    if not torch.is_grad_enabled():
        raise NoGradientError(f"{NO_GRADIENT}: gradients are switched off while the step runs")
    if any(p.requires_grad for p in state.model.parameters()):
        hint = (
            "it was computed without the model's parameters, or detached "
            "(.item(), .detach(), torch.no_grad)"
        )
    else:
        hint = "every parameter of the model has requires_grad=False"
    raise ValueError(f"{NO_GRADIENT}: {hint}")


def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients together, including the parts in other processes."""
    return _norm(grads, norm_type, _are_alike(grads))


def clip_to_norm_(params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``.

    Their bits are those of ``clip_grad_norm_``, but gradients whose norm is not finite become NaN.
    An infinite ``max_norm`` changes nothing.

    Returns:
        The norm before.
    """
    trained = [p for p in params if p.grad is not None]
    grads = [p.grad for p in trained if p.grad is not None]
    alike = _are_alike(grads)
    norm = _norm(grads, norm_type, alike)
    if math.isinf(max_norm):
        return norm
    finite = nan_unless_finite(norm)
    if alike:  # in place, as each new tensor takes longer than what is computed
        factor = finite.add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
        torch_compat.foreach_mul_(grads, factor)
        return norm
    for group in by_mesh(trained):
        utils.clip_grads_with_norm_(group, max_norm, finite)
    return norm


def _norm(grads: Sequence[Tensor], norm_type: float, alike: bool) -> Tensor:
    if alike:  # what get_total_norm does after it has sorted them by kind
        norms = torch_compat.foreach_norm(grads, norm_type)
        return torch.linalg.vector_norm(torch.stack([*norms]), norm_type)
    if all(local_part(grad) is grad for grad in grads):
        return utils.get_total_norm(grads, norm_type)
    norms = [full(utils.get_total_norm(group, norm_type)) for group in by_mesh(grads)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _are_alike(grads: Sequence[Tensor]) -> bool:
    """Return whether gradients are dense tensors of one dtype on one device, without a graph."""
    kinds = {(type(g), g.dtype, g.device, g.layout, g.requires_grad) for g in grads}
    if len(kinds) != 1:
        return False
    kind, _, _, layout, has_graph = kinds.pop()
    return kind is Tensor and layout is torch.strided and not has_graph


def nan_unless_finite(norm: Tensor) -> Tensor:
    """Return norms with NaN in the place of infinite ones, by which no gradient can be scaled."""
    return torch.fmod(norm, math.inf)
