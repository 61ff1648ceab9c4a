"""The state of a run: one frozen record, which owns its model, and copies of it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import operator
import secrets
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._backend.collectives import (
    all_reduce_sum,
    broadcast,
    counts_here,
)
from fnloop._backend.containers import copy_flattened, map_leaves
from fnloop._backend.fsdp import is_sharded, local_part
from fnloop._backend.processes import Backend, join
from fnloop._backend.torch_compat import buffers_of, foreach_copy_, version_of
from fnloop._core.history import History, Phase
from fnloop._core.items import NONE_YET, UNREAD, Counted, as_count, decode_counted, encode_counted
from fnloop._core.metrics import ITEMS, Metrics, items_so_far
from fnloop._core.optimizers import (
    Handle,
    Optimizers,
    check_optimizers,
    check_shares,
    groups_in,
    in_form,
    optimizers_in,
)
from fnloop._core.parts import Load, Part, Restoring, Saving
from fnloop._core.rng import SEED_BITS, HostGenerators, new_seed
from fnloop._core.runs import LEFT_OUT, Position, RunInfo, Todo, pending
from fnloop._core.saved import Pending
from fnloop._core.settings import Group
from fnloop._core.several import Several
from fnloop._core.types import RECORD, UPDATE, Metric, Output
from fnloop._display import checks, reprs
from fnloop._display.checks import describe, flag, join_names
from fnloop._extensions import extensions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Which state owns a model and an optimizer, which every step updates in place.


class StaleStateError(RuntimeError):
    """A state was used after it had been advanced: a newer state owns its model and optimizer."""

    __module__ = "fnloop"  # the name by which a traceback shows it


class Ownership:
    """Tracks which state owns the model and the optimizer: the state whose generation this is.

    All states that a run makes of one model share it. A state of your own for the same tensors,
    such as one that has a part of the optimizers, gets another: ``attrs.evolve(state,
    ownership=Ownership(), generation=0)``.

    Args:
        own_metrics: the names of the running metrics that are of each process's share of the data,
            as far as they are known. They are known before a run has shown them if the state is a
            copy, or from a checkpoint.
        seconds: the seconds that runs of this state have taken, until it last left one.
        notes: what extensions note of the model, by name. A copy of the state has it too.
        brought: the parts of checkpoints that a run has brought, by name.

    Example:
        >>> from fnloop.testing import toy
        >>> before = toy()
        >>> after = Ownership.advance(before, applied=True)
        >>> after.step, Ownership.belongs_to(after), Ownership.belongs_to(before)
        (1, True, False)
        >>> Ownership.of(after) is Ownership.of(before)
        True
    """

    __slots__ = (
        "__weakref__",
        "brought",
        "compared",
        "equal_at",
        "generation",
        "newest",
        "notes",
        "own_metrics",
        "parameters",
        "restored",
        "seconds",
    )

    def __init__(
        self,
        own_metrics: Iterable[str] = (),
        seconds: float = 0.0,
        notes: Mapping[str, Any] = MappingProxyType({}),
        brought: Mapping[str, Part] = MappingProxyType({}),
    ) -> None:
        self.own_metrics, self.seconds = set(own_metrics), seconds
        self.notes, self.brought = {k: copy.copy(v) for k, v in notes.items()}, dict(brought)
        self.generation: int | None = 0  # None while an optimizer changes the parameters
        self.newest: TrainState | None = None  # what the last update made, until it is counted
        # Where the weights of all processes were last compared, and how far norms were apart.
        self.compared: tuple[int, float] = (0, 0.0)
        self.equal_at: int | None = None  # the last step at which they were not
        self.parameters = ParameterCache()  # those that the states train
        self.restored = 0  # the generation of the newest state whose counters were restored

    @staticmethod
    def of(state: TrainState) -> Ownership:
        """Return what the states of one model and one optimizer share."""
        return state._ownership

    @staticmethod
    def generation_of(state: TrainState) -> int:
        """Return a number that every step changes, and every call of :meth:`take`."""
        return state._generation

    @staticmethod
    def belongs_to(state: TrainState) -> bool:
        """Return whether a state owns its model and optimizer."""
        return state._ownership.generation == state._generation

    @staticmethod
    def advance(
        state: TrainState, applied: bool, updates: Mapping[str, int] | None = None
    ) -> TrainState:
        """Return the state after an update, which owns the model from now on.

        ``updates`` are those of each of several optimizers, if not all of them have updated.
        """
        if updates is None:
            updates = state.updates and {name: n + applied for name, n in state.updates.items()}
        generation = state._ownership.generation = state._generation + 1
        new = state._ownership.newest = changed(
            state,
            step=state.step + applied,
            skipped=state.skipped + (not applied),
            updates=updates,
            events=_UPDATED if applied else _NOTHING,
            generators=None,
            _generation=generation,
        )
        return new

    @staticmethod
    def take(state: TrainState) -> TrainState:
        """Return a copy of a state, which owns the model from now on."""
        state._ownership.generation = generation = state._generation + 1
        return attrs.evolve(state, generation=generation)

    @staticmethod
    def give_up(state: TrainState) -> None:
        """Leave the model without an owner, from before an update changes it to :meth:`advance`."""
        state._ownership.generation = state._ownership.newest = None

    @staticmethod
    def give_back(state: TrainState) -> None:
        """Let a state own the model again, whose tensors are again what they were then."""
        state._ownership.generation, state._ownership.newest = state._generation, None

    @staticmethod
    def leave_run(state: TrainState) -> TrainState:
        """Return the state as it is outside of its run, with the generators that it would use."""
        if state.run is None:
            return state
        state._ownership.seconds = state.run.live.stopwatch.spent()
        generators = None
        if state.batch or pending(state.todo):
            # Those of the state are not installed yet, if the first fetch of a run has failed.
            generators = state.generators or HostGenerators.capture()
        # A state that a hook went back to has its own.
        position = state.position or state.run.live.position_at(state.epoch, state.batch)
        return changed(state, run=None, generators=generators, position=position)

    def for_copy(self, generation: int) -> Ownership:
        """Return the ownership of a copy of the state of a generation, whose own begins at 0."""
        made = Ownership(self.own_metrics, self.seconds, self.notes, self.brought)
        made.compared = self.compared[0] - generation, self.compared[1]
        made.equal_at = self.equal_at
        return made


def _ids(tensors: Iterable[Tensor]) -> list[int]:
    return [*map(id, tensors)]


def _counted(names: Iterable[str]) -> list[str]:
    """Return names, those of which there are more than two in a row as one."""
    runs = [(name, len([*same])) for name, same in itertools.groupby(names)]
    return [text for name, n in runs for text in ([f"{n} × {name}"] if n > 2 else [name] * n)]


_registered = [0]  # how often any module was given a parameter, or a module in it


def _note_registration(*_: object) -> None:
    _registered[0] += 1


register_module_parameter_registration_hook(_note_registration)
register_module_module_registration_hook(_note_registration)


class ParameterCache:
    """The parameters of a model and its optimizers, looked up again where they have changed.

    :func:`current_parameters` brings it up to date. Nothing else remembers which parameters there
    are, but by ``found``, which is the same list for as long as nothing has changed.

    Attributes:
        found: every parameter that backward may leave a gradient in, each once.
        trained: those of them that an optimizer updates, in the order of the model.
        model: the model that they are of; None: look again.
        groups: the parameters of each group.
        registered: how often modules were given parameters until then.
        checked: whether an update of them has shown that optimizers get gradients.
        has_changed: whether others were found before, in the same run.
        apart: whether it was found that one update can be made with these optimizers together.
        used: the names of the optimizers that the step that is running updates with; None: all.
        parts: by names of optimizers, these optimizers alone, and their parameters.
        resting: the names of the optimizers that a part leaves out.
        others: the parameters in ``found`` that are not in ``trained``.
    """

    __slots__ = (
        "apart", "checked", "found", "groups", "has_changed", "model", "others", "parts",
        "registered", "resting", "trained", "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        self.trained: list[Tensor] = []
        self.others: list[Tensor] = []
        self.groups: list[list[Tensor]] = []
        self.registered = 0
        self.used: tuple[str, ...] | None = None
        self.resting: tuple[str, ...] = ()
        self.clear()

    def clear(self) -> None:
        """Look again at the next use, and make what is made of the parameters again."""
        self.model: nn.Module | None = None
        self.parts: dict[tuple[str, ...], _Part] = {}
        self.checked = self.has_changed = self.apart = False

    def look_up(self, model: nn.Module, groups: Sequence[Group]) -> None:
        """Look the parameters up."""
        before, self.registered = (self.found, *self.groups), _registered[0]
        self.groups = [[*group["params"]] for group in groups]
        trained = [p for params in self.groups for p in params]
        ids = {id(p) for p in trained}
        if isinstance(model, Several):
            found, owners = model.gradients_of()
        else:
            owners = found = [*{id(p): p for p in (*model.parameters(), *trained)}.values()]
        if self.model is not None:
            if [*map(_ids, before)] == [*map(_ids, (found, *self.groups))]:
                self.model = model
                return
            self.checked, self.has_changed = False, True
        self.model, self.found, self.apart = model, found, False
        pairs = [*zip(found, owners, strict=True)]
        self.trained = [p for p, owner in pairs if id(owner) in ids]
        self.others = [p for p, owner in pairs if id(owner) not in ids]


class _Part(NamedTuple):
    """Some of the optimizers of a state.

    Args:
        of: all of them.
        chosen: those.
        parameters: what they update.
    """

    of: Handle
    chosen: Optimizers
    parameters: ParameterCache


# --------------------------------------------------------------------------------------------------
# The state of a run: one frozen record, carried from batch to batch.
#
# Counters and the history are values. The module, the optimizer and every tensor are *handles*. The
# newest state owns them, and a step updates them in place, as buffer donation does in JAX. A state
# that has been advanced cannot be used again by mistake: that raises `StaleStateError`.

_NOTHING: frozenset[str] = frozenset()
_UPDATED = frozenset({UPDATE})


_EVOLVED = "attrs.evolve(state, optimizer=...) expects"


def _handle(given: object) -> Handle:
    """Return what ``state.optimizer`` is, given what ``attrs.evolve`` was.

    Raises:
        TypeError: it is neither an optimizer nor several by name.
    """
    if type(given) is Optimizers or isinstance(given, Optimizer):
        return given
    named = given if isinstance(given, Mapping) else {}
    if named and all(isinstance(one, Optimizer) for one in named.values()):
        return Optimizers(named)
    raise TypeError(
        f"{_EVOLVED} an optimizer, or several by name where the state has them; got "
        f"{describe(given)}"
    )


def _check_names(state: TrainState, _: object, optimizer: Handle) -> None:
    """Raise ValueError if a state is given other optimizers than those that it counts."""
    names = [*optimizer] if type(optimizer) is Optimizers else []
    if {*names} != state.updates.keys() - {""}:  # one alone has the name ""
        known = f"the names {join_names([*state.updates])}" if state.updates else "one optimizer"
        given = f"the names {join_names(names)}" if names else type(optimizer).__name__
        raise ValueError(
            f"{_EVOLVED} {known}, as the state has; got {given}. For others make a new state: "
            "TrainState.create(model, optimizer)"
        )


def _refuse() -> Ownership:
    """Raise TypeError: a state was not made by ``create``. Copies get the ownership of theirs."""
    raise TypeError(
        "TrainState(...) is for fnloop itself: write TrainState.create(model, optimizer), which "
        "checks both and draws a seed"
    )


_OWN_PARAMETERS = attrs.Factory(lambda state: state._ownership.parameters, takes_self=True)


@attrs.frozen(eq=False, repr=False, slots=False)  # without slots, a copy takes half the time
class TrainState:
    """Everything that a run depends on. Make one with :meth:`create`.

    Change a value with ``attrs.evolve(state, stop=None)``. The newest state owns the model, the
    optimizer, and the tensors in ``slots`` and ``metrics``, which a step updates in place.
    Everything else in it is plain data.

    A hook, a middleware or a script may replace, add or drop parameters, in the model and in the
    groups of its optimizers: from the next update on, they are trained like any other. So are those
    of ``attrs.evolve(state, model=..., optimizer=...)``.

    Args:
        model: the module.
        optimizer: its optimizer; or several by name, a mapping that cannot be changed.
        step: updates applied, ever; with ``alternate``, rounds.
        epoch: epochs completed.
        batch: batches consumed in the current epoch, by all processes together.
        samples: samples consumed in the current epoch, by all processes together; 0 unless all
            batches have the same known size.
        skipped: updates skipped, ever (after an fp16 overflow, or by a guard).
        updates: updates applied, ever, by the name of the optimizer; empty with only one, which has
            no name and has applied ``step``.
        seed: with the counters, it determines the order of the data and every random draw.
        slots: the state of each middleware, by name.
        metrics: the metrics of this epoch so far. After the end of an epoch they are those of that
            epoch, until the next update. With ``record_every``, also those since the last record:
            "recent/loss", ...
        history: the records so far.
        run: facts about the current run; None outside one.
        stop: why the run ended early, or None; a str that equals the reason.
        ends: "epoch" if a hook has ended the epoch early; or None.
        phases: the phases that have begun, in their order; see ``fit(..., phase=name)``.
        extra: your own plain data, saved in checkpoints.
        run_id: identifies this run; drawn in :meth:`create`, and saved in checkpoints.
        saved_on: how many processes wrote the checkpoint that ``batch`` was restored from,
            or None.
        backend: the device, the rank of this process, and the number of processes (a ``Backend``).
        events: what happened at the last boundary: "update" (one was applied, not skipped), "epoch"
            (one was completed), "record" (one was appended to the history), "start" (none was
            applied yet), "end" (it was the run's last, by its target or by a hook). Hooks decide by
            it.
        todo: what this run does next, as a tuple of actions; empty when it has ended. A run that
            continues from here begins with them.
        noted: what the run remembers of its hooks and moments, by their number: "ran 2", a hook has
            run at this boundary (if it is due at the end too); "waits 3", a hook waits for an
            evaluation; "clock 0", when a moment that counts seconds was last due.
        generators: the state of Python's and NumPy's generators in mid-epoch, or where hooks are
            still to be called; None at the start of an epoch. All other randomness is a function of
            the seed and the counters.
        position: where the training loader is, and how to tell whether it is there again; or None.

    Attributes:
        PLACE: the names of the counters of a run, each a number.
        COUNTERS: those, and the names of what else only a run changes.

    Example:
        >>> import attrs, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = TrainState.create(model, optimizer, seed=0)
        >>> attrs.evolve(state, stop="enough").stop, state.stop
        ('enough', None)
    """

    PLACE: ClassVar[tuple[str, ...]] = ("step", "epoch", "batch", "samples", "skipped")
    COUNTERS: ClassVar[tuple[str, ...]] = (*PLACE, "seed", "updates")

    model: nn.Module
    optimizer: Handle = attrs.field(converter=_handle, validator=_check_names)
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
    todo: Todo = ()
    noted: Mapping[str, float] = attrs.field(factory=dict)
    generators: HostGenerators | None = None
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    _ownership: Ownership = attrs.field(factory=_refuse, alias="ownership")
    _generation: int = 0
    run_id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    saved_on: int | None = None
    updates: Mapping[str, int] = attrs.field(factory=dict)
    phases: tuple[Phase, ...] = ()
    ends: str | None = None
    position: Position | None = None
    _parameters: ParameterCache = attrs.field(default=_OWN_PARAMETERS)
    _counted: Counted = NONE_YET

    @classmethod
    def create(
        cls,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        seed: int | None = None,
        backend: Any = None,
        data: DeviceMesh | None = None,
        exact: bool = False,
    ) -> TrainState:
        """Make the first state of a run.

        With several processes, each has to make it. All get the weights of the main process.

        Args:
            model: any module. A single process uses it as it is, on the device of its parameters.
                With several processes (``torchrun``, ``accelerate launch``) it is moved to the
                device of its process; a model sharded with ``fully_shard``, or split with
                ``parallelize_module`` over all processes, stays as it is. A
                ``DistributedDataParallel`` is taken off, and its settings and its communication
                hook are kept.
            optimizer: a torch.optim optimizer of its parameters; or a mapping of several by name,
                which update in the order given. Together they must have every parameter that is not
                frozen. Two that have the same parameters, such as Adam and L-BFGS, need steps that
                say which of them updates: see :func:`using`. ``clip`` is over all of these, and an
                overflow in one optimizer skips the update of all. ``state.optimizer["rest"]`` is
                one of them, and "train/lr/rest" its rate in records. A warning names optimizers
                with other parameters, which are trained, but not saved. A parameter group may have
                a name of its own, such as ``{"params": ..., "name": "head"}``: its rate is
                "train/lr/head" in records. Groups without one keep "train/lr", of the first, and
                "train/lr/1", ...
            seed: determines the order of the data and the random draws. By default it is drawn from
                torch's generator, so that ``torch.manual_seed`` decides it. With several processes,
                the seed of the main process is used.
            backend: an ``accelerate.Accelerator`` with your own settings (``kwargs_handlers``, a
                plugin); by default, what this process was launched with.
            data: one dimension of a mesh of all processes, ``mesh["data"]``: batches are dealt
                along it only. By default each process has batches of its own. The processes at one
                place of it, a row, get the same batches. Each computes its part of them, such as a
                part of every sequence (context parallelism), and the model exchanges what the parts
                need of each other, forward and backward. The loss is the mean over the own part,
                and ``aux["weight"]`` the number of items in it. Without a weight, all parts of a
                batch count alike, each for its fraction of the samples. Gradients and means are
                over the items of all processes. A ``Sum``, ``Min`` or ``Max`` is over what each
                process reports of its part. The processes of a row draw the same random numbers,
                because what is drawn for a whole sequence must be the same in all of its parts.
                ``predict`` yields what the first process of each row returns.
            exact: whether the run has the same bits on any number of processes, if an update takes
                as many batches in all together: ``accumulate(8)`` on one, ``accumulate(4)`` on two.
                The gradients of its batches are summed in a tree that depends on their number
                alone, and random draws follow the batch. This does not hold across different
                hardware, thread counts (``OMP_NUM_THREADS``) or library versions, or for other
                batches. It needs a loss function that is deterministic on one process, and hooks
                that do not draw from the generators of Python or NumPy. Refused are layers with
                running statistics, sharded models, ``data``, sparse gradients, loss functions that
                exchange something, ``sharded``, ``alternate``, ``raw``, ``tbptt``, ``cuda_graph``,
                ``retry_on_oom`` and ``closure(create_graph=True)``. ``state.metrics`` are those of
                all processes: do not ``reduce`` them.

        Returns:
            A state at step 0.

        Raises:
            TypeError: the model, the optimizer or the mesh has the wrong type.
            RuntimeError: the processes have models of different names, shapes or dtypes.
            ValueError: the optimizer was made for another model, two parameter groups have one
                name, the seed is out of range, or ``data`` is not one dimension of a mesh of all
                processes. With several optimizers: a parameter is in none of them, or in one with
                modes (``train`` and ``eval``) and in another.
            NotImplementedError: accelerate is configured for an engine that hides the gradients
                (DeepSpeed, FSDP 1), or the model is in a wrapper that keeps parts of parameters or
                averages gradients by itself; a setting of ``DistributedDataParallel`` would not be
                kept; ``exact``, and the model is sharded, or there is ``data``; or
                ``data``, and tensor parallelism has split the model.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
            >>> TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
            TrainState(step=0, epoch=0, batch=0, model=Linear (3 parameters), optimizer=SGD, seed=0)

            Several: ``TrainState.create(model, {"matrices": muon, "rest": adamw})``.
        """
        check_handles(model, optimizer)
        seed = checks.plain(seed)
        check_settings(seed, backend, exact)
        named = optimizers_in(
            Optimizers(optimizer) if isinstance(optimizer, Mapping) else optimizer
        )
        model, joined, facts = join(model, [*named.values()], backend, data, exact)
        agreed, run_id = _drawn(seed, facts)
        made = cls(
            model, in_form(optimizer, joined), seed=agreed, run_id=run_id, backend=facts,
            updates={name: 0 for name in named if name}, ownership=Ownership(),
        )  # fmt: skip
        warn_of_others(made)
        return made

    @property
    def items(self) -> float | None:
        """The items of all applied updates, over all processes: samples, or ``aux["weight"]``.

        Where weights are tensors, and with ``exact=True``, it is the count of the update before,
        because that of the newest update would have to be waited for. ``Record.items`` has all.
        None: the state is that of an older version, which did not count them.

        A run that depends on it (``fit(items=)``, ``every(items=)``, ``schedule(by="items")``)
        reads it after each update without waiting for the device. In another one, a tensor is read
        here, and several processes know the sum between two epochs, after a restore and outside of
        runs.

        Raises:
            RuntimeError: there are several processes, and they have not counted together since the
                newest update.
        """
        known = self._counted.now
        if known is None:
            if _adds_up(self):
                raise RuntimeError(
                    "state.items is over all processes, which count together after each update "
                    "only in a run that asks for it: fit(items=...), every(items=...) or "
                    'schedule(..., by="items"). Record.items has it in any run'
                )
            known = as_count(own_items(self))
        return None if math.isnan(known) else known

    @property
    def news(self) -> frozenset[str]:
        """The old name of ``events``."""
        warnings.warn("state.news is now state.events", DeprecationWarning, stacklevel=2)
        return self.events

    def _facts(self) -> dict[str, object]:
        optimizers = optimizers_in(self.optimizer).values()
        facts: dict[str, object] = {
            "step": self.step, "epoch": self.epoch, "batch": self.batch,
            "model": f"{type(self.model).__name__} ({reprs.count_parameters(self.model)})",
            "optimizer": ", ".join(_counted(type(each).__name__ for each in optimizers)),
            "seed": self.seed,
        }  # fmt: skip
        if self.slots:
            facts["slots"] = f"[{', '.join(self.slots)}]"
        if len(self.history):
            facts["history"] = reprs.format_count(len(self.history), "record")
        if self.stop is not None:
            facts["stop"] = repr(self.stop)
        return facts

    def _title(self) -> str:
        return "TrainState" if Ownership.belongs_to(self) else "stale TrainState"

    def __repr__(self) -> str:
        return reprs.record_text(self._title(), self._facts())

    def _repr_html_(self) -> str:
        latest = self.history[-1].metrics if len(self.history) else {}
        texts = (f"{name} {reprs.format_metric(name, value)}" for name, value in latest.items())
        facts = self._facts() | ({"latest": ", ".join(texts)} if latest else {})
        return reprs.facts(self._title(), facts | {"device": self.backend.device})


def _refuse_change(state: TrainState, name: str, value: object) -> NoReturn:
    plain = value is None or isinstance(value, str | int | float)
    error = attrs.exceptions.FrozenInstanceError()
    text = (
        f"a state cannot be changed: write state = attrs.evolve(state, "
        f"{name}={describe(value, 30) if plain else '...'}), which makes another one, and return "
        "that from a hook"
    )
    AttributeError.__init__(error, text)  # that of attrs takes no text
    raise error


TrainState.__setattr__ = _refuse_change  # attrs would say no more than that it cannot be set


# --- ownership


def check_not_stale(state: object, owner: str = "fnloop", *, trains: bool = False) -> None:
    """Raise if a state has been advanced, for a function that takes the newest one.

    Args:
        state: what was given.
        owner: what was called with it, for messages.
        trains: whether it would be trained. Then a state that is there to be read, as that of
            ``averaged``, is refused too.

    Raises:
        StaleStateError: it has been advanced; the message says how to keep a copy.
        TypeError: it is not a state.
        ValueError: it is not there to be trained.

    Example:
        >>> from fnloop.testing import toy
        >>> check_not_stale(toy(), "mine")
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"{owner} expected a TrainState, as TrainState.create(model, optimizer) makes it; "
            f"got {describe(state)}"
        )
    if state._ownership.generation == state._generation:
        for check in extensions("what is not to be trained") if trains else ():
            check(state, owner)
        return
    if state._ownership.generation is None:
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


