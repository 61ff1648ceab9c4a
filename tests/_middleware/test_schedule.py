"""schedule: the value of each update, runs of another length, and values changed by hand."""

from fractions import Fraction

import attrs
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop import schedules
from fnloop.testing import no_host_reads, toy, toy_loss

ONE = torch.ones(1)


def fractions(i, total):
    return 1 - i / total


def test_update_i_uses_the_factor_of_i():
    state = fl.fit(fl.pipeline(fl.schedule(fractions))(toy_loss), toy(lr=2.0), [ONE] * 4, hooks=())
    assert state.model.w.item() == -2 * (1 + 0.75 + 0.5 + 0.25)


def test_the_total_counts_updates_not_batches():
    totals = set()
    step = fl.pipeline(fl.accumulate(2), fl.schedule(lambda i, total: totals.add(total) or 1.0))(
        toy_loss
    )
    state = fl.fit(step, toy(), [ONE] * 5, epochs=3, hooks=())
    assert (totals, state.step) == ({9}, 9)


@pytest.mark.parametrize(
    ("targets", "total"), [({"epochs": 3}, 12), ({"steps": 7}, 7), ({"epochs": 3, "steps": 7}, 7)]
)
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


def test_a_tensor_learning_rate_resumes_bit_for_bit_from_a_checkpoint(tmp_path):
    def state():
        model = torch.nn.Linear(1, 1)
        return fl.TrainState.create(
            model, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05)), seed=0
        )

    def run(state, *hooks):
        step = fl.pipeline(fl.schedule(fl.schedules.cosine(warmup=2)))(
            lambda model, batch: model(batch).mean()
        )
        data = [torch.ones(1, 1)] * 7
        return fl.fit(step, state, data, epochs=3, hooks=hooks, evaluate_every=fl.every(steps=1))

    fl.save(
        run(state(), lambda s: attrs.evolve(s, stop="half") if s.step == 5 else s), tmp_path / "a"
    )
    again = attrs.evolve(fl.restore(tmp_path / "a", state()), stop=None)
    assert run(again).history["train/lr"] == run(state()).history["train/lr"]


def test_two_schedules_set_two_fields():
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(
        model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    )
    step = fl.pipeline(
        fl.schedule(lambda i, n: 0.5), fl.schedule(lambda i, n: 0.1, field="weight_decay")
    )
    state, _ = step(lambda m, b: m(b).mean())(state, torch.ones(1, 1))
    group = state.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, pytest.approx(0.01))


def test_a_tensor_learning_rate_is_set_in_place():
    model = torch.nn.Linear(1, 1)
    lr = torch.tensor(2.0)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr))
    held = state.optimizer.param_groups[0]["lr"]
    state, _ = fl.pipeline(fl.schedule(lambda i, n: 0.5))(lambda m, b: m(b).mean())(
        state, torch.ones(1, 1)
    )
    assert state.optimizer.param_groups[0]["lr"] is held
    assert held.item() == 1.0


@pytest.mark.parametrize(
    "fn",
    [schedules.cosine(), schedules.linear(warmup=0.1), fractions],
    ids=["cosine", "linear", "own"],
)
def test_a_bare_step_does_not_know_the_length_and_suggests_fit(fn):
    with pytest.raises(ValueError, match=r"call fit\(step, state, loaders, ...\)"):
        fl.pipeline(fl.schedule(fn))(toy_loss)(toy(), ONE)


def test_lengths_in_steps_work_in_a_bare_step():
    state, _ = fl.pipeline(fl.schedule(schedules.step_decay(2)))(toy_loss)(toy(), ONE)
    assert state.model.w.item() == -1.0


