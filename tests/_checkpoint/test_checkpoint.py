"""What a checkpoint holds, and that a run goes on from it to the bit."""

import json
import math
import pickle
import random
import shutil
import signal
import threading
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fnloop as fl
from fnloop import schedules
from fnloop._checkpoint import files
from fnloop._core.serialize import decode, encode
from fnloop.testing import Toy, assert_same, small, stochastic, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def stop_at(n):
    return fl.when(lambda state: state.step + state.skipped == n)(
        lambda state: attrs.evolve(state, stop="here")
    )


# --- every split of a run


class Augmented(Dataset):
    """Twenty samples, with noise from every generator there is."""

    def __init__(self):
        self.x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self):
        return 20

    def __getitem__(self, i):
        noise = torch.rand(6) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1
        return self.x[i] + noise, self.x[i].sum(0, keepdim=True).sin()


def net():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    ).double()


def mixing(model, batch):
    """A loss function that draws from python and numpy too."""
    x, y = batch
    lam = np.random.beta(0.4, 0.4) if random.random() < 0.5 else 1.0
    output = model(lam * x + (1 - lam) * x.roll(1, 0))
    return nn.functional.mse_loss(output.double(), y), {"output": output}


def halves(model, batch):
    x, y = batch
    output = model(x.float())
    return nn.functional.mse_loss(output.float(), y.float()), {"output": output}


def largest(aux, batch):
    return fl.Max(aux["output"].max())


def one_cycle(optimizer, run):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)


def loader(**kwargs):
    return DataLoader(
        Augmented(), **{"batch_size": 3, "shuffle": True, **kwargs}
    )  # 7 batches, the last of 2


def streamed():
    generator = loader()
    for i in range(7):
        yield (
            generator.dataset.x[3 * i : 3 * i + 3] + torch.rand(1),
            torch.ones(min(3, 20 - 3 * i), 1, dtype=torch.float64),
        )


VALID = list(loader(shuffle=False))[:2]
RUNS = {
    "plain": (fl.pipeline(), mixing, loader()),
    "workers": (fl.pipeline(), mixing, loader(num_workers=2)),
    "persistent workers": (
        fl.pipeline(fl.clip(0.1)),
        mixing,
        loader(num_workers=1, persistent_workers=True),
    ),
    "clip and schedule": (
        fl.pipeline(fl.clip(0.1), fl.schedule(schedules.cosine(warmup=3))),
        mixing,
        loader(),
    ),
    "torch scheduler": (
        fl.pipeline(fl.torch_scheduler(one_cycle), fl.clip_value(0.1)),
        mixing,
        loader(),
    ),
    "bf16": (fl.pipeline(fl.amp("bf16"), fl.metric(largest=largest)), mixing, loader()),
    "fp16": (fl.pipeline(fl.amp("fp16", init_scale=2.0**18, growth_interval=3)), halves, loader()),
    "fp16 that skips, under a schedule of the whole run": (
        fl.pipeline(fl.amp("fp16", init_scale=2.0**18), fl.schedule(schedules.cosine(warmup=3))),
        halves,
        loader(),
    ),
    "generator function": (fl.pipeline(fl.schedule(schedules.exponential(0.9))), mixing, streamed),
    "list": (fl.pipeline(fl.clip(0.1)), mixing, list(loader(shuffle=False))),
    "accumulated": (
        fl.pipeline(fl.accumulate(2), fl.clip(0.1), fl.schedule(schedules.linear())),
        mixing,
        loader(),
    ),
    "accumulated, workers, fp16": (
        fl.pipeline(fl.amp("fp16", init_scale=2.0**18), fl.accumulate(3)),
        halves,
        loader(num_workers=1),
    ),
}


@pytest.mark.parametrize(("pipe", "loss_fn", "data"), RUNS.values(), ids=RUNS)
def test_a_run_resumed_at_any_split_equals_one_that_was_never_stopped(
    tmp_path, pipe, loss_fn, data
):
    def new(seed):
        torch.manual_seed(seed)
        model = net().float() if loss_fn is halves else net()
        return fl.TrainState.create(
            model, torch.optim.AdamW(model.parameters(), lr=0.02), seed=seed
        )

    def go_on(state, stop=10**6):
        make = pipe(loss_fn)
        return fl.fit(make, state, (data, VALID), epochs=3, hooks=(stop_at(stop),))

    whole = go_on(new(0))
    updates = whole.step + whole.skipped
    assert updates == 3 * math.ceil(7 / pipe(loss_fn).window)
    for split in range(1, updates):
        paused = go_on(new(0), split)
        assert paused.step + paused.skipped == split
        restored = fl.restore(
            fl.save(paused, tmp_path / "state"), new(99)
        )  # a new model, of another seed
        assert restored.stop == "here"
        later = go_on(attrs.evolve(restored, stop=None), split + 2)  # and a resume of a resume
        if later.stop and split + 2 < updates:
            later = fl.restore(fl.save(later, tmp_path / "state"), new(98))
        assert_same(go_on(attrs.evolve(later, stop=None)), whole)


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (5, 2), (20, 1), (3, 2)])
def test_another_batch_size_or_number_of_workers_trains_the_samples_that_are_left(
    tmp_path, size, workers
):
    seen = []

    def watch(model, batch):
        x, y = batch
        seen.extend(y.flatten().tolist())
        return model(x).mean()

    def new():
        torch.manual_seed(0)
        model = net()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)

    make = fl.pipeline()(watch)
    fl.fit(make, new(), loader(), epochs=2, hooks=())
    order, seen = seen, []
    state = fl.fit(make, new(), loader(), steps=2, hooks=())
    assert (state.batch, state.samples) == (2, 6)
    state = fl.restore(fl.save(state, tmp_path / "a"), new())
    other = loader(batch_size=size, num_workers=workers)
    state = fl.fit(make, state, other, steps=3, hooks=())
    state = fl.restore(fl.save(state, tmp_path / "a"), new())
    fl.fit(make, state, loader(), epochs=2, hooks=())
    assert (
        sorted(seen[:20])
        == sorted(order[:20])
        == sorted(torch.stack([y for _, y in Augmented()]).flatten().tolist())
    )
    assert seen == order


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(8):
            yield torch.tensor([i + torch.rand(()).item() + random.random() + np.random.rand()])


