"""Selectors: which parameters of a model a function is for, by module, name or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import attrs
from torch import nn

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._display.checks import describe, instance, join_names
from fnloop._display.checks import function as check_function

__all__ = ["Selected", "Selector", "Selectors", "check_selectors", "layers", "select"]

Selector = nn.Module | str | Callable[[str, nn.Parameter], bool]
Selectors = Selector | Sequence[Selector]
_GLOBS = 'globs of names such as "layer4.*"'
_KINDS = f"modules of the model, {_GLOBS}, or functions (name, parameter) -> bool"


@attrs.frozen(eq=False)
class Selected:
    """What selectors have found in a model.

    Args:
        parameters: name to parameter, each parameter once, in the order of the model.
        modules: the modules that were selected as a whole, and those below them.
    """

    parameters: dict[str, nn.Parameter]
    modules: frozenset[nn.Module]


def layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of a model, to choose by number: ``freeze(state, *layers(model)[:-1])``.

    They are the children of the model that have parameters, in the order in which it defines them.
    A module with one such child and no parameters of its own is opened. So the layers of a wrapper
    are those of your own module in it, and those of an ``nn.Sequential`` that is all of a model are
    its elements.

    Other libraries count children without parameters too, such as an activation. Parameters of
    the model itself, such as a class token, are in no layer: select them by name.

    Args:
        model: the model, ``state.model``.

    Returns:
        The layers. A model without such children is its only layer.

    Raises:
        TypeError: it is not a module.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> len(layers(net)), layers(net)[-1]
        (2, Linear(in_features=3, out_features=1, bias=True))

    Source: the layer groups of pytorch-accelerated's ``ModelFreezer``.
    """
    instance("layers", "model", model, nn.Module, "a module, such as state.model")
    found = _trained_children(model)
    while len(found) == 1 and not any(True for _ in model.parameters(recurse=False)):
        (model,) = found
        found = _trained_children(model)
    return found or (model,)


def _trained_children(module: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(child for child in module.children() if any(True for _ in child.parameters()))


def check_selectors(owner: str, only: Selectors) -> tuple[Selector, ...]:
    """Return the selectors of an argument ``only``, which is one or a list of them.

    Raises:
        TypeError: it is something else, or empty.
    """
    given: object = only
    selectors = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not selectors:
        raise TypeError(f"{owner} expects only as at least one selector, {_KINDS}; got {only!r}")
    for one in selectors:
        if isinstance(one, nn.Module) or (isinstance(one, str) and one):
            continue
        if isinstance(one, type | str) or not callable(one):
            raise TypeError(f"{owner} expects only as {_KINDS}; got {describe(one)}")
        check_function(owner, "only", one, "(name, parameter) -> bool", 2)
    return cast("tuple[Selector, ...]", selectors)


def select(owner: str, model: nn.Module, selectors: Sequence[Selector]) -> Selected:
    """Return the parameters of a model that at least one of the selectors is for.

    Args:
        owner: what was called with them, for messages.
        model: the user's module.
        selectors: modules of it; globs, for the names of parameters and of modules, which stand for
            all below them; or functions (name, parameter) -> bool.

    Raises:
        TypeError: there are none, or one of them is something else.
        ValueError: one of them is for nothing in the model.
    """
    if not selectors:
        raise TypeError(
            f'{owner} expects what to {owner} after the state, such as {owner}(state, "layer4.*") '
            f'or {owner}(state, state.model.layer4); "*" is all'
        )
    names = {strip_compile_prefix(name): module for name, module in model.named_modules()}
    parameters = {
        strip_compile_prefix(name): p for name, p in model.named_parameters(remove_duplicate=False)
    }
    chosen: set[int] = set()
    modules: set[nn.Module] = set()
    for selector in selectors:
        if isinstance(selector, str):
            matching = (name for name in names if fnmatch.fnmatchcase(name, selector))
            whole = [names[name] for name in matching if selector]  # the name of the model is ""
            matched = [p for name, p in parameters.items() if fnmatch.fnmatchcase(name, selector)]
        elif isinstance(selector, nn.Module):
            _check_own(owner, selector, model)
            whole, matched = [selector], []
        elif callable(selector) and not isinstance(selector, type):
            check_function(owner, "functions", selector, "(name, parameter) -> bool", 2)
            whole, matched = [], [p for name, p in parameters.items() if selector(name, p)]
        else:
            raise TypeError(f"{owner} expects {_KINDS}; got {_advise(owner, selector)}")
        below = {inner for module in whole for inner in module.modules()}
        found = {id(p) for p in (*matched, *(p for module in whole for p in module.parameters()))}
        is_module = isinstance(selector, nn.Module)  # it may be one of many, such as a Dropout
        if not (found or is_module or _has_buffers(below)):
            raise ValueError(_explain(owner, selector, model, [*names, *parameters]))
        chosen |= found
        modules |= below
    if not chosen and not _has_buffers(modules):
        raise ValueError(_explain(owner, selectors[-1], model, []))
    first = {id(p): name for name, p in reversed(parameters.items())}
    once = {name: p for name, p in parameters.items() if first[id(p)] == name}
    selected = {name: p for name, p in once.items() if id(p) in chosen}
    return Selected(selected, frozenset(modules))


def _advise(owner: str, given: object) -> str:
    """Return what was given instead of a selector, and what to write."""
    if isinstance(given, type):
        name = given.__name__
        return (
            f"the class {name}. For all modules of it: {owner}(state, *[m for m in "
            f"state.model.modules() if isinstance(m, {name})])"
        )
    return f"{describe(given)}. Several are arguments of their own: {owner}(state, *selectors)"


def _has_buffers(modules: Iterable[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.buffers())


def _check_own(owner: str, module: nn.Module, model: nn.Module) -> None:
    if not any(module is own for own in model.modules()):
        kind = type(module).__name__
        raise ValueError(
            f"{owner}: this {kind} is not a module of the state's {type(model).__name__}. Take it "
            "from there, state.model.<name>: a snapshot or a compiled model has modules of its own"
        )


def _explain(owner: str, selector: Selector, model: nn.Module, names: Sequence[str]) -> str:
    """Return the message for a selector that is for nothing in a model."""
    kind = type(model).__name__
    if isinstance(selector, nn.Module):
        return f"{owner}: this {type(selector).__name__} of the {kind} has no parameters"
    known = [name for name in names if name]
    if not isinstance(selector, str):
        return (
            f"{owner}: the function returned False for each parameter of the {kind}: "
            f"{join_names(known[::-1])}"
        )
    bare = selector.rstrip(".*")
    near = difflib.get_close_matches(bare, known, 3) or [n for n in known if bare and bare in n][:3]
    hint = f"Did you mean {join_names(near)}?" if near else f"There are {join_names(known, 5)}"
    return f'{owner}: nothing in the {kind} has a name like "{selector}". {hint}'
