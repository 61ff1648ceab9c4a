"""Write the reference: a page for each public name, and an index by subject.

The subjects are those of the front page. Sphinx calls ``setup`` before it reads the pages, which go
to ``notebooks/reference/``. git ignores them. A signature has the names of types as the source
writes them, and public names in the place of private ones.
"""

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

import fnloop

HERE = Path(__file__).parent
FOLDER = HERE / "reference"
MODULES = ("schedules", "data", "debug", "testing", "extend")

# What a private name is called in a signature.
TYPES = {
    "PipelineStep": "Step",
    "AlternateStep": "Step",
    "RawStep": "Step",
    "Composed": "Step",
    "Pipeline": "Callable[[LossFn], Step]",
    "Trigger": "Moment",
    "Moments": "Moment | Mapping[str, Moment] | None",
    "HookFn": "Hook",
    "Handle": "Optimizer | Mapping[str, Optimizer]",
    "Number": "float | Tensor",
    "TableWriter": "Hook",
    "_Path": "str | os.PathLike[str]",
    "_Fn": "Callable",
    "Skip": "object",
}
# No caller makes one by the class.
MADE_ELSEWHERE = ("TrainState", "RunInfo", "Hook", "Step", "LossFn", "Engine", "Moment", "View")


def subjects():
    """Return the names of the front page: subject to lists of names, each with a label."""
    found = {}
    for subject, text in re.findall(
        r"^- \*\*([^*]+)\*\*:(.*(?:\n  .*)*)", inspect.getdoc(fnloop) or "", re.M
    ):
        if subject == "Modules":
            continue
        for part in " ".join(text.split()).split(";"):
            label = part.split("`")[0].strip()
            found.setdefault(subject, []).append((label, re.findall(r"`(\w+)`", part)))
    for name in MODULES:
        module = importlib.import_module(f"fnloop.{name}")
        own = [one for one in module.__all__ if not inspect.ismodule(getattr(module, one))]
        found[f"fnloop.{name}"] = [("", [f"{name}.{one}" for one in own])]
    return found


def value_of(name):
    *module, own = name.split(".")
    return getattr(importlib.import_module(".".join(["fnloop", *module])), own)


def all_names():
    return [name for groups in subjects().values() for _, names in groups for name in names]


def summary(name):
    """Return the first sentence of a docstring, as one line."""
    if value_of(name) is Any:
        return "Anything that a loader yields, for annotations."
    first = (inspect.getdoc(value_of(name)) or "").split("\n\n")[0]
    return " ".join(first.split()).rstrip(":")


# --- pages


def guides():
    """Return the guides by document name: their titles, and the text of their code."""
    found = {}
    for path in sorted(HERE.rglob("*")):
        if path.suffix not in (".md", ".ipynb") or FOLDER in path.parents or "build" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
        title = re.search(r"^# (.+)$", text, re.M)
        document = path.relative_to(HERE).with_suffix("").as_posix()
        found["/" + document] = (title[1] if title else document, text)
    return found


def using(name, pages):
    """Return the guides that use a name most, at most eight."""
    prefix = r"(?:fl\.|fnloop\.|`)" if "." not in name else r"(?:fl\.|fnloop\.|debug\.|`)?"
    own = re.escape(name) if "." not in name else re.escape(name.split(".")[1])
    if "." in name:
        prefix = rf"(?:{name.split('.')[0]}\.|import [\w, ]*\b)"
    uses = {
        document: len(re.findall(rf"{prefix}{own}\b", text))
        for document, (_, text) in pages.items()
    }
    found = sorted((document for document, n in uses.items() if n), key=lambda d: (-uses[d], d))
    found.sort(key=lambda d: not d.startswith("/how_to/"))
    return found[:8]


def page(name, pages):
    value = value_of(name)
    *module, own = name.split(".")
    path = ".".join(["fnloop", *module])
    kind = "autoexception" if _is_exception(value) else "autofunction"
    lines = [f":html_theme.sidebar_secondary.remove:\n\n{name}\n{'=' * len(name)}\n"]
    lines += [f".. py:currentmodule:: {path}\n"]
    if inspect.isclass(value) and not _is_exception(value):
        kind = "autoclass"
    lines += [f".. {kind}:: {path}.{own}"]
    if kind == "autoclass" and own[0].isupper():
        lines += ["   :members:"]
    found = using(name, pages)
    if found:
        lines += ["", ".. container:: guides", "", "   .. rubric:: Guides that use it", ""]
        lines += [f"   * :doc:`{pages[document][0]} <{document}>`" for document in found]
    return "\n".join(lines) + "\n"


def _is_exception(value):
    return inspect.isclass(value) and issubclass(value, Exception)


def index():
    title = "Reference"
    lines = [title, "=" * len(title), ""]
    lines += ["Each name has a page: its signature, an example that the tests run, its arguments,"]
    lines += ["and the guides that use it. :doc:`types` says what Step, Moment and Batch are.", ""]
    lines += [".. toctree::", "   :hidden:", "", "   types", ""]
    for subject, groups in subjects().items():
        lines += [".. toctree::", "   :hidden:", f"   :caption: {subject}", ""]
        lines += [f"   {name} <{name}>" for _, names in groups for name in names]
        lines += [""]
    for subject, groups in subjects().items():
        lines += ["", subject, "-" * len(subject), ""]
        if subject.startswith("fnloop."):
            first = (importlib.import_module(subject).__doc__ or "").split("\n")[0]
            lines += [first, ""]
        for label, names in groups:
            if label:
                lines += [f"*{label[0].upper()}{label[1:]}*", ""]
            lines += [".. list-table::", "   :widths: 25 75", "   :class: names", ""]
            for name in names:
                lines += [f"   * - :doc:`{name} <{name}>`", f"     - {summary(name)}"]
            lines += [""]
    return "\n".join(lines) + "\n"


