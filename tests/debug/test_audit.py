"""Updates that are made twice: planted faults are found and named, and nothing else changes."""

import pickle
import random

import attrs
import numpy as np
import pytest
import several
import torch
from sample_middleware import decay
from torch import nn
from torch.nn import functional

import fnloop as fl
from fnloop._backend import torch_compat
from fnloop.debug import AuditError, audit
from fnloop.testing import assert_same, no_host_reads, small, toy, toy_loss

ONES = [torch.ones(2)] * 6


def audited(loss_fn, *members, state=None, batches=ONES, **settings):
    """Return the error of a run with an audit of every update."""
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
    """The small problem with other modules in its net."""

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


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_draws_that_the_run_positions_are_no_fault(draw):
    def loss_fn(model, batch):
        return draw() * model.w * batch.mean()

    step = fl.pipeline(audit(every=1))(loss_fn)
    assert fl.fit(step, toy(), ONES, hooks=()).step == 6


def flip(at, bit=0):
    """Flip a bit of w after the optimizer's step, when it is called for the at-th time."""
    called = []

    def wrap(step):
        def flipping(state, batch):
            state, out = step(state, batch)
            called.append(1)
            if len(called) == at:
                state.model.w.data.view(torch.int32).bitwise_xor_(1 << bit)
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
    assert error.state.step == 2
    assert error.state.model.w.item() == -2.0


def test_a_fault_of_the_backward_and_one_of_the_optimizer_are_told_apart():
    drawn = torch.Generator().manual_seed(0)

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.rand((), generator=drawn)

    error = audited(lambda model, batch: Noisy.apply(model.w) * batch.mean())
    assert "The loss is the same, the backward differs" in str(error)

    class Careless(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(torch.rand((), generator=drawn))

    model = toy().model
    error = audited(toy_loss, state=fl.TrainState.create(model, Careless(model.parameters(), 0.1)))
    assert "The loss and the gradients are the same, the step of the optimizer" in str(error)
    assert "aten.rand.generator, at test_audit.py" in str(error)


def test_a_buffer_that_differs_is_named_though_no_parameter_does():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.fill_(random.SystemRandom().random())
            return self.w * x

    model = Counting()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    error = audited(lambda model, x: model(x).mean(), state=state)
    assert "the buffer seen differs" in str(error)
    assert "No parameter differs" in str(error)
    assert error.parameter is None


# --- what it leaves


def test_the_state_of_the_error_is_that_before_the_update_and_continues():
    fault = [False] * 8 + [True] * 4

    def loss_fn(model, batch):
        extra = torch.rand((), generator=drawn) if fault.pop(0) else 0.0
        return model(batch).mean() + extra * model.w

    drawn = torch.Generator()
    members = fl.ema(0.5), fl.torch_scheduler(decay)
    model = toy().model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    state = fl.TrainState.create(model, optimizer, seed=0)
    error = audited(loss_fn, *members, state=state)
    assert error.state.step == 4

    plain = fl.pipeline(*members)(toy_loss)
    wanted = fl.TrainState.create(
        again := toy().model, torch.optim.SGD(again.parameters(), lr=1.0, momentum=0.5), seed=0
    )
    wanted = fl.fit(plain, wanted, ONES, steps=4, hooks=())
    assert_same(error.state, wanted)
    continued = fl.fit(plain, error.state, ONES, epochs=1, hooks=())
    assert_same(continued, fl.fit(plain, wanted, ONES, epochs=1, hooks=()))


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(AuditError("text", "0.weight")))
    assert (str(error), error.parameter) == ("text", "0.weight")


def test_only_each_n_th_update_is_made_twice_and_others_read_nothing():
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0].item())
        return toy_loss(model, batch)

    batches = [torch.full((2,), float(i)) for i in range(7)]
    fl.fit(fl.pipeline(audit(every=3))(loss_fn), toy(), batches, hooks=())
    assert seen == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6]

    step, state = fl.pipeline(audit(every=3))(toy_loss), toy()
    state, _ = step(state, batches[0])
    with no_host_reads():
        state, _ = step(state, batches[1])
        state, _ = step(state, batches[2])


def test_skipped_updates_are_counted_too():
    """Else each one after a skipped update would be audited again."""
    seen = []

    def loss_fn(model, batch):
        seen.append(1)
        return fl.skip("no")

    fl.fit(fl.pipeline(audit(every=4))(loss_fn), toy(), ONES, hooks=())
    assert len(seen) == 8


