"""The shape of the library: what is public, what may import what, and that all of it is documented."""

import ast
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fnloop
from fnloop import schedules, testing

ROOT = Path(fnloop.__file__).parent
ROOMS = [  # a room imports from those before it
    *("_version", "_display", "_backend", "_core", "schedules", "_data", "_step"),
    *("_graphs", "_checkpoint", "_middleware", "_hooks", "_loop", "testing"),
]
OPTIONAL = {
    "matplotlib",
    "pandas",
    "torchmetrics",
    "IPython",
    "ipykernel",
    "nbclient",
    "nbformat",
    "mlxtend",
    "sklearn",
    "accelerate",
    "tensorboard",
    "wandb",
    "mlflow",
}
CONTRACT = {
    *("TrainState", "RunInfo", "StaleStateError", "snapshot", "unwrap"),
    *("pipeline", "Output", "Middleware", "middleware", "supervised"),
    *(
        "accumulate",
        "clip",
        "clip_value",
        "amp",
        "schedule",
        "torch_scheduler",
        "metric",
        "compiled",
        "cuda_graph",
        "CaptureError",
    ),
    *("Mean", "Sum", "Min", "Max", "Last", "from_torchmetrics"),
    *("fit", "run", "evaluate", "predict", "History", "Record", "schedules"),
    *("CheckpointError", "save", "restore", "resume", "latest", "best", "checkpoint"),
    *("gather", "reduce", "broadcast", "sharded", "on_main"),
    *("every", "when", "once", "progress", "live_plot", "early_stop", "halt_on_nonfinite"),
    *("track", "to_csv", "to_jsonl"),
}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def layer(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node


def test_the_public_names_are_those_of_the_contract():
    assert set(fnloop.__all__) == CONTRACT
    public = {name for name in vars(fnloop) if not name.startswith("_")} - {"testing"}
    assert public == CONTRACT, "a name is importable and not in __all__, or the other way round"


@pytest.mark.parametrize("module", [fnloop, schedules, testing])
def test_a_module_lists_its_public_names_and_no_others(module):
    assert sorted(name for name in dir(module) if not name.startswith("__")) == sorted(
        module.__all__
    )
    assert {"__all__", "__doc__", "__name__"} <= set(dir(module))


def test_help_shows_what_is_public():
    text = pydoc.render_doc(fnloop, renderer=pydoc.plaintext)
    assert "fnloop - A training loop for PyTorch" in text
    assert [line.split(" = ")[0].strip() for line in re.findall(r"^DATA\n(.*)", text, re.M)] == [
        "__all__"
    ]


def test_a_function_and_a_package_never_share_a_name():
    """`import fnloop.middleware` used to find a package behind the function of that name."""
    packages = {module.name for module in pkgutil.iter_modules(fnloop.__path__)}
    assert {name for name in fnloop.__all__ if name in packages} == {"schedules"}


def test_an_import_that_fails_leaves_garbage_collection_on():
    code = """if True:
        import gc, sys
        sys.modules["safetensors"] = None
        try:
            import fnloop
        except ImportError:
            print(gc.isenabled())
    """
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "True"


def test_imports_only_point_down():
    for path, tree in modules():
        mine = layer(path)
        for name, _ in imports(tree):
            if name.startswith("fnloop.") and path.parent != ROOT:
                theirs = name.split(".")[1]
                sibling = mine == theirs
                assert ROOMS.index(theirs) < ROOMS.index(mine) or (
                    sibling and mine not in ("_middleware",)
                ), f"{path.name} imports {name}"


def test_middleware_do_not_import_each_other():
    for path, tree in modules():
        if layer(path) == "_middleware":
            assert not [
                n
                for n, _ in imports(tree)
                if n.startswith(("fnloop._middleware", "fnloop._hooks", "fnloop._loop"))
            ]


def test_only_the_backend_knows_accelerate():
    for path, tree in modules():
        if layer(path) != "_backend":
            assert not [n for n, _ in imports(tree) if n.split(".")[0] == "accelerate"], path


def test_nothing_optional_is_imported_at_the_top():
    for path, tree in modules():
        for name, node in imports(tree):
            if name.split(".")[0] in OPTIONAL:
                assert node.col_offset > 0, f"{path.name} imports {name} at its top"


def test_import_pulls_in_nothing_optional():
    code = f"import fnloop, sys; print(sorted({OPTIONAL!r} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == "[]"


def everything_public():
    for name in fnloop.__all__:
        value = getattr(fnloop, name)
        yield f"fnloop.{name}", value
        if inspect.isclass(value):
            for method, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if not method.startswith("_") and inspect.isfunction(function):
                    yield f"fnloop.{name}.{method}", function
    yield from ((f"schedules.{name}", getattr(schedules, name)) for name in schedules.__all__)
    yield from ((f"testing.{name}", getattr(testing, name)) for name in testing.__all__)


@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(n, v, id=n) for n, v in everything_public()]
)
def test_every_public_name_is_documented(name, value):
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_every_module_says_what_it_is_about():
    for path, tree in modules():
        assert ast.get_docstring(tree), f"{path} has no docstring"


def test_every_module_can_be_imported():
    for module in pkgutil.walk_packages(fnloop.__path__, "fnloop."):
        __import__(module.name)


def test_only_what_is_declared_is_imported():
    import tomllib

    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    declared = {d.split(">")[0].split("[")[0] for d in project["dependencies"]}
    declared |= {
        d.split(">")[0].split("[")[0]
        for extra in project["optional-dependencies"].values()
        for d in extra
    }
    declared |= {"attrs", "attr", "fnloop", "__future__"}
    declared |= {
        "pandas",
        "IPython",
    }  # which have an error of their own, or are there where they are asked for
    for path, tree in modules():
        for name, _ in imports(tree):
            top = name.split(".")[0]
            assert top in declared | set(sys.stdlib_module_names), f"{path.name} imports {top}"
