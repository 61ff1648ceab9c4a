"""Middleware as values that show, compare and pickle as the call that made them; outputs."""

import functools
import pickle

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import Middleware, Output, middleware
from fnloop._core.types import RINGS, name_of
from fnloop.testing import toy, toy_loss


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


# --- the decorator


def test_a_decorated_function_acts_in_its_ring():
    step = fl.pipeline(scaled(3.0))(toy_loss)
    state, _ = step(toy(), torch.tensor([1.0]))  # the gradient is 1, and the learning rate too
    assert state.model.w.item() == -3.0
    state, _ = fl.pipeline(scaled(3.0, power=2))(toy_loss)(toy(), torch.tensor([1.0]))
    assert state.model.w.item() == -9.0


@pytest.mark.parametrize("ring", ["forward", "loss", "gradient", "update", "device", "step"])
def test_the_wrap_goes_into_the_named_ring_only(ring):
    made = middleware(ring)(lambda: same)()
    assert {name: getattr(made, name) for name in RINGS} == {
        name: same if name == ring else None for name in RINGS
    }
    assert made.window == 1
    assert made.init is None


def test_the_name_of_a_middleware_is_that_of_the_function_that_makes_it():
    assert scaled(2).name == "scaled"


def test_a_decorated_function_keeps_its_name_and_docstring():
    assert scaled.__name__ == "scaled"
    assert scaled.__doc__ == "Multiply gradients."


def test_a_decorated_function_may_return_a_whole_record():
    made = counted(3)
    assert (made.name, made.forward, made.step, made.init, made.window) == (
        "counter",
        same,
        other,
        len,
        4,
    )
    assert repr(made) == "counted(3)"


@pytest.mark.parametrize("ring", ["gradients", "", "Step", None, 3])
def test_an_unknown_ring_is_an_error_that_lists_the_six(ring):
    with pytest.raises(
        ValueError, match=r"one of forward, loss, gradient, update, device, step; got "
    ) as caught:
        middleware(ring)
    assert repr(ring) in str(caught.value)


def test_a_decorator_without_a_ring_says_how_to_write_it():
    with pytest.raises(
        ValueError,
        match=r'got the function noise\. Write @middleware\("gradient"\) above a function of',
    ):

        @middleware
        def noise(std): ...


@pytest.mark.parametrize(("returned", "shown"), [(None, "None"), (0.1, r"0\.1")])
def test_a_factory_that_returns_no_wrap_is_an_error_that_shows_the_call(returned, shown):
    @middleware("gradient")
    def noise(std):
        return returned

    message = (
        rf"noise\(0\.1\) must return a function step -> step, but it returned {shown}\. "
        r"Did you forget 'return wrap'"
    )
    with pytest.raises(TypeError, match=message):
        noise(0.1)


def test_a_wrong_call_of_a_factory_raises_the_error_of_the_function():
    with pytest.raises(TypeError, match=r"scaled\(\) missing 1 required positional argument: 'by'"):
        scaled()


# --- as text


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (scaled(1.0), "scaled(1.0)"),
        (scaled(by=2), "scaled(by=2)"),
        (scaled(2, power=3), "scaled(2, power=3)"),
        (counted(), "counted()"),
        (scaled("a"), "scaled('a')"),
        (scaled(len), "scaled(len)"),
        (scaled(toy_loss), "scaled(toy_loss)"),
        (scaled(torch.nn.Linear), "scaled(Linear)"),
        (scaled(functools.partial(toy_loss, 1, batch=2)), "scaled(toy_loss(1, batch=2))"),
        (fl.accumulate(4), "accumulate(4)"),
        (fl.clip(1.0, norm_type=1.0), "clip(1.0, norm_type=1.0)"),
        (fl.metric(size=max), "metric(size=max)"),
        (Middleware("mine"), "Middleware('mine')"),
        (
            Middleware("mine", gradient=same, window=4),
            "Middleware('mine', gradient=same, window=4)",
        ),
        (Middleware("mine", None, same, init=len), "Middleware('mine', loss=same, init=len)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_middleware_shows_as_it_was_typed(made, text):
    assert repr(made) == text


def test_a_pipeline_shows_what_it_was_made_from():
    assert repr(fl.pipeline(scaled(2), fl.clip(1.0))) == "pipeline(scaled(2), clip(1.0))"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (same, "same"),
        (len, "len"),
        (Middleware, "Middleware"),
        ("abc".upper, "upper"),
        (lambda: None, "<lambda>"),
        (functools.partial(same), "same()"),
        (functools.partial(functools.partial(same, 1), k=2), "same(1, k=2)"),
        ("text", "'text'"),
        (0.5, "0.5"),
        (scaled(2), "scaled(2)"),
    ],
)
def test_the_name_of_a_setting_is_what_the_user_typed(value, name):
    assert name_of(value) == name


