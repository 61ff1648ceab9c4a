"""Freeze parts of a model, chosen by selectors, and train them again."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fnloop._backend.torch_compat import buffers_of, strip_compile_prefix
from fnloop._core.averages import check_not_averaged
from fnloop._core.optimizers import (
    SCHEDULED,
    UNFROZEN,
    Group,
    initial_value,
    labelled_groups,
    optimizers_in,
    set_initial_value,
)
from fnloop._core.state import (
    Ownership,
    TrainState,
    all_parameters,
    check_not_stale,
    clear_parameter_cache,
    generation_of,
    ownership_of,
    parameters,
    take_ownership,
    unwrap,
)
from fnloop._display import checks
from fnloop._display.checks import describe, instance, is_list, join_names, suggestion
from fnloop._display.checks import function as check_function

# --------------------------------------------------------------------------------------------------
# Freeze parts of a model, and train them again.


def freeze(state: TrainState, *selectors: Selector, statistics: str = "kept") -> TrainState:
    """Freeze parameters: no update changes them until :func:`unfreeze`.

    They get no gradient, so weight decay and momentum do not change them either. The optimizer
    keeps their state. Dropout stays as it is.

    A norm layer with running statistics, such as BatchNorm, is frozen if all of its parameters are;
    one without parameters, if all those of the module around it are. It stays in evaluation mode,
    in this run and all that follow: its statistics are kept, and are what it normalizes by.

    Args:
        state: the newest state. It is stale afterwards.
        selectors: what to freeze: modules of the model; globs of names; or functions
            ``(name, parameter) -> bool``. A glob is compared with the names of all parameters and
            modules, and a module stands for all below it: "layer4" and "layer4.*" are the same, and
            "*" is everything. For layers by their number, take ``*layers(state.model)[:-1]``.
        statistics: "running" leaves the norm layers in training mode, where their statistics
            follow the data. This may be called again to change it.

    Returns:
        The state, with the same model.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: there is no selector, or one is something else.
        ValueError: a selector matches nothing in the model, or there is no such ``statistics``.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        >>> state = freeze(state, model[0])
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['1.weight', '1.bias']

    Notes:
        A script of several phases calls ``freeze`` and ``unfreeze`` between them. When it is
        started again, it may call them again: the phase that it continues trains what it trained
        before. In a script without phases, call them before ``resume``.

    Replaces: lightning.BackboneFinetuning, pytorch_accelerated.ModelFreezer, keras.trainable
    """
    check_not_stale(state, "freeze")
    check_not_averaged("freeze", state)
    checks.choice("freeze", "statistics", statistics, ("kept", "running"))
    found = select("freeze", unwrap(state), selectors)
    for p in found.parameters.values():
        p.requires_grad_(False)
        p.grad = None
    clear_parameter_cache(state)
    return take_ownership(_with_modes(state, found, keep=statistics == "kept"))


def unfreeze(
    state: TrainState, *selectors: Selector, optimizer: str | None = None, **group: object
) -> TrainState:
    """Train frozen parameters again, with settings of their own if you like: ``lr=1e-4``.

    Parameters that the optimizer does not have yet become a new group, with these settings and its
    defaults. Those that it has keep their state. With settings, they move from their group into a
    new one with the other settings of the old one, unless they are the whole group.

    Args:
        state: the newest state. It is stale afterwards.
        selectors: what to train, as in :func:`freeze`: modules, globs of names, or functions
            ``(name, parameter) -> bool``; "*" is everything. Parameters of integers stay frozen.
        optimizer: with several optimizers, the name of the one that takes the parameters that none
            has yet.
        group: settings of a parameter group: ``lr=1e-4``, ``weight_decay=0.0``, and
            ``name="head"``, by which records call it: "train/lr/head".

    Returns:
        The state, with the same model and the same optimizer.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: there is no selector, one is something else, or the optimizer has no such
            setting.
        ValueError: a selector matches nothing in the model, a setting is out of range, another
            group has the name, or it is not clear which optimizer takes a parameter.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        >>> state = unfreeze(freeze(state, "0"), "0.*", lr=0.001)
        >>> [group["lr"] for group in state.optimizer.param_groups]
        [0.1, 0.001]

    Notes:
        A learning rate is an initial value, as everywhere: ``schedule`` multiplies it by its
        factor, from the next update on. A scheduler of torch is for the groups that it was made
        for: change them between two phases. A norm layer that :func:`freeze` has put into
        evaluation mode returns to training mode with the first of its parameters.

        A checkpoint has the groups. It may be restored into an optimizer that was made without
        them.

    Replaces: lightning.BackboneFinetuning, pytorch_accelerated.ModelFreezer
    """
    check_not_stale(state, "unfreeze")
    check_not_averaged("unfreeze", state)
    group = checks.plain(group)
    found = select("unfreeze", unwrap(state), selectors)
    trained = {
        name: p for name, p in found.parameters.items() if p.is_floating_point() or p.is_complex()
    }
    named = optimizers_in(state.optimizer)
    held = {id(p) for one in named.values() for g in one.param_groups for p in g["params"]}
    added = {name: p for name, p in trained.items() if id(p) not in held}
    taking = _taking(named, optimizer, [*added])
    chosen = {id(p) for p in trained.values()}
    moving = [one for one in named.values() if group and _has_any(one, chosen)]
    for one in {id(one): one for one in (*moving, *([taking] if taking else []))}.values():
        _check_settings(one, group)
    before = Layout.of(state)
    try:
        for one in moving:
            _set_apart(one, chosen, group)
        if taking is not None:
            _add(taking, added, group)
        labelled_groups(named)  # which raises for a name that another group has
        for p in trained.values():
            p.requires_grad_(True)
    except BaseException:
        before.put_back(state)
        raise
    clear_parameter_cache(state)
    return take_ownership(_with_modes(state, found, keep=None))


# --- modes


def _with_modes(state: TrainState, found: Selected, keep: bool | None) -> TrainState:
    """Return the state with the norm layers that were selected in the mode that they should have.

    Args:
        state: the state, after its parameters have been frozen or not.
        found: what was selected.
        keep: whether frozen norm layers keep their statistics; None leaves them as they are.
    """
    model = unwrap(state)
    modules = {strip_compile_prefix(name): module for name, module in model.named_modules()}
    touched = {id(p) for p in found.parameters.values()}
    kept = dict.fromkeys(kept_norms(state))
    for name, module in modules.items():
        if not has_statistics(module):
            continue
        around = name
        while not (owned := [*modules[around].parameters()]) and around:
            around = around.rpartition(".")[0]
        if module not in found.modules and not any(id(p) in touched for p in owned):
            continue
        frozen = not any(p.requires_grad for p in owned)
        if frozen and keep is None:
            continue
        if frozen and keep:
            kept[name] = None
            module.eval()
        elif name in kept:
            del kept[name]
            module.train(model.training)
    return with_kept_norms(state, kept)


# --- groups


def _taking(named: Mapping[str, Optimizer], name: str | None, added: list[str]) -> Optimizer | None:
    """Return the optimizer that takes parameters that none has; None if there are no such."""
    if name is not None and (name not in [*named] or "" in named):  # it may have no hash
        known = checks.join_names([*named], 5)
        if "" in named:
            known = "one optimizer, without a name: leave out optimizer="
        raise ValueError(f"unfreeze names the optimizer {name!r}, but this state has {known}")
    if not added:
        return None
    if name is None and "" not in named:
        first = next(iter(named))
        raise ValueError(
            f"no optimizer has {checks.join_names(added)}, and this state has several: "
            f'say which one takes them, unfreeze(..., optimizer="{first}"). It has '
            f"{checks.join_names([*named], 5)}"
        )
    taking = named["" if name is None else name]
    if isinstance(taking, LBFGS):
        raise ValueError(
            "LBFGS takes no further parameters: make it with all parameters that you will train, "
            "and freeze those that are not trained yet"
        )
    return taking


def _has_any(optimizer: Optimizer, chosen: set[int]) -> bool:
    return any(id(p) in chosen for group in optimizer.param_groups for p in group["params"])


def _check_settings(optimizer: Optimizer, given: Mapping[str, object]) -> None:
    """Raise if these are no settings of a group of an optimizer."""
    held = {key for group in optimizer.param_groups for key in group}
    known = [
        key
        for key in {**optimizer.defaults, **dict.fromkeys(sorted(held)), "name": None}
        if key not in ("params", "param_names", UNFROZEN)
        and not key.startswith(("initial_", SCHEDULED))
    ]
    for key, value in given.items():
        if key not in known:
            raise TypeError(
                f"unfreeze: {type(optimizer).__name__} has no setting {key!r}; it has "
                f"{', '.join(known)}{suggestion(key, known)}"
            )
        if key == "name":
            meaning = 'the name of the group in records, such as "head"'
            checks.text("unfreeze", key, instance("unfreeze", key, value, str, meaning), meaning)
        default, least = optimizer.defaults.get(key), 0 if key == "lr" else -math.inf
        if isinstance(default, bool):
            checks.flag("unfreeze", key, value)
        elif (key == "lr" or isinstance(default, int | float)) and not isinstance(value, Tensor):
            checks.number("unfreeze", key, value, least=least)
    # They may fit one of the groups, or the defaults.
    bases = [base for base in ({}, *optimizer.param_groups) if not _ask(optimizer, base)]
    errors = [_ask(optimizer, {**base, **given}) for base in bases]
    if errors and all(errors):
        name = type(optimizer).__name__
        raise ValueError(f"unfreeze: {name} refuses these settings: {errors[0]}") from errors[0]


def _ask(optimizer: Optimizer, given: Mapping[str, object]) -> Exception | None:
    """Return why torch's constructor of an optimizer refuses these settings; None if it does not.

    Other classes are not asked, because their constructors may do anything.
    """
    kind, known = type(optimizer), inspect.signature(type(optimizer)).parameters
    if not kind.__module__.startswith("torch.optim."):
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]][:1]
    settings = {k: v for k, v in {**optimizer.defaults, **given}.items() if k in known}
    try:
        kind(**{**settings, "params": params})
    except Exception as error:
        return error
    return None


def _set_apart(optimizer: Optimizer, chosen: set[int], given: Mapping[str, object]) -> None:
    """Give settings to some parameters of an optimizer, in groups of their own."""
    for group in [*optimizer.param_groups]:
        params = group["params"]
        ours = [i for i, p in enumerate(params) if id(p) in chosen]
        if not ours:
            continue
        if len(ours) < len(params):
            group = split_group(optimizer, group, ours)
        for key, value in given.items():
            set_initial_value(group, key, value)


def split_group(optimizer: Optimizer, group: Group, positions: Iterable[int]) -> Group:
    """Move some parameters of a group into a new one, with the same settings, and return that.

    It does not have the name of the group, which only one may have.

    Args:
        optimizer: the optimizer.
        group: its group.
        positions: those of the parameters.
    """
    moved = set(positions)
    params, names = group["params"], group.get("param_names")
    entries = [*params] if names is None else [*zip(names, params, strict=True)]
    # One call: what a schedule has set is the same object as the setting.
    settings = copy.deepcopy(
        {k: v for k, v in group.items() if k not in ("params", "param_names", "name")}
    )
    for kept in (params, names):
        if kept is not None:
            kept[:] = [one for i, one in enumerate(kept) if i not in moved]
    given = [entry for i, entry in enumerate(entries) if i in moved]
    optimizer.add_param_group({UNFROZEN: True, **settings, "params": given})
    return optimizer.param_groups[-1]


def _add(
    optimizer: Optimizer, params: Mapping[str, nn.Parameter], given: Mapping[str, object]
) -> None:
    """Add parameters to an optimizer as a new group."""
    add_group(optimizer, params)
    for key, value in given.items():
        set_initial_value(optimizer.param_groups[-1], key, value)


def add_group(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
    """Add parameters to an optimizer as a new group, with its defaults.

    Args:
        optimizer: the optimizer.
        params: the parameters by name.
    """
    groups = optimizer.param_groups
    has_names = bool(groups) and "param_names" in groups[0]
    group: Group = {"params": [*(params.items() if has_names else params.values())]}
    for key, value in optimizer.defaults.items():
        if isinstance(value, Tensor):  # a schedule may have changed it, in the first group
            shared = [one for one in groups if one.get(key) is value]
            group[key] = (initial_value(shared[0], key) if shared else value).clone()
    optimizer.add_param_group({UNFROZEN: True, **group})


# --------------------------------------------------------------------------------------------------
# What is trained: parameters, the groups that they are in, and the modes of modules.
#
# A checkpoint has all of it. A script that is started again calls `freeze` and `unfreeze` again on
# its way to the phase that it continues. That phase then continues with what the checkpoint says.

SLOT = "freeze"  # the slot with the names of norm layers that stay in evaluation mode


# --- norm layers


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module has running statistics, as BatchNorm does."""
    own = buffers_of(module)
    return own.get("running_mean") is not None or own.get("running_var") is not None


