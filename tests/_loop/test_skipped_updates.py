"""Skipped updates count towards the length of a run, but not towards its schedules."""

import copy
import functools
import logging

import attrs
import pytest
import torch
from sample_hooks import stop_at
from sample_middleware import own_guard
from torch import nn

import fnloop as fl
from fnloop._core.optimizers import optimizers_in
from fnloop._core.types import may_skip
from fnloop.testing import toy, toy_loss
from fnloop.testing._laws import assert_equal

ONE, EMPTY = torch.ones(1), torch.ones(0)
# Three updates are applied. The second is skipped because its batch is empty.
BATCHES = [ONE, EMPTY, ONE, ONE]
total_as_factor = lambda step, total: total


@pytest.mark.parametrize("steps", [1, 2, 3], ids="after {} updates".format)
def test_a_resume_after_skipped_updates_does_not_change_the_length_of_the_run(
    tmp_path, caplog, steps
):
    """Two epochs are planned as 8 updates. Each applied update subtracts 8."""
    step, totals = fl.pipeline(fl.schedule(total_as_factor))(toy_loss), []
    note = lambda state: totals.append(state.run.total_steps) or state
    first = fl.fit(step, toy(lr=1.0), BATCHES, epochs=2, hooks=(note, stop_at(steps)))
    assert (first.step, first.model.w.item()) == (steps, -8.0 * steps)
    resumed = fl.restore(fl.save(attrs.evolve(first, stop=None), tmp_path / "a"), toy(lr=1.0))
    with caplog.at_level(logging.WARNING, "fnloop"):
        last = fl.fit(step, resumed, BATCHES, epochs=2, hooks=(note,))
    assert (last.step, last.skipped, last.model.w.item()) == (6, 2, -48.0)
    assert set(totals) == {8} and not caplog.records


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


# --- what an update that is left out changes: counters


BAD = torch.full((4, 2), float("inf"))


def norm_loss(model, batch):
    return model(batch).float().square().mean()


def helper(batch):
    return fl.skip("too large") if batch.max() > 1e9 else None


def skipping(model, batch):
    loss = norm_loss(model, batch)
    return helper(batch) or loss


def by_hand():
    def wrap(step):
        def guarded(state, batch):
            state, out = step(state, batch)
            bad = (batch[0] if isinstance(batch, list) else batch).max() > 1e9
            return state, attrs.evolve(out, skip="by hand") if bad else out

        return guarded

    return fl.Middleware("by_hand", gradient=wrap)


LEFT_OUT_BY = {
    "skip": (skipping, ()), "skip, with retry": (skipping, (fl.retry_on_oom(),)),
    "skip_nonfinite": (norm_loss, (fl.skip_nonfinite(),)),
    "spike_guard": (norm_loss, (fl.spike_guard(2, 1e6),)), "decide": (norm_loss, (own_guard(),)),
    "by hand": (norm_loss, (by_hand(),)), "fp16": (norm_loss, (fl.amp("fp16", init_scale=1.0),)),
}  # fmt: skip
AROUND = {
    "plain": ((), ()),
    "average": ((), (fl.ema(0.5), fl.swa(1))),
    "schedule": ((), (fl.schedule(lambda i, n: 0.5**i), fl.schedule(total_as_factor, "momentum"))),
    "plateau": ((), (fl.plateau("train/loss", patience=1, mode="max"),)),
    "torch": ((), (fl.torch_scheduler(lambda o, r: torch.optim.lr_scheduler.StepLR(o, 1)),)),
    "window": ((fl.accumulate(1),), (fl.clip(1.0), fl.metric(mean=lambda aux, b: b.mean()))),
    "turns": ((), ()),
}


def normed(by_name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return fl.TrainState.create(model, {"a": optimizer} if by_name else optimizer, seed=0)


def everything(state):
    groups = [{**g, "params": 0} for o in optimizers_in(state.optimizer).values()
              for g in o.param_groups]  # fmt: skip
    moments = [o.state_dict()["state"] for o in optimizers_in(state.optimizer).values()]
    own = ("amp", "skip_nonfinite", "spike_guard", "retry_on_oom")  # what guards keep about it
    slots = {k: v for k, v in state.slots.items() if k.rpartition("/")[2] not in own}
    found = {
        "model": state.model.state_dict(), "groups": groups, "moments": moments,
        "slots": slots, "counts": [getattr(slots.get(k), "count", None) for k in ("ema", "swa")],
        "metrics": {k: m.compute() for k, m in state.metrics.items()},
        "counters": (state.step, dict(state.updates), state.seed, state.stop),
    }  # fmt: skip
    return copy.deepcopy(found)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", LEFT_OUT_BY)
def test_an_update_that_is_left_out_changes_counters_only(way, around):
    loss_fn, guard = LEFT_OUT_BY[way]
    inside, outside = AROUND[around]
    step = fl.pipeline(*(m for m in guard if m.name == "amp"), *inside,
                       *(m for m in guard if m.name != "amp"), *outside)(loss_fn)  # fmt: skip
    if around == "turns":
        step = fl.alternate({"a": step})
    good = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    found = []

    def look(state):
        found.append((everything(state), state.skipped, state.batch))
        return state

    state = normed(around == "turns")
    state = fl.fit(step, state, [good, good, good, BAD, good], hooks=(look,))
    (before, skipped, batch), (after, skipped_then, batch_then) = found[2:4]
    assert (skipped, skipped_then, batch, batch_then) == (0, 1, 3, 4)
    assert_equal(before, after, way, 0.0)
    assert (state.step, state.skipped) == (4, 1)
    other = fl.fit(step, normed(around == "turns"), [good] * 4, steps=4, hooks=())
    # A schedule here is a function of the total, and the scale changes the last bits in fp16.
    if around != "schedule" and way != "fp16":
        assert_equal(state.model.state_dict(), other.model.state_dict(), way, 0.0)


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
