"""A loss function may return (None, aux) in an evaluation: metrics as usual, and no loss."""

import math

import pytest
import torch
from torch import nn
from toy_runs import ONE, fit, of, xs

import fnloop as fl
from fnloop.testing import toy, toy_loss

VALID = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]


def loss_fn(model, batch):
    """Return w × x as the loss in training, and only as aux in an evaluation."""
    loss, aux = toy_loss(model, batch)
    return (loss if model.training else None), aux


def mean(aux, batch):
    return aux["output"].mean()


def losses(model, batch):
    """Return a loss for the batches of two samples only."""
    loss, aux = toy_loss(model, batch)
    return (loss if model.training or len(batch) == 2 else None), aux


WITH_MEAN = fl.pipeline(fl.metric(mean=mean, on="evaluation"))(loss_fn)


def run(*hooks, step=WITH_MEAN, **settings):
    loaders = {"train": [ONE] * 3, "valid": VALID}
    return fit(*hooks, step=step, **{"loaders": loaders, **settings})


def test_evaluate_has_the_metrics_and_no_loss():
    assert fl.evaluate(WITH_MEAN, toy(w=1.0), VALID) == {"mean": 3.0}  # (1 + 2 + 6) / 3
    assert fl.evaluate(fl.pipeline()(loss_fn), toy(), VALID) == {}


def test_one_batch_has_none():
    out = WITH_MEAN.evaluate(toy(w=1.0), VALID[0])
    assert out.loss is None and out.weight == 2 and out.aux["output"].tolist() == [1.0, 2.0]
    assert repr(out) == "Output(loss=None, weight=2, aux=[output], metrics=[mean])"
    assert "None" in out._repr_html_()


def test_the_records_of_a_run_have_none_and_training_has_one():
    state = run(epochs=2)
    assert [*state.history[0].metrics] == ["train/loss", "train/lr", "valid/mean"]
    assert state.history["valid/mean"] == (-9.0, -18.0)  # w is -3, -6
    assert state.model.w.item() == run(step=fl.pipeline()(toy_loss), epochs=2).model.w.item()


def test_what_is_evaluated_at_the_end_is_evaluated_once():
    moment = fl.every(epochs=2) | fl.at_end()
    state = run(epochs=1, evaluate_every=moment)
    assert [(r.closing, "valid/mean" in r.metrics) for r in state.history] == [
        (False, False), (True, True),
    ]  # fmt: skip
    assert [r.closing for r in run(epochs=2, evaluate_every=moment).history] == [False, False]


def test_its_outputs_are_seen_and_a_loss_can_be_made_of_them():
    def loss_of_all(state, outputs):
        assert all(out.loss is None for out in outputs)
        return {"loss": torch.cat([out.aux["output"] for out in outputs]).max()}

    look = fl.inspect(loss_of_all, reports=("loss",))
    state = run(look, fl.early_stop("valid/loss"), epochs=2)
    assert state.history["valid/loss"] == (-3.0, -6.0)


def test_progress_and_defaults_work_without_it(capsys):
    state = run(fl.progress(), fl.halt_on_nonfinite(), epochs=2)
    assert "valid/mean" in capsys.readouterr().err + repr(state.history)


# --- with middleware that evaluate


def test_an_average_has_none_either():
    on = fl.metric(mean=mean, on="evaluation")
    step = fl.pipeline(on, fl.ema(0.5))(loss_fn)
    state = run(step=step)
    assert [*state.history[-1].metrics][2:] == ["valid/mean", "valid/ema/mean"]
    step = fl.pipeline(on, fl.ema(0.5, evaluate="only"))(loss_fn)
    assert [*run(step=step).history[-1].metrics][2:] == ["valid/mean"]


def test_derive_is_not_asked_for_what_needs_the_loss_of_an_evaluation():
    step = fl.pipeline(
        fl.derive(double=lambda m: 2 * m["mean"]), fl.metric(mean=mean), fl.timings()
    )(loss_fn)
    metrics = run(step=step).history[-1].metrics
    assert metrics["valid/double"] == -18.0 and "valid/time/evaluate" in metrics


