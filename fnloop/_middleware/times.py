"""How long updates, data and evaluations take, and how much is trained in a second."""

from __future__ import annotations

import attrs
from torch import Tensor

from fnloop._core.elapsed import Elapsed, Mark, elapsed, mark
from fnloop._core.metrics import to_accumulator_dtype
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Metric, Output, Step, Wrap
from fnloop._display import checks
from fnloop._step.forward import items_in
from fnloop._step.update import report

__all__ = ["throughput", "timings"]


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
    """

    def wrap(step: Step) -> Step:
        def timed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            start = mark(state.backend.device)
            new, out = step(state, batch)
            times: dict[str, Metric] = {"time/step": elapsed(1, start, mark(state.backend.device))}
            if state.run is not None:
                times["time/data"] = Elapsed(1, state.run.stopwatch.waited)
            return new, report(out, times, "timings")

        return timed

    return Middleware("timings", step=wrap)


@middleware("step")
def throughput(
    of: str = "samples", *, flops: float | None = None, peak: float | None = None
) -> Middleware:
    """Measure how much all processes together train in a second: "throughput/samples".

    A second of training is one in which an update runs or waits for its batches; evaluations do not
    count. On a GPU it is measured by CUDA events, which are read when a record is made, and a hook
    that holds the device up counts. Skipped updates do not count. List it last.

    Args:
        of: "samples", the leading dimension of the batches, with ``tbptt`` that of each window; or
            "weight", the items that the loss is the mean of, such as tokens ("throughput/weight").
        flops: floating point operations that one sample (or one item of weight) takes in forward
            and backward. Given with ``peak``, "throughput/mfu" is the model FLOPs utilization.
        peak: floating point operations per second of one device.

    Returns:
        A middleware of the loss and the step ring.

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
    """
    checks.choice("throughput", "of", of, ("samples", "weight"))
    if (flops is None) != (peak is None):
        raise ValueError(
            "throughput expects flops, of one sample or item, and peak, of one device in a second, "
            f"together; got flops={flops}, peak={peak}"
        )
    share = None  # of the peak of a device, that one sample in a second takes
    if flops is not None and peak is not None:
        checks.number("throughput", "flops", flops, "operations per sample or item", above=0)
        checks.number("throughput", "peak", peak, "operations of a device in a second", above=0)
        share = flops / peak
    name = f"throughput/{of}"

    def wrap(step: Step) -> Step:
        def timed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            start, processes = mark(state.backend.device), state.backend.data_size
            new, out = step(state, batch)
            trained = out.metrics.get(name, Elapsed(0, is_rate=True))
            assert isinstance(trained, Elapsed)
            spent = _training_time(state, start)
            # The seconds of all processes are added up.
            found: dict[str, Metric] = {name: _scaled(trained, processes).combine(spent)}
            if share is not None:
                found["throughput/mfu"] = _scaled(trained, share).combine(spent)
            rest = {other: metric for other, metric in out.metrics.items() if other != name}
            return new, report(attrs.evolve(out, metrics=rest), found, "throughput")

        return timed

    return Middleware(name, loss=_counting(of, name), step=wrap)


def _counting(of: str, name: str) -> Wrap:
    """Return the wrap that counts what a batch has, in training."""

    def wrap(step: Step) -> Step:
        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            amount = _samples_in(batch) if of == "samples" else out.weight
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
        return elapsed(0, start, end, is_rate=True)
    watch = state.run.stopwatch
    before, watch.newest = watch.newest, end
    if before is None or isinstance(end, float):
        return elapsed(0, start, end, more=watch.waited, is_rate=True)
    return elapsed(0, before, end, is_rate=True)


def _samples_in(batch: Batch) -> int:
    try:
        return items_in(batch, "throughput")
    except ValueError as error:
        raise ValueError(
            'throughput(of="samples") counts the leading dimension of the tensors of a batch, and '
            'there is not one: write throughput(of="weight"), which counts aux["weight"]'
        ) from error
