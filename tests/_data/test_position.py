"""Streams that know where they are: they continue there, and read nothing again."""

import copy
import functools

import attrs
import numpy as np
import pytest
import torch
from streams import READ, Batches, Forgetful, Stream, restored, train
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._backend.containers import checksum
from fnloop._core.runs import UNKNOWN
from fnloop._data.iterable import hint_at_stateful_loader, keeper_of, reading
from fnloop._data.loaders import takes_position
from fnloop._data.position import Positions
from fnloop.extend import Source
from fnloop.testing import assert_same, toy, toy_loss

LOADERS = {  # each gives 6 batches of 2 samples
    "a dataset with a position, in a DataLoader": lambda: DataLoader(Stream(), 2),
    "a loader with a position": Batches,
    "a function that makes one": lambda: lambda: Batches(),
}


STEP = fl.pipeline()(toy_loss)


def quiet(n=12, kind=Stream):
    return DataLoader(kind(n, noisy=False), 2)


def stop_here(*_):
    raise RuntimeError("stop here")


@pytest.fixture(autouse=True)
def nothing_read():
    READ.clear()


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("split", [1, 5, 8])
@pytest.mark.parametrize("again", [restored, lambda state, folder: state], ids=["resume", "fold"])
def test_a_run_that_continues_reads_nothing_again(make, split, again, tmp_path):
    whole = train(make())
    state = again(train(make(), steps=split), tmp_path)
    for step in (split, split + 1, split + 2):  # a resume of a resume
        READ.clear()
        state = again(train(make(), state, steps=step + 1), tmp_path)
        assert (state.position is None) is (state.step % 6 == 0)  # at the end of an epoch
        following = 2 * (step % 6)  # the sample that the update begins with
        ahead = [*range(following, min(following + 4, 12))]  # that of the next update too
        assert ahead == READ
    assert_same(train(make(), state), whole)


@pytest.mark.parametrize("pipe", [(), (fl.accumulate(2),)], ids=["plain", "accumulate(2)"])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_what_was_fetched_ahead_is_not_lost(pipe, prefetch, tmp_path):
    make = lambda: DataLoader(Stream(20), 2)
    whole = train(make(), pipe=pipe)
    state = train(make(), pipe=pipe, steps=2, prefetch=prefetch)
    assert state.position["batch"] == state.batch == (4 if pipe else 2)
    READ.clear()
    state = restored(state, tmp_path)
    assert_same(train(make(), state, pipe, epochs=2, prefetch=prefetch), whole)
    assert READ[0] == 2 * (4 if pipe else 2)


def test_a_position_that_leaves_out_a_shuffle_buffer_changes_no_number(caplog, tmp_path):
    whole = train(quiet(40, Forgetful))
    state = restored(train(quiet(40, Forgetful), steps=12), tmp_path)
    assert not caplog.messages
    READ.clear()
    assert_same(train(quiet(40, Forgetful), state), whole)
    assert READ.count(0) == 2  # of the epoch that was left, and of the next one
    (line,) = caplog.messages
    assert "Forgetful.state_dict() does not lead back" in line


def test_such_a_position_is_refused_if_the_loader_cannot_begin_again():
    class Released(Forgetful):
        def __del__(self): ...

    make = lambda: quiet(40, Released)
    state = train(make(), steps=12)
    with pytest.raises(RuntimeError, match="the loader cannot be copied"):
        train(make(), fl.snapshot(state))
    assert_same(train(make, state), train(make()))


# --- the same object, read by others


@pytest.mark.parametrize("make", list(LOADERS.values())[:2], ids=list(LOADERS)[:2])
def test_an_evaluation_on_the_stream_that_is_trained_on_begins_at_its_beginning(make, tmp_path):
    moment = {"evaluate_every": fl.every(steps=2)}

    def both(state=None, **target):
        stream = make()
        return train((stream, stream), state, **moment, **(target or {"epochs": 2}))

    whole = both()
    assert_same(whole, train((make(), make()), **moment, epochs=2))
    state = restored(both(steps=5), tmp_path)  # evaluated after updates 2 and 4
    READ.clear()
    resumed = both(state, steps=6)
    assert [10, 11, *range(12)] == READ  # an update, and the evaluation
    assert_same(both(resumed), whole)


def test_a_loader_that_was_given_a_position_begins_later_epochs_at_their_beginning():
    loader, whole = DataLoader(Stream(), 2), train(DataLoader(Stream(), 2))
    for steps in (3, 4, 9):
        state = train(loader, train(loader, steps=2), steps=steps)
        assert_same(train(loader, state), whole)
        assert_same(train(loader), whole)  # from the beginning, on the same object


def test_an_evaluation_asks_for_no_position(monkeypatch, caplog):
    monkeypatch.setattr(Batches, "state_dict", stop_here)
    assert fl.evaluate(STEP, toy(w=1.0), Batches())["loss"] > 0
    assert not caplog.messages


