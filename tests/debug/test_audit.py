"""Updates that are made twice: planted faults are found and named, and nothing else changes."""

import contextlib
import pickle
import random
import re

import attrs
import numpy as np
import pytest
import several
import torch
from sample_middleware import decay
from sample_steps import by_hand
from torch import nn
from torch.nn import functional
from toy_runs import of

import fnloop as fl
from fnloop._backend import torch_compat
from fnloop.debug import AuditError, audit
from fnloop.testing import Toy, assert_same, no_host_reads, small, toy, toy_loss

ONES = [torch.ones(2)] * 6


def audited(loss_fn, *members, state=None, batches=ONES, **settings):
    step = fl.pipeline(*members, audit(every=1, **settings))(loss_fn)
    with pytest.raises(AuditError) as caught:
        fl.fit(step, toy() if state is None else state, batches, hooks=())
    return caught.value


# --- planted faults


class OwnDropout(nn.Module):
    """A dropout that draws from a generator that the run does not position."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x * (torch.rand(x.shape, generator=self.generator) > 0.3)


def net(*between, dtype=torch.float64):

    def loss_fn(model, batch):
        output = model(batch[0].to(dtype))
        return functional.mse_loss(output, batch[1].to(dtype)), {"output": output}

    model = lambda: nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    return attrs.evolve(small(), model=model, loss_fn=loss_fn)


def test_an_unseeded_dropout_is_found_and_its_line_and_generator_are_named():
    problem = net(OwnDropout())
    error = audited(problem.loss_fn, state=problem.state(), batches=problem.batches)
    assert error.parameter == "0.weight"
    text = str(error)
    assert "The forward differs: the loss is" in text
    assert "model.1.generator, a torch.Generator (test_audit.py, line" in text
    assert "aten.rand.generator, at test_audit.py, line" in text
    assert text.count("in forward") == 2
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.parameter) == (text, "0.weight")


calls = 0


def test_a_global_counter_is_found_and_its_line_is_named():
    def loss_fn(model, batch):
        global calls
        calls += 1
        return calls * model.w * batch.mean()

    error = audited(loss_fn)
    line = loss_fn.__code__.co_firstlineno + 2
    wanted = f"the global calls of test_audit.py (test_audit.py, line {line}, in loss_fn)"
    assert wanted in str(error)
    assert error.parameter == "w"
    # The makings that explain it are the third and the fourth: their gradients are 3 and 4.
    assert "the gradient of w differs in 1 of 1 elements (2 bits), by at most 1" in str(error)


class Counter:
    def __init__(self):
        self.calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return self.calls * model.w * batch.mean()


def test_a_counter_in_the_object_of_a_method_is_found():
    assert re.search(r"does not hold: .*\.calls\b", str(audited(Counter().loss)))


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_draws_that_the_run_positions_are_no_fault(draw):
    step = fl.pipeline(audit(every=1))(lambda model, batch: draw() * model.w * batch.mean())
    assert fl.fit(step, toy(), ONES, hooks=()).step == 6


def flip(at):
    """Flip the last bit of w after the optimizer's step, when it is called for the at-th time."""
    called = []

    def wrap(step):
        def flipping(state, batch):
            state, out = step(state, batch)
            called.append(1)
            if len(called) == at:
                state.model.w.data.view(torch.int32).bitwise_xor_(1)
            return state, out

        return flipping

    return fl.Middleware("flip", update=wrap)


@pytest.mark.parametrize(("at", "other"), [(5, "first"), (6, "second")])
def test_a_flipped_bit_is_found_and_told_from_a_draw(at, other):
    error = audited(toy_loss, flip(at))
    assert error.parameter == "w"
    # The third update makes w = -3, whose neighbour is 2 ** -22 away.
    assert "the value of w differs in 1 of 1 elements (1 bit), by at most 2.3842e-07" in str(error)
    assert f"the {other} one was disturbed: one bit of one element is flipped" in str(error)
    assert (error.state.step, error.state.model.w.item()) == (2, -2.0)


