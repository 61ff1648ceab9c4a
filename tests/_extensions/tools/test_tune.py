import logging
import types

import attrs
import pytest
import torch
from loop_cases import generators
from sample_steps import by_hand
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import fnloop as fl
from fnloop._extensions.tools import tune as module
from fnloop.data import tune
from fnloop.extend import Rehearsal
from fnloop.testing import assert_same, toy, toy_loss

IMAGES = [torch.ones(2, 1, 4, 4)] * 3


def squared(model, batch):
    return model(batch).square().mean()


STEP = fl.pipeline()(squared)


def convolution():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return fl.TrainState.create(model, optimizer, seed=0)


@pytest.fixture
def costs(monkeypatch):
    """Let an update take the product of these, in seconds, for what it is made with."""
    now, costs = [0.0], {"prefetch": 1.0, "list": 1.0}

    def train(trial, state, *, steps, hooks, evaluate_every, prefetch):
        names, loader = [m.name for m in trial.step.pipeline.middleware], trial.loaders["train"]
        names += [type(loader).__name__, f"{getattr(loader, 'num_workers', 0)} workers"]
        names += ["fused"] if state.optimizer.param_groups[0]["fused"] else []
        for n in range(state.step, steps):
            now[0] += torch.tensor([costs.get(name, 1.0) for name in names]).prod().item()
            state = attrs.evolve(state, step=n + 1, metrics={"loss": fl.Mean(1.0, 1)})
            ended = hooks[0](state).stop
            if "amp" in names and costs.get("amp") == 0.0:
                raise ValueError("no such kernel\nfor this")
            if ended:
                return

    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(Rehearsal, "train", train)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "_has_compiler", lambda: False)
    return costs


def test_what_is_faster_is_tried_together_and_written_down(costs):
    costs |= {"fused": 0.5, "amp": 0.8, "channels_last": 0.99}
    step = fl.pipeline(fl.clip(1.0))(squared)
    advice = tune(step, convolution(), IMAGES)
    assert [(t.name, t.ratio) for t in advice.trials] == [
        ("as it is", 1.0), ("fused", pytest.approx(0.5)), ("bf16", pytest.approx(0.8)),
        ("channels_last", pytest.approx(0.99)), ("batches at hand", 1.0),
        ("together", pytest.approx(0.4)),
    ]  # fmt: skip
    assert advice.trials[0].seconds == 1.0
    assert advice.lines == (
        "step = pipeline(amp('bf16'), clip(1.0))(squared)",
        "AdamW(..., fused=True)",
    )
    assert repr(advice).splitlines()[2].split() == ["fused", "500", "0.50", "the", "same", "bits"]
    assert repr(advice).endswith("\n\n" + "\n".join(advice.lines))
    shown = advice._repr_html_()
    assert "channels_last" in shown and "amp(&#x27;bf16&#x27;)" in shown


def test_what_is_not_faster_together_is_left_out(costs):
    costs |= {"fused": 0.9, "amp": 0.96, "channels_last": 1.5}
    assert tune(STEP, convolution(), IMAGES).lines[-1] == "AdamW(..., fused=True)"
    costs |= {"fused": 0.98, "amp": 1.2}
    advice = tune(STEP, convolution(), IMAGES)
    assert advice.lines == ("Nothing that was tried is faster.",)


@pytest.mark.slow
def test_workers_and_the_cost_of_the_loader_are_measured(costs, monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 8)
    costs |= {"DataLoader": 2.0, "4 workers": 0.6}
    data = DataLoader(TensorDataset(torch.ones(8)), 2)
    advice = tune(STEP, convolution(), data)
    found = {t.name: t.ratio for t in advice.trials}
    assert found["4 workers"] == pytest.approx(0.6)
    assert found["batches at hand"] == pytest.approx(0.5)
    assert advice.lines == ("DataLoader(..., num_workers=4, persistent_workers=True)",)
    assert data.num_workers == 0
    many = DataLoader(TensorDataset(torch.ones(8)), 2, num_workers=1)
    found = [t.name for t in tune(STEP, convolution(), many).trials]
    assert "0 workers" in found and "prefetch=4" in found


