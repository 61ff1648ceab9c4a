"""Tables, bars and curves, as text and as HTML, and outputs of a cell that are redrawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import attrs
from tqdm.utils import disp_len

from fnloop._display import checks, reprs

# What other extensions use, as `extend.tables`.
__all__ = [
    "Column",
    "Display",
    "Rendered",
    "Shown",
    "Table",
    "bar",
    "curve",
    "faint",
    "format_bytes",
    "format_clock",
    "format_duration",
    "format_milliseconds",
    "line",
    "stack",
]

# --------------------------------------------------------------------------------------------------
# Sizes and times.


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


def format_milliseconds(seconds: float) -> str:
    """Format a short time, such as ``3.05 ms``."""
    return f"{1000 * seconds:.3g} ms"


def format_clock(seconds: float, tenths: bool) -> str:
    """Format a time of a column: with tenths ``12.5s``, or else ``1:02`` and ``1:02:03``.

    A time of 1000 seconds never has tenths: it may be in a column that has no room for them.
    """
    if tenths and seconds < 1000:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --------------------------------------------------------------------------------------------------
# Tables: columns, which stand in groups, and rows, which are any values. A column says what its
# cell of a row is. A table writes itself as text or as HTML; a terminal, where rows are added one
# at a time, asks for its head and for a line for each row.

UNLIMITED = 10_000  # the width of what is not a terminal, for a table that may be long
NAMED = 8  # columns that are left out, in the note below a table; of more, their number is given
_RULE = " │ "  # between two groups

R = TypeVar("R")


@attrs.frozen(eq=False)
class Column(Generic[R]):
    """A column.

    Args:
        title: its name within its group.
        text: the text of its cell of a row.
        group: the name of its group; "" for none. Columns of one group stand side by side.
        left: whether its cells are words, which begin at its left edge and may be indented.
        best: whether its cell of a row is marked: it is better than all above it, so that the last
            mark is at the best one. None if none ever is. A mark needs another character.
        width: how many characters its cells have at least, without a mark.
        rank: where there is no room for all columns, the one with the greatest rank is left out
            first, and never one whose rank begins with 0. Notes are in the order of the second
            numbers, and begin with columns without a name.
        name: what notes call it; by default its title, and its group if it has one.
    """

    title: str = attrs.field(converter=reprs.shorten)
    text: Callable[[R], str]
    group: str = attrs.field(default="", converter=reprs.shorten)
    left: bool = False
    best: Callable[[R], bool] | None = None
    width: int = 1
    rank: tuple[int, int] = (0, 0)
    name: str = ""

    def cell(self, row: R | None) -> str:
        """Return the text of its cell of a row, which is a sign where rows are cut."""
        return "…" if row is None else self.text(row)

    def is_best(self, row: R | None) -> bool:
        """Return whether its cell of a row is marked."""
        return row is not None and self.best is not None and self.best(row)

    @property
    def room(self) -> int:
        """How many characters it has in a line, with a mark."""
        return self.width + (self.best is not None)

    def pad(self, text: str, mark: str = " ") -> str:
        """Return a text as wide as the column, with a mark if cells can have one."""
        return _pad(text if self.best is None else f"{text}{mark}", self.room, self.left)


@attrs.frozen
class Table(Generic[R]):
    """Columns and rows.

    Args:
        columns: the columns.
        rows: any values, of which the columns make texts; None where rows are cut.
        remark: a note below the table.
        left_out: the names of columns for which there was no room.

    Example:
        >>> columns = [Column("x", str), Column("square", lambda x: str(x * x), "of x")]
        >>> print(Table(columns, [1, 20], "two rows").text(80))
            │ of x
         x  │ square
         1  │      1
        20  │    400
        two rows
    """

    columns: Sequence[Column[R]]
    rows: Sequence[R | None] = ()
    remark: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """What is left out, and the remark."""
        left_out = f"left out: {checks.join_names(self.left_out, NAMED)}" if self.left_out else ""
        return "; ".join(filter(None, (left_out, self.remark)))

    def fit(self, width: float = math.inf) -> Table[R]:
        """Return the table without the columns for which a line of some width has no room.

        The others are as wide as their rows and groups need. ``head`` and ``line`` are those of a
        table that was fitted; later rows may be shown in the same columns.
        """
        columns, gone, fitted = [], [], []
        for column in self.columns:
            texts = (column.title, *map(column.cell, self.rows))
            columns.append(attrs.evolve(column, width=max(column.width, *map(_length, texts))))
        while len(columns) > 2 and attrs.evolve(self, columns=columns).width > width:
            worst = max(columns, key=lambda column: column.rank)
            if worst.rank[0] == 0:
                break
            columns.remove(worst)
            gone.append(worst)
        for *others, last in _groups(columns):
            name, room = disp_len(last.group), _room([*others, last])
            fitted += [*others, attrs.evolve(last, width=last.width + max(name - room, 0))]
        gone.sort(key=lambda column: (bool(column.name), column.rank[1]))
        names = (c.name or (f"{c.title} ({c.group})" if c.group else c.title) for c in gone)
        return attrs.evolve(self, columns=fitted, left_out=(*self.left_out, *names))

    @property
    def width(self) -> int:
        """How many characters a line has."""
        groups = _groups(self.columns)
        rooms = (max(_room(group), disp_len(group[0].group)) for group in groups)
        return sum(rooms) + len(_RULE) * (len(groups) - 1)

    def head(self) -> list[str]:
        """Return the lines above the rows: the groups, if there are any, and the titles."""
        groups = [_pad(group[0].group, _room(group), left=True) for group in _groups(self.columns)]
        lines = [_RULE.join(groups).rstrip(_RULE), self._line(lambda c: c.pad(c.title))]
        return lines if any(column.group for column in self.columns) else lines[1:]

    def line(self, row: R | None) -> str:
        """Return a row as a line of text. A cell that is better than all above it has a star."""
        return self._line(lambda c: c.pad(c.cell(row), "*" if c.is_best(row) else " "))

    def _line(self, show: Callable[[Column[R]], str]) -> str:
        return _RULE.join("  ".join(map(show, group)) for group in _groups(self.columns)).rstrip()

    def text(self, width: int | None = None) -> str:
        """Return the table for sys.stdout. The note is wrapped, and words of the last column.

        By default it fits the terminal; where there is none, it may be wide.
        """
        width = reprs.terminal_width(UNLIMITED) if width is None else width
        table = self.fit(width)
        lines = [line for row in table.rows for line in table._wrapped_line(row, width)]
        return reprs.printable("\n".join([*table.head(), *lines, *reprs.wrap(table.note, width)]))

    def html(self) -> str:
        """Return the table for a notebook, with all columns. What has a star in text is bold."""
        groups = _groups(self.columns)
        begins = {group[0] for group in groups[1:]}  # the columns with a rule to their left

        def style(column: Column[R], left: bool = False) -> str:
            align = "left" if column.left or left else "right"
            space = "pre" if column.left else "nowrap"
            rule = f";border-left:{reprs.LINE}" if column in begins else ""
            return f'style="text-align:{align};white-space:{space}{rule}"'

        def cell(column: Column[R], row: R | None) -> str:
            text = reprs.escape(column.cell(row))
            return f"<b>{text}</b>" if column.is_best(row) else text

        names = [
            f'<th colspan="{len(group)}" {style(first, True)}>{reprs.escape(first.group)}</th>'
            for group in groups
            for first in group[:1]
        ]
        lines = [names] if any(column.group for column in self.columns) else []
        lines.append([f"<th {style(c)}>{reprs.escape(c.title)}</th>" for c in self.columns])
        for row in self.rows:
            lines.append([f"<td {style(c)}>{cell(c, row)}</td>" for c in self.columns])
        body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in lines)
        shown = f'<table style="font-variant-numeric:tabular-nums">{body}</table>'
        below = faint(self.note) if self.note else ""
        return f'<div style="overflow-x:auto">{shown}</div>{below}'

    def _wrapped_line(self, row: R | None, width: int) -> list[str]:
        """Return a row as one line, or as several if its last column has words that do not fit."""
        line, last = self.line(row), self.columns[-1]
        indent = self.width - last.room
        if disp_len(line) <= width or not last.left or indent > width // 2:
            return [line]
        return reprs.wrap(line, width, " " * indent)


def _length(text: str) -> int:
    """Return how many characters wide a text is. Most need no table of Unicode for that."""
    return len(text) if text.isascii() and text.isprintable() else disp_len(text)


def _groups(columns: Sequence[Column[R]]) -> list[list[Column[R]]]:
    return [[*group] for _, group in itertools.groupby(columns, lambda column: column.group)]


def _room(group: Sequence[Column[R]]) -> int:
    """Return how many characters columns of a group have, with two spaces between them."""
    return sum(column.room for column in group) + 2 * (len(group) - 1)


def _pad(text: str, room: int, left: bool) -> str:
    """Return a text with spaces beside it. Some signs take two columns of a terminal."""
    spaces = " " * max(room - disp_len(text), 0)
    return f"{text}{spaces}" if left else f"{spaces}{text}"


# --------------------------------------------------------------------------------------------------
# Pieces of HTML, and outputs of a cell.


def curve(title: str, values: Sequence[float], note: str) -> str:
    """Draw a small curve of values, with 0 on its scale; without finite values, the title alone."""
    name = f"<code>{reprs.escape(title)}</code>"
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
    return f'<div>{name}{svg}<small style="{reprs.SOFT}">{reprs.escape(note)}</small></div>'


def bar(done: int, total: int | None, text: str) -> str:
    """Return a bar and a text to its right; without a total, the text alone."""
    drawn = ""
    if total:
        frame = "display:inline-block;width:16em;height:.7em;overflow:hidden;border-radius:.35em"
        frame += f";border:{reprs.LINE}"
        percent = f"{100 * min(done / total, 1):.0f}%"
        filled = f"display:block;height:100%;width:{percent};background:currentColor;opacity:.6"
        drawn = f'<span style="{frame}"><span style="{filled}"></span></span> '
    return f'<div style="font-variant-numeric:tabular-nums">{drawn}{reprs.escape(text)}</div>'


def line(text: str) -> str:
    """Return a line of text."""
    return f"<div>{reprs.escape(text)}</div>"


def faint(text: str) -> str:
    """Return a line of text that is less important."""
    return f'<div style="{reprs.SOFT}"><small>{reprs.escape(text)}</small></div>'


def stack(*parts: str) -> str:
    """Put pieces of HTML below each other."""
    return f"<div>{''.join(parts)}</div>"


class Shown:
    """A value whose repr is lines of text and tables, which ``_parts`` returns."""

    __slots__ = ()

    def _parts(self) -> Sequence[str | Table]:
        raise NotImplementedError

    def __repr__(self) -> str:
        parts = (each if isinstance(each, str) else each.text() for each in self._parts())
        return reprs.printable("\n".join(parts))

    def _repr_html_(self) -> str:
        return stack(*(line(e) if isinstance(e, str) else e.html() for e in self._parts()))


@attrs.frozen
class Rendered:
    """The output of a cell: HTML, and a text for front ends that show no HTML."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


class Display:
    """One output of a cell, redrawn in place."""

    _update: Callable[[object], object] | None = None

    def show(self, value: object) -> None:
        """Show a value: at first below the other outputs of the cell, then in the same place."""
        from IPython.display import display

        if self._update is None:
            handle = display(value, display_id=True)
            self._update = handle and handle.update
        else:
            self._update(value)
