"""One update from the loss to the weights: backward, the optimizers, and the report."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.torch_compat import apply_optimizer
from fnloop._core.apart import average_inside
from fnloop._core.history import suggestion
from fnloop._core.optimizers import (
    Group,
    Optimizers,
    explain_untrained,
    optimizers_in,
    wants_closure,
)
from fnloop._core.rng import COMPUTE, fold_in, isolated, seed_all
from fnloop._core.stacked import Stack
from fnloop._core.state import (
    Buffers,
    KeptBuffers,
    TrainState,
    advance,
    check_not_stale,
    current_parameters,
    give_up_ownership,
    parameters,
    with_slots,
)
from fnloop._core.types import BY_ANOTHER, Batch, Metric, Middleware, Output, Step
from fnloop._display import checks
from fnloop._display.screen import log
from fnloop._step.engine import LossRoot, engine_of, evaluating_model, fail_to_train
from fnloop._step.stacked import update_models

# --------------------------------------------------------------------------------------------------
# The outermost of the three steps, that of the optimizers, and what becomes of its output.

CLOSURE, CREATE_GRAPH = "closure", "closure(create_graph)"  # names of middleware
OPTIMIZER = "the optimizer's step"  # the name of that layer in messages


class _Applying(threading.local):
    apply: Callable[[Optimizer], None] = staticmethod(apply_optimizer)


_applying = _Applying()


@contextlib.contextmanager
def replace_apply(
    apply: Callable[[Optimizer], None],
) -> Iterator[Callable[[Optimizer], None]]:
    """Apply optimizers by another function in this thread, within a ``with`` block.

    It gives the function that is replaced.
    """
    before, _applying.apply = _applying.apply, apply
    try:
        yield before
    finally:
        _applying.apply = before


def update(
    step: Step,
    name: str,
    may_skip: bool = False,
    by_closure: bool = False,
    guarded: bool = False,
) -> Step:
    """Return the step that applies the gradients and then clears them.

    Args:
        step: the gradient step.
        name: the name of the loss function.
        may_skip: whether an inner step may skip an update on some processes only. Then all skip it.
        by_closure: whether to give the optimizer a closure that it could do without.
        guarded: whether an inner step may leave an update out. Then buffers are put back, such as
            running statistics, which its forward has changed.
    """
    known: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Buffers]] = WeakKeyDictionary()

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        cache = current_parameters(state, beginning=True)
        params = cache.found
        for p in params:
            p.grad = None  # of an earlier batch, if any
        try:
            if by_closure or wants_closure(type(state.optimizer)):  # then there is only one
                return _by_closure(step, state, batch)
            if guarded:
                before = Before(state, _buffers_of(state, params, known).keep())
                with within_update(before):
                    new, out = step(state, batch)
            else:
                before = None
                new, out = step(state, batch)
            if may_skip:
                out = skip_together(state, out)
            applied = out.skip is None
            if before is not None and not applied and not is_recorded():  # a graph does it itself
                before.buffers.put_back(unseen=True)
            if applied:
                if not cache.checked:
                    _check_gradients(new, out, name)
                give_up_ownership(new)  # until all of the parameters have changed
                apply, optimizer = _applying.apply, new.optimizer
                if type(new.model) is Stack:
                    update_models(new, apply, apply is not apply_optimizer)
                    return advance(new, applied), out
                for one in optimizer.values() if type(optimizer) is Optimizers else (optimizer,):
                    apply(one)
        finally:
            for p in params:
                p.grad = None
        return advance(new, applied), out

    return update


def _check_gradients(state: TrainState, out: Output, name: str) -> None:
    """Check which parameters have a gradient, in the first update and after each change of them.

    Raises:
        ValueError: none of those that the optimizers update has one.
    """
    __tracebackhide__ = True
    if out.weight.__class__ is int and not out.weight:  # this process had no batch
        return
    cache, optimizers = current_parameters(state), optimizers_in(state.optimizer).values()
    if all(p.grad is None for p in cache.trained):
        fail_to_train(state, name, any(p.grad is not None for p in cache.found))
    cache.checked = True
    if not cache.has_changed or not state.backend.main:  # a run says it when it begins
        return
    if (untrained := explain_untrained(state.model, optimizers)) is not None:
        log.warning("update %d: %s", state.step + 1, untrained)


def _buffers_of(
    state: TrainState,
    params: list[Tensor],
    known: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Buffers]],
) -> Buffers:
    """Return the buffers of a model, looked up again when its parameters are."""
    found, buffers = known.get(state.model, (None, None))
    if buffers is None or found is not params:
        buffers = Buffers(state.model)
        known[state.model] = params, buffers
    return buffers


def skip_together(state: TrainState, out: Output) -> Output:
    """Return an output that is skipped if it is skipped on any process. A collective."""
    if engine_of(state).any(out.skip is not None) and out.skip is None:
        return attrs.evolve(out, skip=BY_ANOTHER)
    return out


@functools.cache
def _check_takes_closure(optimizer: type[Optimizer | Optimizers]) -> None:
    if issubclass(optimizer, Optimizers):
        raise TypeError(
            "closure() calls the step of one optimizer, but this state has several: give all "
            "parameters to one, or leave closure() out of the pipeline"
        )
    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError(
            f"{optimizer.__name__}.step takes no closure: leave closure() out of the pipeline"
        )


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it needs (LBFGS).

    The first evaluation is reported.
    """
    __tracebackhide__ = True
    _check_takes_closure(type(state.optimizer))
    replies: list[tuple[TrainState, Output]] = []

    def closure() -> Tensor:
        __tracebackhide__ = True
        for p in parameters(state):
            p.grad = None
        replies.append(step(state, batch))
        if replies[-1][1].skip is not None:
            raise ValueError(
                f"{type(state.optimizer).__name__} cannot skip an update ({replies[-1][1].skip})"
            )
        return engine_of(state).mean_loss(replies[-1][1])

    # The optimizer may change the parameters before, between and after its evaluations.
    give_up_ownership(state)
    state.optimizer.step(closure)
    new, out = replies[0]
    return advance(new, applied=True), out


