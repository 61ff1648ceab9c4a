"""dry_run: what it sees, what it finds, and that it leaves nothing behind."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fnloop as fl
from fnloop._display.tables import shorten
from fnloop._hooks.hook import Hook
from fnloop.testing import Toy, assert_same, toy, toy_loss

ONES = [torch.ones(2)] * 4


def seen(report, kind, name=None):
    """Return the texts of the findings of a kind, or of one name."""
    return [f.text for f in report.findings if f.kind == kind and name in (None, f.name)]


def test_loaders_weights_and_records():
    def counted(model, batch):
        loss, aux = toy_loss(model, batch["x"])
        return loss, {**aux, "weight": batch["n"].sum()}

    batches = [{"x": torch.ones(2), "n": torch.tensor([3, 4])}] * 3
    step = fl.pipeline(fl.metric(top=lambda aux, batch: aux["output"].max()))(counted)
    report = fl.dry_run(step, toy(), {"train": lambda: iter(batches), "valid": batches[:1]})
    (train,) = seen(report, "loader", "train")
    assert train.startswith(
        'unknown length; x: float32 [2], n: int64 [2]; 7 items, by aux["weight"]; first in '
    )
    assert train.count("next in") == 1
    (valid,) = seen(report, "loader", "valid")
    assert valid.startswith("1 batch; x: ") and "next" not in valid
    # Two updates by 1 from w = 0: the losses are 0 and -1, and after them -2.
    assert seen(report, "record", "train") == ["loss -0.5, top -0.5, lr 1"]
    assert seen(report, "record", "valid") == ["loss -2, top -2"]
    assert len(seen(report, "update")) == 2
    assert report.problems == ()


def test_it_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []

    def mine(state):
        calls.append((state.step, [*state.history[-1].metrics]))
        return state

    hooks = (
        fl.every(steps=500)(fl.checkpoint("runs/a", best="valid/loss")),
        fl.checkpoint("runs/b", only=("model",)),
        fl.to_csv("table.csv"),
        fl.on_main(fl.to_jsonl("table.jsonl")),
        fl.when_improved("valid/loss")(fl.every(epochs=7)(mine)),
        *(fl.early_stop("valid/loss"), fl.restore_best("valid/loss"), fl.time_limit(hours=1)),
        *(fl.progress(), fl.live_plot(file="picture.png")),
    )
    dropped = fl.pipeline(fl.ema(0.9), fl.schedule(lambda i, total: 1 - i / total))(
        lambda model, batch: toy_loss(model, torch.nn.functional.dropout(batch))
    )
    loader = DataLoader(torch.arange(12.0), batch_size=2, shuffle=True)
    state = fl.fit(dropped, toy(), loader, steps=3, hooks=())
    before = fl.snapshot(state)
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    report = fl.dry_run(dropped, state, (loader, ONES), hooks)
    now = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(draws[0], now[0])
    assert draws[1:] == now[1:]
    assert [*tmp_path.iterdir()] == []
    # Once, at the record, after two updates.
    assert [step for step, _ in calls] == [state.step + 2]
    assert {"train/loss", "valid/loss", "valid/ema/loss"} < {*calls[0][1]}
    assert seen(report, "hook") == [
        *["called, with a temporary folder"] * 2,
        *["called, with a temporary file"] * 2,
        *["called"] * 3,
        "not called: its time begins with the run",
        *["not called: it only shows the run"] * 2,
    ]
    assert report.problems == ()
    assert_same(
        fl.fit(dropped, state, loader, epochs=2, hooks=()),
        fl.fit(dropped, before, loader, epochs=2, hooks=()),
    )


def test_what_would_not_resume():
    class Noise(Dataset):
        """Samples that differ each time, by a generator that no checkpoint holds."""

        generator = np.random.default_rng(0)

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return float(self.generator.random())

    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), DataLoader(Noise(), batch_size=2))
    (problem,) = report.problems
    assert problem.startswith("resume: one update after a restore, state.model.w differs")

    class Forgets(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.calls = 0

        def step(self):
            self.calls += 1
            super().step()

    model = Toy()
    state = fl.TrainState.create(model, Forgets(model.parameters()), seed=0)
    (problem,) = fl.dry_run(fl.pipeline()(toy_loss), state, ONES).problems
    assert "Forgets cannot be resumed bit for bit: its attribute calls" in problem


def test_what_would_not_capture():
    def reads(model, batch):
        loss, aux = toy_loss(model, batch)
        return (loss if loss.item() < 1e9 else 2 * loss), aux

    (problem,) = fl.dry_run(fl.pipeline(fl.clip(1.0))(reads), toy(), ONES).problems
    assert problem.startswith("graph: reads a tensor to the host (test_dry_run.py, line ")
    assert problem.endswith("in reads): cuda_graph cannot capture that")

    def collate(samples):
        return torch.tensor([sample.item() for sample in samples])

    loader = DataLoader(torch.ones(8), batch_size=2, collate_fn=collate)
    fp16 = fl.pipeline(fl.amp("fp16"))(toy_loss)
    for step in (fp16, fl.pipeline()(toy_loss)):
        assert fl.dry_run(step, toy(), loader).problems == ()

    model = Toy()
    rprop = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    (problem,) = fl.dry_run(fl.pipeline()(toy_loss), rprop, ONES).problems
    assert problem.startswith("graph: SGD reads its learning rate to the host")
    assert model.w.item() == 0.0
    assert rprop.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2])
def test_short_loaders(batches, window):
    step = fl.pipeline(fl.accumulate(window), fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    report = fl.dry_run(step, toy(), ONES[:1] * batches)
    assert report.problems == ()
    assert len(seen(report, "update")) == min(2, -(-batches // window))


def test_other_steps():
    def update(state, batch):
        loss, aux = toy_loss(state.model, batch)
        loss.backward()
        state.optimizer.step()
        return fl.Output(loss, weight=len(batch), aux=aux)

    assert fl.dry_run(fl.raw(update), toy(), ONES).problems == ()
    model = torch.nn.ModuleDict({"a": Toy(), "b": Toy()})
    named = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in model}
    state = fl.TrainState.create(model, named, seed=0)
    turns = fl.alternate(
        {k: fl.pipeline()(lambda model, batch, k=k: toy_loss(model[k], batch)) for k in model}
    )
    report = fl.dry_run(turns, state, (ONES, ONES))
    assert report.problems == ()
    assert "a/loss -2" in seen(report, "record", "valid")[0]

    def carried(model, batch, carry):
        loss, aux = toy_loss(model, batch)
        return loss, aux, carry

    step, sequences = fl.pipeline(fl.tbptt(2))(carried), [torch.ones(2, 6)] * 4
    report = fl.dry_run(step, toy(), (sequences, sequences))
    assert report.problems == ()
    assert len(seen(report, "update")) == 2  # of three windows each
    assert "; 12 items; " in seen(report, "loader", "train")[0]


def test_it_raises_what_fit_would():
    step, state = fl.pipeline()(toy_loss), toy()
    with pytest.raises(KeyError, match="val/loss"):
        fl.dry_run(step, state, (ONES, ONES), [fl.early_stop("val/loss")])
    with pytest.raises(ValueError, match="would use up the valid loader, which is an iterator"):
        fl.dry_run(step, state, (ONES, iter(ONES)))
    assert state.model.w.item() == 0.0


def test_what_raises_is_a_problem_by_its_name_and_the_rest_is_tried(tmp_path):
    """Of loaders, metrics and hooks."""

    def broken(state):
        raise ZeroDivisionError("nothing there")

    class Late(Hook):
        def receive(self, state, outputs):
            raise OSError("too late")

        def collects(self, state, loader):
            return True

        wants_outputs = True

        def __call__(self, state):
            return state

        def __repr__(self):
            return "Late()"

    def unreadable():
        yield from ONES[:1]
        raise OSError("no answer")

    def loss_fn(model, batch):
        if len(batch) == 3:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return toy_loss(model, batch)

    called = []
    step = fl.pipeline(
        fl.metric(top=lambda aux, batch: aux["top"]),
        fl.metric(low=lambda aux, batch: batch.min()),
        fl.metric(late=lambda aux, batch: aux["late"], on="training"),
        fl.derive(ratio=lambda m: m["loss"] / 0, wrong=lambda m: "text"),
    )(loss_fn)
    loaders = {"train": ONES, "valid": [torch.ones(3)], "test": ONES, "held": unreadable, "no": []}
    hooks = [broken, lambda state: None, Late(), lambda state: called.append(1) or state]
    hooks.append(fl.early_stop("valid/loss"))  # which has no batch that can be evaluated
    state = toy()
    report = fl.dry_run(step, state, loaders, hooks)
    problems = {(f.kind, f.name): f.text for f in report.findings if f.problem}
    assert [*problems] == [
        *(("loader", name) for name in ("valid", "held", "no")),
        *(("hook", name) for name in ("broken", "<lambda>", "Late()")),
        ("metric", "metric(top=<lambda>)"),
        ("metric", shorten("metric(late=<lambda>, on='training')")),
        ("metric", shorten("derive(ratio=<lambda>, wrong=<lambda>)")),
    ]
    assert problems["loader", "valid"].startswith(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied; the batch: (3,) float32"
    )
    assert problems["loader", "held"].startswith("OSError: no answer")
    assert problems["loader", "no"].startswith(
        "ValueError: the no loader gave no batch. Its length"
    )
    assert problems["hook", "broken"] == "ZeroDivisionError: nothing there"
    assert "Did you forget 'return state'?" in problems["hook", "<lambda>"]
    assert 'return loss, {"top": top}' in problems["metric", "metric(top=<lambda>)"]
    assert report.problems[3] == "hook broken: ZeroDivisionError: nothing there"
    # The rest was tried.
    assert called == [1]
    assert len(seen(report, "update")) == 2
    assert "low 1" in seen(report, "record", "test")[0]
    assert seen(report, "resume") == ["bit for bit, in the middle of an epoch"]
    assert state.model.w.item() == 0.0 and state.history.records == ()


@pytest.mark.parametrize("fails", ["read", "trained"])
def test_without_training_batches_the_report_ends_with_the_loaders(fails):
    train = [] if fails == "read" else ["a"]
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), (train, ONES))
    assert [(f.kind, f.name, f.problem) for f in report.findings] == [
        ("loader", "train", True),
        ("loader", "valid", False),
    ]


def test_text_and_html():
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), ONES)
    assert repr(report).splitlines()[0] == "dry run: no problem"
    assert repr(report).splitlines()[1].split() == ["what", "name", "seen"]
    assert "4 batches; float32 [2]" in report._repr_html_()


class Counting(torch.nn.Module):
    """A model whose buffer changes in evaluation, too, as the observers of fake quantization do."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.w * x


def test_buffers_of_the_given_model_stay_as_they_are():
    model = Counting()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    batches = [torch.ones(1)] * 4
    fl.dry_run(fl.pipeline()(lambda model, x: model(x).mean()), state, (batches, batches))
    assert model.calls.item() == 0.0


def test_the_words_of_a_report_are_wrapped_below_each_other(monkeypatch):
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 2)
    monkeypatch.setenv("COLUMNS", "50")
    lines = repr(report).splitlines()
    assert max(map(len, lines)) <= 50
    begin = lines[1].index("seen")
    assert any(line.startswith(" " * begin) and line[begin] != " " for line in lines)
    monkeypatch.setenv("COLUMNS", "500")
    assert " ".join(repr(report).split()) == " ".join(" ".join(lines).split())


def test_a_hook_may_say_why_it_is_not_called():
    class Webhook(fl.Hook):
        untried = "it would send records"

        def __call__(self, state):
            raise AssertionError("called")

    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), ONES, hooks=(Webhook(),))
    assert "not called: it would send records" in str(report) and not report.problems
