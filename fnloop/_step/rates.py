"""Numbers of parameter groups that middleware set before each update, such as learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from fnloop._core.metrics import Last
from fnloop._core.optimizers import SCHEDULED, Group, initial_value, set_by_torch
from fnloop._core.types import Metric

__all__ = [
    "RATIO",
    "Rate",
    "copy_number",
    "keep_settings",
    "numbers_used",
    "put_number",
    "put_settings_back",
    "set_number",
]

Rate = float | Tensor
RATIO = f"{SCHEDULED}ratio"  # what plateau multiplies the learning rate of a group by


def set_number(group: Group, field: str, factor: float, owner: str) -> None:
    """Set a number of a group to its initial value times a factor.

    Args:
        group: the group. It keeps the initial value, as ``initial_lr``, and what was set.
        field: the key of the number.
        factor: the factor.
        owner: the middleware, for messages.

    Raises:
        ValueError: there is no such number, or it was changed although its initial value was not.
    """
    __tracebackhide__ = True
    initial, last = f"initial_{field}", SCHEDULED + field
    if initial not in group:
        group[initial] = _read_number(group, field)
    elif group[field] is not group.get(last) and not _is_same(group[field], group.get(last)):
        if set_by_torch(group, field):  # in an earlier phase
            group[initial] = copy_number(initial_value(group, field))
        else:
            _check_unchanged(group, field, owner)
    put_number(group, field, group[initial] * factor)
    group[last], group[SCHEDULED + initial] = group[field], group[initial]


Kept = tuple[Group, Group]


def keep_settings(groups: Iterable[Group]) -> list[Kept]:
    """Return groups with their settings as they are now, for :func:`put_settings_back`."""
    return [(group, dict(group)) for group in groups]


def put_settings_back(kept: Iterable[Kept], field: str, used: Iterable[Rate]) -> None:
    """Give groups the settings from before an update that was left out.

    A group that has gone back to other settings meanwhile has those. A tensor stays as it was set:
    it is filled in place, and a copy of it would cost every update.

    Args:
        kept: what :func:`keep_settings` returned.
        field: the key of the number that was set.
        used: the number of each group in the update.
    """
    for (group, before), number in zip(kept, used, strict=True):
        if group[field] is number and not isinstance(number, Tensor):
            for name in group.keys() - before.keys():
                del group[name]
            group.update(before)


def numbers_used(groups: Mapping[str, Group], field: str) -> dict[str, Metric]:
    """Return a number of parameter groups as metrics: "lr", "lr/head", "lr/rest/1", ...

    Args:
        groups: the groups, as ``labelled_groups`` returns them.
        field: the key of the number. A group without one is left out.
    """
    return {
        f"{field}{label}": Last(copy_number(group[field]))
        for label, group in groups.items()
        if _is_number(group.get(field))
    }


def _check_unchanged(group: Group, field: str, name: str) -> None:
    """Raise if a group has a new value since the last update, but not a new initial value."""
    __tracebackhide__ = True
    found, last, initial = group[field], group.get(SCHEDULED + field), f"initial_{field}"
    if last is None or not _is_same(group[initial], group.get(SCHEDULED + initial)):
        return
    raise ValueError(
        f'{name}: group["{field}"] is {_format(found)}, but the schedule had set it to '
        f"{_format(last)}, and would overwrite it now. The schedule multiplies the initial value: "
        f'write group["{initial}"] = ..., and leave group["{field}"] as it was '
        f'(group["{field}"] = group["{SCHEDULED}{field}"]); or leave {name} out of the pipeline'
    )


def _is_same(value: Rate | None, other: Rate | None) -> bool:
    """Return whether two numbers are equal, or two tensors identical; no tensor is read."""
    tensors = isinstance(value, Tensor) or isinstance(other, Tensor)
    return value is other or (not tensors and bool(value == other))


def _format(value: Rate) -> str:
    if isinstance(value, Tensor):  # a host read, for the error that ends the run
        return f"the tensor {value.item():g}" if value.numel() == 1 else "a tensor"
    return f"{value:g}"


def _read_number(group: Group, field: str) -> Rate:
    """Return a copy of a number of a group, or raise if the group has no such number."""
    value = group.get(field)
    if not _is_number(value):
        keys = [k for k, v in group.items() if _is_number(v)]
        known = [k for k in keys if not k.startswith(("initial_", SCHEDULED))]
        raise ValueError(
            f"schedule(..., field={field!r}): the optimizer's groups have no such number; they "
            f"have {', '.join(known)}"
        )
    return copy_number(value)


def _is_number(value: object) -> bool:
    if value.__class__ is float:  # nearly always; the check of an abstract class takes longer
        return True
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def copy_number(value: Any) -> Rate:
    return value.clone() if isinstance(value, Tensor) else value


def put_number(group: Group, field: str, value: Rate) -> None:
    """Set a number of a group to a value; a tensor stays the same tensor."""
    current = group[field]
    if isinstance(current, Tensor):
        # The tensor of a capturable optimizer. Unlike copy_, fill_ does not wait for the device.
        current.fill_(value)
    else:
        group[field] = value
