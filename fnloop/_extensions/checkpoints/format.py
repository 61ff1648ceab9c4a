"""The format of a checkpoint: its files, what they hold, and how tensors lie in them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType

import attrs
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints.serialize import Json, dtype_named
from fnloop._extensions.checkpoints.split import extent_in, spans_all, split_dim
from fnloop.extend import Monitored, checks, collectives, containers, fsdp, local_part

# --------------------------------------------------------------------------------------------------
# The format of a checkpoint: its files, what they hold, and the errors that reading them raises.
#
# A checkpoint is a folder:
#
#   model.safetensors       the state_dict of the module, with the weights that an evaluation uses;
#                           loads into the plain module without fnloop
#   training.safetensors    the weights to train with, if these are others: of an optimizer that has
#                           modes, such as a schedule-free one
#   optimizer.safetensors   the state of the optimizer, by parameter name
#   own.safetensors         what each process has of its own, as with local_sgd: weights, buffers,
#                           the state of optimizers, and slots; each process writes a file
#   slots.safetensors       what middleware keep, running metrics, random generators
#   ema.safetensors         an average of weights, by its name: a state_dict of the module with it,
#                           which loads into the plain module too; one for each average. And a
#                           slot, by its name, that a middleware or a hook brings the part of
#   state.json              counters, hyper-parameters, where the tensors belong, what the run was
#                           made with, and the history with its digest (the module save makes it)
#   manifest.json           size and SHA-256 of each of the others, and whether what is trained is
#                           finite; written last
#
# Where tensors are split over n processes (`fully_shard`), or some processes have state of the
# optimizer that others lack, each process writes its own parts to a file of its own, and the main
# process what all have whole:
#
#   model-00001-of-00002.safetensors    instead of model.safetensors, and so for the others
#   index.json                          where the parts are (the module shards makes it)
#
# A partial checkpoint has the same files. It lists its parts, and what belongs to others is left
# out.
#
# Nothing is pickled, so reading a checkpoint cannot run code.

log = logging.getLogger("fnloop")

FORMAT = 1  # of a checkpoint of all parts with one optimizer, without averages and phases
NEWER_FORMAT = 2  # of others, so that an older fnloop does not take them for damaged checkpoints
SHARDED_FORMAT = 3  # of those with an index
TRAINING_FORMAT = 4  # of those with weights to train with, which an older fnloop would not look for
OWN_FORMAT = 5  # of those with what each process has of its own
BROUGHT_FORMAT = 6  # of those with parts that were brought, which an older fnloop would lose
NEWEST_FORMAT = BROUGHT_FORMAT
COLLECTED = "the collecting of a checkpoint"  # as messages about processes that wait name it
STATE = "state.json"
TENSORS = ("model", "optimizer", "slots")  # the groups of tensors that every checkpoint has
OWN = "own"  # the group of what each process has of its own: names begin with its rank and a slash
FILES = (*(f"{name}.safetensors" for name in TENSORS), STATE)
MANIFEST = "manifest.json"
INDEX = "index.json"
LARGEST_MANIFEST = 16 << 20  # bytes; a crafted manifest must not fill the memory
PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
TRAINING = "training"  # the group of the weights to train with
TRAINED = "trained"  # a part of the model: the parameters that require gradients


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value < math.inf


def _is_number_text(value: object) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(value, str) and float(value) is not None
    return False


def _is_part(value: object) -> bool:
    return value in (*PARTS, TRAINED)


# --- what JSON in a checkpoint looks like

# A shape is a type; a function that returns whether a value has it; a tuple of shapes, one of which
# a value has; a list of the shape of all items; or a dict of the shapes of a mapping's values by
# name, where "name?" may be missing, and "*" stands for all other names.
Shape = object
ANY = object
COUNT = _is_count
NUMBER = (int, float)
NAMES = [str]

MANIFEST_SHAPE: Shape = {
    "format_version": COUNT,
    "serial?": COUNT,
    "position": [COUNT],
    "measured": {"*": _is_number_text},
    "phase?": (None, str),
    "best?": (None, str),
    "mode?": lambda value: value in (None, "min", "max"),
    "since?": lambda value: value in (None, *Monitored.SINCE),
    "parts?": [_is_part],
    "blocks?": NAMES,
    "finite?": bool,
    "files": {"*": {"bytes": COUNT, "sha256": str, "nonfinite?": str}},
}
_OPTIMIZER: Shape = {
    "class": str,
    "param_groups": [{"params": NAMES}],
    "state?": {"*": ANY},
    "state_of_all?": dict,
    "on_host?": NAMES,
}
_PHASE: Shape = {
    "name": lambda value: isinstance(value, str) and bool(value.strip()),
    **dict.fromkeys(("step", "epoch", "records", "skipped?"), COUNT),
    "stop?": (None, str),
    "done?": bool,
    "updates?": {"*": COUNT},
    "items?": lambda value: value is None or _is_amount(value),
}
STATE_SHAPE: Shape = {
    "parts?": [_is_part],
    **dict.fromkeys(("step?", "epoch?", "batch?", "samples?", "skipped?", "processes?"), COUNT),
    "versions?": {"*": str},
    "made_with?": {
        **dict.fromkeys(("step?", "device?"), str),
        "functions?": {"*": str},
        **dict.fromkeys(("hooks?", "hook_slots?"), NAMES),
    },
    "digest?": str,  # of the history: see `files`
    "data_shares?": COUNT,  # if there are fewer than processes
    "stop?": (None, str),
    "exact?": bool,
    "brought?": {"*": {"all?": ANY, "each?": list}},
    "seconds?": _is_amount,
    "updates?": {"*": COUNT},
    "phases?": [_PHASE],
    "targets?": {"epochs": (None, COUNT), "steps": (None, COUNT)},
    "news?": NAMES,
    "generators?": (None, list),
    "positions?": list,
    "model?": {
        "class": str,
        "extra_state": {"*": ANY},
        "complex?": NAMES,
        "frozen?": NAMES,
        "evaluating?": NAMES,
        "grown?": {"*": (None, [COUNT])},
    },
    "optimizer?": ({"several": {"*": _OPTIMIZER}}, _OPTIMIZER),
    "apart?": {"own": dict, "used": bool, "outer": (None, dict)},
    "own_optimizers?": [ANY],
    "averages?": {"*": {"count": COUNT, "tensors": {"*": str}, "complex": NAMES}},
    "shares?": list,
    "own?": NAMES,
    "history": [dict],
}


def shares_in(facts: Mapping[str, Json]) -> int | None:
    """Return among how many processes, or rows of a mesh, the data of a saved run were dealt."""
    return facts.get("data_shares", facts.get("processes"))


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, too new, or of another run, model or optimizer."""

    __module__ = "fnloop"  # the name by which a traceback shows it


