"""Tensor parallelism, with data parallelism and alone: the same run as without it."""

import functools

import pytest
import torch
import torch.distributed as dist
from joined import come_to, nearly, rank, said, world
from launch import reads, written_by
from process_data import SIZE, loader
from process_metrics import kinds
from process_problems import by_tokens, entropy
from process_problems import created as created_alone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fnloop as fl
from fnloop._backend.collectives import on_every_process

pytestmark = pytest.mark.slow
# Sums of halves differ in the last bits of float32.
close = functools.partial(nearly, tolerance=1e-5)
BATCH = 3


def network():
    """The last two layers are on the dimension of the data alone."""
    last = nn.Dropout(0.25), nn.LayerNorm(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), *last)


def created(make=torch.optim.SGD, lr=0.1):
    def shard(model):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])

    return created_alone(world() == 4 and shard, lambda ps: make(ps, lr=lr), network)


def train(folder):
    step = fl.pipeline(kinds(), fl.clip(0.5), fl.throughput())(entropy)
    loaders = {"train": loader(size=BATCH, shuffle=True), "valid": loader(size=BATCH)}
    state = created()
    found = {"backend": [state.backend.data_rank, state.backend.data_size, state.backend.main]}
    state = fl.fit(step, state, loaders, epochs=2, hooks=())
    records = [dict(record.metrics) for record in state.history]
    records = [{k: v for k, v in row.items() if "throughput" not in k} for row in records]
    found["clipped"] = come_to(state) | {"records": records}
    found["evaluated"] = fl.evaluate(step, state, loaders["valid"])
    seen = fl.predict(lambda model, batch: batch[-1], state, loaders["valid"])
    found["predicted"] = [int(i) for part in seen for i in part]
    step = fl.pipeline(fl.accumulate(2), fl.grad_norm())(by_tokens)
    state, hooks = created(torch.optim.AdamW), (fl.checkpoint(folder / "run"),)
    state = fl.fit(step, state, loaders["train"], steps=2, hooks=hooks)
    state = fl.fit(step, state, loaders["train"], epochs=2, hooks=())
    found["weighed"] = come_to(state)
    again = fl.resume(folder / "run", created(torch.optim.AdamW, lr=9.0))
    found["resumed"] = [again.step, *come_to(again)["weights"]]
    found["continued"] = come_to(fl.fit(step, again, loaders["train"], epochs=2, hooks=()))
    found["failed"] = said(lambda: on_every_process(fail_on_one, "a test"))
    found["other mesh"] = said(lambda: created_alone(make=network).step)
    return found


def fail_on_one():
    if rank() == 1:  # which does not count in sums: process 0 has the same data
        raise OSError("no space left")


@reads(train, (4,))
def alone(folder):
    state = created(torch.optim.AdamW, lr=9.0)
    state = fl.resume(written_by(train, 4, folder) / "run", state)
    return [state.step, *come_to(state)["weights"]]


def test_a_mesh_of_2_by_2_trains_as_2_processes(launched):
    four, two = launched(train, 4), launched(train, 2)
    assert four[0]["clipped"]["counters"] == [14, 2, 0]
    for mine in four:
        assert mine["clipped"] == four[0]["clipped"]  # not even a bit
        for name in ("clipped", "weighed", "evaluated"):
            assert close(mine[name], two[0][name]), name
        assert mine["predicted"] == [*range(SIZE)]
        for record in mine["clipped"]["records"]:
            assert record["train/samples"] == record["valid/samples"] == SIZE
    shares = [[0, 2, True], [0, 2, False], [1, 2, False], [1, 2, False]]  # one for each row
    assert [mine["backend"] for mine in (*four, *two)] == [*shares, [0, 2, True], [1, 2, False]]


def test_a_checkpoint_of_a_mesh_is_whole_and_resumes(launched):
    four, two = launched(train, 4), launched(train, 2)
    for mine in four:
        assert mine["continued"] == mine["weighed"]
        assert mine["resumed"][0] == 2 and close(mine["resumed"], two[0]["resumed"])
    assert launched(alone, 1) == [four[0]["resumed"]]


