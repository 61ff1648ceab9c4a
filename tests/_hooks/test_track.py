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

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop.testing import toy, toy_loss

tracking = pytest.importorskip("accelerate.tracking")
ONE = [torch.ones(1)]  # an update lowers w by lr
CALLS = []


class Fake(tracking.GeneralTracker):
    """Records its calls in CALLS."""

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
    yield
    assert not accelerate_state(), "the process-wide state of accelerate was created"


def accelerate_state():
    from accelerate import PartialState

    return PartialState._shared_state


def train(hook, state=None, step=None, **kwargs):
    return fl.fit(
        step or fl.pipeline()(toy_loss),
        state or toy(),
        ONE,
        **{"epochs": 2, "hooks": (hook,), **kwargs},
    )


def two_groups():
    model = torch.nn.Linear(1, 1)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    return fl.TrainState.create(model, torch.optim.SGD(groups))


def mean_output(model, batch):
    return model(batch).mean()


# --- the calls


def test_the_order_of_calls():
    train(fl.track(Fake, config={"lr": 1.0}, project="mine", tags=["a"]))
    assert CALLS == [
        ("made", "mine", {"tags": ["a"]}),
        "start",
        ("config", {"lr": 1.0}),
        (1, {"train/loss": 0.0, "train/lr": 1.0}),
        (2, {"train/loss": -1.0, "train/lr": 1.0}),
        "finish",
    ]


def test_it_starts_after_the_first_update_not_when_composing():
    hook = fl.track(Fake)
    assert CALLS == []
    hook(attrs.evolve(toy(), events=frozenset({"update"})))
    assert CALLS == [("made", "fnloop", {}), "start"]
    hook.close()


def test_every_metric_of_a_record_is_sent():
    seen = {"train": ONE * 3, "valid": ONE, "test": ONE}
    step = fl.pipeline(fl.clip(9.0), fl.metric(twice=lambda aux, batch: 2 * batch.mean()))(toy_loss)
    state = fl.fit(step, toy(), seen, epochs=1, hooks=(fl.track(Fake),))
    assert (3, dict(state.history[0].metrics)) in CALLS
    names = {
        "train/loss",
        "train/twice",
        "train/grad_norm",
        "train/lr",
        "valid/loss",
        "valid/twice",
        "test/loss",
        "test/twice",
    }
    assert set(state.history[0].metrics) == names


def test_the_learning_rate_of_each_group_is_sent():
    fl.fit(
        fl.pipeline()(mean_output),
        two_groups(),
        [torch.ones(1, 1)],
        epochs=1,
        hooks=(fl.track(Fake),),
    )
    assert {k: v for k, v in CALLS[2][1].items() if "lr" in k} == {
        "train/lr": 0.5,
        "train/lr/1": 0.25,
    }


def test_learning_rates_in_the_record_are_not_sent_twice():
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(mean_output)
    state = fl.fit(step, two_groups(), [torch.ones(1, 1)], epochs=1, hooks=(fl.track(Fake),))
    assert CALLS[2] == (1, state.history[0].metrics)
    assert {k: v for k, v in CALLS[2][1].items() if "lr" in k} == {
        "train/lr": 0.25,
        "train/lr/1": 0.125,
    }


def test_the_rate_that_was_used_is_sent_not_the_next_one():
    halved = fl.torch_scheduler(lambda opt, run: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
    train(fl.track(Fake), step=fl.pipeline(halved)(toy_loss))
    assert [call[1]["train/lr"] for call in CALLS if isinstance(call[0], int)] == [1.0, 0.5]


def test_a_learning_rate_can_be_a_tensor():
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(
        model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False)
    )
    fl.fit(fl.pipeline()(mean_output), state, [torch.ones(1, 1)], epochs=1, hooks=(fl.track(Fake),))
    assert CALLS[2][1]["train/lr"] == 0.5


