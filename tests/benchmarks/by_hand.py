"""The loops by hand that others are compared with: the fewest lines of torch, without fnloop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

WINDOW, MAX_NORM = 4, 1.0  # batches of an update, and the largest norm of its gradient
Batch = tuple[Tensor, Tensor]


def train(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], reads: bool = False
) -> None:
    """Train. Read the loss of each update from the device, or only their sum."""
    total, losses = torch.zeros((), device=next(model.parameters()).device), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(y)
        if reads:
            losses.append(loss.item())
    total.item()


def train_accumulated(model: nn.Module, optimizer: Optimizer, batches: Sequence[Batch]) -> None:
    """Train with updates of ``WINDOW`` batches, whose gradient is clipped."""
    total = torch.zeros(())
    for i in range(0, len(batches), WINDOW):
        optimizer.zero_grad()
        for x, y in batches[i : i + WINDOW]:
            loss = cross_entropy(model(x), y)
            (loss / WINDOW).backward()
            total += loss.detach() * len(y)
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    total.item()


def train_averaged(model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch]) -> None:
    """Train, and follow the weights with an average."""
    weights = [p.detach() for p in model.parameters()]
    average, total = [p.clone() for p in weights], torch.zeros(())
    for x, y in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(average, weights, 0.001)
        total += loss.detach() * len(y)
    total.item()
