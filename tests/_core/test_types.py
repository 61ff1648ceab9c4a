"""Middleware as values that show, compare and pickle as the call that made them; outputs."""

import functools
import pickle
import re

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import Middleware, Output, middleware
from fnloop._core.types import RINGS
from fnloop.testing import toy_loss


def same(step):
    """A wrap that changes nothing."""
    return step


def other(step):
    return step


@middleware("gradient")
def scaled(by, *, power=1):
    """Multiply gradients."""

    def wrap(step):
        def scaling(state, batch):
            state, out = step(state, batch)
            for p in state.model.parameters():
                p.grad.mul_(by**power)
            return state, out

        return scaling

    return wrap


@middleware("step")
def counted(slot=0):
    """Return a record with two rings, a slot and a window."""
    return Middleware("counter", forward=same, step=other, init=len, window=slot + 1)


@pytest.mark.parametrize("ring", ["forward", "loss", "gradient", "update", "device", "step"])
def test_the_wrap_goes_into_the_named_ring_only(ring):
    made = middleware(ring)(lambda: same)()
    assert {name: getattr(made, name) for name in RINGS} == {**dict.fromkeys(RINGS), ring: same}
    assert (made.window, made.init) == (1, None)


def test_a_decorated_function_keeps_its_name_and_docstring_and_may_return_a_whole_record():
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Multiply gradients.")
    assert scaled(2).name == "scaled"
    made = counted(3)
    found = made.name, made.forward, made.step, made.init, made.window, repr(made)
    assert found == ("counter", same, other, len, 4, "counted(3)")
    with pytest.raises(TypeError, match=r"scaled\(\) missing 1 required positional argument: 'by'"):
        scaled()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.window = 3


def noise(std):
    return std


def test_a_missing_ring_is_an_error_that_lists_the_six_and_says_where_to_write_it():
    said = r"update, device, step; got the function noise\. Write @middleware\(\"gradient\"\) above"
    with pytest.raises(ValueError, match=f"one of forward, loss, gradient, {said}"):
        middleware(noise)


@pytest.mark.parametrize("returned", [None, 0.1])
def test_a_factory_that_returns_no_wrap_is_an_error_that_shows_the_call(returned):
    message = f"noise({returned}) must return a function step -> step, but it returned {returned}. "
    with pytest.raises(TypeError, match=re.escape(message + "Did you forget 'return wrap'")):
        middleware("gradient")(noise)(returned)


@fl.middleware("update", init=lambda state: {"total": 0})
def totalled(scale):
    def wrap(step):
        def adding(state, batch):
            state, out = step(state, batch)
            state.slots["totalled"]["total"] += scale * len(batch)
            return state, out

        return adding

    return wrap


def test_a_record_makes_its_slot_itself():
    @fl.middleware("update", init=lambda state: 0)
    def whole():
        return fl.Middleware("whole")

    with pytest.raises(TypeError, match=r"whole\(\) returned a Middleware, which makes its slot"):
        whole()