# --------------------------------------------------------------------------------------------------
# The step in the middle of a pipeline: backward, from the loss to the gradients.
#
# Backward takes a window of batches where `accumulate` asks for one. Each batch counts by its
# weight, the number of items that its loss is the mean of. So the gradient is that of the mean over
# all items of the window, with a ragged last window, unequal token counts and any number of
# processes. Gradients add up in `.grad` as autograd does: backward starts from loss × weight / (a
# reference weight), and one division at the end makes the mean.


@runtime_checkable
class Insertable(Protocol):
    """A gradient step around backward that lets another one in between."""

    def insert_inside(self, wrap: Callable[[Backward], Step], /) -> Step:
        """Return this step with another one inserted directly around backward."""
        ...


class Backward:
    """The step that fills ``.grad``, starting from the loss. It reports the unscaled loss.

    Args:
        loss: the loss, and what backward starts from.

    Attributes:
        size: the most samples in one forward and backward; None: those of a batch.
    """

    size: int | None = None

    def __init__(self, loss: LossRoot) -> None:
        self.loss = loss

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Run forward and backward of one batch."""
        __tracebackhide__ = True
        single = engine_of(state).start_batch(self.loss, state)
        state, out = single.forward(state, batch)
        return state, single.backward(state, out)

    def accumulate(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        """Run forward and backward of a window. The gradient is that of the mean over its items."""
        __tracebackhide__ = True
        training = engine_of(state).start_window(self.loss, state, [1] * len(window))
        for batch in window:
            state, out = training.forward(state, batch)
            training.add(state, out)
        return state, training.finish(state)

    def scaled_by(self, scale: Callable[[TrainState], Tensor]) -> Backward:
        """Return the same step with gradients multiplied by ``scale(state)``."""
        scaled, loss = copy.copy(self), self.loss
        scaled.loss = LossRoot(loss.forward, scale, loss.may_skip, loss.create_graph, loss.name)
        return scaled

    def insert_inside(self, wrap: Callable[[Backward], Step]) -> Step:
        """Insert a gradient step directly around this one."""
        return wrap(self)


class Commuting:
    """The wrap of a gradient step that at most multiplies a window's gradients by one number.

    Such steps commute, so a later one may still be inserted directly around backward:
    ``step.insert_inside(wrap)``. That is how ``accumulate`` adds gradients up in place, and how
    fp16 gradients are unscaled once per window, whichever of the two is listed first.

    Args:
        wrap: the wrap.
    """

    def __init__(self, wrap: Callable[[Any], Step]) -> None:
        self._wrap = wrap

    def __call__(self, step: Step) -> Step:
        made: Any = self._wrap(step)
        if isinstance(step, Insertable):
            made.insert_inside = lambda inner: self(step.insert_inside(inner))
        return made


# --------------------------------------------------------------------------------------------------
# Decisions of the host about an update, and who makes them.

Judge = Callable[[TrainState, bool], str | None]


class Host(Protocol):
    """What decides whether to apply an update."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge, /) -> str | None:
        """Return why to skip the update, or None. See :func:`decide`."""
        ...


