"""Figures of matplotlib, which is imported when the first one is drawn.

They are made without pyplot. So no figure stays open without the caller's knowledge, and a notebook
shows each one once. Their background is transparent, and text and axes have a grey that can be read
on white and on black, so they suit light and dark pages.
"""

from __future__ import annotations

import functools
import io
import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from fnloop.extend import reprs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

GREY = "#7a7a7a"  # has the same contrast to white and to #111
HIDDEN = "_"  # the label of a line that is not in the legend
LARGE, MEDIUM, SMALL = "large", "medium", "small"  # sizes of axes
LONGEST_TITLE = 28  # characters that fit above a small axis
SHORT = 9  # characters of a label
STYLES = ("-", "--", ":", "-.")  # of curves of one colour in one axis
MOST_POINTS = 2000  # of a curve as it is drawn
HANDLE, LETTER = 0.6, 0.075  # inches that an entry of a small legend takes: its line, and a letter
LONG_STEPS = 10_000  # from here on, ticks are written as 20k
LARGEST = 1e300  # on an axis with a value of 1e308, matplotlib fails: such a value is a gap


@attrs.frozen
class Curve:
    """A curve, and how it is drawn.

    Args:
        points: where it goes.
        label: its name in the legend; "" for none.
        color: its colour, such as "C0".
        thin: whether it is a faint line below the others.
        best: a point of it to be marked, and the label of the mark.
    """

    points: Points
    label: str
    color: str = "C0"
    thin: bool = False
    best: tuple[float, float, str] | None = None


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


def panels(owner: str, sizes: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, one for each size: "large", "medium" or "small".

    The first one takes most of the figure. Others stand to its right and below.
    """
    beside, below = _split(sizes)
    # To the right of the first one. Together they are at least as high as it should be.
    heights = [1.4 if size == SMALL else 1.9 for size in beside]
    heights = [height * max(3.4 / sum(heights), 1) for height in heights] or [3.4]
    rows = [1.6 if all(size == SMALL for size in row) else 2.0 for row in below]
    width, parts = (10.0, [sum(heights), *rows]) if beside else (6.0, heights)
    figure = require_matplotlib(owner)(
        figsize=(width, sum(parts)), layout="constrained", facecolor="none"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, hspace=0.04)  # type: ignore[union-attr]
    # Without pyplot, a notebook would show only its name.
    figure._repr_png_ = functools.partial(_render_png, figure)  # type: ignore[attr-defined]
    # Each row has a grid of its own. In a common one of narrow columns, tick labels might take all
    # of a column.
    top, *lower = figure.add_gridspec(len(parts), 1, height_ratios=parts)
    grid = top.subgridspec(len(heights), 3 if beside else 1, height_ratios=heights)
    axes = [figure.add_subplot(grid[:, :2])]
    axes += [figure.add_subplot(grid[row, 2]) for row in range(len(beside))]
    for part, row in zip(lower, below, strict=True):
        axes += [figure.add_subplot(place) for place in part.subgridspec(1, len(row))]
    return figure, axes


def _split(sizes: Sequence[str]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the sizes of the axes to the right of the first one, and of those in rows below."""
    end = len(sizes) if len(sizes) <= 4 else 3
    below = sizes[end:]
    across = math.ceil(len(below) / math.ceil(len(below) / 3)) if below else 1
    return sizes[1:end], [below[i : i + across] for i in range(0, len(below), across)]


def _render_png(figure: Figure) -> tuple[bytes, dict[str, int]]:
    """Draw a figure at twice its resolution, and return it with its size on the page."""
    width, height = figure.get_size_inches() * figure.dpi
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * figure.dpi)
    return file.getvalue(), {"width": round(width), "height": round(height)}


def palette(owner: str, n: int) -> list[str]:
    """Return n different colours; the first ten are the same for any n up to ten."""
    require_matplotlib(owner)
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if n <= 10:
        return [f"C{i}" for i in range(n)]
    if n <= 20:
        return [to_hex(colormaps["tab20"](i)) for i in range(n)]
    return [to_hex(colormaps["turbo"](0.05 + 0.9 * i / (n - 1))) for i in range(n)]


def add_legend_below(figure: Figure, axis: Axes) -> None:
    """Put the legend of an axis below the whole figure."""
    handles, labels = axis.get_legend_handles_labels()
    width, height = figure.get_size_inches()
    across = max(1, min(3, int(width / (HANDLE + LETTER * max(map(len, labels))))))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=across,
        frameon=False,
        fontsize="small",
        labelcolor=GREY,
    )
    figure.set_size_inches(width, height + 0.2 * math.ceil(len(labels) / across))


