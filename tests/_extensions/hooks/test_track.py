"""track: the calls that a tracker gets, their order, and the contents of tensorboard's files."""

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from sample_hooks import raise_at, start_again, stop_at
from toy_runs import ONE, fit

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop.testing import toy, toy_loss

tracking = pytest.importorskip("accelerate.tracking")
CALLS = []


class Fake(tracking.GeneralTracker):
    name, requires_logging_directory, tracker = "fake", False, None

    def __init__(self, project, **settings):
        super().__init__()
        CALLS.append(("made", project, settings))

    @tracking.on_main_process
    def start(self):
        CALLS.append("start")

    @tracking.on_main_process
    def store_init_configuration(self, values):
        CALLS.append(("config", values))

    @tracking.on_main_process
    def log(self, values, step):
        tracking.logger.debug("as the trackers of accelerate do")
        CALLS.append((step, values))

    @tracking.on_main_process
    def finish(self):
        CALLS.append("finish")


class InFolder(Fake):
    requires_logging_directory = True

    def __init__(self, project, logging_dir):
        super().__init__(project, logging_dir=logging_dir)


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()
    before = {**accelerate_state()}  # which a test of something else may have left
    yield
    assert accelerate_state() == before, "the process-wide state of accelerate was created"


def accelerate_state():
    from accelerate import PartialState

    return PartialState._shared_state


def train(hook, *others, **run):
    return fit(hook, *others, **{"train": 1, "epochs": 2, **run})


def sent():
    return [call for call in CALLS if isinstance(call[0], int)]


def steps():
    return [step for step, _ in sent()]


# --- the calls


def test_the_order_of_calls():
    hook = fl.track(Fake, config={"lr": 1.0}, project="mine", tags=["a"])
    assert CALLS == []  # it starts after the first update, not when composing
    before = tracking.logger
    train(hook)
    assert CALLS == [
        ("made", "mine", {"tags": ["a"]}), "start", ("config", {"lr": 1.0}),
        (1, {"train/loss": 0.0, "train/lr": 1.0}), (2, {"train/loss": -1.0, "train/lr": 1.0}),
        "finish",
    ]  # fmt: skip
    assert tracking.logger is before


def test_the_configuration_is_flattened_to_plain_values():
    model = {"sizes": (1, 2), "act": {"name": "relu"}}
    config = {"lr": np.float32(0.5), "n": np.int64(3), "model": model, "none": None, "b": True}
    train(fl.track(Fake, config=config))
    named = {"model.sizes": "[1, 2]", "model.act.name": "relu", "none": None, "b": True}
    assert CALLS[2] == ("config", {"lr": 0.5, "n": 3, **named})
    assert [type(v) for v in CALLS[2][1].values()] == [float, int, str, str, type(None), bool]


# --- which trackers


def test_an_instance_is_used_as_it_is_and_a_class_gets_the_folder_that_it_needs(tmp_path):
    train(fl.track(Fake("mine")))
    others = [call for call in CALLS if not isinstance(call[0], int)]
    assert others == [("made", "mine", {}), "start", "finish"]
    train(fl.track(InFolder, tmp_path))
    assert ("made", "", {"logging_dir": str(tmp_path)}) in CALLS


@pytest.mark.parametrize(("name", "their_class", "continued"), [
    ("wandb", "WandBTracker", {"id": "xyz", "resume": "allow"}),
    ("mlflow", "MLflowTracker", {"run_id": "xyz"}),
])  # fmt: skip
def test_a_later_run_continues_the_run_of_a_service(name, their_class, continued, monkeypatch):
    class Service(Fake):
        tracker = SimpleNamespace(id="xyz", info=SimpleNamespace(run_id="xyz"))

    monkeypatch.setattr(tracking, their_class, Service)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, Service)
    hook = fl.track(name, tags="a")
    train(hook, state=train(hook, epochs=1))
    made = [settings for kind, _, settings in (call for call in CALLS if call[0] == "made")]
    assert made == [{"tags": "a"}, {"tags": "a", **continued}]


def test_only_the_first_process_sends():
    backend = Backend("cpu", rank=1, world_size=1)
    also = lambda client, state: CALLS.append("also")
    train(fl.track(WithClient, also=also), state=attrs.evolve(toy(), backend=backend))
    assert CALLS == []


# --- runs


def test_it_is_closed_when_a_run_raises_or_is_interrupted_and_not_opened_if_it_fails_at_once(
    caplog,
):
    with pytest.raises(KeyError):
        train(fl.track(Fake), raise_at(2))
    assert CALLS[-2][0] == 2 and CALLS[-1] == "finish"
    CALLS.clear()
    assert train(fl.track(Fake), raise_at(1, KeyboardInterrupt)).stop == "interrupted"
    assert CALLS[-1] == "finish" and CALLS.count("finish") == 1
    CALLS.clear()
    start_again()
    with pytest.raises(ZeroDivisionError):
        train(fl.track(Fake), step=fl.pipeline()(lambda model, batch: 1 / 0))
    assert CALLS == [] and not caplog.messages

    class Broken(Fake):
        def finish(self):
            raise OSError("no network")

    with caplog.at_level(logging.ERROR, "fnloop"):
        assert train(fl.track(Broken)).epoch == 2
    assert caplog.messages == ["track('fake'): could not be closed: no network"]


