"""compiled(update=True): an update as one function, equal to eager, resumed, refused."""

import functools
import math
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
import torch
from sample_middleware import average, decay, noise, output_mean, own_guard, weight_penalty
from torch import nn
from torch.utils import checkpoint
from toy_runs import fitted, noting, xs

import fnloop as fl
from fnloop import CaptureError, schedules
from fnloop._extensions.graphs.operators import FEW, LIMIT
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

pytestmark = pytest.mark.slow
WHOLE = fl.compiled(update=True, backend="eager", fullgraph=True)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
PLAIN = functools.partial(torch.optim.SGD, lr=0.05)
ADAM = functools.partial(torch.optim.Adam, lr=0.02)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.02, amsgrad=True)


class Counting:
    """A backend that compiles nothing, and counts the graphs that it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def run(problem, *members, state=None, **settings):
    settings |= {"loss_fn": problem.loss_fn, "state": state or problem.state(), "epochs": 3}
    return fitted({"train": problem.batches}, *members, **settings)


def assert_close(mine, theirs, rtol=1e-12):
    pairs = zip(mine.model.state_dict().values(), theirs.model.state_dict().values(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol / 10)
    assert (mine.step, mine.skipped) == (theirs.step, theirs.skipped)


def resumed(problem, *members, cut, folder, **settings):
    half = run(problem, *members, steps=cut, **settings)
    half = fl.restore(fl.save(half, folder / f"{cut}"), problem.state(seed=1))
    return run(problem, *members, state=half, **settings)


# --- equality with eager updates


ROWS = [
    (SGD, ()), (PLAIN, (fl.accumulate(3), fl.clip(0.05))), (ADAM, (fl.clip(0.05), fl.ema(0.9))),
    (ADAMW, (fl.metric(mean=output_mean), fl.accumulate(2))),
    (SGD, (fl.schedule(schedules.cosine(warmup=2)), fl.swa(4))),
    (SGD, (fl.torch_scheduler(decay),)),
    (SGD, (fl.amp("bf16"), fl.clip_value(0.01))), (PLAIN, (noise(0.01), fl.accumulate(2))),
    (SGD, (weight_penalty(0.01), average(0.9))), (SGD, (own_guard(), fl.clip_adaptive(0.01))),
    (SGD, (fl.skip_nonfinite(), fl.spike_guard(3, 1.2))),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "members"), ROWS, ids=repr)
@pytest.mark.parametrize("problem", [
    pytest.param(small(), id="small", marks=pytest.mark.long),
    pytest.param(stochastic(), id="stochastic"),
])  # fmt: skip
def test_a_run_is_that_of_eager_updates_and_the_same_wherever_it_is_cut(
    problem, optimizer, members, tmp_path
):
    """The second problem has batch norm, dropout and batches of several sizes."""
    problem = attrs.evolve(problem, optimizer=optimizer)
    whole, eager = run(problem, WHOLE, *members), run(problem, *members)
    # Adam counts its updates in single precision, and compiled code computes with the count.
    assert_close(whole, eager, 1e-4 if optimizer in (ADAM, ADAMW) else 1e-12)
    if not any(m.name in ("schedule", "swa") for m in members):  # they want the same targets
        for cut in (1, 4):
            assert_same(resumed(problem, WHOLE, *members, cut=cut, folder=tmp_path), whole)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: g++")
def test_inductor_computes_the_same_numbers_with_dropout_and_batch_norm(tmp_path):
    members = fl.compiled(update=True, fullgraph=True), fl.clip(0.05)
    problem = attrs.evolve(stochastic(), optimizer=SGD, batches=stochastic().batches[:2] * 2)
    whole = run(problem, *members)
    assert_close(whole, run(problem, fl.clip(0.05)), 1e-9)
    assert_same(resumed(problem, *members, cut=2, folder=tmp_path), whole)


def test_bad_batches_are_left_out_as_they_are_eagerly():
    good = small().batches[0]
    bad = good[0] * math.nan, good[1]
    problem = attrs.evolve(small(), optimizer=SGD, batches=[good, good, bad, good, bad, good])
    members = fl.skip_nonfinite(), fl.accumulate(2)
    whole = run(problem, WHOLE, *members)
    assert whole.skipped == 6 and whole.step == 3
    assert_close(whole, run(problem, *members))


def adamw_and_sgd(parameters):
    first, *others = parameters
    return {"matrices": ADAMW([first]), "rest": SGD(others)}


def test_several_optimizers_are_in_one_graph():
    problem = attrs.evolve(small(), optimizer=adamw_and_sgd)
    backend = Counting()
    whole = run(problem, fl.compiled(update=True, backend=backend, fullgraph=True))
    assert backend.graphs == len({x.shape for x, _ in problem.batches})
    assert_close(whole, run(problem), 1e-4)


def test_what_an_update_reports_is_its_own():
    loss_fn = lambda model, x: ((model(x) - 1).square().mean(), {"output": model(x)})
    step = fl.pipeline(WHOLE, fl.grad_norm())(loss_fn)
    plain = fl.pipeline(fl.grad_norm())(loss_fn)
    one, other = toy(w=2.0, lr=0.25), toy(w=2.0, lr=0.25)
    outs = []
    for x in (1.0, 2.0, 3.0):
        batch = torch.tensor([x])
        (one, mine), (other, theirs) = step(one, batch), plain(other, batch)
        assert mine.loss.item() == pytest.approx(theirs.loss.item())
        assert mine.aux["output"].tolist() == pytest.approx(theirs.aux["output"].tolist())
        outs.append((mine, theirs))
    for mine, theirs in outs:  # no later update has overwritten them
        assert mine.loss.item() == pytest.approx(theirs.loss.item())
        norms = [out.metrics["grad_norm"].compute() for out in (mine, theirs)]
        assert norms[0] == pytest.approx(norms[1])


def test_a_constant_that_is_changed_in_place_begins_again_in_each_update():
    def loss_fn(model, x):
        total = torch.tensor(0.0)
        total += model(x).mean()
        return total

    assert fitted([1] * 5, WHOLE, loss_fn=loss_fn).model.w.item() == -5.0


@pytest.mark.parametrize("members", [
    (fl.sam(0.05), fl.clip(0.05)), (fl.retry_on_oom(),), (fl.debug.watch(),),
], ids=repr)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*compiles the loss function and the optimizers apart")
def test_what_decides_on_the_host_runs_apart(members):
    problem = attrs.evolve(stochastic(), optimizer=SGD)
    compiled = fl.compiled(update=True, backend="eager")
    assert_close(run(problem, compiled, *members), run(problem, *members))


def test_what_runs_apart_does_so_in_each_thread():
    graphs = []
    with ThreadPoolExecutor(1) as pool:
        for call in (lambda fn: fn(), lambda fn: pool.submit(fn).result()):
            backend = Counting()
            compiled = fl.compiled(update=True, backend=backend)
            step = fl.pipeline(compiled, fl.retry_on_oom())(toy_loss)
            call(lambda step=step: fl.fit(step, toy(), [torch.ones(2)] * 4, hooks=()))
            graphs.append(backend.graphs)
    assert graphs[0] == graphs[1]


def test_a_part_of_the_optimizers_may_rest():
    problem = attrs.evolve(small(), optimizer=adamw_and_sgd)
    compiled = fl.compiled(update=True, backend="eager")
    used = run(problem, compiled, fl.using("rest"))
    assert_close(used, run(problem, fl.using("rest")))
    assert used.updates == {"matrices": 0, "rest": used.step}


# --- what is compiled, and how often


def test_a_rate_compiles_nothing_again_and_a_setting_does():
    backend = Counting()
    step = fl.pipeline(fl.compiled(update=True, backend=backend))(small().loss_fn)
    state, batches = attrs.evolve(small(), optimizer=SGD).state(), small().batches[:1] * 4
    state = fl.fit(step, state, batches, hooks=())
    state.optimizer.param_groups[0]["lr"] = 0.5
    state = fl.fit(step, state, batches, epochs=2, hooks=())
    assert backend.graphs == 1
    state.optimizer.param_groups[0]["momentum"] = 0.5
    state = fl.fit(step, state, batches, epochs=3, hooks=())
    assert backend.graphs == 2
    next(state.model.parameters()).requires_grad_(False)
    fl.fit(step, state, batches, epochs=4, hooks=())
    assert backend.graphs == 3


def test_a_parameter_that_is_trained_later_begins_in_an_eager_update():
    def thaw(state):
        state.model[0].requires_grad_(True)
        return state

    def trained(*members):
        problem = attrs.evolve(small(), optimizer=SGD)
        state = problem.state()
        state.model[0].requires_grad_(False)
        thawing = fl.when(lambda state: state.step == 5)(thaw)
        return run(problem, *members, state=state, hooks=(thawing,))

    assert_close(trained(WHOLE), trained())


def test_settings_that_keep_changing_and_many_kinds_of_batches_run_apart():
    def decay_more(state):
        state.optimizer.param_groups[0]["weight_decay"] = state.step / 10
        return state

    each = fl.every(steps=1)(decay_more)
    backend = Counting()
    members = (fl.compiled(update=True, backend=backend),)
    with pytest.warns(UserWarning, match=r"apart: a setting .* \(weight_decay\) keeps changing"):
        fitted([1] * 30, *members, hooks=(each,), state=toy(lr=1e-9))
    assert backend.graphs < 2 * LIMIT < 30 and FEW > 1
    sizes = [torch.ones(n) for n in range(1, LIMIT + 3)]
    with pytest.warns(UserWarning, match=f"apart: there are more than {LIMIT} kinds of batches"):
        state = fitted([torch.ones(1), *sizes], *members)
    assert state.model.w.item() == -len(sizes) - 1.0


# --- what cannot be one graph


def read(model, x):
    loss = model(x).mean()
    return loss * (2.0 if loss.item() > 0 else 1.0)


def in_numpy(model, x):
    return model(x).mean() + float(np.asarray(model.w.detach().numpy()).sum()) * 0


def listed(model, x):
    return model(x).mean() * len(x.tolist())


def masked(model, x):
    return model(x)[x > 0].mean()


def own_generator(model, x):
    return (model(x) * torch.rand(x.shape, generator=GENERATOR)).mean()


def drawn_again(model, x):
    inside = lambda x: nn.functional.dropout(model(x), 0.5)
    return checkpoint.checkpoint(inside, x, use_reentrant=False).mean()


def drawn_by_python(model, x):
    return model(x).mean() * np.random.rand()


GENERATOR = torch.Generator()
REFUSED = {
    read: r"a tensor is read to the host \(.*test_whole\.py:\d+, return loss \* \(2\.0 if",
    in_numpy: "a tensor is read to the host", listed: "a tensor is read to the host",
    masked: "the shape of what aten.index.Tensor returns depends on values",
    own_generator: "drawn from a generator of their own",
    drawn_again: "sets the state of the random generator",
    drawn_by_python: "draws from numpy's generator",
}  # fmt: skip


@pytest.mark.parametrize("loss_fn", REFUSED, ids=lambda f: f.__name__)
def test_what_cannot_be_captured_runs_apart_with_one_warning_or_is_refused(loss_fn):
    def trained(*members):
        GENERATOR.manual_seed(0)
        return fitted(xs(*range(1, 7)), *members, loss_fn=loss_fn, state=toy(w=1.0, lr=0.1))

    advice = r"leave out fullgraph=True, or write compiled\(\)"
    with pytest.raises(CaptureError, match=f"{REFUSED[loss_fn]}.*{advice}"):
        trained(WHOLE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        state = trained(fl.compiled(update=True, backend="eager"))
    ours = [w for w in caught if "compiled(update=True)" in str(w.message)]
    assert len(ours) == 1 and "compiles the loss function and the optimizers apart" in str(ours[0])
    if loss_fn is not drawn_again:  # torch.compile draws other numbers there
        assert state.model.w.item() == pytest.approx(trained().model.w.item())


def test_two_that_would_capture_the_update_are_refused_together():
    with pytest.raises(ValueError, match="leave cuda_graph out, or write compiled"):
        fl.pipeline(fl.compiled(update=True), fl.cuda_graph())


def hooked(parameters):
    optimizer = PLAIN(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def test_hooks_of_an_optimizer_are_refused():
    problem = attrs.evolve(small(), optimizer=hooked)
    with pytest.raises(CaptureError, match="hooks are called around the optimizer's step"):
        run(problem, WHOLE)


def test_a_failed_record_leaves_no_trace():
    def loss_fn(model, x):
        loss = nn.functional.dropout(model(x), 0.5).mean()
        return loss * (1.0 if loss.item() < math.inf else 0.0)

    note, found = noting(lambda state: state.model.w.item())
    members = (fl.compiled(update=True, backend="eager"),)
    with pytest.warns(UserWarning, match="apart"):
        fitted([1] * 6, *members, loss_fn=loss_fn, hooks=(note,))
    fitted([1] * 6, loss_fn=loss_fn, hooks=(note,))
    assert found[:6] == found[6:]
