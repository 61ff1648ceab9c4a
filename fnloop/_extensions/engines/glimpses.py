"""Glimpses of batches: whether processes that should read the same do so."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fnloop.extend import Batch, containers

_TOLERANCE = 1e-3  # by which numbers may differ that different kinds of processors have computed
_LEAVES, _NUMBERS = 16, 1024  # of a batch that are compared, and of each of its leaves

# The shape of each leaf that has numbers, and some of them.
Glimpse = list[tuple[tuple[int, ...], Tensor]]


def glimpse(batch: object) -> Glimpse:
    """Return some of the numbers in a batch or a sample, on the host.

    Text is left out: it may be the name of a file, which another machine has at another place.

    Example:
        >>> glimpse({"x": torch.zeros(2, 1), "name": "a.png"})
        [((2, 1), tensor([0., 0.]))]
    """
    return [*itertools.islice(_numbers_in(batch), _LEAVES)]


def _numbers_in(value: object) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value.ravel()[:: max(value.size // _NUMBERS, 1)].copy())
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
            some = flat[:: max(len(flat) // _NUMBERS, 1)].cpu()
            yield tuple(value.shape), some.clone()  # the batch may be changed in place
        return
    for _, part in containers.parts_of(value) or ():
        yield from _numbers_in(part)


def alike(a: Glimpse | None, b: Glimpse | None) -> bool:
    """Return whether two glimpses are the same, but for how processors round."""
    if a is None or b is None or [shape for shape, _ in a] != [shape for shape, _ in b]:
        return False
    return all(_close(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


def _close(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or len(x) != len(y) or not x.is_floating_point():
        return torch.equal(x, y)
    x, y = x.double(), y.double()
    scale = x.nan_to_num(0, 0, 0).abs().mean().item() if len(x) else 0.0
    return torch.allclose(x, y, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)


def joined(found: Batch) -> Glimpse | None:
    """Return one glimpse, given two of the same sample, or a mapping of such.

    None: the sample is not the same when it is read twice, or it could not be read.
    """
    if isinstance(found, Mapping):
        parts = [joined(part) for part in found.values()]
        known = [part for part in parts if part is not None]
        return [*itertools.chain.from_iterable(known)] if len(known) == len(parts) else None
    return found[0] if found is not None and alike(*found) else None


def checksum(seen: Glimpse | None) -> int:
    """Return a checksum of a glimpse, and -1 if there is none."""
    if seen is None:
        return -1
    crc = 0
    for shape, numbers in seen:
        crc = zlib.crc32(repr(shape).encode(), crc)
        crc = zlib.crc32(numbers.view(torch.uint8).numpy().data, crc)
    return crc
