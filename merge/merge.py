"""Merge the files of fnloop by ``plan.py``: run at the root of a checkout, then ``ruff check --fix``
and ``ruff format``.

Each source becomes a section of its target. Its docstring becomes the comment at the head of that
section; its imports are put together at the top; ``__all__`` of private files goes. Names of modules
are rewritten everywhere, in code and in text.
"""

import ast
import pathlib
import re
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from plan import PLAN, RENAMES

ROOT = pathlib.Path("fnloop")


def module_of(path):
    name = ".".join(path.with_suffix("").parts)
    return name.removesuffix(".__init__")


modules = {module_of(p): p for p in sorted(ROOT.rglob("*.py"))}
target_of, sources_of, docs = {}, {}, {}
for target, (doc, sources) in PLAN.items():
    room = target.rpartition(".")[0] or target
    full = []
    for s in sources:
        name = "fnloop." + (s if "." in s or s == "schedules" else f"{room}.{s}")
        assert name in modules, name
        assert name not in target_of, name
        target_of[name] = f"fnloop.{target}"
        full.append(name)
    sources_of[f"fnloop.{target}"] = full
    docs[f"fnloop.{target}"] = doc
for m, p in modules.items():
    if m not in target_of:
        target_of[m] = m
        if p.name != "__init__.py" and m != "fnloop._version":
            print("not in the plan:", m)
renames = {}
for (m, old), new in RENAMES.items():
    renames.setdefault(f"fnloop.{m}", {})[old] = new

moved = {m: t for m, t in target_of.items() if m != t}
dotted = re.compile(
    r"(?<![\w.])(" + "|".join(re.escape(m) for m in sorted(moved, key=len, reverse=True)) + r")(?!\w)"
)
as_path = {
    m.removeprefix("fnloop.").replace(".", "/") + ".py": t.removeprefix("fnloop.").replace(".", "/") + ".py"
    for m, t in moved.items()
}
paths = re.compile(
    r"(?<![\w])(" + "|".join(re.escape(m) for m in sorted(as_path, key=len, reverse=True)) + r")(?!\w)"
)


def retext(text):
    text = dotted.sub(lambda m: moved[m[1]], text)
    return paths.sub(lambda m: as_path[m[1]], text)


class Edits:
    """Replacements in a text by positions of the syntax tree."""

    def __init__(self, text):
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.found = []

    def span(self, node):
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def replace(self, node, new):
        self.found.append((*self.span(node), new))

    def drop_lines(self, first, last):
        self.found.append((self.starts[first - 1], self.starts[last], ""))

    def done(self):
        raw = self.text.encode()
        for start, end, new in sorted(self.found, reverse=True):
            raw = raw[:start] + new.encode() + raw[end:]
        return raw.decode()


def rename(edits, tree, old, new):
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id == old:
            edits.replace(n, new)
        elif n in tree.body and isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == old:
            start, _ = edits.span(n)
            raw = edits.text.encode()
            at = raw.index(old.encode(), start)
            edits.found.append((at, at + len(old), new))
        elif isinstance(n, ast.arg) and n.arg == old:
            print("  argument of the same name:", old)


