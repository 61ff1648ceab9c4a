"""Gradients of a window of batches: what backward starts from, their weighted mean, and norms."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, Protocol, Self

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn import utils

from fnloop._backend import torch_compat
from fnloop._backend.containers import IN_BATCHES, parts_of, tensors_in, with_parts
from fnloop._backend.fsdp import by_mesh, full, largest, local_part
from fnloop._core.metrics import combine
from fnloop._core.optimizers import explain_untrained, optimizers_in
from fnloop._core.state import TrainState, current_parameters, parameters
from fnloop._core.types import BY_ANOTHER, Batch, Metric, Output, Step
from fnloop._display.checks import join_names

# --------------------------------------------------------------------------------------------------
# What backward starts from, and the gradients that a window finds and leaves.

NO_GRADIENT = "the loss has no gradient"


class LossRoot:
    """The step that computes the loss, and the number that backward starts from.

    It makes the gradient of one batch in one process.

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
        if root.ndim:  # one loss for each model of a stack, whose gradients are its own
            root = root.sum()
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
    for p in params:
        if p.grad is not None:
            break
    else:
        return None
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None
    return gradients


def restore_gradients(state: TrainState, stashed: list[Tensor | None] | None) -> None:
    """Add stashed gradients to the present ones."""
    if stashed is None:
        return
    for p, gradient in zip(parameters(state), stashed, strict=False):
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


def fail_to_train(state: TrainState, name: str, uses_others: bool) -> NoReturn:
    """Raise ValueError: no parameter of the optimizers has a gradient.

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
    raise ValueError(
        f"{NO_GRADIENT} for any parameter of {of}, so {name} would train nothing: {why}"
    )


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
    return _norm(tensors, norm_type, _are_alike(tensors))


def clip_to_norm_(params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``.

    Their bits are those of ``clip_grad_norm_``, but gradients whose norm is not finite become NaN.
    An infinite ``max_norm`` changes nothing.

    Returns:
        The norm before.
    """
    grads = [p.grad for p in params if p.grad is not None]
    alike = _are_alike(grads)
    before = _norm(grads, norm_type, alike)
    if math.isinf(max_norm):
        return before
    finite = torch.fmod(before, math.inf)  # NaN if it is not, by which no gradient can be scaled
    if alike:  # in place, as each new tensor takes longer than what is computed
        factor = finite.add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
        torch_compat.foreach_mul_(grads, factor)
        return before
    for group in by_mesh([p for p in params if p.grad is not None]):
        utils.clip_grads_with_norm_(group, max_norm, finite)
    return before


def _norm(grads: Sequence[Tensor], norm_type: float, alike: bool) -> Tensor:
    if math.isinf(norm_type):
        return torch.stack([largest(group) for group in by_mesh(grads) or [[]]]).amax()
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


# --------------------------------------------------------------------------------------------------
# The weighted mean over the batches of a window: of losses, metrics and gradients.

Weight = int | float | Tensor


class WeightedSum:
    """The running sum of a window: the weights of its batches, their losses and metrics.

    Attributes:
        weight: the sum of the weights of the batches that were added; None before the first.
        reference: the first weight. Batches count relative to it, which keeps fp16 in its range.
    """

    def __init__(self) -> None:
        self.weight: Weight | None = None
        self.reference: Weight | None = None
        self._loss: Tensor | None = None
        self._last: Output | None = None
        self._skipped: Output | None = None
        self._metrics: Mapping[str, Metric] = {}
        # The sums of the weights on the device, as given and as counted: equal if all are valid.
        self._checked: tuple[Tensor, Tensor] | None = None
        self._latest: tuple[Output | None, Weight] = (None, 0)

    @property
    def is_empty(self) -> bool:
        """Whether no batch was added."""
        return self.weight is None

    def relative_weight(self, out: Output) -> Weight | None:
        """Return weight / reference, or None where that is 1."""
        weight = out.weight if out.weight.__class__ is int else self._weight_of(out)
        if self.reference is None:
            self.reference = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        if isinstance(self.reference, Tensor) or isinstance(weight, Tensor):
            return weight / self.reference
        if weight is self.reference or weight == self.reference:
            return None
        return weight / self.reference

    def _weight_of(self, out: Output) -> Weight:
        """Return the weight of a micro-batch.

        A tensor that is NaN, infinite or negative counts as 0. That is remembered on the device.
        """
        if not isinstance(out.weight, Tensor):
            return out.weight
        if self._latest[0] is not out:
            given = in_wide_dtype(out.weight, out.loss)
            valid = valid_weight(given)
            if self._checked is None:
                self._checked = given, valid
            else:
                self._checked = self._checked[0] + given, self._checked[1] + valid
            self._latest = out, valid
        return self._latest[1]

    def add(self, out: Output) -> None:
        """Count a micro-batch, unless it is skipped."""
        __tracebackhide__ = True
        if out.skip is not None:
            self._skipped = out
            return
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
            self._metrics = combine(self._metrics, out.metrics)
        self._last = out

    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """Turn the sum of relative weight × gradient into the mean, in place."""
        if self.weight is not None:
            divide(gradients, self.weight, self.reference)

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


