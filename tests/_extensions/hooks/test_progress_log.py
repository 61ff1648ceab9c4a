"""progress in a log: exact lines."""

import io
import math
import os
import re
import signal

import attrs
import pytest
import torch
from sample_hooks import raise_at, stop_at
from sample_steps import in_turns
from toy_runs import ONE, STEP, fit, timed

import fnloop as fl
from fnloop import progress
from fnloop.testing import toy, toy_loss


class Flushed(io.StringIO):
    """A log that knows how many of its lines can be read by now."""

    flushed = 0

    def flush(self):
        self.flushed = self.getvalue().count("\n")


def logged(*hooks, error=None, **run):
    """Return the lines of a run, and the state that an error has if one ends it."""
    file, caught = Flushed(), None
    hooks = [progress(file=file) if hook is progress else hook for hook in hooks or (progress,)]
    if error is None:
        fit(*hooks, **run)
    else:
        with pytest.raises(error) as caught:
            fit(*hooks, **run)
    lines = file.getvalue().splitlines()
    assert file.flushed == len(lines) and file.getvalue().isascii()
    assert not {"\x1b", "\r"} & set(file.getvalue())
    return lines if caught is None else (lines, caught.value.state)


# --- records


def test_a_line_per_record(clock):
    step, every = timed(clock, 1.0, 0.5), fl.every(steps=2)
    assert logged(step=step, train=3, valid=1, epochs=2, evaluate_every=every) == [
        "Toy on cpu, 1 parameter, float32, 2 epochs of 3 updates, evaluated on valid",
        "epoch 1/2  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  2.5s",
        "epoch 1/2  step 3  train/loss -1.0000  train/lr 1.0e+00  1.0s",  # an epoch's end
        "epoch 2/2  step 4  valid/loss -4.0000*  train/loss -3.0000  train/lr 1.0e+00  1.5s",
        "epoch 2/2  step 6  valid/loss -6.0000*  train/loss -4.0000  train/lr 1.0e+00  2.5s",
        "done: epoch 2/2, step 6, after 7.5s; best valid/loss -6.0000 at step 6",
    ]


def test_the_table_of_the_history_has_the_epochs_of_the_log():
    file, moment = io.StringIO(), fl.every(steps=2) | fl.at_start()
    state = fit(progress(file=file), train=3, valid=1, steps=7, evaluate_every=moment)
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


@pytest.mark.parametrize(("hooks", "run", "lines"), [
    *((hooks, {},
       ["epoch 1/1  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  0.0s",
        "stopped: enough; epoch 1/1, step 2, after 0.0s; best valid/loss -2.0000 at step 2"])
      for hooks in ((stop_at(2), progress), (progress, stop_at(2)))),
    ((progress,), {"steps": 2},
      ["epoch 1  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  0.0s",
       "done: epoch 1, step 2, after 0.0s; best valid/loss -2.0000 at step 2"]),
])  # fmt: skip
def test_the_closing_record_is_printed_once(clock, hooks, run, lines):
    assert logged(*hooks, valid=1, **run)[1:] == lines


def test_the_last_line_has_the_best_of_the_loader_that_was_given_first():
    moments = {"valid": fl.every(epochs=1), "test": fl.at_start() | fl.at_end()}
    loaders = {"train": [ONE], "valid": [ONE], "test": [2 * ONE]}
    *_, last = logged(loaders=loaders, epochs=2, evaluate_every=moments)
    assert last.endswith("; best valid/loss -2.0000 at step 2")


def measured(state):
    """Return numbers of a record: w is -1, -2, -3 after the updates, so 4, 1 and 4."""
    return {"score": float(state.model.w + 2) ** 2 * 3 + 1}


class Watching(fl.Hook):
    monitors, mode = "score/score", "max"

    def __call__(self, state):
        return state


BEST = {  # w is -1, -2, -3, so score is 4, 1, 4
    "nothing": ((), "valid/loss -3.0000 at step 3"),
    "kept": (
        (lambda d: fl.checkpoint(d, best="score/score", mode="min"),),
        "score/score 1 at step 2",
    ),
    "put back": (
        (lambda d: fl.restore_best("score/score", mode="min"),),
        "score/score 1 at step 2",
    ),
    "when improved": (
        (lambda d: fl.when_improved("score/score", mode="max")(lambda state: state),),
        "score/score 4 at step 1",
    ),
    "watched": (
        (lambda d: fl.early_stop("score/score", mode="max", patience=9),),
        "score/score 4 at step 1",
    ),
    "by a hook of one's own": ((lambda d: Watching(),), "score/score 4 at step 1"),
    "kept rather than watched": (
        (
            lambda d: fl.early_stop("valid/loss", patience=9),
            lambda d: fl.every(epochs=1)(fl.checkpoint(d, best="score/score", mode="min")),
        ),
        "score/score 1 at step 2",
    ),
    "a name of a folder": (
        (lambda d: fl.checkpoint(d, named=("score/score",)),),
        "valid/loss -3.0000 at step 3",
    ),
}


