"""Copy an optimizer with small parameters, with everything that it holds, and update the copy."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.containers import SEQUENCES, map_leaves
from fnloop._checkpoint.optimizer import NamedOptimizer, walk_optimizers
from fnloop._core.optimizers import wants_closure
from fnloop._core.rng import isolated, seed_host, torch_seeder
from fnloop._core.serialize import copy_flattened, flattened_kind

__all__ = [
    "CONTAINERS",
    "SMALL_EDGE",
    "SMALL_TENSOR",
    "WHOLE_EDGE",
    "Position",
    "begin_training",
    "copy_small",
    "subclasses_in",
    "tensors_of_copy",
    "update_copy",
    "without_side_effects",
]

SMALL_EDGE = 4  # the largest size of a small parameter in each dimension
WHOLE_EDGE = sys.maxsize  # the same for whole parameters
FEW = 8  # a group of at most this many parameters keeps all; a larger one keeps one of each kind
SMALL_TENSOR = 4096  # elements; such a tensor is copied whole, unless it has a parameter's shape
MOST_OBJECTS = 20_000  # an optimizer that holds more, perhaps a whole model, is not copied
Position = Callable[[int], object]
CONTAINERS = (Mapping, *SEQUENCES, set, frozenset)
SHARED = (  # not copied
    *(types.ModuleType, logging.Logger, logging.Handler),
    *(type(threading.Lock()), type(threading.RLock())),
)


def sampling_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which to draw random values for a tensor."""
    return torch.complex64 if tensor.is_complex() else torch.float32


def copy_small(
    named: NamedOptimizer,
    numbers: torch.Generator,
    edge: int = SMALL_EDGE,
    only: Collection[str] | None = None,
) -> NamedOptimizer:
    """Return a copy of an optimizer with cut parameters, and with all tensors cut like them.

    Args:
        named: the optimizer.
        numbers: draws the values of the parameters.
        edge: the largest size of a parameter in each dimension.
        only: the names of the parameters to copy; all of them by default.

    Raises:
        NotImplementedError: the optimizer holds something that cannot be copied.
    """
    optimizers = list(walk_optimizers(named.optimizer))
    copier = _Copier(numbers, edge)
    for inner in optimizers:
        for group in inner.param_groups:
            copier.copy_parameters(group["params"], named.names, only)
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
        # A tensor of a subclass cannot be cut, so a small parameter begins without its state.
        cut = copier.edge != WHOLE_EDGE and subclasses_in(value)
        if not isinstance(key, Tensor) or (id(key) in copier.twins and not cut):
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

    def copy_parameters(
        self, params: list[Tensor], names: Mapping[int, str], only: Collection[str] | None
    ) -> None:
        """Create parameters for those of a group: for each one, or one for all of a kind."""
        if id(params) in self.memo:
            return
        alike: dict[object, Tensor] = {}
        given = [p for p in params if only is None or names.get(id(p)) in only]
        for p in given:
            separate = len(params) <= FEW or self.edge == WHOLE_EDGE
            kind = (p.ndim, p.dtype, p.requires_grad, p if separate else None)
            if id(p) not in self.memo and kind not in alike:
                self.memo[id(p)] = self.twins[id(p)] = self._draw_parameter(p)
            self.memo.setdefault(id(p), alike.get(kind))
            alike.setdefault(kind, self.memo[id(p)])
        self.memo[id(params)] = list(
            {id(self.memo[id(p)]): self.memo[id(p)] for p in given}.values()
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
    if edge == WHOLE_EDGE and (whole := copy_flattened(tensor)) is not None:
        return whole
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):  # sharded or compressed
        raise NotImplementedError(f"it holds a tensor of the class {type(tensor).__name__}")
    part = tensor[tuple(slice(0, edge) for _ in tensor.shape)]
    return part.detach().clone().requires_grad_(tensor.requires_grad)


def _references_of(item: object) -> list[object]:
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


def _inside(container: Collection[object]) -> list[object]:
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


# --- updates of a copy


@contextlib.contextmanager
def without_side_effects(device: torch.device) -> Iterator[None]:
    """Restore the global generators afterwards, hide warnings, and compile nothing."""
    eager = contextlib.nullcontext()
    if torch_compat.compiler_is_loaded():
        eager = torch.compiler.set_stance("force_eager")
    with isolated(device), warnings.catch_warnings(), eager, torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def begin_training(named: NamedOptimizer) -> None:
    """Switch an optimizer to training, which schedule-free ones require for an update."""
    getattr(named.optimizer, "train", bool)()


def update_copy(named: NamedOptimizer, number: int, position: Position) -> None:
    """Apply an update with random gradients, with the generators positioned as in a run."""
    numbers = torch.Generator().manual_seed(number)
    for p in named.parameters().values():
        p.grad = None
        if p.requires_grad:
            gradient = torch.randn(p.shape, generator=numbers, dtype=sampling_dtype(p))
            p.grad = gradient.to(p.device, p.dtype)
    position(number)
    seed_host(number)
    step: Any = named.optimizer.step
    step(lambda: torch.ones(())) if wants_closure(type(named.optimizer)) else step()


def tensors_of_copy(named: NamedOptimizer, names: Collection[str]) -> dict[str, Tensor]:
    """Return a tensor of each subclass that an optimizer keeps after an update, by its kind.

    Args:
        named: the optimizer, which stays as it is.
        names: the parameters that a copy of it updates. They are whole, because small ones may be
            kept in ordinary tensors.
    """
    named = attrs.evolve(named, optimizer=named.holder)
    device = next(p.device for p in named.parameters().values())
    with without_side_effects(device):
        twin = copy_small(named, torch.Generator().manual_seed(0), WHOLE_EDGE, names)
        begin_training(twin)
        update_copy(twin, 0, torch_seeder(device))
    return subclasses_in(list(twin.optimizer.state.values()))


def subclasses_in(value: object) -> dict[str, Tensor]:
    """Return a tensor of each subclass in a nested value, by its kind."""
    found: dict[str, Tensor] = {}

    def note(leaf: object) -> None:
        kind = flattened_kind(leaf)
        if kind is not None and isinstance(leaf, Tensor):
            found.setdefault(kind, leaf)

    map_leaves(value, note)
    return found
