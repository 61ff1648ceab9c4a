"""The tasks of ``srun python train.py`` are the processes of one run."""

import json
import subprocess
import sys

import launch
import pytest
import torch
from accelerate import Accelerator
from joined import said
from process_data import loader
from process_problems import created, entropy

import fnloop as fl
from fnloop._extensions.engines.slurm import first_of, launch_variables

# What srun sets in the second of two tasks on one machine, of a job of two machines.
TASK = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2", "ENVIRONMENT": "BATCH",
}  # fmt: skip
BY_HAND = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "15007",
}  # fmt: skip


def without(names, given=TASK):
    return {name: value for name, value in given.items() if name not in names.split()}


OF_STEP = "SLURM_STEP_ID SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES "
OF_STEP += "SLURM_STEP_TASKS_PER_NODE"
NO_STEP = without(OF_STEP)
ON_TWO = TASK | {
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "n[3-5]", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip
JOINED = {
    "two tasks on a machine": (TASK, {}),
    "srun in a shell of salloc": (TASK | {"SLURM_JOB_NAME": "interactive"}, {}),
    "the number of the job alone": (without("ENVIRONMENT", NO_STEP) | {"SLURM_NNODES": "1"}, {}),
    "the second step of a job": (TASK | {"SLURM_STEP_ID": "1"}, {"MASTER_PORT": "16016"}),
    "three machines": (ON_TWO, {
        "RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "n3",
    }),
    "an address that is exported": (
        TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    ),
}  # fmt: skip
ALONE = {
    "no job": {},
    "the script of a job, without srun": NO_STEP | {"SLURM_PROCID": "0"},
    "a shell of salloc on a machine of the job": TASK
    | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"},
    "a shell of salloc on the first machine": without("SLURM_PROCID", NO_STEP),
    "a shell of an old salloc": without("ENVIRONMENT", NO_STEP) | {"SLURM_JOB_NAME": "bash"},
    "one task": TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "torchrun in each task": TASK | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
    "a run of its own in each task": TASK | {"WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("name", JOINED)
def test_tasks_of_srun_get_the_variables_of_a_launcher(name):
    given, others = JOINED[name]
    assert launch_variables(given) == BY_HAND | others


@pytest.mark.parametrize("name", ALONE)
def test_what_is_alone_in_a_job_stays_as_it_is(name):
    assert launch_variables(ALONE[name]) == {}


def test_tasks_whose_machines_are_not_known_are_refused():
    given = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    with pytest.raises(RuntimeError, match=r"task 1 of 2, but .* export MASTER_ADDR"):
        launch_variables(given)
    assert launch_variables(given | {"MASTER_ADDR": "n1"})["MASTER_ADDR"] == "n1"


@pytest.mark.parametrize(("nodes", "first"), [
    ("n1", "n1"), ("n1,n2", "n1"), ("n[07-09,12],m1", "n07"), ("n[3,5]", "n3"),
    ("r[1-2]n[3,5]-ib,m1", "r1n3-ib"), ("m1,n[1-2]", "m1"), ("", ""),
])  # fmt: skip
def test_the_first_machine_of_a_list(nodes, first):
    assert first_of(nodes) == first


# --- two tasks on this machine


def tasks(folder, job, **others):
    """Run a job as two tasks of srun, and return the result of each process that wrote one."""
    folder.mkdir()
    what = [launch.file_of(job), job.__name__, str(folder), "[]"]
    port = {"SLURM_JOB_ID": str(launch.free_port() - 15_000)}
    started = [
        subprocess.Popen(
            [sys.executable, launch.__file__, *what],
            env=launch.alone()
            | TASK
            | port
            | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            | others,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=100)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def trained(folder):
    state, hooks = created(), (fl.every(epochs=1)(fl.checkpoint(folder / "saved")),)
    loaders = {"train": loader(shuffle=True), "valid": loader(size=7)}
    state = fl.fit(fl.pipeline(fl.clip(0.5))(entropy), state, loaders, epochs=2, hooks=hooks)
    weights = [p.double().sum().item() for p in state.model.parameters()]
    where = state.backend.rank, state.backend.world_size, state.backend.main
    return [*where, state.step, weights, [*state.history["valid/loss"]]]


def counted(folder):
    """Return the number of processes, asked for before there is a state."""
    return fl.reduce(torch.ones(()), "sum").item()


def with_accelerator(folder):
    model = torch.nn.Linear(1, 1)
    sgd, own = torch.optim.SGD(model.parameters(), 0.1), Accelerator(cpu=False)
    return said(lambda: fl.TrainState.create(model, sgd, backend=own))


@pytest.mark.slow
def test_two_tasks_train_as_two_processes_of_torchrun(tmp_path):
    found = tasks(tmp_path / "slurm", trained)
    assert found == launch.results(tmp_path / "torchrun", 2, trained)
    assert [each[:3] for each in found] == [[0, 2, True], [1, 2, False]]


@pytest.mark.slow
def test_tasks_are_joined_by_a_collective_and_are_alone_where_they_are_told_so(tmp_path):
    assert tasks(tmp_path / "both", counted) == [2.0, 2.0]
    assert tasks(tmp_path / "alone", counted, WORLD_SIZE="1") == [1.0]  # both wrote one file


@pytest.mark.slow
def test_an_accelerator_that_does_not_know_of_the_tasks_is_refused(tmp_path):
    for text in tasks(tmp_path / "given", with_accelerator):
        assert "accelerate for a single process. Accelerate does not read what srun says" in text
