"""Several histories in one figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from fnloop._core.history import History
from fnloop._core.history_plot import (
    best_label,
    curves_of,
    panel_rank,
    panel_size,
)
from fnloop._core.history_table import is_evaluated
from fnloop._core.monitor import mode_by_name
from fnloop._core.record import Record, best_record
from fnloop._display import checks, plot
from fnloop._display.tables import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["compare"]

MOST_INSIDE = 6  # runs in the legend of the first axis; of more, it stands below the figure
LONGEST_INSIDE = 24  # characters of a name there
LONGEST_BESIDE = 12  # of one next to a title
LONGEST_NAME = 48  # of a longer one, the middle is left out
MOST_SHOWN = 4  # best values next to the title of another axis; of more, only the best one
Series = Mapping[str, list[Record]]  # the records that have a metric


def compare(histories: Mapping[str, History], keys: Iterable[str] | None = None) -> Figure:
    """Draw several runs in one figure: an axis for each metric, and a colour for each run.

    The legend has the names of the runs. Where a metric is evaluated, and its name says whether
    lower or higher values are better, the best value of each run is marked and shown.

    Args:
        histories: names of runs to their histories.
        keys: the metrics to draw, such as ``["valid/loss"]``; a run that lacks one is not in its
            axis. By default those that all histories have, with ``recent/...`` as thin lines in
            the axes of ``train/...``.

    Returns:
        A matplotlib Figure; ``figure.savefig("runs.png")`` writes it. A notebook shows it once.

    Raises:
        TypeError: histories is not a mapping from names to histories, or keys are not names.
        KeyError: no history has a metric of that name; the message lists the known ones.
        ValueError: a history is empty, or there is no metric that all have.
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).

    Example:
        >>> from fnloop import History, Record
        >>> first = History([Record(1, 10, {"valid/loss": 2.0})])
        >>> second = History([Record(1, 10, {"valid/loss": 1.5})])
        >>> figure = compare({"lr 0.1": first, "lr 0.01": second})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['lr 0.1: best 2 (epoch 1)', 'lr 0.01: best 1.5 (epoch 1)']
    """
    plot.require_matplotlib("compare")
    _check(histories)
    histories = dict(zip(_short_names([*histories]), histories.values(), strict=True))
    series = {name: curves_of(history) for name, history in histories.items()}
    keys = _shared_keys(series) if keys is None else _given_keys(series, keys)
    sizes = [panel_size(_metric_of(key), i) for i, key in enumerate(keys)]
    figure, axes = plot.panels("compare", sizes)
    colors = plot.palette("compare", len(series))
    crowded = len(series) > MOST_INSIDE or max(map(len, series)) > LONGEST_INSIDE
    explained: set[str] = set()  # the names of the runs in the legend of the first axis
    for place, (axis, key) in enumerate(zip(axes, keys, strict=True)):
        best = _best_records(series, key)
        named, short = best, place > 0
        if place > 0 and len(best) > MOST_SHOWN:
            named, short = _best_of_all(best, key), False
        curves = []
        for color, (name, history) in zip(colors, histories.items(), strict=True):
            new, label = name not in explained, name
            if name in named:
                label = _label(name, best[name], key, history, short and not new, not new)
            curves += _curves(series[name], key, keys, label, color, best.get(name))
        known = explained if place else None if crowded else ()
        explained = explained or {name for name, found in series.items() if key in found}
        plot.draw(axis, key, "step", curves, known)
    if crowded:
        plot.add_legend_below(figure, axes[0])
    return figure


def _check(histories: Mapping[str, History]) -> None:
    checks.mapping("compare", "histories", histories, 'such as {"a": history_a, "b": history_b}')
    if not histories:
        raise ValueError("compare expects at least one history; got none")
    for name, history in histories.items():
        checks.text("compare", "histories", name, "names of runs")
        if not isinstance(history, History):
            raise TypeError(
                f"compare expects a History for {name!r}, such as state.history; "
                f"got {checks.describe(history)}"
            )
        if not history.keys():
            empty = "has no metric" if len(history) else "is empty"
            raise ValueError(f"compare has nothing to draw for {name!r}: its history {empty}")


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Return names of runs that fit a legend, unless some would be the same."""
    short = [shorten(name, LONGEST_NAME) for name in names]
    return short if len({*short}) == len(names) else names


def _best_records(series: Mapping[str, Series], key: str) -> dict[str, Record]:
    """Return the best record of each run that has an evaluated metric, unless none is finite."""
    mode = mode_by_name(key) if is_evaluated(key) else None
    if mode is None:
        return {}
    finite = {
        name: [record for record in found.get(key, ()) if math.isfinite(record.metrics[key])]
        for name, found in series.items()
    }
    return {name: best_record(having, key, mode) for name, having in finite.items() if having}


def _label(name: str, best: Record, key: str, history: History, short: bool, known: bool) -> str:
    """Return the label of a run; a short one where its colour says which run it is.

    ``known`` is whether the first axis explains the colour.
    """
    if short:
        return f"{best.metrics[key]:.4g}"
    value = best_label(best, key, history)
    return value if known and len(name) > LONGEST_BESIDE else f"{name}: {value}"


def _best_of_all(best: Mapping[str, Record], key: str) -> dict[str, Record]:
    """Return the best of the best records of some runs."""
    winner = best_record(best.values(), key, mode_by_name(key) or "min")
    name = next(name for name, record in best.items() if record is winner)
    return {name: winner}


def _curves(
    series: Series, key: str, keys: list[str], label: str, color: str, best: Record | None
) -> list[plot.Curve]:
    """Return the curves of a run in the axis of a metric."""
    if key not in series:
        return []
    mark = None if best is None else (best.step, best.metrics[key], "")
    curves = [plot.Curve(_points(series, key), label, color, key.startswith("recent/"), mark)]
    recent = f"recent/{_metric_of(key)}"
    if key.startswith("train/") and recent in series and recent not in keys:
        curves.append(plot.Curve(_points(series, recent), "", color, thin=True))
    return curves


def _points(series: Series, key: str) -> plot.Points:
    return [(record.step, record.metrics[key]) for record in series[key]]


def _shared_keys(series: Mapping[str, Series]) -> list[str]:
    """Return the metrics that all histories have, in the order of their axes."""
    first, *others = series.values()
    shared = [key for key in first if all(key in other for other in others)]
    # The intervals of ``recent`` are drawn in the axes of ``train``.
    keys = [key for key in shared if not key.startswith("recent/")] or shared
    if not keys:
        known = "; ".join(f"{name}: {', '.join(found)}" for name, found in series.items())
        raise ValueError(f"compare found no metric that all histories have; there are: {known}")

    def rank(key: str) -> tuple[object, ...]:
        small, trained = panel_rank(_metric_of(key), [key])
        return small == 2, trained, small

    return sorted(keys, key=rank)


def _given_keys(series: Mapping[str, Series], keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(
            'compare expects keys as a list of metrics, such as ["valid/loss"]; '
            f"got {checks.describe(keys)}"
        )
    keys = list(dict.fromkeys(checks.metric_name("compare", "keys", key) for key in keys))
    known = list(dict.fromkeys(key for found in series.values() for key in found))
    if not keys:
        raise ValueError("compare expects at least one key; got none")
    for key in keys:
        if key not in known:
            raise KeyError(f"no metric {key!r} in these histories; there are: {', '.join(known)}")
    return keys


def _metric_of(key: str) -> str:
    return key.split("/", 1)[-1]
