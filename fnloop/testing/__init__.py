"""For tests of your own middleware: a toy, a spy, a mode that forbids host reads, and the laws as functions.

    >>> import fnloop as fl
    >>> from fnloop.testing import check_laws
    >>> check_laws(fl.pipeline(fl.accumulate(2), fl.clip(1.0)))       # an AssertionError names the law that is broken

A middleware is tested by itself with a :func:`spy` in the place of the step that it wraps:

    >>> inner = spy(grad=4.0)
    >>> state, out = fl.clip(1.0).gradient(inner)(toy(), torch.ones(1))
    >>> round(state.model.w.grad.item(), 4), len(inner.calls)
    (1.0, 1)

The laws are those of the library's design; each is a function of a pipeline and a :class:`Problem`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from toolz import partition_all
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState, parameters, snapshot
from fnloop._core.types import Batch, LossFn, Output
from fnloop._data.prefetch import windows
from fnloop._data.source import open_source
from fnloop._display import checks
from fnloop._hooks.triggers import every, when
from fnloop._loop.evaluate import evaluate, predict
from fnloop._loop.fit import fit
from fnloop._step.pipeline import Pipeline, PipelineStep, pipeline

__all__ = [
    "HostReadError",
    "Problem",
    "Spy",
    "Toy",
    "assert_same",
    "check_laws",
    "law_accumulation",
    "law_fold",
    "law_neutral",
    "law_no_host_reads",
    "law_purity",
    "law_skipped_updates",
    "no_host_reads",
    "small",
    "spy",
    "stochastic",
    "toy",
    "toy_loss",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


# --- a toy and a spy


class Toy(nn.Module):
    """One parameter, ``w``; its output is ``w × x``.

    Args:
        w: what the parameter begins as.

    Example:
        >>> Toy(w=2.0)(torch.tensor(3.0)).item()
        6.0
    """

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        _check_number("Toy", "w", w)
        self.w = nn.Parameter(torch.tensor(float(w)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def toy(w: float = 0.0, lr: float = 1.0) -> TrainState:
    """Return the state of a toy model with plain SGD: an update with gradient g moves w by -lr × g.

    Args:
        w: the parameter.
        lr: the learning rate.

    Returns:
        A state at step 0.

    Example:
        >>> toy().model.w.item()
        0.0
    """
    _check_number("toy", "w", w)
    checks.number("toy", "lr", lr, "the learning rate", least=0)
    model = Toy(w)
    return TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr), seed=0)


def toy_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of ``w × x``: its gradient is the mean of x, whatever w is.

    Args:
        model: a :class:`Toy`.
        batch: x; shape=(n,).

    Returns:
        The loss, and ``{"output": w × x}``.

    Example:
        >>> loss, aux = toy_loss(Toy(w=2.0), torch.tensor([1.0, 3.0]))
        >>> loss.item()
        4.0
    """
    output = model(batch)
    return output.mean(), {"output": output}


@attrs.define
class Spy:
    """A step that records its calls, and leaves what it is told to. Make one with :func:`spy`.

    Args:
        loss, grad, weight, aux, skip: as in :func:`spy`.
        calls: what it was called with: a list of ``(state, batch)``.

    Example:
        >>> inner = Spy(weight=3)
        >>> inner(toy(), "batch")[1].weight, len(inner.calls)
        (3, 1)
    """

    loss: float = 0.0
    grad: float | None = None
    weight: int = 1
    aux: Mapping[str, Any] = attrs.field(factory=dict)
    skip: str | None = None
    calls: list[tuple[TrainState, Batch]] = attrs.field(factory=list)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        self.calls.append((state, batch))
        if self.grad is not None:
            for p in parameters(state):
                p.grad = torch.full_like(p, self.grad)
        return state, Output(torch.tensor(self.loss), self.weight, self.aux, {}, self.skip)


