"""pack_collate: one row without padding, whose loss is that of padded rows."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.data import bucketed, pack_collate, pad_collate


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


@pytest.mark.parametrize(
    ("error", "keys", "samples", "message"),
    [
        (ValueError, None, [{"a": [1]}, {"b": [1]}], "not every sample of the batch has 'a'"),
        (ValueError, ["c"], [{"a": [1]}], "not every sample of the batch has 'c'"),
        (ValueError, None, [{"a": [1], "b": [1, 2]}], r"have the lengths \[1, 2\]: name those"),
        (ValueError, None, [{"position_ids": [1]}], "makes 'position_ids', which the samples"),
        (TypeError, None, [{"a": [1], "label": 5}], "field 'label' as sequences of numbers"),
        (TypeError, None, [torch.ones(2, 2)], "of one dimension"),
        (TypeError, None, [["x", "y"]], "lists of numbers, arrays or tensors"),
    ],
)
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


# --- a model of text


class Small(nn.Module):
    """A layer of causal attention, with positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 20)
        self.double()

    def forward(self, ids, places, mask):
        q, k, v = self.qkv(self.tokens(ids) + self.places(places)).chunk(3, -1)
        return self.head(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def packed_loss(model, batch):
    ids, document = batch["input_ids"], batch["document_ids"]
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    mask = mask & (document[:, :, None] == document[:, None])
    logits = model(ids, batch["position_ids"], mask)
    loss = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    return loss, {"weight": ids.numel()}


def padded_loss(model, batch):
    ids, targets = batch["input_ids"], batch["targets"]
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits = model(ids, torch.arange(ids.shape[1]), mask)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, {"weight": (targets != -100).sum()}


def test_packed_and_padded_rows_train_the_same_weights():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 16, (40,), generator=draw).tolist()
    texts = [torch.randint(0, 20, (n + 1,), generator=draw) for n in lengths]
    samples = [{"input_ids": text[:-1], "targets": text[1:]} for text in texts]
    found = []
    for loss_fn, collate in (
        (packed_loss, pack_collate()),
        (padded_loss, pad_collate({"input_ids": 0, "targets": -100})),
    ):
        batches = bucketed(lengths, max_items=48)
        loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate)
        model = Small()
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.5), seed=0)
        step = fl.pipeline(fl.accumulate(2))(loss_fn)
        found.append(fl.fit(step, state, loader, epochs=2, hooks=()))
    packed, padded = found
    for one, other in zip(packed.model.parameters(), padded.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert packed.history["train/loss"] == pytest.approx(padded.history["train/loss"], abs=1e-9)
    assert packed.history[-1].items == padded.history[-1].items == 2 * sum(lengths)
