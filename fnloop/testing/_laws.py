"""The laws of the library as functions that raise an AssertionError."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from toolz import partition_all
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from fnloop._backend.containers import SEQUENCES, flattened
from fnloop._core.history import History
from fnloop._core.state import TrainState, snapshot
from fnloop._core.types import Batch, LossFn, Middleware, Output, Step
from fnloop._data.source import Source
from fnloop._display import checks
from fnloop._display.frames import short_traceback
from fnloop._hooks.hook import every, when
from fnloop._loop.evaluate import evaluate, predict
from fnloop._loop.fit import fit
from fnloop._step.pipeline import Pipeline, PipelineStep, pipeline
from fnloop.testing._toys import no_host_reads


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
    return Source.open(list(problem.batches), 0, total=step.total).batches_in_update(step.window)


@short_traceback
def law_fold(pipe: Pipeline, problem: Problem) -> None:
    """Assert that a run stopped at any update and continued equals one never stopped, bit for bit.

    One run is stopped after each update and continued to the next one. From each of these stops
    another run continues to the end. A stopped run has closing records where it stopped, and the
    same records otherwise.

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
    running = problem.state()
    for split in range(1, 2 * calls_in_epoch):
        pause = when(lambda state, split=split: calls(state) == split)(
            lambda state: attrs.evolve(state, stop="paused")
        )
        paused = _fit(pipe, problem, running, hooks=(pause,))
        assert calls(paused) == split, (
            f"law_fold: asked to stop at update {split}, stopped at {paused.step}"
        )
        running = attrs.evolve(snapshot(paused), stop=None)
        resumed = _fit(pipe, problem, attrs.evolve(paused, stop=None))
        with _law(f"law_fold: stopped at update {split} of 2 epochs"):
            assert_same(resumed, whole)


@short_traceback
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
        facts = _facts(state, fields)
        one, two = _fit(pipe, problem, state), _fit(pipe, problem, again)
        assert_same(one, two)
        assert _facts(state, fields) == facts, "a given record was changed"
        assert generators == _generators(), "the caller's generators were not restored"


@short_traceback
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


@short_traceback
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
    n = checks.integer("law_accumulation", "n", n, "the batches per update")
    checks.function(
        "law_accumulation", "accumulate", accumulate, "the factory of the middleware", 1
    )
    rtol = checks.number("law_accumulation", "rtol", rtol, "the relative tolerance", least=0)
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


@short_traceback
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


@short_traceback
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
    sizes = None if window is None else itertools.repeat(window)
    return list(Source.open(list(problem.batches), 0).windows(sizes, torch.device("cpu")))


def _skip_every_second(step: Step) -> Step:
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


@short_traceback
def check_laws(pipe: Pipeline, problem: Problem | None = None) -> None:
    """Check every law that needs only a pipeline.

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


# --------------------------------------------------------------------------------------------------
# The comparison of states.


def _facts(state: TrainState, names: Sequence[str]) -> dict[str, object]:
    return attrs.asdict(state, recurse=False, filter=attrs.filters.include(*names))


def assert_same(a: TrainState, b: TrainState, *, rtol: float = 0.0) -> None:
    """Assert that two states are the same: counters, weights, optimizer, slots, history.

    Closing records are not compared, because they depend on where a run ended.

    Args:
        a, b: the states.
        rtol: relative tolerance for tensors and numbers; 0 to compare bit for bit.

    Raises:
        AssertionError: they differ; the message names the first difference.

    Example:
        >>> from fnloop.testing import toy
        >>> assert_same(toy(), toy())
    """
    for name, state in (("a", a), ("b", b)):
        checks.instance("assert_same", name, state, TrainState, "a TrainState")
    rtol = checks.number("assert_same", "rtol", rtol, "the relative tolerance", least=0)
    compared = (*TrainState.COUNTERS, "stop")
    its = _facts(b, compared)
    for field, mine in _facts(a, compared).items():
        assert mine == its[field], f"{field}: {mine!r} != {its[field]!r}"
    phases = [[(p.name, p.step, p.epoch, p.stop, p.done) for p in s.phases] for s in (a, b)]
    assert phases[0] == phases[1], f"phases: {a.phases} != {b.phases}"
    assert_equal(a.model.state_dict(), b.model.state_dict(), "model", rtol)
    assert_equal(a.optimizer, b.optimizer, "optimizer", rtol)
    assert_equal(dict(a.slots), dict(b.slots), "slots", rtol)
    one, two = (History(state.history).since(closing=False) for state in (a, b))
    assert len(one) == len(two), f"history: {len(one)} records != {len(two)}"
    for i, (mine, other) in enumerate(zip(one, two, strict=True)):
        place = f"history[{i}]"
        assert (mine.epoch, mine.step) == (other.epoch, other.step), f"{place}: {mine} != {other}"
        assert_equal(dict(mine.metrics), dict(other.metrics), place, rtol)


def assert_equal(a: object, b: object, path: str, rtol: float = 0.0) -> None:
    """Assert that two nested values are equal. Functions are not compared."""
    # Tensors of subclasses often cannot be compared.
    a, b = (value if (parts := flattened(value)) is None else parts for value in (a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        assert list(a) == list(b), f"{path}: keys {list(a)} != {list(b)}"
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}", rtol)
    elif isinstance(a, SEQUENCES) and isinstance(b, SEQUENCES):
        assert len(a) == len(b), f"{path}: {len(a)} items != {len(b)}"
        for i, (mine, other) in enumerate(zip(a, b, strict=True)):
            assert_equal(mine, other, f"{path}[{i}]", rtol)
    elif isinstance(a, Tensor | float) and isinstance(b, Tensor | float):
        if not _is_equal(a, b):
            _assert_close(a, b, path, rtol)
    elif checks.has_methods(a, "state_dict"):  # such as a scheduler
        assert checks.has_methods(b, "state_dict"), f"{path}: {a!r} != {b!r}"
        assert_equal(a.state_dict(), b.state_dict(), path, rtol)
    elif attrs.has(kind := type(a)) and kind is type(b):
        mine, its = (attrs.asdict(each, recurse=False) for each in (a, b))
        for field in attrs.fields(kind):
            if field.eq:
                name = field.name
                assert_equal(mine[name], its[name], f"{path}.{name}", rtol)
    elif not callable(a):
        assert a == b, f"{path}: {a!r} != {b!r}"


def _is_equal(a: Tensor | float, b: Tensor | float) -> bool:
    """Return whether two values are certainly equal, which is much faster than to say why not."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.device == b.device and a.layout == b.layout
        return alike and a.layout == torch.strided and torch.equal(a, b)
    return isinstance(a, float) and isinstance(b, float) and a == b


