"""freeze and unfreeze: what is trained, in which mode, and in which groups of the optimizer."""

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


def of_net(make=None, seed=0):
    model = net()
    return fl.TrainState.create(
        model, (make or (lambda m: SGD(m.parameters(), lr=0.1)))(model), seed=seed
    )


ONES = [torch.ones(1)] * 4
PLAIN = fl.pipeline()(toy_loss)
BATCHES = [
    (torch.randn(8, 4, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 2)
    for i in range(4)
]
SUPERVISED = fl.supervised(nn.CrossEntropyLoss())


def trained(state):
    return [name for name, p in state.model.named_parameters() if p.requires_grad]


def evaluating(state):
    return [name for name, module in state.model.named_modules() if not module.training]


def lrs(state):
    return [group["lr"] for group in state.optimizer.param_groups]


# --- what a selector is for


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        (["*"], []),
        (["0"], ["2.weight", "2.bias"]),
        (["0.*"], ["2.weight", "2.bias"]),
        (
            ["0.0", "2.weight"],
            ["0.1.0.weight", "0.1.0.bias", "0.1.1.weight", "0.1.1.bias", "2.bias"],
        ),
        (["*.bias"], ["0.0.0.weight", "0.0.1.weight", "0.1.0.weight", "0.1.1.weight", "2.weight"]),
        ([lambda name, p: p.ndim == 1], ["0.0.0.weight", "0.1.0.weight", "2.weight"]),
    ],
)
def test_selectors_are_globs_and_functions(selectors, expected):
    assert trained(fl.freeze(of_net(), *selectors)) == expected


def test_selectors_are_modules_too_and_children_by_their_number():
    state = of_net()
    state = fl.freeze(state, *list(state.model.children())[:-1])
    assert trained(state) == ["2.weight", "2.bias"]
    assert trained(fl.unfreeze(state, state.model[0][1][0]))[0] == "0.1.0.weight"


def test_tied_parameters_are_one():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    model[1].weight = model[0].weight
    state = fl.TrainState.create(model, SGD(model[2].parameters(), lr=1.0))
    state = fl.unfreeze(fl.freeze(state, "1.weight"), "1.*", lr=0.5)
    assert [len(group["params"]) for group in state.optimizer.param_groups] == [2, 1]


@pytest.mark.parametrize(
    ("selectors", "kind", "message"),
    [
        (
            [],
            TypeError,
            r'freeze expects what to freeze.*freeze\(state, "layer4\.\*"\).*"\*" is all',
        ),
        ([3], TypeError, "expects modules of the model, globs of names.*got 3"),
        ([["0.*"]], TypeError, r"Several are arguments of their own: freeze\(state, \*selectors\)"),
        (["2.wieght"], ValueError, r'has a name like "2\.wieght"\. Did you mean 2\.weight'),
        (["zzz"], ValueError, "There are 0, 0.0, 0.0.0"),
        ([nn.Linear(1, 1)], ValueError, "this Linear is not a module of the state's Sequential"),
        ([lambda name, p: False], ValueError, "returned False for each parameter"),
        (
            [lambda p: True],
            TypeError,
            r"as \(name, parameter\) -> bool; <lambda> takes \(p",
        ),
        (
            [nn.BatchNorm1d],
            TypeError,
            r"got the class BatchNorm1d\. For all modules of it: freeze\(state, \*\[m for m in "
            r"state\.model\.modules\(\) if isinstance\(m, BatchNorm1d\)\]\)",
        ),
        ([""], ValueError, 'has a name like ""'),
    ],
)
def test_a_selector_that_is_for_nothing_is_refused_and_nothing_changes(selectors, kind, message):
    state = of_net()
    with pytest.raises(kind, match=message):
        fl.freeze(state, "0.*", *selectors) if selectors else fl.freeze(state)
    assert len(trained(state)) == 10
    fl.snapshot(state)  # it is not stale


def test_a_module_without_parameters_is_refused():
    state = of_net()
    with pytest.raises(ValueError, match="this Dropout of the Sequential has no parameters"):
        fl.freeze(state, state.model[1])


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
    "make",
    [
        lambda p: SGD(p, lr=0.5, momentum=0.5, weight_decay=0.5),
        lambda p: AdamW(p, lr=0.5, weight_decay=0.5),
    ],
)
@pytest.mark.parametrize(
    "members", [(), (fl.accumulate(2), fl.clip(1.0)), (fl.clip(1.0), fl.accumulate(2))]
)
def test_momentum_and_weight_decay_do_not_move_what_is_frozen(make, members):
    step = fl.pipeline(*members)(toy_loss)
    state = fl.fit(step, pair(make), ONES, epochs=1, hooks=())
    a, b, model = state.model.a.item(), state.model.b.item(), state.model
    kept = {k: torch.clone(torch.as_tensor(v)) for k, v in state.optimizer.state[model.a].items()}
    state = fl.fit(step, fl.freeze(state, "a"), ONES, epochs=2, hooks=())
    assert a != 0
    assert model.a.item() == a
    assert model.b.item() != b
    for key, value in state.optimizer.state[model.a].items():
        assert torch.equal(torch.as_tensor(value), kept[key])
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
    @fl.when(lambda state: state.step == 2)
    def freeze_a(state):
        return fl.freeze(state, "a")

    state = fl.fit(PLAIN, pair(), ONES, hooks=(freeze_a,))
    assert (state.model.a.item(), state.model.b.item()) == (-2.0, -4.0)


