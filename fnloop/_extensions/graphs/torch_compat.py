"""What torch does not document of its operators, and of optimizers within a graph."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop.extend import torch_compat

_optim = sys.modules[Optimizer.__module__]
_switch = torch_compat.found(_optim, "_use_grad_for_differentiable", lambda _: None)
_grad_switch: object = getattr(_switch(lambda: None), "__code__", object())


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return the code of an optimizer's step, for torch.compile, which stops at torch's wrappers.

    It is a copy, as torch limits how often it compiles the same code. It is to be called without
    gradients. Fallback: with the wrappers.

    Raises:
        RuntimeError: hooks are called around it.
    """
    # A scheduler of torch patches it, to note that there was a step.
    noted = getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", False)
    if torch_compat.calls_hooks(optimizer) if noted else torch_compat.has_step_hooks(optimizer):
        raise RuntimeError("hooks are called around the optimizer's step")
    step = cast(types.FunctionType, type(optimizer).step)
    for code in (torch_compat.STEP_WRAPPER, _grad_switch):
        if step.__code__ is code:
            step = vars(step)["__wrapped__"]
    copied = types.FunctionType(
        step.__code__.replace(),
        step.__globals__,
        step.__name__,
        step.__defaults__,
        step.__closure__,
    )
    copied.__kwdefaults__ = step.__kwdefaults__
    return copied


def silence_capturable_warning(optimizer: Optimizer) -> None:
    """Let a capturable optimizer run eagerly without a warning. Fallback: torch warns once."""
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True


clear_cublas_workspaces: Callable[[], object] = torch_compat.found(  # Fallback: see CudaRecorder
    torch._C, "_cuda_clearCublasWorkspaces", lambda: None
)


def _tags_of(func: object) -> Sequence[object]:
    return getattr(func, "tags", ())


def returns_values(func: object) -> bool:
    """Return whether an operator returns what it reads of a tensor. Fallback: see its name."""
    return torch.Tag.data_dependent_output in _tags_of(func) or torch_compat.reads_to_host(func)


def shapes_by_values(func: object, args: Sequence[object]) -> bool:
    """Return whether the shape of what an operator returns depends on values. Fallback: no."""
    if torch.Tag.dynamic_output_shape not in _tags_of(func):
        return False
    masks = torch.bool, torch.uint8
    return str(func) != "aten.index.Tensor" or any(
        isinstance(t, Tensor) and t.dtype in masks for t in cast(Sequence[object], args[1])
    )


def draws(func: object) -> bool:
    """Return whether an operator draws random numbers. Fallback: no."""
    return torch.Tag.nondeterministic_seeded in _tags_of(func)


def is_foreach_norm(func: object) -> bool:
    """Return whether an operator takes the norms of several tensors."""
    return str(func) == "aten._foreach_norm.Scalar"


def begins_constant(func: object) -> bool:
    """Return whether an operator makes a tensor of Python's numbers a part of a computation."""
    return str(func) == "aten.lift_fresh.default"


def writes(func: object) -> bool:
    """Return whether an operator may write to its arguments. Fallback: it may.

    Those of batch norm write to the running statistics, of which their schemas say nothing.
    """
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", True)
    return mutable or "batch_norm" in str(func)


def compile_operators(
    module: torch.fx.GraphModule,
    inputs: list[Tensor],
    backend: object = "inductor",
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph of operators for these inputs, which are the arguments of every call.

    Inductor draws the random numbers of eager code, unless the options say otherwise. Fallback:
    torch.compile, which looks at each argument before each call.
    """
    if callable(backend):
        return cast(Callable[..., Sequence[Tensor]], backend(module, inputs))
    exact = {"fallback_random": True, "size_asserts": False, **(options or {})}
    with contextlib.suppress(ImportError, AttributeError):
        if backend != "inductor":
            from torch._dynamo.backends.registry import lookup_backend

            return lookup_backend(str(backend))(module, inputs)  # type: ignore[return-value]
        import torch._inductor as inductor

        of_mode = inductor.list_mode_options(mode) if mode else {}
        settings = {**of_mode, **exact}
        return inductor.compile(module, inputs, options=settings)  # type: ignore[return-value]
    wanted = None if mode or backend != "inductor" else exact
    return torch.compile(module, backend=backend, dynamic=False, mode=mode, options=wanted)  # type: ignore[arg-type]
