"""Loss functions for batches ``(x, y)``, made of a criterion."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from torch import Tensor, nn

from fnloop._core.types import LossFn
from fnloop.extend import Batch, checks, name_of


def supervised(criterion: Callable[[Tensor, Tensor], Tensor]) -> LossFn:
    """Make a loss function for batches ``(x, y)``.

    Args:
        criterion: ``(model(x), y) -> mean loss``, such as ``nn.CrossEntropyLoss()``.

    Returns:
        A loss function with ``aux = {"output": model(x)}``.

    Raises:
        TypeError: the criterion cannot be called, or is a class.

    Example:
        >>> import fnloop as fl, torch
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> loss, aux = supervised(nn.MSELoss())(model, (torch.ones(3, 2), torch.ones(3, 1)))
        >>> aux["output"].shape
        torch.Size([3, 1])
    """
    if isinstance(criterion, type) or not callable(criterion):
        name = criterion.__name__ if isinstance(criterion, type) else "nn.CrossEntropyLoss"
        raise TypeError(
            "supervised expects a criterion (output, target) -> loss; got "
            f"{checks.describe(criterion)}. Write supervised({name}())"
        )
    meaning = "a function (output, target) -> loss"
    checks.function("supervised", "criterion", criterion, meaning, 2, also=nn.Module)
    return _Supervised(criterion)


@attrs.frozen(repr=False)
class _Supervised:
    criterion: Callable[[Tensor, Tensor], Tensor]

    def __repr__(self) -> str:
        return f"supervised({name_of(self.criterion)})"

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        __tracebackhide__ = True
        if batch.__class__ is not tuple and batch.__class__ is not list:
            self._check(batch)
        x, y = batch
        output = model(x)
        return self.criterion(output, y), {"output": output}

    def _check(self, batch: object) -> None:
        """Raise TypeError if a batch is a mapping, whose keys would be taken for x and y."""
        if not isinstance(batch, Mapping):
            return
        x, y = [*map(repr, batch), "...", "..."][:2]
        names = ", ".join(map(repr, batch))
        raise TypeError(
            f"supervised expects batches (x, y); got a {type(batch).__name__} with {names}. Write "
            "a loss function: def loss_fn(model, batch): return criterion(model(batch"
            f"[{x}]), batch[{y}])"
        )
