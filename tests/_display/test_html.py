"""Text for terminals and HTML for notebooks: numbers, long lines, and values that are escaped."""

import re

import attrs
import pytest
import torch
from pages import NASTY, check_html, texts
from torch import nn

import fnloop as fl
from fnloop import History, Output, Record, RunInfo, TrainState, pipeline, schedules
from fnloop._display import reprs
from fnloop.testing import toy, toy_loss


def rows(value):
    """Return the cells of a table of facts, as a mapping."""
    cells = re.findall(r"<td[^>]*>(.*?)</td>", value._repr_html_())
    return dict(zip(cells[::2], cells[1::2], strict=True))


def named(name):
    """Return a loss function, a module and a middleware with a bad name."""
    loss_fn = lambda model, batch: model(batch).mean()
    loss_fn.__name__ = name
    module = type(name, (nn.Linear,), {})(1, 1)
    return loss_fn, module, fl.Middleware(name, forward=lambda step: step)


def everything():
    loss_fn, module, member = named(NASTY)
    state = TrainState.create(module, torch.optim.SGD(module.parameters(), lr=1.0), seed=0)
    record = Record(1, 10, {NASTY: 0.5})
    metrics = {NASTY: fl.Mean(torch.tensor(6.0), 2)}
    yield "state", attrs.evolve(state, slots={NASTY: 1}, history=History([record]), stop=NASTY)
    yield "pipeline", pipeline(member)
    yield "step", pipeline(member)(loss_fn)
    yield "record", record
    yield "output", Output(torch.tensor(0.5), 1, {NASTY: NASTY}, metrics, NASTY)
    yield "run", RunInfo(1, 10, 5, 5, 1, (NASTY,))


@pytest.mark.parametrize("value", [pytest.param(v, id=n) for n, v in everything()])
def test_html_is_well_formed_and_escaped_and_has_no_assets_and_colours(value):
    check_html(value)


# --- state, run, output, record

TWO = History([Record(1, 10, {"train/loss": 1 / 3}), Record(2, 20, {"train/loss": 0.25})])
OUTPUT = Output(
    torch.tensor(1 / 3), torch.tensor(1200), {"output": torch.ones(2, 3)},
    {"accuracy": fl.Mean(torch.tensor(3.0), 4)}, "overflow",
)  # fmt: skip


@pytest.mark.parametrize(("value", "facts"), [
    (attrs.evolve(toy(), history=TWO),
        {"step": "0", "epoch": "0", "batch": "0", "model": "Toy (1 parameter)",
         "optimizer": "SGD", "seed": "0", "history": "2 records", "latest": "train/loss 0.2500",
         "device": "cpu"}),
    (RunInfo(total_steps=30, evaluated=("valid", "test")),
        {"total_steps": "30", "window": "1", "evaluated": "valid, test"}),
    (OUTPUT, {"loss": "0.3333", "weight": "1,200", "accuracy": "0.7500",
              "aux[&#x27;output&#x27;]": "float32 [2, 3]", "skip": "overflow"}),
    (Record(1, 10, {"loss": 1 / 3}, 2.04),
        {"epoch": "1", "step": "10", "loss": "0.3333", "seconds": "2.0"}),
], ids=["state", "run", "output", "record"])  # fmt: skip
def test_a_value_shows_the_known_facts(value, facts):
    assert rows(value) == facts


def test_the_repr_of_a_long_value_is_broken_into_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stop = "early_stop: valid/loss has not improved on 0.5"
    state = attrs.evolve(toy(), slots={"schedule(lr)": 1, "amp": 2}, stop=stop)
    assert repr(state).splitlines() == [
        "TrainState(step=0, epoch=0, batch=0, model=Toy (1 parameter), optimizer=SGD, seed=0,",
        f"           slots=[schedule(lr), amp], stop='{stop}')",
    ]
    assert repr(RunInfo(epochs=3)) == (
        "RunInfo(epochs=3, total_steps=None, steps_per_epoch=None, batches_per_epoch=None, "
        "window=1,\n        evaluated=())"
    )
    monkeypatch.setenv("COLUMNS", "60")  # of a terminal
    assert max(map(len, repr(RunInfo(epochs=3)).splitlines())) <= 60
    run = RunInfo(3, 30, 10, 10, 1, ("valid",))
    assert eval(repr(run)) == run


# --- steps


def test_a_step_is_drawn_as_nested_boxes_around_the_loss_function():
    members = fl.accumulate(4), fl.clip(1.0), fl.amp("bf16"), fl.schedule(schedules.linear())
    step = pipeline(*members)(toy_loss)
    words = [text.strip() for text in texts(step)]
    assert [word for word in words if word] == [
        *("step", "schedule(linear())"),
        *("update", "the optimizer's step"),
        *("gradient", "backward", "→", "accumulate(4)", "→", "clip(1.0)"),
        *("forward", "amp('bf16')", "toy_loss(model, batch)"),
    ]  # fmt: skip
    named = "pipeline(accumulate(4), clip(1.0), amp('bf16'), schedule(linear()))"
    assert repr(step) == f"{named}(toy_loss)"
    depth, depths = 0, []
    for tag in re.findall(r"<div|</div", pipeline(fl.clip(1.0))._repr_html_()):
        depth += -1 if tag == "</div" else 1
        depths.append(depth)
    assert max(depths) == 1 + 2 + 1  # the frame, two rings, and the loss function in the inner one


def test_a_step_prints_as_rings_that_fit_a_terminal():
    half = fl.metric(half=lambda aux, batch: 0.5)
    step = pipeline(fl.clip(1.0), fl.accumulate(2), half)(toy_loss)
    assert str(step).splitlines() == [
        "┌ update    the optimizer's step", "│ ┌ gradient  backward → clip(1.0) → accumulate(2)",
        "│ │ ┌ forward   metric(half=<lambda>)", "│ │ │ toy_loss(model, batch)",
    ]  # fmt: skip
    long = "a_middleware_with_a_long_name_"
    members = [fl.Middleware(f"{long}{i}", update=lambda step: step) for i in range(9)]
    lines = str(pipeline(*members)(toy_loss)).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line[:4] for line in lines[:2]] == ["┌ up", "│   "]
    assert sum(line.count(long) for line in lines) == 9


# --- elements


@pytest.mark.parametrize(("value", "shown"), [
    (0.123456789, "0.12346"), (1e-9, "1e-09"), (123456.0, "1.2346e+05"), (1234567, "1,234,567"),
    (2.0, "2"),
])  # fmt: skip
def test_numbers_have_five_digits(value, shown):
    assert reprs.format_number(value) == shown


@pytest.mark.parametrize("name", ["lr", "train/lr", "lr/head", "train/d/lr"])
def test_a_learning_rate_has_an_exponent(name):
    assert reprs.format_metric(name, 3e-4) == "3.0e-04"