class Negated(DataLoader):
    def __iter__(self):
        return map(torch.neg, super().__iter__())


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(), batch_size=2, num_workers=1, persistent_workers=True),
        lambda: Negated(torch.arange(8.0), batch_size=2, shuffle=True),
        lambda: Negated(
            torch.arange(8.0),
            batch_size=2,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        ),
    ],
    ids=["persistent workers of a stream", "own iter", "own iter and generator"],
)
def test_loaders_that_are_iterated_resume_in_a_later_epoch(tmp_path, make):
    order = fl.pipeline()(
        lambda model, batch: ((model.w * batch.double()).mean() + model.w**2, {"weight": 1})
    )
    whole = fl.fit(order, toy(lr=0.1), make(), epochs=2, hooks=())
    half = fl.fit(order, toy(lr=0.1), make(), steps=6, hooks=())
    resumed = fl.restore(fl.save(half, tmp_path / "a"), toy())
    assert_same(fl.fit(order, resumed, make(), epochs=2, hooks=()), whole)


def test_a_larger_batch_size_that_leaves_nothing_of_an_epoch_closes_it(tmp_path):
    make = fl.pipeline()(lambda model, batch: model.w * batch[1].mean())
    state = fl.fit(make, toy(), loader(), steps=6, hooks=())
    assert (state.batch, state.samples) == (6, 18)
    state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    state = fl.fit(
        make, state, loader(batch_size=4, drop_last=True), epochs=2, hooks=()
    )  # 2 of 20 samples are left
    assert (state.step, state.epoch, state.batch, [r.closing for r in state.history]) == (
        6 + 5,
        2,
        0,
        [True, False, False],
    )


def test_an_epochs_end_is_one_state(tmp_path):
    state = fl.fit(step, toy(), [ONE] * 3, epochs=1, hooks=())
    state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    assert (state.step, state.epoch, state.batch) == (3, 1, 0)
    state = fl.fit(step, state, [ONE] * 3, epochs=2, hooks=())
    assert (state.step, len(state.history)) == (6, 2)


def test_resuming_a_finished_run_does_nothing(tmp_path):
    hooks = (fl.checkpoint(tmp_path),)
    fl.fit(step, toy(), [ONE] * 3, epochs=2, hooks=hooks)
    state = fl.fit(step, fl.resume(tmp_path, toy()), [ONE] * 3, epochs=2, hooks=hooks)
    assert (state.step, state.model.w.item()) == (6, -6.0)


# --- every optimizer


OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3, "history_size": 4},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS.items())
def test_the_state_of_every_optimizer_is_kept(tmp_path, name, settings):
    problem = small()
    make = fl.pipeline()(problem.loss_fn)

    def new():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)
        ).double()
        return fl.TrainState.create(
            model, getattr(torch.optim, name)(model.parameters(), **settings), seed=0
        )

    whole = fl.fit(make, new(), problem.batches, epochs=2, hooks=())
    paused = fl.fit(make, new(), problem.batches, steps=5, hooks=())
    resumed = fl.restore(fl.save(paused, tmp_path / "a"), new())
    assert_same(fl.fit(make, resumed, problem.batches, epochs=2, hooks=()), whole)


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own, from SequentialLR
@pytest.mark.parametrize(
    "factory",
    [
        lambda opt, run: lr_scheduler.LambdaLR(opt, lambda i: 0.5**i),
        lambda opt, run: lr_scheduler.SequentialLR(  # MultiStepLR keeps a Counter
            opt,
            [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.MultiStepLR(opt, [1, 3, 3, 4])],
            milestones=[2],
        ),
    ],
    ids=["LambdaLR", "SequentialLR"],
)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_schedulers_of_torch_resume_also_with_a_tensor_as_learning_rate(tmp_path, factory, lr):
    problem = small()
    make = fl.pipeline(fl.torch_scheduler(factory))(problem.loss_fn)

    def new():
        model = problem.state().model
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        return fl.TrainState.create(
            model, torch.optim.AdamW(model.parameters(), lr=rate, foreach=False), seed=0
        )

    whole = fl.fit(make, new(), problem.batches, epochs=3, hooks=())
    for split in (1, 3, 5):
        half = fl.fit(make, new(), problem.batches, steps=split, hooks=())
        resumed = fl.restore(fl.save(half, tmp_path / "a"), new())
        assert_same(fl.fit(make, resumed, problem.batches, epochs=3, hooks=()), whole)


def test_lbfgs_reaches_the_minimum_of_a_quadratic_in_one_update():
    model = Toy(w=5.0)
    state = fl.TrainState.create(
        model, torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    )
    make = fl.pipeline()(lambda model, batch: (model(batch) - 3).square().mean())
    state, out = make(state, ONE)
    assert state.model.w.item() == pytest.approx(3.0)
    assert (out.loss.item(), state.step) == (4.0, 1)


def test_sparse_adam(tmp_path):
    def new():
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        return fl.TrainState.create(model, torch.optim.SparseAdam(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).square().mean())
    data = [torch.tensor([0, 1]), torch.tensor([1, 4])]
    whole = fl.fit(make, new(), data, epochs=2, hooks=())
    half = fl.restore(fl.save(fl.fit(make, new(), data, steps=3, hooks=()), tmp_path / "a"), new())
    assert_same(fl.fit(make, half, data, epochs=2, hooks=()), whole)


