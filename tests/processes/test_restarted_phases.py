"""A script of several phases, started again after any of its updates, on several processes."""

import attrs
import pytest
import torch
import torch.distributed as dist
from process_problems import come_to, default_dtype, entropy, loader, network, world
from torch.optim import lr_scheduler

import fnloop as fl

pytestmark = pytest.mark.slow

UPDATES = 7 + 3 + 4  # of the three phases


def new_state():
    torch.manual_seed(0)
    model = network()
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=0)


def script(state, *hooks):
    """Train an epoch and a part of one, until a hook stops, and by a scheduler of torch."""
    scheduled = fl.pipeline(
        fl.plateau("train/loss", patience=1), fl.schedule(fl.schedules.cosine())
    )
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.StepLR(opt, 2, gamma=0.5))
    stop = fl.when(lambda state: state.step == 10)(lambda s: attrs.evolve(s, stop="enough"))
    settings = {"record_every": fl.every(steps=2)}
    for name, pipe, hook, targets in (
        ("first", scheduled, (), {"steps": 7}),
        ("second", fl.pipeline(fl.accumulate({0: 1, 1: 2}), fl.clip(0.5)), (stop,), {"epochs": 4}),
        ("third", fl.pipeline(halving), (), {"steps": 4}),
    ):
        loaders = {"train": loader(size=9, shuffle=True), "valid": loader(size=9)}
        state = fl.fit(
            pipe(entropy), state, loaders, hooks=(*hook, *hooks), phase=name, **targets, **settings
        )
    return state


def phased(folder):
    if world() > 1:
        dist.init_process_group("gloo")

    def keep(state):
        fl.save(state, folder / f"{state.step}")
        return state

    with default_dtype(torch.float64):
        whole = script(new_state(), fl.every(steps=1)(keep))
        found = [come_to(whole)]
        for step in range(1, UPDATES + 1):
            found.append(come_to(script(fl.restore(folder / f"{step}", new_state()))))
        phases = [[p.name, p.step, p.epoch, p.stop, p.done] for p in whole.phases]
        return {"found": found, "phases": phases, "step": whole.step}


@pytest.mark.parametrize("n", [1, 2])
def test_a_script_that_is_started_again_ends_the_same(launched, n):
    for found in launched(phased, n):
        assert found["step"] == UPDATES
        whole, *resumed = found["found"]
        assert all(one == whole for one in resumed)
        assert [p[3:] for p in found["phases"]] == [[None, True], ["enough", True], [None, True]]
