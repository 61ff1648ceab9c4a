"""interleave, zip_cycle and zip_shortest."""

import pytest
import torch
from composed_cases import listed, plain, read, samples, shuffled, stream
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from toy_runs import STEP, fit

import fnloop as fl
from fnloop.data import interleave, take, zip_cycle, zip_shortest
from fnloop.extend import Source
from fnloop.testing import toy, toy_loss


def names(found, b=50):
    return "".join("a" if samples(batch)[0] < b else "b" for batch in found)


def test_interleave_takes_each_batch_once_in_an_order_of_each_epoch():
    loader = interleave({"a": shuffled(12), "b": shuffled(8, 50)})
    orders = [names(read(loader, epoch)) for epoch in range(3)]
    assert {order.count("a") for order in orders} == {6}
    assert {order.count("b") for order in orders} == {4}
    assert len(set(orders)) == 3 and len(loader) == 10
    assert sorted(samples(read(loader, 1))) == [*range(12), *range(50, 58)]


def test_with_ratios_each_block_has_its_share_and_the_first_that_is_out_ends_the_epoch():
    loader = interleave({"a": listed(7, 0), "b": listed(9)}, ratios={"a": 3, "b": 1})
    assert len(loader) == 9
    for epoch in range(3):
        order = names(read(loader, epoch), 200)
        assert len(order) == 9 and order.count("a") == 7
        assert {order[i : i + 4].count("a") for i in (0, 4)} == {3}
    mixed = interleave({"a": listed(7, 0), "b": listed(9)}, ratios={"a": 1, "b": 3})
    assert len(mixed) == 3 + 9 and repr(mixed).endswith("ratios={'a': 1, 'b': 3})")


def test_with_ratios_no_length_has_to_be_known():
    loader = interleave({"a": plain(4, 0), "b": plain(100, 100)}, {"a": 1, "b": 2})
    order = names(read(loader), 100)
    assert order.count("a") == 4 and 8 <= order.count("b") <= 10
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


def test_the_loaders_of_one_length_are_shuffled_independently():
    both = read(zip_cycle(a=shuffled(100), b=shuffled(100)))
    pairs = [(samples(batch["a"]), samples(batch["b"])) for batch in both]
    assert sum(a == b for a, b in pairs) < 5


@pytest.mark.parametrize(("make", "message"), [
    (lambda: interleave({"a": listed(2), "b": plain(3)}), 'that of "b" is not known. Give ratios='),
    (lambda: interleave({"a": listed(2)}, {"b": 1}),
        "expects ratios for each loader, 'a'; got {'b': 1}"),
    (lambda: interleave({"a": listed(2)}, {"a": 0.5}),
        r"ratios\['a'\] as an int >= 1, .*for 0.7 and 0.3, write 7 and 3\); got 0.5"),
    (zip_cycle, r"zip_cycle expects loaders by name, zip_cycle\(a=..., b=...\); got none"),
    # one that ends too early, or cannot begin again, is named: its length is taken for 5
    (lambda: read(interleave({"a": take(plain(3), 5), "b": listed(2)})),
        '"a" has ended before its length, 5 batches'),
    (lambda: read(zip_cycle(a=listed(5), b=iter(listed(2)))),
        '"b" gave no batch when it began again: an iterator'),
    (lambda: read(zip_cycle(a=listed(5), b=[])), r'"b" gave no batch\. Pass a list'),
])  # fmt: skip
def test_what_cannot_be_combined_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_zip_cycle_begins_shorter_ones_again_in_another_order():
    found = read(zip_cycle(a=shuffled(14), b=shuffled(6, 50)))
    assert len(found) == 7 and sorted(samples([b["a"] for b in found])) == list(range(14))
    again = samples([batch["b"] for batch in found])
    assert [sorted(again[:6]), sorted(again[6:12])] == [[*range(50, 56)]] * 2
    assert again[:6] != again[6:12]
    assert len(zip_cycle(a=listed(2), b=listed(5))) == 5
    assert len(zip_shortest(a=listed(2), b=listed(5))) == 2


@pytest.mark.parametrize("loader", [
    zip_cycle(a=plain(2, 0), b=plain(6, 50)), zip_cycle(a=plain(6, 0), b=plain(2, 50)),
    zip_cycle(a=plain(6, 0), b=plain(3, 50), c=plain(6, 90)),
    zip_cycle(a=plain(6, 0), b=listed(3)),
])  # fmt: skip
def test_zip_cycle_without_lengths_ends_with_the_longest(loader):
    assert [len(read(loader, 1, start)) for start in range(7)] == [6, 5, 4, 3, 2, 1, 0]