def test_the_configuration_is_flattened_to_plain_values():
    config = {
        "lr": np.float32(0.5),
        "n": np.int64(3),
        "model": {"sizes": (1, 2), "act": {"name": "relu"}},
        "none": None,
        "b": True,
    }
    train(fl.track(Fake, config=config))
    flat = {
        "lr": 0.5,
        "n": 3,
        "model.sizes": "[1, 2]",
        "model.act.name": "relu",
        "none": None,
        "b": True,
    }
    assert CALLS[2] == ("config", flat)
    assert [type(v) for v in CALLS[2][1].values()] == [float, int, str, str, type(None), bool]


# --- runs


def test_it_is_closed_when_a_run_raises():
    def broken(state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(None, hooks=(fl.track(Fake), fl.when(lambda s: s.step == 2)(broken)))
    assert CALLS[-2][0] == 2 and CALLS[-1] == "finish"


def test_it_is_closed_after_ctrl_c():
    def interrupted(state):
        raise KeyboardInterrupt

    assert train(None, hooks=(fl.track(Fake), interrupted)).stop == "interrupted"
    assert CALLS[-1] == "finish" and CALLS.count("finish") == 1


def test_a_run_that_fails_at_once_opens_no_tracker():
    def broken(model, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(fl.track(Fake), step=fl.pipeline()(broken))
    assert CALLS == []


def test_a_failure_to_close_is_logged(caplog):
    class Broken(Fake):
        def finish(self):
            raise OSError("no network")

    with caplog.at_level(logging.ERROR, "fnloop"):
        assert train(fl.track(Broken)).epoch == 2
    assert caplog.messages == ["track('fake'): could not be closed: no network"]


def test_several_runs_continue_the_steps_and_send_nothing_twice():
    hook = fl.track(Fake, config={"a": 1})
    state = train(hook, train(hook, epochs=1), epochs=3)
    assert [call[0] for call in CALLS if isinstance(call[0], int)] == [1, 2, 3]
    assert [call[0] for call in CALLS].count("config") == 1 and CALLS.count("start") == CALLS.count(
        "finish"
    ) == 2
    train(hook, state, epochs=3)  # nothing to do
    assert CALLS.count("start") == 2


def test_a_resumed_run_sends_only_new_records(tmp_path):
    fl.save(train(fl.track(Fake)), tmp_path / "kept")
    CALLS.clear()
    train(fl.track(Fake), fl.restore(tmp_path / "kept", toy()), epochs=3)
    assert CALLS == [
        ("made", "fnloop", {}),
        "start",
        (3, {"train/loss": -2.0, "train/lr": 1.0}),
        "finish",
    ]


def test_called_rarely_it_sends_only_the_records_of_those_boundaries():
    train(fl.every(epochs=2)(fl.track(Fake)), epochs=5)
    assert [call[0] for call in CALLS if isinstance(call[0], int)] == [2, 4]


@pytest.mark.parametrize("stops", [False, True], ids=["target", "stop"])
def test_the_closing_record_is_sent_once(stops):
    stop = fl.when(lambda state: stops and state.step == 2)(
        lambda state: attrs.evolve(state, stop="enough")
    )
    fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        (ONE * 5, ONE),
        steps=2 + stops,
        hooks=(fl.track(Fake), stop),
    )
    sent = [call for call in CALLS if isinstance(call[0], int)]
    assert sent == [(2, {"train/loss": -0.5, "valid/loss": -2.0, "train/lr": 1.0})]


def test_only_the_first_process_sends():
    train(fl.track(Fake), attrs.evolve(toy(), backend=Backend("cpu", rank=1, world_size=1)))
    assert CALLS == []


def test_an_instance_of_a_tracker_is_used_as_it_is():
    mine = Fake("mine")
    train(fl.track(mine))
    assert [c for c in CALLS if c in ("start", "finish")] == ["start", "finish"] and CALLS[0] == (
        "made",
        "mine",
        {},
    )
    assert len([c for c in CALLS if c[0] == "made"]) == 1


def test_a_tracker_that_needs_a_folder_gets_it(tmp_path):
    train(fl.track(InFolder, tmp_path))
    assert CALLS[0] == ("made", "", {"logging_dir": str(tmp_path)})


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
    train(hook, train(hook, epochs=1), epochs=2)
    made = [call for call in CALLS if call[0] == "made"]
    assert made == [
        ("made", "fnloop", {"tags": "a"}),
        ("made", "fnloop", {"tags": "a", **continued}),
    ]


def test_a_registered_name_is_accepted(monkeypatch):
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "fake", Fake)
    train(fl.track("fake"))
    assert CALLS[1] == "start"


