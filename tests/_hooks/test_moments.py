"""Moments: ``at_start``, ``at_end``, how moments compose, and each loader at its own."""

import attrs
import pytest
from sample_hooks import Notes, raise_at, stop_at
from toy_runs import ONE, called_at, fit

import fnloop as fl
from fnloop import at_end, at_start, every, when
from fnloop.testing import toy, toy_loss

is_odd = when(lambda state: state.step % 2 == 1)


class Third:
    """A trigger of the user's. What it returns is true or false, and no bool."""

    def due(self, state):
        return "third" if state.step == 3 else ""

    def __repr__(self):
        return "Third()"


@pytest.mark.parametrize(("moment", "steps"), [
    (every(steps=2) | every(steps=3), [2, 3, 4, 6, 8, 9]), (every(steps=2) & every(epochs=1), [6]),
    (~every(steps=2), [1, 3, 5, 7, 9]), (~every(steps=2) & ~every(epochs=1), [1, 5, 7]),
    (is_odd & every(epochs=1), [3, 9]), (at_start(), [0]), (at_end(), [9]),
    (at_start() | at_end() | every(steps=4), [0, 4, 8, 9]), (every(epochs=2) | at_end(), [6, 9]),
    (~at_start(), [1, 2, 3, 4, 5, 6, 7, 8, 9]), (~at_end(), [1, 2, 3, 4, 5, 6, 7, 8]),
    (at_start() & is_odd, []), (at_end() & every(steps=3), [9]), (at_end() & every(steps=2), []),
    (every(steps=4) | Third(), [3, 4, 8]), (Third() | every(steps=4), [3, 4, 8]),
], ids=repr)  # fmt: skip
def test_due(moment, steps):
    assert called_at(moment, train=3, epochs=3) == steps


MOMENT = every(epochs=1) | at_end()
WHOLE = r"Give the hook to all of them"


@pytest.mark.parametrize(("make", "said"), [
    # what it composes with
    (lambda: "epoch" | every(steps=1), "combines moments such as .*; got"),
    (lambda: (lambda state: True) & every(steps=1), "For a function of the state write when"),
    (lambda: every(steps=1) | at_end()(print), WHOLE + r": \(\.\.\. . \.\.\.\)\(print"),
    (lambda: every(steps=1) & at_end()(print), WHOLE + r": \(\.\.\. . \.\.\.\)\(print"),
    (lambda: every(steps=1)(print) | at_end(), WHOLE),
    (lambda: every(steps=1)(print) & at_end(), WHOLE),
    (lambda: every(epochs=1) and at_end(), r"combine moments by \|, & and ~"),
    (lambda: every(epochs=1) or at_end(), r"combine moments by \|, & and ~"),
    (lambda: not at_end(), r"combine moments by \|, & and ~"),
    # a moment in the place of a hook, and around the wrong one
    (lambda: at_end()(every(epochs=1)), r"every\(epochs=1\) says only when: write every\("),
    (lambda: fl.once(MOMENT), r"once .* write \(every\(epochs=1\) \| at_end\(\)\)\(hook\)"),
    (lambda: fl.on_main(~at_end()), r"on_main .* write \(~at_end\(\)\)\(hook\) in its place"),
    (lambda: fit(MOMENT), r"write \(every\(.*\)\)\(hook\)$"),
    (lambda: fl.once(MOMENT(print)), r"write \(every\(.* at_end\(\)\)\(once\(print\)\)$"),
    (lambda: fl.inspect(print, every=fl.when_improved("valid/loss") | at_end()),
        r"Write \(when_improved\('valid/loss'\) \| at_end\(\)\)\(inspect\(print\)\)$"),
    (lambda: fl.inspect(print, every=fl.when_improved("valid/loss")),
        r"Write when_improved\('valid/loss'\)\(inspect\(print\)\)"),
    # what is given without a name
    (lambda: every(2), r"of epochs=, steps=, items=, seconds=; got 2: write every\(epochs=2\)"),
    (lambda: every(print), r"seconds=; got print: write every\(epochs=1\)\(print\)"),
    (lambda: at_end(print), r"at_end expects no argument; got print: write at_end\(\)\(print\)"),
    (lambda: at_start(3), r"at_start expects no argument; got 3: write at_start\(\)"),
])  # fmt: skip
def test_what_a_message_says_can_be_typed(make, said):
    with pytest.raises(TypeError, match=said):
        make()


