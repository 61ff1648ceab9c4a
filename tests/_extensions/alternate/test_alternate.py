"""Whole steps in turn, each with an optimizer of its own."""

import gc
import pickle
import weakref

import attrs
import pytest
import torch
from after_steps import after, skipping
from sample_middleware import counted
from torch import nn
from toy_runs import ONE, noting, xs

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy, toy_loss


def weights_d_and_g():
    """Two weights; the gradients of the losses below can be computed in the head."""
    return nn.ParameterDict({"d": torch.tensor(0.0), "g": torch.tensor(0.0)})


def two(d=1.0, g=1.0):
    model = weights_d_and_g()
    optimizers = {"d": torch.optim.SGD([model.d], lr=d), "g": torch.optim.SGD([model.g], lr=g)}
    return fl.TrainState.create(model, optimizers, seed=0)


def d_loss(model, x):
    """Its gradient for d is the mean of x, and for g too."""
    return ((model.d + model.g) * x).mean()


def g_loss(model, x):
    """Its gradient for g is d, as it is after the turns before."""
    return (model.g * model.d * torch.ones_like(x)).mean()


def alternating(*middleware, d=(), g=(), d_loss=d_loss, g_loss=g_loss, **settings):
    steps = {"d": fl.pipeline(*d)(d_loss), "g": fl.pipeline(*g)(g_loss)}
    step = fl.alternate(steps, **settings)
    return fl.pipeline(*middleware)(step) if middleware else step


def fit(step, loaders, state=None, **settings):
    state = two() if state is None else state
    return fl.fit(step, state, loaders, **{"hooks": (), **settings})


def weights(state):
    return state.model.d.item(), state.model.g.item()


# --- numbers


def test_each_turn_updates_with_its_own_optimizer_after_those_before():
    state, out = alternating()(two(), torch.tensor([3.0]))
    assert weights(state) == (-3.0, 3.0)  # d: 0 - 3; g: 0 - (-3)
    assert (state.step, dict(state.updates), state.skipped) == (1, {"d": 1, "g": 1}, 0)
    assert (out.metrics["d/loss"].compute(), out.metrics["g/loss"].compute()) == (0.0, 0.0)
    state, out = alternating()(state, torch.tensor([1.0]))
    assert weights(state) == (-4.0, 7.0)
    assert (out.metrics["d/loss"].compute(), out.metrics["g/loss"].compute()) == (0.0, -12.0)
    assert (out.loss.item(), out.weight) == (-6.0, 2)  # the mean over the items of both turns


def counts(found):
    """Return a schedule that notes what it is asked for."""
    return fl.schedule(lambda i, total: found.append((i, total)) or 1.0)


