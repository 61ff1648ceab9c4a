"""``fit`` and ``run``: train until a target is reached."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from fnloop._core.rng import reserved_generators
from fnloop._core.state import TrainState
from fnloop._core.types import Step
from fnloop._display.checks import describe, join_names, no_argument, notes_of
from fnloop._display.frames import leave_out_frames, short_traceback
from fnloop._hooks.hook import HookFn, Trigger, every
from fnloop._loop.boundary import Moments
from fnloop._loop.peers import (
    check_may_begin,
    forget_interruption,
    handling,
    is_alone,
    note_interruption,
)
from fnloop._loop.plan import Plan
from fnloop._loop.run import fold

P = ParamSpec("P")
T = TypeVar("T")


# What others call it, and what to write here.
_ELSEWHERE = {
    name: write
    for names, write in {
        "max_epochs num_epochs n_epochs nb_epoch": "epochs=...",
        "max_steps num_steps total_steps iterations": "steps=...",
        "loader train_loader train_dataloader train_dataloaders dataloader data": (
            "fit(step, state, loaders)"
        ),
        "val_loader valid_loader val_dataloaders validation_data valid": (
            "fit(step, state, (train, valid))"
        ),
        "callbacks": "hooks=(progress(), ...)",
        "patience": 'hooks=(early_stop("valid/loss", patience=3), progress())',
        "lr_scheduler scheduler": "schedule(cosine()) in the pipeline",
        "clip gradient_clip_val max_grad_norm": "clip(1.0) in the pipeline",
        "accumulate_grad_batches gradient_accumulation_steps": "accumulate(4) in the pipeline",
        "precision mixed_precision fp16 bf16": 'amp("bf16") in the pipeline',
        "metrics metric": "metric(accuracy=fn) in the pipeline",
        "model optimizer seed": "state = TrainState.create(model, optimizer, seed=0)",
        "loss_fn criterion": "step = pipeline()(loss_fn)",
        "ckpt_path resume_from_checkpoint": "state = resume(folder, state)",
        "check_val_every_n_epoch eval_every": "evaluate_every=every(epochs=2)",
        "log_every_n_steps logging_steps": "record_every=every(steps=50)",
    }.items()
    for name in names.split()
}


def _with_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``fit`` or ``run``, which says what to write for arguments that it does not take."""
    name, signature = function.__name__, inspect.signature(function)
    first = [*signature.parameters][:3]

    @short_traceback
    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        if len(args) > 3:
            number = args[3]
            wanted = f"epochs={number}" if type(number) is int else "epochs=3"
            raise TypeError(
                f"{name} takes (step, state, loaders), and the rest by name: write {name}(step, "
                f"state, loaders, {wanted}); got {describe(number)} as a fourth argument"
            )
        for wrong in kwargs.keys() - signature.parameters.keys():
            write = _ELSEWHERE.get(wrong, "")
            if write.endswith("=..."):
                write = f"{write[:-3]}{describe(kwargs[wrong])}"
            no_argument(name, wrong, signature.parameters, f". Write {write}" if write else "")
        if missing := [each for each in first[len(args) :] if each not in kwargs]:
            raise TypeError(
                f"{name} lacks {join_names(missing)}: write state = {name}(step, state, loaders); "
                f"got {', '.join(map(describe, args)) or 'no argument'}"
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

    ``fit`` calls the step on one batch after another. Between updates it calls the hooks, and at
    the end of each epoch it evaluates. Always write ``state = fit(step, state, ...)``: only the
    state that it returns can be used afterwards.

    Example:
        >>> import torch
        >>> import fnloop as fl
        >>> x = torch.linspace(-1, 1, 64)[:, None]
        >>> train = valid = [(x, 3 * x)]                 # or a DataLoader
        >>> model = torch.nn.Linear(1, 1)
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> step = fl.pipeline(fl.clip(10.0))(fl.supervised(torch.nn.MSELoss()))
        >>> state = fl.fit(step, state, {"train": train, "valid": valid}, epochs=50, hooks=())
        >>> state.epoch, round(state.model.weight.item(), 2)
        (50, 3.0)
        >>> len(state.history["valid/loss"])             # one evaluation for each epoch
        50

    Args:
        step: what ``pipeline(...)(loss_fn)`` returns.
        state: the newest state.
        loaders: a mapping such as ``{"train": train, "valid": valid}``, a pair ``(train, valid)``,
            or one iterable of batches. Every loader except "train" is used for validation.
        epochs: train until ``state.epoch`` is this number.
        steps: train until ``state.step``, the number of updates, is this number.
        items: train until ``state.items`` has reached this number of samples or tokens.
        hooks: functions ``state -> state``, called in this order after every update. None means
            ``(progress(), halt_on_nonfinite())``.
        evaluate_every: when to evaluate: ``every(epochs=1)``, ``every(steps=100)``,
            ``when(predicate)``, ``at_start()``, ``at_end()``, a combination such as
            ``every(epochs=2) | at_end()``, or None for never. A mapping gives each loader its own.
        record_every: when to make additional records: ``every(steps=50)``, ``every(seconds=10)``.
        prefetch: how many windows of batches to fetch, and copy to the device, ahead of the current
            one. The result is the same, unless the loader uses the model. With 1, a batch is
            fetched after the previous update.
        phase: name of this phase. Targets and schedules then count from where it began.

    Targets:
        ``epochs``, ``steps`` and ``items`` count from the beginning of the run or its phase: a
        second call with the same number trains no further. If several are given, the run ends at
        the first that is reached. With none, ``fit`` trains for the rest of the current epoch, or
        for one more epoch.

        ``items`` counts samples, or tokens if the loss function returns their number as
        ``aux["weight"]``, over all processes. The run ends with the update that reaches the target.
        If weights are tensors, it ends one update later, because no update waits for the device.
        This holds after a resume too, and on any number of processes. The number of updates is not
        known beforehand: see ``schedule(fn, by="items")``.

    Loaders:
        A loader is a DataLoader, a list, any other iterable, or a function that returns one. The
        function may take ``(epoch, batch)``, the position at which to begin. The name of a loader
        is the prefix of its metrics. Rows of tensors, arrays and tables are read a batch at a time.

        A loader with ``state_dict`` and ``load_state_dict``, such as torchdata's
        ``StatefulDataLoader``, resumes mid-epoch without reading anything twice. So does a dataset
        with these methods, such as Hugging Face's, in a DataLoader without workers. Other streams
        are read again up to the next batch. Generators that are attributes of a sampler or a loader
        are restored. If the order still differs, or the data have another length, a warning says
        so. ``in_order=False`` of a DataLoader has no effect. A loader that refills one buffer is
        refused where two of its batches would be held.

    Hooks:
        A hook is called after every update, and after the evaluation if one is due.
        ``every(epochs=1)(hook)`` calls it less often. A hook ends the run by returning
        ``attrs.evolve(state, stop="why")``, and the epoch by ``ends="epoch"``. To continue such a
        run, pass ``attrs.evolve(state, stop=None)``. A hook that returns a snapshot of this run, or
        a state restored from a checkpoint of it, goes back to that point.

        Hooks are called in training mode. To call the model in a hook, write
        ``with fl.evaluating(state) as model:``. A hook may also have a method
        ``begin(state) -> state``. It is called before the first update of every run, also of a
        resumed one, and training starts with the state that it returns, for example with a frozen
        module.

    Evaluations and records:
        Each evaluation and each end of an epoch appends a record to the history. Its "train/..."
        metrics are means since the epoch began. "train/lr" is the learning rate of the last update;
        other parameter groups have "train/lr/1", or "train/lr/head" with ``"name": "head"``.

        If the run ends between two records, at its target or because a hook stops it, it appends a
        closing record, with an evaluation unless ``evaluate_every`` is None. Ctrl-C and signals
        make no closing record. An evaluation that is made only because the run ends, by
        ``at_end()``, is in a closing record too. If the run continues, closing records stay, and
        hooks such as ``early_stop`` ignore them.

        With ``record_every``, each record also has "recent/..." metrics: means since the previous
        record, weighted by the items of the batches. Records that only ``measure`` makes do not
        count. A record costs one read from the device. No record is made if every update since the
        last one was skipped.

    Phases:
        A phase begins with a new epoch. Without a target it is one epoch. Learning rates, and all
        else that a schedule, a scheduler of torch or ``plateau`` has set, start again from their
        initial values, or from what you have set them to since.

        ``state.phases`` lists the phases that have begun, so a script of several phases can be
        started again: it skips those that have ended, and continues the one that has not. The
        script must keep their order. A stop by a hook ends a phase. Ctrl-C and signals do not, and
        then the next phase is refused.

    Returns:
        The new state. If the run ended before its target, ``state.stop`` is the reason: that of a
        hook, or "interrupted" after Ctrl-C, or "SIGTERM". Both stop the run after the current
        update, and abandon an evaluation, which the continued run makes. No other run begins in
        this process after a signal: see SystemExit below. Modules keep their training modes; a
        model that is in evaluation mode as a whole is put into training mode.

    Raises:
        StaleStateError: the state has been advanced already.
        TypeError, ValueError: an argument has the wrong type or value, or the phase is not the one
            that comes next. Also if only ``steps`` is given and all updates of two whole epochs in
            a row were skipped, so that the target would never be reached. An epoch in which fp16
            overflowed does not count.
        KeyError: a hook monitors a metric of a loader that this run neither trains on nor
            evaluates.
        RuntimeError: another thread is inside ``fit``, ``run``, ``evaluate`` or ``predict``.
        SystemExit: another run of this process was interrupted by SIGTERM (then the status is 143),
            SIGUSR1 or the end of its job's time, and this run might need its result. The same
            script, started again, continues both. The interrupted run, its snapshots and its
            checkpoints may continue, which lifts the refusal. ``evaluate`` and ``predict`` are not
            refused, and in an interactive session nothing is.
        KeyboardInterrupt: likewise, after Ctrl-C. Also after a second Ctrl-C, and with several
            processes.
        Exception: any exception of the loss function, a loader or a hook. A note says where in the
            run it happened, and its attribute ``state`` is the last consistent state. If an
            evaluation failed, a run that continues from it repeats the evaluation. If a hook
            failed, such a run calls this hook again and those after it, but not those before. An
            update that failed may have changed buffers of the model, such as the statistics of
            BatchNorm, and may have drawn from the generators of Python and NumPy. If
            ``optimizer.step()`` itself failed, the weights are between two updates, the states of
            the model are stale, and there is no such attribute. The traceback has your
            frames, and of fnloop only this call; with FNLOOP_TRACEBACK=full in the environment it
            has all.

    Notes:
        The order of a shuffling map-style DataLoader, the augmentation in its dataset and the
        random draws of torch are a function of (seed, epoch, position). They do not depend on the
        number of workers, on evaluation, or on where a run was resumed. What the loss function
        draws from the generators of Python and NumPy is the same after a resume too, unless the
        run switches between no workers and some. The global random state, which threads share, is
        restored after a run. A loader, sampler or stream with a generator of its own continues to
        draw from it in training, also after a resume. An evaluation puts it back, and so has the
        same batches each time.

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
        if isinstance(cause := error.__cause__, StopIteration) and notes_of(cause):
            raise cause from None
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
    try:
        with contextlib.closing(states):
            for state in states:  # all frames: FNLOOP_TRACEBACK=full
                note_interruption(state)
                try:
                    yield state
                except KeyboardInterrupt:  # thrown by a caller that says so itself
                    forget_interruption()
                    raise
    except BaseException as error:
        leave_out_frames(error)
        # Python makes this of a StopIteration that leaves a generator, as this is one.
        if type(error) is RuntimeError and isinstance(cause := error.__cause__, StopIteration):
            vars(error).update(vars(cause))  # the state, and the notes
        raise
