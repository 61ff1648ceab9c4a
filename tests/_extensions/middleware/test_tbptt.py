"""tbptt, sequences in windows: numbers for the head, the laws, and a loop by hand."""

import math

import pytest
import torch
from after_steps import skipping
from sample_middleware import decay, output_mean
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from toy_runs import assert_same_weights, noting

import fnloop as fl
from fnloop import schedules
from fnloop._core.rng import COMPUTE, fold_in
from fnloop.testing import Problem, check_laws, toy


def running_sum(model, batch, carry):
    """The loss is w times the sum of all x so far: that sum is the gradient, and the carry."""
    carry = batch.sum() + (0 if carry is None else carry)
    return model.w * carry, {"output": carry}, carry


def ones(*shape):
    return torch.ones(1, *shape)


def fit(batches, *members, loss_fn=running_sum, state=None, **settings):
    step = fl.pipeline(fl.tbptt(2), *members)(loss_fn)
    return fl.fit(step, toy() if state is None else state, batches, **{"hooks": (), **settings})


# --- updates, windows and the carry


@pytest.mark.parametrize(("lengths", "settings", "expected"), [
    ((4, 3), {}, (4, -19.0, 7.0)),  # sums of 2, 4, 6, 7: the carry crosses batches
    ((4,), {"epochs": 2}, (4, -12.0, 4.0)),  # and begins with each epoch: 2 + 4, twice
    ((6, 6, 6), {"steps": 4, "epochs": None}, (6, -42.0, 12.0)),  # whole batches
])  # fmt: skip
def test_a_batch_makes_an_update_for_each_window(lengths, settings, expected):
    state = fit([*map(ones, lengths)], **settings)
    assert (state.step, state.model.w.item(), state.slots["tbptt"].item()) == expected


DIMENSIONS = [(0, [(4, 1), (1, 1)]), (1, [(1, 4), (1, 1)]), (2, [(1, 1, 5)])]


@pytest.mark.parametrize(("dim", "shapes"), DIMENSIONS)
def test_bare_steps_carry_on_and_count_and_time_may_be_any_dimension(dim, shapes):
    step, state = fl.pipeline(fl.tbptt(2, dim=dim))(running_sum), toy()
    for shape in shapes:
        state, out = step(state, torch.ones(shape))
    assert (state.step, state.batch, state.model.w.item()) == (3, len(shapes), -11.0)
    assert out.aux["output"].item() == 5.0 and [*out.aux] == ["output"]


def test_tensors_without_the_dimension_and_other_values_are_given_whole():
    seen = []

    def loss_fn(model, batch, carry):
        seen.append((batch["x"].shape[1], batch["scale"].shape, batch["names"], carry))
        return (model.w * batch["x"]).mean(), {"weight": 1}, len(seen)

    batch = {"x": ones(5), "scale": torch.ones(3), "names": ["a", "b"]}
    fl.pipeline(fl.tbptt(2))(loss_fn)(toy(), batch)
    whole = ((3,), ["a", "b"])
    assert seen == [(2, *whole, None), (2, *whole, 1), (1, *whole, 2)]


def test_the_carry_is_detached_within_containers():
    def loss_fn(model, batch, carry):
        h = model.w * batch.sum() + (0 if carry is None else carry["h"][0])
        return h, {"output": h}, {"h": (h, [h]), "n": 1}

    step = fl.pipeline(fl.tbptt(1))(loss_fn)
    state, _ = step(toy(w=1.0), ones(3))
    carry = state.slots["tbptt"]
    assert not carry["h"][0].requires_grad and not carry["h"][1][0].requires_grad
    assert (state.model.w.item(), carry["n"]) == (-2.0, 1)  # the gradient is 1 in each window


@pytest.mark.parametrize("order", [1, -1])
def test_clip_and_schedule_act_in_each_window_wherever_tbptt_is_listed(order):
    rates = []
    rate = fl.schedule(lambda i, total: rates.append((i, total)) or 1.0)
    step = fl.pipeline(*(fl.clip(1.0), rate, fl.tbptt(2))[::order])(running_sum)
    state = fl.fit(step, toy(), [ones(6)], hooks=())
    assert state.model.w.item() == pytest.approx(-3.0, abs=1e-5)
    assert rates == [(0, None), (1, None), (2, None)]
    assert state.history["train/grad_norm"] == (4.0,)  # the mean of 2, 4, 6


