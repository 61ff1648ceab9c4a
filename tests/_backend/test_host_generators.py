"""The generators of Python and NumPy are put back where they were marked, by either way."""

import random

import numpy as np
import pytest

from fnloop._backend import host_generators
from fnloop._backend.host_generators import look_at_host, mark_host

DRAWS = {
    "nothing": lambda: None,
    "a number of Python's": random.random,
    "a normal number of Python's, of two": lambda: random.gauss(0, 1),
    "as many words as Python has": lambda: random.getrandbits(32 * 624),
    "a seed of Python's": lambda: random.seed(5),
    "a number of NumPy's": np.random.rand,
    "a normal number of NumPy's, of two": np.random.randn,
    "as many words as NumPy has": lambda: np.random.bytes(4 * 624),
    "a seed of NumPy's": lambda: np.random.seed(5),
    "another generator of bits": lambda: np.random.set_bit_generator(np.random.MT19937(5)),
    "one of another kind": lambda: np.random.set_bit_generator(np.random.PCG64(5)),
}


def states():
    """Return both states as plain data, as the documented ways tell them."""
    name, key, *rest = np.random.get_state()
    return random.getstate(), (name, key.tolist(), *rest)


@pytest.fixture(params=["by a look", "as documented"])
def way(request, monkeypatch):
    own = random.getstate(), np.random.get_bit_generator(), np.random.get_state()
    if request.param == "as documented":
        monkeypatch.setattr(host_generators, "_layout", None)
        monkeypatch.setattr(host_generators, "_find_layout", lambda: None)
    yield request.param
    random.setstate(own[0])
    np.random.set_bit_generator(own[1])
    np.random.set_state(own[2])


@pytest.mark.parametrize("before", ["a seed", "a normal number is kept"])
@pytest.mark.parametrize("draw", DRAWS)
def test_generators_continue_where_they_were_marked(way, draw, before):
    random.seed(1)
    np.random.seed(1)
    if before != "a seed":
        random.gauss(0, 1)
        np.random.randn()
    expected = states()
    put_back = mark_host()
    DRAWS[draw]()
    put_back()
    assert states() == expected
    if way == "by a look":
        assert look_at_host() is not None


@pytest.mark.parametrize("draw", DRAWS)
def test_a_look_is_another_one_exactly_if_something_was_drawn(draw):
    random.seed(1)
    np.random.seed(1)
    put_back, before = mark_host(), look_at_host()
    DRAWS[draw]()
    assert (look_at_host() == before) == (draw == "nothing")
    put_back()
    assert look_at_host() == before


def test_the_second_of_two_normal_numbers_is_seen_although_it_takes_no_word():
    np.random.seed(1)
    np.random.randn()
    before = look_at_host()
    np.random.randn()
    now = look_at_host()
    assert now != before and now[:-1] == before[:-1]


def test_where_nothing_was_drawn_nothing_is_written(monkeypatch):
    np.random.seed(1)
    put_back = mark_host()
    for module, name in ((random, "setstate"), (np.random, "set_state"), (np.random, "seed")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it was written to"))
    put_back()
