"""stack: models of one architecture train as one, each as it would alone."""

import functools
import math

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop._extensions.stacks.leaves import leaves_of
from fnloop._extensions.stacks.module import Stack
from fnloop._extensions.stacks.updates import Bank
from fnloop.testing import no_host_reads, toy, toy_loss

NAMES = ("a", "b", "c")
_drawn = torch.Generator().manual_seed(0)
BATCHES = [
    (torch.randn(10, 8, generator=_drawn), torch.randint(3, (10,), generator=_drawn))
    for _ in range(25)
]
LOADERS = (BATCHES, BATCHES[:3])
LOSS = fl.supervised(nn.CrossEntropyLoss())
ONES = [torch.ones(1)] * 2


def accuracy(aux, batch):
    return (aux["output"].argmax(1) == batch[1]).float().mean()


def network(seed, dropout=0.0, norm=False, hidden=16):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(
        nn.Linear(8, hidden, bias=not norm), *middle, nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(hidden, 3),
    )  # fmt: skip


def sgd(model, i):
    return torch.optim.SGD(model.parameters(), lr=0.1 * (i + 1))


OPTIMIZERS = {
    "SGD": sgd,
    "SGD, momenta": lambda m, i: torch.optim.SGD(
        m.parameters(), lr=0.05 + 0.05 * i, momentum=0.5 + 0.1 * i, weight_decay=0.01 * i
    ),
    "SGD, nesterov": lambda m, i: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True
    ),
    "SGD, dampening": lambda m, i: torch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, dampening=0.1 * i
    ),
    "SGD, some momenta": lambda m, i: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.4 * i),
    "Adam": lambda m, i: torch.optim.Adam(
        m.parameters(), lr=0.003 * (i + 1), betas=(0.9 - 0.05 * i, 0.99 - 0.01 * i)
    ),
    "Adam, decay": lambda m, i: torch.optim.Adam(m.parameters(), weight_decay=0.01 * i),
    "Adam, amsgrad": lambda m, i: torch.optim.Adam(
        m.parameters(), lr=0.001 * (i + 1), amsgrad=i < 9
    ),
    "Adam, maximize": lambda m, i: torch.optim.Adam(m.parameters(), maximize=True, eps=1e-6 + i),
    "AdamW": lambda m, i: torch.optim.AdamW(
        m.parameters(), lr=0.003 * (i + 1), weight_decay=0.1 * i
    ),
    "AdamW, tensors": lambda m, i: torch.optim.AdamW(
        m.parameters(), lr=torch.tensor(0.003 * (i + 1))
    ),
    "RMSprop": lambda m, i: torch.optim.RMSprop(m.parameters(), lr=0.001 * (i + 1)),
    "groups": lambda m, i: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.1}, {"params": m[-1].parameters(), "lr": 0.1 * i}],
        lr=1.0,
    ),
}


def states(make=network, optimizer=sgd, names=NAMES):
    made = {}
    for i, name in enumerate(names):
        model = make(i)
        made[name] = fl.TrainState.create(model, optimizer(model, i), seed=0)
    return made


def trained(step, state, epochs=4, **given):
    return fl.fit(step, state, LOADERS, epochs=epochs, hooks=(), **given)


