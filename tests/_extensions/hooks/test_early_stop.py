"""early_stop and when_improved: at which of a sequence of values they act, and what they say."""

import math
import pickle

import attrs
import pytest
from sample_hooks import Notes
from toy_runs import fit

import fnloop as fl
from fnloop import History, Record, early_stop, when_improved
from fnloop.testing import toy, toy_loss

NAN, INF = math.nan, math.inf
FALLING = (5, 4, 3, 2, 1)
RISING = (1, 2, 3, 4, 5)
RUN = {"train": 1, "valid": 1, "epochs": 10}  # each update lowers w, and so the loss, by 1


def reported(values, key="valid/loss", closing=()):
    """Return the state after one evaluation for each value, at the end of epochs of 10 steps.

    Those at some indices are closing records.
    """
    history = History(
        Record(i, 10 * i, {"train/loss": 0, key: value}, closing=i - 1 in closing)
        for i, value in enumerate(values, 1)
    )
    n, events = len(values), frozenset({"update", "epoch", "record"})
    return attrs.evolve(toy(), epoch=n, step=10 * n, history=history, events=events)


def stops_at(values, **settings):
    hook = early_stop("valid/loss", **{"check_finite": False, **settings})
    stopped = [hook(reported(values[: i + 1])).stop is not None for i in range(len(values))]
    return stopped.index(True) if any(stopped) else None


# --- the value that stops a run

SLOW = (1, 0.994, 0.988, 0.982, 0.976, 0.97)  # gains of 0.006
MINUS = tuple(-value for value in SLOW)
SMALL = {"patience": 3, "min_delta": 0.01}


@pytest.mark.parametrize(("values", "settings", "index"), [
    (FALLING, {"patience": 1}, None), (RISING, {"patience": 1}, 1),
    (RISING, {}, 3),  # three evaluations, by default
    ((1, 1, 1, 1), {"patience": 2}, 2),  # equal is not an improvement
    ((3, 4, 2, 3, 3, 1), {"patience": 2}, 4),  # the improvement at 2 restarts the wait
    ((2,), {"patience": 1}, None),  # the first value is compared with nothing
    # mode
    (FALLING, {"patience": 1, "mode": "max"}, 1), (RISING, {"patience": 1, "mode": "max"}, None),
    # min_delta: exactly that much is not an improvement
    ((8, 7, 6, 5), {"patience": 1, "min_delta": 1}, 1),
    ((8, 6, 4, 2), {"patience": 1, "min_delta": 1}, None),
    ((2, 3, 4, 5), {"patience": 1, "min_delta": 1, "mode": "max"}, 1),
    # small gains add up only from the accepted value
    (SLOW, SMALL, None),
    (SLOW, {**SMALL, "reference": "best"}, 3),  # no gain is large enough alone
    (MINUS, {**SMALL, "reference": "best", "mode": "max"}, 3),
    ((1, 0.995, 1.5, 0.99, 0.99), {**SMALL, "reference": "best"}, 3),  # compared with 0.995
    # relative: 1 % of the reference, not of the value
    ((100, 99.5, 99.1, 98), {"patience": 2, "min_delta": 0.01, "relative": True}, 2),
    ((100, 98.9, 97.8, 96.7), {"patience": 1, "min_delta": 0.01, "relative": True}, None),
    ((-100, -98.9), {"patience": 1, "min_delta": 0.01, "relative": True, "mode": "max"}, None),
    *(((-math.inf, 1.0), {"patience": 1, "min_delta": d, "relative": True, "check_finite": False},
       1) for d in (0.0, 0.01)),  # a share of infinity would be NaN
    # a baseline has to be beaten too, as in Keras
    (FALLING, {"patience": 2, "baseline": 0.5}, 1),
    ((5, 4, 3, 3), {"patience": 2, "baseline": 3.5}, 1),
    ((5, 3, 4, 4), {"patience": 2, "baseline": 3.5}, 3),
    ((1, 2, 3), {"patience": 2, "baseline": 2.5, "mode": "max"}, 1),
    # the evaluations of a warm-up do not count
    (RISING, {"patience": 1, "start_from_epoch": 3}, 4),  # the first that counts is that of epoch 4
    ((1, 9, 9, 8, 9), {"patience": 1, "start_from_epoch": 2}, 4),
    # to and from infinity
    ((INF, 5, 4), {"patience": 1, "min_delta": 1}, 2),
    ((-INF, 5, 4), {"patience": 1, "mode": "max"}, 2), ((INF, INF, INF), {"patience": 2}, 2),
    # NaN is worse than anything. First: anything is better
    ((NAN, 0.9, 0.8, 0.7, 0.6), {"patience": 2}, None),
    ((NAN, 0.6, 0.7, 0.8), {"patience": 2, "mode": "max"}, None),
    ((NAN, NAN, NAN), {"patience": 2}, 2),
    # NaN later: an evaluation without improvement, which never becomes the reference
    ((3, NAN, 2, NAN, 1), {"patience": 2}, None), ((3, NAN, NAN, 1), {"patience": 2}, 2),
    ((3, 2, NAN, 2), {"patience": 2}, 3), ((1, 2, NAN, 2), {"patience": 2, "mode": "max"}, 3),
    # a value that is not finite stops at once
    ((3, NAN, 1), {"check_finite": True}, 1), ((INF,), {"check_finite": True}, 0),
    ((NAN, NAN, 3), {"check_finite": True, "min_epochs": 2}, 1),
    # thresholds ignore patience: better than 3, not equal, even at the first value
    (FALLING, {"patience": 100, "stopping_threshold": 3}, 3),
    ((0,), {"patience": 100, "stopping_threshold": 3}, 0),
    (RISING, {"patience": 100, "stopping_threshold": 3, "mode": "max"}, 3),
    ((NAN, NAN), {"stopping_threshold": 3}, None),
    # worse than 4, not equal; NaN counts as worse
    ((3, 5, 1), {"divergence_threshold": 4}, 1), ((3, 4, 1), {"divergence_threshold": 4}, None),
    ((3, NAN, 1), {"divergence_threshold": 4}, 1), ((NAN,), {"divergence_threshold": INF}, 0),
    ((3, 1, 5), {"divergence_threshold": 2, "mode": "max"}, 1),
    # never before min_epochs and min_steps
    (RISING, {"patience": 1, "min_steps": 31}, 3),  # the first evaluation after step 31
    (RISING, {"patience": 1, "min_epochs": 2, "min_steps": 40}, 3),  # both
    (RISING, {"patience": 1, "min_epochs": 4, "min_steps": 20}, 3),
    ((1, 2, 0.5, 0.6), {"patience": 1, "min_epochs": 3}, 3),  # it improved, so the wait restarted
    (FALLING, {"min_epochs": 3, "stopping_threshold": 100}, 2),
    (RISING, {"min_epochs": 3, "divergence_threshold": 0}, 2),
])  # fmt: skip
def test_the_value_that_stops_a_run(values, settings, index):
    assert stops_at(values, **settings) == index


