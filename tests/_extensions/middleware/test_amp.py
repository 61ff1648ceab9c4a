"""amp: precision in a loss function, and the scale of fp16."""

import attrs
import pytest
import torch
from after_steps import after
from toy_runs import fitted, noting, xs

import fnloop as fl
from fnloop._extensions.middleware import precision as amp
from fnloop.testing import toy, toy_loss


def scaled(scale=8.0, **settings):
    return fl.amp("fp16", init_scale=scale, **settings)


@pytest.mark.parametrize(("precision", "dtype"), [
    ("bf16", torch.bfloat16), ("fp16", torch.float16), (None, torch.float32),
])  # fmt: skip
def test_the_loss_function_runs_under_autocast_in_training_and_evaluation(precision, dtype):
    seen = []

    def loss_fn(model, batch):
        product = model.w.reshape(1, 1) @ batch.reshape(1, 1)
        seen.append((torch.is_autocast_enabled("cpu"), product.dtype))
        return model(batch).mean()

    step = fl.pipeline(fl.amp(precision))(loss_fn)
    state, _ = step(toy(), torch.ones(1))
    step.evaluate(state, torch.ones(1))
    assert seen == [(precision is not None, dtype)] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_gradients_are_unscaled_before_others_see_them_and_the_loss_is_never_scaled():
    step = fl.pipeline(fl.amp("fp16"), fl.clip(1e9))(toy_loss)
    state, out = step(toy(w=1.0), torch.tensor([3.0]))
    assert (state.model.w.item(), out.loss.item()) == (-2.0, 3.0)
    assert out.metrics["grad_norm"].compute() == 3.0


def test_what_only_looks_at_gradients_sees_them_unscaled_even_if_it_is_listed_before():
    step = fl.pipeline(fl.grad_norm(), fl.amp("fp16"))(toy_loss)
    _, out = step(toy(w=1.0), torch.tensor([3.0]))
    assert out.metrics["grad_norm"].compute() == 3.0


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_middleware_adds_to_the_loss_is_scaled_with_it(order):
    """The gradient is that of w * 3 + 2 * w."""

    def penalized(step):
        def adding(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, loss=out.loss + 2 * state.model.w)

        return adding

    members = (fl.amp("fp16"), fl.Middleware("penalized", loss=penalized))[::order]
    assert fitted([3], *members).model.w.item() == -5.0


@pytest.mark.parametrize("order", [1, -1])
def test_gradients_are_unscaled_once_per_window_in_whichever_order(order, monkeypatch):
    calls, unscale = [], amp._unscale
    monkeypatch.setattr(amp, "_unscale", lambda *given: calls.append(1) or unscale(*given))
    members = (fl.amp("fp16"), fl.accumulate(2))[::order]
    state = fitted([1, 2, 3, 4, 5], *members, fl.clip(1e9))
    assert state.model.w.item() == -10.0
    assert len(calls) == state.step == 3


def test_the_scale_halves_on_overflow_and_doubles_after_a_streak():
    """3e38 / 65536 overflows float32 at scale 65536; smaller gradients do not."""
    note, scales = noting(lambda state: (state.slots["amp"].scale.item(), state.skipped))
    values = [1.0, 3e38, 1.0, 1.0, 1.0, 1.0]
    fitted(values, scaled(growth_interval=2), state=toy(lr=0.0), hooks=(note,))
    assert scales == [(8.0, 0), (4.0, 1), (4.0, 1), (8.0, 1), (8.0, 1), (16.0, 1)]


def test_the_scale_grows_when_the_update_has_been_applied_and_not_before():
    members = scaled(growth_interval=2), after("gradient", lambda _, x, out: 1 / (2 - x.item()))
    with pytest.raises(ZeroDivisionError) as caught:
        fitted([1, 2], *members)
    kept = caught.value.state.slots["amp"]
    assert (caught.value.state.step, kept.scale.item(), kept.streak) == (1, 8.0, 1)


def test_the_scale_stays_finite():
    state = fitted([0, 0, 0, 0], scaled(2.0**126, growth_interval=1))
    assert (state.slots["amp"].scale.item(), state.skipped) == (2.0**127, 0)


@pytest.mark.parametrize("scale", [2.0**-24, 1, 2.0**127])
def test_the_ends_of_its_range_are_in_it(scale):
    assert fitted([0.5], scaled(scale)).slots["amp"].scale.item() == scale


def test_a_hook_may_go_back_to_a_checkpoint_with_its_scale(tmp_path):
    member, only = scaled(growth_interval=2), ("model", "optimizer", "slots")
    fl.save(fitted([1, 1], member), tmp_path / "a")
    back = fl.once(lambda state: fl.restore(tmp_path / "a", state, only=only))
    state = fitted([1] * 4, member, hooks=(fl.when(lambda state: state.step == 3)(back),))
    slot = state.slots["amp"]
    assert (state.model.w.item(), slot.scale.item(), slot.streak) == (-3.0, 16.0, 1)


def test_a_loss_that_is_not_finite_at_any_scale_is_an_error():
    with pytest.raises(FloatingPointError, match="the loss itself is not finite"):
        fitted(xs(*[float("nan")] * 50), fl.amp("fp16"))


def test_half_parameters_are_refused():
    state = toy()
    state.model.half()
    with pytest.raises(ValueError, match=r"leave out model.half\(\)"):
        fl.pipeline(fl.amp("fp16"))(toy_loss)(state, torch.ones(1).half())


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
@pytest.mark.parametrize("bad", [0, 1e300, True, 2.0**-25, 2.0**128, torch.tensor(8.0)])
def test_a_loss_scale_is_a_number_in_its_range_whether_it_is_used_or_not(bad, precision):
    with pytest.raises(ValueError, match=r"amp expects init_scale"):
        fl.amp(precision, init_scale=bad)
