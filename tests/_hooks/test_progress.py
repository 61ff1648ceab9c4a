"""progress: what a user sees, and how rarely it reads from the device."""

import io
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fnloop as fl
from fnloop import History, Mean, Record, RunInfo, progress
from fnloop._backend.launch import Backend
from fnloop._hooks import progress as progress_module
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])  # each update lowers w, and so the next loss, by 1
STEP = fl.pipeline()(toy_loss)


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self):
        return True

    def bars(self):
        """Return the last drawing of each bar."""
        return [line.rsplit("\r", 1)[-1].strip() for line in self.getvalue().split("\n")[:-1]]


@pytest.fixture(autouse=True)
def no_width(monkeypatch):
    """Make the width of the terminal unknown, so that no line is cut."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def boundary(batch, **changes):
    """Return the state after an update in the middle of an epoch of 1000."""
    run, running = RunInfo(epochs=1, steps_per_epoch=1000), {"loss": Mean(torch.tensor(6.0), 2)}
    state = attrs.evolve(
        toy(), step=batch, batch=batch, run=run, metrics=running, events=frozenset({"update"})
    )
    return attrs.evolve(state, **changes)


# --- in a log


def test_a_line_per_record():
    file = io.StringIO()
    loaders = {"train": [ONE] * 3, "valid": [ONE]}
    fl.fit(
        STEP,
        toy(),
        loaders,
        epochs=2,
        hooks=(progress(file=file),),
        evaluate_every=fl.every(steps=2),
    )
    assert file.getvalue().splitlines() == [
        "epoch 1  step 2  train/loss -0.5  valid/loss -2",
        "epoch 1  step 3  train/loss -1",  # the end of an epoch, without an evaluation
        "epoch 2  step 4  train/loss -3  valid/loss -4",
        "epoch 2  step 6  train/loss -4  valid/loss -6",
    ]


def test_numbers_have_five_digits():
    file = io.StringIO()
    fl.fit(STEP, toy(w=1 / 3), [ONE], hooks=(progress(file=file),))
    assert file.getvalue() == "epoch 1  step 1  train/loss 0.33333\n"


def test_it_writes_to_the_current_stderr(capsys):
    hook = progress()
    fl.fit(STEP, toy(), [ONE], hooks=(hook,))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "epoch 1  step 1  train/loss 0\n")


def test_it_is_one_of_the_default_hooks(capsys):
    fl.fit(STEP, toy(), [ONE])
    assert capsys.readouterr().err == "epoch 1  step 1  train/loss 0\n"
    fl.fit(STEP, toy(), [ONE], hooks=())
    assert capsys.readouterr().err == ""


# --- in a terminal


def test_a_bar_per_epoch_ends_with_its_record():
    file = Terminal()
    fl.fit(
        STEP,
        toy(lr=0.5),
        {"train": [ONE] * 3, "valid": [ONE]},
        epochs=2,
        hooks=(progress(file=file),),
    )
    first, second = file.bars()
    assert first.startswith("epoch 1/2: 100%|")
    assert "| 3/3 [" in first
    assert first.endswith("train/loss -0.5, valid/loss -1.5, lr 0.5]")
    assert second.startswith("epoch 2/2: 100%|")
    assert second.endswith("train/loss -2, valid/loss -3, lr 0.5]")


def test_an_epoch_of_one_batch_has_a_bar_too():
    file = Terminal()
    fl.fit(STEP, toy(), [ONE], epochs=2, hooks=(progress(file=file),))
    assert [bar[:16] for bar in file.bars()] == ["epoch 1/2: 100%|", "epoch 2/2: 100%|"]


def test_a_bar_counts_updates_not_batches(clock):
    file = Terminal()
    fl.fit(fl.pipeline(fl.accumulate(2))(toy_loss), toy(), [ONE] * 5, hooks=(progress(file=file),))
    (bar,) = file.bars()
    assert "| 1/3 [" in file.getvalue()  # at the first update, which took two batches
    assert "| 2/3 [" not in file.getvalue()  # the clock stands still
    assert "| 3/3 [" in bar


def test_within_an_epoch_it_shows_the_running_loss():
    file = Terminal()
    fl.fit(STEP, toy(w=2.0), [ONE] * 3, hooks=(progress(file=file),))
    assert "1/3 [" in file.getvalue()
    assert "loss 2, lr 1]" in file.getvalue()


def test_a_bar_shows_no_total_if_it_is_unknown():
    file = Terminal()
    fl.fit(STEP, toy(), lambda: (ONE for _ in range(2)), steps=2, hooks=(progress(file=file),))
    (bar,) = file.bars()
    assert bar.startswith("epoch 1: ")
    assert "%" not in bar
    assert "/" not in bar.split("[")[0]


def test_the_bar_of_a_loader_without_length_ends_at_its_number_of_batches(clock):
    file = Terminal()
    fl.fit(STEP, toy(), lambda: (ONE for _ in range(10)), epochs=2, hooks=(progress(file=file),))
    first, second = file.bars()
    assert first.startswith("epoch 1/2: 10step [")
    assert first.endswith("train/loss -4.5, lr 1]")  # the mean of 0, -1, ..., -9
    assert second.startswith("epoch 2/2: 10step [")
    assert second.endswith("train/loss -14.5, lr 1]")


@pytest.mark.parametrize("stops_first", [True, False], ids=["before", "after"])
def test_the_bar_of_a_stopped_run_ends_where_it_stopped(clock, stops_first):
    file = Terminal()
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    show = progress(file=file)
    fl.fit(STEP, toy(), [ONE] * 4, hooks=(stop, show) if stops_first else (show, stop))
    (bar,) = file.bars()
    assert "| 2/4 [" in bar
    assert bar.endswith(", train/loss -0.5, lr 1]")  # the mean of 0 and -1


@pytest.mark.parametrize("stops_first", [True, False], ids=["before", "after"])
def test_the_closing_record_of_a_stopped_run_is_printed_once(stops_first):
    file = io.StringIO()
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    show = progress(file=file)
    fl.fit(STEP, toy(), ([ONE] * 4, [ONE]), hooks=(stop, show) if stops_first else (show, stop))
    assert file.getvalue() == "epoch 1  step 2  train/loss -0.5  valid/loss -2\n"


def test_the_closing_record_of_a_finished_run_is_printed_once():
    file = io.StringIO()
    fl.fit(STEP, toy(), ([ONE] * 4, [ONE]), steps=2, hooks=(progress(file=file),))
    assert file.getvalue() == "epoch 1  step 2  train/loss -0.5  valid/loss -2\n"


def test_the_bar_of_a_run_that_ends_within_an_epoch_ends_there(clock):
    file = Terminal()
    fl.fit(STEP, toy(), [ONE] * 10, steps=4, hooks=(progress(file=file),))
    (bar,) = file.bars()
    assert "| 4/10 [" in bar
    assert bar.endswith(", train/loss -1.5, lr 1]")  # the mean of 0, -1, -2 and -3


def test_a_run_resumed_within_an_epoch_counts_from_there(clock):
    file = Terminal()
    state = fl.fit(STEP, toy(), [ONE] * 10, steps=4, hooks=())
    fl.fit(STEP, state, [ONE] * 10, epochs=1, hooks=(progress(file=file),))
    assert "| 5/10 [" in file.getvalue()
    assert "| 10/10 [" in file.bars()[0]


def test_a_run_that_is_abandoned_closes_its_bar():
    file = Terminal()
    states = fl.run(STEP, toy(), [ONE] * 3, epochs=3, hooks=(progress(file=file),))
    next(states)
    states.close()
    (bar,) = file.bars()
    assert "| 3/3 [" in bar
    assert file.getvalue().endswith("\n")


def test_an_exception_in_another_hook_closes_the_bar():
    def fail(state):
        raise RuntimeError("a bad hook")

    file = Terminal()
    with pytest.raises(RuntimeError, match="a bad hook"):
        fl.fit(STEP, toy(), [ONE] * 3, hooks=(progress(file=file), fail))
    assert "| 1/3 [" in file.bars()[0]
    assert file.getvalue().endswith("\n")


def test_an_exception_closes_the_bar_and_the_next_run_has_a_new_one():
    def loss_fn(model, batch):
        if batch < 0:
            raise RuntimeError("a bad batch")
        return model(batch).mean()

    file = Terminal()
    hook = progress(file=file)
    with pytest.raises(RuntimeError, match="a bad batch"):
        fl.fit(fl.pipeline()(loss_fn), toy(), [ONE, ONE, -ONE], hooks=(hook,))
    assert len(file.bars()) == 1
    assert file.getvalue().endswith("\n")
    fl.fit(STEP, toy(), [ONE] * 2, hooks=(hook,))
    assert len(file.bars()) == 2
    assert "| 2/2 [" in file.bars()[1]


def test_a_bar_that_is_drawn_rarely_shows_the_position_in_the_epoch(clock):
    def second(state):
        clock.now += 1.0
        return state

    file = Terminal()
    fl.fit(STEP, toy(), [ONE] * 10, hooks=(fl.every(steps=4)(progress(file=file)), second))
    assert "| 4/10 [" in file.getvalue()
    assert "| 8/10 [" in file.getvalue()


# --- in a notebook


class Cell:
    """Collects what a notebook would show: each drawing of each output, as text."""

    def __init__(self):
        self.outputs = []

    def __enter__(self):
        cell = self

        class Display:
            def show(self, value):
                assert value._repr_html_().count("<tr>") == value.html.count("<tr>")
                if not hasattr(self, "drawings"):
                    self.drawings = []
                    cell.outputs.append(self.drawings)
                self.drawings.append(repr(value).splitlines())

        self.patches = [mock.patch.object(progress_module.html, "Display", Display)]
        self.patches.append(mock.patch.object(progress_module.html, "in_notebook", lambda: True))
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()


@pytest.fixture
def cell():
    with Cell() as cell:
        yield cell


def test_a_cell_has_one_output_which_ends_as_a_table(cell, clock):
    fl.fit(STEP, toy(), {"train": [ONE] * 3, "valid": [ONE]}, epochs=2, hooks=(progress(),))
    ((first, last),) = cell.outputs  # the clock stands still
    assert first == ["epoch 1/2:  33% 1/3 [00:00<?, ?step/s, loss 0, lr 1]"]
    assert last == [
        "epoch  step  train/loss  valid/loss  seconds",
        "    1     3          -1          -3      0.0",
        "    2     6          -4          -6      0.0",
    ]


def test_in_a_cell_the_table_grows_above_the_bar(cell, clock):
    def second(state):
        clock.now += 1.0
        return state

    fl.fit(STEP, toy(), [ONE] * 4, epochs=2, hooks=(progress(), second))
    ((*_, last_but_two, last_but_one, _),) = cell.outputs
    assert [line.split()[0] for line in last_but_two] == ["epoch", "1", "epoch"]
    assert (
        last_but_two[-1] == "epoch 2/2:  75% 3/4 [00:03<00:01,  1.00step/s, loss -5, lr 1]"
    )  # the mean of -4, -5 and -6
    assert (
        last_but_one[-1] == "epoch 2/2: 100% 4/4 [00:04<00:00,  1.00step/s, train/loss -5.5, lr 1]"
    )


def test_a_cell_has_columns_for_the_metrics_of_its_own_run_only(cell, clock):
    """Even the metric of a record that is left out has its column."""
    hook, hours = progress(), 13
    state = fl.fit(STEP, toy(), {"train": [ONE], "test": [ONE]}, hooks=())
    seldom = fl.when(lambda state: state.step == hours)
    fl.fit(
        STEP,
        state,
        {"train": [ONE], "valid": [ONE]},
        epochs=26,
        hooks=(hook,),
        evaluate_every=seldom,
    )
    head, *rows = cell.outputs[0][-1]
    assert head.split() == ["epoch", "step", "train/loss", "valid/loss", "seconds"]
    assert [row.split()[0] for row in rows] == [
        *map(str, range(2, 12)),
        "…",
        *map(str, range(17, 27)),
    ]


def test_a_cell_shows_the_records_of_its_own_run_only(cell, clock):
    hook = progress()
    state = fl.fit(STEP, toy(), [ONE], epochs=2, hooks=(hook,))
    fl.fit(STEP, state, [ONE], epochs=5, hooks=(hook,))
    first, second = cell.outputs
    assert [line.split()[0] for line in first[-1]] == ["epoch", "1", "2"]
    assert [line.split()[0] for line in second[-1]] == ["epoch", "3", "4", "5"]


def test_a_cell_leaves_out_the_middle_of_a_long_run(cell, clock):
    fl.fit(STEP, toy(), [ONE], epochs=50, hooks=(progress(),))
    ((_, last),) = cell.outputs
    assert [line.split()[0] for line in last[1:]] == [
        *map(str, range(1, 11)),
        "…",
        *map(str, range(41, 51)),
    ]


def test_the_reason_of_a_stop_is_shown_below_the_bar(cell, clock):
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    fl.fit(STEP, toy(), [ONE] * 4, hooks=(progress(), stop))
    *table, bar, note = cell.outputs[0][-1]
    assert [line.split()[:3] for line in table] == [
        ["epoch", "step", "train/loss"],
        ["0", "2", "-0.5"],
    ]
    assert (bar, note) == (
        "epoch 1/1:  50% 2/4 [00:00<?, ?step/s, train/loss -0.5, lr 1]",
        "stopped: enough",
    )


def test_an_exception_leaves_the_bar_at_the_last_update(cell, clock):
    def fail(state):
        return 1 / (3 - state.step) and state

    with pytest.raises(ZeroDivisionError):
        fl.fit(STEP, toy(), [ONE] * 4, hooks=(progress(), fail))
    bar, note = cell.outputs[0][-1]
    assert bar.startswith("epoch 1/1:  75% 3/4 [")
    assert note == "the run ended here"


def test_a_run_that_is_abandoned_keeps_its_records(cell, clock):
    states = fl.run(STEP, toy(), [ONE] * 2, epochs=9, hooks=(progress(),))
    for state in states:
        if state.epoch == 2:
            break
    states.close()
    *table, _, note = cell.outputs[0][-1]
    assert [line.split()[0] for line in table] == ["epoch", "1", "2"]
    assert note == "the run ended here"


def test_in_a_notebook_it_writes_to_a_file_if_given_one(cell):
    file = io.StringIO()
    fl.fit(STEP, toy(), [ONE], hooks=(progress(file=file),))
    assert cell.outputs == []
    assert file.getvalue() == "epoch 1  step 1  train/loss 0\n"


# --- with several processes


@pytest.mark.parametrize("file", [Terminal, io.StringIO])
def test_only_the_main_process_shows_anything(file, clock):
    files = file(), file()
    for rank in range(2):
        hook = progress(file=files[rank])
        hook(
            boundary(
                1,
                backend=Backend("cpu", rank, 2),
                history=History([Record(1, 1, {})]),
                events=frozenset({"record"}),
            )
        )
        hook.close()
    assert files[0].getvalue()
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


def test_in_a_notebook_many_short_epochs_cause_no_more_reads(cell, clock):
    assert count_reads(progress()) == 51


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
    assert "3/1000 [" in file.getvalue()
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


# --- arguments


@pytest.mark.parametrize("refresh", [0.1, 0, -1.0, float("nan"), "1"])
def test_a_refresh_below_half_a_second_is_an_error(refresh):
    with pytest.raises(
        ValueError,
        match=r"progress expects refresh .*>= 0\.5 .*the seconds between two drawings",
    ):
        progress(refresh)


def test_the_repr_is_the_call():
    assert repr(progress()) == "progress()"
    assert repr(progress(refresh=2.0)) == "progress(refresh=2.0)"
