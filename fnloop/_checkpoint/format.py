"""The format of a checkpoint: its files, what they hold, and the errors that reading them raises.

A checkpoint is a folder:

    model.safetensors       the state_dict of the module, with the weights that an evaluation uses;
                            loads into the plain module without fnloop
    training.safetensors    the weights to train with, if these are others: of an optimizer that has
                            modes, such as a schedule-free one
    optimizer.safetensors   the state of the optimizer, by parameter name
    slots.safetensors       what middleware keep, running metrics, random generators
    ema.safetensors         an average of weights, by its name: a state_dict of the module with it,
                            which loads into the plain module too; one for each average
    state.json              counters, hyper-parameters, where the tensors belong, and the history
                            (the module save makes it)
    manifest.json           size and SHA-256 of each of the others; written last

Where tensors are split over n processes (``fully_shard``), or some processes have state of the
optimizer that others lack, each process writes its own parts to a file of its own, and the main
process what all have whole:

    model-00001-of-00002.safetensors    instead of model.safetensors, and so for the others
    index.json                          where the parts are (the module shards makes it)

A partial checkpoint has the same files. It lists its parts, and what belongs to others is left out.

Nothing is pickled, so reading a checkpoint cannot run code.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from fnloop._backend.memory import has_room
from fnloop._checkpoint.host_copy import HostCopier
from fnloop._core.phase import SINCE
from fnloop._core.serialize import Json
from fnloop._display.checks import describe

__all__ = [
    "COLLECTED",
    "COUNT",
    "COUNTERS",
    "FILES",
    "FORMAT",
    "INDEX",
    "LARGEST_MANIFEST",
    "MANIFEST",
    "MANIFEST_SHAPE",
    "NEWER_FORMAT",
    "PARTS",
    "SHARDED_FORMAT",
    "STATE",
    "STATE_SHAPE",
    "TENSORS",
    "TRAINED",
    "TRAINING",
    "TRAINING_FORMAT",
    "CheckpointError",
    "Contents",
    "NewerFormatError",
    "check_shape",
    "is_file_name",
    "is_share",
    "name_of_share",
]

FORMAT = 1  # of a checkpoint of all parts with one optimizer, without averages and phases
NEWER_FORMAT = 2  # of others, so that an older fnloop does not take them for damaged checkpoints
SHARDED_FORMAT = 3  # of those with an index
TRAINING_FORMAT = 4  # of those with weights to train with, which an older fnloop would not look for
TENSORS = ("model", "optimizer", "slots")
STATE = "state.json"
FILES = (*(f"{name}.safetensors" for name in TENSORS), STATE)
MANIFEST = "manifest.json"
INDEX = "index.json"
LARGEST_MANIFEST = 16 << 20  # bytes; a crafted manifest must not fill the memory
COLLECTED = "the collecting of a checkpoint"  # as messages about processes that wait name it
PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
TRAINING = "training"  # the group of the weights to train with
TRAINED = "trained"  # a part of the model: the parameters that require gradients
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


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
    "since?": lambda value: value in (None, *SINCE),
    "parts?": [_is_part],
    "blocks?": NAMES,
    "files": {"*": {"bytes": COUNT, "sha256": str}},
}
_OPTIMIZER: Shape = {
    "class": str,
    "param_groups": [{"params": NAMES}],
    "state?": {"*": ANY},
    "state_of_all?": dict,
    "on_host?": NAMES,
}
_PHASE: Shape = {
    "name": str,
    **dict.fromkeys(("step", "epoch", "records", "skipped?"), COUNT),
    "stop?": (None, str),
    "done?": bool,
    "updates?": {"*": COUNT},
}
STATE_SHAPE: Shape = {
    "parts?": [_is_part],
    **dict.fromkeys(("step?", "epoch?", "batch?", "samples?", "skipped?", "processes?"), COUNT),
    "stop?": (None, str),
    "exact?": bool,
    "seconds?": NUMBER,
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
    },
    "optimizer?": ({"several": {"*": _OPTIMIZER}}, _OPTIMIZER),
    "averages?": {"*": {"count": COUNT, "tensors": {"*": str}, "complex": NAMES}},
    "shares?": list,
    "own?": NAMES,
    "history": [dict],
}


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, too new, or of another run, model or optimizer."""


class NewerFormatError(CheckpointError):
    """A newer fnloop wrote the checkpoint. It is not damaged, so no older one may replace it."""


