"""The parts of a checkpoint: how each is saved, checked, and loaded. A new one is a new `Part`.

The optimizers have a module of their own. Objects that are not plain data are saved as their parts
(see ``serialize``). They are reconstructed when a new object of their kind is available: the slot
of a middleware when its ``init`` has created one, a metric when the next batch brings one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.collectives import gather_from_all, gather_shares
from fnloop._backend.containers import is_out_of_memory
from fnloop._backend.fsdp import is_sharded, like_sharded, local_part
from fnloop._backend.processes import Backend
from fnloop._backend.torch_compat import (
    buffers_of,
    is_extra_state,
    loads_by_itself,
    loads_other_names,
    strip_compile_prefix,
)
from fnloop._checkpoint.files import (
    EncodedHistory,
    chain,
    decode_history,
    encode_record,
    run_of,
)
from fnloop._checkpoint.format import (
    COLLECTED,
    COUNTERS,
    FORMAT,
    NEWER_FORMAT,
    OWN,
    OWN_FORMAT,
    PARTS,
    TENSORS,
    TRAINED,
    TRAINING,
    TRAINING_FORMAT,
    CheckpointError,
    Contents,
    shares_in,
)
from fnloop._checkpoint.optimizer import (
    SavedOptimizer,
    Settings,
    copies_in,
    encode_optimizers,
    encode_own_optimizers,
    merge_processes,
    optimizers_kept_on_error,
    prepare_loads,
)
from fnloop._core.apart import Apart, apart_of, mark_of, own_tensors
from fnloop._core.averages import Average, named_tensors
from fnloop._core.history import History, decode_phases, encode_phases
from fnloop._core.metrics import restored
from fnloop._core.optimizers import groups_in
from fnloop._core.rng import SEED_BITS, HostGenerators
from fnloop._core.runs import (
    Position,
    RunInfo,
    check_position,
    decode_stop,
    decode_todo,
    encode_stop,
    encode_todo,
    todo_of_before,
)
from fnloop._core.serialize import (
    PAIRS,
    AsParts,
    Json,
    as_parts,
    as_safetensor,
    decode,
    encode,
    flattened_kind,
    from_safetensor,
    has_pending,
    plain_only,
)
from fnloop._core.state import (
    LOCAL_SGD,
    TrainState,
    has_moved,
    note_buffers,
    ownership_of,
    shapes_of_buffers,
    unwrap,
    with_slot,
)
from fnloop._display.checks import describe, join_names
from fnloop._display.screen import log
from fnloop._step.engine import engine_of
from fnloop._step.update import evaluation_weights

# --------------------------------------------------------------------------------------------------
# The parts of a state, and which of them a checkpoint holds.
#
# A checkpoint that was saved with `only=...` is *partial*: it lists its parts in `state.json` and
# in the manifest. A run cannot be resumed from it.

_NAMES = (*PARTS, TRAINED)


def read_parts(owner: str, only: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts that ``only`` names, in one order, each once; all of them for None.

    "trained" is a part of the model, and is left out next to it.

    Raises:
        ValueError: it is something else, or names none.
    """
    if only is None:
        return PARTS
    try:
        parts = tuple(only)
    except TypeError:
        parts = ()
    if not parts or not all(isinstance(part, str) and part in _NAMES for part in parts):
        raise ValueError(
            f"{owner} expects only= as a tuple of {', '.join(_NAMES)}; got {describe(only)}"
        )
    return tuple(
        part for part in _NAMES if part in parts and not (part == TRAINED and "model" in parts)
    )


