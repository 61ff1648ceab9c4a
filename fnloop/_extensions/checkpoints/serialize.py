"""Plain data and tensors: to JSON and a mapping of tensors, and back."""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import local_part
from fnloop.extend import Pending, checks, containers

# --------------------------------------------------------------------------------------------------
# Plain data and tensors to JSON and a flat mapping of tensors, and back.
#
# No class or function is ever looked up by name, so reading cannot run code.
#
# An object that is not plain data is written as its parts: the fields of an attrs record, or the
# `state_dict` of an object. Reading gives a `Pending` in its place. It is materialized once an
# instance of its class is available: the slot that a middleware's `init` creates, or the metric
# that the next batch brings.

_WHOLE = {Tensor, nn.Parameter}  # classes of tensors that are never sharded
_NUMERIC = "biufc"  # kinds of dtypes: bool, integers, floating point, complex


Json = Any  # a JSON value, as json.loads returns it


_AS_IT_IS = (int, bool, type(None))  # in JSON
_NOT_A_FILE = "which safetensors cannot hold"


AsParts = Callable[[object, str], Pending]


def as_parts(value: object, path: str) -> Pending:
    """Return an object as its parts: those of an attrs record, or those of a ``state_dict``.

    Raises:
        TypeError: it is neither, or a tensor of a subclass.
    """
    if isinstance(value, Tensor):
        raise TypeError(f"{path} is a tensor ({type(value).__name__}), {_NOT_A_FILE}")
    if (found := Pending.of(value)) is not None:
        return found
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold. Keep plain data, "
        "tensors, attrs records or objects with a state_dict there"
    )


def plain_only(value: object, path: str) -> Pending:
    """Raise TypeError: for what is read without an instance of its class that takes its parts."""
    if isinstance(value, Tensor):
        return as_parts(value, path)
    if (found := Pending.of(value)) is not None:
        raise TypeError(
            f"{path} is a {found.kind}, an object, which could not be reconstructed: keep plain "
            "data and tensors there"
        )
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold. Keep plain data and "
        "tensors there"
    )


def plain_or_flattened(value: object, path: str) -> Pending:
    """Return a tensor of a subclass as its parts. Raise TypeError for an object."""
    found = as_flattened(value)
    return found if isinstance(found, Pending) else plain_only(value, path)


def encode(value: object, tensors: dict[str, Tensor], path: str, other: AsParts = as_parts) -> Json:
    """Return a value as JSON, and add its tensors to ``tensors`` under names below ``path``.

    Args:
        value: None, bool, int, float, str, dtypes, tensors and arrays, in lists, tuples, sets,
            deques and mappings; and what ``other`` takes.
        tensors: receives the tensors.
        path: where the value is, for names and messages.
        other: ``(value, path) -> parts`` of an object, or of a tensor of a subclass: by default
            those of attrs records and of objects with a ``state_dict``.

    Raises:
        TypeError: the value contains something else; the message says where.

    Example:
        >>> tensors = {}
        >>> encode({"scale": 2.0, "seen": torch.ones(1), "worst": math.inf}, tensors, "slots")
        {'scale': 2.0, 'seen': {'$tensor': 'slots.seen'}, 'worst': {'$float': 'inf'}}
        >>> list(tensors)
        ['slots.seen']
    """
    if isinstance(value, enum.Enum):
        raise TypeError(
            f"{path} is a {type(value).__name__}, an enum, which would be restored as a "
            "plain value: keep its value"
        )
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return _check_text(value, path)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, np.ndarray):
        return _encode_array(value, tensors, path)
    if isinstance(value, Tensor):
        if value.__class__ in _WHOLE or flattened_kind(value) is None:
            return _encode_tensor(value, tensors, path)
    elif isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    elif isinstance(value, deque | list | tuple | set | frozenset):
        return _encode_sequence(value, tensors, path, other)
    elif isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path, other)
    found = value if isinstance(value, Pending) else other(value, path)
    return {"$saved": found.kind, "parts": encode(found.parts, tensors, path, other)}


def _encode_sequence(
    value: deque[object] | list[object] | tuple[object, ...] | set[object] | frozenset[object],
    tensors: dict[str, Tensor],
    path: str,
    other: AsParts,
) -> Json:
    if containers.is_named_tuple(value):
        raise TypeError(
            f"{path} is a {type(value).__name__}, a named tuple, which would be restored as a "
            "plain tuple: keep a dict"
        )
    items = [encode(item, tensors, f"{path}.{i}", other) for i, item in enumerate(value)]
    if isinstance(value, deque):
        return {"$deque": items, "most": value.maxlen}
    if isinstance(value, list):
        return items
    return {"$tuple" if isinstance(value, tuple) else "$set": items}


