"""Updates that may not be made: guards, ways back, and batches in smaller pieces."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from fnloop._backend.containers import is_out_of_memory
from fnloop._core.averages import Average
from fnloop._core.optimizers import RATIO, Group, groups_in, optimizers_in
from fnloop._core.rng import mark_generators
from fnloop._core.serialize import has_pending, materialize
from fnloop._core.state import LEFT_OUT, TrainState, all_parameters, with_slot
from fnloop._core.types import Batch, Middleware, Output, Step, Wrap
from fnloop._display.screen import log
from fnloop._step.engine import engine_of
from fnloop._step.gradients import restore_gradients, run, samples_in, stash_gradients
from fnloop._step.transaction import Judge, Keep, decide, keeping_buffers, kept_again, undo
from fnloop._step.update import Backward, Commuting

# --------------------------------------------------------------------------------------------------
# Guards: they look at an update before it is applied, and may leave it out.


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

    return Commuting(wrap)


def sees_whole_updates(name: str) -> Callable[[Sequence[Middleware]], None]:
    """Return the check of a guard: that no middleware after it changes what it has judged.

    ``accumulate`` may be listed after it where it is inserted inside of it anyway: where all
    of the gradient ring that is listed before ``accumulate`` lets it through to backward.

    Args:
        name: the name of the guard.
    """

    def check(listed: Sequence[Middleware]) -> None:
        at = next(i for i, member in enumerate(listed) if member.name == name)
        for i, member in enumerate(listed[at + 1 :], at + 1):
            scales = member.name in ("amp", "sam") and member.gradient is not None
            is_inside = _adds_in_place(member) and all(map(_lets_through, listed[:i]))
            if scales or (member.window > 1 and not is_inside):
                raise ValueError(
                    f"{listed[at]!r} judges whole updates: list it after {member!r}, which acts "
                    "more than once in each, or scales its gradients"
                )

    return check


def _adds_in_place(member: Middleware) -> bool:
    """Return whether ``accumulate`` adds gradients up in ``.grad``, if it is inserted there."""
    return member.call is None or member.call.kwargs.get("dtype") is None


def _lets_through(member: Middleware) -> bool:
    """Return whether a later gradient step may be inserted between a middleware and backward."""
    return (
        member.gradient is None
        or isinstance(member.gradient, Commuting)
        or member.name in ("amp", "microbatch", RETRY)  # they are about backward alone
    )


# --------------------------------------------------------------------------------------------------
# A copy of what updates change, which a middleware keeps in its slot to go back to.
#
# It is plain data, so that a checkpoint can hold it. Going back changes tensors in place: the model
# and the optimizers stay the same objects.

Kept = Group  # what keep returns: plain data by name


def keep(state: TrainState, without: str) -> Kept:
    """Return a copy of the weights, the optimizers, the slots of the step, and the counters.

    What hooks keep is about records, which stay, as the updates left out of ended epochs do.

    Args:
        state: the state after an update.
        without: the name of the slot that the copy will be part of.
    """
    memo = _shared(state)
    averages = {name: slot for name, slot in state.slots.items() if isinstance(slot, Average)}
    left = {without, LEFT_OUT, *averages, *(state.run.hook_slots if state.run else ())}
    slots = {name: state.slots[name] for name in state.slots.keys() - left}
    return {
        "counters": {"step": state.step, "updates": dict(state.updates)},
        "model": {name: tensor.detach().clone() for name, tensor in _tensors(state)},
        "optimizers": [
            [copy.deepcopy(optimizer.state.get(p), memo) for p in _updated(optimizer)]
            for optimizer in optimizers_in(state.optimizer).values()
        ],
        "groups": [copy.deepcopy(_settings(group), memo) for group in groups_in(state.optimizer)],
        "averages": {
            name: {"tensors": {k: t.clone() for k, t in slot.items()}, "count": slot.count}
            for name, slot in averages.items()
        },
        "slots": copy.deepcopy(slots, memo),
    }


def go_back(state: TrainState, kept: Kept) -> TrainState:
    """Return the state with the values of a copy. The position in the data stays where it is.

    Updates that were made since the copy count as skipped ones.

    Raises:
        ValueError: the state has other parameters than the copy.
    """
    memo, tensors = _shared(state), dict(_tensors(state))
    groups, optimizers = groups_in(state.optimizer), list(optimizers_in(state.optimizer).values())
    if (
        {name: t.shape for name, t in tensors.items()}
        != {name: t.shape for name, t in kept["model"].items()}
        or len(groups) != len(kept["groups"])
        or [len(saved) for saved in kept["optimizers"]] != [len(_updated(o)) for o in optimizers]
    ):
        raise ValueError("the snapshot is of a state with other parameters")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(kept["model"][name])
    for optimizer, saved in zip(optimizers, kept["optimizers"], strict=True):
        for p, values in zip(_updated(optimizer), saved, strict=True):
            if values is None:
                optimizer.state.pop(p, None)
            else:
                optimizer.state[p] = _changed(optimizer.state.get(p), values, memo)
    for group, settings in zip(groups, kept["groups"], strict=True):
        for name in _settings(group).keys() - settings.keys():
            del group[name]  # such as what a schedule had set, which it compares with what is there
        for name, value in settings.items():
            group[name] = _changed(group.get(name), value, memo)
    slots = dict(state.slots)
    for name, saved in kept["averages"].items():
        average = slots.get(name)
        if isinstance(average, Average):
            average.count = saved["count"]
            for k, tensor in average.items():
                tensor.copy_(saved["tensors"][k])
    for name, saved in kept["slots"].items():
        if name in slots:
            like, saved = copy.deepcopy((slots[name], saved), memo)
            slots[name] = materialize(like, saved) if has_pending(saved) else saved
    counters = {name: copy.copy(value) for name, value in kept["counters"].items()}
    skipped = state.step + state.skipped - counters["step"]
    return attrs.evolve(state, slots=slots, skipped=skipped, **counters)


def _shared(state: TrainState) -> dict[int, object]:
    """Return what copies refer to and do not copy: the model, its tensors and the optimizers."""
    live = [state.model, *(t for _, t in _tensors(state)), *optimizers_in(state.optimizer).values()]
    live += [p for group in groups_in(state.optimizer) for p in group["params"]]
    return {id(one): one for one in live}


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    yield from state.model.named_parameters()
    yield from state.model.named_buffers()


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settings(group: Group) -> Group:
    """Return the settings of a group; its ratio is there during an update only."""
    return {name: value for name, value in group.items() if name not in ("params", RATIO)}


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


# --------------------------------------------------------------------------------------------------
# Forward and backward that are repeated with smaller pieces when there is no memory left.

RETRY = "retry_on_oom"  # the name of the middleware
_ONE_SAMPLE = "retry_on_oom: a single sample does not fit into the memory that is left"


class InPieces(Backward):
    """Backward that takes each batch in pieces. It is a layer of its own, which messages name."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        making, pieces = engine_of(state).start(self.loss, state, (batch,), self.size, alone=True)
        return self.kept(*run(making, state, pieces))


