"""Take one extension away at a time, and run the fast tests of all that is left.

    python tests/deletion.py                     # each extension: two or three minutes for each
    python tests/deletion.py all                 # all at once: the kernel alone, half a minute
    python tests/deletion.py halves              # about half of them at a time: half an hour
    python tests/deletion.py averages graphs
    python tests/deletion.py graphs --keep /tmp/without-graphs --only tests/_extensions/tools

The kernel must not need an extension, and neither must another one, unless EXTENSIONS says that it
builds on it. In a copy of the tree, these are taken away:

- its modules, and their names in ``fnloop/__init__.py``, in public modules and in ``_extensions``;
- the rows of tables of tests that name something of it, such as those of laws and of wrong calls;
- its tests: files that the table below lists, and each test and each helper that names it. A test
  that needs it without a name of it is marked, as ``@pytest.mark.needs("distributed")``.

Pages, notebooks and examples are about everything, so their tests are left out.
"""

import argparse
import ast
import doctest
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The modules of each extension, in `_extensions` or beside it, the folders and files of tests that
# are about it alone, the arguments and methods that ask for it, and what has an example of it.
EXTENSIONS = {
    "accumulate": {
        "modules": "middleware.accumulate",
        "tests": "middleware/test_accumulate middleware/test_microbatch middleware/test_tbptt "
        "middleware/test_windows",
    },
    "alternate": {"modules": "alternate", "tests": "alternate"},
    "averages": {
        "modules": "middleware.ema",
        "tests": "middleware/test_ema middleware/test_ema_evaluation middleware/test_ema_rules "
        "checkpoints/test_saved_averages processes/test_averages",
    },
    "checkpoints": {
        "modules": "checkpoints.compare checkpoints.counters checkpoints.disk checkpoints.files "
        "checkpoints.foreign checkpoints.format checkpoints.made_with "
        "checkpoints.model checkpoints.named checkpoints.optimizer "
        "checkpoints.partial checkpoints.parts checkpoints.place checkpoints.restore "
        "checkpoints.retention checkpoints.save checkpoints.saved "
        "checkpoints.serialize checkpoints.shapes checkpoints.split "
        "checkpoints.torch_compat checkpoints.transfer",
        "tests": "checkpoints",
    },
    "clip": {
        "modules": "middleware.clip",
        "tests": "middleware/test_clip middleware/test_closure middleware/test_sam",
    },
    "debug": {"modules": "debug.*", "tests": "debug"},
    "distributed": {
        "modules": "engines.accelerated engines.alike engines.apart engines.consensus "
        "engines.distributed engines.exchanges engines.glimpses engines.join engines.launch "
        "engines.meshes engines.one_message engines.shares engines.slurm engines.torch_compat "
        "engines.wrappers",
        "tests": "processes engines/test_engine engines/test_rendezvous engines/test_round_robin "
        "engines/test_shares_of_loaders engines/test_slurm engines/test_undocumented "
        "engines/test_watchdog",
    },
    "exact": {
        "modules": "engines.exact",
        "tests": "engines/test_exact processes/test_same_bits",
        "arguments": "exact",
    },
    "find": {"modules": "tools.find", "tests": "tools/test_find_lr tools/test_find_batch_size"},
    "follow": {"modules": "checkpoints.follow", "tests": "checkpoints/test_follow"},
    "fork": {"modules": "tools.fork", "tests": "tools/test_fork"},
    "freeze": {"modules": "freeze", "tests": "freeze"},
    "graphs": {
        "modules": "graphs.capture graphs.guards graphs.operators graphs.torch_compat "
        "middleware.compiled",
        "tests": "graphs middleware/test_compiled test_gpu test_gpu_laws",
    },
    "guards": {
        "modules": "middleware.guards",
        "tests": "middleware/test_skip_nonfinite middleware/test_spike_guard processes/test_guards",
    },
    "hints": {"modules": "tools.hints", "tests": "tools/test_hints"},
    "histories": {
        "modules": "histories.*",
        "tests": "histories",
        "methods": "plot",
        "examples": "History History.plot plot",
    },
    "keep": {
        "modules": "hooks.keep",
        "tests": "hooks/test_checkpoint hooks/test_restore_best",
    },
    "loaders": {
        "modules": "loaders.*",
        "tests": "loaders",
    },
    "local_sgd": {
        "modules": "middleware.local_sgd",
        "tests": "middleware/test_local_sgd processes/test_apart",
    },
    "look": {
        "modules": "hooks.look",
        "tests": "hooks/test_inspect hooks/test_live_plot hooks/test_profiled",
    },
    "metric": {
        "modules": "middleware.metric",
        "tests": "middleware/test_metric middleware/test_derive",
    },
    "precision": {
        "modules": "middleware.precision",
        "tests": "middleware/test_amp middleware/test_channels_last",
    },
    "pace": {"modules": "hooks.pace", "tests": "hooks/test_paced"},
    "progress": {
        "modules": "hooks.progress hooks.terminal",
        "tests": "hooks/test_progress hooks/test_progress_log hooks/test_progress_notebook "
        "hooks/test_progress_terminal hooks/test_terminal",
    },
    "raw": {"modules": "raw", "tests": "raw"},
    "remote": {
        "modules": "checkpoints.remote",
        "tests": "checkpoints/test_remote checkpoints/test_s3",
    },
    "schedule": {
        "modules": "middleware.schedule",
        "tests": "middleware/test_schedule middleware/test_scheduled middleware/test_plateau",
    },
    "schedules": {"modules": "schedules.*", "tests": "schedules"},
    "search": {
        "modules": "tools.search",
        "tests": "tools/test_search tools/test_killed_search processes/test_trials",
    },
    "stack": {"modules": "stacks.*", "tests": "stacks"},
    "stop": {
        "modules": "hooks.stop",
        "tests": "hooks/test_early_stop hooks/test_halt_on_nonfinite hooks/test_requeue "
        "hooks/test_time_limit",
    },
    "summary": {"modules": "tools.summary", "tests": "tools/test_summary"},
    "supervised": {"modules": "supervised", "tests": ""},
    "tables": {"modules": "tables", "tests": "tables"},
    "times": {
        "modules": "middleware.times",
        "tests": "middleware/test_device_memory middleware/test_times",
    },
    "torchmetrics": {"modules": "torchmetrics", "tests": "torchmetrics"},
    "trackers": {
        "modules": "hooks.accelerated hooks.send",
        "tests": "hooks/test_table hooks/test_track",
    },
    "try": {"modules": "tools.dry_run", "tests": "tools/test_dry_run"},
    "tune": {"modules": "tools.tune", "tests": "tools/test_tune"},
    "using": {"modules": "middleware.using", "tests": "middleware/test_using"},
}
# What goes with an extension because it is made of it.
BUILT_ON = {
    "accumulate": ["debug"],
    "checkpoints": ["debug", "follow", "keep", "remote", "search", "stop", "trackers", "try"],
    "distributed": ["exact", "local_sgd"],
    "graphs": ["tune"],
    "hints": ["tune"],
    "histories": ["find", "look", "progress", "search", "stack"],
    "keep": ["trackers", "search"],
    "loaders": ["debug", "tune"],
    "metric": ["try"],
    "precision": ["tune"],
    "schedule": ["try", "search"],
    "schedules": ["averages", "schedule"],
    "stack": ["find", "search", "tune"],
    "tables": [
        *("alternate", "debug", "find", "histories", "look", "progress", "schedules", "search"),
        *("stop", "summary", "try", "tune"),
    ],
    "times": ["try"],
    "torchmetrics": ["metric"],
    "try": ["find", "debug"],
}
# All at once, which leaves the kernel alone.
EVERY = "all"
BUILT_ON[EVERY] = [*EXTENSIONS]
EXTENSIONS[EVERY] = {"modules": "", "tests": "_extensions"}
# What is about all of fnloop: pages, examples, and the style of files.
ABOUT_ALL = (
    "test_advice test_book test_coming_from test_deletion test_english test_examples test_mistakes "
    "test_notebook test_notebooks test_package test_readme test_random_programs whole_book"
)
ALIASES = ("fl", "fnloop", "data")  # the names of the package, and of a room, in tests


