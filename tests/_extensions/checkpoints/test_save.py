"""What a checkpoint contains, and what cannot be saved."""

import contextlib
import math
import pickle
import signal
import types
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from saved import ONE, check_continues, sgd, stop_at
from torch import nn
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop._extensions.checkpoints import format
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.format import Contents
from fnloop.testing import Toy, stochastic, toy, toy_loss

largest = lambda aux, batch: fl.Max(aux["output"].max())


def one_cycle(optimizer, run):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)


def saved(folder, **changes):
    return fl.restore(fl.save(attrs.evolve(toy(), **changes), folder / "a"), toy())


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part of it"])
def test_compiled_and_plain_models_restore_into_each_other_with_plain_names(tmp_path, whole):
    def new(compiles):
        compiled = lambda module: torch.compile(module, backend="eager") if compiles else module
        part = nn.Linear(1, 1)
        model = nn.Sequential(part if whole else compiled(part), nn.Linear(1, 1))
        return sgd(compiled(model) if whole else model)

    step = fl.pipeline(fl.ema(0.5))(lambda model, batch: model(batch).mean())
    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    for saved, given, only in (
        *((True, False, None), (False, True, None), (True, True, None)),
        *((True, False, ("trained",)), (False, True, ("trained",))),
    ):
        state = fl.fit(step, new(saved), [torch.ones(1, 1)], hooks=())
        path = fl.save(state, tmp_path / "a", only=only)
        assert "_orig_mod" not in (path / "state.json").read_text()
        restored = fl.restore(path, new(given), only=only)
        assert all(map(torch.equal, restored.model.parameters(), state.model.parameters()))
        for file in ("model",) if only else ("model", "ema"):
            assert sorted(load_file(path / f"{file}.safetensors")) == names
        average, mine = state.slots["ema"], restored.slots.get("ema", {})
        assert [torch.equal(mine[name], average[name]) for name in mine] == [True] * len(mine)
        assert len(mine) == (0 if only else 4)


def test_tied_weights_views_and_empty_tensors_are_restored(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("part", torch.arange(9.0).view(3, 3).t()[:, 1])
            self.register_buffer("none", torch.empty(0))

    state = sgd(Tied())
    restored = fl.restore(fl.save(state, tmp_path / "a"), sgd(Tied())).model
    assert restored.a.weight is restored.b.weight
    assert torch.equal(restored.a.weight, state.model.a.weight)
    assert restored.part.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    "extra",
    [{"seen": 7, "worst": math.inf}, torch.tensor([1.0, 2.0]), {"seen": torch.tensor([1.0, 2.0])}],
    ids=["plain", "a tensor", "a mapping"],
)
def test_the_extra_state_of_a_module_is_restored(tmp_path, extra):
    class Counts(Toy):
        extra = None

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, extra):
            self.extra = extra

    state = sgd(Counts())
    state.model.extra = extra
    found = fl.restore(fl.save(state, tmp_path / "a"), sgd(Counts())).model.extra
    assert find_difference(found, extra, "") is None


