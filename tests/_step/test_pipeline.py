import functools

import attrs
import pytest
import torch
from after_steps import after, skipping
from torch import nn
from torch.optim import optimizer as hooks_of
from toy_runs import ONE, fitted, of

import fnloop as fl
from fnloop.testing import Toy, toy, toy_loss


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
    """Evaluating a step stops after the forward ring."""
    seen.clear()
    rings = ["step", "device", "update", "gradient", "loss", "forward"]
    listed = [marks(ring, ring) for ring in rings] + [marks("gradient", "later")]
    loss_fn = lambda model, batch: seen.append("loss_fn") or toy_loss(model, batch)
    step = fl.pipeline(*listed)(loss_fn)
    state, out = step(toy(w=2.0), torch.tensor([1.0, 3.0]))
    inward = ["step", "device", "update", "later", "gradient", "loss", "forward"]
    assert seen == [f"{n}(" for n in inward] + ["loss_fn"] + [f"){n}" for n in reversed(inward)]
    assert (state.step, state.batch, out.loss.item(), out.weight) == (1, 1, 4.0, 2)
    assert state.metrics["loss"].compute() == 4.0 and not out.loss.requires_grad
    seen.clear()
    out = step.evaluate(toy(w=2.0), torch.tensor([3.0]))
    assert seen == ["forward(", "loss_fn", ")forward"]
    assert (out.loss.item(), out.loss.requires_grad) == (6.0, False)


def test_what_each_ring_sees():
    found = {}

    def looks(ring):
        def look(state, batch, out):
            w = state.model.w
            found[ring] = (out.loss.requires_grad, w.grad is not None, w.item(), state.step)

        return after(ring, look, ring)

    rings = "forward", "loss", "gradient", "update", "step"
    fl.pipeline(*map(looks, rings))(toy_loss)(toy(), ONE)
    before, done = (True, False, 0.0, 0), (False, False, -1.0, 1)
    inner = {"forward": before, "loss": before, "gradient": (False, True, 0.0, 0)}
    assert found == {**inner, "update": done, "step": done}


class Merges(Toy):
    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_a_module_that_does_something_in_train_does_it_again_after_an_evaluation():
    merged = []
    loss_fn = lambda model, batch: merged.append(model.merged) or toy_loss(model, batch)
    loaders, state = {"train": [ONE], "valid": [ONE]}, of(Merges())
    state = fitted(loaders, loss_fn=loss_fn, state=state, epochs=2)
    assert merged == [False, True, False, True]
    assert state.model.training and not state.model.merged


@pytest.mark.parametrize("ring", ["gradient", "forward"])
def test_a_skipped_update_counts_its_batch_and_nothing_else(ring):
    member = skipping(lambda batch, out: True, "enough", ring)
    state, out = fl.pipeline(member)(toy_loss)(toy(), ONE)
    assert (state.step, state.skipped, state.batch, state.model.w.item()) == (0, 1, 1, 0.0)
    assert (out.skip, out.loss.requires_grad, "update" in state.events) == ("enough", False, False)


