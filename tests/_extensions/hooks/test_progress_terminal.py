"""progress in a terminal: the lines that a user sees."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_terminal import Terminal
from sample_hooks import raise_at, stop_at
from toy_runs import ONE, STEP, fit, timed

import fnloop as fl
from fnloop import progress
from fnloop.testing import toy, toy_loss

ROOT = str(Path(__file__).parents[2])


def shown(*hooks, file=None, **run):
    file = Terminal() if file is None else file
    fit(progress(file=file), *hooks, **run)
    return file


def drawings(file):
    return [part for part in file.drawings() if "━" in part]


def stream():
    while True:
        yield ONE


# --- the table


def test_a_line_per_record_below_what_the_run_works_with(clock, monkeypatch):
    """The best so far has a star."""
    monkeypatch.setenv("COLUMNS", "100")
    loaders = {"train": [ONE] * 3, "valid": [ONE], "test": [-ONE]}
    assert shown(step=timed(clock, 1.0, 1.0), loaders=loaders, epochs=2).lines() == [
        "Toy on cpu, 1 parameter, float32, 2 epochs of 3 updates, evaluated on valid, test",
        "            │ valid    │ test     │ train",
        "epoch  step │    loss  │    loss  │    loss       lr │ time",
        "    1     3 │ -3.0000* │  3.0000* │ -1.0000  1.0e+00 │ 5.0s",
        "    2     6 │ -6.0000* │  6.0000  │ -4.0000  1.0e+00 │ 5.0s",
        "done: epoch 2/2, step 6, after 10s; best valid/loss -6.0000 at step 6",
        "",
    ]


HEAD = ["", "epoch step"]


@pytest.mark.parametrize(("run", "moment", "rows"), [
    # new columns have a new head
    ({"train": 2, "epochs": 3}, fl.every(epochs=2), [*HEAD, "1 2", *HEAD, "2 4", "3 6"]),
    # a record between two epochs has the number of the running one
    ({"train": 4, "epochs": 2}, fl.every(epochs=0.5), [*HEAD, "1 2", "1 4", "2 6", "2 8"]),
    ({"train": 2}, fl.every(epochs=1) | fl.at_start(), [*HEAD, "0 0", *HEAD, "1 2"]),
    # a stream that evaluates nothing has a line per interval
    ({"loaders": stream, "steps": 4, "record_every": fl.every(steps=2)}, fl.every(epochs=1),
        [*HEAD, "1 2", "1 4", *HEAD, "1 4"]),
])  # fmt: skip
def test_the_rows_of_a_run(clock, run, moment, rows):
    lines = shown(step=timed(clock, 1.0), valid=1, evaluate_every=moment, **run).lines()
    assert [" ".join(line.split("│")[0].split()) for line in lines[1:-2]] == rows
    seconds = 2.0 if "loaders" in run else None
    assert seconds is None or {line.split("│")[-1] for line in lines[3:5]} == {" 2.0s"}


def test_records_of_record_every_update_the_bar_and_are_a_line_every_ten_seconds(clock):
    file = shown(step=timed(clock, 1.0), train=5, record_every=fl.every(steps=1))
    assert len([line for line in file.lines() if "│" in line]) == 3  # a head and the epoch
    losses = [line.split("loss ")[1].split()[0] for line in drawings(file)[:4]]
    assert losses == ["0.0000", "-1.0000", "-2.0000", "-3.0000"]  # of that update
    step, often = timed(clock, 4.0, 2.0), fl.every(steps=1)
    file = shown(step=step, train=7, valid=1, epochs=2, record_every=often)
    assert file.lines()[1:-2] == [
        "            │ train",
        "epoch  step │    loss       lr │  time",
        "    1     3 │ -2.0000  1.0e+00 │ 12.0s",
        "    1     6 │ -5.0000  1.0e+00 │ 24.0s",
        "            │ valid    │ train",
        "epoch  step │    loss  │    loss       lr │  time",
        "    1     7 │ -7.0000* │ -3.0000  1.0e+00 │ 30.0s",  # of the whole epoch
        "    2    10 │          │ -9.0000  1.0e+00 │ 12.0s",
        "            │ valid    │ train",  # a number that needs more room moves the columns
        "epoch  step │    loss  │     loss       lr │  time",
        "    2    13 │          │ -12.0000  1.0e+00 │ 24.0s",
        "            │ valid     │ train",
        "epoch  step │     loss  │     loss       lr │  time",
        "    2    14 │ -14.0000* │ -10.0000  1.0e+00 │ 30.0s",
    ]


# --- the bar


def test_a_bar_is_there_before_the_first_update_and_an_evaluation_has_its_own(clock):
    file, seen = Terminal(), []
    look = lambda model, batch: seen.append(file.lines()[-1]) or toy_loss(model, batch)
    shown(file=file, step=fl.pipeline()(clock.timed(look, 1.0, 4.0)), train=2, valid=4)
    assert seen[0] == "epoch 1/1    0% ──────────  0/2"
    lines = [line for line in drawings(file) if "valid " in line]
    assert lines[0] == "epoch 1/1  valid   25% ━━────────  1/4  4.00 s/batch  12s left"
    parts = dict.fromkeys(line.split("%")[0][-3:] for line in lines)
    assert [*parts] == [" 25", " 50", " 75", "100"]


def test_the_bar_has_the_rate_of_the_updates_and_the_time_left_of_the_run(clock):
    slow, step = fl.every(steps=5)(clock.takes(3.0)), timed(clock, 0.5, 2.0)
    file = shown(slow, step=step, train=10, valid=2, epochs=3)
    lines = [line for line in drawings(file) if "valid" not in line]
    # 30 updates of 0.5 s: nothing is known of hooks and evaluations yet
    assert lines[0] == "epoch 1/3   10% ━─────────   1/10  2.00 step/s  loss 0.0000  14s left"
    rates = {line.split("step/s")[0].split()[-1] for line in lines if "step/s" in line}
    assert rates == {"2.00"}
    # 9 updates are left, and an update takes 0.5 s and 3 s of every fifth; and an evaluation of 4 s
    (last,) = [line for line in lines if line.startswith("epoch 3/3   10%")]
    assert last.endswith("14s left")


def test_after_a_resume_the_rate_is_that_of_the_new_updates(clock):
    """It counts updates, not batches."""
    step = timed(clock, 0.5, 0.0, fl.accumulate(2))
    file = shown(step=step, state=fit(step=step, train=20, steps=4), train=20, epochs=1)
    assert drawings(file)[0] == "epoch 1/1   40% ━━━━──────   4/10"  # before the first update
    assert drawings(file)[1].startswith("epoch 1/1   50% ━━━━━─────   5/10  1.00 step/s")
    assert drawings(file)[1].endswith("5s left")
    assert "from step 4" in file.lines()[0]


def test_the_end_of_a_bar_without_a_length_of_the_loader(clock):
    """It is that of a run to a step, or of the first epoch."""
    ten = lambda: iter([ONE] * 10)
    file = shown(step=timed(clock, 1.0), loaders=ten, steps=4)
    assert drawings(file)[0].startswith("epoch 1   25% ")
    assert drawings(file)[0].endswith("3s left")
    assert file.lines()[0] == "Toy on cpu, 1 parameter, float32, to step 4"
    file = shown(step=timed(clock, 1.0), loaders=ten, epochs=2)
    first, *_, last = [line for line in file.drawings() if "step/s" in line]
    assert first == "epoch 1/2  1  1.00 step/s  loss 0.0000  lr 1.0e+00"
    assert last.startswith("epoch 2/2   90% ━━━━━━━━━─   9/10  1.00 step/s")


def test_a_bar_is_never_wider_than_the_terminal_and_follows_it(clock, monkeypatch):
    for width in (79, 60, 50, 40, 30, 20, 10):
        monkeypatch.setenv("COLUMNS", str(width))
        file = shown(step=timed(clock, 1.0, 1.0), train=10, valid=2, epochs=3)
        assert all(len(part) <= width - 3 for part in file.drawings() if "\n" not in part)
    monkeypatch.setenv("COLUMNS", "80")
    grow = lambda state: monkeypatch.setenv("COLUMNS", "160") or state
    file = shown(fl.when(lambda state: state.step == 2)(grow), step=timed(clock, 1.0))
    assert [line.count("━") + line.count("─") for line in drawings(file)[:3]] == [10, 10, 40]


# --- how it ends


def test_the_reason_of_a_stop_or_a_failure_is_the_last_line_and_no_bar_is_left(clock):
    lines = shown(stop_at(2), step=timed(clock, 1.0), epochs=3).lines()
    row = "    1     2 │ -0.5000  1.0e+00 │ 2.0s"
    assert lines[-3:] == [row, "stopped: enough; epoch 1/3, step 2, after 2.0s", ""]
    file = Terminal()
    with pytest.raises(RuntimeError) as raised:
        shown(raise_at(3, RuntimeError), file=file, step=timed(clock, 0.1), epochs=2)
    assert file.lines()[1:] == ["failed: RuntimeError: no; epoch 1/2, step 3, after 0.3s", ""]
    assert "epoch 1, batch 3, step 3" in raised.value.__notes__[0]  # the same numbers


def test_a_run_that_is_abandoned_leaves_no_bar(clock):
    file = Terminal()
    states = fl.run(STEP, toy(), [ONE] * 3, epochs=3, hooks=(progress(file=file),))
    next(states)
    assert file.lines()[-1].startswith("epoch 2/3    0% ─")
    states.close()
    assert file.lines()[-2:] == ["ended early: epoch 1/3, step 3, after 0.0s", ""]


def test_the_next_run_of_a_hook_begins_again_and_two_terminals_have_a_table_each(clock):
    files = Terminal(), Terminal()
    hooks = [progress(file=file) for file in files]
    fit(*hooks, state=fit(*hooks), epochs=2)
    for file in files:
        assert [line.split()[0] for line in file.lines()[:-1]] == [
            *("Toy", "│", "epoch", "1", "done:"),
            *("Toy", "│", "epoch", "2", "done:"),
        ]


# --- colors and letters


def test_colors_unless_there_is_no_color(clock, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for value, colored in ((None, True), ("1", False), ("", True)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if value is not None:
            monkeypatch.setenv("NO_COLOR", value)
        assert bool(re.search(r"\x1b\[\d+m", shown(valid=1).getvalue())) is colored


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "no such encoding"])
def test_a_terminal_without_unicode_gets_ascii_and_a_question_mark(clock, encoding):
    console = type("Console", (Terminal,), {"encoding": encoding})
    file = shown(file=console(), train=1, valid=1)
    assert file.getvalue().isascii()
    assert "    1     1 | -1.0000* |  0.0000  1.0e+00 | 0.0s" in file.lines()
    file = shown(file=console(), loaders={"train": [ONE], "prüfung": [ONE]})
    letter = "?" if encoding == "ascii" else "ü"
    assert f"            | pr{letter}fung  | train" in file.lines()


def test_a_dumb_terminal_gets_a_log(clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = shown(train=1)
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    assert "epoch 1/1  step 1  train/loss 0.0000  train/lr 1.0e+00  0.0s" in file.lines()


# --- in a terminal of the system

WORKERS = """
import logging, torch, fnloop as fl
from fnloop.testing import toy, toy_loss

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        print("loads", i)
        logging.warning("loads %d", i)
        return torch.ones(())

