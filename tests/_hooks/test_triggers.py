"""every and when: the updates of a real run at which a hook is called."""

import math
import time
from fractions import Fraction

import attrs
import pytest
import torch
from sample_hooks import Notes
from sample_middleware import skip_negative

import fnloop as fl
from fnloop import every, once, when
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])


NEGATIVE = torch.tensor([-1.0])


def called_at(trigger, batches=10, window=1, **targets):
    """Return the steps at which a hook with a trigger is called; ``batches`` is per epoch."""
    notes = Notes()
    step = fl.pipeline(fl.accumulate(window))(toy_loss)
    fl.fit(step, toy(), [ONE] * batches, hooks=(trigger(notes),), **targets)
    return notes.steps


# --- every: epochs and steps


@pytest.mark.parametrize(("trigger", "run", "steps"), [
    (every(steps=1), {"batches": 3}, [1, 2, 3]), (every(steps=3), {"batches": 10}, [3, 6, 9]),
    (every(steps=4), {"batches": 5, "epochs": 2}, [4, 8]),  # counted over epochs
    (every(steps=7), {"batches": 5}, []),
    (every(steps=2), {"batches": 5, "epochs": 2, "window": 2}, [2, 4, 6]),  # updates, not batches
    (every(epochs=1), {"batches": 5, "epochs": 2}, [5, 10]),
    (every(epochs=1), {"batches": 5, "epochs": 2, "window": 2}, [3, 6]),
    (every(epochs=2), {"batches": 2, "epochs": 5}, [4, 8]),
    (every(epochs=2.0), {"batches": 2, "epochs": 2}, [4]),
    (every(epochs=1), {"batches": 5, "steps": 7}, [5]),  # the second epoch is not completed
])  # fmt: skip
def test_every_counts_whole_epochs_and_steps(trigger, run, steps):
    assert called_at(trigger, **run) == steps


@pytest.mark.parametrize(("fraction", "run", "steps"), [
    (0.25, {"batches": 10}, [3, 5, 8, 10]),  # 2.5, 5, 7.5, 10, rounded up
    (0.3, {"batches": 10}, [3, 6, 9, 10]),
    (0.5, {"batches": 5, "epochs": 2}, [3, 5, 8, 10]),
    (0.1, {"batches": 10}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    (0.25, {"batches": 2}, [1, 2]),  # more often than there are updates
    (0.9, {"batches": 10}, [9, 10]),
    (0.25, {"batches": 10, "window": 2}, [2, 3, 4, 5]),  # 1.25, 2.5, 3.75, 5 of 5 updates
    (0.5, {"batches": 5, "window": 2}, [2, 3]),  # 1.5 and 3 of 3
    # 0.07 * 100 > 7
    (0.07, {"batches": 100}, [7, 14, 21, 28, 35, 42, 49, 56, 63, 70, 77, 84, 91, 98, 100]),
])  # fmt: skip
def test_every_accepts_fractions_of_an_epoch(fraction, run, steps):
    assert called_at(every(epochs=fraction), **run) == steps


@pytest.mark.parametrize(
    ("cut", "steps"), [(3, [3, 5, 8, 10]), (4, [3, 5, 8, 10]), (9, [3, 5, 8, 10])]
)
def test_a_resumed_run_calls_a_hook_as_an_uninterrupted_one_does(cut, steps):
    notes, step = Notes(), fl.pipeline()(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 10, steps=cut, hooks=(every(epochs=0.25)(notes),))
    fl.fit(step, state, [ONE] * 10, epochs=1, hooks=(every(epochs=0.25)(notes),))
    assert notes.steps == steps


def test_a_skipped_update_does_not_count_as_a_step():
    notes = Notes()
    batches = [ONE, ONE, NEGATIVE, NEGATIVE, ONE, ONE]  # three boundaries have step 2
    state = fl.fit(
        fl.pipeline(skip_negative())(toy_loss), toy(), batches, hooks=(every(steps=2)(notes),)
    )
    assert notes.steps == [2, 4]
    assert (state.step, state.skipped) == (4, 2)


def test_a_skipped_update_counts_towards_a_fraction_of_the_epoch():
    notes = Notes()
    batches = [ONE, NEGATIVE, ONE, NEGATIVE]
    fl.fit(
        fl.pipeline(skip_negative())(toy_loss), toy(), batches, hooks=(every(epochs=0.5)(notes),)
    )
    assert notes.steps == [1, 2]  # after the second and the fourth batch


def test_steps_and_whole_epochs_work_without_a_length():
    by_steps, by_epochs = Notes(), Notes()
    hooks = (every(steps=2)(by_steps), every(epochs=1)(by_epochs))
    fl.fit(fl.pipeline()(toy_loss), toy(), lambda: (ONE for _ in range(3)), epochs=2, hooks=hooks)
    assert (by_steps.steps, by_epochs.steps) == ([2, 4, 6], [3, 6])


@pytest.mark.parametrize("when_to", [
    {"hooks": (every(epochs=0.5)(Notes()),)},
    {"hooks": (every(steps=2)(every(epochs=0.5)(Notes())),)},
    {"hooks": (), "evaluate_every": every(epochs=0.5)},
], ids=["a hook", "a hook inside another", "evaluation"])  # fmt: skip
def test_fractions_without_a_length_are_an_error_before_the_first_update(when_to):
    state = toy()
    with pytest.raises(
        ValueError,
        match=r"every\(epochs=0\.5\) needs to know how long .*write every\(steps=\.\.\.\)",
    ):
        fl.fit(fl.pipeline()(toy_loss), state, lambda: (ONE for _ in range(3)), **when_to)
    assert state.model.w.item() == 0.0


@pytest.mark.parametrize(("when_to", "evaluated"), [
    (every(epochs=0.25), [3, 5, 8, 10]), (every(steps=4), [4, 8]), (every(epochs=2), []),
    (when(lambda state: state.step == 7), [7]), (None, []),
], ids=repr)  # fmt: skip
def test_triggers_also_say_when_to_evaluate(when_to, evaluated):
    loaders = {"train": [ONE] * 10, "valid": [ONE]}
    history = fl.fit(
        fl.pipeline()(toy_loss), toy(), loaders, hooks=(), evaluate_every=when_to
    ).history
    assert [record.step for record in history if "valid/loss" in record.metrics] == evaluated
    assert history[-1].step == 10  # a record at the end of the epoch, evaluated or not


def test_a_hook_in_two_triggers_runs_when_both_are_due():
    assert called_at(lambda hook: every(steps=2)(every(steps=3)(hook)), batches=12) == [6, 12]


# --- every: seconds


@pytest.mark.parametrize(("pace", "steps"), [
    (1.0, [4, 7, 10]),  # one second per update, counted from the first boundary
    (0.5, [7]),
    (2.0, [3, 5, 7, 9]),  # each time late by a second, which is not made up for
    (5.0, [2, 3, 4, 5, 6, 7, 8, 9, 10]),  # updates are slower than the interval
    (0.0, []),
])  # fmt: skip
def test_every_counts_seconds(clock, pace, steps):
    def tick(state):
        clock.now += pace
        return state

    notes = Notes()
    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 10, hooks=(tick, every(seconds=3)(notes)))
    assert notes.steps == steps


