"""Whole steps in turn, each with an optimizer of its own."""

import pickle

import attrs
import pytest
import torch
from sample_middleware import counted
from torch import nn

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy


class Two(nn.Module):
    """Two weights; the gradients of the losses below can be computed in the head."""

    def __init__(self):
        super().__init__()
        self.d = nn.Parameter(torch.tensor(0.0))
        self.g = nn.Parameter(torch.tensor(0.0))


def two(d=1.0, g=1.0, **others):
    model = Two()
    optimizers = {
        "d": torch.optim.SGD([model.d], lr=d),
        "g": torch.optim.SGD([model.g], lr=g),
        **others,
    }
    return fl.TrainState.create(model, optimizers, seed=0)


def d_loss(model, x):
    """Its gradient for d is the mean of x, and for g too."""
    return ((model.d + model.g) * x).mean()


def g_loss(model, x):
    """Its gradient for g is d, as it is after the turns before."""
    return (model.g * model.d * torch.ones_like(x)).mean()


def alternating(*middleware, d=(), g=(), **settings):
    steps = {"d": fl.pipeline(*d)(d_loss), "g": fl.pipeline(*g)(g_loss)}
    step = fl.alternate(steps, **settings)
    return fl.pipeline(*middleware)(step) if middleware else step


def weights(state):
    return state.model.d.item(), state.model.g.item()


def batches(*values):
    return [torch.tensor([float(v)]) for v in values]


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


def test_a_run_equals_the_loop_by_hand_bit_for_bit():
    data = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(7)]
    clipped = fl.clip(0.5)
    step = alternating(d=(clipped,), g=(fl.schedule(schedules.linear()),), order=("d", "d", "g"))
    state = fl.fit(step, two(0.3, 0.7), data, epochs=2, hooks=())
    model = Two()
    d, g = torch.optim.SGD([model.d], lr=0.3), torch.optim.SGD([model.g], lr=0.7)
    losses = []
    for epoch in range(2):
        for i, x in enumerate(data):
            for _ in range(2):
                d.zero_grad()
                loss = d_loss(model, x)
                loss.backward()
                nn.utils.clip_grad_norm_([model.d], 0.5)
                d.step()
                losses.append(loss.item())
            g.param_groups[0]["lr"] = 0.7 * (1 - (7 * epoch + i) / 14)
            g.zero_grad()
            g_loss(model, x).backward()
            g.step()
    assert weights(state) == (model.d.item(), model.g.item())
    assert dict(state.updates) == {"d": 28, "g": 14}
    means = [sum(losses[:14]) / 14, sum(losses[14:]) / 14]
    assert state.history["train/d/loss"] == pytest.approx(means, rel=1e-12)
    assert state.history["train/lr/g"] == pytest.approx([0.7 * (1 - i / 14) for i in (6, 13)])
    assert state.history["train/lr/d"] == (0.3, 0.3)
    assert "train/d/grad_norm" in state.history[-1].metrics


@pytest.mark.parametrize("order", [("d", "g"), ("d", "d", "d", "g")], ids=len)
def test_a_schedule_counts_the_updates_of_its_own_optimizer(order):
    factors = []

    def linear(i, total):
        factors.append((i, total))
        return 1.0

    step = alternating(d=(fl.schedule(linear),), order=order)
    fl.fit(step, two(), batches(1, 2), epochs=2, hooks=())
    total = 4 * (len(order) - 1)
    assert factors == [(i, total) for i in range(total)]


def test_the_next_batch_goes_to_the_next_turn_and_no_round_crosses_the_end_of_an_epoch():
    seen = []

    def noted(name, loss_fn):
        def noting(model, x):
            seen.append((name, x.item()))
            return loss_fn(model, x)

        return fl.pipeline(fl.schedule(lambda i, total: (i + 1) / total))(noting)

    steps = {"d": noted("d", d_loss), "g": noted("g", g_loss)}
    step = fl.alternate(steps, order=("d", "d", "g"), batch="next")
    run = []

    def note(state):
        run.append((state.step, state.batch, dict(state.updates)))
        return state

    state = fl.fit(step, two(), batches(1, 2, 3, 4, 5), epochs=2, hooks=(note,))
    epoch = [("d", 1.0), ("d", 2.0), ("g", 3.0), ("d", 4.0), ("d", 5.0)]
    assert seen == epoch * 2
    assert run == [
        (1, 3, {"d": 2, "g": 1}),
        (2, 0, {"d": 4, "g": 1}),
        (3, 3, {"d": 6, "g": 2}),
        (4, 0, {"d": 8, "g": 2}),
    ]
    # The last updates of both are those that the schedules planned for: 8 and 2.
    assert state.history["train/lr/d"][-1] == state.history["train/lr/g"][-1] == 1.0


