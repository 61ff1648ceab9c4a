"""The gradient engine: which one a state has, and the engine of a single process."""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, ParamSpec, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn
from torch.nn import utils

from fnloop._backend import torch_compat
from fnloop._backend.collectives import (
    collective_count,
    counted_collectives,
    gather_objects,
    gather_shares,
    to_device_of,
)
from fnloop._backend.fsdp import around_sharded, by_mesh, full, is_sharded, local_part, reshard
from fnloop._backend.processes import delaying_interrupts
from fnloop._core.averages import viewed_model
from fnloop._core.metrics import (
    Last,
    Mean,
    NoLoss,
    combine,
    to_host,
    update_,
    update_evaluated_,
)
from fnloop._core.optimizers import explain_untrained, optimizers_in
from fnloop._core.rng import fold_in, seed_host
from fnloop._core.stacked import models_of
from fnloop._core.state import (
    Buffers,
    Ownership,
    TrainState,
    current_parameters,
    moved,
    ownership_of,
    parameters,
    unwatched,
)
from fnloop._core.types import BY_ANOTHER, Batch, Metric, Output, Step
from fnloop._data.loaders import Padding
from fnloop._data.source import Source
from fnloop._display.screen import log

if TYPE_CHECKING:
    from fnloop._step.engine_distributed import DistributedEngine
    from fnloop._step.engine_exact import ExactEngine

