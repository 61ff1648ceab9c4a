"""Moments: ``at_start``, ``at_end``, and how moments compose."""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import at_end, at_start, every, when
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
STEP = fl.pipeline()(toy_loss)


def calls(moment, state=None, hooks=(), **targets):
    """Return the steps at which a moment is due, in epochs of 3 updates."""
    steps = []

    def note(state):
        steps.append(state.step)
        return state

    state = fl.fit(STEP, state or toy(), [ONE] * 3, **targets, hooks=(moment(note), *hooks))
    return steps


def stop_at(step):
    def stop(state):
        return attrs.evolve(state, stop="enough") if state.step == step else state

    return stop


is_odd = when(lambda state: state.step % 2 == 1)


@pytest.mark.parametrize(("moment", "steps"), [
    (every(steps=2) | every(steps=3), [2, 3, 4, 6, 8, 9]), (every(steps=2) & every(epochs=1), [6]),
    (~every(steps=2), [1, 3, 5, 7, 9]), (~every(steps=2) & ~every(epochs=1), [1, 5, 7]),
    (is_odd & every(epochs=1), [3, 9]), (at_start(), [0]), (at_end(), [9]),
    (at_start() | at_end() | every(steps=4), [0, 4, 8, 9]), (every(epochs=2) | at_end(), [6, 9]),
    (~at_start(), [1, 2, 3, 4, 5, 6, 7, 8, 9]), (~at_end(), [1, 2, 3, 4, 5, 6, 7, 8]),
    (at_start() & is_odd, []), (at_end() & every(steps=3), [9]), (at_end() & every(steps=2), []),
], ids=repr)  # fmt: skip
def test_due(moment, steps):
    assert calls(moment, epochs=3) == steps


def test_names():
    moment = (every(steps=2) | at_end()) & ~(at_start() | every(epochs=1))
    assert repr(moment) == "(every(steps=2) | at_end()) & ~(at_start() | every(epochs=1))"
    assert repr((every(steps=2) | at_end())(print)) == "(every(steps=2) | at_end())(print)"
    assert repr((~every(steps=2))(print)) == "(~every(steps=2))(print)"
    assert repr(every(steps=2)(print)) == "every(steps=2)(print)"


@pytest.mark.parametrize("wrong", [2, "epoch", every, lambda state: True])
def test_only_moments_compose(wrong):
    for combine in (lambda a, b: a | b, lambda a, b: a & b):
        with pytest.raises(TypeError, match="combines moments such as"):
            combine(every(steps=1), wrong)
        if not isinstance(wrong, type):
            hint = "For a function of the state write when" if callable(wrong) else "; got"
            with pytest.raises(TypeError, match=hint):
                combine(wrong, every(steps=1))
            with pytest.raises(TypeError, match="combines moments such as"):
                combine(wrong, every(steps=1))


def test_a_hook_is_given_to_the_whole_combination():
    for combine in (lambda a, b: a | b, lambda a, b: a & b):
        with pytest.raises(
            TypeError, match=r"Give the hook to all of them: \(\.\.\. . \.\.\.\)\(print"
        ):
            combine(every(steps=1), at_end()(print))
        with pytest.raises(TypeError, match=r"Give the hook to all of them"):
            combine(every(steps=1)(print), at_end())


MOMENT = every(epochs=1) | at_end()


@pytest.mark.parametrize(("make", "said"), [
    (lambda: at_end()(every(epochs=1)), r"every\(epochs=1\) says only when: write every\("),
    (lambda: fl.once(MOMENT), r"once .* write \(every\(epochs=1\) \| at_end\(\)\)\(hook\)"),
    (lambda: fl.on_main(~at_end()), r"on_main .* write \(~at_end\(\)\)\(hook\) in its place"),
    (lambda: fl.fit(STEP, toy(), [ONE], hooks=(MOMENT,)), r"write \(every\(.*\)\)\(hook\)$"),
    (lambda: fl.once(MOMENT(print)), r"write \(every\(.* at_end\(\)\)\(once\(print\)\)$"),
    (lambda: fl.inspect(print, every=fl.when_improved("valid/loss") | at_end()),
        r"Write \(when_improved\('valid/loss'\) \| at_end\(\)\)\(inspect\(print\)\)$"),
])  # fmt: skip
def test_what_a_message_says_can_be_typed(make, said):
    with pytest.raises(TypeError, match=said):
        make()