def skipped_with(others: object, out: Output) -> Output:
    """Return an output, which is left out if other processes leave it out."""
    return attrs.evolve(out, skip=BY_ANOTHER) if others and out.skip is None else out


def valid_weight(weight: Tensor) -> Tensor:
    """Return a weight, or 0 where it is NaN, infinite or negative."""
    return torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp_(min=0)


def in_wide_dtype(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in the loss's dtype, at least float32, which holds it exactly."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def divide(
    gradients: Iterable[Tensor | None], weight: Weight, reference: Weight | None = None
) -> None:
    """Divide gradients by weight / reference, in place."""
    divisor = weight if reference is None else weight / reference
    if not isinstance(divisor, Tensor) and divisor in (0, 1):
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


def at_least_float32(loss: Tensor) -> Tensor:
    """Return a loss in float32 if its dtype is narrower."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


# --------------------------------------------------------------------------------------------------
# Forward and backward of a window, piece by piece.


class Pass(Protocol):
    """Forward and backward of a window, whose batches may come in pieces.

    In one process ``forward`` is the step inside itself, so that no frame is added to a traceback.
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def add(self, state: TrainState, out: Output, /) -> None:
        """Add the gradient of a piece, by its weight, given the output of ``forward``."""
        ...

    def finish(self, state: TrainState, /) -> Output:
        """Turn the sum of the gradients into the mean. Return what to report of the window."""
        ...


def run(making: Pass, state: TrainState, pieces: Iterable[Batch]) -> tuple[TrainState, Output]:
    """Run forward and backward of the pieces of a window, one after the other."""
    __tracebackhide__ = True
    for piece in pieces:
        state, out = making.forward(state, piece)
        making.add(state, out)
    return state, making.finish(state)


class LocalBatch:
    """Forward and backward of one batch in one piece, which need not be weighed."""

    __slots__ = ("_loss", "_out", "forward")

    def __init__(self, loss: LossRoot) -> None:
        self._loss, self.forward = loss, loss.forward

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        self._out = self._loss.backward(state, out)

    def finish(self, state: TrainState) -> Output:
        return self._out


class LocalWindow:
    """Forward and backward of a window in one process, weighted by the items of its batches.

    Args:
        loss: the loss, and the root of backward.
        state: the state that is trained.

    Attributes:
        total: the sum of the weights of the batches so far, with their losses and metrics.
    """

    __slots__ = ("_loss", "_stashed", "forward", "total")

    def __init__(self, loss: LossRoot, state: TrainState) -> None:
        self._loss, self.forward = loss, loss.forward
        self.total, self._stashed = WeightedSum(), stash_gradients(state)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if out.skip is None:
            self._loss.root(state, out, self.total.relative_weight(out)).backward()
        self.total.add(out)

    def finish(self, state: TrainState) -> Output:
        self.total.divide([p.grad for p in parameters(state)])
        if self._stashed is not None:
            restore_gradients(state, self._stashed)
        return self.total.output()


# --- cutting a batch

_VALUES = (str, bytes, bool, int, float, type(None))


