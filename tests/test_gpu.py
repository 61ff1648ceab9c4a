"""What only a GPU can show: real graphs, and that nothing waits for the device."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop import schedules
from fnloop.testing import Problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]


def net(*between):
    """Batch norm would leave a bias rounding noise as gradient, which Adam makes large."""
    first = nn.Linear(8, 16, bias=not between)
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
SMALL = Problem(net, loss_fn, data(*SIZES), sgd)
DRAWS = attrs.evolve(SMALL, model=lambda: net(nn.BatchNorm1d(16), nn.Dropout(0.3)), optimizer=adamw)
NEVER = fl.every(epochs=9)  # in less than 9 epochs


def small_with(optimizer, **settings):
    """Return the small problem with another optimizer."""
    return attrs.evolve(SMALL, optimizer=lambda parameters: optimizer(parameters, **settings))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
)
def test_a_plain_optimizer_is_made_capturable(optimizer):
    problem = small_with(optimizer, lr=0.01)
    halving = fl.schedule(lambda i, total: 0.5 ** (i // 7))
    assert_close(run(problem, halving, fl.cuda_graph()), run(problem, halving), rtol=1e-3)


def test_a_graph_draws_what_an_eager_update_draws():
    def noisy(model, batch):
        noise = torch.rand((), device=DEVICE)
        return model(batch[0]).mean() * 0, {"noise": noise, "weight": 1}

    problem = attrs.evolve(SMALL, loss_fn=noisy, batches=data(*[4] * 8))
    keep, each = fl.metric(noise=lambda aux, batch: fl.Last(aux["noise"])), fl.every(steps=1)
    eager, graphed = (
        run(problem, keep, *members, evaluate_every=each, epochs=2).history["train/noise"]
        for members in ((), (fl.cuda_graph(warmup=2),))
    )
    assert eager == graphed
    assert len(set(eager[:8])) == 8


def test_a_host_read_in_the_loss_is_named_and_the_state_is_as_it_was():
    """The problem also draws after the failure."""

    def reading(model, batch):
        loss = model(batch[0]).mean()
        return loss if loss.item() < 1e9 else loss * 0

    problem = attrs.evolve(DRAWS, loss_fn=reading)
    with pytest.raises(fl.CaptureError, match=r"return loss if loss\.item\(\) < 1e9"):
        run(problem, fl.cuda_graph())
    with pytest.warns(UserWarning, match="runs eagerly"):
        fallen = run(problem, fl.cuda_graph(fallback=True))
    assert_close(fallen, run(problem))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def run(problem, *members, epochs=4, **kwargs):
    step = fl.pipeline(*members)(problem.loss_fn)
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    return fl.fit(step, problem.state(), loaders, epochs=epochs, **{"hooks": (), **kwargs})


def assert_close(a, b, rtol=1e-4, atol=1e-6):
    one, two = (state.model.state_dict() for state in (a, b))
    for name in two:
        torch.testing.assert_close(one[name], two[name], rtol=rtol, atol=atol)
    for name in b.history.keys():  # noqa: SIM118
        assert a.history[name] == pytest.approx(b.history[name], rel=rtol, abs=1e-9), name


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node:UserWarning")
def test_a_kept_autograd_graph_of_the_parameters_is_named():
    """Its nodes belong to the stream of the hook, for which backward would have to wait."""
    kept = []

    def keep(state):
        kept.append(state.model[0].weight.clone())
        return state

    with pytest.raises(fl.CaptureError, match=r"weight\.detach\(\)\.clone\(\)"):
        run(SMALL, fl.cuda_graph(warmup=1), hooks=(keep,))


def test_checkpoints_go_from_graphs_to_eager_runs_and_back(tmp_path):
    problem = small_with(torch.optim.AdamW, lr=0.01)
    whole = run(problem, epochs=4)
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    for first, then in (((fl.cuda_graph(),), ()), ((), (fl.cuda_graph(),))):
        path = fl.save(run(problem, *first, epochs=2), tmp_path / "a")
        state = fl.restore(path, problem.state(seed=3))
        state = fl.fit(fl.pipeline(*then)(loss_fn), state, loaders, epochs=4, hooks=())
        assert_close(state, whole, rtol=1e-3)


@pytest.mark.parametrize("members", [(fl.compiled(),), (fl.compiled(), fl.cuda_graph())], ids=repr)
def test_compiled_and_captured_steps_are_the_same(members):
    assert_close(run(SMALL, *members), run(SMALL), rtol=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam])
@pytest.mark.parametrize("members", [(), (fl.cuda_graph(),)], ids=repr)
def test_a_compiled_optimizer_is_the_same(optimizer, members):
    problem = small_with(optimizer, lr=0.01)
    members = (fl.accumulate(2), fl.clip(0.05), fl.schedule(schedules.cosine(warmup=2)), *members)
    compiled = run(problem, fl.compiled(update=True), *members)
    assert_close(compiled, run(problem, *members), rtol=1e-3)


@contextlib.contextmanager
def waits(mode):
    """Let torch raise an error for any wait for the device, or not."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("members", [(), (fl.cuda_graph(),)], ids=repr)
