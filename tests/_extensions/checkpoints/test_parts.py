"""Parts of checkpoints that a middleware or a hook brings."""

import json

import attrs
import pytest
import torch
from crafted import craft
from safetensors.torch import load_file
from saved import names

import fnloop as fl
from fnloop._core.parts import Part
from fnloop._extensions.checkpoints.transfer import HeldPart
from fnloop.testing import assert_same, toy, toy_loss


class Seen:
    """The batches that were seen, in an object that only its part can save."""

    def __init__(self, rows=(), places=()):
        self.rows, self.places = [*rows], [*places]


SEEN = Part.of_slot(
    "seen",
    lambda seen: {"rows": torch.tensor(seen.rows), "places": seen.places},
    lambda saved: Seen(saved["rows"].tolist(), saved["places"]),
)


def noting(step):
    def note(state, batch):
        state.slots["seen"].rows.append(batch.item())
        state.slots["seen"].places.append(state.step)
        return step(state, batch)

    return note


def noted(*brings):
    return fl.Middleware("seen", step=noting, init=lambda state: Seen(), brings=brings)


BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
STEP, PLAIN = fl.pipeline(noted(SEEN))(toy_loss), fl.pipeline()(toy_loss)


def go(state, steps, step=STEP, hooks=(), **settings):
    return fl.fit(step, state, BATCHES, steps=steps, hooks=hooks, **settings)


def seen(state):
    kept = state.slots["seen"]
    return kept.rows, kept.places


ALL = [1.0, 2.0, 3.0, 4.0, 1.0], [0, 1, 2, 3, 4]


def test_a_part_is_saved_in_a_file_of_its_own_and_restored_in_mid_epoch(tmp_path):
    path = fl.save(go(toy(), 3), tmp_path / "a")
    assert load_file(path / "seen.safetensors")["seen.rows"].tolist() == [1.0, 2.0, 3.0]
    facts = json.loads((path / "state.json").read_text())
    assert facts["brought"]["seen"]["all"]["places"] == [0, 1, 2]
    assert facts["slots"] == {"seen": None}
    state = go(fl.restore(path, toy()), 5)
    assert seen(state) == ALL and state.model.w.item() == go(toy(), 5, PLAIN).model.w.item()


def test_a_checkpoint_with_such_a_part_is_of_a_newer_format_and_others_are_not(tmp_path):
    brought, plain = fl.save(go(toy(), 1), tmp_path / "a"), fl.save(toy(), tmp_path / "b")
    versions = [json.loads((p / "state.json").read_text()) for p in (brought, plain)]
    assert [facts["format_version"] for facts in versions] == [6, 1]
    assert ["brought" in facts for facts in versions] == [True, False]


def test_the_hook_saves_it_and_resume_finds_it(tmp_path):
    go(toy(), 3, hooks=(fl.every(steps=2)(fl.checkpoint(tmp_path)),))
    state = fl.resume(tmp_path, toy())
    assert seen(go(state, 5)) == ALL


def test_what_nothing_has_brought_is_kept_and_saved_again(tmp_path):
    state = fl.restore(fl.save(go(toy(), 2), tmp_path / "a"), toy())
    assert isinstance(state.slots["seen"], HeldPart)
    state = fl.restore(fl.save(go(state, 4, PLAIN), tmp_path / "b"), toy())
    assert names(tmp_path / "b") == names(tmp_path / "a")
    assert seen(go(state, 5)) == ([1.0, 2.0, 1.0], [0, 1, 4])  # 3 and 4 had no such middleware


def test_an_evaluation_does_not_take_what_is_kept(tmp_path):
    state = fl.restore(fl.save(go(toy(), 3), tmp_path / "a"), toy())
    watched = fl.Middleware(
        "seen", forward=lambda step: step, init=lambda state: Seen(), brings=(SEEN,)
    )
    fl.evaluate(fl.pipeline(watched)(toy_loss), state, BATCHES)
    assert seen(go(state, 5)) == ALL


def test_a_middleware_that_does_not_bring_the_part_is_refused(tmp_path):
    state = fl.restore(fl.save(go(toy(), 2), tmp_path / "a"), toy())
    with pytest.raises(ValueError, match=r"has a part seen where there is a Seen now.*restore"):
        go(state, 4, fl.pipeline(noted())(toy_loss))


