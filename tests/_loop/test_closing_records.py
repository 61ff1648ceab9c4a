"""Records of runs that end between two evaluations."""

import attrs
import pytest
from loop_cases import ONE, Boom, failing_once, fit
from sample_hooks import stop_at

import fnloop as fl
from fnloop.testing import toy, toy_loss


def ends(history):
    """The position of each record, its losses of both loaders, and whether it is a closing one."""
    return [
        (r.step, r.metrics.get("train/loss"), r.metrics.get("valid/loss"), r.closing)
        for r in history
    ]


@pytest.mark.parametrize(("settings", "records"), [
    # w is 0, -1, -2, ... before each update, and so is the training loss: its mean over n
    # updates is -(n - 1) / 2
    ({"steps": 2}, [(2, -0.5, -2.0, True)]),
    ({"steps": 3}, [(3, -1.0, -3.0, False)]),  # an epoch's end has its record anyway
    ({"steps": 5}, [(3, -1.0, -3.0, False), (5, -3.5, -5.0, True)]),
    ({"steps": 2, "evaluate_every": None}, [(2, -0.5, None, True)]),
    ({"steps": 2, "evaluate_every": fl.every(steps=2)}, [(2, -0.5, -2.0, False)]),
    *(({**target, "evaluate_every": fl.every(epochs=2)}, [(3, -1.0, None, False)])
      for target in ({"epochs": 1}, {"steps": 3})),
], ids=repr)  # fmt: skip
def test_a_run_that_ends_between_two_records_appends_a_closing_one(settings, records):
    loaders = [ONE] * 3, [ONE]
    state = fit(loaders=loaders, **settings)
    assert ends(state.history) == records and fit(state, loaders, **settings) is state


@pytest.mark.parametrize("record_every", [None, fl.every(steps=1), fl.every(steps=2)])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_run_that_a_hook_stops_appends_a_closing_record(at, record_every):
    given = {"loaders": ([ONE] * 3, [ONE]), "epochs": 2, "record_every": record_every}
    state = fit(**given, hooks=(stop_at(at),))
    assert ends(state.history)[-1] == (at, -(at - 1) / 2 if at < 4 else -3.0, -at, at != 3)
    assert (state.step, state.stop, "record" in state.events) == (at, "enough", True)
    resumed = fit(attrs.evolve(state, stop=None), **given)
    assert [r for r in resumed.history if not r.closing] == [*fit(**given).history]


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_that_stops_after_a_skipped_update_has_its_closing_record(evaluated):
    """Without an evaluation the record that is due after it is empty, and is not that one."""
    due = fl.when(lambda state: state.skipped == 1)
    stop = due(lambda state: attrs.evolve(state, stop="enough"))
    step = fl.pipeline()(lambda m, batch: fl.skip("no") if m.training else toy_loss(m, batch))
    loaders = {"train": [ONE] * 3, **({"valid": [ONE]} if evaluated else {})}
    for record_every in (fl.when(lambda state: True), None):
        given = {"record_every": record_every, **({} if evaluated else {"evaluate_every": due})}
        state = fl.fit(step, toy(), loaders, hooks=(stop,), **given)
        records = [({"valid/loss": 0.0}, True)] if evaluated else [({}, False), ({}, True)]
        assert [(dict(r.metrics), r.closing) for r in state.history] == records


def test_a_stop_that_a_later_hook_takes_back_owes_nothing():
    back = lambda state: attrs.evolve(state, stop=None)
    state = fit(loaders=([ONE] * 3, [ONE]), hooks=(stop_at(3), back))
    assert (state.stop, state.events) == (None, {"update", "epoch", "record", "end"})
    assert ends(state.history) == [(3, -1.0, -3.0, False)]


@pytest.mark.parametrize("stops", [False, True], ids=["target", "stop"])
def test_hooks_see_the_closing_record_at_the_target_and_flush_sees_that_of_a_stop(stops):
    class Sees:
        seen, flushed = [], []

        def __call__(self, state):
            self.seen.append(("record" in state.events, len(state.history)))
            return state

        def flush(self, state):
            self.flushed.append(("record" in state.events, len(state.history)))
            return state

    hook = Sees()
    fit(
        loaders=[ONE] * 5,
        **({"hooks": (hook, stop_at(2))} if stops else {"hooks": (hook,), "steps": 2}),
    )
    assert (hook.seen, hook.flushed) == ([(False, 0), (not stops, int(not stops))], [(True, 1)])


