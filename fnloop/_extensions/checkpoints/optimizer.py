"""Optimizers in checkpoints: saved, checked, and loaded, all of them or none."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import hashlib
import itertools
import json
import types
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._core.optimizers import Group
from fnloop._core.state import TrainState
from fnloop._extensions import extensions
from fnloop._extensions.checkpoints.compare import describe_value, find_difference
from fnloop._extensions.checkpoints.format import COLLECTED, CheckpointError, gather_encoded, log
from fnloop._extensions.checkpoints.named import (
    EXECUTION,
    UNSAVED,
    NamedOptimizer,
    is_list_of_groups,
    tensors_of_copy,
    walk_optimizers,
)
from fnloop._extensions.checkpoints.serialize import (
    PAIRS,
    Json,
    as_safetensor,
    decode,
    encode,
    from_flattened,
    from_safetensor,
    is_flattened,
    kinds_in,
    plain_only,
    plain_or_flattened,
    tensors_in,
)
from fnloop._extensions.checkpoints.shapes import resized
from fnloop.extend import (
    Ownership,
    Pending,
    Setting,
    checks,
    collectives,
    containers,
    fsdp,
    number_in,
)

# --------------------------------------------------------------------------------------------------
# The optimizers of a state in a checkpoint: one, or several by name; in one process, or several.
#
# One is kept as it is. Of several, the facts are kept under "several", and the names of their
# tensors begin with the name of the optimizer and a slash.
#
# An optimizer may keep the state of a parameter in one process only, as ZeRO-1 and distributed
# Muons do. Such an entry of the state, `state[parameter][key]`, is *local*. A checkpoint has the
# local entries of all processes, each written by a process that keeps it, and lists them with these
# processes (`LOCAL`). The same number of processes get back what they kept. On another number, it
# is the optimizer's secret which process continues an entry, so each process gets all of them. The
# entries that no update has changed since are then copies, which do not count at the next save.

_SEVERAL = "several"
WHAT = "its optimizer"  # what a process cannot save, in messages
LOCAL = "local"  # of the facts of an optimizer: [["state", parameter, key], ranks] of each entry
_Names = Sequence[str]
Entry = tuple[str, ...]  # the name of the optimizer, and the path in its facts


def encode_optimizers(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the facts of the optimizers of a state, and add their tensors to ``tensors``.

    Raises:
        TypeError, CheckpointError: something in one of them cannot be saved.
    """
    named = NamedOptimizer.of_state(state)
    if "" in named:
        return encode_optimizer(named[""], tensors)
    facts = {}
    for name, one in named.items():
        own: dict[str, Tensor] = {}
        facts[name] = encode_optimizer(one, own)
        for key, tensor in own.items():
            tensors[f"{name}/{key}"] = tensor
    return {_SEVERAL: facts}


def prepare_loads(
    state: TrainState,
    named: Mapping[str, NamedOptimizer],
    saved: SavedOptimizer,
    strict: bool,
) -> list[Load]:
    """Check that the saved optimizers fit those of a state, and return how to load each.

    Their groups are made as they were where ``unfreeze`` had changed them. Neither that nor a load
    that fails is undone here: see :func:`optimizers_kept_on_error`.

    Args:
        state: the state.
        named: its optimizers.
        saved: all that was saved, by :func:`encode_optimizers`.
        strict: whether the parameters must have the shapes that they had.

    Raises:
        CheckpointError: they are others, or do not fit.
    """
    facts = _by_name(saved.facts)
    if named.keys() != facts.keys():
        raise CheckpointError(
            f"{saved.path} has {_describe({k: v['class'] for k, v in facts.items()})}, and this "
            f"state has {_describe({k: one.class_name for k, one in named.items()})}. Create the "
            "former, or leave them out: restore(path, state, only=('model',))"
        )
    same = saved.processes == state.backend.contributors
    facts = {name: _own_facts(own, state.backend.rank, same) for name, own in facts.items()}
    held = {name: {*one.parameters()} for name, one in named.items()}
    groups = {name: len(one.optimizer.param_groups) for name, one in named.items()}
    for name, one in named.items():
        others = {p for other, names in held.items() if other != name for p in names}
        for regroup in extensions("groups of a checkpoint"):
            everything = {**one.own, **one.parameters()}
            regroup(one.optimizer, one.names, everything, facts[name]["param_groups"], others)
    loads = []
    for name, one in named.items():
        part = _part(saved, name, facts[name])
        if saved.settings is not None:
            own = attrs.evolve(saved.settings, owner=name, groups=groups[name])
            part = attrs.evolve(part, settings=own)
        loads.append(prepare_load(one, part, strict))
    return loads


def templates_of_optimizers(state: TrainState, facts: Mapping[str, Json]) -> dict[str, Tensor]:
    """Return, for the tensors of saved optimizers, the parameter that each belongs to, by name."""
    named, found = NamedOptimizer.of_state(state), {}
    for name, own in _by_name(facts).items():
        if name not in named:
            continue
        prefix = _prefix(name)
        for parameter, p in {**named[name].own, **named[name].parameters()}.items():
            found[f"{prefix}parameter.{parameter}"] = p
            encoded = own.get("state", {}).get(parameter)
            found |= {prefix + key: p for key in tensors_in(encoded)}
    return found


def _part(saved: SavedOptimizer, name: str, facts: Mapping[str, Json]) -> SavedOptimizer:
    """Return one of the saved optimizers."""
    if not name:
        return saved if facts is saved.facts else attrs.evolve(saved, facts=facts)
    prefix = _prefix(name)
    names = [name for name in saved.tensors if name.startswith(prefix)]
    # Popped, so that a tensor is freed as soon as the optimizer has a copy of it elsewhere.
    own = {name.removeprefix(prefix): saved.tensors.pop(name) for name in names}
    return attrs.evolve(saved, facts=facts, tensors=own)


