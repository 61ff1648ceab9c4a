import attrs
import pytest
import torch
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop import schedules
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)


def fractions(i, total):
    return 1 - i / total


def test_update_i_uses_f_of_i_and_is_set_before_it():
    state = fl.fit(fl.pipeline(fl.schedule(fractions))(toy_loss), toy(lr=2.0), [ONE] * 4, hooks=())
    assert state.model.w.item() == -2 * (1 + 0.75 + 0.5 + 0.25)


def test_the_total_is_in_updates_not_in_batches():
    totals = set()
    step = fl.pipeline(fl.accumulate(2), fl.schedule(lambda i, total: totals.add(total) or 1.0))(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 5, epochs=3, hooks=())
    assert (totals, state.step) == ({9}, 9)


@pytest.mark.parametrize(("targets", "total"), [({"epochs": 3}, 12), ({"steps": 7}, 7), ({"epochs": 3, "steps": 7}, 7)])
def test_the_total_follows_the_targets(targets, total):
    totals = set()
    step = fl.pipeline(fl.schedule(lambda i, n: totals.add(n) or 1.0))(toy_loss)
    fl.fit(step, toy(), [ONE] * 4, hooks=(), **targets)
    assert totals == {total}


def test_each_group_keeps_its_initial_value():
    model = torch.nn.Linear(1, 1)
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 10.0}]
    state = fl.TrainState.create(model, torch.optim.SGD(groups, lr=0.1))
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(lambda m, b: m(b).mean())
    state = fl.fit(step, state, [torch.ones(1, 1)] * 3, hooks=())
    assert [g["lr"] for g in state.optimizer.param_groups] == [0.5, 5.0]
    assert [g["initial_lr"] for g in state.optimizer.param_groups] == [1.0, 10.0]
    assert (state.history["train/lr"], state.history["train/lr/1"]) == ((0.5,), (5.0,))


def test_a_tensor_learning_rate_goes_on_to_the_bit_from_a_checkpoint(tmp_path):
    def state():
        model = torch.nn.Linear(1, 1)
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05)), seed=0)

    def run(state, *hooks):
        step = fl.pipeline(fl.schedule(fl.schedules.cosine(warmup=2)))(lambda model, batch: model(batch).mean())
        data = [torch.ones(1, 1)] * 7
        return fl.fit(step, state, data, epochs=3, hooks=hooks, evaluate_every=fl.every(steps=1))

    fl.save(run(state(), lambda s: attrs.evolve(s, stop="half") if s.step == 5 else s), tmp_path / "a")
    again = attrs.evolve(fl.restore(tmp_path / "a", state()), stop=None)
    assert run(again).history["train/lr"] == run(state()).history["train/lr"]


def test_two_schedules_of_two_fields():
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1))
    step = fl.pipeline(fl.schedule(lambda i, n: 0.5), fl.schedule(lambda i, n: 0.1, field="weight_decay"))
    state, _ = step(lambda m, b: m(b).mean())(state, torch.ones(1, 1))
    group = state.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, pytest.approx(0.01))


def test_a_tensor_learning_rate_is_set_in_place():
    model = torch.nn.Linear(1, 1)
    lr = torch.tensor(2.0)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr))
    held = state.optimizer.param_groups[0]["lr"]
    state, _ = fl.pipeline(fl.schedule(lambda i, n: 0.5))(lambda m, b: m(b).mean())(state, torch.ones(1, 1))
    assert state.optimizer.param_groups[0]["lr"] is held
    assert held.item() == 1.0


@pytest.mark.parametrize("fn", [schedules.cosine(), schedules.linear(warmup=0.1), fractions], ids=["cosine", "linear", "own"])
def test_a_bare_step_does_not_know_the_length_and_names_fit(fn):
    with pytest.raises(ValueError, match=r"call fit\(step, state, loaders, ...\)"):
        fl.pipeline(fl.schedule(fn))(toy_loss)(toy(), ONE)


def test_a_bare_step_with_lengths_in_steps_needs_no_run():
    state, _ = fl.pipeline(fl.schedule(schedules.step_decay(2)))(toy_loss)(toy(), ONE)
    assert state.model.w.item() == -1.0