def test_a_run_that_has_ended_leaves_the_stream_to_others():
    loader = DataLoader(Stream(), 2)
    for _ in range(2):
        with reading(loader, to_load=False) as read:
            assert read is loader
            with reading(loader, to_load=False) as other:
                assert other is not loader and other.dataset is not loader.dataset
        with pytest.raises(RuntimeError, match="stop here"), reading(loader, False) as read:
            assert read is loader
            stop_here()
    with reading(loader, to_load=True) as read:
        assert read.dataset is not loader.dataset

    class Released(Stream):
        def __del__(self): ...

    loader = DataLoader(Released(), 2)  # what releases something when it is deleted is not copied
    with reading(loader, to_load=True) as read, reading(loader, to_load=True) as other:
        assert read is other is loader


# --- where the position is kept


def test_snapshots_forks_hooks_and_exceptions_have_the_position(tmp_path):
    kept = fl.every(steps=3)(lambda state: fl.save(state, tmp_path / "h") and state)
    state = train(Batches(), hooks=(kept,), steps=3)
    copies = [fl.snapshot(state), *fl.fork(state, {"lr": [0.01]}).values()]
    with pytest.raises(RuntimeError) as caught:
        train(Batches(), hooks=(fl.every(steps=3)(stop_here),), epochs=1)
    for one in (*copies, fl.restore(tmp_path / "h", toy()), caught.value.state):
        assert one.position["state"] == {"yielded": 3}
        READ.clear()
        assert_same(train(Batches(), one), train(Batches()))
        assert READ[0] == 6


def test_a_hook_that_goes_back_goes_back_in_the_stream_too(back_once):
    read = []

    def once(state):
        back = back_once(state)
        if back.model is not state.model:
            read.append(len(READ))
        return back

    state = train(Batches(), hooks=(once,), epochs=1)
    assert_same(state, train(Batches(), epochs=1))
    assert READ[read[0] :][:10] == [*range(2, 12)]  # from the state after one update


class InPlace(Stream):
    """It changes what its ``state_dict`` has returned, and what it was given."""

    kept = None

    def state_dict(self):
        self.kept = self.kept or {}
        self.kept |= super().state_dict()
        return self.kept

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kept = state


def test_a_position_that_changes_afterwards_is_copied():
    make = lambda: DataLoader(InPlace(), 2)
    state = train(make(), steps=3)
    assert state.position["state"]["at"] == 6
    READ.clear()
    assert_same(train(make(), state), train(make()))
    assert READ[0] == state.position["state"]["at"] == 6


def test_a_state_without_a_position_or_with_that_of_another_loader_is_resumed_as_before(tmp_path):
    state = attrs.evolve(restored(train(Batches(), steps=3), tmp_path), position=None)
    READ.clear()
    assert_same(train(Batches(), state), train(Batches()))
    assert READ[:12] == [*range(12)]
    state = train(Batches(Stream(noisy=False)), steps=3)
    assert_same(train(quiet(), state), train(quiet()))


class Odd(Batches):
    def state_dict(self):
        return {"it": object()}


def test_a_position_that_is_not_plain_data_is_left_out_of_checkpoints(caplog, tmp_path):
    state = train(Odd(), steps=3)
    caplog.clear()
    state = restored(state, tmp_path)
    assert state.position is None
    (line,) = caplog.messages
    assert "what state_dict() returns must be plain data (positions.0.state.it is" in line
    assert_same(train(Odd(), state), train(Odd()))


def test_a_loader_that_cannot_say_where_it_is_is_read_again(caplog, monkeypatch):
    whole = train(Batches())
    monkeypatch.setattr(Batches, "state_dict", lambda self: None)
    assert train(Batches(), steps=3).position["keeper"] == "" and not caplog.messages
    monkeypatch.setattr(Batches, "state_dict", lambda self: {}["yielded"])
    state = train(Batches(), steps=3)
    (line,) = caplog.messages
    assert "state_dict() raised KeyError: 'yielded'" in line
    assert_same(train(Batches(), state), whole)


def test_an_error_of_the_loader_says_that_it_was_given_a_position():
    state = train(Batches(), steps=3)
    refusing = Batches()
    refusing.load_state_dict = stop_here
    with pytest.raises(RuntimeError, match="stop here") as caught:
        train(refusing, state)
    assert "must have the same settings as then" in " ".join(caught.value.__notes__)
    assert "attrs.evolve(state, position=None)" in " ".join(caught.value.__notes__)


# --- the parts


def test_who_knows_the_position():
    stream = Stream()
    assert keeper_of(DataLoader(stream, 2)) is stream
    assert keeper_of(DataLoader(stream, 2, num_workers=1)) is None  # each worker has its own
    assert keeper_of([1]) is None and keeper_of(Batches) is None

    class Counted(Stream):  # as MosaicML's dataset, which its loader has to ask
        def state_dict(self, samples):
            return super().state_dict()

    class Loader(DataLoader, Batches):
        pass

    loader = Loader(Counted(), 2)
    assert keeper_of(DataLoader(Counted(), 2)) is None and keeper_of(loader) is loader