@pytest.mark.parametrize("order", [("d", "g"), ("d", "d", "d", "g")], ids=len)
def test_a_schedule_counts_the_updates_of_its_own_optimizer(order):
    factors, total = [], 4 * (len(order) - 1)
    fit(alternating(d=(counts(factors),), order=order), xs(1, 2), epochs=2)
    assert factors == [(i, total) for i in range(total)]
    factors.clear()  # a run without a length, but with steps
    fit(alternating(d=(counts(factors),), order=order), lambda: iter(xs(1, 2)), steps=2)
    assert factors == [(i, total // 2) for i in range(total // 2)]


def test_the_next_batch_goes_to_the_next_turn_and_no_round_crosses_the_end_of_an_epoch():
    seen = []

    def noted(name, loss_fn):
        return lambda model, x: seen.append((name, x.item())) or loss_fn(model, x)

    rates = (fl.schedule(lambda i, total: (i + 1) / total),)
    losses = {"d_loss": noted("d", d_loss), "g_loss": noted("g", g_loss)}
    step = alternating(d=rates, g=rates, order=("d", "d", "g"), batch="next", **losses)
    note, run = noting(lambda state: (state.step, state.batch, dict(state.updates)))
    state = fit(step, xs(1, 2, 3, 4, 5), epochs=2, hooks=(note,))
    assert seen == [("d", 1.0), ("d", 2.0), ("g", 3.0), ("d", 4.0), ("d", 5.0)] * 2
    assert run == [
        *((1, 3, {"d": 2, "g": 1}), (2, 0, {"d": 4, "g": 1})),
        *((3, 3, {"d": 6, "g": 2}), (4, 0, {"d": 8, "g": 2})),
    ]
    # The last updates of both are those that the schedules planned for: 8 and 2.
    assert state.history["train/lr/d"][-1] == state.history["train/lr/g"][-1] == 1.0


def test_windows_of_a_step_are_its_batches_of_a_round():
    """Gradients of d: the mean of two batches. Of g: d, once per round."""
    step = alternating(d=(fl.accumulate(2),), order=("d", "g"), batch="next")
    state = fit(step, xs(1, 3, 9, 5))
    assert step.window == 3
    assert weights(state) == (-7.0, 2.0)  # d: -2, then -5 by a short window; g: -(-2)
    assert dict(state.updates) == {"d": 2, "g": 1}
    step = alternating(d=(fl.accumulate(2),), g=(fl.accumulate(2),))
    assert weights(fit(step, xs(1, 3, 5))) == (-7.0, 9.0)


# --- gradients


def test_only_the_parameters_of_the_turn_need_gradients_and_others_do_not_leak():
    flags = []

    def watched(loss_fn):
        def watching(model, x):
            flags.append((model.d.requires_grad, model.g.requires_grad))
            assert model.d.grad is model.g.grad is None
            return loss_fn(model, x)

        return watching

    state = two()
    state.model.d.grad, state.model.g.grad = torch.tensor(7.0), torch.tensor(7.0)
    step = alternating(d_loss=watched(d_loss), g_loss=watched(g_loss))
    fit(step, (xs(1), xs(1)), state)
    assert flags == [(True, False), (False, True), (True, True), (True, True)]
    assert_flags_are_as_before(state.model)


def assert_flags_are_as_before(model):
    assert model.d.requires_grad and model.g.requires_grad
    assert model.d.grad is model.g.grad is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("turn", ["d_loss", "g_loss"])
def test_flags_are_restored_when_a_turn_raises(error, turn):
    def fails(model, x):
        raise error("no")

    state = two()
    with pytest.raises(error):
        alternating(**{turn: fails})(state, ONE)
    assert_flags_are_as_before(state.model)


def test_a_loss_without_the_parameters_of_its_turn_says_so():
    with pytest.raises(ValueError, match="the loss has no gradient") as caught:
        fit(alternating(g_loss=lambda model, x: model.d * x.mean()), xs(1))
    said = "in the turn of g only the parameters of its optimizer need gradients"
    assert said in "".join(caught.value.__notes__)


def test_what_is_frozen_and_has_no_turn_stays_as_it_is(caplog):
    state = two()
    state.model.g.requires_grad_(False)
    state = fit(fl.alternate({"d": fl.pipeline()(d_loss)}), xs(1), state)
    assert not state.model.g.requires_grad and state.model.d.requires_grad
    assert weights(state) == (-1.0, 0.0)
    assert "these optimizers have no turn, so their parameters stay as they are: g" in caplog.text


# --- failures


def test_a_failure_in_the_first_turn_loses_nothing():
    fails = lambda model, x: d_loss(model, x) if x.item() != 2 else 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        fit(alternating(d_loss=fails), xs(1, 2, 3))
    state = caught.value.state
    assert (state.step, state.batch, weights(state)) == (1, 1, (-1.0, 1.0))
    assert fit(alternating(), xs(1, 2, 3), state, epochs=1).step == 3


def test_a_failure_after_another_turn_has_updated_leaves_no_state_to_continue_from():
    def fails(model, x):
        raise ValueError("a bad batch")

    state = two()
    with pytest.raises(ValueError, match="a bad batch") as caught:
        fit(alternating(g_loss=fails, g=(fl.clip(1.0),)), xs(1), state)
    assert not hasattr(caught.value, "state")
    with pytest.raises(fl.StaleStateError, match="half-way"):
        fl.evaluate(alternating(), state, xs(1))


def fails_in(training):
    """Return a loss function that fails in training, or in evaluation."""

    def fails(model, x):
        return g_loss(model, x) if model.training != training else 1 / 0

    return alternating(g_loss=fails)


@fl.middleware("gradient")
def broken():
    return lambda step: lambda state, batch: (step(state, batch), 1 / 0)


@pytest.mark.parametrize(("run", "where"), [
    (lambda: fit(fails_in(True), xs(1)),
     "while in g, the loss function fails, train, epoch 1, batch 0, step 0"),
    (lambda: fit(alternating(g=(broken(),)), xs(1)), "while in g, broken(), train"),
    (lambda: fit(fails_in(False), (xs(1), xs(1))), "while in g, the loss function fails, valid"),
    (lambda: fl.evaluate(fails_in(False), two(), xs(1)),
     "while in g, the loss function fails, evaluate, batch 0"),
])  # fmt: skip
def test_what_failed_is_named_with_its_turn_and_no_frame_of_fnloop_is_shown(run, where):
    with pytest.raises(ZeroDivisionError) as caught:
        run()
    assert where in "".join(caught.value.__notes__)
    shown = [entry for entry in caught.traceback if "__tracebackhide__" not in entry.locals]
    assert [entry.name for entry in shown if "/fnloop/_" in str(entry.path)] == []


# --- skipped updates


def test_a_skipped_update_is_that_of_its_turn():
    from_two, three = (skipping(lambda x, out, n=n: x.item() >= n) for n in (2, 3))
    state = fit(alternating(d=(from_two,), g=(three,)), xs(1, 2, 3))
    assert weights(state) == (-1.0, 2.0)  # d: the first alone; g: the first two
    assert (state.step, state.skipped, dict(state.updates)) == (2, 1, {"d": 1, "g": 2})
    assert state.history["train/d/loss"] == (0.0,)  # of the applied update alone


def test_an_overflow_in_fp16_skips_its_turn_and_halves_its_scale_alone():
    amps = {"d": (fl.amp("fp16", init_scale=4.0),), "g": (fl.amp("fp16", init_scale=8.0),)}
    step = alternating(**amps, g_loss=lambda model, x: g_loss(model, x) + model.g * 1e38)
    state, out = step(two(), ONE)
    assert (state.slots["d/amp"].scale, state.slots["g/amp"].scale) == (4.0, 4.0)
    assert (dict(state.updates), state.step, out.skip) == ({"d": 1, "g": 0}, 1, None)
    assert state.slots["d/amp"].streak == 1


# --- evaluation and records


def test_each_name_is_evaluated_or_those_that_are_named():
    valid = [torch.tensor([2.0, 2.0])]
    stop = fl.early_stop("valid/g/loss", patience=1, mode="max")
    state = fit(alternating(), (xs(1), valid), hooks=(stop,))  # d = -1, g = 1
    found = {k: v for k, v in state.history[-1].metrics.items() if k.startswith("valid")}
    assert found == {"valid/loss": -0.5, "valid/d/loss": 0.0, "valid/g/loss": -1.0}
    for given in ("g", ("g",)):
        assert fl.evaluate(alternating(evaluate=given), state, valid) == {
            "loss": -1.0, "g/loss": -1.0,
        }  # fmt: skip
    out = alternating(evaluate="g").evaluate(state, torch.ones(2))
    assert (out.loss.item(), out.weight, [*out.aux], state.step) == (-1.0, 2, ["g"], 1)


def with_output(model, x):
    return d_loss(model, x), {"output": x}


MEAN = fl.metric(mean=lambda aux, batch: aux["output"].mean())


def test_metrics_numbers_and_outputs_of_a_turn_have_its_name():
    seen, names = [], ("d/mean", "d/double", "sum")
    look = fl.inspect(lambda state, outputs: seen.extend(o.aux["d"]["output"] for o in outputs))
    double = fl.derive(double=lambda numbers: 2 * numbers["mean"])
    around = fl.derive(sum=lambda numbers: numbers["d/mean"] + 1)
    step = alternating(around, d=(MEAN, double), d_loss=with_output)
    settings = {"record_every": fl.every(steps=1), "hooks": (look,)}
    state = fit(step, (xs(1, 3), xs(5)), **settings)
    assert [state.history.latest(f"train/{name}") for name in names] == [2.0, 4.0, 3.0]
    assert [state.history.latest(f"valid/{name}") for name in names] == [5.0, 10.0, 6.0]
    assert [x.item() for x in seen] == [5.0]
    assert state.history["recent/g/loss"] == (0.0, -4.0)  # g × d: 0 × -1, 1 × -4


@pytest.mark.parametrize(("member", "said"), [
    (fl.derive(x=lambda numbers: numbers["lost"]), "has the metric 'd/lost'"),
    (fl.metric(x=lambda aux, batch: batch.mean(), loaders=("test",)), "no loader 'test'"),
], ids=repr)  # fmt: skip
def test_a_number_of_a_turn_that_there_is_not_is_named(member, said):
    with pytest.raises(KeyError, match=said):
        fit(alternating(d=(member,)), (xs(1), xs(1)))


def test_statistics_of_a_generator_are_recomputed_by_its_own_forward():
    model = nn.ModuleDict({"d": nn.Linear(1, 1), "g": nn.BatchNorm1d(1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters()) for name in "dg"}
    state = fl.TrainState.create(model, optimizers)
    steps = {
        "d": fl.pipeline()(lambda model, x: model["d"](model["g"](x + 7)).mean()),
        "g": fl.pipeline()(lambda model, x: model["g"](x).mean()),
    }
    step = fl.pipeline(fl.ema(0.5))(fl.alternate(steps, evaluate="g"))
    data = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])]
    state = fl.fit(step, state, data, hooks=())
    state = fl.update_batchnorm(step, fl.averaged(state), data)
    assert state.model["g"].running_mean.item() == 3.0  # of 1 and 5


