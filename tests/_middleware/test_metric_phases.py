"""metric: in training or in evaluation only, for some loaders, and several from one function."""

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])
LOADERS = {"train": [ONE], "valid": [ONE, TWO], "test": [TWO]}


def size(aux, batch):
    return fl.Sum(len(batch))


def names(*members, loaders=LOADERS, **settings):
    """Return the names of the metrics of a run besides losses and rates, and the record."""
    step = fl.pipeline(*members)(toy_loss)
    state = fl.fit(step, toy(lr=0.0), loaders, hooks=(), **settings)
    found = dict(state.history[-1].metrics)
    return {name: v for name, v in found.items() if not name.endswith(("/loss", "/lr"))}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"train/n": 1.0, "valid/n": 2.0, "test/n": 1.0}),
        ({"on": "training"}, {"train/n": 1.0}),
        ({"on": "evaluation"}, {"valid/n": 2.0, "test/n": 1.0}),
        ({"on": "evaluation", "loaders": ("test",)}, {"test/n": 1.0}),
        ({"loaders": ["test", "valid"]}, {"valid/n": 2.0, "test/n": 1.0}),
        ({"loaders": ("train", "test")}, {"train/n": 1.0, "test/n": 1.0}),
        ({"loaders": ("train",)}, {"train/n": 1.0}),
    ],
    ids=repr,
)
def test_a_metric_is_computed_where_it_is_for(settings, expected):
    calls = []

    def counted(aux, batch):
        calls.append(len(batch))
        return size(aux, batch)

    assert names(fl.metric(n=counted, **settings)) == expected
    assert len(calls) == sum(expected.values())  # never where it is not reported


def test_different_loaders_have_different_metrics_of_one_name():
    members = (
        fl.metric(n=size, on="training"),
        fl.metric(n=lambda aux, batch: fl.Sum(10), loaders=("valid",)),
        fl.metric(n=lambda aux, batch: fl.Sum(100), loaders=("test",)),
    )
    assert names(*members) == {"train/n": 1.0, "valid/n": 20.0, "test/n": 100.0}


def test_a_bare_evaluation_has_all_metrics_that_are_for_evaluation():
    step = fl.pipeline(
        fl.metric(a=size, on="training"), fl.metric(b=size, loaders=("test",)), fl.metric(c=size)
    )(toy_loss)
    assert fl.evaluate(step, toy(), [ONE]) == {"loss": 0.0, "c": 1.0, "b": 1.0}
    assert step.evaluate(toy(), ONE).metrics.keys() == {"b", "c"}
    assert step(toy(), ONE)[1].metrics.keys() == {"a", "c"}


def test_a_bare_evaluation_within_a_hook_knows_no_loader():
    step = fl.pipeline(fl.metric(n=size, loaders=("test",)))(toy_loss)
    found = []

    def hook(state):
        found.append((state.run.loader, fl.evaluate(step, state, [ONE])))
        return state

    fl.fit(step, toy(), LOADERS, hooks=(hook,))
    assert found == [(None, {"loss": -1.0, "n": 1.0})]


def test_the_loader_that_is_evaluated_is_known():
    seen = []

    def loss_fn(model, batch):
        return toy_loss(model, batch)

    @fl.middleware("forward")
    def spied():
        def wrap(step):
            def spy(state, batch):
                seen.append(state.run.loader)
                return step(state, batch)

            return spy

        return wrap

    fl.fit(fl.pipeline(spied())(loss_fn), toy(), LOADERS, hooks=())
    assert seen == [None, "valid", "valid", "test"]


def test_a_loader_that_the_run_does_not_have_is_refused_before_the_first_update():
    steps, state = [], toy()

    def loss_fn(model, batch):
        steps.append(1)
        return toy_loss(model, batch)

    step = fl.pipeline(fl.metric(n=size, loaders=("tset",)))(loss_fn)
    with pytest.raises(
        KeyError, match=r"no loader 'tset'; those are: train, valid, test. Did you mean 'test'\?"
    ):
        fl.fit(step, state, LOADERS, hooks=())
    assert not steps


def test_a_loader_that_is_not_evaluated_this_time_is_not_refused():
    assert names(fl.metric(n=size, loaders=("test",)), evaluate_every=None) == {}


@pytest.mark.parametrize("n", [1, 2])
def test_a_training_metric_is_exact_over_windows(n):
    step = fl.pipeline(
        fl.metric(mean=lambda aux, batch: batch.mean(), on="training"), fl.accumulate(n)
    )(toy_loss)
    data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
    assert fl.fit(step, toy(), data, hooks=()).history["train/mean"] == (4.0,)


# --- a ring for evaluation


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


def biggest(aux, batch):
    return fl.Max(batch.max())


