"""The innermost step: call the loss function, check its reply and weigh the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fnloop._backend.containers import items_in
from fnloop._core.metrics import (
    Mean,
    Metrics,
    OfModels,
    mean_of,
)
from fnloop._core.several import Several
from fnloop._core.state import TrainState
from fnloop._core.types import Aux, Batch, LossFn, Metric, Output, Skip, Step
from fnloop._display.checks import describe
from fnloop._display.reprs import shorten

# What a batch of other shapes, dtypes or keys than expected raises; torch's are RuntimeErrors.
_OF_A_BATCH = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
_MOST_PARTS = 8
_LONGEST = 200  # characters that tell of a batch
NO_ITEMS = "the batch has no item: its weight is 0"


def forward(loss_fn: LossFn, name: str, own_precision: bool = True) -> Step:
    """Return the innermost step: call the loss function and read its reply.

    Args:
        loss_fn: the loss function.
        name: its name in messages.
        own_precision: whether the pipeline says what it computes in. If not, the mixed precision
            that the run is configured for is used.
    """
    checked = False
    said: set[str] = set()  # reasons to leave a batch out that were logged

    def forward(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        nonlocal checked
        __tracebackhide__ = True
        try:
            if isinstance(state.model, Several):
                read = lambda model: _read(loss_fn(model, batch), batch, name)
                reply = state.model.call(read, name)
                if not isinstance(reply, Skip):
                    return state, _output(*reply)
            elif own_precision or state.backend.precision is None:
                reply = loss_fn(state.model, batch)
            else:
                with state.backend.autocast():
                    reply = loss_fn(state.model, batch)
        except _OF_A_BATCH as error:
            error.add_note(f"the batch: {_shapes(batch)}")
            raise
        if isinstance(reply, Skip):
            return state, reply.output(state, name, said)
        loss: Any
        aux: Any
        loss, aux = reply if reply.__class__ is tuple and len(reply) == 2 else (reply, {})
        if not checked or loss.__class__ is not Tensor or loss.ndim or aux.__class__ is not dict:
            _check_reply(reply, loss, aux, name)
            checked = True
        weight = aux["weight"] if "weight" in aux else items_in(batch, name, loss is None)
        if weight.__class__ is int and weight > 0:
            if state.backend.parts > 1 and "weight" not in aux:
                weight = state.backend.own_part(weight)
            return state, Output(loss, weight, aux)
        _check_weight(weight, name)
        return state, _output(loss, aux, weight)

    return forward


def _read(reply: Any, batch: Batch, name: str) -> tuple[Tensor, Aux, float | Tensor] | Skip:
    """Return the loss, the aux and the weight that a loss function has returned for a batch."""
    if isinstance(reply, Skip):
        return reply
    loss, aux = reply if reply.__class__ is tuple and len(reply) == 2 else (reply, {})
    _check_reply(reply, loss, aux, name)
    weight = aux["weight"] if "weight" in aux else items_in(batch, name, loss is None)
    _check_weight(weight, name)
    return loss, aux, weight


def _output(loss: Tensor, aux: Aux, weight: float | Tensor) -> Output:
    """Return the output for a batch, which is left out if it is known to have no item."""
    skip = NO_ITEMS if weight.__class__ is int and not weight else None
    return Output(loss, weight, aux, {}, skip)


def _shapes(batch: object) -> str:
    """Return the shapes and dtypes of a batch in one line: ``(64, 9) float32, (64,) int64``."""
    return shorten(_shapes_of(batch), _LONGEST)


def _shapes_of(part: object) -> str:
    if isinstance(part, Tensor):
        return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
    if isinstance(part, Mapping):
        return ", ".join(f"{key}: {_nested(value)}" for key, value in part.items()) or "empty"
    if isinstance(part, tuple | list):
        shown = ", ".join(map(_nested, part[:_MOST_PARTS])) or "empty"
        return shown + (f" and {len(part) - _MOST_PARTS} more" if part[_MOST_PARTS:] else "")
    return describe(part)


def _nested(part: object) -> str:
    return f"[{_shapes_of(part)}]" if isinstance(part, Mapping | tuple | list) else _shapes_of(part)


# --- the reply of a loss function


def _check_reply(reply: object, loss: object, aux: object, name: str) -> None:
    """Check what a loss function returns: the first time, and whenever it looks unusual."""
    if isinstance(reply, tuple) and len(reply) != 2:
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a tuple of {len(reply)}. "
            "Put the rest in aux, a dict"
        )
    if isinstance(reply, Mapping):
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a {type(reply).__name__}. "
            "Write: return reply['loss'], reply"
        )
    if isinstance(loss, Skip):
        raise TypeError(f"{name} returned {loss!r} in a tuple: return it alone")
    in_pair = isinstance(reply, tuple)
    if in_pair and isinstance(aux, Tensor) and not aux.ndim:
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a scalar tensor second. The "
            'loss is first, and the rest in a mapping: return loss, {"output": output}'
        )
    if not (loss is None and in_pair and not torch.is_grad_enabled()):  # in an evaluation
        _check_loss(loss, in_pair, name)
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"the aux that {name} returns with the loss must be a mapping, such as "
            f'{{"output": output}}; got {type(aux).__name__}'
        )


def _check_loss(loss: object, in_pair: bool, name: str) -> None:
    """Raise unless this is a mean loss."""
    if not isinstance(loss, Tensor):
        hint = ""
        if loss is None:
            hint = ". Did you forget 'return loss'?"
            if in_pair:
                hint = ". An evaluation may be without a loss, training needs one"
        raise TypeError(
            f"the loss that {name} returns must be a scalar tensor; got {describe(loss)}{hint}"
        )
    if loss.ndim:
        raise ValueError(
            f"the loss that {name} returns must be a scalar; got shape {tuple(loss.shape)}. Return "
            "its mean over the batch: loss.mean()"
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"the loss that {name} returns must have a floating dtype; got {loss.dtype}"
        )


def _check_weight(weight: object, name: str) -> None:
    """Raise unless this can be a number of items.

    The value of a tensor is on the device. The next report checks it.
    """
    expected = f'aux["weight"] must be the number of items that the loss of {name} is the mean of'
    if isinstance(weight, Tensor):
        if weight.ndim or weight.dtype is torch.bool or weight.is_complex():
            raise TypeError(
                f"{expected}, an int or a scalar tensor; got shape {tuple(weight.shape)}, "
                f"{weight.dtype}"
            )
    elif not isinstance(weight, int) or isinstance(weight, bool):
        raise TypeError(f"{expected}, an int or a scalar tensor; got {describe(weight)}")
    elif weight < 0:
        raise ValueError(f"{expected}, at least 0; got {weight}")


# --------------------------------------------------------------------------------------------------
# Evaluations: the loss and the metrics of their batches.

Subject = TypeVar("Subject")
Result = TypeVar("Result")


class EvaluationPass(Protocol):
    """An evaluation of a loader, or a prediction for it."""

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch, /
    ) -> list[Result]:
        """Call ``fn(subject, batch)``. Return its result in a list, which is empty for padding."""
        ...

    def add(self, out: Output, /) -> None:
        """Combine the loss and the metrics of a batch with those before it."""
        ...

    def own_metrics(self) -> dict[str, Metric]:
        """Return the metrics that this process contributes, the loss first."""
        ...

    def gather(self, results: list[Result], /) -> list[Result]:
        """Return the results of the last batch of every share of the data, in their order."""
        ...


class LocalEvaluation:
    """An evaluation or a prediction in one process: an :class:`EvaluationPass`.

    Args:
        per_model: makes the metric of several models, each of which has a loss.
    """

    def __init__(self, per_model: OfModels | None = None) -> None:
        self._per_model = per_model
        self._metrics = Metrics()  # the loss without what was added to its sum since
        self._total: Tensor | None = None  # that sum, where batches are added to that alone
        self._added = 0  # the items of these

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        return [fn(subject, batch)]

    def add(self, out: Output) -> None:
        """Combine those of one more batch, unless it has no item."""
        __tracebackhide__ = True
        loss, weight = out.loss, out.weight
        if weight.__class__ is int and not weight:
            return
        if self._total is not None and type(weight) is int and loss.__class__ is Tensor:
            self._total.add_(loss, alpha=weight)
            self._added += weight
            if out.metrics:
                self._metrics.update_(out.metrics)
        else:
            found = self._so_far().add_(out, per_model=self._per_model)["loss"]
            total = found.total if type(found) is Mean else None
            self._total = total if isinstance(total, Tensor) else None

    def _so_far(self) -> Metrics:
        if self._added:
            loss = cast(Mean, self._metrics["loss"])
            self._metrics["loss"] = mean_of(loss.total, loss.weight + self._added)
            self._added = 0
        return self._metrics

    def own_metrics(self) -> dict[str, Metric]:
        """Return all metrics, the loss first."""
        found = {**self._so_far()}
        return {"loss": found.pop("loss", Mean(0.0, 0)), **found}

    def gather(self, results: list[Result]) -> list[Result]:
        return results
