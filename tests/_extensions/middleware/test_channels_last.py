import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional
from toy_runs import fitted

import fnloop as fl
from fnloop._step import engine
from fnloop.testing import Problem, check_laws, law_accumulation, toy_loss

LAST = torch.channels_last
DRAW = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(n, 3, 5, 4, generator=DRAW), torch.randn(n, 2, generator=DRAW)) for n in (4, 4, 3)
]


class Net(nn.Module):
    """Convolutions, two of them one, one frozen; a buffer, and a weight of five dimensions."""

    def __init__(self):
        super().__init__()
        self.stem, self.one = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.again = self.one
        self.frozen = nn.Conv2d(4, 4, 1, bias=False).requires_grad_(False)
        self.deep = nn.Parameter(torch.ones(1, 2, 1, 1, 2))
        self.register_buffer("mask", torch.ones(1, 4, 3, 2))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.again(self.one(self.stem(x)).tanh()) * self.mask
        return self.head(self.frozen(x).mean((2, 3))) * self.deep.mean()


def loss_fn(model, batch):
    x, y = batch
    return functional.mse_loss(model(x), y)


def problem(make=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)):
    return Problem(Net, loss_fn, BATCHES, make)


def is_last(tensor):
    return tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


def test_the_loss_function_sees_images_and_a_model_in_channels_last():
    seen = []

    def look(model, batch):
        seen.append((is_last(batch["x"]), batch["y"].is_contiguous(), batch["name"], len(batch)))
        return loss_fn(model, (batch["x"], batch["y"]))

    state = problem().state()
    before = dict(state.model.named_parameters())
    step = fl.pipeline(fl.channels_last())(look)
    x, y = BATCHES[0]
    batch = {"x": x, "y": y, "name": "a"}
    state, _ = step(state, batch)
    step.evaluate(state, batch)
    assert seen == [(True, True, "a", 3)] * 2 and batch["x"] is x and x.is_contiguous()
    model = state.model
    assert dict(model.named_parameters()) == before and model.again is model.one
    kept = state.optimizer.state[model.one.weight]["momentum_buffer"]
    assert is_last(model.one.weight) and is_last(model.stem.weight) and is_last(kept)
    assert is_last(model.mask) and model.deep.is_contiguous() and model.head.weight.is_contiguous()


def test_convolutions_of_a_new_phase_are_converted():
    state, step = problem().state(), fl.pipeline(fl.channels_last())(loss_fn)
    state = fl.fit(step, state, BATCHES, epochs=1, hooks=(), phase="a")
    state.model.stem = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)
    state = attrs.evolve(state, optimizer=optimizer)
    assert not is_last(state.model.stem.weight)
    state = fl.fit(step, state, BATCHES, epochs=1, hooks=(), phase="b")
    assert is_last(state.model.stem.weight)


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("first", [(), (fl.channels_last(),)], ids=["without", "with"])
@pytest.mark.parametrize("then", [(), (fl.channels_last(),)], ids=["without", "with"])
def test_a_run_may_continue_with_and_without_it(settings, first, then, tmp_path):
    """A fused optimizer computes something else if its state is in another format."""
    wanted = problem(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **settings))

    def run(*members, state, **settings):
        return fitted(BATCHES, *members, loss_fn=loss_fn, state=state, **settings)

    whole = run(state=wanted.state(), epochs=2)
    state = run(*first, state=wanted.state(), steps=4)
    copied, path = fl.snapshot(state), fl.save(state, tmp_path / "saved")
    for start in (state, copied, fl.restore(path, wanted.state())):
        fresh = start is not state and start is not copied
        reached = run(*then, state=start, epochs=2)
        assert is_last(reached.model.one.weight) == bool(then or (first and not fresh))
        for mine, theirs in zip(reached.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pipe", [
    fl.pipeline(fl.channels_last()),
    fl.pipeline(fl.amp("bf16"), fl.channels_last(), fl.accumulate(2), fl.ema(0.9)),
], ids=repr)  # fmt: skip
def test_convolutions_keep_the_laws(pipe):
    check_laws(pipe, problem())


def test_convolutions_accumulate():
    batches = [(x.double(), y.double()) for x, y in BATCHES]
    cat = lambda many: tuple(torch.cat(part) for part in zip(*many, strict=True))
    wide = Problem(lambda: Net().double(), loss_fn, batches, cat=cat)
    law_accumulation(fl.pipeline(fl.channels_last()), wide, 2, fl.accumulate)


def test_a_sharded_model_is_refused(monkeypatch):
    monkeypatch.setattr(engine, "is_sharded", lambda model: True)
    with pytest.raises(NotImplementedError, match="before fully_shard"):
        fl.pipeline(fl.channels_last())(toy_loss)(problem().state(), torch.ones(1))