@pytest.mark.parametrize(("values", "settings", "reason"), [
    ((2, 3, 3), {"patience": 2}, "has not improved for 2 evaluations (best 2.0000, epoch 1)"),
    ((2, 1), {"stopping_threshold": 1.5}, "reached 1.0000, better than 1.5 (lower is better)"),
    ((2, 9), {"divergence_threshold": 4}, "diverged to 9.0000, worse than 4 (lower is better)"),
    ((2, 3), {"patience": 1}, "has not improved for 1 evaluation (best 2.0000, epoch 1)"),
    ((2, 1, 0.96, 1), {"patience": 2, "min_delta": 0.1},
        "has not improved by more than 0.1 for 2 evaluations (compared with 1.0000, epoch 2)"),
    ((2, 1, 0.96, 1), {"patience": 2, "min_delta": 0.1, "reference": "best"},
        "has not improved by more than 0.1 for 2 evaluations (best 0.9600, epoch 3)"),
    ((2, NAN), {}, "is not finite: nan"), ((2, -INF), {}, "is not finite: -inf"),
    ((2, NAN), {"divergence_threshold": 4, "check_finite": False},
        "diverged to nan, worse than 4 (lower is better)"),
])  # fmt: skip
def test_the_reason_names_the_numbers(values, settings, reason):
    stop = early_stop("valid/loss", **settings)(reported(values)).stop
    assert stop == f"early_stop: valid/loss {reason}"