def went_back(before: TrainState, new: TrainState) -> bool:
    """Return whether a state is a copy of another time of a run, or was restored since."""
    return new.model is not before.model or new._ownership.restored > before._generation


def changed(state: TrainState, **values: Any) -> TrainState:
    """Return a state with other values of fields: as ``attrs.evolve``, in a tenth of its time."""
    new: TrainState = object.__new__(TrainState)
    object.__setattr__(new, "__dict__", vars(state) | values)  # in half the time of an update of it
    return new


def with_note(state: TrainState, mark: str, value: float | None = 1.0) -> TrainState:
    """Return the state with a note of what a hook remembers from boundary to boundary.

    Args:
        state: the state, which stays as it is.
        mark: the name of the note in ``state.noted``, which a checkpoint saves.
        value: its value; None takes the note out.

    Returns:
        The new state.

    Example:
        >>> from fnloop.testing import toy
        >>> state = with_note(toy(), "waits")
        >>> dict(state.noted), dict(with_note(state, "waits", None).noted)
        ({'waits': 1.0}, {})
    """
    if state.noted.get(mark) == value:
        return state
    others = {name: kept for name, kept in state.noted.items() if name != mark}
    return changed(state, noted=others if value is None else {**others, mark: value})


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
    metrics, counted = state.metrics if state.batch else _begun(state), state._counted
    if out is not None and out.skip is None:
        if counted is not UNREAD or out.weight.__class__ is not int:
            counted = counted.after(out.weight, metrics, not state.epoch)
        per_model = state.model.metric if isinstance(state.model, Several) else None
        metrics = Metrics(metrics).add_(out, recent, per_model)
    state._ownership.newest = None  # only now: a metric may raise
    return changed(
        state,
        _counted=counted,
        batch=state.batch + batches,
        samples=state.samples + samples,
        metrics=metrics,
        generators=None,
    )


