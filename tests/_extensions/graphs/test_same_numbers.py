"""Law 9: a run with graphs computes the same numbers as one without."""

import attrs
import pytest
import torch
from after_steps import after
from graph_problems import PROBLEMS, capturable_adam, compared, done, fused_sgd, replays
from sample_middleware import (
    average,
    decay,
    largest_output,
    noise,
    output_mean,
    own_guard,
    weight_penalty,
)
from several import fused_sgd_twice, muon_and_sgd, problem, split
from toy_runs import fitted, noting

import fnloop as fl
from fnloop import CaptureError, schedules
from fnloop.testing import assert_same, law_fold, law_no_host_reads, law_purity, small, toy

TABLE = [
    (), (fl.accumulate(2),), (fl.accumulate(3), fl.clip(0.05)), (fl.clip(0.05), fl.accumulate(3)),
    (fl.clip_value(0.01),), (fl.clip(0.05, only="0.*"), fl.accumulate(2), fl.clip_adaptive(0.01)),
    (fl.amp("bf16"), fl.accumulate(2), fl.clip(0.05)),
    (fl.schedule(schedules.cosine(warmup=2, min_ratio=0.1)),),
    (fl.torch_scheduler(decay), fl.clip(float("inf"))),
    (fl.metric(mean=output_mean, largest=largest_output), fl.accumulate(2)),
    (noise(0.01), fl.accumulate(2)),
    (weight_penalty(0.01), average(0.9), fl.schedule(schedules.linear())),
    (fl.compiled(backend="eager"), fl.accumulate(2), fl.clip(0.05)), (fl.ema(0.9),),
    (fl.ema(0.9, start=9, every=2), fl.accumulate(2)),
    (fl.ema(0.9, start=0.25), fl.swa(0.5), fl.schedule(schedules.linear())),
    (fl.swa(5, every=3, evaluate="only"), fl.metric(mean=output_mean)),
]  # fmt: skip


