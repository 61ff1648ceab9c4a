"""What a checkpoint holds of an optimizer, how it comes back, and whether it came back.

There are two ways. *By name*: the settings of the groups, and the state of each parameter under its name. That is for an
optimizer that keeps all it has in ``state`` and ``param_groups``, as those of torch do. *By its own state_dict*: for one that
has a ``state_dict`` or a ``load_state_dict`` of its own, whole. What it reports after loading has to equal what was saved, bit
for bit.

Whether that is all that its updates depend on cannot be read off a class: ``_resumable`` tries it on a tiny copy.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import is_sharded, like_sharded
from fnloop._backend.torch_compat import COMPILED
from fnloop._checkpoint.format import CheckpointError
from fnloop._core.serialize import as_number, as_safetensor, decode, encode, from_safetensor
from fnloop._core.snapshot import unwrap
from fnloop._core.state import SCHEDULED, TrainState
from fnloop._display.checks import described, listed
from fnloop._display.log import log

__all__ = [
    "Owned",
    "bare_name",
    "difference",
    "of_torch",
    "optimizer_facts",
    "optimizer_loader",
    "optimizers_in",
    "owned_by",
    "saves_itself",
]

EXECUTION = (
    "foreach",
    "fused",
    "capturable",
)  # how an optimizer computes: no part of what it computes
UNSAVED = ("params", "param_names", *EXECUTION)
SETTINGS = (  # what can only be named: the new optimizer has it
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, enum.Enum,
    torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    np.ndarray,
    np.generic,
    Tensor,
    list,
    tuple,
    Mapping,
    set,
    deque,
)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COUNTS = (
    "step",
    "eta",
    "mu",
    "mu_product",
)  # what torch's optimizers keep as one number per parameter


def bare_name(name: str) -> str:
    """Return a name in the model without what torch.compile has put into it."""
    return name.replace(f"{COMPILED}.", "").removesuffix(COMPILED).rstrip(".")


@attrs.frozen(eq=False)
class Owned:
    """An optimizer, and what its parameters are called.

    Args:
        optimizer: it.
        names: id to name, of every parameter in its groups; one that the model does not have is named by its position.
        foreign: the names of those that the model does not have.
        sharded: whether the parameters are spread over processes.
    """

    optimizer: Optimizer
    names: Mapping[int, str]
    foreign: frozenset[str] = frozenset()
    sharded: bool = False

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    def groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [
            [self.names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups
        ]

    def parameters(self) -> dict[str, tuple[Tensor, Mapping[str, Any]]]:
        """Return each parameter by name, with its group."""
        return {
            self.names[id(p)]: (p, group)
            for group in self.optimizer.param_groups
            for p in group["params"]
        }


def owned_by(state: TrainState) -> Owned:
    """Return the optimizer of a state with the names of its parameters."""
    names = {id(p): bare_name(name) for name, p in unwrap(state).named_parameters()}
    foreign = set()
    for i, group in enumerate(state.optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in names:
                names[id(p)] = f"param_groups.{i}.{j}"
                foreign.add(names[id(p)])
    return Owned(state.optimizer, names, frozenset(foreign), is_sharded(state.model))


def of_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's, not of a class derived from it."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


def saves_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is saved by its own state_dict."""
    cls = type(optimizer)
    return (
        cls.state_dict is not Optimizer.state_dict
        or cls.load_state_dict is not Optimizer.load_state_dict
        or "state" not in vars(optimizer)  # a property, of which state_dict may know more
        or torch_compat.has_state_dict_hooks(optimizer)
    )


# --- saving


