"""Parameters that are replaced or added during a run, and losses of another model, on processes."""

import pytest
import torch
from joined import logged, rank, said, world
from torch import nn

import fnloop as fl
from fnloop._extensions.engines import one_message

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


def loss_fn(model, x):
    return sum((p * x).mean() for p in model.parameters())


def replace(state):
    old, state.model.a = state.model.a, nn.Parameter(state.model.a.detach().clone())
    for group in state.optimizer.param_groups:
        group["params"] = [state.model.a if p is old else p for p in group["params"]]


def grow(state):
    state.model.c = nn.Parameter(torch.zeros(1))
    state.optimizer.add_param_group({"params": [state.model.c]})


def lengthen(state):
    replace(state)
    with torch.no_grad():
        state.model.a.set_(torch.cat([state.model.a, torch.zeros(1)]))


CHANGES = {"replace": replace, "grow": grow, "lengthen": lengthen}
MEMBERS = {
    "plain": (), "clip": (fl.clip(1.0),), "ema": (fl.ema(0.5),),
    "retry": (fl.retry_on_oom(),), "guard": (fl.skip_nonfinite(),),
}  # fmt: skip


def weights(state):
    return {name: p.tolist() for name, p in fl.unwrap(state).named_parameters()}


def trained(change, *members, window=1, exact=False, model=None, loss_fn=loss_fn):
    """Train 6 updates of 2 batches each, in all processes together, with the mean 2 of x."""
    model, seen = Net() if model is None else model, []

    def hook(state):
        if state.step == 2:
            change(state)
        seen.append(weights(state))
        return state

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = fl.TrainState.create(model, optimizer, seed=0, exact=exact)
    step = fl.pipeline(fl.accumulate(2 * window // world()), *members)(loss_fn)
    data = [torch.full((1,), 1.0 + 2 * (i % 2)) for i in range(12 * window)]
    state = fl.fit(step, state, (data, data[:2]), hooks=(hook,))
    return seen, weights(fl.averaged(state)) if "ema" in state.slots else None


def table(folder):
    found = {
        f"{change}, {name}": trained(CHANGES[change], *members)
        for change in CHANGES
        for name, members in MEMBERS.items()
    }
    found |= {f"{name}, exact": trained(CHANGES[name], exact=True) for name in CHANGES}
    found |= {f"{name}, windows": trained(CHANGES[name], window=2) for name in CHANGES}
    return found


def test_two_processes_come_to_what_one_does(launched):
    """Of the parameters by hand: the gradient is 2, and 1 for each of two elements."""
    (one,), both = launched(table, 1), launched(table, 2)
    assert both[0] == both[1] == one
    seen, _ = one["replace, plain"]
    assert [each["a"] for each in seen] == [[-2.0], [-4.0], [-6.0], [-8.0], [-10.0], [-12.0]]
    seen, _ = one["grow, windows"]
    assert [each["c"] for each in seen[1:]] == [[0.0], [-2.0], [-4.0], [-6.0], [-8.0]]
    seen, average = one["lengthen, ema"]
    assert [each["a"] for each in seen[2:]] == [[-5.0, -1.0], [-6, -2], [-7, -3], [-8, -4]]
    assert average["a"] == [-7.0625, -3.0625]  # from -4: -4.5, -5.25, -6.125, -7.0625


def warned(folder):
    """Train a loss that uses what was replaced in every second update only."""
    calls = iter(range(100))

    def uses_it_at_first(model, x):
        return (model.b * x).mean() + ((model.a * x).mean() if next(calls) < 3 else 0.0)

    one_message.LARGEST, kept = 0, one_message.LARGEST  # it leaves alone what is not used
    with logged() as lines:
        trained(replace, loss_fn=uses_it_at_first)
    one_message.LARGEST = kept
    return [line for line in lines if "uses some parameters in some updates" in line]


def test_a_parameter_that_was_replaced_is_named_where_it_is_unused(launched):
    for found in launched(warned, 2):
        assert len(found) == 1 and "but not in others (a). With" in found[0]


def refusals(folder):
    other = Net()
    of_another = lambda model, x: (other.a * x).mean()
    forget = lambda state: setattr(state.model, "a", nn.Parameter(torch.zeros(1)))
    only_a = lambda model, x: (model.a * x).mean()
    different = lambda state: lengthen(state) if rank() else replace(state)
    return [
        said(lambda: trained(replace, loss_fn=of_another)),
        said(lambda: trained(replace, fl.clip(1.0), window=2, loss_fn=of_another)),
        said(lambda: trained(replace, exact=True, loss_fn=of_another)),
        said(lambda: trained(forget, loss_fn=only_a)),
        said(lambda: trained(different)),
    ]


def test_what_trains_nothing_is_an_error_in_every_process(launched):
    for first, *others, lost, differ in launched(refusals, 2):
        assert "so <lambda> would train nothing: <lambda> probably uses another model" in first
        assert others == [first, first]
        assert "would train nothing: this parameter is in no optimizer: a. Give it" in lost
        assert "diverged: they have parameters of different shapes" in differ


def taking_shapes(folder):
    """Train, restore a checkpoint of longer weights into the trained state, and continue."""
    found = {}
    for exact in (False, True):
        path = f"{folder}/{exact}-{world()}"

        def start(exact=exact):
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            return fl.TrainState.create(model, optimizer, seed=0, exact=exact)

        def longer(state, path=path):
            if state.step == 2:
                lengthen(state)
            if state.step == 4:
                fl.save(state, path)
            return state

        step = fl.pipeline(fl.accumulate(2 // world()), fl.ema(0.5))(loss_fn)
        data = [torch.full((1,), 1.0 + 2 * (i % 2)) for i in range(12)]
        whole = fl.fit(step, start(), data, hooks=(longer,))
        used = fl.fit(step, start(), data, steps=3, hooks=())
        a = used.model.a
        again = fl.fit(step, fl.restore(path, used, shapes="file"), data, epochs=1, hooks=())
        same = fl.unwrap(again).a is a
        found[str(exact)] = [weights(whole), weights(again), weights(fl.averaged(again)), same]
    return found


def test_a_state_that_was_trained_takes_the_shapes_of_a_checkpoint(launched):
    """As test_two_processes_come_to_what_one_does: "lengthen, ema"."""
    (one,), both = launched(taking_shapes, 1), launched(taking_shapes, 2)
    assert both[0] == both[1] == one
    for whole, again, average, same in one.values():
        assert whole == again and again["a"] == [-8.0, -4.0] and same
        assert average["a"] == [-7.0625, -3.0625]
