"""Tables whose columns stand in groups: as lines of text and as HTML.

A table is made of columns and of rows of cells. Its head has two lines: the groups, and the titles
of the columns.
"""

from __future__ import annotations

import html
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence

import attrs
from tqdm.utils import disp_len

from fnloop._display.encoding import printable

__all__ = [
    "HTML_WIDTH",
    "UNLIMITED",
    "Cell",
    "Column",
    "head_lines",
    "row_line",
    "shorten",
    "table_html",
    "table_lines",
    "terminal_width",
    "width_of",
]

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
