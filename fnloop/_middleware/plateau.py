"""Lower the learning rate when a metric does not improve any more."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fnloop._core.history import Fold
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.monitor import better, check_monitored, mode_of
from fnloop._core.optimizers import groups_in
from fnloop._core.phase import SINCE, first_record
from fnloop._core.record import Record
from fnloop._core.state import TrainState, owns_handles
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.rates import RATIO, keep_settings, put_settings_back, set_number

__all__ = ["plateau"]


@attrs.frozen
class _Wait:
    """What the records so far amount to.

    Args:
        ratio: the factor on the learning rate.
        reference: the value to improve on.
        evaluations: how many have not improved on it.
        resting: how many more do not count, after the rate was lowered.
    """

    ratio: float = 1.0
    reference: float | None = None
    evaluations: int = 0
    resting: int = 0


@middleware("step")
def plateau(
    key: str,
    factor: float = 0.1,
    patience: int = 10,
    min_delta: float = 1e-4,
    mode: str | None = None,
    min_ratio: float = 0.0,
    cooldown: int = 0,
    since: str = "phase",
) -> Middleware:
    """Multiply the learning rate by a factor when a metric has not improved for some evaluations.

    It multiplies what ``schedule`` sets, in whichever order the two are listed; without one, the
    initial rate. The factor is a function of the history, so nothing has to be saved, and a resumed
    run continues with the same rate. Closing records do not count. NaN is not an improvement.

    Args:
        key: the metric, such as "valid/loss".
        factor: what the rate is multiplied by each time; above 0 and below 1.
        patience: evaluations without improvement after which to lower the rate; at least 1.
        min_delta: the least improvement, in the units of the metric.
        mode: "min" if lower is better, "max" if higher; None: by the name, as in ``early_stop``.
        min_ratio: the lowest rate, as a fraction of the rate without this; from 0 to 1.
        cooldown: evaluations after each time that do not count as without improvement.
        since: which evaluations count: those of the "phase", if the run has phases, or of the whole
            "run".

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: key is not a str, or a number is something else.
        ValueError: a setting is out of range, or mode is None and the name of the metric does not
            imply one. When composing: ``torch_scheduler`` is listed too.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At an evaluation: there is none, where your own code might have added it.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(plateau("train/loss", patience=1, mode="max"))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.ones(1)], epochs=4, hooks=())
        >>> [round(rate, 4) for rate in state.history["train/lr"]]      # the loss falls
        [1.0, 1.0, 0.1, 0.01]

    Source: ``ReduceLROnPlateau`` of Keras, whose ``patience`` and ``cooldown`` count like this.
    """
    checks.metric_name("plateau", "key", key)
    mode_of("plateau", key, mode)  # checks it
    meaning = "what the rate is multiplied by"
    if checks.number("plateau", "factor", factor, meaning, above=0, most=1) == 1:
        raise ValueError(f"plateau expects factor below 1, {meaning}; got {factor!r}")
    checks.integer("plateau", "patience", patience, "a number of evaluations")
    checks.number("plateau", "min_delta", min_delta, "the least improvement", least=0)
    checks.number("plateau", "min_ratio", min_ratio, "a fraction of the rate", least=0, most=1)
    checks.integer("plateau", "cooldown", cooldown, "a number of evaluations", least=0)
    checks.choice("plateau", "since", since, SINCE)

    def look(before: _Wait, record: Record) -> _Wait:
        if record.closing or key not in record.metrics:
            return before
        value, direction = record.metrics[key], mode_of("plateau", key, mode)
        resting = max(before.resting - 1, 0)
        margin = -min_delta if direction == "min" else min_delta
        reference = before.reference
        if reference is None or better(value, reference + margin, direction):
            return _Wait(before.ratio, value, 0, resting)
        if resting:
            return _Wait(before.ratio, reference, 0, resting)
        waited = (0 if before.resting else before.evaluations) + 1
        if waited < patience:
            return _Wait(before.ratio, reference, waited, 0)
        return _Wait(max(before.ratio * factor, min_ratio), reference, 0, cooldown)

    looked = Fold(look, _Wait())

    def wrap(step: Step) -> Step:
        def lowered(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            history = state.history
            if len(history) and key not in history[-1].metrics:
                check_monitored("plateau", key, state)
            ratio = looked(history, first_record(state.phases, since)).ratio
            groups = groups_in(state.optimizer)
            kept = keep_settings(groups)
            for group in groups:
                set_number(group, "lr", ratio, "plateau")
                group[RATIO] = ratio
            numbers = [group["lr"] for group in groups]
            try:
                new, out = step(state, batch)
            except BaseException:
                if owns_handles(state):  # nothing was updated, as where an update is left out
                    put_settings_back(kept, "lr", numbers)
                raise
            finally:
                for group in groups:
                    group.pop(RATIO, None)
            if out.skip is not None:
                put_settings_back(kept, "lr", numbers)
            return new, out

        return lowered

    loader = key.partition("/")[0]
    loaders = () if loader in ("train", "recent") else (loader,)
    return Middleware("plateau", step=wrap, check=_check, loaders=loaders)


def _check(listed: Sequence[Middleware]) -> None:
    for member in listed:
        if member.name.startswith("torch_scheduler"):
            raise ValueError(
                f"{member!r} sets the learning rate from the one before, which plateau would "
                "change: use schedule with plateau, or leave one out"
            )