def optimizer_facts(owned: Owned, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what a checkpoint says of an optimizer, having put its tensors into ``tensors``.

    Raises:
        TypeError, CheckpointError: something in it cannot be saved; the message says where it is.
    """
    optimizer = owned.optimizer
    facts: dict[str, Any] = {"class": owned.kind}
    for name, (p, _) in owned.parameters().items():
        if name in owned.foreign:
            tensors[f"parameter.{name}"] = as_safetensor(p)
    if saves_itself(optimizer):
        if owned.sharded:
            raise CheckpointError(
                f"{owned.kind} has a state_dict of its own, and the model is sharded over processes: which of its tensors are "
                f"shares cannot be known. Use an optimizer of torch.optim, or a model that is not sharded"
            )
        facts["param_groups"] = [{"params": names} for names in owned.groups()]
        facts["state_dict"] = _no_objects(
            _encode_own(optimizer.state_dict(), tensors, "state_dict"), "state_dict"
        )
        return facts
    facts["param_groups"] = [
        {"params": names, **_encode_group(group, tensors, f"param_groups.{i}")}
        for i, (names, group) in enumerate(zip(owned.groups(), optimizer.param_groups, strict=True))
    ]
    facts["state"], on_host = {}, []
    for name, (p, _) in owned.parameters().items():
        if p in optimizer.state:
            before = len(tensors)
            facts["state"][name] = _encode_state(optimizer.state[p], tensors, name)
            new = list(tensors)[before:]
            on_host += [key for key in new if tensors[key].device.type == "cpu" != p.device.type]
    rest = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    if rest:
        facts["state_of_all"] = _encode_state(rest, tensors, "state_of_all")
    if on_host:
        facts["on_host"] = on_host
    return facts


def _encode_state(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{path} is a {type(value).__name__} in the optimizer's state, where a checkpoint expects a dict"
        )
    return _no_objects(encode(dict(value), tensors, path), path)


def _encode_group(
    group: Mapping[str, Any], tensors: dict[str, Tensor], path: str
) -> dict[str, Any]:
    """Return the settings of a group: numbers that a person can read, tensors of one number as such, functions by name."""
    encoded = {}
    for key, value in group.items():
        if key in UNSAVED:
            continue
        if isinstance(value, SETTINGS):
            encoded[key] = {"$setting": getattr(value, "__qualname__", str(value))}
        elif isinstance(value, Tensor) and not value.ndim and not value.is_complex():
            number = encode(
                as_number(value) if value.is_floating_point() else value.item(), tensors, path
            )
            encoded[key] = {"$scalar": number, "dtype": str(value.dtype).removeprefix("torch.")}
            if value.device.type == "cpu" and any(
                p.device.type != "cpu" for p in group["params"] if isinstance(p, Tensor)
            ):
                encoded[key]["on_host"] = True
        else:
            encoded[key] = _no_objects(encode(value, tensors, f"{path}.{key}"), f"{path}.{key}")
    return encoded


def _is_groups(key: Any, value: Any) -> bool:
    return (
        key == "param_groups"
        and isinstance(value, list)
        and all(isinstance(g, Mapping) and "params" in g for g in value)
    )


def _encode_own(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a state_dict as JSON, with groups, also those of an optimizer inside, as :func:`_encode_group` has them."""
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and not key.startswith("$") for key in value
    ):
        _no_tensor_keys(value, path)
        return encode(value, tensors, path)
    encoded = {}
    for key, inner in value.items():
        at = f"{path}.{key}"
        if _is_groups(key, inner):
            groups = [_encode_group(group, tensors, f"{at}.{i}") for i, group in enumerate(inner)]
            encoded[key] = [
                {"params": list(g["params"]), **found}
                for g, found in zip(inner, groups, strict=True)
            ]
            encode(
                [found["params"] for found in encoded[key]], {}, at
            )  # checks that they are numbers
        else:
            encoded[key] = _encode_own(inner, tensors, at)
    return encoded


def _no_tensor_keys(value: Any, path: str) -> None:
    if isinstance(value, Mapping) and any(isinstance(key, Tensor) for key in value):
        raise TypeError(
            f"{path} has tensors as keys, which mean nothing in another process: use positions of parameters"
        )


def _no_objects(encoded: Any, path: str) -> Any:
    """Return what was encoded, or raise if there is an object in it, which would not come back as itself."""
    if isinstance(encoded, dict):
        if "$saved" in encoded:
            raise TypeError(
                f"{path} is a {encoded['$saved']}, an object, which would not come back as one: keep plain data there"
            )
        for key, value in encoded.items():
            _no_objects(value, f"{path}.{key}")
    elif isinstance(encoded, list):
        for i, value in enumerate(encoded):
            _no_objects(value, f"{path}.{i}")
    return encoded


# --- restoring


