import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss


def batches(*values):
    return [torch.tensor([float(v)]) for v in values]


def dtype_loss(model, batch):
    output = model(batch)
    seen.append(
        (torch.is_autocast_enabled("cpu"), (model.w.reshape(1, 1) @ batch.reshape(1, 1)).dtype)
    )
    return output.mean()


seen: list = []


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_loss_function_runs_under_autocast_in_training_and_evaluation(precision, dtype):
    seen.clear()
    step = fl.pipeline(fl.amp(precision))(dtype_loss)
    state, _ = step(toy(), torch.ones(1))
    step.evaluate(state, torch.ones(1))
    assert seen == [(True, dtype)] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_none_is_off():
    seen.clear()
    fl.pipeline(fl.amp(None))(dtype_loss)(toy(), torch.ones(1))
    assert seen == [(False, torch.float32)]


def test_gradients_are_unscaled_before_anything_else_sees_them_and_the_loss_is_never_scaled():
    step = fl.pipeline(fl.amp("fp16"), fl.clip(1e9))(toy_loss)
    state, out = step(toy(w=1.0), torch.tensor([3.0]))
    assert (state.model.w.item(), out.loss.item(), out.metrics["grad_norm"].compute()) == (
        -2.0,
        3.0,
        3.0,
    )


@pytest.mark.parametrize(
    "members", [(fl.amp("fp16"), fl.accumulate(2)), (fl.accumulate(2), fl.amp("fp16"))], ids=repr
)
def test_gradients_are_unscaled_once_per_window_in_whichever_order(members, monkeypatch):
    from fnloop._middleware import precision as amp

    calls = []
    unscale = amp._unscale
    monkeypatch.setattr(
        amp, "_unscale", lambda grads, scale: calls.append(scale) or unscale(grads, scale)
    )
    step = fl.pipeline(*members, fl.clip(1e9))(toy_loss)
    state = fl.fit(step, toy(), batches(1, 2, 3, 4, 5), hooks=())
    assert state.model.w.item() == -10.0
    assert len(calls) == state.step == 3


def test_the_scale_halves_on_overflow_and_doubles_after_a_streak():
    """3e38 / 65536 overflows float32 at scale 65536; smaller gradients do not."""
    step = fl.pipeline(fl.amp("fp16", init_scale=8.0, growth_interval=2))(toy_loss)
    state, scales = toy(lr=0.0), []
    for x in (1.0, 3e38, 1.0, 1.0, 1.0, 1.0):
        state, out = step(state, torch.tensor([x]))
        scales.append((state.slots["amp"].scale.item(), out.skip is not None))
    assert scales == [
        (8.0, False),
        (4.0, True),
        (4.0, False),
        (8.0, False),
        (8.0, False),
        (16.0, False),
    ]


def test_an_overflow_is_skipped_everywhere():
    halving = fl.schedule(lambda i, total: 0.5**i)
    step = fl.pipeline(fl.amp("fp16", init_scale=8.0), halving, fl.clip(1e39))(toy_loss)
    state = fl.fit(step, toy(), batches(1, 3e38, 2), hooks=())
    assert (state.step, state.skipped, state.epoch) == (2, 1, 1)
    assert state.model.w.item() == -(1 * 1 + 2 * 0.5)
    assert state.history["train/grad_norm"] == (1.5,)  # of the two updates that there were


def test_the_scale_grows_when_the_update_has_been_applied_and_not_before():
    @fl.middleware("gradient")
    def fails():
        def wrap(step):
            def failing(state, batch):
                state, out = step(state, batch)
                if batch > 1:
                    raise ArithmeticError
                return state, out

            return failing

        return wrap

    step = fl.pipeline(fl.amp("fp16", init_scale=8.0, growth_interval=2), fails())(toy_loss)
    with pytest.raises(ArithmeticError) as caught:
        fl.fit(step, toy(), batches(1, 2), hooks=())
    kept = caught.value.state.slots["amp"]
    assert (caught.value.state.step, kept.scale.item(), kept.streak) == (1, 8.0, 1)


