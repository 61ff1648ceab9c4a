"""@middleware(ring, init=...): a decorated function that has a slot."""

import pytest
from toy_runs import fitted, kept, noting

import fnloop as fl
from fnloop.testing import toy


@fl.middleware("update", init=lambda state: {"total": 0})
def totalled(scale):
    def wrap(step):
        def adding(state, batch):
            state, out = step(state, batch)
            state.slots["totalled"]["total"] += scale * len(batch)
            return state, out

        return adding

    return wrap


@pytest.mark.parametrize("how", ["as it is", "snapshot", "checkpoint"])
def test_a_decorated_function_has_a_slot(how, tmp_path):
    note, found = noting(lambda state: state.slots["totalled"]["total"])
    state = fitted([1] * 2, totalled(10), hooks=(note,))
    state = fitted([1] * 3, totalled(10), state=kept(how, state, toy(), tmp_path), hooks=(note,))
    assert found == [10, 20, 30, 40, 50]
    assert repr(totalled(10)) == "totalled(10)" and totalled(10) == totalled(10)


@pytest.mark.parametrize("init", [3, "a", lambda: 0, lambda state, more: 0])
def test_a_slot_is_made_by_a_function_of_the_state(init):
    with pytest.raises(TypeError, match=r'middleware\("update"\) expects init as a function state'):
        fl.middleware("update", init=init)


def test_a_record_makes_its_slot_itself():
    @fl.middleware("update", init=lambda state: 0)
    def whole():
        return fl.Middleware("whole")

    with pytest.raises(TypeError, match=r"whole\(\) returned a Middleware, which makes its slot"):
        whole()
