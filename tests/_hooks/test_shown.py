"""Hooks, moments and checks show, compare and pickle as they were typed."""

import itertools
import pickle
from pathlib import Path

import pytest

import fnloop as fl
from fnloop.debug import audit, watch
from fnloop.testing import toy

NAMES = {**{name: getattr(fl, name) for name in fl.__all__}, "audit": audit, "watch": watch}


def never(state):
    return False


class Third:
    """A trigger of the user's."""

    def due(self, state):
        return state.step == 3

    def __repr__(self):
        return "Third()"

    def __eq__(self, other):
        return type(other) is Third

    __hash__ = None


SHOWN = [  # no two are equal
    *("every(epochs=1)", "every(epochs=0.25)", "every(steps=2)", "every(seconds=60)", "at_end()"),
    *("every(steps=2)(never)", "every(steps=3)(never)", "when(never)", "when(len)"),
    *("when(never)(once(never))", "when(never)(never)", "once(never)", "Third() | every(steps=4)"),
    *("Third() & every(steps=4)", "(every(steps=2) | at_end())(never)", "(~every(steps=2))(never)"),
    "(every(steps=2) | at_end()) & ~(at_start() | every(epochs=1))",
    *("early_stop('valid/loss')", "early_stop('valid/loss', mode='min')"),
    "early_stop('valid/acc', patience=5, min_delta=0.1, mode='max')",
    "early_stop('loss', reference='best', min_steps=3)",
    *("early_stop('error', stopping_threshold=0.0)", "early_stop('valid/loss', since='run')"),
    *("when_improved('valid/bleu', mode='max')", "when_improved('valid/loss', since='run')"),
    "when_improved('valid/loss')(never)",
    *("restore_best('valid/bleu', mode='max')", "restore_best('valid/bleu', mode='min')"),
    *("restore_best('valid/loss', since='run')", "inspect(print)"),
    *("inspect(print, loader='test')", "inspect(print, loader='test', every=every(steps=2))"),
    "inspect(print, loader='test', reports=('last',))",
    *("measure(never, name='two')", "measure(never, name='three')"),
    "measure(never, name='two', every=every(steps=2), everywhere=True)",
    *("halt_on_nonfinite(steps=5)", "halt_on_nonfinite(steps=100, keep=True)"),
    *("halt_on_nonfinite(steps=100, raises=True)", "audit(every=10, against='eager')"),
    *("audit(5)", "watch(every=10, only='0')", "watch(5)"),
]  # fmt: skip
# These keep what they have written or shown: each is equal to itself alone.
OWN = [
    *("progress()", "progress(refresh=2.0)", "progress(since='run')", "requeue()"),
    "time_limit(hours=1, per='job')",
    *("to_csv('runs/a.csv')", "to_jsonl('runs/a.jsonl')", "checkpoint('rel/run', keep=9)"),
    "checkpoint('a', keep=3, best='valid/loss', mode='min', since='run')",
    *("live_plot('run.png')", "live_plot('run.png', x='epoch', refresh=5)"),
    *("profiled(folder='a')", "profiled(start=5, updates=20, folder='a')"),
]


def made(text):
    return eval(text, {**NAMES, "never": never, "Third": Third})


@pytest.mark.parametrize("text", [*SHOWN, *OWN])
def test_it_shows_compares_and_pickles_as_it_was_typed(text):
    one = made(text)
    assert repr(one) == text
    if text in SHOWN:
        assert one == made(text) == pickle.loads(pickle.dumps(one))


def test_no_two_are_equal_and_use_changes_nothing():
    for one, other in itertools.combinations(SHOWN, 2):
        assert made(one) != made(other)
    used = fl.every(seconds=60)
    used.due(toy())
    assert used == fl.every(seconds=60) and fl.once(never) != fl.once(never, "name")


@pytest.mark.parametrize(("hook", "text"), [
    (fl.early_stop(key="valid/loss", patience=3, check_finite=True), "early_stop('valid/loss')"),
    (fl.early_stop("valid/acc", 5, 0.1, "max"),
        "early_stop('valid/acc', patience=5, min_delta=0.1, mode='max')"),
    (fl.checkpoint("a", best="valid/loss"),
        "checkpoint('a', keep=3, best='valid/loss', mode='min')"),
    (fl.halt_on_nonfinite(5), "halt_on_nonfinite(steps=5)"),
    (fl.profiled(5, 20, folder=Path("a")), "profiled(start=5, updates=20, folder='a')"),
    (fl.when_improved("valid/loss")(fl.progress()), "when_improved('valid/loss')(progress())"),
])  # fmt: skip
def test_what_differs_from_the_defaults_is_shown(hook, text):
    assert repr(hook) == text
