"""early_stop: at which of a sequence of values a run stops, and the reason that it gives."""

import math
import pickle

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import History, Record, early_stop
from fnloop.testing import toy, toy_loss

NAN, INF = math.nan, math.inf


ONE = torch.tensor([1.0])


FALLING = (5, 4, 3, 2, 1)


RISING = (1, 2, 3, 4, 5)


def reported(values, key="valid/loss"):
    """Return the state after one evaluation for each value, at the end of epochs of 10 steps."""
    history = History(
        Record(i, 10 * i, {"train/loss": 0, key: value}) for i, value in enumerate(values, 1)
    )
    n = len(values)
    return attrs.evolve(
        toy(),
        epoch=n,
        step=10 * n,
        history=history,
        events=frozenset({"update", "epoch", "record"}),
    )


def stops_at(values, **settings):
    """Return the index of the value that stops a run, or None."""
    hook = early_stop("valid/loss", **{"check_finite": False, **settings})
    stopped = [hook(reported(values[: i + 1])).stop is not None for i in range(len(values))]
    return stopped.index(True) if any(stopped) else None


# --- the value that stops a run


@pytest.mark.parametrize(("values", "settings", "index"), [
    (FALLING, {"patience": 1}, None), (RISING, {"patience": 1}, 1), (RISING, {"patience": 2}, 2),
    (RISING, {}, 3),  # three evaluations, by default
    ((1, 1, 1, 1), {"patience": 2}, 2),  # equal is not an improvement
    ((3, 4, 2, 3, 3, 1), {"patience": 2}, 4),  # the improvement at 2 restarts the wait
    ((3, 4, 2, 3, 1, 2), {"patience": 2}, None),
    ((2,), {"patience": 1}, None),  # the first value is compared with nothing
    # mode
    (FALLING, {"patience": 1, "mode": "max"}, 1), (RISING, {"patience": 1, "mode": "max"}, None),
    ((1, 1, 1), {"patience": 2, "mode": "max"}, 2),
    # min_delta: exactly that much is not an improvement
    ((8, 7, 6, 5), {"patience": 1, "min_delta": 1}, 1),
    ((8, 6, 4, 2), {"patience": 1, "min_delta": 1}, None),
    ((2, 3, 4, 5), {"patience": 1, "min_delta": 1, "mode": "max"}, 1),
    ((2, 4, 6, 8), {"patience": 1, "min_delta": 1, "mode": "max"}, None),
    # to and from infinity
    ((INF, 5, 4), {"patience": 1, "min_delta": 1}, 2),
    ((-INF, 5, 4), {"patience": 1, "mode": "max"}, 2), ((INF, INF, INF), {"patience": 2}, 2),
])  # fmt: skip
def test_patience_min_delta_and_mode(values, settings, index):
    assert stops_at(values, **settings) == index


SLOW = (1, 0.994, 0.988, 0.982, 0.976, 0.97)  # gains of 0.006


@pytest.mark.parametrize(("values", "settings", "index"), [
    (SLOW, {}, None),  # "accepted": two small gains add up
    (SLOW, {"reference": "accepted"}, None),
    (SLOW, {"reference": "best"}, 3),  # "best": no gain is large enough alone
    (tuple(-v for v in SLOW), {"reference": "accepted", "mode": "max"}, None),
    (tuple(-v for v in SLOW), {"reference": "best", "mode": "max"}, 3),
    ((1, 0.995, 1.5, 0.99, 0.99), {"reference": "best"}, 3),  # compared with 0.995, not with 1.5
])  # fmt: skip
def test_small_gains_add_up_only_from_the_accepted_value(values, settings, index):
    assert stops_at(values, patience=3, min_delta=0.01, **settings) == index


@pytest.mark.parametrize(("values", "mode", "index"), [
    ((NAN, 0.9, 0.8, 0.7, 0.6), "min", None),  # NaN first: anything is better
    ((NAN, 0.6, 0.7, 0.8), "max", None), ((NAN, NAN, 3, 2), "min", None),
    ((NAN, NAN, NAN), "min", 2),
    ((3, NAN, 2, NAN, 1), "min", None),  # NaN later: an evaluation without improvement
    ((3, NAN, NAN, 1), "min", 2),
    ((3, 2, NAN, 2), "min", 3),  # it never becomes the reference
    ((1, 2, NAN, 2), "max", 3),
])  # fmt: skip
def test_nan_is_worse_than_anything(values, mode, index):
    assert stops_at(values, patience=2, mode=mode) == index


