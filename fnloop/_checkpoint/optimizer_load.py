"""Load saved optimizers: check everything first, then load all of it or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend.containers import map_leaves, pairs_of
from fnloop._backend.fsdp import like_sharded
from fnloop._checkpoint.compare import describe_value, find_difference
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import (
    UNSAVED,
    NamedOptimizer,
    has_own_state_dict,
    is_list_of_groups,
    is_torch_optimizer,
)
from fnloop._checkpoint.optimizer_rollback import rollback_on_error
from fnloop._checkpoint.optimizer_settings import (
    assign_settings,
    decode_group,
    share_scheduled_values,
)
from fnloop._core.optimizers import SCHEDULED, Group
from fnloop._core.serialize import (
    Json,
    Pending,
    decode,
    from_flattened,
    from_safetensor,
    is_flattened,
    kinds_in,
    tensors_in,
)
from fnloop._display.checks import join_names
from fnloop._display.log import log

__all__ = ["PreparedLoad", "SavedOptimizer", "load_all", "prepare_load"]

NUMBERS = ("step", "eta", "mu", "mu_product")  # torch's optimizers keep one of these per parameter


@attrs.frozen(eq=False)
class SavedOptimizer:
    """An optimizer as it was read from a checkpoint.

    Args:
        facts: what ``encode_optimizer`` returned.
        tensors: its tensors by name. Those of parameters are taken out as they are decoded, because
            a tensor may be copied then.
        shapes: name to shape of the model's tensors in the checkpoint.
        path: the checkpoint, for messages.
        processes: how many processes saved it; None if that is not known.
    """

    facts: Mapping[str, Json]
    tensors: dict[str, Tensor]
    shapes: Mapping[str, torch.Size] = attrs.field(factory=dict)
    path: object = "the checkpoint"
    processes: int | None = None


class PreparedLoad(NamedTuple):
    """How to load an optimizer that fits.

    Args:
        optimizer: the new optimizer.
        load: loads its state and settings; may fail half-way if the optimizer does it by itself.
        finish: loads what depends on them. It does not fail.
    """

    optimizer: Optimizer
    load: Callable[[], None]
    finish: Callable[[], None]


def load_all(prepared: Sequence[PreparedLoad]) -> None:
    """Load optimizers, all of them or none.

    Those that load by themselves are first, because they may fail.
    """
    with contextlib.ExitStack() as undone:
        for one in sorted(prepared, key=lambda one: not has_own_state_dict(one.optimizer)):
            undone.enter_context(rollback_on_error(one.optimizer))
            one.load()
    for one in prepared:
        one.finish()


def prepare_load(named: NamedOptimizer, saved: SavedOptimizer, strict: bool = True) -> PreparedLoad:
    """Check that a saved optimizer fits, and return how to load it.

    Args:
        named: the new optimizer.
        saved: the saved one.
        strict: whether the parameters must have the shapes that they had.

    Raises:
        CheckpointError: it is another optimizer, or does not fit.
    """
    if saved.facts["class"] != named.class_name:
        raise CheckpointError(
            f"{saved.path} has the state of {saved.facts['class']}, and the optimizer is "
            f"{named.class_name}. Create the former, or leave it out: "
            "restore(path, state, only=('model',))"
        )
    mismatched = _check_parameters(named, saved, strict)
    try:
        if "state_dict" in saved.facts:
            load = _prepare_own_load(named, saved, bool(mismatched))
        else:
            load = _prepare_load_by_name(named, saved, mismatched)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{saved.path}: the optimizer's state cannot be restored: "
            f"{type(error).__name__}: {error}"
        ) from error

    def finish() -> None:
        for group in named.optimizer.param_groups:
            share_scheduled_values(group)
        for name, p in named.parameters().items():
            value = saved.tensors.get(f"parameter.{name}")
            if value is not None and name not in mismatched:
                value = from_safetensor(value) if p.dtype is torch.complex128 else value
                p.data.copy_(like_sharded(value, p))

    return PreparedLoad(named.optimizer, load, finish)


def _check_parameters(named: NamedOptimizer, saved: SavedOptimizer, strict: bool) -> list[str]:
    """Check that the parameters are the saved ones. Return those whose shape is another.

    With ``strict`` there are none: a difference raises.
    """
    mine, theirs = (
        named.group_names(),
        [group["params"] for group in saved.facts["param_groups"]],
    )
    if strict and mine != theirs:
        raise CheckpointError(
            f"{saved.path} has an optimizer of other parameters: {_compare_names(mine, theirs)}. "
            "Make its groups as they were"
        )
    parameters, shape_of = named.parameters(), dict(saved.shapes)
    for name, p in parameters.items():
        if (value := saved.tensors.get(f"parameter.{name}")) is not None:
            shape_of[name] = value.shape[:-1] if p.dtype is torch.complex128 else value.shape
    mismatched = [
        name for name, p in parameters.items() if name in shape_of and shape_of[name] != p.shape
    ]
    if mismatched and strict:
        both = [
            f"{name}: {tuple(shape_of[name])} saved, {tuple(parameters[name].shape)} here"
            for name in mismatched
        ]
        raise CheckpointError(
            f"{saved.path} has the optimizer's state of parameters of another shape: "
            f"{join_names(both)}"
        )
    if mine != theirs and "state_dict" in saved.facts:
        # A whole state_dict fits all parameters or none.
        mismatched = mismatched or [name for group in mine for name in group]
    return mismatched


def _compare_names(mine: list[list[str]], theirs: list[list[str]]) -> str:
    here = {name for group in mine for name in group}
    there = {name for group in theirs for name in group}
    if here == there:
        return "the same parameters in other groups, or in another order"
    only_here, only_there = join_names(sorted(here - there)), join_names(sorted(there - here))
    return f"only here: {only_here}; only in the checkpoint: {only_there}"


# --- by name


def _prepare_load_by_name(
    named: NamedOptimizer, saved: SavedOptimizer, mismatched: Collection[str]
) -> Callable[[], None]:
    optimizer, parameters = named.optimizer, named.parameters_with_groups()
    total = sum(p.numel() * (1 + p.is_complex()) for p, _ in parameters.values())
    settings = [
        decode_group(values, group, saved.tensors, _device_of([group]), saved.path)
        for group, values in zip(optimizer.param_groups, saved.facts["param_groups"], strict=False)
    ]
    on_host = set(saved.facts.get("on_host", ()))
    stays = {id(tensor): tensor for name, tensor in saved.tensors.items() if name in on_host}
    state_of, held = {}, named.holder.state
    templates = _templates_for(named, saved)
    kept = {named.names[id(p)] for group in named.holder.param_groups for p in group["params"]}
    for name, encoded in saved.facts["state"].items():
        if name in kept and name not in mismatched:
            value = decode(encoded, saved.tensors)
            if not isinstance(value, dict):
                raise CheckpointError(f"{saved.path}: the optimizer's state is not a mapping")
            if is_torch_optimizer(named.holder):
                _check_state(named.class_name, name, parameters[name][0], value, total, saved.path)
            state_of[name] = _move_state(value, *parameters[name], stays, templates)
            for key in tensors_in(encoded):
                del saved.tensors[key]
    state_of_all = decode(saved.facts.get("state_of_all", {}), saved.tensors)

    def load() -> None:
        for group, values in zip(optimizer.param_groups, settings, strict=False):
            for key in [key for key in group if key.startswith(SCHEDULED) and key not in values]:
                del group[key]
            assign_settings(group, values)
        held.clear()
        held.update({parameters[name][0]: value for name, value in state_of.items()})
        held.update(state_of_all)

    return load


def _device_of(groups: list[Group]) -> torch.device:
    return next((p.device for group in groups for p in group["params"]), torch.device("cpu"))


def _templates_for(named: NamedOptimizer, saved: SavedOptimizer) -> Mapping[str, Tensor]:
    """Return a tensor of each subclass that the saved state has, as this optimizer makes them.

    The checkpoint only names the classes, and a new optimizer has no state yet. So a copy of it
    updates, for each class, the smallest parameter whose state has one.
    """
    parameters, found = named.parameters(), {}
    for name, encoded in saved.facts["state"].items():
        for kind in filter(is_flattened, kinds_in(encoded)):
            if name in parameters:
                found.setdefault(kind, []).append((parameters[name].numel(), name))
    if not found:
        return {}
    # Imported here, since a trial loads optimizers itself.
    from fnloop._checkpoint.trial_copy import tensors_of_copy

    try:
        made = tensors_of_copy(named, {min(each)[1] for each in found.values()})
    except Exception as error:
        raise CheckpointError(
            f"{saved.path} has an optimizer's state in {_class_names(found)}, and a trial update "
            f"of {named.class_name}, which would make such tensors, raises "
            f"{type(error).__name__}: {error}"
        ) from error
    if lacking := [kind for kind in found if kind not in made]:
        raise CheckpointError(
            f"{saved.path} has an optimizer's state in {_class_names(lacking)}, and "
            f"{named.class_name} keeps none there: create it with the settings that it had"
        )
    return made


def _class_names(kinds: Iterable[str]) -> str:
    return join_names([kind.split(".")[-1] for kind in kinds])


def _move_state(
    value: Any,
    parameter: Tensor,
    group: Group,
    stays: Mapping[int, Tensor],
    templates: Mapping[str, Tensor],
) -> Any:
    """Move the state of a parameter to its device.

    Tensors that were on the host stay there. So does a step count, unless the optimizer computes in
    a way that needs it on the device. Tensors of subclasses are made as the templates are.
    """
    if isinstance(value, Pending):
        return from_flattened(
            value,
            templates[value.kind],
            lambda part: part if id(part) in stays else part.to(parameter.device),
        )
    if isinstance(value, Tensor):
        value = value if id(value) in stays else value.to(parameter.device)
        if value.shape != parameter.shape:
            return value
        value = like_sharded(value, parameter)
        if group.get("fused") and value.stride() != parameter.stride():
            # It reads both as they are in memory. The parameter may be in channels_last, or not.
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        return value
    if isinstance(value, list | tuple):
        return type(value)(_move_state(v, parameter, group, stays, templates) for v in value)
    if isinstance(value, dict):
        moved = {
            k: _move_state(v, parameter, group, stays, templates)
            for k, v in value.items()
            if k != "step"
        }
        if "step" in value:
            step, on_device = value["step"], group.get("capturable") or group.get("fused")
            move = on_device and isinstance(step, Tensor)
            moved["step"] = step.to(parameter.device) if move else step
        return {key: moved[key] for key in value}
    return value


def _check_state(
    class_name: str, name: str, p: Tensor, value: Mapping[str, object], total: int, path: object
) -> None:
    """Raise if the state of a parameter cannot be that of an optimizer of torch.

    Its next update would otherwise fail somewhere inside torch.

    Args:
        class_name: the class of the optimizer.
        name, p, value: the parameter, and its state.
        total: how many real numbers all parameters have together.
        path: the checkpoint, for messages.
    """
    for key, held in value.items():
        shapes: list[tuple[int, ...]] = [()] if key in NUMBERS else [tuple(p.shape)]
        if class_name == "Adafactor" and p.ndim > 1:
            shapes += [(*p.shape[:-1], 1), (*p.shape[:-2], 1, p.shape[-1])]
        elif class_name == "LBFGS":
            shapes = [(), (total,)]
        for item in held if isinstance(held, list) and class_name == "LBFGS" else [held]:
            if not _may_be_state(item, shapes, p, class_name):
                raise CheckpointError(
                    f"{path}: {key} of {name} in the optimizer's state is {describe_value(item)}, "
                    f"which {class_name} cannot continue with: "
                    f"the parameter is {describe_value(p)}"
                )


def _may_be_state(
    item: object, shapes: list[tuple[int, ...]], parameter: Tensor, class_name: str
) -> bool:
    if not isinstance(item, Tensor):
        # SparseAdam counts in a number, and LBFGS keeps most of what it knows in numbers.
        has_numbers = class_name == "LBFGS" or (class_name == "SparseAdam" and shapes == [()])
        return has_numbers and (item is None or isinstance(item, int | float))
    if item.is_complex():
        return tuple(item.shape) in shapes and parameter.is_complex()
    return tuple(item.shape) in shapes and item.is_floating_point()


# --- by its own state_dict


def _prepare_own_load(
    named: NamedOptimizer, saved: SavedOptimizer, left_out: bool
) -> Callable[[], None]:
    optimizer, class_name = named.optimizer, named.class_name
    if left_out:
        log.warning(
            "restore: left unchanged: the state of %s, which has other parameters", class_name
        )
        return lambda: None
    device = _device_of(optimizer.param_groups)
    held = optimizer.state_dict()
    expected = _decode_state_dict(saved.facts["state_dict"], held, saved, device)

    def load() -> None:
        try:
            optimizer.load_state_dict(map_leaves(expected))
            _restore_dtypes(expected, optimizer.state_dict())
            difference = find_difference(expected, optimizer.state_dict(), "state_dict")
        except Exception as error:
            raise CheckpointError(
                f"{saved.path}: {class_name}.load_state_dict does not accept what its state_dict "
                f"returned: {type(error).__name__}: {error}"
            ) from error
        if difference:
            raise CheckpointError(
                f"{saved.path}: {class_name}.load_state_dict does not restore what its state_dict "
                f"returned: {difference}. Fix it in a subclass"
            )

    return load


def _decode_state_dict(
    encoded: Json, held: object, saved: SavedOptimizer, device: torch.device
) -> Any:
    """Return a state_dict from JSON, with the unsaved settings of the new one (``held``)."""
    if not isinstance(encoded, dict) or any(key.startswith("$") for key in encoded):
        return decode(encoded, saved.tensors)
    held = held if isinstance(held, Mapping) else {}
    decoded = {}
    for key, value in encoded.items():
        if is_list_of_groups(key, value):
            groups: list[Group] = list(held.get(key, ()))
            groups += [{}] * (len(value) - len(groups))
            decoded[key] = [
                {name: now for name, now in group.items() if name in UNSAVED or name in settings}
                | decode_group(settings, group, saved.tensors, device, saved.path)
                | {"params": list(settings["params"])}
                for settings, group in zip(value, groups, strict=False)
            ]
        else:
            decoded[key] = _decode_state_dict(value, held.get(key), saved, device)
    return decoded


def _restore_dtypes(expected: object, held: Any) -> None:
    """Restore tensors that ``load_state_dict`` has cast to the dtype of their parameter.

    The ``load_state_dict`` of torch does that. ``held`` is what ``state_dict`` returns. Its dicts
    and lists are those of the optimizer, unless the optimizer copies them.
    """
    for key, value, now in pairs_of(expected, held) or ():
        if not isinstance(value, Tensor) or not isinstance(now, Tensor):
            _restore_dtypes(value, now)
        elif value.dtype != now.dtype and value.shape == now.shape and not isinstance(held, tuple):
            held[key] = value.to(now.device)
