"""Two processes draw in evaluation what one draws, and add up gradients as one does."""

import launch
import pytest
import torch
from test_gaps_evaluation import CALLS, draws_in
from test_gaps_gradients import repeat

import fnloop as fl
from fnloop.testing import toy, toy_loss


def job(folder):
    state = toy()
    batches = [torch.tensor([float(x)]) for x in (1, 3, 5, 7)]
    share = batches[state.backend.rank :: state.backend.world_size]
    step = fl.pipeline(fl.accumulate(len(share)), repeat())(toy_loss)
    state, _ = step(state, share)
    last = fl.pipeline(fl.metric(last=lambda aux, batch: fl.Last(batch.max())))(toy_loss)
    return {
        "w": state.model.w.item(),
        "draws": {name: draws_in(call) for name, call in CALLS.items()},
        "last": fl.fit(last, toy(), batches[:3], hooks=()).history["train/last"],
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return launch.results(tmp_path_factory.mktemp("both"), 2, job)


@pytest.mark.slow
def test_the_draw_of_a_batch_in_evaluation_is_that_of_one_process(both):
    """Each process has three of the six batches."""
    for name, call in CALLS.items():
        first, second = (found["draws"][name] for found in both)
        assert (list(first), list(second)) == (["0", "2", "4"], ["1", "3", "5"])
        assert {**first, **second} == draws_in(call)


@pytest.mark.slow
def test_two_calls_with_one_window_double_its_mean_over_all_processes(both, tmp_path):
    """The mean of 1, 3, 5 and 7 is 4, twice."""
    assert [found["w"] for found in both] == [job(tmp_path)["w"]] * 2 == [-8.0, -8.0]


@pytest.mark.slow
def test_the_last_value_of_a_metric_is_that_of_the_last_batch_whichever_process_has_it(both):
    """Of three batches the first process has two: the second has none in the last round."""
    assert [found["last"] for found in both] == [[5.0], [5.0]]
