"""Updates of many batches, of one batch in pieces, and of windows of a sequence."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.metrics import Sum
from fnloop._core.state import TrainState
from fnloop._core.types import Aux, LossFn, Middleware, Output, Skip, Step, middleware
from fnloop.extend import (
    Backward,
    Batch,
    Metrics,
    Ownership,
    WeightedSum,
    Wrap,
    checks,
    containers,
    engine_of,
    host,
    is_sharded,
    name_of,
    refuse,
    set_aside,
    with_slot,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Gradient accumulation: n batches of b make the same update as one batch of n·b.
#
# Each micro-batch counts by its weight, the number of items that its loss is the mean of. So the
# gradient is that of the mean over all items of the window, also with a ragged last window and
# unequal token counts. There are two paths:
#
# * If all that is listed before it commutes, it comes next to backward, and gradients add up in
#   `.grad`, as autograd does.
# * If another gradient middleware is inside (`pipeline(clip(1.0), accumulate(4))`), each micro-
#   batch's gradient is taken out after that middleware, and the weighted mean is put back.


@middleware("gradient")
def accumulate(
    n: int | Mapping[int, int] | None = None,
    *,
    total: int | None = None,
    by: str = "epoch",
    dtype: torch.dtype | None = None,
) -> Middleware:
    """Make one update from up to n batches, or from ``total`` samples, weighted by their items.

    A step with it takes a sequence of up to n batches; ``fit`` groups the loader into such windows.
    The last window of an epoch may be shorter, and its batches are weighted correctly. The reported
    loss is the mean over the window's items, whatever n is.

    Order: ``pipeline(accumulate(4), clip(1.0))`` clips once per update; ``pipeline(clip(1.0),
    accumulate(4))`` clips every micro-batch, then averages. With ``clip_value(1)`` and the
    gradients 4 and -1, the first gives 1.0 (the mean, 1.5, clipped), the second 0.0 (the mean of
    1 and -1).

    Args:
        n: batches per update in each process, at least 1; 1 changes nothing. Or a mapping from an
            epoch, of the run or of its phase, to the batches per update from then on: ``{0: 8, 4:
            4}``. Before its first key it is 1. A bare step takes up to the largest.
        total: samples per update in all processes together, a multiple of the batch size.
            Give it instead of n.
        by: what the keys of a mapping count: "epoch", or "step": with ``{0: 4, 1000: 16}`` each
            update has 4 batches, and 16 after 1,000 updates of the run or its phase. Updates that
            were skipped count too.
        dtype: the dtype in which gradients are added up, such as ``torch.float32`` for weights in
            bfloat16: the mean is rounded once. None: their own dtype.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: n is neither an int nor such a mapping; or both n and total are given, or none;
            or dtype is not a dtype.
        ValueError: n or total is below 1, or a key is below 0; by is not known, or n is not a
            mapping; dtype is not of floating point. When a run begins: the batch size of its loader
            is not known, or total is not a multiple of it.
        NotImplementedError: with a dtype, the state was made with ``exact=True``.

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

    Notes:
        With ``total=64``, an update has 64 samples in all processes together, whatever their
        number: 4 batches of 16 in one process, 2 on each of two, and on three processes 2, 1 and 1.
        The updates, schedules and records of a run do not depend on the number of processes then,
        so it may change from one checkpoint to the next. The last update of an epoch has the
        samples that are left; an incomplete batch counts as a complete one. The batch size is that
        of the training loader, a ``DataLoader``, or that of the largest batch of a list. With
        ``drop_last``, only an incomplete batch is skipped. A bare step takes the batches that it
        is given, and does not count samples.

        With a dtype, each batch's gradient is taken out of ``.grad``. So there is one more copy of
        the gradients, in that dtype, and several processes exchange those of every batch.

    Replaces: lightning.GradientAccumulationScheduler
    """
    if total is not None:
        if n is not None:
            raise TypeError(
                f"accumulate takes n, the batches per update in each process, or total=, the "
                f"samples per update in all processes; got both. Write accumulate(total={total})"
            )
        return _of_samples(total, dtype)
    if n is None:
        raise TypeError(
            "accumulate expects n as an int >= 1, the batches per update in each process, or "
            "total=, the samples per update in all processes; got neither. Write accumulate(4) or "
            "accumulate(total=64)"
        )
    if isinstance(n, Mapping):
        return _varying(n, by, dtype)
    if by != "epoch":
        raise ValueError(
            f"accumulate: by= says what the keys of a mapping count, such as {{0: 4, 1000: 16}}; "
            f"n is {n!r}, so leave by={by!r} out"
        )
    return _accumulate(n, dtype)


def _of_samples(total: int, dtype: torch.dtype | None) -> Middleware:
    meaning = "the samples per update in all processes together"
    checks.integer("accumulate", "total", total, meaning, wrong_type=TypeError)
    made = _accumulate(total, dtype, f"total={total}")  # each batch has at least one sample
    return attrs.evolve(made, total=total)


def _varying(windows: Mapping[int, int], by: str, dtype: torch.dtype | None) -> Middleware:
    checks.choice("accumulate", "by", by, ("epoch", "step"))
    if not windows:
        raise ValueError(f"accumulate expects at least one {by}, such as {{0: 8, 4: 4}}; got none")
    key = "an epoch of n" if by == "epoch" else "an update of n"
    for first in windows:
        checks.integer(
            "accumulate", key, first, "such as 4 in {0: 8, 4: 4}",
            least=0, wrong_type=TypeError,
        )  # fmt: skip
        _check_accumulate(windows[first])
    made = _accumulate(max(windows.values()), dtype)
    return made if made.window == 1 else attrs.evolve(made, windows={**windows}, windows_by=by)


def _check_accumulate(n: object) -> None:
    meaning = "the batches per update (1 changes nothing)"
    checks.integer("accumulate", "n", n, meaning, wrong_type=TypeError)


def _accumulate(n: int, dtype: torch.dtype | None, typed: str | None = None) -> Middleware:
    """Return the middleware.

    Args:
        n: the most batches per update.
        dtype: in which gradients are added up.
        typed: the argument as messages show it; by default n.
    """
    _check_accumulate(n)
    if dtype is not None:
        checks.instance("accumulate", "dtype", dtype, torch.dtype, "such as torch.float32, or None")
        if not dtype.is_floating_point:
            raise ValueError(f"accumulate adds gradients up in a floating dtype; got {dtype}")
    if n == 1:
        return Middleware("accumulate")
    call = f"accumulate({typed or n})"

    def gradient(step: Step) -> Step:
        if isinstance(step, Backward) and dtype is None:
            return _in_place(step, n, call)
        return _averaged(step, n, call, dtype)

    traits = ("stacks", *["sums"] * (dtype is None))
    return Middleware("accumulate", gradient=gradient, window=n, adds=(), traits=traits)


def _in_place(backward: Backward, n: int, call: str) -> Step:
    """Return the step that lets backward add the gradients up."""

    def accumulated(state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        _check_window(window, n, call)
        return backward.over(state, window)

    return accumulated


def _averaged(step: Step, n: int, call: str, dtype: torch.dtype | None) -> Step:
    """Return the step that averages the gradients that another one leaves."""

    def averaged(state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        _check_window(window, n, call)
        put_back, total = set_aside(state), engine_of(state).start_sum(state, len(window), dtype)
        with total as sums, host().replaced(in_part=True):
            for batch in window:
                state, out = step(state, batch)
                sums.add(state, out)
            out = sums.finish(state)
        put_back()
        return state, out

    return averaged


def _check_window(window: object, n: int, call: str) -> None:
    if isinstance(window, Tensor | Mapping | str | bytes) or not isinstance(window, Sequence):
        raise TypeError(
            f"with {call} a step takes a sequence of up to {n} batches; got one "
            f"{type(window).__name__}. Write step(state, [batch])"
        )
    if not 0 < len(window) <= n:
        raise ValueError(f"with {call} a step takes 1 to {n} batches at once; got {len(window)}")


# --------------------------------------------------------------------------------------------------
# Make an update of a batch in pieces, which take less memory than all of it at once.


@middleware("gradient")
def microbatch(size: int) -> Middleware:
    """Make one update from each batch, in pieces of ``size`` samples that fit into memory.

    The loss, the gradient and the length of the run are those of whole batches, up to rounding:
    each piece counts by its weight, the number of items that its loss is the mean of. Only the
    memory of ``size`` samples is needed at a time. It acts directly around backward, wherever it is
    listed: ``pipeline(clip(1.0), microbatch(8))`` clips once per update. With ``accumulate(n)``
    each batch of a window comes in pieces.

    Args:
        size: the most samples in a piece, at least 1. On several processes, in each of them.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: size is not an int.
        ValueError: size is below 1. When composing: ``tbptt`` or ``closure(create_graph=True)`` is
            listed too. At a batch: its tensors have different lengths, or it has none.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(microbatch(2))(toy_loss)
        >>> state, out = step(toy(), torch.tensor([1.0, 2.0, 6.0]))     # in pieces of 2 and 1
        >>> state.model.w.item(), state.step        # the gradient is the mean, 3
        (-3.0, 1)

    Notes:
        All tensors in nested tuples, lists and mappings are cut along their first dimension,
        without a copy. So are arrays, and lists of plain values, that have one entry for each
        sample. Anything else is given to each piece whole.

        What sees more than one sample differs: BatchNorm normalizes each piece by itself, and
        updates its running statistics with each. Random draws such as those of dropout are others.
        The loss function, ``metric`` and ``Output.aux`` see a piece; metrics are combined. An
        evaluation needs less memory, because it keeps no graph: it takes whole batches.

    Source: the device_train_microbatch_size of Composer,
    https://docs.mosaicml.com/projects/composer
    """
    checks.integer("microbatch", "size", size, "the most samples in a piece", wrong_type=TypeError)

    def gradient(step: Step) -> Step:
        assert isinstance(step, Backward)  # it comes first in the gradient ring
        return InPieces(**{**vars(step), "size": size})

    return Middleware(
        "microbatch",
        gradient=gradient,
        check=_check_pieces,
        adds=(),
        order={"gradient": -3},  # it is about backward alone: first
        traits=("commutes",),
    )


@middleware("gradient")
def retry_on_oom() -> Middleware:
    """Repeat forward and backward in pieces half as large when there is no memory left.

    Pieces are those of ``microbatch``, and so is what differs. The update begins again, with the
    same random draws and buffers, in all processes at once. The size that fits is kept in
    ``state.slots["retry_on_oom"]`` (0: whole batches) and saved: later updates, and a resumed run,
    begin with it. From there on, the run equals one with ``microbatch(size)``. With
    ``microbatch(size)`` listed too, the first attempt is in those pieces.

    Returns:
        A middleware of the gradient ring.

    Raises:
        ValueError: when composing: ``cuda_graph``, ``tbptt`` or ``closure(create_graph=True)`` is
            listed too.
        NotImplementedError: when a run starts on several processes: the model is sharded or has a
            SyncBatchNorm, whose forward cannot be repeated in one process alone.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def greedy(model, batch):
        ...     if len(batch) > 2:
        ...         raise torch.OutOfMemoryError("out of memory")
        ...     return toy_loss(model, batch)
        >>> step = fl.pipeline(retry_on_oom())(greedy)
        >>> state, out = step(toy(), torch.tensor([1.0, 2.0, 6.0]))
        >>> state.model.w.item(), state.slots["retry_on_oom"]
        (-3.0, 2)

    Notes:
        Whatever else forward and backward have changed, such as a list in a closure, is not undone,
        unless a middleware keeps it (``Middleware(keep=...)``).
        The optimizer's step and evaluations are not repeated. On several processes, gradients are
        averaged after backward instead of during it, because a process that runs out of memory
        half-way must not leave the others waiting. Buffers are copied before each update.

    Source: the device_train_microbatch_size="auto" of Composer,
    https://docs.mosaicml.com/projects/composer

    Replaces: accelerate.find_executable_batch_size, transformers.auto_find_batch_size
    """

    def gradient(step: Step) -> Step:
        assert isinstance(step, Backward)  # they come first in the gradient ring
        return Retrying(**vars(step))

    return Middleware(
        "retry_on_oom",
        gradient=gradient,
        init=_whole_batches,
        check=_check_pieces,
        adds=(),
        order={"gradient": -2},  # after the pieces that it repeats
        traits=("commutes", "repeats"),
    )


RETRY = "retry_on_oom"  # the name of the middleware, and of its slot
_ONE_SAMPLE = "retry_on_oom: a single sample does not fit into the memory that is left"


class InPieces(Backward):
    """Backward that takes each batch in pieces. It is a layer of its own, which messages name."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return self.over(state, (batch,), alone=True)


