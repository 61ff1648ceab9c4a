"""Where a run is: its counters, its generators, and the position of its loader, as one record."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from fnloop._backend.collectives import gather_shares
from fnloop._core.items import NONE_YET, UNREAD, decode_counted, encode_counted
from fnloop._core.parts import (
    COLLECTED,
    NEWER_FORMAT,
    POSITIONS,
    Load,
    Part,
    Restoring,
    Saving,
    set_fields,
)
from fnloop._core.rng import SEED_BITS, HostGenerators
from fnloop._core.runs import Position, check_position
from fnloop._core.serialize import Json, decode, encode, has_pending
from fnloop._core.state import PLACE, TrainState, count_items, counted_of
from fnloop._display.checks import fields_of
from fnloop._display.screen import log

COUNTS = (*PLACE, "seed")  # those that are one number
COUNTERS = (*COUNTS, "updates")


@attrs.frozen(kw_only=True)
class Cursor:
    """Where a run is: what it counts, and what it draws and reads next.

    A state has these values as fields of its own, because every update changes some of them, and a
    record inside the state would be one more to make. The fields are described in ``TrainState``.
    """

    step: int
    epoch: int
    batch: int
    samples: int
    skipped: int
    seed: int
    updates: Mapping[str, int]
    generators: HostGenerators | None
    position: Position | None

    @classmethod
    def of(cls, state: TrainState) -> Cursor:
        """Return that of a state."""
        return cls(**fields_of(state, [field.name for field in attrs.fields(cls)]))

    @classmethod
    def of_saved(cls, saved: Restoring) -> Cursor:
        """Return that of a checkpoint, for this process.

        Raises:
            TypeError: something cannot be part of one.
        """
        counts, updates = check_counts(saved.facts), saved.facts.get("updates", {})
        names = saved.state.updates
        return cls(
            **counts,  # of an optimizer that had another name, those of all
            updates={k: _check_count(k, updates.get(k, counts["step"])) for k in names},
            generators=_decode_generators(saved),
            position=_decode_position(saved),
        )

    @property
    def place(self) -> list[int]:
        """What orders the checkpoints of a run: updates tried, epochs, batches."""
        return [self.step + self.skipped, self.epoch, self.batch]


def check_counts(facts: Mapping[str, Json]) -> dict[str, int]:
    """Return the saved counters that are one number.

    Raises:
        TypeError: one of them cannot be a counter.
    """
    # No epoch has more batches than 2**40. One that begins after them would train on nothing.
    most = {"seed": SEED_BITS, "batch": 1 << 40}
    return {name: _check_count(name, facts[name], most.get(name, 1 << 62)) for name in COUNTS}


def _check_count(name: str, value: Json, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{name} is {value!r:.60}")
    return value


# --------------------------------------------------------------------------------------------------
# In a checkpoint: the counters are alike in all processes, the rest is of each share of the data.


def _save(saving: Saving) -> dict[str, Json]:
    cursor = Cursor.of(saving.state)
    facts: dict[str, Json] = fields_of(cursor, COUNTS)
    if cursor.updates:
        saving.require(NEWER_FORMAT)
        facts["updates"] = dict(cursor.updates)
    # Those of every process, by rank; None at the beginning of an epoch.
    every = gather_shares(cursor.generators and cursor.generators.to_parts(), COLLECTED)
    facts["generators"] = encode(every if any(every) else None, saving.tensors, "generators")
    facts |= _encode_items(saving.state)
    return facts | _encode_positions(cursor.position, saving.tensors)


def _encode_items(state: TrainState) -> dict[str, Json]:
    """Return the items as facts, unless the running metrics say them. A collective."""
    if state.backend.world_size == 1 and counted_of(state) in (UNREAD, NONE_YET):
        return {}
    return encode_counted(counted_of(count_items(state)))


def _encode_positions(own: Position | None, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the position of the loader as facts; those of all processes if each has its shard.

    A position that is not plain data is left out, with a warning: the run can be resumed all the
    same, by reading the loader again.
    """
    every = gather_shares(own, COLLECTED)
    if None in every:
        return {}
    if own is not None and own["shards"] == 1:
        every = every[:1]
    added: dict[str, Tensor] = {}
    try:
        encoded = encode(every, added, POSITIONS)
        if has_pending(decode(encoded, added)):
            raise TypeError(f"{POSITIONS} holds an object")
    except (TypeError, RecursionError) as error:
        log.warning(
            "save: the position of the training loader is left out, and a run that is resumed here "
            "reads the epoch again up to it: what state_dict() returns must be plain data (%s)",
            error,
        )
        return {}
    tensors.update(added)
    return {POSITIONS: encoded}


def _decode_generators(saved: Restoring) -> HostGenerators | None:
    every = decode(saved.facts["generators"], saved.tensors) or ()
    every = [own and HostGenerators.from_parts(own).checked() for own in every]
    rank, processes = saved.state.backend.data_rank, saved.state.backend.data_size
    # Of another number of processes, the main one continues its stream, and the others begin new.
    return every[rank] if every and (rank == 0 or len(every) == processes) else None


def _decode_position(saved: Restoring) -> Position | None:
    """Return the position of this process's loader, or None if it is not known."""
    backend, positions = saved.state.backend, saved.facts.get(POSITIONS, [])
    every = [check_position(own) for own in decode(positions, saved.tensors)]
    if not every or every[0]["shards"] not in (1, backend.data_size):
        return None
    return every[min(backend.data_rank, len(every) - 1)]


def _prepare(saved: Restoring) -> Load:
    fields = attrs.asdict(Cursor.of_saved(saved), recurse=False)
    return set_fields(**fields, counted=decode_counted(saved.facts.get("items")))


CURSOR = Part("counters", _save, _prepare, of="counters")
