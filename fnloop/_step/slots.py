"""What middleware keep in ``state.slots``: made when a step first sees a state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn

from fnloop._core.copies import with_slot
from fnloop._core.middleware import Middleware
from fnloop._core.optimizers import groups_in
from fnloop._core.rng import fold_in, isolated, seed_all, torch_seeder
from fnloop._core.serialize import has_pending, materialize
from fnloop._core.state import TrainState, all_parameters

__all__ = ["init_slots", "renew_slots"]

# By model: its parameters and the middleware when they were last found to fit.
_checked: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Sequence[Middleware]]] = (
    WeakKeyDictionary()
)


def init_slots(state: TrainState, members: Sequence[Middleware]) -> TrainState:
    """Return the state with missing slots made, and those from a checkpoint materialized.

    Raises:
        Exception: a middleware is not for this state, or its slot cannot be made.
    """
    __tracebackhide__ = True
    _check(state, members)
    for member in members:
        if member.init is None:
            continue
        name = member.name
        if name not in state.slots:
            state = with_slot(state, name, _make(member.init, name, state))
        elif has_pending(saved := state.slots[name]):
            with _kept_group_settings(state):
                slot = materialize(_make(member.init, name, state), saved)
            state = with_slot(state, name, slot)
    return state


def _check(state: TrainState, members: Sequence[Middleware]) -> None:
    """Let middleware look at a state whose model or parameters they have not seen yet."""
    __tracebackhide__ = True
    if not (checking := [m.check_state for m in members if m.check_state is not None]):
        return
    known, listed = _checked.get(state.model, (None, None))
    if known is not all_parameters(state) or listed is not members:
        for check in checking:
            check(state, members)
        _checked[state.model] = all_parameters(state), members


def renew_slots(state: TrainState, members: Iterable[Middleware], prefix: str = "") -> TrainState:
    """Return the state without the slots that are made again when a phase begins."""
    old = {prefix + m.name for m in members if m.per_phase}
    kept = {name: slot for name, slot in state.slots.items() if name not in old}
    return attrs.evolve(state, slots=kept)


def _make(init: Callable[[TrainState], object], name: str, state: TrainState) -> object:
    """Make a middleware's slot. Its draws are a function of the seed, the same in every process."""
    __tracebackhide__ = True
    seed, device = fold_in(state.seed, zlib.crc32(name.encode())), state.backend.device
    with isolated(device):
        seed_all(seed)
        torch_seeder(device)(seed)
        return init(state)


@contextmanager
def _kept_group_settings(state: TrainState) -> Iterator[None]:
    """Restore the settings of all parameter groups afterwards.

    A new torch scheduler changes them, those that are tensors in place.
    """
    groups = groups_in(state.optimizer)
    before = [
        {key: (v, v.clone() if isinstance(v, Tensor) else v) for key, v in group.items()}
        for group in groups
    ]
    yield
    for group, settings in zip(groups, before, strict=True):
        for key, (held, value) in settings.items():
            group[key] = held.copy_(value) if isinstance(held, Tensor) else value