def _encode_mapping(
    value: Mapping[Any, object], tensors: dict[str, Tensor], path: str, other: AsParts
) -> Json:
    if isinstance(value, Counter):
        return {"$counter": encode(dict(value), tensors, path, other)}
    found: dict[str, Json] = {}
    for key, inner in value.items():
        if not isinstance(key, str) or key.startswith("$"):
            break
        if not key.isascii():
            _check_text(key, path)
        as_it_is = inner.__class__ in _AS_IT_IS
        found[key] = inner if as_it_is else encode(inner, tensors, f"{path}.{key}", other)
    else:
        return found
    keys = [encode(key, tensors, f"{path}.key{i}", other) for i, key in enumerate(value)]
    inside = enumerate(value.values())
    values = [encode(inner, tensors, f"{path}.{i}", other) for i, inner in inside]
    return {"$dict": [list(pair) for pair in zip(keys, values, strict=True)]}


def _numeric_dtype(name: str) -> np.dtype:
    """Return a dtype of numbers.

    A crafted dtype of text or bytes could have any size, and one of objects is not an array.
    """
    dtype = np.dtype(name)
    if dtype.kind not in _NUMERIC:
        raise ValueError(f"an array of {dtype} is not one that a checkpoint can hold")
    return dtype


def _encode_array(value: np.ndarray, tensors: dict[str, Tensor], path: str) -> Json:
    if value.dtype.kind not in _NUMERIC:
        raise TypeError(
            f"{path} is an array of {value.dtype}, which a checkpoint cannot hold: keep a list"
        )
    unsigned = value.dtype.kind == "u"
    kept = value.astype(np.int64 if unsigned else value.dtype.newbyteorder("="))
    name = path if path not in tensors else _free_name(path, tensors)
    tensors[name] = torch.from_numpy(np.ascontiguousarray(kept))
    return {"$array": name, "dtype": str(value.dtype)}


def _encode_tensor(value: Tensor, tensors: dict[str, Tensor], path: str) -> Json:
    """Add a tensor. A sharded one is gathered later.

    Its facts are what a file does not say: whether it is of pairs, and its strides if they are
    dense but not contiguous.
    """
    name = path if path not in tensors else _free_name(path, tensors)
    facts: dict[str, Json] = {"$tensor": name}
    tensors[name] = as_safetensor(value, path)
    if value.dtype in PAIRS:
        facts["complex"] = True
    if not value.is_contiguous():
        # Contiguous, unless the tensor fills its memory.
        strides = torch.empty_like(value, device="meta").stride()
        if strides != torch.empty(value.shape, device="meta").stride():
            facts["strides"] = list(strides)
    return facts


