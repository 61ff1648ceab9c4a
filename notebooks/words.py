"""The words of ``words.md``, by which the search finds the pages that its tables name.

They are hidden text at the end of a page, which Sphinx's search and Pagefind read.
"""

import html
import re
from pathlib import Path

from docutils import nodes

TABLES = Path(__file__).with_name("words.md")


def words():
    """Return the words by document, as the rows of the tables name them."""
    found = {}
    for row in re.findall(r"^\| (.+) \|$", TABLES.read_text(encoding="utf-8"), re.M):
        typed, here = row.split(" | ")
        pages = [re.sub(r"\.(md|ipynb)$", "", link) for link in re.findall(r"\]\((.+?)\)", here)]
        pages += [f"reference/{name}" for name in re.findall(r"`fl\.([\w.]+)`", here)]
        for page in pages:
            found.setdefault(page, []).append(typed)
    return {page: ", ".join(rows) for page, rows in found.items()}


def add_words(app, doctree):
    """Add hidden words to a page that has been read."""
    typed = words().get(app.env.docname)
    if typed:
        app.env.note_dependency(str(TABLES))
        text = f'<p hidden data-pagefind-weight="10">Other words: {html.escape(typed)}.</p>'
        next(doctree.findall(nodes.section)).append(nodes.raw("", text, format="html"))


def setup(app):
    app.connect("doctree-read", add_words)
