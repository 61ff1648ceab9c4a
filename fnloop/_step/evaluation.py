"""Evaluation mode, and evaluation and prediction when there are several processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from fnloop._backend.collectives import collective_count, counted_collectives, gather_objects
from fnloop._backend.fsdp import around_sharded, is_sharded, reshard
from fnloop._backend.public import to_device_of
from fnloop._core.copies import Buffers
from fnloop._core.merge import moved
from fnloop._core.metrics import Last, Mean, to_host
from fnloop._core.rng import fold_in, seed_host
from fnloop._core.running import update_, update_loss_
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Metric, Output
from fnloop._data.source import Source
from fnloop._data.window import Padding
from fnloop._display.log import log

__all__ = [
    "CollectiveProbe",
    "DistributedEvaluation",
    "ExactEvaluation",
    "Fold",
    "drop_last_metrics",
    "evaluating",
    "in_evaluation_mode",
]

Subject = TypeVar("Subject")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")
ROUNDS = 16  # batches of each process that are exchanged at once
_GIVEN_AGAIN = (
    "%s exchanges data with the other processes, and process %d has no batch left in %s. It was "
    "given a batch again, so that the others need not wait for it, and what it exchanged counts "
    "twice. To leave out the rounds in which a process has no batch, write fl.data.even(loader), "
    "for training and for evaluation (logged once)"
)
_said: set[str] = set()  # the names of loss functions of which the warning was logged
_NO_GRADIENTS = (
    "an evaluation runs without gradients. A loss function that needs them, such as that of a "
    "gradient penalty, switches them on for itself: with torch.enable_grad(): ..."
)


@contextlib.contextmanager
def evaluating(model: nn.Module, buffers: Buffers | None = None) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards flags and buffers are those from before.

    Buffers may change in evaluation mode too: those of an observer, or the centre of a teacher.

    Args:
        model: the model.
        buffers: its buffers, if they are kept again and again.
    """
    kept = (buffers or Buffers(model)).keep()
    try:
        with in_evaluation_mode(model):
            yield
    finally:
        kept.put_back()


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
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


