"""The reference is built from the docstrings without a warning, and every public name is in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from public_names import MODULES

import fnloop

pytest.importorskip("pdoc")

README = Path(fnloop.__file__).parent.parent / "README.md"


def build(folder, *modules):
    """Build the reference of modules in a folder, with warnings as errors."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "pdoc",
        *modules,
        "--output-directory",
        str(folder),
    ]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Build what the README says, and return its pages by module."""
    folder = tmp_path_factory.mktemp("reference")
    (modules,) = re.findall(r"&& pdoc ([\w. ]+)`", README.read_text())
    done = build(folder, *modules.split())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files = folder.rglob("*.html")
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text() for path in files
    }


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(pages, module):
    described = set(re.findall(r'<section id="([\w.]+)">', pages[module.__name__]))
    described |= {page.rpartition(".")[2] for page in pages}
    assert set(module.__all__) - described == set()


@pytest.mark.slow
def test_docstrings_are_read_as_sections(pages):
    names = [module.__name__ for module in MODULES]
    assert [name for name in names if ">Arguments:</h6>" not in pages[name]] == []


@pytest.mark.slow
def test_the_front_page_links_every_name_under_its_subject(pages):
    (front,) = re.findall(r'<section class="module-info">(.*?)</section>', pages["fnloop"], re.S)
    subjects = re.findall(r"<li>(.*?)</li>", front, re.S)
    assert [text for text in subjects if not text.startswith("<strong>")] == []
    linked = re.findall(r'<a href="[#\w/.]+">(?:fnloop\.)?(\w+)</a>', "".join(subjects))
    assert sorted(linked) == sorted([*fnloop.__all__, "testing"])  # each of them once


@pytest.mark.slow
def test_a_warning_fails_the_build(tmp_path):
    (tmp_path / "unreadable.py").write_text('"""A module."""\nx: "Missing" = 1\n"""A number."""\n')
    done = build(tmp_path, "unreadable")
    assert done.returncode != 0 and "Missing" in done.stderr
