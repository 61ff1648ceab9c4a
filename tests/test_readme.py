"""The README is short, its example runs, and its links lead somewhere."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fnloop

README = Path(fnloop.__file__).parent.parent / "README.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S)


def test_the_readme_is_short():
    (example,) = blocks("python")
    assert len(README.read_text().splitlines()) <= 130 and len(example.splitlines()) <= 15


@pytest.mark.slow
def test_the_example_runs_as_it_is_pasted(tmp_path):
    (example,) = blocks("python")
    (tmp_path / "example.py").write_text(example)
    command = [sys.executable, "-W", "error", "example.py"]
    path = os.pathsep.join(filter(None, [str(README.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout)
    assert len(losses) == 8 and losses[-1] < losses[0] / 2


def test_the_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", README.read_text())
    assert [
        path for pair in targets for path in pair if path and not (README.parent / path).exists()
    ] == []


def test_the_pictures_are_small():
    pictures = [README.parent / path for path in re.findall(r'src="([^"]+)"', README.read_text())]
    assert len(pictures) == 3 and max(path.stat().st_size for path in pictures) < 60_000
