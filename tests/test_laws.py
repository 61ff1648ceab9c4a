"""The laws of the design, over a table of middleware. Add a row for a new middleware."""

import itertools
import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import several
import torch
from public_names import MODULES, returning
from sample_middleware import (
    decay,
    double_loss,
    halved,
    largest_output,
    nesterov,
    noise,
    output_mean,
    own_guard,
    warming_up,
    weight_penalty,
)
from sample_steps import backward_of
from several import single_precision
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import CosineAnnealingLR
from toy_runs import assert_same_weights

import fnloop as fl
from fnloop import schedules
from fnloop._core.rng import COMPUTE, fold_in
from fnloop.debug import audit, watch
from fnloop.testing import (
    assert_same,
    check_laws,
    law_accumulation,
    law_fold,
    law_neutral,
    law_purity,
    law_skipped_updates,
    small,
    stochastic,
    toy,
    toy_loss,
)

warm_cosine = fl.schedule(schedules.cosine(warmup=2, min_ratio=0.1))

SINGLES = [
    fl.accumulate(1), fl.accumulate(2), fl.accumulate(3), fl.accumulate(total=8),
    fl.microbatch(100), fl.retry_on_oom(), fl.sam(0.05), fl.closure(),
    fl.clip(0.05), fl.clip(1.0, norm_type=math.inf), fl.clip_value(0.01), fl.grad_norm(),
    fl.amp(None), fl.amp("bf16"), warm_cosine,
    fl.channels_last(),  # of convolutions: tests/_extensions/middleware/test_channels_last.py
    fl.schedule(schedules.linear(), field="weight_decay"),
    fl.plateau("train/loss", patience=1, mode="max"),  # the loss falls: it is lowered each time
    fl.torch_scheduler(decay), fl.torch_scheduler(halved),
    fl.torch_scheduler(lambda optimizer, run: CosineAnnealingLR(optimizer, run.total_steps)),
    fl.metric(mean=output_mean, largest=largest_output), fl.metric(mean=output_mean, on="training"),
    fl.metric(mean=output_mean, on="evaluation"), fl.derive(double=double_loss),
    fl.ema(0.9), fl.ema(0.5, start=2, every=2, evaluate="only"),
    fl.ema(0.9, start=0.5, evaluate=False), fl.swa(0.5), fl.swa(1, every=3),
    fl.local_sgd(2), fl.local_sgd(2, outer=nesterov),  # of one process
    fl.ema(warming_up, only="0"), fl.ema(warming_up, every=2, evaluate=False, only=["*.bias"]),
    watch(2), noise(0.01), weight_penalty(0.01),
]  # fmt: skip
TWO_PARTS = fl.clip(0.05, only="*.weight", name="w"), fl.clip(0.01, only="*.bias", name="b")
MEAN, DECAYED = fl.metric(mean=output_mean), fl.schedule(schedules.linear(), field="weight_decay")
COMBINATIONS = [
    fl.pipeline(),
    *(fl.pipeline(single) for single in SINGLES),
    fl.pipeline(fl.accumulate(2), *TWO_PARTS, fl.grad_norm(by="module")),
    fl.pipeline(*TWO_PARTS, fl.accumulate(2), fl.clip_adaptive(0.01)),
    fl.pipeline(fl.accumulate(2), watch(2, only="0"), fl.clip(0.05)),
    fl.pipeline(fl.clip(0.05), fl.accumulate(2)),
    fl.pipeline(fl.accumulate(2), fl.grad_norm(1.0)),
    fl.pipeline(fl.clip(0.05), fl.accumulate(total=12), warm_cosine),
    fl.pipeline(fl.accumulate(2), fl.sam(0.05), fl.clip(0.05)),
    fl.pipeline(fl.sam(0.05), fl.accumulate(2)),
    fl.pipeline(fl.clip_value(0.01), fl.accumulate(3), fl.clip(0.05)),
    fl.pipeline(fl.amp("bf16"), fl.accumulate(2), fl.clip(0.05), warm_cosine),
    fl.pipeline(warm_cosine, DECAYED, fl.accumulate(2)),
    fl.pipeline(fl.plateau("train/loss", patience=1), fl.accumulate(2), warm_cosine),
    fl.pipeline(weight_penalty(0.01), fl.accumulate(3), noise(0.01), MEAN),
    fl.pipeline(fl.accumulate(4), fl.torch_scheduler(decay), MEAN, fl.clip(0.05)),
    fl.pipeline(fl.compiled(backend="eager"), fl.accumulate(2), fl.clip(0.05)),
    fl.pipeline(fl.swa(0.5, evaluate="only"), fl.accumulate(2), fl.ema(0.9), MEAN),
    fl.pipeline(fl.schedule(lambda state: 0.5**state.epoch)),
    fl.pipeline(fl.schedule(lambda i, total: (1 + i) / 100, absolute=True)),
    fl.pipeline(fl.accumulate(2), fl.schedule(lambda items, total: 9 / (9 + items), by="items")),
]
UNFIT = ("noise", "amp", "closure")  # a closure cannot skip an update: it raises an error
DETERMINISTIC = [p for p in COMBINATIONS if not any(m.name in UNFIT for m in p.middleware)]