class Before(NamedTuple):
    """What an update that is left out goes back to.

    Args:
        state: the state that the update was given.
        buffers: the buffers of the model.
    """

    state: TrainState
    buffers: KeptBuffers


class EagerHost:
    """Reads the flag and decides at once."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str | None:
        # A host read: whether this update counts decides the step counter, and schedules with it.
        return judge(state, bool(flag))


class _Current(threading.local):
    host: Host = EagerHost()
    eager: bool = False
    before: Before | None = None  # of the update that is being made, if it may be left out
    in_part: bool = False  # whether a batch of a window is being taken for itself


_current = _Current()


def decide(state: TrainState, out: Output, flag: Tensor, judge: Judge) -> tuple[TrainState, Output]:
    """Decide on the host whether an update is applied, by a flag that was computed on the device.

    It is for guards of your own, in the gradient ring: a middleware that leaves an update out. An
    update that is left out changes nothing but the position in the data and ``state.skipped``: the
    buffers of the model, such as running statistics, and slots are put back. The flag is read once,
    and any process that has it set sets it for all. Within ``cuda_graph`` the graph is split here:
    its first part is replayed, the host decides, and the rest is replayed only if the update is
    applied.

    Args:
        state: the state.
        out: the output so far.
        flag: a scalar tensor.
        judge: ``(state, flag) -> why the update is left out, or None``, with the flag as a bool. It
            may change its slot, in place, only if it leaves the update out: an applied one may
            still fail.

    Returns:
        What a step returns. ``out.skip`` is what the judge has said.

    Raises:
        TypeError: the flag is not a scalar tensor, or the judge is not such a function.
        ValueError: it is called for each batch of a window of ``accumulate``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> @fl.middleware("gradient")
        ... def at_most(limit):
        ...     def judge(state, flag):
        ...         return "the loss is too large" if flag else None
        ...     def wrap(step):
        ...         def guarded(state, batch):
        ...             state, out = step(state, batch)
        ...             return decide(state, out, out.loss > limit, judge)
        ...         return guarded
        ...     return wrap
        >>> state, out = fl.pipeline(at_most(1.0))(toy_loss)(toy(w=2.0), torch.ones(1))
        >>> out.skip, state.step, state.skipped
        ('the loss is too large', 0, 1)

    Notes:
        An update that is left out already stays so, and the judge is not asked. With several
        processes each of them has to call this in every update. List the middleware after
        ``accumulate``.
    """
    if not isinstance(flag, Tensor) or flag.numel() != 1:
        raise TypeError(f"decide expects flag as a scalar tensor; got {checks.describe(flag)}")
    if not callable(judge):
        meaning = "judge as a function (state, flag) -> reason, or None"
        raise TypeError(f"decide expects {meaning}; got {checks.describe(judge)}")
    if _current.in_part:
        raise ValueError(
            "decide is about whole updates, but here it is called for each batch of a window: list "
            "the middleware that calls it after accumulate. To leave a batch out of its window, "
            "return skip(reason) from the loss function"
        )
    return decide_any(state, out, flag, judge)


def decide_any(
    state: TrainState, out: Output, flag: Tensor, judge: Judge
) -> tuple[TrainState, Output]:
    """Decide as :func:`decide` does, also about a batch of a window."""
    flag, out = engine_of(state).agree(flag, out)
    if out.skip is not None:
        return state, out
    skip = _current.host.decide(state, out, flag, judge)
    if skip is None:
        return state, out
    if _current.before is not None and not _current.in_part:
        state = with_slots(state, _current.before.state.slots)
    return state, attrs.evolve(out, skip=skip)


def before_update() -> Before | None:
    """Return what the update that is being made goes back to; None if nothing was kept."""
    return _current.before


@contextlib.contextmanager
def within_update(before: Before) -> Iterator[None]:
    """Note what an update goes back to if it is left out, within a ``with`` block."""
    _current.before = before
    try:
        yield
    finally:
        _current.before = None


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """Take each batch of a window for itself, within a ``with`` block."""
    outer, _current.in_part = _current.in_part, True
    try:
        yield
    finally:
        _current.in_part = outer


def is_recorded() -> bool:
    """Return whether the update is being recorded: then numbers of the host become constants."""
    return not isinstance(_current.host, EagerHost)


@contextlib.contextmanager
def replace_host(host: Host) -> Iterator[None]:
    """Let another host decide in this thread, within a ``with`` block."""
    before, _current.host = _current.host, host
    try:
        yield
    finally:
        _current.host = before


def leaves_graphs_out() -> bool:
    """Return whether updates are made without CUDA graphs."""
    return _current.eager


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Make updates without CUDA graphs in this thread, within a ``with`` block."""
    before, _current.eager = _current.eager, True
    try:
        yield
    finally:
        _current.eager = before


