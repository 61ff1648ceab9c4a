"""progress in a log: exact lines."""

import io
import math
import os
import re
import signal

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import progress
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])  # each update lowers w, and so the next loss, by 1
STEP = fl.pipeline()(toy_loss)


class Flushed(io.StringIO):
    """A log that knows how many of its lines can be read by now."""

    flushed = 0

    def flush(self):
        self.flushed = self.getvalue().count("\n")


def logged(step, loaders, state=None, hooks=(), **settings):
    """Return the lines of a run."""
    file = Flushed()
    fl.fit(step, state or toy(), loaders, hooks=(progress(file=file), *hooks), **settings)
    lines = file.getvalue().splitlines()
    assert file.flushed == len(lines)
    return lines


def test_a_line_per_record(clock):
    step, loaders = fl.pipeline()(clock.timed(toy_loss, 1.0, 0.5)), ([ONE] * 3, [ONE])
    assert logged(step, loaders, epochs=2, evaluate_every=fl.every(steps=2)) == [
        "Toy on cpu, 1 parameter, float32, 2 epochs of 3 updates, evaluated on valid",
        "epoch 1/2  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  2.5s",
        "epoch 1/2  step 3  train/loss -1.0000  train/lr 1.0e+00  1.0s",  # an epoch's end
        "epoch 2/2  step 4  valid/loss -4.0000*  train/loss -3.0000  train/lr 1.0e+00  1.5s",
        "epoch 2/2  step 6  valid/loss -6.0000*  train/loss -4.0000  train/lr 1.0e+00  2.5s",
        "done: epoch 2/2, step 6, after 7.5s; best valid/loss -6.0000 at step 6",
    ]


def test_the_table_of_the_history_has_the_epochs_of_the_log():
    loaders, moment = ([ONE] * 3, [ONE]), fl.every(steps=2) | fl.at_start()
    file = io.StringIO()
    state = fl.fit(
        STEP, toy(), loaders, steps=7, evaluate_every=moment, hooks=(progress(file=file),)
    )
    log = [line.split() for line in file.getvalue().splitlines()[1:-1]]
    # At the start, at steps 2, 3 (the end of epoch 1), 4, 6 (the end of epoch 2), and 7 (closing).
    expected = [0, 1, 1, 2, 2, 3]
    assert [int(words[1].split("/")[0]) for words in log] == expected
    shown = lambda history: [int(row.split()[0]) for row in repr(history).splitlines()[2:]]
    assert shown(state.history) == expected
    assert shown(state.history[3:]) == expected[3:] and shown(state.history[::-1]) == expected[::-1]
    cells = re.findall(r"<tr[^>]*><td[^>]*>(\d+)<", state.history._repr_html_())
    assert [int(cell) for cell in cells] == expected
    # Records themselves, and what is made of them for programs, count epochs that were completed.
    completed = [0, 0, 1, 1, 2, 2]
    assert [record.epoch for record in state.history] == completed
    assert [row["epoch"] for row in state.history.to_dicts()] == completed


def test_a_heartbeat_when_there_is_no_record(clock):
    step = fl.pipeline()(clock.timed(toy_loss, 8.0))
    assert logged(step, [ONE] * 10, epochs=90)[1:4] == [
        "epoch 1/90  40%  step 4  loss -1.5000  lr 1.0e+00  8.00 s/step  1h 59m left",
        "epoch 1/90  80%  step 8  loss -3.5000  lr 1.0e+00  8.00 s/step  1h 58m left",
        "epoch 1/90  step 10  train/loss -4.5000  train/lr 1.0e+00  1m 20s",
    ]


def test_a_heartbeat_during_an_evaluation(clock):
    step = fl.pipeline()(clock.timed(toy_loss, 1.0, 16.0))
    assert logged(step, ([ONE] * 2, [ONE] * 4))[1:4] == [
        "epoch 1/1  step 2  valid 2/4  16.0 s/batch  32s left",
        "epoch 1/1  step 2  valid 4/4  16.0 s/batch  0s left",
        "epoch 1/1  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  1m 06s",
    ]


def test_records_of_record_every_are_a_line_every_ten_seconds(clock):
    step = fl.pipeline()(clock.timed(toy_loss, 4.0))
    lines = logged(step, [ONE] * 8, record_every=fl.every(steps=1))
    assert lines[1:4] == [
        "epoch 1/1  37%  step 3  loss -2.0000  lr 1.0e+00  4.00 s/step  20s left",
        "epoch 1/1  75%  step 6  loss -5.0000  lr 1.0e+00  4.00 s/step  8s left",
        "epoch 1/1  step 8  train/loss -3.5000  train/lr 1.0e+00  32s",
    ]