def test_groups_schedules_and_parameters_of_the_loss_are_kept(tmp_path):
    def new():
        torch.manual_seed(0)
        model, scale = nn.Linear(1, 1), nn.Parameter(torch.zeros(()))
        groups = [
            {"params": [model.weight], "lr": 0.5},
            {"params": [model.bias, scale], "lr": 0.25},
        ]
        return fl.TrainState.create(
            model, torch.optim.SGD(groups, lr=1.0, momentum=0.9), seed=0
        ), scale

    def fit(state, scale, **kwargs):
        make = fl.pipeline(fl.schedule(schedules.exponential(0.5)))(
            lambda m, b: (m(b) * (scale + 1)).mean()
        )
        return fl.fit(make, state, [torch.ones(1, 1)] * 4, hooks=(), **kwargs)

    state, scale = new()
    whole = fit(state, scale)
    state, other = new()
    path = fl.save(fit(state, other, steps=2), tmp_path / "a")
    state, third = new()
    resumed = fit(fl.restore(path, state), third)
    assert_same(resumed, whole)
    assert torch.equal(third, scale) and scale.item() != 0
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [0.5 / 8, 0.25 / 8]


# --- what is in the files


def test_the_weights_load_into_the_plain_module_without_fnloop(tmp_path):
    problem = stochastic()
    state = fl.fit(fl.pipeline()(problem.loss_fn), problem.state(), problem.batches, hooks=())
    fl.save(state, tmp_path / "a")
    plain = problem.model()
    plain.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    for mine, theirs in zip(
        plain.state_dict().values(), state.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_wrappers_leave_no_prefix(tmp_path):
    state = toy(w=3.0)
    wrapped = nn.Module()
    wrapped._orig_mod = state.model
    fl.save(attrs.evolve(state, model=wrapped), tmp_path / "a")
    assert list(load_file(tmp_path / "a" / "model.safetensors")) == ["w"]


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # torch's own, from what it imports
def test_compiled_submodules_leave_no_prefix_and_restore_into_plain_ones_and_back(tmp_path):
    def new(compiled):
        inner = nn.Linear(2, 2)
        model = nn.Sequential(torch.compile(inner) if compiled else inner)
        return fl.TrainState.create(model, torch.optim.AdamW(model.parameters()))

    for saved, given in ((True, False), (False, True), (True, True)):
        state = new(saved)
        path = fl.save(state, tmp_path / "a")
        assert sorted(load_file(path / "model.safetensors")) == ["0.bias", "0.weight"]
        assert "_orig_mod" not in (path / "state.json").read_text()
        restored = fl.restore(path, new(given))
        for mine, theirs in zip(restored.model.parameters(), state.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_tied_views_and_empty_tensors_are_kept(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("part", torch.arange(9.0).view(3, 3).t()[:, 1])
            self.register_buffer("none", torch.empty(0))

    def new():
        model = Tied()
        return fl.TrainState.create(model, torch.optim.Adam(model.parameters()))

    state = new()
    restored = fl.restore(fl.save(state, tmp_path / "a"), new())
    assert restored.model.a.weight is restored.model.b.weight
    assert torch.equal(restored.model.a.weight, state.model.a.weight)
    assert restored.model.part.tolist() == [3.0, 4.0, 5.0]


def test_extra_state_of_a_module_is_kept(tmp_path):
    class Counts(Toy):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen, "worst": math.inf}

        def set_extra_state(self, extra):
            self.seen, self.worst = extra["seen"], extra["worst"]

    def new():
        model = Counts()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    state = new()
    state.model.seen = 7
    restored = fl.restore(fl.save(state, tmp_path / "a"), new())
    assert (restored.model.seen, restored.model.worst) == (7, math.inf)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"seen": t}], ids=["tensor", "mapping"])
def test_tensors_in_the_extra_state_of_a_module_are_kept(tmp_path, wrap):
    class Counts(Toy):
        extra = wrap(torch.zeros(2))

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, extra):
            self.extra = extra

    def new():
        model = Counts()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    state = new()
    state.model.extra = wrap(torch.tensor([1.0, 2.0]))
    extra = fl.restore(fl.save(state, tmp_path / "a"), new()).model.extra
    assert (extra["seen"] if isinstance(extra, dict) else extra).tolist() == [1.0, 2.0]


def test_frozen_parameters_and_modules_in_evaluation_mode_come_back_with_a_whole_state_only(
    tmp_path,
):
    def new():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def flags(state):
        return (
            state.model[0].weight.requires_grad,
            state.model[0].bias.requires_grad,
            [m.training for m in state.model.modules()],
        )

    state = new()
    state.model[0].weight.requires_grad_(False)
    state.model[1].eval()
    path = fl.save(state, tmp_path / "a")
    assert flags(fl.restore(path, new())) == (False, True, [True, True, False])
    assert flags(fl.restore(path, new(), only=("model",))) == (True, True, [True, True, True])
    back = new()
    back.model[1].eval()
    back.model[0].bias.requires_grad_(False)
    assert flags(fl.restore(fl.save(new(), tmp_path / "b"), back)) == (
        True,
        True,
        [True, True, True],
    )


def test_floats_of_the_history_come_back_to_the_bit(tmp_path):
    values = {"a": 0.1 + 0.2, "b": math.nan, "c": -math.inf, "d": 5e-324, "e": -0.0}
    state = attrs.evolve(toy(), history=fl.History().append(fl.Record(1, 2, values, 0.3)))
    restored = fl.restore(fl.save(state, tmp_path / "a"), toy())
    assert restored.history == state.history
    assert restored.history[0].seconds == 0.3
    assert [v.hex() for v in restored.history[0].metrics.values()] == [
        v.hex() for v in values.values()
    ]


