"""schedule and torch_scheduler: each update's value, other lengths, and values set by hand."""

from fractions import Fraction

import attrs
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode
from toy_runs import ONE, fitted, kept, noting, of, stop_when

import fnloop as fl
from fnloop import schedules
from fnloop.testing import no_host_reads, toy, toy_loss

PAIR = torch.ones(1, 1)  # a batch of the linear model


def fractions(i, total):
    return 1 - i / total


def constant(factor, **settings):
    return fl.schedule(lambda i, total: factor, **settings)


HALF = constant(0.5)


def linear(lr=1.0, **settings):
    return of(torch.nn.Linear(1, 1), lr=lr, **settings)


def scheduled(state, member, n=1, **settings):
    """Train a linear model on n batches."""
    loss_fn = lambda model, batch: model(batch).mean()
    return fitted([PAIR] * n, member, loss_fn=loss_fn, state=state, **settings)


def values(state, field="lr"):
    return [group[field] for group in state.optimizer.param_groups]


# --- the value of each update


@pytest.mark.parametrize(("members", "n", "settings", "total"), [
    ((), 4, {}, 4), *(((), 4, targets, 7) for targets in ({"steps": 7}, {"epochs": 3, "steps": 7})),
    ((fl.accumulate(2),), 5, {"epochs": 3}, 9),  # of updates, not of batches
])  # fmt: skip
def test_update_i_uses_the_factor_of_i_of_the_whole_run(members, n, settings, total):
    seen = []
    member = fl.schedule(lambda i, total: seen.append((i, total)) or fractions(i, total))
    state = fitted([1] * n, *members, member, state=toy(lr=2.0), **settings)
    assert seen == [(i, total) for i in range(total)]
    assert state.model.w.item() == pytest.approx(-2 * sum(1 - i / total for i in range(total)))


def test_each_group_keeps_its_initial_value_also_one_that_is_added_in_a_run():
    def unfreeze(state):
        state.optimizer.add_param_group({"params": [state.model.bias], "lr": 8.0})
        return state

    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD([model.weight], lr=1.0), seed=0)
    hooks = (fl.when(lambda state: state.step == 2)(fl.once(unfreeze)),)
    state = scheduled(state, HALF, 4, hooks=hooks)
    assert (values(state), values(state, "initial_lr")) == ([0.5, 4.0], [1.0, 8.0])
    assert (state.history["train/lr"], state.history["train/lr/1"]) == ((0.5,), (4.0,))


@pytest.mark.parametrize("other", [
    HALF, fl.torch_scheduler(lambda opt, run: lr_scheduler.ConstantLR(opt, 0.5, 9)),
], ids=["schedule", "torch_scheduler"])  # fmt: skip
def test_two_fields_are_set_by_two(other):
    step = fl.pipeline(other, constant(0.1, field="weight_decay"))(lambda m, b: m(b).mean())
    state, _ = step(linear(weight_decay=1.0), PAIR)
    assert (values(state), values(state, "weight_decay")) == ([0.5], [pytest.approx(0.1)])


def test_a_learning_rate_on_the_device_is_set_in_place_without_synchronization():
    """Copying a number to a GPU waits for the work queued there; fill_ does not."""
    calls = []

    class RecordCalls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    rate = torch.tensor(1.0)
    state = linear(rate)
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i))(lambda m, b: m(b).mean())
    for i in range(3):
        state, out = step(state, PAIR)
        assert (rate.item(), out.metrics["lr"].compute()) == (0.5**i, 0.5**i)
    assert values(state)[0] is rate
    # A number, as it is if the optimizer became capturable in the first update.
    state.optimizer.param_groups[0]["initial_lr"] = 1.0
    with RecordCalls():
        step(state, PAIR)
    assert torch.ops.aten.fill_.Scalar in calls and torch.ops.aten.copy_.default not in calls


@pytest.mark.parametrize("factor", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)], ids=repr)
def test_any_real_number_is_a_factor(factor):
    assert fitted([1, 1], constant(factor)).model.w.item() == -1.0