def ask(state):
    print("hello", input("your name? "))
    return state

loader = torch.utils.data.DataLoader(Data(), num_workers=2)
hooks = fl.progress(), fl.when(lambda state: state.step == 4)(ask)
fl.fit(fl.pipeline()(toy_loss), toy(), loader, hooks=hooks)
"""


@pytest.mark.slow
def test_workers_print_and_a_hook_asks():
    primary, replica = os.openpty()
    command = [sys.executable, "-c", WORKERS]
    variables = {"PYTHONPATH": ROOT, "TQDM_DISABLE": "1", "TQDM_NCOLS": "3"}  # of other bars
    streams = {"stdin": replica, "stdout": replica, "stderr": replica}
    with subprocess.Popen(command, **streams, env={**os.environ, **variables}) as process:
        os.close(replica)
        terminal = Terminal()
        with contextlib.suppress(OSError):  # the end
            while text := os.read(primary, 1024):
                terminal.write(text.decode())
                if text.endswith(b"name? "):
                    os.write(primary, b"Ann\n")
    os.close(primary)
    lines = [line for line in terminal.lines() if line]
    printed = [line for i in range(4) for line in (f"WARNING:root:loads {i}", f"loads {i}")]
    assert process.returncode == 0
    assert sorted(line for line in lines if "loads" in line) == sorted(printed)
    assert "epoch 1/1   25% ━━────────  1/4  " in terminal.getvalue()
    asked = lines.index("your name? Ann")
    assert lines[asked + 1] == "hello Ann"
    assert lines[-1].startswith("done: epoch 1/1, step 4")