class Third:
    """A trigger of the user's. What it returns is true or false, and no bool."""

    def due(self, state):
        return "third" if state.step == 3 else ""

    def __repr__(self):
        return "Third()"


@pytest.mark.parametrize("given, message", [
    (lambda: every(2), r"of epochs=, steps=, seconds=; got 2: write every\(epochs=2\)"),
    (lambda: every(print), r"seconds=; got print: write every\(epochs=1\)\(print\)"),
    (lambda: at_end(print), r"at_end expects no argument; got print: write at_end\(\)\(print\)"),
    (lambda: at_start(3), r"at_start expects no argument; got 3: write at_start\(\)"),
])  # fmt: skip
def test_what_is_given_without_a_name_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        given()


def test_a_subclass_may_take_what_it_likes():
    class often(every):
        def __init__(self, steps):
            super().__init__(steps=steps)

    assert often(2).steps == 2


def test_a_trigger_of_ones_own_composes():
    assert calls(every(steps=4) | Third(), epochs=2) == [3, 4]
    assert calls(Third() | every(steps=4), epochs=2) == [3, 4]
    assert repr(Third() | every(steps=4)) == "Third() | every(steps=4)"
    assert repr(Third() & every(steps=4)) == "Third() & every(steps=4)"


def test_each_use_has_its_own_clock(monkeypatch):
    monkeypatch.setattr("fnloop._core.runs.time.monotonic", iter(range(100)).__next__)
    moment = every(seconds=2) | every(seconds=3)
    first = moment(lambda state: state)
    second = moment(lambda state: state)
    assert first.trigger.parts[0] is not second.trigger.parts[0]
    moment = ~every(seconds=2)
    assert moment(print).trigger.part is not moment(print).trigger.part


# --- the start


def test_the_start_is_before_the_first_update_of_a_new_state_only(tmp_path):
    assert calls(at_start(), epochs=1) == [0]
    begun = fl.fit(STEP, toy(), [ONE] * 3, steps=1, hooks=())
    assert calls(at_start(), state=begun, epochs=1) == []


def test_an_evaluation_at_the_start_is_a_record_at_step_0():
    loaders = {"train": [2 * ONE], "valid": [ONE]}
    moment = at_start() | every(epochs=1)
    state = fl.fit(STEP, toy(w=5.0), loaders, hooks=(), evaluate_every=moment)
    first, last = state.history
    assert (first.step, first.epoch, dict(first.metrics)) == (0, 0, {"valid/loss": 5.0})
    assert (last.step, last.metrics["valid/loss"]) == (1, 3.0)


def test_an_evaluation_at_the_start_changes_no_draw():
    def loss_fn(model, batch):
        return (model.w * batch * torch.rand(())).mean()

    def fit(moment):
        data = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2, shuffle=True)
        loaders = {"train": data, "valid": data}
        step = fl.pipeline()(loss_fn)
        return fl.fit(step, toy(), loaders, epochs=2, hooks=(), evaluate_every=moment)

    plain, early = fit(every(epochs=1)), fit(at_start() | every(epochs=1))
    assert early.history.records[1:] == plain.history.records
    assert early.model.w.item() == plain.model.w.item()


def test_what_a_hook_at_the_start_returns_is_trained():
    note = at_start()(lambda state: attrs.evolve(state, extra={"began": state.step}))
    assert fl.fit(STEP, toy(), [ONE], hooks=(note,)).extra == {"began": 0}


def test_a_hook_may_stop_the_run_at_the_start():
    state = fl.fit(STEP, toy(), [ONE] * 3, hooks=(at_start()(stop_at(0)),))
    assert (state.step, state.stop) == (0, "enough")