class NewerFormatError(CheckpointError):
    """A newer fnloop wrote the checkpoint. It is not damaged, so no older one may replace it."""


def check_shape(value: Json, shape: Shape, path: Path | str) -> None:
    """Raise CheckpointError unless JSON of a checkpoint has a shape.

    Values that are encoded (``$tensor`` and the like) are checked where they are decoded.

    Args:
        value: what ``json.loads`` returned.
        shape: a shape, as above.
        path: what it is of, for the message: a file, a checkpoint, a part of a state.

    Example:
        >>> from pathlib import Path
        >>> check_shape({"a": [1, -2]}, {"a": [COUNT]}, Path("b.json"))
        Traceback (most recent call last):
        ...
        fnloop.CheckpointError: b.json is damaged: a.1 is -2
    """
    if (fault := _find_fault(value, shape)) is not None:
        where, found = fault
        raise CheckpointError(f"{path} is damaged: {'.'.join(where)[:60] or 'it'} {found}")


def _find_fault(value: Json, shape: Shape) -> tuple[tuple[str, ...], str] | None:
    """Return where a value has not the shape, and what is wrong there; None if nothing is."""
    if isinstance(shape, tuple):
        faults = [fault for one in shape if (fault := _find_fault(value, one)) is not None]
        if len(faults) < len(shape):
            return None
        return max(faults, key=lambda fault: len(fault[0]))
    inside: list[tuple[object, Json, Shape]] = []
    if isinstance(shape, list):
        right = type(value) is list
        if right:
            inside = [(i, item, shape[0]) for i, item in enumerate(value)]
    elif isinstance(shape, dict):
        right = type(value) is dict
        if right:
            for key in shape:
                if key[-1] not in "?*" and key not in value:
                    return (key,), "is missing"
            other = shape.get("*", ANY)
            inside = [
                (key, item, shape.get(key) or shape.get(f"{key}?", other))
                for key, item in value.items()
            ]
    elif shape is None or isinstance(shape, type):
        right = shape is ANY or type(value) is (shape or type(None))
    else:
        right = callable(shape) and bool(shape(value))
    if not right:
        return (), f"is {checks.describe(value)}"
    for key, item, one in inside:
        if one is type(item) or one is ANY or (isinstance(one, FunctionType) and one(item)):
            continue  # most values
        if (fault := _find_fault(item, one)) is not None:
            return (str(key), *fault[0]), fault[1]
    return None


