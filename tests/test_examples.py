"""The examples run from their beginning to their end, and reach what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    )
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
    assert float(trained) < 2.0  # nats per character; 4.6 blindly


def test_by_hand_and_fnloop_agree():
    assert "equal" in run("by_hand.py")
