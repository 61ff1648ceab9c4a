"""Data parallel and tensor parallel on a mesh of 2 x 2: the same run as on 2 processes."""

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
