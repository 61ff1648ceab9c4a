"""Which updates are captured, and what their replays return."""

import attrs
import pytest
import torch
from fake_recorder import FakeRecorder
from graph_problems import done
from sample_middleware import output_mean
from toy_runs import fitted, of, xs

import fnloop as fl
from fnloop._extensions.middleware import compiled
from fnloop.testing import Toy, toy, toy_loss

GRAPH = fl.cuda_graph(warmup=1)


def test_a_kind_of_batch_is_captured_after_its_warm_up_and_replayed_from_then_on(recorders):
    state = fitted([1, 2, 3, 4], fl.cuda_graph(warmup=2))
    assert done(recorders) == ["run", "run", "record 0", "replay 0", "replay 0"]
    assert (state.model.w.item(), state.step) == (-10.0, 4)
    assert state.history["train/loss"] == ((0 - 2 - 9 - 24) / 4,)


def test_the_last_window_gets_a_graph_of_its_own_after_enough_updates(recorders):
    state = fitted([1, 2, 3], fl.accumulate(2), GRAPH, epochs=3)
    log = ["run", "run", "record 0", "replay 0", "record 1", "replay 1", "replay 0", "replay 1"]
    assert done(recorders) == log and state.model.w.item() == 3 * -(1.5 + 3)


def test_the_least_recently_used_graph_is_dropped(recorders):
    """The third graph takes the place of the first, and the fourth that of 3."""
    sizes = 1, 1, 2, 2, 3, 3, 2, 1, 1
    state = fitted([*map(torch.ones, sizes)], fl.cuda_graph(warmup=1, limit=2))
    first, second, third, fourth = (["run", f"record {n}", f"replay {n}"] for n in range(4))
    assert done(recorders) == [*first, *second, *third, "replay 1", *fourth]
    assert state.model.w.item() == -9.0


def test_evaluation_is_not_captured(recorders):
    step = fl.pipeline(GRAPH)(toy_loss)
    assert fl.evaluate(step, toy(w=2.0), xs(1, 2, 3)) == {"loss": 4.0}
    assert not recorders


@attrs.frozen
class ByName:
    """A metric that keeps a tensor in a dict."""

    sums: dict

    def combine(self, other):
        return ByName({name: value + other.sums[name] for name, value in self.sums.items()})

    def compute(self):
        return self.sums["batch"].item()


def test_what_a_step_returns_is_not_overwritten_by_the_next(recorders):
    named = fl.metric(named=lambda aux, batch: ByName({"batch": batch.sum()}))
    members = fl.clip(1e9), fl.metric(mean=output_mean), named, GRAPH
    step, state, kept = fl.pipeline(*members)(toy_loss), toy(), []
    for batch in xs(1, 2, 3, 4):
        state, out = step(state, batch)
        kept.append(out)
    assert [out.loss.item() for out in kept] == [0.0, -2.0, -9.0, -24.0]
    found = {name: [out.metrics[name].compute() for out in kept] for name in kept[0].metrics}
    assert found["mean"] == [0.0, -2.0, -9.0, -24.0]
    assert found["grad_norm"] == found["named"] == [1.0, 2.0, 3.0, 4.0]


def test_a_metric_that_keeps_its_inputs_is_not_overwritten(recorders):
    """torchmetrics may keep the tensors of an update until it is computed."""
    from torchmetrics import CatMetric

    class Total(CatMetric):
        def compute(self):
            return super().compute().sum()

    total = fl.from_torchmetrics(Total(nan_strategy="disable"), lambda aux, batch: (aux["output"],))
    state = fitted([1, 2, 3, 4], fl.metric(total=total), GRAPH, state=toy(w=1.0, lr=0.0))
    assert state.history["train/total"] == (10.0,)


class Count:
    def __init__(self, n):
        self.n = n

    def combine(self, other):
        return Count(self.n + other.n)

    def compute(self):
        return float(self.n)


def test_a_metric_of_the_users_own_is_copied(recorders):
    """The second epoch begins with a replay."""
    count = fl.metric(count=lambda aux, batch: Count(batch.sum()))
    state = fitted([1, 2, 3, 4], count, GRAPH, state=toy(lr=0.0), epochs=2)
    assert state.history["train/count"] == (10.0, 10.0)


def test_a_loss_function_may_take_the_gradient_of_its_input(recorders):
    def penalty(model, batch):
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (slope * batch.detach()).mean()  # w x

    for members in ((GRAPH,), ()):
        assert fitted([1, 2, 3, 4], *members, loss_fn=penalty).model.w.item() == -10.0


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
    captured = fl.pipeline(GRAPH)(toy_loss)
    state = of(Toy(), lr=torch.tensor(1.0), fused=True)
    for _ in range(3):
        state, _ = captured(state, torch.ones(1))
    assert state.model.w.item() == -3.0
    recorder.fails = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        captured(state, torch.ones(1))
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.evaluate(captured, state, xs(1))
