"""The trial detects optimizers that do not resume bit for bit, and changes nothing."""

import copy
import random
import types

import attrs
import numpy as np
import pytest
import torch
from sample_optimizers import ONE, Both, Counting, Modules, Objects, Slow, toy_state, toy_step
from torch import nn

import fnloop as fl
from fnloop._checkpoint import save
from fnloop._checkpoint.save import check_resumable, copy_optimizer
from fnloop._core.serialize import find_difference

SGD, Adam = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (
            Counting,
            "its attribute updates is not in its state_dict: "
            "a few updates after a restore, it is 15 in one, and 12 in the other",
        ),
        (Both, "Both.load_state_dict does not restore what its state_dict returned"),
        (Objects, "w.seen is a object, which a checkpoint cannot hold"),
        (Modules, "w.seen is a Linear, an object, which could not be reconstructed"),
    ],
)
def test_unrestored_values_are_detected_before_the_first_update(tmp_path, make, fault):
    state = toy_state(make)
    with pytest.raises(
        fl.CheckpointError,
        match=f"a run with {make.__name__} cannot be resumed bit for bit: .*{fault}",
    ):
        fl.fit(toy_step, state, [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)),))
    assert (
        state.model.w.item() == 0.0 and not state.optimizer.state and not list(tmp_path.iterdir())
    )
    # Without the hook it may train
    assert fl.fit(toy_step, toy_state(make), [ONE] * 3, hooks=()).step == 3


def test_a_period_that_restarts_is_detected():
    class Periodic(SGD):
        """Keeps its count as the length of a list, and uses it at every tenth update."""

        def step(self, closure=None):
            super().step()
            self.updates = [*getattr(self, "updates", ()), 1]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data *= 0 if len(self.updates) % 10 == 0 else 1

    with pytest.raises(fl.CheckpointError, match=r"its attribute updates is not in its state_dict"):
        check_resumable(toy_state(Periodic))


def test_a_schedule_that_does_not_reach_the_restored_groups_is_detected():
    class Hidden(Slow):
        """Its inner optimizer is hidden, so that loading replaces its groups."""

        def __init__(self, params):
            super().__init__(params)
            inner, self.inner = self.inner, None
            self.reach = types.SimpleNamespace(inner=inner)

        def step(self, closure=None):
            self.reach.inner.step()

        def state_dict(self):
            return self.reach.inner.state_dict()

        def load_state_dict(self, saved):
            self.reach.inner.load_state_dict(saved)

    with pytest.raises(fl.CheckpointError, match=r"after a restore, weights.w differs"):
        check_resumable(toy_state(Hidden))


def test_the_trial_changes_nothing():
    calls = []
    state = fl.fit(toy_step, toy_state(Slow), [ONE] * 3, hooks=())
    state.model.w.grad = torch.full_like(state.model.w, 7.0)
    for optimizer in (state.optimizer, state.optimizer.inner):
        optimizer._optimizer_step_pre_hooks[0] = optimizer._optimizer_step_post_hooks[0] = (
            lambda *args: calls.append(args)
        )
    # As a schedule patches it
    vars(state.optimizer)["step"] = lambda closure=None: calls.append("step")
    before, held = (
        copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict())),
        id(state.optimizer.param_groups[0]),
    )
    drawn = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    check_resumable(state)
    assert (
        not calls
        and state.model.w.grad.item() == 7.0
        and id(state.optimizer.param_groups[0]) == held
    )
    assert (
        find_difference(before, (state.model.state_dict(), state.optimizer.state_dict()), "")
        is None
    )
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(drawn[0], after[0]) and drawn[1:] == after[1:]


def test_the_trial_copies_little(monkeypatch):
    class Mine(Adam):
        pass

    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
    state = fl.TrainState.create(model, Mine(model.parameters()), seed=0)
    state = fl.fit(
        fl.pipeline()(lambda model, x: model(x).mean()), state, [torch.ones(2, 300)], hooks=()
    )
    twins = []
    spy = lambda *args: twins.append(copy_optimizer(*args)) or twins[-1]
    monkeypatch.setattr(save, "copy_optimizer", spy)
    check_resumable(state)
    twin = twins[0].optimizer
    # One of each kind
    assert [tuple(p.shape) for p in twin.param_groups[0]["params"]] == [
        (4, 4),
        (4,),
    ]
    assert sorted(tuple(t.shape) for held in twin.state.values() for t in held.values()) == [
        (),
        (),
        (4,),
        (4,),
        (4, 4),
        (4, 4),
    ]


