"""The operators of an update, each with a checksum of its results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.transfer import tensors_in
from fnloop.debug._bits import as_integers
from fnloop.debug._lines import running_line

__all__ = ["OUTSIDE", "Called", "Trace", "first_other_operator"]

OUTSIDE = (
    "in no line of yours: in backward, in the optimizer or in a library"  # where it was called
)
# Memory that nothing was written to yet has any content.
_UNWRITTEN = ("empty", "resize", "set_")


@attrs.frozen(eq=False)
class Called:
    """A call of an operator.

    Args:
        operator: its name.
        line: the line of the user that called it; "" in backward and in the optimizer.
        checksum: of its results, on the device; or what it read to the host.
    """

    operator: str
    line: str
    checksum: object


class Trace(torch_compat.DispatchMode):
    """Notes every operator that runs in a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        results = func(*args, **(kwargs or {}))
        name = str(func)
        if torch_compat.computes(func) and not any(part in name for part in _UNWRITTEN):
            self.calls.append(Called(name, running_line(sys._getframe(1)), _checksum(results)))
        return results


def _checksum(results: object) -> object:
    if not isinstance(results, Tensor | list | tuple):
        return results
    found = [t for t in tensors_in(results) if t.layout is torch.strided and t.numel()]
    sums = [as_integers(t).sum(dtype=torch.int64) for t in found]
    return torch.stack([one.to(sums[0].device) for one in sums]) if sums else None


def first_other_operator(a: Trace, b: Trace) -> Called | None:
    """Return the first operator whose results, or which itself, is not the same in both."""
    for one, other in zip(a.calls, b.calls, strict=False):
        if one.operator != other.operator or one.line != other.line:
            return other
        x, y = one.checksum, other.checksum
        same = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
        if not same and not (x != x and y != y):
            return other
    shorter = min(len(a.calls), len(b.calls))
    left = [*a.calls[shorter:], *b.calls[shorter:]]
    return left[0] if left else None
