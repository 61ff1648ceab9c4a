"""How what was saved of a model differs from the model, and what is loaded of it."""

import torch

from fnloop._extensions.checkpoints.model import diff

ZEROS = lambda *shape, dtype=torch.float32: torch.zeros(*shape, dtype=dtype)
THEIRS = {"a": ZEROS(2), "b": ZEROS(3), "c": ZEROS(1), "old": ZEROS(1), "m._extra_state": ZEROS(9)}
MINE = {
    "a": ZEROS(2, dtype=torch.float64),
    "b": ZEROS(4),
    "c": ZEROS(1),
    "new": ZEROS(1),
    "m._extra_state": ZEROS(5),
}


def test_each_name_is_of_one_kind_and_the_rest_fits():
    found = diff(THEIRS, MINE)
    assert (found.missing, found.unknown) == (["new"], ["old"])
    assert (found.shapes, found.dtypes) == (["b"], ["a"])
    assert [*found.fitting] == ["a", "c", "m._extra_state"]
    assert found.explain("missing", "shapes") == (
        "missing in the checkpoint: new; of another shape: b: (3,) saved, (4,) here"
    )
    assert found.explain("dtypes") == (
        "of another dtype: a: torch.float32 saved, torch.float64 here"
    )


def test_what_the_model_takes_in_another_shape_fits():
    assert [*diff(THEIRS, MINE, resizes=lambda name: name == "b").fitting][:2] == ["a", "b"]
    made = {name: THEIRS[name] for name in ("b", "old")}  # those that are made as in the file
    found = diff(THEIRS, MINE, made)
    assert (found.shapes, found.unknown, [*found.fitting]) == ([], [], [*THEIRS])
    assert diff(THEIRS, THEIRS).explain("missing", "unknown", "shapes", "dtypes") == ""
