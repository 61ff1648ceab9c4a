"""Try on a small copy of an optimizer whether it resumes bit for bit."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.collectives import gather_from_all
from fnloop._backend.containers import SEQUENCES, map_leaves, pairs_of
from fnloop._backend.processes import Backend
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import (
    NamedOptimizer,
    SavedOptimizer,
    check_groups,
    encode_optimizer,
    find_difference,
    has_own_state_dict,
    is_torch_optimizer,
    load_all,
    prepare_load,
    walk_optimizers,
)
from fnloop._core.optimizers import wants_closure
from fnloop._core.rng import isolated, seed_host, torch_seeder
from fnloop._core.serialize import Json, copy_flattened, flattened_kind
from fnloop._core.state import TrainState
from fnloop._display.checks import join_names
from fnloop._display.screen import log

# --------------------------------------------------------------------------------------------------
# Try on a small copy of an optimizer whether it resumes bit for bit, before the first update.
#
# An optimizer may keep what its updates depend on in attributes that its `state_dict` does not
# contain, or in objects that cannot be saved. The user would notice at the first checkpoint, or
# never. So a copy with small parameters is updated a few times, saved, and restored into a second
# copy. Both are updated further and must stay bit-identical. Nothing outside of the copies changes.
# Several processes compare what their copies keep, because not all of it can be merged.
#
# If small parameters do not work, the trial is repeated with whole ones. If those do not work
# either, a warning says so.

MANY = 4_000_000  # elements; an optimizer of more is not copied with whole parameters
BEFORE, AFTER = 3, 3  # updates before the save, and after the restore
AFTER_IN_DOUBT = 12  # updates after the restore, if some attributes were not restored
_Kept = tuple[tuple[int, ...], float]  # the shape of a tensor, and its norm
Unrestored = tuple[str, object, object]  # path of an attribute, what it should be, what it is
_warned: weakref.WeakSet[type] = weakref.WeakSet()  # classes that a warning has named


def check_resumable(state: TrainState) -> None:
    """Raise if a run with the optimizers of this state could not be resumed bit for bit.

    With several processes, all of them must call it. If it cannot be tried, a warning names the
    optimizer and the reason, once per class.

    Raises:
        CheckpointError: something in an optimizer cannot be saved, or is not restored; the message
            names it.

    Example:
        >>> from fnloop.testing import toy
        >>> check_resumable(toy())
    """
    if state.backend.world_size > 1:
        check_groups(state)
    for name, named in NamedOptimizer.of_state(state).items():
        _check_resumable(named, f" ({name!r})" if name else "", state.backend)


def _check_resumable(named: NamedOptimizer, label: str, backend: Backend) -> None:
    optimizer = named.holder
    named = attrs.evolve(named, optimizer=optimizer)
    if is_torch_optimizer(optimizer) and not has_own_state_dict(optimizer):
        return
    if named.sharded and has_own_state_dict(optimizer):
        encode_optimizer(named, {})  # raises
    fault, obstacle, kept = _run_trial(named, backend.device)
    if backend.world_size > 1 and (odd := _compare_kept(named, gather_from_all(kept))):
        raise CheckpointError(
            f"a run with {named.class_name}{label} on {backend.world_size} processes cannot be "
            f"resumed bit for bit: {odd}, or leave out the hook checkpoint"
        )
    if fault:
        raise CheckpointError(
            f"a run with {named.class_name}{label} cannot be resumed bit for bit: {fault}. Give it "
            "a state_dict and a load_state_dict with everything that its updates depend on, as "
            "plain data and tensors, or leave out the hook checkpoint"
        )
    warned = is_torch_optimizer(optimizer) or type(optimizer) in _warned
    if obstacle and backend.main and not warned:
        _warned.add(type(optimizer))
        log.warning(
            f"could not try whether a run with {named.class_name}{label} resumes bit for bit "
            f"({obstacle}): compare a resumed run with an uninterrupted one"
        )


def _run_trial(
    named: NamedOptimizer, device: torch.device
) -> tuple[str | None, str | None, dict[str, _Kept] | None]:
    """Return what goes wrong when an optimizer is saved and restored, and why the trial failed.

    Both are None if nothing is wrong. The third is what the copy keeps, if it was tried.
    """
    fault = obstacle = kept = None
    elements = sum(p.numel() for p in named.parameters().values())
    for edge in (SMALL_EDGE, WHOLE_EDGE) if elements <= MANY else (SMALL_EDGE,):
        try:
            with without_side_effects(device):
                kept, fault = _find_fault(named, torch_seeder(device), edge)
            obstacle = None
            break
        except Exception as error:
            obstacle = " ".join(f"{type(error).__name__}: {error}".split())
    if fault is None:
        with contextlib.suppress(Exception), without_side_effects(device):
            fault = _find_fault_at_size(named, torch_seeder(device))
    return fault, obstacle, kept


def _find_fault_at_size(named: NamedOptimizer, position: Position) -> str | None:
    """Return what goes wrong with parameters of the sizes that the real ones have, or None.

    An optimizer may keep large ones in another way, such as in 8 bits. So a copy updates one
    parameter of each large size. What it then keeps in tensors of a subclass is tried further.
    """
    large = {
        (p.shape, p.dtype): name
        for name, p in named.parameters().items()
        if SMALL_TENSOR <= p.numel() <= MANY and p.requires_grad
    }
    kinds: dict[str, str] = {}
    for (shape, _), name in sorted(large.items(), key=lambda each: each[0][0].numel()):
        one = copy_small(named, torch.Generator().manual_seed(0), WHOLE_EDGE, {name})
        begin_training(one)
        update_copy(one, 0, position)
        try:
            encode_optimizer(one, {})
        except (TypeError, CheckpointError) as error:
            return f"with a parameter of shape {tuple(shape)}, {error}"
        for kind in subclasses_in(list(one.optimizer.state.values())):
            kinds.setdefault(kind, name)
    if kinds and named.sharded:
        return f"its state of {kinds.popitem()[1]} is compressed, and the model is sharded"
    return _find_fault(named, position, WHOLE_EDGE, {*kinds.values()})[1] if kinds else None


def _kept_by(named: NamedOptimizer) -> dict[str, _Kept]:
    """Return the tensors that an optimizer keeps, by their names in a checkpoint."""
    tensors: dict[str, Tensor] = {}
    with contextlib.suppress(TypeError, CheckpointError):  # found when it is saved
        encode_optimizer(named, tensors)
    return {
        name: (
            tuple(t.shape),
            float(
                torch.linalg.vector_norm(
                    t.to(torch.complex128 if t.is_complex() else torch.float64)
                )
            ),
        )
        for name, t in tensors.items()
    }


def _compare_kept(named: NamedOptimizer, every: Sequence[Mapping[str, _Kept] | None]) -> str | None:
    """Return what cannot be merged of what the copies in several processes keep, or None.

    They had the same gradients, so what all of them keep must be equal, but for rounding.
    """
    first = every[0]
    for rank, other in enumerate(every):
        if first is None or other is None:  # not tried, which a warning says
            return None
        odd = first.keys() ^ other.keys()
        if odd and (named.sharded or has_own_state_dict(named.optimizer)):
            return (
                f"processes 0 and {rank} keep state under other names ({join_names(sorted(odd))}), "
                "which cannot be merged with a state_dict of its own, or for a sharded model. Keep "
                "it in optimizer.state, by parameter"
            )
        for name in filter(other.__contains__, first):
            (shape, norm), (other_shape, other_norm) = first[name], other[name]
            if shape != other_shape or not (
                math.isclose(norm, other_norm, rel_tol=1e-3) or norm != norm
            ):
                return (
                    f"processes 0 and {rank} each keep another part of the state under the name "
                    f"{name}, and a checkpoint has one of that name. Keep all of it in one process"
                )
    return None


def _find_fault(
    named: NamedOptimizer, position: Position, edge: int, only: Collection[str] | None = None
) -> tuple[dict[str, _Kept], str | None]:
    """Return what an optimizer updates, and what goes wrong when it is saved and restored.

    The latter is None if nothing is wrong. It raises if that cannot be tried.
    """
    numbers = torch.Generator().manual_seed(0)
    one, two = (copy_small(named, numbers, edge, only) for _ in range(2))
    begin_training(one)
    before = _kept_by(one)
    for number in range(BEFORE):
        update_copy(one, number, position)
    # What an update does not change may be a copy of what another process updates.
    kept = {name: t for name, t in _kept_by(one).items() if before.get(name) != t}
    return kept, _find_fault_of(one, two, position)


def _find_fault_of(one: NamedOptimizer, two: NamedOptimizer, position: Position) -> str | None:
    """Return what goes wrong when one copy is saved and restored into the other, or None."""
    if fault := _restore_copy(one, two):
        return fault
    unrestored = list(_unrestored_attributes(one, two))
    for path, was, now in _unrestored_counts(unrestored):
        if not isinstance(was, str):  # a length may be that of a cache, which fills up again
            return (
                f"its attribute {path} is not in its state_dict: "
                f"it was {was}, and is {now} after a restore"
            )
    if fault := _update_both(one, two, position, AFTER_IN_DOUBT if unrestored else AFTER):
        return fault
    fault = find_difference(one.parameters(), two.parameters(), "weights")
    fault = fault or find_difference(_save_copy(one), _save_copy(two), "state")
    if fault:
        return f"a few updates after a restore, {fault}"
    for path, was, now in _unrestored_counts(_unrestored_attributes(one, two)):
        return (
            f"its attribute {path} is not in its state_dict: "
            f"it is {was} in an uninterrupted run, and {now} in a resumed one"
        )
    return None


def _restore_copy(one: NamedOptimizer, two: NamedOptimizer) -> str | None:
    """Save one copy and restore it into the other. Return what goes wrong, or None."""
    try:
        facts, tensors = _save_copy(one)
    except (TypeError, CheckpointError) as error:
        return str(error)
    weights = one.parameters()
    for name, p in two.parameters().items():
        p.data.copy_(weights[name])
    try:
        load_all([prepare_load(two, SavedOptimizer(facts, tensors))])
    except CheckpointError as error:
        return str(error).removeprefix("the checkpoint: ")
    return None


def _save_copy(named: NamedOptimizer) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return an optimizer as the files of a checkpoint would contain it."""
    tensors: dict[str, Tensor] = {}
    facts = json.loads(json.dumps(encode_optimizer(named, tensors)))
    contiguous = {
        name: t.resolve_conj().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }
    return facts, contiguous


