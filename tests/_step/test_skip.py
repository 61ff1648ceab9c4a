"""skip: a loss function leaves a batch out of its window, of an evaluation, or of the run."""

import logging

import attrs
import pytest
import torch
from sample_middleware import output_mean
from torch import nn
from toy_runs import xs

import fnloop as fl
from fnloop._extensions.middleware.guards import _changed
from fnloop.testing import assert_same, small, toy, toy_loss


def above_zero(model, batch):
    return toy_loss(model, batch) if (batch > 0).all() else fl.skip("below zero")


def fitted(values, *members, loss_fn=above_zero, **settings):
    loaders = values if isinstance(values, dict) else xs(*values)
    return fl.fit(fl.pipeline(*members)(loss_fn), toy(), loaders, **{"hooks": (), **settings})


def test_an_update_without_a_batch_is_not_made():
    state = fitted([1, -5, 2])
    assert (state.model.w.item(), state.step, state.skipped, state.batch) == (-3.0, 2, 1, 0)
    assert state.history.latest("train/loss") == pytest.approx(-1.0)
    _, out = fl.pipeline()(above_zero)(toy(), torch.tensor([-1.0]))
    assert (out.skip, out.weight, out.loss.item()) == ("below zero", 0, 0.0)
    with pytest.raises(TypeError, match="in a tuple: return it alone"):
        fitted([1], loss_fn=lambda model, batch: (fl.skip("no"), {}))


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
    marked = [(*batch, i // n in (1, 3)) for i, batch in enumerate(problem.batches * 2)]
    kept = [batch for batch in marked if not batch[2]]
    members = fl.accumulate(n), fl.clip(0.05), fl.ema(0.9), fl.metric(mean=output_mean)
    loss_fn = lambda model, batch: fl.skip("marked") if batch[2] else problem.loss_fn(model, batch)

    def run(part):
        step, loaders = fl.pipeline(*members)(loss_fn), {"train": part, "valid": kept[:2]}
        state = fl.fit(step, problem.state(), loaders, steps=len(kept) // n, hooks=())
        return attrs.evolve(state, batch=0, epoch=0, skipped=0, events=()), state.skipped

    (one, skipped), (two, _) = run(marked), run(kept)
    assert skipped == 2
    assert_same(one, two)


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
    state = fl.TrainState.create(model, {k: torch.optim.SGD([model[k]], lr=1.0) for k in "ab"})
    choosy = fl.pipeline()(lambda m, x: (m["a"] * x).mean() if x > 0 else fl.skip("below zero"))
    plain = fl.pipeline()(lambda m, x: m["b"] * 1.0)
    step = fl.alternate({"a": choosy, "b": plain}, evaluate="a")
    state = fl.fit(step, state, (xs(1, -1, 2), xs(-1, 2)), hooks=())
    assert dict(state.updates) == {"a": 2, "b": 3} and (state.step, state.skipped) == (3, 0)
    assert state.history.latest("valid/a/loss") == -6.0


def test_an_evaluation_leaves_it_out_and_neither_metrics_nor_inspections_see_it():
    seen = []
    note = fl.metric(x=lambda aux, batch: seen.append(batch.item()) or batch.mean())
    step = fl.pipeline(note, fl.ema(0.5))(above_zero)
    values = fl.evaluate(step, toy(w=2.0), xs(1, -5, 3))
    assert (values["loss"], values["x"]) == (4.0, 2.0) and -5.0 not in seen
    assert step.evaluate(toy(w=2.0), torch.tensor([-5.0])).skip == "below zero"
    seen.clear()
    look = fl.inspect(lambda state, outputs: seen.extend(out.loss.item() for out in outputs))
    fitted({"train": xs(1), "valid": xs(1, -5, 3)}, hooks=(look,))
    assert seen == [-1.0, -3.0]


def test_each_reason_is_logged_once(caplog):
    def loss_fn(model, batch):
        return toy_loss(model, batch) if batch > 0 else fl.skip(f"it is {batch.item():g}")

    with caplog.at_level(logging.WARNING, "fnloop"):
        fitted([1, -5, -5, -3, -5], loss_fn=loss_fn)
    said = [r.getMessage() for r in caplog.records if "leaves a batch out" in r.getMessage()]
    assert said == [f"loss_fn leaves a batch out: it is {n} (logged once)" for n in (-5, -3)]


def test_a_value_goes_back_into_the_tensor_that_is_there_if_it_fits():
    here = torch.zeros(2)
    assert _changed(here, torch.ones(2), {}) is here and here.tolist() == [1, 1]
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64), None):
        made = _changed(other, torch.ones(2), {})
        assert made is not other and made.tolist() == [1, 1] and made.dtype == torch.float32