def module_of(path):
    """Return the name of a module of the package without that of the package."""
    parts = path.with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def modules_of(name, package=ROOT / "fnloop"):
    """Return the paths of the modules of an extension, within the package."""
    patterns = [m.replace(".", "/") + ".py" for m in EXTENSIONS[name]["modules"].split()]
    found = (path for at in ("_extensions/", "") for m in patterns for path in package.glob(at + m))
    return sorted(path.relative_to(package) for path in found)


# --- what is named


class Names:
    """What is taken away: modules, public names, and helpers of tests that name them.

    Args:
        modules: the modules, such as "fnloop._extensions.alternate".
        public: the names at the top level and in public modules.
        extensions: the names of what is taken away, in the table above.
        arguments, methods: the names of arguments, and of methods and functions, that ask for it.
        examples: the names of functions and classes whose examples show it.
    """

    def __init__(self, modules, public, extensions=(), arguments=(), methods=(), examples=()):
        self.extensions = set(extensions)
        self.modules, self.public = set(modules), {*public, *methods}
        self.arguments, self.methods = set(arguments), set(methods)
        self.examples = set(examples)
        self.helpers = {}  # by the name of a file of tests

    def is_import(self, module, name):
        """Return whether ``from module import name`` is of what is taken away."""
        of_package = module.split(".")[0] == "fnloop" and module.count("._") == 0
        return (
            bool({module, f"{module}.{name}"} & self.modules)
            or (of_package and name in self.public)
            or name in self.helpers.get(module, ())
        )

    def is_named(self, node, local):
        """Return whether one node of code names something of it.

        Args:
            node: the node.
            local: the names that are gone of this file.
        """
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if f"{module}.{name}" in local:
                return True
            case ast.Attribute(attr=name) if name in self.methods:
                return True
            case ast.Attribute(attr=name) if name in self.public:
                return ast.unparse(node).split(".")[0] in ALIASES
            case ast.Name(id=name) | ast.arg(arg=name):
                return name in local
            case ast.keyword(arg=name):
                return name in self.arguments
            case ast.Call(func=ast.Attribute(attr="needs"), args=[ast.Constant(value=extension)]):
                return extension in self.extensions  # @pytest.mark.needs("distributed")
            case ast.Constant(value=str(text)) if text.startswith("fl."):
                called = re.findall(r"\bfl\.(\w+)\(", text)  # as text, such as of a random program
                return not self.public.isdisjoint(called)
            case ast.ImportFrom(module=module, names=names):
                return any(self.is_import(module or "", alias.name) for alias in names)
            case ast.Import(names=names):
                return any(alias.name in self.modules for alias in names)
        return False

    def mentions(self, node, local):
        """Return whether code names something of it."""
        return any(self.is_named(part, local) for part in ast.walk(node))

    def is_row(self, node, local):
        """Return whether a row of a table is of it: it names something, or has a name as text."""
        texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
        return self.mentions(node, local) or any(
            isinstance(text, str) and self._is_text(text) for text in texts
        )

    def _is_text(self, text):
        """Return whether a text begins with a name or is a module."""
        first = re.split(r"[^\w.]", text.removeprefix("fnloop.").removeprefix("fl."))[0]
        modules = {f"fnloop{text}", f"fnloop.{text}"}
        return first in self.public or bool(modules & self.modules)

    def without_words(self, text):
        """Return a text that is a list of words without the names."""
        words = text.split()
        if not {*words} & self.public or not all(word.isidentifier() for word in words):
            return text
        return " ".join(word for word in words if word not in self.public)


