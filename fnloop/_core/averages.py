"""Averages of a model's weights, as values: copies, views, and states that hold them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import is_sharded, like_sharded
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.optimizers import optimizers_in
from fnloop._core.parts import Json, Load, Part, Restoring, Saving
from fnloop._core.state import Ownership, TrainState, check_not_stale, copy_handles, unwrap
from fnloop._display import checks
from fnloop._display.screen import log

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


class Average(dict[str, Tensor]):
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

    def __deepcopy__(self, memo: dict[int, object]) -> Average:
        made = memo[id(self)] = Average(copy.deepcopy(dict(self), memo), self.count)
        return made


# --- what is averaged


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of a module that are saved with it, each once, with its name."""
    saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for name, parameter in module.named_parameters():
        if _is_inexact(parameter):
            yield strip_compile_prefix(name), parameter
    for name, buffer in module.named_buffers():
        if id(buffer) in saved and _is_inexact(buffer):
            yield strip_compile_prefix(name), buffer


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# --- models with an average


def load_average(module: nn.Module, average: Average) -> None:
    """Copy an average into a module."""
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if average.fits(name, tensor):
                tensor.copy_(average[name])


def check_not_averaged(owner: str, state: TrainState) -> None:
    """Raise if the model of a state holds an average, which no optimizer knows.

    Args:
        owner: what was called with it.
        state: the state.

    Raises:
        ValueError: it does.
    """
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
    check_not_averaged("averaged", state)
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
    memo: dict[int, object] = {
        id(optimizer.state): defaultdict(dict)
        for optimizer in optimizers_in(state.optimizer).values()
    }
    made = copy_handles(state, memo)
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
            key = strip_compile_prefix(spelled)
            name = names.get(id(value), key)
            encoded[key] = saving.encode(kept.get(name, value), tensors, key)
            places[name] = key
    for name, tensor in kept.items():
        if name not in places:  # the module does not save it
            encoded[name], places[name] = saving.encode(tensor, tensors, name), name
    found = {name: places[name] for name in kept}
    pairs = [name for name, key in found.items() if "complex" in encoded[key]]
    return {"count": average.count, "tensors": found, "complex": pairs}


def _prepare(saved: Restoring) -> Load:
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
        strip_compile_prefix(name): value
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
