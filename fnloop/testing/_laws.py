"""The laws of the library as functions that raise an AssertionError."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import torch
from toolz import partition_all

from fnloop._core.middleware import Middleware
from fnloop._core.snapshot import snapshot
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._data.prefetch import windows
from fnloop._data.source import open_source
from fnloop._display import checks
from fnloop._hooks.triggers import every, when
from fnloop._loop.evaluate import evaluate, predict
from fnloop._loop.fit import fit
from fnloop._step.composition import total_in
from fnloop._step.pipeline import Pipeline, PipelineStep, pipeline
from fnloop.testing._compare import assert_equal, assert_same
from fnloop.testing._problems import Problem, small, stochastic
from fnloop.testing._spy import no_host_reads

__all__ = [
    "check_laws",
    "law_accumulation",
    "law_fold",
    "law_neutral",
    "law_no_host_reads",
    "law_purity",
    "law_skipped_updates",
]


def _check_arguments(law: str, pipe: object, problem: object) -> None:
    if not isinstance(pipe, Pipeline):
        raise TypeError(
            f"{law} expects pipe as what pipeline(...) returns; got {checks.describe(pipe)}"
        )
    checks.instance(law, "problem", problem, Problem, "a Problem, such as small()")


def _fit(pipe: Pipeline, problem: Problem, state: TrainState, **kwargs: Any) -> TrainState:
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    return fit(pipe(problem.loss_fn), state, loaders, **{"epochs": 2, "hooks": (), **kwargs})


def _window(step: PipelineStep, problem: Problem) -> int:
    total = total_in(step.pipeline.middleware)
    return open_source(list(problem.batches), 0, total=total).batches_in_update(step.window)


def law_fold(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a run stopped at any update and continued equals one never stopped, bit for bit.

    The stopped run has a closing record where it stopped, and the same records otherwise.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: it does not; the message says at which update.

    Example:
        >>> law_fold(pipeline(), small())
    """
    _check_arguments("law_fold", pipe, problem)
    window = _window(pipe(problem.loss_fn), problem)
    calls_in_epoch = math.ceil(len(problem.batches) / window)

    def calls(state: TrainState) -> int:  # each makes one update, or fewer
        return state.epoch * calls_in_epoch + math.ceil(state.batch / window)

    whole = _fit(pipe, problem, problem.state())
    for split in range(1, 2 * calls_in_epoch):
        pause = when(lambda state, split=split: calls(state) == split)(
            lambda state: attrs.evolve(state, stop="paused")
        )
        paused = _fit(pipe, problem, problem.state(), hooks=(pause,))
        assert calls(paused) == split, (
            f"law_fold: asked to stop at update {split}, stopped at {paused.step}"
        )
        resumed = _fit(pipe, problem, attrs.evolve(paused, stop=None))
        with _law(f"law_fold: stopped at update {split} of 2 epochs"):
            assert_same(resumed, whole)


