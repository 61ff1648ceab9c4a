import functools
import os
import types

import attrs
import pytest
import torch
from sample_steps import in_turns
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._backend import torch_compat
from fnloop._extensions.tools import hints
from fnloop._extensions.tools.hints import (
    fused_hint,
    loader_hints,
    precision_hint,
    suggest_fused,
)
from fnloop._loop.beginning import tell_untrained
from fnloop.data import leave_out
from fnloop.testing import toy, toy_loss

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def suggest(optimizer, device, seconds=1e-9, updates=10**6, main=True):
    """What a run with this optimizer on this device is told, if an update takes no time else."""
    backend = types.SimpleNamespace(device=device, main=main)
    state = types.SimpleNamespace(optimizer=optimizer, backend=backend)
    suggest_fused((), state, updates * seconds, updates)


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(1, dtype=dtype))]


optim, SGD = torch.optim, functools.partial(torch.optim.SGD, lr=0.1)
SLOW = {"foreach": False}


@pytest.mark.parametrize(("optimizer", "hint"), [
    *((kind(parameters()), f"{kind.__name__}(..., fused=True) is faster")
      for kind in (optim.AdamW, optim.Adam, optim.SGD)),
    (optim.Adam(parameters(), **SLOW), "fused=True"),
    *((SGD(parameters(), **{name: value}), None)  # it was told
      for name, value in (("fused", True), ("fused", False), ("foreach", True),
                          ("differentiable", True))),
    (optim.RMSprop(parameters()), None),  # without a fused form
    (optim.RMSprop(parameters(), **SLOW), "without foreach=False"),
    (SGD(parameters(torch.complex64)), None), (optim.LBFGS(parameters()), None),
])  # fmt: skip
def test_an_optimizer_that_could_be_faster_is_told_so(optimizer, hint):
    found = fused_hint(optimizer)
    assert found is None if hint is None else hint in found


# --- loaders


class Lying:
    def __init__(self, says, gives):
        self.says, self.gives = says, gives

    def __len__(self):
        return self.says

    def __iter__(self):
        return iter([torch.ones(1)] * self.gives)


@pytest.mark.parametrize(("says", "gives"), [(3, 5), (7, 4)])
def test_a_length_that_is_wrong_is_named_once_with_the_right_one(says, gives, caplog):
    for _ in range(2):
        fl.fit(fl.pipeline()(toy_loss), toy(), Lying(says, gives), epochs=2, hooks=())
    (line,) = caplog.messages
    assert f"training loader is {says}, but an epoch of it had {gives} batches" in line


@pytest.mark.parametrize("target", [{"epochs": 2}, {"steps": 3}, {"epochs": 1}], ids=str)
def test_a_length_that_is_right_needs_no_hint(target, caplog):
    """Nor does an epoch that was longer when it began, or that is shorter than the first."""
    ends = fl.every(steps=2)(lambda state: attrs.evolve(state, ends="epoch"))
    step, data = fl.pipeline()(toy_loss), [torch.ones(1)] * 5
    shorter = leave_out(data, lambda epoch, batch: epoch == 1 and batch < 2)
    for hooks in ((), (ends,)):
        for loader in (Lying(5, 5), data, DataLoader(torch.ones(11), 3), shorter):
            fl.fit(step, toy(), loader, hooks=hooks, **target)
    state = fl.fit(step, toy(), Lying(8, 8), steps=6, hooks=())
    assert not caplog.messages
    fl.fit(step, state, Lying(4, 4), epochs=1, hooks=())
    (line,) = caplog.messages
    assert "(Lying) had 8 batches when epoch 1 began, and has 4 batches now" in line


def hints_of(device=CPU, **settings):
    return [*loader_hints("train", DataLoader([1.0], **settings), device)]


