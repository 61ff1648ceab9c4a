"""The parts: signatures of batches, capturable optimizers, the host's state, tracked slots."""

from collections import OrderedDict, UserDict, namedtuple

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop import CaptureError
from fnloop._graphs.capture import make_capturable, rebuild, signature, undo_capturable
from fnloop._graphs.guards import TrackedSlots, check_host_state, host_state, make_rollback
from fnloop.testing import toy


def test_signatures_differ_where_a_graph_could_not_be_reused():
    def key(batch):
        return signature(batch, [])

    x = torch.ones(2, 3)
    assert key((x, x)) == key((x + 1, x))
    different = [
        x,
        (x,),
        [x],
        (x, x),
        {"x": x},
        {"y": x},
        (x.double(),),
        (x[:1],),
        (x, None),
        (x, 1),
        (x, 2),
        (x, True),
        (x, "a"),
        ((x,),),
    ]
    assert len({key(batch) for batch in different}) == len(different)
    assert hash(key({"a": [x, {"b": (x, 2.5)}]}))


def test_a_batch_is_rebuilt_with_other_tensors():
    Pair = namedtuple("Pair", "x y")
    batch = Pair({"a": torch.ones(1), "n": 3}, [torch.zeros(2), (torch.ones(2), None)])
    tensors = []
    signature(batch, tensors)
    again = rebuild(batch, iter([t + 5 for t in tensors]))
    assert type(again) is Pair
    assert (again.x["a"].item(), again.x["n"], again.y[1][0].tolist(), again.y[1][1]) == (
        6.0,
        3,
        [6.0, 6.0],
        None,
    )


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, type("Named", (dict,), {})])
def test_a_mapping_is_rebuilt_with_its_class(kind):
    batch, tensors = kind(x=torch.ones(1), n=3), []
    key = signature(batch, tensors)
    again = rebuild(batch, iter([torch.zeros(1)]))
    assert type(again) is kind and dict(again) == {"x": torch.zeros(1), "n": 3}
    assert signature(again, []) == key
    assert [t.item() for t in (*tensors, batch["x"])] == [1.0, 1.0]


def test_an_optimizer_is_made_capturable_and_restored():
    model = nn.Linear(1, 1)
    for make, changed in ((torch.optim.AdamW, "capturable"), (torch.optim.SGD, "fused")):
        optimizer = make(model.parameters(), lr=0.1)
        before = optimizer.state_dict()["param_groups"]
        given = make_capturable([optimizer], torch.device("cpu"))
        (group,) = optimizer.param_groups
        assert (group["lr"].item(), group[changed]) == (pytest.approx(0.1), True)
        group["lr"].fill_(0.25)
        undo_capturable(given)
        assert optimizer.state_dict()["param_groups"] == [before[0] | {"lr": 0.25}]


def test_groups_that_share_a_learning_rate_get_one_each():
    a, b, rate = nn.Linear(1, 1), nn.Linear(1, 1), torch.tensor(0.1)
    optimizer = torch.optim.SGD(
        [{"params": a.parameters()}, {"params": b.parameters()}], lr=rate, fused=True
    )
    make_capturable([optimizer], torch.device("cpu"))
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is not second
    assert rate is not first


def test_a_learning_rate_that_was_given_as_a_tensor_stays_a_tensor():
    model, rate = nn.Linear(1, 1), torch.tensor(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    undo_capturable(make_capturable([optimizer], torch.device("cpu")))
    assert optimizer.param_groups[0]["lr"] is rate


def on_cuda(state):
    """Return the state as if the host and the device were two."""
    return attrs.evolve(state, backend=attrs.evolve(state.backend, device="cuda"))


def test_an_optimizer_that_counts_on_the_host_is_found():
    """Adagrad's step is on the host: on a device, a graph would never count it."""
    model = nn.Linear(1, 1)
    state = on_cuda(fl.TrainState.create(model, torch.optim.Adagrad(model.parameters()), seed=0))
    before, roll_back = host_state(state), make_rollback(state)
    for values in state.optimizer.state.values():
        values["step"] += 1
    with pytest.raises(
        CaptureError,
        match=r"the state of the optimizer \(parameter 0\).step is changed on the host",
    ):
        check_host_state(before, host_state(state))
    roll_back()
    assert state.optimizer.state[model.weight]["step"].item() == 0


@attrs.define
class Record:
    value: object


@pytest.mark.parametrize(
    ("slot", "change", "found"),
    [
        ([1, 2], lambda slot: slot.append(3), "state.slots.mine.2 is created"),
        (
            {"a": {"b": 1.0}},
            lambda slot: slot["a"].update(b=2.0),
            "state.slots.mine.a.b is changed on the host",
        ),
        (
            Record(1),
            lambda slot: setattr(slot, "value", 2),
            "state.slots.mine.value is changed on the host",
        ),
        (
            Record(torch.zeros(1)),
            lambda slot: setattr(slot, "value", torch.ones(1)),
            "mine.value is replaced",
        ),
        (
            nn.BatchNorm1d(1),
            lambda slot: slot.register_buffer("running_mean", torch.ones(1)),
            "mine.running_mean is replaced",
        ),
        (
            [torch.zeros(1)],
            lambda slot: slot[0].add_(1),
            "state.slots.mine.0 is changed on the host",
        ),
    ],
)
def test_a_change_in_a_slot_is_found_wherever_it_is(slot, change, found):
    state = on_cuda(attrs.evolve(toy(), slots={"mine": slot}))
    before = host_state(state)
    check_host_state(before, host_state(state))
    kept = (
        [slot.value]
        if isinstance(slot, Record)
        else list(slot.buffers())
        if isinstance(slot, nn.Module)
        else []
    )
    change(slot)
    with pytest.raises(CaptureError, match=found.replace(".", r"\.")):
        check_host_state(before, host_state(state))
    del kept  # alive until now, so that nothing else had its place in memory


def test_tracked_slots_note_which_are_read():
    slots = TrackedSlots({"a": 1, "b": 2, "c": 3})
    assert (slots["a"], slots.get("b"), slots.get("d"), {**slots}) == (
        1,
        2,
        None,
        {"a": 1, "b": 2, "c": 3},
    )
    assert slots.used == {"a", "b", "d"}
