"""Ctrl-C and signals."""

import contextlib
import os
import signal
import sys
import time
import types

import attrs
import pytest
import torch
from loop_cases import NUMBERS, ONE, fit, interrupting, press, raise_interrupt, step, terminate
from sample_hooks import signal_at, start_again, stop_at

import fnloop as fl
from fnloop._backend import collectives
from fnloop._extensions.engines import consensus
from fnloop._hooks.hook import BuiltIn
from fnloop._loop import peers
from fnloop._loop.peers import Interrupts
from fnloop.testing import assert_same, toy, toy_loss


def test_ctrl_c_stops_the_run_after_the_current_update():
    seen = []
    note = lambda state: seen.append(state.stop) or state
    state = fl.fit(interrupting(2, press), toy(), NUMBERS, hooks=(note,))
    assert (state.step, state.model.w.item(), state.stop) == (2, -3.0, "interrupted")
    assert seen == [None, "interrupted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    state = fl.fit(step, state, NUMBERS, hooks=())  # the same script continues
    assert (state.step, state.epoch, state.stop, state.model.w.item()) == (3, 1, None, -6.0)


def test_an_interrupt_that_is_raised_returns_the_state_before_the_update():
    state = fl.fit(interrupting(2, raise_interrupt), toy(), NUMBERS, hooks=())
    assert (state.step, state.model.w.item(), state.stop) == (1, -1.0, "interrupted")
    assert (state.model.w.grad, len(state.history)) == (None, 0)


def test_a_second_ctrl_c_raises_and_loses_nothing():
    with pytest.raises(KeyboardInterrupt) as error:
        fl.fit(interrupting(2, lambda: (press(), press())), toy(), NUMBERS, hooks=())
    assert error.value.state.step == 1
    assert fit(error.value.state, NUMBERS).model.w.item() == -6.0


SIGNALS = pytest.mark.parametrize(
    ("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")]
)


@SIGNALS
def test_a_signal_in_the_hooks_at_an_epochs_end_ends_the_run_there(how, reason):
    hook = fl.when(lambda state: state.step == 3)(lambda state: (how(), state)[1])
    states = list(fl.run(step, toy(), [ONE] * 3, epochs=3, hooks=(hook,)))
    assert [(s.step, s.epoch, s.stop) for s in states] == [(3, 1, reason)]
    start_again()
    assert fit(hooks=(hook,)).stop == reason  # at the last boundary of the run too


@SIGNALS
@pytest.mark.parametrize("killed", ["train", "valid"])
def test_a_loader_killed_by_the_signal_that_stops_the_run_is_not_an_error(killed, how, reason):
    def dies():
        yield from NUMBERS[:2]
        how()
        raise RuntimeError("DataLoader worker exited unexpectedly")

    loaders = {"train": NUMBERS, "valid": NUMBERS}
    state = fl.fit(step, toy(), {**loaders, killed: dies}, epochs=2, hooks=())
    expected = (2, -3.0) if killed == "train" else (3, -6.0)
    assert (state.step, state.model.w.item()) == expected
    assert (state.epoch, state.stop, len(state.history)) == (killed == "valid", reason, 0)
    given = {"epochs": 2, "hooks": ()}
    assert_same(fl.fit(step, state, loaders, **given), fl.fit(step, toy(), loaders, **given))


def test_the_first_ctrl_c_waits_for_the_update_even_after_a_sigterm():
    state = fl.fit(interrupting(2, lambda: (terminate(), press())), toy(), NUMBERS, hooks=())
    assert (state.step, state.stop, state.model.w.item()) == (2, "interrupted", -3.0)


EACH_EPOCH = fl.every(epochs=1)


