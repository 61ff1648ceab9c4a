"""A whole update as one CUDA graph: forward, backward, accumulation, clipping, the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Middleware, Output, Step, middleware
from fnloop._display import checks
from fnloop._graphs.capture import GraphedStep
from fnloop._graphs.guards import CaptureError
from fnloop._graphs.recorder import recorder_on

__all__ = ["cuda_graph"]

_WAY_OUT = "cuda_graph(fallback=True), and such a step runs eagerly; or leave cuda_graph out"
_OWN_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


@middleware("device")
def cuda_graph(warmup: int = 3, *, fallback: bool = False, limit: int = 8) -> Any:
    """Capture the update as a CUDA graph, and replay it: many times faster where Python is what takes the time.

    There is one graph for each kind of window: its structure, shapes, dtypes and length; a smaller last batch has its own.
    It is captured when ``warmup`` updates of that kind have run eagerly, which count like all others. Graphs are made anew
    where what they take for granted has changed: a setting of the optimizer, ``requires_grad``, a training flag.

    What changes from update to update stays outside: counters, hooks, ``schedule`` and ``torch_scheduler``. With
    ``amp("fp16")`` the graph is in two parts, and between them the host reads whether a gradient overflowed, as it does
    without graphs. The optimizer is made capturable when a run starts: its learning rate becomes a tensor on the device, and
    its state goes there (SGD becomes fused, which alone can read one). Checkpoints don't know about it. ``Output.aux`` holds
    tensors that the next update overwrites; loss and metrics are yours to keep. What a middleware inside keeps in
    ``state.slots`` is to be changed in place. A number that a loss function takes from a closure or a global is in the graph
    for good: make it a tensor, or an attribute of a module, which is watched.

    Args:
        warmup: eager updates before a capture, at least 1.
        fallback: whether a step that can't be captured runs eagerly, with one warning, instead of raising.
        limit: how many graphs are held; the one that wasn't used for longest goes.

    Returns:
        A middleware of the device ring.

    Raises:
        TypeError: fallback is not a bool.
        ValueError: warmup or limit is below 1. When composing: ``compiled`` makes graphs of its own.
        CaptureError: at the first window: no CUDA device. Where it is captured: a value is read to the host or changed on it;
            the message names it.

    Example:
        >>> import fnloop as fl
        >>> fl.pipeline(fl.amp("bf16"), fl.accumulate(4), fl.clip(1.0), cuda_graph())
        pipeline(amp('bf16'), accumulate(4), clip(1.0), cuda_graph())

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """
    checks.integer("cuda_graph", "warmup", warmup, "the eager updates before a capture")
    checks.integer("cuda_graph", "limit", limit, "the graphs that are held")
    checks.flag(
        "cuda_graph", "fallback", fallback, "whether a step that cannot be captured runs eagerly"
    )

    def check(members: Sequence[Middleware]) -> None:
        for member in members:
            if member.name == "compiled" and _makes_graphs(member):
                raise ValueError(
                    f"{member!r} makes CUDA graphs of its own, inside the one of cuda_graph: write "
                    f'compiled(mode="max-autotune-no-cudagraphs"), or compiled(), or leave cuda_graph out'
                )

    def device(step: Step) -> Step:
        captured, refused = GraphedStep(step, warmup, limit, recorder_on), False

        def graph(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            nonlocal refused
            __tracebackhide__ = True
            if refused:
                return step(state, batch)
            try:
                return captured(state, batch)
            except CaptureError as error:
                if not fallback:
                    error.args = (f"{error}. Else write {_WAY_OUT}",)
                    raise
                warnings.warn(f"cuda_graph runs eagerly: {error}", stacklevel=2)
            refused = True
            captured.release(state)
            return step(state, batch)

        return graph

    return Middleware("cuda_graph", device=device, check=check)


def _makes_graphs(compiled: Middleware) -> bool:
    given = compiled.call.kwargs if compiled.call else {}
    return given.get("mode") in _OWN_GRAPHS or bool(
        (given.get("options") or {}).get("triton.cudagraphs")
    )
