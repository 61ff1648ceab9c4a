"""Records, ``evaluate`` and ``predict``."""

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from evaluation_draws import CALLS, draws_in
from loop_cases import ONE, fit
from torch import nn
from torch.utils.data import DataLoader
from toy_runs import of

import fnloop as fl
from fnloop.testing import toy, toy_loss
from fnloop.testing._laws import assert_equal


@pytest.mark.parametrize(("when_to", "evaluated", "records"), [
    (fl.every(epochs=1), [3, 6, 9, 12], [3, 6, 9, 12]),
    (fl.every(epochs=2), [6, 12], [3, 6, 9, 12]), (fl.every(epochs=9), [], [3, 6, 9, 12]),
    (fl.every(epochs=0.5), [2, 3, 5, 6, 8, 9, 11, 12], [2, 3, 5, 6, 8, 9, 11, 12]),
    (fl.every(steps=5), [5, 10], [3, 5, 6, 9, 10, 12]),
    (fl.when(lambda state: state.step in (4, 12)), [4, 12], [3, 4, 6, 9, 12]),
    (None, [], [3, 6, 9, 12]),
], ids=repr)  # fmt: skip
def test_evaluation_happens_when_it_is_due_and_each_epoch_has_a_record(when_to, evaluated, records):
    """The batches are uneven, and the means those of all items: of 1, 2, 3; 10; 4."""
    data = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0]), torch.tensor([4.0])]
    state = fit(toy(w=1.0, lr=0.0), (data, data), epochs=4, evaluate_every=when_to)
    assert [r.step for r in state.history] == records
    found = [r for r in state.history if "valid/loss" in r.metrics]
    assert [r.step for r in found] == evaluated
    assert {r.metrics["valid/loss"] for r in found} <= {4.0}
    mean = {1: 2.0, 2: 4.0, 0: 4.0}  # since the epoch began
    assert all(r.metrics["train/loss"] == mean[r.step % 3] for r in state.history)


@pytest.mark.parametrize("weights", [
    (2, 2, 4), (torch.tensor(2), 2, 4), (2, torch.tensor(2), 4), (2, 2, torch.tensor(4)),
    (2, 0, 2, torch.tensor(0), 4), (torch.tensor(2.0), torch.tensor(2), torch.tensor(4)),
], ids=repr)  # fmt: skip
def test_an_evaluation_weighs_batches_by_numbers_and_by_tensors(weights):
    """(1 × 2 + 3 × 2 + 5 × 4) / 8 = 3.5; a batch without items does not count."""
    losses = iter([1.0, 3.0, 5.0])

    def loss_fn(model, weight):
        return torch.tensor(next(losses) if weight else 99.0), {"weight": weight}

    assert fl.evaluate(fl.pipeline()(loss_fn), toy(), [*weights]) == {"loss": 3.5}


def test_evaluating_a_new_state_does_not_create_a_scheduler():
    warm = fl.torch_scheduler(lambda opt, run: torch.optim.lr_scheduler.ConstantLR(opt, 0.1))
    state = toy(lr=1.0)
    fl.evaluate(fl.pipeline(warm)(toy_loss), state, [ONE])
    assert (state.optimizer.param_groups[0]["lr"], dict(state.slots)) == (1.0, {})


def test_an_evaluation_does_not_call_set_epoch():
    class Told(torch.utils.data.TensorDataset):
        def set_epoch(self, epoch):
            told.append(epoch)

    told = []
    data = torch.utils.data.DataLoader(Told(torch.ones(2)))
    first = fl.pipeline()(lambda model, batch: toy_loss(model, batch[0]))
    fl.evaluate(first, toy(), data)
    fl.fit(first, toy(), ([[ONE]], data), epochs=2, hooks=())
    assert told == []


def test_predict_is_lazy_and_in_order():
    asked = []

    def batches():
        for x in (1.0, 2.0, 3.0):
            asked.append(x)
            yield torch.tensor([x])

    results = fl.predict(lambda model, batch: model(batch).item(), toy(w=2.0), batches)
    assert next(results) == 2.0 and asked == [1.0]
    assert list(results) == [4.0, 6.0]


def test_between_predictions_the_model_is_unchanged():
    state = toy()
    for flags in fl.predict(lambda m, x: (m.training, torch.is_grad_enabled()), state, [ONE, ONE]):
        assert flags == (False, False)
        assert state.model.training and torch.is_grad_enabled()


def kept_by_the_caller(state):
    """Return what a prediction leaves as it is: modes, buffers, and where all generators are."""
    model, numpy = state.model, np.random.get_state()
    return (
        [module.training for module in model.modules()], torch.is_grad_enabled(),
        {name: b.tolist() for name, b in model.named_buffers()},
        torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2:],
    )  # fmt: skip


def draw_all(count=1):
    return [(torch.rand(()).item(), random.random(), np.random.randn()) for _ in range(count)]


