"""Compile the loss function with ``torch.compile``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fnloop._core.middleware import Middleware, middleware
from fnloop._display import checks

__all__ = ["compiled"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")


@middleware("forward")
def compiled(**options: Any) -> Middleware:
    """Compile the loss function of a step with ``torch.compile``, in training and in evaluation.

    Only the loss function is compiled, including the forward of the module that it calls, so the
    position in the pipeline makes no difference. It works on any device, and composes with
    ``cuda_graph``. The module itself does not change, so checkpoints load with and without
    ``compiled``.

    torch compiles at the first batch, and again for evaluation. When the size of a dimension
    changes, it compiles once more, now for any size; so a smaller last batch costs one compilation.
    ``dynamic=True`` compiles for any size at once.

    Args:
        **options: the arguments of ``torch.compile``: mode, dynamic, fullgraph, backend, ...

    Returns:
        A middleware of the forward ring; it replaces the loss function.

    Raises:
        TypeError: torch.compile has no such argument, or the argument has the wrong type.
        ValueError: torch.compile has no such mode or backend.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(compiled(backend="eager"), fl.accumulate(2))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.tensor([1.0]), torch.tensor([2.0])], hooks=())
        >>> state.model.w.item()
        -1.5

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """
    parameters = inspect.signature(torch.compile).parameters
    known = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    _check_names(options, known)
    _check_options(options)
    # Otherwise all steps with the same loss function would share torch's limit on recompiling it.
    if "isolate_recompiles" in known:
        options = {"isolate_recompiles": True, **options}
    return Middleware("compiled", loss_fn=lambda loss_fn: torch.compile(loss_fn, **options))


def _check_names(options: Mapping[str, object], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(
                f"compiled takes the arguments of torch.compile ({', '.join(known)}); "
                f"got {name!r}.{hint}"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise the errors now that torch would raise when it compiles, at the first batch."""
    mode, settings = options.get("mode"), options.get("options")
    if mode is not None:
        checks.choice("compiled", "mode", mode, _MODES, ", or None")
    if settings is not None:
        checks.mapping("compiled", "options", settings, 'such as {"triton.cudagraphs": True}')
    if mode is not None and settings is not None:
        raise ValueError(
            "compiled takes mode or options, not both; "
            f"got {mode!r} and {checks.describe(settings)}"
        )
    for name in ("fullgraph", "disable"):
        if name in options:
            checks.flag("compiled", name, options[name])
    if options.get("dynamic") is not None:
        checks.flag("compiled", "dynamic", options["dynamic"], "or None, which lets torch decide")
    if "backend" in options and not callable(backend := options["backend"]):
        known = torch.compiler.list_backends(exclude_tags=())
        checks.choice("compiled", "backend", backend, known, ", or a function")
