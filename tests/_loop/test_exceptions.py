"""Exceptions keep their type, say where they happened, and carry the state."""

import attrs
import pytest
from loop_cases import NUMBERS, ONE, Boom, failing_middleware, fit, raising
from torch.optim.lr_scheduler import OneCycleLR

import fnloop as fl
from fnloop.testing import toy, toy_loss


@pytest.mark.parametrize(
    "error", [Boom("x"), StopIteration("x"), KeyError("x"), SystemExit(3)], ids=repr
)
def test_an_exception_keeps_its_type_and_carries_a_note_and_the_state(error):
    with pytest.raises(type(error)) as caught:
        fl.fit(fl.pipeline(fl.clip(9.0))(raising(error)), toy(), NUMBERS, epochs=2, hooks=())
    assert caught.value is error
    of_batch = ["the batch: (1,) float32"] if isinstance(error, KeyError) else []
    assert caught.value.__notes__ == [
        *of_batch,
        "while in the loss function explode, train, epoch 1, batch 1, step 1",
    ]
    assert (error.state.step, error.state.batch, error.state.run) == (1, 1, None)
    assert fit(error.state, NUMBERS).model.w.item() == -6.0
    del error.__notes__


def test_the_note_names_the_middleware():
    with pytest.raises(Boom) as error:
        fl.fit(
            fl.pipeline(failing_middleware("gradient"), fl.clip(1.0))(toy_loss),
            toy(),
            NUMBERS,
            hooks=(),
        )
    assert error.value.__notes__ == ["while in fails(2.0), train, epoch 1, batch 1, step 1"]


class Uncombinable:
    def combine(self, other):
        raise Boom

    def compute(self):
        return 0.0


@pytest.mark.parametrize(
    ("member", "error", "steps"),
    [
        (failing_middleware("step"), Boom, 2),
        (fl.metric(odd=lambda aux, batch: Uncombinable()), Boom, 2),
        (fl.torch_scheduler(lambda opt, run: OneCycleLR(opt, 1.0, total_steps=3)), ValueError, 4),
    ],
    ids=["step ring", "metric", "scheduler"],
)
def test_an_exception_after_an_update_carries_the_updated_state(member, error, steps):
    data = [*NUMBERS, *NUMBERS]
    with pytest.raises(error) as caught:
        fl.fit(fl.pipeline(member)(toy_loss), toy(), data, hooks=())
    state = caught.value.state
    assert (state.step, state.batch, state.run) == (steps, steps, None)
    before = state.model.w.item()
    state = fit(attrs.evolve(state, slots={}, metrics={}), data)
    assert state.step == 6
    if error is Boom:
        assert (before, state.model.w.item()) == (-3.0, -12.0)


def test_the_note_names_loaders_and_hooks():
    def broken():
        yield ONE
        raise Boom

    with pytest.raises(Boom) as error:
        fit(loaders=broken)
    assert error.value.__notes__ == [
        "while in the training loader, train, epoch 1, batch 1, step 1"
    ]
    with pytest.raises(Boom) as error:
        fit(loaders=([ONE], broken))
    assert error.value.__notes__ == ["while in the valid loader, epoch 1, batch 1, step 1"]
    with pytest.raises(Boom) as error:
        fl.fit(fl.pipeline()(raising(Boom())), toy(), ([ONE], NUMBERS), hooks=())
    assert error.value.__notes__ == [
        "while in the loss function explode, valid, epoch 1, batch 1, step 1"
    ]

    def bad_hook(state):
        raise Boom

    with pytest.raises(Boom) as error:
        fit(hooks=(bad_hook,))
    assert error.value.__notes__ == ["while in bad_hook, train, epoch 1, batch 1, step 1"]
