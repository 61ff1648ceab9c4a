"""The metrics of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from fnloop._core.call import name_of
from fnloop._core.elapsed import wait_and_read_clock
from fnloop._core.metrics import Max
from fnloop._core.optimizers import labelled_groups, optimizers_in
from fnloop._core.rng import isolated
from fnloop._core.running import RECENT, without_recent
from fnloop._core.state import TrainState
from fnloop._core.types import Metric, Output
from fnloop._data.source import Source
from fnloop._loop.evaluate import gather_outputs, measure
from fnloop._step.pipeline import PipelineStep
from fnloop._step.rates import numbers_used

__all__ = [
    "asking",
    "evaluation_metrics",
    "recent_metrics",
    "train_metrics",
]


def train_metrics(state: TrainState) -> dict[str, Metric]:
    """Return the metrics since the epoch began, by their names in a record."""
    named = {f"train/{name}": m for name, m in without_recent(state.metrics).items()}
    return _with_rates("train/", state, named)


def recent_metrics(state: TrainState) -> dict[str, Metric]:
    """Return the metrics since the last record, by their names in a record."""
    named = {name: m for name, m in state.metrics.items() if name.startswith(RECENT)}
    return _with_rates(RECENT, state, named)


def _with_rates(prefix: str, state: TrainState, named: dict[str, Metric]) -> dict[str, Metric]:
    """Return metrics, the loss first; and the learning rates, where none is known.

    A middleware that sets the rates reports what an update used.
    """
    if not named:
        return {}
    if (loss := f"{prefix}loss") in named:
        named = {loss: named[loss], **named}
    rates = numbers_used(labelled_groups(optimizers_in(state.optimizer)), "lr")
    missing = {f"{prefix}{k}": rate for k, rate in rates.items() if f"{prefix}{k}" not in named}
    return {**named, **missing}


def evaluation_metrics(
    step: PipelineStep,
    state: TrainState,
    loader: str,
    source: Source,
    watch: Callable[[TrainState, str, int, int | None], object],
    collectors: Sequence[Any] = (),
) -> dict[str, Metric]:
    """Evaluate a loader. Return its metrics by their names in a record.

    ``watch`` is called with the state, the name, the number of batches that this process has
    evaluated, from 0, and how many there are, if that is known. ``collectors`` are the hooks that
    may ask for the outputs.
    """
    __tracebackhide__ = True
    run = None if state.run is None else attrs.evolve(state.run, loader=loader)
    length = source.length_in(0)
    share = None if length is None else -(-length // state.backend.data_size)
    tell = lambda done: watch(state, loader, done, share)
    asked_by = asking(collectors, state, loader)
    outputs: list[list[Output]] | None = [] if asked_by else None
    device = state.backend.device
    began = wait_and_read_clock(device) if step.is_timed else 0.0
    with isolated(device):
        found = measure(step, attrs.evolve(state, run=run), source, True, tell, outputs)
    if step.is_timed:
        if "time/evaluate" in found:
            raise ValueError(
                "timings reports the metric 'time/evaluate', which another middleware reports "
                "already: rename that metric"
            )
        found["time/evaluate"] = Max(wait_and_read_clock(device) - began)
    gathered = [] if outputs is None else gather_outputs(outputs)
    for hook in asked_by:
        hook.receive(state, gathered)
    return {f"{loader}/{name}": metric for name, metric in found.items()}


def asking(collectors: Sequence[Any], state: TrainState, loader: str) -> list[Any]:
    """Return the hooks that ask for the outputs of a loader."""
    found = []
    for hook in collectors:
        try:
            if hook.collects(state, loader):
                found.append(hook)
        except Exception as error:
            error.add_note(f"while in {name_of(hook)}")
            raise
    return found
