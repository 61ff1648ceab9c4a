"""Run a function in several processes on this machine, and collect its results.

A job is a function of a test file: ``job(folder, *arguments) -> plain data``. Both functions run it
in n processes, with the environment variables that torchrun sets. Importing torch takes seconds,
so a job does as much as it can.

``launch`` starts Python in each process, directly or through a launcher: for tests of how processes
begin and end. Each process runs this file as a script. ``results`` forks each process from one that
has imported torch: for tests of what a job computes.
"""

import contextlib
import importlib
import json
import multiprocessing
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


_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["accelerate", "torchmetrics", "fnloop.testing"])


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
    children = []

    def start():
        for rank in range(1 if by else n):
            with (folder / f"{rank}.err").open("w") as file:
                variables = _variables(0 if by else rank, 1 if by else n, port)
                child = subprocess.Popen(
                    command,
                    env={**variables, **(environment or {})},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
                children.append(child)

    ended = _run(start, children, timeout, Path(kill_when or "/nowhere"))
    errors = [(folder / f"{rank}.err").read_text() for rank in range(len(children))]
    if ended is None:
        raise _too_long(job, n, timeout, errors)
    return Launched(
        [child.returncode for child in children],
        [_result(folder, rank) for rank in range(n)],
        errors,
        ended,
    )


def results(folder, n, job, *arguments, by=(), timeout=60, environment=None, forked=True):
    """Run a job in n processes, all of which must succeed, and return their results."""
    if by or not forked:
        found = launch(folder, n, job, *arguments, by=by, timeout=timeout, environment=environment)
        _check(found.codes, found.errors, job, n)
        return found.results
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    what = folder, job.__code__.co_filename, job.__name__, json.loads(json.dumps(arguments))
    children = []
    for rank in range(n):
        variables = {**_variables(rank, n, port), **(environment or {})}
        children.append(_Forked(target=_forked, args=(rank, variables, *what)))
    ended = _run(lambda: [child.start() for child in children], children, timeout)
    errors = [(folder / f"{rank}.err").read_text() for rank in range(n)]
    if ended is None:
        raise _too_long(job, n, timeout, errors)
    _check([child.returncode for child in children], errors, job, n)
    return [_result(folder, rank) for rank in range(n)]


class _Forked(_forks.Process):
    """A forked process, with the methods of subprocess.Popen that are used here."""

    poll = wait = lambda self: self.returncode
    returncode = property(lambda self: self.exitcode)


def _forked(rank, variables, folder, *what):
    """Run a job in this process, which was forked for it."""
    os.setsid()
    with (folder / f"{rank}.err").open("w") as written:
        os.dup2(written.fileno(), sys.stdout.fileno())
        os.dup2(written.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(variables)
    run_here(folder, *what)


def name_of(job, n):
    """Return the name of the folder in which the fixture ``launched`` runs a job on n processes."""
    return f"{Path(job.__code__.co_filename).stem}-{job.__name__}-{n}"


def written_by(job, n, folder):
    """Return the folder of another job that has run, given the folder of this one."""
    path = folder.with_name(name_of(job, n))
    assert path.is_dir(), f"{path.name} has not run"
    return path


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


def _variables(rank, n, port):
    """Return the environment of a process."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**bare(), **ours, **(by_hand(rank, n, port) if n > 1 else {})}


def _run(start, children, timeout, kill_when=Path("/nowhere")):
    """Start processes, wait for their ends, and return when each ended; None after the timeout."""
    try:
        start()
        return _ends(children, time.monotonic() + timeout, kill_when)
    finally:
        for child in children:
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _check(codes, errors, job, n):
    assert not any(codes), f"{job.__name__} on {n}: {codes}\n" + "\n---\n".join(errors)


def _too_long(job, n, timeout, errors):
    written = "\n---\n".join(errors)
    return TimeoutError(f"{job.__name__} on {n} took more than {timeout} s:\n{written}")


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


def run_here(folder, file, name, arguments):
    """Run a job in this process, and write its result."""
    found = getattr(importlib.import_module(Path(file).stem), name)(folder, *arguments)
    written = folder / f"{os.environ.get('RANK', '0')}.json"
    written.with_suffix(".part").write_text(json.dumps(found))
    written.with_suffix(".part").rename(written)


if __name__ == "__main__":
    run_here(Path(sys.argv[3]), sys.argv[1], sys.argv[2], json.loads(sys.argv[4]))
