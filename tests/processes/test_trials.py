"""Trials of a run on several processes: the same rates and losses, or a refusal."""

import pytest
import torch
import torch.distributed as dist
from process_problems import created, default_dtype, entropy, loader, said, whole, world

import fnloop as fl

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
                said(lambda: fl.dry_run(step, state, data)),
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
        assert ["works in one process" in text for text in found["refused"]] == [True, True]
    assert both[0] == both[1]
