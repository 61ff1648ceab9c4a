"""End a run with its best weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.fsdp import like_sharded, local_part
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.average import Average
from fnloop._core.call import Call
from fnloop._core.copies import with_slot
from fnloop._core.events import END, RECORD
from fnloop._core.monitor import better, check_monitored, mode_of
from fnloop._core.phase import SINCE, first_record
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState, take_ownership
from fnloop._display.checks import choice, metric_name
from fnloop._display.log import log
from fnloop._hooks.wrapper import Hook

__all__ = ["restore_best"]

OWNER = "restore_best"
_Weights = dict[str, Any]  # a state_dict, or the slot that holds one


@attrs.frozen(repr=False)
class restore_best(Hook):
    """End a run with its best weights: ``hooks=(restore_best("valid/loss"),)``.

    Whenever the metric is better than before, the hook copies the module's parameters and buffers,
    and averages of them (``ema``, ``swa``), on their device. They are in ``state.slots``, so
    checkpoints hold them, and a resumed run ends as an uninterrupted one. Each process copies its
    own part of a sharded model.

    When the run reaches its target, or another hook stops it, the copy goes back into the module
    and its averages, and memory is released. Ctrl-C, signals and exceptions change nothing, because
    the run may continue. The closing record of a run counts too, because it is of the weights at
    the end.

    Only the weights go back. With ``restore_best("valid/ema/loss")`` the average is that of the
    best update, as it was evaluated, and the module has its own weights of that update. The
    counters and the optimizer's state stay those of the last update: a run that is continued
    afterwards starts from the best weights with the latest momentum. A checkpoint at the end has
    the best weights if ``checkpoint`` is listed after this hook. If it is listed before, it has the
    last weights, and a run that continues from it starts there. An evaluation with ``at_end()`` is
    of the last weights: to test the best ones, call ``evaluate`` with the state that ``fit``
    returns.

    Args:
        key: the metric, such as "valid/loss". NaN is never the best. Of equals, the first is kept.
        mode: "min" if lower is better, "max" if higher; by default as the name of the metric says.
        since: which weights count: those of the "phase", if there is one, or of the whole "run".

    Returns:
        A hook.

    Raises:
        TypeError: key is not a str.
        ValueError: there is no such mode, or it is None and the name of the metric does not imply
            one. When a run starts: the copy in the state is of another model.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At its first evaluation: there is none, where a middleware or a hook of your own might
            have added it. The message lists those that exist.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> rates = fl.schedule(lambda i, total: (1, 1, -5)[i])         # w is -1, -2, 3
        >>> loaders, hooks = ([torch.ones(1)], [torch.ones(1)]), (restore_best("valid/loss"),)
        >>> state = fl.fit(fl.pipeline(rates)(toy_loss), toy(), loaders, epochs=3, hooks=hooks)
        >>> state.history["valid/loss"], state.model.w.item()
        ((-1.0, -2.0, 3.0), -2.0)
    """

    key: str
    mode: str | None = None
    since: str = attrs.field(default="phase", kw_only=True)

    def __attrs_post_init__(self) -> None:
        metric_name(OWNER, "key", self.key)
        mode_of(OWNER, self.key, self.mode)  # checks it
        choice(OWNER, "since", self.since, SINCE)

    def __repr__(self) -> str:
        given = {"mode": self.mode, "since": None if self.since == "phase" else self.since}
        given = {name: value for name, value in given.items() if value is not None}
        return repr(Call(restore_best, (self.key,), given))

    @property
    def monitors(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metric that decides."""
        return self.key

    @property
    def slot(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the slot with the best weights so far."""
        return f"{OWNER}({self.key})"

    # --- called by the run

    def begin(self, state: TrainState) -> TrainState:
        """Continue with the best weights so far.

        Raises:
            ValueError: they are of another model.
        """
        best, first = self._best(state), first_record(state.phases, self.since)
        if best is not None and best.get("first", 0) < first:
            best = None  # of an earlier phase
        if best is not None and best["weights"] is not None:
            kept = {**best, "weights": _fit_to(state, best["weights"], self.slot)}
        elif best is not None and best["ended"] == [state.step, state.skipped]:
            kept = {**best, **_copy_weights(state)}  # the run that ended has put them back
        else:
            self._warn_of_lost_weights(state, first)
            slots = {name: slot for name, slot in state.slots.items() if name != self.slot}
            return attrs.evolve(state, slots=slots)
        return with_slot(state, self.slot, {**kept, "ended": None})

    def __call__(self, state: TrainState) -> TrainState:
        value = self._measured(state)
        if value is None or not self._improves(state, value):
            return state
        first = first_record(state.phases, self.since)
        best = {"value": value, "step": state.step, "first": first, **_copy_weights(state)}
        best["ended"] = None
        return with_slot(state, self.slot, best)

    def poll(self, state: TrainState) -> TrainState:
        """Check the name of the metric, even at a boundary where the hook itself is not called."""
        self._measured(state)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Restore the best weights if the run has ended by its target or by a hook."""
        return self._restore(state) if END in state.events else state

    def settle(self, state: TrainState) -> TrainState:
        """Restore the best weights if a process was killed before it could."""
        return self._restore(state)

    # --- the best so far

    def _best(self, state: TrainState) -> _Weights | None:
        return state.slots.get(self.slot)

    def _measured(self, state: TrainState) -> float | None:
        """Return the value that was recorded at this boundary, if any."""
        if RECORD not in state.events or not check_monitored(OWNER, self.key, state):
            return None
        return state.history[-1].metrics[self.key]

    def _improves(self, state: TrainState, value: float) -> bool:
        best = self._best(state)
        before = math.nan if best is None else best["value"]
        return better(value, before, mode_of(OWNER, self.key, self.mode))

    def _restore(self, state: TrainState) -> TrainState:
        """Put the best weights into the module, unless those in it are better, and release them."""
        best = self._best(state)
        if best is None or best["weights"] is None:
            return state
        value, step = best["value"], best["step"]
        newest = state.history[-1] if len(state.history) else None
        now = math.nan
        if newest is not None and newest.step == state.step:  # a closing record, for example
            now = newest.metrics.get(self.key, math.nan)
        if self._improves(state, now):
            value, step = now, state.step
        else:
            weights = _fit_to(state, best["weights"], self.slot)
            unwrap(state).load_state_dict(weights, strict=False)
            _load_averages(state, best.get("averages", {}))
            state = take_ownership(state)
            if state.backend.main:
                log.info("%r: the weights are those of step %d (%g)", self, step, value)
        ended = [state.step, state.skipped]
        best = {**best, "value": value, "step": step, "weights": None, "ended": ended}
        return with_slot(state, self.slot, best)

    def _warn_of_lost_weights(self, state: TrainState, first: int) -> None:
        """Say that records from before this hook was listed do not count.

        ``first`` is the index of the first record that would.
        """
        known = state.history[first:]
        if self.key not in known or not state.backend.main:
            return
        mode = mode_of(OWNER, self.key, self.mode)
        record = known.best_record(self.key, mode)
        log.warning(
            "%r: the best value so far, %g, is of step %d, but its weights were not kept: the run "
            "will end with the best weights from here on",
            *(self, record.metrics[self.key], record.step),
        )


def _copy_weights(state: TrainState) -> dict[str, _Weights]:
    """Return copies of what a module saves and of its averages, as they are kept in the slot."""
    averages = {
        name: {"count": slot.count, "tensors": {k: v.detach().clone() for k, v in slot.items()}}
        for name, slot in state.slots.items()
        if isinstance(slot, Average)
    }
    return {"weights": _copy_module(state), "averages": averages}


def _load_averages(state: TrainState, kept: _Weights) -> None:
    """Put copies of averages back into those that the state still has."""
    with torch.no_grad():
        for name, best in kept.items():
            if not isinstance(average := state.slots.get(name), Average):
                continue
            for key, tensor in average.items():
                tensor.copy_(like_sharded(best["tensors"].get(key, tensor), tensor))
            average.count = best["count"]


def _copy_module(state: TrainState) -> _Weights:
    """Return a copy of what a module saves, by name: in one memory what the module has in one."""
    copies: dict[object, Tensor] = {}
    weights: _Weights = {}
    for spelled, value in unwrap(state).state_dict().items():
        name = strip_compile_prefix(spelled)
        if isinstance(value, Tensor):
            memory = local_part(value)
            place = (memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
            if place not in copies or not memory.numel():
                copies[place] = value.detach().clone()
            weights[name] = copies[place]
        else:  # from the module's get_extra_state
            weights[name] = copy.deepcopy(value)
    return weights


def _fit_to(state: TrainState, weights: _Weights, slot: str) -> _Weights:
    """Return weights by the names of a module, sharded as its own are.

    Raises:
        ValueError: they are of another model.
    """
    mine = unwrap(state).state_dict()
    found: _Weights = {}
    for spelled, here in mine.items():
        kept = weights.get(strip_compile_prefix(spelled))
        if isinstance(here, Tensor) and getattr(kept, "shape", None) != here.shape:
            other = f", but of {tuple(kept.shape)}" if isinstance(kept, Tensor) else ""
            raise ValueError(
                f'state.slots["{slot}"] has no weights for {spelled} of shape {tuple(here.shape)}'
                f"{other}. A buffer whose shape changes in training cannot be put back: register "
                "it with persistent=False. If they are of another model, restore without them: "
                'restore(path, state, only=("model", ...)) without "slots"'
            )
        found[spelled] = like_sharded(kept, here) if isinstance(kept, Tensor) else kept
    return found
