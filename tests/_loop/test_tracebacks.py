"""A mistake of the user's is what the user sees: none of our frames between their call and their
line, and a note of where.

The one frame that is left, of the public function, has ``__tracebackhide__``, and so have all
others for who sets FNLOOP_TRACEBACK=full. It is honoured by IPython (in its modes Context, which is
the default, Docs and Verbose; Plain shows every frame) and by pytest.
"""

import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fnloop as fl
from fnloop import debug, schedules
from fnloop._loop import run
from fnloop.testing import check_laws, toy, toy_loss

ROOT = str(Path(fl.__file__).parent)
ONE = [torch.ones(1)] * 3


class Mistake(Exception):
    pass


def mistake(*args, **kwargs):
    raise Mistake


class BadData(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise Mistake


class BadStream(IterableDataset):
    def __iter__(self):
        raise Mistake
        yield


class BadMetric:
    """One that can't be combined, or can't be computed."""

    def __init__(self, combine=mistake, compute=float):
        self.combine, self.compute = combine, compute


class BadOptimizer(torch.optim.SGD):
    step = mistake


@fl.middleware("gradient")
def bad():
    return lambda step: lambda state, batch: step(state, batch) and mistake()


def generator():
    yield torch.ones(1)
    raise Mistake


def state_of(optimizer):
    model = nn.Linear(1, 1)
    return fl.TrainState.create(model, optimizer(model.parameters()))


def linear_loss(model, batch):
    return model(batch.view(1, 1)).mean()


def bad_in_evaluation(model, batch):
    return toy_loss(model, batch) if model.training else mistake()


def fit(*middleware, loss=toy_loss, data=ONE, state=None, hooks=(), **kwargs):
    fl.fit(fl.pipeline(*middleware)(loss), state or toy(), data, hooks=hooks, **kwargs)


def all_middleware(*order):
    return *order, fl.schedule(lambda i, total: 1.0), fl.metric(mean=lambda aux, x: x.mean())


ORDERS = (fl.amp("bf16"), fl.accumulate(2), fl.clip(1.0)), (fl.clip_value(1.0), fl.accumulate(2))
UNCOMBINED = fl.metric(bad=lambda aux, batch: BadMetric())
UNCOMPUTED = fl.metric(bad=lambda aux, batch: BadMetric(lambda other: other, mistake))
PLAIN, data = fl.pipeline()(mistake), fl.data
MISTAKES = {
    "loss": lambda: fit(*all_middleware(*ORDERS[0]), loss=mistake),
    "loss, clipped first": lambda: fit(*all_middleware(*ORDERS[1]), loss=mistake),
    "loss, fp16": lambda: fit(fl.amp("fp16"), loss=mistake),
    "loss, LBFGS": lambda: fit(loss=mistake, state=state_of(torch.optim.LBFGS)),
    "criterion": lambda: fit(loss=fl.supervised(mistake), data=[(torch.ones(1), torch.ones(1))]),
    "optimizer": lambda: fit(loss=linear_loss, state=state_of(lambda p: BadOptimizer(p, lr=0.1))),
    "middleware": lambda: fit(bad(), fl.accumulate(2)),
    "init": lambda: fit(fl.Middleware("bad", init=mistake)),
    "metric": lambda: fit(fl.metric(bad=mistake)),
    "combine": lambda: fit(UNCOMBINED),
    "combine, in a window": lambda: fit(UNCOMBINED, fl.accumulate(2)),
    "compute": lambda: fit(UNCOMPUTED),
    "schedule": lambda: fit(fl.schedule(mistake)),
    "schedule, warmed up": lambda: fit(fl.schedule(schedules.warmup(1)(mistake))),
    "schedule, joined": lambda: fit(fl.schedule(schedules.join(mistake, mistake, at=[1]))),
    "torch_scheduler": lambda: fit(fl.torch_scheduler(mistake)),
    "function of a position": lambda: fit(data=lambda epoch, batch: mistake()),
    "a dataset in others": lambda: fit(
        data=data.take(data.zip_cycle(a=DataLoader(BadData()), b=data.interleave({"c": ONE})), 2)
    ),
    "a stream in others": lambda: fit(
        data=data.interleave(
            {"a": data.zip_shortest(b=generator, c=generator), "d": data.fixed(generator, 3)},
            {"a": 1, "d": 1},
        ),
        loss=lambda model, batch: toy_loss(model, torch.ones(1)),
    ),
    "leave_out": lambda: fit(data=data.leave_out(ONE, mistake)),
    "leave_out of a stream": lambda: fit(data=data.leave_out(generator, mistake)),
    "hook": lambda: fit(hooks=(mistake,)),
    "hook, every": lambda: fit(hooks=(fl.every(steps=1)(mistake),)),
    "hook, once": lambda: fit(hooks=(fl.when(lambda state: True)(fl.once(mistake)),)),
    "inspect": lambda: fit(hooks=(fl.inspect(mistake),), data=(ONE, ONE)),
    "inspect, every": lambda: fit(
        hooks=(fl.every(epochs=1)(fl.inspect(mistake)),), data=(ONE, ONE)
    ),
    "measure": lambda: fit(hooks=(fl.measure(mistake, name="two"),)),
    "measure, everywhere": lambda: fit(hooks=(fl.measure(mistake, name="two", everywhere=True),)),
    "predicate": lambda: fit(hooks=(fl.when(mistake)(lambda state: state),)),
    "evaluate_every": lambda: fit(evaluate_every=fl.when(mistake)),
    "record_every": lambda: fit(record_every=fl.when(mistake)),
    "generator": lambda: fit(data=generator),
    "function of batches": lambda: fit(data=mistake),
    "dataset": lambda: fit(data=DataLoader(BadData(), batch_size=2, shuffle=True)),
    "dataset, unbatched": lambda: fit(data=DataLoader(BadData(), batch_size=None)),
    "stream": lambda: fit(data=DataLoader(BadStream())),
    "collate": lambda: fit(data=DataLoader([1, 2], collate_fn=mistake)),
    "evaluation": lambda: fit(loss=bad_in_evaluation, data={"train": ONE, "valid": ONE}),
    "evaluation data": lambda: fit(data={"train": ONE, "valid": DataLoader(BadData())}),
    "run": lambda: list(fl.run(PLAIN, toy(), ONE, hooks=())),
    "evaluate": lambda: fl.evaluate(PLAIN, toy(), ONE),
    "predict": lambda: list(fl.predict(mistake, toy(), ONE)),
    "step": lambda: fl.pipeline(fl.accumulate(2))(mistake)(toy(), ONE[:2]),
    "step.evaluate": lambda: PLAIN.evaluate(toy(), ONE[0]),
}


def frames_of(error):
    return [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]


def names_of_ours(error):
    codes = (code for code in frames_of(error) if code.co_filename.startswith(ROOT))
    return [code.co_name for code in codes]


def assert_hidden(error):
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(ROOT)]
    assert ours, "the mistake was not made within fnloop"
    shown = [f.f_code.co_qualname for f in ours if not f.f_locals.get("__tracebackhide__")]
    assert shown == []