@pytest.mark.parametrize(("made", "text"), [
    (scaled(1.0), "scaled(1.0)"), (scaled(by=2), "scaled(by=2)"), (counted(), "counted()"),
    (scaled(2, power=3), "scaled(2, power=3)"), (scaled("a"), "scaled('a')"),
    (scaled(toy_loss), "scaled(toy_loss)"), (scaled(torch.nn.Linear), "scaled(Linear)"),
    (scaled(functools.partial(toy_loss, 1, batch=2)), "scaled(toy_loss(1, batch=2))"),
    (scaled(functools.partial(functools.partial(same, 1), k=2)), "scaled(same(1, k=2))"),
    (scaled(functools.partial(same)), "scaled(same())"), (scaled(len), "scaled(len)"),
    (scaled(lambda: None), "scaled(<lambda>)"), (scaled("abc".upper), "scaled(upper)"),
    (scaled(scaled(2)), "scaled(scaled(2))"),
    (fl.clip(1.0, norm_type=1.0), "clip(1.0, norm_type=1.0)"),
    (fl.metric(size=max), "metric(size=max)"), (Middleware("mine"), "Middleware('mine')"),
    (Middleware("a", gradient=same, window=4), "Middleware('a', gradient=same, window=4)"),
    (Middleware("mine", None, same, init=len), "Middleware('mine', loss=same, init=len)"),
    (fl.pipeline(scaled(2), fl.clip(1.0)), "pipeline(scaled(2), clip(1.0))"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_middleware_shows_as_it_was_typed(made, text):
    assert repr(made) == text


MAKE = [
    lambda: scaled(1.0), lambda: scaled(2), lambda: scaled(2, power=2), lambda: scaled(2, power=3),
    lambda: scaled([1, 2]), lambda: scaled([3]),  # which cannot be hashed
    lambda: counted(3), lambda: fl.clip(1.0), lambda: fl.clip_value(1.0),
    lambda: fl.pipeline(scaled(1), fl.clip(1.0)), lambda: fl.pipeline(fl.clip(1.0), scaled(1)),
    lambda: Middleware("mine", gradient=same), lambda: Middleware("mine", gradient=other),
    lambda: Middleware("mine", loss=same), lambda: Middleware("yours", gradient=same),
    lambda: Middleware("mine", window=2), lambda: Middleware("mine"),
    lambda: Middleware("mine", gradient=same, init=len, window=4),
    lambda: fl.schedule(fl.schedules.cosine(warmup=0.1)),
    lambda: Middleware("scaled", gradient=SCALED.gradient),  # not the result of a call
    lambda: "scaled(1.0)",
]  # fmt: skip
SCALED = scaled(1.0)


def test_middleware_are_equal_if_they_come_from_the_same_call():
    made, again = [make() for make in MAKE], [make() for make in MAKE]
    for i, one in enumerate(made):
        for j, another in enumerate(again):
            assert ((one == another), (one != another)) == (i == j, i != j)
    assert [hash(one) for one in made] == [hash(one) for one in again]
    assert len({*made, *again}) == len(MAKE)


@pytest.mark.parametrize("make", MAKE[:-2])
def test_a_middleware_pickles(make):
    again = pickle.loads(pickle.dumps(make()))
    assert (again, hash(again), repr(again)) == (make(), hash(make()), repr(make()))


@pytest.mark.parametrize(("out", "text"), [
    (Output(torch.tensor(0.5), 2), "Output(loss=0.5, weight=2, aux=[], metrics=[])"),
    (
        Output(
            torch.tensor(1 / 3), torch.tensor(7.0), {"output": 1, "mask": 2}, {"acc": fl.Sum(1)}
        ),
        "Output(loss=0.333333, weight=7, aux=[output, mask], metrics=[acc])",
    ),
    (
        Output(torch.tensor(2.0), 1, skip="overflow"),
        "Output(loss=2, weight=1, aux=[], metrics=[], skip='overflow')",
    ),
])  # fmt: skip
def test_an_output_shows_its_loss_and_the_names_of_its_parts(out, text):
    assert repr(out) == text


def test_an_output_is_frozen_and_changed_by_evolve():
    out = Output(torch.tensor(0.5), 2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        out.skip = "x"
    assert (attrs.evolve(out, skip="x").skip, out.skip) == ("x", None)
    assert out.aux is not Output(torch.tensor(0.0), 1).aux


@pytest.mark.parametrize(("given", "error"), [
    ({"traits": ("skips", "flies")}, "expects traits as .*'?by_closure.*got 'flies'"),
    ({"traits": "skips"}, "expects traits as a tuple of names"),
    ({"uses": ["adam"]}, "expects uses as a tuple of names"),
    ({"uses": (1,)}, "expects uses as names of optimizers"),
])  # fmt: skip
def test_traits_and_names_of_optimizers_are_checked(given, error):
    with pytest.raises((TypeError, ValueError), match=error):
        Middleware("mine", **given)
