"""Optimizers that keep their state in unusual places, with a toy model to train.

The model has one weight of 0, and each update of ``SGD(lr=1)`` subtracts 1 from it.
"""

import json
from collections import deque

import torch
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints.save import check_resumable
from fnloop.testing import Toy, assert_same, toy_loss

ONE = torch.ones(1)
SGD, Adam = torch.optim.SGD, torch.optim.Adam
toy_step = fl.pipeline()(toy_loss)


def check_resumes(folder, new, step, data, splits=(5,)):
    """Assert that a resumed run ends in the state of an uninterrupted one."""
    check_resumable(new())
    whole = fl.fit(step, new(), data, epochs=2, hooks=())
    for split in splits:
        half = fl.fit(step, new(), data, steps=split, hooks=())
        # A new model starts with other weights
        resumed = fl.restore(fl.save(half, folder / "half"), new(1))
        assert_same(resumed, half)
        assert_same(fl.fit(step, resumed, data, epochs=2, hooks=()), whole)


def toy_state(make, w=0.0):
    model = Toy(w)
    return fl.TrainState.create(model, make(model.parameters()), seed=0)


class Slow(torch.optim.Optimizer):
    """A lookahead wrapper, whose own ``state`` is empty.

    Every second update it goes half of the way back to the weights before the last two updates.
    """

    def __init__(self, params):
        self.inner, self.state = SGD(params, lr=1.0, momentum=0.5), {}
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        for group in self.param_groups:
            group["updates"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                slow = self.inner.state[p].setdefault("slow", torch.zeros_like(p))
                if group["updates"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, saved):
        self.inner.load_state_dict(saved)
        self.param_groups = self.inner.param_groups


class Forgetful(Slow):
    """The same, but it does not use the groups that loading has created."""

    def load_state_dict(self, saved):
        self.inner.load_state_dict(saved)


class Both(torch.optim.Optimizer):
    """Two optimizers of the same parameters; its ``state`` is only that of the first."""

    def __init__(self, params):
        params = list(params)
        self.first, self.second = SGD(params, lr=1.0, momentum=0.5), Adam(params, lr=0.5)
        super().__init__(params, {})
        self.param_groups = [*self.first.param_groups]

    state = property(lambda self: self.first.state, lambda self, value: None)

    def step(self, closure=None):
        self.first.step()
        self.second.step()


class BothSaved(Both):
    def state_dict(self):
        return {"first": self.first.state_dict(), "second": self.second.state_dict()}

    def load_state_dict(self, saved):
        self.first.load_state_dict(saved["first"])
        self.second.load_state_dict(saved["second"])
        self.param_groups = [*self.first.param_groups]


class Counting(SGD):
    """The size of each update is the number of earlier updates, which is an attribute."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.updates = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = float(self.updates)
        super().step()
        self.updates += 1


class CountingSaved(Counting):
    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.updates = saved["updates"]


class Averaging(SGD):
    """Keeps state of all parameters together, under a name."""

    def step(self, closure=None):
        super().step()
        shared = self.state.setdefault("shared", {"total": 0.0, "recent": deque(maxlen=2)})
        shared["recent"].append(1.0)
        shared["total"] += len(shared["recent"])
        for p in parameters_of(self):
            p.data -= shared["total"]


class Tensors(SGD):
    """Counts in a tensor of the group, as timm's Lamb does. A new optimizer lacks it."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.zeros(())
            group["step"].add_(1)
            for p in group["params"]:
                p.data -= group["step"]


class Typed(SGD):
    """Has a dtype and functions in its groups."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        for group in self.param_groups:
            group.update(momentum_dtype=torch.float16, shape_of=max, scale=lambda x: 2 * x)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["scale"](p.grad.to(group["momentum_dtype"]))


SAVED = (Slow, Forgetful, BothSaved, CountingSaved, Averaging, Tensors, Typed)  # all is restored


class Objects(SGD):
    kind = object

    def step(self, closure=None):
        super().step()
        for p in parameters_of(self):
            self.state[p]["seen"] = self.kind()


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


class Modules(Objects):
    def kind(self):
        return nn.Linear(1, 1)  # it has a state_dict


def facts_of(path):
    return json.loads((path / "state.json").read_text())["optimizer"]
