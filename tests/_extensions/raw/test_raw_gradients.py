"""raw(fn, updates=False): a function that makes gradients by itself, and no update."""

import functools
import pickle

import attrs
import pytest
import torch
from sample_middleware import largest_output, noise, output_mean, weight_penalty
from sample_steps import backward_of
from torch import nn
from toy_runs import ONE, of, xs

import fnloop as fl
from fnloop import schedules
from fnloop.testing import Toy, assert_same, small, stochastic, toy, toy_loss

own = functools.partial(fl.raw, updates=False)


def descend(state, batch):
    loss, aux = toy_loss(state.model, batch)
    loss.backward()
    return fl.Output(loss, weight=len(batch), aux=aux)


# --- the same as with a loss function

MEAN = fl.metric(mean=output_mean, largest=largest_output)


@pytest.mark.parametrize("problem", [small, stochastic])
@pytest.mark.parametrize("members", [
    (), (fl.accumulate(2), fl.clip(0.05)),
    (fl.accumulate(3), weight_penalty(0.01), noise(0.01), MEAN), (fl.clip(0.05), fl.accumulate(2)),
    (fl.clip_value(0.01), fl.accumulate(3), fl.clip(0.05)),
    (fl.microbatch(100), fl.schedule(schedules.linear()), fl.ema(0.9)),
    (fl.accumulate(2), fl.sam(0.05), fl.grad_norm()),
    (fl.skip_nonfinite(), fl.accumulate(2), fl.spike_guard(4, 3.0)), (fl.closure(),),
    (fl.amp("bf16"), fl.accumulate(2)), (fl.swa(0.5), fl.metric(mean=output_mean, on="training")),
], ids=repr)  # fmt: skip
def test_a_function_that_calls_backward_trains_as_its_loss(members, problem):
    """Bit for bit, but for a window of unequal batches, whose gradients are weighed afterwards."""
    one = problem()
    loaders = {"train": one.batches, "valid": one.batches[:2]}

    def run(loss_fn):
        return fl.fit(fl.pipeline(*members)(loss_fn), one.state(), loaders, epochs=2, hooks=())

    mine, theirs = run(own(backward_of(one.loss_fn), one.loss_fn)), run(one.loss_fn)
    in_window = any(m.name == "accumulate" for m in members)
    close = 1e-12 if problem is small else 1e-6  # a bias before a norm layer has no gradient
    close = 1e-2 if any(m.name == "amp" for m in members) else close
    assert_same(mine, theirs, rtol=close if in_window else 0)
    assert mine.step + mine.skipped == len(one.batches) * 2 or in_window


def test_with_exact_too():
    one = small()

    def run(loss_fn):
        torch.manual_seed(0)
        model = one.model()
        state = fl.TrainState.create(model, one.optimizer(model.parameters()), seed=0, exact=True)
        step = fl.pipeline(fl.accumulate(2), fl.clip(0.05))(loss_fn)
        return fl.fit(step, state, one.batches, epochs=2, hooks=())

    assert_same(run(own(backward_of(one.loss_fn))), run(one.loss_fn))


def test_throughput_counts_its_items():
    state = fl.fit(fl.pipeline(fl.throughput())(own(descend)), toy(), [ONE] * 3, hooks=())
    assert state.history.latest("train/throughput/samples") > 0


@pytest.mark.parametrize(("weight", "why"), [
    (0, "the batch has no item: its weight is 0"),
    (torch.tensor(0.0), None),  # on the device it is not read
])  # fmt: skip
def test_a_batch_without_an_item_changes_nothing(weight, why):
    makes = lambda state, batch: attrs.evolve(descend(state, batch), weight=weight)
    state, out = own(makes)(toy(w=1.0), ONE)
    assert (out.skip, state.skipped) == (why, why is not None) and state.model.w.item() == 1.0


def test_each_piece_of_a_batch_is_one_call():
    sizes = []
    makes = lambda state, batch: sizes.append(len(batch)) or descend(state, batch)
    state, _ = fl.pipeline(fl.microbatch(2))(own(makes))(toy(), torch.tensor([1.0, 2.0, 6.0]))
    assert (sizes, state.model.w.item()) == ([2, 1], -3.0)


class Counting(Toy):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


def test_a_batch_that_it_leaves_out_is_out_of_the_window():
    def makes(state, batch):
        loss = state.model(batch).mean()
        loss.backward()
        return fl.Output(loss, weight=1, skip="two" if batch == 2 else None)

    step = fl.pipeline(fl.accumulate(2), fl.ema(0.5))(own(makes))
    state = fl.fit(step, of(Counting()), xs(1, 2, 2, 2, 2, 3), hooks=())
    assert (state.model.w.item(), state.step, state.skipped) == (-4.0, 2, 1)
    assert (state.model.seen.item(), state.slots["ema"].count) == (4.0, 2)


