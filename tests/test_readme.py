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
TEXT = README.read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.S | re.M)
ROWS = [line for line in PROSE.splitlines() if line.startswith("|")]
SETUP = (
    "python -m venv .venv && . .venv/bin/activate && pip install torch==2.13.0 && pip install -e "
)


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.S | re.M)
    return [code for of, code in found if of == language]


def shown(markdown):
    """Return the words that a reader sees: without tags, and without the targets of links."""
    text = re.sub(r"<[^>]+>|\]\([^)]*\)", " ", markdown)
    return re.findall(r"\S*\w\S*", re.sub(r"[|*#\[]", " ", text))


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 100
    assert len(shown(PROSE)) <= 600
    assert [line for line in PROSE.splitlines() if len(line) > 120] == []


def test_its_paragraphs_and_cells_are_short():
    prose = "\n".join(line for line in PROSE.splitlines() if not line.startswith("|"))
    paragraphs = re.split(r"\n\s*\n|\n(?=[*#] )", prose)
    assert [text for text in paragraphs if len(shown(text)) > 45] == []
    cells = [cell for row in ROWS for cell in row.strip("|").split("|")]
    assert len(ROWS) == 8 and [cell for cell in cells if len(shown(cell)) > 15] == []


def test_words_are_counted_as_they_are_read():
    assert shown("* **a** [b c](d/e.md) `f(1)` – <img alt='g'>\n| h | i-j |") == [
        *("a", "b", "c", "`f(1)`", "h", "i-j")
    ]


def test_it_says_what_middleware_is():
    assert "*Middleware* are functions that wrap this update" in TEXT
    beginning = TEXT[: TEXT.index("## Install")]
    assert "notebooks/middleware_and_hooks.md" in beginning
    assert "notebooks/write_your_own_middleware.ipynb" in beginning


def test_the_two_commands_are_there():
    plain = [block.strip() for block in blocks("")]
    assert plain == [
        SETUP + "'.[examples]' && python examples/mnist.py",
        SETUP + "'.[test]' && pytest",
    ]


def test_the_example_is_short():
    (example,) = blocks("python")
    assert len(example.splitlines()) <= 20
    assert "DataLoader(" in example and ".to(device)" in example


@pytest.mark.slow
def test_the_example_runs_as_it_is_pasted_and_prints_no_advice(tmp_path):
    (example,) = blocks("python")
    (tmp_path / "example.py").write_text(example)
    command = [sys.executable, "-W", "error", "example.py"]
    path = os.pathsep.join(filter(None, [str(README.parent), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = ast.literal_eval(done.stdout)
    assert len(losses) == 5 and losses[-1] < losses[0] / 2 and losses[-1] < 0.1
    progress = r"(Sequential on|epoch \d/5|done:) .*"  # a line for each epoch, and no more
    assert [line for line in done.stderr.splitlines() if not re.fullmatch(progress, line)] == []


def test_the_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", TEXT)
    assert [
        path for pair in targets for path in pair if path and not (README.parent / path).exists()
    ] == []


def test_the_picture_is_small():
    (picture,) = re.findall(r'src="([^"]+)"', TEXT)
    assert (README.parent / picture).stat().st_size < 60_000
