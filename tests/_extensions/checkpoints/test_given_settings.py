"""Settings of parameter groups that a resumed run takes from the new state."""

import logging

import attrs
import pytest
import torch
from sample_optimizers import SGD
from saved import ONE, sgd, train
from several import problem

import fnloop as fl
from fnloop.testing import Toy, assert_same, toy, toy_loss

plain = fl.pipeline()(toy_loss)
halving = fl.pipeline(fl.schedule(lambda i, total: 0.5**i))(toy_loss)


def adam(**settings):
    model = Toy()
    return fl.TrainState.create(model, torch.optim.Adam(model.parameters(), **settings), seed=0)


def reach(step, state, steps, folder=None):
    hooks = () if folder is None else (fl.checkpoint(folder),)
    return fl.fit(step, state, [ONE] * 10, steps=steps, hooks=hooks)


def continued(folder, step, first, second, given, steps=4):
    """Return the state of a run of two updates, resumed into another state up to ``steps``."""
    reach(step, first, 2, folder)
    return reach(step, fl.resume(folder, second, given=given), steps)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("resume:")]


def test_a_run_continues_with_the_rate_that_it_is_given(tmp_path):
    # Each update subtracts the rate: two of 1, then two of 0.25.
    assert continued(tmp_path, plain, toy(lr=1.0), toy(lr=0.25), ("lr",)).model.w.item() == -2.5


def test_the_rate_of_the_checkpoint_is_kept_and_one_line_says_so(tmp_path, caplog):
    state = continued(tmp_path, plain, toy(lr=1.0), toy(lr=0.25), ())
    assert state.model.w.item() == -4
    (line,) = lines(caplog)
    assert "lr is 1.0 there, and 0.25 here" in line and 'given=("lr",)' in line


def test_of_what_is_not_given_the_line_names_both_values_and_all_that_to_write(tmp_path, caplog):
    reach(plain, sgd(Toy(), lr=1.0, weight_decay=0.0), 2, tmp_path)
    new = sgd(Toy(), lr=0.5, weight_decay=0.125, nesterov=False)
    group = fl.resume(tmp_path, new, given=("lr",)).optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0)
    (line,) = lines(caplog)
    assert "weight_decay is 0.0 there, and 0.125 here" in line and "lr is" not in line
    assert 'given=("lr", "weight_decay")' in line


def test_equal_settings_say_nothing(tmp_path, caplog):
    reach(plain, sgd(Toy(), lr=1.0, weight_decay=0), 2, tmp_path)
    fl.resume(tmp_path, sgd(Toy(), lr=1, weight_decay=0.0))
    assert not lines(caplog)


def test_a_schedule_multiplies_the_rate_that_is_given(tmp_path):
    # 1 and 0.5 of the rate 1; then 0.25 and 0.125 of the rate 8.
    state = continued(tmp_path, halving, toy(lr=1.0), toy(lr=8.0), ("lr",))
    assert state.model.w.item() == -(1 + 0.5 + 2 + 1)


def test_a_schedule_has_moved_the_rate_and_the_initial_ones_are_compared(tmp_path, caplog):
    state = continued(tmp_path, halving, toy(lr=1.0), toy(lr=1.0), ())
    assert state.model.w.item() == -(1 + 0.5 + 0.25 + 0.125) and not lines(caplog)
    fl.resume(tmp_path, toy(lr=8.0))
    assert "lr is 1.0 there, and 8.0 here" in lines(caplog)[0]


@pytest.mark.parametrize("step", [plain, halving], ids=["plain", "schedule"])
def test_a_run_that_is_given_the_same_rate_again_continues_bit_for_bit(tmp_path, step):
    new = lambda: toy(lr=0.3)
    reach(step, toy(lr=0.7), 2, tmp_path)
    first = fl.snapshot(fl.resume(tmp_path, new(), given=("lr",)))
    whole = reach(step, first, 6)
    reach(step, fl.resume(tmp_path, new(), given=("lr",)), 4, tmp_path)
    for given in ((), ("lr",)):
        assert_same(reach(step, fl.resume(tmp_path, new(), given=given), 6), whole)


def test_plateau_lowers_the_rate_that_is_given(tmp_path):
    # The loss falls with each update, which is not an improvement: a tenth after each evaluation.
    step = fl.pipeline(fl.plateau("train/loss", mode="max", patience=1))(toy_loss)
    run = lambda state, epochs, *hooks: fl.fit(step, state, [ONE], epochs=epochs, hooks=hooks)
    run(toy(lr=1.0), 3, fl.checkpoint(tmp_path))
    resumed = run(fl.resume(tmp_path, toy(lr=5.0), given=("lr",)), 4)
    assert resumed.history["train/lr"] == pytest.approx((1, 1, 0.1, 0.05))
    assert run(fl.resume(tmp_path, toy(lr=1.0)), 4).history["train/lr"][-1] == pytest.approx(0.01)


