"""What parts are saved into, and restored from; and parts that nothing has brought yet."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import attrs
from torch import Tensor

from fnloop._core.history import History
from fnloop._core.runs import RunInfo
from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints.files import EncodedHistory
from fnloop._extensions.checkpoints.format import (
    BROUGHT_FORMAT,
    FORMAT,
    NEWER_FORMAT,
    OWN,
    OWN_FORMAT,
    TENSORS,
    gather_encoded,
)
from fnloop._extensions.checkpoints.optimizer import Settings
from fnloop._extensions.checkpoints.serialize import Json, decode, encode, plain_only
from fnloop.extend import Part, Pending

Load = Callable[[TrainState], TrainState]
POSITIONS = "positions"  # a key of the facts, and what the names of their tensors begin with


@attrs.define(eq=False)
class Collecting:
    """What is saved, and the files that the parts put it into: a `Saving`.

    Args:
        state: the state, as it is outside of its run.
        parts: the names of the parts to save.
        run: facts about its run; None outside of one.
        encode_history: encodes the history.
        history: the encoded history.
        groups: name of a file to its tensors, by name.
        local: name to whether this process writes it, for tensors of optimizers that not all
            processes have.
        version: the oldest format that has all that was saved.
        learning: the names of the weights that are trained.
        own_optimizers: whether the optimizers of processes have states of their own.
        brought: the entries of slots that were brought, by their names.
    """

    state: TrainState
    parts: Sequence[str]
    run: RunInfo | None = None
    encode_history: Callable[[History], EncodedHistory] = EncodedHistory.of_all
    history: EncodedHistory = attrs.field(factory=EncodedHistory)
    groups: dict[str, dict[str, Tensor]] = attrs.field(factory=lambda: {k: {} for k in TENSORS})
    local: Mapping[str, bool] = attrs.field(factory=dict)
    version: int = FORMAT
    learning: Collection[str] = ()
    own_optimizers: bool = False
    brought: dict[str, Json] = attrs.field(factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of parts that have no file of their own."""
        return self.groups["slots"]

    def encode(self, value: object, tensors: dict[str, Tensor], path: str) -> Json:
        """Return plain data as JSON, and add its tensors to ``tensors``."""
        return encode(value, tensors, path, plain_only)

    def file(self, name: str) -> dict[str, Tensor]:
        """Return a new file of tensors by their names, which is empty."""
        self.require(NEWER_FORMAT)
        return self.groups.setdefault(name, {})

    def add_own(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Add tensors that this process has of its own; it writes them itself."""
        rank, own = self.state.backend.rank, self.groups.setdefault(OWN, {})
        own.update({f"{rank}/{prefix}{name}": tensor for name, tensor in tensors.items()})
        self.require(OWN_FORMAT)

    def require(self, version: int) -> None:
        """Make the checkpoint one of at least this format."""
        self.version = max(self.version, version)

    # --- slots that were brought

    def save_slot(self, name: str, save: Callable[..., object], each: bool) -> dict[str, Json]:
        """Save what ``save`` makes of a slot, in a file of its own."""
        tensors: dict[str, Tensor] = {}
        if not each:
            entry = self._encode_slot(name, save, tensors)
            self.file(name).update(tensors)
            return self.bring(name, {"all": entry})

        entries = gather_encoded(lambda: self._encode_slot(name, save, tensors), name)
        self.add_own(tensors, f"{name}/")
        return self.bring(name, {"each": entries})

    def try_slot(self, name: str, save: Callable[..., object]) -> None:
        """Do the same in this process alone, and write nothing."""
        self._encode_slot(name, save, {})

    def _encode_slot(
        self, name: str, save: Callable[..., object], tensors: dict[str, Tensor]
    ) -> Json:
        return self.encode(save(self.state.slots[name]), tensors, name)

    def bring(self, name: str, entry: Json) -> dict[str, Json]:
        """Add the entry of a slot, and return what is beside those: nothing."""
        self.brought[name] = entry
        self.require(BROUGHT_FORMAT)
        return {}


@attrs.frozen(eq=False)
class Reading:
    """What is restored, and into what: a `Restoring`.

    Args:
        facts: the contents of ``state.json``.
        groups: the groups of tensors that were read, by name.
        state: the state to load into, as it is before that.
        parts: the names of the parts to restore.
        strict: whether names and shapes must be the same.
        path: the checkpoint, for messages.
        undone: what changes something in place enters here how that is restored if there is an
            exception.
        settings: compares settings of the optimizers, and says which are not restored; or None.
        shapes: "file" gives tensors of another shape that of the file; "same" refuses them.
        resized: the tensors of the model that have the shape of the file since.
    """

    facts: Mapping[str, Json]
    groups: Mapping[str, dict[str, Tensor]]
    state: TrainState
    parts: Sequence[str]
    strict: bool
    path: Path
    undone: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    settings: Settings | None = None
    shapes: str = "same"
    resized: list[Tensor] = attrs.field(factory=list)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of parts that have no file of their own, on the device."""
        stay, device = ("generators", POSITIONS), self.state.backend.device
        slots = self.groups["slots"]
        return {k: v if k.startswith(stay) else v.to(device) for k, v in slots.items()}

    @property
    def is_of_as_many(self) -> bool:
        """Whether as many processes saved it, so that each gets back what was its own."""
        return self.facts.get("processes") == self.state.backend.data_size

    def decode(self, value: Json, tensors: Mapping[str, Tensor]) -> Json:
        """Return what :meth:`Collecting.encode` was given."""
        return decode(value, tensors)

    def own(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors that this process added by :meth:`Collecting.add_own`."""
        start = f"{self.state.backend.rank}/{prefix}"
        found = self.groups.get(OWN, {}).items()
        return {name.removeprefix(start): t for name, t in found if name.startswith(start)}

    # --- slots that were brought

    def prepare_slot(self, name: str, load: Callable[..., object]) -> Load:
        """Return how to load what :meth:`Collecting.save_slot` has saved."""
        entry = self.facts["brought"][name]
        if "all" in entry:
            found = self.decode(entry["all"], self.groups[name])
        elif self.is_of_others(entry):
            return functools.partial(without_slot, name=name)
        else:
            own = entry["each"][self.state.backend.rank]
            found = self.decode(own, self.own(f"{name}/"))
        return set_slot(name, load(found))

    def is_of_others(self, entry: Json) -> bool:
        """Return whether each process of another number had its own."""
        return "each" in entry and len(entry["each"]) != self.state.backend.world_size


def set_fields(**fields: object) -> Load:
    """Return a function that returns a state with other values of fields."""
    return lambda state: attrs.evolve(state, **fields)


def set_slot(name: str, value: object) -> Load:
    """Return a function that returns a state with a slot."""
    return lambda state: attrs.evolve(state, slots={**state.slots, name: value})


def without_slot(state: TrainState, name: str) -> TrainState:
    """Return the state without a slot."""
    slots = {key: value for key, value in state.slots.items() if key != name}
    return attrs.evolve(state, slots=slots)


# --------------------------------------------------------------------------------------------------
# What a checkpoint has of a part that nothing has brought yet.


@attrs.frozen(eq=False)
class HeldPart(Pending):
    """What a checkpoint has of a part.

    ``parts`` has its entry, its file, and what this process has of its own.
    """

    path: Path

    def brought_by(self, part: Part, state: TrainState) -> TrainState:
        """Return the state with what is held loaded by its part.

        Raises:
            Exception: what the part raises, with a note that names the checkpoint.
        """
        kept: Json = self.parts
        own = {f"{state.backend.rank}/{part.name}/{k}": t for k, t in kept["own"].items()}
        facts = {"brought": {part.name: kept["entry"]}}
        groups = {"slots": {}, part.name: kept["file"], OWN: own}
        saved = Reading(facts, groups, state, ("slots",), True, self.path)
        try:
            with saved.undone:
                return part.prepare(saved)(without_slot(state, part.name))
        except Exception as error:
            error.add_note(f"while the part {part.name!r} of {self.path} was restored")
            raise


def held(name: str) -> Part:
    """Return a part that keeps what a checkpoint has of the part of a name, as it is.

    Raises:
        ValueError: no part could have this name.
    """
    Part.check_name("a checkpoint", name)

    def save(saving: Collecting) -> dict[str, Json]:
        kept: Json = saving.state.slots[name].parts
        if "each" in kept["entry"]:
            saving.add_own(kept["own"], f"{name}/")
        else:
            saving.file(name).update(kept["file"])
        return saving.bring(name, kept["entry"])

    def prepare(saved: Reading) -> Load:
        entry, file = saved.facts["brought"][name], saved.groups.get(name, {})
        if saved.is_of_others(entry):
            return functools.partial(without_slot, name=name)
        kept = {"entry": entry, "file": file, "own": saved.own(f"{name}/")}
        return set_slot(name, HeldPart(f"part {name}", kept, saved.path))

    return Part(name, save, prepare)
