"""Who decides about an update on the host."""

import threading

import pytest
import torch
from sample_middleware import own_guard
from toy_runs import fitted

import fnloop as fl
from fnloop._step.transaction import decide, host
from fnloop.testing import toy

OUT = fl.Output(torch.tensor(1.0), 1)


def judge(state, flag):
    return "bad" if flag else None


def recorded():
    """Let a host decide that never reads the flag."""
    return host().replaced(ask=lambda state, out, flag, judge: "recorded")


def skip(flag):
    return decide(toy(), OUT, torch.tensor(flag), judge)[1].skip


def test_the_judge_decides_by_the_flag_and_another_host_within_its_block_even_if_that_raises():
    assert (skip(0.0), skip(1.0)) == (None, "bad")
    with pytest.raises(ZeroDivisionError), recorded():
        assert skip(0.0) == "recorded"
        raise ZeroDivisionError
    assert skip(0.0) is None


def test_a_host_is_replaced_in_its_own_thread_only():
    found = []
    with recorded():
        other = threading.Thread(target=lambda: found.append(skip(1.0)))
        other.start()
        other.join()
    assert found == ["bad"]


def test_what_takes_the_place_of_the_host_calls_optimizers_and_may_call_the_one_before():
    calls = []

    def noted(name):
        before = host().apply
        return host().replaced(apply=lambda optimizer: (calls.append(name), before(optimizer)))

    with noted("outer"), noted("inner"):
        assert fitted([2]).model.w.item() == -2.0
    assert calls == ["inner", "outer"]
    assert fitted([2]).model.w.item() == -2.0
    assert len(calls) == 2


def test_the_judge_is_not_asked_about_an_update_that_is_left_out_already():
    out = fl.Output(torch.tensor(1.0), 1, skip="before")
    assert fl.decide(toy(), out, torch.tensor(1.0), lambda state, flag: 1 / 0)[1].skip == "before"


@pytest.mark.parametrize(("flag", "judge", "match"), [
    (True, judge, "flag as a scalar tensor; got True"),
    (torch.ones(2), judge, "flag as a scalar tensor"),
    (torch.ones(()), "bad", "judge as a function"),
])  # fmt: skip
def test_a_flag_is_a_scalar_tensor_and_a_judge_a_function(flag, judge, match):
    with pytest.raises(TypeError, match=f"decide expects {match}"):
        fl.decide(toy(), OUT, flag, judge)


def test_a_batch_of_a_window_is_not_judged_for_itself():
    with pytest.raises(ValueError, match=r"whole updates, .* after accumulate. To leave a batch"):
        fitted([1, 1], own_guard(), fl.accumulate(2))
    state = fitted([1, float("nan"), 2, 4], fl.clip(9.0), fl.accumulate(2), own_guard())
    assert (state.model.w.item(), state.step, state.skipped) == (-3.0, 1, 1)