@pytest.mark.parametrize(("make", "best"), BEST.values(), ids=BEST)
def test_the_last_line_has_the_best_of_what_is_kept_or_else_watched(make, best, tmp_path):
    score = fl.measure(measured, name="score", every=fl.every(epochs=1))
    hooks = (score, progress, *(one(tmp_path) for one in make))
    *_, last = logged(*hooks, train=1, valid=1, epochs=3)
    assert last.endswith(f"; best {best}")


def test_a_resumed_run_knows_the_best_of_before(clock):
    state, loaders = fit(train=2, valid=1), ([ONE] * 2, [-ONE])
    lines = logged(state=state, loaders=loaders, epochs=2)
    assert lines[0].endswith("from step 2")
    assert lines[1].startswith("epoch 2/2  step 4  valid/loss 4.0000  train")  # no star
    assert lines[2].endswith("; best valid/loss -2.0000 at step 2")


def test_of_turns_the_losses_are_shown_and_no_mean_is_the_best(clock):
    """The heartbeat has the loss of each. Neither the mean of a model nor of an average is best."""
    step, state = in_turns(clock.timed(toy_loss, 15.0), lr=0.0)
    torch.nn.init.ones_(state.model["a"].w)
    lines = logged(state=state, step=fl.pipeline(fl.ema(0.5))(step), train=2, valid=1)
    joined = "\n".join(lines[1:-1]).replace("\n    ", "  ").splitlines()
    heartbeat, _, record = (line.split("  ") for line in joined)
    assert heartbeat[:5] == ["epoch 1/1", "50%", "step 1", "a/loss 1.0000", "b/loss 0.0000"]
    losses = ["valid/loss 0.5000", "valid/a/loss 1.0000*", "valid/b/loss 0.0000*"]
    assert record[:5] == ["epoch 1/1", "step 2", *losses]
    starred = [field.split()[0] for field in record if field.endswith("*")]
    assert starred == ["valid/a/loss", "valid/b/loss", "valid/ema/a/loss", "valid/ema/b/loss"]
    assert lines[-1] == "done: epoch 1/1, step 2, after 1m 00s"


# --- heartbeats


@pytest.mark.parametrize(("seconds", "run", "lines"), [
    ((8.0,), {"train": 10, "epochs": 90}, [
        "epoch 1/90  40%  step 4  loss -1.5000  lr 1.0e+00  8.00 s/step  1h 59m left",
        "epoch 1/90  80%  step 8  loss -3.5000  lr 1.0e+00  8.00 s/step  1h 58m left",
        "epoch 1/90  step 10  train/loss -4.5000  train/lr 1.0e+00  1m 20s"]),
    # during an evaluation
    ((1.0, 16.0), {"train": 2, "valid": 4}, [
        "epoch 1/1  step 2  valid 2/4  16.0 s/batch  32s left",
        "epoch 1/1  step 2  valid 4/4  16.0 s/batch  0s left",
        "epoch 1/1  step 2  valid/loss -2.0000*  train/loss -0.5000  train/lr 1.0e+00  1m 06s"]),
    # records of record_every are a line every ten seconds
    ((4.0,), {"train": 8, "record_every": fl.every(steps=1)}, [
        "epoch 1/1  37%  step 3  loss -2.0000  lr 1.0e+00  4.00 s/step  20s left",
        "epoch 1/1  75%  step 6  loss -5.0000  lr 1.0e+00  4.00 s/step  8s left",
        "epoch 1/1  step 8  train/loss -3.5000  train/lr 1.0e+00  32s"]),
    # a stream has neither percentages nor a time left
    ((16.0,), {"loaders": lambda: iter([ONE] * 3)}, [
        "epoch 1/1  step 2  loss -0.5000  lr 1.0e+00  16.0 s/step"]),
])  # fmt: skip
def test_a_heartbeat_where_there_is_no_record(clock, seconds, run, lines):
    assert logged(step=timed(clock, *seconds), **run)[1 : 1 + len(lines)] == lines


def test_skipped_updates_are_told_where_there_are_some(clock):
    """Nine of ten losses are NaN, and the mean of the others looks healthy."""
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        loss, aux = toy_loss(model, batch)
        return loss if len(calls) % 10 == 0 else loss * math.nan, aux

    step = fl.pipeline(fl.skip_nonfinite(99))(clock.timed(loss_fn, 2.0))
    *_, status, row, last = logged(step=step, train=20)
    assert "step 1  14 skipped  loss" in status  # the heartbeat after 30 s
    assert row.split("  ")[-2:] == ["18 skipped", "40s"]
    assert last == "done: epoch 1/1, step 2, 18 skipped, after 40s"


# --- the first line


def test_what_a_run_works_with():
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 1))
    model[0].requires_grad_(False)
    state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1), seed=0)
    step = fl.pipeline(fl.amp("bf16"))(lambda model, batch: model(batch).mean())
    x = torch.ones(1, 30)
    assert logged(step=step, loaders={"train": [x], "test": [x]}, state=state)[0] == (
        "Sequential on cpu, 1,281 parameters, 41 trained, amp bf16, 1 epoch of 1 update, "
        "evaluated on test"
    )


