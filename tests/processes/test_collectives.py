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
from fnloop._backend.collectives import all_reduce_max, start_all_reduce_sum

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
        "largest": all_reduce_max([2.0**40 + rank(), -rank(), True, *range(20)]),
        "largest of few": all_reduce_max([2.0**40 + rank(), -rank(), True]),
        "sum": start_all_reduce_sum(2.0**40 + rank())() - world() * 2.0**40,
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
        "another shape": lambda: another_model(lambda: nn.Linear(6 + (rank() == 1), 3)),
        "another buffer": lambda: another_model(
            lambda: nn.BatchNorm1d(6, track_running_stats=rank() != 1)
        ),
        "another dtype": lambda: another_model(
            lambda: nn.Linear(6, 3, dtype=torch.float64 if rank() == 1 else None)
        ),
        "another order": lambda: another_model(in_another_order),
        "a parameter that the loss function moves": lambda: fitted(
            batches(3), loss=moves_a_parameter
        ),
        "nothing to evaluate": lambda: fl.evaluate(fl.pipeline()(entropy), created(), []),
        "no folder": lambda: fl.save(created(), Path(__file__) / "checkpoint"),
        "fit": lambda: fitted(batches(3)).step,  # after all that, it still works
    }
    return {**found, **{name: said(do) for name, do in wrong.items()}}


def another_model(make):
    model = make()
    fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def in_another_order():
    model = nn.Module()
    for name in "ba" if rank() == 1 else "ab":
        setattr(model, name, nn.Parameter(torch.ones(2)))
    return model


def moves_a_parameter(model, batch):
    """As MAML's running statistics, which are parameters without a gradient."""
    if not hasattr(model, "mean"):
        model.mean = nn.Parameter(torch.zeros(6), requires_grad=False)
    model.mean.mul_(0.9).add_(0.1 * batch[0].mean(0))
    return entropy(model, batch)


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
    "another shape": "RuntimeError: the processes have diverged: the parameter weight is (3, 7) "
    "float32 in process 1 and (3, 6) float32 in process 0. All processes must make the same model",
    "another buffer": "RuntimeError: the processes have diverged: the buffer running_mean is "
    "missing in process 1 and (6,) float32 in process 0, and 2 more differ. ",
    "another dtype": "RuntimeError: the processes have diverged: the parameter weight is (3, 6) "
    "float64 in process 1 and (3, 6) float32 in process 0, and 1 more differ. ",
    "another order": "RuntimeError: the processes have diverged: process 1 has the parameters in "
    "another order than process 0. ",
    "a parameter that the loss function moves": "RuntimeError: the processes have diverged: the "
    "norm of the weight mean is from ",
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
        assert mine["largest of few"] == [2.0**40 + n - 1, 0, 1]
        assert mine["largest"] == [*mine["largest of few"], *range(20)]
        assert mine["sum"] == sum(range(n))
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


@pytest.mark.parametrize("n", [2, 3])
def test_a_parameter_that_no_optimizer_has_is_one_that_the_loss_function_changed(launched, n):
    for mine in launched(exchange, n):
        moved = mine["a parameter that the loss function moves"]
        assert "in process " in moved and "What a hook" not in moved
        assert "It is in no optimizer, so the loss function changed it: make it a buffer" in moved
        hook = mine["weights of its own"]
        assert "What a hook or a middleware does to weights must be the same" in hook
