"""Law 9: a run with graphs computes the same numbers as one without."""

import attrs
import pytest
import torch
from graph_problems import PROBLEMS, capturable_adam, done, net, ones
from sample_middleware import (
    average,
    decay,
    largest_output,
    noise,
    output_mean,
    own_guard,
    weight_penalty,
)

import fnloop as fl
from fnloop import CaptureError, schedules
from fnloop.testing import (
    assert_same,
    law_fold,
    law_no_host_reads,
    law_purity,
    small,
    toy,
    toy_loss,
)

TABLE = [
    (),
    (fl.accumulate(2),),
    (fl.accumulate(3), fl.clip(0.05)),
    (fl.clip(0.05), fl.accumulate(3)),
    (fl.clip_value(0.01),),
    (fl.clip(0.05, only="0.*"), fl.accumulate(2), fl.clip_adaptive(0.01)),
    (fl.amp("bf16"), fl.accumulate(2), fl.clip(0.05)),
    (fl.schedule(schedules.cosine(warmup=2, min_ratio=0.1)),),
    (fl.torch_scheduler(decay), fl.clip(float("inf"))),
    (fl.metric(mean=output_mean, largest=largest_output), fl.accumulate(2)),
    (noise(0.01), fl.accumulate(2)),
    (weight_penalty(0.01), average(0.9), fl.schedule(schedules.linear())),
    (fl.compiled(backend="eager"), fl.accumulate(2), fl.clip(0.05)),
    (fl.ema(0.9),),
    (fl.ema(0.9, start=9, every=2), fl.accumulate(2)),
    (fl.ema(0.9, start=0.25), fl.swa(0.5), fl.schedule(schedules.linear())),
    (fl.swa(5, every=3, evaluate="only"), fl.metric(mean=output_mean)),
]