@pytest.mark.parametrize("members", TABLE, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_a_run_with_graphs_is_the_same_bit_for_bit(members, problem, recorders):
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    compared(problem, *members, loaders=loaders, epochs=4)
    assert len(replays(recorders)) > len(done(recorders)) / 2


NAN = float("nan")
SCALED = fl.amp("fp16", init_scale=2.0**20, growth_interval=4)


def single_precision(problem):
    """fp16 unscales float32 gradients; targets stay float64, and the loss with them."""

    def in_single(batch):
        if isinstance(batch, dict):
            return {**batch, "x": batch["x"].float()}
        return batch[0].float(), batch[1]

    batches = [*map(in_single, problem.batches)]
    return attrs.evolve(problem, model=lambda: problem.model().float(), batches=batches)


@pytest.mark.parametrize("members", [
    (SCALED,), (SCALED, fl.accumulate(2), fl.clip(0.05), fl.schedule(schedules.cosine(warmup=2))),
    (fl.accumulate(3), SCALED, fl.metric(mean=output_mean), average(0.9)),
    (SCALED, fl.microbatch(2), fl.accumulate(2), fl.clip(0.05)),
    (SCALED, fl.torch_scheduler(decay)), (SCALED, fl.ema(0.9, start=11, every=2), fl.swa(0.5)),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_an_overflow_in_fp16_is_skipped_by_graphs_too(members, problem, recorders):
    """The batches are of one size, so that it is in replays that the scale grows."""
    problem = single_precision(problem)

    def scales(state):
        slot = state.slots["amp"]
        return state.step, state.skipped, slot.scale.item(), slot.streak

    note, steps = noting(scales)
    loaders, settings = problem.batches[:1] * 6, {"epochs": 16, "hooks": (note,)}
    compared(problem, *members, loaders=loaders, **settings)
    assert steps[: len(steps) // 2] == steps[len(steps) // 2 :]
    second = sum(entry.endswith("+") for entry in replays(recorders))
    assert len(replays(recorders)) - second > second > 5


GUARDED = [
    (fl.skip_nonfinite(),),
    (fl.skip_nonfinite(), fl.accumulate(2), fl.clip(0.05), fl.ema(0.9)),
    (SCALED, fl.accumulate(2), fl.skip_nonfinite(), fl.clip(0.05)),  # two decisions
    (fl.skip_nonfinite(), fl.spike_guard(3, 1.2), fl.clip(0.05)),
    (fl.ema(0.5), fl.clip(0.05), fl.spike_guard(2, 1.02, then="back")),
    (fl.accumulate(2), own_guard(), fl.clip(0.05), fl.ema(0.9)),
]


GUARDS = "amp", "skip_nonfinite", "spike_guard", "own_guard"


@pytest.mark.parametrize("members", GUARDED, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_a_guard_leaves_the_same_updates_out_with_graphs(members, problem, recorders):
    problem = single_precision(problem)
    good = problem.batches[0]
    bad = {**good, "x": good["x"] * NAN} if isinstance(good, dict) else (good[0] * NAN, good[1])
    batches = [good] * 8 + [bad, good] * 3 + [good] * 4
    captured = compared(problem, *members, loaders=batches, epochs=2)
    assert captured.skipped >= 6 and all(p.isfinite().all() for p in captured.model.parameters())
    decisions = sum(member.name in GUARDS for member in members)
    parts = [entry.count("+") for entry in replays(recorders)]
    assert max(parts) == decisions and parts.count(0) > parts.count(decisions)


def test_an_update_that_overflowed_does_not_count_as_warm_up(recorders):
    """The first updates overflow at a scale of 2²⁰, so the optimizer has no state after them."""
    problem = single_precision(attrs.evolve(small(), optimizer=capturable_adam))
    step = fl.pipeline(SCALED, fl.cuda_graph(warmup=1))(problem.loss_fn)
    state = fl.fit(step, problem.state(), problem.batches[:1] * 30, hooks=())
    assert done(recorders)[: state.skipped + 2].count("run") >= 2 and "record 0" in done(recorders)


@pytest.mark.parametrize("member", [fl.ema(0.5, start=4, every=2), fl.swa(4, every=2)], ids=repr)
def test_one_graph_serves_every_update_of_an_average(member, recorders):
    note, found = noting(lambda state: state.slots[member.name]["w"].item())
    fitted([1] * 10, member, fl.cuda_graph(warmup=1), hooks=(note,))
    assert done(recorders) == ["run", "record 0", *["replay 0"] * 9]
    fitted([1] * 10, member, hooks=(note,))
    assert found[:10] == found[10:]


def test_middleware_that_sees_fp16_gradients_batch_by_batch_is_refused(recorders):
    """Eagerly, one batch of a window may be skipped and not the others. A graph has two parts."""
    problem = single_precision(small())

    def run(*members):
        members = SCALED, fl.clip(0.05), fl.accumulate(3), *members
        settings = {"loss_fn": problem.loss_fn, "state": problem.state(), "epochs": 12}
        return fitted(problem.batches[:1] * 6, *members, **settings)

    with pytest.raises(CaptureError, match="decides more than once within the update"):
        run(fl.cuda_graph(warmup=1))
    with pytest.warns(UserWarning, match="cuda_graph runs eagerly"):
        captured = run(fl.cuda_graph(warmup=1, fallback=True))
    assert_same(captured, run())


def count_on_the_device(state):
    state.slots["count"].add_(1)


def count_on_the_host(state):
    state.model.left_out += 1


@pytest.mark.parametrize(("count", "said"), [
    (count_on_the_device, r"aten.add_.Tensor\) after a guard has left it out"),
    (count_on_the_host, r"model\.left_out is changed on the host"),
])  # fmt: skip
def test_middleware_that_counts_skipped_updates_is_refused(count, said, recorders):
    state = toy()
    state.model.left_out = 0
    left_out = lambda state, batch, out: None if out.skip is None else count(state)
    member = after("update", left_out, "count", init=lambda state: torch.zeros(()))
    with pytest.raises(CaptureError, match=said):
        fitted([*range(9)], fl.amp("fp16"), member, fl.cuda_graph(warmup=1), state=state)
    assert state.model.left_out == 0


def test_a_loss_that_is_not_finite_is_an_error_in_graphs_too(recorders):
    with pytest.raises(FloatingPointError, match="the loss itself is not finite") as caught:
        fitted([1, 1, *[NAN] * 50], fl.amp("fp16", init_scale=1.0), fl.cuda_graph(warmup=1))
    state = caught.value.state
    assert (state.step, state.skipped, state.model.w.item()) == (2, 25, -2.0)


def test_graphs_keep_the_laws_of_fold_and_purity(recorders):
    averages = (average(0.9), fl.ema(0.9, start=2), fl.swa(3, every=2))
    pipe = fl.pipeline(fl.accumulate(2), fl.clip(0.05), *averages, fl.cuda_graph(warmup=1))
    for one in PROBLEMS:
        law_fold(pipe, one)
        law_purity(pipe, one)
    law_no_host_reads(pipe, PROBLEMS[0])


# --- several optimizers


LINEAR = schedules.linear()


def sgd_and_adam(parameters):
    matrices, rest = split(parameters)
    return {"matrices": fused_sgd(matrices), "rest": capturable_adam(rest)}


SEVERAL = [
    (), (fl.accumulate(3), fl.clip(0.05)), (fl.schedule(LINEAR),),
    (fl.schedule(LINEAR, only="rest"), fl.schedule(schedules.cosine(warmup=2), only="matrices")),
]  # fmt: skip


@pytest.mark.parametrize("members", SEVERAL, ids=repr)
@pytest.mark.parametrize("optimizers", [fused_sgd_twice, sgd_and_adam])
def test_a_run_with_several_optimizers_is_the_same_bit_for_bit(members, optimizers, recorders):
    captured = compared(problem(optimizers), *members, epochs=4)
    assert len(replays(recorders)) > len(done(recorders)) / 2
    assert captured.updates == {"matrices": captured.step, "rest": captured.step}


def plain_sgd_twice(parameters, **settings):
    matrices, rest = (torch.optim.SGD(p, lr=0.5, foreach=None) for p in split(parameters))
    for group in rest.param_groups:
        group.update(settings)
    return {"matrices": matrices, "rest": rest}


def test_all_are_made_capturable(recorders):
    one = problem(plain_sgd_twice)
    step = fl.pipeline(fl.cuda_graph(warmup=1))(one.loss_fn)
    state = fl.fit(step, one.state(), one.batches, hooks=())
    for optimizer in state.optimizer.values():
        (group,) = optimizer.param_groups
        assert isinstance(group["lr"], torch.Tensor) and group["fused"]


def failing(model, batch):
    raise ArithmeticError


@pytest.mark.parametrize(("settings", "loss_fn", "error", "said"), [
    ({"foreach": True}, None, CaptureError, r"write SGD\(..., fused=True\)"),
    ({}, failing, ArithmeticError, None),  # during the warm-up
])  # fmt: skip
def test_after_a_failure_none_is_changed(settings, loss_fn, error, said, recorders):
    one = problem(lambda parameters: plain_sgd_twice(parameters, **settings))
    state = one.state()
    with pytest.raises(error, match=said):
        fl.pipeline(fl.cuda_graph())(loss_fn or one.loss_fn)(state, one.batches[0])
    for optimizer in state.optimizer.values():
        (group,) = optimizer.param_groups
        assert (group["lr"], group["fused"]) == (0.5, None)


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        super().step(closure)


def test_a_count_on_the_host_is_found_in_each_and_undone(recorders):
    def optimizers(parameters):
        named = fused_sgd_twice(parameters)
        groups = named["rest"].param_groups
        return named | {"rest": Counting([{"params": groups[0]["params"]}], lr=0.5, fused=True)}

    one = problem(optimizers)
    step, state = fl.pipeline(fl.cuda_graph(warmup=1))(one.loss_fn), one.state()
    state, _ = step(state, one.batches[0])
    said = r"the state of the optimizer 'rest'.* is changed on the"
    with pytest.raises(CaptureError, match=said):
        step(state, one.batches[0])
    assert state.optimizer["rest"].state["calls"] == 1


def test_muon_is_refused_by_name_before_anything_is_changed(recorders):
    one = problem(muon_and_sgd)
    step, state = fl.pipeline(fl.cuda_graph())(one.loss_fn), one.state()
    with pytest.raises(CaptureError, match=r"^Muon reads numbers to the host in every update"):
        step(state, one.batches[0])
    assert state.optimizer["rest"].param_groups[0]["lr"] == 0.05


def setting(optimizer):
    optimizer.param_groups[0]["momentum"] = 0.5


def other_memory(optimizer):
    for values in optimizer.state.values():
        values["momentum_buffer"] = values["momentum_buffer"] * 2


@pytest.mark.parametrize("change", [setting, other_memory])
def test_a_change_of_the_second_is_noticed(change, recorders):
    changed = fl.when(lambda s: s.step == 5)(lambda s: change(s.optimizer["rest"]) or s)
    compared(problem(fused_sgd_twice), epochs=2, hooks=(changed,))
