"""A step that cannot be captured runs eagerly; checkpoints do not know about graphs."""

import warnings

import attrs
import numpy as np
import pytest
import torch
from graph_problems import Counting, capturable_adam, net, of, ones

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_that_reads_continues_eagerly_with_its_optimizer_restored(optimizer, recorders):
    def loss_fn(model, batch):
        return model(batch[0]).mean() * (1 if model[0].bias.sum().item() < 1e9 else 0)

    def run(*members):
        problem = attrs.evolve(
            net(lambda parameters: optimizer(parameters, lr=0.1)), loss_fn=loss_fn
        )
        step = fl.pipeline(fl.schedule(schedules.linear()), *members)(loss_fn)
        return fl.fit(step, problem.state(), problem.batches, epochs=2, hooks=())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = run(fl.cuda_graph(warmup=2, fallback=True))
    assert len(caught) == 1
    plain = run()
    assert [g | {"params": 0} for g in captured.optimizer.param_groups] == [
        g | {"params": 0} for g in plain.optimizer.param_groups
    ]
    assert_same(captured, plain, rtol=1e-5)


def test_effects_of_python_during_a_capture_are_undone(recorders):
    """Nothing ran on the device: a count, a buffer or a draw of that time must not stay."""

    class Everything(Counting):
        def forward(self, x):
            self.calls += 1
            self.seen = self.seen + 1
            return self.w * x * np.random.rand()

    def counting(step):
        def counted(state, batch):
            state.slots["mine"]["calls"] += 1
            return step(state, batch)

        return counted

    mine = fl.Middleware("mine", update=counting, init=lambda state: {"calls": 0})

    def run(*members):
        state = of(Everything())
        step = fl.pipeline(mine, *members)(lambda model, batch: model(batch).mean())
        return fl.fit(step, state, ones(1, 2, 3, 4), hooks=())

    with pytest.warns(UserWarning, match="runs eagerly"):
        captured = run(fl.cuda_graph(warmup=2, fallback=True))
    assert (captured.model.calls, captured.model.seen.item(), captured.slots) == (
        4,
        4.0,
        {"mine": {"calls": 4}},
    )
    assert_same(captured, run(), rtol=1e-6)


def test_the_original_settings_are_restored_even_after_new_graphs(recorders):
    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if len(batch) == 1 or loss.item() < 1e9 else loss * 0

    step, state = fl.pipeline(fl.cuda_graph(warmup=1, fallback=True))(loss_fn), toy()
    for _ in range(2):
        state, _ = step(state, torch.ones(1))
    state.optimizer.param_groups[0]["weight_decay"] = 0.5
    state, _ = step(state, torch.ones(2))
    with pytest.warns(UserWarning, match="runs eagerly"):
        state, _ = step(state, torch.ones(2))
    (group,) = state.optimizer.param_groups
    assert (group["lr"], type(group["lr"]), group["fused"], group["weight_decay"]) == (
        1.0,
        float,
        None,
        0.5,
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_checkpoints_go_from_graphs_to_eager_runs_and_back(optimizer, tmp_path, recorders):
    problem = net(lambda parameters: optimizer(parameters, lr=0.1))
    captured, plain = (
        fl.pipeline(fl.accumulate(2), *m)(problem.loss_fn) for m in ((fl.cuda_graph(warmup=1),), ())
    )

    def run(step, state, steps):
        return fl.fit(step, state, problem.batches, steps=steps, hooks=())

    whole = run(plain, problem.state(), 9)
    for first, then in ((captured, plain), (plain, captured), (captured, captured)):
        path = fl.save(run(first, problem.state(), 5), tmp_path / "a")
        restored = fl.restore(path, problem.state(seed=3))
        (group,) = restored.optimizer.param_groups
        assert (group["lr"], group.get("capturable"), group["fused"]) == (
            0.1,
            problem.state().optimizer.defaults.get("capturable"),
            None,
        )
        end = run(then, restored, 9)
        for mine, theirs in zip(end.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-3, atol=1e-5
            )  # counts and rates are float32 under graphs
        losses = [
            [r.metrics["train/loss"] for r in state.history if not r.closing]
            for state in (end, whole)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_continues_from_a_checkpoint_that_a_hook_restores(tmp_path, recorders):
    """The optimizer's state is replaced under the graphs."""
    problem = net(capturable_adam)
    path = fl.save(
        fl.fit(fl.pipeline()(problem.loss_fn), problem.state(), problem.batches, steps=3, hooks=()),
        tmp_path / "a",
    )

    def run(*members):
        back = fl.when(lambda state: state.step == 6)(
            lambda state: fl.restore(path, state, only=("model", "optimizer"))
        )
        step = fl.pipeline(*members)(problem.loss_fn)
        return fl.fit(step, problem.state(), [problem.batches[0]] * 12, hooks=(back,))

    captured, plain = run(fl.cuda_graph(warmup=1)), run()
    assert_same(captured, plain)
