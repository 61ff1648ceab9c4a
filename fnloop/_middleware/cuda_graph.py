"""Capture a whole update, from the forward to the optimizer's step, as one CUDA graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._graphs.capture import GraphedStep
from fnloop._graphs.guards import CaptureError
from fnloop._graphs.recorder import recorder_on
from fnloop._step.host import leaves_graphs_out

__all__ = ["cuda_graph"]

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

    Counters, hooks, ``schedule`` and ``torch_scheduler`` stay outside, because they change with
    every update. With ``amp("fp16")`` the graph has two parts, and between them the host reads
    whether a gradient overflowed, as it does without graphs.

    When a run starts, the optimizer is made capturable: its learning rate and its state become
    tensors on the device, and SGD becomes fused, because only then can it read such a rate.
    Checkpoints do not depend on this. The tensors in ``Output.aux`` are overwritten by the next
    update; loss and metrics are not. Inner middleware must update its slots in place. Python
    numbers captured from closures or globals are baked into the graph: use a tensor instead, or an
    attribute of a module, which is watched.

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
            own.
        CaptureError: at the first window: there is no CUDA device. At a capture: a value is read to
            the host or changed on it; the message names it.

    Example:
        >>> import fnloop as fl
        >>> fl.pipeline(fl.amp("bf16"), fl.accumulate(4), fl.clip(1.0), cuda_graph())
        pipeline(amp('bf16'), accumulate(4), clip(1.0), cuda_graph())

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
            if refused or leaves_graphs_out():
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

    return Middleware("cuda_graph", device=device, check=_check_members)


def _check_members(members: Sequence[Middleware]) -> None:
    """Raise if another middleware of the pipeline makes CUDA graphs of its own."""
    for member in members:
        if member.name == "compiled" and _makes_graphs(member):
            raise ValueError(
                f"{member!r} makes CUDA graphs of its own, inside the graph of cuda_graph: write "
                'compiled(mode="max-autotune-no-cudagraphs") or compiled(), or leave cuda_graph out'
            )


def _makes_graphs(compiled: Middleware) -> bool:
    given = compiled.call.kwargs if compiled.call else {}
    options = given.get("options") or {}
    return given.get("mode") in _GRAPH_MODES or bool(options.get("triton.cudagraphs"))