@pytest.mark.parametrize(("how", "every", "nth", "evaluated", "steps"), [
    (terminate, EACH_EPOCH, 2, 2, 3), (terminate, fl.every(steps=2), 2, 2, 2),
    (terminate, fl.at_start() | EACH_EPOCH, 1, 1, 0),  # of the untrained model
    (press, EACH_EPOCH, 2, 5, 3), (press, fl.every(steps=2), 2, 5, 2),
])  # fmt: skip
def test_an_evaluation_is_abandoned_where_a_scheduler_ends_the_job(
    how, every, nth, evaluated, steps
):
    """Its grace period is some seconds. A resumed run evaluates from the beginning."""
    seen = []

    def loss_fn(model, batch):
        if not model.training:
            seen.append(model.w.item())
            if len(seen) == nth:
                how()
        return toy_loss(model, batch)

    settings = {"evaluate_every": every, "epochs": 2, "hooks": ()}
    loaders = ([ONE] * 3, [ONE] * 5)
    whole = fl.fit(step, toy(), loaders, **settings)
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, **settings)
    assert (len(seen), state.step, len(state.history)) == (evaluated, steps, evaluated == 5)
    assert state.stop == ("SIGTERM" if how is terminate else "interrupted")
    assert_same(fl.fit(step, state, loaders, **settings), whole)


@SIGNALS
@pytest.mark.parametrize(
    ("moment", "evaluated"), [("the update", 0), ("the update", 1), ("the closing evaluation", 1)]
)
@pytest.mark.parametrize("phase", [None, "one"])
def test_a_signal_before_the_end_of_a_run_that_a_hook_has_stopped(
    how, reason, moment, evaluated, phase
):
    """The script sees it, and does not begin its next phase. The same call makes the end."""

    def loss_fn(model, batch):
        if moment == ("the update" if model.training else "the closing evaluation"):
            how()
        return toy_loss(model, batch)

    loaders = {"train": [ONE] * 3, **({"valid": [ONE]} if evaluated else {})}
    train = lambda state, step: fl.fit(step, state, loaders, hooks=(stop_at(1),), phase=phase)
    state = train(toy(), fl.pipeline()(loss_fn))
    assert (state.step, state.stop, len(state.history)) == (1, reason, 0)
    if phase is not None:
        with pytest.raises(ValueError, match=f"'one'.*has not ended.*{reason}"):
            fl.fit(step, state, loaders, hooks=(), phase="two")
    state = train(state, step)
    assert (state.step, state.stop) == (1, "enough")
    assert [r.closing for r in state.history] == [True]
    assert_same(state, train(toy(), step))


class Terminating:
    """Terminates this process after an update, or where the run is closed."""

    def __init__(self, at):
        self.at = at

    def __call__(self, state):
        if state.step == self.at:
            terminate()
        return state

    def close(self):
        if self.at is None:
            terminate()


@pytest.mark.parametrize(("hooks", "step", "stop", "late"), [
    ((Terminating(2),), 2, "SIGTERM", False),
    ((Terminating(None),), 3, None, True),
    ((stop_at(1), fl.at_end()(Terminating(1))), 1, "enough", True),
])  # fmt: skip
def test_a_sigterm_after_the_last_boundary_is_raised_when_the_run_ends(
    hooks, step, stop, late, monkeypatch
):
    """The script would not see it in the state. An earlier one is recorded there."""
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    state = fit(hooks=hooks)
    assert (state.step, state.stop, raised) == (step, stop, [signal.SIGTERM] * late)
    assert [r.closing for r in state.history] == {1: [True], 2: [], 3: [False]}[step]


@attrs.frozen
class Product:
    """A metric of a user's own: nothing but an instance tells how to read what was saved."""

    value: torch.Tensor

    def combine(self, other):
        return Product(self.value * other.value)

    def compute(self):
        return self.value.item()


