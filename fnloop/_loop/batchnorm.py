"""The running statistics of BatchNorm, recomputed for the weights that a model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fnloop._backend.public import reduce
from fnloop._backend.torch_compat import batch_norms
from fnloop._core.frozen import keep_statistics
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_all, torch_seeder
from fnloop._core.state import TrainState, check_not_stale, take_ownership
from fnloop._data.loaders import check_loader
from fnloop._data.prefetch import windows
from fnloop._data.window import END, Padding
from fnloop._loop.errors import READ_ONCE
from fnloop._loop.evaluate import open_loader
from fnloop._loop.plan import check_step
from fnloop._step.engine import engine_of
from fnloop._step.evaluation import in_evaluation_mode
from fnloop._step.pipeline import PipelineStep

__all__ = ["update_batchnorm"]

BATCHES, STATISTICS = "num_batches_tracked", ("running_mean", "running_var")
Norms = Sequence[nn.BatchNorm1d]  # or another of its kind


def update_batchnorm(step: PipelineStep, state: TrainState, loader: object) -> TrainState:
    """Recompute the running statistics of every BatchNorm with one pass over a loader.

    Averaged weights need statistics of their own: those of the run belong to other weights. The
    model is in training mode for the pass, without gradients, and each BatchNorm takes the mean of
    the statistics of all batches, whatever its momentum. The parameters do not change. The
    loss function is called with the step's forward ring (``amp``, ``compiled``). With several
    processes each computes its share, and the statistics are averaged over all batches. Those of
    frozen norm layers stay as they are, see :func:`fnloop.freeze`.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state, or what ``averaged(state)`` returns. It is stale afterwards.
        loader: an iterable of batches, or a function that returns one; usually the training loader.

    Returns:
        The state with the new statistics. A model without BatchNorm stays as it is, and the loader
        is not read.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument is not what it should be.
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
    check_step(step, "update_batchnorm")
    check_not_stale(state, "update_batchnorm")
    check_loader(loader, "update_batchnorm", alone=True)
    kept = keep_statistics(state)
    norms = [norm for norm in batch_norms(state.model) if norm not in kept]
    if not norms:
        return take_ownership(state)
    before = _copied(norms)
    momenta = [norm.momentum for norm in norms]
    try:
        with isolated(state.backend.device):
            state = step.init_slots(state, evaluation=True)
            with in_evaluation_mode(state.model):
                state.model.train()
                keep_statistics(state)
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # the mean of all
                _forward(step, state, loader, norms)
                if state.backend.world_size > 1:
                    _merge(norms)
    except BaseException:
        _restore(norms, before)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return take_ownership(state)


def _forward(step: PipelineStep, state: TrainState, loader: object, norms: Norms) -> None:
    """Call the forward ring with every batch of a loader. Padding does not count."""
    __tracebackhide__ = True
    backend, seed, n = state.backend, fold_in(state.seed, COMPUTE), 0
    position = torch_seeder(backend.device)
    seed_all(seed)
    evaluation = engine_of(state).start_evaluation(state, step.evaluates)
    source = open_loader(loader, state)
    batches = windows(source, None, backend.device, None)
    while True:
        where: str | None = "the loader"
        try:
            if (batch := next(batches, END)) is END:
                break
            where = None
            position(mix(seed, n * backend.data_size + backend.data_rank))
            before = _copied(norms) if type(batch) is Padding else None
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
    evaluation.finish(source)


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


def _copied(norms: Norms) -> list[dict[str, Tensor]]:
    return [{name: b.clone() for name, b in norm.named_buffers()} for norm in norms]


def _restore(norms: Norms, before: Sequence[Mapping[str, Tensor]]) -> None:
    with torch.no_grad():
        for norm, buffers in zip(norms, before, strict=True):
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])
