"""Gradients of a window of batches: their norm, their weighted mean, and why there are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import attrs
import torch
from torch import Tensor
from torch.nn import utils

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import by_mesh, full, largest, local_part
from fnloop._core.metrics import Metrics
from fnloop._core.optimizers import explain_untrained, optimizers_in
from fnloop._core.state import TrainState, current_parameters, parameters
from fnloop._core.types import Output
from fnloop._display.checks import join_names

# --------------------------------------------------------------------------------------------------
# Why there is no gradient.

_NONE = "the loss has no gradient"


class NoGradientError(ValueError):
    """The loss has no gradient, for any parameter that is trained.

    Args:
        message: the message.
        switched_off: whether gradients are disabled while the step runs.
    """

    def __init__(self, message: str, switched_off: bool = False) -> None:
        super().__init__(message)
        self.switched_off = switched_off


def fail_without_gradient(state: TrainState) -> NoReturn:
    """Raise NoGradientError for a loss that does not need a gradient."""
    if not torch.is_grad_enabled():
        why = "gradients are switched off while the step runs"
        raise NoGradientError(f"{_NONE}: {why}", switched_off=True)
    if any(p.requires_grad for p in state.model.parameters()):
        hint = (
            "it was computed without the model's parameters, or detached "
            "(.item(), .detach(), torch.no_grad)"
        )
    else:
        hint = "every parameter of the model has requires_grad=False"
    raise NoGradientError(f"{_NONE}: {hint}")


def fail_to_train(state: TrainState, name: str, uses_others: bool) -> NoReturn:
    """Raise NoGradientError: no parameter of the optimizers has a gradient.

    Args:
        state: the state.
        name: the name of the loss function.
        uses_others: whether other parameters of the model have one.
    """
    cache, optimizers = current_parameters(state), optimizers_in(state.optimizer).values()
    untrained = None if cache.resting else explain_untrained(state.model, optimizers)
    if untrained is not None and uses_others:
        why = untrained
    elif not any(p.requires_grad for p in cache.trained):
        why = "each of them has requires_grad=False"
    elif cache.resting:
        why = (
            "the loss does not use them. If it uses those of other optimizers, name one of these "
            f"in using(...): {join_names([*cache.resting], 5)}"
        )
    else:
        why = (
            f"{name} probably uses another model than the one that it is given, such as a global "
            "variable. Compute the loss with its first argument, which is the model that is trained"
        )
    of = "the optimizer" if len(optimizers) == 1 else "the optimizers"
    raise NoGradientError(
        f"{_NONE} for any parameter of {of}, so {name} would train nothing: {why}"
    )


# --------------------------------------------------------------------------------------------------
# Norms of gradients, and those of an earlier call.


def norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of tensors together, including what other processes hold of them.

    It reads nothing to the host. If a tensor is sharded, every process has to call it.

    Args:
        tensors: such as the ``gradients`` of a state.
        norm_type: the p of the norm, above 0; ``inf`` is the largest magnitude of an element.

    Returns:
        A tensor without dimensions.

    Example:
        >>> import torch
        >>> norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    largest_of = math.isinf(norm_type)  # which torch refuses to find in a tensor without elements
    if _are_alike(tensors) and not (largest_of and 0 in map(Tensor.numel, tensors)):
        # What get_total_norm does after it has sorted them by kind.
        norms = torch_compat.foreach_norm(tensors, norm_type)
        return torch.linalg.vector_norm(torch.stack([*norms]), norm_type)
    if largest_of:
        return torch.stack([largest(group) for group in by_mesh(tensors) or [[]]]).amax()
    if all(local_part(tensor) is tensor for tensor in tensors):
        return utils.get_total_norm(tensors, norm_type)
    norms = [full(utils.get_total_norm(group, norm_type)) for group in by_mesh(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _are_alike(grads: Sequence[Tensor]) -> bool:
    """Return whether gradients are dense tensors of one dtype on one device, without a graph."""
    kinds = {(type(g), g.dtype, g.device, g.layout, g.requires_grad) for g in grads}
    if len(kinds) != 1:
        return False
    kind, _, _, layout, has_graph = kinds.pop()
    return kind is Tensor and layout is torch.strided and not has_graph


def set_aside(state: TrainState) -> Callable[[], None]:
    """Take out the gradients that an earlier call of a step has left within the same update.

    A middleware that calls the step inside more than once in an update, or that changes what one
    call has made, does so: then ``.grad`` has the gradients of its own calls alone.

    Args:
        state: the state, in the gradient ring.

    Returns:
        What adds them to those that are there then.

    Example:
        >>> import torch
        >>> from fnloop.testing import toy
        >>> state = toy()
        >>> state.model.w.grad = torch.tensor(3.0)
        >>> put_back = set_aside(state)
        >>> state.model.w.grad = torch.tensor(1.0)
        >>> put_back()
        >>> state.model.w.grad
        tensor(4.)
    """
    params = parameters(state)
    for p in params:
        if p.grad is not None:
            break
    else:
        return _nothing
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None

    def put_back() -> None:
        for p, gradient in zip(parameters(state), gradients, strict=False):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad + gradient

    return put_back


def _nothing() -> None: ...


# --------------------------------------------------------------------------------------------------
# The weighted mean over the batches of a window: of losses, metrics and gradients.


class WeightedSum:
    """The running sum of a window: the weights of its batches, their losses and metrics.

    A backward of each batch starts from loss × relative weight. At the end :meth:`divide` turns the
    sum of the gradients into the mean over the items.

    Attributes:
        weight: the sum of the weights of the batches that were added; None before the first.
        reference: the first weight. Batches count relative to it, which keeps fp16 in its range.

    Example:
        >>> import fnloop as fl, torch
        >>> total, gradient = WeightedSum(), torch.zeros(())
        >>> for loss, weight in ((3.0, 2), (6.0, 4)):  # the gradient of each is its loss
        ...     out = fl.Output(torch.tensor(loss), weight)
        ...     gradient += out.loss * (total.relative_weight(out) or 1)
        ...     total.add(out)
        >>> total.divide([gradient])
        >>> gradient.item(), total.output().loss.item()
        (5.0, 5.0)
    """

    def __init__(self) -> None:
        self.weight: float | Tensor | None = None
        self.reference: float | Tensor | None = None
        self._loss: Tensor | None = None
        self._last: Output | None = None
        self._skipped: Output | None = None
        self._metrics = Metrics()
        # The sums of the weights on the device, as given and as counted: equal if all are valid.
        self._checked: tuple[Tensor, Tensor] | None = None
        self._latest: tuple[Output | None, float | Tensor] = (None, 0)

    @property
    def is_empty(self) -> bool:
        """Whether no batch was added."""
        return self.weight is None

    def relative_weight(self, out: Output) -> float | Tensor | None:
        """Return weight / reference, or None where that is 1."""
        weight = out.weight if out.weight.__class__ is int else self._weight_of(out)
        if self.reference is None:
            self.reference = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        if isinstance(self.reference, Tensor) or isinstance(weight, Tensor):
            return weight / self.reference
        if weight is self.reference or weight == self.reference:
            return None
        return weight / self.reference

    def _weight_of(self, out: Output) -> float | Tensor:
        """Return the weight of a micro-batch.

        A tensor that is NaN, infinite or negative counts as 0. That is remembered on the device.
        """
        if not isinstance(out.weight, Tensor):
            return out.weight
        if self._latest[0] is not out:
            given = in_wide_dtype(out.weight, out.loss)
            valid = self.valid(given)
            if self._checked is None:
                self._checked = given, valid
            else:
                self._checked = self._checked[0] + given, self._checked[1] + valid
            self._latest = out, valid
        return self._latest[1]

    @staticmethod
    def valid(weight: Tensor) -> Tensor:
        """Return a weight, or 0 where it is NaN, infinite or negative."""
        return torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp_(min=0)

    def add(self, out: Output) -> bool:
        """Count a micro-batch. Return whether it counts: it is not skipped."""
        __tracebackhide__ = True
        if out.skip is not None:
            self._skipped = out
            return False
        weight = out.weight if out.weight.__class__ is int else self._weight_of(out)
        loss = out.loss.detach()
        if self._loss is None or self.weight is None:
            self._loss, self.weight = at_least_float32(loss) * weight, weight
        elif isinstance(weight, Tensor):
            self._loss = self._loss + at_least_float32(loss) * weight
            self.weight = self.weight + weight
        else:
            self._loss, self.weight = self._loss.add_(loss, alpha=weight), self.weight + weight
        if out.metrics:
            self._metrics = self._metrics.combined(out.metrics)
        self._last = out
        return True

    def divide(
        self,
        gradients: Sequence[Tensor | None],
        weight: float | Tensor | None = None,
        reference: float | Tensor | None = None,
    ) -> None:
        """Turn the sum of relative weight × gradient into the mean, in place.

        Args:
            gradients: the sums.
            weight: the sum of the weights; by default that of the batches that were added.
            reference: what weights count relative to, if the weight is given.
        """
        if weight is None:
            weight, reference = self.weight, self.reference
        divisor = weight if weight is None or reference is None else weight / reference
        if divisor is None or (not isinstance(divisor, Tensor) and divisor in (0, 1)):
            return
        local = [g if g.__class__ is Tensor else local_part(g) for g in gradients if g is not None]
        if not local:
            return
        if isinstance(divisor, Tensor):
            # Without any item the gradient is zero, and stays so.
            torch_compat.foreach_div_(local, torch.where(divisor == 0, 1.0, divisor))
        elif math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
            torch_compat.foreach_mul_(local, 1 / divisor)
        else:
            torch_compat.foreach_div_(local, divisor)

    def output(self) -> Output:
        """Return the mean loss and the combined metrics, or the skip of a window without any."""
        if self._loss is None or self._last is None or self.weight is None:
            assert self._skipped is not None, "nothing was added"
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach())
        weight: float | Tensor
        if isinstance(self.weight, Tensor):
            weight, items = self.weight, torch.where(self.weight == 0, 1, self.weight)
        else:
            weight, items = self.weight, self.weight or 1
        if self._checked is not None:
            given, valid = self._checked
            weight = torch.where(given == valid, weight, math.nan)
        return Output(self._loss / items, weight, self._last.aux, self._metrics)


def in_wide_dtype(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in the loss's dtype, at least float32, which holds it exactly."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def at_least_float32(loss: Tensor) -> Tensor:
    """Return a loss in float32 if its dtype is narrower."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