def test_nothing_waits_for_the_device_between_two_reports(members, monkeypatch):
    """Law 7 on CUDA with all reporting hooks: torch raises on any wait outside of a report."""
    from fnloop._core import metrics

    def reading(*args, read=metrics.read, **kwargs):
        with waits("default"):
            return read(*args, **kwargs)

    for module in (
        "fnloop._loop.run",
        "fnloop._loop.evaluate",
        "fnloop._extensions.hooks.progress",
    ):
        monkeypatch.setattr(sys.modules[module], "read", reading)
    batches = data(*[8] * 40)
    members = fl.accumulate(2), fl.clip(1.0), fl.schedule(schedules.cosine()), *members
    step = fl.pipeline(*members)(loss_fn)
    state = fl.fit(step, SMALL.state(), batches, epochs=1, hooks=())  # a capture waits
    hooks = (fl.progress(), fl.halt_on_nonfinite(), fl.early_stop("train/loss", patience=50))
    with waits("error"):
        fl.fit(step, state, batches, epochs=3, hooks=hooks)


def test_rows_of_a_dataset_on_the_device_are_selected_without_a_wait():
    from fnloop._extensions.loaders.rows import _select

    rows = torch.arange(8.0, device=DEVICE)
    with waits("error"):
        found = _select([rows], [5, 0, 3])
    assert found is not None and found[0].tolist() == [5.0, 0.0, 3.0]


# --- everything inside one graph


def mixed_optimizers(parameters):
    """AdamW for the matrices, SGD for the rest."""
    parameters = list(parameters)
    return {
        "matrices": torch.optim.AdamW([p for p in parameters if p.ndim == 2], lr=0.01),
        "rest": torch.optim.SGD([p for p in parameters if p.ndim != 2], lr=0.05, fused=True),
    }


@pytest.mark.parametrize("precision", ["fp16", "bf16", None])
def test_everything_fits_into_one_graph(precision):
    """fp16 with overflows, an average, accumulation, clipping, schedules, several optimizers."""
    scale = {"init_scale": 2.0**24, "growth_interval": 3} if precision == "fp16" else {}
    members = (
        fl.amp(precision, **scale),
        *(fl.accumulate(2), fl.clip(0.05), fl.ema(0.9)),
        fl.schedule(schedules.linear(), only="matrices"),
        fl.schedule(schedules.cosine(warmup=2), only="rest"),
    )
    problem = attrs.evolve(SMALL, optimizer=mixed_optimizers)
    graphed = run(problem, *members, fl.cuda_graph(warmup=1), epochs=6)
    eager = run(problem, *members, epochs=6)
    assert_close(graphed, eager, rtol=1e-3)
    assert (graphed.step, graphed.skipped) == (eager.step, eager.skipped)
    assert (graphed.skipped > 0) == (precision == "fp16")
    averages = [fl.averaged(state).model.parameters() for state in (graphed, eager)]
    for mine, theirs in zip(*averages, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


def text_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def test_text_of_several_lengths_has_a_graph_for_each():
    """More lengths than graphs: the least recently used one is captured again."""
    generator = torch.Generator().manual_seed(0)
    lengths = [8, 16, 32, 16, 8, 32, 64, 8] * 4
    batches = [torch.randint(11, (4, n), generator=generator) for n in lengths]
    model = lambda: nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11)).to(DEVICE)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    problem = Problem(model, text_loss, batches, optimizer)
    eager = run(problem, fl.accumulate(2), evaluate_every=NEVER)
    for limit in (2, 8):
        graph = fl.cuda_graph(warmup=1, limit=limit)
        graphed = run(problem, fl.accumulate(2), graph, evaluate_every=NEVER)
        assert_close(graphed, eager, rtol=1e-3)


