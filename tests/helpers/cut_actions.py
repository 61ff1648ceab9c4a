"""Random programs, each cut after every action and continued with new objects, bit for bit.

    python tests/helpers/cut_actions.py --seed 7 --programs 100
    python tests/helpers/cut_actions.py --seed 7 --only 22

A run is a list of actions, and a checkpoint has what is left of it. So a program is run until one
action is done, saved, read into a new model with new loaders and hooks, and run for one more, until
nothing is left. It must end as the program that was never cut: with the same state, records, and
calls of hooks.
"""

import argparse
import contextlib
import itertools
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import random_programs as programs
from random_programs import Fault, World, draw, fresh, quiet, refusal, train, whole_run

import fnloop as fl
from fnloop._loop import run

MOST = 2000  # parts of one program


class Paused(BaseException):
    """The run was cut here, between two actions."""


@contextlib.contextmanager
def pausing(after):
    """Cut a run after a number of actions."""
    following, done = run.World.next, itertools.count()

    def next_or_pause(world):
        action = following(world)
        if action is not None and next(done) == after:
            raise Paused
        return action

    run.World.next = next_or_pause
    try:
        yield
    finally:
        run.World.next = following


def run_in_parts(program, sizes, folder, through="disk"):
    """Run a program, some actions at a time. Return its last state, and all calls of hooks."""
    state, calls = fresh(program), []
    for n, size in zip(range(MOST), sizes, strict=False):
        world = World(program)
        world.calls = calls
        try:
            with pausing(size):
                return programs.complete(world.step, train(world, state)), calls
        except Paused as pause:
            state = pause.state
        if through == "disk":
            state = fl.restore(fl.save(state, folder / f"part-{n % 2}"), fresh(program))
        elif through == "snapshot":
            state = fl.snapshot(state)
    raise Fault("it does not end")


def check_parts(program, sizes, through="disk"):
    """Raise if a program that is run in parts differs from itself."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with quiet():
        whole, world = whole_run(program)
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            found, calls = run_in_parts(program, sizes, Path(folder), through)
    programs.compare((), whole, found)
    for wanted, made in itertools.zip_longest(world.calls, calls):
        if wanted != made:
            raise Fault(f"calls: {wanted} whole, {made} in parts")
    if whole.todo != found.todo:
        raise Fault(f"todo: {whole.todo} whole, {found.todo} in parts")


def is_known(program):
    """Return whether a program may differ when it is run in parts, for a reason that is known."""
    # The planned total depends on where a run begins: an epoch that ends early moves later windows.
    moves = programs.BY_STEP in program.members and program.has("end_epoch")
    return moves or programs.KNOWN["shorter"](program, (programs.WHOLE,))


def sizes_of(seed, number):
    """Return how many actions each part has, and how a state gets from one part to the next."""
    r = random.Random(f"{seed}/{number}/parts")
    most = r.choice([1, 1, 2, 4])
    through = r.choice(["disk", "disk", "snapshot", "memory"])
    return (r.randint(1, most) for _ in itertools.count()), through


def try_program(seed, number, counts):
    """Return what is wrong with a program in parts, or None."""
    program = draw(seed, number)
    if refusal(program) is not None:
        counts["refused"] += 1
        return None
    if is_known(program):
        counts["known"] += 1
        return None
    counts["programs"] += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_parts(program, *sizes_of(seed, number))
    except Exception as error:
        if "gave no batch" in str(error) or "reuses a tensor" in str(error):
            counts["refused"] += 1
            return None
        return f"program {number} of seed {seed}: {type(error).__name__}: {error}\n  {program!r}"
    return None


def try_programs(seed, numbers):
    """Run many programs in parts. Return their faults, and what was run."""
    counts = Counter()
    found = [try_program(seed, number, counts) for number in numbers]
    return [each for each in found if each is not None], counts


def main():
    parser = argparse.ArgumentParser(description="Run random programs, cut after every action.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--only", type=int, help="the number of one program")
    given = parser.parse_args()
    began, faults, counts = time.monotonic(), 0, Counter()
    numbers = range(given.first, given.first + given.programs)
    for number in numbers if given.only is None else [given.only]:
        if (found := try_program(given.seed, number, counts)) is not None:
            faults += 1
            print(found, flush=True)
    print(*(f"{n:7,} {name}" for name, n in counts.most_common()), sep="\n")
    print(f"{faults} faults in {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