def test_in_turn_with_a_plain_step():
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    optimizers = {k: torch.optim.SGD([model[k]], lr=1.0) for k in "ab"}

    def makes(state, batch):
        loss = (state.model["a"] * batch + state.model["b"]).mean()
        loss.backward()
        assert state.model["b"].grad is None  # it rests
        return fl.Output(loss, weight=len(batch))

    plain = fl.pipeline()(lambda model, x: (model["a"] * model["b"]).sum() * x.mean())
    step = fl.alternate({"a": own(makes), "b": plain}, evaluate="b")
    state = fl.fit(step, fl.TrainState.create(model, optimizers), [ONE] * 2, hooks=())
    assert (model["a"].item(), model["b"].item()) == (-2.0, 1.0 + 2.0)
    assert dict(state.updates) == {"a": 2, "b": 2}


def test_sparse_gradients():
    def states():
        torch.manual_seed(0)
        return of(nn.Embedding(5, 2, sparse=True), lr=0.1)

    loss_fn = lambda model, batch: (model(batch).square().mean(), {})
    batches = [torch.tensor([0, 1]), torch.tensor([1, 4])]

    def makes(state, batch):
        loss, _ = loss_fn(state.model, batch)
        loss.backward()
        return fl.Output(loss, weight=len(batch))

    run = lambda given: fl.fit(fl.pipeline()(given), states(), batches, hooks=())
    assert torch.equal(run(own(makes)).model.weight, run(loss_fn).model.weight)


# --- what is refused


@pytest.mark.parametrize(("member", "message"), [
    (fl.compiled(), r"raw\(descend, updates=False\): compiled\(\) replaces the loss function"),
    (fl.scheduled(beta=lambda i, total: 1.0), "replaces the loss function, and descend takes"),
    (fl.tbptt(2), "replaces the loss function"),
    (fl.cuda_graph(), "would capture what descend does"),
    (fl.amp("fp16"), r'inside descend: write amp\("bf16"\)'),
    (fl.retry_on_oom(), r"would repeat descend: list microbatch\(size\)"),
    (fl.closure(create_graph=True), "those of descend have no graph"),
], ids=repr)  # fmt: skip
def test_what_cannot_be_around_it_is_refused_when_composing(member, message):
    with pytest.raises(ValueError, match=message):
        fl.pipeline(member)(own(descend))


def forgets(state, batch):
    return fl.Output(toy_loss(state.model, batch)[0], weight=len(batch))


def steps(state, batch):
    out = descend(state, batch)
    state.optimizer.step()
    return out


def floating(state, batch):
    return attrs.evolve(descend(state, batch), weight=1.5)


@pytest.mark.parametrize(("fn", "error", "message"), [
    (forgets, ValueError, "forgets made no gradient. With updates=False it leaves gradients"),
    (steps, ValueError, r"steps called the step of SGD, .* leave it out of steps, or write raw"),
    (floating, TypeError, r"as a scalar tensor, an int or a scalar tensor; got weight=1.5"),
    (lambda state, batch: None, TypeError, r"<lambda> must return Output\(loss, weight=items\)"),
])  # fmt: skip
def test_a_wrong_function_is_named_and_the_state_is_whole(fn, error, message):
    with pytest.raises(error, match=message) as caught:
        fl.fit(fl.pipeline(fl.clip(1.0))(own(fn)), toy(w=3.0), [ONE], hooks=())
    assert caught.value.state.model.w.item() == 3.0 and caught.value.state.model.w.grad is None
    state = fl.fit(own(descend), caught.value.state, [ONE], hooks=())
    assert state.model.w.item() == 2.0
    state.optimizer.step()  # no hook is left behind


def test_a_failure_with_changed_weights_leaves_no_state():
    def fails(state, batch):
        with torch.no_grad():
            state.model.w.add_(1.0)
        raise RuntimeError("half-way")

    state = toy()
    with pytest.raises(RuntimeError, match="half-way"):
        fl.fit(own(fails), state, [ONE], hooks=())
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.evaluate(fl.pipeline()(toy_loss), state, [ONE])


def test_it_shows_as_it_was_typed_and_can_be_pickled():
    step = fl.pipeline(fl.accumulate(2), fl.clip(1.0))(own(descend, toy_loss))
    shown = "pipeline(accumulate(2), clip(1.0))(raw(descend, evaluate=toy_loss, updates=False))"
    assert repr(step) == repr(pickle.loads(pickle.dumps(step))) == shown
    assert type(pickle.loads(pickle.dumps(step))) is type(step) and step.window == 2
    assert str(step).splitlines() == [
        "┌ update    the optimizer's step",
        "│ ┌ gradient  backward → accumulate(2) → clip(1.0)",
        "│ │ descend(state, batch); in evaluation: toy_loss(model, batch)",
    ]


def test_a_run_of_it_can_be_tried_and_looked_into():
    step = fl.pipeline(fl.accumulate(2), fl.clip(1.0))(own(descend))
    assert not fl.dry_run(step, toy(), [ONE] * 2).problems
