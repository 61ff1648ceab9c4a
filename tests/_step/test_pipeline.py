import functools
import pickle

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import Toy, spy, toy, toy_loss

ONE = torch.ones(1)


def marks(ring, name):
    """A middleware that notes when its ring begins and ends."""

    def wrap(step):
        def marked(state, batch):
            seen.append(f"{name}(")
            state, out = step(state, batch)
            seen.append(f"){name}")
            return state, out

        return marked

    return fl.Middleware(name, **{ring: wrap})


seen: list[str] = []


def test_rings_nest_in_their_order_and_members_in_the_listed_one():
    seen.clear()
    rings = ["step", "device", "update", "gradient", "loss", "forward"]
    listed = [marks(ring, ring) for ring in rings] + [marks("gradient", "later")]

    def loss_fn(model, batch):
        seen.append("loss_fn")
        return toy_loss(model, batch)

    fl.pipeline(*listed)(loss_fn)(toy(), ONE)
    inward = ["step", "device", "update", "later", "gradient", "loss", "forward"]
    assert seen == [f"{n}(" for n in inward] + ["loss_fn"] + [f"){n}" for n in reversed(inward)]


def test_what_each_ring_sees():
    found = {}

    def looks(ring):
        def wrap(step):
            def looking(state, batch):
                state, out = step(state, batch)
                w = state.model.w
                found[ring] = (out.loss.requires_grad, w.grad is not None, w.item(), state.step)
                return state, out

            return looking

        return fl.Middleware(ring, **{ring: wrap})

    fl.pipeline(*map(looks, ("forward", "loss", "gradient", "update", "step")))(toy_loss)(
        toy(), ONE
    )
    assert found == {
        "forward": (True, False, 0.0, 0),
        "loss": (True, False, 0.0, 0),
        "gradient": (False, True, 0.0, 0),
        "update": (False, False, -1.0, 1),
        "step": (False, False, -1.0, 1),
    }


def test_a_step_counts_and_reports():
    state, out = fl.pipeline()(toy_loss)(toy(w=2.0), torch.tensor([1.0, 3.0]))
    assert (state.step, state.batch, out.loss.item(), out.weight) == (1, 1, 4.0, 2)
    assert state.metrics["loss"].compute() == 4.0
    assert not out.loss.requires_grad


def test_evaluating_a_step_stops_after_the_forward_ring():
    seen.clear()
    step = fl.pipeline(*(marks(r, r) for r in ("forward", "loss", "gradient", "update", "step")))(
        toy_loss
    )
    out = step.evaluate(toy(w=2.0), torch.tensor([3.0]))
    assert seen == ["forward(", ")forward"]
    assert (out.loss.item(), out.loss.requires_grad) == (6.0, False)


def test_evaluating_a_step_restores_every_flag():
    problem_model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    problem_model[1].eval()  # a frozen batch norm in a model that trains
    state = fl.TrainState.create(problem_model, torch.optim.SGD(problem_model.parameters(), lr=0.1))
    flags = []

    def loss_fn(model, batch):
        flags.append([m.training for m in model.modules()])
        return model(batch).sum()

    fl.pipeline()(loss_fn).evaluate(state, torch.ones(3, 2))
    assert flags == [[False] * 4]
    assert [m.training for m in problem_model.modules()] == [True, True, False, True]


def test_a_module_that_does_something_in_train_does_it_again_after_an_evaluation():
    class Merges(Toy):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model, merged = Merges(), []

    def loss_fn(model, batch):
        merged.append(model.merged)
        return toy_loss(model, batch)

    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fl.fit(fl.pipeline()(loss_fn), state, ([ONE], [ONE]), epochs=2, hooks=())
    assert merged == [False, True, False, True]
    assert model.training and not model.merged


def test_gradients_from_before_do_not_leak_into_a_step():
    state = toy()
    state.model.w.grad = torch.tensor(100.0)
    state, _ = fl.pipeline()(toy_loss)(state, ONE)
    assert (state.model.w.item(), state.model.w.grad) == (-1.0, None)


