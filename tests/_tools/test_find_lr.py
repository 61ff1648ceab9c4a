"""find_lr: the numbers of a loop by hand, and nothing else changes."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import Toy, assert_same, small, toy, toy_loss


def square(model, batch):
    return model(batch).square().mean()


def toy_state(lr=0.1, w=1.0, **settings):
    model = Toy(w)
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr), seed=0)


def by_hand(state, loss_fn, batches, initial, updates=100, low=1e-7, high=10.0):
    """Return what fastai's LRFinder and AvgSmoothLoss do, written out."""
    model, optimizer = state.model, state.optimizer
    rates, losses, smoothed, best, average = [], [], [], float("inf"), 0.0
    for i in range(updates):
        rate = low * (high / low) ** (i / updates)
        for group, own in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = own * (rate / initial[0])
        loss = loss_fn(model, batches[i % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.98 * average + (1 - 0.98) * loss.item()
        rates.append(rate)
        losses.append(loss.item())
        smoothed.append(average / (1 - 0.98 ** (i + 1)))
        best = min(best, smoothed[-1])
        if smoothed[-1] > 4 * best:
            break
    return rates, losses, smoothed


def longest_valley(losses):
    """fastai's ``valley``, with its three loops in one."""
    ends = [1] * len(losses)
    start = end = 0
    for i in range(1, len(losses)):
        for j in range(i):
            if losses[i] < losses[j] and ends[i] < ends[j] + 1:
                ends[i] = ends[j] + 1
        if ends[end] < ends[i]:
            start, end = i - ends[i], i
    sections = (end - start) / 3
    return start + int(sections) + int(sections / 2)


@pytest.fixture
def two_groups():
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
        return fl.TrainState.create(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), seed=0)

    return make


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_the_numbers_are_those_of_a_loop_by_hand(two_groups):
    """Groups keep their proportion, and the loader is shorter than the test."""
    batches = small().batches
    found = fl.find_lr(fl.pipeline()(mse), two_groups(), batches)
    rates, losses, smoothed = by_hand(two_groups(), mse, batches, [0.01, 0.1])
    assert (found.rates, found.losses) == (tuple(rates), tuple(losses))
    assert found.smoothed == pytest.approx(smoothed, rel=1e-12)
    assert 20 < len(rates) < 100
    assert f"4 times its best at lr={rates[-1]:.2g}" in found.note
    assert found.suggestion == rates[10 + longest_valley(smoothed[10:-5])]
    assert found.initial == 0.01


def test_the_state_and_the_generators_stay_as_they_are(two_groups):
    step = fl.pipeline(fl.clip(1.0), fl.ema(0.9), fl.metric(a=lambda aux, batch: batch[1].mean()))(
        lambda model, batch: mse(model, (nn.functional.dropout(batch[0]), batch[1]))
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*map(torch.cat, zip(*small().batches, strict=True))),
        batch_size=2,
        shuffle=True,
    )
    state = fl.fit(step, two_groups(), loader, steps=2, hooks=())
    before = fl.snapshot(state)
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    one = fl.find_lr(step, state, loader, updates=12)
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(draws[0], now[0])
    assert draws[1:] == now[1:]
    assert fl.find_lr(step, state, loader, updates=12) == one
    assert all(p.grad is None for p in state.model.parameters())
    assert_same(
        fl.fit(step, state, loader, epochs=2, hooks=()),
        fl.fit(step, before, loader, epochs=2, hooks=()),
    )


def test_schedules_do_not_count():
    falls = fl.schedule(lambda i, total: 1 / (1 + i))
    drops = fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.StepLR(o, 1, 0.1))
    plain = fl.find_lr(fl.pipeline()(square), toy_state(), [torch.ones(1)])
    waits = fl.plateau("valid/loss")
    for member in (falls, drops, waits):
        step = fl.pipeline(member, fl.derive(b=lambda m: m["valid/loss"]))(square)
        assert fl.find_lr(step, toy_state(), [torch.ones(1)]) == plain
    step, used = fl.pipeline(falls)(square), toy_state()
    used = fl.fit(step, used, [torch.zeros(1)] * 3, hooks=())
    assert used.optimizer.param_groups[0]["lr"] < 0.1
    assert fl.find_lr(step, used, [torch.ones(1)]) == plain
    fl.fit(step, used, [torch.zeros(1)] * 3, hooks=())  # the schedule finds its rate as it was


