"""The pages of the book: their code runs, their links lead somewhere. Built by whole_book.py."""

import ast
import contextlib
import importlib.util
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from public_names import MODULES, values
from tried import Tried, trying

import fnloop as fl

ROOT = Path(fl.__file__).parents[1]
BOOK = ROOT / "notebooks"
PAGES = {
    path.relative_to(BOOK).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(BOOK.rglob("*.md"))
    if "ipynb_checkpoints" not in str(path)
}


# --- the pages as they are written


def cells(page):
    found = re.findall(r"^```\{code-cell\} python\n(.*?)^```$", PAGES[page], re.S | re.M)
    return [re.sub(r"\A(?::.*\n)+\n?", "", code) for code in found]


# They start processes, compile, import for seconds, or train until something can be seen.
SLOW = (
    *("how_to/active_learning", "how_to/average_as_teacher", "how_to/configure"),
    "how_to/detection",
    *("how_to/evaluate_beside_training", "how_to/federated_averaging", "how_to/train_a_gan"),
    *("how_to/lbfgs_on_an_image", "how_to/maml", "how_to/quantization_aware_training"),
    *("how_to/reinforcement_learning", "how_to/why_is_it_slow", "time_travel"),
)
LONG = ("large_models", "how_to/slow_link", "how_to/two_gpus")
MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(LONG, pytest.mark.long)
# What the text of a page says of its results.
SAID = {
    "how_to/touched_by_a_bug": [
        "[(t.start, t.stop) for t in report.touched] == [(0, 32)]",
        "[span.holds for span in report.spans] == [True, True, True, False] * 2",
        "not report.faults and not now.touched and not now.spans",
        "(worth.update, worth.apart, worth.confirmed) == (16, 16, True)",
        "worth.first.startswith('loss: ')",
    ],
    "how_to/configure": ["one == other", "'PRUNED' in one[1]"],
    "time_travel": [
        "(found.update, found.what) == (134, 'batch')",
        "worst.tolist() == [13, 14, 15, 16, 17]",
        "night.history['valid/loss'][-1] > 5 * mended.history['valid/loss'][-1]",
        "not diff(mended, never)",
        "report.ok",
        "worth.confirmed and worth.apart == 134 and images_worth.apart == 134",
        "[span.holds for span in checked.spans] == [True] * 3 + [False] * 8",
    ],
}
WITH_CODE = [
    pytest.param(page, marks=[MARKS[page]] if page in MARKS else [])
    for page in PAGES
    if cells(page)
]


