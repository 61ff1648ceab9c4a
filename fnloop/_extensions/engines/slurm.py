"""Tasks of SLURM: ``srun python train.py`` starts the processes of one run, as a launcher does.

srun says in its variables which task this is, and on which machines the others are. torch and
accelerate read other variables, which torchrun sets. They are derived from those of srun.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist

log = logging.getLogger("fnloop")

# Names of jobs that are a shell. Where srun has not said how many tasks it has started, what runs
# there was typed, or is a line of the script of the job.
_SHELLS = ("bash", "sh", "zsh", "interactive")
_FIRST_PORT, _PORTS = 15_000, 15_000  # below those that systems give to connections


def join_tasks() -> None:
    """Set the variables of a launcher, if srun has started this process as one of several."""
    if "SLURM_PROCID" not in os.environ or (dist.is_available() and dist.is_initialized()):
        return
    if not (found := launch_variables(os.environ)):
        return
    local, devices = int(found["LOCAL_RANK"]), torch.accelerator.device_count()
    if 0 < devices <= local:  # each task sees its own alone, as with --gpus-per-task
        found["LOCAL_RANK"] = str(local % devices)
    os.environ.update(found)
    log.info(
        "SLURM: this is task %s of %s, which train together; for a run of its own in each task, "
        "write srun --export=ALL,WORLD_SIZE=1 python ...",
        *(found["RANK"], found["WORLD_SIZE"]),
    )


def launch_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would have set in this task of SLURM.

    There are none if this is not a task, or one that is alone: in a shell of ``salloc``, or in the
    script of a job. There are none either if a launcher has set them, or ``WORLD_SIZE`` is another
    number than that of the tasks.

    Args:
        given: the environment.

    Raises:
        RuntimeError: the first machine is not known.
    """
    tasks, rank = _tasks(given), given.get("SLURM_PROCID", "")
    if tasks < 2 or not rank.isdecimal() or {"RANK", "LOCAL_RANK"} & given.keys():
        return {}
    if given.get("WORLD_SIZE", str(tasks)) != str(tasks):
        return {}
    here = _tasks_here(given, tasks)
    if not (first := given.get("MASTER_ADDR") or ("127.0.0.1" if here == tasks else "")):
        first = first_of(_either(given, "STEP_NODELIST", "JOB_NODELIST", "NODELIST"))
    if not first:
        raise RuntimeError(
            f"srun has started this process as task {rank} of {tasks}, but SLURM_JOB_NODELIST does "
            "not say on which machines: export MASTER_ADDR, the name of the first one, before srun"
        )
    job = _number(_either(given, "JOB_ID", "JOBID"))
    port = _FIRST_PORT + (job + 1_009 * _number(_either(given, "STEP_ID", "STEPID"))) % _PORTS
    found = {"RANK": rank, "WORLD_SIZE": str(tasks)}
    found |= {"LOCAL_RANK": given.get("SLURM_LOCALID", rank), "LOCAL_WORLD_SIZE": str(here)}
    return found | {"MASTER_ADDR": first, "MASTER_PORT": given.get("MASTER_PORT", str(port))}


def first_of(nodes: str) -> str:
    """Return the first name of a list of machines, as SLURM writes it.

    Example:
        >>> first_of("n[07-09,12],m1"), first_of("r[1-2]n[3,5]-ib,m1"), first_of("m1,n[1-2]")
        ('n07', 'r1n3-ib', 'm1')
    """
    one = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", one[0] if one else "")


def _tasks(given: Mapping[str, str]) -> int:
    """Return how many tasks run this program."""
    if of_step := given.get("SLURM_STEP_NUM_TASKS"):  # srun has set it, and only srun does
        return _number(of_step)
    if given.get("ENVIRONMENT") == "BATCH" or given.get("SLURM_JOB_NAME") in _SHELLS:
        return 1
    return _number(_either(given, "NTASKS", "NPROCS"))


def _tasks_here(given: Mapping[str, str], tasks: int) -> int:
    """Return how many of the tasks are on this machine."""
    if _number(_either(given, "STEP_NUM_NODES", "JOB_NUM_NODES", "NNODES")) == 1:
        return tasks
    counts: list[int] = []
    for part in _either(given, "STEP_TASKS_PER_NODE", "TASKS_PER_NODE").split(","):  # 2(x3),1
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(found[1])] * int(found[2] or 1)
    node = _number(given.get("SLURM_NODEID", ""))
    if node < len(counts):
        return counts[node]
    nodes = _either(given, "STEP_NODELIST", "JOB_NODELIST", "NODELIST")
    return tasks if nodes and not re.search(r"[,\[]", nodes) else 1


def _either(given: Mapping[str, str], *names: str) -> str:
    """Return the first of these variables of SLURM that is set, or ""."""
    return next((given[f"SLURM_{name}"] for name in names if given.get(f"SLURM_{name}")), "")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
