"""What there is at the boundaries of a run: after a failure, and of the running metrics."""

import attrs
import pytest
import torch
from loop_cases import ONE, Boom, failing_middleware, raising, step
from torch.optim.lr_scheduler import LinearLR

import fnloop as fl
from fnloop._core.metrics import ITEMS, Metrics
from fnloop.testing import assert_same, toy, toy_loss


def test_an_update_whose_outer_middleware_failed_says_so_and_is_not_saved_by_itself(tmp_path):
    decay = fl.torch_scheduler(lambda optimizer, run: LinearLR(optimizer, 1.0, 0.1, total_iters=6))
    batches = [ONE, ONE, 2 * ONE, ONE]
    hook = fl.every(steps=100)(fl.checkpoint(tmp_path, on_exception=True))
    with pytest.raises(Boom) as caught:
        make = fl.pipeline(failing_middleware("step"), decay)(toy_loss)
        fl.fit(make, toy(), batches, hooks=(hook,))
    assert any("the update was applied before this" in note for note in caught.value.__notes__)
    assert fl.latest(tmp_path) is None


def test_a_model_without_weights_is_refused():
    model = torch.nn.Linear(2, 1, device="meta")
    with pytest.raises(ValueError, match="got one on the meta device"):
        fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


# --- the running metrics where an epoch ends


def test_the_metrics_of_an_epoch_are_there_until_the_next_update():
    """The losses are 0, -1, -2, and then -3, -4, -5."""
    seen, mean = [], lambda state: state.metrics["loss"].compute()
    note = lambda state: seen.append(mean(state)) or state
    states = fl.run(step, toy(), [ONE] * 3, epochs=2, hooks=(note,))
    assert [(mean(state), mean(fl.snapshot(state))) for state in states] == [(-1, -1), (-4, -4)]
    assert seen == [0.0, -0.5, -1.0, -3.0, -3.5, -4.0]
    state = fl.fit(step, toy(), [ONE] * 3, epochs=1, hooks=())
    kept = state.metrics
    with pytest.raises(Boom) as caught:
        fl.fit(fl.pipeline()(raising(Boom(), at=1.0)), state, [ONE] * 3, epochs=2, hooks=())
    assert mean(caught.value.state) == -1.0
    state, _ = step(state, ONE)
    assert (mean(state), kept["loss"].compute()) == (-3.0, -1.0)


def test_an_epoch_whose_first_update_is_skipped_has_no_metrics_of_the_one_before():
    guarded, seen = fl.pipeline(fl.skip_nonfinite())(toy_loss), []
    note = lambda state: seen.append(Metrics(state.metrics).read()) or state
    state = fl.fit(guarded, toy(), [ONE] * 2, epochs=1, hooks=())
    state = fl.fit(guarded, state, [ONE * torch.nan, ONE], epochs=2, hooks=(note,))
    assert seen == [{ITEMS: 2.0}, {ITEMS: 2.0, "loss": -2.0}]
    assert state.history["train/loss"] == (-0.5, -2.0)


CUTS = {
    "plain": ((), {}),
    "windows": ((fl.accumulate(2),), {}),
    "records": ((), {"record_every": fl.every(steps=2)}),
    "evaluations": ((), {"evaluate_every": fl.every(steps=2)}),
    "metrics": ((fl.metric(top=lambda aux, batch: fl.Max(batch.max())),), {}),
}


@pytest.mark.parametrize(("members", "settings"), CUTS.values(), ids=CUTS)
def test_hooks_and_middleware_of_a_resumed_run_see_equal_metrics(members, settings, tmp_path):
    loaders = {"train": [ONE, 2 * ONE, 3 * ONE, 4 * ONE], "valid": [ONE]}

    def note(state, into):
        values = {name: metric.compute() for name, metric in state.metrics.items()}
        into.append((state.step, state.epoch, state.batch, values))
        return state

    def seen_in(state, steps):
        seen = []
        before = lambda inner: lambda state, batch: inner(note(state, seen), batch)
        make = fl.pipeline(*members, fl.Middleware("note", step=before))(toy_loss)
        hooks = (lambda state: note(state, seen),)
        return fl.fit(make, state, loaders, steps=steps, hooks=hooks, **settings), seen

    total = 8 // (2 if "accumulate" in repr(members) else 1)
    _, expected = seen_in(toy(), total)
    for cut in range(1, total):
        state, first = seen_in(toy(), cut)
        state, second = seen_in(fl.restore(fl.save(state, tmp_path / f"{cut}"), toy()), total)
        assert first + second == expected, cut


def test_a_checkpoint_of_an_epochs_end_without_metrics_is_continued(tmp_path):
    # As versions up to 0.1 wrote it.
    whole = fl.fit(step, toy(), [ONE] * 3, epochs=2, hooks=())
    state = fl.fit(step, toy(), [ONE] * 3, epochs=1, hooks=())
    path = fl.save(attrs.evolve(state, metrics={}), tmp_path / "old")
    assert_same(fl.fit(step, fl.restore(path, toy()), [ONE] * 3, epochs=2, hooks=()), whole)
