"""Nested batches: what a container is, copies to a device, and the memory of both."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import operator
import os
import sys
import zlib
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from types import FunctionType, ModuleType
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset

# What extensions use, as `extend.containers`; the rest is for loaders and steps.
__all__ = [
    "IN_BATCHES",
    "SEQUENCES",
    "attributes_of",
    "batch_size_of",
    "checksum",
    "copy_flattened",
    "flattened",
    "is_named_tuple",
    "is_out_of_memory",
    "is_subclass",
    "items_in",
    "length_of",
    "map_leaves",
    "own_copy",
    "pairs_of",
    "parts_of",
    "pieces_of",
    "rows_of",
    "samples_in",
    "tensors_in",
    "to_device",
    "unflattened",
    "vars_of",
    "with_parts",
]

# --------------------------------------------------------------------------------------------------
# The one place that knows what a container is: a mapping, a list, a tuple or a deque of any class.
#
# Everything else is a leaf, such as a tensor, a str or a set. Torch's pytree is not used: it takes
# five times as long, and subclasses of list, `UserDict` and `torch.Size` are leaves for it.

Value = TypeVar("Value")
SEQUENCES = (list, tuple, deque)
IN_BATCHES = (list, tuple)  # the sequences whose tensors are moved to a device
_UNSET = object()  # what stands for a slot that holds nothing


def parts_of(
    value: object, sequences: tuple[type, ...] = SEQUENCES
) -> Iterable[tuple[Hashable, object]] | None:
    """Return the parts of a container, each with its key or position; None for a leaf.

    Args:
        value: the value.
        sequences: the sequences that are containers. Mappings always are.

    Example:
        >>> list(parts_of({"a": 1, "b": [2]})), list(parts_of((3, 4))), parts_of("text")
        ([('a', 1), ('b', [2])], [(0, 3), (1, 4)], None)
    """
    if isinstance(value, sequences):
        return enumerate(value)  # type: ignore[arg-type]
    return value.items() if isinstance(value, Mapping) else None


def with_parts(value: Value, parts: Iterable[object]) -> Value:
    """Return a container of the same kind with other parts, in the order of :func:`parts_of`.

    Example:
        >>> with_parts({"a": 1, "b": 2}, [3, 4]), with_parts(deque([1], maxlen=5), [2])
        ({'a': 3, 'b': 4}, deque([2], maxlen=5))
    """
    container: Any = value
    if isinstance(value, dict | UserDict | list | deque):
        copied = copy.copy(container)
        for (key, _), part in zip(parts_of(container) or (), parts, strict=True):
            copied[key] = part
        return copied
    if isinstance(value, Mapping):
        return type(container)(dict(zip(container, parts, strict=True)))
    return type(container)(*parts) if is_named_tuple(value) else type(container)(parts)


def is_named_tuple(value: object) -> bool:
    """Return whether a value is a tuple whose class takes the parts as arguments."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def map_leaves(value: Any, change: Callable[[Any], object] = lambda leaf: leaf) -> Any:
    """Return a copy of a nested value with every leaf changed; by default leaves are shared.

    A tuple whose parts stay the same is kept, because it need not be copied.

    Example:
        >>> map_leaves({"a": (1, [2]), "b": 3}, lambda n: -n)
        {'a': (-1, [-2]), 'b': -3}
    """
    parts = parts_of(value)
    if parts is None:
        return change(value)
    changed = [map_leaves(part, change) for _, part in parts]
    if isinstance(value, tuple) and all(map(operator.is_, value, changed)):
        return value
    return with_parts(value, changed)


