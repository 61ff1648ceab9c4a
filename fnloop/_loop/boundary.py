"""What is due at a boundary, the point between two updates, and what comes after it.

``due`` returns what a stage of a boundary does, as actions. There is a list for each stage, because
what a stage does decides the next one: a hook stops the run after it has seen the record.

    "start"     before the first update: evaluate, and call the hooks of that moment
    "boundary"  after each update: make the records that are due, and call all hooks
    "end"       after a stop, or where the end alone has something to evaluate: the closing record,
                and the hooks of that moment

A run that reaches its target makes its end with its last boundary: the closing record comes before
the hooks, which see the event "end". It has an "end" of its own only if this boundary has a record,
and the end evaluates more: then the hooks see that record as they would if the run went further.

``onward`` says what comes after the hooks: the next update, the next epoch, or the end of the run.
It is asked when a boundary begins, and again after each hook that has changed the state.

``resumed`` says what a run does first with a state that another one has left, maybe with another
target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

import attrs

from fnloop._core.records import Record, loaders_in
from fnloop._core.runs import (
    CLOCK,
    Append,
    Boundary,
    Call,
    Collect,
    End,
    Flush,
    Meet,
    Start,
    Stop,
    Todo,
    Update,
    pending,
)
from fnloop._core.state import TrainState, changed
from fnloop._core.types import END, EPOCH, RECORD
from fnloop._display import checks
from fnloop._hooks.hook import Moment, Trigger, as_moment, check_needs_no_hook, is_moment

# When to evaluate: all loaders together, or each by its name; None is never.
Moments = Trigger | Mapping[str, Trigger | None] | None


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
        in_any_case, only_at_end = moment.due_here(state)
        if in_any_case:
            now.append(names)
        elif only_at_end:
            at_end.append(names)
    record = False
    if record_every is not None:
        note(record_every)
        record, _ = record_every.due_here(state)
    numbers = bool(now) and all(names and {*names} <= {*makers} for names in now)
    return Answers(sum(now, ()) if now else None, sum(at_end, ()), record, numbers)


def due(
    stage: str, state: TrainState, answers: Answers, evaluated: Iterable[str], apart: bool = False
) -> Todo:
    """Return what happens at a stage of a boundary, in its order.

    Args:
        stage: "start", "boundary" or "end".
        state: the state: its events say whether an epoch, or the run, ends here.
        answers: what the moments say.
        evaluated: the names of all loaders that the run evaluates.
        apart: whether the run ends here, and its end is made after this boundary.
    """
    ends, epoch = END in state.events, EPOCH in state.events
    known = tuple(evaluated)
    if stage == "start":
        record = [] if answers.now is None else [Append("evaluation", answers.now)]
        return (*record, Call("start"))
    if stage == "end":
        made = is_full(state, known)
        closing = _closing(answers, made, state.history[-1] if made else None, known)
        return (*closing, Collect(known), Call("end"))
    if epoch or answers.now is not None:
        names = answers.now or ()
        rest = tuple(name for name in known if name not in names)
        record = Append(_kind(state, answers), names)
        return (record, *([Collect(rest)] if ends and not apart else ()), Call("boundary"))
    recent = [Append("recent")] if answers.record else []
    closing = _closing(answers, False, None, known) if ends else []
    return (*recent, *closing, Call("boundary"))


def ends_apart(state: TrainState, answers: Answers, adds_at_end: bool) -> bool:
    """Return whether the end of the run is made after its last boundary, and not with it.

    Args:
        state: the state: its events say whether an epoch ends here.
        answers: what the moments say.
        adds_at_end: whether a hook may have numbers only because the run ends.
    """
    if EPOCH not in state.events and answers.now is None:
        return False
    full = _kind(state, answers) in ("epoch", "evaluation")
    return adds_at_end or not full or not {*answers.at_end} <= {*(answers.now or ())}


def _kind(state: TrainState, answers: Answers) -> str:
    """Return of which kind the record of a boundary is: see :class:`Append`."""
    if EPOCH in state.events:
        return "epoch"
    return "evaluation" if not answers.numbers else "recent" if answers.record else "numbers"


def onward(
    state: TrainState, reached: bool, ended: bool, apart: bool = False, gone_back: bool = False
) -> Todo:
    """Return what comes after the hooks of a boundary.

    Args:
        state: the state that they have returned.
        reached: whether the run is at its target.
        ended: whether the epoch has ended.
        apart: whether the end is made after the boundary, though the state says that it ends here.
        gone_back: whether a hook has gone back to a snapshot.
    """
    if reached or Stop.ends_run(state.stop):
        end = () if END in state.events and not apart else (End(),)
        return (Meet(ended), *end, Flush(state.stop if Stop.ends_run(state.stop) else None))
    if state.ends is not None and not gone_back:
        return (Boundary(ended=True),)
    return (Meet(ended and not gone_back), Update()) if ended or gone_back else (Update(),)


def resumed(state: TrainState, reached: bool, starts: bool) -> TrainState:
    """Return the state with what a run does with it first; with nothing, if there is nothing to do.

    What an interruption has left of a boundary is completed. The end of a run that was left is made
    only if it still is one: its target may have been raised, or its stop taken back.

    Args:
        state: the state that the run is given, without an interruption as its stop.
        reached: whether the run is at its target.
        starts: whether something is due before the first update.
    """
    over = reached or Stop.ends_run(state.stop)
    left = tuple(action for action in pending(state.todo) if over or not action.of_end)
    apart, ends = End() in state.todo, any(isinstance(each, Flush) for each in state.todo)
    if over and ends and left and (not apart or (reached and isinstance(left[0], Append))):
        state = changed(state, events=state.events | {END})
    elif not over and left:
        state = changed(state, events=state.events - {END})
    if left and isinstance(left[-1], Call) and left[-1].stage == "end":
        return changed(state, todo=(*left, Flush(state.stop)))
    if left:
        ended = EPOCH in state.events and not state.batch
        return changed(state, todo=(*left, *onward(state, reached, ended, apart)))
    if over:
        # Where `Meet` and `Flush` alone are next, the last hook of the last boundary has saved the
        # state, and the run has ended: what a kill has left there, hooks settle.
        of_end = End() in state.todo or isinstance(next(iter(state.todo), None), Flush)
        return state if of_end else changed(state, todo=())
    if state.todo:
        return changed(state, todo=onward(state, False, False), events=frozenset())
    first = (Start(), Update()) if starts else onward(state, False, False)
    noted = {mark: value for mark, value in state.noted.items() if not mark.startswith(CLOCK)}
    return changed(state, todo=first, events=frozenset(), noted=noted)


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
    found = loaders_in(state.history[-1].metrics)
    return EPOCH in state.events or not found.isdisjoint(("train", *evaluated))


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
    if checks.record_in(given):
        check_moment("evaluate_every", cast("Trigger", given))  # raises
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
    check_needs_no_hook(f"fit expects {argument} as", as_moment(given))
    if as_moment(given).monitors:
        raise TypeError(
            f"fit expects {argument} as a moment that does not depend on records, because it makes "
            f"them; got {given!r}"
        )
