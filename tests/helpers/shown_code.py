"""The code that messages show: in the sources of the library, and in a message that was raised."""

import ast
import re
from pathlib import Path

import fnloop

ROOT = Path(fnloop.__file__).parent
HOLE = "\0"  # what a template has where the message has a value
PREFIX = r"(?:return |with (?=[\w.]+\()|[a-z_]+(?:, [a-z_]+)* = |def )?"
START = re.compile(rf"(?<![\w.\"'`-]){PREFIX}[@*]?[A-Za-z_{HOLE}][\w.{HOLE}]*(?=[(\[=])")
HTML = re.compile(r"<\w+ |</|style=|viewBox=|color-mix")
CLOSING = {"(": ")", "[": "]", "{": "}"}


def end_of_group(text, start):
    """Return where brackets that open at a place are closed, or None if they are not."""
    opened, quote = [], None
    for at in range(start, len(text)):
        sign = text[at]
        if quote is not None:
            quote = None if sign == quote else quote
        elif sign in "\"'" and opened:
            quote = sign
        elif sign in CLOSING:
            opened.append(CLOSING[sign])
        elif opened and sign == opened[-1]:
            opened.pop()
            if not opened:
                return at + 1
    return None


def end_of_value(text, start):
    """Return where the value of ``name=value`` ends."""
    if text[start : start + 1] in ("'", '"'):
        end = text.find(text[start], start + 1)
        return None if end < 0 else end + 1
    if text[start : start + 1] in CLOSING:
        return end_of_group(text, start)
    found = re.compile(rf"[\w.{HOLE}-]*[\w{HOLE}]|\.\.\.").match(text, start)
    return None if found is None else end_of_trailers(text, found.end())


def end_of_trailers(text, end):
    """Return where the calls and indices after a name end."""
    while end < len(text) and text[end] in "([" and (after := end_of_group(text, end)) is not None:
        end = after
        if attribute := re.compile(r"\.[A-Za-z_]\w*").match(text, end):
            end = attribute.end()
    return end


def fragments(text):
    """Yield the pieces of code in a text, and where each begins: calls and ``name=value``."""
    at = 0
    while (found := START.search(text, at)) is not None:
        end = found.end()
        if text[end] == "=":
            if text[end + 1 : end + 2] in ("=", " ", "", ",") or re.match(r"=\.(?!\.)", text[end:]):
                at = end
                continue
            end = end_of_value(text, end + 1) or found.end()
        else:
            end = end_of_trailers(text, end)
            if body := re.compile(r": return \w+| = [\w.]+").match(text, end):
                end = end_of_trailers(text, body.end())
        if end == found.end():
            at = end
            continue
        yield found.start(), text[found.start() : end]
        at = end


def template_of(node):
    """Return the text of a literal with holes, or None if it is not one."""
    if isinstance(node, ast.Constant):
        return re.sub("%[sdr]", HOLE, node.value) if isinstance(node.value, str) else None
    parts = node.values
    return "".join(str(p.value) if isinstance(p, ast.Constant) else HOLE for p in parts)


class Messages(ast.NodeVisitor):
    """Collects the literals of a module that are no docstrings, and of no ``__repr__``."""

    def __init__(self):
        self.found = []

    def visit_scope(self, node):
        if getattr(node, "name", "") in ("__repr__", "__str__", "_repr_html_"):
            return
        for child in ast.iter_child_nodes(node):
            documents = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not documents:
                self.visit(child)

    visit_FunctionDef = visit_ClassDef = visit_Module = visit_scope

    def visit_literal(self, node):
        text = template_of(node)
        if text is not None and " " in text and '="http' not in text and not HTML.search(text):
            self.found.append(text)

    visit_JoinedStr = visit_Constant = visit_literal


def messages_with_code():
    """Return by file the templates of messages that show code, which is not only their subject."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        collector = Messages()
        collector.visit(ast.parse(path.read_text()))
        shown = [t for t in collector.found if any(start > 0 for start, _ in fragments(t))]
        if shown:
            found[str(path.relative_to(ROOT))] = shown
    return found


def matches(template, message):
    """Return whether a message was made of a template."""
    parts = (re.escape(part) for part in template.split(HOLE))
    return re.search(".*?".join(parts), message, re.DOTALL) is not None
