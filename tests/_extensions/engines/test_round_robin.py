"""How batches are distributed to processes. No second process is needed to see it."""

import pytest
import torch
from torch.utils.data import DataLoader

from fnloop._extensions.engines.shares import Padding, Window
from fnloop._extensions.engines.shares import take as taken
from fnloop._loop.beginning import check_length
from fnloop.data import even, take
from fnloop.extend import Reader, Source


def shares(items, processes, window=None, mark=lambda loader: loader):
    """Return what each process gets, padding in brackets."""
    loader = mark([torch.ones(1)])
    opened = (Source.open(loader, 0, rank, processes, window) for rank in range(processes))
    split = [of_rank.marked(of_rank.split(items, lambda item: 0)) for of_rank in opened]
    return [[[i.batch] if type(i) is Padding else i for i in share] for share in split]


@pytest.mark.parametrize(("items", "settings", "expected"), [
    # each process gets one item in turn
    ("abcdef", {"processes": 1}, [list("abcdef")]),
    ("abcdef", {"processes": 2}, [list("ace"), list("bdf")]),
    # in an incomplete round the first item is padding
    ("abcde", {"processes": 2}, [list("ace"), ["b", "d", ["e"]]]),
    ("abcde", {"processes": 3}, [["a", "d"], ["b", "e"], ["c", ["d"]]]),
    ("abcd", {"processes": 3}, [["a", "d"], ["b", ["d"]], ["c", ["d"]]]),
    # an even loader ends before an incomplete round
    ("abcde", {"processes": 1, "mark": even}, [list("abcde")]),
    ("abcde", {"processes": 2, "mark": even}, [list("ac"), list("bd")]),
    ("abcde", {"processes": 3, "mark": even}, [["a"], ["b"], ["c"]]),
    ("abcdef", {"processes": 2, "window": 4, "mark": even}, [list("ace"), list("bdf")]),
    ("ab", {"processes": 3, "mark": even}, [[], [], []]),
    # a window of all processes begins with the first process
    ("abcdef", {"processes": 1, "window": 4}, [list("abcdef")]),
    ("abcdef", {"processes": 2, "window": 4}, [list("ace"), list("bdf")]),
    ("abcdefgh", {"processes": 3, "window": 4},
        [["a", "d", "e", "h"], ["b", ["d"], "f", ["h"]], ["c", ["d"], "g", ["h"]]]),
    ("abc", {"processes": 3, "window": 1}, [list("abc"), *[[["a"], ["b"], ["c"]]] * 2]),
    # the last one may be shorter
    ("abcdefg", {"processes": 2, "window": 5}, [list("acef"), ["b", "d", ["e"], "g"]]),
])  # fmt: skip
def test_what_each_process_gets(items, settings, expected):
    assert shares(items, **settings) == expected


def test_an_update_whose_batches_do_not_divide_is_refused_for_an_even_loader():
    batches = [torch.ones(2)] * 6
    assert Source.open(even(batches), 0, 0, 2, total=8).length_in(0) == 6
    with pytest.raises(ValueError, match="an update of 3 batches in all has such a round on 2 pro"):
        Source.open(even(batches), 0, 0, 2, total=6)


class Counting(Reader):
    def length_in(self, epoch):
        return 6

    def items(self, at):
        return (torch.full((2,), float(n)) for n in range(at.start, 6))


@pytest.mark.parametrize(("make", "length", "read"), [
    (Counting, 6, 2), (lambda: even(Counting()), 4, 1), (lambda: take(Counting(), 4), 4, 1),
], ids=["itself", "even", "take"])  # fmt: skip
def test_a_reader_of_a_users_own_is_distributed_as_any_loader(make, length, read):
    sources = [Source.open(make(), 0, rank, 4) for rank in range(4)]
    assert sources[0].length_in(0) == length
    assert [len([*source.batches(0, 0, 0)]) for source in sources] == [read] * 4


class WithLength:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter([torch.ones(2)] * self.n)


@pytest.mark.parametrize("loader", [
    [torch.ones(2)] * 10, WithLength(10), DataLoader(torch.ones(20), 2),
    DataLoader(torch.ones(21), 2, drop_last=True), take([torch.ones(2)] * 11, 10),
], ids=["list", "stream", "samples", "dropped", "composed"])  # fmt: skip
def test_the_length_of_an_even_loader_is_that_of_its_complete_rounds(loader):
    """Of ten batches, three processes take nine. After four, they take the other six."""
    sources = [Source.open(even(loader), 0, rank, 3) for rank in range(3)]
    for start, rounds in ((0, 3), (4, 2)):
        read = [[*source.batches(0, start, 2 * start)] for source in sources]
        assert [[len(batch) for batch in share] for share in read] == [[2] * rounds] * 3
        assert sources[0].left(0, start, 2 * start) == 3 * rounds
    assert sources[0].length_in(0) == 9
    assert sources[0].length_in(0) == sources[0].left(0, 0, 0)


def test_a_window_knows_its_batch_size_only_if_every_process_has_the_same():
    sharing = Source.open([], 0, 0, 2)
    size = lambda rounds: taken(sharing, (0,) * rounds, rounds)[1].batch_size
    share = sharing.split([4, 4, 4, 4, 4, 3, 3], size_of=lambda n: n)
    assert [next(share), next(share)] == [4, 4]
    assert size(2) == 4
    assert [*share] == [4, 3]
    assert [size(1), size(1)] == [0, 0]
    assert size(1) == 0  # nothing is known of a round that was not made


def test_padding_is_unwrapped_and_noted():
    batches = [torch.full((2,), float(i)) for i in range(3)]
    source = Source.open(batches, seed=0, rank=1, processes=2)
    mine = source.batches(0, 0, 0)
    assert taken(source, next(mine), 1) == (batches[1], Window(2))
    assert taken(source, next(mine), 1) == (batches[2], Window(0, (True,)))
    window = tuple(source.batches(0, 0, 0))
    assert taken(source, window, 2) == ((batches[1], batches[2]), Window(0, (False, True)))


def test_a_tensor_that_the_loader_reuses_is_refused():
    def loader():
        batch = torch.zeros(1)
        for i in range(4):
            yield batch.fill_(i)

    source = Source.open(loader, seed=0, rank=0, processes=2)
    with pytest.raises(ValueError, match="reuses a tensor for its next batch, but several"):
        [*source.batches(0, 0, 0)]
    assert len([*Source.open(loader, seed=0).batches(0, 0, 0)]) == 4


def test_padding_beyond_the_batches_of_an_update_is_not_counted():
    """Nine batches, five to an update, on three processes: the last update has four and padding."""
    source = Source.open([torch.ones(1)] * 9, 0, 0, 3, total=5)
    assert [source.padded(n) for n in (3, 4, 5, 9)] == [3, 5, 5, 10]


def test_another_number_of_processes_has_no_warning(caplog):
    """Of 12 batches 4 are consumed; on 5 processes, 8 are left, and 2 are padding."""
    source = Source.open(DataLoader(torch.zeros(24), 2), 0, rank=0, processes=5)
    check_length(source, 0, first=4, samples=8, batches=4 + 10)
    check_length(source, 0, first=0, samples=0, batches=15)
    assert not caplog.messages
    check_length(source, 0, first=4, samples=8, batches=4 + 5)
    (line,) = caplog.messages
    assert "is 12, but an epoch of it had 5 batches from batch 4 on, where 8 were left" in line
