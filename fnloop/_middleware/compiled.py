"""Compile the loss function, and the optimizer, with ``torch.compile``."""

from __future__ import annotations

import difflib
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.optimizers import optimizers_in, wants_closure
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._graphs.capturable import read_from_tensors
from fnloop._step.update import CLOSURE, CREATE_GRAPH, replace_apply

__all__ = ["compiled"]

Function = TypeVar("Function", bound=Callable[..., object])
OptimizerStep = Callable[[Optimizer], object]
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite")


@middleware("forward")
def compiled(*, update: bool = False, **options: Any) -> Middleware:
    """Compile the loss function of a step with ``torch.compile``, in training and in evaluation.

    The forward of the module that it calls is part of it. The position in the pipeline makes no
    difference. It works on any device, and composes with ``cuda_graph``. The module itself does not
    change, so checkpoints load with and without ``compiled``.

    torch compiles at the first batch, and again for evaluation. When the size of a dimension
    changes, it compiles once more, now for any size; so a smaller last batch costs one compilation.
    ``dynamic=True`` compiles for any size at once.

    Args:
        update: whether to compile the step of the optimizers, too. It pays for an optimizer that
            has no fused form. Learning rates become tensors, whose values change in place, so that
            a schedule compiles nothing again: keep ``float(group["lr"])``. Another optimizer, such
            as that of a snapshot, is compiled again. ``fullgraph`` is for the loss function only.
        **options: the arguments of ``torch.compile``: mode, dynamic, fullgraph, backend, ...

    Returns:
        A middleware of the forward ring, and of the update ring with ``update=True``.

    Raises:
        TypeError: torch.compile has no such argument, or the argument has the wrong type.
        ValueError: torch.compile has no such mode or backend. With ``update=True``, when composing:
            ``closure`` is listed too; at the first update: an optimizer is fused, or evaluates the
            loss itself.

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

    def compile_(function: Function) -> Function:
        return torch.compile(function, **options)  # type: ignore[return-value]

    if not checks.flag("compiled", "update", update, "whether to compile the optimizer's step"):
        return Middleware("compiled", loss_fn=compile_)

    def wrap(step: Step) -> Step:
        own = {name: value for name, value in options.items() if name != "fullgraph"}
        apply = _CompiledSteps(lambda function: torch.compile(function, **own))

        def apply_compiled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with replace_apply(apply):
                return step(state, batch)

        return apply_compiled

    return Middleware(
        "compiled",
        update=wrap,
        loss_fn=compile_,
        check=_check_members,
        check_state=_check_optimizers,
    )


class _CompiledSteps:
    """Applies optimizers by compiled code, for each of them its own.

    Args:
        compile_: what compiles a function.
    """

    def __init__(self, compile_: Callable[[OptimizerStep], OptimizerStep]) -> None:
        self._compile = compile_
        self._steps: weakref.WeakKeyDictionary[Optimizer, OptimizerStep] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, optimizer: Optimizer) -> None:
        __tracebackhide__ = True
        read_from_tensors(optimizer)  # every time, because a restored one has numbers again
        step = self._steps.get(optimizer)
        if step is None:
            # torch limits how often it compiles the code of one function.
            copied = types.FunctionType(_step_of.__code__.replace(), globals(), "step")
            step = self._steps[optimizer] = self._compile(copied)
        step(optimizer)


def _step_of(optimizer: Optimizer) -> object:
    return optimizer.step()


def _check_members(members: Sequence[Middleware]) -> None:
    """Raise if another middleware says how the optimizer is called."""
    for member in members:
        if member.name in (CLOSURE, CREATE_GRAPH):
            raise ValueError(
                f"{member!r} calls the optimizer with a closure, which compiled(update=True) does "
                "not: leave one of them out, or write compiled()"
            )


def _check_optimizers(state: TrainState, members: Sequence[Middleware]) -> None:
    """Raise if torch cannot compile the step of an optimizer."""
    for optimizer in optimizers_in(state.optimizer).values():
        name = type(optimizer).__name__
        if wants_closure(type(optimizer)):
            raise ValueError(
                f"{name} evaluates the loss itself, so compiled(update=True) cannot compile its "
                "step: write compiled()"
            )
        for group in optimizer.param_groups:
            on_host = all(p.device.type == "cpu" for p in group["params"])
            setting = "fused" if group.get("fused") else "foreach" if group.get("foreach") else None
            if setting == "fused" or (setting == "foreach" and on_host):
                raise ValueError(
                    f"compiled(update=True) compiles the step of the optimizer, but torch.compile "
                    f"does not support {name}(..., {setting}=True): leave out {setting}=True, or "
                    "write compiled()"
                )


def _check_names(options: Mapping[str, object], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, ("update", *known), 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(
                f"compiled takes the arguments of torch.compile ({', '.join(known)}), and update; "
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