def gather_encoded(
    encode: Callable[[], Json], what: str, error: type[Exception] = ValueError
) -> list[Json]:
    """Return what each process encodes, by rank. A collective.

    Raises:
        Exception: what this process raises.
        error: another process cannot encode it.
    """
    entry, fault = None, None
    try:
        entry = encode()
    except Exception as failure:  # the other processes wait for an answer
        fault = failure
    failed = fault and f"{type(fault).__name__}: {fault}"
    every = collectives.gather_from_all((entry, failed), COLLECTED)
    if fault is not None:
        raise fault
    for rank, (_, text) in enumerate(every):
        if text is not None:
            raise error(f"process {rank} cannot save {what}: {text}")
    return [one for one, _ in every]


@attrs.frozen(eq=False)
class Contents:
    """The contents of a checkpoint: groups of tensors, and facts as JSON.

    Args:
        groups: the groups of tensors by name, each of which is a file; in it, name to tensor.
        facts: the contents of ``state.json``; without the history when they are to be written.
        history: the records to write, one line of JSON each.
        index: name of a group that is split over processes, to where its tensors are. Of such a
            group, the tensors above are only what this process writes.
        rank: of this process.
        processes: how many processes there are.
        learning: the names of the weights that are trained.
    """

    groups: Mapping[str, dict[str, Tensor]]
    facts: Mapping[str, Json]
    history: Sequence[str] = ()
    index: Mapping[str, Json] = attrs.field(factory=dict)
    rank: int = 0
    processes: int = 1
    learning: Collection[str] = ()

    @property
    def files(self) -> dict[str, str | None]:
        """The names of the files that this process writes, with the group of tensors in each."""
        return self._files_of(self.rank)

    @property
    def all_files(self) -> set[str]:
        """The names of the files that all processes write."""
        return {name for rank in range(self.processes) for name in self._files_of(rank)}

    def _files_of(self, rank: int) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for group in self.groups:
            if group in self.index:
                found[name_of_share(group, rank, self.processes)] = group
            elif rank == 0:
                found[f"{group}.safetensors"] = group
        if rank == 0:
            found |= {STATE: None, **({INDEX: None} if self.index else {})}
        return found

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory. It reuses the memory of an earlier copy where that fits."""
        return self._copied_by(HostCopier(), buffers)

    def _copied_by(
        self, copy: Callable[[Tensor, Tensor | None], Tensor], buffers: Contents | None
    ) -> Contents:
        """Return the contents with copies, each made from a tensor and an earlier copy, if any."""
        earlier = buffers.groups if buffers else {}

        def copy_of(name: str, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
            old = earlier.get(name, {})
            return {k: copy(v, old.get(k)) for k, v in group.items()}

        return attrs.evolve(self, groups={k: copy_of(k, g) for k, g in self.groups.items()})

    def copy_aside(self, buffers: Contents | None = None) -> Callable[[], Contents]:
        """Copy the tensors, so that training may change them.

        On a GPU with room for it, the copy is made there, which takes milliseconds. It goes to host
        memory later.

        Args:
            buffers: an earlier copy in host memory, which is reused where that fits.

        Returns:
            A function to call once, in any thread: it returns the copy in host memory.
        """
        tensors = [t for group in self.groups.values() for t in group.values() if t.is_cuda]
        devices = {t.device for t in tensors}
        if len(devices) != 1 or not _has_room(next(iter(devices)), sum(t.nbytes for t in tensors)):
            copied = self.copied(buffers)
            return lambda: copied
        (device,), to_memory = devices, HostCopier()

        def copy_there(tensor: Tensor, earlier: Tensor | None) -> Tensor:
            return tensor.detach().clone() if tensor.is_cuda else to_memory(tensor, earlier)

        def copy_from_there(tensor: Tensor, earlier: Tensor | None) -> Tensor:
            return to_memory(tensor, earlier) if tensor.is_cuda else tensor

        there = [self._copied_by(copy_there, buffers)]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))

        def to_host() -> Contents:
            with torch.cuda.stream(stream):  # popped, so that the copy on the device is freed
                return there.pop()._copied_by(copy_from_there, buffers)

        return to_host


_SPARE = 0.1  # of the memory of a device, to leave free


def _has_room(device: torch.device, size: int) -> bool:
    """Return whether a GPU has memory for a copy of ``size`` bytes, and some to spare.

    Memory that the allocator of this process holds does not count, because an update needs it.
    """
    free, total = torch.cuda.mem_get_info(device)
    return free - size > _SPARE * total


def name_of_share(group: str, rank: int, processes: int) -> str:
    """Return the name of the file with what a process writes of a group of tensors.

    Example:
        >>> name_of_share("model", 0, 4)
        'model-00001-of-00004.safetensors'
    """
    return f"{group}-{rank + 1:05d}-of-{processes:05d}.safetensors"


def is_share(name: str, groups: Collection[str]) -> bool:
    """Return whether a file has what a process wrote of one of these groups."""
    return any(re.fullmatch(rf"{re.escape(g)}-\d+-of-\d+\.safetensors", name) for g in groups)


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may have a name, besides the manifest."""
    return (
        name in (*FILES, INDEX)
        or re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.safetensors", name) is not None
    )