def _describe(classes: Mapping[str, str]) -> str:
    if "" in classes:
        return f"one optimizer without a name ({classes['']})"
    return f"the optimizers {', '.join(f'{name} ({kind})' for name, kind in classes.items())}"


def _by_name(facts: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the facts of each optimizer; one alone has the name ""."""
    return facts.get(_SEVERAL, {"": facts})


# --- several processes


class _Offer(NamedTuple):
    """A local entry, as one process keeps it.

    Args:
        facts: the entry as JSON.
        checksum: of the entry, if several processes have it.
        restored: the checksum of what was restored, if another process may continue it; "" if only
            other processes were given it; None otherwise.
    """

    facts: Json
    checksum: str | None
    restored: str | None

    @property
    def is_copy(self) -> bool:
        """Whether it is as it was restored."""
        return self.restored is not None and self.restored == self.checksum


def check_groups(state: TrainState) -> None:
    """Raise CheckpointError if processes have other parameter groups. A collective."""
    groups = {name: one.group_names() for name, one in NamedOptimizer.of_state(state).items()}
    every = collectives.gather_from_all(groups, COLLECTED)
    for rank, theirs in enumerate(every):
        for name, first in every[0].items():
            if first != (other := theirs.get(name, [])):
                places = ("in process 0", f"in process {rank}")
                differences = _compare_names(first, other, places, "in other groups")
                raise CheckpointError(
                    f"the optimizer{f' {name!r}' if name else ''} has other parameters in process "
                    f"{rank} than in process 0 ({differences}), so a checkpoint "
                    "cannot merge its groups: give it all parameters in every process, and keep "
                    "state[p] in the process that updates p"
                )


def _compare_names(
    mine: Sequence[_Names], theirs: Sequence[_Names], places: Sequence[str], same: str
) -> str:
    """Return what differs in the names in groups, each named by its place, or ``same``."""
    one, other = ({*itertools.chain(*groups)} for groups in (mine, theirs))
    only = zip(places, (sorted(one - other), sorted(other - one)), strict=True)
    return "; ".join(f"only {place}: {checks.join_names(n)}" for place, n in only if n) or same


def merge_processes(
    state: TrainState, tensors: dict[str, Tensor]
) -> tuple[Mapping[str, Json], dict[str, bool]]:
    """Do what :func:`encode_optimizers` does, with what all processes keep. A collective.

    Where all processes keep the same entries, and made all of them, only their names are compared.

    Returns:
        The facts; and for each tensor of a local entry, whether this process writes it.

    Raises:
        TypeError, CheckpointError: something cannot be saved or merged; the message names it.
    """
    if state.backend.world_size == 1:
        return encode_optimizers(state, tensors), {}
    facts, mine = dict[str, Json](), dict[Entry, Json]()
    named, copies = NamedOptimizer.of_state(state), Ownership.of(state).notes.get("copies", {})

    def encode_names() -> tuple[int, bool]:
        facts.update(encode_optimizers(state, tensors))
        mine.update(_entries(facts))
        groups = [one.group_names() for one in named.values()]
        # A number, because this is gathered at every checkpoint, and nearly always all are alike.
        return zlib.crc32(repr((groups, sorted(mine))).encode()), bool(copies)

    marks = gather_encoded(encode_names, WHAT, CheckpointError)
    if {*marks} == {(marks[0][0], False)}:
        return facts, {}
    check_groups(state)
    every = collectives.gather_from_all(([*mine], [*copies]), COLLECTED)
    holders = Counter(entry for own, _ in every for entry in own)
    unsure = {entry for _, restored in every for entry in restored}
    doubtful = [e for e, count in holders.items() if count < len(every) or e in unsure]
    for entry in doubtful:
        _check_mergeable(entry, named[entry[0]], [entry in own for own, _ in every])
    offers = collectives.gather_from_all(
        {
            entry: _Offer(
                mine[entry],
                _checksum(entry, mine[entry], tensors) if holders[entry] > 1 else None,
                copies.get(entry),
            )
            for entry in doubtful
            if entry in mine
        },
        COLLECTED,
    )
    return _merge(facts, doubtful, offers, state)


def _entries(facts: Mapping[str, Json]) -> Iterator[tuple[Entry, Json]]:
    """Yield the entries of the state in the facts of optimizers."""
    for name, own in _by_name(facts).items():
        for parameter, held in own.get("state", {}).items():
            for key, value in held.items():
                yield (name, "state", parameter, key), value
        for key, value in own.get("state_of_all", {}).items():
            yield (name, "state_of_all", key), value
        for path in _paths_of_tensors(own.get("state_dict")):
            yield (name, "state_dict", *path), None  # only compared: it cannot be merged


def _paths_of_tensors(value: Json) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to each tensor in what was encoded."""
    if isinstance(value, dict) and "$tensor" in value:
        yield ()
        return
    inside = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        inside = value["$dict"] if "$dict" in value else value.items()
    for key, inner in inside:
        for path in _paths_of_tensors(inner):
            yield str(key), *path


def _check_mergeable(entry: Entry, named: NamedOptimizer, kept: Sequence[bool]) -> None:
    """Raise if an entry that only some processes keep cannot be merged.

    Args:
        entry: the entry.
        named: its optimizer.
        kept: whether each process keeps it.
    """
    why = None
    if named.has_own_state_dict:
        why = "it has its own state_dict. Keep that in optimizer.state, without a state_dict"
    elif named.sharded:
        why = "the model is sharded over processes. Keep the state of a parameter in all of them"
    if why and not all(kept):
        raise CheckpointError(
            f"{named.class_name} keeps {_spell(entry)} in process {kept.index(True)} and not in "
            f"process {kept.index(False)}. A checkpoint cannot merge that, because {why}"
        )


def _spell(entry: Entry) -> str:
    """Return an entry as messages name it."""
    name, _, *path = entry
    return ".".join(path) + (f" ({name!r})" if name else "")


def _checksum(entry: Entry, value: Json, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(json.dumps(value).encode())
    for name in tensors_in(value):
        whole = tensors[_prefix(entry[0]) + name].detach().cpu().resolve_conj().resolve_neg()
        found.update(whole.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _prefix(name: str) -> str:
    """Return what the names of the tensors of an optimizer begin with."""
    return f"{name}/" if name else ""


def _merge(
    facts: Mapping[str, Json],
    doubtful: Sequence[Entry],
    offers: Sequence[Mapping[Entry, _Offer]],
    state: TrainState,
) -> tuple[Mapping[str, Json], dict[str, bool]]:
    """Return what :func:`merge_processes` does, from what each process offers of some entries."""
    merged, local = copy.deepcopy(facts), {}
    for entry in doubtful:
        offered = {rank: own[entry] for rank, own in enumerate(offers) if entry in own}
        current = {rank: offer for rank, offer in offered.items() if not offer.is_copy}
        if len(current) == len(offers) and len({o.checksum for o in current.values()}) == 1:
            if entry in (copies := Ownership.of(state).notes.get("copies", {})):
                del copies[entry]  # every process continues it
            continue
        current = current or offered
        (owner, chosen), *others = current.items()
        for rank, other in current.items():
            if other.restored == "":
                raise CheckpointError(
                    f"{_spell(entry)} in the optimizer's state began from nothing in process "
                    f"{rank}: as many processes saved the checkpoint that was restored, and "
                    "another one kept it. Let the optimizer choose the process by the rank alone"
                )
        for rank, other in others:
            if other.checksum != chosen.checksum:
                raise CheckpointError(
                    f"{_spell(entry)} in the optimizer's state is not the same in process {owner} "
                    f"and in process {rank}, so a checkpoint cannot merge it: keep it where the "
                    "parameter is updated, or make it the same in all processes"
                )
        name, *path = entry
        own = _by_name(merged)[name]
        own.setdefault(LOCAL, []).append([path, [*current]])
        for key in path[:-1]:
            own = own.setdefault(key, {})
        own[path[-1]] = chosen.facts
        for tensor in tensors_in(chosen.facts):
            local[_prefix(name) + tensor] = owner == state.backend.rank
    return merged, local


def _own_facts(own: Mapping[str, Json], rank: int, same: bool) -> Mapping[str, Json]:
    """Return what a process gets of the facts of an optimizer.

    Args:
        own: the facts.
        rank: of the process.
        same: whether there are as many processes as when it was saved.
    """
    if not same or LOCAL not in own:
        return own
    elsewhere = {tuple(path) for path, ranks in own[LOCAL] if rank not in ranks}
    state = {
        name: {key: v for key, v in held.items() if ("state", name, key) not in elsewhere}
        for name, held in own["state"].items()
    }
    whole = own.get("state_of_all", {}).items()
    return {
        **own,
        "state": {name: held for name, held in state.items() if held or not own["state"][name]},
        "state_of_all": {k: v for k, v in whole if ("state_of_all", k) not in elsewhere},
    }


def copies_in(state: TrainState, facts: Mapping[str, Json]) -> dict[Entry, str]:
    """Return the checksums of the entries that another process may continue than this one.

    An entry that only other processes were given has the checksum "". What one process saved may
    all be local.

    Args:
        state: the state, with the restored optimizers.
        facts: the contents of ``state.json``.
    """
    if state.backend.world_size == 1:
        return {}
    rank, processes = state.backend.rank, facts.get("processes")
    same, found, mine = processes == state.backend.contributors, {}, {}
    tensors: dict[str, Tensor] = {}
    for name, one in NamedOptimizer.of_state(state).items():
        own = _by_name(facts["optimizer"])[name]
        local = {(name, *path): ranks for path, ranks in own.get(LOCAL, ())}
        ours = one.is_torch or one.has_own_state_dict or one.sharded
        if local or (processes == 1 and not ours):
            mine = mine or dict(_entries(encode_optimizers(state, tensors)))
        if processes == 1 and not ours:
            local = {entry: [] for entry in mine if entry[0] == name}
        for entry, ranks in local.items():
            if same and rank not in ranks:
                found[entry] = ""
            elif entry in mine and not (same and ranks == [rank]):
                found[entry] = _checksum(entry, mine[entry], tensors)
    return found


# --------------------------------------------------------------------------------------------------
# One optimizer: its groups; the state of its parameters, or its own state_dict, which has the
# settings too; and the parameters that the model does not have.


@attrs.frozen(eq=False)
class SavedOptimizer:
    """An optimizer as it was read from a checkpoint.

    Args:
        facts: what ``encode_optimizer`` returned.
        tensors: its tensors by name. Those of parameters are taken out as they are decoded, because
            a tensor may be copied then.
        shapes: name to shape of the model's tensors in the checkpoint.
        path: the checkpoint, for messages.
        processes: how many processes saved it; None if that is not known.
        mismatched: the names of the parameters that have another shape here.
        settings: compares settings of groups, and says which are taken from the state.
        takes: undoes after an exception that parameters beside the model take the shapes of the
            file; None if they do not take them.
    """

    facts: Mapping[str, Json]
    tensors: dict[str, Tensor]
    shapes: Mapping[str, torch.Size] = attrs.field(factory=dict)
    path: object = "the checkpoint"
    processes: int | None = None
    mismatched: Collection[str] = ()
    settings: Settings | None = None
    takes: contextlib.ExitStack | None = None


Load = Callable[[], None]


def encode_optimizer(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the facts of an optimizer, and add its tensors to ``tensors``.

    Raises:
        TypeError, CheckpointError: something in it cannot be saved; the message says where it is.
    """
    facts: dict[str, Json] = {"class": named.class_name, **_save_groups(named, tensors)}
    facts |= (_save_state_dict if named.has_own_state_dict else _save_state)(named, tensors)
    _save_beside(named, tensors)
    return facts


def prepare_load(named: NamedOptimizer, saved: SavedOptimizer, strict: bool = True) -> Load:
    """Check that a saved optimizer fits, and return how to load it.

    Args:
        named: the new optimizer.
        saved: the saved one.
        strict: whether the parameters must have the shapes that they had.

    Raises:
        CheckpointError: it is another optimizer, or does not fit.
    """
    if saved.facts["class"] != named.class_name:
        raise CheckpointError(
            f"{saved.path} has the state of {saved.facts['class']}, and the optimizer is "
            f"{named.class_name}. Create the former, or leave it out: "
            "restore(path, state, only=('model',))"
        )
    saved = attrs.evolve(saved, mismatched=_check_parameters(named, saved, strict))
    try:
        prepared = [_prepare_groups, _prepare_state]
        if "state_dict" in saved.facts:  # which has the settings and the state
            prepared = [_prepare_state_dict]
        loads = [prepare(named, saved) for prepare in (*prepared, _prepare_beside)]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{saved.path}: the optimizer's state cannot be restored: "
            f"{type(error).__name__}: {error}"
        ) from error

    def load() -> None:
        for load_field in loads:
            load_field()
        for group in named.optimizer.param_groups:
            share_scheduled_values(group)

    return load


def _check_parameters(named: NamedOptimizer, saved: SavedOptimizer, strict: bool) -> list[str]:
    """Check that the parameters are the saved ones. Return those whose shape is another.

    With ``strict`` there are none: a difference raises.
    """
    mine, theirs = named.group_names(), [group["params"] for group in saved.facts["param_groups"]]
    if strict and mine != theirs:
        same = "the same parameters in other groups, or in another order"
        raise CheckpointError(
            f"{saved.path} has an optimizer of other parameters: "
            f"{_compare_names(mine, theirs, ('here', 'in the checkpoint'), same)}. "
            "Make its groups as they were"
        )
    parameters, shape_of = named.parameters(), dict(saved.shapes)
    for name, p in parameters.items():
        if (value := saved.tensors.get(f"parameter.{name}")) is not None:
            shape_of[name] = value.shape[:-1] if p.dtype in PAIRS else value.shape
            if saved.takes is not None and shape_of[name] != p.shape:
                saved.takes.enter_context(resized(p, shape_of[name]))
    mismatched = [
        name for name, p in parameters.items() if name in shape_of and shape_of[name] != p.shape
    ]
    if mismatched and strict:
        both = [
            f"{name}: {tuple(shape_of[name])} saved, {tuple(parameters[name].shape)} here"
            for name in mismatched
        ]
        raise CheckpointError(
            f"{saved.path} has the optimizer's state of parameters of another shape: "
            f"{checks.join_names(both)}. Make them in the shapes that they had, or take the shapes "
            'of the file, with shapes="file"'
        )
    if mine != theirs and "state_dict" in saved.facts:
        # A whole state_dict fits all parameters or none.
        mismatched = mismatched or [name for group in mine for name in group]
    return mismatched


# --------------------------------------------------------------------------------------------------
# The parameter groups: their parameters by name, and their settings.
#
# Each setting is restored as the kind of value that the new group has.

NAMED_ONLY = (  # a checkpoint can only name these, and the new optimizer must have them
    *(type, enum.Enum, functools.partial),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(torch.device, torch.layout, torch.memory_format),
)


def _save_groups(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    own, encoded = named.has_own_state_dict, []
    groups = zip(named.group_names(), named.optimizer.param_groups, strict=True)
    for i, (names, group) in enumerate(groups):
        # What is in its own state_dict is not saved twice.
        settings = {k: v for k, v in group.items() if k == Setting.UNFROZEN and v} if own else group
        encoded.append({"params": names, **_encode_group(settings, tensors, f"param_groups.{i}")})
    return {"param_groups": encoded}


def _prepare_groups(named: NamedOptimizer, saved: SavedOptimizer) -> Load:
    groups = named.optimizer.param_groups
    pairs = zip(groups, saved.facts["param_groups"], strict=False)
    settings = [
        _decode_for(i, group, values, saved, _device_of([group]))
        for i, (group, values) in enumerate(pairs)
    ]

    def load() -> None:
        for group, values in zip(groups, settings, strict=False):
            for key in Setting.marks(group).keys() - values.keys():
                del group[key]
            assign_settings(group, values)

    return load


def _encode_group(
    group: Mapping[str, object], tensors: dict[str, Tensor], path: str
) -> dict[str, Json]:
    """Return the settings of a group as JSON that a person can read."""
    encoded = {}
    for key, value in group.items():
        if key in UNSAVED:
            continue
        if isinstance(value, NAMED_ONLY):
            encoded[key] = {"$setting": getattr(value, "__qualname__", str(value))}
        elif isinstance(value, Tensor) and not value.ndim and not value.is_complex():
            encoded[key] = _encode_scalar(value, group, tensors, path)
        else:
            encoded[key] = encode(value, tensors, f"{path}.{key}", plain_only)
    return encoded


def _encode_scalar(
    value: Tensor, group: Mapping[str, Json], tensors: dict[str, Tensor], path: str
) -> dict[str, Json]:
    encoded = {
        "$scalar": encode(_to_number(value), tensors, path),
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    parameters = [p for p in group["params"] if isinstance(p, Tensor)]
    if value.device.type == "cpu" and any(p.device.type != "cpu" for p in parameters):
        encoded["on_host"] = True
    return encoded


def _decode_for(
    i: int,
    group: Group,
    values: Mapping[str, Json],
    saved: SavedOptimizer,
    device: torch.device,
) -> Group:
    """Return the settings that the group at index i gets."""
    found = decode_group(values, group, saved.tensors, device, saved.path)
    return found if saved.settings is None else saved.settings.choose(i, group, found, saved.path)


def decode_group(
    saved: Mapping[str, Json],
    held: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    path: object,
) -> Group:
    """Return the saved settings of a group, each as the kind of value that the new group has.

    Args:
        saved: the settings as JSON.
        held: the new group.
        tensors: the tensors of the checkpoint.
        device: where tensors that the new group lacks are put.
        path: the checkpoint, for messages.
    """
    values = {}
    for key, raw in saved.items():
        if key in UNSAVED:
            continue
        if isinstance(raw, dict) and "$setting" in raw:
            if key not in held:
                raise CheckpointError(
                    f"{path}: {key} of a parameter group was {raw['$setting']}, which a checkpoint "
                    "can only name: create the optimizer with it"
                )
        elif isinstance(raw, dict) and "$scalar" in raw:
            value = _decode_scalar(key, raw, tensors, device, path)
            values[key] = _fit_setting(key, value, held, path)
        else:
            values[key] = _fit_setting(key, decode(raw, tensors), held, path)
    return values


def _decode_scalar(
    key: str, raw: Json, tensors: Mapping[str, Tensor], device: torch.device, path: object
) -> Tensor:
    number = decode(raw["$scalar"], tensors)
    if not isinstance(number, int | float):
        raise CheckpointError(
            f"{path}: {key} of a parameter group is {number!r}; a number was expected"
        )
    dtype = decode({"$dtype": raw["dtype"]}, tensors)
    return torch.tensor(number, dtype=dtype, device="cpu" if raw.get("on_host") else device)


def _fit_setting(key: str, value: Any, held: Mapping[str, object], path: object) -> object:
    """Return a setting as a tensor or as a number, whichever the new group has.

    Numbers and tensors of one element are interchangeable. Anything else stays as it is.
    """
    here = held.get(key)
    one = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
    if here is None:  # a schedule derives this setting from the one that its name contains
        here = number_in(held, Setting.of_note(key))
    if isinstance(here, Tensor):
        if not _fits_tensor(value, here):
            raise CheckpointError(
                f"{path}: {key} of a parameter group is {value!r} in the checkpoint and a tensor "
                f"of shape {tuple(here.shape)} here"
            )
        return torch.empty_like(here, requires_grad=False).copy_(torch.as_tensor(value))
    if isinstance(here, Real) and one:
        return _to_number(value)
    alike = (
        type(value) is type(here)
        or (isinstance(value, Mapping) and isinstance(here, Mapping))
        or (isinstance(value, Real | Tensor) and isinstance(here, Real))
    )
    if here is not None and value is not None and not alike:
        raise CheckpointError(
            f"{path}: {key} of a parameter group is {value!r} in the checkpoint and {here!r} here"
        )
    return value


def _fits_tensor(value: object, here: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.shape == here.shape or (value.ndim == here.ndim and value.numel() == 1)
    return isinstance(value, int | float) and not here.ndim


def _to_number(value: float | Tensor) -> object:
    if not isinstance(value, Tensor):
        return value
    return Setting.as_number(value) if value.is_floating_point() else value.item()


def _device_of(groups: list[Group]) -> torch.device:
    return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))


def assign_settings(group: Group, values: Mapping[str, object]) -> None:
    """Assign settings to a group.

    They are copied into the tensors of the group where they fit, because others may refer to those.
    """
    # A scheduled value may be the same tensor as the learning rate, so it is never copied into.
    inside = group.keys() - Setting.marks(group).keys()
    for key, value in values.items():
        here = group[key] if key in inside else None
        if (
            isinstance(here, Tensor)
            and isinstance(value, Tensor)
            and here.shape == value.shape
            and here.dtype == value.dtype
        ):
            here.data.copy_(value)
        else:
            group[key] = value


def share_scheduled_values(group: Group) -> None:
    """Make each value that a schedule set the same object as the group's value, if they are equal.

    A schedule compares the two objects to detect that something else has changed the value.
    """
    for mark, key in Setting.marks(group).items():
        used = number_in(group, key)
        if used is not None and bool(group[mark] == used):
            group[mark] = used


def settings_of(group: Group) -> list[str]:
    """Return the keys of the settings of a group that decide what its updates are.

    Example:
        >>> settings_of({"params": [], "lr": 0.05, "initial_lr": 0.1, "fused": True})
        ['lr']
    """
    return [key for key in Setting.names(group) if key not in ("name", *EXECUTION)]


def initial_setting(group: Group, key: str) -> object:
    """Return a setting of a group as it was before a schedule, of its whole or of its parts."""
    setting = Setting(group, key)
    value, initial = setting.value, setting.initial
    if initial is not value or not isinstance(value, tuple | list):
        by_hand = f"initial_{key}" in group and not setting.is_scheduled
        return group[f"initial_{key}"] if by_hand else initial
    return type(value)(Setting(group, f"{key}.{i}").initial for i in range(len(value)))


# --- settings of the state that a run continues with, instead of those that were saved


_OF_TORCH = (
    "A scheduler of torch has set {key} from the value that the run began with, and continues from "
    'it. To change it, set group["{key}"] after the resume, and begin a phase, which makes another '
    'scheduler: fit(..., phase="second")'
)


class _Change(NamedTuple):
    """A setting of a group whose initial value is another one than that of the checkpoint."""

    key: str
    group: str
    saved: object
    here: object
    by_torch: bool

    def __str__(self) -> str:
        one, other = (describe_value(Setting.as_number(value)) for value in (self.saved, self.here))
        return f"{self.key}{self.group} is {one} there, and {other} here"


@attrs.frozen
class Settings:
    """Says which settings of groups a resumed run takes from the state that it was given.

    What a schedule has moved is compared by its initial value, and taken as such.

    Args:
        given: the keys of these settings.
        left: receives what differs and is as it was saved.
        owner: the name of the optimizer.
        groups: how many groups it has in the state. Others, which ``unfreeze`` has made in the run,
            are as they were saved.
    """

    given: Collection[str]
    left: list[_Change] = attrs.field(factory=list)
    owner: str = ""
    groups: int = 0

    def choose(self, i: int, group: Group, saved: Group, path: object) -> Group:
        """Return the settings that a group gets, out of its own and those that were saved.

        Raises:
            CheckpointError: a scheduler of torch, which was saved too, has set what is to be taken.
        """
        if i >= self.groups:
            return saved
        chosen = {**saved}
        for key in filter(saved.__contains__, settings_of(group)):
            was, here = initial_setting(saved, key), initial_setting(group, key)
            if _are_same(was, here):
                continue
            by_torch = Setting(saved, key).is_set_by_torch
            if key not in self.given:
                self.left.append(_Change(key, self._label(i, group), was, here, by_torch))
            elif by_torch:
                raise CheckpointError(
                    f'{path}: given=("{key}",) would not last. {_OF_TORCH.format(key=key)}'
                )
            else:
                Setting.forget(chosen, key)
                chosen[key] = here.clone() if isinstance(here, Tensor) else here
        return chosen

    def _label(self, i: int, group: Group) -> str:
        owner = f" of {self.owner!r}" if self.owner else ""
        return f" of group {group.get('name', i)!r}{owner}" if self.groups > 1 else owner

    def explain(self) -> str | None:
        """Return what differs, and how to take what the state has; None if nothing does."""
        if not self.left:
            return None
        differing = checks.join_names([*map(str, self.left)], 5)
        text = (
            "the optimizer has other settings in the checkpoint than in this state, and the run "
            f"continues with those of the checkpoint: {differing}. "
        )
        fixed = [change.key for change in self.left if change.by_torch]
        keys = dict.fromkeys(change.key for change in self.left if not change.by_torch)
        if not keys:
            return text + _OF_TORCH.format(key=fixed[0])
        keys = dict.fromkeys((*self.given, *keys))
        given = ", ".join(f'"{key}"' for key in keys) + ("," if len(keys) == 1 else "")
        return f"{text}To take those of this state, write resume(folder, state, given=({given}))"


def _are_same(one: object, other: object) -> bool:
    one, other = Setting.as_number(one), Setting.as_number(other)
    numbers = isinstance(one, Real) and isinstance(other, Real)
    return (numbers and one == other) or find_difference(one, other, "") is None


# --------------------------------------------------------------------------------------------------
# The state of each parameter by name, and what the optimizer keeps for all of them.

NUMBERS = ("step", "eta", "mu", "mu_product")  # torch's optimizers keep one of these per parameter


def _save_state(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    state, on_host = named.holder.state, []
    facts: dict[str, Json] = {"state": {}}
    names = {id(p): name for name, p in named.parameters().items()}
    for p in state:  # in its order: parameters may have been trained later than others
        if (name := names.get(id(p))) is not None:
            before = len(tensors)
            facts["state"][name] = _encode_state(state[p], tensors, name)
            # From the end: a list of all for each parameter takes quadratic time.
            new = list(itertools.islice(reversed(tensors), len(tensors) - before))[::-1]
            on_host += [key for key in new if tensors[key].device.type == "cpu" != p.device.type]
    shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    if shared:
        facts["state_of_all"] = _encode_state(shared, tensors, "state_of_all")
    if on_host:
        facts["on_host"] = on_host
    return facts


def _prepare_state(named: NamedOptimizer, saved: SavedOptimizer) -> Load:
    parameters, held = named.parameters(), named.holder.state
    state = {parameters[name]: v for name, v in _decode_state(named, saved).items()}
    state |= decode(saved.facts.get("state_of_all", {}), saved.tensors)

    def load() -> None:
        held.clear()
        held.update(state)

    return load


def _encode_state(value: object, tensors: dict[str, Tensor], path: str) -> Json:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{path} in the optimizer's state is a {type(value).__name__}; "
            "a checkpoint expects a dict"
        )
    return encode(dict(value), tensors, path, plain_or_flattened)


def _decode_state(named: NamedOptimizer, saved: SavedOptimizer) -> dict[str, object]:
    """Return the state of each parameter by name, where the parameter is."""
    on_host = set(saved.facts.get("on_host", ()))
    # With the tensors, so that no other tensor gets one of these ids.
    stays = {id(tensor): tensor for name, tensor in saved.tensors.items() if name in on_host}
    kept = {named.names[id(p)] for group in named.holder.param_groups for p in group["params"]}
    parameters, templates, found = named.parameters_with_groups(), _templates_for(named, saved), {}
    total = sum(p.numel() * (1 + p.is_complex()) for p, _ in parameters.values())
    for name, encoded in saved.facts["state"].items():
        if name in kept and name not in saved.mismatched:
            value, (p, group) = decode(encoded, saved.tensors), parameters[name]
            if not isinstance(value, dict):
                raise CheckpointError(f"{saved.path}: the optimizer's state is not a mapping")
            if named.is_torch:
                _check_state(named.class_name, name, p, value, total, saved.path)
            found[name] = _move_state(value, p, group, stays, templates)
            for key in tensors_in(encoded):
                del saved.tensors[key]
    return found


def _templates_for(named: NamedOptimizer, saved: SavedOptimizer) -> Mapping[str, Tensor]:
    """Return a tensor of each subclass that the saved state has, as this optimizer makes them.

    The checkpoint only names the classes, and a new optimizer has no state yet. So a copy of it
    updates, for each class, the smallest parameter whose state has one.
    """
    parameters, found = named.parameters(), {}
    for name, encoded in saved.facts["state"].items():
        for kind in filter(is_flattened, kinds_in(encoded)):
            if name in parameters:
                found.setdefault(kind, []).append((parameters[name].numel(), name))
    if not found:
        return {}
    try:
        made = tensors_of_copy(named, {min(each)[1] for each in found.values()})
    except Exception as error:
        if containers.is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{saved.path} has an optimizer's state in {_class_names(found)}, and a trial update "
            f"of {named.class_name}, which would make such tensors, raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if lacking := [kind for kind in found if kind not in made]:
        raise CheckpointError(
            f"{saved.path} has an optimizer's state in {_class_names(lacking)}, and "
            f"{named.class_name} keeps none there: create it with the settings that it had"
        )
    return made


def _class_names(kinds: Iterable[str]) -> str:
    return checks.join_names([kind.split(".")[-1] for kind in kinds])


def _move_state(
    value: Any,
    parameter: Tensor,
    group: Group,
    stays: Mapping[int, Tensor],
    templates: Mapping[str, Tensor],
    key: object = None,
) -> Any:
    """Move the state of a parameter to its device.

    Tensors that were on the host stay there. So does a step count, unless the optimizer computes in
    a way that needs it on the device. Tensors of subclasses are made as the templates are.
    """
    if isinstance(value, dict | list | tuple):
        parts = containers.parts_of(value) or ()
        moved = [_move_state(v, parameter, group, stays, templates, k) for k, v in parts]
        return containers.with_parts(value, moved)
    move = lambda part: part if id(part) in stays else part.to(parameter.device)
    if isinstance(value, Pending):
        return from_flattened(value, templates[value.kind], move)
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        on_device = group.get("capturable") or group.get("fused")
        return value.to(parameter.device) if on_device else value
    value = move(value)
    if value.shape != parameter.shape:
        return value
    value = fsdp.like_sharded(value, parameter)
    if group.get("fused") and value.stride() != parameter.stride():
        # It reads both as they are in memory. The parameter may be in channels_last, or not.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value


def _check_state(
    class_name: str, name: str, p: Tensor, value: Mapping[str, object], total: int, path: object
) -> None:
    """Raise if the state of a parameter cannot be that of an optimizer of torch.

    Its next update would otherwise fail somewhere inside torch.

    Args:
        class_name: the class of the optimizer.
        name, p, value: the parameter, and its state.
        total: how many real numbers all parameters have together.
        path: the checkpoint, for messages.
    """
    for key, held in value.items():
        shapes: list[tuple[int, ...]] = [()] if key in NUMBERS else [tuple(p.shape)]
        if class_name == "Adafactor" and p.ndim > 1:
            shapes += [(*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])]
        elif class_name == "LBFGS":
            shapes = [(), (total,)]
        for item in held if isinstance(held, list) and class_name == "LBFGS" else [held]:
            if not _may_be_state(item, shapes, p, class_name):
                raise CheckpointError(
                    f"{path}: {key} of {name} in the optimizer's state is {describe_value(item)}, "
                    f"which {class_name} cannot continue with: "
                    f"the parameter is {describe_value(p)}"
                )


def _may_be_state(
    item: object, shapes: list[tuple[int, ...]], parameter: Tensor, class_name: str
) -> bool:
    if not isinstance(item, Tensor):
        # SparseAdam counts in a number, and LBFGS keeps most of what it knows in numbers.
        has_numbers = class_name == "LBFGS" or (class_name == "SparseAdam" and shapes == [()])
        return has_numbers and (item is None or isinstance(item, int | float))
    if item.is_complex():
        return tuple(item.shape) in shapes and parameter.is_complex()
    return tuple(item.shape) in shapes and item.is_floating_point()


# --------------------------------------------------------------------------------------------------
# The state_dict of an optimizer that has its own.


def _save_state_dict(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    if named.sharded:
        raise CheckpointError(
            f"{named.class_name} has its own state_dict and the model is sharded over processes, "
            "so it is unknown which of its tensors are shards. "
            "Use an optimizer of torch.optim, or a model that is not sharded"
        )
    return {"state_dict": _encode_state_dict(named.holder.state_dict(), tensors, "state_dict")}


def _prepare_state_dict(named: NamedOptimizer, saved: SavedOptimizer) -> Load:
    optimizer, class_name = named.optimizer, named.class_name
    if saved.mismatched:
        log.warning(
            "restore: left unchanged: the state of %s, which has other parameters", class_name
        )
        return lambda: None
    device = _device_of(optimizer.param_groups)
    held = optimizer.state_dict()
    expected = _decode_state_dict(saved.facts["state_dict"], held, saved, device)

    def load() -> None:
        before = [
            (one, one.param_groups, [*one.param_groups]) for one in walk_optimizers(optimizer)
        ]
        try:
            optimizer.load_state_dict(containers.map_leaves(expected))
            _restore_dtypes(expected, optimizer.state_dict())
            difference = find_difference(expected, optimizer.state_dict(), "state_dict")
        except Exception as error:
            if containers.is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"{saved.path}: {class_name}.load_state_dict does not accept what its state_dict "
                f"returned: {type(error).__name__}: {error}"
            ) from error
        if difference:
            raise CheckpointError(
                f"{saved.path}: {class_name}.load_state_dict does not restore what its state_dict "
                f"returned: {difference}. Fix it in a subclass"
            )
        for one, groups, objects in before:
            _keep_group_objects(one, groups, objects)

    return load


def _encode_state_dict(value: object, tensors: dict[str, Tensor], path: str) -> Json:
    """Return a state_dict as JSON. Its groups are encoded as by :func:`_encode_group`.

    That includes the groups of optimizers inside.
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and not key.startswith("$") for key in value
    ):
        _reject_tensor_keys(value, path)
        return encode(value, tensors, path, plain_only)
    encoded = {}
    for key, inner in value.items():
        at = f"{path}.{key}"
        if is_list_of_groups(key, inner):
            encoded[key] = [
                {
                    "params": list(group["params"]),
                    **_encode_group(group, tensors, f"{at}.{i}"),
                }
                for i, group in enumerate(inner)
            ]
            # Raises if the parameters are not plain positions.
            encode([group["params"] for group in encoded[key]], {}, at)
        else:
            encoded[key] = _encode_state_dict(inner, tensors, at)
    return encoded


def _reject_tensor_keys(value: object, path: str) -> None:
    if isinstance(value, Mapping) and any(isinstance(key, Tensor) for key in value):
        raise TypeError(
            f"{path} has tensors as keys, which mean nothing in another process: "
            "use the positions of the parameters"
        )


def _decode_state_dict(
    encoded: Json, held: object, saved: SavedOptimizer, device: torch.device
) -> Any:
    """Return a state_dict from JSON, with the unsaved settings of the new one (``held``)."""
    if not isinstance(encoded, dict) or any(key.startswith("$") for key in encoded):
        return decode(encoded, saved.tensors)
    held = held if isinstance(held, Mapping) else {}
    decoded = {}
    for key, value in encoded.items():
        if is_list_of_groups(key, value):
            groups: list[Group] = list(held.get(key, ()))
            groups += [{}] * (len(value) - len(groups))
            decoded[key] = [
                {name: now for name, now in group.items() if name in UNSAVED or name in settings}
                | _decode_for(i, group, settings, saved, device)
                | {"params": list(settings["params"])}
                for i, (settings, group) in enumerate(zip(value, groups, strict=False))
            ]
        else:
            decoded[key] = _decode_state_dict(value, held.get(key), saved, device)
    return decoded


def _restore_dtypes(expected: object, held: Any) -> None:
    """Restore tensors that ``load_state_dict`` has cast to the dtype of their parameter.

    The ``load_state_dict`` of torch does that. ``held`` is what ``state_dict`` returns. Its dicts
    and lists are those of the optimizer, unless the optimizer copies them.
    """
    for key, value, now in containers.pairs_of(expected, held) or ():
        if not isinstance(value, Tensor) or not isinstance(now, Tensor):
            _restore_dtypes(value, now)
        elif value.dtype != now.dtype and value.shape == now.shape and not isinstance(held, tuple):
            held[key] = value.to(now.device)


def _keep_group_objects(optimizer: Optimizer, groups: list[Group], objects: list[Group]) -> None:
    """Move loaded settings into the group objects that were there before loading.

    The ``load_state_dict`` of torch replaces the groups by new ones. An optimizer around another
    one may hold its groups, and so may a schedule or a graph.
    """
    new = optimizer.param_groups
    if new is groups or len(new) != len(objects):
        return
    for group, settings in zip(objects, new, strict=True):
        if group is not settings:
            for key in [key for key in group if key not in settings]:
                del group[key]
            assign_settings(group, settings)
    groups[:] = objects
    if "param_groups" in vars(optimizer):  # not a property of its class
        optimizer.param_groups = groups


# --------------------------------------------------------------------------------------------------
# The parameters that the model does not have: no other file of a checkpoint has them.


def _save_beside(named: NamedOptimizer, tensors: dict[str, Tensor]) -> None:
    for name, p in named.parameters().items():
        if name in named.foreign:
            tensors[f"parameter.{name}"] = as_safetensor(p, name)


def _prepare_beside(named: NamedOptimizer, saved: SavedOptimizer) -> Load:
    def load() -> None:
        for name, p in named.parameters().items():
            value = saved.tensors.get(f"parameter.{name}")
            if value is not None and name not in saved.mismatched:
                value = from_safetensor(value) if p.dtype in PAIRS else value
                p.data.copy_(fsdp.like_sharded(value, p))

    return load


# --------------------------------------------------------------------------------------------------
# Undo what was done to optimizers, if one of them fails.


@contextlib.contextmanager
def optimizers_kept_on_error(named: Collection[NamedOptimizer]) -> Iterator[None]:
    """Put all that optimizers hold back if there is an exception."""
    held = [_Held.by(inner) for one in named for inner in walk_optimizers(one.optimizer)]
    beside = [p for one in named for name, p in one.parameters().items() if name in one.foreign]
    weights = [(p, p.detach().clone()) for p in beside]
    # Their load_state_dict may load in place, into tensors that the copies above share.
    alone = [one.optimizer for one in named if one.has_own_state_dict]
    copied = lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf
    reported = [(one, containers.map_leaves(one.state_dict(), copied)) for one in alone]
    try:
        yield
    except BaseException:
        for one in held:
            one.put_back()
        for p, weight in weights:
            p.data.copy_(weight)
        for one, was in reported:
            with contextlib.suppress(Exception):
                if find_difference(was, one.state_dict(), ""):
                    one.load_state_dict(was)
        raise


class _Held(NamedTuple):
    """What an optimizer holds; the tensors of the state are shared with it."""

    optimizer: Optimizer
    attributes: dict[str, object]
    state: dict[Tensor, object]
    put_groups_back: Callable[[], None]

    @classmethod
    def by(cls, optimizer: Optimizer) -> _Held:
        """Return what an optimizer holds now."""
        state = {key: containers.map_leaves(held) for key, held in optimizer.state.items()}
        return cls(optimizer, dict(vars(optimizer)), state, Setting.hold(optimizer))

    def put_back(self) -> None:
        """Give it back to the optimizer."""
        vars(self.optimizer).clear()
        vars(self.optimizer).update(self.attributes)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        self.put_groups_back()
