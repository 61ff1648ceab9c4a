"""The examples run to their end, and reach what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ("-W", "error")) -> str:
    command = [sys.executable, *launcher, str(EXAMPLES / name), *arguments]
    settings = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mnist_reaches_97_percent_and_draws_its_history(tmp_path):
    out = run("mnist.py", "--out", str(tmp_path))
    best = max(float(line.split()[i]) for line, i in accuracies(out))
    assert best >= 0.97
    assert (tmp_path / "mnist.png").stat().st_size > 10_000


def accuracies(out: str):
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if "valid/accuracy" in line)
    column = lines[head].split().index("valid/accuracy")
    return [(line, column) for line in lines[head + 1 :] if re.match(r"\s*\d+\s+\d+\s", line)]


def test_text_learns():
    out = run("text.py")
    (trained,) = re.findall(r"([\d.]+) trained", out.replace("untrained", ""))
    assert float(trained) < 2.0  # nats per character; 4.6 by guessing


def test_by_hand_and_fnloop_agree():
    assert "equal" in run("by_hand.py")


ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
ACCELERATE += ("--main_process_port", "0")  # any free port


def test_many_gives_the_same_on_two_processes():
    alone, together = run("many.py"), run("many.py", launcher=ACCELERATE)
    assert "on 1 processes" in alone and "each process trained on: 20,000" in alone
    # 4,000 images in batches of 32 make 125 batches. The first process gets 63 of them in each of
    # 5 epochs, and the second 62.
    assert "on 2 processes" in together and "each process trained on: 10,080, 9,920" in together
    assert together.count("images held out") == 1  # only one of the two prints
    (one,), (two,) = (re.findall(r"held out: ([\d.]+)%", out) for out in (alone, together))
    # Of 1,000 images; sums are rounded in another order.
    assert float(two) == pytest.approx(float(one), abs=0.3)
    assert float(two) > 95


def test_many_resumes_with_another_number_of_processes(tmp_path):
    folder = str(tmp_path / "runs")
    arguments = ("--epochs", "2", "--resume", folder)
    assert "trained on: 4,032, 3,968" in run("many.py", *arguments, launcher=ACCELERATE)
    out = run("many.py", "--epochs", "3", "--resume", folder)
    assert "trained on: 4,000" in out  # one epoch was left
    assert [line.split()[0] for line, _ in accuracies(out)] == ["1", "2", "3"]