def test_slots_are_made_when_a_step_meets_a_state():
    counter = fl.Middleware("counter", step=lambda step: step, init=lambda state: 7)
    state, _ = fl.pipeline(counter)(toy_loss)(toy(), ONE)
    assert state.slots["counter"] == 7


def test_a_skipped_update_counts_its_batch_and_nothing_else():
    skip = fl.Middleware(
        "skip", gradient=lambda step: lambda s, b: (s, attrs.evolve(step(s, b)[1], skip="enough"))
    )
    state, out = fl.pipeline(skip)(toy_loss)(toy(), ONE)
    assert (state.step, state.skipped, state.batch, state.model.w.item(), out.skip) == (
        0,
        1,
        1,
        0.0,
        "enough",
    )
    assert "update" not in state.events


def test_a_forward_that_skips_has_no_backward():
    skip = fl.Middleware(
        "skip", forward=lambda step: lambda s, b: (s, attrs.evolve(step(s, b)[1], skip="odd one"))
    )
    state, out = fl.pipeline(skip)(toy_loss)(toy(), ONE)
    assert (state.step, state.model.w.item(), out.loss.requires_grad) == (0, 0.0, False)


def test_hooks_of_the_optimizer_and_patched_steps_are_called():
    calls = []
    state = toy()
    state.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    state.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    state, _ = fl.pipeline()(toy_loss)(state, ONE)
    original = state.optimizer.step
    state.optimizer.step = lambda: (calls.append("patched"), original())
    fl.pipeline()(toy_loss)(state, ONE)
    assert calls == ["pre", "post", "patched", "pre", "post"]


def test_a_patch_of_the_optimizers_class_is_called(monkeypatch):
    original, calls = torch.optim.SGD.step, []

    @functools.wraps(original)
    def patched(self, *args):
        calls.append("patched")
        return original(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", patched)
    state, _ = fl.pipeline()(toy_loss)(toy(), ONE)
    assert (calls, state.model.w.item()) == (["patched"], -1.0)


def test_a_profiler_sees_the_optimizers_step():
    state = toy()
    with torch.autograd.profiler.profile() as profile:
        fl.pipeline()(toy_loss)(state, ONE)
    assert "Optimizer.step#SGD.step" in [event.name for event in profile.function_events]


# --- weights


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        (torch.ones(3), 3),
        (torch.tensor(2.0), 1),
        ((torch.ones(3, 2), torch.ones(3)), 3),
        ({"x": torch.ones(5, 2), "temperature": torch.tensor(2.0)}, 5),
        (((torch.ones(4), torch.ones(4)), torch.ones(4)), 4),
        ({"name": ["a", "b"], "x": torch.ones(2, 2)}, 2),  # what is not a tensor has no size
        ((None, torch.ones(2)), 2),
        (["text", torch.ones(2)], 2),
        ({"t": torch.tensor(1.0), "x": torch.ones(4, 2)}, 4),
    ],
)
def test_the_weight_is_the_leading_dimension(batch, weight):
    _, out = fl.pipeline()(lambda model, batch: model.w * 1.0)(toy(), batch)
    assert out.weight == weight


def test_the_loss_function_may_say_the_weight():
    tokens = torch.tensor(17)
    _, out = fl.pipeline()(lambda model, batch: (model.w * 1.0, {"weight": tokens}))(
        toy(), torch.ones(3)
    )
    assert out.weight is tokens


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(3), torch.ones(4)), r"leading dimensions \[3, 4\]"),
        ("text", "there is no tensor in a str"),
        (object(), "there is no tensor in a object"),
    ],
)
def test_a_batch_of_unknown_size_is_asked_about(batch, message):
    with pytest.raises(ValueError, match=message) as error:
        fl.pipeline()(lambda model, batch: model.w * 1.0)(toy(), batch)
    assert 'return loss, {"weight": number_of_items}' in str(error.value)


