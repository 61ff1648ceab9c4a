"""Batches in pieces, and pieces that get smaller when there is no memory left."""

import gc
import random
import weakref
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from torch import nn
from toy_runs import fitted

import fnloop as fl
from fnloop._backend.containers import is_out_of_memory, pieces_of
from fnloop.testing import assert_same, law_fold, law_purity, small, stochastic, toy, toy_loss

Pair = namedtuple("Pair", "x names")
NUMBERS = torch.tensor([1.0, 2.0, 6.0, 7.0, 4.0])


def run(pipe, problem=None):
    one = problem or small()
    return fl.fit(pipe(one.loss_fn), one.state(), one.batches, epochs=2, hooks=())


# --- cutting a batch


def test_a_piece_has_its_part_of_every_tensor_array_and_list_of_values():
    batch = {
        "pair": Pair(torch.arange(3), ("a", "b", "c")),
        "scale": torch.tensor(2.0),
        "rows": [np.arange(3), torch.ones(3, 2)],
        "split": "train",
        "sizes": (224, 112),
    }
    first, second = pieces_of(batch, 2)
    assert type(first["pair"]) is Pair and first["pair"].x.tolist() == [0, 1]
    assert (first["pair"].names, second["pair"].names) == (("a", "b"), ("c",))
    assert (first["scale"], first["split"], first["sizes"]) == (2.0, "train", (224, 112))
    assert (first["rows"][0].tolist(), second["rows"][0].tolist()) == ([0, 1], [2])
    assert second["rows"][1].shape == (1, 2)
    assert first["pair"].x.data_ptr() == batch["pair"].x.data_ptr()
    assert pieces_of(batch, 3)[0] is batch


@pytest.mark.parametrize(("batch", "message"), [
    ((torch.ones(3), torch.ones(2)), r"the lengths \[2, 3\].*put x.expand\(n, \*x.shape\)"),
    (torch.tensor(1.0), "no tensor with a dimension in a Tensor"),
    ({"text": "abc"}, "no tensor with a dimension in a dict.*tuple, a list or a mapping"),
])  # fmt: skip
def test_a_batch_that_cannot_be_cut_is_refused(batch, message):
    with pytest.raises(ValueError, match=f"cut into pieces along the first dimension.*{message}"):
        fl.pipeline(fl.microbatch(2))(toy_loss)(toy(), batch)


# --- microbatch


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("members", [
    (), (fl.accumulate(2), fl.clip(0.05)), (fl.clip(0.05), fl.accumulate(2)),
    (fl.sam(0.05), fl.accumulate(3)), (fl.schedule(fl.schedules.linear()), fl.ema(0.9)),
], ids=repr)  # fmt: skip
def test_pieces_change_neither_numbers_nor_length_wherever_they_are_listed(members, size):
    """So an update in pieces is that of the loop by hand in tests/test_laws.py."""
    whole = run(fl.pipeline(*members))
    assert_same(run(fl.pipeline(*members, fl.microbatch(size))), whole, rtol=1e-12)
    assert_same(run(fl.pipeline(fl.microbatch(size), *members)), whole, rtol=1e-12)


def test_each_piece_counts_by_its_own_weight_and_metrics_are_combined():
    """The tokens of the samples are 1, 0, 3 and 0: the mean over 4 tokens of 1, 3 × 2 is 7 / 4."""
    sizes = []

    def by_tokens(model, batch):
        values, tokens = batch
        sizes.append(len(values))
        total = tokens.sum()
        loss = model.w * (values * tokens).sum() / total.clamp(min=1)
        return loss, {"weight": total, "values": values}

    largest = fl.metric(largest=lambda aux, batch: fl.Max(aux["values"].max()))
    step = fl.pipeline(fl.microbatch(1), largest)(by_tokens)
    batch = torch.tensor([1.0, 9.0, 2.0, 5.0]), torch.tensor([1, 0, 3, 0])
    state, out = step(toy(), batch)
    assert (state.model.w.item(), out.weight, sizes) == (-1.75, 4, [1, 1, 1, 1])
    assert out.metrics["largest"].compute() == 9.0
    step.evaluate(state, batch)
    assert sizes[4:] == [4]


# --- retry_on_oom


class Filling(torch.autograd.Function):
    """Identity whose backward runs out of memory above some number of samples."""

    @staticmethod
    def forward(ctx, x, most):
        ctx.too_many = len(x) > most
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.too_many:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return grad, None


