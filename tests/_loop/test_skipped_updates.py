"""Runs that leave every update out, and loss functions that may leave out some."""

import functools

import attrs
import pytest
import torch
from sample_middleware import own_guard
from torch import nn

import fnloop as fl
from fnloop._step.transaction import may_skip
from fnloop.testing import toy, toy_loss

ONE, EMPTY = torch.ones(1), torch.ones(0)


# --- a run that leaves every update out

NAN = torch.tensor([float("nan")])


def too_long(model, batch):
    return fl.skip("too long")


@pytest.mark.parametrize(("loss_fn", "members", "batches", "why"), [
    (too_long, (), [ONE] * 3, "too long"),
    (too_long, (fl.accumulate(3), fl.clip(1.0)), [ONE] * 3, "too long"),
    (toy_loss, (), [EMPTY] * 3, "the batch has no item: its weight is 0"),
    (toy_loss, (fl.skip_nonfinite(99),), [NAN] * 3, "skip_nonfinite: the loss is nan"),
    (toy_loss, (own_guard(),), [NAN] * 3, "a guard of one's own"),
    (too_long, (fl.amp("fp16"),), [ONE] * 3, "too long"),
])  # fmt: skip
def test_a_run_that_leaves_all_updates_of_two_epochs_out_is_an_error(
    loss_fn, members, batches, why
):
    with pytest.raises(ValueError, match="would never reach its target") as raised:
        fl.fit(fl.pipeline(*members)(loss_fn), toy(), batches, steps=5, hooks=())
    found = raised.value.state
    assert (found.step, found.skipped) == (0, 6 // max(m.window for m in (*members, fl.clip(1.0))))
    assert (found.epoch, found.batch, found.stop) == (2, 0, None)
    assert str(raised.value).startswith(f"all updates of epochs 1 and 2 were left out ({why})")


def test_epochs_count_from_the_last_update_and_a_target_in_epochs_ends_the_run():
    loss_fn = lambda model, x: toy_loss(model, x) if model.w > -2 else fl.skip("enough")
    step = fl.pipeline()(loss_fn)
    with pytest.raises(ValueError, match=r"epochs 2 and 3 were left out \(enough\).* step 2 ") as e:
        fl.fit(step, toy(), [ONE] * 3, steps=5, hooks=())
    assert (e.value.state.epoch, e.value.state.step, e.value.state.model.w.item()) == (3, 2, -2.0)
    state = fl.fit(step, toy(), [ONE] * 3, epochs=4, hooks=())
    assert (state.epoch, state.step, state.stop) == (4, 2, None)
    assert fl.fit(step, toy(), [ONE] * 3, steps=9, epochs=5, hooks=()).epoch == 5


@pytest.mark.parametrize("left_out", [False, True])
def test_what_the_loss_scale_leaves_out_does_not_count(left_out):
    """From 2**120 it is halved 22 times, once an epoch, until 2**30 fits: 2**98 times 2**30."""
    loss_fn = lambda m, x: (m.w * x).mean() if x > 0 else fl.skip("not positive")
    step = fl.pipeline(fl.amp("fp16", init_scale=2.0**120))(loss_fn)
    batches = [torch.tensor([2.0**30]), *([-ONE] if left_out else [])]
    state = fl.fit(step, toy(lr=0.0), batches, steps=2, hooks=())
    assert (state.step, state.slots["amp"].scale.item()) == (2, 2.0**97)
    assert state.skipped == 23 + 24 * left_out


@pytest.mark.parametrize("pause", [1, 2, 3, 4, 5])
def test_a_resumed_run_counts_the_same_and_one_that_was_mended_continues(pause, tmp_path):
    step = fl.pipeline()(too_long)
    halt = fl.when(lambda s: s.skipped == pause)(lambda s: attrs.evolve(s, stop="pause"))
    state = fl.fit(step, toy(), [ONE] * 3, steps=5, hooks=(halt,))
    state = fl.restore(fl.save(attrs.evolve(state, stop=None), tmp_path / "a"), toy())
    for epoch in (1, 2):
        message = f"epochs {epoch} and {epoch + 1} were left out"
        with pytest.raises(ValueError, match=message) as raised:
            fl.fit(step, state, [ONE] * 3, steps=5, hooks=())
        state = raised.value.state
        assert (state.epoch, state.skipped) == (epoch + 1, 3 * (epoch + 1))
    state = fl.fit(fl.pipeline()(toy_loss), state, [ONE] * 3, steps=5, hooks=())
    assert (state.step, state.skipped, state.epoch, state.batch) == (5, 9, 4, 2)


# --- loss functions that may leave a batch out


def norm_loss(model, batch):
    return model(batch).float().square().mean()


def helper(batch):
    return fl.skip("too large") if batch.max() > 1e9 else None


def skipping(model, batch):
    loss = norm_loss(model, batch)
    return helper(batch) or loss


def test_only_a_loss_function_that_may_skip_pays_for_it():
    def nested(model, batch):
        return (lambda: helper(batch))()

    class Loss:
        def __call__(self, model, batch):
            return self.judged(batch)

        def judged(self, batch):
            return constant

    constant = fl.skip("never")
    for fn in (skipping, nested, functools.partial(skipping, 1), Loss(), Loss().judged):
        assert may_skip(fn), fn
    for fn in (norm_loss, toy_loss, fl.supervised(nn.MSELoss()), print):
        assert not may_skip(fn), fn
