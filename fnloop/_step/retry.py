"""Forward and backward that are repeated with smaller pieces when there is no memory left."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fnloop._backend.memory import is_out_of_memory
from fnloop._core.copies import with_slot
from fnloop._core.rng import mark_generators
from fnloop._core.state import TrainState, all_parameters
from fnloop._core.types import Batch, Output
from fnloop._display.log import log
from fnloop._step.backward import Backward
from fnloop._step.engine import engine_of
from fnloop._step.gradients import restore_gradients, stash_gradients
from fnloop._step.pieces import RETRY, make_gradients, samples_in

__all__ = ["Retrying"]

_ONE_SAMPLE = "retry_on_oom: a single sample does not fit into the memory that is left"


class Retrying(Backward):
    """Backward that begins a window again, with pieces half as large, if it runs out of memory.

    The size of the pieces is in a slot; 0 means whole batches. It is the same in all processes.

    Args:
        backward: what it is instead of. It may take batches in pieces already.
    """

    def __init__(self, backward: Backward) -> None:
        super().__init__(backward.loss)
        self.size = backward.size

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return self._try(state, (batch,), alone=True)

    def accumulate(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return self._try(state, window, alone=False)

    def _try(
        self, state: TrainState, window: Sequence[Batch], *, alone: bool
    ) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        size: int | None = state.slots[RETRY] or self.size
        stashed, repeat = stash_gradients(state), _mark(state)
        while True:
            try:
                new, out = make_gradients(self.loss, state, window, size, alone=alone, guarded=True)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                size = _smaller(state, window, size, error)
            _free(state.backend.device)  # what the error held is free now
            repeat()
            state = with_slot(state, RETRY, size)
        restore_gradients(new, stashed)
        return new, out


def _smaller(state: TrainState, window: Sequence[Batch], size: int | None, error: Exception) -> int:
    """Return half the size of the largest piece in any process.

    Raises:
        Exception: the one given, with a note why pieces cannot be smaller.
    """
    __tracebackhide__ = True
    note = _ONE_SAMPLE
    try:
        samples = max(map(samples_in, window))
    except ValueError as cannot:
        samples, note = 0, f"retry_on_oom cannot repeat this with smaller pieces: {cannot}"
    engine = engine_of(state)
    stuck = engine.any(samples == 0)
    largest = engine.largest(min(samples, size or samples))
    if stuck or largest <= 1:
        error.add_note(note)
        raise error
    half = (largest + 1) // 2
    if state.backend.main:
        log.warning(
            "no memory left for %d samples at once: this update is repeated in pieces of %d, and "
            "later ones begin with them. To begin a run so, list microbatch(%d)",
            *(largest, half, half),
        )
    return half


def _mark(state: TrainState) -> Callable[[], None]:
    """Return a function that restores what forward and backward change, as it is now.

    The gradients must not be there yet.
    """
    restore_generators = mark_generators(state.backend.device)
    repeat_draws = engine_of(state).mark_draws()
    buffers = [*state.model.buffers()]
    with torch.no_grad():
        kept: list[Tensor] = [buffer.detach().clone() for buffer in buffers]

    def restore() -> None:
        for p in all_parameters(state):
            p.grad = None
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        restore_generators()
        repeat_draws()

    return restore


def _free(device: torch.device) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(AttributeError, NotImplementedError):
            torch.get_device_module(device).empty_cache()