# --- norm layers


def test_a_norm_layer_that_is_frozen_keeps_its_statistics():
    state = fl.freeze(of_net(), "0.0.*")
    assert evaluating(state) == ["0.0.1"]
    norms = state.model[0][0][1], state.model[0][1][1]
    loaders = {"train": BATCHES, "valid": BATCHES}
    state = fl.fit(fl.pipeline()(SUPERVISED), state, loaders, epochs=2, hooks=())
    assert [norm.num_batches_tracked.item() for norm in norms] == [0, 8]
    assert torch.equal(norms[0].running_mean, torch.zeros(4))
    assert evaluating(state) == ["0.0.1"]
    state = fl.unfreeze(state, "0.0.0.*")
    assert evaluating(state) == ["0.0.1"]
    assert evaluating(fl.unfreeze(state, "0.0.1.bias")) == []


@pytest.mark.parametrize("restored", [False, True])
def test_it_does_so_too_when_the_script_changes_modes(restored, tmp_path, caplog):
    state = fl.freeze(of_net(), "0")
    state.model.eval()
    if restored:
        state = fl.restore(fl.save(state, tmp_path / "a"), of_net())
    state = fl.fit(fl.pipeline()(SUPERVISED), state, BATCHES, hooks=())
    assert "in evaluation mode as a whole" in caplog.text
    assert evaluating(state) == ["0.0.1", "0.1.1"]
    state.model.train()
    state = fl.fit(fl.pipeline()(SUPERVISED), state, BATCHES, hooks=())
    assert evaluating(state) == ["0.0.1", "0.1.1"]
    assert state.model[0][0][1].num_batches_tracked.item() == 0
    state = fl.freeze(state, "0", statistics="running")
    assert evaluating(state) == []
    state = fl.fit(fl.pipeline()(SUPERVISED), state, BATCHES, hooks=())
    assert state.model[0][0][1].num_batches_tracked.item() == 4
    assert "freeze" not in state.slots


def test_a_norm_layer_with_one_parameter_to_train_is_in_training_mode():
    state = fl.freeze(of_net(), "0.0.1.weight")
    assert evaluating(state) == []
    assert evaluating(fl.freeze(state, "*.bias")) == ["0.0.1"]


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(4, affine=False), nn.InstanceNorm1d(4, track_running_stats=True)],
)
def test_a_norm_layer_without_parameters_goes_with_the_module_around_it(norm):
    model = nn.Sequential(block(norm), nn.Linear(4, 2))
    state = fl.TrainState.create(model, SGD(model.parameters(), lr=0.1))
    state = fl.freeze(state, "0.0.weight")
    assert evaluating(state) == []
    state = fl.freeze(state, "0.0.bias")
    assert evaluating(state) == ["0.1"]
    assert evaluating(fl.unfreeze(state, "0.0.weight")) == []


def test_what_has_no_running_statistics_stays_in_training_mode():
    model = nn.Sequential(
        nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1)
    )
    state = fl.TrainState.create(model, SGD(model.parameters(), lr=0.1))
    assert evaluating(fl.freeze(state, "*")) == []


def test_a_mode_that_the_user_has_set_stays():
    state = of_net()
    state.model[0][1][1].eval()
    state = fl.unfreeze(fl.freeze(state, "0.0"), "*")
    assert evaluating(state) == ["0.1.1"]


def test_update_batchnorm_leaves_frozen_statistics():
    state = fl.freeze(of_net(), "0.0")
    state = fl.update_batchnorm(fl.pipeline()(SUPERVISED), state, BATCHES)
    norms = state.model[0][0][1], state.model[0][1][1]
    assert [norm.num_batches_tracked.item() for norm in norms] == [0, 4]
    assert evaluating(state) == ["0.0.1"]


# --- groups


def test_new_parameters_are_a_group_with_defaults_and_settings():
    state = pair(lambda params: SGD([next(iter(params))], lr=1.0, momentum=0.5))
    state = fl.unfreeze(state, "b", lr=0.25)
    (first, second) = state.optimizer.param_groups
    assert (first["lr"], second["lr"], second["momentum"]) == (1.0, 0.25, 0.5)
    state = fl.fit(PLAIN, state, ONES[:1], hooks=())
    assert (state.model.a.item(), state.model.b.item()) == (-1.0, -0.25)
    assert dict(state.history[-1].metrics)["train/lr/1"] == 0.25


