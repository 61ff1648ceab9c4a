"""Runs are resumed after each of their updates, in one process and in several."""

import attrs
import pytest
from joined import come_to, flat, in_double
from process_data import loader
from process_problems import adamw, by_tokens, created, network
from sample_hooks import stop_at
from sample_middleware import halved, warming_up
from test_training import Gan, fooled, own, real_and_fake, turns, two, weighted

import fnloop as fl

pytestmark = pytest.mark.slow
PART = fl.ema(warming_up, only="0", evaluate=False)
BY_NAME = {"order": ("d", "d", "g"), "batch": {"d": "next", "g": "same"}}
KINDS = {  # the middleware, the loss, the model and its optimizers
    "turns": ((), turns(**BY_NAME), Gan, lambda parameters: two([*parameters])),
    "own": ((fl.accumulate(2), fl.clip(0.5), PART), own(by_tokens), network, adamw),
    "own turn": (
        (),
        fl.alternate({"d": own(real_and_fake), "g": fl.pipeline()(fooled)}, **BY_NAME),
        Gan,
        lambda parameters: two([*parameters]),
    ),
    "rates": ((fl.torch_scheduler(halved), PART), by_tokens, network, adamw),
    "scheduled": (
        (fl.scheduled(beta=fl.schedules.linear(min_ratio=0.1)),), weighted, network, adamw,
    ),
}  # fmt: skip


def trained(name, folder=None, until=None):
    members, loss, make, optimizer = KINDS[name]
    state = created(False, optimizer, make)
    state = state if folder is None else fl.resume(folder, state)
    hooks = () if until is None else (stop_at(until),)
    step = fl.pipeline(*members)(loss) if members else loss
    state = fl.fit(step, state, loader(shuffle=True), epochs=1, hooks=hooks)
    return attrs.evolve(state, stop=None)


@in_double
def cut(folder):
    """Return what whole runs come to, and the same runs that were cut after each update."""
    found = {}
    for name in KINDS:
        whole = trained(name)
        found[name] = [_numbers(whole)]
        for n in range(1, whole.step):
            path = folder / f"{name} {n}"
            fl.save(trained(name, until=n), path / "saved")
            found[name].append(_numbers(trained(name, path)))
    return found


def _numbers(state):
    average = state.slots.get("ema", {})
    return {**come_to(state), "average": flat(average.values()) if average else []}


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_that_is_cut_after_any_update_equals_a_whole_one(launched, n):
    for found in launched(cut, n):
        for name, (whole, *others) in found.items():
            assert len(others) == whole["counters"][0] - 1 >= 2, name
            assert others == [whole] * len(others), name
