"""Freeze parts of a model, chosen by selectors, and train them again."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.state import TrainState, unwrap
from fnloop.extend import Chosen, Ownership, Setting, check_not_stale, checks, torch_compat
from fnloop.extend import groups as groups_of
from fnloop.extend import optimizers as optimizers_of

Selector = nn.Module | str | Callable[[str, nn.Parameter], bool]
Group = dict[str, Any]  # a parameter group of an optimizer
Found = tuple[dict[str, nn.Parameter], frozenset[nn.Module]]  # parameters by name, whole modules
_KINDS = (
    'modules of the model, globs of names such as "layer4.*", '
    "or functions (name, parameter) -> bool"
)


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
    check_not_stale(state, "freeze", trains=True)
    checks.choice("freeze", "statistics", statistics, ("kept", "running"))
    found = _select("freeze", state, selectors)
    for p in found[0].values():
        p.requires_grad_(False)
        p.grad = None
    return Ownership.take(_with_modes(state, found, keep=statistics == "kept"))


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
    check_not_stale(state, "unfreeze", trains=True)
    group = checks.plain(group)
    found = _select("unfreeze", state, selectors)
    trained = {name: p for name, p in found[0].items() if p.is_floating_point() or p.is_complex()}
    named = optimizers_of(state)
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
        groups_of(state)  # which raises for a name that another group has
        for p in trained.values():
            p.requires_grad_(True)
    except BaseException:
        before.put_back(state)
        raise
    return Ownership.take(_with_modes(state, found, keep=None))


# --- selectors


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
    checks.instance("layers", "model", model, nn.Module, "a module, such as state.model")
    found = _trained_children(model)
    while len(found) == 1 and not any(True for _ in model.parameters(recurse=False)):
        (model,) = found
        found = _trained_children(model)
    return found or (model,)


def _trained_children(module: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(child for child in module.children() if any(True for _ in child.parameters()))


def _select(owner: str, state: TrainState, selectors: tuple[Selector, ...]) -> Found:
    """Return what selectors choose in the model of a state.

    Raises:
        TypeError: there are none, or one of them is something else.
        ValueError: one of them is for nothing in the model.
    """
    if not selectors:
        raise TypeError(
            f'{owner} expects what to {owner} after the state, such as {owner}(state, "layer4.*") '
            f'or {owner}(state, state.model.layer4); "*" is all'
        )
    for one in selectors:
        if isinstance(one, type) or not (isinstance(one, str | nn.Module) or callable(one)):
            raise TypeError(f"{owner} expects {_KINDS}; got {_advise(owner, one)}")
        if not isinstance(one, str | nn.Module):
            checks.function(owner, "functions", one, "(name, parameter) -> bool", 2)
    found = Chosen(owner, selectors).select(unwrap(state))
    return found.parameters, found.modules


def _advise(owner: str, given: object) -> str:
    """Return what was given instead of a selector, and what to write."""
    if isinstance(given, type):
        name = given.__name__
        return (
            f"the class {name}. For all modules of it: {owner}(state, *[m for m in "
            f"state.model.modules() if isinstance(m, {name})])"
        )
    return (
        f"{checks.describe(given)}. Several are arguments of their own: {owner}(state, *selectors)"
    )


# --- modes


def _with_modes(state: TrainState, found: Found, keep: bool | None) -> TrainState:
    """Return the state with the norm layers that were selected in the mode that they should have.

    Args:
        state: the state, after its parameters have been frozen or not.
        found: what was selected.
        keep: whether frozen norm layers keep their statistics; None leaves them as they are.
    """
    model = unwrap(state)
    modules = {
        torch_compat.strip_compile_prefix(name): module for name, module in model.named_modules()
    }
    parameters, whole = found
    touched = {id(p) for p in parameters.values()}
    kept = dict.fromkeys(Layout.of(state).kept)
    for name, module in modules.items():
        if not _has_statistics(module):
            continue
        around = name
        while not (owned := [*modules[around].parameters()]) and around:
            around = around.rpartition(".")[0]
        if module not in whole and not any(id(p) in touched for p in owned):
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
    return attrs.evolve(Layout.of(state), kept=tuple(kept)).put_back(state)


def _has_statistics(module: nn.Module) -> bool:
    """Return whether a module has running statistics, as BatchNorm does."""
    own = torch_compat.buffers_of(module)
    return own.get("running_mean") is not None or own.get("running_var") is not None


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
    held = sorted({key for group in optimizer.param_groups for key in Setting.names(group)})
    known = [*dict.fromkeys([*optimizer.defaults, *held, "name"])]
    for key, value in given.items():
        if key not in known:
            raise TypeError(
                f"unfreeze: {type(optimizer).__name__} has no setting {key!r}; it has "
                f"{', '.join(known)}{checks.suggestion(key, known)}"
            )
        if key == "name":
            meaning = 'the name of the group in records, such as "head"'
            checks.text(
                "unfreeze", key, checks.instance("unfreeze", key, value, str, meaning), meaning
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
            group = _split(optimizer, group, ours)
        for key, value in given.items():
            Setting(group, key).begin_at(value)


def _add(
    optimizer: Optimizer, params: Mapping[str, nn.Parameter], given: Mapping[str, object]
) -> None:
    """Add parameters to an optimizer as a new group."""
    _add_group(optimizer, params)
    for key, value in given.items():
        Setting(optimizer.param_groups[-1], key).begin_at(value)


# --------------------------------------------------------------------------------------------------
# What is trained in a state that was restored.
#
# A checkpoint has all of it. A script that is started again calls `freeze` and `unfreeze` again on
# its way to the phase that it continues. That phase then continues with what the checkpoint says.

_SLOT = "freeze"  # with the names of norm layers that stay in evaluation mode


def keep_statistics(state: TrainState) -> set[nn.Module]:
    """Put the norm layers whose statistics are frozen into evaluation mode, and return them."""
    if not (kept := {*state.slots.get(_SLOT, ())}):
        return set()
    modules = unwrap(state).named_modules()
    return {module.eval() for name, module in modules if strip_compile_prefix(name) in kept}


@attrs.frozen(eq=False)
class Layout:
    """What is trained, and how, to put it back.

    Args:
        parameters: each parameter, and whether it requires gradients.
        modules: each module, and whether it is in training mode.
        groups: puts the groups of each optimizer back.
        kept: the names of the norm layers whose statistics are frozen.
    """

    parameters: Sequence[tuple[Tensor, bool]]
    modules: Sequence[tuple[nn.Module, bool]]
    groups: Sequence[Callable[[], None]]
    kept: tuple[str, ...]

    @classmethod
    def of(cls, state: TrainState) -> Layout:
        """Return the layout of a state."""
        return cls(
            [(p, p.requires_grad) for p in state.model.parameters()],
            [(module, module.training) for module in state.model.modules()],
            [Setting.hold(one) for one in optimizers_of(state).values()],
            tuple(state.slots.get(_SLOT, ())),
        )

    def put_back(self, state: TrainState) -> TrainState:
        """Return a state of the same model with this layout."""
        for p, trained in self.parameters:
            p.requires_grad_(trained)
            if not trained:
                p.grad = None
        for module, training in self.modules:
            module.training = training
        for put_back in self.groups:
            put_back()
        Ownership.of(state).parameters.clear()
        slots = {name: slot for name, slot in state.slots.items() if name != _SLOT}
        kept = {_SLOT: [*self.kept]} if self.kept else {}
        return attrs.evolve(state, slots=slots | kept)


_restored: WeakKeyDictionary[Ownership, Layout] = WeakKeyDictionary()


def note_restored(state: TrainState) -> None:
    """Note what is trained in a state that was restored whole, for a phase that continues."""
    if state.phases:
        _restored[Ownership.of(state)] = Layout.of(state)


def put_back_restored(state: TrainState, name: str | None) -> TrainState:
    """Return the state as its checkpoint has it, if it continues or passes a phase of it.

    Args:
        state: the state that a run begins with.
        name: the name of its phase, or None.
    """
    layout = _restored.get(owner := Ownership.of(state))
    if layout is None:
        return state
    names = [phase.name for phase in state.phases]
    if name not in names or name == names[-1]:
        del _restored[owner]
    return layout.put_back(state) if name in names else state


# --------------------------------------------------------------------------------------------------
# Groups that are made in a run; and those of a checkpoint, where `unfreeze` has changed them.


def _split(optimizer: Optimizer, group: Group, positions: Iterable[int]) -> Group:
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
    optimizer.add_param_group({Setting.UNFROZEN: True, **settings, "params": given})
    return optimizer.param_groups[-1]


def _add_group(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
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
            group[key] = (Setting(shared[0], key).initial if shared else value).clone()
    optimizer.add_param_group({Setting.UNFROZEN: True, **group})


def regroup(
    optimizer: Optimizer,
    known: Mapping[int, str],
    parameters: Mapping[str, Tensor],
    saved: Sequence[Group],
    others: Collection[str],
) -> None:
    """Give an optimizer the groups of a checkpoint, if ``unfreeze`` explains the difference.

    ``unfreeze`` moves parameters out of a group into a new one, and adds new ones. So the groups on
    one side must follow from those on the other. Another difference is left for an error.

    Args:
        optimizer: the new optimizer.
        known: id to name, of all parameters of the model and of the optimizer.
        parameters: these parameters by name.
        saved: the groups in the checkpoint: the names of their parameters, and their settings.
        others: the names of the parameters of other optimizers.
    """
    names_in = lambda group: [known[id(p)] for p in group["params"]]
    mine = [*map(names_in, optimizer.param_groups)]
    theirs = [[*group["params"]] for group in saved]
    if mine == theirs:
        return
    wanted = {name for group in theirs for name in group}
    added = wanted.difference(*mine)
    if not wanted <= parameters.keys() or not added.isdisjoint(others):
        return
    here = [bool(group.get(Setting.UNFROZEN)) for group in optimizer.param_groups]
    there = [bool(group.get(Setting.UNFROZEN)) for group in saved]
    if not (_follows(mine, theirs, there) or _follows(theirs, mine, here)):
        return
    # Groups that are left out lose nothing: the last loop says where each parameter is.
    del optimizer.param_groups[len(theirs) :]
    groups = optimizer.param_groups
    source = {name: i for i, group in enumerate(mine) for name in group}
    for names in theirs[len(groups) :]:
        i = source.get(names[0]) if names else None
        if i is None:
            _add_group(optimizer, {name: parameters[name] for name in names})
        else:
            _split(optimizer, groups[i], map(names_in(groups[i]).index, names))
    for group, names in zip(groups, theirs, strict=True):
        group["params"][:] = [parameters[name] for name in names]
        if "param_names" in group:
            group["param_names"][:] = names


def _follows(
    before: Sequence[Sequence[str]], after: Sequence[Sequence[str]], made: Sequence[bool]
) -> bool:
    """Return whether ``unfreeze`` can have made groups of others.

    Args:
        before: the names in each group.
        after: the names in each group after that.
        made: whether each of the latter was made by ``unfreeze``.
    """
    known = {name for group in before for name in group}
    if len(after) < len(before) or not known <= {name for group in after for name in group}:
        return False
    if not all(made[len(before) :]):
        return False
    source = {name: i for i, group in enumerate(before) for name in group}
    kept = all(
        [*filter({*new}.__contains__, old)] == [*new]
        for old, new in zip(before, after, strict=False)
    )
    return kept and all(
        len({source.get(name) for name in group}) <= 1 for group in after[len(before) :]
    )
