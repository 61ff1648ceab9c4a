"""Evaluation mode, and evaluation and prediction when there are several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from fnloop._backend.collectives import collective_count, gather_objects
from fnloop._backend.fsdp import is_sharded, reshard
from fnloop._backend.public import to_device_of
from fnloop._core.metrics import Last, Mean
from fnloop._core.types import Batch, Metric
from fnloop._data.source import Source
from fnloop._data.window import Padding

__all__ = ["CollectiveProbe", "DistributedEvaluation", "drop_last_metrics", "evaluating"]

Subject = TypeVar("Subject")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
_NO_GRADIENTS = (
    "an evaluation runs without gradients. A loss function that needs them, such as that of a "
    "gradient penalty, switches them on for itself: with torch.enable_grad(): ..."
)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards every submodule has the flag that it had.

    A function that needs gradients in it switches them on, as torch does: ``torch.enable_grad()``.
    """
    modes = [(module, module.training) for module in model.modules()]
    sharded = is_sharded(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:
        if "does not require grad" in str(error):
            error.add_note(_NO_GRADIENTS)
        raise
    finally:
        model.train(modes[0][1])  # a module may do something in its method train
        for module, training in modes:
            module.training = training
        if sharded:
            reshard(model)


class CollectiveProbe:
    """Finds out in its first call whether a function performs collectives.

    A module under ``fully_shard`` does, ``SyncBatchNorm`` in training, a contrastive loss that
    gathers. Such a function has to be called for a padding batch too: the other processes would
    wait for this one.

    Args:
        model: the model that the function is called with.
    """

    def __init__(self, model: nn.Module) -> None:
        self.uses_collectives: bool | None = True if is_sharded(model) else None

    def call(
        self,
        fn: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **settings: Arguments.kwargs,
    ) -> Result:
        """Call the function."""
        __tracebackhide__ = True
        if self.uses_collectives is not None:
            return fn(*arguments, **settings)
        before = collective_count()
        result = fn(*arguments, **settings)
        self.uses_collectives = collective_count() != before
        return result

    def can_skip(self, is_padding: bool) -> bool:
        """Return whether the function need not be called for a batch."""
        return is_padding and self.uses_collectives is False


class DistributedEvaluation:
    """An evaluation or a prediction of which each process computes its share.

    The methods are those of :class:`fnloop._step.engine.EvaluationPass`.

    Args:
        model: the model that is evaluated.
    """

    def __init__(self, model: nn.Module) -> None:
        self._probe = CollectiveProbe(model)
        self._on_padding = False  # whether the last batch was padding
        self._had_batch = False  # whether any batch was this process's own
        self._latest: object = None

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        self._on_padding = type(batch) is Padding
        self._latest = None
        if self._probe.can_skip(self._on_padding):
            return []
        own = batch.batch if type(batch) is Padding else batch
        self._latest = result = self._probe.call(fn, subject, own)
        if self._on_padding:
            return []
        self._had_batch = True
        return [result]

    def finish(self, source: Source) -> None:
        source.check_order()

    def own_metrics(self, metrics: dict[str, Metric]) -> dict[str, Metric]:
        if not self._had_batch:
            return {}
        if self._on_padding:
            metrics = drop_last_metrics(metrics)
        return {"loss": metrics.pop("loss", Mean(0.0, 0)), **metrics}

    def gather(self, results: list[Result]) -> list[Result]:
        return [
            to_device_of(self._latest, result)
            for share in gather_objects(results)
            for result in share
        ]


def drop_last_metrics(
    metrics: Mapping[str, Metric], which: Callable[[str], bool] = lambda name: True
) -> dict[str, Metric]:
    """Return the metrics without those that keep the last value, by name.

    A process that had padding in the last round has not seen the last batch; other processes have.
    """
    return {
        name: metric
        for name, metric in metrics.items()
        if not (isinstance(metric, Last) and which(name))
    }
