"""dry_run: what it sees, what it finds, and that it leaves nothing behind."""

import re

import numpy as np
import pytest
import torch
from loop_cases import generators
from sample_steps import by_hand, carried, in_turns
from torch.utils.data import DataLoader, Dataset

import fnloop as fl
from fnloop._display.reprs import shorten
from fnloop._hooks.hook import BuiltIn, Hook
from fnloop.debug import check_script
from fnloop.testing import Toy, assert_same, toy, toy_loss

ONES = [torch.ones(2)] * 4


STEP = fl.pipeline()(toy_loss)


def seen(report, kind, name=None):
    return [f.text for f in report.findings if f.kind == kind and name in (None, f.name)]


def test_loaders_weights_and_records():
    def counted(model, batch):
        loss, aux = toy_loss(model, batch["x"])
        return loss, {**aux, "weight": batch["n"].sum()}

    batches = [{"x": torch.ones(2), "n": torch.tensor([3, 4])}] * 3
    step = fl.pipeline(fl.metric(top=lambda aux, batch: aux["output"].max()))(counted)
    report = fl.dry_run(step, toy(), {"train": lambda: iter(batches), "valid": batches[:1]})
    (train,) = seen(report, "loader", "train")
    items = 'x: float32 [2], n: int64 [2]; 7 items, by aux["weight"]; first in '
    assert train.startswith(f"unknown length; {items}") and train.count("next in") == 1
    (valid,) = seen(report, "loader", "valid")
    assert valid.startswith("1 batch; x: ") and "next" not in valid
    # Two updates by 1 from w = 0: the losses are 0 and -1, and after them -2.
    assert seen(report, "record", "train") == ["loss -0.5000, top -0.5000, lr 1.0e+00"]
    assert seen(report, "record", "valid") == ["loss -2.0000, top -2"]
    assert len(seen(report, "update")) == 2
    assert report.problems == ()


def test_it_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    mine = lambda state: calls.append((state.step, {*state.history[-1].metrics})) or state
    folder, file, shown = "called, with a temporary folder", "called, with a temporary file", (
        "not called: it only shows the run"
    )  # fmt: skip
    hooks = {
        fl.every(steps=500)(fl.checkpoint("runs/a", best="valid/loss")): folder,
        fl.checkpoint("runs/b", only=("model",)): folder, fl.to_csv("table.csv"): file,
        fl.on_main(fl.to_jsonl("table.jsonl")): file,
        fl.when_improved("valid/loss")(fl.every(epochs=7)(mine)): "called",
        fl.early_stop("valid/loss"): "called", fl.restore_best("valid/loss"): "called",
        fl.time_limit(hours=1): "not called: its time begins with the run", fl.progress(): shown,
        fl.live_plot(file="picture.png"): shown, fl.profiled(folder="traces"): folder,
    }  # fmt: skip
    dropped = fl.pipeline(fl.ema(0.9), fl.schedule(lambda i, total: 1 - i / total))(
        lambda model, batch: toy_loss(model, torch.nn.functional.dropout(batch))
    )
    loader = DataLoader(torch.arange(12.0), batch_size=2, shuffle=True)
    state = fl.fit(dropped, toy(), loader, steps=3, hooks=())
    before, drawn = fl.snapshot(state), generators()
    report = fl.dry_run(dropped, state, (loader, ONES), (*hooks,))
    assert generators() == drawn
    assert [*tmp_path.iterdir()] == []
    # Once, at the record, after two updates.
    ((step, metrics),) = calls
    assert step == state.step + 2 and {"train/loss", "valid/loss", "valid/ema/loss"} < metrics
    assert seen(report, "hook") == [*hooks.values()]
    assert report.problems == ()
    ended = [fl.fit(dropped, one, loader, epochs=2, hooks=()) for one in (state, before)]
    assert_same(*ended)


class Noise(Dataset):
    """Samples that differ each time, by a generator that no checkpoint holds."""

    generator = np.random.default_rng(0)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return float(self.generator.random())


class Forgets(torch.optim.SGD):
    calls = 0

    def step(self):
        self.calls += 1
        super().step()


def state_of(optimizer, **settings):
    model = Toy()
    optimizer = optimizer(model.parameters(), lr=0.1, **settings)
    return fl.TrainState.create(model, optimizer, seed=0)


def reads(model, batch):
    loss, aux = toy_loss(model, batch)
    return (loss if loss.item() < 1e9 else 2 * loss), aux


@pytest.mark.parametrize(("step", "state", "loader", "problem"), [
    (STEP, toy(), DataLoader(Noise(), batch_size=2),
        r"resume: one update after a restore, state\.model\.w differs"),
    (STEP, state_of(Forgets), ONES, ".*Forgets cannot be resumed bit for bit: its attribute calls"),
], ids=["data", "optimizer"])  # fmt: skip
def test_what_would_not_resume(step, state, loader, problem):
    (found,) = fl.dry_run(step, state, loader).problems
    assert re.match(problem, found)
    assert state.model.w.item() == 0.0
    assert state.optimizer.param_groups[0]["lr"] in (0.1, 1.0)


