"""Which update made the training loss infinite or NaN, without a read from the device in between.

At each boundary it is noted where the loader is, and whether the running loss is finite: a tensor,
which is not read. When the loss is found not to be finite, all of them are read at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from numbers import Integral

import attrs
import torch
from torch import Tensor

from fnloop._backend.collectives import gather_objects
from fnloop._backend.containers import map_leaves
from fnloop._core.metrics import Mean
from fnloop._core.rng import isolated
from fnloop._core.state import TrainState

__all__ = ["KEY", "Trail", "describe_place"]

KEY = "nonfinite"  # state.extra["nonfinite"]


@attrs.frozen
class _Mark:
    """A boundary.

    Args:
        step, epoch, batch, samples: the counters of the state.
        finite: whether the running loss was finite; a tensor if it is not read.
    """

    step: int
    epoch: int
    batch: int
    samples: int
    finite: bool | Tensor = True


class Trail:
    """The boundaries since the loss was last known to be finite, the oldest first."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []

    def begin(self, state: TrainState) -> None:
        """Begin where a run begins."""
        self._marks = []
        self.note(state)

    def note(self, state: TrainState) -> None:
        """Note a boundary."""
        loss: object = state.metrics.get("loss")
        finite: bool | Tensor = True
        if isinstance(loss, Mean):
            total = loss.total
            finite = total.isfinite() if isinstance(total, Tensor) else math.isfinite(total)
        self._marks.append(_mark(state, finite))

    def forget(self) -> None:
        """Forget the boundaries before the newest one: the loss is finite."""
        self._marks = [attrs.evolve(mark, finite=True) for mark in self._marks[-1:]]

    def find(self, state: TrainState) -> dict[str, object] | None:
        """Return where the loss stopped to be finite, and which samples it was of. A collective.

        Args:
            state: the state of the newest boundary.

        Returns:
            The position of the first batch of the update, ``state.step`` after it, and the indices
            of the samples of each of its batches; None if it was before the first mark.
        """
        device = state.backend.device
        every = [torch.as_tensor(mark.finite, device=device) for mark in self._marks]
        flags = torch.stack(every).tolist() if every else []
        known = [i for i, finite in enumerate(flags) if not finite]
        place = min(gather_objects(known[0] if known else len(flags), "the hook halt_on_nonfinite"))
        if not 0 < place < len(flags):
            return None
        before, after = self._marks[place - 1 : place + 1]
        found = {"epoch": before.epoch, "batch": before.batch, "step": after.step}
        return {**found, "indices": _indices(state, before, after)}


def _mark(state: TrainState, finite: bool | Tensor) -> _Mark:
    return _Mark(state.step, state.epoch, state.batch, state.samples, finite)


def _indices(state: TrainState, before: _Mark, after: _Mark) -> list[object] | None:
    """Return the indices of the samples of the batches between two marks, if they are known."""
    run = state.run
    if run is None:
        return None
    batches = after.batch - before.batch
    if after.epoch != before.epoch or batches <= 0:  # at its end; or a hook went back since
        batches = run.window
    rounds = -(-batches // state.backend.data_size)
    with isolated(state.backend.device):
        own = run.indices_at(before.epoch, before.batch, before.samples)
        mine = [map_leaves(index, _plain) for index in itertools.islice(own, rounds)]
    every = gather_objects(mine, "the hook halt_on_nonfinite")
    found = [index for round_ in itertools.zip_longest(*every) for index in round_]
    known = [index for index in found if index is not None and index != []]
    return known or None


def _plain(index: object) -> object:
    if isinstance(index, Integral):
        return int(index)
    return index if isinstance(index, float | str) else repr(index)


def describe_place(place: Mapping[str, object]) -> str:
    """Return where the loss stopped to be finite, in words."""
    text = f"at step {place['step']} (epoch {place['epoch']}, batch {place['batch']}"
    if place["indices"] is None:
        return f"{text})"
    names = [str(name) for name in _flat(place["indices"])]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{text}, sample{'s' * (len(names) > 1)} {shown})"


def _flat(index: object) -> list[object]:
    if isinstance(index, Mapping):
        return [f"{name} {i}" for name, part in index.items() for i in _flat(part)]
    if isinstance(index, list | tuple):
        return [i for part in index for i in _flat(part)]
    return [index]
