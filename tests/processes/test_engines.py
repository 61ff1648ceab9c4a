"""Mixed precision, random draws, and calls in any number, with several processes."""

import launch
import pytest
import torch
from evaluation_draws import CALLS, draws_in
from joined import said
from process_data import batches, loader
from process_problems import created, entropy, fitted
from sample_middleware import repeat
from test_training import Gan, fooled, real_and_fake, turns, two
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow


def precision(folder):
    seen = set()

    def loss(model, batch):
        loss, aux = entropy(model, batch)
        seen.add(str(aux["output"].dtype))
        return loss, aux

    return [said(lambda: fitted(batches(20), loss=loss).backend.precision), *seen]


@pytest.mark.parametrize(("kind", "n"), [("bf16", 1), ("bf16", 2), ("fp16", 2)])
def test_mixed_precision_that_accelerate_is_configured_for(tmp_path, kind, n):
    configured = {"ACCELERATE_MIXED_PRECISION": kind, "ACCELERATE_USE_CPU": "true"}
    found = launch.results(tmp_path, n, precision, environment=configured)
    if kind == "bf16":
        assert found == [["bf16", "torch.bfloat16"]] * n
    else:
        assert found[0] == found[1]
        assert found[0][0].startswith("ValueError: accelerate is configured for fp16")


@fl.middleware("gradient")
def noise(std):
    def wrap(step):
        def noisy(state, batch):
            before = torch.rand(())
            state, out = step(state, batch)
            for p in state.model.parameters():
                p.grad.add_(torch.randn_like(p) * before, alpha=std * min(len(batch[0]), 1))
            return state, out

        return noisy

    return wrap


def drawing(folder):
    found, masks = {}, []

    def dropping(model, batch):
        mask = torch.rand(len(batch[0]))
        masks.append(mask.tolist())
        return (model.w * batch[0] * mask).mean()

    data = TensorDataset(torch.arange(1.0, 8.0))
    for name, members in {"one": (), "two": (fl.accumulate(2),)}.items():
        step = fl.pipeline(noise(0.1), *members)(dropping)
        state = fl.fit(step, toy(), DataLoader(data, 2), epochs=2, hooks=())
        found[name] = [state.model.w.item(), masks[:]]
        masks.clear()
    mx = fl.metric(mx=lambda aux, batch: batch[0].max())
    state = fl.fit(fl.pipeline(mx)(dropping), toy(), DataLoader(data, 4), hooks=())
    found["history"] = [r.metrics for r in state.history]
    return found


def test_draws_differ_within_backward_and_agree_after_it(launched):
    first, other = launched(drawing, 2)
    for name in ("one", "two"):
        assert other[name][0] == first[name][0]
        assert other[name][1][0] != first[name][1][0]
    assert other["history"] == first["history"]


def calls(folder):
    state = toy()
    numbers = [torch.tensor([float(x)]) for x in (1, 3, 5, 7)]
    share = numbers[state.backend.rank :: state.backend.world_size]
    step = fl.pipeline(fl.accumulate(len(share)), repeat())(toy_loss)
    empty = fl.pipeline(fl.accumulate(len(share)), repeat([torch.ones(0)], share[:1]))(toy_loss)
    last = fl.pipeline(fl.metric(last=lambda aux, batch: fl.Last(batch.max())))(toy_loss)
    drawn = lambda loss: lambda m, b: seen.append(torch.rand(()).item()) or loss(m, b)
    seen, both = [], turns(d_loss=drawn(real_and_fake), g_loss=drawn(fooled), order=("d", "d", "g"))
    state = created(optimizer=two, make=Gan)
    fl.fit(both, state, loader(), steps=2, hooks=())
    return {
        "turns": seen,
        "w": [step(toy(), share)[0].model.w.item(), empty(toy(), share)[0].model.w.item()],
        "draws": {name: draws_in(call) for name, call in CALLS.items()},
        "last": fl.fit(last, toy(), numbers[:3], hooks=()).history["train/last"],
    }


def test_each_batch_in_evaluation_has_the_same_draw_as_on_one_process(launched):
    """Each process has three of the six batches."""
    for name, call in CALLS.items():
        first, second = (result["draws"][name] for result in launched(calls, 2))
        assert (list(first), list(second)) == (["0", "2", "4"], ["1", "3", "5"])
        assert {**first, **second} == draws_in(call)


def test_each_turn_and_each_process_draws_numbers_of_its_own(launched):
    drawn = [number for found in launched(calls, 2) for number in found["turns"]]
    assert len(drawn) == len(set(drawn)) == 12


def test_a_gradient_middleware_may_call_its_step_again_and_with_nothing(launched):
    """The mean of 1, 3, 5 and 7 is 4, twice; and with the one of 1 and 3, which is 2, it is 6."""
    for found in (*launched(calls, 1), *launched(calls, 2)):
        assert found["w"][0] == -8.0
    for found in launched(calls, 2):
        assert found["w"][1] == -6.0
        assert found["last"] == [5.0]  # of three batches; the second process has none at the end
