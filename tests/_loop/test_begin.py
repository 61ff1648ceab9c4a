"""The method ``begin`` of a hook: when it is called, and what a run starts with."""

import pickle

import attrs
import pytest
from loop_cases import ONE, fit

import fnloop as fl
from fnloop._hooks.hook import BuiltIn
from fnloop.testing import toy, toy_loss


class Hook:
    def __init__(self, begin=lambda state: state):
        self.change, self.calls = begin, []

    def begin(self, state):
        self.calls.append(("begin", state.step, state.run.total_steps))
        return self.change(state)

    def __call__(self, state):
        self.calls.append(state.step)
        return state

    def __repr__(self):
        return "hook"


class InLibrary(Hook, BuiltIn):
    pass


WRAPS = {
    "bare": (lambda hook: hook, [1, 2, 3]), "every": (fl.every(steps=2), [2]),
    "when": (fl.when(lambda state: state.step == 3), [3]),
    "compound": (fl.at_start() | fl.every(steps=3), [0, 3]),
    "when_improved": (fl.when_improved("train/loss"), [3]), "once": (fl.once, [1]),
    "on_main": (fl.on_main, [1, 2, 3]),
    "nested": (lambda hook: fl.every(steps=2)(fl.once(fl.on_main(hook))), [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPS)
def test_it_is_called_before_the_first_update_through_every_wrapper(name):
    wrap, steps = WRAPS[name]
    observes = name in ("on_main", "nested")
    change = lambda state: attrs.evolve(state, slots={"mine": [1]}, extra={"a": 2})
    hook = Hook() if observes else Hook(change)
    after = Hook(lambda state: attrs.evolve(state, extra={**state.extra, "b": 3}))
    state = fit(hooks=(wrap(hook), after))
    assert hook.calls == [("begin", 0, 3), *steps]
    # what it returns is what the next hook begins with, and training starts with
    found = (None, {"b": 3}) if observes else ([1], {"a": 2, "b": 3})
    assert (state.slots.get("mine"), state.extra) == found


def test_it_is_called_in_every_run_that_has_something_to_do():
    hook, once = Hook(), Hook()
    state = fit(hooks=(hook, fl.once(once)))
    state = fit(state, hooks=(hook, fl.once(once)), epochs=2)
    assert fit(state, hooks=(hook,), epochs=2) is state
    begun = [call for call in hook.calls if isinstance(call, tuple)]
    assert begun == [("begin", 0, 3), ("begin", 3, 6)]
    assert once.calls == [("begin", 0, 3), 1]  # it has had its one call


def test_a_changed_slot_is_the_one_of_the_first_update():
    count = lambda step: lambda state, x: (state.slots["calls"].append(1), step(state, x))[1]
    calls = fl.Middleware("calls", step=count, init=lambda state: [])
    hook = Hook(lambda state: attrs.evolve(state, slots={"calls": [9]}))
    state = fl.fit(fl.pipeline(calls)(toy_loss), toy(), [ONE] * 2, hooks=(hook,))
    assert state.slots["calls"] == [9, 1, 1]


def test_a_snapshot_may_be_the_start():
    kept = fl.snapshot(toy(w=5.0))
    state = fit(hooks=(Hook(lambda state: kept), fl.once(Hook())))
    assert (state.model.w.item(), state.model) == (2.0, kept.model)
    halving = fl.pipeline(fl.schedule(lambda i, total: i / total))(toy_loss)
    hooks = (Hook(lambda state: fl.snapshot(state)),)
    assert fl.fit(halving, toy(lr=3.0), [ONE] * 3, hooks=hooks).model.w.item() == -3.0


@pytest.mark.parametrize("steps", [0, 2, 3], ids=["new", "within an epoch", "at its end"])
def test_it_may_stop_the_run_before_its_first_update_which_is_an_end(steps):
    first, hook, ends = fit(steps=steps), Hook(lambda s: attrs.evolve(s, stop="not now")), []
    note = fl.at_end()(lambda state: (ends.append(state.step), state)[1])
    state = fit(first, epochs=2, hooks=(hook, note))
    assert (state.step, state.stop, ends) == (steps, "not now", [steps])
    assert state.model.w.item() == -steps and "end" in state.events


def test_another_position_is_refused(tmp_path):
    path = fl.save(fit(hooks=()), tmp_path / "a")
    message = "method begin of hook changed state.step from 0 to 3.*planned already: restore before"
    with pytest.raises(ValueError, match=message):
        fit(hooks=(Hook(lambda state: fl.restore(path, state)),), epochs=3)
    load = Hook(lambda state: fl.restore(path, state, only=("model",)))
    assert fit(hooks=(load,)).model.w.item() == -6.0  # the weights alone may be restored


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda s: None, TypeError, r"begin of every\(steps=2\)\(hook\) returned None\. Did you"),
    (lambda s: (s, 1), TypeError, r"the method begin of .* returned \(TrainState\("),
    (lambda s: fl.pipeline()(toy_loss)(s, ONE) and s, fl.StaleStateError, "been advanced"),
    (lambda s: 1 / 0, ZeroDivisionError, "division by zero"),
])  # fmt: skip
def test_a_wrong_return_and_an_exception_name_the_hook(change, error, message):
    with pytest.raises(error, match=message) as raised:
        fit(hooks=(fl.every(steps=2)(Hook(change)),))
    assert raised.value.__notes__ == ["while in every(steps=2)(hook), before the first update"]


