"""The loss function compiled with torch.compile."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from fnloop._core.middleware import Middleware, middleware
from fnloop._display import checks

__all__ = ["compiled"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")


@middleware("forward")
def compiled(**options: Any) -> Any:
    """Compile the loss function with ``torch.compile``: once for each step, for training and evaluation.

    What is compiled is the loss function, the module's forward in it included, and nothing else: listing it before or
    behind other middleware makes no difference. It works on any device, and composes with ``cuda_graph``. The module
    itself stays as it is, so a checkpoint loads with and without it.

    torch compiles when the first batch is there, again for evaluation, and once more when the size of a dimension changes:
    then for any size, so that a smaller last batch costs one compilation. ``dynamic=True`` does so at once.

    Args:
        **options: those of ``torch.compile``: mode, dynamic, fullgraph, backend, ...

    Returns:
        A middleware that acts on the loss function of the forward ring.

    Raises:
        TypeError: torch.compile has no such argument, or it is of another type.
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
    known = [
        name
        for name, p in inspect.signature(torch.compile).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(
                f"compiled takes the arguments of torch.compile ({', '.join(known)}); got {name!r}.{hint}"
            )
    _check_options(options)
    if (
        "isolate_recompiles" in known
    ):  # else all steps with one loss function would share torch's limit on recompiling it
        options = {"isolate_recompiles": True, **options}
    return Middleware("compiled", loss_fn=lambda loss_fn: torch.compile(loss_fn, **options))


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise for what torch would find when it compiles, at the first batch."""
    mode, settings = options.get("mode"), options.get("options")
    if mode is not None:
        checks.choice("compiled", "mode", mode, _MODES, ", or None")
    if settings is not None:
        checks.mapping("compiled", "options", settings, 'such as {"triton.cudagraphs": True}')
    if mode is not None and settings is not None:
        raise ValueError(
            f"compiled takes mode or options, not both; got {mode!r} and {checks.described(settings)}"
        )
    for name in ("fullgraph", "disable"):
        if name in options:
            checks.flag("compiled", name, options[name])
    if options.get("dynamic") is not None:
        checks.flag("compiled", "dynamic", options["dynamic"], "or None, which lets torch find out")
    if not callable(backend := options.get("backend", torch.compile)):
        checks.choice(
            "compiled",
            "backend",
            backend,
            torch.compiler.list_backends(exclude_tags=()),
            ", or a function",
        )
