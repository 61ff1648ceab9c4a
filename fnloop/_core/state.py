"""The state of a run: one frozen record, carried from batch to batch.

Counters and the history are values. The module, the optimizer and every tensor are *handles*. The
newest state owns them, and a step updates them in place, as buffer donation does in JAX. A state
that has been advanced cannot be used again by mistake: that raises :class:`StaleStateError`.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.join import join
from fnloop._backend.launch import Backend
from fnloop._backend.public import broadcast
from fnloop._core.events import UPDATE
from fnloop._core.handles import (
    check_handles,
    check_settings,
    count_parameters,
    exact_backend,
    warn_of_others,
)
from fnloop._core.history import History
from fnloop._core.optimizers import Handle, Optimizers, groups_in, in_form, optimizers_in
from fnloop._core.ownership import Ownership, ParameterCache, StaleStateError
from fnloop._core.phase import Phase
from fnloop._core.position import Position
from fnloop._core.rng import HostGenerators, new_seed
from fnloop._core.run_info import RunInfo
from fnloop._core.running import add_output_
from fnloop._core.stops import Left
from fnloop._core.types import Metric, Output
from fnloop._display import html
from fnloop._display.checks import describe

__all__ = [
    "TrainState",
    "advance",
    "all_parameters",
    "begin_update",
    "check_not_stale",
    "clear_parameter_cache",
    "consume",
    "generation_of",
    "give_up_ownership",
    "is_half_updated",
    "newest",
    "ownership_of",
    "owns_handles",
    "parameters",
    "take_ownership",
]  # fmt: skip

_NOTHING: frozenset[str] = frozenset()
_UPDATED = frozenset({UPDATE})
_new = object.__new__


def _refuse() -> Ownership[TrainState]:
    """Raise TypeError: a state was not made by ``create``. Copies get the ownership of theirs."""
    raise TypeError(
        "TrainState(...) is for fnloop itself: write TrainState.create(model, optimizer), which "
        "checks both and draws a seed"
    )


@attrs.frozen(eq=False, repr=False, slots=False)  # without slots, a copy takes half the time
class TrainState:
    """Everything that a run depends on. Make one with :meth:`create`.

    Change a value with ``attrs.evolve(state, stop=None)``. The newest state owns the model, the
    optimizer, and the tensors in ``slots`` and ``metrics``.

    Args:
        model: the module.
        optimizer: its optimizer; or several by name, a mapping that cannot be changed.
        step: updates applied, ever; with ``alternate``, rounds.
        epoch: epochs completed.
        batch: batches consumed in the current epoch, by all processes together.
        samples: samples consumed in the current epoch, by all processes together, if every batch of
            the loader has one known size; else 0.
        skipped: updates skipped, ever (after an fp16 overflow, or by a guard).
        updates: updates applied, ever, by the name of the optimizer; empty with only one, which has
            no name and has applied ``step``.
        seed: with the counters, it determines the order of the data and every random draw.
        slots: the state of each middleware, by name.
        metrics: the running reduction of this epoch. Where an epoch has ended, that of the ended
            epoch, until the next update. With ``record_every``, also that since the last record:
            "recent/loss", ...
        history: the records so far.
        run: facts about the current run; None outside one.
        stop: why the run ended early, or None; a str that equals the reason.
        ends: "epoch" if a hook has ended the epoch early; or None.
        phases: the phases that have begun, in their order; see ``fit(..., phase=name)``.
        extra: plain data of yours, saved in checkpoints.
        run_id: identifies this run; drawn in :meth:`create`, and saved in checkpoints.
        saved_on: how many processes wrote the checkpoint that ``batch`` was restored from,
            or None.
        backend: the device, the rank of this process, and the number of processes (a ``Backend``).
        events: what happened at the last boundary: "update" (one was applied, not skipped), "epoch"
            (one was completed), "record" (one was appended to the history), "start" (none was
            applied yet), "end" (it was the run's last, by its target or by a hook). Hooks decide by
            it.
        left: what the last boundary has left to the run that continues: itself, or the end of
            the run; nearly always empty.
        generators: the state of Python's and NumPy's generators in mid-epoch; None at the start
            of an epoch. All other randomness is a function of the seed and the counters.
        position: where the training loader is in mid-epoch, by its ``state_dict``; or None.

    Example:
        >>> import attrs, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = TrainState.create(model, optimizer, seed=0)
        >>> attrs.evolve(state, stop="enough").stop, state.stop
        ('enough', None)
    """

    model: nn.Module
    optimizer: Handle
    step: int = 0
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    skipped: int = 0
    seed: int = 0
    slots: Mapping[str, Any] = attrs.field(factory=dict)
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)
    history: History = attrs.field(factory=History)
    run: RunInfo | None = None
    stop: str | None = None
    backend: Backend = attrs.field(factory=lambda: Backend("cpu"))
    events: frozenset[str] = _NOTHING
    left: Left = ()
    generators: HostGenerators | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    _ownership: Ownership[TrainState] = attrs.field(factory=_refuse, alias="ownership")
    _generation: int = 0
    run_id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    saved_on: int | None = None
    updates: Mapping[str, int] = attrs.field(factory=dict)
    phases: tuple[Phase, ...] = ()
    ends: str | None = None
    position: Position | None = None
    _parameters: ParameterCache = attrs.field(factory=ParameterCache)

    @classmethod
    def create(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        seed: int | None = None,
        backend: Any = None,
        exact: bool = False,
    ) -> TrainState:
        """Make the first state of a run.

        With several processes, each has to make it. All get the weights of the main process.

        Args:
            model: any module. A single process uses it as it is, on the device of its parameters.
                With several processes (``torchrun``, ``accelerate launch``) it is moved to the
                device of its process; a model sharded with ``fully_shard`` stays as it is.
            optimizer: a torch.optim optimizer of its parameters; or a mapping of several by name,
                each with parameters of its own, which update in the order given. Together they must
                have every parameter that is not frozen. A warning names those with others, which
                are trained, but not saved. A parameter group may have a name of its own, such as
                ``{"params": ..., "name": "head"}``: its rate is "train/lr/head" in records. Groups
                without one keep "train/lr", of the first, and "train/lr/1", ...
            seed: determines the order of the data and the random draws. By default it is drawn from
                torch's generator, so that ``torch.manual_seed`` decides it. With several processes,
                the seed of the main process is used.
            backend: an ``accelerate.Accelerator`` with settings of yours (``kwargs_handlers``, a
                plugin); by default, what this process was launched with.
            exact: whether the run has the same bits on any number of processes, if an update takes
                as many batches in all together: ``accumulate(8)`` on one, ``accumulate(4)`` on two.
                The gradients of its batches are summed in a tree that depends on their number
                alone, and random draws follow the batch. It cannot hold on other hardware, with
                another number of threads (``OMP_NUM_THREADS``) or library versions, with batches of
                other samples, nor if the loss function is not deterministic on one process.
                ``state.metrics`` are those of all processes: do not ``reduce`` them.

        Returns:
            A state at step 0.

        Raises:
            TypeError: the model or the optimizer is something else.
            ValueError: the optimizer was made for another model, two parameter groups have one
                name, or the seed is out of range. With
                several optimizers: a parameter is in two of them, or in none.
            NotImplementedError: accelerate is configured for an engine that hides the gradients
                (DeepSpeed, FSDP 1); or ``exact``, and the model is sharded.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
            >>> TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
            TrainState(step=0, epoch=0, batch=0, model=Linear (3 parameters), optimizer=SGD, seed=0)

            Several: ``TrainState.create(model, {"matrices": muon, "rest": adamw})``.
        """
        check_handles(model, optimizer)
        check_settings(seed, backend, exact)
        named = optimizers_in(
            Optimizers(optimizer) if isinstance(optimizer, Mapping) else optimizer
        )
        model, joined, facts = join(model, [*named.values()], backend)
        facts = exact_backend(model, facts) if exact else facts
        drawn = new_seed() if seed is None else seed, secrets.token_hex(8)
        agreed, run_id = broadcast(drawn) if facts.world_size > 1 else drawn
        made = cls(
            model, in_form(optimizer, joined), seed=agreed, run_id=run_id, backend=facts,
            ownership=Ownership(),
        )  # fmt: skip
        if facts.main:
            warn_of_others(model, made.optimizer)
        return attrs.evolve(made, updates={name: 0 for name in named if name})

    @property
    def news(self) -> frozenset[str]:
        """The old name of ``events``."""
        warnings.warn("state.news is now state.events", DeprecationWarning, stacklevel=2)
        return self.events

    def _facts(self) -> dict[str, object]:
        optimizers = optimizers_in(self.optimizer).values()
        facts: dict[str, object] = {
            "step": self.step, "epoch": self.epoch, "batch": self.batch,
            "model": f"{type(self.model).__name__} ({count_parameters(self.model)})",
            "optimizer": ", ".join(type(each).__name__ for each in optimizers),
            "seed": self.seed,
        }  # fmt: skip
        if self.slots:
            facts["slots"] = f"[{', '.join(self.slots)}]"
        if len(self.history):
            facts["history"] = html.format_count(len(self.history), "record")
        if self.stop is not None:
            facts["stop"] = repr(self.stop)
        return facts

    def _title(self) -> str:
        return "TrainState" if owns_handles(self) else "stale TrainState"

    def __repr__(self) -> str:
        return html.record_text(self._title(), self._facts())

    def _repr_html_(self) -> str:
        latest = self.history[-1].metrics if len(self.history) else {}
        shown = ", ".join(f"{name} {html.format_number(value)}" for name, value in latest.items())
        facts = self._facts() | ({"latest": shown} if latest else {})
        return html.facts(self._title(), facts | {"device": self.backend.device})


# --- ownership


def check_not_stale(state: object, owner: str = "fnloop") -> None:
    """Raise if a state has been advanced; ``owner`` is what was called with it.

    Raises:
        StaleStateError: it has; the message says how to keep a copy.
        TypeError: it is not a state.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{owner} expected a TrainState, as TrainState.create(model, optimizer) makes it; "
            f"got {describe(state)}"
        )
    if state._ownership.generation == state._generation:
        return
    if is_half_updated(state):
        raise StaleStateError(
            f"the update of this state (step {state.step}, epoch {state.epoch}) failed half-way: "
            "its weights are between two updates. Go back to a checkpoint, "
            "resume(folder, TrainState.create(model, optimizer)), or to a snapshot."
        )
    raise StaleStateError(
        f"this state (step {state.step}, epoch {state.epoch}) has been advanced: its model and "
        "optimizer now belong to a newer state. Use what the last call returned "
        "(state = fit(step, state, ...)), or keep a copy beforehand: before = snapshot(state)."
    )


