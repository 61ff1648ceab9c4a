"""Batches in pieces, and pieces that get smaller when there is no memory left."""

import gc
import math
import random
import weakref
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop._backend.containers import is_out_of_memory
from fnloop._step.guard import pieces_of
from fnloop.testing import assert_same, law_fold, law_purity, small, stochastic, toy, toy_loss

Pair = namedtuple("Pair", "x names")
NUMBERS = torch.tensor([1.0, 2.0, 6.0, 7.0, 4.0])


def run(pipe, problem=None, **settings):
    one = problem or small()
    return fl.fit(
        pipe(one.loss_fn), one.state(), one.batches, **{"epochs": 2, "hooks": (), **settings}
    )


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


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.ones(3), torch.ones(2)), r"the lengths \[2, 3\].*put x.unbind\(\) into the batch"),
        (torch.tensor(1.0), "no tensor with a dimension in a Tensor"),
        ({"text": "abc"}, "no tensor with a dimension in a dict.*tuple, a list or a mapping"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message):
    with pytest.raises(ValueError, match=f"cut into pieces along the first dimension.*{message}"):
        fl.pipeline(fl.microbatch(2))(toy_loss)(toy(), batch)


def test_wrong_settings_and_company_are_refused():
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="microbatch expects size as an int >= 1, the"):
            fl.microbatch(wrong)
    for wrong in (2.0, True, None):
        with pytest.raises(TypeError, match="microbatch expects size"):
            fl.microbatch(wrong)
    for member in (fl.microbatch(2), fl.retry_on_oom()):
        with pytest.raises(ValueError, match=r"what tbptt\(3\) carries on belongs to all of them"):
            fl.pipeline(member, fl.tbptt(3))
        with pytest.raises(ValueError, match="changes gradients in place"):
            fl.pipeline(fl.closure(create_graph=True), member)
    fl.pipeline(fl.microbatch(2), fl.cuda_graph())
    with pytest.raises(ValueError, match=r"cannot capture retry_on_oom.*then list microbatch"):
        fl.pipeline(fl.microbatch(2), fl.retry_on_oom(), fl.cuda_graph())


# --- microbatch


def test_an_update_in_pieces_equals_a_loop_by_hand_bit_for_bit():
    one, by = small(), small().state()
    state = run(fl.pipeline(fl.microbatch(3), fl.clip(0.05)))
    for x, y in [*one.batches] * 2:
        by.optimizer.zero_grad()
        for start in range(0, len(x), 3):
            part = x[start : start + 3], y[start : start + 3]
            (one.loss_fn(by.model, part)[0] * (len(part[0]) / min(3, len(x)))).backward()
        for p in by.model.parameters():
            p.grad /= len(x) / min(3, len(x))
        nn.utils.clip_grad_norm_(by.model.parameters(), 0.05)
        by.optimizer.step()
    for mine, theirs in zip(state.model.parameters(), by.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "members",
    [
        (),
        (fl.clip(0.05),),
        (fl.accumulate(2), fl.clip(0.05)),
        (fl.clip(0.05), fl.accumulate(2)),
        (fl.sam(0.05), fl.accumulate(3)),
        (fl.schedule(fl.schedules.linear()), fl.ema(0.9)),
    ],
    ids=repr,
)
def test_pieces_change_neither_numbers_nor_length_wherever_they_are_listed(members, size):
    whole = run(fl.pipeline(*members))
    assert_same(run(fl.pipeline(*members, fl.microbatch(size))), whole, rtol=1e-12)
    assert_same(run(fl.pipeline(fl.microbatch(size), *members)), whole, rtol=1e-12)


def test_pieces_in_fp16_are_unscaled_once():
    step = fl.pipeline(fl.microbatch(2), fl.amp("fp16", init_scale=8.0), fl.accumulate(2))
    state, out = step(toy_loss)(toy(), [NUMBERS, torch.tensor([10.0])])
    assert (state.model.w.item(), out.weight) == (-5.0, 6)


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


