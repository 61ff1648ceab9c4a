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

from torch import Tensor

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.backward import Backward, Insertable, commutes_with_scaling
from fnloop._step.engine import engine_of

__all__ = ["accumulate"]


@middleware("gradient")
def accumulate(n: int | Mapping[int, int]) -> Middleware:
    """Make one update from up to n batches, weighted by their items.

    A step with it takes a sequence of up to n batches; ``fit`` groups the loader into such windows.
    The last window of an epoch may be shorter, and its batches are weighted correctly. The reported
    loss is the mean over the window's items, whatever n is.

    Order: ``pipeline(accumulate(4), clip(1.0))`` clips once per update; ``pipeline(clip(1.0),
    accumulate(4))`` clips every micro-batch, then averages. With ``clip_value(1)`` and the
    gradients 4 and -1, the first gives 1.0 (the mean, 1.5, clipped), the second 0.0 (the mean of
    1 and -1).

    Args:
        n: batches per update, at least 1; 1 changes nothing. Or a mapping from an epoch, of the
            run or of its phase, to the batches per update from then on: ``{0: 8, 4: 4}``. Before
            its first key it is 1. A bare step takes up to the largest.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: n is neither an int nor such a mapping.
        ValueError: n is below 1, or an epoch is below 0.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(accumulate(2))(toy_loss)
        >>> state, out = step(toy(), [torch.tensor([1.0]), torch.tensor([2.0])])
        >>> state.model.w.item(), state.step        # the gradient is the mean, 1.5
        (-1.5, 1)
    """
    if isinstance(n, Mapping):
        return _by_epoch(n)
    return _accumulate(n, {})


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


def _accumulate(n: int, windows: Mapping[int, int]) -> Middleware:
    """Return the middleware.

    Args:
        n: the most batches per update.
        windows: batches per update by the first epoch; empty if it is always n.
    """
    _check(n)
    if n == 1:
        return Middleware("accumulate")
    in_place = commutes_with_scaling(_in_place(n))

    def gradient(step: Step) -> Step:
        if isinstance(step, Insertable):
            return step.insert_inside(in_place)
        return _averaged(step, n)

    return Middleware("accumulate", gradient=gradient, window=n, windows=windows)


def _in_place(n: int) -> Callable[[Backward], Step]:
    """Return the wrap that lets backward add the gradients up."""

    def wrap(backward: Backward) -> Step:
        def accumulated(state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            _check_window(window, n)
            return backward.accumulate(state, window)

        return accumulated

    return wrap


def _averaged(step: Step, n: int) -> Step:
    """Return the step that averages the gradients that another one leaves."""

    def averaged(state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        _check_window(window, n)
        with engine_of(state).start_sum(state, len(window)) as total:
            for batch in window:
                state, out = step(state, batch)
                total.add(state, out)
            return state, total.finish(state)

    return averaged


def _check_window(window: object, n: int) -> None:
    if isinstance(window, Tensor | Mapping | str | bytes) or not isinstance(window, Sequence):
        raise TypeError(
            f"with accumulate({n}) a step takes a sequence of up to {n} batches; got one "
            f"{type(window).__name__}. Write step(state, [batch])"
        )
    if not 0 < len(window) <= n:
        raise ValueError(
            f"with accumulate({n}) a step takes 1 to {n} batches at once; got {len(window)}"
        )
