"""What graphs take for granted, and what may not happen while one is recorded.

No Python runs in a replay, so everything that Python knew while it was recorded is in it for good: addresses, settings, flags,
counters. What can change between two updates is looked at before every replay (:class:`Watch`). What changes inside an update
must change on the device and in place; the rest is found while it is recorded, and is a :class:`CaptureError`.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._core.rng import HostGenerators
from fnloop._core.serialize import as_number
from fnloop._core.state import SCHEDULED, TrainState, parameters
from fnloop._core.types import Output

__all__ = [
    "CaptureError",
    "GuardSet",
    "NoKernels",
    "OriginalSettings",
    "Slots",
    "TracerProxy",
    "check_draws",
    "check_facts",
    "check_reply",
    "explain",
    "host_draws",
    "host_state",
    "identity_of",
    "make_capturable",
    "make_rollback",
    "undo_capturable",
]

NUMBER = int | float | str  # what is in a graph as it was
PLAIN = Tensor | NUMBER  # what a module may have changed by itself


class CaptureError(RuntimeError):
    """An update can't be captured as a CUDA graph; the message says why, and what to do."""


# --- optimizers


class OriginalSettings(NamedTuple):
    """The settings of a parameter group, as they were given."""

    group: dict[str, Any]
    settings: dict[str, Any]


def make_capturable(optimizer: Optimizer, device: torch.device) -> list[OriginalSettings]:
    """Let an optimizer keep on the device what it can: the learning rate, and the counts in its state.

    SGD and Adagrad, which have no setting ``capturable``, read a learning rate on the device in their fused form only.

    Returns:
        What :func:`undo_capturable` needs.

    Raises:
        CaptureError: it was told to be something else.
    """
    for group in optimizer.param_groups:  # before anything is changed
        fused = group.get("fused", True) is True or (
            group["fused"] is None and not group.get("foreach")
        )
        if "capturable" not in group and not fused:
            name = type(optimizer).__name__
            raise CaptureError(
                f"{name} reads its learning rate to the host: write {name}(..., fused=True)"
            )
    given = []
    for group in optimizer.param_groups:
        given.append(
            OriginalSettings(
                group, {k: group[k] for k in ("lr", "capturable", "fused") if k in group}
            )
        )
        if "lr" in group:
            rate = group["lr"]
            rate = torch.as_tensor(
                rate, dtype=None if isinstance(rate, Tensor) else torch.float32, device=device
            )
            shared = any(
                rate is other.get("lr") for other in optimizer.param_groups if other is not group
            )
            group["lr"] = rate.clone() if shared else rate  # each is filled by itself
            _keep_scheduled(group)
        if "capturable" in group:
            group["capturable"] = True
        elif "fused" in group:
            group["fused"] = True
    for values in filter(_is_dict, optimizer.state.values()):
        values.update(
            {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor) and not v.ndim}
        )  # counts
    torch_compat.silence_capturable_warning(optimizer)  # it runs eagerly during the warm-up
    return given


def undo_capturable(optimizer: Optimizer, given: list[OriginalSettings]) -> None:
    """Give an optimizer its settings back, with the learning rate that it has now."""
    for group, settings in given:
        rate = group.get("lr")
        group.update(settings)
        if isinstance(rate, Tensor):
            group["lr"] = rate if isinstance(settings["lr"], Tensor) else as_number(rate)
            _keep_scheduled(group)
        if not (settings.get("capturable", True) or settings.get("fused")):
            for p in group["params"]:
                values = optimizer.state.get(p, {})
                values.update({k: v.cpu() for k, v in values.items() if k == "step"})


def _keep_scheduled(group: dict[str, Any]) -> None:
    """Let a schedule take a learning rate for its own that was put into another form."""
    if f"{SCHEDULED}lr" in group:
        group[f"{SCHEDULED}lr"] = group["lr"]


# --- what a graph takes for granted


