"""Evaluation and prediction."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import toolz
import torch

from fnloop._backend.collectives import gather_objects
from fnloop._backend.memory import reusing_pages
from fnloop._backend.transfer import copy_to_cpu
from fnloop._core.call import name_of
from fnloop._core.copies import Buffers
from fnloop._core.metrics import read
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_all, torch_seeder
from fnloop._core.state import TrainState, check_not_stale
from fnloop._core.types import Batch, Metric, Output
from fnloop._data.loaders import check_loader
from fnloop._data.prefetch import windows
from fnloop._data.source import Source, open_source
from fnloop._data.window import END
from fnloop._display import checks
from fnloop._loop.errors import NO_LENGTH, READ_ONCE
from fnloop._loop.plan import check_step
from fnloop._step.engine import engine_of
from fnloop._step.evaluation import evaluating
from fnloop._step.optimizer_modes import evaluation_weights
from fnloop._step.pipeline import PipelineStep

__all__ = ["evaluate", "gather_outputs", "measure", "open_loader", "predict"]

Result = TypeVar("Result")
EXCHANGED = 16  # batches whose outputs are exchanged at once


def open_loader(loader: object, state: TrainState, total: int | None = None) -> Source:
    """Open a loader for the processes that train a state.

    Args:
        loader: the loader.
        state: the state.
        total: the samples of an update, of all processes together, if they are given.
    """
    __tracebackhide__ = True
    backend = state.backend
    return open_source(loader, state.seed, backend.data_rank, backend.data_size, total)


def measure(
    step: PipelineStep,
    state: TrainState,
    source: Source,
    in_run: bool = True,
    watch: Callable[[int], object] | None = None,
    outputs: list[list[Output]] | None = None,
) -> dict[str, Metric]:
    """Return the metrics of a loader, in evaluation mode.

    The caller isolates the generators. Outside of a run, an exception gets a note of the batch; a
    run adds a note of its own. ``watch`` is called with the number of batches that this process has
    evaluated, from 0. ``outputs`` receives copies of what the step returned, without metrics: a
    list for each batch, empty for padding.
    """
    __tracebackhide__ = True
    backend, seed, n = state.backend, fold_in(state.seed, COMPUTE), 0
    position = torch_seeder(backend.device)
    seed_all(seed)
    evaluation = engine_of(state).start_evaluation(state, step.evaluates)
    batches = windows(source, None, backend.device, None)
    with step.evaluating(state, together=True) as state:
        while True:
            where: str | None = "the loader"
            if watch is not None:
                watch(n)
            try:
                if (batch := next(batches, END)) is END:
                    break
                where = None
                # A function of the batch, whichever process evaluates it.
                position(mix(seed, n * backend.data_size + backend.data_rank))
                results = evaluation.call(step.evaluation, state, batch)
                if outputs is not None:
                    outputs.append([_to_host(out) for _, out in results if out.skip is None])
                for made, out in results:
                    if step.carries:
                        state = made
                    evaluation.add(out)
                n += 1
            except Exception as error:
                if not in_run:
                    layer = where or step.layer_of(error)
                    error.add_note(f"while in {layer}, evaluate, batch {n}")
                raise
    if not n:
        why = NO_LENGTH if source.length == 0 else READ_ONCE
        raise ValueError("the loader to evaluate gave no batch." + why)
    evaluation.finish(source)
    return evaluation.own_metrics()


def _to_host(out: Output) -> Output:
    loss, weight, aux = copy_to_cpu((out.loss, out.weight, dict(out.aux)))
    return Output(loss, weight, aux, {}, out.skip)


def gather_outputs(outputs: Iterable[list[Output]]) -> list[Output]:
    """Return what :func:`measure` has put into ``outputs``, of all processes, in order."""
    found: list[Output] = []
    for part in toolz.partition_all(EXCHANGED, outputs):
        every = gather_objects(part, "the outputs of an evaluation")
        for batches in zip(*every, strict=True):  # one of each process
            found += itertools.chain.from_iterable(batches)
    return found


def evaluate(step: PipelineStep, state: TrainState, loader: object) -> dict[str, float]:
    """Evaluate every batch of a loader once, with the step's pipeline up to its forward ring.

    The state stays unchanged: its parameters, buffers, history and training flags, and all
    generators. Buffers that the model updates in evaluation mode are put back.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state.
        loader: an iterable of batches, or a function that returns one.

    Returns:
        Name to value: "loss", and the metrics.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument is not what it should be.
        ValueError: the loader gave no batch.
        Exception: any exception of the loss function, a metric or the loader, with a note of the
            batch.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
        >>> evaluate(fl.pipeline()(toy_loss), toy(w=1.0), batches)
        {'loss': 3.0}
    """
    __tracebackhide__ = True
    check_step(step, "evaluate")
    check_not_stale(state, "evaluate")
    check_loader(loader, "evaluation", alone=True)
    with isolated(state.backend.device), reusing_pages(state.backend.device):
        state = step.init_slots(state, evaluation=True)
        metrics = measure(step, state, open_loader(loader, state), in_run=False)
        return step.derive(read(engine_of(state).merge_metrics(metrics), vectors=True))


def predict(
    fn: Callable[[torch.nn.Module, Batch], Result],
    state: TrainState,
    loader: object,
    *,
    gather: bool = True,
) -> Iterator[Result]:
    """Apply a function to every batch, lazily and in order, without gradients.

    The model is in evaluation mode during each call. Between results, the training flags, the
    buffers and the random generators are restored for the caller. Middleware such as ``amp`` is not
    applied. With several processes, each computes its share, and all have to iterate.

    Args:
        fn: ``(model, batch) -> anything``.
        state: the newest state, which must not be advanced while results are taken.
        loader: an iterable of batches, or a function that returns one.
        gather: whether every process yields the results of all processes; False yields only those
            of its own share.

    Returns:
        An iterator of what ``fn`` returns.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument is not what it should be.
        Exception: any exception of ``fn`` or the loader, with a note of the batch.

    Example:
        >>> from fnloop.testing import toy
        >>> def double(model, batch):
        ...     return (model.w * batch).tolist()
        >>> list(predict(double, toy(w=2.0), [torch.ones(2), torch.ones(1)]))
        [[2.0, 2.0], [2.0]]
    """
    if not callable(fn) or isinstance(fn, TrainState | PipelineStep | torch.nn.Module | type):
        raise TypeError(
            "predict expects a function (model, batch) -> anything first; got "
            f"{checks.describe(fn)}. Write "
            "predict(lambda model, batch: model(batch), state, loader)"
        )
    checks.function("predict", "fn", fn, "a function (model, batch) -> anything", 2)
    check_not_stale(state, "predict")
    check_loader(loader, "prediction", alone=True)
    checks.flag("predict", "gather", gather, "whether every process yields the results of all")
    return _predict(fn, state, loader, gather)


def _predict(
    fn: Callable[[torch.nn.Module, Batch], Result], state: TrainState, loader: object, gather: bool
) -> Iterator[Result]:
    __tracebackhide__ = True
    backend = state.backend
    source = open_loader(loader, state)
    batches = windows(source, None, backend.device, None)
    position, seed = torch_seeder(backend.device), fold_in(state.seed, COMPUTE)
    prediction = engine_of(state).start_evaluation(state, name_of(fn))
    buffers = Buffers(state.model)
    for n in itertools.count():
        check_not_stale(state, "predict")
        where = "the loader"
        try:
            with (
                isolated(backend.device),
                reusing_pages(backend.device),
                evaluating(state.model, buffers),
                evaluation_weights(state),
            ):
                batch = next(batches, END)
                if batch is END:
                    if gather:
                        prediction.finish(source)
                    return
                where = name_of(fn)
                position(fold_in(seed, n * backend.data_size + backend.data_rank))
                results = prediction.call(fn, state.model, batch)
        except Exception as error:
            error.add_note(f"while in {where}, predict, batch {n}")
            raise
        yield from prediction.gather(results) if gather else results
