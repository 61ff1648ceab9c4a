"""The shape of the library: public names, imports between rooms, private names, and sizes."""

import ast
import graphlib
import importlib
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from open_names import OPEN
from public_names import MODULES, values

import fnloop.extend

ROOT = Path(fnloop.__file__).parent
# A room imports only from the rooms before it.
# fmt: off
KERNEL = [
    "_display", "_backend", "_core", "_data", "_step", "_hooks", "_loop"
]
EXTENSIONS = [
    "_extensions.tables", "_extensions.histories", "schedules", "_extensions.graphs",
    "_extensions.engines",
    "_extensions.alternate", "_extensions.raw", "_extensions.supervised", "_extensions.freeze",
    "_extensions.torchmetrics",
    "_extensions.stacks", "_extensions.loaders", "_extensions.checkpoints",
    "_extensions.middleware", "_extensions.hooks", "_extensions.tools",
]
BESIDE = ["testing", "data", "debug"]
MOST_OPEN = 26  # it may only fall
# fmt: on
# The file `_extensions/__init__.py` is below all: it says what the kernel takes from where.
ROOMS = ["_extensions", *KERNEL, *EXTENSIONS, *BESIDE]
OPTIONAL = {
    *("matplotlib", "pandas", "torchmetrics", "IPython", "ipykernel", "nbclient", "nbformat"),
    *("mlxtend", "sklearn", "accelerate", "tensorboard", "wandb", "mlflow"),
}
CONTRACT = """
    TrainState RunInfo Phase fork freeze unfreeze layers StaleStateError snapshot unwrap pipeline
    Output Middleware middleware supervised accumulate clip clip_value clip_adaptive amp schedule
    torch_scheduler metric skip skip_nonfinite spike_guard decide derive inspect plateau tbptt raw
    alternate sam closure ema swa averaged update_batchnorm compiled channels_last cuda_graph
    CaptureError profiled microbatch retry_on_oom Mean Sum Min Max Last from_torchmetrics fit run
    evaluate predict History Record compare schedules data debug CheckpointError save restore
    resume latest best checkpoint gather reduce broadcast sharded on_main dry_run find_lr
    find_batch_size summary Hook at_start at_end every when once progress live_plot early_stop
    time_limit requeue halt_on_nonfinite track to_csv to_jsonl when_improved restore_best timings
    throughput device_memory grad_norm
"""  # names that stay; a new one need not be here


PATHS = sorted(ROOT.rglob("*.py"))


@cache
def modules():
    """Return the path and the syntax tree of every file of the package."""
    return tuple((path, ast.parse(path.read_text())) for path in PATHS)


def name_of(path: Path) -> str:
    """Return the name of a module, such as ``fnloop._core.rng``."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """Return the room of a module: a folder of the package or of its extensions."""
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "_extensions" else 1])


def imports(tree):
    """Yield each import in a file: the name of a module, or of what may be one, and the node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


@cache
def import_graph():
    """Module to the modules of the package that it imports, anywhere in its file."""
    known = {name_of(path) for path, _ in modules() if path.parent != ROOT}
    return {
        name_of(path): {name for name, _ in imports(tree) if name in known}
        for path, tree in modules()
        if path.parent != ROOT
    }


def test_what_can_be_imported_is_public():
    assert set(fnloop.__all__) >= set(CONTRACT.split())
    assert all(hasattr(fnloop, name) for name in fnloop.__all__)  # imports what is imported late
    public = {name for name in vars(fnloop) if not name.startswith("_")} - {"testing", "extend"}
    assert public == set(fnloop.__all__), "__all__ and the importable names differ"
    with pytest.raises(AttributeError, match="module 'fnloop' has no attribute 'Trainer'"):
        _ = fnloop.Trainer