# --- middleware around


def test_an_average_around_counts_rounds_and_is_evaluated_of_each_name():
    state = fit(alternating(fl.ema(0.5)), (xs(1, 1), xs(1)))
    assert weights(state) == (-2.0, 3.0)
    found = fl.averaged(state)
    assert weights(found) == (-1.25, 1.75)  # (0 + -1) / 2, then (-0.5 + -2) / 2; 0, 1, 3
    assert state.history.latest("valid/g/loss") == -6.0
    for loss in (
        state.history.latest("valid/ema/g/loss"),
        fl.evaluate(alternating(), found, xs(1))["g/loss"],
    ):
        assert loss == pytest.approx(-1.25 * 1.75)
    state = fit(alternating(fl.ema(0.5, name="d", evaluate=False)), xs(1))
    assert state.slots["d"]["d"].item() == -0.5


def halve(optimizer, run):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_middleware_around_acts_once_per_round():
    calls = []
    clamped = after("update", lambda state, x, out: state.model.d.data.clamp_(-0.5, 0.5))
    rate = fl.schedule(schedules.linear(), only="d")
    step = alternating(counted(calls), clamped, rate, g=(LINEAR,), order=("d", "d", "g"))
    state = fit(step, xs(1, 1))
    assert (calls, state.model.d.item()) == ([0, 1], -0.5)
    assert state.history["train/lr/d"] == state.history["train/lr/g"] == (0.5,)


