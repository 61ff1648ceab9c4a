"""A mistake of the user's is what the user sees: none of our frames between their call and their
line, and a note of where.

``__tracebackhide__`` is honoured by IPython (in its modes Context, which is the default, Docs and
Verbose; Plain shows every frame) and by pytest.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fnloop as fl
from fnloop.testing import toy, toy_loss

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
    def step(self, closure=None):
        raise Mistake


@fl.middleware("gradient")
def bad():
    def wrap(step):
        def worse(state, batch):
            step(state, batch)
            raise Mistake

        return worse

    return wrap


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
    return (
        *order,
        fl.schedule(lambda i, total: 1.0),
        fl.metric(mean=lambda aux, batch: batch.mean()),
    )


MISTAKES = {
    "loss": lambda: fit(
        *all_middleware(fl.amp("bf16"), fl.accumulate(2), fl.clip(1.0)), loss=mistake
    ),
    "loss, clipped first": lambda: fit(
        *all_middleware(fl.clip_value(1.0), fl.accumulate(2)), loss=mistake
    ),
    "loss, fp16": lambda: fit(fl.amp("fp16"), loss=mistake),
    "loss, LBFGS": lambda: fit(loss=mistake, state=state_of(torch.optim.LBFGS)),
    "criterion": lambda: fit(loss=fl.supervised(mistake), data=[(torch.ones(1), torch.ones(1))]),
    "optimizer": lambda: fit(loss=linear_loss, state=state_of(lambda p: BadOptimizer(p, lr=0.1))),
    "middleware": lambda: fit(bad(), fl.accumulate(2)),
    "init": lambda: fit(fl.Middleware("bad", init=mistake)),
    "metric": lambda: fit(fl.metric(bad=mistake)),
    "combine": lambda: fit(fl.metric(bad=lambda aux, batch: BadMetric())),
    "combine, in a window": lambda: fit(
        fl.metric(bad=lambda aux, batch: BadMetric()), fl.accumulate(2)
    ),
    "compute": lambda: fit(
        fl.metric(bad=lambda aux, batch: BadMetric(lambda other: other, mistake))
    ),
    "schedule": lambda: fit(fl.schedule(mistake)),
    "schedule, warmed up": lambda: fit(fl.schedule(fl.schedules.warmup(1)(mistake))),
    "schedule, joined": lambda: fit(
        fl.schedule(fl.schedules.join(mistake, fl.schedules.linear(), at=[1]))
    ),
    "torch_scheduler": lambda: fit(fl.torch_scheduler(mistake)),
    "function of a position": lambda: fit(data=lambda epoch, batch: mistake()),
    "a dataset in others": lambda: fit(
        data=fl.data.take(
            fl.data.zip_cycle(a=DataLoader(BadData()), b=fl.data.interleave({"c": ONE})), 2
        )
    ),
    "a stream in others": lambda: fit(
        data=fl.data.interleave(
            {"a": fl.data.zip_shortest(b=generator, c=generator), "d": fl.data.fixed(generator, 3)},
            {"a": 1, "d": 1},
        ),
        loss=lambda model, batch: toy_loss(model, torch.ones(1)),
    ),
    "leave_out": lambda: fit(data=fl.data.leave_out(ONE, mistake)),
    "leave_out of a stream": lambda: fit(data=fl.data.leave_out(generator, mistake)),
    "hook": lambda: fit(hooks=(mistake,)),
    "hook, every": lambda: fit(hooks=(fl.every(steps=1)(mistake),)),
    "hook, once": lambda: fit(hooks=(fl.when(lambda state: True)(fl.once(mistake)),)),
    "predicate": lambda: fit(hooks=(fl.when(mistake)(lambda state: state),)),
    "evaluate_every": lambda: fit(evaluate_every=fl.when(mistake)),
    "generator": lambda: fit(data=generator),
    "function of batches": lambda: fit(data=mistake),
    "dataset": lambda: fit(data=DataLoader(BadData(), batch_size=2, shuffle=True)),
    "dataset, unbatched": lambda: fit(data=DataLoader(BadData(), batch_size=None)),
    "stream": lambda: fit(data=DataLoader(BadStream())),
    "collate": lambda: fit(data=DataLoader([1, 2], collate_fn=mistake)),
    "evaluation": lambda: fit(loss=bad_in_evaluation, data={"train": ONE, "valid": ONE}),
    "evaluation data": lambda: fit(data={"train": ONE, "valid": DataLoader(BadData())}),
    "run": lambda: list(fl.run(fl.pipeline()(mistake), toy(), ONE, hooks=())),
    "evaluate": lambda: fl.evaluate(fl.pipeline()(mistake), toy(), ONE),
    "predict": lambda: list(fl.predict(mistake, toy(), ONE)),
    "step": lambda: fl.pipeline(fl.accumulate(2))(mistake)(toy(), ONE[:2]),
    "step.evaluate": lambda: fl.pipeline()(mistake).evaluate(toy(), ONE[0]),
}


def frames(error):
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


@pytest.mark.parametrize("name", MISTAKES)
def test_no_frame_of_ours_is_shown(name):
    with pytest.raises(Mistake) as caught:
        MISTAKES[name]()
    ours = [frame for frame in frames(caught.value) if frame.f_code.co_filename.startswith(ROOT)]
    assert ours, "the mistake was not made within fnloop"
    shown = [
        frame.f_code.co_qualname for frame in ours if not frame.f_locals.get("__tracebackhide__")
    ]
    assert shown == []


def test_frames_of_torchmetrics_are_called_from_hidden_ones():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Bad(torchmetrics.Metric):
        def update(self, *args):
            raise Mistake

        def compute(self):
            return torch.zeros(())

    for metric, inputs in (
        (Bad(), lambda aux, batch: (batch,)),
        (torchmetrics.MeanMetric(), mistake),
    ):
        with pytest.raises(Mistake) as caught:
            fit(fl.metric(bad=fl.from_torchmetrics(metric, inputs)))
        ours = [
            frame for frame in frames(caught.value) if frame.f_code.co_filename.startswith(ROOT)
        ]
        assert ours and all(frame.f_locals.get("__tracebackhide__") for frame in ours)


def test_the_note_names_a_predicate_that_says_when_to_evaluate():
    with pytest.raises(Mistake) as caught:
        MISTAKES["evaluate_every"]()
    assert caught.value.__notes__ == ["while in when(mistake), train, epoch 1, batch 1, step 1"]


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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["Context", "Verbose"])
def test_ipython_shows_the_users_line_and_the_note(mode, tmp_path):
    pytest.importorskip("IPython")
    command = [sys.executable, "-c", CELLS, mode]
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "IPYTHONDIR": str(tmp_path),
        "PYTHONPATH": str(Path(ROOT).parent),
    }
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout.split("=====\n")[1]
    assert not re.search(r"^File .*fnloop/", out, re.M), out
    before, after = re.split(r"    \[\.\.\. skipping hidden \d+ frame\]\n", out)
    assert "----> 1 state = fl.fit(step, state, batches)" in before
    (arrow,) = [line for line in after.splitlines() if line.startswith("---->")]
    assert arrow.endswith("return ((model(x) - y) ** 2).mean() + undefined")
    assert after.rstrip().endswith(
        "NameError: name 'undefined' is not defined\nwhile in the loss function loss_fn, train, "
        "epoch 1, batch 0, step 0"
    )


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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    environment = {"PATH": "", "PYTHONPATH": str(Path(ROOT).parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1 and "2 failed" in done.stdout
    assert "fnloop/" not in done.stdout, done.stdout
    assert done.stdout.count(">       assert batch.mean() == 2.0") == 2
    assert "while in the loss function loss_fn, train, epoch 1, batch 0, step 0" in done.stdout
