"""How a run ends, and what it leaves to the run that continues: a table of all ways."""

import itertools

import attrs
import pytest
from loop_cases import ONE, Boom

import fnloop as fl
from fnloop._core.runs import (
    REQUEUED,
    TERMINATED,
    Call,
    Flush,
    Meet,
    Stop,
    Update,
    first_stop,
)
from fnloop._hooks.hook import Hook
from fnloop.testing import assert_same, toy, toy_loss

TRAIN, VALID = [ONE, 2 * ONE, 3 * ONE], [-ONE]  # w falls, so valid/loss rises: never better


# --- every way to end, in mid-epoch and at the end of an epoch, continued in every way


def program(stops=(), evaluated=True):
    """The step of a run whose rate depends on its records; ``stops`` by step, set by a guard."""

    def guard(step):
        def guarded(state, batch):
            state, out = step(state, batch)
            stop = stops.pop(state.step) if state.step in stops else state.stop
            return attrs.evolve(state, stop=stop), out

        return guarded

    rate = (fl.plateau("valid/loss", factor=0.5, patience=2),) if evaluated else ()
    return fl.pipeline(*rate, fl.middleware("step")(lambda: guard)())(toy_loss)


def train(state, seen, *, stops=(), hooks=(), evaluate_every, **targets):
    """Run, and note at which steps the hooks of every boundary and of the end are called."""
    note = lambda name: lambda state: seen.append((name, state.step)) or state
    listed = (*hooks, note("hook"), fl.at_end()(note("end")))
    given = {"hooks": listed, "evaluate_every": evaluate_every, **targets}
    step = program(stops, evaluate_every is not None)
    return fl.fit(step, state, (TRAIN, VALID), **given)


def in_memory(state, folder):
    return state


def from_disk(state, folder):
    fl.save(state, folder / "saved")
    return fl.restore(folder / "saved", toy(lr=1.0))


WAYS = {
    "target": (None, True), "hook": (Stop("enough"), True), "plain": ("enough", True),
    "limit": (Stop("time_limit: the run has taken its 1s", "limit"), True),
    "job": (Stop("time_limit: this job ends in 1s", "job"), False), "signal": (TERMINATED, False),
    "requeued": (REQUEUED, False),
}  # fmt: skip
EVALUATIONS = {
    "each epoch": fl.every(epochs=1), "second epoch, end": fl.every(epochs=2) | fl.at_end(),
    "third step": fl.every(steps=3), "never": None,
}  # fmt: skip


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("at", [5, 6, 9], ids=lambda at: f"step {at}")
@pytest.mark.parametrize(
    ("way", "by"), [("target", ""), *itertools.product(list(WAYS)[1:], ["hook", "guard"])]
)
@pytest.mark.parametrize("continued", [in_memory, from_disk])
def test_a_run_that_continues_equals_one_that_never_ended(
    way, by, at, evaluation, continued, tmp_path
):
    stop, ends = WAYS[way]
    moment = {"evaluate_every": EVALUATIONS[evaluation]}
    once = {at: stop}
    whole_seen, seen = [], []
    whole = train(toy(lr=1.0), whole_seen, epochs=5, **moment)
    if way == "target":
        part = train(toy(lr=1.0), seen, steps=at, **moment)
    elif by == "guard":
        part = train(toy(lr=1.0), seen, epochs=5, stops=once, **moment)
    else:
        halt = lambda s: attrs.evolve(s, stop=once.pop(s.step)) if s.step in once else s
        part = train(toy(lr=1.0), seen, hooks=(halt,), epochs=5, **moment)
    assert (part.step, part.stop, part.todo) == (at, stop, () if ends else (Update(),))
    assert (("end", at) in seen) is ends
    assert any(record.closing for record in part.history) is (
        ends and (at == 5 or (evaluation == "second epoch, end" and at == 9))
    )
    part = attrs.evolve(continued(part, tmp_path), stop=None)
    part = train(part, seen, epochs=5, **moment)
    assert_same(part, whole)
    assert [x for x in seen if x != ("end", at)] == whole_seen


# --- an exception at the last boundary


