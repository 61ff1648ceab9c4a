"""One run at a time in a process."""

import contextlib
import os
import random
import threading
import time

import pytest
import torch
from loop_cases import ONE, Boom, fit, generators, raising, step

import fnloop as fl
from fnloop.testing import assert_same, toy


def thread_of(task):
    """Return a thread that is at work, and a list with what it has raised."""
    raised = []

    def work():
        try:
            task()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, raised


def drawing_loss(model, batch):
    return (model.w * batch).mean() * random.random() * torch.rand(())


BORROWERS = {
    "fit": lambda: fl.fit(step, toy(), [ONE], hooks=()),
    "run": lambda: list(fl.run(step, toy(), [ONE], hooks=())),
    "evaluate": lambda: fl.evaluate(step, toy(), [ONE]),
    "predict": lambda: list(fl.predict(lambda model, batch: batch, toy(), [ONE])),
    "step.evaluate": lambda: step.evaluate(toy(), ONE),
}


@pytest.mark.parametrize("name", BORROWERS)
def test_a_second_thread_is_refused_while_one_is_in_a_run(name):
    entered, leave = threading.Event(), threading.Event()

    def hold(state):
        entered.set()
        assert leave.wait(10)
        return state

    def long_run():
        states.append(
            fl.fit(
                fl.pipeline()(drawing_loss),
                toy(),
                [ONE] * 4,
                epochs=2,
                hooks=(fl.every(epochs=1)(hold),),
            )
        )

    alone, states, before = (
        fl.fit(fl.pipeline()(drawing_loss), toy(), [ONE] * 4, epochs=2, hooks=()),
        [],
        generators(),
    )
    thread, raised = thread_of(long_run)
    assert entered.wait(10)
    with pytest.raises(
        RuntimeError,
        match=r"another thread of this process is inside one of them.*one after the other, or "
        r"each in a process",
    ):
        BORROWERS[name]()
    leave.set()
    thread.join()
    assert raised == []
    assert_same(states[0], alone)
    assert generators() == before
    BORROWERS[name]()  # now it is free


def test_a_run_that_raises_releases_the_process():
    thread, raised = thread_of(
        lambda: fl.fit(fl.pipeline()(raising(Boom("x"), at=1.0)), toy(), [ONE], hooks=())
    )
    thread.join()
    assert isinstance(raised[0], Boom)
    fit()
    thread, raised = thread_of(fit)  # and one after the other, in threads of their own
    thread.join()
    assert raised == []


def test_another_thread_is_refused_between_two_epochs_too():
    started, states = threading.Event(), []

    class Slow(list):
        """A loader that gives other threads a chance at every beginning of an epoch."""

        def __iter__(self):
            started.set()
            time.sleep(0.01)
            return super().__iter__()

    thread, raised = thread_of(
        lambda: states.append(fl.fit(step, toy(), Slow([ONE]), epochs=10, hooks=()))
    )
    assert started.wait(10)
    refused = 0
    while thread.is_alive() and not states:
        with contextlib.suppress(RuntimeError):
            fit()
            continue
        refused += 1
    thread.join()
    assert raised == [] and states[0].epoch == 10
    assert refused > 0


def test_nested_and_interleaved_runs_of_one_thread_are_correct():
    make = fl.pipeline()(drawing_loss)
    alone = [fl.fit(make, toy(w=w), [ONE] * 3, epochs=3, hooks=()) for w in (1.0, 2.0)]
    one, two = (fl.run(make, toy(w=w), [ONE] * 3, epochs=3, hooks=()) for w in (1.0, 2.0))
    for pair in zip(one, two, strict=True):
        fl.evaluate(make, pair[0], [ONE])
    for state, expected in zip(pair, alone, strict=True):
        assert_same(state, expected)

    def nested(state):
        fl.fit(make, toy(), [ONE], hooks=())
        return state

    assert_same(
        fl.fit(make, toy(w=1.0), [ONE] * 3, epochs=3, hooks=(fl.every(epochs=1)(nested),)), alone[0]
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's backward with a GPU allows no fork")
def test_a_fork_of_a_process_in_a_run_may_start_its_own_run():
    def fork(state):
        if (child := os.fork()) == 0:
            status = 1
            try:
                thread, raised = thread_of(
                    fit
                )  # its own, and the one that was in a run is not there
                thread.join()
                status = len(raised)
            finally:
                os._exit(status)
        statuses.append(os.waitpid(child, 0)[1])
        return state

    statuses = []
    fit(hooks=(fl.once(fork),))
    assert statuses == [0]