def test_each_use_has_its_own_clock_and_a_subclass_may_take_what_it_likes():
    either, rest = every(seconds=2) | every(seconds=3), ~every(seconds=2)
    assert either(print).trigger.parts[0] is not either(print).trigger.parts[0]
    assert rest(print).trigger.parts[0] is not rest(print).trigger.parts[0]

    class often(every):
        def __init__(self, steps):
            super().__init__(steps=steps)

    assert often(2).steps == 2


# --- the start


def test_the_start_is_before_the_first_update_of_a_new_state_only():
    notes = Notes()
    began = at_start()(lambda state: attrs.evolve(state, extra={"began": state.step}))
    state = fit(began, notes, steps=2)
    assert state.extra == {"began": 0}  # what it returns is trained
    assert notes.steps == [1, 2]  # other hooks are not called there
    assert called_at(at_start(), state=state, epochs=1) == []


@pytest.mark.parametrize(("moment", "closing"), [
    (at_start() | every(epochs=1), False), (at_start() | at_end(), False), (every(epochs=1), True),
], ids=repr)  # fmt: skip
def test_a_run_that_stops_at_the_start_evaluates_once(moment, closing):
    stop = at_start()(lambda state: attrs.evolve(state, stop="enough"))
    state = fit(stop, state=toy(w=5.0), valid=1, evaluate_every=moment)
    assert (state.step, state.stop, state.events) == (0, "enough", {"record", "end"})
    found = [(r.step, r.closing, dict(r.metrics)) for r in state.history]
    assert found == [(0, closing, {"valid/loss": 5.0})]
    assert called_at(at_start(), state=attrs.evolve(state, stop=None)) == []  # it has begun before


def test_a_run_whose_updates_were_all_skipped_is_not_new():
    state = fit(step=fl.pipeline()(lambda model, batch: fl.skip("no")))
    assert (state.step, state.skipped) == (0, 4)
    assert called_at(at_start(), state=attrs.evolve(state, history=fl.History()), epochs=2) == []


def test_an_error_of_the_first_batch_is_one_of_the_loader():
    def broken():
        raise ArithmeticError("no data")
        yield

    with pytest.raises(ArithmeticError) as caught:
        fit(at_start()(lambda state: state), loaders=broken)
    assert "while in the training loader" in caught.value.__notes__[0]


def test_an_evaluation_at_the_start_is_a_record_at_step_0_which_all_hooks_see():
    seen = []
    better = fl.when_improved("valid/loss")(lambda state: seen.append(state.step) or state)
    look = lambda state: seen.append(sorted(state.events)) or state
    moment, loaders = at_start() | every(epochs=1), {"train": [-ONE] * 2, "valid": [ONE]}
    first, last = fit(
        better, look, state=toy(w=5.0), loaders=loaders, evaluate_every=moment
    ).history
    assert seen == [0, ["record", "start"], ["update"], ["end", "epoch", "record", "update"]]
    assert (first.step, first.epoch, dict(first.metrics)) == (0, 0, {"valid/loss": 5.0})
    assert (last.step, last.metrics["valid/loss"]) == (2, 7.0)


# --- the end


TWO, THREE = stop_at(2), stop_at(3)


