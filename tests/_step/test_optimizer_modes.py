"""Schedule-free optimizers: other weights in evaluation than in training."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import load_file

import fnloop as fl
from fnloop._extensions.checkpoints import model
from fnloop.testing import Toy, assert_same, small, toy_loss


def weights(state):
    return [p.detach().clone() for p in state.model.parameters()]


def evaluated(state):
    """Return the weights that an evaluation has."""
    (found,) = fl.predict(lambda model, _: [p.clone() for p in model.parameters()], state, [0])
    return found


def equal(one, two):
    return [torch.equal(a, b) for a, b in zip(one, two, strict=True)]


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


def trained(n, *members, state=None):
    """Return the step, and the state after n updates of bare steps."""
    problem = small()
    step, state = fl.pipeline(*members)(problem.loss_fn), state or new_state(problem)
    for batch in problem.batches[:n]:
        state, _ = step(state, batch)
    return step, state


@pytest.mark.parametrize("evaluated_every", [1, 3])
def test_it_equals_the_loop_by_hand_however_often_it_is_evaluated(evaluated_every):
    problem = small()
    step, valid = fl.pipeline()(problem.loss_fn), problem.batches[0]
    loaders = {"train": problem.batches, "valid": [valid]}
    settings = {"hooks": (), "evaluate_every": fl.every(steps=evaluated_every) | fl.every(epochs=1)}
    state = fl.fit(step, new_state(problem), loaders, epochs=2, **settings)
    by = new_state(problem)
    by.optimizer.train()
    for batch in [*problem.batches] * 2:
        by.optimizer.zero_grad()
        problem.loss_fn(by.model, batch)[0].backward()
        by.optimizer.step()
    assert all(equal(weights(state), weights(by)))
    by.optimizer.eval()
    loss = problem.loss_fn(by.model, valid)[0].item()
    assert state.history.latest("valid/loss") == step.evaluate(state, valid).loss.item() == loss
    assert fl.evaluate(step, state, [valid])["loss"] == loss
    assert all(equal(evaluated(state), weights(by)))
    assert state.optimizer.param_groups[0]["train_mode"]


def test_a_bare_step_switches_to_training_and_an_evaluation_restores_either_mode():
    step, state = trained(2)
    before = weights(state)
    with pytest.raises(TypeError):  # also one that fails
        fl.evaluate(step, state, [None])
    assert all(equal(before, weights(state))) and state.optimizer.param_groups[0]["train_mode"]
    state.optimizer.eval()
    before = weights(state)
    step.evaluate(state, small().batches[0])
    assert not state.optimizer.param_groups[0]["train_mode"]
    assert all(equal(before, weights(state)))


def test_each_of_several_optimizers_has_its_modes():
    model = small().state().model
    free = ScheduleFreeSGD([p for p in model.parameters() if p.ndim > 1])
    rest = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1)
    state = fl.TrainState.create(model, {"free": free, "rest": rest}, seed=0)
    _, state = trained(3, state=state)
    before = weights(state)
    assert equal(before, evaluated(state)) == [p.ndim < 2 for p in model.parameters()]
    assert all(equal(before, weights(state)))
    assert free.param_groups[0]["train_mode"]


@pytest.mark.parametrize("make", [ScheduleFreeSGD, package_adamw], ids=["small", "package"])
@pytest.mark.parametrize("background", [False, True])
def test_saved_weights_are_those_to_evaluate_and_training_continues_with_its_own(
    make, background, tmp_path
):
    problem = small()
    step, batches = fl.pipeline(fl.ema(0.9))(problem.loss_fn), problem.batches[:3]
    hooks = (fl.checkpoint(tmp_path, background=background),)
    state = fl.fit(step, new_state(problem, make), batches, hooks=hooks)
    path, training, averaged = fl.latest(tmp_path), weights(state), evaluated(state)
    assert not any(equal(training, averaged))
    loaded = lambda path, **settings: fl.restore(path, new_state(problem, make), **settings)
    assert all(equal(averaged, weights(loaded(path, only=("model",)))))
    assert all(equal(training, weights(loaded(path, only=("model", "optimizer")))))
    assert all(equal(training, weights(state)))
    plain = problem.state()  # without fnloop
    for name, expected in (("model", averaged), ("training", training)):
        plain.model.load_state_dict(load_file(path / f"{name}.safetensors"))
        assert all(equal(expected, weights(plain)))
    assert_same(loaded(path), state)
    state = fl.fit(step, state, batches, epochs=2, hooks=())
    assert_same(fl.fit(step, loaded(path), batches, epochs=2, hooks=()), state)

    for only in (("model",), ("trained",)):
        partial = fl.save(state, tmp_path / "partial", only=only)
        assert not (partial / "training.safetensors").exists()
        assert all(equal(evaluated(state), weights(loaded(partial, only=only))))


def test_a_checkpoint_from_before_has_the_weights_of_training_alone(tmp_path, monkeypatch):
    _, state = trained(2)
    monkeypatch.setattr(model, "changed_for", lambda *_: ())
    monkeypatch.setattr(model, "view", lambda *_: contextlib.nullcontext())
    path = fl.save(state, tmp_path / "a")
    assert json.loads((path / "manifest.json").read_text())["format_version"] == 1
    assert_same(fl.restore(path, new_state(small())), state)


class Net(torch.nn.Module):
    """Weights that it computes, tied ones, and an entry of its state that it makes of others."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
        self.b, self.c = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.c.weight = self.b.weight
        double = lambda module, found, *_: found.update(doubled=2 * found["b.weight"].detach())
        self._register_state_dict_hook(double)

    def forward(self, x):
        return self.c(self.b(self.a(x)))

    def _load_from_state_dict(self, found, prefix, *rest):
        found.pop("doubled", None)
        super()._load_from_state_dict(found, prefix, *rest)


