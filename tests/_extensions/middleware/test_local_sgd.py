"""local_sgd in one process, and what it is refused with; several: tests/processes."""

import pytest
import torch
from sample_middleware import nesterov, noise, own_guard
from toy_runs import fitted

import fnloop as fl
from fnloop.testing import toy, toy_loss

SGD = torch.optim.SGD
halfway = lambda params: SGD(params, lr=0.5)
heavy = lambda params: SGD(params, lr=1.0, momentum=0.5)


@pytest.mark.parametrize(("member", "updates", "expected"), [
    (fl.local_sgd(), 8, -8), (fl.local_sgd(2), 3, -3),
    (fl.local_sgd(2, halfway), 1, -1), (fl.local_sgd(2, halfway), 2, -1),
    (fl.local_sgd(2, halfway), 3, -2), (fl.local_sgd(2, halfway), 4, -2),
    (fl.local_sgd(1, halfway), 4, -2), (fl.local_sgd(2, heavy), 2, -2),
    (fl.local_sgd(2, heavy), 4, -2 - 3), (fl.local_sgd(2, heavy), 6, -5 - 3.5),
], ids=repr)  # fmt: skip
def test_one_process_is_a_single_worker(member, updates, expected):
    """Each update subtracts 1. The outer gradient of two is 2: its momentum is 2, 3, 3.5."""
    assert fitted([1] * updates, member).model.w.item() == expected


def test_without_outer_one_process_trains_as_without_it():
    assert fitted([1, 2, 3], fl.local_sgd(2)).slots["local_sgd"].used is False


def test_other_weights_begin_a_new_outer_step(caplog):
    """It is from the weights that the caller has put into the model: from 10 to 9.5."""
    state = fitted([1] * 3, fl.local_sgd(2, halfway))
    with torch.no_grad():
        state.model.w.fill_(10.0)
    state = fitted([1] * 3, fl.local_sgd(2, halfway), state=state, epochs=2)
    assert state.model.w.item() == 9.5 - 2 / 2
    assert ["was given other weights" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(("member", "message"), [
    (fl.ema(0.9), r"local_sgd cannot work with ema\(0\.9\), .* Evaluations have the average"),
    (fl.swa(name="x"), r"swa\(name='x'\), which would average"),
    (fl.skip_nonfinite(), r"write the hook halt_on_nonfinite\(\)"),
    (fl.spike_guard(), "write clip"),
    (fl.amp("fp16"), r'write amp\("bf16"\)'), (fl.sam(), "leave one of them out"),
    (fl.retry_on_oom(), r"write microbatch\(size\)"), (fl.closure(), "as often as it likes"),
    (fl.cuda_graph(), r"write compiled\(\)"), (fl.tbptt(2), "one process only"),
    (fl.throughput(flops="count", peak=1.0), "which may differ between processes"),
], ids=repr)  # fmt: skip
def test_what_it_cannot_be_together_with(member, message):
    for listed in ((fl.local_sgd(), member), (member, fl.local_sgd())):
        with pytest.raises(NotImplementedError, match=message):
            fl.pipeline(*listed)


def test_a_middleware_of_ones_own_has_no_slot():
    @fl.middleware("update", init=lambda state: [])
    def ema():  # not the one of fnloop
        return lambda step: step

    with pytest.raises(NotImplementedError, match=r'ema\(\), which keeps state\.slots\["ema"\]'):
        fl.pipeline(ema(), fl.local_sgd())
    fl.pipeline(noise(0.1), own_guard(), fl.amp("bf16"), fl.schedule(len), fl.local_sgd())


def exact():
    return fl.TrainState.create(model := toy().model, SGD(model.parameters()), exact=True)


class Modal(SGD):
    train = eval = lambda self: None


def of(optimizer):
    return lambda: fl.TrainState.create(model := toy().model, optimizer(model.parameters()))


@pytest.mark.parametrize(("make", "message"), [
    (exact, "local_sgd does not work with TrainState.create.*exact=True"),
    (of(torch.optim.LBFGS), "this one evaluates the loss: take AdamW"),
    (of(Modal), "has others for an evaluation: take AdamW"),
])  # fmt: skip
def test_states_that_it_refuses(make, message):
    with pytest.raises(NotImplementedError, match=message):
        fl.fit(fl.pipeline(fl.local_sgd())(toy_loss), make(), [torch.ones(1)], hooks=())


@pytest.mark.parametrize(("outer", "message"), [
    (lambda params: 3, "local_sgd expects outer as a function that returns a torch optimizer"),
    (lambda params: SGD([torch.zeros(1, requires_grad=True)]), "of the parameters that it is"),
    (torch.optim.LBFGS, r"LBFGS evaluates a loss.*write torch\.optim\.SGD"),
])  # fmt: skip
def test_an_outer_optimizer_is_one_of_what_it_was_given(outer, message):
    with pytest.raises(TypeError, match=message):
        fitted([1], fl.local_sgd(outer=outer))


def test_alternate_is_refused():
    inside = {"a": fl.pipeline(fl.local_sgd())(toy_loss)}
    with pytest.raises(ValueError, match="and alternate gradients: leave one out"):
        fl.alternate(inside)
    with pytest.raises(NotImplementedError, match="alternate averages the gradients"):
        fl.pipeline(fl.local_sgd(outer=nesterov))(fl.alternate({"a": fl.pipeline()(toy_loss)}))


def test_a_parameter_that_is_trained_later_has_no_outer_step():
    model = torch.nn.Linear(2, 1)
    state = fl.TrainState.create(model, SGD(model.parameters(), lr=0.1))
    step = fl.pipeline(fl.local_sgd(2, halfway))(lambda model, x: model(x).mean())
    state = fl.fit(step, fl.freeze(state, "bias"), [torch.ones(1, 2)], hooks=())
    with pytest.raises(NotImplementedError, match=r"began when bias was frozen"):
        fl.fit(step, fl.unfreeze(state, "bias"), [torch.ones(1, 2)], hooks=())


def test_a_parameter_of_another_shape_has_no_outer_step():
    state = fl.TrainState.create(model := torch.nn.Linear(2, 1), SGD(model.parameters(), lr=0.1))

    def lengthen(state):
        model.bias = torch.nn.Parameter(torch.zeros(2))
        state.optimizer.param_groups[0]["params"][1] = model.bias
        return state

    step = fl.pipeline(fl.local_sgd(2, halfway))(lambda m, x: (x @ m.weight.T + m.bias).mean())
    with pytest.raises(NotImplementedError, match="bias was frozen, not there or of another shape"):
        fl.fit(step, state, [torch.ones(1, 2)] * 2, hooks=(lengthen,))
