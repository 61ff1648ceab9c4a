"""Loaders made of loaders, and advice on what would make a run faster.

    >>> import torch
    >>> batches = [torch.full((2,), float(i)) for i in range(5)]
    >>> [batch[0].item() for batch in take(batches, 3)]
    [0.0, 1.0, 2.0]

Each of these loaders takes any loader of ``fit``, those of this page too, and is one itself, for
``evaluate`` and ``predict`` too. Its order is a function of (seed, epoch). Its batches are
distributed to the processes once, so that numbers of batches are those of all processes together.
Nothing is loaded for the samples of a map-style ``DataLoader`` that are left out, that were
consumed before a resume, or that are another process's.

It has a length where that can be known, so that schedules and bars know it. Its position is counted
in batches: keep the batch size when you resume in the middle of an epoch. By itself it is an
iterable, whose order torch's generator decides.
"""

import typing as _typing

from fnloop._data.loaders import even
from fnloop._extensions.loaders.bucketed import bucketed
from fnloop._extensions.loaders.collate import pack_collate, pad_collate
from fnloop._extensions.loaders.combine import (
    fixed,
    fraction,
    interleave,
    leave_out,
    take,
    zip_cycle,
    zip_longest,
    zip_shortest,
)

if _typing.TYPE_CHECKING:
    from fnloop._extensions.tools.tune import tune

__docformat__ = "google"

__all__ = [
    "bucketed",
    "even",
    "fixed",
    "fraction",
    "interleave",
    "leave_out",
    "pack_collate",
    "pad_collate",
    "take",
    "tune",
    "zip_cycle",
    "zip_longest",
    "zip_shortest",
]


if not _typing.TYPE_CHECKING:  # for type checkers, any name would be right

    def __getattr__(name: str) -> object:
        if name != "tune":  # which nothing below it needs
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fnloop._extensions.tools.tune import tune

        globals()[name] = tune
        return tune


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
