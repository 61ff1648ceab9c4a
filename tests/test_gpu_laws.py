"""The table of the laws on a GPU. Batches start on the host, as those of a loader do."""

import math
import pickle

import attrs
import pytest
import several
import torch
from test_gpu import DEVICE, adamw, assert_close
from test_laws import (
    AROUND,
    COMBINATIONS,
    EACH,
    GUARDS,
    HAND_LOOPS,
    SPIKES,
    TWO_PARTS,
    by_hand,
    single_precision,
    warm_cosine,
)
from toy_runs import assert_same_weights

import fnloop as fl
from fnloop._backend.containers import to_device
from fnloop.testing import (
    assert_same,
    law_accumulation,
    law_fold,
    law_neutral,
    law_no_host_reads,
    law_purity,
    law_skipped_updates,
    small,
    stochastic,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
UNFIT_FOR_GRAPHS = {"retry_on_oom", "sam", "closure", "watch"}  # refused when composing


def sgd(parameters):
    rate = torch.tensor(0.05, device=DEVICE)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, fused=True)


def on_device(problem, batches=True):
    moved = [to_device(batch, DEVICE) for batch in problem.batches] if batches else problem.batches
    return attrs.evolve(problem, model=lambda: problem.model().to(DEVICE), batches=moved)


@pytest.mark.parametrize("pipe", COMBINATIONS, ids=repr)
def test_every_combination_keeps_the_laws(pipe):
    for problem in (small(), stochastic()):
        law_fold(pipe, on_device(problem, batches=False))
        law_purity(pipe, on_device(problem))
    law_no_host_reads(pipe, on_device(small()))
    again = pickle.loads(pickle.dumps(pipe))
    assert again == pipe


@pytest.mark.parametrize("pipe", COMBINATIONS, ids=repr)
def test_a_skipped_update_advances_nothing(pipe):
    if not any(m.name in ("noise", "amp", "closure") for m in pipe.middleware):
        law_skipped_updates(pipe, on_device(small()))


@pytest.mark.parametrize("pipe", [*GUARDS, *SPIKES], ids=repr)
def test_guards_keep_the_laws(pipe):
    for problem in (small(), stochastic()):
        law_fold(pipe, on_device(problem, batches=False))
        law_purity(pipe, on_device(problem))


@pytest.mark.parametrize(
    "members",
    [(), (fl.accumulate(2),), (fl.ema(0.9), fl.swa(0.5)), (fl.microbatch(2), fl.retry_on_oom())],
    ids=repr,
)
def test_fp16_keeps_the_laws_of_fold_and_purity(members):
    pipe = fl.pipeline(fl.amp("fp16", init_scale=2.0**17, growth_interval=3), *members)
    law_fold(pipe, on_device(single_precision(small()), batches=False))
    law_purity(pipe, on_device(single_precision(small())))


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("members", [(), (*TWO_PARTS, fl.clip_adaptive(0.01)), (warm_cosine,)])
def test_n_accumulated_batches_make_the_update_of_one_large_batch(n, members):
    law_accumulation(fl.pipeline(*members), on_device(small()), n, fl.accumulate, rtol=1e-11)


@pytest.mark.parametrize(
    "neutral", [fl.accumulate(1), fl.clip(math.inf), fl.amp(None), fl.ema(0.9)], ids=repr
)
@pytest.mark.parametrize("problem", [small, stochastic])
def test_a_neutral_setting_changes_nothing(neutral, problem):
    law_neutral(neutral, fl.pipeline(warm_cosine), on_device(problem()))


@pytest.mark.parametrize("pipe", AROUND, ids=repr)
@pytest.mark.parametrize("each", EACH, ids=str)
def test_steps_in_turn_keep_the_laws(pipe, each):
    problem = on_device(several.alternating(**each), batches=False)
    law_fold(pipe, problem)
    law_no_host_reads(pipe, on_device(problem))


@pytest.mark.parametrize(("members", "settings"), HAND_LOOPS, ids=lambda value: repr(value)[:60])
def test_fit_equals_the_hand_written_loop_bit_for_bit(members, settings):
    problem = on_device(small())
    step = fl.pipeline(*members)(problem.loss_fn)
    state = fl.fit(step, problem.state(), problem.batches, epochs=2, hooks=())
    hand = by_hand(problem, 2, **settings)
    assert_same_weights(state, hand)
    rel = 1e-14  # the mean loss: a GPU multiplies and adds with one rounding
    assert state.history["train/loss"] == pytest.approx(hand.losses, rel=rel, abs=0)


@pytest.mark.parametrize("pipe", COMBINATIONS, ids=repr)
@pytest.mark.parametrize("problem", [small, stochastic])
def test_a_run_with_graphs_is_the_same(pipe, problem):
    """Law 9. The eager optimizer is capturable, too: else AdamW makes rounding errors large."""
    names = {member.name for member in pipe.middleware}
    if names & UNFIT_FOR_GRAPHS:
        with pytest.raises(ValueError, match="cuda_graph"):
            fl.pipeline(*pipe.middleware, fl.cuda_graph())
        return
    one = attrs.evolve(
        on_device(problem(), batches=False), optimizer=sgd if problem is small else adamw
    )
    loaders = {"train": one.batches, "valid": one.batches[:2]}

    def trained(*more):
        step = fl.pipeline(*pipe.middleware, *more)(one.loss_fn)
        return fl.fit(step, one.state(), loaders, epochs=5, hooks=())

    graphed, eager = trained(fl.cuda_graph(warmup=1)), trained()
    assert_close(graphed, eager, rtol=1e-9, atol=1e-9)
    assert (graphed.step, graphed.skipped) == (eager.step, eager.skipped)


@pytest.mark.parametrize(
    "members", [(), (fl.accumulate(2), fl.clip(0.05), warm_cosine, fl.ema(0.9))], ids=repr
)
def test_a_run_with_graphs_keeps_the_law_of_fold(members):
    """A resumed run captures its graphs again, after eager updates: the numbers are close."""
    pipe = fl.pipeline(*members, fl.cuda_graph(warmup=1))
    problem = attrs.evolve(on_device(stochastic(), batches=False), optimizer=adamw)
    loaders = {"train": problem.batches}
    whole = fl.fit(pipe(problem.loss_fn), problem.state(), loaders, epochs=4, hooks=())
    for split in (3, 5, 9):
        stop = several.stopped_after(split)
        half = fl.fit(pipe(problem.loss_fn), problem.state(), loaders, epochs=4, hooks=(stop,))
        half = attrs.evolve(half, stop=None)
        resumed = fl.fit(pipe(problem.loss_fn), half, loaders, epochs=4, hooks=())
        assert_same(resumed, whole, rtol=1e-9)
