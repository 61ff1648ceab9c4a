"""The state of a run: one frozen record, carried from batch to batch.

Counters and history are values. The module, the optimizer and every tensor are *handles*: the newest state owns them
and a step updates them in place, as buffer donation does in JAX. A state that has been advanced can't be used again by
mistake (:class:`StaleStateError`); :func:`snapshot` makes an independent copy to go back to, to fork or to compare.
"""

from __future__ import annotations

import copy
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs
from torch import nn
from torch.optim import Optimizer

from fnloop._backend.fsdp import is_sharded
from fnloop._backend.join import join
from fnloop._backend.launch import Backend
from fnloop._backend.public import broadcast
from fnloop._core.history import History
from fnloop._core.rng import SEED_BITS, HostGenerators, new_seed
from fnloop._core.types import Metric
from fnloop._display import html
from fnloop._display.checks import described

__all__ = [
    "EPOCH",
    "PENDING",
    "RECORD",
    "SCHEDULED",
    "UPDATE",
    "RunInfo",
    "Share",
    "StaleStateError",
    "TrainState",
    "advance",
    "after_batches",
    "all_parameters",
    "check_not_stale",
    "detached_from_run",
    "give_up_ownership",
    "invalidate_parameter_cache",
    "is_half_updated",
    "newest",
    "now",
    "owns_handles",
    "parameters",
    "share_of",
    "snapshot",
    "take_ownership",
    "tell_share",
    "tracing_copy",
    "unwrap",
    "with_slot",
]

UPDATE, EPOCH, RECORD = (
    "update",
    "epoch",
    "record",
)  # what a boundary may bring, see TrainState.events
PENDING = "pending"  # the boundary was left before its record was made: a run that continues from here begins with it
SCHEDULED = "set_by_schedule_"  # group["set_by_schedule_lr"]: what it has set group["lr"] to; another hand may have since
_NOTHING: frozenset[str] = frozenset()
_UPDATED = frozenset({UPDATE})


class StaleStateError(RuntimeError):
    """A state was used after it had been advanced: its model and optimizer belong to a newer one."""


@attrs.frozen(repr=False)
class RunInfo:
    """Facts about the current run, fixed when it starts.

    Args:
        epochs: the target for ``state.epoch``, or None.
        total_steps: the updates that ``state.step`` will have counted at the end, or None if it can't be known.
        steps_per_epoch: updates in an epoch, or None if the training loader has no length.
        batches_per_epoch: batches in an epoch, or None.
        window: batches per update, of all processes together.
        evaluated: the names of the loaders that are evaluated.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.run.epochs, state.run.steps_per_epoch, state.run.total_steps)
        ...     return state
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, epochs=2, hooks=(fl.once(show),))
        2 5 10
    """

    epochs: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    batches_per_epoch: int | None = None
    window: int = 1
    evaluated: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return html.record_text("RunInfo", attrs.asdict(self))

    def _repr_html_(self) -> str:
        known = {
            name: value
            for name, value in attrs.asdict(self).items()
            if value is not None and value != ()
        }
        return html.facts(
            "RunInfo", known | ({"evaluated": ", ".join(self.evaluated)} if self.evaluated else {})
        )


class Share(NamedTuple):
    """What a process has of a window.

    Args:
        size: samples in each batch of it, in every process; 0 if that may differ.
        borrowed: for each batch of it, whether it is another process's; empty if none is.
    """

    size: int = 0
    borrowed: tuple[bool, ...] = ()


_UNKNOWN = Share()


class Ownership:
    """Tracks who owns the handles: the states whose turn it is, and no state while an update is being applied."""

    __slots__ = (
        "clock",
        "cut",
        "groups",
        "joint",
        "newest",
        "parameters",
        "share",
        "turn",
    )

    def __init__(self) -> None:
        self.turn: int | None = (
            0  # None: the optimizer has begun to change the parameters, and has not returned
        )
        self.newest: TrainState | None = (
            None  # what the last step has made, to find if something raises after it
        )
        self.groups = -1
        self.parameters: list[
            Any
        ] = []  # what all_parameters returned when there were so many groups
        self.joint: Any = None  # what makes the gradients of several processes one
        self.share: tuple[int, Share] = (-1, _UNKNOWN)  # of the window in that turn
        self.cut: Callable[[Any, Any, Any], str | None] | None = (
            None  # while an update is recorded: see _steps.decided
        )
        self.clock: Callable[[], float] = (
            time.monotonic
        )  # in a run on several processes, one that they agree on