def wide(inputs, outputs, rows, batches, optimizer):
    """A problem with one large layer."""
    generators = [torch.Generator().manual_seed(i) for i in range(batches)]
    return Problem(
        lambda: nn.Linear(inputs, outputs).to(DEVICE),
        lambda model, batch: model(batch).square().mean(),
        [torch.randn(rows, inputs, generator=generator) for generator in generators],
        optimizer,
    )


def test_a_graph_outlives_what_others_free():
    """Lightning frees the workspaces of cuBLAS, which torch keeps for each stream."""

    def free(state):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return state

    problem = wide(512, 512, 256, 8, sgd)
    graphed = run(problem, fl.cuda_graph(warmup=1), hooks=(free,))
    torch.cuda.synchronize()
    assert_close(graphed, run(problem))


def test_what_a_hook_allocates_between_replays_is_not_overwritten_and_overwrites_nothing():
    kept = []

    def allocate(state):
        size = 2 ** (state.step % 20)
        kept.append((state.step, torch.full((size,), float(state.step), device=DEVICE)))
        torch.full((size,), float("nan"), device=DEVICE)
        del kept[:-5]
        if state.step % 7 == 0:
            torch.cuda.empty_cache()
        return state

    members = fl.accumulate(2), fl.clip(0.05)
    graphed = run(SMALL, *members, fl.cuda_graph(), epochs=10, hooks=(allocate,))
    assert all((t == step).all() for step, t in kept)
    assert_close(graphed, run(SMALL, *members, epochs=10))


# --- memory


def greedy(most):
    """Return a loss function for which the device holds ``most`` samples."""

    def loss(model, batch):
        if len(batch[0]) > most:
            torch.empty(2**44, dtype=torch.uint8, device=DEVICE)  # 16 TiB
        return loss_fn(model, batch)

    return loss


def test_running_out_of_memory_is_retried_in_smaller_pieces():
    problem = attrs.evolve(SMALL, loss_fn=greedy(3))
    retried = run(problem, fl.retry_on_oom(), evaluate_every=NEVER)
    assert retried.slots["retry_on_oom"] == 2
    assert_close(retried, run(SMALL, fl.microbatch(2), evaluate_every=NEVER), rtol=1e-6)


def test_running_out_of_memory_in_a_capture_leaves_the_state_as_it_was():
    armed = []

    def loss(model, batch):
        if armed:
            torch.empty(2**44, dtype=torch.uint8, device=DEVICE)
        return loss_fn(model, batch)

    problem = attrs.evolve(DRAWS, loss_fn=loss)
    batch = problem.batches[0]
    step = fl.pipeline(fl.cuda_graph(warmup=2))(problem.loss_fn)
    state = problem.state()
    for _ in range(2):
        state, _ = step(state, batch)
    before = {k: v.clone() for k, v in state.model.state_dict().items()}
    armed.append(True)
    with pytest.raises((torch.OutOfMemoryError, fl.CaptureError), match=r"(?i)memory"):
        step(state, batch)
    armed.clear()
    for name, value in state.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for _ in range(4):
        state, out = step(state, batch)
    assert out.loss.isfinite()


def busy(model, batch):
    """A loss that takes the device some milliseconds."""
    work = weight = model.large
    for _ in range(20):
        work = work @ weight
    return model(batch).mean() + 0 * work[0, 0].nan_to_num()


def busy_problem(batches):
    def model():
        made = net()
        made.large = torch.randn(4096, 4096, device=DEVICE)
        return made

    return attrs.evolve(SMALL, model=model, loss_fn=busy, batches=batches)


