"""metric: averages over uneven batches, other kinds of metrics, and names."""

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss


def accuracy(aux, batch):
    return (aux["output"] > 0) == (batch > 0)


def test_a_scalar_is_averaged_over_items_in_training_and_evaluation():
    step = fl.pipeline(fl.metric(accuracy=lambda aux, batch: accuracy(aux, batch).float().mean()))(
        toy_loss
    )
    data = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-1.0])]
    state = fl.fit(step, toy(w=1.0, lr=0.0), {"train": data, "valid": data[:1]}, hooks=())
    assert state.history["train/accuracy"] == state.history["valid/accuracy"] == (1.0,)
    state = fl.fit(step, toy(w=-1.0, lr=0.0), data, hooks=())
    assert state.history["train/accuracy"] == (0.0,)
    uneven = fl.pipeline(fl.metric(big=lambda aux, batch: (batch > 0).float().mean()))(toy_loss)
    assert fl.evaluate(uneven, toy(), data) == {"loss": 0.0, "big": 0.75}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda aux, batch: fl.Sum(batch.sum()), 10.0),
        (lambda aux, batch: fl.Max(batch.max()), 4.0),
        (lambda aux, batch: fl.Last(batch[-1]), 4.0),
        (lambda aux, batch: fl.Mean(batch.sum(), 1), 5.0),
        (lambda aux, batch: batch.mean(), 2.5),
        (lambda aux, batch: torch.tensor(len(batch)), 2.5),  # an int: 3 items of 3 and 1 of 1
        (lambda aux, batch: 2.0, 2.0),
    ],
)
def test_a_metric_is_combined_by_its_own_rule(value, expected):
    data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
    assert fl.evaluate(fl.pipeline(fl.metric(m=value))(toy_loss), toy(), data)["m"] == expected


def test_two_metric_middleware_work_together():
    step = fl.pipeline(fl.metric(a=lambda aux, b: 1.0), fl.metric(b=lambda aux, b: 2.0))(toy_loss)
    assert fl.evaluate(step, toy(), [torch.ones(1)]) == {"loss": 0.0, "a": 1.0, "b": 2.0}


def test_two_middleware_that_report_the_same_name_are_refused():
    with pytest.raises(
        ValueError, match="which another middleware inside it reports already: rename one"
    ):
        members = (fl.clip(1.0), fl.metric(grad_norm=lambda aux, batch: 1.0))
        fl.fit(fl.pipeline(*members)(toy_loss), toy(), [torch.ones(1)], hooks=())
    one, two = (
        fl.metric(a=lambda aux, b: 1.0),
        fl.metric(a=lambda aux, b: 2.0, b=lambda aux, b: 3.0),
    )
    with pytest.raises(ValueError, match=r"metric\(a=.* and metric\(a=.*, b=.* both report 'a'"):
        fl.pipeline(one, two)


@pytest.mark.parametrize(("kind", "at_the_end"), [(fl.Last, -2.0), (fl.Max, 0.0)])
def test_a_metric_of_a_parameter_keeps_the_value_before_the_update(kind, at_the_end):
    """The losses are computed with w = 0, -1 and -2; after the last update, w is -3."""
    step = fl.pipeline(fl.metric(w=lambda aux, batch: kind(aux["w"])))(
        lambda m, b: (m(b).mean(), {"w": m.w})
    )
    state, out = step(toy(), torch.ones(1))
    assert (out.metrics["w"].compute(), state.model.w.item()) == (0.0, -1.0)
    assert fl.fit(step, toy(), [torch.ones(1)] * 3, hooks=()).history["train/w"] == (at_the_end,)


def test_a_metric_does_not_contribute_to_the_gradient():
    step = fl.pipeline(fl.metric(m=lambda aux, batch: aux["output"].mean()))(toy_loss)
    _, out = step(toy(), torch.ones(1))
    assert not out.metrics["m"].total.requires_grad


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.metric(), ValueError, "at least one name"),
        (lambda: fl.metric(loss=lambda a, b: 0), ValueError, "choose another name"),
        (
            lambda: fl.metric(accuracy=0.5),
            TypeError,
            r"metric expects accuracy as a function \(aux, batch\) -> scalar or Metric; got 0\.5",
        ),
    ],
)
def test_a_wrong_argument_is_an_error_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"got shape \(2,\): add .mean\(\)"),
        ("high", "must return a scalar tensor or a Metric"),
        (1 + 2j, "must return a scalar tensor or a Metric"),
        (torch.tensor(1 + 2j), r"must be a real number; got torch.complex64: return its .abs\(\)"),
    ],
)
def test_a_value_that_is_not_a_metric_is_an_error(value, message):
    with pytest.raises(TypeError, match=message):
        fl.pipeline(fl.metric(m=lambda aux, batch: value))(toy_loss)(toy(), torch.ones(1))