@pytest.mark.filterwarnings("ignore:cuda_graph runs eagerly")
@pytest.mark.parametrize(("loss_fn", "make", "text"), [
    (reads, toy, r"reads a tensor to the host \(test_dry_run\.py, line \d+, in reads\): cuda_graph "
     "cannot capture that$"),
    (toy_loss, lambda: state_of(torch.optim.SGD, foreach=True),
     "SGD reads its learning rate to the host"),
    (toy_loss, lambda: state_of(torch.optim.LBFGS), "LBFGS reads numbers to the host"),
])  # fmt: skip
def test_what_cannot_be_captured_is_a_problem_only_where_it_is_to_be(
    recorders, loss_fn, make, text
):
    def report(*members):
        return fl.dry_run(fl.pipeline(*members)(loss_fn), make(), ONES)

    if loss_fn is reads:  # otherwise fit refuses the optimizer at once
        (found,) = report(fl.cuda_graph()).problems
        assert re.match(f"graph: {text}", found)
    for members in ((), (fl.cuda_graph(fallback=True),)):
        plain = report(*members)
        assert plain.problems == () and re.match(text, seen(plain, "graph")[0])


def falling(model, batch, *, beta):
    return toy_loss(model, batch)[0] * (1 + beta)


LINEAR = fl.schedules.linear()
MEAN = lambda aux, batch: aux["output"].mean()
VALID = {  # steps of programs that fit runs
    "a schedule of the whole run": fl.pipeline(fl.schedule(LINEAR))(toy_loss),
    "a number of the whole run": fl.pipeline(fl.scheduled(beta=LINEAR))(falling),
    "a plateau": fl.pipeline(fl.plateau("valid/loss", patience=1))(toy_loss),
    "a metric of another loader": fl.pipeline(fl.metric(mean=MEAN, loaders=("valid",)))(toy_loss),
    "a plateau of it": fl.pipeline(
        fl.plateau("valid/mean", mode="max"), fl.metric(mean=MEAN, loaders=("valid",)))(toy_loss),
    "the average of the whole run": fl.pipeline(fl.swa(0.5), fl.scheduled(beta=LINEAR))(falling),
    "turns": fl.alternate({"a": fl.pipeline(fl.scheduled(beta=LINEAR))(falling)}),
}  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 8])
@pytest.mark.parametrize("name", VALID)
def test_a_trial_knows_of_the_run_what_fit_does(name, length, caplog):
    """With fewer batches than its updates, an epoch ends within the trial."""
    state = lambda: toy() if name != "turns" else turning()
    loaders = {"train": [torch.ones(2)] * length, "valid": ONES[:1]}
    assert fl.fit(VALID[name], state(), loaders, epochs=2, hooks=()).epoch == 2
    assert fl.dry_run(VALID[name], state(), loaders).problems == ()
    assert check_script(VALID[name], state(), loaders).problems == ()


def test_a_loss_function_may_be_for_training_only():
    """A gradient penalty has no gradient in an evaluation, and a teacher is a slot of the run."""

    def penalty(model, batch):
        x = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad((model.w * x).sum(), x, create_graph=True)
        return (slope - 1).square().mean()

    report = fl.dry_run(fl.pipeline()(penalty), toy(), ONES)
    (train,) = seen(report, "loader", "train")
    assert "; 2 items, its leading dimension; " in train and report.problems == ()

    @fl.middleware("forward")
    def with_teacher():
        def wrap(step):
            return lambda state, batch: step(state, batch + 0 * state.slots["ema"]["w"])

        return wrap

    taught = fl.pipeline(fl.ema(0.9), with_teacher())(toy_loss)
    assert fl.dry_run(taught, toy(), ONES).problems == ()
    assert check_script(taught, toy(), ONES).problems == ()

    def fails(model, batch):
        raise OSError("no such file")

    (problem,) = fl.dry_run(fl.pipeline()(fails), toy(), ONES).problems
    assert problem.startswith("loader train: OSError: no such file")


def turning():
    model = Toy()
    return fl.TrainState.create(model, {"a": torch.optim.SGD(model.parameters(), lr=1.0)})


def test_what_an_evaluation_reads_is_not_read_in_an_update():
    def loss_fn(model, batch):
        loss, aux = toy_loss(model, batch)
        return (loss, aux) if model.training or loss.item() < 9 else (0 * loss, aux)

    given = fl.pipeline()(loss_fn), toy(), (ONES[:1], ONES[:1])
    assert "reads a tensor" not in str(fl.dry_run(*given))
    assert check_script(*given).problems == ()


def test_what_a_loader_and_a_loss_scale_read_is_not_a_problem():
    collate = lambda samples: torch.tensor([sample.item() for sample in samples])
    loader = DataLoader(torch.ones(8), batch_size=2, collate_fn=collate)
    assert fl.dry_run(fl.pipeline(fl.amp("fp16"))(toy_loss), toy(), loader).problems == ()


