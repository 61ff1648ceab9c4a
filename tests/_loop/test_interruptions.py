"""Ctrl-C and signals."""

import signal

import pytest
from loop_cases import NUMBERS, ONE, fit, interrupting, press, raise_interrupt, step, terminate

import fnloop as fl
from fnloop.testing import toy


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