def test_middleware_around_that_does_not_call_the_round_is_found():
    forgets = lambda step: lambda state, batch: (state, fl.Output(torch.zeros(()), 1))
    with pytest.raises(ValueError, match="did not call the step that it wraps"):
        fit(alternating(fl.Middleware("forgets", step=forgets)), xs(1))


def test_precision_is_that_of_the_steps_or_else_that_of_accelerate():
    plain, state = fl.pipeline()(toy_loss), toy()
    state = attrs.evolve(state, backend=attrs.evolve(state.backend, precision="fp16"))
    assert (plain.precision_in(toy()), plain.precision_in(state)) == (None, "fp16")
    bf16 = (fl.amp("bf16"),)
    for members, found in (({}, None), ({"d": bf16, "g": bf16}, "bf16"), ({"g": bf16}, "bf16")):
        assert alternating(**members).precision_in(two()) == found


# --- other steps in a turn


def test_a_raw_step_takes_turns_too():
    def descend(state, batch):
        loss = g_loss(state.model, batch)
        loss.backward()
        state.optimizer.step()
        return fl.Output(loss, weight=len(batch))

    steps = {"d": fl.pipeline()(d_loss), "g": fl.raw(descend, evaluate=g_loss)}
    loaders = xs(1, 2), xs(1)
    one = fit(alternating(), loaders, epochs=2)
    assert_same(fit(fl.alternate(steps), loaders, epochs=2), one)
    steps["g"] = fl.raw(descend)
    with pytest.raises(ValueError, match=r"cannot evaluate a loader: write raw\(descend, evalu"):
        fit(fl.alternate(steps), loaders)
    assert fit(fl.alternate(steps, evaluate="d"), loaders).step == 2


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        for _ in range(2):
            closure()
            super().step()


def test_a_closure_in_a_turn_is_given_to_its_optimizer():
    model = weights_d_and_g()
    optimizers = {"d": Twice([model.d], lr=1.0), "g": torch.optim.SGD([model.g], lr=1.0)}
    state = fl.TrainState.create(model, optimizers)
    state, _ = alternating(d=(fl.closure(),))(state, torch.tensor([3.0]))
    assert weights(state) == (-6.0, 6.0)


@pytest.mark.slow  # compiles
def test_schedules_of_torch_and_compiled_losses_work_in_turns():
    inside = fl.torch_scheduler(halve), fl.compiled(backend="eager")
    state = fit(alternating(d=inside), xs(1, 1))
    assert (state.model.d.item(), state.history["train/lr/d"]) == (-1.5, (0.5,))