TABLES = (ast.List, ast.Tuple, ast.Set, ast.Dict)


def tables_in(node):
    """Return the literals of rows that a value is made of."""
    match node:
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
            return [node]
        case ast.BinOp(left=left, right=right):
            return [*tables_in(left), *tables_in(right)]
        case ast.Call(args=[first, *_]):
            return tables_in(first)
    return []


def rows_of(function):
    """Return the tables of rows of a test: what its decorators are given, with their ``ids``."""
    for call in (d for d in function.decorator_list if isinstance(d, ast.Call)):
        ids = [k.value for k in call.keywords if k.arg == "ids"]
        for table in (table for given in call.args[1:] for table in tables_in(given)):
            yield table, [i.elts for i in ids if isinstance(i, ast.List)]


def without_rows(table, gone, beside=()):
    """Take rows out of a literal, and of lists beside it. Return how many, and if any is left."""
    if isinstance(table, ast.Dict):
        rows = [*zip(table.keys, table.values, strict=True)]
        left = [(k, v) for k, v in rows if not gone(v) and not (k is not None and gone(k))]
        table.keys, table.values = [k for k, _ in left], [v for _, v in left]
    else:
        rows, where = table.elts, [not gone(row) for row in table.elts]
        for each in (other for other in beside if len(other) == len(rows)):
            each[:] = itertools.compress(each, where)
        left = table.elts = [*itertools.compress(rows, where)]
    return len(rows) - len(left), bool(left) or not rows


