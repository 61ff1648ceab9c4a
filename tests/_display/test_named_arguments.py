"""An argument that a function does not take: which one it is, and what it takes."""

import pytest
from toy_runs import ONE

import fnloop as fl
from fnloop._display import checks
from fnloop.debug import verify, without
from fnloop.testing import toy, toy_loss

STEP = fl.pipeline()(toy_loss)


def taking(a, b=1, *, near=2, other=3):
    """Take two by position."""


@pytest.mark.parametrize(("args", "kwargs", "said"), [
    ((), {"nearr": 1}, "f has no argument nearr=. Did you mean 'near'?"),
    ((), {"nothing": 1}, "f has no argument nothing=: it takes a, b, near, other"),
    ((0,), {"nothing": 1, "near": 1}, "f has no argument nothing=: it takes b, other"),
    ((), {"nearr": 1, "near": 2}, "f has no argument nearr=: it takes a, b, other"),  # it is given
    ((0, 1, "x"), {}, "f takes a, b by position, and by name: near, other; got 'x' as number 3"),
])  # fmt: skip
def test_what_a_function_does_not_take_is_told_with_what_it_takes(args, kwargs, said):
    with pytest.raises(TypeError) as caught:
        checks.arguments("f", taking, args, kwargs)
    assert str(caught.value) == said


@pytest.mark.parametrize("function", [
    taking, lambda *args, **kwargs: None, dict, object.__init__, lambda a, **rest: None,
])  # fmt: skip
def test_what_a_function_takes_is_accepted(function):
    checks.arguments("f", function, (1,), {"b": 2} if function is taking else {})


def test_a_function_without_arguments_says_so():
    with pytest.raises(TypeError, match=r"^f takes nothing by position; got 1 as number 1$"):
        checks.arguments("f", lambda: None, (1,), {})


class Mine(fl.Hook):
    """A hook of a user, whose arguments are its own business."""

    def __init__(self, *, n=1):
        self.n = n


@pytest.mark.parametrize(("call", "said"), [
    (lambda: fl.every(epoch=1), r"every has no argument epoch=\. Did you mean 'epochs'\?"),
    (lambda: fl.when_improved("valid/loss", modes="min"), "Did you mean 'mode'"),
    (lambda: fl.paced(failures=1), "paced has no argument failures=: it takes failures_per_day"),
    (lambda: fl.checkpoint("a", keep_last=3), "checkpoint has no argument keep_last=: it takes"),
    (lambda: fl.checkpoint("a", 3, "valid/loss", "min", 2),
     "checkpoint takes folder, keep, best, mode by position, and by name: keep_best, .* number 5"),
    (lambda: fl.live_plot(path="a.png"), "live_plot has no argument path=: it takes"),
    (lambda: fl.time_limit(hour=1), "time_limit has no argument hour=. Did you mean 'hours'"),
    (lambda: fl.clip(max=1.0), "clip has no argument max=: it takes max_norm, norm_type"),
    (lambda: fl.accumulate(steps=4), "accumulate has no argument steps=: it takes n, total"),
    (lambda: fl.plateau("valid/loss", threshold=0.1), "plateau has no argument threshold=: it tak"),
    (lambda: fl.evaluate(STEP, toy(), [ONE], batches=3), "evaluate has no argument batches="),
    (lambda: fl.search(STEP, {"a": toy()}, [ONE], metric="valid/loss"), "no argument metric="),
    (lambda: fl.fit(STEP, toy(), [ONE], epoch=1), "fit has no argument epoch=.*'epochs'"),
    (lambda: without("a", STEP, toy(), [ONE], 3),
     "without takes folder, step, state, loaders by position, and by name: batch, rows, until; g"),
    (lambda: verify("a", STEP, toy(), [ONE], span=1), "verify has .* Did you mean 'spans'"),
    (lambda: Mine(m=1), r"__init__\(\) got an unexpected keyword argument 'm'"),
])  # fmt: skip
def test_what_a_public_function_does_not_take_is_told(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_more_than_one_number_of_every_are_joined():
    with pytest.raises(TypeError, match=r"write every\(epochs=1\) \| every\(steps=2\)$"):
        fl.every(epochs=1, steps=2)


def a(state):
    return state


def b(state):
    return state


def test_a_moment_takes_one_hook():
    with pytest.raises(TypeError, match=r"one hook: write every\(steps=2\)\(a\), every"):
        fl.every(steps=2)(a, b)


def test_a_number_without_its_name_is_written_with_it():
    with pytest.raises(TypeError, match=r"^paced expects failures_per_day=; got 0.5: write"):
        fl.paced(0.5)
    with pytest.raises(TypeError, match=r"^every expects one of epochs=, steps=, .*; got 2: write"):
        fl.every(2)


@pytest.mark.parametrize("call", [
    lambda mode: fl.early_stop("valid/loss", mode=mode),
    lambda mode: fl.when_improved("valid/loss", mode),
    lambda mode: fl.plateau("valid/loss", mode=mode),
    lambda mode: fl.checkpoint("a", best="valid/loss", mode=mode),
    lambda mode: fl.restore_best("valid/loss", mode=mode),
    lambda mode: fl.search(STEP, {"a": toy()}, ([ONE], [ONE]), mode=mode),
    lambda mode: fl.best("a", "valid/loss", mode),
    lambda mode: fl.History([fl.Record(1, 1, {"a": 1.0})]).best("a", mode),
    lambda mode: fl.History([fl.Record(1, 1, {"a": 1.0})]).plot(mode=mode),
])  # fmt: skip
@pytest.mark.parametrize("mode", ["lower", "", 1, True])
def test_whose_mode_is_wrong_is_said(call, mode):
    with pytest.raises(ValueError, match=r"^[\w.]+ expects mode as one of \"min\", \"max\"; got"):
        call(mode)
