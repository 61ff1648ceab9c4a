"""The vocabulary: what a loss function, a step, an output and a metric are.

A *step* is ``(state, batch) -> (state, Output)`` at every layer. A *middleware* wraps a step and
returns a step. Its *ring* decides which steps it wraps, and ``pipeline`` keeps the listed order
within a ring:

    ring       wraps                                          sees
    forward    the loss function, in training and evaluation  the batch; then loss, aux, metrics
    evaluation forward, in evaluation only                    the same
    loss       forward, in training only                      the scalar that backward starts from
    gradient   backward                                       gradients, in the parameters' .grad
    update     the optimizer's step                           the new parameters
    device     all of the above                               only device work, no host values
    step       everything                                     counters, the host

This module knows nothing about states or models. ``state`` defines the record, ``_step.pipeline``
the composition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

import attrs
from torch import Tensor, nn

from fnloop._core.skip import Skip
from fnloop._display import html

__all__ = [
    "EVALUATION",
    "RINGS",
    "Aux",
    "Batch",
    "LossFn",
    "Metric",
    "Output",
    "Step",
    "Wrap",
    "values_of",
]

Batch = Any  # a matter between a loader and a loss function
Aux = Mapping[str, Any]  # what a loss function returns besides the loss
State = TypeVar("State")
RINGS = ("forward", "loss", "gradient", "update", "device", "step")
EVALUATION = "evaluation"  # the ring that an update does not pass through


class LossFn(Protocol):
    """What a user writes: a function that returns the mean loss of a batch, or ``(loss, aux)``.

    For a batch that is to be left out it returns ``skip(reason)``.
    """

    def __call__(self, model: nn.Module, batch: Batch, /) -> Tensor | tuple[Tensor, Aux] | Skip:
        """Return the mean loss over the items of ``batch``, and optionally a mapping ``aux``.

        ``aux["weight"]`` overrides the number of items that the loss is the mean of. By default
        that is the leading dimension of the batch. It is an int, or a scalar tensor on the device
        such as a token count.

        An int of 0 skips the batch. If every batch of a window is skipped, no update is made. A
        tensor of 0 adds nothing to the gradient, but the update is made, with a gradient of zero if
        all weights are 0: to skip it, the host would have to wait for the device. NaN, infinite and
        negative tensors count as 0, and the next report raises a ValueError.
        """
        ...


class Step(Protocol[State]):
    """``(state, batch) -> (state, Output)``, at every layer of a pipeline."""

    def __call__(self, state: State, batch: Batch, /) -> tuple[State, Output]: ...


Wrap = Callable[[Step], Step]


class Metric(Protocol):
    """A value that can be combined over batches, windows and processes in any grouping."""

    def combine(self, other: Self, /) -> Self:
        """Return the metric of both parts. Neither is changed."""
        ...

    def compute(self) -> float:
        """Return the value. Only this method reads from the device.

        A metric with several values returns a mapping, from names to numbers.
        """
        ...


def values_of(name: str, metric: Metric) -> Mapping[str, Any]:
    """Compute a metric. Return its values by the names under which they are reported.

    A metric with several values is reported as ``name/value``. If it has an attribute ``key``, and
    was kept under that name, its values stand alone: it is left out of their names.
    """
    __tracebackhide__ = True
    value: object = metric.compute()
    if isinstance(value, float) or not isinstance(value, Mapping):
        return {name: value}
    key = getattr(metric, "key", None)
    prefix = f"{name}/"
    if key is not None and f"/{name}".endswith(f"/{key}"):
        prefix = name.removesuffix(key)
    return {f"{prefix}{part}": number for part, number in value.items()}


@attrs.frozen(eq=False, repr=False, slots=False)
class Output:
    """What a step returns for a batch, or for a window of batches, besides the new state.

    Args:
        loss: the mean loss, a scalar tensor; detached once backward has run.
        weight: the number of items that ``loss`` is the mean of; an int, or a scalar tensor on the
            device.
        aux: what the loss function returned besides the loss; for a window, that of its last batch.
        metrics: name to metric.
        skip: why this update is to be skipped, or None. A middleware sets it.

    Example:
        >>> import torch
        >>> Output(torch.tensor(0.5), weight=32, aux={"output": torch.zeros(32, 10)})
        Output(loss=0.5, weight=32, aux=[output], metrics=[])
    """

    loss: Tensor  # shape=()
    weight: int | Tensor
    aux: Aux = attrs.field(factory=dict)
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)
    skip: str | None = None

    def __repr__(self) -> str:
        facts = [
            f"loss={float(self.loss):.6g}",
            f"weight={_as_number(self.weight)}",
            f"aux=[{', '.join(self.aux)}]",
            f"metrics=[{', '.join(self.metrics)}]",
        ]
        if self.skip:
            facts.append(f"skip={self.skip!r}")
        return f"Output({', '.join(facts)})"

    def _repr_html_(self) -> str:
        shown = {
            "loss": html.format_number(float(self.loss)),
            "weight": html.format_number(_as_number(self.weight)),
        }
        for name, metric in self.metrics.items():
            values = values_of(name, metric)
            shown |= {part: html.format_number(value) for part, value in values.items()}
        shown |= {f"aux[{name!r}]": html.summarize(value) for name, value in self.aux.items()}
        return html.facts("Output", shown | ({"skip": self.skip} if self.skip else {}))


def _as_number(weight: int | Tensor) -> float:
    """Return a weight as an int if it is a whole number."""
    value = float(weight)
    return int(value) if value.is_integer() else value