def test_zip_shortest_ends_with_the_shortest():
    loader = zip_shortest(a=shuffled(14), b=stream(6, 50))
    assert [samples(batch["b"]) for batch in read(loader)] == [[50, 51], [52, 53], [54, 55]]


tensors = lambda n, size: DataLoader(TensorDataset(torch.ones(n)), size)


def test_a_mapping_weighs_what_its_batches_have_in_common():
    count = fl.metric(n=lambda aux, batch: fl.Sum(batch["a"][0].numel()))
    step = fl.pipeline(count)(lambda model, batch: toy_loss(model, batch["a"][0] - batch["b"][0]))
    state = fit(step=step, loaders=zip_cycle(a=tensors(12, 4), b=tensors(12, 4)))
    assert (state.step, state.history["train/n"]) == (3, (12.0,))
    step = fl.pipeline()(lambda model, batch: toy_loss(model, batch["a"][0]))
    with pytest.raises(ValueError, match=r"leading dimensions \[3, 4\]"):
        fit(step=step, loaders=zip_shortest(a=[[torch.ones(4)]], b=[[torch.ones(3)]]))


def test_the_size_of_a_round_is_known_if_all_have_one():
    def sizes(loader):
        source = Source.open(loader, 0, rank=0, processes=2)
        return [source.take(batch, 1)[1].batch_size for batch in source.batches(0, 0, 0)]

    assert sizes(take(tensors(8, 2), 4)) == [2, 2]
    assert sizes(zip_cycle(a=tensors(8, 2), b=tensors(8, 2))) == [2, 2]
    assert sizes(zip_cycle(a=tensors(8, 2), b=tensors(12, 3))) == [0, 0]
    assert sizes(take(tensors(7, 2), 4)) == [2, 0]


@pytest.mark.slow
def test_a_tensor_that_a_loader_reuses_is_refused_where_several_are_needed():
    def reusing():
        batch = torch.zeros(2)
        for i in range(6):
            yield batch.fill_(i)

    assert [x.tolist() for x in take(reusing, 3)] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    with pytest.raises(ValueError, match="reuses a tensor for its next batch, but several"):
        read(take(reusing, 4), processes=2)
    with pytest.raises(ValueError, match="reuses a tensor"):
        read(zip_shortest(a=reusing, b=shuffled(12, workers=1)))


def test_a_combined_loader_is_evaluated_and_predicted():
    loader = interleave({"a": shuffled(12), "b": shuffled(8, 50)})
    count = fl.metric(n=lambda aux, batch: fl.Sum(len(batch)))
    step = fl.pipeline(count)(lambda model, batch: toy_loss(model, batch[:, 0]))
    assert fl.evaluate(step, toy(), loader)["n"] == 20
    found = samples(list(fl.predict(lambda m, b: b.tolist(), toy(), loader)))
    assert sorted(found) == [*range(12), *range(50, 58)]
    state = fit(step=step, loaders={"train": loader, "both": take(loader, 2)}, epochs=2)
    assert state.history["both/n"] == (4.0, 4.0)


@pytest.mark.slow
def test_workers_end_with_the_run_and_persistent_ones_are_kept():
    children = lambda: {child.pid for child in torch.multiprocessing.active_children()}
    data = shuffled(40, workers=1, persistent_workers=True)
    step = fl.pipeline()(lambda model, batch: toy_loss(model, batch["a"][:, 0]))
    run = {"step": step, "loaders": zip_cycle(a=data, b=listed(3))}
    before = children()  # of other tests
    state = fit(**run, steps=3)
    workers = children() - before
    fit(**run, state=state, steps=25)
    assert len(workers) == 1 and children() - before == workers


def test_a_loader_that_splits_its_data_itself_is_refused_inside_too():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = take(zip_cycle(a=DataLoader(range(8), 2, sampler=sampler), b=listed(2)), 2)
    with pytest.raises(ValueError, match="has a DistributedSampler, which repeats samples"):
        Source.open(loader, 0, rank=0, processes=2)


@pytest.mark.parametrize("make", [list, tuple])
def test_several_of_them_are_not_a_list_of_batches(make):
    with pytest.raises(TypeError, match=r"the evaluation loader .* of (2 )?loaders"):
        fl.evaluate(STEP, toy(), make([take(listed(2), 1)] * 2))
