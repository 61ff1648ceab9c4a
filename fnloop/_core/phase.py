"""The phases of a run: stretches with a name, which share one history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from fnloop._display import checks

__all__ = ["SINCE", "Phase", "decode_phases", "encode_phases", "first_record", "unfinished"]


@attrs.frozen
class Phase:
    """A stretch of a run, begun by ``fit(..., phase=name)``.

    Args:
        name: its name.
        step: ``state.step`` when it began.
        epoch: ``state.epoch`` when it began.
        records: how many records the history had then.
        stop: why it ended before its target, as a hook said; or None.
        done: whether it has ended, at its target or by a hook.
        skipped: ``state.skipped`` when it began.
        updates: ``state.updates`` when it began.
        named: whether a ``fit`` of this program has named it, since the state was restored. It is
            not saved, and does not matter to ``==``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 5
        >>> state = fl.fit(step, toy(), batches, epochs=2, hooks=(), phase="head")
        >>> state = fl.fit(step, state, batches, epochs=1, hooks=(), phase="all")
        >>> state.step, state.phases[1]
        (15, Phase(name='all', step=10, epoch=2, records=2, stop=None, done=True))
    """

    name: str
    step: int
    epoch: int
    records: int
    stop: str | None = None
    done: bool = False
    skipped: int = attrs.field(default=0, repr=False)
    updates: Mapping[str, int] = attrs.field(factory=dict, repr=False)
    named: bool = attrs.field(default=False, repr=False, eq=False)


def unfinished(phases: Sequence[Phase]) -> Phase | None:
    """Return the phase that has begun and has not ended; None if there is none."""
    return phases[-1] if phases and not phases[-1].done else None


SINCE = ("phase", "run")


def first_record(phases: Sequence[Phase], since: str) -> int:
    """Return the index of the first record of the newest phase, or of the run."""
    return phases[-1].records if phases and since == "phase" else 0


def encode_phases(phases: Sequence[Phase]) -> list[dict[str, object]]:
    """Return phases as JSON."""
    fields = attrs.filters.exclude(attrs.fields(Phase).named)
    return [attrs.asdict(phase, filter=fields) for phase in phases]


def decode_phases(saved: object) -> tuple[Phase, ...]:
    """Return phases from JSON.

    Raises:
        TypeError, ValueError: they were not written by :func:`encode_phases`.
    """
    if not isinstance(saved, list):
        raise TypeError(f"phases is {saved!r:.60}")
    return tuple(map(_decode, saved))


def _decode(saved: object) -> Phase:
    if not isinstance(saved, Mapping):
        raise TypeError(f"a phase is {saved!r:.60}")
    phase = Phase(**{**saved, "named": False})
    checks.text("Phase", "name", phase.name, "its name")
    counts = {name: getattr(phase, name) for name in ("step", "epoch", "records", "skipped")}
    for name, count in (*counts.items(), *phase.updates.items()):
        checks.integer("Phase", name, count, "a number", least=0)
    if type(phase.done) is not bool or not isinstance(phase.stop, str | None):
        raise TypeError(f"a phase is {saved!r:.60}")
    return phase
