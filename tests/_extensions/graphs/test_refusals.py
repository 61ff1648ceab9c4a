"""Updates that cannot be captured are refused with the reason, or run eagerly."""

import random
import warnings

import attrs
import numpy as np
import pytest
import torch
from after_steps import skipping
from graph_problems import capturable_adam, compared, net
from torch import nn
from toy_runs import ONE, fitted, of

import fnloop as fl
from fnloop import CaptureError, schedules
from fnloop._extensions.graphs.guards import explain
from fnloop.testing import Toy, assert_same, toy, toy_loss

PAIR = torch.ones(1, 1), torch.ones(1, 1)
MSE = fl.supervised(nn.MSELoss())


def refused(loss_fn, *members, state=None, match, batch=ONE):
    """The message names the cause and the way out, and training can continue from the state."""
    state = state or toy()
    step = fl.pipeline(*members, fl.cuda_graph(warmup=1))(loss_fn)
    state, _ = step(state, batch)
    before = fl.snapshot(state)
    with pytest.raises(CaptureError, match=match) as raised:
        step(state, batch)
    assert "fallback=True" in str(raised.value)
    assert_same(state, before)
    fl.pipeline(*members)(loss_fn)(state, batch)
    return str(raised.value)


def in_capture():
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def around(change, ring="update", **settings):
    """Return a middleware that does something with the state before the step."""

    def wrap(step):
        return lambda state, batch: (change(state), step(state, batch))[1]

    return fl.Middleware("mine", **{ring: wrap}, **settings)


def count(state):
    state.slots["mine"]["calls"] += 1


def test_a_refused_step_starts_over(recorders):
    """With another recorder, because torch cannot continue a capture that was cut short."""
    limit = [1e9]

    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if limit[0] is None or loss.item() < limit[0] else loss * 0

    step, state = fl.pipeline(fl.cuda_graph(warmup=1))(loss_fn), toy()
    state, _ = step(state, ONE)
    with pytest.raises(CaptureError):
        step(state, ONE)
    limit[0] = None
    for _ in range(2):
        state, _ = step(state, ONE)
    first = ["run", "record 0"]
    assert [tape.log for tape in recorders] == [first, [*first, "replay 0"]]
    assert state.model.w.item() == -3.0


def test_a_host_read_names_its_line(recorders):
    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if loss.item() < 1000 else loss * 0

    cause = "cannot be captured as a graph: RuntimeError: operation not permitted"
    message = refused(loss_fn, match=cause)
    assert "test_refusals.py" in message
    assert "return loss if loss.item() < 1000" in message


READS = [
    lambda state: state.step > 3, lambda state: 1 / (1 + state.step),
    lambda state: state.skipped + 1, lambda state: state.run.total_steps,
    lambda state: state.history["train/loss"],
]  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_a_changing_value_of_the_state_may_not_be_read_inside(read, recorders):
    member = around(lambda state: in_capture() and read(state))
    refused(toy_loss, member, match=r"state\.\w+ is read inside the update")


def test_a_slot_that_is_replaced_inside_is_refused(recorders):
    def wrap(step):
        def replacing(state, batch):
            state, out = step(state, batch)
            return attrs.evolve(state, slots={**state.slots, "mine": state.slots["mine"] + 1}), out

        return replacing

    mine = fl.Middleware("mine", update=wrap, init=lambda state: torch.zeros(()))
    refused(toy_loss, mine, match=r"puts another value into state.slots\['mine'\]")


def test_a_slot_that_counts_on_the_host_is_refused(recorders):
    mine = around(count, init=lambda state: {"calls": 0})
    refused(toy_loss, mine, match=r"state.slots.mine.calls is changed on the host")


class Counting(Toy):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.w * x


class Replacing(Counting):
    def forward(self, x):
        self.seen = self.seen + 1
        return self.w * x


class Storing(Counting):
    def forward(self, x):
        self.output = self.w * x
        return self.output


def test_a_module_that_changes_on_the_host_or_replaces_a_buffer_is_refused(recorders):
    loss_fn = lambda model, batch: model(batch).mean()
    refused(loss_fn, state=of(Counting()), match=r"model\.calls is changed on the host")
    with pytest.raises(CaptureError, match=r"model\.seen is replaced by another tensor"):
        fitted([1, 2, 3, 4], fl.cuda_graph(), loss_fn=loss_fn, state=of(Replacing()))


