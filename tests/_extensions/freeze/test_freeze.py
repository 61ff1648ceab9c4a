"""freeze and unfreeze: what is trained, in which mode, and in which groups; layers by number."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, lr_scheduler

import fnloop as fl
from fnloop.testing import toy_loss


class Pair(nn.Module):
    """Two weights, whose gradients are the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return (self.a + self.b) * x


def pair(optimizer=None, **settings):
    model = Pair()
    make = optimizer or (lambda params: SGD(params, **{"lr": 1.0, **settings}))
    return fl.TrainState.create(model, make(model.parameters()), seed=0)


def block(norm, width=4):
    return nn.Sequential(nn.Linear(width, width), norm, nn.ReLU())


def net():
    torch.manual_seed(0)
    body = nn.Sequential(block(nn.BatchNorm1d(4)), block(nn.BatchNorm1d(4)))
    return nn.Sequential(body, nn.Dropout(0.5), nn.Linear(4, 2))


def of(model, make=None):
    optimizer = make(model) if make else SGD(model.parameters(), lr=0.1)
    return fl.TrainState.create(model, optimizer, seed=0)


def of_net():
    return of(net())


def train(state, **settings):
    return fl.fit(fl.pipeline()(SUPERVISED), state, BATCHES, **{"hooks": (), **settings})


def tracked(state):
    """Return how many batches the two norm layers have counted."""
    return [state.model[0][i][1].num_batches_tracked.item() for i in (0, 1)]


ONES = [torch.ones(1)] * 4
PLAIN = fl.pipeline()(toy_loss)
BATCHES = [
    (torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 2)
    for i in range(4)
]
SUPERVISED = fl.supervised(nn.CrossEntropyLoss())


def trained(state):
    return [name for name, p in state.model.named_parameters() if p.requires_grad]


def first_only(make=SGD, **settings):
    """Return a state whose optimizer has the first of two weights."""
    return pair(lambda params: make([next(iter(params))], **{"lr": 1.0, **settings}))


def unfreezing(name, lr, at=2):
    """Return a hook that does it in mid-epoch."""
    return fl.when(lambda state: state.step == at)(lambda state: fl.unfreeze(state, name, lr=lr))


def evaluating(state):
    return [name for name, module in state.model.named_modules() if not module.training]


def lrs(state):
    return [group["lr"] for group in state.optimizer.param_groups]


# --- what a selector is for


@pytest.mark.parametrize(("selectors", "expected"), [
    (["*"], ""), (["0"], "2.weight 2.bias"), (["0.*"], "2.weight 2.bias"),
    (["0.0", "2.weight"], "0.1.0.weight 0.1.0.bias 0.1.1.weight 0.1.1.bias 2.bias"),
    (["*.bias"], "0.0.0.weight 0.0.1.weight 0.1.0.weight 0.1.1.weight 2.weight"),
    ([lambda name, p: p.ndim == 1], "0.0.0.weight 0.1.0.weight 2.weight"),
])  # fmt: skip
def test_selectors_are_globs_and_functions(selectors, expected):
    assert trained(fl.freeze(of_net(), *selectors)) == expected.split()


def test_tied_parameters_are_one_and_those_of_integers_stay_frozen():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    model[1].weight = model[0].weight
    model.c = nn.Parameter(torch.tensor(3), requires_grad=False)
    state = of(model, lambda m: SGD(m[2].parameters(), lr=1.0))
    state = fl.unfreeze(fl.freeze(state, "1.weight"), "1.*", lr=0.5)
    assert [len(group["params"]) for group in state.optimizer.param_groups] == [2, 1]
    assert "c" not in trained(fl.unfreeze(fl.freeze(state, "*"), "*"))


@pytest.mark.parametrize(("selectors", "kind", "message"), [
    ([], TypeError, r'expects what to freeze.*freeze\(state, "layer4\.\*"\).*"\*" is all'),
    ([["0.*"]], TypeError, r"Several are arguments of their own: freeze\(state, \*selectors\)"),
    (["2.wieght"], ValueError, r'has a name like "2\.wieght"\. Did you mean 2\.weight'),
    ([lambda name, p: False], ValueError, "returned False for each parameter"),
    ([nn.BatchNorm1d], TypeError,
     r"got the class BatchNorm1d\. For all modules of it: freeze\(state, \*\[m for m in "
     r"state\.model\.modules\(\) if isinstance\(m, BatchNorm1d\)\]\)"),
])  # fmt: skip
def test_a_selector_that_is_for_nothing_is_refused_and_nothing_changes(selectors, kind, message):
    state = of_net()
    with pytest.raises(kind, match=message):
        fl.freeze(state, "0.*", *selectors) if selectors else fl.freeze(state)
    assert len(trained(state)) == 10
    with pytest.raises(ValueError, match="this Dropout of the Sequential has no parameters"):
        fl.freeze(state, state.model[1])
    fl.snapshot(state)  # it is not stale


