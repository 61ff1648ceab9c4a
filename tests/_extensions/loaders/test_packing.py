"""pack_collate: one row without padding; and fields that pad_collate leaves alone."""

import numpy as np
import pytest
import torch

from fnloop.data import pack_collate, pad_collate


def test_sequences_are_one_row():
    samples = [{"a": [1, 2, 3], "b": np.array([4, 5, 6])}, {"a": torch.tensor([7]), "b": [8]}]
    batch = pack_collate()(samples)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "a": [[1, 2, 3, 7]],
        "b": [[4, 5, 6, 8]],
        "position_ids": [[0, 1, 2, 0]],
        "document_ids": [[0, 0, 0, 1]],
    }


def test_a_sequence_without_a_name_is_input_ids():
    batch = pack_collate()([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64), [3]])
    assert (batch["input_ids"].tolist(), batch["document_ids"].tolist()) == (
        [[1, 2, 3]],
        [[0, 0, 2]],
    )


def test_other_fields_have_a_row_for_each_document():
    samples = [{"a": [1, 2], "label": 5, "name": "x"}, {"a": [3], "label": 6, "name": "y"}]
    batch = pack_collate(["a"])(samples)
    assert batch["a"].tolist() == [[1, 2, 3]]
    assert (batch["label"].tolist(), batch["name"]) == ([5, 6], ["x", "y"])


@pytest.mark.parametrize(("error", "keys", "samples", "message"), [
    (ValueError, None, [{"a": [1]}, {"b": [1]}], "not every sample of the batch has 'a'"),
    (ValueError, ["c"], [{"a": [1]}], "not every sample of the batch has 'c'"),
    (ValueError, None, [{"a": [1], "b": [1, 2]}], r"have the lengths \[1, 2\]: name those"),
    (ValueError, None, [{"position_ids": [1]}], "makes 'position_ids', which the samples"),
    (TypeError, None, [{"a": [1], "label": 5}], "field 'label' as sequences of numbers"),
    (TypeError, None, [torch.ones(2, 2)], "of one dimension"),
    (TypeError, None, [["x", "y"]], "lists of numbers, arrays or tensors"),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused(error, keys, samples, message):
    with pytest.raises(error, match=message):
        pack_collate(keys)(samples)


def test_fields_may_be_left_as_they_are():
    samples = [{"a": [1], "boxes": [[1, 2]], "text": "x"}, {"a": [1, 2], "boxes": [], "text": "y"}]
    batch = pad_collate(leave=["boxes"])(samples)
    assert batch["a"].tolist() == [[1, 0], [1, 2]]
    assert (batch["boxes"], batch["text"]) == ([[[1, 2]], []], ["x", "y"])
    assert pad_collate(leave=(1,))([([1], "x"), ([1, 2], "y")])[1] == ["x", "y"]
    with pytest.raises(ValueError, match="and not 'c'"):
        pad_collate(leave=["c"])(samples)
