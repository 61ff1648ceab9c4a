"""An update that fails half-way leaves no state to use."""

import os
import signal

import attrs
import pytest
import torch
from loop_cases import (
    NUMBERS,
    ONE,
    Boom,
    boom,
    failing_middleware,
    fit,
    half_way,
    raise_interrupt,
    step,
    two_weights,
)

import fnloop as fl
from fnloop.testing import Toy, toy, toy_loss


def alarm():
    """Raise as torch does for a worker that has died: from the handler of a signal."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: boom())
    try:
        os.kill(os.getpid(), signal.SIGALRM)
        sum(range(10**6))
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(boom, Boom), (alarm, Boom), (raise_interrupt, KeyboardInterrupt)],
    ids=["step", "signal", "ctrl-c"],
)
def test_an_update_that_fails_half_way_leaves_no_state(error, kind):
    state, make = two_weights(half_way(error))
    kept = []
    keep = lambda state: (kept.append((state, fl.snapshot(state))), state)[1]
    with pytest.raises(kind) as caught:
        fl.fit(make, state, NUMBERS, hooks=(keep,))
    assert not hasattr(caught.value, "state")
    where, torn = caught.value.__notes__
    assert where == "while in the optimizer's step, train, epoch 1, batch 1, step 1"
    assert (
        "between two updates, so this exception has no attribute state. Go back to a checkpoint "
        "or to a snapshot" in torn
    )
    (last, snapshot) = kept[-1]
    assert [p.item() for p in last.model.values()] == [
        -3.0,
        -1.0,
    ]  # torn: one weight has made two steps
    for use in (
        lambda: fl.fit(make, last, NUMBERS),
        lambda: fl.snapshot(last),
        lambda: make(last, NUMBERS[0]),
    ):
        with pytest.raises(
            fl.StaleStateError,
            match=r"of this state \(step 1, epoch 0\) failed half-way.*checkpoint",
        ):
            use()
    again = fl.fit(
        make,
        attrs.evolve(snapshot, optimizer=torch.optim.SGD(snapshot.model.parameters(), lr=1.0)),
        NUMBERS,
    )
    assert [p.item() for p in again.model.values()] == [-6.0, -6.0]


def test_a_bare_step_that_fails_half_way_leaves_no_state():
    state, make = two_weights(half_way(boom, at=1))
    with pytest.raises(Boom):
        make(state, NUMBERS[0])
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        make(state, NUMBERS[0])


@pytest.mark.parametrize(
    ("member", "fails", "kind"),
    [((), True, Boom), ((fl.amp("fp16", init_scale=2.0**127),), False, ValueError)],
    ids=["loss function", "fp16 overflow"],
)
def test_an_exception_during_the_line_search_of_lbfgs_leaves_no_state(member, fails, kind):
    """LBFGS has tried other weights when it evaluates the loss for the second time."""
    calls = []

    def loss_fn(model, batch):
        calls.append(model.w.item())
        if fails and len(calls) == 2:
            raise Boom
        return (model(batch) - 3).square().mean()

    model = Toy(w=5.0)
    state = fl.TrainState.create(model, torch.optim.LBFGS(model.parameters(), max_iter=4))
    with pytest.raises(kind) as caught:
        fl.fit(fl.pipeline(*member)(loss_fn), state, [ONE], hooks=())
    assert not hasattr(caught.value, "state")
    assert "between two updates" in caught.value.__notes__[-1]


def test_a_skipped_update_changes_nothing_and_keeps_its_state():
    leaves_out = fl.Middleware(
        "leaves_out", gradient=lambda step: lambda state, batch: skipping(*step(state, batch))
    )
    skipping = lambda state, out: (state, attrs.evolve(out, skip="no reason"))
    with pytest.raises(Boom) as caught:
        fl.fit(
            fl.pipeline(leaves_out, failing_middleware("step"))(toy_loss), toy(), NUMBERS, hooks=()
        )
    assert (caught.value.state.step, caught.value.state.skipped, caught.value.state.batch) == (
        0,
        2,
        2,
    )
    assert (
        fit(attrs.evolve(caught.value.state, slots={}), NUMBERS).model.w.item() == -3.0
    )  # the third batch alone


def test_a_hook_that_advances_the_state_and_fails_leaves_none():
    with pytest.raises(Boom) as caught:
        fit(hooks=(lambda state: (step(state, ONE), boom()),))
    assert not hasattr(caught.value, "state")
