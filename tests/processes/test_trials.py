"""Trials of a run on several processes: the same rates and losses, or a refusal."""

from functools import partial

import pytest
import torch
from joined import flat, in_double, rank, said, world
from process_data import loader
from process_problems import created, entropy

import fnloop as fl
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow


@in_double
def finding(folder):
    state, data = created(), loader(size=4 // world(), shuffle=True, drop_last=True)
    step = fl.pipeline(fl.accumulate(2), fl.clip(1.0))(entropy)
    before = flat(state.model.parameters())
    found = fl.find_lr(step, state, data, updates=20, low=1e-3)
    assert flat(state.model.parameters()) == before
    refused = said(lambda: fl.find_batch_size(step, state, lambda size: data))
    parameters = fl.summary(state, next(iter(data))).rows[0].parameters
    return [[found.rates, found.suggestion, parameters], found.losses, refused]


@pytest.mark.long
def test_two_processes_find_what_one_does(launched):
    ((same, losses, _),), both = launched(finding, 1), launched(finding, 2)
    assert both[0] == both[1]
    assert both[0][0] == same and same[1] is not None
    assert both[0][1] == pytest.approx(losses, rel=1e-9)
    assert "works in one process" in both[0][2]


PLACES = {  # where a run breaks, and how the report names it; a loss is called for each loader
    "train": "loader train", "valid": "loader valid", "share": "loader share", "loss": "",
    "metric": "metric metric(mean=mean)", "hook": "hook hook",
}  # fmt: skip


def tries(folder):
    return {where: tried(folder / "runs", where) for where in ("nowhere", *PLACES)}


def tried(folder, where):
    def broken(place):
        if where == place and world() > 1 and rank() == world() - 1:
            raise ZeroDivisionError(f"broken {place}")

    def batches(place):
        for i in range(3):
            broken(place)
            yield torch.full((2,), i + 1.0)

    def loss(model, batch):
        broken("loss")
        return toy_loss(model, batch)

    def mean(aux, batch):
        broken("metric")
        return aux["output"].mean()

    def hook(state):
        total = len(fl.gather(1.0))
        broken("hook")
        assert total == world()
        return state

    loaders = {name: partial(batches, name) for name in ("train", "valid")}
    loaders["share"] = fl.sharded(partial(batches, "share"))
    step, state = fl.pipeline(fl.accumulate(2), fl.metric(mean=mean))(loss), toy()
    hooks = (fl.checkpoint(folder, best="valid/loss"), hook, fl.early_stop("valid/loss"))
    report = fl.dry_run(step, state, loaders, hooks)
    assert (state.model.w.item(), state.step, folder.exists()) == (0.0, 0, False)
    assert len({*fl.gather("".join(f.text for f in report.findings))}) == 1
    kinds = [f.kind for f in report.findings if f.kind in ("record", "resume")]
    return [[str(problem) for problem in report.problems], kinds]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_run_is_tried_on_all_processes_and_a_problem_of_one_is_told_to_all(launched, n):
    """Those before it in the same run are tried, and those after it too."""
    for mine in launched(tries, n):
        assert mine["nowhere"] == [[], [*["record"] * 3, "resume"]]
        for where, name in PLACES.items() if n > 1 else ():
            problems, kinds = mine[where]
            expected = f"{name}: process {n - 1}: ZeroDivisionError: broken {where}"
            assert len(problems) == (3 if where == "loss" else 1)
            assert all(expected in problem for problem in problems)
            assert ("resume" in kinds) is (where not in ("train", "loss"))
