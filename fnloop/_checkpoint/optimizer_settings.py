"""Restore the settings of parameter groups, each as the kind of value that the new group has."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import UNSAVED
from fnloop._core.optimizers import SCHEDULED, Group
from fnloop._core.serialize import Json, as_number, decode

__all__ = ["assign_settings", "decode_group", "share_scheduled_values"]


def decode_group(
    saved: Mapping[str, Json],
    held: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    device: torch.device,
    path: object,
) -> Group:
    """Return the saved settings of a group, each as the kind of value that the new group has.

    Args:
        saved: the settings as JSON.
        held: the new group.
        tensors: the tensors of the checkpoint.
        device: where tensors that the new group lacks are put.
        path: the checkpoint, for messages.
    """
    values = {}
    for key, raw in saved.items():
        if key in UNSAVED:
            continue
        if isinstance(raw, dict) and "$setting" in raw:
            if key not in held:
                raise CheckpointError(
                    f"{path}: {key} of a parameter group was {raw['$setting']}, which a checkpoint "
                    "can only name: create the optimizer with it"
                )
        elif isinstance(raw, dict) and "$scalar" in raw:
            value = _decode_scalar(key, raw, tensors, device, path)
            values[key] = _fit_setting(key, value, held, path)
        else:
            values[key] = _fit_setting(key, decode(raw, tensors), held, path)
    return values


def _decode_scalar(
    key: str, raw: Json, tensors: Mapping[str, Tensor], device: torch.device, path: object
) -> Tensor:
    number = decode(raw["$scalar"], tensors)
    if not isinstance(number, int | float):
        raise CheckpointError(
            f"{path}: {key} of a parameter group is {number!r}; a number was expected"
        )
    dtype = decode({"$dtype": raw["dtype"]}, tensors)
    return torch.tensor(number, dtype=dtype, device="cpu" if raw.get("on_host") else device)


def _fit_setting(key: str, value: Any, held: Mapping[str, object], path: object) -> object:
    """Return a setting as a tensor or as a number, whichever the new group has.

    Numbers and tensors of one element are interchangeable. Anything else stays as it is.
    """
    here = held.get(key)
    one = isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim)
    if here is None and key.startswith("initial_") and one:
        # A schedule derives this setting from the one without the prefix.
        now = held.get(key.removeprefix("initial_"))
        if isinstance(now, Tensor):
            return torch.full_like(now, float(value))
        return _to_number(value) if isinstance(now, int | float) else value
    if isinstance(here, Tensor):
        if not _fits_tensor(value, here):
            raise CheckpointError(
                f"{path}: {key} of a parameter group is {value!r} in the checkpoint and a tensor "
                f"of shape {tuple(here.shape)} here"
            )
        return torch.empty_like(here, requires_grad=False).copy_(torch.as_tensor(value))
    if isinstance(here, Real) and one:
        return _to_number(value)
    alike = (
        type(value) is type(here)
        or (isinstance(value, Mapping) and isinstance(here, Mapping))
        or (isinstance(value, Real | Tensor) and isinstance(here, Real))
    )
    if here is not None and value is not None and not alike:
        raise CheckpointError(
            f"{path}: {key} of a parameter group is {value!r} in the checkpoint and {here!r} here"
        )
    return value


def _fits_tensor(value: object, here: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.shape == here.shape or (value.ndim == here.ndim and value.numel() == 1)
    return isinstance(value, int | float) and not here.ndim


def _to_number(value: float | Tensor) -> object:
    if not isinstance(value, Tensor):
        return value
    return as_number(value) if value.is_floating_point() else value.item()


def assign_settings(group: Group, values: Mapping[str, object]) -> None:
    """Assign settings to a group.

    They are copied into the tensors of the group where they fit, because others may refer to those.
    """
    for key, value in values.items():
        # A scheduled value may be the same tensor as the learning rate, so it is never copied into.
        here = None if key.startswith(SCHEDULED) else group.get(key)
        if (
            isinstance(here, Tensor)
            and isinstance(value, Tensor)
            and here.shape == value.shape
            and here.dtype == value.dtype
        ):
            here.data.copy_(value)
        else:
            group[key] = value


def share_scheduled_values(group: Group) -> None:
    """Make each value that a schedule set the same object as the group's value, if they are equal.

    A schedule compares the two objects to detect that something else has changed the value.
    """
    for key in [key for key in group if key.startswith(SCHEDULED)]:
        used = group.get(key.removeprefix(SCHEDULED))
        if used is not None and bool(group[key] == used):
            group[key] = used
