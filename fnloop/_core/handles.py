"""The handles of a state, a model and its optimizers: what they must be, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import nn
from torch.optim import Optimizer

from fnloop._backend.fsdp import is_sharded
from fnloop._backend.launch import Backend
from fnloop._core.optimizers import Handle, check_optimizers, check_shares, optimizers_in
from fnloop._core.rng import SEED_BITS
from fnloop._display import html
from fnloop._display.checks import describe, flag, join_names
from fnloop._display.log import log

__all__ = [
    "check_handles",
    "check_settings",
    "count_parameters",
    "exact_backend",
    "warn_of_others",
]


def check_handles(model: object, optimizer: Handle) -> None:
    """Raise unless an optimizer, or several by name, train parameters of a model.

    Raises:
        TypeError: one of them is something else.
        ValueError: the model has no weights yet, or the optimizers are for another model, share a
            parameter or leave one out.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"TrainState.create expects model as a torch.nn.Module; got {describe(model)}"
        )
    check_optimizers(optimizer)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "TrainState.create expects a model with weights; got one on the meta device: write "
            'model.to_empty(device="cpu"), initialize it, and make the optimizer after that'
        )
    if isinstance(optimizer, Mapping):
        check_shares(model, optimizer)
    else:
        _check_belongs(model, optimizer)


def _check_belongs(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if a model has parameters, and the optimizer has none of them."""
    theirs = {id(p) for p in model.parameters()}
    trained = (p for group in optimizer.param_groups for p in group["params"])
    if theirs and not any(id(p) in theirs for p in trained):
        name = type(optimizer).__name__
        raise ValueError(
            f"none of the optimizer's parameters belongs to this {type(model).__name__}: nothing "
            "would be trained. Make the optimizer after the model (and after any change of its "
            f"parameters): {name}(model.parameters(), ...)"
        )


def warn_of_others(model: nn.Module, optimizer: Handle) -> None:
    """Warn of optimizers with parameters that are not in the model."""
    theirs = {id(p) for p in model.parameters()}
    others = [
        repr(name) if name else type(one).__name__
        for name, one in optimizers_in(optimizer).items()
        if any(id(p) not in theirs for group in one.param_groups for p in group["params"])
    ]
    if others:
        log.warning(
            f"the optimizer {join_names(others)} has parameters that are not in this "
            f"{type(model).__name__}, so they are not saved. If the model was changed since, make "
            "the optimizer after that. If another module has them, put all modules into one, such "
            "as nn.ModuleDict({...})"
        )


def exact_backend(model: nn.Module, backend: Backend) -> Backend:
    """Return a backend on which a run has the same bits on any number of processes.

    Raises:
        NotImplementedError: the model is sharded.
        ValueError: there are settings of DistributedDataParallel, which such a run does not use.
    """
    if is_sharded(model):
        raise NotImplementedError(
            "exact=True needs the whole model in every process, and fully_shard gives each a part "
            "of it: leave one of them out"
        )
    if backend.settings or backend.prepare is not None:
        raise ValueError(
            "exact=True sums gradients without DistributedDataParallel, so its settings and its "
            "communication hook would do nothing: leave DistributedDataParallelKwargs out"
        )
    return attrs.evolve(backend, exact=True)


def check_settings(seed: object, backend: object, exact: object = False) -> None:
    """Raise unless these are a seed and a backend, or None, and a flag.

    Raises:
        ValueError: the seed is not one.
        TypeError: the backend or the flag is not one.
    """
    meaning = "whether the run has the same bits on any number of processes"
    flag("TrainState.create", "exact", exact, meaning)
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= SEED_BITS
    if seed is not None and not is_seed:
        raise ValueError(
            f"seed expects an int from 0 to 2**64 - 1, or None to draw one; got {describe(seed)}"
        )
    if not (
        backend is None or isinstance(backend, Backend) or hasattr(backend, "distributed_type")
    ):
        raise TypeError(
            f"backend expects an accelerate.Accelerator, or None; got {describe(backend)}"
        )


def count_parameters(model: nn.Module) -> str:
    """Return how many parameters a model has, and how many are trained unless all are."""
    params = list(model.parameters())
    if any(map(nn.parameter.is_lazy, params)):
        return "parameters of sizes that its first batch decides"
    size, trained = (
        sum(p.numel() for p in params),
        sum(p.numel() for p in params if p.requires_grad),
    )
    return html.format_count(size, "parameter") + (
        f", {trained:,} trained" if trained < size else ""
    )