def test_a_loader_without_length_needs_a_target_in_steps():
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
        *(
            (lambda f=field: fl.schedule(fractions, field=f), TypeError, 'such as "lr"; got')
            for field in (None, 5, "", ["lr"])
        ),
        *(
            (lambda k=k: schedules.cosine(k=k), ValueError, "cosine expects k")
            for k in ("x", None, 0, -1.0, True, float("nan"))
        ),
        (lambda: schedules.polynomial("x"), ValueError, "polynomial expects power as a number > 0"),
    ],
)
def test_a_wrong_argument_is_an_error_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("bad", [None, "x", [1.0]])
def test_a_factor_that_is_not_a_number_is_an_error(bad):
    with pytest.raises(
        TypeError, match=r"schedule\(<lambda>\) must return a number.* at step 0 of 1 it returned"
    ):
        fl.fit(fl.pipeline(fl.schedule(lambda i, total: bad))(toy_loss), toy(), [ONE], hooks=())


@pytest.mark.parametrize("factor", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)], ids=repr)
def test_any_real_number_is_a_factor(factor):
    state = fl.fit(
        fl.pipeline(fl.schedule(lambda i, total: factor))(toy_loss), toy(), [ONE] * 2, hooks=()
    )
    assert state.model.w.item() == -1.0


def test_an_unknown_field_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="no such number; they have lr, momentum"):
        fl.pipeline(fl.schedule(lambda i, n: 1.0, field="beta"))(toy_loss)(toy(), ONE)