def test_without_a_new_record_of_the_metric_it_returns_the_same_state():
    hook, rising = early_stop("valid/loss", patience=1), reported(RISING)
    bare = rising.history.append(Record(5, 55, {"train/loss": 0}))
    for state in (
        attrs.evolve(rising, events=frozenset({"update"})), attrs.evolve(rising, history=bare),
        reported(FALLING), reported((2, 3), closing={1}),
    ):  # fmt: skip
        assert hook(state) is state
    # 2, then 3 in a closing record, then 3: one evaluation without improvement, not two
    hook = early_stop("valid/loss", patience=2)
    assert hook(reported((2, 3, 3))).stop is not None
    assert hook(reported((2, 3, 3), closing={1})).stop is None


@pytest.mark.parametrize(("key", "stopped"), [
    ("valid/loss", False), ("valid/error", False), ("valid/accuracy", True), ("valid/F1", True),
    ("valid/auc_of_roc", True),
])  # fmt: skip
def test_the_name_of_the_metric_implies_the_mode(key, stopped):
    """Falling values are better for a loss and worse for an accuracy."""
    assert (early_stop(key, patience=1)(reported(FALLING, key)).stop is not None) is stopped
    assert (early_stop(key, patience=1)(reported(RISING, key)).stop is not None) is not stopped


def test_the_decision_depends_only_on_the_history():
    """One hook sees two forks of a history in turn, and decides as a new hook does."""
    begin, hook = reported((3,)), early_stop("valid/loss", patience=1)
    better, worse = (begin.history.append(Record(2, 20, {"valid/loss": value})) for value in (2, 4))
    best = better.append(Record(3, 30, {"valid/loss": 2}))
    for history in (better, worse, begin.history, worse, best, better, worse):
        state = attrs.evolve(begin, epoch=9, step=90, history=history)
        assert hook(state).stop == early_stop("valid/loss", patience=1)(state).stop
    copied = pickle.loads(pickle.dumps(hook))
    assert copied == hook and copied(state).stop == hook(state).stop is not None


# --- early_stop in a run


@pytest.mark.parametrize(("settings", "run", "place"), [
    ({"patience": 2, "mode": "max"}, {}, (3, 3)), ({"patience": 2, "mode": "min"}, {}, (10, 10)),
    # evaluations count, not epochs: at 2, 4 and 6
    ({"patience": 2, "mode": "max"}, {"evaluate_every": fl.every(epochs=2)}, (6, 6)),
    # in the middle of an epoch
    ({"patience": 1, "mode": "max"}, {"train": 10, "evaluate_every": fl.every(steps=3)}, (0, 6)),
    # the training loss, without evaluation
    ({"key": "train/loss", "patience": 1, "mode": "max"}, {"valid": 0}, (2, 2)),
])  # fmt: skip
def test_where_a_run_ends(settings, run, place):
    hook = early_stop(**{"key": "valid/loss", **settings})
    for _ in range(2):  # one hook can serve two runs
        state = fit(hook, **{**RUN, **run})
        assert (state.epoch, state.step) == place
        assert (state.stop is not None) == (settings["mode"] == "max")


def test_a_run_continues_to_the_next_evaluation_after_its_stop_is_cleared():
    hook = early_stop("valid/loss", patience=2, mode="max")
    state = fit(hook, state=fit(hook, **{**RUN, "epochs": 2}), **RUN)
    assert state.epoch == fit(hook, state=state, **RUN).epoch == 3  # it stays stopped
    state = fit(hook, state=attrs.evolve(state, stop=None), **RUN)
    told = "early_stop: valid/loss has not improved for 3 evaluations (best -1.0000, epoch 1)"
    assert (state.epoch, state.stop) == (4, told)


def test_a_record_within_the_first_epoch_of_a_phase_is_named_by_its_step():
    """The epoch that the first phase left counts, without a record at its end."""
    state = fit(valid=1, phase="a", steps=2, evaluate_every=None)
    assert [(r.epoch, r.step) for r in state.history] == [(0, 2)]
    stop, moment = early_stop("valid/loss", patience=1, mode="max"), fl.every(steps=1)
    state = fit(stop, state=state, valid=1, phase="b", epochs=9, evaluate_every=moment)
    assert [(r.epoch, r.step) for r in state.history[1:]] == [(1, 3), (1, 4)]
    assert state.stop.endswith("(best -3.0000, step 3)")


# --- early_stop: names and arguments


