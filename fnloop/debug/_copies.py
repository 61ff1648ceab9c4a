"""A copy of all that an update changes, and how to put it back in place.

The model, the optimizers and the slots stay the same objects, and so do their tensors where they
fit. So compiled code and CUDA graphs, which keep addresses, see nothing of it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.containers import parts_of, with_parts
from fnloop._backend.fsdp import local_part
from fnloop._checkpoint.optimizer import walk_optimizers
from fnloop._core.average import Average
from fnloop._core.optimizers import Group, optimizers_in
from fnloop._core.rng import mark_generators
from fnloop._core.state import TrainState, generation_of, ownership_of
from fnloop._step.engine import engine_of

__all__ = ["Before", "clone_all", "named_tensors", "tensors_of"]

_PLAIN = (bool, int, float, str, bytes, type(None))


class Before:
    """A state before an update: what the update will change, and the random draws.

    Args:
        state: the state, which must stay referenced.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        named = dict(named_tensors(state))
        optimizers = [
            o for one in optimizers_in(state.optimizer).values() for o in walk_optimizers(one)
        ]
        # What copies refer to and do not copy.
        live = (state.model, *optimizers, *named.values())
        self._live: dict[int, object] = {id(one): one for one in live}
        self._tensors = dict(zip(named, clone_all([*map(local_part, named.values())]), strict=True))
        # Tensors are copied together: a deep copy of each takes many times as long.
        inside = [
            t for one in optimizers for held in one.state.values() for _, t in tensors_of(held)
        ]
        inside += [t for _, t in tensors_of(state.slots)]
        inside = [t for t in inside if id(t) not in self._live]
        memo = self._live | dict(zip(map(id, inside), clone_all(inside), strict=True))
        self._optimizers = [_OptimizerBefore(one, memo) for one in optimizers]
        self._slots = {name: copy.deepcopy(slot, memo) for name, slot in state.slots.items()}
        self._restore_generators = mark_generators(state.backend.device)
        self._repeat_draws = engine_of(state).mark_draws()

    def put_back(self) -> None:
        """Put everything back. The state owns the model again, and draws what it drew before."""
        state = self._state
        with torch.no_grad():
            named = dict(named_tensors(state))
            putting = _Putting(self._live)
            for name, saved in self._tensors.items():
                putting.fill(local_part(named[name].detach()), named[name], saved)
            for one in self._optimizers:
                one.put_back(putting.put)
            for name, saved in self._slots.items():
                putting.put(state.slots[name], saved)
            putting.finish()
        owner = ownership_of(state)
        owner.generation, owner.newest = generation_of(state), None
        self.repeat_draws()

    def repeat_draws(self) -> None:
        """Let all generators draw again what they drew since."""
        self._restore_generators()
        self._repeat_draws()


class _OptimizerBefore:
    """What an optimizer held before an update."""

    def __init__(self, optimizer: Optimizer, memo: dict[int, object]) -> None:
        self.optimizer = optimizer
        self.state = {key: copy.deepcopy(held, memo) for key, held in optimizer.state.items()}
        self.groups = [copy.deepcopy(_settings(g), memo) for g in optimizer.param_groups]
        self.numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, _PLAIN)}

    def put_back(self, put: Callable[[object, object], object]) -> None:
        state = self.optimizer.state
        for key in [key for key in state if key not in self.state]:
            del state[key]
        for key, saved in self.state.items():
            state[key] = put(state.get(key), saved)
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            for name in [name for name in group if name != "params" and name not in settings]:
                del group[name]
            for name, saved in settings.items():
                group[name] = put(group.get(name), saved)
        vars(self.optimizer).update(self.numbers)


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, with one operator for all that are alike."""
    with torch.no_grad():
        found = [t.detach() for t in tensors]
        strided = [t.layout is torch.strided for t in found]
        copies = [
            torch.empty_like(t) if dense else t.clone()
            for t, dense in zip(found, strided, strict=True)
        ]
        pairs = [(a, b) for a, b, d in zip(copies, found, strided, strict=True) if d]
        _copy_all(pairs)
    return copies


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    if pairs:
        torch_compat.foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def tensors_of(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if (parts := parts_of(value)) is None and attrs.has(kind := type(value)):
        parts = [(f.name, getattr(value, f.name)) for f in attrs.fields(kind)]
    for key, part in parts or ():
        if not isinstance(part, _PLAIN):
            yield from tensors_of(part, f"{path}.{key}" if path else str(key))


def named_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers of a model, each with its name."""
    yield from state.model.named_parameters()
    yield from state.model.named_buffers()
    known = {id(p) for p in state.model.parameters()}
    for optimizer in optimizers_in(state.optimizer).values():
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) not in known:
                    known.add(id(p))
                    yield f"(group {i}, parameter {j}, not in the model)", p


def _settings(group: Group) -> Group:
    return {name: value for name, value in group.items() if name != "params"}


class _Putting:
    """Puts saved values back, in the objects that are there now where they fit.

    Args:
        live: what copies refer to and do not copy.
    """

    def __init__(self, live: dict[int, object]) -> None:
        self._live = live
        self._done: dict[int, object] = {}  # they stay referenced, and so keep their ids
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def finish(self) -> None:
        """Copy all tensors."""
        _copy_all(self._pairs)

    def fill(self, local: Tensor, whole: Tensor, saved: Tensor) -> None:
        """Give a tensor of the model its value."""
        if _kind(local) == _kind(saved):
            self._pairs.append((local, saved))
        else:  # a buffer that the forward has replaced by one of another size
            whole.data = saved.clone()

    def put(self, now: object, saved: object) -> object:
        """Return a saved value."""
        if isinstance(saved, _PLAIN):
            return saved
        if now is saved or id(now) in self._done:
            return now
        if type(now) is not type(saved):
            return self._copied(saved)
        if isinstance(now, Tensor) and isinstance(saved, Tensor):
            if _kind(now) != _kind(saved) or now.layout is not torch.strided:
                return saved.clone()
            self._pairs.append((local_part(now.detach()), local_part(saved)))
            return now
        self._done[id(now)] = now
        return self._put_inside(now, saved)

    def _put_inside(self, now: object, saved: object) -> object:
        if isinstance(now, Average) and isinstance(saved, Average):
            now.count = saved.count
            for key, tensor in saved.items():
                self.put(now[key], tensor)
            return now
        if isinstance(now, MutableMapping) and isinstance(saved, MutableMapping):
            values = {key: self.put(now.get(key), part) for key, part in saved.items()}
            now.clear()
            now.update(values)
        elif isinstance(now, list | deque) and isinstance(saved, list | deque):
            held = [*now, *(None for _ in saved)]
            values = [self.put(a, b) for a, b in zip(held, saved, strict=False)]
            now.clear()
            now.extend(values)
        elif isinstance(now, tuple) and isinstance(saved, tuple) and len(now) == len(saved):
            parts = [self.put(a, b) for a, b in zip(now, saved, strict=True)]
            return with_parts(now, parts)
        elif not _names_of(now):
            return self._copied(saved)
        for name in _names_of(saved):
            value = self.put(getattr(now, name, None), getattr(saved, name))
            object.__setattr__(now, name, value)
        return now

    def _copied(self, saved: object) -> object:
        return copy.deepcopy(saved, dict(self._live))


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _names_of(value: object) -> list[str]:
    """Return the names of what an object holds: its attributes, or the fields of attrs."""
    if parts_of(value) is None and attrs.has(kind := type(value)):
        return [field.name for field in attrs.fields(kind)]
    return [*getattr(value, "__dict__", ())]
