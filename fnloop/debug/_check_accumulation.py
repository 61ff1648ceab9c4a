"""Whether accumulated batches give the gradient of one batch of all their items."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fnloop._backend import torch_compat
from fnloop._backend.containers import parts_of, with_parts
from fnloop._backend.transfer import to_device
from fnloop._core.call import name_of
from fnloop._core.rng import isolated
from fnloop._core.state import TrainState
from fnloop._core.types import Batch
from fnloop._data.prefetch import windows
from fnloop._display.html import format_number
from fnloop._loop.dry_run import Finding
from fnloop._loop.evaluate import open_loader
from fnloop._loop.trials import AVERAGES, RATES, REPORTS, at_start_of_epoch, with_members
from fnloop._middleware.accumulate import accumulate
from fnloop._middleware.microbatch import microbatch
from fnloop._step.pipeline import LossStep, PipelineStep
from fnloop._step.raw import RawStep
from fnloop.debug._audit import audit
from fnloop.debug._bits import Gradients
from fnloop.debug._references import DROPOUTS, SMALL, tolerance_of
from fnloop.debug._watch import watch

__all__ = ["check_accumulation"]

KIND, NAME = "accumulation", "update"
_LEFT_OUT = (*RATES, *AVERAGES, *REPORTS, accumulate, microbatch, audit, watch)
_Made = dict[str, Tensor]


def check_accumulation(step: PipelineStep, state: TrainState, loader: object) -> Finding:
    """Compare the gradient of two batches, accumulated, with that of both joined.

    Args:
        step: the step.
        state: the newest state.
        loader: the training loader.
    """
    __tracebackhide__ = True
    if not isinstance(step, LossStep) or isinstance(step, RawStep) or step.carries:
        return Finding(KIND, NAME, f"not checked: {type(step).__name__} takes no accumulate(2)")
    with isolated(state.backend.device):
        batches = _read(loader, state)
        if len(batches) < 2:
            return Finding(KIND, NAME, "not checked: the loader has only one batch")
        try:
            joined = join(batches)
        except ValueError as error:
            return Finding(KIND, NAME, f"not checked: {error}")
        compare = _comparing(step, state, batches, joined)
        found = compare(_without_dropout)
        if found is None:
            return Finding(KIND, NAME, "two batches give the gradient of one with all their items")
        if found == _NO_GRADIENTS:
            return Finding(KIND, NAME, f"not checked: {found}")
        norms = _norms(state.model)
        if norms and compare(_without_norms) is None:
            why = (
                f"the BatchNorm {norms[0]} normalizes by the statistics of each batch. This is "
                "usual; a GroupNorm or a LayerNorm does not"
            )
        else:
            why = _explain_loss(step, state, batches, joined)
    return Finding(KIND, NAME, f"accumulate(2) is not one large batch: {found}; {why}", True)


_NO_GRADIENTS = "the update is skipped, so there is no gradient"


def _read(loader: object, state: TrainState) -> list[Batch]:
    """Return the first two batches of a loader."""
    reading = windows(open_loader(loader, state), None, state.backend.device, None)
    found = [to_device(b, state.backend.device) for b in itertools.islice(reading, 2)]
    if (close := getattr(reading, "close", None)) is not None:
        close()
    return found


def join(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all items.

    Raises:
        ValueError: the batches cannot be joined.

    Example:
        >>> join([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])["x"].shape
        torch.Size([3, 3])
    """
    first = batches[0]
    if all(isinstance(b, Tensor) for b in batches):
        shapes = {tuple(b.shape[1:]) for b in batches}
        if len(shapes) > 1 or not all(b.ndim for b in batches):
            raise ValueError("the first two batches cannot be joined, as their shapes differ")
        return torch.cat(list(batches))
    if all(isinstance(b, Mapping | list | tuple) for b in batches):
        keyed = [dict(parts_of(b) or ()) for b in batches]
        if all(one.keys() == keyed[0].keys() for one in keyed):
            return with_parts(first, [join([one[key] for one in keyed]) for key in keyed[0]])
    raise ValueError(f"batches with a {type(first).__name__} cannot be joined")


def _comparing(
    step: LossStep, state: TrainState, batches: Sequence[Batch], joined: Batch
) -> Callable[[Callable[[nn.Module], None]], str | None]:
    """Return a function that compares the gradients, after a change of the model's modes."""
    parts = with_members(step, _LEFT_OUT, [accumulate(2)])
    whole = with_members(step, _LEFT_OUT)
    rough = step.precision_in(state) is not None

    def compare(change: Callable[[nn.Module], None]) -> str | None:
        a = _gradients(parts, state, batches, change)
        b = _gradients(whole, state, joined, change)
        if not a or not b:
            return _NO_GRADIENTS
        least = SMALL * math.hypot(*map(_norm, b.values()))
        for name, grad in b.items():
            off = _norm(a[name] - grad) / max(_norm(grad), least, 1e-300)
            if not off <= tolerance_of(grad.dtype, rough):
                return f"the gradient of {name} differs by {off:.3g} of its norm"
        return None

    return compare


def _gradients(
    step: PipelineStep, state: TrainState, batch: Batch, change: Callable[[nn.Module], None]
) -> _Made:
    """Return the gradients of an update of a copy, by the names of parameters."""
    __tracebackhide__ = True
    copied = at_start_of_epoch(state)
    copied.model.train()
    change(copied.model)
    with Gradients(copied) as seen:
        step(copied, batch)
    named = copied.model.named_parameters()
    return {name: seen.found[id(p)] for name, p in named if id(p) in seen.found}


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.eval()


def _without_norms(model: nn.Module) -> None:
    _without_dropout(model)
    for norm in torch_compat.batch_norms(model):
        norm.eval()


def _norms(model: nn.Module) -> list[str]:
    norms = {id(norm) for norm in torch_compat.batch_norms(model)}
    return [name for name, module in model.named_modules() if id(module) in norms]


def _explain_loss(
    step: LossStep, state: TrainState, batches: Sequence[Batch], joined: Batch
) -> str:
    """Return what the loss of a batch may be, if it is not a mean over its items."""
    name, line = name_of(step.loss_fn), ""
    if inspect.isfunction(step.loss_fn):
        code = step.loss_fn.__code__
        line = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    copied = at_start_of_epoch(state)
    outs = [step.evaluate(copied, batch) for batch in (*batches, joined)]
    (a, b, both), (v, w, _) = (
        [float(out.loss) for out in outs],
        [float(out.weight) for out in outs],
    )
    mean = (a * v + b * w) / (v + w)
    if math.isclose(both, a + b, rel_tol=1e-4) and not math.isclose(both, mean, rel_tol=1e-4):
        return f"{name}{line} returns a sum over the items of a batch: return their mean"
    return (
        f"the loss that {name}{line} returns is {format_number(both)} for both batches together, "
        f"and the mean of theirs by weight is {format_number(mean)}: return a mean over items, and "
        'how many they are, if not the leading dimension: return loss, {"weight": n}'
    )
