"""A model of one parameter whose updates can be computed in the head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fnloop._core.state import TrainState
from fnloop._display import checks

__all__ = ["Toy", "check_real", "toy", "toy_loss"]


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
    checks.number("toy", "lr", lr, "the learning rate", least=0)
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
