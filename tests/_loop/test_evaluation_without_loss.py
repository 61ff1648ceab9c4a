"""A loss function may return (None, aux) in an evaluation: metrics as usual, and no loss.

What watches the loss then is in tests/_hooks/test_watched.py.
"""

import math

import pytest
import torch
from toy_runs import ONE, fit

import fnloop as fl
from fnloop.testing import Toy, toy, toy_loss

VALID = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
LOADERS = {"train": [ONE] * 3, "valid": VALID}


def loss_fn(model, batch):
    """Return w × x as the loss in training, and only as aux in an evaluation."""
    loss, aux = toy_loss(model, batch)
    return (loss if model.training else None), aux


def losses(model, batch):
    """Return a loss for the batches of two samples only."""
    loss, aux = toy_loss(model, batch)
    return (loss if model.training or len(batch) == 2 else None), aux


def skips(model, batch):
    return fl.skip("short") if len(batch) == 1 else loss_fn(model, batch)


def update(state, batch):
    return fl.Output(torch.zeros(()), len(batch))


MEAN = fl.metric(mean=lambda aux, batch: aux["output"].mean(), on="evaluation")
WITH_MEAN = fl.pipeline(MEAN)(loss_fn)


def run(*hooks, step=WITH_MEAN, **settings):
    return fit(*hooks, step=step, **{"loaders": LOADERS, **settings})


def exact():
    model = Toy(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return fl.TrainState.create(model, optimizer, seed=0, exact=True)


@pytest.mark.parametrize(("step", "found"), [
    (WITH_MEAN, {"mean": 3.0}),  # (1 + 2 + 6) / 3
    (fl.pipeline()(loss_fn), {}),
    (fl.raw(update, evaluate=loss_fn), {}),
    (fl.pipeline(MEAN)(skips), {"mean": 1.5}),
])  # fmt: skip
@pytest.mark.parametrize("make", [lambda: toy(w=1.0), exact], ids=["plain", "exact"])
def test_evaluate_has_the_metrics_and_no_loss(step, found, make):
    assert fl.evaluate(step, make(), VALID) == found


def test_one_batch_has_none_and_of_batches_that_are_all_left_out_the_loss_is_nan():
    out = WITH_MEAN.evaluate(toy(w=1.0), VALID[0])
    assert out.loss is None and out.weight == 2 and out.aux["output"].tolist() == [1.0, 2.0]
    assert repr(out) == "Output(loss=None, weight=2, aux=[output], metrics=[mean])"
    assert "None" in out._repr_html_()
    none_left = fl.evaluate(fl.pipeline()(lambda m, b: fl.skip("all")), toy(), VALID)
    assert math.isnan(none_left["loss"])


def test_the_records_of_a_run_have_none_and_training_has_one(capsys):
    state = run(fl.progress(), fl.halt_on_nonfinite(), epochs=2)
    assert [*state.history[0].metrics] == ["train/loss", "train/lr", "valid/mean"]
    assert state.history["valid/mean"] == (-9.0, -18.0)  # w is -3, -6
    assert state.model.w.item() == run(step=fl.pipeline()(toy_loss), epochs=2).model.w.item()
    assert "valid/mean" in capsys.readouterr().err and "mean" in repr(state.history)
    assert not fl.dry_run(WITH_MEAN, toy(), LOADERS).problems


def test_what_is_evaluated_at_the_end_is_evaluated_once():
    given = {"evaluate_every": fl.every(epochs=2) | fl.at_end()}
    for epochs, closing in ((1, True), (2, False)):
        history = run(epochs=epochs, **given).history
        assert [(r.closing, "valid/mean" in r.metrics) for r in history] == [
            (False, False),
            (closing, True),
        ]


def test_its_outputs_are_seen_and_a_loss_can_be_made_of_them():
    def loss_of_all(state, outputs):
        assert all(out.loss is None for out in outputs)
        return {"loss": torch.cat([out.aux["output"] for out in outputs]).max()}

    look = fl.inspect(loss_of_all, reports=("loss",))
    state = run(look, fl.early_stop("valid/loss", patience=1, mode="max"), epochs=9)
    assert state.history["valid/loss"] == (-3.0, -6.0)


# --- with middleware that evaluate


@pytest.mark.parametrize(("members", "names"), [
    ((fl.ema(0.5),), ["valid/mean", "valid/ema/mean"]),
    ((fl.ema(0.5, evaluate="only"),), ["valid/mean"]),
    # derive is not asked for what needs the loss
    ((fl.derive(double=lambda m: 2 * m["mean"], other=lambda m: m["loss"]),),
        ["valid/mean", "valid/double"]),
])  # fmt: skip
def test_middleware_that_evaluates_has_none_either(members, names):
    metrics = run(step=fl.pipeline(MEAN, *members)(loss_fn)).history[-1].metrics
    assert [name for name in metrics if name.startswith("valid")] == names


def test_with_tbptt_the_windows_of_a_batch_have_none_together():
    def carried(model, batch, carry):
        return *loss_fn(model, batch), carry

    def mixed(model, batch, carry):
        return (batch.mean() if batch.size(1) == 2 else None), {}, carry

    batches = [torch.tensor([[1.0, 2.0, 3.0]])]
    assert fl.evaluate(fl.pipeline(MEAN, fl.tbptt(2))(carried), toy(w=1.0), batches) == {"mean": 2}
    with pytest.raises(ValueError, match="for some batches of an evaluation and None for others"):
        fl.evaluate(fl.pipeline(fl.tbptt(2))(mixed), toy(), batches)


def test_of_turns_one_may_have_none():
    def turn(name, of):
        return fl.pipeline(MEAN)(lambda model, batch: of(model[name], batch))

    model = torch.nn.ModuleDict({"d": Toy(1.0), "g": Toy(1.0)})
    optimizers = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in model}
    state = fl.TrainState.create(model, optimizers, seed=0)
    step = fl.alternate({"d": turn("d", toy_loss), "g": turn("g", loss_fn)})
    assert fl.evaluate(step, state, VALID) == {"d/loss": 3.0, "d/mean": 3.0, "g/mean": 3.0}
    state = run(step=step, state=state)
    assert "valid/d/loss" in state.history and "valid/loss" not in state.history


