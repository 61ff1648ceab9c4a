"""Banned phrases, and what to write instead. Run it as ``python tests/english.py [file ...]``.

Identifiers are read as words, so the names of tests and functions are checked too.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "notebooks/security.md", "CHANGELOG.md")
SCOPE = ("fnloop", "tests", "examples", "notebooks", *PAGES)
EXEMPT = ("tests/english.py", "tests/test_english.py")  # they quote the phrases

BANNED = {
    "behind": "after (behind is only for place)",
    "(go|goes|went|going|gone) on": "continue, resume",
    "whoever|whomever|(some|no|every|any)body": "name the actor, such as: the caller",
    "to the bit": "bit for bit",
    "lets? go of|letting go of": "release, drop",
    '(?<=""")says? whether': "Return whether",
    "(is|was) no": "is not a",
    "so many|every so often": "give the number, or write: periodically",
    "anew": "again",
    "(come|comes|came) apart": "diverge",
    "(has|have) yet to": "does not ... yet",
    "into (its|their) own hands": "itself",
    "not what (it|they) should be": "has the wrong type or value",
    "stretch of (a|the|this) run": "phase, part",
    "(guards?|hooks?|middleware|metrics?|functions?) of yours": "your own ...",
    "now and then": "periodically, or give the number",
    "on (the|a) disk as well": "too",
}
ALLOWED = (
    "(left|leaves?|leaving)( nothing)? behind|(fall|falls|lag|lags) behind",
    "behind (the scenes|the back|a seam)",
    "(go|goes|going|gone) on (top|the (device|gpu|disk))",
    "there (is|was) no",
    "(is|was) no (longer|more|less|fewer|need|use|different|other|such|way|reason)",
)
CONTRACTION = r"\w+n't|\w+'(re|ll|ve)"  # in messages and docstrings of the package


def faults(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the phrase and what to write instead, for each banned phrase in a text."""
    text = re.sub(r"(?<=[^\W_])_(?=[^\W_])", " ", text)  # names are words
    text = re.sub(r"\n[ \t]*#", "\n ", text)  # a phrase may be broken over the lines of a comment
    for allowed in ALLOWED:
        text = _words(allowed).sub(lambda found: re.sub(r"\S", ".", found[0]), text)
    for banned, instead in BANNED.items():
        for found in _words(banned).finditer(text):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def _words(pattern: str) -> re.Pattern[str]:
    spaced = pattern.replace(" ", r"\s+")
    return re.compile(rf"\b(?:{spaced})\b", re.IGNORECASE)


def contractions(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each contraction in a string of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in re.finditer(rf"\b({CONTRACTION})\b", node.value):
                line = node.lineno + node.value.count("\n", 0, found.start())
                yield line, found[0], "the whole words"


def text_of(path: Path) -> str:
    """Return what is checked of a file: of a notebook, the sources of its cells."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def checked(scope: tuple[str, ...]) -> list[Path]:
    """Return the files of a scope that are checked."""
    tops = [ROOT / name for name in scope]
    found = [path for top in tops for path in ([top] if top.is_file() else top.rglob("*"))]
    return [path for path in sorted(found) if _is_checked(path)]


def _is_checked(path: Path) -> bool:
    if path.relative_to(ROOT).as_posix() in EXEMPT or ".ipynb_checkpoints" in path.parts:
        return False
    return path.suffix in (".py", ".md", ".ipynb")


def report(paths: list[Path]) -> list[str]:
    """Return a line for each fault in files."""
    lines = []
    for path in paths:
        found = list(faults(text_of(path)))
        if path.suffix == ".py" and path.is_relative_to(ROOT / "fnloop"):
            found += contractions(text_of(path))
        where = path.relative_to(ROOT)
        lines += [f"{where}:{n}: {word!r}: write {new}" for n, word, new in sorted(found)]
    return lines


if __name__ == "__main__":
    wanted = checked(SCOPE)
    if sys.argv[1:]:
        given = {Path(name).resolve() for name in sys.argv[1:]}
        wanted = [path for path in wanted if path in given]
    lines = report(wanted)
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
