"""without: what a batch of a run was worth, or a change of its script."""

import itertools
import math
import random

import attrs
import numpy as np
import pytest
import several
import streams
import torch
from composed_cases import CASES, contents, samples
from loop_cases import generators
from replayed import recorded
from sample_hooks import stop_at
from sample_middleware import decay
from sample_steps import carried
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fnloop as fl
from fnloop.debug import diff, without
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

STEP = fl.pipeline()(toy_loss)
BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]


def saved(folder, step, state, loaders, every=1, **settings):
    """Train, with a checkpoint of the beginning, and after some updates."""
    saves = (fl.at_start() | fl.every(steps=every))(fl.checkpoint(folder, keep=None))
    return fl.fit(step, state, loaders, hooks=(saves,), **settings)


# --- numbers that can be checked in the head: w goes down by the mean of a batch


def test_a_batch_is_left_out_and_the_others_are_the_same(tmp_path):
    """w is -1, -3, -6, -10; without the 3 it is -1, -3, -3, -7."""
    loaders = {"train": BATCHES, "valid": BATCHES[:1]}
    saved(tmp_path, STEP, toy(), loaders, every=2)
    drawn, state = generators(), toy()
    report = without(tmp_path, STEP, state, loaders, batch=2)
    assert generators() == drawn
    assert_same(state, toy())
    fl.snapshot(state)  # it is not stale
    a, b = report.states
    assert (a.model.w.item(), b.model.w.item()) == (-10, -7)
    assert [(s.step, s.epoch, s.batch, s.skipped) for s in (a, b)] == [(4, 1, 0, 0)] * 2
    assert (report.batch, report.update, report.until, report.apart) == ((0, 2), 3, 4, 3)
    assert [(d.update, d.distance, d.share) for d in report.weights] == [(3, 3, 0.5), (4, 3, 0.3)]
    found = {m.name: (m.since, m.a, m.b, m.difference) for m in report.metrics}
    assert found["valid/loss"] == (4, -10, -7, 3)
    assert found["train/loss"] == (4, -(2 + 9 + 24) / 4, -(2 + 12) / 3, 8.75 - 14 / 3)
    assert report and report.confirmed is True
    text = repr(report)
    assert "without batch 2 of epoch 0 (update 3), up to step 4" in text
    assert "the weights diverge in update 3\n" in text and "30.000%" in text
    assert "the run itself is made again, bit for bit" in text and "+3" in report._repr_html_()


@pytest.mark.parametrize(("batch", "place"), [
    (0, (0, 0)), (3, (0, 3)), (4, (1, 0)), (7, (1, 3)), ((1, 2), (1, 2)),
])  # fmt: skip
def test_a_position_counts_over_all_epochs(batch, place, tmp_path):
    saved(tmp_path, STEP, toy(), BATCHES, every=4, epochs=2)
    report = without(tmp_path, STEP, toy(), BATCHES, batch=batch)
    left_out = BATCHES[place[1]].item()
    assert report.batch == place and report.apart == place[0] * 4 + place[1] + 1
    assert [state.model.w.item() for state in report.states] == [-20, -20 + left_out]


def test_a_window_is_made_of_its_other_batches_by_their_weights(tmp_path):
    """Of 1, (2, 6), 3 in one window the mean of the four is 3; without the 3 it is 9 / 3."""
    batches = [torch.tensor(x) for x in ([1.0], [2.0, 6.0], [4.0], [5.0])]
    step = fl.pipeline(fl.accumulate(3))(toy_loss)
    saved(tmp_path, step, toy(), batches)
    for batch, w in ((0, -4 - 5), (1, -2.5 - 5), (2, -3 - 5), (3, -13 / 4)):
        report = without(tmp_path, step, toy(), batches, batch=batch)
        a, b = report.states
        assert (a.model.w.item(), b.model.w.item()) == (-13 / 4 - 5, w)
        assert (a.step, b.step) == (2, 2) and report.update == (1 if batch < 3 else 2)


def test_the_rows_that_are_left_make_a_smaller_batch(tmp_path):
    """The mean of 2 and 6 is 4; without the 6 it is 2; without both there is no update."""
    batches = [torch.tensor(x) for x in ([1.0, 1.0], [2.0, 6.0], [3.0, 3.0])]
    saved(tmp_path, STEP, toy(), batches)
    for rows, w in (([1], -6), ([0], -10), ((0, 1), -4), (range(1, 2), -6)):
        report = without(tmp_path, STEP, toy(), batches, batch=1, rows=rows)
        assert [state.model.w.item() for state in report.states] == [-8, w]
        assert report.rows == tuple(rows) and f"row{'s' * (len(rows) > 1)} " in repr(report)