@pytest.mark.parametrize("steps", [2, 3], ids=["in mid-epoch", "at the end of an epoch"])
@pytest.mark.parametrize("raised", ["a hook", "the last save"])
@pytest.mark.parametrize("continued", [in_memory, from_disk])
def test_the_end_is_made_by_the_run_that_continues_from_an_exception(
    steps, raised, continued, tmp_path
):
    """Its hooks at_end(), its save, and restore_best. Rates of 1, 1 and -5: step 2 is best."""
    rates = fl.schedule(lambda i, total: (1, 1, -5)[i])
    planted, ended = [steps], []

    class Bomb(Hook):
        def explode(self, state):
            if state.step in planted:
                planted.clear()
                raise Boom
            return state

        __call__ = explode if raised == "a hook" else lambda self, state: state
        flush = explode if raised == "the last save" else Hook.flush

    def run(state):
        end = fl.at_end()(lambda state: ended.append(state.step) or state)
        save = fl.every(epochs=5)(fl.checkpoint(tmp_path / "run"))
        hooks = (Bomb(), end, fl.restore_best("valid/loss"), save)
        given = {"steps": steps, "evaluate_every": fl.every(steps=1), "hooks": hooks}
        return fl.fit(fl.pipeline(rates)(toy_loss), state, (TRAIN, [ONE]), **given)

    with pytest.raises(Boom) as caught:
        run(toy(lr=1.0))
    left = caught.value.state
    of_boundary = () if raised == "the last save" else (Call("boundary"), Meet(steps == 3))
    assert left.todo == (*of_boundary, Flush())
    assert ended == ([steps] if raised == "the last save" else [])
    assert not (tmp_path / "run" / f"step-{steps:08d}").exists()
    state = run(continued(left, tmp_path))
    assert ended == [steps] and state.todo == ()
    assert (tmp_path / "run" / f"step-{steps:08d}").exists()
    assert state.model.w.item() == -3.0  # -1 - 2; after step 3 it would be 12
    assert run(state) is state  # nothing is left


def test_an_end_that_was_left_is_void_if_the_target_is_raised():
    seen, bombs = [], [3]
    boom = fl.when(lambda state: state.step in bombs)(lambda state: bombs.clear() or 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        train(toy(), seen, hooks=(boom,), epochs=1, evaluate_every=None)
    assert caught.value.state.todo == (Call("boundary"), Meet(True), Flush())
    state = train(caught.value.state, seen, epochs=2, evaluate_every=None)
    assert [step for name, step in seen if name == "end"] == [6] and state.step == 6


# --- what a boundary shows


def test_all_hooks_of_a_boundary_see_the_same_events():
    """Also where a guard has stopped the run, and the first hook changes the state."""
    seen = []

    def change(state):
        seen.append(state.events)
        return attrs.evolve(state, extra={"changed": True})

    look = lambda state: seen.append(state.events) or state
    for batches in (TRAIN[:2], TRAIN):  # at the end of an epoch, and within one
        step = program({2: Stop("guarded", "guard")})
        fl.fit(step, toy(), {"train": batches, "valid": VALID}, hooks=(change, look))
        assert seen[0] == seen[1] and seen[2] == seen[3] and len(seen) == 4
        seen.clear()


def test_the_first_reason_to_stop_stays():
    step = program({2: Stop("guarded", "guard")})
    later = lambda state: attrs.evolve(state, stop="later") if state.stop else state
    state = fl.fit(step, toy(), {"train": TRAIN, "valid": VALID}, hooks=(later, later))
    assert state.stop == "guarded" and Stop.kind_of(state.stop) == "guard"


def test_no_record_is_made_by_a_moment_that_excludes_the_end():
    given = {"evaluate_every": None, "hooks": (), "record_every": ~fl.at_end()}
    state = fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 9, steps=3, **given)
    assert [(r.step, r.closing) for r in state.history] == [(1, False), (2, False), (3, True)]


# --- stops


@pytest.mark.parametrize(("before", "after", "stays"), [
    (None, "b", "b"), ("a", "b", "a"),
    ("a", None, None),  # a hook may take a stop back
    (TERMINATED, "b", "b"),  # a hook decides once; a run that was interrupted continues
    (Stop("a", "guard"), TERMINATED, "a"),
])  # fmt: skip
def test_which_stop_stays(before, after, stays):
    assert first_stop(before, after) == stays
