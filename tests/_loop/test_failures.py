"""Runs that fail: exceptions, hooks that are told, and torn updates."""

import os
import signal

import attrs
import pytest
import torch
from loop_cases import (
    NUMBERS,
    ONE,
    Boom,
    Told,
    boom,
    failing_middleware,
    fit,
    half_way,
    interrupting,
    press,
    raise_interrupt,
    raising,
    step,
    two_weights,
)
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from toy_runs import of

import fnloop as fl
from fnloop.testing import Toy, toy, toy_loss

# --- exceptions


@pytest.mark.parametrize(
    "error", [Boom("x"), StopIteration("x"), KeyError("x"), SystemExit(3)], ids=repr
)
def test_an_exception_keeps_its_type_and_carries_a_note_and_the_state(error):
    with pytest.raises(type(error)) as caught:
        fl.fit(fl.pipeline(fl.clip(9.0))(raising(error)), toy(), NUMBERS, epochs=2, hooks=())
    assert caught.value is error
    assert error.__notes__ == [
        *(["the batch: (1,) float32"] if isinstance(error, KeyError) else []),
        "while in the loss function explode, train, epoch 1, batch 1, step 1",
    ]
    assert (error.state.step, error.state.batch, error.state.run) == (1, 1, None)
    assert fit(error.state, NUMBERS).model.w.item() == -6.0
    del error.__notes__


@pytest.mark.parametrize(
    "member", [fl.clip(1.0), fl.clip_value(1.0), fl.clip_adaptive(1.0), fl.sam()], ids=repr
)
def test_what_torch_cannot_do_with_a_sparse_gradient_is_explained(member):
    def weights(sparse):
        torch.manual_seed(0)
        state = of(nn.Embedding(4, 2, sparse=sparse))
        step = fl.pipeline(member)(lambda model, i: model(i).square().mean())
        return fl.fit(step, state, [torch.tensor([1])], hooks=()).model.weight

    try:
        found = weights(sparse=True)
    except RuntimeError as error:
        assert "sparse=True" in error.__notes__[-1]
    else:  # newer versions of torch can
        assert torch.allclose(found, weights(sparse=False))
        assert member.name in ("clip", "sam")


def broken():
    yield ONE
    raise Boom


FAILS, EXPLODE = fl.pipeline(failing_middleware("gradient"), fl.clip(1.0)), raising(Boom())
NO_SLOT = fl.pipeline(fl.Middleware("a", init=lambda state: boom()))
AT_1 = "epoch 1, batch 1, step 1"


@pytest.mark.parametrize(("step", "loaders", "hooks", "place"), [
    (FAILS(toy_loss), NUMBERS, (), f"fails(2.0), train, {AT_1}"),
    (step, broken, (), f"the training loader, train, {AT_1}"),
    (step, ([ONE], broken), (), f"the valid loader, {AT_1}"),
    (fl.pipeline()(EXPLODE), ([ONE], NUMBERS), (), f"the loss function explode, valid, {AT_1}"),
    (step, NUMBERS, (lambda state: boom(),), f"<lambda>, train, {AT_1}"),
    (NO_SLOT(toy_loss), NUMBERS, (), "the making of slots, train, epoch 1, batch 0, step 0"),
])  # fmt: skip
def test_the_note_names_middleware_loaders_and_hooks(step, loaders, hooks, place):
    with pytest.raises(Boom) as caught:
        fl.fit(step, toy(), loaders, hooks=hooks)
    assert caught.value.__notes__ == [f"while in {place}"]
    assert f"step {caught.value.state.step}" in place


class Uncombinable:
    def combine(self, other):
        raise Boom

    def compute(self):
        return 0.0


@pytest.mark.parametrize(("member", "error", "steps"), [
    (failing_middleware("step"), Boom, 2),
    (fl.metric(odd=lambda aux, batch: Uncombinable()), Boom, 2),
    (fl.torch_scheduler(lambda opt, run: OneCycleLR(opt, 1.0, total_steps=3)), ValueError, 4),
], ids=["step ring", "metric", "scheduler"])  # fmt: skip
def test_an_exception_after_an_update_carries_the_updated_state(member, error, steps):
    data = [*NUMBERS, *NUMBERS]
    with pytest.raises(error) as caught:
        fl.fit(fl.pipeline(member)(toy_loss), toy(), data, hooks=())
    state = caught.value.state
    assert (state.step, state.batch, state.run) == (steps, steps, None)
    before = state.model.w.item()
    state = fit(attrs.evolve(state, slots={}, metrics={}), data)
    assert state.step == 6
    assert error is ValueError or (before, state.model.w.item()) == (-3.0, -12.0)


# --- hooks that are told


def test_hooks_are_told_of_a_failure_and_cannot_hide_it():
    first, second = Told(fails=True), Told()
    hooks = (fl.every(epochs=9)(first), second)
    with pytest.raises(Boom) as caught:
        fl.fit(fl.pipeline()(raising(Boom())), toy(), NUMBERS, hooks=hooks)
    note = f"while in the loss function explode, train, {AT_1}"
    assert first.told == [(1, None, Boom, [note])]
    assert second.told[0][:3] == (1, None, Boom)
    assert caught.value.__notes__[0] == note
    assert "failed too: OSError: disk full" in caught.value.__notes__[1]


