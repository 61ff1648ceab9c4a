"""Which records are new since a hook last looked: ``Hook.new_records``."""

import attrs
from toy_runs import fit

import fnloop as fl


@attrs.frozen
class Looks(fl.Hook):
    seen: list = attrs.field(factory=list)

    def __call__(self, state):
        self.seen.append([record.step for record in self.new_records(state)])
        return state


def test_each_record_is_new_once_and_those_before_the_run_are_not():
    hook = Looks()
    state = fit(hook, train=2, epochs=2)
    fit(hook, train=2, state=state, epochs=3)
    assert hook.seen == [[], [2], [], [4], [], [6]]
    rarely = Looks()
    fit(fl.every(epochs=2)(rarely), train=1, epochs=5)
    assert rarely.seen == [[1, 2], [3, 4]]  # all records since


def test_after_a_rollback_the_records_that_follow_the_snapshot_are_new(back_once):
    hook = Looks()
    fit(hook, back_once, train=1, epochs=4)
    assert hook.seen == [[1], [2], [3], [2], [3], [4]]
