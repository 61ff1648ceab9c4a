"""summary: one row for each module, and nothing changes."""

import pytest
import torch
from torch import nn
from toy_runs import of

import fnloop as fl


class Shared(nn.Module):
    """A module that is used twice, tied weights, a weight used alone, and a count of calls."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.twice = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3))
        self.lone, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 5)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        h = self.twice(self.twice(self.table(x)))
        return self.head(h @ self.lone.weight), {"hidden": h}


def test_rows():
    model = Shared()
    model.lone.requires_grad_(False)
    found = fl.summary(of(model), torch.zeros(2, dtype=torch.int64))
    rows = {row.name: row for row in found.rows}
    assert [*rows] == ["", "table", "twice", *(f"twice.{i}" for i in range(3)), "lone", "head"]
    # 15 of the table, 12 of the Linear, 6 of the BatchNorm, 9 not trained, and the bias of the head
    assert (rows[""].parameters, rows[""].trained) == (15 + 12 + 6 + 9 + 5, 15 + 12 + 6 + 5)
    assert (rows["head"].parameters, found.tied) == (5, {"head.weight": "table.weight"})
    assert (rows[""].output, rows["head"].output) == ("[2, 5], [2, 3]", "[2, 5]")
    assert (rows["twice.0"].calls, rows["twice.0"].output) == (2, "[2, 3]")
    assert (rows["lone"].calls, rows["lone"].output) == (0, "not called")
    buffers = 8 + 4 * (3 + 3) + 8  # calls, and those of the BatchNorm
    assert rows[""].weight_bytes == 4 * 47 + buffers
    # The table and the head once, the three inside of `twice` twice.
    assert rows[""].output_bytes == 4 * (6 + 10 + 6 * 6)
    assert rows["twice"].output_bytes == 4 * 6 * 6


def test_text_and_html():
    found = fl.summary(of(Shared()), torch.zeros(2, dtype=torch.int64), depth=1)
    lines = repr(found).splitlines()
    head = ["module class output", "number trained", "weights outputs"]
    assert [" ".join(part.split()) for part in lines[1].split("│")] == head
    assert lines[4].split()[:7] == ["twice", "Sequential", "[2,", "3]", "×2", "│", "18"]
    note = "head.weight is table.weight, and counts once; 3 inner modules are not shown:"
    assert lines[-2:] == [note, "give depth=2"]
    assert '<td style="text-align:left;white-space:pre">  twice</td>' in found._repr_html_()
    part = Shared()
    part.table.requires_grad_(False)
    assert "32" in repr(fl.summary(of(part), torch.zeros(2, dtype=torch.int64))).splitlines()[2]


PAIR = torch.ones(2, 3), torch.ones(2)


@pytest.mark.parametrize("batch", [PAIR[0], PAIR, [*PAIR], {"input": PAIR[0]}], ids=type)
def test_how_the_model_is_called(batch):
    assert fl.summary(of(nn.Linear(3, 4)), batch).rows[0].output == "[2, 4]"


def test_wrong_batches_and_lazy_modules():
    state = of(nn.Linear(3, 4))
    with pytest.raises(TypeError) as caught:
        fl.summary(state, {"x": torch.ones(2, 3)})
    assert "model(**batch) for a mapping" in caught.value.__notes__[0]
    assert not state.model._forward_hooks
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ValueError, match=r"the sizes of 0.weight, 0.bias, 1.running_mean and 1 "):
        fl.summary(of(lazy), torch.ones(2, 3))


def test_a_module_that_calls_none_of_those_inside_it_counts_for_itself():
    """The attention uses the weights of its projection, and does not call it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(8, 2), nn.Linear(8, 2)

        def forward(self, x):
            return self.out(self.attention(x, x, x, need_weights=False)[0])

    rows = {row.name: row for row in fl.summary(of(Net()), torch.ones(5, 1, 8)).rows}
    sizes = [rows[name].output_bytes for name in ("attention", "out", "")]
    assert rows["attention.out_proj"].output == "not called"
    assert sizes == [5 * 8 * 4, 5 * 2 * 4, 5 * (8 + 2) * 4]
