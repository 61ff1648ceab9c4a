"""Whether an optimizer can be resumed, tried on a tiny copy of it before the first update.

An optimizer may keep what its updates depend on in attributes that no ``state_dict`` mentions, or in objects that cannot be
saved. A user would notice at the first checkpoint, or never. So a copy with tiny parameters is updated a few times, saved and
restored into a second copy, and both are updated further: the bits have to agree. Nothing outside of the copies changes.
If tiny parameters do not work, the trial is made again with whole ones. If those do not work either, a warning says so.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import (
    Owned,
    difference,
    of_torch,
    optimizer_facts,
    optimizer_loader,
    optimizers_in,
    owned_by,
    saves_itself,
)
from fnloop._core.rng import isolated, seed_host, torch_seeder
from fnloop._core.state import TrainState
from fnloop._display.log import log
from fnloop._step.update import wants_closure

__all__ = ["check_resumable"]

EDGE = 4  # how long the copies' parameters are in each dimension, at most
FULL = sys.maxsize  # the same if they are copied whole
MANY = 4_000_000  # elements: an optimizer of more is not copied with whole parameters
WHOLE = 8  # a group of so many parameters is copied as a whole; of a larger one, one parameter of each kind
SMALL = (
    4096  # a tensor of so many elements is copied as it is, unless it has the shape of a parameter
)
LARGE = 20_000  # objects: an optimizer that holds more, a whole model perhaps, is not copied
BEFORE, AFTER, LONG = (
    3,
    3,
    12,
)  # updates before a save, after a restore, and after one if there is reason for doubt
SHARED = (
    types.ModuleType,
    logging.Logger,
    logging.Handler,
    type(threading.Lock()),
    type(threading.RLock()),
)  # not copied
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_untried: weakref.WeakSet[type] = weakref.WeakSet()  # the classes that a warning has named


def check_resumable(state: TrainState) -> None:
    """Raise if a run with the optimizer of this state could not be resumed bit for bit.

    Where that cannot be found out, a warning names the optimizer and the reason, once for each class.

    Raises:
        CheckpointError: something in the optimizer cannot be saved, or is not restored; the message names it.

    Example:
        >>> from fnloop.testing import toy
        >>> check_resumable(toy())
    """
    optimizer = state.optimizer
    if of_torch(optimizer) and not saves_itself(optimizer):
        return
    owned = owned_by(state)
    if owned.sharded and saves_itself(optimizer):
        optimizer_facts(owned, {})  # raises
    fault, obstacle = _try(owned, state.backend.device)
    if fault:
        raise CheckpointError(
            f"a run with {owned.kind} cannot be resumed bit for bit: {fault}. Give it a state_dict and a load_state_dict with "
            f"all that its updates depend on, as plain data and tensors, or leave out the hook checkpoint"
        )
    if (
        obstacle
        and state.backend.main
        and not of_torch(optimizer)
        and type(optimizer) not in _untried
    ):
        _untried.add(type(optimizer))
        log.warning(
            f"whether a run with {owned.kind} resumes bit for bit could not be tried ({obstacle}): compare a resumed run with "
            f"an uninterrupted one"
        )


def _try(owned: Owned, device: torch.device) -> tuple[str | None, str | None]:
    """Return what goes wrong if an optimizer is saved and restored, and why that could not be found out; None if nothing."""
    obstacle = None
    few = sum(p.numel() for p in _weights(owned).values()) <= MANY
    for edge in (EDGE, FULL) if few else (EDGE,):
        try:
            with _aside(device):
                return _fault(owned, torch_seeder(device), edge), None
        except Exception as error:
            obstacle = " ".join(f"{type(error).__name__}: {error}".split())
    return None, obstacle


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Keep the global generators as they are, say no warnings, and compile nothing."""
    eager = (
        torch.compiler.set_stance("force_eager")
        if torch_compat.compiler_is_loaded()
        else contextlib.nullcontext()
    )
    with isolated(device), warnings.catch_warnings(), eager, torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def _fault(owned: Owned, position: Any, edge: int) -> str | None:
    """Return what goes wrong if an optimizer is saved and restored, or None. It raises where that cannot be found out."""
    numbers = torch.Generator().manual_seed(0)
    one, two = _tiny(owned, numbers, edge), _tiny(owned, numbers, edge)
    getattr(one.optimizer, "train", bool)()  # those that need no schedule want to be told
    for number in range(BEFORE):
        _update(one, number, position)
    try:
        facts, tensors = _saved(one)
    except (TypeError, CheckpointError) as error:
        return str(error)
    for name, p in _weights(two).items():
        p.data.copy_(_weights(one)[name])
    try:
        optimizer_loader(two, facts, tensors, {})()
    except CheckpointError as error:
        return str(error).removeprefix("the checkpoint: ")
    left = list(_attributes_left(one, two))
    for path, was, now in _counts_left(left):
        if not isinstance(was, str):  # a length may be that of a cache, to be filled again
            return f"its attribute {path} is not in its state_dict: it was {was}, and is {now} after a restore"
    last = BEFORE + (LONG if left else AFTER)
    for number in range(BEFORE, last):
        _update(one, number, position)
        try:
            _update(two, number, position)
        except Exception as error:
            return f"an update after a restore raises {type(error).__name__}: {error}"
        if number == last - 2:
            _halve_rates(one)
            _halve_rates(two)
    weights = difference(_weights(one), _weights(two), "weights")
    fault = weights or difference(_saved(one), _saved(two), "state")
    if fault:
        return f"a few updates after a restore, {fault}"
    for path, was, now in _counts_left(_attributes_left(one, two)):
        return f"its attribute {path} is not in its state_dict: it is {was} in an uninterrupted run, and {now} in a resumed one"
    return None


