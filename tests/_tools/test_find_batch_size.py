"""find_batch_size: an allocator that fails on purpose, and nothing else changes."""

import pytest
import torch
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._backend.containers import is_out_of_memory
from fnloop.testing import assert_same, toy, toy_loss

MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def limited(most, error=MEMORY):
    """Return a loss function that has memory for batches of a size, and the sizes it was given."""
    sizes = []

    def loss_fn(model, batch):
        sizes.append(len(batch))
        if len(batch) > most:
            raise error
        return toy_loss(model, batch)

    return loss_fn, sizes


def make_loader(samples=1000, **settings):
    return lambda size: DataLoader(torch.ones(samples), batch_size=size, **settings)


@pytest.mark.parametrize("most", [1, 2, 3, 63, 64, 65])
def test_it_is_the_largest_that_fits(most):
    loss_fn, sizes = limited(most)
    assert fl.find_batch_size(fl.pipeline()(loss_fn), toy(), make_loader()) == most
    assert len(sizes) <= 3 * (2 * 7 + 1)
    assert max(sizes) <= 2 * most + 2


def test_every_update_counts():
    """The state of an optimizer, and with accumulate every batch of the window."""
    calls = []

    def loss_fn(model, batch):
        calls.append(len(batch))
        if len(batch) > 10 and len(calls) > 2:
            raise MemoryError
        return toy_loss(model, batch)

    state = toy()
    assert fl.find_batch_size(fl.pipeline(fl.accumulate(2))(loss_fn), state, make_loader()) == 10
    assert calls[:6] == [2] * 6


def test_the_data_or_most_may_be_the_limit():
    step = fl.pipeline(fl.schedule(lambda i, total: 1.0))(toy_loss)
    assert fl.find_batch_size(step, toy(), make_loader(), most=100) == 100
    assert fl.find_batch_size(step, toy(), make_loader(), most=1) == 1
    assert fl.find_batch_size(step, toy(), make_loader(37)) == 37
    assert fl.find_batch_size(step, toy(), make_loader(37, drop_last=True)) == 37
    assert fl.find_batch_size(step, toy(), lambda size: [torch.ones(size)] * 2, most=9) == 9


def test_nothing_changes():
    loss_fn, _ = limited(5)
    step, state = fl.pipeline(fl.ema(0.9))(loss_fn), toy()
    batches = [torch.ones(2)] * 4
    state = fl.fit(step, state, batches, steps=2, hooks=())
    before, draws = fl.snapshot(state), torch.get_rng_state()
    assert fl.find_batch_size(step, state, make_loader(shuffle=True)) == 5
    assert torch.equal(torch.get_rng_state(), draws)
    assert_same(
        fl.fit(step, state, batches, epochs=1, hooks=()),
        fl.fit(step, before, batches, epochs=1, hooks=()),
    )


def test_one_sample_that_does_not_fit_and_other_errors():
    loss_fn, sizes = limited(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fl.find_batch_size(fl.pipeline()(loss_fn), toy(), make_loader())
    assert "not even a batch of one sample fits" in caught.value.__notes__[-1]
    assert set(sizes) == {1, 2}
    loss_fn, _ = limited(3, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        fl.find_batch_size(fl.pipeline()(loss_fn), toy(), make_loader())


def test_a_loader_that_ignores_the_size_is_refused():
    with pytest.raises(ValueError, match=r"make_loader\(4\) gave batches of 8 samples, as many"):
        fl.find_batch_size(fl.pipeline()(toy_loss), toy(), lambda size: [torch.ones(8)] * 9)
    with pytest.raises(TypeError, match="make_loader as a function batch_size -> loader"):
        fl.find_batch_size(fl.pipeline()(toy_loss), toy(), [torch.ones(8)])


def test_updates_that_are_all_skipped_end_too():
    step = fl.pipeline(fl.amp("fp16"))(lambda model, batch: toy_loss(model, batch)[0] * torch.inf)
    assert fl.find_batch_size(step, toy(), make_loader(), most=4) == 4


def test_with_alternate_and_raw():
    model = torch.nn.ModuleDict({"a": fl.testing.Toy()})
    named = {"a": torch.optim.SGD(model["a"].parameters(), lr=0.1)}
    loss_fn, _ = limited(6)
    turns = fl.alternate({"a": fl.pipeline()(lambda model, batch: loss_fn(model["a"], batch))})
    state = fl.TrainState.create(model, named, seed=0)
    assert fl.find_batch_size(turns, state, make_loader()) == 6

    def update(state, batch):
        loss, aux = loss_fn(state.model, batch)
        loss.backward()
        state.optimizer.step()
        return fl.Output(loss, weight=len(batch), aux=aux)

    assert fl.find_batch_size(fl.raw(update), toy(), make_loader()) == 6


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.07 GB)"), True),
        (RuntimeError("XPU out of memory. Tried to allocate 20 MiB"), True),
        (RuntimeError("Native API failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: not enough"),
            True,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_memory_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_allocator_of_the_cpu_itself():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