# --- what is refused


def test_the_weight_that_cannot_be_counted_is_asked_for():
    batches = [{"x": torch.ones(2), "y": torch.ones(3)}]
    step = fl.pipeline()(lambda model, batch: (None, {}))
    with pytest.raises(ValueError, match=r'returned no loss.*return None, {"weight": number'):
        fl.evaluate(step, toy(), batches)


@pytest.mark.parametrize("batches", [VALID, VALID[::-1]])
@pytest.mark.parametrize("members", [(), (MEAN,), (fl.ema(0.5),)], ids=repr)
def test_some_batches_with_a_loss_and_others_without_are_refused(batches, members):
    step = fl.pipeline(*members)(losses)
    message = r"returned a loss for some batches of an evaluation and None for others"
    for state in (toy(), exact()):
        with pytest.raises(ValueError, match=message):
            fl.evaluate(step, state, batches)
    with pytest.raises(ValueError, match=message) as info:
        run(step=step, loaders={"train": [ONE] * 3, "valid": batches})
    assert info.value.state.step == 3


@pytest.mark.parametrize("members", [(), (fl.accumulate(2),)], ids=repr)
def test_training_needs_a_loss(members):
    step = fl.pipeline(*members)(lambda model, batch: (None, {}))
    with pytest.raises(TypeError, match=r"got None. An evaluation may be without a loss, training"):
        fl.fit(step, toy(), [ONE] * 3, hooks=())


@pytest.mark.parametrize("reply", [None, (None, 3), (None,), (None, {}, {})])
def test_none_alone_is_a_mistake_in_an_evaluation_too(reply):
    with pytest.raises(TypeError, match=r"Did you forget 'return loss'|aux|a tuple of"):
        fl.evaluate(fl.pipeline()(lambda model, batch: reply), toy(), VALID)