@attrs.frozen(
    eq=False, repr=False, slots=False
)  # without slots a frozen record is made in half the time
class TrainState:
    """Everything that a run depends on. Make one with :meth:`create`.

    Change a value with ``attrs.evolve(state, stop=None)``. The model, the optimizer and the tensors in ``slots`` and
    ``metrics`` are handles, owned by the newest state.

    Args:
        model: the module.
        optimizer: its optimizer.
        step: updates applied, ever.
        epoch: epochs completed.
        batch: batches consumed of the running epoch, by all processes together.
        samples: samples consumed of the running epoch, where the loader's batches have one known size; else 0. Also by all
            processes together.
        skipped: updates left out, ever (an fp16 overflow, a guard).
        seed: what the order of the data and every draw of the run are a function of, with the counters.
        slots: what middleware keep, by name.
        metrics: the running reduction of this epoch.
        history: the records so far.
        run: facts about the current run; None outside one.
        stop: why the run ended early, or None.
        extra: plain data of yours that goes into checkpoints.
        run_id: what tells this run from every other; drawn in :meth:`create`, and kept in checkpoints.
        backend: device, rank of this process, how many there are (a ``Backend``).
        events: what the last boundary brought: "update" (one was applied, not skipped), "epoch" (one was completed),
            "record" (one was appended to the history). Hooks decide by it.
        generators: python's and numpy's generators in the middle of an epoch; None at its beginning. All other
            randomness is a function of the seed and the counters.
        saved_on: how many processes made the checkpoint that the position within the epoch comes from; None outside of
            that.

    Example:
        >>> import attrs, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        >>> attrs.evolve(state, stop="enough").stop, state.stop
        ('enough', None)
    """

    model: nn.Module
    optimizer: Optimizer
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
    generators: HostGenerators | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    _lease: Ownership = attrs.field(factory=Ownership)
    _turn: int = 0
    run_id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    saved_on: int | None = None

    @classmethod
    def create(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        seed: int | None = None,
        backend: Any = None,
    ) -> TrainState:
        """Make the first state of a run. With several processes each has to make it, and gets the main one's weights.

        Args:
            model: any module. In one process it is used as it is, on the device where its parameters are. In one of several
                (``torchrun``, ``accelerate launch``) it is moved to the process's own device; one that is sharded with
                ``fully_shard`` stays as it is.
            optimizer: a torch.optim optimizer of its parameters.
            seed: what order and randomness of the run depend on; drawn from torch's generator by default, so that
                ``torch.manual_seed`` decides it. The main process's holds for all.
            backend: an ``accelerate.Accelerator`` with settings of yours (``kwargs_handlers``, a plugin); by default what this
                process was launched with.

        Returns:
            A state at step 0.

        Raises:
            TypeError: the model or the optimizer is something else.
            ValueError: the optimizer was made for another model, or the seed is out of range.
            NotImplementedError: accelerate is configured for an engine that hides the gradients (DeepSpeed, FSDP 1).

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
            >>> TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
            TrainState(step=0, epoch=0, batch=0, model=Linear (3 parameters), optimizer=SGD, seed=0)
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"TrainState.create expects model as a torch.nn.Module; got {described(model)}"
            )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"TrainState.create expects an optimizer second, such as torch.optim.SGD(model.parameters(), lr=0.1); "
                f"got {described(optimizer)}"
            )
        if seed is not None and (
            isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= SEED_BITS
        ):
            raise ValueError(
                f"seed expects an int from 0 to 2**64 - 1, or None to draw one; got {described(seed)}"
            )
        if any(p.is_meta for p in model.parameters()):
            raise ValueError(
                "TrainState.create expects a model with weights; got one on the meta device: write "
                'model.to_empty(device="cpu"), initialise it, and make the optimizer after that'
            )
        theirs = {id(p) for p in model.parameters()}
        if theirs and not any(
            id(p) in theirs for group in optimizer.param_groups for p in group["params"]
        ):
            raise ValueError(
                f"none of the optimizer's parameters belongs to this {type(model).__name__}: nothing would be "
                "trained. Make "
                "the optimizer after the model (and after any change of its parameters): "
                f"{type(optimizer).__name__}(model.parameters(), ...)"
            )
        if not (
            backend is None or isinstance(backend, Backend) or hasattr(backend, "distributed_type")
        ):
            raise TypeError(
                f"backend expects an accelerate.Accelerator, or None; got {described(backend)}"
            )
        model, optimizer, facts = join(model, optimizer, backend)
        drawn = (new_seed() if seed is None else seed, secrets.token_hex(8))
        of_the_run = broadcast(drawn) if facts.world_size > 1 else drawn
        return cls(model, optimizer, seed=of_the_run[0], run_id=of_the_run[1], backend=facts)

    @property
    def news(self) -> frozenset[str]:
        """The old name of ``events``."""
        warnings.warn("state.news is now state.events", DeprecationWarning, stacklevel=2)
        return self.events

    def _facts(self) -> dict[str, Any]:
        facts = {
            "step": self.step, "epoch": self.epoch, "batch": self.batch,
            "model": f"{type(self.model).__name__} ({_sizes(self.model)})",
            "optimizer": type(self.optimizer).__name__, "seed": self.seed,
        }  # fmt: skip
        if self.slots:
            facts["slots"] = f"[{', '.join(self.slots)}]"
        if len(self.history):
            facts["history"] = html.counted(len(self.history), "record")
        if self.stop is not None:
            facts["stop"] = repr(self.stop)
        return facts

    def _title(self) -> str:
        return f"{'stale ' if self._lease.turn != self._turn else ''}TrainState"

    def __repr__(self) -> str:
        return html.record_text(self._title(), self._facts())

    def _repr_html_(self) -> str:
        latest = self.history[-1].metrics if len(self.history) else {}
        shown = (
            {"latest": ", ".join(f"{name} {html.number(value)}" for name, value in latest.items())}
            if latest
            else {}
        )
        return html.facts(self._title(), {**self._facts(), **shown, "device": self.backend.device})


def _sizes(model: nn.Module) -> str:
    """Say how many parameters a model has, and how many of them are trained, if some are not."""
    params = list(model.parameters())
    if any(map(nn.parameter.is_lazy, params)):
        return "parameters of sizes that its first batch decides"
    size, trained = (
        sum(p.numel() for p in params),
        sum(p.numel() for p in params if p.requires_grad),
    )
    return html.counted(size, "parameter") + (f", {trained:,} trained" if trained < size else "")


def check_not_stale(state: TrainState, owner: str = "fnloop") -> None:
    """Raise if a state has been advanced; ``owner`` is what was called with it.

    Raises:
        StaleStateError: it has; the message says how to keep a copy.
        TypeError: it is not a state.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{owner} expected a TrainState, as TrainState.create(model, optimizer) makes it; got {described(state)}"
        )
    if is_half_updated(state):
        raise StaleStateError(
            f"the update of this state (step {state.step}, epoch {state.epoch}) failed half-way: its weights are between two "
            "updates. Go back to a checkpoint, resume(folder, TrainState.create(model, optimizer)), or to a snapshot."
        )
    if state._lease.turn != state._turn:
        raise StaleStateError(
            f"this state (step {state.step}, epoch {state.epoch}) has been advanced: its model and optimizer "
            "now belong to a "
            f"newer state. Use what the last call returned (state = fit(step, state, ...)), or keep a copy beforehand: "
            f"before = snapshot(state)."
        )


