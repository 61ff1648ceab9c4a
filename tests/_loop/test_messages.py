"""What a user reads when something goes wrong: the part of their code that is to blame, and what to
write instead.
"""

import copy
import math

import attrs
import launch
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._hooks.hook import Hook
from fnloop.testing import HostReadError, no_host_reads, toy, toy_loss

ONE = torch.ones(1)
RINGS = ("forward", "loss", "gradient", "update", "device", "step")


def fit(*middleware, loss=toy_loss, data=(ONE,) * 3, **kwargs):
    return fl.fit(fl.pipeline(*middleware)(loss), toy(), list(data), **{"hooks": (), **kwargs})


# --- middleware that break the contract

REPLIES = {
    "None": lambda state, out: None,
    "the TrainState alone": lambda state, out: state,
    "the Output alone": lambda state, out: out,
    "a tuple of (Output, TrainState)": lambda state, out: (out, state),
    "a tuple of (TrainState, Output, int)": lambda state, out: (state, out, 1),
    "a list of (TrainState, Output)": lambda state, out: [state, out],
}


def replying(ring, reply, first=1):
    """A middleware whose replies are wrong from the first-th on."""

    @fl.middleware(ring)
    def noise(std):
        def wrap(step):
            calls = []

            def noisy(state, batch):
                calls.append(1)
                state, out = step(state, batch)
                return reply(state, out) if len(calls) >= first else (state, out)

            return noisy

        return wrap

    return noise(0.1)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("given", REPLIES)
def test_a_middleware_that_returns_something_else_is_named(ring, given):
    with pytest.raises(TypeError) as caught:
        fit(replying(ring, REPLIES[given]), fl.clip(1.0))
    assert str(caught.value) == (
        f"noise(0.1), in its {ring} ring, must return (state, out); it returned {given}. Write: "
        f"return state, out"
    )


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("given", [name for name in REPLIES if name[0] != "a" or "int" in name])
def test_one_that_does_so_later_is_named_in_a_note(ring, given):
    step = fl.pipeline(replying(ring, REPLIES[given], first=2), fl.clip(1.0))(toy_loss)
    state, _ = step(toy(), ONE)
    for run in (lambda: fl.fit(step, toy(), [ONE] * 3, hooks=()), lambda: step(state, ONE)):
        with pytest.raises((TypeError, ValueError), match="unpack") as caught:
            run()
        assert "noise(0.1) must return (state, out)" in caught.value.__notes__[0]


def test_what_a_middleware_unpacks_itself_is_not_blamed_on_another():
    def wrap(step):
        def unpacking(state, batch):
            _x, _y = batch
            return step(state, batch)

        return unpacking

    with pytest.raises(ValueError, match="unpack") as caught:
        fit(fl.Middleware("unpacks", step=wrap))
    assert len(caught.value.__notes__) == 1  # only where it happened


@pytest.mark.parametrize("ring", RINGS)
def test_a_middleware_that_never_calls_its_step_is_named(ring):
    out = fl.Output(torch.zeros(()), 1)
    idle = fl.Middleware("idle", **{ring: lambda step: lambda state, batch: (state, out)})
    message = r"Middleware\('idle'.* did not call the step that it wraps, so nothing was trained"
    with pytest.raises(ValueError, match=message):
        fit(idle)
    out = fl.Output(torch.zeros(()), 1, skip="not today")  # a guard need not call it
    state = fit(fl.Middleware("guard", gradient=lambda step: lambda state, batch: (state, out)))
    assert (state.step, state.skipped, state.model.w.item()) == (0, 3, 0.0)


# --- gradients that are switched off


def test_a_middleware_that_switches_gradients_off_is_named():
    @fl.middleware("update")
    def without_gradients(decay):
        return lambda step: torch.no_grad()(lambda state, batch: step(state, batch))

    message = r"gradients are switched off while the step runs"
    plain = fl.Middleware("plain", step=lambda step: lambda state, batch: step(state, batch))
    with pytest.raises(ValueError, match=message + r"\. Is without_gradients\(0\.9\) under torch"):
        fit(without_gradients(0.9), plain)
    with torch.no_grad(), pytest.raises(ValueError, match=message + r"\n"):
        fit()


