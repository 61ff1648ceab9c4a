"""Data along one dimension of a mesh, whose rows each cut sequences into parts: as one process."""

import functools
import json
import math

import pytest
import torch
import torch.distributed as dist
from joined import come_to, in_double, logged, nearly, rank, said, world
from launch import reads, written_by
from process_problems import created as created_alone
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl

pytestmark = pytest.mark.slow
close = functools.partial(nearly, tolerance=1e-9)  # float64
SIZE, BATCH, LENGTH = 41, 8, 6  # samples; of an update; tokens. One row has padding at the end
SHAPES = {1: (1, 1), 2: (1, 2), 4: (2, 2)}  # of the mesh, by the number of processes


@functools.cache
def mesh():
    return init_device_mesh("cpu", SHAPES[world()], mesh_dim_names=("data", "context"))


def parts():
    """Return in how many parts a sequence is, and which of them this process has."""
    row = mesh()["context"] if world() > 1 else None
    return (1, 0) if row is None else (row.size(), row.get_local_rank())


def own(tensor):
    """Return this process's part of sequences."""
    n, part = parts()
    return tensor.chunk(n, dim=1)[part]


class Whole(torch.autograd.Function):
    """Puts the parts of sequences together; their gradients come from all parts of the row."""

    @staticmethod
    def forward(ctx, tensor):
        found = [torch.empty_like(tensor) for _ in range(parts()[0])]
        dist.all_gather(found, tensor.contiguous(), group=mesh()["context"].get_group())
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=mesh()["context"].get_group())
        return own(grad)


def whole(tensor):
    return Whole.apply(tensor) if parts()[0] > 1 else tensor


class Attention(nn.Module):
    """Each token attends to all tokens of its sequence, wherever they are."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x):
        query, key, value = self.into(x).chunk(3, dim=-1)
        return self.out(torch.softmax(query @ whole(key).mT, dim=-1) @ whole(value))


def samples():
    """Return sequences, labels, whether each token counts, and the index of the sequence."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, LENGTH, 4, generator=draw)
    y = torch.randint(3, (SIZE, LENGTH), generator=draw)
    lengths = torch.randint(1, LENGTH + 1, (SIZE, 1), generator=draw)  # a part may have no token
    return TensorDataset(x, y, torch.arange(LENGTH) < lengths, torch.arange(SIZE))