@pytest.mark.parametrize(("moment", "end", "steps"), [
    # at the target
    (at_end(), {"steps": 4}, [4]), (at_end(), {"epochs": 2, "steps": 4}, [4]),
    (at_end(), {"steps": 6}, [6]),
    # where a hook stops: within an epoch, and at its end
    (at_end(), TWO, [2]), (at_end(), THREE, [3]), (~~at_end(), TWO, [2]),
    (at_end() & every(epochs=1), TWO, []), (at_end() & every(epochs=1), THREE, [3]),
    (at_end() & ~every(epochs=1), TWO, [2]), (at_end() & ~every(epochs=1), THREE, []),
    (at_end() & when(lambda state: True), TWO, [2]),
    # a hook that ran at the last update does not run again
    (every(steps=1) | at_end(), TWO, [1, 2]),
    (every(steps=2) | at_end(), THREE, [2, 3]),
    (at_end(), raise_at(2, KeyboardInterrupt), []),  # an interruption is not the end
])  # fmt: skip
def test_the_end(moment, end, steps):
    hooks, targets = ((), end) if isinstance(end, dict) else ((end,), {"epochs": 5})
    assert called_at(moment, *hooks, train=3, **targets) == steps


def test_the_end_is_that_of_a_hook_listed_before_too_and_of_each_run():
    seen = []
    note = at_end()(lambda state: seen.append((state.step, state.stop)) or state)
    for _ in range(2):
        state = fit(stop_at(3), note, train=3, epochs=2)
    assert seen == [(3, "enough")] * 2 and ~~at_end() == at_end()
    assert state.events == {"update", "record", "end", "epoch"}
    assert fit(stop_at(2), train=3).events == {"update", "record", "end"}


@pytest.mark.parametrize("targets", [{"steps": 3}, {"epochs": 9}], ids=["at", "before"])
def test_a_moment_is_asked_once_where_a_hook_stops(targets):
    asked = {"evaluation": [], "hook": []}

    def asking(name):
        return when(lambda state: asked[name].append(state.step) or True)

    hook = (at_end() & asking("hook"))(lambda state: state)
    fit(hook, stop_at(3), valid=1, evaluate_every=asking("evaluation"), **targets)
    assert asked == {"evaluation": [1, 2, 3], "hook": [3]}


def test_only_what_was_not_evaluated_is_evaluated_at_the_end():
    passes = []

    def loader(name):
        return lambda: passes.append(name) or iter([ONE])

    loaders = {"train": [ONE] * 3, "valid": loader("valid"), "test": loader("test")}
    moments = {"valid": every(epochs=1), "test": at_end()}
    fit(stop_at(3), loaders=loaders, epochs=5, evaluate_every=moments)
    assert passes == ["valid", "test"]


@pytest.mark.parametrize(("moment", "hooks", "records"), [
    (every(epochs=2) | at_end(), (stop_at(3),), [(3, False, False), (3, True, True)]),
    # the last evaluation is made only because the run ends
    (every(epochs=2) | at_end(), (),
        [(3, False, False), (6, True, False), (9, False, False), (9, True, True)]),
    (every(epochs=1) | at_end(), (stop_at(3),), [(3, True, False)]),  # none is repeated
])  # fmt: skip
def test_evaluations_at_the_end(moment, hooks, records):
    history = fit(*hooks, train=3, valid=1, epochs=3, evaluate_every=moment).history
    assert [(r.step, "valid/loss" in r.metrics, r.closing) for r in history] == records


# --- each loader at its own moments


def test_loaders_at_their_own_moments():
    loaders = {"train": [ONE] * 3, "valid": [ONE], "test": [ONE], "big": [ONE]}
    moments = {"valid": every(epochs=1), "test": every(epochs=2) | at_start(), "big": None}
    state = fit(loaders=loaders, epochs=3, evaluate_every=moments)
    found = [(r.step, [k for k in r.metrics if not k.startswith("train")]) for r in state.history]
    assert found == [
        *((0, ["test/loss"]), (3, ["valid/loss"])),
        *((6, ["valid/loss", "test/loss"]), (9, ["valid/loss"])),
    ]


