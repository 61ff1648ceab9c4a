"""An update has a number of samples of all processes together, whatever their number.

With several processes: tests/processes/test_totals.py.
"""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fnloop as fl
from fnloop import schedules
from fnloop.data import bucketed, interleave, take
from fnloop.testing import toy, toy_loss

SAMPLES = torch.arange(10.0)[:, None]


def fit(loader, total, *middleware, hooks=(), **settings):
    step = fl.pipeline(fl.accumulate(total=total), *middleware)(toy_loss)
    return fl.fit(step, toy(lr=1.0), loader, hooks=hooks, **{"epochs": 1, **settings})


def test_an_update_has_as_many_samples_as_were_asked_for():
    sums = []  # of the gradients, the means of the samples of an update
    note = fl.every(steps=1)(lambda state: sums.append(-state.model.w.item()) or state)
    state = fit(DataLoader(SAMPLES, 2), 4, hooks=(note,))
    assert sums == [1.5, 1.5 + 5.5, 1.5 + 5.5 + 8.5]  # of 0..3, 4..7, and the rest
    assert (state.step, state.epoch) == (3, 1)


def test_the_length_of_a_run_is_counted_in_updates_of_the_total():
    told = []
    hook = fl.once(lambda state: told.append(state.run) or state)
    fit(DataLoader(SAMPLES, 2), 4, hooks=(hook,), epochs=3)
    (run,) = told
    assert (run.window, run.batches_per_epoch, run.steps_per_epoch, run.total_steps) == (2, 5, 3, 9)


def test_a_position_continues_with_batches_of_another_size():
    half = fit(DataLoader(SAMPLES, 2), 4, steps=1)
    step = fl.pipeline(fl.accumulate(total=4))(toy_loss)
    state = fl.fit(step, half, DataLoader(SAMPLES, 1), epochs=1, hooks=())
    assert state.step == 3 and state.model.w.item() == -(1.5 + 5.5 + 8.5)


def test_only_an_incomplete_batch_is_dropped():
    assert fit(DataLoader(SAMPLES[:7], 2, drop_last=True), 4).model.w.item() == -(1.5 + 4.5)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 2),
        [*SAMPLES.split(2)],
        take(DataLoader(SAMPLES, 2), 5),
        interleave({"a": DataLoader(SAMPLES[:4], 2), "b": [*SAMPLES[4:].split(2)]}),
    ],
    ids=["stream", "list", "take", "interleave"],
)
def test_the_size_of_a_batch_is_known(loader):
    assert fit(loader, 4).step == 3


def test_a_total_of_one_sample():
    assert fit(DataLoader(SAMPLES, 1), 1).step == 10


def test_a_schedule_sees_the_updates():
    rates = []
    note = fl.every(steps=1)(
        lambda state: rates.append(state.optimizer.param_groups[0]["lr"]) or state
    )
    fit(DataLoader(SAMPLES, 2), 4, fl.schedule(schedules.linear()), hooks=(note,))
    assert rates == pytest.approx([1, 2 / 3, 1 / 3])


REFUSED = {
    "generator": (lambda: lambda: iter(SAMPLES.split(2)), 4, "does not say: pass DataLoader"),
    "buckets": (
        lambda: DataLoader(SAMPLES, batch_sampler=bucketed([1] * 10, batch_size=2)),
        4,
        "does not say",
    ),
    "other sizes": (
        lambda: interleave({"a": DataLoader(SAMPLES, 2), "b": DataLoader(SAMPLES, 4)}),
        4,
        r"says differently, \[2, 4\]",
    ),
    "sharded": (lambda: fl.sharded(DataLoader(SAMPLES, 2)), 4, "pass the loader without sharded"),
    "indivisible": (
        lambda: DataLoader(SAMPLES, 3),
        10,
        r"have 3 samples: write accumulate\(total=9\)",
    ),
    "too small": (lambda: DataLoader(SAMPLES, 3), 2, r"write accumulate\(total=3\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_whose_batches_cannot_make_the_total_is_refused(name):
    make, total, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as info:
        fit(make(), total)
    assert str(info.value).startswith(f"accumulate(total={total})")


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"got both. Write accumulate\(total=64\)"):
        fl.accumulate(4, total=64)
    with pytest.raises(TypeError, match=r"got neither. Write accumulate\(4\) or"):
        fl.accumulate()
    with pytest.raises(ValueError, match="accumulate expects total as an int >= 1"):
        fl.accumulate(total=0)
    with pytest.raises(ValueError, match="changes its window with the number of processes: write"):
        fl.alternate({"a": fl.pipeline(fl.accumulate(total=4))(toy_loss)})


def test_a_bare_step_takes_the_batches_that_it_is_given():
    step = fl.pipeline(fl.accumulate(total=2))(toy_loss)
    state, _ = step(toy(lr=1.0), [torch.tensor([1.0]), torch.tensor([3.0])])
    assert state.model.w.item() == -2
    with pytest.raises(TypeError, match=r"with accumulate\(total=2\) a step takes a sequence"):
        step(state, torch.tensor([1.0]))


def test_it_prints_as_it_was_typed():
    assert repr(fl.accumulate(total=64)) == "accumulate(total=64)"
    assert fl.accumulate(total=64) == fl.accumulate(total=64) != fl.accumulate(64)
