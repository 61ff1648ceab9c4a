"""Batches and updates that are left out on one process, on some, or on all."""

import itertools
import math
from itertools import pairwise

import attrs
import pytest
import torch
import torch.distributed as dist
from joined import join, rank, said, world
from process_data import loader
from process_problems import created, entropy
from sample_middleware import calls
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl
from fnloop.extend import then

pytestmark = pytest.mark.slow


@fl.middleware("gradient")
def no_sample(index):
    def judge(state, found):
        if found:
            state.slots["no_sample"].append(state.step)
            return "it has the sample"
        return None

    def wrap(step):
        def guarded(state, batch):
            state, out = step(state, batch)
            return fl.decide(state, out, (batch[-1] == index).any(), judge)

        return guarded

    return fl.Middleware("no_sample", gradient=wrap, init=lambda state: [])


def decided(folder):
    step = fl.pipeline(no_sample(1), fl.clip(1.0))(entropy)
    state = fl.fit(step, created(), loader(size=1), steps=3, hooks=())
    return [state.step, state.skipped, [*state.slots["no_sample"]]]


def refused(folder):
    def loss_fn(model, batch):
        if int(batch[-1][0]) >= 4 * world():
            return fl.skip("no more")
        loss, aux = entropy(model, batch)
        dist.all_reduce(torch.zeros(1))
        return loss, aux

    sharded, skips = created(fully_shard), fl.pipeline()(lambda m, b: fl.skip("never"))
    fitted = lambda: fl.fit(fl.pipeline()(loss_fn), created(), loader(size=2), hooks=()).step
    return [said(fitted), said(lambda: skips(sharded, None))]


def not_repeated(folder):
    normed = created(make=lambda: nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3)))

    def fitted(member, state):
        return said(lambda: fl.fit(fl.pipeline(member)(entropy), state, loader(), hooks=()))

    retry, back = fl.retry_on_oom(), fl.spike_guard(then="back")
    sharded = created(fully_shard)
    return [fitted(retry, sharded), fitted(retry, normed), fitted(back, sharded)]


class Normed(nn.Module):
    """A BatchNorm whose statistics a bad sample makes NaN, and a count that every forward moves."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.out(self.norm(x))


def put_back(folder):
    """A guard leaves out what one process has found; and evaluations count calls."""
    state, found = created(make=Normed), []
    step = fl.pipeline(no_sample(5 * world()))(entropy)
    note = lambda state: found.append([b.tolist() for b in state.model.buffers()]) or state
    settings = {"steps": 4, "hooks": (note,), "evaluate_every": fl.every(steps=1)}
    state = fl.fit(step, state, (loader(size=2), loader(size=3)), **settings)
    outputs = [*fl.predict(lambda m, b: m(b[0]), state, loader(size=3), gather=False)]
    note(state)
    same = [a == b for a, b in pairwise(found)]
    return [state.skipped, same, state.model.calls.item(), len(outputs) > 0]


def counted(folder):
    """What a user's middleware counts, where one process leaves an update out, by either way."""

    @fl.middleware("gradient")
    def without(index):
        def wrap(step):
            def guarded(state, batch):
                state, out = step(state, batch)
                found = (batch[-1] == index).any()
                return state, attrs.evolve(out, skip="it has the sample") if found else out

            return guarded

        return wrap

    join()
    found = []
    for keeps in (True, False):
        for guard in (no_sample(1), without(1)):
            step = fl.pipeline(calls(keeps=keeps), guard)(entropy)
            state = fl.fit(step, created(), loader(size=1), steps=3, hooks=())
            found.append([state.step, state.skipped, state.slots["calls"].item()])
    return found


def all_left_out(folder):
    """Which process leaves out what is another one each time, so their reasons differ."""
    loss_fn = lambda model, batch: fl.skip(f"process {rank()}")
    try:
        fl.fit(fl.pipeline()(loss_fn), created(), loader(), steps=3, hooks=())
    except ValueError as error:
        state = error.state
        return [str(error).partition(" (")[0], state.epoch, state.step, state.skipped]


def largest(folder):
    """The last process has no element, and the one before it may have NaN."""
    found = []
    for dtype, value in itertools.product((torch.float32, torch.float64), (3.0, math.nan)):
        linear = nn.Linear(1, world() - 1, bias=False, dtype=dtype)
        state = created(fully_shard, make=lambda linear=linear: linear)

        def fill(state, batch, out, value=value):
            state.model.weight.grad.to_local().fill_(value if rank() == world() - 2 else 1.0)
            return state, out

        filled = fl.middleware("gradient")(lambda fill=fill: then(fill))
        step = fl.pipeline(filled(), fl.clip(1.0, math.inf))(lambda model, x: model(x).sum())
        state, out = step(state, torch.ones(1, 1, dtype=dtype))
        found.append(str(out.metrics["grad_norm"].compute()))
    return found


def guards(folder):
    join()
    jobs = (decided, refused, not_repeated, put_back, all_left_out, largest)
    return {job.__name__: job(folder) for job in jobs}


@pytest.fixture
def found(launched):
    mine, *others = launched(guards, 3)
    assert all(other == mine for other in others)
    return mine


def test_a_flag_on_one_process_decides_for_all(found):
    assert found["decided"] == [3, 1, [0]]


def test_a_process_that_others_wait_for_is_told_what_to_return(found):
    exchanged, sharded = found["refused"]
    assert exchanged.startswith("RuntimeError: the loss function leaves a batch out (no more)")
    assert sharded.startswith("NotImplementedError: <lambda> returned Skip(reason='never'), but")
    assert all('return loss, {"weight": 0}' in text for text in (exchanged, sharded))


def test_what_cannot_be_repeated_or_copied_is_refused(found):
    sharded, normed, copied = found["not_repeated"]
    for text in (sharded, normed):
        assert text.startswith("NotImplementedError: retry_on_oom cannot repeat a forward in which")
    assert copied.startswith('NotImplementedError: spike_guard(then="back") keeps a copy of the')


def test_buffers_are_put_back_in_every_process(found):
    skipped, same, calls, predicted = found["put_back"]
    assert (skipped, calls, predicted) == (1, 4.0, True)
    assert sum(same[:-1]) == 1 and same[-1]  # the update that was left out, and the prediction


def test_the_largest_gradient_is_that_of_all_shards(found):
    assert found["largest"] == ["3.0", "nan"] * 2


def test_what_a_middleware_keeps_is_put_back_on_both_processes(launched):
    for found in launched(counted, 2):
        assert found == [[3, 1, 3], [3, 1, 3], [3, 1, 4], [3, 1, 4]]


def test_a_run_that_leaves_everything_out_ends_in_every_process(found):
    updates = 2 * 7  # of 6 samples in all, of 41
    assert found["all_left_out"] == ["all updates of epochs 1 and 2 were left out", 2, 0, updates]
