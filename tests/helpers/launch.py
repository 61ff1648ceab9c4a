"""Run a function in several processes on this machine, and collect its results.

A job is a function of a test file: ``job(folder, *arguments) -> plain data``. Both functions run it
in n processes, with the environment variables that torchrun sets. Importing torch takes seconds,
so a job does as much as it can.

``launch`` starts Python in each process, directly or through a launcher: for tests of how processes
begin and end. Each process runs this file as a script. ``results`` forks each process from one that
has imported torch: for tests of what a job computes. ``start_script`` forks a process that runs a
script, also for the seconds that importing torch takes.
"""

import contextlib
import importlib
import inspect
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

TORCHRUN = (
    *("-m", "torch.distributed.run", "--nproc-per-node", "{n}"),
    *("--master-addr", "127.0.0.1", "--master-port", "{port}"),
)
ACCELERATE = (  # --cpu would start one process; --multi_gpu starts all, which also run without GPUs
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "{n}"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("--main_process_port", "{port}"),
)

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([  # all that most jobs import, which takes a process 2 seconds
    *("accelerate", "mlxtend.data", "pytest", "torchmetrics"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("fnloop._extensions.checkpoints.restore", "fnloop._extensions.hooks.keep", "fnloop.testing"),
])  # fmt: skip


class Launched(NamedTuple):
    """How the processes ended."""

    codes: list[int]  # their exit statuses; by a launcher, that of the launcher alone
    results: list  # of the job by rank; None where it failed
    errors: list[str]  # what they wrote to stderr
    ended: list[float]  # when each of them ended, in seconds since the epoch


def launch(
    folder, n, job, *arguments, by=(), timeout=60, environment=None, kill_when=None, forked=False
):
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
        forked: whether processes are forked, and end without Python's handlers at exit.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    port, written = free_port(), json.dumps(arguments)
    children = []

    def start(rank):
        variables = _variables(0 if by else rank, 1 if by else n, port) | (environment or {})
        path, name = file_of(job), job.__name__
        if forked:
            what = variables, folder, path, name, json.loads(written)
            child = _Forked(target=_forked, args=(rank, *what))
            child.start()
            children.append(child)
            return
        launcher = (part.format(n=n, port=port) for part in by)
        command = [sys.executable, *launcher, __file__, path, name, str(folder), written]
        with (folder / f"{rank}.err").open("w") as file:
            output = {"stdout": file, "stderr": file}
            children.append(
                subprocess.Popen(command, env=variables, **output, start_new_session=True)
            )

    try:
        for rank in range(1 if by else n):
            start(rank)
        ended = _ends(children, time.monotonic() + timeout, Path(kill_when or "/nowhere"))
    finally:
        for child in children:
            _kill(child)
            child.wait()
    errors = [(folder / f"{rank}.err").read_text() for rank in range(len(children))]
    if ended is None:
        written = "\n---\n".join(errors)
        raise TimeoutError(f"{job.__name__} on {n} took more than {timeout} s:\n{written}")
    return Launched(
        [child.returncode for child in children],
        [_result(folder, rank) for rank in range(n)],
        errors,
        ended,
    )


def results(folder, n, job, *arguments, by=(), forked=True, **settings):
    """Run a job in n processes, all of which must succeed, and return their results."""
    found = launch(folder, n, job, *arguments, by=by, forked=forked and not by, **settings)
    assert not any(found.codes), f"{job.__name__} on {n}: {found.codes}\n" + "\n---\n".join(
        found.errors
    )
    return found.results


class _Forked(_forks.Process):
    """A forked process, with the methods of subprocess.Popen that are used here."""

    poll, wait = (lambda self: self.exitcode), _forks.Process.join
    returncode = property(lambda self: self.exitcode)


def _forked(rank, variables, folder, *what):
    """Run a job in this process, which was forked for it."""
    _begin(variables, folder / f"{rank}.err", folder / f"{rank}.err")
    run_here(folder, *what)


def _begin(variables, out, err):
    """Begin as a process that was started with these variables, which writes to these files."""
    os.setsid()
    for path, stream in ((err, sys.stderr), (out, sys.stdout)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)


def start_script(path, *arguments, written, environment=None, first=None):
    """Start a script in a forked process, where warnings are errors, and return the process.

    What it writes is in the files of ``written`` with the suffixes .out and .err. The function
    ``first``, which can be pickled, is called before the script.
    """
    variables = {**_variables(0, 1, 0), **(environment or {})}
    child = _Forked(target=_script, args=(str(path), arguments, variables, written, first))
    child.start()
    return child


def start_torchrun(*arguments, written, environment):
    """Start torchrun in a forked process, with all of its variables; ``written`` has its output."""
    child = _Forked(target=_torchrun, args=(arguments, environment, written))
    child.start()
    return child


def _torchrun(arguments, environment, written):
    """Run torchrun in this process, which was forked for it."""
    from torch.distributed import run

    _begin(environment, written, written)
    run.main(list(arguments))


def _script(path, arguments, variables, written, first):
    """Run a script in this process, which was forked for it."""
    _begin(variables, written.with_suffix(".out"), written.with_suffix(".err"))
    warnings.simplefilter("error")
    if first is not None:
        first()
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def file_of(job):
    """Return the path of the file that defines a job, which may be decorated."""
    return inspect.unwrap(job).__code__.co_filename


def name_of(job, n):
    """Return the name of the folder in which the fixture ``launched`` runs a job on n processes."""
    return f"{Path(file_of(job)).stem}-{job.__name__}-{n}"


def reads(job, counts):
    """Decorate a job that reads what another has written, which ``launched`` runs before it."""

    def decorate(reader):
        reader.reads = [(job, n) for n in counts]
        return reader

    return decorate


def written_by(job, n, folder):
    """Return the folder of a job that this one reads, given the folder of this one."""
    path = folder.with_name(name_of(job, n))
    assert path.is_dir(), f"{path.name} has not run: decorate the job with launch.reads"
    return path


def bare():
    """Return this process's environment without the variables of launchers."""
    left = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        k: v
        for k, v in os.environ.items()
        if k not in left and not k.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC"))
    }


def free_port():
    """Return a port below those that the system gives to connections of other tests meanwhile."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            return probe.getsockname()[1]


def alone():
    """Return the environment of a process without others."""
    return _variables(0, 1, 0)


def _variables(rank, n, port):
    """Return the environment of a process; of one of several as torchrun sets it."""
    found = {**bare(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if n > 1:
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        found |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    return found


def _kill(child):
    """Kill a process with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()  # it may not have a session of its own yet


def _ends(children, deadline, kill_when):
    """Wait for all to end, and return when each did; None after the deadline."""
    ended = {}
    while len(ended) < len(children):
        for child in children:
            if child.pid not in ended and child.poll() is not None:
                ended[child.pid] = time.time()
        if kill_when.exists():
            for child in children:  # stopped, they do not notice that others are killed before them
                if child.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGSTOP)
            for child in children:
                _kill(child)
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