@pytest.mark.parametrize("method", ["flush", "settle"])
def test_other_methods_are_named_too(method):
    hook, state = InLibrary(), fit() if method == "settle" else toy()
    setattr(hook, method, lambda state: None)
    with pytest.raises(TypeError, match=f"but the method {method} of hook returned None"):
        fit(state, hooks=(hook,), epochs=1)


METHODS = ("begin", "poll", "flush", "settle")


def test_on_main_may_only_observe_and_calls_no_method_elsewhere():
    hook, calls = InLibrary(lambda state: attrs.evolve(state, extra={"a": 1})), []
    with pytest.raises(ValueError, match=r"on_main\(hook\) must return the state that it is given"):
        fit(hooks=(fl.on_main(hook),))
    for name in METHODS:
        setattr(hook, name, lambda state, name=name: calls.append(name) or state)
    hook.evaluating = lambda state, *progress: calls.append(progress)
    here, backend = toy(), attrs.evolve(toy().backend, rank=1, world_size=2)
    for state in (attrs.evolve(toy(), backend=backend), here):
        assert calls == []
        for name in METHODS:
            assert getattr(fl.on_main(hook), name)(state) is state
        fl.on_main(hook).evaluating(state, "valid", 0, 1)
    assert calls == [*METHODS, ("valid", 0, 1)]


@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.every(steps=2)])
@pytest.mark.parametrize("begin", [3, lambda: None, lambda state, run: state])
def test_a_method_of_another_form_is_refused_when_composing(wrap, begin):
    hook = Hook()
    hook.begin = begin
    with pytest.raises(TypeError, match=r"hook expects begin as a method \(state\) -> state; "):
        fl.run(fl.pipeline()(toy_loss), toy(), [ONE], hooks=(wrap(hook),))


class OnlyBegins:
    begin = Hook.begin


class OnlyFlushes(fl.Hook):
    def flush(self, state):
        return state


@pytest.mark.parametrize(("make", "message"), [
    (OnlyBegins, r"a method begin, but no method __call__\(state\)"),
    (OnlyFlushes, "OnlyFlushes is a Hook without a method __call__"),
    (lambda: fl.every(epochs=1)(OnlyFlushes()), "OnlyFlushes is a Hook without a method __call__"),
])  # fmt: skip
def test_a_hook_has_to_be_called_too(make, message):
    state = toy()
    with pytest.raises(TypeError, match=message):
        fit(state, hooks=(make(),))
    assert state.model.w.item() == 0.0


def test_facts_about_a_run_are_plain_values_and_what_moves_is_apart():
    """So they can be compared, and sent to another process."""
    seen = []
    fit(hooks=[lambda state: (seen.append(state.run), state)[1]])
    first, *_, last = seen
    facts = attrs.asdict(first, recurse=False, filter=attrs.filters.exclude("live"))
    assert pickle.loads(pickle.dumps(facts)) == facts
    assert first == last and first.live is last.live
    assert first == attrs.evolve(first, live=fl.RunInfo().live)  # which has other clocks
