"""The weights of processes that update by themselves for a while (``local_sgd``)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import ClassVar, TypedDict

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._core.state import TrainState, unwrap
from fnloop._extensions.engines import exchanges
from fnloop.extend import (
    Part,
    Restoring,
    Saving,
    View,
    all_parameters,
    collectives,
    torch_compat,
    with_slot,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Between two averages each process has weights of its own. They are in one of two places:
#
#   apart     in the model, as an update leaves them. What reads the weights, an evaluation or a
#             checkpoint, puts the average into the model for that time.
#   at rest   in the slot, as `fit` returns a state, and as a checkpoint is restored. The model
#             holds the average. The next update takes them back.
#
# Buffers are each process's own too. Those of the average are the main process's, as everywhere.

LOCAL_SGD = "local_sgd"  # the slot of what processes that update by themselves have as their own
_WHAT = "an average of the weights"


class Shared(TypedDict):
    """What processes share with an outer optimizer, as a checkpoint has it."""

    shared: dict[str, Tensor]  # the weights after the last average, by name
    outer: dict[str, object] | None  # the state of the outer optimizer


@attrs.define(eq=False)
class Apart(View):
    """The slot of ``local_sgd``: what is this process's own.

    Args:
        own: its weights and buffers by name, as far as they differ from those in the model; None
            where a run has the model.
        mark: a checksum of the weights that the model had when the run left it, which shows whether
            it was given others.
        moved: whether the weights in the model may differ between processes.
        used: whether any update was made apart, so that the optimizers differ.
        shared: with an outer optimizer, the weights after the last average, by name.
        outer: the outer optimizer, which updates them; None before the first update.
        saved: what a checkpoint has of the outer optimizer, until it is made.
        training: whether an update is being made apart.
        counted: whether a batch of this process counts in that update.
        tensors: the parameters that may differ between processes, by name.
    """

    brings: ClassVar[tuple[Part, ...]]
    own: dict[str, Tensor] | None = None
    mark: int = 0
    moved: bool = False
    used: bool = False
    shared: dict[str, nn.Parameter] = attrs.field(factory=dict)
    outer: Optimizer | None = None
    saved: dict[str, object] | None = None
    training: bool = False
    counted: bool = False
    tensors: dict[str, Tensor] = attrs.field(factory=dict)
    _seen: tuple[list[Tensor], list[bool]] | None = None

    def track(self, state: TrainState) -> None:
        """Note which parameters the next update may change: none is out before an average."""
        params = all_parameters(state)
        flags = [p.requires_grad for p in params]
        if self._seen is not None and self._seen[0] is params and self._seen[1] == flags:
            return
        before, self._seen = self.tensors, (params, flags)
        named = named_parameters(state)
        self.tensors = {k: p for k, p in named.items() if p.requires_grad or k in before}

    def state_dict(self) -> dict[str, object]:
        """Return what states that are compared must agree on, besides what the model holds.

        It is the same before and after the outer optimizer is made of what a checkpoint has.
        """
        return {"own": self.own or {}, "used": self.used, "outer": self.outer_state()}

    def outer_state(self) -> Shared | None:
        """Return what the processes share of the outer optimizer, for a checkpoint."""
        if not self.shared:
            return None
        shared = {name: p.detach() for name, p in self.shared.items()}
        return Shared(shared=shared, outer=self.outer.state_dict() if self.outer else self.saved)

    def take_outer(self, saved: Shared | None) -> None:
        """Take what :meth:`outer_state` returned. The next update makes the outer optimizer."""
        if saved is not None:
            self.shared = {name: nn.Parameter(t) for name, t in saved["shared"].items()}
            self.saved = saved["outer"]

    def forget(self) -> None:
        """Note that the processes have the same weights: from here on, nothing has changed."""
        self.moved, self.tensors, self._seen = False, {}, None

    # --- what readers see

    @property
    def apart(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the model has other weights in each process."""
        return self.moved

    def changes(self, state: TrainState) -> list[Tensor]:
        return [*self.tensors.values(), *state.model.buffers()] if self.moved else []

    @contextlib.contextmanager
    def show(self, state: TrainState) -> Iterator[nn.Module]:
        self.average(state)
        yield state.model

    def average(self, state: TrainState) -> None:
        """Put the average over all processes into the model of a state. A collective."""
        exchanges.mean_over_processes_([p.detach() for p in self.tensors.values()], _WHAT)
        collectives.sync_buffers(state.model)

    # --- at rest

    def hand_over(self, state: TrainState) -> None:
        """Leave the average in the model, and what is this process's own here. A collective."""
        if not (self.moved or self.shared) or self.own is not None:
            return
        own = {name: t.detach().clone() for name, t in own_tensors(state).items()}
        if self.moved:
            self.average(state)
            self.forget()
        self.own, self.mark = own, mark_of(state)

    def take_back(self, state: TrainState) -> None:
        """Put what is this process's own back into the model, before an update. A collective.

        If the model was given other weights meanwhile, every process continues from those.
        """
        if self.own is None:
            return
        here = {**named_parameters(state), **_named_buffers(state)}
        own, mark = self.own, self.mark
        self.own, self.mark = None, 0
        fits = all(k in here and here[k].shape == t.shape for k, t in own.items())
        if collectives.any_rank(not fits or mark_of(state) != mark, "a comparison of the weights"):
            if state.backend.main:
                log.warning(
                    "local_sgd: the model was given other weights since the last update, so every "
                    "process continues from them"
                )
            self.begin_again(state)
            return
        with torch.no_grad():
            for name, value in own.items():
                here[name].copy_(value)
        params = named_parameters(state)
        self.moved, self.tensors = bool(own), {k: params[k] for k in own if k in params}

    def begin_again(self, state: TrainState) -> Apart:
        """Continue from the weights in the model, which are the same in every process."""
        self.own, self.shared, self.outer, self.saved = None, {}, None, None
        self.forget()
        return self


