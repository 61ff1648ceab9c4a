"""Which updates are captured, and what their replays return."""

import attrs
import pytest
import torch
from fake_recorder import FakeRecorder
from graph_problems import done, ones
from sample_middleware import output_mean

import fnloop as fl
from fnloop._middleware import compiled
from fnloop.testing import Toy, toy, toy_loss


def test_a_kind_of_batch_is_captured_after_its_warm_up_and_replayed_from_then_on(recorders):
    step = fl.pipeline(fl.cuda_graph(warmup=2))(toy_loss)
    state = fl.fit(step, toy(), ones(1, 2, 3, 4), hooks=())
    assert done(recorders) == ["run", "run", "record 0", "replay 0", "replay 0"]
    assert (state.model.w.item(), state.step, state.history["train/loss"]) == (
        -10.0,
        4,
        ((0 - 2 - 9 - 24) / 4,),
    )


def test_the_last_window_gets_a_graph_of_its_own_after_enough_updates(recorders):
    step = fl.pipeline(fl.accumulate(2), fl.cuda_graph(warmup=1))(toy_loss)
    state = fl.fit(step, toy(), ones(1, 2, 3), epochs=3, hooks=())
    assert done(recorders) == [
        "run",
        "run",
        "record 0",
        "replay 0",
        "record 1",
        "replay 1",
        "replay 0",
        "replay 1",
    ]
    assert state.model.w.item() == 3 * -(1.5 + 3)


def test_the_least_recently_used_graph_is_dropped(recorders):
    step, state = fl.pipeline(fl.cuda_graph(warmup=1, limit=2))(toy_loss), toy()
    for size in (
        1,
        1,
        2,
        2,
        3,
        3,
        2,
        1,
        1,
    ):  # the third graph takes the place of the first, the fourth that of 3
        state, _ = step(state, torch.ones(size))
    assert done(recorders) == [
        *("run", "record 0", "replay 0"),
        *("run", "record 1", "replay 1"),
        *("run", "record 2", "replay 2"),
        "replay 1",
        *("run", "record 3", "replay 3"),
    ]
    assert state.model.w.item() == -9.0


def test_evaluation_is_not_captured(recorders):
    step = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss)
    assert fl.evaluate(step, toy(w=2.0), ones(1, 2, 3)) == {"loss": 4.0}
    assert not recorders


def test_what_a_step_returns_is_not_overwritten_by_the_next(recorders):
    step, state, kept = (
        fl.pipeline(fl.clip(1e9), fl.metric(mean=output_mean), fl.cuda_graph(warmup=1))(toy_loss),
        toy(),
        [],
    )
    for batch in ones(1, 2, 3, 4):
        state, out = step(state, batch)
        kept.append(out)
    assert [out.loss.item() for out in kept] == [0.0, -2.0, -9.0, -24.0]
    assert [out.metrics["grad_norm"].compute() for out in kept] == [1.0, 2.0, 3.0, 4.0]
    assert [out.metrics["mean"].compute() for out in kept] == [0.0, -2.0, -9.0, -24.0]


def test_a_metric_that_keeps_its_inputs_is_not_overwritten(recorders):
    """torchmetrics may keep the tensors of an update until it is computed."""
    from torchmetrics import CatMetric

    class Total(CatMetric):
        def compute(self):
            return super().compute().sum()

    total = fl.from_torchmetrics(Total(nan_strategy="disable"), lambda aux, batch: (aux["output"],))
    step = fl.pipeline(fl.metric(total=total), fl.cuda_graph(warmup=1))(toy_loss)
    assert fl.fit(step, toy(w=1.0, lr=0.0), ones(1, 2, 3, 4), hooks=()).history["train/total"] == (
        10.0,
    )


def test_a_metric_of_the_users_own_is_copied(recorders):
    class Count:
        def __init__(self, n):
            self.n = n

        def combine(self, other):
            return Count(self.n + other.n)

        def compute(self):
            return float(self.n)

    step = fl.pipeline(
        fl.metric(count=lambda aux, batch: Count(batch.sum())), fl.cuda_graph(warmup=1)
    )(toy_loss)
    state = fl.fit(
        step, toy(lr=0.0), ones(1, 2, 3, 4), epochs=2, hooks=()
    )  # the second epoch begins with a replay
    assert state.history["train/count"] == (10.0, 10.0)


def test_tensors_in_a_dict_of_a_metric_are_copied(recorders):
    @attrs.frozen
    class ByName:
        sums: dict

        def combine(self, other):
            return ByName({name: value + other.sums[name] for name, value in self.sums.items()})

        def compute(self):
            return self.sums["batch"]

    step = fl.pipeline(
        fl.metric(named=lambda aux, batch: ByName({"batch": batch.sum()})), fl.cuda_graph(warmup=1)
    )(toy_loss)
    state, kept = toy(lr=0.0), []
    for batch in ones(1, 2, 3, 4):
        state, out = step(state, batch)
        kept.append(out.metrics["named"])
    assert [metric.compute().item() for metric in kept] == [1.0, 2.0, 3.0, 4.0]


def test_a_loss_function_may_take_the_gradient_of_its_input(recorders):
    def penalty(model, batch):
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (slope * batch.detach()).mean()  # w x

    def run(*members):
        batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
        return fl.fit(fl.pipeline(*members)(penalty), toy(), batches, hooks=()).model.w.item()

    assert run(fl.cuda_graph(warmup=1)) == run() == -10.0


class Failing(FakeRecorder):
    """A recorder whose replays fail while ``fails`` is set."""

    fails = False

    def record(self, update):
        parts, reply = super().record(update)

        def replay():
            if self.fails:
                raise RuntimeError("the device is lost")
            parts[-1]()

        return [*parts[:-1], replay], reply


def test_a_replay_that_fails_leaves_no_state(monkeypatch):
    """The graph changes the weights, and how far it got is unknown."""
    recorder = Failing()
    monkeypatch.setattr(compiled, "recorder_on", lambda device: recorder)
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0), fused=True)
    state = fl.TrainState.create(model, optimizer, seed=0)
    captured = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss)
    for _ in range(3):
        state, _ = captured(state, torch.ones(1))
    assert state.model.w.item() == -3.0
    recorder.fails = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        captured(state, torch.ones(1))
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.evaluate(captured, state, ones(1))
