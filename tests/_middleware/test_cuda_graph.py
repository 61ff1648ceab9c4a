"""Everything that decides about graphs, on the CPU: a tape stands in for the graph (see tests/fake_recorder.py)."""

import pickle
import sys
import warnings

import attrs
import numpy as np
import pytest
import torch
from fake_recorder import Tape
from sample_middleware import average, decay, largest_output, noise, output_mean, weight_penalty
from torch import nn

import fnloop as fl
from fnloop import CaptureError, schedules
from fnloop._graphs.capture import rebuilt, signature
from fnloop._graphs.guards import (
    Slots,
    check_facts,
    host_state,
    make_capturable,
    make_rollback,
    undo_capturable,
)
from fnloop._middleware import cuda_graph
from fnloop.testing import (
    assert_same,
    law_fold,
    law_no_host_reads,
    law_purity,
    small,
    stochastic,
    toy,
    toy_loss,
)


@pytest.fixture
def tapes(monkeypatch):
    """Capture on tapes; a list of all that were made."""
    made = []
    monkeypatch.setattr(cuda_graph, "recorder_on", lambda device: made.append(Tape()) or made[-1])
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"],
        "_get_capturable_supported_devices",
        lambda *_, **__: ["cpu"],
    )
    return made


def done(tapes):
    return [entry for tape in tapes for entry in tape.log]


def fused_sgd(parameters):
    """What cuda_graph makes of SGD, so that runs with and without it compute the same to the bit."""
    return torch.optim.SGD(parameters, lr=torch.tensor(0.05), momentum=0.9, fused=True)


def capturable_adam(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.02), capturable=True)


PROBLEMS = [
    attrs.evolve(small(), optimizer=fused_sgd),
    attrs.evolve(stochastic(), optimizer=capturable_adam),
]


def ones(*values):
    return [torch.tensor([float(v)]) for v in values]


def net(optimizer=fused_sgd):
    return attrs.evolve(small(), optimizer=optimizer)


# --- law 9: the same with it and without it


TABLE = [
    (),
    (fl.accumulate(2),),
    (fl.accumulate(3), fl.clip(0.05)),
    (fl.clip(0.05), fl.accumulate(3)),
    (fl.clip_value(0.01),),
    (fl.amp("bf16"), fl.accumulate(2), fl.clip(0.05)),
    (fl.schedule(schedules.cosine(warmup=2, min_ratio=0.1)),),
    (fl.torch_scheduler(decay), fl.clip(float("inf"))),
    (fl.metric(mean=output_mean, largest=largest_output), fl.accumulate(2)),
    (noise(0.01), fl.accumulate(2)),
    (weight_penalty(0.01), average(0.9), fl.schedule(schedules.linear())),
    (fl.compiled(backend="eager"), fl.accumulate(2), fl.clip(0.05)),
]