# --- states


def test_a_step_keeps_no_state_alive():
    step = alternating()
    state, _ = step(two(), ONE)
    model = weakref.ref(state.model)
    del state
    gc.collect()
    assert model() is None


def test_parameters_that_are_added_between_runs_are_trained():
    state = fit(alternating(), xs(1))
    state.model.d2 = nn.Parameter(torch.tensor(0.0))
    state.optimizer["d"].add_param_group({"params": [state.model.d2], "lr": 1.0})
    step = alternating(d_loss=lambda model, x: ((model.d + model.d2) * x).mean())
    assert fit(step, xs(1), state).model.d2.item() == -1.0


# --- what is refused


PLAIN, LINEAR = fl.pipeline()(d_loss), fl.schedule(schedules.linear())
AROUND = [  # that would be ignored, or set a rate twice
    (fl.clip(1.0), r"clip\(1.0\) acts in the gradient ring, but each of the steps d, g"),
    (fl.accumulate(2), "acts in the gradient ring"), (fl.amp("bf16"), "acts in the forward ring"),
    *((member, "replaces the loss function") for member in (fl.compiled(), fl.tbptt(2))),
    (MEAN, 'on="evaluation"'), (fl.cuda_graph(), "acts in the device ring"),
    (fl.closure(), "says how the optimizer is called"), (fl.throughput(), "acts in the loss ring"),
    (fl.ema(0.5, name="d"), r"name='d'\) has the name of a step, .* one, name="),
    (LINEAR, "both set lr of one optimizer: name others.*only="),
    (fl.schedule(schedules.linear(), only="d"), "both set lr of one optimizer"),
    (fl.torch_scheduler(halve, only="d"), "both set lr of one optimizer"),
]  # fmt: skip
INSIDE = [
    (fl.tbptt(2), "several updates in one turn"),
    (fl.cuda_graph(), "would capture which parameters need gradients"),
    (fl.ema(0.9), r"list it around all turns, pipeline\(ema\(0.9\)\)\(alternate"),
    (fl.swa(evaluate=False), "list it around all turns"),
    (fl.accumulate({0: 2, 1: 4}), "changes its window with the epoch"),
    (fl.accumulate(total=4), "changes its window with the number of processes: write"),
    (fl.spike_guard(then="back"), "spike_guard.*goes back with the whole model"),
]


def takes_turns(member):
    return fl.alternate({"d": fl.pipeline(member)(lambda model, batch, carry=None: model.d)})


@pytest.mark.parametrize(("make", "error", "message"), [
    *((lambda m=m: alternating(m, d=(LINEAR,)), ValueError, said) for m, said in AROUND),
    *((lambda m=m: takes_turns(m), ValueError, said) for m, said in INSIDE),
    (lambda: fl.alternate({"d": d_loss}), TypeError, "got .*d_loss.* under 'd'"),
    (lambda: fl.alternate({"d": fl.pipeline()}), TypeError, "expects steps"),
    (lambda: fl.alternate({"a/b": PLAIN}), ValueError, 'names without "/"'),
    (lambda: fl.alternate({"recent": PLAIN}), ValueError, '"recent"'),
    (lambda: alternating(order="dg"), TypeError, "order as names of steps"),
    (lambda: alternating(order=("d", "e")), ValueError, "which are d, g; got 'e'"),
    (lambda: alternating(order=("d", "d")), ValueError, "leaves out g"),
    (lambda: alternating(batch={"d": "next"}), ValueError, 'lacks g: .*, "g": "..."}'),
    (lambda: alternating(batch={"e": "next"}), ValueError, "which are d, g; got 'e'"),
    (lambda: alternating(batch={"d": "next", "g": "last"}), ValueError,
     r"batch\['g'\] as one of \"same\", \"next\", \"late\"; got 'last'"),
    (lambda: alternating(evaluate="e"), ValueError, "evaluate as names of steps"),
    (lambda: fl.alternate({"d": alternating()}), ValueError, "in one alternate"),
    (lambda: alternating(d=(fl.accumulate(2),)), ValueError, 'd takes 2 and g takes 1.*"next"'),
])  # fmt: skip
def test_what_cannot_be_composed_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("call", [
    lambda state: fit(alternating(), xs(1), state), lambda state: alternating()(state, ONE),
    lambda state: fl.evaluate(alternating(), state, xs(1)),
])  # fmt: skip
def test_an_optimizer_that_is_missing_is_named_when_a_run_starts(call):
    model = weights_d_and_g()
    optimizers = {"d": torch.optim.SGD([model.d]), "e": torch.optim.SGD([model.g])}
    with pytest.raises(ValueError, match=r"a step for g, but the state has d, e.*'g': \.\.\."):
        call(fl.TrainState.create(model, optimizers))
    with pytest.raises(ValueError, match="one optimizer, without a name"):
        call(toy())