def spy(
    loss: float = 0.0,
    grad: float | None = None,
    weight: int = 1,
    aux: Mapping[str, Any] | None = None,
    skip: str | None = None,
) -> Spy:
    """Return a step for unit tests of what wraps it.

    Args:
        loss: the loss that it reports.
        grad: what it fills every gradient with, if given.
        weight: the weight that it reports.
        aux: the aux that it reports.
        skip: why it wants the update left out, or None.

    Returns:
        A step; its ``calls`` are a list of ``(state, batch)``.

    Example:
        >>> inner = spy(loss=2.0)
        >>> state, out = inner(toy(), "batch")
        >>> out.loss.item(), inner.calls[0][1]
        (2.0, 'batch')
    """
    _check_number("spy", "loss", loss)
    if grad is not None:
        _check_number("spy", "grad", grad)
    if isinstance(weight, Tensor):
        checks.scalar("spy", "weight", weight)
    else:
        checks.integer("spy", "weight", weight, "the number of items", least=0)
    if aux is not None:
        checks.mapping("spy", "aux", aux, 'such as {"output": output}')
    if skip is not None:
        checks.text("spy", "skip", skip, "why the update is to be left out")
    return Spy(loss, grad, weight, aux or {}, skip)


def _check_number(owner: str, name: str, value: Any) -> None:
    """Raise unless this is a number; NaN and infinities are right in a test."""
    if not (isinstance(value, float) and not math.isfinite(value)):
        checks.number(owner, name, value)


class HostReadError(AssertionError):
    """A tensor was read to the host where that was forbidden."""


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostReadError(
                "a tensor was read to the host (.item(), float(), bool(), if tensor: ...)"
            )
        return func(*args, **(kwargs or {}))


def no_host_reads() -> contextlib.AbstractContextManager[Any]:
    """Forbid reading tensors to the host: on CUDA each such read would wait for the device.

    Returns:
        A context manager.

    Raises:
        HostReadError: inside the context, where ``.item()``, ``float(tensor)``, ``if tensor`` or the like is called.

    Example:
        >>> with no_host_reads():
        ...     torch.ones(()).item()
        Traceback (most recent call last):
        fnloop.testing.HostReadError: a tensor was read to the host (.item(), float(), bool(), if tensor: ...)
    """
    return _NoHostReads()


# --- problems


