"""Each module is of the kernel or of one extension, and each extension can be taken away."""

import ast

import deletion
import pytest
from deletion import EXTENSIONS, ROOT, Names, Pruned, modules_of

PACKAGE = ROOT / "fnloop"


def test_each_module_beside_the_kernel_is_of_one_extension():
    assert {each for others in deletion.BUILT_ON.values() for each in others} <= {*EXTENSIONS}
    found = [path for name in EXTENSIONS for path in modules_of(name)]
    rooms = ("_extensions", "debug", "schedules")
    modules = [path.relative_to(PACKAGE) for r in rooms for path in (PACKAGE / r).rglob("*.py")]
    modules = [path for path in modules if path.name != "__init__.py"]
    assert sorted(path for path in found if path.name != "__init__.py") == sorted(modules)


def test_the_tests_of_each_extension_are_there():
    for name in EXTENSIONS:
        assert all(path.exists() for path in deletion.files_about([name], ROOT)), name


def imports_at_top(path):
    """Yield the modules that a file imports, within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.long
def test_the_kernel_alone_passes_its_fast_tests(tmp_path, capfd):
    done = deletion.check([deletion.EVERY], tmp_path, options=["-n", "2"])
    assert done == 0, capfd.readouterr()


HALVES = [*deletion.halves()]


def test_each_extension_is_once_away_while_another_is_there():
    tried = {(x, y) for away in HALVES for x in away for y in {*EXTENSIONS} - {*away}}
    names = {*EXTENSIONS} - {deletion.EVERY}
    assert tried >= {(x, y) for x in names for y in names - {*deletion.going_with(x)}}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_is_left_imports_nothing_of_an_extension(name):
    paths, names = deletion.names_taken(deletion.going_with(name), ROOT)
    left = {*PACKAGE.rglob("*.py")} - {*deletion.with_public_names(PACKAGE)}
    left = [path for path in sorted(left) if path.relative_to(PACKAGE) not in paths]
    found = [(str(path), m) for path in left for m in imports_at_top(path) if m in names.modules]
    assert found == []


def pruned(source, tmp_path, **gone):
    path = tmp_path / "test_it.py"
    path.write_text(source)
    names = Names(gone.get("modules", ()), gone.get("public", ()), gone.get("extensions", ()))
    file = Pruned(path, names)
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


def test_so_is_what_is_marked(tmp_path):
    marked = "@pytest.mark.needs('averages')\ndef test_it(): pass"
    row = "pytest.param(1, marks=pytest.mark.needs('averages'))"
    rows = f"@pytest.mark.parametrize('n', [{row}, 2])\ndef test_rows(n): pass"
    left = pruned(f"{marked}\n{rows}", tmp_path, extensions=["averages"])
    assert left == "@pytest.mark.parametrize('n', [2])\ndef test_rows(n):\n    pass"
