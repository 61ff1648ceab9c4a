"""The error for what needs the length of a run, if that is unknown."""

from __future__ import annotations

from fnloop._core.state import TrainState

__all__ = ["explain_unknown_length"]


def explain_unknown_length(what: str, state: TrainState) -> str:
    """Return why the length of the run is unknown, and what to do about it.

    Args:
        what: what needs the length, such as "schedule(cosine())".
        state: a state of the run, or of a bare step.
    """
    if state.run is None:
        return (
            f"{what} needs the length of the run, which a bare step does not know: call fit(step, "
            "state, loaders, ...), or give every length in steps"
        )
    varies = state.run.batches_per_epoch is not None
    why = (
        "a batch makes an update for each of its windows"
        if varies
        else "the training loader has none"
    )
    return (
        f"{what} needs the length of the run, but {why}: call fit(step, state, loaders, steps=...)"
    )