def _assert_close(a: Tensor | float, b: Tensor | float, path: str, rtol: float) -> None:
    try:
        torch.testing.assert_close(
            torch.as_tensor(a), torch.as_tensor(b), rtol=rtol, atol=rtol, equal_nan=True
        )
    except AssertionError as error:
        values = f"{a} != {b}" if max(map(_size, (a, b))) <= SHOWN else "two tensors"
        raise AssertionError(f"{path}: {values}\n{error}") from None


SHOWN = 8  # elements of a tensor that a message shows


def _size(value: Tensor | float) -> int:
    return value.numel() if isinstance(value, Tensor) else 1


# --------------------------------------------------------------------------------------------------
# Problems that a law can be checked on.


def _sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@attrs.frozen
class Problem:
    """A model, a loss function and batches to check a law on.

    Args:
        model: a function that makes the module; the law seeds torch before the call.
        loss_fn: the loss function.
        batches: batches of one structure, not all of one size.
        optimizer: a function that makes the optimizer from parameters, or a mapping of several.
        cat: a function that joins batches into one, for the law of accumulation; or None.

    Raises:
        TypeError: a part of it is something else, or there is no batch.

    Example:
        >>> from fnloop import pipeline
        >>> from fnloop.testing import Toy, check_laws, toy_loss
        >>> problem = Problem(Toy, toy_loss, [torch.ones(2), torch.ones(1)])
        >>> check_laws(pipeline(), problem)
    """

    model: Callable[[], nn.Module]
    loss_fn: LossFn
    batches: Sequence[Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer | Mapping[str, Optimizer]] = _sgd
    cat: Callable[[Sequence[Batch]], Batch] | None = None

    def __attrs_post_init__(self) -> None:
        function = checks.function
        function("Problem", "model", self.model, "a function that makes the module", 0, also=type)
        function("Problem", "loss_fn", self.loss_fn, "a function (model, batch) -> loss", 2)
        if not checks.is_list(self.batches) or not self.batches:
            raise TypeError(
                "Problem expects batches as a list of batches, at least one; "
                f"got {checks.describe(self.batches)}"
            )
        wanted = "a function parameters -> optimizer"
        function("Problem", "optimizer", self.optimizer, wanted, 1, also=type)
        if self.cat is not None:
            wanted = "a function of a sequence of batches -> a batch, or None"
            function("Problem", "cat", self.cat, wanted, 1)

    def state(self, seed: int = 0) -> TrainState:
        """Return a new initial state, the same for the same seed."""
        # Without a device, torch.manual_seed formats a traceback for each kind of device.
        alone = not torch.accelerator.is_available()
        with torch.random.fork_rng(devices=[]):
            (torch.default_generator.manual_seed if alone else torch.manual_seed)(seed)
            model = self.model()
        return TrainState.create(model, self.optimizer(model.parameters()), seed=seed)


def small() -> Problem:
    """Return a problem without randomness: a small net in float64, batches of unequal sizes.

    Returns:
        A problem that every law can be checked on.

    Example:
        >>> [len(x) for x, y in small().batches]
        [4, 4, 3, 4, 1, 4, 2]
    """
    return Problem(_net, _tuple_loss, _batches([4, 4, 3, 4, 1, 4, 2]), cat=_cat)


def stochastic() -> Problem:
    """Return a problem with dropout and batch norm, dict batches, and AdamW.

    Returns:
        A problem for the laws of folding and purity.

    Example:
        >>> sorted(stochastic().batches[0])
        ['x', 'y']
    """
    return Problem(
        lambda: _net(nn.BatchNorm1d(8), nn.Dropout(0.3)),
        _dict_loss,
        [{"x": x, "y": y} for x, y in _batches([4, 4, 3, 4, 2, 4, 2])],
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    )


def _batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    return [(part, part.sum(1, keepdim=True).sin()) for part in x]


def _cat(batches: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _net(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 1)).double()


def _tuple_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(batch[0])
    return functional.mse_loss(output.double(), batch[1]), {"output": output}


def _dict_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return _tuple_loss(model, (batch["x"], batch["y"]))
