"""What a loss function returns for a batch that is to be left out."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType

import attrs
from torch import nn

from fnloop._display import checks

__all__ = ["BY_ANOTHER", "Skip", "may_skip", "skip"]

BY_ANOTHER = "left out by another process"  # why an update is skipped that another process skips


@attrs.frozen
class Skip:
    """The reply of a loss function that leaves its batch out.

    Args:
        reason: why.
    """

    reason: str


def skip(reason: str) -> Skip:
    """Leave a batch out: a loss function returns this instead of a loss.

    The batch is out of the window of ``accumulate`` and of its divisor, and its metrics do not
    count. If every batch of an update is left out, on all processes, there is no update:
    ``state.skipped`` counts it, and ``state.step``, schedules, averages and the buffers of the
    model stay. In an evaluation the batch is left out too. A warning is logged the first time that
    a reason is given.

    With several processes each decides by itself. But a loss function that exchanges something
    with the others, as ``SyncBatchNorm`` does, has to decide alike in all of them; under
    ``fully_shard`` any forward does so, and this is refused. There, return a weight of 0:
    ``return loss, {"weight": 0}``.

    Args:
        reason: why, in a few words, the same for all batches that are left out for it.

    Returns:
        What the loss function returns, alone.

    Raises:
        TypeError: the reason is not a str.
        ValueError: it is empty.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def loss_fn(model, batch):
        ...     return skip("too long") if len(batch) > 2 else toy_loss(model, batch)
        >>> step = fl.pipeline(fl.accumulate(2))(loss_fn)
        >>> state, out = step(toy(), [torch.ones(3), torch.tensor([4.0])])
        >>> state.model.w.item()                    # the gradient of the other batch alone
        -4.0
        >>> state, out = step(state, [torch.ones(3)])
        >>> out.skip, state.step, state.skipped
        ('too long', 1, 1)
    """
    return Skip(checks.text("skip", "reason", reason, "why the batch is left out"))


def may_skip(loss_fn: object) -> bool:
    """Return whether a loss function may call :func:`skip`, by the names in its code.

    The code of functions that it refers to is looked at too. What is known by this is whether
    buffers have to be copied before each update, so that they can be put back: other loss functions
    do not pay for that.
    """
    seen: set[int] = set()
    waiting = [loss_fn]
    while waiting:
        value = waiting.pop()
        if value is skip or isinstance(value, Skip):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting += [value.__func__, type(value.__self__)]
        elif isinstance(value, type):
            waiting += [] if _is_of_library(value) else vars(value).values()
        elif isinstance(value, FunctionType):
            value = inspect.unwrap(value)
            if _is_of_library(value):
                continue
            names = {*_names_in(value.__code__)}
            if "skip" in names:
                return True
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a name that has no value yet
                    waiting.append(cell.cell_contents)
            waiting += [value.__globals__[name] for name in names if name in value.__globals__]
        elif callable(value) and not isinstance(value, nn.Module):
            waiting.append(type(value))
    return False


def _is_of_library(value: type | FunctionType) -> bool:
    return (value.__module__ or "").partition(".")[0] in ("builtins", "fnloop", "numpy", "torch")


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code, and code inside of it, refers to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
