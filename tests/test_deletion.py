"""Each module is of the kernel or of one extension, and each extension can be taken away."""

import ast
from pathlib import Path

import deletion
import pytest
from deletion import EXTENSIONS, KERNEL, ROOT, Names, Pruned, modules_of

PACKAGE = ROOT / "fnloop"


def of_kernel():
    rooms = ((f"{room}/" if room else "", names) for room, names in KERNEL.items())
    return [Path(f"{room}{name}.py") for room, names in rooms for name in names.split()]


def test_each_module_is_of_the_kernel_or_of_one_extension():
    goes_with = {each for others in deletion.BUILT_ON.values() for each in others}
    assert goes_with <= {*EXTENSIONS}
    found = of_kernel()
    for name in EXTENSIONS:
        modules = [path for path in modules_of(name) if path.name != "__init__.py"]
        assert modules, name
        found += modules
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    assert sorted(found) == sorted(path for path in modules if path.name != "__init__.py")


def test_the_tests_of_each_extension_are_there():
    for name in EXTENSIONS:
        assert all(path.exists() for path in deletion.files_about(name, ROOT)), name


def imports_at_top(path):
    """Yield the modules that a file imports, within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


STILL_NAMED = ("distributed", "exact")  # by the engine of one process, which chooses another one


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.xfail(strict=True)] * (name in STILL_NAMED))
    for name in EXTENSIONS
])  # fmt: skip
def test_what_is_left_imports_nothing_of_an_extension(name):
    paths, names = deletion.names_taken(name, ROOT)
    left = [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"]
    left = [path for path in left if path.relative_to(PACKAGE) not in paths]
    found = [(str(path), m) for path in left for m in imports_at_top(path) if m in names.modules]
    assert found == []


def pruned(source, tmp_path, **gone):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    file = Pruned(path, Names(gone.get("modules", ()), gone.get("public", ())))
    while file.prune():
        pass
    return ast.unparse(file.tree)


SOURCE = """
import fnloop as fl
from fnloop._extensions.middleware.ema import weights
A, B = fl.ema(0.5), fl.clip(1.0)
ROWS = {"ema": A, "clip": B}
def helper(): return weights
def test_one(): helper()
@pytest.mark.parametrize("row", [A, B], ids=["a", "b"])
def test_rows(row): pass
def test_two(): fl.clip(2.0)
"""
LEFT = """
import fnloop as fl
B, = (fl.clip(1.0),)
ROWS = {'clip': B}
@pytest.mark.parametrize('row', [B], ids=['b'])
def test_rows(row): pass
def test_two(): fl.clip(2.0)
"""


def test_rows_helpers_and_tests_that_name_an_extension_are_taken_away(tmp_path):
    left = pruned(SOURCE, tmp_path, modules={"fnloop._extensions.middleware.ema"}, public={"ema"})
    assert ast.dump(ast.parse(left)) == ast.dump(ast.parse(LEFT))
