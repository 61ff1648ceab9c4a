"""Randomness as a function of where a run is.

Inside a run torch's global generators (the CPU's and the device's) are *positioned* before every update by (seed, epoch,
batch), and all of them, python's and numpy's too, before every batch that is loaded, by the same under another purpose. So
what torch draws can't be changed by an evaluation, a hook or a prefetching worker, and a resumed run draws what it would have
drawn.

Python's and numpy's generators, whose seeding would cost an update 3 %, start from (seed, epoch) and are carried within the
epoch (:class:`HostGenerators`): what a loss function draws from them resumes exactly, but a hook that draws moves them on, and
a loader without workers, which loads in this process, positions them with each batch. Outside a run the caller's generators are
as they were.

Seeds are mixed with SplitMix64 (Steele, Lea and Flood, 2014, https://doi.org/10.1145/2660193.2660195).
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fnloop._backend import torch_compat

__all__ = [
    "COMPUTE",
    "FETCH",
    "ORDER",
    "SEED_BITS",
    "Generators",
    "HostGenerators",
    "alone",
    "fold_in",
    "isolated",
    "keeping",
    "mix",
    "new_seed",
    "own_generator",
    "position_all",
    "positioner",
    "seed_host",
    "times_positioned",
]

SEED_BITS = (1 << 64) - 1
ORDER, FETCH, COMPUTE = 1, 2, 3  # the purposes that a seed is folded with: streams that never meet


def mix(seed: int, number: int) -> int:
    """Mix a number into a seed."""
    z = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & SEED_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_BITS
    return z ^ (z >> 31)


def fold_in(seed: int, *numbers: int) -> int:
    """Mix numbers into a seed, one after the other: a 64-bit seed that has nothing to do with its neighbours.

    Example:
        >>> fold_in(0, 1) != fold_in(0, 2) != fold_in(1, 1)
        True
    """
    return functools.reduce(mix, numbers, seed)


def new_seed() -> int:
    """Draw a seed from torch's global generator, so that ``torch.manual_seed`` decides it."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class HostGenerators(NamedTuple):
    """Python's and numpy's global generators, in the middle of an epoch."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> HostGenerators:
        return cls(random.getstate(), np.random.get_state())

    def to_parts(self) -> dict[str, Any]:
        """Return them as plain data, with the long parts as arrays."""
        (version, words, gauss), (name, keys, *rest) = self.python, self.numpy
        return {"python": [version, np.array(words), gauss], "numpy": [name, keys, *rest]}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> HostGenerators:
        """Return them from what :meth:`to_parts` returned."""
        version, words, gauss = parts["python"]
        return cls((version, tuple(map(int, words)), gauss), tuple(parts["numpy"]))

    def checked(self) -> HostGenerators:
        """Return them, having tried that generators take them."""
        random.Random().setstate(self.python)
        np.random.RandomState().set_state(self.numpy)
        return self

    def install(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class Generators(NamedTuple):
    """Every global generator on the host: all that :func:`position_all` sets."""

    torch: torch.Tensor
    host: HostGenerators

    @classmethod
    def capture(cls) -> Generators:
        return cls(torch.default_generator.get_state(), HostGenerators.capture())

    def install(self) -> None:
        torch.default_generator.set_state(self.torch)
        self.host.install()


def seed_host(seed: int) -> None:
    """Seed python's and numpy's global generators."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def positioner(device: torch.device) -> Callable[[int], Any]:
    """Return the function that sets torch's global generators, the CPU's and the device's, to a seed."""
    host = (
        torch.default_generator.manual_seed
    )  # torch.manual_seed walks over all backends: 100 times slower
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        on_device = torch_compat.seeder_of(index)
    else:
        on_device = torch.get_device_module(device).manual_seed

    def position(seed: int) -> None:
        host(seed)
        on_device(seed)

    return position


_times = 0  # that position_all was called
_kept: list[Generators] | None = (
    None  # where it keeps what it is the first to set, if that is wanted
)


def position_all(seed: int) -> None:
    """Set every global generator that the loading of a batch may draw from to a seed."""
    global _times
    _times += 1
    if _kept is not None and not _kept:
        _kept.append(Generators.capture())
    torch.default_generator.manual_seed(seed)
    seed_host(seed)


def times_positioned() -> int:
    """Return how often :func:`position_all` was called: what has called it in the meantime has set the generators."""
    return _times


@contextlib.contextmanager
def keeping() -> Iterator[list[Generators]]:
    """Keep the generators as they are before :func:`position_all` sets them, in the list that is given; if it does."""
    global _kept
    outer, kept = _kept, []
    _kept = kept
    try:
        yield kept
    finally:
        _kept = outer


_inside: dict[
    int, int
] = {}  # the process, which may be a fork of another -> the thread that has its generators


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let no other thread borrow the global generators meanwhile; this one may, any number of times.

    Raises:
        RuntimeError: another thread has borrowed them.
    """
    process, thread = os.getpid(), threading.get_ident()
    nested = _inside.get(process) == thread
    if not nested and _inside.setdefault(process, thread) != thread:
        raise RuntimeError(
            "fit, run, evaluate and predict position the global random generators, and one of them is at work in another "
            "thread of this process: each would change the numbers of the other. Call them one after the other, or each in a "
            "process of its own"
        )
    try:
        yield
    finally:
        if not nested:
            del _inside[process]


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Give the caller's global generators back as they were.

    Raises:
        RuntimeError: another thread has borrowed them.
    """
    with alone():
        on_device = None if device.type == "cpu" else torch.get_device_module(device)
        generators = Generators.capture()
        device_state = on_device.get_rng_state(device) if on_device else None
        try:
            yield
        finally:
            generators.install()
            if on_device:
                on_device.set_rng_state(device_state, device)


@contextlib.contextmanager
def own_generator(owner: Any, seed: int) -> Iterator[None]:
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