def check_close(state, other):
    """The weights, buffers and records of two states are equal up to rounding."""
    pairs = zip(state.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    for (name, mine), (same, its) in pairs:
        assert name == same
        assert (mine - its).abs().max() <= 1e-5 * mine.abs().max(), name
    assert state.step == other.step and len(state.history) == len(other.history)
    for mine, its in zip(state.history, other.history, strict=True):
        assert mine.metrics.keys() == its.metrics.keys()
        for key, value in mine.metrics.items():
            assert math.isclose(value, its.metrics[key], rel_tol=1e-5, abs_tol=1e-7), key


def check_same(state, other):
    """The weights and buffers of two states have the same bits, and so have their records."""
    pairs = zip(state.model.state_dict().items(), other.model.state_dict().items(), strict=True)
    for (name, mine), (_, its) in pairs:
        assert torch.equal(mine, its), name
    assert [r for r in state.history if not r.closing] == [
        r for r in other.history if not r.closing
    ]


# --- each trains as it would alone


def test_a_stack_makes_the_updates_that_a_person_can_check():
    state = fl.stack(fl.fork(toy(), {"lr": [1.0, 0.5]}))
    state, out = fl.pipeline()(toy_loss)(state, torch.tensor([4.0]))
    assert out.loss.tolist() == [0.0, 0.0]
    assert [state.model[name].w.item() for name in state.model] == [-4.0, -2.0]
    assert fl.evaluate(fl.pipeline()(toy_loss), state, [torch.tensor([2.0])]) == {
        "lr=1/loss": -8.0,
        "lr=0.5/loss": -4.0,
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_model_equals_the_run_alone_after_100_updates(name):
    step = fl.pipeline(
        fl.clip(1.0), fl.schedule(lambda i, total: 1 - i / total / 2), fl.metric(acc=accuracy)
    )(LOSS)
    make = functools.partial(states, optimizer=OPTIMIZERS[name])
    alone = {key: trained(step, state) for key, state in make().items()}
    together = trained(step, fl.stack(make()))
    assert together.step == 100
    for key, state in fl.unstack(together).items():
        check_close(alone[key], state)


@pytest.mark.parametrize(
    "listed",
    [
        (fl.accumulate(2), fl.clip(0.5)),
        (fl.clip(0.1), fl.accumulate(2)),
        (fl.clip_value(0.01), fl.grad_norm()),
        (fl.clip(math.inf), fl.skip_nonfinite()),
        (fl.schedule(lambda i, total: 0.99**i, field="momentum", absolute=True),),
    ],
    ids=repr,
)
def test_middleware_acts_on_each_model(listed):
    step = fl.pipeline(*listed)(LOSS)
    optimizer = OPTIMIZERS["SGD, momenta"]
    alone = {k: trained(step, s) for k, s in states(optimizer=optimizer).items()}
    together = fl.unstack(trained(step, fl.stack(states(optimizer=optimizer))))
    for name in NAMES:
        check_close(alone[name], together[name])


def test_clip_scales_each_model_by_its_own_norm():
    state = fl.stack({"a": toy(), "b": toy(w=1.0)})

    def loss_fn(model, batch):
        return (model.w**2 * batch).mean()  # gradients 0 and 2 * 4

    state, out = fl.pipeline(fl.clip(1.0))(loss_fn)(state, torch.tensor([4.0]))
    assert out.metrics["grad_norm"].compute() == {"a/grad_norm": 0.0, "b/grad_norm": 8.0}
    assert round(state.model["b"].w.item(), 5) == 0.0


def test_schedules_may_differ_by_model():
    half, whole = (fl.schedule(lambda i, t, x=x: x, only=n) for n, x in (("a", 0.5), ("b", 1.0)))
    state = fl.stack({"a": toy(), "b": toy()})
    state = fl.fit(fl.pipeline(half, whole)(toy_loss), state, ONES, hooks=())
    assert [state.model[name].w.item() for name in "ab"] == [-1.0, -2.0]
    assert state.history["train/lr/a"] == (0.5,) and state.history["train/lr/b"] == (1.0,)


def test_batchnorm_has_the_statistics_of_each_model():
    make = functools.partial(states, functools.partial(network, norm=True))
    step = fl.pipeline()(LOSS)
    alone = {key: trained(step, state) for key, state in make().items()}
    for name, state in fl.unstack(trained(step, fl.stack(make()))).items():
        assert state.model[1].num_batches_tracked == 100
        check_close(alone[name], state)


def test_dropout_draws_by_the_place_in_the_stack_and_by_the_seed():
    def run(seed):
        model = network(0, dropout=0.5)
        state = fl.TrainState.create(model, sgd(model, 0), seed=seed)
        both = fl.fork(state, {"lr": [0.1, 0.1 + 1e-5]})
        for each in both.values():
            each.optimizer.param_groups[0]["lr"] = 0.1
        return [m[0].weight for m in trained(fl.pipeline()(LOSS), fl.stack(both), 1).model.models]

    first, again, other = run(1), run(1), run(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first) and not torch.equal(first[0], other[0])


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.down.weight = self.up.weight
            self.out = nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.down(self.up(x).relu()))

    step = fl.pipeline()(LOSS)
    alone = {key: trained(step, state) for key, state in states(Tied).items()}
    for name, state in fl.unstack(trained(step, fl.stack(states(Tied)))).items():
        assert state.model.up.weight is state.model.down.weight
        check_close(alone[name], state)


def test_a_buffer_that_forward_replaces_belongs_to_its_model():
    class Counts(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(float(seed)))
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total = self.total + self.w.detach()
            return self.w * x

    step = fl.pipeline()(lambda model, batch: 0 * model(batch).mean())
    state = fl.fit(step, fl.stack(states(Counts)), ONES, hooks=())
    assert [model.total.item() for model in state.model.models] == [0.0, 2.0, 4.0]


class Shares(nn.Module):
    """Two modules with one buffer, to which the first adds."""

    def __init__(self, seed, in_place=True):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(seed)))
        self.one, self.other, self.in_place = nn.Module(), nn.Module(), in_place
        total = torch.zeros(())
        self.one.register_buffer("total", total)
        self.other.register_buffer("total", total)

    def forward(self, x):
        if self.in_place:
            self.one.total += self.w.detach()
        else:
            self.one.total = self.one.total + self.w.detach()
        return self.w * self.other.total * x