# --------------------------------------------------------------------------------------------------
# Evaluation mode, and evaluation and prediction when there are several processes.

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
def evaluating_model(model: nn.Module, buffers: Buffers | None = None) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards flags and buffers are those from before.

    Buffers may change in evaluation mode too: those of an observer, or the centre of a teacher.

    Args:
        model: the model.
        buffers: its buffers, if they are kept again and again.
    """
    with unwatched(model):
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
    sharded, gradients = is_sharded(model), torch.is_grad_enabled()
    try:
        model.eval()
        torch.set_grad_enabled(False)
        yield
    except RuntimeError as error:
        if "does not require grad" in str(error):
            error.add_note(_NO_GRADIENTS)
        raise
    finally:
        with delaying_interrupts():
            torch.set_grad_enabled(gradients)
            model.train(modes[0][1])  # a module may do something in its method train
            for module, training in modes:
                module.training = training
            if sharded:
                reshard(model)


class Fold:
    """The loss and the metrics of the batches of an evaluation, in their order.

    Args:
        models: the names of the models of a stack, each of which has a loss.
    """

    def __init__(self, models: tuple[str, ...] = ()) -> None:
        self._models = models
        self._metrics: dict[str, Metric] = {}
        self._loss: Mean | NoLoss | None = None

    def add(self, out: Output) -> None:
        """Combine those of one more batch, unless it has no item."""
        __tracebackhide__ = True
        if out.weight.__class__ is int and not out.weight:
            return
        self._loss = update_evaluated_(self._loss, out.loss, out.weight, self._models)
        if out.metrics:
            self._metrics = update_(self._metrics, out.metrics)

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
        # Processes of one row have no batch all together: what they exchange counts nothing twice.
        spans: list[int | None] = []
        note = lambda: spans.append(counted_collectives(between_shares=True))
        note()
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
            for share in gather_shares(results, "the results of a prediction")
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
    found = {"loss": update_evaluated_(None, out.loss, out.weight), **out.metrics}
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


# --------------------------------------------------------------------------------------------------
# The gradient engine of a single process: gradients add up in `.grad`, as autograd does.


class LocalEngine:
    """A single process: most methods return their argument unchanged.

    The methods are those of :class:`fnloop._step.engine.GradientEngine`.
    """

    calls_every_batch = True

    def begin_run(self, state: TrainState) -> None: ...

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        return step

    def start_turn(
        self, name: str, engine: object, turn: TrainState, state: TrainState, batches: slice
    ) -> None: ...

    def mark_draws(self) -> Callable[[], None]:
        return lambda: None  # they draw from where the generators are

    def start_batch(self, loss: LossRoot, state: TrainState, guarded: bool = False) -> LossRoot:
        return loss

    def start_window(
        self, loss: LossRoot, state: TrainState, pieces: Sequence[int], guarded: bool = False
    ) -> LocalWindow:
        return LocalWindow(loss, state)

    def equalize(self, state: TrainState, pieces: list[list[Batch]]) -> list[list[Batch]]:
        return pieces

    def largest(self, number: int) -> int:
        return number

    def start_sum(self, state: TrainState, batches: int, dtype: torch.dtype | None) -> GradientSum:
        return SumInOrder(self, state, WeightedSum(), dtype)

    def gradients(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        return [p.grad for p in params]

    def any(self, flag: bool) -> bool:
        return flag

    def agree(self, flag: Tensor, out: Output) -> tuple[Tensor, Output]:
        return flag, out

    def mean_loss(self, out: Output) -> Tensor:
        return out.loss

    def start_evaluation(self, state: TrainState, name: str) -> LocalEvaluation:
        return LocalEvaluation(models_of(state.model))

    def share_buffers(self, model: nn.Module) -> None: ...

    def check_alike(self, state: TrainState, what: str) -> None: ...

    def merge_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return dict(metrics)

    def own_names(self, names: Iterable[str]) -> list[str]:
        return []

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "") -> dict[str, Metric]:
        return dict(report)


class LocalWindow:
    """Forward and backward of a window, weighted by the items of its batches."""

    __slots__ = ("_loss", "_stashed", "_total", "forward")

    def __init__(self, loss: LossRoot, state: TrainState) -> None:
        self._loss, self.forward = loss, loss.forward
        self._total, self._stashed = WeightedSum(), stash_gradients(state)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if out.skip is None:
            self._loss.root(state, out, self._total.relative_weight(out)).backward()
        self._total.add(out)

    def finish(self, state: TrainState) -> Output:
        self._total.divide([p.grad for p in parameters(state)])
        if self._stashed is not None:
            restore_gradients(state, self._stashed)
        return self._total.output()


class LocalEvaluation(Fold):
    """An evaluation or a prediction in one process."""

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        return [fn(subject, batch)]

    def finish(self, source: Source) -> None: ...

    def own_metrics(self) -> dict[str, Metric]:
        return self.metrics()

    def gather(self, results: list[Result]) -> list[Result]:
        return results


# --------------------------------------------------------------------------------------------------
# The gradient engine: what depends on the number of processes in training and evaluation.
#
# There are three: `LocalEngine` for one process, `DistributedEngine` for several, and `ExactEngine`
# for any number, with the same bits. `engine_of` chooses. Nothing else in the steps and the
# middleware branches on the number of processes.

_LOCAL = LocalEngine()
_engines: WeakKeyDictionary[Ownership, DistributedEngine] = WeakKeyDictionary()
_exact: WeakKeyDictionary[Ownership, ExactEngine] = WeakKeyDictionary()


def engine_of(state: TrainState) -> GradientEngine:
    """Return the engine that makes the gradients of a state's model.

    A distributed engine lives as long as the states of its model. It holds the model, but not what
    they own it by, which is its key.
    """
    if state.backend.exact:
        return _exact_engine_of(state)
    if state.backend.world_size == 1:
        return _LOCAL
    owner = ownership_of(state)
    engine = _engines.get(owner)
    if engine is not None and engine.model is not state.model:
        engine = engine if viewed_model(state.model) is engine.model else None
    if engine is None:
        # Imported here, since a run in one process has no use for it.
        from fnloop._step.engine_distributed import DistributedEngine

        engine = _engines[owner] = DistributedEngine(state)
    return engine


def check_not_exact(state: TrainState, what: str, instead: str) -> None:
    """Raise if a state was made with ``exact=True``, which something cannot keep.

    Args:
        state: the state.
        what: the name of what cannot.
        instead: why, and what to write instead.

    Raises:
        NotImplementedError: it was.
    """
    if state.backend.exact:
        raise NotImplementedError(
            f"{what} does not work with TrainState.create(..., exact=True): {instead}"
        )


def _exact_engine_of(state: TrainState) -> ExactEngine:
    owner = ownership_of(state)
    if (engine := _exact.get(owner)) is None:
        from fnloop._step.engine_exact import ExactDistributedEngine, ExactEngine

        alone = state.backend.world_size == 1
        engine = _exact[owner] = ExactEngine(state) if alone else ExactDistributedEngine(state)
    return engine


class BatchPass(Protocol):
    """Forward and backward of one batch.

    In one process ``forward`` is the step inside itself, so that no frame is added to a traceback.
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def backward(self, state: TrainState, out: Output, /) -> Output:
        """Make the gradient, from the output of ``forward``. Return what to report."""
        ...


