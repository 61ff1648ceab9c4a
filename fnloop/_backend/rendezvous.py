"""Let processes find each other when a job restarts (``torchrun --max-restarts``).

torchrun keeps one store for all attempts of a job on a host, and torch reads in it at which
addresses the processes of a group listen. A process of the second attempt would read the addresses
of the first, whose processes are dead. So the processes of an attempt first agree on a word, and
then use keys that begin with it. TORCHELASTIC_RESTART_COUNT cannot be that word, because each host
counts its own restarts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

__all__ = ["agree_on_attempt", "join_settings", "own_store"]

POLL_SECONDS = 0.01  # how long the first process sleeps between two looks at the store
RETRY_AFTER = timedelta(seconds=1)  # how long the others wait before they look again


def join_settings() -> dict[str, object]:
    """Return settings for ``init_process_group``: a store of this attempt, if one is needed."""
    if not _outlives_attempts() or dist.is_initialized():
        return {}
    store, rank, size = next(iter(dist.rendezvous("env://")))
    return {"store": own_store(store, rank, size), "rank": rank, "world_size": size}


def own_store(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Return a store without entries of earlier attempts. Every process must call this."""
    return (
        dist.PrefixStore(agree_on_attempt(store, rank, size), store)
        if _outlives_attempts()
        else store
    )


def _outlives_attempts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(
    store: dist.Store, rank: int, size: int, patience: timedelta = default_pg_timeout
) -> str:
    """Return a word that the processes of this attempt share, and those of no other.

    Each process writes a new random word. The first process answers each word that it finds with
    its own. Words of dead processes may be among them, but only a running process confirms the
    answer. When all have confirmed it, the first process writes so.

    Args:
        store: a store that all processes can read; it may contain words of earlier attempts.
        rank: the rank of this process.
        size: the number of processes.
        patience: how long to wait for the others.

    Raises:
        TimeoutError: some processes did not join in time.
    """
    store, mine = dist.PrefixStore("fnloop", store), secrets.token_hex(8)
    store.set(f"word of {rank}", mine)
    deadline = time.monotonic() + patience.total_seconds()
    return _lead(store, mine, size, deadline) if rank == 0 else _follow(store, mine, rank, deadline)


def _lead(store: dist.Store, mine: str, size: int, deadline: float) -> str:
    missing = [*range(1, size)]
    while missing:
        for rank in missing:
            if store.check([f"word of {rank}"]):
                store.set(f"answer to {store.get(f'word of {rank}').decode()}", mine)
        time.sleep(POLL_SECONDS)
        missing = [rank for rank in missing if not store.check([f"{mine} confirmed by {rank}"])]
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"the processes {missing} did not join process 0: find out what ended or delays "
                "them"
            )
    store.set(f"{mine} is complete", "")
    return mine


def _follow(store: dist.Store, mine: str, rank: int, deadline: float) -> str:
    while time.monotonic() < deadline:
        # After a timeout the answer may have changed.
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"answer to {mine}"], RETRY_AFTER)
            attempt = store.get(f"answer to {mine}").decode()
            store.set(f"{attempt} confirmed by {rank}", "")
            store.wait([f"{attempt} is complete"], RETRY_AFTER)
            return attempt
    raise TimeoutError(
        f"process {rank} has waited for all others to join: find out what ended or delays one of "
        "them"
    )
