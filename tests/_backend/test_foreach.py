"""Optimizers of small parameters on the CPU take fewer calls, and have the bits of a plain step."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

import fnloop as fl
from fnloop._backend.torch_compat import apply_optimizer

SETTINGS = {
    "AdamW": (AdamW, {}), "AdamW, amsgrad": (AdamW, {"amsgrad": True, "lr": 0.1}),
    "AdamW, maximize": (AdamW, {"maximize": True, "betas": (0.7, 0.9), "weight_decay": 0.3}),
    "Adam": (Adam, {"lr": 0.1}), "Adam, decay": (Adam, {"weight_decay": 0.1, "eps": 1e-3}),
    "SGD": (SGD, {"lr": 0.1}),
    "SGD, momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    "SGD, decay": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
}  # fmt: skip
DTYPES = {"float32": [torch.float32], "mixed": [torch.float32, torch.float64]}


def made(cls, settings, dtypes=(torch.float32,), number=12, shape=(7, 11), kind=nn.Parameter):
    draw = torch.Generator().manual_seed(0)
    weights = (torch.randn(shape, generator=draw) for _ in range(number))
    params = [kind(w.to(dtypes[i % len(dtypes)])) for i, w in enumerate(weights)]
    return params, cls(params, **settings)


def give_gradients(params, n):
    draw = torch.Generator().manual_seed(n)
    for i, p in enumerate(params):
        drawn = torch.randn(p.shape, generator=draw).to(p.dtype) * 10.0 ** (n - 3)
        p.grad = None if (i, n) in {(2, 1), (5, 0)} else drawn  # some have none


def watched(optimizer, monkeypatch):
    """Return a list of whether each step updates all parameters at once, in each group."""
    found, step = [], type(optimizer).step.__wrapped__

    def noted(optimizer, closure=None):
        found.append([group["foreach"] for group in optimizer.param_groups])
        return step(optimizer, closure)

    monkeypatch.setattr(type(optimizer).step, "__wrapped__", noted)
    return found


def check_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_trained(train, kind):
    check_equal(train(apply_optimizer), train(kind.step))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("cls", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_the_bits_are_those_of_a_plain_step(cls, settings, dtypes, monkeypatch):
    (mine, optimizer), (its, plain) = made(cls, settings, dtypes), made(cls, settings, dtypes)
    foreach = watched(optimizer, monkeypatch)
    for n in range(6):
        give_gradients(mine, n)
        give_gradients(its, n)
        apply_optimizer(optimizer)
        plain.step()
    assert foreach[0] == [True] and optimizer.param_groups[0]["foreach"] is None
    check_equal(mine, its)
    for a, b in zip(mine, its, strict=True):
        held = {name: value for name, value in optimizer.state[a].items() if value is not None}
        check_equal(held.values(), (plain.state[b][name] for name in held))


def test_sparse_gradients_have_the_bits_of_a_plain_step():
    def train(step):
        torch.manual_seed(0)
        tables = [nn.Embedding(4, 3, sparse=True) for _ in range(9)]
        optimizer = SGD([t.weight for t in tables], lr=0.1, momentum=0.9)
        for n in range(3):
            optimizer.zero_grad()
            sum(t(torch.tensor([n, 3])).pow(2).sum() for t in tables).backward()
            step(optimizer)
        return [t.weight for t in tables]

    check_trained(train, SGD)


Mine, Own = type("Mine", (SGD,), {}), type("Own", (nn.Parameter,), {})
LEFT_ALONE = {
    "few parameters": (SGD, {}, {"number": 7}),
    "large parameters": (SGD, {}, {"shape": (129, 128)}),
    "many elements": (SGD, {}, {"number": 100, "shape": (128, 82)}),
    "a subclass": (Mine, {}, {}), "parameters of a subclass": (SGD, {}, {"kind": Own}),
    "foreach=False": (SGD, {"foreach": False}, {}), "fused=False": (SGD, {"fused": False}, {}),
    "nesterov": (SGD, {"nesterov": True, "momentum": 0.9}, {}),
    "bfloat16": (SGD, {}, {"dtypes": [torch.float32, torch.bfloat16]}),
    "complex": (SGD, {}, {"dtypes": [torch.complex64]}),
    "a tensor as rate": (AdamW, {"lr": torch.tensor(0.1)}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("cls", "settings", "sizes"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_others_are_left_as_they_are(cls, settings, sizes, monkeypatch):
    params, optimizer = made(cls, settings, **sizes)
    foreach = watched(optimizer, monkeypatch)
    give_gradients(params, 3)
    apply_optimizer(optimizer)
    assert foreach == [[settings.get("foreach")]]


def test_state_of_another_dtype_has_the_bits_of_a_plain_step():
    def train(step):
        params, optimizer = made(SGD, {"momentum": 0.9})
        give_gradients(params, 3)
        optimizer.state[params[4]]["momentum_buffer"] = torch.ones(7, 11, dtype=torch.float64)
        step(optimizer)
        return params

    check_trained(train, SGD)


VIEWS = {
    "it": lambda p: p,
    "its data": lambda p: nn.Parameter(p.data),
    "a part of it": lambda p: nn.Parameter(p.data[3:]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
def test_a_memory_that_is_updated_twice_has_the_bits_of_a_plain_step(view):
    def train(step):
        params, _ = made(AdamW, {})
        params.append(view(params[0]))
        optimizer = AdamW(params, lr=0.1, weight_decay=0.5)
        for n in range(3):
            give_gradients(params, n)
            step(optimizer)
        return params

    check_trained(train, AdamW)


def to_bfloat16_(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data.bfloat16()
        p.grad = None


CHANGES = {
    "foreach=False": lambda optimizer: optimizer.param_groups[0].update(foreach=False),
    "nesterov": lambda optimizer: optimizer.param_groups[0].update(nesterov=True),
    "a tensor as rate": lambda o: o.param_groups[0].update(lr=torch.tensor(0.1)),
    "a tensor as beta": lambda o: o.param_groups[0].update(betas=(torch.tensor(0.9), 0.99)),
    "another dtype": to_bfloat16_,
    "one less": lambda optimizer: optimizer.param_groups[0]["params"].__delitem__(slice(7, None)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_between_two_updates_is_noticed(change, monkeypatch):
    params, optimizer = made(SGD, {"lr": 0.1, "momentum": 0.0})
    foreach = watched(optimizer, monkeypatch)
    for _ in range(2):
        give_gradients(params, 3)
        apply_optimizer(optimizer)
        change(optimizer)
    assert foreach[0] == [True] != foreach[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_a_number_of_updates_of_another_dtype_has_the_bits_of_a_plain_step(dtype):
    def train(step):
        params, optimizer = made(AdamW, {})
        for n in range(3):
            give_gradients(params, n + 2)
            step(optimizer)
            for p in params:
                optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
        return params

    check_trained(train, AdamW)


def test_an_optimizer_is_not_kept_alive():
    params, optimizer = made(SGD, {"lr": 0.1})
    give_gradients(params, 3)
    apply_optimizer(optimizer)
    alive = weakref.ref(optimizer)
    for p in params:
        p.owner = optimizer  # a cycle
    del optimizer, params, p
    gc.collect()
    assert alive() is None


def test_a_run_has_the_bits_of_a_loop_by_hand(monkeypatch):
    def make():
        torch.manual_seed(0)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise([3, 5, 7, 5, 3, 1])]
        model = nn.Sequential(*layers)
        return model, AdamW(model.parameters(), lr=0.1)

    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    (mine, optimizer), (its, plain) = make(), make()
    foreach = watched(optimizer, monkeypatch)
    step = fl.pipeline(fl.clip(0.5))(fl.supervised(nn.MSELoss()))
    fl.fit(step, fl.TrainState.create(mine, optimizer), batches, epochs=1, hooks=())
    assert foreach == [[True]] * 5
    for x, y in batches:
        plain.zero_grad()
        nn.MSELoss()(its(x), y).backward()
        nn.utils.clip_grad_norm_(its.parameters(), 0.5)
        plain.step()
    check_equal(mine.parameters(), its.parameters())


def test_gradients_stay_as_they_are():
    """As foreach=True changes them with nesterov."""
    params, optimizer = made(SGD, {"nesterov": True, "momentum": 0.9})
    for _ in range(2):
        give_gradients(params, 3)
        apply_optimizer(optimizer)
    after = [p.grad.clone() for p in params]
    give_gradients(params, 3)
    check_equal(after, [p.grad for p in params])


def test_a_step_that_raises_leaves_the_setting_to_torch():
    params, optimizer = made(SGD, {"lr": 0.1})
    give_gradients(params, 3)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        apply_optimizer(optimizer)
    assert optimizer.param_groups[0]["foreach"] is None