class WindowPass(Protocol):
    """Forward and backward of a window of batches.

    For each batch call ``forward``, then ``add`` with its output; after the last one ``finish``.
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def add(self, state: TrainState, out: Output, /) -> None:
        """Add the gradient of a batch, by its weight."""
        ...

    def finish(self, state: TrainState, /) -> Output:
        """Turn the sum of the gradients into the mean. Return what to report of the window."""
        ...


class EvaluationPass(Protocol):
    """An evaluation of a loader, or a prediction for it."""

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch, /
    ) -> list[Result]:
        """Call ``fn(subject, batch)``. Return its result in a list, which is empty for padding."""
        ...

    def finish(self, source: Source, /) -> None:
        """Raise if the processes have read the data in different orders."""
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


class GradientEngine(Protocol):
    """What depends on the number of processes."""

    @property
    def calls_every_batch(self) -> bool:
        """Whether every batch passes through the loss function; padding may not."""
        ...

    def begin_run(self, state: TrainState, /) -> None:
        """Forget what was found out about the data of an earlier run."""
        ...

    def read_from(self, source: Source, step: Step, window: int, /) -> Step:
        """Return the step for what a source gives; it notes which of the batches are padding.

        Args:
            source: the source.
            step: the step. It is called once for each window that the source gives, in order.
            window: the window of the step: it takes a tuple of batches unless this is 1.
        """
        ...

    def start_turn(
        self, name: str, engine: object, turn: TrainState, state: TrainState, batches: slice, /
    ) -> None:
        """Start a turn of an alternating step: its engine gets its part of the window.

        Args:
            name: the name of the optimizer.
            engine: the engine of this turn.
            turn: the state of this turn.
            state: the state of the whole step.
            batches: which batches of the window the turn takes.
        """
        ...

    def mark_draws(self) -> Callable[[], None]:
        """Return what makes the next passes of an update draw again what those from here on do."""
        ...

    def start_batch(self, loss: LossRoot, state: TrainState, /, guarded: bool = False) -> BatchPass:
        """Start forward and backward of one batch. For ``guarded`` see :meth:`start_window`."""
        ...

    def start_window(
        self, loss: LossRoot, state: TrainState, pieces: Sequence[int], /, guarded: bool = False
    ) -> WindowPass:
        """Start forward and backward of a window.

        Args:
            loss: the loss, and what backward starts from.
            state: the state that is trained.
            pieces: for each batch of the window, how many times ``forward`` and ``add`` are called.
            guarded: whether all processes raise if one runs out of memory in ``forward`` or
                ``add``. Then gradients are exchanged in ``finish`` only, not during backward.
        """
        ...

    def equalize(
        self, state: TrainState, pieces: list[list[Batch]], /
    ) -> Sequence[Sequence[Batch]]:
        """Return the pieces of each batch of a window, as many in all processes where they must be.

        That is where the forward step performs collectives. Then a batch with fewer is padded.
        """
        ...

    def largest(self, number: int, /) -> int:
        """Return the largest of a number over all processes."""
        ...

    def start_sum(
        self, state: TrainState, batches: int, dtype: torch.dtype | None, /
    ) -> GradientSum:
        """Start the sum of a window, whose batches a step takes one by one."""
        ...

    def any(self, flag: bool, /) -> bool:
        """Return whether a flag is set in any process."""
        ...

    def agree(self, flag: Tensor, out: Output, /) -> tuple[Tensor, Output]:
        """Return a flag as it is in any process, and an output that is skipped if it is in any."""
        ...

    def mean_loss(self, out: Output, /) -> Tensor:
        """Return the mean loss over the items of all processes."""
        ...

    def start_evaluation(self, state: TrainState, name: str, /) -> EvaluationPass:
        """Start an evaluation or a prediction: every process gets the main one's buffers.

        Args:
            state: the state.
            name: the name of the function that is called with each batch.
        """
        ...

    def share_buffers(self, model: nn.Module, /) -> None:
        """Copy the buffers of the main process's model to that of every process."""
        ...

    def check_alike(self, state: TrainState, what: str, /) -> None:
        """Raise in every process if the weights or the counters of the processes differ.

        Args:
            state: the newest state.
            what: what it is for, as errors name it.
        """
        ...

    def merge_metrics(self, metrics: Mapping[str, Metric], /) -> dict[str, Metric]:
        """Combine metrics over all processes, each of which has seen a part of the data."""
        ...

    def own_names(self, names: Iterable[str], /) -> list[str]:
        """Return the running metrics that are of this process's own share of the data."""
        ...

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "", /) -> dict[str, Metric]:
        """Combine the metrics of a report over all processes.

        Args:
            report: name to metric.
            prefix: what the names of training metrics begin with, besides "recent/". Those that are
                made after the gradients were averaged are the same in every process, and count
                once.
        """
        ...