def check_fold_and_purity(pipe, *problems):
    for problem in problems:
        law_fold(pipe, problem)
        law_purity(pipe, problem)


# --- 2 and 4: fold and purity; 7: no host reads


@pytest.mark.parametrize("pipe", [
    # It compiles again for each of its runs.
    pytest.param(pipe, marks=[pytest.mark.long] if "compiled" in repr(pipe) else [])
    for pipe in COMBINATIONS
], ids=repr)  # fmt: skip
def test_every_combination_keeps_the_laws(pipe):
    check_laws(pipe)


@pytest.mark.parametrize("members", [(), (fl.accumulate(2), fl.clip(0.05))], ids=repr)
def test_batches_in_pieces_keep_the_laws(members):
    """Batch norm takes no batch of one sample, so the other problem is without pieces of one."""
    check_laws(fl.pipeline(fl.microbatch(2), *members), small())
    even = [batch for batch in stochastic().batches if len(batch["x"]) != 3]
    law_fold(fl.pipeline(*members, fl.microbatch(2)), attrs.evolve(stochastic(), batches=even))


@pytest.mark.long
def test_updates_that_are_one_function_keep_the_laws():
    """That none reads to the host is found when they are recorded."""
    whole = fl.compiled(update=True, backend="eager", fullgraph=True)
    check_fold_and_purity(
        fl.pipeline(whole, fl.accumulate(2), fl.clip(0.05)), small(), stochastic()
    )


SCALED = fl.amp("fp16", init_scale=2.0**17, growth_interval=3)


@pytest.mark.parametrize("members", [
    *((), (fl.accumulate(2),), (fl.accumulate(3), fl.clip(0.1)), (fl.ema(0.9), fl.swa(0.5))),
    (fl.microbatch(2), fl.retry_on_oom()),
], ids=repr)  # fmt: skip
def test_fp16_keeps_the_laws_of_fold_and_purity(members):
    check_fold_and_purity(fl.pipeline(SCALED, *members), single_precision(small()))


# --- guards: they read to the host once in each update

GUARDS = [
    fl.pipeline(fl.skip_nonfinite()),
    fl.pipeline(fl.skip_nonfinite(3), fl.accumulate(2), fl.clip(0.05)),
    fl.pipeline(fl.accumulate(2), own_guard()),
    fl.pipeline(fl.spike_guard(2, 1e6), fl.accumulate(2), fl.clip(0.05)),
    fl.pipeline(fl.clip(0.05), fl.accumulate(2), fl.skip_nonfinite(), warm_cosine, fl.ema(0.9)),
    fl.pipeline(fl.ema(0.9), fl.accumulate(2), fl.torch_scheduler(decay), audit(every=2)),
]


SPIKES = [  # many updates are spikes
    fl.pipeline(fl.spike_guard(4, 1.02)),
    fl.pipeline(fl.ema(0.5), fl.clip(0.05), fl.spike_guard(2, 1.02, then="back")),
    fl.pipeline(fl.spike_guard(3, 1.02), fl.accumulate(2), fl.clip(0.05), warm_cosine),
]


