"""Each sample is trained, evaluated and predicted once, on any number of processes."""

import pytest
import torch
from joined import COUNTS, rank, world
from process_data import SIZE, Stream, batches, count, loader, samples, tally
from process_metrics import items, kinds, torchmetrics
from process_problems import by_tokens, created, network
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset

import fnloop as fl

pytestmark = pytest.mark.slow
single = lambda sample: [part[None] for part in sample]


def share(parts):
    """Return nearly all of the parts on the first process, and the last two on the others."""
    return parts[:-2] if rank() == 0 else parts[-2:][rank() - 1 :: max(world() - 1, 1)]


HALVES = {"a": range(20), "b": range(20, SIZE)}
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
    "interleaved": lambda size: fl.data.interleave(
        {name: loader(Subset(samples(), part), size) for name, part in HALVES.items()}),
}  # fmt: skip
ONCE = [(name, n) for name in LOADERS for n in COUNTS if n > 1 or name != "uneven shares"]


def counted(member, train):
    """Train an epoch. Return how often each sample was used, and what was counted."""
    step = fl.pipeline(member, items())(count)
    state = fl.fit(step, tally(), train, epochs=1, hooks=())
    counters = [state.step, state.epoch, state.batch, state.samples]
    return [(-state.model.w).tolist(), state.history["train/items"], counters]


def consumption(folder):
    found = {}
    for name, make in LOADERS.items():
        if (name, world()) not in ONCE:
            continue
        found |= {f"{name}, {w}": counted(fl.accumulate(w), make(4)) for w in (1, 3)}
        state = tally()
        with torch.no_grad():
            state.model.w.copy_(2.0 ** torch.arange(SIZE))
        bits = fl.metric(sum=lambda aux, batch: fl.Sum(batch[-1].double().exp2().sum()))
        evaluated = fl.evaluate(fl.pipeline(bits)(count), state, make(4))
        look = lambda model, batch: batch[-1].tolist()
        both = [[*fl.predict(look, state, make(4), gather=gather)] for gather in (True, False)]
        found[name] = [evaluated["sum"], evaluated["loss"] * SIZE, *both]
    return found


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("name", "n"), ONCE)
def test_each_sample_is_trained_once_and_weighs_the_same(launched, name, window, n):
    mine, *others = (result[f"{name}, {window}"] for result in launched(consumption, n))
    assert all(other == mine for other in others)
    shares, used, (step, *rest) = mine
    assert min(shares) > 0  # each sample was in an update
    assert sum(shares) == pytest.approx(step, rel=1e-12)  # the shares of an update sum to 1
    assert used == pytest.approx([SIZE], rel=1e-12)  # so each was in one only
    assert rest == [1, 0, 0]
    if name not in ("single", "larger than the data", "uneven shares", "interleaved"):
        full, left = divmod(SIZE, 4 * n * window)  # what one process makes with batches of 4 n
        expected = [1 / (4 * n * window)] * (SIZE - left) + [1 / left] * left
        assert sorted(shares) == pytest.approx(sorted(expected), rel=1e-12)
        assert step == full + 1


@pytest.mark.parametrize(("name", "n"), ONCE)
def test_each_sample_is_evaluated_and_predicted_once(launched, name, n):
    found = [mine[name] for mine in launched(consumption, n)]
    for *sums, predicted, _ in found:
        assert sums == [2.0**SIZE - 1, 2.0**SIZE - 1]  # a bit for each sample
        assert sorted(i for batch in predicted for i in batch) == list(range(SIZE))
        assert predicted == found[0][2]
    dealt = [mine[3] for mine in found]
    assert sorted(i for share in dealt for batch in share for i in batch) == list(range(SIZE))
    if "share" not in name:  # in one order, whatever the number
        alone = launched(consumption, 1)[0][name][2]
        assert found[0][2] == alone
        assert dealt == [alone[r::n] for r in range(n)]


# --- a total of samples for each update

TOTALS = (
    *(("shuffled", 4), ("shuffled", 8), ("shuffled", 10), ("list", 8), ("stream", 8)),
    ("last dropped", 8),
)  # in batches of 2: on 3 processes one is idle, one has more, two have more


def totals(folder):
    made = {"last dropped": lambda size: loader(size=size, shuffle=True, drop_last=True), **LOADERS}
    return [counted(fl.accumulate(total=total), made[name](2)) for name, total in TOTALS]


@pytest.mark.parametrize("n", COUNTS)
def test_each_update_has_the_total_and_each_sample_is_in_one(launched, n):
    for mine in launched(totals, n):
        for (name, total), (shares, used, (step, *_)) in zip(TOTALS, mine, strict=True):
            size = SIZE - 1 if name == "last dropped" else SIZE
            full, left = divmod(size, total)
            expected = [0] * (SIZE - size) + [1 / total] * (size - left) + [1 / (left or 1)] * left
            assert sorted(shares) == pytest.approx(sorted(expected), rel=1e-12), name
            assert step == full + (left > 0) and used == pytest.approx([size], rel=1e-12)


# --- metrics


def measures(folder):
    last = fl.metric(last=lambda aux, batch: fl.Last(batch[3].max()), **torchmetrics())
    step, state = fl.pipeline(kinds(), last)(by_tokens_too), created()
    x, y, tokens, _ = samples()[:]
    with torch.no_grad():
        output = state.model(x)
        losses = nn.functional.cross_entropy(output, y, reduction="none").double() * tokens
    found = {"loss": losses.sum() / tokens.sum(), "min": output.min(), "max": output.max()}
    return {
        "evaluated": fl.evaluate(step, state, loader(size=4)),
        "again": fl.evaluate(step, state, batches(4)),
        "by hand": {name: value.item() for name, value in found.items()},
    }


def by_tokens_too(model, batch):
    loss, aux = by_tokens(model, batch)
    return loss, {**aux, "output": model(batch[0])}


@pytest.mark.parametrize("n", COUNTS)
def test_metrics_of_the_same_weights_are_equal(launched, n):
    from sklearn.metrics import f1_score

    (alone,) = launched(measures, 1)
    for mine in launched(measures, n):
        assert mine["evaluated"] == mine["again"]
        assert mine["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-12)
    found = alone["evaluated"]
    assert found["samples"] == SIZE and found["last"] == SIZE - 1
    for name, value in alone["by hand"].items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    torch.manual_seed(0)
    x, y, _, _ = samples()[:]
    right = f1_score(y, network()(x).argmax(1), average="macro")
    assert found["f1"] == pytest.approx(right, rel=1e-6)
