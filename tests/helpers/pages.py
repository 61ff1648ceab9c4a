"""HTML of values: parsed, and checked."""

import re
from html.parser import HTMLParser

TAGS = re.compile("div|span|b|code|small|table|tr|th|td|svg|polyline|path")
NAMES = re.compile(
    "style|xmlns|width|height|viewbox|role|d|points|fill|stroke|opacity|stroke-width|colspan"
)
NASTY = "<script>alert('&')</script>"


class Page(HTMLParser):
    """Parses HTML into texts and tags, and checks that tags are nested correctly."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.tags, self.open = [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def texts(value):
    return Page(value._repr_html_()).texts


def check_html(value):
    """Check that the HTML of a value with a nasty text is well-formed, escaped and plain."""
    page = Page(value._repr_html_())
    assert any("script>alert" in text for text in page.texts)  # as text
    assert all(TAGS.fullmatch(tag) for tag, _ in page.tags)
    assert all(NAMES.fullmatch(name) for _, attributes in page.tags for name in attributes)
    looks = [str(v) for _, found in page.tags for k, v in found.items() if k != "xmlns"]
    assert not re.search(
        r"url\(|http|#[0-9a-f]{3}|rgb\(|white(?!-space)|black", " ".join(looks)
    )  # no asset and no colour
