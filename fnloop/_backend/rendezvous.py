"""How processes find each other when a job restarts (``torchrun --max-restarts``).

torchrun keeps one store over all attempts of a job on a host, and torch reads in it where the processes of a group listen. A
process of the second attempt would read where those of the first listened, which are dead. So the processes of an attempt agree
on a word first, and then use keys that begin with it. TORCHELASTIC_RESTART_COUNT cannot be that word: each host counts its own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

__all__ = ["agree_on_attempt", "join_settings", "own_store"]

PAUSE = 0.01  # seconds between two looks of the first process
LOOK = timedelta(seconds=1)  # that the others wait before they look again


def join_settings() -> dict[str, Any]:
    """Return settings for ``init_process_group``: a store of this attempt if torchrun keeps one over attempts, else none."""
    if not _outlives_attempts() or dist.is_initialized():
        return {}
    store, rank, size = next(iter(dist.rendezvous("env://")))
    return {"store": own_store(store, rank, size), "rank": rank, "world_size": size}


def own_store(store: Any, rank: int, size: int) -> Any:
    """Return a store that no process of an earlier attempt has written to. Every process has to call it."""
    return (
        dist.PrefixStore(agree_on_attempt(store, rank, size), store)
        if _outlives_attempts()
        else store
    )


def _outlives_attempts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agree_on_attempt(
    store: Any, rank: int, size: int, patience: timedelta = default_pg_timeout
) -> str:
    """Return a word that the running processes share, and no process of another attempt.

    Each process leaves a new random word of its own. The first process answers each word that it finds with its own one. A word
    of a dead process may be among them, but only a running one confirms the answer; when all have, the first says so.

    Args:
        store: what all processes can read; with words of earlier attempts in it, perhaps.
        rank: the number of this process.
        size: how many there are.
        patience: how long to wait for the others.

    Raises:
        TimeoutError: some processes did not come.
    """
    store, mine = dist.PrefixStore("fnloop", store), secrets.token_hex(8)
    store.set(f"word of {rank}", mine)
    deadline = time.monotonic() + patience.total_seconds()
    return _lead(store, mine, size, deadline) if rank == 0 else _follow(store, mine, rank, deadline)


def _lead(store: Any, mine: str, size: int, deadline: float) -> str:
    missing = [*range(1, size)]
    while missing:
        for rank in missing:
            if store.check([f"word of {rank}"]):
                store.set(f"answer to {store.get(f'word of {rank}').decode()}", mine)
        time.sleep(PAUSE)
        missing = [rank for rank in missing if not store.check([f"{mine} confirmed by {rank}"])]
        if missing and time.monotonic() > deadline:
            raise TimeoutError(
                f"the processes {missing} did not come to join process 0: look for what ended or holds them"
            )
    store.set(f"{mine} is complete", "")
    return mine


def _follow(store: Any, mine: str, rank: int, deadline: float) -> str:
    while time.monotonic() < deadline:
        with contextlib.suppress(
            dist.DistStoreError
        ):  # a wait that timed out: the answer may be another one by now
            store.wait([f"answer to {mine}"], LOOK)
            attempt = store.get(f"answer to {mine}").decode()
            store.set(f"{attempt} confirmed by {rank}", "")
            store.wait([f"{attempt} is complete"], LOOK)
            return attempt
    raise TimeoutError(
        f"process {rank} has waited for all others to join it: look for what ended or holds one of them"
    )