@pytest.mark.parametrize("pipe", SPIKES, ids=repr)
def test_a_guard_that_leaves_updates_out_keeps_the_laws(pipe):
    for problem in (small(), stochastic()):
        assert fl.fit(pipe(problem.loss_fn), problem.state(), problem.batches, epochs=2).skipped
        check_fold_and_purity(pipe, problem)


@pytest.mark.parametrize("pipe", GUARDS, ids=repr)
def test_guards_keep_the_laws(pipe):
    check_fold_and_purity(pipe, small(), stochastic())
    law_skipped_updates(pipe, small())
    assert pickle.loads(pickle.dumps(pipe)) == pipe


@pytest.mark.parametrize("pipe", [GUARDS[0], fl.pipeline(fl.spike_guard(4, 3.0))], ids=repr)
def test_guards_keep_the_laws_in_turns_and_with_several_optimizers(pipe):
    law_fold(pipe, several.problem(several.muon_and_sgd))
    each = several.alternating(matrices=pipe.middleware, rest=(*pipe.middleware, fl.clip(0.1)))
    check_fold_and_purity(fl.pipeline(), each)


ELSEWHERE = {  # where the laws need another problem, or hold but for the times: the file with them
    "cuda_graph": "_extensions/graphs/test_same_numbers.py",
    "device_memory": "_extensions/middleware/test_device_memory.py",
    "scheduled": "_extensions/middleware/test_scheduled.py",
    "tbptt": "_extensions/middleware/test_tbptt.py",
    "throughput": "_extensions/middleware/test_times.py",
    "timings": "_extensions/middleware/test_times.py",
    "using": "_extensions/middleware/test_using.py",
}


def test_every_middleware_is_in_the_table():
    rows = [member for pipe in (*COMBINATIONS, *GUARDS, *SPIKES) for member in pipe.middleware]
    found = {repr(member).partition("(")[0] for member in rows}
    assert returning("Middleware", *MODULES) - found == set(ELSEWHERE), "add a row for it"
    for name, file in ELSEWHERE.items():
        assert f"fl.{name}(" in (Path(__file__).parent / file).read_text()


# --- hooks that add numbers to records: they change nothing else


def outputs_mean(state, outputs):
    return {"mean": sum(float(out.aux["output"].sum()) for out in outputs)}


def drawn_output(state):
    """Return what the model makes of a draw. Batch norm and dropout see it in evaluation mode."""
    return {"drawn": state.model(torch.randn(4, 6, dtype=torch.float64)).sum(), "at": state.step}


NUMBERS = [
    lambda: fl.inspect(outputs_mean, reports=("mean",)),
    lambda: fl.inspect(outputs_mean, every=fl.every(epochs=2) | fl.at_end()),
    lambda: fl.measure(drawn_output, name="own"),
    lambda: fl.measure(drawn_output, name="own", every=fl.at_start() | fl.every(steps=2)),
    lambda: fl.measure(drawn_output, name="own", every=fl.at_end(), everywhere=True),
]


@pytest.mark.parametrize("make", NUMBERS, ids=lambda make: repr(make()))
@pytest.mark.parametrize("problem", [small, stochastic])
def test_hooks_that_add_numbers_keep_the_laws(make, problem):
    """Fold, resume at every update, purity: and training is as without them, bit for bit."""
    problem = problem()
    step = fl.pipeline(fl.accumulate(2), fl.ema(0.9))(problem.loss_fn)
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}

    def run(state, *hooks, **settings):
        return fl.fit(step, state, loaders, epochs=2, hooks=hooks, **settings)

    def without_closing(state):
        return attrs.evolve(state, history=fl.History(r for r in state.history if not r.closing))

    generators = torch.get_rng_state()
    whole, plain = run(problem.state(), make()), run(problem.state())
    assert torch.equal(torch.get_rng_state(), generators)
    assert_same(attrs.evolve(whole, history=plain.history), plain)
    start = fl.snapshot(problem.state())
    assert_same(run(fl.snapshot(start), make()), run(start, make()))
    for split in range(1, whole.step):
        pause = fl.when(lambda state, split=split: state.step == split)(
            lambda state: attrs.evolve(state, stop="paused")
        )
        paused = attrs.evolve(run(problem.state(), make(), pause), stop=None)
        assert_same(without_closing(run(paused, make())), without_closing(whole))