def check_shape(value: Json, shape: Shape, path: Path) -> None:
    """Raise CheckpointError unless JSON of a checkpoint has a shape.

    Values that are encoded (``$tensor`` and the like) are checked where they are decoded.

    Args:
        value: what ``json.loads`` returned.
        shape: a shape, as above.
        path: the file or the checkpoint, for the message.

    Example:
        >>> from pathlib import Path
        >>> check_shape({"a": [1, -2]}, {"a": [COUNT]}, Path("b.json"))
        Traceback (most recent call last):
        ...
        fnloop._checkpoint.format.CheckpointError: b.json is damaged: a.1 is -2
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
    inside: Iterable[tuple[object, Json, Shape]] = ()
    if isinstance(shape, list):
        right = type(value) is list
        if right:
            inside = ((i, item, shape[0]) for i, item in enumerate(value))
    elif isinstance(shape, dict):
        right = type(value) is dict
        if right:
            for key in shape:
                if key[-1] not in "?*" and key not in value:
                    return (key,), "is missing"
            other = shape.get("*", ANY)
            inside = (
                (key, item, shape.get(key) or shape.get(f"{key}?", other))
                for key, item in value.items()
            )
    elif shape is None or isinstance(shape, type):
        right = shape is ANY or type(value) is (shape or type(None))
    else:
        right = callable(shape) and bool(shape(value))
    if not right:
        return (), f"is {describe(value)}"
    for key, item, one in inside:
        if (fault := _find_fault(item, one)) is not None:
            return (str(key), *fault[0]), fault[1]
    return None


@attrs.frozen(eq=False)
class Contents:
    """The contents of a checkpoint: groups of tensors, and facts as JSON.

    Args:
        model, optimizer, slots: name to tensor.
        facts: the contents of ``state.json``; without the history when they are to be written.
        history: the records to write, one line of JSON each.
        averages: name of an average to its group of tensors; and the weights to train with.
        index: name of a group that is split over processes, to where its tensors are. Of such a
            group, the tensors above are only what this process writes.
        rank: of this process.
        processes: how many processes there are.
    """

    model: Mapping[str, Tensor]
    optimizer: dict[str, Tensor]
    slots: Mapping[str, Tensor]
    facts: Mapping[str, Json]
    history: Sequence[str] = ()
    averages: Mapping[str, Mapping[str, Tensor]] = attrs.field(factory=dict)
    index: Mapping[str, Json] = attrs.field(factory=dict)
    rank: int = 0
    processes: int = 1

    def groups(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the groups of tensors by name. Each is a file."""
        own: dict[str, Mapping[str, Tensor]] = {name: getattr(self, name) for name in TENSORS}
        return own | dict(self.averages)

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
        for group in self.groups():
            if group in self.index:
                found[name_of_share(group, rank, self.processes)] = group
            elif rank == 0:
                found[f"{group}.safetensors"] = group
        if rank == 0:
            found |= {STATE: None, **({INDEX: None} if self.index else {})}
        return found

    def with_groups(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Contents:
        """Return the contents with other groups of tensors, of the same names."""
        averages = {name: group for name, group in groups.items() if name not in TENSORS}
        own = {name: groups[name] for name in TENSORS}
        return attrs.evolve(self, **own, averages=averages)

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory. It reuses the memory of an earlier copy where that fits."""
        return self._copied_by(HostCopier(), buffers)

    def _copied_by(
        self, copy: Callable[[Tensor, Tensor | None], Tensor], buffers: Contents | None
    ) -> Contents:
        """Return the contents with copies, each made from a tensor and an earlier copy, if any."""
        earlier = buffers.groups() if buffers else {}

        def copy_of(name: str, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
            old = earlier.get(name, {})
            return {k: copy(v, old.get(k)) for k, v in group.items()}

        return self.with_groups({k: copy_of(k, group) for k, group in self.groups().items()})

    def copy_aside(self, buffers: Contents | None = None) -> Callable[[], Contents]:
        """Copy the tensors, so that training may change them.

        On a GPU with room for it, the copy is made there, which takes milliseconds. It goes to host
        memory later.

        Args:
            buffers: an earlier copy in host memory, which is reused where that fits.

        Returns:
            A function to call once, in any thread: it returns the copy in host memory.
        """
        tensors = [t for group in self.groups().values() for t in group.values() if t.is_cuda]
        devices = {t.device for t in tensors}
        if len(devices) != 1 or not has_room(next(iter(devices)), sum(t.nbytes for t in tensors)):
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