def test_a_stream_has_neither_percentages_nor_a_time_left(clock):
    step = fl.pipeline()(clock.timed(toy_loss, 16.0))
    lines = logged(step, lambda: iter([ONE] * 3))
    assert lines[:2] == [
        "Toy on cpu, 1 parameter, float32, 1 epoch",
        "epoch 1/1  step 2  loss -0.5000  lr 1.0e+00  16.0 s/step",
    ]


def test_what_a_run_works_with(clock):
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 1))
    model[0].requires_grad_(False)
    state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1), seed=0)
    step = fl.pipeline(fl.amp("bf16"))(lambda model, batch: model(batch).mean())
    head = logged(step, {"train": [torch.ones(1, 30)], "test": [torch.ones(1, 30)]}, state)[0]
    assert head == (
        "Sequential on cpu, 1,281 parameters, 41 trained, amp bf16, 1 epoch of 1 update, "
        "evaluated on test"
    )


@pytest.mark.parametrize(("listed", "shown"), [
    ((), "amp bf16"), ((fl.amp(None),), "float32"), ((fl.amp("fp16"),), "amp fp16"),
])  # fmt: skip
def test_amp_in_the_pipeline_is_shown_and_else_what_accelerate_is_configured_for(listed, shown):
    state = toy()
    state = attrs.evolve(state, backend=attrs.evolve(state.backend, precision="bf16"))
    head = logged(fl.pipeline(*listed)(toy_loss), [ONE], state)[0]
    assert head == f"Toy on cpu, 1 parameter, {shown}, 1 epoch of 1 update"


@pytest.mark.parametrize(("windows", "shown", "updates"), [
    (2, "3 epochs of 4 updates", 12),
    ({0: 4, 1: 2}, "3 epochs, 10 updates in all", 10),
    ({0: 2, 1: 4}, "3 epochs, 8 updates in all", 8),
])  # fmt: skip
def test_epochs_of_different_lengths_are_told_by_their_updates(windows, shown, updates):
    accumulating = fl.pipeline(fl.accumulate(windows))(toy_loss)
    head, *_, last = logged(accumulating, [ONE] * 8, toy(), epochs=3)
    assert head == f"Toy on cpu, 1 parameter, float32, {shown}"
    assert f"step {updates}," in last


def test_a_run_that_continues_has_epochs_of_the_same_length():
    state = fl.fit(STEP, toy(), [ONE] * 4, steps=6, hooks=())
    assert "3 epochs of 4 updates, from step 6" in logged(STEP, [ONE] * 4, state, epochs=3)[0]


def test_skipped_updates_are_told_where_there_are_some(clock):
    """Nine of ten losses are NaN, and the mean of the others looks healthy."""
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        loss, aux = toy_loss(model, batch)
        return loss if len(calls) % 10 == 0 else loss * math.nan, aux

    step = fl.pipeline(fl.skip_nonfinite(99))(clock.timed(loss_fn, 2.0))
    *_, status, row, last = logged(step, [ONE] * 20, toy())
    assert "step 1  14 skipped  loss" in status  # the heartbeat after 30 s
    assert row.split("  ")[-2:] == ["18 skipped", "40s"]
    assert last == "done: epoch 1/1, step 2, 18 skipped, after 40s"


def test_the_last_line_has_the_best_of_the_loader_that_was_given_first():
    moments = {"valid": fl.every(epochs=1), "test": fl.at_start() | fl.at_end()}
    loaders = {"train": [ONE], "valid": [ONE], "test": [2 * ONE]}
    *_, last = logged(STEP, loaders, toy(), epochs=2, evaluate_every=moments)
    assert last.endswith("; best valid/loss -2.0000 at step 2")


def test_a_run_that_ends_by_its_updates_tells_them():
    head = logged(STEP, [ONE] * 4, toy(), epochs=3, steps=6)[0]
    assert head.endswith("3 epochs, 6 updates in all")