def names_in(tree):
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)
    } | {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def rewrite(module, text, own):
    """Rewrite the imports of fnloop in ``text``; ``own`` is the target that it becomes a part of."""
    tree = ast.parse(text)
    edits = Edits(text)
    top = {id(n) for n in tree.body}
    for n in ast.walk(tree):
        if not (isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("fnloop") and not n.level):
            continue
        lines, gone = [], False
        for a in n.names:
            full = f"{n.module}.{a.name}"
            if full in modules and not (n.module == "fnloop"):  # a module
                target = target_of[full]
                room, _, base = target.rpartition(".")
                local = a.asname or a.name
                if target == own:
                    gone = True
                    for x in ast.walk(tree):
                        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == local:
                            new = renames.get(full, {}).get(x.attr, x.attr)
                            edits.replace(x, new)
                            others = {y.id for y in ast.walk(tree) if isinstance(y, ast.Name) and isinstance(y.ctx, ast.Store)}
                            others |= {y.arg for y in ast.walk(tree) if isinstance(y, ast.arg)}
                            if x.attr in others:
                                print("  shadowed?", module, x.attr, x.lineno)
                elif a.asname or base == a.name:
                    as_ = f" as {a.asname}" if a.asname else ""
                    lines.append(f"from {room} import {base}{as_}")
                elif base in names_in(tree):
                    lines.append(f"from {room} import {base} as {local}")
                    print("  kept as an alias:", module, local, "of", base)
                else:
                    lines.append(f"from {room} import {base}")
                    rename(edits, tree, local, base)
                continue
            target = target_of.get(n.module, n.module)
            new = renames.get(n.module, {}).get(a.name, a.name)
            local = a.asname or a.name
            if new != a.name and not a.asname:
                rename(edits, tree, a.name, new)
                local = new
            if target == own:
                gone = True
                if a.asname and a.asname != new:
                    rename(edits, tree, a.asname, new)
                continue
            as_ = f" as {local}" if local != new else ""
            lines.append(f"from {target} import {new}{as_}")
        if lines:
            indent = " " * n.col_offset
            edits.replace(n, f"\n{indent}".join(lines))
        elif gone:
            edits.replace(n, "pass  # merged" if id(n) not in top else "")
    if module in renames:
        for old, new in renames[module].items():
            rename(edits, tree, old, new)
    return edits.done()


def plain(text):
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def section(doc):
    paragraphs = []
    for paragraph in plain(doc).split("\n\n"):
        if re.search(r"^\s{2}", paragraph, re.M) and "\n* " not in f"\n{paragraph}":
            lines = paragraph.splitlines()  # a table
        elif "\n* " in f"\n{paragraph}":
            lines = []
            for item in re.split(r"\n(?=\* )", paragraph):
                lines += textwrap.wrap(" ".join(item.split()), 98, subsequent_indent="  " if item[0] == "*" else "")
        else:
            lines = textwrap.wrap(paragraph, 98, break_long_words=False, break_on_hyphens=False)
        paragraphs.append("\n".join(f"# {line}".rstrip() for line in lines))
    return "\n#\n".join(paragraphs)


def parts(module, own):
    """The imports, those for type checkers, and the body of a source."""
    text = rewrite(module, modules[module].read_text(), own)
    tree = ast.parse(text)
    edits = Edits(text)
    doc = ast.get_docstring(tree) or ""
    imports, typing, code = [], [], []
    for n in tree.body:
        source = ast.get_source_segment(text, n)
        first = n.lineno
        if n is tree.body[0] and doc:
            pass
        elif isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append(source)
        elif isinstance(n, ast.If) and isinstance(n.test, ast.Name) and n.test.id == "TYPE_CHECKING":
            typing += [ast.get_source_segment(text, x) for x in n.body if not isinstance(x, ast.Pass)]
        elif isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__" and not public(own):
            pass
        else:
            code.append(source)
            continue
        edits.drop_lines(first, n.end_lineno)
    return doc, imports, typing, edits.done().strip("\n"), code


def needed_at_import(module):
    """Names that the top level of a source evaluates when it is imported."""
    tree, used = ast.parse(modules[module].read_text()), set()

    def names(*nodes):
        for node in nodes:
            used.update(x.id for x in ast.walk(node) if isinstance(x, ast.Name))

    def visit(n):
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names(*n.decorator_list, *n.args.defaults, *filter(None, n.args.kw_defaults))
        elif isinstance(n, ast.ClassDef):
            names(*n.decorator_list, *n.bases, *(k.value for k in n.keywords))
            for x in n.body:
                visit(x)
        elif isinstance(n, ast.AnnAssign):
            names(*filter(None, [n.value]))
        elif isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING":
            pass
        elif not isinstance(n, (ast.Import, ast.ImportFrom)):
            names(n)

    for n in tree.body:
        visit(n)
    found = set()
    for n in tree.body:
        if isinstance(n, ast.ImportFrom):
            for a in n.names:
                if (a.asname or a.name) in used:
                    full = f"{n.module}.{a.name}"
                    found.add(full if full in modules else n.module)
    return found


def in_order(sources):
    """The sources in their order, but each after what it needs when it is imported."""
    out, needs = [], {s: needed_at_import(s) & set(sources) - {s} for s in sources}

    def put(s, above=()):
        assert s not in above, ("a circle", s, above)
        for other in sources:
            if other in needs[s] and other not in out:
                put(other, (*above, s))
        if s not in out:
            out.append(s)

    for s in sources:
        put(s)
    if out != list(sources):
        print("  other order:", [s.rpartition(".")[2] for s in out])
    return out


def public(target):
    return modules.get(target, pathlib.Path("x")).name == "__init__.py"


written = {}
for target, sources in sources_of.items():
    imports, typing, body, seen, first_doc = [], [], [], set(), None
    for s in in_order(sources):
        doc, i, t, text, code = parts(s, target)
        imports += [x for x in i if x not in imports]
        typing += [x for x in t if x not in typing]
        for statement in code:  # the same TypeVar or constant twice
            if statement in seen and not statement.startswith(("def ", "class ", "@")):
                text = text.replace(statement, "", 1)
            seen.add(statement)
        if len(sources) > 1 and not (s == target and public(target)):
            head = section(doc)
            # ``__all__`` and the like stay at the top of a public file
            text = f"# {'-' * 98}\n{head}\n\n{text.strip(chr(10))}"
        if first_doc is None:
            first_doc = doc
        body.append(text.strip("\n"))
    doc = docs[target] or first_doc
    quoted = f'"""{doc}"""' if "\n" not in doc else f'"""{doc}\n"""'
    if "__future__" not in "".join(imports):
        imports.insert(0, "from __future__ import annotations")
    imports.sort(key=lambda x: "__future__" not in x)
    out = [quoted, "", *imports, ""]
    if typing:
        if not any(re.search(r"\bTYPE_CHECKING\b", x) for x in imports):
            out.insert(3, "from typing import TYPE_CHECKING")
        out += ["if TYPE_CHECKING:", *textwrap.indent("\n".join(typing), "    ").splitlines(), ""]
    out.append("\n\n\n".join(body))
    path = modules.get(target) if target in modules else ROOT.joinpath(*target.split(".")[1:]).with_suffix(".py")
    written[path] = retext("\n".join(out).rstrip() + "\n")

others = [
    p
    for folder in ("fnloop", "tests", "examples", "notebooks", ".ci")
    for p in pathlib.Path(folder).rglob("*")
    if p.is_file() and p.suffix in (".py", ".md", ".ipynb", ".toml", ".txt", "")
    and "__pycache__" not in p.parts
] + [pathlib.Path(p) for p in ("README.md", "CONTRIBUTING.md", "pyproject.toml")]
gone = {modules[s] for sources in sources_of.values() for s in sources}
for p in others:
    if p in gone or p in written:
        continue
    try:
        text = p.read_text()
    except UnicodeDecodeError:
        continue
    new = text
    if p.suffix == ".py":
        new = rewrite(module_of(p) if p.is_relative_to(ROOT) else str(p), text, "")
    new = retext(new)
    if new != text:
        written[p] = new
for p in gone:
    p.unlink()
for p, text in written.items():
    p.parent.mkdir(exist_ok=True)
    p.write_text(text)
tools = ROOT / "_tools/__init__.py"
if not tools.exists():
    tools.write_text('"""What tries a run rather than runs it. Nothing below knows of these."""\n')

for path in written:  # no name is defined twice in a file
    if path.suffix == ".py" and path.is_relative_to(ROOT):
        seen = set()
        for n in ast.parse(path.read_text()).body:
            names = [n.name] if isinstance(n, (ast.FunctionDef, ast.ClassDef)) else []
            if isinstance(n, ast.Assign):
                names = [x.id for x in n.targets if isinstance(x, ast.Name)]
            for name in names:
                if name in seen:
                    print("  defined twice:", path, name)
                seen.add(name)
