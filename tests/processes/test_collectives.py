"""The public collectives, and what is refused when there are several processes."""

import inspect
import math
from functools import partial
from pathlib import Path

import launch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from joined import difference, flat, rank, said, world
from process_data import SIZE, batches, loader, samples
from process_problems import adam_sgd, created, entropy, fitted, network, sgd
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import fnloop as fl
from fnloop._backend.collectives import all_reduce_max
from fnloop._extensions.engines.exchanges import start_all_reduce_sum
from fnloop.schedules import linear

pytestmark = pytest.mark.slow


def exchange(folder):
    mine, me = torch.arange(rank() + 1), fl.Mean(float(rank()), 1)
    nested = {"t": mine, "deep": [(torch.tensor(2.0), rank())], "name": "a" * rank()}
    found = {
        "gather": fl.gather(nested),
        "rows": fl.gather(torch.full((rank(), 2), rank())),
        "long": fl.gather("a" * 1500 * rank()),  # the third is longer than what travels at once
        "mean": fl.reduce([torch.tensor([1.0, rank()]), rank(), {"m": me}]),
        "max": fl.reduce((torch.tensor(rank()), -rank()), "max"),
        "int mean": fl.reduce(torch.tensor(rank())),
        "broadcast": fl.broadcast({"rank": rank(), "t": mine}, source=world() - 1),
        "largest": all_reduce_max([2.0**40 + rank(), -rank(), True, *range(20)]),
        "largest of few": all_reduce_max([2.0**40 + rank(), -rank(), True]),
        "sum": start_all_reduce_sum(2.0**40 + rank())() - world() * 2.0**40,
    }
    running = fl.reduce(fitted(loader(), steps=2).metrics)["loss"].compute()
    refused = {name: said(do) for name, (do, _) in REFUSED.items()}
    return {
        **{name: tree(value) for name, value in found.items()},
        **refused,
        "running": fl.gather(running),
        "no folder": said(lambda: fl.save(created(), Path(__file__) / "checkpoint")),
        "hooked": trained(hooked, 0.5),
        "without": trained(network, 0.25),
        "in DDP": trained(lambda: DistributedDataParallel(network()), 0.25),
        "own settings": made_by(lambda: writing("1"), lambda: writing("0"))().step,
        "own logs": made_by(lambda: writing("1"))().step,
        "same settings": made_by(lambda: fl.clip(max_norm=1), lambda: fl.clip(1.0))().step,
        "fit": fitted(batches(3)).step,  # after all that, it still works
    }


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
    mesh = dist.device_mesh.init_device_mesh("cpu", (world(), 1), mesh_dim_names=("all", "one"))
    return mesh["one"]  # the row of this process


def tree(found):
    if isinstance(found, dict):
        return {k: tree(v) for k, v in found.items()}
    if isinstance(found, list | tuple):
        return [tree(v) for v in found]
    found = found.compute() if hasattr(found, "compute") else found
    return found.tolist() if isinstance(found, torch.Tensor) else found


# Create the state of a model that one process makes in another way.
made = lambda make: lambda: created(make=make)


def made_by(one, others=None, turns=False):
    """Train with a middleware that process 1 makes in another way."""

    def train():
        member = one() if rank() == 1 else others and others()
        step = fl.pipeline(*([member] if member else []))(entropy)
        step = fl.alternate({"matrices": STEP, "rest": step}) if turns else step
        return fl.fit(step, created(optimizer=adam_sgd if turns else sgd), batches(3), hooks=())

    return train