def owns_handles(state: TrainState) -> bool:
    """Return whether a state owns its model and optimizer."""
    return state._lease.turn == state._turn


def is_half_updated(state: TrainState) -> bool:
    """Return whether an update of this model and optimizer was begun and has not ended: no state owns them."""
    return state._lease.turn is None


def give_up_ownership(state: TrainState) -> None:
    """Let no state own the handles, from before an optimizer changes a parameter until :func:`advance`."""
    state._lease.turn = None


def advance(state: TrainState, applied: bool) -> TrainState:
    """Return the state after a step, and make it the owner of the handles."""
    turn = state._turn + 1
    state._lease.turn = turn
    state._lease.newest = new = TrainState(  # a direct call: attrs.evolve takes three times as long
        state.model, state.optimizer, state.step + applied, state.epoch, state.batch, state.samples,
        state.skipped + (not applied), state.seed, state.slots, state.metrics, state.history, state.run, state.stop,
        state.backend, _UPDATED if applied else _NOTHING, None, state.extra, state._lease, turn, state.run_id,
        state.saved_on,
    )  # fmt: skip
    return new


def take_ownership(state: TrainState) -> TrainState:
    """Return a fresh state as a new one, and make it the owner of the handles."""
    state._lease.turn = turn = state._turn + 1
    return attrs.evolve(state, turn=turn)


def after_batches(
    state: TrainState, batches: int, samples: int, metrics: Mapping[str, Metric]
) -> TrainState:
    """Return the state with batches and their samples counted, and with these metrics."""
    state._lease.newest = None
    return TrainState(
        state.model, state.optimizer, state.step, state.epoch, state.batch + batches, state.samples + samples,
        state.skipped, state.seed,
        state.slots, metrics, state.history, state.run, state.stop, state.backend, state.events, None, state.extra,
        state._lease, state._turn, state.run_id, state.saved_on,
    )  # fmt: skip


