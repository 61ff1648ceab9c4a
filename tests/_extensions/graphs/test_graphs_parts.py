"""The parts: signatures of batches, capturable optimizers, the host's state, tracked slots."""

from collections import OrderedDict, UserDict, namedtuple

import attrs
import pytest
import torch
from torch import nn
from toy_runs import of

from fnloop import CaptureError
from fnloop._extensions.graphs.capture import make_capturable, rebuild, signature, undo_capturable
from fnloop._extensions.graphs.guards import (
    TrackedSlots,
    check_host_state,
    host_state,
    make_rollback,
)
from fnloop.testing import toy


def test_signatures_differ_where_a_graph_could_not_be_reused():
    key = lambda batch: signature(batch, [])
    x = torch.ones(2, 3)
    assert key((x, x)) == key((x + 1, x))
    different = [x, (x,), [x], (x, x), {"x": x}, {"y": x}, (x.double(),), (x[:1],), ((x,),)]
    different += [(x, other) for other in (None, 1, 2, True, "a")]
    assert len({key(batch) for batch in different}) == len(different)
    assert hash(key({"a": [x, {"b": (x, 2.5)}]}))


Pair = namedtuple("Pair", "x n")


@pytest.mark.parametrize("kind", [OrderedDict, UserDict, type("Named", (dict,), {}), Pair])
def test_a_batch_is_rebuilt_with_its_class_and_other_tensors(kind):
    batch, tensors = [kind(x=torch.ones(1), n=3), (torch.ones(2), None)], []
    key = signature(batch, tensors)
    one, (two, none) = again = rebuild(batch, iter([t + 5 for t in tensors]))
    found = one._asdict() if kind is Pair else dict(one)
    assert type(one) is kind and found == {"x": torch.tensor([6.0]), "n": 3}
    assert (two.tolist(), none) == ([6.0, 6.0], None)
    assert signature(again, []) == key and tensors[0].item() == 1.0


def test_groups_that_share_a_learning_rate_get_one_each():
    rate, groups = torch.tensor(0.1), [{"params": nn.Linear(1, 1).parameters()} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=rate, fused=True)
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
    state = on_cuda(of(nn.Linear(1, 1), torch.optim.Adagrad))
    before, roll_back = host_state(state), make_rollback(state)
    for values in state.optimizer.state.values():
        values["step"] += 1
    said = r"the state of the optimizer \(parameter 0\).step is changed on the host"
    with pytest.raises(CaptureError, match=said):
        check_host_state(before, host_state(state))
    roll_back()
    assert state.optimizer.state[state.model.weight]["step"].item() == 0


@attrs.define
class Record:
    value: object


def another(slot):
    slot.value = slot.value + 1


def another_buffer(slot):
    slot.register_buffer("running_mean", torch.ones(1))


@pytest.mark.parametrize(("slot", "change", "found"), [
    ([1, 2], lambda slot: slot.append(3), "mine.2 is created"),
    ({"a": {"b": 1}}, lambda slot: slot["a"].update(b=2), "mine.a.b is changed on the host"),
    (Record(1), another, "mine.value is changed on the host"),
    (Record(torch.zeros(1)), another, "mine.value is replaced"),
    (nn.BatchNorm1d(1), another_buffer, "mine.running_mean is replaced"),
    ([torch.zeros(1)], lambda slot: slot[0].add_(1), "mine.0 is changed on the host"),
])  # fmt: skip
def test_a_change_in_a_slot_is_found_wherever_it_is(slot, change, found):
    state = on_cuda(attrs.evolve(toy(), slots={"mine": slot}))
    before = host_state(state)
    check_host_state(before, host_state(state))
    # Alive until the end, so that nothing else has its place in memory.
    kept = [slot.value] if isinstance(slot, Record) else [*getattr(slot, "buffers", list)()]
    change(slot)
    with pytest.raises(CaptureError, match=rf"state\.slots\.{found}"):
        check_host_state(before, host_state(state))
    del kept


def test_tracked_slots_note_which_are_read():
    values = {"a": 1, "b": 2, "c": 3}
    slots = TrackedSlots(values)
    assert (slots["a"], slots.get("b"), slots.get("d"), {**slots}) == (1, 2, None, values)
    assert slots.used == {"a", "b", "d"}
