"""skip_nonfinite: a run with poisoned batches equals one whose loader leaves them out."""

import itertools
import math

import attrs
import pytest
import torch
from host_reads import CountReads
from sample_middleware import noise
from torch import nn
from toy_runs import fitted, kept, stop_when, xs

import fnloop as fl
from fnloop import schedules
from fnloop.testing import no_host_reads, small, spy, stochastic, toy, toy_loss
from fnloop.testing._laws import assert_equal

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(("term", "why"), [
    (lambda w: INF, "the loss is inf"), (lambda w: w.abs().sqrt() * 0, "a gradient is not finite"),
])  # fmt: skip
def test_the_loss_alone_and_a_gradient_alone_are_found(term, why):
    step = fl.pipeline(fl.skip_nonfinite())(lambda model, x: (model.w * x).mean() + term(model.w))
    state, out = step(toy(), torch.tensor([5.0]))
    assert out.skip == f"skip_nonfinite: {why}" and state.model.w.item() == 0.0


def test_a_gradient_without_elements_is_finite():
    """A shard of a short parameter may have none."""
    model = nn.ParameterList([torch.zeros(0, 2), torch.zeros(2)])
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    step = fl.pipeline(fl.skip_nonfinite())(lambda m, x: sum((p * x).sum() for p in m))
    state, out = step(state, torch.ones(2))
    assert out.skip is None and state.model[1].tolist() == [-1.0, -1.0]


def poisoned(problem, which):
    """Return the batches with NaN in some of them, and the batches without those."""

    def poison(batch):
        if isinstance(batch, dict):
            return {**batch, "x": batch["x"] * NAN}
        return batch[0] * NAN, *batch[1:]

    batches = [poison(b) if i in which else b for i, b in enumerate(problem.batches)]
    return batches, [b for i, b in enumerate(problem.batches) if i not in which]


def without_dropout():
    """BatchNorm, whose statistics a bad batch would poison too, and AdamW."""
    problem = stochastic()
    layers = lambda: [layer for i, layer in enumerate(problem.model()) if i != 2]
    return attrs.evolve(problem, model=lambda: nn.Sequential(*layers()))


@pytest.mark.parametrize("problem", [small, without_dropout])
@pytest.mark.parametrize(("members", "which"), [
    ((), (1, 2, 5)),
    ((fl.clip(0.05), fl.ema(0.9), fl.schedule(schedules.cosine(warmup=2))), (0, 3)),
    ((fl.amp("bf16"), fl.metric(mean=lambda aux, b: aux["output"].mean())), (1,)),
], ids=str)  # fmt: skip
def test_a_run_with_poisoned_batches_equals_one_without_them(problem, members, which):
    problem = problem()
    bad, good = poisoned(problem, which)

    def run(batches, *guard):
        given = {"loss_fn": problem.loss_fn, "state": problem.state(), "steps": 3 * len(good)}
        return fitted({"train": batches, "valid": good[:2]}, *members, *guard, epochs=3, **given)

    one, two = run(bad, fl.skip_nonfinite()), run(good)
    assert (one.step, one.skipped) == (3 * len(good), 3 * len(which))
    assert_equal(one.model.state_dict(), two.model.state_dict(), "model", 0.0)
    assert_equal(one.optimizer, two.optimizer, "optimizer", 0.0)
    for name in two.slots:
        assert_equal(one.slots[name], two.slots[name], name, 0.0)
    assert [r.metrics for r in one.history] == [r.metrics for r in two.history]


INSIDE = ("guard other accumulate", "other guard accumulate")


@pytest.mark.parametrize(("other", "refused"), [
    (fl.clip(99.0), INSIDE), (noise(0.0), INSIDE), (fl.clip(math.inf), ()), (fl.grad_norm(), ()),
    (fl.microbatch(1), ()), (fl.retry_on_oom(), ()), (fl.spike_guard(9), ()),
    (fl.amp("fp16", init_scale=1.0),
     ("guard other accumulate", "guard accumulate other", "accumulate guard other")),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("order", [*itertools.permutations(("guard", "other", "accumulate"))])
def test_a_bad_batch_leaves_its_whole_window_out_in_every_order(other, refused, order):
    """Of the windows (1, NaN) and (2, 4) the second is applied, or the order is refused."""
    members = {"guard": fl.skip_nonfinite(), "accumulate": fl.accumulate(2), "other": other}
    listed = [members[name] for name in order]
    if " ".join(order) in refused:
        with pytest.raises(ValueError, match=r"judges whole updates|scaled gradients"):
            fl.pipeline(*listed)
        return
    state = fl.fit(fl.pipeline(*listed)(float_loss), toy(), xs(1, NAN, 2, 4), hooks=())
    assert (state.model.w.item(), state.step, state.skipped) == (-3.0, 1, 1)


def float_loss(model, x):
    return (model.w * x).float().mean()


def test_the_carry_of_a_bad_window_is_not_carried_on():
    def loss_fn(model, batch, carry):
        carry = batch.sum() + (0 if carry is None else carry)
        return model.w * carry, {}, carry

    step = fl.pipeline(fl.tbptt(1), fl.skip_nonfinite())(loss_fn)
    state, _ = step(toy(), torch.tensor([[1.0, NAN, 2.0]]))
    assert (state.model.w.item(), state.slots["tbptt"].item(), state.skipped) == (-4.0, 3.0, 1)


def test_in_turns_each_step_has_its_own():
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    optimizers = {k: torch.optim.SGD([model[k]], lr=1.0) for k in ("a", "b")}
    guarded = fl.pipeline(fl.skip_nonfinite(2))(lambda model, x: (model["a"] * x).mean())
    plain = fl.pipeline()(lambda model, x: model["b"] * 1.0)
    state = fl.TrainState.create(model, optimizers)
    step = fl.alternate({"a": guarded, "b": plain})
    state = fl.fit(step, state, xs(1, NAN, NAN, 1), hooks=())
    assert dict(state.updates) == {"a": 1, "b": 3} and state.stop.startswith("skip_nonfinite: 2")


def test_limit_in_a_row_stop_the_run_which_may_be_continued(tmp_path):
    """Also if the row begins before a checkpoint."""
    values, guard = [1, NAN, 1, NAN, NAN, 1, 1], fl.skip_nonfinite(2)
    state = fitted(values, guard, hooks=(stop_when(lambda state: state.batch == 4),))
    state = fitted(values, guard, state=kept("checkpoint", state, toy(), tmp_path), epochs=1)
    assert (state.step, state.skipped, state.batch) == (2, 3, 5)
    said = "skip_nonfinite: 2 updates in a row had a loss or gradients that are not finite"
    assert state.stop == said
    state = fitted(values, guard, state=attrs.evolve(state, stop=None), epochs=1)
    assert (state.step, state.skipped, state.epoch, state.stop) == (4, 3, 1, None)


def test_an_overflow_is_for_amp_and_does_not_count():
    amp = fl.amp("fp16", init_scale=2.0**60)
    state = fitted([3e30] * 12, amp, fl.skip_nonfinite(1), loss_fn=float_loss)
    assert state.skipped > 1 and state.stop is None


def test_an_update_is_read_to_the_host_once():
    state = toy()
    guarded = fl.skip_nonfinite().gradient(spy(grad=2.0))
    state = fl.pipeline(fl.skip_nonfinite())(toy_loss).init_slots(state)
    with no_host_reads(), pytest.raises(AssertionError, match="read to the host"):
        guarded(state, None)

    with CountReads() as reads:
        guarded(state, None)
    assert reads.count == 1