def optimizer_loader(
    owned: Owned,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    strict: bool = True,
    path: Any = "the checkpoint",
) -> Callable[[], None]:
    """Return the function that loads a saved optimizer; all that can be checked before is checked here.

    Args:
        owned: the new optimizer.
        facts: what :func:`optimizer_facts` returned, as JSON gives it back.
        tensors: what it has put there.
        shapes: name to shape of the model's tensors in the checkpoint.
        strict: whether the parameters must have the shapes that they had.
        path: where all this is from, for messages.

    Raises:
        CheckpointError: it is of another optimizer, or does not fit.
    """
    if facts["class"] != owned.kind:
        raise CheckpointError(
            f"{path} has the state of {facts['class']}, and the optimizer is {owned.kind}. Make that one, or leave "
            f"it out: restore(path, state, only=('model',))"
        )
    wrong = _check_parameters(owned, facts, tensors, shapes, strict, path)
    try:
        if "state_dict" in facts:
            load = _own_loader(owned, facts, tensors, bool(wrong), path)
        else:
            load = _named_loader(owned, facts, tensors, wrong, path)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: the optimizer's state can't be restored: {type(error).__name__}: {error}"
        ) from error

    def load_all() -> None:
        with _put_back_on_error(owned.optimizer):
            load()
        for group in owned.optimizer.param_groups:
            _join_scheduled(group)
        for name, (p, _) in owned.parameters().items():
            if f"parameter.{name}" in tensors and name not in wrong:
                value = tensors[f"parameter.{name}"]
                p.data.copy_(
                    like_sharded(
                        from_safetensor(value) if p.dtype is torch.complex128 else value, p
                    )
                )

    return load_all


def _check_parameters(
    owned: Owned,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    strict: bool,
    path: Any,
) -> list[str]:
    """Return the parameters of another shape than they had, having checked that they are the same ones."""
    mine, saved = owned.groups(), [group["params"] for group in facts["param_groups"]]
    if strict and mine != saved:
        here, there = {n for g in mine for n in g}, {n for g in saved for n in g}
        difference = (
            f"only here: {listed(sorted(here - there))}; only there: {listed(sorted(there - here))}"
        )
        if here == there:
            difference = "the same parameters in other groups, or in another order"
        raise CheckpointError(
            f"{path} has an optimizer of other parameters: {difference}. Make its groups as they were"
        )
    shape_of = dict(shapes)
    for name, (p, _) in owned.parameters().items():
        if (value := tensors.get(f"parameter.{name}")) is not None:
            shape_of[name] = value.shape[:-1] if p.dtype is torch.complex128 else value.shape
    parameters = owned.parameters()
    wrong = [
        name
        for name, (p, _) in parameters.items()
        if name in shape_of and shape_of[name] != p.shape
    ]
    if wrong and strict:
        both = [
            f"{name}: {tuple(shape_of[name])} saved, {tuple(parameters[name][0].shape)} here"
            for name in wrong
        ]
        raise CheckpointError(
            f"{path} has the optimizer's state of parameters of another shape: {listed(both)}"
        )
    if mine != saved and "state_dict" in facts:
        wrong = wrong or [name for g in mine for name in g]
    return wrong


def _named_loader(
    owned: Owned,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    wrong: Sequence[str],
    path: Any,
) -> Callable[[], None]:
    optimizer, parameters, on_host = (
        owned.optimizer,
        owned.parameters(),
        set(facts.get("on_host", ())),
    )
    groups = list(zip(optimizer.param_groups, facts["param_groups"], strict=False))
    settings = [
        _decode_group(saved, group, tensors, _device_of(group), path) for group, saved in groups
    ]
    stays = {id(tensor) for name, tensor in tensors.items() if name in on_host}
    state_of = {}
    for name, value in facts["state"].items():
        if name in parameters and name not in wrong:
            if not isinstance(value := decode(value, tensors), dict):
                raise CheckpointError(f"{path}: the optimizer's state isn't a mapping")
            if of_torch(optimizer):
                _check_state(owned, name, value, path)
            state_of[name] = _on_device(value, *parameters[name], stays)
    of_all = decode(facts.get("state_of_all", {}), tensors)

    def load() -> None:
        for group, values in zip(optimizer.param_groups, settings, strict=False):
            for key in [key for key in group if key.startswith(SCHEDULED) and key not in values]:
                del group[key]
            _assign(group, values)
        optimizer.state.clear()
        optimizer.state.update({parameters[name][0]: value for name, value in state_of.items()})
        optimizer.state.update(of_all)

    return load