def _begun(state: TrainState) -> dict[str, Metric]:
    """Return the running metrics with which an epoch begins: the items of those before it."""
    return _only_items(state) if state.epoch or ITEMS in state.metrics else {}


def _only_items(state: TrainState) -> dict[str, Metric]:
    state._ownership.own_metrics.add(ITEMS)  # those of each process add up
    return {ITEMS: items_so_far(state.metrics, _in_first_epoch(state))}


def without_metrics(state: TrainState) -> TrainState:
    """Return the state without running metrics, in mid-epoch too. Items stay counted."""
    return changed(state, metrics=_only_items(state) if state.metrics or state.epoch else {})


# --- the items of all applied updates


def _in_first_epoch(state: TrainState) -> bool:
    return state.epoch + bool(state.batch) <= 1


def _adds_up(state: TrainState) -> bool:
    """Return whether each process counts the items of its own share of the data."""
    return state.backend.world_size > 1 and not state.backend.exact


def own_items(state: TrainState) -> float:
    """Return the items of this process; NaN if they are unknown. They are read from the device."""
    return state._counted.own(state.metrics, _in_first_epoch(state))


def items_to_send(state: TrainState) -> float:
    """Return the items that this process adds to what all processes count; 0 if that is known."""
    sends = state._counted.now is None and _adds_up(state) and counts_here()
    return own_items(state) if sends else 0.0


