"""Mean gradients of some of the batches of a window, and how they move between processes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import toolz
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.collectives import all_gather_tensor, all_to_all_tensor
from fnloop._step.tree import join

__all__ = ["Flat", "Part", "combine", "sum_over_processes", "wide_dtype"]


def wide_dtype(gradient: Tensor) -> torch.dtype:
    """Return the dtype in which gradients are summed: at least float32."""
    return torch.promote_types(gradient.dtype, torch.float32)


@attrs.define
class Part:
    """The mean gradient of some batches.

    Args:
        gradients: for each parameter, or None.
        weight: their number of items, a scalar tensor.
    """

    gradients: list[Tensor | None]
    weight: Tensor


def _scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    for dtype, group in toolz.groupby(lambda g: g.dtype, gradients).items():
        torch_compat.foreach_mul_(group, factor if dtype.is_complex else factor.to(dtype))


def combine(even: Part | None, odd: Part | None) -> Part | None:
    """Return the mean over the items of two parts, which are changed.

    Each product and each sum is rounded by itself, so the bits do not depend on how a kernel is
    vectorized.
    """
    if even is None or odd is None:
        return even or odd
    weight = even.weight + odd.weight
    items = torch.where(weight == 0, 1, weight)
    for part in (even, odd):
        _scale_([g for g in part.gradients if g is not None], part.weight / items)
    pairs = list(zip(even.gradients, odd.gradients, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if both:
        torch_compat.foreach_add_([a for a, _ in both], [b for _, b in both])
    return Part([b if a is None else a for a, b in pairs], weight)


Kind = tuple[torch.device, torch.dtype]


class Flat:
    """The gradients of all parameters as vectors, one for each device and dtype.

    Args:
        params: the parameters.
        used: for each of them, whether it has a gradient in any process.
        slices: how many slices of one size a vector has.
    """

    def __init__(self, params: Sequence[Tensor], used: Sequence[bool], slices: int) -> None:
        self._params, self._slices = params, slices
        where = [i for i, is_used in enumerate(used) if is_used]
        self._places: dict[Kind, list[int]] = toolz.groupby(self._kind_of, where)
        self.kinds = [*self._places]

    def _kind_of(self, place: int) -> Kind:
        p = self._params[place]
        return p.device, wide_dtype(p)

    def vector(self, part: Part | None, kind: Kind) -> Tensor:
        """Return the gradients of a kind, shape (slices, ...). What is not there becomes -0.0."""
        places = self._places[kind]
        sizes = [self._params[i].numel() for i in places]
        padding = -sum(sizes) % self._slices
        vector = torch.full((sum(sizes) + padding,), -0.0, dtype=kind[1], device=kind[0])
        if part is not None:
            for i, target in zip(places, vector.split([*sizes, padding]), strict=False):
                if (gradient := part.gradients[i]) is not None:
                    target.copy_(gradient.reshape(-1))
        return vector.view(self._slices, -1)

    def gradients(self, vectors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients for each parameter, given the vector of each kind."""
        found: list[Tensor | None] = [None] * len(self._params)
        for (_, dtype), places, vector in zip(
            self.kinds, self._places.values(), vectors, strict=True
        ):
            flat, begin = vector.view(-1), 0
            for i in places:
                p = self._params[i]
                part = flat[begin : begin + p.numel()].view(p.shape)
                # In the layout of the parameter, as autograd makes it: a norm depends on it.
                found[i] = torch.empty_like(p, dtype=dtype).copy_(part)
                begin += p.numel()
        return found


def sum_over_processes(
    own: Sequence[Part | None],
    classes: Sequence[Sequence[range]],
    leaves: int,
    flat: Flat,
    like: Tensor,
) -> list[Tensor | None]:
    """Return the mean gradients over the parts of all processes, in every one of them.

    Each process gets a slice of all parts, joins these in the tree, and sends the result to all. So
    it sends and receives as much as in an all-reduce, if there is one part in each process.

    Args:
        own: the parts of this process.
        classes: which classes the processes have the parts of, by rank.
        leaves: how many positions there are.
        flat: how gradients become vectors.
        like: a scalar tensor of the kind of a weight.
    """
    zero = torch.zeros_like(like)
    mine = torch.stack([zero if part is None else part.weight for part in own])
    weights = [weight for every in all_gather_tensor(mine) for weight in every]
    slices: list[list[Tensor]] = [[] for _ in weights]
    for kind in flat.kinds:
        rows = torch.stack([flat.vector(part, kind) for part in own], dim=1)
        theirs = all_to_all_tensor(_real(rows))
        theirs = torch.view_as_complex(theirs) if kind[1].is_complex else theirs
        for found, row in zip(slices, theirs.flatten(0, 1), strict=True):
            found.append(row)
    members = [one for every in classes for one in every]
    pairs = zip(slices, weights, strict=True)
    parts = [Part([*vectors], weight) for vectors, weight in pairs]
    joined = join(range(leaves), dict(zip(members, parts, strict=True)), combine)
    assert joined is not None
    vectors: list[Tensor] = []
    for slice_ in joined.gradients:
        assert slice_ is not None
        whole = torch.stack(all_gather_tensor(_real(slice_)))
        vectors.append(torch.view_as_complex(whole) if slice_.is_complex() else whole)
    return flat.gradients(vectors)


def _real(vector: Tensor) -> Tensor:
    return torch.view_as_real(vector) if vector.is_complex() else vector
