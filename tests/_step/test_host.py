"""Who decides about an update on the host."""

import threading

import pytest
import torch
from sample_middleware import own_guard

import fnloop as fl
from fnloop._step.update import decide, replace_host
from fnloop.testing import toy, toy_loss

OUT = fl.Output(torch.tensor(1.0), 1)


def judge(state, flag):
    return "bad" if flag else None


class Recorder:
    """A host that never reads the flag."""

    def decide(self, state, out, flag, judge):
        return "recorded"


@pytest.mark.parametrize(("flag", "skip"), [(0.0, None), (1.0, "bad")])
def test_the_judge_decides_by_the_flag(flag, skip):
    state = toy()
    assert decide(state, OUT, torch.tensor(flag), judge)[0] is state
    assert decide(state, OUT, torch.tensor(flag), judge)[1].skip == skip


def test_another_host_decides_within_its_block_even_if_that_raises():
    with pytest.raises(ZeroDivisionError), replace_host(Recorder()):
        assert decide(toy(), OUT, torch.tensor(0.0), judge)[1].skip == "recorded"
        raise ZeroDivisionError
    assert decide(toy(), OUT, torch.tensor(0.0), judge)[1].skip is None


def test_a_host_is_replaced_in_its_own_thread_only():
    found = []
    with replace_host(Recorder()):
        other = threading.Thread(
            target=lambda: found.append(decide(toy(), OUT, torch.tensor(1.0), judge)[1].skip)
        )
        other.start()
        other.join()
    assert found == ["bad"]


def test_the_judge_is_not_asked_about_an_update_that_is_left_out_already():
    out = fl.Output(torch.tensor(1.0), 1, skip="before")
    assert fl.decide(toy(), out, torch.tensor(1.0), lambda state, flag: 1 / 0)[1].skip == "before"


@pytest.mark.parametrize(
    ("flag", "judge", "match"),
    [
        (True, judge, "flag as a scalar tensor; got True"),
        (torch.ones(2), judge, "flag as a scalar tensor"),
        (torch.ones(()), "bad", "judge as a function"),
    ],
)
def test_a_flag_is_a_scalar_tensor_and_a_judge_a_function(flag, judge, match):
    with pytest.raises(TypeError, match=f"decide expects {match}"):
        fl.decide(toy(), OUT, flag, judge)


def test_a_batch_of_a_window_is_not_judged_for_itself():
    inside = fl.pipeline(own_guard(), fl.accumulate(2))(toy_loss)
    with pytest.raises(ValueError, match=r"whole updates, .* after accumulate. To leave a batch"):
        fl.fit(inside, toy(), [torch.ones(1)] * 2, hooks=())
    around = fl.pipeline(fl.clip(9.0), fl.accumulate(2), own_guard())(toy_loss)
    batches = [torch.tensor([x]) for x in (1.0, float("nan"), 2.0, 4.0)]
    state = fl.fit(around, toy(), batches, hooks=())
    assert (state.model.w.item(), state.step, state.skipped) == (-3.0, 1, 1)