def count_items(
    state: TrainState, follow: bool = False, sent: Iterable[float] | None = None
) -> TrainState:
    """Return the state that knows its items. A collective, unless it knows them already.

    Args:
        state: the newest state.
        follow: whether the next update is followed by another call.
        sent: what each process has sent, if that is known: :func:`items_to_send`.
    """
    counted, now = state._counted, state._counted.now
    if now is None:
        now = own_items(state)
        if _adds_up(state):
            what = "the sum of the items of all updates"
            now = all_reduce_sum(now, what) if sent is None else sum(sent)
    elif counted.copy is not None or not (follow and counted.is_late):
        return state
    first = _in_first_epoch(state)
    return changed(state, _counted=counted.read(now, state.metrics, first, follow))


def counted_of(state: TrainState) -> Counted:
    """Return what is known of the items of a state."""
    return state._counted


def _save_counted(saving: Saving) -> dict[str, object]:
    """Return the items as facts, unless the running metrics say them. A collective."""
    state = saving.state
    if state.backend.world_size == 1 and counted_of(state) in (UNREAD, NONE_YET):
        return {}
    return encode_counted(counted_of(count_items(state)))


def _prepare_counted(saved: Restoring) -> Load:
    counted = decode_counted(saved.facts.get("items"))
    return lambda state: changed(state, _counted=counted)