def _own_loader(
    owned: Owned, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], left_out: bool, path: Any
) -> Callable[[], None]:
    optimizer = owned.optimizer
    if left_out:
        log.warning(
            "restore: left as it was: the state of %s, whose parameters are others", owned.kind
        )
        return lambda: None
    before, device = optimizer.state_dict(), _device_of(*optimizer.param_groups)
    expected = _decode_own(facts["state_dict"], before, tensors, device, path)

    def load() -> None:
        try:
            optimizer.load_state_dict(_containers_copied(expected))
            _undo_casts(expected, optimizer.state_dict())
            found = difference(expected, optimizer.state_dict(), "state_dict")
        except Exception as error:
            raise CheckpointError(
                f"{path}: {owned.kind}.load_state_dict does not take what its state_dict returned: "
                f"{type(error).__name__}: {error}"
            ) from error
        if found:
            raise CheckpointError(
                f"{path}: {owned.kind}.load_state_dict does not restore what its state_dict returned: {found}. Fix it in a "
                f"subclass"
            )

    return load


def _undo_casts(expected: Any, held: Any) -> None:
    """Put tensors back that ``load_state_dict`` has cast to the dtype of their parameter, as torch's does.

    What ``state_dict`` returns has the dicts and lists that the optimizer holds, if it has not made others.
    """
    if isinstance(expected, Mapping) and isinstance(held, Mapping):
        pairs = [(key, expected[key]) for key in expected if key in held]
    elif (
        isinstance(expected, list | deque)
        and isinstance(held, list | deque)
        and len(expected) == len(held)
    ):
        pairs = list(enumerate(expected))
    else:
        return
    for key, value in pairs:
        now: Any = held[key]  # type: ignore[index]
        if isinstance(value, Tensor) and isinstance(now, Tensor):
            if value.dtype != now.dtype and value.shape == now.shape:
                held[key] = value.to(now.device)  # type: ignore[index]
        else:
            _undo_casts(value, now)


def _device_of(*groups: Mapping[str, Any]) -> torch.device:
    return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))


def _decode_own(
    encoded: Any, held: Any, tensors: Mapping[str, Tensor], device: torch.device, path: Any
) -> Any:
    """Return a state_dict from JSON, with what its groups take from the new one (``held``)."""
    if not isinstance(encoded, dict) or any(key.startswith("$") for key in encoded):
        return decode(encoded, tensors)
    held, found = held if isinstance(held, Mapping) else {}, {}
    for key, value in encoded.items():
        if _is_groups(key, value):
            groups: list[Any] = list(held.get(key, ()))
            groups += [{}] * (len(value) - len(groups))
            found[key] = [
                {
                    name: setting
                    for name, setting in group.items()
                    if name in UNSAVED or name in saved
                }
                | _decode_group(saved, group, tensors, device, path)
                | {"params": list(saved["params"])}
                for saved, group in zip(value, groups, strict=False)
            ]
        else:
            found[key] = _decode_own(value, held.get(key), tensors, device, path)
    return found


def _decode_group(
    saved: Mapping[str, Any],
    held: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    path: Any,
) -> dict[str, Any]:
    """Return the settings of a group that were saved, each of the kind that the new group (``held``) has under its name."""
    values = {}
    for key, raw in saved.items():
        if key in UNSAVED:
            continue
        if isinstance(raw, dict) and "$setting" in raw:
            if key not in held:
                raise CheckpointError(
                    f"{path}: {key} of a parameter group was {raw['$setting']}, which a checkpoint can only name: make the "
                    f"optimizer with it"
                )
        elif isinstance(raw, dict) and "$scalar" in raw:
            number, dtype = (
                decode(raw["$scalar"], tensors),
                decode({"$dtype": raw["dtype"]}, tensors),
            )
            if not isinstance(number, int | float):
                raise CheckpointError(
                    f"{path}: {key} of a parameter group is {number!r}, where a number is expected"
                )
            value = torch.tensor(
                number, dtype=dtype, device="cpu" if raw.get("on_host") else device
            )
            values[key] = _fitted(key, value, held, path)
        else:
            values[key] = _fitted(key, decode(raw, tensors), held, path)
    return values