@pytest.mark.parametrize(("values", "settings", "index"), [
    (FALLING, {"stopping_threshold": 3}, 3),  # better than 3, not equal
    (FALLING, {"stopping_threshold": 3.5}, 2),
    ((0,), {"stopping_threshold": 3}, 0),  # even at the first value
    (RISING, {"stopping_threshold": 3, "mode": "max"}, 3),
    ((NAN, NAN), {"stopping_threshold": 3}, None), ((3, 5, 1), {"divergence_threshold": 4}, 1),
    ((3, 4, 1), {"divergence_threshold": 4}, None),  # equal to 4, not worse
    ((3, NAN, 1), {"divergence_threshold": 4}, 1),  # NaN counts as worse
    ((NAN,), {"divergence_threshold": INF}, 0),
    ((3, 1, 5), {"divergence_threshold": 2, "mode": "max"}, 1),
])  # fmt: skip
def test_thresholds_ignore_patience(values, settings, index):
    assert stops_at(values, patience=100, **settings) == index


@pytest.mark.parametrize(("values", "settings", "index"), [
    (RISING, {"min_epochs": 4}, 3), (RISING, {"min_steps": 40}, 3),
    (RISING, {"min_steps": 31}, 3),  # the first evaluation after step 31
    (RISING, {"min_epochs": 2, "min_steps": 40}, 3),  # both
    (RISING, {"min_epochs": 4, "min_steps": 20}, 3),
    (RISING, {"min_epochs": 1, "min_steps": 10}, 1),
    ((1, 2, 0.5, 0.6), {"min_epochs": 3}, 3),  # it improved in between, so the wait restarted
    (FALLING, {"min_epochs": 3, "stopping_threshold": 100}, 2),
    (RISING, {"min_epochs": 3, "divergence_threshold": 0}, 2),
])  # fmt: skip
def test_it_never_stops_before_min_epochs_and_min_steps(values, settings, index):
    assert stops_at(values, patience=1, **settings) == index


@pytest.mark.parametrize(
    ("values", "settings", "stop"),
    [
        (
            (2, 3, 3),
            {"patience": 2},
            "early_stop: valid/loss has not improved for 2 evaluations (best 2, epoch 1)",
        ),
        (
            (2, 1),
            {"stopping_threshold": 1.5},
            "early_stop: valid/loss reached 1, better than 1.5 (lower is better)",
        ),
        (
            (2, 9),
            {"divergence_threshold": 4},
            "early_stop: valid/loss diverged to 9, worse than 4 (lower is better)",
        ),
        (
            (2, 3),
            {"patience": 1},
            "early_stop: valid/loss has not improved for 1 evaluation (best 2, epoch 1)",
        ),
        (
            (2, 1, 0.96, 1),
            {"patience": 2, "min_delta": 0.1},
            "early_stop: valid/loss has not improved by more than 0.1 for 2 evaluations (compared "
            "with 1, epoch 2)",
        ),
        (
            (2, 1, 0.96, 1),
            {"patience": 2, "min_delta": 0.1, "reference": "best"},
            "early_stop: valid/loss has not improved by more than 0.1 for 2 evaluations (best "
            "0.96, epoch 3)",
        ),
        ((2, NAN), {}, "early_stop: valid/loss is not finite: nan"),
        ((2, -INF), {}, "early_stop: valid/loss is not finite: -inf"),
        (
            (2, NAN),
            {"divergence_threshold": 4, "check_finite": False},
            "early_stop: valid/loss diverged to nan, worse than 4 (lower is better)",
        ),
    ],
)
def test_the_reason_names_the_numbers(values, settings, stop):
    assert early_stop("valid/loss", **settings)(reported(values)).stop == stop


def test_without_a_new_record_it_returns_the_same_state():
    state = attrs.evolve(reported(RISING), events=frozenset({"update"}))
    assert early_stop("valid/loss", patience=1)(state) is state
    state = reported(FALLING)
    assert early_stop("valid/loss", patience=1)(state) is state