def apart_of(state: TrainState) -> Apart | None:
    """Return the slot of ``local_sgd``, if the state has one."""
    return state.slots.get(LOCAL_SGD)


def trains_apart(state: TrainState) -> bool:
    """Return whether this update uses the gradient of this process alone.

    Raises:
        ValueError: the processes have optimizers of their own, and the step is without
            ``local_sgd``.
    """
    slot = apart_of(state)
    if slot is None or slot.training or not slot.used:
        return slot is not None and slot.training
    raise ValueError(
        "this state was trained with local_sgd, so each process has its own optimizer state: list "
        "local_sgd(...) in the pipeline, or begin from the average, with a new optimizer: "
        "TrainState.create(unwrap(state), optimizer)"
    )


def named_parameters(state: TrainState) -> dict[str, Tensor]:
    """Return all parameters that an update may change, by name."""
    names = {
        id(p): torch_compat.strip_compile_prefix(name)
        for name, p in unwrap(state).named_parameters()
    }
    found = all_parameters(state)
    return {names.get(id(p), f"beside the model, {i}"): p for i, p in enumerate(found)}


def own_tensors(state: TrainState) -> dict[str, Tensor]:
    """Return what is this process's own, by name: of a state that is apart, or at rest."""
    slot = apart_of(state)
    if slot is None or not (slot.moved or slot.own):
        return {}
    return slot.own or {**slot.tensors, **_named_buffers(state)}


def _named_buffers(state: TrainState) -> dict[str, Tensor]:
    return {torch_compat.strip_compile_prefix(name): b for name, b in unwrap(state).named_buffers()}


def mark_of(state: TrainState) -> int:
    """Return a checksum of the parameters, which every change of one bit changes."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for n, tensor in enumerate(all_parameters(state)):
        flat = tensor.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        bits = flat.view(kinds[flat.element_size()]).to(torch.int64)
        sums.append(bits.sum() * (2 * n + 1))  # it wraps around, and so does the sum below
    return int(torch.stack(sums).sum()) if sums else 0  # a host read, outside of updates


# --------------------------------------------------------------------------------------------------
# In a checkpoint: the weights and buffers of each process, and what the processes share.


def _save(saving: Saving) -> dict[str, object]:
    if (slot := apart_of(saving.state)) is None:
        return {}
    own: dict[str, Tensor] = {}
    names = saving.encode(own_tensors(saving.state), own, "own")
    if own or slot.used:  # the same in every process
        saving.add_own(own, "")
    outer = saving.encode(slot.outer_state(), saving.tensors, LOCAL_SGD)
    return {"apart": {"own": names, "used": slot.used, "outer": outer}}


def _prepare(saved: Restoring) -> Callable[[TrainState], TrainState]:
    """Return how to put back what is this process's own, beside the average in the model.

    On another number of processes all continue from the average.
    """
    facts, same, own = saved.facts["apart"], saved.is_of_as_many, {}
    outer = saved.decode(facts["outer"], saved.tensors)
    if same and "model" in saved.parts:
        here = saved.state.backend.device
        own = saved.decode(facts["own"], {k: t.to(here) for k, t in saved.own("").items()})
    elif not same and facts["used"] and saved.state.backend.main:
        log.warning(
            "restore: local_sgd trained on %s processes, and this run has %d: each continues from "
            "the average of their weights, with the optimizer's state of the main process",
            *(saved.facts.get("processes"), saved.state.backend.data_size),
        )

    def load(state: TrainState) -> TrainState:
        slot = Apart(used=same and facts["used"])
        slot.take_outer(outer)
        if own or slot.shared:  # otherwise nothing is to be taken back
            slot.own, slot.mark = own, mark_of(state)
        return with_slot(state, LOCAL_SGD, slot)

    return load


def _note_optimizers(saving: Saving) -> dict[str, object]:
    """Say that each process has optimizers with a state of its own, if updates were made apart."""
    slot = apart_of(saving.state)
    saving.own_optimizers = slot is not None and slot.used
    return {}


APART = Part("apart", _save, _prepare)
Apart.brings = (APART, Part("apart optimizers", _note_optimizers, of="optimizer"))
