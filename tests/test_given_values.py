"""Numbers of NumPy, and any sequence and mapping, are taken as Python's own are.

The table is that of all wrong calls, with right values: each is given as a plain value and as its
twins, and both have to end alike. Then the example of each docstring is run with twins in the place
of all its arguments, and prints the same.
"""

import doctest
import functools
import inspect
import io
import re
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
import pytest
from omegaconf import OmegaConf
from test_wrong_calls import (
    ENTRIES,
    FOR_USERS,
    Entry,
    arguments,
    call_in_example,
    outcome,
    slow_if_it_trains,
)

import fnloop as fl
from fnloop.extend import Moment


class Items(Sequence):
    """A sequence that is neither a list nor a tuple."""

    def __init__(self, items):
        self.items = items

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)


def is_data(value):
    """Return whether a value can be in a file of YAML."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_data(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(is_data, value))
    return type(value) in (bool, int, float, str, type(None))


def of_numpy(value):
    """Return a value with numbers of NumPy, of no fewer bits, in the place of Python's."""
    if type(value) in (list, tuple):
        return type(value)(map(of_numpy, value))
    if type(value) is dict:
        return {key: of_numpy(each) for key, each in value.items()}
    if type(value) is float and float(np.float32(value)) == value:
        return np.float32(value)
    kinds = {bool: np.bool_, int: np.int64, float: np.float64}
    return kinds[type(value)](value) if type(value) in kinds and abs(value) < 2**63 else value


def twins(value):
    """Return what is to be taken as a value."""
    found = [of_numpy(value)]
    if type(value) in (list, tuple):
        found.append(Items(value))
    if type(value) is dict:
        found.append(MappingProxyType(value))
    if type(value) in (list, tuple, dict) and is_data(value):
        found.append(OmegaConf.create(list(value) if type(value) is tuple else value))
    return found


VALUES = [
    *(True, 0, 1, 2, 10, 0.0, 0.5, 1.5, 1e-3),
    *([], [1], [1, 3], [0.5], ["model"], ["x"], ["0.*"], ["valid/loss"], [0.1, 0.5]),
    *({}, {"a": 1}, {"a": 0.5}, {"lr": 0.1}, {"lr": [0.1, 0.2]}, {"valid/loss": "max"}),
]
# A list and a tuple are a batch, or batches, and no list of something. A True is a number in them.
OF_DATA = ("loader", "loaders", "batch", "batches", "window", "lengths", "tree", "value", "loss_fn")
AS_IT_IS = ("Call(", "Record(", "dict(", "History(", "reduce(", "gather(", "broadcast(")


def differences(call, entry):
    """Return the values whose twins do not end as they do."""
    found = []
    for value in VALUES:
        plain = outcome(call, entry, lambda: value)
        for twin in twins(value):
            end = outcome(call, entry, lambda: twin)
            if end.kind != plain.kind:
                found.append((value, type(twin).__name__, plain, end))
    return found


TAKES = re.compile("int|float|bool|Sequence|Mapping|Iterable|Selectors|Length|_Fn")
# They train for seconds, or look at all that a program refers to, which here is this file.
NOT_TRIED = ("audit", "bisect", "check_script", "tune", "verify")


def is_of_data(call):
    name = call.partition("(")[2].partition(":")[0].strip(")")
    return name in OF_DATA or call.startswith(AS_IT_IS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ENTRIES if not is_of_data(name)])
def test_what_is_taken_as_a_value_ends_as_it_does(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert differences(name, ENTRIES[name]) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "name", "parameter"),
    [
        slow_if_it_trains(module, name, parameter)
        for module, name, parameter in arguments(*FOR_USERS)
        if TAKES.search(str(parameter.annotation))
        and not is_of_data(f"{name}({parameter.name})")
        and name not in NOT_TRIED
    ],
)
def test_so_does_an_argument_that_is_not_in_the_table(
    module, name, parameter, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    call = f"{name}({parameter.name})"
    entry = Entry(functools.partial(call_in_example, module, name, parameter), words=(name,))
    assert differences(call, entry) == []


# --- the examples of docstrings


def with_examples():
    """Yield each public function and hook whose docstring has an example."""
    for module in FOR_USERS:
        for name in module.__all__:
            value = getattr(module, name)
            is_hook = isinstance(value, type) and issubclass(value, fl.Hook | Moment)
            if not (is_hook or inspect.isfunction(value)) or value in (fl.Hook, Moment):
                continue
            has_example = ">>>" in (inspect.getdoc(value) or "")
            if has_example and name not in NOT_TRIED and not is_of_data(f"{name}()"):
                yield pytest.param(module, name, id=name)


def with_twins(function):
    """Return a function that gives another one the twins of its arguments."""

    def twin(value):
        return twins(value)[-1]

    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        bound = inspect.signature(function).bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(map(twin, value))
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: twin(each) for key, each in value.items()}
            elif name not in OF_DATA:
                bound.arguments[name] = twin(value)
        return function(*bound.args, **bound.kwargs)

    return call


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "name"), [*with_examples()])
def test_an_example_prints_the_same_with_them(module, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = getattr(module, name)
    call = with_twins(function)
    monkeypatch.setattr(module, name, call)
    names = vars(inspect.getmodule(function)) | {name: call}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    example = doctest.DocTestParser().get_doctest(function.__doc__, names, name, None, 0)
    shown = io.StringIO()
    found = doctest.DocTestRunner(optionflags=flags).run(example, out=shown.write)
    assert not found.failed, shown.getvalue()