def test_several_runs_continue_the_steps_and_send_nothing_twice(tmp_path):
    hook = fl.track(Fake, config={"a": 1})
    state = train(hook, state=train(hook, epochs=1), epochs=3)
    assert steps() == [1, 2, 3] and CALLS.count(("config", {"a": 1})) == 1
    assert CALLS.count("start") == CALLS.count("finish") == 2
    train(hook, state=state, epochs=3)  # nothing to do
    assert CALLS.count("start") == 2
    path = fl.save(state, tmp_path / "kept")
    CALLS.clear()
    train(fl.track(Fake), state=fl.restore(path, toy()), epochs=4)
    last = (4, {"train/loss": -3.0, "train/lr": 1.0})
    assert [("made", "fnloop", {}), "start", last, "finish"] == CALLS


# --- which records


@pytest.mark.parametrize(("hooks", "run", "expected"), [
    ((fl.every(epochs=2)(fl.track(Fake)),), {"epochs": 5}, [2, 4]),
    ((fl.every(epochs=2)(fl.track(Fake)),),
        {"epochs": 5, "valid": 1, "evaluate_every": fl.at_start()}, [0, 2, 4]),
    # records of intervals and of the start
    ((fl.track(Fake),), {"train": 3, "valid": 1, "record_every": fl.every(steps=2),
        "evaluate_every": fl.at_start() | fl.every(epochs=1)}, [0, 2, 3, 4, 6]),
    # a boundary with two records, of which one closes
    ((fl.track(Fake),),
        {"train": 5, "epochs": None, "steps": 2, "record_every": fl.every(steps=1)}, [1, 2, 2]),
    # one closing record
    ((fl.track(Fake),), {"train": 5, "epochs": None, "steps": 2}, [2]),
    ((fl.track(Fake), stop_at(2)), {"train": 5}, [2]),
    # several loaders
    ((fl.track(Fake),), {"loaders": {"train": [ONE] * 3, "valid": [ONE], "test": [ONE]}}, [3, 6]),
])  # fmt: skip
def test_each_record_is_sent_with_its_step_and_all_metrics(hooks, run, expected):
    twice = fl.metric(twice=lambda aux, batch: 2 * batch.mean())
    state = train(*hooks, step=fl.pipeline(fl.clip(9.0), twice)(toy_loss), **run)
    assert steps() == expected
    records = [(record.step, dict(record.metrics)) for record in state.history]
    assert sent() == [record for record in records if record[0] in expected]


def test_after_a_rollback_to_a_snapshot_the_new_records_are_sent(back_once):
    train(fl.track(Fake), back_once, epochs=4)
    assert steps() == [1, 2, 3, 2, 3, 4]


# --- also: pictures, histograms, the graph


class WithClient(Fake):
    tracker = CALLS  # what also= is given


def test_also_is_called_with_the_client_after_each_record():
    def also(client, state):
        client.append(("also", state.step, len(state.history)))
        if state.step == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train(fl.track(WithClient, also=also), train=1, epochs=9)
    assert [call[:1] if isinstance(call[0], int) else call for call in CALLS[2:]] == [
        (1,), ("also", 1, 1), (2,), ("also", 2, 2), (3,), ("also", 3, 3), "finish",
    ]  # fmt: skip
    assert "while in also(client, state) of track('fake', also=also)" in caught.value.__notes__


# --- wrong arguments


@pytest.mark.parametrize(("args", "settings", "error", "says"), [
    (("tensorbord",), {}, ValueError,
        r'track expects one of "aim", .*"tensorboard", .*; got \'tensorbord\''),
    ((InFolder,), {}, ValueError,
        r"track\('fake'\) needs a folder: track\('fake', folder=\"runs/a\"\)"),
    ((Fake, "runs"), {}, ValueError, r"track\('fake'\) takes no folder"),
    ((InFolder, "runs"), {"nmae": "a"}, TypeError,
        r"calls InFolder\(project, logging_dir\), but got an unexpected .*'nmae'"),
    ((Fake,), {"config": {"a": {"b": object}}}, TypeError,
        r"plain data in config; got a.b=<class 'object'> \(type\)"),
    ((Fake("mine"),), {"name": "other"}, TypeError,
        "no further arguments for the instance fake: .*, or pass its class"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error_when_composing(args, settings, error, says):
    CALLS.clear()
    with pytest.raises(error, match=says):
        fl.track(*args, **settings)
    assert CALLS == []


@pytest.mark.parametrize(("name", "install"), [
    ("tensorboard", "'fnloop[tensorboard]'"), ("wandb", "'fnloop[wandb]'"),
    ("dvclive", "dvclive"),
])  # fmt: skip
def test_a_missing_package_is_an_error_when_composing(name, install, monkeypatch, tmp_path):
    """A folder with its name does not count as installed."""
    found = SimpleNamespace(origin=None) if name == "dvclive" else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ImportError) as caught:
        fl.track(name, tmp_path)
    why = f"track({name!r}) needs a package that is not installed: pip install {install}"
    assert str(caught.value) == why


def test_the_repr_has_the_destination_and_no_keys():
    assert repr(fl.track(InFolder, Path("runs/a"), {"a": 1})) == "track('fake', folder='runs/a')"
    assert repr(fl.track(Fake, project="mine", api_key="secret")) == "track('fake', project='mine')"


# --- tensorboard, and the state of accelerate


def events(folder, **kinds):
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(module)
    found = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, **kinds})
    found.Reload()
    return found