def test_windows_of_a_step_are_its_batches_of_a_round():
    """Gradients of d: the mean of two batches. Of g: d, once per round."""
    step = alternating(d=(fl.accumulate(2),), order=("d", "g"), batch="next")
    assert step.window == 3
    state = fl.fit(step, two(), batches(1, 3, 9, 5), hooks=())
    assert weights(state) == (-7.0, 2.0)  # d: -2, then -5 by a short window; g: -(-2)
    assert dict(state.updates) == {"d": 2, "g": 1}
    step = alternating(d=(fl.accumulate(2),), g=(fl.accumulate(2),))
    state = fl.fit(step, two(), batches(1, 3, 5), hooks=())
    assert weights(state) == (-7.0, 9.0)


def test_what_a_run_without_a_length_knows_of_its_turns():
    found = []

    def factor(i, total):
        found.append(total)
        return 1.0

    step = alternating(d=(fl.schedule(factor),), order=("d", "d", "g"))
    fl.fit(step, two(), lambda: iter(batches(1, 2)), steps=2, hooks=())
    assert found == [4] * 4


def test_the_first_weights_of_a_turn_may_come_from_another_step():
    """Updates of a plain step count for each optimizer."""
    state, _ = fl.pipeline()(d_loss)(two(), torch.tensor([1.0]))
    assert weights(state) == (-1.0, -1.0)
    state, _ = alternating(order=("d", "d", "g"))(state, torch.tensor([1.0]))
    assert (state.step, dict(state.updates)) == (2, {"d": 3, "g": 2})


# --- gradients


def test_only_the_parameters_of_the_turn_need_gradients_and_others_do_not_leak():
    flags = []

    def watched(loss_fn):
        def watching(model, x):
            flags.append((model.d.requires_grad, model.g.requires_grad))
            assert model.d.grad is model.g.grad is None
            return loss_fn(model, x)

        return fl.pipeline()(watching)

    state = two()
    state.model.d.grad, state.model.g.grad = torch.tensor(7.0), torch.tensor(7.0)
    step = fl.alternate({"d": watched(d_loss), "g": watched(g_loss)})
    state = fl.fit(step, state, (batches(1), batches(1)), hooks=())
    assert flags == [(True, False), (False, True), (True, True), (True, True)]
    assert state.model.d.requires_grad and state.model.g.requires_grad
    assert state.model.d.grad is state.model.g.grad is None


def test_what_is_frozen_stays_frozen():
    state = two()
    state.model.g.requires_grad_(False)
    steps = {"d": fl.pipeline()(d_loss)}
    state, _ = fl.alternate(steps)(state, torch.tensor([1.0]))
    assert not state.model.g.requires_grad and state.model.d.requires_grad
    assert weights(state) == (-1.0, 0.0)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_flags_are_restored_when_a_turn_raises(error):
    def fails(model, x):
        raise error("no")

    for steps in ({"d": d_loss, "g": fails}, {"d": fails, "g": g_loss}):
        state = two()
        step = fl.alternate({k: fl.pipeline()(v) for k, v in steps.items()})
        with pytest.raises(error):
            step(state, torch.ones(1))
        assert state.model.d.requires_grad and state.model.g.requires_grad
        assert state.model.d.grad is state.model.g.grad is None


def test_a_loss_without_the_parameters_of_its_turn_says_so():
    def detached(model, x):
        return model.d * x.mean()

    step = fl.alternate({"d": fl.pipeline()(d_loss), "g": fl.pipeline()(detached)})
    with pytest.raises(ValueError, match="the loss has no gradient") as caught:
        fl.fit(step, two(), batches(1), hooks=())
    notes = "".join(caught.value.__notes__)
    assert "in the turn of g only the parameters of its optimizer need gradients" in notes