# --------------------------------------------------------------------------------------------------
# What backward starts from, and the gradients that a window finds and leaves.

NO_GRADIENT = "the loss has no gradient"


class LossRoot:
    """The step that computes the loss, and the number that backward starts from.

    It makes the gradient of one batch in one process: see :class:`fnloop._step.engine.BatchPass`.

    Args:
        forward: the step.
        scale: ``state -> factor of the gradients``, on the device; or None.
        may_skip: whether the step may skip a batch on some processes only.
        create_graph: whether gradients have a graph of their own.
        name: the name of the loss function.
    """

    __slots__ = ("create_graph", "forward", "may_skip", "name", "scale")

    def __init__(
        self,
        forward: Step,
        scale: Callable[[TrainState], Tensor] | None = None,
        may_skip: bool = False,
        create_graph: bool = False,
        name: str = "the loss function",
    ) -> None:
        self.forward, self.scale, self.may_skip = forward, scale, may_skip
        self.create_graph, self.name = create_graph, name

    def root(self, state: TrainState, out: Output, relative_weight: Weight | None) -> Tensor:
        """Return the number that backward starts from: loss × relative weight × scale."""
        root = out.loss
        if not root.requires_grad:
            _fail_without_gradient(state)
        if root.ndim:  # one loss for each model of a stack, whose gradients are its own
            root = root.sum()
        if relative_weight is not None:
            root = root * relative_weight
        return root if self.scale is None else at_least_float32(root) * self.scale(state)

    def backward(self, state: TrainState, out: Output) -> Output:
        __tracebackhide__ = True
        if out.skip is not None:
            return attrs.evolve(out, loss=out.loss.detach())
        relative = None
        if isinstance(out.weight, Tensor):  # on the device: 1, or 0 for a batch without items
            relative = in_wide_dtype(valid_weight(out.weight) > 0, out.loss)
        root = self.root(state, out, relative)
        if self.create_graph:
            _backward_with_graph(root)
        else:
            root.backward()
        return Output(out.loss.detach(), out.weight, out.aux, out.metrics)


