"""Hooks that are registered on torch's optimizers."""

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fnloop as fl
from fnloop.testing import toy, toy_loss

step = fl.pipeline()(toy_loss)


REGISTER = {
    "one optimizer, before": lambda state, hook: state.optimizer.register_step_pre_hook(hook),
    "one optimizer, after": lambda state, hook: state.optimizer.register_step_post_hook(hook),
    "all optimizers, before": lambda state, hook: register_optimizer_step_pre_hook(hook),
    "all optimizers, after": lambda state, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
def test_every_kind_of_optimizer_hook_is_called_at_each_update(register):
    called, state = [], toy()
    handle = register(state, lambda *_: called.append(1))
    try:
        fl.fit(step, state, [torch.ones(1)] * 3, hooks=())
    finally:
        handle.remove()
    assert len(called) == 3