LATE = " ".join(f"_extensions.{name}" for name in ("tools.tune", "hooks.send", "hooks.look"))
IMPORT = f"""
import sys, fnloop
late = "debug data {LATE}".split()
print([name for name in late if f"fnloop.{{name}}" in sys.modules])
print(sorted({OPTIONAL!r} & set(sys.modules)))
print(fnloop.debug.replay.__name__, fnloop.data.tune.__name__, fnloop.track.__name__)
"""
IMPORT_FAILS = """
import gc, sys
sys.modules["toolz"] = None
try:
    import fnloop
except ImportError:
    print(gc.isenabled())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "printed"), [
    pytest.param(IMPORT, ["[]", "[]", "replay tune track"], id="nothing optional or late"),
    pytest.param(IMPORT_FAILS, ["True"], id="one that fails leaves garbage collection on"),
])  # fmt: skip
def test_an_import_in_a_new_process(code, printed):
    given = {"capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **given).stdout.splitlines() == printed


@pytest.mark.parametrize("module", MODULES)
def test_a_module_lists_its_public_names_and_no_others(module):
    assert {name for name in dir(module) if not name.startswith("__")} == set(module.__all__)
    assert {"__all__", "__doc__", "__name__"} <= set(dir(module))


def on_front_page(module) -> list[str]:
    """Return the names that the docstring of a module lists, by subject, in backticks."""
    subjects = re.findall(r"^- .*\n(?:  .*\n)*", module.__doc__ + "\n", re.M)
    return [name for text in subjects for name in re.findall(r"`(?:\w+\.)?(\w+)`", text)]


def test_the_front_page_is_one_screen_with_each_public_name_once_under_its_subject():
    assert len(fnloop.__doc__.splitlines()) <= 40
    assert sorted(on_front_page(fnloop)) == sorted([*fnloop.__all__, "extend", "testing"])


def test_help_shows_what_is_public():
    text = pydoc.render_doc(fnloop, renderer=pydoc.plaintext)
    assert "fnloop - A training loop for PyTorch" in text
    assert re.findall(r"^DATA\n +(\w+) = ", text, re.M) == ["__all__"]


def test_a_function_and_a_package_never_share_a_name():
    """A package ``fnloop.middleware`` would hide the function of that name."""
    packages = {module.name for module in pkgutil.iter_modules(fnloop.__path__)}
    both = {name: getattr(fnloop, name) for name in fnloop.__all__ if name in packages}
    assert "data" in both and all(inspect.ismodule(value) for value in both.values())


def test_contributing_has_each_room_and_no_path_that_is_not_there():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 80
    trees = {name_of(path): tree for path, tree in modules()}
    rooms = [*KERNEL, "_extensions", *EXTENSIONS, *BESIDE]
    said = [ast.get_docstring(trees[f"fnloop.{room}"]).split("\n")[0] for room in rooms]
    places = [room.replace(".", "/") for room in rooms]
    names = [place if (ROOT / place).is_dir() else f"{place}.py" for place in places]
    rows = [f"`{a}` | {line.replace('``', '`')}" for a, line in zip(names, said, strict=True)]
    assert re.findall(r"^\| (`.*) \|$", text, re.M) == rows
    paths = [a or b for a, b in re.findall(r"`([\w./]+/(?:\w+\.py)?)`|\]\((.+?)\)", text)]
    assert len(paths) > 10
    assert [p for p in paths if not ((ROOT.parent / p).exists() or (ROOT / p).exists())] == []


def test_imports_only_point_down():
    for module, imported in import_graph().items():
        for other in imported:
            ours, theirs = ROOMS.index(room_of(module)), ROOMS.index(room_of(other))
            assert theirs <= ours, f"{module} imports {other}"


def test_imports_make_no_circle_not_even_those_within_a_function():
    try:
        graphlib.TopologicalSorter(import_graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_house_has_at_most_eleven_floors():
    """A room is one floor above the highest room that it imports from."""
    below = {room: set() for room in ROOMS}
    for module, imported in import_graph().items():
        below[room_of(module)] |= {room_of(other) for other in imported} - {room_of(module)}
    floors = {}
    for room in graphlib.TopologicalSorter(below).static_order():
        floors[room] = 1 + max((floors[other] for other in below[room]), default=0)
    assert max(floors.values()) <= 11, floors


@pytest.mark.parametrize(
    ("room", "others"),
    [("middleware", {"hooks", "middleware"}), ("hooks", {"middleware"})],
)
def test_middleware_and_hooks_import_neither_each_other_nor_the_loop(room, others):
    for module, imported in import_graph().items():
        if room_of(module) == f"_extensions.{room}":
            rooms = {room_of(other) for other in imported}
            assert not rooms & {"_loop", *(f"_extensions.{other}" for other in others)}, module


# --- private names

# Files that may use private names of others, and which. A torch_compat.py may use any.
PRIVATE_OF_OTHERS = {
    "_extensions/engines/accelerated.py": {"_shared_state", "_models", "_optimizers"},
    "_extensions/hooks/accelerated.py": {"_shared_state"},
    "_extensions/torchmetrics.py": {"_update_count", "_to_sync", "_defaults", "_reductions"},
    "_loop/peers.py": {"_signal"},  # of Python, which need not have it
}
DOCUMENTED = {  # of named tuples, os and sys, and a module
    *("_fields", "_asdict", "_replace", "_make", "_exit", "_current_frames", "_getframe", "_thread")
}


BY_NAME = ("getattr", "setattr", "hasattr")


def is_private(name: str) -> bool:
    """Return whether a name is private. Special methods and those of IPython are not."""
    special = re.fullmatch(r"__\w+__|_repr_\w+_|_ipython_\w+_|_+", name)
    return name.startswith("_") and not special and name not in DOCUMENTED


def defined_in(tree) -> set[str]:
    """Return the variables, functions, classes and attributes that a file defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and "__slots__" in map(ast.unparse, node.targets):
            found |= set(ast.literal_eval(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            found.add(getattr(node.args[1], "value", ""))
    return found


def of_self(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


def private_reads(tree):
    """Yield each private name of another module that a file uses, and its line."""
    mine = defined_in(tree)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute) and not of_self(node):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            constant = node.args[1]
            names = [constant.value] if isinstance(constant, ast.Constant) else []
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += (node.module or "").split(".") if "fnloop" not in (node.module or "") else []
            names = [name for name in names if f"{node.module}.{name}" not in import_graph()]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        yield from ((name, node.lineno) for name in names if is_private(name) and name not in mine)


def test_no_module_uses_a_private_name_of_another():
    found = []
    for path, tree in modules():
        file = str(path.relative_to(ROOT))
        allowed = PRIVATE_OF_OTHERS.get(file, set())
        reads = private_reads(tree) if path.name != "torch_compat.py" else ()
        found += [f"{file}:{line}: {name}" for name, line in reads if name not in allowed]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("source", "found"), [
    ("state._lease", ["_lease"]),
    ("other._x = 1", ["_x"]),
    ("getattr(torch, '_foreach_norm')", ["_foreach_norm"]),
    ("from torch.utils._python_dispatch import TorchDispatchMode", ["_python_dispatch"]),
    ("from fnloop._core.rng import _secret", ["_secret"]),
    ("from fnloop.testing import _toys", []),
    ("self._x", []),
    ("super()._x", []),
    ("x.__dict__, figure._repr_png_, pair._fields, _", []),
    ("class A:\n    _x: int\n    def f(self, other): return other._x", []),
    ("class A:\n    __slots__ = ('_x',)\nA()._x", []),
    ("class A:\n    def f(self): self._x = 1\nA()._x", []),
])  # fmt: skip
def test_a_private_name_of_another_module_is_found(source, found):
    assert [name for name, _ in private_reads(ast.parse(source))] == found


# --- types


def used_by_extensions():
    """Return what extensions import from the kernel besides public names, as (module, name)."""
    public = {name.rpartition(".")[2] for name in values(*MODULES)} | {*fnloop.extend.__all__}
    return {
        (node.module, alias.name)
        for path, tree in modules()
        if path.parent != ROOT and room_of(name_of(path)) in {*EXTENSIONS, "data", "debug"}
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fnloop._")
        if room_of(node.module) in KERNEL
        for alias in node.names
        if alias.name not in public
    }


def open_names():
    return {(f"fnloop.{module}", name) for module, names in OPEN.items() for name in names.split()}


def test_extensions_import_public_names_those_of_extend_and_what_is_open_to_them():
    assert used_by_extensions() - open_names() == set(), "these are private to the kernel"
    assert len(open_names()) <= MOST_OPEN


def test_what_is_open_is_used():
    assert open_names() - used_by_extensions() == set(), "take these out of OPEN"


def test_few_values_have_the_type_any():
    assert sum(len(re.findall(r"\bAny\b", path.read_text())) for path in PATHS) < 200


# What equals the name of an extension and is something else.
OTHER_MEANINGS = {
    "checkpoint": "the name of a thread",
    "closure": "the argument of an optimizer's step",
    "latest": "a row of the table of a state",
    "save": "a reader of a view, and the functions of a part: what is saved, wherever that is",
    "throughput": "first parts of names in a history, whatever made its records",
}


def extension_names() -> set[str]:
    """Return the public names that are defined in extensions."""
    rooms = ("fnloop._extensions.", *(f"fnloop.{room}." for room in BESIDE))
    return {
        name
        for module in (*MODULES, fnloop.extend)
        for name in module.__all__
        if str(getattr(getattr(module, name), "__module__", "")).startswith(rooms)
    }


def names_said(tree, names):
    """Yield each text in code that is such a name, or begins with one as names of slots do."""
    in_docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    said = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if not isinstance(text, str) or " " in text or id(node) in in_docstrings | said:
            continue
        if (name := re.split(r"[(/]", text)[0]) in names:
            yield name, node.lineno


def test_the_kernel_names_no_extension():
    others = {name for names in OTHER_MEANINGS for name in names.split()}
    names = extension_names()
    found = [
        (f"{path.relative_to(ROOT)}:{line}", name)
        for path, tree in modules()
        if path.parent != ROOT and room_of(name_of(path)) in KERNEL
        for name, line in names_said(tree, names)
    ]
    assert [each for each in found if each[1] not in others] == []
    assert others & names == {name for _, name in found}, "take these out"


@pytest.mark.parametrize(("code", "found"), [
    ('member.name == "tbptt"', ["tbptt"]),
    ('state.slots["tbptt/call"]', ["tbptt"]),
    ('m.name in ("guard", "sam")', ["sam"]),
    ('m.name.startswith("metric(")', ["metric"]),
    ('"sam"', []),  # a docstring
    ('raise ValueError("list sam() last")', []),
    ('f"sam{x}"', []),
    ('name == "example"', []),
])  # fmt: skip
def test_a_name_of_an_extension_in_the_kernel_is_found(code, found):
    names = {"tbptt", "sam", "metric"}
    assert [name for name, _ in names_said(ast.parse(code), names)] == found


# --- optional dependencies


def declared():
    """Return the names of the packages that may be imported, here or by an extra."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    lists = project["dependencies"], *project["optional-dependencies"].values()
    # pandas and IPython have an error of their own, or a check before.
    also = {"attrs", "attr", "fnloop", "__future__", "pandas", "IPython"}
    return also | {re.match(r"[\w-]+", one)[0] for names in lists for one in names}


def test_each_import_is_declared_and_nothing_optional_is_imported_at_the_top():
    known = declared() | set(sys.stdlib_module_names)
    for path, tree in modules():
        for name, node in imports(tree):
            top = name.split(".")[0]
            assert top in known, f"{path.name} imports {top}"
            assert top not in OPTIONAL or node.col_offset > 0, f"{path.name} imports {top} at top"
            allowed = path.stem == "accelerated" or path.parent.name == "_backend"
            assert top != "accelerate" or allowed, path


def test_every_module_has_a_docstring_and_can_be_imported():
    for path, tree in modules():
        assert ast.get_docstring(tree), f"{path} has no docstring"
        importlib.import_module(name_of(path))