# --- replies of a loss function, later than the first


WEIGHT = r'aux\["weight"\] must be '
LATER = {
    "None": (lambda loss: None, TypeError, r"must be a scalar tensor; got None\. Did you forget"),
    "float": (lambda loss: 0.5, TypeError, r"must be a scalar tensor; got 0\.5"),
    "dict": (lambda loss: {"loss": loss}, TypeError, r"Write: return reply\['loss'\], reply"),
    "list": (lambda loss: [loss, {}], TypeError, r"must be a scalar tensor; got \["),
    "three": (lambda loss: (loss, {}, 1), TypeError, r"a tuple of 3\. Put the rest in aux"),
    "vector": (lambda loss: loss.repeat(2), ValueError, r"got shape \(2,\)\. .* loss\.mean\(\)"),
    "aux None": (lambda loss: (loss, None), TypeError, r"aux that .* a mapping.* got NoneType"),
    **{
        f"weight {weight}": (lambda loss, w=weight: (loss, {"weight": w}), error, WEIGHT + message)
        for weight, error, message in [
            (0.5, TypeError, r"the number of items .*; got 0\.5"),
            (True, TypeError, ".*; got True"),
            ("2", TypeError, ".*; got '2'"),
            (-1, ValueError, ".*, at least 0; got -1"),
            (torch.ones(2), TypeError, r".*; got shape \(2,\)"),
            (torch.tensor(True), TypeError, r".* torch\.bool"),
        ]
    },
}


@pytest.mark.parametrize("middleware", [(), (fl.accumulate(2), fl.clip(1.0))], ids=repr)
@pytest.mark.parametrize("kind", LATER)
def test_a_reply_is_checked_at_every_batch(kind, middleware):
    reply, error, message = LATER[kind]
    calls = []

    def loss(model, batch):
        calls.append(1)
        loss, _ = toy_loss(model, batch)
        return loss if len(calls) < 4 else reply(loss)

    with pytest.raises(error, match=message) as caught:
        fit(*middleware, loss=loss, data=[ONE] * 4)
    assert caught.value.state.step == (3 if not middleware else 1)  # what came before was right
    assert caught.value.__notes__[-1].startswith("while in the loss function loss, train")


@pytest.mark.parametrize("make", [list, lambda parts: dict(zip("ab", parts, strict=True))])
def test_the_number_of_items_is_checked_at_every_batch(make):
    def loss(model, batch):
        parts = batch if isinstance(batch, list) else list(batch.values())
        return torch.stack([toy_loss(model, part)[0] for part in parts]).mean()

    message = r"how many items is the loss of loss the mean of\? .*leading dimensions \[2, 7\]"
    with pytest.raises(ValueError, match=message):
        fit(loss=loss, data=[make([torch.ones(n) for n in sizes]) for sizes in ((5, 5), (2, 7))])


# --- weights


def weighted(model, batch):
    x, weight = batch
    return toy_loss(model, x)[0], {"weight": weight}


X = torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([8.0])


ZEROS, ODD = [*torch.zeros(2)], [*torch.tensor([3.0, 1.0])]  # on the device


@pytest.mark.parametrize(("n", "weights", "steps", "skipped", "w"), [
    (1, [1, 0, 1], 2, 1, -10.0),  # 2 + 8, without the 4
    (2, [0, 0, 1], 1, 1, -8.0),
    (3, [1, 0, 1], 1, 0, -5.0),  # 2 and 8, of one item each
    (2, [1, torch.tensor(1)], 1, 0, -3.0),
    (2, ODD, 1, 0, -2.5),  # (3 × 2 + 4) / 4
    (2, ZEROS, 1, 0, 0.0),  # it is not read, so the gradient is zero
])  # fmt: skip
def test_an_item_counts_as_its_weight_says(n, weights, steps, skipped, w):
    data = list(zip(X, weights, strict=False))
    state = fit(fl.accumulate(n), loss=weighted, data=data)
    assert (state.step, state.skipped, state.model.w.item()) == (steps, skipped, w)
    assert math.isfinite(state.history.latest("train/loss")) or not any(weights)