def kept_norms(state: TrainState) -> tuple[str, ...]:
    """Return the names of the norm layers whose statistics are frozen."""
    return tuple(state.slots.get(SLOT, ()))


def with_kept_norms(state: TrainState, names: Iterable[str]) -> TrainState:
    """Return the state with other norm layers whose statistics are frozen."""
    slots = {name: slot for name, slot in state.slots.items() if name != SLOT}
    return attrs.evolve(state, slots=slots | {SLOT: kept} if (kept := [*names]) else slots)


def keep_statistics(state: TrainState) -> set[nn.Module]:
    """Put the norm layers whose statistics are frozen into evaluation mode, and return them."""
    if SLOT not in state.slots:
        return set()
    kept, modules = set(kept_norms(state)), unwrap(state).named_modules()
    return {module.eval() for name, module in modules if strip_compile_prefix(name) in kept}


# --- everything together


@attrs.frozen(eq=False)
class Layout:
    """What is trained, and how, to put it back.

    Args:
        parameters: each parameter, and whether it requires gradients.
        modules: each module, and whether it is in training mode.
        optimizers: each optimizer, with its groups and their settings. A setting that is a tensor
            is followed by its value.
        kept: the names of the norm layers whose statistics are frozen.
    """

    parameters: Sequence[tuple[Tensor, bool]]
    modules: Sequence[tuple[nn.Module, bool]]
    optimizers: Sequence[tuple[Optimizer, Groups]]
    kept: tuple[str, ...]

    @classmethod
    def of(cls, state: TrainState) -> Layout:
        """Return the layout of a state."""
        return cls(
            [(p, p.requires_grad) for p in state.model.parameters()],
            [(module, module.training) for module in state.model.modules()],
            [(one, Groups.of(one)) for one in optimizers_in(state.optimizer).values()],
            kept_norms(state),
        )

    def put_back(self, state: TrainState) -> TrainState:
        """Return a state of the same model with this layout."""
        for p, trained in self.parameters:
            p.requires_grad_(trained)
            if not trained:
                p.grad = None
        for module, training in self.modules:
            module.training = training
        for one, groups in self.optimizers:
            groups.put_back(one)
        clear_parameter_cache(state)
        return with_kept_norms(state, self.kept)