def test_a_record_without_the_metric_does_not_count():
    evaluated = reported((1, 2))
    history = evaluated.history.append(Record(2, 25, {"train/loss": 0}))
    assert (
        early_stop("valid/loss", patience=1)(attrs.evolve(evaluated, history=history)).stop is None
    )


@pytest.mark.parametrize(("key", "stopped"), [
    ("valid/loss", False), ("valid/error", False), ("valid/accuracy", True), ("valid/F1", True),
    ("valid/auc_of_roc", True),
])  # fmt: skip
def test_the_name_of_the_metric_implies_the_mode(key, stopped):
    """Falling values are better for a loss and worse for an accuracy."""
    assert (early_stop(key, patience=1)(reported(FALLING, key)).stop is not None) is stopped
    assert (early_stop(key, patience=1)(reported(RISING, key)).stop is not None) is not stopped


@pytest.mark.parametrize(("values", "settings", "index"), [
    ((3, NAN, 1), {}, 1),
    ((INF,), {}, 0),
    ((3, NAN, 2, NAN), {"check_finite": False}, None),
    ((NAN, NAN, 3), {"min_epochs": 2}, 1),
])  # fmt: skip
def test_a_value_that_is_not_finite_stops_at_once(values, settings, index):
    assert stops_at(values, **{"check_finite": True, **settings}) == index


def test_closing_records_do_not_count():
    """2, then 3 in a closing record, then 3: one evaluation without improvement, not two."""
    state = reported((2, 3, 3))
    first, second, third = state.history
    closed = attrs.evolve(
        state, history=History([first, attrs.evolve(second, closing=True), third])
    )
    hook = early_stop("valid/loss", patience=2)
    assert hook(state).stop is not None
    assert hook(closed).stop is None
    at_the_end = attrs.evolve(
        state, history=History([first, second, attrs.evolve(third, closing=True)])
    )
    assert early_stop("valid/loss", patience=1)(at_the_end).stop is None


def test_the_decision_depends_only_on_the_history():
    """One hook sees two forks of a history in turn, and decides as a new hook does."""
    begin = reported((3,))
    better, worse = (begin.history.append(Record(2, 20, {"valid/loss": value})) for value in (2, 4))
    hook = early_stop("valid/loss", patience=1)
    for history in (
        better,
        worse,
        begin.history,
        worse,
        better.append(Record(3, 30, {"valid/loss": 2})),
        better,
        worse,
    ):
        state = attrs.evolve(begin, epoch=9, step=90, history=history)
        assert hook(state).stop == early_stop("valid/loss", patience=1)(state).stop
    assert pickle.loads(pickle.dumps(hook)) == hook
    assert (
        pickle.loads(pickle.dumps(hook))(state).stop
        == hook(state).stop
        == ("early_stop: valid/loss has not improved for 1 evaluation (best 3, epoch 1)")
    )


# --- in a run: each update lowers w, and so the loss, by 1


STEP = fl.pipeline()(toy_loss)


LOADERS = {"train": [ONE], "valid": [ONE]}


@pytest.mark.parametrize(("mode", "stopped"), [("max", 3), ("min", 10)])
def test_a_run_ends_at_the_evaluation_that_exhausts_patience(mode, stopped):
    state = fl.fit(
        STEP, toy(), LOADERS, epochs=10, hooks=(early_stop("valid/loss", patience=2, mode=mode),)
    )
    assert state.epoch == stopped
    assert (state.stop is not None) == (mode == "max")


def test_patience_counts_evaluations_not_epochs():
    hook = early_stop("valid/loss", patience=2, mode="max")
    state = fl.fit(
        STEP, toy(), LOADERS, epochs=10, hooks=(hook,), evaluate_every=fl.every(epochs=2)
    )
    assert (
        state.epoch == 6
    )  # evaluated at 2, 4 and 6; no error at epoch 1, which has no valid/loss yet


def test_a_run_can_stop_in_the_middle_of_an_epoch():
    loaders = {"train": [ONE] * 10, "valid": [ONE]}
    hook = early_stop("valid/loss", patience=1, mode="max")
    state = fl.fit(STEP, toy(), loaders, hooks=(hook,), evaluate_every=fl.every(steps=3))
    assert (state.step, state.epoch, state.batch) == (6, 0, 6)
    assert state.stop.endswith("valid/loss has not improved for 1 evaluation (best -3, step 3)")