def test_an_error_in_a_piece_says_where_it_was():
    def loss_fn(model, batch):
        if 7.0 in batch:
            raise ZeroDivisionError
        return toy_loss(model, batch)

    with pytest.raises(ZeroDivisionError) as caught:
        fl.fit(fl.pipeline(fl.microbatch(2))(loss_fn), toy(), [NUMBERS], hooks=())
    assert (
        "while in the loss function loss_fn, train, epoch 1, batch 0, step 0"
        in (caught.value.__notes__[0])
    )
    assert caught.value.state.model.w.item() == 0


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


def test_the_size_is_halved_until_it_fits_and_kept(caplog, tmp_path):
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("no more")
        return toy_loss(model, batch)

    step = fl.pipeline(fl.retry_on_oom())(loss_fn)
    state = fl.fit(step, toy(), [torch.ones(7)], hooks=())
    assert (seen, state.slots["retry_on_oom"]) == ([7, 4, 2, 2, 2, 1], 2)
    assert "no memory left for 7 samples at once" in caplog.messages[0]
    assert "in pieces of 4, and later ones begin with them" in caplog.messages[0]
    assert len(caplog.messages) == 2
    fl.save(state, tmp_path / "saved")
    again = fl.restore(tmp_path / "saved", toy())
    seen.clear()
    again = fl.fit(step, again, [torch.ones(7)], epochs=2, hooks=())
    assert (seen, again.slots["retry_on_oom"], again.model.w.item()) == ([2, 2, 2, 1], 2, -2.0)


def test_retries_begin_with_the_pieces_of_microbatch():
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch))
        if len(batch) > 2:
            raise MemoryError
        return toy_loss(model, batch)

    step = fl.pipeline(fl.retry_on_oom(), fl.microbatch(4))(loss_fn)
    state, _ = step(toy(), NUMBERS)
    assert (seen, state.model.w.item()) == ([4, 2, 2, 1], -4.0)


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
    def loss_fn(model, batch):
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fl.fit(fl.pipeline(fl.retry_on_oom())(loss_fn), toy(), [torch.ones(3)], hooks=())
    assert "a single sample does not fit" in caught.value.__notes__[1]
    assert "while in the loss function" in caught.value.__notes__[2]
    assert caught.value.state.slots["retry_on_oom"] == 0  # nothing fitted

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fl.pipeline(fl.retry_on_oom())(loss_fn)(toy(), (torch.ones(3), torch.ones(2)))
    assert "cannot repeat this with smaller pieces: a batch is cut" in caught.value.__notes__[1]

    calls = []

    def wrong(model, batch):
        calls.append(batch)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        fl.pipeline(fl.retry_on_oom())(wrong)(toy(), torch.ones(4))
    assert len(calls) == 1


def test_retried_runs_keep_the_laws_of_fold_and_purity(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: 0)  # once for each retry: slow
    problem = attrs.evolve(small(), loss_fn=limited(small().loss_fn, 2))
    pipe = fl.pipeline(fl.accumulate(2), fl.retry_on_oom())
    law_fold(pipe, problem)
    law_purity(pipe, problem)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("x"),
        MemoryError(),
        *map(
            RuntimeError,
            (
                "CUDA error: out of memory",
                "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
                "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if",
                "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried",
                "MPS backend out of memory (MPS allocated: 1 GB)",
                "XPU out of memory. Tried to allocate",
            ),
        ),
    ],
    ids=repr,
)
def test_every_wording_of_an_error_of_memory_is_known(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))


def test_a_true_error_of_the_allocator_of_the_cpu_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert math.isfinite(torch.ones(1).item())


def test_a_piece_that_is_left_out_is_out_of_the_divisor():
    def loss_fn(model, batch):
        return fl.skip("negative") if (batch < 0).any() else toy_loss(model, batch)

    batches = [torch.tensor([1.0, 3.0, -1.0, 5.0]), torch.tensor([2.0, 2.0])]
    step = fl.pipeline(fl.microbatch(2), fl.accumulate(2))(loss_fn)
    state = fl.fit(step, toy(), batches, hooks=())
    assert state.model.w.item() == -(1 + 3 + 2 + 2) / 4 and state.step == 1