# --- failures


def test_a_failure_in_the_first_turn_loses_nothing():
    def fails(model, x):
        if x.item() == 2:
            raise ValueError("a bad batch")
        return d_loss(model, x)

    step = fl.alternate({"d": fl.pipeline()(fails), "g": fl.pipeline()(g_loss)})
    with pytest.raises(ValueError, match="a bad batch") as caught:
        fl.fit(step, two(), batches(1, 2, 3), hooks=())
    state = caught.value.state
    assert (state.step, state.batch, weights(state)) == (1, 1, (-1.0, 1.0))
    state = fl.fit(alternating(), state, batches(1, 2, 3), epochs=1, hooks=())
    assert state.step == 3


def test_a_failure_after_another_turn_has_updated_leaves_no_state_to_continue_from():
    def fails(model, x):
        raise ValueError("a bad batch")

    state = two()
    step = fl.alternate({"d": fl.pipeline()(d_loss), "g": fl.pipeline(fl.clip(1.0))(fails)})
    with pytest.raises(ValueError, match="a bad batch") as caught:
        fl.fit(step, state, batches(1), hooks=())
    assert not hasattr(caught.value, "state")
    notes = "".join(caught.value.__notes__)
    assert "while in g, the loss function fails, train, epoch 1, batch 0, step 0" in notes
    with pytest.raises(fl.StaleStateError, match="half-way"):
        fl.evaluate(alternating(), state, batches(1))


def test_the_layer_that_failed_is_named_with_its_turn():
    @fl.middleware("gradient")
    def broken():
        def wrap(step):
            def breaking(state, batch):
                step(state, batch)
                raise RuntimeError("broken")

            return breaking

        return wrap

    step = alternating(g=(broken(),))
    with pytest.raises(RuntimeError) as caught:
        fl.fit(step, two(), batches(1), hooks=())
    assert "while in g, broken(), train" in "".join(caught.value.__notes__)


def test_an_evaluation_names_the_turn_that_failed():
    def fails(model, x):
        if not model.training:
            raise RuntimeError("only in evaluation")
        return g_loss(model, x)

    step = fl.alternate({"d": fl.pipeline()(d_loss), "g": fl.pipeline()(fails)})
    with pytest.raises(RuntimeError) as caught:
        fl.fit(step, two(), (batches(1), batches(1)), hooks=())
    assert "while in g, the loss function fails, valid" in "".join(caught.value.__notes__)
    with pytest.raises(RuntimeError) as caught:
        fl.evaluate(step, two(), batches(1))
    assert "while in g, the loss function fails, evaluate, batch 0" in caught.value.__notes__[1]


def test_a_stale_state_is_refused():
    state = two()
    step = alternating()
    step(state, torch.ones(1))
    with pytest.raises(fl.StaleStateError):
        step(state, torch.ones(1))


# --- skipped updates


def skipping(when):
    """Skip the updates of a turn by their number."""

    @fl.middleware("gradient")
    def skips():
        def wrap(step):
            def skipped(state, batch):
                state, out = step(state, batch)
                return state, attrs.evolve(out, skip="no") if when(batch.item()) else out

            return skipped

        return wrap

    return skips()


def test_a_skipped_update_is_that_of_its_turn():
    d, g = skipping(lambda x: x in (2, 3)), skipping(lambda x: x == 3)
    step = alternating(d=(d,), g=(g,))
    state = fl.fit(step, two(), batches(1, 2, 3), hooks=())
    assert weights(state) == (-1.0, 2.0)  # d: the first alone; g: the first two
    assert (state.step, state.skipped, dict(state.updates)) == (2, 1, {"d": 1, "g": 2})
    assert state.history["train/d/loss"] == (0.0,)  # of the applied update alone


def test_an_overflow_in_fp16_skips_its_turn_and_halves_its_scale_alone():
    def large(model, x):
        return g_loss(model, x) + model.g * 1e38

    d = fl.pipeline(fl.amp("fp16", init_scale=4.0))(d_loss)
    g = fl.pipeline(fl.amp("fp16", init_scale=8.0))(large)
    state, out = fl.alternate({"d": d, "g": g})(two(), torch.ones(1))
    assert (state.slots["d/amp"].scale, state.slots["g/amp"].scale) == (4.0, 4.0)
    assert (dict(state.updates), state.step, out.skip) == ({"d": 1, "g": 0}, 1, None)
    assert state.slots["d/amp"].streak == 1


