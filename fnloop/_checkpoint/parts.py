"""The parts of a checkpoint, but for the optimizers."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.collectives import gather_objects
from fnloop._backend.fsdp import like_sharded, local_part
from fnloop._backend.processes import Backend
from fnloop._backend.torch_compat import loads_by_itself, strip_compile_prefix
from fnloop._checkpoint.format import (
    COLLECTED,
    COUNTERS,
    PARTS,
    TRAINED,
    TRAINING,
    CheckpointError,
    Contents,
)
from fnloop._core.averages import Average, named_tensors
from fnloop._core.history import decode_phases
from fnloop._core.rng import SEED_BITS
from fnloop._core.runs import (
    Position,
    RunInfo,
    check_position,
    decode_left,
    decode_stop,
    left_in_events,
)
from fnloop._core.serialize import Json, as_safetensor, decode, encode, from_safetensor, has_pending
from fnloop._core.state import TrainState, unwrap
from fnloop._display.checks import describe, join_names
from fnloop._display.screen import log

# --------------------------------------------------------------------------------------------------
# The parts of a state, and which of them a checkpoint holds.
#
# A checkpoint that was saved with `only=...` is *partial*: it lists its parts in `state.json` and
# in the manifest. A run cannot be resumed from it.

_NAMES = (*PARTS, TRAINED)


def read_parts(owner: str, only: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts that ``only`` names, all of them for None.

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
    return parts


def parts_to_save(owner: str, only: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts that ``only`` names, in one order, each once.

    "trained" is a part of the model, and is left out next to it.

    Raises:
        ValueError: it is something else, or names none.
    """
    given = read_parts(owner, only)
    return tuple(
        part for part in _NAMES if part in given and not (part == TRAINED and "model" in given)
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
# Load the saved model into a module, or leave the module as it was.

BLOCK = 1 << 20  # elements that are exchanged at a time


class PreparedModel:
    """How to load a model that fits.

    Args:
        fitting: what is loaded, by the names in the module.
        load: loads what :attr:`fitting` has then.
    """

    def __init__(
        self, fitting: dict[str, object], load: Callable[[Mapping[str, object]], None]
    ) -> None:
        self.fitting, self._load = fitting, load

    def __call__(self) -> None:
        """Load it."""
        self._load(self.fitting)


def with_training_weights(contents: Contents, parts: Sequence[str]) -> Contents:
    """Return the contents with the weights to load: with the optimizers, those of training."""
    if "optimizer" not in parts or not contents.facts.get(TRAINING, False):
        return contents
    training = contents.averages[TRAINING]
    if unknown := training.keys() - contents.model.keys():
        raise KeyError(f"{min(unknown)} is a weight to train with, but not one of the model")
    return attrs.evolve(contents, model={**contents.model, **training})


def prepare_model(
    contents: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path
) -> PreparedModel:
    """Check that the saved model fits, and return how to load it.

    With the counters, it restores which parameters are frozen and which modules are in evaluation
    mode. Then the dtypes must be the same too; weights alone may be cast.

    Args:
        contents, state, parts, strict, path: as in ``restore_contents``.
    """
    module, facts = unwrap(state), contents.facts["model"]
    _check_sizes(module, path)
    trained = "model" not in parts
    flags = "counters" in parts and not trained
    frozen, evaluating = (facts[k] if flags else [] for k in ("frozen", "evaluating"))
    spelled = {strip_compile_prefix(key): key for key in module.state_dict()}
    mine = {strip_compile_prefix(key): value for key, value in module.state_dict().items()}
    extra = {name: decode(value, contents.slots) for name, value in facts["extra_state"].items()}
    saved = {**model_tensors(contents), **extra}
    if trained:
        saved = _trained_parts(saved, contents, module)
    resized = {k for k, here in mine.items() if _resizes(module, spelled[k], saved.get(k), here)}
    rest = ({k: v for k, v in tensors.items() if k not in resized} for tensors in (saved, mine))
    faults = _compare_models(*rest, dtypes=flags)
    if trained:
        _warn_of_untrained(module, faults.pop("missing in the checkpoint"))
    found = "; ".join(f"{what}: {join_names(which)}" for what, which in faults.items() if which)
    if found and strict:
        part = TRAINED if trained else "model"
        raise CheckpointError(
            f"{path} is of another model ({facts['class']}). {found}. Create the same model, or "
            f"restore what matches: restore(path, state, only=('{part}',), strict=False)"
        )
    if found:
        log.warning("restore: left unchanged: %s", found)
    fitting = {
        spelled[name]: _shard_like(value, mine[name])
        for name, value in saved.items()
        if name in resized or (name in mine and not _differ_in_shape(value, mine[name]))
    }

    def load(fitting: Mapping[str, object]) -> None:
        missing = module.load_state_dict(fitting, strict=False).missing_keys
        if trained:
            missing = [name for name in missing if name in fitting]
        if strict and missing:
            raise CheckpointError(
                f"{path}: the model took no value for {join_names(missing)}: its hooks rename keys"
            )
        if flags:
            for name, p in module.named_parameters():
                p.requires_grad_(strip_compile_prefix(name) not in frozen)
            for name, submodule in module.named_modules():
                submodule.training = strip_compile_prefix(name) not in evaluating

    return PreparedModel(fitting, load)


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
    except Exception:  # it is refused, by name
        return False
    return trial.get_buffer(own).shape == there.shape  # type: ignore[attr-defined]


def _trained_parts(
    saved: Mapping[str, object], contents: Contents, module: nn.Module
) -> dict[str, object]:
    """Return what a checkpoint holds of the parameters that required gradients."""
    if "model" not in held_parts(contents.facts):
        return dict(saved)
    names = {strip_compile_prefix(name) for name, _ in _parameters(module)}
    names -= {*contents.facts["model"]["frozen"]}
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


def model_tensors(contents: Contents) -> dict[str, Tensor]:
    """Return the saved tensors of the model, those of complex128 as such."""
    pairs = contents.facts.get("model", {}).get("complex", ())
    return {
        name: from_safetensor(tensor) if name in pairs else tensor
        for name, tensor in contents.model.items()
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
# Averages of weights in a checkpoint: each has a file that loads into the plain module.


def without_averages(slots: Mapping[str, object]) -> Mapping[str, object]:
    """Return slots with None in the place of each average, which is saved in a file of its own."""
    averages = _averages_in(slots)
    return {**slots, **dict.fromkeys(averages)} if averages else slots


def _averages_in(slots: Mapping[str, object]) -> dict[str, Average]:
    """Return the averages among slots, by name."""
    if not isinstance(slots, Mapping):
        return {}
    return {name: v for name, v in slots.items() if isinstance(v, Average)}


def encode_averages(
    state: TrainState, group: Callable[[str], dict[str, Tensor]]
) -> dict[str, Json]:
    """Return the facts of all averages of a state, by name.

    Args:
        state: the state.
        group: returns the group of tensors of an average, by its name; they are added to it.
    """
    return {
        name: _encode(average, unwrap(state), group(name))
        for name, average in _averages_in(state.slots).items()
    }


def _encode(average: Average, module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Json]:
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    places: dict[str, str] = {}  # of a tied tensor every name is in the file, and one is here
    for spelled, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            key = strip_compile_prefix(spelled)
            name = names.get(id(value), key)
            tensors[key] = as_safetensor(average.get(name, value))
            places[name] = key
    for name, tensor in average.items():
        if name not in places:  # the module does not save it
            tensors[name], places[name] = as_safetensor(tensor), name
    pairs = [name for name, tensor in average.items() if tensor.dtype is torch.complex128]
    kept = {name: places[name] for name in average}
    return {"count": average.count, "tensors": kept, "complex": pairs}


def with_averages(
    slots: Mapping[str, object], contents: Contents, state: TrainState
) -> dict[str, object]:
    """Return slots with the averages of weights that fit the model, in their places."""
    saved, found = contents.facts.get("averages", {}), _decode(contents, state)
    return {k: found.get(k, v) for k, v in slots.items() if k not in saved or k in found}


def _decode(contents: Contents, state: TrainState) -> dict[str, Average]:
    """Return the averages of a checkpoint that fit the model of a state; the log names others."""
    here = dict(named_tensors(unwrap(state)))
    found = {}
    for slot, facts in contents.facts.get("averages", {}).items():
        saved = contents.averages[slot]
        count, places, pairs = facts["count"], facts["tensors"], facts["complex"]
        tensors = {
            name: from_safetensor(saved[key]) if name in pairs else saved[key]
            for name, key in places.items()
        }
        if any(name not in here or here[name].shape != t.shape for name, t in tensors.items()):
            log.warning("restore: the average %r is of another model, and begins again", slot)
            continue
        placed = {name: _place(t, here[name]) for name, t in tensors.items()}
        found[slot] = Average(placed, count)
    return found


def _place(tensor: Tensor, like: Tensor) -> Tensor:
    return like_sharded(tensor.to(like.device), like.detach())


# --------------------------------------------------------------------------------------------------
# The counters of a checkpoint, and the time that was spent until it was written.


def updates_by_name(facts: Mapping[str, Json], state: TrainState) -> dict[str, int]:
    """Return the updates of each optimizer of a state; those of all, if it had another name."""
    saved = facts.get("updates", {})
    return {name: _check_count(name, saved.get(name, facts["step"])) for name in state.updates}


def _check_count(name: str, value: Json, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{name} is {value!r:.60}")
    return value


def check_counters(facts: Mapping[str, Json]) -> dict[str, object]:
    """Return the saved counters, the stop, and what was left at that boundary.

    Raises:
        TypeError: one of them cannot be a counter.
    """
    counters: dict[str, object] = {name: facts[name] for name in COUNTERS if name != "stop"}
    for name, value in counters.items():
        _check_count(name, value, SEED_BITS if name == "seed" else 1 << 62)
    events, left = left_in_events(facts.get("news", []))
    return counters | {
        "stop": decode_stop(facts["stop"], facts.get("stop_kind")),
        "events": events,
        "left": decode_left(facts["left"]) if "left" in facts else left,
        "phases": decode_phases(facts.get("phases", [])),
        "ends": "epoch" if facts.get("ends") else None,
    }


def check_seconds(facts: Mapping[str, Json]) -> float:
    """Return the time spent in runs; 0 in checkpoints of older versions, which do not have it.

    Raises:
        TypeError: it cannot be a time.
    """
    value = facts.get("seconds", 0.0)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise TypeError(f"seconds is {value!r:.60}")
    return float(value)


# --------------------------------------------------------------------------------------------------
# The position of the training loader in a checkpoint that is written in mid-epoch.

POSITIONS = "positions"  # a key of the facts, and what the names of their tensors begin with


def encode_positions(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the position of the loader as facts; those of all processes if each has its shard.

    A position that is not plain data is left out, with a warning: the run can be resumed all the
    same, by reading the loader again.
    """
    every = gather_objects(state.position, COLLECTED)
    if None in every:
        return {}
    if state.position is not None and state.position["shards"] == 1:
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


def decode_position(
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
# The targets of a run in a checkpoint, so that an update of it can be made again.
#
# A schedule that depends on the length of the run sets the same rate then.

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


def encode_targets(run: RunInfo) -> dict[str, Json]:
    """Return the targets of a run as JSON."""
    return {"epochs": run.epochs, "steps": run.total_steps}


def decode_targets(facts: Mapping[str, Json]) -> Targets | None:
    """Return the targets of the run that wrote a checkpoint; None if it was written by none.

    Checkpoints of older versions do not have them.
    """
    saved = facts.get(TARGETS)
    if saved is None:
        return None
    targets = Targets(saved["epochs"], saved["steps"])
    return None if targets == Targets(None, None) else targets