class Retrying(InPieces):
    """Backward that begins a window again, with pieces half as large, if it runs out of memory.

    The size of the pieces is in a slot; 0 means whole batches. It is the same in all processes. The
    largest one is the size that it is made with.
    """

    def over(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        size: int | None = None,
        *,
        alone: bool = False,
        guarded: bool = True,
    ) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        size = state.slots[RETRY] or size or self.size
        put_back, begin_again = set_aside(state), host().mark(state)
        while True:
            try:
                new, out = super().over(state, batches, size, alone=alone, guarded=guarded)
                break
            except Exception as error:
                if not containers.is_out_of_memory(error):
                    raise
                size = _smaller(state, batches, size, error)
            _free(state.backend.device)  # what the error held is free now
            begin_again()
            state = with_slot(state, RETRY, size)
        put_back()
        return new, out


def _smaller(state: TrainState, window: Sequence[Batch], size: int | None, error: Exception) -> int:
    """Return half the size of the largest piece in any process.

    Raises:
        Exception: the one given, with a note why pieces cannot be smaller.
    """
    __tracebackhide__ = True
    note = _ONE_SAMPLE
    try:
        samples = max(map(containers.samples_in, window))
    except ValueError as cannot:
        samples, note = 0, f"retry_on_oom cannot repeat this with smaller pieces: {cannot}"
    engine = engine_of(state)
    stuck = engine.largest(samples == 0)
    largest = engine.largest(min(samples, size or samples))
    if stuck or largest <= 1:
        error.add_note(note)
        raise error
    half = (largest + 1) // 2
    if state.backend.main:
        log.warning(
            "no memory left for %d samples at once: this update is repeated in pieces of %d, and "
            "later ones begin with them. To begin a run so, list microbatch(%d)",
            *(largest, half, half),
        )
    return half


