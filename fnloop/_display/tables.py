"""Tables and reprs: as lines of text, as HTML, and in the signs that a console has."""

from __future__ import annotations

import html
import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TextIO

import attrs
from tqdm.utils import disp_len

# --------------------------------------------------------------------------------------------------
# Tables whose columns stand in groups: as lines of text and as HTML.
#
# A table is made of columns and of rows of cells. Its head has two lines: the groups, and the
# titles of the columns.

UNLIMITED = 10_000  # the width of what is not a terminal, for a table that may be long
HTML_WIDTH = 100  # characters of a row that fits a cell of a notebook
LONGEST_TITLE = 32
_RULE = "border-left:1px solid color-mix(in srgb, currentColor 30%, transparent)"
_FAINT = "opacity:.6"


@attrs.frozen
class Cell:
    """The text of a cell, and whether it is marked as the best of its column."""

    text: str
    best: bool = False


@attrs.frozen
class Column:
    """A column of numbers.

    Args:
        title: its name within its group.
        group: the name of its group; "" for none. Columns of one group stand side by side.
        width: how many characters its widest cell has, without a mark.
        marks: whether a cell may be marked, which needs another character.
        left: whether its cells are words, which begin at its left edge and may be indented.
    """

    title: str
    group: str = ""
    width: int = 1
    marks: bool = False
    left: bool = False


def terminal_width(unknown: int = 80) -> int:
    """Return how many characters a line of the terminal has now, or a width if that is unknown."""
    return shutil.get_terminal_size((unknown, 24)).columns


def shorten(title: str, most: int = LONGEST_TITLE) -> str:
    """Leave out the middle of a title, or of the name of a group, that is too long."""
    if disp_len(title) <= most:
        return title
    half = (most - 1) // 2
    while disp_len(short := f"{title[:half]}…{title[-half:]}") > most:
        half -= 1
    return short


def width_of(columns: Sequence[Column]) -> int:
    """Return how many characters a line of a table has."""
    return disp_len(_join(columns, [" " * width for width in _widths(columns)]))


def head_lines(columns: Sequence[Column]) -> list[str]:
    """Return the lines above the rows: the groups, if there are any, and the titles.

    Example:
        >>> columns = [Column("epoch", "", 5), Column("loss", "valid", 6), Column("f1", "valid", 6)]
        >>> print(*head_lines(columns), sep="\\n")
              │ valid
        epoch │   loss      f1
    """
    widths = _widths(columns)
    titles = [
        _aligned(column, shorten(column.title), width) + " " * column.marks
        for column, width in zip(columns, widths, strict=True)
    ]
    lines = [_join(columns, titles).rstrip()]
    if any(column.group for column in columns):
        groups = []
        for group, indices in _groups(columns):
            room = sum(widths[i] for i in indices) + 2 * (len(indices) - 1)
            groups.append(_padded(shorten(group), room, left=True))
        lines.insert(0, " │ ".join(groups).rstrip(" │") if groups else "")
    return lines


def row_line(columns: Sequence[Column], cells: Sequence[Cell]) -> str:
    """Return a row as a line of text. The best cell of a column has a star.

    Example:
        >>> columns = [Column("epoch", "", 5), Column("loss", "valid", 6, marks=True)]
        >>> row_line(columns, [Cell("1"), Cell("0.5000", best=True)])
        '    1 │ 0.5000*'
    """
    texts = [
        _aligned(column, cell.text, width) + ("*" if cell.best else " " * column.marks)
        for column, cell, width in zip(columns, cells, _widths(columns), strict=True)
    ]
    return _join(columns, texts).rstrip()


def table_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], note: str = "", width: int = 80
) -> list[str]:
    """Return a table as lines of text for sys.stdout, with a note below it.

    The note is wrapped to a width, and so are the words of the last column.
    """
    rows_text = [line for cells in rows for line in _row_lines(columns, cells, width)]
    notes = textwrap.wrap(note, width, break_on_hyphens=False, break_long_words=False)
    return [*map(printable, [*head_lines(columns), *rows_text, *notes])]