def test_a_person_can_read_the_facts(tmp_path):
    fl.save(fl.fit(step, toy(), [ONE] * 3, steps=2, hooks=()), tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "slots.safetensors",
        "state.json",
    ]
    facts = json.loads((tmp_path / "a" / "state.json").read_text())
    assert (facts["step"], facts["batch"], facts["format_version"]) == (2, 2, 1)


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something was pickled")

    problem = stochastic()
    make = fl.pipeline(fl.amp("bf16"), fl.torch_scheduler(one_cycle), fl.metric(largest=largest))(
        problem.loss_fn
    )
    state = fl.fit(make, problem.state(), problem.batches, epochs=2, hooks=(stop_at(3),))
    for module, name in (
        (pickle, "dumps"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
        (torch, "save"),
    ):
        monkeypatch.setattr(module, name, never)
    path = fl.save(state, tmp_path / "a")
    fl.fit(
        make,
        attrs.evolve(fl.restore(path, problem.state()), stop=None),
        problem.batches,
        epochs=2,
        hooks=(),
    )
    starts = {file.name: file.read_bytes()[:2] for file in path.iterdir()}
    assert not {b"PK", b"\x80\x02", b"\x80\x04"} & set(starts.values()), starts


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**63,
        0.1,
        math.inf,
        "text",
        [1, [2.0]],
        (1, (2,)),
        {"a": {"b": 1}},
        {1: "int key", (2, 3): "tuple key"},
        {"$tensor": "not one"},
        frozenset({1, 2}),
        np.float32(0.5),
    ],
    ids=repr,
)
def test_plain_data_survives(value):
    tensors = {}
    text = json.dumps(encode(value, tensors, "x"), allow_nan=False)
    assert decode(json.loads(text), tensors) == value


def test_extras_of_the_user_are_kept(tmp_path):
    extra = {
        "config": {"layers": 3, "lr": 0.1},
        "vocabulary": ["a", "b"],
        "mean": torch.tensor([0.5]),
    }
    restored = fl.restore(fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a"), toy())
    assert restored.extra["config"] == extra["config"] and restored.extra["mean"].tolist() == [0.5]


def test_extras_whose_paths_are_spelled_alike_are_all_kept(tmp_path):
    extra = {
        "a.b": np.array([1, 2]),
        "a": {"b": np.array([3.0])},
        "b": torch.ones(1),
        "b~0": torch.zeros(1),
    }
    restored = fl.restore(fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a"), toy()).extra
    assert (restored["a.b"].tolist(), restored["a"]["b"].tolist()) == ([1, 2], [3.0])
    assert (restored["b"].item(), restored["b~0"].item()) == (1.0, 0.0)


def test_a_conjugate_keeps_its_value(tmp_path):
    number = torch.tensor([1 + 2j])
    extra = {"conjugate": number.conj(), "negative": number.conj().imag}
    restored = fl.restore(fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a"), toy()).extra
    assert (restored["conjugate"].tolist(), restored["negative"].tolist()) == ([1 - 2j], [-2.0])


Pair = namedtuple("Pair", ["x", "y"])


@attrs.frozen
class Part:
    total: torch.Tensor
    count: int = 0


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("slots", {"mine": Pair(1, 2)}, r"slots\.mine is a Pair, a named tuple"),
        (
            "extra",
            {"mine": Part(torch.ones(1))},
            "extra holds an object, which could not be reconstructed",
        ),
        (
            "extra",
            {"mine": [Part(torch.ones(1))]},
            "extra holds an object, which could not be reconstructed",
        ),
    ],
)
def test_what_would_not_come_back_as_it_was_is_refused(tmp_path, where, value, message):
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(attrs.evolve(toy(), **{where: value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_is_a_list_of_records_comes_back(tmp_path):
    def summing(inner):
        def summed(state, batch):
            state, out = inner(state, batch)
            parts = [
                Part(part.total + i, part.count + 1) for i, part in enumerate(state.slots["parts"])
            ]
            return attrs.evolve(state, slots={**state.slots, "parts": parts}), out

        return summed

    member = fl.Middleware(
        "parts", update=summing, init=lambda state: [Part(torch.zeros(())), Part(torch.zeros(()))]
    )
    make = fl.pipeline(member)(toy_loss)
    half = fl.fit(make, toy(), [ONE] * 4, steps=2, hooks=())
    state = fl.fit(make, fl.restore(fl.save(half, tmp_path / "a"), toy()), [ONE] * 4, hooks=())
    assert state.slots["parts"] == [Part(torch.tensor(0.0), 4), Part(torch.tensor(4.0), 4)]


def test_a_metric_of_the_user_is_not_taken_for_ours_of_the_same_name(tmp_path):
    @attrs.frozen
    class Max:
        """The largest in size."""

        value: torch.Tensor

        def combine(self, other):
            return self if self.value.abs() > other.value.abs() else other

        def compute(self):
            return float(self.value)

    make = fl.pipeline(fl.metric(m=lambda aux, batch: Max(batch.min())))(toy_loss)
    data = [torch.tensor([x]) for x in (-5.0, 1.0, 2.0, 3.0)]
    half = fl.fit(make, toy(), data, steps=2, hooks=())
    state = fl.fit(make, fl.restore(fl.save(half, tmp_path / "a"), toy()), data, hooks=())
    assert state.history["train/m"] == (-5.0, -5.0)  # the first is of the closing record


def around_itself():
    made = {}
    made["again"] = made
    return made


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (None, "extra must be a mapping; it is None"),
        ([1], r"extra must be a mapping; it is \[1\]"),
        (around_itself(), "extra holds something that contains itself"),
        ({"a": {"b": "\ud800"}}, r"extra\.a\.b has a str with a lone surrogate"),
        ({"a": {"\ud800": 1}}, r"extra\.a has a str with a lone surrogate"),
        ({"a": signal.SIGINT}, r"extra\.a is a Signals, an enum"),
    ],
    ids=["None", "a list", "itself", "a surrogate", "a surrogate as a key", "an enum"],
)
def test_what_is_wrong_with_extra_is_said(tmp_path, extra, message):
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_tampered_with_is_found_before_the_first_update(tmp_path):
    """The checksums are right; what is in it is not what these middleware keep."""
    make = fl.pipeline(fl.amp("fp16"))(toy_loss)
    state = fl.fit(make, toy(), [ONE] * 4, steps=2, hooks=())
    longer = attrs.evolve(state, slots={"amp": type(state.slots["amp"])(torch.ones(3), 0)})
    restored = fl.restore(fl.save(longer, tmp_path / "a"), toy())
    with pytest.raises(
        ValueError,
        match=r"a tensor of .* with 1 dimensions where there is one of .* with 0 dimensions",
    ):
        fl.fit(make, restored, [ONE] * 4, hooks=())
    wrong = attrs.evolve(
        fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=()), metrics={"loss": fl.Sum(torch.ones(()))}
    )
    path = fl.save(wrong, tmp_path / "b")
    text = (path / "state.json").read_text().replace('"value": {', '"value": "x", "other": {')
    (path / "state.json").write_text(text)
    refused(crafted(path), toy(), "cannot be restored: TypeError: a fnloop.Sum holds")


@pytest.mark.parametrize(
    ("where", "value"), [("extra", {"f": print}), ("slots", {"mine": object()})]
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, where, value):
    with pytest.raises(
        fl.CheckpointError, match=rf"cannot be saved: {where}\.\w+ is a .*Keep plain data"
    ):
        fl.save(attrs.evolve(toy(), **{where: value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_slots_of_records_and_objects_wait_for_their_middleware(tmp_path):
    @attrs.frozen
    class Average:
        weights: torch.Tensor
        count: int = 0

    def averaging(decay):
        def wrap(inner):
            def averaged(state, batch):
                state, out = inner(state, batch)
                kept = state.slots["average"]
                new = Average(
                    kept.weights * decay + state.model.w.detach() * (1 - decay), kept.count + 1
                )
                return attrs.evolve(state, slots={**state.slots, "average": new}), out

            return averaged

        return fl.Middleware(
            "average", update=wrap, init=lambda state: Average(state.model.w.detach().clone())
        )

    make = fl.pipeline(averaging(0.5))(toy_loss)
    whole = fl.fit(make, toy(), [ONE] * 4, hooks=())
    half = fl.fit(make, toy(), [ONE] * 4, steps=2, hooks=())
    restored = fl.restore(fl.save(half, tmp_path / "a"), toy())
    again = fl.restore(fl.save(restored, tmp_path / "b"), toy())  # before any middleware has met it
    resumed = fl.fit(make, again, [ONE] * 4, hooks=())
    assert resumed.slots["average"] == whole.slots["average"] == Average(torch.tensor(-3.0625), 4)


def test_a_slot_of_another_kind_is_named(tmp_path):
    half = fl.fit(fl.pipeline(fl.amp("fp16"))(toy_loss), toy(), [ONE] * 4, steps=2, hooks=())
    restored = fl.restore(fl.save(half, tmp_path / "a"), toy())
    other = fl.Middleware("amp", init=lambda state: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has a LossScale where there is a Linear now"):
        fl.fit(fl.pipeline(other)(toy_loss), restored, [ONE] * 4, hooks=())


def test_running_torchmetrics_are_kept(tmp_path):
    classification = pytest.importorskip("torchmetrics.classification")

    def f1():
        metric = classification.MulticlassF1Score(3, average="macro", validate_args=False)
        return fl.metric(
            f1=fl.from_torchmetrics(metric, lambda aux, batch: (aux["output"], batch[1]))
        )

    torch.manual_seed(0)
    data = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (5, 2, 4)]

    def new():
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)

    make = lambda: fl.pipeline(f1())(fl.supervised(nn.CrossEntropyLoss()))
    whole = fl.fit(make(), new(), data, hooks=())
    half = fl.restore(
        fl.save(fl.fit(make(), new(), data, steps=2, hooks=()), tmp_path / "a"), new()
    )
    assert_same(fl.fit(make(), half, data, hooks=()), whole)


def test_once_stays_once_after_a_resume(tmp_path):
    said = []

    def say(state):
        said.append(state.step)
        return state

    hooks = (fl.once(say),)
    state = fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=hooks)
    fl.fit(step, fl.restore(fl.save(state, tmp_path / "a"), toy()), [ONE] * 4, hooks=hooks)
    assert said == [1]


# --- restoring: errors, parts


def test_restoring_makes_the_given_state_stale(tmp_path):
    given = toy()
    fl.restore(fl.save(toy(w=3.0), tmp_path / "a"), given)
    with pytest.raises(fl.StaleStateError):
        step(given, ONE)


def linear_state(n=2, **kwargs):
    model = nn.Linear(n, 1, **kwargs)
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def refused(path, state, message, **kwargs):
    """Check that a restore is refused and leaves the state as it was."""
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state, **kwargs)
    assert_same(state, before)


def test_a_module_that_refuses_its_extra_state_stays_as_it_was(tmp_path):
    class Refuses(Toy):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, extra):
            raise ValueError("not mine") if extra == {"a": 1} and self.w.item() == 3.0 else None

    def new(w):
        model = Refuses(w)
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    state = new(7.0)
    with pytest.raises(fl.CheckpointError, match="cannot be restored: ValueError: not mine"):
        fl.restore(fl.save(new(3.0), tmp_path / "a"), state)
    assert state.model.w.item() == 7.0