def loader(**settings):
    shares = mesh()["data"].size() if world() > 1 else 1
    return DataLoader(samples(), batch_size=BATCH // shares, **settings)


def entropy(model, batch):
    """The mean over the own tokens. Each sequence has as many in every part."""
    x, y = map(own, batch[:2])
    output = model(x)
    return nn.functional.cross_entropy(output.mT, y), {"output": output, "labels": y}


def by_tokens(model, batch):
    x, y, counts = map(own, batch[:3])
    output, tokens = model(x), counts.sum()
    losses = nn.functional.cross_entropy(output.mT, y, reduction="none") * counts
    loss = losses.sum() / tokens.clamp(min=1)
    return loss, {"weight": tokens, "output": output, "labels": y}


def right(aux, batch):
    """Return how many of the own tokens that count are right."""
    found = (aux["output"].argmax(-1) == aux["labels"]).double()
    if "weight" not in aux:
        return found.mean()
    return (found * own(batch[2])).sum() / aux["weight"].clamp(min=1)


def metrics():
    from torchmetrics.classification import MulticlassF1Score

    inputs = lambda aux, batch: (aux["output"].flatten(0, 1), aux["labels"].flatten())
    return fl.metric(
        right=right,
        tokens=lambda aux, batch: fl.Sum(aux["labels"].numel()),
        most=lambda aux, batch: fl.Max(aux["output"].max()),
        f1=fl.from_torchmetrics(MulticlassF1Score(3), inputs),
    )


def created(make=torch.optim.SGD, lr=0.5, shard=False, model=Attention, **settings):
    dealt = {"data": mesh()["data"]} if world() > 1 else {}
    optimizer = lambda parameters: make(parameters, lr=lr)
    return created_alone(shard, optimizer, model, **{**dealt, **settings})


def trained(loss, *middleware, state=None, hooks=(), **until):
    step = fl.pipeline(metrics(), *middleware, fl.throughput())(loss)
    loaders = {"train": loader(shuffle=True), "valid": loader()}
    items = lambda state, outputs: {"items": sum(float(out.weight) for out in outputs)}
    hooks = (fl.inspect(items), *hooks)
    state = fl.fit(step, state or created(), loaders, hooks=hooks, **until)
    records = [dict(record.metrics) for record in state.history]
    rates = [{k: row.pop(k) for k in [*row] if "throughput" in k} for row in records]
    counted = fl.reduce(state.metrics)["throughput/samples"].amount / state.backend.world_size
    found = come_to(state) | {"records": records, "items": [r.items for r in state.history]}
    return found | {"samples": counted, "rates": len(rates[0])}, step, state


@in_double
def train(folder):
    found = {"backend": [created().backend.data_rank, created().backend.data_size]}
    with logged() as lines:
        for loss in (entropy, by_tokens):
            found[loss.__name__], step, state = trained(loss, fl.clip(0.2), epochs=2)
            found[loss.__name__]["evaluated"] = fl.evaluate(step, state, loader())
        guess = lambda model, batch: (batch[-1], whole(model(own(batch[0]))))
        guesses = [*fl.predict(guess, state, loader())]
    found["logged"] = lines
    found["predicted"] = [int(i) for indices, _ in guesses for i in indices]
    found["outputs"] = torch.cat([output for _, output in guesses]).flatten().tolist()
    two = fl.accumulate(2), fl.grad_norm()
    hooks = (fl.checkpoint(folder / "run"),)
    adam = functools.partial(torch.optim.AdamW, weight_decay=0.1)
    start = created(adam, 0.01)
    state = trained(by_tokens, *two, state=start, steps=2, hooks=hooks)[2]
    found["accumulated"] = trained(by_tokens, *two, state=state, epochs=2)[0]
    again = fl.resume(folder / "run", created(adam, 9.0))
    found["resumed"] = trained(by_tokens, *two, state=again, epochs=2)[0]
    return found


@in_double
@reads(train, (4,))
def continued(folder):
    """Continue what a mesh of 2 x 2 has saved in the middle of an epoch."""
    run = written_by(train, 4, folder) / "run"
    facts = json.loads((fl.latest(run) / "state.json").read_text())
    state = fl.resume(run, created(torch.optim.AdamW, 9.0))
    found = trained(by_tokens, fl.accumulate(2), fl.grad_norm(), state=state, epochs=2)[0]
    return found | {"saved on": [facts["processes"], facts["data_shares"]]}


@in_double
def sharded(folder):
    """Shard the model over all processes of a mesh whose data are along its last dimension."""
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))
    globals()["mesh"] = lambda: wide
    made = lambda: created(shard=lambda model: fully_shard(model, mesh=wide._flatten()))
    hooks = (fl.checkpoint(folder / "run"),)
    found = trained(by_tokens, fl.clip(0.2), state=made(), hooks=hooks, epochs=2)[0]
    return found | {"resumed": come_to(fl.resume(folder / "run", made()))["weights"]}


@in_double
def dropping(folder):
    """Drop tokens of whole sequences before they are cut: on a mesh of 2 x 2, or 2 processes."""
    if world() == 2:
        globals()["parts"] = lambda: (1, 0)
    dealt = {"data": mesh()["data"]} if world() == 4 else {}

    def loss(model, batch):
        x, *others = batch
        return entropy(model, (nn.functional.dropout(x, 0.5), *others))

    wholes = DataLoader(samples(), batch_size=4, shuffle=True)
    state = created_alone(make=Attention, **dealt)
    return come_to(fl.fit(fl.pipeline()(loss), state, wholes, epochs=2, hooks=()))


