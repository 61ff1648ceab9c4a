"""metric: averages over uneven batches, kinds and names, and where a metric is computed."""

import pytest
import torch
from toy_runs import ONE, fitted, noting

import fnloop as fl
from fnloop.testing import toy, toy_loss

TWO = torch.tensor([2.0])
LOADERS = {"train": [ONE], "valid": [ONE, TWO], "test": [TWO]}
UNEVEN = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]


def evaluated(*members, data=UNEVEN, w=0.0):
    return fl.evaluate(fl.pipeline(*members)(toy_loss), toy(w=w), data)


def size(aux, batch):
    return fl.Sum(len(batch))


@pytest.mark.parametrize("on", ["both", "training"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_scalar_is_averaged_over_items_in_training_and_evaluation(n, on):
    mean = fl.metric(mean=lambda aux, batch: batch.mean(), on=on)
    state = fitted({"train": UNEVEN, "valid": UNEVEN}, mean, fl.accumulate(n))
    assert state.history["train/mean"] == (2.5,)
    assert state.history[-1].metrics.get("valid/mean") == (2.5 if on == "both" else None)


@pytest.mark.parametrize(("value", "expected"), [
    (lambda aux, batch: fl.Sum(batch.sum()), 10.0), (lambda aux, batch: fl.Max(batch.max()), 4.0),
    (lambda aux, batch: fl.Last(batch[-1]), 4.0), (lambda aux, batch: fl.Mean(batch.sum(), 1), 5.0),
    (lambda aux, batch: batch.mean(0, keepdim=True), 2.5),  # one element is a scalar
    (lambda aux, batch: torch.tensor(len(batch)), 2.5),  # an int: 3 items of 3 and 1 of 1
    (lambda aux, batch: 2.0, 2.0),
])  # fmt: skip
def test_a_metric_is_combined_by_its_own_rule(value, expected):
    assert evaluated(fl.metric(m=value))["m"] == expected


def test_a_function_may_return_several_metrics_beside_others():
    both = lambda aux, batch: {"mean": batch.mean(), "largest": fl.Max(batch.max())}
    found = evaluated(fl.metric(both, n=size), fl.metric(b=lambda aux, batch: 2.0))
    assert found == {"loss": 0.0, "mean": 2.5, "largest": 4.0, "n": 4.0, "b": 2.0}


def test_a_name_that_another_middleware_reports_is_refused():
    members = fl.clip(1.0), fl.metric(grad_norm=lambda aux, batch: 1.0)
    with pytest.raises(ValueError, match="another middleware inside it reports already: rename"):
        fitted([1], *members)


@pytest.mark.parametrize(("kind", "at_the_end"), [(fl.Last, -2.0), (fl.Max, 0.0)])
def test_a_metric_of_a_parameter_keeps_the_value_before_the_update(kind, at_the_end):
    """The losses are computed with w = 0, -1 and -2; after the last update, w is -3."""
    weight = fl.metric(w=lambda aux, batch: kind(aux["w"]))
    loss_fn = lambda model, batch: (model(batch).mean(), {"w": model.w})
    assert fitted([1, 1, 1], weight, loss_fn=loss_fn).history["train/w"] == (at_the_end,)


@pytest.mark.parametrize(("value", "message"), [
    (torch.ones(2), r"got shape \(2,\): add .mean\(\)"),
    ("high", "must return a scalar tensor or a Metric"),
    (1 + 2j, "must return a scalar tensor or a Metric"),
    (torch.tensor(1 + 2j), r"must be a real number; got torch.complex64: return its .abs\(\)"),
])  # fmt: skip
def test_a_value_that_is_not_a_metric_is_an_error(value, message):
    with pytest.raises(TypeError, match=message):
        evaluated(fl.metric(m=lambda aux, batch: value))


@pytest.mark.parametrize(("value", "error", "message"), [
    ({"loss": 1.0}, ValueError, "would replace the loss"),
    ({"n": 1.0}, ValueError, "reports 'n' twice"), ({"": 1.0}, ValueError, "empty name"),
    ({"a\ud800": 1.0}, ValueError, r"lone surrogate: 'a\\ud800'"),
    (1.0, TypeError, r"must return a mapping of names to metrics; got 1.0.*metric\(name"),
], ids=str)  # fmt: skip
def test_what_a_function_of_several_may_not_return(value, error, message):
    with pytest.raises(error, match=message):
        evaluated(fl.metric(lambda aux, batch: value, n=size))


def names(*members, **settings):
    """Return the metrics of a run besides losses and rates."""
    found = fitted(LOADERS, *members, state=toy(lr=0.0), **settings).history[-1].metrics
    return {name: v for name, v in found.items() if not name.endswith(("/loss", "/lr"))}


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, {"train/n": 1.0, "valid/n": 2.0, "test/n": 1.0}), ({"on": "training"}, {"train/n": 1.0}),
    ({"on": "evaluation"}, {"valid/n": 2.0, "test/n": 1.0}),
    ({"on": "evaluation", "loaders": ("test",)}, {"test/n": 1.0}),
    ({"loaders": ["test", "valid"]}, {"valid/n": 2.0, "test/n": 1.0}),
    ({"loaders": ("train", "test")}, {"train/n": 1.0, "test/n": 1.0}),
    ({"loaders": ("train",)}, {"train/n": 1.0}),
], ids=repr)  # fmt: skip
def test_a_metric_is_computed_where_it_is_for(settings, expected):
    calls = []
    counted = lambda aux, batch: calls.append(1) or size(aux, batch)
    assert names(fl.metric(n=counted, **settings)) == expected
    assert len(calls) == sum(expected.values())  # never where it is not reported


