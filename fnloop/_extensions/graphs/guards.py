"""What must not happen while an update is captured, and what must not change after."""

from __future__ import annotations

import itertools
import operator
import random
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop.extend import Setting, all_parameters, containers, groups, optimizers, rng, torch_compat

# --------------------------------------------------------------------------------------------------
# Guard a capture: find what must not happen while an update is recorded.
#
# No Python runs in a replay. What changes within an update must change on the device and in place.
# Anything else is found during the capture and raises `CaptureError`.

NUMBER = int | float | str  # attributes of modules that a graph treats as constants
_PLAIN = Tensor | NUMBER  # attributes that a module may change by itself
_MISSING = object()


class CaptureError(RuntimeError):
    """An update cannot be captured as a graph. The message says why, and what to do."""

    __module__ = "fnloop"  # the name by which a traceback shows it


class CreatedError(CaptureError):
    """An update creates something that the next ones find, so they differ from it."""


# --- while an update is recorded


class NoKernels(torch_compat.DispatchMode):
    """Forbid device work after a skipped update: the graph ends there."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not torch_compat.computes(func):
            return func(*args, **(kwargs or {}))
        raise CaptureError(
            f"the update cannot be captured: something computes ({func}) after a guard has left it "
            "out, such as one whose gradients overflowed in fp16, where a graph ends. In a "
            "middleware around it, leave such updates alone: if out.skip is None: ..."
        )


class TracerProxy:
    """Stands, during a capture, for a value of the state that changes with every update."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __add__(self, other: object) -> TracerProxy:
        return self if isinstance(other, bool) else self._refuse()  # the update counts itself

    def _refuse(self, *_: object) -> NoReturn:
        raise CaptureError(
            f"state.{self.__dict__['name']} is read inside the update. Its value changes between "
            "updates, but a graph would keep using the captured one. Compute what depends on it "
            "in a middleware of the step ring, and keep the result in a tensor that is filled "
            "there"
        )

    __hash__ = None  # type: ignore[assignment]


