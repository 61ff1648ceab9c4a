"""Parameters that are replaced or added during a run count from the next update on as any other."""

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl

ONE = torch.ones(1)
AT = 2  # the update after which they are replaced


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


def loss_fn(model, x):
    return sum((p * x).sum() for p in model.parameters())


def optimizers_of(model, several=False):
    if several:
        return {k: torch.optim.SGD([getattr(model, k)], lr=1.0, momentum=0.5) for k in "ab"}
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def listed(optimizer):
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer.values()]


def put(optimizers, old, new):
    """Put a parameter in the place of another, and the optimizer's state of it too."""
    for one in optimizers:
        for group in one.param_groups:
            if any(p is old for p in group["params"]):
                group["params"] = [new if p is old else p for p in group["params"]]
                held = one.state.pop(old)["momentum_buffer"]
                one.state[new] = {"momentum_buffer": torch.zeros_like(new)}
                one.state[new]["momentum_buffer"][: len(held)] = held


def replace(model, optimizers):
    old, model.a = model.a, nn.Parameter(model.a.detach().clone())
    put(optimizers, old, model.a)


def lengthen(model, optimizers):
    old, model.a = model.a, nn.Parameter(torch.cat([model.a.detach(), ONE]))
    put(optimizers, old, model.a)


def grow(model, optimizers):
    model.c = nn.Parameter(ONE.clone())
    optimizers[0].param_groups[0]["params"].append(model.c)


def add_group(model, optimizers):
    model.c = nn.Parameter(ONE.clone())
    optimizers[0].add_param_group({"params": [model.c], "lr": 0.5})


def drop(model, optimizers):
    optimizers[-1].param_groups[-1]["params"].pop()
    del model.b


CHANGES = (replace, lengthen, grow, add_group, drop)


def weights(model):
    return {name: p.tolist() for name, p in model.named_parameters()}


def by_hand(change, several=False, clip=None, window=1, decay=None, updates=5):
    """Return the weights after each update, and the averages."""
    model, seen, averages = Pair(), [], []
    optimizers = listed(optimizers_of(model, several))
    average = {k: p.detach().clone() for k, p in model.named_parameters()}
    for i in range(updates):
        named = dict(model.named_parameters())
        for k, p in named.items():
            p.grad = None
            if k not in average or average[k].shape != p.shape:
                average[k] = p.detach().clone()
        average = {k: t for k, t in average.items() if k in named}
        for j in range(window):
            (loss_fn(model, ONE * (i * window + j)) / window).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in optimizers:
            one.step()
        if decay is not None:
            for k, p in named.items():
                average[k].lerp_(p.detach(), 1 - decay)
        if i + 1 == AT:
            change(model, optimizers)
        seen.append(weights(model))
        averages.append({k: t.tolist() for k, t in average.items()})
    return (seen, averages) if decay is not None else seen


def batches(window=1, updates=5):
    return [ONE * i for i in range(window * updates)]


def changing(change, seen):
    """Return a hook that changes the parameters after an update, and notes the weights."""

    def hook(state):
        if state.step == AT:
            change(state.model, listed(state.optimizer))
        seen.append(weights(state.model))
        return state

    return hook


def start(several=False):
    model = Pair()
    return fl.TrainState.create(model, optimizers_of(model, several), seed=0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("members", "settings"), [
    ((), {}), ((fl.clip(1.0),), {"clip": 1.0}), ((fl.accumulate(2),), {"window": 2}),
    ((fl.accumulate(2), fl.clip(0.5)), {"window": 2, "clip": 0.5}),
    ((fl.skip_nonfinite(), fl.spike_guard(ratio=1e9)), {}),
    ((fl.spike_guard(ratio=1e9, then="back"),), {}), ((fl.sam(0.1),), {}),
    ((fl.retry_on_oom(),), {}),
])  # fmt: skip
def test_a_hook_changes_them(members, settings, change, several):
    seen = []
    step = fl.pipeline(*members)(loss_fn)
    data = batches(settings.get("window", 1))
    fl.fit(step, start(several), data, hooks=(changing(change, seen),))
    assert seen == by_hand(change, several, **settings)


def between_epochs(step, change, seen):
    one_each = lambda epoch, batch: batches()[epoch:][:1]
    for state in fl.run(step, start(), one_each, epochs=5, hooks=()):
        changing(change, seen)(state)


def between_calls(step, change, seen):
    state = start()
    for x in batches():
        state, _ = step(state, x)
        changing(change, seen)(state)