def stash_gradients(state: TrainState) -> list[Tensor | None] | None:
    """Set aside gradients left by an earlier call of the step within the same update, if any."""
    params = parameters(state)
    for p in params:
        if p.grad is not None:
            break
    else:
        return None
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None
    return gradients


def restore_gradients(state: TrainState, stashed: list[Tensor | None] | None) -> None:
    """Add stashed gradients to the present ones."""
    if stashed is None:
        return
    for p, gradient in zip(parameters(state), stashed, strict=False):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient


def _backward_with_graph(root: Tensor) -> None:
    with warnings.catch_warnings():
        # The warning is of a leak of memory. The gradients are removed after the update.
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        root.backward(create_graph=True)


class NoGradientError(ValueError):
    """The loss has no gradient because gradients are disabled while the step runs."""


def _fail_without_gradient(state: TrainState) -> None:
    if not torch.is_grad_enabled():
        raise NoGradientError(f"{NO_GRADIENT}: gradients are switched off while the step runs")
    if any(p.requires_grad for p in state.model.parameters()):
        hint = (
            "it was computed without the model's parameters, or detached "
            "(.item(), .detach(), torch.no_grad)"
        )
    else:
        hint = "every parameter of the model has requires_grad=False"
    raise ValueError(f"{NO_GRADIENT}: {hint}")


def fail_to_train(state: TrainState, name: str, uses_others: bool) -> NoReturn:
    """Raise ValueError: no parameter of the optimizers has a gradient.

    Args:
        state: the state.
        name: the name of the loss function.
        uses_others: whether other parameters of the model have one.
    """
    cache, optimizers = current_parameters(state), optimizers_in(state.optimizer).values()
    untrained = explain_untrained(state.model, optimizers)
    if untrained is not None and uses_others:
        why = untrained
    elif not any(p.requires_grad for p in cache.trained):
        why = "each of them has requires_grad=False"
    else:
        why = (
            f"{name} probably uses another model than the one that it is given, such as a global "
            "variable. Compute the loss with its first argument, which is the model that is trained"
        )
    of = "the optimizer" if len(optimizers) == 1 else "the optimizers"
    raise ValueError(
        f"{NO_GRADIENT} for any parameter of {of}, so {name} would train nothing: {why}"
    )


def total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients together, including the parts in other processes."""
    return _norm(grads, norm_type, _are_alike(grads))


def clip_to_norm_(params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``.

    Their bits are those of ``clip_grad_norm_``, but gradients whose norm is not finite become NaN.
    An infinite ``max_norm`` changes nothing.

    Returns:
        The norm before.
    """
    grads = [p.grad for p in params if p.grad is not None]
    alike = _are_alike(grads)
    norm = _norm(grads, norm_type, alike)
    if math.isinf(max_norm):
        return norm
    finite = nan_unless_finite(norm)
    if alike:  # in place, as each new tensor takes longer than what is computed
        factor = finite.add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
        torch_compat.foreach_mul_(grads, factor)
        return norm
    for group in by_mesh([p for p in params if p.grad is not None]):
        utils.clip_grads_with_norm_(group, max_norm, finite)
    return norm


def _norm(grads: Sequence[Tensor], norm_type: float, alike: bool) -> Tensor:
    if alike:  # what get_total_norm does after it has sorted them by kind
        norms = torch_compat.foreach_norm(grads, norm_type)
        return torch.linalg.vector_norm(torch.stack([*norms]), norm_type)
    if all(local_part(grad) is grad for grad in grads):
        return utils.get_total_norm(grads, norm_type)
    norms = [full(utils.get_total_norm(group, norm_type)) for group in by_mesh(grads)]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _are_alike(grads: Sequence[Tensor]) -> bool:
    """Return whether gradients are dense tensors of one dtype on one device, without a graph."""
    kinds = {(type(g), g.dtype, g.device, g.layout, g.requires_grad) for g in grads}
    if len(kinds) != 1:
        return False
    kind, _, _, layout, has_graph = kinds.pop()
    return kind is Tensor and layout is torch.strided and not has_graph