COUNTED = Part("counters", _save_counted, _prepare_counted, of="counters")


def items_of_call(state: TrainState) -> tuple[float, float]:
    """Return the items before the newest update and after it, as a run that follows them knows."""
    counted = state._counted
    if counted.now is None:
        raise RuntimeError(
            "every(items=...) is asked in a run that does not count items: a hook of your own that "
            "asks it names it, moments = (moment,)"
        )
    return counted.now if counted.before is None else counted.before, counted.now


def newest(state: TrainState, batches: int, samples: int) -> TrainState:
    """Return the state that an update made of this one, with its batches counted; else this one."""
    made = state._ownership.newest
    if Ownership.belongs_to(state) or made is None:
        return state
    return consume(made, None, batches, samples)


# --- what belongs to a state


def current_parameters(state: TrainState, beginning: bool = False) -> ParameterCache:
    """Return the parameters of a state as they are now.

    The model and the groups of its optimizers may have others at each call: a hook, a middleware or
    the script may have replaced or added some.

    Args:
        state: the state.
        beginning: whether an update begins with it.

    Raises:
        StaleStateError: an update would begin, and the state has been advanced already.
    """
    __tracebackhide__ = True
    if beginning and state._ownership.generation != state._generation:
        check_not_stale(state)
    cache, optimizer = state._parameters, state.optimizer
    groups = groups_in(optimizer) if type(optimizer) is Optimizers else optimizer.param_groups
    if (
        cache.registered == _registered[0]
        and cache.model is state.model
        and len(groups) == len(cache.groups)
    ):
        for group, known in zip(groups, cache.groups, strict=True):
            params = group["params"]  # == would compare elements
            if len(params) != len(known) or not all(map(operator.is_, params, known)):
                break
        else:
            return cache
    cache.look_up(state.model, groups)
    return cache


def parameters(state: TrainState) -> list[Any]:
    """Return the parameters that the optimizers update; with several, in the order of the model.

    Args:
        state: the state.

    Returns:
        The parameters, each once, frozen ones too if an optimizer has them.

    Example:
        >>> from fnloop.testing import toy
        >>> [tuple(p.shape) for p in parameters(toy())]
        [()]
    """
    optimizer = state.optimizer
    if type(optimizer) is Optimizers:
        return current_parameters(state).trained
    found: list[Any] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


def all_parameters(state: TrainState) -> list[Tensor]:
    """Return the parameters of the model and of the optimizers, each once.

    Args:
        state: the state.

    Returns:
        The parameters, frozen ones too. It is the same list as before unless they have changed, so
        what is computed from them can be kept for as long.

    Example:
        >>> from fnloop.testing import toy
        >>> state = toy()
        >>> len(all_parameters(state)), all_parameters(state) is all_parameters(state)
        (1, True)
    """
    return current_parameters(state).found


def trains_all(state: TrainState) -> bool:
    """Return whether an optimizer updates every parameter of the model."""
    found = current_parameters(state)
    return len(found.found) == len(found.trained)


