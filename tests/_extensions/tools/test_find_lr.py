"""find_lr: the numbers of a loop by hand, and nothing else changes."""

import math
import re

import pytest
import torch
from torch import nn
from toy_runs import of

import fnloop as fl
from fnloop.testing import Toy, small, toy, toy_loss

ONES = [torch.ones(1)]


def square(model, batch):
    return model(batch).square().mean()


def toy_state(lr=0.1, w=1.0):
    return of(Toy(w), lr=lr)


def found_by(*members, loss=square, state=None, batches=ONES, **settings):
    return fl.find_lr(fl.pipeline(*members)(loss), state or toy_state(), batches, **settings)


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


def two_groups():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    return fl.TrainState.create(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), seed=0)


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_the_numbers_are_those_of_a_loop_by_hand():
    """Groups keep their proportion, and the loader is shorter than the test."""
    batches = small().batches
    found = found_by(loss=mse, state=two_groups(), batches=batches)
    rates, losses, smoothed = by_hand(two_groups(), mse, batches, [0.01, 0.1])
    assert (found.rates, found.losses) == (tuple(rates), tuple(losses))
    assert found.smoothed == pytest.approx(smoothed, rel=1e-12)
    assert 20 < len(rates) < 100
    assert f"4 times its best at lr={rates[-1]:.2g}" in found.note
    assert found.suggestion == rates[10 + longest_valley(smoothed[10:-5])]
    assert found.initial == 0.01


FALLS = fl.schedule(lambda i, total: 1 / (1 + i))
DROPS = fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.StepLR(o, 1, 0.1))


@pytest.mark.parametrize("member", [FALLS, DROPS, fl.plateau("valid/loss")], ids=repr)
def test_schedules_do_not_count_and_find_their_rates_as_they_were(member):
    derived = fl.derive(b=lambda m: m["valid/loss"])
    expected = found_by(updates=20)
    assert found_by(member, derived, updates=20) == expected
    step, zeros = fl.pipeline(member)(square), ([torch.zeros(1)] * 3, ONES)
    used = fl.fit(step, toy_state(), zeros, hooks=())
    rate = used.optimizer.param_groups[0]["lr"]
    assert (rate == 0.1) is (member.name == "plateau")
    assert fl.find_lr(step, used, ONES, updates=20) == expected
    assert fl.fit(step, used, zeros, epochs=1, hooks=()).optimizer.param_groups[0]["lr"] == rate


def test_a_rate_of_another_middleware_is_replaced_and_put_back():
    seen = []

    def fixed(step):
        def set_rate(state, batch):
            (group,) = state.optimizer.param_groups
            seen.append(group["lr"])
            group["lr"] = 0.5
            return step(state, batch)

        return set_rate

    found = found_by(fl.Middleware("fixed", step=fixed), updates=12)
    assert found.losses == found_by(updates=12).losses
    assert seen[1:] == [0.5] * (len(seen) - 1)


def test_with_accumulation_clipping_tensors_and_several_optimizers():
    model = nn.ModuleDict({"a": Toy(1.0), "b": Toy(1.0)})
    rates = {"a": torch.tensor(0.5), "b": 1.0}
    named = {k: torch.optim.SGD(model[k].parameters(), lr=rates[k]) for k in model}
    state = fl.TrainState.create(model, named, seed=0)
    both = lambda model, batch: (model["a"](batch) + model["b"](batch)).mean()
    members, batches = (fl.amp("bf16"), fl.accumulate(2), fl.clip(100.0)), [*ONES, 3 * ONES[0]]
    found = found_by(*members, loss=both, state=state, batches=batches, updates=10, low=0.1)
    # The gradient of both is the mean, 2; b moves twice as far as a.
    assert found.losses[1] == pytest.approx(2 * (2 - 0.1 * 2 - 0.2 * 2), rel=1e-2)
    assert found.initial == 0.5


def test_skipped_updates_are_tried_again():
    given = {"loss": lambda model, batch: 70000 * square(model, batch), "high": 1e-5, "updates": 20}
    assert found_by(fl.amp("fp16"), **given).losses == found_by(**given).losses
    found = found_by(loss=lambda model, batch: fl.skip("never"))
    assert (found.losses, found.suggestion) == ((), None)
    assert found.note.startswith("20 updates in a row were skipped at lr=1e-07")