def test_workers_of_several_processes_are_counted_together(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    assert not hints_of(num_workers=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert not hints_of(num_workers=2)
    (line,) = hints_of(num_workers=3)
    assert "3 workers in each of 4 processes" in line and "8 CPUs: num_workers=2" in line


@pytest.mark.parametrize("available", [False, True])
def test_pinned_memory_without_a_use_is_named_unless_torch_does(available, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    assert "pin_memory=True of the train loader is of no use" in hints_of(pin_memory=True)[0]
    assert len(hints_of(pin_memory=True, num_workers=1)) == available
    assert not hints_of(CUDA, pin_memory=True) and not hints_of()


def test_hints_about_loaders_come_once(caplog):
    loaders = {"train": [1], "held out": fl.sharded(DataLoader([1.0], pin_memory=True))}
    for _ in range(2):
        hints.suggest_loaders(loaders, CPU)
    (line,) = caplog.messages
    assert "the held out loader" in line


def test_on_the_cpu_fused_adam_is_named_once_with_its_rounding_and_nothing_else(caplog):
    suggest(optim.RAdam(parameters(), **SLOW), CPU)
    suggest(SGD(parameters()), CPU)
    suggest(optim.AdamW(parameters(), fused=False), CPU)
    suggest(optim.AdamW(parameters()), torch.device("meta"))
    assert not caplog.messages
    for _ in range(2):
        suggest(optim.AdamW(parameters()), CPU)
        suggest(optim.NAdam(parameters(), foreach=False), CUDA)
    first, second = caplog.messages
    assert first == "fit: tip: AdamW(..., fused=True) is faster; results are equal up to rounding"
    assert "NAdam" in second


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_is_told(caplog, main):
    suggest(torch.optim.AdamW(parameters()), CPU, main=main)
    assert ("fused=True" in caplog.text) is main
    backend = types.SimpleNamespace(main=main, device=CPU, precision=None)
    state, _ = layer(of=lambda model: [model[0].weight])
    caplog.clear()
    tell_untrained(attrs.evolve(state, backend=backend))
    assert ("in no optimizer: 0.bias" in caplog.text) is main


@pytest.mark.parametrize(("tensors", "elements", "device", "seconds", "updates", "told"), [
    # A fused Adam saves at least 15 µs for each tensor and 1 ns for each element: here 1 ms.
    (60, 100_000, CPU, 0.020, 1000, True),  # 5 % of an update, a second of the run
    (60, 100_000, CPU, 0.021, 1050, False),
    (60, 100_000, CPU, 0.010, 999, False),  # 10 % of an update, but less than a second
    (2, 18, CPU, 1e-4, 30_000, False),  # a toy of 3 s
    # On a GPU, 0.02 ns for each element: 2 ms.
    (1, 100_000_000, CUDA, 0.040, 500, True), (1, 100_000_000, CUDA, 0.041, 510, False),
])  # fmt: skip
def test_a_fused_optimizer_is_advised_where_it_gains_5_percent(
    tensors, elements, device, seconds, updates, told, caplog
):
    with torch.device("meta"):
        sizes = [1] * (tensors - 1)
        weights = [torch.nn.Parameter(torch.zeros(n)) for n in (*sizes, elements - sum(sizes))]
    suggest(torch.optim.AdamW(weights), device, seconds, updates)
    assert ("fused=True" in caplog.text) is told


def layer(n=1, optimizer=SGD, of=lambda model: model.parameters()):
    """Return a state of n linear layers, and its step; the optimizer has some of the parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(n)))
    state = fl.TrainState.create(model, optimizer(of(model)))
    return state, fl.pipeline()(lambda model, x: model(x).mean())


def test_a_run_tells_its_time_and_its_updates_and_a_toy_is_told_nothing(monkeypatch, caplog):
    state, step = layer(optimizer=optim.AdamW)
    given = []
    told = lambda *args: given.append(args[2:]) or suggest_fused(*args)
    monkeypatch.setattr(hints, "suggest_fused", told)
    fl.fit(step, state, [torch.ones(1, 1)] * 3, epochs=2, hooks=())
    assert [updates for _, updates in given] == [3, 6]
    assert 0 < given[0][0] < given[1][0]
    assert not caplog.messages


# --- precision


@pytest.mark.parametrize(("precision", "has", "told"), [
    ("bf16", {"avx2": True, "avx512_bf16": False}, True),
    ("bf16", {"avx2": True, "avx512_bf16": True}, False),
    ("bf16", {"avx512_bw": True}, False),  # not measured
    ("bf16", {"neon": True, "bf16": True}, False),
    ("fp16", {"avx2": True, "avx512_bf16": True}, True),
    ("fp16", {"neon": True, "fp16_arith": True}, False),
    ("bf16, fp16", {"avx512_bf16": True}, "fp16"), ("bf16, fp16", {"avx2": True}, "bf16 and fp16"),
    ("bf16", {}, False),  # not known
])  # fmt: skip
def test_a_precision_that_a_cpu_emulates_is_named(precision, has, told):
    hint = precision_hint(precision, has)
    assert (hint is not None) == bool(told)
    assert hint is None or f"only emulates {precision if told is True else told}, and is" in hint


@pytest.mark.parametrize(("precision", "lines"), [("bf16", 1), (None, 0)])
def test_a_run_on_a_cpu_that_emulates_bf16_says_so_once(precision, lines, monkeypatch, caplog):
    monkeypatch.setattr(torch_compat, "cpu_capabilities", lambda: {"avx2": True})
    for _ in range(2):
        fl.fit(fl.pipeline(fl.amp(precision))(toy_loss), toy(), [torch.ones(1)], hooks=())
    assert len(caplog.messages) == lines and all("bf16" in line for line in caplog.messages)


def test_turns_with_different_precisions_are_named_together(monkeypatch, caplog):
    monkeypatch.setattr(torch_compat, "cpu_capabilities", lambda: {"avx2": True})
    _, state = in_turns()
    turns = {
        n: fl.pipeline(fl.amp(p))(lambda model, batch, n=n: toy_loss(model[n], batch))
        for n, p in (("a", "bf16"), ("b", "fp16"))
    }
    fl.fit(fl.alternate(turns), state, [torch.ones(2)], hooks=())
    (line,) = caplog.messages
    assert "only emulates bf16 and fp16" in line


# --- parameters


def test_parameters_that_the_optimizer_does_not_have_are_named_once(caplog):
    """The head was replaced after the optimizer was made."""

    def replaced(model):
        weights = [*model.parameters()]
        model[1] = torch.nn.Linear(1, 1)
        return weights

    state, step = layer(2, of=replaced)
    assert "make the optimizer after that" in caplog.text
    caplog.clear()
    for epochs in (1, 2):
        state = fl.fit(step, state, [torch.ones(2, 1)], epochs=epochs, hooks=())
    (line,) = caplog.messages
    assert "in no optimizer: 1.weight, 1.bias. Give them to one, or freeze them" in line


@pytest.mark.slow  # compiles
def test_parameters_of_a_compiled_model_have_their_names(caplog):
    model = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    state = fl.TrainState.create(model, SGD([model.weight]))
    fl.fit(layer()[1], state, [torch.ones(2, 1)], hooks=())
    assert "fit: this parameter is in no optimizer: bias. Give" in caplog.text


def test_frozen_parameters_need_no_optimizer(caplog):
    state, step = layer(
        2, of=lambda model: model[0].requires_grad_(False) and model[1].parameters()
    )
    fl.fit(step, state, [torch.ones(2, 1)], hooks=())
    assert not caplog.messages
