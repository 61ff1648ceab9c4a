"""when_improved: at which of a sequence of values a hook runs, and how it composes."""

import math
import pickle

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import History, Record, when_improved
from fnloop.testing import toy, toy_loss

NAN = math.nan
ONE = torch.ones(1)


def reported(values, key="valid/loss", closing=()):
    """Return the state after one evaluation for each value; those at some indices are closing."""
    history = History(
        Record(i, i, {"train/loss": 0, key: value}, closing=i - 1 in closing)
        for i, value in enumerate(values, 1)
    )
    return attrs.evolve(toy(), history=history, events=frozenset({"update", "epoch", "record"}))


def called_at(values, closing=(), **settings):
    """Return the indices of the values at which the hook is called."""
    called = []
    hook = when_improved("valid/loss", **settings)(lambda state: called.append(i) or state)
    for i in range(len(values)):
        hook(reported(values[: i + 1], closing=closing))
    return called


@pytest.mark.parametrize(("values", "settings", "indices"), [
    ((3, 2, 1), {}, [0, 1, 2]), ((1, 2, 3), {}, [0]), ((1, 2, 3), {"mode": "max"}, [0, 1, 2]),
    ((2, 2, 1, 1), {}, [0, 2]),  # equal is not better
    ((2, 3, 1, 2, 0), {}, [0, 2, 4]),
    ((3, 1, 2, 1.5), {}, [0, 1]),  # better than the one before is not enough
    ((NAN, NAN, 2, NAN, 3, 1), {}, [2, 5]), ((NAN, 1, 2), {"mode": "max"}, [1, 2]),
    ((math.inf, 5, -math.inf, -math.inf), {}, [0, 1, 2]), ((), {}, []),
])  # fmt: skip
def test_a_hook_runs_where_the_metric_is_better_than_ever(values, settings, indices):
    assert called_at(values, **settings) == indices


def test_closing_records_do_not_count():
    assert called_at((3, 1, 2), closing={1}) == [0, 2]


def test_a_copy_that_has_seen_nothing_decides_the_same():
    values = (2, 3, 1, 2, 0)
    fresh = []
    for i in range(len(values)):
        hook = when_improved("valid/loss")(lambda state, i=i: fresh.append(i) or state)
        hook(reported(values[: i + 1]))
    assert fresh == called_at(values) == [0, 2, 4]


RATES = (1.0, -2.0, 3.0, 0.0, 1.0, -1.0)  # w is -1, 1, -2, -2, -3, -2


def trained(state, hooks, epochs=6):
    step = fl.pipeline(fl.schedule(lambda i, total: RATES[i]))(toy_loss)
    return fl.fit(step, state, ([ONE], [ONE]), epochs=epochs, hooks=hooks)


def noting(seen):
    return lambda state: (seen.append((state.epoch, state.history.latest("valid/loss"))), state)[1]


EXPECTED = [(1, -1.0), (3, -2.0), (5, -3.0)]


def test_in_a_run_the_hook_is_called_with_the_state_that_has_improved():
    seen = []
    trained(toy(), (when_improved("valid/loss")(noting(seen)),))
    assert seen == EXPECTED


@pytest.mark.parametrize("split", range(1, 6))
def test_a_resumed_run_calls_it_as_an_uninterrupted_one(tmp_path, split):
    seen = []
    first = trained(toy(), (when_improved("valid/loss")(noting(seen)),), split)
    state = fl.restore(fl.save(first, tmp_path / "a"), toy())
    trained(state, (when_improved("valid/loss")(noting(seen)),))
    assert seen == EXPECTED


@pytest.mark.parametrize(("wrap", "expected"), [
    (lambda hook: fl.every(epochs=2)(when_improved("valid/loss")(hook)), []),
    (lambda hook: fl.every(epochs=3)(when_improved("valid/loss")(hook)), [(3, -2.0)]),
    (lambda hook: when_improved("valid/loss")(fl.every(epochs=5)(hook)), [(5, -3.0)]),
    (lambda hook: when_improved("valid/loss")(fl.once(hook)), EXPECTED[:1]),
    (lambda hook: fl.on_main(when_improved("valid/loss")(hook)), EXPECTED),
    (lambda hook: when_improved("valid/loss")(fl.on_main(hook)), EXPECTED),
    (lambda hook: fl.when(lambda state: state.epoch > 1)(when_improved("valid/loss")(hook)),
        EXPECTED[1:]),
    (lambda hook: (fl.every(epochs=3) & when_improved("valid/loss"))(hook), [(3, -2.0)]),
    (lambda hook: (when_improved("valid/loss") | fl.every(epochs=6))(hook), [*EXPECTED, (6, -2.0)]),
    (lambda hook: (~when_improved("valid/loss") & fl.every(epochs=1))(hook),
        [(2, 1.0), (4, -2.0), (6, -2.0)]),
])  # fmt: skip
def test_it_composes(wrap, expected):
    seen = []
    trained(toy(), (wrap(noting(seen)),))
    assert seen == expected