# --------------------------------------------------------------------------------------------------
# What each process writes of tensors that not every process has, and where the parts are.
#
# The index of a checkpoint has an entry for each tensor of such a group, by the names of both:
#
#     {"shape": [4, 6], "dtype": "float32", "dim": 0, "shards": [
#       {"file": "model-00001-of-00002.safetensors", "key": "w", "offsets": [0, 0]},
#       {"file": "model-00002-of-00002.safetensors", "key": "w", "offsets": [2, 0]}]}
#
# The shards, one after the other along the dimension `dim`, are the tensor. A tensor that is not
# split has one shard, in the file of any process, and no `dim`. A tensor without elements may have
# none. So safetensors alone can read a checkpoint: load the files, and concatenate (`torch.cat`)
# what the index names.
#
# Tensors that are one in memory, such as tied weights, have the same shards.


def keep_own_share(
    contents: Contents, state: TrainState, local: Mapping[str, bool] | None = None
) -> Contents:
    """Return what this process writes of contents, with an index if several processes write.

    Every process must call it. The main process gets the whole index.

    Args:
        contents: what this process has.
        state: the state that is saved.
        local: name to whether this process writes it, for tensors of optimizers that not all
            processes have. The main process writes the others that are whole.
    """
    backend, index = state.backend, dict[str, Json]()
    groups: dict[str, dict[str, Tensor]] = {}
    for group, tensors in contents.groups.items():
        own = local if group == "optimizer" and local else {}
        own = dict.fromkeys(tensors, True) if group == OWN else own
        sharded = fsdp.has_sharded(tensors.values())
        split = sharded and any(split_dim(t) is not None for t in tensors.values())
        if own or group == OWN or split:
            file = name_of_share(group, backend.rank, backend.world_size)
            groups[group], index[group] = _share_of(tensors, file, backend.main, own)
        else:
            # In every process, as a gather is a collective.
            whole = {name: fsdp.full(t) for name, t in tensors.items()} if sharded else tensors
            groups[group] = whole if backend.main else {}
    kept = attrs.evolve(contents, groups=groups)
    if not index:
        return kept
    version = max(SHARDED_FORMAT, contents.facts["format_version"])
    facts = {**contents.facts, "format_version": version}
    for theirs in collectives.gather_from_all(index, COLLECTED)[1:]:
        for group, entries in theirs.items():
            for name, entry in entries.items():
                mine = index[group].get(name)
                if mine is None or not mine["shards"]:
                    index[group][name] = entry
                else:
                    mine["shards"] += entry["shards"]
    return attrs.evolve(
        kept, facts=facts, index=index, rank=backend.rank, processes=backend.world_size
    )