REGISTER = {
    "one optimizer, before": lambda s, call: s.optimizer.register_step_pre_hook(call),
    "one optimizer, after": lambda s, call: s.optimizer.register_step_post_hook(call),
    "all, before": lambda s, call: hooks_of.register_optimizer_step_pre_hook(call),
    "all, after": lambda s, call: hooks_of.register_optimizer_step_post_hook(call),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
def test_every_kind_of_optimizer_hook_is_called_at_each_update(register):
    called, state = [], toy()
    handle = register(state, lambda *_: called.append(1))
    try:
        fitted([1, 1, 1], state=state)
    finally:
        handle.remove()
    assert len(called) == 3


@pytest.mark.parametrize("of_class", [True, False])
def test_a_patched_step_of_an_optimizer_is_called(of_class, monkeypatch):
    state, calls = toy(), []
    owner = torch.optim.SGD if of_class else state.optimizer
    original = owner.step

    @functools.wraps(original)
    def patched(*args):
        calls.append("patched")
        return original(*args)

    monkeypatch.setattr(owner, "step", patched)
    state, _ = fl.pipeline()(toy_loss)(state, ONE)
    assert (calls, state.model.w.item()) == (["patched"], -1.0)


def test_a_profiler_sees_the_optimizers_step():
    state = toy()
    with torch.autograd.profiler.profile() as profile:
        fl.pipeline()(toy_loss)(state, ONE)
    assert "Optimizer.step#SGD.step" in [event.name for event in profile.function_events]


# --- weights


TOKENS = torch.tensor(17)


@pytest.mark.parametrize(("batch", "weight"), [
    (torch.ones(3), 3), (torch.tensor(2.0), 1), ((torch.ones(3, 2), torch.ones(3)), 3),
    ({"x": torch.ones(5, 2), "temperature": torch.tensor(2.0)}, 5),
    (((torch.ones(4), torch.ones(4)), torch.ones(4)), 4),
    ({"name": ["a", "b"], "x": torch.ones(2, 2)}, 2),  # what is not a tensor has no size
    ((None, torch.ones(2)), 2), (["text", torch.ones(2)], 2),
    ({"t": torch.tensor(1.0), "x": torch.ones(4, 2)}, 4),
])  # fmt: skip
def test_the_weight_is_the_leading_dimension_or_what_the_loss_function_says(batch, weight):
    assert fl.pipeline()(lambda model, batch: model.w * 1.0)(toy(), batch)[1].weight == weight
    said = lambda model, batch: (model.w * 1.0, {"weight": TOKENS})
    assert fl.pipeline()(said)(toy(), batch)[1].weight is TOKENS


@pytest.mark.parametrize(("batch", "message"), [
    ((torch.ones(3), torch.ones(4)), r"leading dimensions \[3, 4\]"),
    ("text", "a str"), (object(), "a object"),
])  # fmt: skip
def test_a_batch_of_unknown_size_is_asked_about(batch, message):
    with pytest.raises(ValueError, match=message) as error:
        fl.pipeline()(lambda model, batch: model.w * 1.0)(toy(), batch)
    assert 'return loss, {"weight": number_of_items}' in str(error.value)


# --- the reply of a loss function


@pytest.mark.parametrize(("reply", "error", "message"), [
    (lambda w: (w * 1, [1]), TypeError, "must be a mapping.*got list"),
    (lambda w: w.long(), ValueError, "floating dtype; got torch.int64"),
    (lambda w: w.detach() * 1, ValueError, r"no gradient: .* without .*\.detach\(\)"),
    (lambda w: w.requires_grad_(False), ValueError, "every parameter of the model has req"),
])  # fmt: skip
def test_a_bad_reply_is_named(reply, error, message):
    with pytest.raises(error, match=message):
        fl.pipeline()(lambda model, batch: reply(model.w))(toy(), ONE)


# --- mistakes


NOTHING = fl.Middleware("x", step=lambda step: None)
CLIP, STEP = fl.clip(1.0), fl.pipeline()(toy_loss)


@pytest.mark.parametrize(("compose", "message"), [
    (lambda: fl.pipeline(fl.clip), r"Call it: clip\(...\)"),
    (lambda: fl.pipeline(toy_loss), r"into the second call: pipeline\(...\)\(toy_loss\)"),
    (lambda: fl.pipeline(fl.time_limit(hours=8)), r"is a hook: .*\(time_limit\(hours=8\),\)\)"),
    (lambda: fl.pipeline(fl.progress), r"progress\(...\) is a hook"),
    (lambda: fl.pipeline(fl.every(steps=1)(fl.progress())), r"\) is a hook"),
    (lambda: fl.pipeline(fl.pipeline()), r"\*p.middleware"),
    (lambda: fl.pipeline()(CLIP), r"List it in the first call: pipeline\(clip\(1.0\), ...\)"),
    (lambda: fl.pipeline()(nn.MSELoss()), r"supervised\(MSELoss\(...\)\)"),
    (lambda: fl.pipeline()(Toy()), r"def loss_fn\(model, batch\)"),
    (lambda: fl.pipeline()(nn.CrossEntropyLoss), r"supervised\(CrossEntropyLoss\(...\)\)"),
    (lambda: fl.pipeline()(toy(), ONE), r"write pipeline\(\)\(loss_fn\)\(state, batch\)"),
    (lambda: fl.pipeline()(lambda a, x, y: 0), r"takes \(model, batch\), but <lambda> takes"),
    (lambda: fl.supervised(nn.MSELoss), r"Write supervised\(MSELoss\(\)\)"),
    (lambda: fl.pipeline(NOTHING)(toy_loss), "must take a step and return a step"),
    (lambda: fl.fit(toy_loss, toy(), [ONE]), r"fit\(pipeline\(\)\(toy_loss\), ...\)"),
    (lambda: fl.evaluate(toy_loss, toy(), [ONE]), r"evaluate\(pipeline\(\)\(toy_loss\), ...\)"),
    (lambda: fl.fit(CLIP, toy(), [ONE]), r"Write pipeline\(clip\(1.0\)\)\(loss_fn\)"),
    (lambda: fl.fit(toy(), STEP, [ONE]), r"comes before the state: fit\(step, state, ...\)"),
    (lambda: fl.fit(fl.pipeline(), toy(), [ONE]), "got pipeline"),
    (lambda: fl.fit(fl.pipeline(CLIP), toy(), [ONE]), r"pipeline\(clip\(1.0\)\)\(loss_fn\)"),
    (lambda: fl.fit(STEP, Toy(), [ONE]), r"expected a TrainState, as TrainState.create\("),
])  # fmt: skip
def test_mistakes_are_found_when_composing(compose, message):
    with pytest.raises(TypeError, match=message):
        compose()


def test_two_windows_are_refused():
    with pytest.raises(ValueError, match="both take several batches"):
        fl.pipeline(fl.accumulate(2), fl.Middleware("mine", window=3))


# --- what a pipeline is, as a value


class Scaled:
    def __repr__(self):
        return "Scaled()"

    def __call__(self, model, batch, factor):
        return toy_loss(model, batch)[0] * factor


def scaled(model, batch, factor):
    return Scaled()(model, batch, factor)


@pytest.mark.parametrize(("loss_fn", "shown"), [(scaled, "scaled("), (Scaled(), "Scaled")])
def test_a_partial_loss_function_shows_its_settings(loss_fn, shown):
    step = fl.pipeline()(functools.partial(loss_fn, factor=2))
    assert step(toy(), ONE)[0].model.w.item() == -2.0
    assert repr(step).startswith(f"pipeline()({shown}") and "factor=2" in repr(step)


def named(name, order=0):
    """A middleware that adds its name to the list in ``state.extra``, before what it is around."""

    def wrap(step):
        def noted(state, batch):
            state.extra["called"].append(name)
            return step(state, batch)

        return noted

    return fl.Middleware(name, gradient=wrap, order={"gradient": order})


def test_a_middleware_says_where_it_comes_in_a_ring():
    """What is listed first is innermost, but for its order."""
    step = fl.pipeline(named("a", 1), named("b"), named("c", -1), named("d"))(toy_loss)
    state = attrs.evolve(toy(), extra={"called": []})
    state, _ = step(state, torch.ones(1))
    assert state.extra["called"] == ["a", "d", "b", "c"]


@pytest.mark.parametrize(("precision", "computes"), [(None, None), ("", None), ("bf16", "bf16")])
def test_a_middleware_says_what_it_computes_in(precision, computes):
    step = fl.pipeline(fl.Middleware("mine", precision=precision))(toy_loss)
    assert step.precision_in(toy()) == computes
