"""A middleware may call the step several times in one update. The gradients add up."""

import pytest
import torch
from sample_middleware import repeat
from torch import nn

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE, THREE, EMPTY = torch.tensor([1.0]), torch.tensor([3.0]), torch.ones(0)
# Clipping each micro-batch prevents adding their gradients up in place.
IN_PLACE_OR_AVERAGED = pytest.mark.parametrize(
    "inner", [(), (fl.clip(9.0),)], ids=["in place", "averaged"]
)


def test_two_calls_with_one_batch_double_the_gradient():
    state, _ = fl.pipeline(repeat())(toy_loss)(toy(), THREE)
    assert (state.model.w.item(), state.step) == (-6.0, 1)


@IN_PLACE_OR_AVERAGED
def test_two_calls_with_one_window_double_its_mean(inner):
    """The mean of 1 and 3 is 2, twice. Each call divides its own gradient by its own items."""
    state, out = fl.pipeline(*inner, fl.accumulate(2), repeat())(toy_loss)(toy(), [ONE, THREE])
    assert (state.model.w.item(), state.step, out.weight) == (-4.0, 1, 2)


@IN_PLACE_OR_AVERAGED
def test_three_calls_with_windows_of_different_lengths_add_their_means(inner):
    """The means are 2, 3 and 1."""
    step = fl.pipeline(*inner, fl.accumulate(2), repeat([THREE], [ONE, ONE]))(toy_loss)
    state, _ = step(toy(), [ONE, THREE])
    assert state.model.w.item() == -6.0


@IN_PLACE_OR_AVERAGED
def test_a_call_whose_window_is_empty_keeps_the_gradients_so_far(inner):
    """The second call is skipped and changes nothing. The third adds to the first."""
    found = []

    @fl.middleware("gradient")
    def look():
        def wrap(step):
            def looked(state, batch):
                for window in ([ONE, THREE], [EMPTY], [ONE]):
                    state, out = step(state, window)
                    found.append(state.model.w.grad.item())
                return state, out

            return looked

        return wrap

    state, _ = fl.pipeline(*inner, fl.accumulate(2), look())(toy_loss)(toy(), [ONE])
    assert found == [2.0, 2.0, 3.0] and state.model.w.item() == -3.0


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))


def by_sign(model, batch):
    """Use a for positive batches and b for others. Its gradient is the mean of the batch."""
    return (batch * (model.a if batch[0] > 0 else model.b)).mean()


@pytest.mark.parametrize("first, second, a, b", [(1, -3, -1, 3), (-3, 1, -1, 3), (1, 1, -2, 0)])
def test_a_parameter_unused_in_one_call_keeps_the_gradient_of_the_other(first, second, a, b):
    model = Two()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)
    step = fl.pipeline(fl.accumulate(2), repeat([torch.tensor([float(second)])] * 2))(by_sign)
    state, _ = step(state, [torch.tensor([float(first)])] * 2)
    assert (state.model.a.item(), state.model.b.item()) == (a, b)