def limited(loss_fn, most, where="backward"):
    """Return a loss function for which the memory holds ``most`` samples."""

    def loss(model, batch):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        if where == "forward":
            made = loss_fn(model, batch)  # what is drawn and counted before the error
            if len(x) > most:
                raise RuntimeError("CUDA error: out of memory")
            return made
        filled = Filling.apply(model[0](x), most) if most else model[0](x)
        output = model[1:](filled)
        return nn.functional.mse_loss(output, y), {"output": output}

    return loss


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("members", [(), (fl.accumulate(2), fl.clip(0.05))], ids=repr)
def test_a_retried_run_equals_pieces_of_that_size_by_hand(where, members):
    """With batch norm and dropout: buffers and draws begin again. The largest batch is of 4."""
    even = attrs.evolve(stochastic(), batches=[b for b in stochastic().batches if len(b["x"]) != 3])
    problem = attrs.evolve(even, loss_fn=limited(even.loss_fn, 2, where))
    retried = run(fl.pipeline(fl.retry_on_oom(), *members), problem)
    by_hand = run(fl.pipeline(fl.microbatch(2), *members), problem)
    assert retried.slots["retry_on_oom"] == 2
    assert_same(attrs.evolve(retried, slots=by_hand.slots), by_hand, rtol=0)


def holds_two(error):
    """Return a loss function that fails for more than two samples, and the sizes it has seen."""
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch))
        if len(batch) > 2:
            raise error
        return toy_loss(model, batch)

    return loss_fn, seen


def test_the_size_is_halved_until_it_fits_and_kept(caplog, tmp_path):
    loss_fn, seen = holds_two(torch.OutOfMemoryError("no more"))
    state = fitted([torch.ones(7)], fl.retry_on_oom(), loss_fn=loss_fn)
    assert (seen, state.slots["retry_on_oom"]) == ([7, 4, 2, 2, 2, 1], 2)
    assert "no memory left for 7 samples at once" in caplog.messages[0]
    assert "in pieces of 4, and later ones begin with them" in caplog.messages[0]
    assert len(caplog.messages) == 2
    again = fl.restore(fl.save(state, tmp_path / "saved"), toy())
    seen.clear()
    again = fitted([torch.ones(7)], fl.retry_on_oom(), loss_fn=loss_fn, state=again, epochs=2)
    assert (seen, again.slots["retry_on_oom"], again.model.w.item()) == ([2, 2, 2, 1], 2, -2.0)


def test_the_generators_begin_again_and_what_the_error_held_is_free():
    draws, held = [], []

    def loss_fn(model, batch):
        assert all(graph() is None for graph in held)
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
        waste = torch.ones(3)
        if len(batch) > 1:
            held.append(weakref.ref(waste))
            raise MemoryError
        return toy_loss(model, batch)

    fl.pipeline(fl.retry_on_oom())(loss_fn)(toy(), torch.ones(4))
    first, second, third, *_ = draws
    assert first == second == third and len(held) == 2


def test_a_single_sample_that_does_not_fit_and_other_errors_are_raised():
    calls = []

    def fails(error):
        def loss_fn(model, batch):
            calls.append(batch)
            raise type(error)(*error.args)

        return loss_fn

    def raised(batch, error):
        with pytest.raises(type(error)) as caught:
            fitted([batch], fl.retry_on_oom(), loss_fn=fails(error))
        return caught.value

    error = raised(torch.ones(3), torch.OutOfMemoryError("no more"))
    assert "a single sample does not fit" in error.__notes__[1]
    assert "while in the loss function" in error.__notes__[2]
    assert error.state.slots["retry_on_oom"] == 0  # nothing fitted
    error = raised((torch.ones(3), torch.ones(2)), torch.OutOfMemoryError("no more"))
    assert "cannot repeat this with smaller pieces: a batch is cut" in error.__notes__[1]
    calls.clear()
    raised(torch.ones(4), RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert len(calls) == 1


def test_retried_runs_keep_the_laws_of_fold_and_purity(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # once for each retry: slow
    problem = attrs.evolve(small(), loss_fn=limited(small().loss_fn, 2))
    pipe = fl.pipeline(fl.accumulate(2), fl.retry_on_oom())
    law_fold(pipe, problem)
    law_purity(pipe, problem)


WORDINGS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if",
    "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried",
    "MPS backend out of memory (MPS allocated: 1 GB)",
    "XPU out of memory. Tried to allocate",
)


def test_every_wording_of_an_error_of_memory_is_known():
    for error in (torch.OutOfMemoryError("x"), MemoryError(), *map(RuntimeError, WORDINGS)):
        assert is_out_of_memory(error), error
    assert not is_out_of_memory(ValueError(WORDINGS[0]))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)  # of the allocator of the CPU
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(("members", "batches"), [
    ((fl.microbatch(2), fl.accumulate(2)), [[1, 3, -1, 5], [2, 2]]),  # a piece is left out
    ((fl.microbatch(2), fl.amp("fp16", init_scale=8.0), fl.accumulate(2)), [[1, 3, 2], [2]]),
    ((fl.retry_on_oom(), fl.microbatch(4)), [[1, 3, 2, 2]]),
], ids=repr)  # fmt: skip
def test_pieces_count_by_their_samples(members, batches):
    def loss_fn(model, batch):
        if len(batch) > 2:
            raise MemoryError
        return fl.skip("negative") if (batch < 0).any() else toy_loss(model, batch)

    batches = [torch.tensor(batch, dtype=torch.float) for batch in batches]
    state = fitted(batches, *members, loss_fn=loss_fn)
    assert state.model.w.item() == -2 and state.step == 1