def test_weights_that_a_module_computes_and_tied_ones_are_saved_as_they_are_trained(tmp_path):
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


class TenMore(torch.optim.SGD):
    """SGD whose weights for an evaluation are those of training and ten."""

    def __init__(self, params):
        super().__init__(params, lr=1.0)
        self.is_training = True

    def _add(self, number):
        for p in self.param_groups[0]["params"]:
            p.data.add_(number)

    def train(self):
        self._add(0 if self.is_training else -10)
        self.is_training = True

    def eval(self):
        self._add(10 if self.is_training else 0)
        self.is_training = False


def test_the_best_weights_are_those_that_were_evaluated_and_training_continues_from_them():
    model = Toy(w=8.0)
    state = fl.TrainState.create(model, TenMore(model.parameters()), seed=0)
    step = fl.pipeline()(toy_loss)
    up, down = torch.tensor([1.0]), torch.tensor([-1.0])
    # The weight is 7, 6, 7, 8, and 10 more in evaluations; the loss of x = 1 is the weight.
    loaders = {"train": [up, up, down, down], "valid": [up]}
    hooks = (fl.restore_best("valid/loss"),)
    state = fl.fit(step, state, loaders, evaluate_every=fl.every(steps=1), hooks=hooks)
    assert state.history["valid/loss"] == (17.0, 16.0, 17.0, 18.0)
    assert fl.evaluate(step, state, [up])["loss"] == 16.0
    state, _ = step(state, up)
    assert state.model.w.item() == 5.0


def test_the_statistics_of_batchnorm_are_of_the_weights_that_an_evaluation_uses():
    linear, norm = torch.nn.Linear(1, 1, bias=False), torch.nn.BatchNorm1d(1)
    torch.nn.init.constant_(linear.weight, 1.0)
    model = torch.nn.Sequential(linear, norm)
    state = fl.TrainState.create(model, TenMore(linear.parameters()), seed=0)
    step = fl.pipeline()(lambda model, x: model(x).mean())
    # With a weight of 1 + 10, the batch of 1 and 3 has a mean of 22.
    state = fl.update_batchnorm(step, state, [torch.tensor([[1.0], [3.0]])])
    assert norm.running_mean.item() == 22.0
    assert linear.weight.item() == 1.0