class Pruned:
    """A file of tests without what names an extension.

    Attributes:
        tests, rows: the tests, and the rows of tables, that are gone.
    """

    def __init__(self, path, names):
        self.path, self.names = path, names
        self.tree = ast.parse(path.read_text())
        self.local = names.helpers.setdefault(path.stem, set())
        self.tests, self.rows = [], 0
        imports = (node for node in self.tree.body if isinstance(node, ast.Import))
        names = (alias for node in imports for alias in node.names)
        self.aliases = {alias.asname or alias.name: alias.name for alias in names}

    def prune(self):
        """Take out what names it. Return whether anything is gone that was not before."""
        for alias, module in self.aliases.items():
            self.local |= {f"{alias}.{name}" for name in self.names.helpers.get(module, ())}
        before = len(self.local), len(self.tests), self.rows
        self.tree.body = [node for node in self.tree.body if self._is_kept(node)]
        return before != (len(self.local), len(self.tests), self.rows)

    def _is_kept(self, node):
        gone = lambda part: self.names.is_row(part, self.local)
        match node:
            case ast.Import() | ast.ImportFrom():
                module = getattr(node, "module", None) or ""
                of_module = isinstance(node, ast.ImportFrom)
                taken = [
                    alias
                    for alias in node.names
                    if (of_module and self.names.is_import(module, alias.name))
                    or (not of_module and alias.name in self.names.modules)
                ]
                self.local |= {alias.asname or alias.name for alias in taken}
                node.names = [alias for alias in node.names if alias not in taken]
                return bool(node.names)
            case ast.FunctionDef() | ast.ClassDef():
                counts = [without_rows(table, gone, ids) for table, ids in rows_of(node)]
                self.rows += sum(count for count, _ in counts)
                kept = all(left for _, left in counts)
                kept = kept and not self.names.mentions(node, self.local)
                if not kept:
                    self.local.add(node.name)
                    self.tests += [node.name] * node.name.startswith("test_")
                return kept
            case ast.Assign(targets=[ast.Tuple() as targets], value=ast.Tuple() as value):
                self.local |= {
                    target.id
                    for target, row in zip(targets.elts, value.elts, strict=True)
                    if self.names.mentions(row, self.local)
                }
                without_rows(
                    value, lambda row: self.names.mentions(row, self.local), [targets.elts]
                )
                return bool(value.elts)
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if value is not None:
                counts = [without_rows(table, gone) for table in tables_in(value)]
                self.rows += sum(count for count, _ in counts)
                if counts and not any(left for _, left in counts):
                    self.local |= {n.id for n in ast.walk(node) if is_stored(n)}
                    return False
        if not self.names.mentions(node, self.local):
            return True
        self.local |= {n.id for n in ast.walk(node) if is_stored(n)}
        return False


