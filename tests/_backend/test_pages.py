"""The allocator keeps freed memory during a run, and is set back after it."""

import contextlib
import os
import platform
import resource

import pytest
import torch

import fnloop as fl
from fnloop._backend import containers
from fnloop.testing import toy, toy_loss

CPU = torch.device("cpu")
DURING, AFTER = (containers._TRIM_THRESHOLD, 1 << 30), (containers._TRIM_THRESHOLD, 64 << 20)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(monkeypatch):
    """The settings that are given to the allocator, in a list."""
    given = []

    def mallopt(name, value):
        given.append((name, value))
        return 1

    monkeypatch.setattr(containers, "_mallopt", lambda: mallopt)
    return given


def new_pages(megabytes):
    """Return how many pages the system gives for tensors of 8 MB that live at the same time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2 << 20) for _ in range(megabytes // 8)]
    assert tensors[-1][-1] == 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ,
    reason="the setting is one of glibc",
)
def test_memory_is_used_again():
    containers._mallopt()(containers._MMAP_THRESHOLD, 1 << 17)  # as at the start of a process
    first = new_pages(160)
    with containers.reusing_pages(CPU):
        *_, last = (new_pages(160) for _ in range(5))
    assert last < first / 10


def test_the_setting_lasts_as_long_as_the_outermost_block(settings):
    with containers.reusing_pages(CPU):
        with containers.reusing_pages(CPU):
            pass
        assert settings[-1] == DURING
    assert settings[-1] == AFTER


def test_an_exception_ends_it(settings):
    with pytest.raises(ValueError, match="bad"), containers.reusing_pages(CPU):
        raise ValueError("bad")
    assert settings[-1] == AFTER
    with containers.reusing_pages(CPU):
        assert settings[-1] == DURING


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_is_forked_within_it_gives_its_memory_back(settings):
    with contextlib.ExitStack() as block:
        block.enter_context(containers.reusing_pages(CPU))
        if not (process := os.fork()):
            status = 1
            try:
                assert (settings[-1], containers._users) == (AFTER, 0)
                block.close()  # as a process that continues the run does
                with containers.reusing_pages(CPU):
                    assert settings[-1] == DURING
                status = settings[-1] != AFTER
            finally:
                os._exit(status)
        assert os.waitpid(process, 0)[1] == 0
        assert settings[-1] == DURING
    assert settings[-1] == AFTER


def test_nothing_is_set_for_a_gpu(settings):
    with containers.reusing_pages(torch.device("cuda")):
        assert settings == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_the_environment_comes_first(monkeypatch, name, value):
    monkeypatch.setattr(containers, "_mallopt", lambda: pytest.fail)
    monkeypatch.setenv(name, value)
    with containers.reusing_pages(CPU):
        pass


def test_other_settings_of_the_environment_do_not_count(monkeypatch, settings):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=2048")
    with containers.reusing_pages(CPU):
        assert settings[-1] == DURING


@pytest.mark.parametrize("mallopt", [None, lambda name, value: 0], ids=["missing", "refuses"])
def test_a_library_without_the_setting_is_left_as_it_is(monkeypatch, mallopt):
    monkeypatch.setattr(containers, "_mallopt", lambda: mallopt)
    with containers.reusing_pages(CPU):
        assert containers._users == 0


def call_fit(step, look):
    fl.fit(step, toy(), [torch.ones(1)] * 2, hooks=[look])


def call_run(step, look):
    for _ in fl.run(step, toy(), [torch.ones(1)], epochs=2, hooks=[look]):
        pass


def call_evaluate(step, look):
    fl.evaluate(step, toy(), (look(torch.ones(1)) for _ in range(2)))


def call_predict(step, look):
    [*fl.predict(lambda model, batch: look(batch), toy(), [torch.ones(1)] * 2)]


@pytest.mark.parametrize("call", [call_fit, call_run, call_evaluate, call_predict])
def test_it_is_set_in_runs_and_evaluations(settings, call):
    seen = []

    def look(value):
        seen.append(settings[-1])
        return value

    call(fl.pipeline()(toy_loss), look)
    assert seen == [DURING] * 2
    assert settings[-1] == AFTER