for _name in (
    *("getattr", "getitem", "contains", "call", "iter", "len", "bool", "int", "float", "index"),
    *("radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "neg", "eq", "ne", "lt", "le", "gt", "ge"),
):
    setattr(TracerProxy, f"__{_name}__", TracerProxy._refuse)


# --- what an update changes on the host


def host_state(state: TrainState) -> dict[str, object]:
    """Return, by path, what an update may change only in place and only on the device.

    A tensor is represented by its address, and on the host by its version too.
    """
    found: dict[str, object] = {}
    device = state.backend.device
    for name, optimizer in optimizers(state).items():
        owner = f"the optimizer {name!r}" if name else "the optimizer"
        for i, values in enumerate(optimizer.state.values()):
            _collect(f"the state of {owner} (parameter {i})", values, device, found, set())
    for name, module in state.model.named_modules():
        path = f"model.{name}" if name else "model"
        plain = {k: v for k, v in vars(module).items() if isinstance(v, _PLAIN)}
        # A tensor with a graph belongs to one update: it is not carried to the next.
        carried = {
            k: v for k, v in plain.items() if not (isinstance(v, Tensor) and v.requires_grad)
        }
        buffers = torch_compat.buffers_of(module)
        _collect(path, {**carried, **buffers}, device, found, set())
    _collect("state.slots", dict(state.slots), device, found, set())
    return found


def _collect(
    path: str, value: object, device: torch.device, found: dict[str, object], seen: set[int]
) -> None:
    if isinstance(value, Tensor):
        address = value.data_ptr() if value.layout is torch.strided else id(value)
        on_device = value.device.type == device.type
        found[path] = (address, None if on_device else torch_compat.version_of(value))
    elif value is None or isinstance(value, int | float | str):
        found[path] = value
    elif id(value) not in seen:
        seen.add(id(value))
        for name, part in _named_parts(value):
            _collect(f"{path}.{name}", part, device, found, seen)


def _named_parts(value: object) -> Iterator[tuple[object, object]]:
    """Yield the parts of a container, a module or a record, each with its name."""
    parts = containers.parts_of(value)
    if parts is not None:
        yield from parts
    elif isinstance(value, nn.Module):
        yield from value.state_dict(keep_vars=True).items()
    elif attrs.has(type(value)):
        yield from attrs.asdict(value, recurse=False).items()


def check_host_state(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Raise if an update has changed something on the host, or replaced a tensor."""
    for path, now in after.items():
        then = before.get(path, _MISSING)
        if now == then:
            continue
        if then is _MISSING:
            raise CreatedError(
                f"the update cannot be captured: {path} is created during the capture, and would "
                "not be created again on replay"
            )
        if isinstance(now, tuple) and isinstance(then, tuple) and now[0] != then[0]:
            how = (
                "is replaced by another tensor, but a graph keeps using the captured one: change "
                "it in place"
            )
        else:
            how = (
                "is changed on the host, which a graph would not repeat: keep it in a tensor on "
                "the device"
            )
        raise CaptureError(f"the update cannot be captured: {path} {how}")


def host_generators(device: torch.device) -> dict[str, object]:
    """Return the state of each generator on the host, from which a graph cannot draw."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, object] = {
        "python's": random.getstate(),
        "numpy's": (name, keys.tobytes(), *rest),  # type: ignore[union-attr]
    }
    if device.type != "cpu":
        states["torch's CPU"] = torch.get_rng_state().tolist()
    return states


def check_host_generators(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Raise if an update has drawn from a generator on the host."""
    for owner in after:
        if after[owner] != before[owner]:
            raise CaptureError(
                f"the update draws from {owner} generator, on the host: draw on the device"
            )


def check_output(state: TrainState, new: TrainState, out: Output) -> None:
    """Raise if a recorded update has replaced a slot, or was skipped."""
    for name, value in new.slots.items():
        if value is not state.slots.get(name):
            raise CaptureError(
                f"the update cannot be captured: it puts another value into state.slots[{name!r}], "
                "but a graph keeps using the captured one. Change its tensors in place"
            )
    if out.skip is not None:
        raise CaptureError(
            f"the update cannot be captured: it is skipped ({out.skip}), which is decided on the "
            "host"
        )


def explain(error: BaseException) -> CaptureError:
    """Return an error that names the line at which a capture failed."""
    machinery = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if not frame.filename.startswith(machinery)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}" if frames else "torch"
    what = (str(error).splitlines() or [""])[0]
    advice = (
        "Inside it nothing may be read to the host (.item(), float(tensor), if tensor: ...), and "
        "nothing may depend on a value that was. Keep it on the device"
    )
    if "legacy stream" in what:
        advice = (
            "A tensor from outside the update holds an autograd graph of the parameters, such as "
            "weight.clone() in a hook: write weight.detach().clone()"
        )
    return CaptureError(
        f"the update cannot be captured as a graph: {type(error).__name__}: {what} ({where}). "
        f"{advice}"
    )


def make_rollback(state: TrainState) -> Callable[[], None]:
    """Return a function that restores the host's part of a state.

    A capture runs Python once, and nothing on the device.
    """
    device, modules = state.backend.device, [*state.model.modules()]
    states = [
        (
            optimizer.state,
            {
                p: containers.map_leaves(held, lambda leaf: _copy_on_host(leaf, device))
                for p, held in optimizer.state.items()
            },
        )
        for optimizer in optimizers(state).values()
    ]
    attributes = [
        (vars(m), {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)}) for m in modules
    ]
    dicts = [*map(torch_compat.buffers_of, modules), *_dicts_in(dict(state.slots))]
    contents = [(content, dict(content)) for content in dicts]
    generators, torch_generator = rng.HostGenerators.capture(), torch.get_rng_state()

    def roll_back() -> None:
        for current, before in states:
            current.clear()
            current.update(before)
        for current, before in attributes:
            current.update(before)
        for content, before in contents:
            content.clear()
            content.update(before)
        generators.install()
        torch.set_rng_state(torch_generator)

    return roll_back


def _copy_on_host(value: object, device: torch.device) -> object:
    """Return a copy of a tensor on the host. A tensor on the device is shared."""
    if isinstance(value, Tensor) and value.device.type != device.type:
        return value.clone()
    return value


def _dicts_in(value: object) -> Iterator[dict[object, object]]:
    if isinstance(value, dict):
        yield value
    for _, part in containers.parts_of(value) or ():
        yield from _dicts_in(part)


# --------------------------------------------------------------------------------------------------
# Watch what a graph assumes to be constant: addresses, settings and flags.
#
# No Python runs in a replay, so a graph would not notice a change. Before each replay, everything
# that can change between two updates is compared with what it was.


class GuardSet:
    """What the graphs of a model and its optimizers assume.

    New modules are looked for when a run starts, before each call of a step outside of a run, and
    where parameters are others. A learning rate may be replaced: its value is copied into the
    tensor that graphs read.
    """

    def __init__(self, state: TrainState) -> None:
        self.model, self.optimizer = state.model, state.optimizer
        self.seed, self.run = state.seed, state.run
        self.optimizers = [*optimizers(state).values()]
        self.parameters = all_parameters(state)
        every = [*groups(state).values()]
        self.rates = [
            (group, group["lr"]) for group in every if isinstance(group.get("lr"), Tensor)
        ]
        self.modules = list(self.model.modules())
        trained = (p for group in every for p in group["params"])
        tensors = (*self.model.parameters(), *self.model.buffers(), *trained)
        self.tensors = list({id(t): t for t in tensors if t.layout is torch.strided}.values())
        self.settings = [
            (group, key)
            for group in every
            for key in group
            if key != "params" and key not in Setting.marks(group)
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
        params = all_parameters(state)
        if state.run is not self.run or state.run is None or params is not self.parameters:
            if GuardSet(state).structure() != self.structure():
                return "the model's modules or the optimizer's groups"
            self.run, self.parameters = state.run, params
        for group, rate in self.rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
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
    parts = containers.parts_of(value)
    if parts is not None:
        inside = [part for _, part in parts]
        nested = [identity_of(part) for part in inside if not isinstance(part, Tensor)]
        return [*map(id, inside), *itertools.chain.from_iterable(nested)]
    if attrs.has(type(value)):
        return [id(p) for p in attrs.astuple(value, recurse=False) if isinstance(p, Tensor)]
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