@pytest.mark.parametrize("members", TABLE, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_a_run_with_graphs_is_the_same_bit_for_bit(members, problem, recorders):
    def run(*members):
        loaders = {"train": problem.batches, "valid": problem.batches[:2]}
        return fl.fit(
            fl.pipeline(*members)(problem.loss_fn), problem.state(), loaders, epochs=4, hooks=()
        )

    captured = run(*members, fl.cuda_graph(warmup=1))
    assert sum(entry.startswith("replay") for entry in done(recorders)) > len(done(recorders)) / 2
    assert_same(captured, run(*members))


SCALED = fl.amp("fp16", init_scale=2.0**20, growth_interval=4)


def single_precision(problem):
    """fp16 unscales float32 gradients; targets stay float64, and the loss with them."""
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
        (SCALED, fl.microbatch(2), fl.accumulate(2), fl.clip(0.05)),
        (SCALED, fl.torch_scheduler(decay)),
        (SCALED, fl.ema(0.9, start=11, every=2), fl.swa(0.5)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_an_overflow_in_fp16_is_skipped_by_graphs_too(members, problem, recorders):
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
        [e.endswith("+") for e in done(recorders) if e.startswith("replay")].count(part)
        for part in (False, True)
    )
    assert first > second > 5


GUARDED = [
    (fl.skip_nonfinite(),),
    (fl.skip_nonfinite(), fl.accumulate(2), fl.clip(0.05), fl.ema(0.9)),
    (SCALED, fl.accumulate(2), fl.skip_nonfinite(), fl.clip(0.05)),  # two decisions
    (fl.skip_nonfinite(), fl.spike_guard(3, 1.2), fl.clip(0.05)),
    (fl.ema(0.5), fl.clip(0.05), fl.spike_guard(2, 1.02, then="back")),
    (fl.accumulate(2), own_guard(), fl.clip(0.05), fl.ema(0.9)),
]


@pytest.mark.parametrize("members", GUARDED, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["small", "stochastic"])
def test_a_guard_leaves_the_same_updates_out_with_graphs(members, problem, recorders):
    problem = single_precision(problem)
    good, part = problem.batches[0], "x" if isinstance(problem.batches[0], dict) else 0
    bad = dict(good) if part else list(good)
    bad[part] = bad[part] * torch.nan
    batches = [good] * 8 + [bad if part else tuple(bad), good] * 3 + [good] * 4

    def run(*members):
        step = fl.pipeline(*members)(problem.loss_fn)
        return fl.fit(step, problem.state(), batches, epochs=2, hooks=())

    captured = run(*members, fl.cuda_graph(warmup=1))
    assert_same(captured, run(*members))
    assert captured.skipped >= 6 and all(p.isfinite().all() for p in captured.model.parameters())
    decisions = sum(
        m.name in ("amp", "skip_nonfinite", "spike_guard", "own_guard") for m in members
    )
    replays = [entry for entry in done(recorders) if entry.startswith("replay")]
    assert max(entry.count("+") for entry in replays) == decisions
    assert sum("+" not in entry for entry in replays) > sum(
        entry.endswith("+" * decisions) for entry in replays
    )


def test_an_update_that_overflowed_does_not_count_as_warm_up(recorders):
    """The first updates overflow at a scale of 2²⁰, so the optimizer has no state after them."""
    problem = single_precision(attrs.evolve(small(), optimizer=capturable_adam))
    step = fl.pipeline(SCALED, fl.cuda_graph(warmup=1))(problem.loss_fn)
    state = fl.fit(step, problem.state(), problem.batches[:1] * 30, hooks=())
    assert done(recorders)[: state.skipped + 2].count("run") >= 2 and "record 0" in done(recorders)


@pytest.mark.parametrize("member", [fl.ema(0.5, start=4, every=2), fl.swa(4, every=2)], ids=repr)
def test_one_graph_serves_every_update_of_an_average(member, recorders):
    found = []

    def note(state):
        found.append(state.slots[member.name]["w"].item())
        return state

    def run(*members):
        found.clear()
        step = fl.pipeline(member, *members)(toy_loss)
        fl.fit(step, toy(lr=1.0), ones(*[1] * 10), hooks=(note,))
        return [*found]

    captured = run(fl.cuda_graph(warmup=1))
    assert done(recorders) == ["run", "record 0", *["replay 0"] * 9]
    assert captured == run()
    after = {"ema": [-5, -5, -6.5, -6.5], "swa": [-6, -6, -7, -7]}[member.name]
    assert captured[:4] == [-1, -2, -3, -4] and captured[5:9] == after


def test_middleware_that_sees_fp16_gradients_batch_by_batch_is_refused(recorders):
    """Eagerly, one batch of a window may be skipped and not the others. A graph has two parts."""
    problem = single_precision(small())

    def run(*members):
        step = fl.pipeline(SCALED, fl.clip(0.05), fl.accumulate(3), *members)(problem.loss_fn)
        return fl.fit(step, problem.state(), problem.batches[:1] * 6, epochs=12, hooks=())

    with pytest.raises(CaptureError, match="decides more than once within the update"):
        run(fl.cuda_graph(warmup=1))
    with pytest.warns(UserWarning, match="cuda_graph runs eagerly"):
        captured = run(fl.cuda_graph(warmup=1, fallback=True))
    assert_same(captured, run())


def test_middleware_that_counts_skipped_updates_on_the_device_is_refused(recorders):
    def wrap(step):
        def counting(state, batch):
            state, out = step(state, batch)
            if out.skip is not None:
                state.slots["count"].add_(1)
            return state, out

        return counting

    count = fl.Middleware("count", update=wrap, init=lambda state: torch.zeros(()))
    with pytest.raises(CaptureError, match=r"aten.add_.Tensor\) after a guard has left it out"):
        fl.fit(
            fl.pipeline(fl.amp("fp16"), count, fl.cuda_graph(warmup=1))(toy_loss),
            toy(),
            ones(*range(9)),
            hooks=(),
        )


def test_middleware_that_counts_skipped_updates_on_the_host_is_refused(recorders):
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


def test_a_loss_that_is_not_finite_is_an_error_in_graphs_too(recorders):
    step = fl.pipeline(fl.amp("fp16", init_scale=1.0), fl.cuda_graph(warmup=1))(toy_loss)
    with pytest.raises(FloatingPointError, match="the loss itself is not finite") as caught:
        fl.fit(step, toy(), ones(1, 1, *[float("nan")] * 50), hooks=())
    assert (
        caught.value.state.step,
        caught.value.state.skipped,
        caught.value.state.model.w.item(),
    ) == (2, 25, -2.0)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_plain_optimizer_is_made_capturable_and_computes_the_same(optimizer, recorders):
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
    assert any(entry.startswith("replay") for entry in done(recorders))
    assert isinstance(captured.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert captured.history["train/loss"] == pytest.approx(plain.history["train/loss"], rel=1e-5)
    assert captured.history["train/lr"] == pytest.approx(plain.history["train/lr"], rel=1e-6)


def test_graphs_keep_the_laws_of_fold_and_purity(recorders):
    averages = (average(0.9), fl.ema(0.9, start=2), fl.swa(3, every=2))
    pipe = fl.pipeline(fl.accumulate(2), fl.clip(0.05), *averages, fl.cuda_graph(warmup=1))
    for problem in PROBLEMS:
        law_fold(pipe, problem)
        law_purity(pipe, problem)
    law_no_host_reads(pipe, PROBLEMS[0])
