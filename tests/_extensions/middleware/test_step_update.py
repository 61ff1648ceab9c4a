"""torch_scheduler with schedulers that have step_update, as those of timm."""

import importlib
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch
from sample_middleware import ByUpdates
from toy_runs import ONE, fitted, kept, stop_when

import fnloop as fl
from fnloop.testing import toy


@pytest.fixture
def timm_scheduler(monkeypatch):
    """timm.scheduler.cosine_lr and its neighbours, without the package, which needs torchvision."""
    found = importlib.machinery.PathFinder.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed")
    package = types.ModuleType("timm_s_schedulers")
    package.__path__ = [str(Path(found.origin).parent / "scheduler")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    return lambda file: importlib.import_module(f"{package.__name__}.{file}")


def cosine(timm_scheduler, **settings):
    make = timm_scheduler("cosine_lr").CosineLRScheduler
    settings = {"lr_min": 0.1, "warmup_t": 3, "warmup_lr_init": 0.01} | settings
    return lambda opt, run: make(opt, t_initial=run.total_steps, t_in_epochs=False, **settings)


def rates_by_hand(factory, updates):
    """As timm's train.py does it: step_update after each update, with their number."""
    optimizer = toy().optimizer
    scheduler = factory(optimizer, fl.RunInfo(total_steps=updates))
    found = []
    for num_updates in range(1, updates + 1):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(num_updates=num_updates)
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"warmup_t": 0}, {"noise_range_t": (2, 6)}, {"k_decay": 2.0}], ids=repr
)
def test_the_rates_are_those_of_timm(timm_scheduler, settings):
    factory = cosine(timm_scheduler, **settings)
    state = fitted([1] * 4, fl.torch_scheduler(factory), epochs=2, record_every=fl.every(steps=1))
    expected = rates_by_hand(factory, 8)
    found = [r.metrics["recent/lr"] for r in state.history if "recent/lr" in r.metrics]
    assert found == expected and len({*expected}) > 4
    assert state.model.w.item() == pytest.approx(-sum(expected), rel=1e-6)


@pytest.mark.parametrize("how", ["as it is", "snapshot", "checkpoint"])
@pytest.mark.parametrize("updates", [1, 3, 4, 6])
def test_a_run_continues_with_the_next_rate(timm_scheduler, how, updates, tmp_path):
    member = fl.torch_scheduler(cosine(timm_scheduler))
    whole = fitted([1] * 4, member, epochs=2)
    state = fitted([1] * 4, member, epochs=2, hooks=(stop_when(lambda s: s.step == updates),))
    state = fitted([1] * 4, member, epochs=2, state=kept(how, state, toy(), tmp_path))
    assert state.model.w.item() == whole.model.w.item()
    assert state.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def halving(told):
    return fl.torch_scheduler(lambda opt, run: ByUpdates(opt, told))


def test_one_that_begins_later_is_told_so():
    told = []
    state = fitted([1] * 2)
    state = fitted([1] * 2, halving(told), state=state, epochs=2)
    assert (told, state.model.w.item()) == ([2, 3, 4], -2 - 0.25 - 0.125)


def test_turns_count_their_own_updates():
    told = []
    model = torch.nn.ModuleDict({"d": toy().model, "g": toy().model})
    loss = lambda name: lambda m, x: (m[name].w * x).mean()
    steps = {"d": fl.pipeline(halving(told))(loss("d")), "g": fl.pipeline()(loss("g"))}
    optimizers = {n: torch.optim.SGD(model[n].parameters(), lr=1.0) for n in "dg"}
    step = fl.alternate(steps, order=("d", "d", "g"))
    fl.fit(step, fl.TrainState.create(model, optimizers), [ONE] * 2, hooks=())
    assert told == [1, 2, 3, 4]


def test_a_run_of_another_length_is_refused(timm_scheduler):
    member = fl.torch_scheduler(cosine(timm_scheduler))
    state = fitted([1] * 4, member)
    with pytest.raises(ValueError, match=r"its CosineLRScheduler was made for a run of total_st"):
        fitted([1] * 4, member, state=state, epochs=2)


def test_other_groups_are_refused():
    model = torch.nn.ModuleDict({"a": toy().model, "b": toy().model})
    state = fl.TrainState.create(model, torch.optim.SGD(model["a"].parameters(), lr=1.0))
    thaw = fl.when(lambda state: state.step == 1)(lambda state: fl.unfreeze(state, "b", lr=0.1))
    loss_fn = lambda m, x: (m["a"].w + m["b"].w).mean() * x.mean()
    with pytest.raises(ValueError, match="was made for 1 parameter groups, and the optimizer has"):
        fitted([1] * 3, halving([]), loss_fn=loss_fn, state=state, hooks=(thaw,))


def test_one_that_counts_epochs_is_refused(timm_scheduler):
    make = timm_scheduler("step_lr").StepLRScheduler
    message = r"StepLRScheduler that counts epochs.*StepLRScheduler\(..., t_in_epochs=False\)"
    with pytest.raises(ValueError, match=message):
        fitted([1], fl.torch_scheduler(lambda opt, run: make(opt, decay_t=1)))
    in_updates = fl.torch_scheduler(
        lambda opt, run: make(opt, decay_t=run.steps_per_epoch, decay_rate=0.5, t_in_epochs=False)
    )
    state = fitted([1] * 2, in_updates, epochs=3)
    assert state.history["train/lr"] == (1.0, 0.5, 0.25)


def test_what_lacks_a_method_or_is_of_another_optimizer_is_refused():
    class Bare:
        step_update = ByUpdates.step_update

    message = "and not a scheduler with step_update, state_dict, load_state_dict"
    with pytest.raises(TypeError, match=message):
        fitted([1], fl.torch_scheduler(lambda opt, run: Bare()))
    with pytest.raises(ValueError, match="made a ByUpdates of another optimizer than the state's"):
        fitted([1], fl.torch_scheduler(lambda opt, run: ByUpdates(toy().optimizer, [])))
