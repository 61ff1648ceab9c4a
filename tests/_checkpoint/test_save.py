"""What a checkpoint contains, and what cannot be saved."""

import json
import math
import pickle
import signal
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop.testing import Toy, stochastic, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def stop_at(n):
    return fl.when(lambda state: state.step + state.skipped == n)(
        lambda state: attrs.evolve(state, stop="here")
    )


def largest(aux, batch):
    return fl.Max(aux["output"].max())


def one_cycle(optimizer, run):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)


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


def test_wrappers_leave_no_prefix_in_the_names(tmp_path):
    state = toy(w=3.0)
    wrapped = nn.Module()
    wrapped._orig_mod = state.model
    fl.save(attrs.evolve(state, model=wrapped), tmp_path / "a")
    assert list(load_file(tmp_path / "a" / "model.safetensors")) == ["w"]


@pytest.mark.slow  # compiles
# From modules that torch imports
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_and_plain_submodules_restore_into_each_other(tmp_path):
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


def test_tied_weights_views_and_empty_tensors_are_restored(tmp_path):
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


def test_the_extra_state_of_a_module_is_restored(tmp_path):
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
def test_tensors_in_the_extra_state_of_a_module_are_restored(tmp_path, wrap):
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


def test_frozen_parameters_and_evaluation_mode_are_restored_only_with_the_counters(
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


def test_floats_of_the_history_are_restored_bit_for_bit(tmp_path):
    values = {"a": 0.1 + 0.2, "b": math.nan, "c": -math.inf, "d": 5e-324, "e": -0.0}
    state = attrs.evolve(toy(), history=fl.History().append(fl.Record(1, 2, values, 0.3)))
    restored = fl.restore(fl.save(state, tmp_path / "a"), toy())
    assert restored.history == state.history
    assert restored.history[0].seconds == 0.3
    assert [v.hex() for v in restored.history[0].metrics.values()] == [
        v.hex() for v in values.values()
    ]


def test_the_facts_are_human_readable(tmp_path):
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


def test_extra_data_of_the_user_is_restored(tmp_path):
    extra = {
        "config": {"layers": 3, "lr": 0.1},
        "vocabulary": ["a", "b"],
        "mean": torch.tensor([0.5]),
    }
    restored = fl.restore(fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a"), toy())
    assert restored.extra["config"] == extra["config"] and restored.extra["mean"].tolist() == [0.5]


def test_extra_entries_with_the_same_path_are_all_restored(tmp_path):
    extra = {
        "a.b": np.array([1, 2]),
        "a": {"b": np.array([3.0])},
        "b": torch.ones(1),
        "b~0": torch.zeros(1),
    }
    restored = fl.restore(fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a"), toy()).extra
    assert (restored["a.b"].tolist(), restored["a"]["b"].tolist()) == ([1, 2], [3.0])
    assert (restored["b"].item(), restored["b~0"].item()) == (1.0, 0.0)


def test_conjugate_and_negative_tensors_keep_their_values(tmp_path):
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
def test_values_that_could_not_be_reconstructed_are_refused(tmp_path, where, value, message):
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(attrs.evolve(toy(), **{where: value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_is_a_list_of_records_is_restored(tmp_path):
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
def test_errors_say_what_is_wrong_with_extra(tmp_path, extra, message):
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(attrs.evolve(toy(), extra=extra), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "value"), [("extra", {"f": print}), ("slots", {"mine": object()})]
)
def test_errors_name_what_cannot_be_saved_and_nothing_is_written(tmp_path, where, value):
    with pytest.raises(
        fl.CheckpointError, match=rf"cannot be saved: {where}\.\w+ is a .*Keep plain data"
    ):
        fl.save(attrs.evolve(toy(), **{where: value}), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_slots_stay_pending_until_their_middleware_creates_them(tmp_path):
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
    # Saved again before any middleware has used it.
    again = fl.restore(fl.save(restored, tmp_path / "b"), toy())
    resumed = fl.fit(make, again, [ONE] * 4, hooks=())
    assert resumed.slots["average"] == whole.slots["average"] == Average(torch.tensor(-3.0625), 4)


def test_an_error_names_a_slot_of_another_kind(tmp_path):
    half = fl.fit(fl.pipeline(fl.amp("fp16"))(toy_loss), toy(), [ONE] * 4, steps=2, hooks=())
    restored = fl.restore(fl.save(half, tmp_path / "a"), toy())
    other = fl.Middleware("amp", init=lambda state: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="has a LossScale where there is a Linear now"):
        fl.fit(fl.pipeline(other)(toy_loss), restored, [ONE] * 4, hooks=())


def test_saving_again_replaces_the_checkpoint(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "a")
    fl.save(toy(w=2.0), tmp_path / "a")
    assert fl.restore(tmp_path / "a", toy()).model.w.item() == 2.0
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
