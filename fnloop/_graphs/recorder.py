"""Record the device's work of an update, and replay it. The only module that knows CUDA graphs."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from fnloop._backend import torch_compat
from fnloop._graphs.guards import CaptureError

__all__ = ["Recorder", "recorder_on"]

T = TypeVar("T")
# Graphs whose capture failed: torch's allocator keeps a pointer to each of them.
_failed: list[torch.cuda.CUDAGraph] = []


class Recorder(Protocol):
    """What runs an update where it can be captured, and captures it."""

    def run(self, update: Callable[[], T], /) -> T:
        """Run an update eagerly, and return its result."""
        ...

    def record(
        self, update: Callable[[Callable[[], None]], T], /
    ) -> tuple[list[Callable[[], None]], T]:
        """Record an update without any effect on the device.

        Args:
            update: it is given a function that ends the current part of the record and begins
                another one.

        Returns:
            Functions that replay the parts in order, and the result of the update.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share memory: what is used between two replays is copied.

    A graph also uses a workspace of cuBLAS. torch keeps one for each stream, and others free it
    (Lightning does at the end of a run). So every graph gets one of its own, in its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = _stream(device), torch.cuda.graph_pool_handle()

    def run(self, update: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return update()
        finally:
            current.wait_stream(self.stream)

    def record(
        self, update: Callable[[Callable[[], None]], T]
    ) -> tuple[list[Callable[[], None]], T]:
        graphs: list[torch.cuda.CUDAGraph] = []
        failed = None
        gc.collect()  # backward would wait for the stream of an autograd graph that is still there
        try:
            # A capture that fails leaves its stream the current one, hence the outer context.
            with torch.cuda.stream(self.stream), contextlib.ExitStack() as capture:

                def begin_part() -> None:
                    capture.close()
                    torch_compat.clear_cublas_workspaces()
                    graphs.append(torch.cuda.CUDAGraph())
                    into: dict[str, Any] = {
                        "pool": self.pool,
                        "stream": self.stream,
                        # Other threads may use CUDA: they pin batches and copy checkpoints.
                        "capture_error_mode": "thread_local",
                    }
                    capture.enter_context(torch.cuda.graph(graphs[-1], **into))

                begin_part()
                try:
                    result = update(begin_part)
                except BaseException as error:
                    failed = error
                    raise
            return [graph.replay for graph in graphs], result
        except BaseException as error:
            _failed.extend(graphs)
            self._end_drawing()
            raise failed or error from None  # the cause, not that the capture was cut short
        finally:
            torch_compat.clear_cublas_workspaces()

    def _end_drawing(self) -> None:
        """Let the device's generator draw again after a capture that failed.

        It was told that a capture had begun, and only a capture that succeeds tells it of the end.
        """
        device = self.stream.device
        # If this fails too, the device is lost, and the error that is raised says so.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self.stream):
            number = torch.zeros((), device=device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                number += 1


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all recorders: memory that a stream has used is cached for it alone."""
    return torch.cuda.Stream(device)


def recorder_on(device: torch.device) -> Recorder:
    """Return the recorder of a device.

    Raises:
        CaptureError: the device has no graphs.
    """
    if device.type != "cuda":
        raise CaptureError(
            f"cuda_graph needs the model on a CUDA device; it is on {device}. Move it there"
        )
    return CudaRecorder(device)