@pytest.mark.parametrize("saved", [torch.tensor([0.1, 0.2]), torch.tensor([0.1])])
def test_a_learning_rate_of_another_shape_is_refused(tmp_path, saved):
    def new(w, lr):
        state = toy(w)
        state.optimizer.param_groups[0]["lr"] = lr
        return state

    path = fl.save(new(3.0, saved), tmp_path / "a")
    for here in (torch.tensor(0.1), torch.tensor([0.1, 0.2, 0.3])):
        if saved.numel() > 1 or here.ndim == 0:  # one number fits into any vector
            refused(path, new(7.0, here), "lr of a parameter group|cannot be restored")


def test_the_optimizers_state_of_parameters_of_another_shape_is_refused(tmp_path):
    refused(
        fl.save(linear_state(2), tmp_path / "a"),
        linear_state(3),
        r"weight: \(1, 2\) saved, \(1, 3\) here",
        only=("optimizer",),
    )


def test_a_restore_that_is_not_strict_takes_all_of_a_checkpoint_that_matches(tmp_path):
    problem = small()
    make = fl.pipeline()(problem.loss_fn)

    def new():
        model = problem.state().model
        return fl.TrainState.create(
            model, torch.optim.Adafactor(model.parameters(), lr=0.01), seed=0
        )

    whole = fl.fit(make, new(), problem.batches, epochs=2, hooks=())
    half = fl.fit(make, new(), problem.batches, steps=3, hooks=())
    resumed = fl.restore(fl.save(half, tmp_path / "a"), new(), strict=False)
    assert_same(fl.fit(make, resumed, problem.batches, epochs=2, hooks=()), whole)


