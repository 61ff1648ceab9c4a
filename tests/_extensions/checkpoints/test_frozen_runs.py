"""Runs that freeze and unfreeze, killed and started again, end as if they had never stopped."""

import attrs
import pytest
import torch
from saved import check_refused
from torch import nn
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._core.optimizers import optimizers_in
from fnloop._core.saved import Pending
from fnloop.testing import assert_same

NUMBERS = torch.Generator().manual_seed(0)
DATA = [(x, int(x.sum() > 0)) for x in torch.randn(24, 4, generator=NUMBERS)]
LOSS = fl.supervised(nn.CrossEntropyLoss())
FALLING = fl.pipeline(fl.clip(1.0), fl.schedule(fl.schedules.cosine(warmup=1)))(LOSS)
annealing = lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, T_max=run.total_steps)
BY_TORCH = fl.pipeline(fl.torch_scheduler(annealing))(LOSS)
UPDATES = 9  # in three phases
of_all = lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
of_head = lambda model: Adam(model[2].parameters(), lr=0.1)
block = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3))


class Killed(BaseException):
    pass


def loaders():
    valid = next(iter(DataLoader(DATA, 12)))
    return {"train": DataLoader(DATA, batch_size=8, shuffle=True), "valid": [valid]}


class Own(SGD):
    def state_dict(self):
        return super().state_dict()


def several(model):
    model[0].requires_grad_(False)
    head = SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    return {"head": head, "body": AdamW(model[1].parameters(), lr=0.1)}


def with_tensor_rates(model):
    settings = {"foreach": False, "capturable": False}
    return AdamW(model[2].parameters(), lr=torch.tensor(0.1), **settings)


MAKE = {
    "of_head": of_head, "of_all": of_all, "several": several,
    "with_tensor_rates": with_tensor_rates,
    "with_own_state_dict": lambda model: Own(model[2].parameters(), lr=0.1, momentum=0.9),
}  # fmt: skip
last_block = lambda state: fl.unfreeze(state, "1.*", lr=0.01)
freeze_body = lambda state: fl.freeze(state, "0", "1")


def new_state(make):
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(4, 2))
    return fl.TrainState.create(model, make(model), seed=1)


def everything(state):
    more = {} if isinstance(state.optimizer, torch.optim.Optimizer) else {"optimizer": "body"}
    state = fl.unfreeze(state, "*", **more)
    return fl.unfreeze(state, "2", "1.0", lr=0.05)


PHASES = {"head": freeze_body, "last": last_block, "all": everything}


def script(state, make, hooks=(), again=True):
    """Train the head, then the last block with it, then everything.

    Unless ``again``, freeze and unfreeze are called only for phases that have not begun.
    """
    begun = {phase.name for phase in state.phases}
    for name, change in PHASES.items():
        if again or name not in begun:
            state = change(state)
        step = BY_TORCH if name == "all" and make is not several else FALLING
        state = fl.fit(step, state, loaders(), epochs=1, hooks=hooks, phase=name)
    return state


def layout(state):
    groups = [
        {key: len(v) if key == "params" else v for key, v in sorted(group.items())}
        for one in optimizers_in(state.optimizer).values()
        for group in one.param_groups
    ]
    trained = [name for name, p in state.model.named_parameters() if p.requires_grad]
    evaluated = [name for name, module in state.model.named_modules() if not module.training]
    return trained, evaluated, repr(groups)


def killed(run, at, make, folder):
    """Run a script that saves every update, and is killed after one of them."""

    @fl.when(lambda state: state.step == at)
    def kill(state):
        raise Killed

    with pytest.raises(Killed):
        run(new_state(make), make, (fl.every(steps=1)(fl.checkpoint(folder)), kill))


def assert_ended_the_same(state, expected):
    if Pending.is_in(state.slots.get("torch_scheduler")):  # no step has met the restored state
        state, expected = (attrs.evolve(one, slots={}) for one in (state, expected))
    assert_same(state, expected)
    assert layout(state) == layout(expected)


@pytest.fixture(scope="module", params=MAKE.values(), ids=[*MAKE])
def whole(request):
    state = script(new_state(request.param), request.param)
    assert state.step == UPDATES
    return request.param, state


QUICK = (5,)  # in the second phase
OTHERWISE = [(at, "always") for at in range(1, UPDATES + 1) if at not in QUICK]
OTHERWISE += [(at, how) for how in ("new", "beforehand") for at in (2, 3, 5, 6, 9)]


@pytest.mark.parametrize(("at", "how"), [
    *((at, "always") for at in QUICK),
    *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERWISE),
])  # fmt: skip
def test_a_script_of_three_phases_ends_the_same_wherever_it_is_killed(at, how, whole, tmp_path):
    make, expected = whole
    killed(script, at, make, tmp_path / "run")
    state = new_state(make)
    if how == "beforehand":  # with groups that the checkpoint may not have yet
        state = everything(last_block(freeze_body(state)))
    state = fl.resume(tmp_path / "run", state)
    assert state.step == at
    state = script(state, make, (fl.checkpoint(tmp_path / "run"),), how != "new")
    assert_ended_the_same(state, expected)
    again = script(fl.resume(tmp_path / "run", new_state(make)), make)
    assert_ended_the_same(again, expected)