# --------------------------------------------------------------------------------------------------
# Optimizers with modes, such as schedule-free ones: other weights in evaluation than in training.
#
# Their method `eval` replaces the weights by averages, and `train` goes back, but only up to
# rounding. So an evaluation keeps the weights of training, and restores them exactly.


class _Modal(Protocol):
    """An optimizer with modes."""

    param_groups: list[Group]
    state: Mapping[Tensor, dict[str, object]]

    def train(self) -> object: ...

    def eval(self) -> object: ...


def to_training(state: TrainState) -> None:
    """Switch the optimizers that have modes to that of training."""
    for optimizer in _with_modes(state):
        optimizer.train()


@contextlib.contextmanager
def evaluation_weights(state: TrainState, together: bool = True) -> Iterator[Set[int]]:
    """Evaluate with the weights that there are for it, within a ``with`` block.

    Those are the weights of an optimizer with modes; or the average over the processes, where each
    has its own. Afterwards the weights and the modes of the optimizers are those from before. It
    gives the identities of the parameters and buffers that may be others than in training.

    Args:
        state: the state.
        together: whether every process is here. Otherwise each evaluates its own weights.
    """
    optimizers = _with_modes(state)
    if not optimizers:
        with average_inside(state) if together else contextlib.nullcontext(frozenset()) as others:
            yield others
        return
    params = parameters(state)
    kept = [p.detach().clone() for p in params]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [(own, {*own}) for one in optimizers for own in one.state.values()]
    settings = [dict(group) for group in groups]
    flags = [
        {name: value for name, value in vars(optimizer).items() if isinstance(value, bool)}
        for optimizer in optimizers
    ]
    try:
        for optimizer in optimizers:
            optimizer.eval()
        yield {*map(id, params)}
    finally:
        with torch.no_grad():
            for p, value in zip(params, kept, strict=True):
                p.copy_(value)
        for own, names in held:  # eval may keep the weights to train with there
            for name in own.keys() - names:
                del own[name]
        for group, before in zip(groups, settings, strict=True):
            group.update(before)
        for optimizer, before in zip(optimizers, flags, strict=True):
            vars(optimizer).update(before)


def has_modes(state: TrainState) -> bool:
    """Return whether an optimizer has other weights in evaluation than in training."""
    return bool(_with_modes(state))


@contextlib.contextmanager
def as_evaluated(state: TrainState, together: bool) -> Iterator[nn.Module]:
    """Let the model be as in an evaluation, within a ``with`` block. Afterwards all is as before.

    It gives the model.

    Args:
        state: the state.
        together: whether every process is here.
    """
    device = state.backend.device
    weights = evaluation_weights(state, together)
    with isolated(device), evaluating_model(state.model), weights:
        seed_all(fold_in(state.seed, COMPUTE))
        yield state.model