def test_the_given_state_is_stale_afterwards():
    state = pair()
    frozen = fl.freeze(state, "a")
    for call in (lambda: fl.freeze(state, "a"), lambda: fl.unfreeze(state, "a")):
        with pytest.raises(fl.StaleStateError):
            call()
    assert "2 parameters, 1 trained" in repr(frozen)
    with pytest.raises(ValueError, match='statistics as one of "kept", "running"'):
        fl.freeze(frozen, "a", statistics="other")


# --- what frozen means


@pytest.mark.parametrize(
    "make", [lambda p: SGD(p, lr=0.5, momentum=0.5, weight_decay=0.5), lambda p: AdamW(p, lr=0.5)]
)
@pytest.mark.parametrize(
    "members", [(), (fl.accumulate(2), fl.clip(1.0)), (fl.clip(1.0), fl.accumulate(2))]
)
def test_momentum_and_weight_decay_do_not_move_what_is_frozen(make, members):
    step = fl.pipeline(*members)(toy_loss)
    state = fl.fit(step, pair(make), ONES, epochs=1, hooks=())
    model, held = state.model, state.optimizer.state[state.model.a]
    a, b = model.a.item(), model.b.item()
    kept = {k: torch.clone(torch.as_tensor(v)) for k, v in held.items()}
    state = fl.fit(step, fl.freeze(state, "a"), ONES, epochs=2, hooks=())
    assert model.a.item() == a != 0 and model.b.item() != b
    assert kept and all(torch.equal(torch.as_tensor(held[key]), kept[key]) for key in kept)
    state = fl.fit(step, fl.unfreeze(state, "a"), ONES, epochs=3, hooks=())
    assert state.model.a.item() != a
    assert len(state.optimizer.param_groups) == 1


def test_a_gradient_that_is_left_over_does_not_move_what_is_frozen():
    state = pair()
    state.model.a.grad = torch.tensor(5.0)
    state = fl.freeze(state, "a")
    assert state.model.a.grad is None  # for those who call the optimizer by themselves
    state = fl.fit(PLAIN, state, ONES[:1], hooks=())
    assert (state.model.a.item(), state.model.b.item()) == (0.0, -1.0)


def test_a_hook_freezes_in_mid_epoch():
    hook = fl.when(lambda state: state.step == 2)(lambda state: fl.freeze(state, "a"))
    state = fl.fit(PLAIN, pair(), ONES, hooks=(hook,))
    assert (state.model.a.item(), state.model.b.item()) == (-2.0, -4.0)


# --- norm layers


def test_a_norm_layer_that_is_frozen_keeps_its_statistics():
    state = fl.freeze(of_net(), "0.0.*")
    assert evaluating(state) == ["0.0.1"]
    step, loaders = fl.pipeline()(SUPERVISED), {"train": BATCHES, "valid": BATCHES}
    state = fl.fit(step, state, loaders, epochs=2, hooks=())
    assert (tracked(state), evaluating(state)) == ([0, 8], ["0.0.1"])
    assert torch.equal(state.model[0][0][1].running_mean, torch.zeros(4))
    state = fl.update_batchnorm(step, state, BATCHES)
    assert (tracked(state), evaluating(state)) == ([0, 4], ["0.0.1"])
    state = fl.unfreeze(state, "0.0.0.*")
    assert evaluating(state) == ["0.0.1"]
    assert evaluating(fl.unfreeze(state, "0.0.1.bias")) == []


@pytest.mark.parametrize("restored", [False, True])
def test_it_does_so_too_when_the_script_changes_modes(restored, tmp_path, caplog):
    state = fl.freeze(of_net(), "0")
    state.model.eval()
    if restored:
        state = fl.restore(fl.save(state, tmp_path / "a"), of_net())
    state = train(state)
    assert "in evaluation mode as a whole" in caplog.text
    assert evaluating(state) == ["0.0.1", "0.1.1"]
    state.model.train()
    state = train(state)
    assert (evaluating(state), tracked(state)) == (["0.0.1", "0.1.1"], [0, 0])
    state = fl.freeze(state, "0", statistics="running")
    assert evaluating(state) == []
    state = train(state)
    assert tracked(state) == [4, 4] and "freeze" not in state.slots


