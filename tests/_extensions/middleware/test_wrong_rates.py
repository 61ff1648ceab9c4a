"""Rates that are NaN, infinite or below 0: the run ends before the update that would use them."""

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop._display import screen

PAIR = torch.ones(1, 1)
NAN, INF = float("nan"), float("inf")


def constant(factor, **settings):
    return fl.schedule(lambda i, total: factor, **settings)


def from_update(n, bad):
    """Return a function of two arguments that is 1, and bad from update n on."""
    return lambda i, total: 1.0 if i < n else bad


def scheduler_of(bad):
    return lambda optimizer, run: lr_scheduler.LambdaLR(
        optimizer, lambda i: from_update(2, bad)(i, 0)
    )


def two_groups():
    model = torch.nn.Linear(1, 1)
    named = [{"params": [model.weight]}, {"params": [model.bias], "name": "head"}]
    return fl.TrainState.create(model, torch.optim.SGD(named, lr=1.0))


WRONG = {
    "nan": (lambda: fl.schedule(from_update(2, NAN)), r"at step 2 of 4 it returned nan"),
    "inf": (lambda: fl.schedule(from_update(2, INF)), r"finite number for lr; at step 2 of 4"),
    "-inf": (lambda: fl.schedule(from_update(2, -INF)), "for lr; at step 2 of 4 it gave -inf"),
    "numpy": (lambda: fl.schedule(from_update(2, np.float32(NAN))), "it returned nan"),
    "absolute": (lambda: fl.schedule(from_update(2, NAN), absolute=True), "it returned nan"),
    "items": (lambda: fl.schedule(lambda i, _: 1.0 if i < 2 else NAN, by="items"), "at items 2 of"),
    "group": (lambda: fl.schedule(from_update(2, NAN), only="head"), "it returned nan"),
    "momentum": (lambda: fl.schedule(from_update(2, INF), "momentum"), "for momentum;"),
    "dampening": (lambda: fl.schedule(from_update(2, INF), "dampening"), "finite number for damp"),
    "plateau": (
        lambda: [fl.plateau("train/loss"), fl.schedule(from_update(2, NAN))], "it returned nan"
    ),
    "torch nan": (lambda: fl.torch_scheduler(scheduler_of(NAN)), "for lr; at step 2 it gave nan"),
    "torch group": (lambda: fl.torch_scheduler(scheduler_of(NAN), only="head"), "it gave nan"),
    "to the loss": (lambda: fl.scheduled(beta=from_update(2, NAN)), r"scheduled\(.*returned nan"),
}  # fmt: skip


def loss_with(model, batch, beta=1.0):
    return model(batch).mean() * beta


@pytest.mark.parametrize("name", WRONG)
def test_a_number_that_is_wrong_ends_the_run_before_its_update(name):
    make, said = WRONG[name]
    members = made if isinstance(made := make(), list) else [made]
    with pytest.raises(ValueError, match=said) as caught:
        fl.fit(fl.pipeline(*members)(loss_with), two_groups(), [PAIR] * 4, hooks=())
    state = caught.value.state
    assert state.step == 2 and all(map(torch.isfinite, state.model.parameters()))
    assert any("step 2" in note for note in caught.value.__notes__)


def test_the_rates_of_a_stack_are_checked_too():
    state = fl.stack({"a": two_groups(), "b": two_groups()})
    step = fl.pipeline(fl.schedule(from_update(1, NAN)))(loss_with)
    with pytest.raises(ValueError, match="at step 1 of 3 it returned nan"):
        fl.fit(step, state, [PAIR] * 3, hooks=())


BELOW = {
    "a rate": lambda: fl.schedule(from_update(2, -0.1)),
    "of the state": lambda: fl.schedule(lambda state: 1.0 if state.step < 2 else -1),
    "a huge int": lambda: fl.schedule(from_update(3, -(10**30))),
    "weight decay": lambda: fl.schedule(from_update(2, -1), "weight_decay"),
    "of torch": lambda: fl.torch_scheduler(scheduler_of(-2)),
}


@pytest.mark.parametrize("name", BELOW)
def test_a_number_below_0_is_told_once(name, caplog):
    screen._warn.cache_clear()
    state = fl.fit(fl.pipeline(BELOW[name]())(loss_with), two_groups(), [PAIR] * 4, hooks=())
    told = [text for text in caplog.messages if "gives a number below 0 for" in text]
    assert state.step == 4 and len(told) == 1


@pytest.mark.parametrize("member", [
    constant(0), constant(-0.0), constant(-1.0, field="dampening"),
    fl.scheduled(beta=lambda i, total: float("inf")),  # such as a limit that is none yet
])  # fmt: skip
def test_numbers_on_the_edge_are_taken(member):
    fl.fit(fl.pipeline(member)(loss_with), two_groups(), [PAIR], hooks=())
