"""What the processes of a run ask each other. The answers here are those of a single process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from fnloop._backend.containers import (
    IN_BATCHES,
    device_in,
    may_need_transfer,
    parts_of,
    to_device,
    with_parts,
)
from fnloop._display import checks
from fnloop._extensions import extensions

EXCHANGE = "an exchange of metrics or results"
DIVERGED = "the processes have diverged"

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
Tree = TypeVar("Tree")
Parts = list[Any]  # the values of all processes at one place of a tree, by rank

# --------------------------------------------------------------------------------------------------
# Questions to all processes: each of them asks, and gets the answer.
#
# An argument ``what`` says what it is for, as errors name it; it is the same in every process.


@functools.cache
def _joins() -> list[Callable[[], ModuleType | None]]:
    """Return what says who answers for several processes; None if there is one."""
    return extensions("several processes")


def of_all(alone: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Return a question that several processes answer together: by a function of its name.

    Processes that a launcher has started are joined first, if they have not been yet.

    Args:
        alone: the answer of a single process.
    """

    @functools.wraps(alone)
    def ask(*given: Given.args, **named: Given.kwargs) -> Answer:
        __tracebackhide__ = True
        for join in _joins():
            if (together := join()) is not None:
                return getattr(together, alone.__name__)(*given, **named)
        return alone(*given, **named)

    return ask


@of_all
def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return 0, 1


@of_all
def data_shares() -> int:
    """Return to how many processes, or rows of a mesh, the data are distributed."""
    return 1


@of_all
def counts_here() -> bool:
    """Return whether this process counts in sums, and does not only repeat another."""
    return True


@of_all
def collective_count() -> int:
    """Return how many collectives this process has begun, but for fnloop's control messages.

    Where torch does not count them, it returns a new number each time: a function then seems to use
    collectives, and is called on padding too, which is slower and right.
    """
    return 0


@of_all
def gather_from_all(value: Tree, what: str = EXCHANGE) -> list[Tree]:
    """Return the values of all processes by rank, with tensors on the host."""
    return [value]


@of_all
def gather_shares(value: Tree, what: str = EXCHANGE) -> list[Tree]:
    """Return one value for each share of the data, in their order, with tensors on the host.

    Of processes that have the same share, it is that of the first.
    """
    return [value]


@of_all
def gather_objects(value: Tree, what: str = EXCHANGE) -> list[Tree]:
    """Return the values of all processes that count in sums, with tensors on the host.

    They are in the order of the shares of the data; by rank, if a share has several that count.
    """
    return [value]


@of_all
def broadcast_object(value: Tree, source: int, what: str) -> Tree:
    """Return the value of the process with the rank ``source``, in every process."""
    return value


@of_all
def start_all_reduce_max(
    numbers: Iterable[float], what: str = "an agreement"
) -> Callable[[], list[float]]:
    """Start to find the largest of each number, at most 14, over all processes.

    Returns:
        A function that waits for the numbers and returns them.
    """
    own = [*map(float, numbers)]
    return lambda: own


@of_all
def all_reduce_max(numbers: Iterable[float], what: str = "an agreement") -> list[float]:
    """Return the largest of each number over all processes.

    Raises:
        RuntimeError: the processes have different numbers of numbers.
    """
    return [*map(float, numbers)]


def any_rank(flag: bool, what: str = "an agreement") -> bool:
    """Return whether a flag is set in any process."""
    return all_reduce_max([flag], what)[0] > 0


@of_all
def all_reduce_sum(number: float, what: str) -> float:
    """Return the sum of a number over all processes that count."""
    return number


@of_all
def sync_buffers(model: nn.Module) -> None:
    """Copy the buffers of the main process, such as running statistics, to every process."""


@of_all
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

    Example:
        >>> on_main_process(lambda: 3, "a count of files")
        3
    """
    __tracebackhide__ = True
    return do()


@of_all
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
    return do()


# --------------------------------------------------------------------------------------------------
# The public ones: gather, reduce and broadcast.


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
    ways = {
        "mean": (torch.mean, lambda numbers: sum(numbers) / len(numbers)),
        "sum": (torch.sum, sum),
        "min": (torch.amin, min),
        "max": (torch.amax, max),
    }
    checks.choice("reduce", "how", how, ways)
    of_tensors, of_numbers = ways[how]

    def reduce_leaf(parts: Parts) -> object:
        first = parts[0]
        if hasattr(first, "combine"):
            return functools.reduce(lambda a, b: a.combine(b), parts)
        if isinstance(first, Tensor):
            stacked = torch.stack(parts)
            whole = how == "mean" and not stacked.is_floating_point()
            return of_tensors(stacked.double() if whole else stacked, dim=0)
        if isinstance(first, int | float):
            return of_numbers(parts)
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
