"""The book: ``pip install -e '.[docs]' && sphinx-build notebooks SITE``.

Sphinx runs each notebook and each page with code. The outputs are on the pages, and nowhere else.
The reference is written by ``reference.py`` before the pages are read.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# --- the settings of pages that are run, before torch is imported

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
)
IPYTHON = tempfile.TemporaryDirectory()  # no settings of this machine, and no warning about TCP
PROFILE = Path(IPYTHON.name, "profile_default", "ipython_kernel_config.py")
PROFILE.parent.mkdir()
PROFILE.write_text("get_config().IPKernelApp.log_level = 'ERROR'\n")
os.environ["IPYTHONDIR"] = IPYTHON.name
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each page would compile what it imports
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two pages run side by side
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")

import kernels  # noqa: E402  # these three are beside this file
import reference  # noqa: E402
import words  # noqa: E402
from jupyter_cache import get_cache  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

import fnloop  # noqa: E402

project = "fnloop"
author = "The fnloop authors"
version = release = fnloop.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build", "runs", "**/.ipynb_checkpoints"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}

# --- pages

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "attrs_inline"]
myst_links_external_new_tab = False
nb_execution_mode = "cache" if os.environ.get("FNLOOP_BOOK_CACHE") else "force"
nb_execution_cache_path = os.environ.get(
    "FNLOOP_BOOK_CACHE", ""
)  # a folder outside of the repository
if nb_execution_cache_path:
    get_cache(
        nb_execution_cache_path
    ).list_cache_records()  # made before pages are read side by side
nb_execution_in_temp = True
nb_execution_timeout = 600  # of a cell
nb_execution_raise_on_error = True
nb_merge_streams = True
NotebookClient.startup_timeout.default_value = 600
nb_code_prompt_show = "Show the set-up"
nb_code_prompt_hide = "Hide the set-up"

# --- the reference

autodoc_member_order = "bysource"
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Targets", "Loaders", "Hooks", "Evaluations and records", "Phases"]
maximum_signature_line_length = 68
default_role = "py:obj"

# --- HTML

html_theme = "pydata_sphinx_theme"
html_title = "fnloop"
html_static_path = ["site"]
html_css_files = ["book.css"]
html_js_files = [("search.js", {"type": "module"})]
html_use_index = html_domain_indices = False
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "fnloop"},
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_nav_level": 1,
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [
        {"name": "Source", "url": "https://github.com/fnloop/fnloop", "icon": "fa-brands fa-github"}
    ],
}
ALONE = ("index", "search", "install", "all_of_fnloop", "concepts", "errors", "large_models")
ALONE += (
    "middleware_and_hooks",
    "benchmarks",
    "words",
    "changelog",
)  # there is nothing to list beside them
html_sidebars = {page: [] for page in ALONE}
project_copyright = "The fnloop authors, MIT License"


LEFT_OUT = ".headerlink, .prev-next-footer, div.cell_output, div.guides, summary"
LEFT_OUT += ", section#words-of-other-libraries"  # its words are on the pages that it names


def make_search(app, exception):
    """Index the guides and the reference for the search of the site."""
    if exception or app.builder.name != "html":
        return
    command = [sys.executable, "-m", "pagefind", "--silent", "--site", app.outdir]
    command += ["--root-selector", "article.bd-article"]
    command += ["--exclude-selectors", LEFT_OUT]
    subprocess.run(list(map(str, command)), check=True)


def setup(app):
    if app.parallel < 2:  # pages run side by side
        app.parallel = min(4, os.cpu_count() or 1)
    reference.setup(app)
    kernels.setup(app)
    words.setup(app)
    app.connect("build-finished", make_search)
