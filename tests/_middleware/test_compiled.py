"""compiled: what is compiled and how often, and equality with the step that is not."""

import importlib
import inspect
import pickle

import attrs
import pytest
import several
import torch
from torch import nn

import fnloop as fl
from fnloop._graphs.capture import read_from_tensors
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

# raised by torch itself when its compiler is imported
ignore_warning_of_torch = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


class Counting:
    """A backend that compiles nothing, and keeps the graphs that it is given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


def mean_output(aux, batch):
    return aux["output"].mean()


def ones(*sizes):
    return [torch.ones(n) for n in sizes]


@pytest.mark.slow
def test_the_compiled_loss_function_gives_the_same_update():
    backend = Counting()
    state, out = fl.pipeline(fl.compiled(backend=backend))(toy_loss)(
        toy(w=2.0), torch.tensor([1.0, 3.0])
    )
    assert (state.model.w.item(), out.loss.item(), out.aux["output"].tolist()) == (
        0.0,
        4.0,
        [2.0, 6.0],
    )
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_a_step_compiles_for_the_first_shape_then_for_any_and_for_evaluation():
    backend = Counting()
    step = fl.pipeline(fl.compiled(backend=backend))(toy_loss)
    state = fl.fit(step, toy(lr=0.0), (ones(4, 4), ones(4)), hooks=())
    assert len(backend.graphs) == 2
    fl.fit(step, state, (ones(4, 3, 2, 5, 6, 7), ones(4, 3, 2)), epochs=4, hooks=())
    assert len(backend.graphs) <= 4  # any size, with and without gradients


@pytest.mark.slow
def test_evaluation_is_compiled_too():
    backend = Counting()
    step = fl.pipeline(fl.compiled(backend=backend))(toy_loss)
    assert fl.evaluate(step, toy(w=2.0), [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]) == {
        "loss": 6.0
    }
    assert backend.graphs


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch has one limit for all that share code",
)
@pytest.mark.slow
def test_steps_of_one_loss_function_do_not_share_the_limit_on_recompilation():
    """torch compiles one code object at most 8 times, then runs it eagerly."""
    for size in range(1, 12):
        backend = Counting()
        model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(size)])
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        step = fl.pipeline(fl.compiled(backend=backend))(fl.supervised(torch.nn.MSELoss()))
        step(state, (torch.ones(2, 1), torch.ones(2, 1)))
        assert len(backend.graphs) == 1, size


@pytest.mark.slow
@pytest.mark.parametrize(
    "members",
    [
        (),
        (fl.accumulate(3), fl.clip(0.05)),
        (fl.amp("bf16"),),
        (fl.metric(mean=mean_output), fl.schedule(fl.schedules.linear())),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "problem", [pytest.param(small(), id="small"), pytest.param(stochastic(), id="stochastic")]
)
def test_a_run_is_the_same_wherever_it_is_listed(members, problem):
    def run(*members):
        loaders = {"train": problem.batches, "valid": problem.batches[:3]}
        return fl.fit(
            fl.pipeline(*members)(problem.loss_fn), problem.state(), loaders, epochs=2, hooks=()
        )

    plain, compiled = run(*members), fl.compiled(backend="eager")
    assert_same(run(compiled, *members), plain, rtol=1e-12)
    assert_same(run(*members, compiled), plain, rtol=1e-12)


@pytest.mark.slow
def test_autocast_is_compiled_too():
    seen = []

    def loss_fn(model, batch):
        product = model.w.reshape(1, 1) @ batch.reshape(1, 1)
        seen.append(product.dtype)
        return product.mean().float()

    fl.pipeline(fl.compiled(backend="eager"), fl.amp("bf16"))(loss_fn)(toy(), torch.ones(1))
    assert torch.bfloat16 in seen


@pytest.mark.slow
def test_checkpoints_load_with_and_without_it(tmp_path):
    problem = stochastic()
    plain, compiled = (
        fl.pipeline(*m)(problem.loss_fn) for m in ((), (fl.compiled(backend="eager"),))
    )

    def run(step, state, epochs):
        return fl.fit(step, state, problem.batches, epochs=epochs, hooks=())

    whole = run(plain, problem.state(), 2)
    for first, then in ((plain, compiled), (compiled, plain)):
        path = fl.save(run(first, problem.state(), 1), tmp_path / "a")
        assert_same(run(then, fl.restore(path, problem.state(seed=3)), 2), whole, rtol=1e-12)


@ignore_warning_of_torch
def test_repr_equality_and_pickling_follow_the_call():
    pipe = fl.pipeline(fl.compiled(mode="max-autotune-no-cudagraphs"), fl.clip(1.0))
    assert repr(pipe) == "pipeline(compiled(mode='max-autotune-no-cudagraphs'), clip(1.0))"
    assert pickle.loads(pickle.dumps(pipe)) == pipe
    assert fl.compiled() == fl.compiled() != fl.compiled(dynamic=True)
    assert repr(pipe(toy_loss)) == f"{pipe!r}(toy_loss)"


def test_an_unknown_argument_is_an_error_when_composing():
    with pytest.raises(TypeError, match=r"got 'modes'. Did you mean mode\?"):
        fl.compiled(modes="reduce-overhead")
    with pytest.raises(TypeError, match=r"takes the arguments of torch\.compile"):
        fl.compiled(model=toy_loss)


def test_an_unknown_backend_is_an_error_when_composing():
    with pytest.raises(
        ValueError, match=r"compiled expects backend as one of .*; got 'no_such_backend'"
    ):
        fl.compiled(backend="no_such_backend")


@pytest.mark.slow
def test_a_wrong_loss_is_an_error_that_names_the_original_function():
    with pytest.raises(ValueError, match="the loss that wrong returns must be a scalar"):
        fl.pipeline(fl.compiled(backend="eager"))(wrong)(toy(), torch.ones(2))


def wrong(model, batch):
    return model(batch)


@ignore_warning_of_torch
@pytest.mark.slow
def test_the_default_backend_trains_as_an_eager_step_does():
    """Compiled code may round the last digits differently."""
    problem = small()

    def run(*members):
        loaders = (problem.batches, problem.batches[:3])
        return fl.fit(
            fl.pipeline(*members)(problem.loss_fn), problem.state(), loaders, epochs=2, hooks=()
        )

    assert_same(run(fl.compiled(), fl.accumulate(2)), run(fl.accumulate(2)), rtol=1e-9)


# --- the optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02),
}
halving = fl.schedule(lambda step, total: 0.5**step)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@ignore_warning_of_torch
def test_a_compiled_optimizer_is_the_same_and_a_schedule_compiles_nothing_again(name):
    problem = attrs.evolve(small(), optimizer=OPTIMIZERS[name])
    batches = problem.batches[:2] * 5
    members, counts = (fl.accumulate(2), fl.clip(0.05)), []
    for more in ((), (halving,)):
        backend = Counting()
        step = fl.pipeline(fl.compiled(update=True, backend=backend), *members, *more)
        step = step(problem.loss_fn)
        compiled = fl.fit(step, problem.state(), batches, epochs=2, hooks=())
        counts.append(len(backend.graphs))
    # One for the loss function, and one for the update; SGD has no momentum in its first update.
    assert counts == [2 + (name == "SGD")] * 2
    members = (*members, halving)
    eager = fl.fit(
        fl.pipeline(*members)(problem.loss_fn), problem.state(), batches, epochs=2, hooks=()
    )
    for mine, theirs in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)  # counts are in float32
    assert compiled.history["train/lr"][-1] == pytest.approx(eager.history["train/lr"][-1])


@pytest.mark.slow
@ignore_warning_of_torch
def test_each_of_several_optimizers_is_compiled_and_a_restored_run_is_the_same(tmp_path):
    problem = several.problem(several.muon_and_adamw)
    backend = Counting()
    step = fl.pipeline(fl.compiled(update=True, backend=backend), halving)(problem.loss_fn)
    batches = problem.batches[:2]
    whole = fl.fit(step, problem.state(), batches, epochs=2, hooks=())
    assert len(backend.graphs) == 3  # the loss function and two optimizers
    half = fl.fit(step, problem.state(), batches, epochs=2, steps=2, hooks=())
    fl.save(half, tmp_path / "half")
    resumed = fl.fit(
        step, fl.restore(tmp_path / "half", problem.state(seed=1)), batches, epochs=2, hooks=()
    )
    assert_same(resumed, whole, rtol=1e-9)


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(TypeError, match="expects update as True or False"):
        fl.compiled(update="yes")
    with pytest.raises(TypeError, match=r"and update; got .*Did you mean update"):
        fl.compiled(updates=True)
    with pytest.raises(ValueError, match="calls the optimizer with a closure"):
        fl.pipeline(fl.compiled(update=True), fl.closure())
    step = fl.pipeline(fl.compiled(update=True, backend="eager"))(toy_loss)
    fused = several.problem(several.fused_sgd_twice)
    with pytest.raises(ValueError, match=r"does not support SGD\(\.\.\., fused=True\): leave out"):
        step(fused.state(), fused.batches[0])
    lbfgs = attrs.evolve(small(), optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="LBFGS evaluates the loss itself"):
        step(lbfgs.state(), lbfgs.batches[0])
    foreach = attrs.evolve(small(), optimizer=lambda p: torch.optim.AdamW(p, foreach=True))
    with pytest.raises(ValueError, match="leave out foreach=True"):
        step(foreach.state(), foreach.batches[0])


@pytest.mark.slow
@ignore_warning_of_torch
def test_an_update_that_is_skipped_is_not_applied_by_compiled_code():
    backend = Counting()
    step = fl.pipeline(fl.compiled(update=True, backend=backend), fl.skip_nonfinite())(toy_loss)
    state = fl.fit(step, toy(w=1.0, lr=1.0), [torch.tensor([float("nan")])], hooks=())
    assert (state.model.w.item(), state.skipped) == (1.0, 1)


def adamw_and_sgd(parameters):
    first, *others = parameters
    return {
        "matrices": torch.optim.AdamW([first], lr=0.02),
        "rest": torch.optim.SGD(others, lr=0.05, momentum=0.9),
    }


@pytest.mark.slow
@ignore_warning_of_torch
def test_turns_may_compile_their_updates():
    compiled = (fl.compiled(update=True, backend="eager"),)
    problem = attrs.evolve(small(), optimizer=adamw_and_sgd)
    states = []
    for members in (compiled, ()):
        one = several.alternating(matrices=members, rest=members, problem=problem)
        step = fl.pipeline()(one.loss_fn)
        states.append(fl.fit(step, one.state(), one.batches[:2], epochs=2, hooks=()))
    for mine, theirs in zip(*(state.model.parameters() for state in states), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@ignore_warning_of_torch
def test_fullgraph_is_for_the_loss_function():
    step = fl.pipeline(fl.compiled(update=True, fullgraph=True, backend="eager"))(toy_loss)
    state, _ = step(toy(), torch.ones(1))
    assert state.model.w.item() == -1.0


@pytest.mark.slow
@ignore_warning_of_torch
def test_a_learning_rate_set_by_hand_is_not_taken_for_that_of_the_schedule():
    compiled = fl.compiled(update=True, backend="eager")
    scheduled, plain = fl.pipeline(compiled, halving)(toy_loss), fl.pipeline(compiled)(toy_loss)
    state = fl.fit(scheduled, toy(lr=0.1), [torch.ones(1)], epochs=1, hooks=())
    state.optimizer.param_groups[0]["lr"] = 0.05
    state = fl.fit(plain, state, [torch.ones(1)], epochs=2, hooks=())
    with pytest.raises(ValueError, match="the schedule had set it to"):
        fl.fit(scheduled, state, [torch.ones(1)], epochs=3, hooks=())


def test_a_run_that_compiles_its_updates_is_not_told_of_fused_optimizers(caplog, monkeypatch):
    problem = attrs.evolve(small(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.123))
    step = fl.pipeline(fl.compiled(update=True, backend="eager"))(problem.loss_fn)
    hints = importlib.import_module("fnloop._loop.beginning")
    monkeypatch.setattr(hints, "LEAST_SAVED", 0.0)
    hints.suggest_fused(step.pipeline.middleware, problem.state(), 1e-6, 1)
    assert not caplog.messages
    hints.suggest_fused((), problem.state(), 1e-6, 1)
    assert "fused=True" in caplog.text


def test_only_rates_that_are_numbers_become_tensors_each_where_its_parameters_are():
    on_host, elsewhere = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))
    optimizer = torch.optim.AdamW([{"params": [elsewhere]}, {"params": [on_host]}], lr=0.5)
    for p in (on_host, elsewhere):
        optimizer.state[p] = {"step": torch.tensor(1.0)}
    read_from_tensors(optimizer)
    assert [group["lr"].device.type for group in optimizer.param_groups] == ["meta", "cpu"]
    assert [optimizer.state[p]["step"].device.type for p in (elsewhere, on_host)] == ["meta", "cpu"]
    for group in optimizer.param_groups:
        group["lr"] = None  # an optimizer that has a schedule of its own
    read_from_tensors(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [None, None]