@pytest.mark.parametrize("stops_first", [True, False], ids=["before", "after"])
def test_the_closing_record_of_a_stopped_run_is_printed_once(clock, stops_first):
    file = io.StringIO()
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    show = progress(file=file)
    fl.fit(STEP, toy(), ([ONE] * 4, [ONE]), hooks=(stop, show) if stops_first else (show, stop))
    assert file.getvalue().splitlines()[1:] == [
        "epoch 1/1  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  0.0s",
        "stopped: enough; epoch 1/1, step 2, after 0.0s; best valid/loss -2.0000 at step 2",
    ]


def test_the_closing_record_of_a_finished_run_is_printed_once(clock):
    assert logged(STEP, ([ONE] * 4, [ONE]), steps=2)[1:] == [
        "epoch 1  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  0.0s",
        "done: epoch 1, step 2, after 0.0s; best valid/loss -2.0000 at step 2",
    ]


def test_nan_says_why_it_stopped(clock):
    lines = logged(STEP, [ONE * float("nan")] * 3, epochs=9, hooks=(fl.halt_on_nonfinite(),))
    assert lines[-1].startswith("stopped: halt_on_nonfinite: the training loss became nan")


def test_an_exception_leaves_a_last_line(clock):
    file = io.StringIO()
    with pytest.raises(ZeroDivisionError):
        fl.fit(
            STEP,
            toy(),
            [ONE] * 3,
            hooks=(progress(file=file), lambda state: (state.step < 2 and state) or 1 / 0),
        )
    assert file.getvalue().splitlines()[1:] == [
        "failed: ZeroDivisionError: division by zero; epoch 1/1, step 2, after 0.0s"
    ]


def test_a_resumed_run_knows_the_best_of_before(clock):
    state = fl.fit(STEP, toy(), ([ONE] * 2, [ONE]), hooks=())
    lines = logged(STEP, ([ONE] * 2, [-ONE]), state, epochs=2)
    assert lines[0].endswith("from step 2")
    assert lines[1].startswith("epoch 2/2  step 4  valid/loss 4.0000  train")  # no star
    assert lines[2].endswith("; best valid/loss -2.0000 at step 2")


def test_a_log_that_cannot_be_written_does_not_end_the_run(clock):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    assert fl.fit(STEP, toy(), [ONE] * 2, hooks=(progress(file=Full()),)).step == 2


def test_sigusr1_is_not_the_end(clock):
    """A hook's flush is called then, too."""
    file = io.StringIO()
    hook = progress(file=file)
    middle = fl.when(lambda state: state.step == 2)(hook.flush)
    fl.fit(STEP, toy(), [ONE] * 4, hooks=(hook, middle))
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["Toy", "epoch", "done:"]


def test_sigusr1_at_the_end_does_not_end_it_twice(clock):
    file = io.StringIO()
    hook = progress(file=file)
    last = fl.when(lambda state: state.step == 4)(hook.flush)
    fl.fit(STEP, toy(), [ONE] * 4, hooks=(hook, last))
    assert file.getvalue().count("done") == 1


def test_there_are_no_escape_codes(clock):
    file = io.StringIO()
    fl.fit(STEP, toy(), ([ONE], [ONE]), epochs=3, hooks=(progress(file=file),))
    assert file.getvalue().isascii()
    assert not {"\x1b", "\r"} & set(file.getvalue())


def test_it_writes_to_the_current_stderr(clock, capsys):
    hook = progress()
    fl.fit(STEP, toy(), [ONE], hooks=(hook,))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "Toy on cpu, 1 parameter, float32, 1 epoch of 1 update",
        "epoch 1/1  step 1  train/loss 0.0000  train/lr 1.0e+00  0.0s",
        "done: epoch 1/1, step 1, after 0.0s",
    ]


def test_it_is_one_of_the_default_hooks(capsys):
    fl.fit(STEP, toy(), [ONE])
    assert "epoch 1/1  step 1  train/loss 0.0000" in capsys.readouterr().err
    fl.fit(STEP, toy(), [ONE], hooks=())
    assert capsys.readouterr().err == ""


class Broken(Exception):
    pass


def last_line(hooks, steps=3, error=Broken, loss=toy_loss, **given):
    """Return the last line of a run that an error ends, and the state that the error has."""
    file = io.StringIO()
    hooks = [progress(file=file) if hook is progress else hook for hook in hooks]
    loaders = {"train": [ONE] * steps, "valid": [ONE]}
    with pytest.raises(error) as caught:
        fl.fit(fl.pipeline()(loss), toy(), loaders, epochs=3, hooks=hooks, **given)
    return file.getvalue().splitlines()[-1], caught.value.state


