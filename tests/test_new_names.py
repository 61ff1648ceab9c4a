"""A package of a user: a middleware, a hook and a loader of a loader, in a file each.

They are written with documented names alone, and train together. The laws hold for them, and the
tests of fnloop's own names find in them what they find in those: so a new name needs its file, its
lines in ``__init__``, a row in the table of laws, and a unit test.
"""

import ast
import doctest
import importlib
import inspect
import pickle
import re
import sys

import attrs
import pytest
import test_docstrings
import test_public_api
import test_wrong_calls
import torch
from public_names import returning, values
from sample_hooks import stop_at
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.testing import (
    Problem,
    assert_same,
    check_laws,
    law_accumulation,
    law_neutral,
    law_skipped_updates,
    small,
    spy,
    toy,
    toy_loss,
)

INIT = '''
"""Steps of our own.

- **Middleware**: `scaled`
- **Hooks and loaders**: `reach`, `repeated`
"""

from my_steps.hooks import reach
from my_steps.loaders import repeated
from my_steps.middleware import scaled

__all__ = ["reach", "repeated", "scaled"]
'''

MIDDLEWARE = '''
"""A middleware."""

from __future__ import annotations

import fnloop as fl
from fnloop import Middleware


@fl.middleware("gradient")
def scaled(factor: float) -> Middleware:
    """Multiply every gradient by a factor.

    Args:
        factor: a number; 1 changes nothing.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the factor is not a number.

    Example:
        >>> import torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(scaled(0.5))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> state.model.w.item()
        -2.0
    """
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        raise TypeError(f"scaled expects factor as a number; got {factor!r}")

    def wrap(step):
        def scaling(state, batch):
            state, out = step(state, batch)
            if out.skip is None:
                for p in state.model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(factor)
            return state, out

        return scaling

    return wrap
'''

HOOKS = '''
"""A hook."""

from __future__ import annotations

import attrs
from fnloop import Hook


class Reach(Hook):
    """What ``reach`` returns."""

    def __init__(self, key, target):
        self.monitors, self.target, self.begun = key, target, 0

    def begin(self, state):
        self.begun += 1
        return state

    def __call__(self, state):
        if "record" in state.events and state.history.latest(self.monitors) <= self.target:
            return attrs.evolve(state, stop=f"{self.monitors} is at most {self.target}")
        return state


def reach(key: str, target: float) -> Reach:
    """Stop when a metric is low enough.

    Args:
        key: the metric, such as "valid/loss".
        target: the number that it has to reach.

    Returns:
        A hook.

    Raises:
        TypeError: ``key`` is not a str, or ``target`` not a number.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> hooks = (reach("train/loss", -1),)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], epochs=9, hooks=hooks)
        >>> state.epoch, state.stop
        (2, 'train/loss is at most -1')
    """
    if not isinstance(key, str):
        raise TypeError(f"reach expects key as the name of a metric; got {key!r}")
    if not isinstance(target, int | float) or isinstance(target, bool):
        raise TypeError(f"reach expects target as a number; got {target!r}")
    return Reach(key, target)
'''

LOADERS = '''
"""A loader of a loader."""

from __future__ import annotations

from collections.abc import Iterable


class Repeated:
    """What ``repeated`` returns."""

    def __init__(self, loader, times):
        self.loader, self.times = loader, times

    def __len__(self):
        return self.times * len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            for _ in range(self.times):
                yield batch


def repeated(loader: Iterable, times: int) -> Repeated:
    """Return a loader that gives each batch several times in a row.

    Args:
        loader: a loader with a length.
        times: how often, at least 1.

    Returns:
        A loader.

    Raises:
        TypeError: ``loader`` is not one.
        ValueError: ``times`` is not an int of at least 1.

    Example:
        >>> [*repeated(["a", "b"], 2)]
        ['a', 'a', 'b', 'b']
    """
    if not hasattr(loader, "__iter__") or not hasattr(loader, "__len__"):
        raise TypeError(f"repeated expects loader with a length; got {loader!r}")
    if not isinstance(times, int) or times is True or times < 1:
        raise ValueError(f"repeated expects times as an int of at least 1; got {times!r}")
    return Repeated(loader, times)
'''

SLOPPY = '''
"""A name that lacks everything."""

from __future__ import annotations

__all__ = ["sloppy"]


def sloppy(times: int):
    """sloppy

    >>> sloppy(2)
    [0, 1]
    """
    if times < 0:
        raise ValueError("no")
    return [*range(times)]
'''

FILES = {"__init__": INIT, "middleware": MIDDLEWARE, "hooks": HOOKS, "loaders": LOADERS}
NAMES = ("scaled", "reach", "repeated")


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return a function that writes files of a package, by their names, and imports it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(package, files):
        (tmp_path / package).mkdir()
        for name, source in files.items():
            (tmp_path / package / f"{name}.py").write_text(source.lstrip("\n"))
        importlib.invalidate_caches()
        return importlib.import_module(package)

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("my_steps", "sloppy_steps"):
            del sys.modules[name]


@pytest.fixture
def mine(imported):
    return imported("my_steps", FILES)


# --- unit tests


def test_a_gradient_is_scaled(mine):
    state, _ = mine.scaled(0.5).gradient(spy(grad=4.0))(toy(), torch.ones(1))
    assert state.model.w.grad.item() == 2.0