def test_a_tuple_is_given_as_a_whole_though_a_schedule_sets_a_part(tmp_path):
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i, field="betas.0"))(toy_loss)
    state = continued(
        tmp_path, step, adam(betas=(0.5, 0.75)), adam(betas=(0.8, 0.875)), ("betas",), steps=3
    )
    assert state.optimizer.param_groups[0]["betas"] == (0.8 * 0.25, 0.875)


def test_the_parts_of_a_tuple_are_compared_by_their_initial_values(tmp_path, caplog):
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5**i, field="betas.0"))(toy_loss)
    continued(tmp_path, step, adam(betas=(0.5, 0.75)), adam(betas=(0.5, 0.75)), ())
    assert not lines(caplog)


@pytest.mark.parametrize("saved", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("given", [8.0, torch.tensor(8.0)], ids=["number", "tensor"])
def test_a_rate_may_be_a_tensor_on_either_side(tmp_path, saved, given):
    model = lambda lr: sgd(Toy(), lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
    state = continued(tmp_path, halving, model(saved), model(given), ("lr",))
    assert state.model.w.item() == -(1 + 0.5 + 2 + 1)


def test_each_group_gets_its_own_and_the_line_names_them(tmp_path, caplog):
    def two(head, body):
        model = torch.nn.ModuleDict({"head": Toy(), "body": Toy()})
        groups = [
            {"params": model["head"].parameters(), "lr": head, "name": "head"},
            {"params": model["body"].parameters(), "lr": body},
        ]
        return fl.TrainState.create(model, torch.optim.SGD(groups), seed=0)

    fl.save(two(1.0, 2.0), tmp_path / "step-00000000")
    rates = lambda state: [group["lr"] for group in state.optimizer.param_groups]
    assert rates(fl.resume(tmp_path, two(1.0, 3.0))) == [1.0, 2.0]
    assert "lr of group 1 is 2.0 there, and 3.0 here" in lines(caplog)[0]
    assert rates(fl.resume(tmp_path, two(4.0, 3.0), given=("lr",))) == [4.0, 3.0]
    fl.resume(tmp_path, two(4.0, 2.0))
    assert "lr of group 'head' is 1.0 there, and 4.0 here" in lines(caplog)[1]


def test_several_optimizers_are_given_what_each_has(tmp_path, caplog):
    one = problem()
    fl.save(one.state(), tmp_path / "step-00000000")
    new = one.state()
    for optimizer in new.optimizer.values():
        optimizer.param_groups[0]["lr"] *= 2
    wanted = {name: o.param_groups[0]["lr"] for name, o in new.optimizer.items()}
    new.optimizer["rest"].param_groups[0]["eps"] = 0.5  # Muon has another one
    state = fl.resume(tmp_path, new, given=("lr",))
    assert {k: o.param_groups[0]["lr"] for k, o in state.optimizer.items()} == wanted
    (line,) = lines(caplog)
    assert "eps of 'rest' is 1e-08 there, and 0.5 here" in line


def test_a_group_that_unfreeze_has_made_is_as_it_was_saved(tmp_path):
    def model():
        return torch.nn.ModuleDict({"head": Toy(), "body": Toy()})

    def state(lr):
        return fl.freeze(sgd(model(), lr=lr), "body.*")

    fl.save(fl.unfreeze(state(1.0), "body.*", lr=0.125), tmp_path / "step-00000000")
    resumed = fl.resume(tmp_path, state(0.5), given=("lr",))
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.5, 0.125]


def test_an_optimizer_with_its_own_state_dict_takes_what_is_given(tmp_path, caplog):
    class Own(SGD):
        def state_dict(self):
            return super().state_dict()

    def new(**settings):
        weights = Toy()
        return fl.TrainState.create(weights, Own(weights.parameters(), **settings), seed=0)

    settings = {"lr": 8.0, "weight_decay": 0.5}
    state = continued(tmp_path, halving, new(lr=1.0), new(**settings), ("lr",))
    assert state.model.w.item() == -(1 + 0.5 + 2 + 1)
    (line,) = lines(caplog)
    assert "weight_decay is 0 there, and 0.5 here" in line and "lr is" not in line


def exponential(optimizer, run):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_rate_that_a_scheduler_of_torch_has_set_is_compared_by_its_initial_value(
    tmp_path, caplog
):
    step = fl.pipeline(fl.torch_scheduler(exponential))(toy_loss)
    state = continued(tmp_path, step, toy(lr=1.0), toy(lr=1.0), ("lr",))
    assert state.model.w.item() == -(1 + 0.5 + 0.25 + 0.125) and not lines(caplog)
    fl.resume(tmp_path, toy(lr=8.0))
    (line,) = lines(caplog)
    assert "lr is 1.0 there, and 8.0 here" in line and "phase=" in line and "given=" not in line


def test_a_rate_that_a_scheduler_of_torch_has_set_cannot_be_given_but_a_phase_has_another(tmp_path):
    step = fl.pipeline(fl.torch_scheduler(exponential))(toy_loss)
    reach(step, toy(lr=1.0), 2, tmp_path)
    new = toy(lr=8.0)
    with pytest.raises(fl.CheckpointError, match=r'set group\["lr"\] after .* phase="second"'):
        fl.resume(tmp_path, new, given=("lr",))
    state = fl.resume(tmp_path, new)
    state.optimizer.param_groups[0]["lr"] = 8.0
    state = fl.fit(step, state, [ONE] * 2, phase="second", hooks=())
    assert state.model.w.item() == -(1 + 0.5 + 8 + 4)


def test_a_rate_that_a_hook_has_changed_is_compared_as_it_is(tmp_path, caplog):
    @fl.every(steps=1)
    def halve(state):
        state.optimizer.param_groups[0]["lr"] /= 2
        return state

    fl.fit(plain, toy(lr=1.0), [ONE] * 2, epochs=1, hooks=(halve, fl.checkpoint(tmp_path)))
    assert fl.resume(tmp_path, toy(lr=1.0)).optimizer.param_groups[0]["lr"] == 0.25
    assert "lr is 0.25 there, and 1.0 here" in lines(caplog)[0]


def test_a_scheduler_of_torch_in_a_hook_is_compared_by_its_initial_value(tmp_path, caplog):
    state = toy(lr=1.0)
    scheduler = exponential(state.optimizer, None)
    stepped = fl.every(steps=1)(lambda state: (scheduler.step(), state)[1])
    fl.fit(plain, state, [ONE] * 2, epochs=1, hooks=(stepped, fl.checkpoint(tmp_path)))
    assert fl.resume(tmp_path, toy(lr=1.0)).optimizer.param_groups[0]["lr"] == 0.25
    assert not lines(caplog)


@pytest.mark.parametrize("folder", ["none", "some"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("lr", TypeError, r'such as \("lr",\); got \'lr\''),
        (3, TypeError, "got 3"),
        (("lrate",), ValueError, "got 'lrate', which no group has. They have lr, momentum"),
        (("initial_lr",), ValueError, "which no group has"),
    ],
)
def test_what_no_group_has_is_refused_with_what_they_have(tmp_path, folder, given, error, message):
    state = toy()
    if folder == "some":
        fl.save(toy(), tmp_path / "step-00000000")
    with pytest.raises(error, match=message):
        fl.resume(tmp_path, state, given=given)
    assert fl.resume(tmp_path, state).step == 0  # it is not stale


def test_without_a_checkpoint_the_state_is_as_it_was_given(tmp_path, caplog):
    state = toy(lr=0.25)
    assert fl.resume(tmp_path / "none", state, given=("lr",)) is state
    assert not caplog.records


def test_a_state_of_fork_gives_its_rate(tmp_path):
    train(tmp_path, toy(lr=1.0), 2)
    (forked,) = fl.fork(toy(lr=1.0), {"lr": [0.5]}).values()
    assert fl.resume(tmp_path, forked, given=("lr",)).optimizer.param_groups[0]["lr"] == 0.5


def test_only_the_main_process_says_what_differs(tmp_path, caplog):
    fl.save(toy(lr=1.0), tmp_path / "step-00000000")
    state = toy(lr=0.5)
    other = attrs.evolve(state, backend=attrs.evolve(state.backend, rank=1))
    with caplog.at_level(logging.WARNING):
        fl.resume(tmp_path, other)
    assert not lines(caplog)


def test_settings_of_a_checkpoint_at_an_address_can_be_replaced():
    folder = "memory://given/run"
    pytest.importorskip("fsspec")
    reach(plain, toy(lr=1.0), 2, folder)
    assert fl.resume(folder, toy(lr=0.25), given=("lr",)).optimizer.param_groups[0]["lr"] == 0.25
