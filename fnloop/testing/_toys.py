"""Toys whose updates can be computed in the head, and a spy for the calls of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Aux, Batch, Output
from fnloop._display import checks
from fnloop.extend import torch_compat

# --------------------------------------------------------------------------------------------------
# A model of one parameter whose updates can be computed in the head.


class Toy(nn.Module):
    """A model with one parameter, ``w``. Its output is ``w × x``.

    Args:
        w: the initial value of the parameter.

    Example:
        >>> Toy(w=2.0)(torch.tensor(3.0)).item()
        6.0
    """

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        check_real("Toy", "w", w)
        self.w = nn.Parameter(torch.tensor(float(w)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def toy(w: float = 0.0, lr: float = 1.0) -> TrainState:
    """Return the state of a toy with plain SGD: an update with gradient g changes w by -lr × g.

    Args:
        w: the initial value of the parameter.
        lr: the learning rate.

    Returns:
        A state at step 0.

    Example:
        >>> toy().model.w.item()
        0.0
    """
    check_real("toy", "w", w)
    lr = checks.number("toy", "lr", lr, "the learning rate", least=0)
    model = Toy(w)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr), seed=0)


def toy_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of ``w × x``. Its gradient is the mean of x, whatever w is.

    Args:
        model: a :class:`Toy`.
        batch: x; shape=(n,).

    Returns:
        The loss, and ``{"output": w × x}``.

    Example:
        >>> loss, aux = toy_loss(Toy(w=2.0), torch.tensor([1.0, 3.0]))
        >>> loss.item()
        4.0
    """
    output = model(batch)
    return output.mean(), {"output": output}


def check_real(owner: str, name: str, value: object) -> None:
    """Raise unless a value is a number. NaN and infinities are accepted: tests need them."""
    if not (isinstance(value, float) and not math.isfinite(value)):
        checks.number(owner, name, value)


# --------------------------------------------------------------------------------------------------
# A step that records its calls, and a guard against host reads.


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
        weight = checks.integer("spy", "weight", weight, "the number of items", least=0)
    if aux is not None:
        checks.mapping("spy", "aux", aux, 'such as {"output": output}')
    if skip is not None:
        checks.text("spy", "skip", skip, "why the update is to be skipped")
    return Spy(loss, grad, weight, aux or {}, skip)


class HostReadError(AssertionError):
    """A tensor was read to the host where that was forbidden."""

    __module__ = "fnloop.testing"  # the name by which a traceback shows it


class _NoHostReads(torch_compat.Operators):
    def see(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        if torch_compat.reads_to_host(func):
            raise HostReadError(
                "a tensor was read to the host (.item(), float(), bool(), if tensor: ...)"
            )
        return func(*args, **kwargs)


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