class Sharding(nn.Module):
    """It keeps a part of its weight in each process, and saves the whole."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.ones(24 // world()))

    def whole(self):
        parts = [torch.empty_like(self.flat) for _ in range(world())]
        dist.all_gather(parts, self.flat.detach())
        return torch.cat(parts).view(4, 6)

    def forward(self, x):
        return x @ self.whole().T

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.whole()


def ignoring():
    model = nn.Linear(6, 3)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight"])
    return model


def apart():
    handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    return Accelerator(cpu=True, kwargs_handlers=[handler])


def hooked(builtin=False):
    """Return a model in a DDP whose hook halves the gradients, with some settings."""
    settings = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    model = DistributedDataParallel(network(), bucket_cap_mb=1, **settings)
    if builtin:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    else:
        model.register_comm_hook(2, divide_by)
    return model


def divide_by(number, bucket):
    total = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return total.then(lambda done: done.value()[0] / (world() * number))


def flattened(weights):
    return [
        x for each in weights for row in each for x in (row if isinstance(row, list) else [row])
    ]


def trained(make, lr):
    """Return the weights after some updates, and the settings of DDP that were used."""
    state = created(optimizer=lambda ps: torch.optim.SGD(ps, lr=lr), make=make)
    state = fl.fit(fl.pipeline(fl.accumulate(2))(entropy), state, batches(4), hooks=())
    return flat(state.model.parameters()), dict(state.backend.settings), type(state.model).__name__


@fl.middleware("gradient")
def halve(_):
    return lambda step: step


@fl.middleware("step")
def writing(_):
    return lambda step: step


# Torch 2.13 has another name for it, and warns of the old one.
_known = inspect.signature(DistributedDataParallel).parameters
buffers_apart = {
    next(k for k in ("forward_sync_buffers", "broadcast_buffers") if k in _known): False
}
DIVERGED = "RuntimeError: the processes have diverged: "
STRUCTURES = "ValueError: the structures of the processes differ"
ORDER = f"{DIVERGED}each has the data in another order"
STEP = fl.pipeline()(entropy)
TURNS = fl.alternate({"matrices": STEP, "rest": STEP})
REFUSED = {
    "structures": (lambda: fl.gather([1] * (rank() + 1)), STRUCTURES),
    "keys": (lambda: fl.gather({f"k{rank()}": 1}), STRUCTURES),
    "kinds": (lambda: fl.reduce(1 if rank() else torch.ones(1)), STRUCTURES),
    "how": (lambda: fl.reduce(1, "median"), "ValueError: reduce expects how as one of"),
    "text": (lambda: fl.reduce("a"), "TypeError: reduce expects tensors, numbers and metrics"),
    "source": (
        lambda: fl.broadcast(1, source=world()), "ValueError: broadcast expects source as a rank"),
    "sampler": (
        lambda: fitted(DataLoader(samples(), sampler=DistributedSampler(samples()))),
        "ValueError: the loader has a DistributedSampler"),
    "prepared": (
        lambda: fitted(Accelerator(cpu=True).prepare(loader())),
        "ValueError: the loader was prepared by accelerate"),
    "backend": (
        lambda: created(backend=3), "TypeError: backend expects an accelerate.Accelerator"),
    "partly sharded": (
        lambda: created(lambda model: fully_shard(model[0])),
        "ValueError: some parameters of this model are sharded"),
    "small mesh": (
        lambda: created(lambda model: fully_shard(model, mesh=replicas())),
        "NotImplementedError: this model is sharded over meshes of [1] of "),
    "sharded turns": (
        lambda: fl.fit(TURNS, created(fully_shard, adam_sgd), batches(3), hooks=()),
        "NotImplementedError: alternate does not work with fully_shard"),
    "main only": (lambda: fl.on_main(fl.checkpoint("never")), "TypeError: "),
    "snapshot": (
        lambda: fl.snapshot(created(fully_shard)),
        "NotImplementedError: a model that is sharded over processes cannot be copied"),
    "no batch": (lambda: fitted([]), "ValueError: the training loader gave no batch"),
    "all dropped": (
        lambda: fitted(loader(size=30, drop_last=True)),
        "ValueError: the training loader gave no batch in epoch 1. It has 41 samples, "
        "and with drop_last an update takes 30 on each of "),
    "weights of its own": (
        lambda: fitted(loader(), hooks=(moving,)),
        f"{DIVERGED}the norm of the weight 2.bias is from "),
    "predicted in its own order": (
        lambda: [*fl.predict(lambda m, b: 0, created(), loader(sampler=Unseeded()))], ORDER),
    "one tensor again and again": (
        lambda: fitted(refilled), "ValueError: the loader reuses a tensor for its next batch"),
    "lazy": (
        made(lambda: nn.LazyLinear(3)),
        "ValueError: the model has lazy parameters, which have no shape yet: call it once"),
    "another shape": (
        made(lambda: nn.Linear(6 + (rank() == 1), 3)),
        f"{DIVERGED}the parameter weight is (3, 7) float32 in process 1 and (3, 6) float32 in "
        "process 0. All processes must make the same model"),
    "another buffer": (
        made(lambda: nn.BatchNorm1d(6, track_running_stats=rank() != 1)),
        f"{DIVERGED}the buffer running_mean is missing in process 1 and (6,) float32 in process 0, "
        "and 2 more differ. "),
    "another dtype": (
        made(lambda: nn.Linear(6, 3, dtype=torch.float64 if rank() == 1 else None)),
        f"{DIVERGED}the parameter weight is (3, 6) float64 in process 1 and (3, 6) float32 in "
        "process 0, and 1 more differ. "),
    "another order": (
        made(in_another_order),
        f"{DIVERGED}process 1 has the parameters in another order than process 0. "),
    "a parameter that the loss function moves": (
        lambda: fitted(batches(3), loss=moves_a_parameter),
        f"{DIVERGED}the norm of the weight mean is from "),
    "a setting of a middleware": (
        made_by(lambda: fl.local_sgd(3), lambda: fl.local_sgd(2, sgd)),
        f"{DIVERGED}process 1 has local_sgd(3) where process 0 has local_sgd(2, sgd). "),
    "a setting of a schedule": (
        made_by(lambda: fl.schedule(linear(warmup=3)), lambda: fl.schedule(linear(warmup=2))),
        f"{DIVERGED}process 1 has schedule(linear(warmup=3)) where process 0 has schedule(linear("),
    "a middleware of one process": (
        made_by(lambda: fl.clip(1.0)),
        f"{DIVERGED}process 1 has clip(1.0), and process 0 does not. All processes must make"),
    "gradients of one process": (
        made_by(lambda: halve(2)), f"{DIVERGED}process 1 has halve(2), and process 0 does not. "),
    "turns of one process": (
        made_by(lambda: fl.clip(1.0), turns=True), f"{DIVERGED}process 1 has clip(1.0), and "),
    "FSDP 1": (
        made(lambda: FullyShardedDataParallel(network(), device_id=torch.device("cpu"))),
        "NotImplementedError: this model is in FSDP 1 (FullyShardedDataParallel) of torch, which "),
    "FSDP 1 of a part": (
        made(lambda: nn.Sequential(FullyShardedDataParallel(
            network(), device_id=torch.device("cpu"), use_orig_params=True))),
        "NotImplementedError: the part 0 of this model is in FSDP 1 (FullyShardedDataParallel) of"),
    "a wrapper of one's own": (
        made(Sharding),
        "NotImplementedError: the parameter flat has the shape ("),
    "DDP within the model": (
        made(lambda: nn.Sequential(DistributedDataParallel(network()))),
        "NotImplementedError: the part 0 of this model is in DistributedDataParallel of torch.nn."),
    "ignored by DDP": (
        made(ignoring), "NotImplementedError: this model tells DistributedDataParallel to ignore "),
    "mixed precision of DDP": (
        made(lambda: DistributedDataParallel(network(), mixed_precision=MixedPrecision())),
        "NotImplementedError: DistributedDataParallel has mixed_precision here, which "),
    "buffers of one process": (
        made(lambda: DistributedDataParallel(nn.BatchNorm1d(6), **buffers_apart)),
        "NotImplementedError: DistributedDataParallel has broadcast_buffers=False here, which "),
    "buffers of one process, by accelerate": (
        lambda: created(make=lambda: nn.BatchNorm1d(6), backend=apart()),
        "NotImplementedError: DistributedDataParallel has broadcast_buffers=False here, which "),
    "a hook of torch": (
        made(lambda: hooked(builtin=True)),
        "NotImplementedError: this model is in DistributedDataParallel with the hook BuiltinComm"),
    "nothing to evaluate": (
        lambda: fl.evaluate(STEP, created(), []),
        "ValueError: the loader to evaluate gave no batch"),
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
def test_collectives(launched, n):
    ranks = [*range(n)]
    expected = {
        "gather": {
            "t": [[0, 0, 1], [0, 0, 1, 0, 1, 2]][n - 2],
            "deep": [[[2.0] * n, ranks]],
            "name": ["", "a", "aa"][:n],
        },
        "rows": [[1, 1], [2, 2], [2, 2]][: [0, 1, 3][n - 1]],
        "long": ["a" * 1500 * rank for rank in ranks],
        "mean": [[1.0, (n - 1) / 2], (n - 1) / 2, {"m": (n - 1) / 2}],
        "max": [n - 1, 0],
        "int mean": (n - 1) / 2,
        "broadcast": {"rank": n - 1, "t": ranks},
        "largest": [2.0**40 + n - 1, 0, 1, *range(20)],
        "largest of few": [2.0**40 + n - 1, 0, 1],
        "sum": sum(ranks),
    }
    for mine in launched(exchange, n):
        assert {name: mine[name] for name in expected} == expected
        assert mine["own settings"] == mine["own logs"] == mine["same settings"] == mine["fit"] > 0
        assert len({*mine["running"]}) == 1 and mine["running"][0] > 0


@pytest.mark.parametrize("n", [2, 3])
def test_settings_and_the_hook_of_a_user_s_ddp_are_kept(launched, n):
    """Half of the gradient at a rate of 0.5 is the gradient at 0.25."""
    for mine in launched(exchange, n):
        (hooked, settings, kind), (without, *none) = mine["hooked"], mine["without"]
        assert difference(hooked, without) < 1e-6 and kind == "Sequential"
        passed = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
        assert settings == {**passed, "bucket_cap_mb": 1.0}
        assert mine["in DDP"] == [without, {}, "Sequential"] and none == [{}, "Sequential"]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(launched, name, n):
    for mine in launched(exchange, n):
        assert str(mine[name]).startswith(REFUSED[name][1])


@pytest.mark.parametrize("n", [2, 3])
def test_an_error_says_which_process_and_what_to_do(launched, n):
    for mine in launched(exchange, n):
        moved = mine["a parameter that the loss function moves"]
        assert "in process " in moved and "What a hook" not in moved
        assert "It is in no optimizer, so the loss function changed it: make it a buffer" in moved
        hook = "What a hook or a middleware does to weights must be the same"
        assert hook in mine["weights of its own"]
        # A failed write of the main process is an error in all.
        known = ("NotADirectoryError", "FileExistsError", "CheckpointError", "RuntimeError")
        assert mine["no folder"].startswith(known)
        assert mine["fit"] == math.ceil(14 / n)


def spread(folder):
    mesh = partial(dist.device_mesh.init_device_mesh, "cpu")
    created()  # joins the processes
    grid = mesh((2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def both(model):
        fully_shard(parallelize_module(model, grid["tensor"], plan), mesh=grid["data"])

    groups = lambda: mesh((2, 2), mesh_dim_names=("replicate", "shard"))
    ways = {
        "tensor and data": both, "data": fully_shard,
        "tensor": lambda model: parallelize_module(model, mesh((4,)), plan),
        "data in two groups": lambda model: fully_shard(model, mesh=groups()),
    }  # fmt: skip
    return {name: said(lambda shard=shard: created(shard).step) for name, shard in ways.items()}


def test_another_sharing_of_the_data_in_one_program_is_refused_and_hybrid_sharding_is_not(tmp_path):
    """For each of them in a program of its own see test_tensor_parallel.py."""
    for found in launch.results(tmp_path, 4, spread):
        assert found["data"] == found["data in two groups"] == 0
        alone, both = str(found["tensor"]), str(found["tensor and data"])
        assert alone.startswith("NotImplementedError: this model shares the data among 1 pr"), alone
        assert "Or train each in a program of its own" in alone
        assert both.startswith("NotImplementedError: this model shares the data among 2"), both