@pytest.mark.parametrize("bad", [None, "x", [1.0]])
def test_a_factor_that_is_not_a_number_is_an_error(bad):
    match = r"schedule\(<lambda>\) must return a number.* at step 0 of 1 it returned"
    with pytest.raises(TypeError, match=match):
        fitted([1], constant(bad))


def test_an_unknown_field_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="no such number; they have lr, momentum"):
        fitted([1], constant(1.0, field="beta"))


def test_a_skipped_update_leaves_the_rate_as_it_was():
    """The third update would be made with a quarter of it."""
    loss_fn = lambda model, batch: toy_loss(model, batch) if batch > 0 else fl.skip("no")
    state = fitted([1, 1, -1], fl.schedule(lambda i, total: 0.5**i), loss_fn=loss_fn)
    assert (state.skipped, values(state)) == (1, [0.5])


def by_length(opt, run):
    return lr_scheduler.LinearLR(opt, 1.0, 0.5, total_iters=2 * run.total_steps)


@pytest.mark.parametrize("member", [
    *map(fl.schedule, (schedules.cosine(), schedules.linear(warmup=0.1), fractions)),
    fl.torch_scheduler(by_length),
], ids=repr)  # fmt: skip
def test_the_length_of_the_run_has_to_be_known(member):
    with pytest.raises(ValueError, match=r"call fit\(step, state, loaders"):
        fl.pipeline(member)(toy_loss)(toy(), ONE)
    endless = lambda: iter([ONE] * 3)
    with pytest.raises(ValueError, match=r"fit\(.*steps=...\)"):
        fitted(endless, member)
    assert fitted(endless, member, steps=2).step == 2


# --- a run of another length


def test_a_run_of_another_length_warns_once_with_both_rates(caplog):
    member = fl.schedule(schedules.cosine())
    state = fitted([1, 1], member, epochs=2)
    with caplog.at_level("WARNING", "fnloop"):
        state = fitted([1, 1], member, state=state, epochs=4)
    assert caplog.messages == [
        "schedule(cosine()): the run was planned for 4 updates and now has 8: at step 4 lr is 0.5 "
        "instead of 0"
    ]
    caplog.clear()
    fitted([1, 1], member, state=attrs.evolve(state, epoch=2, step=4), epochs=4)
    assert caplog.messages == []


@pytest.mark.parametrize("how", ["same", "snapshot", "checkpoint"])
def test_the_planned_length_is_kept(how, tmp_path, caplog):
    member = fl.schedule(fractions)
    paused = fitted([1] * 4, member, hooks=(stop_when(lambda state: state.step == 2),))
    again = kept(how, paused, toy(), tmp_path)
    state = fitted([1] * 4, member, state=fl.snapshot(again), epochs=1)
    assert (state.model.w.item(), caplog.messages) == (-2.5, [])  # 1 + 0.75 + 0.5 + 0.25
    fitted([1] * 4, member, state=again, epochs=2)
    said = "planned for 4 updates and now has 8: at step 2 lr is 0.75 instead of 0.5"
    assert len(caplog.messages) == 1 and said in caplog.messages[0]


@pytest.mark.parametrize(("fn", "said"), [
    (schedules.exponential(0.5), []),  # independent of the length
    (lambda i, total: [1.0, 0.5, 0.25, 0.125][:total][i],  # undefined after its end
        ["the run was planned for 2 updates and now has 4: at step 2 lr is 0.25"]),
])  # fmt: skip
def test_a_longer_run_of_other_functions(fn, said, caplog):
    state = fitted([1, 1], fl.schedule(fn), epochs=1)
    state = fitted([1, 1], fl.schedule(fn), state=state, epochs=2)
    found = [message.split(": ", 1)[1] for message in caplog.messages]
    assert (state.model.w.item(), found) == (-1.875, said)


def test_the_warning_about_a_tensor_learning_rate_needs_no_host_read(caplog):
    member, loss_fn = fl.schedule(fractions), lambda model, batch: model(batch).mean()
    state = scheduled(linear(torch.tensor(2.0), fused=True), member, 2)
    with no_host_reads():
        longer = attrs.evolve(state, run=fl.RunInfo(total_steps=4))
        fl.pipeline(member)(loss_fn).train(longer, PAIR)
    assert "at step 2 lr is 0.5 × initial_lr instead of 0 × initial_lr" in caplog.messages[0]


