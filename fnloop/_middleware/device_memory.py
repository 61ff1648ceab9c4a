"""How much memory a run takes."""

from __future__ import annotations

import functools
import sys

import torch

from fnloop._core.elapsed import Peak
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._step.update import report

__all__ = ["device_memory"]

NAME, GIB = "memory/peak_gib", 1 << 30


@middleware("step")
def device_memory() -> Middleware:
    """Report the largest memory that was in use, in GiB: "memory/peak_gib".

    On a GPU it is the peak of torch's allocations since the record before, with the evaluation that
    the record made. Every record resets the peak that torch keeps
    (``torch.cuda.max_memory_allocated``). On the CPU it is the peak of the resident memory of the
    process, which cannot be reset. Nothing waits for the device. With several processes it is the
    largest of all.

    Returns:
        A middleware of the step ring.

    Raises:
        RuntimeError: at the first update: the model is on the CPU of a system that does not tell.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(device_memory())(toy_loss)
        >>> state = fl.fit(step, toy(), [torch.ones(1)] * 3, hooks=())
        >>> 0 < state.history.latest("train/memory/peak_gib") < 100
        True
    """

    def wrap(step: Step) -> Step:
        def measured(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            device = state.backend.device
            if state.run is not None and state.run.stopwatch.recorded:
                state.run.stopwatch.recorded = False
                running: object = state.metrics.get(NAME)
                if isinstance(running, Peak):
                    running.compute()  # keeps the peak until now
                _reset(device)
            new, out = step(state, batch)
            return new, report(out, {NAME: Peak(_gauge(device))}, "device_memory")

        return measured

    return Middleware("device_memory", step=wrap)


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@functools.cache
def _gauge(device: torch.device) -> functools.partial[float]:
    return functools.partial(_peak_gib, device)


def _peak_gib(device: torch.device) -> float:
    """Return the peak in GiB; neither of them waits for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError as error:
        raise RuntimeError(
            "device_memory: this system does not tell the memory of a process: leave it out"
        ) from error
    unit = 1 if sys.platform == "darwin" else 1024  # bytes or KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