NEXT_AND_SAME = {"d": "next", "g": "same"}


@pytest.mark.parametrize(("order", "batch", "d", "g"), [
    ("ddg", NEXT_AND_SAME, [1, 2, 3, 4, 5], [2, 4]),
    ("gdd", NEXT_AND_SAME, [2, 3, 5], [1, 4]),  # the first turn of a round takes a new one
    ("dgg", NEXT_AND_SAME, [1, 2, 3, 4, 5], [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    ("dgdg", {"d": "same", "g": "next"}, [1, 2, 4, 5], [2, 3, 5]),
    ("dg", {"d": "same", "g": "same"}, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
    ("dg", {"d": "next", "g": "next"}, [1, 3, 5], [2, 4]),
])  # fmt: skip
def test_a_turn_takes_the_next_batch_or_that_of_the_turn_before(order, batch, d, g):
    """Rounds of five batches; in the last one, turns without a batch are left out."""
    taken = {"d": [], "g": []}
    losses = {
        f"{name}_loss": lambda model, x, name=name: (
            taken[name].append(int(x)) or model.d * 0 + model.g * 0
        )
        for name in "dg"
    }
    fit(alternating(order=(*order,), batch=batch, **losses), xs(1, 2, 3, 4, 5))
    assert taken == {"d": d, "g": g}


def test_a_turn_of_the_same_window_and_its_repr():
    two_each = {"d": [fl.accumulate(2)], "g": [fl.accumulate(2)]}
    step = alternating(**two_each, batch=NEXT_AND_SAME, order=("d", "d", "g"))
    assert step.window == 4 and "batch={'d': 'next', 'g': 'same'}" in repr(step)
    with pytest.raises(ValueError, match="but d takes 2 and g takes 1: list the same accumulate"):
        alternating(d=[fl.accumulate(2)], batch=NEXT_AND_SAME)
    # A turn of the next batches may have any window.
    assert alternating(d=[fl.accumulate(2)], batch={"d": "same", "g": "next"}).window == 3


def test_a_round_of_the_next_batches_takes_a_sequence_of_them():
    step = alternating(batch="next")
    with pytest.raises(ValueError, match="a list or a tuple of 1 to 2 batches; got"):
        step(two(), ONE)
    with pytest.raises(ValueError, match="1 to 2 batches; got 3"):
        step(two(), xs(1, 2, 3))
    state, _ = step(two(), xs(3, 1))
    assert (weights(state), state.batch) == ((-3.0, 3.0), 2)


# --- how it shows


def test_its_repr_is_what_was_typed_and_it_can_be_pickled():
    step = alternating(order=("d", "d", "g"), batch="next", evaluate="g")
    typed = "alternate({'d': pipeline()(d_loss), 'g': pipeline()(g_loss)}, "
    typed += "order=('d', 'd', 'g'), batch='next', evaluate='g')"
    around = fl.pipeline(fl.ema(0.9))(step)
    for made, shown in ((step, typed), (around, f"pipeline(ema(0.9))({typed})")):
        assert repr(made) == repr(pickle.loads(pickle.dumps(made))) == shown
    assert repr(alternating()) == typed.partition(", order")[0] + ")"
    assert str(step).startswith("in turn: 2 × d, g\nd:\n┌ update")
    assert "in turn: 2 × d, g" in step._repr_html_()
    assert str(around).startswith("in turn: 2 × d, g; around: ema(0.9)\nd:\n")
    assert fit(pickle.loads(pickle.dumps(around)), xs(1, 2)).step == 1


def test_a_schedule_in_a_turn_counts_from_where_the_phase_began():
    seen = {"d": [], "g": []}
    step = alternating(d=(counts(seen["d"]),), g=(counts(seen["g"]),), order=("d", "d", "g"))
    state = fit(step, xs(1, 1), steps=1, phase="a")
    state = fit(step, xs(1, 1), state, epochs=2, phase="b")
    assert seen["d"] == [(0, 2), (1, 2), *((i, 8) for i in range(8))]
    assert seen["g"] == [(0, 1), *((i, 4) for i in range(4))]
    assert (state.step, dict(state.updates)) == (5, {"d": 10, "g": 5})
