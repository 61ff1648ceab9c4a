"""halt_on_nonfinite: where a run stops, the steps in the reason, and reads from the device."""

import itertools
import math

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop import History, Mean, Record, RunInfo, halt_on_nonfinite
from fnloop.testing import toy, toy_loss

NAN, INF = math.nan, math.inf
ONE, BAD = torch.tensor([1.0]), torch.tensor([NAN])
STEP = fl.pipeline()(toy_loss)
OFFER = "; to stop at once: halt_on_nonfinite(steps=1)"


@pytest.mark.parametrize(("batches", "steps", "stopped", "interval"), [
    ([BAD, ONE, ONE], 100, 3, "between steps 1 and 3"),  # read at the end of the epoch
    ([ONE, ONE, BAD, ONE, ONE], 100, 5, "between steps 1 and 5"),
    # the finite read at step 2 is not remembered
    ([ONE, ONE, BAD, ONE, ONE], 2, 4, "between steps 1 and 4"),
    ([ONE, ONE, ONE, BAD, ONE], 2, 4, "between steps 1 and 4"),
    ([ONE, ONE, ONE, ONE, BAD], 2, 5, "between steps 1 and 5"),
    ([ONE, BAD, ONE], 1, 2, "between steps 1 and 2"), ([BAD], 100, 1, "at step 1"),
])  # fmt: skip
def test_it_halts_at_the_next_read_and_names_the_steps_since_the_last_record(
    batches, steps, stopped, interval
):
    state = fl.fit(STEP, toy(), batches, epochs=2, hooks=(halt_on_nonfinite(steps),))
    offer = OFFER if interval.startswith("between") and steps > 1 else ""
    assert (state.step, state.stop) == (
        stopped,
        f"halt_on_nonfinite: the training loss became nan {interval}{offer}",
    )


def test_it_checks_every_record():
    loaders = {"train": [ONE, ONE, BAD, ONE, ONE], "valid": [ONE]}
    state = fl.fit(
        STEP, toy(), loaders, hooks=(halt_on_nonfinite(),), evaluate_every=fl.every(steps=2)
    )
    assert (
        state.stop
        == "halt_on_nonfinite: the training loss became nan between steps 3 and 4" + OFFER
    )


@pytest.mark.parametrize(("records", "steps", "stopped", "interval"), [
    (1, 100, 3, "at step 3"), (2, 100, 4, "between steps 3 and 4"),
    (2, 2, 4, "between steps 3 and 4"), (3, 100, 3, "between steps 1 and 3"),
    (3, 1, 3, "between steps 1 and 3"), (9, 100, 5, "between steps 1 and 5"),
])  # fmt: skip
def test_it_checks_the_mean_since_the_last_record(records, steps, stopped, interval):
    state = fl.fit(
        STEP,
        toy(),
        {"train": [ONE, ONE, BAD, ONE, ONE], "valid": [ONE]},
        hooks=(halt_on_nonfinite(steps),),
        record_every=fl.every(steps=records),
    )
    offer = OFFER if interval.startswith("between") and steps > 1 else ""
    assert (state.step, state.stop) == (
        stopped,
        f"halt_on_nonfinite: the training loss became nan {interval}{offer}",
    )


def test_a_bad_interval_that_it_has_not_seen_is_in_the_mean_of_the_epoch():
    """The loss of the second update alone is NaN, and no gradient is."""

    def loss_fn(model, batch):
        loss, aux = toy_loss(model, ONE)
        return loss + batch.mean(), aux

    hooks = (fl.every(steps=4)(halt_on_nonfinite(4)),)
    state = fl.fit(
        fl.pipeline()(loss_fn),
        toy(),
        [ONE, BAD, ONE, ONE, ONE],
        hooks=hooks,
        record_every=fl.every(steps=1),
    )
    assert [math.isnan(loss) for loss in state.history["recent/loss"]] == [0, 1, 0, 0]
    assert (state.step, state.stop) == (
        4,
        "halt_on_nonfinite: the training loss became nan between steps 2 and 4" + OFFER,
    )


def test_an_epoch_with_a_bad_mean_that_it_has_not_seen_is_in_the_interval():
    hooks = (fl.every(epochs=2)(halt_on_nonfinite()),)
    state = fl.fit(STEP, toy(), [ONE, BAD, ONE], epochs=3, hooks=hooks)
    assert math.isnan(state.history["train/loss"][0])
    assert state.stop.endswith("became nan between steps 1 and 6" + OFFER)