def _share_of(
    tensors: Mapping[str, Tensor], file: str, main: bool, local: Mapping[str, bool]
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return what this process writes of a group of tensors, and the index of that.

    Args:
        tensors: the group.
        file: the name of the file to write.
        main: whether this is the main process, which writes what is not split.
        local: name to whether this process writes it, where that is another rule.
    """
    mine: dict[str, Tensor] = {}
    entries: dict[str, Json] = {}
    keys: dict[object, str] = {}
    for name, tensor in tensors.items():
        dim, offsets = split_dim(tensor), [0] * tensor.ndim
        entry: dict[str, Json] = {
            "shape": [*tensor.shape],
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        if dim is None:
            own, writes = fsdp.full(tensor), local.get(name, main)
        else:
            own, entry["dim"] = local_part(tensor).detach(), dim
            offsets[dim], stop, first = extent_in(tensor, tensor.shape[dim])
            # The first of a mesh of some processes holds what the first of its neighbors holds.
            writes = first and (spans_all(tensor) or collectives.counts_here())
            if own.shape[dim] != stop - offsets[dim]:
                raise TypeError(
                    f"{name} is split over processes in another way than by fully_shard: this "
                    f"process has {own.shape[dim]} of {tensor.shape[dim]} along dimension {dim}"
                )
        entry["shards"] = []
        if writes and (own.numel() or dim is None):
            kind = (own.dtype, own.is_conj(), own.is_neg())
            place = (own.data_ptr() or name, own.shape, own.stride(), *kind)
            key = keys.setdefault(place, name)
            mine[key] = own
            entry["shards"].append({"file": file, "key": key, "offsets": offsets})
        entries[name] = entry
    return mine, entries


# --------------------------------------------------------------------------------------------------
# Read slices of tensors whose parts are in several files.

# Bytes of files in memory at a time: what is mapped counts as memory too. The more tensors a file
# has, the longer it takes to open, so a large one is opened at most 16 times.
MOST_MAPPED, MOST_OPENED = 4 << 20, 16


@attrs.frozen
class Piece:
    """A part of a tensor in a file.

    Args:
        file: the name of the file.
        key: the name of the part in it.
        start, stop: what it is of the dimension along which the tensor is split.
    """

    file: str
    key: str
    start: int
    stop: int


@attrs.frozen
class Entry:
    """Where a tensor is.

    Args:
        shape: of the whole tensor.
        dtype: its dtype.
        pieces: its parts, in order.
        dim: the dimension along which it is split, or None.
        is_of_file: whether shape and dtype are what the file itself says, and not an index.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]
    dim: int | None = None
    is_of_file: bool = False

    def shape_of(self, start: int, stop: int, dim: int | None) -> list[int]:
        """Return the shape of a part of the tensor."""
        shape = [*self.shape]
        if dim is not None:
            shape[dim] = stop - start
        return shape


INDEXED = {
    "shape": [COUNT],
    "dtype": str,
    "dim?": (None, COUNT),
    "shards": [{"file": str, "key": str, "offsets": [COUNT]}],
}


def decode_index(index: Json, files: Collection[str], path: Path) -> dict[str, dict[str, Entry]]:
    """Return the entries of an index by group and name, having checked that each is complete.

    Args:
        index: what ``index.json`` holds.
        files: the names of the files of the checkpoint.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: it is not an index, or a part is missing.
    """
    check_shape(index, {"*": {"*": INDEXED}}, path)
    try:
        return {
            group: {name: _decode_entry(name, entry, files) for name, entry in entries.items()}
            for group, entries in index.items()
        }
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _decode_entry(name: str, entry: Json, files: Collection[str]) -> Entry:
    shape, dim, shards = tuple(entry["shape"]), entry.get("dim"), entry["shards"]
    dtype = dtype_named(entry["dtype"])
    offsets = [shard["offsets"] for shard in shards]
    if dtype is None or not (dim is None or dim < len(shape)):
        raise ValueError(f"the index does not say how {name} is split")
    if not {shard["file"] for shard in shards} <= {*files}:
        raise ValueError(f"the index names a file for {name} that the manifest does not list")
    if any(len(at) != len(shape) for at in offsets):
        raise ValueError(f"its index lacks parts of {name}")
    starts = [0 if dim is None else at[dim] for at in offsets]
    expected = [[start if i == dim else 0 for i in range(len(shape))] for start in starts]
    bounds = [*starts, 1 if dim is None else shape[dim]]
    complete = starts[:1] == [0] and all(a < b for a, b in itertools.pairwise(bounds))
    if dim is not None and 0 in shape:
        complete = not shards
    if not complete or offsets != expected:
        raise ValueError(f"its index lacks parts of {name}")
    places = zip(shards, itertools.pairwise(bounds), strict=True)
    pieces = [Piece(s["file"], s["key"], a, b) for s, (a, b) in places]
    return Entry(shape, dtype, pieces, dim)


