"""Run a hook whenever a metric is better than ever before."""

from __future__ import annotations

import attrs

from fnloop._core.call import Call
from fnloop._core.events import RECORD
from fnloop._core.history import Fold
from fnloop._core.monitor import better, check_monitored, mode_of
from fnloop._core.phase import SINCE, first_record
from fnloop._core.record import Record
from fnloop._core.state import TrainState
from fnloop._display.checks import choice, metric_name
from fnloop._hooks.moments import Moment

__all__ = ["when_improved"]

OWNER = "when_improved"


@attrs.frozen(repr=False)
class when_improved(Moment):
    """Run a hook when a metric is better than ever before: ``when_improved("valid/loss")(hook)``.

    The first value counts as an improvement, an equal one does not, and NaN never does. The
    decision is a function of the history, so a resumed run decides as an uninterrupted one. Closing
    records, which a run appends if it ends between two evaluations, do not count.

    Args:
        key: the metric, such as "valid/loss".
        mode: "min" if lower is better, "max" if higher; by default as the name of the metric says.
        since: which values count: those of the "phase", if there is one, or of the whole "run".

    Returns:
        A moment: a function from a hook to a hook, which composes with ``|``, ``&`` and ``~``.

    Raises:
        TypeError: key is not a str.
        ValueError: there is no such mode, or it is None and the name of the metric does not imply
            one.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At its first evaluation: there is none, where a middleware or a hook of your own might
            have added it. The message lists those that exist.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.epoch, state.history.latest("valid/loss"))
        ...     return state
        >>> hook = when_improved("valid/loss")(show)
        >>> rates = fl.schedule(lambda i, total: (1, -1, 3)[i])         # w is -1, 0, -3
        >>> loaders = [torch.ones(1)], [torch.ones(1)]
        >>> state = fl.fit(fl.pipeline(rates)(toy_loss), toy(), loaders, epochs=3, hooks=(hook,))
        1 -1.0
        3 -3.0
    """

    key: str
    mode: str | None = None
    since: str = attrs.field(default="phase", kw_only=True)
    _best: Fold = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        metric_name(OWNER, "key", self.key)
        mode_of(OWNER, self.key, self.mode)  # checks it
        choice(OWNER, "since", self.since, SINCE)
        object.__setattr__(self, "_best", Fold(self._better_of, None))

    def __repr__(self) -> str:
        given = {"mode": self.mode, "since": None if self.since == "phase" else self.since}
        given = {name: value for name, value in given.items() if value is not None}
        return repr(Call(when_improved, (self.key,), given))

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that this depends on."""
        return (self.key,)

    def due(self, state: TrainState) -> bool:
        """Return whether this boundary added a record with a new best value."""
        if RECORD not in state.events or not check_monitored(repr(self), self.key, state):
            return False
        first = first_record(state.phases, self.since)
        return self._best(state.history, first) is state.history[-1]

    def _better_of(self, best: Record | None, record: Record) -> Record | None:
        """Return the record with the better value; None if neither has one."""
        if record.closing or self.key not in record.metrics:
            return best
        before = float("nan") if best is None else best.metrics[self.key]
        mode = mode_of(OWNER, self.key, self.mode)
        return record if better(record.metrics[self.key], before, mode) else best
