"""Updates that cannot be captured are refused with the reason."""

import attrs
import numpy as np
import pytest
import torch
from graph_problems import Counting, done, of, ones
from torch import nn

import fnloop as fl
from fnloop import CaptureError
from fnloop._graphs.guards import explain
from fnloop.testing import assert_same, toy, toy_loss


def refused(loss_fn, *members, state=None, match):
    """The message names the cause and the way out, and training can continue from the state."""
    state = state or toy()
    step = fl.pipeline(*members, fl.cuda_graph(warmup=1))(loss_fn)
    state, _ = step(state, torch.ones(1))
    before = fl.snapshot(state)
    with pytest.raises(CaptureError, match=match) as raised:
        step(state, torch.ones(1))
    assert "fallback=True" in str(raised.value)
    assert_same(state, before)
    fl.pipeline(*members)(loss_fn)(state, torch.ones(1))
    return str(raised.value)


def test_a_refused_step_starts_over(recorders):
    """With another recorder, because torch cannot continue a capture that was cut short."""
    limit = [1e9]

    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if limit[0] is None or loss.item() < limit[0] else loss * 0

    step, state = fl.pipeline(fl.cuda_graph(warmup=1))(loss_fn), toy()
    state, _ = step(state, torch.ones(1))
    with pytest.raises(CaptureError):
        step(state, torch.ones(1))
    limit[0] = None
    for _ in range(2):
        state, _ = step(state, torch.ones(1))
    assert [tape.log for tape in recorders] == [
        ["run", "record 0"],
        ["run", "record 0", "replay 0"],
    ]
    assert state.model.w.item() == -3.0


def test_a_host_read_names_its_line(recorders):
    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if loss.item() < 1e9 else loss * 0

    message = refused(
        loss_fn, match="cannot be captured as a CUDA graph: RuntimeError: operation not permitted"
    )
    assert "test_refusals.py" in message
    assert "return loss if loss.item() < 1e9" in message


READS = [
    lambda state: state.step > 3,
    lambda state: 1 / (1 + state.step),
    lambda state: state.skipped + 1,
    lambda state: state.run.total_steps,
    lambda state: state.history["train/loss"],
]


@pytest.mark.parametrize("read", READS)
def test_a_changing_value_of_the_state_may_not_be_read_inside(read, recorders):
    def wrap(step):
        def reading(state, batch):
            if (
                recorders[-1].log.count("run")
                and torch.utils._python_dispatch._get_current_dispatch_mode() is not None
            ):
                read(state)
            return step(state, batch)

        return reading

    refused(
        toy_loss,
        fl.Middleware("reading", update=wrap),
        match=r"state\.\w+ is read inside the update",
    )


def test_a_slot_that_is_replaced_inside_is_refused(recorders):
    def wrap(step):
        def replacing(state, batch):
            state, out = step(state, batch)
            return attrs.evolve(state, slots={**state.slots, "mine": state.slots["mine"] + 1}), out

        return replacing

    mine = fl.Middleware("mine", update=wrap, init=lambda state: torch.zeros(()))
    refused(toy_loss, mine, match=r"puts another value into state.slots\['mine'\]")


def test_a_slot_that_counts_on_the_host_is_refused(recorders):
    def wrap(step):
        def counting(state, batch):
            state.slots["mine"]["calls"] += 1
            return step(state, batch)

        return counting

    mine = fl.Middleware("mine", update=wrap, init=lambda state: {"calls": 0})
    state = fl.pipeline(mine)(toy_loss)(toy(), torch.ones(1))[0]
    step = fl.pipeline(mine, fl.cuda_graph(warmup=1))(toy_loss)
    state, _ = step(state, torch.ones(1))
    with pytest.raises(CaptureError, match=r"state.slots.mine.calls is changed on the host"):
        step(state, torch.ones(1))


class Replacing(Counting):
    def forward(self, x):
        self.seen = self.seen + 1
        return self.w * x


class Storing(Counting):
    def forward(self, x):
        self.output = self.w * x
        return self.output


def test_a_module_that_changes_on_the_host_or_replaces_a_buffer_is_refused(recorders):
    def loss_fn(model, batch):
        return model(batch).mean()

    refused(loss_fn, state=of(Counting()), match="model.calls is changed on the host")
    with pytest.raises(CaptureError, match=r"model\.seen is replaced by another tensor"):
        fl.fit(fl.pipeline(fl.cuda_graph())(loss_fn), of(Replacing()), ones(1, 2, 3, 4), hooks=())


def test_a_module_may_keep_what_it_has_computed(recorders):
    """An auxiliary loss, say, that the loss function takes from there."""
    step = fl.pipeline(fl.cuda_graph(warmup=1))(
        lambda model, batch: (model(batch), model.output.mean())[1]
    )
    assert fl.fit(step, of(Storing()), ones(1, 2, 3), hooks=()).model.w.item() == -6.0


@pytest.mark.parametrize(
    ("draw", "whose"), [(np.random.rand, "numpy's"), (__import__("random").random, "python's")]
)
def test_a_draw_on_the_host_is_refused(draw, whose, recorders):
    refused(
        lambda model, batch: model(batch).mean() * (1 + draw()),
        match=f"draws from {whose} generator",
    )