def test_the_logger_of_accelerate_is_restored():
    before = tracking.logger
    train(fl.track(Fake))
    assert tracking.logger is before


# --- records of different names


def test_records_of_intervals_and_of_the_start_are_sent_with_their_steps():
    fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        (ONE * 3, ONE),
        epochs=2,
        hooks=(fl.track(Fake),),
        evaluate_every=fl.at_start() | fl.every(epochs=1),
        record_every=fl.every(steps=2),
    )
    sent = [call for call in CALLS if isinstance(call[0], int)]
    rates = {"recent/lr": 1.0}
    assert sent == [
        (0, {"valid/loss": 0.0}),
        (2, {"recent/loss": -0.5, **rates}),
        (
            3,
            {"train/loss": -1.0, "train/lr": 1.0, "recent/loss": -2.0, **rates, "valid/loss": -3.0},
        ),
        (4, {"recent/loss": -3.0, **rates}),
        (
            6,
            {"train/loss": -4.0, "train/lr": 1.0, "recent/loss": -4.5, **rates, "valid/loss": -6.0},
        ),
    ]


def test_two_records_of_one_boundary_are_both_sent():
    state = fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        ONE * 5,
        steps=2,
        hooks=(fl.track(Fake),),
        record_every=fl.every(steps=1),
    )
    sent = [call for call in CALLS if isinstance(call[0], int)]
    assert [step for step, _ in sent] == [1, 2, 2]
    assert [dict(metrics) for _, metrics in sent] == [dict(r.metrics) for r in state.history]
    assert state.history[-1].closing


def test_called_rarely_it_sends_the_record_of_the_start_too():
    fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        (ONE, ONE),
        epochs=5,
        hooks=(fl.every(epochs=2)(fl.track(Fake)),),
        evaluate_every=fl.at_start(),
    )
    assert [call[0] for call in CALLS if isinstance(call[0], int)] == [0, 2, 4]


def test_after_a_rollback_to_a_snapshot_the_new_records_are_sent(back_once):
    train(None, hooks=(fl.track(Fake), back_once), epochs=4)
    assert [call[0] for call in CALLS if isinstance(call[0], int)] == [1, 2, 3, 2, 3, 4]


# --- also: pictures, histograms, the graph


class WithClient(Fake):
    tracker = CALLS  # what also= is given


def test_also_is_called_with_the_client_after_each_record():
    def also(client, state):
        client.append(("also", state.step, len(state.history)))

    train(fl.track(WithClient, also=also), epochs=2)
    assert [call[:1] if isinstance(call[0], int) else call for call in CALLS[2:]] == [
        (1,), ("also", 1, 1), (2,), ("also", 2, 2), "finish",
    ]  # fmt: skip


def test_also_is_called_for_the_closing_record_of_a_stopped_run():
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    seen = []
    hook = fl.track(WithClient, also=lambda client, state: seen.append(state.step))
    fl.fit(fl.pipeline()(toy_loss), toy(), ONE * 5, hooks=(hook, stop))
    assert seen == [2]


def test_also_is_called_only_on_the_process_that_sends():
    seen = []
    hook = fl.track(WithClient, also=lambda client, state: seen.append(state.step))
    train(hook, attrs.evolve(toy(), backend=Backend("cpu", rank=1, world_size=1)))
    assert seen == []


