"""halt_on_nonfinite: where a run stops, the steps in the reason, and reads from the device."""

import math

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnloop as fl
from fnloop import History, Mean, Record, RunInfo, halt_on_nonfinite
from fnloop.testing import toy, toy_loss

NAN, INF = math.nan, math.inf
ONE, BAD = torch.tensor([1.0]), torch.tensor([NAN])
STEP = fl.pipeline()(toy_loss)
OFFER = "; to stop at once: halt_on_nonfinite(steps=1)"


@pytest.mark.parametrize(
    ("batches", "steps", "stopped", "interval"),
    [
        (
            [BAD, ONE, ONE],
            100,
            3,
            "between steps 1 and 3",
        ),  # read at the end of the epoch
        ([ONE, ONE, BAD, ONE, ONE], 100, 5, "between steps 1 and 5"),
        (
            [ONE, ONE, BAD, ONE, ONE],
            2,
            4,
            "between steps 1 and 4",
        ),  # the finite read at step 2 is not remembered
        ([ONE, ONE, ONE, BAD, ONE], 2, 4, "between steps 1 and 4"),
        ([ONE, ONE, ONE, ONE, BAD], 2, 5, "between steps 1 and 5"),
        ([ONE, BAD, ONE], 1, 2, "between steps 1 and 2"),
        ([BAD], 100, 1, "at step 1"),
    ],
)
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
