"""A full disk is an error, and the previous checkpoint stays."""

import contextlib
import errno
import os

import pytest
from killed_run import toy_fit

import fnloop as fl
from fnloop._checkpoint import files
from fnloop.testing import assert_same, stochastic


def names_in(folder):
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


resource = pytest.importorskip("resource", reason="this system has no fork, signals and limits")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("call", ["save_file", pytest.param("fsync", marks=pytest.mark.slow)])
def test_any_failed_write_is_raised_and_the_previous_checkpoint_stays(
    call, background, tmp_path, monkeypatch
):
    problem = stochastic()
    whole, every, last = toy_fit(problem, problem.state()), 5, 14
    saves = [*range(every, last, every), last]

    def run(n):
        """Train while the n-th call fails; return the folder, the error, the number of calls."""
        folder, calls, state = tmp_path / str(n), [], problem.state()
        fl.checkpoint(folder).begin(state)  # claims it, which is not counted

        def failing(*args, **kwargs):
            calls.append(args)
            if len(calls) == n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        hook = fl.every(steps=every)(fl.checkpoint(folder, keep=10, background=background))
        place = files if call == "save_file" else files.os
        original = getattr(place, call)
        with monkeypatch.context() as patch:
            patch.setattr(place, call, failing)
            try:
                assert_same(toy_fit(problem, state, hooks=(hook,)), whole)
            except OSError as error:
                return folder, error, len(calls)
            return folder, None, len(calls)

    folder, error, calls = run(0)
    assert error is None and names_in(folder) == {f"step-{step:08d}" for step in saves}
    each, rest = divmod(calls, len(saves))
    assert rest == 0
    for n in range(1, calls + 1):
        folder, error, _ = run(n)
        place, within = divmod(n - 1, each)
        there = (
            [*saves[:place], saves[place]]
            if call == "fsync" and within == each - 1
            else saves[:place]
        )
        assert error is not None and error.errno == errno.ENOSPC
        found = names_in(folder) - {".run"}  # the claim, until the first save is complete
        assert found == {f"step-{step:08d}" for step in there}, (
            "an earlier checkpoint is missing, or a partial one is there"
        )
        newest = fl.latest(folder)
        assert (newest and newest.name) == (f"step-{there[-1]:08d}" if there else None)

        # In the background: at the first boundary after the writer failed
        surfaces = error.state.step
        assert saves[place] <= surfaces <= saves[min(place + background, len(saves) - 1)]
        where = ("while in the end of the run", "while in every(steps=5)(checkpoint(")
        assert any(
            text.startswith(where) and f"step {surfaces}" in text for text in error.__notes__
        )
        assert_same(toy_fit(problem, error.state), whole)
        assert_same(toy_fit(problem, fl.resume(folder, problem.state())), whole)


@pytest.mark.parametrize("limit", [0, 1, 100, 500, 1000, 1400, 1800, 2200, 2600, 10_000])
def test_a_full_disk_raises_oserror_and_the_previous_checkpoint_stays(limit, tmp_path):
    problem = stochastic()
    first = toy_fit(problem, problem.state(), steps=1)
    second = fl.snapshot(first)
    second = toy_fit(problem, second, steps=3)
    path = fl.save(first, tmp_path / "a")
    assert max(file.stat().st_size for file in path.iterdir()) > limit
    with pytest.raises(OSError), no_file_longer_than(limit):
        fl.save(second, path)
    assert names_in(tmp_path) == {"a"}
    assert_same(fl.restore(path, problem.state()), first)
    fl.save(second, path)
    assert_same(fl.restore(path, problem.state()), second)


@contextlib.contextmanager
def no_file_longer_than(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