def ticking(clock):
    """Return a hook that makes each update take a second."""

    def tick(state):
        clock.now += 1.0
        return state

    return tick


def test_a_trigger_used_three_times_is_due_for_each_use(clock):
    one, other, trigger = Notes(), Notes(), every(seconds=3)
    loaders, hooks = (
        {"train": [ONE] * 10, "valid": [ONE]},
        (trigger(one), trigger(other), ticking(clock)),
    )
    state = fl.fit(fl.pipeline()(toy_loss), toy(), loaders, hooks=hooks, evaluate_every=trigger)
    evaluated = [record.step for record in state.history if "valid/loss" in record.metrics]
    assert one.steps == other.steps == evaluated == [4, 7, 10]


def test_a_new_run_restarts_the_clock(clock):
    notes = Notes()
    hooks = (every(steps=1)(every(seconds=3)(notes)), ticking(clock))
    state = fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 5, epochs=1, hooks=hooks)
    clock.now += 1000.0
    fl.fit(fl.pipeline()(toy_loss), state, [ONE] * 5, epochs=2, hooks=hooks)
    assert notes.steps == [4, 9]


# --- when


@pytest.mark.parametrize(("predicate", "steps"), [
    (lambda state: state.step in (2, 5), [2, 5]),
    (lambda state: state.epoch == 1, [4, 5, 6, 7]),  # epoch 1 is completed by update 4
    (lambda state: state.step // 8, [8]),  # any true value
    (lambda state: "record" in state.events, [4, 8]),
])  # fmt: skip
def test_a_hook_runs_when_the_predicate_holds(predicate, steps):
    assert called_at(when(predicate), batches=4, epochs=2) == steps


def test_a_hook_can_stop_the_run():
    stop = when(lambda state: state.step == 3)(lambda state: attrs.evolve(state, stop="enough"))
    state = fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 5, epochs=2, hooks=(stop,))
    assert (state.step, state.epoch, state.stop) == (3, 0, "enough")


# --- all triggers


@pytest.mark.parametrize(("wrong", "message"), [
    ({"hooks": (every(steps=1),)},
        r"every\(steps=1\) says when, but not what: write every\(steps=1\)\(hook\)"),
    ({"hooks": (when(len),)}, r"when\(len\) says when, but not what: write when\(len\)\(hook\)"),
    ({"hooks": (every,)},
        r"a hook is a function state -> state; got every\. Call it: every\(\.\.\.\)"),
    ({"hooks": (), "evaluate_every": every},
        r"evaluate_every as every\(epochs=1\), .*got the class every"),
    ({"hooks": (), "evaluate_every": when},
        r"evaluate_every as every\(epochs=1\), .*got the class when"),
    ({"hooks": (), "evaluate_every": 100}, r"evaluate_every as every\(epochs=1\), .*got 100"),
    ({"hooks": (), "evaluate_every": every(steps=1)(Notes())},
        r"evaluate_every as .*got every\(steps=1\)\(notes\)"),
])  # fmt: skip
def test_a_run_refuses_a_trigger_without_a_hook_and_a_class(wrong, message):
    with pytest.raises(TypeError, match=message):
        fl.fit(fl.pipeline()(toy_loss), toy(), [ONE], **wrong)


