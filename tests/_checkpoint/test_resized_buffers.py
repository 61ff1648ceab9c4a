"""Modules whose buffers get their sizes from data."""

import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import assert_same

BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]


class Growing(nn.Module):
    """Its buffer keeps every input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if self.training:
            self.seen = torch.cat([self.seen, x])
        return (self.w * x).mean() * self.seen.numel()


class Resizing(Growing):
    """As fake quantization does, it resizes its buffer when that is loaded."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        if f"{prefix}seen" in state_dict:
            self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *others)


def new(kind):
    model = nn.Sequential(kind())
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)


def train(state, **settings):
    step = fl.pipeline()(lambda model, batch: model(batch))
    return fl.fit(step, state, BATCHES, hooks=(), **settings)


def test_a_module_that_resizes_its_buffers_is_resumed(tmp_path):
    fl.save(train(new(Resizing), steps=2), tmp_path / "a")
    resumed = fl.restore(tmp_path / "a", new(Resizing))
    assert resumed.model[0].seen.tolist() == [1.0, 2.0]
    assert_same(train(resumed, steps=4), train(new(Resizing), steps=4))


def test_a_module_that_does_not_is_refused_as_torch_refuses_it(tmp_path):
    fl.save(train(new(Growing), steps=2), tmp_path / "a")
    fresh = new(Growing)
    with pytest.raises(fl.CheckpointError, match=r"another shape: 0.seen: \(2,\) saved, \(0,\)"):
        fl.restore(tmp_path / "a", fresh)
    assert fresh.model[0].seen.shape == (0,) and fresh.model[0].w.item() == 0.0


class Ignoring(Growing):
    """It takes no value for its buffer."""

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict.pop(f"{prefix}seen", None)
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_module_that_keeps_its_own_buffer_is_refused(tmp_path):
    fl.save(train(new(Ignoring), steps=2), tmp_path / "a")
    with pytest.raises(fl.CheckpointError, match=r"another shape: 0\.seen"):
        fl.restore(tmp_path / "a", new(Ignoring))


class Hooked(Resizing):
    """A hook, which knows the module itself, changes it when a copy is loaded."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: self.seen.resize_(7))


class Renamed(nn.Module):
    """Its state_dict has names that no submodule has."""

    def __init__(self):
        super().__init__()
        self.inner = Growing()
        self.register_state_dict_post_hook(self.rename)

    @staticmethod
    def rename(module, state_dict, prefix, *_):
        for key in [*state_dict]:
            state_dict[key.replace("inner.", "outer.")] = state_dict.pop(key)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kind", [Hooked, Renamed])
def test_one_that_cannot_be_tried_is_refused_and_stays_as_it_was(kind, tmp_path):
    fl.save(train(new(kind), steps=2), tmp_path / "a")
    fresh = new(kind)
    with pytest.raises(fl.CheckpointError, match=r"another shape: .*seen: \(2,\) saved, \(0,\)"):
        fl.restore(tmp_path / "a", fresh)
    assert [b.shape for b in fresh.model.buffers()] == [(0,)]


class Replacing(nn.Module):
    """It makes another parameter when it is loaded, which the optimizer would not know."""

    def __init__(self, size=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.w * x).mean()

    def _load_from_state_dict(self, state_dict, prefix, *others):
        self.w = nn.Parameter(torch.zeros_like(state_dict[f"{prefix}w"]))
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_a_parameter_of_another_shape_is_refused(tmp_path):
    fl.save(train(new(lambda: Replacing(2)), steps=2), tmp_path / "a")
    with pytest.raises(fl.CheckpointError, match=r"another shape: 0.w: \(2,\) saved, \(1,\) here"):
        fl.restore(tmp_path / "a", new(Replacing))


def test_a_failed_restore_leaves_resized_buffers_as_they_were(tmp_path):
    fl.save(train(new(Resizing), steps=2), tmp_path / "a")
    model = nn.Sequential(Resizing())
    adam = fl.TrainState.create(model, torch.optim.Adam(model.parameters()), seed=0)
    with pytest.raises(fl.CheckpointError):
        fl.restore(tmp_path / "a", adam)
    assert model[0].seen.shape == (0,) and model[0].w.item() == 0.0


def test_lazy_modules_are_to_be_called_first(tmp_path):
    def lazy():
        model = nn.Sequential(nn.LazyLinear(1))
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)

    def learn(state, steps):
        step = fl.pipeline()(lambda model, batch: model(batch).mean())
        return fl.fit(step, state, [torch.ones(2, 3)] * 4, steps=steps, hooks=())

    fl.save(learn(lazy(), 2), tmp_path / "a")
    fresh = lazy()
    with pytest.raises(fl.CheckpointError, match=r"0.weight, 0.bias are not known.*model\(x\)$"):
        fl.restore(tmp_path / "a", fresh)
    fresh.model(torch.ones(2, 3))
    torch.manual_seed(0)
    resumed = learn(fl.restore(tmp_path / "a", fresh), 4)
    assert resumed.step == 4 and resumed.model[0].weight.shape == (1, 3)