def _free_name(path: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a name that no tensor has, as two paths may have the same spelling."""
    name, n = path, 0
    while name in tensors:
        name, n = f"{path}~{n}", n + 1
    return name


# --- tensors of subclasses, such as those of 8 bits that torchao's optimizers keep

_FLATTENED = "tensor "


def flattened_kind(value: object) -> str | None:
    """Return the name of the class of a tensor that consists of others; None for other values.

    It begins like that of no other :class:`Pending`.
    """
    cls = type(value)
    return (
        f"{_FLATTENED}{cls.__module__}.{cls.__qualname__}"
        if containers.is_subclass(value)
        else None
    )


def is_flattened(kind: str) -> bool:
    """Return whether what was saved under the name of a class is from :func:`as_flattened`."""
    return kind.startswith(_FLATTENED)


def as_flattened(value: object) -> object:
    """Return a tensor of a subclass as its parts, as torch's protocol names them.

    Another value is returned as it is.
    """
    kind = flattened_kind(value)
    if kind is None:
        return value
    parts: Json = containers.flattened(value)
    inner = {name: as_flattened(part) for name, part in parts["inner"].items()}
    return Pending(kind, {**parts, "inner": inner})


def from_flattened(
    saved: Pending, template: object, move: Callable[[Tensor], Tensor] = lambda t: t
) -> Tensor:
    """Return the tensor that :func:`as_flattened` was given.

    Args:
        saved: what it returned.
        template: a tensor of the same class, which the program has made.
        move: moves its parts to where they belong.

    Raises:
        ValueError: the parts are not those of such a tensor.
    """
    parts: Json = saved.parts
    mine: Json = containers.flattened(template)
    inner, made = parts["inner"], {}
    for name, like in mine["inner"].items():
        part = inner.get(name)
        if isinstance(part, Pending) and flattened_kind(like) == part.kind:
            made[name] = from_flattened(part, like, move)
        elif isinstance(part, Tensor) and part.dtype == like.dtype and part.ndim == like.ndim:
            made[name] = move(part)
        else:
            raise ValueError(f"{name} of a {type(template).__name__} is {checks.describe(part)}")
    rebuilt, size = containers.unflattened(template, parts, made), tuple(parts["size"])
    if rebuilt.shape != size or len(inner) != len(made):
        raise ValueError(f"a {type(template).__name__} of shape {size} has other parts")
    return rebuilt


# --- tensors

PAIRS = (torch.complex32, torch.complex128)  # which safetensors lacks: pairs of numbers in a file


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of torch that has this name; None if there is none."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


_FLOAT8 = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_HELD = frozenset(  # the dtypes of torch that safetensors writes and reads
    dtype_named(name)  # an older torch lacks some
    for name in (
        *("bool", "float16", "bfloat16", "float32", "float64", "complex64"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(f"float8_{kind}" for kind in _FLOAT8),
    )
)


def as_safetensor(tensor: Tensor, path: str = "it") -> Tensor:
    """Return a tensor that safetensors can hold: of complex numbers that it lacks, pairs.

    Args:
        tensor: the tensor. A sharded one is gathered later.
        path: where it is, for messages.

    Raises:
        TypeError: safetensors cannot hold it.

    Example:
        >>> as_safetensor(torch.tensor([1 + 2j], dtype=torch.complex128))
        tensor([[1., 2.]], dtype=torch.float64)
    """
    if (obstacle := _find_obstacle(tensor)) is not None:
        raise TypeError(f"{path} is a tensor ({obstacle}), {_NOT_A_FILE}")
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.dtype in PAIRS else tensor


def _find_obstacle(tensor: Tensor) -> str | None:
    """Return what of a tensor safetensors cannot hold; None if nothing."""
    plain = tensor.__class__ in _WHOLE
    if not plain and nn.parameter.is_lazy(tensor):
        return "whose size is not known yet"
    if tensor.is_meta:
        return "meta"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} {tensor.dtype}"
    if tensor.dtype not in _HELD and tensor.dtype not in PAIRS:
        return str(tensor.dtype)
    if plain:
        return None
    part = local_part(tensor)
    if flattened_kind(part) is not None or not _has_memory(part):
        return type(part).__name__
    return None


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its own elements, and does not only wrap others."""
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def from_safetensor(tensor: Tensor) -> Tensor:
    """Return the complex tensor that :func:`as_safetensor` was given.

    Example:
        >>> from_safetensor(as_safetensor(torch.tensor([1 + 2j], dtype=torch.complex128))).tolist()
        [(1+2j)]
    """
    return torch.view_as_complex(tensor.contiguous())


def _with_strides(tensor: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Return a tensor with the strides that it had."""
    if strides is None:
        return tensor
    dense = torch.empty_strided(tensor.shape, strides, device="meta")
    # Strides that are not dense could take any amount of memory.
    if torch.empty_like(dense).stride() != dense.stride():
        raise ValueError(
            f"strides {strides} do not belong to a tensor of shape {tuple(tensor.shape)}"
        )
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _check_text(text: str, path: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TypeError(
                f"{path} has a str with a lone surrogate, which no file can hold: {text!r:.40}"
            ) from None
    return text


def decode(value: Json, tensors: Mapping[str, Tensor]) -> Json:
    """Return what :func:`encode` was given, with :class:`Pending` for what is not plain data.

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
        tensor = from_safetensor(tensor) if value.get("complex") else tensor
        return _with_strides(tensor, value.get("strides"))
    if "$dtype" in value:
        return _dtype_of(value["$dtype"])
    if "$deque" in value:
        return deque(decode(value["$deque"], tensors), value["most"])
    if "$array" in value:
        return tensors[value["$array"]].numpy().astype(_numeric_dtype(value["dtype"]))
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
        kind, parts = value["$saved"], decode(value["parts"], tensors)
        if not isinstance(kind, str) or not isinstance(parts, Mapping):
            raise TypeError(
                f"an object was saved as {checks.describe(kind)} with {checks.describe(parts)}"
            )
        return Pending(kind, parts)
    return {k: decode(v, tensors) for k, v in value.items()}


def tensors_in(value: Json) -> Iterator[str]:
    """Return the names of the tensors in what :func:`encode` returned.

    Example:
        >>> list(tensors_in(encode({"a": [torch.ones(1), 2.0]}, {}, "slots")))
        ['slots.a.0']
    """
    return _values_of("$tensor", value)


def kinds_in(value: Json) -> Iterator[str]:
    """Return the names of the classes in what :func:`encode` returned."""
    return _values_of("$saved", value)


def _values_of(mark: str, value: Json) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get(mark), str):
        yield value[mark]
    inside = value.values() if isinstance(value, dict) else value
    for inner in inside if isinstance(value, dict | list) else ():
        yield from _values_of(mark, inner)


def _dtype_of(name: str) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise ValueError(f"this version of torch has no dtype torch.{name}")
    return dtype
