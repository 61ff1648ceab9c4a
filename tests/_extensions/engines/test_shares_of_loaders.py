"""What each of several processes reads of a loader. No second process is needed to see it."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from fnloop.data import take, zip_cycle
from fnloop.extend import Source


def test_each_process_begins_a_function_of_epoch_and_batch_at_the_same_batch():
    asked = []

    def numbers(epoch, batch):
        asked.append((epoch, batch))
        return (torch.full((1,), float(n)) for n in range(batch, 6))

    read = Source.open(numbers, 0, rank=1, processes=2).batches(3, 4, 0)
    assert [batch.item() for batch in read] == [5.0]
    assert asked == [(3, 4)]


def by_torch():
    buffer = torch.empty(2, 1)
    for n in range(1, 7):
        yield buffer.fill_(n)


def by_numpy():
    buffer = torch.empty(2, 1)
    array = buffer.numpy()
    for n in range(1, 7):
        array[:] = n
        yield torch.from_numpy(array)


@pytest.mark.parametrize("fill", [by_torch, by_numpy])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_buffer_that_is_filled_again_is_refused_where_every_process_reads_all(fill, rank):
    with pytest.raises(ValueError, match=r"reuses a tensor for its next batch, but .* make a new"):
        [*Source.open(fill, 0, rank, 2).windows(None, torch.device("cpu"))]


class Collate:
    """Puts the samples of every batch into one buffer."""

    def __init__(self):
        self.buffer = torch.empty(2, 1)

    def __call__(self, samples):
        return torch.stack(samples, out=self.buffer)


def test_processes_that_fetch_their_own_samples_hold_none_of_the_others():
    samples = torch.arange(1.0, 7.0).repeat_interleave(2)[:, None]
    sources = [Source.open(DataLoader(samples, 2, collate_fn=Collate()), 0, i, 2) for i in (0, 1)]
    told = [[b[0].item() for b in source.batches(0, 0, 0)] for source in sources]
    assert told == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]


def test_a_loader_that_splits_its_data_itself_is_refused_inside_too():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    parts = {"a": DataLoader(range(8), 2, sampler=sampler), "b": [torch.ones(1)] * 2}
    with pytest.raises(ValueError, match="has a DistributedSampler, which repeats samples"):
        Source.open(take(zip_cycle(**parts), 2), 0, rank=0, processes=2)
