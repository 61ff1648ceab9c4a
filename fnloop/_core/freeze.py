"""Freeze parts of a model, and train them again."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.average import check_not_averaged
from fnloop._core.frozen import Layout, has_statistics, kept_norms, with_kept_norms
from fnloop._core.monitor import suggestion
from fnloop._core.optimizers import (
    SCHEDULED,
    UNFROZEN,
    Group,
    initial_value,
    optimizers_in,
    set_initial_value,
)
from fnloop._core.selectors import Selected, Selector, select
from fnloop._core.snapshot import unwrap
from fnloop._core.state import (
    TrainState,
    check_not_stale,
    clear_parameter_cache,
    take_ownership,
)
from fnloop._display import checks

__all__ = ["freeze", "unfreeze"]


def freeze(state: TrainState, *selectors: Selector, statistics: str = "kept") -> TrainState:
    """Freeze parameters: no update changes them until :func:`unfreeze`.

    They get no gradient, so that weight decay and momentum do not move them either. The optimizer
    keeps their state. Dropout stays as it is.

    A norm layer with running statistics, such as BatchNorm, is frozen if all of its parameters are;
    one without parameters, if all those of the module around it are. It stays in evaluation mode,
    in this run and all that follow: its statistics are kept, and are what it normalizes by.

    A script of several phases calls ``freeze`` and ``unfreeze`` between them. When it is started
    again, it may call them again: the phase that it continues trains what it trained before. In a
    script without phases, call them before ``resume``.

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
        ValueError: a selector is for nothing in the model, or there is no such ``statistics``.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        >>> state = freeze(state, model[0])
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['1.weight', '1.bias']
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
    """Train parameters again, if you like with settings of their own: ``lr=1e-4``.

    Those that the optimizer does not have yet are added to it as a new group, with these settings
    and its defaults. Those that it has keep their state in it. With settings, they
    are moved from their group into a new one with its other settings, unless they are all of it.

    A learning rate is an initial value, as everywhere: ``schedule`` multiplies it by its
    factor, from the next update on. A scheduler of torch is for the groups that it was made for:
    change them between two phases. A norm layer that :func:`freeze` has put into evaluation mode
    returns to training mode with the first of its parameters.

    A checkpoint has the groups. It may be restored into an optimizer that was made without them.

    Args:
        state: the newest state. It is stale afterwards.
        selectors: what to train, as in :func:`freeze`: modules, globs of names, or functions
            ``(name, parameter) -> bool``; "*" is everything. Parameters of integers stay frozen.
        optimizer: with several optimizers, the name of the one that takes the parameters that none
            has yet.
        group: settings of a parameter group: ``lr=1e-4``, ``weight_decay=0.0``.

    Returns:
        The state, with the same model and the same optimizer.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: there is no selector, one is something else, or the optimizer has no such
            setting.
        ValueError: a selector is for nothing in the model, a setting is out of range, or it is open
            which optimizer takes a parameter.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        >>> state = unfreeze(freeze(state, "0"), "0.*", lr=0.001)
        >>> [group["lr"] for group in state.optimizer.param_groups]
        [0.1, 0.001]
    """
    check_not_stale(state, "unfreeze")
    check_not_averaged("unfreeze", state)
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
    if name is not None and (name not in named or "" in named):
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
            "LBFGS takes no further parameters: make it of all that are to be trained at some "
            "time, and freeze those that are not trained yet"
        )
    return taking


def _has_any(optimizer: Optimizer, chosen: set[int]) -> bool:
    return any(id(p) in chosen for group in optimizer.param_groups for p in group["params"])


def _check_settings(optimizer: Optimizer, given: Mapping[str, object]) -> None:
    """Raise if these are no settings of a group of an optimizer."""
    held = {key for group in optimizer.param_groups for key in group}
    known = [
        key
        for key in {**optimizer.defaults, **dict.fromkeys(sorted(held))}
        if key not in ("params", "param_names", UNFROZEN)
        and not key.startswith(("initial_", SCHEDULED))
    ]
    for key, value in given.items():
        if key not in known:
            raise TypeError(
                f"unfreeze: {type(optimizer).__name__} has no setting {key!r}; it has "
                f"{', '.join(known)}{suggestion(key, known)}"
            )
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