def test_a_fault_of_the_backward_and_one_of_the_optimizer_are_told_apart():
    drawn = torch.Generator().manual_seed(0)
    noise = lambda: torch.rand((), generator=drawn)

    def noisy(model, batch):
        model.w.register_hook(lambda grad: grad + noise())
        return toy_loss(model, batch)

    assert "The loss is the same, the backward differs" in str(audited(noisy))

    class Careless(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            self.param_groups[0]["params"][0].data.add_(noise())

    model = toy().model
    error = audited(toy_loss, state=fl.TrainState.create(model, Careless(model.parameters(), 0.1)))
    assert "The loss and the gradients are the same, the step of the optimizer" in str(error)
    assert "aten.rand.generator, at test_audit.py" in str(error)


def test_a_buffer_that_differs_is_named_though_no_parameter_does():
    def loss_fn(model, x):
        model.running_mean.fill_(random.SystemRandom().random())
        return model.weight.sum() * x.mean()

    error = audited(loss_fn, state=of(nn.BatchNorm1d(1)))
    assert "the buffer running_mean differs" in str(error)
    assert "No parameter differs" in str(error)
    assert error.parameter is None


# --- what it leaves


def test_the_state_of_the_error_is_that_before_the_update_and_continues():
    fault, drawn = [False] * 8 + [True] * 4, torch.Generator()

    def loss_fn(model, batch):
        extra = torch.rand((), generator=drawn) if fault.pop(0) else 0.0
        return model(batch).mean() + extra * model.w

    create = lambda: of(Toy(), momentum=0.5)
    members = fl.ema(0.5), fl.torch_scheduler(decay)
    error = audited(loss_fn, *members, state=create())
    assert error.state.step == 4
    plain = fl.pipeline(*members)(toy_loss)
    wanted = fl.fit(plain, create(), ONES, steps=4, hooks=())
    assert_same(error.state, wanted)
    continued = fl.fit(plain, error.state, ONES, epochs=1, hooks=())
    assert_same(continued, fl.fit(plain, wanted, ONES, epochs=1, hooks=()))


@pytest.mark.parametrize("skips", [False, True])
def test_only_each_n_th_update_is_made_twice_and_the_others_read_nothing(skips):
    seen = []

    def loss_fn(model, batch):
        seen.append(batch)
        return fl.skip("no") if skips else toy_loss(model, batch)

    step, state, made = fl.pipeline(audit(every=3))(loss_fn), toy(), []
    for i in range(7):
        with no_host_reads() if i % 3 else contextlib.nullcontext():
            state, _ = step(state, ONES[0])
        made.append(len(seen))
    assert made == [2, 3, 4, 6, 7, 8, 10]


def test_an_average_of_parameters_that_a_hook_has_replaced_is_made_twice_alike():
    """It is 0 after update 2, and falls by 1. The average is (0 - 1) / 2, then (-0.5 - 2) / 2."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def lengthen(state):
        if state.step == 2:
            model.w = nn.Parameter(torch.zeros(2))
            optimizer.param_groups[0]["params"] = [model.w]
        return state

    step = fl.pipeline(fl.ema(0.5), audit(every=1))(lambda model, x: (model.w * x).sum())
    state = fl.fit(step, fl.TrainState.create(model, optimizer), ONES[:1] * 4, hooks=(lengthen,))
    assert model.w.tolist() == [-2.0, -2.0]
    assert state.slots["ema"]["w"].tolist() == [-1.25, -1.25]


def trained(problem, *members):
    return fl.fit(
        fl.pipeline(*members)(problem.loss_fn), problem.state(), problem.batches, hooks=()
    )


SCALED = fl.amp("fp16", init_scale=2.0**17, growth_interval=3), fl.accumulate(2)
AUDITED = {
    "fp16": (net(nn.Dropout(0.3), dtype=torch.float32), (*SCALED, audit(every=1)), None, SCALED),
    "lbfgs": (
        attrs.evolve(small(), optimizer=lambda p: torch.optim.LBFGS(p, max_iter=2)),
        (audit(every=2),), None, (),
    ),
    "around turns": (
        several.alternating(batch="next"), (fl.ema(0.9), audit(every=1)), None, (fl.ema(0.9),),
    ),
    "inside of turns": (
        several.alternating(matrices=[audit(every=1)], rest=[audit(every=2)]), (),
        several.alternating(), (),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("problem", "members", "other", "plain"), AUDITED.values(), ids=AUDITED)
def test_an_audit_of_other_steps_and_optimizers_changes_nothing(problem, members, other, plain):
    assert_same(trained(problem, *members), trained(other or problem, *plain))


def test_lazy_modules_raw_steps_and_windows_of_sequences_can_be_audited():
    step = fl.pipeline(audit(every=1))(lambda model, x: model(x).mean())
    state = of(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), lr=0.1)
    assert fl.fit(step, state, [torch.ones(2, 4)] * 3, hooks=()).step == 3

    step = fl.pipeline(audit(every=1))(fl.raw(by_hand))
    assert fl.fit(step, toy(), ONES, hooks=()).model.w.item() == -6.0

    def carried(model, batch, carry):
        carry = batch.sum() + (0 if carry is None else carry)
        return model.w * carry, {}, carry

    for members in ((audit(every=1), fl.tbptt(2)), (fl.tbptt(2), audit(every=1))):
        state, _ = fl.pipeline(*members)(carried)(toy(), torch.ones(1, 5))
        assert (state.step, state.model.w.item()) == (3, -11.0)  # 2 + 4 + 5


def test_graphs_are_replayed_twice_and_compared_with_eager_updates(recorders):
    rate = torch.tensor(0.05)
    fused = lambda p: torch.optim.SGD(p, lr=rate.clone(), momentum=0.9, fused=True)
    problem = attrs.evolve(small(), optimizer=fused)
    graph = fl.cuda_graph(warmup=1)

    def fit(loss_fn, *members, hooks=()):
        step = fl.pipeline(*members)(loss_fn)
        return fl.fit(step, problem.state(), problem.batches, epochs=3, hooks=hooks)

    plain = fit(problem.loss_fn)
    for against in (None, "eager"):
        recorders.clear()
        assert_same(fit(problem.loss_fn, graph, audit(every=2, against=against)), plain)
        log = [entry for recorder in recorders for entry in recorder.log]
        # 21 updates, of which 11 are audited.
        assert sum(not entry.startswith("record") for entry in log) == (32 if not against else 21)

    stale = {"factor": 1.0}

    def baked(model, batch):  # a number of Python's becomes a constant of the graph
        loss, aux = problem.loss_fn(model, batch)
        return loss * stale["factor"], aux

    change = lambda state: stale.update(factor=2.0 if state.step >= 10 else 1.0) or state
    with pytest.raises(AuditError, match="differs from the one that is made eagerly") as caught:
        fit(baked, graph, audit(every=4, against="eager"), hooks=(change,))
    assert caught.value.state.step == 12
    assert caught.value.parameter in dict(problem.model().named_parameters())


# --- compilation, and float64


def wrong_tanh(graph, inputs):
    """A backend of torch.compile whose kernel of tanh is off by a hundredth."""
    for node in graph.graph.nodes:
        if "tanh" in str(node.target):
            with graph.graph.inserting_after(node):
                new = graph.graph.call_function(torch.mul, (node, 1.01))
            node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    graph.recompile()
    return graph.forward


@pytest.mark.slow
def test_a_wrong_kernel_of_compiled_code_is_found():
    problem = net(dtype=torch.float32)
    compiled = fl.compiled(backend=wrong_tanh)
    error = audited(
        problem.loss_fn, compiled, state=problem.state(), batches=problem.batches, against="eager"
    )
    assert error.parameter in ("0.weight", "0.bias", "2.weight", "2.bias")
    assert "of its norm, where 0.001 is allowed" in str(error)
    # It is wrong each time, so that the same update twice cannot show it.
    for backend, against in ((wrong_tanh, None), ("aot_eager", "eager"), ("aot_eager", None)):
        step = fl.pipeline(fl.compiled(backend=backend), audit(every=2, against=against))
        state = fl.fit(step(problem.loss_fn), problem.state(), problem.batches, hooks=())
        assert state.step == 7


class WrongInFloat32(nn.Module):
    def forward(self, x):
        return x * (1.01 if x.dtype == torch.float32 else 1.0)


class WrongBackward(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.dtype = x.dtype
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * (1.5 if ctx.dtype == torch.float32 else 1.0)

    def forward(self, x):
        return self.Function.apply(x)


def test_a_module_that_is_wrong_in_float32_is_named():
    problem = net(WrongInFloat32(), dtype=torch.float32)

    def loss_fn(model, batch):
        dtype = next(model.parameters()).dtype
        return functional.mse_loss(model(batch[0].to(dtype)), batch[1].to(dtype))

    settings = {"state": problem.state(), "batches": problem.batches, "against": "float64"}
    error = audited(loss_fn, **settings)
    assert error.parameter == "1"
    assert "the output of the module 1 is off by" in str(error)
    # A hundredth of each element is 0.01 / 2 ** -23 units.
    assert "83886 units of rounding" in str(error)

    problem = net(WrongBackward(), dtype=torch.float32)
    error = audited(loss_fn, **{**settings, "state": problem.state()})
    assert error.parameter == "0.bias"  # the nearest one before it
    assert "the gradient of 0.bias is off by" in str(error)

    problem = net(nn.Dropout(0.3), nn.BatchNorm1d(8), dtype=torch.float32)
    for members in ((), (fl.amp("bf16"), fl.accumulate(2))):
        step = fl.pipeline(*members, audit(every=1, against="float64"))(loss_fn)
        batches = [batch for batch in problem.batches if len(batch[0]) > 1]
        assert fl.fit(step, problem.state(), batches, hooks=()).skipped == 0


def test_the_copy_in_float64_gets_the_batch_in_float64():
    problem, seen = net(dtype=torch.float32), set()

    def loss_fn(model, batch):
        seen.add((batch[0].dtype, next(model.parameters()).dtype))
        return functional.mse_loss(model(batch[0]), batch[1])

    batches = [tuple(t.float() for t in batch) for batch in problem.batches[:2]]
    step = fl.pipeline(audit(every=1, against="float64"))(loss_fn)
    fl.fit(step, problem.state(), batches, hooks=())
    assert seen == {(torch.float32, torch.float32), (torch.float64, torch.float64)}


def test_a_model_that_cannot_compute_in_float64_says_so():
    def loss_fn(model, batch):
        return model(batch.float().int().float()).float().mean() @ torch.ones(2)

    step = fl.pipeline(audit(every=1, against="float64"))(loss_fn)
    with pytest.raises(RuntimeError) as caught:
        fl.fit(step, toy(), ONES, hooks=())
    assert any("a float64 copy of the model" in note for note in caught.value.__notes__)


# --- wrong settings


IN_TURNS = fl.alternate({"a": fl.pipeline()(toy_loss)})


@pytest.mark.parametrize(("make", "message"), [
    (lambda: audit(every=0), "audit expects every as an int >= 1"),
    (lambda: audit(against="x"), 'audit expects against as one of "eager", "float64", or None'),
    (lambda: fl.pipeline(audit(), audit(every=3)), "have one name, 'audit'"),
    (lambda: fl.pipeline(audit(against="float64"))(IN_TURNS), "acts in the forward ring"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_when_composing(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- its cost


def test_an_audit_takes_less_than_three_updates():
    """Counted in operators that compute, each a kernel on a device; in a thousand it is 0.3 %."""
    counted = []

    class Count(torch_compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted[-1] += torch_compat.computes(func)
            return func(*args, **(kwargs or {}))

    problem = small()
    batches = [problem.batches[0]] * 200
    for members in ((), (audit(every=100),)):
        counted.append(0)
        with Count():
            fl.fit(fl.pipeline(*members)(problem.loss_fn), problem.state(), batches, hooks=())
    plain, with_audits = counted
    assert 1.0 < (with_audits - plain) / 2 / (plain / 200) < 3.0
