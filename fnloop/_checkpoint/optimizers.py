"""The optimizers of a state in a checkpoint: one, or several by name; in one process, or several.

One is kept as it is. Of several, the facts are kept under "several", and the names of their tensors
begin with the name of the optimizer and a slash.

An optimizer may keep the state of a parameter in one process only, as ZeRO-1 and distributed Muons
do. Such an entry of the state, ``state[parameter][key]``, is *local*. A checkpoint has the local
entries of all processes, each written by a process that keeps it, and lists them with these
processes (``LOCAL``). The same number of processes get back what they kept. On another number, it
is the optimizer's secret which process continues an entry, so each process gets all of them. The
entries that no update has changed since are then copies, which do not count at the next save.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from fnloop._backend.collectives import gather_from_all
from fnloop._checkpoint.format import COLLECTED, CheckpointError
from fnloop._checkpoint.optimizer import NamedOptimizer, has_own_state_dict, is_torch_optimizer
from fnloop._checkpoint.optimizer_load import PreparedLoad, SavedOptimizer, prepare_load
from fnloop._checkpoint.optimizer_save import encode_optimizer
from fnloop._checkpoint.regroup import regroup
from fnloop._core.serialize import Json, tensors_in
from fnloop._core.state import TrainState, ownership_of
from fnloop._display.checks import join_names

__all__ = [
    "check_groups",
    "copies_in",
    "encode_optimizers",
    "merge_processes",
    "prepare_loads",
    "templates_of_optimizers",
]

_SEVERAL = "several"
LOCAL = "local"  # of the facts of an optimizer: [["state", parameter, key], ranks] of each entry
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


def prepare_loads(state: TrainState, saved: SavedOptimizer, strict: bool) -> list[PreparedLoad]:
    """Check that the saved optimizers fit those of a state, and return how to load each.

    Their groups are made as they were where ``unfreeze`` had changed them.

    Args:
        state: the state.
        saved: all that was saved, by :func:`encode_optimizers`.
        strict: whether the parameters must have the shapes that they had.

    Raises:
        CheckpointError: they are others, or do not fit.
    """
    named, facts = NamedOptimizer.of_state(state), _by_name(saved.facts)
    if named.keys() != facts.keys():
        raise CheckpointError(
            f"{saved.path} has {_describe({k: v['class'] for k, v in facts.items()})}, and this "
            f"state has {_describe({k: one.class_name for k, one in named.items()})}. Create the "
            "former, or leave them out: restore(path, state, only=('model',))"
        )
    same = saved.processes == state.backend.data_size
    facts = {name: _own_facts(own, state.backend.rank, same) for name, own in facts.items()}
    held = {name: {*one.parameters()} for name, one in named.items()}
    for name, one in named.items():
        others = {p for other, names in held.items() if other != name for p in names}
        regroup(one, facts[name]["param_groups"], others)
    return [
        prepare_load(one, _part(saved, name, facts[name]), strict) for name, one in named.items()
    ]


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
        return attrs.evolve(saved, facts=facts)
    prefix = _prefix(name)
    names = [name for name in saved.tensors if name.startswith(prefix)]
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
    every = gather_from_all(groups, COLLECTED)
    for rank, theirs in enumerate(every):
        for name, first in every[0].items():
            mine, other = (set(itertools.chain(*found)) for found in (first, theirs.get(name, [])))
            if first != theirs.get(name):
                raise CheckpointError(
                    f"the optimizer{f' {name!r}' if name else ''} has other parameters in process "
                    f"{rank} than in process 0 ({_difference(mine, other, rank)}), so a checkpoint "
                    "cannot merge its groups: give it all parameters in every process, and keep "
                    "state[p] in the process that updates p"
                )


def _difference(mine: set[str], other: set[str], rank: int) -> str:
    if mine == other:
        return "in other groups"
    only = {0: sorted(mine - other), rank: sorted(other - mine)}
    return "; ".join(f"only in process {r}: {join_names(n)}" for r, n in only.items() if n)


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
    facts, error, copies = {}, None, ownership_of(state).copies
    try:
        facts = encode_optimizers(state, tensors)
    except Exception as failure:  # the other processes wait for an answer
        error = failure
    mine, named = dict(_entries(facts)), NamedOptimizer.of_state(state)
    groups = [one.group_names() for one in named.values()]
    names = zlib.crc32(repr((groups, sorted(mine))).encode())
    failed = error and f"{type(error).__name__}: {error}"
    marks = gather_from_all((names, bool(copies), failed), COLLECTED)
    if error is not None:
        raise error
    for rank, (*_, failed) in enumerate(marks):
        if failed is not None:
            raise CheckpointError(f"process {rank} cannot save its optimizer: {failed}")
    if set(marks) == {(names, False, None)}:
        return facts, {}
    check_groups(state)
    every = gather_from_all(([*mine], [*copies]), COLLECTED)
    holders = Counter(entry for own, _ in every for entry in own)
    unsure = {entry for _, restored in every for entry in restored}
    doubtful = [e for e, count in holders.items() if count < len(every) or e in unsure]
    for entry in doubtful:
        _check_mergeable(entry, named[entry[0]], [entry in own for own, _ in every])
    offers = gather_from_all(
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
            yield (name, "state_dict", *path), None


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
    if has_own_state_dict(named.optimizer):
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
            ownership_of(state).copies.pop(entry, None)  # every process continues it
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
    same, found, mine = processes == state.backend.data_size, {}, {}
    tensors: dict[str, Tensor] = {}
    for name, one in NamedOptimizer.of_state(state).items():
        own = _by_name(facts["optimizer"])[name]
        local = {(name, *path): ranks for path, ranks in own.get(LOCAL, ())}
        ours = is_torch_optimizer(one.holder) or has_own_state_dict(one.optimizer) or one.sharded
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