def test_an_update_that_is_skipped_is_refused(recorders):
    def wrap(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(
                out, skip="a guard" if "record 0" in done(recorders) else None
            )

        return skipping

    state = toy()
    step = fl.pipeline(fl.Middleware("guard", gradient=wrap), fl.cuda_graph(warmup=1))(toy_loss)
    state, _ = step(state, torch.ones(1))
    with pytest.raises(CaptureError, match=r"it is skipped \(a guard\)"):
        step(state, torch.ones(1))


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(recorders):
    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.LBFGS(model.parameters()), seed=0)
    with pytest.raises(
        CaptureError, match="LBFGS decides on the host how often it evaluates the loss"
    ):
        fl.pipeline(fl.cuda_graph())(fl.supervised(nn.MSELoss()))(
            state, (torch.ones(1, 1), torch.ones(1, 1))
        )


def test_an_optimizer_that_was_told_not_to_be_fused_is_refused(recorders):
    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), foreach=True), seed=0)
    with pytest.raises(
        CaptureError, match=r"SGD reads its learning rate to the host: write SGD\(..., fused=True\)"
    ):
        fl.pipeline(fl.cuda_graph())(fl.supervised(nn.MSELoss()))(
            state, (torch.ones(1, 1), torch.ones(1, 1))
        )


def test_an_optimizer_that_is_unchanged(recorders):
    step, state = fl.pipeline(fl.cuda_graph())(toy_loss), toy()
    state.optimizer.param_groups[0]["foreach"] = True
    state.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1))], "lr": 0.5, "foreach": False}
    )
    with pytest.raises(CaptureError, match=r"write SGD\(..., fused=True\)"):
        step(state, torch.ones(1))
    assert [(g["lr"], g["fused"]) for g in state.optimizer.param_groups] == [
        (1.0, None),
        (0.5, None),
    ]


def test_a_failure_during_the_warm_up_leaves_the_optimizer_unchanged(recorders):
    def failing(model, batch):
        raise ArithmeticError(type(state.optimizer.param_groups[0]["lr"]).__name__)

    state = toy()
    with pytest.raises(ArithmeticError, match="Tensor"):
        fl.pipeline(fl.cuda_graph())(failing)(state, torch.ones(1))
    (group,) = state.optimizer.param_groups
    assert (group["lr"], type(group["lr"]), group["fused"]) == (1.0, float, None)


def test_sparse_gradients_are_refused(recorders):
    model = nn.Embedding(3, 2, sparse=True)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    with pytest.raises(CaptureError, match="leave out sparse=True"):
        fl.pipeline(fl.cuda_graph())(lambda model, batch: model(batch).sum())(
            state, torch.tensor([1])
        )


def test_an_optimizer_that_counts_for_all_its_parameters_together_is_refused(recorders):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.state["calls"] = self.state.get("calls", 0) + 1
            super().step(closure)

    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, Counting(model.parameters(), momentum=0.9), seed=0)
    step, batch = (
        fl.pipeline(fl.cuda_graph(warmup=1))(fl.supervised(nn.MSELoss())),
        (torch.ones(1, 1), torch.ones(1, 1)),
    )
    state, _ = step(state, batch)
    with pytest.raises(
        CaptureError, match=r"the state of the optimizer \(.*\) is changed on the host"
    ):
        step(state, batch)
    assert state.optimizer.state["calls"] == 1


def test_a_batch_with_other_data_is_refused(recorders):
    with pytest.raises(CaptureError, match="contains a ndarray"):
        fl.pipeline(fl.cuda_graph())(toy_loss)(toy(), {"x": np.ones(1)})
    with pytest.raises(CaptureError, match=r"has layout torch\.sparse_coo"):
        step = fl.pipeline(fl.cuda_graph(warmup=1))(
            lambda model, batch: (model.w * batch.to_dense().sum(), {"weight": 1})
        )
        state, batch = toy(), torch.ones(2).to_sparse()
        for _ in range(2):
            state, _ = step(state, batch)


def test_an_interruption_is_raised_as_such_and_the_optimizer_is_restored(recorders):
    class Interrupting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise KeyboardInterrupt

    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, Interrupting(model.parameters(), lr=1.0), seed=0)
    step, batch = (
        fl.pipeline(fl.cuda_graph(warmup=1))(fl.supervised(nn.MSELoss())),
        (torch.ones(1, 1), torch.ones(1, 1)),
    )
    state, _ = step(state, batch)
    before = fl.snapshot(state)
    with pytest.raises(KeyboardInterrupt):
        step(state, batch)
    assert state.optimizer.state[model.weight]["calls"] == 1
    assert_same(state, before)


def test_a_kept_autograd_graph_of_the_parameters_is_named():
    """What torch says in a capture if a hook keeps ``weight.clone()``: tests/test_gpu.py has it."""
    said = (
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
    )
    message = str(explain(RuntimeError(said)))
    assert "write weight.detach().clone()" in message and ".item()" not in message
