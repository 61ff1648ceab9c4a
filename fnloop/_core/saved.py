"""What was saved of an object, until an instance of its class is available.

A checkpoint names classes, and looks none up, so reading it cannot run code. What it has of an
object is a `Pending`, which becomes an object once the program has made one of its class: the slot
that a middleware's `init` creates, or the metric that the next batch brings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
from torch import Tensor

from fnloop._backend.containers import pairs_of, parts_of, with_parts
from fnloop._core.parts import Part, State
from fnloop._display.checks import describe


@runtime_checkable
class HasParts(Protocol):
    """An object of fnloop that says what a checkpoint holds of it."""

    def to_parts(self) -> Mapping[str, object]: ...

    def from_parts(self, parts: object, /) -> object: ...


@runtime_checkable
class HasStateDict(Protocol):
    """An object that says what a checkpoint holds of it, as torch's do."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: object, /) -> object: ...


@attrs.frozen(eq=False)
class Pending:
    """What was read from a checkpoint, until an instance of its class is available.

    Args:
        kind: the name of the class that was saved.
        parts: its fields, or its ``state_dict``.

    Example:
        >>> import fnloop as fl
        >>> saved = Pending.of(fl.Mean(6.0, 2))
        >>> saved.kind, Pending.is_in([saved])
        ('fnloop.Mean', True)
        >>> Pending.fill([fl.Mean(0.0, 0)], [saved])[0].compute()
        3.0
    """

    kind: str
    parts: Mapping[str, object]

    @staticmethod
    def of(value: Any) -> Pending | None:
        """Return the parts of an object, if it says what they are."""
        kind = kind_name(type(value))
        if isinstance(value, HasParts):
            return Pending(kind, value.to_parts())
        if isinstance(value, HasStateDict):
            return Pending(kind, value.state_dict())
        if attrs.has(type(value)):
            return Pending(kind, attrs.asdict(value, recurse=False))
        return None

    @staticmethod
    def is_in(value: object) -> bool:
        """Return whether a value is one, or contains one."""
        inside = parts_of(value) or ()
        return isinstance(value, Pending) or any(Pending.is_in(part) for _, part in inside)

    @staticmethod
    def fill(template: Any, value: Any) -> Any:
        """Return what was saved as an object like the template. Plain data is returned as it is.

        Args:
            template: a new object of the kind that was saved. One with ``load_state_dict`` is
                loaded in place.
            value: what was saved: plain data, tensors, and instances of this class.

        Raises:
            ValueError: another kind of object was saved.
        """
        if isinstance(value, Tensor) and isinstance(template, Tensor):
            if value.dtype != template.dtype or value.ndim != template.ndim:
                both = [f"{t.dtype} with {t.ndim} dimensions" for t in (value, template)]
                raise ValueError(
                    f"the checkpoint has a tensor of {both[0]} where there is one of {both[1]} now"
                )
            return value.to(template.device)
        if (pairs := pairs_of(value, template)) is not None:
            alike = type(value) is type(template) and len(value) == len(template)
            if alike or isinstance(value, dict):
                filled = {key: Pending.fill(there, part) for key, part, there in pairs}
                inside = parts_of(value) or ()
                return with_parts(value, [filled.get(key, part) for key, part in inside])
        return _materialize_object(template, value) if isinstance(value, Pending) else value

    def brought_by(self, part: Part, state: State) -> State:
        """Return the state with this loaded by a part that was brought; as it is otherwise."""
        return state


def kind_name(cls: type) -> str:
    """Return the name of a class in checkpoints, with the package only if it is fnloop's own."""
    return f"fnloop.{cls.__name__}" if cls.__module__.split(".")[0] == "fnloop" else cls.__name__


def _materialize_object(template: Any, value: Pending) -> object:
    if value.kind != kind_name(type(template)):
        saved, now = value.kind.removeprefix("fnloop."), type(template).__name__
        raise ValueError(
            f"the checkpoint has a {saved} where there is a {now} now: it was saved with other "
            "settings. Use those, or restore without it: "
            "restore(path, state, only=('model', 'optimizer', 'counters'))"
        )
    if isinstance(template, HasParts):
        return template.from_parts(value.parts)
    if isinstance(template, HasStateDict):
        template.load_state_dict(dict(value.parts))
        return template
    fields = {f.name: f.alias for f in attrs.fields(type(template)) if f.init}
    mine, parts = attrs.asdict(template, recurse=False), {}
    for name, part in value.parts.items():
        if name in fields:
            new = mine[name]
            parts[fields[name]] = Pending.fill(new, part)
            if not _may_stand_for(part, new):
                raise ValueError(
                    f"the checkpoint has {describe(part)} as {name} of a "
                    f"{type(template).__name__}, and a new one has {describe(new)}"
                )
    return attrs.evolve(template, **parts)


def _may_stand_for(saved: object, new: object) -> bool:
    """Return whether what was saved can be of the same field as a new value."""
    kinds = ((int, float), Tensor, str, (list, tuple), Mapping)
    mine, theirs = ([isinstance(value, kind) for kind in kinds] for value in (saved, new))
    return not any(mine) or not any(theirs) or mine == theirs
