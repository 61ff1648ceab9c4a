"""The public collectives, and what is refused when there are several processes."""

import math
from functools import partial
from pathlib import Path

import launch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from process_problems import (
    SIZE,
    batches,
    created,
    entropy,
    fitted,
    loader,
    rank,
    said,
    samples,
    world,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
)

import fnloop as fl

pytestmark = pytest.mark.slow


def exchange(folder):
    """Use the collectives, and type what is wrong: what comes of it."""
    tensor, me = torch.arange(rank() + 1), fl.Mean(float(rank()), 1)
    found = {
        "gather": tree(
            fl.gather({"t": tensor, "deep": [(torch.tensor(2.0), rank())], "name": "a" * rank()})
        ),
        "rows": tree(fl.gather(torch.full((rank(), 2), rank()))),
        "long": fl.gather("a" * 1500 * rank()),
        "mean": tree(fl.reduce([torch.tensor([1.0, rank()]), rank(), {"m": me}])),
        "max": tree(fl.reduce((torch.tensor(rank()), -rank()), "max")),
        "int mean": tree(fl.reduce(torch.tensor(rank()))),
        "broadcast": tree(fl.broadcast({"rank": rank(), "t": tensor}, source=world() - 1)),
        "running": fl.reduce(fitted(loader(), steps=2).metrics)["loss"].compute(),
    }
    wrong = {
        "structures": lambda: fl.gather([1] * (rank() + 1)),
        "keys": lambda: fl.gather({f"k{rank()}": 1}),
        "kinds": lambda: fl.reduce(1 if rank() else torch.ones(1)),
        "how": lambda: fl.reduce(1, "median"),
        "text": lambda: fl.reduce("a"),
        "source": lambda: fl.broadcast(1, source=world()),
        "sampler": lambda: fitted(DataLoader(samples(), sampler=DistributedSampler(samples()))),
        "prepared": lambda: fitted(Accelerator(cpu=True).prepare(loader())),
        "backend": lambda: created(backend=3),
        "partly sharded": lambda: created(shard=lambda model: fully_shard(model[0])),
        "small mesh": lambda: created(shard=lambda model: fully_shard(model, mesh=replicas())),
        "main only": lambda: fl.on_main(fl.checkpoint(folder / "never")),
        "snapshot": lambda: fl.snapshot(created(shard=fully_shard)),
        "no batch": lambda: fitted([]),
        "all dropped": lambda: fitted(loader(size=30, drop_last=True)),
        "weights of its own": lambda: fitted(loader(), hooks=(moving,)),
        "order of its own": lambda: fitted(loader(sampler=Unseeded())),
        "evaluated in its own order": lambda: fl.evaluate(
            fl.pipeline()(entropy), created(), loader(sampler=Unseeded())
        ),
        "predicted in its own order": lambda: [
            *fl.predict(lambda model, batch: 0, created(), loader(sampler=Unseeded()))
        ],
        "one tensor again and again": lambda: fitted(refilled),
        "lazy": lambda: fl.TrainState.create(
            lazy := nn.LazyLinear(3), torch.optim.SGD(lazy.parameters(), lr=0.1)
        ),
        "nothing to evaluate": lambda: fl.evaluate(fl.pipeline()(entropy), created(), []),
        "no folder": lambda: fl.save(created(), Path(__file__) / "checkpoint"),
        "fit": lambda: fitted(batches(3)).step,  # after all that, it still works
    }
    return {**found, **{name: said(do) for name, do in wrong.items()}}


def moving(state):
    """Change a weight by something else in every process."""
    with torch.no_grad():
        state.model[2].bias += 0.01 * rank() if state.step == 3 else 0
    return state


def refilled():
    """Yield each batch in the same memory, as one may with one process."""
    x = torch.empty(2, 6)
    for n in range(9):
        yield x.fill_(n), torch.zeros(2, dtype=torch.int64)


class Unseeded(Sampler):
    """Draws from a generator that fnloop cannot know of, with another seed in every process."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(np.random.default_rng(rank()).permutation(SIZE))


def replicas():
    """Return this process's row of a mesh of all processes by one."""
    return dist.device_mesh.init_device_mesh("cpu", (world(), 1), mesh_dim_names=("all", "one"))[
        "one"
    ]


def tree(found):
    if isinstance(found, dict):
        return {k: tree(v) for k, v in found.items()}
    if isinstance(found, list | tuple):
        return [tree(v) for v in found]
    return (
        found.tolist()
        if isinstance(found, torch.Tensor)
        else found.compute()
        if hasattr(found, "compute")
        else found
    )