def test_phases_train_what_they_should():
    seen = {}
    note = lambda state: seen.update({state.phases[-1].name: layout(state)}) or state
    script(freeze_body(new_state(of_head)), of_head, (note,))
    assert seen["head"][:2] == (["2.weight", "2.bias"], ["0.1", "1.1"])
    assert (seen["last"][0][0], seen["last"][1]) == ("1.0.weight", ["0.1"])
    assert (len(seen["all"][0]), seen["all"][1]) == (10, [])


# --- without phases


def hooked(state, make, hooks=()):
    unfreeze = lambda state: fl.unfreeze(state, "*", lr=0.01)
    thaw = fl.when(lambda state: state.step == 4)(unfreeze)
    return fl.fit(FALLING, state, loaders(), epochs=3, hooks=(thaw, *hooks))


@pytest.mark.parametrize("at", [3, 4, 5, 8])
def test_a_hook_that_unfreezes_is_not_undone_by_a_restart(at, tmp_path):
    begin = lambda: freeze_body(new_state(of_head))
    expected = hooked(begin(), of_head)
    killed(lambda state, *rest: hooked(freeze_body(state), *rest), at, of_head, tmp_path / "run")
    state = hooked(fl.resume(tmp_path / "run", begin()), of_head)
    assert_same(state, expected)
    assert layout(state) == layout(expected)


# --- what a restored state does with freeze


def test_a_restored_state_may_be_frozen_in_another_way_for_a_phase_of_another_name(tmp_path):
    killed(script, 5, of_head, tmp_path)
    state = fl.freeze(fl.resume(tmp_path, new_state(of_head)), "2")
    assert layout(state)[0][-1] == "1.1.bias"
    with pytest.raises(ValueError, match="the phase 'last', begun at step 3, has not ended"):
        fl.fit(FALLING, state, loaders(), hooks=(), phase="other")
    state = fl.fit(FALLING, state, loaders(), hooks=(), phase="last")
    assert layout(state)[0][-1] == "2.bias"  # as the checkpoint says
    state = fl.fit(FALLING, fl.freeze(state, "2"), loaders(), hooks=(), phase="other")
    assert layout(state)[0][-1] == "1.1.bias"


def test_a_run_that_was_not_restored_may_change_what_a_phase_trains():
    def press(state):
        raise KeyboardInterrupt

    state = fl.fit(FALLING, freeze_body(new_state(of_head)), loaders(), hooks=(press,), phase="a")
    assert state.stop == "interrupted"
    state = fl.fit(FALLING, last_block(state), loaders(), hooks=(), phase="a")
    assert layout(state)[0][0] == "1.0.weight"


# --- groups in checkpoints


def test_groups_that_were_added_are_restored_by_names(tmp_path):
    state = everything(last_block(freeze_body(new_state(of_head))))
    path = fl.save(state, tmp_path / "a")
    new = new_state(of_head)
    groups, first = new.optimizer.param_groups, new.optimizer.param_groups[0]
    restored = fl.restore(path, new)
    assert layout(restored) == layout(state)
    assert groups is restored.optimizer.param_groups
    assert groups[0] is first
    assert [g["lr"] for g in groups] == [0.05, 0.01, 0.1, 0.05]


@pytest.mark.parametrize("trained", [("0", "2"), ("2",)])
def test_optimizers_of_the_same_parameters_have_the_groups_of_both(trained, tmp_path):
    def shared(model):
        for name, block in model.named_children():
            block.requires_grad_(name in trained)
        given = [p for p in model.parameters() if p.requires_grad]
        return {"adam": AdamW(given, lr=0.1), "sgd": SGD(given, lr=0.1)}

    more = {} if "0" in trained else {"optimizer": "adam"}
    state = fl.unfreeze(new_state(shared), "0", "2.bias", lr=0.01, **more)
    fl.save(state, tmp_path / "saved")
    restored = fl.restore(tmp_path / "saved", new_state(shared))
    assert layout(restored) == layout(state)
    assert len(restored.optimizer["sgd"].param_groups) == 2


def test_groups_that_the_checkpoint_does_not_have_are_removed(tmp_path):
    path = fl.save(freeze_body(new_state(of_all)), tmp_path / "a")
    restored = fl.restore(path, last_block(new_state(of_all)))
    (group,) = (group["params"] for group in restored.optimizer.param_groups)
    pairs = zip(group, restored.model.parameters(), strict=True)
    assert all(p is q for p, q in pairs)


@pytest.mark.parametrize("make", [
    lambda model: Adam([{"params": model[2].parameters()}, {"params": model[1].parameters()}]),
    lambda model: Adam(model[1].parameters()), lambda model: Adam([*model[2].parameters()][::-1]),
])  # fmt: skip
def test_groups_that_unfreeze_does_not_explain_are_refused_as_before(make, tmp_path):
    path = fl.save(freeze_body(new_state(of_head)), tmp_path / "a")
    state = new_state(make)
    before = layout(state)
    check_refused(path, state, "Make its groups as they were")
    assert layout(state) == before


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_groups(tmp_path, monkeypatch):
    path = fl.save(everything(last_block(new_state(of_head))), tmp_path / "a")
    state = new_state(of_head)
    before = layout(state)
    monkeypatch.setattr(state.model, "load_state_dict", lambda *args, **settings: 1 / 0)
    with pytest.raises(fl.CheckpointError, match="ZeroDivisionError: division by zero"):
        fl.restore(path, state)
    assert layout(state) == before
