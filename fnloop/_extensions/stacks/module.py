"""Models of one architecture as one module, and what a step asks of it.

Each model keeps parameters and buffers of its own, which are views of stacked tensors. So whatever
looks at them, such as a checkpoint or a hook, sees as many models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, Self

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._core.metrics import Mean
from fnloop._core.several import Several
from fnloop._core.types import Middleware
from fnloop._extensions.stacks.leaves import INSTEAD, Shared, call_each, call_models, leaves_of
from fnloop._extensions.stacks.updates import update_models
from fnloop.extend import Batch, checks

# --------------------------------------------------------------------------------------------------
# The metrics of its models.


@attrs.frozen(eq=False)
class PerModel(Mean):
    """A mean of each model of a stack, in one vector.

    Args:
        total: the sums of value × weight, of shape (models,).
        weight: the sum of weights, which all models have in common.
        label: the name of the metric, such as "loss": that of model "a" is then "a/loss".
        models: the names of the models.

    Example:
        >>> import torch
        >>> PerModel(torch.tensor([6.0, 2.0]), 2, "loss", ("a", "b")).compute()
        {'a/loss': 3.0, 'b/loss': 1.0}
    """

    label: str = ""
    models: tuple[str, ...] = attrs.field(default=(), converter=tuple)

    constants = ("label", "models")

    @property
    def key(self) -> str:
        """Its name, where the name of a model comes before it."""
        return self.label

    def compute(self) -> Batch:
        """Return the mean of each model, by the name of its metric."""
        return {f"{name}/{self.label}": self.of(i).compute() for i, name in enumerate(self.models)}

    def of(self, model: int) -> Mean:
        """Return the mean of one model, which shares no tensor."""
        return Mean(self.total[model].clone(), copy.deepcopy(self.weight))

    def _reduced(self, other: Self, in_place: bool) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        # What counts items keeps the weights of before, so that they do not change in place.
        weight = self.weight + other.weight
        total = self.total.add_(other.total) if in_place else self.total + other.total
        return attrs.evolve(other, total=total, weight=weight)


# --------------------------------------------------------------------------------------------------
# The module of a stack.


class Stack(Several):
    """Models of one architecture, which train as one. See :func:`fnloop.stack`.

    ``stack["a"]`` is one of the models, and ``[*stack]`` are their names.

    Args:
        models: name to model.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = tuple(models)
        for name, model in models.items():
            self.add_module(_module_name(name), model)

    @property
    def models(self) -> list[nn.Module]:
        """The models, in their order."""
        return [*self.children()]

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self.names:
            raise KeyError(f"there is no model {name!r} in the stack; those are: {self._listed()}")
        return self.get_submodule(_module_name(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def forward(self, *args: object, **settings: object) -> NoReturn:
        """Raise TypeError: a stack has no output of its own."""
        raise TypeError(
            "a stack of models has no output of its own: call one of its models, "
            f"state.model[{self.names[0]!r}](x)"
        )

    def extra_repr(self) -> str:
        """Return the names of the models."""
        return self._listed()

    def _listed(self) -> str:
        return checks.join_names([*map(repr, self.names)], 8)

    # --- what a step asks

    def gradients_of(self) -> tuple[list[Tensor], list[nn.Parameter]]:
        leaves = leaves_of(self, again=True)
        return leaves.params, [each[0] for each in leaves.owners]

    def call(self, evaluate: Callable[[nn.Module], Batch], name: str) -> Batch:
        __tracebackhide__ = True

        def of_one(model: nn.Module) -> Batch:
            __tracebackhide__ = True
            reply = evaluate(model)
            if not isinstance(reply, tuple):  # the loss function skips the batch
                return reply
            loss, aux, weight = reply
            shared = Shared(weight)
            if shared.differs:
                raise ValueError(
                    f'the aux["weight"] of {name} depends on the model, and the models of a stack '
                    f"make every update with the same items. {INSTEAD}"
                )
            return loss, dict(aux), shared

        reply = call_models(self, name, of_one)
        if not isinstance(reply, tuple):
            return reply
        loss, aux, shared = reply
        return loss, aux, shared.value

    def call_each(self, fn: Callable[[Batch], Batch], given: Batch, name: str) -> Batch:
        __tracebackhide__ = True
        return call_each(fn, given, name)

    def metric(self, label: str, values: Tensor, weight: float | Tensor) -> PerModel:
        return PerModel.of_batch(values, weight, label=label, models=self.names)

    def update(
        self,
        optimizers: Sequence[Optimizer],
        apply: Callable[[Optimizer], None],
        replaced: bool,
    ) -> None:
        __tracebackhide__ = True
        update_models(self, optimizers, apply, replaced)

    def check(self, listed: Sequence[Middleware]) -> None:
        for member in listed:
            if "stacks" not in member.traits:
                raise NotImplementedError(
                    f"{member!r} does not work with a stack of models: leave it out. {INSTEAD}"
                )

    def refuse(self, step: str) -> None:
        raise NotImplementedError(
            f"{step} does not train a stack of models, whose loss function is called once "
            f"for all: write pipeline(...)(loss_fn). {INSTEAD}"
        )


def _module_name(name: str) -> str:
    """Return the name of a model as the name of a module, which may have no dot."""
    return name.replace("%", "%25").replace(".", "%2E")