def test_the_evaluation_ring_keeps_the_listed_order_and_is_not_in_training():
    inside = fl.pipeline(fl.metric(m=biggest, on="evaluation"), scaled(3.0))(toy_loss)
    outside = fl.pipeline(scaled(3.0), fl.metric(m=biggest, on="evaluation"))(toy_loss)
    state = toy(w=1.0)
    loss = {"loss": 2.0, "scaled/loss": 6.0}
    assert fl.evaluate(inside, state, [TWO]) == {**loss, "m": 2.0, "scaled/m": 6.0}
    assert fl.evaluate(outside, state, [TWO]) == {**loss, "m": 2.0}
    state, out = inside(state, TWO)
    assert (state.model.w.item(), dict(out.metrics)) == (-1.0, {})


def test_a_user_who_does_not_evaluate_is_told():
    idle = fl.Middleware(
        "idle", evaluation=lambda step: lambda state, b: (state, fl.Output(torch.tensor(0.0), 1))
    )
    with pytest.raises(ValueError, match=r"did not call the step .* so nothing was evaluated"):
        fl.evaluate(fl.pipeline(idle)(toy_loss), toy(), [ONE])


def test_a_slot_of_an_evaluation_is_made_for_a_bare_one():
    def wrap(step):
        def counted(state, batch):
            state.slots["seen"].append(len(batch))
            return step(state, batch)

        return counted

    made = []
    member = fl.Middleware("seen", evaluation=wrap, init=lambda state: made)
    fl.evaluate(fl.pipeline(member)(toy_loss), toy(), [ONE, ONE])
    assert made == [1, 1]


def test_an_error_names_the_middleware_of_the_evaluation():
    def explode(aux, batch):
        raise ArithmeticError("boom")

    step = fl.pipeline(fl.metric(n=explode, on="evaluation"))(toy_loss)
    with pytest.raises(ArithmeticError) as info:
        fl.fit(step, toy(), (LOADERS["train"], LOADERS["valid"]), hooks=())
    assert info.value.__notes__[0] == "while in the metric 'n'"
    assert info.value.__notes__[1].startswith(
        "while in metric(n=explode, on='evaluation'), valid, epoch 1"
    )


def test_the_diagram_shows_what_acts_in_evaluation():
    step = fl.pipeline(fl.metric(n=size, on="evaluation"))(toy_loss)
    assert "forward   metric(n=size, on='evaluation') in evaluation" in str(step)


# --- one function for several metrics


def test_a_function_may_return_several_metrics():
    both = lambda aux, batch: {"mean": batch.mean(), "largest": fl.Max(batch.max())}
    step = fl.pipeline(fl.metric(both, n=size))(toy_loss)
    found = fl.evaluate(step, toy(), [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])])
    assert found == {"loss": 0.0, "mean": 4.0, "largest": 10.0, "n": 4.0}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"loss": 1.0}, ValueError, "would replace the loss"),
        ({"n": 1.0}, ValueError, "reports 'n' twice"),
        ({"": 1.0}, ValueError, "empty name"),
        (1.0, TypeError, r"must return a mapping of names to metrics; got 1.0.*metric\(name"),
    ],
    ids=str,
)
def test_what_a_function_of_several_may_not_return(value, error, message):
    step = fl.pipeline(fl.metric(lambda aux, batch: value, n=size))(toy_loss)
    with pytest.raises(error, match=message):
        fl.evaluate(step, toy(), [ONE])


def test_one_element_is_a_scalar():
    step = fl.pipeline(fl.metric(m=lambda aux, batch: batch.mean(0, keepdim=True)))(toy_loss)
    state = fl.fit(step, toy(), [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])], hooks=())
    assert state.history["train/m"] == (4.0,)


# --- wrong arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.metric(on="evaluation"), ValueError, "at least one name"),
        (lambda: fl.metric(n=size, on="valid"), ValueError, '"both", "training", "evaluation"'),
        (lambda: fl.metric(on=size), ValueError, "A metric cannot have this name"),
        (lambda: fl.metric(n=size, loaders=size), TypeError, "A metric cannot have this name"),
        (lambda: fl.metric(n=size, loaders="test"), TypeError, r'Write loaders=\("test",\)'),
        (lambda: fl.metric(n=size, loaders=()), ValueError, "never be computed"),
        (lambda: fl.metric(n=size, loaders=(3,)), TypeError, "loaders"),
        (lambda: fl.metric(n=size, on="training", loaders=("train",)), ValueError, "leave out"),
        (lambda: fl.metric(n=size, on="evaluation", loaders=("train",)), ValueError, "leave out"),
        (lambda: fl.metric(3), TypeError, "positional"),
    ],
)
def test_a_wrong_argument_is_an_error_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()
