"""A step of one's own."""

import pickle

import pytest
import torch
from sample_middleware import counted
from toy_runs import ONE

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy, toy_loss


def descend(state, batch):
    """What a plain step does, by hand."""
    loss, aux = toy_loss(state.model, batch)
    loss.backward()
    state.optimizer.step()
    return fl.Output(loss, weight=len(batch), aux=aux, metrics={"largest": fl.Max(batch.max())})


def batches(*values):
    return [torch.tensor([float(v)] * (i + 1)) for i, v in enumerate(values)]


def test_a_run_counts_records_and_evaluates_it_as_any_other_step():
    loaders = {"train": batches(1, 2, 3), "valid": batches(5)}
    mine = fl.fit(fl.raw(descend, evaluate=toy_loss), toy(), loaders, epochs=2, hooks=())
    metric = fl.metric(largest=lambda aux, batch: fl.Max(batch.max()), on="training")
    theirs = fl.fit(fl.pipeline(metric)(toy_loss), toy(), loaders, epochs=2, hooks=())
    assert_same(mine, theirs)
    assert (mine.step, mine.model.w.item()) == (6, -12.0)
    assert mine.history["train/largest"] == (3.0, 3.0)


def test_a_bare_call_advances_the_state_and_clears_gradients():
    """Those of before are none of the update: they would not be in a checkpoint."""
    state, step = toy(), fl.raw(descend)
    state.model.w.grad = torch.tensor(7.0)
    new, out = step(state, torch.tensor([2.0]))
    assert (new.step, new.batch, new.model.w.item(), new.model.w.grad) == (1, 1, -2.0, None)
    assert not out.loss.requires_grad
    with pytest.raises(fl.StaleStateError):
        step(state, torch.tensor([2.0]))


def test_a_skipped_update_is_counted_as_one():
    def sometimes(state, batch):
        if batch.max() == 2:
            return fl.Output(torch.tensor(0.0), weight=1, skip="no")
        return descend(state, batch)

    state = fl.fit(fl.raw(sometimes), toy(), batches(1, 2, 3), hooks=())
    assert (state.step, state.skipped, state.batch, state.model.w.item()) == (2, 1, 0, -4.0)


def test_middleware_of_the_step_ring_acts_around_it():
    calls = []
    double = fl.derive(double=lambda numbers: 2 * numbers["loss"])
    mean = fl.metric(mean=lambda aux, batch: aux["output"].mean(), on="evaluation")
    members = fl.schedule(schedules.linear()), counted(calls), double, mean
    step = fl.pipeline(*members)(fl.raw(descend, evaluate=toy_loss))
    state = fl.fit(step, toy(), ([ONE] * 4, [ONE]), hooks=())
    assert state.model.w.item() == -2.5  # 1 + 3/4 + 2/4 + 1/4
    assert calls == [0, 1, 2, 3]
    assert (state.history["valid/mean"], state.history["valid/double"]) == ((-2.5,), (-5.0,))


@pytest.mark.parametrize(("member", "message"), [
    (fl.clip(1.0), r"clip\(1.0\) acts in the gradient ring, but descend does its own"),
    (fl.accumulate(2), r"accumulate\(2\) acts in the gradient ring"),
    (fl.amp("bf16"), "acts in the forward ring"), (fl.compiled(), "replaces the loss function"),
    (fl.metric(mean=lambda aux, batch: 0), 'on="evaluation"'),
    (fl.tbptt(2), "replaces the loss function"), (fl.cuda_graph(), "acts in the device ring"),
    (fl.throughput(), "acts in the loss ring"),
], ids=repr)  # fmt: skip
def test_middleware_that_it_would_ignore_is_refused(member, message):
    with pytest.raises(ValueError, match=message):
        fl.pipeline(member)(fl.raw(descend))


def test_a_loader_cannot_be_evaluated_without_a_loss_function():
    step, loaders = fl.raw(descend), {"train": batches(1), "valid": batches(1)}
    with pytest.raises(ValueError, match=r"cannot evaluate a loader: write raw\(descend, evalu"):
        fl.fit(step, toy(), loaders, hooks=())
    with pytest.raises(ValueError, match="cannot evaluate a loader"):
        fl.evaluate(step, toy(), loaders["valid"])
    assert fl.fit(step, toy(), loaders, evaluate_every=None, hooks=()).step == 1


@pytest.mark.parametrize(("make", "message"), [
    (lambda: fl.raw(fl.pipeline()), r"raw expects a function .* got pipeline"),
    (lambda: fl.pipeline(fl.clip(1.0))(fl.pipeline()(toy_loss)), "is a step already"),
])  # fmt: skip
def test_what_is_not_such_a_function_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    "reply", [None, (1, 2), torch.ones(()), fl.Output(torch.ones(2), weight=1)], ids=type
)
def test_another_reply_is_refused(reply):
    with pytest.raises(TypeError, match=r"<lambda> must return Output\(loss, weight=items\)"):
        fl.raw(lambda state, batch: reply)(toy(), ONE)


@pytest.mark.parametrize(("settings", "message"), [
    ({"weight": "1"}, r"Output\(loss, weight=items\).*; got weight='1'"),
    ({"weight": -1}, "got weight=-1"), ({"weight": torch.ones(2)}, "got weight=tensor"),
    ({"metrics": {"a": 1.0}}, r"metrics such as {'a': Mean\(value, items\)}; got 1.0"),
    ({"skip": False}, 'skip="why", or None for an update that was made; got False'),
])  # fmt: skip
def test_a_wrong_part_of_the_output_is_named(settings, message):
    out = fl.Output(**{"loss": torch.ones(()), "weight": 1, **settings})
    with pytest.raises(TypeError, match="<lambda> must return .*" + message):
        fl.raw(lambda state, batch: out)(toy(), ONE)


def test_a_failure_leaves_no_state_to_continue_from():
    def fails(state, batch):
        descend(state, batch)
        raise RuntimeError("after the update")

    state = toy()
    with pytest.raises(RuntimeError, match="after the update") as caught:
        fl.fit(fl.raw(fails), state, batches(1), hooks=())
    assert "while in fails" in "".join(caught.value.__notes__)
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.evaluate(fl.pipeline()(toy_loss), state, batches(1))


def test_a_step_inside_is_an_error_that_says_what_to_call():
    step = fl.pipeline()(toy_loss)

    def calls_a_step(state, batch):
        return step(state, batch)[1]

    with pytest.raises(fl.StaleStateError) as caught:
        fl.fit(fl.raw(calls_a_step), toy(), batches(1), hooks=())
    said = "calls_a_step makes the update itself: it calls the loss function, backward and the"
    assert any(note.startswith(said) for note in caught.value.__notes__)


def test_it_shows_as_it_was_typed_and_can_be_pickled():
    assert f"{fl.raw(descend)!r}: {fl.raw(descend)}" == "raw(descend): descend(state, batch)"
    step = fl.pipeline(fl.schedule(schedules.linear()))(fl.raw(descend, evaluate=toy_loss))
    shown = "pipeline(schedule(linear()))(raw(descend, evaluate=toy_loss))"
    assert repr(step) == repr(pickle.loads(pickle.dumps(step))) == shown
    assert str(step).splitlines() == [
        "┌ step      schedule(linear())",
        "│ descend(state, batch); in evaluation: toy_loss(model, batch)",
    ]
    assert "backward" not in step._repr_html_()  # it has no such ring