def evaluating(state: TrainState) -> contextlib.AbstractContextManager[nn.Module]:
    """Look at the model within a run, and change nothing: ``with evaluating(state) as model:``.

    Hooks are called in training mode. There a call of the model uses dropout, and moves the
    statistics of BatchNorm. In this block the model is in evaluation mode, without gradients, and
    has the weights that an evaluation uses, also with an optimizer that trains others. Afterwards
    these weights, the flag ``training`` of every module, the buffers, and all random generators are
    as they were before, also after an exception. What is drawn in the block is a function of the
    seed of the state.

    Args:
        state: the newest state: in a hook the one that it is called with.

    Returns:
        A context manager, which gives ``state.model``.

    Raises:
        StaleStateError: the state has been advanced.
        RuntimeError: another thread is inside ``fit``, ``run``, ``evaluate`` or ``predict``.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.5))
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
        >>> with evaluating(state) as model:
        ...     model(torch.tensor([[1.0], [3.0]])).round().tolist()
        [[1.0], [3.0]]
        >>> model.training, model[0].running_mean.item()
        (True, 0.0)

    Notes:
        Nothing is exchanged between processes, so one of them may enter the block alone
        (:func:`fnloop.on_main`). Each has its own buffers, and with ``local_sgd`` its own weights.
        For the average of ``ema`` or ``swa``, use the model of :func:`fnloop.averaged`. Numbers
        that belong in a record are for :func:`fnloop.measure`, which calls its function as in this
        block.
    """
    check_not_stale(state, "evaluating")
    return as_evaluated(state, together=False)


def _with_modes(state: TrainState) -> list[_Modal]:
    found = optimizers_in(state.optimizer).values()
    return [one for one in found if _has_modes(type(one))]  # type: ignore[misc]


@functools.cache
def _has_modes(optimizer: type) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


# --------------------------------------------------------------------------------------------------
# The numbers that middleware add to a report, made from those of the report.


def report(out: Output, metrics: Mapping[str, Metric], by: str) -> Output:
    """Return an output with more metrics.

    Raises:
        ValueError: it has a metric of that name already.
    """
    if clash := out.metrics.keys() & metrics.keys():
        name = min(clash)
        raise ValueError(
            f"{by} reports the metric {name!r}, which another middleware inside it reports "
            "already: rename one"
        )
    return Output(out.loss, out.weight, out.aux, {**out.metrics, **metrics}, out.skip)


ALWAYS = ("train", "recent")  # what the names of numbers may begin with in every run


class MissingNumberError(KeyError):
    """Raised for a number that a loader does not have. Another loader may have it.

    Args:
        message: what is missing.
        name: the name that was looked up.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Numbers(dict[str, float]):
    """The numbers that are known of a loader. It notes the names that were looked up in vain.

    Args:
        loader: the name of the loader, or None.
        values: name to number.
        missed: receives the names that ``numbers[name]`` does not find, and who looked them up.
        owner: who looks numbers up.
    """

    def __init__(
        self,
        loader: str | None,
        values: Mapping[str, float],
        missed: dict[str, object] | None = None,
        owner: object = None,
    ) -> None:
        super().__init__(values)
        self.loader, self.owner = loader, owner
        self.missed = {} if missed is None else missed

    def __missing__(self, name: str) -> float:
        self.missed[name] = self.owner
        place = f" of {self.loader}" if self.loader else ""
        raise MissingNumberError(
            f"there is no metric {name!r} among the numbers{place}; there are: {', '.join(self)}",
            name,
        )


def add_reported(
    members: Sequence[Middleware],
    values: Mapping[str, float],
    loaders: Iterable[str] | None = None,
    known: Container[str] = (),
) -> dict[str, float]:
    """Return the numbers of a report with those that middleware add, after those of their loader.

    A name that a middleware looks up may be there for another loader only. It is an error if a
    report of all loaders does not have it, and no earlier report had it.

    Args:
        members: middleware with a ``report``, in the order in which they are asked.
        values: name to number; the names begin with that of a loader.
        loaders: the names of all loaders that the run evaluates; None: names have no prefix.
        known: the names of numbers of earlier reports.

    Raises:
        KeyError: no loader has a name that a middleware looks up.
        ValueError: a name is there already, or was looked up before it is added.
        TypeError: a middleware does not return numbers by name.
    """
    __tracebackhide__ = True
    if loaders is None:
        return {**values, **_added(members, Numbers(None, values))}
    parts: dict[str, dict[str, float]] = {name: {} for name in (*ALWAYS, *loaders)}
    last: dict[str, str] = {}  # the last name of each loader
    for name, value in values.items():
        loader, _, rest = name.partition("/")
        if loader in parts:
            parts[loader][rest], last[loader] = value, name
    numbers = [Numbers(loader, part) for loader, part in parts.items() if part]
    added = {part.loader: _added(members, part) for part in numbers}
    if last.keys() >= parts.keys() - {"recent"}:
        _check_missed(numbers, known)
    found: dict[str, float] = {}
    for name, value in values.items():
        found[name] = value
        loader = name.partition("/")[0]
        if last.get(loader) == name:
            found |= {f"{loader}/{more}": number for more, number in added[loader].items()}
    return found


def _added(members: Sequence[Middleware], numbers: Numbers) -> dict[str, float]:
    """Return what middleware add to the numbers of a loader. ``numbers`` gets it too."""
    __tracebackhide__ = True
    added: dict[str, float] = {}
    for member in members:
        assert member.report is not None
        given = Numbers(numbers.loader, numbers, numbers.missed, member)
        try:
            more = member.report(numbers.loader, given)
        except MissingNumberError:
            continue
        checks.mapping(repr(member), "its report", more, "name to number")
        for name, value in more.items():
            checks.metric_name(repr(member), "a name of its report", name)
            if name in numbers:
                raise ValueError(
                    f"{member!r} reports the metric {name!r}, which is there already: rename one"
                )
            if name in numbers.missed:
                raise ValueError(
                    f"{numbers.missed[name]!r} looks up {name!r}, which {member!r} adds after it: "
                    f"list {member!r} first"
                )
            added[name] = numbers[name] = as_number(f"{member!r}: {name!r}", value)
    return added


def as_number(owner: str, value: object) -> float:
    """Return what a middleware reports as a float.

    Raises:
        TypeError: it is not a number.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{owner} must be a number; got {checks.describe(value)}")


