"""Evaluation and prediction."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fnloop._core.call import name_of
from fnloop._core.metrics import read, update_, update_loss_
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_all, torch_seeder
from fnloop._core.state import TrainState, check_not_stale
from fnloop._core.types import Batch, Metric
from fnloop._data.loaders import check_loader
from fnloop._data.prefetch import windows
from fnloop._data.source import Source, open_source
from fnloop._data.window import END
from fnloop._display import checks
from fnloop._loop.plan import check_step
from fnloop._step.engine import engine_of
from fnloop._step.evaluation import evaluating
from fnloop._step.pipeline import PipelineStep

__all__ = ["READ_ONCE", "evaluate", "measure", "open_loader", "predict"]

READ_ONCE = " An iterator can be read once: pass a list, or a function that makes one."


def open_loader(loader: Any, state: TrainState) -> Source:
    return open_source(loader, state.seed, state.backend.rank, state.backend.world_size)


def measure(
    step: PipelineStep, state: TrainState, source: Source, alone: bool = False
) -> dict[str, Metric]:
    """Reduce the metrics of a loader, in evaluation mode; the generators are the caller's to isolate.

    Where that is all that is done (``alone``), an exception gets a note of the batch; a run has a note of its own.
    """
    __tracebackhide__ = True
    metrics: dict[str, Metric] = {}
    backend, seed, n = state.backend, fold_in(state.seed, COMPUTE), 0
    batch: Any = None
    position = torch_seeder(backend.device)
    seed_all(seed)
    evaluation = engine_of(state).start_evaluation(state)
    batches = windows(source, 1, backend.device, None)
    with evaluating(state.model):
        while True:
            where: str | None = "the loader"
            try:
                if (batch := next(batches, END)) is END:
                    break
                where = None
                position(
                    mix(seed, n * backend.world_size + backend.rank)
                )  # of the batch, whichever process has it
                n += 1
                for _, out in evaluation.call(step.forward, state, batch):
                    if out.weight.__class__ is int and not out.weight:  # it has no item
                        continue
                    metrics = update_(metrics, out.metrics) if out.metrics else metrics
                    metrics["loss"] = update_loss_(metrics.get("loss"), out.loss, out.weight)  # type: ignore[arg-type]
            except Exception as error:
                layer = where or step.layer_of(error)
                if alone:
                    error.add_note(f"while in {layer}, evaluate, batch {n - (where is None)}")
                raise
    if not n:
        raise ValueError("the loader to evaluate gave no batch." + READ_ONCE)
    evaluation.finish(source)
    return evaluation.own_metrics(metrics)


# --- evaluation and prediction


def evaluate(step: PipelineStep, state: TrainState, loader: Any) -> dict[str, float]:
    """Evaluate a loader: the step's pipeline cut after its forward ring, over every batch, once.

    Nothing is touched: no parameter, no generator, no history, no submodule's training flag.

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
        Exception: whatever the loss function, a metric or the loader raises, with a note of the batch.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> evaluate(fl.pipeline()(toy_loss), toy(w=1.0), [torch.tensor([1.0, 2.0]), torch.tensor([6.0])])
        {'loss': 3.0}
    """
    __tracebackhide__ = True
    check_step(step, "evaluate")
    check_not_stale(state, "evaluate")
    check_loader(loader, "evaluation", alone=True)
    with isolated(state.backend.device):
        return read(
            engine_of(state).merge_metrics(
                measure(
                    step, step.init_slots(state, "forward"), open_loader(loader, state), alone=True
                )
            ),
            vectors=True,
        )


def predict(
    fn: Callable[[torch.nn.Module, Batch], Any],
    state: TrainState,
    loader: Any,
    *,
    gather: bool = True,
) -> Iterator[Any]:
    """Apply a function to every batch, lazily and in order, without gradients and in evaluation mode.

    Between two results the model's training flags and the generators are the caller's. The function is called as it is:
    middleware such as ``amp`` have no part in it. With several processes each computes its share, and all have to iterate.

    Args:
        fn: ``(model, batch) -> anything``.
        state: the newest state; it must stay so while results are taken.
        loader: an iterable of batches, or a function that returns one.
        gather: whether every process yields the results of all, as one process would; else only those of its share.

    Returns:
        An iterator of what ``fn`` returns.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument is not what it should be.
        Exception: whatever ``fn`` or the loader raises, with a note of the batch.

    Example:
        >>> from fnloop.testing import toy
        >>> list(predict(lambda model, batch: (model.w * batch).tolist(), toy(w=2.0), [torch.ones(2), torch.ones(1)]))
        [[2.0, 2.0], [2.0]]
    """
    if not callable(fn) or isinstance(fn, TrainState | PipelineStep | torch.nn.Module | type):
        raise TypeError(
            f"predict expects a function (model, batch) -> anything first; got {checks.describe(fn)}. Write "
            "predict(lambda model, batch: model(batch), state, loader)"
        )
    checks.function("predict", "fn", fn, "a function (model, batch) -> anything", 2)
    check_not_stale(state, "predict")
    check_loader(loader, "prediction", alone=True)
    checks.flag("predict", "gather", gather, "whether every process yields the results of all")
    return _predict(fn, state, loader, gather)


def _predict(
    fn: Callable[[torch.nn.Module, Batch], Any], state: TrainState, loader: Any, gather: bool
) -> Iterator[Any]:
    __tracebackhide__ = True
    backend = state.backend
    processes = backend.world_size
    source = open_loader(loader, state)
    batches = windows(source, 1, backend.device, None)
    position, seed = torch_seeder(backend.device), fold_in(state.seed, COMPUTE)
    prediction = engine_of(state).start_evaluation(state)
    for n in itertools.count():
        check_not_stale(state, "predict")
        where = "the loader"
        try:
            with isolated(backend.device), evaluating(state.model):
                batch = next(batches, END)
                if batch is END:
                    if gather:
                        prediction.finish(source)
                    return
                where = name_of(fn)
                position(fold_in(seed, n * processes + backend.rank))
                results = prediction.call(fn, state.model, batch)
        except Exception as error:
            error.add_note(f"while in {where}, predict, batch {n}")
            raise
        yield from prediction.gather(results) if gather else results