@pytest.mark.parametrize(("moment", "closing"), [
    (at_start() | every(epochs=1), False), (at_start() | at_end(), False), (every(epochs=1), True),
], ids=repr)  # fmt: skip
def test_a_run_that_stops_at_the_start_evaluates_once(moment, closing):
    loaders, steps = {"train": [ONE] * 3, "valid": [ONE]}, []
    hooks = (at_start()(stop_at(0)),)
    state = fl.fit(STEP, toy(w=5.0), loaders, hooks=hooks, evaluate_every=moment)
    found = [(r.step, r.closing, dict(r.metrics)) for r in state.history]
    assert found == [(0, closing, {"valid/loss": 5.0})]
    assert state.events == {"record", "end"}
    note = at_start()(lambda state: steps.append(state.step) or state)
    fl.fit(STEP, attrs.evolve(state, stop=None), loaders, hooks=(note,))
    assert steps == []  # the run has begun before


def test_other_hooks_are_not_called_at_the_start():
    steps = []
    note = lambda state: steps.append(state.step) or state
    fl.fit(STEP, toy(), [ONE] * 2, hooks=(at_start()(lambda state: state), note))
    assert steps == [1, 2]


def test_a_run_whose_updates_were_all_skipped_is_not_new():
    def skip(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="no")

        return skipping

    step = fl.pipeline(fl.Middleware("skip", loss=skip))(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 3, hooks=())
    assert (state.step, state.skipped) == (0, 3)
    bare = attrs.evolve(state, history=fl.History())
    assert calls(at_start(), state=bare, epochs=2) == []


def test_an_error_of_the_first_batch_is_one_of_the_loader():
    def broken():
        raise ArithmeticError("no data")
        yield

    with pytest.raises(ArithmeticError) as caught:
        fl.fit(STEP, toy(), broken, hooks=(at_start()(lambda state: state),))
    assert "while in the training loader" in caught.value.__notes__[0]


# --- the end


@pytest.mark.parametrize("targets", [{"steps": 4}, {"epochs": 2, "steps": 4}, {"steps": 6}])
def test_the_end_is_the_target(targets):
    assert calls(at_end(), **targets) == [targets["steps"]]


