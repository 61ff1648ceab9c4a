"""Agents of torchrun, one for each machine of a job, which tests start and kill.

An agent and its processes stand for a machine: ``kill`` ends all of them at once. The store in
which they meet is in this process, because torchrun's own ends with the agent that holds it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch
import torch.distributed as dist

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
# Quick to notice that an agent has gone, and that no other one comes.
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=300"


class Agent:
    """An agent, which runs a job on a folder; its output is in the file ``written``."""

    def __init__(self, written, command, job, folder, environment=None):
        path, name = launch.file_of(job), job.__name__
        self.written = Path(written)
        variables = {**launch.alone(), **(environment or {})}
        what = (*command, launch.__file__, path, name, str(folder), "[]")
        if command[0] == sys.executable:
            self.process = launch.start_torchrun(
                *what[3:], written=self.written, environment=variables
            )
            return
        with self.written.open("ab") as file:
            output = {"stdout": file, "stderr": file}
            self.process = subprocess.Popen(what, env=variables, **output, start_new_session=True)

    def workers(self):
        """Return the numbers of its processes; the kernel forgets them when the agent ends."""
        return descendants(self.process.pid)

    def kill(self):
        """Kill it and its processes, as when a machine fails."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)  # so that it starts no other
        for pid in (*self.workers(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(pid):
    """Return the numbers of the processes that a process has started, and of those these have."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


class Elastic:
    """A job on 1 to ``most`` machines, which come and go."""

    def __init__(self, folder, job, most):
        self.folder, self.job = Path(folder), job
        self.folder.mkdir(parents=True)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.command = (
            *TORCHRUN,
            *("--nnodes", f"1:{most}", "--max-restarts", "1000", "--monitor-interval", "0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store.port}"),
            *("--rdzv-conf", f"is_host=0,{QUICK}", "--local-addr", "127.0.0.1"),
        )
        self.running: list[Agent] = []
        self.started = 0

    def add(self):
        self.started += 1
        written = self.folder / f"agent-{self.started}.err"
        shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.running.append(Agent(written, self.command, self.job, self.folder, environment=shared))

    def kill(self, n):
        self.running.pop(n).kill()

    def kill_process(self, n):
        """Kill the training process of a machine, whose agent starts another one."""
        for pid in self.running[n].workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ended(self):
        return all(agent.process.poll() is not None for agent in self.running)

    def wait(self, until, seconds):
        """Wait until a function returns true; raise if that takes too long, or the job ends."""
        deadline = time.monotonic() + seconds
        while not until():
            if time.monotonic() > deadline or self.ended():
                raise TimeoutError(self.output())
            time.sleep(0.05)

    def output(self):
        """Return the end of what each agent has written."""
        return "\n---\n".join(
            f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("agent-*.err")
        )

    def close(self):
        while self.running:
            self.kill(-1)