def _fitted(key: str, value: Any, held: Mapping[str, Any], path: Any) -> Any:
    """Return a setting as what the new group holds: a tensor or a number, which are interchangeable, or else as it is."""
    here = held.get(key)
    one = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
    if (
        here is None and key.startswith("initial_") and one
    ):  # as a schedule has made it, of what is there
        now = held.get(key.removeprefix("initial_"))
        if isinstance(now, Tensor):
            return torch.full_like(now, float(value))
        return _number(value) if isinstance(now, int | float) else value
    if isinstance(here, Tensor):
        fits = isinstance(value, Tensor) and (
            value.shape == here.shape or (value.ndim == here.ndim and value.numel() == 1)
        )
        if not fits and not (isinstance(value, int | float) and not here.ndim):
            raise CheckpointError(
                f"{path}: {key} of a parameter group is {value!r}, and a tensor of shape {tuple(here.shape)} here"
            )
        return torch.empty_like(here, requires_grad=False).copy_(torch.as_tensor(value))
    if isinstance(here, Real) and one:
        return _number(value)
    alike = type(value) is type(here) or (isinstance(value, Mapping) and isinstance(here, Mapping))
    alike = alike or (isinstance(here, Real) and isinstance(value, Real | Tensor))
    if here is not None and value is not None and not alike:
        raise CheckpointError(f"{path}: {key} of a parameter group is {value!r}, and {here!r} here")
    return value


def _number(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return as_number(value) if value.is_floating_point() else value.item()


def _assign(group: Any, values: Mapping[str, Any]) -> None:
    """Put settings into a group, into the tensors that it holds where they fit: others may know those."""
    for key, value in values.items():
        here = (
            None if key.startswith(SCHEDULED) else group.get(key)
        )  # which may be the very tensor that the rate is
        if (
            isinstance(here, Tensor)
            and isinstance(value, Tensor)
            and here.shape == value.shape
            and here.dtype == value.dtype
        ):
            here.data.copy_(value)
        else:
            group[key] = value


def _join_scheduled(group: dict[str, Any]) -> None:
    """Let what a schedule has set be the very object that the group uses, where the two are equal: a schedule looks at that."""
    for key in [key for key in group if key.startswith(SCHEDULED)]:
        used = group.get(key.removeprefix(SCHEDULED))
        if used is not None and bool(group[key] == used):
            group[key] = used


def _on_device(value: Any, parameter: Tensor, group: Mapping[str, Any], stays: set[int]) -> Any:
    """Move an optimizer's state to where its parameter is; what was on the host stays there, and so does a step count."""
    if isinstance(value, Tensor):
        value = value if id(value) in stays else value.to(parameter.device)
        return like_sharded(value, parameter) if value.shape == parameter.shape else value
    if isinstance(value, list | tuple):
        return type(value)(_on_device(v, parameter, group, stays) for v in value)
    if isinstance(value, dict):
        on_device = group.get("capturable") or group.get("fused")
        steps = {"step": value["step"]} if "step" in value else {}
        steps = {
            k: v.to(parameter.device) if on_device and isinstance(v, Tensor) else v
            for k, v in steps.items()
        }
        return {
            k: steps[k] if k in steps else _on_device(v, parameter, group, stays)
            for k, v in value.items()
        }
    return value


def _check_state(owned: Owned, name: str, value: Mapping[str, Any], path: Any) -> None:
    """Raise if the state of a parameter cannot be that of an optimizer of torch: its next update would fail, deep inside."""
    parameters = owned.parameters()
    p = parameters[name][0]
    total = sum(q.numel() * (1 + q.is_complex()) for q, _ in parameters.values())
    for key, held in value.items():
        shapes: list[tuple[int, ...]] = [()] if key in COUNTS else [tuple(p.shape)]
        if owned.kind == "Adafactor" and p.ndim > 1:
            shapes += [(*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])]
        elif owned.kind == "LBFGS":
            shapes = [(), (total,)]
        for tensor in held if isinstance(held, list) else [held]:
            if isinstance(tensor, Tensor):
                right = tuple(tensor.shape) in shapes and (
                    tensor.is_floating_point() or tensor.is_complex()
                )
                right = right and (tensor.is_complex() <= p.is_complex())
            else:
                right = tensor is None or isinstance(tensor, int | float)
            if not right:
                raise CheckpointError(
                    f"{path}: {key} of {name} in the optimizer's state is {_described(tensor)}, which {owned.kind} cannot "
                    f"continue with: the parameter is {_described(p)}"
                )


# --- an optimizer as a whole


