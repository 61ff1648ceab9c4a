"""Collate functions: sequences of different lengths padded, or packed into one row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fnloop.extend import Batch, checks, containers

Padding = float | Mapping[str, float] | Mapping[int, float]


def pad_collate(
    padding: Padding = 0, leave: Sequence[object] = ()
) -> Callable[[list[object]], Batch]:
    """Return a ``collate_fn`` that pads sequences to the longest of their batch.

    A sample is a mapping, a tuple, or one sequence. Sequences are lists of numbers, arrays and
    tensors; each dimension is padded at its end. Anything else is collated as torch does.

    Args:
        padding: the value that is put there; or one for each field whose lengths differ, by the key
            of the mapping or the position in the tuple: ``{"tokens": 0, "labels": -100}``.
        leave: fields that are left as lists, by the key or the position too: texts, or boxes.

    Returns:
        A function for ``DataLoader(dataset, batch_size, collate_fn=...)``. A batch is what a sample
        is: a dict, a tuple or a tensor, with one more dimension in front.

    Raises:
        TypeError: ``padding`` is neither a number nor a mapping of numbers, or ``leave`` is not a
            list or a tuple.
        ValueError: ``padding`` is an empty mapping. At a batch: a sample lacks a field.

    Example:
        >>> collate = pad_collate({"tokens": 0, "labels": -100})
        >>> batch = collate([{"tokens": [1, 2], "labels": [1, 2]}, {"tokens": [3], "labels": [3]}])
        >>> batch["tokens"].tolist(), batch["labels"].tolist()
        ([[1, 2], [3, 0]], [[1, 2], [3, -100]])

    Replaces: transformers.DataCollatorWithPadding, fastnlp.Collator
    """
    if isinstance(padding, Mapping):
        if not padding:
            raise ValueError(
                "pad_collate expects padding as a number, or as a mapping by key; got an empty one"
            )
        checked: float | dict[object, float] = {
            key: _number(f"padding[{key!r}]", value) for key, value in padding.items()
        }
    else:
        checked = _number("padding", padding)
    return _PadCollate(checked, _fields("pad_collate", "leave", leave))


def _fields(owner: str, name: str, given: object) -> tuple[object, ...]:
    if not checks.is_list(given):
        raise TypeError(
            f'{owner} expects {name} as a list of fields, such as ["text"]; '
            f"got {checks.describe(given)}"
        )
    return tuple(given)


def _number(name: str, value: float) -> float:
    value = checks.plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"pad_collate expects {name} as a number, or padding as a mapping of numbers by key; "
            f"got {checks.describe(value)}"
        )
    return value


@attrs.frozen(repr=False)
class _PadCollate:
    padding: float | dict[object, float]
    leave: tuple[object, ...] = ()

    def __call__(self, samples: list[object]) -> Batch:
        first = samples[0]
        if isinstance(first, Mapping):
            self._check_keys([*first])
            columns = {key: self._column(key, samples) for key in first}
            return {key: self._collate(key, column) for key, column in columns.items()}
        if isinstance(first, tuple):
            self._check_keys(range(len(first)))
            columns = self._columns(samples, len(first))
            parts = [self._collate(i, list(column)) for i, column in enumerate(columns)]
            return containers.with_parts(first, parts)
        by = "padding" if isinstance(self.padding, dict) else "fields" if self.leave else None
        if by is not None:
            raise TypeError(
                f"{self!r} has {by} by key, but a sample is a {type(first).__name__}, and not a "
                "mapping or a tuple: give one number"
            )
        return self._collate(None, samples)

    def _check_keys(self, keys: Sequence[object]) -> None:
        """Raise if a key of ``padding`` or ``leave`` is not one of the samples'."""
        padded = self.padding if isinstance(self.padding, dict) else ()
        if unknown := {*padded, *self.leave} - {*keys}:
            raise ValueError(
                f"{self!r}: a sample has {checks.describe(list(keys))}, and not "
                f"{', '.join(map(repr, sorted(unknown, key=repr)))}"
            )

    def _column(self, key: object, samples: list[object]) -> list[object]:
        found = [s[key] for s in samples if isinstance(s, Mapping) and key in s]
        if len(found) < len(samples):
            raise ValueError(f"{self!r}: not every sample of the batch has {key!r}")
        return found

    def _columns(self, samples: list[object], n: int) -> Sequence[Sequence[object]]:
        rows = [s for s in samples if isinstance(s, tuple) and len(s) == n]
        if len(rows) < len(samples):
            raise ValueError(f"{self!r}: not every sample of the batch is a tuple of {n}")
        return list(zip(*rows, strict=True))

    def _collate(self, key: object, values: list[object]) -> Batch:
        if key in self.leave:
            return values
        if not all(map(_is_sequence, values)):
            return default_collate(values)
        tensors = _tensors(self, key, values)
        if len({tensor.shape for tensor in tensors}) == 1:
            return torch.stack(tensors)
        if len(dimensions := {tensor.ndim for tensor in tensors}) > 1:
            raise ValueError(
                f"{self!r} expects {_name(key)} with the same number of dimensions in each sample; "
                f"got {sorted(dimensions)}"
            )
        shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        value = self._value(key, tensors[0].dtype)
        padded = tensors[0].new_full((len(tensors), *shape), value)
        for row, tensor in zip(padded, tensors, strict=True):
            row[tuple(slice(size) for size in tensor.shape)] = tensor
        return padded

    def _value(self, key: object, dtype: torch.dtype) -> float:
        """Return the padding of a field, if a tensor of its dtype can hold it."""
        value = self.padding.get(key) if isinstance(self.padding, dict) else self.padding
        if value is None:
            raise ValueError(
                f"{self!r}: the lengths of {_name(key)} differ, and its padding is not given: add "
                f"{key!r}: 0"
            )
        if not (dtype.is_floating_point or dtype.is_complex or _holds(dtype, value)):
            raise ValueError(f"{self!r}: {_name(key)} is {dtype}, which cannot hold {value}")
        return value

    def __repr__(self) -> str:
        given = [str(self.padding)] if self.padding else []
        given += [f"leave={self.leave}"] if self.leave else []
        return f"pad_collate({', '.join(given)})"


