"""The order that a sampler of the user's gives, after a resume: compared, and told by sample."""

import pytest
import torch
from resumed import DRAWN, InTurn, X, on_disk, trained, warning_of_a_resume
from torch.utils.data import BatchSampler, DataLoader

import fnloop as fl
from fnloop.testing import toy

ELSEWHERE = {
    "sampler": (lambda: DataLoader(X, 2, sampler=InTurn()), 3),
    "one sample in a batch": (lambda: DataLoader(X, None, sampler=InTurn()), 6),
    "sampler of batches": (
        lambda: DataLoader(X, batch_sampler=BatchSampler(InTurn(), 2, False)), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "steps"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_another_order_after_a_resume_is_told_by_sample(make, steps, tmp_path, caplog):
    line = warning_of_a_resume(make, steps, tmp_path, caplog)
    assert "fit: the training loader (InTurn" in line
    assert (
        "In this epoch, samples 2, 3 are trained twice, and samples 0, 1 are not trained." in line
    )


def test_a_cell_that_is_run_again_has_the_warning_too(caplog):
    loader = DataLoader(X, 2, sampler=InTurn())
    first, state = trained(loader, steps=1)
    rest, _ = trained(loader, state, epochs=1)
    assert first == [0, 1] == rest[::-1]
    (line,) = caplog.messages
    assert "samples 0, 1 are trained twice, and samples 2, 3 are not trained" in line


def test_a_resume_of_a_resume_compares_with_what_was_trained(tmp_path, caplog):
    make = lambda: DataLoader(X, None, sampler=InTurn())
    _, state = trained(make(), steps=5)  # 3
    seen, state = trained(make(), on_disk(state, tmp_path), steps=6)
    assert seen == [1]
    caplog.clear()
    seen, _ = trained(make(), on_disk(state, tmp_path), epochs=2)
    assert seen == [2, 3]
    (line,) = caplog.messages
    assert "In this epoch, sample 3 is trained twice, and sample 0 is not trained." in line


# --- the length of the data, and of batches


def test_data_of_another_length_are_told_in_samples(tmp_path, caplog):
    """Of 12 samples 8 were trained. Where nothing is left, the epoch ends with these."""
    make = lambda n, size=2: DataLoader(torch.arange(float(n)), size, shuffle=True)
    batches = lambda n: [torch.ones(2)] * n
    _, state = trained(make(12), steps=4)
    for loader, now, ends in (
        (make(4), "has 4 samples now", True), (make(1), "has 1 sample now", True),
        (make(10), "has 10 samples now", False), (make(20, 5), "has 20 samples now", False),
        (batches(2), "has 2 batches now", True), (batches(8), "has 8 batches now", False),
    ):  # fmt: skip
        caplog.clear()
        seen, reached = trained(loader, on_disk(state, tmp_path), epochs=1)
        (line,) = caplog.messages
        assert f"had 12 samples when epoch 1 began, and {now}" in line
        assert ("so it ends here, having been trained on 4 batches" in line) is ends
        assert bool(seen) is not ends
        assert reached.epoch == reached.history[-1].epoch == 1


def test_another_batch_size_has_no_warning_and_trains_what_is_left(tmp_path, caplog):
    make = lambda size: DataLoader(X, size, shuffle=True)
    whole, _ = trained(make(2), epochs=2)
    _, state = trained(make(2), steps=4)
    for size in (1, 3, 4, 5, 12):
        seen, _ = trained(make(size), on_disk(state, tmp_path), epochs=2)
        assert seen == whole[8:]
    assert not caplog.messages


# --- which samples


def test_the_samples_of_a_batch_are_known_of_a_sampler_with_a_generator_of_its_own():
    """Sample 5 is not a number; asking which samples a batch had moves no generator."""
    data = X.clone()
    data[5] = torch.nan
    loader = DataLoader(data, 2, sampler=DRAWN["numpy"]())
    seen = []

    def noting(model, batch):
        seen.append(batch.tolist())
        return model.w * batch.mean()

    hook = fl.halt_on_nonfinite(keep=True)
    state = fl.fit(fl.pipeline()(noting), toy(), loader, epochs=1, hooks=(hook,))
    (named,) = state.extra["nonfinite"]["indices"]
    bad = next(batch for batch in seen if any(v != v for v in batch))
    assert [data[i].item() for i in named if i != 5] == [v for v in bad if v == v]
    assert 5 in named
