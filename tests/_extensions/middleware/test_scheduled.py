"""scheduled: numbers that depend on the update, passed to the loss function by name."""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import check_laws, small, toy

ONE = torch.ones(1)
share = fl.scheduled(beta=lambda i, total: i / total)


def loss_fn(model, batch, *, beta=1.0):  # its gradient is beta
    return beta * model.w * batch.mean()


def fit(step, *args, **settings):
    return fl.fit(step, *args, hooks=(), **settings)


def test_update_i_gets_the_number_of_i_and_a_record_has_the_last_one():
    state = fit(fl.pipeline(share)(loss_fn), toy(), [ONE] * 4, epochs=2)
    assert state.model.w.item() == -sum(range(8)) / 8
    assert state.history["train/beta"] == (0.375, 0.875)


def test_a_function_of_one_argument_gets_the_state():
    halved = fl.scheduled(beta=lambda state: 0.5**state.epoch)
    state = fit(fl.pipeline(halved)(loss_fn), toy(), [ONE] * 2, epochs=3)
    assert state.model.w.item() == -2 * (1 + 0.5 + 0.25)


def test_the_batches_of_a_window_get_the_number_of_its_update():
    state = fit(fl.pipeline(fl.accumulate(2), share)(loss_fn), toy(), [ONE] * 4, epochs=1)
    assert state.model.w.item() == -(0 + 1) / 2


def test_an_evaluation_gets_the_number_of_the_next_update():
    loaders = {"train": [ONE] * 2, "valid": [ONE]}
    step = fl.pipeline(share)(loss_fn)
    state = fit(step, toy(w=1.0), loaders, epochs=2)  # w is 1, 1, 0.75, 0.25, -0.5
    assert state.history["valid/loss"] == (2 / 4 * 0.75, 4 / 4 * -0.5)
    assert fl.evaluate(step, state, [ONE]) == {"loss": -0.5}  # of the same total, outside the run


def test_a_phase_counts_from_where_it_began():
    step = fl.pipeline(share)(loss_fn)
    state = fit(step, toy(), [ONE] * 2, phase="a")
    state = fit(step, state, [ONE] * 4, phase="b")
    assert state.history["train/beta"] == (0.5, 0.75)


def test_a_run_of_another_length_warns_once_with_both_numbers(caplog):
    falling = fl.scheduled(beta=lambda i, total: 1 - i / total, gamma=lambda state: 0.0, b=rest)
    step = fl.pipeline(falling)(lambda m, x, *, beta, gamma, b: (beta + gamma + b) * m.w)
    state = fit(step, toy(), [ONE] * 4, epochs=1)
    assert fl.evaluate(step, state, [ONE]) == {"loss": 0.0}  # 1 - 4 / 4, of the same total
    assert caplog.messages == []
    state = fit(step, state, [ONE] * 4, epochs=2)
    assert caplog.messages == [
        "scheduled(<lambda>): the run was planned for 4 updates and now has 8: at step 4 beta is "
        "0.5 instead of 0"
    ]
    state = fit(step, attrs.evolve(state, epoch=1, step=4), [ONE] * 4, epochs=2)
    assert len(caplog.messages) == 1
    assert fit(step, state, [ONE] * 2, phase="next").step == 10
    assert len(caplog.messages) == 1


def rest(step, total):
    return 1.0 * (step < 0)


def test_a_turn_has_numbers_of_its_own():
    model = torch.nn.ModuleDict({"d": toy().model, "g": toy().model})
    steps = {name: fl.pipeline(share)(lambda m, x, *, beta, n=name: beta * m[n].w) for name in "dg"}
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=1.0) for name in "dg"}
    state = fl.TrainState.create(model, optimizers)
    state = fit(fl.alternate(steps), state, [ONE] * 3)
    assert {"train/d/beta", "train/g/beta"} <= {*state.history[-1].metrics}
    assert state.model["d"].w.item() == state.model["g"].w.item() == -(0 + 1 + 2) / 3


def test_two_numbers_and_a_carry():
    def carried(model, batch, carry, *, beta, gamma):
        return (beta + gamma) * model.w * batch.sum(), {}, None

    numbers = fl.scheduled(beta=lambda state: 1.0 + state.step, gamma=lambda i, total: 10.0)
    for members in ((fl.tbptt(1), numbers), (numbers, fl.tbptt(1))):
        state, out = fl.pipeline(*members)(carried)(toy(), torch.ones(1, 3))
        assert state.model.w.item() == -(11 + 12 + 13)
        assert out.metrics["beta"].compute() == 3.0


@pytest.mark.parametrize("members", [(share,), (fl.accumulate(2), share), (share, fl.clip(0.1))])
def test_it_keeps_the_laws(members):
    given = small()

    def weighted(model, batch, *, beta=1.0):
        loss, aux = given.loss_fn(model, batch)
        return (1 + beta) * loss, aux

    check_laws(fl.pipeline(*members), attrs.evolve(given, loss_fn=weighted))


def test_a_captured_update_reads_a_tensor_that_is_filled_before_each_replay(recorders):
    step = fl.pipeline(share, fl.cuda_graph(warmup=1))(loss_fn)
    state = fit(step, toy(), [ONE] * 4)
    assert state.model.w.item() == pytest.approx(-(0 + 1 + 2 + 3) / 4)
    assert sum(recorder.log.count("record 0") for recorder in recorders) <= 1


def test_a_number_is_in_double_precision_where_the_model_is(recorders):
    step = fl.pipeline(fl.scheduled(beta=lambda i, total: 1 / 3), fl.cuda_graph(warmup=1))(loss_fn)
    assert fit(step, toy(), [ONE]).model.w.item() == torch.tensor(-1 / 3).item()
    state = toy()
    state.model.double()
    assert fit(step, state, [ONE.double()]).model.w.item() == -1 / 3


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_compiled_again_for_another_number(before):
    seen = []
    backend = lambda graph, inputs: seen.append(graph) or graph.forward
    compiled = fl.compiled(backend=backend)
    members = (share, compiled) if before else (compiled, share)
    state = fit(fl.pipeline(*members)(loss_fn), toy(), [ONE] * 4)
    assert (state.model.w.item(), len(seen)) == (-1.5, 1)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: fl.scheduled(), r"expects names and functions: scheduled\(beta="),
    (lambda: fl.Middleware("a", passes="beta"), "expects passes as a tuple of names"),
    (lambda: fl.Middleware("a", adds=["x"]), "expects adds as a tuple of names"),
    (lambda: fl.Middleware("a", monitors=1), "expects monitors as the name of a metric"),
    (lambda: fl.scheduled(beta=lambda: 1.0), r"takes \(\)"),
    (lambda: fl.pipeline(share)(lambda model, batch: 0), r"takes \(model, batch, \*, beta\), but"),
    (lambda: fl.pipeline()(lambda m, b, *, beta: 0), r"takes \(model, batch\), but"),
    (lambda: fl.pipeline(share, fl.scheduled(beta=len, a=len))(loss_fn), "pass 'beta'"),
])  # fmt: skip
def test_what_cannot_be_is_refused_when_composing(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(("fn", "message"), [
    (lambda i, total: "a", r"scheduled\(<lambda>\) must return a number; at step 0 of 1 it "),
    (lambda i, total: 1 / total, "length"),
])  # fmt: skip
def test_what_is_not_a_number_is_an_error_of_the_update(fn, message):
    loader = iter([ONE])  # of no length
    with pytest.raises((TypeError, ValueError), match=message):
        fit(fl.pipeline(fl.scheduled(beta=fn))(loss_fn), toy(), [ONE] if "1" in message else loader)