@pytest.mark.parametrize("name", MISTAKES)
def test_no_frame_of_ours_is_shown(name, monkeypatch):
    monkeypatch.setenv("FNLOOP_TRACEBACK", "full")
    with pytest.raises(Mistake) as caught:
        MISTAKES[name]()
    assert_hidden(caught.value)


def test_frames_of_torchmetrics_are_called_from_hidden_ones(monkeypatch):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Bad(torchmetrics.Metric):
        update = mistake
        compute = lambda self: torch.zeros(())

    monkeypatch.setenv("FNLOOP_TRACEBACK", "full")
    for given in ((Bad(), lambda aux, batch: (batch,)), (torchmetrics.MeanMetric(), mistake)):
        with pytest.raises(Mistake) as caught:
            fit(fl.metric(bad=fl.from_torchmetrics(*given)))
        assert_hidden(caught.value)


@pytest.mark.parametrize("name", ["evaluate_every", "record_every"])
def test_the_note_names_a_predicate_that_says_when_to_make_a_record(name):
    with pytest.raises(Mistake) as caught:
        MISTAKES[name]()
    assert caught.value.__notes__ == ["while in when(mistake), train, epoch 1, batch 1, step 1"]
    assert caught.value.state.step == 1


# --- what a traceback has

TOOLS = {
    "find_lr": lambda: fl.find_lr(PLAIN, toy(), ONE, updates=10),
    "find_batch_size": lambda: fl.find_batch_size(PLAIN, toy(), lambda n: [torch.ones(n)]),
    "search": lambda: fl.search({"a": PLAIN}, {"a": toy()}, ONE, rungs=(1,), key="train/loss"),
    "tune": lambda: data.tune(PLAIN, toy(), ONE),
    "check_script": lambda: debug.check_script(PLAIN, toy(), ONE),
    "check_laws": lambda: check_laws(fl.pipeline(bad())),
    "a fit in a hook": lambda: fit(hooks=(lambda state: fit(loss=mistake),)),
    "an evaluation in a hook": lambda: fit(hooks=(lambda state: fl.evaluate(PLAIN, state, ONE),)),
}


