"""Record.items: the items of all updates that were applied, over epochs, cuts and processes."""

import attrs
import pytest
import torch
from toy_runs import ONE, fitted

import fnloop as fl
from fnloop._core.metrics import ITEMS
from fnloop.testing import toy, toy_loss


def counting(weigh):
    """Return a loss function that counts a batch by a weight of its own."""
    return lambda model, batch: (toy_loss(model, batch)[0], {"weight": weigh(batch)})


def items(state):
    return [record.items for record in state.history]


def test_items_are_counted_over_epochs():
    batches = [torch.ones(2), torch.ones(3)]
    assert items(fitted(batches, epochs=3)) == [5, 10, 15]
    assert items(fitted(batches, epochs=3, record_every=fl.every(steps=2))) == [5, 10, 15]
    assert items(fitted(batches, loss_fn=counting(lambda x: 10 * x.numel()), epochs=2)) == [50, 100]


def test_items_may_be_no_whole_number():
    loss_fn = counting(lambda x: torch.tensor(2.5))
    assert items(fitted([1, 2, 3], loss_fn=loss_fn, epochs=2)) == [7.5, 15]


def test_what_is_left_out_does_not_count():
    """Of 1, 2 and NaN, two are applied in each epoch; a whole window counts all of its items."""
    values = [1, 2, float("nan")]
    assert items(fitted(values, fl.skip_nonfinite(), epochs=2)) == [2, 4]
    assert items(fitted([1, 2, 3], fl.accumulate(2), epochs=2)) == [3, 6]


def test_epochs_without_a_record_count_too():
    state = fitted([1, 2], epochs=3, evaluate_every=None)
    assert items(fitted([1, 2], state=state, epochs=4))[-1] == 8


def test_each_turn_of_alternate_counts_for_itself():
    model = torch.nn.Linear(1, 1)
    optimizers = {"a": torch.optim.SGD([model.weight]), "b": torch.optim.SGD([model.bias])}
    state = fl.TrainState.create(model, optimizers, seed=0)
    step = fl.pipeline()(lambda model, batch: model(batch).mean())
    both = fl.alternate({"a": step, "b": step})
    state = fl.fit(both, state, [torch.ones(1, 1)] * 2, epochs=2, hooks=())
    assert items(state) == [4, 8]


@pytest.mark.parametrize("split", range(1, 7))
def test_a_run_that_is_cut_has_the_same_items(split, tmp_path):
    settings = {"epochs": 3, "record_every": fl.every(steps=1)}
    whole = fitted([1, 2], **settings)
    part = fitted([1, 2], steps=split, **settings)
    restored = fl.restore(fl.save(part, tmp_path / "a"), toy())
    rest = fitted([1, 2], state=restored, **settings)
    counted = [record.items for record in rest.history if not record.closing]
    assert counted == items(whole) == [1, 2, 3, 4, 5, 6]


def test_what_an_older_version_has_not_counted_is_unknown():
    state = fitted([1, 2], epochs=2)
    older = attrs.evolve(state, metrics={k: v for k, v in state.metrics.items() if k != ITEMS})
    assert items(fitted([1, 2], state=older, epochs=3)) == [2, 4, None]
    first = fitted([1, 2], epochs=1)  # but that the metrics of the first epoch are all there is
    assert items(fitted([1, 2], state=first, epochs=2)) == [2, 4]


UNKNOWN = fl.History([fl.Record(1, 1, {"train/loss": 1.0})])


def test_items_are_in_the_rows_of_a_history():
    assert [row["items"] for row in fitted([1, 2], epochs=2).history.to_dicts()] == [2, 4]
    assert "items" not in UNKNOWN.to_dicts()[0]


def test_items_are_an_axis():
    (line,) = fitted([1, 2], epochs=2).history.plot(x="items").axes[0].lines[:1]
    assert list(line.get_xdata()) == [2, 4]
    with pytest.raises(ValueError, match="no record says how many items"):
        UNKNOWN.plot(x="items")


@pytest.mark.parametrize("items", [-1, "2", float("nan")])
def test_items_are_a_number(items):
    with pytest.raises((ValueError, TypeError), match="Record expects items"):
        fl.Record(1, 1, {}, items=items)


def test_the_items_of_a_record_before_the_first_update_are_none_yet():
    at_start = fl.at_start() | fl.every(epochs=1)
    loaders = {"train": [ONE], "valid": [ONE]}
    assert items(fitted(loaders, epochs=1, evaluate_every=at_start)) == [0, 1]
