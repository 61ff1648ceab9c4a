"""What could be changed about a run to make it faster, where it is possible and not in use."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence

import attrs
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from fnloop._core.middleware import Middleware
from fnloop._core.optimizers import optimizers_in
from fnloop._core.state import TrainState
from fnloop._loop.hints import fused_hint
from fnloop._middleware.amp import amp
from fnloop._middleware.channels_last import channels_last
from fnloop._middleware.compiled import compiled
from fnloop._step.pipeline import LossStep, PipelineStep, pipeline

__all__ = ["Setting", "changes_of", "could_be_fused"]

WORTH_COMPILING = 5.0  # seconds: a shorter measurement does not wait for a compiler


@attrs.frozen
class Setting:
    """What a trial runs with.

    Args:
        step: the step.
        loader: the loader.
        fused: whether optimizers are fused, where they can be.
        prefetch: how many windows are fetched ahead.
        lines: what to write for all of it but the step.
    """

    step: PipelineStep
    loader: object
    fused: bool = False
    prefetch: int = 1
    lines: tuple[str, ...] = ()

    def written(self, lines: Sequence[str], **changes: object) -> Setting:
        """Return it with changes, and the lines that make them."""
        changed: Setting = attrs.evolve(self, lines=(*self.lines, *lines), **changes)
        return changed


def changes_of(
    now: Setting, state: TrainState, seconds: float
) -> dict[str, Callable[[Setting], Setting]]:
    """Return what could be changed, by name: functions from a setting to another.

    Args:
        now: the setting.
        state: the state.
        seconds: how long will be measured.
    """
    found: dict[str, Callable[[Setting], Setting]] = {}
    lines = [
        f"{type(optimizer).__name__}(..., fused=True)"
        for optimizer in optimizers_in(state.optimizer).values()
        if could_be_fused(optimizer)
    ]
    if lines:
        found["fused"] = lambda s: s.written(lines, fused=True)
    if type(now.step) is LossStep:
        names = {m.name for m in now.step.pipeline.middleware}
        if "amp" not in names and state.backend.precision is None:
            found["bf16"] = lambda s: _with(s, first=(amp("bf16"),))
        if "channels_last" not in names and any(p.ndim == 4 for p in state.model.parameters()):
            found["channels_last"] = lambda s: _with(s, last=(channels_last(),))
        if "compiled" not in names and seconds >= WORTH_COMPILING and _has_compiler():
            found["compiled"] = lambda s: _with(s, last=(compiled(),))
    found |= _changes_of_loading(now.loader, state)
    return found


def _with(
    now: Setting, first: tuple[Middleware, ...] = (), last: tuple[Middleware, ...] = ()
) -> Setting:
    step = now.step
    assert isinstance(step, LossStep)
    members = (*first, *step.pipeline.middleware, *last)
    return attrs.evolve(now, step=pipeline(*members)(step.loss_fn))


def could_be_fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a fused form that was not asked for, nor refused."""
    return "fused=True" in (fused_hint(optimizer) or "")


def _has_compiler() -> bool:
    """Return whether ``torch.compile`` finds a compiler of C++, which it needs on any device."""
    return any(map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "cl"))))


def _changes_of_loading(
    loader: object, state: TrainState
) -> dict[str, Callable[[Setting], Setting]]:
    found: dict[str, Callable[[Setting], Setting]] = {}
    by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    workers = loader.num_workers if isinstance(loader, DataLoader) else 0
    if by_index:
        n = 0 if workers else min(4, os.cpu_count() or 1)
        line = f"DataLoader(..., num_workers={n}{', persistent_workers=True' if n else ''})"
        found[f"{n} workers"] = lambda s: s.written([line], loader=_with_workers(s.loader, n))
    if workers or state.backend.device.type != "cpu":
        found["prefetch=4"] = lambda s: s.written(["fit(..., prefetch=4)"], prefetch=4)
    return found


def _with_workers(loader: object, n: int) -> object:
    changed = copy.copy(loader)
    changed.num_workers = n  # type: ignore[attr-defined]
    return changed