def write():
    """Write the pages that have changed, and remove those of names that are gone."""
    FOLDER.mkdir(exist_ok=True)
    pages = guides()
    texts = {f"{name}.rst": page(name, pages) for name in all_names()}
    texts |= {"index.rst": index(), "types.rst": (HERE / "site" / "types.txt").read_text()}
    for path in FOLDER.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


# --- signatures and docstrings


def public_type(annotation):
    """Return the annotation of a parameter, with public names."""
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(typing|collections\.abc|contextlib|torch\.nn|nn|os)\.(?=[A-Z])", "", text)
    text = re.sub(r"\bfnloop\.(?:_\w+\.)*(?:_\w+\.|\w+\.)*(?=[A-Z_])", "", text)
    return re.sub(r"\b[A-Za-z_]+\b", lambda word: TYPES.get(word[0], word[0]), text)


class _Text(str):
    """A text whose repr is itself."""

    __repr__ = str.__str__


def described(value):
    """Return the names in the section Args of a docstring."""
    found = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)*)", inspect.getdoc(value) or "", re.M)
    heads = re.findall(r"^    (\S[^:]*):", found[1], re.M) if found else []
    return {name.strip(" *") for head in heads for name in head.split(",")}


def signature(value):
    """Return the text of a signature: the arguments that the docstring describes."""
    found = inspect.signature(value)
    wanted = described(value) if inspect.isclass(value) else set(found.parameters)
    shown = [
        p.replace(default=_default(p), annotation=_annotation(p))
        for p in found.parameters.values()
        if p.name in wanted - {"self", "cls"}
    ]
    text = str(inspect.Signature(shown))
    if inspect.isclass(value) or found.return_annotation is found.empty:
        return text, None
    return text, public_type(found.return_annotation)


def _default(parameter):
    default = parameter.default
    if default is parameter.empty or isinstance(default, str):
        return default
    made = repr(default) == "NOTHING" or (callable(default) and not hasattr(default, "due"))
    return _Text("..." if made else repr(default))


def _annotation(parameter):
    kind = parameter.annotation
    return kind if kind is parameter.empty else _Text(public_type(kind))


def on_signature(app, what, name, value, options, given, result):
    own = name.rpartition(".")[2]
    if what == "class" and own in MADE_ELSEWHERE:
        return "", None
    if what not in ("class", "function", "method"):
        return None
    try:
        return signature(value)
    except (TypeError, ValueError):
        return None


def example_first(app, what, name, value, options, lines):
    """Move the example of a docstring before its other sections."""
    text = "\n".join(lines)
    parts = re.split(r"^(?=[A-Z][\w ]*:\n(?= {4}))", text, flags=re.M)
    examples = [part.rstrip() + "\n\n" for part in parts if part.startswith("Example:\n")]
    others = [part for part in parts if not part.startswith("Example:\n")]
    lines[:] = "".join([others[0].rstrip() + "\n\n", *examples, *others[1:]]).split("\n")


def on_docstring(app, what, name, value, options, lines):
    """Turn tables of Markdown, which ``help`` shows well, into reStructuredText, and add links."""
    made = []
    for line in _with_links(lines):
        if attribute := re.match(r":vartype \w+: ", line):  # as an annotation that Sphinx has read
            line = attribute[0] + public_type(line.removeprefix(attribute[0]).replace("~", ""))
        cells = re.match(r"^\| (.*) \|$", line)
        if re.match(r"^\|[-|]+\|$", line):
            continue
        if not cells:
            made.append(line)
            continue
        row = cells[1].split(" | ")
        if not made or not made[-1].startswith("     - "):
            made += [".. list-table::", "   :header-rows: 1", ""]
        made += [f"   * - {row[0]}", *(f"     - {cell}" for cell in row[1:])]
    lines[:] = made


def _with_links(lines):
    """Return lines in which what a name replaces is linked to the page of that library."""
    text = "\n".join(lines)
    found = re.search(r"^Replaces: (.+(?:\n.+)*)", text, re.M)
    if not found:
        return lines
    parts = re.findall(r"(\w+)\.(\w+)", found[1])
    links = ", ".join(f"``{own}`` (:doc:`/coming_from/{of}`)" for of, own in parts)
    return text.replace(found[0], f"Replaces {links}.").split("\n")


# --- links


def link_names(app, doctree, document):
    """Link each piece of code that is a public name, or a call of one, to its page."""
    known = set(all_names())
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        found = re.fullmatch(r"(?:fl\.|fnloop\.)?([\w.]+?)(?:\([^`]*\))?", literal.astext())
        name = found[1] if found else ""
        if name not in known or document == f"reference/{name}":
            continue
        bare = not re.match(r"fl\.|fnloop\.", literal.astext())
        if bare and (name in AMBIGUOUS or document.startswith("coming_from")):
            continue
        link = make_refnode(app.builder, document, f"reference/{name}", "", literal.deepcopy())
        literal.replace_self(link)


AMBIGUOUS = ("data", "debug", "schedules", "inspect", "reduce", "skip", "save", "run", "best")


def setup(app):
    write()
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-docstring", example_first, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("doctree-resolved", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