def test_another_dtype_is_refused_and_weights_alone_are_cast(tmp_path):
    def double():
        model = Toy().double()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    path = fl.save(toy(w=3.0), tmp_path / "a")
    refused(path, double(), "of another dtype: w: torch.float32 saved, torch.float64 here")
    w = fl.restore(path, double(), only=("model",)).model.w
    assert (w.item(), w.dtype) == (3.0, torch.float64)


def crafted(path, manifest=None, facts=None):
    """Let somebody change a checkpoint, and write the checksums that go with it."""
    made = json.loads((path / "manifest.json").read_text())
    del made["check"]
    if facts:
        state = json.loads((path / "state.json").read_text())
        facts(state)
        (path / "state.json").write_text(json.dumps(state))
    file = path / "state.json"
    made["files"]["state.json"] = {
        "bytes": file.stat().st_size,
        "sha256": files.checksum_of_file(file),
    }
    if manifest:
        manifest(made)
    (path / "manifest.json").write_text(
        json.dumps({**made, "check": files.checksum_of_manifest(made)})
    )
    return path


MANIFESTS = {
    "format": lambda path: crafted(path, lambda made: made.update(format_version="1")),
    "no format": lambda path: crafted(path, lambda made: made.pop("format_version")),
    "measured": lambda path: crafted(path, lambda made: made.update(measured=[])),
    "position": lambda path: crafted(path, lambda made: made.update(position=["x"])),
    "files": lambda path: crafted(path, lambda made: made.update(files=3)),
    "a list": lambda path: (path / "manifest.json").write_text("[]"),
    "deep": lambda path: (path / "manifest.json").write_text("[" * 200_000 + "]" * 200_000),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_says_strange_things_is_refused_and_passed_over(tmp_path, change):
    fl.fit(
        step,
        toy(),
        [ONE] * 2,
        hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path, best="train/loss")),),
    )
    change(tmp_path / "step-00000002")
    refused(tmp_path / "step-00000002", toy(), "damaged")
    for find in (fl.latest, fl.best):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert (found := find(tmp_path)) is None or found.name == "step-00000001"
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert fl.latest(tmp_path).name == "step-00000001"
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert fl.resume(tmp_path, toy()).step == 1


FACTS = {
    "step": lambda state: state.update(step="x"),
    "batch": lambda state: state.update(batch=-3),
    "no seed": lambda state: state.pop("seed"),
    "stop": lambda state: state.update(stop=3),
    "extra": lambda state: state.update(extra=[1]),
    "metrics": lambda state: state.update(metrics={"loss": 5}),
    "slots": lambda state: state.update(slots={"a": {"$tensor": "not there"}}),
    "lr": lambda state: state["optimizer"]["param_groups"][0].update(lr="evil"),
    "optimizer": lambda state: state["optimizer"].update(state={"w": 3}),
    "generators": lambda state: state.update(
        generators=encode([{"python": (1,), "numpy": 2}], {}, "")
    ),
    "python": lambda state: state["generators"][0].update(
        python={"$tuple": [3, {"$tuple": [1, 2]}, None]}
    ),
    "history": lambda state: state.update(history=[{"epoch": 1}]),
    "model": lambda state: state.update(model=3),
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_facts_that_make_no_sense_are_refused_and_the_state_left_alone(tmp_path, change):
    path = fl.save(fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=()), tmp_path / "a")
    refused(
        crafted(path, facts=change),
        toy(w=7.0),
        "cannot be restored|a parameter group|the optimizer's state",
    )


def test_only_some_parts(tmp_path):
    path = fl.save(fl.fit(step, toy(lr=0.5), [ONE] * 4, steps=2, hooks=()), tmp_path / "a")
    tuned = fl.restore(path, toy(lr=0.1), only=("model",))
    assert (tuned.model.w.item(), tuned.step, tuned.optimizer.param_groups[0]["lr"]) == (
        -1.0,
        0,
        0.1,
    )
    counted = fl.restore(path, toy(), only=("counters",))
    assert (counted.model.w.item(), counted.step, counted.batch) == (0.0, 2, 2)
    for wrong in ("model", ("weights",)):
        with pytest.raises(ValueError, match="expects only= as a tuple of model, optimizer"):
            fl.restore(path, toy(), only=wrong)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            toy,
            r"another model \(Linear\).*missing in the checkpoint: w; not in the model: bias, weight",
        ),
        (lambda: linear_state(3), r"of another shape: weight: \(1, 2\) saved, \(1, 3\) here"),
        (lambda: linear_state(bias=False), "not in the model: bias.*strict=False"),
    ],
)
def test_another_model_is_refused_and_the_state_left_alone(tmp_path, given, message):
    path, state = fl.save(linear_state(), tmp_path / "a"), given()
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state)
    assert_same(state, before)


