"""A hook that raises: the hooks after it see its boundary when the run continues."""

import math

import attrs
import pytest
import torch
from loop_cases import Boom, step

import fnloop as fl
from fnloop._core.left_to_do import hooks_left
from fnloop.testing import assert_same, toy

ONES = [torch.ones(1)] * 2
LOADERS = {"train": ONES, "valid": ONES}


class Raises:
    """A hook that raises once, at a step."""

    def __init__(self, at, error=Boom):
        self.at, self.error = at, error

    def __call__(self, state):
        if state.step == self.at:
            self.at = None
            raise self.error
        return state


def noting(seen):
    return lambda state: (seen.append((state.step, *sorted(state.events))), state)[1]


def cut(hooks, loaders=LOADERS, **given):
    """Run until a hook raises; return the state that the exception has."""
    with pytest.raises(Boom) as caught:
        fl.fit(step, toy(), loaders, hooks=hooks, **given)
    return caught.value.state


def through(path, state):
    """Return a state as another process has it."""
    return fl.restore(fl.save(state, path / "a"), toy())


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [False, True])
def test_hooks_after_one_that_raised_see_every_boundary(tmp_path, at, saved):
    """Those before it saw the boundary already, and the one that raised is not called again."""
    before, after, whole = [], [], []
    fl.fit(step, toy(), LOADERS, epochs=3, hooks=(noting(whole),))
    hooks = (noting(before), Raises(at), noting(after))
    state = cut(hooks, epochs=3)
    assert len(after) == at - 1
    state = through(tmp_path, state) if saved else state
    state = fl.fit(step, state, LOADERS, epochs=3, hooks=hooks)
    assert before == after == whole
    assert (state.step, hooks_left(state)) == (6, [])


def test_the_best_weights_are_not_missed():
    """The updates are 1, 1, -5, 1: w is -1, -2, 3, 2, and -2 is best."""
    rates = fl.schedule(lambda i, total: (1, 1, -5, 1)[i])
    run = fl.pipeline(rates)(lambda model, x: model(x).mean())
    loaders, hooks = (ONES[:1], ONES[:1]), (Raises(2), fl.restore_best("valid/loss"))
    with pytest.raises(Boom) as caught:
        fl.fit(run, toy(), loaders, epochs=4, hooks=hooks)
    state = fl.fit(run, caught.value.state, loaders, epochs=4, hooks=hooks)
    assert (state.step, state.model.w.item()) == (4, -2.0)


def test_the_best_checkpoint_is_not_missed(tmp_path):
    """A checkpoint is made of the failure, and another process continues with it."""
    rates = fl.schedule(lambda i, total: (1, 1, -5, 1)[i])
    run = fl.pipeline(rates)(lambda model, x: model(x).mean())
    save = fl.checkpoint(tmp_path, best="valid/loss", on_exception=True)
    loaders, hooks = (ONES[:1], ONES[:1]), (Raises(2), fl.every(epochs=1)(save))
    with pytest.raises(Boom):
        fl.fit(run, toy(), loaders, epochs=4, hooks=hooks)
    state = fl.resume(tmp_path, toy())
    assert state.step == 2
    fl.fit(run, state, loaders, epochs=4, hooks=hooks)
    assert fl.restore(fl.best(tmp_path), toy()).model.w.item() == -2.0


def test_a_hook_that_is_left_out_afterwards_changes_nothing_for_the_others():
    seen = []
    bad, note = Raises(2), noting(seen)
    state = cut((bad, note), epochs=1)
    fl.fit(step, state, LOADERS, epochs=2, hooks=(note,))
    assert [at for at, *_ in seen] == [1, 2, 3, 4]


def test_with_fewer_hooks_than_were_left_all_are_called():
    seen = []
    state = cut((Raises(2), fl.every(steps=1)(noting([])), noting([])), epochs=1)
    fl.fit(step, state, LOADERS, epochs=2, hooks=(noting(seen),))
    assert [at for at, *_ in seen] == [2, 3, 4]
    assert fl.fit(step, cut((Raises(2), noting([])), epochs=1), LOADERS, epochs=2, hooks=()).step


