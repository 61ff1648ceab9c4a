"""For tests of your own middleware: a toy model, a spy, a mode that forbids host reads, and the laws as functions.

    >>> import fnloop as fl
    >>> from fnloop.testing import check_laws
    >>> check_laws(fl.pipeline(fl.accumulate(2), fl.clip(1.0)))       # raises AssertionError if a law is broken
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fnloop._state import TrainState


class Toy(nn.Module):
    """One parameter, ``w``."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def toy(w: float = 0.0, lr: float = 1.0) -> TrainState:
    """Return the state of a toy model: one parameter, plain SGD."""
    model = Toy(w)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr), seed=0)


def toy_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of ``w × x``: its gradient is the mean of x."""
    output = model(batch)
    return output.mean(), {"output": output}
