"""A module that stands for several models, which one step trains at once.

An extension makes it. The kernel asks it what it would otherwise do with a single model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._core.types import Aux, Batch, Metric, Middleware, Skip

Reply = tuple[Tensor, Aux, float | Tensor]  # the loss of a batch, its aux, and what it weighs


class Several(nn.Module):
    """The base of modules that are several models, each with a loss and an optimizer of its own.

    A step asks such a module for what it would otherwise do with a single model. In the gradient
    ring the first dimension of a gradient is that of the models, and a loss has an element of each.

    Args:
        args: none, for a module.
        kwargs: none, for a module.

    Example:
        >>> import fnloop as fl
        >>> from fnloop.testing import toy
        >>> state = fl.stack({"a": toy(), "b": toy()})
        >>> isinstance(state.model, Several), Several.names_of(state.model)
        (True, ('a', 'b'))
    """

    names: tuple[str, ...] = ()

    def gradients_of(self) -> tuple[list[Tensor], list[nn.Parameter]]:
        """Return what backward leaves gradients in, and for each a parameter of an optimizer.

        The first list is the same one each time.

        Raises:
            NotImplementedError: the class does not say.
        """
        raise NotImplementedError

    def call(self, evaluate: Callable[[nn.Module], Reply | Skip], name: str) -> Reply | Skip:
        """Evaluate a batch with all models: the loss has an element of each.

        Args:
            evaluate: ``model -> (loss, aux, weight)``, calls the loss function.
            name: the name of the loss function.

        Raises:
            NotImplementedError: the class does not say.
        """
        raise NotImplementedError

    def call_each(self, fn: Callable[[Batch], Batch], given: Batch, name: str) -> Batch:
        """Call a function of one model's results for all models at once.

        Args:
            fn: a function of such a value as is given, but of one model.
            given: the value: each tensor in it has a first dimension for the models.
            name: the name of the function, for messages.

        Raises:
            NotImplementedError: the class does not say.
        """
        raise NotImplementedError

    def metric(self, label: str, values: Tensor, weight: float | Tensor) -> Metric:
        """Return the mean of each model over a batch, given their values in one vector.

        Raises:
            NotImplementedError: the class does not say.
        """
        raise NotImplementedError

    def update(
        self,
        optimizers: Sequence[Optimizer],
        apply: Callable[[Optimizer], None],
        replaced: bool,
    ) -> None:
        """Update all models by their gradients.

        Args:
            optimizers: the optimizers, one for each model.
            apply: makes the step of one optimizer.
            replaced: whether someone looks at each optimizer's step.

        Raises:
            NotImplementedError: the class does not say.
        """
        raise NotImplementedError

    def check(self, listed: Sequence[Middleware]) -> None:
        """Raise if a middleware does not work with several models.

        Raises:
            NotImplementedError: one does not.
        """
        raise NotImplementedError

    def refuse(self, step: str) -> None:
        """Raise for a step that is not of one loss function.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    @staticmethod
    def names_of(model: nn.Module) -> tuple[str, ...]:
        """Return the names of the models that a module stands for; none for a single model."""
        return model.names if isinstance(model, Several) else ()
