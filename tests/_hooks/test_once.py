"""once: a hook runs one time, and the state remembers it."""

import functools

import attrs
import pytest
import torch
from sample_hooks import Notes

import fnloop as fl
from fnloop import every, once, when
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])


def called_at(wrap):
    """Return the steps at which a wrapped hook is called, in a run of ten updates."""
    notes = Notes()
    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 10, hooks=(wrap(notes),))
    return notes.steps


def test_once_runs_a_hook_the_first_time_only():
    assert called_at(once) == [1]
    assert called_at(lambda hook: when(lambda state: state.step >= 4)(once(hook))) == [4]


def test_the_state_remembers_that_a_hook_has_run():
    step, notes = fl.pipeline()(toy_loss), Notes()
    start = toy()
    before = fl.snapshot(start)
    state = fl.fit(step, start, [ONE] * 2, epochs=1, hooks=(once(notes),))
    state = fl.fit(step, state, [ONE] * 2, epochs=2, hooks=(once(notes),))
    assert notes.steps == [1]
    fl.fit(step, fl.snapshot(state), [ONE] * 2, epochs=3, hooks=(once(notes),))
    assert notes.steps == [1]
    fl.fit(
        step, before, [ONE] * 2, epochs=1, hooks=(once(notes),)
    )  # this state does not have the slot
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

    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 3, hooks=(once(one), once(other)))
    assert notes.steps == [1, 1]
    hooks = (
        once(lambda state: notes(state)),
        once(lambda state: notes(state)),  # the same name, another line
    )
    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 3, hooks=hooks)
    assert notes.steps == [1, 1, 1, 1]


def test_once_returns_the_state_that_the_hook_returns():
    state = fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        [ONE] * 3,
        hooks=(once(lambda state: attrs.evolve(state, stop="now")),),
    )
    assert (state.step, state.stop) == (1, "now")


def noting(notes):
    """Return a new hook each time, with the same code."""

    def note(state):
        return notes(state)

    return note


def test_two_hooks_of_one_factory_need_names():
    step, notes, state = fl.pipeline()(toy_loss), Notes(), toy()
    for hooks in [
        (once(noting(notes)), once(noting(notes))),
        (every(steps=1)(once(noting(notes))), when(lambda state: True)(once(noting(notes)))),
        (once(noting(notes), name="a"), once(Notes(), name="a")),
    ]:
        with pytest.raises(
            ValueError,
            match=r"two hooks would be remembered as 'once:.*: once\(hook, name=\.\.\.\)",
        ):
            fl.fit(step, state, [ONE] * 3, hooks=hooks)
    assert (state.model.w.item(), notes.steps) == (0.0, [])  # before the first update
    fl.fit(
        step, state, [ONE] * 3, hooks=(once(noting(notes), name="a"), once(noting(notes), name="b"))
    )
    assert notes.steps == [1, 1]


class Plain:
    """A hook whose repr is an address."""

    def __call__(self, state):
        return state


@pytest.mark.parametrize(
    "hook", [functools.partial(fl.snapshot), Plain()], ids=["a partial", "an object"]
)
def test_a_hook_that_cannot_be_identified_needs_a_name(hook):
    with pytest.raises(
        TypeError,
        match=r"cannot be identified in another process: give it a name, once\(hook, name=\.\.\.\)",
    ):
        once(hook)
    assert once(hook, name="mine").slot == "once:mine"


@pytest.mark.parametrize(("trigger", "text"), [
    (every(steps=2), r"every\(steps=2\)\(once\(notes\)\)"),
    (when(len), r"when\(len\)\(once\(notes\)\)"),
])  # fmt: skip
def test_once_around_a_trigger_is_refused_with_the_right_order(trigger, text):
    with pytest.raises(TypeError, match=rf"once counts each call, due or not: write {text}"):
        once(trigger(Notes()))


@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.on_main])
def test_once_around_inspect_would_be_called_before_the_first_evaluation(wrap):
    with pytest.raises(ValueError, match=r"write every\(epochs=1\)\(once\(inspect\(print\)\)\)"):
        hooks = (wrap(once(fl.inspect(print))),)
        fl.fit(fl.pipeline()(toy_loss), toy(), ([ONE], [ONE]), hooks=hooks)


def test_once_passes_the_beginning_of_a_run_on():
    hook = Notes()
    hook.begin = lambda state: hook.steps.append(f"a run of {state.run.total_steps}") or state
    fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 3, hooks=(every(steps=2)(once(hook)),))
    assert hook.steps == ["a run of 3", 2]


def test_a_hook_in_once_that_returns_nothing_is_an_error():
    with pytest.raises(
        TypeError, match=r"once\(<lambda>\) returned None\. Did you forget 'return state'\?"
    ):
        fl.fit(fl.pipeline()(toy_loss), toy(), [ONE], hooks=(once(lambda state: None),))
