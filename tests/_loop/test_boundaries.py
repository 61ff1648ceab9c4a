"""What a run that fails or is stopped at an awkward moment still owes: the record, the evaluation
and the hooks.
"""

import os
import signal

import attrs
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


class Flaky(Dataset):
    """Six samples, of which the fifth fails once."""

    failed = False

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 4 and not self.failed:
            self.failed = True
            raise OSError("no answer")
        return torch.ones(())


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_loader_that_fails_costs_no_boundary(prefetch, saved, tmp_path):
    seen = []
    loaders = {"train": DataLoader(Flaky(), 2), "valid": [ONE]}
    hooks = (lambda state: seen.append(state.step) or state,)
    settings = {
        "epochs": 1,
        "hooks": hooks,
        "evaluate_every": fl.every(steps=2),
        "prefetch": prefetch,
    }
    with pytest.raises(OSError, match="no answer") as caught:
        fl.fit(step, toy(), loaders, **settings)
    state = (
        fl.restore(fl.save(caught.value.state, tmp_path / "a"), toy())
        if saved
        else caught.value.state
    )
    state = fl.fit(step, state, loaders, **settings)
    assert [record.step for record in state.history] == [2, 3] and seen == [1, 2, 3]


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="there are no signals here")
def test_a_signal_during_the_last_update_leaves_the_record_to_the_run_that_continues():
    def loss_fn(model, batch):
        if model.training and model.w.item() == -2.0:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(model, batch)

    make, loaders, seen = fl.pipeline()(loss_fn), {"train": [ONE] * 5, "valid": [ONE]}, []
    note = lambda state: seen.append(state.step) or state
    state = fl.fit(make, toy(), loaders, steps=3, hooks=(note,))
    assert (state.step, state.stop, len(state.history), seen) == (3, "SIGTERM", 0, [1, 2])
    state = fl.fit(make, state, loaders, steps=3, hooks=(note,))
    assert seen == [1, 2, 3]
    assert [
        (record.step, record.closing, "valid/loss" in record.metrics) for record in state.history
    ] == [(3, True, True)]


def test_an_update_whose_outer_middleware_failed_says_so_and_is_not_saved_by_itself(tmp_path):
    def failing(inner):
        def fail(state, batch):
            state, out = inner(state, batch)
            if state.step == 3:
                raise OSError("too late")
            return state, out

        return fail

    decay = fl.torch_scheduler(lambda optimizer, run: LinearLR(optimizer, 1.0, 0.1, total_iters=6))
    make = fl.pipeline(fl.Middleware("timer", step=failing), decay)(toy_loss)
    hook = fl.every(steps=100)(fl.checkpoint(tmp_path, on_exception=True))
    with pytest.raises(OSError, match="too late") as caught:
        fl.fit(make, toy(), [ONE] * 6, hooks=(hook,))
    assert any("the update was applied before this" in note for note in caught.value.__notes__)
    assert fl.latest(tmp_path) is None


def test_a_closing_record_whose_evaluation_failed_is_made_by_the_run_that_continues():
    class Once:
        failed = False

        def __iter__(self):
            if not self.failed:
                self.failed = True
                raise OSError("no answer")
            return iter([ONE])

    stop = fl.when(lambda state: state.step == 3)(lambda state: attrs.evolve(state, stop="enough"))
    loaders = {"train": [ONE] * 5, "valid": Once()}
    with pytest.raises(OSError, match="no answer") as caught:
        fl.fit(step, toy(), loaders, hooks=(stop,))
    state = fl.fit(step, caught.value.state, loaders, hooks=())
    assert state.stop == "enough"
    assert [
        (record.step, record.closing, "valid/loss" in record.metrics) for record in state.history
    ] == [(3, True, True)]


@pytest.mark.parametrize("weight", [0.0, float("nan"), -1.0])
def test_a_weight_on_the_device_that_counts_for_nothing_trains_nothing(weight):
    def loss_fn(model, batch):
        return model(batch).mean(), {"weight": torch.tensor(weight)}

    state, _ = fl.pipeline()(loss_fn)(toy(), ONE)
    assert state.model.w.item() == 0.0


def test_a_model_without_weights_is_refused():
    model = torch.nn.Linear(2, 1, device="meta")
    with pytest.raises(ValueError, match="got one on the meta device"):
        fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


# --- the running metrics where an epoch ends


def test_the_metrics_of_an_epoch_are_there_until_the_next_update():
    seen = []

    def note(state):
        seen.append(state.metrics["loss"].compute())
        return state

    def failing(model, batch):
        raise OSError("no answer")

    # The losses are 0, -1, -2, and then -3, -4, -5.
    loader = [ONE] * 3
    yielded = [
        (state.metrics["loss"].compute(), fl.snapshot(state).metrics["loss"].compute())
        for state in fl.run(step, toy(), loader, epochs=2, hooks=(note,))
    ]
    assert seen == [0.0, -0.5, -1.0, -3.0, -3.5, -4.0]
    assert yielded == [(-1.0, -1.0), (-4.0, -4.0)]

    state = fl.fit(step, toy(), loader, epochs=1, hooks=())
    kept = state.metrics
    with pytest.raises(OSError, match="no answer") as caught:
        fl.fit(fl.pipeline()(failing), state, loader, epochs=2, hooks=())
    assert caught.value.state.metrics["loss"].compute() == -1.0
    state, _ = step(state, ONE)
    assert (state.metrics["loss"].compute(), kept["loss"].compute()) == (-3.0, -1.0)


def test_an_epoch_whose_first_update_is_skipped_has_no_metrics_of_the_one_before():
    guarded, seen = fl.pipeline(fl.skip_nonfinite())(toy_loss), []
    note = lambda state: seen.append({k: m.compute() for k, m in state.metrics.items()}) or state
    state = fl.fit(guarded, toy(), [ONE] * 2, epochs=1, hooks=())
    state = fl.fit(guarded, state, [ONE * torch.nan, ONE], epochs=2, hooks=(note,))
    assert seen == [{}, {"loss": -2.0}]
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

    total = 12 // (2 if "accumulate" in repr(members) else 1)
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