def owns_handles(state: TrainState) -> bool:
    """Return whether a state owns its model and optimizer."""
    return state._ownership.generation == state._generation


def is_half_updated(state: TrainState) -> bool:
    """Return whether an update of this model was begun and has not ended: no state owns it."""
    return state._ownership.generation is None


def begin_update(state: TrainState) -> list[Tensor]:
    """Return all parameters of a state that an update may begin with.

    Raises:
        StaleStateError: the state has been advanced already.
    """
    __tracebackhide__ = True
    if state._ownership.generation != state._generation:
        check_not_stale(state)
    cache = state._parameters
    fits = cache.groups == len(groups_in(state.optimizer))
    return cache.found if fits else all_parameters(state)


def give_up_ownership(state: TrainState) -> None:
    """Leave the model without an owner, from before an update changes it until :func:`advance`."""
    state._ownership.generation = None


def advance(
    state: TrainState, applied: bool, updates: Mapping[str, int] | None = None
) -> TrainState:
    """Return the state after an update, which owns the model from now on.

    ``updates`` are those of each of several optimizers, if not all of them have updated.
    """
    new = _new(TrainState)  # attrs.evolve takes three times as long
    values = vars(new)
    values.update(vars(state))
    values["step"] = state.step + applied
    values["skipped"] = state.skipped + (not applied)
    if state.updates:
        each = {name: n + applied for name, n in state.updates.items()}
        values["updates"] = each if updates is None else updates
    values["events"] = _UPDATED if applied else _NOTHING
    values["generators"] = None
    values["_generation"] = state._ownership.generation = state._generation + 1
    state._ownership.newest = new
    return new