@pytest.mark.parametrize("make", [list, DataLoader], ids=["a list", "rows read at once"])
def test_each_prediction_draws_numbers_of_its_own(make):
    """The caller's generators are put back after each, and the next one may not begin with them."""
    batches = make(torch.zeros(4, 1))
    found = [fl.predict(lambda model, batch: draw_all()[0], toy(), batches) for _ in range(2)]
    drawn, again = map(list, found)
    assert drawn == again and all(len({*each}) == 4 for each in zip(*drawn, strict=True))


def freeze_one(state):
    state.model[0].eval()


def evaluate_all(state):
    state.model.eval()


def replace_a_module(state):
    state.model[1] = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2)).eval()


def move_statistics(state):
    state.model(torch.randn(4, 2))


def write_to_buffers(state):
    with torch.no_grad():
        state.model[0].running_mean += 1
    state.model[0].running_var.data.fill_(3.0)  # torch counts no change


def replace_a_buffer(state):
    state.model[0].running_mean = torch.full((2,), 7.0)


ACTS = {
    "nothing": lambda state: None,
    "draws": lambda state: draw_all(),
    "seeds": lambda state: (torch.manual_seed(1), random.seed(1), np.random.seed(1)),
    "switches gradients off": lambda state: torch.set_grad_enabled(False),
    **{f.__name__: f for f in (freeze_one, evaluate_all, replace_a_module)},
    **{f.__name__: f for f in (move_statistics, write_to_buffers, replace_a_buffer)},
}


@pytest.mark.parametrize("does", ["nothing", "draws", "moves buffers", "changes modes", "all"])
@pytest.mark.parametrize("act", ACTS)
def test_between_two_predictions_all_is_as_the_caller_has_left_it(does, act):
    """Also where a prediction draws, moves buffers or changes modes, at every batch or at one."""

    def predicted(model, batch):
        n = int(batch)
        assert not torch.is_grad_enabled() and not any(m.training for m in model.modules())
        if does in ("draws", "all"):
            draw_all(2)
        if does in ("moves buffers", "all") and n:
            model[0].train()(torch.ones(2, 2))
        if does in ("changes modes", "all"):
            model[1].train()
            torch.set_grad_enabled(True)
        return torch.rand(()).item()

    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
    batches = [torch.tensor(float(n)) for n in range(6)]
    draws = [*fl.predict(lambda model, batch: torch.rand(()).item(), state, batches)]
    found, before = [], kept_by_the_caller(state)
    for result in fl.predict(predicted, state, batches[:5]):
        found.append(result)
        assert kept_by_the_caller(state) == before
        if len(found) != 2:
            ACTS[act](state)
        before = kept_by_the_caller(state)
    assert kept_by_the_caller(state) == before
    assert does in ("draws", "all") or found == draws[:5]
    torch.set_grad_enabled(True)


def test_what_torch_does_not_count_as_a_change_stays_too_where_predictions_move_buffers():
    norm = nn.BatchNorm1d(2)
    state = fl.TrainState.create(norm, torch.optim.SGD(norm.parameters()), seed=0)
    results = fl.predict(lambda model, x: model.train()(x).sum(), state, [torch.eye(2)] * 3)
    for n, _ in enumerate(results):
        assert norm.running_var.tolist() == [float(n or 1)] * 2
        norm.running_var.data.fill_(n + 1)


def test_a_prediction_that_is_left_in_the_middle_leaves_all_as_it_was():
    state, drawn = watcher(), lambda model, batch: (draw_all(), model(batch))
    before = kept_by_the_caller(state)
    results = fl.predict(drawn, state, [*XS, *XS])
    next(results), next(results)
    assert kept_by_the_caller(state) == before
    results.close()
    assert kept_by_the_caller(state) == before


class Counted(nn.Module):
    """Counts how often its mode is set."""

    def __init__(self):
        super().__init__()
        self.w, self.calls = nn.Parameter(torch.ones(())), []

    def train(self, mode=True):
        self.calls.append(mode)
        return super().train(mode)


def test_a_module_with_a_mode_of_its_own_is_told_before_and_after_each_batch():
    model = Counted()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
    assert [*fl.predict(lambda model, x: model.training, state, [ONE, ONE])] == [False, False]
    assert model.calls == [False, True] * 3 and model.training  # and where the loader ends


# --- buffers that a model updates in evaluation mode


