"""Whether an optimizer can be resumed, tried on a tiny copy of it before the first update.

An optimizer may keep what its updates depend on in attributes that no ``state_dict`` mentions, or in objects that cannot be
saved. A user would notice at the first checkpoint, or never. So a copy with tiny parameters is updated a few times, saved and
restored into a second copy, and both are updated further: the bits have to agree. Nothing outside of the copies changes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._files import CheckpointError
from fnloop._optimizer_state import (
    Owned,
    difference,
    of_torch,
    optimizer_facts,
    optimizer_loader,
    optimizers_in,
    owned_by,
    saves_itself,
)
from fnloop._rng import isolated, positioner, seed_host
from fnloop._state import TrainState
from fnloop._steps import wants_closure

__all__ = ["check_resumable"]

EDGE = 4  # how long the copies' parameters are in each dimension, at most
WHOLE = 8  # a group of so many parameters is copied as a whole; of a larger one, one parameter of each kind
SMALL = 4096  # a tensor of so many elements is copied as it is, unless it has the shape of a parameter
LARGE = 20_000  # objects: an optimizer that holds more, a whole model perhaps, is not copied
BEFORE, AFTER, LONG = 3, 3, 12  # updates before a save, after a restore, and after one if there is reason for doubt


def check_resumable(state: TrainState) -> None:
    """Raise if a run with the optimizer of this state could not be resumed bit for bit.

    Where a copy of the optimizer cannot be made, or does not update by itself, nothing is known, and nothing is said.

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
    fault = None
    with contextlib.suppress(Exception), _aside(state.backend.device):
        fault = _fault(owned, positioner(state.backend.device))
    if fault:
        raise CheckpointError(
            f"a run with {owned.kind} cannot be resumed bit for bit: {fault}. Give it a state_dict and a load_state_dict with "
            f"all that its updates depend on, as plain data and tensors, or leave out the hook checkpoint"
        )


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Keep the global generators as they are, say no warnings, and compile nothing."""
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    with isolated(device), warnings.catch_warnings(), eager, torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def _fault(owned: Owned, position: Any) -> str | None:
    """Return what goes wrong if an optimizer is saved and restored, or None. It raises where that cannot be found out."""
    numbers = torch.Generator().manual_seed(0)
    one, two = _tiny(owned, numbers), _tiny(owned, numbers)
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
    for name, was, now in left:
        if isinstance(was, int | float) and isinstance(now, int | float):  # a count, which may matter at a later update
            return f"its attribute {name} is no part of its state_dict: it was {was}, and is {now} after a restore"
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
    return f"a few updates after a restore, {fault}" if fault else None


def _weights(owned: Owned) -> dict[str, Tensor]:
    return {name: p for name, (p, _) in owned.parameters().items()}


def _saved(owned: Owned) -> tuple[Any, dict[str, Tensor]]:
    """Return an optimizer as its files hold it."""
    tensors: dict[str, Tensor] = {}
    facts = json.loads(json.dumps(optimizer_facts(owned, tensors)))
    whole = {name: t.resolve_conj().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return facts, whole


def _attributes_left(one: Owned, two: Owned) -> Iterator[tuple[str, Any, Any]]:
    """Yield the attributes that a restore has left as they were, with what they should be and what they are."""
    for before, after in zip(optimizers_in(one.optimizer), optimizers_in(two.optimizer), strict=True):
        for name, was in vars(before).items():
            now = getattr(after, name, None)
            if name not in ("state", "param_groups", "defaults") and difference(was, now, name):
                yield name, was, now


def _update(owned: Owned, number: int, position: Any) -> None:
    """Make an update with random gradients, and with the generators positioned as in a run."""
    numbers = torch.Generator().manual_seed(number)
    for p in _weights(owned).values():
        p.grad = torch.randn(p.shape, generator=numbers, dtype=_wide(p)).to(p.device, p.dtype) if p.requires_grad else None
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


def _tiny(owned: Owned, numbers: torch.Generator) -> Owned:
    """Return a copy of an optimizer whose parameters, and whatever goes with them, are cut to a few elements."""
    every, memo = list(optimizers_in(owned.optimizer)), {}
    copied: dict[int, Tensor] = {}
    for inner in every:
        for i, group in enumerate(inner.param_groups):
            _copy_parameters(group["params"], i, memo, copied, numbers)
    shapes = {tuple(p.shape) for inner in every for group in inner.param_groups for p in group["params"]}
    for inner in every:
        memo[id(inner)] = object.__new__(type(inner))
    seen: set[int] = set()
    for inner in every:
        if "state" in vars(inner) and id(inner.state) not in memo:
            memo[id(inner.state)] = state = copy.copy(inner.state)
            state.clear()
            for key, value in inner.state.items():
                if not isinstance(key, Tensor) or id(key) in copied:
                    _cut_tensors(value, memo, seen, set(), 0)
                    state[memo.get(id(key), key)] = copy.deepcopy(value, memo)
    for inner in every:
        for name, value in vars(inner).items():
            if name != "step":  # a schedule's, around the one of the class
                _cut_tensors(value, memo, seen, shapes, SMALL)
                hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
                vars(memo[id(inner)])[name] = OrderedDict() if hooks else copy.deepcopy(value, memo)
    twin = memo[id(owned.optimizer)]
    names = {id(memo[p]): owned.names.get(p, "?") for p in copied}
    return Owned(twin, names)


def _copy_parameters(
    params: list[Any], index: int, memo: dict[int, Any], copied: dict[int, Tensor], numbers: torch.Generator
) -> None:
    """Make tiny parameters for those of a group: one for each if they are few, else one for all of a kind."""
    if id(params) in memo:
        return
    alike: dict[Any, Tensor] = {}
    for p in params:
        kind = (p.ndim, p.dtype, p.requires_grad, p if len(params) <= WHOLE else None)
        if id(p) not in memo and kind not in alike:
            value = torch.randn([min(n, EDGE) for n in p.shape], generator=numbers, dtype=_wide(p)).to(p.device, p.dtype)
            memo[id(p)] = copied[id(p)] = nn.Parameter(value, p.requires_grad)
            memo[id(p)].__dict__.update({k: v for k, v in vars(p).items() if not isinstance(v, Tensor)})
        memo.setdefault(id(p), alike.get(kind))
        alike.setdefault(kind, memo[id(p)])
    memo[id(params)] = list({id(memo[id(p)]): memo[id(p)] for p in params}.values())


def _cut_tensors(value: Any, memo: dict[int, Any], seen: set[int], shapes: set[tuple[int, ...]], small: int) -> None:
    """Note a copy of each tensor in a value, cut as the parameters are unless it is small.

    Raises:
        NotImplementedError: there is more than can be copied, or a function that might reach the optimizer itself.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or id(item) in memo or item is None or isinstance(item, bool | int | float | str | type):
            continue
        seen.add(id(item))
        if len(seen) > LARGE:
            raise NotImplementedError
        if isinstance(item, Tensor):
            if type(item) not in (Tensor, nn.Parameter, nn.Buffer):  # a share of one, or compressed
                raise NotImplementedError
            whole = item.numel() <= small and tuple(item.shape) not in shapes
            part = item if whole else item[tuple(slice(0, EDGE) for _ in item.shape)]
            memo[id(item)] = part.detach().clone().requires_grad_(item.requires_grad)
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            waiting += item
        elif isinstance(item, types.FunctionType):
            if item.__closure__ and _reaches([cell.cell_contents for cell in item.__closure__]):
                raise NotImplementedError
        elif not isinstance(item, types.ModuleType | types.BuiltinFunctionType | types.MethodType) and hasattr(
            item, "__dict__"
        ):
            waiting += vars(item).values()


def _reaches(values: Any) -> bool:
    """Return whether there is a tensor, a module or an optimizer in containers."""
    if isinstance(values, Mapping):
        values = [*values.keys(), *values.values()]
    if isinstance(values, list | tuple | set | frozenset | deque):
        return any(map(_reaches, values))
    return isinstance(values, Tensor | nn.Module | Optimizer)