class GuardSet:
    """What graphs of a model and an optimizer take for granted: they wouldn't notice if it changed.

    New modules and parameters are looked for when a run starts, and in a bare step. The learning rate may be replaced.
    """

    def __init__(self, state: TrainState) -> None:
        self.model, self.optimizer, self.seed, self.run = (
            state.model,
            state.optimizer,
            state.seed,
            state.run,
        )
        groups = self.optimizer.param_groups
        self.rates = [
            (group, group["lr"]) for group in groups if isinstance(group.get("lr"), Tensor)
        ]
        self.modules = list(self.model.modules())
        every = (*self.model.parameters(), *self.model.buffers(), *parameters(state))
        self.tensors = list({id(t): t for t in every if t.layout is torch.strided}.values())
        settings = ((group, key) for group in groups for key in group)
        self.settings = [
            (group, key)
            for group, key in settings
            if key != "params" and not key.startswith(SCHEDULED)
        ]
        self.numbers = [
            (vars(m).get, [k for k, v in vars(m).items() if isinstance(v, NUMBER)])
            for m in self.modules
        ]
        self.take()

    def take(self) -> None:
        """Take for granted what is now."""
        self.taken = self.look()
        self.held = [
            *_values(self.optimizer)
        ]  # so that nothing else can have their place, and their ids

    def look(self) -> dict[str, Any]:
        """Return all of it as it is now, by what it is."""
        return {  # before every replay: hence map
            "a module's training flag or another of its numbers": [
                [*map(get, names)] for get, names in self.numbers
            ],
            "a parameter's requires_grad": [t.requires_grad for t in self.tensors],
            "where a parameter is in memory": list(map(Tensor.data_ptr, self.tensors)),
            "which tensors the optimizer's state is": list(map(id, _values(self.optimizer))),
            "a setting of the optimizer": [_token(group[key]) for group, key in self.settings],
        }

    def change(self, state: TrainState) -> str | None:
        """Say what isn't any more as it was taken, if anything."""
        if (
            state.model is not self.model
            or state.optimizer is not self.optimizer
            or state.seed != self.seed
        ):
            return "the model, the optimizer or the seed"
        if state.run is not self.run or state.run is None:
            fresh = GuardSet(state)
            if fresh.shape() != self.shape():
                return "the model's modules or the optimizer's groups"
            self.run = state.run
        for group, rate in self.rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
        now = self.look()
        if now == self.taken:
            return None
        what = next(name for name in now if now[name] != self.taken[name])
        differ = [
            key
            for (_, key), a, b in zip(self.settings, now[what], self.taken[what], strict=False)
            if a != b
        ]
        return f"{what} ({differ[0]})" if what == "a setting of the optimizer" else what

    def shape(self) -> Any:
        return (
            [*map(id, self.modules)],
            [*map(id, self.tensors)],
            [(id(group), key) for group, key in self.settings],
        )


def _values(optimizer: Optimizer) -> Iterator[Any]:
    """Yield what there is in an optimizer's state: for each parameter, as a rule; for all together, in some."""
    return itertools.chain.from_iterable(
        v.values() if _is_dict(v) else (v,) for v in optimizer.state.values()
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _token(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def identity_of(value: Any) -> list[int]:
    """Return which things a slot holds: a graph goes on with those that there were."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        nested = [part for part in value if isinstance(part, dict | list | tuple)]
        return [*map(id, value), *itertools.chain.from_iterable(map(identity_of, nested))]
    if attrs.has(type(value)):
        return [id(part) for _, part in _parts(value) if isinstance(part, Tensor)]
    return []


# --- what may not happen while an update is recorded


class NoKernels(torch_compat.DispatchMode):
    """Nothing may reach the device: behind the point where the host leaves an update out, a graph has nothing to play."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch_compat.computes(func):
            return func(*args, **(kwargs or {}))
        raise CaptureError(
            f"the update can't be captured: something computes ({func}) behind a gradient that overflowed in fp16, where a "
            "graph ends. In a middleware around it, leave such updates alone: if out.skip is None: ..."
        )


class TracerProxy:
    """Stands for a value of the state that is another one in every update, while one is recorded."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __add__(self, other: Any) -> TracerProxy:
        return self if isinstance(other, bool) else self._refuse()  # the update counts itself

    def _refuse(self, *_: Any) -> Any:
        raise CaptureError(
            f"state.{self.__dict__['name']} is read inside the update. It changes, and a graph would go on with the value "
            f"that it had when it was captured. Compute what depends on it in a middleware of the step ring, and keep it in "
            "a tensor that is filled there"
        )

    __getattr__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        __rtruediv__
    ) = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __eq__ = (
        __ne__
    ) = _refuse  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = __len__ = (
        __iter__
    ) = _refuse  # type: ignore[assignment]
    __getitem__ = __contains__ = __call__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Slots(dict):
    """Slots that note which of them are read."""

    def __init__(self, slots: Mapping[str, Any]) -> None:
        super().__init__(slots)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)


def host_state(state: TrainState) -> dict[str, Any]:
    """Return what an update may change in place only, and on the device only, by where it is."""
    found: dict[str, Any] = {}
    device = state.backend.device
    for i, values in enumerate(state.optimizer.state.values()):
        _note(f"the state of the optimizer (parameter {i})", values, device, found, set())
    for name, module in state.model.named_modules():
        path = f"model.{name}" if name else "model"
        plain = {k: v for k, v in vars(module).items() if isinstance(v, PLAIN)}
        # A tensor with a graph is of one update: nothing that is carried to the next.
        carried = {
            k: v for k, v in plain.items() if not (isinstance(v, Tensor) and v.requires_grad)
        }
        _note(path, {**carried, **torch_compat.buffers_of(module)}, device, found, set())
    _note("state.slots", dict(state.slots), device, found, set())
    return found


def _note(
    path: str, value: Any, device: torch.device, found: dict[str, Any], seen: set[int]
) -> None:
    if isinstance(value, Tensor):
        where = value.data_ptr() if value.layout is torch.strided else id(value)
        found[path] = (
            where,
            None if value.device.type == device.type else torch_compat.version_of(value),
        )
    elif value is None or isinstance(value, int | float | str):
        found[path] = value
    elif id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            _note(f"{path}.{name}", part, device, found, seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, nn.Module):
        yield from value.state_dict(keep_vars=True).items()
    elif attrs.has(type(value)):
        yield from ((f.name, getattr(value, f.name)) for f in attrs.fields(type(value)))


def check_draws(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if an update has drawn from a generator on the host."""
    for whose in after:
        if after[whose] != before[whose]:
            raise CaptureError(
                f"the update draws from {whose} generator, on the host: draw on the device"
            )


def check_facts(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if an update has changed on the host, or put elsewhere, what a graph would leave as it was."""
    for path, now in after.items():
        if now == before.get(path, _NONE):
            continue
        if path not in before:
            how = "is made while it is recorded, and a graph would never make it again"
        elif (
            isinstance(now, tuple) and isinstance(before[path], tuple) and now[0] != before[path][0]
        ):
            how = "is replaced by another tensor, and a graph goes on with the one that there was: change it in place"
        else:
            how = "is changed on the host, and a graph would never change it again: keep it in a tensor on the device"
        raise CaptureError(f"the update can't be captured: {path} {how}")


_NONE = object()


def host_draws(device: torch.device) -> dict[str, Any]:
    """Return the generators on the host, where a graph can't draw."""
    name, keys, *rest = np.random.get_state()
    draws: dict[str, Any] = {
        "python's": random.getstate(),
        "numpy's": (name, keys.tobytes(), *rest),  # type: ignore[union-attr]
    }
    if device.type != "cpu":
        draws["torch's CPU"] = torch.get_rng_state().tolist()
    return draws


def explain(error: BaseException) -> CaptureError:
    """Return the error that says by which line the capture failed."""
    torchs = str(Path(torch.__file__).parent)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torchs)
    ]
    where = f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}" if frames else "torch"
    what = (str(error).splitlines() or [""])[0]
    return CaptureError(
        f"the update can't be captured as a CUDA graph: {type(error).__name__}: {what} ({where}). Inside it nothing may be "
        f"read to the host (.item(), float(tensor), if tensor: ...), nor depend on a value that was. Keep it on the device"
    )