@pytest.mark.parametrize(("moments", "message"), [
    ({"valid": every(epochs=1)}, "without the loader 'test': add its moment, or None"),
    ({"valid": None, "test": None, "tset": None}, "'tset', which is not a loader to evaluate"),
])  # fmt: skip
def test_a_mapping_has_a_moment_for_each_loader(moments, message):
    loaders = {"train": [ONE], "valid": [ONE], "test": [ONE]}
    with pytest.raises((TypeError, ValueError), match=message):
        fit(loaders=loaders, evaluate_every=moments)


def test_hooks_follow_an_evaluation():
    seen = []

    class Watch(Notes):
        def evaluating(self, state, loader, done, total):
            seen.append((loader, done, total))

    loaders = {"train": [ONE], "valid": [ONE] * 2, "test": lambda: iter([ONE])}
    fit(every(steps=9)(Watch()), loaders=loaders)
    assert seen == [
        *(("valid", 0, 2), ("valid", 1, 2), ("valid", 2, 2)),
        *(("test", 0, None), ("test", 1, None)),
    ]


@pytest.mark.parametrize("argument", ["evaluate_every", "record_every"])
@pytest.mark.parametrize("moment", [
    fl.when_improved("valid/loss"), ~fl.when_improved("a/loss"),
    every(epochs=100) & fl.when_improved("val/loss"),
])  # fmt: skip
def test_what_makes_records_does_not_depend_on_them(argument, moment):
    with pytest.raises(TypeError, match=f"{argument} as a moment that does not depend on records"):
        fit(valid=1, **{argument: moment})


@pytest.mark.parametrize("moment", [
    every(epochs=0.5), at_end() | every(epochs=0.5), every(epochs=0.5) & at_end(),
    ~every(epochs=0.5),
], ids=repr)  # fmt: skip
def test_every_part_is_checked_when_a_run_begins(moment):
    stream = lambda: iter([ONE])
    with pytest.raises(ValueError, match="the training loader has no length"):
        fit(moment(print), loaders=stream)
    with pytest.raises(ValueError, match="the training loader has no length"):
        fit(loaders=(stream, [ONE]), evaluate_every=moment)


# --- clocks: the time is the number of updates


@pytest.fixture
def ticks(clock):
    return fl.pipeline()(clock.timed(toy_loss, train=1.0))


@pytest.mark.parametrize(("moment", "steps"), [
    (every(seconds=2), [3, 5, 7, 9, 11]),  # the clock is started at the first boundary
    (every(steps=3) | every(seconds=2), [3, 5, 6, 7, 9, 11, 12]),  # it runs on at 3, 9
    (every(seconds=2) & every(epochs=1), [6, 9, 12]),  # it is first asked at 3
    ((every(seconds=2) | Third()) & every(epochs=1), [3, 6, 9, 12]),
    ((every(seconds=5) | Third()) & every(epochs=1), [3, 9]),  # it is started at 3
    (~every(seconds=5) & every(epochs=1), [3, 6, 12]),  # it is started at 3, and due at 9
], ids=repr)  # fmt: skip
def test_clocks_in_combinations(ticks, moment, steps):
    assert called_at(moment, step=ticks, train=3, epochs=4) == steps


def test_a_clock_of_records_runs_on_at_an_evaluation(ticks):
    moments = {"evaluate_every": every(steps=3), "record_every": every(seconds=2)}
    state = fit(step=ticks, train=9, valid=1, **moments)
    assert [record.step for record in state.history] == [3, 5, 6, 7, 9]


def test_a_moment_and_its_complement_are_due_at_different_updates(ticks):
    """Also those with a clock, which both start at the same boundary."""
    due, rest, moment = Notes(), Notes(), every(seconds=2)
    evaluations = at_start() | every(epochs=1)
    fit(moment(due), (~moment)(rest), step=ticks, train=6, valid=1, evaluate_every=evaluations)
    assert (due.steps, rest.steps) == ([2, 4, 6], [1, 3, 5])
