"""Watch what a graph assumes to be constant: addresses, settings and flags.

No Python runs in a replay, so a graph would not notice a change. Before each replay, everything
that can change between two updates is compared with what it was.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.containers import parts_of
from fnloop._core.optimizers import SCHEDULED, groups_in, optimizers_in
from fnloop._core.state import TrainState
from fnloop._graphs.guards import NUMBER

__all__ = ["GuardSet", "TrackedSlots", "identity_of"]


class GuardSet:
    """What the graphs of a model and its optimizers assume.

    New modules and parameters are looked for when a run starts, and before each call of a step
    outside of a run. A learning rate may be replaced: its value is copied into the tensor that
    graphs read.
    """

    def __init__(self, state: TrainState) -> None:
        self.model, self.optimizer = state.model, state.optimizer
        self.seed, self.run = state.seed, state.run
        self.optimizers = [*optimizers_in(state.optimizer).values()]
        groups = groups_in(state.optimizer)
        self.groups = len(groups)
        self.rates = [
            (group, group["lr"]) for group in groups if isinstance(group.get("lr"), Tensor)
        ]
        self.modules = list(self.model.modules())
        trained = (p for group in groups for p in group["params"])
        tensors = (*self.model.parameters(), *self.model.buffers(), *trained)
        self.tensors = list({id(t): t for t in tensors if t.layout is torch.strided}.values())
        self.settings = [
            (group, key)
            for group in groups
            for key in group
            if key != "params" and not key.startswith(SCHEDULED)
        ]
        self.snapshot()

    def snapshot(self) -> None:
        """Assume the current values from now on."""
        held = [v for optimizer in self.optimizers for v in optimizer.state.values()]
        self.dicts = [v for v in held if isinstance(v, dict)]
        numbers = [(vars(m), _numbers_in(m)) for m in self.modules]
        self.numbers = [(operator.itemgetter(*names), held) for held, names in numbers if names]
        self.expected, self.values = self.current(), self._values()
        self.comparable = [*map(_comparable, self.values)]
        rates = (value for value in self.values if isinstance(value, Tensor))
        self.addresses = [(rate.data_ptr, rate.data_ptr()) for rate in rates]
        # Keep the tensors alive, so that no other object can have one of their ids.
        self.kept_alive = [held, *map(list, map(dict.values, self.dicts))]

    def current(self) -> dict[str, list[object]]:
        """Return the current values by what they are. Called before every replay, hence ``map``."""
        return {
            "a module's training flag or another of its numbers": [
                get(held) for get, held in self.numbers
            ],
            "a parameter's requires_grad": [t.requires_grad for t in self.tensors],
            "where a parameter is in memory": list(map(Tensor.data_ptr, self.tensors)),
            "which tensors are in the optimizer's state": [
                *map(id, itertools.chain.from_iterable(o.state.values() for o in self.optimizers)),
                *map(id, itertools.chain.from_iterable(map(dict.values, self.dicts))),
            ],
        }

    def _values(self) -> list[object]:
        return [group[key] for group, key in self.settings]

    def _changed_setting(self) -> str | None:
        """Return the first setting of an optimizer that has another value; nearly always None."""
        values = self._values()
        if all(map(operator.is_, values, self.values)) and all(
            address() == before for address, before in self.addresses
        ):
            return None
        now = [*map(_comparable, values)]
        if now == self.comparable:
            return None
        pairs = zip(self.settings, now, self.comparable, strict=True)
        return next(key for (_, key), a, b in pairs if a != b)

    def violated(self, state: TrainState) -> str | None:
        """Return the first assumption that no longer holds, or None."""
        if (
            state.model is not self.model
            or state.optimizer is not self.optimizer
            or state.seed != self.seed
        ):
            return "the model, the optimizer or the seed"
        if state.run is not self.run or state.run is None:
            if GuardSet(state).structure() != self.structure():
                return "the model's modules or the optimizer's groups"
            self.run = state.run
        for group, rate in self.rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
        if len(groups_in(state.optimizer)) != self.groups:
            return "the optimizer's groups"
        if (key := self._changed_setting()) is not None:
            return f"a setting of the optimizer ({key})"
        try:
            now = self.current()
        except KeyError:  # it was deleted
            return "a number of a module"
        if now == self.expected:
            return None
        return next(name for name in now if now[name] != self.expected[name])

    def structure(self) -> tuple[list[int], list[int], list[tuple[int, str]]]:
        """Return which modules, tensors and settings there are."""
        return (
            [*map(id, self.modules)],
            [*map(id, self.tensors)],
            [(id(group), key) for group, key in self.settings],
        )


def _numbers_in(module: nn.Module) -> list[str]:
    """Return the names of the attributes of a module that are numbers; all have ``training``."""
    return [name for name, value in vars(module).items() if isinstance(value, NUMBER)]


def _comparable(value: object) -> object:
    return value.data_ptr() if isinstance(value, Tensor) else value


def identity_of(value: object) -> list[int]:
    """Return the identities of the objects in a slot: a graph keeps using the captured ones."""
    parts = parts_of(value)
    if parts is not None:
        inside = [part for _, part in parts]
        nested = [identity_of(part) for part in inside if not isinstance(part, Tensor)]
        return [*map(id, inside), *itertools.chain.from_iterable(nested)]
    if attrs.has(kind := type(value)):
        parts = (getattr(value, field.name) for field in attrs.fields(kind))
        return [id(part) for part in parts if isinstance(part, Tensor)]
    return []


class TrackedSlots(dict[str, Any]):
    """Slots that note which of them are read."""

    def __init__(self, slots: Mapping[str, object]) -> None:
        super().__init__(slots)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> Any:
        self.used.add(name)
        return super().get(name, default)
