"""What reprs are made of: numbers, text, diagrams, and HTML; and the signs that a console has."""

from __future__ import annotations

import functools
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

import torch
from tqdm.utils import disp_len

# What extensions use, as `extend.reprs`; the rest is for the reprs of the library.
__all__ = [
    "HTML_WIDTH",
    "LINE",
    "SOFT",
    "WIDEST",
    "count_parameters",
    "escape",
    "facts",
    "format_count",
    "format_metric",
    "format_number",
    "in_notebook",
    "is_learning_rate",
    "mode_by_name",
    "printable",
    "record_text",
    "shorten",
    "summarize",
    "terminal_width",
    "wrap",
]

# --------------------------------------------------------------------------------------------------
# Numbers.


def format_number(value: float) -> str:
    """Format a number: five significant digits, or an int with thousands separators."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def format_count(n: int, noun: str) -> str:
    """Format a count: ``1 record``, ``2 records``."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def count_parameters(model: torch.nn.Module) -> str:
    """Return how many parameters a model has, and how many are trained unless all are."""
    params = list(model.parameters())
    if any(map(torch.nn.parameter.is_lazy, params)):
        return "parameters of sizes that its first batch decides"
    size, trained = (
        sum(p.numel() for p in params),
        sum(p.numel() for p in params if p.requires_grad),
    )
    return format_count(size, "parameter") + (f", {trained:,} trained" if trained < size else "")


def is_learning_rate(name: str) -> bool:
    """Return whether a metric is a learning rate, which is written like ``3.0e-04``."""
    return "lr" in name.split("/")


FALLING, RISING = ("loss", "error"), ("acc", "f1", "auc", "auroc", "precision", "recall")


@functools.cache
def mode_by_name(key: str) -> str | None:
    """Return the mode that the name of a metric suggests, "min" or "max"; None if neither or both.

    Example:
        >>> mode_by_name("valid/loss"), mode_by_name("loss/Accuracy"), mode_by_name("valid/bleu")
        ('min', 'max', None)
    """
    name = key.split("/", 1)[-1].lower()
    falls, rises = (any(word in name for word in words) for words in (FALLING, RISING))
    return None if falls == rises else "min" if falls else "max"


def format_metric(name: str, value: float) -> str:
    """Format a metric. A number looks the same in a bar, a table, a log and a message.

    It has at least three significant digits, and four decimals where that is not much. A count has
    no decimals.

    Example:
        >>> [format_metric("loss", value) for value in (0.5, 0.00125, 1234.5, 2e-5)]
        ['0.5000', '0.00125', '1,234.50', '2.00e-05']
        >>> format_metric("train/lr", 3e-4), format_metric("train/tokens", 4096.0)
        ('3.0e-04', '4,096')
    """
    value += 0.0  # -0.0 is 0.0
    size = abs(value)
    if is_learning_rate(name):
        return f"{value:.1e}"
    if size and math.isfinite(size) and not 1e-3 <= size < 1e9:
        return f"{value:.2e}"
    if mode_by_name(name) is None and value.is_integer():
        return f"{value:,.0f}"
    decimals = 5 if 0 < size < 1e-2 else 4 if size < 100 else 2 if size < 10_000 else 0
    return f"{value:,.{decimals}f}"


# --------------------------------------------------------------------------------------------------
# Text: its width, and the lines that it is broken into.

WIDEST = 120  # columns of a line in a log
HTML_WIDTH = 100  # characters of a row that fits a cell of a notebook
LONGEST_TITLE = 32
WIDTH = 100  # characters per line of text


def shorten(title: str, most: int = LONGEST_TITLE) -> str:
    """Leave out the middle of a title, or of the name of a group, that is too long."""
    if disp_len(title) <= most:
        return title
    half = (most - 1) // 2
    while disp_len(short := f"{title[:half]}…{title[-half:]}") > most:
        half -= 1
    return short


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text between words into lines of a width; all but the first one may be indented."""
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def terminal_width(unknown: int = 80) -> int:
    """Return how many characters a line of the terminal has now, or a width if that is unknown."""
    return shutil.get_terminal_size((unknown, 24)).columns


def summarize(value: object) -> str:
    """Describe a value in a few words: a tensor by its dtype and shape."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
    return textwrap.shorten(repr(value), 60, placeholder="…")


def record_text(name: str, values: Mapping[str, object]) -> str:
    """Show a record as a call, broken into lines if it is too long for one, or for the terminal.

    Example:
        >>> record_text("Point", {"x": 1, "y": 2})
        'Point(x=1, y=2)'
    """
    lines, indent, width = [f"{name}("], " " * (len(name) + 1), min(WIDTH, terminal_width(WIDTH))
    for i, (key, value) in enumerate(values.items()):
        part = f"{key}={value}" + (", " if i + 1 < len(values) else ")")
        if len(lines[-1]) + len(part.rstrip()) > width and i:
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


# --------------------------------------------------------------------------------------------------
# Text as HTML for notebooks.
#
# All values from outside are escaped. There are no scripts, no assets and no colours of its own:
# lines are a lighter shade of the text's colour, which suits dark themes too.

LINE = "1px solid color-mix(in srgb, currentColor 30%, transparent)"
SOFT = "opacity:.6"


def escape(value: object) -> str:
    """Return a value as text of HTML."""
    import html  # it has a table of all entities

    return html.escape(str(value))


def facts(title: str, values: Mapping[str, object]) -> str:
    """Return a table of names and values below a title."""
    name, cell = f"text-align:left;{SOFT}", "text-align:left"
    rows = (
        f'<tr><td style="{name}">{escape(k)}</td><td style="{cell}">{escape(v)}</td></tr>'
        for k, v in values.items()
    )  # fmt: skip
    return f"<div><b>{escape(title)}</b><table>{''.join(rows)}</table></div>"


def diagram(core: str, rings: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Draw rings as nested boxes, with the arguments of :func:`diagram_text`."""
    inside = f'<div style="padding-top:.3em"><code>{escape(core)}</code></div>'
    for name, members in rings:
        listed = " → ".join(f"<code>{escape(member)}</code>" for member in members)
        label = f'<span style="{SOFT};display:inline-block;min-width:5em">{escape(name)}</span>'
        style = f"border:{LINE};border-radius:4px;padding:.3em .6em;margin-top:.3em"
        inside = f'<div style="{style}"><div>{label}{listed}</div>{inside}</div>'
    return f'<div style="display:inline-block;max-width:100%">{inside}</div>'


# --------------------------------------------------------------------------------------------------
# Where text is shown. A console of Windows does not have every sign.


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return hasattr(_shell(), "kernel")


def is_interactive() -> bool:
    """Return whether a user types what comes next: in a notebook, in IPython or in Python."""
    return _shell() is not None or hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _shell() -> object:
    """Return the shell of IPython; None outside of one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


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
