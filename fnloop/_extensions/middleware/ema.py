"""Averages of the weights over the updates of a run: exponential, and of equal weights.

How much of the weights is blended in is decided in the step ring, on the host, and done in the
update ring. A recorded update reads it from a tensor on the device, which the step ring fills.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs
import toolz
import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import like_sharded
from fnloop._core.selectors import Selectors
from fnloop._core.state import TrainState, copy_handles, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop.extend import (
    Batch,
    Chosen,
    Ownership,
    Part,
    Restoring,
    Saving,
    View,
    Wrap,
    all_parameters,
    check_not_stale,
    checks,
    containers,
    host,
    is_sharded,
    local_part,
    name_of,
    optimizers,
    reprs,
    then,
    torch_compat,
    warn_once,
)
from fnloop.schedules import check_length, explain_unknown_length, updates_in

log = logging.getLogger("fnloop")
Json = Any  # a JSON value

# --------------------------------------------------------------------------------------------------
# Averages of a model's weights: what is averaged, copies and views of a model with its average.
#
# An average is a slot of a middleware. It holds the parameters and those buffers that are saved
# with the module, floating and finite when the average is made: the running statistics of a
# BatchNorm, but not its counter of batches, and not a mask of infinities, of which there is no
# mean. All other buffers are those of the model, and so is what `only=` does not choose.
#
# A parameter that a run has added, or replaced by one of another shape, is new to an average. It is
# that of the model until the next update, at whose beginning its average begins.

AVERAGED = "averaged"  # the slot that marks a state whose model holds an average: its name


class Average(dict[str, Tensor], View):
    """Averaged tensors, by the names of the parameters and buffers of a module.

    Args:
        tensors: name to tensor, in float32 or wider.
        count: how many averages were made, each from one more update.

    Attributes:
        blended: what an update uses of it; made again when it is needed.
    """

    brings: ClassVar[tuple[Part, ...]]

    def __init__(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (), count: int = 0
    ) -> None:
        super().__init__(tensors)
        self.count = count
        self.blended: object = None

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Return whether it has the average of a tensor. One of another shape is new to it."""
        own = self.get(name)
        if own is None or own.shape != tensor.shape:
            return False
        return own.is_complex() == tensor.is_complex()

    def begin_again(self, state: TrainState) -> Average:
        return self  # a reader of the model has not seen it

    def kept(self) -> dict[str, Json]:
        return {"count": self.count, "tensors": {k: t.detach().clone() for k, t in self.items()}}

    def put_back(self, kept: Mapping[str, Json]) -> None:
        self.count = kept["count"]
        with torch.no_grad():
            for name, tensor in self.items():
                before = kept["tensors"].get(name, tensor)
                if before.shape == tensor.shape:
                    tensor.copy_(like_sharded(before, tensor))
                else:
                    self[name] = before

    def __deepcopy__(self, memo: dict[int, object]) -> Average:
        made = memo[id(self)] = Average(copy.deepcopy(dict(self), memo), self.count)
        return made