def held_parts(facts: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the parts that a checkpoint holds, by its manifest or its ``state.json``."""
    return tuple(facts["parts"]) if is_partial(facts) else PARTS


def is_partial(facts: Mapping[str, Json]) -> bool:
    """Return whether a checkpoint lacks some parts, by its manifest or its ``state.json``."""
    return "parts" in facts


def explain_partial(path: Path, held: Sequence[str]) -> str:
    """Return what a partial checkpoint holds, and how to restore that."""
    only = ", ".join(f'"{part}"' for part in held) + ("," if len(held) == 1 else "")
    return (
        f"{path} is a partial checkpoint, which holds only {', '.join(held)}. To restore that: "
        f'restore("{path}", state, only=({only}))'
    )


def check_held(path: Path, facts: Mapping[str, Json], parts: Sequence[str]) -> None:
    """Raise unless a checkpoint holds these parts."""
    held = held_parts(facts)
    known = (*held, TRAINED) if "model" in held else held
    if not {*parts} <= {*known}:
        raise CheckpointError(explain_partial(path, held))


# --------------------------------------------------------------------------------------------------
# What a part is: three things that it does. The tuple of all parts is at the end of this file.


@attrs.define(eq=False)
class Saving:
    """What is saved, and the files that the parts put it into.

    Args:
        state: the state, as it is outside of its run.
        run: facts about that run; None outside of one.
        parts: the names of the parts to save.
        encode_history: encodes the history.
        groups: name of a file to its tensors, by name.
        local: name to whether this process writes it, for tensors of optimizers that not all
            processes have.
        history: the encoded history.
        version: the oldest format that has all that was saved.
        learning: the names of the weights that are trained.
    """

    state: TrainState
    run: RunInfo | None
    parts: Sequence[str]
    encode_history: Callable[[History], EncodedHistory]
    groups: dict[str, dict[str, Tensor]] = attrs.field(factory=lambda: {k: {} for k in TENSORS})
    local: Mapping[str, bool] = attrs.field(factory=dict)
    history: EncodedHistory = attrs.field(factory=EncodedHistory)
    version: int = FORMAT
    learning: Collection[str] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of parts that have no file of their own."""
        return self.groups["slots"]

    def add_own(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Add tensors that this process has of its own; it writes them itself."""
        rank, own = self.state.backend.rank, self.groups.setdefault(OWN, {})
        own.update({f"{rank}/{prefix}{name}": tensor for name, tensor in tensors.items()})
        self.require(OWN_FORMAT)

    def require(self, version: int) -> None:
        """Make the checkpoint one of at least this format."""
        self.version = max(self.version, version)


@attrs.frozen(eq=False)
class Restoring:
    """What is restored, and into what.

    Args:
        contents: what was read.
        state: the state to load into, as it is before that.
        parts: the names of the parts to restore.
        strict: whether names and shapes must be the same.
        path: the checkpoint, for messages.
        undone: what changes something in place enters here how that is put back if there is an
            exception.
        settings: compares settings of the optimizers, and says which are not restored.
    """

    contents: Contents
    state: TrainState
    parts: Sequence[str]
    strict: bool
    path: Path
    undone: contextlib.ExitStack
    settings: Settings | None = None

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of parts that have no file of their own, on the device."""
        stay, device = ("generators", POSITIONS), self.state.backend.device
        slots = self.contents.groups["slots"]
        return {k: v if k.startswith(stay) else v.to(device) for k, v in slots.items()}

    @property
    def facts(self) -> Mapping[str, Json]:
        """The contents of ``state.json``."""
        return self.contents.facts

    @property
    def is_of_as_many(self) -> bool:
        """Whether as many processes saved it, so that each gets back what was its own."""
        return self.facts.get("processes") == self.state.backend.data_size

    def own(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors that this process added by :meth:`Saving.add_own`."""
        start = f"{self.state.backend.rank}/{prefix}"
        found = self.contents.groups.get(OWN, {}).items()
        return {name.removeprefix(start): t for name, t in found if name.startswith(start)}


Load = Callable[[TrainState], TrainState]


def _set_fields(**fields: Any) -> Load:
    return lambda state: attrs.evolve(state, **fields)


def _load_nothing(saved: Restoring) -> Load:
    return _set_fields()


class Part(NamedTuple):
    """A part of a state in a checkpoint.

    There is no separate function that checks, since decoding is the check: what it finds is what is
    loaded.

    Args:
        name: as ``only=`` names it; several parts may share one.
        save: adds its tensors to the files, and returns its facts, the entries of ``state.json``.
        prepare: checks and decodes what was saved. It returns the function that loads it:
            ``state -> state``. Most only set fields. Where one of the two functions changes
            something in place, that can be undone (see :class:`Restoring`).
        encode: encodes what ``save`` may refuse, in this process alone, without its contents; None
            if it refuses nothing.
    """

    name: str
    save: Callable[[Saving], dict[str, Json]]
    prepare: Callable[[Restoring], Load] = _load_nothing
    encode: Callable[[Saving], object] | None = None


# --------------------------------------------------------------------------------------------------
# The counters; the generators and the position of the training loader at this point of the run.


def _save_counters(saving: Saving) -> dict[str, Json]:
    state = saving.state
    if state.updates or state.phases:
        saving.require(NEWER_FORMAT)
    return {
        **{name: getattr(state, name) for name in COUNTERS},
        **({"updates": dict(state.updates)} if state.updates else {}),
        **({"phases": encode_phases(state.phases)} if state.phases else {}),
        **({"ends": state.ends} if state.ends else {}),
        **encode_stop(state.stop),
        "todo": encode_todo(state.todo),
        **({"noted": dict(state.noted)} if state.noted else {}),
        "news": sorted(state.events) if state.todo else [],  # the old name of events
    }


def _prepare_counters(saved: Restoring) -> Load:
    facts = saved.facts
    fields = check_counters(facts) | {"updates": _updates_by_name(facts, saved.state)}
    _warn_of_exact(facts, saved.state.backend)
    saved_on = shares_in(facts) if facts["batch"] else None
    return _set_fields(**fields, run_id=run_of(saved.path, facts), saved_on=saved_on)


def _warn_of_exact(facts: Mapping[str, Json], backend: Backend) -> None:
    """Warn if a run continues with another setting of ``exact`` than it had."""
    was = facts.get("exact", False) is True
    if was == backend.exact or not backend.main:
        return
    if was:
        log.warning(
            "restore: this run had exact=True, and continues without: from here on, its bits "
            "depend on the number of processes. Write TrainState.create(..., exact=True)"
        )
    else:
        log.warning(
            "restore: this run had no exact=True until here, so what it has come to depends on the "
            "number of processes that it had"
        )


def _updates_by_name(facts: Mapping[str, Json], state: TrainState) -> dict[str, int]:
    """Return the updates of each optimizer of a state; those of all, if it had another name."""
    saved = facts.get("updates", {})
    return {name: _check_count(name, saved.get(name, facts["step"])) for name in state.updates}


def _check_count(name: str, value: Json, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{name} is {value!r:.60}")
    return value


def check_counters(facts: Mapping[str, Json]) -> dict[str, object]:
    """Return the saved counters, the stop, and what the run does next.

    Raises:
        TypeError: one of them cannot be a counter.
    """
    counters: dict[str, object] = {name: facts[name] for name in COUNTERS if name != "stop"}
    for name, value in counters.items():
        # No epoch has more batches than 2**40. One that begins after them would train on nothing.
        _check_count(name, value, {"seed": SEED_BITS, "batch": 1 << 40}.get(name, 1 << 62))
    events, todo = todo_of_before(facts)
    todo = decode_todo(facts["todo"]) if "todo" in facts else todo
    return counters | {
        "stop": decode_stop(facts["stop"], facts.get("stop_kind")),
        "events": events,
        "todo": todo,
        "noted": {name: float(value) for name, value in facts.get("noted", {}).items()},
        "phases": decode_phases(facts.get("phases", [])),
        "ends": "epoch" if facts.get("ends") else None,
    }


def _save_generators(saving: Saving) -> dict[str, Json]:
    """Return the generators of every process, by rank; None at the beginning of an epoch."""
    own = saving.state.generators
    every = gather_shares(own and own.to_parts(), COLLECTED)
    return {"generators": encode(every if any(every) else None, saving.tensors, "generators")}


def _prepare_generators(saved: Restoring) -> Load:
    every = decode(saved.facts["generators"], saved.tensors) or ()
    every = [own and HostGenerators.from_parts(own).checked() for own in every]
    rank, processes = saved.state.backend.data_rank, saved.state.backend.data_size
    # Of another number of processes, the main one continues its stream, and the others begin new.
    mine = every and (rank == 0 or len(every) == processes)
    return _set_fields(generators=every[rank] if mine else None)


POSITIONS = "positions"  # a key of the facts, and what the names of their tensors begin with


def _save_position(saving: Saving) -> dict[str, Json]:
    """Return the position of the loader as facts; those of all processes if each has its shard.

    A position that is not plain data is left out, with a warning: the run can be resumed all the
    same, by reading the loader again.
    """
    own = saving.state.position
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
    saving.tensors.update(added)
    return {POSITIONS: encoded}


def _prepare_position(saved: Restoring) -> Load:
    position = _decode_position(saved.facts, saved.tensors, saved.state.backend)
    return _set_fields(position=position)


def _decode_position(
    facts: Mapping[str, Json], tensors: Mapping[str, Tensor], backend: Backend
) -> Position | None:
    """Return the position of this process's loader, or None if it is not known.

    Raises:
        TypeError: it cannot be a position.
    """
    every = [check_position(own) for own in decode(facts.get(POSITIONS, []), tensors)]
    if not every or every[0]["shards"] not in (1, backend.data_size):
        return None
    return every[min(backend.data_rank, len(every) - 1)]


# --------------------------------------------------------------------------------------------------
# The time that was spent until a checkpoint was written, and the targets of its run.
#
# The targets are there so that an update of the run can be made again: a schedule that depends on
# the length of the run sets the same rate then.


def _save_seconds(saving: Saving) -> dict[str, Json]:
    return {"seconds": ownership_of(saving.state).seconds}


def _prepare_seconds(saved: Restoring) -> Load:
    seconds = _check_seconds(saved.facts)

    def load(state: TrainState) -> TrainState:
        ownership_of(state).seconds = seconds
        return state

    return load


def _check_seconds(facts: Mapping[str, Json]) -> float:
    """Return the time spent in runs; 0 in checkpoints of older versions, which do not have it.

    Raises:
        TypeError: it cannot be a time.
    """
    value = facts.get("seconds", 0.0)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise TypeError(f"seconds is {value!r:.60}")
    return float(value)


TARGETS = "targets"  # a key of the facts


@attrs.frozen
class Targets:
    """Where a run was to end.

    Args:
        epochs: the target for ``state.epoch``, or None.
        steps: what ``state.step`` was to be at the end, or None if that was not known.
    """

    epochs: int | None
    steps: int | None


def _save_targets(saving: Saving) -> dict[str, Json]:
    run = saving.run
    return {} if run is None else {TARGETS: {"epochs": run.epochs, "steps": run.total_steps}}


def decode_targets(facts: Mapping[str, Json]) -> Targets | None:
    """Return the targets of the run that wrote a checkpoint; None if it was written by none.

    Checkpoints of older versions do not have them.
    """
    saved = facts.get(TARGETS)
    if saved is None:
        return None
    targets = Targets(saved["epochs"], saved["steps"])
    return None if targets == Targets(None, None) else targets


# --------------------------------------------------------------------------------------------------
# The model: saved with the weights that an evaluation uses, loaded as a whole or left as it was.

BLOCK = 1 << 20  # elements that are exchanged at a time


def _save_model(saving: Saving) -> dict[str, Json]:
    """Save the model with the weights that an evaluation uses.

    With the optimizers, those of training get a file of their own if they may be others.
    """
    module, model, trained = unwrap(saving.state), saving.groups["model"], TRAINED in saving.parts
    saving.learning = {strip_compile_prefix(k) for k, p in _parameters(module) if p.requires_grad}
    with evaluation_weights(saving.state) as others:
        facts = _encode_module(saving)
        if not others:
            return facts
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        names = [  # also of what the module computes from its weights
            name
            for spelled, value in module.state_dict(keep_vars=True).items()
            if (name := strip_compile_prefix(spelled)) in model
            and (id(value) in others or id(value) not in own)
        ]
        model |= {name: model[name].clone() for name in names}
    if "optimizer" not in saving.parts or has_moved(saving.state):  # each process has its own
        return facts
    found: dict[str, Tensor] = {}
    _encode_model(module, found, {}, trained)
    saving.groups[TRAINING] = {name: found[name] for name in names}
    saving.require(TRAINING_FORMAT)
    return facts | {TRAINING: True}


def _encode_module(saving: Saving) -> dict[str, Json]:
    """Return the facts of the model with the weights that it has now.

    Raises:
        TypeError, ValueError: something cannot be saved, or what is trained would be missing.
    """
    module, model, trained = unwrap(saving.state), saving.groups["model"], TRAINED in saving.parts
    facts = _encode_model(module, model, saving.tensors, trained)
    if "optimizer" in saving.parts:
        _check_complete(saving.state, model)
    grown = {} if trained else _grown_buffers(saving.state, model)
    return {"model": {**facts, **({"grown": grown} if grown else {})}}


def _check_complete(state: TrainState, saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter that is trained is not among the tensors of its model."""
    module = unwrap(state)
    names = [(strip_compile_prefix(name), p) for name, p in module.named_parameters()]
    missing = [(name, p) for name, p in names if name not in saved and p.requires_grad]
    if not missing:
        return
    trained = {id(p) for group in groups_in(state.optimizer) for p in group["params"]}
    storages = {local_part(t).untyped_storage().data_ptr() for t in saved.values()}
    left = [
        name
        for name, p in missing
        if id(p) in trained and local_part(p).untyped_storage().data_ptr() not in storages
        if not loads_other_names(module, name)
    ]
    if left:
        raise ValueError(
            f"the state_dict of {type(module).__name__} leaves out {join_names(left)}, which is "
            "trained, so a run could not be resumed: let it return all that is trained, or save "
            'without the optimizer, only=("model", ...)'
        )


def _encode_model(
    module: nn.Module, tensors: dict[str, Tensor], others: dict[str, Tensor], trained: bool
) -> dict[str, Json]:
    """Return the facts of the model. Tensors of its extra state are added to ``others``.

    With ``trained``, only the parameters that require gradients are saved.
    """
    extra, pairs = {}, []
    learning = {name for name, p in _parameters(module) if p.requires_grad} if trained else ()
    if trained and not learning:
        raise ValueError('only=("trained",) saves the parameters that require gradients; none does')
    for spelled, value in module.state_dict().items():
        if trained and spelled not in learning:
            continue
        name = strip_compile_prefix(spelled)
        if isinstance(value, Tensor):
            tensors[name] = as_safetensor(value, f"model.{name}")
            pairs += [name] if value.dtype in PAIRS else []
        else:  # from the module's get_extra_state
            extra[name] = encode(value, others, f"model.{name}")
    facts = {
        "class": type(module).__name__,
        "extra_state": extra,
        **({"complex": pairs} if pairs else {}),
    }
    if trained:
        return facts
    frozen = [name for name, p in _parameters(module) if not p.requires_grad]
    evaluating = [name for name, m in module.named_modules() if not m.training]
    return {
        **facts,
        "frozen": list(map(strip_compile_prefix, frozen)),
        "evaluating": list(map(strip_compile_prefix, evaluating)),
    }


def _prepare_model(saved: Restoring) -> Load:
    """Check that the saved model fits, and return how to load it.

    With the counters, it restores which parameters are frozen and which modules are in evaluation
    mode. Then the dtypes must be the same too; weights alone may be cast.
    """
    module, facts, strict = unwrap(saved.state), saved.facts["model"], saved.strict
    _check_sizes(module, saved.path)
    trained = TRAINED in saved.parts
    flags = "counters" in saved.parts and not trained
    frozen, evaluating = (facts[k] if flags else [] for k in ("frozen", "evaluating"))
    spelled = {strip_compile_prefix(key): key for key in module.state_dict()}
    mine = {strip_compile_prefix(key): value for key, value in module.state_dict().items()}
    # Not those that are on the device: the module may expect its extra state where it made it.
    kept = saved.contents.groups["slots"]
    extra = {name: decode(value, kept) for name, value in facts["extra_state"].items()}
    theirs = {**model_tensors(saved.contents, training="optimizer" in saved.parts), **extra}
    if trained:
        theirs = _trained_parts(theirs, saved.facts, module)
    grown = _grown_alike(saved, theirs)
    resized = {k for k, here in mine.items() if _resizes(module, spelled[k], theirs.get(k), here)}
    resized |= grown.keys()
    rest = (  # extra state may be of any shape: only its module knows what it takes
        {k: None if is_extra_state(k) else v for k, v in tensors.items() if k not in resized}
        for tensors in (theirs, mine)
    )
    faults = _compare_models(*rest, dtypes=flags)
    if trained:
        _warn_of_untrained(module, faults.pop("missing in the checkpoint"))
    found = "; ".join(f"{what}: {join_names(which)}" for what, which in faults.items() if which)
    if found and strict:
        part = TRAINED if trained else "model"
        raise CheckpointError(
            f"{saved.path} is of another model ({facts['class']}). {found}. Create the same model, "
            f"or restore what matches: restore(path, state, only=('{part}',), strict=False)"
        )
    if found:
        log.warning("restore: left unchanged: %s", found)
    fitting = {
        spelled.get(name, name): _shard_like(value, mine.get(name))
        for name, value in theirs.items()
        if name in resized
        or (name in mine and (is_extra_state(name) or not _differ_in_shape(value, mine[name])))
    }
    _check_ties(saved, module, fitting)

    def load(state: TrainState) -> TrainState:
        note_buffers(state)
        saved.undone.enter_context(_buffers_made(module, grown, state.backend.device))
        saved.undone.enter_context(weights_kept_on_error(module, fitting))
        missing = module.load_state_dict(fitting, strict=False).missing_keys
        if trained:
            missing = [name for name in missing if name in fitting]
        if strict and missing:
            raise CheckpointError(
                f"{saved.path}: the model took no value for {join_names(missing)}: "
                "its hooks rename keys"
            )
        if flags:
            for name, p in module.named_parameters():
                p.requires_grad_(strip_compile_prefix(name) not in frozen)
            for name, submodule in module.named_modules():
                submodule.training = strip_compile_prefix(name) not in evaluating
        return state

    return load


# --- buffers that have another shape than when the run began, or that were not there
#
# As a memory that grows, or a cache that the first batch makes: a new model of the same program has
# them as they were when the run began. So a checkpoint says how that was, and a restore into a
# model that has them so takes them from the file.


def _grown_buffers(state: TrainState, saved: Mapping[str, Tensor]) -> dict[str, Json]:
    """Return the saved buffers that had another shape, and which; None for those not there."""
    if (before := ownership_of(state).buffers) is None:
        return {}
    now = shapes_of_buffers(unwrap(state))
    grown = [name for name, shape in now.items() if name in saved and before.get(name) != shape]
    return {name: [*before[name]] if name in before else None for name in grown}


def _grown_alike(saved: Restoring, theirs: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the buffers that have grown in the saved run, if those here were as they were."""
    was: Mapping[str, Json] = saved.facts["model"].get("grown", {})
    module, before = unwrap(saved.state), ownership_of(saved.state).buffers
    before = shapes_of_buffers(module) if before is None else before
    return {
        name: value
        for name, shape in was.items()
        if isinstance(value := theirs.get(name), Tensor)
        and before.get(name) == (None if shape is None else torch.Size(shape))
        and not loads_other_names(module, name)
    }


_ABSENT = torch.empty(0)  # what stands for no buffer, where None is one without a value


@contextlib.contextmanager
def _buffers_made(
    module: nn.Module, values: Mapping[str, Tensor], device: torch.device
) -> Iterator[None]:
    """Give a module buffers of the shapes of values. Take them back if there is an exception."""
    owners = {strip_compile_prefix(name): owner for name, owner in module.named_modules()}
    before: list[tuple[nn.Module, str, Tensor | None]] = []
    try:
        for name, value in values.items():
            prefix, _, own = name.rpartition(".")
            owner, was = owners[prefix], buffers_of(owners[prefix]).get(own, _ABSENT)
            place = device if was is None or was is _ABSENT else was.device
            made = torch.empty(value.shape, dtype=value.dtype, device=place)
            owner.register_buffer(own, made)
            before.append((owner, own, was))
        yield
    except BaseException:
        for owner, own, was in before:
            if was is _ABSENT:
                delattr(owner, own)
            else:
                owner.register_buffer(own, was)
        raise


def _check_ties(saved: Restoring, module: nn.Module, values: Mapping[str, object]) -> None:
    """Raise CheckpointError if tensors of the model that share memory have different values.

    Args:
        saved: what is restored.
        module: the model.
        values: what is to be loaded into it, by name.
    """
    shared = _shared_memory(module, values)
    torn = [names for names, pairs in shared if not _fit_together(pairs)]
    if is_sharded(module):  # each process compares what it holds
        torn = sorted({names for each in gather_from_all(torn) for names in each})
    if torn:
        names = [*map(strip_compile_prefix, torn[0])]
        copied = f"model.{names[-1]}.detach().clone()"
        if isinstance(operator.attrgetter(names[-1])(module), nn.Parameter):
            copied = f"nn.Parameter({copied})"
        others = f", and so do {len(torn) - 1} more groups of tensors" if torn[1:] else ""
        raise CheckpointError(
            f"{saved.path} has different values for {join_names(names)}, which share memory in "
            f"this {type(module).__name__}{others}: only one of the values could be kept. Restore "
            "into a model that does not tie them. To make one, write model."
            f"{names[-1]} = {copied} before you make the optimizer"
        )


_Pair = tuple[Tensor, Tensor]  # a tensor of the model, and its new value


def _shared_memory(
    module: nn.Module, values: Mapping[str, object]
) -> list[tuple[tuple[str, ...], list[_Pair]]]:
    """Return the names of tensors of a model that overlap in memory, and their new values."""
    storages: dict[object, list[tuple[int, int, str, _Pair]]] = {}
    for name, whole in module.state_dict().items():
        new = values.get(name)
        if not (isinstance(whole, Tensor) and isinstance(new, Tensor)):
            continue
        here, there = local_part(whole), local_part(new)
        has_memory = here.layout is torch.strided and flattened_kind(here) is None
        if not has_memory or here.shape != there.shape or not here.numel() or 0 in here.stride():
            continue
        first, size = here.storage_offset(), here.element_size()
        last = first + sum((n - 1) * by for n, by in zip(here.shape, here.stride(), strict=True))
        memory = here.untyped_storage().data_ptr(), here.device
        found = int(first) * size, (int(last) + 1) * size, name, (here, there)
        storages.setdefault(memory, []).append(found)
    groups: list[tuple[tuple[str, ...], list[_Pair]]] = []
    for tensors in storages.values():
        end = 0
        for start, stop, name, pair in sorted(tensors, key=lambda found: found[0]):
            if start < end:
                names, pairs = groups.pop()
                groups.append(((*names, name), [*pairs, pair]))
            else:
                groups.append(((name,), [pair]))
            end = max(end, stop)
    return [group for group in groups if len(group[1]) > 1]


def _fit_together(pairs: Sequence[_Pair]) -> bool:
    """Return whether each tensor has its value, bit for bit, after all are put in one memory."""
    here, there = pairs[0]
    size = here.untyped_storage().nbytes()
    memory = torch.empty(size, dtype=torch.uint8, device=there.device).untyped_storage()
    placed: list[_Pair] = []
    for here, there in pairs:
        view = torch.empty(0, dtype=here.dtype, device=there.device)
        view.set_(memory, here.storage_offset(), here.shape, here.stride())
        placed.append((view.copy_(there), there.to(here.dtype)))
    return all(torch.equal(_bits(view), _bits(value)) for view, value in placed)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _check_sizes(module: nn.Module, path: Path) -> None:
    """Raise CheckpointError if the sizes of parameters are still to be decided by a batch."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, t in tensors if nn.parameter.is_lazy(t)]:
        raise CheckpointError(
            f"{path} cannot be restored into this {type(module).__name__}: the sizes of "
            f"{join_names(lazy)} are not known yet. Call the model on a batch first: model(x)"
        )


def _resizes(module: nn.Module, name: str, there: object, here: object) -> bool:
    """Return whether the owner of a buffer takes one of another shape, as fake quantization does.

    It is tried on a copy, which shares the parameters.
    """
    if not _differ_in_shape(there, here):
        return False
    prefix, _, own = name.rpartition(".")
    owner = dict(module.named_modules()).get(prefix)
    if owner is None or not loads_by_itself(owner):  # None: state_dict has names of its own
        return False
    if own not in dict(owner.named_buffers(recurse=False)):
        return False
    try:
        trial = copy.deepcopy(owner, {id(p): p for p in owner.parameters()})
        trial.load_state_dict({own: there}, strict=False)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False  # it is refused, by name
    return trial.get_buffer(own).shape == there.shape  # type: ignore[attr-defined]


def _trained_parts(
    saved: Mapping[str, object], facts: Mapping[str, Json], module: nn.Module
) -> dict[str, object]:
    """Return what a checkpoint holds of the parameters that required gradients."""
    if "model" not in held_parts(facts):
        return dict(saved)
    names = {strip_compile_prefix(name) for name, _ in _parameters(module)}
    names -= {*facts["model"]["frozen"]}
    return {name: value for name, value in saved.items() if name in names}


def _warn_of_untrained(module: nn.Module, missing: Sequence[str]) -> None:
    """Warn if there are parameters to train that the checkpoint does not hold."""
    learning = {strip_compile_prefix(name) for name, p in _parameters(module) if p.requires_grad}
    if untrained := [name for name in missing if name in learning]:
        log.warning("restore: not in the checkpoint, left unchanged: %s", join_names(untrained))


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _compare_models(
    saved: Mapping[str, object], mine: Mapping[str, object], dtypes: bool
) -> dict[str, list[str]]:
    """Return the differences between two models, by kind; dtypes only if asked for."""
    faults: dict[str, list[str]] = {
        "missing in the checkpoint": [name for name in mine if name not in saved],
        "not in the model": [name for name in saved if name not in mine],
        "of another shape": [],
        "of another dtype": [],
    }
    for name, here in mine.items():
        there = saved.get(name)
        if isinstance(there, Tensor) and isinstance(here, Tensor):
            if there.shape != here.shape:
                shapes = f"{tuple(there.shape)} saved, {tuple(here.shape)} here"
                faults["of another shape"].append(f"{name}: {shapes}")
            if there.dtype != here.dtype and dtypes:
                faults["of another dtype"].append(f"{name}: {there.dtype} saved, {here.dtype} here")
    return faults


def _differ_in_shape(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape


def model_tensors(contents: Contents, training: bool = False) -> dict[str, Tensor]:
    """Return the saved tensors of the model, those of pairs as complex numbers.

    Args:
        contents: what was read.
        training: whether to return the weights to train with, where these are others.
    """
    tensors, pairs = contents.groups["model"], contents.facts.get("model", {}).get("complex", ())
    if training and contents.facts.get(TRAINING, False):
        others = contents.groups[TRAINING]
        if unknown := others.keys() - tensors.keys():
            raise KeyError(f"{min(unknown)} is a weight to train with, but not one of the model")
        tensors = {**tensors, **others}
    return {
        name: from_safetensor(tensor) if name in pairs else tensor
        for name, tensor in tensors.items()
    }


def _shard_like(value: object, template: object) -> object:
    if isinstance(value, Tensor) and isinstance(template, Tensor):
        return like_sharded(value, template)
    return value


# --- all or nothing


@contextlib.contextmanager
def weights_kept_on_error(module: nn.Module, values: dict[str, object]) -> Iterator[None]:
    """Put the tensors of a module back if there is an exception.

    The memory of the new values keeps the old ones, where that is possible: both are exchanged, and
    ``values`` then has the module's own tensors, to be loaded as if they were new.

    Args:
        module: the module.
        values: name to new value; changed in place.
    """
    # By the place in memory, because state_dict returns other tensors, of the same memory.
    own = {_place_of(t) for t in (*module.parameters(), *module.buffers())}
    exchanged: list[tuple[Tensor, Tensor]] = []
    before: dict[str, Tensor] = {}
    try:
        for name, here in module.state_dict().items():
            new = values.get(name)
            if not isinstance(here, Tensor):
                continue
            if isinstance(new, Tensor) and _place_of(here) in own and _may_exchange(here, new):
                _exchange(here, new)
                exchanged.append((here, new))
                values[name] = here
            else:
                before[name] = here.clone()
        yield
    except BaseException:
        for here, new in reversed(exchanged):
            _exchange(here, new)
        module.load_state_dict(before, strict=False)
        raise


def _place_of(tensor: Tensor) -> tuple[int, torch.Size, torch.device]:
    local = local_part(tensor)
    return local.data_ptr(), local.shape, local.device


def _may_exchange(here: Tensor, new: Tensor) -> bool:
    a, b = local_part(here), local_part(new)
    same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return same and all(_fills_memory(t) and not t.is_conj() and not t.is_neg() for t in (a, b))


def _fills_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its memory for itself, in any order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _exchange(a: Tensor, b: Tensor) -> None:
    """Exchange the values of two tensors."""
    with torch.no_grad():
        for one, other in _blocks_of(local_part(a).detach(), local_part(b).detach()):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def _blocks_of(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the pairs of parts of two tensors that are exchanged one after the other."""
    if a.is_contiguous() and b.is_contiguous():
        return zip(a.view(-1).split(BLOCK), b.view(-1).split(BLOCK), strict=True)
    # One is in another memory format, so it has dimensions.
    rows = max(1, BLOCK * len(a) // a.numel())
    return zip(a.split(rows), b.split(rows), strict=True)


# --------------------------------------------------------------------------------------------------
# The optimizers (see the module ``optimizer``).


def _save_optimizers(saving: Saving) -> dict[str, Json]:
    state, tensors = saving.state, saving.groups["optimizer"]
    slot = apart_of(state)
    if slot is None or not slot.used:
        facts, saving.local = merge_processes(state, tensors)
        return {"optimizer": facts}
    every = encode_own_optimizers(state, tensors)
    if not state.backend.main:
        saving.add_own(tensors, "optimizer/")
    return {"optimizer": every[0], "own_optimizers": [None, *every[1:]]}


def _prepare_optimizers(saved: Restoring) -> Load:
    contents, module = saved.contents, unwrap(saved.state)
    shapes = {name: tensor.shape for name, tensor in model_tensors(contents).items()}
    facts, tensors = saved.facts["optimizer"], contents.groups["optimizer"]
    processes, rank = saved.facts.get("processes"), saved.state.backend.rank
    if rank and "own_optimizers" in saved.facts and saved.is_of_as_many:
        facts, tensors = saved.facts["own_optimizers"][rank], saved.own("optimizer/")
    optimizers = SavedOptimizer(
        facts, tensors, shapes, saved.path, processes, settings=saved.settings
    )
    # Before the check, which makes groups as they were.
    saved.undone.enter_context(optimizers_kept_on_error(saved.state))
    loads = prepare_loads(saved.state, optimizers, saved.strict)

    def load(state: TrainState) -> TrainState:
        if not {"model", TRAINED} & {*saved.parts}:  # an optimizer may change them as it loads
            saved.undone.enter_context(weights_kept_on_error(module, {}))
        for load_one in loads:
            load_one()
        ownership_of(state).copies = copies_in(state, saved.facts)
        return state

    return load


def _encode_optimizers(saving: Saving) -> None:
    encode_optimizers(saving.state, saving.groups["optimizer"])


# --------------------------------------------------------------------------------------------------
# The slots of middleware, and what the user keeps in `extra`.


def _save_slots(saving: Saving) -> dict[str, Json]:
    slots = saving.state.slots
    if averages := _averages_in(slots):  # each is saved in a file of its own
        slots = {**slots, **dict.fromkeys(averages)}
    if apart_of(saving.state) is not None:  # so is what processes have of their own
        slots = {**slots, LOCAL_SGD: None}
    return {"slots": _encode_mapping("slots", slots, saving.tensors)}


def _prepare_slots(saved: Restoring) -> Load:
    return _set_fields(slots=_decode_mapping("slots", saved))


def _save_extra(saving: Saving) -> dict[str, Json]:
    return {"extra": _encode_mapping("extra", saving.state.extra, saving.tensors, plain_only)}


def _prepare_extra(saved: Restoring) -> Load:
    return _set_fields(extra=_decode_mapping("extra", saved))


def check_mapping(part: str, value: object) -> Mapping[str, object]:
    """Return what a part of a state holds. Raise TypeError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{part} must be a mapping; it is {describe(value)}")
    return value


def _encode_mapping(
    part: str, value: object, tensors: dict[str, Tensor], other: AsParts = as_parts
) -> Json:
    """Return a mapping of the state as JSON, and add its tensors to ``tensors``."""
    try:
        return encode(dict(check_mapping(part, value)), tensors, part, other)
    except RecursionError:
        raise TypeError(
            f"{part} holds something that contains itself, or is nested too deeply"
        ) from None


def _decode_mapping(part: str, saved: Restoring) -> dict[str, Any]:
    value = decode(saved.facts[part], saved.tensors)
    if not isinstance(value, dict):
        raise TypeError(f"{part} is a {type(value).__name__}")
    return value


# --------------------------------------------------------------------------------------------------
# Averages of weights: each has a file that loads into the plain module.


def _averages_in(slots: Mapping[str, object]) -> dict[str, Average]:
    """Return the averages among slots, by name."""
    return {name: v for name, v in slots.items() if isinstance(v, Average)}


def _save_averages(saving: Saving) -> dict[str, Json]:
    module, groups, facts = unwrap(saving.state), saving.groups, {}
    for name, average in _averages_in(saving.state.slots).items():
        facts[name] = _encode_average(average, module, groups.setdefault(name, {}))
        saving.require(NEWER_FORMAT)
    return {"averages": facts} if facts else {}


def _encode_average(
    average: Average, module: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Json]:
    here = dict(named_tensors(module))
    names = {id(tensor): name for name, tensor in here.items()}
    # What is new to the average is that of the model in the file, and begins after a resume too.
    kept = {k: t for k, t in average.items() if k in here and average.fits(k, here[k])}
    places: dict[str, str] = {}  # of a tied tensor every name is in the file, and one is here
    for spelled, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            key = strip_compile_prefix(spelled)
            name = names.get(id(value), key)
            tensors[key] = as_safetensor(kept.get(name, value), key)
            places[name] = key
    for name, tensor in kept.items():
        if name not in places:  # the module does not save it
            tensors[name], places[name] = as_safetensor(tensor, name), name
    pairs = [name for name, tensor in kept.items() if tensor.dtype in PAIRS]
    found = {name: places[name] for name in kept}
    return {"count": average.count, "tensors": found, "complex": pairs}


def _prepare_averages(saved: Restoring) -> Load:
    """Return how to put averages in their slots. The log names those that do not fit the model."""
    here, found = dict(named_tensors(unwrap(saved.state))), {}
    if "model" in saved.parts:
        here |= _grown_alike(saved, model_tensors(saved.contents))
    for slot, facts in saved.facts.get("averages", {}).items():
        group = saved.contents.groups[slot]
        count, places, pairs = facts["count"], facts["tensors"], facts["complex"]
        tensors = {
            name: from_safetensor(group[key]) if name in pairs else group[key]
            for name, key in places.items()
        }
        if any(name not in here or here[name].shape != t.shape for name, t in tensors.items()):
            log.warning("restore: the average %r is of another model, and begins again", slot)
            found[slot] = None
        else:
            placed = {name: _place(t, here[name]) for name, t in tensors.items()}
            found[slot] = Average(placed, count)

    def load(state: TrainState) -> TrainState:
        slots = {name: found.get(name, value) for name, value in state.slots.items()}
        left_out = {name for name, average in found.items() if average is None}
        return attrs.evolve(state, slots={k: v for k, v in slots.items() if k not in left_out})

    return load


def _place(tensor: Tensor, like: Tensor) -> Tensor:
    return like_sharded(tensor.to(like.device), like.detach())


# --------------------------------------------------------------------------------------------------
# The weights and buffers of processes that update by themselves, and what they share (`local_sgd`).


def _save_apart(saving: Saving) -> dict[str, Json]:
    slot = apart_of(saving.state)
    if slot is None:
        return {}
    own: dict[str, Tensor] = {}
    names = encode({k: t.detach() for k, t in own_tensors(saving.state).items()}, own, OWN)
    if own or slot.used:  # the same in every process
        saving.add_own(own, "")
    outer = encode(slot.outer_state(), saving.tensors, LOCAL_SGD)
    return {"apart": {"own": names, "used": slot.used, "outer": outer}}


def _prepare_apart(saved: Restoring) -> Load:
    """Return how to put back what is this process's own, beside the average in the model.

    On another number of processes all continue from the average.
    """
    if (facts := saved.facts.get("apart")) is None:
        return _set_fields()
    outer, same, own = decode(facts["outer"], saved.tensors), saved.is_of_as_many, {}
    if same and "model" in saved.parts:
        here = saved.state.backend.device
        own = decode(facts["own"], {k: t.to(here) for k, t in saved.own("").items()})
    elif not same and facts["used"] and saved.state.backend.main:
        log.warning(
            "restore: local_sgd trained on %s processes, and this run has %d: each continues from "
            "the average of their weights, with the optimizer's state of the main process",
            *(saved.facts.get("processes"), saved.state.backend.data_size),
        )

    def load(state: TrainState) -> TrainState:
        slot = Apart(used=same and facts["used"])
        slot.take_outer(outer)
        if own or slot.shared:  # otherwise nothing is to be taken back
            slot.own, slot.mark = own, mark_of(state)
        return with_slot(state, LOCAL_SGD, slot)

    return load


# --------------------------------------------------------------------------------------------------
# The running metrics, and the history.


def _save_metrics(saving: Saving) -> dict[str, Json]:
    """Save the metrics over all processes, and those of each ("shares"), so that as many resume."""
    merged, every = engine_of(saving.state).gather(saving.state, COLLECTED)
    names = {name for own, _ in every for name in own}
    return {
        "metrics": encode(merged, saving.tensors, "metrics"),
        "shares": [
            encode(share, saving.tensors, f"shares.{rank}") for rank, (_, share) in enumerate(every)
        ],
        **({"own": sorted(names)} if every else {}),
    }


def _encode_metrics(saving: Saving) -> None:
    encode(dict(saving.state.metrics), saving.tensors, "metrics")


def _prepare_metrics(saved: Restoring) -> Load:
    facts, backend = saved.facts, saved.state.backend
    merged = _decode_metrics(_decode_mapping("metrics", saved), backend.device)
    shares = [
        _decode_metrics(decode(own, saved.tensors), backend.device)
        for own in facts.get("shares", ())
    ]
    metrics = engine_of(saved.state).continued(saved.state, merged, shares)

    def load(state: TrainState) -> TrainState:
        ownership_of(state).own_metrics.update(map(str, facts.get("own", ())))
        return attrs.evolve(state, metrics=metrics)

    return load


def _decode_metrics(metrics: Mapping[str, object], device: torch.device) -> dict[str, object]:
    return {name: restored(value, device) for name, value in metrics.items()}


def _save_history(saving: Saving) -> dict[str, Json]:
    saving.history = saving.encode_history(saving.state.history)
    return {"digest": saving.history.digest}  # it is itself written record by record


def encode_whole_history(history: History) -> EncodedHistory:
    """Return a history as it is in a checkpoint that has no files next to it."""
    rows = tuple(map(encode_record, history))
    return EncodedHistory(rest=rows, digest=functools.reduce(chain, rows, ""))


def _prepare_history(saved: Restoring) -> Load:
    history = decode_history(saved.facts["history"], saved.path)
    phases = decode_phases(saved.facts.get("phases", []))
    begun = max((phase.records for phase in phases), default=0)
    if begun > len(history):
        raise ValueError(f"a phase began with record {begun}, of {len(history)}")
    return _set_fields(history=history)


# --------------------------------------------------------------------------------------------------
# All parts, in the order of `state.json`.
#
# They are loaded in this order too. What is before the model only sets fields of a new state, and
# nothing after the optimizers can fail: so only those may change what states share (`Ownership`).

EVERY_PART = (
    Part("counters", _save_counters, _prepare_counters),
    Part("counters", _save_generators, _prepare_generators),
    Part("counters", _save_position, _prepare_position),
    Part("counters", _save_targets),  # not loaded: see `decode_targets`
    Part("model", _save_model, _prepare_model, _encode_module),
    Part(TRAINED, _save_model, _prepare_model, _encode_module),
    Part("optimizer", _save_optimizers, _prepare_optimizers, _encode_optimizers),
    Part("counters", _save_seconds, _prepare_seconds),
    Part("slots", _save_slots, _prepare_slots, _save_slots),
    Part("slots", _save_averages, _prepare_averages, _save_averages),
    Part("slots", _save_apart, _prepare_apart),
    Part("metrics", _save_metrics, _prepare_metrics, _encode_metrics),
    Part("extra", _save_extra, _prepare_extra, _save_extra),
    Part("history", _save_history, _prepare_history),
)