# --- equality, hashes, pickles


@pytest.mark.parametrize(
    ("one", "another", "equal"),
    [
        (scaled(1.0), scaled(1.0), True),
        (scaled(2, power=3), scaled(2, power=3), True),
        (counted(3), counted(3), True),
        (scaled(1.0), scaled(2.0), False),
        (scaled(2), scaled(2, power=2), False),
        (fl.clip(1.0), fl.clip_value(1.0), False),
        (fl.pipeline(scaled(1), fl.clip(1.0)), fl.pipeline(scaled(1), fl.clip(1.0)), True),
        (fl.pipeline(scaled(1), fl.clip(1.0)), fl.pipeline(fl.clip(1.0), scaled(1)), False),
        (Middleware("mine", gradient=same), Middleware("mine", gradient=same), True),
        (Middleware("mine", gradient=same), Middleware("mine", gradient=other), False),
        (Middleware("mine", gradient=same), Middleware("mine", loss=same), False),
        (Middleware("mine", gradient=same), Middleware("yours", gradient=same), False),
        (Middleware("mine", window=2), Middleware("mine"), False),
        (
            Middleware("scaled", gradient=scaled(1.0).gradient),
            scaled(1.0),
            False,
        ),  # one is the result of a call
        (scaled(1.0), "scaled(1.0)", False),
    ],
)
def test_middleware_are_equal_if_they_come_from_the_same_call(one, another, equal):
    assert (one == another) is equal
    assert (another == one) is equal
    assert (one != another) is not equal


@pytest.mark.parametrize(
    "make",
    [lambda: scaled(2, power=3), lambda: counted(3), lambda: Middleware("mine", gradient=same)],
)
def test_equal_middleware_have_equal_hashes(make):
    assert hash(make()) == hash(make())
    assert len({make(), make()}) == 1


def test_settings_that_cannot_be_hashed_are_allowed():
    assert len({scaled([1, 2]), scaled([1, 2]), scaled([3])}) == 2


@pytest.mark.parametrize(
    "made",
    [
        scaled(2, power=3),
        counted(3),
        fl.accumulate(4),
        fl.schedule(fl.schedules.cosine(warmup=0.1)),
        Middleware("mine", gradient=same, init=len, window=4),
        fl.pipeline(scaled(2), fl.clip(1.0)),
    ],
    ids=repr,
)
def test_a_middleware_pickles(made):
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert hash(again) == hash(made)
    assert repr(again) == repr(made)


def test_an_unpickled_step_works():
    step = pickle.loads(pickle.dumps(fl.pipeline(scaled(3.0))(toy_loss)))
    state, _ = step(toy(), torch.tensor([1.0]))
    assert state.model.w.item() == -3.0


def test_a_middleware_is_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        scaled(2).window = 3


# --- outputs


@pytest.mark.parametrize(
    ("out", "text"),
    [
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
    ],
)
def test_an_output_shows_its_loss_and_the_names_of_its_parts(out, text):
    assert repr(out) == text


def test_an_output_is_frozen_and_changed_by_evolve():
    out = Output(torch.tensor(0.5), 2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        out.skip = "x"
    assert attrs.evolve(out, skip="x").skip == "x"
    assert out.skip is None


def test_outputs_do_not_share_their_defaults():
    assert Output(torch.tensor(0.0), 1).aux is not Output(torch.tensor(0.0), 1).aux