def test_the_interval_begins_after_the_last_epoch():
    epochs = iter([[ONE, ONE], [ONE, BAD, ONE], [ONE]])
    state = fl.fit(STEP, toy(), lambda: next(epochs), epochs=3, hooks=(halt_on_nonfinite(),))
    assert (state.epoch, state.stop) == (
        2,
        "halt_on_nonfinite: the training loss became nan between steps 3 and 5" + OFFER,
    )


def test_the_interval_covers_steps_at_which_the_hook_did_not_run():
    state = fl.fit(STEP, toy(), [ONE, BAD, ONE, ONE], steps=3, hooks=())  # no hook checks step 2
    state = fl.fit(STEP, state, [ONE, BAD, ONE, ONE], epochs=1, hooks=(halt_on_nonfinite(2),))
    assert (
        state.stop
        == "halt_on_nonfinite: the training loss became nan between steps 1 and 4" + OFFER
    )


def test_an_infinite_loss_halts_the_run():
    state = fl.fit(STEP, toy(w=1.0), [torch.tensor([INF])], hooks=(halt_on_nonfinite(),))
    assert state.stop == "halt_on_nonfinite: the training loss became inf at step 1"


def test_a_loss_that_is_not_finite_in_evaluation_only_does_not_halt():
    loaders = {"train": [ONE] * 5, "valid": [BAD]}
    state = fl.fit(STEP, toy(), loaders, epochs=2, hooks=(halt_on_nonfinite(2),))
    assert (state.epoch, state.stop) == (2, None)


def test_it_is_one_of_the_default_hooks(capsys):
    assert (
        fl.fit(STEP, toy(), [BAD], epochs=2).stop
        == "halt_on_nonfinite: the training loss became nan at step 1"
    )
    assert "train/loss nan" in capsys.readouterr().err


