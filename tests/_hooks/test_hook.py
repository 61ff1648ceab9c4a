"""A hook of a user's own: the members that it may define, and when a run calls them."""

import inspect

import attrs
import pytest
from toy_runs import ONE, fit

import fnloop as fl
from fnloop._extensions.tools import dry_run
from fnloop.extend import BuiltIn, Wrapper
from fnloop.testing import toy

VALUES = ["monitors", "reports", "makes_records", "moments", "brings", "slot", "untried"]
METHODS = ["begin", "evaluating", "collects", "receive", "numbers", "flush", "failed", "close"]


class Mine(fl.Hook):
    def __call__(self, state):
        return state


def test_a_user_finds_these_members_and_no_others():
    assert [name for name in vars(fl.Hook) if name[0] != "_"] == [*VALUES, *METHODS, "new_records"]


# --- members that are there no more

GONE = {
    "wants_outputs": (True, "leave it out, because a hook that defines receive is asked"),
    "adds_numbers": (lambda *given: True, r"return \{\} from numbers\(state\)"),
    "outside": (frozenset({"end"}), r"moments = \(fl.at_start\(\), fl.at_end\(\)\)"),
    "poll": (lambda state: state, r"with moments = \(moment,\)"),
    "settle": (lambda state: state, "call it with the state that fit returns"),
    "take_back": (lambda state: state, r"attrs.evolve\(state, stop=None\)"),
    "check_beside": (lambda hooks: None, "the hooks where you list them"),
    "begins_everywhere": (True, "look at state.backend.main in it"),
    "ends_run_on_usr1": (True, r"list requeue\(\)"),
}


@pytest.mark.parametrize("name", GONE)
@pytest.mark.parametrize("base", [fl.Hook, object])
@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.every(steps=1), fl.on_main])
def test_a_member_that_is_gone_is_refused_when_composing(name, base, wrap):
    member, instead = GONE[name]
    hook = type("Mine", (base,), {"__call__": lambda self, state: state, name: member})()
    state = toy()
    with pytest.raises(TypeError, match=rf"Mine.* defines {name}, which is not .*: .*{instead}"):
        fit(wrap(hook), state=state, train=1)
    assert state.step == 0


def test_hooks_of_the_library_have_them():
    # What they do not define.
    asked = {"among", "check_metrics", "note", "has_noted", "is_amid", "parts_saved", "place_in"}
    found = {name for name in vars(BuiltIn) if name[0] != "_"} - {
        *("saves", "tried", "ranks", "is_of_one_run"),
        *asked,
    }
    assert found == GONE.keys() - {"wants_outputs", "adds_numbers", "outside", "begins_everywhere"}


# A run calls these of the hook inside too.
OF_EACH_LAYER = {"close", "failed", "new_records", "numbers"}


# Of these a hook that wraps another one says once what is around each call.
BY_AROUND = {
    name for name, member in vars(Wrapper).items()
    if inspect.isfunction(member) and "around" in member.__code__.co_names
}  # fmt: skip


@pytest.mark.parametrize(("wrapper", "inherited"), [
    (Wrapper, set()), (dry_run.Tried, BY_AROUND), (fl.on_main, {"flush"}),
])  # fmt: skip
def test_what_wraps_a_hook_passes_each_member_on(wrapper, inherited):
    members = {n for n, value in vars(fl.Hook).items() if n[0] != "_" and inspect.isfunction(value)}
    assert members - OF_EACH_LAYER - inherited <= {*vars(wrapper)}


# --- when they are called


@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.every(steps=3), fl.on_main])
def test_one_that_defines_receive_is_given_the_outputs_of_each_evaluation(wrap):
    seen = []

    class Receives(Mine):
        def receive(self, state, outputs):
            seen.append((state.step, [out.loss.item() for out in outputs]))

    fit(wrap(Receives()), train=3, valid=2, epochs=2)
    assert seen == [(3, [-3.0, -3.0]), (6, [-6.0, -6.0])]


def test_collects_chooses_among_evaluations():
    seen = []

    class Receives(Mine):
        def collects(self, state, loader):
            return loader == "test" and state.step == 6

        def receive(self, state, outputs):
            seen.append((state.step, len(outputs)))

    fit(Receives(), loaders={"train": [ONE] * 3, "valid": [ONE], "test": [ONE] * 2}, epochs=3)
    assert seen == [(6, 2)]


@pytest.mark.parametrize(("members", "steps"), [
    ({}, [2, 3, 4, 6]), ({"makes_records": {"mine": fl.every(steps=6)}}, [6]),
    ({"receive": lambda self, state, outputs: None}, [3, 6]),
])  # fmt: skip
def test_numbers_is_called_where_a_record_may_have_some(members, steps):
    """Two epochs of three updates, a record every second update, and one for each epoch."""
    seen = []

    def numbers(self, state):
        seen.append(state.history[-1].step)
        return {"mine/step": state.step}

    hook = type("Adds", (Mine,), {**members, "numbers": numbers})()
    settings = {"epochs": 2, "record_every": fl.every(steps=2)}
    state = fit(hook, train=3, valid=1, **settings)
    assert seen == steps and state.history["mine/step"] == tuple(map(float, steps))
    seen.clear()
    fit(fl.every(steps=1)(type("Adds", (Mine,), {"numbers": numbers})()), train=3, valid=1)
    assert seen == []  # a hook within another one adds none


def test_moments_are_where_a_hook_is_called_without_an_update():
    seen = []

    @attrs.frozen
    class Watches(fl.Hook):
        moments: tuple = ()

        def __call__(self, state):
            seen.append((state.step, *sorted(state.events & {"start", "end"})))
            return state

    stops = fl.when(lambda state: state.step == 2)(lambda s: attrs.evolve(s, stop="enough"))
    fit(Watches(), stops, train=3)
    assert seen == [(1,), (2,)]
    seen.clear()
    fit(Watches((fl.at_start(), fl.at_end())), stops, train=3)
    assert seen == [(0, "start"), (1,), (2,), (2, "end")]
    with pytest.raises(ValueError, match="the training loader has no length"):
        fit(Watches((fl.every(epochs=0.5),)), loaders=lambda: iter([ONE]))