def test_parameters_in_a_group_are_moved_into_one_of_their_own_with_its_settings():
    model = net()
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": no_decay, "weight_decay": 0.0}]
    state = fl.TrainState.create(model, AdamW(groups, lr=0.1))
    state = fl.fit(fl.pipeline()(SUPERVISED), state, BATCHES, hooks=())
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
    state = pair(lambda params: torch.optim.Adam([next(iter(params))], lr=rate, foreach=False))
    step = fl.pipeline(fl.schedule(lambda i, total: 0.5))(toy_loss)
    state = fl.fit(step, fl.freeze(state, "b"), ONES, hooks=())
    assert rate == 0.5
    state = fl.unfreeze(state, "b")
    assert [rate.item() for rate in lrs(state)] == [0.5, 1.0]
    state = fl.unfreeze(state, "a", lr=8.0)
    state = fl.fit(step, state, ONES, hooks=())
    assert [rate.item() for rate in lrs(state)] == [4.0, 0.5]


def test_named_parameters_keep_their_names():
    model = net()
    state = fl.TrainState.create(model, SGD(model[2].named_parameters(), lr=0.1))
    state = fl.unfreeze(state, "0.0.0", lr=0.2)
    state = fl.unfreeze(state, "0.0.0.bias", lr=0.3)
    assert [group["param_names"] for group in state.optimizer.param_groups] == [
        ["weight", "bias"], ["0.0.0.weight"], ["0.0.0.bias"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        (
            {"momentm": 0.1},
            TypeError,
            r"SGD has no setting 'momentm'; it has lr, .*mean 'momentum'",
        ),
        ({"params": []}, TypeError, "no setting 'params'"),
        ({"initial_lr": 1.0}, TypeError, "no setting 'initial_lr'"),
        ({"lr": -1.0}, ValueError, "unfreeze expects lr >= 0 and finite"),
        ({"optimizer": "rest"}, ValueError, "one optimizer, without a name: leave out optimizer="),
    ],
)
def test_settings_that_a_group_does_not_have_are_refused(settings, kind, message):
    state = pair(lambda params: SGD([next(iter(params))], lr=1.0))
    with pytest.raises(kind, match=message):
        fl.unfreeze(fl.freeze(state, "b"), "b", **settings)
    assert trained(state) == ["a"]
    assert len(state.optimizer.param_groups) == 1


def test_lbfgs_takes_no_further_parameters():
    state = pair(lambda params: torch.optim.LBFGS([next(iter(params))]))
    with pytest.raises(ValueError, match="LBFGS takes no further parameters"):
        fl.unfreeze(state, "b")


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
    assert [[g["lr"] for g in o.param_groups] for o in state.optimizer.values()] == [
        [1.0],
        [1.0, 1.0],
    ]


def test_parameters_of_integers_stay_frozen():
    model = Pair()
    model.c = nn.Parameter(torch.tensor(3), requires_grad=False)
    state = fl.TrainState.create(model, SGD([model.a], lr=1.0))
    state = fl.unfreeze(fl.freeze(state, "*"), "*")
    assert trained(state) == ["a", "b"]


# --- schedules


def used(step, state, **targets):
    before = len(state.history)
    state = fl.fit(step, state, ONES, record_every=fl.every(steps=1), **{"hooks": (), **targets})
    records = [r.metrics for r in state.history[before:]]
    return [(r["recent/lr"], r.get("recent/lr/1")) for r in records], state


FALLING = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)


def test_a_group_that_is_added_within_a_schedule_begins_with_its_factor():
    @fl.when(lambda state: state.step == 2)
    def add(state):
        return fl.unfreeze(state, "b", lr=8.0)

    state = fl.freeze(pair(lambda params: SGD([next(iter(params))], lr=1.0)), "b")
    seen, state = used(FALLING, state, hooks=(add,), epochs=1)
    assert seen == [(1.0, None), (0.75, None), (0.5, 4.0), (0.25, 2.0)]
    assert (state.model.a.item(), state.model.b.item()) == (-2.5, -6.0)


def test_a_group_that_is_moved_within_a_schedule_has_its_factor():
    @fl.when(lambda state: state.step == 2)
    def move(state):
        return fl.unfreeze(state, "b", lr=8.0)

    seen, _ = used(FALLING, pair(), hooks=(move,), epochs=1)
    assert seen == [(1.0, None), (0.75, None), (0.5, 4.0), (0.25, 2.0)]


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


def test_without_a_schedule_the_rate_is_the_one_given():
    _, state = used(FALLING, pair(), phase="a", epochs=1)
    state = fl.unfreeze(state, "*", lr=1.0)
    assert used(PLAIN, state, phase="b", epochs=1)[0] == [(1.0, None)] * 4


def test_a_scheduler_of_torch_refuses_groups_in_mid_phase():
    @fl.when(lambda state: state.step == 2)
    def move(state):
        return fl.unfreeze(state, "b", lr=8.0)

    step = fl.pipeline(fl.torch_scheduler(lambda opt, _: lr_scheduler.ExponentialLR(opt, 0.5)))
    with pytest.raises(
        ValueError, match="made for 1 parameter groups, and the optimizer has 2 now"
    ):
        fl.fit(step(toy_loss), pair(), ONES, hooks=(move,))