# --- the same with several optimizers

SEVERAL = [
    *DETERMINISTIC[:8],
    fl.pipeline(fl.accumulate(2), *TWO_PARTS, fl.clip_adaptive(0.01)),
    fl.pipeline(fl.schedule(schedules.linear())),
    fl.pipeline(fl.schedule(schedules.linear(), only=("rest",))),
    fl.pipeline(
        fl.accumulate(2),
        fl.clip(0.05),
        fl.schedule(schedules.linear(), only="matrices"),
        fl.schedule(schedules.cosine(warmup=2), only="rest"),
        fl.schedule(schedules.linear(), field="weight_decay"),
    ),
    fl.pipeline(fl.clip(0.05), fl.accumulate(3), fl.torch_scheduler(decay, only="rest")),
    fl.pipeline(fl.using("rest"), fl.accumulate(2), fl.clip(0.05), warm_cosine, fl.ema(0.9)),
    fl.pipeline(fl.clip(0.05), fl.using("matrices", "rest"), fl.torch_scheduler(decay, "rest")),
]


@pytest.mark.parametrize("pipe", SEVERAL, ids=repr)
def test_runs_with_several_optimizers_keep_the_laws(pipe):
    check_laws(pipe, several.problem(several.muon_and_sgd))


@pytest.mark.parametrize("pipe", SEVERAL, ids=repr)
def test_a_skipped_update_advances_no_optimizer(pipe):
    law_skipped_updates(pipe, several.problem())


@pytest.mark.parametrize("n", [2, 3, 7])
def test_accumulation_makes_one_update_of_each_optimizer(n):
    """Muon rounds to bfloat16, so what is added up in another order is not as close there."""
    pipe = fl.pipeline(fl.clip(0.05))
    law_accumulation(pipe, several.problem(several.fused_sgd_twice), n, fl.accumulate)


@pytest.mark.parametrize("neutral", [fl.accumulate(1), fl.clip(math.inf), fl.amp(None)], ids=repr)
def test_a_neutral_setting_changes_nothing_with_several_optimizers(neutral):
    law_neutral(neutral, fl.pipeline(fl.schedule(schedules.linear())), several.problem())


# --- the same with a function that makes gradients by itself

OWN = [
    fl.pipeline(),
    fl.pipeline(fl.accumulate(2), fl.clip(0.05), warm_cosine, fl.ema(0.9), MEAN),
    fl.pipeline(fl.clip(0.05), fl.accumulate(3), noise(0.01), weight_penalty(0.01)),
    fl.pipeline(fl.microbatch(2), fl.accumulate(2)),
    fl.pipeline(fl.skip_nonfinite(), fl.accumulate(2), fl.spike_guard(4, 3.0)),
]


def making_gradients(problem):
    """The same problem; its loss function calls backward."""
    makes = fl.raw(backward_of(problem.loss_fn), problem.loss_fn, updates=False)
    return attrs.evolve(problem, loss_fn=makes)


@pytest.mark.parametrize("pipe", OWN, ids=repr)
def test_own_gradients_keep_the_laws(pipe):
    problems = making_gradients(small()), making_gradients(stochastic())
    names = [m.name for m in pipe.middleware]
    if "skip_nonfinite" not in names:  # which reads to the host
        check_laws(pipe, problems[0])
    if "microbatch" not in names:  # batch norm takes no piece of one sample
        check_fold_and_purity(pipe, *problems)
    if "noise" not in names:
        law_skipped_updates(pipe, problems[0])


@pytest.mark.parametrize("n", [2, 3, 7])
def test_own_gradients_add_up(n):
    law_accumulation(fl.pipeline(fl.clip(0.05)), making_gradients(small()), n, fl.accumulate)


# --- the same with steps in turn

