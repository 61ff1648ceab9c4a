"""Law 8: the number of processes changes the speed of a run and nothing else.

Each job runs on 1, 2 and 3 processes of this machine, each with 1/N of the batch size, and does a whole table of cases; tests
compare what they return. One process is compared with a loop written by hand.
"""

import contextlib
import fcntl
import io
import json
import math
import os
import random
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import attrs
import launch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import fnloop as fl
from fnloop._backend import collectives, rendezvous, watchdog
from fnloop._loop import consensus
from fnloop.testing import Toy, assert_same, toy

pytestmark = pytest.mark.slow
SIZE, BATCH = (
    41,
    6,
)  # samples, and those of an update of all processes together: it divides neither by 2 nor by 3, nor by 6
COUNTS = (1, 2, 3)


def rank():
    return int(os.environ.get("RANK", "0"))


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """Return what a job returns on n processes, by rank; it runs once, whichever worker of pytest asks first."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def run(job, n):
        path = shared / f"{job.__name__}-{n}"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.with_suffix(".json").exists():
                try:
                    found = launch.results(path, n, job, timeout=100)
                except (AssertionError, TimeoutError) as error:
                    found = str(error)
                path.with_suffix(".json").write_text(json.dumps(found))
        found = json.loads(path.with_suffix(".json").read_text())
        return pytest.fail(found) if isinstance(found, str) else found

    return run


# --- data, models and losses


class Dicts(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        x, y, _, _ = samples()[i]
        return {"x": x, "y": y}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


def samples():
    """Return SIZE of (x, y, a number of tokens, its index)."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SIZE, 6, generator=draw), torch.randint(0, 3, (SIZE,), generator=draw)
    return TensorDataset(x, y, torch.randint(1, 9, (SIZE,), generator=draw), torch.arange(SIZE))


def batches(size):
    return [samples()[i : i + size] for i in range(0, SIZE, size)]


def loader(data=None, size=None, **settings):
    return DataLoader(
        samples() if data is None else data, batch_size=size or BATCH // world(), **settings
    )


class Leaving(Dicts):
    """Gives a batch without two samples of all."""

    def __getitems__(self, indices):
        return [samples()[i] for i in indices if i not in (11, 30)]