def test_a_change_that_fails_is_a_row_and_a_run_that_fails_raises(costs):
    costs |= {"amp": 0.0}
    advice = tune(STEP, convolution(), IMAGES)
    (failed,) = (t for t in advice.trials if t.name == "bf16")
    assert (failed.seconds, failed.ratio) == (None, None)
    assert failed.loss == "fails: ValueError: no such kernel"
    assert "fails: ValueError" in repr(advice)
    with pytest.raises(ValueError, match="no such kernel"):
        tune(fl.pipeline(fl.amp("bf16"))(squared), convolution(), IMAGES)


class Positioned(list):
    """A loader that says where it is, and counts."""

    at = 3

    def __iter__(self):
        self.at += 1
        return super().__iter__()

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_how_the_samples_are_read_is_a_table_of_its_own(monkeypatch):
    monkeypatch.setattr(module, "_changes_of_loading", lambda loader, state: {})  # no processes
    x = torch.randn(80, 1)

    class Own(TensorDataset):
        pass

    def advised(dataset, **settings):
        loss = lambda model, batch: toy_loss(model, batch[0])
        loader = DataLoader(dataset, 16, shuffle=True, **settings)
        return tune(fl.pipeline()(loss), toy(), loader, seconds=0.01)

    advice = advised(ConcatDataset([Subset(TensorDataset(x), range(80))]))
    reading = advice.reading
    assert reading is not None and reading.data == "ConcatDataset of Subset of TensorDataset"
    assert reading.at_once and "a batch at once" in repr(advice)
    assert reading.seconds > 0 and reading.by_torch > 0
    assert "one by one" in repr(advised(Own(x)))
    assert "one by one" in repr(advised(TensorDataset(x.clone().requires_grad_())))
    stacked = lambda samples: [torch.stack([x for (x,) in samples])]
    assert "one by one" in repr(advised(TensorDataset(x), collate_fn=stacked))
    assert tune(STEP, convolution(), IMAGES, seconds=0.01).reading is None


def test_it_touches_neither_the_state_nor_generators_nor_the_loader():
    step, loader = fl.pipeline(fl.amp("bf16"), fl.accumulate(2))(squared), Positioned(IMAGES)
    state = fl.fit(step, convolution(), IMAGES, steps=1, hooks=())
    before, strides = fl.snapshot(state), [p.stride() for p in state.model.parameters()]
    drawn = generators()
    advice = tune(step, state, loader, seconds=0.02)
    assert generators() == drawn
    assert_same(state, before)
    assert [p.stride() for p in state.model.parameters()] == strides
    assert loader.at == 3 and not logging.getLogger("fnloop").disabled
    assert {t.name for t in advice.trials} >= {"as it is", "fused", "channels_last"}
    assert_same(*(fl.fit(step, s, IMAGES, epochs=1, hooks=()) for s in (state, before)))


def test_steps_that_are_no_pipeline_of_a_loss_function_are_timed_too():
    advice = tune(fl.raw(by_hand), toy(), [torch.ones(1)] * 2, seconds=0.01)
    assert advice.trials[0].name == "as it is"
    assert not {t.name for t in advice.trials} & {"bf16", "compiled", "channels_last"}


def test_wrong_arguments_are_refused():
    state = toy()
    with pytest.raises(TypeError, match="got an iterator"):
        tune(STEP, state, iter(IMAGES))
    two = attrs.evolve(state, backend=attrs.evolve(state.backend, world_size=2))
    with pytest.raises(NotImplementedError, match="without torchrun"):
        tune(STEP, two, IMAGES)


def carried(model, batch, carry):
    return (model.w * batch).mean(), {}, carry


@pytest.mark.parametrize(("members", "loss_fn"), [
    ((fl.tbptt(1),), carried),  # three updates of each batch
    ((fl.plateau("valid/loss"),), toy_loss),  # of which there is no evaluation here
])  # fmt: skip
def test_steps_of_several_updates_and_with_evaluations_are_timed(members, loss_fn):
    step, state = fl.pipeline(*members)(loss_fn), toy()
    advice = tune(step, state, [torch.ones(1, 3)] * 4, seconds=0.01)
    assert advice.trials[0].seconds > 0 and state.step == 0
