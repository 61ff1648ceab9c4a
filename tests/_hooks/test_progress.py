"""progress: how rarely it reads from the device, how little it costs, and who shows it."""

import io
import sys
import timeit
from unittest import mock

import attrs
import pytest
import torch
from fake_terminal import Terminal
from torch.utils._python_dispatch import TorchDispatchMode

import fnloop as fl
from fnloop import Mean, RunInfo, progress
from fnloop._backend.processes import Backend
from fnloop._display import tables
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])  # each update lowers w, and so the next loss, by 1
STEP = fl.pipeline()(toy_loss)


def boundary(batch, **changes):
    """Return the state after an update in the middle of an epoch of 1000."""
    run, running = RunInfo(epochs=1, steps_per_epoch=1000), {"loss": Mean(torch.tensor(6.0), 2)}
    state = attrs.evolve(
        toy(), step=batch, batch=batch, run=run, metrics=running, events=frozenset({"update"})
    )
    return attrs.evolve(state, **changes)


# --- with several processes


@pytest.mark.parametrize("file", [Terminal, io.StringIO])
def test_only_the_main_process_shows_anything(file, clock):
    files = file(), file()
    for rank in range(2):
        hook, state = progress(file=files[rank]), boundary(1, backend=Backend("cpu", rank, 2))
        assert hook.begin(state) is state
        assert hook(state) is state
        hook.evaluating(state, "valid", 1, 2)
        hook.flush(attrs.evolve(state, stop="enough"))
        hook.close()
    assert files[0].getvalue().startswith("Toy on cpu, 1 parameter, float32, 2 processes, ")
    assert not files[1].getvalue()


# --- how often it reads from the device


class CountReads(TorchDispatchMode):
    """Counts the reads from the device: of one number, and of several at once."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        tolist = torch.Tensor.tolist

        def counted(tensor):
            self.count += 1
            return tolist(tensor)

        self.patch = mock.patch.object(torch.Tensor, "tolist", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("refresh", "most"), [(0.5, 20), (2.0, 5)])
def test_refresh_limits_the_reads_however_fast_the_updates_are(clock, refresh, most):
    hook = progress(refresh, file=Terminal())
    with CountReads() as reads:
        for batch in range(1, 641):  # ten seconds of updates
            hook(boundary(batch))
            clock.now += 1 / 64
    hook.close()
    assert reads.count == most


def count_reads(*hooks, **settings):
    """Return the number of reads in a run of 50 short epochs."""
    with CountReads() as reads:
        fl.fit(STEP, toy(), [ONE] * 2, epochs=50, hooks=hooks, **settings)
    return reads.count


def test_many_short_epochs_cause_no_more_reads(clock):
    assert count_reads() == 50  # one for each record
    assert count_reads(progress(file=Terminal())) == 51
    assert count_reads(progress(file=io.StringIO())) == 50


def test_in_a_notebook_many_short_epochs_cause_no_more_reads(monkeypatch, clock):
    monkeypatch.setattr(tables, "in_notebook", lambda: True)
    monkeypatch.setattr(tables.Display, "show", lambda self, value: None)
    assert count_reads(progress()) == 51


def test_an_evaluation_is_shown_without_a_read(clock):
    step, file = fl.pipeline()(clock.timed(toy_loss, 0.0, 1.0)), Terminal()
    loaders = ([ONE], [ONE] * 9)
    with CountReads() as reads:
        fl.fit(step, toy(), loaders, hooks=(progress(file=file),))
    assert "9/9" in file.getvalue()
    assert reads.count == 1  # of the record


def test_drawing_a_record_causes_no_read():
    every_step = {"evaluate_every": fl.every(steps=1)}
    assert count_reads(progress(file=Terminal()), **every_step) == count_reads(**every_step) == 100


def test_within_the_refresh_interval_nothing_is_drawn(clock):
    file = Terminal()
    hook = progress(file=file)
    hook(boundary(1))
    drawn = file.getvalue()
    clock.now += 0.25
    hook(boundary(2))
    assert file.getvalue() == drawn
    clock.now += 0.25
    hook(boundary(3))
    assert "3/1,000" in file.getvalue()
    hook.close()


def test_a_log_causes_no_reads(clock):
    hook = progress(file=io.StringIO())
    with CountReads() as reads:
        for batch in range(1, 10):
            hook(boundary(batch))
            clock.now += 1.0
    assert reads.count == 0


def test_it_returns_the_same_state():
    hook = progress(file=Terminal())
    for state in (boundary(1), boundary(2), boundary(3, events=frozenset())):
        assert hook(state) is state
    hook.close()


def test_close_can_be_called_at_any_time():
    hook = progress(file=Terminal())
    hook.close()
    hook(boundary(1))
    hook.close()
    hook.close()


def test_an_update_costs_next_to_nothing_when_it_is_not_time_to_draw():
    hook, state = progress(file=Terminal()), boundary(1)
    hook(state)
    took = min(timeit.repeat(lambda: hook(state), number=1000, repeat=20)) / 1000
    hook.close()
    assert took < 5e-6  # seconds; 0.2e-6 on the machine where it was written


# --- arguments


@pytest.mark.parametrize("refresh", [0.1, 0, -1.0, float("nan"), "1"])
def test_a_refresh_below_half_a_second_is_an_error(refresh):
    with pytest.raises(
        ValueError, match=r"progress expects refresh .*>= 0\.5 .*the seconds between two drawings"
    ):
        progress(refresh)


def test_the_repr_is_the_call():
    assert repr(progress()) == "progress()"
    assert repr(progress(refresh=2.0)) == "progress(refresh=2.0)"


@pytest.mark.parametrize("closed", [False, True])
def test_a_run_without_stderr_trains_in_silence(closed, monkeypatch):
    stderr = io.StringIO() if closed else None
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert fl.fit(STEP, toy(), [ONE] * 2, epochs=2).step == 4


def test_a_file_that_cannot_hold_a_name_or_is_closed_ends_no_run():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    def close(state):
        file.close()
        return state

    loaders, hooks = {"train": [ONE], "prüfung": [ONE]}, (progress(file=file),)
    assert fl.fit(STEP, toy(), loaders, epochs=2, hooks=hooks).step == 2
    assert "pr?fung/loss -2.0000*" in file.buffer.getvalue().decode()
    assert fl.fit(STEP, toy(), loaders, epochs=2, hooks=(close, progress(file=file))).step == 2