# --- a value that the user has changed


def set_by_hand(state, **settings):
    for group in state.optimizer.param_groups:
        group.update(settings)
    return state


@pytest.mark.parametrize("between", ["next run", "snapshot", "checkpoint", "hook", "bare step"])
def test_a_rate_set_by_hand_is_refused_before_the_update(between, tmp_path):
    by_hand, member = lambda state: set_by_hand(state, lr=0.01), fl.schedule(fractions)
    if between == "hook":
        hook = fl.when(lambda state: state.step == 1)(by_hand)
        with pytest.raises(ValueError, match="but the schedule had set it to 1") as caught:
            fitted([1] * 4, member, hooks=(hook,))
        state, reached = caught.value.state, (1, -1.0)
    else:
        state, reached = fitted([1] * 4, member), (4, -2.5)
        state = by_hand(kept(between, state, toy(), tmp_path))
        with pytest.raises(ValueError) as caught:
            if between == "bare step":
                fl.pipeline(constant(1.0))(toy_loss)(state, ONE)
            else:
                fitted([1] * 4, member, state=state)
    text = str(caught.value)
    assert 'group["lr"] is 0.01, but the schedule had set it to' in text
    assert 'write group["initial_lr"] = ...' in text
    assert (state.step, state.model.w.item()) == reached  # no update has happened
    for group in state.optimizer.param_groups:  # as the message advises
        group["initial_lr"], group["lr"] = 0.5, group["set_by_schedule_lr"]
    state = fitted([1], HALF, state=state, steps=state.step + 1)
    assert state.model.w.item() == reached[1] - 0.25


def test_an_initial_value_set_by_hand_is_what_the_schedule_multiplies():
    state = fitted([1], HALF)
    state = fitted([1], HALF, state=set_by_hand(state, initial_lr=4.0))
    assert state.model.w.item() == -0.5 - 2.0
    both = set_by_hand(state, initial_lr=8.0, lr=8.0)  # so the rate was meant to change
    assert fitted([1], HALF, state=both).model.w.item() == -2.5 - 4.0
    # Before the first update, a rate is the initial value.
    assert fitted([1], HALF, state=set_by_hand(toy(), lr=4.0)).model.w.item() == -2.0


@pytest.mark.parametrize("other", [torch.tensor(3.0), 3.0], ids=repr)
def test_a_replaced_tensor_rate_is_refused(other):
    state = scheduled(linear(torch.tensor(2.0)), HALF)
    assert values(scheduled(fl.snapshot(state), HALF)) == [1.0]
    match = r"is (the tensor )?3, but the schedule had set it to the tensor 1"
    with pytest.raises(ValueError, match=match):
        scheduled(set_by_hand(state, lr=other), HALF)


RATES = [1.0, torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)]


@pytest.mark.parametrize("lr", RATES, ids=repr)
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_restoring_a_checkpoint_does_not_count_as_a_change_by_hand(lr, old, tmp_path):
    """Restore into a new state and into one trained further; old checkpoints lack some values."""
    new = lambda: linear(lr.clone() if isinstance(lr, torch.Tensor) else lr, foreach=False)

    def halved(state, steps):
        return scheduled(state, fl.schedule(lambda i, total: 0.5**i), steps=steps)

    state = halved(new(), 2)
    if old:
        state = attrs.evolve(state, slots={})
        for group in state.optimizer.param_groups:
            for key in [key for key in group if key.startswith("set_by_schedule_")]:
                del group[key]
    path = fl.save(state, tmp_path / "a")
    for state in (new(), halved(new(), 5)):
        for only in (None, ("model", "optimizer", "counters")):
            state = halved(fl.restore(path, state, only=only), 4)
            assert float(values(state)[0]) == 0.125
    state = set_by_hand(fl.restore(path, state), lr=3.0)
    if not old:
        with pytest.raises(ValueError, match="the schedule had set it to"):
            halved(state, 4)


