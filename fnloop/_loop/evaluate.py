"""Evaluation and prediction, and the statistics that an evaluation needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import toolz
import torch
from torch import Tensor, nn

from fnloop._backend.collectives import gather_objects, reduce
from fnloop._backend.containers import copy_to_cpu, reusing_pages
from fnloop._backend.torch_compat import batch_norms
from fnloop._core.metrics import Metrics
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_all, seed_host, torch_seeder
from fnloop._core.state import Ownership, TrainState, check_not_stale
from fnloop._core.types import Batch, Metric, Output, Step, name_of
from fnloop._core.view import Visits, in_evaluation_mode, view
from fnloop._data.loaders import NONE_LEFT, check_loader
from fnloop._data.source import Source
from fnloop._display import checks
from fnloop._display.frames import leave_out_frames, short_traceback
from fnloop._extensions import extensions
from fnloop._loop.errors import READ_ONCE
from fnloop._step.engine import engine_of
from fnloop._step.pipeline import PipelineStep

Result = TypeVar("Result")
EXCHANGED = 16  # batches whose outputs are exchanged at once


def open_loader(
    loader: object, state: TrainState, total: int | None = None, reader: str = ""
) -> Source:
    """Open a loader for the processes that train a state.

    Args:
        loader: the loader.
        state: the state.
        total: the samples of an update, of all processes together, if they are given.
        reader: the function that reads it, outside of a run. Then processes that are elsewhere are
            told so when they compare what they have read.
    """
    __tracebackhide__ = True
    backend = state.backend
    alike = backend.data_size < backend.world_size  # others have the same share as this process
    what = f"the data that {reader} reads" if reader else "the data"
    place = backend.data_rank, backend.data_size
    return Source.open(loader, state.seed, *place, total, alike, what)


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
    batches = source.windows(None, backend.device, None)
    call, add, position_of = evaluation.call, evaluation.add, backend.position_of
    with step.evaluating(state, together=True) as state:
        evaluate_batch, carries = step.evaluation, step.carries
        while True:
            where: str | None = "the loader"
            if watch is not None:
                watch(n)
            try:
                if (batch := next(batches, NONE_LEFT)) is NONE_LEFT:
                    break
                where = None
                # A function of the batch, whichever process evaluates it.
                position(mix(seed, position_of(n)))
                results = call(evaluate_batch, state, batch)
                if outputs is not None:
                    outputs.append([_to_host(out) for _, out in results if out.skip is None])
                for made, out in results:
                    if carries:
                        state = made
                    add(out)
                n += 1
            except Exception as error:
                if not in_run:
                    layer = where or step.layer_of(error)
                    error.add_note(f"while in {layer}, evaluate, batch {n}")
                raise
    if not n:
        name = f"{state.run.loader} loader" if in_run and state.run else "loader to evaluate"
        raise ValueError(f"the {name} gave no batch.{source.why_empty() or READ_ONCE}")
    source.check_order()
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


@short_traceback
def evaluate(step: Step, state: TrainState, loader: object) -> dict[str, float]:
    """Evaluate a state on every batch of a loader: the loss and the metrics.

    The step's pipeline is used up to its forward ring.

    The state stays unchanged: its parameters, buffers, history and training flags, and all
    generators. Buffers that the model updates in evaluation mode are restored. There are no
    gradients. A loss function that needs them, such as a gradient penalty, switches them on:
    ``with torch.enable_grad():``.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state.
        loader: an iterable of batches, or a function that returns one.

    Returns:
        Name to value: "loss", and the metrics.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument has the wrong type.
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
    step = PipelineStep.checked(step, "evaluate")
    check_not_stale(state, "evaluate")
    check_loader(loader, "evaluation", alone=True)
    with isolated(state.backend.device), reusing_pages(state.backend.device):
        state = step.init_slots(state, evaluation=True)
        metrics = measure(step, state, open_loader(loader, state, reader="evaluate"), False)
        return step.derive(Metrics(engine_of(state).reduce(metrics)).read(vectors=True))


