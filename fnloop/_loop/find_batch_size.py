"""The largest batch that fits into memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import attrs
import torch

from fnloop._backend.memory import is_out_of_memory
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, check_not_stale
from fnloop._core.types import Batch, Output, Step
from fnloop._data.source import batch_size_of
from fnloop._display import checks
from fnloop._loop.evaluate import open_loader
from fnloop._loop.plan import check_step
from fnloop._loop.trials import RATES, REPORTS, train_copy, with_members
from fnloop._step.alternate import AlternateStep
from fnloop._step.pipeline import PipelineStep

__all__ = ["find_batch_size"]

UPDATES = 3  # of a trial: from the second on, the state of the optimizer is there


def find_batch_size(
    step: PipelineStep,
    state: TrainState,
    make_loader: Callable[[int], object],
    *,
    most: int = 8192,
) -> int:
    """Find the largest batch size with which training fits into memory.

    The size is doubled, from 2, until a few updates run out of memory. Then the search continues by
    bisection. Each trial makes three updates of a copy, so the state and all generators stay as
    they are. Any wording of torch's memory errors counts, and MemoryError. Schedules and metrics
    are left out; an average, which needs memory, is not.

    The result is a little too small, because the copy needs memory beside the state. Even so, leave
    some memory free where sizes vary: other batches may be longer. On the CPU, Linux usually ends a
    process that has used up the memory, and raises nothing: give a ``most`` that is safe.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns. With ``accumulate`` the size is that of one
            batch of the window.
        state: the newest state.
        make_loader: ``batch_size -> loader``, the training loader with batches of that size.
        most: the largest size to try.

    Returns:
        The largest size that fits; at most ``most``, and at most the number of samples.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument is not what it should be.
        ValueError: the batches do not grow with the size.
        NotImplementedError: there are several processes, or the model is sharded.
        Exception: the memory error, if one sample does not fit; any other exception of the loss
            function or the loader.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def loss_fn(model, batch):
        ...     if len(batch) > 100:
        ...         raise RuntimeError("CUDA out of memory")
        ...     return toy_loss(model, batch)
        >>> find_batch_size(fl.pipeline()(loss_fn), toy(), lambda size: [torch.ones(size)] * 3)
        100
    """
    __tracebackhide__ = True
    check_step(step, "find_batch_size")
    check_not_stale(state, "find_batch_size")
    meaning = "a function batch_size -> loader"
    checks.function("find_batch_size", "make_loader", make_loader, meaning, 1)
    checks.integer("find_batch_size", "most", most, "the largest size to try")
    if state.backend.world_size > 1:
        raise NotImplementedError(
            "find_batch_size works in one process: a process that runs out of memory would leave "
            "the others waiting. Call it in a script that is started without torchrun"
        )
    trial = _Trial(step, state, make_loader)
    fits, size = 0, min(2, most)
    while trial.fits(size):
        if trial.is_whole:
            return min(size, trial.samples)
        if size == most:
            return most
        fits, size = size, min(2 * size, most)
    if not fits and size > 1 and trial.fits(1):
        fits = 1
    if not fits:
        trial.fits(1, required=True)  # raises
    while size - fits > 1:
        middle = (fits + size) // 2
        fits, size = (middle, size) if trial.fits(middle) else (fits, middle)
    return fits


@attrs.define(repr=False)
class _Trial:
    """Trials of batch sizes, and what the last one has seen.

    Args:
        step, state, make_loader: the arguments of :func:`find_batch_size`.
        samples: the samples of the largest batch.
        is_whole: whether that batch was the whole loader.
    """

    step: PipelineStep
    state: TrainState
    make_loader: Callable[[int], object]
    samples: int = 0
    is_whole: bool = False

    def fits(self, size: int, required: bool = False) -> bool:
        """Return whether a few updates with this batch size fit into memory.

        Raises:
            Exception: any that is not about memory; that too, if the size is ``required`` to fit.
        """
        __tracebackhide__ = True
        try:
            return self._train(size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if required:
                error.add_note("find_batch_size: not even a batch of one sample fits")
                raise
        _free(self.state.backend.device)  # here, where the error holds no tensors any more
        return False

    def _train(self, size: int) -> bool:
        __tracebackhide__ = True
        before, self.samples = self.samples, 0
        loader = self.make_loader(size)
        length = open_loader(loader, self.state).length
        if length == 0:  # with drop_last, the data have fewer samples
            return False
        step = self.step
        if not isinstance(step, AlternateStep):
            step = with_members(step, (*RATES, *REPORTS), [_noted(self)])
        first = self.state.step + self.state.skipped

        def stop(state: TrainState) -> TrainState:  # skipped updates count here
            over = state.step + state.skipped >= first + UPDATES
            return attrs.evolve(state, stop="enough") if over else state

        train_copy(step, self.state, loader, UPDATES, hooks=(stop,))
        self.is_whole = length == 1 and 0 < self.samples < size
        if self.samples and self.samples == before and not self.is_whole:
            raise ValueError(
                f"find_batch_size: make_loader({size}) gave batches of {self.samples} samples, as "
                "many as with another size: pass the size on, as in "
                "lambda size: DataLoader(data, batch_size=size)"
            )
        return True

    def note(self, batches: Sequence[Batch]) -> None:
        """Note the sizes of the batches of an update."""
        self.samples = max(self.samples, *map(batch_size_of, batches))


@middleware("step")
def _noted(trial: _Trial) -> Middleware:
    """Note the sizes of batches."""
    takes_several = max((m.window for m in trial.step.pipeline.middleware), default=1) > 1

    def wrap(step: Step) -> Step:
        def noted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            trial.note(batch if takes_several else (batch,))
            return step(state, batch)

        return noted

    return Middleware("find_batch_size", step=wrap)


def _free(device: torch.device) -> None:
    """Give memory back to the device: what a failed trial has left would count in the next."""
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()