def tracing_copy(
    state: TrainState, slots: Mapping[str, Any], stand_in: Callable[[str], Any]
) -> TrainState:
    """Return a state of the same handles, with a lease of its own, and stand-ins for all that changes with an update."""
    names = (
        "step",
        "epoch",
        "batch",
        "samples",
        "skipped",
        "metrics",
        "history",
        "run",
        "stop",
        "events",
        "generators",
        "extra",
    )
    return attrs.evolve(
        state, slots=slots, lease=Ownership(), turn=0, **{name: stand_in(name) for name in names}
    )


def detached_from_run(state: TrainState) -> TrainState:
    """Return the state as it is outside the run that it is in: with the generators that the run would go on with."""
    if state.run is None:
        return state
    return attrs.evolve(
        state, run=None, generators=HostGenerators.capture() if state.batch else None
    )


def with_slot(state: TrainState, name: str, value: Any) -> TrainState:
    """Return the state with another value in a slot."""
    return attrs.evolve(state, slots={**state.slots, name: value})


def parameters(state: TrainState) -> list[Any]:
    """Return the parameters that the optimizer updates."""
    return [p for group in state.optimizer.param_groups for p in group["params"]]


def all_parameters(state: TrainState) -> list[Any]:
    """Return the parameters of the model and of the optimizer: all that backward may leave a gradient in."""
    lease, groups = state._lease, state.optimizer.param_groups
    if lease.groups != len(groups):
        every = [*state.model.parameters(), *(p for group in groups for p in group["params"])]
        lease.parameters, lease.groups = list({id(p): p for p in every}.values()), len(groups)
    return lease.parameters


def invalidate_parameter_cache(state: TrainState) -> None:
    """Forget which parameters there are, since somebody may have changed the model or a group in the meantime."""
    state._lease.groups = -1
    if state._lease.joint is not None:
        state._lease.joint.renew()


def tell_share(state: TrainState, share: Share) -> None:
    """Let the next step know what this process has of its window."""
    state._lease.share = (state._turn, share)


def share_of(state: TrainState) -> Share:
    """Return what this process has of the next window, as far as it is known."""
    turn, share = state._lease.share
    return share if turn == state._turn else _UNKNOWN


def now(state: TrainState) -> float:
    """Return a time in seconds, the same in every process."""
    return state._lease.clock()


def newest(state: TrainState, batches: int, samples: int) -> TrainState:
    """Return the state that a step has made of this one, if it has; with the batches counted that it took."""
    made = state._lease.newest
    if state._lease.turn == state._turn or made is None:
        return state
    return after_batches(made, batches, samples, made.metrics)


def snapshot(state: TrainState) -> TrainState:
    """Copy a state: model, optimizer, slots and metrics together, sharing nothing that is updated in place.

    Args:
        state: the newest state of a run.

    Returns:
        A state of its own, equal in everything but the hooks of its optimizer. Keep it to go back, to fork a run, or to
        compare.

    Raises:
        StaleStateError: the state has been advanced, so its handles hold newer values already.
        NotImplementedError: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, state = fl.pipeline()(toy_loss), toy()
        >>> before = snapshot(state)
        >>> state = fl.fit(step, state, [torch.tensor([1.0])], hooks=())
        >>> state.model.w.item(), before.model.w.item()
        (-1.0, 0.0)
    """
    check_not_stale(state, "snapshot")
    if is_sharded(state.model):
        raise NotImplementedError(
            "a model that is sharded over processes can't be copied: keep a checkpoint instead, save(state, path)"
        )
    state = detached_from_run(state)
    handles = (state.model, state.optimizer, state.slots, state.metrics)
    memo: dict[int, Any] = {}
    model, optimizer, slots, metrics = copy.deepcopy(
        handles, memo
    )  # together: two copies would lose who shares what
    for name, value in vars(
        state.optimizer
    ).items():  # which torch leaves out, such as LBFGS's own list of parameters
        if name not in vars(optimizer) and name != "step":
            setattr(optimizer, name, copy.deepcopy(value, memo))
    return attrs.evolve(
        state,
        model=model,
        optimizer=optimizer,
        slots=slots,
        metrics=metrics,
        lease=Ownership(),
        turn=0,
    )


def unwrap(state: TrainState) -> nn.Module:
    """Return the user's own module, without what distributed training or compilation wrapped around it.

    Args:
        state: a state.

    Returns:
        The module that was given to :meth:`TrainState.create`.

    Raises:
        TypeError: it is not a state.

    Example:
        >>> from fnloop.testing import toy
        >>> state = toy()
        >>> unwrap(state) is state.model            # nothing is wrapped around it here
        True
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"unwrap expects state as a TrainState; got {described(state)}")
    model = state.model
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model