def pairs_of(a: object, b: object) -> list[tuple[object, Any, Any]] | None:
    """Return the parts of two containers under the keys or positions that both have.

    Returns:
        The key, the part of ``a`` and the part of ``b``, of each; None unless both are mappings or
        both are sequences.

    Example:
        >>> pairs_of({"a": 1, "b": 2}, {"b": 3}), pairs_of([1, 2], (3,)), pairs_of([1], {0: 1})
        ([('b', 2, 3)], [(0, 1, 3)], None)
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [(key, a[key], b[key]) for key in a if key in b]
    if isinstance(a, SEQUENCES) and isinstance(b, SEQUENCES):
        return [(i, x, y) for i, (x, y) in enumerate(zip(a, b, strict=False))]
    return None


# --------------------------------------------------------------------------------------------------
# Tensors of subclasses that consist of others, such as those of 8 bits that torchao's optimizers
# keep. Torch's protocol of such classes says what they consist of.


class Flattened(TypedDict):
    """What a tensor of a subclass consists of: its tensors by name, and what else makes it."""

    inner: dict[str, Tensor]
    context: object
    size: list[int]
    stride: list[int]


def is_subclass(value: object) -> bool:
    """Return whether a value is a tensor of a subclass that consists of other tensors."""
    cls = type(value)
    return hasattr(cls, "__tensor_flatten__") and cls.__name__ != "DTensor"


def flattened(value: Any) -> Flattened | None:
    """Return what a tensor of a subclass consists of; None for other values."""
    if not is_subclass(value):
        return None
    names, context = value.__tensor_flatten__()
    inner = {name: getattr(value, name) for name in names}
    size, stride = [*value.shape], [*value.stride()]
    return {"inner": inner, "context": context, "size": size, "stride": stride}


def unflattened(like: Any, parts: Flattened, inner: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor of the class of another one, of what :func:`flattened` has returned.

    Args:
        like: a tensor of the same class.
        parts: what was returned.
        inner: the tensors to make it of, instead of those in ``parts``.
    """
    size, stride = torch.Size(parts["size"]), tuple(parts["stride"])
    return type(like).__tensor_unflatten__(inner, parts["context"], size, stride)


def copy_flattened(value: object) -> Tensor | None:
    """Return a copy of a tensor of a subclass, whose own ``clone`` may lack; None for others."""
    if (parts := flattened(value)) is None:
        return None
    copies = {
        name: part.detach().clone() if (copied := copy_flattened(part)) is None else copied
        for name, part in parts["inner"].items()
    }
    return unflattened(value, parts, copies)


# --------------------------------------------------------------------------------------------------
# Copy nested batches between the host and a device.

Tree = TypeVar("Tree")


def may_need_transfer(device: torch.device) -> bool:
    """Return whether a batch may be on another device than this one."""
    return device.type != "cpu" or torch.accelerator.is_available()


