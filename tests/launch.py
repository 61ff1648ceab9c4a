"""Run a function in several processes on this machine, and collect its results.

A job is a function of a test file: ``job(folder, *arguments) -> plain data``. ``launch`` runs it in
n processes, with the environment variables that torchrun sets, or through a launcher. Each process
runs this file as a script. Importing torch takes seconds, so a job does as much as it can.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "{n}",
    "--master-addr",
    "127.0.0.1",
    "--master-port",
    "{port}",
)
ACCELERATE = (
    *(
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "{n}",
        "--num_machines",
        "1",
    ),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"),
)  # --cpu would start one process; --multi_gpu starts all, which also run without GPUs


class Launched(NamedTuple):
    """How the processes ended.

    Args:
        codes: their exit statuses; by a launcher, that of the launcher alone.
        results: the results of the job by rank; None where it failed.
        errors: what they wrote to stderr.
        ended: when each of them ended, in seconds since the epoch.
    """

    codes: list[int]
    results: list
    errors: list[str]
    ended: list[float]


def launch(folder, n, job, *arguments, by=(), timeout=60, environment=None, kill_when=None):
    """Run a job in n processes.

    Args:
        folder: for its files; the first argument of the job.
        n: the number of processes.
        job: a function at the top of a file.
        arguments: of the job, what JSON can hold.
        by: arguments of Python that start a launcher; none to start each process separately.
        timeout: seconds after which all are killed, and their output is raised.
        environment: more variables.
        kill_when: a path; when it exists, all processes are killed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    run = [__file__, job.__code__.co_filename, job.__name__, str(folder), json.dumps(arguments)]
    command = [sys.executable, *(part.format(n=n, port=port) for part in by), *run]
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    children = []
    try:
        for rank in range(1 if by else n):
            launched = {} if by or n == 1 else by_hand(rank, n, port)
            with (folder / f"{rank}.err").open("w") as file:
                children.append(
                    subprocess.Popen(
                        command,
                        env={**bare(), **ours, **launched},
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )
        ended = _ends(children, time.monotonic() + timeout, Path(kill_when or "/nowhere"))
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    errors = [(folder / f"{rank}.err").read_text() for rank in range(len(children))]
    if ended is None:
        raise TimeoutError(
            f"{job.__name__} on {n} took more than {timeout} s:\n" + "\n---\n".join(errors)
        )
    return Launched(
        [child.returncode for child in children],
        [_result(folder, rank) for rank in range(n)],
        errors,
        ended,
    )


def results(folder, n, job, *arguments, **settings):
    """Run a job in n processes, all of which must succeed, and return their results."""
    launched = launch(folder, n, job, *arguments, **settings)
    assert not any(launched.codes), f"{job.__name__} on {n}: {launched.codes}\n" + "\n---\n".join(
        launched.errors
    )
    return launched.results


def bare():
    """Return this process's environment without the variables of launchers."""
    left = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        k: v
        for k, v in os.environ.items()
        if k not in left and not k.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC"))
    }


def by_hand(rank, n, port):
    """Return the environment variables that torchrun sets."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_PORT": port,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ends(children, deadline, kill_when):
    """Wait for all to end, and return when each did; None after the deadline."""
    ended = {}
    while len(ended) < len(children):
        for child in children:
            if child.pid not in ended and child.poll() is not None:
                ended[child.pid] = time.time()
        if kill_when.exists():
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)
    return [ended[child.pid] for child in children]


def _result(folder, rank):
    path = folder / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


if __name__ == "__main__":
    file, name, folder, arguments = sys.argv[1:]
    found = getattr(importlib.import_module(Path(file).stem), name)(
        Path(folder), *json.loads(arguments)
    )
    written = Path(folder) / f"{os.environ.get('RANK', '0')}.json"
    written.with_suffix(".part").write_text(json.dumps(found))
    written.with_suffix(".part").rename(written)
