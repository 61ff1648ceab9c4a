"""compiled: what is compiled and how often, and equality with the step that is not."""

import inspect

import attrs
import pytest
import several
import torch
from sample_middleware import output_mean
from torch import nn
from toy_runs import ONE, fitted, of, xs

import fnloop as fl
from fnloop._extensions.graphs.capture import read_from_tensors
from fnloop._extensions.tools import hints
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss


class Counting:
    """A backend that compiles nothing, and keeps the graphs that it is given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward


@pytest.mark.slow
def test_the_compiled_loss_function_gives_the_same_update_and_evaluation():
    backend = Counting()
    step = fl.pipeline(fl.compiled(backend=backend))(toy_loss)
    state, out = step(toy(w=2.0), torch.tensor([1.0, 3.0]))
    assert (state.model.w.item(), out.loss.item(), len(backend.graphs)) == (0.0, 4.0, 1)
    assert out.aux["output"].tolist() == [2.0, 6.0]
    assert fl.evaluate(step, toy(w=2.0), [torch.tensor([1.0, 2.0]), *xs(6)]) == {"loss": 6.0}
    assert len(backend.graphs) > 1


@pytest.mark.slow
def test_a_step_compiles_for_the_first_shape_then_for_any_and_for_evaluation():
    backend = Counting()
    step = fl.pipeline(fl.compiled(backend=backend))(toy_loss)
    ones = lambda *sizes: [*map(torch.ones, sizes)]
    state = fl.fit(step, toy(lr=0.0), (ones(4, 4), ones(4)), hooks=())
    assert len(backend.graphs) == 2
    fl.fit(step, state, (ones(4, 3, 2, 5, 6, 7), ones(4, 3, 2)), epochs=4, hooks=())
    assert len(backend.graphs) <= 4  # any size, with and without gradients


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch has one limit for all that share code",
)
@pytest.mark.slow
def test_steps_of_one_loss_function_do_not_share_the_limit_on_recompilation():
    """torch compiles one code object at most 8 times, then runs it eagerly."""
    for size in range(1, 10):
        backend, model = Counting(), nn.Sequential(*[nn.Linear(1, 1) for _ in range(size)])
        step = fl.pipeline(fl.compiled(backend=backend))(fl.supervised(nn.MSELoss()))
        step(of(model), (torch.ones(2, 1), torch.ones(2, 1)))
        assert len(backend.graphs) == 1, size


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "members"), [
    (stochastic(), (fl.accumulate(3), fl.clip(0.05))), (small(), (fl.amp("bf16"),)),
    (small(), (fl.metric(mean=output_mean), fl.schedule(fl.schedules.linear()))),
], ids=["accumulate", "amp", "metric"])  # fmt: skip
def test_a_run_is_the_same_wherever_it_is_listed(members, problem):
    plain, compiled = run(problem, *members), fl.compiled(backend="eager")
    assert_same(run(problem, compiled, *members), plain, rtol=1e-12)
    assert_same(run(problem, *members, compiled), plain, rtol=1e-12)


def run(problem, *members, loaders=None, state=None, **settings):
    loaders = loaders or {"train": problem.batches, "valid": problem.batches[:3]}
    settings |= {"loss_fn": problem.loss_fn, "state": state or problem.state(), "epochs": 2}
    return fitted(loaders, *members, **settings)


@pytest.mark.slow
def test_a_wrong_loss_is_an_error_that_names_the_original_function():
    with pytest.raises(ValueError, match="the loss that wrong returns must be a scalar"):
        fitted([torch.ones(2)], fl.compiled(backend="eager"), loss_fn=wrong)


def wrong(model, batch):
    return model(batch)


@pytest.mark.long
@pytest.mark.slow
def test_the_default_backend_trains_as_an_eager_step_does():
    """Compiled code may round the last digits differently."""
    eager = run(small(), fl.accumulate(2))
    assert_same(run(small(), fl.compiled(), fl.accumulate(2)), eager, rtol=1e-9)


# --- the optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02),
}
RARE = [pytest.param(name, marks=pytest.mark.long) for name in ("RAdam", "NAdam", "RMSprop")]
halving = fl.schedule(lambda step, total: 0.5**step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW", *RARE])
def test_a_compiled_optimizer_is_the_same_and_a_schedule_compiles_nothing_again(name):
    problem = attrs.evolve(small(), optimizer=OPTIMIZERS[name])
    batches, members, counts = problem.batches[:2] * 5, (fl.accumulate(2), fl.clip(0.05)), []
    for more in ((), (halving,)):
        backend = Counting()
        update = fl.compiled(update=True, backend=backend)
        compiled = run(problem, update, *members, *more, loaders=batches)
        counts.append(len(backend.graphs))
    assert counts == [1, 1]
    eager = run(problem, *members, halving, loaders=batches)
    for mine, theirs in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)  # counts are in float32
    assert compiled.history["train/lr"][-1] == pytest.approx(eager.history["train/lr"][-1])


@pytest.mark.slow
def test_several_optimizers_are_in_one_graph_and_a_restored_run_is_the_same(tmp_path):
    problem = several.problem(several.muon_and_adamw)
    backend = Counting()
    given = fl.compiled(update=True, backend=backend), halving
    whole = run(problem, *given, loaders=problem.batches[:2])
    assert len(backend.graphs) == 1
    half = run(problem, *given, loaders=problem.batches[:2], steps=2)
    half = fl.restore(fl.save(half, tmp_path / "half"), problem.state(seed=1))
    resumed = run(problem, *given, loaders=problem.batches[:2], state=half)
    assert_same(resumed, whole)


@pytest.mark.parametrize(("make", "message"), [
    (lambda p: torch.optim.SGD(p, fused=True), r"SGD\(\.\.\., fused=True\): leave out"),
    (torch.optim.LBFGS, "LBFGS evaluates the loss itself"),
    (lambda p: torch.optim.AdamW(p, foreach=True), "leave out foreach=True"),
    (several.fused_sgd_twice, "fused=True"),
])  # fmt: skip
def test_an_optimizer_that_cannot_be_compiled_is_refused(make, message):
    problem = attrs.evolve(small(), optimizer=make)
    with pytest.raises(ValueError, match=message):
        run(problem, fl.compiled(update=True, backend="eager"))


@pytest.mark.slow
def test_an_update_that_is_skipped_is_not_applied_by_compiled_code():
    compiled = fl.compiled(update=True, fullgraph=True, backend="eager")  # that of the loss
    state = fitted([1, float("nan")], compiled, fl.skip_nonfinite(), state=toy(w=1.0))
    assert (state.model.w.item(), state.skipped) == (0.0, 1)


def adamw_and_sgd(parameters):
    first, *others = parameters
    return {
        "matrices": torch.optim.AdamW([first], lr=0.02),
        "rest": torch.optim.SGD(others, lr=0.05, momentum=0.9),
    }


@pytest.mark.slow
def test_turns_may_compile_their_updates():
    compiled = (fl.compiled(update=True, backend="eager"),)
    problem = attrs.evolve(small(), optimizer=adamw_and_sgd)
    states = []
    for members in (compiled, ()):
        one = several.alternating(matrices=members, rest=members, problem=problem)
        states.append(run(one, loaders=one.batches[:2]))
    for mine, theirs in zip(*(state.model.parameters() for state in states), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_learning_rate_set_by_hand_is_not_taken_for_that_of_the_schedule():
    compiled = fl.compiled(update=True, backend="eager")
    state = fitted([1], compiled, halving, state=toy(lr=0.1))
    state.optimizer.param_groups[0]["lr"] = 0.05
    state = fitted([1], compiled, state=state, epochs=2)
    with pytest.raises(ValueError, match="the schedule had set it to"):
        fitted([1], compiled, halving, state=state, epochs=3)


def test_a_run_that_compiles_its_updates_is_not_told_of_fused_optimizers(caplog, monkeypatch):
    problem = attrs.evolve(small(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.123))
    step = fl.pipeline(fl.compiled(update=True, backend="eager"))(problem.loss_fn)
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


# --- cuda_graph: its settings and its place; tests/_extensions/graphs has the rest


def test_a_model_on_the_cpu_is_refused_or_runs_eagerly_with_one_warning():
    said = r"needs the model on a CUDA device; it is on cpu\. .*fallback=True"
    with pytest.raises(fl.CaptureError, match=said):
        fl.pipeline(fl.cuda_graph())(toy_loss)(toy(), ONE)
    with pytest.warns(UserWarning, match="cuda_graph runs eagerly: .* it is on cpu") as caught:
        state = fitted([1, 1], fl.cuda_graph(fallback=True))
    assert len(caught) == 1
    assert (state.model.w.item(), state.optimizer.param_groups[0]["lr"]) == (-2.0, 1.0)