def test_what_matches_of_another_model(tmp_path, caplog):
    path = fl.save(linear_state(), tmp_path / "a")
    saved = load_file(path / "model.safetensors")
    state = fl.restore(path, linear_state(3), only=("model",), strict=False)
    assert torch.equal(state.model.bias, saved["bias"])
    assert "left unchanged: of another shape: weight" in caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: torch.optim.Adam(p),
            r"has the state of SGD, and the optimizer is Adam.*only=\('model',\)",
        ),
        (
            lambda p: torch.optim.SGD(list(p)[::-1], lr=0.1),
            "the same parameters in other groups, or in another order",
        ),
        (lambda p: torch.optim.SGD(list(p)[:1], lr=0.1), "only in the checkpoint: bias"),
    ],
)
def test_another_optimizer_is_refused_and_the_state_left_alone(tmp_path, make, message):
    path = fl.save(linear_state(), tmp_path / "a")
    model = nn.Linear(2, 1)
    state = fl.TrainState.create(model, make(model.parameters()))
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state)
    assert_same(state, before)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(fl.CheckpointError, match="there is no such folder"):
        fl.restore(tmp_path / "nowhere", toy())
    with pytest.raises(fl.CheckpointError, match=r"it has no manifest\.json"):
        fl.restore(tmp_path, toy())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="is not a checkpoint: save to another path"):
        fl.save(toy(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_newer_format_asks_for_a_newer_fnloop(tmp_path):
    path = fl.save(toy(), tmp_path / "a")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["check"]
    manifest["format_version"] = 99
    (path / "manifest.json").write_text(
        json.dumps({**manifest, "check": files.checksum_of_manifest(manifest)})
    )
    with pytest.raises(fl.CheckpointError, match=r"has format 99.*pip install -U fnloop"):
        fl.restore(path, toy())


def test_saving_again_replaces(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "a")
    fl.save(toy(w=2.0), tmp_path / "a")
    assert fl.restore(tmp_path / "a", toy()).model.w.item() == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


# --- folders: newest, best, retention


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_newest_are_kept_also_over_a_resume(tmp_path):
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=2)),)
    fl.fit(step, toy(), [ONE] * 6, steps=3, hooks=hooks)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=2)),)
    fl.fit(step, fl.resume(tmp_path, toy()), [ONE] * 6, hooks=hooks)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert fl.latest(tmp_path).name == "step-00000006"


def losses(values, folder, **kwargs):
    """Run epochs of one update whose evaluation gives these losses."""
    values = iter(values)

    def loss_fn(model, batch):
        return model.w * batch.mean() if model.training else torch.tensor(next(values))

    make = fl.pipeline()(loss_fn)
    hooks = (fl.every(epochs=1)(fl.checkpoint(folder, keep=1, best="valid/loss", **kwargs)),)
    return make, hooks


@pytest.mark.parametrize(
    ("values", "mode", "keep_best", "kept", "winner"),
    [
        ([3.0, 1.0, 2.0, 4.0], "min", 1, [2, 4], 2),
        ([3.0, 1.0, 2.0, 4.0], "max", 1, [4], 4),
        ([3.0, 1.0, 2.0, 4.0], "min", 2, [2, 3, 4], 2),
        ([1.0, 1.0, 1.0], "min", 1, [1, 3], 1),  # of equals, the oldest
        ([math.nan, 2.0, math.nan], "min", 1, [2, 3], 2),
        ([math.nan, math.nan], "min", 1, [2], None),
    ],
)
def test_the_best_are_kept(tmp_path, values, mode, keep_best, kept, winner):
    make, hooks = losses(values, tmp_path, mode=mode, keep_best=keep_best)
    fl.fit(make, toy(), ([ONE], [ONE]), epochs=len(values), hooks=hooks)
    assert names(tmp_path) == [f"step-{n:08d}" for n in kept]
    found = fl.best(tmp_path)
    assert (found and found.name) == (winner and f"step-{winner:08d}")
    assert fl.latest(tmp_path).name == f"step-{len(values):08d}"


def test_a_checkpoint_between_evaluations_is_not_ranked_by_the_one_before(tmp_path):
    make, _ = losses([1.0], tmp_path)
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=9, best="valid/loss")),)
    fl.fit(make, toy(), ([ONE] * 3, [ONE]), epochs=1, evaluate_every=fl.every(steps=2), hooks=hooks)
    assert fl.best(tmp_path).name == "step-00000002"


def test_best_wants_a_metric(tmp_path):
    fl.fit(step, toy(), [ONE], hooks=(fl.checkpoint(tmp_path),))
    with pytest.raises(ValueError, match=r'write best\(folder, "valid/loss"\)'):
        fl.best(tmp_path)
    assert fl.best(tmp_path, "train/loss").name == "step-00000001"
    assert fl.best(tmp_path / "nowhere") is None is fl.latest(tmp_path / "nowhere")


def test_the_end_of_a_run_is_saved_whatever_its_reason(tmp_path):
    fl.fit(
        step, toy(), [ONE] * 5, steps=3, hooks=(fl.every(epochs=9)(fl.checkpoint(tmp_path / "a")),)
    )
    assert names(tmp_path / "a") == ["step-00000003"]
    stop = lambda state: attrs.evolve(state, stop="enough")
    fl.fit(step, toy(), [ONE] * 5, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path / "b")), stop))
    restored = fl.resume(tmp_path / "b", toy())
    assert (restored.step, restored.stop) == (
        1,
        "enough",
    )  # the hook behind it stopped the run: that is saved too
    assert names(tmp_path / "b") == ["step-00000001"]


def test_a_restart_says_that_a_run_was_stopped(tmp_path, caplog):
    hooks = (lambda state: attrs.evolve(state, stop="enough"), fl.checkpoint(tmp_path))
    fl.fit(step, toy(), [ONE] * 5, hooks=hooks)
    state = fl.fit(step, fl.resume(tmp_path, toy()), [ONE] * 5, hooks=hooks)
    assert state.step == 1 and "stopped (enough)" in caplog.text


def test_damaged_ones_are_passed_over_and_not_counted(tmp_path):
    fl.fit(step, toy(), [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)),))
    file = tmp_path / "step-00000003" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(
        UserWarning, match=r"step-00000003 is damaged: the checksum of model\.safetensors is wrong"
    ):
        assert fl.resume(tmp_path, toy()).step == 2


