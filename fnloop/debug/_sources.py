"""What code can change besides a state: counters, generators and attributes that it can reach.

They are found by walking from functions to what they refer to, closures, globals and attributes,
and from objects to what they hold. What belongs to installed packages is not walked into, except
loaders and modules of torch.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop.debug._lines import find_line

__all__ = ["Source", "find_sources", "is_users"]

MOST_OBJECTS, MOST_ITEMS, MOST_BYTES = 50_000, 1_000, 1 << 22
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_WALKED = ("torch.nn", "torch.utils.data", "fnloop", "toolz", "functools")
_INSTALLED = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")})
_GENERATED = ("<frozen", "<attrs", "<string")  # code without a file
_PACKAGE = str(Path(__file__).parents[1])


@attrs.frozen(eq=False)
class Source:
    """A value that code can change.

    Args:
        name: where it is: "the global calls of train.py", "the train loader.dataset.calls".
        kind: what it is, such as "torch.Generator"; "" for plain data.
        fingerprint: what its value was.
        put_back: gives it the value that it had.
        line: where code changes it, or uses it; or "".
    """

    name: str
    kind: str
    fingerprint: Hashable
    put_back: Callable[[], object]
    line: Callable[[], str]

    def __str__(self) -> str:
        kind, line = self.kind and f", a {self.kind}", self.line()
        return f"{self.name}{kind}{line and f' ({line})'}"


def find_sources(roots: Mapping[str, object]) -> dict[str, Source]:
    """Return the values that can be reached from some objects, by where they are.

    Args:
        roots: the objects, by what they are called.
    """
    walk = _Walk()
    for name, root in roots.items():
        walk.visit(name, root, None, quiet=False)
    return walk.found


def is_users(module: str | None) -> bool:
    """Return whether a module is neither installed nor a part of Python or of fnloop."""
    if module in (None, "builtins"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"
    return not file.startswith((*_INSTALLED, _PACKAGE))


class _Walk:
    """A walk over objects. ``found`` are the values that it has come to."""

    def __init__(self) -> None:
        self.found: dict[str, Source] = {}
        self._seen: dict[int, object] = {}  # the objects stay referenced, and so keep their ids
        self._codes: list[types.CodeType] = []

    def visit(
        self, name: str, value: object, put: Callable[[object], object] | None, quiet: bool
    ) -> None:
        """Walk into a value.

        Args:
            name: where it is.
            value: the value.
            put: puts another one into its place; None if nothing can.
            quiet: whether it belongs to fnloop, which knows what it keeps.
        """
        if isinstance(value, _PLAIN):
            if not quiet and put is not None:
                self._note(name, "", (type(value), value), lambda: put(value))
            return
        if id(value) in self._seen or len(self._seen) > MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if not quiet and (known := _state_of(value, put)) is not None:
            self._note(name, *known)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.visit(name, value.__self__, None, quiet)
            self.visit(name, value.__func__, None, quiet)
        elif isinstance(value, dict | list | tuple | set | deque):
            self._container(name, value, quiet)
        elif isinstance(value, type):
            self._class(value)
        elif not isinstance(value, Optimizer | types.ModuleType | Tensor):
            self._object(name, value)

    def _note(
        self, name: str, kind: str, fingerprint: Hashable, put_back: Callable[[], object]
    ) -> None:
        codes, word = self._codes, name.rpartition(".")[2]
        for before, after in (("the global ", " of "), ("", " in the closure of ")):
            if name.startswith(before) and after in name:
                word = name.removeprefix(before).partition(after)[0]
        word = word.partition("[")[0]
        line = partial(find_line, codes, word)
        self.found.setdefault(name, Source(name, kind, fingerprint, put_back, line))

    def _function(self, function: types.FunctionType) -> None:
        written_in = function.__code__.co_filename
        ours = written_in.startswith(_PACKAGE)
        if not written_in.startswith((*_INSTALLED, _PACKAGE, *_GENERATED)):
            self._codes += codes_of(function.__code__)
            file = Path(function.__code__.co_filename).name
            names = {name for code in codes_of(function.__code__) for name in code.co_names}
            scope = function.__globals__
            for key in sorted(names & scope.keys()):
                self._global(f"the global {key} of {file}", key, scope, names)
        called = function.__qualname__.replace("<locals>.", "")
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        for key, cell in closure:
            try:
                held = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            put = partial(setattr, cell, "cell_contents")
            self.visit(f"{key} in the closure of {called}", held, put, quiet=ours)
        inside = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for i, held in enumerate((*inside, *vars(function).values())):
            self.visit(f"default {i} of {called}", held, None, quiet=ours)

    def _global(self, name: str, key: str, scope: dict[str, object], used: Iterable[str]) -> None:
        value = scope[key]
        if isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                for inner in sorted({*used} & vars(value).keys()):
                    put = partial(vars(value).__setitem__, inner)
                    where = f"the global {inner} of {value.__name__}"
                    self.visit(where, vars(value)[inner], put, quiet=False)
            return
        self.visit(name, value, partial(scope.__setitem__, key), quiet=False)

    def _container(self, name: str, value: object, quiet: bool) -> None:
        assert isinstance(value, dict | list | tuple | set | deque)
        if not quiet and not isinstance(value, tuple):
            kept = copy.copy(value)
            fingerprint = (type(value), len(value))
            self._note(name, type(value).__name__, fingerprint, partial(_refill, value, kept))
        if len(value) > MOST_ITEMS:
            return
        if isinstance(value, dict):
            for key, part in list(value.items()):
                put = partial(value.__setitem__, key)
                self.visit(f"{name}[{key!r}]", part, put, quiet)
            return
        for i, part in enumerate(list(value)):
            put = partial(value.__setitem__, i) if isinstance(value, list | deque) else None
            self.visit(f"{name}[{i}]", part, put, quiet)

    def _class(self, kind: type) -> None:
        if not is_users(kind.__module__):
            return
        for key, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType):
                self._codes += codes_of(value.__code__)
                self.visit(f"{kind.__name__}.{key}", value, None, quiet=False)
            elif not key.startswith("__"):
                self.visit(f"{kind.__name__}.{key}", value, partial(setattr, kind, key), False)

    def _object(self, name: str, value: object) -> None:
        kind = type(value)
        module = kind.__module__ or ""
        if not (is_users(module) or module.startswith(_WALKED)):
            return
        for base in kind.__mro__:
            self.visit(base.__name__, base, None, quiet=False)
        ours = module.startswith("fnloop.")
        left_out: set[str] = set()
        if isinstance(value, nn.Module):
            left_out = vars(nn.Module()).keys() - {"training"}  # parameters, buffers, hooks
            for part, child in value.named_children():
                self.visit(f"{name}.{part}", child, None, quiet=ours)
        for key, held in _attributes(value).items():
            if key not in left_out and not (key.startswith("_") and module.startswith("torch")):
                put = partial(object.__setattr__, value, key)
                self.visit(f"{name}.{key}", held, put, quiet=ours)


def _attributes(value: object) -> dict[str, object]:
    """Return what an object holds, in its ``__dict__`` and in slots."""
    slots = [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object, and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def _state_of(
    value: object, put: Callable[[object], object] | None
) -> tuple[str, Hashable, Callable[[], object]] | None:
    """Return what a generator, an array or a counter is, its value, and what puts it back."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return "torch.Generator", state.numpy().tobytes(), partial(value.set_state, state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return "random.Random", value.getstate(), partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        held = value.get_state(legacy=True)
        return "numpy RandomState", repr(held), partial(value.set_state, held)
    if isinstance(value, np.random.Generator):
        kept = copy.deepcopy(value.bit_generator.state)
        restore = partial(setattr, value.bit_generator, "state", kept)
        return "numpy Generator", repr(kept), restore
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return "array", value.tobytes(), partial(np.copyto, value, value.copy())
    if isinstance(value, Tensor) and not value.requires_grad and value.layout is torch.strided:
        if value.numel() * value.element_size() > MOST_BYTES:
            return None
        kept = value.detach().clone()
        return "tensor", _bytes_of(kept), lambda: value.detach().copy_(kept)
    if isinstance(value, itertools.count) and put is not None:
        again = copy.copy(value)
        return "itertools.count", repr(value), lambda: put(again)
    return None


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _refill(value: object, kept: object) -> None:
    """Give a container what it held."""
    assert isinstance(value, dict | list | set | deque)
    value.clear()
    fill = value.extend if isinstance(value, list | deque) else value.update
    fill(kept)  # type: ignore[arg-type]
