"""skip: a loss function leaves a batch out of its window, of an evaluation, or of the run."""

import logging

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import assert_same, law_fold, law_purity, small, toy, toy_loss


def above_zero(model, batch):
    return toy_loss(model, batch) if (batch > 0).all() else fl.skip("below zero")


def xs(*values):
    return [torch.tensor([float(x)]) for x in values]


def fitted(values, *members, loss_fn=above_zero, **settings):
    loaders = values if isinstance(values, dict) else xs(*values)
    return fl.fit(fl.pipeline(*members)(loss_fn), toy(), loaders, **{"hooks": (), **settings})


# --- training


def test_an_update_without_a_batch_is_not_made():
    state = fitted([1, -5, 2])
    assert (state.model.w.item(), state.step, state.skipped, state.batch) == (-3.0, 2, 1, 0)
    assert state.history.latest("train/loss") == pytest.approx(-1.0)


@pytest.mark.parametrize(
    "members", [(fl.accumulate(2),), (fl.clip_value(99.0), fl.accumulate(2))], ids=repr
)
def test_a_batch_is_out_of_its_window_and_of_the_divisor(members):
    """The means are 1 (of 1 alone), (2 + 4) / 2 and nothing."""
    state = fitted([1, -5, 2, 4, -1, -1, 3], *members)
    assert (state.model.w.item(), state.step, state.skipped) == (-7.0, 3, 1)


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_equals_one_whose_loader_leaves_these_windows_out(n):
    problem = small()
    out = {1, 2, 6, 7}  # of windows of one and of two

    def loss_fn(model, batch):
        return fl.skip("marked") if batch[2] in out else problem.loss_fn(model, batch)

    marked = [(*batch, i) for i, batch in enumerate(problem.batches * 2)]
    out = {i for i in range(len(marked)) if i // n in (1, 3)}
    members = (fl.accumulate(n), fl.clip(0.05), fl.ema(0.9), fl.metric(mean=mean))
    kept = [batch for batch in marked if batch[2] not in out]
    one, two = (
        fl.fit(
            fl.pipeline(*members)(loss_fn), problem.state(), {"train": part, "valid": kept[:2]},
            steps=len(kept) // n, hooks=(),
        )
        for part in (marked, kept)
    )  # fmt: skip
    assert one.skipped == 2
    assert_same(attrs.evolve(one, batch=0, epoch=0, skipped=0, events=()),
                attrs.evolve(two, batch=0, epoch=0, skipped=0, events=()))  # fmt: skip


def mean(aux, batch):
    return aux["output"].mean()


def test_it_keeps_the_laws():
    problem = small()

    def loss_fn(model, batch):
        return problem.loss_fn(model, batch) if len(batch[0]) != 3 else fl.skip("three")

    for pipe in (fl.pipeline(fl.ema(0.9)), fl.pipeline(fl.accumulate(2), fl.metric(mean=mean))):
        law_fold(pipe, attrs.evolve(problem, loss_fn=loss_fn))
        law_purity(pipe, attrs.evolve(problem, loss_fn=loss_fn))


def test_the_carry_stays_as_it_was():
    def loss_fn(model, batch, carry):
        if (batch < 0).any():
            return fl.skip("below zero")
        carry = batch.sum() + (0 if carry is None else carry)
        return model.w * carry, {}, carry

    state, _ = fl.pipeline(fl.tbptt(1))(loss_fn)(toy(), torch.tensor([[1.0, -9.0, 2.0]]))
    assert (state.model.w.item(), state.slots["tbptt"].item(), state.skipped) == (-4.0, 3.0, 1)


def test_a_turn_is_left_out_and_the_others_are_not():
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    optimizers = {k: torch.optim.SGD([model[k]], lr=1.0) for k in ("a", "b")}
    choosy = fl.pipeline()(lambda m, x: (m["a"] * x).mean() if x > 0 else fl.skip("below zero"))
    plain = fl.pipeline()(lambda m, x: m["b"] * 1.0)
    step = fl.alternate({"a": choosy, "b": plain}, evaluate="a")
    loaders = {"train": xs(1, -1, 2), "valid": xs(-1, 2)}
    state = fl.fit(step, fl.TrainState.create(model, optimizers), loaders, hooks=())
    assert dict(state.updates) == {"a": 2, "b": 3} and (state.step, state.skipped) == (3, 0)
    assert state.history.latest("valid/a/loss") == -6.0


# --- evaluation


def test_an_evaluation_leaves_it_out_and_metrics_do_not_see_it():
    seen = []

    def note(aux, batch):
        seen.append(batch.item())
        return batch.mean()

    step = fl.pipeline(fl.metric(x=note), fl.ema(0.5))(above_zero)
    values = fl.evaluate(step, toy(w=2.0), xs(1, -5, 3))
    assert (values["loss"], values["x"]) == (4.0, 2.0) and -5.0 not in seen
    assert step.evaluate(toy(w=2.0), torch.tensor([-5.0])).skip == "below zero"


def test_an_inspection_does_not_see_it():
    seen = []
    look = fl.inspect(lambda state, outputs: seen.append([out.loss.item() for out in outputs]))
    fitted({"train": xs(1), "valid": xs(1, -5, 3)}, hooks=(look,))
    assert seen == [[-1.0, -3.0]]


# --- what is said and refused


def test_each_reason_is_logged_once(caplog):
    def loss_fn(model, batch):
        return toy_loss(model, batch) if batch > 0 else fl.skip(f"it is {batch.item():g}")

    with caplog.at_level(logging.WARNING, "fnloop"):
        fitted([1, -5, -5, -3, -5], loss_fn=loss_fn)
    said = [r.getMessage() for r in caplog.records if "leaves a batch out" in r.getMessage()]
    assert said == [f"loss_fn leaves a batch out: it is {n} (logged once)" for n in (-5, -3)]


def test_the_output_says_why():
    _, out = fl.pipeline()(above_zero)(toy(), torch.tensor([-1.0]))
    assert (out.skip, out.weight, out.loss.item()) == ("below zero", 0, 0.0)


@pytest.mark.parametrize(("reason", "error"), [("", ValueError), (None, TypeError)])
def test_a_reason_is_a_text(reason, error):
    with pytest.raises(error, match="skip expects reason"):
        fl.skip(reason)


def test_it_is_returned_alone():
    with pytest.raises(TypeError, match="in a tuple: return it alone"):
        fitted([1], loss_fn=lambda model, batch: (fl.skip("no"), {}))