@attrs.frozen
class Problem:
    """Something to train that a law can be run on.

    Args:
        model: makes the module; seeded by the law.
        loss_fn: its loss function.
        batches: batches, of one structure, not all of one size.
        optimizer: makes the optimizer of parameters.
        cat: joins batches into one, for the law of accumulation; None if that makes no sense here.

    Raises:
        TypeError: a part of it is something else, or there is no batch.

    Example:
        >>> problem = Problem(Toy, toy_loss, [torch.ones(2), torch.ones(1)])
        >>> check_laws(pipeline(), problem)
    """

    model: Callable[[], nn.Module]
    loss_fn: LossFn
    batches: Sequence[Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9
    )
    cat: Callable[[Sequence[Batch]], Batch] | None = None

    def __attrs_post_init__(self) -> None:
        checks.function(
            "Problem", "model", self.model, "a function that makes the module", 0, also=type
        )
        checks.function("Problem", "loss_fn", self.loss_fn, "a function (model, batch) -> loss", 2)
        if not isinstance(self.batches, list | tuple) or not self.batches:
            raise TypeError(
                f"Problem expects batches as a list of batches, at least one; got {checks.described(self.batches)}"
            )
        checks.function(
            "Problem",
            "optimizer",
            self.optimizer,
            "a function parameters -> optimizer",
            1,
            also=type,
        )
        if self.cat is not None:
            checks.function(
                "Problem",
                "cat",
                self.cat,
                "a function of a sequence of batches -> a batch, or None",
                1,
            )

    def state(self, seed: int = 0) -> TrainState:
        """Return a new first state; the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        return TrainState.create(model, self.optimizer(model.parameters()), seed=seed)


def _data(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    return [(part, part.sum(1, keepdim=True).sin()) for part in x]


def _net(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1)).double()


def _tuple_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(batch[0])
    return functional.mse_loss(output.double(), batch[1]), {"output": output}


def _dict_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return _tuple_loss(model, (batch["x"], batch["y"]))


def small() -> Problem:
    """Return a problem without randomness: a small net in float64, tuple batches of unequal sizes, a ragged end.

    Returns:
        A problem that every law can be run on.

    Example:
        >>> [len(x) for x, y in small().batches]
        [4, 4, 3, 4, 1, 4, 2]
    """
    return Problem(
        _net,
        _tuple_loss,
        _data([4, 4, 3, 4, 1, 4, 2]),
        cat=lambda batches: tuple(torch.cat(parts) for parts in zip(*batches, strict=True)),
    )


def stochastic() -> Problem:
    """Return a problem with dropout and batch norm, dict batches, and Adam.

    Returns:
        A problem for the laws of folding and purity.

    Example:
        >>> sorted(stochastic().batches[0])
        ['x', 'y']
    """
    return Problem(
        lambda: _net(nn.BatchNorm1d(8), nn.Dropout(0.3)),
        _dict_loss,
        [{"x": x, "y": y} for x, y in _data([4, 4, 3, 4, 2, 4, 2])],
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    )


# --- comparing


def assert_same(a: TrainState, b: TrainState, *, rtol: float = 0.0) -> None:
    """Assert that two states are the same: counters, parameters, buffers, optimizer, slots, history.

    Closing records are left out, since they say where a run ended and not what it did.

    Args:
        a, b: the states.
        rtol: relative tolerance for tensors and numbers; 0 for the same bits.

    Raises:
        AssertionError: they aren't; the message names the first difference.

    Example:
        >>> assert_same(toy(), toy())
    """
    for name, state in (("a", a), ("b", b)):
        checks.instance("assert_same", name, state, TrainState, "a TrainState")
    checks.number("assert_same", "rtol", rtol, "the relative tolerance", least=0)
    for field in ("step", "epoch", "batch", "samples", "skipped", "seed", "stop"):
        assert getattr(a, field) == getattr(b, field), (
            f"{field}: {getattr(a, field)!r} != {getattr(b, field)!r}"
        )
    _assert_equal(a.model.state_dict(), b.model.state_dict(), "model", rtol)
    _assert_equal(a.optimizer.state_dict(), b.optimizer.state_dict(), "optimizer", rtol)
    _assert_equal(dict(a.slots), dict(b.slots), "slots", rtol)
    one, two = ([record for record in state.history if not record.closing] for state in (a, b))
    assert len(one) == len(two), f"history: {len(one)} records != {len(two)}"
    for i, (mine, other) in enumerate(zip(one, two, strict=True)):
        assert (mine.epoch, mine.step) == (other.epoch, other.step), (
            f"history[{i}]: {mine} != {other}"
        )
        _assert_equal(dict(mine.metrics), dict(other.metrics), f"history[{i}]", rtol)


def _assert_equal(a: Any, b: Any, path: str, rtol: float) -> None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        assert list(a) == list(b), f"{path}: keys {list(a)} != {list(b)}"
        for key in a:
            _assert_equal(a[key], b[key], f"{path}.{key}", rtol)
    elif isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        assert len(a) == len(b), f"{path}: {len(a)} items != {len(b)}"
        for i, pair in enumerate(zip(a, b, strict=True)):
            _assert_equal(*pair, f"{path}[{i}]", rtol)
    elif isinstance(a, Tensor | float) and isinstance(b, Tensor | float):
        try:
            torch.testing.assert_close(
                torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=rtol, equal_nan=True
            )
        except AssertionError as error:
            raise AssertionError(f"{path}: {a} != {b}\n{error}") from None
    elif callable(state_dict := getattr(a, "state_dict", None)):  # a scheduler
        _assert_equal(state_dict(), b.state_dict(), path, rtol)
    elif not callable(a):
        assert a == b, f"{path}: {a!r} != {b!r}"


def _generators() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return torch.get_rng_state().tolist(), name, keys.tolist(), rest, random.getstate()


# --- laws


def _check_law(law: str, pipe: Any, problem: Any) -> None:
    if not isinstance(pipe, Pipeline):
        raise TypeError(
            f"{law} expects pipe as what pipeline(...) returns; got {checks.described(pipe)}"
        )
    checks.instance(law, "problem", problem, Problem, "a Problem, such as small()")


def _fit(pipe: Pipeline, problem: Problem, state: TrainState, **kwargs: Any) -> TrainState:
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    return fit(pipe(problem.loss_fn), state, loaders, **{"epochs": 2, "hooks": (), **kwargs})


def _updates(pipe: Pipeline, problem: Problem) -> int:
    return -(-len(problem.batches) // pipe(problem.loss_fn).window)


def law_fold(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a run that is stopped and continues equals one that was never stopped, bit for bit, at every update.

    Its history has a closing record where it was stopped, and the same records otherwise.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: it doesn't; the message says at which update.

    Example:
        >>> law_fold(pipeline(), small())
    """
    _check_law("law_fold", pipe, problem)
    whole = _fit(pipe, problem, problem.state())
    for split in range(1, 2 * _updates(pipe, problem)):
        pause = when(lambda state, split=split: state.step + state.skipped == split)(
            lambda state: attrs.evolve(state, stop="paused")
        )
        paused = _fit(pipe, problem, problem.state(), hooks=(pause,))
        assert paused.step + paused.skipped == split, (
            f"law_fold: asked to stop at update {split}, stopped at {paused.step}"
        )
        resumed = _fit(pipe, problem, attrs.evolve(paused, stop=None))
        with _law(f"law_fold: stopped at update {split} of 2 epochs"):
            assert_same(resumed, whole)