def _row_lines(columns: Sequence[Column], cells: Sequence[Cell], width: int) -> list[str]:
    """Return a row as one line, or as several if its last column has words that do not fit."""
    line = row_line(columns, cells)
    indent = disp_len(row_line(columns, [*cells[:-1], Cell("x")])) - 1
    if disp_len(line) <= width or not columns[-1].left or indent > width // 2:
        return [line]
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def table_html(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], note: str = "") -> str:
    """Return a table as HTML. The best cells are bold."""
    groups = _groups(columns)
    begins = {indices[0] for _, indices in groups[1:]}  # the columns with a rule to their left

    def style(i: int, align: str = "") -> str:
        words = columns[i].left
        align, space = align or ("left" if words else "right"), "pre" if words else "nowrap"
        return f"text-align:{align};white-space:{space}" + (f";{_RULE}" if i in begins else "")

    head = ""
    if any(column.group for column in columns):
        head = "".join(
            f'<th colspan="{len(indices)}" style="{style(indices[0], "left")}">'
            f"{html.escape(shorten(group))}</th>"
            for group, indices in groups
        )
        head = f"<tr>{head}</tr>"
    head += _html_row(
        f'<th style="{style(i)}">{html.escape(shorten(column.title))}</th>'
        for i, column in enumerate(columns)
    )
    body = "".join(
        _html_row(f'<td style="{style(i)}">{_html_cell(cell)}</td>' for i, cell in enumerate(cells))
        for cells in rows
    )
    below = f'<div style="{_FAINT}"><small>{html.escape(note)}</small></div>' if note else ""
    numbers = "font-variant-numeric:tabular-nums"
    return (
        f'<div style="overflow-x:auto"><table style="{numbers}">{head}{body}</table></div>{below}'
    )


def _aligned(column: Column, text: str, width: int) -> str:
    room = width - column.marks
    return _padded(text, room, column.left)


def _padded(text: str, room: int, left: bool) -> str:
    """Return a text with spaces beside it. Some signs take two columns of a terminal."""
    spaces = " " * max(room - disp_len(text), 0)
    return f"{text}{spaces}" if left else f"{spaces}{text}"


def _html_row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _html_cell(cell: Cell) -> str:
    text = html.escape(cell.text)
    return f"<b>{text}</b>" if cell.best else text


def _groups(columns: Sequence[Column]) -> list[tuple[str, list[int]]]:
    """Return the name of each group, and the indices of its columns."""
    found = itertools.groupby(range(len(columns)), lambda i: columns[i].group)
    return [(group, [*indices]) for group, indices in found]


def _widths(columns: Sequence[Column]) -> list[int]:
    """Return how many characters each column has; the last of a group has room for its name."""
    widths = [
        max(column.width, disp_len(shorten(column.title))) + column.marks for column in columns
    ]
    for group, indices in _groups(columns):
        room = sum(widths[i] for i in indices) + 2 * (len(indices) - 1)
        widths[indices[-1]] += max(disp_len(shorten(group)) - room, 0)
    return widths


def _join(columns: Sequence[Column], texts: Sequence[str]) -> str:
    return " │ ".join("  ".join(texts[i] for i in indices) for _, indices in _groups(columns))


# --------------------------------------------------------------------------------------------------
# Text for terminals and HTML for notebooks.
#
# All HTML is built here, and all values from outside are escaped here. It has no scripts, no assets
# and no colours of its own: lines are a lighter shade of the text's colour, which suits dark themes
# too.

WIDTH = 100  # characters per line of text
_LINE = "1px solid color-mix(in srgb, currentColor 30%, transparent)"
_SOFT = "opacity:.6"


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
    name, cell = f"text-align:left;{_SOFT}", "text-align:left"
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
        label = f'<span style="{_SOFT};display:inline-block;min-width:5em">{_escape(name)}</span>'
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
    return f'<div>{name}{svg}<small style="{_SOFT}">{_escape(note)}</small></div>'


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
    return f'<div style="{_SOFT}"><small>{_escape(text)}</small></div>'


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


# --------------------------------------------------------------------------------------------------
# Text for a file that may not have every sign, such as a console of Windows.

_PLAIN = str.maketrans("━─│┌…→×", "#-||.>x")


def printable(text: str, file: TextIO | None = None) -> str:
    """Return a text that a file can encode: if need be with lines of ASCII, and with "?".

    Args:
        text: the text.
        file: where it will be written; by default sys.stdout.

    Example:
        >>> import io
        >>> printable("a │ b…", io.TextIOWrapper(io.BytesIO(), "ascii"))
        'a | b.'
    """
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:  # there is no such encoding
        return text.translate(_PLAIN)
    return text