# --- which optimizers a step updates with, if not with all
#
# The step of `using` passes a state inwards that has only those. Around the update it is the whole
# state, and what acts there asks `with_used`.

# The slot of the updates in which an optimizer rested, since the run began or its newest phase, by
# its name, if it has rested in any.
RESTED = "rests"


@contextlib.contextmanager
def using_only(state: TrainState, names: tuple[str, ...]) -> Iterator[None]:
    """Let a step that is running update with these optimizers only, within a ``with`` block."""
    cache = state._parameters
    before, cache.used = cache.used, names
    try:
        yield
    finally:
        cache.used = before


def with_used(state: TrainState, names: tuple[str, ...] | None = None) -> TrainState:
    """Return the state with only some of its optimizers.

    Args:
        state: the state.
        names: their names; None: those that the running step updates with.
    """
    cache = state._parameters
    names = cache.used if names is None else names
    if names is None or cache.resting:  # it has only those already
        return state
    part = cache.parts.get(names)
    if part is None or part.of is not state.optimizer:
        chosen = {name: one for name, one in state.optimizer.items() if name in names}
        part = cache.parts[names] = _Part(state.optimizer, Optimizers(chosen), ParameterCache())
        part.parameters.resting = tuple(name for name in state.optimizer if name not in names)
    updates = {name: n for name, n in state.updates.items() if name in names}
    return changed(state, optimizer=part.chosen, updates=updates, _parameters=part.parameters)


def advance_used(whole: TrainState, new: TrainState, applied: bool) -> TrainState:
    """Return the whole state after an update of a part of its optimizers.

    Args:
        whole: the state that the step was given.
        new: what the update made of :func:`with_used`.
        applied: whether it was applied.
    """
    optimizer = whole.optimizer
    if any(optimizer[name] is not one for name, one in new.optimizer.items()):  # as a step may
        optimizer = Optimizers({**optimizer, **new.optimizer})
    counts = {name: n + (applied and name in new.updates) for name, n in whole.updates.items()}
    if applied and (resting := [name for name in counts if name not in new.updates]):
        before = new.slots.get(RESTED, {})
        more = {name: before.get(name, 0) + 1 for name in resting}
        new = with_slot(new, RESTED, {**before, **more})
    new = changed(new, optimizer=optimizer, updates=whole.updates, _parameters=whole._parameters)
    return Ownership.advance(new, applied, counts)


# --------------------------------------------------------------------------------------------------
# The handles of a state, a model and its optimizers: what they must be, and how they are shown.


def check_handles(model: object, optimizer: Handle) -> None:
    """Raise unless an optimizer, or several by name, train parameters of a model.

    Raises:
        TypeError: one of them is something else.
        ValueError: the model has no weights yet, or the optimizers are for another model, or leave
            a parameter out.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"TrainState.create expects model as a torch.nn.Module; got {describe(model)}"
        )
    check_optimizers(optimizer)
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "TrainState.create expects a model with weights; got one on the meta device: write "
            'model.to_empty(device="cpu"), initialize it, and make the optimizer after that'
        )
    if isinstance(optimizer, Mapping):
        check_shares(model, optimizer)
    else:
        _check_belongs(model, optimizer)


def _check_belongs(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if a model has parameters, and the optimizer has none of them."""
    theirs = {id(p) for p in model.parameters()}
    trained = (p for group in optimizer.param_groups for p in group["params"])
    if theirs and not any(id(p) in theirs for p in trained):
        name = type(optimizer).__name__
        raise ValueError(
            f"none of the optimizer's parameters belongs to this {type(model).__name__}: nothing "
            "would be trained. Make the optimizer after the model (and after any change of its "
            f"parameters): {name}(model.parameters(), ...)"
        )


def _drawn(seed: int | None, backend: Backend) -> tuple[int, str]:
    """Return the seed and the identity of a run, the same in every process."""
    drawn = new_seed() if seed is None else seed, secrets.token_hex(8)
    return broadcast(drawn) if backend.world_size > 1 else drawn


def warn_of_others(state: TrainState) -> None:
    """Warn once of optimizers with parameters that are not in the model."""
    theirs = {id(p) for p in state.model.parameters()}
    others = [
        repr(name) if name else type(one).__name__
        for name, one in optimizers_in(state.optimizer).items()
        if any(id(p) not in theirs for group in one.param_groups for p in group["params"])
    ]
    if others and state.backend.main:
        log.warning(
            f"the optimizer {join_names(others)} has parameters that are not in this "
            f"{type(state.model).__name__}, so they are not saved. If the model was changed since, "
            "make the optimizer after that. If another module has them, put all modules into one, "
            "such as nn.ModuleDict({...})"
        )


def check_settings(seed: object, backend: object, exact: object) -> None:
    """Raise unless these are a seed, a backend or None, and a flag.

    Raises:
        ValueError: the seed is not one.
        TypeError: the backend or the flag is not one.
    """
    meaning = "whether the run has the same bits on any number of processes"
    flag("TrainState.create", "exact", exact, meaning)
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= SEED_BITS
    if seed is not None and not is_seed:
        raise ValueError(
            f"seed expects an int from 0 to 2**64 - 1, or None to draw one; got {describe(seed)}"
        )
    if not (
        backend is None or isinstance(backend, Backend) or hasattr(backend, "distributed_type")
    ):
        raise TypeError(
            f"backend expects an accelerate.Accelerator, or None; got {describe(backend)}"
        )


# --------------------------------------------------------------------------------------------------
# Independent copies of a state, and the module inside one.