def _weights(owned: Owned) -> dict[str, Tensor]:
    return {name: p for name, (p, _) in owned.parameters().items()}


def _saved(owned: Owned) -> tuple[Any, dict[str, Tensor]]:
    """Return an optimizer as its files hold it."""
    tensors: dict[str, Tensor] = {}
    facts = json.loads(json.dumps(optimizer_facts(owned, tensors)))
    whole = {
        name: t.resolve_conj().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }
    return facts, whole


def _attributes_left(one: Owned, two: Owned) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes that a restore has left as they were, with what they should be and what they are."""
    for before, after in zip(
        optimizers_in(one.optimizer), optimizers_in(two.optimizer), strict=True
    ):
        for name, was in vars(before).items():
            now: Any = getattr(after, name, None)
            if name == "defaults":  # torch adds to them when it loads
                was, now = ({key: held[key] for key in was if key in now} for held in (was, now))
            if name not in ("state", "param_groups") and difference(was, now, name):
                yield name, was, now


def _counts_left(left: Iterable[tuple[str, Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what may be a count, which may matter at a later update: numbers, tensors of one, and lengths that differ.

    Example:
        >>> list(_counts_left([("info", {"k": 3, "seen": [1, 2]}, {"k": 0, "seen": []})]))
        [('info.k', 3, 0), ('info.seen', 'of length 2', 'of length 0')]
    """
    for path, was, now in left:
        both = (was, now)
        if not difference(was, now, path):
            continue
        if all(isinstance(value, Real) and not isinstance(value, bool) for value in both):
            yield path, was, now
        elif all(
            isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool
            for value in both
        ):
            yield path, was.item(), now.item()
        elif all(isinstance(value, CONTAINERS) for value in both):
            if len(was) != len(now):
                yield path, f"of length {len(was)}", f"of length {len(now)}"
            if all(isinstance(value, Mapping) for value in both):
                yield from _counts_left(
                    (f"{path}.{key}", was[key], now[key]) for key in was if key in now
                )
            elif all(isinstance(value, list | tuple | deque) for value in both):
                yield from _counts_left(
                    (f"{path}.{i}", *pair) for i, pair in enumerate(zip(was, now, strict=False))
                )


def _update(owned: Owned, number: int, position: Any) -> None:
    """Make an update with random gradients, and with the generators positioned as in a run."""
    numbers = torch.Generator().manual_seed(number)
    for p in _weights(owned).values():
        p.grad = (
            torch.randn(p.shape, generator=numbers, dtype=_wide(p)).to(p.device, p.dtype)
            if p.requires_grad
            else None
        )
    position(number)
    seed_host(number)
    update: Any = owned.optimizer.step
    update(lambda: torch.ones(())) if wants_closure(type(owned.optimizer)) else update()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex64 if tensor.is_complex() else torch.float32


def _halve_rates(owned: Owned) -> None:
    """Change the learning rates as a schedule does, which must reach the groups that the update reads."""
    for group in owned.optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].mul_(0.5)
        elif isinstance(group.get("lr"), float):
            group["lr"] /= 2


# --- a tiny copy


