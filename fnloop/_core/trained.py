"""What is trained: parameters, the groups that they are in, and the modes of modules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.optimizers import Group, optimizers_in
from fnloop._core.settings import UNFROZEN, Setting
from fnloop._core.state import Ownership, TrainState, unwrap

# A checkpoint has all of it. A script that is started again calls `freeze` and `unfreeze` again on
# its way to the phase that it continues. That phase then continues with what the checkpoint says.

SLOT = "freeze"  # the slot with the names of norm layers that stay in evaluation mode


# --- norm layers


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
        Ownership.of(state).parameters.clear()
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


_restored: WeakKeyDictionary[Ownership, Layout] = WeakKeyDictionary()


def note_restored(state: TrainState, whole: bool) -> None:
    """Note that the counters of a state were restored, in place.

    Args:
        state: the state.
        whole: whether all of it was. Then a phase that continues can have its layout back.
    """
    Ownership.of(state).restored = Ownership.generation_of(state)
    if whole and state.phases:
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


# --- groups that are made in a run


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
            group[key] = (Setting(shared[0], key).initial if shared else value).clone()
    optimizer.add_param_group({UNFROZEN: True, **group})