def test_an_exception_of_also_names_it_and_closes_the_tracker():
    def pictures(client, state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train(fl.track(WithClient, also=pictures))
    assert "while in pictures(client, state) of track('fake', also=pictures)" in (
        caught.value.__notes__
    )
    assert CALLS[-1] == "finish" and CALLS[-2][0] == 1  # the numbers were sent


# --- wrong arguments


@pytest.mark.parametrize(("args", "settings", "error", "says"), [
    (("tensorbord",), {}, ValueError,
        r'track expects one of "aim", .*"tensorboard", .*; got \'tensorbord\''),
    (("all",), {}, ValueError, "got 'all'"),
    ((3,), {}, TypeError, r'such as "tensorboard", or a GeneralTracker of accelerate; got 3'),
    ((fl.History,), {}, TypeError, "got <class 'fnloop._core.history.History'>"),
    ((InFolder,), {}, ValueError,
        r"track\('fake'\) needs a folder: track\('fake', folder=\"runs/a\"\)"),
    ((Fake, "runs"), {}, ValueError, r"track\('fake'\) takes no folder"),
    ((InFolder, "runs"), {"nmae": "a"}, TypeError,
        r"calls InFolder\(project, logging_dir\), but got an unexpected .*'nmae'"),
    ((InFolder, {"lr": 1}), {}, TypeError,
        r"""folder as a path, such as "runs/a"; got {'lr': 1}"""),
    ((Fake,), {"project": 3}, TypeError, "project as the name of a project, a str; got 3"),
    ((Fake,), {"config": [1]}, TypeError, r"config as a mapping, such as {'lr': 0.1}; got \[1\]"),
    ((Fake,), {"also": 3}, TypeError, r"also as a function \(client, state\); got 3"),
    ((Fake,), {"also": lambda state: 0}, TypeError, r"<lambda> takes \(state\)"),
    ((Fake,), {"config": ()}, TypeError, r"config as a mapping"),
    ((Fake,), {"config": {"a": {"b": object}}}, TypeError,
        r"plain data in config; got a.b=<class 'object'> \(type\)"),
    ((Fake,), {"config": {"a": [print]}}, TypeError, "plain data in config; got a="),
])  # fmt: skip
def test_a_wrong_argument_is_an_error_when_composing(args, settings, error, says):
    with pytest.raises(error, match=says):
        fl.track(*args, **settings)
    assert CALLS == []


def test_an_instance_of_a_tracker_takes_no_settings():
    with pytest.raises(
        TypeError, match=r"no further arguments for the instance fake: .*, or pass its class"
    ):
        fl.track(Fake("mine"), name="other")


@pytest.mark.parametrize(("name", "install"), [
    ("tensorboard", "'fnloop[tensorboard]'"), ("wandb", "'fnloop[wandb]'"),
    ("comet_ml", "comet-ml"), ("swanlab", "swanlab"),
])  # fmt: skip
def test_a_missing_package_is_an_error_when_composing(name, install, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        fl.track(name, tmp_path)
    assert (
        str(caught.value)
        == f"track({name!r}) needs a package that is not installed: pip install {install}"
    )


def test_a_folder_with_the_name_of_a_package_does_not_count_as_installed(monkeypatch, tmp_path):
    (tmp_path / "dvclive").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    if importlib.util.find_spec("dvclive").origin is None:
        with pytest.raises(ImportError, match="pip install dvclive"):
            fl.track("dvclive")


def test_the_repr_has_the_destination_and_no_keys():
    assert repr(fl.track(InFolder, Path("runs/a"), {"a": 1})) == "track('fake', folder='runs/a')"
    assert repr(fl.track(Fake, project="mine", api_key="secret")) == "track('fake', project='mine')"


# --- tensorboard, and the state of accelerate


def scalars(folder):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_metrics_and_configuration(tmp_path):
    pytest.importorskip("tensorboard")
    step = fl.pipeline(fl.schedule(lambda i, total: 1 / (i + 1)))(toy_loss)
    hook = fl.track("tensorboard", tmp_path, {"lr": 1.0, "model": {"layers": [4, 4], "bias": None}})
    state = fl.fit(step, toy(), {"train": ONE, "valid": ONE}, epochs=2, hooks=(hook,))
    fl.fit(step, state, {"train": ONE, "valid": ONE}, epochs=3, hooks=(hook,))
    assert scalars(tmp_path) == {
        "train/loss": [(1, 0.0), (2, -1.0), (3, -1.5)],
        "train/lr": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))],
        "valid/loss": [(1, -1.0), (2, -1.5), (3, pytest.approx(-1.5 - 1 / 3))],
    }
    assert (tmp_path / "hparams.yml").read_text().split("\n")[:3] == [
        "lr: 1.0",
        "model.bias: null",
        "model.layers: '[4, 4]'",
    ]