EACH = [
    {},
    {"order": ("rest", "matrices", "rest"), "evaluate": "rest"},
    {"order": ("matrices", "rest", "rest"), "batch": "next"},
    {"order": ("rest", "rest", "matrices"), "batch": {"rest": "next", "matrices": "same"}},
    {"matrices": [fl.clip(0.05, only="0.*"), warm_cosine], "rest": [fl.amp("bf16"), noise(0.01)]},
    {"matrices": [fl.accumulate(2)], "rest": [fl.accumulate(2), fl.sam(0.05)]},
    {"matrices": [fl.accumulate(2)], "rest": [weight_penalty(0.01)], "batch": "next"},
    {
        "rest": [fl.torch_scheduler(decay), fl.metric(mean=output_mean), fl.derive(d=double_loss)],
        "order": ("rest", "rest", "matrices"),
    },
]
AROUND = [
    fl.pipeline(),
    fl.pipeline(fl.ema(0.9), fl.swa(0.5, evaluate="only")),
    fl.pipeline(fl.schedule(schedules.linear(), field="weight_decay"), fl.derive(d=double_loss)),
]


@pytest.mark.parametrize(("each", "pipe"), [
    pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=[pytest.mark.slow] * (i % 3 != j))
    for (i, j), pair in zip(
        itertools.product(range(len(EACH)), range(len(AROUND))),
        itertools.product(EACH, AROUND),
        strict=True,
    )
])  # fmt: skip
def test_steps_in_turn_keep_the_laws(pipe, each):
    check_laws(pipe, several.alternating(**each))


@pytest.mark.parametrize("batch", ["next", "late"])
def test_steps_in_turn_keep_the_laws_with_dropout_and_batch_norm(batch):
    problem = attrs.evolve(stochastic(), optimizer=several.muon_and_sgd)
    check_laws(fl.pipeline(fl.ema(0.9)), several.alternating(problem=problem, batch=batch))


def test_steps_in_turn_in_fp16_keep_the_laws_of_fold_and_purity():
    problem = attrs.evolve(single_precision(small()), optimizer=several.muon_and_sgd)
    both = {"matrices": (SCALED, fl.clip(0.1)), "rest": (SCALED,)}
    check_fold_and_purity(fl.pipeline(), several.alternating(**both, problem=problem))


@pytest.mark.parametrize("neutral", [fl.ema(0.9), fl.swa(0.5, evaluate=False)], ids=repr)
def test_a_neutral_setting_around_turns_changes_nothing(neutral):
    law_neutral(neutral, fl.pipeline(), several.alternating(batch="next"))


# --- 1: the hand loop


