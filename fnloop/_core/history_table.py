"""Records as the cells of a table, for a terminal and a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fnloop._core.record import Record
from fnloop._display import html

__all__ = ["table"]


class _Records(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, key: int, /) -> Record: ...


def table(
    records: _Records, names: Sequence[str], first: int = 0, most: int = 40
) -> list[Sequence[str]]:
    """Return the cells of a table, row by row, the head first.

    Args:
        records: a history, or a sequence of records.
        names: the metrics to show.
        first: the index of the first record to show.
        most: how many records to show; if there are more, the middle is cut.

    Example:
        >>> table([Record(1, 10, {"loss": 0.5})], ["loss", "acc"])
        [['epoch', 'step', 'loss', 'acc', 'seconds'], ['1', '10', '0.5', '', '0.0']]
    """
    shown: Iterable[int | None] = range(first, len(records))
    if len(records) - first > most:
        half = most // 2
        shown = [
            *range(first, first + half),
            None,
            *range(len(records) - most + half, len(records)),
        ]
    head = ["epoch", "step", *names, "seconds"]
    gap = ["…"] * len(head)
    return [head, *(gap if i is None else _row(records[i], names) for i in shown)]


def _row(record: Record, names: Sequence[str]) -> list[str]:
    metrics = record.metrics
    values = (html.format_number(metrics[name]) if name in metrics else "" for name in names)
    return [str(record.epoch), str(record.step), *values, f"{record.seconds:.1f}"]
