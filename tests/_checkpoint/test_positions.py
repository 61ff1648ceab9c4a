"""The position of the training loader in a checkpoint."""

import attrs
import pytest
import torch
from crafted import craft

import fnloop as fl
from fnloop.testing import toy

POSITION = {
    "epoch": 0, "batch": 3, "shards": 1, "keeper": "Stream", "next": 7,
    "state": {"at": 1 << 70, "rng": torch.tensor([1, 2], dtype=torch.uint8), 3: (None, 0.5)},
}  # fmt: skip


def saved(tmp_path, **changes):
    state = attrs.evolve(toy(), batch=3, position={**POSITION, **changes})
    return fl.save(state, tmp_path / "a")


def test_it_is_kept_as_it_was(tmp_path):
    found = fl.restore(saved(tmp_path), toy()).position
    assert found.pop("state").pop("rng").tolist() == [1, 2]
    assert found == {k: v for k, v in POSITION.items() if k != "state"}
    again = fl.restore(tmp_path / "a", toy(), only=("model",))
    assert again.position is None


def test_that_of_a_share_is_for_as_many_processes_only(tmp_path):
    assert fl.restore(saved(tmp_path, shards=2), toy()).position is None


@pytest.mark.parametrize("name", ["epoch", "batch", "shards", "keeper", "next"])
def test_one_of_other_types_is_refused(name, tmp_path):
    path = craft(saved(tmp_path), facts=lambda facts: facts["positions"][0].update({name: [1]}))
    with pytest.raises(fl.CheckpointError, match=f"{name} of a position of the loader"):
        fl.restore(path, toy())


@pytest.mark.parametrize("crafted", [3, [3], [{}], "text", None])
def test_one_of_another_form_is_refused(crafted, tmp_path):
    path = craft(saved(tmp_path), facts=lambda facts: facts.update(positions=crafted))
    with pytest.raises(fl.CheckpointError):
        fl.restore(path, toy())
