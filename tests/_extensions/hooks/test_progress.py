"""progress: how rarely it reads from the device, who shows it, and its pace.

The pace is the rate and the time left of a run, where a whole run would show too little.
"""

import io
import sys

import attrs
import pytest
import torch
from fake_terminal import Terminal
from host_reads import CountReads
from sample_middleware import skip_negative
from toy_runs import ONE, STEP, fit, timed

import fnloop as fl
from fnloop import Mean, Record, RunInfo, progress
from fnloop._backend.processes import Backend
from fnloop._display import reprs
from fnloop._extensions import tables
from fnloop._extensions.hooks.progress import Pace
from fnloop.testing import toy


def boundary(batch, **changes):
    """Return the state after an update in the middle of an epoch of 1000."""
    run, running = RunInfo(epochs=1, steps_per_epoch=1000), {"loss": Mean(torch.tensor(6.0), 2)}
    update = {"step": batch, "batch": batch, "events": frozenset({"update"})}
    return attrs.evolve(toy(), run=run, metrics=running, **{**update, **changes})


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


@pytest.mark.parametrize(("refresh", "file", "reads"), [
    (0.5, Terminal(), 20), (2.0, Terminal(), 5), (2.0, io.StringIO(), 0),
])  # fmt: skip
def test_refresh_limits_the_reads_however_fast_the_updates_are(clock, refresh, file, reads):
    hook = progress(refresh, file=file)
    with CountReads() as found:
        for batch in range(1, 641):  # ten seconds of updates
            hook(boundary(batch))
            clock.now += 1 / 64
    hook.close()
    assert found.count == reads


def count_reads(*hooks, **settings):
    with CountReads() as reads:
        fit(*hooks, train=2, epochs=50, **settings)
    return reads.count


def test_many_short_epochs_and_their_evaluations_cause_no_more_reads(clock, monkeypatch):
    assert count_reads() == 50  # one for each record
    assert count_reads(progress(file=Terminal())) == 51
    assert count_reads(progress(file=io.StringIO())) == 50
    evaluations = {"valid": 1, "evaluate_every": fl.every(steps=1)}
    assert count_reads(**evaluations) == 100
    assert count_reads(progress(file=Terminal()), **evaluations) == 100
    monkeypatch.setattr(reprs, "in_notebook", lambda: True)
    monkeypatch.setattr(tables.Display, "show", lambda self, value: None)
    assert count_reads(progress()) == 51


def test_close_can_be_called_at_any_time():
    hook = progress(file=Terminal())
    hook.close()
    hook(boundary(1))
    hook.close()
    hook.close()


# --- where it cannot write


@pytest.mark.parametrize("closed", [False, True])
def test_a_run_without_stderr_trains_in_silence(closed, monkeypatch):
    stderr = io.StringIO() if closed else None
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert fl.fit(STEP, toy(), [ONE] * 2, epochs=2).step == 4


def test_a_file_that_cannot_hold_a_name_or_is_closed_or_full_ends_no_run():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    run = {"loaders": {"train": [ONE], "prüfung": [ONE]}, "epochs": 2}
    assert fit(progress(file=file), **run).step == 2
    assert "pr?fung/loss -2.0000*" in file.buffer.getvalue().decode()
    assert fit(lambda state: file.close() or state, progress(file=file), **run).step == 2
    assert fit(progress(file=Full()), **run).step == 2


# --- the pace


class Timed:
    """A state of a run of 10 epochs of 100 updates, whose times are given, and its pace."""

    def __init__(self, clock, device="cpu", **facts):
        facts = {"epochs": 10, "steps_per_epoch": 100, "total_steps": 1000, **facts}
        self.state = attrs.evolve(toy(), run=RunInfo(**facts), backend=Backend(device))
        self.clock, self.pace = clock, Pace(self.state)

    def update(self, updates, seconds, waits=0.0):
        """Make some updates, which take some time, and more in hooks."""
        self.clock.now += seconds + waits
        self.state.run.live.stopwatch.trained += seconds
        step, batch = self.state.step + updates, self.state.batch + updates
        self.state = attrs.evolve(self.state, step=step, batch=batch, events=frozenset({"update"}))
        return self

    def evaluate(self, seconds, *loaders):
        """Make a record, whose evaluations took some time; that of each loader may be told."""
        for loader, each in loaders:
            self.pace.begin_evaluation(loader)
            self.clock.now += each
        self.clock.now += 0.0 if loaders else seconds
        self.state.run.live.stopwatch.evaluated = seconds
        metrics = {f"{loader}/loss": 1.0 for loader, _ in loaders or [("valid", 0)]}
        record = Record(self.state.epoch, self.state.step, metrics)
        self.state = attrs.evolve(
            self.state,
            history=self.state.history.append(record),
            events=self.state.events | {"record"},
        )
        self.pace.read_records(self.state)
        return self

    def end_epoch(self, *events):
        events = frozenset({*self.state.events, "epoch", *events})
        self.state = attrs.evolve(self.state, epoch=self.state.epoch + 1, batch=0, events=events)
        return self

    def look(self):
        return self.pace.look(self.state)