def test_a_norm_layer_with_one_parameter_to_train_is_in_training_mode():
    state = fl.freeze(of_net(), "0.0.1.weight")
    assert evaluating(state) == []
    assert evaluating(fl.freeze(state, "*.bias")) == ["0.0.1"]
    state = of_net()
    state.model[0][1][1].eval()  # a mode that the user has set
    assert evaluating(fl.unfreeze(fl.freeze(state, "0.0"), "*")) == ["0.1.1"]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4, affine=False), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_a_norm_layer_without_parameters_goes_with_the_module_around_it(norm):
    state = fl.freeze(of(nn.Sequential(block(norm), nn.Linear(4, 2))), "0.0.weight")
    assert evaluating(state) == []
    state = fl.freeze(state, "0.0.bias")
    assert evaluating(state) == ["0.1"]
    assert evaluating(fl.unfreeze(state, "0.0.weight")) == []
    plain = nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)  # without statistics
    assert evaluating(fl.freeze(of(nn.Sequential(*plain, nn.Linear(4, 1))), "*")) == []


# --- groups


def test_new_parameters_are_a_group_with_defaults_and_settings():
    state = fl.unfreeze(first_only(momentum=0.5), "b", lr=0.25)
    (first, second) = state.optimizer.param_groups
    assert (first["lr"], second["lr"], second["momentum"]) == (1.0, 0.25, 0.5)
    state = fl.fit(PLAIN, state, ONES[:1], hooks=())
    assert (state.model.a.item(), state.model.b.item()) == (-1.0, -0.25)
    assert state.history["train/lr/1"] == (0.25,)


def test_parameters_in_a_group_are_moved_into_one_of_their_own_with_its_settings():
    model = net()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == x] for x in (1, 0))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    state = train(fl.TrainState.create(model, AdamW(groups, lr=0.1)))
    held = {id(p): kept["exp_avg"] for p, kept in state.optimizer.state.items()}
    state = fl.unfreeze(state, "0.0", lr=0.01)
    groups = state.optimizer.param_groups
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups] == [
        (2, 0.1, 0.5), (4, 0.1, 0.0), (1, 0.01, 0.5), (3, 0.01, 0.0)
    ]  # fmt: skip
    assert all(state.optimizer.state[p]["exp_avg"] is held[id(p)] for p in model.parameters())
    again = fl.unfreeze(state, "0.0", lr=0.02)
    assert lrs(again) == [0.1, 0.1, 0.02, 0.02]
    assert lrs(fl.unfreeze(again, "0")) == [0.1, 0.1, 0.02, 0.02]


def test_a_rate_in_a_tensor_is_copied():
    """A schedule fills the tensor, which is the default of the optimizer too."""
    rate = torch.tensor(1.0)
    state = first_only(torch.optim.Adam, lr=rate, foreach=False)
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(toy_loss)
    state = fl.fit(step, fl.freeze(state, "b"), ONES, hooks=())
    assert rate == 0.5
    state = fl.unfreeze(state, "b")
    assert [rate.item() for rate in lrs(state)] == [0.5, 1.0]
    state = fl.unfreeze(state, "a", lr=8.0)
    state = fl.fit(step, state, ONES, hooks=())
    assert [rate.item() for rate in lrs(state)] == [4.0, 0.5]


def test_named_parameters_keep_their_names():
    state = of(net(), lambda model: SGD(model[2].named_parameters(), lr=0.1))
    state = fl.unfreeze(fl.unfreeze(state, "0.0.0", lr=0.2), "0.0.0.bias", lr=0.3)
    names = [group["param_names"] for group in state.optimizer.param_groups]
    assert names == [["weight", "bias"], ["0.0.0.weight"], ["0.0.0.bias"]]


@pytest.mark.parametrize(("settings", "kind", "message"), [
    ({"momentm": 0.1}, TypeError, "SGD has no setting 'momentm'; it has lr, .*mean 'momentum'"),
    ({"params": []}, TypeError, "no setting 'params'"),
    ({"lr": float("nan")}, ValueError, "unfreeze expects lr"),
    ({"optimizer": "rest"}, ValueError, "one optimizer, without a name: leave out optimizer="),
    ({"momentum": -3}, ValueError, "SGD refuses these settings: Invalid momentum value: -3"),
    ({"nesterov": True}, ValueError, "Nesterov momentum requires a momentum"),
])  # fmt: skip
@pytest.mark.parametrize("make", [first_only, pair])
def test_settings_that_the_optimizer_does_not_take_are_refused(make, settings, kind, message):
    state = make()
    before = dict(state.optimizer.param_groups[0])
    with pytest.raises(kind, match=message):
        fl.unfreeze(fl.freeze(state, "b"), "b", **settings)
    assert trained(state) == ["a"]
    assert state.optimizer.param_groups == [before]