# --- evaluation and records


def test_each_name_is_evaluated_or_those_that_are_named():
    state, loaders = two(), (batches(1), [torch.tensor([2.0, 2.0])])
    state = fl.fit(alternating(), state, loaders, hooks=())  # d = -1, g = 1
    valid = {k: v for k, v in state.history[-1].metrics.items() if k.startswith("valid")}
    assert valid == {"valid/loss": -0.5, "valid/d/loss": 0.0, "valid/g/loss": -1.0}
    for given in ("g", ("g",)):
        found = fl.evaluate(alternating(evaluate=given), state, [torch.tensor([2.0, 2.0])])
        assert found == {"loss": -1.0, "g/loss": -1.0}
    out = alternating(evaluate="g").evaluate(state, torch.ones(2))
    assert (out.loss.item(), out.weight, [*out.aux]) == (-1.0, 2, ["g"])
    assert state.step == 1


def test_metrics_and_numbers_of_a_turn_have_its_name():
    def output(model, x):
        return d_loss(model, x), {"output": x}

    member = fl.metric(mean=lambda aux, batch: aux["output"].mean())
    double = fl.derive(double=lambda numbers: 2 * numbers["mean"])
    steps = {"d": fl.pipeline(member, double)(output), "g": fl.pipeline()(g_loss)}
    step = fl.pipeline(fl.derive(sum=lambda numbers: numbers["d/mean"] + 1))(fl.alternate(steps))
    state = fl.fit(step, two(), (batches(1, 3), batches(5)), hooks=())
    found = state.history[-1].metrics
    assert (found["train/d/mean"], found["train/d/double"], found["train/sum"]) == (2.0, 4.0, 3.0)
    assert (found["valid/d/mean"], found["valid/d/double"], found["valid/sum"]) == (5.0, 10.0, 6.0)


def test_a_derived_number_of_a_turn_that_no_loader_has_is_named():
    double = fl.derive(double=lambda numbers: 2 * numbers["lost"])
    step = alternating(d=(double,))
    with pytest.raises(KeyError, match="no loader of this run has the metric 'd/lost'"):
        fl.fit(step, two(), (batches(1), batches(1)), hooks=())


def test_what_measures_a_step_measures_its_turns():
    d = fl.throughput(), fl.timings()
    g = fl.grad_norm(), fl.device_memory()
    state = fl.fit(alternating(fl.timings(), d=d, g=g), two(), batches(1, 1), hooks=())
    found = state.history[-1].metrics
    assert found["train/g/grad_norm"] == 1.5  # the mean of 1 and 2
    assert found["train/d/throughput/samples"] > 0 < found["train/g/memory/peak_gib"]
    assert 0 < found["train/d/time/step"] < found["train/time/step"]


def test_hooks_watch_the_losses_of_a_name():
    stop = fl.early_stop("valid/g/loss", patience=1, mode="max")
    state = fl.fit(alternating(), two(), (batches(1), batches(1)), epochs=5, hooks=(stop,))
    assert "valid/g/loss has not improved" in state.stop


def test_the_outputs_of_an_evaluation_have_the_aux_of_each_name():
    seen = []

    def output(model, x):
        return g_loss(model, x), {"picture": x * 2}

    steps = {"d": fl.pipeline()(d_loss), "g": fl.pipeline()(output)}
    look = fl.inspect(lambda state, outputs: seen.extend(o.aux["g"]["picture"] for o in outputs))
    fl.fit(fl.alternate(steps), two(), (batches(1), batches(5)), hooks=(look,))
    assert [x.item() for x in seen] == [10.0]


def test_a_metric_for_a_loader_that_is_not_there_is_refused():
    member = fl.metric(mean=lambda aux, batch: batch.mean(), loaders=("test",))
    with pytest.raises(KeyError, match="no loader 'test'"):
        fl.fit(alternating(d=(member,)), two(), batches(1), hooks=())


