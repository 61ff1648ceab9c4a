"""The norm of gradients, beside torch's own function."""

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from fnloop._step.gradients import norm


def test_gradients_with_a_graph_lose_it_in_the_norm():
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    (w.grad,) = torch.autograd.grad((w**2).sum() / 2, w, create_graph=True)
    before = norm([w.grad], 2.0)
    assert (before.item(), before.requires_grad) == (5.0, False)


def test_sparse_gradients_are_left_to_torch():
    """torch 2.15 has a norm of them, and older ones do not."""
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()  # two rows of ones

    def found(norm):
        try:
            return norm([table.weight.grad], 2.0).item()
        except NotImplementedError as error:
            return type(error)

    assert found(norm) == found(get_total_norm) in (2.0, NotImplementedError)
