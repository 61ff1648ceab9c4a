"""accumulate: windows by the update, and gradients that are added up in another dtype."""

import attrs
import pytest
import torch
from toy_runs import fitted, noting, of

import fnloop as fl
from fnloop._core.runs import Windows
from fnloop.testing import toy, toy_loss

BY_STEP = fl.accumulate({0: 1, 3: 2, 5: 3}, by="step")


def taken_by(members, batches=10, state=None, **settings):
    """Return how many batches each call of the step took, and the state."""
    note, found = noting(lambda state: (state.epoch, state.batch))
    settings = {"hooks": (note,), **settings}
    state = fitted([1] * batches, *members, state=state, **settings)
    return found, state


def test_from_an_update_on_each_has_more_batches():
    """1 + 1 + 1 + 2 + 2 + 3, and then 3 + 3 + 3 + 1."""
    found, state = taken_by([BY_STEP], epochs=2)
    first, second = [(0, n) for n in (1, 2, 3, 5, 7)], [(1, n) for n in (0, 3, 6, 9)]
    assert found == [*first, *second, (2, 0)]
    assert (state.step, state.model.w.item()) == (10, -10.0)


def test_a_phase_counts_its_own_updates():
    first, state = taken_by([BY_STEP], epochs=1, phase="a")
    second, _ = taken_by([BY_STEP], state=state, epochs=1, phase="b")
    assert [batch for _, batch in first] == [batch for _, batch in second] == [1, 2, 3, 5, 7, 0]


def test_before_its_first_key_the_window_is_one_batch():
    found, _ = taken_by([fl.accumulate({2: 4}, by="step")], epochs=1)
    assert [batch for _, batch in found] == [1, 2, 6, 0]


def test_updates_that_were_skipped_count():
    """So windows are known before they are read: 1 + 1 + 1 + 2 (skipped) + 2 + 3."""
    nan = float("nan")
    values, members = [1, 1, 1, 1, nan, 1, 1, 1, 1, 1], (fl.skip_nonfinite(), BY_STEP)
    whole = fitted(values, *members, epochs=2)
    assert (whole.step, whole.skipped) == (6 - 1 + 4 - 1, 2)


def test_schedules_and_moments_know_how_many_updates_there_are():
    totals = []
    factor = lambda i, total: totals.append(total) or 1.0
    length, seen = noting(lambda state: (state.step, state.run.steps_per_epoch))
    half = fl.every(epochs=0.5)(length)
    taken_by([BY_STEP, fl.schedule(factor)], epochs=3, hooks=(half,))
    assert {*totals} == {14}  # 6 + 4 + 4
    assert seen == [(3, 6), (6, 6), (8, 4), (10, 4), (12, 4), (14, 4)]


def test_a_run_of_a_billion_epochs_is_planned_at_once():
    stop = fl.once(lambda state: attrs.evolve(state, stop=f"{state.run.total_steps}"))
    _, state = taken_by([BY_STEP], epochs=10**9, hooks=(stop,))
    assert state.stop == f"{6 + (10**9 - 1) * 4}"


@pytest.mark.parametrize(("batch", "update"), [(0, 2), (1, 3), (3, 4), (5, 5), (8, 6), (11, 7)])
def test_the_windows_of_an_epoch_are_known_at_any_place_of_it(batch, update):
    """An epoch begins at update 2: 1 + 2 + 2 + 3 + 3 + ..."""
    there = Windows.by_update({0: 1, 3: 2, 5: 3}, batch, update)
    assert there == Windows.by_update({0: 1, 3: 2, 5: 3}, 0, 2)
    assert [there.updates(n) for n in (1, 2, 3, 5, 6, 8, 9)] == [1, 2, 2, 3, 4, 4, 5]
    at_a_key = Windows.by_update({0: 1, 3: 2, 5: 3}, 0, 3)  # where an epoch begins with it
    assert [at_a_key.updates(n) for n in (2, 4, 7)] == [1, 2, 3]


# --- another dtype


def test_gradients_are_added_up_in_float32():
    """In bfloat16, 256 + 1 is 256, so that the sum of these is 258 instead of 260."""
    x = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 2.0)]
    bf16 = lambda: toy().model.bfloat16()
    found = [
        fl.pipeline(fl.accumulate(4, dtype=dtype))(toy_loss)(of(bf16()), x)[0].model.w.item()
        for dtype in (torch.float32, None)
    ]
    assert found == [-65.0, -64.5]


# --- what is refused


@pytest.mark.parametrize(("call", "message"), [
    (lambda: fl.accumulate(4, by="step"), "n is 4, so leave by='step' out"),
    (lambda: fl.accumulate({-1: 2}, by="step"), "an update of n"),
    (lambda: fl.accumulate(4, dtype=torch.int64), "a floating dtype; got torch"),
])  # fmt: skip
def test_a_wrong_argument_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_exact_sums_have_no_dtype():
    model = toy().model
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0, exact=True)
    with pytest.raises(NotImplementedError, match=r"accumulate\(dtype=torch.float64\) does not"):
        fitted([1, 1], fl.accumulate(2, dtype=torch.float64), state=state)
