"""An update that was made again, and which of its samples made the loss infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor
from torch.nn.utils import get_total_norm

from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output
from fnloop._display import html
from fnloop._display.checks import join_names
from fnloop._step.pieces import pieces_of
from fnloop._step.pipeline import PipelineStep

__all__ = ["Update", "find_bad_samples"]


@attrs.frozen(eq=False, repr=False)
class Update:
    """An update that :func:`replay` has made again.

    Args:
        batches: the batches that it was made of: one, or a window of them.
        indices: for each batch, the indices of its samples in the dataset; by name, if the batch is
            made of several; None where they are not known, as of a stream. With several processes,
            each has its own.
        before: the state before the update.
        grads: the gradients that the optimizer took, by the name of the parameter.
        after: the state after the update.
        outputs: loss, weight, aux and metrics of each call of the loss function: one for each
            batch, or for each piece of it with ``microbatch``; two with ``sam``; one for each turn
            with ``alternate``.
        output: the same of the whole update.
        nonfinite: the indices of the samples whose loss, evaluated alone, is infinite or NaN, if
            that of the update is; (batch, row) where there are no indices. None if they cannot be
            evaluated alone, or the weights were not finite before.
        confirmed: whether a checkpoint of the state after it has the same bits; None if there is no
            such checkpoint.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.debug import replay
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
        ...     state = fl.fit(step, toy(), batches, hooks=(saves,))
        ...     update = replay(folder, step, toy(), batches, update=3)
        >>> update
        Update(update=3, epoch=0, batch=2, loss=-9, gradient norm=3, confirmed=True)
    """

    batches: tuple[Batch, ...]
    indices: tuple[object, ...]
    before: TrainState
    grads: Mapping[str, Tensor]
    after: TrainState
    outputs: tuple[Output, ...]
    output: Output
    nonfinite: tuple[object, ...] | None = ()
    confirmed: bool | None = None

    def _facts(self) -> dict[str, object]:
        norm = get_total_norm(list(self.grads.values())) if self.grads else math.nan
        facts: dict[str, object] = {
            "update": self.after.step,
            "epoch": self.before.epoch,
            "batch": self.before.batch,
            "loss": html.format_number(float(self.output.loss)),
            "gradient norm": html.format_number(float(norm)),
        }
        known = [index for index in self.indices if index is not None]
        if known:
            facts["samples"] = join_names([str(i) for index in known for i in _flat(index)], 8)
        if self.nonfinite:
            facts["not finite"] = "sample " + join_names([*map(str, self.nonfinite)], 8)
        elif not _is_finite(self.before):
            facts["not finite"] = "the weights before the update"
        if self.confirmed is not None:
            facts["confirmed"] = self.confirmed
        return facts

    def __repr__(self) -> str:
        return html.record_text("Update", self._facts())

    def _repr_html_(self) -> str:
        return html.facts("Update", self._facts())


def _flat(index: object) -> list[object]:
    if isinstance(index, Mapping):
        return [f"{name} {i}" for name, part in index.items() for i in _flat(part)]
    return [*index] if isinstance(index, list | tuple) else [index]


def _is_finite(state: TrainState) -> bool:
    return all(bool(p.isfinite().all()) for p in state.model.parameters())


def find_bad_samples(
    step: PipelineStep,
    state: TrainState,
    batches: Sequence[Batch],
    indices: Sequence[object],
) -> tuple[object, ...] | None:
    """Return the samples whose loss is not finite when they are evaluated alone.

    Args:
        step: the step, which is evaluated.
        state: the state before the update.
        batches: the batches.
        indices: the indices of the samples of each, or None.

    Returns:
        Their indices, or (batch, row); None if they cannot be evaluated alone, or the weights are
        not finite already.
    """
    if not _is_finite(state):
        return None
    found: list[object] = []
    try:
        for n, (batch, index) in enumerate(zip(batches, indices, strict=True)):
            pieces = pieces_of(batch, 1)
            names: list[object] = [(n, row) for row in range(len(pieces))]
            if isinstance(index, list) and len(index) == len(pieces):
                names = index
            for name, piece in zip(names, pieces, strict=True):
                if not math.isfinite(float(step.evaluate(state, piece).loss)):
                    found.append(name)
    except Exception:  # a loss function may be unable to take one sample, and a batch to be cut
        return None
    return tuple(found)