def test_a_setting_that_the_group_takes_with_its_others_is_not_refused():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = {"params": net[0].parameters(), "momentum": 0.5}
    optimizer = SGD([first, {"params": net[1].parameters()}], lr=1.0)
    state = fl.unfreeze(fl.TrainState.create(net, optimizer), "0", nesterov=True)
    assert [group["nesterov"] for group in state.optimizer.param_groups] == [True, False]
    state = fl.unfreeze(state, "1", nesterov=True, momentum=0.25)
    assert [group["momentum"] for group in state.optimizer.param_groups] == [0.5, 0.25]


class Mine(SGD):
    def __init__(self, params):
        super().__init__(params, lr=1.0)


@pytest.mark.parametrize(("make", "settings", "message"), [
    (lambda p: AdamW(p, lr=torch.tensor(1.0)), {"betas": (2.0, 0.5)}, "Invalid beta parameter"),
    (Mine, {"weight_decay": "x"}, "weight_decay as a finite number"),
])  # fmt: skip
def test_pairs_and_settings_of_another_class_are_checked_as_far_as_possible(
    make, settings, message
):
    state = pair(make)
    with pytest.raises((TypeError, ValueError), match=message):
        fl.unfreeze(state, "*", **settings)
    state = fl.unfreeze(state, "*", weight_decay=0.5)
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_lbfgs_takes_no_further_parameters():
    with pytest.raises(ValueError, match="LBFGS takes no further parameters"):
        fl.unfreeze(first_only(torch.optim.LBFGS), "b")


def test_an_optimizer_that_refuses_parameters_stays_as_it_was():
    class Picky(SGD):
        def add_param_group(self, group):
            if getattr(self, "param_groups", None):
                raise RuntimeError("no more")
            super().add_param_group(group)

    state = fl.freeze(pair(lambda params: Picky(params, lr=1.0)), "b")
    with pytest.raises(RuntimeError, match="no more"):
        fl.unfreeze(state, "b", lr=0.5)
    assert trained(state) == ["a"]
    assert [len(group["params"]) for group in state.optimizer.param_groups] == [2]


def test_several_optimizers_say_which_takes_new_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    model[2].requires_grad_(False)
    named = {"d": SGD(model[0].parameters(), lr=0.1), "g": SGD(model[1].parameters(), lr=0.2)}
    state = fl.TrainState.create(model, named)
    with pytest.raises(ValueError, match=r'no optimizer has 2.weight, 2.bias.*optimizer="d"\)'):
        fl.unfreeze(state, "2")
    with pytest.raises(ValueError, match="names the optimizer 'x', but this state has d, g"):
        fl.unfreeze(state, "2", optimizer="x")
    state = fl.unfreeze(state, "2", optimizer="g", lr=0.5)
    assert [lr["lr"] for lr in state.optimizer["g"].param_groups] == [0.2, 0.5]
    state = fl.unfreeze(state, "*", lr=1.0)
    rates = [[g["lr"] for g in optimizer.param_groups] for optimizer in state.optimizer.values()]
    assert rates == [[1.0], [1.0, 1.0]]


# --- schedules


def used(step, state, **targets):
    before = len(state.history)
    state = fl.fit(step, state, ONES, record_every=fl.every(steps=1), **{"hooks": (), **targets})
    records = [r.metrics for r in state.history[before:]]
    return [(r["recent/lr"], r.get("recent/lr/1")) for r in records], state


FALLING = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)