# --- the reply of a loss function


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (
            lambda w: torch.stack([w, w]),
            ValueError,
            r"must be a scalar; got shape \(2,\).*loss.mean\(\)",
        ),
        (lambda w: 3.0, TypeError, "must be a scalar tensor; got 3.0"),
        (lambda w: None, TypeError, "must be a scalar tensor; got None"),
        (
            lambda w: {"loss": w},
            TypeError,
            r"it returned a dict. Write: return reply\['loss'\], reply",
        ),
        (lambda w: (w * 1, "out", 3), TypeError, "a tuple of 3. Put the rest in aux"),
        (lambda w: (w * 1, [1]), TypeError, "must be a mapping.*got list"),
        (lambda w: w.long(), ValueError, "floating dtype; got torch.int64"),
        (
            lambda w: w.detach() * 1,
            ValueError,
            r"no gradient: it was computed without .*\.detach\(\)",
        ),
        (
            lambda w: (w * 1, {"weight": "3"}),
            TypeError,
            r'aux\["weight"\] must be the number of items',
        ),
        (lambda w: (w * 1, {"weight": torch.ones(2)}), TypeError, r"got shape \(2,\)"),
    ],
)
def test_a_bad_reply_is_named(reply, error, message):
    def my_loss(model, batch):
        return reply(model.w)

    with pytest.raises(error, match=message):
        fl.pipeline()(my_loss)(toy(), ONE)


def test_a_frozen_model_is_named():
    state = toy()
    state.model.w.requires_grad_(False)
    with pytest.raises(ValueError, match="every parameter of the model has requires_grad=False"):
        fl.pipeline()(toy_loss)(state, ONE)


# --- errors when composing


@pytest.mark.parametrize(
    ("compose", "error", "message"),
    [
        (
            lambda: fl.pipeline(fl.clip(1.0), fl.clip(2.0)),
            ValueError,
            r"clip\(1.0\) and clip\(2.0\) have one name",
        ),
        (lambda: fl.pipeline(fl.clip), TypeError, r"Call it: clip\(...\)"),
        (
            lambda: fl.pipeline(toy_loss),
            TypeError,
            r"into the second call: pipeline\(...\)\(toy_loss\)",
        ),
        (lambda: fl.pipeline(1.0), TypeError, r"expects middleware, such as clip\(1.0\); got 1.0"),
        (
            lambda: fl.pipeline(fl.time_limit(hours=8)),
            TypeError,
            r"time_limit\(hours=8\) is a hook: write fit\(..., hooks=\(time_limit\(hours=8\),\)\)",
        ),
        (lambda: fl.pipeline(fl.progress), TypeError, r"progress\(...\) is a hook"),
        (lambda: fl.pipeline(fl.every(steps=1)(fl.progress())), TypeError, r"\) is a hook"),
        (lambda: fl.pipeline(fl.Mean(1.0, 1)), TypeError, "expects middleware, such as"),
        (lambda: fl.pipeline(fl.pipeline()), TypeError, r"\*p.middleware"),
        (
            lambda: fl.pipeline()(fl.clip(1.0)),
            TypeError,
            r"List it in the first call: pipeline\(clip\(1.0\), ...\)",
        ),
        (lambda: fl.pipeline()(nn.MSELoss()), TypeError, r"supervised\(MSELoss\(...\)\)"),
        (lambda: fl.pipeline()(Toy()), TypeError, r"def loss_fn\(model, batch\)"),
        (
            lambda: fl.pipeline()(nn.CrossEntropyLoss),
            TypeError,
            r"supervised\(CrossEntropyLoss\(...\)\)",
        ),
        (
            lambda: fl.pipeline()(toy(), ONE),
            TypeError,
            r"write pipeline\(\)\(loss_fn\)\(state, batch\)",
        ),
        (
            lambda: fl.pipeline()("mse"),
            TypeError,
            r"expects a function \(model, batch\) -> loss; got 'mse'",
        ),
        (
            lambda: fl.pipeline()(lambda model, x, y: 0),
            TypeError,
            r"takes \(model, batch\), but <lambda> takes",
        ),
        (lambda: fl.supervised(nn.MSELoss), TypeError, r"Write supervised\(MSELoss\(\)\)"),
        (lambda: fl.supervised(None), TypeError, "expects a criterion"),
        (
            lambda: fl.pipeline(fl.Middleware("x", step=lambda step: None))(toy_loss),
            TypeError,
            "must wrap a step",
        ),
        (
            lambda: fl.pipeline(fl.accumulate(2), fl.Middleware("mine", window=3)),
            ValueError,
            "both take several batches",
        ),
    ],
)
def test_mistakes_are_found_when_composing(compose, error, message):
    with pytest.raises(error, match=message):
        compose()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fl.fit(toy_loss, toy(), [ONE]), r"fit\(pipeline\(\)\(toy_loss\), ...\)"),
        (lambda: fl.evaluate(toy_loss, toy(), [ONE]), r"evaluate\(pipeline\(\)\(toy_loss\), ...\)"),
        (lambda: fl.fit(fl.clip(1.0), toy(), [ONE]), r"Write pipeline\(clip\(1.0\)\)\(loss_fn\)"),
        (lambda: fl.fit(toy(), fl.pipeline()(toy_loss), [ONE]), "The step comes first"),
        (lambda: fl.fit(fl.pipeline(), toy(), [ONE]), "got pipeline"),
        (
            lambda: fl.fit(fl.pipeline(fl.clip(1.0)), toy(), [ONE]),
            r"write pipeline\(clip\(1.0\)\)\(loss_fn\)",
        ),
        (
            lambda: fl.fit(fl.pipeline()(toy_loss), Toy(), [ONE]),
            r"expected a TrainState, as TrainState.create\(",
        ),
    ],
)
def test_a_thing_handed_to_the_wrong_call_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