def test_precision_is_that_of_the_steps():
    assert alternating().precision_in(two()) is None
    assert alternating(d=(fl.amp("bf16"),), g=(fl.amp("bf16"),)).precision_in(two()) == "bf16"
    assert alternating(g=(fl.amp("bf16"),)).precision_in(two()) == "bf16"


def test_records_between_epochs_have_the_means_of_each_name():
    state = fl.fit(alternating(), two(), batches(1, 1, 1), hooks=(), record_every=fl.every(steps=1))
    recent = [r.metrics["recent/g/loss"] for r in state.history if "recent/g/loss" in r.metrics]
    assert recent == [0.0, -2.0, -9.0]  # g × d: 0 × -1, 1 × -2, 3 × -3


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


def test_a_traceback_shows_no_frame_of_fnloop():
    def fails(model, x):
        raise RuntimeError("mine")

    step = fl.alternate({"d": fl.pipeline(fl.clip(1.0))(fails), "g": fl.pipeline()(g_loss)})
    for call in (
        lambda: fl.fit(step, two(), batches(1), hooks=()),
        lambda: fl.evaluate(step, two(), batches(1)),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        shown = [entry for entry in caught.traceback if "__tracebackhide__" not in entry.locals]
        assert [entry.name for entry in shown if "/fnloop/_" in str(entry.path)] == []


# --- middleware around


def test_an_average_around_counts_rounds_and_is_evaluated_of_each_name():
    step = alternating(fl.ema(0.5))
    state = fl.fit(step, two(), (batches(1, 1), batches(1)), hooks=())
    assert weights(state) == (-2.0, 3.0)
    found = fl.averaged(state)
    assert weights(found) == (-1.25, 1.75)  # (0 + -1) / 2, then (-0.5 + -2) / 2; 0, 1, 3
    last = state.history[-1].metrics
    assert last["valid/g/loss"] == -6.0
    assert last["valid/ema/g/loss"] == pytest.approx(-1.25 * 1.75)
    assert fl.evaluate(alternating(), found, batches(1))["g/loss"] == pytest.approx(-1.25 * 1.75)


def test_middleware_around_acts_once_per_round():
    calls = []

    @fl.middleware("update")
    def clamped():
        def wrap(step):
            def clamp(state, batch):
                state, out = step(state, batch)
                with torch.no_grad():
                    state.model.d.clamp_(-0.5, 0.5)
                return state, out

            return clamp

        return wrap

    everything = fl.schedule(schedules.linear(), only="d")
    step = alternating(counted(calls), clamped(), everything, order=("d", "d", "g"))
    state = fl.fit(step, two(), batches(1, 1), hooks=())
    assert calls == [0, 1]
    assert state.model.d.item() == -0.5
    assert state.history["train/lr/d"] == (0.5,)


def test_middleware_around_that_does_not_call_the_round_is_found():
    @fl.middleware("step")
    def forgets():
        def wrap(step):
            return lambda state, batch: (state, fl.Output(torch.zeros(()), 1))

        return wrap

    with pytest.raises(ValueError, match="did not call the step that it wraps"):
        fl.fit(alternating(forgets()), two(), batches(1), hooks=())


def test_two_schedules_of_one_rate_are_found():
    linear = fl.schedule(schedules.linear())
    with pytest.raises(ValueError, match=r"both set lr of one optimizer: name others with only="):
        alternating(linear, d=(linear,))
    with pytest.raises(ValueError, match="both set lr of one optimizer"):
        alternating(fl.schedule(schedules.linear(), only="d"), d=(linear,))
    with pytest.raises(ValueError, match="both set lr of one optimizer"):
        alternating(fl.torch_scheduler(lambda optimizer, run: None, only="d"), d=(linear,))
    others = fl.schedule(schedules.linear(), only="g")
    state = fl.fit(alternating(others, d=(linear,)), two(), batches(1, 1), hooks=())
    assert state.history["train/lr/d"] == state.history["train/lr/g"] == (0.5,)


def test_an_average_around_with_the_name_of_a_step_is_refused():
    with pytest.raises(ValueError, match=r"name='d'\) has the name of a step, .* one, name="):
        alternating(fl.ema(0.5, name="d"))
    state = fl.fit(alternating(fl.ema(0.5, name="d", evaluate=False)), two(), batches(1), hooks=())
    assert state.slots["d"]["d"].item() == -0.5


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (fl.clip(1.0), r"clip\(1.0\) acts in the gradient ring, but each of the steps d, g"),
        (fl.accumulate(2), "acts in the gradient ring"),
        (fl.amp("bf16"), "acts in the forward ring"),
        (fl.compiled(), "replaces the loss function"),
        (fl.tbptt(2), "replaces the loss function"),
        (fl.metric(mean=lambda aux, batch: 0), 'on="evaluation"'),
        (fl.cuda_graph(), "acts in the device ring"),
        (fl.closure(), "says how the optimizer is called"),
        (fl.throughput(), "acts in the loss ring"),
    ],
    ids=repr,
)
def test_middleware_around_that_would_be_ignored_is_refused(member, message):
    with pytest.raises(ValueError, match=message):
        alternating(member)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (fl.tbptt(2), "several updates in one turn"),
        (fl.cuda_graph(), "would capture which parameters need gradients"),
        (fl.ema(0.9), r"list it around all turns, pipeline\(ema\(0.9\)\)\(alternate"),
        (fl.swa(evaluate=False), "list it around all turns"),
    ],
    ids=repr,
)
def test_middleware_that_cannot_be_in_a_turn_is_refused(member, message):
    def loss_fn(model, batch, carry=None):
        return model.d

    with pytest.raises(ValueError, match=message):
        fl.alternate({"d": fl.pipeline(member)(loss_fn)})