def optimizers_in(value: Any, seen: set[int] | None = None) -> Iterator[Optimizer]:
    """Yield an optimizer and those inside it, the outermost first.

    Example:
        >>> inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> inner.another = {"other": torch.optim.Adam(inner.param_groups[0]["params"])}
        >>> [type(optimizer).__name__ for optimizer in optimizers_in(inner)]
        ['SGD', 'Adam']
    """
    seen = set() if seen is None else seen
    if isinstance(value, Optimizer) and id(value) not in seen:
        seen.add(id(value))
        yield value
        parts = [
            part for name, part in vars(value).items() if name not in ("state", "param_groups")
        ]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        return
    for part in parts:
        yield from optimizers_in(part, seen)


@contextlib.contextmanager
def _put_back_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Leave an optimizer as it was if loading fails; and if not, let its groups be the objects that they were.

    An optimizer around another one holds its groups, and so may a schedule or a graph. What torch's ``load_state_dict`` puts
    there are new ones.
    """
    every = list(optimizers_in(optimizer))
    attributes = [dict(vars(inner)) for inner in every]
    states = [
        {key: _containers_copied(value) for key, value in inner.state.items()} for inner in every
    ]
    lists = [
        (inner.param_groups, [(group, dict(group)) for group in inner.param_groups])
        for inner in every
    ]
    reported = (
        _containers_copied(optimizer.state_dict(), Tensor.clone)
        if saves_itself(optimizer)
        else None
    )
    try:
        yield
    except BaseException:
        for inner, before, state, (groups, contents) in zip(
            every, attributes, states, lists, strict=True
        ):
            vars(inner).clear()
            vars(inner).update(before)
            inner.state.clear()
            inner.state.update(state)
            groups[:] = [group for group, _ in contents]
            for group, settings in contents:
                group.clear()
                group.update(settings)
        with contextlib.suppress(Exception):
            if reported is not None and difference(
                reported, optimizer.state_dict(), ""
            ):  # loaded in place
                optimizer.load_state_dict(reported)
        raise
    chosen: dict[int, Any] = {}
    for inner, (groups, contents) in zip(every, lists, strict=True):
        now = inner.param_groups
        old, _ = chosen.setdefault(id(now), (groups, now))
        if now is not old and len(now) == len(contents):
            for (group, _), settings in zip(contents, now, strict=True):
                if group is not settings:
                    for key in [key for key in group if key not in settings]:
                        del group[key]
                    _assign(group, settings)
            old[:] = [group for group, _ in contents]
            if "param_groups" in vars(inner):
                inner.param_groups = old


def _containers_copied(
    value: Any, tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Any:
    """Return a value with dicts and lists of its own."""
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, Mapping):
        copied = copy.copy(value)
        for key, inner in value.items():
            copied[key] = _containers_copied(inner, tensor)  # type: ignore[index]
        return copied
    if isinstance(value, list | deque):
        copied = copy.copy(value)
        for i, inner in enumerate(value):
            copied[i] = _containers_copied(inner, tensor)
        return copied
    return value


def difference(a: Any, b: Any, path: str) -> str | None:
    """Return where two values differ in a bit, or None if they do not. What is no plain data is not compared.

    Example:
        >>> difference({"a": [1.0, torch.zeros(1)]}, {"a": [1.0, torch.ones(1)]}, "state")
        'state.a.1 differs'
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(_bits(a), _bits(b).to(a.device))
        )
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            odd = [str(key) for key in (*a, *b) if key not in a or key not in b]
            return f"{path} has {listed(odd)} in one, and not in the other"
        return next(
            (found for key in a if (found := difference(a[key], b[key], f"{path}.{key}"))), None
        )
    elif (
        isinstance(a, list | tuple | deque)
        and isinstance(b, list | tuple | deque)
        and len(a) == len(b)
    ):
        pairs = enumerate(zip(a, b, strict=True))
        return next(
            (found for i, (x, y) in pairs if (found := difference(x, y, f"{path}.{i}"))), None
        )
    else:
        plain = all(x is None or isinstance(x, PLAIN) for x in (a, b))
        same = not plain or (
            type(a) is type(b) and (a is b or bool(np.all(a == b)) or (a != a and b != b))
        )
    if same:
        return None
    one, other = _described(a), _described(b)
    return (
        f"{path} differs" if one == other else f"{path} is {one} in one, and {other} in the other"
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return described(value)


def _bits(tensor: Tensor) -> Tensor:
    tensor = (
        torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.is_complex()
        else tensor.detach()
    )
    return tensor.resolve_neg().view(BITS[tensor.dtype.itemsize])