# --- what a pipeline is, as a value


def test_a_pipeline_shows_compares_and_pickles_as_it_was_typed():
    made = fl.pipeline(fl.accumulate(4), fl.clip(1.0, norm_type=3.0))
    assert repr(made) == "pipeline(accumulate(4), clip(1.0, norm_type=3.0))"
    assert (
        made
        == fl.pipeline(fl.accumulate(4), fl.clip(1.0, norm_type=3.0))
        != fl.pipeline(fl.accumulate(4))
    )
    assert pickle.loads(pickle.dumps(made)) == made
    assert (
        repr(pickle.loads(pickle.dumps(made(toy_loss))))
        == "pipeline(accumulate(4), clip(1.0, norm_type=3.0))(toy_loss)"
    )


def test_a_partial_loss_function_shows_its_settings():
    def scaled(model, batch, factor):
        return toy_loss(model, batch)[0] * factor

    assert (
        repr(fl.pipeline()(functools.partial(scaled, factor=2))) == "pipeline()(scaled(factor=2))"
    )


def test_a_partial_of_an_object_is_a_loss_function_too():
    class Scaled:
        def __repr__(self):
            return "Scaled()"

        def __call__(self, model, batch, factor):
            return toy_loss(model, batch)[0] * factor

    step = fl.pipeline()(functools.partial(Scaled(), factor=2))
    state, _ = step(toy(), ONE)
    assert state.model.w.item() == -2.0
    assert "Scaled" in repr(step) and "factor=2" in repr(step)


def test_middleware_can_be_tested_without_a_model_of_its_own():
    inner = spy(loss=3.0, grad=2.0)
    state, out = fl.clip_value(0.5).gradient(inner)(toy(), "batch")
    assert (state.model.w.grad.item(), out.loss.item(), inner.calls[0][1]) == (0.5, 3.0, "batch")