def _check_missed(numbers: Sequence[Numbers], known: Container[str]) -> None:
    """Raise if no loader has a name that a middleware looks up."""
    for name in numbers[0].missed:
        if not all(name in part.missed for part in numbers):
            continue
        if any(f"{part.loader}/{name}" in known for part in numbers):
            continue
        there = "; ".join(f"{part.loader}: {', '.join(part)}" for part in numbers)
        names = {other: None for part in numbers for other in part}
        raise KeyError(
            f"{numbers[0].missed[name]!r}: no loader of this run has the metric {name!r}; there "
            f"are, of {there}{suggestion(name, names)}"
        )


# --- the numbers of a turn


def prefixed(name: str, metric: str) -> str:
    """Return the name under which a round reports a metric of a turn.

    A learning rate has the name that it has in every run with several optimizers.

    Example:
        >>> prefixed("d", "grad_norm"), prefixed("d", "lr"), prefixed("d", "lr/1")
        ('d/grad_norm', 'lr/d', 'lr/d/1')
    """
    if metric == "lr" or metric.startswith("lr/"):
        return f"lr/{name}{metric.removeprefix('lr')}"
    return f"{name}/{metric}"


def of_turn(member: Middleware, name: str) -> Middleware:
    """Return a middleware that adds to the numbers of a turn what another one adds to all."""
    given = member.report
    assert given is not None

    def report(loader: str | None, numbers: Mapping[str, float]) -> Mapping[str, float]:
        __tracebackhide__ = True
        more: object = given(loader, _OfTurn(loader, numbers, name))
        if isinstance(more, Mapping):
            return {prefixed(name, key): value for key, value in more.items()}
        return more  # type: ignore[return-value]  # which is checked

    return attrs.evolve(member, report=report)


class _OfTurn(Numbers):
    """The numbers of a turn, without its name. Those that it lacks are looked up among all.

    Args:
        loader: the name of the loader, or None.
        numbers: all numbers of the loader.
        name: the name of the turn.
    """

    def __init__(self, loader: str | None, numbers: Mapping[str, float], name: str) -> None:
        prefix = f"{name}/"
        own = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
        super().__init__(loader, own)
        self._all, self._name = numbers, name

    def __missing__(self, key: str) -> float:
        return self._all[prefixed(self._name, key)]