def law_purity(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a run depends on its snapshot only, and changes nothing that it was given.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: it depends on or changes something else; the message says what.

    Example:
        >>> law_purity(pipeline(), stochastic())
    """
    _check_arguments("law_purity", pipe, problem)
    # A hook pauses after one epoch. With epochs=1, a schedule would see another length.
    pause = every(epochs=1)(lambda state: attrs.evolve(state, stop="paused"))
    paused = _fit(pipe, problem, problem.state(), hooks=(pause,))
    step, state = pipe(problem.loss_fn), attrs.evolve(paused, stop=None)
    before, again = snapshot(state), snapshot(state)
    generators = _generators()

    with _law("law_purity: evaluation and prediction change nothing"):
        modes = [m.training for m in state.model.modules()]
        first = evaluate(step, state, problem.batches)
        assert first == evaluate(step, state, problem.batches), "two evaluations differ"
        step.evaluate(state, problem.batches[0])
        list(predict(lambda model, batch: None, state, problem.batches))
        assert modes == [m.training for m in state.model.modules()], "training flags changed"
        assert_same(state, before)

    with _law("law_purity: the same snapshot gives the same run"):
        fields = ("step", "epoch", "batch", "skipped", "history", "stop", "events")
        facts = {name: getattr(state, name) for name in fields}
        one, two = _fit(pipe, problem, state), _fit(pipe, problem, again)
        assert_same(one, two)
        assert all(getattr(state, name) == value for name, value in facts.items()), (
            "a given record was changed"
        )
        assert generators == _generators(), "the caller's generators were not restored"


def law_neutral(neutral: Middleware, pipe: Pipeline, problem: Problem) -> None:
    """Assert that a middleware at its neutral setting changes nothing but its own slot.

    It is put first and last in a pipeline.

    Args:
        neutral: the middleware, such as ``accumulate(1)``.
        pipe: the pipeline that it is put into.
        problem: what to train.

    Raises:
        AssertionError: it changes something else; the message names the first difference.

    Example:
        >>> import fnloop as fl
        >>> law_neutral(fl.clip(float("inf")), pipeline(), small())
    """
    checks.instance(
        "law_neutral", "neutral", neutral, Middleware, "a middleware, such as accumulate(1)"
    )
    _check_arguments("law_neutral", pipe, problem)
    plain = _fit(pipe, problem, problem.state())
    for members in ((neutral, *pipe.middleware), (*pipe.middleware, neutral)):
        with _law(f"law_neutral: {pipeline(*members)!r}"):
            made = _fit(pipeline(*members), problem, problem.state())
            names = plain.history.keys()
            kept = [
                attrs.evolve(r, metrics={name: r.metrics[name] for name in names})
                for r in made.history
            ]
            # Without the slot of the neutral middleware.
            slots = {name: made.slots[name] for name in plain.slots if name in made.slots}
            assert_same(attrs.evolve(made, history=kept, slots=slots), plain)


def law_accumulation(
    pipe: Pipeline,
    problem: Problem,
    n: int,
    accumulate: Callable[[int], Middleware],
    rtol: float = 1e-12,
) -> None:
    """Assert that n accumulated batches make the update of one batch of all their items.

    The last window may be smaller.

    Args:
        pipe: the middleware listed after accumulate.
        problem: a problem without randomness, whose batches can be joined.
        n: batches per update.
        accumulate: the middleware's factory.
        rtol: relative tolerance.

    Raises:
        AssertionError: they do not, or the problem's batches cannot be joined.

    Example:
        >>> import fnloop as fl
        >>> law_accumulation(pipeline(), small(), 3, fl.accumulate)
    """
    _check_arguments("law_accumulation", pipe, problem)
    checks.integer("law_accumulation", "n", n, "the batches per update")
    checks.function(
        "law_accumulation", "accumulate", accumulate, "the factory of the middleware", 1
    )
    checks.number("law_accumulation", "rtol", rtol, "the relative tolerance", least=0)
    assert problem.cat is not None, "law_accumulation needs a problem with cat"
    joined = attrs.evolve(
        problem, batches=[problem.cat(part) for part in partition_all(n, problem.batches)]
    )
    parts = _fit(pipeline(accumulate(n), *pipe.middleware), problem, problem.state())
    wholes = fit(
        pipe(problem.loss_fn),
        problem.state(),
        {"train": joined.batches, "valid": problem.batches[:2]},
        epochs=2,
        hooks=(),
    )
    with _law(f"law_accumulation: {n} batches and one of all their items"):
        assert_same(parts, wholes, rtol=rtol)


def law_no_host_reads(pipe: Pipeline, problem: Problem) -> None:
    """Assert that no update reads a tensor to the host.

    The problem's optimizers must not read one either.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: an update reads one.

    Example:
        >>> import fnloop as fl
        >>> law_no_host_reads(pipeline(fl.clip(1.0)), small())
    """
    _check_arguments("law_no_host_reads", pipe, problem)
    step = pipe(problem.loss_fn)
    inner = step.train

    def guarded(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        with _law(f"law_no_host_reads: {step!r}"), no_host_reads():
            return inner(state, batch)

    step.train = guarded
    fit(step, problem.state(), problem.batches, epochs=1, hooks=())


def law_skipped_updates(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a skipped update advances only the position in the data.

    It advances no counter, no schedule, and no average. Every second window is skipped. The run
    must equal one of the same length in which those windows do not exist. The problem must be
    without randomness.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: it advances something else; the message says what.

    Example:
        >>> import fnloop as fl
        >>> law_skipped_updates(pipeline(fl.schedule(fl.schedules.linear())), small())
    """
    _check_arguments("law_skipped_updates", pipe, problem)
    step = pipe(problem.loss_fn)
    kept = [w for i, w in enumerate(_windows(step, problem)) if i % 2 == 0]
    batches = [batch for w in kept for batch in (w if step.window > 1 else (w,))]

    skipping = pipeline(
        *pipe.middleware, Middleware("skip every second", gradient=_skip_every_second)
    )
    one = fit(
        skipping(problem.loss_fn),
        problem.state(),
        problem.batches,
        epochs=1,
        steps=len(kept),
        hooks=(),
    )
    two = fit(step, problem.state(), batches, epochs=1, steps=len(kept), hooks=())
    with _law("law_skipped_updates"):
        assert one.skipped == len(kept) - 1, (
            f"{one.skipped} updates were skipped instead of {len(kept) - 1}"
        )
        assert_equal(one.model.state_dict(), two.model.state_dict(), "model", 0.0)
        assert_equal(one.optimizer, two.optimizer, "optimizer", 0.0)
        assert_equal(dict(one.slots), dict(two.slots), "slots", 0.0)
        assert one.step == two.step, f"step: {one.step} != {two.step}"
        assert one.updates == two.updates, f"updates: {one.updates} != {two.updates}"


def _windows(step: PipelineStep, problem: Problem) -> list[Batch]:
    window = None if step.window == 1 else _window(step, problem)
    return list(windows(open_source(list(problem.batches), 0), window, torch.device("cpu")))


def _skip_every_second(step: Step[TrainState]) -> Step[TrainState]:
    def skipping(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        state, out = step(state, batch)
        return state, attrs.evolve(out, skip="every second") if state.step > state.skipped else out

    return skipping


@contextlib.contextmanager
def _law(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def check_laws(pipe: Pipeline, problem: Problem | None = None) -> None:
    """Check every law that needs nothing but a pipeline.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train; :func:`small` and :func:`stochastic` by default.

    Raises:
        AssertionError: a law is broken; the message says which, and where.
        TypeError: ``pipe`` is not a pipeline.

    Example:
        >>> import fnloop as fl
        >>> check_laws(fl.pipeline(fl.clip(1.0), fl.schedule(fl.schedules.linear())))
    """
    if not isinstance(pipe, Pipeline):
        raise TypeError(
            f"check_laws expects what pipeline(...) returns; got {checks.describe(pipe)}. "
            "Write check_laws(pipeline(...))"
        )
    if problem is not None:
        checks.instance(
            "check_laws", "problem", problem, Problem, "a Problem, such as small(), or None"
        )
    for one in (small(), stochastic()) if problem is None else (problem,):
        law_fold(pipe, one)
        law_purity(pipe, one)
    one = small() if problem is None else problem
    law_no_host_reads(pipe, one)
    with contextlib.suppress(pickle.PicklingError, AttributeError):  # such as a lambda in a setting
        again = pickle.loads(pickle.dumps(pipe))
        assert again == pipe, "the pipeline is not the same after pickling"


def _generators() -> tuple[object, ...]:
    """Return the states of all global generators, in a form that can be compared."""
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return torch.get_rng_state().tolist(), name, keys.tolist(), rest, random.getstate()
