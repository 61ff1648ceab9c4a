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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.random import MT19937, RandomState

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORDS = 624  # of the state of a Mersenne Twister; the place of the next one follows in NumPy's
_KEY = struct.Struct(f"={_WORDS}I")
_INDEX = struct.Struct("=i")
_SIZE = _KEY.size + _INDEX.size
_NOTHING = b"\0"

_Memory = Any  # an array of bytes of ctypes, which has an attribute raw
_random: Any = np.random  # its stubs lack the generators of bits
_PYTHON: Any = getattr(random.random, "__self__", None)
_NUMPY: object = getattr(np.random.random_sample, "__self__", None)

# Where the generators are: the memory of Python's, its normal number, NumPy's generator of bits,
# the words of that, and whether NumPy keeps a normal number. Two are equal if nothing was drawn.
Seen = tuple[bytes, float | None, MT19937, bytes, bytes]


class _Layout(NamedTuple):
    """Where the states are in memory.

    Args:
        begin: where the words begin in the memory of Python's generator, after its head. The place
            of the next one lies before them.
        python: that memory.
        python_words: the part of it with the place of the next word, and the words.
        bits: NumPy's generator of bits.
        words: the memory of its state.
        kept: the byte that says whether NumPy keeps a normal number, which is not in the words.
    """

    begin: int
    python: _Memory
    python_words: _Memory
    bits: MT19937
    words: _Memory
    kept: _Memory


_layout: _Layout | None = None  # at the last look


def look_at_host() -> Seen | None:
    """Return where the generators of Python and NumPy are; None if that cannot be seen."""
    global _layout
    if _layout is None or _random.get_bit_generator() is not _layout.bits:
        _layout = _find_layout()
        if _layout is None:
            return None
    _, python, _, bits, words, kept = _layout
    return python.raw, _PYTHON.gauss_next, bits, words.raw, kept.raw


def mark_host() -> Callable[[], object]:
    """Return a function that puts the generators of Python and NumPy back where they are now."""
    seen = look_at_host()
    if seen is None or seen[-1] != _NOTHING:
        bits = _random.get_bit_generator()
        return functools.partial(_install, random.getstate(), bits, _random.get_state())
    return functools.partial(_put_back, seen)


def _install(python: tuple[object, ...], bits: np.random.BitGenerator, numpy: object) -> None:
    random.setstate(python)
    if _random.get_bit_generator() is not bits:
        _random.set_bit_generator(bits)
    _random.set_state(numpy)


def _put_back(seen: Seen) -> None:
    if look_at_host() == seen:
        return
    python, gauss, bits, words, _ = seen
    if _random.get_bit_generator() is not bits:
        _random.set_bit_generator(bits)
    now, layout = look_at_host(), _layout
    assert now is not None and layout is not None  # they were seen before
    if now[:2] != seen[:2]:
        begin = layout.begin - _INDEX.size
        layout.python_words.raw = python[begin : begin + _SIZE]
        _PYTHON.gauss_next = gauss
    if now[-1] != _NOTHING:
        _random.seed(0)  # it forgets the normal number
    with bits.lock:
        layout.words.raw = words


def _find_layout() -> _Layout | None:
    """Return where the states are; None if that is not as expected."""
    bits, place = _random.get_bit_generator(), _find_places()
    if place is None or type(bits) is not MT19937:
        return None
    begin, kept = place
    python, its_words = _memory_of(_PYTHON), _memory_of(_PYTHON, begin - _INDEX.size, _SIZE)
    return _Layout(begin, python, its_words, bits, _words_of(bits), _memory_of(_NUMPY, kept, 1))


def _memory_of(generator: object, begin: int = 0, size: int | None = None) -> _Memory:
    """Return the memory of an object after its head, or a part of it, as an array of bytes."""
    head = object.__basicsize__
    size = type(generator).__basicsize__ - head if size is None else size
    return (ctypes.c_char * size).from_address(id(generator) + head + begin)


def _words_of(bits: MT19937) -> _Memory:
    """Return the memory of the state of a generator of bits of NumPy."""
    return (ctypes.c_char * _SIZE).from_address(bits.ctypes.state_address)


@functools.cache
def _find_places() -> tuple[int, int] | None:
    """Return where Python's words begin, and which byte of NumPy's generator says what it keeps."""
    if type(_PYTHON) is not random.Random or type(_NUMPY) is not RandomState:
        return None
    try:
        begin, kept = _find_words(), _find_kept()
        if begin is None or kept is None:
            return None
        made, bits = random.Random(1), MT19937(1)
        its_words = _memory_of(made, begin - _INDEX.size, _SIZE)
        own = RandomState(bits)
        can_be = _can_be_put_back(its_words, lambda: [made.random() for _ in range(700)])
        can_be &= _can_be_put_back(_words_of(bits), lambda: own.random_sample(700).tolist())
        return (begin, kept) if can_be else None
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
    name, key, position, *_ = cast(
        "tuple[str, NDArray[np.uint32], int, int, float]", made.get_state()
    )
    for kept in (0, 1):
        made.set_state((name, key, position, kept, 0.0))
        seen.append(memory.raw)
    moved = [n for n, (a, b) in enumerate(zip(*seen, strict=True)) if a != b]
    return moved[0] if len(moved) == 1 and not seen[0][moved[0]] else None


def _can_be_put_back(words: _Memory, draw: Callable[[], list[float]]) -> bool:
    """Return whether a generator continues from where its words were copied."""
    before = words.raw
    first = draw()
    words.raw = before
    return first == draw() != draw()