class Fold:
    """The loss and the metrics of the batches of an evaluation, in their order."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._loss: Mean | None = None

    def add(self, out: Output) -> None:
        """Combine those of one more batch, unless it has no item."""
        __tracebackhide__ = True
        if out.weight.__class__ is int and not out.weight:
            return
        if out.metrics:
            self._metrics = update_(self._metrics, out.metrics)
        self._loss = update_loss_(self._loss, out.loss, out.weight)

    def metrics(self) -> dict[str, Metric]:
        """Return all metrics, the loss first."""
        found = {**self._metrics} if self._loss is None else {"loss": self._loss, **self._metrics}
        return {"loss": found.pop("loss", Mean(0.0, 0)), **found}


class CollectiveProbe:
    """Finds out in its first call whether a function performs collectives.

    A module under ``fully_shard`` does, ``SyncBatchNorm`` in training, a contrastive loss that
    gathers. Such a function has to be called for a padding batch too: the other processes would
    wait for this one.

    What it exchanges there counts twice, which a warning says once. What a sharded model gathers
    does not count.

    Args:
        state: a state of the model that the function is called with.
    """

    def __init__(self, state: TrainState) -> None:
        self._model, self._rank = state.model, state.backend.rank
        self.uses_collectives: bool | None = True if is_sharded(state.model) else None

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

    def call_again(
        self,
        name: str,
        where: str,
        fn: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **settings: Arguments.kwargs,
    ) -> Result:
        """Call the function for a process that has no batch, with one that was taken already.

        Args:
            name: the name of the loss function.
            where: which update it is, or which round of an evaluation.
            fn: the function.
            arguments: its arguments.
            settings: its arguments by name.
        """
        __tracebackhide__ = True
        spans: list[int | None] = [counted_collectives()]
        note = lambda: spans.append(counted_collectives())
        with around_sharded(self._model, note, note):
            result = self.call(fn, *arguments, **settings)
        note()
        exchanges = any(
            before != after for before, after in zip(spans[::2], spans[1::2], strict=False)
        )
        if exchanges and name not in _said:
            _said.add(name)
            log.warning(_GIVEN_AGAIN, name, self._rank, where)
        return result

    def can_skip(self, is_padding: bool) -> bool:
        """Return whether the function need not be called for a batch."""
        return is_padding and self.uses_collectives is False


class DistributedEvaluation(Fold):
    """An evaluation or a prediction of which each process computes its share.

    The methods are those of :class:`fnloop._step.engine.EvaluationPass`.

    Args:
        state: a state of the model that is evaluated.
        name: the name of the function that evaluates a batch.
    """

    def __init__(self, state: TrainState, name: str) -> None:
        super().__init__()
        self._probe, self._name, self._round = CollectiveProbe(state), name, 0
        self._on_padding = False  # whether the last batch was padding
        self._had_batch = False  # whether any batch was this process's own
        self._latest: object = None

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        self._on_padding = type(batch) is Padding
        self._latest = None
        self._round += 1
        if self._probe.can_skip(self._on_padding):
            return []
        if type(batch) is Padding:
            where = f"round {self._round} of an evaluation"
            given = (self._name, where, fn, subject, batch.batch)
            self._latest = self._probe.call_again(*given)
            return []
        self._latest = result = self._probe.call(fn, subject, batch)
        self._had_batch = True
        return [result]

    def finish(self, source: Source) -> None:
        source.check_order()

    def own_metrics(self) -> dict[str, Metric]:
        if not self._had_batch:
            return {}
        found = self.metrics()
        return drop_last_metrics(found) if self._on_padding else found

    def gather(self, results: list[Result]) -> list[Result]:
        return [
            to_device_of(self._latest, result)
            for share in gather_objects(results, "the results of a prediction")
            for result in share
        ]


class ExactEvaluation(DistributedEvaluation):
    """An evaluation whose metrics are combined in the order of the batches, in every process.

    What some batches come to is exchanged at once, on the host. What a function draws from Python's
    and NumPy's generators is a function of the batch too.

    Args:
        state: a state of the model that is evaluated.
        name: the name of the function that evaluates a batch.
        seed: of the draws.
    """

    def __init__(self, state: TrainState, name: str, seed: int) -> None:
        super().__init__(state, name)
        self._backend, self._seed, self._n = state.backend, seed, 0
        self._rounds: list[list[Output]] = []  # of this process: for each round, none or one
        self._in_order: dict[str, Metric] = {}

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        if len(self._rounds) == ROUNDS:
            self._exchange()
        self._rounds.append([])
        position = self._n * self._backend.world_size + self._backend.rank
        seed_host(fold_in(self._seed, position))
        self._n += 1
        return super().call(fn, subject, batch)

    def add(self, out: Output) -> None:
        if out.weight.__class__ is not int or out.weight:
            self._rounds[-1].append(out)

    def _exchange(self) -> None:
        """Combine the metrics of the rounds since the last time, of all processes."""
        __tracebackhide__ = True
        own = [[_on_host(out) for out in round_] for round_ in self._rounds]
        self._rounds = []
        for round_ in zip(*gather_objects(own, "the results of an evaluation"), strict=True):
            for metrics in itertools.chain.from_iterable(round_):
                self._in_order = update_(self._in_order, moved(metrics, self._backend.device))

    def own_metrics(self) -> dict[str, Metric]:
        __tracebackhide__ = True
        self._exchange()
        return {"loss": self._in_order.pop("loss", Mean(0.0, 0)), **self._in_order}


def _on_host(out: Output) -> dict[str, Metric]:
    """Return the loss and the metrics of a batch, which can be sent."""
    found = {"loss": update_loss_(None, out.loss, out.weight), **out.metrics}
    return moved(to_host(found), torch.device("cpu"))


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
