"""What a run says about itself, the same in a terminal, a log and a notebook."""

from __future__ import annotations

import math

from torch import Tensor

from fnloop._core.events import RECORD
from fnloop._core.handles import count_parameters
from fnloop._core.history import records_since
from fnloop._core.history_table import update_best
from fnloop._core.metrics import Last, read
from fnloop._core.monitor import mode_by_name
from fnloop._core.optimizers import optimizers_in
from fnloop._core.phase import first_record, unfinished
from fnloop._core.record import Record
from fnloop._core.state import TrainState
from fnloop._display import html
from fnloop._display.tables import shorten
from fnloop._hooks.progress_pace import Entry, Position

__all__ = [
    "RECENT",
    "Best",
    "describe_end",
    "describe_failure",
    "describe_start",
    "format_count_of",
    "format_duration",
    "format_epoch",
    "format_left",
    "format_rate",
    "format_skipped",
    "format_value",
    "running_values",
]


LONGEST_REASON = 100  # characters of an error in the last line
RECENT = 10.0  # seconds between two lines, if there are records of ``record_every`` only


class Best:
    """The best record of each evaluated metric so far.

    Args:
        state: a state of the run, of before its first update.
        since: whether the records of the "phase" count, or all of the "run".
    """

    def __init__(self, state: TrainState, since: str) -> None:
        self.records: dict[str, Record] = {}
        self.loaders = () if state.run is None else state.run.evaluated
        self.turns = () if state.run is None else state.run.turns
        for record in records_since(state.history, first_record(state.phases, since)):
            self.records = update_best(self.records, record)

    def update(self, record: Record) -> set[str]:
        """Take a record into account, and return the names of its metrics that are the best now."""
        self.records = update_best(self.records, record)
        newest = {name for name, best in self.records.items() if best is record}
        return {name for name in newest if not self._is_mean_of_turns(name)}

    def _is_mean_of_turns(self, name: str) -> bool:
        """Return whether a loss is a mean of losses that may oppose each other."""
        *groups, title = name.split("/")
        return bool(self.turns) and title == "loss" and not {*groups} & {*self.turns}


# --- numbers


