"""The numbers that middleware add to a report: metrics of an update, and those made of others."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from fnloop._core.records import Record
from fnloop._core.types import Metric, Middleware, Output
from fnloop._display import checks

# --------------------------------------------------------------------------------------------------
# Metrics of an update, and numbers that are made from those of a report.


def report(out: Output, metrics: Mapping[str, Metric], by: str) -> Output:
    """Return an output with more metrics. A skipped update reports none.

    Args:
        out: the output of the step inside.
        metrics: name to metric, such as ``fl.Mean(norm, 1)``. None may be read to the host.
        by: who reports them, for messages.

    Returns:
        The new output.

    Raises:
        ValueError: it has a metric of that name already.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import spy, toy
        >>> state, out = spy()(toy(), torch.ones(1))
        >>> report(out, {"norm": fl.Mean(2.0, 1)}, "mine").metrics["norm"].compute()
        2.0
    """
    if out.skip is not None:
        return out
    if clash := out.metrics.keys() & metrics.keys():
        name = min(clash)
        raise ValueError(
            f"{by} reports the metric {name!r}, which another middleware inside it reports "
            "already: rename one"
        )
    return Output(out.loss, out.weight, out.aux, {**out.metrics, **metrics})


class MissingNumberError(KeyError):
    """Raised for a number that a loader does not have. Another loader may have it.

    The numbers that a ``report`` is given raise it. Let it pass: then nothing is added to the
    numbers of this loader.

    Args:
        message: what is missing.
        name: the name that was looked up.

    Example:
        >>> import fnloop as fl
        >>> from fnloop.testing import toy_loss
        >>> def per_token(loader, numbers):
        ...     return {"per_token": numbers["loss"] / numbers["tokens"]}
        >>> step = fl.pipeline(fl.Middleware("per_token", report=per_token))(toy_loss)
        >>> values = {"train/loss": 6.0, "valid/loss": 8.0, "valid/tokens": 4.0}
        >>> step.derive(values, ["valid"])["valid/per_token"]      # that of train lacks a number
        2.0
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
    parts: dict[str, dict[str, float]] = {name: {} for name in (*Record.TRAINED, *loaders)}
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
            added[name] = numbers[name] = checks.as_number(f"{member!r}: {name!r}", value)
    return added


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
            f"are, of {there}{checks.suggestion(name, names)}"
        )