def snapshot(state: TrainState) -> TrainState:
    """Copy a state: model, optimizers, slots and metrics together.

    The copy shares nothing that is updated in place.

    Args:
        state: the newest state of a run.

    Returns:
        An independent state, equal in everything but the hooks of its optimizer. Keep it to go
        back, to fork a run, or to compare.

    Raises:
        StaleStateError: the state has been advanced, so its model already holds newer weights.
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
            "a model that is sharded over processes cannot be copied: keep a checkpoint instead, "
            "save(state, path)"
        )
    return copy_handles(Ownership.leave_run(state), {})


def copy_handles(state: TrainState, memo: dict[int, object]) -> TrainState:
    """Return a state with copies of all that is updated in place.

    Args:
        state: the state.
        memo: id to copy, of what is to be replaced by something else.
    """
    for one in optimizers_in(state.optimizer).values():
        map_leaves([*one.state.values()], lambda leaf: _note_copy(leaf, memo))
    handles = (state.model, state.optimizer, state.slots, state.metrics)
    # One call: two copies would lose which tensors are shared.
    model, optimizer, slots, metrics = copy.deepcopy(handles, memo)
    for one, copied in zip(
        optimizers_in(state.optimizer).values(), optimizers_in(optimizer).values(), strict=True
    ):
        for name, value in vars(one).items():
            if name not in vars(copied) and name != "step":  # torch omits LBFGS's parameters
                setattr(copied, name, copy.deepcopy(value, memo))
    ownership = state._ownership.for_copy(state._generation)
    return attrs.evolve(
        state, model=model, optimizer=optimizer, slots=slots, metrics=metrics,
        ownership=ownership, generation=0, parameters=ownership.parameters,
    )  # fmt: skip


def _note_copy(leaf: object, memo: dict[int, object]) -> None:
    """Put a copy of a tensor of a subclass into the memo: deepcopy needs its ``clone``."""
    if (copied := copy_flattened(leaf)) is not None:
        memo[id(leaf)] = copied


def unwrap(state: TrainState) -> nn.Module:
    """Return the user's own module, without wrappers of distributed training or compilation.

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

    Replaces: accelerate.unwrap_model
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"unwrap expects state as a TrainState; got {describe(state)}")
    return without_wrappers(state.model)


def without_wrappers(model: nn.Module) -> nn.Module:
    """Return a module without wrappers of distributed training or compilation."""
    while True:
        if (inner := torch_compat.uncompiled(model)) is not None:
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


# --------------------------------------------------------------------------------------------------
# Copies of a state with other values, and of a model's buffers as they are, to put them back.


def with_record(state: TrainState, history: History, metrics: Mapping[str, Metric]) -> TrainState:
    """Return the state after a record was appended."""
    return changed(state, history=history, metrics=metrics, events=state.events | {RECORD})


def with_slot(state: TrainState, name: str, value: object) -> TrainState:
    """Return the state with another value in a slot.

    Args:
        state: the state, which stays as it is.
        name: the name of the slot, such as that of a middleware.
        value: what the slot holds from here on. A snapshot copies it, and a checkpoint saves it.

    Returns:
        The new state.

    Example:
        >>> from fnloop.testing import toy
        >>> with_slot(toy(), "calls", 3).slots["calls"]
        3
    """
    return with_slots(state, {**state.slots, name: value})


def with_slots(state: TrainState, slots: Mapping[str, object]) -> TrainState:
    """Return the state with these slots."""
    return state if slots is state.slots else attrs.evolve(state, slots=slots)


def bring(state: TrainState, parts: Iterable[Part]) -> TrainState:
    """Return the state with what a checkpoint has of these parts. They are saved from here on."""
    for part in parts:
        state._ownership.brought[part.name] = part
        if isinstance(kept := state.slots.get(part.name), Pending):
            state = kept.brought_by(part, state)
    return state


# --- buffers

Table = dict[str, Tensor | None]  # the buffers of a module by name; those of the module itself


class KeptBuffers(NamedTuple):
    """The buffers of a model as they were at some moment.

    Args:
        tables: of each module: its table, what was in it, and the positions of these below.
        tensors: the buffers, each once; of a sharded one the part of this process.
        places: each of them as it was in memory, and
        marks: its shape, its strides and its address there.
        values: of each the part that can be written to: an expanded one has one element for many.
        copies: of the values.
        versions: numbers that have changed where a buffer was written to since.
        contents: the names in the tables, and which tensors have them.
    """

    tables: Sequence[tuple[Table, Table, Sequence[int]]] = ()
    tensors: Sequence[Tensor] = ()
    places: Sequence[Tensor] = ()
    marks: Sequence[object] = ()
    values: Sequence[Tensor] = ()
    copies: Sequence[Tensor] = ()
    versions: Sequence[int | None] = ()
    contents: object = None

    def are_as_kept(self, tables: Sequence[Table]) -> bool:
        """Return whether these are the tables, and nothing in them was changed or replaced."""
        return (
            self.contents == _contents_of(tables)
            and self.versions == torch_compat.versions_of(self.tensors)
            and self.marks == [*map(_mark_of, self.tensors)]
        )

    def put_back(self, unseen: bool = False) -> None:
        """Put back what has changed: replaced buffers, their shapes and their values.

        Buffers stay the same tensors at the same addresses, because a CUDA graph reads them there.

        Args:
            unseen: whether any may have changed without a new version, as in a forward in training
                mode or in a replay.
        """
        tables = [table for table, _, _ in self.tables]
        if not tables or (not unseen and self.are_as_kept(tables)):
            return
        versions = torch_compat.versions_of(self.tensors)
        moved = [
            now != version or _mark_of(tensor) != mark
            for tensor, mark, version, now in zip(
                self.tensors, self.marks, self.versions, versions, strict=True
            )
        ]
        chosen = {*range(len(moved))} if unseen else set()
        for table, before, positions in self.tables:
            if table.keys() != before.keys() or any(table[k] is not v for k, v in before.items()):
                table.clear()
                table.update(before)
            # torch's batch_norm gives the statistics no new version, but the count beside them.
            if any(moved[i] for i in positions):
                chosen.update(positions)
        with torch.no_grad():
            for i in chosen:
                if _mark_of(tensor := self.tensors[i]) != self.marks[i]:
                    # It was resized, or tensor.data was replaced.
                    tensor.set_(self.places[i])  # type: ignore[arg-type]
                self.values[i].copy_(self.copies[i])


def _contents_of(tables: Sequence[Table]) -> tuple[list[str], list[int]]:
    values = itertools.chain.from_iterable(map(dict.values, tables))
    return [*itertools.chain.from_iterable(tables)], [*map(id, values)]