def breaking(at, error=Broken):
    def hook(state):
        if state.step == at:
            raise error
        return state

    return hook


@pytest.mark.parametrize("moment", [fl.every(epochs=1), fl.every(steps=1), fl.every(steps=2)])
def test_the_last_line_has_the_step_of_the_evaluation_that_failed(moment):
    def loss(model, batch):
        if not model.training:
            raise Broken("no")
        return toy_loss(model, batch)

    line, state = last_line([progress], loss=loss, evaluate_every=moment)
    steps = {"every(epochs=1)": 3}.get(repr(moment), moment.steps)
    assert state.step == steps
    assert line.startswith(f"failed: Broken: no; epoch 1/3, step {steps}, after ")


@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(("error", "reason"), [
    (Broken, "failed: Broken;"), (KeyboardInterrupt, "stopped: interrupted;"),
    (SystemExit, "ended early:"),
])  # fmt: skip
def test_the_last_line_has_the_step_of_the_hook_that_failed(at, order, error, reason):
    hooks = [progress, breaking(at, error)][:: 1 if order == "after" else -1]
    if error is KeyboardInterrupt:  # where no handler is installed, the run ends as after Ctrl-C
        file = io.StringIO()
        hooks = [progress(file=file) if hook is progress else hook for hook in hooks]
        state = fl.fit(STEP, toy(), {"train": [ONE] * 3, "valid": [ONE]}, epochs=3, hooks=hooks)
        line = file.getvalue().splitlines()[-1]
    else:
        line, state = last_line(hooks, error=error)
    epoch = 1 + (at > 3)
    assert state.step == at
    assert line.startswith(f"{reason} epoch {epoch}/3, step {at}, after ")


def test_a_second_ctrl_c_in_an_evaluation_is_told(caplog):
    """The first one is told too, because the run ends only after the evaluation."""
    evaluated = []

    def loss(model, batch):
        if not model.training:
            evaluated.append(1)
            if len(evaluated) in (1, 4):
                os.kill(os.getpid(), signal.SIGINT)
        return toy_loss(model, batch)

    file = io.StringIO()
    loaders = {"train": [ONE] * 3, "valid": [ONE] * 5}
    with pytest.raises(KeyboardInterrupt):
        fl.fit(fl.pipeline()(loss), toy(), loaders, epochs=3, hooks=(progress(file=file),))
    assert len(evaluated) == 4
    assert caplog.messages == [
        "fit: Ctrl-C ends the run after the evaluation; a second one ends it at once, and then the "
        "evaluation has no record"
    ]
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("interrupted at once: epoch 1/3, step 3, after ")


def test_of_turns_the_losses_are_shown_and_not_their_mean(clock):
    """The bar and the heartbeat have the loss of each, and no mean is the best."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in "dg"})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.0) for name in "dg"}
    torch.nn.init.ones_(model["d"].weight), torch.nn.init.zeros_(model["g"].weight)

    def turn(name):
        def loss_fn(model, x):
            clock.now += 15 * model.training
            return model[name](x).mean()

        return fl.pipeline()(loss_fn)

    state = fl.TrainState.create(model, optimizers, seed=0)
    step = fl.alternate({name: turn(name) for name in "dg"})
    x = torch.ones(1, 1)
    lines = logged(step, {"train": [x] * 2, "valid": [x]}, state)
    heartbeat, _, record = (line.split("  ") for line in lines[1:-1])
    assert heartbeat[:5] == ["epoch 1/1", "50%", "step 1", "d/loss 1.0000", "g/loss 0.0000"]
    losses = ["valid/loss 0.5000", "valid/d/loss 1.0000*", "valid/g/loss 0.0000*"]
    assert record[:5] == ["epoch 1/1", "step 2", *losses]
    assert lines[-1] == "done: epoch 1/1, step 2, after 1m 00s"


def test_the_last_line_of_a_failure_counts_skipped_updates():
    def loss(model, batch):
        if model.w.item() <= -2:
            raise Broken("no")
        return toy_loss(model, batch)

    file, nan = io.StringIO(), torch.tensor([math.nan])
    step = fl.pipeline(fl.skip_nonfinite())(loss)
    with pytest.raises(Broken):
        fl.fit(step, toy(), [ONE, nan, ONE, ONE], hooks=(progress(file=file),))
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("failed: Broken: no; epoch 1/1, step 2, 1 skipped, after ")
