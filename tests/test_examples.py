"""The examples run to their end, and reach what they promise."""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import launch
import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"
SETTINGS = {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}


def start(name: str, *arguments: str, launcher: tuple[str, ...] = ("-W", "error")) -> str:
    """Run an example as a user does, and return what it prints."""
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | SETTINGS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(name: str, *arguments: str, killed_when=None) -> str:
    """Run an example in a forked process, and return what it prints; or kill it at a moment."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, name)
        child = launch.start_script(
            EXAMPLES / name, *arguments, written=written, environment=SETTINGS
        )
        while child.is_alive():
            if killed_when and killed_when():
                child.kill()
            child.join(0.002)
        expected = -signal.SIGKILL if killed_when else 0
        assert child.exitcode == expected, written.with_suffix(".err").read_text()
        return written.with_suffix(".out").read_text()


def test_mnist_reaches_97_percent_and_draws_its_history(tmp_path):
    out = start("mnist.py", "--epochs", "5", "--out", str(tmp_path))
    best = max(accuracy for _, accuracy in accuracies(out))
    assert best >= 0.97
    assert (tmp_path / "mnist.png").stat().st_size > 10_000


def accuracies(out: str) -> list[tuple[int, float]]:
    """Return the epochs of a printed history, and the accuracy of each on the valid loader."""
    rows = re.findall(r"^ +(\d+) +\d+ │ +[\d.]+\*? +([\d.]+)", out, re.MULTILINE)
    assert re.search(r"step │ +loss +accuracy", out)
    return [(int(epoch), float(accuracy)) for epoch, accuracy in rows]


def test_text_learns():
    out = run("text.py", "--epochs", "1")
    (trained,) = re.findall(r"([\d.]+) trained", out.replace("untrained", ""))
    assert float(trained) < 2  # nats per character; 4.6 by guessing


def test_gan_draws_a_picture_per_epoch_and_resumes(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "epoch_002.png" in run("gan.py", "--epochs", "2", "--out", str(whole))
    for epochs in "12":
        resume = ("--resume", str(tmp_path / "runs"), "--out", str(parts))
        out = run("gan.py", "--epochs", epochs, *resume)
    pictures = [f"epoch_00{i}.png" for i in (1, 2)]
    for name in pictures:
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert len({(whole / name).read_bytes() for name in pictures}) == 2
    (d,) = re.findall(r"discriminator ([\d.]+)", out)
    assert float(d) < 1  # of 2 × log 2 by guessing


def test_by_hand_and_fnloop_agree():
    assert "equal" in run("by_hand.py")


ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
ACCELERATE += ("--main_process_port", "0")  # any free port


def test_many_gives_the_same_on_two_processes():
    alone = run("many.py", "--epochs", "3")
    together = start("many.py", "--epochs", "3", launcher=ACCELERATE)
    assert "on 1 process\n" in alone and "each process trained on: 12,000" in alone
    # 4,000 images in batches of 32 make 125 batches. The first process gets 63 of them in each of
    # 3 epochs, and the second 62.
    assert "on 2 processes" in together and "each process trained on: 6,048, 5,952" in together
    assert together.count("images held out") == 1  # only one of the two prints
    (one,), (two,) = (re.findall(r"held out: ([\d.]+)%", out) for out in (alone, together))
    # Of 1,000 images; sums are rounded in another order.
    assert float(two) == pytest.approx(float(one), abs=0.3)
    assert float(two) > 90


def test_many_resumes_with_another_number_of_processes(tmp_path):
    arguments = ("--resume", str(tmp_path / "runs"), "--epochs")
    assert "trained on: 2,016, 1,984" in start("many.py", *arguments, "1", launcher=ACCELERATE)
    out = run("many.py", *arguments, "2")
    assert "trained on: 4,000" in out  # one epoch was left
    assert [epoch for epoch, _ in accuracies(out)] == [1, 2]


def reached(step: int, folder: Path) -> bool:
    """Return whether there is a checkpoint of a step, or of a later one."""
    return any(int(path.name.split("-")[1]) >= step for path in folder.glob("step-*[0-9]"))


def ended(name: str, model, folder: Path) -> fl.TrainState:
    """Return the state that an example has saved last."""
    optimizer = torch.optim.AdamW(model.parameters())
    state = fl.resume(folder, fl.TrainState.create(model, optimizer, seed=0))
    return attrs.evolve(state, run_id="")


@pytest.mark.parametrize(
    ("name", "make", "kills", "phases"),
    [
        # 16, 32 and 63 updates
        (
            "progressive.py",
            "cnn_for_any_size",
            (10, 30, 80),
            ["14 pixels", "20 pixels", "28 pixels"],
        ),
        # 32, 8 and 8 updates
        (
            "finetune.py",
            "model_in_two_parts",
            (20, 36, 44),
            ["0 to 4", "5 to 9, the head", "5 to 9, all of it"],
        ),
    ],
)
def test_a_script_of_phases_is_killed_in_each_of_them_and_ends_the_same(
    name, make, kills, phases, tmp_path, monkeypatch
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run(name, "--epochs", "1", "--resume", str(whole))
    arguments = (name, "--epochs", "1", "--resume", str(killed))
    for step in kills:
        run(*arguments, killed_when=lambda step=step: reached(step, killed))
    out = run(*arguments)
    without_times = [
        re.sub(r"│ +[\d.]+m?s$", "", text, flags=re.MULTILINE) for text in (out, expected)
    ]
    assert without_times[0] == without_times[1]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    new = runpy.run_path(str(EXAMPLES / name))[make]
    one, other = ended(name, new(), killed), ended(name, new(), whole)
    assert_same(one, other)
    assert [phase.name for phase in one.phases] == phases
    assert all(phase.done for phase in one.phases)


def test_growing_digits_are_learned():
    (accuracy,) = re.findall(
        r"accuracy at 28 pixels: ([\d.]+)%", run("progressive.py", "--epochs", "2")
    )
    assert float(accuracy) >= 97


def test_fine_tuning_learns_new_digits_from_few_images():
    out = run("finetune.py", "--epochs", "4")
    low, head, everything = (
        float(n) for n in re.findall(r"^[05] to .*: ([\d.]+)%", out, re.MULTILINE)
    )
    assert low >= 98 and head >= 93 and everything >= 94