# --- other steps in a turn


def test_a_raw_step_takes_turns_too():
    def descend(state, batch):
        loss = g_loss(state.model, batch)
        loss.backward()
        state.optimizer.step()
        return fl.Output(loss, weight=len(batch))

    plain, raw = alternating(), {"d": fl.pipeline()(d_loss), "g": fl.raw(descend, evaluate=g_loss)}
    loaders = batches(1, 2), batches(1)
    one = fl.fit(plain, two(), loaders, epochs=2, hooks=())
    assert_same(fl.fit(fl.alternate(raw), two(), loaders, epochs=2, hooks=()), one)
    raw["g"] = fl.raw(descend)
    with pytest.raises(ValueError, match=r"cannot evaluate a loader: write raw\(descend, evalu"):
        fl.fit(fl.alternate(raw), two(), loaders, hooks=())
    assert fl.fit(fl.alternate(raw, evaluate="d"), two(), loaders, hooks=()).step == 2


def test_a_closure_in_a_turn_is_given_to_its_optimizer():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            for _ in range(2):
                closure()
                super().step()

    model = Two()
    optimizers = {"d": Twice([model.d], lr=1.0), "g": torch.optim.SGD([model.g], lr=1.0)}
    state = fl.TrainState.create(model, optimizers)
    state, _ = alternating(d=(fl.closure(),))(state, torch.tensor([3.0]))
    assert weights(state) == (-6.0, 6.0)


def test_sam_moves_only_the_weights_of_its_turn():
    state, _ = alternating(d=(fl.sam(0.5),))(two(), torch.tensor([3.0]))
    assert weights(state) == (-3.0, 3.0)


@pytest.mark.slow  # compiles
def test_schedules_of_torch_and_compiled_losses_work_in_turns():
    def halve(optimizer, run):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    inside = fl.torch_scheduler(halve), fl.compiled(backend="eager")
    state = fl.fit(alternating(d=inside), two(), batches(1, 1), hooks=())
    assert state.model.d.item() == -1.5
    assert state.history["train/lr/d"] == (0.5,)


# --- resumed runs