def spread(folder):
    """Create states of models that are sharded over four processes; return the results."""
    mesh = partial(dist.device_mesh.init_device_mesh, "cpu")
    created()  # joins the processes
    grid = mesh((2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def both(model):
        fully_shard(parallelize_module(model, grid["tensor"], plan), mesh=grid["data"])

    ways = {
        "tensor and data": both,
        "tensor": lambda model: parallelize_module(model, mesh((4,)), plan),
        "data": fully_shard,
        "data in two groups": lambda model: fully_shard(
            model, mesh=mesh((2, 2), mesh_dim_names=("replicate", "shard"))
        ),
    }
    return {name: said(lambda shard=shard: created(shard).step) for name, shard in ways.items()}


def test_tensor_parallelism_alone_is_refused_and_hybrid_sharding_is_not(tmp_path):
    """For both together see test_tensor_parallel.py; here other models share the data otherwise."""
    for found in launch.results(tmp_path, 4, spread):
        assert found["data"] == found["data in two groups"] == 0
        alone, both = str(found["tensor"]), str(found["tensor and data"])
        assert alone.startswith("NotImplementedError: the parameter 0.weight is placed as "), alone
        assert 'and then fully_shard(model, mesh=mesh["data"])' in alone
        assert both.startswith("NotImplementedError: this model shares the data among 2"), both


REFUSED = {
    "structures": "ValueError: the structures of the processes differ",
    "keys": "ValueError: the structures of the processes differ",
    "kinds": "ValueError: the structures of the processes differ",
    "how": "ValueError: reduce expects how as one of",
    "text": "TypeError: reduce expects tensors, numbers and metrics",
    "source": "ValueError: broadcast expects source as a rank",
    "sampler": "ValueError: the loader has a DistributedSampler",
    "prepared": "ValueError: the loader was prepared by accelerate",
    "backend": "TypeError: backend expects an accelerate.Accelerator",
    "partly sharded": "ValueError: some parameters of this model are sharded",
    "small mesh": "NotImplementedError: this model is sharded over meshes of [1] of ",
    "main only": "TypeError: ",
    "snapshot": "NotImplementedError: a model that is sharded over processes cannot be copied",
    "no batch": "ValueError: the training loader gave no batch",
    "all dropped": "ValueError: the training loader gave no batch in epoch 1. It has 41 samples, "
    "and with drop_last an update takes 30 on each of ",
    "weights of its own": "RuntimeError: the processes have diverged: the norm of the weight "
    "2.bias is from ",
    "order of its own": "RuntimeError: the processes have diverged: each has the data in another "
    "order",
    "evaluated in its own order": "RuntimeError: the processes have diverged: each has the data "
    "in another order",
    "predicted in its own order": "RuntimeError: the processes have diverged: each has the data "
    "in another order",
    "one tensor again and again": "ValueError: the loader reuses a tensor for its next batch",
    "lazy": "ValueError: the model has lazy parameters, which have no shape yet: call it once",
    "nothing to evaluate": "ValueError: the loader to evaluate gave no batch",
}


@pytest.mark.parametrize("n", [2, 3])
def test_collectives(launched, n):
    for mine in launched(exchange, n):
        assert mine["gather"] == {
            "t": [[0, 0, 1], [0, 0, 1, 0, 1, 2]][n - 2],
            "deep": [[[2.0] * n, [*range(n)]]],
            "name": ["", "a", "aa"][:n],
        }
        assert mine["rows"] == [[], [[1, 1]], [[1, 1], [2, 2], [2, 2]]][n - 1]
        assert mine["long"] == [
            "a" * 1500 * rank for rank in range(n)
        ]  # the third is longer than what travels at once
        assert mine["mean"] == [[1.0, (n - 1) / 2], (n - 1) / 2, {"m": (n - 1) / 2}]
        assert mine["max"] == [n - 1, 0] and mine["int mean"] == (n - 1) / 2
        assert mine["broadcast"] == {"rank": n - 1, "t": [*range(n)]}
        assert mine["running"] == launched(exchange, n)[0]["running"] > 0


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(launched, name, n):
    for mine in launched(exchange, n):
        assert str(mine[name]).startswith(REFUSED[name])


@pytest.mark.parametrize("n", [2, 3])
def test_a_failed_write_of_the_main_process_is_an_error_in_all(launched, n):
    for found in launched(exchange, n):
        assert found["no folder"].split(":")[0] in (
            "NotADirectoryError",
            "FileExistsError",
            "CheckpointError",
            "RuntimeError",
        )
        assert found["fit"] == math.ceil(14 / n)