def test_a_second_layout_is_refused_and_an_error_of_any_process_is_raised_in_all(launched):
    four, two = launched(train, 4), launched(train, 2)
    assert all(mine["other mesh"] == 0 for mine in two)
    refused = "NotImplementedError: this model shares the data among 4 processes, and another"
    assert all(mine["other mesh"].startswith(refused) for mine in four)
    assert [mine["failed"] for mine in four + two] == ["OSError: no space left"] * 6


# --- tensor parallelism alone: all processes have the same data


def split(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def without_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))


def split_alone(make=torch.optim.AdamW, lr=0.1, shard=split, model=without_dropout):
    return created_alone(world() > 1 and shard, lambda ps: make(ps, lr=lr), model)


def own_head():
    model = without_dropout()
    with torch.no_grad():
        model[3].weight.fill_(1.0 + rank())  # not split: that of process 0 counts
    return model


def on_a_row(model):
    """Shard it over a mesh of 1 x 2, whose first dimension is of the data."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])


def between():
    """A parameter that is not split sees other numbers in each process."""
    return nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 3))


def train_alone(folder):
    loaders = {"train": loader(size=2 * BATCH, shuffle=True), "valid": loader(size=BATCH)}
    step = fl.pipeline(kinds(), fl.clip(0.5), fl.skip_nonfinite(), fl.ema(0.9, evaluate=False))
    state = split_alone(model=own_head)
    found = {"backend": [state.backend.data_rank, state.backend.data_size]}
    state = fl.fit(step(entropy), state, loaders, epochs=2, hooks=())
    records = [dict(record.metrics) for record in state.history]
    found["clipped"] = come_to(state) | {"records": records}
    seen = fl.predict(lambda model, batch: batch[-1], state, loaders["valid"])
    found["predicted"] = [int(i) for part in seen for i in part]
    step, hooks = fl.pipeline(fl.accumulate(2))(by_tokens), (fl.checkpoint(folder / "run"),)
    state = fl.fit(step, split_alone(), loaders["train"], steps=2, hooks=hooks)
    found["weighed"] = come_to(fl.fit(step, state, loaders["train"], epochs=2, hooks=()))
    again = fl.resume(folder / "run", split_alone(lr=9.0))
    found["resumed"] = [again.step, *come_to(again)["weights"]]
    found["continued"] = come_to(fl.fit(step, again, loaders["train"], epochs=2, hooks=()))
    if world() > 1:
        row = split_alone(shard=on_a_row)
        fl.save(fl.fit(step, row, loaders["train"], steps=2, hooks=()), folder / "row")
        found["row"] = come_to(fl.restore(folder / "row", split_alone(lr=9.0, shard=on_a_row)))[
            "weights"
        ]
        found["torn"] = said(
            lambda: fl.fit(fl.pipeline()(entropy), split_alone(model=between), loaders, hooks=())
        )
    return found


@reads(train_alone, (2,))
def continue_alone(folder):
    state = fl.resume(written_by(train_alone, 2, folder) / "run", split_alone(lr=9.0))
    return [state.step, *come_to(state)["weights"]]


def test_two_processes_that_split_every_layer_train_as_one(launched):
    two, one = launched(train_alone, 2), launched(train_alone, 1)[0]
    for mine in two:
        assert mine["backend"] == [0, 1]
        for name in ("clipped", "weighed"):
            assert close(mine[name], one[name]), name
        assert mine["predicted"] == [*range(SIZE)]
        assert mine["continued"] == mine["weighed"]
        assert mine["resumed"][0] == 2 and close(mine["resumed"], one["resumed"])
        assert close(mine["row"], one["resumed"][1:])
        assert "the norm of the weight 1.weight is from " in mine["torn"]
    assert close(launched(continue_alone, 1)[0], one["resumed"])


def split_over_some(folder):
    mesh = lambda: dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    shard = lambda model: parallelize_module(model, mesh()["b"], plan)
    return said(lambda: split_alone(shard=shard))


def test_a_split_over_some_processes_needs_fully_shard(launched):
    for said_here in launched(split_over_some, 4):
        assert said_here.startswith(
            "NotImplementedError: parallelize_module has split the parameter 0.weight over 2 of 4"
        )
        assert 'and then fully_shard(model, mesh=mesh["data"])' in said_here
