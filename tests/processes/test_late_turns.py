"""alternate(batch="late") in several processes: as "next", and as in one process."""

import pytest
import torch
from launch import reads, written_by
from torch import nn
from torch.utils.data import DataLoader

import fnloop as fl

pytestmark = pytest.mark.slow

DATA = torch.arange(1.0, 18.0, dtype=torch.float64)  # on two processes, one of the last is padding


def made(batch):
    zero = lambda: torch.zeros((), dtype=torch.float64)
    model = nn.ParameterDict({"a": zero(), "b": zero()})
    optimizers = {k: torch.optim.SGD([model[k]], lr=0.1) for k in "ab"}
    of = lambda k: fl.pipeline()(lambda model, x: ((model[k] - x) ** 2).mean())
    step = fl.alternate({k: of(k) for k in "ab"}, order=("a", "b", "b"), batch=batch)
    return step, fl.TrainState.create(model, optimizers, seed=0)


def come_to(state):
    values = [state.model[k].item() for k in "ab"]
    return [*values, state.step, state.items, [[r.step, r.metrics] for r in state.history]]


def trained(folder):
    found = {}
    for batch in ("next", "late"):
        step, state = made(batch)
        loader = DataLoader(DATA, batch_size=4 // state.backend.data_size, shuffle=True)
        save = lambda state: fl.save(state, folder / f"{state.step}") and state
        hooks = () if batch == "next" else (fl.every(steps=1)(save),)
        found[batch] = come_to(fl.fit(step, state, loader, epochs=2, hooks=hooks))
    return found


@reads(trained, [2])
def continued(folder):
    found = {}
    for cut in (1, 2, 3):
        step, state = made("late")
        state = fl.restore(written_by(trained, 2, folder) / f"{cut}", state)
        loader = DataLoader(DATA, batch_size=2, shuffle=True)
        found[str(cut)] = come_to(fl.fit(step, state, loader, epochs=2, hooks=()))
    return found


def flat(found):
    *numbers, records = found
    return [*numbers, *(v for step, m in records for v in (step, *m.values()))]


def test_late_turns_are_those_of_one_process(launched):
    (one,) = launched(trained, 1)
    for found in launched(trained, 2):
        assert flat(found["late"]) == pytest.approx(flat(found["next"]), rel=1e-12)
        assert flat(found["late"]) == pytest.approx(flat(one["next"]), rel=1e-12)
        assert one["late"] == one["next"]


def test_a_run_of_late_turns_continues_bit_for_bit(launched):
    whole = launched(trained, 2)[0]["late"]
    for found in launched(continued, 2):
        assert all(rest == whole for rest in found.values())