def test_fp16_and_lbfgs_and_lazy_modules_can_be_audited():
    problem = net(nn.Dropout(0.3), dtype=torch.float32)
    scaled = fl.amp("fp16", init_scale=2.0**17, growth_interval=3), fl.accumulate(2)
    runs = [
        fl.fit(
            fl.pipeline(*scaled, *more)(problem.loss_fn), problem.state(), problem.batches, hooks=()
        )
        for more in ((), (audit(every=1),))
    ]
    assert_same(*runs)
    problem = attrs.evolve(small(), optimizer=lambda p: torch.optim.LBFGS(p, max_iter=2))
    runs = [
        fl.fit(fl.pipeline(*more)(problem.loss_fn), problem.state(), problem.batches, hooks=())
        for more in ((), (audit(every=2),))
    ]
    assert_same(*runs)

    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = fl.pipeline(audit(every=1))(lambda model, x: model(x).mean())
    assert fl.fit(step, state, [torch.ones(2, 4)] * 3, hooks=()).step == 3


def test_raw_steps_windows_of_sequences_and_turns_can_be_audited():
    def by_hand(state, batch):
        loss = toy_loss(state.model, batch)[0]
        loss.backward()
        state.optimizer.step()
        return fl.Output(loss.detach(), len(batch))

    step = fl.pipeline(audit(every=1))(fl.raw(by_hand))
    assert fl.fit(step, toy(), ONES, hooks=()).model.w.item() == -6.0

    def carried(model, batch, carry):
        carry = batch.sum() + (0 if carry is None else carry)
        return model.w * carry, {}, carry

    for members in ((audit(every=1), fl.tbptt(2)), (fl.tbptt(2), audit(every=1))):
        state, _ = fl.pipeline(*members)(carried)(toy(), torch.ones(1, 5))
        assert (state.step, state.model.w.item()) == (3, -11.0)  # 2 + 4 + 5

    around = fl.pipeline(fl.ema(0.9), audit(every=1)), several.alternating(batch="next")
    inside = fl.pipeline(), several.alternating(matrices=[audit(every=1)], rest=[audit(every=2)])
    for pipe, problem in (around, inside):
        members = [m for m in pipe.middleware if m.name != "audit"]
        plain = several.alternating(batch="next") if members else several.alternating()
        runs = [
            fl.fit(p(one.loss_fn), one.state(), one.batches, hooks=())
            for p, one in ((pipe, problem), (fl.pipeline(*members), plain))
        ]
        assert_same(*runs)


def test_graphs_are_replayed_twice_and_compared_with_eager_updates(recorders):
    problem = attrs.evolve(
        small(),
        optimizer=lambda p: torch.optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9, fused=True),
    )
    plain = fl.fit(
        fl.pipeline()(problem.loss_fn), problem.state(), problem.batches, epochs=3, hooks=()
    )
    for against in (None, "eager"):
        recorders.clear()
        step = fl.pipeline(fl.cuda_graph(warmup=1), audit(every=2, against=against))
        state = fl.fit(step(problem.loss_fn), problem.state(), problem.batches, epochs=3, hooks=())
        assert_same(state, plain)
        log = [entry for recorder in recorders for entry in recorder.log]
        # 21 updates, of which 11 are audited.
        assert sum(not entry.startswith("record") for entry in log) == (32 if not against else 21)

    stale = {"factor": 1.0}

    def baked(model, batch):  # a number of Python's becomes a constant of the graph
        loss, aux = problem.loss_fn(model, batch)
        return loss * stale["factor"], aux

    def change(state):
        stale["factor"] = 2.0 if state.step >= 10 else 1.0
        return state

    step = fl.pipeline(fl.cuda_graph(warmup=1), audit(every=4, against="eager"))(baked)
    with pytest.raises(AuditError, match="differs from the one that is made eagerly") as caught:
        fl.fit(step, problem.state(), problem.batches, epochs=3, hooks=(change,))
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


def test_a_model_that_cannot_compute_in_float64_says_so():
    def loss_fn(model, batch):
        return model(batch.float().int().float()).float().mean() @ torch.ones(2)

    step = fl.pipeline(audit(every=1, against="float64"))(loss_fn)
    with pytest.raises(RuntimeError) as caught:
        fl.fit(step, toy(), ONES, hooks=())
    assert any("a float64 copy of the model" in note for note in caught.value.__notes__)


# --- wrong settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: audit(every=0), "audit expects every as an int >= 1"),
        (lambda: audit(against="x"), 'audit expects against as one of "eager", "float64", or None'),
        (lambda: fl.pipeline(audit(), audit(every=3)), "have one name, 'audit'"),
        (
            lambda: fl.pipeline(audit(against="float64"))(
                fl.alternate({"a": fl.pipeline()(toy_loss)})
            ),
            "acts in the forward ring",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_when_composing(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_it_prints_compares_and_pickles_as_it_was_typed():
    assert repr(audit(every=10, against="eager")) == "audit(every=10, against='eager')"
    assert pickle.loads(pickle.dumps(audit(5))) == audit(5)


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