class Refilling(Sampler):
    def __iter__(self):
        indices = []
        for start in range(0, SIZE, BATCH // world()):
            indices[:] = range(start, min(start + BATCH // world(), SIZE))
            yield indices


def some(parts):
    """Make a batch without two samples of all."""
    return default_collate([part for part in parts if part[3] not in (11, 30)])


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def entropy(model, batch):
    output = model(batch[0])
    return nn.functional.cross_entropy(output, batch[1]), {"output": output}


def entropy_of_dict(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def by_tokens(model, batch):
    x, y, tokens, _ = batch
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") * tokens
    return losses.sum() / tokens.sum(), {"weight": tokens.sum()}


def by_int(model, batch):
    loss, aux = by_tokens(model, batch)
    return loss, {"weight": int(aux["weight"])}


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, deep):
        hidden = self.first(x)
        return self.second(hidden) if deep else hidden


def first_only(model, batch):
    return model(batch[0], False).square().mean()


def in_turn(model, batch):
    """Leave the second layer out in every other batch of samples in order: all processes do, and the first one doesn't."""
    return model(batch[0], bool(batch[3][0] // BATCH % 2 == 0)).square().mean()


class Temperature(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.log.exp(), target)


def accuracy(aux, batch):
    return (aux["output"].argmax(1) == batch[1]).to(torch.float64).mean()


def torchmetrics():
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

    return {
        "f1": fl.from_torchmetrics(
            MulticlassF1Score(3), lambda aux, batch: (aux["output"], batch[1])
        ),
        "auroc": fl.from_torchmetrics(
            MulticlassAUROC(3), lambda aux, batch: (aux["output"], batch[1])
        ),
    }


def kinds():
    return fl.metric(
        accuracy=accuracy,
        sum=lambda aux, batch: fl.Sum(aux["output"].sum()),
        samples=lambda aux, batch: fl.Sum(len(batch[0])),
        min=lambda aux, batch: fl.Min(aux["output"].min()),
        max=lambda aux, batch: fl.Max(aux["output"].max()),
    )


@fl.middleware("gradient")
def measured(what):
    """Report metrics of the joined gradient, of every kind."""

    def wrap(step):
        def measuring(state, batch):
            state, out = step(state, batch)
            norm = torch.stack([p.grad.square().sum() for p in state.model.parameters()]).sum()
            made = {
                "g_sum": fl.Sum(norm),
                "g_min": fl.Min(norm),
                "g_max": fl.Max(norm),
                "g_last": fl.Last(norm),
            }
            return state, attrs.evolve(
                out, metrics={**out.metrics, **made, "g_mean": fl.Mean(norm, 1)}
            )

        return measuring

    return wrap


@fl.middleware("gradient")
def guard(update):
    """Leave an update out, by the word of the last process alone."""

    def wrap(step):
        def guarded(state, batch):
            tried, last = (
                state.step + state.skipped,
                state.backend.rank == state.backend.world_size - 1,
            )
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="the guard") if tried == update and last else out

        return guarded

    return wrap


@fl.middleware("forward")
def without(sample):
    """Leave a batch out that begins with this sample."""

    def wrap(step):
        def choosing(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="not this one") if batch[3][0] == sample else out

        return choosing

    return wrap


def freezing(state):
    if state.step in (3, 7):
        state.model[0].requires_grad_(state.step == 7)
    return state


# --- the same training on 1, 2 and 3


@attrs.frozen
class Case:
    """A training run.

    Args:
        pipeline: makes the pipeline.
        loss: the loss function, or a module that is a criterion.
        train: makes the loader to train on.
        optimizer: makes the optimizer.
        hooks: of the run.
        evaluated: whether a loader is evaluated after every update.
        close: the relative difference that is allowed.
        settings: of DistributedDataParallel.
    """

    pipeline: object = lambda: fl.pipeline()
    loss: object = entropy
    train: object = lambda: loader(shuffle=True)
    optimizer: object = lambda parameters: torch.optim.AdamW(parameters, lr=0.05)
    hooks: tuple = ()
    evaluated: bool = False
    close: float = 1e-12
    model: object = network
    settings: object = None
    dtype: torch.dtype = torch.float64


CASES = {
    "plain": Case(),
    "float32": Case(
        dtype=torch.float32, close=1e-6, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    ),
    "in order": Case(train=lambda: loader(), evaluated=True),
    "dropped end": Case(train=lambda: loader(shuffle=True, drop_last=True)),
    "accumulate": Case(lambda: fl.pipeline(fl.accumulate(2))),
    "accumulate 3": Case(lambda: fl.pipeline(fl.accumulate(3))),
    "accumulate, clip": Case(lambda: fl.pipeline(fl.accumulate(2), fl.clip(0.1))),
    "clip": Case(lambda: fl.pipeline(fl.clip(0.1))),
    "clip, accumulate": Case(lambda: fl.pipeline(fl.clip(0.1), fl.accumulate(2))),
    "tokens": Case(loss=by_tokens),
    "tokens, accumulate": Case(lambda: fl.pipeline(fl.accumulate(2), fl.clip(0.1)), by_tokens),
    "tokens, clip, accumulate": Case(
        lambda: fl.pipeline(fl.clip(0.1), fl.accumulate(2)), by_tokens
    ),
    "int tokens": Case(loss=by_int),
    "int tokens, accumulate": Case(lambda: fl.pipeline(fl.accumulate(2)), by_int),
    "dicts": Case(loss=entropy_of_dict, train=lambda: loader(Dicts(), shuffle=True)),
    "larger than the data": Case(train=lambda: loader(size=60 // world())),
    "two samples": Case(
        train=lambda: loader(
            samples()[:2] and TensorDataset(*samples()[:2]), size=1 if world() > 1 else 2
        )
    ),
    "workers": Case(train=lambda: loader(shuffle=True, num_workers=2)),
    "persistent workers": Case(
        train=lambda: loader(shuffle=True, num_workers=1, persistent_workers=True)
    ),
    "samples left out": Case(train=lambda: loader(collate_fn=some)),
    "samples left out by the dataset": Case(train=lambda: loader(Leaving())),
    "a sampler that yields one list again and again": Case(
        train=lambda: DataLoader(samples(), batch_sampler=Refilling())
    ),
    "list": Case(train=lambda: batches(BATCH // world())),
    "generator": Case(train=lambda: lambda: iter(batches(BATCH // world()))),
    "stream": Case(train=lambda: loader(Stream())),
    "batch sampler": Case(
        train=lambda: DataLoader(
            samples(),
            batch_sampler=BatchSampler(SequentialSampler(samples()), BATCH // world(), False),
        )
    ),
    "shares": Case(
        train=lambda: fl.sharded(lambda: iter(batches(BATCH // world())[rank() :: world()]))
    ),
    "schedule": Case(
        lambda: fl.pipeline(fl.accumulate(2), fl.schedule(fl.schedules.cosine(warmup=0.1)))
    ),
    "torch scheduler": Case(
        lambda: fl.pipeline(
            fl.torch_scheduler(
                lambda o, run: torch.optim.lr_scheduler.OneCycleLR(
                    o, 0.1, total_steps=run.total_steps
                )
            )
        )
    ),
    "unused": Case(loss=first_only, model=TwoLayers),
    "in turn": Case(
        loss=in_turn,
        model=TwoLayers,
        train=lambda: loader(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    ),
    "in turn, told": Case(
        loss=in_turn,
        model=TwoLayers,
        train=lambda: loader(),
        settings={"find_unused_parameters": True},
    ),
    "frozen for a while": Case(hooks=(freezing,)),
    "criterion": Case(loss=Temperature),
    "LBFGS": Case(optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), close=1e-11),
    "torchmetrics": Case(lambda: fl.pipeline(fl.metric(**torchmetrics())), evaluated=True),
    "metrics": Case(lambda: fl.pipeline(kinds(), fl.accumulate(2), measured(0)), evaluated=True),
    "guard": Case(lambda: fl.pipeline(guard(3))),
    "guard, accumulate": Case(lambda: fl.pipeline(guard(3), fl.accumulate(2), fl.clip(0.1))),
    "without one": Case(
        lambda: fl.pipeline(without(7), fl.accumulate(6 // world())), train=lambda: batches(1)
    ),
    "bf16": Case(lambda: fl.pipeline(fl.amp("bf16")), dtype=torch.float32, close=0.05),
}

SHARDED = (  # those that run on a model under fully_shard too
    *(
        "plain",
        "float32",
        "accumulate",
        "accumulate, clip",
        "clip",
        "clip, accumulate",
        "tokens, clip, accumulate",
        "bf16",
    ),
    *(
        "larger than the data",
        "two samples",
        "schedule",
        "unused",
        "in turn",
        "frozen for a while",
        "criterion",
        "torchmetrics",
    ),
    *("guard, accumulate", "without one"),
)


def table(folder):
    """Run all cases, and return what each has come to."""
    if world() > 1:
        dist.init_process_group("gloo")
    found = {name: attempt(case) for name, case in CASES.items()}
    if world() > 1:
        found.update({f"{name}, sharded": attempt(CASES[name], True) for name in SHARDED})
    return found


def attempt(case, sharded=False):
    try:
        return train(case, sharded)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def train(case, sharded=False):
    with default_dtype(case.dtype):
        torch.manual_seed(0)
        model = case.model()
        if sharded:
            fully_shard(model)
        criterion = case.loss() if isinstance(case.loss, type) else None
        loss = (
            case.loss if criterion is None else (lambda m, batch: criterion(m(batch[0]), batch[1]))
        )
        parameters = [*model.parameters(), *(criterion.parameters() if criterion else ())]
        handler = case.settings and DistributedDataParallelKwargs(**case.settings)
        backend = handler and Accelerator(cpu=True, kwargs_handlers=[handler])
        state = fl.TrainState.create(model, case.optimizer(parameters), seed=3, backend=backend)
        loaders = {"train": case.train(), **({"valid": loader(size=5)} if case.evaluated else {})}
        state = fl.fit(
            case.pipeline()(loss),
            state,
            loaders,
            epochs=2,
            hooks=case.hooks,
            evaluate_every=fl.every(steps=1),
        )
        weights = torch.cat([whole(p).detach().flatten() for p in parameters]).tolist()
    return {
        "history": [[r.epoch, r.step, r.metrics] for r in state.history],
        "seconds": [r.seconds for r in state.history],
        "weights": weights,
        "counters": [
            state.step,
            state.epoch,
            state.batch,
            state.samples,
            state.skipped,
            state.stop,
        ],
    }


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def difference(a, b):
    """Return the largest difference of two lists of numbers, relative to the largest of them."""
    a, b = np.array(a), np.array(b)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(a).max())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", [*CASES, *(f"{name}, sharded" for name in SHARDED)])
def test_n_processes_train_as_one(launched, name, n):
    case = CASES[name.removesuffix(", sharded")]
    alone, together = (
        launched(table, 1)[0][name.removesuffix(", sharded")],
        [found[name] for found in launched(table, n)],
    )
    for mine in together:
        assert "error" not in mine and "error" not in alone, (alone.get("error"), mine.get("error"))
        assert mine == together[0]  # seconds and all, to the bit
    mine = together[0]
    assert mine["counters"] == alone["counters"]
    assert difference(alone["weights"], mine["weights"]) < case.close
    assert [row[:2] for row in mine["history"]] == [row[:2] for row in alone["history"]]
    for (_, _, expected), (_, _, found) in zip(alone["history"], mine["history"], strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=10 * case.close), key


# --- one process against a loop by hand


def test_one_process_trains_as_a_loop_by_hand(launched):
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(2):
            for batch in batches(BATCH):
                loss, _ = entropy(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            losses = [len(batch[0]) * entropy(model, batch)[0].item() for batch in batches(5)]
    for name in ("in order", "list", "generator", "stream", "batch sampler", "shares"):
        alone = launched(table, 1)[0][name]
        assert (
            difference(
                torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
                alone["weights"],
            )
            < 1e-12
        )
    valid = launched(table, 1)[0]["in order"]["history"][-1][2]["valid/loss"]
    assert valid == pytest.approx(sum(losses) / SIZE, rel=1e-12)


# --- what is trained, evaluated and predicted


class Tally(nn.Module):
    """A weight for each sample: with SGD at lr 1 it loses 1 / the items of the update that the sample is in."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, indices):
        return self.w[indices]


def count(model, batch):
    return model(batch[-1]).mean()


def tally():
    model = Tally()
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=5)


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
    "batch sampler": lambda size: DataLoader(samples(), batch_sampler=BatchSampler(SequentialSampler(samples()), size, False)),
    "one share of many": lambda size: fl.sharded(batches(size)[rank() :: world()]),
    "uneven shares": lambda size: fl.sharded(share(batches(size))),
    "larger than the data": lambda size: loader(size=100, shuffle=True),
}  # fmt: skip


def consumption(folder):
    """Return how often each sample was trained, evaluated and predicted, with batches of 4 in each process."""
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


@fl.middleware("gradient")
def items():
    """Report how many samples an update has: 1 / the largest element of the gradient, where each is in it once."""

    def wrap(step):
        def reporting(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(
                out, metrics={**out.metrics, "items": fl.Sum(1 / state.model.w.grad.max())}
            )

        return reporting

    return wrap


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


# --- what is decided, by whom


class Long:
    """Batches of one sample with a little time between them; something happens in one process only, at a batch of it."""

    def __init__(self, batches=400, pause=0.001):
        self.batches, self.pause = batches, pause

    def __len__(self):
        return self.batches * world()

    def __iter__(self):
        for n in range(len(self)):
            if n % world() == 0:
                time.sleep(self.pause)
            yield samples()[n % SIZE : n % SIZE + 1]


@attrs.frozen
class at_batch:
    """Send this process a signal at an update, if it is the last one of all."""

    update: int
    number: int

    def __call__(self, state):
        if state.step == self.update and rank() == world() - 1:
            os.kill(os.getpid(), self.number)
        return state


def decisions(folder):
    return {name: decide(folder / name) for name, decide in DECISIONS.items()}


def stop_early(folder):
    """Stop by the validation loss, which is the same everywhere."""
    return outcome(
        fitted(
            loader(),
            valid=loader(),
            epochs=50,
            hooks=(fl.early_stop("valid/loss", patience=2, min_delta=9.0),),
        )
    )


def terminate(folder):
    hooks = (fl.checkpoint(folder, keep=100), at_batch(20, signal.SIGTERM))
    state = fitted(Long(), hooks=(fl.every(steps=1000)(hooks[0]), hooks[1]))
    kept = sorted(path.name for path in folder.iterdir())
    on = fl.fit(fl.pipeline()(entropy), state, Long(), steps=state.step + 3, hooks=())
    return {**outcome(state), "kept": kept, "went on": on.step - state.step}


def terminate_group(folder, data):
    """SIGTERM reaches the workers of the loader too."""

    def kill(state):
        if state.step == 5 and rank() == world() - 1:
            os.killpg(0, signal.SIGTERM)
        return state

    return outcome(
        fitted(
            loader(data(), size=1, num_workers=2), epochs=100, hooks=(kill, fl.checkpoint(folder))
        )
    )


def save_then_stop(folder):
    """SIGTERM comes while the answer to SIGUSR1 is under way."""
    hooks = (
        fl.every(steps=1000)(fl.checkpoint(folder)),
        at_batch(20, signal.SIGUSR1),
        at_batch(21, signal.SIGTERM),
    )
    return outcome(fitted(Long(), hooks=hooks))


def save_and_go_on(folder):
    state = fitted(
        Long(),
        hooks=(fl.every(steps=1000)(fl.checkpoint(folder, keep=100)), at_batch(20, signal.SIGUSR1)),
    )
    return {**outcome(state), "kept": sorted(path.name for path in folder.iterdir())}


def clock(folder):
    due = []

    def note(state):
        due.append(state.step)
        return state

    slow = 0.002 if rank() else 0.001
    state = fitted(
        Long(pause=slow), hooks=(fl.every(seconds=0.2)(note),), evaluate_every=fl.every(seconds=0.3)
    )
    return {**outcome(state), "due": due, "records": [r.step for r in state.history]}


def main_alone(folder):
    called, file = [], io.StringIO()

    def note(state):
        called.append(state.step)
        return state

    fitted(loader(), hooks=(fl.every(steps=2)(fl.on_main(note)), fl.progress(file=file)))
    with (
        pytest.raises(ValueError, match="must return the state that it is given")
        if rank() == 0
        else contextlib.nullcontext()
    ):
        fl.on_main(lambda state: attrs.evolve(state, stop="now"))(fitted(loader()))
    return {"called": called, "lines": file.getvalue().count("train/loss")}


def nonfinite(folder):
    """NaN in the share of one process stops all."""

    def loss(model, batch):
        return entropy(model, batch)[0] * (math.nan if 40 in batch[3] else 1.0)

    return outcome(fitted(loader(), hooks=(fl.halt_on_nonfinite(steps=1),), loss=loss))


def close_at_target(folder):
    return closed(steps=3)


def close_by_a_stop(folder):
    return closed(
        hooks=(
            fl.when(lambda state: state.step == 3)(
                lambda state: attrs.evolve(state, stop="enough")
            ),
        )
    )


def closed(**settings):
    """End within an epoch: with a record of what was trained on, and of what is evaluated. Then continue as if it had not."""
    state, whole = fitted(loader(), valid=loader(), **settings), fitted(loader(), valid=loader())
    kept = [
        [r.step, r.closing, r.metrics["train/loss"], r.metrics["valid/loss"]] for r in state.history
    ]
    evaluated = fl.evaluate(fl.pipeline()(entropy), state, loader())["loss"]
    state = fl.fit(
        fl.pipeline()(entropy),
        attrs.evolve(state, stop=None),
        (loader(), loader()),
        epochs=1,
        hooks=(),
    )
    assert_same(state, whole)
    return {**outcome(state), "kept": kept, "evaluated": evaluated}


DECISIONS = {
    "closing, at the target": close_at_target,
    "closing, by a stop": close_by_a_stop,
    "early stop": stop_early,
    "SIGTERM": terminate,
    "SIGTERM to all": lambda folder: terminate_group(folder, samples),
    "SIGTERM to all, of a stream": lambda folder: terminate_group(folder, Stream),
    "SIGUSR1": save_and_go_on,
    "SIGUSR1, then SIGTERM": save_then_stop,
    "seconds": clock,
    "main": main_alone,
    "nonfinite": nonfinite,
}


def fitted(train, valid=None, loss=entropy, epochs=1, **settings):
    torch.manual_seed(0)
    model = network()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    loaders = {"train": train} if valid is None else {"train": train, "valid": valid}
    return fl.fit(fl.pipeline()(loss), state, loaders, epochs=epochs, **{"hooks": (), **settings})


def outcome(state):
    return {
        "counters": [state.step, state.epoch, state.batch],
        "stop": state.stop,
        "seconds": [r.seconds for r in state.history],
    }


@pytest.fixture(params=[2, 3])
def decided(request, launched):
    found = launched(decisions, request.param)
    for name in DECISIONS.keys() - {"main"}:
        assert all(mine[name] == found[0][name] for mine in found), name
    return found


def test_early_stop_is_the_same_everywhere(decided):
    assert decided[0]["early stop"]["stop"].startswith("early_stop: valid/loss has not improved")


def test_a_run_that_ends_between_two_records_makes_one_at_its_end(decided):
    one, two = (decided[0][f"closing, {why}"] for why in ("at the target", "by a stop"))
    ((step, closing, _, valid),) = one["kept"]
    assert (step, closing, valid) == (3, True, one["evaluated"])
    assert two["kept"] == one["kept"]


def test_a_signal_to_one_process_stops_all_behind_one_update_and_is_saved_once(decided):
    found = decided[-1]["SIGTERM"]
    step = found["counters"][0]
    assert found["stop"] == "SIGTERM" and 20 <= step < 400
    assert found["kept"] == [f"step-{step:08d}"] and found["went on"] == 3


def test_a_signal_that_reaches_the_workers_too_stops_the_run_and_not_them(decided):
    for name in ("SIGTERM to all", "SIGTERM to all, of a stream"):
        assert decided[-1][name]["stop"] == "SIGTERM" and decided[-1][name]["counters"][0] >= 5


def test_a_signal_to_one_process_saves_once_and_goes_on(decided):
    found = decided[-1]["SIGUSR1"]
    assert found["stop"] is None and found["counters"] == [400, 1, 0]
    first, last = found["kept"]
    assert last == "step-00000400" and 20 <= int(first[5:]) < 400


def test_a_signal_behind_another_is_not_lost(decided):
    found = decided[0]["SIGUSR1, then SIGTERM"]
    assert found["stop"] == "SIGTERM" and 21 <= found["counters"][0] < 400


def test_seconds_are_due_at_one_update_everywhere(decided):
    found = decided[0]["seconds"]
    assert len(found["due"]) >= 2 and len(found["records"]) >= 2


def test_the_main_process_alone_prints(decided):
    main, *others = [mine["main"] for mine in decided]
    assert (
        main == {"called": [2, 4, 6, 8, 10, 12, 14][: len(main["called"])], "lines": 1}
        and len(main["called"]) >= 3
    )
    assert others == [{"called": [], "lines": 0}] * len(others)


def test_nan_in_one_process_stops_all(decided):
    assert decided[0]["nonfinite"]["stop"].startswith(
        "halt_on_nonfinite: the training loss became nan"
    )


# --- what fails


def failing(folder, way):
    """Train; in the second update something goes wrong in one process, and the moment is noted."""

    def now(message):
        (folder / "failed").write_text(str(time.time()))
        if message == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError(message)

    def loss(model, batch):
        if way in ("loss", "kill") and rank() == 1 and batch[3][0] > 10:
            now("broken on 1" if way == "loss" else "kill")
        return entropy(model, batch)

    def hook(state):
        if way == "hook" and state.step == 2:
            now("broken on 0")
        return state

    def stream():
        for n, batch in enumerate(batches(1)):
            if way == "loader" and rank() == 0 and n == 10:
                now("broken on 0")
            yield batch

    if way == "share":
        (folder / "failed").write_text(str(time.time()))
        fitted(fl.sharded(batches(1) if rank() else []))
    fitted(stream, loss=loss, hooks=(fl.on_main(hook), fl.checkpoint(folder / "saved")))


WAYS = {
    "loss": "ArithmeticError: broken on 1",
    "loader": "ArithmeticError: broken on 0",
    "hook": "ArithmeticError: broken on 0",
    "share": "ValueError: this process's share of the data has no batch",
    "kill": "",
}
LAUNCHERS = {"by hand": (), "torchrun": launch.TORCHRUN, "accelerate": launch.ACCELERATE}


@pytest.mark.parametrize(
    ("way", "launcher"),
    [
        *((way, "by hand") for way in WAYS),
        *((way, by) for way in ("loss", "kill") for by in ("torchrun", "accelerate")),
    ],
)
def test_when_one_fails_all_end_at_once(tmp_path, way, launcher):
    found = launch.launch(tmp_path, 2, failing, way, by=LAUNCHERS[launcher], timeout=90)
    errors = "\n".join(found.errors)
    assert all(found.codes), errors
    assert max(found.ended) - float((tmp_path / "failed").read_text()) < 10
    assert found.results == [None, None]
    if way != "kill":
        assert WAYS[way] in errors and "while in" in errors
    if launcher == "by hand" and way in ("loss", "kill"):
        assert all(found.codes) and (way == "loss" or found.codes[1] == -signal.SIGKILL), found


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_start_it(tmp_path, launcher):
    found = launch.results(tmp_path, 2, facts_of_backend, by=LAUNCHERS[launcher])
    assert found == [["cpu", 0, 2, True, None], ["cpu", 1, 2, False, None]]


def facts_of_backend(folder):
    backend = fitted(batches(3)).backend
    return [backend.device.type, backend.rank, backend.world_size, backend.main, backend.precision]


def apart(folder, way, hold=2):
    """Decide by something that one process alone knows."""
    watchdog.DEADLOCK_SECONDS, watchdog.NOTICE_SECONDS, watchdog.KILL_SECONDS = (
        hold,
        min(hold, watchdog.NOTICE_SECONDS),
        min(hold, watchdog.KILL_SECONDS),
    )

    def hook(state):
        if state.step == 5 and rank() == 1:
            (folder / "apart").write_text(str(time.time()))
            return (
                attrs.evolve(state, skipped=1)
                if way == "skip"
                else attrs.evolve(state, stop="mine")
            )
        return state

    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        if way == "buffers"
        else network()
    )
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    window = fl.accumulate(2) if way == "weights" else fl.clip(1.0)
    try:
        fl.fit(
            fl.pipeline(window)(by_tokens if way == "weights" else entropy),
            state,
            loader(size=2),
            epochs=9,
            hooks=(hook,),
        )
    finally:
        if way == "caught" and rank() == 1:
            time.sleep(60)


def waited(folder, found):
    """Return the seconds from the moment that the processes came apart until the last one ended."""
    return max(found.ended) - float((folder / "apart").read_text())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("way", ["skip", "stop", "buffers", "weights"])
def test_processes_that_come_apart_fail(tmp_path, way, n):
    found = launch.launch(tmp_path, n, apart, way, timeout=60)
    assert all(found.codes), found  # 1, or what gloo's threads make of it when Python has gone
    assert waited(tmp_path, found) < 20
    if way != "weights":  # sums of other sizes, of which gloo may end a process
        assert "RuntimeError: the processes have diverged" in found.errors[1]
        assert all("the processes have diverged: " in error for error in found.errors), (
            found.errors
        )
    if way == "stop":
        said = "process 1 waits in the end of its run (mine) after step 5, and process 0 is in an update after step 5"
        assert all(said in error for error in found.errors), found.errors


def test_a_process_that_waits_for_a_failed_one_ends_by_itself(tmp_path):
    """What torch itself would do after half an hour, where the failed one lives on."""
    with pytest.raises(TimeoutError) as error:
        launch.launch(tmp_path, 2, apart, "caught", timeout=30)
    assert "Process 0 still waits, and is ended" in str(error.value)


def slow(folder):
    """Be slow in one process, in all places, for longer than processes that wait in different places are given."""
    watchdog.DEADLOCK_SECONDS, watchdog.NOTICE_SECONDS, watchdog.KILL_SECONDS = 1, 0, 0

    def pause(state):
        time.sleep(5 * (state.step == 2))
        return state

    def stream():
        for n, batch in enumerate(batches(6)):
            time.sleep(5 * (rank() == 1 and n in (3, 6)))  # the seventh is the last one
            yield batch

    state = created()
    if rank() == 0:
        dist.send(torch.ones(1), 1)  # which gloo counts too
        dist.send(torch.ones(1), 1)
    elif rank() == 1:
        dist.recv(torch.ones(1), 0)
        dist.recv(torch.ones(1), 0)
    hooks = (fl.on_main(pause), fl.checkpoint(folder / "saved"))
    state = fl.fit(
        fl.pipeline()(entropy), state, {"train": stream, "valid": batches(3)}, epochs=1, hooks=hooks
    )
    if rank() == 0:
        time.sleep(5)
    return fl.reduce({"steps": state.step}, "sum")


def test_a_slow_process_is_waited_for(tmp_path):
    assert launch.results(tmp_path, 3, slow, timeout=180) == [{"steps": 9}] * 3


def place(waits, control, counts, inside=False):
    """Return the place of a process that has begun so many exchanges, one of them in what it waits in."""
    behind = control - (waits is not None)
    return {
        "waits": waits,
        "behind": behind,
        "step": 5,
        "control": control,
        "counts": counts,
        "inside": inside,
    }


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (
            place("the end", 4, {"0": 7}),
            place(None, 3, {"0": 8}, inside=True),
            False,
        ),  # in another exchange of gradients
        (place("the end", 4, {"0": 7}), place(None, 4, {"0": 8}, inside=True), False),
        (
            place("the end", 4, {"0": 7}),
            place(None, 3, {"0": 8}),
            True,
        ),  # further by what it has sent to one, and in a loader
        (
            place("the end", 4, {"0": 7}),
            place(None, 3, {"0": 7}, inside=True),
            True,
        ),  # in the backward of the same update
        (
            place("the end", 4, {"0": 7}),
            place(None, 5, {"0": 8}, inside=True),
            True,
        ),  # it has ended the exchange
        (
            place("the end", 4, {"0": 7, "2": 1}),
            place(None, 3, {"0": 7, "3": 5}, inside=True),
            True,
        ),  # groups of others
        (place("the end", 4, {"0": 7}), place("buffers", 4, {"0": 7}), False),
        (place("the end", 4, {"0": 7}), place("the end", 4, {"0": 7}), True),
        (
            place("the end", 4, {"0": 7}),
            place("the end", 4, {"0": 9}),
            True,
        ),  # what was sent to one before
        (
            place("the end", 4, {"0": 7}),
            place("buffers", 3, {"0": 7}),
            True,
        ),  # behind, not elsewhere
        (
            place(None, 4, {"0": 7}, inside=True),
            place(None, 4, {"0": 9}, inside=True),
            True,
        ),  # none of fnloop's
    ],
)
def test_what_never_meets(first, second, meet):
    assert watchdog.never_meet({0: first, 1: second}, 2) == (None if meet else (0, 1))
    third = place(None, 3, {"0": 7})  # works, or has not been heard of
    slow = None if meet or second["waits"] else (0, 1)
    assert (
        watchdog.never_meet({0: first, 1: second, 2: third}, 3)
        == watchdog.never_meet({0: first, 1: second}, 3)
        == slow
    )


def test_the_weights_that_are_compared_are_those_that_have_a_norm():
    model = nn.Module()
    for name, values in {"a": [3.0, 4.0], "b": [math.nan], "empty": []}.items():
        setattr(model, name, nn.Parameter(torch.tensor(values)))
    for name, dtype in {"c": torch.int64, "d": torch.float8_e4m3fn}.items():
        setattr(model, name, nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
    state = fl.TrainState.create(model, torch.optim.SGD([model.a], lr=0.1), seed=0)
    assert consensus._norms(state) == {"a": 5.0, "b": 0.0, "empty": 0.0}


# --- checkpoints


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def noisy(model, batch):
    loss, aux = entropy(model, batch)
    return loss * (1 + 0.1 * np.random.rand() + 0.1 * random.random()), aux


HALF = 10  # updates until it is saved, of 4 in an epoch
KINDS = ("plain", "sharded", "noisy")


def ongoing(kind, folder=None, until=None):
    """Train a state, or go on with what is in a folder."""
    torch.manual_seed(0)
    model = Noisy() if kind == "noisy" else network()
    if kind == "sharded" and world() > 1:
        fully_shard(model)
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=0)
    state = state if folder is None else fl.resume(folder, state)
    pipe = fl.pipeline(fl.accumulate(2), fl.clip(0.5), fl.schedule(fl.schedules.cosine(warmup=0.1)))
    step, train = pipe(noisy if kind == "noisy" else entropy), loader(shuffle=True)
    enough = fl.when(lambda state: state.step == until)(
        lambda state: attrs.evolve(state, stop="enough")
    )
    return attrs.evolve(fl.fit(step, state, train, epochs=6, hooks=(enough,)), stop=None)


def counted(batch_size, folder=None, steps=None):
    state = tally() if folder is None else fl.resume(folder, tally())
    step = fl.pipeline(fl.metric(samples=lambda aux, batch: fl.Sum(len(batch[-1]))), items())(count)
    return fl.fit(
        step, state, loader(size=batch_size, shuffle=True), epochs=1, steps=steps, hooks=()
    )


def saves(folder):
    """Save runs in the middle of an epoch; return what they come to if they are not interrupted."""
    if world() > 1:
        dist.init_process_group("gloo")
    with default_dtype(torch.float64):
        for kind in KINDS:
            fl.save(ongoing(kind, until=HALF), folder / kind / "half")
        fl.save(counted(4, steps=2), folder / "tally" / "half")
        return {kind: come_to(ongoing(kind)) for kind in KINDS}


def resumes(folder):
    """Go on with what was saved on any number of processes."""
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        for n in COUNTS:
            saved = folder.parent / f"saves-{n}"
            for before, after in (
                ("plain", "plain"),
                ("plain", "sharded"),
                ("sharded", "plain"),
                ("sharded", "sharded"),
            ):
                found[f"{before} on {n}, then {after}"] = come_to(ongoing(after, saved / before))
            if n == world():
                found["noisy"] = come_to(ongoing("noisy", saved / "noisy"))
            state = counted(3, saved / "tally")
            row = state.history[-1].metrics
            found[f"tally of {n}"] = [
                *(-state.model.w).tolist(),
                state.step,
                row["train/items"],
                row["train/samples"],
            ]
        mine = folder.parent / "saves-1" / "plain" if rank() else folder / "nothing"
        found["main sees none"] = fl.resume(mine, fitted(batches(1), steps=1)).step
    return found


def come_to(state):
    weights = torch.cat([whole(p).detach().flatten() for p in state.model.parameters()]).tolist()
    losses = [record.metrics["train/loss"] for record in state.history if not record.closing]
    return {
        "weights": weights,
        "counters": [state.step, state.epoch, state.batch],
        "history": losses,
    }


@pytest.fixture(params=COUNTS)
def resumed(request, launched):
    for n in COUNTS:
        launched(saves, n)
    return request.param, launched(resumes, request.param)


def test_a_run_saved_on_any_number_goes_on_on_any_other(launched, resumed):
    _, found = resumed
    expected = launched(saves, 1)[0]["plain"]
    for mine in found:
        assert mine == found[0]
        for name in [name for name in mine if "then" in name]:
            assert mine[name]["counters"] == expected["counters"] == [24, 6, 0], name
            assert difference(expected["weights"], mine[name]["weights"]) < 1e-11, name
            assert difference(expected["history"], mine[name]["history"]) < 1e-11, name


def test_a_run_goes_on_on_as_many_to_the_bit(launched, resumed):
    n, found = resumed
    assert found[0]["noisy"] == launched(saves, n)[0]["noisy"]


def test_what_is_left_of_an_epoch_is_trained_once(resumed):
    n, found = resumed
    for saved_on in COUNTS:
        *shares, step, items, samples = found[0][f"tally of {saved_on}"]
        left = SIZE - 2 * 4 * saved_on
        assert (
            step == 2 + math.ceil(left / (3 * n))
            and min(shares) > 0
            and sum(shares) == pytest.approx(step, rel=1e-12)
        )
        assert [items, samples] == pytest.approx([SIZE, SIZE], rel=1e-12)


def test_the_main_process_says_what_there_is_to_resume(resumed):
    n, found = resumed
    assert [mine["main sees none"] for mine in found] == [1] * n


# --- runs that are killed


def enduring(folder, pause=0.05):
    """Train on, and save every second update; note where it is."""

    def note(state):
        (folder / f"at-{state.step}").touch()
        time.sleep(pause)
        return state

    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = network()
        state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=0)
        state = fl.resume(folder / "saved", state)
        hooks = (fl.every(steps=2)(fl.checkpoint(folder / "saved")), fl.on_main(note))
        began = state.step
        state = fl.fit(
            fl.pipeline(fl.clip(0.5))(entropy), state, loader(shuffle=True), epochs=4, hooks=hooks
        )
    return {"began": began, **come_to(state)}


def test_a_run_is_killed_and_goes_on_on_2_and_3_and_1(tmp_path):
    for n, until in ((1, 6), (2, 14), (3, 20)):
        launched = launch.launch(
            tmp_path / "run", n, enduring, kill_when=tmp_path / "run" / f"at-{until}"
        )
        assert launched.codes == [-signal.SIGKILL] * n, launched.errors
    (found,) = launch.results(tmp_path / "run", 1, enduring)
    (tmp_path / "whole").mkdir()
    expected = enduring(tmp_path / "whole", pause=0)
    assert found["began"] >= 18 and found["counters"] == expected["counters"] == [28, 4, 0]
    assert difference(expected["weights"], found["weights"]) < 1e-12
    assert difference(expected["history"], found["history"]) < 1e-12


def restarting(folder, kills, joined_before=False):
    """Train or go on; at each (step, rank) that was not reached before, that process is killed."""
    if joined_before:
        dist.init_process_group("gloo")

    def bomb(state):
        mark = folder / f"killed at {state.step} by {rank()}"
        if [state.step, rank()] in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return state

    torch.manual_seed(0)
    train, step = loader(shuffle=True), fl.pipeline(fl.clip(0.5))(entropy)
    state = fl.resume(folder / "saved", created())
    hooks = (fl.every(steps=2)(fl.checkpoint(folder / "saved", keep=2)), bomb)
    state = fl.fit(step, state, train, epochs=4, hooks=hooks)
    return {**come_to(state), "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT")}


def restarted(folder, kills, *arguments, environment=None, launcher=launch.TORCHRUN):
    """Kill a job of two processes so often, and return what it comes to, started again by torchrun."""
    by = (*launcher, "--max-restarts", str(len(kills)))
    found = launch.launch(
        folder,
        2,
        restarting,
        kills,
        *arguments,
        by=by,
        timeout=120 + 30 * len(kills),
        environment=environment,
    )
    assert found.codes == [0], "\n".join(found.errors)
    assert [one.pop("attempt") for one in found.results] == [str(len(kills))] * 2
    return found.results


def test_a_job_that_torchrun_restarts_ends_with_the_bits_of_one_that_was_left_alone(tmp_path):
    expected = launch.results(tmp_path / "alone", 2, restarting, [])
    assert expected[0].pop("attempt") is expected[1].pop("attempt") is None
    assert expected[0]["counters"] == [28, 4, 0]
    assert restarted(tmp_path / "killed", [[9, 1], [18, 0]]) == expected


def agreeing(folder, stale):
    """Agree on an attempt three times in one store, in which dead processes have left what they wrote."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank() == 0)
    if stale and rank() == 0:
        keys = dist.PrefixStore("fnloop", store)
        for n in range(world()):  # an attempt that died when all but one had confirmed
            keys.set(f"word of {n}", f"dead {n}")
            keys.set(f"answer to dead {n}", "dead 0")
            keys.set(f"dead 0 confirmed by {n}", "")
        keys.set("dead 0 is complete", "")
    words = [rendezvous.agree_on_attempt(store, rank(), world()) for _ in range(3)]
    store.add("done", 1)
    while rank() == 0 and store.add("done", 0) < world():
        time.sleep(0.01)
    return words


@pytest.mark.parametrize("stale", [False, True])
def test_an_attempt_is_agreed_on_by_the_living(tmp_path, stale):
    first, *others = launch.results(tmp_path, 3, agreeing, stale)
    assert others == [first, first]
    assert len({*first, "dead 0"}) == 4


def test_who_waits_for_a_process_that_does_not_come_says_so():
    store, moment = dist.HashStore(), timedelta(seconds=0.1)
    with pytest.raises(
        TimeoutError, match=r"the processes \[1, 2\] did not come to join process 0"
    ):
        rendezvous.agree_on_attempt(store, 0, 3, moment)
    with pytest.raises(TimeoutError, match="process 1 has waited for all others to join: find out"):
        rendezvous.agree_on_attempt(store, 1, 3, moment)


def test_a_sharded_loader_goes_on_in_the_middle_of_an_epoch_on_as_many_processes_only(tmp_path):
    def state():
        return created()

    def halt(state):
        return attrs.evolve(state, stop="half") if state.step == 2 else state

    step = fl.pipeline()(entropy)
    fl.save(fl.fit(step, state(), fl.sharded(batches(6)), hooks=(halt,)), tmp_path / "one")
    assert (
        launch.results(tmp_path, 2, go_on_sharded)
        == [["ValueError: the checkpoint is one of 1 processes in the middle", 8, 7]] * 2
    )
    again = attrs.evolve(fl.restore(tmp_path / "one", state()), stop=None)
    assert fl.fit(step, again, fl.sharded(batches(6)), hooks=()).step == 7


def go_on_sharded(folder):
    def again(loader):
        state = attrs.evolve(fl.restore(folder / "one", created()), stop=None)
        return fl.fit(fl.pipeline()(entropy), state, loader, epochs=1, hooks=())

    whole = again(batches(3))  # dealt
    on = fl.fit(
        fl.pipeline()(entropy), whole, fl.sharded(batches(6)), epochs=2, hooks=()
    )  # from the end of an epoch
    return [said(lambda: again(fl.sharded(batches(3))))[:62], whole.step, on.step - whole.step]


# --- collectives, and what is refused


def talks(folder):
    """Use the collectives, and type what is wrong: what comes of it."""
    tensor, me = torch.arange(rank() + 1), fl.Mean(float(rank()), 1)
    found = {
        "gather": tree(
            fl.gather({"t": tensor, "deep": [(torch.tensor(2.0), rank())], "name": "a" * rank()})
        ),
        "rows": tree(fl.gather(torch.full((rank(), 2), rank()))),
        "long": fl.gather("a" * 1500 * rank()),
        "mean": tree(fl.reduce([torch.tensor([1.0, rank()]), rank(), {"m": me}])),
        "max": tree(fl.reduce((torch.tensor(rank()), -rank()), "max")),
        "int mean": tree(fl.reduce(torch.tensor(rank()))),
        "broadcast": tree(fl.broadcast({"rank": rank(), "t": tensor}, source=world() - 1)),
        "running": fl.reduce(fitted(loader(), steps=2).metrics)["loss"].compute(),
    }
    wrong = {
        "structures": lambda: fl.gather([1] * (rank() + 1)),
        "keys": lambda: fl.gather({f"k{rank()}": 1}),
        "kinds": lambda: fl.reduce(1 if rank() else torch.ones(1)),
        "how": lambda: fl.reduce(1, "median"),
        "text": lambda: fl.reduce("a"),
        "source": lambda: fl.broadcast(1, source=world()),
        "sampler": lambda: fitted(DataLoader(samples(), sampler=DistributedSampler(samples()))),
        "prepared": lambda: fitted(Accelerator(cpu=True).prepare(loader())),
        "backend": lambda: created(backend=3),
        "partly sharded": lambda: created(shard=lambda model: fully_shard(model[0])),
        "small mesh": lambda: created(shard=lambda model: fully_shard(model, mesh=replicas())),
        "main only": lambda: fl.on_main(fl.checkpoint(folder / "never")),
        "snapshot": lambda: fl.snapshot(created(shard=fully_shard)),
        "no batch": lambda: fitted([]),
        "all dropped": lambda: fitted(loader(size=30, drop_last=True)),
        "weights of its own": lambda: fitted(loader(), hooks=(moving,)),
        "order of its own": lambda: fitted(loader(sampler=Unseeded())),
        "evaluated in its own order": lambda: fl.evaluate(
            fl.pipeline()(entropy), created(), loader(sampler=Unseeded())
        ),
        "predicted in its own order": lambda: [
            *fl.predict(lambda model, batch: 0, created(), loader(sampler=Unseeded()))
        ],
        "one tensor again and again": lambda: fitted(refilled),
        "lazy": lambda: fl.TrainState.create(
            lazy := nn.LazyLinear(3), torch.optim.SGD(lazy.parameters(), lr=0.1)
        ),
        "nothing to evaluate": lambda: fl.evaluate(fl.pipeline()(entropy), created(), []),
        "no folder": lambda: fl.save(created(), Path(__file__) / "checkpoint"),
        "fit": lambda: fitted(batches(3)).step,  # after all that, it still works
    }
    return {**found, **{name: said(do) for name, do in wrong.items()}}


def moving(state):
    """Change a weight by something else in every process."""
    with torch.no_grad():
        state.model[2].bias += 0.01 * rank() if state.step == 3 else 0
    return state


def refilled():
    """Yield each batch in the same memory, as one may with one process."""
    x = torch.empty(2, 6)
    for n in range(9):
        yield x.fill_(n), torch.zeros(2, dtype=torch.int64)


class Unseeded(Sampler):
    """Draws from a generator that fnloop can't know of, with another seed in every process."""

    def __len__(self):
        return SIZE

    def __iter__(self):
        return iter(np.random.default_rng(rank()).permutation(SIZE))


def created(shard=lambda model: None, **settings):
    model = network()
    shard(model)
    return fl.TrainState.create(
        model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0, **settings
    )


def replicas():
    """Return this process's row of a mesh of all processes by one."""
    return dist.device_mesh.init_device_mesh("cpu", (world(), 1), mesh_dim_names=("all", "one"))[
        "one"
    ]


def said(do):
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def tree(found):
    if isinstance(found, dict):
        return {k: tree(v) for k, v in found.items()}
    if isinstance(found, list | tuple):
        return [tree(v) for v in found]
    return (
        found.tolist()
        if isinstance(found, torch.Tensor)
        else found.compute()
        if hasattr(found, "compute")
        else found
    )


def spread(folder):
    """Create states of models that are spread over four processes in every way; return what came of each."""
    mesh = partial(dist.device_mesh.init_device_mesh, "cpu")
    created()  # joins the processes
    grid = mesh((2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def both(model):
        fully_shard(parallelize_module(model, grid["tensor"], plan), mesh=grid["data"])

    ways = {
        "tensor and data": both,
        "tensor": lambda model: parallelize_module(model, mesh((4,)), plan),
        "data": fully_shard,
        "data in two groups": lambda model: fully_shard(
            model, mesh=mesh((2, 2), mesh_dim_names=("replicate", "shard"))
        ),
    }
    return {name: said(lambda shard=shard: created(shard).step) for name, shard in ways.items()}


def test_tensor_parallelism_is_refused_and_hybrid_sharding_is_not(tmp_path):
    for found in launch.results(tmp_path, 4, spread):
        assert found["data"] == found["data in two groups"] == 0
        for way in ("tensor and data", "tensor"):
            assert str(found[way]).startswith(
                "NotImplementedError: the parameter 0.weight is placed as "
            ), found[way]
            assert "Leave parallelize_module out" in found[way]


REFUSED = {
    "structures": "ValueError: the structures of the processes differ",
    "keys": "ValueError: the structures of the processes differ",
    "kinds": "ValueError: the structures of the processes differ",
    "how": "ValueError: reduce expects how as one of",
    "text": "TypeError: reduce expects tensors, numbers and metrics",
    "source": "ValueError: broadcast expects source as a rank",
    "sampler": "ValueError: the loader has a DistributedSampler",
    "prepared": "ValueError: the loader was prepared by accelerate",
    "backend": "TypeError: backend expects an accelerate.Accelerator",
    "partly sharded": "ValueError: some parameters of this model are sharded",
    "small mesh": "NotImplementedError: this model is sharded over meshes of [1] of ",
    "main only": "TypeError: ",
    "snapshot": "NotImplementedError: a model that is sharded over processes can't be copied",
    "no batch": "ValueError: the training loader gave no batch",
    "all dropped": "ValueError: the training loader gave no batch in epoch 1. It has 41 samples, and with drop_last an update "
    "takes 30 × ",
    "weights of its own": "RuntimeError: the processes have diverged: the norm of the weight 2.bias is from ",
    "order of its own": "RuntimeError: the processes have diverged: each has the data in another order",
    "evaluated in its own order": "RuntimeError: the processes have diverged: each has the data in another order",
    "predicted in its own order": "RuntimeError: the processes have diverged: each has the data in another order",
    "one tensor again and again": "ValueError: the loader fills one tensor again for its next batch, and ",
    "lazy": "ValueError: the model has lazy parameters, which have no shape yet: call it once",
    "nothing to evaluate": "ValueError: the loader to evaluate gave no batch",
}


@pytest.mark.parametrize("n", [2, 3])
def test_collectives(launched, n):
    for mine in launched(talks, n):
        assert mine["gather"] == {
            "t": [[0, 0, 1], [0, 0, 1, 0, 1, 2]][n - 2],
            "deep": [[[2.0] * n, [*range(n)]]],
            "name": ["", "a", "aa"][:n],
        }
        assert mine["rows"] == [[], [[1, 1]], [[1, 1], [2, 2], [2, 2]]][n - 1]
        assert mine["long"] == [
            "a" * 1500 * rank for rank in range(n)
        ]  # the third is longer than what travels at once
        assert mine["mean"] == [[1.0, (n - 1) / 2], (n - 1) / 2, {"m": (n - 1) / 2}]
        assert mine["max"] == [n - 1, 0] and mine["int mean"] == (n - 1) / 2
        assert mine["broadcast"] == {"rank": n - 1, "t": [*range(n)]}
        assert mine["running"] == launched(talks, n)[0]["running"] > 0


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(launched, name, n):
    for mine in launched(talks, n):
        assert str(mine[name]).startswith(REFUSED[name])


@pytest.mark.parametrize("n", [2, 3])
def test_what_the_main_process_fails_to_write_is_an_error_in_all(launched, n):
    for found in launched(talks, n):
        assert found["no folder"].split(":")[0] in (
            "NotADirectoryError",
            "FileExistsError",
            "CheckpointError",
            "RuntimeError",
        )
        assert found["fit"] == math.ceil(14 / n)


def precision(folder):
    """Return the dtype of an output, with what accelerate is configured for."""
    seen = []

    def loss(model, batch):
        loss, aux = entropy(model, batch)
        seen.append(str(aux["output"].dtype))
        return loss, aux

    return [said(lambda: fitted(batches(20), loss=loss).backend.precision), *set(seen)]


@pytest.mark.parametrize("n", [1, 2])
def test_mixed_precision_that_accelerate_is_configured_for(tmp_path, n):
    configured = lambda kind: {
        "environment": {"ACCELERATE_MIXED_PRECISION": kind, "ACCELERATE_USE_CPU": "true"}
    }
    assert (
        launch.results(tmp_path / "bf16", n, precision, **configured("bf16"))
        == [["bf16", "torch.bfloat16"]] * n
    )
    if n == 2:
        (mine, *_), other = launch.results(tmp_path / "fp16", n, precision, **configured("fp16"))
        assert mine.startswith("ValueError: accelerate is configured for fp16") and other[0] == mine


def by_plugin(folder):
    """Train a model that accelerate's FSDP 2 shards; by itself it does so on GPUs only, and is told otherwise here."""
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = network()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        found = Accelerator(cpu=True, fsdp_plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        left_out = said(lambda: fl.TrainState.create(model, optimizer, backend=found))
        found.state.distributed_type, found.state.fsdp_plugin = DistributedType.FSDP, plugin
        state = fl.TrainState.create(model, optimizer, seed=3, backend=found)
        kinds = {type(p).__name__ for p in state.model.parameters()}
        state = fl.fit(
            fl.pipeline(fl.clip(0.1))(entropy), state, loader(shuffle=True), epochs=2, hooks=()
        )
        weights = torch.cat(
            [whole(p).detach().flatten() for p in state.model.parameters()]
        ).tolist()
        found.state.distributed_type = DistributedType.DEEPSPEED
        return [
            left_out,
            sorted(kinds),
            weights,
            said(lambda: fl.TrainState.create(model, optimizer, backend=found)),
        ]


def test_accelerates_fsdp(tmp_path, launched):
    alone = launched(table, 1)[0]["clip"]["weights"]
    for left_out, kinds, weights, deepspeed in launch.results(tmp_path, 2, by_plugin):
        assert left_out.startswith(
            "NotImplementedError: accelerate is configured for FSDP, which it leaves out"
        )
        assert kinds == ["DTensor"] and difference(alone, weights) < 1e-12
        assert deepspeed.startswith("NotImplementedError: accelerate is configured for DEEPSPEED")


def seen(folder):
    """Return which samples functions are given; of a loss function that talks to the others, too: all have to come there."""
    found, given = {}, []

    def quiet(model, batch):
        given.extend(batch[0].tolist())
        return (model.w * batch[0]).mean()

    def talking(model, batch):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == world()
        return quiet(model, batch)

    def take(name):
        found[name] = sorted(
            sample for own in collectives.gather_objects(list(given)) for sample in own
        )
        given.clear()

    data = TensorDataset(torch.arange(7.0))
    for loss in (quiet, talking):
        state = fl.fit(fl.pipeline()(loss), toy(), DataLoader(data, 2, shuffle=True), hooks=())
        take(f"train, {loss.__name__}")
        fl.evaluate(fl.pipeline()(loss), state, DataLoader(data, 3))
        take(f"evaluate, {loss.__name__}")
        found[f"w, {loss.__name__}"] = state.model.w.item()
    found["results"] = [
        *fl.predict(
            lambda model, batch: quiet(model, batch) and batch[0].tolist(),
            state,
            DataLoader(data, 3),
        )
    ]
    take("predict")
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_a_sample_is_looked_at_by_one_process_alone(launched, n):
    for found in launched(seen, n):
        for name in ("train, quiet", "evaluate, quiet", "predict"):
            assert found[name] == [*range(7)], name
        assert found["results"] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("n", [2, 3])
def test_a_loss_function_that_talks_is_called_by_all_in_every_round(launched, n):
    for found in launched(seen, n):
        assert (
            len(found["train, talking"]) == [7, 7 + 2][n - 2]
        )  # on 3 the last round has one batch, of one: two more look at it
        assert len(found["evaluate, talking"]) == [7 + 1, 7][n - 2]
        assert found["w, talking"] == pytest.approx(found["w, quiet"])


@fl.middleware("gradient")
def noise(std):
    """Add noise to the gradient, as the README does, and look at the batch."""

    def wrap(step):
        def noisy(state, batch):
            before = torch.rand(())
            state, out = step(state, batch)
            for p in state.model.parameters():
                p.grad.add_(torch.randn_like(p) * before, alpha=std * min(len(batch[0]), 1))
            return state, out

        return noisy

    return wrap


def drawing(folder):
    """Return what processes that draw inside and outside of backward come to."""
    found, masks = {}, []

    def dropping(model, batch):
        mask = torch.rand(len(batch[0]))
        masks.append(mask.tolist())
        return (model.w * batch[0] * mask).mean()

    data = TensorDataset(torch.arange(1.0, 8.0))
    for name, pipe in {
        "one": fl.pipeline(noise(0.1)),
        "two": fl.pipeline(noise(0.1), fl.accumulate(2)),
    }.items():
        state = fl.fit(pipe(dropping), toy(), DataLoader(data, 2), epochs=2, hooks=())
        found[name] = [state.model.w.item(), masks[:]]
        masks.clear()
    mx = fl.metric(mx=lambda aux, batch: batch[0].max())
    state = fl.fit(fl.pipeline(mx)(dropping), toy(), DataLoader(data, 4), hooks=())
    found["history"] = [r.metrics for r in state.history]
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    found["views"] = views(handler).model.w.item()
    return found


def views(handler):
    model = Toy(1.0)
    state = fl.TrainState.create(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        seed=0,
        backend=Accelerator(cpu=True, kwargs_handlers=[handler]),
    )
    data = DataLoader(TensorDataset(torch.arange(1.0, 9.0)), 4 // world())
    return fl.fit(
        fl.pipeline(fl.clip(5.0), fl.accumulate(2))(lambda m, b: (m.w * b[0]).mean()),
        state,
        data,
        hooks=(),
    )


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_drawn_behind_backward_is_the_same_everywhere_and_in_it_its_own(launched, n):
    first, *others = launched(drawing, n)
    for other in others:
        for name in ("one", "two"):
            assert other[name][0] == first[name][0]
            assert other[name][1][0] != first[name][1][0]
        assert other["history"] == first["history"]


def test_buckets_of_ddp_may_be_what_gradients_are(launched):
    assert launched(drawing, 2)[0]["views"] == pytest.approx(
        launched(drawing, 1)[0]["views"]
    )  # 1 - 0.1 (2.5 + 5) / 2