def test_a_hook_that_is_left_may_raise_too():
    seen = []
    hooks = (Raises(1), Raises(1), noting(seen))
    state = cut(hooks, epochs=1)
    with pytest.raises(Boom) as caught:
        fl.fit(step, state, LOADERS, epochs=1, hooks=hooks)
    assert not seen
    fl.fit(step, caught.value.state, LOADERS, epochs=1, hooks=hooks)
    assert [at for at, *_ in seen] == [1, 2]


@pytest.mark.parametrize("change", [{"stop": "enough"}, {"ends": "epoch"}])
def test_a_hook_that_is_left_may_end_the_run_or_the_epoch(change):
    seen = []

    def end(state):
        return attrs.evolve(state, **change) if state.step == 1 else state

    def run(*hooks):
        try:
            return fl.fit(step, toy(), LOADERS, epochs=2, hooks=hooks)
        except Boom as error:
            return fl.fit(step, error.state, LOADERS, epochs=2, hooks=hooks)

    state, whole = run(Raises(1), end, noting(seen)), run(end, noting(mine := []))
    assert seen == mine and state.history == whole.history
    assert (state.step, state.epoch, state.stop) == (whole.step, whole.epoch, whole.stop)


def test_a_stop_before_the_hook_that_raised_is_kept():
    """A closing record follows, and what is due at the end is called."""
    seen, last = [], []

    def stop(state):
        return attrs.evolve(state, stop="enough") if state.step == 1 else state

    hooks = (stop, Raises(1), noting(seen), fl.at_end()(noting(last)))
    state = cut(hooks, epochs=2)
    state = fl.fit(step, state, LOADERS, epochs=2, hooks=hooks)
    assert (state.step, state.stop, [at for at, *_ in seen]) == (1, "enough", [1])
    assert len(last) == 1 and [record.closing for record in state.history] == [True]


@pytest.mark.parametrize("target", [{"epochs": 1}, {"steps": 1}])
def test_the_last_boundary_of_a_run_is_completed(target):
    seen, steps = [], 2 if "epochs" in target else 1
    hooks = (Raises(steps), fl.at_end()(noting(seen)))
    state = fl.fit(step, cut(hooks, **target), LOADERS, **target, hooks=hooks)
    assert [at for at, *_ in seen] == [state.step] == [steps]
    whole = fl.fit(step, toy(), LOADERS, **target, hooks=())
    assert_same(state, whole)


def test_an_evaluation_that_raises_leaves_its_whole_boundary():
    """No hook is called twice."""
    seen, broken = [], [math.nan]

    def valid():
        if broken:
            broken.pop()
            raise Boom
        return iter(ONES)

    loaders, hooks = {"train": ONES, "valid": valid}, (noting(seen),)
    state = cut(hooks, loaders, epochs=2)
    fl.fit(step, state, loaders, epochs=2, hooks=hooks)
    assert [at for at, *_ in seen] == [1, 2, 3, 4]


def test_hooks_in_another_order_are_found_by_their_names():
    """The hook that raised is listed last afterwards. It is not called again."""
    seen = []
    bad, note = Raises(2), fl.every(steps=1)(noting(seen))
    state = cut((bad, note), epochs=1)
    assert hooks_left(state) == ["<lambda>"]
    bad.at = 2
    fl.fit(step, state, LOADERS, epochs=2, hooks=(note, bad))
    assert [at for at, *_ in seen] == [1, 2, 3, 4]


def test_hooks_after_one_that_raised_see_the_record_of_the_start():
    """Without a record, all that is due before the first update is done again."""
    at, seen, early = fl.at_start() | fl.every(epochs=1), [], []
    hooks = (Raises(0), noting(seen), fl.at_start()(noting(early)))
    state = cut(hooks, epochs=1, evaluate_every=at)
    state = fl.fit(step, state, LOADERS, epochs=1, hooks=hooks, evaluate_every=at)
    assert [at for at, *_ in seen] == [0, 1, 2] and [at for at, *_ in early] == [0]
    assert [record.step for record in state.history] == [0, 2]
    hooks = (fl.at_start()(Raises(0)), fl.at_start()(noting(again := [])))
    state = cut(hooks, epochs=1)
    fl.fit(step, state, LOADERS, epochs=1, hooks=hooks)
    assert [at for at, *_ in again] == [0]
