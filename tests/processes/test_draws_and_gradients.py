"""Draws in evaluation, added gradients and last values are the same on two processes as on one."""

import launch
import pytest
import torch
from evaluation_draws import CALLS, draws_in
from sample_middleware import repeat

import fnloop as fl
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow


def job(folder):
    state = toy()
    batches = [torch.tensor([float(x)]) for x in (1, 3, 5, 7)]
    share = batches[state.backend.rank :: state.backend.world_size]
    step = fl.pipeline(fl.accumulate(len(share)), repeat())(toy_loss)
    state, _ = step(state, share)
    empty = fl.pipeline(fl.accumulate(len(share)), repeat([torch.ones(0)], share[:1]))(toy_loss)
    last = fl.pipeline(fl.metric(last=lambda aux, batch: fl.Last(batch.max())))(toy_loss)
    return {
        "w": state.model.w.item(),
        "around an empty call": empty(toy(), share)[0].model.w.item(),
        "draws": {name: draws_in(call) for name, call in CALLS.items()},
        "last": fl.fit(last, toy(), batches[:3], hooks=()).history["train/last"],
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch.results(tmp_path_factory.mktemp("found"), 2, job)


def test_each_batch_in_evaluation_has_the_same_draw_as_on_one_process(found):
    """Each process has three of the six batches."""
    for name, call in CALLS.items():
        first, second = (result["draws"][name] for result in found)
        assert (list(first), list(second)) == (["0", "2", "4"], ["1", "3", "5"])
        assert {**first, **second} == draws_in(call)


def test_two_calls_with_one_window_double_its_mean_over_all_processes(found, tmp_path):
    """The mean of 1, 3, 5 and 7 is 4, twice."""
    assert [result["w"] for result in found] == [job(tmp_path)["w"]] * 2 == [-8.0, -8.0]


def test_the_last_value_of_a_metric_is_that_of_the_last_batch_on_any_process(found):
    """The first process has two of three batches. The second has none in the last round."""
    assert [result["last"] for result in found] == [[5.0], [5.0]]


def test_a_call_whose_windows_are_all_empty_keeps_the_gradients_so_far(found):
    """The mean of 1, 3, 5 and 7 is 4, and that of 1 and 3 is 2."""
    assert [result["around an empty call"] for result in found] == [-6.0, -6.0]