class Slices:
    """Reads slices of tensors from the files of a checkpoint, and keeps little of them in memory.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, safe_open] = {}
        self._mapped = self._most = 0

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self._path / name
            with path.open("rb") as file:  # a file that cannot be opened is an error with its cause
                size = os.fstat(file.fileno()).st_size
            with _explained(self._path, name):
                self._open[name] = safe_open(path, framework="pt")
            self._most = max(self._most, MOST_MAPPED, size // MOST_OPENED)
        return self._open[name]

    def entries_in(self, file: str) -> dict[str, Entry]:
        """Return an entry for each tensor of a file that has whole tensors."""
        found, opened = {}, self._file(file)
        with _explained(self._path, file):
            for key in opened.keys():  # noqa: SIM118  (not a mapping)
                here = opened.get_slice(key)
                shape = tuple(here.get_shape())
                dtype = here[(slice(0, 0),) if shape else (...,)].dtype  # without its elements
                found[key] = Entry(shape, dtype, [Piece(file, key, 0, 1)], is_of_file=True)
        return found

    def read(self, entry: Entry, start: int = 0, stop: int = 0, dim: int | None = None) -> Tensor:
        """Return a tensor; with a dimension, only its part from ``start`` to ``stop`` along it.

        Raises:
            CheckpointError: a part is not what the entry says.
        """
        shape = entry.shape_of(start, stop, dim)
        first = [start if i == dim else 0 for i in range(len(shape))]
        copies = []
        for piece in entry.pieces:
            base, low = [0] * len(shape), [*first]
            high = [a + n for a, n in zip(first, shape, strict=True)]
            if entry.dim is not None:
                base[entry.dim] = piece.start
                low[entry.dim] = max(low[entry.dim], piece.start)
                high[entry.dim] = min(high[entry.dim], piece.stop)
            if all(a < b for a, b in zip(low, high, strict=True)):
                if not entry.is_of_file:
                    self._check(piece, entry)
                copies.append((piece, _slices(low, high, base), _slices(low, high, first)))
        made = _empty(shape, entry.dtype, self._path)
        for piece, there, here in copies:
            self._copy(piece, there, made[here])
        return made

    def _check(self, piece: Piece, entry: Entry) -> None:
        opened = self._file(piece.file)
        with _explained(self._path, piece.file):
            found = opened.get_slice(piece.key).get_shape()
        if found != (expected := entry.shape_of(piece.start, piece.stop, entry.dim)):
            raise CheckpointError(
                f"{self._path} is damaged: {piece.key} in {piece.file} has the shape {found} "
                f"instead of {expected}"
            )

    def _copy(self, piece: Piece, where: tuple[slice, ...], target: Tensor) -> None:
        """Copy a slice of a part into a tensor, some rows of the first long dimension at a time."""
        dim = next((i for i, size in enumerate(target.shape) if size > 1), None)
        if dim is None:
            target.copy_(self._slice(piece, where or (...,), target.dtype))
            return
        first, last = where[dim].start, where[dim].stop
        rows = max(1, MOST_MAPPED * target.shape[dim] // target.nbytes)
        for i in range(first, last, rows):
            block = slice(i, min(i + rows, last))
            there = self._slice(piece, (*where[:dim], block, *where[dim + 1 :]), target.dtype)
            target.narrow(dim, i - first, block.stop - i).copy_(there)
            self._mapped += there.nbytes
            del there
            if self._mapped >= self._most:
                self.close()

    def _slice(self, piece: Piece, where: tuple[object, ...], dtype: torch.dtype) -> Tensor:
        opened = self._file(piece.file)
        with _explained(self._path, piece.file):
            found = opened.get_slice(piece.key)[where]
        if found.dtype != dtype:
            raise CheckpointError(
                f"{self._path} is damaged: {piece.key} in {piece.file} is {found.dtype} instead of "
                f"{dtype}"
            )
        return found

    def close(self) -> None:
        """Release the files."""
        self._open.clear()
        self._mapped = self._most = 0


def tensors_in(content: bytes, folder: Path, name: str) -> dict[str, Tensor] | None:
    """Return the tensors of a file that was read already; None where it has to be read again.

    Args:
        content: that of the file, whose checksum is right.
        folder, name: where it was, for messages.
    """
    with _explained(folder, name):
        try:
            found = load(content)
        except (AssertionError, KeyError, ValueError):  # a dtype that only files are read in
            return None
    # In memory of torch's own, which begins where that of other tensors does.
    made = {}
    for key in sorted(found):
        made[key] = _empty(found[key].shape, found[key].dtype, folder).copy_(found[key])
    return made


def _empty(shape: Sequence[int], dtype: torch.dtype, path: Path) -> Tensor:
    """Return a new tensor on the host, of a shape that a file says."""
    try:
        return torch.empty([*shape], dtype=dtype)
    except (RuntimeError, TypeError) as error:
        if containers.is_out_of_memory(error):
            raise MemoryError(f"no memory to read {path}: {error}") from error
        raise CheckpointError(f"{path} is damaged: no tensor has the shape {shape}") from error


@contextlib.contextmanager
def _explained(folder: Path, name: str) -> Iterator[None]:
    """Raise what is true where safetensors or torch cannot read a file.

    The checksum of the file is right. So only what safetensors says of its contents is damage: all
    else that fails is memory, file descriptors or the disk, however it is reported.
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{folder / name} is damaged: {error}") from error
    except (RuntimeError, FileNotFoundError) as error:
        # torch cannot map the file: it says so in a RuntimeError. Where safetensors cannot, it says
        # that there is no such file, but it was opened a moment ago.
        if isinstance(error, FileNotFoundError) or containers.is_out_of_memory(error):
            raise MemoryError(f"no memory to read {folder / name}: {error}") from error
        raise OSError(f"{folder / name} cannot be read: {error}") from error


