"""Stop a run when its time is up."""

from __future__ import annotations

import math
import os
import time

import attrs

from fnloop._backend.public import broadcast
from fnloop._core.call import Call
from fnloop._core.copies import with_slot
from fnloop._core.run_info import now
from fnloop._core.state import TrainState
from fnloop._core.stops import Stop, kind_of
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._hooks.progress_text import format_duration
from fnloop._hooks.wrapper import Hook

__all__ = ["time_limit"]

SLOT = "time_limit"  # holds the seconds that the run has taken, in a list
SPARE = 60.0  # seconds that are left to SLURM, besides what was measured
_UNKNOWN = (
    'time_limit(per="job"): the end of this job is not known (SLURM_JOB_END_TIME is not set), so '
    "there is no limit"
)


@attrs.frozen(repr=False, eq=False)
class time_limit(Hook):
    """Stop when the run, or this job, has taken its time.

    The run ends after the update in which the time is up. Evaluations and hooks count, and so does
    what an earlier job of the run has taken; what lies between two runs does not.

    Args:
        *given: nothing; it is an error to give a time without its unit.
        hours, minutes, seconds: the limit is their sum. With ``per="job"`` and none of them, it is
            the end of the SLURM job (``SLURM_JOB_END_TIME``), less twice the longest time between
            two updates so far, with evaluations and saves, less a minute: what comes next, and
            the last save, have to fit in. Where no end is known, there is no limit, and a warning
            says so.
        per: "run" counts all of the run. The time is saved with the state, so a script that is
            started again does not get more, and continues only if the limit was raised. "job"
            counts what this process has taken, and stops as a signal does: without a last
            evaluation, and the same script, started again, continues. Several runs of a job have
            one limit if they share one hook.

    Returns:
        A hook. List it before ``checkpoint``.

    Raises:
        TypeError: none of the three is given for a run, or a time without its name.
        ValueError: one of them is below 0, their sum is 0, or ``per`` is something else.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, ones = fl.pipeline()(toy_loss), [torch.ones(1)]
        >>> state = fl.fit(step, toy(), ones, epochs=10**9, hooks=(time_limit(seconds=1e-9),))
        >>> state.step, state.stop
        (1, 'time_limit: the run has taken its 0.0s')
    """

    hours: float = attrs.field(default=0.0, kw_only=True)
    minutes: float = attrs.field(default=0.0, kw_only=True)
    seconds: float = attrs.field(default=0.0, kw_only=True)
    per: str = attrs.field(default="run", kw_only=True)
    _began: list[float] = attrs.field(factory=list, init=False)  # what the clock said at time 0
    _taken: list[float] = attrs.field(factory=lambda: [0.0], init=False)  # so far
    _end: list[float] = attrs.field(factory=list, init=False)  # what the clock will say at the end
    _longest: list[float] = attrs.field(factory=lambda: [0.0], init=False)  # between two calls

    def __init__(
        self,
        *given: object,
        hours: float = 0.0,
        minutes: float = 0.0,
        seconds: float = 0.0,
        per: str = "run",
    ) -> None:
        if given:
            raise TypeError(
                f"time_limit({given[0]!r}) does not say in which unit: write "
                f"time_limit(hours={given[0]!r}), minutes= or seconds="
            )
        settings = {"hours": hours, "minutes": minutes, "seconds": seconds, "per": per}
        self.__attrs_init__(**settings)  # type: ignore[attr-defined]

    def __attrs_post_init__(self) -> None:
        for name in ("hours", "minutes", "seconds"):
            checks.number("time_limit", name, getattr(self, name), "a time", least=0)
        checks.choice("time_limit", "per", self.per, ("run", "job"))
        if not self.limit and self.per == "run":
            raise TypeError(
                "time_limit expects a time above 0, such as time_limit(hours=8); or per='job' "
                "alone, for the end of the SLURM job"
            )

    @property
    def slot(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the slot with the time that was taken so far."""
        return SLOT

    @property
    def limit(self) -> float:
        """The limit, in seconds."""
        return 3600 * self.hours + 60 * self.minutes + self.seconds

    def __repr__(self) -> str:
        fields = [f for f in attrs.fields(time_limit) if f.init]
        given = {f.name: getattr(self, f.name) for f in fields}
        return repr(Call(time_limit, (), {k: v for k, v in given.items() if v not in (0.0, "run")}))

    def take_back(self, state: TrainState) -> TrainState:
        """Return the state without a stop of this hook, if the limit was raised since."""
        stopped = kind_of(state.stop) == "limit"
        raised = self.per == "run" and state.slots.get(SLOT, [0.0])[0] < self.limit
        return attrs.evolve(state, stop=None) if stopped and raised else state

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: the clock continues from the time that was taken so far."""
        if self.per == "run":
            self._taken[:] = state.slots.get(SLOT, [0.0])
        self._began[:] = [now(state.run) - self._taken[0]]
        if not self.limit:
            left = broadcast(_time_left())  # of the main process: all stop after the same update
            self._end[:] = [now(state.run) + left]
            if left == math.inf and state.backend.main:
                log.warning(_UNKNOWN)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if not self._began:  # it is called outside of a run
            self.begin(state)
        before, self._taken[0] = self._taken[0], now(state.run) - self._began[0]
        if not self.limit:
            if before:  # the first update may compile
                self._longest[0] = max(self._longest[0], self._taken[0] - before)
            return self._stop_before_end(state)
        if self.per == "run":
            state = self._note(state)
        if self._taken[0] < self.limit or state.stop is not None:
            return state
        what, kind = ("the run", "limit") if self.per == "run" else ("this job", "job")
        reason = f"time_limit: {what} has taken its {format_duration(self.limit)}"
        return attrs.evolve(state, stop=Stop(reason, kind))

    def flush(self, state: TrainState) -> TrainState:
        """Note the time that was taken since, such as that of an evaluation which a signal cut."""
        if self.per != "run" or not self._began:
            return state
        self._taken[0] = now(state.run) - self._began[0]
        return self._note(state)

    def _note(self, state: TrainState) -> TrainState:
        """Return the state with the time that was taken so far."""
        if SLOT not in state.slots:
            state = with_slot(state, SLOT, [0.0])
        state.slots[SLOT][0] = self._taken[0]
        return state

    def _stop_before_end(self, state: TrainState) -> TrainState:
        """Return the state, stopped if the time until the job ends may be too short for more."""
        left = self._end[0] - now(state.run)
        if left > SPARE + 2 * self._longest[0] or state.stop is not None:
            return state
        reason = f"time_limit: this job ends in {format_duration(max(left, 0.0))}"
        return attrs.evolve(state, stop=Stop(reason, "job"))


def _time_left() -> float:
    """Return the seconds until the SLURM job ends; infinity if that is not known."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdigit() else math.inf