def law_purity(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a run is a function of its snapshot, that records stay as they are, and nothing else is touched.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: something else was changed, or decided; the message says what.

    Example:
        >>> law_purity(pipeline(), stochastic())
    """
    _check_law("law_purity", pipe, problem)
    pause = every(epochs=1)(
        lambda state: attrs.evolve(state, stop="paused")
    )  # not epochs=1: for a scheduler, another length
    step, state = (
        pipe(problem.loss_fn),
        attrs.evolve(_fit(pipe, problem, problem.state(), hooks=(pause,)), stop=None),
    )
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
        facts = attrs.asdict(state, recurse=False)
        facts = {
            name: facts[name]
            for name in ("step", "epoch", "batch", "skipped", "history", "stop", "events")
        }
        one, two = _fit(pipe, problem, state), _fit(pipe, problem, again)
        assert_same(one, two)
        assert all(getattr(state, name) == value for name, value in facts.items()), (
            "a record that was given was changed"
        )
        assert generators == _generators(), (
            "the caller's generators were not given back as they were"
        )


def law_neutral(neutral: Middleware, pipe: Pipeline, problem: Problem) -> None:
    """Assert that a middleware at its neutral setting changes nothing but its own slot, first or last in a pipeline.

    Args:
        neutral: the middleware, such as ``accumulate(1)``.
        pipe: what it is put into.
        problem: what to train.

    Raises:
        AssertionError: it does; the message names the first difference.

    Example:
        >>> import fnloop as fl
        >>> law_neutral(fl.clip(float("inf")), pipeline(), small())
    """
    checks.instance(
        "law_neutral", "neutral", neutral, Middleware, "a middleware, such as accumulate(1)"
    )
    _check_law("law_neutral", pipe, problem)
    plain = _fit(pipe, problem, problem.state())
    for members in ((neutral, *pipe.middleware), (*pipe.middleware, neutral)):
        with _law(f"law_neutral: {pipeline(*members)!r}"):
            made = _fit(pipeline(*members), problem, problem.state())
            names = plain.history.keys()
            kept = [
                attrs.evolve(r, metrics={name: r.metrics[name] for name in names})
                for r in made.history
            ]
            slots = {
                name: made.slots[name] for name in plain.slots if name in made.slots
            }  # not what the neutral one keeps
            assert_same(attrs.evolve(made, history=kept, slots=slots), plain)


def law_accumulation(
    pipe: Pipeline,
    problem: Problem,
    n: int,
    accumulate: Callable[[int], Middleware],
    rtol: float = 1e-12,
) -> None:
    """Assert that n batches accumulated make the update of one batch of them all, the ragged last window included.

    Args:
        pipe: what is listed behind accumulate.
        problem: one without randomness, whose batches can be joined.
        n: batches per update.
        accumulate: the middleware's factory.
        rtol: relative tolerance.

    Raises:
        AssertionError: they don't, or the problem's batches can't be joined.

    Example:
        >>> import fnloop as fl
        >>> law_accumulation(pipeline(), small(), 3, fl.accumulate)
    """
    _check_law("law_accumulation", pipe, problem)
    checks.integer("law_accumulation", "n", n, "the batches per update")
    checks.function(
        "law_accumulation", "accumulate", accumulate, "the factory of the middleware", 1
    )
    checks.number("law_accumulation", "rtol", rtol, "the relative tolerance", least=0)
    assert problem.cat is not None, "law_accumulation needs a problem with cat"
    joined = attrs.evolve(
        problem, batches=[problem.cat(part) for part in partition_all(n, problem.batches)]
    )
    parts = _fit(
        pipeline(accumulate(n), *pipe.middleware),
        attrs.evolve(problem, batches=problem.batches),
        problem.state(),
    )
    wholes = fit(
        pipe(problem.loss_fn),
        problem.state(),
        {"train": joined.batches, "valid": problem.batches[:2]},
        epochs=2,
        hooks=(),
    )
    with _law(f"law_accumulation: {n} batches and one of them all"):
        assert_same(parts, wholes, rtol=rtol)


def law_no_host_reads(pipe: Pipeline, problem: Problem) -> None:
    """Assert that no step reads a tensor to the host. The problem's optimizer must not read either.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: one does.

    Example:
        >>> import fnloop as fl
        >>> law_no_host_reads(pipeline(fl.clip(1.0)), small())
    """
    _check_law("law_no_host_reads", pipe, problem)
    step = pipe(problem.loss_fn)
    inner = step.train

    def guarded(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        with _law(f"law_no_host_reads: {step!r}"), no_host_reads():
            return inner(state, batch)

    step.train = guarded
    fit(step, problem.state(), problem.batches, epochs=1, hooks=())


def law_skipped_updates(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a skipped update advances nothing but the position in the data: no step, no schedule, no average.

    Every second window is skipped; that must equal a run in which those windows don't exist, and whose length is known
    to be the same. The problem must be without randomness.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train.

    Raises:
        AssertionError: it advances something; the message says what.

    Example:
        >>> import fnloop as fl
        >>> law_skipped_updates(pipeline(fl.schedule(fl.schedules.linear())), small())
    """
    _check_law("law_skipped_updates", pipe, problem)
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
        _assert_equal(one.model.state_dict(), two.model.state_dict(), "model", 0.0)
        _assert_equal(one.optimizer.state_dict(), two.optimizer.state_dict(), "optimizer", 0.0)
        _assert_equal(dict(one.slots), dict(two.slots), "slots", 0.0)
        assert one.step == two.step, f"step: {one.step} != {two.step}"


def _windows(step: PipelineStep, problem: Problem) -> list[Any]:
    return list(windows(open_source(list(problem.batches), 0), step.window, torch.device("cpu")))


def _skip_every_second(step: Any) -> Any:
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
    """Run every law that a pipeline can be held to by itself.

    Args:
        pipe: what ``pipeline(...)`` returns.
        problem: what to train; :func:`small` and :func:`stochastic` by default.

    Raises:
        AssertionError: a law is broken; the message says which, and where.
        TypeError: ``pipe`` is no pipeline.

    Example:
        >>> import fnloop as fl
        >>> check_laws(fl.pipeline(fl.clip(1.0), fl.schedule(fl.schedules.linear())))
    """
    if not isinstance(pipe, Pipeline):
        raise TypeError(
            f"check_laws expects what pipeline(...) returns; got {checks.described(pipe)}. Write check_laws(pipeline(...))"
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
    with contextlib.suppress(
        pickle.PicklingError, AttributeError
    ):  # a lambda among the settings can't be pickled
        assert pickle.loads(pickle.dumps(pipe)) == pipe, "the pipeline doesn't survive pickling"
