"""Runs: a fold of a step over batches. The story, top to bottom.

    position the generators -> step -> fetch the next window -> epoch over? -> evaluate, if due -> record -> hooks

The next window is fetched while the device still works on the step, and tells whether the epoch is over. A boundary
is the moment after an update; hooks and evaluation happen there and nowhere else. A run always has a consistent state
to continue from: that before the update, that before the boundary until its record is there, and then that of each
hook; but for an update that fails while the optimizer changes the weights.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from fnloop._backend.collectives import is_lost
from fnloop._backend.launch import Backend
from fnloop._backend.watchdog import ADVICE, DIVERGED, verdict
from fnloop._core.history import Record
from fnloop._core.metrics import Max, read
from fnloop._core.monitor import check_names
from fnloop._core.rng import COMPUTE, alone, fold_in, isolated, mix, positioner, seed_host
from fnloop._core.state import (
    EPOCH,
    PENDING,
    RECORD,
    UPDATE,
    RunInfo,
    TrainState,
    check_not_stale,
    detached_from_run,
    invalidate_parameter_cache,
    is_half_updated,
    newest,
    owns_handles,
)
from fnloop._core.types import name_of
from fnloop._data.loaders import Loaders, read_loaders, sharded
from fnloop._data.prefetch import windows
from fnloop._data.source import Source, num_updates
from fnloop._data.window import END
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.early_stop import halt_on_nonfinite
from fnloop._hooks.progress import progress
from fnloop._hooks.triggers import ConditionalHook, Hook, every, once
from fnloop._hooks.wrapper import layers
from fnloop._loop.consensus import Consensus
from fnloop._loop.evaluate import READ_ONCE, check_step, measure, open_loader
from fnloop._loop.hints import suggest_fused
from fnloop._loop.interrupts import INTERRUPTED, TERMINATED, Interrupts, handling
from fnloop._step.engine import engine_of
from fnloop._step.layers import STEP
from fnloop._step.pipeline import PipelineStep
from fnloop._step.update import consume

__all__ = ["fit", "run"]

LOADER = "the training loader"
_LOST = (
    "another process has ended or stopped by itself: its own traceback says why. If it has none, a hook or a loader there "
    "decided by what only it knew: decide by the history, by counters, or by fnloop.reduce(...)"
)


def fit(
    step: PipelineStep,
    state: TrainState,
    loaders: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hooks: Sequence[Hook] | None = None,
    evaluate_every: Any = every(epochs=1),
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
    checked = _checked(step, state, loaders, epochs, steps, hooks, evaluate_every, prefetch)
    try:
        with alone(), handling(state.backend.world_size == 1) as signals:  # between two epochs too
            for state in _run(*checked, signals=signals):  # noqa: B007
                pass
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration) and hasattr(error.__cause__, "__notes__"):
            raise error.__cause__ from None  # Python turns a StopIteration that leaves a generator into a RuntimeError
        raise
    return state


def run(
    step: PipelineStep,
    state: TrainState,
    loaders: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hooks: Sequence[Hook] | None = None,
    evaluate_every: Any = every(epochs=1),
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
    return _run(*_checked(step, state, loaders, epochs, steps, hooks, evaluate_every, prefetch))


def _checked(
    step: PipelineStep,
    state: TrainState,
    loaders: Any,
    epochs: Any,
    steps: Any,
    hooks: Any,
    evaluate_every: Any,
    prefetch: Any,
) -> Any:
    """Return the arguments of a run, having checked them."""
    check_step(step, "fit")
    check_not_stale(state, "fit")
    found = read_loaders(loaders)
    for name, target in (("epochs", epochs), ("steps", steps)):
        if target is not None:
            checks.integer(
                "fit", name, target, f"the target for state.{name[:-1]}, or None", least=0
            )
    checks.integer("fit", "prefetch", prefetch, "the windows that are fetched ahead")
    hooks = _check_hooks((progress(), halt_on_nonfinite()) if hooks is None else hooks)
    if evaluate_every is not None and (
        isinstance(evaluate_every, type) or not hasattr(evaluate_every, "due")
    ):
        raise TypeError(
            "fit expects evaluate_every as every(epochs=1), every(steps=100), when(predicate) or None; "
            f"got {checks.described(evaluate_every)}"
        )
    if epochs is None and steps is None:
        epochs = state.epoch + 1
    return step, state, found, epochs, steps, hooks, evaluate_every, prefetch


def _run(
    step: PipelineStep,
    state: TrainState,
    loaders: Loaders,
    epochs: int | None,
    steps: int | None,
    hooks: Sequence[Hook],
    evaluate_every: Any,
    prefetch: int,
    signals: Interrupts | None = None,
) -> Iterator[TrainState]:
    __tracebackhide__ = True
    if state.stop in (INTERRUPTED, TERMINATED):
        state = attrs.evolve(state, stop=None)
    if (state.stop is not None or _reached(state, epochs, steps)) and PENDING not in state.events:
        _warn(state, _nothing_to_do(state, epochs, steps))
        for hook in hooks:
            if hasattr(hook, "settle"):
                hook.settle(state)  # type: ignore[attr-defined]
        yield state
        return

    run = _Run(step, state, loaders, epochs, steps, hooks, evaluate_every)
    train, window, device, processes = (
        step.train,
        step.window,
        state.backend.device,
        state.backend.world_size,
    )
    source, batch_size, position = run.source, run.source.batch_size or 0, positioner(device)
    try:
        while True:
            with (
                isolated(device),
                contextlib.nullcontext(signals)
                if signals
                else handling(processes == 1) as run.caught,
            ):
                state = run.begin_epoch()
                seed = fold_in(state.seed, COMPUTE, state.epoch)
                try:
                    feed = windows(
                        source, window, device, state.epoch, state.batch, state.samples, prefetch
                    )
                    batch: Any = next(feed, END)
                    over = run.enter(seed, batch is END)
                    while not over:
                        state = run.state
                        position(mix(seed, state.batch))
                        run.where, run.batches = (
                            None,
                            processes if window == 1 else processes * len(batch),
                        )
                        batch = engine_of(state).take(state, batch, source, window)
                        new, out = train(state, batch)
                        run.state = consume(new, out, run.batches, run.batches * batch_size)
                        run.where, run.before_record = LOADER, True
                        batch = next(feed, END)
                        over = run.boundary(batch is END)
                    run.leave(batch is END)
                except BaseException as error:
                    if not run.survives(error):
                        raise
                reached = detached_from_run(run.state)
            if not run.went_back or run.is_over():
                yield reached
                check_not_stale(reached)  # whoever got it may have used it up
            if run.is_over():
                return
            run.state = attrs.evolve(reached, run=run.info)
    finally:
        _close(hooks)


class _Run:
    """A run: the state that it has reached, and what happens at its boundaries.

    ``state`` is always a consistent one, to continue from if something raises: during an update the one before it, and at a
    boundary the one before the boundary, until the record has been appended.
    """

    def __init__(
        self,
        step: PipelineStep,
        state: TrainState,
        loaders: Loaders,
        epochs: int | None,
        steps: int | None,
        hooks: Sequence[Hook],
        evaluate_every: Any,
    ) -> None:
        __tracebackhide__ = True
        backend = state.backend
        self.step, self.hooks, self.evaluate_every, self.epochs, self.steps = (
            step,
            hooks,
            evaluate_every,
            epochs,
            steps,
        )
        if (
            isinstance(loaders.train, sharded)
            and state.batch
            and state._lease.saved_on not in (None, backend.world_size)
        ):
            raise ValueError(
                f"the checkpoint is one of {state._lease.saved_on} processes in the middle of an epoch, and "
                f"{backend.world_size} have other shares of a sharded loader: go on with as many as it was made by, or from "
                "the end of an epoch"
            )
        self.source = open_loader(loaders.train, state)
        evaluated = {name: open_loader(loader, state) for name, loader in loaders.evaluated.items()}
        self.evaluated = {} if evaluate_every is None else evaluated
        self.info = _run_info(
            state,
            self.source,
            step.window * backend.world_size,
            epochs,
            steps,
            tuple(self.evaluated),
        )
        every_hook = [layer for hook in hooks for layer in layers(hook)]
        _check_names([hook.slot for hook in every_hook if isinstance(hook, once)])
        _check_folders([hook.folder for hook in every_hook if isinstance(hook, checkpoint)])
        check_names(every_hook, self.info.evaluated)
        if evaluate_every is not None and hasattr(evaluate_every, "check"):
            evaluate_every.check(self.info)
        self.is_due = evaluate_every.due if evaluate_every is not None else lambda state: False
        self.last_step = math.inf if steps is None else steps
        self.caught = Interrupts()
        self.where: Any = (
            None  # what is going on, unless it is the step, whose layers say it themselves
        )
        self.batches = 0  # that the step takes
        self.in_epoch = 0  # batches of the epoch that has ended
        self.before_record = self.went_back = False
        self.state = self._begun(attrs.evolve(state, run=self.info))
        self.council = Consensus(self.state) if backend.world_size > 1 else None
        self.started = time.monotonic() - (state.history[-1].seconds if len(state.history) else 0.0)

    def _begun(self, state: TrainState) -> TrainState:
        """Return the state with which the run begins."""
        __tracebackhide__ = True
        for hook in self.hooks:
            if hasattr(hook, "begin"):
                state = _checked_state(hook, hook.begin(state))  # type: ignore[attr-defined]
        if not state.model.training:
            _warn(
                state,
                "fit: the model was in evaluation mode as a whole; it is trained in training mode (model.train())",
            )
            state.model.train()
        invalidate_parameter_cache(state)
        engine_of(state).begin_run(state)
        suggest_fused(state.optimizer, state.backend.device)
        try:
            return self.step.init_slots(state)
        except Exception as error:
            _explain(error, state, self.step, "what a middleware keeps", state.batch)
            raise

    def is_over(self) -> bool:
        """Return whether the run is at its end."""
        return self.state.stop is not None or _reached(self.state, self.epochs, self.steps)

    def begin_epoch(self) -> TrainState:
        """Return the state with which the next epoch begins, or the running one continues."""
        events, self.where, self.went_back = self.state.events, LOADER, False
        self.state = attrs.evolve(
            self.state, events=events & {UPDATE, PENDING} if PENDING in events else frozenset()
        )
        return self.state

    def enter(self, seed: int, ended: bool) -> bool:
        """Install the generators, after the first fetch. Return whether the epoch, or the run, is over at once.

        Args:
            seed: what the draws of the epoch are a function of.
            ended: whether there was no batch left.
        """
        __tracebackhide__ = True
        state = self.state
        if ended and not state.batch:
            raise ValueError(_no_batches(state, self.source))
        # What is kept of the middle of an epoch was there after this same fetch.
        state.generators.install() if state.generators else seed_host(
            mix(_own_seed(seed, state.backend), state.batch)
        )
        self.state = attrs.evolve(state, events=state.events - {PENDING})
        return (ended or PENDING in state.events) and self.boundary(ended)

    def boundary(self, ended: bool) -> bool:
        """Evaluate and record, if that is due, and call the hooks. Return whether the epoch, or the run, is over."""
        __tracebackhide__ = True
        state, caught = self.state, self.caught
        self.where, self.before_record = self.evaluate_every or "the record", True
        if ended:
            self.in_epoch = state.batch
            events = state.events | {EPOCH}
            state = attrs.evolve(
                state, epoch=state.epoch + 1, batch=0, samples=0, metrics={}, events=events
            )
        due = self.is_due(state)
        closing = not (due or ended) and state.step >= self.last_step and caught.stop is None
        if due or ended or closing:
            state = self._recorded(state, evaluate=due or closing, closing=closing)
        elif (
            state.step >= self.last_step
        ):  # a signal came during the last update: the record is made by the run that continues
            state = attrs.evolve(state, events=state.events | {PENDING})
        if ended:
            state._lease.saved_on = None
        self.state, self.before_record = state, False
        if self.council is not None:
            self.where = "the agreement of all processes"
            self.council.meet(state, caught)
        self.state = before = caught.heard(state)
        for hook in self.hooks:
            self.where = hook
            self.state = _call_hook(hook, self.state)
        state = caught.heard(self.state)
        if caught.save:
            state, caught.save = flush_hooks(self.hooks, state), False
        self.went_back = state.model is not before.model  # to a snapshot: the data have to follow
        if state.run is None:
            state = attrs.evolve(state, run=self.info)
        if state.slots is not before.slots:  # they may be a checkpoint's
            state = self.step.init_slots(state)
        self.state = state
        return ended or self.went_back or state.stop is not None or state.step >= self.last_step

    def leave(self, ended: bool) -> None:
        """End an epoch, or what was run of it; and the run, if it is over."""
        __tracebackhide__ = True
        if self.council is not None:
            self.where = "the agreement of all processes"
            self.council.close(self.state, self.caught, self.source.order if ended else 0)
            self.state = self.caught.heard(self.state)
        if (
            self.state.stop not in (None, INTERRUPTED, TERMINATED)
            and RECORD not in self.state.events
        ):
            self.before_record = True
            self.state = self._recorded(self.state, evaluate=True, closing=True)
            self.before_record = False
        if self.caught.save or self.is_over():
            self.where = "the end"
            self.state, self.caught.save = flush_hooks(self.hooks, self.state), False

    def _recorded(self, state: TrainState, *, evaluate: bool, closing: bool) -> TrainState:
        """Return the state with a record: the metrics of the epoch until now, and those of the loaders to evaluate."""
        __tracebackhide__ = True
        metrics = self.state.metrics
        names = sorted(
            metrics, key=lambda name: name != "loss"
        )  # the loss first, then as they came
        report = {f"train/{name}": metrics[name] for name in names}
        for loader, source in self.evaluated.items() if evaluate else ():
            self.where = loader
            with isolated(state.backend.device):
                found = measure(self.step, state, source)
            report.update({f"{loader}/{name}": metric for name, metric in found.items()})
        self.where = "the record"
        known = state.history[-1].seconds if len(state.history) else 0.0
        seconds = max(time.monotonic() - self.started, known)  # a clock may be set back
        values = read(engine_of(state).reduce_report({**report, "seconds": Max(seconds)}, "train/"))
        seconds = values.pop("seconds")
        history = state.history.append(Record(state.epoch, state.step, values, seconds, closing))
        return attrs.evolve(state, history=history, events=state.events | {RECORD})

    def survives(self, error: BaseException) -> bool:
        """Return whether the run ends as it would without this error; if not, say in it where it happened."""
        __tracebackhide__ = True
        state, where, caught = self.state, self.where, self.caught
        made = (
            newest(state, self.batches, self.batches * (self.source.batch_size or 0))
            if where is None
            else state
        )
        if made is not state:
            state = attrs.evolve(made, events=made.events | {PENDING})
        elif where is not None and self.before_record:
            state = attrs.evolve(state, events=state.events | {PENDING})
        alone = (
            self.council is None
        )  # else the others do not know of it: the process ends, and they with it
        interrupted = (
            isinstance(error, KeyboardInterrupt) and caught.stop is None and owns_handles(state)
        )
        # Workers die of the signal that stops the run: then there is no next batch, and none is needed.
        loading = (
            isinstance(where, str)
            and where in (LOADER, *self.evaluated)
            and self.step.layer_of(error) == STEP
        )
        starved = isinstance(error, Exception) and caught.stop is not None and loading
        if not (alone and (interrupted or starved)):
            last = _explain(
                error,
                state,
                self.step,
                where,
                self.in_epoch if EPOCH in state.events else state.batch,
            )
            if made is not self.state and last is not None:
                error.add_note(
                    "the update was applied before this; what middleware around it do after it may be missing"
                )
            elif alone and isinstance(error, Exception) and last is not None:
                _tell_hooks(self.hooks, last, error)
            return False
        caught.done, self.went_back = True, False
        self.state = flush_hooks(
            self.hooks, attrs.evolve(state, stop=state.stop or caught.stop or INTERRUPTED)
        )
        return True


# --- the parts of a run


def _reached(state: TrainState, epochs: int | None, steps: int | None) -> bool:
    return (epochs is not None and state.epoch >= epochs) or (
        steps is not None and state.step >= steps
    )


def _run_info(
    state: TrainState,
    source: Source,
    window: int,
    epochs: int | None,
    steps: int | None,
    evaluated: tuple[str, ...],
) -> RunInfo:
    per_epoch = num_updates(source.length, window)
    total = steps
    if epochs is not None and per_epoch is not None:
        of_this_epoch = num_updates(source.left(state.batch, state.samples), window) or 0
        left = of_this_epoch + (epochs - state.epoch - 1) * per_epoch
        total = (
            state.step + state.skipped + left
        )  # as if nothing had been skipped: the same total when it is resumed
        total = total if steps is None else min(total, steps)
    return RunInfo(epochs, total, per_epoch, source.length, window, evaluated)


def _warn(state: TrainState, message: str) -> None:
    if state.backend.main:
        log.warning(message)


def _own_seed(seed: int, backend: Backend) -> int:
    """Return the seed of this process's own draws: of dropout, say."""
    return fold_in(seed, backend.rank) if backend.rank else seed


