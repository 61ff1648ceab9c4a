"""Plain data and tensors compared bit for bit, and in words where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from fnloop._extensions.checkpoints.serialize import as_flattened
from fnloop.extend import Pending, checks, containers

PLAIN = (
    *(bool, int, float, complex, str, bytes),
    *(torch.dtype, np.ndarray, np.generic, Tensor),
    *(Mapping, *containers.SEQUENCES, set),
)
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_difference(a: Any, b: Any, path: str) -> str | None:
    """Return where two values differ in a bit, or None. Values that are not plain data are ignored.

    Example:
        >>> find_difference({"a": [1.0, torch.zeros(1)]}, {"a": [1.0, torch.ones(1)]}, "state")
        'state.a.1 differs'
    """
    a, b = (dict(t.parts) if isinstance(t := as_flattened(v), Pending) else v for v in (a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = _equal_tensors(a, b)
    elif isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() != b.keys():
        odd = [str(key) for key in (*a, *b) if key not in a or key not in b]
        return f"{path} has {checks.join_names(odd)} in one, and not in the other"
    elif (pairs := containers.pairs_of(a, b)) is not None and len(a) == len(b):
        found = (find_difference(x, y, f"{path}.{key}") for key, x, y in pairs)
        return next(filter(None, found), None)
    else:
        same = not (_is_plain(a) and _is_plain(b)) or _equal_plain(a, b)
    if same:
        return None
    one, other = describe_value(a), describe_value(b)
    if one == other:
        return f"{path} differs"
    return f"{path} is {one} in one, and {other} in the other"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, PLAIN)


def _equal_plain(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    return a is b or bool(np.all(a == b)) or (a != a and b != b)  # the last for NaN


def _equal_tensors(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_view_as_integers(a), _view_as_integers(b).to(a.device))


def _view_as_integers(tensor: Tensor) -> Tensor:
    real = _as_real(tensor.detach()).resolve_neg()
    return real.view(INTEGER_OF_SIZE[real.dtype.itemsize])


@attrs.frozen
class Measured:
    """How much two tensors of one shape and dtype differ.

    Args:
        elements: how many elements do.
        total: how many there are.
        index: that of the first one that does.
        values: the two values there.
        largest: the largest difference; NaN if one of the two is NaN or infinite somewhere.
        steps: how many other floating-point numbers are between the two values at that index, plus
            one ("ulps"); None if they have not one sign, or are not such numbers.
    """

    elements: int
    total: int
    index: tuple[int, ...]
    values: tuple[float, float]
    largest: float
    steps: int | None

    def __str__(self) -> str:
        one, other = (f"{value:.9g}" for value in self.values)
        at = "" if not self.index else f" at {[*self.index]}"
        apart = "" if self.steps is None else f", {self.steps:,} ulp{'s' * (self.steps != 1)} apart"
        return (
            f"{self.elements:,} of {self.total:,} elements differ, by up to {self.largest:.3g}; "
            f"first{at}: {one} and {other}{apart}"
        )


def measure(a: Tensor, b: Tensor) -> Measured | None:
    """Return how much two tensors of one shape and dtype differ; None if they do not.

    NaN is equal to NaN, whatever its bits. Otherwise 0 and -0 differ.

    Example:
        >>> measure(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])).largest
        1.0
    """
    if _equal_tensors(a, b):
        return None
    a, b = (_as_real(tensor.detach().cpu()) for tensor in (a, b))
    bits = _view_as_integers(a), _view_as_integers(b)
    differ = (bits[0] != bits[1]) & ~((a != a) & (b != b))
    places = differ.nonzero()
    if not len(places):
        return None
    place = tuple(places[0].tolist())
    wide = torch.float64 if a.is_floating_point() else torch.int64
    apart = (a[differ].to(wide) - b[differ].to(wide)).abs().double()
    values = float(a[place]), float(b[place])
    steps = None
    if a.is_floating_point() and np.copysign(1, values[0]) == np.copysign(1, values[1]):
        steps = abs(int(bits[0][place]) - int(bits[1][place]))
    largest = float(apart.max())
    return Measured(len(places), a.numel(), place, values, largest, steps)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def describe_value(value: object) -> str:
    """Return a short text for a value; for a tensor, its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return checks.describe(value)