def take_ownership(state: TrainState) -> TrainState:
    """Return a copy of a state, which owns the model from now on."""
    state._ownership.generation = generation = state._generation + 1
    return attrs.evolve(state, generation=generation)


def consume(
    state: TrainState, out: Output | None, batches: int, samples: int = 0, recent: bool = False
) -> TrainState:
    """Return the state with a step's batches counted and its metrics combined into the epoch's.

    The first update of an epoch, skipped or not, begins new metrics.

    Args:
        state: the state after the update.
        out: the output of the step; None if it is not known. A skipped one does not count.
        batches: how many batches the step took, in all processes.
        samples: how many samples these batches had.
        recent: whether to combine the metrics since the last record too.
    """
    __tracebackhide__ = True
    # The first update of an epoch begins a new reduction: until then that of the last one is kept.
    metrics = state.metrics if state.batch else {}
    if out is not None and out.skip is None:
        metrics = add_output_(metrics, out, recent)
    state._ownership.newest = None  # only now: a metric may raise
    new = _new(TrainState)
    values = vars(new)
    values.update(vars(state))
    values["batch"] += batches
    values["samples"] += samples
    values["metrics"] = metrics
    values["generators"] = None
    return new


def newest(state: TrainState, batches: int, samples: int) -> TrainState:
    """Return the state that an update made of this one, with its batches counted; else this one."""
    made = state._ownership.newest
    if owns_handles(state) or made is None:
        return state
    return consume(made, None, batches, samples)


# --- what belongs to a state


def parameters(state: TrainState) -> list[Any]:
    """Return the parameters that the optimizers update; of several, in the order of the model."""
    if type(state.optimizer) is Optimizers:
        all_parameters(state)
        return state._parameters.trained
    return [p for group in state.optimizer.param_groups for p in group["params"]]


def all_parameters(state: TrainState) -> list[Tensor]:
    """Return the parameters of the model and of the optimizers, each once.

    A change in the number of parameter groups is noticed. For any other, call
    :func:`clear_parameter_cache`.
    """
    cache = state._parameters
    if cache.groups != len(groups := groups_in(state.optimizer)):
        cache.look_up(state.model, groups)
    return cache.found


def clear_parameter_cache(state: TrainState) -> None:
    """Look the parameters up again: the model or a parameter group may have changed."""
    state._parameters.clear()


def ownership_of(state: TrainState) -> Ownership[TrainState]:
    """Return what the states of one model and one optimizer share."""
    return state._ownership


def generation_of(state: TrainState) -> int:
    """Return a number that every step changes, and every call of :func:`take_ownership`."""
    return state._generation
