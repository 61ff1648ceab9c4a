"""What torch does not document of modules, to train a stack of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fnloop.extend import torch_compat


def parameters_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own table of parameters, to put other tensors there for a call.

    Raises:
        RuntimeError: torch has no such table.
    """
    own = vars(module).get("_parameters")
    if own is None:
        raise torch_compat.missing("Module._parameters", "to train a stack of models")
    return own


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks are called around a module's forward or backward. Fallback: none."""
    return any(
        held
        for name, held in vars(module).items()
        if name.startswith(("_forward_", "_backward_")) and name.endswith("hooks")
    )


def is_batched(value: object) -> bool:
    """Return whether a tensor stands for one of each model, within ``vmap``. Fallback: it does."""
    asked = getattr(getattr(torch._C, "_functorch", None), "is_batchedtensor", None)
    return isinstance(value, Tensor) and (asked is None or bool(asked(value)))