class Buffers:
    """Keeps the buffers of a model, again and again, in the same memory.

    Args:
        model: the model. Modules that are added later are not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [own for module in model.modules() if (own := buffers_of(module))]
        self._kept = KeptBuffers()
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def keep(self, trusting: bool = False) -> KeptBuffers:
        """Copy them as they are now. What was kept before is not valid any more.

        Args:
            trusting: whether those that torch has counted no change of need not be copied again.
        """
        if not self._tables:
            return self._kept
        if trusting and self._kept.are_as_kept(self._tables):
            return self._kept
        with torch.no_grad():
            return self._copied()

    def _copied(self) -> KeptBuffers:
        tables = [(own, dict(own)) for own in self._tables]
        held_by_all = (b for _, held in tables for b in held.values() if b is not None)
        found = {id(b): b for b in held_by_all if _has_values(b)}
        tensors = [local_part(b) for b in found.values()]
        if self._fits(tensors, tables):
            for to, of in self._groups:
                foreach_copy_(to, of)
        else:
            positions = dict(zip(found, range(len(found)), strict=True))
            self._kept = KeptBuffers(
                [
                    (own, held, [positions[id(b)] for b in held.values() if id(b) in positions])
                    for own, held in tables
                ],
                tensors,
                [t.detach() for t in tensors],
                [_mark_of(t) for t in tensors],
                values := [_written(t) for t in tensors],
                copies := [value.clone() for value in values],
            )
            groups = defaultdict[object, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
            for copy, value in zip(copies, values, strict=True):
                to, of = groups[value.device, value.dtype]  # torch copies these in one call
                to.append(copy)
                of.append(value)
            self._groups = [*groups.values()]
        versions = torch_compat.versions_of(tensors)
        self._kept = self._kept._replace(
            versions=versions, contents=_contents_of([own for own, _ in tables])
        )
        return self._kept

    def _fits(self, tensors: Sequence[Tensor], tables: Sequence[tuple[Table, Table]]) -> bool:
        """Return whether these are the buffers that were kept before, in the same places."""
        known = self._kept
        return (
            len(tensors) == len(known.tensors)
            and all(
                t is before and _mark_of(t) == mark
                for t, before, mark in zip(tensors, known.tensors, known.marks, strict=True)
            )
            and [now.keys() for _, now in tables] == [one[1].keys() for one in known.tables]
        )


_COUNT = "num_batches_tracked"  # of a BatchNorm
Marks = list[tuple[int, int]]  # of each buffer: which tensor it is, and a version of its values


class BufferWatch:
    """Which buffers a hook moves that training moves too, without a read of their values.

    A hook may write to a buffer on purpose, such as a mask. So those count that have also moved
    between two calls of hooks, by updates; and the counts of BatchNorm, which every forward in
    training mode moves.

    Args:
        model: the model. Buffers that are added later are not noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, Table, str]] = []
        self._trained: set[int] = set()  # the numbers of those that training moves
        norms = {*map(id, torch_compat.batch_norms(model))}
        for name, module in model.named_modules():
            own = buffers_of(module)
            if id(module) in norms:  # the statistics beside it have no new version in a forward
                self._trained.add(len(self._places))
            keys = [_COUNT] if id(module) in norms else own
            self._places += [(f"{name}.{key}".lstrip("."), own, key) for key in keys]
        self._seen = self.look()

    def __bool__(self) -> bool:
        return bool(self._places)

    def look(self) -> Marks:
        """Return marks of the buffers as they are now."""
        return [_version_in(own.get(key)) for _, own, key in self._places]

    def begin(self) -> None:
        """Begin a call of a hook: what has moved since the last one, updates have moved."""
        now = self.look()
        self._trained |= _differing(self._seen, now)
        self._seen = now

    def end(self) -> list[str]:
        """Return the names of the buffers that the hook has moved, of those that training moves."""
        before, self._seen = self._seen, self.look()
        moved = _differing(before, self._seen) & self._trained
        return [self._places[i][0] for i in sorted(moved)]

    def pass_over(self, before: Marks) -> None:
        """Forget what has moved since some marks, because it was restored."""
        now = self.look()
        trio = zip(self._seen, before, now, strict=True)
        self._seen = [new if seen == old else seen for seen, old, new in trio]


_watches: WeakKeyDictionary[nn.Module, BufferWatch] = WeakKeyDictionary()


def watch_of(model: nn.Module) -> BufferWatch:
    """Return what watches the buffers of a model in hooks. It is made at the first call of one."""
    if (found := _watches.get(model)) is None:
        found = _watches[model] = BufferWatch(model)
    return found


def is_watched(model: nn.Module) -> bool:
    """Return whether something watches the buffers of a model."""
    return bool(_watches) and model in _watches


@contextlib.contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """Let buffers move in a block that puts them back."""
    watch = _watches.get(model)
    before = watch.look() if watch else []
    try:
        yield
    finally:
        if watch:
            watch.pass_over(before)


def _version_in(buffer: Tensor | None) -> tuple[int, int]:
    return id(buffer), 0 if buffer is None or buffer.is_inference() else version_of(buffer)


def _differing(before: Marks, now: Marks) -> set[int]:
    if before == now:
        return set()
    return {i for i, (one, other) in enumerate(zip(before, now, strict=True)) if one != other}


def _has_values(buffer: Tensor) -> bool:
    """Return whether a buffer has values already, and can be written to outside inference mode."""
    return not (nn.parameter.is_lazy(buffer) or buffer.is_inference())


def _written(tensor: Tensor) -> Tensor:
    """Return an expanded tensor before it was expanded; torch writes to no other."""
    if tensor.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and not stride:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _mark_of(tensor: Tensor) -> object:
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return tensor.shape
    return tensor.shape, tensor.stride(), tensor.data_ptr()


# --------------------------------------------------------------------------------------------------
# The updates of one call: most steps make one, and others one for each window of a batch.

# The slot of ``state.step`` after the newest call, and of how many updates it has made, of a
# middleware that makes several of a batch.
_CALL = "step/call"


def updates_of_call(state: TrainState) -> int:
    """Return how many updates the newest call of the step has applied, if it applied any."""
    step, made = state.slots.get(_CALL, (None, 1))
    return made if step == state.step else 1  # else another step was called since


# --------------------------------------------------------------------------------------------------
# The updates that a run was planned to make and does not, because hooks ended epochs early.
#
# They count in its length, as skipped ones do: so a run that is resumed has the same one.


def left_out(state: TrainState) -> int:
    """Return how many updates were left out since the run began, or its newest phase."""
    return state.slots.get(LEFT_OUT, 0)


def count_left_out(state: TrainState, updates: int) -> TrainState:
    """Return the state with this number of further updates left out."""
    return with_slot(state, LEFT_OUT, left_out(state) + updates) if updates else state


def begin_count(state: TrainState) -> TrainState:
    """Return the state with no update left out, as at the beginning of a phase."""
    counted = (LEFT_OUT, RESTED)
    if not any(name in state.slots for name in counted):
        return state
    slots = {name: slot for name, slot in state.slots.items() if name not in counted}
    return attrs.evolve(state, slots=slots)
