"""restore_best on several processes: the same weights on any number, sharded or not."""

import pytest
import torch
import torch.distributed as dist
from launch import reads, written_by
from process_problems import (
    FEW,
    come_to,
    default_dtype,
    difference,
    entropy,
    loader,
    network,
    said,
    whole,
    world,
)
from torch.distributed.fsdp import fully_shard

import fnloop as fl

pytestmark = pytest.mark.slow

SAVED, END = 4, 5  # epochs; from the fourth on, the loss rises again
KINDS = ("plain", "sharded")


def trained(kind, folder=None, saved=None, hooks=None):
    torch.manual_seed(0)
    model = network()
    if kind == "sharded" and world() > 1:
        fully_shard(model)
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=0)
    state = state if saved is None else fl.resume(saved, state)

    def save(state):
        fl.save(state, folder / kind / "a")
        return state

    falling = fl.schedule(lambda i, total: 1.0 if i < 0.6 * total else -1.0)
    saves = fl.when(lambda state: (state.epoch, state.batch) == (SAVED, 0))(save)
    hooks = (
        (fl.restore_best("valid/loss"), *((saves,) if folder else ())) if hooks is None else hooks
    )
    loaders = {"train": loader(shuffle=True), "valid": loader()}
    step = fl.pipeline(falling, fl.ema(0.5, evaluate=False))(entropy)
    state = fl.fit(step, state, loaders, epochs=END, hooks=hooks)
    average = [whole(value).flatten() for value in state.slots["ema"].values()]
    return state, {**come_to(state), "average": torch.cat(average).tolist()}


def ends(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    with default_dtype(torch.float64):
        found = {kind: trained(kind, folder)[1] for kind in KINDS}
        state, found["last"] = trained("sharded", hooks=())
        found["valid"] = list(state.history["valid/loss"])
        found["refused"] = said(lambda: fl.on_main(fl.restore_best("valid/loss")))
    return found


@reads(ends, FEW)
def resumes_to_the_best(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    with default_dtype(torch.float64):
        return {
            f"{before} on {n}, then {after}": trained(
                after, saved=written_by(ends, n, folder) / before
            )[1]
            for n in FEW
            for before in KINDS
            for after in KINDS
        }


@pytest.fixture(params=FEW)
def ended(request, launched):
    return launched(ends, request.param)


def test_any_number_of_processes_ends_with_the_same_best_weights(launched, ended):
    expected = launched(ends, 1)[0]
    best = min(range(END), key=expected["valid"].__getitem__)
    assert best == 2
    for mine in ended:
        assert mine["valid"] == pytest.approx(expected["valid"], rel=1e-11)
        for kind in KINDS:
            for part in ("weights", "average"):
                assert difference(expected["plain"][part], mine[kind][part]) < 1e-11
        for part in ("weights", "average"):
            assert difference(mine["last"][part], mine["plain"][part]) > 0.01
        assert "needs all processes" in mine["refused"]


@pytest.mark.parametrize("n", FEW)
def test_a_copy_saved_on_any_number_is_restored_on_any_other(launched, n):
    expected = launched(ends, 1)[0]["plain"]
    for mine in launched(resumes_to_the_best, n):
        for name, found in mine.items():
            assert found["counters"] == expected["counters"], name
            for part in ("weights", "average"):
                assert difference(expected[part], found[part]) < 1e-11, (name, part)
