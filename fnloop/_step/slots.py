"""What middleware keep in ``state.slots``: made when a step first sees a state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import attrs
from torch import Tensor

from fnloop._core.middleware import Middleware
from fnloop._core.optimizers import groups_of
from fnloop._core.rng import fold_in, isolated, seed_all, torch_seeder
from fnloop._core.serialize import has_pending, materialize
from fnloop._core.state import TrainState, with_slot

__all__ = ["init_slots", "renew_slots"]


def init_slots(state: TrainState, members: Iterable[Middleware]) -> TrainState:
    """Return the state with missing slots made, and those from a checkpoint materialized."""
    __tracebackhide__ = True
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
    groups = groups_of(state)
    before = [
        {key: (v, v.clone() if isinstance(v, Tensor) else v) for key, v in group.items()}
        for group in groups
    ]
    yield
    for group, settings in zip(groups, before, strict=True):
        for key, (held, value) in settings.items():
            group[key] = held.copy_(value) if isinstance(held, Tensor) else value