def test_a_batch_without_an_item_may_have_a_loss_that_is_nan():
    state = fit(fl.accumulate(2), data=[ONE, torch.ones(0)], loss=toy_loss)
    assert (state.step, state.model.w.item()) == (1, -1.0)
    step = fl.pipeline()(toy_loss)
    assert fl.evaluate(step, toy(w=2.0), [ONE, torch.ones(0)]) == {"loss": 2.0}
    assert math.isnan(fl.evaluate(step, toy(), [torch.ones(0)])["loss"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(("n", "w"), [(1, -6.0), (2, -4.0)])
def test_a_bad_tensor_of_a_weight_counts_for_nothing_and_is_reported(bad, n, w):
    data = [(torch.tensor([2.0]), weight) for weight in torch.tensor([1.0, bad, 1.0, 1.0])]
    message = r'aux\["weight"\]: one of them was NaN, infinite or negative'
    with pytest.raises(ValueError, match=message) as caught:
        fit(fl.accumulate(n), loss=weighted, data=data)
    state = caught.value.state
    assert (state.step, state.model.w.item()) == (4 // n, w)


def test_a_weight_on_the_device_is_not_read():
    step = fl.pipeline(fl.accumulate(2))(weighted)
    with no_host_reads():
        _, out = step(toy(), [(X[0], torch.tensor(3)), (X[1], torch.tensor(1))])
    assert out.weight.item() == 4.0
    with no_host_reads(), pytest.raises(HostReadError):
        out.weight.item()


def without_items(folder):
    """Of two processes one has an item in the first update, then none has, then both."""
    data = [(X[0], 1), (X[1], 0), (X[1], 0), (X[1], 0), (X[2], 1), (X[2], 3)]
    state = fl.fit(fl.pipeline()(weighted), toy(), data, hooks=())
    return [state.step, state.skipped, state.model.w.item()]


@pytest.mark.slow
def test_processes_agree_that_a_window_has_no_item(tmp_path):
    assert launch.results(tmp_path, 2, without_items) == [[2, 1, -10.0]] * 2  # 2, nothing, 8


# --- loaders

STEP = fl.pipeline()(toy_loss)
TRAIN, PAIRS = [ONE], [(ONE, ONE)]


@pytest.mark.parametrize("loader", [(PAIRS, PAIRS), {"a": PAIRS, "b": PAIRS}])
def test_evaluate_takes_one_loader(loader):
    with pytest.raises(TypeError, match=r"evaluation loader must be one .*: take one of them"):
        fl.evaluate(STEP, toy(), loader)


def test_a_tuple_of_batches_is_a_loader():
    batch = torch.ones(2), torch.ones(2)
    loss = lambda model, batch: toy_loss(model, batch[0])
    assert fl.evaluate(fl.pipeline()(loss), toy(w=3.0), (batch, batch, batch)) == {"loss": 3.0}


NO_BATCH = {
    "used": (iter(TRAIN), 2, r"An iterator can be read once: pass a list, or a function"),
    "empty": ([], 1, r"Its length is 0: was it filled, and were the files found"),
}


@pytest.mark.parametrize(("loader", "epochs", "hint"), NO_BATCH.values(), ids=NO_BATCH)
def test_a_loader_without_a_batch_has_the_hint(loader, epochs, hint):
    for loaders, where in (
        (iter(TRAIN) if loader else loader, rf" in epoch {epochs}"),
        ((TRAIN, loader), ""),
    ):
        with pytest.raises(ValueError, match=rf"gave no batch{where}\. {hint}"):
            fl.fit(STEP, toy(), loaders, epochs=epochs, hooks=())


@pytest.mark.parametrize("empty", [[], DataLoader(torch.ones(3), 4, drop_last=True)])
def test_a_loader_to_evaluate_of_length_0_is_refused_before_the_first_update(empty):
    seen = []
    step = fl.pipeline()(lambda model, batch: seen.append(batch) or toy_loss(model, batch))
    with pytest.raises(ValueError, match="the valid loader gave no batch"):
        fl.fit(step, toy(), (TRAIN, empty), epochs=1, hooks=())
    assert seen == []


# --- where


def third(model, batch):
    return toy_loss(model, batch) if batch[0] < 3 else 1 / 0


def broken():
    yield ONE
    raise OSError("gone")


THREE = [torch.tensor([n]) for n in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize(("run", "note"), [
    (lambda: fl.evaluate(fl.pipeline()(third), toy(), THREE),
        "the loss function third, evaluate, batch 2"),
    (lambda: list(fl.predict(third, toy(), THREE)), "third, predict, batch 2"),
    (lambda: fl.evaluate(STEP, toy(), broken), "the loader, evaluate, batch 1"),
    (lambda: list(fl.predict(toy_loss, toy(), broken)), "the loader, predict, batch 1"),
])  # fmt: skip
def test_evaluate_and_predict_say_which_batch(run, note):
    with pytest.raises((ZeroDivisionError, OSError)) as caught:
        run()
    assert caught.value.__notes__ == [f"while in {note}"]


@attrs.frozen
class Fixed:
    """A metric of the user's own, whose value is always the same."""

    value: object

    def combine(self, other):
        return self

    def compute(self):
        return self.value


def test_a_metric_that_is_not_a_number_is_named_in_a_run():
    confusion = fl.metric(confusion=lambda aux, batch: Fixed(torch.ones(2, 2)))
    with pytest.raises(TypeError, match=r"'train/confusion' is one number, .* shape \(2, 2\)"):
        fit(confusion)
    assert fl.evaluate(fl.pipeline(confusion)(toy_loss), toy(), TRAIN)["confusion"].shape == (2, 2)


# --- what a state looks like


def test_parameters_are_counted_where_some_are_frozen_or_have_no_size_yet():
    model = nn.Sequential(nn.Linear(1000, 52), nn.Linear(52, 10))  # 1000 × 52 + 52, 52 × 10 + 10
    model[0].requires_grad_(False)
    state = state_of(model)
    assert "Sequential (52,582 parameters, 530 trained)" in repr(state)
    model[0].requires_grad_(True)
    assert "Sequential (52,582 parameters)" in repr(attrs.evolve(state, step=1))
    lazy = state_of(nn.LazyLinear(3))
    assert "LazyLinear (parameters of sizes that its first batch decides)" in repr(lazy)
    assert "LazyLinear" in lazy._repr_html_()


def test_a_loss_function_that_calls_backward_is_told_that_fnloop_does():
    def loss_fn(model, batch):
        loss = torch.tanh(model.w * batch).mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError) as raised:
        fit(loss=loss_fn)
    assert any("fnloop calls backward" in note for note in raised.value.__notes__)


# --- what is written at first, and what to write instead

LINEAR, SGD = nn.Linear(2, 1), torch.optim.SGD
StepLR = lr_scheduler.StepLR
WRITE = r"Write torch_scheduler\(lambda optimizer, run: StepLR\(optimizer, 10\)\)"


def optimizer():
    return SGD(LINEAR.parameters(), lr=0.1)


def swapped(batch, model):
    return model(batch).mean()


def state_of(model=LINEAR):
    return fl.TrainState.create(model, SGD(model.parameters(), lr=0.1))


def trained_on(batch, loss, *middleware):
    return fl.fit(fl.pipeline(*middleware)(loss), state_of(), [batch], hooks=())


INSTEAD = {
    "schedule(StepLR)": (lambda: fl.schedule(StepLR), WRITE),
    "schedule(StepLR(...))": (lambda: fl.schedule(StepLR(optimizer(), 10)), WRITE),
    "torch_scheduler(StepLR)": (lambda: fl.torch_scheduler(StepLR), WRITE),
    "torch_scheduler(StepLR(...))": (
        lambda: fl.torch_scheduler(StepLR(optimizer(), 10)),
        "expects a function \\(optimizer, run\\) -> scheduler; got a StepLR. " + WRITE,
    ),
    "schedule(LinearLR)": (
        lambda: fl.schedule(lr_scheduler.LinearLR),
        r"Write torch_scheduler\(lambda optimizer, run: LinearLR\(optimizer, \.\.\.\)\)",
    ),
    "schedule(ReduceLROnPlateau)": (
        lambda: fl.schedule(lr_scheduler.ReduceLROnPlateau(optimizer())),
        r'Instead of ReduceLROnPlateau, list plateau\("valid/loss"\) in the pipeline',
    ),
    "warmup(StepLR)": (lambda: fl.schedules.warmup(10)(StepLR), WRITE),
    "loss(batch, model)": (
        lambda: fl.pipeline()(swapped),
        r"takes \(model, batch\), but swapped takes \(batch, model\): write \(model, batch\)",
    ),
    "supervised, mapping": (
        lambda: trained_on({"image": ONE, "label": ONE}, fl.supervised(nn.MSELoss())),
        r"supervised expects batches \(x, y\); got a dict with 'image', 'label'\. Write a loss "
        r"function: def loss_fn\(model, batch\): return criterion\(model\(batch\['image'\]\), "
        r"batch\['label'\]\)",
    ),
    "fit(..., 3)": (
        lambda: fl.fit(STEP, toy(), [ONE], 3),
        r"write fit\(step, state, loaders, epochs=3\); got 3 as a fourth argument",
    ),
    "run(..., hooks)": (
        lambda: fl.run(STEP, toy(), [ONE], ()),
        r"run takes \(step, state, loaders\), and the rest by name",
    ),
    "TrainState(...)": (
        lambda: fl.TrainState(LINEAR, optimizer()),
        r"write TrainState\.create\(model, optimizer\), which checks both and draws a seed",
    ),
}


@pytest.mark.parametrize(("call", "message"), INSTEAD.values(), ids=INSTEAD)
def test_a_mistake_of_the_first_hour_says_what_to_write(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_states_are_copied_as_before():
    state = fl.fit(STEP, toy(), [ONE], hooks=())
    evolved = attrs.evolve(state, stop="enough")
    for made in (evolved, copy.copy(state), fl.snapshot(state), copy.deepcopy(state)):
        assert (type(made), made.step, made.seed) == (fl.TrainState, 1, state.seed)


X39, X32 = torch.ones(3, 9), torch.ones(3, 2)
FAILURES = {
    "shape": ((X39, X32), "(3, 9) float32, (3, 2) float32"),
    "dtype": ((X32.double(), X39), "(3, 2) float64, (3, 9) float32"),
    "nested": ((X39, {"y": X32, "ids": [torch.ones(3).long()] * 2}),
               "(3, 9) float32, [y: (3, 2) float32, ids: [(3,) int64, (3,) int64]]"),
    "many": ([torch.ones(1, 9)] * 10, ", ".join(["(1, 9) float32"] * 8) + " and 2 more"),
    "other": (("a", None), "'a', None"),
    "long": ({f"a long name {i}": torch.ones(1, 9) for i in range(50)}, "a long name 0: "),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "shown"), FAILURES.values(), ids=FAILURES)
def test_an_error_of_the_loss_function_tells_of_the_batch_in_one_short_line(batch, shown):
    with pytest.raises((RuntimeError, TypeError, KeyError)) as caught:
        trained_on(batch, lambda model, batch: model(batch[0]).mean())
    told, _place = caught.value.__notes__
    assert told.startswith(f"the batch: {shown}") and len(told) <= 220 and "\n" not in told
    assert told == f"the batch: {shown}" or isinstance(batch, dict)


AUX = "aux, which the loss function returns with the loss, "
WRITE_AUX = "To add 'output', write return loss, {\"output\": output} there"
MISSING = {
    "no aux": (lambda model, x: model(x).mean(), f"{AUX}is empty. {WRITE_AUX}"),
    "another key": (
        lambda model, x: (model(x).mean(), {"outputs": x}),
        f"{AUX}has 'outputs'. {WRITE_AUX}. Did you mean 'outputs'?",
    ),
}


@pytest.mark.parametrize(("loss", "note"), MISSING.values(), ids=MISSING)
def test_a_metric_that_reads_a_missing_key_of_aux_says_what_to_return(loss, note):
    top = fl.metric(top=lambda aux, batch: aux["output"].max())
    for run in (
        lambda: trained_on(X32, loss, top),
        lambda: fl.evaluate(fl.pipeline(top)(loss), state_of(), [X32]),
    ):
        with pytest.raises(KeyError) as caught:
            run()
        assert note in caught.value.__notes__


def test_a_key_error_of_something_else_has_no_such_note():
    metric = fl.metric(top=lambda aux, batch: {}["another"])
    with pytest.raises(KeyError) as caught:
        trained_on(X32, lambda model, x: (model(x).mean(), {"another": x}), metric)
    assert not any("aux" in note for note in caught.value.__notes__)


# --- metrics that no evaluation makes


def accuracy(aux, batch):
    return batch.mean()


def fit_both(*members, hooks=(), state=None, loss=toy_loss):
    step = fl.pipeline(*members)(loss)
    return fl.fit(step, state or toy(), (TRAIN, TRAIN), hooks=hooks, epochs=1)


OTHERS = "this pipeline evaluates valid/loss"


def adding(state):
    """A hook of the user's own, which rewrites the newest record."""
    record = state.history[-1]
    changed = attrs.evolve(record, metrics={**record.metrics, "valid/acc": 0.5})
    return attrs.evolve(state, history=fl.History([*state.history[:-1], changed]))


def reporting(inner):
    def report(state, batch):
        state, out = inner(state, batch)
        return state, attrs.evolve(out, metrics={**out.metrics, "acc": fl.Mean(0.5, 1)})

    return report


SEVERAL = Fixed({"cat": 0.5, "dog": 0.25})


MADE = {  # the members of a pipeline, the hooks before, and what is watched
    "loss": ((), (), "valid/loss"),
    "metric": ((fl.metric(acc=accuracy),), (), "valid/acc"),
    "several values": ((fl.metric(acc=lambda aux, batch: SEVERAL),), (), "valid/acc/cat"),
    "by name": ((fl.metric(lambda aux, batch: {"acc": batch.mean()}),), (), "valid/acc"),
    "derived": ((fl.derive(acc=lambda m: m["loss"]),), (), "valid/acc"),
    "average": ((fl.metric(acc=accuracy), fl.ema(0.5)), (), "valid/ema/acc"),
    "time": ((fl.timings(),), (), "valid/time/evaluate"),
    "middleware": ((fl.Middleware("mine", forward=reporting),), (), "valid/acc"),
    "evaluation": ((fl.Middleware("mine", evaluation=reporting),), (), "valid/acc"),
    "report": ((fl.Middleware("mine", report=lambda of, m: {"acc": 0.5}),), (), "valid/acc"),
    "hook": ((), (fl.every(epochs=1)(adding),), "valid/acc"),
    "training": ((fl.clip(1.0),), (), "train/grad_norm"),
}


def test_a_hook_of_the_users_own_may_do_without_what_it_monitors():
    class Mine(Hook):
        monitors = "valid/acc"

        def __call__(self, state):
            return state

    assert fit_both(hooks=(Mine(), fl.early_stop("valid/loss"))).epoch == 1


@pytest.mark.parametrize(("members", "hooks", "key"), MADE.values(), ids=MADE)
def test_a_metric_that_is_made_or_may_be_is_not_refused(members, hooks, key):
    hooks = (*hooks, fl.early_stop(key, mode="max"))
    assert key in fit_both(*members, hooks=hooks).history


def test_a_metric_of_another_loader_is_refused_and_one_of_an_earlier_run_is_not():
    step = fl.pipeline(fl.metric(acc=accuracy, loaders=("test",)))(toy_loss)
    loaders = {"train": TRAIN, "valid": TRAIN, "test": TRAIN}
    with pytest.raises(KeyError, match=rf"{OTHERS}\. To add it"):
        fl.fit(step, toy(), loaders, hooks=(fl.early_stop("valid/acc"),))
    state, hooks = fit_both(fl.metric(acc=accuracy)), (fl.early_stop("valid/acc"),)
    assert fl.fit(STEP, state, (TRAIN, TRAIN), epochs=2, hooks=hooks).epoch == 2


def test_steps_of_other_kinds_are_asked_when_they_report():
    def update(state, batch):
        return fl.Output(torch.zeros(()), len(batch), {}, {"acc": fl.Mean(0.5, 1)})

    step = fl.raw(update, evaluate=toy_loss)
    with pytest.raises(KeyError, match="there are: train/loss"):  # after the epoch, as ever
        fl.fit(step, toy(), (TRAIN, TRAIN), hooks=(fl.early_stop("valid/acc"),))
