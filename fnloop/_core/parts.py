"""The parts of a checkpoint: what each saves and restores, and how a slot becomes one.

A part that is not one of every state is *brought*: by a middleware, a hook, an engine, or the class
of what is in a slot. A checkpoint names those that it has. What it has of a part that nothing has
brought yet stays in the slot of that name, and is saved again as it was.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fnloop._backend.collectives import gather_from_all
from fnloop._core.serialize import Json, Pending, decode, encode, plain_only
from fnloop._display import checks

FORMAT = 1  # of a checkpoint of all parts with one optimizer, without averages and phases
NEWER_FORMAT = 2  # of others, so that an older fnloop does not take them for damaged checkpoints
SHARDED_FORMAT = 3  # of those with an index
TRAINING_FORMAT = 4  # of those with weights to train with, which an older fnloop would not look for
OWN_FORMAT = 5  # of those with what each process has of its own
BROUGHT_FORMAT = 6  # of those with parts that were brought, which an older fnloop would lose
NEWEST_FORMAT = BROUGHT_FORMAT
TENSORS = ("model", "optimizer", "slots")  # the groups of tensors that every checkpoint has
OWN = "own"  # the group of what each process has of its own: names begin with its rank and a slash
TAKEN = (*TENSORS, "training", OWN)  # the names of files that no part of another can have
COLLECTED = "the collecting of a checkpoint"  # as messages about processes that wait name it
State = Any  # a TrainState, which knows the parts that were brought to it
POSITIONS = "positions"  # a key of the facts, and what the names of their tensors begin with


@attrs.define(eq=False)
class Saving:
    """What is saved, and the files that the parts put it into.

    Args:
        state: the state, as it is outside of its run.
        parts: the names of the parts to save.
        groups: name of a file to its tensors, by name.
        local: name to whether this process writes it, for tensors of optimizers that not all
            processes have.
        version: the oldest format that has all that was saved.
        learning: the names of the weights that are trained.
        own_optimizers: whether the optimizers of processes have states of their own.
        brought: the entries of slots that were brought, by their names.
    """

    state: State
    parts: Sequence[str]
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

    def file(self, name: str) -> dict[str, Tensor]:
        """Return a new file of tensors by their names, which is empty."""
        self.require(NEWER_FORMAT)
        return self.groups.setdefault(name, {})

    def add_own(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Add tensors that this process has of its own; it writes them itself."""
        rank, own = self.state.backend.rank, self.groups.setdefault(OWN, {})
        own.update({f"{rank}/{prefix}{name}": tensor for name, tensor in tensors.items()})
        self.require(OWN_FORMAT)

    def bring(self, name: str, entry: Json) -> dict[str, Json]:
        """Add the entry of a slot, and return what is beside those: nothing."""
        self.brought[name] = entry
        self.require(BROUGHT_FORMAT)
        return {}

    def require(self, version: int) -> None:
        """Make the checkpoint one of at least this format."""
        self.version = max(self.version, version)