class CountReads(TorchDispatchMode):
    """Counts the reads of numbers from the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_it_reads_from_the_device_only_every_n_updates():
    hook, running = halt_on_nonfinite(3), {"loss": Mean(torch.tensor(6.0), 2)}
    counts = []
    for step in range(1, 8):
        state = attrs.evolve(toy(), step=step, events=frozenset({"update"}), metrics=running)
        with CountReads() as reads:
            assert hook(state) is state
        counts.append(reads.count)
    assert counts == [0, 0, 1, 0, 0, 1, 0]


def test_checking_a_record_does_not_read_from_the_device():
    state = attrs.evolve(
        toy(),
        history=History([Record(1, 10, {"train/loss": 0.0})]),
        events=frozenset({"update", "epoch", "record"}),
        metrics={"loss": Mean(torch.tensor(6.0), 2)},
        run=RunInfo(),
    )
    with CountReads() as reads:
        assert halt_on_nonfinite(1)(state) is state
    assert reads.count == 0


@pytest.mark.parametrize("steps", [0, 1.0, True])
def test_a_wrong_number_of_steps_is_an_error_when_composing(steps):
    with pytest.raises(
        ValueError, match=r"steps as an int >= 1, the updates between two reads; got "
    ):
        halt_on_nonfinite(steps)


# --- keep=True: which update and which samples


def kept(batches, steps=100, members=(), epochs=1, moment=None, **settings):
    """Train until the hook stops the run, and return where it was."""
    hook = halt_on_nonfinite(steps, keep=True)
    hooks = (hook if moment is None else moment(hook),)
    state = fl.fit(
        fl.pipeline(*members)(toy_loss), toy(), batches, epochs=epochs, hooks=hooks, **settings
    )
    found = state.extra.get("nonfinite")
    assert found is None or f"at step {found['step']} (epoch {found['epoch']}, " in state.stop
    return found


def place(epoch, batch, step, indices=None):
    return {"epoch": epoch, "batch": batch, "step": step, "indices": indices}


@pytest.mark.parametrize(("batches", "settings", "found"), [
    ([ONE, ONE, BAD, ONE, ONE], {}, place(0, 2, 3)),
    ([ONE, ONE, BAD, ONE, ONE], {"steps": 2}, place(0, 2, 3)), ([BAD, ONE], {}, place(0, 0, 1)),
    ([ONE, ONE, BAD], {}, place(0, 2, 3)),  # the last of an epoch
    ([ONE, ONE, BAD], {"moment": fl.every(epochs=1)}, place(0, 2, 3)),
    ([ONE] * 4 + [BAD, ONE], {"members": (fl.accumulate(2),)}, place(0, 4, 3)),
    ([ONE] * 3 + [BAD], {"members": (fl.accumulate(2),), "steps": 1}, place(0, 2, 2)),
    ([ONE, BAD, ONE], {"evaluate_every": fl.every(steps=1)}, place(0, 1, 2)),
    ([ONE, ONE], {"epochs": 2}, None),
])  # fmt: skip
def test_it_names_the_update_that_made_it(batches, settings, found):
    assert kept(batches, **settings) == found


def test_it_names_the_update_of_a_later_epoch_and_of_a_resumed_run():
    epochs = [[ONE, ONE], [ONE, ONE, BAD, ONE, ONE]]
    loader = lambda epoch, batch: iter(epochs[epoch][batch:])
    assert kept(loader, 2, epochs=2, moment=fl.every(steps=2)) == place(1, 2, 5)
    assert kept(loader, epochs=2) == place(1, 2, 5)
    state = fl.fit(STEP, toy(), loader, steps=3, epochs=2, hooks=())
    state = fl.fit(STEP, state, loader, epochs=2, hooks=(halt_on_nonfinite(keep=True),))
    assert state.extra["nonfinite"] == place(1, 2, 5)
    # The run was bad already when the hook began: only the interval is known.
    state = fl.fit(STEP, toy(), [ONE, BAD, ONE, ONE], steps=3, hooks=())
    state = fl.fit(STEP, state, [ONE, BAD, ONE, ONE], hooks=(halt_on_nonfinite(keep=True),))
    assert "nonfinite" not in state.extra and "between steps 1 and 4" in state.stop


def test_an_update_that_was_skipped_is_not_the_one():
    step = fl.pipeline(fl.skip_nonfinite())(toy_loss)
    batches = [ONE, BAD, ONE, torch.tensor([3e38, 3e38])]
    state = fl.fit(step, toy(w=1.0), batches, hooks=(halt_on_nonfinite(keep=True),))
    assert state.skipped == 2 and "nonfinite" not in state.extra


def test_it_names_the_samples_of_the_update():
    x = torch.arange(1.0, 13.0)
    x[7] = NAN
    for members, batches in (((), 1), ((fl.accumulate(2),), 2)):
        loader = DataLoader(x, batch_size=3, shuffle=True)
        hook = halt_on_nonfinite(keep=True)
        state = fl.fit(fl.pipeline(*members)(toy_loss), toy(), loader, epochs=3, hooks=(hook,))
        found = state.extra["nonfinite"]
        assert len(found["indices"]) == batches
        samples = [i for index in found["indices"] for i in index]
        assert 7 in samples and len(samples) == 3 * batches
        assert f"samples {', '.join(map(str, samples))})" in state.stop


def test_the_place_is_in_checkpoints(tmp_path):
    state = fl.fit(STEP, toy(), [ONE, BAD], hooks=(halt_on_nonfinite(keep=True),))
    fl.save(state, tmp_path / "one")
    assert fl.restore(tmp_path / "one", toy()).extra["nonfinite"] == place(0, 1, 2)


def test_keeping_reads_from_the_device_as_rarely():
    counts = []
    with CountReads() as reads:

        def count(state):
            counts.append(reads.count)
            return state

        hooks = (halt_on_nonfinite(3, keep=True), count)
        fl.fit(STEP, toy(), [ONE] * 7, hooks=hooks)
    without_record = [after - before for before, after in itertools.pairwise(counts[:-1])]
    assert without_record == [0, 1, 0, 0, 1], "one read of a mean at steps 3 and 6"


def test_keep_shows_and_is_checked():
    assert repr(halt_on_nonfinite(5)) == "halt_on_nonfinite(steps=5)"
    assert repr(halt_on_nonfinite(keep=True)) == "halt_on_nonfinite(steps=100, keep=True)"
    with pytest.raises(TypeError, match="halt_on_nonfinite expects keep"):
        halt_on_nonfinite(keep=1)
