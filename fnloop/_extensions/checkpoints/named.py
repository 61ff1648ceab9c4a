"""Optimizers as checkpoints see them: the names of their parameters, and copies of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import types
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.fsdp import is_sharded
from fnloop._core.state import TrainState, unwrap
from fnloop._extensions.checkpoints.serialize import flattened_kind
from fnloop._extensions.checkpoints.torch_compat import (
    compiler_is_loaded,
    has_state_dict_hooks,
    is_hook_table,
    local_optimizer,
)
from fnloop.extend import checks, containers, isolated, optimizers, rng, torch_compat, wants_closure

# --------------------------------------------------------------------------------------------------
# Optimizers as checkpoints see them: the names of their parameters, and how their state is kept.
#
# There are two ways to save an optimizer:
#
# * By name: the settings of its groups, and the state of each parameter under the name of the
#   parameter. This is for optimizers that keep everything in `state` and `param_groups`, as those
#   of torch do.
# * By its own `state_dict`, for optimizers that override `state_dict` or `load_state_dict`. What
#   such an optimizer reports after loading must equal what was saved, bit for bit.
#
# Neither shows whether its updates depend on anything else: see `check_resumable`.

Group = dict[str, Any]  # a parameter group of an optimizer
EXECUTION = ("foreach", "fused", "capturable")  # how to compute, which does not change the result
UNSAVED = ("params", "param_names", *EXECUTION)


@attrs.frozen(eq=False)
class NamedOptimizer:
    """An optimizer, and the names of its parameters.

    Args:
        optimizer: the optimizer.
        names: id to name, of every parameter in its groups. A parameter that the model does not
            have is named by its position in the groups.
        foreign: the names of the parameters that the model does not have.
        sharded: whether the parameters are sharded over processes.
        own: each parameter of the model by name.
        holder: the optimizer that keeps the state: itself, or that in a ZeroRedundancyOptimizer.
        has_own_state_dict: whether it must be saved by its own state_dict.
    """

    optimizer: Optimizer
    names: Mapping[int, str]
    foreign: frozenset[str] = frozenset()
    sharded: bool = False
    own: Mapping[str, Tensor] = attrs.field(factory=dict)
    holder: Optimizer = attrs.field(
        init=False,
        default=attrs.Factory(lambda self: local_optimizer(self.optimizer), takes_self=True),
    )
    has_own_state_dict: bool = attrs.field(
        init=False,
        default=attrs.Factory(lambda self: has_own_state_dict(self.holder), takes_self=True),
    )

    @classmethod
    def of_state(cls, state: TrainState) -> dict[str, NamedOptimizer]:
        """Return the optimizers of a state with the names of their parameters.

        They are by name; one that is alone has the name "".
        """
        model, sharded = unwrap(state), is_sharded(state.model)
        own = {torch_compat.strip_compile_prefix(name): p for name, p in model.named_parameters()}
        return {name: cls._of(one, own, sharded) for name, one in optimizers(state).items()}

    @classmethod
    def _of(cls, optimizer: Optimizer, own: Mapping[str, Tensor], sharded: bool) -> NamedOptimizer:
        names, foreign = {id(p): name for name, p in own.items()}, set()
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) not in names:
                    names[id(p)] = f"param_groups.{i}.{j}"
                    foreign.add(names[id(p)])
        return cls(optimizer, names, frozenset(foreign), sharded, own)

    @property
    def class_name(self) -> str:
        """The name of the class of the optimizer that keeps the state."""
        return type(self.holder).__name__

    @property
    def is_torch(self) -> bool:
        """Whether the optimizer that keeps the state is one of torch's own."""
        return type(self.holder).__module__.startswith("torch.optim")

    def train(self) -> None:
        """Switch to the mode of training, if the optimizer has modes."""
        if checks.has_methods(type(self.optimizer), "train", "eval"):
            self.optimizer.train()  # type: ignore[attr-defined]

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        groups = self.optimizer.param_groups
        return [[self.names[id(p)] for p in group["params"]] for group in groups]

    def parameters(self) -> dict[str, Tensor]:
        """Return each parameter by name."""
        return {name: p for name, (p, _) in self.parameters_with_groups().items()}

    def parameters_with_groups(self) -> dict[str, tuple[Tensor, Group]]:
        """Return each parameter by name, with its group."""
        groups = self.optimizer.param_groups
        return {self.names[id(p)]: (p, group) for group in groups for p in group["params"]}


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether an optimizer must be saved by its own state_dict."""
    cls = type(optimizer)
    return (
        cls.state_dict is not Optimizer.state_dict
        or cls.load_state_dict is not Optimizer.load_state_dict
        or "state" not in vars(optimizer)  # a property: state_dict may know more than it shows
        or has_state_dict_hooks(optimizer)
    )


def is_list_of_groups(key: object, value: object) -> bool:
    """Return whether an entry of a state_dict is a list of parameter groups."""
    return (
        key == "param_groups"
        and isinstance(value, list)
        and all(isinstance(group, Mapping) and "params" in group for group in value)
    )


def walk_optimizers(value: object, seen: set[int] | None = None) -> Iterator[Optimizer]:
    """Yield an optimizer and those inside it, the outermost first.

    Example:
        >>> inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> inner.another = {"other": torch.optim.Adam(inner.param_groups[0]["params"])}
        >>> [type(optimizer).__name__ for optimizer in walk_optimizers(inner)]
        ['SGD', 'Adam']
    """
    seen = set() if seen is None else seen
    if isinstance(value, Optimizer) and id(value) not in seen:
        seen.add(id(value))
        yield value
        attributes = vars(value).items()
        inside = [part for name, part in attributes if name not in ("state", "param_groups")]
    else:
        inside = [part for _, part in containers.parts_of(value) or ()]
    for part in inside:
        yield from walk_optimizers(part, seen)


# --------------------------------------------------------------------------------------------------
# Copies of an optimizer, and updates of them: a checkpoint is tried on these.


@contextlib.contextmanager
def without_side_effects(device: torch.device) -> Iterator[None]:
    """Restore the global generators afterwards, hide warnings, and compile nothing."""
    eager = contextlib.nullcontext()
    if compiler_is_loaded():
        eager = torch.compiler.set_stance("force_eager")
    with isolated(device), warnings.catch_warnings(), eager, torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


def update(named: NamedOptimizer, number: int, device: torch.device) -> None:
    """Apply an update with random gradients, with the generators positioned as in a run."""
    numbers = torch.Generator().manual_seed(number)
    for p in named.parameters().values():
        p.grad = _draw(p, list(p.shape), numbers) if p.requires_grad else None
    rng.torch_seeder(device)(number)
    rng.seed_host(number)
    step: Any = named.optimizer.step
    step(lambda: torch.ones(())) if wants_closure(type(named.optimizer)) else step()


def _draw(like: Tensor, shape: list[int], numbers: torch.Generator) -> Tensor:
    dtype = torch.complex64 if like.is_complex() else torch.float32
    return torch.randn(shape, generator=numbers, dtype=dtype).to(like.device, like.dtype)


def tensors_of_copy(named: NamedOptimizer, names: Collection[str]) -> dict[str, Tensor]:
    """Return a tensor of each subclass that an optimizer keeps after an update, by its kind.

    Args:
        named: the optimizer, which stays as it is.
        names: the parameters that a copy of it updates. They are whole, because the state of small
            ones may be in ordinary tensors.
    """
    named = attrs.evolve(named, optimizer=named.holder)
    device = next(p.device for p in named.parameters().values())
    with without_side_effects(device):
        twin = copy_optimizer(named, names)
        twin.train()
        update(twin, 0, device)
    leaves: list[Tensor] = []
    containers.map_leaves(list(twin.optimizer.state.values()), leaves.append)
    return {kind: leaf for leaf in leaves if (kind := flattened_kind(leaf)) is not None}


# --- copies


def copy_optimizer(
    named: NamedOptimizer, only: Collection[str] | None = None, edge: int = sys.maxsize
) -> NamedOptimizer:
    """Return a copy of an optimizer and of all that it holds, with random parameters.

    Args:
        named: the optimizer.
        only: the names of the parameters to copy; all of them by default.
        edge: the largest size of a parameter in each dimension. Tensors of the state are cut too.

    Raises:
        NotImplementedError: a function in it might reach the optimizer itself.
    """
    optimizers, numbers = [*walk_optimizers(named.optimizer)], torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    for params in [group["params"] for inner in optimizers for group in inner.param_groups]:
        for p in params:
            if id(p) not in memo and (only is None or named.names.get(id(p)) in only):
                value = _draw(p, [min(size, edge) for size in p.shape], numbers)
                twin = memo[id(p)] = nn.Parameter(value, p.requires_grad)
                vars(twin).update({k: v for k, v in vars(p).items() if not isinstance(v, Tensor)})
                names[id(twin)] = named.names.get(id(p), "?")
        memo[id(params)] = [memo[id(p)] for p in params if id(p) in memo]
        # Where something refers to the others, they are not copied either.
        memo |= {id(p): torch.empty(0) for p in params if id(p) not in memo}
    seen = {id(inner) for inner in optimizers}
    for inner in optimizers:  # what attributes of the others may refer to
        memo[id(inner)] = object.__new__(type(inner))
        memo[id(inner.state)] = copy.copy(inner.state)
        memo[id(inner.state)].clear()
        for cls in type(inner).__mro__:
            if not cls.__module__.startswith("torch."):
                _reject_functions({**vars(cls)}, seen)
    for inner in optimizers:
        for p, held in inner.state.items():
            if not isinstance(p, Tensor) or id(memo.get(id(p))) in names:
                containers.map_leaves(held, functools.partial(_copy_tensor, edge=edge, memo=memo))
                memo[id(inner.state)][memo.get(id(p), p)] = copy.deepcopy(held, memo)
        for name, value in vars(inner).items():
            if is_hook_table(name):
                vars(memo[id(inner)])[name] = OrderedDict()
            elif name != "step":  # the method, as a schedule patches it
                _reject_functions(value, seen)
                vars(memo[id(inner)])[name] = copy.deepcopy(value, memo)
    return NamedOptimizer(memo[id(named.optimizer)], names)


def _copy_tensor(leaf: object, edge: int, memo: dict[int, object]) -> None:
    if isinstance(leaf, Tensor) and id(leaf) not in memo:
        # A tensor of a subclass may know neither deepcopy nor slices.
        whole = containers.copy_flattened(leaf)
        part = leaf.detach()[tuple(slice(edge) for _ in leaf.shape)] if whole is None else whole
        memo[id(leaf)] = part.clone() if whole is None else whole


def _reject_functions(value: object, seen: set[int]) -> None:
    """Raise if a function in a value keeps tensors around it, which a copy would share."""
    if id(value) in seen or isinstance(value, type | types.ModuleType | Tensor | logging.Logger):
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # it is empty
                if _may_hold_tensors(cell.cell_contents):
                    raise NotImplementedError(
                        f"its function {value.__name__} keeps tensors, or might, in variables "
                        "around it"
                    )
                if isinstance(cell.cell_contents, types.FunctionType):
                    _reject_functions(cell.cell_contents, seen)
    for _, part in containers.parts_of(value) or containers.attributes_of(value):
        _reject_functions(part, seen)


def _may_hold_tensors(value: object) -> bool:
    parts = containers.parts_of(value)
    if parts is None:
        return isinstance(value, Tensor | nn.Module | Optimizer | set)
    return not isinstance(value, tuple) or any(_may_hold_tensors(part) for _, part in parts)
