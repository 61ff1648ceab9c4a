"""derive, and what middleware report: numbers made from those of a report."""

import math

import pytest
import torch
from toy_runs import ONE, fitted

import fnloop as fl
from fnloop.testing import toy, toy_loss

TWO = torch.tensor([2.0])
LOADERS = {"train": [ONE], "valid": [TWO, TWO], "test": [TWO]}


def run(*members, loaders=LOADERS, **settings):
    """Fit with a rate of 0, so that the loss is the mean of the batches."""
    return fitted(loaders, *members, state=toy(w=1.0, lr=0.0), **settings)


def double(m):
    return 2 * m["loss"]


def test_a_derived_number_is_made_for_each_loader_after_its_own():
    state = run(fl.derive(double=double), fl.derive(fourfold=lambda m: 2 * m["double"]))
    assert list(state.history[-1].metrics.items()) == [
        *[("train/loss", 1.0), ("train/lr", 0.0), ("train/double", 2.0), ("train/fourfold", 4.0)],
        *[("valid/loss", 2.0), ("valid/double", 4.0), ("valid/fourfold", 8.0)],
        *[("test/loss", 2.0), ("test/double", 4.0), ("test/fourfold", 8.0)],
    ]


def test_it_is_in_recent_records_and_in_a_bare_evaluation():
    """It is made of the mean, and not a mean of what is made."""
    member = fl.derive(square=lambda m: m["loss"] ** 2)
    history = run(member, loaders=[1, 3], record_every=fl.every(steps=1)).history
    assert (history["recent/square"], history["train/square"]) == ((1.0, 9.0), (4.0,))
    found = fl.evaluate(fl.pipeline(member)(toy_loss), toy(w=1.0), [TWO])
    assert found == {"loss": 2.0, "square": 4.0}


def f1(aux, batch):
    return fl.Sum(1.0)


def test_a_loader_that_lacks_a_number_is_left_out():
    members = fl.metric(f1=f1, loaders=("test",)), fl.derive(f2=lambda m: 2 * m["f1"], d=double)
    found = run(*members).history[-1].metrics
    assert {name for name in found if name.endswith("/f2")} == {"test/f2"}
    assert {name for name in found if name.endswith("/d")} == {"train/d", "valid/d", "test/d"}
    at = {"valid": fl.every(epochs=1), "test": fl.every(epochs=2)}  # not in every report
    assert run(*members, epochs=2, evaluate_every=at).history["test/f2"] == (2.0,)
    assert run(*members, evaluate_every=None).history["train/loss"] == (1.0,)


def test_a_number_that_no_loader_has_is_refused():
    with pytest.raises(KeyError) as info:
        run(fl.metric(f1=f1, on="evaluation"), fl.derive(f2=lambda m: 2 * m["f_1"]))
    assert info.value.args[0] == (
        "derive(f2=<lambda>): no loader of this run has the metric 'f_1'; there are, of train: "
        "loss, lr; valid: loss, f1; test: loss, f1. Did you mean 'f1'?"
    )


def test_a_number_that_a_loader_once_had_may_be_missing_later():
    reports = iter([{"rare": 1.0}, {}])
    rare = fl.Middleware("rare", report=lambda loader, numbers: next(reports))
    state = run(rare, fl.derive(d=lambda m: m["rare"]), epochs=2, loaders=[ONE])
    assert state.history["train/d"] == (1.0,)
    # A bare evaluation leaves out what it cannot derive.
    step = fl.pipeline(fl.derive(ratio=lambda m: m["grad_norm"] / 2))(toy_loss)
    assert fl.evaluate(step, toy(), [ONE]) == {"loss": 0.0}


def half(m):
    return m["double"] / 2


ONE_MEMBER = (
    "derive: 'half' looks up 'double', which is listed after it: write derive(double=..., half=...)"
)
TWO_MEMBERS = (
    "derive(half=half) looks up 'double', which derive(double=double) adds after it: list "
    "derive(double=double) first"
)


@pytest.mark.parametrize(("members", "message"), [
    ((fl.derive(half=half, double=double),), ONE_MEMBER),
    ((fl.derive(half=half), fl.derive(double=double)), TWO_MEMBERS),
], ids=["one", "two"])  # fmt: skip
@pytest.mark.parametrize("record_every", [None, fl.every(steps=1)], ids=repr)
def test_what_is_listed_after_it_is_to_be_listed_before_it(members, message, record_every):
    with pytest.raises(ValueError) as info:
        run(*members, loaders=[ONE, ONE], record_every=record_every)
    assert str(info.value) == message
    with pytest.raises(ValueError):
        fl.evaluate(fl.pipeline(*members)(toy_loss), toy(), [ONE])


def test_a_key_error_of_its_own_is_raised():
    with pytest.raises(KeyError, match="mine") as info:
        run(fl.derive(x=lambda m: {}["mine"]))
    assert "while in the derived metric 'x', for train" in info.value.__notes__[0]


def refuse(text):
    raise ValueError(text)


@pytest.mark.parametrize(("function", "found"), [
    (lambda m: math.exp(1000.0), math.nan), (lambda m: 1 / 0, math.nan),
    (lambda m: math.log(0.0), math.nan), (lambda m: 3, 3.0), (lambda m: torch.tensor([3.0]), 3.0),
    # What math.log says since Python 3.14:
    (lambda m: refuse("expected a positive input, got 0.0"), math.nan),
])  # fmt: skip
def test_any_number_will_do_and_what_has_no_value_is_nan(function, found):
    history = run(fl.derive(x=function), loaders=[ONE]).history
    assert history["train/x"] == pytest.approx([found], nan_ok=True)


@pytest.mark.parametrize("value", [None, "high", True, torch.ones(2), [1.0]], ids=repr)
def test_a_value_that_is_not_a_number_is_an_error(value):
    with pytest.raises(TypeError, match="the value of 'x' must be a number; got"):
        run(fl.derive(x=lambda m: value))


def test_a_name_that_is_there_is_refused_at_the_report():
    message = "reports the metric 'grad_norm', which is there already: rename"
    with pytest.raises(ValueError, match=message):
        run(fl.clip(1.0), fl.derive(grad_norm=double))


def test_a_middleware_may_report_more_numbers():
    seen = []

    def report(loader, numbers):
        seen.append((loader, dict(numbers)))
        return {"size": float(len(numbers))}

    member = fl.Middleware("sized", report=report)
    assert run(member, loaders=([ONE], [TWO])).history["valid/size"] == (1.0,)
    assert seen == [("train", {"loss": 1.0, "lr": 0.0}), ("valid", {"loss": 2.0})]
    assert fl.evaluate(fl.pipeline(member)(toy_loss), toy(), [ONE])["size"] == 1.0
    assert seen[-1][0] is None


@pytest.mark.parametrize(("found", "error", "message"), [
    (None, TypeError, "its report as a mapping"),
    ({"loss": 1.0}, ValueError, "'loss', which is there already"),
    ({"x": "high"}, TypeError, "'x' must be a number"),
    ({3: 1.0}, TypeError, "the name of a metric"),
], ids=repr)  # fmt: skip
def test_a_report_that_is_not_numbers_by_name_is_an_error(found, error, message):
    with pytest.raises(error, match=message):
        run(fl.Middleware("mine", report=lambda loader, numbers: found))
