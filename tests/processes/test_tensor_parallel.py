"""Data parallel and tensor parallel on a mesh of 2 x 2: the same run as on 2 processes."""

import launch
import pytest
import torch
import torch.distributed as dist
from process_problems import (
    SIZE,
    come_to,
    entropy,
    kinds,
    loader,
    rank,
    said,
    world,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fnloop as fl
from fnloop._backend.collectives import on_every_process

pytestmark = pytest.mark.slow
CLOSE = 1e-5  # sums of halves differ in the last bits of float32
BATCH = 3


def network():
    """The last two layers are on the dimension of the data alone."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Dropout(0.25), nn.LayerNorm(3)
    )


def created(make=torch.optim.SGD, lr=0.1):
    model = network()
    if world() == 4:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])
    return fl.TrainState.create(model, make(model.parameters(), lr=lr), seed=0)


def by_tokens(model, batch):
    x, y, tokens, _ = batch
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") * tokens
    return losses.sum() / tokens.sum(), {"weight": tokens.sum()}


def train(folder):
    """Train in several ways; return what came of it."""
    found = {}
    step = fl.pipeline(kinds(), fl.clip(0.5), fl.throughput())(entropy)
    loaders = {"train": loader(size=BATCH, shuffle=True), "valid": loader(size=BATCH)}
    state = created()
    found["backend"] = [state.backend.data_rank, state.backend.data_size, state.backend.main]
    state = fl.fit(step, state, loaders, epochs=2, hooks=())
    records = [
        {k: v for k, v in record.metrics.items() if "throughput" not in k}
        for record in state.history
    ]
    found["clipped"] = come_to(state) | {"records": records}
    found["evaluated"] = fl.evaluate(step, state, loaders["valid"])
    seen = fl.predict(lambda model, batch: batch[-1], state, loaders["valid"])
    found["predicted"] = [int(i) for part in seen for i in part]
    step = fl.pipeline(fl.accumulate(2), fl.grad_norm())(by_tokens)
    hooks = (fl.checkpoint(folder / "run"),)
    state = created(torch.optim.AdamW)
    state = fl.fit(step, state, loaders["train"], steps=2, hooks=hooks)
    state = fl.fit(step, state, loaders["train"], epochs=2, hooks=())
    found["weighed"] = come_to(state)
    resumed = fl.resume(folder / "run", created(torch.optim.AdamW, lr=9.0))
    found["resumed"] = [resumed.step, *come_to(resumed)["weights"]]
    resumed = fl.fit(step, resumed, loaders["train"], epochs=2, hooks=())
    found["continued"] = come_to(resumed)
    found["failed"] = said(lambda: on_every_process(fail_on_one, "a test"))
    found["other mesh"] = said(other_mesh)
    return found


def fail_on_one():
    if rank() == 1:  # which does not count in sums: process 0 has the same data
        raise OSError("no space left")


def other_mesh():
    model = network()
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1)).step


def close(a, b):
    """Return whether two nestings of numbers are equal up to rounding."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == b or a == pytest.approx(b, rel=CLOSE, abs=CLOSE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor")
    return launch.results(folder / "4", 4, train), launch.results(folder / "2", 2, train), folder


def test_a_mesh_of_2_by_2_trains_as_2_processes(trained):
    four, two, _ = trained
    for name in ("clipped", "weighed", "evaluated"):
        assert all(close(mine[name], two[0][name]) for mine in four), name
    assert four[0]["clipped"]["counters"] == [14, 2, 0]
    assert all(mine["clipped"] == four[0]["clipped"] for mine in four)  # not even a bit


def test_processes_of_one_row_have_one_share_of_the_data(trained):
    four, two, _ = trained
    assert [mine["backend"] for mine in four] == [
        [0, 2, True],
        [0, 2, False],
        [1, 2, False],
        [1, 2, False],
    ]
    assert [mine["backend"] for mine in two] == [[0, 2, True], [1, 2, False]]
    for record in four[0]["clipped"]["records"]:
        assert record["train/samples"] == record["valid/samples"] == SIZE
    assert four[3]["predicted"] == [*range(SIZE)]


def test_a_checkpoint_of_a_mesh_is_whole_and_resumes(trained):
    four, two, folder = trained
    for mine in four:
        assert mine["continued"] == mine["weighed"]
        assert mine["resumed"][0] == 2 and close(mine["resumed"], two[0]["resumed"])
    model = network()
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters()))
    alone = fl.resume(folder / "4" / "run", state)
    assert [alone.step, *come_to(alone)["weights"]] == four[0]["resumed"]


def test_a_second_layout_in_one_program_is_refused(trained):
    four, two, _ = trained
    assert all(mine["other mesh"] == 0 for mine in two)
    for mine in four:
        assert mine["other mesh"].startswith(
            "NotImplementedError: this model shares the data among 4 processes, and another"
        )


def test_an_error_of_any_process_is_raised_in_all(trained):
    four, two, _ = trained
    assert [mine["failed"] for mine in four + two] == ["OSError: no space left"] * 6
