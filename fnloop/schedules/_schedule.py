"""What a schedule is, how one is made, and what a length means."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import ParamSpec

import attrs
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from fnloop._core.call import Call, name_of
from fnloop._display import checks, html

__all__ = [
    "Factor",
    "Length",
    "Schedule",
    "check_length",
    "check_lengths",
    "check_schedule",
    "known_total",
    "refuse_torch_scheduler",
    "schedule_factory",
    "updates_in",
]

Length = int | float  # updates, or a fraction of the run
Factor = Callable[[int, int | None], float]  # (step, total_steps) -> factor
P = ParamSpec("P")


@attrs.frozen(repr=False)
class Schedule:
    """A function ``(step, total_steps) -> factor`` that shows and compares as its call.

    Args:
        call: the call.
        factor: the function.
        text: how it shows, if not as the call.
    """

    call: Call
    factor: Factor = attrs.field(eq=False)
    text: str | None = attrs.field(default=None, eq=False)

    def __call__(self, step: int, total_steps: int | None) -> float:
        __tracebackhide__ = True
        if step.__class__ is not int or step < 0:
            checks.integer(repr(self), "step", step, "the updates applied before", least=0)
        if total_steps is not None and total_steps.__class__ is not int:
            checks.integer(
                repr(self), "total_steps", total_steps, "the updates of the run, or None"
            )
        return self.factor(step, total_steps)

    def __repr__(self) -> str:
        return self.text or repr(self.call)

    def _repr_html_(self) -> str:
        # Long enough to show every length that is given in updates.
        total = max(200, 4 * max(_ints(self.call), default=0))
        try:
            values = [self(i * total // 200, total) for i in range(200)]
        except Exception:  # such as from a user's function that does not accept this length
            return html.curve(repr(self), [], "")
        note = f"factor over {total:,} updates, at most {max(values):.4g}"
        return html.curve(repr(self), values, note)

    def __hash__(self) -> int:
        return hash(self.call.factory)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Call, str | None]]:
        return (_remake, (self.call, self.text))


def _remake(call: Call, text: str | None) -> Schedule:
    made = call()
    assert isinstance(made, Schedule)
    return attrs.evolve(made, text=text)


def _ints(call: Call) -> Iterator[int]:
    """Yield the ints in a call, and in the schedules within it."""
    waiting: list[object] = [*call.args, *call.kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Schedule):
            yield from _ints(value.call)
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, int):
            yield value


def schedule_factory(make: Callable[P, Factor]) -> Callable[P, Schedule]:
    """Turn a function that returns a factor function into one that returns a :class:`Schedule`."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        return Schedule(Call(made, args, kwargs), make(*args, **kwargs))

    # schedule(cosine) looks for this to say that the call is missing
    vars(made)["is_schedule_factory"] = True
    return made


def check_schedule(owner: str, schedule: object) -> None:
    """Raise TypeError unless something can be called as ``schedule(step, total_steps)``."""
    wanted = "a function (step, total_steps) -> factor, such as cosine()"
    if hasattr(schedule, "is_schedule_factory"):
        name = name_of(schedule)
        raise TypeError(f"{owner} expects {wanted}; got {name}. Call it: {name}()")
    refuse_torch_scheduler(owner, wanted, schedule)
    checks.function(owner, "a schedule", schedule, wanted, 2)


def refuse_torch_scheduler(owner: str, wanted: str, given: object) -> None:
    """Raise TypeError if something is a scheduler of torch, or its class, and say what to write."""
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, LRScheduler):
        return
    name = kind.__name__
    if issubclass(kind, ReduceLROnPlateau):
        hint = f'Instead of {name}, list plateau("valid/loss") in the pipeline'
    else:
        settings = "10" if kind is StepLR else "..."
        hint = f"Write torch_scheduler(lambda optimizer, run: {name}(optimizer, {settings}))"
    got = name if kind is given else f"a {name}"
    raise TypeError(f"{owner} expects {wanted}; got {got}. {hint}")


def check_length(owner: str, name: str, value: object) -> None:
    """Raise unless something is a length.

    Raises:
        TypeError: it is not a number.
        ValueError: it is below 0, or a float above 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        wanted = "updates (an int) or as a fraction of the run (a float)"
        raise TypeError(f"{owner} expects {name} as {wanted}; got {checks.describe(value)}")
    if not value >= 0:
        raise ValueError(f"{owner} expects {name} >= 0; got {value!r}")
    if isinstance(value, float) and value > 1:
        hint = f". For updates, write an int: {round(value)}" if math.isfinite(value) else ""
        raise ValueError(
            f"{owner} expects {name} as a fraction of the run, from 0.0 to 1.0; got {value!r}{hint}"
        )


def check_lengths(owner: str, name: str, values: object) -> list[Length]:
    """Return lengths as a list of one's own, having checked each."""
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{owner} expects {name} as a list of lengths; got {checks.describe(values)}"
        )
    for value in values:
        check_length(owner, name, value)
    return list(values)


def updates_in(length: Length, total: int | None) -> int:
    """Return a length in updates."""
    return length if isinstance(length, int) else round(length * known_total(total))


def known_total(total: int | None) -> int:
    """Return the length of a run, having checked that it is known.

    Raises:
        ValueError: it is not.
    """
    if total is None:
        raise ValueError(
            "this schedule needs the length of the run: call it through "
            "fit(step, state, loaders, steps=...)"
        )
    return total