class Every(SGD):
    """Halves the weights at every 50th update, by a count that the derived classes keep."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)

    def step(self, closure=None):
        super().step()
        if self.count() % 50 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data /= 2


class TensorCounter(Every):
    def __init__(self, params):
        super().__init__(params)
        self.k = torch.zeros(())

    def count(self):
        return self.k.add_(1)


class DictCounter(Every):
    def __init__(self, params):
        super().__init__(params)
        self.info = {"name": "k", "k": 0}

    def count(self):
        self.info["k"] += 1
        return self.info["k"]


class Grouped(Every):
    def __init__(self, params):
        super().__init__(params)
        self.seen = []

    def count(self):
        self.seen.append("update")
        return len(self.seen)


class DefaultsCounter(Every):
    def __init__(self, params):
        super().__init__(params)
        self.defaults["k"] = 0

    def count(self):
        self.defaults["k"] += 1
        return self.defaults["k"]


class Late(Every):
    """Creates its count at the first update."""

    def count(self):
        self.k = getattr(self, "k", 0) + 1
        return self.k


class Nested(Every):
    def __init__(self, params):
        super().__init__(params)
        self.info = ({"of": [0, 7]},)

    def count(self):
        self.info[0]["of"][0] += 1
        return self.info[0]["of"][0]


@pytest.mark.parametrize(
    ("make", "path", "fault"),
    [
        (TensorCounter, "k", "differs"),
        (DictCounter, "info.k", "is 15 in one, and 12 in the other"),
        (DefaultsCounter, "defaults.k", "is 15 in one, and 12 in the other"),
        (Nested, "info.0.of.0", "is 15 in one, and 12 in the other"),
        (Grouped, "seen", "is of length 15 in one, and 12 in the other"),
        (Late, "k", "is 15 in one, and 12 in the other"),
    ],
)
def test_an_unrestored_count_is_detected_long_before_it_matters(make, path, fault):
    said = (
        f"its attribute {path} is not in its state_dict: a few updates after a restore, it {fault}"
    )
    with pytest.raises(fl.CheckpointError, match=f"a run with {make.__name__} cannot .*: {said}"):
        check_resumable(toy_state(make))


def test_a_cache_that_fills_up_again_is_not_a_count():
    class Cached(Every):
        def __init__(self, params):
            super().__init__(params)
            self.shapes = {}

        def count(self):
            return self.shapes.setdefault("w", 1)

    check_resumable(toy_state(Cached))


def test_a_flag_is_not_a_count():
    class Told(SGD):
        told, done, first = False, torch.tensor(False), None

        def step(self, closure=None):
            super().step()
            self.told, self.done = True, torch.tensor(True)

    check_resumable(toy_state(Told))


class Heads(SGD):
    """Its momentum is in objects."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.heads = [
            types.SimpleNamespace(m=torch.zeros_like(p))
            for group in self.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def step(self, closure=None):
        for head, p in zip(self.heads, self.param_groups[0]["params"], strict=True):
            head.m.mul_(0.5).add_(p.grad)
            p.sub_(head.m)


class Flat(SGD):
    """Its momentum is one flat tensor over all parameters."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.m = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.m.mul_(0.5).add_(torch.cat([p.grad.flatten() for p in params]))
        for p, m in zip(params, self.m.split([p.numel() for p in params]), strict=True):
            p.sub_(m.view_as(p))


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (Heads, "a few updates after a restore, weights.*weight differs"),
        (Flat, "its attribute m is not in its state_dict"),
    ],
)
def test_unrestored_momentum_is_detected_in_whole_copies(make, fault):
    model = nn.Linear(9, 9)
    state = fl.TrainState.create(model, make(model.parameters()), seed=0)
    with pytest.raises(fl.CheckpointError, match=f"a run with {make.__name__} cannot .* {fault}"):
        check_resumable(state)


def test_a_large_optimizer_is_not_copied_whole(caplog, monkeypatch):
    monkeypatch.setattr(save, "MANY", 89)
    model = nn.Linear(9, 9)
    check_resumable(fl.TrainState.create(model, Flat(model.parameters()), seed=0))
    assert (
        "could not try whether a run with Flat resumes bit for bit (RuntimeError: " in caplog.text
    )


class Closure(SGD):
    """Its momentum is in a variable that a function encloses."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        momentum = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

        def update():
            for m, p in zip(momentum, self.param_groups[0]["params"], strict=True):
                p.data -= m.mul_(0.5).add_(p.grad)

        self.update = update

    def step(self, closure=None):
        self.update()


def around_step(params):
    kept = {}

    class AroundStep(SGD):
        """Its momentum is in a variable around the class, which is still empty."""

        def step(self, closure=None):
            for i, p in enumerate(self.param_groups[0]["params"]):
                kept[i] = kept.get(i, 0) / 2 + p.grad
                p.data -= kept[i]

    AroundStep.kept = staticmethod(lambda: kept)
    return AroundStep(params, lr=1.0)


@pytest.mark.parametrize(("make", "name"), [(Closure, "Closure"), (around_step, "AroundStep")])
def test_an_optimizer_that_cannot_be_tried_is_logged_once(caplog, make, name):
    first = toy_state(make)
    check_resumable(first)
    check_resumable(first)
    function = "update" if make is Closure else "step"
    assert caplog.messages == [
        f"could not try whether a run with {name} resumes bit for bit (NotImplementedError: "
        f"its function {function} keeps tensors, or might, in variables around it): "
        "compare a resumed run with an uninterrupted one"
    ]
    assert make is Closure or not first.optimizer.kept()  # the trial did not use it


def test_other_processes_do_not_repeat_the_warning(caplog):
    class Elsewhere(Closure):
        pass

    state = toy_state(Elsewhere)
    check_resumable(attrs.evolve(state, backend=attrs.evolve(state.backend, rank=1)))
    assert not caplog.messages


def test_an_optimizer_that_takes_a_closure_is_tried_without_a_warning(caplog):
    class Evaluates(SGD):
        def step(self, closure):
            closure()
            super().step()

    check_resumable(toy_state(Evaluates))
    assert not caplog.messages


def test_an_update_that_fails_in_the_trial_is_logged(caplog):
    class Wants(SGD):
        def step(self, closure=None):
            if closure is None:
                raise RuntimeError("a closure is needed")

    check_resumable(toy_state(Wants))
    assert "a run with Wants resumes bit for bit (RuntimeError: a closure is needed)" in caplog.text


def test_a_function_that_might_reach_the_real_parameters_is_not_called():
    class Closed(SGD):
        def __init__(self, params):
            params = list(params)
            super().__init__(params, lr=1.0)
            self.zero = lambda: [p.data.zero_() for p in params]

        def step(self, closure=None):
            self.zero()

    state = toy_state(Closed, w=7.0)
    check_resumable(state)
    assert state.model.w.item() == 7.0