def _slices(low: Sequence[int], high: Sequence[int], base: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices from ``low`` to ``high`` of something that begins at ``base``."""
    return tuple(slice(a - c, b - c) for a, b, c in zip(low, high, base, strict=True))


# --------------------------------------------------------------------------------------------------
# Copy tensors to host memory without holding up the work of other threads on the device.

SMALL = 4 << 20  # bytes
STAGED = 16 << 20  # bytes that are copied from a device at once


class HostCopier:
    """Copies tensors to host memory.

    The driver of a GPU lets no other thread launch anything while it copies to memory that is not
    pinned. So a large tensor goes through a small pinned buffer, piece by piece.
    """

    def __call__(self, tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Return a copy of a tensor in host memory.

        Args:
            tensor: a tensor on any device.
            buffer: an earlier copy, which is overwritten if it fits.
        """
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            if tensor.nbytes < SMALL:
                return tensor.to("cpu", copy=True)
            # NumPy requests large pages and torch does not, which halves the time of a first copy.
            memory = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
            buffer = memory.view(tensor.dtype).view(tensor.shape)
        is_plain = buffer.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if tensor.is_cuda and tensor.nbytes >= SMALL and is_plain:
            return self._copy_by_pieces(tensor, buffer)
        return buffer.copy_(tensor)

    def _copy_by_pieces(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        to, event = buffer.view(-1).view(torch.uint8), torch.cuda.Event(blocking=True)
        for piece, target in zip(
            tensor.contiguous().view(-1).view(torch.uint8).split(STAGED),
            to.split(STAGED),
            strict=True,
        ):
            staged = self._pinned[: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            event.record(torch.cuda.current_stream(tensor.device))
            event.synchronize()
            target.copy_(staged)
        return buffer

    @functools.cached_property
    def _pinned(self) -> Tensor:
        return torch.empty(STAGED, dtype=torch.uint8, pin_memory=True)