def _free(device: torch.device) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(AttributeError, NotImplementedError):
            torch.get_device_module(device).empty_cache()


def _whole_batches(state: TrainState) -> int:
    why = "the size of pieces changes the last bits, and it follows the memory"
    refuse(state, "retry_on_oom", exact=f"{why}. List microbatch(size) instead")
    exchanging = (
        is_sharded(state.model)
        or state.backend.parts > 1
        or any(isinstance(module, nn.SyncBatchNorm) for module in state.model.modules())
    )
    if exchanging and not engine_of(state).calls_every_batch:
        raise NotImplementedError(
            "retry_on_oom cannot repeat a forward in which the processes exchange something, as "
            "that of a sharded model, of SyncBatchNorm or of parts of a batch (data=): the others "
            "would wait for the one that has run out of memory. List microbatch(size) with a size "
            "that fits instead"
        )
    return 0


def _check_pieces(listed: Sequence[Middleware]) -> None:
    by = next(m for m in listed if m.name in ("microbatch", "retry_on_oom"))
    for member in listed:
        if member.name == "tbptt":
            raise ValueError(
                f"{by!r} cuts a batch into pieces of its samples, and what {member!r} carries on "
                "belongs to all of them. Leave one out; to save memory, use smaller batches"
            )
        if "create_graph" in member.traits:
            raise ValueError(
                f"{by!r} changes gradients in place, which closure(create_graph=True) "
                "differentiates: leave one out"
            )


