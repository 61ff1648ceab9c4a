"""What optimizers and modules do not document, to save and to load them."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer


def is_hook_table(name: str) -> bool:
    """Return whether an attribute of an optimizer holds hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks change what an optimizer saves or loads."""
    for name, held in vars(optimizer).items():
        if "state_dict" in name and held and is_hook_table(name):
            return True
    return False


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in a ZeroRedundancyOptimizer, of this process's parameters.

    It keeps the state. Of any other optimizer, it is the optimizer itself. Fallback: the same.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if type(optimizer) is not getattr(module, "ZeroRedundancyOptimizer", None):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def forget_sizes(optimizer: Optimizer) -> bool:
    """Make LBFGS count its parameters again. Return whether it is one, with one state for all."""
    if not isinstance(optimizer, LBFGS):
        return False
    if "_numel_cache" in vars(optimizer):
        optimizer._numel_cache = None
    return True


def _loads_as_usual(module: object) -> bool:
    own, usual = (getattr(c, "_load_from_state_dict", None) for c in (type(module), nn.Module))
    return own is usual


def loads_by_itself(module: nn.Module) -> bool:
    """Return whether a class loads its tensors in a way of its own, and no hook takes part.

    A hook may change other modules than the one that is loaded. Fallback: no.
    """
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    hooked = any(getattr(m, name, True) for m in module.modules() for name in hooks)
    return not hooked and not _loads_as_usual(module)


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state_dict is that of what ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def loads_other_names(module: nn.Module, name: str) -> bool:
    """Return whether a tensor may be saved under another name, or loaded in another way.

    So it may where a module that it is in loads in a way of its own, or where a hook takes part.
    Fallback: yes.
    """
    inside = module
    for part in (None, *name.split(".")[:-1]):
        inside = inside if part is None else getattr(inside, part, None)
        if not _loads_as_usual(inside) or getattr(inside, "_load_state_dict_pre_hooks", True):
            return True
    return False


def drop_accumulator(leaf: Tensor) -> None:
    """Make the node that adds up the gradients of a leaf again, before the leaf gets another shape.

    A graph or DDP may hold the node. It would sum new gradients to the old shape, without an error.
    """
    other = torch.float32 if leaf.dtype == torch.float64 else torch.float64
    leaf.data = torch.empty(0, dtype=other, device=leaf.device)  # torch makes it for a new dtype


def compiler_is_loaded() -> bool:
    """Return whether torch.compile may have compiled something in this process."""
    return "torch._dynamo" in sys.modules