def _call_hook(hook: Hook, state: TrainState) -> TrainState:
    __tracebackhide__ = True
    return _checked_state(hook, hook(state))


def _checked_state(hook: Hook, new: Any) -> TrainState:
    __tracebackhide__ = True
    if isinstance(new, TrainState):
        check_not_stale(new)
    else:
        raise TypeError(
            f"a hook takes a state and returns one, but {name_of(hook)} returned {new!r:.60}. Did you forget 'return state'?"
        )
    return new


def flush_hooks(hooks: Sequence[Hook], state: TrainState) -> TrainState:
    """Let the hooks that keep something finish it: at the end of a run, and on SIGUSR1."""
    for hook in hooks:
        if hasattr(hook, "flush"):
            state = hook.flush(state)  # type: ignore[attr-defined]
    return state


def _close(hooks: Sequence[Hook]) -> None:
    """Close all hooks, whatever goes wrong with one."""
    __tracebackhide__ = True
    with contextlib.ExitStack() as stack:
        for hook in reversed(hooks):
            if hasattr(hook, "close"):
                stack.callback(hook.close)  # type: ignore[attr-defined]


def _explain(
    error: BaseException, state: TrainState, step: PipelineStep, where: Any, batch: int
) -> TrainState | None:
    """Say where in the run an exception happened, and attach the last consistent state; return it, if there is one."""
    layer = step.layer_of(error)
    if where is None:
        step.explain(error)
        where = f"{layer}, train"
    elif state.run is not None and where in state.run.evaluated:
        where = f"{layer}, {where}" if layer != STEP else f"the {where} loader"
    else:
        where = f"{name_of(where) if callable(where) else where}, train"
    epoch = state.epoch + (EPOCH not in state.events)  # the one that is running, or has just ended
    error.add_note(f"while in {where}, epoch {epoch}, batch {batch}, step {state.step}")
    if state.backend.world_size > 1 and is_lost(error):
        found = verdict()
        error.add_note(f"{DIVERGED}: {found}. {ADVICE}" if found else _LOST)
    if is_half_updated(state):
        error.add_note(
            "the optimizer was changing the weights: they are between two updates, so this exception has no attribute state. "
            "Go back to a checkpoint or to a snapshot"
        )
    if not owns_handles(state):
        return None
    state = detached_from_run(state)
    with contextlib.suppress(AttributeError):
        error.state = state  # type: ignore[attr-defined]
    return state


