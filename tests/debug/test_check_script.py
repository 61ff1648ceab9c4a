"""The laws on a user's own script: what breaks one is found, named, and put back."""

import random

import numpy as np
import pytest
import several
import torch
from loop_cases import generators
from sample_steps import by_hand
from torch import nn
from torch.utils.data import DataLoader, Dataset
from toy_runs import of

import fnloop as fl
from fnloop.debug import audit, check_script, watch
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

PLAIN = fl.pipeline()
CLEAN = {
    "same": ["3 updates twice, bit for bit"],
    "resume": ["continues bit for bit"] * 2,
    "evaluation": ["changes no bit of training"],
    "accumulation": ["two batches give the gradient of one with all their items"],
    "host read": ["no line reads the device during an update"],
}


def seen(report):
    found = {}
    for finding in report.findings:
        found.setdefault(finding.kind, []).append(finding.text)
    return found


def broken(report):
    return {line.split(":")[0] for line in report.problems}


@pytest.mark.parametrize("members", [
    (), (fl.accumulate(2), fl.clip(0.05), fl.ema(0.9)),
    (fl.schedule(fl.schedules.linear()), fl.microbatch(2)), (watch(2), audit(every=2)),
], ids=repr)  # fmt: skip
def test_a_script_that_keeps_the_laws_has_no_problem_and_stays_as_it_is(members):
    problem = small()
    state = problem.state()
    drawn = generators()
    step = fl.pipeline(*members)(problem.loss_fn)
    report = check_script(step, state, (problem.batches, problem.batches[:2]))
    assert report.problems == ()
    assert (seen(report) == CLEAN) or audit(every=2) in members  # audits read the device
    assert repr(report).startswith("check_script: no problem\n")
    assert_same(state, problem.state())
    assert generators() == drawn


def test_batch_norm_is_named_as_what_breaks_accumulation_alone():
    problem = stochastic()
    report = check_script(PLAIN(problem.loss_fn), problem.state(), problem.batches)
    (line,) = report.problems
    assert line.startswith("accumulation: accumulate(2) is not one large batch: the gradient of")
    assert "the BatchNorm 1 normalizes by the statistics of each batch" in line


# --- planted faults


calls, ONES = 0, [torch.ones(2)] * 4


def counted(model, batch):
    global calls
    calls += 1
    return model(batch).mean() * calls


class Totals:
    calls = 0


def totalled(model, batch):
    Totals.calls += 1
    return model(batch).mean() * Totals.calls


def a_global():
    """Return the facts of a fault: step, state, batches; a function that reads what it changes."""
    return PLAIN(counted), toy(), ONES, lambda: calls


class Data(Dataset):
    """Draws from a generator of its own, or counts its calls."""

    def __init__(self, generator=None):
        self.calls, self.generator = 0, generator

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.generator is None:
            self.calls += 1
            return torch.tensor([float(self.calls)])
        drawn = getattr(self.generator, "random", lambda: torch.rand(1, generator=self.generator))
        return torch.tensor([float(drawn())])


def a_dataset(make=lambda: None):
    data, same = Data(make()), Data(make())
    look = lambda: data.calls if data.generator is None else (data[0] - same[0]).item()
    return PLAIN(toy_loss), toy(), DataLoader(data, batch_size=2), look


class Own(nn.Module):
    """Draws from a generator of its own, or counts its calls in a parameter that is not trained."""

    def __init__(self, draws):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.generator = torch.Generator().manual_seed(0) if draws else None
        self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)  # no buffer: it stays

    def forward(self, x):
        if self.generator is not None:
            return self.w * x * torch.rand(x.shape, generator=self.generator)
        self.seen.data.add_(1)
        return self.w * x * self.seen


def a_module(draws):
    model = Own(draws)
    step = PLAIN(lambda model, x: model(x).mean())
    return step, of(model, lr=0.1), ONES, lambda: model.seen.item()


def line_in(function, n):
    code = function.__code__
    return f"(test_check_script.py, line {code.co_firstlineno + n}, in {code.co_name})"


