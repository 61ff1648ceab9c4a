"""Randomness as a function of where a run is, and of nothing before it.

Inside a run the global generators (torch, the device's, numpy, python) are *positioned*: before every update by
``(seed, epoch, batch)``, and before every batch that is loaded by the same under another purpose. So an evaluation, a
hook or a prefetching worker can't change what training draws, a resumed run draws what it would have drawn, and there
is no generator state to keep. Outside it the caller's generators are as they were.

Seeds are mixed with SplitMix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

__all__ = ["COMPUTE", "FETCH", "ORDER", "SEED_BITS", "fold_in", "isolated", "new_seed", "own_generator", "positioner"]

SEED_BITS = (1 << 64) - 1
ORDER, FETCH, COMPUTE = 1, 2, 3  # the purposes that a seed is folded with: streams that never meet


def fold_in(seed: int, *numbers: int) -> int:
    """Mix numbers into a seed, one after the other: a 64-bit seed that has nothing to do with its neighbours.

    Example:
        >>> fold_in(0, 1) != fold_in(0, 2) != fold_in(1, 1)
        True
    """
    for number in numbers:
        z = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & SEED_BITS
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_BITS
        seed = z ^ (z >> 31)
    return seed


def new_seed() -> int:
    """Draw a seed from torch's global generator, so that ``torch.manual_seed`` decides it."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


def positioner(device: torch.device) -> Callable[[int], None]:
    """Return the function that sets python's, numpy's, torch's and the device's global generator to a seed."""
    seeders = [torch.default_generator.manual_seed]  # torch.manual_seed walks over all backends: 100 times slower
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        seeders.append(torch.cuda.default_generators[index].manual_seed)
    elif device.type != "cpu":
        seeders.append(torch.get_device_module(device).manual_seed)

    def position(seed: int) -> None:
        for manual_seed in seeders:
            manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)

    return position


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Give the caller's global generators back as they were."""
    on_device = None if device.type == "cpu" else torch.get_device_module(device)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    device_state = on_device.get_rng_state(device) if on_device else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if on_device:
            on_device.set_rng_state(device_state, device)


@contextlib.contextmanager
def own_generator(owner: object, seed: int) -> Iterator[None]:
    """Let a sampler or a loader that draws from its ``generator`` draw from a fresh one with this seed meanwhile."""
    if not hasattr(owner, "generator"):
        yield
        return
    before = owner.generator
    owner.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        owner.generator = before
