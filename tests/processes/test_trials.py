"""Trials of a run on several processes: the same rates and losses, or a refusal."""

import pytest
import torch
import torch.distributed as dist
from process_problems import created, default_dtype, entropy, loader, rank, said, whole, world

import fnloop as fl
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow


def job(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        state, data = created(), loader(size=4 // world(), shuffle=True, drop_last=True)
        step = fl.pipeline(fl.accumulate(2), fl.clip(1.0))(entropy)
        before = [whole(p).tolist() for p in state.model.parameters()]
        range_ = fl.find_lr(step, state, data, updates=20, low=1e-3)
        table = fl.summary(state, next(iter(data)))
        return {
            "range": [range_.rates, range_.losses, range_.suggestion],
            "kept": before == [whole(p).tolist() for p in state.model.parameters()],
            "parameters": table.rows[0].parameters,
            "refused": [
                said(lambda: fl.find_batch_size(step, state, lambda size: data)),
            ],
        }


def test_two_processes_find_what_one_does(launched, tmp_path):
    (alone,), both = [job(tmp_path)], launched(job, 2)
    for found in both:
        rates, losses, suggestion = found["range"]
        assert rates == list(alone["range"][0])
        assert losses == pytest.approx(list(alone["range"][1]), rel=1e-9)
        assert suggestion == alone["range"][2] is not None
        assert found["kept"]
        assert found["parameters"] == alone["parameters"]
        assert ["works in one process" in text for text in found["refused"]] == [True]
    assert both[0] == both[1]


def breaking(where):
    """Return a function that raises on the last process, where it is to do so."""

    def here(place):
        if where == place and world() > 1 and rank() == world() - 1:
            raise ZeroDivisionError(f"broken {place}")

    return here


def tries(folder):
    """Try a run whose parts raise in one process."""
    if world() > 1:
        dist.init_process_group("gloo")
    return {where: tried(folder / "runs", breaking(where)) for where in PLACES}


PLACES = ("nowhere", "train", "valid", "share", "loss", "metric", "hook")


def tried(folder, broken):
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

    loaders = {
        "train": lambda: batches("train"),
        "valid": lambda: batches("valid"),
        "share": fl.sharded(lambda: batches("share")),
    }
    step = fl.pipeline(fl.accumulate(2), fl.metric(mean=mean))(loss)
    state = toy()
    hooks = (fl.checkpoint(folder, best="valid/loss"), hook, fl.early_stop("valid/loss"))
    report = fl.dry_run(step, state, loaders, hooks)
    return {
        "problems": report.problems,
        "kinds": [f.kind for f in report.findings if f.kind in ("record", "resume")],
        "texts": fl.gather("".join(f.text for f in report.findings)),
        "left": [state.model.w.item(), state.step, folder.exists()],
    }


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_run_is_tried_on_all_processes(launched, n):
    found = [mine["nowhere"] for mine in launched(tries, n)]
    for mine in found:
        assert mine["problems"] == []
        assert mine["kinds"] == [*["record"] * 3, "resume"]
        assert len(set(mine["texts"])) == 1
        assert mine["left"] == [0.0, 0, False]


@pytest.mark.parametrize("where", PLACES[1:])
@pytest.mark.parametrize("n", [2, 3])
def test_a_problem_of_one_process_is_told_to_all(launched, where, n):
    """Those before it in the same run are tried, and those after it too."""
    named = {
        **{name: f"loader {name}" for name in ("train", "valid", "share")},
        "metric": "metric metric(mean=mean)",
        "hook": "hook hook",
    }
    for mine in (mine[where] for mine in launched(tries, n)):
        assert mine["left"] == [0.0, 0, False]
        expected = f": process {n - 1}: ZeroDivisionError: broken {where}"
        if where == "loss":  # it is called with a batch of each loader
            assert all(expected in problem for problem in mine["problems"])
            assert len(mine["problems"]) == 3
        else:
            (problem,) = mine["problems"]
            assert problem.startswith(named[where] + expected)
        assert ("resume" in mine["kinds"]) is (where not in ("train", "loss"))
        assert len(set(mine["texts"])) == 1
