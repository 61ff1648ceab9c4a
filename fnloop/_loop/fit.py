"""``fit`` and ``run``: train until a target is reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fnloop._core.rng import reserved_generators
from fnloop._core.state import TrainState
from fnloop._hooks.triggers import Trigger, every
from fnloop._hooks.wrapper import Hook
from fnloop._loop.epochs import train_epochs
from fnloop._loop.interrupts import handling
from fnloop._loop.peers import is_alone
from fnloop._loop.plan import make_plan
from fnloop._step.pipeline import PipelineStep

__all__ = ["fit", "run"]


def fit(
    step: PipelineStep,
    state: TrainState,
    loaders: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hooks: Sequence[Hook] | None = None,
    evaluate_every: Trigger | None = every(epochs=1),
    prefetch: int = 1,
) -> TrainState:
    """Train: fold a step over batches until a target is reached.

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state; use what ``fit`` returns from here on.
        loaders: a mapping with "train" and any others, each of which is evaluated and gives the prefix of its
            metrics; a pair ``(train, valid)``; or one iterable of batches. A loader is a DataLoader, a list, any
            other iterable, or a function that returns one. The order of a shuffling map-style DataLoader is a
            function of (seed, epoch).
        epochs: train until ``state.epoch`` is this; absolute, so that a second call with it does nothing.
        steps: train until ``state.step`` is this; absolute. The smaller of the two wins. With neither, one pass: to
            the end of the running epoch, or one epoch more.
        hooks: functions ``state -> state``, called in this order after every update (and the evaluation there, if
            one is due); ``every(epochs=1)(hook)`` makes one rarer. None is ``(progress(), halt_on_nonfinite())``.
        evaluate_every: when to evaluate the other loaders: ``every(epochs=1)``, ``every(steps=100)``,
            ``when(predicate)``, or None for never. A record is appended to the history then, and at every end of an
            epoch; its "train/..." metrics are the means since the epoch began. Where the run ends between two records, at its
            target or because a hook stops it, a closing record is appended, with an evaluation unless that is never.
        prefetch: how many windows of batches are fetched, and copied to the device, ahead of the one that is worked on. It
            changes no number.

    Returns:
        The state reached. ``state.stop`` says why, if that is before the target: a hook's reason, or "interrupted"
        after Ctrl-C, which ends the run after the running update. The model keeps its training flags, except that
        one in evaluation mode as a whole is put into training mode.

    Raises:
        StaleStateError: the state has been advanced already.
        TypeError, ValueError: an argument is not what it should be.
        KeyError: a hook watches a metric of a loader that this run neither trains on nor evaluates.
        RuntimeError: another thread is in a ``fit``, ``run``, ``evaluate`` or ``predict``.
        Exception: whatever the loss function, a loader or a hook raises, with a note of where in the run it happened,
            and with the last consistent state as its attribute ``state``. There is none if ``optimizer.step()`` has
            failed, which leaves weights between two updates.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0, 5.0)]
        >>> state = fit(fl.pipeline(fl.accumulate(2))(toy_loss), toy(lr=1.0), batches, hooks=())
        >>> state.model.w.item(), state.step, state.epoch           # 1.5 + 3.5 + 5
        (-10.0, 3, 1)
    """
    __tracebackhide__ = True
    plan = make_plan(step, state, loaders, epochs, steps, hooks, evaluate_every, prefetch)
    try:
        with (
            reserved_generators(),
            handling(is_alone(state)) as interrupts,
        ):  # between two epochs too
            reached = state
            for reached in train_epochs(plan, state, interrupts):  # noqa: B007
                pass
    except RuntimeError as error:
        # Python turns a StopIteration that leaves a generator into a RuntimeError.
        if isinstance(error.__cause__, StopIteration) and hasattr(error.__cause__, "__notes__"):
            raise error.__cause__ from None
        raise
    return reached


def run(
    step: PipelineStep,
    state: TrainState,
    loaders: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hooks: Sequence[Hook] | None = None,
    evaluate_every: Trigger | None = every(epochs=1),
    prefetch: int = 1,
) -> Iterator[TrainState]:
    """Train as :func:`fit` does, yielding the state after every epoch and at the end.

    Args:
        step, state, loaders, epochs, steps, hooks, evaluate_every, prefetch: as in :func:`fit`.

    Returns:
        An iterator of states. Each belongs to the run until the next is asked for: evaluate it, snapshot it, or leave.

    Raises:
        StaleStateError, TypeError, ValueError: as :func:`fit`, at once.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> [s.model.w.item() for s in run(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 2, epochs=3, hooks=())]
        [-2.0, -4.0, -6.0]
    """
    plan = make_plan(step, state, loaders, epochs, steps, hooks, evaluate_every, prefetch)
    return train_epochs(plan, state)
