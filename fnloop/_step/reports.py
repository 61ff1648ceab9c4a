"""The numbers that middleware add to a report, made from those of the report."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Real

import attrs
from torch import Tensor

from fnloop._core.middleware import Middleware
from fnloop._core.monitor import suggestion
from fnloop._display import checks

__all__ = ["MissingNumberError", "Numbers", "add_reported", "as_number", "of_turn", "prefixed"]

ALWAYS = ("train", "recent")  # what the names of numbers may begin with in every run


class MissingNumberError(KeyError):
    """Raised for a number that a loader does not have. Another loader may have it.

    Args:
        message: what is missing.
        name: the name that was looked up.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Numbers(dict[str, float]):
    """The numbers that are known of a loader. It notes the names that were looked up in vain.

    Args:
        loader: the name of the loader, or None.
        values: name to number.
        missed: receives the names that ``numbers[name]`` does not find, and who looked them up.
        owner: who looks numbers up.
    """

    def __init__(
        self,
        loader: str | None,
        values: Mapping[str, float],
        missed: dict[str, object] | None = None,
        owner: object = None,
    ) -> None:
        super().__init__(values)
        self.loader, self.owner = loader, owner
        self.missed = {} if missed is None else missed

    def __missing__(self, name: str) -> float:
        self.missed[name] = self.owner
        place = f" of {self.loader}" if self.loader else ""
        raise MissingNumberError(
            f"there is no metric {name!r} among the numbers{place}; there are: {', '.join(self)}",
            name,
        )


def add_reported(
    members: Sequence[Middleware],
    values: Mapping[str, float],
    loaders: Iterable[str] | None = None,
    known: Container[str] = (),
) -> dict[str, float]:
    """Return the numbers of a report with those that middleware add, after those of their loader.

    A name that a middleware looks up may be there for another loader only. It is an error if a
    report of all loaders does not have it, and no earlier report had it.

    Args:
        members: middleware with a ``report``, in the order in which they are asked.
        values: name to number; the names begin with that of a loader.
        loaders: the names of all loaders that the run evaluates; None: names have no prefix.
        known: the names of numbers of earlier reports.

    Raises:
        KeyError: no loader has a name that a middleware looks up.
        ValueError: a name is there already, or was looked up before it is added.
        TypeError: a middleware does not return numbers by name.
    """
    __tracebackhide__ = True
    if loaders is None:
        return {**values, **_added(members, Numbers(None, values))}
    parts: dict[str, dict[str, float]] = {name: {} for name in (*ALWAYS, *loaders)}
    last: dict[str, str] = {}  # the last name of each loader
    for name, value in values.items():
        loader, _, rest = name.partition("/")
        if loader in parts:
            parts[loader][rest], last[loader] = value, name
    numbers = [Numbers(loader, part) for loader, part in parts.items() if part]
    added = {part.loader: _added(members, part) for part in numbers}
    if last.keys() >= parts.keys() - {"recent"}:
        _check_missed(numbers, known)
    found: dict[str, float] = {}
    for name, value in values.items():
        found[name] = value
        loader = name.partition("/")[0]
        if last.get(loader) == name:
            found |= {f"{loader}/{more}": number for more, number in added[loader].items()}
    return found


def _added(members: Sequence[Middleware], numbers: Numbers) -> dict[str, float]:
    """Return what middleware add to the numbers of a loader. ``numbers`` gets it too."""
    __tracebackhide__ = True
    added: dict[str, float] = {}
    for member in members:
        assert member.report is not None
        given = Numbers(numbers.loader, numbers, numbers.missed, member)
        try:
            more = member.report(numbers.loader, given)
        except MissingNumberError:
            continue
        checks.mapping(repr(member), "its report", more, "name to number")
        for name, value in more.items():
            checks.metric_name(repr(member), "a name of its report", name)
            if name in numbers:
                raise ValueError(
                    f"{member!r} reports the metric {name!r}, which is there already: rename one"
                )
            if name in numbers.missed:
                raise ValueError(
                    f"{numbers.missed[name]!r} looks up {name!r}, which {member!r} adds after it: "
                    f"list {member!r} first"
                )
            added[name] = numbers[name] = as_number(f"{member!r}: {name!r}", value)
    return added


def as_number(owner: str, value: object) -> float:
    """Return what a middleware reports as a float.

    Raises:
        TypeError: it is not a number.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{owner} must be a number; got {checks.describe(value)}")


def _check_missed(numbers: Sequence[Numbers], known: Container[str]) -> None:
    """Raise if no loader has a name that a middleware looks up."""
    for name in numbers[0].missed:
        if not all(name in part.missed for part in numbers):
            continue
        if any(f"{part.loader}/{name}" in known for part in numbers):
            continue
        there = "; ".join(f"{part.loader}: {', '.join(part)}" for part in numbers)
        names = {other: None for part in numbers for other in part}
        raise KeyError(
            f"{numbers[0].missed[name]!r}: no loader of this run has the metric {name!r}; there "
            f"are, of {there}{suggestion(name, names)}"
        )


# --- the numbers of a turn


def prefixed(name: str, metric: str) -> str:
    """Return the name under which a round reports a metric of a turn.

    A learning rate has the name that it has in every run with several optimizers.

    Example:
        >>> prefixed("d", "grad_norm"), prefixed("d", "lr"), prefixed("d", "lr/1")
        ('d/grad_norm', 'lr/d', 'lr/d/1')
    """
    if metric == "lr" or metric.startswith("lr/"):
        return f"lr/{name}{metric.removeprefix('lr')}"
    return f"{name}/{metric}"


def of_turn(member: Middleware, name: str) -> Middleware:
    """Return a middleware that adds to the numbers of a turn what another one adds to all."""
    given = member.report
    assert given is not None

    def report(loader: str | None, numbers: Mapping[str, float]) -> Mapping[str, float]:
        __tracebackhide__ = True
        more: object = given(loader, _OfTurn(loader, numbers, name))
        if isinstance(more, Mapping):
            return {prefixed(name, key): value for key, value in more.items()}
        return more  # type: ignore[return-value]  # which is checked

    return attrs.evolve(member, report=report)


class _OfTurn(Numbers):
    """The numbers of a turn, without its name. Those that it lacks are looked up among all.

    Args:
        loader: the name of the loader, or None.
        numbers: all numbers of the loader.
        name: the name of the turn.
    """

    def __init__(self, loader: str | None, numbers: Mapping[str, float], name: str) -> None:
        prefix = f"{name}/"
        own = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
        super().__init__(loader, own)
        self._all, self._name = numbers, name

    def __missing__(self, key: str) -> float:
        return self._all[prefixed(self._name, key)]
