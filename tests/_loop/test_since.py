"""``since``: what is best, and how long a hook waits, in a phase or in the whole run."""

import io
import re

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONES = [torch.ones(1)] * 4  # the gradient is 1


def fit(state, phase, step, batches, hooks=(), **targets):
    return fl.fit(step, state, batches, hooks=hooks, phase=phase, **targets)


def test_early_stop_counts_the_evaluations_of_its_phase_or_of_the_run():
    def run(since, losses):
        values = iter(losses)
        step = fl.pipeline()(lambda model, batch: model.w * 0 + next(values))
        hook = fl.early_stop("train/loss", patience=2, since=since)
        state = fit(toy(), "a", step, ONES[:1], (hook,), epochs=2)
        return fit(state, "b", step, ONES[:1], (hook,), epochs=3)

    losses = [1.0, 1.0, 2.0, 1.5, 1.2]
    assert (run("phase", losses).epoch, run("run", losses).epoch) == (5, 3)
    assert "2 evaluations (best 1.0000, epoch 1)" in run("run", losses).stop


BY_EPOCH = fl.schedule(lambda i, total: (2, -1)[i])  # w is -2, -1, -3, -2


def two_phases(*hooks):
    step, loaders = fl.pipeline(BY_EPOCH)(toy_loss), {"train": ONES[:1], "valid": ONES[:1]}
    state = fit(toy(), "a", step, loaders, hooks, epochs=2)
    reached = state.model.w.item()
    state = fl.fit(step, state, loaders, hooks=hooks, phase="b", epochs=2)
    return reached, state


@pytest.mark.parametrize(("since", "best", "improved"), [
    ("phase", -2.0, [1, 2, 3, 4]), ("run", -1.0, [1, 2]),
])  # fmt: skip
def test_the_best_weights_and_improvements_are_those_of_the_phase_or_of_the_run(
    since, best, improved
):
    """The values rise: -2, -1; then from -1: -3, -2."""
    seen = []
    note = lambda state: seen.append(state.epoch) or state
    reached, state = two_phases(fl.restore_best("valid/loss", mode="max", since=since))
    assert (reached, state.model.w.item()) == (-1.0, best)
    two_phases(fl.when_improved("valid/loss", "max", since=since)(note))
    assert seen == improved


# --- checkpoints: the values are -2, -1; then -3, -2


@pytest.mark.parametrize(("mode", "since", "kept", "best", "of_run"), [
    ("min", "phase", [1, 3, 4], 3, 3),  # the best of each phase, and the newest
    ("min", "run", [3, 4], 3, 3), ("max", "phase", [2, 4], 4, 2), ("max", "run", [2, 4], 2, 2),
])  # fmt: skip
def test_the_best_checkpoints_are_those_of_each_phase_or_of_the_run(
    mode, since, kept, best, of_run, tmp_path
):
    hook = fl.checkpoint(tmp_path, keep=1, best="valid/loss", mode=mode, since=since)
    two_phases(fl.every(epochs=1)(hook))
    assert sorted(int(path.name[-2:]) for path in tmp_path.iterdir()) == kept
    assert fl.best(tmp_path).name == f"step-{best:08d}"  # as the hook that saved them
    assert fl.best(tmp_path, since="run").name == f"step-{of_run:08d}"
    newest = {"min": 3, "max": 4}[mode]
    assert fl.best(tmp_path, since="phase").name == f"step-{newest:08d}"


def test_the_best_is_of_the_newest_phase_that_has_a_value(tmp_path):
    step = fl.pipeline(fl.schedule(lambda i, total: (2, -1, 1)[i]))(toy_loss)  # w is -2; -4, -3
    loaders, hook = (ONES[:1], ONES[:1]), fl.checkpoint(tmp_path, keep=9, best="valid/loss")
    hooks = (fl.every(steps=1)(hook),)
    state = fl.fit(step, toy(), loaders, hooks=hooks, epochs=1)  # before any phase
    state = fit(state, "a", step, loaders, hooks, epochs=2)
    assert fl.best(tmp_path).name == "step-00000002"

    def press(state):
        raise KeyboardInterrupt

    fit(state, "b", step, (ONES, ONES), (*hooks, press), epochs=1)
    assert (fl.latest(tmp_path).name, fl.best(tmp_path).name) == ("step-00000004", "step-00000002")
    weights = tmp_path / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert fl.best(tmp_path).name == "step-00000003"


def test_a_checkpoint_names_its_phase_only_if_it_has_one(tmp_path):
    from fnloop._extensions.checkpoints.files import read_manifest

    state = toy()
    assert "phase" not in read_manifest(fl.save(state, tmp_path / "a"))
    state = fit(state, "head", fl.pipeline()(toy_loss), ONES)
    assert read_manifest(fl.save(state, tmp_path / "b"))["phase"] == "head"


# --- what is shown, and where a loss broke


@pytest.mark.parametrize(("since", "starred", "best"), [
    ("phase", ["3"], "-0.5000 at step 3"), ("run", [], "-2.0000 at step 1"),
])  # fmt: skip
def test_the_best_value_shown_is_that_of_the_phase_or_of_the_run(since, starred, best):
    step = fl.pipeline(fl.schedule(lambda i, total: (2, -1, -0.5)[i]))(toy_loss)  # -2, -1, -0.5
    loaders, shown = {"train": ONES[:1], "valid": ONES[:1]}, io.StringIO()
    state = fit(toy(), "a", step, loaders, epochs=2)
    step = fl.pipeline(fl.schedule(lambda i, total: -0.5 if i == 0 else -1))(toy_loss)  # -0.5, 0.5
    fit(state, "b", step, loaders, (fl.progress(file=shown, since=since),), epochs=2)
    assert re.findall(r"step (\d+).*valid/loss \S+\*", shown.getvalue()) == starred
    assert shown.getvalue().rstrip().endswith(f"best valid/loss {best}")


def test_a_loss_is_said_to_have_broken_in_its_phase():
    halt = fl.halt_on_nonfinite(steps=2)
    step, bad = fl.pipeline()(toy_loss), torch.tensor([float("nan")])
    state = fit(toy(), "a", step, ONES, epochs=1)
    state = fit(state, "b", step, ONES, (halt,), steps=3)  # ends with a closing record
    state = fit(state, "c", step, [ONES[0], ONES[0], bad, bad], (halt,), epochs=1)
    assert "became nan between steps 8 and 10" in state.stop
    assert state.phases[-1].step == 7
