"""Schedule-free optimizers: other weights in evaluation than in training."""

import contextlib
import importlib
import json

import pytest
import torch
from safetensors.torch import load_file

import fnloop as fl
from fnloop.testing import assert_same, small

_parts = importlib.import_module("fnloop._checkpoint.parts")


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024), with the modes of the package ``schedulefree``."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _swap(self, train):
        for group in self.param_groups:
            if group["train_mode"] is train:
                continue
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            c, lr, beta = 1 / (group["k"] + 1), group["lr"], group["beta"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, c).add_(p.grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1


def package_adamw(params):
    return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=0.1)


def new_state(problem, make=ScheduleFreeSGD):
    model = problem.state().model
    return fl.TrainState.create(model, make(model.parameters()), seed=0)


@pytest.mark.parametrize("evaluated_every", [1, 3])
@pytest.mark.parametrize("resumed", [True, False])
def test_it_equals_the_loop_by_hand_however_often_it_is_evaluated(
    evaluated_every, resumed, tmp_path
):
    problem = small()
    step, valid = fl.pipeline()(problem.loss_fn), problem.batches[0]
    loaders = {"train": problem.batches, "valid": [valid]}
    settings = {"hooks": (), "evaluate_every": fl.every(steps=evaluated_every) | fl.every(epochs=1)}
    state = new_state(problem)
    if resumed:
        state = fl.fit(step, state, loaders, epochs=1, **settings)
        fl.save(state, tmp_path / "one")
        state = fl.restore(tmp_path / "one", new_state(problem))
    state = fl.fit(step, state, loaders, epochs=2, **settings)

    by_hand = new_state(problem)
    model, optimizer = by_hand.model, by_hand.optimizer
    optimizer.train()
    for batch in [*problem.batches] * 2:
        optimizer.zero_grad()
        problem.loss_fn(model, batch)[0].backward()
        optimizer.step()
    for mine, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    optimizer.eval()
    assert state.history.latest("valid/loss") == problem.loss_fn(model, valid)[0].item()
    averaged = model[0].weight.detach().clone()
    assert step.evaluate(state, valid).loss.item() == problem.loss_fn(model, valid)[0].item()
    assert fl.evaluate(step, state, [valid])["loss"] == problem.loss_fn(model, valid)[0].item()
    (predicted,) = fl.predict(lambda m, batch: m[0].weight.detach().clone(), state, [valid])
    assert torch.equal(predicted, averaged)
    assert state.optimizer.param_groups[0]["train_mode"]


def test_a_bare_step_switches_to_training_and_an_evaluation_restores_either_mode():
    problem = small()
    step, state = fl.pipeline()(problem.loss_fn), new_state(small())
    state, _ = step(state, problem.batches[0])
    state, _ = step(state, problem.batches[1])
    state.optimizer.eval()
    before = [p.clone() for p in state.model.parameters()]
    step.evaluate(state, problem.batches[0])
    assert not state.optimizer.param_groups[0]["train_mode"]
    assert all(map(torch.equal, before, state.model.parameters()))


def test_each_of_several_optimizers_has_its_modes():
    problem = small()
    model = problem.state().model
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    named = {"free": ScheduleFreeSGD(weights), "rest": torch.optim.SGD(others, lr=0.1)}
    state, step = fl.TrainState.create(model, named, seed=0), fl.pipeline()(problem.loss_fn)
    for batch in problem.batches[:3]:
        state, _ = step(state, batch)
    before = [p.clone() for p in model.parameters()]
    (seen,) = fl.predict(lambda m, _: [p.clone() for p in m.parameters()], state, [0])
    differ = [not torch.equal(a, b) for a, b in zip(before, seen, strict=True)]
    assert differ == [p.ndim > 1 for p in model.parameters()]
    assert all(map(torch.equal, before, model.parameters()))
    assert named["free"].param_groups[0]["train_mode"]