def test_a_schedule_that_needs_the_length_of_the_run_needs_steps():
    cosine = fl.schedule(schedules.cosine())
    with pytest.raises(ValueError, match=r"an update for each of its windows: call fit\(.*steps="):
        fit([ones(6)], cosine)
    assert fit([ones(6)], cosine, steps=3).step == 3


# --- what is reported


@pytest.mark.parametrize(("dim", "weight"), [(1, 6), (0, 3)])
def test_windows_weigh_by_their_positions_and_dim_0_by_time_too(dim, weight):
    loss_fn = lambda model, batch, _: ((batch - model.w * 0).mean(), {"output": batch}, None)
    batch = torch.tensor([[1.0, 1.0, 4.0]] * 2)
    batch = batch if dim == 1 else batch.T
    step = fl.pipeline(fl.tbptt(2, dim=dim), fl.metric(m=output_mean))(loss_fn)
    state, out = step(toy(), batch)
    assert (out.loss.item(), out.weight, out.metrics["m"].compute()) == (2.0, weight, 2.0)
    assert fl.evaluate(step, state, [batch]) == {"loss": 2.0, "m": 2.0}


def test_aux_weight_is_kept():
    def loss_fn(model, batch, carry):
        return (model.w * 0 + batch).mean(), {"weight": int(batch.sum())}, None

    step = fl.pipeline(fl.tbptt(2))(loss_fn)
    _, out = step(toy(), torch.tensor([[1.0, 1.0, 4.0]]))
    assert (out.loss.item(), out.weight) == (3.0, 6)  # (1 * 2 + 4 * 4) / 6


def test_a_skipped_window_moves_the_carry_on_and_nothing_else():
    member = skipping(lambda batch, out: out.aux["output"] == 4)
    note, events = noting(lambda state: (state.step, state.skipped, "update" in state.events))
    assert fit([ones(6), ones(4)], member, hooks=(note,)).model.w.item() == -(2 + 6 + 8 + 10)
    assert events == [(2, 1, True), (4, 1, True)]
    fit([ones(4)], member, hooks=(note,))
    assert events[-1] == (1, 1, True)  # the last window was skipped, the first was not


def test_every_steps_is_due_when_a_batch_passes_a_multiple():
    note, due = noting(lambda state: state.step)
    fit([ones(6)] * 4, hooks=(fl.every(steps=4)(note),))  # 3 updates per batch
    assert due == [6, 9, 12]


# --- evaluation


def test_an_evaluation_has_a_carry_of_its_own_in_the_same_windows():
    seen = []

    def loss_fn(model, batch, carry):
        seen.append((model.training, batch.shape[1], None if carry is None else carry.item()))
        return running_sum(model, batch, carry)

    loaders = {"train": [ones(4), ones(4)], "valid": [ones(3), ones(1)]}
    state = fit(loaders, loss_fn=loss_fn, evaluate_every=fl.every(steps=2))
    train = [(True, 2, None), (True, 2, 2.0), (True, 2, 4.0), (True, 2, 6.0)]
    valid = [(False, 2, None), (False, 1, 2.0), (False, 1, 3.0)]
    assert seen == [*train[:2], *valid, *train[2:], *valid]
    before = state.slots["tbptt"]
    step = fl.pipeline(fl.tbptt(2))(running_sum)
    # w is -20: losses of -40, -60 and -80, with weights 2, 1 and 1
    assert fl.evaluate(step, state, [ones(3), ones(1)]) == {"loss": -55.0}
    assert step.evaluate(state, ones(2)).loss.item() == -40.0
    assert state.slots["tbptt"] is before and before.item() == 8.0


def test_an_average_carries_on_from_what_it_has_computed_itself():
    def sum_of_weights(model, batch, carry):
        carry = model.w + (0 if carry is None else carry)
        return carry, {}, carry

    members = (fl.ema(0.5), fl.tbptt(2))
    state, _ = fl.pipeline(*members)(running_sum)(toy(), ones(2))  # w is -2, and its average -1
    step, batches = fl.pipeline(*members)(sum_of_weights), [ones(4), ones(2)]
    # three windows: -2, -4, -6 and -1, -2, -3
    assert fl.evaluate(step, state, batches) == {"loss": -4.0, "ema/loss": -2.0}
    averaged = fl.averaged(state)
    assert fl.evaluate(step, averaged, batches) == {"loss": -2.0}


# --- what cannot be


