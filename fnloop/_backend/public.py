"""The public collectives: gather, reduce and broadcast."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnloop._backend.collectives import (
    control_group,
    gather_objects,
    keep_alive,
    pickled,
    rank_and_size,
)
from fnloop._backend.transfer import device_in, may_need_transfer, to_device
from fnloop._backend.watchdog import wait_for_work, waiting_for_all
from fnloop._display import checks

__all__ = ["broadcast", "gather", "on_main_process", "reduce", "to_device_of"]


def on_main_process(do: Callable[[], Any], what: str) -> Any:
    """Let the main process do something, and all others wait for it; an error there is an error everywhere."""
    rank, size = rank_and_size()
    if size == 1:
        return do()
    result: Any = None
    error: BaseException | None = None
    if rank == 0:
        try:
            result = do()
        except BaseException as raised:
            error = raised
    with waiting_for_all(what):
        failed = broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on the main process: {failed}")
    return broadcast(result)


# --- the public collectives


def gather(tree: Any) -> Any:
    """Collect what every process has: tensors one behind the other, anything else in a list.

    Every process has to call it. Shares may be of different length.

    Args:
        tree: tensors in any nesting of lists, tuples and mappings, the same in every process.

    Returns:
        The same nesting: tensors concatenated along their first dimension, by rank (scalars: stacked); of anything
        else a list with one for each process. In one process tensors stay as they are.

    Raises:
        ValueError: the processes gave different structures.

    Example:
        >>> gather({"seen": torch.tensor([1, 2]), "loss": torch.tensor(0.5), "name": "a"})
        {'seen': tensor([1, 2]), 'loss': tensor([0.5000]), 'name': ['a']}
    """

    def concatenated(parts: list[Any]) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts
        return torch.cat([p.unsqueeze(0) if p.ndim == 0 else p for p in parts])

    with waiting_for_all("fnloop.gather"):
        parts = gather_objects(tree)
    return to_device_of(tree, _zipped(parts, concatenated))


def reduce(tree: Any, how: str = "mean") -> Any:
    """Reduce what every process has to one value, the same in each.

    Every process has to call it. ``reduce(state.metrics)`` is what the run has measured since the epoch began, everywhere.

    Args:
        tree: tensors, numbers and metrics in any nesting of lists, tuples and mappings, the same in every process.
        how: "mean", "sum", "min" or "max", element by element; metrics are combined, whatever it is.

    Returns:
        The same nesting.

    Raises:
        ValueError: there is no such way, or the processes gave different structures.
        TypeError: there is something else in it.

    Example:
        >>> reduce({"loss": torch.tensor([1.0, 3.0]), "n": 2})
        {'loss': tensor([1., 3.]), 'n': 2.0}
    """
    ways = {"mean": torch.mean, "sum": torch.sum, "min": torch.amin, "max": torch.amax}
    checks.choice("reduce", "how", how, ways)

    def reduced(parts: list[Any]) -> Any:
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
            f"reduce expects tensors, numbers and metrics; got {first!r:.60} ({type(first).__name__})"
        )

    with waiting_for_all("fnloop.reduce"):
        parts = gather_objects(tree)
    return to_device_of(tree, _zipped(parts, reduced))


def broadcast(tree: Any, source: int = 0) -> Any:
    """Give every process what one of them has.

    Every process has to call it.

    Args:
        tree: anything that pickles; what the others give is not looked at.
        source: the rank of the process that has it.

    Returns:
        What the source gave; tensors on this process's device if that is where its own are.

    Raises:
        ValueError: there is no such process.

    Example:
        >>> broadcast({"seed": 7})
        {'seed': 7}
    """
    rank, size = rank_and_size()
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < size:
        raise ValueError(f"broadcast expects source as a rank from 0 to {size - 1}; got {source!r}")
    if size == 1:
        return tree
    data = pickled(tree) if rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    with waiting_for_all("fnloop.broadcast"):
        wait_for_work(
            keep_alive(dist.broadcast(length, source, group=control_group(), async_op=True))
        )
        data = data if rank == source else torch.empty(int(length), dtype=torch.uint8)
        wait_for_work(
            keep_alive(dist.broadcast(data, source, group=control_group(), async_op=True))
        )
    return to_device_of(tree, tree if rank == source else pickle.loads(data.numpy().tobytes()))


def _zipped(parts: list[Any], leaf: Callable[[list[Any]], Any]) -> Any:
    """Zip what the processes gave."""
    first = parts[0]
    container = isinstance(first, Mapping | list | tuple)
    if not all(isinstance(part, type(first)) for part in parts) or (
        container and any(_shape(p) != _shape(first) for p in parts)
    ):
        raise ValueError(
            f"the processes gave different structures: {', '.join(f'{part!r:.40}' for part in parts)}"
        )
    if isinstance(first, Mapping):
        return {k: _zipped([part[k] for part in parts], leaf) for k in first}
    if isinstance(first, list | tuple):
        zipped = [_zipped(list(values), leaf) for values in zip(*parts, strict=True)]
        return type(first)(*zipped) if hasattr(first, "_fields") else type(first)(zipped)
    return leaf(parts)


def _shape(container: Any) -> Any:
    return container.keys() if isinstance(container, Mapping) else len(container)


def to_device_of(mine: Any, tree: Any) -> Any:
    """Move what came over the host to where this process's own tensors are."""
    if rank_and_size()[1] == 1 or not may_need_transfer(torch.device("cpu")):
        return tree
    device = device_in(mine)
    return tree if device is None else to_device(tree, device)
