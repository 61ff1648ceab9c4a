"""Which records are new since a hook last looked: ``Hook.new_records``."""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


class Looks(fl.Hook):
    def __init__(self):
        self.seen = []

    def __call__(self, state):
        self.seen.append([record.step for record in self.new_records(state)])
        return state


def test_each_record_is_new_once_and_those_before_the_run_are_not():
    hook = Looks()
    state = fl.fit(step, toy(), [ONE] * 2, epochs=2, hooks=(hook,))
    assert hook.seen == [[], [2], [], [4]]
    fl.fit(step, state, [ONE] * 2, epochs=3, hooks=(hook,))
    assert hook.seen[4:] == [[], [6]]
    later = Looks()
    fl.fit(step, toy(), [ONE], epochs=1, hooks=(later,))
    assert later.seen == [[1]]


def test_a_hook_that_is_called_rarely_has_all_records_since():
    hook = Looks()
    fl.fit(step, toy(), [ONE], epochs=5, hooks=(fl.every(epochs=2)(hook),))
    assert hook.seen == [[1, 2], [3, 4]]


def test_after_a_rollback_the_records_that_follow_the_snapshot_are_new():
    hook, kept = Looks(), []

    def back(state):
        if state.epoch == 2 and not kept:
            kept.append(fl.snapshot(state))
        if state.epoch == 4 and len(kept) == 1:
            kept.append(True)
            return attrs.evolve(fl.snapshot(kept[0]), run=state.run)
        return state

    fl.fit(step, toy(), [ONE], epochs=4, hooks=(hook, back))
    assert hook.seen == [[1], [2], [3], [4], [3], [4]]


def test_a_frozen_record_may_be_a_hook():
    @attrs.frozen
    class Frozen(fl.Hook):
        seen: list

        def __call__(self, state):
            self.seen.extend(record.epoch for record in self.new_records(state))
            return state

    hook = Frozen([])
    fl.fit(step, toy(), [ONE], epochs=2, hooks=(hook,))
    assert hook.seen == [1, 2]


def test_a_hook_without_a_call_is_refused_before_the_first_update():
    calls = []

    class OnlyFlushes(fl.Hook):
        def flush(self, state):
            return state

    def loss(model, batch):
        calls.append(batch)
        return toy_loss(model, batch)

    with pytest.raises(TypeError, match="OnlyFlushes is a Hook without a method __call__"):
        fl.fit(fl.pipeline()(loss), toy(), [ONE], hooks=(OnlyFlushes(),))
    with pytest.raises(TypeError, match="OnlyFlushes is a Hook without a method __call__"):
        fl.fit(fl.pipeline()(loss), toy(), [ONE], hooks=(fl.every(epochs=1)(OnlyFlushes()),))
    assert not calls
