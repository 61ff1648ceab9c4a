"""alternate(batch="late"): a batch is fetched when its turn comes, and nothing else changes."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fnloop as fl


def made(order=("a", "b"), batch="late", members=(), **around):
    """Return a state, and a step each of whose turns lowers its parameter by the mean of x."""
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    optimizers = {k: torch.optim.SGD([model[k]], lr=1.0) for k in "ab"}
    of = lambda k: fl.pipeline(*members)(lambda model, x: (model[k] * x).mean())
    step = fl.alternate({k: of(k) for k in "ab"}, order=order, batch=batch)
    return fl.TrainState.create(model, optimizers, seed=0), step


def values(model):
    return model["a"].item(), model["b"].item()


def acting(model, n, seen):
    """Yield batches that depend on the model, and note what it was."""

    def batches():
        for _ in range(n):
            seen.append(values(model))
            yield torch.tensor([1.0 - model["a"].item()])

    return batches


@pytest.mark.parametrize(("n", "right"), [
    (4, [(0, 0), (-1, 0), (-1, -2), (-3, -2)]),
    (3, [(0, 0), (-1, 0), (-1, -2)]),  # the last round has one turn
])  # fmt: skip
def test_a_batch_is_made_with_the_model_as_the_turn_before_has_left_it(n, right):
    """x is 1 - a: 1, 2, 2, 4."""
    (state, step), seen = made(), []
    state = fl.fit(step, state, acting(state.model, n, seen), hooks=())
    assert seen == right
    assert (state.step, dict(state.updates)) == (2, {"a": 2, "b": 2 if n == 4 else 1})


def test_the_same_batch_is_not_fetched_again():
    rule = {"a": "late", "b": "same"}
    (state, step), seen = made(("a", "b", "a"), rule), []
    fl.fit(step, state, acting(state.model, 4, seen), hooks=())
    assert seen == [(0, 0), (-1, -1), (-3, -1), (-7, -5)]


class Drawn(Dataset):
    """Samples that draw from every generator."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return index + torch.rand(1)[0] + random.random()


def drawing(k):
    return lambda model, x: (model[k] * x * torch.rand(1) * random.random()).mean()


def drawn(batch, **settings):
    torch.manual_seed(0)
    model = nn.ParameterDict({k: nn.Parameter(torch.ones(())) for k in "ab"})
    optimizers = {k: torch.optim.SGD([model[k]], lr=0.1) for k in "ab"}
    step = fl.alternate(
        {k: fl.pipeline()(drawing(k)) for k in "ab"}, order=("a", "b", "b"), batch=batch
    )
    state = fl.TrainState.create(model, optimizers, seed=0)
    return step, state, DataLoader(Drawn(), batch_size=2, shuffle=True)


def test_what_does_not_depend_on_the_model_is_the_same_early_or_late():
    """The draws of torch are: 6 batches an epoch make 2 rounds."""
    model = lambda state: values(state.model)
    loss = lambda k: lambda model, x: (model[k] * x * torch.rand(1)).mean()
    found = []
    for batch in ("next", "late"):
        _, state, _ = drawn(batch)
        step = fl.alternate(
            {k: fl.pipeline()(loss(k)) for k in "ab"}, order=("a", "b", "b"), batch=batch
        )
        loader = DataLoader(torch.arange(11.0), batch_size=2, shuffle=True)
        found.append(fl.fit(step, state, loader, epochs=2, hooks=()))
    assert model(found[0]) == model(found[1])
    assert [r.metrics for r in found[0].history] == [r.metrics for r in found[1].history]


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_a_run_that_is_cut_between_rounds_continues_bit_for_bit(cut, tmp_path):
    step, state, loader = drawn("late")
    whole = fl.fit(step, state, loader, epochs=3, hooks=())
    step, state, loader = drawn("late")
    fl.save(fl.fit(step, state, loader, steps=cut, hooks=()), tmp_path / "a")
    step, state, loader = drawn("late")
    state = fl.restore(tmp_path / "a", state)
    state = fl.fit(step, state, loader, epochs=3, hooks=())
    assert values(state.model) == values(whole.model) and state.step == whole.step == 6
    assert state.items == whole.items == 33


class Acting:
    """A stream that acts with the model, and says where it is."""

    def __init__(self, model):
        self.model, self.at = model, 0

    def __iter__(self):
        while self.at < 7:
            self.at += 1
            yield torch.tensor([1.0 - self.model["a"].item() / 8])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, saved):
        self.at = saved["at"]


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 6])
def test_a_stream_that_knows_its_position_continues_there(cut, tmp_path):
    """Rounds of 2 batches: 4 in an epoch of 7."""
    state, step = made()
    whole = fl.fit(step, state, Acting(state.model), epochs=2, hooks=())
    state, step = made()
    fl.save(fl.fit(step, state, Acting(state.model), steps=cut, hooks=()), tmp_path / "a")
    state, step = made()
    state = fl.restore(tmp_path / "a", state)
    state = fl.fit(step, state, Acting(state.model), epochs=2, hooks=())
    assert state.step == whole.step == 8 and values(state.model) == values(whole.model)


def test_a_loader_that_fails_between_turns_leaves_a_state_that_cannot_be_used():
    state, step = made()

    def failing():
        yield torch.ones(1)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fl.fit(step, state, failing, hooks=())
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.snapshot(state)


def test_a_buffer_that_is_filled_again_may_be_given():
    """Nothing holds a batch while the next one is fetched; with "next" it is refused."""
    buffer = torch.zeros(1)

    def refilled():
        for i in range(6):
            yield buffer.fill_(i)

    state, step = made()
    assert values(fl.fit(step, state, refilled, hooks=()).model) == (-(0 + 2 + 4), -(1 + 3 + 5))
    state, step = made(batch="next")
    with pytest.raises(ValueError, match="reuses a tensor"):
        fl.fit(step, state, refilled, hooks=())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: made(batch={"a": "late", "b": "next"}), 'write "late" for both'),
    (lambda: made(members=(fl.accumulate(2),)), "leave accumulate out"),
    (lambda: made(batch="later"), "later"),
])  # fmt: skip
def test_what_cannot_be_late_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_prefetch_is_refused():
    state, step = made()
    with pytest.raises(ValueError, match="prefetch=2 would fetch it ahead"):
        fl.fit(step, state, [torch.ones(1)] * 4, prefetch=2, hooks=())