def test_with_tbptt_the_windows_of_a_batch_have_none_together():
    def carried(model, batch, carry):
        output = model.w * batch
        loss = output.mean() if model.training else None
        return loss, {"output": output}, carry

    batches = [torch.tensor([[1.0, 2.0, 3.0]])]
    step = fl.pipeline(fl.metric(mean=mean), fl.tbptt(2))(carried)
    assert fl.evaluate(step, toy(w=1.0), batches) == {"mean": 2.0}

    def mixed(model, batch, carry):
        return (batch.mean() if batch.size(1) == 2 else None), {}, carry

    with pytest.raises(ValueError, match="for some batches of an evaluation and None for others"):
        fl.evaluate(fl.pipeline(fl.tbptt(2))(mixed), toy(), batches)


def test_of_turns_one_may_have_none():
    def optimizers():
        model = nn.ModuleDict({"d": toy().model, "g": toy().model})
        made = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in model}
        return fl.TrainState.create(model, made, seed=0)

    def turn(name, has_loss):
        def turn_loss(model, batch):
            output = model[name](batch) + 1
            return (output.mean() if model.training or has_loss else None), {"output": output}

        return fl.pipeline(fl.metric(mean=mean))(turn_loss)

    step = fl.alternate({"d": turn("d", True), "g": turn("g", False)})
    found = fl.evaluate(step, optimizers(), VALID)
    assert found == {"d/loss": 1.0, "d/mean": 1.0, "g/mean": 1.0}
    state = run(step=step, state=optimizers())
    assert "valid/d/loss" in state.history and "valid/loss" not in state.history


def test_raw_evaluates_without_a_loss():
    def update(state, batch):
        return fl.Output(torch.zeros(()), len(batch))

    assert fl.evaluate(fl.raw(update, evaluate=loss_fn), toy(), VALID) == {}


def test_an_exact_state_has_none():
    model = toy().model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = fl.TrainState.create(model, optimizer, seed=0, exact=True)
    assert fl.evaluate(WITH_MEAN, state, VALID) == {"mean": 0.0}
    with pytest.raises(ValueError, match="for some batches of an evaluation and None for others"):
        fl.evaluate(fl.pipeline()(losses), state, VALID)


def test_dry_run_and_batches_left_out():
    report = fl.dry_run(WITH_MEAN, toy(), {"train": [ONE] * 3, "valid": VALID})
    assert not [finding for finding in report.findings if finding.problem]

    def skips(model, batch):
        return fl.skip("short") if len(batch) == 1 else loss_fn(model, batch)

    assert fl.evaluate(fl.pipeline(fl.metric(mean=mean))(skips), toy(w=1.0), VALID) == {"mean": 1.5}
    none_left = fl.evaluate(fl.pipeline()(lambda m, b: fl.skip("all")), toy(), VALID)
    assert math.isnan(none_left["loss"])


def test_the_weight_that_cannot_be_counted_is_asked_for():
    batches = [{"x": torch.ones(2), "y": torch.ones(3)}]
    step = fl.pipeline()(lambda model, batch: (None, {}))
    with pytest.raises(ValueError, match=r'returned no loss.*return None, {"weight": number'):
        fl.evaluate(step, toy(), batches)


# --- what is refused


@pytest.mark.parametrize("batches", [VALID, VALID[::-1]])
@pytest.mark.parametrize("members", [(), (fl.metric(mean=mean),), (fl.ema(0.5),)], ids=repr)
def test_some_batches_with_a_loss_and_others_without_are_refused(batches, members):
    step = fl.pipeline(*members)(losses)
    message = r"returned a loss for some batches of an evaluation and None for others"
    with pytest.raises(ValueError, match=message):
        fl.evaluate(step, toy(), batches)
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


def test_a_model_of_detections_needs_no_zeros_in_its_place():
    """As torchvision's: losses in training, detections in evaluation."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return {"loss": (self.w * x).mean()} if self.training else [self.w * x]

    def detect(model, batch):
        found = model(batch)
        return found["loss"] if model.training else (None, {"found": found})

    def ap(state, outputs):
        return {"ap": torch.cat([out.aux["found"][0] for out in outputs]).mean()}

    state = fit(
        fl.inspect(ap, reports=("ap",)), fl.early_stop("valid/ap", mode="max", patience=1),
        step=fl.pipeline()(detect), state=of(Detector()),
        loaders={"train": [ONE], "valid": xs(1, 3)}, epochs=5,
    )  # fmt: skip
    assert state.history["valid/ap"] == (0.0, -2.0)  # w is 0, -1, and the mean of x is 2
