"""What is frozen and trained again on several processes: the same as on one."""

import pytest
import torch
import torch.distributed as dist
from process_problems import default_dtype, entropy, loader, whole, world
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl

pytestmark = pytest.mark.slow
STEP = fl.pipeline(fl.schedule(fl.schedules.linear()))(entropy)


def state_of(shard, norm=False):
    torch.manual_seed(0)
    first = nn.BatchNorm1d(8) if norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    if shard:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return fl.TrainState.create(model, optimizer, seed=3)


def weights(state):
    return [whole(p).detach().flatten().tolist() for p in state.model.parameters()]


@fl.when(lambda state: state.step == 17)
def thaw(state):
    """Train everything, from the middle of an epoch on."""
    return fl.unfreeze(state, "*", lr=0.05)


def script(state, path):
    """Train the head; then the second layer alone; then that and, from a hook on, everything."""
    found = []
    for name, change, hooks in (
        ("head", lambda s: fl.freeze(s, "0", "2"), ()),
        ("second", second_alone, ()),
        ("all", lambda s: s, (thaw,)),
    ):
        state = fl.fit(STEP, change(state), loader(), epochs=1, hooks=hooks, phase=name)
        if name == "head":
            fl.save(state, path)
        found.append(weights(state))
    return found


def second_alone(state):
    return fl.unfreeze(fl.freeze(state, "4"), "2.*", lr=0.2)


def freezing(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        for kind, shard in (("whole", False), ("sharded", world() > 1)):
            path = folder / kind
            found[kind] = script(state_of(shard), path)
            resumed = second_alone(fl.restore(path, state_of(shard)))
            resumed = fl.fit(STEP, resumed, loader(), epochs=1, hooks=(), phase="second")
            found[f"{kind} resumed"] = weights(resumed)
        state = fl.freeze(state_of(False, norm=True), "0", "1")
        state = fl.fit(STEP, state, loader(), epochs=1, hooks=())
        found["norm"] = weights(state)
        found["tracked"] = int(state.model[1].num_batches_tracked)
        # All but one process begin the second phase with padding.
        few = [*loader(size=6)][:1]
        state = fl.freeze(state_of(False), "0", "2")
        state = fl.fit(STEP, state, loader(), epochs=1, hooks=(), phase="a")
        state = fl.unfreeze(fl.freeze(state, "4"), "0", lr=0.1)
        state = fl.fit(STEP, state, few, epochs=1, hooks=(), phase="b")
        found["padded"] = weights(state)
    return found


def close(a, b):
    return all(
        x == pytest.approx(y, rel=1e-9, abs=1e-12) for x, y in zip(a, b, strict=True)
    ) and len(a) == len(b)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_phases_train_the_same_on_any_number_of_processes(launched, n, kind):
    (one,) = launched(freezing, 1)
    head, second, everything = one[kind]
    for found in launched(freezing, n):
        for phase, expected in zip(found[kind], one[kind], strict=True):
            assert close(phase, expected)
        assert found[f"{kind} resumed"] == found[kind][1]
    start = head[0]
    assert second[0] == start and second[4] == head[4]
    assert second[2] != head[2]
    assert all(a != b for a, b in zip(everything, second, strict=True))


@pytest.mark.parametrize("n", [2, 3])
def test_frozen_norm_layers_take_no_statistics(launched, n):
    (one,) = launched(freezing, 1)
    for found in launched(freezing, n):
        assert found["tracked"] == one["tracked"] == 0
        assert close(found["norm"], one["norm"])


@pytest.mark.parametrize("n", [2, 3])
def test_a_process_may_begin_with_padding(launched, n):
    (one,) = launched(freezing, 1)
    for found in launched(freezing, n):
        assert close(found["padded"], one["padded"])