def between_two_runs(step, change, seen):
    state = fl.fit(step, start(), batches(), steps=AT, hooks=(changing(change, seen),))
    fl.fit(step, state, batches(), steps=5, hooks=(changing(lambda *_: None, seen),))


def by_a_step_around(step, change, seen):
    """A middleware of the update ring, which is called around the whole update."""

    @fl.middleware("update")
    def around():
        def wrap(step):
            def changed(state, batch):
                state, out = step(state, batch)
                changing(change, seen)(state)
                return state, out

            return changed

        return wrap

    fl.fit(fl.pipeline(around(), fl.clip(1.0))(loss_fn), start(), batches(), hooks=())


def by_evolve(step, change, seen):
    """A hook returns a state with another model and another optimizer."""

    def hook(state):
        if state.step == AT:
            was, model = state.model, Pair()
            model.load_state_dict(was.state_dict())
            optimizer = optimizers_of(model)
            optimizer.load_state_dict(state.optimizer.state_dict())
            state = attrs.evolve(state, model=model, optimizer=optimizer)
        return changing(change, seen)(state)

    fl.fit(step, start(), batches(), hooks=(hook,))


def in_a_snapshot(step, change, seen):
    state = fl.fit(step, start(), batches(), steps=AT, hooks=(changing(change, seen),))
    fl.fit(step, fl.snapshot(state), batches(), steps=5, hooks=(changing(lambda *_: None, seen),))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", [
    between_epochs, between_calls, between_two_runs, by_a_step_around, by_evolve, in_a_snapshot,
])  # fmt: skip
def test_they_may_change_anywhere(where, change):
    seen = []
    where(fl.pipeline(fl.clip(1.0))(loss_fn), change, seen)
    assert seen == by_hand(change, clip=1.0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_averages_follow_them(change, several):
    """What has another shape, or is new, begins at its value; the rest continues."""
    found, seen = [], []

    def hook(state):
        found.append({k: t.tolist() for k, t in state.slots["ema"].items()})
        return state

    hooks = (hook, changing(change, seen))
    step = fl.pipeline(fl.ema(0.5))(loss_fn)
    state = fl.fit(step, start(several), (batches(), [ONE]), hooks=hooks)
    expected, averages = by_hand(change, several, decay=0.5)
    assert (seen, found) == (expected, averages)
    assert weights(fl.averaged(state).model) == averages[-1]
    last = sum(sum(values) for values in averages[-1].values())
    assert state.history["valid/ema/loss"][-1] == last


@pytest.mark.parametrize(("change", "expected"), [
    (replace, {"a": [-0.5], "b": [-0.5]}), (lengthen, {"a": [-1.0, 1.0], "b": [-0.5]}),
    (grow, {"a": [-0.5], "b": [-0.5], "c": [1.0]}), (drop, {"a": [-0.5]}),
])  # fmt: skip
def test_before_the_next_update_what_is_new_is_that_of_the_model(change, expected):
    """The weights are -1 after one update, and their average is (0 - 1) / 2."""
    step = fl.pipeline(fl.ema(0.5))(loss_fn)
    state = fl.fit(step, start(), [ONE], hooks=())
    change(state.model, [state.optimizer])
    assert weights(fl.averaged(state).model) == expected
    total = sum(sum(values) for values in expected.values())
    assert fl.evaluate(step, state, [ONE])["ema/loss"] == total


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_resumed_from_between_the_change_and_the_next_update(tmp_path, change, several):
    step, whole = fl.pipeline(fl.ema(0.5), fl.clip(1.0))(loss_fn), []
    saving = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=None))
    hooks = (changing(change, whole), saving)
    state = fl.fit(step, start(several), batches(), hooks=hooks)
    for at in range(1, 5):
        cut, made = whole[:at], start(several)
        made, _ = step(made, ONE)  # other values, which are overwritten
        if at >= AT:
            change(made.model, listed(made.optimizer))
        other = fl.restore(tmp_path / f"step-{at:08}", made)
        left = change if at < AT else lambda *_: None
        other = fl.fit(step, other, batches(), epochs=1, hooks=(changing(left, cut),))
        assert cut == whole
        assert weights(fl.averaged(other).model) == weights(fl.averaged(state).model)


