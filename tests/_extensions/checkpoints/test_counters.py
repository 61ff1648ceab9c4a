"""Where a run is and what it does next, as checkpoints have it."""

import json

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._core.runs import Append, Boundary, Call, Collect, End, Flush, Meet, Start, Update
from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints.counters import Cursor, decode_todo, encode_todo, todo_of_before
from fnloop.extend import Stop
from fnloop.testing import assert_same, toy, toy_loss

BATCHES = [torch.ones(1)] * 3
STEP = fl.pipeline()(toy_loss)


def go(steps):
    return fl.fit(STEP, toy(), BATCHES, steps=steps, hooks=())


def test_it_says_where_a_run_is():
    cursor = Cursor.of(attrs.evolve(go(4), skipped=2))
    assert (cursor.step, cursor.epoch, cursor.batch) == (4, 1, 1)
    assert cursor.place == [6, 1, 1]
    assert cursor.position["batch"] == 1 and cursor.generators is not None
    assert Cursor.of(go(3)).generators is None  # an epoch begins with its seed alone


def test_it_comes_back_from_a_checkpoint_as_it_was(tmp_path):
    state = go(4)
    found = Cursor.of(fl.restore(fl.save(state, tmp_path / "a"), toy()))
    for name in (*TrainState.COUNTERS, "position"):
        assert getattr(found, name) == getattr(Cursor.of(state), name), name
    assert repr(found.generators.to_parts()) == repr(state.generators.to_parts())


@pytest.mark.parametrize("name", TrainState.COUNTERS)
def test_states_that_differ_in_a_counter_are_not_the_same(name):
    other = {"": 1} if name == "updates" else 7
    with pytest.raises(AssertionError, match=f"^{name}: "):
        assert_same(toy(), attrs.evolve(toy(), **{name: other}))


# --- what a run does next


TODO = (
    Start(), Update(), Boundary(ended=True), Append("evaluation", ("valid", "bleu")),
    Collect(("valid",)), Call("boundary", 2), Meet(ended=False), End(), Flush(Stop("a", "limit")),
)  # fmt: skip


def test_what_is_next_can_be_written():
    found = decode_todo(json.loads(json.dumps(encode_todo(TODO))))
    assert found == TODO and Stop.kind_of(found[-1].stop) == "limit"


WRONG = [
    None, {}, "End", 1, [{}], ["End"], [{"do": "Sing"}], [{"do": "Boundary"}],
    [{"do": "Boundary", "ended": 0}], [{"do": "Append", "kind": "other", "names": []}],
    [{"do": "Append", "kind": "epoch", "names": [1]}], [{"do": "Collect", "loaders": "valid"}],
    [{"do": "Call", "stage": "end", "nth": True}], [{"do": "Call", "stage": "end", "nth": -1}],
    [{"do": "Flush", "stop": 1}],
]  # fmt: skip


@pytest.mark.parametrize("saved", WRONG, ids=str)
def test_what_is_next_cannot_be_read_from_something_else(saved):
    with pytest.raises(TypeError):
        decode_todo(saved)


@pytest.mark.parametrize(("facts", "events", "todo"), [
    ({}, set(), ()), ({"news": []}, set(), ()),
    ({"news": ["pending", "update"]}, {"update"}, (Boundary(),)),
    ({"news": ["stop: enough", "record"]}, {"record"}, (End(), Flush("enough"))),
    ({"news": ["pending", "stop: enough"]}, set(), (Boundary(), End(), Flush("enough"))),
    ({"news": ["end"], "left": [{"flush": True}]}, {"end"}, (Flush(),)),
    ({"left": [{"boundary": True}, {"end": None}]}, set(), (Boundary(), End(), Flush())),
])  # fmt: skip
def test_older_checkpoints_say_what_was_left(facts, events, todo):
    assert todo_of_before(facts) == (events, todo)


@pytest.mark.parametrize("left", [1, "end", [1], [{"boundary": 0}], [{"end": 1}]])
def test_what_was_left_cannot_be_read_from_something_else(left):
    with pytest.raises(TypeError):
        todo_of_before({"left": left})