def test_load_state_dict_does_not_count_as_a_change_by_hand():
    halving = fl.schedule(lambda i, total: 0.5**i)
    state, further = (fitted([1] * n, halving) for n in (2, 4))
    further.optimizer.load_state_dict(state.optimizer.state_dict())
    assert values(fitted([1, 1], halving, state=further)) == [0.5**5]


# --- torch_scheduler


def one_cycle(opt, run):
    return lr_scheduler.OneCycleLR(opt, 1.0, total_steps=run.total_steps)


def by_epochs(opt, run):
    return lr_scheduler.CosineAnnealingLR(opt, run.steps_per_epoch * run.epochs)


def warmed_up(opt, run):
    members = [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.9)]
    return lr_scheduler.SequentialLR(opt, members, milestones=[2])


def halving(opt, run):
    return lr_scheduler.ExponentialLR(opt, 0.5)


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own, from SequentialLR
@pytest.mark.parametrize("factory", [
    lambda opt, run: lr_scheduler.StepLR(opt, 2, gamma=0.5), one_cycle, by_epochs, warmed_up,
])  # fmt: skip
def test_it_equals_a_hand_written_loop(factory):
    state, by = fitted([1, 2, 3], fl.torch_scheduler(factory), epochs=2), toy()
    scheduler = factory(by.optimizer, fl.RunInfo(epochs=2, total_steps=6, steps_per_epoch=3))
    for x in (1.0, 2.0, 3.0) * 2:
        by.optimizer.zero_grad()
        toy_loss(by.model, torch.tensor([x]))[0].backward()
        by.optimizer.step()
        scheduler.step()
    assert torch.equal(state.model.w, by.model.w)
    assert state.slots["torch_scheduler"].last_epoch == 6


BY_LENGTH = [
    *(lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, T_max=run.total_steps), by_epochs),
    *(one_cycle, lambda opt, run: lr_scheduler.LambdaLR(opt, lambda i: 1 - i / run.total_steps)),
]


@pytest.mark.parametrize("factory", BY_LENGTH)
@pytest.mark.parametrize("how", ["same", "snapshot", "checkpoint"])
@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_run_of_another_length_is_refused_and_the_advice_makes_a_new_scheduler(
    factory, how, lr, tmp_path
):
    new = lambda: linear(lr.clone() if isinstance(lr, torch.Tensor) else lr, momentum=0.9)

    def run(state, epochs, **settings):
        return scheduled(state, fl.torch_scheduler(factory), 2, epochs=epochs, **settings)

    state = kept(how, run(new(), 2), new(), tmp_path)
    match = r"was made for a run of .*=(4|2), and this run has .*=(8|4)"
    with pytest.raises(ValueError, match=match) as caught:
        run(state, 4)
    state = caught.value.state
    assert (state.step, state.epoch) == (4, 2)
    assert 'fit(..., phase="second")' in str(caught.value)
    note, seen = noting(lambda state: float(values(state)[0]))
    run(state, 3, hooks=(note,), phase="second")
    again, rates = new(), []
    scheduler = factory(again.optimizer, fl.RunInfo(epochs=3, total_steps=6, steps_per_epoch=2))
    for _ in range(6):
        again.optimizer.step()
        scheduler.step()
        rates.append(float(values(again)[0]))
    assert seen == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("factory", [
    lambda opt, run: lr_scheduler.StepLR(opt, 2, 0.5),
    lambda opt, run: lr_scheduler.StepLR(opt, run.steps_per_epoch, 0.5),
    lambda opt, run: print(run) or lr_scheduler.StepLR(opt, 2, 0.5),
], ids=["no length", "the length of an epoch", "printed"])  # fmt: skip
def test_a_scheduler_independent_of_the_total_continues_in_a_longer_run(factory):
    state = fitted([1, 1], fl.torch_scheduler(factory), epochs=1)
    state = fitted([1, 1], fl.torch_scheduler(factory), state=state, epochs=3)
    assert state.model.w.item() == -(2 * 1 + 2 * 0.5 + 2 * 0.25)