def copy_on_side_stream(device: torch.device) -> Callable[[Tree], Tree]:
    """Return a function that copies batches to a CUDA device on a separate stream.

    The copy overlaps with kernels of the previous step. Kernels that are launched after it wait for
    it.
    """
    stream = torch.cuda.Stream(device)

    def copy(batch: Tree) -> Tree:
        if _is_there(batch, stream.device):
            return batch
        if _is_opaque(batch):
            return to_device(batch, device)  # its memory cannot be tracked
        with torch.cuda.stream(stream):
            there = to_device(batch, device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for t in tensors_in(there):
            t.record_stream(current)  # so that its memory is not reused before they are done
        return there

    return copy


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch: of mappings, lists and tuples of any class."""
    if isinstance(batch, Tensor):
        yield batch
        return
    for _, part in parts_of(batch, IN_BATCHES) or ():
        if isinstance(part, Tensor):  # called for every batch: a generator per tensor takes longer
            yield part
        else:
            yield from tensors_in(part)


def batch_size_of(batch: object) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in tensors_in(batch) if t.ndim), 1)


def length_of(value: object) -> int | None:
    """Return the length of a value; None if it does not say."""
    try:
        return len(value) if isinstance(value, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def own_copy(batch: Tree) -> Tree:
    """Return a copy of a batch, which stays as it is; the same batch if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


# --------------------------------------------------------------------------------------------------
# Batches cut into pieces along the first dimension of their tensors.

_VALUES = (str, bytes, bool, int, float, type(None))


def samples_in(batch: object) -> int:
    """Return the number of samples in a batch: the leading dimension of its tensors.

    Raises:
        ValueError: there is not one.
    """
    sizes = {t.size(0) for t in tensors_in(batch) if t.ndim}
    if len(sizes) == 1:
        return sizes.pop()
    if sizes:
        raise ValueError(
            "a batch is cut into pieces along the first dimension of its tensors, but there they "
            f"have the lengths {sorted(sizes)}. To give a tensor x to each piece whole, put "
            "x.expand(n, *x.shape) into the batch, where n is the number of samples, and take x[0]"
        )
    raise ValueError(
        "a batch is cut into pieces along the first dimension of its tensors, but there is no "
        f"tensor with a dimension in a {type(batch).__name__}. Put its tensors into a tuple, a "
        "list or a mapping"
    )


def items_in(batch: Any, name: str, without_loss: bool = False) -> int:
    """Return the number of items in a batch: the leading dimension of its tensors.

    Args:
        batch: the batch.
        name: the name of the loss function, for messages.
        without_loss: whether it returned None in the place of a loss.

    Raises:
        ValueError: its tensors have different ones, or it has no tensor.
    """
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    if (
        batch.__class__ in (tuple, list)
        and len(batch) == 2
        and batch[0].__class__ is batch[1].__class__ is Tensor
    ):
        x, y = batch  # the usual case
        if x.ndim and y.ndim and (size := x.size(0)) == y.size(0):
            return size
    if batch.__class__ is dict:
        items = _common_items(batch.values())
    elif batch.__class__ in (list, tuple):
        items = _common_items(batch)
    else:
        items = None
    if items is not None:
        return items
    sizes = {t.size(0) for t in tensors_in(batch) if t.ndim} or {1 for t in tensors_in(batch)}
    if len(sizes) == 1:
        return sizes.pop()
    found = (
        f"its tensors have leading dimensions {sorted(sizes)}"
        if sizes
        else f"a {type(batch).__name__} is not a tensor, or a tuple, a list or a mapping of tensors"
    )
    if without_loss:
        raise ValueError(
            f"how many items has the batch, for which {name} returned no loss? {found}. Return the "
            'number: return None, {"weight": number_of_items}'
        )
    raise ValueError(
        f"how many items is the loss of {name} the mean of? {found}. Return the number with the "
        'loss: return loss, {"weight": number_of_items}'
    )


def _common_items(parts: Iterable[object]) -> int | None:
    """Return the leading dimension of the tensors of a flat batch; None if there is not one."""
    items: int | None = None
    for part in parts:
        if not isinstance(part, Tensor):
            return None  # such as a list in a tuple
        if part.ndim:
            size = part.size(0)
            if items is not None and size != items:
                return None
            items = size
    return items


def pieces_of(batch: object, size: int) -> list[Any]:
    """Return the pieces of a batch, which share its memory; the last one may be smaller.

    Raises:
        ValueError: its tensors do not have one length.

    Example:
        >>> import torch
        >>> pieces_of((torch.tensor([1, 2, 3]), ["a", "b", "c"], "train"), 2)
        [(tensor([1, 2]), ['a', 'b'], 'train'), (tensor([3]), ['c'], 'train')]
    """
    samples = samples_in(batch)
    if samples <= size:
        return [batch]
    return [_cut(batch, samples, slice(start, start + size)) for start in range(0, samples, size)]


def rows_of(batch: object, rows: Sequence[int]) -> Any:
    """Return a batch of some of the samples of a batch.

    Raises:
        ValueError: its tensors do not have one length.

    Example:
        >>> import torch
        >>> rows_of((torch.tensor([1, 2, 3]), ["a", "b", "c"], "train"), [0, 2])
        (tensor([1, 3]), ['a', 'c'], 'train')
    """
    return _cut(batch, samples_in(batch), [*rows])


def _cut(value: object, samples: int, rows: slice | list[int]) -> object:
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    if isinstance(value, np.ndarray) and value.shape[:1] == (samples,):
        return value[rows]
    parts = parts_of(value, IN_BATCHES)
    if parts is None:
        return value
    if isinstance(value, IN_BATCHES) and len(value) == samples and _are_values(value):
        if isinstance(rows, slice):
            return value[rows]
        return type(value)(value[row] for row in rows)
    return with_parts(value, [_cut(part, samples, rows) for _, part in parts])


def _are_values(values: Sequence[object]) -> bool:
    """Return whether these are plain values of one kind, as collated for each sample."""
    return isinstance(values[0], _VALUES) and len({type(value) for value in values}) == 1


# --------------------------------------------------------------------------------------------------
# What a batch holds on to.

# What has no memory that a loader fills again, and no parts.
_PLAIN = (
    *(str, bytes, int, float, complex, type, FunctionType, ModuleType),
    *(nn.Module, Generator, Dataset),
)


def memory_in(value: object) -> Iterator[Tensor | np.ndarray]:
    """Yield the tensors and arrays of a batch, in containers and in attributes of any object.

    Example:
        >>> from types import SimpleNamespace
        >>> batch = {"x": SimpleNamespace(a=np.zeros(2), b=[torch.ones(3), "text"])}
        >>> [len(found) for found in memory_in(batch)]
        [2, 3]
    """
    if isinstance(value, tuple | list):  # the usual case, without more frames than needed
        for part in value:
            if isinstance(part, Tensor):
                yield part
            elif has_parts(part):
                yield from _memory_in(part, set())
    else:
        yield from _memory_in(value, set())


def _memory_in(value: object, seen: set[int]) -> Iterator[Tensor | np.ndarray]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            yield value
    elif has_parts(value) and id(value) not in seen:
        seen.add(id(value))
        for _, part in parts_of(value) or attributes_of(value):
            yield from _memory_in(part, seen)


def has_parts(value: object) -> bool:
    """Return whether parts or attributes of a value may be parts of a batch."""
    return value is not None and not isinstance(value, _PLAIN)


def attributes_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, each with its name: those in slots first."""
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held = getattr(value, name, _UNSET)
            if held is not _UNSET and name not in ("__dict__", "__weakref__"):
                yield name, held
    yield from vars_of(value).items()


def vars_of(value: object) -> dict[str, object]:
    """Return the attributes of an object that are in its ``__dict__``; none if it has slots."""
    return getattr(value, "__dict__", {})


def checksum(batch: object, objects: bool = False) -> int:
    """Return a checksum of the tensors, arrays, texts and numbers in a batch.

    Args:
        batch: the batch.
        objects: whether the attributes of other objects count.

    Example:
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> checksum((a, b)) == checksum((a.clone(), b)) != checksum((b, a))
        True
    """
    return _add(batch, 0, set() if objects else None)


def _add(value: Any, crc: int, seen: set[int] | None) -> int:
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided:
            return crc
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(value.view(torch.uint8).numpy().data, crc)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return zlib.crc32(value.tobytes(), crc)
    if isinstance(value, bytes):
        return zlib.crc32(value, crc)
    if isinstance(value, int | float | str):
        return zlib.crc32(repr(value).encode(errors="replace"), crc)
    parts = parts_of(value)
    if parts is None and seen is not None and has_parts(value) and id(value) not in seen:
        seen.add(id(value))
        parts = attributes_of(value)
    for key, part in parts or ():
        crc = _add(part, _add(key, crc, seen), seen)
    return crc


def _is_there(batch: object, device: torch.device) -> bool:
    """Return whether all tensors of a batch are on a device already, and nothing hides others."""
    if isinstance(batch, Tensor):
        return batch.device == device
    inside = parts_of(batch, IN_BATCHES) or ()
    return not hasattr(batch, "to") and all(_is_there(part, device) for _, part in inside)


def _is_opaque(batch: object) -> bool:
    """Return whether a batch contains an object that moves its tensors itself."""
    if isinstance(batch, Tensor):
        return False
    inside = parts_of(batch, IN_BATCHES) or ()
    return hasattr(batch, "to") or any(_is_opaque(part) for _, part in inside)


def to_device(batch: object, device: torch.device) -> Any:
    """Move the tensors of a nested batch to a device; to CUDA from pinned memory, without blocking.

    Args:
        batch: tensors in any nesting of tuples, named tuples, lists and mappings, or an object with
            ``.to``.
        device: the target.

    Returns:
        The batch there. Values that are not tensors, and tensors that are there already, are kept.
    """
    if not may_need_transfer(device):
        return batch
    from accelerate.utils import recursively_apply, send_to_device

    if device.type == "cuda":
        batch = recursively_apply(
            lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), batch
        )
    return send_to_device(batch, device, non_blocking=device.type == "cuda")


def device_in(tree: object) -> torch.device | None:
    """Return the device of the first tensor in a nested value."""
    from accelerate.utils import find_device

    return find_device(tree)


def copy_to_cpu(tree: object) -> Any:
    """Copy the tensors of a nested value to the host: nothing that changes them later is seen."""
    from accelerate.utils import recursively_apply

    return recursively_apply(lambda t: t.detach().to("cpu", copy=True), tree)


def to_cpu(tree: object) -> Any:
    """Move the tensors of a nested value to the host."""
    if not may_need_transfer(torch.device("cpu")):
        return tree
    from accelerate.utils import send_to_device

    return send_to_device(tree, torch.device("cpu"))


# --------------------------------------------------------------------------------------------------
# Memory: the errors of allocators, and pages that the CPU reuses.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of settings of mallopt
_LARGEST = 32 << 20  # bytes: glibc takes no higher threshold, nor does it choose one by itself
_KEPT = 1 << 30  # bytes, while a run lasts; otherwise twice the largest, as glibc chooses
_users = 0  # of a setting of the whole process

# What torch says in a RuntimeError: the allocators of CUDA, ROCm and MPS, that of XPU, libraries
# whose workspace does not fit, and the allocator of the CPU.
_WORDINGS = (
    "out of memory",
    *("OUT_OF_DEVICE_MEMORY", "OUT_OF_HOST_MEMORY", "ERROR_OUT_OF_RESOURCES"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED"),
    "DefaultCPUAllocator",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that there is no memory left, on any device.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _WORDINGS)


@contextlib.contextmanager
def reusing_pages(device: torch.device) -> Iterator[None]:
    """Let the CPU's allocator keep up to 1 GiB of freed memory, within a ``with`` block.

    By default glibc gives most of what an update frees back to the system. The next update gets it
    as new pages. Each is a page fault, and is filled with zeros: a fifth to a third of the time,
    with activations of 200 to 500 MB. Tensors above 32 MiB are given back as before. So is all that
    other C libraries free, and glibc if the environment sets one of its thresholds.

    A setting is one of the whole process, and cannot be read. After the block it is the highest
    that glibc chooses by itself. The caller has reserved the generators, so that no other thread is
    here.
    """
    global _users
    set_threshold = _mallopt() if device.type == "cpu" and not _is_set_by_user() else None
    # The first setting that is given ends the choice by glibc, so both are.
    if set_threshold is None or not set_threshold(_MMAP_THRESHOLD, _LARGEST):
        yield
        return
    _users += 1
    try:
        set_threshold(_TRIM_THRESHOLD, _KEPT)
        yield
    finally:
        _users = max(_users - 1, 0)  # a process may have been forked within the block
        if not _users:
            set_threshold(_TRIM_THRESHOLD, 2 * _LARGEST)


def _forget_users() -> None:
    """Let a process that was forked within a block, such as a worker, give its memory back."""
    global _users
    set_threshold = _mallopt() if _users else None
    _users = 0
    if set_threshold is not None:
        set_threshold(_TRIM_THRESHOLD, 2 * _LARGEST)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_users)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc that sets how it allocates. Fallback: none."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None


@functools.cache
def _is_set_by_user() -> bool:
    """Return whether the environment sets a threshold. The allocator has read it as well, once."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}=" in tunables
        for name in ("trim_threshold", "mmap_threshold")
    )
