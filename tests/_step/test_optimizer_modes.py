"""Schedule-free optimizers: other weights in evaluation than in training."""

import pytest
import torch

import fnloop as fl
from fnloop.testing import small


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


def new_state(problem):
    model = problem.state().model
    return fl.TrainState.create(model, ScheduleFreeSGD(model.parameters()), seed=0)


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


def test_saved_weights_are_those_to_evaluate_and_a_whole_checkpoint_those_to_train(tmp_path):
    problem = small()
    step, state = fl.pipeline()(problem.loss_fn), new_state(problem)
    for batch in problem.batches[:3]:
        state, _ = step(state, batch)
    training = [p.clone() for p in state.model.parameters()]
    (averaged,) = fl.predict(lambda m, _: [p.clone() for p in m.parameters()], state, [0])
    assert not all(map(torch.equal, training, averaged))

    def loaded(**settings):
        path = fl.save(state, tmp_path / "saved", **settings)
        return list(fl.restore(path, new_state(problem), **settings).model.parameters())

    assert all(map(torch.equal, averaged, loaded(only=("model",))))
    assert all(map(torch.equal, training, loaded()))
    assert all(map(torch.equal, training, state.model.parameters()))


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
