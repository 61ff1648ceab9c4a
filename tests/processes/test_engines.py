"""Mixed precision, FSDP, padding and random draws with several processes."""

import launch
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
)
from process_problems import batches, entropy, fitted, said, world
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

import fnloop as fl
from fnloop._backend import collectives
from fnloop.testing import Toy, toy

pytestmark = pytest.mark.slow


def precision(folder):
    """Return the dtype of an output, with what accelerate is configured for."""
    seen = []

    def loss(model, batch):
        loss, aux = entropy(model, batch)
        seen.append(str(aux["output"].dtype))
        return loss, aux

    return [said(lambda: fitted(batches(20), loss=loss).backend.precision), *set(seen)]


@pytest.mark.parametrize("n", [1, 2])
def test_mixed_precision_that_accelerate_is_configured_for(tmp_path, n):
    configured = lambda kind: {
        "environment": {"ACCELERATE_MIXED_PRECISION": kind, "ACCELERATE_USE_CPU": "true"}
    }
    assert (
        launch.results(tmp_path / "bf16", n, precision, **configured("bf16"))
        == [["bf16", "torch.bfloat16"]] * n
    )
    if n == 2:
        (mine, *_), other = launch.results(tmp_path / "fp16", n, precision, **configured("fp16"))
        assert mine.startswith("ValueError: accelerate is configured for fp16") and other[0] == mine


def seen(folder):
    """Return which samples a loss function is given, with and without collectives in it."""
    found, given = {}, []

    def quiet(model, batch):
        given.extend(batch[0].tolist())
        return (model.w * batch[0]).mean()

    def talking(model, batch):
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == world()
        return quiet(model, batch)

    def take(name):
        found[name] = sorted(
            sample for own in collectives.gather_objects(list(given)) for sample in own
        )
        given.clear()

    data = TensorDataset(torch.arange(7.0))
    for loss in (quiet, talking):
        state = fl.fit(fl.pipeline()(loss), toy(), DataLoader(data, 2, shuffle=True), hooks=())
        take(f"train, {loss.__name__}")
        fl.evaluate(fl.pipeline()(loss), state, DataLoader(data, 3))
        take(f"evaluate, {loss.__name__}")
        found[f"w, {loss.__name__}"] = state.model.w.item()
    found["results"] = [
        *fl.predict(
            lambda model, batch: quiet(model, batch) and batch[0].tolist(),
            state,
            DataLoader(data, 3),
        )
    ]
    take("predict")
    return found


@pytest.mark.parametrize("n", [2])
def test_each_sample_is_loaded_by_one_process(launched, n):
    for found in launched(seen, n):
        for name in ("train, quiet", "evaluate, quiet", "predict"):
            assert found[name] == [*range(7)], name
        assert found["results"] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("n", [2])
def test_a_loss_function_with_collectives_is_called_by_all_in_every_round(launched, n):
    for found in launched(seen, n):
        assert (
            len(found["train, talking"]) == [7, 7 + 2][n - 2]
        )  # on 3 the last round has one batch, of one: two more look at it
        assert len(found["evaluate, talking"]) == [7 + 1, 7][n - 2]
        assert found["w, talking"] == pytest.approx(found["w, quiet"])


@fl.middleware("gradient")
def noise(std):
    """Add noise to the gradient, as the README does, and look at the batch."""

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
    """Return what processes that draw inside and outside of backward come to."""
    found, masks = {}, []

    def dropping(model, batch):
        mask = torch.rand(len(batch[0]))
        masks.append(mask.tolist())
        return (model.w * batch[0] * mask).mean()

    data = TensorDataset(torch.arange(1.0, 8.0))
    for name, pipe in {
        "one": fl.pipeline(noise(0.1)),
        "two": fl.pipeline(noise(0.1), fl.accumulate(2)),
    }.items():
        state = fl.fit(pipe(dropping), toy(), DataLoader(data, 2), epochs=2, hooks=())
        found[name] = [state.model.w.item(), masks[:]]
        masks.clear()
    mx = fl.metric(mx=lambda aux, batch: batch[0].max())
    state = fl.fit(fl.pipeline(mx)(dropping), toy(), DataLoader(data, 4), hooks=())
    found["history"] = [r.metrics for r in state.history]
    handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    found["views"] = views(handler).model.w.item()
    return found


def views(handler):
    model = Toy(1.0)
    state = fl.TrainState.create(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        seed=0,
        backend=Accelerator(cpu=True, kwargs_handlers=[handler]),
    )
    data = DataLoader(TensorDataset(torch.arange(1.0, 9.0)), 4 // world())
    return fl.fit(
        fl.pipeline(fl.clip(5.0), fl.accumulate(2))(lambda m, b: (m.w * b[0]).mean()),
        state,
        data,
        hooks=(),
    )


@pytest.mark.parametrize("n", [2])
def test_draws_differ_within_backward_and_agree_after_it(launched, n):
    first, *others = launched(drawing, n)
    for other in others:
        for name in ("one", "two"):
            assert other[name][0] == first[name][0]
            assert other[name][1][0] != first[name][1][0]
        assert other["history"] == first["history"]


def test_gradients_may_be_views_of_the_buckets_of_ddp(launched):
    assert launched(drawing, 2)[0]["views"] == pytest.approx(
        launched(drawing, 1)[0]["views"]
    )  # 1 - 0.1 (2.5 + 5) / 2