BOTH = {"same", "resume"}
FAULTS = {  # how it is made, what it breaks, all that breaks of it, and how it is named
    "global": (a_global, {*BOTH, "evaluation"}, {*BOTH, "evaluation"},
               f"the global calls of test_check_script.py {line_in(counted, 2)}"),
    "class": (lambda: (PLAIN(totalled), toy(), ONES, lambda: Totals.calls),
              {*BOTH, "evaluation"}, {*BOTH, "evaluation"}, "Totals.calls"),
    "dataset": (a_dataset, BOTH, None,
                f"the train loader.dataset.calls {line_in(Data.__getitem__, 2)}"),
    **{kind: (lambda make=make: a_dataset(make), BOTH, None,
              f"the train loader.dataset.generator, a {kind} (test_check_script.py")
       for kind, make in (("torch.Generator", lambda: torch.Generator().manual_seed(0)),
                          ("random.Random", lambda: random.Random(0)),
                          ("numpy Generator", lambda: np.random.default_rng(0)))},
    "dropout": (lambda: a_module(True), {"resume"}, None,
                "the model.generator, a torch.Generator (test_check_script.py"),
    "evaluation": (lambda: a_module(False), {"evaluation"}, {"evaluation"}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("make", "least", "exactly", "named"), FAULTS.values(), ids=FAULTS)
def test_what_a_script_keeps_elsewhere_is_named_with_its_line_and_put_back(
    make, least, exactly, named
):
    step, state, loader, look = make()
    report = check_script(step, state, loader)
    assert least <= broken(report) and exactly in (None, broken(report))
    assert named in " ".join(report.problems)
    if named.endswith(")"):
        assert all(named in text for text in report.problems)
    assert look() == 0


def test_a_draw_that_leaves_no_trace_is_named_by_its_line():
    def loss_fn(model, batch):
        noise = torch.rand(2, generator=torch.Generator().manual_seed(system.getrandbits(60)))
        return (model(batch) * noise).mean()

    system = random.SystemRandom()
    report = check_script(PLAIN(loss_fn), toy(), [torch.ones(2)] * 4)
    (line,) = report.problems
    number = loss_fn.__code__.co_firstlineno + 1
    assert f"aten.rand.generator, at test_check_script.py, line {number}, in loss_fn" in line
    assert seen(report)["resume"] == ["not checked, because no two runs are the same"]


def test_a_line_that_reads_the_device_is_named():
    def loss_fn(model, batch):
        loss = model(batch).mean()
        if loss > 100:
            loss = loss * 0
        return loss

    report = check_script(PLAIN(loss_fn), toy(), [torch.ones(2)] * 4)
    number = loss_fn.__code__.co_firstlineno + 2
    wanted = f"host read: reads a tensor to the host (test_check_script.py, line {number}, in"
    assert report.problems == (f"{wanted} loss_fn)",)


@pytest.mark.parametrize(("loss_fn", "why"), [
    (lambda model, x: model(x).sum(), "returns a sum over the items of a batch"),
    (lambda model, x: model(x)[:1].mean(), "return a mean over items, and how many they are"),
])  # fmt: skip
def test_a_loss_that_is_not_a_mean_breaks_accumulation(loss_fn, why):
    batches = [torch.tensor(values) for values in ([1.0, 2.0], [3.0, 4.0], [5.0])]
    report = check_script(PLAIN(loss_fn), toy(w=1.0), batches)
    (line,) = report.problems
    assert line.startswith("accumulation: accumulate(2) is not one large batch")
    assert why in line
    assert "(test_check_script.py, line" in line


# --- other steps, and wrong arguments


def test_other_kinds_of_steps_are_checked_as_far_as_they_can_be():
    report = check_script(fl.raw(by_hand), toy(), [torch.ones(2)] * 4)
    assert report.problems == ()
    assert seen(report)["accumulation"] == ["not checked: RawStep takes no accumulate(2)"]
    assert seen(report)["evaluation"] == ["not checked, because the step evaluates nothing"]

    problem = several.alternating(batch="next")
    report = check_script(PLAIN(problem.loss_fn), problem.state(), problem.batches)
    assert report.problems == ()

    texts = [{"x": torch.ones(2, n)} for n in (3, 4, 5)]
    report = check_script(PLAIN(lambda model, b: model(b["x"]).mean()), toy(), texts)
    assert "cannot be joined" in seen(report)["accumulation"][0]
    report = check_script(PLAIN(toy_loss), toy(), [torch.ones(2)])
    assert seen(report)["accumulation"] == ["not checked: the loader has only one batch"]


def of_pairs(model, batch):
    return (model(batch) * torch.ones(2)).mean()  # no other number of items will do


def drawing(model, batch):
    return model(batch * torch.rand(())).mean()


@pytest.mark.parametrize(("loss_fn", "why"), [
    (of_pairs, "two batches joined in one raise RuntimeError: The size of tensor a (4) must"),
    (drawing, "the gradient of one batch differs with what is drawn"),
])  # fmt: skip
def test_what_cannot_be_told_about_accumulation_is_not_a_problem(loss_fn, why):
    report = check_script(fl.pipeline()(loss_fn), toy(), [torch.ones(2), 3 * torch.ones(2)] * 2)
    (found,) = [f for f in report.findings if f.kind == "accumulation"]
    assert found.text.startswith(f"not checked: {why}") and report.problems == ()


def test_wrong_arguments_are_refused():
    step, state, ones = PLAIN(toy_loss), toy(), [torch.ones(2)]
    with pytest.raises(ValueError, match="would use up the train loader"):
        check_script(step, state, iter(ones))
    step(state, ones[0])
    with pytest.raises(fl.StaleStateError):
        check_script(step, state, ones)
    with pytest.raises(ZeroDivisionError):
        check_script(PLAIN(lambda model, batch: 1 / 0), toy(), ones)
