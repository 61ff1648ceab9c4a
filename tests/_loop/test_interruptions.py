"""Ctrl-C and signals."""

import functools
import os
import signal
import time

import attrs
import pytest
import torch
from loop_cases import NUMBERS, ONE, fit, interrupting, press, raise_interrupt, step, terminate

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss


def test_ctrl_c_stops_the_run_after_the_current_update():
    state = fl.fit(interrupting(2, press), toy(), NUMBERS, hooks=())
    assert (state.step, state.model.w.item(), state.stop) == (2, -3.0, "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    state = fl.fit(step, state, NUMBERS, hooks=())  # the same script continues
    assert (state.step, state.epoch, state.stop, state.model.w.item()) == (3, 1, None, -6.0)


def test_an_interrupt_that_is_raised_returns_the_state_before_the_update():
    state = fl.fit(interrupting(2, raise_interrupt), toy(), NUMBERS, hooks=())
    assert (state.step, state.model.w.item(), state.stop, state.model.w.grad) == (
        1,
        -1.0,
        "interrupted",
        None,
    )


def test_a_second_ctrl_c_raises_and_loses_nothing():
    with pytest.raises(KeyboardInterrupt) as error:
        fl.fit(interrupting(2, lambda: (press(), press())), toy(), NUMBERS, hooks=())
    assert error.value.state.step == 1
    assert fit(error.value.state, NUMBERS).model.w.item() == -6.0


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
def test_a_signal_in_the_hooks_at_an_epochs_end_ends_the_run_there(how, reason):
    hook = fl.when(lambda state: state.step == 3)(lambda state: (how(), state)[1])
    states = list(fl.run(step, toy(), [ONE] * 3, epochs=3, hooks=(hook,)))
    assert [(s.step, s.epoch, s.stop) for s in states] == [(3, 1, reason)]
    assert fit(hooks=(hook,)).stop == reason  # at the last boundary of the run too


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
def test_a_loader_killed_by_the_signal_that_stops_the_run_is_not_an_error(how, reason):
    def dies():
        yield from NUMBERS[:2]
        raise RuntimeError("DataLoader worker exited unexpectedly")

    state = fl.fit(interrupting(2, how), toy(), dies, hooks=())
    assert (state.step, state.model.w.item(), state.stop) == (2, -3.0, reason)
    state = fit(state, NUMBERS)
    assert (state.step, state.epoch, state.stop, state.model.w.item()) == (3, 1, None, -6.0)


def test_hooks_see_an_interruption():
    seen = []
    fl.fit(
        interrupting(2, press),
        toy(),
        NUMBERS,
        hooks=(lambda state: (seen.append(state.stop), state)[1],),
    )
    assert seen == [None, "interrupted"]


def test_the_first_ctrl_c_waits_for_the_update_even_after_a_sigterm():
    """Only a second Ctrl-C raises at once."""

    def loss_fn(model, batch):
        if model.w.item() == -1.0:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return toy_loss(model, batch)

    try:
        state = fl.fit(fl.pipeline()(loss_fn), toy(), [ONE] * 5, hooks=())
    except KeyboardInterrupt:
        pytest.fail("the first Ctrl-C raised")
    assert (state.step, state.stop, state.model.w.item()) == (2, "interrupted", -2.0)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_sigterm_after_the_last_boundary_is_raised_when_the_run_ends(monkeypatch, in_time):
    """An earlier one is recorded in the state instead."""
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)

    class Terminating:
        def __call__(self, state):
            if in_time and state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return state

        def close(self):
            if not in_time:
                os.kill(os.getpid(), signal.SIGTERM)

    state = fl.fit(step, toy(), [ONE] * 3, hooks=(Terminating(),))
    expected = (2, "SIGTERM", []) if in_time else (3, None, [signal.SIGTERM])
    assert (state.step, state.stop, raised) == expected


@pytest.mark.parametrize(
    ("how", "evaluated"), [(terminate, 2), (press, 5)], ids=["SIGTERM", "Ctrl-C"]
)
@pytest.mark.parametrize("every", [{"epochs": 1}, {"steps": 2}], ids=str)
def test_an_evaluation_is_abandoned_where_a_scheduler_ends_the_job(how, evaluated, every):
    """Its grace period is some seconds. A resumed run evaluates from the beginning."""
    seen = []

    def loss_fn(model, batch):
        if not model.training:
            seen.append(model.w.item())
            if len(seen) == 2:
                how()
        return toy_loss(model, batch)

    settings = {"evaluate_every": fl.every(**every), "epochs": 2, "hooks": ()}
    loaders = ([ONE] * 3, [ONE] * 5)
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, **settings)
    assert len(seen) == evaluated and state.stop in ("SIGTERM", "interrupted")
    assert len(state.history) == (evaluated == 5)
    whole = fl.fit(step, toy(), loaders, **settings)
    assert_same(fl.fit(step, state, loaders, **settings), whole)


