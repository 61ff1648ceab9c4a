"""One run at a time in a process."""

import os
import random
import threading

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


DRAWING = fl.pipeline()(drawing_loss)


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

    def long_run(*hooks):
        states.append(fl.fit(DRAWING, toy(), [ONE] * 4, epochs=2, hooks=hooks))

    states, before = [], generators()
    long_run()
    thread, raised = thread_of(lambda: long_run(fl.every(epochs=1)(hold)))
    assert entered.wait(10)
    message = r"another thread of this process is inside one of them.*one after the other, or each"
    with pytest.raises(RuntimeError, match=message):
        BORROWERS[name]()
    leave.set()
    thread.join()
    assert raised == []
    assert_same(*states)
    assert generators() == before
    BORROWERS[name]()  # now it is free


def test_a_run_that_raises_releases_the_process():
    explode = fl.pipeline()(raising(Boom("x"), at=1.0))
    thread, raised = thread_of(lambda: fl.fit(explode, toy(), [ONE], hooks=()))
    thread.join()
    assert isinstance(raised[0], Boom)
    fit()
    thread, raised = thread_of(fit)  # and one after the other, in threads of their own
    thread.join()
    assert raised == []


def test_another_thread_is_refused_between_two_epochs_too():
    """The second thread comes where the loader begins an epoch."""
    waiting, tried = threading.Semaphore(0), threading.Semaphore(0)

    class Slow(list):
        def __iter__(self):
            waiting.release()
            assert tried.acquire(timeout=10)
            return super().__iter__()

    thread, raised = thread_of(lambda: fl.fit(step, toy(), Slow([ONE]), epochs=3, hooks=()))
    for _ in range(3):
        assert waiting.acquire(timeout=10)
        with pytest.raises(RuntimeError, match="another thread"):
            fit()
        tried.release()
    thread.join()
    assert raised == []


def test_nested_and_interleaved_runs_of_one_thread_are_correct():
    alone = [fl.fit(DRAWING, toy(w=w), [ONE] * 3, epochs=3, hooks=()) for w in (1.0, 2.0)]
    one, two = (fl.run(DRAWING, toy(w=w), [ONE] * 3, epochs=3, hooks=()) for w in (1.0, 2.0))
    for pair in zip(one, two, strict=True):
        fl.evaluate(DRAWING, pair[0], [ONE])
    for state, expected in zip(pair, alone, strict=True):
        assert_same(state, expected)
    nested = fl.every(epochs=1)(lambda state: fit() and state)
    assert_same(fl.fit(DRAWING, toy(w=1.0), [ONE] * 3, epochs=3, hooks=(nested,)), alone[0])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's backward with a GPU allows no fork")
def test_a_fork_of_a_process_in_a_run_may_start_its_own_run():
    def fork(state):
        if (child := os.fork()) == 0:
            status = 1
            try:
                thread, raised = thread_of(fit)  # the one that was in a run is not there
                thread.join()
                status = len(raised)
            finally:
                os._exit(status)
        statuses.append(os.waitpid(child, 0)[1])
        return state

    statuses = []
    fit(hooks=(fl.once(fork),))
    assert statuses == [0]
