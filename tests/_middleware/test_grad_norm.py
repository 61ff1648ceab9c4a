"""grad_norm: the norm that clip would report, and nothing changed."""

import math

import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import assert_same, small, spy, toy, toy_loss


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


def test_by_module_it_reports_the_norm_of_each_module_with_parameters_of_its_own():
    model = nn.Sequential(nn.Linear(2, 1), nn.Sequential(nn.Tanh(), nn.Linear(1, 1)))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    extra = nn.Parameter(torch.zeros(4))
    state = fl.TrainState.create(model, torch.optim.SGD([*model.parameters(), extra], lr=1.0))
    _, out = fl.grad_norm(by="module").gradient(spy(grad=2.0))(state, None)
    norms = {name: metric.compute() for name, metric in out.metrics.items()}
    assert norms == {
        "grad_norm/0": pytest.approx(2 * math.sqrt(3)),
        "grad_norm/1.1": pytest.approx(2 * math.sqrt(2)),
        "grad_norm/Sequential": 2.0,
        "grad_norm/others": 4.0,
    }


def test_it_is_reported_beside_clip_and_beside_the_norm_of_all():
    members = fl.clip(1.0), fl.grad_norm(by="module")
    state = fl.fit(fl.pipeline(*members)(toy_loss), toy(), [torch.tensor([4.0])], hooks=())
    assert state.history.latest("train/grad_norm") == 4.0
    assert state.history.latest("train/grad_norm/Toy") == pytest.approx(1.0)
    fl.pipeline(fl.grad_norm(), fl.grad_norm(by="module"))
    fl.pipeline(fl.grad_norm(), fl.clip(1.0, only="w", name="w"))


def test_by_something_else_is_an_error():
    with pytest.raises(ValueError, match='grad_norm expects by="module", or None'):
        fl.grad_norm(by="layer")
