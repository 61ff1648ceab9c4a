"""The hooks of a run: each by itself, and those that would get in each other's way."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from fnloop._checkpoint.format import PARTS
from fnloop._core.call import name_of
from fnloop._core.middleware import Middleware
from fnloop._display import checks
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.moments import ConditionalHook, show_call
from fnloop._hooks.requeue import requeue
from fnloop._hooks.restore_best import restore_best
from fnloop._hooks.triggers import once
from fnloop._hooks.wrapper import Hook, as_hook, layers, unwrap_hook

__all__ = ["check_together", "read_hooks"]


def read_hooks(hooks: object) -> tuple[Hook, ...]:
    """Return the argument ``hooks`` of ``fit`` as a tuple, each of them checked.

    Raises:
        TypeError: it is not a sequence of hooks.
    """
    if callable(hooks) or isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        raise TypeError(
            "fit expects hooks as a tuple, such as hooks=(progress(), early_stop(...)); got "
            f"{checks.describe(hooks)}"
        )
    for hook in hooks:
        _check_hook(hook)
        for layer in layers(hook):
            begin = as_hook(layer).begin
            checks.function(name_of(layer), "begin", begin, "a method (state) -> state", 1)
    return tuple(map(as_hook, hooks))


def check_together(hooks: Sequence[Hook]) -> None:
    """Raise ValueError for hooks that cannot work together, or where they are called."""
    every_layer = [layer for hook in hooks for layer in layers(hook)]
    _check_slots([hook.slot for hook in every_layer if isinstance(hook, once)])
    _check_folders([hook.folder for hook in every_layer if isinstance(hook, checkpoint)])
    _check_saved_first([*map(unwrap_hook, hooks)])
    _check_only_one([hook for hook in every_layer if isinstance(hook, restore_best)])
    for hook in hooks:
        _check_inspected(hook)


def _check_hook(hook: object) -> None:
    if isinstance(hook, type | torch.nn.Module) or not callable(hook):
        hint = f". Call it: {hook.__name__}(...)" if isinstance(hook, type) else ""
        if hasattr(hook, "begin") and not hint:
            hint = ", which has a method begin, but no method __call__(state)"
        if isinstance(hook, Middleware):
            hint = f", which is middleware: write pipeline({name_of(hook)})(loss_fn)"
        raise TypeError(f"a hook is a function state -> state; got {name_of(hook)}{hint}")
    if hasattr(hook, "due") and not isinstance(hook, ConditionalHook):
        raise TypeError(f"{hook!r} says when, but not what: write {show_call(hook, 'hook')}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(hook)
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"a hook takes the state and nothing else, but {name_of(hook)} takes {signature}"
            ) from error


def _check_slots(slots: Sequence[str]) -> None:
    for slot in slots:
        if slots.count(slot) > 1:
            raise ValueError(
                f"two hooks would be remembered as {slot!r}, and one of them would never run: "
                "once(hook, name=...)"
            )


def _check_folders(folders: Iterable[Path]) -> None:
    seen = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            raise ValueError(
                f"two checkpoint hooks share {folder}, and would remove each other's: give "
                "each its own folder"
            )
        seen.add(place)


def _check_only_one(hooks: Sequence[restore_best]) -> None:
    if len(hooks) > 1:
        raise ValueError(
            f"{hooks[0]!r} and {hooks[1]!r}: a run ends with one set of weights. Leave one out"
        )


def _check_saved_first(hooks: Sequence[Hook]) -> None:
    """Raise if a hook requeues a job that no hook before it saves completely."""
    for n, hook in enumerate(hooks):
        saving = (other for other in hooks[:n] if isinstance(other, checkpoint))
        if isinstance(hook, requeue) and not any(other.parts == PARTS for other in saving):
            raise ValueError(
                "requeue() saves nothing by itself, so each job would start from zero: list "
                "checkpoint(folder) before it, of all parts"
            )


def _check_inspected(hook: Hook) -> None:
    """Raise if a hook has its one call at the first update, but works only after an evaluation."""
    inner = unwrap_hook(hook)
    if not inner.wants_outputs:
        return
    for layer in layers(hook):
        if isinstance(layer, ConditionalHook):
            return
        if isinstance(layer, once):
            raise ValueError(
                f"{layer!r} would have its one call at the first update, where nothing is "
                f"evaluated: write every(epochs=1)({layer!r})"
            )
