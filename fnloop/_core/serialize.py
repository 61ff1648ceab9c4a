"""Plain data and tensors, to JSON and a flat mapping of tensors, and back. No code is ever named, so none can be run.

What isn't plain is written as its parts: a record as its fields, an object with a ``state_dict`` as that. Reading gives a
:class:`Saved` in its place, which becomes the thing itself when somebody who knows how to make one has made one: a
middleware's ``init`` for a slot, the next batch for a metric.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Pending",
    "as_number",
    "as_safetensor",
    "decode",
    "encode",
    "from_safetensor",
    "has_pending",
    "materialize",
]


@attrs.frozen(eq=False)
class Pending:
    """What was read from a checkpoint, and waits for a thing of its kind to go into.

    Args:
        kind: the name of the class that it was, for messages only.
        parts: its fields, or its state_dict.
    """

    kind: str
    parts: Mapping[str, Any]


def encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return a value as JSON, having put the tensors in it into ``tensors`` under names that begin with ``path``.

    Args:
        value: None, bool, int, float, str, dtypes, tensors and arrays, in lists, tuples, deques and mappings; records of
            attrs; objects with a ``state_dict``.
        tensors: where the tensors go.
        path: where the value is, for names and messages.

    Raises:
        TypeError: there is something else in it; the message says where.

    Example:
        >>> tensors = {}
        >>> encode({"scale": 2.0, "seen": torch.ones(1), "worst": math.inf}, tensors, "slots")
        {'scale': 2.0, 'seen': {'$tensor': 'slots.seen'}, 'worst': {'$float': 'inf'}}
        >>> list(tensors)
        ['slots.seen']
    """
    if isinstance(value, enum.Enum):
        raise TypeError(
            f"{path} is a {type(value).__name__}, an enum, which would come back as a plain value: keep its value"
        )
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return _checked_text(value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.ndarray | Tensor):
        return _encode_tensor(value, tensors, path)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, deque):
        return {"$deque": encode(list(value), tensors, path), "most": value.maxlen}
    if isinstance(value, Counter):
        return {"$counter": encode(dict(value), tensors, path)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        raise TypeError(
            f"{path} is a {type(value).__name__}, a named tuple, which would come back as a plain one: keep a dict"
        )
    if isinstance(value, Pending):
        return {"$saved": value.kind, "parts": encode(dict(value.parts), tensors, path)}
    if isinstance(value, list):
        return [encode(v, tensors, f"{path}.{i}") for i, v in enumerate(value)]
    if isinstance(value, tuple | set | frozenset):
        name = "$tuple" if isinstance(value, tuple) else "$set"
        return {name: [encode(v, tensors, f"{path}.{i}") for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {
                _checked_text(k, path): encode(v, tensors, f"{path}.{k}") for k, v in value.items()
            }
        pairs = [
            [encode(k, tensors, f"{path}.key{i}"), v]
            for i, k in enumerate(value)
            for v in [value[k]]
        ]
        return {"$dict": [[k, encode(v, tensors, f"{path}.{i}")] for i, (k, v) in enumerate(pairs)]}
    parts = _parts(value)
    if parts is None:
        raise TypeError(
            f"{path} is a {type(value).__name__}, which a checkpoint can't hold. Keep plain data, tensors, attrs records or "
            f"objects with a state_dict there"
        )
    return {"$saved": _kind(value), "parts": encode(parts, tensors, path)}


def _encode_tensor(value: np.ndarray | Tensor, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise TypeError(
                f"{path} is an array of {value.dtype}, which a checkpoint can't hold: keep a list"
            )
        kept = (
            value.astype(np.int64)
            if value.dtype.kind == "u"
            else value.astype(value.dtype.newbyteorder("="))
        )
        return {
            "$array": _put(tensors, path, torch.from_numpy(np.ascontiguousarray(kept))),
            "dtype": str(value.dtype),
        }
    if kind := _unheld(value):
        raise TypeError(f"{path} is a tensor ({kind}), which safetensors can't hold")
    return {"$tensor": _put(tensors, path, as_safetensor(value)), **_form(value)}


def _unheld(tensor: Tensor) -> str:
    """Return why a file cannot hold a tensor, or nothing. A sharded one is whole before it is written."""
    cls = type(tensor)
    if hasattr(cls, "__tensor_flatten__") and cls.__name__ != "DTensor":
        return cls.__name__
    return (
        "meta"
        if tensor.is_meta
        else ""
        if tensor.layout is torch.strided
        else f"{tensor.layout} {tensor.dtype}"
    )


def as_safetensor(tensor: Tensor) -> Tensor:
    """Return a tensor as safetensors can hold it: of complex128, which it cannot, pairs of float64.

    Example:
        >>> as_safetensor(torch.tensor([1 + 2j], dtype=torch.complex128))
        tensor([[1., 2.]], dtype=torch.float64)
    """
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype is torch.complex128 else tensor


def from_safetensor(tensor: Tensor) -> Tensor:
    """Return the complex128 tensor that :func:`as_safetensor` was given.

    Example:
        >>> from_safetensor(as_safetensor(torch.tensor([1 + 2j], dtype=torch.complex128))).tolist()
        [(1+2j)]
    """
    return torch.view_as_complex(tensor.contiguous())


def _form(tensor: Tensor) -> dict[str, Any]:
    """Return what the file does not say of a tensor: that it is complex128, and its strides if they are unusual and dense."""
    form: dict[str, Any] = {"complex": True} if tensor.dtype is torch.complex128 else {}
    if not tensor.is_contiguous():
        strides = torch.empty_like(
            tensor, device="meta"
        ).stride()  # contiguous, unless the tensor fills its memory
        if strides != torch.empty(tensor.shape, device="meta").stride():
            form["strides"] = list(strides)
    return form


def _formed(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Return a tensor with the strides that it had."""
    if strides is None:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, device="meta")
    if (
        torch.empty_like(made).stride() != made.stride()
    ):  # far apart: it would take any amount of memory
        raise ValueError(
            f"strides {strides} do not belong to a tensor of shape {tuple(tensor.shape)}"
        )
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _put(tensors: dict[str, Tensor], path: str, tensor: Tensor) -> str:
    """Put a tensor under its path, or, if two paths are spelled alike, under the next free name; return the name."""
    name, n = path, 0
    while name in tensors:
        name, n = f"{path}~{n}", n + 1
    tensors[name] = tensor
    return name


def _kind(value: Any) -> str:
    """Name the class of a value; only fnloop's own are named with their package."""
    cls = type(value)
    return f"fnloop.{cls.__name__}" if cls.__module__.split(".")[0] == "fnloop" else cls.__name__


def _parts(value: Any) -> Mapping[str, Any] | None:
    if hasattr(value, "to_parts"):
        return value.to_parts()
    if callable(getattr(value, "state_dict", None)):
        return value.state_dict()
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    return None


def _checked_text(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TypeError(
                f"{path} has a str with a lone surrogate, which no file can hold: {text!r:.40}"
            ) from None
    return text


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return what :func:`encode` was given, with :class:`Saved` in the place of what isn't plain.

    Example:
        >>> tensors = {}
        >>> decode(encode({"a": (1, math.nan), 2: {3}}, tensors, ""), tensors)
        {'a': (1, nan), 2: {3}}
    """
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        tensor = tensors[value["$tensor"]]
        return _formed(
            from_safetensor(tensor) if value.get("complex") else tensor, value.get("strides")
        )
    if "$dtype" in value:
        if not isinstance(dtype := getattr(torch, value["$dtype"], None), torch.dtype):
            raise ValueError(
                f"there is no torch.{value['$dtype']}, a dtype, in this version of torch"
            )
        return dtype
    if "$deque" in value:
        return deque(decode(value["$deque"], tensors), value["most"])
    if "$array" in value:
        return tensors[value["$array"]].numpy().astype(value["dtype"])
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(v, tensors) for v in value["$tuple"])
    if "$set" in value:
        return {decode(v, tensors) for v in value["$set"]}
    if "$dict" in value:
        return {decode(k, tensors): decode(v, tensors) for k, v in value["$dict"]}
    if "$counter" in value:
        return Counter(decode(value["$counter"], tensors))
    if "$saved" in value:
        return Pending(value["$saved"], decode(value["parts"], tensors))
    return {k: decode(v, tensors) for k, v in value.items()}


def as_number(value: Any) -> Any:
    """Return a number for a floating scalar tensor, which is one so that it can be changed on the device; else the value.

    Of float32 it is the shortest number that becomes the same again.

    Example:
        >>> torch.tensor(0.1).item(), as_number(torch.tensor(0.1))
        (0.10000000149011612, 0.1)
    """
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        return value
    return (
        float(str(value.detach().cpu().numpy())) if value.dtype is torch.float32 else value.item()
    )


def has_pending(value: Any) -> bool:
    """Say whether there is something :class:`Saved` in a value."""
    if isinstance(value, Mapping):
        return any(map(has_pending, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_pending, value))
    return isinstance(value, Pending)


def materialize(template: Any, value: Any) -> Any:
    """Return what was saved as a thing like the template; what is plain already, as it is.

    Args:
        template: a new thing of the kind that was saved. One with ``load_state_dict`` is loaded in place.
        value: what :func:`decode` returned.

    Raises:
        ValueError: what was saved is of another kind.
    """
    if isinstance(value, Mapping) and isinstance(template, Mapping):
        return {k: materialize(template[k], v) if k in template else v for k, v in value.items()}
    if isinstance(value, Tensor) and isinstance(template, Tensor):
        if value.dtype != template.dtype or value.ndim != template.ndim:
            both = [f"{t.dtype} with {t.ndim} dimensions" for t in (value, template)]
            raise ValueError(
                f"the checkpoint has a tensor of {both[0]} where there is one of {both[1]} now"
            )
        return value.to(template.device)
    if (
        isinstance(value, list | tuple)
        and type(value) is type(template)
        and len(value) == len(template)
    ):
        return type(value)(map(materialize, template, value))
    if not isinstance(value, Pending):
        return value
    if value.kind != _kind(template):
        saved, now = value.kind.removeprefix("fnloop."), type(template).__name__
        raise ValueError(
            f"the checkpoint has a {saved} where there is a {now} now: it was written with other settings. Use those, or "
            f"restore without it: restore(path, state, only=('model', 'optimizer', 'counters'))"
        )
    if hasattr(template, "from_parts"):
        return template.from_parts(value.parts)
    if hasattr(template, "load_state_dict"):
        template.load_state_dict(dict(value.parts))
        return template
    fields = {f.name: f.alias for f in attrs.fields(type(template)) if f.init}
    parts = {
        fields[k]: materialize(getattr(template, k), v)
        for k, v in value.parts.items()
        if k in fields
    }
    return attrs.evolve(template, **parts)
