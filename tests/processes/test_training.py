"""Law 8: the number of processes changes the speed of a run and nothing else.

The job ``table`` trains a table of cases on 1, 2 and 3 processes, each with 1/N of the batch size.
One process is compared with a loop written by hand.
"""

import gc
import math

import attrs
import launch
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from process_problems import (
    BATCH,
    SIZE,
    Stream,
    adam_and_sgd,
    batches,
    by_tokens,
    default_dtype,
    difference,
    entropy,
    kinds,
    loader,
    network,
    rank,
    said,
    samples,
    torchmetrics,
    whole,
    world,
)
from several import muon_and_adamw
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import fnloop as fl

pytestmark = pytest.mark.slow


class Dicts(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        x, y, _, _ = samples()[i]
        return {"x": x, "y": y}


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


def entropy_of_dict(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def by_int(model, batch):
    loss, aux = by_tokens(model, batch)
    return loss, {"weight": int(aux["weight"])}


def images():
    x, y, *_ = samples().tensors
    return TensorDataset(x.view(-1, 3, 2, 1), y)


def convolutions():
    one = nn.Conv2d(3, 3, (2, 1), padding=(1, 0))
    return nn.Sequential(one, nn.Tanh(), one, nn.Flatten(), nn.Linear(12, 3))


def infinite(model, batch):
    """An infinite loss, with finite gradients, of the process that has a certain sample."""
    loss, aux = entropy(model, batch)
    return loss + (math.inf if 8 in batch[3] else 0.0), aux


def no_number(model, batch):
    loss, aux = entropy(model, batch)
    return loss * (math.nan if 8 in batch[3] else 1.0), aux


def choosy(fits):
    """Leave out batches that a function of the first sample and the process does not take."""

    def loss_fn(model, batch):
        return entropy(model, batch) if fits(int(batch[3][0])) else fl.skip("does not fit")

    return loss_fn


def choosy_by_tokens(model, batch):
    return by_tokens(model, batch) if batch[3][0] not in (0, 6, 12, 14, 39) else fl.skip("short")


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
    """Skip the second layer in every other batch, in all processes but the first."""
    return model(batch[0], bool(batch[3][0] // BATCH % 2 == 0)).square().mean()


class Hungry(torch.autograd.Function):
    """Identity whose backward needs the memory of one sample, in the last process."""

    @staticmethod
    def forward(ctx, x):
        ctx.fits = len(x) == 1 or rank() < world() - 1
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.fits:
            raise torch.OutOfMemoryError("no more")
        return grad


def hungry(model, batch):
    """Run out of memory in backward, half-way through the model."""
    return nn.functional.cross_entropy(model[1:](Hungry.apply(model[0](batch[0]))), batch[1])


def hungry_by_tokens(model, batch):
    """Run out of memory in forward, in the last process, with more than one sample."""
    made = by_tokens(model, batch)
    if len(batch[0]) > 1 and rank() == world() - 1:
        raise torch.OutOfMemoryError("no more")
    return made


class Temperature(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.log.exp(), target)


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


@fl.middleware("evaluation")
def doubled():
    """A middleware of the user's, which is checked when it is called first."""

    def wrap(step):
        def doubling(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, loss=2 * out.loss)

        return doubling

    return wrap


def freezing(state):
    if state.step in (3, 7):
        state.model[0].requires_grad_(state.step == 7)
    return state


@attrs.frozen
class Case:
    """A training run.

    Args:
        pipeline: makes the pipeline.
        loss: the loss function, or a module that is a criterion.
        train: makes the loader to train on.
        optimizer: makes the optimizer.
        hooks: of the run.
        evaluated: whether a loader is evaluated.
        close: the relative difference that is allowed.
        settings: of DistributedDataParallel.
        evaluate_every, record_every: of the run.
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
    evaluate_every: object = fl.every(steps=1)
    record_every: object = None
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
    "clip two parts": Case(
        lambda: fl.pipeline(
            fl.clip(0.1, only="0", name="a"), fl.clip(0.05, only="2", name="b"), fl.accumulate(2)
        )
    ),
    "clip by the weights": Case(
        lambda: fl.pipeline(fl.accumulate(2), fl.clip_adaptive(0.02), fl.grad_norm(by="module"))
    ),
    "sam": Case(lambda: fl.pipeline(fl.sam(0.5))),
    "accumulate, sam": Case(lambda: fl.pipeline(fl.accumulate(2), fl.sam(0.5))),
    "sam, accumulate": Case(  # with padding
        lambda: fl.pipeline(fl.sam(0.5), fl.accumulate(2)),
        train=lambda: loader(TensorDataset(*samples()[:32])),
    ),
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
    "microbatch": Case(
        lambda: fl.pipeline(kinds(), fl.microbatch(2), fl.clip(0.1)), train=lambda: loader()
    ),
    "microbatch, tokens, accumulate": Case(
        lambda: fl.pipeline(fl.clip(0.1), fl.microbatch(2), fl.accumulate(2)), by_tokens
    ),
    "retry": Case(lambda: fl.pipeline(fl.retry_on_oom(), fl.clip(0.1)), hungry),
    "retry, by hand": Case(lambda: fl.pipeline(fl.microbatch(1), fl.clip(0.1))),
    "retry, tokens, accumulate": Case(
        lambda: fl.pipeline(fl.retry_on_oom(), fl.accumulate(2)), hungry_by_tokens
    ),
    "retry, unused": Case(lambda: fl.pipeline(fl.retry_on_oom()), loss=first_only, model=TwoLayers),
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
    "several optimizers": Case(
        lambda: fl.pipeline(
            fl.accumulate(2),
            fl.clip(0.1),
            fl.schedule(fl.schedules.cosine(), only="rest"),
        ),
        optimizer=adam_and_sgd,
    ),
    "several optimizers, guard": Case(
        lambda: fl.pipeline(guard(3), fl.clip(0.1)), optimizer=adam_and_sgd
    ),
    "several optimizers, criterion": Case(loss=Temperature, optimizer=adam_and_sgd),
    # It rounds to bfloat16, so that differences in the last bit grow.
    "Muon": Case(
        optimizer=muon_and_adamw, dtype=torch.float32, close=0.05, record_every=fl.every(steps=3)
    ),
    "torchmetrics": Case(lambda: fl.pipeline(fl.metric(**torchmetrics())), evaluated=True),
    "metrics": Case(lambda: fl.pipeline(kinds(), fl.accumulate(2), measured(0)), evaluated=True),
    "recent": Case(
        lambda: fl.pipeline(kinds(), fl.accumulate(2), measured(0)),
        evaluated=True,
        evaluate_every={"valid": fl.at_start() | fl.every(epochs=1)},
        record_every=fl.every(steps=3),
    ),
    "recent, tokens, guard": Case(
        lambda: fl.pipeline(guard(3), fl.accumulate(2)),
        by_tokens,
        evaluate_every=fl.every(epochs=1),
        record_every=fl.every(steps=2) & ~fl.every(steps=4),
    ),
    "guard": Case(lambda: fl.pipeline(guard(3))),
    "guard, accumulate": Case(lambda: fl.pipeline(guard(3), fl.accumulate(2), fl.clip(0.1))),
    "not finite": Case(lambda: fl.pipeline(fl.skip_nonfinite(), fl.clip(0.1)), loss=infinite),
    "not finite, accumulate": Case(
        lambda: fl.pipeline(fl.accumulate(2), fl.clip(0.1), fl.skip_nonfinite()), loss=no_number
    ),
    "not finite, guard": Case(lambda: fl.pipeline(guard(3), fl.skip_nonfinite()), loss=infinite),
    "spikes": Case(
        lambda: fl.pipeline(fl.spike_guard(2, 1.02), fl.clip(0.1)), optimizer=adam_and_sgd
    ),
    "spikes, accumulate": Case(
        lambda: fl.pipeline(guard(3), fl.accumulate(2), fl.spike_guard(2, 1.02)), by_tokens
    ),
    "spikes, back": Case(
        lambda: fl.pipeline(fl.ema(0.9), fl.clip(0.1), fl.spike_guard(2, 1.02, then="back"))
    ),
    # Single samples, six in an update: the first update is left out, and parts of others.
    "skip": Case(
        lambda: fl.pipeline(fl.accumulate(6 // world()), kinds()),
        train=lambda: loader(size=1),
        loss=choosy(lambda i: i >= 6 and i % 5 not in (2, 3)),
        evaluated=True,
    ),
    "skip, clip, accumulate": Case(
        lambda: fl.pipeline(fl.accumulate(6 // world()), fl.clip(0.1), fl.skip_nonfinite()),
        train=lambda: loader(size=1),
        loss=choosy(lambda i: i % 3 != 1 and not 12 <= i < 18),
    ),
    "skip, tokens": Case(
        lambda: fl.pipeline(fl.accumulate(6 // world())),
        train=lambda: loader(size=1),
        loss=choosy_by_tokens,
    ),
    "skip in pieces": Case(
        lambda: fl.pipeline(fl.microbatch(1), fl.clip(0.1)),
        train=lambda: loader(),
        loss=choosy(lambda i: i >= 6 and i % 5 not in (2, 3)),
    ),
    "without one": Case(
        lambda: fl.pipeline(without(7), fl.accumulate(6 // world())), train=lambda: batches(1)
    ),
    "channels last": Case(
        lambda: fl.pipeline(fl.channels_last(), fl.accumulate(2)),
        train=lambda: loader(images(), shuffle=True),
        model=convolutions,
    ),
    "bf16": Case(lambda: fl.pipeline(fl.amp("bf16")), dtype=torch.float32, close=0.05),
    "averages": Case(
        lambda: fl.pipeline(fl.ema(0.9), fl.swa(0.5, every=2), kinds(), guard(3), doubled()),
        evaluated=True,
    ),
    "the average alone": Case(
        lambda: fl.pipeline(fl.ema(0.9, start=0.25, evaluate="only"), fl.accumulate(2)),
        evaluated=True,
    ),
    "averages that are not evaluated": Case(
        lambda: fl.pipeline(
            fl.ema(0.9, evaluate=False), fl.swa(0.5, every=2, evaluate=False), fl.clip(0.1)
        ),
        evaluated=True,
    ),
}


SHARDED = (  # those that run on a model under fully_shard too
    *(
        "plain",
        "float32",
        "accumulate",
        "accumulate, clip",
        "clip",
        "clip two parts",
        "clip by the weights",
        "sam",
        "accumulate, sam",
        "sam, accumulate",
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
    *(
        "guard, accumulate",
        "not finite",
        "not finite, accumulate",
        "without one",
        "averages that are not evaluated",
        "microbatch, tokens, accumulate",
    ),
    *("several optimizers", "several optimizers, criterion", "Muon"),
)


UNEVEN = (  # of them, those that an odd number of processes divides in another way
    *("plain", "accumulate, clip", "larger than the data", "two samples", "in turn", "without one"),
)


def table(folder):
    """Run all cases, and return what each has come to."""
    if world() > 1:
        dist.init_process_group("gloo")
    gc.freeze()  # each retry collects garbage: not all that was imported
    found = {name: attempt(case) for name, case in CASES.items()}
    if world() > 1:
        found.update(
            {f"{name}, sharded": attempt(CASES[name], True) for name in sharded_on(world())}
        )
    return found


def sharded_on(n):
    """Return the cases that also run on a sharded model."""
    return SHARDED if n == 2 else UNEVEN


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
            evaluate_every=case.evaluate_every,
            record_every=case.record_every,
        )
        averages = [t for slot in ("ema", "swa") for t in state.slots.get(slot, {}).values()]
        weights = torch.cat([whole(t).detach().flatten() for t in (*parameters, *averages)])
        weights = weights.tolist()
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
            dict(state.updates),
            state.stop,
        ],
    }


@pytest.mark.parametrize(
    ("name", "n"),
    [
        (name, n)
        for n in (2, 3)
        for name in (*CASES, *(f"{name}, sharded" for name in sharded_on(n)))
    ],
)
def test_n_processes_train_as_one(launched, name, n):
    case = CASES[name.removesuffix(", sharded")]
    alone, together = (
        launched(table, 1)[0][name.removesuffix(", sharded")],
        [found[name] for found in launched(table, n)],
    )
    for mine in together:
        assert "error" not in mine and "error" not in alone, (alone.get("error"), mine.get("error"))
        assert mine == together[0]  # bit for bit, times included
    mine = together[0]
    assert mine["counters"] == alone["counters"]
    assert difference(alone["weights"], mine["weights"]) < case.close
    assert [row[:2] for row in mine["history"]] == [row[:2] for row in alone["history"]]
    for (_, _, expected), (_, _, found) in zip(alone["history"], mine["history"], strict=True):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=10 * case.close), key


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_retry_in_one_process_makes_smaller_pieces_in_all(launched, n):
    """The last process runs out of memory with more than one sample."""
    found = launched(table, n)[0]
    assert found["retry"]["weights"] == found["retry, by hand"]["weights"]


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


def by_plugin(folder):
    """Train a model that accelerate's FSDP 2 shards, which is made to do so on the CPU."""
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
    for ignored, types, weights, deepspeed in launch.results(tmp_path, 2, by_plugin):
        assert ignored.startswith(
            "NotImplementedError: accelerate is configured for FSDP, which it ignores"
        )
        assert types == ["DTensor"] and difference(alone, weights) < 1e-12
        assert deepspeed.startswith("NotImplementedError: accelerate is configured for DEEPSPEED")
