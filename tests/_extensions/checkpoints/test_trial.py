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
from fnloop._extensions.checkpoints import save
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.named import copy_optimizer
from fnloop._extensions.checkpoints.save import check_resumable

SGD, Adam = torch.optim.SGD, torch.optim.Adam
every = lambda begin, count: type("Mine", (Every,), {"begin": begin, "count": count})


@pytest.mark.parametrize(("make", "fault"), [
    (Counting, "its attribute updates is not in its state_dict: "
     "a few updates after a restore, it is 15 in one, and 12 in the other"),
    (Both, "Both.load_state_dict does not restore what its state_dict returned"),
    (Objects, "w.seen is a object, which a checkpoint cannot hold"),
    (Modules, "w.seen is a Linear, an object, which could not be reconstructed"),
])  # fmt: skip
def test_unrestored_values_are_detected_before_the_first_update(tmp_path, make, fault):
    state, begun = toy_state(make), f"a run with {make.__name__} cannot be resumed bit for bit: .*"
    with pytest.raises(fl.CheckpointError, match=begun + fault):
        fl.fit(toy_step, state, [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)),))
    assert state.model.w.item() == 0.0 and not state.optimizer.state
    assert not list(tmp_path.iterdir())
    # Without the hook it may train
    assert fl.fit(toy_step, toy_state(make), [ONE] * 3, hooks=()).step == 3


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
    note = lambda *args: calls.append(args)
    for optimizer in (state.optimizer, state.optimizer.inner):
        optimizer._optimizer_step_pre_hooks[0] = optimizer._optimizer_step_post_hooks[0] = note
    vars(state.optimizer)["step"] = lambda closure=None: calls.append("step")  # as a schedule does

    def all_that_may_change():
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        made = state.model.state_dict(), state.optimizer.state_dict(), state.model.w.grad
        return copy.deepcopy((drawn, made)), id(state.optimizer.param_groups[0])

    before = all_that_may_change()
    check_resumable(state)
    assert not calls and find_difference(before, all_that_may_change(), "") is None


def test_the_trial_copies_little(monkeypatch):
    class Mine(Adam):
        pass

    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
    state = fl.TrainState.create(model, Mine(model.parameters()), seed=0)
    step = fl.pipeline()(lambda model, x: model(x).mean())
    state, twins = fl.fit(step, state, [torch.ones(2, 300)], hooks=()), []
    spy = lambda *args: twins.append(copy_optimizer(*args)) or twins[-1]
    monkeypatch.setattr(save, "copy_optimizer", spy)
    check_resumable(state)
    twin = twins[0].optimizer
    # One of each kind
    assert [tuple(p.shape) for p in twin.param_groups[0]["params"]] == [(4, 4), (4,)]
    shapes = sorted(tuple(t.shape) for held in twin.state.values() for t in held.values())
    assert shapes == [(), (), (4,), (4,), (4, 4), (4, 4)]


class Every(SGD):
    """Halves the weights at every 50th update, by a count in a place that ``begin`` gives.

    Here it is created at the first update.
    """

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.begin()

    def begin(self):
        pass

    def count(self):
        self.k = getattr(self, "k", 0) + 1
        return self.k

    def step(self, closure=None):
        super().step()
        if self.count() % 50 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data /= 2


def one_more(held, key):
    held[key] += 1
    return held[key]


COUNTS = {
    "k": Every,
    "k, a tensor": every(lambda o: vars(o).update(k=torch.zeros(())), lambda o: o.k.add_(1)),
    "info.k": every(lambda o: vars(o).update(info={"name": "k", "k": 0}),
                    lambda o: one_more(o.info, "k")),
    "defaults.k": every(lambda o: o.defaults.update(k=0), lambda o: one_more(o.defaults, "k")),
    "info.0.of.0": every(lambda o: vars(o).update(info=({"of": [0, 7]},)),
                         lambda o: one_more(o.info[0]["of"], 0)),
    "seen": every(lambda o: vars(o).update(seen=[]), lambda o: o.seen.append(1) or len(o.seen)),
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTS)
def test_an_unrestored_count_is_detected_long_before_it_matters(kind):
    path, _, tensor = kind.partition(",")
    found = "is of length 15" if kind == "seen" else "is 15"
    found = "differs" if tensor else f"{found} in one, and 12 in the other"
    said = f"its attribute {path} is not in its state_dict: a few updates after a restore, it "
    said = f"a run with {COUNTS[kind].__name__} cannot .*: {said}{found}"
    with pytest.raises(fl.CheckpointError, match=said):
        check_resumable(toy_state(COUNTS[kind]))


class Told(SGD):
    told, done, first = False, torch.tensor(False), None

    def step(self, closure=None):
        super().step()
        self.told, self.done = True, torch.tensor(True)


class Evaluates(SGD):
    def step(self, closure):
        closure()
        super().step()


CACHED = every(lambda o: vars(o).update(shapes={}), lambda o: o.shapes.setdefault("w", 1))


@pytest.mark.parametrize("make", [CACHED, Told, Evaluates], ids=["a cache", "a flag", "a closure"])
def test_what_resumes_is_tried_without_a_warning(make, caplog):
    check_resumable(toy_state(make))
    assert not caplog.messages


class Heads(SGD):
    """Its momentum is in objects."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        held = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        self.heads = [types.SimpleNamespace(m=m) for m in held]

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


@pytest.mark.parametrize(("make", "fault"), [
    (Heads, "a few updates after a restore, weights.*weight differs"),
    (Flat, "its attribute m is not in its state_dict"),
])  # fmt: skip
def test_unrestored_momentum_is_detected_in_whole_copies(make, fault):
    model = nn.Linear(9, 9)
    state = fl.TrainState.create(model, make(model.parameters()), seed=0)
    with pytest.raises(fl.CheckpointError, match=f"a run with {make.__name__} cannot .* {fault}"):
        check_resumable(state)


def test_a_large_optimizer_is_not_copied_whole(caplog, monkeypatch):
    monkeypatch.setattr(save, "MANY", 89)
    model = nn.Linear(9, 9)
    check_resumable(fl.TrainState.create(model, Flat(model.parameters()), seed=0))
    assert "not try whether a run with Flat resumes bit for bit (RuntimeError: " in caplog.text


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
def test_an_optimizer_that_cannot_be_tried_is_logged_once_by_the_first_process(caplog, make, name):
    first = toy_state(make)
    check_resumable(attrs.evolve(first, backend=attrs.evolve(first.backend, rank=1)))
    assert not caplog.messages
    check_resumable(first)
    check_resumable(first)
    function = "update" if make is Closure else "step"
    assert caplog.messages == [
        f"could not try whether a run with {name} resumes bit for bit (NotImplementedError: "
        f"its function {function} keeps tensors, or might, in variables around it): "
        "compare a resumed run with an uninterrupted one"
    ]
    assert make is Closure or not first.optimizer.kept()  # the trial did not use it


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