@attrs.frozen(eq=False)
class Restoring:
    """What is restored, and into what.

    Args:
        facts: the contents of ``state.json``.
        groups: the groups of tensors that were read, by name.
        state: the state to load into, as it is before that.
        parts: the names of the parts to restore.
        strict: whether names and shapes must be the same.
        path: the checkpoint, for messages.
        undone: what changes something in place enters here how that is restored if there is an
            exception.
    """

    facts: Mapping[str, Json]
    groups: Mapping[str, dict[str, Tensor]]
    state: State
    parts: Sequence[str]
    strict: bool
    path: Path
    undone: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)

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

    def own(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors that this process added by :meth:`Saving.add_own`."""
        start = f"{self.state.backend.rank}/{prefix}"
        found = self.groups.get(OWN, {}).items()
        return {name.removeprefix(start): t for name, t in found if name.startswith(start)}


Load = Callable[[State], State]
Tensors = Mapping[str, Mapping[str, Tensor]]  # by group and name


def set_fields(**fields: object) -> Load:
    """Return a function that returns a state with other values of fields."""
    return lambda state: attrs.evolve(state, **fields)


def load_nothing(saved: Restoring) -> Load:
    """Load nothing of a part."""
    return lambda state: state


@attrs.frozen(eq=False)
class Part:
    """A part of a state in a checkpoint. Most authors write :meth:`of_slot`.

    There is no separate function that checks, since decoding is the check: what it finds is what is
    loaded.

    Args:
        name: its entry in ``state.json``.
        save: ``saving -> entries``, a mapping of JSON, which is empty if there is nothing to save.
            It adds its tensors to the files.
        prepare: ``saved -> load``: checks and decodes what was saved, and returns the function that
            loads it, ``state -> state``. Most only set fields. Where one of the two functions
            changes something in place, that can be undone.
        encode: ``saving -> ...`` that encodes what ``save`` may refuse, in this process alone; None
            if it refuses nothing.
        of: what it belongs to, as ``only=`` names it.
        templates: ``(state, entries) -> tensors`` of the state by group and name, of the shapes of
            those in the checkpoint, where they may be sharded; or None.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> seen = Part.of_slot("seen", lambda seen: {"rows": torch.stack(seen)},
        ...     lambda saved: [*saved["rows"]])
        >>> def noting(step):
        ...     def note(state, batch):
        ...         state.slots["seen"].append(batch[0])
        ...         return step(state, batch)
        ...     return note
        >>> pipe = fl.pipeline(
        ...     fl.Middleware("seen", step=noting, init=lambda state: [], brings=(seen,)))
        >>> step, ones = pipe(toy_loss), [torch.ones(1)] * 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = fl.save(fl.fit(step, toy(), ones, hooks=()), f"{folder}/a")
        ...     state = fl.fit(step, fl.restore(path, toy()), ones, epochs=2, hooks=())
        >>> len(state.slots["seen"])
        6
    """

    name: str
    save: Callable[..., Mapping[str, Json]]
    prepare: Callable[..., Load] = load_nothing
    encode: Callable[..., object] | None = None
    of: str = "slots"
    templates: Callable[[State, Mapping[str, Json]], Tensors] | None = None

    @staticmethod
    def of_slot(
        name: str,
        save: Callable[..., object],
        load: Callable[..., object],
        *,
        each: bool = False,
    ) -> Part:
        """Return a part that saves what is in a slot, in a file of its own.

        A run gets it back when it has a middleware or a hook that brings the part. Until then it
        stays in the checkpoint's form, and is saved again.

        Args:
            name: the name of the slot, and of the file: letters, digits, "-" and "_".
            save: ``value -> saved``, plain data and tensors.
            load: ``saved -> value``. The tensors of ``saved`` are in host memory.
            each: whether each process has its own. On another number of processes the slot is made
                again. By default that of the main process is saved, which all get.

        Raises:
            TypeError: one of the two is not a function, or ``each`` not a flag.
            ValueError: it is not a name for a file, or every checkpoint has a file of that name.

        Example:
            >>> Part.of_slot("replay", vars, dict).name
            'replay'
        """
        owner = "Part.of_slot"
        _check_name(owner, name)
        checks.function(owner, "save", save, "a function of what is in the slot", 1, also=type)
        checks.function(owner, "load", load, "a function of what was saved", 1, also=type)
        checks.flag(owner, "each", each)
        return Part(
            name,
            functools.partial(_save_slot, name, save, each),
            functools.partial(_prepare_slot, name, load),
            lambda saving: _encode_slot(name, save, saving),
        )


def _check_name(owner: str, name: str) -> None:
    checks.text(owner, "name", name, "the name of the slot")
    taken = name.lower() in TAKEN
    if taken or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
        raise ValueError(
            f"{owner} expects name as a name for a file that no checkpoint has otherwise, of "
            f'letters, digits, "-" and "_"; got {name!r}'
        )


def _encode_slot(
    name: str, save: Callable[..., object], saving: Saving
) -> tuple[Json, dict[str, Tensor]]:
    found: dict[str, Tensor] = {}
    return encode(save(saving.state.slots[name]), found, name, plain_only), found


def _save_slot(
    name: str, save: Callable[..., object], each: bool, saving: Saving
) -> dict[str, Json]:
    if not each:
        entry, found = _encode_slot(name, save, saving)
        saving.file(name).update(found)
        return saving.bring(name, {"all": entry})
    entry, error = None, None
    try:
        entry, found = _encode_slot(name, save, saving)
        saving.add_own(found, f"{name}/")
    except Exception as failure:  # the other processes wait for an answer
        error = failure
    every = gather_from_all((entry, error and f"{type(error).__name__}: {error}"), COLLECTED)
    if error is not None:
        raise error
    if failed := [(rank, text) for rank, (_, text) in enumerate(every) if text is not None]:
        raise ValueError(f"process {failed[0][0]} cannot save {name}: {failed[0][1]}")
    return saving.bring(name, {"each": [one for one, _ in every]})


def _prepare_slot(name: str, load: Callable[..., object], saved: Restoring) -> Load:
    entry = saved.facts["brought"][name]
    if _is_of_others(entry, saved):
        return lambda state: without_slot(state, name)
    if "all" in entry:
        found = decode(entry["all"], saved.groups[name])
    else:
        found = decode(entry["each"][saved.state.backend.rank], saved.own(f"{name}/"))
    value = load(found)
    return lambda state: attrs.evolve(state, slots={**state.slots, name: value})


def _is_of_others(entry: Json, saved: Restoring) -> bool:
    """Return whether each process of another number had its own."""
    return "each" in entry and len(entry["each"]) != saved.state.backend.world_size


def parts_of(slot: object) -> tuple[Part, ...]:
    """Return the parts that the class of what is in a slot brings."""
    return getattr(type(slot), "brings", ())


def without_slot(state: State, name: str) -> State:
    """Return the state without a slot."""
    slots = {key: value for key, value in state.slots.items() if key != name}
    return attrs.evolve(state, slots=slots)


# --------------------------------------------------------------------------------------------------
# What a checkpoint has of a part that nothing has brought yet.


@attrs.frozen(eq=False)
class Held(Pending):
    """What a checkpoint has of a part, in the slot of its name, until something brings the part.

    ``parts`` has its entry, its file, and what this process has of its own.
    """

    path: Path

    def restored_by(self, part: Part, state: State) -> State:
        """Return the state with what is held loaded by its part.

        Raises:
            Exception: what the part raises, with a note that names the checkpoint.
        """
        kept: Json = self.parts
        own = {f"{state.backend.rank}/{part.name}/{k}": t for k, t in kept["own"].items()}
        facts = {"brought": {part.name: kept["entry"]}}
        groups = {"slots": {}, part.name: kept["file"], OWN: own}
        saved = Restoring(facts, groups, state, ("slots",), True, self.path)
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
    _check_name("a checkpoint", name)

    def save(saving: Saving) -> dict[str, Json]:
        kept: Json = saving.state.slots[name].parts
        if "each" in kept["entry"]:
            saving.add_own(kept["own"], f"{name}/")
        else:
            saving.file(name).update(kept["file"])
        return saving.bring(name, kept["entry"])

    def prepare(saved: Restoring) -> Load:
        entry, file = saved.facts["brought"][name], saved.groups.get(name, {})
        if _is_of_others(entry, saved):
            return lambda state: without_slot(state, name)
        kept = {"entry": entry, "file": file, "own": saved.own(f"{name}/")}
        value = Held(f"part {name}", kept, saved.path)
        return lambda state: attrs.evolve(state, slots={**state.slots, name: value})

    return Part(name, save, prepare)
