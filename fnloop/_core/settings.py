"""Settings of parameter groups: those that schedules set in each update, such as learning rates.

A schedule multiplies the initial value of a setting, so a group remembers that, and what was set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._core.metrics import Last
from fnloop._core.types import Metric

Group = dict[str, Any]  # a parameter group of an optimizer
Rate = float | Tensor

_SCHEDULED = "set_by_schedule_"  # group["set_by_schedule_lr"]: what a schedule set group["lr"] to
_BEFORE, _SET = "_before_scheduler", "_set_by_scheduler"  # group["lr_before_scheduler"], of torch's
_RATIO = f"{_SCHEDULED}ratio"  # what plateau multiplies a learning rate by, and its lowest rate
_NOTE = rf"^({_SCHEDULED})?(initial_)?|({_BEFORE}|{_SET})$"  # what is around the key of a setting
_TUPLES = ("betas",)  # settings whose parts are numbers


# --------------------------------------------------------------------------------------------------
# One setting, and what schedules remember of it.


@attrs.frozen
class Setting:
    """A setting of a parameter group, such as its learning rate, and what schedules note of it.

    A schedule keeps the initial value in the group, as ``group["initial_lr"]``, and what it has set
    last. By these notes a change by someone else is told from its own.

    Args:
        group: the group, one of ``optimizer.param_groups``. What is set is set there.
        key: the key of the setting; "betas.0" is the first of the tuple ``group["betas"]``.

    Example:
        >>> group = {"params": [], "lr": 0.5}
        >>> lr = Setting(group, "lr")
        >>> set_number(group, "lr", 0.1, "a schedule")
        >>> lr.value, lr.initial, lr.is_scheduled
        (0.05, 0.5, True)
        >>> lr.begin_at(2.0)  # what the schedule multiplies from now on
        >>> lr.initial, Setting.names(group)
        (2.0, ['lr'])
    """

    UNFROZEN: ClassVar[str] = "unfrozen"  # a key: True in the groups that unfreeze has made

    group: Group
    key: str

    @property
    def value(self) -> Any:
        """The setting, or None if the group has no such."""
        return number_in(self.group, self.key)

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule, ours or torch's, has set it."""
        return _SCHEDULED + self.key in self.group or self.key + _SET in self.group

    @property
    def is_set_by_torch(self) -> bool:
        """Whether it is as a scheduler of torch has left it."""
        value, last = self.value, self.group.get(self.key + _SET)
        if last is None or isinstance(value, Tensor):
            return last is not None and last is value
        return bool(last == value)

    @property
    def initial(self) -> Any:
        """What it was before its first schedule, or was set to since."""
        group, key, value = self.group, self.key, self.value
        as_set = {key + _BEFORE: group.get(key + _SET), _initial(key): group.get(_SCHEDULED + key)}
        for initial, last in as_set.items():
            # No tensor is read: one that is there is as its schedule has left it.
            if last is not None and (last is value or isinstance(value, Tensor) or last == value):
                return group[initial]
        return value

    def put(self, value: Rate) -> None:
        """Set a number, and nothing else; a tensor stays the same tensor."""
        current = number_in(self.group, self.key)
        key, _, part = self.key.partition(".")
        if isinstance(current, Tensor):
            # That of a capturable optimizer. Unlike copy_, fill_ does not wait for the device.
            current.fill_(value)
        elif part:
            kept = self.group[key]
            self.group[key] = type(kept)(value if i == int(part) else v for i, v in enumerate(kept))
        else:
            self.group[key] = value

    def begin_at(self, value: object) -> None:
        """Set it, and the initial value that a schedule multiplies."""
        group, initial = self.group, (_initial(self.key), self.key + _BEFORE)
        noted = (*initial, _SCHEDULED + _initial(self.key))
        for name in (self.key, *(note for note in noted if note in group)):
            held = group.get(name)
            if isinstance(held, Tensor) and isinstance(value, int | float | Tensor):
                held.fill_(value)
            else:
                group[name] = value.clone() if isinstance(value, Tensor) else value
        self._note(self.key + _SET, _SCHEDULED + self.key)

    def exchange(self, value: object) -> None:
        """Set it to an equal value of another type, which a schedule recognizes as its own."""
        before, mark = self.group[self.key], self.group.get(_SCHEDULED + self.key)
        self.group[self.key] = value
        if mark is before or mark == before:  # else it was changed, as the schedule will say
            self._note(_SCHEDULED + self.key)

    def _note(self, *marks: str) -> None:
        """Let marks that are there be the value itself."""
        for mark in marks:
            if mark in self.group:
                self.group[mark] = self.group[self.key]

    def keep_initial(self) -> None:
        """Note the value from before an earlier schedule, for one that begins now."""
        if self.is_scheduled:
            self.group[_initial(self.key)] = self.initial
            self.group[_SCHEDULED + self.key] = self.value

    def begin_again(self) -> None:
        """Set it to its initial value, and note that, before a scheduler of torch is made."""
        self.group[self.key + _BEFORE] = self._reset()

    def note_set(self) -> None:
        """Note what a scheduler of torch has set, so that another change is noticed."""
        self.group[self.key + _SET] = self.group[self.key]

    def lower(self, by: tuple[float, float | None] | None) -> None:
        """Let :func:`set_number` multiply a rate by a ratio too, down to a lowest; None ends it."""
        self.group[_RATIO] = by
        if by is None:
            del self.group[_RATIO]

    def end_schedules(self) -> None:
        """Set it to its initial value, and remove what schedules note besides that."""
        self._reset()
        marks = _SCHEDULED + self.key, _SCHEDULED + _initial(self.key)
        for note in (*marks, self.key + _BEFORE, self.key + _SET):
            self.group.pop(note, None)

    def _reset(self) -> object:
        """Set it to its initial value, and return that."""
        group, initial = self.group, self.initial
        if isinstance(initial, Tensor):
            initial = initial.clone()
            self.value.copy_(initial)  # it may have a dimension, which fill_ refuses
        else:
            self.put(initial)
        if _initial(self.key) in group:  # torch's schedulers take it for the rate to begin with
            group[_initial(self.key)] = initial
        return initial

    # --- those of whole groups

    @staticmethod
    def used(groups: Mapping[str, Group], key: str) -> dict[str, Metric]:
        """Return a setting of groups as metrics: "lr", "lr/head", ... One without it is left out.

        Args:
            groups: the groups, as :func:`fnloop.extend.groups` returns them.
            key: the key of the setting.
        """
        return {
            f"{key}{label}": Last(_copy(number_in(group, key)))
            for label, group in groups.items()
            if _is_number(number_in(group, key))
        }

    @staticmethod
    def names(group: Mapping[str, object]) -> list[str]:
        """Return the keys of the settings of a group, without parameters and notes."""
        others = ("params", "param_names", Setting.UNFROZEN)
        return [key for key in group if key not in others and not Setting._is_note(group, key)]

    @staticmethod
    def marks(group: Mapping[str, object]) -> dict[str, str]:
        """Return the keys under which schedules note what they have set, with the keys of that."""
        return {k: k.removeprefix(_SCHEDULED) for k in group if k.startswith(_SCHEDULED)}

    @staticmethod
    def of_note(key: str) -> str:
        """Return the key of the setting that a note is of; a key of a setting stays."""
        return re.sub(_NOTE, "", key)

    @staticmethod
    def forget(group: Group, key: str) -> None:
        """Remove what schedules note of a setting of a group, and of its parts."""
        for note in [name for name in group if Setting._is_note(group, name)]:
            if Setting.of_note(note).partition(".")[0] == key:
                del group[note]

    @staticmethod
    def lasting(group: Mapping[str, object]) -> dict[str, object]:
        """Return settings and notes of a group, without what is there during an update only."""
        return {name: value for name, value in group.items() if name not in ("params", _RATIO)}

    @staticmethod
    def hold(optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that gives an optimizer back the groups that it has now, as they are.

        Args:
            optimizer: the optimizer. What is in tensors and lists is put back there.
        """
        held = [
            (group, {key: (value, _content(value)) for key, value in group.items()})
            for group in optimizer.param_groups
        ]

        def put_back() -> None:
            for group, settings in held:
                group.clear()
                for key, (value, content) in settings.items():
                    if isinstance(value, Tensor) and isinstance(content, Tensor):
                        value.copy_(content)
                    elif isinstance(value, list) and isinstance(content, list):
                        value[:] = content
                    group[key] = value
            optimizer.param_groups[:] = [group for group, _ in held]

        return put_back

    @staticmethod
    def _is_note(group: Mapping[str, object], key: str) -> bool:
        of = Setting.of_note(key)
        is_mark = key.startswith(_SCHEDULED) or key.endswith((_BEFORE, _SET))
        return of != key and (is_mark or number_in(group, of) is not None)

    @staticmethod
    def as_number(value: object) -> object:
        """Return a floating scalar tensor as a number, and any other value as it is.

        Optimizers keep such numbers in tensors, to change them on the device. A float32 becomes the
        shortest number that converts back to it.

        Example:
            >>> torch.tensor(0.1).item(), Setting.as_number(torch.tensor(0.1))
            (0.10000000149011612, 0.1)
        """
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
            return value
        if value.dtype is not torch.float32:
            return value.item()
        return float(str(value.detach().cpu().numpy()))


def forget_schedules(groups: Iterable[Group]) -> None:
    """Set what schedules have set to its initial values, as if there had been no schedule."""
    for group in groups:
        for setting in [Setting(group, key) for key in {*map(Setting.of_note, group)}]:
            if setting.is_scheduled and setting.value is not None:
                setting.end_schedules()


# --------------------------------------------------------------------------------------------------
# Read a number of a group, and set it before an update.


def number_in(group: Mapping[str, object], field: str) -> Any:
    """Return a number of a parameter group, or None if it has none.

    Args:
        group: the group.
        field: the key of the number; "betas.0" is the first of the tuple ``group["betas"]``.

    Returns:
        The number: a float, or a tensor where the optimizer is capturable.

    Example:
        >>> number_in({"betas": (0.9, 0.99)}, "betas.1")
        0.99
    """
    key, _, part = field.partition(".")
    value = group.get(key)
    if not part:
        return value
    if not isinstance(value, tuple | list) or not part.isdecimal() or int(part) >= len(value):
        return None
    return value[int(part)]


def set_number(group: Group, field: str, factor: Rate, owner: str, absolute: bool = False) -> None:
    """Set a number of a group to its initial value times a factor, or to a value.

    Args:
        group: the group. It keeps the initial value, as ``initial_lr``, and what was set.
        field: the key of the number, or of a part of a tuple.
        factor: the factor, or the value.
        owner: the middleware, for messages.
        absolute: whether it is the value.

    Raises:
        ValueError: there is no such number, or it was changed although its initial value was not.

    Example:
        >>> group = {"lr": 0.5}
        >>> for factor in (0.1, 2.0):
        ...     set_number(group, "lr", factor, "halved")
        ...     print(group["lr"], group["initial_lr"])
        0.05 0.5
        1.0 0.5
    """
    __tracebackhide__ = True
    initial, last = f"initial_{field}", _SCHEDULED + field
    found = number_in(group, field)
    if initial not in group:
        group[initial] = _read_number(group, field)
    elif found is not group.get(last) and not _is_same(found, group.get(last)):
        setting = Setting(group, field)
        if setting.is_set_by_torch:  # in an earlier phase
            group[initial] = _copy(setting.initial)
        else:
            _check_unchanged(group, field, owner)
    number = factor if absolute else group[initial] * factor
    if field == "lr" and _RATIO in group:
        ratio, lowest = group[_RATIO]
        lowered = factor * ratio if absolute else group[initial] * (factor * ratio)
        number = lowered if lowest is None else _at_least(lowered, number, lowest)
    Setting(group, field).put(number)
    group[last], group[_SCHEDULED + initial] = number_in(group, field), group[initial]


def _at_least(lowered: Rate, rate: Rate, lowest: float) -> Rate:
    """Return a lowered rate that is at least ``lowest``, unless the rate was lower already."""
    if isinstance(lowered, Tensor):  # which no comparison may read
        return lowered.maximum(torch.as_tensor(rate).clamp(max=lowest))
    return max(lowered, min(rate, lowest))


def _check_unchanged(group: Group, field: str, name: str) -> None:
    """Raise if a group has a new value since the last update, but not a new initial value."""
    __tracebackhide__ = True
    found, last = number_in(group, field), group.get(_SCHEDULED + field)
    initial = f"initial_{field}"
    if last is None or not _is_same(group[initial], group.get(_SCHEDULED + initial)):
        return
    raise ValueError(
        f'{name}: group["{field}"] is {_format(found)}, but the schedule had set it to '
        f"{_format(last)}, and would overwrite it now. The schedule multiplies the initial value: "
        f'write group["{initial}"] = ..., and leave group["{field}"] as it was '
        f'(group["{field}"] = group["{_SCHEDULED}{field}"]); or leave {name} out of the pipeline'
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
    value = number_in(group, field)
    if not _is_number(value):
        keys = [k for k, v in group.items() if _is_number(v)]
        keys += [f"{k}.{i}" for k, v in group.items() if k in _TUPLES for i in range(len(v))]
        known = [k for k in keys if not k.startswith(("initial_", _SCHEDULED))]
        raise ValueError(
            f"schedule(..., field={field!r}): the optimizer's groups have no such number; they "
            f"have {', '.join(known)}"
        )
    return _copy(value)


def _is_number(value: object) -> bool:
    if value.__class__ is float:  # nearly always; the check of an abstract class takes longer
        return True
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def _initial(key: str) -> str:
    return f"initial_{key}"


def _copy(value: Rate) -> Rate:
    return value.clone() if isinstance(value, Tensor) else value


def _content(value: object) -> object:
    """Return a copy of what is changed in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return [*value] if isinstance(value, list) else None