def test_a_buffer_of_two_modules_stays_shared():
    step = fl.pipeline()(lambda model, batch: 0 * model(batch).mean())
    state = fl.fit(step, fl.stack(states(Shares)), ONES, hooks=())
    for own in (state, fl.stack(fl.unstack(state))):
        assert [model.other.total.item() for model in own.model.models] == [0.0, 2.0, 4.0]
        assert all(model.one.total is model.other.total for model in own.model.models)


def test_a_shared_buffer_that_forward_replaces_in_one_module_is_refused():
    step = fl.pipeline()(lambda model, batch: 0 * model(batch).mean())
    stacked = fl.stack(states(lambda seed: Shares(seed, in_place=False)))
    with pytest.raises(NotImplementedError, match="'total', which two modules share, in one of"):
        step(stacked, ONES[0])


@pytest.mark.parametrize("first", ["early", "late"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD, momenta"])
def test_a_part_that_gets_its_first_gradient_later_counts_its_own_updates(name, first):
    def make(seed):
        torch.manual_seed(seed)
        parts = {"early": nn.Linear(8, 3), "late": nn.Linear(8, 3)}
        return nn.ModuleDict({key: parts[key] for key in sorted(parts, reverse=first == "late")})

    def loss_fn(model, batch, *, late):
        used = ("early", "late") if late else ("early",)
        return sum(nn.functional.cross_entropy(model[key](batch[0]), batch[1]) for key in used)

    step = fl.pipeline(fl.scheduled(late=lambda i, total: float(i >= 30)))(loss_fn)
    given = lambda: states(make, OPTIMIZERS[name])
    alone = {
        key: fl.fit(step, state, BATCHES, epochs=2, hooks=()) for key, state in given().items()
    }
    stacked = fl.fit(step, fl.stack(given()), BATCHES, epochs=2, hooks=())
    for key, state in fl.unstack(stacked).items():
        check_close(alone[key], state)


def test_a_stack_of_states_with_a_part_that_was_never_updated_counts_as_alone():
    def make(seed):
        model = network(seed)
        model[0].requires_grad_(False)
        return model

    def thawed(state):
        state.model[0].requires_grad_(True)
        return state

    step = fl.pipeline()(LOSS)
    begun = {k: trained(step, s, 1) for k, s in states(make, OPTIMIZERS["Adam"]).items()}
    begun = {key: thawed(state) for key, state in begun.items()}
    both = trained(step, fl.stack(begun), 2)
    for key, state in fl.unstack(both).items():
        check_close(trained(step, begun[key], 2), state)
        counts = [kept["step"].item() for kept in both.optimizer[key].state.values()]
        assert sorted(counts) == [25.0, 25.0, 50.0, 50.0]


def test_rates_of_models_go_where_fused_optimizers_count():
    # Without values: a GPU refuses vectors of two devices in one operation, and so does "meta".
    models = {name: nn.Linear(2, 1, device="meta") for name in NAMES}
    leaves = leaves_of(Stack(models))
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=0.1 * i, betas=(0.1 * i, 0.2 * i))
        for i, m in enumerate(models.values(), 1)
    ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["fused"] = True
    for leaf in leaves.params:
        leaf.grad = torch.empty_like(leaf)
    assert Bank(leaves).update(optimizers)
    counts = [kept["step"] for one in optimizers for kept in one.state.values()]
    assert {count.device.type for count in counts} == {"meta"}


def test_tokens_weigh_batches_as_they_do_alone():
    def loss_fn(model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss, {"weight": (batch[1] > 0).sum()}

    step = fl.pipeline(fl.accumulate(2))(loss_fn)
    alone = {key: trained(step, state, 2) for key, state in states().items()}
    for name, state in fl.unstack(trained(step, fl.stack(states()), 2)).items():
        check_close(alone[name], state)


@pytest.mark.parametrize("weight", [int, torch.tensor])
@pytest.mark.parametrize("steps", [(2, 4, 7), (3, 6, 9)])
def test_items_are_counted_as_of_a_run_alone(weight, steps):
    def loss_fn(model, batch):
        return model.w * batch.mean(), {"weight": weight(2)}

    step, seen = fl.pipeline()(loss_fn), {"alone": [], "stacked": []}
    for how, found in seen.items():
        state = toy()
        for n in steps:
            state = fl.fit(step, state, [torch.ones(1)] * 3, steps=n, hooks=())
            found.append(state.items)
            if how == "stacked" and n == steps[0]:
                state = fl.stack(fl.fork(state, {"lr": [1.0, 0.5]}))
                found.append(state.items)
            elif how == "stacked" and n == steps[1]:
                states = [*fl.unstack(state).values()]
                found += [each.items for each in states]
                fl.fit(step, states[1], [torch.ones(1)] * 3, steps=100, hooks=())
                state = states[0]
        found.append([record.items for record in state.history])
    first, second, *rest = seen["alone"]
    assert seen["stacked"] == [first, first, second, second, second, *rest]


def test_parameters_that_are_frozen_later_stay_as_they_are():
    step, state = fl.pipeline()(LOSS), fl.stack(states())
    state, _ = step(state, BATCHES[0])
    for model in state.model.models:
        model[0].requires_grad_(False)
    before = state.model["a"][0].weight.clone(), state.model["a"][-1].weight.clone()
    state, _ = step(state, BATCHES[1])
    assert torch.equal(before[0], state.model["a"][0].weight)
    assert not torch.equal(before[1], state.model["a"][-1].weight)


# --- what belongs to a state


def test_the_states_that_are_stacked_stay_as_they_are():
    given = states()
    before = {name: given[name].model[0].weight.clone() for name in NAMES}
    state = trained(fl.pipeline()(LOSS), fl.stack(given), 1)
    taken = fl.unstack(state)
    state = trained(fl.pipeline()(LOSS), state, 2)
    for name in NAMES:
        assert torch.equal(before[name], given[name].model[0].weight)
        assert taken[name].step == 25
        assert not torch.equal(taken[name].model[0].weight, state.model[name][0].weight)


def test_unstacked_states_continue_and_can_be_stacked_again():
    step = fl.pipeline(fl.clip(1.0), fl.metric(acc=accuracy))(LOSS)
    whole = trained(step, fl.stack(states(optimizer=OPTIMIZERS["AdamW"])))
    state = trained(step, fl.stack(states(optimizer=OPTIMIZERS["AdamW"])), steps=60)
    parts = fl.unstack(state)
    check_same(whole, trained(step, fl.stack(parts)))
    for name, part in parts.items():
        check_close(fl.unstack(whole)[name], _without_closing(trained(step, part)))


def _without_closing(state):
    kept = fl.History(record for record in state.history if not record.closing)
    return attrs.evolve(state, history=kept)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD, momenta", "RMSprop"])
def test_a_stack_that_is_restored_continues_bit_for_bit(tmp_path, optimizer):
    make = functools.partial(
        states, functools.partial(network, dropout=0.2, norm=True), OPTIMIZERS[optimizer]
    )
    step = fl.pipeline(
        fl.accumulate(2), fl.clip(1.0), fl.skip_nonfinite(), fl.metric(acc=accuracy)
    )(LOSS)
    whole = trained(step, fl.stack(make()), 3)
    for cut in (1, 5, 13, 14, 38):
        fl.save(trained(step, fl.stack(make()), 3, steps=cut), tmp_path / str(cut))
        state = fl.restore(tmp_path / str(cut), fl.stack(make()))
        check_same(whole, trained(step, state, 3))


def test_a_restored_stack_reports_its_running_metrics_before_the_next_update(tmp_path):
    state = fl.fit(fl.pipeline()(toy_loss), fl.stack({"a": toy(), "b": toy(w=3.0)}), ONES, steps=1)
    fl.save(state, tmp_path / "c")
    restored = fl.restore(tmp_path / "c", fl.stack({"a": toy(), "b": toy()}))
    assert restored.metrics["loss"].compute() == {"a/loss": 0.0, "b/loss": 3.0}


def test_weights_that_are_replaced_count_from_the_next_update_on():
    step = fl.pipeline()(toy_loss)
    state, _ = step(fl.stack({"a": toy(), "b": toy()}), torch.ones(1))
    with torch.no_grad():
        state.model["a"].w.data = torch.tensor(7.0)
        state.model["b"].w.copy_(torch.tensor(5.0))
    state, out = step(state, torch.ones(1))
    assert out.loss.tolist() == [7.0, 5.0]
    assert [state.model[name].w.item() for name in "ab"] == [6.0, 4.0]


@pytest.mark.parametrize("replace", ["load_state_dict", "in the dict"])
def test_what_an_optimizer_keeps_can_be_replaced(replace):
    step, state = fl.pipeline()(LOSS), fl.stack(states(optimizer=OPTIMIZERS["Adam"]))
    state, _ = step(state, BATCHES[0])
    before = fl.snapshot(state)
    state, _ = step(state, BATCHES[1])
    for name in NAMES:
        kept, now = before.optimizer[name], state.optimizer[name]
        pairs = zip(state.model[name].parameters(), before.model[name].parameters(), strict=True)
        for p, old in pairs:
            with torch.no_grad():
                p.copy_(old)
            if replace == "in the dict":
                now.state[p].update({key: value.clone() for key, value in kept.state[old].items()})
        if replace == "load_state_dict":
            now.load_state_dict(kept.state_dict())
    state, before = step(state, BATCHES[1])[0], step(before, BATCHES[1])[0]
    check_same(state, before)


def test_the_optimizers_of_a_stack_are_those_of_its_models():
    state = fl.stack(states(optimizer=OPTIMIZERS["AdamW"]))
    calls = []
    state.optimizer["b"].register_step_post_hook(lambda *given: calls.append(given[0]))
    state, _ = fl.pipeline()(LOSS)(state, BATCHES[0])
    assert calls == [state.optimizer["b"]]
    kept = state.optimizer["a"].state[state.model["a"][0].weight]
    assert kept["step"] == 1 and kept["exp_avg"].shape == (16, 8)


def test_no_step_of_a_stack_reads_from_the_device():
    step = fl.pipeline(fl.accumulate(2), fl.clip(1.0), fl.metric(acc=accuracy))(LOSS)
    for optimizer in ("SGD", "AdamW"):
        state, _ = step(fl.stack(states(optimizer=OPTIMIZERS[optimizer])), BATCHES[:2])
        with no_host_reads():
            state, _ = step(state, BATCHES[2:4])


# --- metrics, records and hooks


def test_metrics_of_every_kind_are_those_of_each_model():
    metrics = fl.metric(
        acc=accuracy,
        hits=lambda aux, batch: fl.Sum((aux["output"].argmax(1) == batch[1]).sum()),
        top=lambda aux, batch: aux["output"].max().item(),
    )
    step = fl.pipeline(metrics)(LOSS)
    alone = {key: trained(step, state, 2) for key, state in states().items()}
    together = trained(step, fl.stack(states()), 2)
    assert "train/loss" not in together.history and "valid/a/hits" in together.history
    for name, state in fl.unstack(together).items():
        check_close(alone[name], state)


def test_recent_means_are_those_of_each_model():
    given = {"record_every": fl.every(steps=10)}
    alone = {key: trained(fl.pipeline()(LOSS), s, 1, **given) for key, s in states().items()}
    together = trained(fl.pipeline()(LOSS), fl.stack(states()), 1, **given)
    assert "recent/a/loss" in together.history
    for name, state in fl.unstack(together).items():
        check_close(alone[name], state)


def test_hooks_watch_the_metrics_of_one_model():
    hook = fl.early_stop("valid/b/loss", patience=1, min_delta=100.0)
    state = fl.fit(fl.pipeline()(LOSS), fl.stack(states()), LOADERS, epochs=4, hooks=(hook,))
    assert state.epoch == 2 and "valid/b/loss" in state.stop
    with pytest.raises(KeyError, match="valid/d/loss"):
        hook = fl.early_stop("valid/d/loss")
        fl.fit(fl.pipeline()(LOSS), fl.stack(states()), LOADERS, epochs=1, hooks=(hook,))


def test_a_dry_run_knows_the_names_of_a_stack():
    step, state = fl.pipeline()(LOSS), fl.stack(states())
    assert not fl.dry_run(step, state, LOADERS, hooks=(fl.early_stop("valid/b/loss"),)).problems
    with pytest.raises(KeyError, match="valid/loss', because this state is a stack"):
        fl.dry_run(step, state, LOADERS, hooks=(fl.early_stop("valid/loss"),))


OWN = "because this state is a stack, in which each model has its own: "


@pytest.mark.parametrize(("make", "said"), [
    (lambda path: fl.early_stop("valid/loss"), f"{OWN}valid/a/loss, valid/b/loss, valid/c/loss"),
    (lambda path: fl.checkpoint(path, best="valid/loss"), f"checkpoint: .*{OWN}valid/a/loss"),
    (lambda path: fl.restore_best("train/loss"), f"restore_best: .*{OWN}train/a/loss"),
    (lambda path: fl.when_improved("valid/up", "max")(print), f"{OWN}valid/a/up, valid/b/up"),
    (lambda path: fl.early_stop("train/lr", mode="min"), f"{OWN}train/lr/a, train/lr/b"),
    (lambda path: fl.early_stop("valid/a/los", mode="min"), r"\d more.*mean 'valid/a/loss'"),
    (lambda path: fl.early_stop("valid/a/acc"), r"To add it, list metric\(acc=fn\)"),
    (lambda path: fl.early_stop("valid/acc"), "evaluates valid/a/loss"),
    (lambda path: fl.early_stop("valid/d/loss"), "no metric 'valid/d/loss'"),
    (lambda path: fl.early_stop("train/loss/a"), "no metric 'train/loss/a'"),
    (lambda path: fl.early_stop("train/a/lr", mode="min"), "no metric 'train/a/lr'"),
])  # fmt: skip
def test_a_name_that_no_model_has_is_refused_before_the_first_update(make, said, tmp_path):
    step = fl.pipeline(fl.metric(up=lambda aux, batch: torch.ones(())), fl.timings())(LOSS)
    state = fl.stack(states())
    with pytest.raises(KeyError, match=said):
        fl.fit(step, state, LOADERS, epochs=1, hooks=(make(tmp_path / "a"),))
    assert state.step == 0


@pytest.mark.parametrize("key", [
    "train/a/loss", "train/lr/a", "valid/b/up", "train/beta", "train/time/step",
    "train/a/grad_norm", "train/momentum/c", "valid/time/evaluate",
])  # fmt: skip
def test_a_name_that_a_record_of_a_stack_has_is_taken(key):
    one = lambda i, total: 1.0
    step = fl.pipeline(
        fl.metric(up=lambda aux, batch: torch.ones(())), fl.timings(), fl.grad_norm(),
        fl.scheduled(beta=one), fl.schedule(one, "momentum"),
    )(lambda model, batch, beta: LOSS(model, batch))  # fmt: skip
    hook = fl.early_stop(key, mode="min")
    state = fl.fit(step, fl.stack(states()), LOADERS, epochs=1, hooks=(hook,))
    assert key in state.history


def test_a_table_has_a_line_for_each_model():
    history = trained(fl.pipeline()(LOSS), fl.stack(states()), 2).history
    lines = str(history).splitlines()
    assert [line.split()[2] for line in lines[2:]] == ["a", "b", "c"] * 2
    assert lines[1].split()[2] == "model"


def test_a_plot_has_a_curve_for_each_model():
    pytest.importorskip("matplotlib")
    history = trained(fl.pipeline()(LOSS), fl.stack(states()), 3).history
    axis = history.plot(x="epoch").axes[0]
    assert axis.get_title(loc="left") == "valid/loss" or "valid/loss" in axis.get_title()
    labels = [text.get_text().split(":")[0] for text in axis.get_legend().get_texts()]
    assert labels == ["a", "b", "c"]


def test_progress_shows_a_line_for_each_model(capsys):
    fl.fit(fl.pipeline()(LOSS), fl.stack(states()), LOADERS, epochs=1)
    shown = capsys.readouterr().err
    assert all(f"  {name}  valid/loss" in shown for name in NAMES)
    assert "best valid/" in shown.splitlines()[-1]


# --- guards


def loss_of_batch(model, batch):
    return (model.w * batch).mean() / (model.w != 5).float()


def test_halt_on_nonfinite_names_the_models():
    state = fl.stack({"a": toy(), "b": toy(w=5.0)})
    state = fl.fit(fl.pipeline()(loss_of_batch), state, ONES, hooks=(fl.halt_on_nonfinite(1),))
    assert state.stop.startswith("halt_on_nonfinite: the training loss of b became inf")


def test_halt_on_nonfinite_finds_the_update_of_a_stack():
    state = fl.stack({"a": toy(), "b": toy(w=6.0)})  # 5 after one update
    hooks = (fl.halt_on_nonfinite(keep=True),)
    state = fl.fit(fl.pipeline()(loss_of_batch), state, ONES, hooks=hooks)
    assert state.extra["nonfinite"]["step"] == 2 and "of b became" in state.stop


def test_a_model_that_diverges_does_not_disturb_the_others():
    state = fl.stack({"a": toy(), "b": toy(w=5.0)})
    state = fl.fit(fl.pipeline()(loss_of_batch), state, ONES, hooks=())
    assert state.model["a"].w.item() == -2.0 and not math.isfinite(state.model["b"].w.item())


def test_skip_nonfinite_skips_all_models_or_none():
    step = fl.pipeline(fl.skip_nonfinite())(toy_loss)
    batches = [torch.tensor([x]) for x in (1.0, math.nan, 2.0)]
    state = fl.fit(step, fl.stack({"a": toy(), "b": toy()}), batches, hooks=())
    assert (state.step, state.skipped, state.model["b"].w.item()) == (2, 1, -3.0)
    state = fl.stack({"a": toy(), "b": toy(w=5.0)})
    with pytest.raises(FloatingPointError, match=r"a gradient of b is not finite.*one state.step"):
        fl.fit(fl.pipeline(fl.skip_nonfinite())(loss_of_batch), state, ONES, hooks=())


def test_a_loss_function_leaves_a_batch_out_for_all_models():
    def loss_fn(model, batch):
        return fl.skip("too large") if batch.max() > 1 else toy_loss(model, batch)

    batches = [torch.tensor([x]) for x in (1.0, 9.0, 1.0)]
    state = fl.fit(fl.pipeline()(loss_fn), fl.stack({"a": toy(), "b": toy()}), batches, hooks=())
    assert (state.step, state.skipped, state.model["a"].w.item()) == (2, 1, -2.0)


# --- what is refused


def reads(model, batch):
    loss = (model.w * batch).mean()
    return loss if loss.item() > 0 else -loss


def weighs(model, batch):
    return (model.w * batch).mean(), {"weight": model.w.detach()}


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (reads, NotImplementedError, "reads cannot be called.*depends on the values of a tensor"),
        (weighs, ValueError, "weight.*of weighs depends on the model"),
    ],
)
def test_a_loss_function_that_cannot_be_stacked_is_refused_by_name(loss_fn, error, message):
    with pytest.raises(error, match=message):
        fl.pipeline()(loss_fn)(fl.stack({"a": toy(), "b": toy()}), torch.ones(1))