def draw(
    axis: Axes, title: str, x: str, curves: Sequence[Curve], known: Collection[str] | None = ()
) -> None:
    """Draw curves into an axis.

    Args:
        axis: an axis of matplotlib.
        title: the title of the axis.
        x: the label of its x axis.
        curves: the curves; thin ones are drawn below the others.
        known: the labels that the legend of another axis explains. If there are any, this axis has
            a short legend, next to its title. None is for no legend.
    """
    alike: Counter[tuple[str, bool]] = Counter()  # curves by what they look like
    for order, curve in enumerate(curves):
        look = curve.color, curve.thin
        style = STYLES[alike[look] % len(STYLES)]
        alike[look] += 1
        # Above the lines of the grid; the thin curves below all others.
        _draw_curve(axis, curve, style, 2.5 + order / 1000 + (0 if curve.thin else 1))
    if any(curve.best for curve in curves):
        axis.margins(y=0.1)  # otherwise a low axis would cut off the ring
    places = {x for curve in curves for x, _ in curve.points}
    if len(places) == 1:  # otherwise the ticks would be hundredths of a step
        axis.set_xlim(min(places) - 1, min(places) + 1)
    axis.set_title(reprs.shorten(title, LONGEST_TITLE), loc="left")
    axis.set_xlabel(x)
    axis.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    if places and max(places) >= LONG_STEPS:
        axis.xaxis.set_major_formatter(lambda value, _: format_short(value))
    if not any(abs(y) < LARGEST for curve in curves for _, y in curve.points):
        axis.text(0.5, 0.5, "no finite value", transform=axis.transAxes, ha="center", color=GREY)
        axis.set(xticks=[], yticks=[])
    if known is not None:
        _add_legend(axis, known)
    _suit_any_page(axis)


def _draw_curve(axis: Axes, curve: Curve, style: str, order: float) -> None:
    points, color = thin_out(curve.points), curve.color
    xs, ys = zip(*points, strict=True)
    ys = [y if abs(y) < LARGEST else math.nan for y in ys]
    (line,) = axis.plot(
        *(xs, ys, style), label=curve.label or HIDDEN, color=color, linewidth=1.5, zorder=order
    )
    if curve.thin:
        line.set(linewidth=0.9, alpha=0.65)
    elif len(points) <= 40:
        line.set(marker=".", markersize=5)
    if curve.best is not None and abs(curve.best[1]) < LARGEST:
        x, y, label = curve.best
        (ring,) = axis.plot([x], [y], label=label or HIDDEN, color=color, zorder=order)
        ring.set(marker="o", markersize=9, fillstyle="none", linestyle="none")


def _add_legend(axis: Axes, known: Collection[str]) -> None:
    handles, labels = axis.get_legend_handles_labels()
    entries = [(line, label) for line, label in zip(handles, labels, strict=True)]
    entries = [(line, label) for line, label in entries if label not in known]
    if not entries:
        return
    lengths = [len(label) for _, label in entries]
    short = max(lengths) <= SHORT  # then they stand in one line
    room = len(axis.get_title(loc="left")) + (
        sum(lengths) + 4 * len(lengths) if short else max(lengths)
    )
    above = 0.96 if room <= 38 else 1.12  # beside or above the title
    looks: dict[str, Any] = {"frameon": False, "labelcolor": GREY, "fontsize": "small"}
    if known:
        looks |= {"loc": "lower right", "bbox_to_anchor": (1.02, above), "fontsize": "x-small"}
    if short:
        dashed = any(line.get_linestyle() in STYLES[1:] for line in axis.get_lines())
        looks |= {"ncols": len(entries), "handlelength": 2 if dashed else 1, "columnspacing": 1}
    axis.legend(*zip(*entries, strict=True), **looks)


def _suit_any_page(axis: Axes) -> None:
    """Make an axis transparent, and its text and lines grey."""
    axis.set_facecolor("none")
    axis.grid(color=GREY, alpha=0.25, linewidth=0.8)
    axis.tick_params(colors=GREY, labelsize="small")
    title = axis.set_title(axis.get_title(loc="left"), loc="left")
    for text in (title, axis.xaxis.label, axis.xaxis.offsetText, axis.yaxis.offsetText):
        text.set_color(GREY)
    for name, spine in axis.spines.items():
        spine.set_color(GREY)
        spine.set_alpha(0.6)
        spine.set_visible(name in ("left", "bottom"))


def thin_out(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most that many points of a curve, which look the same when they are drawn.

    Of each part of the curve, its lowest and its highest point are kept.

    Example:
        >>> thin_out([(0, 1.0), (1, 5.0), (2, 0.0), (3, 2.0), (4, 2.0), (5, 2.0)], most=4)
        [(1, 5.0), (2, 0.0), (3, 2.0)]
    """
    if len(points) <= most:
        return points
    import numpy

    length = -(-len(points) // (most // 2))  # of a stretch
    stretches = -(-len(points) // length)
    values = numpy.full(stretches * length, numpy.nan)
    values[: len(points)] = [y for _, y in points]
    values = values.reshape(stretches, length)
    finite = numpy.isfinite(values)  # a stretch without a finite value stays a gap
    starts = numpy.arange(stretches) * length
    low = starts + numpy.where(finite, values, numpy.inf).argmin(axis=1)
    high = starts + numpy.where(finite, values, -numpy.inf).argmax(axis=1)
    return [points[i] for i in numpy.union1d(low, high)]


def format_short(value: float) -> str:
    """Write a number of steps in few characters.

    Example:
        >>> format_short(20_000), format_short(1_250_000), format_short(0)
        ('20k', '1.25M', '0')
    """
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.10g}{letter}"
    return f"{value:.10g}"