@pytest.mark.parametrize(("settings", "message"), [
    ({"patience": 0}, r"patience as an int >= 1, .*some libraries call that 0\); got 0"),
    ({"key": "valid/bleu"},
        r'early_stop\("valid/bleu"\): .* lower or higher .*: write mode="min" or mode="max"'),
    ({"key": "accuracy/bleu"}, 'write mode="min"'),  # the name of the loader does not count
    ({"key": "valid/loss_of_accuracy"}, 'write mode="min"'),  # it has both words
])  # fmt: skip
def test_a_wrong_setting_is_an_error_when_composing(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        early_stop(**{"key": "valid/loss", **settings})


# --- when_improved


@pytest.mark.parametrize(("values", "settings", "indices"), [
    ((3, 2, 1), {}, [0, 1, 2]), ((1, 2, 3), {}, [0]), ((1, 2, 3), {"mode": "max"}, [0, 1, 2]),
    ((2, 2, 1, 1), {}, [0, 2]),  # equal is not better
    ((2, 3, 1, 2, 0), {}, [0, 2, 4]),
    ((3, 1, 2, 1.5), {}, [0, 1]),  # better than the one before is not enough
    ((NAN, NAN, 2, NAN, 3, 1), {}, [2, 5]), ((NAN, 1, 2), {"mode": "max"}, [1, 2]),
    ((INF, 5, -INF, -INF), {}, [0, 1, 2]), ((), {}, []),
    ((3, 1, 2), {"closing": {1}}, [0, 2]),
])  # fmt: skip
@pytest.mark.parametrize("fresh", [False, True], ids=["one hook", "a new one each time"])
def test_a_hook_runs_where_the_metric_is_better_than_ever(values, settings, indices, fresh):
    settings = {**settings}
    closing, called = settings.pop("closing", ()), []
    make = lambda: when_improved("valid/loss", **settings)(lambda s: called.append(s.epoch) or s)
    hook = make()
    for i in range(len(values)):
        (make() if fresh else hook)(reported(values[: i + 1], closing=closing))
    assert [epoch - 1 for epoch in called] == indices


RATES = (1.0, -2.0, 3.0, 0.0, 1.0, -1.0)  # w is -1, 1, -2, -2, -3, -2
UP_AND_DOWN = {"step": fl.pipeline(fl.schedule(lambda i, total: RATES[i]))(toy_loss)}
BETTER = when_improved("valid/loss")


@pytest.mark.parametrize(("wrap", "steps"), [
    (BETTER, [1, 3, 5]), (lambda hook: fl.every(epochs=2)(BETTER(hook)), []),
    (lambda hook: fl.every(epochs=3)(BETTER(hook)), [3]),
    (lambda hook: BETTER(fl.every(epochs=5)(hook)), [5]), (lambda hook: BETTER(fl.once(hook)), [1]),
    (lambda hook: fl.on_main(BETTER(hook)), [1, 3, 5]),
    (lambda hook: BETTER(fl.on_main(hook)), [1, 3, 5]),
    (lambda hook: fl.when(lambda state: state.epoch > 1)(BETTER(hook)), [3, 5]),
    (fl.every(epochs=3) & BETTER, [3]), (BETTER | fl.every(epochs=6), [1, 3, 5, 6]),
    (~BETTER & fl.every(epochs=1), [2, 4, 6]),
])  # fmt: skip
def test_it_composes(wrap, steps):
    notes = Notes()
    fit(wrap(notes), **UP_AND_DOWN, train=1, valid=1, epochs=6)
    assert notes.steps == steps


@pytest.mark.parametrize(("key", "moments", "steps"), [
    ("valid/loss", {"evaluate_every": fl.every(steps=1)}, [1, 2, 3, 4]),  # within an epoch
    ("recent/loss", {"record_every": fl.every(steps=2)}, [2, 4]),
    ("valid/loss", {"record_every": fl.every(steps=1)}, [4]),  # records without the metric
])  # fmt: skip
def test_which_records_count(key, moments, steps):
    notes = Notes()
    fit(when_improved(key)(notes), valid=1, **moments)
    assert notes.steps == steps


@pytest.mark.parametrize(("make", "message"), [
    (lambda: fit(BETTER, valid=1), r"write when_improved\('valid/loss'\)\(hook\)"),
    (lambda: fl.once(BETTER(print)), r"write when_improved\('valid/loss'\)\(once\("),
])  # fmt: skip
def test_a_wrong_use_is_an_error_that_says_what_to_write(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
