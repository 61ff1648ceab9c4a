"""Copy an optimizer with small parameters, together with everything that it holds."""

from __future__ import annotations

import copy
import io
import logging
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.containers import SEQUENCES
from fnloop._checkpoint.optimizer import NamedOptimizer, walk_optimizers

__all__ = [
    "CONTAINERS",
    "SMALL_EDGE",
    "WHOLE_EDGE",
    "copy_small",
    "sampling_dtype",
]

SMALL_EDGE = 4  # the largest size of a small parameter in each dimension
WHOLE_EDGE = sys.maxsize  # the same for whole parameters
FEW = 8  # a group of at most this many parameters keeps all; a larger one keeps one of each kind
SMALL_TENSOR = 4096  # elements; such a tensor is copied whole, unless it has a parameter's shape
MOST_OBJECTS = 20_000  # an optimizer that holds more, perhaps a whole model, is not copied
CONTAINERS = (Mapping, *SEQUENCES, set, frozenset)
SHARED = (  # not copied
    *(types.ModuleType, logging.Logger, logging.Handler),
    *(type(threading.Lock()), type(threading.RLock())),
)


def sampling_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which to draw random values for a tensor."""
    return torch.complex64 if tensor.is_complex() else torch.float32


def copy_small(
    named: NamedOptimizer, numbers: torch.Generator, edge: int = SMALL_EDGE
) -> NamedOptimizer:
    """Return a copy of an optimizer with cut parameters, and with all tensors cut like them.

    Args:
        named: the optimizer.
        numbers: draws the values of the parameters.
        edge: the largest size of a parameter in each dimension.

    Raises:
        NotImplementedError: the optimizer holds something that cannot be copied.
    """
    optimizers = list(walk_optimizers(named.optimizer))
    copier = _Copier(numbers, edge)
    for inner in optimizers:
        for group in inner.param_groups:
            copier.copy_parameters(group["params"])
    for inner in optimizers:
        copier.memo[id(inner)] = object.__new__(type(inner))
    copier.prepare(_methods_of(optimizers))
    for inner in optimizers:
        _copy_state(inner, copier)
    groups = [group for inner in optimizers for group in inner.param_groups]
    shapes = {tuple(p.shape) for group in groups for p in group["params"]}
    for inner in optimizers:
        _copy_attributes(inner, copier, shapes)
    names = {id(twin): named.names.get(original, "?") for original, twin in copier.twins.items()}
    return NamedOptimizer(copier.memo[id(named.optimizer)], names)


def _methods_of(optimizers: Iterable[Optimizer]) -> list[types.FunctionType]:
    classes = {cls for optimizer in optimizers for cls in type(optimizer).__mro__}
    own = [cls for cls in classes if not cls.__module__.startswith("torch.")]
    return [f for cls in own for f in vars(cls).values() if isinstance(f, types.FunctionType)]


def _copy_state(optimizer: Optimizer, copier: _Copier) -> None:
    if "state" not in vars(optimizer) or id(optimizer.state) in copier.memo:
        return
    state = copy.copy(optimizer.state)
    state.clear()
    copier.memo[id(optimizer.state)] = state
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor) or id(key) in copier.twins:
            copier.prepare(value)
            state[copier.memo.get(id(key), key)] = copy.deepcopy(value, copier.memo)


def _copy_attributes(
    optimizer: Optimizer, copier: _Copier, shapes: Collection[tuple[int, ...]]
) -> None:
    twin = copier.memo[id(optimizer)]
    for name, value in vars(optimizer).items():
        if name == "step":  # a schedule's patch around the method of the class
            continue
        copier.prepare(value, shapes, SMALL_TENSOR)
        is_hooks = torch_compat.is_hook_table(name)
        vars(twin)[name] = OrderedDict() if is_hooks else copy.deepcopy(value, copier.memo)


@attrs.define(eq=False)
class _Copier:
    """Copies of parameters, and of what refers to them.

    Args:
        numbers: draws the values of the parameters.
        edge: the largest size of a parameter in each dimension.
        memo: id to copy, as ``copy.deepcopy`` takes it.
        twins: id of an original parameter to its copy, one for each copy.
        seen: ids of what has been prepared for copying.
    """

    numbers: torch.Generator
    edge: int
    memo: dict[int, Any] = attrs.field(factory=dict)
    twins: dict[int, Tensor] = attrs.field(factory=dict)
    seen: set[int] = attrs.field(factory=set)

    def copy_parameters(self, params: list[Tensor]) -> None:
        """Create parameters for those of a group: for each one, or one for all of a kind."""
        if id(params) in self.memo:
            return
        alike: dict[object, Tensor] = {}
        for p in params:
            separate = len(params) <= FEW or self.edge == WHOLE_EDGE
            kind = (p.ndim, p.dtype, p.requires_grad, p if separate else None)
            if id(p) not in self.memo and kind not in alike:
                self.memo[id(p)] = self.twins[id(p)] = self._draw_parameter(p)
            self.memo.setdefault(id(p), alike.get(kind))
            alike.setdefault(kind, self.memo[id(p)])
        self.memo[id(params)] = list(
            {id(self.memo[id(p)]): self.memo[id(p)] for p in params}.values()
        )

    def _draw_parameter(self, p: Tensor) -> nn.Parameter:
        shape = [min(size, self.edge) for size in p.shape]
        value = torch.randn(shape, generator=self.numbers, dtype=sampling_dtype(p))
        twin = nn.Parameter(value.to(p.device, p.dtype), p.requires_grad)
        vars(twin).update({k: v for k, v in vars(p).items() if not isinstance(v, Tensor)})
        return twin

    def prepare(
        self, value: object, shapes: Collection[tuple[int, ...]] = (), small: int = 0
    ) -> None:
        """Put a copy of each tensor in a value into the memo, cut unless it is small.

        Locks, loggers and modules are shared. A file is replaced by one in memory, so that the
        trial writes to no file.

        Args:
            value: the value.
            shapes: the shapes of parameters, whose tensors are always cut.
            small: the number of elements up to which a tensor is copied whole.

        Raises:
            NotImplementedError: there is more than can be copied, or a function that might reach
                the optimizer itself.
        """
        waiting = [value]
        while waiting:
            item = waiting.pop()
            plain = item is None or isinstance(item, bool | int | float | str | type)
            if plain or id(item) in self.seen or id(item) in self.memo:
                continue
            self.seen.add(id(item))
            if len(self.seen) > MOST_OBJECTS:
                raise NotImplementedError(f"it holds more than {MOST_OBJECTS} objects")
            if isinstance(item, Tensor):
                whole = item.numel() <= small and tuple(item.shape) not in shapes
                self.memo[id(item)] = _copy_tensor(item, WHOLE_EDGE if whole else self.edge)
            elif isinstance(item, SHARED):
                self.memo[id(item)] = item
            elif isinstance(item, io.IOBase):
                text = isinstance(item, io.TextIOBase)
                self.memo[id(item)] = io.StringIO() if text else io.BytesIO()
            else:
                waiting += _references_of(item)


def _copy_tensor(tensor: Tensor, edge: int) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):  # sharded or compressed
        raise NotImplementedError(f"it holds a tensor of the class {type(tensor).__name__}")
    part = tensor[tuple(slice(0, edge) for _ in tensor.shape)]
    return part.detach().clone().requires_grad_(tensor.requires_grad)


def _references_of(item: object) -> list[Any]:
    """Return what an object refers to."""
    if isinstance(item, CONTAINERS):
        return _inside(item)
    if isinstance(item, types.FunctionType):
        enclosed = [value for cell in item.__closure__ or () for value in _contents_of(cell)]
        if any(map(_may_hold_tensors, enclosed)):
            raise NotImplementedError(
                f"its function {item.__name__} keeps tensors, or might, in variables around it"
            )
        return [value for value in enclosed if isinstance(value, types.FunctionType)]
    if isinstance(item, types.BuiltinFunctionType | types.MethodType):
        return []
    return list(vars(item).values()) if hasattr(item, "__dict__") else []


def _inside(container: Collection[Any]) -> list[Any]:
    """Return what a container holds, with the keys of a mapping."""
    return [*container, *(container.values() if isinstance(container, Mapping) else ())]


def _contents_of(cell: types.CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _may_hold_tensors(value: object) -> bool:
    """Return whether a value is or contains a tensor, a module or an optimizer.

    An empty container counts too, because it may be filled later.
    """
    if isinstance(value, CONTAINERS):
        inside = _inside(value)
        fillable = not inside and not isinstance(value, tuple | frozenset)
        return fillable or any(map(_may_hold_tensors, inside))
    return isinstance(value, Tensor | nn.Module | Optimizer)