def test_it_passes_the_other_calls_on():
    calls = []

    class Hook:
        def __call__(self, state):
            return state

        def begin(self, state):
            calls.append("begin")
            return state

        def flush(self, state):
            calls.append("flush")
            return state

        def close(self):
            calls.append("close")

    trained(toy(), (when_improved("valid/loss")(Hook()),))
    assert calls == ["begin", "flush", "close"]


def test_checkpoints_of_the_best_only(tmp_path):
    saves = when_improved("valid/loss")(fl.checkpoint(tmp_path, keep=None))
    trained(toy(), (saves,))
    # and at the end of the run, as always
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "3", "5", "6"]


def test_an_evaluation_within_an_epoch_counts():
    seen = []
    step = fl.pipeline()(toy_loss)
    fl.fit(
        step, toy(), ([ONE] * 3, [ONE]), evaluate_every=fl.every(steps=1),
        hooks=(when_improved("valid/loss")(lambda state: seen.append(state.step) or state),),
    )  # fmt: skip
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.every(epochs=100)])
@pytest.mark.parametrize(("key", "message"), [
    ("val/loss", r"when_improved\('val/loss', mode='min'\): there is no metric 'val/loss'"),
    ("valid/lss", r"when_improved\('valid/lss', mode='min'\): there is no metric 'valid/lss'"),
])  # fmt: skip
def test_an_unknown_metric_is_named(wrap, key, message):
    with pytest.raises(KeyError, match=message):
        trained(toy(), (wrap(when_improved(key, "min")(lambda state: state)),))


def test_an_unknown_metric_in_a_compound_is_named():
    moment = fl.every(epochs=100) & when_improved("val/loss")
    expected = r"every\(epochs=100\) & when_improved\('val/loss'\): there is no metric 'val/loss'"
    with pytest.raises(KeyError, match=expected):
        trained(toy(), (moment(lambda state: state),))
    with pytest.raises(TypeError, match="that does not depend on records, because it makes them"):
        fl.fit(fl.pipeline()(toy_loss), toy(), ([ONE], [ONE]), record_every=moment)


def test_records_between_evaluations_do_not_count():
    seen = []
    loaders = {"train": [ONE] * 4, "valid": [ONE]}
    hooks = (when_improved("recent/loss")(lambda state: seen.append(state.step) or state),)
    fl.fit(
        fl.pipeline()(toy_loss), toy(), loaders, epochs=1, hooks=hooks,
        record_every=fl.every(steps=2),
    )  # fmt: skip
    assert seen == [2, 4]
    called = when_improved("valid/loss")(lambda state: seen.append("valid") or state)
    fl.fit(
        fl.pipeline()(toy_loss), toy(), loaders, epochs=1, hooks=(called,),
        record_every=fl.every(steps=1),
    )  # fmt: skip
    assert seen == [2, 4, "valid"]


def test_before_the_first_update_nothing_has_changed():
    state = toy()
    with pytest.raises(KeyError, match="Did you mean 'valid/loss'"):
        trained(state, (when_improved("val/loss")(lambda state: state),))
    assert (state.model.w.item(), state.step) == (0.0, 0)


def test_it_says_when_but_not_what_nor_when_to_evaluate():
    with pytest.raises(TypeError, match=r"write when_improved\('valid/loss'\)\(hook\)"):
        trained(toy(), (when_improved("valid/loss"),))
    with pytest.raises(TypeError, match="a moment that does not depend on records"):
        fl.fit(
            fl.pipeline()(toy_loss), toy(), ([ONE], [ONE]),
            evaluate_every=when_improved("valid/loss"),
        )  # fmt: skip
    with pytest.raises(TypeError, match=r"write when_improved\('valid/loss'\)\(once\("):
        fl.once(when_improved("valid/loss")(lambda state: state))


def test_equality_pickling_and_repr():
    made = when_improved("valid/bleu", "max")
    assert repr(made) == "when_improved('valid/bleu', mode='max')"
    assert pickle.loads(pickle.dumps(made)) == made != when_improved("valid/bleu", "min")
    assert repr(when_improved("valid/loss")(fl.progress())).startswith(
        "when_improved('valid/loss')(progress("
    )


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: when_improved(3), TypeError, "when_improved expects key as the name of a metric"),
    (lambda: when_improved(""), ValueError, "got an empty name"),
    (lambda: when_improved("valid/bleu"), ValueError, 'write mode="min" or mode="max"'),
    (lambda: when_improved("valid/loss", "low"), ValueError, 'mode expects "min"'),
    (lambda: when_improved("valid/loss")(3), TypeError,
        r"when_improved\('valid/loss'\) expects hook as a function state -> state; got 3"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()