def format_duration(seconds: float) -> str:
    """Format a time in at most seven characters.

    Example:
        >>> [format_duration(s) for s in (2.04, 41.6, 187.0, 4320.0, 190_000.0)]
        ['2.0s', '42s', '3m 07s', '1h 12m', '2d 04h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m {rest:02}s"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}h" if days else f"{hours}h {minutes:02}m"


def format_left(seconds: float) -> str:
    """Format an estimate of the time left, which is not exact to a tenth of a second."""
    return f"{format_duration(seconds) if seconds >= 9.95 else f'{math.ceil(seconds)}s'} left"


def format_rate(rate: float, unit: str = "step") -> str:
    """Format a rate: per second, or, if it is below 1, the seconds of each.

    Example:
        >>> format_rate(1234.5), format_rate(12.345), format_rate(0.25, "batch")
        ('1,234 step/s', '12.3 step/s', '4.00 s/batch')
    """
    value, of = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s/{unit}")
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {of}"


def format_count_of(done: int, total: int | None) -> str:
    """Format how many of how many, aligned; or, without a total, how many."""
    if total is None:
        return f"{done:,}"
    of = f"{total:,}"
    return f"{done:{len(of)},}/{of}"


def format_value(name: str, value: float) -> str:
    """Format a metric: four decimals, two of a large one, and a learning rate like ``3.0e-04``."""
    if "lr" in name.split("/"):
        return f"{value:.1e}"
    small = value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6
    return f"{value:.2e}" if small else f"{value:,.4f}" if abs(value) < 100 else f"{value:,.2f}"


def running_values(state: TrainState) -> dict[str, float]:
    """Return "loss" and "lr": those of a record of this boundary, or else the running ones.

    With several optimizers the rates are "lr/matrices", ...; those of further groups are left out.
    With turns, the losses are "d/loss", ... in place of their mean.
    The running ones are read from the device: one read.
    """
    rates = {
        f"lr/{name}" if name else "lr": Last(one.param_groups[0]["lr"])
        for name, one in optimizers_in(state.optimizer).items()
    }
    turns = () if state.run is None else state.run.turns
    losses = [f"{turn}/loss" for turn in turns] or ["loss"]
    if RECORD in state.events:
        metrics = state.history[-1].metrics
        values = {
            name: metrics[f"{group}/{name}"]
            for name in (*losses, *rates)
            for group in ("train", "recent")
            if f"{group}/{name}" in metrics
        }
        for name, rate in rates.items():
            if name not in values and not isinstance(rate.value, Tensor):
                values[name] = rate.compute()
        return values
    of = {name: state.metrics.get(f"recent/{name}", state.metrics.get(name)) for name in losses}
    return read({name: metric for name, metric in of.items() if metric is not None} | rates)


# --- sentences


def format_epoch(position: Position | Entry) -> str:
    """Return the number of the epoch, from 1, and of the last one."""
    return f"epoch {position.epoch}" + (f"/{position.epochs}" if position.epochs else "")


def format_skipped(position: Position | Entry) -> str:
    """Return how many updates were skipped so far; "" if none was."""
    return f"{position.skipped:,} skipped" if position.skipped else ""


def describe_start(state: TrainState) -> list[str]:
    """Return what a run works with, and what it is going to do, in parts of a sentence."""
    run, backend = state.run, state.backend
    parameters = count_parameters(state.model)
    parts = [f"{type(state.model).__name__} on {backend.device}", *parameters.split(", ")]
    if precision := backend.precision if run is None else run.precision:
        parts.append(f"amp {precision}")
    else:
        parts += sorted({str(p.dtype).removeprefix("torch.") for p in state.model.parameters()})
    if backend.world_size > 1:
        parts.append(f"{backend.world_size} processes")
    return [*parts, *_describe_targets(state)]


def _describe_targets(state: TrainState) -> list[str]:
    run, parts = state.run, []
    if run is None:
        return parts
    phase = unfinished(state.phases)
    if phase is not None:
        parts.append(f"phase {phase.name}")
    left = (run.epochs or 0) - (0 if phase is None else phase.epoch)
    epochs = html.format_count(left, "epoch") if left else ""
    updates = (run.total_steps or 0) - run.first_step
    if not epochs and run.steps_per_epoch:
        parts.append(f"{html.format_count(run.steps_per_epoch, 'update')} per epoch")
    elif epochs and run.steps_per_epoch and updates == left * run.steps_per_epoch:
        parts.append(f"{epochs} of {html.format_count(run.steps_per_epoch, 'update')}")
    elif epochs:  # of different lengths, or of an unknown one
        parts.append(epochs)
        known = run.steps_per_epoch and updates > 0
        parts += [f"{html.format_count(updates, 'update')} in all"] if known else []
    if run.total_steps is not None and not run.epochs:
        parts.append(f"to step {run.total_steps:,}")
    if run.evaluated:
        parts.append(f"evaluated on {', '.join(run.evaluated)}")
    if state.step:
        parts.append(f"from step {state.step:,}")
    return parts


def describe_failure(error: BaseException | None) -> str:
    """Return why a run ended before its end: of an error, the class and the first line.

    Example:
        >>> describe_failure(ValueError("no\\nmore")), describe_failure(KeyboardInterrupt())
        ('failed: ValueError: no', 'interrupted at once')
    """
    if not isinstance(error, Exception):
        return "interrupted at once" if isinstance(error, KeyboardInterrupt) else "ended early"
    first, *_ = [*str(error).splitlines(), ""]
    first = shorten(first, LONGEST_REASON)
    return f"failed: {type(error).__name__}" + (f": {first}" if first else "")


def describe_end(reason: str, position: Position, seconds: float, best: Best) -> str:
    """Return the last line: why a run has ended, where, and what was best."""
    parts = [format_epoch(position), f"step {position.step:,}", format_skipped(position)]
    where = ", ".join([*filter(None, parts), f"after {format_duration(seconds)}"])
    return f"{reason}{';' if ':' in reason else ':'} {where}{_describe_best(best)}"


def _describe_best(best: Best) -> str:
    """Return the best loss of the first evaluated loader, or else its first other metric."""
    place = {loader: i for i, loader in enumerate(best.loaders)}

    def rank(name: str) -> tuple[bool, int]:
        return not name.endswith("/loss"), place.get(name.partition("/")[0], len(place))

    names = sorted(best.records, key=rank)
    if best.turns or not names or mode_by_name(names[0]) is None:
        return ""
    record = best.records[names[0]]
    value = format_value(names[0], record.metrics[names[0]])
    return f"; best {names[0]} {value} at step {record.step:,}"