def test_the_factory_is_given_a_run_info():
    runs = []
    member = fl.torch_scheduler(lambda opt, run: runs.append(run) or halving(opt, run))
    fitted([1, 1], member, epochs=2)
    (run,) = runs
    plain = fl.RunInfo(epochs=2, total_steps=4, steps_per_epoch=2, batches_per_epoch=2)
    assert isinstance(run, fl.RunInfo)
    assert run == plain and plain == run and hash(run) == hash(plain)
    assert (repr(run), run._repr_html_()) == (repr(plain), plain._repr_html_())
    assert attrs.evolve(run, epochs=3).epochs == 3


def test_a_scheduler_past_its_own_end_is_an_error_with_advice():
    member = fl.torch_scheduler(lambda opt, run: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=2))
    with pytest.raises(ValueError, match="Tried to step 3 times") as caught:
        fitted([1] * 4, member)
    assert any("begin a phase" in note for note in caught.value.__notes__)


class TimmScheduler:
    """Has the interface of timm's schedulers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise AssertionError("must not be called")


@pytest.mark.parametrize(("factory", "error", "match"), [
    (lambda opt, run: lr_scheduler.StepLR(toy().optimizer, 1), ValueError,
        r"of another optimizer than the state's.* lambda opt, run: StepLR\(opt, ...\)"),
    (lambda opt, run: TimmScheduler(opt), TypeError,
        r"TimmScheduler, which is not one.* schedule\(lambda step, total_steps: ...\)"),
    (lambda opt, run: lr_scheduler.ReduceLROnPlateau(opt), TypeError,
        r'plateau\("valid/loss", factor=0.1, patience=11, min_delta=0.0001, relative=True\)'),
    (lambda opt, run: None, TypeError, "must make a torch.optim.lr_scheduler; it made None"),
])  # fmt: skip
def test_what_is_not_a_scheduler_of_the_state_is_refused_with_advice(factory, error, match):
    with pytest.raises(error, match=match):
        fitted([1], fl.torch_scheduler(factory))


# --- values, parts of tuples, and functions of the state


@pytest.mark.parametrize(("middleware", "rates"), [
    (fl.schedule(lambda state: 0.5**state.epoch), (2.0, 1.0, 0.5)),  # × the initial rate, 2
    (fl.schedule(lambda i, total: i / total, absolute=True), (1 / 6, 3 / 6, 5 / 6)),
    (fl.schedule(lambda state: 1.0 + state.step, absolute=True), (2.0, 4.0, 6.0)),
])  # fmt: skip
def test_a_rate_by_the_state_or_as_it_is(middleware, rates):
    state = fitted([1, 1], middleware, state=toy(lr=2.0), epochs=3)
    assert state.history["train/lr"] == pytest.approx(rates)
    assert state.optimizer.param_groups[0]["initial_lr"] == 2.0


def test_a_part_of_a_tuple_is_set_and_resumed(tmp_path):
    member = fl.schedule(lambda i, total: 0.5 + i / 10, "betas.0", absolute=True)
    fresh = lambda: of(toy().model, torch.optim.Adam)
    run = lambda state, **settings: fitted([1, 1], member, state=state, **settings)
    whole, half = run(fresh(), epochs=2), run(fresh(), epochs=1)
    group = half.optimizer.param_groups[0]
    assert (group["betas"], group["initial_betas.0"]) == ((0.6, 0.999), 0.9)
    assert half.history["train/betas.0"] == (0.6,)
    again = run(fl.restore(fl.save(half, tmp_path / "half"), fresh()), epochs=2)
    assert again.model.w.item() == whole.model.w.item()
    assert run(again, phase="b").history["train/betas.0"][-1] == 0.6


@pytest.mark.parametrize("field", ["betas.2", "betas.x", "lr.0", "beta.0"])
def test_a_part_that_is_not_there_is_an_error(field):
    with pytest.raises(ValueError, match=r"no such number; they have .*betas\.0, betas\.1"):
        fitted([1], fl.schedule(fractions, field), state=of(toy().model, torch.optim.Adam))
