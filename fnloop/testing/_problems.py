"""Problems that a law can be checked on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from fnloop._core.state import TrainState
from fnloop._core.types import Batch, LossFn
from fnloop._display import checks

__all__ = ["Problem", "small", "stochastic"]


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@attrs.frozen
class Problem:
    """A model, a loss function and batches that a law can be checked on.

    Args:
        model: a function that makes the module; the law seeds torch before the call.
        loss_fn: the loss function.
        batches: batches of one structure, not all of one size.
        optimizer: a function that makes the optimizer from parameters, or a mapping of several.
        cat: a function that joins batches into one, for the law of accumulation; or None.

    Raises:
        TypeError: a part of it is something else, or there is no batch.

    Example:
        >>> from fnloop import pipeline
        >>> from fnloop.testing import Toy, check_laws, toy_loss
        >>> problem = Problem(Toy, toy_loss, [torch.ones(2), torch.ones(1)])
        >>> check_laws(pipeline(), problem)
    """

    model: Callable[[], nn.Module]
    loss_fn: LossFn
    batches: Sequence[Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer | Mapping[str, Optimizer]] = _sgd
    cat: Callable[[Sequence[Batch]], Batch] | None = None

    def __attrs_post_init__(self) -> None:
        function = checks.function
        function("Problem", "model", self.model, "a function that makes the module", 0, also=type)
        function("Problem", "loss_fn", self.loss_fn, "a function (model, batch) -> loss", 2)
        if not isinstance(self.batches, list | tuple) or not self.batches:
            raise TypeError(
                "Problem expects batches as a list of batches, at least one; "
                f"got {checks.describe(self.batches)}"
            )
        wanted = "a function parameters -> optimizer"
        function("Problem", "optimizer", self.optimizer, wanted, 1, also=type)
        if self.cat is not None:
            wanted = "a function of a sequence of batches -> a batch, or None"
            function("Problem", "cat", self.cat, wanted, 1)

    def state(self, seed: int = 0) -> TrainState:
        """Return a new initial state, the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        return TrainState.create(model, self.optimizer(model.parameters()), seed=seed)


def small() -> Problem:
    """Return a problem without randomness: a small net in float64, batches of unequal sizes.

    Returns:
        A problem that every law can be checked on.

    Example:
        >>> [len(x) for x, y in small().batches]
        [4, 4, 3, 4, 1, 4, 2]
    """
    return Problem(_net, _tuple_loss, _batches([4, 4, 3, 4, 1, 4, 2]), cat=_cat)


def stochastic() -> Problem:
    """Return a problem with dropout and batch norm, dict batches, and AdamW.

    Returns:
        A problem for the laws of folding and purity.

    Example:
        >>> sorted(stochastic().batches[0])
        ['x', 'y']
    """
    return Problem(
        lambda: _net(nn.BatchNorm1d(8), nn.Dropout(0.3)),
        _dict_loss,
        [{"x": x, "y": y} for x, y in _batches([4, 4, 3, 4, 2, 4, 2])],
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    )


def _batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    return [(part, part.sum(1, keepdim=True).sin()) for part in x]


def _cat(batches: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _net(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1)).double()


def _tuple_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(batch[0])
    return functional.mse_loss(output.double(), batch[1]), {"output": output}


def _dict_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return _tuple_loss(model, (batch["x"], batch["y"]))
