"""Parts that a middleware brings, where there are several processes."""

import pytest
import torch
from joined import rank, said
from launch import reads, written_by

import fnloop as fl
from fnloop._core.parts import Part
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow
COUNTS = (1, 2)
tensor = lambda rows: {"rows": torch.tensor(rows)}
rows = lambda saved: saved["rows"].tolist()
PARTS = (Part.of_slot("mine", tensor, rows, each=True), Part.of_slot("ours", tensor, rows))


def keeping(part, value):
    """A middleware that adds a value to its slot at each update."""

    def wrap(step):
        def keep(state, batch):
            state.slots[part.name].append(value())
            return step(state, batch)

        return keep

    return fl.Middleware(part.name, step=wrap, init=lambda state: [-1.0], brings=(part,))


STEP = fl.pipeline(*(keeping(part, lambda: 10.0 + rank()) for part in PARTS))(toy_loss)
BATCHES = [torch.ones(1)] * 6


def go(state, steps, step=STEP):
    return fl.fit(step, state, BATCHES, steps=steps, hooks=(), epochs=None)


def written(folder):
    fl.save(go(toy(), 2), folder / "a")
    wrong = Part.of_slot("mine", lambda kept: {"it": object() if rank() else 1}, rows, each=True)
    state = go(toy(), 1, fl.pipeline(keeping(wrong, float))(toy_loss))
    return said(lambda: str(fl.save(state, folder / "wrong")))


@reads(written, COUNTS)
def read(folder):
    found = {}
    for n in COUNTS:
        state = fl.restore(written_by(written, n, folder) / "a", toy())
        state = fl.restore(fl.save(state, folder / f"again {n}"), toy())  # nothing has brought them
        found[str(n)] = dict(go(state, 3).slots)
    return found


def test_each_process_gets_back_its_own_and_all_get_that_of_the_main_one(launched):
    (alone,) = launched(read, 1)
    assert alone["1"] == {"mine": [-1.0, 10.0, 10.0, 10.0], "ours": [-1.0, 10.0, 10.0, 10.0]}
    first, second = (found["2"] for found in launched(read, 2))
    assert first == {"mine": [-1.0, 10.0, 10.0, 10.0], "ours": [-1.0, 10.0, 10.0, 10.0]}
    assert second == {"mine": [-1.0, 11.0, 11.0, 11.0], "ours": [-1.0, 10.0, 10.0, 11.0]}


def test_on_another_number_of_processes_what_was_of_each_is_made_again(launched):
    (alone,) = launched(read, 1)
    assert alone["2"] == {"mine": [-1.0, 10.0], "ours": [-1.0, 10.0, 10.0, 10.0]}
    second = launched(read, 2)[1]
    assert second["1"] == {"mine": [-1.0, 11.0], "ours": [-1.0, 10.0, 10.0, 11.0]}


def test_a_part_that_one_process_cannot_save_fails_in_all(launched):
    first, second = launched(written, 2)
    assert "process 1 cannot save mine" in first and "TypeError: mine.it is a object" in first
    assert "CheckpointError" in second and "mine.it is a object" in second
