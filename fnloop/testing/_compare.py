"""The comparison of states."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from fnloop._backend.containers import SEQUENCES
from fnloop._core.serialize import as_flattened
from fnloop._core.state import TrainState
from fnloop._display import checks

__all__ = ["assert_equal", "assert_same"]

COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "updates", "seed", "stop")


def assert_same(a: TrainState, b: TrainState, *, rtol: float = 0.0) -> None:
    """Assert that two states are the same: counters, weights, optimizer, slots, history.

    Closing records are not compared, because they depend on where a run ended.

    Args:
        a, b: the states.
        rtol: relative tolerance for tensors and numbers; 0 to compare bit for bit.

    Raises:
        AssertionError: they differ; the message names the first difference.

    Example:
        >>> from fnloop.testing import toy
        >>> assert_same(toy(), toy())
    """
    for name, state in (("a", a), ("b", b)):
        checks.instance("assert_same", name, state, TrainState, "a TrainState")
    checks.number("assert_same", "rtol", rtol, "the relative tolerance", least=0)
    for field in COUNTERS:
        mine, other = getattr(a, field), getattr(b, field)
        assert mine == other, f"{field}: {mine!r} != {other!r}"
    phases = [[(p.name, p.step, p.epoch, p.stop, p.done) for p in s.phases] for s in (a, b)]
    assert phases[0] == phases[1], f"phases: {a.phases} != {b.phases}"
    assert_equal(a.model.state_dict(), b.model.state_dict(), "model", rtol)
    assert_equal(a.optimizer, b.optimizer, "optimizer", rtol)
    assert_equal(dict(a.slots), dict(b.slots), "slots", rtol)
    one, two = ([record for record in state.history if not record.closing] for state in (a, b))
    assert len(one) == len(two), f"history: {len(one)} records != {len(two)}"
    for i, (mine, other) in enumerate(zip(one, two, strict=True)):
        place = f"history[{i}]"
        assert (mine.epoch, mine.step) == (other.epoch, other.step), f"{place}: {mine} != {other}"
        assert_equal(dict(mine.metrics), dict(other.metrics), place, rtol)


def assert_equal(a: object, b: object, path: str, rtol: float = 0.0) -> None:
    """Assert that two nested values are equal. Functions are not compared."""
    a, b = as_flattened(a), as_flattened(b)  # tensors of subclasses often cannot be compared
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        assert list(a) == list(b), f"{path}: keys {list(a)} != {list(b)}"
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}", rtol)
    elif isinstance(a, SEQUENCES) and isinstance(b, SEQUENCES):
        assert len(a) == len(b), f"{path}: {len(a)} items != {len(b)}"
        for i, (mine, other) in enumerate(zip(a, b, strict=True)):
            assert_equal(mine, other, f"{path}[{i}]", rtol)
    elif isinstance(a, Tensor | float) and isinstance(b, Tensor | float):
        _assert_close(a, b, path, rtol)
    elif callable(state_dict := getattr(a, "state_dict", None)):  # such as a scheduler
        other = getattr(b, "state_dict", None)
        assert callable(other), f"{path}: {a!r} != {b!r}"
        assert_equal(state_dict(), other(), path, rtol)
    elif attrs.has(kind := type(a)) and kind is type(b):
        for field in attrs.fields(kind):
            if field.eq:
                mine, other = getattr(a, field.name), getattr(b, field.name)
                assert_equal(mine, other, f"{path}.{field.name}", rtol)
    elif not callable(a):
        assert a == b, f"{path}: {a!r} != {b!r}"


def _assert_close(a: Tensor | float, b: Tensor | float, path: str, rtol: float) -> None:
    try:
        torch.testing.assert_close(
            torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=rtol, equal_nan=True
        )
    except AssertionError as error:
        raise AssertionError(f"{path}: {a} != {b}\n{error}") from None
