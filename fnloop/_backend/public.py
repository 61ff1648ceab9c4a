"""The public collectives: gather, reduce and broadcast."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnloop._backend.collectives import (
    broadcast_object,
    gather_from_all,
    gather_objects,
    rank_and_size,
)
from fnloop._backend.containers import IN_BATCHES, parts_of, with_parts
from fnloop._backend.transfer import device_in, may_need_transfer, to_device
from fnloop._display import checks

__all__ = ["broadcast", "gather", "on_every_process", "on_main_process", "reduce", "to_device_of"]

Tree = TypeVar("Tree")
Parts = list[Any]  # the values of all processes at one place of a tree, by rank


def on_main_process(do: Callable[[], Tree], what: str) -> Tree:
    """Run a function on the main process while all others wait.

    Args:
        do: the function.
        what: what it does, as errors and warnings name it.

    Returns:
        Its result, in every process.

    Raises:
        RuntimeError: in the other processes, if it failed on the main process, where its error is
            raised.
    """
    rank, size = rank_and_size()
    if size == 1:
        return do()
    result: Tree | None = None
    error: BaseException | None = None
    if rank == 0:
        try:
            result = do()
        except BaseException as raised:
            error = raised
    said = "" if error is None else f"{type(error).__name__}: {error}"
    failed, made = broadcast_object((said, result), 0, what)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on the main process: {failed}")
    return made


def on_every_process(do: Callable[[], Tree], what: str) -> Tree:
    """Run a function on every process. If it fails on one, raise on all.

    Args:
        do: the function.
        what: what it does, as errors and warnings name it.

    Returns:
        The result of this process.

    Raises:
        Exception: the error of this process, or that of the first process that failed.
    """
    rank, size = rank_and_size()
    if size == 1:
        return do()
    result: Tree | None = None
    error: BaseException | None = None
    try:
        result = do()
    except BaseException as raised:
        error = raised
    errors = gather_from_all(None if error is None else _portable(error, what, rank), what)
    if error is not None:
        raise error
    for failed in errors:
        if failed is not None:
            raise failed
    return result  # type: ignore[return-value]


def _portable(error: BaseException, what: str, rank: int) -> Exception:
    """Return an error that another process can raise: the same, if it can be pickled."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            copied = pickle.loads(pickle.dumps(error))
            if type(copied) is type(error) and str(copied) == str(error):
                copied.add_note(f"{what} failed on process {rank}")
                return copied
    return RuntimeError(f"{what} failed on process {rank}: {type(error).__name__}: {error}")


def gather(tree: object) -> Any:
    """Collect the values of all processes: tensors are concatenated, other values listed.

    Every process must call it. The lengths of the tensors may differ.

    Args:
        tree: tensors in any nesting of lists, tuples and mappings, the same in every process.

    Returns:
        The same nesting: tensors concatenated along their first dimension, by rank (scalars are
        stacked); for any other value a list with one value per process. In one process tensors are
        unchanged.

    Raises:
        ValueError: the structures of the processes differ.

    Example:
        >>> gather({"seen": torch.tensor([1, 2]), "loss": torch.tensor(0.5), "name": "a"})
        {'seen': tensor([1, 2]), 'loss': tensor([0.5000]), 'name': ['a']}
    """

    def concatenate(parts: Parts) -> object:
        if not isinstance(parts[0], Tensor):
            return parts
        return torch.cat([p.unsqueeze(0) if p.ndim == 0 else p for p in parts])

    parts = gather_objects(tree, "fnloop.gather")
    return to_device_of(tree, _combine_trees(parts, concatenate))


def reduce(tree: object, how: str = "mean") -> Any:
    """Reduce the values of all processes to one value, the same in each.

    Every process must call it. ``reduce(state.metrics)`` returns the metrics of all processes since
    the epoch began.

    Args:
        tree: tensors, numbers and metrics in any nesting of lists, tuples and mappings, the same in
            every process.
        how: "mean", "sum", "min" or "max", element by element; metrics are always combined.

    Returns:
        The same nesting.

    Raises:
        ValueError: ``how`` is unknown, or the structures of the processes differ.
        TypeError: a value is not a tensor, a number or a metric.

    Example:
        >>> reduce({"loss": torch.tensor([1.0, 3.0]), "n": 2})
        {'loss': tensor([1., 3.]), 'n': 2.0}
    """
    ways = {"mean": torch.mean, "sum": torch.sum, "min": torch.amin, "max": torch.amax}
    checks.choice("reduce", "how", how, ways)

    def reduce_leaf(parts: Parts) -> object:
        first = parts[0]
        if hasattr(first, "combine"):
            return functools.reduce(lambda a, b: a.combine(b), parts)
        if isinstance(first, Tensor):
            stacked = torch.stack(parts)
            return ways[how](
                stacked if how != "mean" or stacked.is_floating_point() else stacked.double(), dim=0
            )
        if isinstance(first, int | float):
            return {
                "mean": sum(parts) / len(parts),
                "sum": sum(parts),
                "min": min(parts),
                "max": max(parts),
            }[how]
        raise TypeError(
            f"reduce expects tensors, numbers and metrics; got {first!r:.60} "
            f"({type(first).__name__})"
        )

    parts = gather_objects(tree, "fnloop.reduce")
    return to_device_of(tree, _combine_trees(parts, reduce_leaf))


def broadcast(tree: object, source: int = 0) -> Any:
    """Send a value of one process to all.

    Every process must call it.

    Args:
        tree: anything that pickles; ignored in the other processes.
        source: the rank of the process whose value is sent.

    Returns:
        The value of the source. Its tensors are on this process's device if the tensors of ``tree``
        are.

    Raises:
        ValueError: ``source`` is not a rank.

    Example:
        >>> broadcast({"seed": 7})
        {'seed': 7}
    """
    _, size = rank_and_size()
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < size:
        raise ValueError(f"broadcast expects source as a rank from 0 to {size - 1}; got {source!r}")
    if size == 1:
        return tree
    what = "fnloop.broadcast" if source == 0 else f"fnloop.broadcast from process {source}"
    return to_device_of(tree, broadcast_object(tree, source, what))


def _combine_trees(parts: Parts, leaf: Callable[[Parts], object]) -> Any:
    """Combine the values of the processes leaf by leaf. A mapping becomes a dict."""
    first = parts[0]
    inside = [dict(parts_of(part, IN_BATCHES) or ()) for part in parts]
    if not all(isinstance(part, type(first)) for part in parts) or any(
        held.keys() != inside[0].keys() for held in inside
    ):
        raise ValueError(
            "the structures of the processes differ: "
            + ", ".join(f"{part!r:.40}" for part in parts)
        )
    if parts_of(first, IN_BATCHES) is None:
        return leaf(parts)
    combined = {key: _combine_trees([held[key] for held in inside], leaf) for key in inside[0]}
    return with_parts(first, combined.values()) if isinstance(first, IN_BATCHES) else combined


def to_device_of(mine: object, tree: Tree) -> Tree:
    """Move a result from the host to the device of this process's own tensors."""
    if rank_and_size()[1] == 1 or not may_need_transfer(torch.device("cpu")):
        return tree
    device = device_in(mine)
    return tree if device is None else to_device(tree, device)