class Retrying(Backward):
    """Backward that begins a window again, with pieces half as large, if it runs out of memory.

    The size of the pieces is in a slot; 0 means whole batches. It is the same in all processes.

    Args:
        backward: what it is instead of. It may take batches in pieces already.
    """

    def __init__(self, backward: Backward) -> None:
        super().__init__(backward.loss, backward.size, backward.drops)
        self._keep_buffers = keeping_buffers()

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return self._try(state, (batch,), alone=True)

    def accumulate(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return self._try(state, window, alone=False)

    def _try(
        self, state: TrainState, window: Sequence[Batch], *, alone: bool
    ) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        size: int | None = state.slots[RETRY] or self.size
        stashed, repeat = stash_gradients(state), _mark(state, self._keep_buffers)
        while True:
            try:
                given = (self.loss, state, window, size)
                making, pieces = engine_of(state).start(*given, alone=alone, guarded=True)
                new, out = run(making, state, pieces)
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                size = _smaller(state, window, size, error)
            _free(state.backend.device)  # what the error held is free now
            repeat()
            state = with_slot(state, RETRY, size)
        restore_gradients(new, stashed)
        return self.kept(new, out)


def _smaller(state: TrainState, window: Sequence[Batch], size: int | None, error: Exception) -> int:
    """Return half the size of the largest piece in any process.

    Raises:
        Exception: the one given, with a note why pieces cannot be smaller.
    """
    __tracebackhide__ = True
    note = _ONE_SAMPLE
    try:
        samples = max(map(samples_in, window))
    except ValueError as cannot:
        samples, note = 0, f"retry_on_oom cannot repeat this with smaller pieces: {cannot}"
    engine = engine_of(state)
    stuck = engine.largest(samples == 0)
    largest = engine.largest(min(samples, size or samples))
    if stuck or largest <= 1:
        error.add_note(note)
        raise error
    half = (largest + 1) // 2
    if state.backend.main:
        log.warning(
            "no memory left for %d samples at once: this update is repeated in pieces of %d, and "
            "later ones begin with them. To begin a run so, list microbatch(%d)",
            *(largest, half, half),
        )
    return half


def _mark(state: TrainState, keep_buffers: Keep) -> Callable[[], None]:
    """Return a function that restores what forward and backward change, as it is now.

    The gradients must not be there yet.
    """
    restore_generators = mark_generators(state.backend.device)
    repeat_draws = engine_of(state).mark_draws()
    put_back = [keep_buffers(state), *kept_again(state), restore_generators, repeat_draws]

    def restore() -> None:
        for p in all_parameters(state):
            p.grad = None
        undo(put_back)

    return restore


def _free(device: torch.device) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(AttributeError, NotImplementedError):
            torch.get_device_module(device).empty_cache()