def test_a_run_continues_to_the_next_evaluation_after_its_stop_is_cleared():
    settings = {"epochs": 10, "hooks": (early_stop("valid/loss", patience=2, mode="max"),)}
    state = fl.fit(STEP, toy(), LOADERS, **settings)
    assert fl.fit(STEP, state, LOADERS, **settings).epoch == 3  # it stays stopped
    state = fl.fit(STEP, attrs.evolve(state, stop=None), LOADERS, **settings)
    assert state.epoch == 4
    assert (
        state.stop == "early_stop: valid/loss has not improved for 3 evaluations (best -1, epoch 1)"
    )


def test_the_first_of_several_hooks_stops_the_run():
    patient, impatient = (early_stop("valid/loss", patience=n, mode="max") for n in (5, 1))
    for hooks in [(patient, impatient), (impatient, patient)]:
        assert fl.fit(STEP, toy(), LOADERS, epochs=10, hooks=hooks).epoch == 2


def test_it_can_watch_the_training_loss_without_evaluation():
    state = fl.fit(
        STEP, toy(), [ONE], epochs=10, hooks=(early_stop("train/loss", patience=1, mode="max"),)
    )
    assert state.epoch == 2


@pytest.mark.parametrize(("hook", "text"), [
    (early_stop("valid/loss"), "early_stop('valid/loss')"),
    # the defaults
    (early_stop(key="valid/loss", patience=3, check_finite=True), "early_stop('valid/loss')"),
    (early_stop("valid/loss", mode="min"), "early_stop('valid/loss', mode='min')"),
    (early_stop("valid/acc", 5, 0.1, "max"),
        "early_stop('valid/acc', patience=5, min_delta=0.1, mode='max')"),
    (early_stop("loss", reference="best", min_steps=3),
        "early_stop('loss', reference='best', min_steps=3)"),
    (early_stop("error", stopping_threshold=0.0), "early_stop('error', stopping_threshold=0.0)"),
])  # fmt: skip
def test_the_repr_has_the_settings_that_differ_from_the_defaults(hook, text):
    assert repr(hook) == text
    assert eval(text) == hook


def test_one_hook_can_serve_two_runs():
    hook = early_stop("valid/loss", patience=2, mode="max")
    assert [fl.fit(STEP, toy(), LOADERS, epochs=10, hooks=(hook,)).epoch for _ in range(2)] == [
        3,
        3,
    ]
    cut = fl.fit(STEP, toy(), LOADERS, epochs=2, hooks=(hook,))
    assert fl.fit(STEP, cut, LOADERS, epochs=10, hooks=(hook,)).epoch == 3


@pytest.mark.parametrize(("key", "near"), [
    ("val/loss", "valid/loss"), ("test/loss", "train/loss"), ("loss", "valid/loss"),
    ("val_loss", "valid/loss"),
])  # fmt: skip
def test_an_unknown_loader_is_an_error_before_the_first_update(key, near):
    state = toy()
    with pytest.raises(
        KeyError,
        match=rf"early_stop: there is no metric '{key}'.*: train, valid\. Did you mean '{near}'\?",
    ):
        fl.fit(STEP, state, LOADERS, epochs=10, hooks=(early_stop(key),))
    assert state.model.w.item() == 0.0


@pytest.mark.parametrize(
    "wrap", [fl.every(epochs=1), fl.on_main, fl.when(bool)], ids=["every", "on_main", "when"]
)
def test_the_loader_is_checked_inside_wrappers_too(wrap):
    with pytest.raises(KeyError, match="'val/loss'"):
        fl.fit(STEP, toy(), LOADERS, hooks=(wrap(early_stop("val/loss")),))


def test_a_loader_that_is_never_evaluated_has_no_metrics():
    for never in (None, {"valid": None}):
        with pytest.raises(KeyError, match=r"never makes 'valid/loss'.* give it a moment"):
            fl.fit(STEP, toy(), LOADERS, hooks=(early_stop("valid/loss"),), evaluate_every=never)
    with pytest.raises(KeyError, match=r"those are: train\. Did you mean 'train/loss'"):
        fl.fit(STEP, toy(), LOADERS, hooks=(early_stop("vali/loss"),), evaluate_every=None)


