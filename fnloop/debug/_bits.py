"""The results of an update, and where those of two updates differ in a bit."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fnloop._backend.fsdp import local_part
from fnloop._checkpoint.compare import INTEGER_OF_SIZE
from fnloop._core.optimizers import optimizers_in
from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop.debug._copies import clone_all, named_tensors, tensors_of

__all__ = [
    "Difference",
    "Differences",
    "Gradients",
    "Result",
    "as_integers",
    "find_differences",
    "result_of",
    "without_gradients",
]

LOSS, GRADIENT, WEIGHT, BUFFER, OPTIMIZER, SLOT = (
    *("loss", "gradient", "weight", "buffer", "optimizer", "slot"),
)


ORDER = (LOSS, BUFFER, GRADIENT, WEIGHT, OPTIMIZER, SLOT)
OF_PARAMETERS = (GRADIENT, WEIGHT, OPTIMIZER)


@attrs.frozen(eq=False)
class Part:
    """A tensor of a result.

    Args:
        kind: "loss", "gradient", "buffer", "weight", "optimizer" or "slot".
        name: the name of the parameter or the buffer; of a slot, its name.
        inside: what it is of the parameter or the slot, such as "exp_avg"; or "".
        value: the tensor.
    """

    kind: str
    name: str
    inside: str
    value: Tensor


Result = list[Part]


@attrs.frozen
class Difference:
    """A tensor in which two results differ.

    Args:
        kind, name, inside: as in :class:`Part`.
        elements: how many elements differ.
        size: how many it has.
        most: the largest difference; NaN if there is none that is finite.
        bits: how many bits differ in all.
        values: the loss in both, or None.
    """

    kind: str
    name: str
    inside: str
    elements: int
    size: int
    most: float
    bits: int
    values: tuple[float, float] | None = None


@attrs.frozen
class Differences:
    """Where two results differ.

    Args:
        first: the first difference, in the order in which an update makes its results.
        parameter: that of the first parameter whose gradient, value or optimizer state differs.
        parameters: how many parameters differ.
        gradients: whether the gradients were compared.
    """

    first: Difference
    parameter: Difference | None
    parameters: int
    gradients: bool = False


class Gradients:
    """Copies of the gradients, as each optimizer sees them before its step.

    Args:
        state: the state.
    """

    def __init__(self, state: TrainState) -> None:
        self.optimizers = [*optimizers_in(state.optimizer).values()]
        self.found: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Gradients:
        self._handles = [one.register_step_pre_hook(self._note) for one in self.optimizers]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, optimizer: Optimizer, *_: object) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = {id(p): _dense(p.grad) for p in params if p.grad is not None}
        self.found |= zip(grads, clone_all([*grads.values()]), strict=True)


def result_of(state: TrainState, out: Output, gradients: Gradients | None, copied: bool) -> Result:
    """Return what an update has made.

    Args:
        state: the state after it.
        out: its output.
        gradients: those that its optimizers saw; None if they are not known.
        copied: whether to copy the tensors, because another update will follow.
    """
    found = gradients.found if gradients is not None else {}
    named = dict(named_tensors(state))
    names = {id(tensor): name for name, tensor in named.items()}
    buffers = {id(b) for b in state.model.buffers()}
    parts = [Part(LOSS, "loss", "", out.loss)]
    parts += [Part(BUFFER, name, "", t) for name, t in named.items() if id(t) in buffers]
    grads = [Part(GRADIENT, names[i], "", grad) for i, grad in found.items() if i in names]
    weights = [Part(WEIGHT, name, "", t) for name, t in named.items() if id(t) not in buffers]
    parts += weights
    for optimizer in optimizers_in(state.optimizer).values():
        for key, held in optimizer.state.items():
            name = names.get(id(key), "")
            parts += [Part(OPTIMIZER, name, k, t) for k, t in tensors_of(held)]
    for slot, held in state.slots.items():
        parts += [Part(SLOT, slot, k, t) for k, t in tensors_of(held)]
    taken = [_dense(part.value) for part in parts]
    taken = clone_all(taken) if copied else taken
    result = [Part(p.kind, p.name, p.inside, t) for p, t in zip(parts, taken, strict=True)]
    return sorted([*result, *grads], key=lambda part: ORDER.index(part.kind))


def without_gradients(result: Result) -> Result:
    """Return what is in a result besides the gradients."""
    return [part for part in result if part.kind != GRADIENT]


def _dense(tensor: Tensor) -> Tensor:
    local = local_part(tensor.detach())
    return local if local.layout is torch.strided else local.to_dense()


# --- comparison


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in one dimension."""
    flat = tensor.detach().contiguous()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    return flat.view(INTEGER_OF_SIZE[flat.dtype.itemsize])


def find_differences(a: Result, b: Result) -> Differences | None:
    """Return where two results differ in a bit; None if nowhere."""
    labels = [[(p.kind, p.name, p.inside, p.value.shape, p.value.dtype) for p in r] for r in (a, b)]
    if labels[0] != labels[1]:
        odd = next(
            (p for p in [*a, *b] if _label(p) not in labels[0] or _label(p) not in labels[1]), a[0]
        )
        found = Difference(odd.kind, odd.name, odd.inside, 0, 0, math.nan, 0)
        return Differences(found, found if odd.kind in OF_PARAMETERS else None, 1)
    if _all_equal(a, b):
        return None
    flags = [
        (as_integers(x.value) != as_integers(y.value)).any() for x, y in zip(a, b, strict=True)
    ]
    differ = [bool(flag) for flag in flags]
    pairs = [(x, y) for x, y, flag in zip(a, b, differ, strict=True) if flag]
    of_parameters = [(x, y) for x, y in pairs if x.kind in OF_PARAMETERS]
    parameter = _describe(*of_parameters[0]) if of_parameters else None
    differing = len({x.name for x, _ in of_parameters})
    compared = any(part.kind == GRADIENT for part in a)
    return Differences(_describe(*pairs[0]), parameter, differing, compared)


def _all_equal(a: Result, b: Result) -> bool:
    """Return whether two results have the same bits, with one read from a device."""
    pairs = [(as_integers(x.value), as_integers(y.value)) for x, y in zip(a, b, strict=True)]
    if all(x.device.type == "cpu" for x, _ in pairs):
        return all(torch.equal(x, y) for x, y in pairs)
    device = pairs[0][0].device
    differ = [(x != y).any().to(device) for x, y in pairs]
    return not bool(torch.stack(differ).any())


def _label(part: Part) -> tuple[object, ...]:
    return part.kind, part.name, part.inside, part.value.shape, part.value.dtype


def _describe(one: Part, other: Part) -> Difference:
    x, y = as_integers(one.value), as_integers(other.value)
    gap = (_wide(one.value) - _wide(other.value)).abs().nan_to_num(-1.0, -1.0, -1.0)
    most = float(gap.max())
    values = (float(one.value), float(other.value)) if one.kind == LOSS else None
    return Difference(
        one.kind, one.name, one.inside, int((x != y).sum()), x.numel(),
        most if most >= 0 else math.nan, _bits(x ^ y), values,
    )  # fmt: skip


def _wide(tensor: Tensor) -> Tensor:
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().to(wide)


def _bits(differing: Tensor) -> int:
    """Return how many bits of integers are set."""
    octets = differing.view(torch.uint8)
    return sum(int((octets >> i & 1).sum()) for i in range(8))