@pytest.mark.parametrize("members", TABLE, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_a_run_with_graphs_is_the_same_to_the_bit(members, problem, tapes):
    def run(*members):
        loaders = {"train": problem.batches, "valid": problem.batches[:2]}
        return fl.fit(
            fl.pipeline(*members)(problem.loss_fn), problem.state(), loaders, epochs=4, hooks=()
        )

    captured = run(*members, fl.cuda_graph(warmup=1))
    assert sum(entry.startswith("replay") for entry in done(tapes)) > len(done(tapes)) / 2
    assert_same(captured, run(*members))


SCALED = fl.amp("fp16", init_scale=2.0**20, growth_interval=4)


def single_precision(problem):
    """fp16 unscales float32 gradients; the problems are in float64. Their targets stay so: the loss is of that type."""
    batches = [
        {**batch, "x": batch["x"].float()}
        if isinstance(batch, dict)
        else (batch[0].float(), batch[1])
        for batch in problem.batches
    ]
    return attrs.evolve(problem, model=lambda: problem.model().float(), batches=batches)


@pytest.mark.parametrize(
    "members",
    [
        (SCALED,),
        (SCALED, fl.accumulate(2), fl.clip(0.05), fl.schedule(schedules.cosine(warmup=2))),
        (fl.accumulate(3), SCALED, fl.metric(mean=output_mean), average(0.9)),
        (SCALED, fl.torch_scheduler(decay)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_an_overflow_in_fp16_is_skipped_by_graphs_too(members, problem, tapes):
    problem, steps = (
        single_precision(problem),
        [],
    )  # and batches of one size, so that it is in replays that the scale grows

    def note(state):
        steps.append(
            (state.step, state.skipped, state.slots["amp"].scale.item(), state.slots["amp"].streak)
        )
        return state

    def run(*members):
        return fl.fit(
            fl.pipeline(*members)(problem.loss_fn),
            problem.state(),
            problem.batches[:1] * 6,
            epochs=16,
            hooks=(note,),
        )

    captured = run(*members, fl.cuda_graph(warmup=1))
    eager = run(*members)
    assert_same(captured, eager)
    assert steps[: len(steps) // 2] == steps[len(steps) // 2 :]
    first, second = (
        [e.endswith("+") for e in done(tapes) if e.startswith("replay")].count(part)
        for part in (False, True)
    )
    assert first > second > 5


def test_an_update_that_overflowed_is_no_warm_up(tapes):
    """The first updates overflow at a scale of 2²⁰: the optimizer has no state yet when they are over."""
    problem = single_precision(attrs.evolve(small(), optimizer=capturable_adam))
    step = fl.pipeline(SCALED, fl.cuda_graph(warmup=1))(problem.loss_fn)
    state = fl.fit(step, problem.state(), problem.batches[:1] * 30, hooks=())
    assert done(tapes)[: state.skipped + 2].count("run") >= 2 and "record 0" in done(tapes)


def test_gradients_that_are_looked_at_batch_by_batch_in_fp16_are_refused(tapes):
    """Eagerly one batch of a window may be left out and not the others; a graph is cut into two parts only."""
    problem = single_precision(small())

    def run(*members):
        step = fl.pipeline(SCALED, fl.clip(0.05), fl.accumulate(3), *members)(problem.loss_fn)
        return fl.fit(step, problem.state(), problem.batches[:1] * 6, epochs=12, hooks=())

    with pytest.raises(CaptureError, match="decides more than once within the update"):
        run(fl.cuda_graph(warmup=1))
    with pytest.warns(UserWarning, match="cuda_graph runs eagerly"):
        captured = run(fl.cuda_graph(warmup=1, fallback=True))
    assert_same(captured, run())


def test_what_counts_updates_that_are_left_out_is_refused(tapes):
    def wrap(step):
        def counting(state, batch):
            state, out = step(state, batch)
            if out.skip is not None:
                state.slots["count"].add_(1)
            return state, out

        return counting

    count = fl.Middleware("count", update=wrap, init=lambda state: torch.zeros(()))
    with pytest.raises(
        CaptureError, match=r"aten.add_.Tensor\) behind a gradient that overflowed in fp16"
    ):
        fl.fit(
            fl.pipeline(fl.amp("fp16"), count, fl.cuda_graph(warmup=1))(toy_loss),
            toy(),
            ones(*range(9)),
            hooks=(),
        )


def test_what_counts_them_on_the_host_is_refused_too(tapes):
    def wrap(step):
        def counting(state, batch):
            state, out = step(state, batch)
            state.model.left_out += out.skip is not None
            return state, out

        return counting

    state = toy()
    state.model.left_out = 0
    step = fl.pipeline(
        fl.amp("fp16"), fl.Middleware("count", update=wrap), fl.cuda_graph(warmup=1)
    )(toy_loss)
    with pytest.raises(CaptureError, match=r"model\.left_out is changed on the host"):
        fl.fit(step, state, ones(*range(9)), hooks=())
    assert state.model.left_out == 0


def test_a_loss_that_is_not_finite_is_an_error_in_graphs_too(tapes):
    step = fl.pipeline(fl.amp("fp16", init_scale=1.0), fl.cuda_graph(warmup=1))(toy_loss)
    with pytest.raises(FloatingPointError, match="the loss itself is not finite") as caught:
        fl.fit(step, toy(), ones(1, 1, *[float("nan")] * 50), hooks=())
    assert (
        caught.value.state.step,
        caught.value.state.skipped,
        caught.value.state.model.w.item(),
    ) == (2, 25, -2.0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_plain_optimizer_is_made_capturable_and_computes_the_same(optimizer, tapes):
    def run(*members):
        problem = net(lambda parameters: optimizer(parameters, lr=0.05))
        halving = fl.schedule(lambda i, total: 0.5 ** (i // 7))
        return fl.fit(
            fl.pipeline(halving, *members)(problem.loss_fn),
            problem.state(),
            problem.batches,
            epochs=3,
            hooks=(),
        )

    captured, plain = run(fl.cuda_graph()), run()
    assert any(entry.startswith("replay") for entry in done(tapes))
    assert isinstance(captured.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert captured.history["train/loss"] == pytest.approx(plain.history["train/loss"], rel=1e-5)
    assert captured.history["train/lr"] == pytest.approx(plain.history["train/lr"], rel=1e-6)


def test_graphs_keep_the_laws_of_fold_and_purity(tapes):
    pipe = fl.pipeline(fl.accumulate(2), fl.clip(0.05), average(0.9), fl.cuda_graph(warmup=1))
    for problem in PROBLEMS:
        law_fold(pipe, problem)
        law_purity(pipe, problem)
    law_no_host_reads(pipe, PROBLEMS[0])


# --- what is captured, and when


def test_a_kind_of_batch_is_captured_behind_its_warm_up_and_replayed_from_then_on(tapes):
    step = fl.pipeline(fl.cuda_graph(warmup=2))(toy_loss)
    state = fl.fit(step, toy(), ones(1, 2, 3, 4), hooks=())
    assert done(tapes) == ["run", "run", "record 0", "replay 0", "replay 0"]
    assert (state.model.w.item(), state.step, state.history["train/loss"]) == (
        -10.0,
        4,
        ((0 - 2 - 9 - 24) / 4,),
    )


def test_the_last_window_has_a_graph_of_its_own_when_it_has_come_often_enough(tapes):
    step = fl.pipeline(fl.accumulate(2), fl.cuda_graph(warmup=1))(toy_loss)
    state = fl.fit(step, toy(), ones(1, 2, 3), epochs=3, hooks=())
    assert done(tapes) == [
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


def test_the_graph_that_was_not_used_for_longest_goes(tapes):
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
    assert done(tapes) == [
        *("run", "record 0", "replay 0"),
        *("run", "record 1", "replay 1"),
        *("run", "record 2", "replay 2"),
        "replay 1",
        *("run", "record 3", "replay 3"),
    ]
    assert state.model.w.item() == -9.0


def test_evaluation_is_not_captured(tapes):
    step = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss)
    assert fl.evaluate(step, toy(w=2.0), ones(1, 2, 3)) == {"loss": 4.0}
    assert not tapes


def test_what_a_step_returns_is_not_overwritten_by_the_next(tapes):
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


def test_a_metric_that_keeps_what_it_is_given_is_not_overwritten(tapes):
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


def test_a_metric_of_the_users_own_is_copied(tapes):
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


def test_a_loss_function_may_take_the_gradient_of_its_input(tapes):
    def penalty(model, batch):
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return (slope * batch.detach()).mean()  # w x

    def run(*members):
        batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
        return fl.fit(fl.pipeline(*members)(penalty), toy(), batches, hooks=()).model.w.item()

    assert run(fl.cuda_graph(warmup=1)) == run() == -10.0


# --- what a graph takes for granted


def stopping(tapes, change, batches=4, **kwargs):
    """Train a net for some updates, change something, train on; and the same without graphs."""

    def run(*members):
        problem, hooks = net(**kwargs), (fl.when(lambda state: state.step == batches)(change),)
        step = fl.pipeline(*members, fl.clip(float("inf")))(problem.loss_fn)
        return fl.fit(step, problem.state(), [problem.batches[0]] * 2 * batches, hooks=hooks)

    captured = run(fl.cuda_graph(warmup=1))
    assert_same(captured, run())
    return done(tapes)


def test_a_learning_rate_that_a_hook_sets_is_filled_in(tapes):
    def change(state):
        state.optimizer.param_groups[0]["lr"] = 0.5
        return state

    assert stopping(tapes, change).count("run") == 1


def momentum(state):
    state.optimizer.param_groups[0]["momentum"] = 0.5
    return state


def freeze(state):
    state.model[0].weight.requires_grad_(False)
    return state


def evaluation_mode(state):
    state.model[1].eval()
    return state


def other_memory(state):
    state.model[0].weight.data = state.model[0].weight.data * 2
    return state


def other_optimizer_state(state):
    state.optimizer.load_state_dict(state.optimizer.state_dict())
    for values in state.optimizer.state.values():
        values["momentum_buffer"] = values["momentum_buffer"] * 2
    return state


@pytest.mark.parametrize(
    "change", [momentum, freeze, evaluation_mode, other_memory, other_optimizer_state]
)
def test_what_changes_between_two_updates_makes_new_graphs(change, tapes):
    assert [entry for entry in stopping(tapes, change) if "replay" not in entry] == [
        "run",
        "record 0",
    ] * 2


def test_a_slot_that_is_replaced_from_outside_makes_a_new_graph(tapes):
    problem = net()

    def run(*members):
        step, state = fl.pipeline(average(0.5), *members)(problem.loss_fn), problem.state()
        for i in range(6):
            if i == 4:
                state = attrs.evolve(
                    state, slots={"average": [torch.zeros_like(t) for t in state.slots["average"]]}
                )
            state, _ = step(state, problem.batches[0])
        return state

    assert_same(run(fl.cuda_graph(warmup=1)), run())


def test_tensors_of_a_slot_that_are_replaced_from_outside_make_a_new_graph(tapes):
    def replace(state):
        if state.step == 4:
            state.slots["average"][:] = [torch.zeros_like(t) for t in state.slots["average"]]
        return state

    def run(*members):
        step = fl.pipeline(average(0.9), *members)(net().loss_fn)
        return fl.fit(step, net().state(), net().batches[:1] * 9, hooks=(replace,))

    assert_same(run(fl.cuda_graph(warmup=1)), run())
    assert done(tapes).count("run") == 2


def test_a_number_of_a_module_that_a_hook_changes_makes_a_new_graph(tapes):
    class Scaled(nn.Linear):
        beta = None

        def forward(self, x):
            return super().forward(x) * self.beta

    def model():
        made = Scaled(4, 1)
        made.beta = 1.0
        return made.double()

    def anneal(state):
        state.model.beta = 0.5 if state.step >= 4 else 1.0
        return state

    def run(*members):
        step = fl.pipeline(*members)(lambda model, batch: model(batch).square().mean())
        torch.manual_seed(0)
        made = model()
        state = fl.TrainState.create(made, fused_sgd(made.parameters()), seed=0)
        return fl.fit(step, state, [torch.ones(2, 4, dtype=torch.float64)] * 9, hooks=(anneal,))

    assert_same(run(fl.cuda_graph(warmup=1)), run())
    assert done(tapes).count("run") == 2


def test_a_slot_that_is_replaced_before_every_update_is_told_of(tapes, caplog):
    @fl.middleware("step")
    def renewed():
        def wrap(step):
            def renewing(state, batch):
                return step(attrs.evolve(state, slots={"average": [torch.zeros(())]}), batch)

            return renewing

        return wrap

    step = fl.pipeline(average(0.5), renewed(), fl.cuda_graph(warmup=1))(toy_loss)
    fl.fit(step, toy(), ones(*[1] * 450), hooks=())
    assert len(caplog.messages) == 1
    assert "what changes from one to the next is a slot that the update reads" in caplog.text


def test_a_slot_of_the_step_ring_may_change_with_every_update(tapes):
    @fl.middleware("step")
    def counter():
        def wrap(step):
            def counted(state, batch):
                state, out = step(state, batch)
                return attrs.evolve(
                    state, slots={**state.slots, "counter": state.slots["counter"] + 1}
                ), out

            return counted

        return fl.Middleware("counter", step=wrap, init=lambda state: 0)

    state = fl.fit(
        fl.pipeline(counter(), fl.cuda_graph(warmup=1))(toy_loss), toy(), ones(1, 2, 3, 4), hooks=()
    )
    assert (state.slots["counter"], state.model.w.item(), done(tapes).count("run")) == (4, -10.0, 1)


def test_another_state_has_graphs_of_its_own(tapes):
    step, one = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss), toy()
    two = fl.snapshot(one)
    for batch in ones(1, 2, 3):
        one, _ = step(one, batch)
    for batch in ones(10, 20, 30):
        two, _ = step(two, batch)
    assert (one.model.w.item(), two.model.w.item()) == (-6.0, -60.0)


def test_a_hook_may_go_back_to_a_snapshot(tapes):
    def run(*members):
        kept, went = [], []

        def back(state):
            if state.step == 3 and not kept:
                kept.append(fl.snapshot(state))
            if state.step == 5 and not went:
                went.append(state)
                return kept[0]
            return state

        problem = net()
        state = fl.fit(
            fl.pipeline(*members)(problem.loss_fn),
            problem.state(),
            problem.batches,
            epochs=2,
            hooks=(back,),
        )
        assert went
        return state

    assert_same(run(fl.cuda_graph(warmup=1)), run())


def test_what_was_added_between_two_runs_is_trained(tapes):
    def run(*members):
        problem = net()
        step, state = fl.pipeline(*members)(problem.loss_fn), problem.state()
        state = fl.fit(step, state, [problem.batches[0]] * 3, hooks=())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state.model.append(nn.Linear(1, 1).double())
        state.optimizer.add_param_group({"params": state.model[-1].parameters()})
        return fl.fit(step, state, [problem.batches[0]] * 3, epochs=2, hooks=())

    captured, plain = run(fl.cuda_graph(warmup=1)), run()
    for mine, theirs in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_a_second_run_goes_on_with_the_graphs_of_the_first(tapes):
    step = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss)
    state = fl.fit(step, toy(), ones(1, 2), hooks=())
    fl.fit(step, state, ones(1, 2), epochs=2, hooks=())
    assert done(tapes) == ["run", "record 0", "replay 0", "replay 0", "replay 0"]


def test_updates_that_are_never_captured_are_told_of_once(tapes, caplog):
    step = fl.pipeline(fl.cuda_graph())(toy_loss)
    fl.fit(step, toy(), [torch.ones(n) for n in range(1, 220)], hooks=())
    assert len(caplog.messages) == 1
    assert "what changes from one to the next is the shapes of the batches" in caplog.text
    caplog.clear()
    fading = fl.schedule(schedules.linear(), field="weight_decay")
    state = toy()
    state.optimizer.param_groups[0]["weight_decay"] = 0.1
    fl.fit(fl.pipeline(fl.cuda_graph(), fading)(toy_loss), state, ones(*[1] * 120), hooks=())
    assert "is a setting of the optimizer (weight_decay)" in caplog.text


def test_eager_updates_count_from_the_last_replay(tapes, caplog):
    sizes = [*range(1, 61), 60, 60, *range(61, 121)]
    fl.fit(
        fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss),
        toy(),
        [torch.ones(n) for n in sizes],
        hooks=(),
    )
    assert done(tapes).count("run") == 120
    assert not caplog.messages


# --- what can't be captured


def refused(loss_fn, *members, state=None, match):
    """The message names the cause and the way out, and the state can be gone on with."""
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


def test_a_step_that_was_refused_begins_anew(tapes):
    """With another recorder: torch can't go on with a capture that was cut short."""
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
    assert [tape.log for tape in tapes] == [["run", "record 0"], ["run", "record 0", "replay 0"]]
    assert state.model.w.item() == -3.0


def test_a_host_read_names_its_line(tapes):
    def loss_fn(model, batch):
        loss = model(batch).mean()
        return loss if loss.item() < 1e9 else loss * 0

    message = refused(
        loss_fn, match="can't be captured as a CUDA graph: RuntimeError: operation not permitted"
    )
    assert "test_cuda_graph.py" in message
    assert "return loss if loss.item() < 1e9" in message


READS = [
    lambda state: state.step > 3,
    lambda state: 1 / (1 + state.step),
    lambda state: state.skipped + 1,
    lambda state: state.run.total_steps,
    lambda state: state.history["train/loss"],
]


@pytest.mark.parametrize("read", READS)
def test_what_changes_in_a_state_may_not_be_read_inside(read, tapes):
    def wrap(step):
        def reading(state, batch):
            if (
                tapes[-1].log.count("run")
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


def test_a_slot_that_is_replaced_inside(tapes):
    def wrap(step):
        def replacing(state, batch):
            state, out = step(state, batch)
            return attrs.evolve(state, slots={**state.slots, "mine": state.slots["mine"] + 1}), out

        return replacing

    mine = fl.Middleware("mine", update=wrap, init=lambda state: torch.zeros(()))
    refused(toy_loss, mine, match=r"puts another value into state.slots\['mine'\]")


def test_a_slot_that_counts_on_the_host(tapes):
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


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
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


def of(model):
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)


def test_a_module_that_changes_on_the_host_or_replaces_a_buffer(tapes):
    def loss_fn(model, batch):
        return model(batch).mean()

    refused(loss_fn, state=of(Counting()), match="model.calls is changed on the host")
    with pytest.raises(CaptureError, match=r"model\.seen is replaced by another tensor"):
        fl.fit(fl.pipeline(fl.cuda_graph())(loss_fn), of(Replacing()), ones(1, 2, 3, 4), hooks=())


def test_a_module_may_keep_what_it_has_computed(tapes):
    """An auxiliary loss, say, that the loss function takes from there."""
    step = fl.pipeline(fl.cuda_graph(warmup=1))(
        lambda model, batch: (model(batch), model.output.mean())[1]
    )
    assert fl.fit(step, of(Storing()), ones(1, 2, 3), hooks=()).model.w.item() == -6.0


@pytest.mark.parametrize(
    ("draw", "whose"), [(np.random.rand, "numpy's"), (__import__("random").random, "python's")]
)
def test_a_draw_on_the_host(draw, whose, tapes):
    refused(
        lambda model, batch: model(batch).mean() * (1 + draw()),
        match=f"draws from {whose} generator",
    )


def test_an_update_that_is_left_out(tapes):
    def wrap(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="a guard" if "record 0" in done(tapes) else None)

        return skipping

    state = toy()
    step = fl.pipeline(fl.Middleware("guard", gradient=wrap), fl.cuda_graph(warmup=1))(toy_loss)
    state, _ = step(state, torch.ones(1))
    with pytest.raises(CaptureError, match=r"it is left out \(a guard\)"):
        step(state, torch.ones(1))


def test_an_optimizer_that_evaluates_the_loss_itself(tapes):
    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.LBFGS(model.parameters()), seed=0)
    with pytest.raises(
        CaptureError, match="LBFGS decides on the host how often it evaluates the loss"
    ):
        fl.pipeline(fl.cuda_graph())(fl.supervised(nn.MSELoss()))(
            state, (torch.ones(1, 1), torch.ones(1, 1))
        )


def test_an_optimizer_that_was_told_not_to_be_fused(tapes):
    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), foreach=True), seed=0)
    with pytest.raises(
        CaptureError, match=r"SGD reads its learning rate to the host: write SGD\(..., fused=True\)"
    ):
        fl.pipeline(fl.cuda_graph())(fl.supervised(nn.MSELoss()))(
            state, (torch.ones(1, 1), torch.ones(1, 1))
        )


def test_an_optimizer_that_is_refused_is_as_it_was(tapes):
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


def test_a_failure_while_warming_up_leaves_the_optimizer_as_it_was(tapes):
    def failing(model, batch):
        raise ArithmeticError(type(state.optimizer.param_groups[0]["lr"]).__name__)

    state = toy()
    with pytest.raises(ArithmeticError, match="Tensor"):
        fl.pipeline(fl.cuda_graph())(failing)(state, torch.ones(1))
    (group,) = state.optimizer.param_groups
    assert (group["lr"], type(group["lr"]), group["fused"]) == (1.0, float, None)


def test_sparse_gradients_are_refused(tapes):
    model = nn.Embedding(3, 2, sparse=True)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    with pytest.raises(CaptureError, match="leave out sparse=True"):
        fl.pipeline(fl.cuda_graph())(lambda model, batch: model(batch).sum())(
            state, torch.tensor([1])
        )


def test_an_optimizer_that_counts_for_all_its_parameters_together(tapes):
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


def test_a_batch_with_something_else_in_it(tapes):
    with pytest.raises(CaptureError, match="there is a ndarray in it"):
        fl.pipeline(fl.cuda_graph())(toy_loss)(toy(), {"x": np.ones(1)})
    with pytest.raises(CaptureError, match=r"one of layout torch\.sparse_coo"):
        step = fl.pipeline(fl.cuda_graph(warmup=1))(
            lambda model, batch: (model.w * batch.to_dense().sum(), {"weight": 1})
        )
        state, batch = toy(), torch.ones(2).to_sparse()
        for _ in range(2):
            state, _ = step(state, batch)


def test_a_model_on_the_cpu():
    with pytest.raises(
        CaptureError, match=r"needs the model on a CUDA device; it is on cpu\. .*fallback=True"
    ):
        fl.pipeline(fl.cuda_graph())(toy_loss)(toy(), torch.ones(1))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"warmup as an int >= 1, .*; got 0"):
        fl.cuda_graph(0)
    with pytest.raises(ValueError, match=r"limit as an int >= 1, .*; got 1\.5"):
        fl.cuda_graph(limit=1.5)


def test_what_can_not_be_together_is_refused_when_composing():
    fl.pipeline(fl.amp("bf16"), fl.compiled(mode="max-autotune-no-cudagraphs"), fl.cuda_graph())
    for own in (
        fl.compiled(mode="reduce-overhead"),
        fl.compiled(options={"triton.cudagraphs": True}),
    ):
        with pytest.raises(ValueError, match="makes CUDA graphs of its own"):
            fl.pipeline(fl.cuda_graph(), own)


def test_it_shows_compares_and_pickles_as_it_was_typed():
    pipe = fl.pipeline(fl.accumulate(4), fl.cuda_graph(warmup=5))
    assert repr(pipe) == "pipeline(accumulate(4), cuda_graph(warmup=5))"
    assert pickle.loads(pickle.dumps(pipe)) == pipe
    assert pickle.loads(pickle.dumps(pipe(toy_loss))).pipeline == pipe


def test_an_interruption_stays_one_and_the_optimizer_is_as_it_was(tapes):
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


# --- falling back


def test_without_cuda_it_warns_once_and_runs_eagerly():
    step, state = fl.pipeline(fl.cuda_graph(fallback=True))(toy_loss), toy()
    with pytest.warns(UserWarning, match="cuda_graph runs eagerly: .* it is on cpu"):
        state, _ = step(state, torch.ones(1))
    state, _ = step(state, torch.ones(1))
    assert (state.model.w.item(), state.optimizer.param_groups[0]["lr"]) == (-2.0, 1.0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_that_turns_out_to_read_runs_on_eagerly_with_its_optimizer_as_it_was(
    optimizer, tapes
):
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


def test_what_python_did_while_it_was_recorded_is_undone(tapes):
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


def test_the_settings_that_come_back_are_those_that_were_given_though_graphs_were_made_anew(tapes):
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


# --- checkpoints


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_checkpoints_go_from_graphs_to_eager_runs_and_back(optimizer, tmp_path, tapes):
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


def test_a_checkpoint_that_a_hook_restores_is_gone_on_with(tmp_path, tapes):
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


# --- the parts


def test_a_signature_tells_batches_apart_by_what_a_graph_can_not_change():
    def key(batch):
        return signature(batch, [])

    x = torch.ones(2, 3)
    assert key((x, x)) == key((x + 1, x))
    different = [
        x,
        (x,),
        [x],
        (x, x),
        {"x": x},
        {"y": x},
        (x.double(),),
        (x[:1],),
        (x, None),
        (x, 1),
        (x, 2),
        (x, True),
        (x, "a"),
        ((x,),),
    ]
    assert len({key(batch) for batch in different}) == len(different)
    assert hash(key({"a": [x, {"b": (x, 2.5)}]}))


def test_a_batch_is_rebuilt_around_other_tensors():
    from collections import OrderedDict, namedtuple

    Pair = namedtuple("Pair", "x y")
    batch = Pair({"a": torch.ones(1), "n": 3}, [torch.zeros(2), (torch.ones(2), None)])
    tensors = []
    signature(batch, tensors)
    again = rebuilt(batch, iter([t + 5 for t in tensors]))
    assert type(again) is Pair
    assert (again.x["a"].item(), again.x["n"], again.y[1][0].tolist(), again.y[1][1]) == (
        6.0,
        3,
        [6.0, 6.0],
        None,
    )
    assert type(rebuilt(OrderedDict(x=torch.ones(1)), iter([torch.zeros(1)]))) is OrderedDict


def test_an_optimizer_is_made_capturable_and_back():
    model = nn.Linear(1, 1)
    for make, changed in ((torch.optim.AdamW, "capturable"), (torch.optim.SGD, "fused")):
        optimizer = make(model.parameters(), lr=0.1)
        before = optimizer.state_dict()["param_groups"]
        given = make_capturable(optimizer, torch.device("cpu"))
        (group,) = optimizer.param_groups
        assert (group["lr"].item(), group[changed]) == (pytest.approx(0.1), True)
        group["lr"].fill_(0.25)
        undo_capturable(optimizer, given)
        assert optimizer.state_dict()["param_groups"] == [before[0] | {"lr": 0.25}]


def test_groups_that_share_a_learning_rate_get_one_each():
    a, b, rate = nn.Linear(1, 1), nn.Linear(1, 1), torch.tensor(0.1)
    optimizer = torch.optim.SGD(
        [{"params": a.parameters()}, {"params": b.parameters()}], lr=rate, fused=True
    )
    make_capturable(optimizer, torch.device("cpu"))
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is not second
    assert rate is not first


def test_a_learning_rate_that_was_given_as_a_tensor_stays_one():
    model, rate = nn.Linear(1, 1), torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    undo_capturable(optimizer, make_capturable(optimizer, torch.device("cpu")))
    assert optimizer.param_groups[0]["lr"] is rate


def on_cuda(state):
    """Return the state as if the host and the device were two."""
    return attrs.evolve(state, backend=attrs.evolve(state.backend, device="cuda"))


def test_an_optimizer_that_counts_on_the_host_is_found():
    """Adagrad's step is on the host: on a device, a graph would never count it."""
    model = nn.Linear(1, 1)
    state = on_cuda(fl.TrainState.create(model, torch.optim.Adagrad(model.parameters()), seed=0))
    before, put_back = host_state(state), make_rollback(state)
    for values in state.optimizer.state.values():
        values["step"] += 1
    with pytest.raises(
        CaptureError,
        match=r"the state of the optimizer \(parameter 0\).step is changed on the host",
    ):
        check_facts(before, host_state(state))
    put_back()
    assert state.optimizer.state[model.weight]["step"].item() == 0


@attrs.define
class Record:
    value: object


@pytest.mark.parametrize(
    ("slot", "change", "found"),
    [
        ([1, 2], lambda slot: slot.append(3), "state.slots.mine.2 is made"),
        (
            {"a": {"b": 1.0}},
            lambda slot: slot["a"].update(b=2.0),
            "state.slots.mine.a.b is changed on the host",
        ),
        (
            Record(1),
            lambda slot: setattr(slot, "value", 2),
            "state.slots.mine.value is changed on the host",
        ),
        (
            Record(torch.zeros(1)),
            lambda slot: setattr(slot, "value", torch.ones(1)),
            "mine.value is replaced",
        ),
        (
            nn.BatchNorm1d(1),
            lambda slot: slot.register_buffer("running_mean", torch.ones(1)),
            "mine.running_mean is replaced",
        ),
        (
            [torch.zeros(1)],
            lambda slot: slot[0].add_(1),
            "state.slots.mine.0 is changed on the host",
        ),
    ],
)
def test_what_changes_in_a_slot_is_found_wherever_it_is(slot, change, found):
    state = on_cuda(attrs.evolve(toy(), slots={"mine": slot}))
    before = host_state(state)
    check_facts(before, host_state(state))
    kept = (
        [slot.value]
        if isinstance(slot, Record)
        else list(slot.buffers())
        if isinstance(slot, nn.Module)
        else []
    )
    change(slot)
    with pytest.raises(CaptureError, match=found.replace(".", r"\.")):
        check_facts(before, host_state(state))
    del kept  # alive until now, so that nothing else had its place in memory


def test_slots_note_which_of_them_are_read():
    slots = Slots({"a": 1, "b": 2, "c": 3})
    assert (slots["a"], slots.get("b"), slots.get("d"), {**slots}) == (
        1,
        2,
        None,
        {"a": 1, "b": 2, "c": 3},
    )
    assert slots.used == {"a", "b", "d"}
