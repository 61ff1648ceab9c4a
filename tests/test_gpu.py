"""What only a GPU can show: real graphs, and that nothing waits for the device."""

import sys

import attrs
import pytest
import torch
from sample_middleware import average
from torch import nn

import fnloop as fl
from fnloop import schedules
from fnloop.testing import Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def net(*between):
    first = nn.Linear(
        8, 16, bias=not between
    )  # batch norm would leave a bias rounding noise as gradient: Adam makes it large
    return nn.Sequential(first, *between, nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)


def data(*sizes):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, 8, generator=generator) for n in sizes]
    return [(x.to(DEVICE), x.sum(1, keepdim=True).sin().to(DEVICE)) for x in parts]


def loss_fn(model, batch):
    output = model(batch[0])
    return nn.functional.mse_loss(output.float(), batch[1]), {"output": output}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.02, device=DEVICE), capturable=True)


SIZES = (8, 8, 6, 8, 2, 8, 4)
PROBLEMS = {
    "small": Problem(net, loss_fn, data(*SIZES), sgd),
    "dropout and batch norm": Problem(
        lambda: net(nn.BatchNorm1d(16), nn.Dropout(0.3)), loss_fn, data(*SIZES), adamw
    ),
}


TABLE = [
    (),
    (fl.accumulate(2), fl.clip(0.05)),
    (fl.clip(0.05), fl.accumulate(3)),
    (fl.amp("bf16"), fl.accumulate(2), fl.clip(0.05)),
    (fl.amp("fp16", init_scale=2.0**20, growth_interval=3), fl.accumulate(2), fl.clip(0.05)),
    (fl.schedule(schedules.cosine(warmup=2, min_ratio=0.1)), average(0.9)),
    (fl.ema(0.9, start=4, every=2), fl.swa(0.5)),
    (
        fl.torch_scheduler(
            lambda optimizer, run: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ),
    ),
    (
        fl.metric(
            mean=lambda aux, batch: aux["output"].mean(),
            most=lambda aux, batch: fl.Max(aux["output"].max()),
        ),
    ),
]


def run(problem, *members, epochs=4, **kwargs):
    step = fl.pipeline(*members)(problem.loss_fn)
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    return fl.fit(step, problem.state(), loaders, epochs=epochs, **{"hooks": (), **kwargs})


def assert_close(a, b, rtol=1e-4):
    for mine, theirs in zip(
        a.model.state_dict().values(), b.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-6)
    for name in b.history.keys():  # noqa: SIM118
        assert a.history[name] == pytest.approx(b.history[name], rel=rtol), name


@pytest.mark.parametrize("members", TABLE, ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_run_with_graphs_is_the_same(members, problem):
    assert_close(run(problem, *members, fl.cuda_graph(warmup=1)), run(problem, *members))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
)
def test_a_plain_optimizer_is_made_capturable(optimizer):
    problem = attrs.evolve(
        PROBLEMS["small"], optimizer=lambda parameters: optimizer(parameters, lr=0.01)
    )
    halving = fl.schedule(lambda i, total: 0.5 ** (i // 7))
    assert_close(run(problem, halving, fl.cuda_graph()), run(problem, halving), rtol=1e-3)


def test_a_graph_draws_what_an_eager_update_draws():
    drawn = []

    def noisy(model, batch):
        noise = torch.rand((), device=DEVICE)
        return model(batch[0]).mean() * 0, {"noise": noise, "weight": 1}

    problem = attrs.evolve(PROBLEMS["small"], loss_fn=noisy, batches=data(*[4] * 8))
    for members in ((), (fl.cuda_graph(warmup=2),)):
        keep = fl.metric(noise=lambda aux, batch: fl.Last(aux["noise"]))
        drawn.append(
            run(problem, keep, *members, evaluate_every=fl.every(steps=1), epochs=2).history[
                "train/noise"
            ]
        )
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0][:8])) == 8


def test_a_host_read_in_the_loss_is_named_and_the_state_is_as_it_was():
    def reading(model, batch):
        loss = model(batch[0]).mean()
        return loss if loss.item() < 1e9 else loss * 0

    problem = attrs.evolve(
        PROBLEMS["dropout and batch norm"], loss_fn=reading
    )  # it also draws after the failure
    with pytest.raises(fl.CaptureError, match=r"return loss if loss\.item\(\) < 1e9"):
        run(problem, fl.cuda_graph())
    with pytest.warns(UserWarning, match="runs eagerly"):
        fallen = run(problem, fl.cuda_graph(fallback=True))
    assert_close(fallen, run(problem))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_checkpoints_go_from_graphs_to_eager_runs_and_back(tmp_path):
    problem = attrs.evolve(
        PROBLEMS["small"], optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    )
    whole = run(problem, epochs=4)
    for first, then in (((fl.cuda_graph(),), ()), ((), (fl.cuda_graph(),))):
        path = fl.save(run(problem, *first, epochs=2), tmp_path / "a")
        loaders = {"train": problem.batches, "valid": problem.batches[:2]}
        state = fl.fit(
            fl.pipeline(*then)(loss_fn),
            fl.restore(path, problem.state(seed=3)),
            loaders,
            epochs=4,
            hooks=(),
        )
        assert_close(state, whole, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("members", [(fl.compiled(),), (fl.compiled(), fl.cuda_graph())], ids=repr)
def test_compiled_and_captured_steps_are_the_same(members):
    problem = PROBLEMS["small"]
    assert_close(run(problem, *members), run(problem), rtol=1e-3)


@pytest.mark.parametrize("members", [(), (fl.cuda_graph(),)], ids=repr)
def test_nothing_waits_for_the_device_between_two_reports(members, monkeypatch):
    """Law 7 on CUDA with all reporting hooks: torch raises on any wait outside of a report."""
    from fnloop._core import metrics

    def reading(metrics, read=metrics.read):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(metrics)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    for module in ("fnloop._loop.fit", "fnloop._hooks.progress_text"):
        monkeypatch.setattr(sys.modules[module], "read", reading)
    problem = attrs.evolve(PROBLEMS["small"], batches=data(*[8] * 40))
    step = fl.pipeline(fl.accumulate(2), fl.clip(1.0), fl.schedule(schedules.cosine()), *members)(
        problem.loss_fn
    )
    state = fl.fit(step, problem.state(), problem.batches, epochs=1, hooks=())  # a capture waits
    hooks = (fl.progress(), fl.halt_on_nonfinite(), fl.early_stop("train/loss", patience=50))
    torch.cuda.set_sync_debug_mode("error")
    try:
        fl.fit(step, state, problem.batches, epochs=3, hooks=hooks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
