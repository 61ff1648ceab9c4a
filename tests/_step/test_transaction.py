"""An update is a transaction: it is applied, or what it has changed is put back."""

import attrs
import pytest
import torch
from after_steps import after, skipping
from graph_problems import done
from sample_middleware import calls, own_guard
from toy_runs import xs

import fnloop as fl
from fnloop.testing import law_skipped_updates, small, toy, toy_loss

NAN = float("nan")


def no_nan(model, batch):
    return fl.skip("it is nan") if batch.isnan() else toy_loss(model, batch)


def run(values, *members, loss_fn=toy_loss, **settings):
    return fl.fit(fl.pipeline(*members)(loss_fn), toy(), xs(*values), hooks=(), **settings)


def count(state):
    return state.step, state.skipped, state.slots["calls"].item()


GUARDS = {
    "skip_nonfinite": (fl.skip_nonfinite(),),
    "spike_guard": (fl.spike_guard(2),),
    "decide": (own_guard(),),
    "by its output": (skipping(lambda batch, out: batch.isnan()),),
}


@pytest.mark.parametrize("guard", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("ring", ["forward", "loss", "gradient", "step"])
def test_what_a_middleware_keeps_is_put_back_where_another_one_leaves_the_update_out(ring, guard):
    values = [1, 1, NAN, 2]
    assert count(run(values, calls(ring), *guard)) == (3, 1, 3)
    assert count(run(values, calls(ring, keeps=False), *guard)) == (3, 1, 4)


@pytest.mark.parametrize("ring", ["forward", "gradient", "step"])
def test_it_is_put_back_where_the_loss_function_leaves_the_update_out(ring):
    assert count(run([1, NAN, 2], calls(ring), loss_fn=no_nan)) == (2, 1, 2)
    window = run([1, NAN, NAN, NAN], fl.accumulate(2), calls("forward"), loss_fn=no_nan)
    assert count(window) == (1, 1, 2)  # a window that has a batch is an update of both


def test_it_is_put_back_after_an_overflow():
    """1e5 times the scale of 2**127 overflows, and 1 times the half of it does not."""
    state = run([1e5, 1], fl.amp("fp16", init_scale=2.0**127), calls())
    assert count(state) == (1, 1, 1)


def test_it_is_put_back_if_the_update_fails_before_a_weight_has_changed():
    def fail(state, batch, out):
        if batch.isnan():
            raise RuntimeError("found one")

    step = fl.pipeline(calls(), after("gradient", fail))(toy_loss)
    with pytest.raises(RuntimeError, match="found one") as raised:
        fl.fit(step, toy(), xs(1, NAN, 2), hooks=())
    assert count(raised.value.state) == (1, 0, 1)


def test_what_fails_after_the_weights_have_changed_is_not_put_back():
    def fail(state, batch, out):
        raise ValueError("after it")

    state, step = toy(), fl.pipeline(calls(), after("update", fail))(toy_loss)
    state = step.init_slots(state)
    with pytest.raises(ValueError, match="after it"):
        step(state, torch.ones(1))
    assert (state.model.w.item(), state.slots["calls"].item()) == (-1.0, 1.0)


def test_a_step_of_a_users_own_backward_puts_back_too():
    def own(state, batch):
        state.model.w.data -= batch.nan_to_num().mean()
        return fl.Output(batch.mean(), 1, skip="it is nan" if batch.isnan() else None)

    step = fl.pipeline(calls("step"))(fl.raw(own))
    assert count(fl.fit(step, toy(), xs(1, NAN, 2), hooks=())) == (2, 1, 2)


def test_what_is_left_out_on_the_host_is_put_back_in_a_replay(recorders):
    values, guarded = [1] * 6 + [NAN, 2, NAN, 3], (calls(), fl.skip_nonfinite())
    graph = fl.cuda_graph(warmup=1)
    assert count(run(values, *guarded, graph)) == (8, 2, 8)
    assert done(recorders)[-4:] == ["replay 0+", "replay 0", "replay 0", "replay 0+"]


def test_keep_is_a_function_of_the_state():
    with pytest.raises(TypeError, match="keep as a function state -> put back, or None"):
        fl.Middleware("mine", keep=3)
    with pytest.raises(TypeError, match="keep"):
        fl.Middleware("mine", keep=lambda: None)
    same = lambda step: step
    one = fl.Middleware("mine", gradient=same, keep=len)
    assert one == attrs.evolve(one) and one != fl.Middleware("mine", gradient=same)


def test_an_error_names_the_middleware_that_acts_after_a_step(monkeypatch):
    """All of them act through one wrap."""
    monkeypatch.setenv("FNLOOP_TRACEBACK", "full")

    def fail(aux, batch):
        raise ValueError("no metric")

    step = fl.pipeline(fl.metric(failing=fail), fl.clip_value(1.0), fl.clip(1.0))(toy_loss)
    with pytest.raises(ValueError, match="no metric") as raised:
        step(toy(), torch.ones(1))
    assert step.layer_of(raised.value) == "metric(failing=fail)"


def test_an_output_that_is_left_out_reports_nothing():
    step = fl.pipeline(fl.clip(9.0), fl.schedule(fl.schedules.constant()))(no_nan)
    state, out = step(toy(), torch.tensor([NAN]))
    assert (out.skip, out.metrics) == ("it is nan", {})
    assert [*step(state, torch.ones(1))[1].metrics] == ["grad_norm", "lr"]


@pytest.mark.parametrize(("keeps", "counted"), [(True, 2), (False, 3)])
def test_what_retry_on_oom_repeats_is_put_back_before(keeps, counted):
    """A batch of 2 does not fit, so it is made in two pieces, each of which is a call."""

    def greedy(model, batch):
        if len(batch) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return toy_loss(model, batch)

    step = fl.pipeline(fl.retry_on_oom(), calls("forward", keeps=keeps))(greedy)
    state, _ = step(toy(), torch.tensor([1.0, 3.0]))
    assert (state.model.w.item(), state.slots["calls"].item()) == (-2.0, counted)


def test_the_law_of_skipped_updates_holds_with_keep_and_tells_where_it_is_missing():
    law_skipped_updates(fl.pipeline(fl.accumulate(2), calls()), small())
    with pytest.raises(AssertionError, match="slots"):
        law_skipped_updates(fl.pipeline(calls(keeps=False)), small())


def test_a_step_within_a_step_has_a_transaction_of_its_own():
    """The slot that is replaced is put back by decide, whatever the step inside has done."""
    inner = fl.pipeline(calls(), fl.skip_nonfinite())(toy_loss)

    @fl.middleware("gradient")
    def nested():
        def wrap(step):
            def outer(state, batch):
                state, out = step(state, batch)
                inner(toy(), torch.ones(1))
                return attrs.evolve(state, slots={**state.slots, "mine": 1}), out

            return outer

        return wrap

    state, out = fl.pipeline(nested(), own_guard())(toy_loss)(toy(), torch.tensor([NAN]))
    assert (out.skip, "mine" in state.slots) == ("a guard of one's own", False)
