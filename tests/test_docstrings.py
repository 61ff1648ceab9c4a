"""Every public docstring says what it does, its arguments, returns and errors, with an example.

``--doctest-modules`` runs the examples.
"""

import ast
import inspect
import re
import textwrap
from typing import Any

import attrs
import pytest
from public_names import MODULES, values

PUBLIC = values(*MODULES)
DESCRIBED = {
    name: value
    for name, value in PUBLIC.items()
    if value is not Any and not (inspect.isclass(value) and issubclass(value, Exception))
}
METHODS = {
    f"{name}.{method}": getattr(function, "__func__", function)
    for name, value in DESCRIBED.items()
    if inspect.isclass(value)
    for method, function in vars(value).items()
    if not method.startswith("_") and inspect.isroutine(getattr(function, "__func__", function))
}
# The methods that the docstring of a class describes.
MADE_BY = ("__init__", "__attrs_post_init__", "__call__")


def section(value, name):
    """Return the text of a section of a docstring, or "" if there is none."""
    found = re.search(rf"^{name}:\n((?:[ ]{{4}}.*\n?|\n)*)", inspect.getdoc(value) or "", re.M)
    return found[1] if found else ""


def names_in(text):
    """Return the names that a section lists, before the colon at its left edge."""
    heads = [line.split(":")[0] for line in text.splitlines() if re.match(r"    \S", line)]
    return {name.strip(" *") for head in heads for name in head.split(",")}


def parameters(value):
    derived = inspect.isclass(value) and value.__name__ in ("Moment", "View", "BuiltIn", "Wrapper")
    if derived or getattr(value, "_is_protocol", False):  # no caller makes one
        return set()
    taken = set(inspect.signature(value).parameters) - {"self", "cls"}
    if attrs.has(value):
        taken -= {field.alias for field in attrs.fields(value) if field.name.startswith("_")}
    return taken


def raising(tree):
    """Return whether there is a ``raise`` with an exception."""
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def tree_of(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def raises(function):
    """Return whether a function raises, itself or through the private functions of its module."""
    module = ast.parse(inspect.getsource(inspect.getmodule(function)))
    helpers = {
        node.name: node
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
    }
    waiting, seen = [tree_of(inspect.unwrap(function))], set()
    while waiting:
        tree = waiting.pop()
        if raising(tree):
            return True
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        waiting += [helpers[name] for name in called & set(helpers) - seen]
        seen |= called
    return False


def each(found):
    return pytest.mark.parametrize("value", found.values(), ids=found)


@each(PUBLIC | METHODS)
def test_the_first_line_says_what_it_does(value):
    first, *rest = (inspect.getdoc(value) or "").splitlines() or [""]
    assert re.search(r"[.:]$", first), f"there is no summary of one line: {first!r}"
    assert not rest or not rest[0] or first.endswith(":") or not rest[0][0].islower(), (
        "the summary has more than one line"
    )


@each(DESCRIBED)
def test_every_parameter_is_described_and_no_other(value):
    assert names_in(section(value, "Args")) == parameters(value)


@each({name: value for name, value in DESCRIBED.items() if inspect.isfunction(value)})
def test_the_return_value_is_described(value):
    nothing = inspect.signature(value).return_annotation in (None, "None")
    assert bool(section(value, "Returns").strip()) is not nothing


@each(DESCRIBED | METHODS)
def test_exceptions_are_described(value):
    made = [vars(value).get(method) for method in MADE_BY] if inspect.isclass(value) else [value]
    file = inspect.getsourcefile(inspect.unwrap(value))
    own = [one for one in made if one and inspect.getsourcefile(inspect.unwrap(one)) == file]
    if any(map(raises, own)):
        assert re.search(r"^    \w+(, \w+)*: \S", section(value, "Raises"), re.M), (
            "it raises, but has no section Raises"
        )


@each(DESCRIBED)
def test_there_is_an_example(value):
    assert ">>> " in section(value, "Example")


# --- tests of the helpers


def complete(a, *b, c=1, **d):
    """Do it.

    Args:
        a, *b: the first,
            and more: than that.
        c: one.
        **d: the rest.
    """
    _fail()


def _fail():
    raise ValueError("no")


def silent():
    """Do nothing."""


def test_a_complete_docstring_is_parsed():
    assert names_in(section(complete, "Args")) == parameters(complete) == {"a", "b", "c", "d"}
    assert names_in(section(silent, "Args")) == set() and section(complete, "Raises") == ""


def test_exceptions_of_private_helpers_count():
    assert raises(complete) and not raises(silent)