def test_a_learning_rate_on_the_device_is_set_without_synchronization():
    """Copying a number to a GPU waits for the work queued there; fill_ does not."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class RecordCalls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    model = torch.nn.Linear(1, 1)
    rate = torch.tensor(1.0)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=rate), seed=0)
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i))(fl.supervised(torch.nn.MSELoss()))
    for i in range(3):
        with RecordCalls():
            state, out = step(state, (torch.ones(1, 1), torch.ones(1, 1)))
        assert (rate.item(), out.metrics["lr"].compute()) == (0.5**i, 0.5**i)
    # A number, as it is if the optimizer became capturable in the first update.
    state.optimizer.param_groups[0]["initial_lr"] = 1.0
    calls.clear()
    with RecordCalls():
        step(state, (torch.ones(1, 1), torch.ones(1, 1)))
    assert torch.ops.aten.fill_.Scalar in calls
    assert torch.ops.aten.copy_.default not in calls


# --- a run of another length


def test_a_run_of_another_length_warns_once_with_both_rates(caplog):
    step = fl.pipeline(fl.schedule(schedules.cosine()))(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 2, epochs=2, hooks=())
    with caplog.at_level("WARNING", "fnloop"):
        state = fl.fit(step, state, [ONE] * 2, epochs=4, hooks=())
    assert caplog.messages == [
        "schedule(cosine()): the run was planned for 4 updates and now has 8: at step 4 lr is 0.5 "
        "instead of 0"
    ]
    caplog.clear()
    fl.fit(step, attrs.evolve(state, epoch=2, step=4), [ONE] * 2, epochs=4, hooks=())
    assert caplog.messages == []


def test_checkpoints_and_snapshots_keep_the_planned_length(tmp_path, caplog):
    step = fl.pipeline(fl.schedule(fractions))(toy_loss)
    pause = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="pause"))
    paused = fl.fit(step, toy(), [ONE] * 4, hooks=(pause,))
    saved = fl.save(paused, tmp_path / "a")
    for again in (fl.restore(saved, toy()), fl.snapshot(paused), paused):
        caplog.clear()
        state = fl.fit(
            step, fl.snapshot(attrs.evolve(again, stop=None)), [ONE] * 4, epochs=1, hooks=()
        )
        assert (state.model.w.item(), caplog.messages) == (-2.5, [])  # 1 + 0.75 + 0.5 + 0.25
        state = fl.fit(step, attrs.evolve(again, stop=None), [ONE] * 4, epochs=2, hooks=())
        assert len(caplog.messages) == 1
        assert (
            "planned for 4 updates and now has 8: at step 2 lr is 0.75 instead of 0.5"
            in caplog.messages[0]
        )


def test_a_schedule_independent_of_the_length_does_not_warn(caplog):
    step = fl.pipeline(fl.schedule(schedules.exponential(0.5)))(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 2, epochs=1, hooks=())
    state = fl.fit(step, state, [ONE] * 2, epochs=2, hooks=())
    assert (state.model.w.item(), caplog.messages) == (-1.875, [])


def test_a_function_undefined_after_the_planned_end_warns_too(caplog):
    step = fl.pipeline(fl.schedule(lambda i, total: [1.0, 0.5, 0.25, 0.125][:total][i]))(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 2, epochs=1, hooks=())
    fl.fit(step, state, [ONE] * 2, epochs=2, hooks=())
    assert [m.split(": ", 1)[1] for m in caplog.messages] == [
        "the run was planned for 2 updates and now has 4: at step 2 lr is 0.25"
    ]


def test_the_warning_about_a_tensor_learning_rate_needs_no_host_read(caplog):
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(
        model, torch.optim.SGD(model.parameters(), lr=torch.tensor(2.0), fused=True), seed=0
    )
    step = fl.pipeline(fl.schedule(fractions))(lambda m, b: m(b).mean())
    state = fl.fit(step, state, [torch.ones(1, 1)] * 2, epochs=1, hooks=())
    with no_host_reads():
        step.train(attrs.evolve(state, run=fl.RunInfo(total_steps=4)), torch.ones(1, 1))
    assert "at step 2 lr is 0.5 × initial_lr instead of 0 × initial_lr" in caplog.messages[0]


# --- a value that the user has changed


def set_by_hand(state, **settings):
    for group in state.optimizer.param_groups:
        group.update(settings)
    return state


@pytest.mark.parametrize(
    "between", ["the next run", "a snapshot", "a checkpoint", "a hook", "a bare step"]
)
def test_a_rate_set_by_hand_is_refused_before_the_update(between, tmp_path):
    step = fl.pipeline(fl.schedule(fractions))(toy_loss)
    if between == "a hook":
        hook = fl.when(lambda state: state.step == 1)(lambda state: set_by_hand(state, lr=0.01))
        with pytest.raises(ValueError, match="but the schedule had set it to 1") as caught:
            fl.fit(step, toy(), [ONE] * 4, hooks=(hook,))
        state, reached = caught.value.state, (1, -1.0)
    else:
        state, reached = fl.fit(step, toy(), [ONE] * 4, hooks=()), (4, -2.5)
        state = fl.snapshot(state) if between == "a snapshot" else state
        state = (
            fl.restore(fl.save(state, tmp_path / "a"), toy())
            if between == "a checkpoint"
            else state
        )
        state = set_by_hand(state, lr=0.01)
        with pytest.raises(ValueError) as caught:
            if between == "a bare step":
                fl.pipeline(fl.schedule(lambda i, total: 1.0))(toy_loss)(state, ONE)
            else:
                fl.fit(step, state, [ONE] * 4, hooks=())
    text = str(caught.value)
    assert 'group["lr"] is 0.01, but the schedule had set it to' in text
    assert 'write group["initial_lr"] = ...' in text
    assert (state.step, state.model.w.item()) == reached  # no update has happened
    for group in state.optimizer.param_groups:  # as the message advises
        group["initial_lr"], group["lr"] = 0.5, group["set_by_schedule_lr"]
    state = fl.fit(
        fl.pipeline(fl.schedule(lambda i, total: 0.5))(toy_loss),
        state,
        [ONE],
        steps=state.step + 1,
        hooks=(),
    )
    assert state.model.w.item() == reached[1] - 0.25


def test_an_initial_value_set_by_hand_is_what_the_schedule_multiplies():
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(toy_loss)
    state = fl.fit(step, toy(), [ONE], hooks=())
    state = fl.fit(step, set_by_hand(state, initial_lr=4.0), [ONE], hooks=())
    assert state.model.w.item() == -0.5 - 2.0
    both = set_by_hand(state, initial_lr=8.0, lr=8.0)  # so the rate was meant to change
    state = fl.fit(step, both, [ONE], hooks=())
    assert state.model.w.item() == -2.5 - 4.0


def test_a_rate_set_before_the_first_update_is_the_initial_value():
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(toy_loss)
    assert fl.fit(step, set_by_hand(toy(), lr=4.0), [ONE], hooks=()).model.w.item() == -2.0


def test_a_replaced_tensor_rate_is_refused():
    def trained():
        model = torch.nn.Linear(1, 1)
        state = fl.TrainState.create(
            model, torch.optim.SGD(model.parameters(), lr=torch.tensor(2.0)), seed=0
        )
        return step(state, torch.ones(1, 1))[0]

    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(lambda m, b: m(b).mean())
    state = step(fl.snapshot(trained()), torch.ones(1, 1))[0]
    assert state.optimizer.param_groups[0]["lr"].item() == 1.0
    for other in (torch.tensor(3.0), 3.0):
        with pytest.raises(
            ValueError, match=r"is (the tensor )?3, but the schedule had set it to the tensor 1"
        ):
            step(set_by_hand(trained(), lr=other), torch.ones(1, 1))


@pytest.mark.parametrize(
    "lr", [1.0, torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)], ids=repr
)
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_restoring_a_checkpoint_does_not_count_as_a_change_by_hand(lr, old, tmp_path):
    """Restore into a new state and into one trained further; old checkpoints lack some values."""

    def new():
        model = torch.nn.Linear(1, 1)
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        return fl.TrainState.create(
            model, torch.optim.SGD(model.parameters(), lr=rate, foreach=False), seed=0
        )

    def halved(state, steps):
        return fl.fit(step, state, [torch.ones(1, 1)], steps=steps, hooks=())

    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i))(lambda m, b: m(b).mean())
    kept = halved(new(), 2)
    if old:
        kept = attrs.evolve(kept, slots={})
        for group in kept.optimizer.param_groups:
            for key in [key for key in group if key.startswith("set_by_schedule_")]:
                del group[key]
    path = fl.save(kept, tmp_path / "a")
    for state in (new(), halved(new(), 5)):
        for only in (None, ("model", "optimizer", "counters")):
            state = halved(fl.restore(path, state, only=only), 4)
            assert float(state.optimizer.param_groups[0]["lr"]) == 0.125
    state = set_by_hand(fl.restore(path, state), lr=3.0)
    if not old:
        with pytest.raises(ValueError, match="the schedule had set it to"):
            halved(state, 4)


def test_load_state_dict_does_not_count_as_a_change_by_hand():
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i))(toy_loss)
    kept, further = (
        fl.fit(step, toy(), [ONE] * 2, hooks=()),
        fl.fit(step, toy(), [ONE] * 4, hooks=()),
    )
    further.optimizer.load_state_dict(kept.optimizer.state_dict())
    assert fl.fit(step, further, [ONE] * 2, hooks=()).optimizer.param_groups[0]["lr"] == 0.5**5


def test_a_group_added_in_a_run_is_scheduled_from_its_own_value():
    def unfreeze(state):
        state.optimizer.add_param_group({"params": [state.model.bias], "lr": 8.0})
        return state

    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD([model.weight], lr=1.0), seed=0)
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(lambda m, b: m(b).mean())
    hooks = (fl.when(lambda state: state.step == 2)(fl.once(unfreeze)),)
    state = fl.fit(step, state, [torch.ones(1, 1)] * 4, hooks=hooks)
    assert [g["lr"] for g in state.optimizer.param_groups] == [0.5, 4.0]


def test_a_schedule_and_a_torch_scheduler_of_different_fields_work_together():
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(
        model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5), seed=0
    )
    decay = fl.schedule(lambda i, total: 0.5, field="weight_decay")
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.ExponentialLR(opt, 0.5))
    state = fl.fit(
        fl.pipeline(decay, halving)(lambda m, b: m(b).mean()),
        state,
        [torch.ones(1, 1)] * 3,
        hooks=(),
    )
    group = state.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.125, 0.25)