@pytest.mark.parametrize(("settings", "updates", "note"), [
    ({"loss": lambda m, b: square(m, b) * torch.nan}, None, "^the loss was nan at lr=1e-07"),
    ({"low": 5.0}, 2, "that is too early: give a smaller low="),
    ({"loss": lambda m, b: 0 * m(b).mean() + 1}, 100, "did not diverge; the loss never fell"),
])  # fmt: skip
def test_a_loss_that_is_not_finite_or_never_falls_gives_no_suggestion(settings, updates, note):
    found = found_by(**settings)
    assert found.suggestion is None and re.search(note, found.note)
    if updates is None:
        assert repr(found) == f"LrRange: no suggestion\n{found.note}"
        with pytest.raises(ValueError, match="nothing to plot: the loss was nan"):
            found.plot()
    else:
        assert len(found.losses) == updates and found.plot().axes
    below_zero = found_by(loss=toy_loss, state=toy(w=-1.0))  # which does not end the test
    assert len(below_zero.losses) == 100 and below_zero.suggestion is not None


def test_it_shows_as_a_table_and_as_a_figure():
    found = found_by()
    lines = repr(found).splitlines()
    assert lines[0] == "LrRange: suggestion lr=0.0012, 0.012 × the initial rate"
    assert lines[1].split() == ["lr", "loss", "smoothed"]
    assert next(line for line in lines if "suggested" in line).startswith("1.20e-03 ")
    assert "suggested" in found._repr_html_()
    (axis,) = found.plot().axes
    assert axis.get_xscale() == "log"
    raw, smoothed, ring = axis.lines
    assert tuple(raw.get_ydata()) == found.losses
    assert tuple(smoothed.get_ydata()) == found.smoothed
    assert ring.get_label() == "suggestion 0.0012"
    assert list(ring.get_xdata()) == [found.suggestion]


STEP = fl.pipeline()(square)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: found_by(low=0.1, high=0.01), ValueError, "expects high > 0"),
    (lambda: found_by(state=toy_state(lr=0.0)), ValueError, "the first group is 0: set it"),
    (lambda: fl.find_lr(fl.alternate({"a": STEP}), toy_state(), ONES), ValueError,
        "has those of several steps"),
    (lambda: fl.find_lr(square, toy_state(), ONES), TypeError, "write find_lr"),
    (lambda: found_by(batches={"train": ONES}), TypeError, "take one of them"),
    (lambda: found_by(batches=iter(ONES)), ValueError, "no batch"),
    (lambda: found_by(loss=interrupt), KeyboardInterrupt, None),  # it is not held back
])  # fmt: skip
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def interrupt(model, batch):
    raise KeyboardInterrupt


def test_in_a_graph(recorders):
    """The rate is a tensor there, which the graph reads."""
    state, given = toy_state(), {"batches": ONES * 3, "updates": 30}
    found = found_by(fl.clip(5.0), fl.cuda_graph(warmup=1), state=state, **given)
    plain = found_by(fl.clip(5.0), **given)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.rates == plain.rates
    assert any(entry.startswith("replay") for recorder in recorders for entry in recorder.log)
    assert state.optimizer.param_groups[0]["lr"] == 0.1


def test_every_window_of_a_sequence_has_its_own_rate():
    carried = lambda model, batch, carry: (square(model, batch), {}, carry)
    found = found_by(fl.tbptt(1), loss=carried, batches=[torch.ones(1, 3)], updates=30)
    plain = found_by(updates=30)
    assert (found.rates, found.losses, found.note) == (plain.rates, plain.losses, plain.note)


def test_the_note_says_how_far_the_loss_rose():
    """It rises to 3.9 times its best, and 4 times would have ended the test."""
    losses = iter([2.0] * 60 + [1.0] * 10 + [8.0] * 30)
    found = found_by(loss=lambda model, batch: 0 * model(batch).mean() + next(losses))
    times = found.smoothed[-1] / min(found.smoothed)
    assert 1.5 < times < 4
    times = math.floor(10 * times) / 10
    assert f"loss ended at {times} times its best; above 4, it diverges" in found.note
    assert len({len(line.split()[1].split(".")[1]) for line in repr(found).splitlines()[2:-2]}) == 1