@pytest.mark.parametrize(
    "trigger", [every(steps=100), when(lambda state: False), once], ids=["every", "when", "once"]
)
def test_a_hook_in_a_trigger_is_closed_with_the_run(trigger):
    notes = Notes()
    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE], hooks=(trigger(notes),))
    assert notes.closed == 1


def never(state):
    return False


@pytest.mark.parametrize(("made", "text"), [
    (every(epochs=1), "every(epochs=1)"), (every(epochs=0.25), "every(epochs=0.25)"),
    (every(steps=100)(never), "every(steps=100)(never)"),
    (every(seconds=60.0)(Notes()), "every(seconds=60.0)(notes)"), (when(never), "when(never)"),
    (when(never)(once(never)), "when(never)(once(never))"),
])  # fmt: skip
def test_the_repr_is_the_call(made, text):
    assert repr(made) == text


def test_triggers_of_equal_calls_are_equal_even_after_use():
    used = every(seconds=60)
    used.due(toy())
    assert used == every(seconds=60) != every(seconds=61)
    assert every(steps=2) == every(steps=2) != every(steps=3)
    assert every(epochs=1)(never) == every(epochs=1)(never) != every(epochs=2)(never)
    assert when(never) == when(never)
    assert once(never) == once(never) != once(never, "name")


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: every(), TypeError, r"one of epochs=, steps= or seconds=; got none"),
    (lambda: every(epochs=1, steps=100), TypeError,
        r"one of epochs=, steps= or seconds=; got epochs, steps"),
    (lambda: every(epochs=0), ValueError, r"every expects epochs > 0 and finite; got 0"),
    (lambda: every(epochs=float("inf")), ValueError,
        r"every expects epochs > 0 and finite; got inf"),
    (lambda: every(steps=-1), ValueError, r"every expects steps > 0 and finite; got -1"),
    (lambda: every(seconds=float("nan")), ValueError,
        r"every expects seconds > 0 and finite; got nan"),
    (lambda: every(steps=True), ValueError,
        r"every expects steps as a number > 0 and finite; got True"),
    (lambda: every(steps="3"), ValueError,
        r"every expects steps as a number > 0 and finite; got '3'"),
    (lambda: every(steps=0.5), ValueError,
        r"steps as an int; got 0\.5\. For a part of an epoch, write every\(epochs=0\.25\)"),
    (lambda: every(epochs=1.5), ValueError, r"a whole number, or as a fraction below 1; got 1\.5"),
    (lambda: every(steps=2)(3), TypeError,
        r"every\(steps=2\) expects hook as a function state -> state; got 3"),
    (lambda: every(steps=2)(fl.progress), TypeError,
        r"got the class progress\. Call it: progress\(\.\.\.\)"),
    (lambda: when(never)(None), TypeError, r"when\(never\) expects hook as .*got None"),
    (lambda: when(100), TypeError, r"when expects predicate as a function state -> bool; got 100"),
    (lambda: once("hello"), TypeError, r"once expects hook as .*got 'hello'"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- fractions, exactly


@pytest.mark.parametrize(
    "fraction", [1e-6, 1e-3, 0.1, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.999, 0.999999]
)
@pytest.mark.parametrize("updates", [1, 2, 3, 7, 10, 64, 1000])
def test_a_fraction_is_due_exactly_as_defined(fraction, updates):
    part = Fraction(str(fraction))
    count = math.floor(1 / part)
    ks = (
        range(1, count + 1) if count <= 2000 else ()
    )  # with more parts than updates, each update ends one
    expected = {math.ceil(k * updates * part) for k in ks} or set(range(1, updates + 1))
    run = fl.RunInfo(steps_per_epoch=updates)
    state = attrs.evolve(toy(), run=run)
    trigger = every(epochs=fraction)
    assert {
        n for n in range(1, updates + 1) if trigger.due(attrs.evolve(state, batch=n))
    } == expected


@pytest.mark.parametrize("bad", [1e-8, 9e-7, 5e-324])
def test_a_tiny_fraction_is_refused_when_composing(bad):
    with pytest.raises(
        ValueError, match=r"every expects epochs >= 1e-06; got .* write every\(steps=1\)"
    ):
        every(epochs=bad)


def test_the_smallest_fraction_is_fast():
    notes = Notes()
    start = time.process_time()  # of this process, whatever else runs
    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 5, hooks=(every(epochs=1e-6)(notes),))
    assert (notes.steps, time.process_time() - start < 1.0) == ([1, 2, 3, 4, 5], True)