def samples_in(batch: Batch) -> int:
    """Return the number of samples in a batch: the leading dimension of its tensors.

    Raises:
        ValueError: there is not one.
    """
    sizes = {t.size(0) for t in tensors_in(batch) if t.ndim}
    if len(sizes) == 1:
        return sizes.pop()
    if sizes:
        raise ValueError(
            "a batch is cut into pieces along the first dimension of its tensors, but there they "
            f"have the lengths {sorted(sizes)}. To give a tensor x to each piece whole, put "
            "x.expand(n, *x.shape) into the batch, where n is the number of samples, and take x[0]"
        )
    raise ValueError(
        "a batch is cut into pieces along the first dimension of its tensors, but there is no "
        f"tensor with a dimension in a {type(batch).__name__}. Put its tensors into a tuple, a "
        "list or a mapping"
    )


def pieces_of(batch: Batch, size: int) -> list[Batch]:
    """Return the pieces of a batch, which share its memory; the last one may be smaller.

    Raises:
        ValueError: its tensors do not have one length.

    Example:
        >>> import torch
        >>> pieces_of((torch.tensor([1, 2, 3]), ["a", "b", "c"], "train"), 2)
        [(tensor([1, 2]), ['a', 'b'], 'train'), (tensor([3]), ['c'], 'train')]
    """
    samples = samples_in(batch)
    if samples <= size:
        return [batch]
    return [_cut(batch, samples, slice(start, start + size)) for start in range(0, samples, size)]


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch of some of the samples of a batch.

    Raises:
        ValueError: its tensors do not have one length.

    Example:
        >>> import torch
        >>> rows_of((torch.tensor([1, 2, 3]), ["a", "b", "c"], "train"), [0, 2])
        (tensor([1, 3]), ['a', 'c'], 'train')
    """
    return _cut(batch, samples_in(batch), [*rows])


def _cut(value: object, samples: int, rows: slice | list[int]) -> object:
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    if isinstance(value, np.ndarray) and value.shape[:1] == (samples,):
        return value[rows]
    parts = parts_of(value, IN_BATCHES)
    if parts is None:
        return value
    if isinstance(value, IN_BATCHES) and len(value) == samples and _are_values(value):
        if isinstance(rows, slice):
            return value[rows]
        return type(value)(value[row] for row in rows)
    return with_parts(value, [_cut(part, samples, rows) for _, part in parts])


def _are_values(values: Sequence[object]) -> bool:
    """Return whether these are plain values of one kind, as collated for each sample."""
    return isinstance(values[0], _VALUES) and len({type(value) for value in values}) == 1


# --------------------------------------------------------------------------------------------------
# The sum over a window whose batches a step takes one by one, changing each gradient.


class GradientSum(abc.ABC):
    """The weighted sum of gradients, within a ``with`` block.

    For each batch let the step fill ``.grad``, then call ``add`` with its output; after the last
    one ``finish``.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """End the sum, also after an exception."""

    @abc.abstractmethod
    def add(self, state: TrainState, out: Output, /) -> None:
        """Take the gradient of a batch out of ``.grad``, unless it is skipped."""

    @abc.abstractmethod
    def finish(self, state: TrainState, /) -> Output:
        """Leave the mean in ``.grad``. Return what to report of the window."""


class SumInOrder(GradientSum):
    """A sum that adds each gradient to those before it.

    Args:
        state: the state that is trained.
        total: the sum of the weights.
        dtype: in which gradients are added up; None: in their own.
    """

    def __init__(self, state: TrainState, total: WeightedSum, dtype: torch.dtype | None) -> None:
        self._total, self._params, self._dtype = total, parameters(state), dtype
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._stashed = stash_gradients(state)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if out.skip is None:
            relative = self._total.relative_weight(out)
            self._sums = [
                _plus(so_far, _in_dtype(p.grad, self._dtype), relative)
                for so_far, p in zip(self._sums, self._params, strict=True)
            ]
        for p in self._params:
            p.grad = None
        self._total.add(out)

    def finish(self, state: TrainState) -> Output:
        self._total.divide(self._sums)
        for p, gradient in zip(self._params, self._sums, strict=True):
            p.grad = _in_dtype(gradient, p.dtype)
        restore_gradients(state, self._stashed)
        return self._total.output()


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return gradient if gradient is None or dtype is None else gradient.to(dtype)


def _plus(so_far: Tensor | None, gradient: Tensor | None, relative: Weight | None) -> Tensor | None:
    if gradient is None:
        return so_far
    part = gradient if relative is None else gradient * relative
    return part if so_far is None else so_far + part