# --------------------------------------------------------------------------------------------------
# The sum over a window whose batches a step takes one by one, changing each gradient.


class SumInOrder:
    """A sum that adds each gradient to those before it: a :class:`GradientSum`.

    Args:
        state: the state that is trained.
        dtype: in which gradients are added up; None: in their own.
    """

    def __init__(self, state: TrainState, dtype: torch.dtype | None) -> None:
        self._total, self._params, self._dtype = WeightedSum(), parameters(state), dtype
        self._sums: list[Tensor | None] = [None] * len(self._params)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if self._total.add(out):
            relative = self._total.relative_weight(out)
            self._sums = [
                _plus(so_far, _in_dtype(p.grad, self._dtype), relative)
                for so_far, p in zip(self._sums, self._params, strict=True)
            ]
        for p in self._params:
            p.grad = None

    def finish(self, state: TrainState) -> Output:
        self._total.divide(self._sums)
        for p, gradient in zip(self._params, self._sums, strict=True):
            p.grad = _in_dtype(gradient, p.dtype)
        return self._total.output()


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return gradient if gradient is None or dtype is None else gradient.to(dtype)


def _plus(
    so_far: Tensor | None, gradient: Tensor | None, relative: float | Tensor | None
) -> Tensor | None:
    if gradient is None:
        return so_far
    part = gradient if relative is None else gradient * relative
    return part if so_far is None else so_far + part
