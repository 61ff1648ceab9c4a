"""Law 8: the number of processes changes the speed of a run and nothing else.

The job ``table`` trains a table of cases on 1, 2 and 3 processes, each with 1/N of the batch size.
One process is compared with a loop written by hand.
"""

import gc
import math
from functools import partial

import attrs
import launch
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, utils
from joined import default_dtype, difference, flat, in_double, join, rank, said, world
from process_data import BATCH, SIZE, Stream, batches, loader, samples
from process_metrics import accuracy, changing, kinds, torchmetrics, with_metrics
from process_problems import adam_sgd, adamw, by_tokens, convolutions, entropy, network, sgd
from sample_middleware import halved, warming_up
from several import muon_and_adamw
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils import data
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision, MulticlassRecall

import fnloop as fl

pytestmark = pytest.mark.slow
case = lambda *members, **settings: Case(members, **settings)
first_only = lambda model, batch: model(batch[0], False).square().mean()
entropy_of_dict = lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])
first = lambda n: data.TensorDataset(*samples()[:n])
in_batches = lambda sampler: data.DataLoader(samples(), batch_sampler=sampler)


class Dicts(data.Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        x, y, _, _ = samples()[i]
        return {"x": x, "y": y}


class Leaving(Dicts):
    def __getitems__(self, indices):
        return [samples()[i] for i in indices if i not in (11, 30)]


class Refilling(data.Sampler):
    def __iter__(self):
        indices = []
        for start in range(0, SIZE, BATCH // world()):
            indices[:] = range(start, min(start + BATCH // world(), SIZE))
            yield indices


def some(parts):
    return data.default_collate([part for part in parts if part[3] not in (11, 30)])


def by_int(model, batch):
    loss, aux = by_tokens(model, batch)
    return loss, {"weight": int(aux["weight"])}


def infinite(model, batch):
    """An infinite loss, with finite gradients, of the process that has a certain sample."""
    loss, aux = entropy(model, batch)
    return loss + (math.inf if 8 in batch[3] else 0.0), aux


def no_number(model, batch):
    loss, aux = entropy(model, batch)
    return loss * (math.nan if 8 in batch[3] else 1.0), aux


def choosy(fits, loss=entropy):
    """Leave out batches by their first sample."""
    return lambda model, batch: loss(model, batch) if fits(int(batch[3][0])) else fl.skip("short")


def own(loss):
    """A step whose function calls the backward of a loss by itself."""

    def makes(state, batch):
        reply = loss(state.model, batch)
        found, aux = reply if isinstance(reply, tuple) else (reply, {})
        found.backward()
        return fl.Output(found, aux.get("weight", len(batch[0])), aux)

    return fl.raw(makes, entropy, updates=False)


def own_but(fits, loss=entropy):
    """The same, without batches by their first sample."""
    makes = own(loss).fn
    skip = lambda batch: None if fits(int(batch[3][0])) else "short"
    return fl.raw(lambda s, batch: attrs.evolve(makes(s, batch), skip=skip(batch)), updates=False)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, deep):
        hidden = self.first(x)
        return self.second(hidden) if deep else hidden


def weighted(model, batch, *, beta=1.0):
    loss, aux = by_tokens(model, batch)
    return beta * loss, aux


def in_turn(model, batch):
    """Skip the second layer in every other batch, in all processes but the first."""
    return model(batch[0], bool(batch[3][0] // BATCH % 2 == 0)).square().mean()


def talking(model, batch):
    """Exchange data in each round, also where a process has no batch left."""
    everyone = torch.ones(1)
    if world() > 1:
        dist.all_reduce(everyone)
    assert everyone.item() == world()
    loss, aux = entropy(model, batch)
    return loss, {**aux, "weight": len(batch[0])}


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x):
        return self.d(x)


def two(parameters):
    parameters = [*parameters]
    d = torch.optim.AdamW(parameters[4:8], lr=0.02)
    return {"d": d, "g": torch.optim.SGD(parameters[:4], lr=0.1, momentum=0.9)}


def real_and_fake(model, batch):
    """The noise is made of the batch, so it does not depend on the number of processes."""
    fake = model.g(batch[0][:, :3]).detach()
    loss, aux = entropy(model, batch)
    return loss + model.d(fake).square().mean(), aux


def fooled(model, batch):
    return nn.functional.cross_entropy(model.d(model.g(batch[0][:, :3])), batch[1])


def fooled_by_tokens(model, batch):
    fake = model.g(batch[0][:, :3])
    losses = nn.functional.cross_entropy(model.d(fake), batch[1], reduction="none") * batch[2]
    return losses.sum() / batch[2].sum(), {"weight": batch[2].sum()}


def turns(d=(), g=(), d_loss=real_and_fake, g_loss=fooled, **settings):
    steps = {"d": fl.pipeline(*d)(d_loss), "g": fl.pipeline(*g)(g_loss)}
    return fl.alternate(steps, **settings)


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
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output * self.log.exp(), target)


def items(aux, batch):
    return fl.Sum(len(batch[0]))


def measured():
    """Report metrics of the joined gradient, of every kind."""

    def measure(state, out, batch):
        norm = torch.stack([p.grad.square().sum() for p in state.model.parameters()]).sum()
        made = {"g_sum": fl.Sum, "g_min": fl.Min, "g_max": fl.Max, "g_last": fl.Last}
        made = {name: kind(norm) for name, kind in made.items()}
        return with_metrics(out, **made, g_mean=fl.Mean(norm, 1))

    return changing("gradient", measure, "measured")


def guard(update):
    """Leave an update out, by the word of the last process alone."""

    def judge(state, out, batch):
        here = state.step + state.skipped == update and rank() == world() - 1
        return attrs.evolve(out, skip="the guard") if here else out

    return changing("gradient", judge, "guard")


def without(sample):
    """Leave a batch out that begins with this sample."""
    skip = lambda out: attrs.evolve(out, skip="not this one")
    leave = lambda state, out, batch: skip(out) if batch[3][0] == sample else out
    return changing("forward", leave, "without")


def doubled():
    """A middleware of the user's, which is checked when it is called first."""
    double = lambda state, out, batch: attrs.evolve(out, loss=2 * out.loss)
    return changing("evaluation", double, "doubled")


def freezing(state):
    if state.step in (3, 7):
        state.model[0].requires_grad_(state.step == 7)
    return state


def collection():
    precision, recall = (kind(3, average=None) for kind in (MulticlassPrecision, MulticlassRecall))
    metrics = {"precision": precision, "recall": recall, "f1": MulticlassF1Score(3)}
    inputs = lambda aux, batch: (aux["output"], batch[1])
    return fl.from_torchmetrics(MetricCollection(metrics), inputs, names=("a", "b", "c"))


def total():
    """A collection whose value, which is not a ratio, would double if it were reduced twice."""
    return fl.from_torchmetrics(MetricCollection({"sum": SumMetric()}), lambda aux, b: (b[3],))


@attrs.frozen
class Case:
    members: tuple = ()
    loss: object = entropy  # or a module that is a criterion
    train: object = partial(loader, shuffle=True)  # makes the loader
    optimizer: object = adamw
    hooks: tuple = ()
    evaluated: bool = False
    close: float = 1e-12  # the relative difference that is allowed
    model: object = network
    settings: object = None  # of DistributedDataParallel
    evaluate_every: object = fl.every(steps=1)
    record_every: object = None
    dtype: torch.dtype = torch.float64
    sharded: tuple = ()  # the numbers of processes that run it under fully_shard too


EACH = partial(loader, size=1)  # single samples, six in an update
SIX = fl.accumulate(6 // world())
LIST = partial(batches, BATCH // world())
TWO = fl.accumulate(2)
CLIP = fl.clip(0.1)
EMA = fl.ema(0.9, evaluate=False)
RAGGED = partial(loader, size=12 // world())  # some processes have no batch in the last update
GAN = {"model": Gan, "optimizer": two}
NEWEST = fl.metric(accuracy=accuracy, last=lambda aux, batch: fl.Last(batch[3][-1]))
TOTAL = fl.accumulate(total=8), fl.clip(0.5), fl.schedule(fl.schedules.cosine(warmup=2))
PAIRS = {"train": partial(loader, size=2, shuffle=True)}
untouched = fl.Middleware("untouched", gradient=lambda step: lambda state, b: step(state, b))
OFTEN = {"steps": fl.every(steps=3), "even": fl.every(steps=2) & ~fl.every(steps=4)}
CYCLE = fl.torch_scheduler(
    lambda o, run: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=run.total_steps)
)
# The first update is left out, and parts of others.
FEW = choosy(lambda i: i >= 6 and i % 5 not in (2, 3))
PARTS = choosy(lambda i: i % 3 != 1 and not 12 <= i < 18)
FEW_TOKENS = choosy(lambda i: i not in (0, 6, 12, 14, 39), by_tokens)
BOTH, ON_2 = (2, 3), (2,)  # an odd number divides in another way

CASES = {
    "plain": case(sharded=BOTH),
    "float32": case(dtype=torch.float32, close=1e-6, optimizer=sgd, sharded=ON_2),
    "in order": case(train=loader, evaluated=True),
    "dropped end": case(train=partial(loader, shuffle=True, drop_last=True)),
    "accumulate": case(TWO, sharded=ON_2),
    "accumulate 3": case(fl.accumulate(3)),
    "accumulate, clip": case(TWO, CLIP, sharded=BOTH),
    "clip": case(CLIP, sharded=ON_2),
    "clip two parts": case(
        fl.clip(0.1, only="0", name="a"), fl.clip(0.05, only="2", name="b"), TWO, sharded=ON_2),
    "clip by the weights": case(
        TWO, fl.clip_adaptive(0.02), fl.grad_norm(by="module"), sharded=ON_2),
    "sam": case(fl.sam(0.5), sharded=ON_2),
    "accumulate, sam": case(TWO, fl.sam(0.5), sharded=ON_2),
    "sam, accumulate": case(fl.sam(0.5), TWO, train=lambda: loader(first(32)), sharded=ON_2),
    "clip, accumulate": case(CLIP, TWO, sharded=ON_2),
    "tokens": case(loss=by_tokens),
    "tokens, accumulate": case(TWO, CLIP, loss=by_tokens),
    "tokens, clip, accumulate": case(CLIP, TWO, loss=by_tokens, sharded=ON_2),
    "int tokens": case(loss=by_int),
    "int tokens, accumulate": case(TWO, loss=by_int),
    "dicts": case(loss=entropy_of_dict, train=lambda: loader(Dicts(), shuffle=True)),
    "larger than the data": case(train=partial(loader, size=60 // world()), sharded=BOTH),
    "two samples": case(
        train=lambda: loader(first(2), size=1 if world() > 1 else 2), sharded=BOTH),
    "persistent workers": case(
        train=partial(loader, shuffle=True, num_workers=1, persistent_workers=True)),
    "samples left out": case(train=partial(loader, collate_fn=some)),
    "samples left out by the dataset": case(train=lambda: loader(Leaving())),
    "a sampler that yields one list again and again": case(train=lambda: in_batches(Refilling())),
    "list": case(train=LIST),
    "generator": case(train=lambda: lambda: iter(LIST())),
    "stream": case(train=lambda: loader(Stream())),
    "batch sampler": case(train=lambda: in_batches(
        data.BatchSampler(data.SequentialSampler(samples()), BATCH // world(), False))),
    "shares": case(train=lambda: fl.sharded(lambda: iter(LIST()[rank() :: world()]))),
    "microbatch": case(kinds(), fl.microbatch(2), CLIP, train=loader),
    "microbatch, tokens, accumulate": case(
        CLIP, fl.microbatch(2), TWO, loss=by_tokens, sharded=ON_2),
    "retry": case(fl.retry_on_oom(), CLIP, loss=hungry),
    "retry, by hand": case(fl.microbatch(1), CLIP),
    "retry, tokens, accumulate": case(fl.retry_on_oom(), TWO, loss=hungry_by_tokens),
    "retry, unused": case(fl.retry_on_oom(), loss=first_only, model=TwoLayers),
    "schedule": case(TWO, fl.schedule(fl.schedules.cosine(warmup=0.1)), sharded=ON_2),
    "torch scheduler": case(CYCLE),
    "a scheduler by updates": case(fl.torch_scheduler(halved), guard(3), TWO),
    "unused": case(loss=first_only, model=TwoLayers, sharded=ON_2),
    "in turn": case(loss=in_turn, model=TwoLayers, train=loader, optimizer=sgd, sharded=BOTH),
    "in turn, told": case(loss=in_turn, model=TwoLayers, train=loader,
                          settings={"find_unused_parameters": True}),
    "views of buckets": case(fl.clip(5.0), TWO, settings={"gradient_as_bucket_view": True}),
    "frozen for a while": case(hooks=(freezing,), sharded=ON_2),
    "criterion": case(loss=Temperature, sharded=ON_2),
    "LBFGS": case(optimizer=lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3), close=1e-11),
    "several optimizers": case(
        TWO, CLIP, fl.schedule(fl.schedules.cosine(), only="rest"), optimizer=adam_sgd,
        sharded=ON_2),
    "several optimizers, guard": case(guard(3), CLIP, optimizer=adam_sgd),
    "several optimizers, criterion": case(
        loss=Temperature, optimizer=adam_sgd, sharded=ON_2),
    # It rounds to bfloat16, so that differences in the last bit grow.
    "Muon": case(optimizer=muon_and_adamw, dtype=torch.float32, close=0.05,
                 record_every=OFTEN["steps"], sharded=ON_2),
    "torchmetrics": case(fl.metric(**torchmetrics()), evaluated=True, sharded=ON_2),
    "metrics of a phase": case(
        fl.metric(collection()), fl.metric(total()), fl.metric(trained=items, on="training"),
        fl.metric(evaluated=items, on="evaluation"), fl.derive(double=lambda m: 2 * m["loss"]),
        evaluated=True, record_every=OFTEN["even"]),
    "metrics": case(kinds(), TWO, measured(), evaluated=True),
    "recent": case(kinds(), TWO, measured(), evaluated=True, record_every=OFTEN["steps"],
                   evaluate_every={"valid": fl.at_start() | fl.every(epochs=1)}),
    "recent, tokens, guard": case(guard(3), TWO, loss=by_tokens, record_every=OFTEN["even"],
                                  evaluate_every=fl.every(epochs=1)),
    "guard": case(guard(3)),
    "guard, accumulate": case(guard(3), TWO, CLIP, sharded=ON_2),
    "not finite": case(fl.skip_nonfinite(), CLIP, loss=infinite, sharded=ON_2),
    "not finite, accumulate": case(
        TWO, CLIP, fl.skip_nonfinite(), loss=no_number, sharded=ON_2),
    "not finite, guard": case(guard(3), fl.skip_nonfinite(), loss=infinite),
    "spikes": case(fl.spike_guard(2, 1.02), CLIP, optimizer=adam_sgd),
    "spikes, accumulate": case(guard(3), TWO, fl.spike_guard(2, 1.02), loss=by_tokens),
    "spikes, back": case(fl.ema(0.9), CLIP, fl.spike_guard(2, 1.02, then="back")),
    "skip": case(SIX, kinds(), train=EACH, loss=FEW, evaluated=True),
    "skip, clip, accumulate": case(SIX, CLIP, fl.skip_nonfinite(), train=EACH, loss=PARTS),
    "skip, tokens": case(SIX, train=EACH, loss=FEW_TOKENS),
    "skip in pieces": case(fl.microbatch(1), CLIP, train=loader, loss=FEW),
    "without one": case(without(7), SIX, train=partial(batches, 1), sharded=BOTH),
    "channels last": case(fl.channels_last(), TWO, model=convolutions),
    "bf16": case(fl.amp("bf16"), dtype=torch.float32, close=0.05, sharded=ON_2),
    "averages": case(
        fl.ema(0.9), fl.swa(0.5, every=2), kinds(), guard(3), doubled(), evaluated=True),
    "an average of a part": case(fl.ema(warming_up, only="0"), guard(3), CLIP, evaluated=True),
    "an average of a part by a rule, shards": case(
        fl.ema(warming_up, evaluate=False, only=["*.bias"]), TWO, sharded=ON_2),
    "scheduled": case(
        fl.scheduled(beta=fl.schedules.linear(min_ratio=0.1)), guard(3), TWO, loss=weighted,
        evaluated=True, sharded=ON_2),
    "the average alone": case(fl.ema(0.9, start=0.25, evaluate="only"), TWO, evaluated=True),
    "averages that are not evaluated": case(
        fl.ema(0.9, evaluate=False), fl.swa(0.5, every=2, evaluate=False), CLIP, evaluated=True,
        sharded=ON_2),
    "exchanged": case(loss=talking, train=RAGGED),
    "total": case(*TOTAL, evaluated=True, **PAIRS),
    "total, another path": case(untouched, *TOTAL, **PAIRS),
    "total, tokens": case(
        fl.accumulate(total=8), fl.schedule(fl.schedules.linear()), CLIP, loss=by_tokens, **PAIRS),
    "total, metrics": case(fl.accumulate(total=8), kinds(), evaluated=True, **PAIRS),
    "own": case(kinds(), CLIP, loss=own(entropy), evaluated=True),
    "own, tokens, accumulate": case(TWO, CLIP, loss=own(by_tokens)),
    "own, clip, accumulate": case(CLIP, TWO, loss=own(by_tokens), train=RAGGED),
    "own, pieces": case(fl.microbatch(2), fl.skip_nonfinite(), loss=own(by_tokens), train=RAGGED),
    "own, unused": case(loss=own(first_only), model=TwoLayers),
    "own, in turn": case(loss=own(in_turn), model=TwoLayers, train=loader, optimizer=sgd),
    "own, exchanged": case(loss=own(talking), train=RAGGED),
    "own, skip": case(SIX, guard(3), train=EACH, loss=own_but(lambda i: i >= 6 and i % 5 != 2)),
    "own, turns": case(
        EMA, loss=fl.alternate({"d": own(real_and_fake), "g": fl.pipeline(CLIP)(fooled)}),
        train=RAGGED, **GAN),
    "turns": case(EMA, loss=turns(order=("d", "d", "g")), train=RAGGED, **GAN),
    "turns, next": case(
        EMA, loss=turns([NEWEST], [CLIP], order=("d", "d", "g"), batch="next"), evaluated=True,
        train=loader, **GAN),
    "turns, next and same": case(
        EMA, loss=turns([NEWEST], [CLIP], order=("d", "d", "g"),
                        batch={"d": "next", "g": "same"}), train=RAGGED, **GAN),
    "turns, windows": case(
        EMA, loss=turns([TWO, NEWEST, CLIP], [TWO, fl.schedule(fl.schedules.linear())],
                        evaluate="g"), evaluated=True, train=RAGGED, **GAN),
    "turns, unequal windows": case(
        EMA, loss=turns([fl.accumulate(3)], [fl.sam(0.05)], batch="next"), train=RAGGED, **GAN),
    "turns, tokens": case(
        EMA, loss=turns(g_loss=fooled_by_tokens, order=("d", "d", "g")), train=loader, **GAN),
    "turns, guard": case(fl.ema(0.9), loss=turns([guard(2)], d_loss=by_tokens), **GAN),
}  # fmt: skip


def rows_on(n):
    """Return the names of the rows that run on n processes, each with whether it is sharded."""
    return [(name, s) for s in (False, True) for name in CASES if not s or n in CASES[name].sharded]


def table(folder):
    join()
    gc.freeze()  # each retry collects garbage: not all that was imported
    return {f"{name} {s}": said(lambda: train(CASES[name], s)) for name, s in rows_on(world())}


def train(case, sharded=False):
    with default_dtype(case.dtype):
        torch.manual_seed(0)
        model = case.model()
        if sharded:
            fully_shard(model)
        loss, parameters = case.loss, [*model.parameters()]
        if isinstance(loss, type):
            criterion = loss()
            loss = lambda m, batch: criterion(m(batch[0]), batch[1])
            parameters += criterion.parameters()
        handler = case.settings and utils.DistributedDataParallelKwargs(**case.settings)
        backend = handler and Accelerator(cpu=True, kwargs_handlers=[handler])
        state = fl.TrainState.create(model, case.optimizer(parameters), seed=3, backend=backend)
        loaders = {"train": case.train(), **({"valid": loader(size=5)} if case.evaluated else {})}
        moments = {"evaluate_every": case.evaluate_every, "record_every": case.record_every}
        step = fl.pipeline(*case.members)(loss)
        state = fl.fit(step, state, loaders, epochs=2, hooks=case.hooks, **moments)
        averages = [t for slot in ("ema", "swa") for t in state.slots.get(slot, {}).values()]
        weights = flat((*parameters, *averages))
    counters = state.step, state.epoch, state.batch, state.samples, state.skipped
    counters = [*counters, dict(state.updates), state.stop]
    history = [[r.epoch, r.step, r.items, r.metrics] for r in state.history]
    seconds = [r.seconds for r in state.history]
    return {"history": history, "seconds": seconds, "weights": weights, "counters": counters}


@pytest.mark.parametrize(("name", "sharded", "n"), [
    *((*row, 2) for row in rows_on(2)),
    *(pytest.param(*row, 3, marks=pytest.mark.long) for row in rows_on(3)),
])  # fmt: skip
def test_n_processes_train_as_one(launched, name, sharded, n):
    close, alone = CASES[name].close, launched(table, 1)[0][f"{name} False"]
    mine, *others = (found[f"{name} {sharded}"] for found in launched(table, n))
    assert isinstance(mine, dict) and isinstance(alone, dict), (mine, alone)
    assert all(other == mine for other in others)  # bit for bit, times included
    assert mine["counters"] == alone["counters"]
    assert difference(alone["weights"], mine["weights"]) < close
    assert [row[:3] for row in mine["history"]] == [row[:3] for row in alone["history"]]
    for (*_, expected), (*_, found) in zip(alone["history"], mine["history"], strict=True):
        assert found == pytest.approx(expected, rel=10 * close)


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_retry_in_one_process_makes_smaller_pieces_in_all(launched, n):
    """The last process runs out of memory with more than one sample."""
    found = launched(table, n)[0]
    assert found["retry False"]["weights"] == found["retry, by hand False"]["weights"]


def test_one_process_trains_as_a_loop_by_hand(launched):
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = network()
        optimizer = adamw(model.parameters())
        for batch in batches(BATCH) * 2:
            loss, _ = entropy(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses = [len(batch[0]) * entropy(model, batch)[0].item() for batch in batches(5)]
    (alone,) = launched(table, 1)
    for name in ("in order", "list", "generator", "stream", "batch sampler", "shares"):
        assert difference(flat(model.parameters()), alone[f"{name} False"]["weights"]) < 1e-12
    valid = alone["in order False"]["history"][-1][3]["valid/loss"]
    assert valid == pytest.approx(sum(losses) / SIZE, rel=1e-12)


@in_double
def by_plugin(folder):
    """Train a model that accelerate's FSDP 2 shards, which is made to do so on the CPU."""
    torch.manual_seed(0)
    model = network()
    plugin = utils.FullyShardedDataParallelPlugin(fsdp_version=2)
    found, optimizer = Accelerator(cpu=True, fsdp_plugin=plugin), adamw(model.parameters())
    create = lambda: fl.TrainState.create(model, optimizer, seed=3, backend=found)
    left_out = said(create)
    found.state.distributed_type, found.state.fsdp_plugin = utils.DistributedType.FSDP, plugin
    state = create()
    types = {type(p).__name__ for p in state.model.parameters()}
    state = fl.fit(fl.pipeline(CLIP)(entropy), state, loader(shuffle=True), epochs=2, hooks=())
    found.state.distributed_type = utils.DistributedType.DEEPSPEED
    return [left_out, sorted(types), flat(state.model.parameters()), said(create)]


def test_accelerates_fsdp(tmp_path, launched):
    alone = launched(table, 1)[0]["clip False"]["weights"]
    for ignored, types, weights, deepspeed in launch.results(tmp_path, 2, by_plugin):
        configured = "NotImplementedError: accelerate is configured for"
        assert ignored.startswith(f"{configured} FSDP, which it ignores")
        assert types == ["DTensor"] and difference(alone, weights) < 1e-12
        assert deepspeed.startswith(f"{configured} DEEPSPEED")