def test_a_metric_that_another_hook_reports_is_accepted():
    """The hook reports the number of updates, which rises, so the metric never improves."""

    def count(state):
        if "record" not in state.events:
            return state
        *before, last = state.history
        more = attrs.evolve(last, metrics={**last.metrics, "mine/loss": state.step})
        return attrs.evolve(state, history=History([*before, more]))

    stop = early_stop("mine/loss", patience=2)
    with pytest.raises(KeyError, match="'mine/loss'"):
        fl.fit(STEP, toy(), LOADERS, epochs=10, hooks=(count, stop))
    count.reports = ("mine/loss",)
    assert fl.fit(STEP, toy(), LOADERS, epochs=10, hooks=(count, stop)).epoch == 3


MINE = lambda state: state  # a hook that might add metrics


@pytest.mark.parametrize("key", ["valid/lss", "train/lss"])
def test_an_unknown_metric_is_an_error_at_the_first_evaluation(key):
    right = key.replace("lss", "loss")
    with pytest.raises(
        KeyError,
        match=rf"there is no metric '{key}'; .*: train/loss, train/lr, valid/loss\. "
        rf"Did you mean '{right}'\?",
    ) as caught:
        fl.fit(STEP, toy(), LOADERS, epochs=10, hooks=(MINE, early_stop(key, mode="min")))
    assert caught.value.state.step == 1


def test_an_unknown_metric_of_a_loader_evaluated_later_is_an_error_then():
    settings = {
        "epochs": 10,
        "hooks": (MINE, early_stop("valid/los", mode="min")),
        "evaluate_every": fl.every(epochs=2),
    }
    with pytest.raises(KeyError, match=r"there is no metric 'valid/los'") as caught:
        fl.fit(STEP, toy(), LOADERS, **settings)
    assert caught.value.state.epoch == 2


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: early_stop(3), TypeError, r'the name of a metric, such as "valid/loss"; got 3'),
    (lambda: early_stop("valid/loss", patience=0), ValueError,
        r"patience as an int >= 1, .*some libraries call that 0\); got 0"),
    (lambda: early_stop("valid/loss", patience=1.5), ValueError,
        r"patience as an int >= 1, a number of evaluations; got 1\.5"),
    (lambda: early_stop("valid/loss", patience=True), ValueError,
        r"patience as an int >= 1, a number of evaluations; got True"),
    (lambda: early_stop("valid/loss", min_delta=-0.1), ValueError,
        r"min_delta >= 0 and finite, the least improvement; got -0\.1"),
    (lambda: early_stop("valid/loss", min_delta=NAN), ValueError,
        r"min_delta >= 0 and finite, .*; got nan"),
    (lambda: early_stop(""), ValueError, "an empty name"),
    (lambda: early_stop("valid/bleu"), ValueError,
        r'early_stop\("valid/bleu"\): .* lower or higher .*: write mode="min" or mode="max"'),
    # the name of the loader does not count
    (lambda: early_stop("accuracy/bleu"), ValueError, 'write mode="min"'),
    # it has both words
    (lambda: early_stop("valid/loss_of_accuracy"), ValueError, 'write mode="min"'),
    (lambda: early_stop("valid/loss", mode="lower"), ValueError,
        r'mode expects "min" .* or "max" .*got \'lower\''),
    (lambda: early_stop("valid/loss", reference="last"), ValueError,
        r'reference as one of "accepted", "best"; got \'last\''),
])  # fmt: skip
def test_a_wrong_setting_is_an_error_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_record_within_the_first_epoch_of_a_phase_is_named_by_its_step():
    """The epoch that the first phase left counts, without a record at its end."""
    loaders, given = {"train": [ONE] * 4, "valid": [ONE]}, {"evaluate_every": fl.every(steps=1)}
    state = fl.fit(STEP, toy(), loaders, phase="a", steps=2, hooks=(), evaluate_every=None)
    assert [(r.epoch, r.step) for r in state.history] == [(0, 2)]
    stop = fl.early_stop("valid/loss", patience=1, mode="max")
    state = fl.fit(STEP, state, loaders, phase="b", epochs=9, hooks=(stop,), **given)
    assert [(r.epoch, r.step) for r in state.history[1:]] == [(1, 3), (1, 4)]
    assert state.stop.endswith("(best -3, step 3)")