# --------------------------------------------------------------------------------------------------
# Truncated backpropagation through time: one update for each window of a batch of sequences.


@middleware("step")
def tbptt(length: int, dim: int = 1) -> Middleware:
    """Train on sequences in windows, with one update for each ``length`` positions of a batch.

    The loss function takes what it returned for the window before, such as the hidden state of a
    recurrent net: ``loss_fn(model, batch, carry) -> (loss, aux, carry)``. The carry holds tensors
    in tuples, lists and mappings. It is detached after each window. It is None where a pass over a
    loader begins, and crosses from each batch to the next. So consecutive batches have to continue
    the same sequences, in the same rows. It is kept in ``state.slots["tbptt"]``, and saved.

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

    Notes:
        An evaluation works in the same windows, with a carry of its own. Everything else acts once
        per window, because each is an update: clipping, schedules, counters. This holds wherever
        ``tbptt`` is listed. Evaluations, records and hooks come between batches. So a run ends with
        the batch in which it reaches ``steps``, and ``every(steps=n)`` is due after each batch that
        passes a multiple of n. The number of updates of an epoch is not known beforehand: a
        schedule that needs the length of the run needs ``fit(..., steps=...)``.

        A window weighs as many items as it has positions, times its leading dimension if that is
        another one; ``aux["weight"]`` overrides it. A window without items moves the carry on too;
        one that a guard, such as ``skip_nonfinite``, or the loss scale of fp16 leaves out does not.

    Source: Williams and Peng, 1990, https://doi.org/10.1162/neco.1990.2.4.490
    """
    checks.integer("tbptt", "length", length, "the positions per window", wrong_type=TypeError)
    meaning = "the dimension of time"
    checks.integer("tbptt", "dim", dim, meaning, least=0, wrong_type=TypeError)

    def loss_fn(given: LossFn) -> LossFn:
        weigh = (lambda batch: _positions(batch, dim)) if dim else (lambda batch: 1)
        return _takes_carry(given, name_of(given), weigh)

    return Middleware(
        "tbptt",
        step=_each_window(length, dim),
        evaluation=_evaluate_each_window(length, dim),
        init=_no_carry,
        loss_fn=loss_fn,
        check=_check_tbptt,
        adds=(),
        forward=_carrying,
        order={"step": 2, "forward": -1},  # all others act once for each update, and see no carry
        traits=("carries",),
    )