def predict(
    fn: Callable[[torch.nn.Module, Batch], Result],
    state: TrainState,
    loader: object,
    *,
    gather: bool = True,
) -> Iterator[Result]:
    """Apply a function to every batch, lazily and in order, without gradients.

    The model is in evaluation mode during each call. Between results, the training flags, the
    buffers and the random generators are restored for the caller. What ``fn`` draws is a function
    of ``state.seed`` and the position of the batch. Middleware such as ``amp`` is not applied. With
    several processes, each computes its share, and all have to iterate.

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
        TypeError: an argument has the wrong type.
        Exception: any exception of ``fn`` or the loader, with a note of the batch.

    Example:
        >>> from fnloop.testing import toy
        >>> def double(model, batch):
        ...     return (model.w * batch).tolist()
        >>> list(predict(double, toy(w=2.0), [torch.ones(2), torch.ones(1)]))
        [[2.0, 2.0], [2.0]]

    Replaces: lightning.predict, keras.predict, transformers.predict
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
    source = open_loader(loader, state, reader="predict")
    batches = source.windows(None, backend.device, None)
    position, seed = torch_seeder(backend.device), fold_in(state.seed, COMPUTE)
    name = name_of(fn)
    prediction = engine_of(state).start_evaluation(state, name)
    apart, visits = isolated(backend.device), Visits(state)
    with reusing_pages(backend.device):
        for n in itertools.count():
            check_not_stale(state, "predict")
            where = "the loader"
            try:
                with apart, visits.visit() as model:
                    batch = next(batches, NONE_LEFT)
                    if batch is NONE_LEFT:
                        if gather:
                            source.check_order()
                        return
                    where = name
                    draws = mix(seed, backend.position_of(n))
                    position(draws)
                    seed_host(draws)  # they are the caller's again before each batch
                    results = prediction.call(fn, model, batch)
            except Exception as error:
                error.add_note(f"while in {where}, predict, batch {n}")
                leave_out_frames(error)
                raise
            yield from prediction.gather(results) if gather else results


# --------------------------------------------------------------------------------------------------
# The running statistics of BatchNorm, recomputed for the weights that a model has.

BATCHES, STATISTICS = "num_batches_tracked", ("running_mean", "running_var")
Norms = Sequence[nn.BatchNorm1d]  # or another of its kind


@short_traceback
def update_batchnorm(step: Step, state: TrainState, loader: object) -> TrainState:
    """Recompute the running statistics of every BatchNorm with one pass over a loader.

    Averaged weights need their own statistics: those of the run belong to other weights. The
    model is in training mode for the pass, without gradients, and each BatchNorm takes the mean of
    the statistics of all batches, whatever its momentum. The parameters are those that an
    evaluation uses, also with an optimizer that trains others, and do not change. The loss function
    is called with the step's forward ring (``amp``, ``compiled``). With several processes each
    computes its share, and the statistics are averaged over all batches. Those of frozen norm
    layers stay as they are, see :func:`fnloop.freeze`.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state, or what ``averaged(state)`` returns. It is stale afterwards.
        loader: an iterable of batches, or a function that returns one; usually the training loader.

    Returns:
        The state with the new statistics. A model without BatchNorm stays as it is, and the loader
        is not read.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument has the wrong type.
        ValueError: the loader gave no batch.
        Exception: any exception of the loss function or the loader, with a note of the batch. The
            statistics are then as they were.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.BatchNorm1d(1)
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
        >>> step = fl.pipeline()(lambda model, batch: model(batch).mean())
        >>> batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])]
        >>> update_batchnorm(step, state, batches).model.running_mean.item()    # of 1 and 5
        3.0

    Source: Izmailov et al., 2018, https://arxiv.org/abs/1803.05407; as
    ``torch.optim.swa_utils.update_bn``.
    """
    __tracebackhide__ = True
    step = PipelineStep.checked(step, "update_batchnorm")
    check_not_stale(state, "update_batchnorm")
    check_loader(loader, "update_batchnorm", alone=True)
    kept = _keep_statistics(state)
    norms = [norm for norm in batch_norms(state.model) if norm not in kept]
    if not norms:
        return Ownership.take(state)
    before = _copied(norms)
    momenta = [norm.momentum for norm in norms]
    try:
        with isolated(state.backend.device):
            state = step.init_slots(state, evaluation=True)
            with view(state, "save"), in_evaluation_mode(state.model):
                state.model.train()
                _keep_statistics(state)
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # the mean of all
                _forward(step, state, loader, norms)
                if state.backend.world_size > 1:
                    _merge(norms)
                made = _copied(norms)
            _restore(norms, made)  # a view puts the buffers back that it has changed
    except BaseException:
        _restore(norms, before)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return Ownership.take(state)


def _forward(step: PipelineStep, state: TrainState, loader: object, norms: Norms) -> None:
    """Call the forward ring with every batch of a loader. Padding does not count."""
    __tracebackhide__ = True
    backend, seed, n = state.backend, fold_in(state.seed, COMPUTE), 0
    position = torch_seeder(backend.device)
    seed_all(seed)
    evaluation = engine_of(state).start_evaluation(state, step.evaluates)
    source = open_loader(loader, state, reader="update_batchnorm")
    batches = source.windows(None, backend.device, None)
    while True:
        where: str | None = "the loader"
        try:
            if (batch := next(batches, NONE_LEFT)) is NONE_LEFT:
                break
            where = None
            position(mix(seed, backend.position_of(n)))
            before = _copied(norms) if source.unpadded(batch)[1] else None
            evaluation.call(step.forward, state, batch)
            if before is not None:
                _restore(norms, before)
            n += 1
        except Exception as error:
            layer = where or step.layer_of(error)
            error.add_note(f"while in {layer}, update_batchnorm, batch {n}")
            raise
    if not n:
        raise ValueError("update_batchnorm: the loader gave no batch." + READ_ONCE)
    source.check_order()


def _merge(norms: Norms) -> None:
    """Average the statistics over all processes, weighted by their batches. A collective."""
    sums: list[dict[str, Tensor]] = []
    for norm in norms:
        batches = norm.get_buffer(BATCHES)
        sums.append({name: norm.get_buffer(name) * batches for name in STATISTICS})
        sums[-1][BATCHES] = batches
    for norm, total in zip(norms, reduce(sums, "sum"), strict=True):
        norm.get_buffer(BATCHES).copy_(total[BATCHES])
        if total[BATCHES]:  # it may be in a part of the model that was not used
            for name in STATISTICS:
                norm.get_buffer(name).copy_(total[name] / total[BATCHES])


def _keep_statistics(state: TrainState) -> set[nn.Module]:
    """Put the norm layers whose statistics are frozen into evaluation mode, and return them."""
    every = (keep(state) for keep in extensions("norm layers that are frozen"))
    return {norm for kept in every for norm in kept}


def _copied(norms: Norms) -> list[dict[str, Tensor]]:
    return [{name: b.clone() for name, b in norm.named_buffers()} for norm in norms]


def _restore(norms: Norms, before: Sequence[Mapping[str, Tensor]]) -> None:
    with torch.no_grad():
        for norm, buffers in zip(norms, before, strict=True):
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])