@pytest.fixture
def settings_of_torch():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, settings_of_torch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    known = {"__name__": "page"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", SyntaxWarning)  # of torchao, on Python 3.12 and newer
        warnings.filterwarnings("ignore", "The .grad attribute")  # of torch, while it compiles
        for code in cells(page):
            exec(compile(code, page, "exec"), known)
        assert [said for said in SAID.get(page, ()) if not eval(said, known)] == []


# Their programs are wrong on purpose, take processes, or read the state's model in the loader.
UNTRIED = {"errors", "time_travel", *LONG, "how_to/find_the_nan", "how_to/reinforcement_learning"}
FITS = 3  # runs of a page that are tried


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if cells(page) and page not in UNTRIED])
def test_a_trial_of_a_page_s_runs_has_no_problem(
    page, tmp_path, monkeypatch, settings_of_torch, capsys
):
    """A loss need not be a mean of items, nor leave the device unread, to be trained with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fl, "fit", trying(fl.fit, FITS))
    known = {"__name__": "page"}
    with warnings.catch_warnings(), contextlib.suppress(Tried):
        warnings.simplefilter("ignore")
        for code in cells(page):
            exec(compile(code, page, "exec"), known)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_knows_no_machine(page):
    assert not re.search(r"/(home|root|tmp|work|usr|opt|Users)/|[A-Z]:\\", PAGES[page])
    assert re.search(r"^# |\{include\}", PAGES[page], re.M)
    for code in cells(page):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES)
def test_a_list_has_no_gap(page):
    """A blank line between two items sets the last one apart, and spreads all of them."""
    gaps = re.findall(r"^\* (?:.+\n(?:  .*\n)*)\n(\* .*)", PAGES[page], re.M)
    assert gaps == []


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page):
    prose = re.sub(r"^```\{code-cell.*?^```$|`[^`\n]+`", "", PAGES[page], flags=re.S | re.M)
    links = re.findall(r"\]\(([^)#:\s]+)\)", prose)
    there = (BOOK / page).parent
    missing = {link for link in links if not (there / link).exists()}
    assert {link for link in missing if not link.endswith("reference/index.rst")} == set()


@pytest.mark.parametrize("name", [path.stem for path in (BOOK / "how_to").glob("[!i]*.md")])
def test_a_task_says_what_comes_next(name):
    text = PAGES[f"how_to/{name}"]
    assert "**Next:**" in text and name in PAGES["how_to/index"]


def test_the_two_lists_of_tasks_agree():
    """The list that is shown, and the one of the sidebar, have the same groups."""
    text = PAGES["how_to/index"]
    shown, sidebar = text.split("```{toctree}", 1)
    of_cards = {
        group: re.findall(r"\]\((.+?)\.(?:md|ipynb)\)", links)
        for group, links in re.findall(r"^\* \*\*(.+?)\*\*\n((?:\n|  .*\n)*)", shown, re.M)
    }
    trees = re.findall(r":caption: (.+)\n\n((?:\S+\n)+)```", sidebar)
    assert {group: entries.split() for group, entries in trees} == of_cards
    assert len(of_cards) > 5


def test_the_first_page_says_what_middleware_is():
    text = " ".join(PAGES["index"].split())
    assert "*middleware*: functions that wrap the update" in text
    assert "(middleware_and_hooks.md)" in text and "(write_your_own_middleware.ipynb)" in text


def test_every_public_name_is_in_a_guide():
    notebooks = [path.read_text(encoding="utf-8") for path in BOOK.glob("*.ipynb")]
    text = "\n".join([*PAGES.values(), *notebooks])
    names = {name.rpartition(".")[2] for name in values(*MODULES)}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


# --- the reference


pytest.importorskip("sphinx")


def beside_the_book(name):
    """Return a module of the build."""
    spec = importlib.util.spec_from_file_location(name, BOOK / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference, words = beside_the_book("reference"), beside_the_book("words")


def test_words_lead_to_the_pages_of_their_rows():
    found = words.words()
    assert "sweep" in found["how_to/search_for_settings"] and "callback" in found["reference/Hook"]
    known = {*PAGES, *(path.stem for path in BOOK.glob("*.ipynb"))}
    assert set(found) <= known | {f"reference/{name}" for name in reference.all_names()}


def test_the_subjects_have_each_public_name_once():
    wanted = sorted(name.removeprefix("fnloop.") for name in values(*MODULES))
    assert sorted(reference.all_names()) == wanted


@pytest.mark.parametrize("name", reference.all_names())
def test_a_signature_has_public_names(name):
    value = reference.value_of(name)
    if isinstance(value, type) and issubclass(value, Exception):
        return
    text, returned = reference.signature(value)
    assert not re.search(r"fnloop\.|(?<![\w.])_[A-Za-z]|<", f"{text} {returned}")


def test_an_example_is_first_on_a_page():
    lines = [
        "Do it.",
        "",
        "Args:",
        "    a: one.",
        "",
        "Example:",
        "    >>> 1",
        "",
        "Notes:",
        "    n.",
    ]
    reference.example_first(None, "function", "f", None, None, lines)
    assert [line for line in lines if line.endswith(":")] == ["Example:", "Args:", "Notes:"]
    assert [line for line in lines if line] == [
        *("Do it.", "Example:", "    >>> 1", "Args:", "    a: one.", "Notes:", "    n.")
    ]


def test_a_signature_is_that_of_the_source():
    assert reference.signature(fl.clip) == (
        "(max_norm: float, norm_type: float = 2.0, only: Selectors | None = None, "
        "name: str = 'clip')",
        "Middleware",
    )
    text, _ = reference.signature(fl.fit)
    assert "evaluate_every: Moment | Mapping[str, Moment] | None = every(epochs=1)" in text