# --- what is averaged


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of a module that are saved with it, each once, with its name."""
    saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for name, parameter in module.named_parameters():
        if _is_inexact(parameter):
            yield torch_compat.strip_compile_prefix(name), parameter
    for name, buffer in module.named_buffers():
        if id(buffer) in saved and _is_inexact(buffer):
            yield torch_compat.strip_compile_prefix(name), buffer


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# --- models with an average


def load_average(module: nn.Module, average: Average) -> None:
    """Copy an average into a module."""
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if average.fits(name, tensor):
                tensor.copy_(average[name])


def check_not_averaged(state: TrainState, owner: str) -> None:
    """Raise ValueError if the model of a state holds an average, which no optimizer knows."""
    if AVERAGED in state.slots:
        raise ValueError(
            f'{owner}: this state is averaged(state, "{state.slots[AVERAGED]}"), which is there to '
            "evaluate, predict, save and export. To continue the run, pass the state that averaged "
            "was given. To train from the averaged weights, make a new state: "
            "TrainState.create(state.model, optimizer)"
        )


# --------------------------------------------------------------------------------------------------
# A state whose model holds the averaged weights.


def averaged(state: TrainState, name: str = "ema") -> TrainState:
    """Copy a state, with the averaged weights in its model.

    Use the copy to evaluate, predict, save and export; ``fit`` refuses it. Its optimizer has no
    state, and it has no slots of middleware. What is not averaged is copied from the model. The
    given state does not change.

    Args:
        state: the newest state of a run with ``ema`` or ``swa``.
        name: the name of the average.

    Returns:
        A state with a model of its own.

    Raises:
        StaleStateError: the state has been advanced.
        KeyError: the state has no such average; the message lists those that it has.
        ValueError: the model of the state is an average already.
        NotImplementedError: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(fl.ema(0.5))(toy_loss)
        >>> state = fl.fit(step, toy(w=0.0, lr=1.0), [torch.tensor([4.0])], hooks=())
        >>> state.model.w.item(), averaged(state).model.w.item()
        (-4.0, -2.0)
        >>> fl.evaluate(step, averaged(state), [torch.tensor([1.0])])
        {'loss': -2.0}

    Replaces: keras.SwapEMAWeights
    """
    check_not_stale(state, "averaged")
    checks.text("averaged", "name", name, "the name of an average")
    check_not_averaged(state, "averaged")
    average = state.slots.get(name)
    if not isinstance(average, Average):
        found = [slot for slot, value in state.slots.items() if isinstance(value, Average)]
        there = f"those are: {', '.join(found)}" if found else "it has none: list ema() or swa()"
        raise KeyError(f"averaged: this state has no average {name!r}; {there}")
    if is_sharded(state.model):
        raise NotImplementedError(
            "averaged: a model that is sharded over processes cannot be copied: write "
            "save(state, path), and restore that into a model that is not sharded: "
            f'averaged(restore(path, state), "{name}")'
        )
    state = attrs.evolve(Ownership.leave_run(state), slots={AVERAGED: name}, metrics={})
    # The copies of all optimizers begin without state.
    made = copy_handles(state, {id(o.state): defaultdict(dict) for o in optimizers(state).values()})
    load_average(unwrap(made), average)
    return made


# --------------------------------------------------------------------------------------------------
# Averages in a checkpoint: each has a file that loads into the plain module.


def _save(saving: Saving) -> dict[str, Json]:
    module, facts = unwrap(saving.state), {}
    for name, average in saving.state.slots.items():
        if isinstance(average, Average):
            facts[name] = _encode(saving, average, module, saving.file(name))
    return {"averages": facts} if facts else {}


def _encode(
    saving: Saving, average: Average, module: nn.Module, tensors: dict[str, Tensor]
) -> dict[str, Json]:
    here = dict(named_tensors(module))
    names = {id(tensor): name for name, tensor in here.items()}
    # What is new to the average is that of the model in the file, and begins after a resume too.
    kept = {k: t for k, t in average.items() if k in here and average.fits(k, here[k])}
    places: dict[str, str] = {}  # of a tied tensor every name is in the file, and one is here
    encoded: dict[str, Json] = {}
    for spelled, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            key = torch_compat.strip_compile_prefix(spelled)
            name = names.get(id(value), key)
            encoded[key] = saving.encode(kept.get(name, value), tensors, key)
            places[name] = key
    for name, tensor in kept.items():
        if name not in places:  # the module does not save it
            encoded[name], places[name] = saving.encode(tensor, tensors, name), name
    found = {name: places[name] for name in kept}
    pairs = [name for name, key in found.items() if "complex" in encoded[key]]
    return {"count": average.count, "tensors": found, "complex": pairs}


def _prepare(saved: Restoring) -> Callable[[TrainState], TrainState]:
    """Return how to put averages in their slots, after the model: its buffers may have grown."""
    found: dict[str, Average] = {}
    for slot, facts in saved.facts["averages"].items():
        group, pairs = saved.groups[slot], facts["complex"]
        found[slot] = Average(count=facts["count"])
        for name, key in facts["tensors"].items():
            found[slot][name] = saved.decode({"$tensor": key, "complex": name in pairs}, group)

    def load(state: TrainState) -> TrainState:
        here, slots = dict(named_tensors(unwrap(state))), dict(state.slots)
        for slot, average in found.items():
            if any(k not in here or here[k].shape != t.shape for k, t in average.items()):
                log.warning("restore: the average %r is of another model, and begins again", slot)
                slots.pop(slot, None)
            else:
                placed = {k: _place(t, here[k]) for k, t in average.items()}
                slots[slot] = Average(placed, average.count)
        return attrs.evolve(state, slots=slots)

    return load


def _place(tensor: Tensor, like: Tensor) -> Tensor:
    return like_sharded(tensor.to(like.device), like.detach())


def _templates(state: TrainState, facts: Mapping[str, Json]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the model by the names of those in the file of each average."""
    module = unwrap(state)
    model = {
        torch_compat.strip_compile_prefix(name): value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    own = dict(named_tensors(module))
    return {
        slot: model | {key: own[name] for name, key in kept["tensors"].items() if name in own}
        for slot, kept in facts["averages"].items()
    }


AVERAGES = Part("averages", _save, _prepare, _save, templates=_templates)
Average.brings = (AVERAGES,)


# --------------------------------------------------------------------------------------------------
# The middleware.


_FILES = (*Part.TAKEN, AVERAGED)
# Middleware that others know by their names.
_KNOWN = ("amp", "clip", "closure", "cuda_graph", "local_sgd", "plateau", "tbptt", "timings")


# (state, average) -> how much of the weights is blended in, from 0 to 1, or None: they are copied;
# and how many averages have been made then.
_Choice = Callable[[TrainState, Average], tuple[float | None, int]]


@middleware("update")
def ema(
    decay: float | Callable[[int], float] = 0.999,
    *,
    start: float = 0,
    every: int = 1,
    evaluate: bool | str = True,
    name: str = "ema",
    only: Selectors | None = None,
) -> Middleware:
    """Keep an exponential moving average of the weights, and evaluate it beside the model.

    Up to update ``start``, the average equals the weights. Each ``every``-th applied update after
    it makes it ``decay × average + (1 - decay) × weights``. Training does not depend on it. A
    skipped update changes nothing. The average continues from phase to phase; updates count from
    the beginning of the run.

    Args:
        decay: the weight of the average so far, from 0 to 1. It averages over about ``1 / (1 -
            decay)`` of its updates. Or a function of n, the number of averages made before, from 0:
            ``lambda n: min(0.999, (1 + n) / (10 + n))`` warms up.
        start: updates (an int), or a fraction of the run (a float).
        every: applied updates from one blend to the next; at least 1.
        evaluate: True evaluates the model and the average: "valid/loss" and "valid/ema/loss", and
            so with each metric. "only" evaluates the average alone, as "valid/loss"; False the
            model alone.
        name: the name of the slot, of the file in a checkpoint, and of the metrics.
        only: what is averaged, by selectors as in ``freeze``: modules of the model, globs of names,
            or functions ``(name, parameter) -> bool``; one or a list of them. The rest is not: in
            the average, it is that of the model at the time. Buffers are averaged with a module
            that is chosen as a whole. By default everything.

    Returns:
        A middleware of the update ring, and of the step and the evaluation ring.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. When composing: two averages
            have ``evaluate="only"``. When it runs: ``start`` is a fraction, and the length of the
            run is unknown; the function ``decay`` returns something other than a number from 0 to
            1; a selector matches nothing in the model; or the slot is of other parts of it.
        NotImplementedError: when a run starts: the average would be evaluated, and the model is
            under ``fully_shard``. At an evaluation: the model cannot be copied.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, x = fl.pipeline(ema(0.5))(toy_loss), torch.tensor([4.0])
        >>> state = fl.fit(step, toy(w=0.0, lr=1.0), ([x, x], [x]), hooks=())
        >>> state.slots["ema"]["w"].item()           # (0 + -4) / 2, then (-2 + -8) / 2
        -5.0
        >>> state.history["valid/loss"], state.history["valid/ema/loss"]
        ((-32.0,), (-20.0,))
        >>> step = fl.pipeline(ema(lambda n: n / (n + 1)))(toy_loss)     # the mean of all updates
        >>> fl.fit(step, toy(w=0.0, lr=1.0), [x, x], hooks=()).slots["ema"]["w"].item()
        -6.0

    Notes:
        The slot ``state.slots["ema"]`` holds parameters and floating buffers (such as the
        statistics of a BatchNorm) by name, in float32 or wider; all other buffers are those of the
        model. :func:`averaged` returns a state with the average in its model. A checkpoint has
        ``ema.safetensors``, which loads into the plain module as ``model.safetensors`` does.

        A parameter that is added during the run, or replaced by one of another shape, is averaged
        from its value before its first update on. One that is replaced by another of its shape
        continues the average of its name.

        In a middleware of the forward ring, ``state.slots["ema"]`` is the average after the update
        before: a teacher. ``torch.func.functional_call(state.model, dict(state.slots["ema"]),
        inputs)`` calls the model with it. Pass copies if a BatchNorm in training mode would change
        its statistics.

        Other libraries warm up by rules that are functions of n. timm: ``lambda n: min(decay, 1 -
        (1 + n / gamma) ** -power)``. diffusers, with ``use_ema_warmup``: the same, with its
        ``inv_gamma``. DINO: ``lambda n: 1 - (1 - m) * (1 + math.cos(math.pi * n / total)) / 2``.

    Source: Polyak & Juditsky, 1992, https://doi.org/10.1137/0330046. The same numbers as timm's
    ``ModelEmaV3``, and with ``start=1``, as its first update copies the weights, those of
    ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``.

    Replaces: lightning.EMAWeightAveraging, pytorch_accelerated.ModelEmaCallback, keras.use_ema,
    by_hand.AveragedModel
    """
    meaning = "the weight of the average so far"
    if callable(decay):
        meaning = f"{meaning}, a number or a function of how many averages were made before"
        weight_of = _weights(checks.function("ema", "decay", decay, meaning, 1))
    else:
        new = 1 - checks.number("ema", "decay", decay, meaning, least=0, most=1)
        weight_of = lambda count: new
    chosen = None if only is None else Chosen("ema", only, name)
    return _make("ema", weight_of, start, every, evaluate, name, chosen)


def _weights(decay: Callable[[int], float]) -> Callable[[int], float]:
    """Return how much of an update is blended in, by how many were before it."""

    def weight_of(count: int) -> float:
        __tracebackhide__ = True
        called = f"decay({count}) of {name_of(decay)}"
        return 1 - float(
            checks.number(
                "ema", called, decay(count), least=0, most=1, finite=False, wrong_type=TypeError
            )
        )

    return weight_of


@middleware("update")
def swa(
    start: float = 0.75, *, every: int = 1, evaluate: bool | str = True, name: str = "swa"
) -> Middleware:
    """Keep the mean of the weights over the last part of a run, and evaluate it beside the model.

    Up to update ``start``, the average equals the weights. Each ``every``-th applied update after
    it counts in the mean. Everything else is as with :func:`ema`. Choose the learning rate with
    ``schedule``: high and constant in the last part. The running statistics of BatchNorm are
    averaged too; :func:`update_batchnorm` computes them for the averaged weights.

    Args:
        start: updates (an int), or a fraction of the run (a float).
        every: applied updates from one that counts to the next; at least 1.
        evaluate: True evaluates the model and the average: "valid/loss" and "valid/swa/loss", and
            so with each metric. "only" evaluates the average alone, as "valid/loss"; False the
            model alone.
        name: the name of the slot, of the file in a checkpoint, and of the metrics.

    Returns:
        A middleware of the update ring, and of the step and the evaluation ring.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`ema`.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(swa(0.5))(toy_loss)
        >>> state = fl.fit(step, toy(w=0.0, lr=1.0), [torch.tensor([1.0])] * 4, hooks=())
        >>> state.model.w.item(), fl.averaged(state, "swa").model.w.item()      # (-3 + -4) / 2
        (-4.0, -3.5)

    Source: Izmailov et al., 2018, https://arxiv.org/abs/1803.05407. The same numbers as
    ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``.

    Replaces: lightning.StochasticWeightAveraging
    """
    return _make("swa", lambda count: 1 / (count + 1), start, every, evaluate, name)


def _make(
    owner: str,
    weight_of: Callable[[int], float],
    start: float,
    every: int,
    evaluate: bool | str,
    name: str,
    only: Chosen | None = None,
) -> Middleware:
    """Return the middleware of an average.

    Args:
        owner: the name of the factory.
        weight_of: how many updates were blended in -> how much of the next is.
        start, every, evaluate, name, only: as in :func:`ema`.
    """
    check_length(owner, "start", start)
    checks.integer(owner, "every", every, "the applied updates from one blend to the next")
    if not isinstance(evaluate, bool) and evaluate != "only":
        raise ValueError(
            f'{owner} expects evaluate as True (the model and the average), "only" (the average '
            f"alone) or False (the model alone); got {checks.describe(evaluate)}"
        )
    _check_name(owner, name)
    choose = _choice(owner, weight_of, start, every)
    return Middleware(
        name,
        update=_blend(name, only),
        step=_choose_weight(name, choose, only),
        init=lambda state: _first_average(state, name, bool(evaluate), only),
        view=_AverageView(name, beside=evaluate is True) if evaluate else None,
        adds=(),
    )


def _choice(owner: str, weight_of: Callable[[int], float], start: float, every: int) -> _Choice:
    def choose(state: TrainState, average: Average) -> tuple[float | None, int]:
        __tracebackhide__ = True
        begin = start if isinstance(start, int) else _updates_in(owner, start, state)
        after, count = state.step + 1 - begin, average.count
        more = count - max(after - 1, 0) // every
        if more and isinstance(start, float) and state.backend.main:
            _warn_of_total(owner, start, begin, more, after > 0)
        if after > 0:
            return (0.0, count) if after % every else (weight_of(count), count + 1)
        return None, 0

    return choose


def _updates_in(owner: str, start: float, state: TrainState) -> int:
    """Return a fraction of the run in updates.

    Raises:
        ValueError: the length of the run is unknown.
    """
    total = state.run.total_steps if state.run else None
    if total is None and start:
        raise ValueError(explain_unknown_length(f"{owner}(start={start})", state))
    return updates_in(start, total or 0)


def _warn_of_total(owner: str, start: float, begin: int, more: int, begun: bool) -> None:
    """Warn that an average is not of the updates that the total of its run says.

    Args:
        owner: the name of the factory.
        start: from which fraction of the run it is an average, and
        begin: how many updates that is.
        more: how many updates too many it is of; too few if below 0.
        begun: whether that many were made.
    """
    has = f"is of {reprs.format_count(abs(more), 'update')} too {'many' if more > 0 else 'few'}"
    has = has if begun else f"is the weights again through update {begin}"
    warn_once(
        f"{owner}: start={start} is update {begin} of this run, and the average {has}: the run had "
        f"another length before, or {owner} was listed later. To begin at the same update in a run "
        "of any length, write start as a number of updates"
    )


def _check_name(owner: str, name: str) -> None:
    checks.text(owner, "name", name, "the name of its slot, its file and its metrics")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name.lower() in _FILES:
        raise ValueError(
            f"{owner} expects name as letters, digits, _ and -, and none of "
            f"{', '.join(_FILES)}, because a checkpoint has a file of this name; got {name!r}"
        )
    checks.name_of_file(owner, "name", name)
    if name in _KNOWN:
        raise ValueError(
            f"{owner} expects name as another one than {', '.join(_KNOWN)}, which are names of "
            f"other middleware; got {name!r}"
        )


# --------------------------------------------------------------------------------------------------
# What is averaged, and where an average begins.

_Place = tuple[dict[str, Tensor | None], str]  # a table of buffers, and a name in it


def _first_average(
    state: TrainState, name: str, evaluated: bool, only: Chosen | None = None
) -> Average:
    """Return the average of a state before its first update: its weights.

    Args:
        state: the state.
        name: the name of the average.
        evaluated: whether evaluations evaluate it.
        only: what is averaged.

    Raises:
        NotImplementedError: the average would be evaluated, and the model is sharded.
        ValueError: a selector is for nothing in the model, or for nothing that has a mean.
    """
    if AVERAGED in state.slots:
        return Average()  # the model is the average
    if evaluated:
        _check_can_be_evaluated(state, name)
    module = unwrap(state)
    if only is None:
        return _make_average(module)
    found = _make_average(module, _chosen_in(module, only))
    if not found:
        raise ValueError(
            f"{name}: only= chooses nothing that has a mean: no parameter, and no buffer of "
            "floating dtype that is saved with the model"
        )
    return found


def _chosen_in(module: nn.Module, only: Chosen) -> set[str]:
    """Return the names of what selectors choose: parameters, and buffers of whole modules.

    Raises:
        ValueError: a selector is for nothing in the model.
    """
    found = only.select(module)
    return {*found.parameters, *_buffers(module, found.modules)}


def _buffers(module: nn.Module, among: Container[nn.Module] | None = None) -> dict[str, _Place]:
    """Return where the buffers of a module are, by name; of those modules in it, or of all."""
    found: dict[str, _Place] = {}
    for prefix, part in module.named_modules():
        if among is None or part in among:
            for key in torch_compat.buffers_of(part):
                path = torch_compat.strip_compile_prefix(f"{prefix}.{key}" if prefix else key)
                found[path] = (torch_compat.buffers_of(part), key)
    return found


# --------------------------------------------------------------------------------------------------
# Updates: blend the new weights in.


class _Group(NamedTuple):
    """Tensors of one device and one dtype.

    Args:
        targets: the average.
        parameters: the first of the tensors to blend in.
        buffers: where the others are: a module may put another tensor there.
        weight: how much of them is blended in, on the device; for recorded updates.
    """

    targets: list[Tensor]
    parameters: list[Tensor]
    buffers: list[_Place]
    weight: Tensor

    def sources(self, sharded: bool) -> Sequence[Tensor]:
        found = self.parameters
        if self.buffers:
            found = [*found, *map(_buffer_at, self.buffers)]
        return [local_part(t) for t in found] if sharded else found


def _buffer_at(place: _Place) -> Tensor:
    table, key = place
    buffer = table[key]
    assert buffer is not None
    return buffer


def _make_average(module: nn.Module, chosen: Container[str] | None = None) -> Average:
    """Return an average that is the weights of a module, in memory of its own.

    Args:
        module: the module.
        chosen: the names of what is averaged; None is everything.
    """
    found = Average()
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if chosen is not None and name not in chosen:
                continue
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter or bool(torch.isfinite(tensor).all()):
                found[name] = _begin_at(tensor)
    return found


def _begin_at(tensor: Tensor) -> Tensor:
    """Return the average of a tensor that begins at its value."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.detach().to(wide, copy=True)


def _copy_with_average(module: nn.Module, average: Average) -> nn.Module:
    """Return a copy of a module whose weights are an average.

    Its parameters are in the memory of the average where the dtypes are the same, or else in that
    of the module if they are not averaged, so it is not to be trained. Its buffers are its own.

    Args:
        module: the user's module in the model of a state.
        average: the average.
    """
    memo: dict[int, object] = {}
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            averaged = average.fits(name, tensor)
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = _parameter_like(tensor, average[name]) if averaged else tensor
            elif averaged:
                memo[id(tensor)] = average[name].to(tensor.dtype, copy=True)
        for part in module.modules():
            inside = (*torch_compat.buffers_of(part).values(), *vars(part).values())
            for value in inside:  # torch refuses to copy what was computed from parameters
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo.setdefault(id(value), value.detach().clone())
        return copy.deepcopy(module, memo)


def _parameter_like(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    if type(parameter) is nn.Parameter:
        return nn.Parameter(value.to(parameter.dtype), parameter.requires_grad)
    made = copy.deepcopy(parameter)  # a class of the user's, which may need more than a tensor
    made.copy_(value)
    return made


class _Blended:
    """The tensors of an average beside those of the model, and the weight of the next update."""

    def __init__(self, state: TrainState, average: Average, name: str, only: Chosen | None) -> None:
        self.parameters = all_parameters(state)
        self.sharded = is_sharded(state.model)
        self.weight: float | None = None
        self.groups = _pair(unwrap(state), average, name, only)
        self.filled: float | None = None

    def fill(self, weight: float | None) -> None:
        """Set how much of the weights the next update blends in."""
        self.weight = weight
        full = 1.0 if weight is None else weight
        if full != self.filled:
            self.filled = full
            for group in self.groups:
                group.weight.fill_(full)

    def blend(self) -> None:
        recorded, weight = host().is_recorded, self.weight
        if weight == 0 and not recorded:
            return
        with torch.no_grad():
            for group in self.groups:
                sources = group.sources(self.sharded)
                if weight is None and not recorded:
                    torch_compat.foreach_copy_(group.targets, sources)
                    continue
                dtype = group.weight.dtype
                if any(source.dtype != dtype for source in sources):
                    sources = [source.to(dtype) for source in sources]
                if recorded or weight is None:
                    torch_compat.foreach_lerp_(
                        group.targets, sources, [group.weight] * len(sources)
                    )
                else:
                    torch_compat.foreach_lerp_(group.targets, sources, weight)


def _pair(module: nn.Module, average: Average, name: str, only: Chosen | None) -> list[_Group]:
    """Return the tensors of an average with those of a module, by device and dtype.

    Raises:
        ValueError: the average is of other parts of the module than are chosen.
    """
    _follow(module, average, name, only)
    parameters: dict[str, nn.Parameter] = {
        torch_compat.strip_compile_prefix(key): p for key, p in module.named_parameters()
    }
    buffers = _buffers(module)
    groups = toolz.groupby(lambda key: (average[key].device, average[key].dtype), average)
    made = []
    for (device, dtype), names in groups.items():
        first = [key for key in names if key in parameters]
        others = [key for key in names if key not in parameters]
        made.append(
            _Group(
                [local_part(average[key]) for key in (*first, *others)],
                [parameters[key] for key in first],
                [buffers[key] for key in others],
                torch.zeros((), device=device, dtype=dtype),
            )
        )
    return made


def _follow(module: nn.Module, average: Average, name: str, only: Chosen | None) -> None:
    """Begin the average of what is new in a module at its value, and drop that of what is gone."""
    here = dict(named_tensors(module))
    for key in average.keys() - here.keys():
        del average[key]
    chosen = here.keys() if only is None else _chosen_in(module, only)
    if others := [key for key in average if key not in chosen]:
        raise ValueError(
            f'{name}: the average in state.slots["{name}"] is of other parts of the model than '
            f"only= chooses ({others[0]} differs). To begin a new average, take it out: "
            f'attrs.evolve(state, slots={{k: v for k, v in state.slots.items() if k != "{name}"}})'
        )
    for key, tensor in here.items():
        wanted = key in average or (key in chosen and isinstance(tensor, nn.Parameter))
        if wanted and not average.fits(key, tensor):
            average[key] = _begin_at(tensor)


def _blended(state: TrainState, average: Average, name: str, only: Chosen | None) -> _Blended:
    """Return the tensors of an average beside those that the model has now."""
    blended = average.blended
    if not isinstance(blended, _Blended) or blended.parameters is not all_parameters(state):
        blended = average.blended = _Blended(state, average, name, only)
    return blended


def _choose_weight(name: str, choose: _Choice, only: Chosen | None = None) -> Wrap:
    """Return the wrap of the step ring: decide how much is blended in, and count it."""

    def wrap(step: Step) -> Step:
        def averaging(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            average: Average = state.slots[name]
            weight, count = choose(state, average)
            _blended(state, average, name, only).fill(weight)
            state, out = step(state, batch)
            if out.skip is None:
                average.count = count
            return state, out

        return averaging

    return wrap


def _blend(name: str, only: Chosen | None = None) -> Wrap:
    """Return the wrap of the update ring: blend the new weights into the average."""

    def blending(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        average = state.slots[name]
        weight = average.blended.weight
        blended = _blended(state, average, name, only)  # the update may have replaced some
        blended.fill(weight)
        try:
            blended.blend()
        except RuntimeError as error:
            _check_shapes(unwrap(state), average, name, error)
            raise
        return state, out

    return then(blending)


def _check_shapes(module: nn.Module, average: Average, name: str, error: Exception) -> None:
    """Raise ValueError if something has another shape than its average."""
    for key, tensor in named_tensors(module):
        if key in average and average[key].shape != tensor.shape:
            advice = (
                "put a new nn.Parameter in its place, instead of other memory into p.data"
                if isinstance(tensor, nn.Parameter)
                else "leave the buffer out, with only=, or register it with persistent=False"
            )
            raise ValueError(
                f"{name}: {key} has the shape {tuple(tensor.shape)}, and its average "
                f"{tuple(average[key].shape)}: {advice}"
            ) from error


# --------------------------------------------------------------------------------------------------
# Evaluations.


@attrs.frozen
class _AverageView(View):
    """The view of an average: a copy of the model that has it.

    Args:
        name: the slot of the average.
        beside: whether the model is evaluated too.
    """

    name: str
    beside: bool

    @contextlib.contextmanager
    def show(self, state: TrainState) -> Iterator[nn.Module]:
        """Make a model with the average, for one evaluation of a loader.

        Raises:
            NotImplementedError: the model is sharded, or cannot be copied.
        """
        if AVERAGED in state.slots:
            yield state.model
            return
        _check_can_be_evaluated(state, self.name)
        try:
            made = _copy_with_average(unwrap(state), state.slots[self.name])
        except Exception as error:
            if containers.is_out_of_memory(error):
                error.add_note(
                    f"{self.name}: an evaluation needs memory for one more copy of the model. "
                    f"{self.name}(..., evaluate=False) makes none"
                )
                raise
            raise NotImplementedError(
                f"{self.name}: this {type(unwrap(state)).__name__} cannot be copied, so its "
                f"average cannot be evaluated ({type(error).__name__}: {error}). Write "
                f"{self.name}(..., evaluate=False)"
            ) from error
        yield made


def _check_can_be_evaluated(state: TrainState, name: str) -> None:
    if is_sharded(state.model):
        raise NotImplementedError(
            f"{name}: the average of a model under fully_shard cannot be evaluated during the run: "
            f"write {name}(..., evaluate=False), restore a checkpoint into a model that is not "
            f'sharded, and evaluate averaged(restore(path, state), "{name}")'
        )