def test_hooks_are_told_of_no_interruption_and_of_no_failure_without_a_state():
    hook = Told()
    state, make = two_weights(half_way(boom))
    with pytest.raises(Boom):
        fl.fit(make, state, NUMBERS, hooks=(hook,))
    with pytest.raises(KeyboardInterrupt):
        fl.fit(interrupting(2, lambda: (press(), press())), toy(), NUMBERS, hooks=(hook,))
    assert hook.told == []


# --- updates that fail half-way


def alarm():
    """Raise as torch does for a worker that has died: from the handler of a signal."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: boom())
    try:
        os.kill(os.getpid(), signal.SIGALRM)
        sum(range(10**6))
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("error", "kind"), [
    (boom, Boom), (alarm, Boom), (raise_interrupt, KeyboardInterrupt),
], ids=["step", "signal", "ctrl-c"])  # fmt: skip
def test_an_update_that_fails_half_way_leaves_no_state(error, kind):
    state, make = two_weights(half_way(error))
    kept = []
    keep = lambda state: (kept.append((state, fl.snapshot(state))), state)[1]
    with pytest.raises(kind) as caught:
        fl.fit(make, state, NUMBERS, hooks=(keep,))
    assert not hasattr(caught.value, "state")
    where, torn = caught.value.__notes__
    assert where == f"while in the optimizer's step, train, {AT_1}"
    assert "between two updates, so this exception has no attribute state. Go back to a" in torn
    (last, snapshot) = kept[-1]
    # torn: one weight has made two steps
    assert [p.item() for p in last.model.values()] == [-3.0, -1.0]
    for use in (
        lambda: fl.fit(make, last, NUMBERS),
        lambda: fl.snapshot(last),
        lambda: make(last, NUMBERS[0]),
    ):
        message = r"of this state \(step 1, epoch 0\) failed half-way.*checkpoint"
        with pytest.raises(fl.StaleStateError, match=message):
            use()
    optimizer = torch.optim.SGD(snapshot.model.parameters(), lr=1.0)
    again = fl.fit(make, attrs.evolve(snapshot, optimizer=optimizer), NUMBERS)
    assert [p.item() for p in again.model.values()] == [-6.0, -6.0]


def test_a_bare_step_that_fails_half_way_leaves_no_state():
    state, make = two_weights(half_way(boom, at=1))
    with pytest.raises(Boom):
        make(state, NUMBERS[0])
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        make(state, NUMBERS[0])


@pytest.mark.parametrize(("members", "kind"), [
    ((), Boom), ((fl.amp("fp16", init_scale=2.0**127),), ValueError),
])  # fmt: skip
def test_an_exception_during_the_line_search_of_lbfgs_leaves_no_state(members, kind):
    """LBFGS has tried other weights when it evaluates the loss for the second time."""
    calls = []

    def loss_fn(model, batch):
        calls.append(model.w.item())
        if kind is Boom and len(calls) == 2:
            raise Boom
        return (model(batch) - 3).square().mean()

    with pytest.raises(kind) as caught:
        state = of(Toy(5.0), torch.optim.LBFGS, max_iter=4)
        fl.fit(fl.pipeline(*members)(loss_fn), state, [ONE], hooks=())
    assert not hasattr(caught.value, "state")
    assert "between two updates" in caught.value.__notes__[-1]


def test_a_skipped_update_changes_nothing_and_keeps_its_state():
    skipping = lambda state, out: (state, attrs.evolve(out, skip="no reason"))
    leaves_out = fl.Middleware("leaves_out", gradient=lambda step: lambda *a: skipping(*step(*a)))
    step = fl.pipeline(leaves_out, failing_middleware("step"))(toy_loss)
    with pytest.raises(Boom) as caught:
        fl.fit(step, toy(), NUMBERS, hooks=())
    state = caught.value.state
    assert (state.step, state.skipped, state.batch) == (0, 2, 2)
    assert fit(attrs.evolve(state, slots={}), NUMBERS).model.w.item() == -3.0  # the third alone


def test_a_hook_that_advances_the_state_and_fails_leaves_none():
    with pytest.raises(Boom) as caught:
        fit(hooks=(lambda state: (step(state, ONE), boom()),))
    assert not hasattr(caught.value, "state")


# --- NaNs, traced by torch's anomaly detection


class Root(nn.Module):
    """Gives 0, with the gradient infinity × 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.w * x * 0).sqrt() * 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(("members", "layer"), [
    ((), "backward"), ((fl.clip(1.0), fl.amp("bf16")), "backward"),
    ((fl.accumulate(2),), "accumulate(2)"), ((fl.microbatch(1), fl.clip(1.0)), "microbatch(1)"),
], ids=repr)  # fmt: skip
def test_anomaly_detection_around_a_run_names_the_line_and_the_place(members, layer):
    step, state = fl.pipeline(*members)(lambda model, batch: model(batch).mean()), of(Root())
    with (
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values") as caught,
        pytest.warns(UserWarning, match=r"return \(self.w \* x \* 0\).sqrt\(\) \* 0"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        fl.fit(step, state, [torch.ones(2, 2)] * 2, hooks=())
    assert caught.value.__notes__ == [f"while in {layer}, train, epoch 1, batch 0, step 0"]
    assert caught.value.state.model.w.item() == 1.0
