"""The losses, weights and metrics of the batches of an update, as rows of numbers.

A row has the numbers of one batch, in float64, so that all processes can exchange them with one
collective on the device, without a host read. They are summed in the tree of
:mod:`fnloop._step.tree`. Metrics that are not of fnloop's own kinds are exchanged on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fnloop._core.metrics import FIELDS, Last, Max, Min, combine
from fnloop._core.types import Metric, Output
from fnloop._step.weighted_sum import valid_weight

__all__ = ["Layout", "combine_others", "layout_of", "others_of", "rows_of", "sum_rows"]

_OWN_COLUMNS = 4  # whether there is a batch; loss × weight; the weight; the weight to report


@attrs.frozen
class Layout:
    """What the metrics of a batch are.

    Args:
        columns: the name, the kind and the first column of each metric of fnloop's own kinds.
        others: the names of those of other kinds.
        width: how many columns a row has.
    """

    columns: tuple[tuple[str, type[Metric], int], ...] = ()
    others: tuple[str, ...] = ()
    width: int = _OWN_COLUMNS

    def __str__(self) -> str:
        kinds = [f"{name} ({kind.__name__})" for name, kind, _ in self.columns]
        return ", ".join((*kinds, *self.others)) or "none"


def layout_of(metrics: Mapping[str, Metric]) -> Layout:
    """Return what the metrics of a batch are."""
    columns, width = [], _OWN_COLUMNS
    for name, metric in metrics.items():
        kind: type[Metric] = type(metric)
        if kind in FIELDS:
            columns.append((name, kind, width))
            width += len(FIELDS[kind])
    others = tuple(name for name, metric in metrics.items() if type(metric) not in FIELDS)
    return Layout(tuple(columns), others, width)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _cell(value: object, device: torch.device) -> Tensor:
    """Return a number as a scalar tensor on a device, without a host read."""
    if isinstance(value, Tensor):
        return value.detach().to(device, _dtype(device))
    return torch.full((), float(value), dtype=_dtype(device), device=device)  # type: ignore[arg-type]


def _row(out: Output, layout: Layout) -> Tensor:
    device = out.loss.device
    weight, loss = _cell(out.weight, device), _cell(out.loss, device)
    valid = valid_weight(weight)
    reported = torch.where(weight == valid, valid, math.nan)
    cells = [_cell(1, device), loss * valid, valid, reported]
    for name, kind, _ in layout.columns:
        metric = out.metrics[name]
        cells += [_cell(getattr(metric, field), device) for field in FIELDS[kind]]
    return torch.stack(cells)


def rows_of(own: Sequence[Output | None], layout: Layout, device: torch.device) -> Tensor:
    """Return the rows of this process, shape (positions, columns).

    Args:
        own: its outputs by position, None where it has no batch.
        layout: what their metrics are.
        device: where they are.
    """
    absent = torch.zeros(layout.width, dtype=_dtype(device), device=device)
    return torch.stack([absent if out is None else _row(out, layout) for out in own])


def sum_rows(rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, dict[str, Metric]]:
    """Return the loss × weight, the weight, the weight to report and the metrics of all rows."""
    present = rows[:, :1] != 0
    summed = torch.where(present, rows, -0.0)  # x + -0.0 is x, for every x
    missing = (1 << (len(rows) - 1).bit_length()) - len(rows)
    summed = torch.cat([summed, summed.new_full((missing, layout.width), -0.0)])
    while len(summed) > 1:
        half = len(summed) // 2
        summed = summed[:half] + summed[half:]
    total = summed[0]
    metrics: dict[str, Metric] = {}
    for name, kind, first in layout.columns:
        column = rows[:, first]
        if kind is Min or kind is Max:
            least = torch.where(present[:, 0], column if kind is Min else -column, math.inf).amin()
            metrics[name] = Min(least) if kind is Min else Max(-least)
        elif kind is Last:
            order = torch.arange(1, len(rows) + 1, device=rows.device)
            newest = (order * present[:, 0]).argmax(0, keepdim=True)
            metrics[name] = Last(column.index_select(0, newest)[0])
        else:
            values = total[first : first + len(FIELDS[kind])].unbind()
            metrics[name] = kind(*values)
    return total[1], total[2], total[3], metrics


def others_of(own: Sequence[Output | None], layout: Layout) -> list[dict[str, Metric] | None]:
    """Return the metrics of other kinds by position, None where there is no batch."""
    return [out and {name: out.metrics[name] for name in layout.others} for out in own]


def combine_others(parts: Sequence[Mapping[str, Metric] | None]) -> dict[str, Metric]:
    """Combine metrics in the order of the positions."""
    found: dict[str, Metric] = {}
    for part in parts:
        if part is not None:
            found = combine(found, part)
    return found