def test_a_rate_of_another_middleware_is_replaced_and_put_back():
    seen = []

    @fl.middleware("step")
    def fixed(rate):
        def wrap(step):
            def set_rate(state, batch):
                (group,) = state.optimizer.param_groups
                seen.append(group["lr"])
                group["lr"] = rate
                return step(state, batch)

            return set_rate

        return wrap

    found = fl.find_lr(fl.pipeline(fixed(0.5))(square), toy_state(), [torch.ones(1)], updates=12)
    plain = fl.find_lr(fl.pipeline()(square), toy_state(), [torch.ones(1)], updates=12)
    assert (found.losses, seen[1:]) == (plain.losses, [0.5] * (len(seen) - 1))


def test_with_accumulation_clipping_tensors_and_several_optimizers():
    model = nn.ModuleDict({"a": Toy(1.0), "b": Toy(1.0)})
    named = {
        "a": torch.optim.SGD(model["a"].parameters(), lr=torch.tensor(0.5)),
        "b": torch.optim.SGD(model["b"].parameters(), lr=1.0),
    }
    state = fl.TrainState.create(model, named, seed=0)

    def loss_fn(model, batch):
        return (model["a"](batch) + model["b"](batch)).mean()

    step = fl.pipeline(fl.amp("bf16"), fl.accumulate(2), fl.clip(100.0))(loss_fn)
    found = fl.find_lr(step, state, [torch.ones(1), torch.full((1,), 3.0)], updates=10, low=0.1)
    # The gradient of both is the mean, 2; b moves twice as far as a.
    assert found.losses[1] == pytest.approx(2 * (2 - 0.1 * 2 - 0.2 * 2), rel=1e-2)
    assert found.initial == 0.5


def test_skipped_updates_are_tried_again():
    state = toy_state()
    step = fl.pipeline(fl.amp("fp16"))(lambda model, batch: 70000 * square(model, batch))
    plain = fl.pipeline()(lambda model, batch: 70000 * square(model, batch))
    found = fl.find_lr(step, state, [torch.ones(1)], updates=20, high=1e-5)
    assert (
        found.losses
        == fl.find_lr(plain, toy_state(), [torch.ones(1)], updates=20, high=1e-5).losses
    )

    @fl.middleware("gradient")
    def never():
        def wrap(inner):
            def skipped(state, batch):
                state, out = inner(state, batch)
                return state, fl.Output(out.loss, out.weight, out.aux, out.metrics, "never")

            return skipped

        return wrap

    found = fl.find_lr(fl.pipeline(never())(square), toy_state(), [torch.ones(1)])
    assert (found.losses, found.suggestion) == ((), None)
    assert found.note.startswith("20 updates in a row were skipped at lr=1e-07")


def test_a_loss_that_is_not_finite_or_never_falls_gives_no_suggestion():
    nan = fl.find_lr(
        fl.pipeline()(lambda m, b: square(m, b) * torch.nan), toy_state(), [torch.ones(1)]
    )
    assert nan.suggestion is None
    assert repr(nan) == f"LrRange: no suggestion\n{nan.note}"
    assert nan.note.startswith("the loss was nan at lr=1e-07")
    with pytest.raises(ValueError, match="nothing to plot: the loss was nan"):
        nan.plot()
    at_once = fl.find_lr(fl.pipeline()(square), toy_state(), [torch.ones(1)], low=5.0)
    assert (at_once.suggestion, len(at_once.losses)) == (None, 2)
    assert "that is too early: give a smaller low=" in at_once.note
    assert at_once.plot().axes
    flat = fl.find_lr(fl.pipeline()(lambda m, b: 0 * m(b).mean() + 1), toy_state(), [torch.ones(1)])
    assert (flat.suggestion, len(flat.losses)) == (None, 100)
    assert "did not diverge; the loss never fell" in flat.note