@pytest.mark.parametrize("make", [ScheduleFreeSGD, package_adamw], ids=["small", "package"])
@pytest.mark.parametrize("background", [False, True])
def test_saved_weights_are_those_to_evaluate_and_training_continues_with_its_own(
    make, background, tmp_path
):
    problem = small()
    step, state = fl.pipeline(fl.ema(0.9))(problem.loss_fn), new_state(problem, make)
    keep = fl.checkpoint(tmp_path, background=background)
    state = fl.fit(step, state, problem.batches[:3], hooks=(keep,))
    path, training = fl.latest(tmp_path), [p.clone() for p in state.model.parameters()]
    (averaged,) = fl.predict(lambda m, _: [p.clone() for p in m.parameters()], state, [0])
    assert not any(map(torch.equal, training, averaged))

    def loaded(path, **settings):
        return [*fl.restore(path, new_state(problem, make), **settings).model.parameters()]

    assert all(map(torch.equal, averaged, loaded(path, only=("model",))))
    assert all(map(torch.equal, training, loaded(path, only=("model", "optimizer"))))
    assert all(map(torch.equal, training, loaded(path)))
    assert all(map(torch.equal, training, state.model.parameters()))
    plain = problem.state().model  # without fnloop
    plain.load_state_dict(load_file(path / "model.safetensors"))
    assert all(map(torch.equal, averaged, plain.parameters()))
    plain.load_state_dict(load_file(path / "training.safetensors"))
    assert all(map(torch.equal, training, plain.parameters()))
    assert_same(fl.restore(path, new_state(problem, make)), state)
    state = fl.fit(step, state, problem.batches[:3], epochs=2, hooks=())
    resumed = fl.restore(path, new_state(problem, make))
    assert_same(fl.fit(step, resumed, problem.batches[:3], epochs=2, hooks=()), state)

    for only in (("model",), ("trained",)):
        partial = fl.save(state, tmp_path / "partial", only=only)
        assert not (partial / "training.safetensors").exists()
        (averaged,) = fl.predict(lambda m, _: [p.clone() for p in m.parameters()], state, [0])
        assert all(map(torch.equal, averaged, loaded(partial, only=only)))


def test_a_checkpoint_from_before_has_the_weights_of_training_alone(tmp_path, monkeypatch):
    problem = small()
    state, _ = fl.pipeline()(problem.loss_fn)(new_state(problem), problem.batches[0])
    state, _ = fl.pipeline()(problem.loss_fn)(state, problem.batches[1])
    monkeypatch.setattr(_parts, "evaluation_weights", lambda _: contextlib.nullcontext(set()))
    path = fl.save(state, tmp_path / "a")
    assert json.loads((path / "manifest.json").read_text())["format_version"] == 1
    assert_same(fl.restore(path, new_state(problem)), state)


def test_weights_that_a_module_computes_and_tied_ones_are_saved_as_they_are_trained(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
            self.b, self.c = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
            self.c.weight = self.b.weight
            self._register_state_dict_hook(lambda module, found, *_: found.update(doubled(found)))

        def forward(self, x):
            return self.c(self.b(self.a(x)))

        def _load_from_state_dict(self, found, prefix, *rest):
            found.pop("doubled", None)
            super()._load_from_state_dict(found, prefix, *rest)

    def doubled(found):
        return {"doubled": 2 * found["b.weight"].detach()}

    def new():
        torch.manual_seed(0)
        net = Net()
        return fl.TrainState.create(net, ScheduleFreeSGD(net.parameters()), seed=0)

    step = fl.pipeline()(lambda model, x: model(x).square().mean())
    state = fl.fit(step, new(), [torch.ones(2, 3)] * 4, hooks=())
    path = fl.save(state, tmp_path / "a")
    model, training = (load_file(path / f"{name}.safetensors") for name in ("model", "training"))
    for found in (model, training):
        assert torch.equal(found["doubled"], 2 * found["b.weight"])
        assert torch.equal(found["c.weight"], found["b.weight"])
    assert not torch.equal(model["doubled"], training["doubled"])
    assert_same(fl.restore(path, new(), strict=False), state)


def test_an_evaluation_that_fails_restores_the_weights():
    problem = small()
    step, state = fl.pipeline()(problem.loss_fn), new_state(problem)
    for batch in problem.batches[:2]:
        state, _ = step(state, batch)
    before = [p.clone() for p in state.model.parameters()]
    with pytest.raises(TypeError):
        fl.evaluate(step, state, [None])
    assert all(map(torch.equal, before, state.model.parameters()))
    assert state.optimizer.param_groups[0]["train_mode"]
