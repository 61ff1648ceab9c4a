"""Figures of matplotlib, which is imported when the first one is drawn.

They are made without pyplot. So no figure stays open without the caller's knowledge, and a notebook
shows each one once.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Points", "check_file", "draw", "grid", "require_matplotlib"]

Points = Sequence[tuple[float, float]]


def require_matplotlib(owner: str) -> type[Figure]:
    """Return matplotlib's class of figures.

    Raises:
        ImportError: matplotlib is not installed; the message says what needs it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{owner} needs matplotlib: pip install 'fnloop[plot]'") from error
    return Figure


def check_file(owner: str, file: Path) -> None:
    """Raise ValueError if matplotlib cannot save a figure under this name."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise ValueError(
            f"{owner} expects a file whose suffix is one of {', '.join(known)}, such as 'run.png'; "
            f"got {str(file)!r}"
        )


def grid(owner: str, n: int) -> tuple[Figure, list[Axes]]:
    """Return a figure and its n axes, in rows of up to three."""
    columns = 1 if n == 1 else 2 if n in (2, 4) else 3
    rows = -(-n // columns)
    size = (5.2 if n == 1 else 4.2 * columns, 3.0 * rows)
    figure = require_matplotlib(owner)(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, hspace=0.04)  # type: ignore[union-attr]
    # Without pyplot, a notebook would show only its name.
    figure._repr_png_ = functools.partial(_render_png, figure)  # type: ignore[attr-defined]
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[n:]:
        axis.set_visible(False)
    return figure, axes[:n]


def _render_png(figure: Figure) -> tuple[bytes, dict[str, int]]:
    """Draw a figure at twice its resolution, and return it with its size on the page."""
    width, height = figure.get_size_inches() * figure.dpi
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * figure.dpi)
    return file.getvalue(), {"width": round(width), "height": round(height)}


def draw(
    axis: Axes,
    title: str,
    x: str,
    curves: Mapping[str, Points],
    marked: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    labels: Sequence[str] = (),
) -> None:
    """Draw curves into an axis.

    Args:
        axis: an axis of matplotlib.
        title: the title of the axis.
        x: the label of its x axis.
        curves: label to points.
        marked: label of a curve to the point that is marked on it.
        labels: the labels of all curves in the figure, so that a label has the same colour in all
            axes.
    """
    labels = list(labels or curves)
    for label, points in curves.items():
        color = f"C{labels.index(label)}"
        marker = "." if len(points) <= 40 else ""
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker=marker, markersize=5, linewidth=1.5, label=label, color=color)
        if label in marked:
            at, value = marked[label]
            best = f"best {value:.4g}"
            axis.plot([at], [value], "o", markersize=9, fillstyle="none", color=color, label=best)
    places = {x for points in curves.values() for x, _ in points}
    if len(places) == 1:  # otherwise the ticks would be hundredths of a step
        axis.set_xlim(min(places) - 1, min(places) + 1)
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