@pytest.mark.parametrize("batches", [1, 2, 5])
@pytest.mark.parametrize("window", [1, 2])
def test_short_loaders(batches, window):
    step = fl.pipeline(fl.accumulate(window), fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    report = fl.dry_run(step, toy(), ONES[:1] * batches)
    assert report.problems == ()
    assert len(seen(report, "update")) == min(2, -(-batches // window))


def test_other_steps():
    assert fl.dry_run(fl.raw(by_hand), toy(), ONES).problems == ()
    report = fl.dry_run(*in_turns(), (ONES, ONES))
    assert report.problems == ()
    assert "a/loss -2" in seen(report, "record", "valid")[0]
    sequences = [torch.ones(2, 6)] * 4
    report = fl.dry_run(fl.pipeline(fl.tbptt(2))(carried), toy(), (sequences, sequences))
    assert report.problems == ()
    assert len(seen(report, "update")) == 2  # of three windows each
    assert "; 12 items; " in seen(report, "loader", "train")[0]


def test_it_raises_what_fit_would():
    with pytest.raises(KeyError, match="val/loss"):
        fl.dry_run(STEP, toy(), (ONES, ONES), [fl.early_stop("val/loss")])
    with pytest.raises(ValueError, match="would use up the valid loader, which is an iterator"):
        fl.dry_run(STEP, toy(), (ONES, iter(ONES)))


class Late(Hook):
    def receive(self, state, outputs):
        raise OSError("too late")

    def collects(self, state, loader):
        return True

    def __call__(self, state):
        return state

    def __repr__(self):
        return "Late()"


class Miscounted(Hook):
    def numbers(self, state):
        raise OverflowError("too many")

    def __call__(self, state):
        return state

    def __repr__(self):
        return "Miscounted()"


def broken(state):
    raise ZeroDivisionError("nothing there")


def test_what_raises_is_a_problem_by_its_name_and_the_rest_is_tried():
    """Of loaders, metrics and hooks."""

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
    hooks = [broken, lambda state: None, Late(), Miscounted()]
    hooks.append(lambda state: called.append(1) or state)
    hooks.append(fl.early_stop("valid/loss"))  # which has no batch that can be evaluated
    state = toy()
    report = fl.dry_run(step, state, loaders, hooks)
    problems = {(f.kind, f.name): f.text for f in report.findings if f.problem}
    shapes = "RuntimeError: mat1 and mat2 shapes cannot be multiplied; the batch: (3,) float32"
    expected = {
        ("loader", "valid"): shapes,
        ("loader", "held"): "OSError: no answer",
        ("loader", "no"): "ValueError: the no loader gave no batch. Its length",
        ("hook", "broken"): "ZeroDivisionError: nothing there",
        ("hook", "<lambda>"): "Did you forget 'return state'?",
        ("hook", "Late()"): "OSError: too late",
        ("hook", "Miscounted()"): "OverflowError: too many",
        ("metric", "metric(top=<lambda>)"): 'return loss, {"top": top}',
        ("metric", shorten("metric(late=<lambda>, on='training')")): "",
        ("metric", shorten("derive(ratio=<lambda>, wrong=<lambda>)")): "",
    }
    assert [*problems] == [*expected]
    for name, text in expected.items():
        assert text in problems[name]
    assert report.problems[3] == "hook broken: ZeroDivisionError: nothing there"
    # The rest was tried.
    assert called == [1]
    assert len(seen(report, "update")) == 2
    assert "low 1" in seen(report, "record", "test")[0]
    assert seen(report, "resume") == ["bit for bit, in the middle of an epoch"]
    assert state.model.w.item() == 0.0 and state.history.records == ()


@pytest.mark.parametrize("train", [[], ["a"]], ids=["read", "trained"])
def test_without_training_batches_the_report_ends_with_the_loaders(train):
    report = fl.dry_run(STEP, toy(), (train, ONES))
    found = [(f.kind, f.name, f.problem) for f in report.findings]
    assert found == [("loader", "train", True), ("loader", "valid", False)]


def test_a_hook_of_the_library_may_say_which_one_is_called_instead():
    class Writes(BuiltIn):
        def __call__(self, state):
            raise AssertionError("called")

        def tried(self, place):
            return fl.every(epochs=1)(lambda state: called.append(place.name) or state), "file"

    called = []
    report = fl.dry_run(STEP, toy(), ONES, hooks=(Writes(),))
    assert called == ["hook-0"] and not report.problems
    assert "called, with a temporary file" in str(report)


def test_a_hook_may_say_why_it_is_not_called():
    class Webhook(fl.Hook):
        untried = "it would send records"

        def __call__(self, state):
            raise AssertionError("called")

    report = fl.dry_run(STEP, toy(), ONES, hooks=(Webhook(),))
    assert "not called: it would send records" in str(report) and not report.problems