def test_batches_are_not_copied_far_ahead_of_the_device():
    """Copies run beside the step: without a limit, all of them would be held at once."""
    size = 16 * 2**20  # bytes of a batch
    problem = busy_problem([torch.zeros(size // 32, 8).pin_memory()] * 100)
    step = fl.pipeline()(lambda model, batch: busy(model, batch[:1]))
    fl.fit(step, problem.state(), problem.batches[:3], epochs=1, hooks=())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    state, before = problem.state(), torch.cuda.memory_allocated()
    fl.fit(step, state, problem.batches, epochs=1, hooks=())
    held = (torch.cuda.max_memory_allocated() - before) / size
    assert held < 24, f"{held:.0f} batches at once"  # 256 MiB, and what the step uses


# --- checkpoints


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("members", [(), (fl.cuda_graph(warmup=1),)], ids=repr)
def test_a_checkpoint_in_the_background_holds_the_weights_of_its_update(
    members, room, tmp_path, monkeypatch
):
    """The updates after it overwrite them. A layer has 17 MB, more than what is copied at once."""
    monkeypatch.setattr(
        "fnloop._extensions.checkpoints.format._has_room", lambda device, size: room
    )
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    problem, seen = wide(2100, 2048, 8, 6, adamw), {}

    def note(state):
        seen[state.step] = state.model.weight.detach().clone()
        return state

    hooks = (fl.every(steps=2)(fl.checkpoint(tmp_path, keep=None, background=True)), note)
    state = run(problem, *members, epochs=1, hooks=hooks, evaluate_every=None)
    for step in (2, 4, 6):
        saved = fl.restore(tmp_path / f"step-{step:08d}", problem.state(seed=1))
        assert torch.equal(saved.model.weight, seen[step])
        assert saved.optimizer.state[saved.model.weight]["exp_avg"].is_cuda
    assert state.step == 6


# --- times


def test_times_on_the_device_are_those_of_its_work():
    """Matrix products, timed by hand too: the host only launches them."""
    batches = [x for x, _ in data(*[8] * 30)]
    problem = busy_problem(batches)
    model = problem.model()
    torch.cuda.synchronize()
    for _ in range(2):
        start = time.perf_counter()
        busy(model, batches[0])
        torch.cuda.synchronize()
        by_hand = time.perf_counter() - start
    members = fl.timings(), fl.throughput(), fl.device_memory()
    latest = run(problem, *members, epochs=1, evaluate_every=None).history.latest
    assert latest("train/time/step") == pytest.approx(by_hand, rel=0.5)
    assert latest("train/throughput/samples") == pytest.approx(8 / by_hand, rel=0.5)
    assert latest("train/memory/peak_gib") > 0.05


# --- what can only be seen in a process of its own


def in_a_process(*command, **environment):
    """Run Python with a command in a new process, and return what it prints."""
    environment = {**os.environ, **environment}
    given = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    found = subprocess.run([sys.executable, *command], **given)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


SCATTERING = """
    import torch, fnloop as fl
    from torch import nn

    torch.use_deterministic_algorithms(True)

    def loss_fn(model, batch):  # the gradient of an embedding is added up by many threads
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    def trained(*members):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 64), nn.Linear(64, 5)).cuda()
        rate = torch.tensor(0.01, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
        state = fl.TrainState.create(model, optimizer, seed=0)
        step = fl.pipeline(fl.accumulate(2), fl.clip(1.0), *members)(loss_fn)
        draw = torch.Generator().manual_seed(0)
        batches = [torch.randint(5, (64, 512), generator=draw) for _ in range(20)]
        state = fl.fit(step, state, batches, epochs=2, hooks=())
        return [p.clone() for p in state.model.parameters()]

    one = trained()
    assert all(map(torch.equal, one, trained()))
    assert all(map(torch.equal, one, trained(fl.cuda_graph())))
    print("equal")
"""


def test_deterministic_algorithms_give_the_same_bits_eagerly_and_in_graphs():
    code = textwrap.dedent(SCATTERING)
    assert "equal" in in_a_process("-c", code, CUBLAS_WORKSPACE_CONFIG=":4096:8")


NCCL = """
    import torch, fnloop as fl
    from torch import distributed as dist, nn

    def trained():
        torch.manual_seed(0)
        model = nn.Linear(8, 1).cuda()
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        step = fl.pipeline(fl.accumulate(2), fl.clip(1.0), fl.ema(0.9))(
            lambda model, batch: model(batch).square().mean()
        )
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(9)]
        return fl.fit(step, state, (batches, batches), epochs=3, hooks=())

    alone = trained()
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    x = torch.ones(3, device="cuda")
    dist.all_reduce(x)
    together = trained()
    assert torch.equal(alone.model.weight, together.model.weight)
    assert alone.history["valid/loss"] == together.history["valid/loss"]
    assert fl.gather(3) == [3] and fl.broadcast("a") == "a"
    dist.destroy_process_group()
    print("equal")
"""


def test_one_process_with_nccl_trains_as_without(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(NCCL))
    torchrun = "-m", "torch.distributed.run", "--nproc-per-node=1"
    assert "equal" in in_a_process(*torchrun, str(script), MASTER_PORT="0")