def test_the_scale_stays_finite():
    step = fl.pipeline(fl.amp("fp16", init_scale=2.0**126, growth_interval=1))(toy_loss)
    state = fl.fit(step, toy(), batches(0, 0, 0, 0), hooks=())
    assert (state.slots["amp"].scale.item(), state.skipped) == (2.0**127, 0)


def test_a_hook_may_go_back_to_a_checkpoint_with_its_scale(tmp_path):
    def back(state):
        if state.step == 3:
            return fl.restore(tmp_path / "a", state, only=("model", "optimizer", "slots"))
        return state

    step = fl.pipeline(fl.amp("fp16", init_scale=8.0, growth_interval=2))(toy_loss)
    fl.save(fl.fit(step, toy(), batches(1, 1), hooks=()), tmp_path / "a")
    state = fl.fit(
        step,
        toy(),
        batches(1, 1, 1, 1),
        hooks=(fl.when(lambda state: state.step == 3)(fl.once(back)),),
    )
    assert (state.model.w.item(), state.slots["amp"].scale.item(), state.slots["amp"].streak) == (
        -3.0,
        16.0,
        1,
    )


def test_training_in_fp16_follows_float32():
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    data = list(zip(x.split(16), y.split(16), strict=True))

    def losses(*members):
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 1)
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        step = fl.pipeline(*members)(fl.supervised(torch.nn.MSELoss()))
        return fl.fit(step, state, data, epochs=20, hooks=()).history["train/loss"]

    full, half = losses(), losses(fl.amp("fp16", init_scale=64.0))
    assert half[-1] < 0.01 * half[0]
    assert half[:5] == pytest.approx(full[:5], rel=2e-2)


def test_a_loss_that_is_not_finite_at_any_scale_is_an_error():
    step = fl.pipeline(fl.amp("fp16"))(toy_loss)
    with pytest.raises(FloatingPointError, match="the loss itself is not finite"):
        fl.fit(step, toy(), batches(*[float("nan")] * 50), hooks=())


@pytest.mark.parametrize("seeing", [fl.clip(1.0), fl.clip_value(1.0)], ids=repr)
def test_fp16_after_a_middleware_that_would_see_scaled_gradients_is_refused(seeing):
    with pytest.raises(ValueError, match=r'List it first: pipeline\(amp\("fp16"\), ...\)'):
        fl.pipeline(seeing, fl.amp("fp16"))(toy_loss)


def test_half_parameters_are_refused():
    state = toy()
    state.model.half()
    with pytest.raises(ValueError, match=r"leave out model.half\(\)"):
        fl.pipeline(fl.amp("fp16"))(toy_loss)(state, torch.ones(1).half())


@pytest.mark.parametrize("bad", ["float16", "fp8", 16, True, [], {}, torch.bfloat16])
def test_an_unknown_precision_is_named(bad):
    with pytest.raises(ValueError, match='amp expects "bf16", "fp16" or None; got'):
        fl.amp(bad)


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1.0,
        1e300,
        float("inf"),
        float("nan"),
        True,
        "x",
        None,
        2.0**-25,
        2.0**128,
        torch.tensor(8.0),
    ],
)
def test_a_loss_scale_is_a_number_in_its_range(bad, precision):
    with pytest.raises(ValueError, match=r"amp expects init_scale"):
        fl.amp(precision, init_scale=bad)


@pytest.mark.parametrize(
    "bad", [0, -1, True, 1.5, 2000.0, float("nan"), "x", None, torch.tensor(3)], ids=repr
)
def test_a_growth_interval_is_a_whole_number(bad):
    with pytest.raises(ValueError, match=r"amp expects growth_interval"):
        fl.amp("fp16", growth_interval=bad)


@pytest.mark.parametrize("scale", [2.0**-24, 1, 2.0**127])
def test_the_ends_of_the_range_are_in_it(scale):
    step = fl.pipeline(fl.amp("fp16", init_scale=scale))(toy_loss)
    assert fl.fit(step, toy(), batches(0.5), hooks=()).slots["amp"].scale.item() == scale