@pytest.mark.parametrize(
    "member",
    [
        fl.ema(0.9), fl.amp("bf16"), fl.sam(), fl.spike_guard(), fl.compiled(), fl.microbatch(2),
        fl.clip(1.0, only="w"), fl.grad_norm(by="module"), fl.plateau("train/a/loss"),
        fl.Middleware("mine", gradient=lambda step: lambda state, batch: step(state, batch)),
    ],
    ids=repr,
)  # fmt: skip
def test_middleware_that_cannot_be_stacked_is_refused_by_name(member):
    state = fl.stack({"a": toy(), "b": toy()})
    step = fl.pipeline(member)(toy_loss)
    with pytest.raises(NotImplementedError, match="stack of models"):
        fl.fit(step, state, ONES, hooks=())
    assert state.step == 0 and state.model["a"].w.item() == 0.0


def test_a_middleware_of_ones_own_can_say_that_it_works_with_a_stack():
    """It multiplies the stacked gradients, which are 1, by 3."""

    def tripled(state, batch, out):
        for grad in fl.extend.gradients(state):
            grad.mul_(3)
        return state, out

    mine = fl.Middleware("mine", gradient=fl.extend.then(tripled), traits=("stacks",))
    state = fl.stack({"a": toy(), "b": toy()})
    state = fl.fit(fl.pipeline(mine)(toy_loss), state, [torch.ones(1)], hooks=())
    assert state.model["a"].w.item() == state.model["b"].w.item() == -3.0


