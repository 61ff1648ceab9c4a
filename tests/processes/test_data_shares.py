"""Each sample is trained, evaluated and predicted once, on any number of processes."""

import pytest
import torch
from process_problems import (
    COUNTS,
    SIZE,
    Stream,
    batches,
    by_tokens,
    count,
    items,
    kinds,
    loader,
    network,
    rank,
    samples,
    tally,
    torchmetrics,
    world,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
)

import fnloop as fl

pytestmark = pytest.mark.slow


def single(sample):
    return [part[None] for part in sample]


def share(parts):
    """Return nearly all of the parts on the first process, and the last two on the others."""
    return parts[:-2] if rank() == 0 else parts[-2:][rank() - 1 :: world() - 1]


LOADERS = {
    "shuffled": lambda size: loader(size=size, shuffle=True),
    "two workers": lambda size: loader(size=size, shuffle=True, num_workers=2),
    "list": batches,
    "generator": lambda size: lambda: iter(batches(size)),
    "stream": lambda size: loader(Stream(), size=size),
    "single": lambda size: DataLoader(samples(), batch_size=None, shuffle=True, collate_fn=single),
    "batch sampler": lambda size: DataLoader(
        samples(), batch_sampler=BatchSampler(SequentialSampler(samples()), size, False)
    ),
    "one share of many": lambda size: fl.sharded(batches(size)[rank() :: world()]),
    "uneven shares": lambda size: fl.sharded(share(batches(size))),
    "larger than the data": lambda size: loader(size=100, shuffle=True),
}  # fmt: skip


def consumption(folder):
    """Return how often each sample was used, with batches of 4 in each process."""
    found = {}
    for name, make in LOADERS.items():
        if world() == 1 and name == "uneven shares":
            continue
        for window in (1, 3):
            state = fl.fit(
                fl.pipeline(fl.accumulate(window), items())(count),
                tally(),
                make(4),
                epochs=1,
                hooks=(),
            )
            found[f"trained, {name}, {window}"] = {
                "shares": (-state.model.w).tolist(),
                "items": state.history["train/items"],
                "counters": [state.step, state.epoch, state.batch, state.samples],
            }
        state = tally()
        with torch.no_grad():
            state.model.w.copy_(2.0 ** torch.arange(SIZE))
        measured = fl.pipeline(
            fl.metric(sum=lambda aux, batch: fl.Sum(batch[-1].double().exp2().sum()))
        )
        evaluated = fl.evaluate(measured(count), state, make(4))
        found[f"evaluated, {name}"] = [evaluated["sum"], evaluated["loss"] * SIZE]
        both = [
            fl.predict(lambda model, batch: batch[-1].tolist(), state, make(4), gather=gather)
            for gather in (True, False)
        ]
        found[f"predicted, {name}"], found[f"share, {name}"] = map(list, both)
    return found


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_is_trained_once_and_weighs_the_same(launched, name, window, n):
    if name == "uneven shares" and n == 1:
        return
    found = [result[f"trained, {name}, {window}"] for result in launched(consumption, n)]
    for mine in found:
        assert mine == found[0]
        assert min(mine["shares"]) > 0  # each sample was in an update
        assert sum(mine["shares"]) == pytest.approx(
            mine["counters"][0], rel=1e-12
        )  # the shares of an update sum to 1
        assert mine["items"] == pytest.approx(
            [SIZE], rel=1e-12
        )  # with the line above: each was in one only
        assert mine["counters"][1:] == [1, 0, 0]
    if name not in ("single", "larger than the data", "uneven shares"):
        full, rest = divmod(SIZE, 4 * n * window)  # what one process makes with batches of 4 n
        expected = [1 / (4 * n * window)] * (SIZE - rest) + [1 / rest] * rest
        assert sorted(found[0]["shares"]) == pytest.approx(sorted(expected), rel=1e-12)
        assert found[0]["counters"][0] == full + 1


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_is_evaluated_and_predicted_once(launched, name, n):
    if name == "uneven shares" and n == 1:
        return
    found = launched(consumption, n)
    for mine in found:
        assert mine[f"evaluated, {name}"] == [2.0**SIZE - 1, 2.0**SIZE - 1]  # a bit for each sample
        predicted = [i for batch in mine[f"predicted, {name}"] for i in batch]
        assert sorted(predicted) == list(range(SIZE))
        assert mine[f"predicted, {name}"] == found[0][f"predicted, {name}"]
    dealt = [mine[f"share, {name}"] for mine in found]
    assert sorted(i for share in dealt for batch in share for i in batch) == list(range(SIZE))
    if "share" not in name:
        alone = launched(consumption, 1)[0]
        assert (
            found[0][f"predicted, {name}"] == alone[f"predicted, {name}"]
        )  # in one order, whatever the number
        assert dealt == [alone[f"predicted, {name}"][r::n] for r in range(n)]


def measures(folder):
    """Evaluate one float32 model, with the same batches however many processes there are."""
    torch.manual_seed(0)
    model = network()
    step = fl.pipeline(
        kinds(), fl.metric(last=lambda aux, batch: fl.Last(batch[3].max()), **torchmetrics())
    )(by_tokens_too)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)
    return {
        "evaluated": fl.evaluate(step, state, loader(size=4)),
        "again": fl.evaluate(step, state, batches(4)),
        "by hand": by_hand_over(model),
    }


def by_tokens_too(model, batch):
    loss, aux = by_tokens(model, batch)
    return loss, {**aux, "output": model(batch[0])}


def by_hand_over(model):
    """Return the loss and the metrics of all samples at once."""
    x, y, tokens, _ = samples()[:]
    with torch.no_grad():
        output = model(x)
        losses = nn.functional.cross_entropy(output, y, reduction="none").double()
    found = {
        "loss": (losses * tokens).sum() / tokens.sum(),
        "min": output.min(),
        "max": output.max(),
    }
    return {name: value.item() for name, value in found.items()}


@pytest.mark.parametrize("n", COUNTS)
def test_metrics_of_the_same_weights_are_equal(launched, n):
    from sklearn.metrics import f1_score

    alone, found = launched(measures, 1)[0], launched(measures, n)
    for mine in found:
        assert mine["evaluated"].keys() == alone["evaluated"].keys()
        for name in alone["evaluated"].keys() - {"last"}:
            assert mine["evaluated"][name] == pytest.approx(alone["evaluated"][name], rel=1e-12), (
                name
            )
            assert mine["again"][name] == mine["evaluated"][name]
    for name, value in alone["by hand"].items():
        assert alone["evaluated"][name] == pytest.approx(value, rel=1e-6), name
    assert alone["evaluated"]["samples"] == SIZE
    torch.manual_seed(0)
    x, y, _, _ = samples()[:]
    assert alone["evaluated"]["f1"] == pytest.approx(
        f1_score(y, network()(x).argmax(1), average="macro"), rel=1e-6
    )


@pytest.mark.parametrize("n", COUNTS)
def test_last_is_of_the_last_batch(launched, n):
    assert [mine["evaluated"]["last"] for mine in launched(measures, n)] == [SIZE - 1] * n
