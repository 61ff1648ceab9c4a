"""A step that records its calls, and a guard against host reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Aux, Batch, Output
from fnloop._display import checks
from fnloop.testing._toys import check_real

__all__ = ["HostReadError", "Spy", "no_host_reads", "spy"]


@attrs.define
class Spy:
    """A step that records its calls and returns given values. Make one with :func:`spy`.

    Args:
        loss, grad, weight, aux, skip: as in :func:`spy`.
        calls: the arguments of its calls so far: a list of ``(state, batch)``.

    Example:
        >>> from fnloop.testing import toy
        >>> inner = Spy(weight=3)
        >>> inner(toy(), "batch")[1].weight, len(inner.calls)
        (3, 1)
    """

    loss: float = 0.0
    grad: float | None = None
    weight: int = 1
    aux: Aux = attrs.field(factory=dict)
    skip: str | None = None
    calls: list[tuple[TrainState, Batch]] = attrs.field(factory=list)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        self.calls.append((state, batch))
        if self.grad is not None:
            for p in parameters(state):
                p.grad = torch.full_like(p, self.grad)
        return state, Output(torch.tensor(self.loss), self.weight, self.aux, {}, self.skip)


def spy(
    loss: float = 0.0,
    grad: float | None = None,
    weight: int = 1,
    aux: Aux | None = None,
    skip: str | None = None,
) -> Spy:
    """Return a step for unit tests of a middleware that wraps it.

    Args:
        loss: the loss that it reports.
        grad: the value that it fills every gradient with, if given.
        weight: the weight that it reports.
        aux: the aux that it reports.
        skip: why the update is to be skipped, or None.

    Returns:
        A step; its ``calls`` are a list of ``(state, batch)``.

    Example:
        >>> from fnloop.testing import toy
        >>> inner = spy(loss=2.0)
        >>> state, out = inner(toy(), "batch")
        >>> out.loss.item(), inner.calls[0][1]
        (2.0, 'batch')
    """
    check_real("spy", "loss", loss)
    if grad is not None:
        check_real("spy", "grad", grad)
    if isinstance(weight, Tensor):
        checks.scalar("spy", "weight", weight)
    else:
        checks.integer("spy", "weight", weight, "the number of items", least=0)
    if aux is not None:
        checks.mapping("spy", "aux", aux, 'such as {"output": output}')
    if skip is not None:
        checks.text("spy", "skip", skip, "why the update is to be skipped")
    return Spy(loss, grad, weight, aux or {}, skip)


class HostReadError(AssertionError):
    """A tensor was read to the host where that was forbidden."""

    __module__ = "fnloop.testing"  # the name by which a traceback shows it


class _NoHostReads(torch_compat.DispatchMode):
    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if torch_compat.reads_to_host(func):
            raise HostReadError(
                "a tensor was read to the host (.item(), float(), bool(), if tensor: ...)"
            )
        return func(*args, **(kwargs or {}))


def no_host_reads() -> contextlib.AbstractContextManager[object]:
    """Forbid reading tensors to the host. On CUDA each such read waits for the device.

    Returns:
        A context manager.

    Raises:
        HostReadError: inside the context, when ``.item()``, ``float(tensor)``, ``if tensor`` or the
            like is called.

    Example:
        >>> with no_host_reads():
        ...     torch.ones(()).item()
        Traceback (most recent call last):
        fnloop.testing.HostReadError: a tensor was read to the host (.item(), float(), ...)
    """
    return _NoHostReads()
