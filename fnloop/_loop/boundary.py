"""What is due at a boundary, the point between two updates.

``due`` says it as a list of actions, and ``Run`` carries them out. There is a list for each stage,
because what a stage does decides the next one: a hook stops the run after it has seen the record.

    "start"     before the first update: evaluate, and call the hooks of that moment
    "boundary"  after each update: make the records that are due, and call all hooks
    "end"       after a stop, or where the end alone has something to evaluate: the closing record,
                and the hooks of that moment

A run that reaches its target makes its end with its last boundary: the closing record comes before
the hooks, which see the event "end". It has an "end" of its own only if this boundary has a record,
and the end evaluates more: then the hooks see that record as they would if the run went further.

What becomes of a stop that a hook sets:

1. ``Run._as_continued`` keeps it, unless there was one before. ``Run._leave_end`` notes in
   ``state.left`` that an end is to be made, and the epoch is over.
2. ``Run.end_epoch`` finds that note, and ``Run._end`` makes the end: what is due at the stage "end"
   is carried out, and nothing is left. A run that is killed before that leaves the note, and the
   run that continues makes the end first.
3. The phase ends, if it has a name, and the hooks are flushed.
4. With ``stop=None`` the next run continues. ``Run.begin_epoch`` reads the loader from the position
   that the state has, and ``Run.enter`` installs the generators after the first fetch, as they were
   captured after it. The running metrics are still there, and a closing record resets none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import attrs

from fnloop._core.history import Record, split_name
from fnloop._core.runs import End
from fnloop._core.state import TrainState
from fnloop._core.types import END, EPOCH, RECORD
from fnloop._display import checks
from fnloop._hooks.hook import Moment, Trigger, as_moment, due_at, is_moment

# When to evaluate: all loaders together, or each by its name; None is never.
Moments = Trigger | Mapping[str, Trigger | None] | None


@attrs.frozen
class Append:
    """Append a record.

    Args:
        kind: "epoch": of an epoch that has ended. "evaluation": within one. "recent": of
            ``record_every``, with no "train/..." metrics. "numbers": of those of hooks alone, so
            that no other metric has a value more. "closing": because the run ends here.
        names: the loaders to evaluate for it, and the numbers of hooks that are due.
    """

    kind: str
    names: tuple[str, ...] = ()


@attrs.frozen
class Collect:
    """Evaluate loaders for the hooks that ask for outputs at the end.

    What these evaluations come to is in no record. The numbers that hooks make of the outputs are
    in a closing record.
    """

    loaders: tuple[str, ...]


@attrs.frozen
class Call:
    """Call the hooks: all of them, or those that are due outside of an update.

    Args:
        stage: "start", "boundary" or "end". All hooks are called at a boundary, and at the start if
            there is a record.
    """

    stage: str


@attrs.frozen
class Leave:
    """Leave the end of the run for later: after the hooks."""

    end: End


Action = Append | Collect | Call | Leave


@attrs.frozen
class Answers:
    """What the moments of ``fit`` say at a boundary.

    Args:
        now: the loaders whose evaluation is due, and the hooks whose numbers are, by name; None if
            none is.
        at_end: those that are due only because the run ends.
        record: whether a record is due in any case.
        numbers: whether nothing is due now but the numbers of hooks.
    """

    now: tuple[str, ...] | None = None
    at_end: tuple[str, ...] = ()
    record: bool = False
    numbers: bool = False


def ask(
    evaluations: Sequence[tuple[Moment, tuple[str, ...]]],
    record_every: Moment | None,
    state: TrainState,
    note: Callable[[Moment], object],
    makers: Collection[str] = (),
) -> Answers:
    """Ask the moments of ``fit`` what is due. If one is asked, all are, because some have clocks.

    Args:
        evaluations: when to evaluate, and what.
        record_every: when to make a record in any case; None is never.
        state: the state at the boundary.
        note: called with each moment before it is asked.
        makers: the names among those of ``evaluations`` that hooks have for their numbers.
    """
    __tracebackhide__ = True
    now: list[tuple[str, ...]] = []
    at_end: list[tuple[str, ...]] = []
    for moment, names in evaluations:
        note(moment)
        in_any_case, only_at_end = due_at(moment, state)
        if in_any_case:
            now.append(names)
        elif only_at_end:
            at_end.append(names)
    record = False
    if record_every is not None:
        note(record_every)
        record, _ = due_at(record_every, state)
    numbers = bool(now) and all(names and {*names} <= {*makers} for names in now)
    return Answers(sum(now, ()) if now else None, sum(at_end, ()), record, numbers)


def due(
    stage: str,
    state: TrainState,
    answers: Answers,
    evaluated: Iterable[str],
    adds_at_end: bool = False,
) -> list[Action]:
    """Return what happens at a stage of a boundary, in its order.

    Args:
        stage: "start", "boundary" or "end".
        state: the state: its events say whether an epoch, or the run, ends here.
        answers: what the moments say.
        evaluated: the names of all loaders that the run evaluates.
        adds_at_end: whether a hook may have numbers only because the run ends.
    """
    ends, epoch = END in state.events, EPOCH in state.events
    known = tuple(evaluated)
    if stage == "start":
        record = [] if answers.now is None else [Append("evaluation", answers.now)]
        return [*record, Call("start")]
    if stage == "end":
        made = is_full(state, known)
        closing = _closing(answers, made, state.history[-1] if made else None, known)
        return [*closing, Collect(known), Call("end")]
    if epoch or answers.now is not None:
        alone = "recent" if answers.record else "numbers"
        kind = "epoch" if epoch else alone if answers.numbers else "evaluation"
        record = Append(kind, answers.now or ())
        complete = kind != alone and set(answers.at_end) <= set(record.names)
        if ends and (adds_at_end or not complete):
            return [record, Leave(End()), Call("boundary")]
        rest = tuple(name for name in known if name not in record.names)
        return [record, *([Collect(rest)] if ends else ()), Call("boundary")]
    recent = [Append("recent")] if answers.record else []
    closing = _closing(answers, False, None, known) if ends else []
    return [*recent, *closing, Call("boundary")]


def _closing(
    answers: Answers, made: bool, record: Record | None, known: tuple[str, ...]
) -> list[Append]:
    """Return the closing record: of what the end evaluates beyond the record of its boundary."""
    if not made:
        return [Append("closing", tuple(dict.fromkeys((*known, *answers.at_end))))]
    missing = tuple(not_in(record, answers.at_end))
    return [Append("closing", missing)] if missing else []


def is_full(state: TrainState, evaluated: Collection[str]) -> bool:
    """Return whether this boundary has the record of an epoch or of an evaluation.

    Args:
        state: the state.
        evaluated: the names of all loaders that the run evaluates.
    """
    if RECORD not in state.events:
        return False
    known = ("train", *evaluated)
    return EPOCH in state.events or any(
        split_name(name)[0] in known for name in state.history[-1].metrics
    )


def not_in(record: Record | None, names: Iterable[str]) -> list[str]:
    """Return the loaders that a record has no evaluation of, and the hooks of no numbers."""
    known = {} if record is None else record.metrics
    return [name for name in names if not any(key.startswith(f"{name}/") for key in known)]


# --- the arguments of fit


def read_moments(
    given: Moments, loaders: tuple[str, ...]
) -> tuple[tuple[Moment, tuple[str, ...]], ...]:
    """Return the moments of ``evaluate_every``, each with the loaders to evaluate then.

    Raises:
        TypeError: it is something else.
        ValueError: it is a mapping, and a loader is missing or unknown.
    """
    if not isinstance(given, Mapping):
        check_moment("evaluate_every", given)
        return () if given is None else ((own_clock(given), loaders),)
    for name, moment in given.items():
        check_moment(f"evaluate_every[{name!r}]", moment)
    if unknown := [repr(name) for name in given if name not in loaders]:
        raise ValueError(
            f"fit got evaluate_every with {', '.join(unknown)}, which is not a loader to evaluate; "
            f"those are: {', '.join(loaders) or 'none'}"
        )
    if missing := [name for name in loaders if name not in given]:
        raise ValueError(
            f"fit got evaluate_every without the loader {missing[0]!r}: add its moment, or None "
            f"for never: {{..., {missing[0]!r}: None}}"
        )
    return tuple((own_clock(each), (name,)) for name, each in given.items() if each is not None)


def own_clock(moment: Trigger) -> Moment:
    """Return a moment that may be used elsewhere too: with a clock of its own, if it has one."""
    return as_moment(moment).renew()


def check_moment(argument: str, given: Trigger | None) -> None:
    """Raise TypeError unless this is a trigger, or None."""
    if given is None:
        return
    if not is_moment(given):
        raise TypeError(
            f"fit expects {argument} as every(epochs=1), every(steps=100), when(predicate) or "
            "None, or as at_start(), at_end() or a combination by |, & and ~; got "
            f"{checks.describe(given)}"
        )
    if as_moment(given).monitors:
        raise TypeError(
            f"fit expects {argument} as a moment that does not depend on records, because it makes "
            f"them; got {given!r}"
        )