# --------------------------------------------------------------------------------------------------
# Packing: sequences of different lengths as one row, without padding.


def pack_collate(keys: Sequence[str] | None = None) -> Callable[[list[object]], Batch]:
    """Return a ``collate_fn`` that makes one row of all sequences of a batch, without padding.

    A sample is a mapping of sequences of equal length, or one sequence, which gets the name
    "input_ids". Sequences are lists of numbers, and arrays and tensors of one dimension. In the
    batch each is a tensor of shape (1, n), where n is the sum of the lengths. Two more tensors of
    that shape come with them: "position_ids", the place in a document, from 0 on, and
    "document_ids", the number of the document. Attention has to stay within a document: mask where
    ``document_ids[:, :, None] != document_ids[:, None, :]``. For rows of about equal length use it
    with ``bucketed(lengths, max_items=4096)``.

    Args:
        keys: the fields that are packed; anything else is collated as torch does, with one row for
            each document. None: all of them.

    Returns:
        A function for ``DataLoader(dataset, batch_sampler=bucketed(...), collate_fn=...)``. A batch
        is a dict.

    Raises:
        TypeError: ``keys`` is not a list of strings. At a batch: a field is not a sequence of
            numbers.
        ValueError: ``keys`` is empty. At a batch: a sample lacks a field, its fields have different
            lengths, or it has a field "position_ids" or "document_ids".

    Example:
        >>> batch = pack_collate()([[5, 6, 7], [8, 9]])
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]])
        >>> batch["document_ids"].tolist()
        [[0, 0, 0, 1, 1]]

    Replaces: transformers.DataCollatorWithFlattening
    """
    if keys is None:
        return _PackCollate(None)
    found = _fields("pack_collate", "keys", keys)
    for key in found:
        checks.text("pack_collate", "keys", cast(str, key), "names of fields")
    if not found:
        raise ValueError("pack_collate expects keys as names of fields, or None; got none")
    return _PackCollate(cast("tuple[str, ...]", found))


_POSITIONS, _DOCUMENTS = "position_ids", "document_ids"


@attrs.frozen(repr=False)
class _PackCollate:
    keys: tuple[str, ...] | None

    def __call__(self, samples: list[object]) -> Batch:
        rows = [s if isinstance(s, Mapping) else {"input_ids": s} for s in samples]
        packed = tuple(rows[0]) if self.keys is None else self.keys
        for name in (*packed, *rows[0]):
            if not all(name in row for row in rows):
                raise ValueError(f"{self!r}: not every sample of the batch has {name!r}")
            if name in (_POSITIONS, _DOCUMENTS):
                raise ValueError(f"{self!r} makes {name!r}, which the samples have already")
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        tensors = {name: self._sequences(name, columns[name]) for name in packed}
        lengths = [
            {len(sequence) for sequence in sample} for sample in zip(*tensors.values(), strict=True)
        ]
        if unequal := next((found for found in lengths if len(found) > 1), None):
            raise ValueError(
                f"{self!r}: {', '.join(map(repr, packed))} of a sample have the lengths "
                f"{sorted(unequal)}: name those that are as long as the tokens, keys=[...]"
            )
        batch = {
            name: torch.cat(tensors[name])[None] if name in tensors else default_collate(column)
            for name, column in columns.items()
        }
        each = torch.tensor([found.pop() for found in lengths])
        documents = torch.arange(len(each)).repeat_interleave(each)
        begins = (each.cumsum(0) - each).repeat_interleave(each)
        positions = torch.arange(len(documents)) - begins
        return batch | {_POSITIONS: positions[None], _DOCUMENTS: documents[None]}

    def _sequences(self, name: str, values: list[object]) -> list[Tensor]:
        found = _tensors(self, name, values) if all(map(_is_sequence, values)) else []
        if not found or any(sequence.ndim != 1 for sequence in found):
            raise TypeError(
                f"{self!r} expects {_name(name)} as sequences of numbers, of one dimension; got "
                f"{checks.describe(values[0])}: name the fields to pack, keys=[...]"
            )
        return found

    def __repr__(self) -> str:
        return "pack_collate()" if self.keys is None else f"pack_collate({[*self.keys]})"


# --- sequences


def _tensors(owner: object, key: object, values: list[object]) -> list[Tensor]:
    """Return sequences as tensors of one dtype. That of an empty list is that of the others."""
    try:
        tensors = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{owner!r} expects {_name(key)} as lists of numbers, arrays or tensors: {error}"
        ) from error
    given = [t.dtype for t, v in zip(tensors, values, strict=True) if _has_dtype(v)]
    dtype = functools.reduce(torch.promote_types, given or [tensors[0].dtype])
    return [tensor.to(dtype) for tensor in tensors]


def _is_sequence(value: object) -> bool:
    return (isinstance(value, Tensor | np.ndarray) and value.ndim > 0) or isinstance(
        value, list | tuple
    )


def _has_dtype(sequence: object) -> bool:
    """Return whether a sequence says what its numbers are: an empty list does not."""
    return not isinstance(sequence, list | tuple) or bool(sequence)


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Return whether an integer dtype can hold a value."""
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and value == int(value)


def _name(key: object) -> str:
    return "samples" if key is None else f"field {key!r}"