@pytest.mark.parametrize("step", [2, 3], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("first", [True, False], ids=["listed first", "listed last"])
def test_the_end_is_where_a_hook_stops(step, first):
    steps = []
    note = at_end()(lambda state: steps.append((state.step, state.stop)) or state)
    hooks = (note, stop_at(step)) if first else (stop_at(step), note)
    fl.fit(STEP, toy(), [ONE] * 3, epochs=5, hooks=hooks)
    assert steps == [(step, "enough")]


def test_not_not_is_the_moment_itself():
    assert ~~at_end() == at_end()
    assert calls(~~at_end(), hooks=(stop_at(2),), epochs=5) == [2]


def test_a_hook_that_ran_at_the_last_update_does_not_run_again():
    moment = every(steps=1) | at_end()
    assert calls(moment, hooks=(stop_at(2),), epochs=5) == [1, 2]
    moment = every(steps=2) | at_end()
    assert calls(moment, hooks=(stop_at(3),), epochs=5) == [2, 3]


def test_a_hook_may_be_in_several_runs():
    steps = []
    note = at_end()(lambda state: steps.append(state.step) or state)
    for _ in range(2):
        fl.fit(STEP, toy(), [ONE] * 3, hooks=(note, stop_at(2)))
    assert steps == [2, 2]


@pytest.mark.parametrize("moment", [every(steps=1), every(steps=1) | at_end()], ids=repr)
def test_what_is_kept_of_the_closing_evaluation_is_seen(moment):
    """Although the hook ran at the last update already."""
    seen, loaders = [], {"train": [ONE] * 3, "valid": [ONE]}
    look = moment(fl.inspect(lambda state, outputs: seen.append((state.step, len(outputs)))))
    settings = {"epochs": 2, "evaluate_every": at_end()}
    fl.fit(STEP, toy(), loaders, hooks=(look, stop_at(3)), **settings)
    assert seen == [(3, 1)]


@pytest.mark.parametrize("step", [2, 3], ids=["within an epoch", "at its end"])
def test_the_events_of_a_run_that_has_ended(step):
    state = fl.fit(STEP, toy(), [ONE] * 3, epochs=2, hooks=(stop_at(step),))
    assert state.events == {"update", "record", "end"} | ({"epoch"} if step == 3 else set())


@pytest.mark.parametrize("targets", [{"steps": 3}, {"epochs": 9}], ids=["at", "before"])
def test_a_moment_is_asked_once_where_a_hook_stops(targets):
    asked = {"evaluation": [], "hook": []}

    def asking(name):
        return when(lambda state: asked[name].append(state.step) or True)

    hook = (at_end() & asking("hook"))(lambda state: state)
    loaders = {"train": [ONE] * 4, "valid": [ONE]}
    settings = {"hooks": (hook, stop_at(3)), "evaluate_every": asking("evaluation"), **targets}
    fl.fit(STEP, toy(), loaders, **settings)
    assert asked == {"evaluation": [1, 2, 3], "hook": [3]}


def test_only_what_was_not_evaluated_is_evaluated_at_the_end():
    passes = []

    def loader(name):
        return lambda: passes.append(name) or iter([ONE])

    loaders = {"train": [ONE] * 3, "valid": loader("valid"), "test": loader("test")}
    moments = {"valid": every(epochs=1), "test": at_end()}
    fl.fit(STEP, toy(), loaders, epochs=5, hooks=(stop_at(3),), evaluate_every=moments)
    assert passes == ["valid", "test"]


def test_an_interruption_is_not_the_end():
    def interrupt(state):
        raise KeyboardInterrupt

    steps = calls(at_end(), hooks=(every(steps=2)(interrupt),), epochs=1)
    assert steps == []


def test_the_last_evaluation_is_made_when_a_hook_stops():
    loaders = {"train": [ONE] * 3, "valid": [ONE]}
    moment = every(epochs=2) | at_end()
    settings = {"epochs": 9, "evaluate_every": moment}
    state = fl.fit(STEP, toy(), loaders, hooks=(stop_at(3),), **settings)
    assert [(r.step, "valid/loss" in r.metrics) for r in state.history] == [(3, False), (3, True)]
    state = fl.fit(STEP, toy(), loaders, epochs=3, hooks=(), evaluate_every=moment)
    assert [(r.step, "valid/loss" in r.metrics, r.closing) for r in state.history] == [
        (3, False, False),
        (6, True, False),
        (9, False, False),
        (9, True, True),  # evaluated only because the run ends
    ]


# --- each loader at its own moments


def test_loaders_at_their_own_moments():
    loaders = {"train": [ONE] * 3, "valid": [ONE], "test": [ONE], "big": [ONE]}
    moments = {"valid": every(epochs=1), "test": every(epochs=2) | at_start(), "big": None}
    state = fl.fit(STEP, toy(), loaders, epochs=3, hooks=(), evaluate_every=moments)
    assert [
        (r.step, [k for k in r.metrics if k[0] != "t" or k[1] == "e"]) for r in state.history
    ] == [
        (0, ["test/loss"]),
        (3, ["valid/loss"]),
        (6, ["valid/loss", "test/loss"]),
        (9, ["valid/loss"]),
    ]


@pytest.mark.parametrize(("moments", "message"), [
    ({"valid": every(epochs=1)}, "without the loader 'test': add its moment, or None"),
    ({"valid": None, "test": None, "tset": None}, "'tset', which is not a loader to evaluate"),
    ({"valid": 3, "test": None}, r"expects evaluate_every\['valid'\] as every"),
])  # fmt: skip
def test_a_mapping_has_a_moment_for_each_loader(moments, message):
    loaders = {"train": [ONE], "valid": [ONE], "test": [ONE]}
    with pytest.raises((TypeError, ValueError), match=message):
        fl.fit(STEP, toy(), loaders, hooks=(), evaluate_every=moments)


def test_hooks_follow_an_evaluation():
    seen = []

    class Watch:
        def __call__(self, state):
            return state

        def evaluating(self, state, loader, done, total):
            seen.append((loader, done, total))

    loaders = {"train": [ONE], "valid": [ONE] * 2, "test": lambda: iter([ONE])}
    fl.fit(STEP, toy(), loaders, hooks=(every(steps=9)(Watch()),))
    assert seen == [
        ("valid", 0, 2),
        ("valid", 1, 2),
        ("valid", 2, 2),
        ("test", 0, None),
        ("test", 1, None),
    ]


# --- what one boundary has to do with another


def test_a_moment_that_is_used_twice_has_two_clocks(monkeypatch):
    """Each second: both loaders are evaluated, although one is asked before the other."""
    seconds = iter(range(100))
    monkeypatch.setattr("fnloop._core.runs.time.monotonic", lambda: next(seconds) / 2)
    moment, loaders = every(seconds=1), {"train": [ONE] * 3, "valid": [ONE], "test": [ONE]}
    settings = {"evaluate_every": {"valid": moment, "test": moment}, "record_every": moment}
    state = fl.fit(STEP, toy(), loaders, hooks=(), **settings)
    assert {"valid/loss", "test/loss"} <= set(state.history.keys())


def test_a_clock_beside_another_moment_runs_until_both_are_due(monkeypatch):
    """Three seconds pass in an epoch, whatever is asked between."""
    now = [0.0]
    monkeypatch.setattr("fnloop._core.runs.time.monotonic", lambda: now[0])
    steps = []

    def tick(state):
        now[0] += 1.0
        return state

    hook = (every(seconds=2) & every(epochs=1))(lambda state: steps.append(state.step) or state)
    fl.fit(STEP, toy(), [ONE] * 3, epochs=4, hooks=(tick, hook))
    assert steps == [6, 9, 12]  # the clock is first asked at the end of the first epoch


# In these the time is the number of updates.


@pytest.fixture
def tick(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fnloop._core.runs.time.monotonic", lambda: now[0])

    def step(step):
        def ticking(state, batch):
            now[0] += 1.0
            return step(state, batch)

        return ticking

    return fl.pipeline(fl.Middleware("tick", step=step))(toy_loss)


def called_at(step, moment, epochs=4):
    steps = []
    hook = moment(lambda state: steps.append(state.step) or state)
    fl.fit(step, toy(), [ONE] * 3, epochs=epochs, hooks=(hook,))
    return steps


@pytest.mark.parametrize(("moment", "steps"), [
    (every(seconds=2), [3, 5, 7, 9, 11]),  # the clock is started at the first boundary
    (every(steps=3) | every(seconds=2), [3, 5, 6, 7, 9, 11, 12]),  # it runs on at 3, 9
    ((every(seconds=2) | Third()) & every(epochs=1), [3, 6, 9, 12]),
    ((every(seconds=5) | Third()) & every(epochs=1), [3, 9]),  # it is started at 3
    (~every(seconds=5) & every(epochs=1), [3, 6, 12]),  # it is started at 3, and due at 9
], ids=repr)  # fmt: skip
def test_clocks_in_combinations(tick, moment, steps):
    assert called_at(tick, moment) == steps


def test_a_clock_of_records_runs_on_at_an_evaluation(tick):
    loaders = {"train": [ONE] * 9, "valid": [ONE]}
    moments = {"evaluate_every": every(steps=3), "record_every": every(seconds=2)}
    state = fl.fit(tick, toy(), loaders, hooks=(), **moments)
    assert [record.step for record in state.history] == [3, 5, 6, 7, 9]


def test_a_moment_and_its_complement_are_due_at_different_updates(tick):
    """Also those with a clock, which both start at the same boundary."""
    due, rest, loaders = [], [], {"train": [ONE] * 6, "valid": [ONE]}
    moment = every(seconds=2)
    hooks = (
        moment(lambda state: due.append(state.step) or state),
        (~moment)(lambda state: rest.append(state.step) or state),
    )
    settings = {"hooks": hooks, "evaluate_every": at_start() | every(epochs=1)}
    fl.fit(tick, toy(), loaders, **settings)
    assert (due, rest) == ([2, 4, 6], [1, 3, 5])


@pytest.mark.parametrize(
    "moment",
    [every(epochs=0.5), at_end() | every(epochs=0.5), every(epochs=0.5) & at_end(),
     ~every(epochs=0.5)],
    ids=repr,
)  # fmt: skip
def test_every_part_is_checked_when_a_run_begins(moment):
    stream = lambda: iter([ONE])
    with pytest.raises(ValueError, match="the training loader has no length"):
        fl.fit(STEP, toy(), stream, hooks=(moment(print),))
    with pytest.raises(ValueError, match="the training loader has no length"):
        fl.fit(STEP, toy(), (stream, [ONE]), hooks=(), evaluate_every=moment)


def test_all_hooks_see_the_record_at_the_start():
    seen = []
    loaders = {"train": [-ONE] * 2, "valid": [ONE]}  # the loss rises
    better = fl.when_improved("valid/loss")(lambda state: seen.append(state.step) or state)
    look = lambda state: seen.append(sorted(state.events)) or state
    moment = at_start() | every(epochs=1)
    fl.fit(STEP, toy(), loaders, hooks=(better, look), evaluate_every=moment)
    assert seen == [0, ["record", "start"], ["update"], ["end", "epoch", "record", "update"]]


@pytest.mark.parametrize("step", [2, 3], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize(("moment", "at"), [
    (at_end() & every(epochs=1), [3]), (at_end() & when(lambda state: True), [2, 3]),
    (at_end() & ~every(epochs=1), [2]),
], ids=repr)  # fmt: skip
def test_the_end_composes_where_a_hook_stops(moment, at, step):
    expected = [step] if step in at else []
    assert calls(moment, hooks=(stop_at(step),), epochs=5) == expected


def test_an_evaluation_is_not_repeated_when_a_hook_stops():
    loaders = {"train": [ONE] * 3, "valid": [ONE]}
    moment = every(epochs=1) | at_end()
    state = fl.fit(STEP, toy(), loaders, epochs=5, hooks=(stop_at(3),), evaluate_every=moment)
    assert [(r.step, r.closing) for r in state.history] == [(3, False)]


@pytest.mark.parametrize("wrong", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a])
def test_a_moment_is_neither_true_nor_false(wrong):
    with pytest.raises(TypeError, match=r"combine moments by \|, & and ~"):
        wrong(every(epochs=1), at_end())


def test_inspect_refuses_a_moment_that_depends_on_the_record():
    with pytest.raises(TypeError, match=r"Write when_improved\('valid/loss'\)\(inspect\(print\)\)"):
        fl.inspect(print, every=fl.when_improved("valid/loss"))


@pytest.mark.parametrize("argument", ["evaluate_every", "record_every"])
@pytest.mark.parametrize("moment", [fl.when_improved("valid/loss"), ~fl.when_improved("a/loss")])
def test_what_makes_records_does_not_depend_on_them(argument, moment):
    with pytest.raises(TypeError, match=f"{argument} as a moment that does not depend on records"):
        fl.fit(STEP, toy(), ([ONE], [ONE]), hooks=(), **{argument: moment})


def test_an_unknown_metric_of_a_complement_is_named():
    hook = (~fl.when_improved("valdi/loss"))(print)
    with pytest.raises(KeyError, match=r"Did you mean 'valid/loss'"):
        fl.fit(STEP, toy(), ([ONE], [ONE]), hooks=(hook,))


def test_a_loader_cannot_be_named_recent():
    with pytest.raises(ValueError, match='cannot be named "recent"'):
        fl.fit(STEP, toy(), {"train": [ONE], "recent": [ONE]}, hooks=())


@pytest.mark.parametrize("name", ["lr", "lr/1", "recent/x", "loss"])
def test_a_metric_cannot_have_a_name_that_every_run_reports(name):
    with pytest.raises(ValueError, match="choose another name"):
        fl.metric(**{name: lambda aux, batch: batch.mean()})
