"""Faster updates: by torch.compile, and as one CUDA graph."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._core.optimizers import wants_closure
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._extensions.graphs.capture import GraphedStep, read_from_tensors, recorder_on
from fnloop._extensions.graphs.guards import CaptureError
from fnloop._extensions.graphs.operators import WholeStep
from fnloop.extend import Batch, checks, engine_of, host, optimizers

# --------------------------------------------------------------------------------------------------
# Compile the loss function, and the optimizer, with `torch.compile`.

OptimizerStep = Callable[[Optimizer], object]
Function = TypeVar("Function", bound=Callable[..., object])
# With them an update is not one function: they decide on the host what it does.
_APART = "using", "tbptt", "retry_on_oom", "watch", "local_sgd"
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
        update: whether to compile the whole update as one function: forward, backward, gradient
            middleware and optimizers. A small model on the CPU then takes a third of the time.
        **options: the arguments of ``torch.compile``: mode, dynamic, fullgraph, backend, ...

    Returns:
        A middleware of the forward ring, and of the device ring with ``update=True``.

    Raises:
        TypeError: torch.compile has no such argument, or the argument has the wrong type.
        ValueError: torch.compile has no such mode or backend. With ``update=True``, when composing:
            ``closure`` or ``cuda_graph`` is listed too; at the first update: an optimizer is fused,
            or evaluates the loss itself.
        CaptureError: with ``update=True`` and ``fullgraph=True``, an update cannot be one function.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(compiled(backend="eager"), fl.accumulate(2))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.tensor([1.0]), torch.tensor([2.0])], hooks=())
        >>> state.model.w.item()
        -1.5

        The whole update; the first one is eager:

        >>> step = fl.pipeline(compiled(update=True, backend="eager"), fl.clip(4.0))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.tensor([2.0])] * 3, hooks=())
        >>> state.model.w.item()
        -6.0

    Notes:
        With ``update=True`` the numbers are those of eager updates, to rounding: 1e-12 in double
        precision, 1e-4 for Adam and others that count their updates, because compiled code counts
        in single precision. Random draws are the same. A run that is resumed has the same bits.
        The first update of a run is eager, and so is one that creates state of an optimizer. Each
        size of a batch is compiled for itself, whatever ``dynamic`` says, which is for evaluation.
        Beyond 8 sizes the others run apart, and then a resumed run may round differently.

        A changed setting of an optimizer, ``requires_grad`` or a training flag compiles again.
        Learning rates do not: they become tensors that a schedule fills in place, so keep
        ``float(group["lr"])``. Counters, hooks and schedules stay outside. What holds for
        ``cuda_graph`` holds here: Python numbers from closures or globals are constants, the
        tensors in ``Output.aux`` are overwritten by the next update, and inner middleware updates
        its slots in place.

        An update that reads a tensor to the host, or whose shapes depend on values, cannot be one
        function, nor can one of several processes, of ``using``, ``tbptt``, ``retry_on_oom``,
        ``local_sgd`` or ``debug.watch``. Then the loss function and the steps of the optimizers are
        compiled apart, with a warning where that is found only during the run. With
        ``fullgraph=True`` what is found is an error instead. On a GPU it was not tried.

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

    checks.flag("compiled", "update", update, "whether to compile the whole update")
    if not update or options.get("disable"):
        return Middleware("compiled", loss_fn=compile_)
    plain, never_whole = _Plain(), False

    def unless_whole(function: Function) -> Function:
        compiled = compile_(function)

        def chosen(*args: object, **passed: object) -> object:
            __tracebackhide__ = True
            return (function if plain.now else compiled)(*args, **passed)

        return chosen  # type: ignore[return-value]

    def check(members: Sequence[Middleware]) -> None:
        nonlocal never_whole
        never_whole = never_whole or any(member.name in _APART for member in members)
        _check_members(members)

    def wrap(step: Step) -> Step:
        own = {name: value for name, value in options.items() if name != "fullgraph"}
        apply = _CompiledSteps(lambda function: torch.compile(function, **own))
        given = {name: options[name] for name in ("backend", "mode", "options") if name in options}

        def apart(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with host().replaced(apply=apply):
                return step(state, batch)

        def uncompiled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            before, plain.now = plain.now, True
            try:
                return step(state, batch)
            finally:
                plain.now = before

        backend = functools.partial(torch_compat.compile_operators, **given)
        whole = WholeStep(uncompiled, apart, backend, options.get("fullgraph", False))

        def compiled_update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if not host().records:
                return step(state, batch)
            # One function rounds in another way, and exact runs have the same bits everywhere.
            alone = engine_of(state).calls_every_batch and not state.backend.exact
            return (whole if alone and not never_whole else apart)(state, batch)

        return compiled_update

    return Middleware(
        "compiled",
        device=wrap,
        loss_fn=unless_whole,
        check=check,
        check_state=_check_optimizers,
        adds=(),
        traits=("compiles",),
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


class _Plain(threading.local):
    """Whether the loss function is called as it is, in this thread."""

    now = False


def _check_members(members: Sequence[Middleware]) -> None:
    """Raise if another middleware says how the optimizer is called."""
    for member in members:
        if member.name == "cuda_graph":
            raise ValueError(
                f"{member!r} captures the whole update, which compiled(update=True) compiles as "
                "one function: leave cuda_graph out, or write compiled()"
            )
        if "by_closure" in member.traits:
            raise ValueError(
                f"{member!r} calls the optimizer with a closure, which compiled(update=True) does "
                "not: leave one of them out, or write compiled()"
            )


def _check_optimizers(state: TrainState, members: Sequence[Middleware]) -> None:
    """Raise if torch cannot compile the step of an optimizer."""
    for optimizer in optimizers(state, used=True).values():
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
            raise TypeError(
                f"compiled takes the arguments of torch.compile ({', '.join(known)}), and update; "
                f"got {name!r}{checks.suggestion(name, ('update', *known))}"
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


# --------------------------------------------------------------------------------------------------
# Capture a whole update, from the forward to the optimizer's step, as one CUDA graph.

_ADVICE = "To run such a step eagerly, write cuda_graph(fallback=True), or leave cuda_graph out"
_GRAPH_MODES = (
    "reduce-overhead",
    "max-autotune",
)  # the modes of torch.compile that make CUDA graphs


@middleware("device")
def cuda_graph(warmup: int = 3, *, fallback: bool = False, limit: int = 8) -> Middleware:
    """Capture the update as a CUDA graph and replay it: much faster when launch overhead dominates.

    There is one graph for each kind of window, that is, for its structure, shapes, dtypes and
    length. A smaller last batch has its own. A graph is captured after ``warmup`` updates of its
    kind have run eagerly; these count like all others. It is captured again if an assumption
    changes: a setting of the optimizer, ``requires_grad``, or a training flag.

    Args:
        warmup: eager updates before a capture, at least 1.
        fallback: whether a step that cannot be captured runs eagerly, with one warning, instead of
            raising.
        limit: the number of graphs that are kept, at least 1; the least recently used one is
            dropped first.

    Returns:
        A middleware of the device ring.

    Raises:
        TypeError: fallback is not a bool.
        ValueError: warmup or limit is below 1. When composing: ``compiled`` makes graphs of its
            own, or something is listed that cannot be captured, such as ``sam`` or ``tbptt``.
        CaptureError: at the first window: there is no CUDA device. At a capture: a value is read to
            the host or changed on it; the message names it.

    Example:
        >>> import fnloop as fl
        >>> fl.pipeline(fl.amp("bf16"), fl.accumulate(4), fl.clip(1.0), cuda_graph())
        pipeline(amp('bf16'), accumulate(4), clip(1.0), cuda_graph())

    Notes:
        Counters, hooks, ``schedule`` and ``torch_scheduler`` stay outside, because they change with
        every update. With ``amp("fp16")`` the graph has two parts, and between them the host reads
        whether a gradient overflowed, as it does without graphs.

        When a run starts, the optimizer is made capturable: its learning rate and its state become
        tensors on the device, and SGD becomes fused, because only then can it read such a rate.
        Checkpoints do not depend on this. The tensors in ``Output.aux`` are overwritten by the next
        update; loss and metrics are not. Inner middleware must update its slots in place. Python
        numbers captured from closures or globals are baked into the graph: use a tensor instead, or
        an attribute of a module, which is watched.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    checks.integer("cuda_graph", "warmup", warmup, "the eager updates before a capture")
    checks.integer("cuda_graph", "limit", limit, "the graphs that are kept")
    meaning = "whether a step that cannot be captured runs eagerly"
    checks.flag("cuda_graph", "fallback", fallback, meaning)

    def device(step: Step) -> Step:
        captured, refused = GraphedStep(step, warmup, limit, recorder_on), False

        def graph(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            nonlocal refused
            __tracebackhide__ = True
            if refused or not host().records:
                return step(state, batch)
            try:
                return captured(state, batch)
            except CaptureError as error:
                if not fallback:
                    error.args = (f"{error}. {_ADVICE}",)
                    raise
                warnings.warn(f"cuda_graph runs eagerly: {error}", stacklevel=2)
            refused = True
            captured.release()
            gc.collect()  # of the failed capture: autograd would wait for the stream of its nodes
            return step(state, batch)

        return graph

    return Middleware("cuda_graph", device=device, check=_check_members_of_graph, adds=())


# What a graph cannot replay, by the name of the middleware.
_ALIKE = "{graph!r} cannot capture an optimizer that evaluates the loss by itself: leave one out"
_NOT_CAPTURED = {
    "closure": _ALIKE,
    "closure(create_graph)": _ALIKE,
    "retry_on_oom": (
        "{graph!r} cannot capture retry_on_oom, which may repeat an update. Find the size without "
        "cuda_graph, in state.slots['retry_on_oom'], then list microbatch(size)"
    ),
    "sam": "{graph!r} cannot capture sam, which repeats the random draws of a pass: leave one out",
    "tbptt": (
        "{graph!r} replays an update with the tensors that it was captured with, but tbptt gives "
        "each update a new carry. Leave one out"
    ),
    "using": (
        "{graph!r} counts an update for every optimizer, and using lets some rest: leave one of "
        "them out"
    ),
    "watch": (
        "watch looks at some updates only, but {graph!r} replays each as it was captured: leave "
        "one out"
    ),
}


def _check_members_of_graph(members: Sequence[Middleware]) -> None:
    """Raise if a middleware cannot be captured, or makes CUDA graphs of its own."""
    for member in members:
        if member.name in _NOT_CAPTURED:
            graph = next(each for each in members if each.name == "cuda_graph")
            raise ValueError(_NOT_CAPTURED[member.name].format(graph=graph))
        if member.name == "compiled" and _makes_graphs(member):
            raise ValueError(
                f"{member!r} makes CUDA graphs of its own, inside the graph of cuda_graph: write "
                'compiled(mode="max-autotune-no-cudagraphs") or compiled(), or leave cuda_graph out'
            )


def _makes_graphs(compiled: Middleware) -> bool:
    given = compiled.call.kwargs if compiled.call else {}
    options = given.get("options") or {}
    return given.get("mode") in _GRAPH_MODES or bool(options.get("triton.cudagraphs"))
