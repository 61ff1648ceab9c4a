"""Selectors: which parameters of a model a function is for, by module, name or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.state import TrainState, all_parameters, parameters, unwrap, with_used
from fnloop._display.checks import describe, is_list, join_names
from fnloop._display.checks import function as check_function

Selector = nn.Module | str | Callable[[str, nn.Parameter], bool]
Selectors = Selector | Sequence[Selector]
_KINDS = (
    'modules of the model, globs of names such as "layer4.*", '
    "or functions (name, parameter) -> bool"
)


@attrs.frozen(eq=False)
class Selected:
    """What selectors have found in a model.

    Args:
        parameters: name to parameter, each parameter once, in the order of the model.
        modules: the modules that were selected as a whole, and those below them.
    """

    parameters: dict[str, nn.Parameter]
    modules: frozenset[nn.Module]


class Chosen:
    """The parameters that a middleware is for, as its argument ``only=`` says.

    They are looked up once for each model, and again when it has other parameters.

    Args:
        owner: the factory of the middleware, for messages.
        only: selectors as in ``freeze``: modules of the model, globs of names, or functions
            ``(name, parameter) -> bool``; one or a list of them. None: all parameters.
        name: the name of the middleware, which messages about a model begin with; None: ``owner``.

    Raises:
        TypeError: ``only`` is something else, or empty.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> @fl.middleware("gradient")
        ... def halved(only=None):
        ...     chosen = Chosen("halved", only)
        ...     def halve(state, batch, out):
        ...         for p in chosen.of(state):
        ...             p.grad.mul_(0.5)
        ...         return state, out
        ...     check = lambda state, listed: chosen.check(state)
        ...     return fl.Middleware("halved", gradient=fl.extend.then(halve), check_state=check)
        >>> state, out = fl.pipeline(halved("w"))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> state.model.w.item()
        -2.0
    """

    def __init__(self, owner: str, only: Selectors | None, name: str | None = None) -> None:
        self._name = name or owner
        self._selectors = None if only is None else check_selectors(owner, only)
        # By model: all parameters when it was looked at, and those chosen.
        self._found: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[Tensor]]] = (
            WeakKeyDictionary()
        )

    def select(self, module: nn.Module) -> Selected:
        """Return what is chosen in a module: ``parameters`` by name, and whole ``modules``.

        Args:
            module: the user's module, such as ``unwrap(state)``.

        Returns:
            The parameters, each once, and the set of modules.

        Raises:
            ValueError: a selector is for nothing in the module.

        Example:
            >>> found = Chosen("mine", "0.*").select(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
            >>> [*found.parameters]
            ['0.weight', '0.bias']
        """
        return select(self._name, module, ("*",) if self._selectors is None else self._selectors)

    def of(self, state: TrainState) -> list[Tensor]:
        """Return those of the parameters that a state's optimizers update that are chosen.

        Args:
            state: the state.

        Returns:
            The parameters, in the order of ``parameters(state)``.

        Raises:
            ValueError: a selector is for nothing in the model.

        Example:
            >>> from fnloop.testing import toy
            >>> len(Chosen("mine", "w").of(toy()))
            1
        """
        if self._selectors is None:
            return parameters(state)
        known, found = self._found.get(state.model, (None, []))
        if known is not (now := all_parameters(state)):
            ids = {id(p) for p in self.select(unwrap(state)).parameters.values()}
            found = [p for p in parameters(state) if id(p) in ids]
            self._found[state.model] = now, found
        return found

    def check(self, state: TrainState) -> None:
        """Raise unless the optimizers of the running step update one of them, or all are frozen.

        Args:
            state: the state, of which the optimizers count with which the running step updates.

        Raises:
            ValueError: a selector is for nothing in the model, or all belong to other optimizers.

        Example:
            >>> from fnloop.testing import toy
            >>> Chosen("mine", "w").check(toy())
        """
        named = self.select(unwrap(state)).parameters
        trained = [name for name, p in named.items() if p.requires_grad]
        if trained and not self.of(with_used(state)):
            raise ValueError(
                f"{self._name} is for parameters that no optimizer of this step updates: "
                f"{join_names(trained)}. List it in the step of their optimizer"
            )


def check_selectors(owner: str, only: Selectors) -> tuple[Selector, ...]:
    """Return the selectors of an argument ``only``, which is one or a list of them.

    Raises:
        TypeError: it is something else, or empty.
    """
    given: object = only
    selectors = tuple(given) if is_list(given) else (given,)
    if not selectors:
        raise TypeError(f"{owner} expects only as at least one selector, {_KINDS}; got {only!r}")
    for one in selectors:
        if isinstance(one, nn.Module | str):
            continue
        if isinstance(one, type) or not callable(one):
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
    named = _Named(
        owner,
        model,
        {strip_compile_prefix(n): module for n, module in model.named_modules()},
        {strip_compile_prefix(n): p for n, p in model.named_parameters(remove_duplicate=False)},
    )
    chosen: set[int] = set()
    modules: set[nn.Module] = set()
    for selector in selectors:
        whole, matched = _choose(named, selector)
        modules |= {inner for module in whole for inner in module.modules()}
        chosen |= {id(p) for p in (*matched, *(p for m in whole for p in m.parameters()))}
    if not chosen and not _has_buffers(modules):  # each is a module, such as a Dropout
        kinds = f"{type(selectors[-1]).__name__} of the {type(model).__name__}"
        raise ValueError(f"{owner}: this {kinds} has no parameters")
    first = {id(p): name for name, p in reversed(named.parameters.items())}
    once = {name: p for name, p in named.parameters.items() if first[id(p)] == name}
    selected = {name: p for name, p in once.items() if id(p) in chosen}
    return Selected(selected, frozenset(modules))


@attrs.frozen
class _Named:
    """What selectors choose from: the modules and parameters of a model, by name."""

    owner: str  # for messages
    model: nn.Module
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]


_Chosen = tuple[list[nn.Module], list[nn.Parameter]]  # modules with all below them, and parameters


def _choose(named: _Named, selector: Selector) -> _Chosen:
    """Return what a selector is for."""
    if isinstance(selector, str):
        return _by_name(named, selector)
    if isinstance(selector, nn.Module):
        return _by_module(named, selector)
    return _by_function(named, selector)


def _by_name(named: _Named, glob: str) -> _Chosen:
    def matching(names: Iterable[str]) -> list[str]:
        return [name for name in names if fnmatch.fnmatchcase(name, glob)]

    # The name of the model is "", which chooses nothing.
    modules = [named.modules[name] for name in matching(named.modules) if glob]
    parameters = [named.parameters[name] for name in matching(named.parameters)]
    inside = any(True for module in modules for _ in module.parameters())
    if not (parameters or inside or _has_buffers(modules)):
        known = [name for name in (*named.modules, *named.parameters) if name]
        bare = glob.rstrip(".*")
        near = difflib.get_close_matches(bare, known, 3)
        near = near or [name for name in known if bare and bare in name][:3]
        hint = f"Did you mean {join_names(near)}?" if near else f"There are {join_names(known, 5)}"
        kind = type(named.model).__name__
        raise ValueError(f'{named.owner}: nothing in the {kind} has a name like "{glob}". {hint}')
    return modules, parameters


def _by_module(named: _Named, module: nn.Module) -> _Chosen:
    if not any(module is own for own in named.model.modules()):
        kind = type(module).__name__
        raise ValueError(
            f"{named.owner}: this {kind} is not a module of the state's "
            f"{type(named.model).__name__}. Take it from there, state.model.<name>: a snapshot or "
            "a compiled model has modules of its own"
        )
    return [module], []


def _by_function(named: _Named, function: Callable[[str, nn.Parameter], object]) -> _Chosen:
    chosen = [p for name, p in named.parameters.items() if function(name, p)]
    if not chosen:
        known = [name for name in (*named.modules, *named.parameters) if name]
        raise ValueError(
            f"{named.owner}: the function returned False for each parameter of the "
            f"{type(named.model).__name__}: {join_names(known[::-1])}"
        )
    return [], chosen


def _has_buffers(modules: Iterable[nn.Module]) -> bool:
    return any(True for module in modules for _ in module.buffers())