def test_workers_without_a_position_are_told_what_would_be_faster(caplog):
    for loader in (DataLoader(Stream(), 2), Batches(), [1], DataLoader([1], num_workers=1)):
        hint_at_stateful_loader(loader)
    assert not caplog.messages
    for _ in range(2):
        hint_at_stateful_loader(DataLoader(Stream(), 2, num_workers=1))
    (line,) = caplog.messages
    assert "StatefulDataLoader of torchdata, in the place of DataLoader" in line


def test_no_more_is_kept_than_what_is_ahead():
    positions, batches = Positions(), Batches()
    positions.begin(None, ahead=2)
    positions.open(0, 0, keeper=batches)
    for n in range(1, 9):
        assert positions.note(n, torch.tensor([n]), batches)
    assert positions.at(0, 5) is positions.at(1, 6) is None
    found = [positions.at(0, n) for n in (6, 7, 8, 9)]
    sums = [checksum(torch.tensor([n])) for n in (7, 8)]
    assert [at["batch"] for at in found] == [6, 7, 8, 8]
    assert [at["next"] for at in found] == [*sums, UNKNOWN, UNKNOWN]
    positions.end(8)
    assert [positions.at(0, n)["next"] for n in (7, 8)] == [sums[1], None]


def test_which_position_is_given_back():
    at = {"epoch": 1, "batch": 4, "shards": 2, "keeper": "Batches", "state": {}, "next": 0}
    positions = Positions()
    positions.shards = 2
    assert positions.given(1, 4) is None
    positions.begin(at, ahead=1)
    assert positions.given(1, 4) == positions.given(1, 5) == positions.at(1, 8) == at
    assert not any(positions.given(*other) for other in [(1, 3), (1, 0), (0, 4), (None, 4)])
    positions.shards = 1
    assert positions.given(1, 4) is None
    positions.shards = 2
    positions.open(1, 4, keeper=Batches())
    assert positions.note(5, torch.ones(1), Batches())
    assert [positions.at(1, n)["batch"] for n in (8, 10, 11)] == [4, 5, 5]


@pytest.mark.parametrize("other", [
    {"x": torch.ones(2, dtype=torch.float64)}, {"x": torch.ones(2), "y": 2}, {"y": torch.ones(2)},
    {"x": np.ones(2)}, {"x": "text"}, {"x": b"bytes"}, {"x": torch.ones(2, dtype=torch.complex64)},
    {"x": torch.tensor(1.0)},
])  # fmt: skip
def test_another_batch_has_another_checksum(other):
    batch = {"x": torch.ones(2)}
    assert checksum(batch) == checksum({"x": torch.ones(2)}) != checksum(other)
    assert checksum(other) == checksum(copy.deepcopy(other)) is not None


# --- a function that is called with where to begin


def numbers(asked, epoch, batch):
    asked.append((epoch, batch))
    for i in range(batch, 6):
        yield torch.tensor([float(10 * epoch + i)]) + torch.rand(1)


@pytest.mark.parametrize("pipe", [(), (fl.accumulate(2),)], ids=["plain", "accumulate(2)"])
def test_a_function_that_takes_epoch_and_batch_begins_there(pipe, tmp_path):
    asked, batches = [], 2 if pipe else 1
    begin = functools.partial(numbers, asked)
    whole = train(begin, pipe=pipe)
    assert asked == [(0, 0), (1, 0)]
    for split in (1, 2, 5, 8) if not pipe else (1, 3, 4):
        state = restored(train(begin, pipe=pipe, steps=split), tmp_path)
        asked.clear()
        assert_same(train(begin, state, pipe), whole)
        assert asked[0] == divmod(split * batches, 6)
    asked.clear()
    fl.evaluate(STEP, toy(), begin)
    assert asked == [(0, 0)]
    asked.clear()  # each of several processes begins at the same batch
    assert len(list(Source.open(begin, 0, rank=1, processes=2).batches(3, 4, 0))) == 1
    assert asked == [(3, 4)]


@pytest.mark.parametrize(("function", "expected"), [
    (lambda epoch, batch: [], True), (lambda e, b, size=3, **k: [], True),
    (lambda epoch=0, batch=0: [], True), (functools.partial(numbers, []), True), (list, False),
    (lambda *a: [], False), (lambda path="x", size=3: [], False), (lambda epoch: [], False),
    (lambda a, b, c: [], False), ([], False),
])  # fmt: skip
def test_which_functions_take_a_position(function, expected):
    assert takes_position(function) is expected


def test_a_function_with_one_argument_is_refused():
    says = r"the train loader as .*a function that returns one.*\(epoch, batch\); .*\(epoch\)"
    with pytest.raises(TypeError, match=says):
        train(lambda epoch: [])
