"""Find a learning rate, and the largest batch that fits into memory."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._display.frames import short_traceback
from fnloop._extensions import extensions
from fnloop._extensions.stacks.states import check_one_model
from fnloop._extensions.tools.dry_run import train_copy, with_members
from fnloop._loop.evaluate import open_loader
from fnloop._step.pipeline import PipelineStep
from fnloop.extend import (
    Batch,
    Setting,
    check_not_stale,
    checks,
    containers,
    engine_of,
    groups,
    reprs,
    tables,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --------------------------------------------------------------------------------------------------
# The learning rate range test: train with a rate that grows until the loss diverges.

BETA = 0.98  # of the smoothed loss
DIVERGED = 4.0  # times the best smoothed loss
SKIPPED = 20  # updates in a row without one that is applied
ENDED = 5  # losses at the end in which no suggestion is looked for
SHOWN = 12  # rows of the table


@attrs.frozen(repr=False)
class LrRange(tables.Shown):
    """What :func:`find_lr` has found: a table, also in a notebook; ``plot()`` draws it.

    Args:
        rates: the learning rate of the first parameter group in each update.
        losses: the loss of each update's batch, before the update.
        smoothed: their exponential moving average.
        suggestion: a learning rate for the first group; None if there is none.
        initial: the initial learning rate of the first group. Multiply the rates of the other
            groups by ``suggestion / initial`` too.
        note: why the test ended, and why there is no suggestion if there is none.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    initial: float
    note: str

    def plot(self) -> Figure:
        """Draw the loss over the learning rate, with the suggestion marked.

        Returns:
            A matplotlib Figure.

        Raises:
            ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
            ValueError: there is no loss to draw; the message says why.
        """
        from fnloop._extensions.histories import figures

        figures.require_matplotlib("LrRange.plot")
        if not self.rates:
            raise ValueError(f"there is nothing to plot: {self.note}")
        figure, (axis,) = figures.panels("LrRange.plot", [figures.LARGE])
        (color,) = figures.palette("LrRange.plot", 1)
        marked = None
        if self.suggestion is not None:
            height = self.smoothed[self.rates.index(self.suggestion)]
            marked = self.suggestion, height, f"suggestion {self.suggestion:.2g}"
        raw = figures.Curve([*zip(self.rates, self.losses, strict=True)], "loss", color, thin=True)
        points = [*zip(self.rates, self.smoothed, strict=True)]
        curves = [raw, figures.Curve(points, "smoothed", color, best=marked)]
        figures.draw(axis, "loss", "learning rate", curves)
        axis.set_xscale("log")
        low, high = min(*self.smoothed, *self.losses), max(self.smoothed)
        if high > low:  # single losses may be far above
            axis.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
        return figure

    def _parts(self) -> list[str | tables.Table[int]]:
        title = "LrRange: no suggestion"
        if self.suggestion is not None:
            times = self.suggestion / self.initial
            title = f"LrRange: suggestion lr={self.suggestion:.2g}, {times:.2g} × the initial rate"
        if not self.rates:
            return [title, self.note]
        every = -(-len(self.rates) // SHOWN)
        found = -1 if self.suggestion is None else self.rates.index(self.suggestion)
        columns: list[tables.Column[int]] = [
            tables.Column("lr", lambda i: f"{self.rates[i]:.2e}"),
            tables.Column("loss", lambda i: reprs.format_metric("loss", self.losses[i])),
            tables.Column("smoothed", lambda i: reprs.format_metric("loss", self.smoothed[i])),
            tables.Column("", lambda i: "suggested" if i == found else "", left=True),
        ]
        rows = [i for i in range(len(self.rates)) if i % every == 0 or i == found]
        return [title, tables.Table(columns, rows, self.note)]


@short_traceback
def find_lr(
    step: Step,
    state: TrainState,
    loader: object,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    updates: int = 100,
) -> LrRange:
    """Find a learning rate: train a copy with a rate that grows until the loss diverges.

    Update i has the rate ``low × (high / low) ** (i / updates)``. It is the rate of the first group
    of the first optimizer. All others, also those of other optimizers, keep their proportion to it:
    each is its initial value times the same factor. The test ends after ``updates`` updates, or if
    the smoothed loss is above four times its best, or if a loss is not finite. An update that is
    skipped, as by an fp16 overflow, is tried again with the next batch.

    Args:
        step: what ``pipeline(...)(loss_fn)`` or ``raw(fn)`` returns.
        state: the newest state, usually at step 0.
        loader: the training loader. It is repeated if it is too short.
        low, high: the range of the rate.
        updates: how many updates the whole range has, at least 10.

    Returns:
        The rates, the losses and the suggestion. It prints as a table, and ``.plot()`` draws it.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument has the wrong type.
        ValueError: the range is empty, a group has no learning rate, that of the first group is 0,
            or the step is one of ``alternate``.
        NotImplementedError: the model is sharded over processes, so it cannot be copied.
        Exception: any exception of the loss function or the loader, with a note of the batch.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import Toy
        >>> model = Toy(w=1.0)
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        >>> step = fl.pipeline()(lambda model, batch: model(batch).square().mean())
        >>> found = find_lr(step, state, [torch.ones(1)])
        >>> f"{found.suggestion:.2g}", found.note, state.model.w.item()
        ('0.0012', 'the smoothed loss rose above 4 times its best at lr=8.3', 1.0)

    Notes:
        The suggestion is fastai's "valley": the middle of the longest stretch in which the smoothed
        loss falls, without the first tenth and the last five updates.

        The state and all generators stay as they are. The copy needs memory for another model and
        optimizer. The step is the one given, with ``accumulate``, ``clip``, ``amp`` and so on, but
        without ``schedule``, ``torch_scheduler`` and ``plateau``, averages and metrics. A rate that
        another middleware sets is replaced during the update.

    Source: Smith, 2017, https://arxiv.org/abs/1506.01186; the settings and the suggestion are those
    of ``Learner.lr_find`` of fastai 2.

    Replaces: lightning.LearningRateFinder
    """
    __tracebackhide__ = True
    step = PipelineStep.checked(step, "find_lr")
    check_not_stale(state, "find_lr")
    check_one_model(state, "find_lr")
    if step.turns:
        raise ValueError(
            "find_lr varies one learning rate and looks at one loss, but alternate(...) has those "
            "of several steps: try the learning rates of each with fork(state, ...)"
        )
    low = checks.number("find_lr", "low", low, "the first learning rate", above=0)
    high = checks.number("find_lr", "high", high, "the end of the range", above=low)
    updates = checks.integer("find_lr", "updates", updates, "those of the whole range", least=10)
    initial = _initial_rates(state)
    sweep = _Sweep([low * (high / low) ** (i / updates) for i in range(updates)], initial)
    left_out = extensions("averages of the weights")
    swept = with_members(step, left_out, [_swept(sweep)])
    # ``follow`` ends a sweep whose updates are all left out, with a message of its own.
    train_copy(swept, state, loader, updates, (sweep.follow,), epochs=updates * SKIPPED)
    return sweep.result()


def _initial_rates(state: TrainState) -> list[float | Tensor]:
    """Return the initial rate of each group."""
    for i, group in enumerate(groups(state).values()):
        if "lr" not in group:
            raise ValueError(
                f"find_lr: group {i} of the optimizer has no learning rate; it has "
                f"{checks.join_names([key for key in group if key != 'params'], 5)}"
            )
    rates = [copy.deepcopy(Setting(group, "lr").initial) for group in groups(state).values()]
    if not float(rates[0]) > 0:
        raise ValueError(
            "find_lr varies all learning rates in proportion to their initial values, but that of "
            f"the first group is {float(rates[0]):g}: set it to a number above 0"
        )
    return rates


@attrs.define(repr=False)
class _Sweep:
    """The state of a range test, which is not that of a run.

    Args:
        rates: the rate of each update.
        initial: the initial rate of each group.
    """

    rates: list[float]
    initial: list[float | Tensor]
    losses: list[float] = attrs.field(factory=list)
    smoothed: list[float] = attrs.field(factory=list)
    pending: list[Tensor | None] = attrs.field(factory=list)  # None: of a skipped update
    average: float = 0.0
    skipped: int = 0
    end: str = ""

    def rate(self) -> float:
        """Return the rate of the next update."""
        tried = len(self.losses) + sum(loss is not None for loss in self.pending)
        return self.rates[min(tried, len(self.rates) - 1)]

    def follow(self, state: TrainState) -> TrainState:
        """Read the losses of the last updates: a hook, which stops the run."""
        for loss in self.pending:
            self.skipped = self.skipped + 1 if loss is None else 0
            if loss is not None and not self.end and len(self.losses) < len(self.rates):
                self._add(float(loss))
        self.pending.clear()
        if self.skipped >= SKIPPED:
            self.end = f"{SKIPPED} updates in a row were skipped at {self._at(len(self.losses))}"
        return attrs.evolve(state, stop=self.end) if self.end else state

    def _add(self, loss: float) -> None:
        n = len(self.losses)
        if not math.isfinite(loss):
            self.end = f"the loss was {loss} at {self._at(n)}"
            return
        self.losses.append(loss)
        # As the average with bias correction, but constant if the losses are.
        self.average += (loss - self.average) * (1 - BETA) / (1 - BETA ** (n + 1))
        self.smoothed.append(self.average)
        best = min(self.smoothed)
        if self.smoothed[-1] > best + (DIVERGED - 1) * abs(best):  # a loss may be below 0
            self.end = f"the smoothed loss rose above {DIVERGED:g} times its best at {self._at(n)}"

    def _rise(self) -> str:
        """Return how far the loss had risen at the end, relative to its best."""
        best, last = min(self.smoothed, default=0.0), self.average
        if not 0 < best < 0.95 * last:
            return "loss did not diverge"
        times = math.floor(last / best * 10) / 10
        return f"smoothed loss ended at {times} times its best; above {DIVERGED:g}, it diverges"

    def _at(self, place: int) -> str:
        return f"lr={self.rates[min(place, len(self.rates) - 1)]:.2g}"

    def result(self) -> LrRange:
        """Return what was found."""
        n, begin = len(self.losses), len(self.rates) // 10
        place = _valley(self.smoothed[begin:-ENDED])
        note = self.end or f"all {n} updates were made, and the {self._rise()}"
        if place is None:
            why = "the loss never fell"
            if n <= begin + ENDED + 1:
                why = "that is too early: give a smaller low=" if n else "no update was made before"
            note = f"{note}; {why}"
        suggestion = None if place is None else self.rates[begin + place]
        return LrRange(
            tuple(self.rates[:n]), tuple(self.losses), tuple(self.smoothed), suggestion,
            float(self.initial[0]), note,
        )  # fmt: skip


@middleware("step")
def _swept(sweep: _Sweep) -> Middleware:
    """Set the rates of a range test for the time of an update."""
    first = float(sweep.initial[0])

    def wrap(step: Step) -> Step:
        def swept(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            factor = sweep.rate() / first
            rates = [Setting(group, "lr") for group in groups(state).values()]
            before = [copy.deepcopy(rate.value) for rate in rates]
            for rate, initial in zip(rates, sweep.initial, strict=True):
                rate.put(initial * factor)
            try:
                new, out = step(state, batch)
            finally:
                for rate, value in zip(rates, before, strict=True):
                    rate.put(value)
            loss = None if out.skip is not None else engine_of(new).mean_loss(out)
            sweep.pending.append(loss)
            return new, out

        return swept

    return Middleware("find_lr", step=wrap)


def _valley(losses: Sequence[float]) -> int | None:
    """Return the middle of the longest valley, or None if the losses never fall.

    A valley is a sequence of losses, not necessarily neighbours, each below the one before it.

    Example:
        >>> _valley([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 5.0]), _valley([1.0, 2.0])
        (2, None)
    """
    lengths: list[int] = []  # of the longest valley that ends at each loss
    for i, loss in enumerate(losses):
        before = (lengths[j] for j in range(i) if loss < losses[j])
        lengths.append(1 + max(before, default=0))
    longest = max(lengths, default=1)
    if longest == 1:
        return None
    start = lengths.index(longest) - longest  # as fastai rounds it
    return max(start + int(longest / 3) + int(longest / 6), 0)


# --------------------------------------------------------------------------------------------------
# The largest batch that fits into memory.

UPDATES = 3  # of a trial: from the second on, the state of the optimizer is there


@short_traceback
def find_batch_size(
    step: Step,
    state: TrainState,
    make_loader: Callable[[int], object],
    *,
    most: int = 8192,
) -> int:
    """Find the largest batch size with which training fits into memory.

    The size is doubled, from 2, until a few updates run out of memory. Then the search continues by
    bisection. Each trial makes three updates of a copy, so the state and all generators stay as
    they are. Any wording of torch's memory errors counts, and MemoryError. Schedules and metrics
    are left out; an average, which needs memory, is not.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns. With ``accumulate`` the size is that of one
            batch of the window.
        state: the newest state.
        make_loader: ``batch_size -> loader``, the training loader with batches of that size.
        most: the largest size to try.

    Returns:
        The largest size that fits; at most ``most``, and at most the number of samples.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: an argument has the wrong type.
        ValueError: the batches do not grow with the size.
        NotImplementedError: there are several processes, or the model is sharded.
        Exception: the memory error, if one sample does not fit; any other exception of the loss
            function or the loader.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def loss_fn(model, batch):
        ...     if len(batch) > 100:
        ...         raise RuntimeError("CUDA out of memory")
        ...     return toy_loss(model, batch)
        >>> find_batch_size(fl.pipeline()(loss_fn), toy(), lambda size: [torch.ones(size)] * 3)
        100

    Notes:
        The result is a little too small, because the copy needs memory beside the state. Even so,
        leave some memory free where sizes vary: other batches may be longer. On the CPU, Linux
        usually ends a process that has used up the memory, and raises nothing: give a ``most`` that
        is safe.

    Replaces: lightning.BatchSizeFinder, accelerate.find_executable_batch_size
    """
    __tracebackhide__ = True
    step = PipelineStep.checked(step, "find_batch_size")
    check_not_stale(state, "find_batch_size")
    check_one_model(state, "find_batch_size")
    meaning = "a function batch_size -> loader"
    checks.function("find_batch_size", "make_loader", make_loader, meaning, 1)
    most = checks.integer("find_batch_size", "most", most, "the largest size to try")
    if state.backend.world_size > 1:
        raise NotImplementedError(
            "find_batch_size works in one process: a process that runs out of memory would leave "
            "the others waiting. Call it in a script that is started without torchrun"
        )
    trial = _Trial(step, state, make_loader)
    fits, size = 0, min(2, most)
    while trial.fits(size):
        if trial.is_whole:
            return min(size, trial.samples)
        if size == most:
            return most
        fits, size = size, min(2 * size, most)
    if not fits and size > 1 and trial.fits(1):
        fits = 1
    if not fits:
        trial.fits(1, required=True)  # raises
    while size - fits > 1:
        middle = (fits + size) // 2
        fits, size = (middle, size) if trial.fits(middle) else (fits, middle)
    return fits


@attrs.define(repr=False)
class _Trial:
    """Trials of batch sizes, and what the last one has seen.

    Args:
        step, state, make_loader: the arguments of :func:`find_batch_size`.
        samples: the samples of the largest batch.
        is_whole: whether that batch was the whole loader.
    """

    step: PipelineStep
    state: TrainState
    make_loader: Callable[[int], object]
    samples: int = 0
    is_whole: bool = False

    def fits(self, size: int, required: bool = False) -> bool:
        """Return whether a few updates with this batch size fit into memory.

        Raises:
            Exception: any that is not about memory; that too, if the size is ``required`` to fit.
        """
        __tracebackhide__ = True
        try:
            return self._train(size)
        except Exception as error:
            if not containers.is_out_of_memory(error):
                raise
            if required:
                error.add_note("find_batch_size: not even a batch of one sample fits")
                raise
        _free(self.state.backend.device)  # here, where the error holds no tensors any more
        return False

    def _train(self, size: int) -> bool:
        __tracebackhide__ = True
        before, self.samples = self.samples, 0
        loader = self.make_loader(size)
        length = open_loader(loader, self.state).length
        if length == 0:  # with drop_last, the data have fewer samples
            return False
        step = self.step
        if not step.turns:
            step = with_members(step, inner=[_noted(self)])
        first = self.state.step + self.state.skipped

        def stop(state: TrainState) -> TrainState:  # skipped updates count here
            over = state.step + state.skipped >= first + UPDATES
            return attrs.evolve(state, stop="enough") if over else state

        train_copy(step, self.state, loader, UPDATES, (stop,), epochs=UPDATES)
        self.is_whole = length == 1 and 0 < self.samples < size
        if self.samples and self.samples == before and not self.is_whole:
            raise ValueError(
                f"find_batch_size: make_loader({size}) gave batches of {self.samples} samples, as "
                "many as with another size: pass the size on, as in "
                "lambda size: DataLoader(data, batch_size=size)"
            )
        return True

    def note(self, batches: Sequence[Batch]) -> None:
        """Note the sizes of the batches of an update."""
        self.samples = max(self.samples, *map(containers.batch_size_of, batches))


@middleware("step")
def _noted(trial: _Trial) -> Middleware:
    """Note the sizes of batches."""
    takes_several = max((m.window for m in trial.step.pipeline.middleware), default=1) > 1

    def wrap(step: Step) -> Step:
        def noted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            trial.note(batch if takes_several else (batch,))
            return step(state, batch)

        return noted

    return Middleware("find_batch_size", step=wrap)


def _free(device: torch.device) -> None:
    """Give memory back to the device: what a failed trial has left would count in the next."""
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()