def test_different_loaders_have_different_metrics_of_one_name():
    ten, hundred = (lambda aux, batch, n=n: fl.Sum(n) for n in (10, 100))
    members = fl.metric(n=ten, loaders=("valid",)), fl.metric(n=hundred, loaders=("test",))
    found = names(fl.metric(n=size, on="training"), *members)
    assert found == {"train/n": 1.0, "valid/n": 20.0, "test/n": 100.0}


def test_a_bare_evaluation_has_all_metrics_that_are_for_evaluation():
    a, b, c = fl.metric(a=size, on="training"), fl.metric(b=size, loaders=("test",)), size
    step = fl.pipeline(a, b, fl.metric(c=c))(toy_loss)
    assert fl.evaluate(step, toy(), [ONE]) == {"loss": 0.0, "c": 1.0, "b": 1.0}
    assert step.evaluate(toy(), ONE).metrics.keys() == {"b", "c"}
    assert step(toy(), ONE)[1].metrics.keys() == {"a", "c"}


def test_the_loader_that_is_evaluated_is_known_but_not_to_a_bare_evaluation_in_a_hook():
    seen = []

    def look(step):
        return lambda state, batch: (seen.append(state.run.loader), step(state, batch))[1]

    step = fl.pipeline(fl.Middleware("look", forward=look), fl.metric(n=size, loaders=("test",)))
    step = step(toy_loss)
    note, found = noting(lambda state: (state.run.loader, fl.evaluate(step, state, [ONE])))
    fl.fit(step, toy(), LOADERS, hooks=(note,))
    assert seen == [None, "valid", "valid", "test", None]
    assert found == [(None, {"loss": -1.0, "n": 1.0})]


def test_a_loader_that_the_run_does_not_have_is_refused_before_the_first_update():
    member = fl.metric(n=size, loaders=("tset",))
    message = r"no loader 'tset'; those are: train, valid, test. Did you mean 'test'\?"
    with pytest.raises(KeyError, match=message):
        fitted(LOADERS, member, loss_fn=lambda model, batch: 1 / 0)
    # A loader that is not evaluated this time is not refused.
    assert names(fl.metric(n=size, loaders=("test",)), evaluate_every=None) == {}


@fl.middleware("evaluation")
def scaled(factor):
    """Evaluate the batch a second time, multiplied."""

    def wrap(step):
        def twice(state, batch):
            state, out = step(state, batch)
            _, other = step(state, batch * factor)
            more = {"scaled/loss": fl.Mean(other.loss * other.weight, other.weight)}
            more |= {f"scaled/{name}": metric for name, metric in other.metrics.items()}
            metrics = {**out.metrics, **more}
            return state, fl.Output(out.loss, out.weight, out.aux, metrics, out.skip)

        return twice

    return wrap


def test_the_evaluation_ring_keeps_the_listed_order_and_is_not_in_training():
    biggest = fl.metric(m=lambda aux, batch: fl.Max(batch.max()), on="evaluation")
    loss = {"loss": 2.0, "scaled/loss": 6.0}
    inside = fl.pipeline(biggest, scaled(3.0))(toy_loss)
    assert fl.evaluate(inside, toy(w=1.0), [TWO]) == {**loss, "m": 2.0, "scaled/m": 6.0}
    assert evaluated(scaled(3.0), biggest, data=[TWO], w=1.0) == {**loss, "m": 2.0}
    state, out = inside(toy(w=1.0), TWO)
    assert (state.model.w.item(), dict(out.metrics)) == (-1.0, {})


def test_a_user_who_does_not_evaluate_is_told():
    idle = lambda step: lambda state, batch: (state, fl.Output(torch.tensor(0.0), 1))
    with pytest.raises(ValueError, match=r"did not call the step .* so nothing was evaluated"):
        evaluated(fl.Middleware("idle", evaluation=idle))


def test_a_slot_of_an_evaluation_is_made_for_a_bare_one():
    def wrap(step):
        return lambda state, batch: state.slots["seen"].append(len(batch)) or step(state, batch)

    made = []
    evaluated(fl.Middleware("seen", evaluation=wrap, init=lambda state: made))
    assert made == [3, 1]


def test_an_error_names_the_middleware_of_the_evaluation():
    def explode(aux, batch):
        raise ArithmeticError("boom")

    with pytest.raises(ArithmeticError) as info:
        fitted(LOADERS, fl.metric(n=explode, on="evaluation"))
    where = "while in metric(n=explode, on='evaluation'), valid, epoch 1"
    assert info.value.__notes__[0] == "while in the metric 'n'"
    assert info.value.__notes__[1].startswith(where)