def test_steps_that_cannot_be_stacked_are_refused():
    state = fl.stack({"a": toy(), "b": toy()})
    step = fl.pipeline()(toy_loss)
    for other in (fl.raw(lambda state, batch: None), fl.alternate({"a": step, "b": step})):
        with pytest.raises(NotImplementedError, match="does not train a stack of models"):
            fl.fit(other, state, ONES, hooks=())


def _frozen(seed):
    model = network(seed)
    model[0].requires_grad_(seed != 1)
    return model


def _adam_or_sgd(model, i):
    return (sgd if i else OPTIMIZERS["Adam"])(model, i)


def _hooked(seed):
    model = network(seed)
    model[0].register_forward_hook(lambda *given: None)
    return model


DIFFERENT = {
    "other shapes": (states, {"make": lambda i: network(i, hidden=16 + i)}, "weight: .16, 8.*17"),
    "other classes": (
        states,
        {"make": lambda i: network(i) if i else nn.Sequential(*network(0)[:3], nn.Linear(16, 3),
                                                              nn.Identity())},
        "only one has the module '4'",
    ),
    "other settings": (states, {"make": lambda i: network(i, dropout=0.1 * i)}, "'2'.*in p: 0"),
    "other activations": (
        states,
        {"make": lambda i: nn.Sequential(nn.Linear(8, 3), nn.ReLU() if i else nn.Tanh())},
        "their classes, Tanh and ReLU",
    ),
    "frozen": (states, {"make": _frozen}, "frozen"),
    "optimizers": (states, {"optimizer": _adam_or_sgd}, "one class.*are Adam and SGD"),
    "groups": (
        states,
        {"optimizer": lambda m, i: torch.optim.SGD([*m.parameters()][i % 2 :])},
        "other parameters in their groups",
    ),
    "hooks": (states, {"make": _hooked}, "has a hook"),
    "compiled": (states, {"make": lambda i: torch.compile(network(i))}, "'a' is compiled"),
    "lazy": (
        lambda: {"a": attrs.evolve(toy(), model=nn.LazyLinear(1))}, {}, "call each model with one"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_states_that_cannot_be_stacked_are_refused_by_name(case):
    make, given, message = DIFFERENT[case]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        fl.stack(make(**given))


def test_states_at_other_places_are_refused():
    step = fl.pipeline()(toy_loss)
    later = fl.fit(step, toy(), ONES, hooks=())
    with pytest.raises(ValueError, match=r"one state\.step: 'a' is at step 0 and 'b' at 2"):
        fl.stack({"a": toy(), "b": later})
    longer = fl.fit(step, toy(), [torch.ones(2)] * 2, hooks=(), epochs=1)
    with pytest.raises(ValueError, match=r"'a' is at step 2, but items 2 and 'b' at 4"):
        fl.stack({"a": fl.fit(step, toy(), [torch.ones(1)] * 2, hooks=()), "b": longer})
    with pytest.raises(ValueError, match=r"the same stop.*attrs\.evolve"):
        fl.stack({"a": toy(), "b": attrs.evolve(toy(), stop="enough")})
    with pytest.raises(NotImplementedError, match=r"'ema'.*not the same"):
        averaged = [fl.fit(fl.pipeline(fl.ema(0.9))(toy_loss), toy(), ONES, hooks=()) for _ in "ab"]
        fl.stack(dict(zip("ab", averaged, strict=True)))
    state = toy()
    with pytest.raises(ValueError, match="train the same parameters"):
        fl.stack({"a": state, "b": state})


def test_wrong_arguments_of_stack_say_what_to_write():
    with pytest.raises(TypeError, match=r"fork\(state"):
        fl.stack([toy()])
    with pytest.raises(ValueError, match="at least one state"):
        fl.stack({})
    with pytest.raises(ValueError, match='without "/"'):
        fl.stack({"a/b": toy()})
    with pytest.raises(TypeError, match="a name in states as that of a model, a str; got 1"):
        fl.stack({1: toy()})
    with pytest.raises(ValueError, match="as that of a model; got an empty str"):
        fl.stack({"": toy()})
    with pytest.raises(ValueError, match="a stack already"):
        fl.stack({"a": fl.stack({"a": toy()})})
    with pytest.raises(ValueError, match=r"of a stack, .*; the model of this one is a Toy"):
        fl.unstack(toy())
    with pytest.raises(NotImplementedError, match="several: a, b"):
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        parts = {n: torch.optim.SGD(m.parameters()) for n, m in zip("ab", model, strict=True)}
        fl.stack({"a": fl.TrainState.create(model, parts)})
    with pytest.raises(NotImplementedError, match=r"LBFGS.*evaluates the loss by itself"):
        model = nn.Linear(1, 1)
        fl.stack({"a": fl.TrainState.create(model, torch.optim.LBFGS(model.parameters()))})
    with pytest.raises(TypeError, match=r"state\.model\['a'\]\(x\)"):
        fl.stack({"a": toy()}).model(1)
    with pytest.raises(KeyError, match="no model 'z'"):
        fl.stack({"a": toy()}).model["z"]


def test_tools_for_one_model_say_which_to_take():
    for call in (
        lambda state: fl.find_lr(fl.pipeline()(toy_loss), state, ONES),
        lambda state: fl.find_batch_size(fl.pipeline()(toy_loss), state, lambda n: ONES),
        lambda state: fl.data.tune(fl.pipeline()(toy_loss), state, ONES),
    ):
        with pytest.raises(NotImplementedError, match=r"unstack\(state\)\['a'\]"):
            call(fl.stack({"a": toy(), "b": toy()}))


def test_names_with_dots_are_kept():
    state = fl.stack(fl.fork(toy(), {"lr": [0.5, 0.25]}))
    assert [*state.model] == ["lr=0.5", "lr=0.25"]
    assert state.model["lr=0.5"].w.item() == 0.0
    assert [*fl.unstack(state)] == ["lr=0.5", "lr=0.25"]