def test_an_evaluation_of_the_untrained_model_is_abandoned_too():
    def loss_fn(model, batch):
        if not model.training and model.w.item() == 0.0:
            terminate()
        return toy_loss(model, batch)

    settings = {"evaluate_every": fl.at_start() | fl.every(epochs=1), "hooks": ()}
    loaders = ([ONE] * 3, [ONE] * 5)
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, **settings)
    assert (state.step, state.stop, len(state.history)) == (0, "SIGTERM", 0)
    whole = fl.fit(step, toy(), loaders, **settings)
    assert_same(fl.fit(step, state, loaders, **settings), whole)


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
@pytest.mark.parametrize(
    ("moment", "evaluated"),
    [("the update", 0), ("the update", 1), ("the closing evaluation", 1)],
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

    stop = fl.every(steps=1)(lambda state: attrs.evolve(state, stop="enough"))
    loaders = {"train": [ONE] * 3, **({"valid": [ONE]} if evaluated else {})}
    settings = {"loaders": loaders, "hooks": (stop,), "phase": phase}
    signalled = functools.partial(fl.fit, fl.pipeline()(loss_fn), **settings)
    quiet = functools.partial(fl.fit, step, **settings)
    state = signalled(state=toy())
    assert (state.step, state.stop, len(state.history)) == (1, reason, 0)
    if phase is not None:
        with pytest.raises(ValueError, match=f"'one'.*has not ended.*{reason}"):
            fl.fit(step, state, loaders, hooks=(), phase="two")
    state = quiet(state=state)
    assert (state.step, state.stop) == (1, "enough")
    assert [r.closing for r in state.history] == [True]
    assert_same(state, quiet(state=toy()))


def test_a_sigterm_in_the_hooks_of_the_end_is_raised_when_the_run_has_ended(monkeypatch):
    """The script would not see it in the state."""
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    stop = fl.when(lambda state: state.step == 1)(lambda state: attrs.evolve(state, stop="enough"))
    end = fl.at_end()(lambda state: terminate() or state)
    state = fl.fit(step, toy(), [ONE] * 3, hooks=(stop, end))
    assert (state.step, state.stop, raised) == (1, "enough", [signal.SIGTERM])
    assert [r.closing for r in state.history] == [True]


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


def test_the_times_of_a_record_that_is_left_are_those_of_the_run_before(tmp_path, monkeypatch):
    now, armed = [0.0], [True]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def loss_fn(model, batch):
        if not model.training and armed:
            armed.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        now[0] += 0.5 if model.training else 0.0
        return toy_loss(model, batch)

    step = fl.pipeline(fl.timings(), fl.throughput())(loss_fn)
    loaders, often = ([torch.ones(2)] * 4, [torch.ones(1)]), {"evaluate_every": fl.every(steps=2)}
    fl.save(fl.fit(step, toy(), loaders, hooks=(), **often), tmp_path / "cut")
    state = fl.restore(tmp_path / "cut", toy())
    first = fl.fit(step, state, loaders, hooks=(), **often).history[0].metrics
    assert (first["train/time/step"], first["train/time/data"]) == (0.5, 0.0)
    assert first["train/throughput/samples"] == 4.0


def test_a_record_that_is_left_lacks_a_metric_of_an_own_class_and_a_warning_says_so(
    tmp_path, caplog
):
    armed = [True]

    def loss_fn(model, batch):
        if not model.training and armed:
            armed.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(model, batch)

    own = fl.metric(product=lambda aux, batch: Product(batch.prod()), on="training")
    step = fl.pipeline(own)(loss_fn)
    loaders = ([torch.tensor([2.0])] * 4, [torch.ones(1)])
    often = {"evaluate_every": fl.every(steps=2), "hooks": ()}
    fl.save(fl.fit(step, toy(), loaders, **often), tmp_path / "cut")
    assert not caplog.text
    state = fl.fit(step, fl.restore(tmp_path / "cut", toy()), loaders, **often)
    assert "the record of step 2" in caplog.text and "is made without product" in caplog.text
    first, last = state.history
    assert "train/product" not in first.metrics and last.metrics["train/product"] == 2.0**4


def test_so_does_the_record_of_an_epoch_that_a_hook_ended_at_the_target(tmp_path, caplog):
    end = lambda state: attrs.evolve(state, ends="epoch") if state.step == 3 else state
    step = fl.pipeline(fl.metric(product=lambda aux, batch: Product(batch.prod())))(toy_loss)
    batches = [torch.tensor([2.0])] * 6
    fl.save(fl.fit(step, toy(), batches, steps=3, hooks=(end,)), tmp_path / "left")
    state = fl.fit(step, fl.restore(tmp_path / "left", toy()), batches, epochs=1, hooks=())
    assert "train/product" not in state.history[-1].metrics
    assert "is made without product" in caplog.text