def replying(reply):
    return lambda model, batch, carry: reply(model.w * batch.sum())


@pytest.mark.parametrize(("loss_fn", "batch", "message"), [
    (replying(lambda loss: loss), ones(2), r"returned tensor\("),
    (replying(lambda loss: (loss, {})), ones(2), "returned a tuple of 2"),
    (replying(lambda loss: (loss, loss, None)), ones(2), "aux is a mapping"),
    (running_sum, (torch.ones(2, 3), torch.ones(2, 4)), r"lengths \[3, 4\].*x\.unbind\(1\)"),
    (running_sum, torch.ones(2), "has no tensor with that dimension"),
    (running_sum, torch.ones(2, 0), "is empty"),
])  # fmt: skip
def test_replies_without_a_carry_and_batches_that_cannot_be_cut_are_refused(
    loss_fn, batch, message
):
    with pytest.raises((TypeError, ValueError), match=message):
        fl.pipeline(fl.tbptt(2))(loss_fn)(toy(), batch)


def test_a_failure_between_two_windows_leaves_no_state_to_continue_from():
    fails = lambda model, batch, carry: running_sum(model, batch, carry) if carry is None else 1 / 0
    step, state = fl.pipeline(fl.tbptt(2))(fails), toy()
    with pytest.raises(ZeroDivisionError):
        step(state, ones(4))
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        step(state, ones(4))
    with pytest.raises(ZeroDivisionError) as caught:
        fit([ones(2), ones(2)], loss_fn=fails)  # one window each: nothing is lost
    assert (caught.value.state.step, caught.value.state.batch) == (1, 1)


# --- the laws


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(4, 1)

    def forward(self, x, carry):
        h, carry = self.lstm(x, carry)
        return self.out(self.drop(h)), carry


def lstm_loss(model, batch, carry=None):
    x, y = batch
    output, carry = model(x, carry)
    return functional.mse_loss(output, y), {"output": output}, carry


def sequences(lengths):
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in lengths]
    return [(part, part.sum(2, keepdim=True).sin()) for part in x]


def recurrent(lengths):
    return Problem(lambda: Recurrent().double(), lstm_loss, sequences(lengths))


@pytest.mark.parametrize("members", [
    (fl.tbptt(2),), (fl.tbptt(3), fl.clip(0.05), fl.metric(mean=output_mean)),
    (fl.tbptt(2), fl.amp("bf16"), fl.schedule(lambda i, total: 1 / (1 + i))),
    (fl.torch_scheduler(decay), fl.tbptt(2)),
], ids=repr)  # fmt: skip
def test_it_keeps_the_laws(members):
    check_laws(fl.pipeline(*members), recurrent([5, 2, 7, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_it_can_be_compiled(order):
    step = fl.pipeline(*(fl.tbptt(2), fl.compiled(backend="eager"))[::order])(running_sum)
    assert step(toy(), ones(5))[0].model.w.item() == -11.0


# --- a loop by hand, as in PyTorch's examples/word_language_model


def cut(batch):
    return zip(*(part.split(2, dim=1) for part in batch), strict=True)


def mean(losses):
    """Return the mean of (loss, time) over all positions."""
    return math.fsum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def train_by_hand(state, batches, epoch):
    """It seeds where fnloop does: at the start of each batch."""
    carry, found = None, []
    for i, batch in enumerate(batches):
        torch.manual_seed(fold_in(0, COMPUTE, epoch, i))
        for window in cut(batch):
            state.optimizer.zero_grad()
            loss, _, carry = lstm_loss(state.model, window, carry)
            loss.backward()
            carry = tuple(part.detach() for part in carry)
            clip_grad_norm_(state.model.parameters(), 0.05)
            state.optimizer.step()
            found.append((loss.item(), window[0].shape[1]))
    return mean(found)


def test_it_equals_the_loop_by_hand_bit_for_bit():
    """An epoch is of 3 + 1 + 4 + 1 windows."""
    problem = recurrent([5, 2, 7, 1])
    step = fl.pipeline(fl.tbptt(2), fl.clip(0.05))(lstm_loss)
    state = fl.fit(step, problem.state(), problem.batches, epochs=2, hooks=())
    by = problem.state()
    losses = [train_by_hand(by, problem.batches, epoch) for epoch in range(2)]
    assert_same_weights(state, by)
    assert state.step == 18 and state.history["train/loss"] == pytest.approx(losses, rel=1e-12)
