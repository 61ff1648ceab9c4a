"""Streams that know where they are, and what was read of them."""

import torch
from toolz import partition
from torch.utils.data import IterableDataset, get_worker_info

import fnloop as fl
from fnloop.testing import toy, toy_loss

READ = []  # the samples that this process has read


class Stream(IterableDataset):
    """``first``, ``first + 1``, ..., n of them. Its workers share them, and each has a position.

    As with Hugging Face's, all iterators of an object count in it, and begin where it was told to.
    Each sample has noise from torch's global generator, in the process that reads.
    """

    def __init__(self, n=12, noisy=True, first=0):
        self.n, self.noisy, self.first, self.begin, self.at = n, noisy, first, 0, None

    def __iter__(self):
        info = get_worker_info()
        step, first = (1, 0) if info is None else (info.num_workers, info.id)
        self.at = self.begin or first
        for i in range(self.at, self.n, step):
            READ.append(self.first + i)
            self.at += step
            yield torch.tensor([float(self.first + i)]) + (torch.rand(1) if self.noisy else 0)

    def state_dict(self):
        return {"at": self.at, "nested": [(1, None), {"seen": torch.tensor([2])}]}

    def load_state_dict(self, state):
        assert state["nested"][0] == (1, None)
        self.begin = self.at = state["at"]


class Forgetful(Stream):
    """A stream with a shuffle buffer of 4, which its position leaves out, as Hugging Face's."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 4:
                yield buffer.pop(int(torch.randint(4, (), generator=generator)))
        yield from buffer


class Batches:
    """A loader that knows where it is, and reads a batch ahead by itself."""

    def __init__(self, stream=None, size=2):
        self.stream, self.size = stream or Stream(), size
        self.begin, self.yielded = 0, 0

    def __iter__(self):
        self.yielded, self.stream.begin = self.begin, self.begin * self.size
        for samples in partition(self.size, self.stream):
            self.yielded += 1
            yield torch.stack(samples)

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.begin = state["yielded"]


def train(loaders, state=None, pipe=(), **kwargs):
    """Train, for two epochs unless a target is given."""
    kwargs = {"hooks": ()} | (kwargs or {"epochs": 2})
    return fl.fit(fl.pipeline(*pipe)(toy_loss), state or toy(lr=0.01), loaders, **kwargs)


def restored(state, folder):
    return fl.restore(fl.save(state, folder / "a"), toy(w=9.0))