def _tell_hooks(hooks: Sequence[Hook], state: TrainState, error: Exception) -> None:
    """Tell the hooks that want to know it that the run has failed."""
    for hook in hooks:
        try:
            if hasattr(hook, "failed"):
                hook.failed(state, error)
        except Exception as another:
            error.add_note(f"then {name_of(hook)} failed too: {type(another).__name__}: {another}")


def _no_batches(state: TrainState, source: Source) -> str:
    why = ""
    if source.drop_last and source.batch_size:
        together = (
            f"{source.batch_size} × {source.processes} processes"
            if source.processes > 1
            else f"{source.batch_size}"
        )
        why = f" It has {source.samples} samples, and with drop_last an update takes {together}: make batches smaller."
    elif state.epoch:
        why = READ_ONCE
    return f"the training loader gave no batch in epoch {state.epoch + 1}.{why}"


def _nothing_to_do(state: TrainState, epochs: int | None, steps: int | None) -> str:
    if state.stop is not None:
        return f"fit: nothing to do: the run was stopped ({state.stop}). To continue, pass attrs.evolve(state, stop=None)"
    targets = [
        f"{name}={target}"
        for name, target in (("epochs", epochs), ("steps", steps))
        if target is not None
    ]
    return (
        f"fit: nothing to do: the state is at epoch {state.epoch}, step {state.step}, and the target is {', '.join(targets)}. "
        "Targets are absolute: pass a larger one to continue"
    )