SETTINGS = [
    {"order": ("d", "d", "g")},
    {"order": ("d", "d", "g"), "batch": "next", "evaluate": "g"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("stopped_after", [1, 2, 3])
def test_a_run_is_resumed_bit_for_bit(settings, stopped_after, tmp_path):
    def new():
        model = Two()
        optimizers = {
            "d": torch.optim.AdamW([model.d], lr=0.1),
            "g": torch.optim.SGD([model.g], lr=0.1, momentum=0.9),
        }
        members = fl.amp("fp16", growth_interval=2), fl.schedule(schedules.cosine())
        step = alternating(fl.ema(0.9), d=members, g=members, **settings)
        return step, fl.TrainState.create(model, optimizers, seed=0)

    loaders = batches(*range(1, 6)), batches(1, 2)
    step, state = new()
    whole = fl.fit(step, state, loaders, epochs=2, hooks=())
    step, state = new()
    pause = fl.when(lambda state: state.step == stopped_after)(
        lambda state: attrs.evolve(state, stop="paused")
    )
    state = fl.fit(step, state, loaders, epochs=2, hooks=(pause,))
    assert state.stop == "paused"
    fl.save(state, tmp_path / "paused")
    step, state = new()
    state = attrs.evolve(fl.restore(tmp_path / "paused", state), stop=None)
    state = fl.fit(step, state, loaders, epochs=2, hooks=())
    assert_same(state, whole)


def test_a_snapshot_takes_turns_of_its_own():
    step = alternating(order=("d", "d", "g"))
    state, _ = step(two(), torch.ones(1))
    before = fl.snapshot(state)
    state, _ = step(state, torch.ones(1))
    assert weights(before) == (-2.0, 2.0)
    before, _ = step(before, torch.ones(1))
    assert weights(before) == weights(state) == (-4.0, 6.0)


def test_a_step_keeps_no_state_alive():
    import gc
    import weakref

    step, state = alternating(), two()
    state, _ = step(state, torch.ones(1))
    model = weakref.ref(state.model)
    del state
    gc.collect()
    assert model() is None


def test_parameters_that_are_added_between_runs_are_trained():
    step, state = alternating(), two()
    state = fl.fit(step, state, batches(1), hooks=())
    state.model.d2 = nn.Parameter(torch.tensor(0.0))
    state.optimizer["d"].add_param_group({"params": [state.model.d2], "lr": 1.0})
    step = fl.alternate(
        {"d": fl.pipeline()(lambda m, x: ((m.d + m.d2) * x).mean()), "g": fl.pipeline()(g_loss)}
    )
    state = fl.fit(step, state, batches(1), hooks=())
    assert state.model.d2.item() == -1.0


# --- what is refused


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.alternate([fl.pipeline()(d_loss)]), TypeError, "a mapping from names to steps"),
        (lambda: fl.alternate({}), TypeError, "a mapping from names to steps"),
        (lambda: fl.alternate({"d": d_loss}), TypeError, "got .*d_loss.* under 'd'"),
        (lambda: fl.alternate({"d": fl.pipeline()}), TypeError, "expects steps"),
        (lambda: fl.alternate({1: fl.pipeline()(d_loss)}), TypeError, "names of optimizers"),
        (lambda: fl.alternate({"a/b": fl.pipeline()(d_loss)}), ValueError, 'names without "/"'),
        (lambda: fl.alternate({"recent": fl.pipeline()(d_loss)}), ValueError, '"recent"'),
        (lambda: alternating(order="dg"), TypeError, "order as names of steps"),
        (lambda: alternating(order=("d", "e")), ValueError, "which are d, g; got 'e'"),
        (lambda: alternating(order=("d", "d")), ValueError, "leaves out g"),
        (lambda: alternating(batch="each"), ValueError, "batch"),
        (lambda: alternating(evaluate="e"), ValueError, "evaluate as names of steps"),
        (lambda: alternating(evaluate=()), TypeError, "evaluate as names of steps"),
        (lambda: fl.alternate({"d": alternating()}), ValueError, "in one alternate"),
        (lambda: alternating(d=(fl.accumulate(2),)), ValueError, 'd takes 2, g takes 1.*"next"'),
        (lambda: fl.pipeline(fl.clip(1.0))(fl.pipeline()(d_loss)), TypeError, "is a step already"),
    ],
)
def test_what_cannot_be_composed_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_optimizer_that_is_missing_is_named_when_a_run_starts():
    model = Two()
    optimizers = {"d": torch.optim.SGD([model.d]), "e": torch.optim.SGD([model.g])}
    state = fl.TrainState.create(model, optimizers)
    for call in (
        lambda: fl.fit(alternating(), state, batches(1), hooks=()),
        lambda: alternating()(state, torch.ones(1)),
        lambda: fl.evaluate(alternating(), state, batches(1)),
    ):
        with pytest.raises(ValueError, match=r"a step for g, but the state has d, e.*'g': \.\.\."):
            call()
    with pytest.raises(ValueError, match="one optimizer, without a name"):
        fl.fit(alternating(), toy(), batches(1), hooks=())