def nan_unless_finite(norm: Tensor) -> Tensor:
    """Return norms with NaN in the place of infinite ones, by which no gradient can be scaled."""
    return torch.fmod(norm, math.inf)


# --------------------------------------------------------------------------------------------------
# The weighted mean over the batches of a window: of losses, metrics and gradients.

Weight = int | float | Tensor


class WeightedSum:
    """The running sum of a window: the weights of its batches, their losses and metrics.

    Attributes:
        weight: the sum of the weights of the batches that were added; None before the first.
        reference: the first weight. Batches count relative to it, which keeps fp16 in its range.
    """

    def __init__(self) -> None:
        self.weight: Weight | None = None
        self.reference: Weight | None = None
        self._loss: Tensor | None = None
        self._last: Output | None = None
        self._skipped: Output | None = None
        self._metrics: Mapping[str, Metric] = {}
        # The sums of the weights on the device, as given and as counted: equal if all are valid.
        self._checked: tuple[Tensor, Tensor] | None = None
        self._latest: tuple[Output | None, Weight] = (None, 0)

    @property
    def is_empty(self) -> bool:
        """Whether no batch was added."""
        return self.weight is None

    def relative_weight(self, out: Output) -> Weight | None:
        """Return weight / reference, or None where that is 1."""
        weight = out.weight if out.weight.__class__ is int else self._weight_of(out)
        if self.reference is None:
            self.reference = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        if isinstance(self.reference, Tensor) or isinstance(weight, Tensor):
            return weight / self.reference
        if weight is self.reference or weight == self.reference:
            return None
        return weight / self.reference

    def _weight_of(self, out: Output) -> Weight:
        """Return the weight of a micro-batch.

        A tensor that is NaN, infinite or negative counts as 0. That is remembered on the device.
        """
        if not isinstance(out.weight, Tensor):
            return out.weight
        if self._latest[0] is not out:
            given = in_wide_dtype(out.weight, out.loss)
            valid = valid_weight(given)
            if self._checked is None:
                self._checked = given, valid
            else:
                self._checked = self._checked[0] + given, self._checked[1] + valid
            self._latest = out, valid
        return self._latest[1]

    def add(self, out: Output) -> None:
        """Count a micro-batch, unless it is skipped."""
        __tracebackhide__ = True
        if out.skip is not None:
            self._skipped = out
            return
        weight = out.weight if out.weight.__class__ is int else self._weight_of(out)
        loss = out.loss.detach()
        if self._loss is None or self.weight is None:
            self._loss, self.weight = at_least_float32(loss) * weight, weight
        elif isinstance(weight, Tensor):
            self._loss = self._loss + at_least_float32(loss) * weight
            self.weight = self.weight + weight
        else:
            self._loss, self.weight = self._loss.add_(loss, alpha=weight), self.weight + weight
        if out.metrics:
            self._metrics = combine(self._metrics, out.metrics)
        self._last = out

    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """Turn the sum of relative weight × gradient into the mean, in place."""
        if self.weight is not None:
            divide(gradients, self.weight, self.reference)

    def output(self) -> Output:
        """Return the mean loss and the combined metrics, or the skip of a window without any."""
        if self._loss is None or self._last is None or self.weight is None:
            assert self._skipped is not None, "nothing was added"
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach())
        weight: float | Tensor
        if isinstance(self.weight, Tensor):
            weight, items = self.weight, torch.where(self.weight == 0, 1, self.weight)
        else:
            weight, items = self.weight, self.weight or 1
        if self._checked is not None:
            given, valid = self._checked
            weight = torch.where(given == valid, weight, math.nan)
        return Output(self._loss / items, weight, self._last.aux, self._metrics)


