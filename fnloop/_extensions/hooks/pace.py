"""The moment at which saving again costs least: as often as machines fail and saves take time."""

from __future__ import annotations

import math

import attrs

from fnloop._backend.collectives import broadcast
from fnloop._core.runs import RunInfo
from fnloop._core.state import TrainState
from fnloop.extend import Clock, Moment, checks

DAY = 24 * 60 * 60  # seconds


@attrs.define(eq=False)
class Pace(Clock):
    """When a hook was last due, and how long it takes. The run notes both in the state.

    Args:
        failures: how often the machine is lost, per day.
        cost: how long the hook takes, in seconds; None before it was called.
    """

    failures: float = 1.0
    cost: float | None = None

    @property
    def learns(self) -> bool:
        return True

    def interval(self) -> float:
        """Return the seconds from one call to the next: the square root of 2 · cost · mean time.

        With a shorter one, the run saves too much; with a longer one, it loses too much. Nothing is
        due sooner than a call takes.
        """
        if self.cost is None:
            return 0.0
        return max(math.sqrt(2 * self.cost * DAY / self.failures), self.cost)

    def took(self, state: TrainState, seconds: float) -> TrainState:
        """Learn how long a call took on the main process: half of what is known is the newest."""
        seconds = broadcast(seconds)
        self.cost = seconds if self.cost is None else (self.cost + seconds) / 2
        return self.noted(state)

    def begin(self, state: TrainState, mark: str, zero: float) -> None:
        super().begin(state, mark, zero)
        self.cost = state.noted.get(f"{mark} cost", self.cost)

    def notes(self) -> dict[str, float]:
        return super().notes() | ({} if self.cost is None else {" cost": self.cost})


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class paced(Moment):
    """Save as often as it pays: ``paced(failures_per_day=1)(checkpoint("runs/a"))``.

    A save costs time, and so does the training since the last save when a machine is lost. Together
    they cost least if a save is due every sqrt(2 · C · M) seconds, where C is the time of a save
    and M the mean time between failures. The hook is timed to measure C: a save of 3 s is due every
    12 minutes if a machine is lost once a day. It is first due at the first boundary.

    Args:
        failures_per_day: how often the run loses a machine, over all of its machines; above 0. For
            64 machines, each of which fails once in 128 days, it is 0.5.

    Returns:
        A moment: call it with a hook; combine moments with ``|`` and ``&``. It is only for hooks,
        because it measures the time of its hook.

    Raises:
        TypeError, ValueError: it is not a number above 0.
        TypeError: there is no hook to time: in ``fit(evaluate_every=...)``, or as ``~paced(...)``.

    Example:
        >>> import fnloop as fl, time, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def save(state):
        ...     print("saves after update", state.step)
        ...     time.sleep(0.01)  # so the next is due after 41 seconds
        ...     return state
        >>> hooks = (paced(failures_per_day=1)(save),)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=hooks)
        saves after update 1

    Notes:
        C is the time for which the main process waits: a checkpoint that is written in the
        background is cheap, and therefore more frequent. The newest call makes half of C, so C
        follows a disk that becomes slower. A resumed run knows C, and continues the count; the time
        in between does not count. Only the first checkpoint does not hold C, so a run that
        continues from it saves once more at once. With several processes all use the same C.

    Source:
        J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
        1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", FGCS 22(3), 2006.
    """

    failures_per_day: float = attrs.field(default=1.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        rate = checks.number("paced", "failures_per_day", self.failures_per_day, above=0)
        self.failures_per_day, self._pace = rate, Pace(failures=rate)
        self.clocks = (self._pace,)

    def __repr__(self) -> str:
        return f"paced(failures_per_day={self.failures_per_day})"

    def renew(self) -> paced:
        """Return a copy with a clock of its own."""
        return paced(failures_per_day=self.failures_per_day)

    def check(self, run: RunInfo) -> None:
        """Begin a run."""
        self._pace.last = self._pace.cost = None  # unless the state knows better

    def due(self, state: TrainState) -> bool:
        """Return whether the hook is due at this boundary."""
        return self._pace.has_passed(self._pace.interval(), state)