def before_backward(change, ring="gradient"):
    """Return a middleware that changes the parameters before an update makes its gradients."""

    @fl.middleware(ring)
    def changing_them():
        def wrap(step):
            def changed(state, batch):
                if state.step == AT:
                    change(state.model, listed(state.optimizer))
                return step(state, batch)

            return changed

        return wrap

    return changing_them()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("members", "settings"), [
    ((), {}), ((fl.accumulate(2),), {"window": 2}), ((fl.clip(1e9),), {}),
    ((fl.skip_nonfinite(),), {}), ((fl.ema(0.5),), {}),
])  # fmt: skip
@pytest.mark.parametrize("ring", ["gradient", "update"])
def test_what_a_middleware_changes_before_backward_counts_in_that_update(
    ring, members, settings, change, several
):
    """By hand it changes at the same place: after the update before."""
    seen = []
    step = fl.pipeline(*members, before_backward(change, ring))(loss_fn)
    data = batches(settings.get("window", 1))
    hooks = (changing(lambda *_: None, seen),)
    state = fl.fit(step, start(several), data, hooks=hooks)
    expected = by_hand(change, several, **settings)
    assert (seen[:1], seen[2:]) == (expected[:1], expected[2:])
    assert all(p.grad is None for p in state.model.parameters())


def test_an_average_takes_in_what_an_update_has_replaced():
    step = fl.pipeline(before_backward(replace), fl.ema(0.5))(loss_fn)
    state = fl.fit(step, start(), batches(), steps=3, hooks=())
    expected, averages = by_hand(replace, decay=0.5, updates=3)
    assert weights(state.model) == expected[-1]
    assert {k: t.tolist() for k, t in state.slots["ema"].items()} == averages[-1]


@pytest.mark.parametrize("change", [replace, lengthen, grow, add_group])
def test_a_turn_of_alternate_has_those_of_its_optimizer(change):
    seen, expected, model = [], [], Pair()
    steps = {name: fl.pipeline(fl.clip(0.5))(loss_fn) for name in "ab"}
    fl.fit(fl.alternate(steps), start(True), batches(), hooks=(changing(change, seen),))
    optimizers = listed(optimizers_of(model, True))
    for i in range(5):
        for one in optimizers:
            for p in model.parameters():
                p.grad = None
            loss_fn(model, ONE * i).backward()
            own = [p for group in one.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(own, 0.5)
            one.step()
        if i + 1 == AT:
            change(model, optimizers)
        expected.append(weights(model))
    assert seen == expected


@pytest.mark.parametrize("change", CHANGES)
def test_exact_sums_have_them(change):
    seen, model = [], Pair()
    state = fl.TrainState.create(model, optimizers_of(model), seed=0, exact=True)
    step = fl.pipeline(fl.accumulate(2), fl.clip(0.5))(loss_fn)
    fl.fit(step, state, batches(2), hooks=(changing(change, seen),))
    assert seen == by_hand(change, window=2, clip=0.5)


def test_one_that_the_optimizer_has_lost_is_named_once(caplog):
    """Of b the optimizer has the parameter of before, as happens where it was forgotten."""
    seen = []

    def forget(model, optimizers):
        model.b = nn.Parameter(model.b.detach().clone())

    fl.fit(fl.pipeline()(loss_fn), start(), batches(), hooks=(changing(forget, seen),))
    said = [r.getMessage() for r in caplog.records if "in no optimizer" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("update 3: this parameter is in no optimizer: b. ")
    assert seen[AT:] == [{**one, "b": seen[1]["b"]} for one in by_hand(forget)[AT:]]


def test_a_gradient_that_was_left_by_the_user_is_cleared():
    """The parameter was replaced by one that has a gradient already."""
    seen = []

    def with_gradient(model, optimizers):
        replace(model, optimizers)
        model.a.grad = torch.full_like(model.a, 100.0)

    step = fl.pipeline(fl.accumulate(2))(loss_fn)
    fl.fit(step, start(), batches(2), hooks=(changing(with_gradient, seen),))
    assert seen == by_hand(replace, window=2)


def test_those_of_a_module_that_is_replaced_as_a_whole():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    nn.init.zeros_(model[0].weight), nn.init.ones_(model[1].weight)
    optimizer = torch.optim.SGD([model[1].weight], lr=1.0)
    model.requires_grad_(False)[1].weight.requires_grad_(True)
    step = fl.pipeline(fl.ema(0.0))(lambda m, x: (m[0].weight + m[1].weight * x).sum())

    def hook(state):
        if state.step == 1:  # it is frozen, and in no group
            state.model.insert(0, nn.Linear(1, 1).requires_grad_(False))
            state.model.pop(1)
            nn.init.constant_(state.model[0].weight, 7.0)
        return state

    state = fl.TrainState.create(model, optimizer)
    state = fl.fit(step, state, [ONE] * 2, hooks=(hook,))
    assert state.slots["ema"]["0.weight"].item() == 7.0
