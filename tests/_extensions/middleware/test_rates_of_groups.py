"""Rates of parameter groups, by their names: a schedule, a scheduler of torch, plateau."""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import check_laws, small

ONE = torch.ones(1)


def in_groups(**names):
    """A state with a parameter of its own for each group, by name and rate."""
    model = torch.nn.ParameterDict({name: torch.zeros(()) for name in names})
    groups = [{"params": [model[name]], "lr": lr, "name": name} for name, lr in names.items()]
    return fl.TrainState.create(model, torch.optim.SGD(groups, lr=1.0))


def add_up(model, batch):
    return sum(model.values()) * batch.mean()


def rates_of(state):
    return {
        k.removeprefix("train/lr/"): v for k, v in state.history[-1].metrics.items() if "lr" in k
    }


def test_a_schedule_sets_the_groups_that_are_named():
    third = fl.schedule(lambda i, total: 1 / (i + 1), only="body")
    tenth = fl.schedule(lambda i, total: 0.1**i, only=["head", "neck"])
    state = in_groups(body=6.0, neck=1.0, head=10.0, tail=1.0)
    state = fl.fit(fl.pipeline(third, tenth)(add_up), state, [ONE] * 3, hooks=())
    used = {"body": 2.0, "neck": 0.01, "head": 0.1}
    assert {k: rates_of(state)[k] for k in used} == pytest.approx(used)
    moved = {k: -v.item() for k, v in state.model.items()}
    assert moved == pytest.approx({"body": 11.0, "neck": 1.11, "head": 11.1, "tail": 3.0})


def test_a_scheduler_of_torch_sets_the_group_that_is_named():
    halve = lambda optimizer, run: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    tenth = lambda optimizer, run: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    given = fl.torch_scheduler(halve, "head"), fl.torch_scheduler(tenth, "body")
    state = fl.fit(
        fl.pipeline(*given)(add_up), in_groups(body=1.0, head=1.0, tail=1.0), [ONE] * 3, hooks=()
    )
    moved = {k: -v.item() for k, v in state.model.items()}
    assert moved == pytest.approx({"body": 1.11, "head": 1.75, "tail": 3.0})


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("through", ["snapshot", "a checkpoint"])
def test_a_scheduler_of_a_group_continues_after(through, updates, tmp_path):
    cycle = lambda opt, run: torch.optim.lr_scheduler.OneCycleLR(opt, 8.0, run.total_steps)
    step = fl.pipeline(
        fl.torch_scheduler(cycle, "head"), fl.schedule(lambda i, total: i, only="body")
    )
    loaders, whole = [ONE] * 4, in_groups(body=1.0, head=1.0)
    whole = fl.fit(step(add_up), whole, loaders, epochs=1, hooks=())
    kept = []

    def keep(state):
        kept.append(fl.snapshot(state))
        fl.save(state, tmp_path / str(state.step))
        return state

    fl.fit(step(add_up), in_groups(body=1.0, head=1.0), loaders, epochs=1, hooks=(keep,))
    state = kept[updates - 1]
    if through == "a checkpoint":
        state = fl.restore(tmp_path / str(updates), in_groups(body=1.0, head=1.0))
    state = fl.fit(step(add_up), state, loaders, epochs=1, hooks=())
    assert {k: v.item() for k, v in state.model.items()} == {
        k: v.item() for k, v in whole.model.items()
    }


def constant(**settings):
    return fl.schedule(lambda i, total: 1.0, **settings)


@pytest.mark.parametrize(("member", "said"), [
    (constant(only="tail"), "names the parameter group 'tail', but the groups with a name"),
    (fl.torch_scheduler(lambda opt, run: None, only="tail"), "names the parameter group 'tail'"),
    (fl.plateau("train/loss", only="tail"), "plateau names the parameter group 'tail'"),
])  # fmt: skip
def test_a_group_that_there_is_not_is_named(member, said):
    with pytest.raises(ValueError, match=said):
        fl.fit(fl.pipeline(member)(add_up), in_groups(body=1.0), [ONE], hooks=())


def test_a_name_of_an_optimizer_and_of_a_group_is_refused():
    model = torch.nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    first = torch.optim.SGD([{"params": [model["a"]], "name": "b"}], lr=1.0)
    state = fl.TrainState.create(model, {"a": first, "b": torch.optim.SGD([model["b"]], lr=1.0)})
    with pytest.raises(ValueError, match="'b', which is an optimizer and a parameter group"):
        fl.fit(fl.pipeline(constant(only="b"))(add_up), state, [ONE], hooks=())


# --- the laws


def in_two_groups(parameters):
    first, *rest = parameters
    groups = [{"params": [first], "name": "first"}, {"params": rest, "name": "rest"}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def decay(optimizer, run):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize("members", [
    (fl.schedule(fl.schedules.exponential(0.9), only="first"),),
    (fl.torch_scheduler(decay, "first"), fl.schedule(lambda i, total: 1 / (i + 1), only="rest")),
    (fl.plateau("train/loss", patience=1, mode="max", relative=True, min_value=0.01, only="rest"),),
], ids=repr)  # fmt: skip
def test_rates_of_groups_keep_the_laws(members):
    check_laws(fl.pipeline(*members), attrs.evolve(small(), optimizer=in_two_groups))