def _update_both(
    one: NamedOptimizer, two: NamedOptimizer, position: Position, updates: int
) -> str | None:
    """Apply the same updates to both copies. Return what goes wrong in the second, or None."""
    last = BEFORE + updates
    for number in range(BEFORE, last):
        update_copy(one, number, position)
        try:
            update_copy(two, number, position)
        except Exception as error:
            return f"an update after a restore raises {type(error).__name__}: {error}"
        if number == last - 2:
            _halve_rates(one)
            _halve_rates(two)
    return None


def _halve_rates(named: NamedOptimizer) -> None:
    """Change the learning rates as a schedule does. The change must reach the updates."""
    for group in named.optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].mul_(0.5)
        elif isinstance(group.get("lr"), float):
            group["lr"] /= 2


# --- attributes that are not in a state_dict


def _unrestored_attributes(one: NamedOptimizer, two: NamedOptimizer) -> Iterator[Unrestored]:
    """Yield the attributes that differ after a restore, as they should be and as they are."""
    pairs = zip(walk_optimizers(one.optimizer), walk_optimizers(two.optimizer), strict=True)
    for before, after in pairs:
        for name, was in vars(before).items():
            now: Any = getattr(after, name, None)
            if name == "defaults":  # torch adds entries when it loads
                was, now = ({key: held[key] for key in was if key in now} for held in (was, now))
            if name not in ("state", "param_groups") and find_difference(was, now, name):
                yield name, was, now


def _unrestored_counts(unrestored: Iterable[Unrestored]) -> Iterator[Unrestored]:
    """Yield what may be a count, which may matter at a later update.

    These are numbers, tensors of one number, and lengths that differ.

    Example:
        >>> list(_unrestored_counts([("info", {"k": 3, "seen": [1, 2]}, {"k": 0, "seen": []})]))
        [('info.k', 3, 0), ('info.seen', 'of length 2', 'of length 0')]
    """
    for path, was, now in unrestored:
        if not find_difference(was, now, path):
            continue
        if _is_number(was) and _is_number(now):
            yield path, was, now
        elif isinstance(was, Tensor) and isinstance(now, Tensor):
            if all(t.numel() == 1 and t.dtype is not torch.bool for t in (was, now)):
                yield path, was.item(), now.item()
        elif isinstance(was, CONTAINERS) and isinstance(now, CONTAINERS):
            if len(was) != len(now):
                yield path, f"of length {len(was)}", f"of length {len(now)}"
            pairs = pairs_of(was, now) or ()
            yield from _unrestored_counts((f"{path}.{key}", x, y) for key, x, y in pairs)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# --------------------------------------------------------------------------------------------------
# Copy an optimizer with small parameters, with everything that it holds, and update the copy.

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
