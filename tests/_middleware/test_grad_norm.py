"""grad_norm: the norm that clip would report, and nothing changed."""

import math

import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, check_laws, small, toy, toy_loss


def test_it_is_the_mean_over_updates_of_the_norm_of_each():
    batches = [torch.tensor([x]) for x in (3.0, -4.0, 5.0)]
    state = fl.fit(fl.pipeline(fl.grad_norm())(toy_loss), toy(), batches, hooks=())
    assert state.history.latest("train/grad_norm") == 4.0 and state.model.w.item() == -4.0


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("accumulate", [(), (fl.accumulate(3),)])
def test_it_reports_what_clip_would(norm_type, accumulate):
    problem = small()

    def fitted(*members):
        step = fl.pipeline(*members)(problem.loss_fn)
        return fl.fit(step, problem.state(), problem.batches, hooks=())

    norm, clipped = fl.grad_norm(norm_type), fl.clip(math.inf, norm_type)
    assert_same(fitted(*accumulate, norm), fitted(*accumulate, clipped))
    assert_same(fitted(norm, *accumulate), fitted(clipped, *accumulate))


def test_it_keeps_the_laws():
    check_laws(fl.pipeline(fl.grad_norm()))
    check_laws(fl.pipeline(fl.accumulate(2), fl.grad_norm(1.0)), small())


@pytest.mark.parametrize(
    "members", [(fl.clip(1.0), fl.grad_norm()), (fl.grad_norm(), fl.clip(1.0))]
)
def test_with_clip_it_is_refused(members):
    with pytest.raises(ValueError, match=r"clip\(1\.0\) reports the metric 'grad_norm' already"):
        fl.pipeline(*members)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("2", TypeError), (True, TypeError)])
def test_a_wrong_norm_is_an_error(value, error):
    with pytest.raises(error, match="grad_norm expects norm_type"):
        fl.grad_norm(value)
