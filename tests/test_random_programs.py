"""Random programs: no cut changes a bit. See ``random_programs.py`` for how to run more of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from random_programs import KNOWN, SMALLEST, Cut, Program, check, draw, failure, try_programs

MORE = [pytest.param(seed, 50, marks=pytest.mark.long) for seed in (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "programs"), [(1, 40), *MORE])
def test_no_cut_changes_a_bit_of_random_programs(seed, programs):
    found, counts = try_programs(seed, range(programs))
    assert not found, "\n\n".join(map(str, found))
    assert counts["programs"] > programs / 2 and counts["runs with cuts"] > programs, counts


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_programs_that_have_failed(name):
    """Those that are known still do, so that what has been mended is taken out of ``KNOWN``."""
    program, *cuts = SMALLEST[name]
    if name not in KNOWN:
        check(program, cuts)
        return
    assert KNOWN[name](program, cuts)
    assert failure(program, cuts) is not None, f"{name} is mended: take it out of KNOWN"


def test_a_program_is_a_function_of_its_two_numbers():
    assert draw(7, 3) == draw(7, 3) != draw(7, 4)
    program = draw(7, 3)
    assert eval(repr(program), {"Program": Program}) == program


@pytest.mark.long
@pytest.mark.slow
def test_another_process_draws_the_same_programs():
    script = "from random_programs import draw; print([draw(7, n) for n in range(50)])"
    asked = [sys.executable, "-c", script]
    there = Path(__file__).parent / "helpers"
    found = subprocess.run(asked, cwd=there, check=True, capture_output=True, text=True).stdout
    assert found == f"{[draw(7, n) for n in range(50)]}\n"


def test_programs_that_differ_are_found():
    """A hook that counts in a list of its own, not in the state, differs after a kill."""
    hidden = (
        "(lambda seen: lambda s: seen.append(1) or attrs.evolve(s, extra={'n': len(seen)}))([])"
    )
    program = Program(valid={}, hooks=(hidden,))
    check(program)
    check(program, (Cut("press", "training", 3),))
    error = failure(program, (Cut("kill", "training", 3, "disk"),))
    assert str(error).startswith("extra.n: 8 whole, 5 cut")
