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
    written = [path for path in (*PACKAGE.rglob("*.py"), ROOT / "pyproject.toml") if number in path.read_text()]
    assert written == [PACKAGE / "_version.py"]


def test_a_checkpoint_has_the_version_that_wrote_it(tmp_path):
    facts = json.loads((fl.save(toy(), tmp_path / "a") / "state.json").read_text())
    assert facts["versions"]["fnloop"] == fl.__version__


def test_the_newest_entry_of_the_changelog_is_this_version_and_dated():
    headings = re.findall(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    versions, dates = zip(*headings, strict=True)
    assert versions[0] == fl.__version__
    assert sorted(map(datetime.date.fromisoformat, dates), reverse=True) == list(map(datetime.date.fromisoformat, dates))


def test_the_oldest_torch_that_ci_runs_is_the_oldest_that_is_promised():
    [least] = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    [oldest] = re.findall(r"^OLDEST=([\d.]+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert oldest.startswith(f"{least}.")