def test_a_loader_without_length_asks_for_steps():
    step = fl.pipeline(fl.schedule(schedules.cosine()))(toy_loss)
    with pytest.raises(ValueError, match=r"fit\(step, state, loaders, steps=...\)"):
        fl.fit(step, toy(), lambda: iter([ONE] * 3), hooks=())
    state = fl.fit(step, toy(), lambda: iter([ONE] * 3), steps=2, hooks=())
    assert state.step == 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.schedule(schedules.cosine), TypeError, r"Call it: cosine\(\)"),
        (lambda: fl.schedule(0.5), TypeError, r"such as cosine\(\); got 0.5"),
        (lambda: fl.torch_scheduler("cosine"), TypeError, r"torch_scheduler\(lambda opt, run: ...\)"),
    ],
)
def test_mistakes_are_found_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_unknown_field_names_those_that_there_are():
    with pytest.raises(ValueError, match="no such number; they have lr, momentum"):
        fl.pipeline(fl.schedule(lambda i, n: 1.0, field="beta"))(toy_loss)(toy(), ONE)


# --- schedulers of torch


TORCH = [
    lambda opt, run: lr_scheduler.StepLR(opt, 2, gamma=0.5),
    lambda opt, run: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=run.total_steps),
    lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, run.steps_per_epoch * run.epochs),
    lambda opt, run: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[2]
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own, from SequentialLR
@pytest.mark.parametrize("factory", TORCH)
def test_a_torch_scheduler_does_what_a_loop_by_hand_does(factory):
    xs = [torch.tensor([float(x)]) for x in (1, 2, 3)]
    state = fl.fit(fl.pipeline(fl.torch_scheduler(factory))(toy_loss), toy(), xs, epochs=2, hooks=())

    by_hand = toy()
    scheduler = factory(by_hand.optimizer, fl.RunInfo(epochs=2, total_steps=6, steps_per_epoch=3))
    for x in xs * 2:
        by_hand.optimizer.zero_grad()
        toy_loss(by_hand.model, x)[0].backward()
        by_hand.optimizer.step()
        scheduler.step()
    assert torch.equal(state.model.w, by_hand.model.w)
    assert state.slots["torch_scheduler"].last_epoch == 6


def test_a_torch_scheduler_is_not_stepped_for_a_skipped_update():
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.ExponentialLR(opt, 0.5))
    step = fl.pipeline(fl.amp("fp16", init_scale=8.0), halving)(toy_loss)
    state = fl.fit(step, toy(), [torch.tensor([x]) for x in (1.0, 3e38, 2.0)], hooks=())
    assert state.model.w.item() == -(1 + 2 * 0.5)


def test_a_snapshot_has_a_scheduler_of_its_own():
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.ExponentialLR(opt, 0.5))
    step = fl.pipeline(halving)(toy_loss)
    state, _ = step(toy(), ONE)
    kept = fl.snapshot(state)
    step(state, ONE)
    kept, _ = step(kept, ONE)
    assert kept.model.w.item() == -1.5
    assert kept.slots["torch_scheduler"].optimizer is kept.optimizer


def test_plateau_is_refused_with_a_way_out():
    with pytest.raises(TypeError, match="ReduceLROnPlateau steps by a metric: use it in a hook"):
        fl.pipeline(fl.torch_scheduler(lambda opt, run: lr_scheduler.ReduceLROnPlateau(opt)))(toy_loss)(toy(), ONE)


def test_what_is_no_scheduler_is_named():
    with pytest.raises(TypeError, match=r"must make a torch.optim.lr_scheduler; it made None"):
        fl.pipeline(fl.torch_scheduler(lambda opt, run: None))(toy_loss)(toy(), ONE)


def test_a_factory_that_needs_the_length_names_fit():
    by_length = fl.torch_scheduler(lambda opt, run: lr_scheduler.LinearLR(opt, 1.0, 0.5, total_iters=2 * run.total_steps))
    with pytest.raises(ValueError, match=r"call fit\(step, state, loaders"):
        fl.pipeline(by_length)(toy_loss)(toy(), ONE)


def test_a_learning_rate_on_the_device_is_filled_without_waiting_for_it():
    """Copying a number to a GPU waits for all that runs there; filling it in does not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    model = torch.nn.Linear(1, 1)
    rate = torch.tensor(1.0)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=rate), seed=0)
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i))(fl.supervised(torch.nn.MSELoss()))
    for i in range(3):
        with Listening():
            state, out = step(state, (torch.ones(1, 1), torch.ones(1, 1)))
        assert (rate.item(), out.metrics["lr"].compute()) == (0.5**i, 0.5**i)
    state.optimizer.param_groups[0]["initial_lr"] = 1.0  # as it is where the optimizer became capturable in the first update
    calls.clear()
    with Listening():
        step(state, (torch.ones(1, 1), torch.ones(1, 1)))
    assert torch.ops.aten.fill_.Scalar in calls
    assert torch.ops.aten.copy_.default not in calls
