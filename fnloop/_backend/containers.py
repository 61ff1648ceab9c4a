"""The one place that knows what a container is: a mapping, a list, a tuple or a deque of any class.

Everything else is a leaf, such as a tensor, a str or a set. Torch's pytree is not used: it takes
five times as long, and subclasses of list, ``UserDict`` and ``torch.Size`` are leaves for it.
"""

from __future__ import annotations

import copy
import operator
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

__all__ = ["IN_BATCHES", "SEQUENCES", "map_leaves", "pairs_of", "parts_of", "with_parts"]

Value = TypeVar("Value")
SEQUENCES = (list, tuple, deque)
IN_BATCHES = (list, tuple)  # the sequences whose tensors are moved to a device


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
    return type(container)(*parts) if hasattr(value, "_fields") else type(container)(parts)


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