def test_frozen_parameters_and_evaluation_mode_are_restored_only_with_the_counters(tmp_path):
    new = lambda: sgd(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    def flags(state):
        trained = [p.requires_grad for p in state.model[0].parameters()]
        return trained, [m.training for m in state.model.modules()]

    state, back = new(), new()
    state.model[0].weight.requires_grad_(False)
    state.model[1].eval()
    path = fl.save(state, tmp_path / "a")
    assert flags(fl.restore(path, new())) == ([False, True], [True, True, False])
    assert flags(fl.restore(path, new(), only=("model",))) == ([True, True], [True] * 3)
    back.model[1].eval()
    back.model[0].bias.requires_grad_(False)
    back = fl.restore(fl.save(new(), tmp_path / "b"), back)
    assert flags(back) == ([True, True], [True] * 3)


def test_floats_of_the_history_are_restored_bit_for_bit(tmp_path):
    values = {"a": 0.1 + 0.2, "b": math.nan, "c": -math.inf, "d": 5e-324, "e": -0.0}
    history = fl.History().append(fl.Record(1, 2, values, 0.3))
    found = saved(tmp_path, history=history).history
    assert (found, found[0].seconds) == (history, 0.3)
    assert [v.hex() for v in found[0].metrics.values()] == [v.hex() for v in values.values()]


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("something was pickled")

    problem = stochastic()
    pipe = fl.pipeline(fl.amp("bf16"), fl.torch_scheduler(one_cycle), fl.metric(largest=largest))
    make, fit = pipe(problem.loss_fn), {"epochs": 2, "hooks": ()}
    state = fl.fit(make, problem.state(), problem.batches, epochs=2, hooks=(stop_at(3),))
    for module, name in ((pickle, "dumps loads Unpickler"), (torch, "load save")):
        for function in name.split():
            monkeypatch.setattr(module, function, never)
    path = fl.save(state, tmp_path / "a")
    fl.fit(make, attrs.evolve(fl.restore(path, problem.state()), stop=None), problem.batches, **fit)
    starts = {file.name: file.read_bytes()[:2] for file in path.iterdir()}
    assert not {b"PK", b"\x80\x02", b"\x80\x04"} & set(starts.values()), starts


NUMBER = torch.tensor([1 + 2j])


@pytest.mark.parametrize("extra", [
    {"config": {"layers": 3, "lr": 0.1}, "words": ["a", "b"], "mean": torch.tensor([0.5])},
    {"a.b": np.array([1, 2]), "a": {"b": np.array([3.0])}, "b": torch.ones(1),
     "b~0": torch.zeros(1)},  # entries with the same path
    {"conjugate": NUMBER.conj(), "negative": NUMBER.conj().imag},
], ids=["plain", "same paths", "views"])  # fmt: skip
def test_extra_data_of_the_user_is_restored(tmp_path, extra):
    found = saved(tmp_path, extra=extra).extra
    assert found.keys() == extra.keys() and find_difference(found, extra, "") is None


Pair = namedtuple("Pair", ["x", "y"])


@attrs.frozen
class Part:
    total: torch.Tensor
    count: int = 0


def around_itself():
    made = {}
    made["again"] = made
    return made


OBJECT = r"extra\.mine(\.0)? is a Part, an object, which could not be reconstructed"


@pytest.mark.parametrize(("where", "value", "message"), [
    ("slots", {"mine": Pair(1, 2)}, r"slots\.mine is a Pair, a named tuple"),
    ("extra", {"mine": Part(torch.ones(1))}, OBJECT),
    ("extra", {"mine": [Part(torch.ones(1))]}, OBJECT),
    ("extra", {"f": print}, r"cannot be saved: extra\.f is a .*Keep plain data"),
    ("slots", {"mine": object()}, r"cannot be saved: slots\.mine is a .*Keep plain data"),
    ("extra", None, "extra must be a mapping; it is None"),
    ("extra", [1], r"extra must be a mapping; it is \[1\]"),
    ("slots", 3, "slots must be a mapping; it is 3"),
    ("slots", None, "slots must be a mapping; it is None"),
    ("extra", around_itself(), "extra holds something that contains itself"),
    ("extra", {"a": {"b": "\ud800"}}, r"extra\.a\.b has a str with a lone surrogate"),
    ("extra", {"a": {"\ud800": 1}}, r"extra\.a has a str with a lone surrogate"),
    ("extra", {"a": signal.SIGINT}, r"extra\.a is a Signals, an enum"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path, where, value, message):
    with pytest.raises(fl.CheckpointError, match=message):
        saved(tmp_path, **{where: value})
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_is_a_list_of_records_is_restored(tmp_path):
    def summing(inner):
        def summed(state, batch):
            state, out = inner(state, batch)
            parts = [Part(p.total + i, p.count + 1) for i, p in enumerate(state.slots["parts"])]
            return attrs.evolve(state, slots={**state.slots, "parts": parts}), out

        return summed

    start = [Part(torch.zeros(())), Part(torch.zeros(()))]
    make = fl.pipeline(fl.Middleware("parts", update=summing, init=lambda state: start))(toy_loss)
    whole = check_continues(tmp_path, toy, make, [ONE] * 4, splits=[1, 3], epochs=1)
    assert whole.slots["parts"] == [Part(torch.tensor(0.0), 4), Part(torch.tensor(4.0), 4)]


def test_a_user_metric_is_not_mistaken_for_a_built_in_one_of_the_same_name(tmp_path):
    @attrs.frozen
    class Max:
        """The value with the largest magnitude."""

        value: torch.Tensor

        def combine(self, other):
            return self if self.value.abs() > other.value.abs() else other

        def compute(self):
            return float(self.value)

    make = fl.pipeline(fl.metric(m=lambda aux, batch: Max(batch.min())))(toy_loss)
    data = [torch.tensor([x]) for x in (-5.0, 1.0, 2.0, 3.0)]
    half = fl.fit(make, toy(), data, steps=2, hooks=())
    state = fl.fit(make, fl.restore(fl.save(half, tmp_path / "a"), toy()), data, hooks=())
    assert state.history["train/m"] == (-5.0, -5.0)  # the first is from the closing record


def test_an_error_names_a_slot_of_another_kind(tmp_path):
    half = fl.fit(fl.pipeline(fl.amp("fp16"))(toy_loss), toy(), [ONE] * 4, steps=2, hooks=())
    restored = fl.restore(fl.save(half, tmp_path / "a"), toy())
    other = fl.Middleware("amp", init=lambda state: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has a LossScale where there is a Linear now"):
        fl.fit(fl.pipeline(other)(toy_loss), restored, [ONE] * 4, hooks=())


# --- copies aside, on a stand-in for a GPU: float32 tensors are there


@pytest.fixture(params=[True, False])
def room(request, monkeypatch):
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    there = property(lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(torch.Tensor, "is_cuda", there, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(format, "_has_room", lambda device, size: request.param)
    return request.param


def test_what_was_copied_aside_is_what_was_there_then(room):
    """Buffers are written to when the function is called. In host memory they are at once."""
    weight, count = torch.ones(3), torch.ones(2, dtype=torch.float64)
    contents = Contents({"model": {"w": weight}, "optimizer": {"w.step": count}}, {})
    held = lambda made: (made.groups["model"]["w"], made.groups["optimizer"]["w.step"])
    first = contents.copy_aside()
    weight.zero_(), count.zero_()
    saved = first()
    assert [t.tolist() for t in held(saved)] == [[1.0] * 3, [1.0] * 2]
    memory = [t.data_ptr() for t in held(saved)]
    later = contents.copy_aside(saved)
    assert held(saved)[0].tolist() == ([1.0] * 3 if room else [0.0] * 3)
    again = later()
    assert [t.tolist() for t in held(again)] == [[0.0] * 3, [0.0] * 2]
    assert [t.data_ptr() for t in held(again)] == memory