@pytest.mark.parametrize("stops", [False, True], ids=["target", "stop"])
def test_an_evaluation_that_fails_at_the_end_of_a_run_loses_nothing(stops):
    loaders, stop = ([ONE] * 5, failing_once(1)), "enough" if stops else None
    with pytest.raises(Boom) as caught:
        fit(loaders=loaders, steps=2 + stops, hooks=(stop_at(2),) if stops else ())
    state = caught.value.state
    assert (state.step, state.batch, state.model.w.item(), state.stop) == (2, 2, -2.0, stop)
    ended = fit(state, loaders, steps=2)
    assert ends(ended.history) == [(2, -0.5, -6.0, True)]  # of -4 and -8
    assert (ended.stop, ended.events) == (stop, {"update", "record", "end"})


def test_the_seconds_of_records_never_fall(monkeypatch):
    clock = iter([100.0, 100.0, 109.0, 50.0, 60.0])
    monkeypatch.setattr("fnloop._core.runs.time.monotonic", lambda: next(clock, 61.0))
    assert [r.seconds for r in fit(epochs=3).history] == [9.0, 9.0, 9.0]


@pytest.fixture
def slow_step(clock):
    return fl.pipeline()(clock.timed(toy_loss, train=1.0))


@pytest.mark.parametrize("how", ["the same process", "a checkpoint", "a snapshot", "an exception"])
def test_the_time_between_the_last_record_and_a_stop_counts(slow_step, clock, tmp_path, how):
    """The first run ends after three of the four updates of an epoch. No time passes after it."""

    def interrupt(state):
        if state.step == 3 and how == "an exception":
            raise OSError("the disk is full")
        return attrs.evolve(state, stop="interrupted") if state.step == 3 else state

    try:
        state = fl.fit(slow_step, toy(), [ONE] * 4, epochs=1, hooks=(interrupt,))
    except OSError as error:
        state = error.state
    assert not len(state.history)
    if how == "a checkpoint":
        state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    elif how == "a snapshot":
        state = fl.snapshot(state)
    clock.now += 1000.0
    state = fl.fit(slow_step, state, [ONE] * 4, epochs=2, hooks=())
    assert [record.seconds for record in state.history] == [4.0, 8.0]


def test_ctrl_c_after_the_end_leaves_the_reason_of_the_hook():
    class Pressed:
        calls = 0

        def __call__(self, state):
            return state

        def flush(self, state):
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt
            return state

    state = fit(hooks=(stop_at(2), Pressed()))
    assert (state.step, state.stop) == (2, "enough")
    assert "end" in state.events


@pytest.mark.parametrize(("steps", "records"), [
    (3, [(["valid"], False), (["test"], True)]),
    (2, [(["test", "valid", "other"], True)]),  # between two records: it has every loader
])  # fmt: skip
@pytest.mark.parametrize("how", ["target", "hook"])
def test_what_is_due_at_the_end_alone_is_in_a_closing_record(how, steps, records):
    loaders = {"train": [ONE] * 6, "valid": [ONE], "test": [-ONE], "other": [ONE]}
    never = fl.when(lambda state: False)
    moments = {"test": fl.at_end(), "valid": fl.every(steps=3), "other": never}
    end = {"steps": steps} if how == "target" else {"hooks": (stop_at(steps),)}
    state = fit(toy(), loaders, evaluate_every=moments, **end)
    assert [
        ([name for name in moments if f"{name}/loss" in record.metrics], record.closing)
        for record in state.history
    ] == records


def test_the_time_after_a_run_does_not_count_for_a_state_that_a_hook_has_kept(slow_step, clock):
    kept = []
    state = fl.fit(slow_step, toy(), [ONE] * 2, hooks=(lambda s: kept.append(s) or s,))
    clock.now += 1000.0
    fl.snapshot(kept[-1])
    state = fl.fit(slow_step, state, [ONE] * 2, epochs=2, hooks=())
    assert [record.seconds for record in state.history] == [2.0, 4.0]
