"""The loaders of torchdata, Hugging Face and accelerate: they continue where they were."""

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from streams import READ, Stream, restored, train
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.extend import Source
from fnloop.testing import assert_same

# By torchdata, of torch; and by Hugging Face's formatting.
pytestmark = [
    pytest.mark.usefixtures("no_state_of_accelerate_is_left"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
]


def check(make, folder, splits=(1, 5, 8), pipe=(), size=2, first=lambda n: n):
    """Check that a run of 6 batches an epoch equals one that stops at each split, and once more.

    ``first`` tells which sample is read first to continue at a sample; None: it is not counted.
    """
    whole = train(make(), pipe=pipe)
    for split in splits:
        state = restored(train(make(), pipe=pipe, steps=split), folder)
        assert (state.position is None) is (split % 6 == 0)
        READ.clear()
        state = train(make(), state, pipe, steps=split + 1)
        if first is not None:
            assert READ[0] == first(size * (split % 6))
        assert_same(train(make(), restored(state, folder), pipe), whole)


def check_evaluated(loader, folder):
    """Check the same of a loader that is evaluated every two updates, too."""
    run = {"evaluate_every": fl.every(steps=2)}
    state = restored(train((loader, loader), steps=3, **run), folder)
    whole = train((loader, loader), epochs=2, **run)
    assert_same(train((loader, loader), state, epochs=2, **run), whole)


# --- accelerate


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_that_accelerate_prepared_is_read_as_the_loader_inside(shuffle, tmp_path):
    make = lambda: DataLoader(torch.arange(12.0), 2, shuffle=shuffle)
    prepared = prepare_data_loader(make(), num_processes=1, process_index=0)
    whole = train(make())
    state = restored(train(prepared, steps=3), tmp_path)
    assert_same(train(prepared, state), whole)


def test_a_stream_that_accelerate_prepared_continues_where_it_was(tmp_path):
    check(lambda: prepare_data_loader(DataLoader(Stream(), 2), num_processes=1), tmp_path)


def test_batches_that_accelerate_skips_are_skipped():
    loader = prepare_data_loader(DataLoader(Stream(noisy=False), 2), num_processes=1)
    skipping = skip_first_batches(loader, 2)
    read = [b.flatten().tolist() for b in Source.open(skipping, 0).batches(0, 0, 0)]
    assert read == [[4, 5], [6, 7], [8, 9], [10, 11]]


# --- torchdata


@pytest.fixture
def stateful():
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.slow
def test_torchdata_without_workers(stateful, tmp_path):
    check(lambda: stateful(Stream(), 2), tmp_path)
    check(lambda: stateful(Stream(13), 2, drop_last=True), tmp_path, pipe=(fl.accumulate(1),))


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.long)])
def test_torchdata_with_workers(stateful, persistent, tmp_path, caplog):
    kwargs = {"num_workers": 2, "persistent_workers": persistent}
    check(lambda: stateful(Stream(noisy=False), 2, **kwargs), tmp_path, (8,), first=None)
    assert not caplog.messages
    loader = stateful(Stream(noisy=False), 2, **kwargs)
    state = train(loader, steps=3)
    read = state.position["state"]["_snapshot"]["_worker_snapshots"]
    assert [read[f"worker_{i}"]["dataset_state"]["at"] for i in (0, 1)] == [8, 5]
    check_evaluated(loader, tmp_path)
    assert not caplog.messages


@pytest.mark.slow
def test_torchdata_map_style_is_read_by_index(stateful, tmp_path):
    loader = stateful(torch.arange(12.0), 2, shuffle=True)
    state = train(loader, steps=3)
    assert state.position["keeper"] == ""
    assert_same(train(loader, restored(state, tmp_path)), train(loader))


@pytest.mark.slow
def test_what_workers_draw_is_exact_but_read_again(stateful, tmp_path, caplog):
    check(lambda: stateful(Stream(), 2, num_workers=1), tmp_path, (3,), first=None)
    assert "StatefulDataLoader.state_dict() does not lead back" in caplog.messages[0]


@pytest.mark.slow
def test_another_number_of_workers_is_refused(stateful, tmp_path):
    state = train(stateful(Stream(noisy=False), 2, num_workers=1), steps=3)
    with pytest.raises(AssertionError) as caught:
        train(stateful(Stream(noisy=False), 2, num_workers=2), state)
    assert "must have the same settings as then" in " ".join(caught.value.__notes__)


# --- Hugging Face


def examples(n=12):
    for i in range(n):
        READ.append(i)
        yield {"x": float(i)}


def values(batch):  # Python 3.14 pickles it for a worker
    return torch.stack([sample["x"] for sample in batch])


@pytest.mark.slow
def test_hugging_face(stateful, tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": [float(i) for i in range(12)]})

    def generated():  # its position is the number of the example within the shard
        return datasets.IterableDataset.from_generator(examples).with_format("torch")

    sharded = lambda: table.to_iterable_dataset(num_shards=3).with_format("torch")
    check(lambda: DataLoader(generated(), 2, collate_fn=values), tmp_path, (8,), first=lambda n: 0)
    check(lambda: stateful(generated(), 2, collate_fn=values), tmp_path, (3,), first=lambda n: 0)
    check(lambda: DataLoader(sharded(), 2, collate_fn=values), tmp_path, (5,), first=None)
    assert not [line for line in caplog.messages if line.startswith("fit:")]
    # Resumed again at once: torchdata does not know where a worker is that gave nothing since.
    check(lambda: stateful(sharded(), 2, collate_fn=values, num_workers=2), tmp_path, (3,),
          first=None)  # fmt: skip
    found = [line for line in caplog.messages if line.startswith("fit:")]
    assert ["StatefulDataLoader.state_dict() does not lead" in line for line in found] == [True]
    caplog.clear()
    loader = DataLoader(sharded(), 2, collate_fn=values)
    check_evaluated(loader, tmp_path)
    assert not [line for line in caplog.messages if line.startswith("fit:")]
    check(lambda: DataLoader(sharded().shuffle(0, buffer_size=4), 2, collate_fn=values), tmp_path,
          (2,), first=None)  # fmt: skip
    assert "IterableDataset.state_dict() does not lead" in caplog.text