def _no_carry(state: TrainState) -> None:
    refuse(
        state,
        "tbptt",
        exact="it works in one process only. Leave one of them out",
        several="several would share the batches of a loader, and each would carry on from a batch "
        "that its next one does not continue",
    )


def _check_tbptt(listed: Sequence[Middleware]) -> None:
    for member in listed:
        if member.window > 1:
            raise ValueError(
                f"{member!r} makes one update from several batches, and tbptt several updates from "
                "one batch. Leave one out; for a larger update, use larger batches or a larger "
                "length"
            )


def _note_call(state: TrainState, before: int) -> TrainState:
    """Return the state after a call, with the number of updates that it has made.

    Args:
        state: the state after the last of them.
        before: ``state.step`` before the first.
    """
    made = state.step - before
    events = state.events | {"update"} if made else state.events
    return attrs.evolve(with_slot(state, "step/call", (state.step, made)), events=events)


def _each_window(length: int, dim: int) -> Wrap:
    def wrap(step: Step) -> Step:
        def each_window(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            given, windows = state, _windows(batch, length, dim)
            if not state.batch:  # a pass begins
                state = with_slot(state, "tbptt", None)
            if len(windows) == 1:
                state, out = step(state, batch)
                return _note_call(state, given.step), out
            try:
                state, out = _fold(step, state, windows)
            except BaseException:
                if not Ownership.belongs_to(given):  # the first of its updates was made
                    Ownership.give_up(given)
                raise
            return _note_call(state, given.step), out

        return each_window

    return wrap


def _evaluate_each_window(length: int, dim: int) -> Wrap:
    def wrap(step: Step) -> Step:
        def each_window(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            return _fold(step, state, _windows(batch, length, dim))

        return each_window

    return wrap


def _fold(step: Step, state: TrainState, windows: Sequence[Batch]) -> tuple[TrainState, Output]:
    """Call a step with each window. Return the last state, and the output of all windows."""
    __tracebackhide__ = True
    if len(windows) == 1:
        return step(state, windows[0])
    total = WeightedSum()
    without_loss: list[Output] = []  # in an evaluation
    for window in state.run.live.stopwatch.waiting_once(windows) if state.run else windows:
        state, out = step(state, window)
        if out.loss is None:
            without_loss.append(out)
        else:
            total.add(_widened(out))
    return state, _joined(without_loss, total) if without_loss else total.output()


def _joined(outputs: Sequence[Output], others: WeightedSum) -> Output:
    """Return the output of the windows of a batch that have no loss.

    Raises:
        ValueError: other windows have one.
    """
    metrics = Metrics() if others.is_empty else Metrics.of(others.output())
    for out in outputs:
        metrics = metrics.combined(Metrics.of(out))
    del metrics["loss"]  # there is none
    weight = sum(out.weight for out in outputs)
    return attrs.evolve(outputs[-1], weight=weight, metrics=metrics, skip=None)


def _widened(out: Output) -> Output:
    """Return an output whose loss can be added up without rounding."""
    return attrs.evolve(out, loss=Sum(out.loss).owned().value)


# --- windows


def _positions(batch: Batch, dim: int) -> int:
    """Return the length of the sequences of a batch.

    Raises:
        ValueError: there is not one, or it is 0.
    """
    lengths = {t.size(dim) for t in containers.tensors_in(batch) if t.ndim > dim}
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
        containers.map_leaves(batch, _cut(dim, start, min(length, positions - start)))
        for start in range(0, positions, length)
    ]


def _cut(dim: int, start: int, length: int) -> Callable[[object], object]:
    def cut(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.ndim > dim:
            return leaf.narrow(dim, start, length)
        return leaf

    return cut


# --------------------------------------------------------------------------------------------------
# Loss functions with a carry, `(model, batch, carry) -> (loss, aux, carry)`, in a forward step.
#
# The carry goes in with the batch and comes out with aux, so that the step inside is the same as
# for any other loss function. What wraps the forward step sees neither.

_AUX, _CARRY = "aux", "carry"  # what the step inside gets as aux
_MEANING = "with tbptt a loss function takes (model, batch, carry) and returns (loss, aux, carry)"


class _Fed(NamedTuple):
    """What the loss function is called with."""

    batch: Batch
    carry: object


def _takes_carry(
    loss_fn: Callable[..., object], name: str, positions: Callable[[Batch], int]
) -> LossFn:
    """Return the loss function for a forward step under :func:`_carrying`.

    Args:
        loss_fn: the loss function with a carry.
        name: its name in messages.
        positions: the number of positions of a window, which its weight is multiplied by, unless
            the leading dimension counts them.
    """

    def with_carried(model: nn.Module, fed: Batch, /) -> tuple[Tensor, Aux] | Skip:
        __tracebackhide__ = True
        reply = loss_fn(model, fed.batch, fed.carry)
        if isinstance(reply, Skip):
            return reply
        if not isinstance(reply, tuple) or len(reply) != 3:
            raise TypeError(f"{_MEANING}; {name} returned {_describe(reply)}")
        loss, aux, carry = reply
        if not isinstance(aux, Mapping):
            raise TypeError(
                f"{_MEANING}, where aux is a mapping, such as {{}}; got {checks.describe(aux)}"
            )
        weight = aux.get("weight")
        if weight is None:
            weight = containers.items_in(fed.batch, name) * positions(fed.batch)
        return loss, {"weight": weight, _AUX: aux, _CARRY: carry}

    return with_carried


def _carrying(step: Step) -> Step:
    """Return the forward step that gives the carry to the loss function, and keeps the new one."""

    def carried(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, _Fed(batch, state.slots.get("tbptt")))
        if _CARRY not in out.aux:
            return state, out  # the loss function leaves the window out: the carry stays
        state = with_slot(state, "tbptt", containers.map_leaves(out.aux[_CARRY], _detached))
        return state, attrs.evolve(out, aux=out.aux[_AUX])

    return carried


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _describe(reply: object) -> str:
    return f"a tuple of {len(reply)}" if isinstance(reply, tuple) else checks.describe(reply)
