"""Gradient accumulation: n batches of b make the same update as one batch of n·b.

Each micro-batch counts by its weight, the number of items that its loss is the mean of. So the
gradient is that of the mean over all items of the window, also with a ragged last window and
unequal token counts. There are two paths:

* If only steps that commute with scaling stand between it and backward, gradients add up in
  ``.grad``, as autograd does.
* If another gradient middleware is inside (``pipeline(clip(1.0), accumulate(4))``), each
  micro-batch's gradient is taken out after that middleware, and the weighted mean is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
from torch import Tensor

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.backward import Backward, Commuting, Insertable
from fnloop._step.engine import engine_of
from fnloop._step.host import in_parts

__all__ = ["accumulate"]


@middleware("gradient")
def accumulate(n: int | Mapping[int, int] | None = None, *, total: int | None = None) -> Middleware:
    """Make one update from up to n batches, or from ``total`` samples, weighted by their items.

    A step with it takes a sequence of up to n batches; ``fit`` groups the loader into such windows.
    The last window of an epoch may be shorter, and its batches are weighted correctly. The reported
    loss is the mean over the window's items, whatever n is.

    Order: ``pipeline(accumulate(4), clip(1.0))`` clips once per update; ``pipeline(clip(1.0),
    accumulate(4))`` clips every micro-batch, then averages. With ``clip_value(1)`` and the
    gradients 4 and -1, the first gives 1.0 (the mean, 1.5, clipped), the second 0.0 (the mean of
    1 and -1).

    With ``total=64``, an update has 64 samples in all processes together, whatever their number: 4
    batches of 16 in one process, 2 on each of two, and on three processes 2, 1 and 1. The updates,
    schedules and records of a run do not depend on the number of processes then, so it may change
    from one checkpoint to the next. The last update of an epoch has the samples that are left; an
    incomplete batch counts as a complete one. The batch size is that of the training loader, a
    ``DataLoader``, or that of the largest batch of a list. With ``drop_last``, only an incomplete
    batch is left out. A bare step takes the batches that it is given, and does not count samples.

    Args:
        n: batches per update in each process, at least 1; 1 changes nothing. Or a mapping from an
            epoch, of the run or of its phase, to the batches per update from then on: ``{0: 8, 4:
            4}``. Before its first key it is 1. A bare step takes up to the largest.
        total: samples per update in all processes together, a multiple of the batch size; in the
            place of n.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: n is neither an int nor such a mapping; or both n and total are given, or none.
        ValueError: n or total is below 1, or an epoch is below 0. When a run begins: the batch size
            of its loader is not known, or total is not a multiple of it.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(accumulate(2))(toy_loss)
        >>> state, out = step(toy(), [torch.tensor([1.0]), torch.tensor([2.0])])
        >>> state.model.w.item(), state.step        # the gradient is the mean, 1.5
        (-1.5, 1)
        >>> step = fl.pipeline(accumulate(total=4))(toy_loss)
        >>> batches = [torch.tensor([1.0, 3.0])] * 6
        >>> fl.fit(step, toy(), batches, epochs=1, hooks=()).step        # of 2 batches each
        3
    """
    if total is not None:
        if n is not None:
            raise TypeError(
                f"accumulate takes n, the batches per update in each process, or total=, the "
                f"samples per update in all processes; got both. Write accumulate(total={total})"
            )
        return _of_samples(total)
    if n is None:
        raise TypeError(
            "accumulate expects n as an int >= 1, the batches per update in each process, or "
            "total=, the samples per update in all processes; got neither. Write accumulate(4) or "
            "accumulate(total=64)"
        )
    if isinstance(n, Mapping):
        return _by_epoch(n)
    return _accumulate(n, {})


def _of_samples(total: int) -> Middleware:
    meaning = "the samples per update in all processes together"
    checks.integer("accumulate", "total", total, meaning, wrong_type=TypeError)
    made = _accumulate(total, {}, f"total={total}")  # each batch has at least one sample
    return attrs.evolve(made, total=total)


def _by_epoch(windows: Mapping[int, int]) -> Middleware:
    if not windows:
        raise ValueError("accumulate expects at least one epoch, such as {0: 8, 4: 4}; got none")
    for epoch in windows:
        checks.integer(
            "accumulate", "an epoch of n", epoch, "such as 4 in {0: 8, 4: 4}", least=0,
            wrong_type=TypeError,
        )  # fmt: skip
        _check(windows[epoch])
    return _accumulate(max(windows.values()), dict(sorted(windows.items())))


def _check(n: object) -> None:
    meaning = "the batches per update (1 changes nothing)"
    checks.integer("accumulate", "n", n, meaning, wrong_type=TypeError)


def _accumulate(n: int, windows: Mapping[int, int], typed: str | None = None) -> Middleware:
    """Return the middleware.

    Args:
        n: the most batches per update.
        windows: batches per update by the first epoch; empty if it is always n.
        typed: the argument as messages show it; by default n.
    """
    _check(n)
    if n == 1:
        return Middleware("accumulate")
    call = f"accumulate({typed or n})"
    in_place = Commuting(_in_place(n, call))

    def gradient(step: Step) -> Step:
        if isinstance(step, Insertable):
            return step.insert_inside(in_place)
        return _averaged(step, n, call)

    return Middleware("accumulate", gradient=gradient, window=n, windows=windows)


def _in_place(n: int, call: str) -> Callable[[Backward], Step]:
    """Return the wrap that lets backward add the gradients up."""

    def wrap(backward: Backward) -> Step:
        def accumulated(state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            _check_window(window, n, call)
            return backward.accumulate(state, window)

        return accumulated

    return wrap


def _averaged(step: Step, n: int, call: str) -> Step:
    """Return the step that averages the gradients that another one leaves."""

    def averaged(state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        _check_window(window, n, call)
        with engine_of(state).start_sum(state, len(window)) as total, in_parts():
            for batch in window:
                state, out = step(state, batch)
                total.add(state, out)
            return state, total.finish(state)

    return averaged


def _check_window(window: object, n: int, call: str) -> None:
    if isinstance(window, Tensor | Mapping | str | bytes) or not isinstance(window, Sequence):
        raise TypeError(
            f"with {call} a step takes a sequence of up to {n} batches; got one "
            f"{type(window).__name__}. Write step(state, [batch])"
        )
    if not 0 < len(window) <= n:
        raise ValueError(f"with {call} a step takes 1 to {n} batches at once; got {len(window)}")