@pytest.mark.parametrize("make", [first_only, pair], ids=["a new group", "a group that is moved"])
def test_a_group_that_is_made_within_a_schedule_begins_with_its_factor(make):
    state = fl.freeze(make(), "b")
    seen, state = used(FALLING, state, hooks=(unfreezing("b", 8.0),), epochs=1)
    assert seen == [(1.0, None), (0.75, None), (0.5, 4.0), (0.25, 2.0)]
    assert (state.model.a.item(), state.model.b.item()) == (-2.5, -6.0)


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_rate_given_between_two_phases_is_what_the_next_one_begins_with(by_torch):
    falling = fl.torch_scheduler(lambda opt, run: lr_scheduler.LinearLR(opt, 1.0, 0.0, 4))
    step = fl.pipeline(falling)(toy_loss) if by_torch else FALLING
    _, state = used(step, pair(), phase="a", epochs=1)
    state = fl.unfreeze(state, "b", lr=8.0)
    state = fl.fit(step, state, ONES, hooks=(), phase="b", steps=2)
    assert lrs(state) == [0.5, 4.0]
    state = fl.unfreeze(state, "a", lr=4.0)
    state = fl.fit(step, state, ONES, hooks=(), phase="c", steps=1)
    assert state.history[-1].metrics["train/lr"] == 4.0
    assert state.optimizer.param_groups[1]["lr"] == (6.0 if by_torch else 8.0)


def test_a_scheduler_of_torch_refuses_groups_in_mid_phase():
    step = fl.pipeline(fl.torch_scheduler(lambda opt, _: lr_scheduler.ExponentialLR(opt, 0.5)))
    message = "made for 1 parameter groups, and the optimizer has 2 now"
    with pytest.raises(ValueError, match=message):
        fl.fit(step(toy_loss), pair(), ONES, hooks=(unfreezing("b", 8.0),))


# --- layers: parts of a model by number


def linear():
    return nn.Linear(1, 1)


class Wrapped(nn.Module):
    def __init__(self, *children, own=False):
        super().__init__()
        for i, child in enumerate(children):
            self.add_module(f"part{i}", child)
        if own:
            self.token = nn.Parameter(torch.zeros(1))


A, B, C = linear(), nn.Sequential(linear(), nn.ReLU()), linear()


INNER = nn.Sequential(A, B)


@pytest.mark.parametrize(("model", "expected"), [
    (nn.Sequential(A, B, C), (A, B, C)),
    (Wrapped(A, nn.ReLU(), B, nn.Dropout(), C, nn.Identity()), (A, B, C)),  # none without
    (Wrapped(nn.Sequential(A, B, C)), (A, B, C)),  # opened, as a wrapper of a model is
    (Wrapped(nn.Dropout(), Wrapped(nn.ModuleList([A, B, C]))), (A, B, C)),
    (Wrapped(nn.ModuleDict({"a": A, "c": C})), (A, C)), (nn.Sequential(A), (A,)),
    (Wrapped(A, A, C), (A, C)),  # one module in two places
    (A, (A,)), (nn.DataParallel(nn.Sequential(A, B, C)), (A, B, C)),
    (Wrapped(INNER, own=True), (INNER,)),  # with parameters of its own it is not opened
])  # fmt: skip
def test_layers_are_the_children_that_have_parameters(model, expected):
    assert fl.layers(model) == expected


def test_all_but_the_last_are_frozen_then_one_more_is_trained():
    net = copy.deepcopy(Wrapped(A, nn.ReLU(), B, C))
    state = fl.TrainState.create(net, torch.optim.SGD(net.parameters(), lr=1.0))
    trained = lambda: [name for name, p in net.named_parameters() if p.requires_grad]
    state = fl.freeze(state, *fl.layers(net)[:-1])
    assert trained() == ["part3.weight", "part3.bias"]
    state = fl.unfreeze(state, *fl.layers(state.model)[-2:])
    assert trained() == ["part2.0.weight", "part2.0.bias", "part3.weight", "part3.bias"]
    with pytest.raises(TypeError, match="freeze expects what to freeze after the state"):
        fl.freeze(state, *fl.layers(state.model)[:0])


def test_a_state_is_not_a_model():
    state = fl.TrainState.create(A, torch.optim.SGD(A.parameters(), lr=1.0))
    with pytest.raises(TypeError, match=r"layers expects model as a module, such as state\.model"):
        fl.layers(state)


def test_a_new_group_may_have_a_name():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    state = fl.unfreeze(fl.freeze(state, "0"), "0.*", lr=0.01, name="body")
    state = fl.fit(fl.pipeline()(lambda m, x: m(x).mean()), state, [torch.ones(1, 1)], hooks=())
    assert state.history["train/lr/body"] == (0.01,)
    with pytest.raises(ValueError, match="two parameter groups are called 'body'"):
        fl.unfreeze(state, "1.bias", name="body")
    assert len(state.optimizer.param_groups) == 2  # as it was
    with pytest.raises(TypeError, match="unfreeze expects name as the name of the group"):
        fl.unfreeze(state, "1.bias", name=1)