def _tiny(owned: Owned, numbers: torch.Generator, edge: int = EDGE) -> Owned:
    """Return a copy of an optimizer whose parameters, and all that goes with them, are cut to an edge in each dimension."""
    every, memo = list(optimizers_in(owned.optimizer)), {}
    copied: dict[int, Tensor] = {}
    for inner in every:
        for group in inner.param_groups:
            _copy_parameters(group["params"], memo, copied, numbers, edge)
    shapes = {
        tuple(p.shape) for inner in every for group in inner.param_groups for p in group["params"]
    }
    for inner in every:
        memo[id(inner)] = object.__new__(type(inner))
    seen: set[int] = set()
    classes = {
        cls
        for inner in every
        for cls in type(inner).__mro__
        if not cls.__module__.startswith("torch.")
    }
    methods = [
        f for cls in classes for f in vars(cls).values() if isinstance(f, types.FunctionType)
    ]
    _cut_tensors(methods, memo, seen, set(), 0, edge)
    for inner in every:
        if "state" in vars(inner) and id(inner.state) not in memo:
            memo[id(inner.state)] = state = copy.copy(inner.state)
            state.clear()
            for key, value in inner.state.items():
                if not isinstance(key, Tensor) or id(key) in copied:
                    _cut_tensors(value, memo, seen, set(), 0, edge)
                    state[memo.get(id(key), key)] = copy.deepcopy(value, memo)
    for inner in every:
        for name, value in vars(inner).items():
            if name != "step":  # a schedule's, around the one of the class
                _cut_tensors(value, memo, seen, shapes, SMALL, edge)
                hooks = torch_compat.is_hook_table(name)
                vars(memo[id(inner)])[name] = OrderedDict() if hooks else copy.deepcopy(value, memo)
    twin = memo[id(owned.optimizer)]
    names = {id(memo[p]): owned.names.get(p, "?") for p in copied}
    return Owned(twin, names)


def _copy_parameters(
    params: list[Any],
    memo: dict[int, Any],
    copied: dict[int, Tensor],
    numbers: torch.Generator,
    edge: int,
) -> None:
    """Make parameters for those of a group: one for each if they are few or copied whole, else one for all of a kind."""
    if id(params) in memo:
        return
    alike: dict[Any, Tensor] = {}
    for p in params:
        kind = (
            p.ndim,
            p.dtype,
            p.requires_grad,
            p if len(params) <= WHOLE or edge == FULL else None,
        )
        if id(p) not in memo and kind not in alike:
            value = torch.randn(
                [min(n, edge) for n in p.shape], generator=numbers, dtype=_wide(p)
            ).to(p.device, p.dtype)
            memo[id(p)] = copied[id(p)] = nn.Parameter(value, p.requires_grad)
            memo[id(p)].__dict__.update(
                {k: v for k, v in vars(p).items() if not isinstance(v, Tensor)}
            )
        memo.setdefault(id(p), alike.get(kind))
        alike.setdefault(kind, memo[id(p)])
    memo[id(params)] = list({id(memo[id(p)]): memo[id(p)] for p in params}.values())


def _cut_tensors(
    value: Any,
    memo: dict[int, Any],
    seen: set[int],
    shapes: set[tuple[int, ...]],
    small: int,
    edge: int,
) -> None:
    """Note a copy of each tensor in a value, cut as the parameters are unless it is small, and of what cannot be copied.

    Locks, loggers and modules stay as they are. In the place of a file is one in memory: the trial writes to no other.

    Raises:
        NotImplementedError: there is more than can be copied, or a function that might reach the optimizer itself.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if (
            id(item) in seen
            or id(item) in memo
            or item is None
            or isinstance(item, bool | int | float | str | type)
        ):
            continue
        seen.add(id(item))
        if len(seen) > LARGE:
            raise NotImplementedError(f"it holds more than {LARGE} objects")
        if isinstance(item, Tensor):
            if type(item) not in (Tensor, nn.Parameter, nn.Buffer):  # a share of one, or compressed
                raise NotImplementedError(f"it holds a tensor of the class {type(item).__name__}")
            whole = item.numel() <= small and tuple(item.shape) not in shapes
            part = item if whole else item[tuple(slice(0, edge) for _ in item.shape)]
            memo[id(item)] = part.detach().clone().requires_grad_(item.requires_grad)
        elif isinstance(item, SHARED):
            memo[id(item)] = item
        elif isinstance(item, io.IOBase):
            memo[id(item)] = io.StringIO() if isinstance(item, io.TextIOBase) else io.BytesIO()
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, CONTAINERS):
            waiting += item
        elif isinstance(item, types.FunctionType):
            enclosed = [content for cell in item.__closure__ or () for content in _content(cell)]
            if any(map(_reaches, enclosed)):
                raise NotImplementedError(
                    f"its function {item.__name__} keeps tensors, or might, in variables around it"
                )
            waiting += [content for content in enclosed if isinstance(content, types.FunctionType)]
        elif not isinstance(item, types.BuiltinFunctionType | types.MethodType) and hasattr(
            item, "__dict__"
        ):
            waiting += vars(item).values()


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


def _reaches(values: Any) -> bool:
    """Return whether there is a tensor, a module or an optimizer in containers, or one that is empty, to be filled."""
    if isinstance(values, CONTAINERS):
        inside = [*values.keys(), *values.values()] if isinstance(values, Mapping) else values
        return (not values and not isinstance(values, tuple | frozenset)) or any(
            map(_reaches, inside)
        )
    return isinstance(values, Tensor | nn.Module | Optimizer)
