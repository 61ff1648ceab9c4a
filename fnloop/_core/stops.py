"""Why a run has ended before its target: values of ``TrainState.stop`` with a meaning."""

from __future__ import annotations

__all__ = [
    "INTERRUPTED",
    "JOB_LIMIT",
    "REQUEUED",
    "RUN_LIMIT",
    "TERMINATED",
    "ends_job",
    "ends_phase",
    "is_interruption",
]

INTERRUPTED, TERMINATED, REQUEUED = "interrupted", "SIGTERM", "SIGUSR1"
JOB_LIMIT, RUN_LIMIT = "time_limit: this job", "time_limit: the run"  # how these begin


def is_interruption(stop: str | None) -> bool:
    """Return whether a run has only ended for now: the same script, started again, continues it."""
    return stop in (INTERRUPTED, TERMINATED) or ends_job(stop)


def ends_job(stop: str | None) -> bool:
    """Return whether a run has only ended because the time of its job is over."""
    return stop is not None and (stop == REQUEUED or stop.startswith(JOB_LIMIT))


def ends_phase(stop: str | None) -> bool:
    """Return whether a phase that ends for this reason, or at its target, is done."""
    return stop is None or not (is_interruption(stop) or stop.startswith(RUN_LIMIT))
