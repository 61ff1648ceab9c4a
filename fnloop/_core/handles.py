"""The handles of a state, a model and its optimizer: what they must be, and how they are shown."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from fnloop._backend.launch import Backend
from fnloop._core.rng import SEED_BITS
from fnloop._display import html
from fnloop._display.checks import describe

__all__ = ["check_handles", "check_settings", "count_parameters"]


def check_handles(model: object, optimizer: object) -> None:
    """Raise unless an optimizer trains parameters of a model.

    Raises:
        TypeError: one of them is something else.
        ValueError: the model has no weights yet, or the optimizer is for another model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"TrainState.create expects model as a torch.nn.Module; got {describe(model)}"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "TrainState.create expects an optimizer second, such as "
            f"torch.optim.SGD(model.parameters(), lr=0.1); got {describe(optimizer)}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "TrainState.create expects a model with weights; got one on the meta device: write "
            'model.to_empty(device="cpu"), initialize it, and make the optimizer after that'
        )
    theirs = {id(p) for p in model.parameters()}
    trained = (p for group in optimizer.param_groups for p in group["params"])
    if theirs and not any(id(p) in theirs for p in trained):
        name = type(optimizer).__name__
        raise ValueError(
            f"none of the optimizer's parameters belongs to this {type(model).__name__}: nothing "
            "would be trained. Make the optimizer after the model (and after any change of its "
            f"parameters): {name}(model.parameters(), ...)"
        )


def check_settings(seed: object, backend: object) -> None:
    """Raise unless these are a seed and a backend, or None.

    Raises:
        ValueError: the seed is not one.
        TypeError: the backend is not one.
    """
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