@pytest.mark.parametrize(("listed", "shown"), [
    ((), "amp bf16"), ((fl.amp(None),), "float32"), ((fl.amp("fp16"),), "amp fp16"),
])  # fmt: skip
def test_amp_in_the_pipeline_is_shown_and_else_what_accelerate_is_configured_for(listed, shown):
    state = toy()
    state = attrs.evolve(state, backend=attrs.evolve(state.backend, precision="bf16"))
    head = logged(step=fl.pipeline(*listed)(toy_loss), train=1, state=state)[0]
    assert head == f"Toy on cpu, 1 parameter, {shown}, 1 epoch of 1 update"


@pytest.mark.parametrize(("windows", "targets", "shown", "updates"), [
    (2, {"epochs": 3}, "3 epochs of 4 updates", 12),
    ({0: 4, 1: 2}, {"epochs": 3}, "3 epochs, 10 updates in all", 10),
    ({0: 2, 1: 4}, {"epochs": 3}, "3 epochs, 8 updates in all", 8),
    (1, {"epochs": 3, "steps": 6}, "3 epochs, 6 updates in all", 6),
    (1, {"epochs": 3, "state": 6}, "3 epochs of 8 updates, from step 6", 24),
    (1, {"loaders": lambda: iter([ONE] * 3)}, "1 epoch", 3),
])  # fmt: skip
def test_epochs_of_different_lengths_are_told_by_their_updates(windows, targets, shown, updates):
    run = {"step": fl.pipeline(fl.accumulate(windows))(toy_loss), "train": 8}
    begun = {"state": fit(**run, steps=targets["state"])} if "state" in targets else {}
    head, *_, last = logged(**{**run, **targets, **begun})
    assert head == f"Toy on cpu, 1 parameter, float32, {shown}"
    assert f"step {updates}," in last


# --- the last line


@pytest.mark.parametrize("at", [2, 3, 4])
@pytest.mark.parametrize("order", [1, -1], ids=["after", "before"])
@pytest.mark.parametrize(("error", "reason"), [
    (RuntimeError, "failed: RuntimeError: no;"), (SystemExit, "ended early:"),
    (KeyboardInterrupt, "stopped: interrupted;"),  # the run ends as after Ctrl-C
])  # fmt: skip
def test_the_last_line_has_the_step_of_the_hook_that_failed(at, order, error, reason):
    hooks = (progress, raise_at(at, error))[::order]
    raised = None if error is KeyboardInterrupt else error
    found = logged(*hooks, error=raised, train=3, valid=1, epochs=3)
    lines, state = (found, None) if raised is None else found
    assert state is None or state.step == at
    if error is KeyboardInterrupt:
        assert lines.pop().startswith("to continue: fit again with the state that was returned")
    assert lines[-1].startswith(f"{reason} epoch {1 + (at > 3)}/3, step {at}, after ")


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
    with pytest.raises(KeyboardInterrupt):
        fit(progress(file=file), step=fl.pipeline()(loss), train=3, valid=5, epochs=3)
    assert len(evaluated) == 4
    assert caplog.messages == [
        "fit: Ctrl-C ends the run after the evaluation; a second one ends it at once, and then the "
        "evaluation has no record"
    ]
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("interrupted at once: epoch 1/3, step 3, after ")


@pytest.mark.parametrize("at", [2, 4], ids=["in the middle", "at the end"])
def test_a_flush_for_sigusr1_is_not_the_end(at):
    file = io.StringIO()
    hook = progress(file=file)
    fit(hook, fl.when(lambda state: state.step == at)(hook.flush))
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["Toy", "epoch", "done:"]


# --- where it writes


def test_it_writes_to_the_current_stderr_and_is_one_of_the_default_hooks(clock, capsys):
    hook = progress()
    for hooks in ({"hooks": (hook,)}, {}):
        fl.fit(STEP, toy(), [ONE], **hooks)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.splitlines() == [
            "Toy on cpu, 1 parameter, float32, 1 epoch of 1 update",
            "epoch 1/1  step 1  train/loss 0.0000  train/lr 1.0e+00  0.0s",
            "done: epoch 1/1, step 1, after 0.0s",
        ]
    fl.fit(STEP, toy(), [ONE], hooks=())
    assert capsys.readouterr().err == ""


def test_a_long_line_is_broken_between_two_parts():
    names = {f"a_metric_of_{i}": lambda aux, batch: 0.5 for i in range(8)}
    step = fl.pipeline(fl.metric(**names))(lambda model, batch: (model.w, {}))
    *lines, _ = logged(step=step, train=1)
    row = lines[1:]
    assert all(len(line) <= 120 for line in row) and len(row) > 1
    assert all(line.startswith("    ") for line in row[1:])
    assert "  ".join(line.strip() for line in row).count("train/a_metric_of_") == 8
