"""The optimizers and schedulers of torch resume bit for bit."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop import schedules
from fnloop.testing import Toy, assert_same, small

ONE = torch.ones(1)
OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3, "history_size": 4},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS.items())
def test_the_state_of_every_torch_optimizer_is_restored(tmp_path, name, settings):
    problem = small()
    make = fl.pipeline()(problem.loss_fn)

    def new():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)
        ).double()
        return fl.TrainState.create(
            model, getattr(torch.optim, name)(model.parameters(), **settings), seed=0
        )

    whole = fl.fit(make, new(), problem.batches, epochs=2, hooks=())
    paused = fl.fit(make, new(), problem.batches, steps=5, hooks=())
    resumed = fl.restore(fl.save(paused, tmp_path / "a"), new())
    assert_same(fl.fit(make, resumed, problem.batches, epochs=2, hooks=()), whole)


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # a warning of SequentialLR
@pytest.mark.parametrize(
    "factory",
    [
        lambda opt, run: lr_scheduler.LambdaLR(opt, lambda i: 0.5**i),
        lambda opt, run: lr_scheduler.SequentialLR(  # MultiStepLR keeps a Counter
            opt,
            [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.MultiStepLR(opt, [1, 3, 3, 4])],
            milestones=[2],
        ),
    ],
    ids=["LambdaLR", "SequentialLR"],
)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_torch_schedulers_resume_with_a_number_or_a_tensor_as_learning_rate(tmp_path, factory, lr):
    problem = small()
    make = fl.pipeline(fl.torch_scheduler(factory))(problem.loss_fn)

    def new():
        model = problem.state().model
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        return fl.TrainState.create(
            model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), seed=0
        )

    whole = fl.fit(make, new(), problem.batches, epochs=3, hooks=())
    for split in (1, 3, 5):
        half = fl.fit(make, new(), problem.batches, steps=split, hooks=())
        resumed = fl.restore(fl.save(half, tmp_path / "a"), new())
        assert_same(fl.fit(make, resumed, problem.batches, epochs=3, hooks=()), whole)


def test_lbfgs_reaches_the_minimum_of_a_quadratic_in_one_update():
    model = Toy(w=5.0)
    state = fl.TrainState.create(
        model, torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    )
    make = fl.pipeline()(lambda model, batch: (model(batch) - 3).square().mean())
    state, out = make(state, ONE)
    assert state.model.w.item() == pytest.approx(3.0)
    assert (out.loss.item(), state.step) == (4.0, 1)


def test_sparse_adam_resumes(tmp_path):
    def new():
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        return fl.TrainState.create(model, torch.optim.SparseAdam(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).square().mean())
    data = [torch.tensor([0, 1]), torch.tensor([1, 4])]
    whole = fl.fit(make, new(), data, epochs=2, hooks=())
    half = fl.restore(fl.save(fl.fit(make, new(), data, steps=3, hooks=()), tmp_path / "a"), new())
    assert_same(fl.fit(make, half, data, epochs=2, hooks=()), whole)


def test_groups_schedules_and_parameters_of_the_loss_are_restored(tmp_path):
    def new():
        torch.manual_seed(0)
        model, scale = nn.Linear(1, 1), nn.Parameter(torch.zeros(()))
        groups = [
            {"params": [model.weight], "lr": 0.5},
            {"params": [model.bias, scale], "lr": 0.25},
        ]
        return fl.TrainState.create(
            model, torch.optim.SGD(groups, lr=1.0, momentum=0.9), seed=0
        ), scale

    def fit(state, scale, **kwargs):
        make = fl.pipeline(fl.schedule(schedules.exponential(0.5)))(
            lambda m, b: (m(b) * (scale + 1)).mean()
        )
        return fl.fit(make, state, [torch.ones(1, 1)] * 4, hooks=(), **kwargs)

    state, scale = new()
    whole = fit(state, scale)
    state, other = new()
    path = fl.save(fit(state, other, steps=2), tmp_path / "a")
    state, third = new()
    resumed = fit(fl.restore(path, state), third)
    assert_same(resumed, whole)
    assert torch.equal(third, scale) and scale.item() != 0
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [0.5 / 8, 0.25 / 8]