def test_a_snapshot_has_its_own_and_knows_the_part(tmp_path):
    state = go(toy(), 3)
    before = fl.snapshot(state)
    assert seen(go(state, 5)) == ALL and seen(before) == ([1.0, 2.0, 3.0], [0, 1, 2])
    state = fl.restore(fl.save(before, tmp_path / "a"), toy())
    assert_same(fl.snapshot(state), state)
    assert seen(go(fl.snapshot(state), 5)) == ALL


def test_a_hook_brings_the_part_of_its_slot(tmp_path):
    class Watch(fl.Hook):
        slot, brings = "seen", (SEEN,)

        def begin(self, state):
            slots = {"seen": Seen(), **state.slots}
            return attrs.evolve(state, slots=slots)

        def __call__(self, state):
            state.slots["seen"].rows.append(state.model.w.item())
            state.slots["seen"].places.append(state.step)
            return state

    path = fl.save(go(toy(), 2, PLAIN, hooks=(fl.every(steps=1)(Watch()),)), tmp_path / "a")
    state = go(fl.restore(path, toy()), 3, PLAIN, hooks=(fl.every(steps=1)(Watch()),))
    assert seen(state) == ([-1.0, -3.0, -6.0], [1, 2, 3])


def test_a_part_is_among_the_slots_of_a_partial_checkpoint(tmp_path):
    state = go(toy(), 3)
    slots = fl.save(state, tmp_path / "a", only=("slots",))
    model = fl.save(state, tmp_path / "b", only=("model",))
    assert "seen.safetensors" in names(slots) and "seen.safetensors" not in names(model)
    state = fl.restore(slots, toy(), only=("slots",))
    assert seen(go(state, 1)) == ([1.0, 2.0, 3.0, 1.0], [0, 1, 2, 0])


@pytest.mark.parametrize("name", ["", "a b", "model", "Slots", "own", "training", "a/b"])
def test_a_name_must_be_one_for_a_file(name):
    with pytest.raises(ValueError, match=r"Part\.of_slot expects name"):
        Part.of_slot(name, vars, dict)


def test_a_checkpoint_that_names_a_part_as_no_part_can_be_named_is_refused(tmp_path):
    path = fl.save(go(toy(), 1), tmp_path / "a")
    craft(path, facts=lambda made: made["brought"].update(model={"all": {}}))
    with pytest.raises(fl.CheckpointError, match=r"expects name as a name for a file.*'model'"):
        fl.restore(path, toy())


def test_a_slot_may_have_the_name_of_an_entry(tmp_path):
    part = Part.of_slot("history", vars, lambda saved: Seen(**saved))
    step = fl.pipeline(fl.Middleware("history", init=lambda state: Seen([1.0]), brings=(part,)))
    path = fl.save(go(toy(), 1, step(toy_loss)), tmp_path / "a")
    state = go(fl.restore(path, toy()), 2, step(toy_loss))
    assert state.slots["history"].rows == [1.0] and len(state.history) == 2


def test_what_is_not_plain_data_is_refused_before_the_first_update(tmp_path):
    part = Part.of_slot("seen", lambda seen: {"it": object()}, dict)
    step, called = fl.pipeline(noted(part))(toy_loss), []
    hook = fl.every(epochs=1)(fl.checkpoint(tmp_path))
    with pytest.raises(fl.CheckpointError, match=r"seen\.it is a object.*plain data"):
        go(toy(), 1, step, hooks=(hook, called.append))


def test_what_a_part_raises_names_the_checkpoint_and_leaves_the_state(tmp_path):
    path = fl.save(go(toy(), 3), tmp_path / "a")
    part = Part.of_slot("seen", vars, lambda saved: saved["rowz"])
    state = fl.restore(path, toy())
    with pytest.raises(KeyError, match="rowz") as caught:
        go(state, 5, fl.pipeline(noted(part))(toy_loss))
    assert f"the part 'seen' of {path}" in "".join(caught.value.__notes__)
    assert seen(go(state, 5)) == ALL


def test_states_are_compared_by_what_their_parts_save(tmp_path):
    state = go(toy(), 3)
    other = fl.snapshot(state)
    assert not fl.debug.diff(state, other)
    other.slots["seen"].places[2] = 7
    (found,) = fl.debug.diff(state, other).findings
    assert found.name == "brought.seen.all.places.2"
    other.slots["seen"].places[2], other.slots["seen"].rows[0] = 2, 5.0
    assert [f.name for f in fl.debug.diff(state, other).findings] == ["seen.seen.rows"]


def test_a_middleware_refuses_what_is_not_a_part():
    with pytest.raises(TypeError, match=r"Middleware.*expects brings as parts, such as"):
        fl.Middleware("a", brings=(1,))