def test_all_three_train_together(mine):
    """w falls by 1/2 in each update: the losses are 0, -1/2, then -1, -3/2; the third stops."""
    step, hook = fl.pipeline(mine.scaled(0.5))(toy_loss), mine.reach("train/loss", -1.0)
    loader = mine.repeated([torch.ones(3)], 2)
    state = fl.fit(step, toy(), {"train": loader}, epochs=9, hooks=(hook,))
    assert state.history["train/loss"] == (-0.25, -1.25)
    assert (state.model.w.item(), state.step, state.stop) == (-2.0, 4, "train/loss is at most -1.0")
    assert hook.begun == 1
    assert fl.evaluate(step, state, mine.repeated(loader, 3)) == {"loss": -2.0}


def test_they_are_checked_as_those_of_the_library(mine):
    """By a dry run, and before the first update of a run."""
    step, loader = fl.pipeline(mine.scaled(0.5))(toy_loss), mine.repeated([torch.ones(3)], 2)
    assert fl.dry_run(step, toy(), loader, (mine.reach("train/loss", 0),)).problems == ()
    with pytest.raises(KeyError, match="val/loss"):
        fl.fit(step, toy(), loader, hooks=(mine.reach("val/loss", 0),))
    with pytest.raises(TypeError, match="scaled"):  # the call is missing
        fl.pipeline(mine.scaled)
    assert len(fl.data.take(loader, 1)) == 1


# --- the laws


def test_the_middleware_keeps_the_laws(mine):
    batches = [*mine.repeated([torch.ones(2), torch.ones(1)], 2)]
    for pipe in (fl.pipeline(mine.scaled(0.5)), fl.pipeline(fl.accumulate(2), mine.scaled(2))):
        check_laws(pipe)
        check_laws(pipe, Problem(lambda: toy().model, toy_loss, batches))
        law_skipped_updates(pipe, small())
    law_neutral(mine.scaled(1), fl.pipeline(fl.clip(0.05)), small())
    law_accumulation(fl.pipeline(mine.scaled(0.5)), small(), 3, fl.accumulate)
    assert repr(mine.scaled(0.5)) == "scaled(0.5)"
    assert pickle.loads(pickle.dumps(mine.scaled(0.5))) == mine.scaled(0.5) != mine.scaled(2)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_with_all_three_can_be_cut_at_every_update_and_resumed(mine, workers, tmp_path):
    """Fold and resume, with a DataLoader that shuffles in the loader, and a closing record less."""
    x = torch.arange(6.0)

    def fit(state, *hooks):
        loader = mine.repeated(DataLoader(x, 2, shuffle=True, num_workers=workers), 2)
        step = fl.pipeline(fl.accumulate(2), mine.scaled(0.01))(toy_loss)
        hooks = (mine.reach("train/loss", -0.3), *hooks)
        return fl.fit(step, attrs.evolve(state, stop=None), loader, epochs=9, hooks=hooks)

    whole = fit(toy())
    assert 3 < whole.step < 27 and whole.stop is not None
    for split in range(1, whole.step):
        paused = fit(toy(), stop_at(split))
        assert paused.step == split
        path = fl.save(paused, tmp_path / str(split))
        for state in (paused, fl.restore(path, toy())):
            assert_same(fit(state), whole)


# --- what the tests of fnloop's own names find


def test_only_documented_names_are_used(mine):
    for source in FILES.values():
        tree = ast.parse(source)
        assert [*test_public_api.private_reads(tree)] == []
        found = {name for name, _ in test_public_api.imports(tree)}
        assert [name for name in found if re.search(r"fnloop\..*\b_", name)] == []


def test_the_names_are_found(mine):
    assert sorted(test_public_api.on_front_page(mine)) == sorted(mine.__all__) == sorted(NAMES)
    assert returning("Middleware", mine) == {"scaled"}  # for the table of the laws
    assert values(mine).keys() == {f"my_steps.{name}" for name in NAMES}


DOCUMENTED = (
    test_docstrings.test_the_first_line_says_what_it_does,
    test_docstrings.test_every_parameter_is_described_and_no_other,
    test_docstrings.test_the_return_value_is_described,
    test_docstrings.test_exceptions_are_described,
    test_docstrings.test_there_is_an_example,
)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstrings_are_checked_and_their_examples_run(mine, name):
    value = getattr(mine, name)
    for check in DOCUMENTED:
        check(value)
    assert doctest.testmod(inspect.getmodule(value)) == (0, value.__doc__.count(">>>"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_wrong_calls_are_tried(mine, name, tmp_path):
    found = [case for case in test_wrong_calls.arguments(mine) if case[1] == name]
    assert found
    for case in found:
        test_wrong_calls.check_argument(*case, root=str(tmp_path))


def test_what_is_missing_is_found(imported, tmp_path):
    sloppy = imported("sloppy_steps", {"__init__": SLOPPY})
    (argument,) = test_wrong_calls.arguments(sloppy)
    wrong_calls = lambda value: test_wrong_calls.check_argument(*argument, root=str(tmp_path))
    for check in (*DOCUMENTED, wrong_calls):
        with pytest.raises(AssertionError):
            check(sloppy.sloppy)
    assert test_public_api.on_front_page(sloppy) != sloppy.__all__
