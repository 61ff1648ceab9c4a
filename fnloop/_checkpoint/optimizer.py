"""Optimizers as checkpoints see them: the names of their parameters, and how their state is kept.

There are two ways to save an optimizer:

* By name: the settings of its groups, and the state of each parameter under the name of the
  parameter. This is for optimizers that keep everything in ``state`` and ``param_groups``, as those
  of torch do.
* By its own ``state_dict``, for optimizers that override ``state_dict`` or ``load_state_dict``.
  What such an optimizer reports after loading must equal what was saved, bit for bit.

Neither shows whether its updates depend on anything else: see the module ``trial``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.containers import parts_of
from fnloop._backend.fsdp import is_sharded
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.optimizers import Group, optimizers_in
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState

__all__ = [
    "UNSAVED",
    "NamedOptimizer",
    "has_own_state_dict",
    "is_list_of_groups",
    "is_torch_optimizer",
    "walk_optimizers",
]

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
    """

    optimizer: Optimizer
    names: Mapping[int, str]
    foreign: frozenset[str] = frozenset()
    sharded: bool = False
    own: Mapping[str, Tensor] = attrs.field(factory=dict)

    @classmethod
    def of_state(cls, state: TrainState) -> dict[str, NamedOptimizer]:
        """Return the optimizers of a state with the names of their parameters.

        They are by name; one that is alone has the name "".
        """
        model, sharded = unwrap(state), is_sharded(state.model)
        own = {strip_compile_prefix(name): p for name, p in model.named_parameters()}
        return {
            name: cls._of(one, own, sharded) for name, one in optimizers_in(state.optimizer).items()
        }

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
    def holder(self) -> Optimizer:
        """The optimizer that keeps the state: itself, or that in a ZeroRedundancyOptimizer."""
        return torch_compat.local_optimizer(self.optimizer)

    @property
    def class_name(self) -> str:
        """The name of the class of the optimizer that keeps the state."""
        return type(self.holder).__name__

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


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, not of a class derived from it."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether an optimizer must be saved by its own state_dict."""
    optimizer = torch_compat.local_optimizer(optimizer)
    cls = type(optimizer)
    return (
        cls.state_dict is not Optimizer.state_dict
        or cls.load_state_dict is not Optimizer.load_state_dict
        or "state" not in vars(optimizer)  # a property: state_dict may know more than it shows
        or torch_compat.has_state_dict_hooks(optimizer)
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
        inside = [part for _, part in parts_of(value) or ()]
    for part in inside:
        yield from walk_optimizers(part, seen)
