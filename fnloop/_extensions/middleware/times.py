"""Times, throughput and memory in reports."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, Self, cast

import attrs
import torch
from torch import Tensor

from fnloop._core.metrics import RECENT, Running, to_accumulator_dtype
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._step.forward import items_in
from fnloop.extend import Batch, Metric, Pending, Wrap, checks, report, warn_once, with_slot

# --------------------------------------------------------------------------------------------------
# Times as metrics: marks on a device's timeline, the seconds between them, and peaks.
#
# On a GPU a mark is a CUDA event, and the time between two of them is read when a report is made,
# or when they have passed already. Elsewhere a mark is the time of the host.

SETTLE = 64  # pairs of events to hold before looking which of them have passed


class Event(Protocol):
    """A point on the timeline of a device, as ``torch.cuda.Event``."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Self, /) -> float: ...


Mark = float | Event
Pair = tuple[Event, Event]


def mark(device: torch.device) -> Mark:
    """Return a mark of now, on the timeline of a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


@attrs.frozen(eq=False)
class Elapsed(Running):
    """Seconds, by an amount: the mean seconds of one, or the amount in a second.

    Args:
        amount: a number or a scalar tensor.
        seconds: those that are known.
        pending: pairs of events whose distance is not known yet.
        is_rate: whether to compute amount / seconds; otherwise seconds / amount.
    """

    amount: float | Tensor
    seconds: float = 0.0
    pending: tuple[Pair, ...] = ()
    is_rate: bool = False

    reductions = {"amount": "sum"}  # noqa: RUF012  # what is read with the fields of others
    per_process = True

    def combine(self, other: Elapsed) -> Elapsed:
        """Return that of both."""
        pending = self.pending + other.pending
        both = Elapsed(
            self.amount + other.amount, self.seconds + other.seconds, pending, self.is_rate
        )
        return both.settled(wait=False) if len(pending) > SETTLE else both

    def settled(self, wait: bool = True) -> Elapsed:
        """Return the same with the distances of events read: of all, or of those that passed."""
        seconds, pending = self.seconds, []
        for start, end in self.pending:
            if wait:
                end.synchronize()
            if wait or end.query():
                seconds += start.elapsed_time(end) / 1000
            else:
                pending.append((start, end))
        return attrs.evolve(self, seconds=seconds, pending=tuple(pending))

    def compute(self) -> float:
        """Return the mean or the rate; NaN if it would divide by 0."""
        amount, seconds = float(self.amount), self.settled().seconds
        above, below = (amount, seconds) if self.is_rate else (seconds, amount)
        return above / below if below else float("nan")

    def to_cpu(self) -> Elapsed:
        """Return a copy that can be sent to another process."""
        return attrs.evolve(self.settled(), amount=float(self.amount))

    def __deepcopy__(self, memo: object) -> Elapsed:
        return self.settled()  # an event cannot be copied

    def to_parts(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"amount": self.amount, "seconds": self.settled().seconds}

    def from_parts(self, parts: Mapping[str, object]) -> Elapsed:
        """Return the metric that was saved."""
        amount = parts["amount"]
        if isinstance(amount, Tensor) and isinstance(self.amount, Tensor):
            amount = amount.to(self.amount.device)
        return attrs.evolve(self, amount=amount, seconds=parts["seconds"], pending=())


class Peak(Running):
    """The largest value of a gauge that keeps its own peak, read when a report is made.

    Args:
        gauge: returns the peak since it was last reset, without waiting for the device.
        value: the largest that was read so far.
    """

    per_process = True

    def __init__(self, gauge: Callable[[], float] | None, value: float = 0.0) -> None:
        self.gauge, self.value = gauge, value

    def combine(self, other: Peak) -> Peak:
        """Return the larger of both; the gauge is that of the newer."""
        return Peak(other.gauge, max(self.value, other.value))

    def compute(self) -> float:
        """Return the largest value so far. It is kept, because the gauge may be reset now."""
        if self.gauge is not None:
            self.value = max(self.value, self.gauge())
        return self.value

    def to_cpu(self) -> Peak:
        """Return a copy that can be sent to another process."""
        return Peak(None, self.compute())

    def to_parts(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"value": self.compute()}

    def from_parts(self, parts: Mapping[str, object]) -> Peak:
        """Return the metric that was saved."""
        value = parts["value"]
        assert isinstance(value, float | int)
        return Peak(self.gauge, value)


# --------------------------------------------------------------------------------------------------
# How long updates, data and evaluations take, and how much is trained in a second.


def unseen_times(members: Iterable[Middleware], read: Mapping[str, object]) -> dict[str, Metric]:
    """Return the times of a checkpoint, whatever measured them, as they are before any batch.

    Args:
        members: the middleware of a step.
        read: the metrics of a checkpoint, as far as they are known, by name.
    """
    return {
        name.removeprefix(RECENT): Elapsed(0.0, is_rate="throughput/" in name)
        for name, metric in read.items()
        if isinstance(metric, Pending) and metric.kind == "fnloop.Elapsed"
    }


@middleware("step")
def timings() -> Middleware:
    """Measure times, in seconds: "time/data", "time/step" and "time/evaluate".

    "time/data" is the mean time that an update waited for its batches, "time/step" the mean time of
    an update without this: on a GPU by CUDA events, which are read when a record is made.
    "time/evaluate" is the time of an evaluation, in the record that it made
    (``history["valid/time/evaluate"]``). List it last, so that it measures all other middleware.

    With several processes the means are over all of them, and "time/evaluate" is the longest. A
    bare step has no "time/data". Skipped updates do not count. Where one fetch is for several
    updates (``tbptt``, ``alternate``), the time that it took is that of the first of them.

    Returns:
        A middleware of the step ring.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(timings())(toy_loss)
        >>> state = fl.fit(step, toy(), ([torch.ones(1)] * 3, [torch.ones(1)]), hooks=())
        >>> [name for name in state.history.keys() if "time" in name]
        ['train/time/step', 'train/time/data', 'valid/time/evaluate']

    Replaces: fastnlp.TimerCallback
    """

    def wrap(step: Step) -> Step:
        def timed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            start = mark(state.backend.device)
            new, out = step(state, batch)
            times: dict[str, Metric] = {"time/step": _elapsed(1, start, mark(state.backend.device))}
            if state.run is not None:
                times["time/data"] = Elapsed(1, state.run.live.stopwatch.waited)
            return new, report(out, times, "timings")

        return timed

    return Middleware("timings", step=wrap, adds=("time",), traits=("timed", "stacks"))


@middleware("step")
def throughput(
    of: str = "samples", *, flops: float | str | None = None, peak: float | None = None
) -> Middleware:
    """Measure the samples per second of all processes together: "throughput/samples".

    A second of training is one in which an update runs or waits for its batches; evaluations do not
    count. On a GPU it is measured by CUDA events, which are read when a record is made, and a hook
    that holds the device up counts. Skipped updates do not count. List it last.

    Args:
        of: "samples", the leading dimension of the batches, with ``tbptt`` that of each window; or
            "weight", the items that the loss is the mean of, such as tokens ("throughput/weight").
        flops: floating point operations that one sample (or one item of weight) takes in forward
            and backward. Given with ``peak``, "throughput/mfu" is the model FLOPs utilization. Or
            "count": torch's ``FlopCounterMode`` counts those of matrix products, convolutions and
            attention in the first update, and they are divided by its samples, or items. Where it
            has none of them, a warning says so, and the utilization is NaN.
        peak: floating point operations per second of one device.

    Returns:
        A middleware of the loss and the step ring. With ``flops="count"`` it keeps the number in a
        slot, ``state.slots["throughput/samples"]``, 0 before it is known.

    Raises:
        ValueError: ``of`` is something else, ``flops`` or ``peak`` is not a number above 0, or one
            of the two is missing.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(throughput())(toy_loss)
        >>> state = fl.fit(step, toy(), [torch.ones(32)] * 3, hooks=())
        >>> state.history.latest("train/throughput/samples") > 0
        True

    Source: Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, for the utilization.

    Replaces: lightning.ThroughputMonitor
    """
    checks.choice("throughput", "of", of, ("samples", "weight"))
    if (flops is None) != (peak is None):
        raise ValueError(
            "throughput expects flops, of one sample or item, and peak, of one device in a second, "
            f"together; got flops={flops}, peak={peak}"
        )
    name, counts = f"throughput/{of}", flops == "count"
    if peak is not None:
        if not counts:
            meaning = 'operations per sample or item, or "count"'
            checks.number("throughput", "flops", flops, meaning, above=0)
        checks.number("throughput", "peak", peak, "operations of a device in a second", above=0)

    def wrap(step: Step) -> Step:
        def timed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            start, processes = mark(state.backend.device), state.backend.contributors
            each = cast(float, state.slots[name] if counts else flops)
            if each == 0:
                new, out = _counting_flops(step, state, batch, name)
                each = cast(float, new.slots[name])
            else:
                new, out = step(state, batch)
            trained = out.metrics.get(name, Elapsed(0, is_rate=True))
            assert isinstance(trained, Elapsed)
            spent = _training_time(state, start)
            # The seconds of all processes are added up.
            found: dict[str, Metric] = {name: _scaled(trained, processes).combine(spent)}
            if peak is not None:  # the share of a device that one sample in a second takes
                found["throughput/mfu"] = _scaled(trained, each / peak).combine(spent)
            rest = {other: metric for other, metric in out.metrics.items() if other != name}
            return new, report(attrs.evolve(out, metrics=rest), found, "throughput")

        return timed

    init = (lambda state: 0.0) if counts else None
    return Middleware(
        name,
        loss=_counting(of, name),
        step=wrap,
        init=init,
        adds=("throughput",),
        traits=("stacks",),
    )


def _counting_flops(
    step: Step, state: TrainState, batch: Batch, name: str
) -> tuple[TrainState, Output]:
    """Make an update, and keep in a slot how many operations each of its items took."""
    __tracebackhide__ = True
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        new, out = step(state, batch)
    trained = out.metrics.get(name)
    if not isinstance(trained, Elapsed):  # the update was left out
        return new, out
    # A host read, once: of how many items the update had.
    operations, items = counter.get_total_flops(), float(trained.amount)
    if not operations:
        warn_once(
            'throughput(flops="count"): torch counts matrix products, convolutions and attention, '
            "and the first update had none of them. Give the operations of one sample: flops=..."
        )
    each = operations / items if operations and items else math.nan
    return (with_slot(new, name, each) if items else new), out


def _counting(of: str, name: str) -> Wrap:
    """Return the wrap that counts what a batch has, in training."""

    def wrap(step: Step) -> Step:
        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            amount = state.backend.own_part(_samples_in(batch)) if of == "samples" else out.weight
            if isinstance(amount, Tensor):
                amount = to_accumulator_dtype(amount)
            return state, report(out, {name: Elapsed(amount, is_rate=True)}, "throughput")

        return counted

    return wrap


def _scaled(trained: Elapsed, factor: float) -> Elapsed:
    return trained if factor == 1 else attrs.evolve(trained, amount=trained.amount * factor)


def _training_time(state: TrainState, start: Mark) -> Elapsed:
    """Return the time of the update that began at a mark, with the time that its data took.

    On a GPU it is the time since the end of the update before, during which the device may have
    been idle; unless there was an evaluation in between.
    """
    end = mark(state.backend.device)
    if state.run is None:
        return _elapsed(0, start, end, is_rate=True)
    watch = state.run.live.stopwatch
    before, watch.newest = cast("Mark | None", watch.newest), end
    if before is None or isinstance(end, float):
        return _elapsed(0, start, end, more=watch.waited, is_rate=True)
    return _elapsed(0, before, end, is_rate=True)


def _samples_in(batch: Batch) -> int:
    try:
        return items_in(batch, "throughput")
    except ValueError as error:
        raise ValueError(
            'throughput(of="samples") counts the leading dimension of the tensors of a batch, and '
            'there is not one: write throughput(of="weight"), which counts aux["weight"]'
        ) from error


# --------------------------------------------------------------------------------------------------
# How much memory a run takes.

NAME, GIB = "memory/peak_gib", 1 << 30


@middleware("step")
def device_memory() -> Middleware:
    """Report the peak memory use, in GiB: "memory/peak_gib".

    On a GPU it is the peak of torch's allocations since the previous record, including the
    evaluation of that record. Every record resets the peak that torch keeps
    (``torch.cuda.max_memory_allocated``). On the CPU it is the peak of the resident memory of the
    process, which cannot be reset. Nothing waits for the device. With several processes it is the
    largest of all.

    Returns:
        A middleware of the step ring.

    Raises:
        RuntimeError: at the first update: the model is on the CPU of a system that does not tell.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(device_memory())(toy_loss)
        >>> state = fl.fit(step, toy(), [torch.ones(1)] * 3, hooks=())
        >>> 0 < state.history.latest("train/memory/peak_gib") < 100
        True

    Replaces: lightning.DeviceStatsMonitor
    """

    def wrap(step: Step) -> Step:
        def measured(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            device = state.backend.device
            if state.run is not None and state.run.live.stopwatch.recorded:
                state.run.live.stopwatch.recorded = False
                running: object = state.metrics.get(NAME)
                if isinstance(running, Peak):
                    running.compute()  # keeps the peak until now
                _reset(device)
            new, out = step(state, batch)
            return new, report(out, {NAME: Peak(_gauge(device))}, "device_memory")

        return measured

    return Middleware("device_memory", step=wrap, adds=(NAME,))


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@functools.cache
def _gauge(device: torch.device) -> functools.partial[float]:
    return functools.partial(_peak_gib, device)


def _peak_gib(device: torch.device) -> float:
    """Return the peak in GiB; neither of them waits for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError as error:
        raise RuntimeError(
            "device_memory: this system does not tell the memory of a process: leave it out"
        ) from error
    unit = 1 if sys.platform == "darwin" else 1024  # bytes or KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def _elapsed(
    amount: float | Tensor, start: Mark, end: Mark, *, more: float = 0.0, is_rate: bool = False
) -> Elapsed:
    """Return the seconds between two marks of one kind, and ``more``, by an amount."""
    if isinstance(start, int | float) and isinstance(end, int | float):
        return Elapsed(amount, end - start + more, (), is_rate)
    assert not isinstance(start, int | float) and not isinstance(end, int | float)
    return Elapsed(amount, more, ((start, end),), is_rate)