def test_left_overs_are_cleaned_the_next_time(tmp_path):
    for name in (".step-00000001.writing-0123456789ab", ".step-00000009.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert fl.latest(tmp_path) is None
    fl.fit(step, toy(), [ONE], hooks=(fl.checkpoint(tmp_path),))
    assert names(tmp_path) == ["step-00000001"]


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    path = fl.save(toy(w=3.0), tmp_path / "a")
    path.rename(tmp_path / ".a.old")
    fl.save(
        toy(), tmp_path / "b"
    )  # and clearing up behind it does not take what may be all that there is
    shutil.rmtree(tmp_path / "b")
    assert fl.restore(path, toy()).model.w.item() == 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fl.resume(tmp_path, toy()).model.w.item() == 3.0


@pytest.mark.parametrize("background", [False, True])
def test_in_the_background_or_not_the_same_is_saved(tmp_path, background):
    problem = stochastic()
    make = fl.pipeline(fl.accumulate(2))(problem.loss_fn)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=99, background=background))
    whole = fl.fit(make, problem.state(), problem.batches, epochs=2, hooks=(saves,))
    assert len(names(tmp_path)) == 8
    for name in names(tmp_path):
        resumed = fl.restore(tmp_path / name, problem.state(seed=9))
        resumed = (
            fl.fit(make, resumed, problem.batches, epochs=2, hooks=())
            if resumed.step < 8
            else resumed
        )
        assert_same(resumed, whole)


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_what_goes_wrong_in_the_background_comes_out(tmp_path, monkeypatch):
    monkeypatch.setattr("fnloop._hooks.checkpoint.write_checkpoint", full)
    with pytest.raises(OSError, match="No space left") as error:
        fl.fit(
            step,
            toy(),
            [ONE] * 9,
            hooks=(fl.every(steps=2)(fl.checkpoint(tmp_path, background=True)),),
        )
    assert error.value.state.step in (3, 4)  # at the next boundary at which the writer has failed


def test_what_goes_wrong_in_the_background_comes_out_even_if_no_save_is_due(tmp_path, monkeypatch):
    monkeypatch.setattr("fnloop._hooks.checkpoint.write_checkpoint", full)

    def wait(state):
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        return state

    first = fl.when(lambda state: state.step == 1)
    with pytest.raises(OSError, match="No space left") as error:
        fl.fit(
            step, toy(), [ONE] * 9, hooks=(wait, first(fl.checkpoint(tmp_path, background=True)))
        )
    assert error.value.state.step == 2


def test_two_hooks_in_the_background_write_to_two_folders(tmp_path):
    hooks = [
        fl.every(steps=1)(fl.checkpoint(tmp_path / name, keep=9, background=True)) for name in "ab"
    ]
    fl.fit(step, toy(), [ONE] * 5, hooks=hooks)
    assert len(names(tmp_path / "a")) == len(names(tmp_path / "b")) == 5


def test_what_is_being_written_by_another_thread_is_not_cleaned_away(tmp_path):
    def save(i):
        folder = (
            tmp_path if i % 2 else tmp_path / ".." / tmp_path.name
        )  # one folder, however it is spelled
        return [fl.save(toy(w=float(i)), folder / f"{i}") for _ in range(5)][-1]

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(save, range(4)))
    assert [fl.restore(path, toy()).model.w.item() for path in paths] == [0.0, 1.0, 2.0, 3.0]
    assert names(tmp_path) == ["0", "1", "2", "3"]


def test_what_a_later_hook_changes_at_the_last_boundary_is_saved(tmp_path):
    note = lambda state: attrs.evolve(state, extra={"n": state.step})
    fl.fit(step, toy(), [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)), note))
    assert fl.resume(tmp_path, toy()).extra == {"n": 3}


def test_best_of_a_metric_that_there_is_not_names_those_that_there_are(tmp_path):
    hooks = (fl.every(epochs=1)(fl.checkpoint(tmp_path, best="valid/losses")),)
    with pytest.raises(
        KeyError, match="no metric 'valid/losses'; there are: train/loss, valid/loss"
    ) as error:
        fl.fit(step, toy(), ([ONE] * 2, [ONE]), epochs=3, hooks=hooks)
    assert error.value.state.epoch == 1


def test_a_checkpoint_that_was_saved_by_hand_and_a_link_are_not_pruned(tmp_path):
    fl.save(toy(), tmp_path / "mine")
    fl.save(toy(), tmp_path / "elsewhere" / "a")
    (tmp_path / "runs").mkdir()
    fl.save(toy(), tmp_path / "runs" / "mine")
    (tmp_path / "runs" / "step-00000000").symlink_to(tmp_path / "elsewhere" / "a")
    fl.fit(
        step, toy(), [ONE] * 4, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path / "runs", keep=1)),)
    )
    assert names(tmp_path / "runs") == ["mine", "step-00000000", "step-00000004"]
    assert fl.restore(tmp_path / "runs" / "step-00000000", toy()).step == 0


def test_a_hidden_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / ".photos.removing").mkdir()
    (tmp_path / ".photos.removing" / "one.jpg").write_bytes(b"1")
    fl.save(toy(), tmp_path / "a")
    fl.fit(step, toy(), [ONE], hooks=(fl.checkpoint(tmp_path),))
    assert (tmp_path / ".photos.removing" / "one.jpg").exists()


def test_resume_takes_a_checkpoint_itself_and_no_file(tmp_path):
    assert fl.resume(fl.save(toy(w=3.0), tmp_path / "a"), toy()).model.w.item() == 3.0
    (tmp_path / "file").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="is a file: resume expects a folder"):
        fl.resume(tmp_path / "file", toy())


def test_saving_to_a_link_saves_where_it_points(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for w in (2.0, 3.0):
        fl.save(toy(w=w), tmp_path / "link")
        assert fl.restore(tmp_path / "link", toy()).model.w.item() == w
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "real"]


def test_the_checkpoint_that_was_written_last_is_the_newest(tmp_path):
    def train(state, steps, x=1.0):
        saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=9))
        return fl.fit(step, state, [torch.tensor([x])] * 9, steps=steps, hooks=(saves,))

    train(toy(), 3)
    train(fl.restore(tmp_path / "step-00000001", toy()), 2, x=50.0)  # a run that went back
    state = fl.resume(tmp_path, toy())
    assert (state.step, state.model.w.item()) == (2, -51.0)
    assert fl.latest(tmp_path).name == "step-00000002"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.checkpoint("a", keep=0), ValueError, "keep as an int >= 1"),
        (lambda: fl.checkpoint("a", keep_best=0), ValueError, "keep_best as an int >= 1"),
        (lambda: fl.checkpoint("a", best=3), TypeError, 'such as "valid/loss"'),
        (lambda: fl.checkpoint("a", mode="lowest"), ValueError, 'mode expects "min"'),
    ],
)
def test_mistakes_are_found_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()