def test_tensorboard_has_one_run_with_one_file_that_also_writes_to(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )

    def weights(writer, state):
        writer.add_histogram("w", state.model.w, state.step)
        writer.add_image("black", torch.zeros(3, 2, 2), state.step)

    train(fl.track("tensorboard", tmp_path, {"lr": 1.0, "name": "a"}, also=weights))
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert len(names) == 2 and names[0].startswith("events.out.tfevents.")
    assert names[1] == "hparams.yml"
    everything = {"histograms": 0, "images": 0, "scalars": 0}
    events = event_accumulator.EventAccumulator(str(tmp_path), size_guidance=everything)
    events.Reload()
    assert [event.step for event in events.Histograms("w")] == [1, 2]
    assert [event.step for event in events.Images("black")] == [1, 2]
    assert events.Tags()["scalars"] == ["train/loss", "train/lr"]
    assert set(events.PluginTagToContent("hparams")) == {
        "_hparams_/experiment",
        "_hparams_/session_start_info",
        "_hparams_/session_end_info",
    }
    start = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"name" in start and b"lr" in start


def test_a_run_that_begins_again_overwrites_its_record_of_the_start_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    for _ in range(2):
        fl.fit(
            fl.pipeline()(toy_loss),
            toy(),
            (ONE, ONE),
            epochs=1,
            hooks=(fl.track("tensorboard", tmp_path),),
            evaluate_every=fl.at_start() | fl.every(epochs=1),
        )
    assert scalars(tmp_path)["valid/loss"] == [(0, 0.0), (1, -1.0)]


def test_a_resumed_run_overwrites_later_steps_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    state = train(fl.track("tensorboard", tmp_path), epochs=2)
    fl.save(state, tmp_path / "kept")
    train(fl.track("tensorboard", tmp_path), state, epochs=5)
    double = fl.pipeline()(
        lambda model, batch: 2 * toy_loss(model, batch)[0]
    )  # to distinguish the runs
    train(
        fl.track("tensorboard", tmp_path),
        fl.restore(tmp_path / "kept", toy()),
        step=double,
        epochs=4,
    )
    assert scalars(tmp_path)["train/loss"] == [(1, 0.0), (2, -1.0), (3, -4.0), (4, -8.0)]


@pytest.mark.slow
def test_the_state_of_accelerate_is_not_created(tmp_path):
    pytest.importorskip("tensorboard")
    code = f"""
import torch, fnloop as fl
from fnloop.testing import toy, toy_loss
hook = fl.track("tensorboard", {str(tmp_path)!r}, {{"a": 1}})
fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=(hook,))
from accelerate import PartialState
from accelerate.state import AcceleratorState
print(PartialState._shared_state, AcceleratorState._shared_state)
print(torch.distributed.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{} {}\nFalse\n"
    assert list(Path(tmp_path).glob("events*"))


@pytest.mark.slow
def test_an_existing_state_of_accelerate_is_kept(tmp_path):
    pytest.importorskip("tensorboard")
    code = f"""
import torch, fnloop as fl
from accelerate import PartialState, tracking
from fnloop._backend.processes import trackers
from fnloop.testing import toy, toy_loss
usual = tracking.logger
before = dict(PartialState(cpu=True)._shared_state)
hook = fl.track("tensorboard", {str(tmp_path)!r}, {{"a": 1}})
fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=(hook,))
assert PartialState._shared_state == before and before
with trackers() as known:
    assert known.logger is usual
"""
    subprocess.run([sys.executable, "-c", code], check=True)
