"""What one of several processes gets of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fnloop._backend.launch import Backend
from fnloop._core.rng import HostGenerators
from fnloop._core.serialize import Json
from fnloop._display.log import log

__all__ = ["own_generators", "own_metrics", "warn_of_exact"]


def own_generators(
    generators: Sequence[HostGenerators | None], backend: Backend
) -> HostGenerators | None:
    """Return the generators of this process if the number of processes is unchanged.

    Otherwise only the main process continues its stream, and the others begin new ones.
    """
    if backend.data_rank == 0 or len(generators) == backend.data_size:
        return generators[backend.data_rank] if generators else None
    return None


def own_metrics(
    merged: dict[str, object], shares: Sequence[dict[str, object]], backend: Backend
) -> dict[str, object]:
    """Return the metrics of this process if the number of processes is unchanged.

    Otherwise the main process continues with those of all processes together. With ``exact=True``,
    every process does.
    """
    if backend.exact:
        return merged
    if len(shares) == backend.data_size:
        return shares[backend.data_rank]
    return merged if backend.data_rank == 0 else {}


def warn_of_exact(facts: Mapping[str, Json], backend: Backend) -> None:
    """Warn if a run continues with another setting of ``exact`` than it had."""
    was = facts.get("exact", False) is True
    if was == backend.exact or not backend.main:
        return
    if was:
        log.warning(
            "restore: this run had exact=True, and continues without: from here on, its bits "
            "depend on the number of processes. Write TrainState.create(..., exact=True)"
        )
    else:
        log.warning(
            "restore: this run had no exact=True until here, so what it has come to depends on the "
            "number of processes that it had"
        )
