"""The global generators of Python and NumPy: mark where they are, and put them back there.

The documented ways to do so take 60 µs, because each of 624 words becomes an object: several times
the forward of a small model. So their states are copied as they lie in memory. When nothing was
drawn, which is usual, the copies are equal and nothing is written.

Where each part of a state lies is found out at the first use, with generators made for it. Where
that is not as expected, as in another Python or after ``np.random.set_bit_generator``, the
documented ways are used.
"""

from __future__ import annotations

import array
import ctypes
import functools
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.random import MT19937, RandomState

_WORDS = 624  # of the state of a Mersenne Twister; the place of the next one follows in NumPy's
_KEY = struct.Struct(f"={_WORDS}I")
_INDEX = struct.Struct("=i")
_NUMPY_SIZE = _KEY.size + _INDEX.size

_PYTHON: Any = getattr(random.random, "__self__", None)
_NUMPY: Any = getattr(np.random.random_sample, "__self__", None)


class _Layout(NamedTuple):
    """Where the states are in memory.

    Args:
        python: the memory of Python's generator, after its head.
        words: where its words begin there; the place of the next one lies before them.
        numpy: the memory of NumPy's, which holds whether a normal number is kept.
        kept: the number of the byte that says so.
    """

    python: Any
    words: int
    numpy: Any
    kept: int


def mark_host() -> Callable[[], None]:
    """Return a function that puts the generators of Python and NumPy back where they are now."""
    layout, bits = _layout(), np.random.get_bit_generator()
    if layout is None or type(bits) is not MT19937:
        return _marked_as_documented()
    if layout.numpy.raw[layout.kept]:  # the number itself is not in the words
        return _marked_as_documented()
    python, gauss, words = layout.python.raw, _PYTHON.gauss_next, _words_of(bits)
    own = words.raw

    def put_back() -> None:
        if layout.python.raw != python or _PYTHON.gauss_next is not gauss:
            key = _KEY.unpack_from(python, layout.words)
            index = _INDEX.unpack_from(python, layout.words - _INDEX.size)
            random.setstate((random.Random.VERSION, (*key, *index), gauss))
        if np.random.get_bit_generator() is not bits:
            np.random.set_bit_generator(bits)
        if layout.numpy.raw[layout.kept]:
            np.random.seed(0)  # it forgets the number
        if words.raw != own:
            with bits.lock:
                words.raw = own

    return put_back


def _marked_as_documented() -> Callable[[], None]:
    python, numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return put_back


def _memory_of(generator: object) -> Any:
    """Return the memory of an object after its head, as an array of bytes in the same place."""
    head = object.__basicsize__
    size = type(generator).__basicsize__ - head
    return (ctypes.c_char * size).from_address(id(generator) + head)


@functools.lru_cache(maxsize=2)
def _words_of(bits: MT19937) -> Any:
    """Return the memory of the state of a bit generator of NumPy, in the same place."""
    return (ctypes.c_char * _NUMPY_SIZE).from_address(bits.ctypes.state_address)


@functools.cache
def _layout() -> _Layout | None:
    """Return where the states are; None if that is not as expected."""
    try:
        words, kept = _find_words(), _find_kept()
        if words is None or kept is None or not _can_be_put_back():
            return None
        if type(_PYTHON) is not random.Random or type(_NUMPY) is not RandomState:
            return None
        return _Layout(_memory_of(_PYTHON), words, _memory_of(_NUMPY), kept)
    except (AttributeError, TypeError, ValueError):
        return None


def _find_words() -> int | None:
    """Return where the words of a generator of Python begin; None if that is not certain."""
    made, found = random.Random(1), set[int]()
    memory = _memory_of(made)
    for draws in (0, 1, 700):
        for _ in range(draws):
            made.random()
        _, (*words, index), _ = made.getstate()
        raw = memory.raw
        found.add(raw.find(array.array("I", words).tobytes()))
        if min(found) < _INDEX.size:
            return None
        if _INDEX.unpack_from(raw, min(found) - _INDEX.size) != (index,):
            return None
    return found.pop() if len(found) == 1 else None


def _find_kept() -> int | None:
    """Return which byte of a generator of NumPy says whether it keeps a normal number."""
    made, seen = RandomState(1), []
    memory = _memory_of(made)
    name, key, position, *_ = made.get_state()
    for kept in (0, 1):
        made.set_state((name, key, position, kept, 0.0))
        seen.append(memory.raw)
    moved = [n for n, (a, b) in enumerate(zip(*seen, strict=True)) if a != b]
    return moved[0] if len(moved) == 1 and not seen[0][moved[0]] else None


def _can_be_put_back() -> bool:
    """Return whether a generator of NumPy continues from where its words were copied."""
    made = MT19937(1)
    own, words = RandomState(made), _words_of(made)
    before = words.raw
    first = own.random_sample(700).tolist()
    words.raw = before
    return first == own.random_sample(700).tolist() != own.random_sample(700).tolist()