def test_a_metric_of_evaluation_alone_does_not_continue_one_of_training(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")
    inputs = lambda aux, batch: (batch,)
    step = fl.pipeline(
        fl.metric(q=fl.from_torchmetrics(torchmetrics.MeanMetric(), inputs), on="training"),
        fl.metric(q=fl.from_torchmetrics(torchmetrics.SumMetric(), inputs), on="evaluation"),
    )(toy_loss)
    loaders = ([torch.tensor([float(i)]) for i in range(5)], [torch.ones(1)])
    fl.save(fl.fit(step, toy(), loaders, steps=3, hooks=()), tmp_path / "a")
    state = fl.fit(step, fl.restore(tmp_path / "a", toy()), loaders, epochs=1, hooks=())
    assert state.history[-1].metrics["train/q"] == 2.0  # the mean of 0, ..., 4


TWO = torch.tensor([2.0])


def cut_in_the_evaluation(folder, *members, then=lambda: None):
    """Return the state of a run that SIGTERM cut in its first evaluation, saved and continued."""
    armed = [True]

    def loss_fn(model, batch):
        if model.training:
            then()
        elif armed:
            armed.clear()
            terminate()
        return toy_loss(model, batch)

    step = fl.pipeline(*members)(loss_fn)
    given = {"evaluate_every": fl.every(steps=2), "hooks": ()}
    fl.save(fl.fit(step, toy(), ([TWO] * 4, [ONE]), **given), folder / "cut")
    return fl.fit(step, fl.restore(folder / "cut", toy()), ([TWO] * 4, [ONE]), **given)


def test_the_times_of_a_record_that_is_left_are_those_of_the_run_before(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    passes = lambda: now.append(now.pop() + 0.5)
    state = cut_in_the_evaluation(tmp_path, fl.timings(), fl.throughput(), then=passes)
    first = state.history[0].metrics
    assert (first["train/time/step"], first["train/time/data"]) == (0.5, 0.0)
    assert first["train/throughput/samples"] == 2.0


PRODUCT = fl.metric(product=lambda aux, batch: Product(batch.prod()), on="training")


def test_a_record_that_is_left_lacks_a_metric_of_an_own_class_and_a_warning_says_so(
    tmp_path, caplog
):
    first, last = cut_in_the_evaluation(tmp_path, PRODUCT).history
    assert "the record of step 2" in caplog.text and "is made without product" in caplog.text
    assert "train/product" not in first.metrics and last.metrics["train/product"] == 2.0**4
    caplog.clear()  # so does the record of an epoch that a hook has ended at the target
    end = lambda state: attrs.evolve(state, ends="epoch") if state.step == 3 else state
    step = fl.pipeline(PRODUCT)(toy_loss)
    fl.save(fl.fit(step, toy(), [TWO] * 6, steps=3, hooks=(end,)), tmp_path / "left")
    assert not caplog.text
    state = fl.fit(step, fl.restore(tmp_path / "left", toy()), [TWO] * 6, epochs=1, hooks=())
    assert "train/product" not in state.history[-1].metrics
    assert "is made without product" in caplog.text


# --- what processes agree on: here one that agrees with itself, and a clock of the test


@pytest.mark.parametrize("then", ["an evaluation", "the next epoch"])
@pytest.mark.parametrize("updates", [1, 100, 5000])
@pytest.mark.parametrize("at", [1, 2, 3, 50])
def test_a_signal_is_obeyed_at_once_however_fast_the_updates_before_were(
    then, updates, at, monkeypatch
):
    """An update takes 0.1 ms, and a batch 10 s after that. A scheduler waits for 30 s."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(collectives, "start_all_reduce_max", lambda facts, what: lambda: facts)
    state, interrupts = toy(), Interrupts(single_process=False)
    others = consensus.Consensus()
    for _ in range(updates):
        now[0] += 1e-4
        others.poll(state, interrupts.requested)
    if then == "an evaluation":
        others.hurry()
    else:
        others.barrier(state, interrupts.requested, 0, 0.0)
    for batch in range(60):
        if asked := others.poll(state, interrupts.requested):
            interrupts.obey(*asked)
        if interrupts.stop is not None:
            break
        now[0] += 10.0
        interrupts.requested[0] |= batch == at
    assert interrupts.stop == "SIGTERM" and batch <= at + 2


@pytest.mark.parametrize("slow", ["evaluation", "training"])
def test_a_signal_is_obeyed_soon_where_batches_become_slow(slow, monkeypatch):
    """There are 300 batches of 0.1 ms. Then each takes 10 s. The signal comes in the third."""
    now, batches = [0.0], {"training": 0, "evaluation": 0}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(collectives, "start_all_reduce_max", lambda facts, what: lambda: facts)
    monkeypatch.setattr("fnloop._loop.run.peers_of", lambda state: consensus.Consensus())
    ones, interrupts = [torch.ones(1)], Interrupts(single_process=False)
    monkeypatch.setattr("fnloop._loop.fit.handling", lambda *_: contextlib.nullcontext(interrupts))

    def loss_fn(model, batch):
        kind = "training" if model.training else "evaluation"
        is_slow = kind == slow and sum(batches.values()) >= 300
        batches[kind] += is_slow or kind != slow
        now[0] += 10.0 if is_slow else 1e-4
        interrupts.requested[0] |= batches[slow] == 3
        return toy_loss(model, batch)

    number = {"training": 300, "evaluation": 300, slow: 600}
    loaders = {"train": ones * number["training"], "valid": ones * number["evaluation"]}
    first = fl.every(steps=300) if slow == "evaluation" else fl.at_start()
    step = fl.pipeline()(loss_fn)
    state = fl.fit(step, toy(), loaders, evaluate_every=first, hooks=())
    assert state.stop == "SIGTERM" and batches[slow] <= 5


# --- after an interruption no other run begins in this process


INTERRUPTED = pytest.mark.parametrize(("how", "error", "status"), [
    (press, KeyboardInterrupt, None), (terminate, SystemExit, 143),
], ids=["Ctrl-C", "SIGTERM"])  # fmt: skip


@INTERRUPTED
@pytest.mark.parametrize("begin", [fl.fit, fl.run])
def test_after_a_signal_another_run_does_not_begin_and_nothing_else_is_refused(
    begin, how, error, status, caplog
):
    teacher = fl.fit(interrupting(2, how), toy(), NUMBERS, hooks=())
    student = toy()
    for other in (student, *fl.fork(teacher, {"lr": [1.0]}).values()):
        with pytest.raises(error) as caught:
            begin(step, other, NUMBERS, hooks=())
    assert getattr(caught.value, "code", None) == status and student.step == 0
    text = str(caught.value) if status is None else caplog.messages[-1]
    reason = "interrupted" if status is None else "SIGTERM"
    assert f"no other run begins after one was interrupted ({reason}, at step 2)" in text
    assert fl.evaluate(step, student, NUMBERS) == {"loss": 0.0}
    assert [*fl.predict(lambda model, batch: 1, student, NUMBERS)] == [1, 1, 1]
    assert fl.snapshot(student).step == 0


@INTERRUPTED
@pytest.mark.parametrize("kind", ["itself", "a snapshot", "what is restored", "by its iterator"])
def test_the_same_run_continues_and_takes_the_signal_back(kind, how, error, status, tmp_path):
    state = fl.fit(interrupting(2, how), toy(), NUMBERS, hooks=())
    if kind == "a snapshot":
        state = fl.snapshot(state)
    elif kind == "what is restored":
        state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    if kind == "by its iterator":
        *_, state = fl.run(step, state, NUMBERS, hooks=())
    else:
        state = fl.fit(step, state, NUMBERS, hooks=())
    assert (state.step, state.model.w.item()) == (3, -6.0)
    assert fit().step == 3  # another one


def test_what_an_iterator_was_interrupted_in_counts_too():
    *_, state = fl.run(interrupting(2, terminate), toy(), NUMBERS, epochs=3, hooks=())
    assert (state.step, state.stop) == (2, "SIGTERM")
    with pytest.raises(SystemExit):
        fit()


def test_the_end_of_the_time_of_a_job_counts_as_its_signal_does():
    """A stop of another hook, and the limit of a run, end that run alone."""
    for hook in (stop_at(1), fl.time_limit(seconds=1e-9)):
        assert fit(hooks=(hook,)).step == 1
    state = fit(hooks=(fl.time_limit(seconds=1e-9, per="job"),))
    with pytest.raises(SystemExit) as caught:
        fit()
    assert caught.value.code == 143
    assert fit(state).step == fit().step == 3


def test_a_script_of_two_stages_that_is_started_again_comes_to_the_same(tmp_path):
    """The student learns the w of the teacher, which is -6 only where that is finished."""

    def script(name, *hooks):
        start_again()
        saves = lambda stage: fl.every(epochs=1)(fl.checkpoint(tmp_path / name / stage))
        resumed = lambda stage: fl.resume(tmp_path / name / stage, toy())
        teacher = fl.fit(step, resumed("t"), NUMBERS, epochs=1, hooks=(*hooks, saves("t")))
        target = teacher.model.w.item()
        data = [ONE * target] * 2
        return fl.fit(step, resumed("s"), data, epochs=1, hooks=(saves("s"),)).model.w.item()

    with pytest.raises(SystemExit):
        script("cut", signal_at(2))
    assert not (tmp_path / "cut/s").exists() or fl.latest(tmp_path / "cut/s") is None
    assert script("cut") == script("whole") == 12.0


class Requeues(BuiltIn):
    """As ``requeue`` in a SLURM job."""

    ends_run_on_usr1 = True

    def __call__(self, state):
        return state


def test_sigusr1_counts_where_it_ends_the_run():
    usr1 = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    assert fl.fit(interrupting(2, usr1), toy(), NUMBERS, hooks=()).step == fit().step == 3
    state = fl.fit(interrupting(2, usr1), toy(), NUMBERS, hooks=(Requeues(),))
    assert (state.step, state.stop) == (2, "SIGUSR1")
    with pytest.raises(SystemExit) as caught:
        fit()
    assert caught.value.code == 128 + signal.SIGUSR1


@INTERRUPTED
@pytest.mark.parametrize("name", ["ps1", "IPython"])
def test_in_an_interactive_session_another_run_begins(name, how, error, status, monkeypatch):
    if name == "ps1":
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    else:
        shell = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace())
        monkeypatch.setitem(sys.modules, "IPython", shell)
    assert fl.fit(interrupting(2, how), toy(), NUMBERS, hooks=()).step == 2
    assert fit().step == 3


def test_a_signal_while_the_handlers_are_installed_leaves_none(monkeypatch):
    """Ctrl-C is the first that has one. Then what comes raises, and those before are put back."""
    installed, own = [], types.SimpleNamespace(**vars(peers._signals))

    def slow(number, handler):
        installed.append(number)
        if len(installed) == 2:
            raise KeyboardInterrupt
        return signal.signal(number, handler)

    own.signal = slow
    monkeypatch.setattr(peers, "_signals", own)
    with pytest.raises(KeyboardInterrupt):
        fit()
    assert installed[0] == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Slow(torch.nn.Dropout):
    """Ctrl-C comes while it is put back into training mode."""

    def train(self, mode=True):
        if mode and not self.training:
            press()
        return super().train(mode)


def test_ctrl_c_while_modes_are_put_back_waits_for_it():
    model = torch.nn.Sequential(Slow(), torch.nn.Linear(1, 1), torch.nn.Dropout())
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(KeyboardInterrupt):
        fl.evaluate(fl.pipeline()(lambda model, batch: model(batch).mean()), state, [ONE])
    assert torch.is_grad_enabled() and all(module.training for module in model.modules())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
