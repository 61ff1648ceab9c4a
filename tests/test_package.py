"""What is said of the package: its version in one place, and a changelog that has it."""

import datetime
import json
import re
import tomllib
from pathlib import Path

import fnloop as fl
from fnloop.testing import toy

PACKAGE = Path(fl.__file__).parent
ROOT = PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "fnloop/_version.py"
    number = f'"{fl.__version__}"'
    files = [*PACKAGE.rglob("*.py"), ROOT / "pyproject.toml"]
    assert [path for path in files if number in path.read_text()] == [PACKAGE / "_version.py"]


def test_a_checkpoint_has_the_version_that_wrote_it(tmp_path):
    facts = json.loads((fl.save(toy(), tmp_path / "a") / "state.json").read_text())
    assert facts["versions"]["fnloop"] == fl.__version__


def test_the_newest_entry_of_the_changelog_is_this_version_and_dated():
    text = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## \[(.+?)\] - (.+)$", text, re.M)[0]
    assert version == fl.__version__
    assert datetime.date.fromisoformat(date).isoformat() == date


def test_the_oldest_torch_that_ci_runs_is_the_oldest_that_is_promised():
    [least] = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    [oldest] = re.findall(r"^OLDEST=([\d.]+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert oldest.startswith(f"{least}.")
