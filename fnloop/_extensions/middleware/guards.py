"""Leave out updates that would do harm."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from fnloop import decide
from fnloop._core.several import Several
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop.extend import (
    Batch,
    Pending,
    Setting,
    Stop,
    View,
    Wrap,
    checks,
    engine_of,
    gradients,
    groups,
    local_part,
    optimizers,
    parameters,
    refuse,
    reprs,
    torch_compat,
)

# --------------------------------------------------------------------------------------------------
# Guards: they look at an update before it is applied, and may leave it out.

Judge = Callable[[TrainState, bool], str | None]  # as decide takes it


def guarding(examine: Callable[[TrainState, Output], tuple[Tensor, Judge]]) -> Wrap:
    """Return the wrap of the gradient ring that leaves out what a guard finds wrong.

    Args:
        examine: ``(state, out) -> flag, judge``, as ``decide`` takes them.
    """

    def wrap(step: Step) -> Step:
        def guarded(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is not None and engine_of(state).calls_every_batch:
                return state, out  # with several processes, others may have to decide
            return decide(state, out, *examine(state, out))

        return guarded

    return wrap


def sees_whole_updates(name: str) -> Callable[[Sequence[Middleware]], None]:
    """Return the check of a guard: that no middleware after it changes what it has judged.

    ``accumulate`` may be listed after it where it is inserted inside of it all the same: where all
    of the gradient ring that is listed before ``accumulate`` lets it through to backward.

    Args:
        name: the name of the guard.
    """

    def check(listed: Sequence[Middleware]) -> None:
        at = next(i for i, member in enumerate(listed) if member.name == name)
        for i, member in enumerate(listed[at + 1 :], at + 1):
            scales = member.name in ("amp", "sam") and member.gradient is not None
            is_inside = "sums" in member.traits and all(map(_commutes, listed[:i]))
            if scales or (member.window > 1 and not is_inside):
                raise ValueError(
                    f"{listed[at]!r} judges whole updates: list it after {member!r}, which acts "
                    "more than once in each, or scales its gradients"
                )

    return check


def _commutes(member: Middleware) -> bool:
    return member.gradient is None or "commutes" in member.traits


@attrs.define
class Streak:
    """The slot of ``skip_nonfinite``, changed in place.

    Args:
        skipped: how many updates in a row it has left out.
    """

    skipped: int = 0


@middleware("gradient")
def skip_nonfinite(limit: int = 10) -> Middleware:
    """Skip updates whose loss or gradients are infinite or NaN.

    Such an update changes nothing but the position in the data and ``state.skipped``: parameters,
    ``state.step``, schedules, averages and metrics stay as they are, and so do the buffers of the
    model, such as running statistics. So a run equals one whose loader does not have these batches.
    It checks the whole window of ``accumulate``, on all processes, and gradients that ``amp`` has
    unscaled. This needs one device-to-host read per update. ``amp`` already skips updates that
    overflow in fp16; they do not count here.

    List it after middleware that may make gradients that are not finite, such as ``clip``.

    Args:
        limit: how many updates in a row may be skipped before the run stops, with a reason in
            ``state.stop``. To continue it: ``attrs.evolve(state, stop=None)``.

    Returns:
        A middleware of the gradient and the step ring.

    Raises:
        TypeError: the limit is not an int.
        ValueError: it is below 1. When composing: ``amp("fp16")`` or ``sam`` is listed after it, or
            ``accumulate`` after it with a dtype, or after another middleware of gradients.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([x]) for x in (1.0, float("nan"), 2.0)]
        >>> state = fl.fit(fl.pipeline(skip_nonfinite())(toy_loss), toy(), batches, hooks=())
        >>> state.model.w.item(), state.step, state.skipped
        (-3.0, 2, 1)
    """
    checks.integer("skip_nonfinite", "limit", limit, "updates in a row", wrong_type=TypeError)
    return Middleware(
        "skip_nonfinite",
        gradient=guarding(_examine_gradients),
        step=_stop_after(limit),
        init=lambda state: Streak(),
        check=sees_whole_updates("skip_nonfinite"),
        adds=(),
        traits=("commutes", "skips", "stacks"),
    )


def _examine_gradients(state: TrainState, out: Output) -> tuple[Tensor, Judge]:
    """Return whether the loss or a gradient is not finite, on the device, and who judges."""
    if isinstance(state.model, Several):
        bad = ~out.loss.isfinite()
        for g in gradients(state):  # stacked: a number of each model in the first dimension
            if g.numel():
                bad |= ~torch.linalg.vector_norm(g.reshape(len(g), -1), math.inf, dim=1).isfinite()
        return bad.any(), functools.partial(_judge_models, out.loss, bad)
    found = out.loss.isfinite()
    own = [local_part(p.grad) for p in parameters(state) if p.grad is not None]
    values = [torch_compat.sparse_values(g) if g.is_sparse else g for g in own]
    values = [each for each in values if each.numel()]  # a shard may have none
    if values:  # the largest magnitude is NaN if any element is
        found = found & get_total_norm(values, math.inf).isfinite().to(found.device)
    return ~found, functools.partial(_judge_gradients, out.loss)


def _judge_models(losses: Tensor, bad: Tensor, state: TrainState, any_bad: bool) -> str | None:
    """Judge the update of a stack: it is left out for all models, or for none.

    Raises:
        FloatingPointError: it is bad for some of them.
    """
    if not any_bad:
        return None
    flags = bad.tolist()  # host reads, of an update that is left out, or ends the run
    if all(flags):
        state.slots["skip_nonfinite"].skipped += 1
        return "skip_nonfinite: the loss or a gradient of every model is not finite"
    names = [name for name, flag in zip(Several.names_of(state.model), flags, strict=True) if flag]
    values = [loss for loss, flag in zip(losses.tolist(), flags, strict=True) if flag]
    raise FloatingPointError(
        "skip_nonfinite: of the models of a stack, a loss or a gradient of "
        f"{checks.join_names(names)} is not finite (the losses are "
        f"{', '.join(f'{value:g}' for value in values[:3])}), and the others are. A stack has "
        "one state.step, so its models cannot skip separately: leave skip_nonfinite out, which "
        "lets such a model diverge alone; or unstack(state) and train the states one by one"
    )


def _judge_gradients(loss: Tensor, state: TrainState, bad: bool) -> str | None:
    if not bad:
        return None
    state.slots["skip_nonfinite"].skipped += 1
    value = float(loss)
    what = "a gradient is not finite" if math.isfinite(value) else f"the loss is {value}"
    return f"skip_nonfinite: {what}"


def _stop_after(limit: int) -> Wrap:
    def stopping(step: Step) -> Step:
        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            streak: Streak = state.slots["skip_nonfinite"]
            if out.skip is None:
                streak.skipped = 0
            elif streak.skipped >= limit:
                streak.skipped = 0  # a run that is continued has as many again
                count = reprs.format_count(limit, "update")
                what = "had a loss or gradients that are not finite"
                stop = Stop(f"skip_nonfinite: {count} in a row {what}", "guard")
                state = attrs.evolve(state, stop=stop)
            return state, out

        return counted

    return stopping


# --------------------------------------------------------------------------------------------------
# Leave out updates whose loss is far above the last ones, go back before them, or stop there.

SPIKES = "spikes"  # state.extra["spikes"]: where they were
MOST_RETURNS = 10  # to one snapshot


@attrs.define
class Losses:
    """The slot of ``spike_guard``, changed in place.

    Args:
        recent: the losses of the last applied updates, the newest last; NaN where there were fewer.
        newest: the loss of the newest update, on the device.
        spike: of the update that was just left out: its loss, and the median before it; or None.
        skipped: how many updates in a row it has left out.
        kept: the newest snapshot to go back to; None before the first, and without "back".
        since: how many updates were applied since then.
        returns: how often it went back to this snapshot.
    """

    recent: Tensor
    newest: Tensor
    spike: tuple[float, float] | None = None
    skipped: int = 0
    kept: Kept | None = None
    since: int = 0
    returns: int = 0


@middleware("gradient")
def spike_guard(window: int = 100, ratio: float = 2.0, then: str = "skip") -> Middleware:
    """Skip updates whose loss is above ``ratio`` × the median of the last ``window`` updates.

    The median is that of the losses of applied updates (of an even number, the lower of the two in
    the middle), which one spike does not move. Only an update after ``window`` applied ones can be
    a spike. For a median below 0 the limit is as far above it as for the positive one: median +
    (ratio - 1) × its magnitude. A NaN is a spike.

    Args:
        window: updates that the median is of, at least 1.
        ratio: how many times the median a loss may be, above 1.
        then: "skip" continues with the next batch; if a whole ``window`` of updates in a row is
            left out, which is not a spike, the run stops. "stop" stops the run at the first one.
            ``state.stop`` says why; to continue, ``attrs.evolve(state, stop=None)``. "back" goes
            back to the newest snapshot, and continues with the next batch. It takes a snapshot
            after every ``window`` applied updates: of the model, the optimizers (their ``state``
            and ``param_groups``), the slots of middleware and ``state.step``. A phase begins with
            the snapshot of where it began. Updates made since then count as skipped; records of
            them stay. A snapshot takes as much memory as the model and its optimizer, in
            checkpoints too. The run stops when it has gone back to one snapshot 10 times.

    Returns:
        A middleware of the gradient and the step ring.

    Raises:
        TypeError: the window is not an int, or the ratio not a number.
        ValueError: a setting is out of its range. When composing: ``amp("fp16")`` or ``sam`` is
            listed after it, or ``accumulate`` after it with a dtype, or after another middleware of
            gradients. In a
            run: it goes back, and the model or the optimizers have other parameters by now.
        NotImplementedError: "back", and the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> def loss_fn(model, batch):                   # the loss is the batch, the gradient 1
        ...     return model.w - model.w.detach() + batch.mean()
        >>> from fnloop.testing import toy
        >>> batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 9.0, 4.0)]
        >>> step = fl.pipeline(spike_guard(window=3))(loss_fn)
        >>> state = fl.fit(step, toy(), batches, hooks=())
        >>> state.step, state.skipped, state.extra["spikes"][0]["loss"]
        (4, 1, 9.0)

    Notes:
        A skipped update changes nothing but the position in the data and
        ``state.skipped``, as with ``skip_nonfinite``. The losses are those of whole windows of
        ``accumulate``, over all processes. Each spike is noted in ``state.extra["spikes"]``:
        ``{"epoch", "batch", "step", "loss", "median"}``, with the position of its first batch. This
        needs one device-to-host read per update.
    """
    checks.integer(
        "spike_guard", "window", window, "updates that the median is of", wrong_type=TypeError
    )
    meaning = "how many times the median a loss may be"
    checks.number("spike_guard", "ratio", ratio, meaning, above=1, wrong_type=TypeError)
    checks.choice("spike_guard", "then", then, ("skip", "stop", "back"))

    def init(state: TrainState) -> Losses:
        device = state.backend.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        recent = torch.full((window,), math.nan, device=device, dtype=dtype)
        return Losses(recent, torch.zeros((), device=device, dtype=dtype))

    return Middleware(
        "spike_guard",
        gradient=guarding(functools.partial(_examine_loss, ratio)),
        step=_note(window, ratio, then),
        init=init,
        check=sees_whole_updates("spike_guard"),
        check_state=_check_whole if then == "back" else None,
        adds=(),
        traits=("commutes", "skips"),
    )


def _check_whole(state: TrainState, listed: Sequence[Middleware]) -> None:
    """Raise if the model cannot be copied."""
    why = "keeps a copy of the model, and a model that is sharded over processes cannot be copied"
    instead = 'write then="stop", and restore a checkpoint'
    refuse(state, 'spike_guard(then="back")', sharded=f"{why}: {instead}")


def _examine_loss(ratio: float, state: TrainState, out: Output) -> tuple[Tensor, Judge]:
    """Return whether the loss is a spike, on the device, and who judges."""
    losses: Losses = state.slots["spike_guard"]
    losses.newest.copy_(engine_of(state).mean_loss(out))
    median = losses.recent.median()  # NaN until all of them are there
    limit = median + (ratio - 1) * median.abs()
    is_spike = ~(losses.newest <= limit) & ~median.isnan()
    return is_spike, functools.partial(_judge_loss, median, ratio)


def _judge_loss(median: Tensor, ratio: float, state: TrainState, is_spike: bool) -> str | None:
    if not is_spike:
        return None
    losses: Losses = state.slots["spike_guard"]
    losses.spike = loss, usual = float(losses.newest), float(median)
    losses.skipped += 1
    return f"spike_guard: the loss {loss:g} is above {ratio:g} times {usual:g}, the median"


def _note(window: int, ratio: float, then: str) -> Wrap:
    def wrap(step: Step) -> Step:
        def noting(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            at = {"epoch": state.epoch, "batch": state.batch, "step": state.step}
            losses: Losses = state.slots["spike_guard"]
            if len(losses.recent) != window:  # it is that of a checkpoint
                losses.recent = _resized(losses.recent, window)
            if losses.kept is not None and losses.kept.get("phases") != len(state.phases):
                _take_snapshot(state, losses)  # to go back to where the phase has begun
            state, out = step(state, batch)
            if out.skip is None:
                losses.recent.copy_(torch.cat((losses.recent[1:], losses.newest.reshape(1))))
                losses.skipped = 0
                if then == "back":
                    _keep(state, losses, window)
            elif losses.spike is not None:
                loss, usual = losses.spike
                spikes = [*state.extra.get(SPIKES, ()), {**at, "loss": loss, "median": usual}]
                state = attrs.evolve(state, extra={**state.extra, SPIKES: spikes})
                losses.spike = None
                if then == "stop":
                    state = attrs.evolve(state, stop=Stop(out.skip, "guard"))
                elif then == "back":
                    state = _go_back(state, losses)
                elif losses.skipped >= window:
                    losses.skipped = 0  # a run that is continued has as many again
                    count = reprs.format_count(window, "update")
                    reason = (
                        f"spike_guard: {count} in a row had a loss above {ratio:g} times the median"
                    )
                    state = attrs.evolve(state, stop=Stop(reason, "guard"))
            return state, out

        return noting

    return wrap


def _keep(state: TrainState, losses: Losses, window: int) -> None:
    """Keep a snapshot after each ``window`` applied updates."""
    losses.since += 1
    if losses.since >= window:
        _take_snapshot(state, losses)


def _take_snapshot(state: TrainState, losses: Losses) -> None:
    """Keep what there is to go back to."""
    kept = {"recent": losses.recent.clone(), "phases": len(state.phases)}
    losses.kept = {**keep(state, without="spike_guard"), **kept}
    losses.since = losses.returns = 0


def _go_back(state: TrainState, losses: Losses) -> TrainState:
    """Return the state of the newest snapshot, or one that stops."""
    if losses.kept is None:  # the losses are those of a run with another setting
        return state
    state = go_back(state, losses.kept)
    losses.recent.copy_(_resized(losses.kept["recent"], len(losses.recent)))
    losses.since = 0
    losses.returns += 1
    if losses.returns == MOST_RETURNS:
        losses.returns = 0  # a run that is continued has as many again
        reason = f"spike_guard: it went back to step {state.step} {MOST_RETURNS} times"
        state = attrs.evolve(state, stop=Stop(reason, "guard"))
    return state


def _resized(recent: Tensor, window: int) -> Tensor:
    """Return the newest losses, with NaN before them if there are not as many."""
    missing = recent.new_full((max(window - len(recent), 0),), math.nan)
    return torch.cat((missing, recent[-window:]))


# --------------------------------------------------------------------------------------------------
# A copy of what updates change, which a middleware keeps in its slot to go back to.
#
# It is plain data, so that a checkpoint can hold it. Going back changes tensors in place: the model
# and the optimizers stay the same objects.

Kept = dict[str, Batch]  # what keep returns: plain data by name


def keep(state: TrainState, without: str) -> Kept:
    """Return a copy of the weights, the optimizers, the slots of the step, and the counters.

    What hooks keep is about records, which stay, as the updates left out of ended epochs do.

    Args:
        state: the state after an update.
        without: the name of the slot that the copy will be part of.
    """
    memo = _shared(state)
    views = {name: slot.kept() for name, slot in state.slots.items() if isinstance(slot, View)}
    averages = {name: kept for name, kept in views.items() if kept is not None}
    left = {without, *averages, *(state.run.hook_slots if state.run else ())}
    slots = {name: state.slots[name] for name in state.slots.keys() - left}
    return {
        "counters": {"step": state.step, "updates": dict(state.updates)},
        "model": {name: tensor.detach().clone() for name, tensor in _tensors(state)},
        "optimizers": [
            [copy.deepcopy(optimizer.state.get(p), memo) for p in _updated(optimizer)]
            for optimizer in optimizers(state).values()
        ],
        "groups": [copy.deepcopy(Setting.lasting(group), memo) for group in groups(state).values()],
        "averages": averages,
        "slots": copy.deepcopy(slots, memo),
    }


def go_back(state: TrainState, kept: Kept) -> TrainState:
    """Return the state with the values of a copy. The position in the data stays where it is.

    Updates that were made since the copy count as skipped ones.

    Raises:
        ValueError: the state has other parameters than the copy.
    """
    memo, tensors = _shared(state), dict(_tensors(state))
    found, named = [*groups(state).values()], [*optimizers(state).values()]
    if (
        {name: t.shape for name, t in tensors.items()}
        != {name: t.shape for name, t in kept["model"].items()}
        or len(found) != len(kept["groups"])
        or [len(saved) for saved in kept["optimizers"]] != [len(_updated(o)) for o in named]
    ):
        raise ValueError("the snapshot is of a state with other parameters")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(kept["model"][name])
    for optimizer, saved in zip(named, kept["optimizers"], strict=True):
        for p, values in zip(_updated(optimizer), saved, strict=True):
            if values is None:
                optimizer.state.pop(p, None)
            else:
                optimizer.state[p] = _changed(optimizer.state.get(p), values, memo)
    for group, settings in zip(found, kept["groups"], strict=True):
        for name in Setting.lasting(group).keys() - settings.keys():
            del group[name]  # such as what a schedule had set, which it compares with what is there
        for name, value in settings.items():
            group[name] = _changed(group.get(name), value, memo)
    slots = dict(state.slots)
    for name, saved in kept["averages"].items():
        if isinstance(average := slots.get(name), View):
            average.put_back(saved)
    for name, saved in kept["slots"].items():
        if name in slots:
            like, saved = copy.deepcopy((slots[name], saved), memo)
            slots[name] = Pending.fill(like, saved)
    counters = {name: copy.copy(value) for name, value in kept["counters"].items()}
    skipped = state.step + state.skipped - counters["step"]
    return attrs.evolve(state, slots=slots, skipped=skipped, **counters)


def _shared(state: TrainState) -> dict[int, object]:
    """Return what copies refer to and do not copy: the model, its tensors and the optimizers."""
    live = [state.model, *(t for _, t in _tensors(state)), *optimizers(state).values()]
    live += [p for group in groups(state).values() for p in group["params"]]
    return {id(one): one for one in live}


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    yield from state.model.named_parameters()
    yield from state.model.named_buffers()


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _changed(now: object, value: object, memo: dict[int, object]) -> object:
    """Return a value, in the tensors that are there now where they fit."""
    if isinstance(value, Tensor):
        if isinstance(now, Tensor) and id(now) not in memo and _kind(now) == _kind(value):
            return now.copy_(value)
        return value.clone()
    if isinstance(value, dict):
        held = now if isinstance(now, dict) else {}
        return {name: _changed(held.get(name), part, memo) for name, part in value.items()}
    return copy.deepcopy(value, memo)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
