"""Truncated backpropagation through time: one update for each window of a batch of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from torch import Tensor

from fnloop._backend.containers import map_leaves
from fnloop._backend.transfer import tensors_in
from fnloop._core.call import name_of
from fnloop._core.carry import TBPTT, mark_half_done, note_call, with_carry
from fnloop._core.metrics import to_accumulator_dtype
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.run_info import waiting_once
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, LossFn, Output, Step, Wrap
from fnloop._display import checks
from fnloop._step.carry import takes_carry
from fnloop._step.engine import engine_of
from fnloop._step.exact import check_not_exact
from fnloop._step.weighted_sum import WeightedSum

__all__ = ["tbptt"]


@middleware("step")
def tbptt(length: int, dim: int = 1) -> Middleware:
    """Train on sequences in windows: one update for each ``length`` positions of a batch.

    The loss function takes what it returned for the window before, such as the hidden state of a
    recurrent net: ``loss_fn(model, batch, carry) -> (loss, aux, carry)``. The carry holds tensors
    in tuples, lists and mappings. It is detached after each window. It is None where a pass over a
    loader begins, and crosses from each batch to the next. So consecutive batches have to continue
    the same sequences, in the same rows. It is kept in ``state.slots["tbptt"]``, and saved.

    An evaluation works in the same windows, with a carry of its own. Everything else acts once per
    window, because each is an update: clipping, schedules, counters. This holds wherever ``tbptt``
    is listed. Evaluations, records and hooks come between batches. So a run ends with the batch in
    which it reaches ``steps``, and ``every(steps=n)`` is due after each batch that passes a
    multiple of n. The number of updates of an epoch is not known beforehand: a schedule that needs
    the length of the run needs ``fit(..., steps=...)``.

    A window weighs as many items as it has positions, times its leading dimension if that is
    another one; ``aux["weight"]`` overrides it. A window without items moves the carry on too;
    one that a guard, such as ``skip_nonfinite``, or the loss scale of fp16 leaves out does not.

    Args:
        length: positions per window; the last window of a batch may be shorter.
        dim: the dimension of time: 1 for (batch, time, ...), 0 for (time, batch, ...). Tensors
            without it, and anything that is not a tensor, are given to each window whole.

    Returns:
        A middleware of the step ring and the ring "evaluation". It replaces the loss function.

    Raises:
        TypeError: an argument is not an int. At the first batch: the loss function returned
            something else.
        ValueError: the length is below 1, or ``dim`` below 0. When composing: ``accumulate`` or
            ``cuda_graph`` is listed too. At a batch: its tensors have different lengths.
        NotImplementedError: when a run starts: there are several processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> def loss_fn(model, batch, carry):           # the carry: the sum of x so far
        ...     carry = batch.sum() + (0 if carry is None else carry)
        ...     return model.w * carry, {}, carry       # the gradient is the carry
        >>> step = fl.pipeline(tbptt(2))(loss_fn)
        >>> state, out = step(toy(), torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0]]))
        >>> state.step, state.model.w.item(), state.slots["tbptt"].item()      # 2 + 4 + 5
        (3, -11.0, 5.0)

    Source: Williams and Peng, 1990, https://doi.org/10.1162/neco.1990.2.4.490
    """
    checks.integer("tbptt", "length", length, "the positions per window", wrong_type=TypeError)
    meaning = "the dimension of time"
    checks.integer("tbptt", "dim", dim, meaning, least=0, wrong_type=TypeError)

    def loss_fn(given: LossFn) -> LossFn:
        weigh = (lambda batch: _positions(batch, dim)) if dim else (lambda batch: 1)
        return takes_carry(given, name_of(given), weigh)

    return Middleware(
        TBPTT,
        step=_each_window(length, dim),
        evaluation=_evaluate_each_window(length, dim),
        init=_no_carry,
        loss_fn=loss_fn,
        check=_check,
    )


def _no_carry(state: TrainState) -> None:
    check_not_exact(state, TBPTT, "it works in one process only. Leave one of them out")
    if not engine_of(state).calls_every_batch:
        raise NotImplementedError(
            "tbptt works in one process only: several would share the batches of a loader, and "
            "each would carry on from a batch that its next one does not continue"
        )


def _check(listed: Sequence[Middleware]) -> None:
    for member in listed:
        if member.window > 1:
            raise ValueError(
                f"{member!r} makes one update from several batches, and tbptt several updates from "
                "one batch. Leave one out; for a larger update, use larger batches or a larger "
                "length"
            )
        if member.name == "cuda_graph":
            raise ValueError(
                f"{member!r} replays an update with the tensors that it was captured with, but "
                "tbptt gives each update a new carry. Leave one out"
            )


def _each_window(length: int, dim: int) -> Wrap:
    def wrap(step: Step) -> Step:
        def each_window(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            given, windows = state, _windows(batch, length, dim)
            if not state.batch:  # a pass begins
                state = with_carry(state, None)
            if len(windows) == 1:
                state, out = step(state, batch)
                return note_call(state, given.step), out
            try:
                state, out = _fold(step, state, windows)
            except BaseException:
                mark_half_done(given)
                raise
            return note_call(state, given.step), out

        return each_window

    return wrap


def _evaluate_each_window(length: int, dim: int) -> Wrap:
    def wrap(step: Step) -> Step:
        def each_window(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            windows = _windows(batch, length, dim)
            return step(state, batch) if len(windows) == 1 else _fold(step, state, windows)

        return each_window

    return wrap


def _fold(step: Step, state: TrainState, windows: Sequence[Batch]) -> tuple[TrainState, Output]:
    """Call a step with each window. Return the last state, and the output of all windows."""
    __tracebackhide__ = True
    total = WeightedSum()
    for window in waiting_once(state.run, windows):
        state, out = step(state, window)
        total.add(_widened(out))
    return state, total.output()


def _widened(out: Output) -> Output:
    """Return an output whose loss can be added up without rounding."""
    return attrs.evolve(out, loss=to_accumulator_dtype(out.loss))


# --- windows


def _positions(batch: Batch, dim: int) -> int:
    """Return the length of the sequences of a batch.

    Raises:
        ValueError: there is not one, or it is 0.
    """
    lengths = {t.size(dim) for t in tensors_in(batch) if t.ndim > dim}
    if len(lengths) > 1:
        raise ValueError(
            f"tbptt cuts all tensors of a batch along dim={dim}, but there they have the lengths "
            f"{sorted(lengths)}. To give a tensor x to each window whole, put x.unbind({dim}) into "
            "the batch"
        )
    if not lengths or lengths == {0}:
        found = "is empty" if lengths else "has no tensor with that dimension"
        raise ValueError(f"tbptt cuts the tensors of a batch along dim={dim}, but it {found}")
    return lengths.pop()


def _windows(batch: Batch, length: int, dim: int) -> list[Batch]:
    """Return the windows of a batch, which share its memory; the last one may be shorter."""
    positions = _positions(batch, dim)
    return [
        map_leaves(batch, _cut(dim, start, min(length, positions - start)))
        for start in range(0, positions, length)
    ]


def _cut(dim: int, start: int, length: int) -> Callable[[object], object]:
    def cut(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.ndim > dim:
            return leaf.narrow(dim, start, length)
        return leaf

    return cut