class Watcher(nn.Module):
    """Its output depends on buffers that its forward updates in both modes, each in another way."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.register_buffer("calls", torch.zeros(()))  # in place
        self.register_buffer("center", torch.zeros(1))  # by another tensor
        self.register_buffer("seen", torch.zeros(0))  # resized, as observers do
        self.register_buffer("old", torch.zeros(1))  # by tensor.data = ...
        self.register_buffer("total", self.calls)  # the same tensor twice
        self.register_buffer("mask", torch.ones(1).expand(3), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.center = self.center * 0.5 + x.mean()
        self.seen.resize_(int(self.calls)).fill_(x[0].item())
        self.old.data = torch.cat((self.old, x))[:2]
        self.norm.train()(x.reshape(-1, 1))
        if not self.training:
            self.register_buffer("cache", torch.ones(1))
        return self.w * (x.mean() + self.calls + self.center.sum() + self.norm.running_mean.sum())


XS = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 3.0])]


def watched_loss(model, batch):
    if batch.mean() > 9:
        raise OSError("the disk is gone")
    return model(batch)


def watcher(made=Watcher):
    return of(made(), lr=0.1)


def buffers_of(state):
    """Return the buffers, with their addresses but for the one that torch gives new memory."""
    found = dict(state.model.named_buffers(remove_duplicate=False))
    at = {k: b.data_ptr() for k, b in found.items() if k != "seen"}
    return {k: (id(b), at.get(k), b.shape, b.tolist()) for k, b in found.items()}


WATCHED = fl.pipeline()(watched_loss)
EVALUATIONS = {
    "evaluate": lambda state, loader, loss: fl.evaluate(fl.pipeline()(loss), state, loader),
    "predict": lambda state, loader, loss: [*fl.predict(loss, state, loader)],
    "one batch": lambda state, loader, loss: WATCHED.evaluate(state, XS[0]),
    "summary": lambda state, loader, loss: fl.summary(state, XS[0]),
}


@pytest.mark.parametrize(("name", "raised"), [
    *((name, None) for name in EVALUATIONS),
    *itertools.product(("evaluate", "predict"), (OSError, KeyboardInterrupt)),
])  # fmt: skip
def test_an_evaluation_puts_buffers_back_also_where_it_fails(name, raised):
    def failing(model, batch):
        if len(batch) == 1:
            raise raised
        return model(batch)

    state, _ = WATCHED(watcher(), XS[0])
    before = buffers_of(state)
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        EVALUATIONS[name](state, [*XS, torch.ones(1)] if raised else XS, failing)
    assert buffers_of(state) == before


def test_within_an_evaluation_buffers_change_and_between_predictions_they_do_not():
    state = watcher()
    calls = lambda model, x: (model(x), model.calls.item())[1]
    assert [*fl.predict(calls, state, XS)] == [1.0, 1.0]
    seen = []
    fl.evaluate(fl.pipeline()(lambda m, x: (m(x), seen.append(m.calls.item()))[0]), state, XS)
    assert seen == [1.0, 2.0] and state.model.calls.item() == 0.0


class Teacher(nn.Module):
    """As in DINO, a centre is taken off that each forward moves."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("center", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.center.mul_(0.5).add_(x.mean(), alpha=0.5)
        return self.w * (x.mean() - 2 * self.center)


@pytest.mark.parametrize(("made", "members"), [
    (Watcher, ()), (Watcher, (fl.skip_nonfinite(),)), (Teacher, ()),
    (Teacher, (fl.ema(0.5), fl.swa(1))), (Teacher, (fl.compiled(backend="eager"),)),
    (Teacher, (fl.compiled(backend="aot_eager"), fl.ema(0.5, evaluate="only"))),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("every", [fl.every(steps=1), fl.every(epochs=1)], ids=repr)
def test_training_is_the_same_bit_for_bit_with_and_without_evaluations(made, members, every):
    step = fl.pipeline(*members)(watched_loss)
    given = {"epochs": 2, "hooks": (), "evaluate_every": every}
    one = fl.fit(step, watcher(made), {"train": XS, "valid": XS, "test": XS[:1]}, **given)
    two = fl.fit(step, watcher(made), XS, **given)
    assert one.history["valid/loss"] and one.model.w.item() == two.model.w.item() != 0.0
    assert [t.tolist() for t in one.model.buffers()] == [t.tolist() for t in two.model.buffers()]
    for name in two.slots:
        assert_equal(one.slots[name], two.slots[name], name, 0.0)


def test_an_evaluation_in_a_run_that_fails_leaves_its_buffers_to_the_error():
    with pytest.raises(OSError) as raised:
        loaders = {"train": XS, "valid": [*XS, torch.tensor([20.0])]}
        fl.fit(WATCHED, watcher(), loaders, hooks=())
    assert raised.value.state.model.calls.item() == 2.0


def test_buffers_that_do_not_change_are_not_written_to():
    state = of(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    versions = [b._version for b in state.model.buffers()]
    fl.evaluate(fl.pipeline()(lambda m, x: m(x).mean()), state, [torch.ones(2, 1)])
    assert [b._version for b in state.model.buffers()] == versions


# --- draws of a forward in evaluation


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_batch_has_its_own_draw_which_depends_on_the_seed_and_the_position_alone(call):
    draws = draws_in(call)
    assert len(draws) == len(set(draws.values())) == 6
    torch.manual_seed(7)  # the caller's generator is not used
    assert draws_in(call) == draws == draws_in(call, wasteful=(0, 2, 3))