def test_the_other_updates_keep_their_rates(tmp_path):
    """The rates are 1, 3/4, 2/4 and 1/4; without the second batch the fourth has 1/4 still."""
    for i, rates in enumerate((
        fl.schedule(lambda i, total: 1 - i / total),
        fl.torch_scheduler(lambda optimizer, run: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: 1 - i / run.total_steps
        )),
    )):  # fmt: skip
        step = fl.pipeline(rates)(toy_loss)
        saved(tmp_path / str(i), step, toy(), BATCHES)
        report = without(tmp_path / str(i), step, toy(), BATCHES, batch=1)
        a, b = report.states
        assert (a.model.w.item(), b.model.w.item()) == (-1 - 1.5 - 1.5 - 1, -1 - 1.5 - 1)
        assert (a.step, b.step) == (4, 4)


# --- bit for bit as a loop that is written by hand


def by_hand(problem, left_out, accumulate=1):
    """AdamW over the batches without one, each update with its own rate."""
    torch.manual_seed(0)
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    windows = [[*range(len(problem.batches))][i::1][:accumulate] for i in range(
        0, len(problem.batches), accumulate
    )]  # fmt: skip
    for i, window in enumerate(windows):
        kept = [problem.batches[k] for k in window if k != left_out]
        if not kept:
            continue
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 / (1 + i))
        optimizer.zero_grad()
        items = sum(len(batch[0]) for batch in kept)
        for batch in kept:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            (loss * (len(batch[0]) / items)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("left_out", [0, 3, 6])
def test_the_weights_are_those_of_a_loop_without_the_batch(window, left_out, tmp_path):
    problem = small()

    def loss_fn(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def created():
        torch.manual_seed(0)
        model = problem.model()
        return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    pipe = fl.pipeline(fl.accumulate(window), fl.schedule(lambda i, total: 1 / (1 + i)))
    step = pipe(loss_fn)
    saved(tmp_path, step, created(), problem.batches)
    report = without(tmp_path, step, created(), problem.batches, batch=left_out)
    for state, left in zip(report.states, (None, left_out), strict=True):
        model = by_hand(problem, left, window)
        for mine, its in zip(state.model.parameters(), model.parameters(), strict=True):
            tolerance = {"rtol": 0, "atol": 0} if window == 1 else {"rtol": 1e-12, "atol": 1e-14}
            torch.testing.assert_close(mine, its, **tolerance)


def dropout_run():
    """Shuffled, with dropout and running statistics; the draws of torch are of each update."""

    def created():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=3)

    def loss_fn(model, batch):
        masks.append(torch.rand(4).tolist())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(1)
    masks, data = [], TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    return fl.pipeline()(loss_fn), created, DataLoader(data, batch_size=4, shuffle=True), masks


def test_the_other_updates_draw_as_they_did(tmp_path):
    step, created, loader, masks = dropout_run()
    saved(tmp_path, step, created(), loader, every=6, epochs=2)
    its = [*masks]
    masks.clear()
    report = without(tmp_path, step, created(), loader, batch=(1, 2))
    assert report.confirmed and report.update == 9
    way, first, second = masks[:3], masks[3:7], masks[7:]
    assert way == its[6:9] and first == its[8:] and second == its[9:]


def test_an_update_that_the_run_has_skipped_was_worth_nothing(tmp_path):
    step = fl.pipeline(fl.skip_nonfinite())(toy_loss)
    batches = [BATCHES[0], torch.tensor([torch.nan]), *BATCHES[1:]]
    saved(tmp_path, step, toy(), batches)
    report = without(tmp_path, step, toy(), batches, batch=1)
    assert not report and [s.skipped for s in report.states] == [1, 1]
    assert "both runs are equal, bit for bit" in repr(report)


ALL = [
    (fl.pipeline(fl.ema(0.5), fl.clip(1.0)), small()),
    (fl.pipeline(fl.accumulate(2), fl.swa(0.5), fl.torch_scheduler(decay)), stochastic()),
    (fl.pipeline(fl.plateau("valid/loss", patience=1, mode="max")), small()),
    (fl.pipeline(fl.microbatch(2), fl.accumulate(2)), small()),
    (fl.pipeline(fl.sam(0.05)), small()) if hasattr(fl, "sam") else (fl.pipeline(), small()),
    (fl.pipeline(fl.amp("bf16")), small()),
    (fl.pipeline(), several.alternating()),
    (fl.pipeline(fl.ema(0.9)), several.alternating(order=("rest", "rest", "matrices"))),
    (fl.pipeline(), several.problem(several.muon_and_sgd)),
    (fl.pipeline(fl.using("rest")), several.problem(several.muon_and_sgd)),
]


@pytest.mark.parametrize(("pipe", "problem"), ALL, ids=[str(row) for row in range(len(ALL))])
def test_two_equal_steps_make_equal_runs_in_every_combination(pipe, problem, tmp_path):
    """And without a batch the counters are the same, of each optimizer too."""
    step, batches = pipe(problem.loss_fn), problem.batches
    loaders = {"train": batches, "valid": batches[:2]}
    recorded(tmp_path, step, problem.state(), loaders, (1, 3), epochs=2)
    step = pipe(problem.loss_fn)
    place = (0, 4)
    report = without(tmp_path, (step, step), problem.state(), loaders, batch=place)
    assert not report and report.apart is None and not report.first, report
    assert "equal, bit for bit" in repr(report)
    report = without(tmp_path, step, problem.state(), loaders, batch=place)
    assert report.apart == report.update and report.confirmed
    a, b = report.states
    for name in ("step", "epoch", "batch", "skipped", "updates"):
        assert getattr(a, name) == getattr(b, name)
    assert a.slots.get("rests") == b.slots.get("rests")


# --- a change of the script


def test_two_steps_diverge_where_the_second_one_differs(tmp_path):
    """The second loss is twice the first from 3 on: w is -1, -3, -6, -10 and -1, -3, -9, -17."""

    def other(model, batch):
        return toy_loss(model, batch)[0] * (2 if batch.item() >= 3 else 1)

    saved(tmp_path, STEP, toy(), BATCHES)
    report = without(tmp_path, (STEP, fl.pipeline()(other)), toy(), BATCHES, batch=1)
    assert [state.model.w.item() for state in report.states] == [-10, -17]
    assert (report.update, report.apart) == (2, 3) and report.rows is None
    assert report.first.startswith("loss: 1 of 1 elements differ, by up to 9")
    assert [(d.update, d.distance) for d in report.weights] == [(3, 3), (4, 7)]
    assert "the second step from batch 1 of epoch 0 (update 2) on, up to step 4" in repr(report)
    assert "second step" in repr(report)


def test_a_step_that_makes_other_updates_each_time_is_named(tmp_path):
    """A counter of the script is not in the state."""
    calls = itertools.count()

    def counting(model, batch):
        return toy_loss(model, batch)[0] * (1 + next(calls))

    step = fl.pipeline()(counting)
    saved(tmp_path, step, toy(), BATCHES)
    report = without(tmp_path, (step, step), toy(), BATCHES, batch=1)
    assert report and report.apart == 2 and report.first.startswith("loss: ")
    assert report.confirmed is False
    assert "the run is not made again by this script: at step 4, model.w" in repr(report)


def test_what_differs_once_is_said_not_to_depend_on_the_state(tmp_path):
    """The fifth to the eighth call alone are others: those of the second run."""
    calls = itertools.count()

    def counting(model, batch):
        return toy_loss(model, batch)[0] * (2 if 4 + 1 + 4 <= next(calls) < 4 + 1 + 8 else 1)

    step = fl.pipeline()(counting)
    saved(tmp_path, step, toy(), BATCHES)
    report = without(tmp_path, (step, step), toy(), BATCHES, batch=0)
    assert report.apart == 1 and report.first.startswith("made once more, this update is alike")


def test_an_update_that_one_step_skips_is_named(tmp_path):
    batches = [*BATCHES[:2], torch.tensor([torch.inf]), BATCHES[3]]
    steps = STEP, fl.pipeline(fl.skip_nonfinite())(toy_loss)
    saved(tmp_path, STEP, toy(), batches, epochs=2)
    report = without(tmp_path, steps, toy(), batches, batch=0, until=5)
    assert report.apart == 3 and report.first == "update 3 was applied by one, and skipped by one"
    a, b = report.states
    assert (a.step, b.step, b.skipped) == (5, 4, 1), "both end at the same batch"
    assert (a.epoch, a.batch) == (b.epoch, b.batch) == (1, 1)


# --- from where to where


def test_the_targets_of_a_run_may_have_changed_on_the_way(tmp_path):
    """Two updates were planned for, and then four: the rates are 1, 1/2, then 1/2 and 1/4."""
    step = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    state = saved(tmp_path, step, toy(), BATCHES, steps=2)
    state = saved(tmp_path, step, state, BATCHES, steps=4)
    assert state.model.w.item() == -1 - 1 - 1.5 - 1
    report = without(tmp_path, step, toy(), BATCHES, batch=0)
    assert report.confirmed and [s.model.w.item() for s in report.states] == [-4.5, -3.5]


def test_it_ends_where_it_is_told_to(tmp_path):
    saved(tmp_path, STEP, toy(), {"train": BATCHES, "valid": BATCHES}, every=3, epochs=2)
    loaders = {"train": BATCHES, "valid": BATCHES[:1]}
    report = without(tmp_path, STEP, toy(), loaders, batch=2, until=6)
    assert [s.model.w.item() for s in report.states] == [-13, -10]
    assert [m.at for m in report.metrics if m.name == "valid/loss"] == [6]
    only_first = tmp_path / "step-00000003"
    report = without(only_first, STEP, toy(), loaders, batch=3, until=5)
    assert [s.model.w.item() for s in report.states] == [-11, -7] and report.confirmed is None
    assert "no checkpoint on the way says" in repr(report)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_a_stream_is_read_again_and_an_iterator_is_refused(tmp_path):
    def generator():
        yield from BATCHES

    for i, loader in enumerate((DataLoader(Stream(), batch_size=1), generator)):
        saved(tmp_path / str(i), STEP, toy(), loader, epochs=2)
        for batch in (2, (1, 2)):
            report = without(tmp_path / str(i), STEP, toy(), loader, batch=batch)
            assert [s.model.w.item() for s in report.states] == [-20, -17]
        with pytest.raises(ValueError, match="no batch 7 in epoch 0"):
            without(tmp_path / str(i), STEP, toy(), loader, batch=(0, 7))
    message = "reads the training loader twice, and .* can be read once: give what makes it"
    with pytest.raises(ValueError, match=message):
        without(tmp_path / "0", STEP, toy(), generator(), batch=1)


def test_the_rest_of_an_epoch_that_a_hook_ended_is_as_if_it_was_not(tmp_path):
    """Hooks are not called: the report says that the run itself is not made again."""

    def ended(state):
        return attrs.evolve(state, ends="epoch") if state.step == 2 else state

    saves = (fl.at_start() | fl.every(epochs=2))(fl.checkpoint(tmp_path, keep=None))
    fl.fit(STEP, toy(), BATCHES, epochs=2, hooks=(ended, saves))
    report = without(tmp_path, STEP, toy(), BATCHES, batch=0)
    assert [s.model.w.item() for s in report.states] == [-13, -12] and report.confirmed is False
    assert "the script does not come to the checkpoint of step 6: are the step" in repr(report)


def test_a_damaged_checkpoint_says_nothing_of_the_run(tmp_path):
    saved(tmp_path, STEP, toy(), BATCHES)
    file = tmp_path / "step-00000003" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    report = without(tmp_path, STEP, toy(), BATCHES, batch=0, until=3)
    assert report.confirmed is None and [s.model.w.item() for s in report.states] == [-6, -5]


def test_python_draws_of_the_other_batches_continue(tmp_path):
    def loss_fn(model, batch):
        return toy_loss(model, batch)[0] * (1 + random.random())

    step = fl.pipeline()(loss_fn)
    saved(tmp_path, step, toy(), BATCHES, every=3)
    for batch in range(4):
        report = without(tmp_path, step, toy(), BATCHES, batch=batch)
        assert report.confirmed and report.apart == batch + 1


@pytest.mark.parametrize("left_out", range(5))
def test_a_plateau_sees_the_records_of_its_own_run(left_out, tmp_path):
    """The loss is w: the rate is halved after each update that does not lower it."""
    numbers = [1.0, -1.0, 2.0, -2.0, 8.0, 1.0]

    def expected(left_out):
        w, rate, best = 0.0, 1.0, math.inf
        for i, x in enumerate(numbers):
            w -= rate * x * (i != left_out)
            best, rate = min(w, best), rate if w < best else rate / 2
        return w

    step = fl.pipeline(fl.plateau("valid/loss", factor=0.5, patience=1))(toy_loss)
    batches = [torch.tensor([x]) for x in numbers]
    loaders, each = {"train": batches, "valid": [torch.ones(1)]}, fl.every(steps=1)
    saved(tmp_path, step, toy(), loaders, evaluate_every=each)
    report = without(tmp_path, step, toy(), loaders, batch=left_out)
    found = [state.model.w.item() for state in report.states]
    assert report.confirmed and found == [expected(None), expected(left_out)]


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_every_loader_gives_all_other_batches_as_it_did(make, tmp_path):
    seen = []

    def loss(model, batch):
        seen.append(contents(batch))
        numbers = torch.tensor(samples(seen[-1]), dtype=torch.float32)
        return toy_loss(model, numbers / 50)[0], {"weight": len(numbers)}

    step, made = fl.pipeline()(loss), toy
    saves = (fl.at_start() | fl.every(steps=2))(fl.checkpoint(tmp_path, keep=None))
    fl.fit(step, made(), make(0), epochs=2, hooks=(saves,))
    seen.clear()
    report = without(tmp_path, step, made(), make(0), batch=(1, 1))
    assert report.confirmed and report.apart == report.update
    way = (report.update - 1) % 2 + 1  # up to where the batch is taken, from the checkpoint before
    n = (len(seen) - way + 1) // 2
    one, other = seen[way : way + n], seen[way + n :]
    assert len(one) == len(other) + 1 and one[1:] == other


@pytest.mark.parametrize("make", [
    lambda: DataLoader(streams.Stream(), batch_size=2), streams.Batches,
    lambda: DataLoader(streams.Forgetful(), batch_size=2),
])  # fmt: skip
def test_a_stream_that_knows_where_it_is_is_taken_there_for_each_run(make, tmp_path):
    step = fl.pipeline()(toy_loss)
    states = recorded(tmp_path, step, toy(lr=0.01), make(), (3,), epochs=2)
    report = without(tmp_path, step, toy(lr=0.01), make(), batch=(0, 4))
    assert report.confirmed and report.apart == 5
    before, after = (next(s for s in states if s.step == n).model.w for n in (4, 5))
    change = (after - before).item()
    for state, its in zip(report.states, (0.0, change), strict=True):
        assert state.model.w.item() == pytest.approx(states[-1].model.w.item() - its, abs=1e-6)


# --- what is refused


@pytest.mark.parametrize(("given", "message"), [
    ({"batch": 0}, r"no checkpoint before batch 0 of epoch 0 .* the first one is at batch 2"),
    ({"batch": 10**15}, "the newest"),
    ({"batch": 8}, "no batch 0 of epoch 2 before .* step 8, .* the run has 8 batches, co"),
    ({"batch": 999}, "no batch 3 of epoch 249 before .* 8 batches, counted from 0. If it went fu"),
    ({"batch": 8, "until": 9}, "the run has no batch 0 in epoch 2: it ended at step 8"),
    ({"batch": (0, 4)}, "epoch 0 has no batch 4. It has 4"),
    ({"batch": (0, 3), "until": 3}, "in update 4, and both runs are to end at step 3"),
    ({"batch": 2, "until": 9}, "the run does not get to until=9: it ended at step 8, epoch 2"),
    ({"batch": 2, "rows": [1]}, "the batch has 1 sample, counted from 0, so there is no row 1"),
    ({"batch": -1}, "expects batch as an int >= 0"),
    ({"batch": (0, -1)}, r"expects batch\[1\] as an int >= 0"),
    ({"batch": (0, 1, 2)}, "expects batch as an int >= 0"),
    ({"batch": 2, "until": 0}, "expects until as an int >= 1"),
    ({"batch": 2, "rows": [-1]}, "expects a row of rows as an int >= 0"),
])  # fmt: skip
def test_what_is_not_in_the_run_is_refused(given, message, tmp_path):
    saved(tmp_path / "whole", STEP, toy(), BATCHES, every=2, epochs=2)
    for path in (tmp_path / "whole").glob("step-00000000"):
        path.rename(tmp_path / path.name)
    calls = []

    def counted(model, batch):
        calls.append(batch)
        return toy_loss(model, batch)

    with pytest.raises(ValueError, match=message):
        without(tmp_path / "whole", fl.pipeline()(counted), toy(), BATCHES, **given)
    assert len(calls) <= 8


def test_what_cannot_be_left_out_is_refused(tmp_path):
    saved(tmp_path, STEP, toy(), BATCHES)
    with pytest.raises(TypeError, match="rows= or a pair of steps, not both"):
        without(tmp_path, (STEP, STEP), toy(), BATCHES, batch=1, rows=[0])
    for rows in ([], "0", 3):
        with pytest.raises(TypeError, match="rows as a list of the samples"):
            without(tmp_path, STEP, toy(), BATCHES, batch=1, rows=rows)
    windows = STEP, fl.pipeline(fl.accumulate(2))(toy_loss)
    with pytest.raises(ValueError, match="take up to 1 and 2 batches in each"):
        without(tmp_path, windows, toy(), BATCHES, batch=1)
    with pytest.raises(NotImplementedError, match="with tbptt a batch makes several"):
        without(tmp_path, fl.pipeline(fl.tbptt(2))(carried), toy(), BATCHES, batch=1)
    steps = {"a": STEP, "b": STEP}
    turns = fl.alternate(steps, batch="next")
    with pytest.raises(NotImplementedError, match="each turn of alternate takes batches"):
        without(tmp_path, turns, toy(), BATCHES, batch=1)
    states = {name: fl.TrainState.create(m, torch.optim.SGD(m.parameters(), lr=1.0))
              for name, m in (("a", nn.Linear(1, 1)), ("b", nn.Linear(1, 1)))}  # fmt: skip
    stack, loss = fl.stack(states), lambda model, batch: model(batch[:, None]).mean()
    saved(tmp_path / "stack", fl.pipeline()(loss), stack, BATCHES)
    with pytest.raises(NotImplementedError, match="does not work with a stack of models"):
        without(tmp_path / "stack", fl.pipeline()(loss), fl.stack(states), BATCHES, batch=1)
    with pytest.raises(ValueError, match="saved outside of a run"):
        fl.save(toy(), tmp_path / "alone")
        without(tmp_path / "alone", STEP, toy(), BATCHES, batch=1, until=2)


def test_a_pair_may_be_a_list_and_a_number_one_of_numpy(tmp_path):
    saved(tmp_path, STEP, toy(), BATCHES)
    for batch, until in ((1, 4), ([0, 1], np.int64(4)), (np.int64(1), np.int32(4))):
        report = without(tmp_path, STEP, toy(), BATCHES, batch=batch, until=until)
        assert [s.model.w.item() for s in report.states] == [-10, -8]
    assert not without(tmp_path, [STEP, STEP], toy(), BATCHES, batch=1)


def test_a_phase_that_began_on_the_way_is_refused(tmp_path):
    saves = (fl.at_start() | fl.every(steps=2))(fl.checkpoint(tmp_path, keep=None))
    state = fl.fit(STEP, toy(), BATCHES, hooks=(saves,), phase="head")
    fl.fit(STEP, state, BATCHES, hooks=(saves,), phase="all")
    message = "the phase 'all' began at step 4, after the checkpoint to begin with, of step 0"
    with pytest.raises(ValueError, match=message):
        without(tmp_path, STEP, toy(), BATCHES, batch=1)
    report = without(tmp_path, STEP, toy(), BATCHES, batch=1, until=4)
    assert [s.model.w.item() for s in report.states] == [-10, -8]
    report = without(tmp_path, STEP, toy(), BATCHES, batch=(1, 2))
    assert [s.model.w.item() for s in report.states] == [-20, -17]


def test_a_run_that_a_hook_had_stopped_and_that_was_continued(tmp_path):
    saves = (fl.at_start() | fl.every(steps=2))(fl.checkpoint(tmp_path, keep=None))
    state = fl.fit(STEP, toy(), BATCHES, epochs=2, hooks=(stop_at(2), saves))
    assert state.step == 2
    fl.fit(STEP, attrs.evolve(state, stop=None), BATCHES, epochs=2, hooks=(saves,))
    report = without(tmp_path, STEP, toy(), BATCHES, batch=2)
    assert [s.model.w.item() for s in report.states] == [-20, -17] and report.confirmed
    assert not diff(report.states[0], report.states[0])
