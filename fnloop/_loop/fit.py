"""``fit`` and ``run``: train until a target is reached."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from fnloop._core.rng import reserved_generators
from fnloop._core.runs import INTERRUPTED
from fnloop._core.state import TrainState
from fnloop._core.types import Step
from fnloop._display.checks import describe
from fnloop._hooks.hook import HookFn, Trigger, every
from fnloop._loop.boundary import Moments
from fnloop._loop.peers import Interrupts, check_may_begin, handling, is_alone, note_interruption
from fnloop._loop.plan import Plan
from fnloop._loop.run import fold

P = ParamSpec("P")
T = TypeVar("T")


def _with_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``fit`` or ``run``, which says what to write for a fourth positional argument."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        if len(args) > 3:
            name, number = function.__name__, args[3]
            wanted = f"epochs={number}" if type(number) is int else "epochs=3"
            raise TypeError(
                f"{name} takes (step, state, loaders), and the rest by name: write {name}(step, "
                f"state, loaders, {wanted}); got {describe(number)} as a fourth argument"
            )
        return function(*args, **kwargs)

    return called


@_with_keywords
def fit(
    step: Step,
    state: TrainState,
    loaders: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    items: int | None = None,
    hooks: Sequence[HookFn] | None = None,
    evaluate_every: Moments = every(epochs=1),
    record_every: Trigger | None = None,
    prefetch: int = 1,
    phase: str | None = None,
) -> TrainState:
    """Train until a target number of epochs, updates or items is reached.

    ``state = fit(step, state, loaders, epochs=8)`` calls the step on one batch after another. After
    each update it evaluates if that is due, and calls the hooks. Use the state that it returns.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state; use what ``fit`` returns from here on.
        loaders: a mapping with "train" and any others, a pair ``(train, valid)``, or one iterable
            of batches. Every loader but "train" is evaluated, and its name is the prefix of its
            metrics. A loader is a DataLoader, a list, any other iterable, or a function that
            returns one; it may take (epoch, batch), where to begin. One with ``state_dict`` and
            ``load_state_dict`` (torchdata's ``StatefulDataLoader``), or such a dataset in a
            DataLoader without workers (Hugging Face's), continues in mid-epoch where it was, and
            reads nothing again. Any other stream is read again up to there. Generators that are
            attributes of a sampler or a loader are put back. Where the order still differs, or the
            data have another length, one warning says so. ``in_order=False`` of a DataLoader has
            no effect. A ``TensorDataset``, an array, or a subset of one, is read a batch at a time.
            A loader that fills one buffer again is refused where two of its batches would be held.
        epochs: train until ``state.epoch`` is this number. Absolute: calling again with the same
            number trains no further.
        steps: train until ``state.step`` is this number. Absolute too; the smaller of the two wins.
            With no target, ``fit`` makes one pass: the rest of the current epoch, or one epoch
            more.
        items: train until ``state.items`` has reached this number, of samples, or of tokens if the
            loss function returns their number as ``aux["weight"]``. Absolute too, and over all
            processes. The update that reaches it is the last one; where weights are tensors, it is
            the next one, because no update waits for the device. So it is after a resume, and on
            any number of processes. How many updates that takes is not known: see
            ``schedule(fn, by="items")``.
        hooks: functions ``state -> state``, called in this order after every update, and after any
            evaluation due then. ``every(epochs=1)(hook)`` calls one less often. One that returns
            ``attrs.evolve(state, stop="why")`` ends the run, ``ends="epoch"`` the epoch; to
            continue a run that was stopped so, pass ``attrs.evolve(state, stop=None)``. One that
            returns a snapshot of this run, or a checkpoint of it that it has restored, goes back
            there. Hooks are called in training mode: to look at the model in one, write ``with
            fl.evaluating(state):``. None is ``(progress(), halt_on_nonfinite())``. An object may
            also have a method ``begin(state) -> state``. It is called before the first update of
            every run, also of a resumed one, and training starts with what it returns: with a
            frozen module, for example.
        evaluate_every: when to evaluate the other loaders: ``every(epochs=1)``,
            ``every(steps=100)``, ``when(predicate)``, ``at_start()``, ``at_end()``, a combination
            such as ``every(epochs=2) | at_end()``, or None for never; or a mapping from each of
            these loaders to its own. Each evaluation and each end of an epoch appends a record to
            the history. Its "train/..." metrics are the means since the epoch began; "train/lr" is
            the learning rate of the last update ("train/lr/1", ... of further parameter groups, and
            "train/lr/head" of one with ``"name": "head"``). If the run ends between two records, at
            its target or because a hook stops it, it appends a closing record, with an evaluation
            unless ``evaluate_every`` is None. Ctrl-C and signals make none. What is evaluated only
            because the run ends (``at_end()``) is in a closing record too. If the run continues,
            closing records stay, and hooks such as ``early_stop`` ignore them.
        record_every: when to make a record besides: ``every(steps=50)``, ``every(seconds=10)``.
            Each record of the run then has "recent/..." metrics too: the means since the record
            before it, weighted by the items of the batches. Records that only ``measure`` makes do
            not count. A record costs one read from the device. There is none where every update
            since the record before it was skipped.
        prefetch: how many windows of batches are fetched, and copied to the device, ahead of the
            current one. It changes no number, unless batches are made with the model. With 1, a
            batch is fetched after the update before it.
        phase: a name for this stretch of the run. Then ``epochs``, ``steps`` and ``items`` count
            from where it began, as schedules do; it begins with a new epoch, and with none of them
            it is one epoch.
            Learning rates, and all else that a schedule, a scheduler of torch or ``plateau`` has
            set before, begin at their initial values again, or at what they were set to since.
            ``state.phases`` keeps what has begun. So a script of several phases can be started
            again: it passes over those that have ended, and continues the one that has not. It
            names them in the order in which they began. A stop by a hook ends a phase; Ctrl-C and
            signals do not, and then the next phase is refused.

    Returns:
        The state reached. If the run ended before its target, ``state.stop`` says why: the reason
        that a hook gave, or "interrupted" after Ctrl-C, which stops the run after the current
        update, or "SIGTERM". A signal abandons an evaluation, which a run that continues makes.
        After it no other run begins in this process: see SystemExit below. The model keeps its
        training flags, except that a model in evaluation mode as a whole is put into training mode.

    Raises:
        StaleStateError: the state has been advanced already.
        TypeError, ValueError: an argument is not what it should be, or the phase is not the one
            that comes next. With a target in steps alone: two whole epochs in a row left out all of
            their updates, so that it would never be reached. An epoch in which fp16 overflowed does
            not count.
        KeyError: a hook monitors a metric of a loader that this run neither trains on nor
            evaluates.
        RuntimeError: another thread is inside ``fit``, ``run``, ``evaluate`` or ``predict``.
        SystemExit: another run of this process was interrupted by SIGTERM (then the status is 143),
            SIGUSR1 or the end of its job's time, and this one might need what that one has not
            finished. The same script, started again, continues both. The run that was interrupted,
            a snapshot of it and what is restored of it may continue, which takes that back.
            ``evaluate`` and ``predict`` are not refused, and nothing is in an interactive session.
        KeyboardInterrupt: likewise, after Ctrl-C. Also after a second Ctrl-C, and with several
            processes.
        Exception: any exception of the loss function, a loader or a hook, with a note of where in
            the run it happened, and with the last consistent state as its attribute ``state``. If
            an evaluation failed, a run that continues from it repeats the evaluation. An update
            that failed may have changed buffers of the model, such as the statistics of BatchNorm,
            and what it drew from the generators of Python and NumPy stays drawn.
            If a hook failed, a run that continues from it calls this hook again, and those after
            it, and not those before. If ``optimizer.step()`` itself failed, the weights are
            between two updates, the states of the model are stale, and there is no such attribute.
            Notebooks and pytest show your frames of the traceback, and not those of fnloop;
            ``%xmode Plain`` shows all.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0, 5.0)]
        >>> step = fl.pipeline(fl.accumulate(2))(toy_loss)
        >>> state = fit(step, toy(lr=1.0), batches, hooks=())
        >>> state.model.w.item(), state.step, state.epoch           # 1.5 + 3.5 + 5
        (-10.0, 3, 1)

    Notes:
        The order of a shuffling map-style DataLoader, the augmentation in its dataset and the
        random draws of torch are a function of (seed, epoch, position). They do not depend on the
        number of workers, on evaluation, or on where a run was resumed. What the loss function
        draws from the generators of Python and NumPy is the same after a resume too, unless the
        run switches between no workers and some. The global random state, which threads share, is
        restored after a run.

        On the CPU, glibc keeps up to 1 GiB of freed memory for the next update, in tensors of up
        to 32 MiB. Set ``MALLOC_TRIM_THRESHOLD_`` in the environment to prevent it.
    """
    __tracebackhide__ = True
    plan = Plan.of(
        step, state, loaders, epochs, steps, hooks, evaluate_every, record_every, prefetch, phase,
        items,
    )  # fmt: skip
    check_may_begin(state)
    try:
        # Signals are recorded between two epochs too.
        with reserved_generators(), handling(is_alone(state)) as interrupts:
            reached = state
            for reached in fold(plan, state, interrupts):
                note_interruption(reached)
    except RuntimeError as error:
        # Python turns a StopIteration that leaves a generator into a RuntimeError.
        if isinstance(error.__cause__, StopIteration) and hasattr(error.__cause__, "__notes__"):
            raise error.__cause__ from None
        raise
    return reached


@_with_keywords
def run(
    step: Step,
    state: TrainState,
    loaders: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    items: int | None = None,
    hooks: Sequence[HookFn] | None = None,
    evaluate_every: Moments = every(epochs=1),
    record_every: Trigger | None = None,
    prefetch: int = 1,
    phase: str | None = None,
) -> Iterator[TrainState]:
    """Train as :func:`fit` does, yielding the state after every epoch and at the end.

    Args:
        step, state, loaders, epochs, steps, items: as in :func:`fit`.
        hooks, evaluate_every, record_every, prefetch, phase: as in :func:`fit`.

    Returns:
        An iterator of states. Each belongs to the run until the next is requested: evaluate it,
        take a snapshot, or leave the loop.

    Raises:
        StaleStateError, TypeError, ValueError: as :func:`fit`, at once.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 2
        >>> [s.model.w.item() for s in run(step, toy(), batches, epochs=3, hooks=())]
        [-2.0, -4.0, -6.0]
    """
    plan = Plan.of(
        step, state, loaders, epochs, steps, hooks, evaluate_every, record_every, prefetch, phase,
        items,
    )  # fmt: skip
    check_may_begin(state)
    return _noting(fold(plan, state))


def _noting(states: Generator[TrainState]) -> Iterator[TrainState]:
    """Yield the states of a run. Note if it was interrupted."""
    __tracebackhide__ = True
    with contextlib.closing(states):
        for state in states:
            note_interruption(state)
            yield state


def train(plan: Plan, state: TrainState) -> TrainState:
    """Carry out a plan, but let Ctrl-C and signals end the program as they usually do."""
    __tracebackhide__ = True
    reached = state
    for reached in fold(plan, state, Interrupts(is_alone(state))):  # noqa: B007
        pass
    if reached.stop == INTERRUPTED:
        raise KeyboardInterrupt
    return reached
