"""Copies of a state with other values, and of a model's buffers as they are, to put them back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import local_part
from fnloop._backend.torch_compat import buffers_of, foreach_copy_, version_of
from fnloop._core.events import RECORD
from fnloop._core.history import History
from fnloop._core.state import TrainState
from fnloop._core.types import Metric

__all__ = ["Buffers", "KeptBuffers", "with_record", "with_slot", "with_slots"]


def with_record(state: TrainState, history: History, metrics: Mapping[str, Metric]) -> TrainState:
    """Return the state after a record was appended."""
    new = object.__new__(TrainState)  # attrs.evolve takes ten times as long
    events = state.events | {RECORD}
    vars(new).update(vars(state), history=history, metrics=metrics, events=events)
    return new


def with_slot(state: TrainState, name: str, value: object) -> TrainState:
    """Return the state with another value in a slot."""
    return with_slots(state, {**state.slots, name: value})


def with_slots(state: TrainState, slots: Mapping[str, object]) -> TrainState:
    """Return the state with these slots."""
    return state if slots is state.slots else attrs.evolve(state, slots=slots)


# --- buffers

Table = dict[str, Tensor | None]  # the buffers of a module by name; those of the module itself


class KeptBuffers(NamedTuple):
    """The buffers of a model as they were at some moment.

    Args:
        tables: of each module: its table, what was in it, and the positions of these below.
        tensors: the buffers, each once; of a sharded one the part of this process.
        places: each of them as it was in memory, and
        marks: its shape, its strides and its address there.
        values: of each the part that can be written to: an expanded one has one element for many.
        copies: of the values.
        versions: numbers that have changed where a buffer was written to since.
    """

    tables: Sequence[tuple[Table, Table, Sequence[int]]] = ()
    tensors: Sequence[Tensor] = ()
    places: Sequence[Tensor] = ()
    marks: Sequence[object] = ()
    values: Sequence[Tensor] = ()
    copies: Sequence[Tensor] = ()
    versions: Sequence[int] = ()

    def put_back(self, unseen: bool = False) -> None:
        """Put back what has changed: replaced buffers, their shapes and their values.

        Buffers stay the same tensors at the same addresses, because a CUDA graph reads them there.

        Args:
            unseen: whether any may have changed without a new version, as in a forward in training
                mode or in a replay.
        """
        moved = [
            version_of(tensor) != version or _mark_of(tensor) != mark
            for tensor, mark, version in zip(self.tensors, self.marks, self.versions, strict=True)
        ]
        chosen = {*range(len(moved))} if unseen else set()
        for table, before, positions in self.tables:
            if table.keys() != before.keys() or any(table[k] is not v for k, v in before.items()):
                table.clear()
                table.update(before)
            # torch's batch_norm gives the statistics no new version, but the count beside them.
            if any(moved[i] for i in positions):
                chosen.update(positions)
        with torch.no_grad():
            for i in chosen:
                if _mark_of(tensor := self.tensors[i]) != self.marks[i]:
                    # It was resized, or tensor.data was replaced.
                    tensor.set_(self.places[i])  # type: ignore[arg-type]
                self.values[i].copy_(self.copies[i])


class Buffers:
    """Keeps the buffers of a model, again and again, in the same memory.

    Args:
        model: the model. Modules that are added later are not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [own for module in model.modules() if (own := buffers_of(module))]
        self._kept = KeptBuffers()
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    @torch.no_grad()
    def keep(self) -> KeptBuffers:
        """Copy them as they are now. What was kept before is not valid any more."""
        tables = [(own, dict(own)) for own in self._tables]
        held_by_all = (b for _, held in tables for b in held.values() if b is not None)
        found = {id(b): b for b in held_by_all if _has_values(b)}
        tensors = [local_part(b) for b in found.values()]
        if self._fits(tensors, tables):
            for to, of in self._groups:
                foreach_copy_(to, of)
        else:
            positions = dict(zip(found, range(len(found)), strict=True))
            self._kept = KeptBuffers(
                [
                    (own, held, [positions[id(b)] for b in held.values() if id(b) in positions])
                    for own, held in tables
                ],
                tensors,
                [t.detach() for t in tensors],
                [_mark_of(t) for t in tensors],
                values := [_written(t) for t in tensors],
                copies := [value.clone() for value in values],
            )
            groups = defaultdict[object, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
            for copy, value in zip(copies, values, strict=True):
                to, of = groups[value.device, value.dtype]  # torch copies these in one call
                to.append(copy)
                of.append(value)
            self._groups = [*groups.values()]
        return self._kept._replace(versions=[version_of(t) for t in tensors])

    def _fits(self, tensors: Sequence[Tensor], tables: Sequence[tuple[Table, Table]]) -> bool:
        """Return whether these are the buffers that were kept before, in the same places."""
        known = self._kept
        return (
            len(tensors) == len(known.tensors)
            and all(
                t is before and _mark_of(t) == mark
                for t, before, mark in zip(tensors, known.tensors, known.marks, strict=True)
            )
            and [now.keys() for _, now in tables] == [one[1].keys() for one in known.tables]
        )


def _has_values(buffer: Tensor) -> bool:
    """Return whether a buffer has values already, and can be written to outside inference mode."""
    return not (nn.parameter.is_lazy(buffer) or buffer.is_inference())


def _written(tensor: Tensor) -> Tensor:
    """Return an expanded tensor before it was expanded; torch writes to no other."""
    if tensor.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and not stride:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _mark_of(tensor: Tensor) -> object:
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return tensor.shape
    return tensor.shape, tensor.stride(), tensor.data_ptr()