@pytest.mark.parametrize("name", [*MISTAKES, *TOOLS])
def test_one_frame_of_ours_is_left_and_all_frames_of_users(name, monkeypatch):
    make = (MISTAKES | TOOLS)[name]
    with pytest.raises(Mistake) as short:
        make()
    assert len(names_of_ours(short.value)) == 1
    monkeypatch.setenv("FNLOOP_TRACEBACK", "full")
    with pytest.raises(Mistake) as whole:
        make()
    assert len(names_of_ours(whole.value)) > 1
    in_tests = lambda error: [code for code in frames_of(error) if code.co_filename == __file__]
    assert in_tests(short.value) == in_tests(whole.value)


def test_a_debugger_finds_what_the_frames_of_the_loss_function_and_of_its_caller_hold():
    def loss_fn(model, batch):
        doubled = 2 * batch
        raise Mistake(doubled)

    there = "the caller"
    with pytest.raises(Mistake) as caught:
        fl.fit(fl.pipeline()(loss_fn), toy(), ONE, hooks=())
    first, *_, last = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert first.f_locals["there"] is there and last.f_locals["doubled"].item() == 2.0


def test_what_an_error_was_raised_from_is_short_too():
    def loss_fn(model, batch):
        try:
            fl.evaluate(PLAIN, toy(), ONE)
        except Mistake as error:
            raise ValueError("wrong") from error

    with pytest.raises(ValueError, match="wrong") as caught:
        fit(loss=loss_fn)
    assert len(names_of_ours(caught.value)) == 1
    assert names_of_ours(caught.value.__cause__) == []
    assert caught.value.__cause__ is caught.value.__context__


def test_an_error_that_the_library_raises_keeps_the_frame_that_raised_it():
    with pytest.raises(TypeError, match="must be a scalar tensor") as caught:
        fit(loss=lambda model, batch: None)
    assert len(names_of_ours(caught.value)) == 2
    assert names_of_ours(caught.value)[-1] == "_check_loss"


def test_an_error_in_the_library_itself_keeps_every_frame(monkeypatch):
    monkeypatch.setattr(run.World, "count", lambda self, new: None)  # takes another argument
    with pytest.raises(TypeError, match="positional arguments") as caught:
        fit()
    assert names_of_ours(caught.value)[-1] == "run" and len(names_of_ours(caught.value)) > 2


def test_the_error_is_the_one_that_was_raised_with_its_notes_and_its_state():
    error = Mistake("mine")

    def loss_fn(model, batch):
        raise error

    with pytest.raises(Mistake) as caught:
        fit(loss=loss_fn)
    assert caught.value is error and error.state.step == 0
    assert error.__notes__[-1].endswith(
        "the loss function loss_fn, train, epoch 1, batch 0, step 0"
    )
    assert error.__cause__ is None and error.__context__ is None


# --- what is rendered

CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell('''
import torch, fnloop as fl

def loss_fn(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).mean() + undefined

model = torch.nn.Linear(2, 1)
members = (fl.amp("bf16"), fl.accumulate(2), fl.clip(1.0), fl.schedule(fl.schedules.cosine()))
step = fl.pipeline(*members)(loss_fn)
state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
batches = [(torch.ones(3, 2), torch.ones(3, 1))] * 4
''')
shell.run_line_magic("xmode", sys.argv[1])
print("=====")
shell.run_cell("state = fl.fit(step, state, batches)")
"""


def printed_by(command, folder):
    """Return what a command prints, and its exit code, without the settings of this user."""
    home = {"PATH": "", "HOME": str(folder), "IPYTHONDIR": str(folder)}
    environment = {**home, "PYTHONPATH": str(Path(ROOT).parent)}
    given = {"capture_output": True, "text": True, "cwd": folder, "env": environment}
    done = subprocess.run([sys.executable, *command], **given)
    return done.stdout, done.returncode


@pytest.mark.long
@pytest.mark.parametrize("mode", ["Context", "Verbose"])
def test_ipython_shows_the_users_line_and_the_note(mode, tmp_path):
    pytest.importorskip("IPython")
    out = printed_by(["-c", CELLS, mode], tmp_path)[0].split("=====\n")[1]
    assert not re.search(r"^File .*fnloop/", out, re.M), out
    before, after = re.split(r"    \[\.\.\. skipping hidden \d+ frame\]\n", out)
    assert "----> 1 state = fl.fit(step, state, batches)" in before
    (arrow,) = [line for line in after.splitlines() if line.startswith("---->")]
    assert arrow.endswith("return ((model(x) - y) ** 2).mean() + undefined")
    assert after.rstrip().endswith(
        "NameError: name 'undefined' is not defined\nwhile in the loss function loss_fn, train, "
        "epoch 1, batch 0, step 0"
    )


SCRIPT = """
import torch, fnloop as fl
from fnloop.testing import toy

def loss_fn(model, batch):
    return model(batch).mean() + undefined

step = fl.pipeline(fl.amp("bf16"), fl.clip(1.0))(loss_fn)
state = fl.fit(step, toy(), [torch.ones(1)], hooks=())
"""


@pytest.mark.slow
def test_a_terminal_shows_the_users_lines_and_one_of_ours_that_says_how_to_see_all(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    given = {"capture_output": True, "text": True, "cwd": tmp_path}
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(Path(ROOT).parent)}
    shown = {}
    for setting in ("", "full"):
        environment["FNLOOP_TRACEBACK"] = setting
        command = [sys.executable, "train.py"]
        shown[setting] = subprocess.run(command, env=environment, **given).stderr
    lines = re.sub(r"\n +[\^~]+\n", "\n", shown[""]).splitlines()
    place = rf'  File "{ROOT}/_display/frames.py", line '
    assert lines[0:3] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 9, in <module>',
        "    state = fl.fit(step, toy(), [torch.ones(1)], hooks=())",
    ]
    assert lines[3].startswith(place)
    assert lines[4] == ("    return function(*args, **kwargs)  # all frames: FNLOOP_TRACEBACK=full")
    assert lines[5:7] == [
        f'  File "{tmp_path}/train.py", line 6, in loss_fn',
        "    return model(batch).mean() + undefined",
    ]
    assert lines[7] == "NameError: name 'undefined' is not defined"
    assert shown["full"].count(ROOT) > 8


UNIT_TEST = """
import torch, fnloop as fl
from fnloop.testing import toy

def loss_fn(model, batch):
    assert batch.mean() == 2.0
    return model(batch).mean()

def test_fit():
    fl.fit(fl.pipeline(fl.clip(1.0))(loss_fn), toy(), [torch.ones(1)], hooks=())

def test_step():
    fl.pipeline(fl.accumulate(2))(loss_fn)(toy(), [torch.ones(1)])
"""


@pytest.mark.slow
def test_pytest_shows_the_users_lines_and_the_note(tmp_path):
    (tmp_path / "test_mine.py").write_text(UNIT_TEST)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    out, code = printed_by(command, tmp_path)
    assert code == 1 and "2 failed" in out
    assert "fnloop/" not in out, out
    assert out.count(">       assert batch.mean() == 2.0") == 2
    assert "while in the loss function loss_fn, train, epoch 1, batch 0, step 0" in out