@in_double
def streams(folder):
    """Read a stream for each row; then what one process reads in another order."""
    state, step = created(), fl.pipeline()(entropy)
    share, shares = state.backend.data_rank, state.backend.data_size
    shifted = [samples()[(i + (rank() == 1)) % SIZE] for i in range(SIZE)]

    def dealt(data):
        return fl.sharded(
            lambda: iter([*DataLoader(data, batch_size=BATCH // shares)][share::shares])
        )

    fit = lambda loader: fl.fit(step, created(), loader, hooks=())
    return {
        "right": come_to(fit(dealt(samples()))),
        "plain": come_to(fit(loader())),
        "other stream": said(lambda: fit(dealt(shifted))),
        "other order": said(lambda: fit(DataLoader(shifted, batch_size=BATCH))),
    }


@in_double
def refused(folder):
    def in_parts(model):
        wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        fully_shard(parallelize_module(model, wide["tensor"], plan), mesh=wide["data"])

    def nan_in_one(model, batch):
        loss, aux = entropy(model, batch)
        return loss * (math.nan if rank() == 1 and 17 in batch[-1] else 1), aux

    layers = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    column = lambda model: fully_shard(model, mesh=mesh()["data"])
    step, halt = fl.pipeline()(nan_in_one), fl.halt_on_nonfinite(keep=True)
    pair = DeviceMesh("cpu", [0, 1])
    found = {
        "no mesh": said(lambda: created(data="data")),
        "two dimensions": said(lambda: created(data=mesh())),
        "some processes": said(lambda: created(data=pair)),
        "tensor parallel": said(lambda: created(shard=in_parts, model=layers)),
        "one column": said(lambda: created(shard=column)),
        "exact": said(lambda: created(exact=True)),
        "stopped": fl.fit(step, created(), loader(), hooks=(halt,)).stop,
        "another": said(lambda: created_alone(make=Attention)),
    }
    retried = fl.pipeline(fl.retry_on_oom())(entropy)
    found["retried"] = said(lambda: fl.fit(retried, created(), loader(), hooks=()))
    return found


def test_parts_of_sequences_train_as_one_process_with_whole_ones(launched):
    [one] = launched(train, 1)
    assert one["entropy"]["items"] == [41, 82] and one["entropy"]["samples"] == 41
    assert one["predicted"] == [*range(SIZE)]
    shares = {2: [[0, 1], [0, 1]], 4: [[0, 2], [0, 2], [1, 2], [1, 2]]}
    for n in (2, 4):
        every = launched(train, n)
        assert [mine.pop("backend") for mine in every] == shares[n]
        for mine in every:
            assert mine == every[0]  # not even a bit
            assert mine["resumed"] == mine["accumulated"]
        for name in every[0]:
            assert close(every[0][name], one[name]), (n, name)


@pytest.mark.long
def test_a_run_continues_on_another_mesh_and_on_one_process(launched):
    [one] = launched(train, 1)
    for n in (1, 2):
        for mine in launched(continued, n):
            assert mine.pop("saved on") == [4, 2]
            assert close(mine, one["accumulated"])


def test_a_model_sharded_over_all_processes_trains_as_one_process(launched):
    [one] = launched(train, 1)
    for mine in launched(sharded, 4):
        assert close(mine.pop("resumed"), one["by_tokens"]["weights"])
        assert all(close(mine[name], one["by_tokens"][name]) for name in mine)


@pytest.mark.long
def test_processes_of_a_row_draw_the_same(launched):
    two = launched(dropping, 2)
    assert all(close(mine, two[0]) for mine in (*two, *launched(dropping, 4)))


@pytest.mark.long
def test_processes_of_a_row_must_read_the_same(launched):
    for mine in (*launched(streams, 2), *launched(streams, 4)):
        assert close(mine["right"], mine["plain"])
        stream, order = mine["other stream"], mine["other order"]
        assert "processes 0 and 1 have the same share of the data, and have read" in stream
        assert "another order, or other data: process 0 and process 1 have read" in order


REFUSED = {
    "no mesh": 'TypeError: TrainState.create expects data as a dimension of a mesh, mesh["data"]',
    "two dimensions": "ValueError: data expects one dimension of a mesh",
    "some processes": "ValueError: data expects one dimension of a mesh of all 4 processes",
    "tensor parallel": "NotImplementedError: the mesh of this model, which parallelize_module has",
    "one column": "NotImplementedError: this model is sharded over meshes of [2] of 4 processes",
    "exact": "NotImplementedError: exact=True sums the gradients of whole batches, and with",
    "another": "NotImplementedError: this model shares the data among 4 processes, and another",
    "retried": "NotImplementedError: retry_on_oom cannot repeat a forward in which",
}


def test_what_makes_no_sense_is_refused_in_every_process(launched):
    for mine in launched(refused, 4):
        assert mine.pop("stopped").endswith("batch 4, samples 16, 17, 18, 19, 20, 21, 22, 23)")
        assert mine.keys() == REFUSED.keys()
        assert all(mine[name].startswith(begin) for name, begin in REFUSED.items())
