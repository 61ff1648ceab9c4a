"""Clipping by the norm, beside torch's own function: the same bits."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from fnloop._extensions.middleware.clip import clip_to_norm_


def parameters(*kinds):
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(5, 3, dtype=kind)) for kind in kinds]
    for p in params:
        p.grad = torch.randn(5, 3, generator=draw).to(p.dtype)
    return [*params, nn.Parameter(torch.zeros(2))]  # the last one has no gradient


KINDS = {
    "alike": (torch.float32,) * 3, "one": (torch.float64,),
    "of two dtypes": (torch.float32, torch.float64, torch.bfloat16), "none": (),
}  # fmt: skip


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_has_the_bits_of_torch(kinds, norm_type, limit):
    mine, its = parameters(*kinds), parameters(*kinds)
    norm = clip_to_norm_(mine, limit, norm_type)
    assert torch.equal(norm, clip_grad_norm_(its, limit, norm_type))
    for a, b in zip(mine, its, strict=True):
        assert a.grad is None if b.grad is None else torch.equal(a.grad, b.grad)
