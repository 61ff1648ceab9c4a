"""every, when and once: the updates of a real run at which a hook is called."""

import functools
import math
from fractions import Fraction

import attrs
import pytest
from sample_hooks import Notes
from sample_middleware import skip_negative
from toy_runs import ONE, STEP, called_at, fit

import fnloop as fl
from fnloop import every, once, when
from fnloop.testing import toy, toy_loss

WINDOWS = fl.pipeline(fl.accumulate(2))(toy_loss)
SKIPPING = fl.pipeline(skip_negative())(toy_loss)


def stream():
    return (ONE for _ in range(3))


# --- every: epochs and steps


@pytest.mark.parametrize(("trigger", "run", "steps"), [
    (every(steps=1), {"train": 3}, [1, 2, 3]), (every(steps=3), {"train": 10}, [3, 6, 9]),
    (every(steps=4), {"train": 5, "epochs": 2}, [4, 8]),  # counted over epochs
    (every(steps=7), {"train": 5}, []),
    (every(steps=2), {"train": 5, "epochs": 2, "step": WINDOWS}, [2, 4, 6]),  # not batches
    (every(epochs=1), {"train": 5, "epochs": 2}, [5, 10]),
    (every(epochs=1), {"train": 5, "epochs": 2, "step": WINDOWS}, [3, 6]),
    (every(epochs=2), {"train": 2, "epochs": 5}, [4, 8]),
    (every(epochs=2.0), {"train": 2, "epochs": 2}, [4]),
    (every(epochs=1), {"train": 5, "steps": 7}, [5]),  # the second epoch is not completed
    (every(steps=2), {"loaders": stream, "epochs": 2}, [2, 4, 6]),
    (every(epochs=1), {"loaders": stream, "epochs": 2}, [3, 6]),
    (lambda hook: every(steps=2)(every(steps=3)(hook)), {"train": 12}, [6, 12]),  # both are due
    # fractions of an epoch: 2.5, 5, 7.5, 10, rounded up
    (every(epochs=0.25), {"train": 10}, [3, 5, 8, 10]),
    (every(epochs=0.3), {"train": 10}, [3, 6, 9, 10]),  # and at its end
    (every(epochs=0.25), {"train": 10, "step": WINDOWS}, [2, 3, 4, 5]),  # of 5 updates
    (every(epochs=0.5), {"train": 5, "step": WINDOWS}, [2, 3]),  # 1.5 and 3 of 3
    # a skipped update is not a step: three boundaries have step 2. It is a part of the epoch
    (every(steps=2), {"step": SKIPPING, "loaders": [ONE, ONE, -ONE, -ONE, ONE, ONE]}, [2, 4]),
    (every(epochs=0.5), {"step": SKIPPING, "loaders": [ONE, -ONE, ONE, -ONE]}, [1, 2]),
    # when
    (when(lambda state: state.step in (2, 5)), {"train": 5}, [2, 5]),
    (when(lambda state: state.epoch == 1), {"epochs": 2}, [4, 5, 6, 7]),  # epoch 0 ends at 4
    (when(lambda state: state.step // 8), {"epochs": 2}, [8]),  # any true value
    (when(lambda state: "record" in state.events), {"epochs": 2}, [4, 8]),
    # once
    (once, {}, [1]), (lambda hook: when(lambda state: state.step >= 4)(once(hook)), {}, [4]),
])  # fmt: skip
def test_the_updates_at_which_a_hook_is_called(trigger, run, steps):
    assert called_at(trigger, **run) == steps


@pytest.mark.parametrize("given", [
    {"hooks": (every(epochs=0.5)(Notes()),)},
    {"hooks": (every(steps=2)(every(epochs=0.5)(Notes())),)},
    {"hooks": (), "evaluate_every": every(epochs=0.5)},
], ids=["a hook", "a hook inside another", "evaluation"])  # fmt: skip
def test_fractions_without_a_length_are_an_error_before_the_first_update(given):
    state, why = toy(), r"every\(epochs=0\.5\) needs to know how long .*write every\(steps=\.\.\.\)"
    with pytest.raises(ValueError, match=why):
        fl.fit(STEP, state, stream, **given)
    assert state.model.w.item() == 0.0


@pytest.mark.parametrize("updates", [1, 2, 3, 7, 10, 64, 1000])
def test_a_fraction_is_due_exactly_as_defined(updates):
    state = attrs.evolve(toy(), run=fl.RunInfo(steps_per_epoch=updates))
    for fraction in (1e-6, 1e-3, 0.1, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.999, 0.999999):
        part, trigger = Fraction(str(fraction)), every(epochs=fraction)
        count = math.floor(1 / part)
        ks = range(1, count + 1) if count <= 2000 else ()  # of more parts, each update ends one
        expected = {math.ceil(k * updates * part) for k in ks} or set(range(1, updates + 1))
        found = {n for n in range(1, updates + 1) if trigger.due(attrs.evolve(state, batch=n))}
        assert found == expected, fraction


# --- every: seconds


@pytest.mark.parametrize(("pace", "steps"), [
    (1.0, [4, 7, 10]),  # one second per update, counted from the first boundary
    (0.5, [7]),
    (2.0, [3, 5, 7, 9]),  # each time late by a second, which is not made up for
    (5.0, [2, 3, 4, 5, 6, 7, 8, 9, 10]),  # updates are slower than the interval
    (0.0, []),
])  # fmt: skip
def test_every_counts_seconds(clock, pace, steps):
    notes = Notes()
    fit(clock.takes(pace), every(seconds=3)(notes), train=10)
    assert notes.steps == steps


def test_a_trigger_is_due_for_each_use_and_a_new_run_restarts_its_clock(clock):
    one, other, trigger = Notes(), Notes(), every(seconds=3)
    hooks = (trigger(one), trigger(other), every(steps=1)(clock.takes(1.0)))
    loaders = {"train": [ONE] * 10, "valid": [ONE], "test": [ONE]}
    moments = {"evaluate_every": {"valid": trigger, "test": trigger}, "record_every": trigger}
    state = fit(*hooks, loaders=loaders, **moments)
    recorded = {name: [record.step for record in state.history if name in record.metrics]
                for name in ("valid/loss", "test/loss", "recent/loss")}  # fmt: skip
    assert one.steps == other.steps == [4, 7, 10]
    assert {*map(tuple, recorded.values())} == {(4, 7, 10)}
    clock.now += 1000.0
    fit(*hooks, loaders=loaders, state=state, epochs=2)
    assert one.steps[3:] == [14, 17, 20]


# --- all triggers


@pytest.mark.parametrize(("given", "message"), [
    ({"hooks": (every(steps=1),)},
        r"every\(steps=1\) says when, but not what: write every\(steps=1\)\(hook\)"),
    ({"hooks": (when(len),)}, r"when\(len\) says when, but not what: write when\(len\)\(hook\)"),
    ({"hooks": (every,)},
        r"a hook is a function state -> state; got every\. Call it: every\(\.\.\.\)"),
    ({"hooks": (), "evaluate_every": every(steps=1)(Notes())},
        r"evaluate_every as .*got every\(steps=1\)\(notes\)"),
])  # fmt: skip
def test_a_run_refuses_a_trigger_without_a_hook_and_a_class(given, message):
    with pytest.raises(TypeError, match=message):
        fl.fit(STEP, toy(), [ONE], **given)


@pytest.mark.parametrize("trigger", [
    every(steps=100), when(lambda state: False), once, fl.when_improved("train/loss"),
])  # fmt: skip
def test_a_hook_in_a_trigger_begins_is_flushed_and_is_closed_with_the_run(trigger):
    notes, calls = Notes(), []
    notes.begin = lambda state: calls.append(f"a run of {state.run.total_steps}") or state
    notes.flush = lambda state: calls.append("flushed") or state
    fit(trigger(notes), train=1)
    flushed = [] if trigger is once else ["flushed"]  # it has had its one call
    assert (calls, notes.closed) == (["a run of 1", *flushed], 1)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: every(), TypeError, r"one of epochs=, steps=, items= or seconds=; got none"),
    (lambda: every(epochs=1, steps=100), TypeError, r"or seconds=; got epochs, steps"),
    (lambda: every(steps=0.5), ValueError,
        r"steps as an int; got 0\.5\. For a part of an epoch, write every\(epochs=0\.25\)"),
    (lambda: every(epochs=1.5), ValueError, r"a whole number, or as a fraction below 1; got 1\.5"),
    (lambda: every(epochs=9e-7), ValueError,
        r"every expects epochs >= 1e-06; got .* write every\(steps=1\)"),
    (lambda: every(steps=2)(fl.progress), TypeError,
        r"got the class progress\. Call it: progress\(\.\.\.\)"),
    # once
    (lambda: once(every(steps=2)(Notes())), TypeError,
        r"once counts each call, due or not: write every\(steps=2\)\(once\(notes\)\)"),
    (lambda: once(when(len)(Notes())), TypeError, r"due or not: write when\(len\)\(once\(notes\)"),
    *((lambda wrap=wrap: fit(wrap(once(fl.inspect(print))), valid=1), ValueError,
        r"write every\(epochs=1\)\(once\(inspect\(print\)\)\)")
        for wrap in (lambda hook: hook, fl.on_main)),
    (lambda: fit(once(lambda state: None)), TypeError,
        r"once\(<lambda>\) returned None\. Did you forget 'return state'\?"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error_that_says_what_to_write(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- once: which hook it is


def test_the_state_remembers_that_a_hook_has_run():
    notes, start = Notes(), toy()
    before = fl.snapshot(start)
    state = fit(once(notes), train=2, state=start, epochs=1)
    state = fit(once(notes), train=2, state=state, epochs=2)
    fit(once(notes), train=2, state=fl.snapshot(state), epochs=3)
    assert notes.steps == [1]
    fit(once(notes), train=2, state=before, epochs=1)  # this state does not have the slot
    assert notes.steps == [1, 1]


def test_a_name_identifies_a_hook():
    notes = Notes()
    state = once(notes, "greeting")(toy())
    once(lambda state: notes(state), "greeting")(state)
    assert notes.steps == [0]
    once(notes, "farewell")(state)
    assert notes.steps == [0, 0]


def test_hooks_defined_in_different_places_are_different():
    notes = Notes()

    def one(state):
        return notes(state)

    def other(state):
        return notes(state)

    third = lambda state: notes(state)
    fourth = lambda state: notes(state)  # the same name, another line
    fit(*map(once, (one, other, third, fourth)), train=3)
    assert notes.steps == [1, 1, 1, 1]


def noting(notes):
    """Return a new hook each time, with the same code."""

    def note(state):
        return notes(state)

    return note


def test_two_hooks_of_one_factory_need_names():
    notes, state = Notes(), toy()
    for hooks in [
        (once(noting(notes)), once(noting(notes))),
        (every(steps=1)(once(noting(notes))), when(lambda state: True)(once(noting(notes)))),
        (once(noting(notes), name="a"), once(Notes(), name="a")),
    ]:
        why = r"two hooks would be remembered as 'once:.*: once\(hook, name=\.\.\.\)"
        with pytest.raises(ValueError, match=why):
            fit(*hooks, state=state)
    assert (state.model.w.item(), notes.steps) == (0.0, [])  # before the first update
    fit(once(noting(notes), name="a"), once(noting(notes), name="b"), state=state)
    assert notes.steps == [1, 1]


class Plain:
    """A hook whose repr is an address."""

    def __call__(self, state):
        return state


@pytest.mark.parametrize("hook", [functools.partial(fl.snapshot), Plain()])
def test_a_hook_that_cannot_be_identified_needs_a_name(hook):
    why = r"cannot be identified in another process: give it a name, once\(hook, name=\.\.\.\)"
    with pytest.raises(TypeError, match=why):
        once(hook)
    assert once(hook, name="mine").slot == "once:mine"