def weight_on_device(out: Output, weight: Weight | None = None) -> Tensor:
    """Return a weight, by default that of the output, as a float64 tensor on the loss's device."""
    given = torch.as_tensor(out.weight if weight is None else weight, device=out.loss.device)
    wide = torch.float32 if given.device.type == "mps" else torch.float64
    return valid_weight(given.detach().to(wide))


def valid_weight(weight: Tensor) -> Tensor:
    """Return a weight, or 0 where it is NaN, infinite or negative."""
    return torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp_(min=0)


def in_wide_dtype(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in the loss's dtype, at least float32, which holds it exactly."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def divide(
    gradients: Iterable[Tensor | None], weight: Weight, reference: Weight | None = None
) -> None:
    """Divide gradients by weight / reference, in place."""
    divisor = weight if reference is None else weight / reference
    if not isinstance(divisor, Tensor) and divisor in (0, 1):
        return
    local = [g if g.__class__ is Tensor else local_part(g) for g in gradients if g is not None]
    if not local:
        return
    if isinstance(divisor, Tensor):
        # Without any item the gradient is zero, and stays so.
        torch_compat.foreach_div_(local, torch.where(divisor == 0, 1.0, divisor))
    elif math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
        torch_compat.foreach_mul_(local, 1 / divisor)
    else:
        torch_compat.foreach_div_(local, divisor)


def at_least_float32(loss: Tensor) -> Tensor:
    """Return a loss in float32 if its dtype is narrower."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


# --------------------------------------------------------------------------------------------------
# The sum over a window whose batches a step takes one by one, changing each gradient.


class GradientSum(abc.ABC):
    """The weighted sum of gradients, within a ``with`` block.

    For each batch let the step fill ``.grad``, then call ``add`` with its output; after the last
    one ``finish``.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """End the sum, also after an exception."""

    @abc.abstractmethod
    def add(self, state: TrainState, out: Output, /) -> None:
        """Take the gradient of a batch out of ``.grad``, unless it is skipped."""

    @abc.abstractmethod
    def finish(self, state: TrainState, /) -> Output:
        """Leave the mean in ``.grad``. Return what to report of the window."""


class SumInOrder(GradientSum):
    """A sum that adds each gradient to those before it.

    Args:
        engine: the engine.
        state: the state that is trained.
        total: the sum of the weights.
        dtype: in which gradients are added up; None: in their own.
    """

    def __init__(
        self,
        engine: LocalEngine | DistributedEngine,
        state: TrainState,
        total: WeightedSum,
        dtype: torch.dtype | None,
    ) -> None:
        self._engine, self._total, self._params = engine, total, parameters(state)
        self._dtype = dtype
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._stashed = stash_gradients(state)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if self._engine.any(out.skip is not None) and out.skip is None:
            out = attrs.evolve(out, skip=BY_ANOTHER)
        if out.skip is None:
            relative = self._total.relative_weight(out)
            pairs = zip(self._sums, self._engine.gradients(self._params), strict=True)
            self._sums = [
                _plus(so_far, _in_dtype(gradient, self._dtype), relative)
                for so_far, gradient in pairs
            ]
        for p in self._params:
            p.grad = None
        self._total.add(out)

    def finish(self, state: TrainState) -> Output:
        self._total.divide(self._sums)
        for p, gradient in zip(self._params, self._sums, strict=True):
            p.grad = _in_dtype(gradient, p.dtype)
        restore_gradients(state, self._stashed)
        return self._total.output()


def _in_dtype(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return gradient if gradient is None or dtype is None else gradient.to(dtype)


def _plus(so_far: Tensor | None, gradient: Tensor | None, relative: Weight | None) -> Tensor | None:
    if gradient is None:
        return so_far
    part = gradient if relative is None else gradient * relative
    return part if so_far is None else so_far + part
