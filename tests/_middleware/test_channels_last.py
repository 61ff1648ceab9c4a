import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional

import fnloop as fl
from fnloop.testing import Problem, assert_same, check_laws, law_accumulation, toy_loss

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


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("first", [(), (fl.channels_last(),)], ids=["without", "with"])
@pytest.mark.parametrize("then", [(), (fl.channels_last(),)], ids=["without", "with"])
@pytest.mark.parametrize("fresh", [False, True], ids=["restored", "restored, new model"])
def test_a_run_may_continue_with_and_without_it(settings, first, then, fresh, tmp_path):
    """A fused optimizer computes something else if its state is in another format."""
    wanted = problem(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **settings))
    whole = fl.fit(fl.pipeline()(loss_fn), wanted.state(), BATCHES, epochs=2, hooks=())
    state = fl.fit(fl.pipeline(*first)(loss_fn), wanted.state(), BATCHES, steps=4, hooks=())
    fl.save(state, tmp_path / "saved")
    other = wanted.state() if fresh else fl.snapshot(state)
    other = fl.restore(tmp_path / "saved", other)
    other = fl.fit(fl.pipeline(*then)(loss_fn), other, BATCHES, epochs=2, hooks=())
    state = fl.fit(fl.pipeline(*then)(loss_fn), fl.snapshot(state), BATCHES, epochs=2, hooks=())
    assert is_last(other.model.one.weight) == bool(then or (first and not fresh))
    for reached in (state, other):
        for mine, theirs in zip(reached.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_it_equals_the_loop_by_hand_bit_for_bit():
    state = fl.fit(
        fl.pipeline(fl.amp("bf16"), fl.channels_last())(loss_fn),
        problem().state(),
        BATCHES,
        epochs=2,
        hooks=(),
    )
    by = problem().state()
    for p in by.model.parameters():
        p.data = p.data.to(memory_format=LAST) if p.ndim == 4 else p.data
    for x, y in BATCHES * 2:
        by.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(by.model, (x.to(memory_format=LAST), y))
        loss.backward()
        by.optimizer.step()
    for mine, theirs in zip(state.model.parameters(), by.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "pipe",
    [
        fl.pipeline(fl.channels_last()),
        fl.pipeline(fl.amp("bf16"), fl.channels_last(), fl.accumulate(2), fl.ema(0.9)),
    ],
    ids=repr,
)
def test_convolutions_keep_the_laws(pipe):
    check_laws(pipe, problem())


def test_convolutions_accumulate():
    in_double = lambda: Net().double()
    batches = [(x.double(), y.double()) for x, y in BATCHES]
    cat = lambda many: tuple(torch.cat(part) for part in zip(*many, strict=True))
    wide = attrs.evolve(problem(), model=in_double, batches=batches, cat=cat)
    law_accumulation(fl.pipeline(fl.channels_last()), wide, 2, fl.accumulate)


def test_a_checkpoint_is_the_same_but_for_the_mark(tmp_path):
    step = fl.pipeline(fl.channels_last())(loss_fn)
    state = fl.fit(step, problem().state(), BATCHES, hooks=())
    fl.save(state, tmp_path / "a")
    again = fl.restore(tmp_path / "a", problem().state())
    assert not is_last(again.model.one.weight)
    again = fl.fit(step, again, BATCHES, epochs=2, hooks=())
    assert is_last(again.model.one.weight)
    assert_same(again, fl.fit(step, state, BATCHES, epochs=2, hooks=()))


def test_a_sharded_model_is_refused(monkeypatch):
    from fnloop._middleware import precision

    monkeypatch.setattr(precision, "is_sharded", lambda model: True)
    with pytest.raises(NotImplementedError, match="before fully_shard"):
        fl.pipeline(fl.channels_last())(toy_loss)(problem().state(), torch.ones(1))
