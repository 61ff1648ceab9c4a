"""How processes were launched, and how they find each other.

Accelerate finds out how this process was launched (`torchrun`, `accelerate launch`, a notebook's
launcher) and what `accelerate config` says, and moves nested batches.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import secrets
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fnloop._extensions.engines import accelerated
from fnloop._extensions.engines.slurm import join_tasks
from fnloop.extend import Backend

log = logging.getLogger("fnloop")

_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16"}


# --- how this process was launched


def launched() -> bool:
    """Return whether this process is one of several, or was launched as such."""
    join_tasks()
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (
        dist.is_available() and dist.is_initialized()
    )


@functools.cache
def accelerator() -> accelerated.Accelerator:
    """Return accelerate's object for this process, which has joined the others."""
    made = accelerated.is_set_up()  # by the user, whose settings are kept
    cpu = not (made or torch.accelerator.is_available())
    choose_interface()
    engine = _is_set("ACCELERATE_USE_DEEPSPEED")  # joins the processes itself; refused later
    if not (made or engine) and (settings := join_settings()):
        accelerated.set_up(cpu or _is_set("ACCELERATE_USE_CPU"), **settings)
    found = accelerated.new_accelerator(cpu)
    check_joined(found)
    return found


def check_joined(found: accelerated.Accelerator) -> None:
    """Raise RuntimeError if accelerate is set up for one process, and this is one of several."""
    if found.num_processes > 1 or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    said = "Write Accelerator(cpu=True) where there is no GPU, or leave it to TrainState.create"
    if "SLURM_PROCID" in os.environ:
        said = (
            "Accelerate does not read what srun says: leave it to TrainState.create, or write "
            "srun --export=ALL,WORLD_SIZE=1 for a run of its own in each task"
        )
    raise RuntimeError(
        f"this process is one of WORLD_SIZE={os.environ['WORLD_SIZE']}, but this script has set up "
        f"accelerate for a single process. {said}"
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes", "y", "on", "t")


def backend_of(accelerator: accelerated.Accelerator) -> Backend:
    """Return the backend that an accelerator describes.

    Raises:
        NotImplementedError: it is configured for something that fnloop does not support.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    fsdp1 = kind == "FSDP" and not accelerator.is_fsdp2
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or fsdp1:
        raise NotImplementedError(
            f"accelerate is configured for {'FSDP 1' if fsdp1 else kind}, which runs backward "
            "and the update itself, so that middleware cannot see gradients. For models that do "
            "not fit on one device, use FSDP 2 (accelerate config, fsdp_version: 2), or torch's "
            "fully_shard"
        )
    if kind == "MULTI_CPU" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise NotImplementedError(
            "accelerate is configured for FSDP, which it ignores where there is no GPU: call "
            "torch's fully_shard(model), which works there too, before you create the optimizer"
        )
    precision = _PRECISIONS.get(accelerator.mixed_precision)
    if precision is None and accelerator.mixed_precision != "no":
        raise NotImplementedError(
            f"accelerate is configured for mixed_precision={accelerator.mixed_precision!r}; fnloop "
            "supports bf16 and fp16"
        )
    # Tensors on the CPU have a device without an index.
    device = accelerator.device if accelerator.device.type != "cpu" else "cpu"
    settings, prepare, handler = {}, None, accelerator.ddp_handler
    if handler is not None:
        settings, prepare = handler.to_kwargs(), handler.register_comm_hook
    rank, size = accelerator.process_index, accelerator.num_processes
    return Backend(device, rank, size, precision, settings=settings, prepare=prepare)


# --------------------------------------------------------------------------------------------------
# Let processes find each other: when a job restarts, and on several machines.
#
# *Restarts* (`torchrun --max-restarts`). torchrun keeps one store for all attempts of a job on a
# host, and torch reads in it at which addresses the processes of a group listen. A process of the
# second attempt would read the addresses of the first, whose processes are dead. So the processes
# of an attempt first agree on a word, and then use keys that begin with it.
# TORCHELASTIC_RESTART_COUNT cannot be that word, because each host counts its own restarts.
#
# *Machines.* Gloo listens at the address that the name of a machine has there. In many `/etc/hosts`
# that is a loopback address, which no other machine can reach.

POLL_SECONDS = 0.01  # how long the first process sleeps between two looks at the store
RETRY_AFTER = timedelta(seconds=1)  # how long the others wait before they look again


INTERFACE = "GLOO_SOCKET_IFNAME"  # what gloo reads
_ANY_PORT = 9  # nothing is sent


def choose_interface() -> None:
    """Let gloo use the network interface that reaches the first machine, where it would not."""
    here, all_ = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    first = os.environ.get("MASTER_ADDR")
    if INTERFACE in os.environ or all_ <= here or not first:
        return
    if all(map(_is_loopback, _addresses(first))) or not _is_unreachable(socket.gethostname()):
        return
    if (found := _interface_to(first)) is None:
        log.warning(
            "the name of this machine, %s, has no address that other machines can reach, and gloo "
            "would listen there: name the network interface between the machines, %s=eth0 torchrun "
            "...",
            *(socket.gethostname(), INTERFACE),
        )
        return
    os.environ[INTERFACE] = found


def _addresses(host: str) -> list[str]:
    try:
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None)]
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_unreachable(name: str) -> bool:
    """Return whether other machines cannot reach what listens at the name of this machine.

    Like gloo, it takes the first address that this machine has; without any, a loopback address.
    """
    for address in _addresses(name):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return _is_loopback(address)
    return True


def _interface_to(host: str) -> str | None:
    """Return the name of the network interface over which a host is reached, if it is known."""
    from psutil import net_if_addrs  # accelerate needs it too

    try:
        family = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in net_if_addrs().items():
        if any(known.address.partition("%")[0] == own for known in addresses):
            return name
    return None


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
    confirmed = None
    while time.monotonic() < deadline:
        # After a timeout the answer may have changed.
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"answer to {mine}"], RETRY_AFTER)
            attempt = store.get(f"answer to {mine}").decode()
            # It also changes if the first process is done, and already agrees on the next word.
            if confirmed not in (None, attempt) and store.check([f"{confirmed} is complete"]):
                return confirmed
            confirmed = attempt
            store.set(f"{attempt} confirmed by {rank}", "")
            store.wait([f"{attempt} is complete"], RETRY_AFTER)
            return attempt
    raise TimeoutError(
        f"process {rank} has waited for all others to join: find out what ended or delays one of "
        "them"
    )
