"""Random numbers as a function of the position in a run.

Inside a run, torch's global generators (the CPU's and the device's) are seeded before every update,
from (seed, epoch, batch). All global generators, including Python's and NumPy's, are seeded before
every batch that is loaded, from the same numbers and another purpose. So an evaluation, a hook or a
prefetching worker cannot change what torch draws, and a resumed run draws what it would have drawn.

Seeding Python's and NumPy's generators costs 3 % of a small update. They are therefore seeded once
per epoch, and their states are saved within it (:class:`HostGenerators`). What a loss function
draws from them resumes exactly, but a hook that draws advances them, and a loader without workers,
which loads in this process, seeds them with each batch.

After a run the caller's generators are as they were before.

Seeds are mixed with SplitMix64 (Steele, Lea and Flood, 2014,
https://doi.org/10.1145/2660193.2660195).
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from fnloop._backend import torch_compat
from fnloop._backend.host_generators import mark_host

SEED_BITS = (1 << 64) - 1
# Purposes: each is folded into the seed and gives a stream of its own.
ORDER, FETCH, COMPUTE, PART = 1, 2, 3, 4


def mix(seed: int, number: int) -> int:
    """Mix a number into a seed."""
    z = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & SEED_BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & SEED_BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & SEED_BITS
    return z ^ (z >> 31)


def fold_in(seed: int, *numbers: int) -> int:
    """Mix numbers into a seed, one after the other. Neighbours give unrelated 64-bit seeds.

    Args:
        seed: the seed, such as ``state.seed``.
        *numbers: what makes the new seed another one: an epoch, a batch, a number of your own.

    Returns:
        The new seed.

    Example:
        >>> fold_in(0, 1) != fold_in(0, 2) != fold_in(1, 1)
        True
    """
    for number in numbers:
        seed = mix(seed, number)
    return seed


def new_seed() -> int:
    """Draw a seed from torch's global generator, so that ``torch.manual_seed`` decides it."""
    return int(torch.empty((), dtype=torch.int64).random_().item())


class HostGenerators(NamedTuple):
    """The states of Python's and NumPy's global generators."""

    python: tuple[object, ...]
    numpy: Any

    @classmethod
    def capture(cls) -> HostGenerators:
        return cls(random.getstate(), np.random.get_state())

    def to_parts(self) -> dict[str, list[object]]:
        """Return them as plain data, with the long parts as arrays."""
        (version, words, gauss), (name, keys, *rest) = self.python, self.numpy
        return {"python": [version, np.array(words), gauss], "numpy": [name, keys, *rest]}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> HostGenerators:
        """Return them from what :meth:`to_parts` returned."""
        version, words, gauss = parts["python"]
        return cls((version, tuple(map(int, words)), gauss), tuple(parts["numpy"]))

    def checked(self) -> HostGenerators:
        """Return them; raise what Python or NumPy raises if its generator cannot take them."""
        random.Random().setstate(self.python)
        np.random.RandomState().set_state(self.numpy)
        return self

    def install(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class Generators(NamedTuple):
    """The states of all global generators that :func:`seed_all` sets."""

    torch: torch.Tensor
    host: HostGenerators

    @classmethod
    def capture(cls) -> Generators:
        return cls(torch.default_generator.get_state(), HostGenerators.capture())

    def install(self) -> None:
        torch.default_generator.set_state(self.torch)
        self.host.install()


def seed_host(seed: int) -> None:
    """Seed Python's and NumPy's global generators."""
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def torch_seeder(device: torch.device) -> Callable[[int], object]:
    """Return the function that seeds torch's global generators, the CPU's and the device's."""
    seed_cpu = torch.default_generator.manual_seed  # 100 times faster than torch.manual_seed
    if device.type == "cpu":
        return seed_cpu
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        seed_device = torch_compat.seeder_of(index)
    else:
        seed_device = torch.get_device_module(device).manual_seed

    def seed_both(seed: int) -> None:
        seed_cpu(seed)
        seed_device(seed)

    return seed_both


_seed_all_count = 0
_saved: list[Generators] | None = None  # the list of the innermost saved_before_seeding


def seed_all(seed: int) -> None:
    """Seed every global generator that the loading of a batch may draw from."""
    global _seed_all_count
    _seed_all_count += 1
    if _saved is not None and not _saved:
        _saved.append(Generators.capture())
    torch.default_generator.manual_seed(seed)
    seed_host(seed)


def seed_all_count() -> int:
    """Return how often :func:`seed_all` was called."""
    return _seed_all_count


@contextlib.contextmanager
def saved_before_seeding() -> Iterator[list[Generators]]:
    """Give a list to which the first :func:`seed_all` adds the generators as they were before."""
    global _saved
    outer, saved = _saved, []
    _saved = saved
    try:
        yield saved
    finally:
        _saved = outer


_owners: dict[
    int, int
] = {}  # process id to thread id; a forked process inherits the entry of its parent


class reserved_generators:
    """Reserve the global generators for this thread, in a ``with`` block, maybe in another one.

    Raises:
        RuntimeError: another thread has reserved them.
    """

    def __enter__(self) -> None:
        process, thread = os.getpid(), threading.get_ident()
        self._reserved = None if _owners.get(process) == thread else process
        if self._reserved is not None and _owners.setdefault(process, thread) != thread:
            raise RuntimeError(
                "fit, run, evaluate and predict seed the global random generators, and another "
                "thread of this process is inside one of them: each would change the numbers of "
                "the other. Call them one after the other, or each in a process of its own"
            )

    def __exit__(self, *_: object) -> None:
        if self._reserved is not None:
            del _owners[self._reserved]


class isolated(reserved_generators):
    """Restore the caller's global generators after a ``with`` block, which may be entered again.

    They are those of Python, NumPy and torch, on the host and on the device.

    Args:
        device: the device, such as ``state.backend.device``.

    Raises:
        RuntimeError: another thread has reserved them.

    Example:
        >>> import torch
        >>> with isolated(torch.device("cpu")):
        ...     a = torch.rand(3)
        >>> bool((a == torch.rand(3)).all())
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        super().__enter__()
        try:
            self._restore = mark_generators(self._device)
        except BaseException:
            super().__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            super().__exit__()


def mark_generators(device: torch.device) -> Callable[[], None]:
    """Return a function that restores all global generators, the device's too, as they are now."""
    cpu, restore_host = torch.default_generator.get_state(), mark_host()
    on_device = None if device.type == "cpu" else torch.get_device_module(device)
    device_state = on_device.get_rng_state(device) if on_device else None

    def restore_generators() -> None:
        torch.default_generator.set_state(cpu)
        restore_host()
        if on_device:
            on_device.set_rng_state(device_state, device)

    return restore_generators


@contextlib.contextmanager
def seeded_generator(owner: object, seed: int) -> Iterator[None]:
    """Replace torch's ``generator`` of a sampler or a loader, if it has one, by one with this seed.

    None stands for torch's; one of NumPy or Python stays.
    """
    before = getattr(owner, "generator", owner)
    if not (before is None or isinstance(before, torch.Generator)):
        yield
        return
    attributes: Any = owner
    attributes.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        attributes.generator = before
