"""Hooks that look at the model: ``evaluating``, and the warning for one that is without it."""

import random

import attrs
import pytest
import torch
from sample_hooks import stop_at
from torch import nn
from toy_runs import of

import fnloop as fl
from fnloop._core import state as states
from fnloop._core.types import name_of
from fnloop.testing import assert_same

BATCHES = [torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [6.0]])]
STEP = fl.pipeline()(lambda model, batch: model(batch).square().mean())
EPOCH = fl.every(epochs=1)


class Seen(nn.Module):
    """Counts its calls in a buffer, and has a mask that no call moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1))

    def forward(self, x):
        self.calls += 1
        return x * self.mask


def start(*parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1), *(parts or (nn.BatchNorm1d(1), nn.Dropout(0.5))))
    return of(model, lr=0.1)


def fit(*hooks, state=None, epochs=2, **settings):
    return fl.fit(STEP, state or start(), BATCHES, epochs=epochs, hooks=hooks, **settings)


def call(state):
    """Return what the model makes of five equal inputs."""
    with torch.no_grad():
        return state.model(torch.ones(5, 1))


def looks(state):
    call(state)
    return state


# --- evaluating


def test_in_the_block_the_model_is_as_in_an_evaluation_and_afterwards_as_before():
    state = start(nn.BatchNorm1d(1), nn.Dropout(0.5), Seen(), nn.Dropout(0.5).eval())
    before, draws = fl.snapshot(state), (torch.rand(1), random.random())
    torch.manual_seed(7)
    expected = torch.rand(2)[1].item()
    torch.manual_seed(7)
    torch.rand(1)
    random.seed(7)
    with fl.evaluating(state) as model:
        assert model is state.model and not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
        assert len({*call(state).flatten().tolist()}) == 1
        drawn = torch.rand(1), random.random()
    with fl.evaluating(state):  # a function of the seed of the state
        assert (torch.rand(1), random.random()) == drawn != draws
    assert torch.rand(1).item() == expected and random.random() == random.Random(7).random()
    assert [part.training for part in state.model] == [True] * 4 + [False]
    assert torch.is_grad_enabled() and state.model.training
    assert_same(state, before)


def test_an_exception_leaves_all_as_before_too():
    state = start(nn.BatchNorm1d(1), Seen())
    before = fl.snapshot(state)
    with pytest.raises(ZeroDivisionError), fl.evaluating(state) as model:
        model.train()
        call(state)
        state.model[2].mask = torch.zeros(1)
        1 / 0  # noqa: B018
    assert torch.is_grad_enabled() and all(part.training for part in state.model.modules())
    assert_same(state, before)
    new, _ = STEP(state, BATCHES[0])
    with pytest.raises(fl.StaleStateError), fl.evaluating(state):
        pass
    with fl.evaluating(new):
        pass


def test_a_hook_with_it_changes_nothing_and_is_not_named(caplog):
    """BatchNorm, dropout, and a buffer that evaluation moves too."""
    seen = []

    def samples(state):
        with fl.evaluating(state) as model:
            seen.append(model(torch.ones(5, 1)).flatten().tolist())
        return state

    parts = lambda: (nn.BatchNorm1d(1), nn.Dropout(0.5), Seen())
    plain, state = fit(state=start(*parts())), fit(samples, state=start(*parts()))
    assert_same(state, plain)
    assert len(seen) == 4 and all(len({*row}) == 1 for row in seen)
    assert "evaluating" not in caplog.text


def test_it_has_the_weights_that_an_evaluation_uses():
    schedulefree = pytest.importorskip("schedulefree")
    seen = {"evaluated": [], "in the block": [], "trained": []}

    def loss_fn(model, batch):
        if not model.training:
            seen["evaluated"].append(model.weight.item())
        return (model(batch) - 1).square().mean()

    def look(state):
        seen["trained"].append(state.model.weight.item())
        with fl.evaluating(state) as model:
            seen["in the block"].append(model.weight.item())
        assert state.model.weight.item() == seen["trained"][-1]
        return state

    state = of(nn.Linear(1, 1), schedulefree.SGDScheduleFree, lr=0.1)
    step, loaders = fl.pipeline()(loss_fn), (BATCHES, BATCHES[:1])
    fl.fit(step, state, loaders, epochs=3, hooks=(EPOCH(look),))
    assert seen["in the block"] == seen["evaluated"] != seen["trained"]


# --- the warning


NAMED = "the hook looks has moved the buffer "


class Looks(fl.Hook):
    def __call__(self, state):
        return looks(state)

    def __repr__(self):
        return "looks"


@pytest.mark.parametrize("hook", [
    looks, EPOCH(looks), fl.once(looks), fl.when(lambda state: state.step > 1)(fl.once(looks)),
    fl.on_main(looks), EPOCH(fl.on_main(looks)), Looks(), EPOCH(Looks()),
], ids=name_of)  # fmt: skip
def test_a_hook_that_moves_statistics_is_named_once(hook, caplog):
    fit(hook, epochs=4)
    assert [text for text in caplog.messages if "with fl.evaluating(state): ..." in text] == [
        text for text in caplog.messages if f"{NAMED}1.num_batches_tracked, as training" in text
    ]
    assert caplog.text.count("fl.evaluating") == 1


@pytest.mark.parametrize(("part", "name"), [
    (Seen(), "1.calls"), (nn.utils.parametrizations.spectral_norm(nn.Linear(1, 1)), "1.param"),
], ids=["Seen", "spectral_norm"])  # fmt: skip
def test_so_is_one_that_moves_another_buffer_that_updates_move(part, name, caplog):
    fit(looks, state=start(part))
    assert f"{NAMED}{name}" in caplog.text


MEANT = {
    "a mask": lambda state: (state.model[2].mask.fill_(0.5) and state) or state,
    "a mask that is replaced": lambda state: setattr(
        state.model[2], "mask", torch.ones(1) / state.step) or state,
    "update_batchnorm": lambda state: fl.update_batchnorm(STEP, state, BATCHES),
    "evaluate": lambda state: fl.evaluate(STEP, state, BATCHES) and state,
    "predict": lambda state: [*fl.predict(lambda m, b: m(b).sum(), state, BATCHES)] and state,
    "a snapshot": lambda state: call(fl.snapshot(state)) is None or state,
    "settings": lambda state: attrs.evolve(state, extra={"a": 1}),
}  # fmt: skip


@pytest.mark.parametrize("hook", MEANT.values(), ids=MEANT)
def test_a_hook_that_means_it_or_moves_none_is_not_named(hook, caplog):
    fit(hook, state=start(nn.BatchNorm1d(1), Seen()))
    assert "has moved the buffer" not in caplog.text


def test_nor_is_one_that_restores(tmp_path, caplog, back_once):
    def restores(state):
        if state.step == 1:
            fl.save(state, tmp_path / "a")
        return fl.restore(tmp_path / "a", state, only=("model",)) if state.step == 3 else state

    fit(restores, back_once, fl.restore_best("train/loss"), fl.checkpoint(tmp_path / "b"))
    assert "has moved the buffer" not in caplog.text


def test_where_no_hook_is_called_no_buffer_is_looked_at(monkeypatch):
    looked = []
    look = states.BufferWatch.look
    monkeypatch.setattr(states.BufferWatch, "look", lambda self: looked.append(0) or look(self))
    fit(fl.every(epochs=3)(looks), fl.halt_on_nonfinite(), stop_at(99))
    of_the_predicate = len(looked)
    assert not of_the_predicate
    fit(EPOCH(looks))
    assert len(looked) == 1 + 2 * 2  # at the first call; before and after each