def test_an_optimizer_without_a_turn_is_warned_of(caplog):
    step = fl.alternate({"d": fl.pipeline()(d_loss)})
    state = fl.fit(step, two(), batches(1), hooks=())
    assert "these optimizers have no turn, so their parameters stay as they are: g" in caplog.text
    assert weights(state) == (-1.0, 0.0)


def test_a_round_of_the_next_batches_takes_a_sequence_of_them():
    step = alternating(batch="next")
    with pytest.raises(ValueError, match="a list or a tuple of 1 to 2 batches; got"):
        step(two(), torch.ones(1))
    with pytest.raises(ValueError, match="1 to 2 batches; got 3"):
        step(two(), batches(1, 2, 3))
    state, _ = step(two(), batches(3, 1))
    assert (weights(state), state.batch) == ((-3.0, 3.0), 2)


# --- how it shows


def test_its_repr_is_what_was_typed_and_it_can_be_pickled():
    step = alternating(order=("d", "d", "g"), batch="next", evaluate="g")
    typed = "alternate({'d': pipeline()(d_loss), 'g': pipeline()(g_loss)}, "
    typed += "order=('d', 'd', 'g'), batch='next', evaluate='g')"
    assert repr(step) == repr(pickle.loads(pickle.dumps(step))) == typed
    around = fl.pipeline(fl.ema(0.9))(step)
    assert (
        repr(around) == repr(pickle.loads(pickle.dumps(around))) == f"pipeline(ema(0.9))({typed})"
    )
    assert repr(alternating()) == typed.partition(", order")[0] + ")"
    assert str(step).startswith("in turn: 2 × d, g\nd:\n┌ update")
    assert "in turn: 2 × d, g" in step._repr_html_()
    assert str(around).startswith("in turn: 2 × d, g; around: ema(0.9)\nd:\n")
    assert fl.fit(pickle.loads(pickle.dumps(around)), two(), batches(1, 2), hooks=()).step == 1


def test_turns_of_two_models_do_not_meet():
    """One step, two states."""
    step = alternating()
    a, b = two(), two(d=2.0)
    for _ in range(2):
        a, _ = step(a, torch.ones(1))
        b, _ = step(b, torch.ones(1))
    assert (a.model.d.item(), b.model.d.item()) == (-2.0, -4.0)


# --- phases


def test_a_schedule_in_a_turn_counts_from_where_the_phase_began():
    seen = {"d": [], "g": []}

    def pair():
        model = nn.ParameterDict({"d": torch.zeros(()), "g": torch.zeros(())})
        named = {name: torch.optim.SGD([p], lr=1.0) for name, p in model.items()}
        return fl.TrainState.create(model, named, seed=0)

    def loss_of(name):
        return lambda model, batch: model[name] * batch.mean()

    def noting(name):
        return fl.schedule(lambda i, total: seen[name].append((i, total)) or 1 - i / total)

    steps = {name: fl.pipeline(noting(name))(loss_of(name)) for name in seen}
    step = fl.alternate(steps, order=("d", "d", "g"))
    ones, state = [torch.ones(1)] * 2, pair()
    state = fl.fit(step, state, ones, hooks=(), steps=1, phase="a")
    state = fl.fit(step, state, ones, hooks=(), epochs=2, phase="b")
    assert seen["d"] == [(0, 2), (1, 2), *((i, 8) for i in range(8))]
    assert seen["g"] == [(0, 1), *((i, 4) for i in range(4))]
    assert (state.step, dict(state.updates)) == (5, {"d": 10, "g": 5})
    assert state.model["g"].item() == -(1 + 1 + 0.75 + 0.5 + 0.25)


def test_windows_that_vary_are_refused_in_a_turn():
    step = fl.pipeline(fl.accumulate({0: 2, 1: 4}))(lambda m, b: m(b).mean())
    with pytest.raises(ValueError, match="changes its window with the epoch"):
        fl.alternate({"d": step, "g": step})