def scalars(folder):
    found = events(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_gets_metrics_and_configuration(tmp_path):
    pytest.importorskip("tensorboard")
    step = fl.pipeline(fl.schedule(lambda i, total: 1 / (i + 1)))(toy_loss)
    hook = fl.track("tensorboard", tmp_path, {"lr": 1.0, "model": {"layers": [4, 4], "bias": None}})
    state = train(hook, step=step, valid=1)
    train(hook, state=state, step=step, valid=1, epochs=3)
    assert scalars(tmp_path) == {
        "train/loss": [(1, 0.0), (2, -1.0), (3, -1.5)],
        "train/lr": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))],
        "valid/loss": [(1, -1.0), (2, -1.5), (3, pytest.approx(-1.5 - 1 / 3))],
    }
    lines = (tmp_path / "hparams.yml").read_text().splitlines()
    assert lines == ["lr: 1.0", "model.bias: null", "model.layers: '[4, 4]'"]


def test_tensorboard_has_one_run_with_one_file_that_also_writes_to(tmp_path):
    pytest.importorskip("tensorboard")

    def weights(writer, state):
        writer.add_histogram("w", state.model.w, state.step)
        writer.add_image("black", torch.zeros(3, 2, 2), state.step)

    train(fl.track("tensorboard", tmp_path, {"lr": 1.0, "name": "a"}, also=weights))
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert len(names) == 2 and names[0].startswith("events.out.tfevents.")
    assert names[1] == "hparams.yml"
    found = events(tmp_path, histograms=0, images=0)
    assert [event.step for event in found.Histograms("w")] == [1, 2]
    assert [event.step for event in found.Images("black")] == [1, 2]
    assert found.Tags()["scalars"] == ["train/loss", "train/lr"]
    hparams = found.PluginTagToContent("hparams")
    kinds = ("experiment", "session_start_info", "session_end_info")
    assert set(hparams) == {f"_hparams_/{kind}" for kind in kinds}
    start = hparams["_hparams_/session_start_info"]
    assert b"name" in start and b"lr" in start


def test_a_run_that_begins_again_or_is_resumed_overwrites_its_steps_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    start = fl.at_start() | fl.every(epochs=1)
    hook = lambda: fl.track("tensorboard", tmp_path)
    for epochs in (5, 2):
        state = train(hook(), valid=1, epochs=epochs, evaluate_every=start)
    assert scalars(tmp_path)["valid/loss"] == [(0, 0.0), (1, -1.0), (2, -2.0)]
    path = fl.save(state, tmp_path / "kept")
    train(hook(), state=state, epochs=5)
    double = fl.pipeline()(lambda model, batch: 2 * toy_loss(model, batch)[0])
    train(hook(), state=fl.restore(path, toy()), step=double, epochs=4)
    assert scalars(tmp_path)["train/loss"] == [(1, 0.0), (2, -1.0), (3, -4.0), (4, -8.0)]


ACCELERATE = """
import sys, torch, fnloop as fl
from fnloop._extensions.hooks.accelerated import trackers
from fnloop.testing import toy, toy_loss

def run(folder):
    hook = fl.track("tensorboard", folder, {"a": 1})
    fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=(hook,))

run(sys.argv[1])
from accelerate import PartialState, tracking
from accelerate.state import AcceleratorState
assert PartialState._shared_state == AcceleratorState._shared_state == {}  # none is created
assert not torch.distributed.is_initialized()
usual, before = tracking.logger, dict(PartialState(cpu=True)._shared_state)
run(sys.argv[2])
assert PartialState._shared_state == before and before  # one that exists is kept
with trackers() as known:
    assert known.logger is usual
"""


@pytest.mark.long
@pytest.mark.slow
def test_the_state_of_accelerate_is_neither_created_nor_changed(tmp_path):
    pytest.importorskip("tensorboard")
    folders = [str(tmp_path / name) for name in "ab"]
    subprocess.run([sys.executable, "-c", ACCELERATE, *folders], check=True)
    assert len(list(tmp_path.glob("*/events*"))) == 2