def test_a_module_may_keep_what_it_has_computed(recorders):
    """An auxiliary loss, say, that the loss function takes from there."""
    loss_fn = lambda model, batch: (model(batch), model.output.mean())[1]
    graph, state = fl.cuda_graph(warmup=1), of(Storing())
    assert fitted([1, 2, 3], graph, loss_fn=loss_fn, state=state).model.w.item() == -6.0


@pytest.mark.parametrize(("draw", "whose"), [
    (np.random.rand, "numpy's"), (random.random, "python's"),
])  # fmt: skip
def test_a_draw_on_the_host_is_refused(draw, whose, recorders):
    loss_fn = lambda model, batch: model(batch).mean() * (1 + draw())
    refused(loss_fn, match=f"draws from {whose} generator")


def test_an_update_that_is_skipped_is_refused(recorders):
    member = skipping(lambda batch, out: in_capture(), "a guard")
    with pytest.raises(CaptureError, match=r"it is skipped \(a guard\)"):
        fitted([1, 1], member, fl.cuda_graph(warmup=1))


@pytest.mark.parametrize(("optimizer", "settings", "said"), [
    (torch.optim.LBFGS, {}, "LBFGS decides on the host how often it evaluates the loss"),
    (torch.optim.SGD, {"foreach": True},
        r"SGD reads its learning rate to the host: write SGD\(..., fused=True\)"),
])  # fmt: skip
def test_an_optimizer_that_cannot_be_captured_is_refused(optimizer, settings, said, recorders):
    state = of(nn.Linear(1, 1), optimizer, **settings)
    with pytest.raises(CaptureError, match=said):
        fl.pipeline(fl.cuda_graph())(MSE)(state, PAIR)


def test_a_refused_optimizer_is_unchanged(recorders):
    state = toy()
    state.optimizer.param_groups[0]["foreach"] = True
    other = {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5, "foreach": False}
    state.optimizer.add_param_group(other)
    with pytest.raises(CaptureError, match=r"write SGD\(..., fused=True\)"):
        fl.pipeline(fl.cuda_graph())(toy_loss)(state, ONE)
    found = [(group["lr"], group["fused"]) for group in state.optimizer.param_groups]
    assert found == [(1.0, None), (0.5, None)]


def test_a_failure_during_the_warm_up_leaves_the_optimizer_unchanged(recorders):
    def failing(model, batch):
        raise ArithmeticError(type(state.optimizer.param_groups[0]["lr"]).__name__)

    state = toy()
    with pytest.raises(ArithmeticError, match="Tensor"):
        fl.pipeline(fl.cuda_graph())(failing)(state, ONE)
    (group,) = state.optimizer.param_groups
    assert (group["lr"], type(group["lr"]), group["fused"]) == (1.0, float, None)


def test_sparse_gradients_are_refused(recorders):
    step = fl.pipeline(fl.cuda_graph())(lambda model, batch: model(batch).sum())
    with pytest.raises(CaptureError, match="leave out sparse=True"):
        step(of(nn.Embedding(3, 2, sparse=True)), torch.tensor([1]))


class Counted(torch.optim.SGD):
    """Counts for all its parameters together, and can be interrupted in a capture."""

    interrupted = False

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        super().step(closure)
        if self.interrupted and in_capture():
            raise KeyboardInterrupt


@pytest.mark.parametrize(("interrupted", "error", "said"), [
    (True, KeyboardInterrupt, None),
    (False, CaptureError, r"the state of the optimizer \(.*\) is changed on the host"),
])  # fmt: skip
def test_an_optimizer_that_counts_on_the_host_is_restored(interrupted, error, said, recorders):
    """An interruption is raised as such."""
    state = of(nn.Linear(1, 1), Counted, momentum=0.9)
    state.optimizer.interrupted = interrupted
    step = fl.pipeline(fl.cuda_graph(warmup=1))(MSE)
    state, _ = step(state, PAIR)
    before = fl.snapshot(state)
    with pytest.raises(error, match=said):
        step(state, PAIR)
    assert state.optimizer.state["calls"] == 1
    assert_same(state, before)


def test_a_batch_with_other_data_is_refused(recorders):
    with pytest.raises(CaptureError, match="contains a ndarray"):
        fl.pipeline(fl.cuda_graph())(toy_loss)(toy(), {"x": np.ones(1)})
    dense = lambda model, batch: (model.w * batch.to_dense().sum(), {"weight": 1})
    refused(dense, match=r"has layout torch\.sparse_coo", batch=torch.ones(2).to_sparse())