def _check_names(slots: list[str]) -> None:
    for slot in slots:
        if slots.count(slot) > 1:
            raise ValueError(
                f"two hooks would be remembered as {slot!r}, and one of them never run: once(hook, name=...)"
            )


def _check_folders(folders: list[Any]) -> None:
    found = [os.path.realpath(folder) for folder in folders]
    for folder, place in zip(folders, found, strict=True):
        if found.count(place) > 1:
            raise ValueError(
                f"two checkpoint hooks share {folder}, and would remove each other's: give each its own folder"
            )


def _check_hooks(hooks: Any) -> tuple[Hook, ...]:
    if callable(hooks) or isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        raise TypeError(
            f"fit expects hooks as a tuple, such as hooks=(progress(), early_stop(...)); got {checks.described(hooks)}"
        )
    for hook in hooks:
        if isinstance(hook, type | torch.nn.Module) or not callable(hook):
            call = f" Call it: {hook.__name__}(...)" if isinstance(hook, type) else ""
            raise TypeError(f"a hook is a function state -> state; got {name_of(hook)}.{call}")
        if hasattr(hook, "due") and not isinstance(hook, ConditionalHook):
            raise TypeError(f"{hook!r} says when, but not what: write {hook!r}(hook)")
        with contextlib.suppress(ValueError):  # a builtin without a signature
            try:
                inspect.signature(hook).bind(None)
            except TypeError as error:
                raise TypeError(
                    f"a hook takes the state and nothing else, but {name_of(hook)} takes {inspect.signature(hook)}"
                ) from error
    return tuple(hooks)
