"""Numbers in a table of records: one format for a column, and another for what does not suit it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fnloop._core.monitor import mode_by_name

__all__ = ["fit_number", "format_time", "number_form"]

DIGITS = 3  # significant ones that every value has, if there is room
MOST_DECIMALS, LONGEST = 6, 10  # of a value that is not written as 2.00e-05; its characters


def number_form(name: str, values: Sequence[float]) -> str:
    """Return the format of a column: the same number of decimals for all its values."""
    title = name.split("/", 1)[-1]
    if title == "lr" or title.startswith("lr/"):
        return ".1e"
    sizes = [abs(value) for value in values if math.isfinite(value)]
    largest, smallest = max(sizes, default=0.0), min((s for s in sizes if s), default=1.0)
    mode = mode_by_name(name)
    if largest >= 1e9 or (largest and largest < 1e-3):
        return ".2e"
    if mode is None and sizes and all(size.is_integer() for size in sizes) and largest >= 1:
        return ",.0f"
    decimals = 4 if largest < 100 else 2 if largest < 10_000 else 0
    if mode == "max":
        return f",.{decimals}f"
    wanted = max(decimals, DIGITS - 1 - math.floor(math.log10(smallest)))
    if wanted <= MOST_DECIMALS and len(f"{largest:,.{wanted}f}") <= LONGEST:
        return f",.{wanted}f"
    return ".2e" if mode == "min" else f",.{decimals}f"  # others may come near to 0 by chance


def fit_number(value: float, form: str, width: int) -> str:
    """Format a value; if the format does not suit it, in another one that fits the width."""
    value += 0.0  # -0.0 is 0.0
    decimals = (4, *range(5, MOST_DECIMALS + 1), *range(3, -1, -1)) if form.endswith("f") else ()
    forms = [form, *(f",.{n}f" for n in decimals), ".2e", ".1e", ".0e"]
    fitting = [text for text in (format(value, each) for each in forms) if len(text) <= width]
    exact = (text for text in fitting if _error(value, text) <= 0.501 * 10 ** (1 - DIGITS))
    nearest = min(fitting, key=lambda text: _error(value, text), default=format(value, form))
    return next(exact, nearest)


def _error(value: float, text: str) -> float:
    """Return how far a text is from a value, in units of the value's first digit."""
    if abs(value) < 1e-300 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return abs(float(text.replace(",", "")) - value) / unit


def format_time(seconds: float | None, form: str) -> str:
    """Format a duration: ``12.5s``, or ``1:02`` and ``1:02:03``, by the longest of its column."""
    if seconds is None:
        return ""
    if form == "time" and seconds < 1000:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