def test_a_kept_autograd_graph_of_the_parameters_is_named():
    """What torch says in a capture if a hook keeps ``weight.clone()``: tests/test_gpu.py has it."""
    said = "operation would make the legacy stream depend on a capturing blocking stream"
    message = str(explain(RuntimeError(f"CUDA error: {said}")))
    assert "write weight.detach().clone()" in message and ".item()" not in message


# --- a step that cannot be captured may run eagerly; checkpoints do not know about graphs


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_that_reads_continues_eagerly_with_its_optimizer_restored(optimizer, recorders):
    def loss_fn(model, batch):
        return model(batch[0]).mean() * (1 if model[0].bias.sum().item() < 1e9 else 0)

    def run(*members):
        problem = net(lambda parameters: optimizer(parameters, lr=0.1))
        members = fl.schedule(schedules.linear()), *members
        settings = {"loss_fn": loss_fn, "state": problem.state(), "epochs": 2}
        return fitted(problem.batches, *members, **settings)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = run(fl.cuda_graph(warmup=2, fallback=True))
    assert len(caught) == 1
    groups = lambda state: [group | {"params": 0} for group in state.optimizer.param_groups]
    plain = run()
    assert groups(captured) == groups(plain)
    assert_same(captured, plain, rtol=1e-5)


class Everything(Counting):
    def forward(self, x):
        self.calls += 1
        self.seen = self.seen + 1
        return self.w * x * np.random.rand()


def test_effects_of_python_during_a_capture_are_undone(recorders):
    """Nothing ran on the device: a count, a buffer or a draw of that time must not stay."""
    mine = around(count, init=lambda state: {"calls": 0})

    def run(*members):
        loss_fn = lambda model, batch: model(batch).mean()
        return fitted([1, 2, 3, 4], mine, *members, loss_fn=loss_fn, state=of(Everything()))

    with pytest.warns(UserWarning, match="runs eagerly"):
        captured = run(fl.cuda_graph(warmup=2, fallback=True))
    assert (captured.model.calls, captured.model.seen.item()) == (4, 4.0)
    assert captured.slots == {"mine": {"calls": 4}}
    assert_same(captured, run(), rtol=1e-6)


def test_the_original_settings_are_restored_even_after_new_graphs(recorders):
    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if len(batch) == 1 or loss.item() < 1e9 else loss * 0

    step, state = fl.pipeline(fl.cuda_graph(warmup=1, fallback=True))(loss_fn), toy()
    for _ in range(2):
        state, _ = step(state, ONE)
    state.optimizer.param_groups[0]["weight_decay"] = 0.5
    state, _ = step(state, torch.ones(2))
    with pytest.warns(UserWarning, match="runs eagerly"):
        state, _ = step(state, torch.ones(2))
    (group,) = state.optimizer.param_groups
    assert (group["lr"], group["fused"], group["weight_decay"]) == (1.0, None, 0.5)
    assert type(group["lr"]) is float


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_checkpoints_go_from_graphs_to_eager_runs_and_back(optimizer, tmp_path, recorders):
    """Counts and rates are float32 under graphs."""
    problem = net(lambda parameters: optimizer(parameters, lr=0.1))
    fresh = problem.state().optimizer.defaults

    def run(members, state, steps):
        settings = {"loss_fn": problem.loss_fn, "state": state, "steps": steps}
        return fitted(problem.batches, fl.accumulate(2), *members, **settings)

    losses = lambda state: [r.metrics["train/loss"] for r in state.history if not r.closing]
    graph, plain = (fl.cuda_graph(warmup=1),), ()
    whole = run(plain, problem.state(), 9)
    for first, then in ((graph, plain), (plain, graph), (graph, graph)):
        path = fl.save(run(first, problem.state(), 5), tmp_path / "a")
        restored = fl.restore(path, problem.state(seed=3))
        (group,) = restored.optimizer.param_groups
        assert (group["lr"], group["fused"]) == (0.1, None)
        assert group.get("capturable") == fresh.get("capturable")
        end = run(then, restored, 9)
        for mine, theirs in zip(end.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        assert losses(end) == pytest.approx(losses(whole), rel=1e-5)


def test_a_run_continues_from_a_checkpoint_that_a_hook_restores(tmp_path, recorders):
    """The optimizer's state is replaced under the graphs."""
    problem = net(capturable_adam)
    given = {"loss_fn": problem.loss_fn, "state": problem.state(), "steps": 3}
    path = fl.save(fitted(problem.batches, **given), tmp_path / "a")
    back = fl.when(lambda state: state.step == 6)(
        lambda state: fl.restore(path, state, only=("model", "optimizer"))
    )
    compared(problem, loaders=[problem.batches[0]] * 12, hooks=(back,))
