"""Text for terminals and HTML for notebooks.

All HTML is built here, and all values from outside are escaped here. It has no scripts, no assets
and no colours of its own: lines are a lighter shade of the text's colour, which suits dark themes
too.
"""

from __future__ import annotations

import html
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import attrs

from fnloop._display.encoding import printable

__all__ = [
    "Display",
    "Rendered",
    "bar",
    "curve",
    "diagram",
    "diagram_text",
    "facts",
    "faint",
    "format_bytes",
    "format_count",
    "format_number",
    "in_notebook",
    "line",
    "record_text",
    "stack",
    "summarize",
]

WIDTH = 100  # characters per line of text
_LINE = "1px solid color-mix(in srgb, currentColor 30%, transparent)"
_FAINT = "opacity:.6"


# --- text


def format_number(value: float) -> str:
    """Format a number: five significant digits, or an int with thousands separators."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def format_count(n: int, noun: str) -> str:
    """Format a count: ``1 record``, ``2 records``."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def format_bytes(n: int) -> str:
    """Format a size in memory.

    Example:
        >>> format_bytes(100), format_bytes(3 << 20)
        ('100 B', '3 MiB')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n >= 1024**power:
            return f"{n / 1024**power:.4g} {unit}"
    return f"{n} B"


def summarize(value: object) -> str:
    """Describe a value in a few words: a tensor by its dtype and shape."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return textwrap.shorten(repr(value), 60, placeholder="…")


def record_text(name: str, values: Mapping[str, object]) -> str:
    """Show a record as a call, broken into lines if it is too long for one.

    Example:
        >>> record_text("Point", {"x": 1, "y": 2})
        'Point(x=1, y=2)'
    """
    lines, indent = [f"{name}("], " " * (len(name) + 1)
    for i, (key, value) in enumerate(values.items()):
        part = f"{key}={value}" + (", " if i + 1 < len(values) else ")")
        if len(lines[-1]) + len(part.rstrip()) > WIDTH and i:
            lines.append(indent)
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def diagram_text(core: str, rings: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Draw rings as text, the outermost first.

    Args:
        core: the text in the middle.
        rings: name and members, the innermost ring first.

    Example:
        >>> rings = [("gradient", ["backward", "clip(1.0)"]), ("step", ["schedule(f)"])]
        >>> print(diagram_text("loss_fn(model, batch)", rings))
        ┌ step      schedule(f)
        │ ┌ gradient  backward → clip(1.0)
        │ │ loss_fn(model, batch)
    """
    lines, rails = [], ""
    for name, members in [*rings][::-1]:
        first, *more = textwrap.wrap(
            " → ".join(members), WIDTH - len(rails) - 12, break_on_hyphens=False
        )
        lines.append(f"{rails}┌ {name:8}  {first}")
        rails += "│ "
        lines += [f"{rails}{'':10}{line}" for line in more]
    return printable("\n".join([*lines, f"{rails}{core}"]))


# --- HTML


def _escape(value: object) -> str:
    return html.escape(str(value))


def facts(title: str, values: Mapping[str, object]) -> str:
    """Return a table of names and values below a title."""
    name, cell = f"text-align:left;{_FAINT}", "text-align:left"
    rows = (
        f'<tr><td style="{name}">{_escape(k)}</td><td style="{cell}">{_escape(v)}</td></tr>'
        for k, v in values.items()
    )  # fmt: skip
    return f"<div><b>{_escape(title)}</b><table>{''.join(rows)}</table></div>"


def diagram(core: str, rings: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Draw rings as nested boxes, with the arguments of :func:`diagram_text`."""
    inside = f'<div style="padding-top:.3em"><code>{_escape(core)}</code></div>'
    for name, members in rings:
        listed = " → ".join(f"<code>{_escape(member)}</code>" for member in members)
        label = f'<span style="{_FAINT};display:inline-block;min-width:5em">{_escape(name)}</span>'
        style = f"border:{_LINE};border-radius:4px;padding:.3em .6em;margin-top:.3em"
        inside = f'<div style="{style}"><div>{label}{listed}</div>{inside}</div>'
    return f'<div style="display:inline-block;max-width:100%">{inside}</div>'


def curve(title: str, values: Sequence[float], note: str) -> str:
    """Draw a small curve of values, with 0 on its scale; without finite values, the title alone."""
    name = f"<code>{_escape(title)}</code>"
    if not values or not all(map(math.isfinite, values)):
        return f"<div>{name}</div>"
    width, height, low, high = 220, 60, min(0.0, *values), max(1e-12, *values)
    x, y = width / max(len(values) - 1, 1), height / (high - low)
    points = " ".join(f"{i * x:.1f},{(high - value) * y:.1f}" for i, value in enumerate(values))
    line = f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    path = f"M0 0V{height}M0 {high * y:.1f}H{width}"
    axes = f'<path d="{path}" fill="none" stroke="currentColor" opacity=".3"/>'
    view = f'width="{width + 8}" height="{height + 8}" viewBox="-4 -4 {width + 8} {height + 8}"'
    frame = f'xmlns="http://www.w3.org/2000/svg" {view} role="img" style="display:block"'
    svg = f"<svg {frame}>{axes}{line}</svg>"
    return f'<div>{name}{svg}<small style="{_FAINT}">{_escape(note)}</small></div>'


def bar(done: int, total: int | None, text: str) -> str:
    """Return a bar and a text to its right; without a total, the text alone."""
    drawn = ""
    if total:
        frame = f"display:inline-block;width:16em;height:.7em;border:{_LINE};border-radius:.35em"
        frame += ";overflow:hidden"
        percent = f"{100 * min(done / total, 1):.0f}%"
        filled = f"display:block;height:100%;width:{percent};background:currentColor;opacity:.6"
        drawn = f'<span style="{frame}"><span style="{filled}"></span></span> '
    return f'<div style="font-variant-numeric:tabular-nums">{drawn}{_escape(text)}</div>'


def line(text: str) -> str:
    """Return a line of text."""
    return f"<div>{_escape(text)}</div>"


def faint(text: str) -> str:
    """Return a line of text that is less important."""
    return f'<div style="{_FAINT}"><small>{_escape(text)}</small></div>'


def stack(*parts: str) -> str:
    """Put pieces of HTML below each other."""
    return f"<div>{''.join(parts)}</div>"


# --- cells


@attrs.frozen
class Rendered:
    """The output of a cell: HTML, and a text for front ends that show no HTML."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


class _Handle(Protocol):
    def update(self, value: object, /) -> None: ...


class Display:
    """One output of a cell, redrawn in place."""

    def __init__(self) -> None:
        self._handle: _Handle | None = None

    def show(self, value: object) -> None:
        """Show a value: at first below the other outputs of the cell, then in the same place."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(value, display_id=True)
        else:
            self._handle.update(value)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