@attrs.frozen(eq=False)
class Groups:
    """The groups of an optimizer.

    Args:
        held: each group, with its settings: the object, and the value if it is a tensor.
    """

    held: Sequence[tuple[Group, Mapping[str, tuple[object, object]]]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Groups:
        """Return the groups of an optimizer as they are now."""
        return cls(
            [
                (group, {key: (value, _value(value)) for key, value in group.items()})
                for group in optimizer.param_groups
            ]
        )

    def put_back(self, optimizer: Optimizer) -> None:
        """Give these groups back to an optimizer."""
        for group, settings in self.held:
            group.clear()
            for key, (held, value) in settings.items():
                if isinstance(held, Tensor) and isinstance(value, Tensor):
                    held.copy_(value)
                elif isinstance(held, list) and isinstance(value, list):
                    held[:] = value
                group[key] = held
        optimizer.param_groups[:] = [group for group, _ in self.held]


def _value(value: object) -> object:
    """Return a copy of what is changed in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return [*value] if isinstance(value, list) else None


_restored: WeakKeyDictionary[Ownership[TrainState], Layout] = WeakKeyDictionary()


def note_restored(state: TrainState, whole: bool) -> None:
    """Note that the counters of a state were restored, in place.

    Args:
        state: the state.
        whole: whether all of it was. Then a phase that continues can have its layout back.
    """
    ownership_of(state).restored = generation_of(state)
    if whole and state.phases:
        _restored[ownership_of(state)] = Layout.of(state)


def put_back_restored(state: TrainState, name: str | None) -> TrainState:
    """Return the state as its checkpoint has it, if it continues or passes a phase of it.

    Args:
        state: the state that a run begins with.
        name: the name of its phase, or None.
    """
    layout = _restored.get(owner := ownership_of(state))
    if layout is None:
        return state
    names = [phase.name for phase in state.phases]
    if name not in names or name == names[-1]:
        del _restored[owner]
    return layout.put_back(state) if name in names else state


# --------------------------------------------------------------------------------------------------
# Selectors: which parameters of a model a function is for, by module, name or predicate.

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
        """Raise unless the state's optimizers update one of them, or all of them are frozen.

        Args:
            state: the state.

        Raises:
            ValueError: a selector is for nothing in the model, or all belong to other optimizers.

        Example:
            >>> from fnloop.testing import toy
            >>> Chosen("mine", "w").check(toy())
        """
        named = self.select(unwrap(state)).parameters
        if not self.of(state) and (trained := [n for n, p in named.items() if p.requires_grad]):
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
    if callable(selector) and not isinstance(selector, type):
        return _by_function(named, selector)
    raise TypeError(f"{named.owner} expects {_KINDS}; got {_advise(named.owner, selector)}")


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
    check_function(named.owner, "functions", function, "(name, parameter) -> bool", 2)
    chosen = [p for name, p in named.parameters.items() if function(name, p)]
    if not chosen:
        known = [name for name in (*named.modules, *named.parameters) if name]
        raise ValueError(
            f"{named.owner}: the function returned False for each parameter of the "
            f"{type(named.model).__name__}: {join_names(known[::-1])}"
        )
    return [], chosen


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