def check_reply(state: TrainState, new: TrainState, out: Output) -> None:
    """Raise if an update that was recorded has decided something, or left something elsewhere."""
    for name, value in new.slots.items():
        if value is not state.slots.get(name):
            raise CaptureError(
                f"the update can't be captured: it puts another value into state.slots[{name!r}], and a graph goes on with "
                "the one that there was. Change its tensors in place"
            )
    if out.skip is not None:
        raise CaptureError(
            f"the update can't be captured: it is left out ({out.skip}), which is decided on the host"
        )


def make_rollback(state: TrainState) -> Callable[[], None]:
    """Return what puts the host's side of a state back: recording has run Python once, and nothing on the device."""
    optimizer, device = state.optimizer, state.backend.device
    of_optimizer = {p: _own(values, device) for p, values in optimizer.state.items()}
    of_modules = [
        (vars(m), {k: v for k, v in vars(m).items() if isinstance(v, PLAIN)})
        for m in state.model.modules()
    ]
    dicts = [
        *(torch_compat.buffers_of(m) for m in state.model.modules()),
        *_dicts(dict(state.slots)),
    ]
    contents = [(content, dict(content)) for content in dicts]
    generators, generator = HostGenerators.capture(), torch.get_rng_state()

    def put_back() -> None:
        optimizer.state.clear()
        optimizer.state.update(of_optimizer)
        for attributes, before in of_modules:
            attributes.update(before)
        for content, before in contents:
            content.clear()
            content.update(before)
        generators.install()
        torch.set_rng_state(generator)

    return put_back


def _own(value: Any, device: torch.device) -> Any:
    """Return a copy of a part of an optimizer's state, in which only what is on the device is shared."""
    if isinstance(value, dict):
        return {k: _own(v, device) for k, v in value.items()}
    return (
        value.clone() if isinstance(value, Tensor) and value.device.type != device.type else value
    )


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, dict):
        yield value
    for _, part in _parts(value) if isinstance(value, dict | list | tuple) else ():
        yield from _dicts(part)
