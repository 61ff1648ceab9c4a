"""cuda_graph as a middleware: its settings and its place. tests/_graphs has the rest."""

import pickle

import pytest
import torch

import fnloop as fl
from fnloop import CaptureError
from fnloop.testing import toy, toy_loss


def test_a_model_on_the_cpu_is_refused():
    with pytest.raises(
        CaptureError, match=r"needs the model on a CUDA device; it is on cpu\. .*fallback=True"
    ):
        fl.pipeline(fl.cuda_graph())(toy_loss)(toy(), torch.ones(1))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"warmup as an int >= 1, .*; got 0"):
        fl.cuda_graph(0)
    with pytest.raises(ValueError, match=r"limit as an int >= 1, .*; got 1\.5"):
        fl.cuda_graph(limit=1.5)


def test_members_that_exclude_each_other_are_refused_when_composing():
    fl.pipeline(fl.amp("bf16"), fl.compiled(mode="max-autotune-no-cudagraphs"), fl.cuda_graph())
    for own in (
        fl.compiled(mode="reduce-overhead"),
        fl.compiled(options={"triton.cudagraphs": True}),
    ):
        with pytest.raises(ValueError, match="makes CUDA graphs of its own"):
            fl.pipeline(fl.cuda_graph(), own)


def test_it_shows_compares_and_pickles_as_it_was_typed():
    pipe = fl.pipeline(fl.accumulate(4), fl.cuda_graph(warmup=5))
    assert repr(pipe) == "pipeline(accumulate(4), cuda_graph(warmup=5))"
    assert pickle.loads(pickle.dumps(pipe)) == pipe
    assert pickle.loads(pickle.dumps(pipe(toy_loss))).pipeline == pipe


def test_without_cuda_it_warns_once_and_runs_eagerly():
    step, state = fl.pipeline(fl.cuda_graph(fallback=True))(toy_loss), toy()
    with pytest.warns(UserWarning, match="cuda_graph runs eagerly: .* it is on cpu"):
        state, _ = step(state, torch.ones(1))
    state, _ = step(state, torch.ones(1))
    assert (state.model.w.item(), state.optimizer.param_groups[0]["lr"]) == (-2.0, 1.0)