def is_stored(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


# --- the copy


class OfPackage(ast.NodeTransformer):
    """Takes names out of ``__init__``, ``extend`` and ``_extensions``: imports, rows, and words."""

    def __init__(self, names):
        self.names = names

    def visit_ImportFrom(self, node):
        node.names = [a for a in node.names if not self.names.is_import(node.module or "", a.name)]
        return node if node.names else None

    def visit_If(self, node):
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_List(self, node):
        without_rows(node, lambda row: self.names.is_row(row, ()))
        return node

    def visit_Dict(self, node):
        is_module = lambda row: isinstance(row, ast.Constant) and self.names.is_row(row, ())
        rows = zip(node.keys, node.values, strict=True)
        left = [(k, v) for k, v in rows if not is_module(k)]
        node.keys, node.values = [k for k, _ in left], [self.visit(v) for _, v in left]
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            node.value = self.names.without_words(node.value)
        return node


def without_names(path, names):
    """Take the names out of a file of the package, and off its front page."""
    tree = OfPackage(names).visit(ast.parse(path.read_text()))
    text = ast.unparse(ast.fix_missing_locations(tree))
    for name in names.public if not path.parent.name.startswith("_") else ():
        text = re.sub(rf"`(fnloop\.)?{name}`(, )?", "", text)
    path.write_text(text + "\n")


def going_with(*names):
    """Return extensions, and those that are made of them."""
    built_on = (
        each for name in names for other in BUILT_ON.get(name, ()) for each in going_with(other)
    )
    return tuple(dict.fromkeys([*names, *built_on]))


def halves():
    """Return sets of extensions, each with what is made of it, to be taken away together.

    For each extension X, and each other one that is not made of it, X is away in one of the sets
    and the other is not. So together they try what taking away one at a time tries, in an eighth
    of the time. Each set in turn takes the most of what no set before it tries.
    """
    names = {name for name in EXTENSIONS if name != EVERY}
    together = {name: {*going_with(name)} for name in names}
    untried = {name: names - together[name] for name in names}  # what is to be there without it
    tries = lambda away: sum(len(untried[name] - away) for name in away)
    while any(untried.values()):
        away = set()
        while more := [away | together[name] for name in sorted(names - away)]:
            widest = max(more, key=tries)
            if tries(widest) <= tries(away):
                break
            away = widest
        for name in away:
            untried[name] &= away
        yield sorted(away)


def with_public_names(package):
    """Return the files of the package that have the names of others."""
    return [*package.rglob("__init__.py"), package / "extend.py"]


def names_taken(taken, tree):
    """Return what goes with extensions, from a copy of the tree."""
    package = tree / "fnloop"
    paths = [path for each in taken for path in modules_of(each, package)]
    modules = {"fnloop." + module_of(path) for path in paths}
    public = {m.rpartition(".")[2] for m in modules if m.count(".") == 1}
    for path in with_public_names(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if modules & {node.module, f"{node.module}.{alias.name}"}:
                        public.add(alias.asname or alias.name)
    asked = {
        kind: [a for each in taken for a in EXTENSIONS[each].get(kind, "").split()]
        for kind in ("arguments", "methods", "examples")
    }
    return paths, Names(modules, public, taken, **asked)


def files_about(taken, tree):
    """Return the files of tests that are about extensions alone, or about all of fnloop."""
    listed = " ".join(EXTENSIONS[each]["tests"] for each in taken)
    for one in [*listed.split(), *ABOUT_ALL.split()]:
        places = (tree / "tests" / at / one for at in ("_extensions", "."))
        place = next(path for path in places if path.is_dir() or path.with_suffix(".py").exists())
        yield from place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]


def take_away(taken, tree):
    """Take extensions out of a copy of the tree. Return what was taken, in words."""
    package, tests = tree / "fnloop", tree / "tests"
    paths, names = names_taken(taken, tree)
    lines = sum(len((package / path).read_text().splitlines()) for path in paths)
    for path in paths:
        (package / path).unlink()
    for path in with_public_names(package):
        without_names(path, names)
    of_room = "|".join(module.removeprefix("fnloop.").replace(".", "/") for module in names.modules)
    text = (tree / "CONTRIBUTING.md").read_text()
    rooms = re.compile(rf"^\| `({of_room})(\.py)?` \|.*\n", re.M)
    (tree / "CONTRIBUTING.md").write_text(rooms.sub("", text))
    about = {*files_about(taken, tree)}
    files = [
        Pruned(path, names) for path in sorted(tests.rglob("*.py")) if path != tests / "deletion.py"
    ]
    files = [file for file in files if "benchmarks" not in file.path.parts]
    while sum(file.prune() for file in files):  # a helper that is gone takes tests along
        pass
    for file in files:
        if file.path.stem == "test_public_api":
            file.tree = OfPackage(names).visit(file.tree)
        if file.local or file.rows or file.tests or file.path.stem == "test_public_api":
            file.path.write_text(ast.unparse(ast.fix_missing_locations(file.tree)) + "\n")
    elsewhere = sum(len(file.tests) for file in files)
    return (
        f"{lines:,} lines, {len(about)} files of tests; elsewhere {elsewhere} tests and "
        f"{sum(file.rows for file in files)} rows"
    ), names


# Tests that call a function as its example does.
BY_EXAMPLE = (
    "test_wrong_calls.py::test_an_argument_that_is_not_in_the_table_raises_such_errors_too",
    "test_given_values.py::test_so_does_an_argument_that_is_not_in_the_table",
)


def examples_of(names, tree):
    """Return the examples in docstrings that name what is gone, as pytest deselects them."""
    either = "|".join(sorted(names.public))
    words = re.compile(rf"\bfl\.({either})\b")
    bare = re.compile(rf"\b({either})\b")  # as the front page has them
    for path in sorted((tree / "fnloop").rglob("*.py")):
        place = path.relative_to(tree)
        module = ast.parse(path.read_text())
        for name, node in documented(module):
            examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
            pattern = bare if place.name == "__init__.py" else words
            found = any(pattern.search(example.source) for example in examples)
            if found or ".".join(name) in names.examples:
                yield f"--deselect={place}::{'.'.join([module_of(place), *name])}"
                yield from (f"--deselect=tests/{test}[{'.'.join(name)}(" for test in BY_EXAMPLE)


def documented(node, name=()):
    """Yield the parts of a module that may have a docstring, each with its name as words."""
    yield name, node
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            yield from documented(part, (*name, part.name))


def copied_tree(folder):
    """Copy what git knows of the tree, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for file in listed:
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
    return folder


def check(away, tree, only=(), options=()):
    """Take extensions away, and run the fast tests of the rest. Return what pytest returns."""
    taken, title = going_with(*away), " ".join(away)
    words, names = take_away(taken, copied_tree(tree))
    print(f"{title}: {words}", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "fast", "-q", "-p", "no:cacheprovider"]
    # A name of the kernel that is public elsewhere too is told apart in the whole tree only.
    open_names = "test_extensions_import_public_names_those_of_extend_and_what_is_open_to_them"
    for test in ("test_what_is_open_is_used", open_names):
        command += [f"--deselect=tests/test_public_api.py::{test}"]
    command += [*options, *examples_of(names, tree), *only]
    command += [f"--ignore={path.relative_to(tree)}" for path in files_about(taken, tree)]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    print(*failed, f"{title}: {lines[-1] if lines else done.stderr}", sep="\n", flush=True)
    return done.returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="default: each; a,b takes two away together")
    parser.add_argument("--keep", type=Path, help="make the copy here, and keep it")
    parser.add_argument("--only", nargs="+", default=[], help="files, or tests, to run")
    parser.add_argument("-n", default="auto", help="processes of pytest, default: %(default)s")
    args = parser.parse_args()
    failed = []
    halved = {"halves": [",".join(away) for away in halves()]}
    given = args.names or EXTENSIONS
    for name in (each for names in given for each in halved.get(names, [names])):
        with tempfile.TemporaryDirectory() as folder:
            tree = args.keep / name if args.keep else Path(folder)
            if check(name.split(","), tree, args.only, ["-n", args.n]):
                failed.append(name)
    sys.exit(f"not without {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