def test_a_loss_below_zero_does_not_end_the_test():
    found = fl.find_lr(fl.pipeline()(toy_loss), toy(w=-1.0), [torch.ones(1)])
    assert len(found.losses) == 100
    assert found.suggestion is not None


def test_it_shows_as_a_table_and_as_a_figure():
    found = fl.find_lr(fl.pipeline()(square), toy_state(), [torch.ones(1)])
    lines = repr(found).splitlines()
    assert lines[0] == "LrRange: suggestion lr=0.0012, 0.012 × the initial rate"
    assert lines[1].split() == ["lr", "loss", "smoothed"]
    assert next(line for line in lines if "*" in line).startswith("1.20e-03*")
    assert "<b>1.20e-03</b>" in found._repr_html_()
    (axis,) = found.plot().axes
    assert axis.get_xscale() == "log"
    raw, smoothed, ring = axis.lines
    assert tuple(raw.get_ydata()) == found.losses
    assert tuple(smoothed.get_ydata()) == found.smoothed
    assert ring.get_label() == "suggestion 0.0012"
    assert list(ring.get_xdata()) == [found.suggestion]


def test_wrong_calls():
    step, ones = fl.pipeline()(square), [torch.ones(1)]
    with pytest.raises(ValueError, match="expects high > 0"):
        fl.find_lr(step, toy_state(), ones, low=0.1, high=0.01)
    with pytest.raises(ValueError, match="that of the first group is 0: set it"):
        fl.find_lr(step, toy_state(lr=0.0), ones)
    turns = fl.alternate({"a": step})
    with pytest.raises(ValueError, match="has those of several steps"):
        fl.find_lr(turns, toy_state(), ones)
    with pytest.raises(TypeError, match="write find_lr"):
        fl.find_lr(square, toy_state(), ones)
    with pytest.raises(TypeError, match="take one of them"):
        fl.find_lr(step, toy_state(), {"train": ones})
    with pytest.raises(ValueError, match="no batch"):
        fl.find_lr(step, toy_state(), iter(ones))


def test_ctrl_c_is_not_held_back():
    def interrupt(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fl.find_lr(fl.pipeline()(interrupt), toy_state(), [torch.ones(1)])


def test_in_a_graph(recorders):
    """The rate is a tensor there, which the graph reads."""
    step = fl.pipeline(fl.clip(5.0), fl.cuda_graph(warmup=1))(square)
    state = toy_state()
    found = fl.find_lr(step, state, [torch.ones(1)] * 3, updates=30)
    plain = fl.find_lr(
        fl.pipeline(fl.clip(5.0))(square), toy_state(), [torch.ones(1)] * 3, updates=30
    )
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.rates == plain.rates
    assert any(entry.startswith("replay") for recorder in recorders for entry in recorder.log)
    assert state.optimizer.param_groups[0]["lr"] == 0.1


def test_every_window_of_a_sequence_has_its_own_rate():
    def carried(model, batch, carry):
        return square(model, batch), {}, carry

    step = fl.pipeline(fl.tbptt(1))(carried)
    found = fl.find_lr(step, toy_state(), [torch.ones(1, 3)], updates=30)
    plain = fl.find_lr(fl.pipeline()(square), toy_state(), [torch.ones(1)], updates=30)
    assert (found.rates, found.losses) == (plain.rates, plain.losses)
    assert found.note == plain.note


def test_the_note_says_how_far_the_loss_rose():
    """It rises to 3.9 times its best, and 4 times would have ended the test."""
    losses = iter([2.0] * 60 + [1.0] * 10 + [8.0] * 30)
    step = fl.pipeline()(lambda model, batch: 0 * model(batch).mean() + next(losses))
    found = fl.find_lr(step, toy_state(), [torch.ones(1)])
    times = found.smoothed[-1] / min(found.smoothed)
    assert 1.5 < times < 4
    times = math.floor(10 * times) / 10
    assert f"loss ended at {times} times its best; above 4, it diverges" in found.note
    assert len({len(line.split()[1].split(".")[1]) for line in repr(found).splitlines()[2:-2]}) == 1