def by_hand(
    problem, epochs, *, n=1, clip=None, clip_value=None, precision=None, scale=1.0, factor=None
):
    """The loop that fnloop replaces, written by hand.

    With several optimizers ``factor`` schedules the last one. ``scale`` is that of fp16, which
    grows after three updates.
    """
    state = problem.state()
    model, given = state.model, state.optimizer
    optimizers = [*given.values()] if isinstance(given, Mapping) else [given]
    losses, step, streak, total = [], 0, 0, epochs * -(-len(problem.batches) // n)
    (group,) = optimizers[-1].param_groups
    initial = group["lr"]
    for _ in range(epochs):
        loss_sum = items = 0
        for start in range(0, len(problem.batches), n):
            window = problem.batches[start : start + n]
            weights = [len(batch[0]) for batch in window]
            if factor is not None:
                group["lr"] = initial * factor(step, total)
            for optimizer in optimizers:
                optimizer.zero_grad()
            found = 0
            for batch, weight in zip(window, weights, strict=True):
                with torch.autocast("cpu", precision, enabled=precision is not None):
                    loss, _ = problem.loss_fn(model, batch)
                (loss * (weight / weights[0]) * scale).backward()
                found += loss.detach().double() * weight
            for p in model.parameters():
                p.grad /= sum(weights) / weights[0] if n > 1 else 1.0
                p.grad /= scale
            if not all(p.grad.isfinite().all() for p in model.parameters()):
                scale, streak = scale / 2, 0
                continue
            if clip is not None:
                clip_grad_norm_(model.parameters(), clip)
            if clip_value is not None:
                clip_grad_value_(model.parameters(), clip_value)
            for optimizer in optimizers:
                optimizer.step()
            loss_sum, items = loss_sum + found, items + sum(weights)
            step, streak = step + 1, streak + 1
            if precision is torch.float16 and streak == 3:
                scale, streak = scale * 2, 0
        losses.append((loss_sum / items).item())
    return SimpleNamespace(model=model, losses=losses, step=step)


BF16, COSINE = {"precision": torch.bfloat16}, schedules.cosine(warmup=2)
HAND_LOOPS = [
    ((), {}),
    *(((fl.accumulate(n),), {"n": n}) for n in (2, 3, 4)),
    ((fl.clip(0.05),), {"clip": 0.05}),
    ((fl.clip_value(0.01),), {"clip_value": 0.01}),
    ((fl.accumulate(4), fl.clip(0.05)), {"n": 4, "clip": 0.05}),
    ((fl.amp("bf16"),), BF16),
    ((fl.amp("bf16"), fl.accumulate(2), fl.clip(0.05)), {**BF16, "n": 2, "clip": 0.05}),
    ((fl.schedule(COSINE),), {"factor": COSINE}),
    ((fl.accumulate(3), fl.schedule(schedules.linear())), {"n": 3, "factor": schedules.linear()}),
]


def trained(pipe, problem, **settings):
    step = pipe(problem.loss_fn)
    return fl.fit(step, problem.state(), problem.batches, hooks=(), **settings)


def check_by_hand(state, hand, settings):
    assert_same_weights(state, hand)
    rel = 1e-14 if settings.get("n", 1) > 1 else 0
    assert state.history["train/loss"] == pytest.approx(hand.losses, rel=rel, abs=0)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(("members", "settings"), HAND_LOOPS, ids=lambda value: repr(value)[:60])
def test_fit_equals_the_hand_written_loop_bit_for_bit(members, settings, epochs):
    problem = small()
    state = trained(fl.pipeline(*members), problem, epochs=epochs)
    check_by_hand(state, by_hand(problem, epochs, **settings), settings)


def test_fit_equals_the_hand_written_loop_with_batch_norm_and_dropout():
    """A hand loop that seeds torch's generator by position, as fnloop does, draws the same."""
    problem = stochastic()
    mine, hand = trained(fl.pipeline(), problem, epochs=2), problem.state()
    for epoch in range(2):
        for i, batch in enumerate(problem.batches):
            torch.manual_seed(fold_in(hand.seed, COMPUTE, epoch, i))
            hand.optimizer.zero_grad()
            problem.loss_fn(hand.model, batch)[0].backward()
            hand.optimizer.step()
    assert_same_weights(mine, hand)


# --- 5: accumulation


@pytest.mark.parametrize("n", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("members", [
    *((), (fl.clip(0.05),), (fl.clip_value(0.01),), (warm_cosine,), (weight_penalty(0.01),)),
    (*TWO_PARTS, fl.clip_adaptive(0.01)),
], ids=repr)  # fmt: skip
def test_n_accumulated_batches_make_the_update_of_one_large_batch(n, members):
    law_accumulation(fl.pipeline(*members), small(), n, fl.accumulate)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_a_total_of_samples_makes_the_update_of_one_large_batch(n):
    """The batches of the problem have up to 4 samples."""
    law_accumulation(fl.pipeline(fl.clip(0.05)), small(), n, lambda n: fl.accumulate(total=4 * n))


@pytest.mark.parametrize("n", [2, 3, 7])
def test_accumulation_is_the_same_on_its_other_path(n):
    """A gradient middleware inside accumulate selects its other path. This one changes nothing."""
    untouched = fl.Middleware("untouched", gradient=lambda step: lambda *given: step(*given))
    in_place = trained(fl.pipeline(fl.accumulate(n)), small())
    averaged = trained(fl.pipeline(untouched, fl.accumulate(n)), small())
    assert_same(in_place, averaged, rtol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_the_reported_loss_does_not_depend_on_n(n):
    batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0, 5.0)]
    step = fl.pipeline(fl.accumulate(n))(toy_loss)
    state = fl.fit(step, toy(w=1.0, lr=0.0), batches, hooks=())
    assert state.history["train/loss"] == (3.0,)


# --- 6: neutral


@pytest.mark.parametrize("neutral", [
    *(fl.accumulate(1), fl.clip(math.inf), fl.clip_value(math.inf), fl.amp(None)),
    *(fl.ema(0.9), fl.swa(0.5, evaluate=False), fl.channels_last()),
    *(fl.microbatch(100), fl.retry_on_oom()),
    watch(2),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize(
    "members", [(), (fl.accumulate(2),), (warm_cosine,), (fl.metric(mean=output_mean),)], ids=repr
)
@pytest.mark.parametrize("problem", [small, stochastic])
def test_a_neutral_setting_changes_nothing(neutral, members, problem):
    if neutral.name in [m.name for m in members]:
        pytest.skip("a pipeline cannot have two of one name")
    law_neutral(neutral, fl.pipeline(*members), problem())


@pytest.mark.parametrize("neutral", [
    *(fl.clip(math.inf, only="0.*", name="a"), fl.skip_nonfinite(), fl.spike_guard(100)),
    *(audit(every=1), audit(every=2, against="eager"), audit(every=3, against="float64")),
], ids=repr)  # fmt: skip
def test_a_guard_without_work_changes_nothing(neutral):
    law_neutral(neutral, fl.pipeline(fl.accumulate(2)), stochastic())


def test_a_neutral_setting_may_only_change_its_own_slot():
    slot = {"step": lambda step: step, "init": lambda state: [1.0]}
    law_neutral(fl.Middleware("kept", **slot), fl.pipeline(), small())

    def meddle(step):
        def meddling(state, batch):
            state.slots["theirs"][0] += 1.0
            return step(state, batch)

        return meddling

    theirs = fl.pipeline(fl.Middleware("theirs", **slot))
    with pytest.raises(AssertionError, match=r"slots\.theirs"):
        law_neutral(fl.Middleware("meddles", step=meddle), theirs, small())


# --- 10: applied updates only


@pytest.mark.parametrize("pipe", DETERMINISTIC, ids=repr)
def test_a_skipped_update_advances_nothing(pipe):
    law_skipped_updates(pipe, small())


# --- the shape of the library


def frames_between_fit_and_the_loss(*members: fl.Middleware) -> list[str]:
    found: list[str] = []

    def loss_fn(model, batch):
        frame, codes = sys._getframe(1), []
        while frame.f_code.co_name != "fit":
            codes.append(frame.f_code)
            frame = frame.f_back
        ours = [code for code in codes if "fnloop" in code.co_filename.replace("/tests/", "")]
        found[:] = [code.co_qualname for code in ours]
        return toy_loss(model, batch)

    fl.fit(fl.pipeline(*members)(loss_fn), toy(lr=1e-3), [torch.ones(1)] * 4, hooks=())
    return found


@pytest.mark.parametrize("members", [
    (),
    (fl.accumulate(4), fl.clip(1.0)),
    (fl.clip(1.0), fl.accumulate(4)),
    (fl.amp("bf16"), fl.accumulate(4), fl.clip(1.0), fl.schedule(schedules.cosine())),
    (fl.metric(mean=output_mean), fl.clip_value(1.0), fl.torch_scheduler(decay)),
], ids=repr)  # fmt: skip
def test_at_most_four_frames_and_one_per_middleware_separate_fit_from_the_loss(members):
    frames = frames_between_fit_and_the_loss(*members)
    assert len(frames) <= 4 + len(members), frames


# --- the laws can fail


@fl.middleware("gradient")
def forgetful():
    """Its state is in a closure."""
    calls = []

    def wrap(step):
        def counted(state, batch):
            calls.append(1)
            state, out = step(state, batch)
            for p in state.model.parameters():
                p.grad.mul_(len(calls))
            return state, out

        return counted

    return wrap


@fl.middleware("gradient")
def reads():
    def wrap(step):
        def reading(state, batch):
            state, out = step(state, batch)
            out.loss.item()
            return state, out

        return reading

    return wrap


@pytest.mark.parametrize(
    ("member", "message"),
    [(forgetful, "law_fold: stopped at update 1"), (reads, "read to the host")],
)
def test_a_law_that_is_broken_is_named(member, message):
    with pytest.raises(AssertionError, match=message):
        check_laws(fl.pipeline(member()), small())
