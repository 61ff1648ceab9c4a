"""Pictures: figures of matplotlib, which is imported when the first is drawn, and never through pyplot.

So no figure is open behind the back of whoever asked for it, and a notebook shows it once.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["Points", "check_file", "draw", "grid", "need"]

Points = Sequence[tuple[float, float]]


def need(owner: str) -> Any:
    """Return matplotlib's class of figures.

    Raises:
        ImportError: matplotlib is not installed; the message says who needs it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{owner} needs matplotlib: pip install 'fnloop[plot]'") from error
    return Figure


def check_file(owner: str, file: Path) -> None:
    """Raise ValueError unless matplotlib can save a figure under this name."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ValueError(
            f"{owner} expects a file whose suffix is one of {', '.join(known)}, such as 'run.png'; got {str(file)!r}"
        )


def grid(owner: str, n: int) -> tuple[Any, list[Any]]:
    """Return a figure and its n axes, in rows of up to three."""
    columns = 1 if n == 1 else 2 if n in (2, 4) else 3
    rows = -(-n // columns)
    figure = need(owner)(
        figsize=(5.2 if n == 1 else 4.2 * columns, 3.0 * rows), layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, hspace=0.04)
    figure._repr_png_ = functools.partial(
        _png, figure
    )  # without pyplot, a notebook would show its name only
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[n:]:
        axis.set_visible(False)
    return figure, axes[:n]


def _png(figure: Any) -> tuple[bytes, dict[str, Any]]:
    """Draw a figure with twice its pixels, for screens that have them, to be shown in its own size."""
    width, height = figure.get_size_inches() * figure.dpi
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * figure.dpi)
    return file.getvalue(), {"width": round(width), "height": round(height)}


def draw(
    axis: Any,
    title: str,
    x: str,
    curves: Mapping[str, Points],
    marked: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    labels: Sequence[str] = (),
) -> None:
    """Draw curves into an axis.

    Args:
        axis: of matplotlib.
        title: of the axis.
        x: what is on its x axis.
        curves: label to points.
        marked: label of a curve to the point that is marked on it.
        labels: of all curves in the figure, so that a label has one colour in all its axes.
    """
    labels = list(labels or curves)
    for label, points in curves.items():
        color = f"C{labels.index(label)}"
        marker = "." if len(points) <= 40 else ""
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker=marker, markersize=5, linewidth=1.5, label=label, color=color)
        if label in marked:
            at, value = marked[label]
            best = {
                "markersize": 9,
                "fillstyle": "none",
                "color": color,
                "label": f"best {value:.4g}",
            }
            axis.plot([at], [value], "o", **best)
    if len(places := {x for points in curves.values() for x, _ in points}) == 1:
        axis.set_xlim(min(places) - 1, min(places) + 1)  # else the ticks are hundredths of a step
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