@pytest.mark.parametrize(("device", "rate"), [("cpu", 10.0), ("cuda", 5.0)])
def test_hooks_count_where_they_may_wait_for_a_device_and_evaluations_never(clock, device, rate):
    run, evaluating = Timed(clock, device), Timed(clock, device)
    assert run.update(10, 1.0).look().rate == 10.0
    assert run.update(10, 1.0, waits=2.0).look().rate == pytest.approx(rate)
    assert evaluating.update(10, 1.0).look().rate == 10.0
    assert evaluating.update(10, 1.0).evaluate(5.0).look().rate == 10.0


def test_the_time_left_has_the_evaluations_to_come(clock):
    run = Timed(clock)
    for evaluations in (19, 18, 17):
        run.update(50, 50.0).evaluate(4.0)
        if run.state.batch == 100:
            run.end_epoch()
        assert run.look().left == (1000 - run.state.step) * 1.0 + evaluations * 4.0


def test_each_loader_is_expected_at_its_own_pace(clock):
    """One takes a second after every 10 updates; the other 30 seconds after every 400."""
    run = Timed(clock)
    for step in range(10, 500, 10):
        rare = [("test", 30.0)] if step % 400 == 0 else []
        run.update(10, 10.0).evaluate(1.0 + 30.0 * len(rare), ("valid", 1.0), *rare)
        left = (1000 - step) * 1.0 + (1000 - step) // 10 * 1.0
        left += 30.0 * (step >= 400)  # at 800; before 400, nothing is known of it
        assert run.look().left == pytest.approx(left), step


def test_the_first_evaluation_is_expected_again_while_it_runs(clock):
    run = Timed(clock).update(100, 100.0)
    assert run.look().left == 900.0
    run.end_epoch().pace.begin_evaluation("valid")
    clock.now += 5.0
    # 5 seconds have passed and 15 are left, and then there are nine more of 20 seconds.
    left = run.pace.look_at_evaluation(run.state, "valid", 1, 4).left
    assert left == 900.0 + 15.0 + 9 * 20.0
    assert run.pace.look_at_evaluation(run.state, "valid", 1, None).left is None
    clock.now -= 5.0
    assert run.evaluate(20.0).look().left == 900.0 + 9 * 20.0


def test_an_evaluation_at_the_start_is_expected_at_the_end_of_each_epoch(clock):
    run = Timed(clock).evaluate(4.0)
    assert run.update(50, 50.0).look().left == 950 * 1.0 + 10 * 4.0


def test_the_smaller_of_two_targets_decides(clock):
    run = Timed(clock, total_steps=150).update(100, 100.0).end_epoch("record")
    position = run.look()
    assert (position.epoch, position.done, position.total, position.left) == (1, 100, 100, 50.0)
    position = run.update(10, 10.0).look()
    assert (position.epoch, position.done, position.total) == (2, 10, 50)


def test_skipped_updates_are_updates(clock):
    """As after an overflow of fp16: nothing is applied, and the batch is gone."""
    file, step = Terminal(), timed(clock, 1.0, 0.0, skip_negative())
    state = fit(progress(file=file), step=step, loaders=[ONE, -ONE, ONE, ONE])
    assert (state.step, state.skipped) == (3, 1)
    assert "2/4  1.00 step/s" in file.getvalue()
    assert "3/4  1.00 step/s" in file.getvalue()


def test_a_hook_that_goes_back_to_a_snapshot(clock, back_once):
    file = Terminal()
    state = fit(progress(file=file), back_once, step=timed(clock, 1.0), train=6, epochs=2)
    assert (state.step, state.epoch) == (12, 2)
    assert file.lines()[-2].startswith("done: epoch 2/2, step 12, after 14s")
