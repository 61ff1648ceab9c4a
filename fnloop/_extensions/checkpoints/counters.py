"""Where a run is, and what it does next: the counters of a state, in a checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import attrs
from torch import Tensor

from fnloop._core.history import Phase
from fnloop._core.runs import Action, Append
from fnloop._core.state import TrainState
from fnloop._extensions import extensions
from fnloop._extensions.checkpoints.files import run_of
from fnloop._extensions.checkpoints.format import COLLECTED, NEWER_FORMAT, log, shares_in
from fnloop._extensions.checkpoints.serialize import Json, decode, encode
from fnloop._extensions.checkpoints.transfer import POSITIONS, Collecting, Load, Reading, set_fields
from fnloop.extend import Ownership, Part, Pending, Stop, checks, collectives, rng

COUNTS = (*TrainState.PLACE, "seed")  # those that are one number


def counts_in(facts: Mapping[str, Json]) -> dict[str, int]:
    """Return the saved counters that are one number.

    Raises:
        TypeError: one of them cannot be a counter.
    """
    # No epoch has more batches. One that begins after them would train on nothing.
    for name, most in (("seed", (1 << 64) - 1), ("batch", 1 << 40)):
        if type(value := facts[name]) is not int or not 0 <= value <= most:
            raise TypeError(f"{name} is {value!r:.60}")
    return {name: facts[name] for name in COUNTS}


@attrs.frozen(kw_only=True)
class Cursor:
    """Where a run is: what it counts, and what it draws and reads next.

    A state has these values as fields of its own, because every update changes some of them, and a
    record inside the state would be one more to make. The fields are described in ``TrainState``.
    """

    step: int
    epoch: int
    batch: int
    samples: int
    skipped: int
    seed: int
    updates: Mapping[str, int]
    generators: rng.HostGenerators | None
    position: Json

    @classmethod
    def of(cls, state: TrainState) -> Cursor:
        """Return that of a state."""
        return cls(**checks.fields_of(state, [field.name for field in attrs.fields(cls)]))

    @classmethod
    def of_saved(cls, saved: Reading) -> Cursor:
        """Return that of a checkpoint, for this process.

        Raises:
            TypeError: something cannot be part of one.
        """
        counts, updates = counts_in(saved.facts), saved.facts.get("updates", {})
        return cls(
            **counts,  # of an optimizer that had another name, those of all
            updates={k: updates.get(k, counts["step"]) for k in saved.state.updates},
            generators=_decode_generators(saved),
            position=_decode_position(saved),
        )

    @property
    def place(self) -> list[int]:
        """What orders the checkpoints of a run: updates tried, epochs, batches."""
        return [self.step + self.skipped, self.epoch, self.batch]


# --------------------------------------------------------------------------------------------------
# In a checkpoint: the counters are alike in all processes, the rest is of each share of the data.


def _save(saving: Collecting) -> dict[str, Json]:
    cursor = Cursor.of(saving.state)
    facts: dict[str, Json] = checks.fields_of(cursor, COUNTS)
    if cursor.updates:
        saving.require(NEWER_FORMAT)
        facts["updates"] = dict(cursor.updates)
    # Those of every process, by rank; None at the beginning of an epoch.
    every = collectives.gather_shares(cursor.generators and cursor.generators.to_parts(), COLLECTED)
    facts["generators"] = encode(every if any(every) else None, saving.tensors, "generators")
    return facts | _encode_positions(cursor.position, saving.tensors)


def _encode_positions(own: Json, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the position of the loader as facts; those of all processes if each has its shard.

    A position that is not plain data is left out, with a warning: the run can be resumed all the
    same, by reading the loader again.
    """
    every = collectives.gather_shares(own, COLLECTED)
    if None in every:
        return {}
    if own is not None and own["shards"] == 1:
        every = every[:1]
    added: dict[str, Tensor] = {}
    try:
        encoded = encode(every, added, POSITIONS)
        if Pending.is_in(decode(encoded, added)):
            raise TypeError(f"{POSITIONS} holds an object")
    except (TypeError, RecursionError) as error:
        log.warning(
            "save: the position of the training loader is left out, and a run that is resumed here "
            "reads the epoch again up to it: what state_dict() returns must be plain data (%s)",
            error,
        )
        return {}
    tensors.update(added)
    return {POSITIONS: encoded}


def _decode_generators(saved: Reading) -> rng.HostGenerators | None:
    every = decode(saved.facts["generators"], saved.tensors) or ()
    every = [own and rng.HostGenerators.from_parts(own).checked() for own in every]
    rank, processes = saved.state.backend.data_rank, saved.state.backend.data_size
    # Of another number of processes, the main one continues its stream, and the others begin new.
    return every[rank] if every and (rank == 0 or len(every) == processes) else None


def _decode_position(saved: Reading) -> Json:
    """Return the position of this process's loader, or None if it is not known."""
    backend, positions = saved.state.backend, saved.facts.get(POSITIONS, [])
    every = [_check_position(own) for own in decode(positions, saved.tensors)]
    if not every or every[0]["shards"] not in (1, backend.data_size):
        return None
    return every[min(backend.data_rank, len(every) - 1)]


def _prepare(saved: Reading) -> Load:
    return set_fields(**attrs.asdict(Cursor.of_saved(saved), recurse=False))


def _check_position(value: Json) -> Json:
    """Return what was read from a checkpoint.

    Raises:
        TypeError: it cannot be a position.
    """
    kinds = {"epoch": int, "batch": int, "shards": int, "keeper": str, "next": int | None}
    newer = {"size": list | None, "own": dict, "later": dict, "order": int, "indices": Tensor}
    if not isinstance(value, dict) or not {*kinds, "state"} <= {*value} <= {
        *kinds, "state", *newer
    }:  # fmt: skip
        raise TypeError(f"a position of the loader is {value!r:.60}")
    for name, kind in {**kinds, **newer}.items():
        if name in value and not isinstance(value[name], kind):
            raise TypeError(f"{name} of a position of the loader is {value[name]!r:.60}")
    if (size := value.get("size")) is not None and [*map(type, size)] != [int, str]:
        raise TypeError(f"size of a position of the loader is {size!r:.60}")
    return value


# --------------------------------------------------------------------------------------------------
# What a run does next, why it has ended, and its phases.

Todo = tuple[attrs.AttrsInstance, ...]  # actions
_STAGES = ("start", "boundary", "end")  # of Call
# What the reasons of a time limit began with, in checkpoints without kinds.
_LIMITS = {"time_limit: this job": "job", "time_limit: the run": "limit"}


def _save_next(saving: Collecting) -> dict[str, Json]:
    state = saving.state
    if state.phases:
        saving.require(NEWER_FORMAT)
    return {
        "stop": state.stop,
        **_kind_of(state.stop),
        **({"phases": _encode_phases(state.phases)} if state.phases else {}),
        **({"ends": state.ends} if state.ends else {}),
        "todo": encode_todo(state.todo),
        **({"noted": dict(state.noted)} if state.noted else {}),
        "news": sorted(state.events) if state.todo else [],  # the old name of events
    }


def _prepare_next(saved: Reading) -> Load:
    facts = saved.facts
    saved_on = shares_in(facts) if facts["batch"] else None
    return set_fields(**_decode_next(facts), run_id=run_of(saved.path, facts), saved_on=saved_on)


def _decode_next(facts: Mapping[str, Json]) -> dict[str, object]:
    events, todo = todo_of_before(facts)
    return {
        "stop": _decode_stop(facts["stop"], facts.get("stop_kind")),
        "events": events,
        "todo": decode_todo(facts["todo"]) if "todo" in facts else todo,
        "noted": {name: float(value) for name, value in facts.get("noted", {}).items()},
        "phases": decode_phases(facts),
        "ends": "epoch" if facts.get("ends") else None,
    }


def check_counters(facts: Mapping[str, Json]) -> None:
    """Raise unless a checkpoint has the counters of a run, and what it does next."""
    counts_in(facts)
    _decode_next(facts)


def _kind_of(stop: str | None) -> dict[str, str]:
    return {} if stop is None else {"stop_kind": str(Stop.kind_of(stop))}


def _decode_stop(reason: Json, kind: Json, name: str = "stop") -> Stop | None:
    """Return a stop from its reason and its kind, which checkpoints of before do not have."""
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise TypeError(f"{name} is {reason!r:.60}")
    if kind is None:
        limits = (kind for began, kind in _LIMITS.items() if reason.startswith(began))
        kind = next(limits, Stop.kind_of(reason))
    if kind not in Stop.KINDS:
        raise TypeError(f"the kind of {name} is {kind!r:.60}")
    return Stop(reason, str(kind))


_ACTIONS: Mapping[str, Callable[..., Action]] = {
    action.__name__: action for action in Action.__subclasses__()
}


def encode_todo(todo: Todo) -> list[dict[str, Json]]:
    """Return actions as JSON."""
    return [_encode_action(action) for action in todo]


def decode_todo(saved: Json) -> Todo:
    """Return actions from JSON.

    Raises:
        TypeError: it was not written by :func:`encode_todo`.
    """
    return tuple(map(_decode_action, _as_list(saved)))


def _encode_action(action: attrs.AttrsInstance) -> dict[str, Json]:
    facts = attrs.asdict(action)
    return {"do": type(action).__name__, **facts, **_kind_of(facts.get("stop"))}


def _decode_action(saved: Json) -> Action:
    match saved:
        case {"do": "Flush", "stop": reason, **more}:
            stop = _decode_stop(reason, more.get("stop_kind"), "the stop of Flush")
            return _ACTIONS["Flush"](stop)
        case {"do": str(name), **given} if name in _ACTIONS:
            names = [*inspect.signature(_ACTIONS[name]).parameters]
            if all(key in given and _FITS[key](given[key]) for key in names):
                values = [given[key] for key in names]
                return _ACTIONS[name](*(tuple(v) if isinstance(v, list) else v for v in values))
    raise TypeError(f"todo has {saved!r:.60}")


def _are_names(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# What each field of an action can be.
_FITS = {
    "ended": lambda value: isinstance(value, bool),
    "kind": Append.KINDS.__contains__,
    "names": _are_names,
    "loaders": _are_names,
    "stage": _STAGES.__contains__,
    "nth": lambda value: type(value) is int and value >= 0,
}


def todo_of_before(facts: Mapping[str, Json]) -> tuple[frozenset[str], Todo]:
    """Return the events and the actions of a checkpoint that was written before there were actions.

    It says what was left: the boundary, the end and its reason, the last save. Before 0.2 this was
    among the events: "pending" stood for the boundary, and "stop: ..." for the end.

    Raises:
        TypeError: it says something else.
    """
    events, left = _as_list(facts.get("news", [])), _as_list(facts.get("left", []))
    first, last = [], []
    for each in (*events, *left):
        match each:
            case "pending" | {"boundary": True}:
                first = [{"do": "Boundary", "ended": False}]
            case str(event) if event.startswith("stop: "):
                last += [{"do": "End"}, {"do": "Flush", "stop": event.removeprefix("stop: ")}]
            case {"end": reason, **more}:
                last += [{"do": "End"}, {"do": "Flush", "stop": reason, **more}]
            case {"flush": True}:
                last += [{"do": "Flush", "stop": None}]
            case str():
                pass
            case _:
                raise TypeError(f"left has {each!r:.60}")
    told = [each for each in events if isinstance(each, str)]
    named = frozenset(each for each in told if each != "pending" and each[:6] != "stop: ")
    # An update alone comes before its boundary.
    return named & {"update"} if first else named, decode_todo(first + last)


def _as_list(saved: Json) -> list[Json]:
    if not isinstance(saved, list):
        raise TypeError(f"what a run does next is {saved!r:.60}")
    return saved


def _encode_phases(phases: Sequence[Phase]) -> list[dict[str, Json]]:
    fields = attrs.filters.exclude(attrs.fields(Phase).named)
    return [attrs.asdict(phase, filter=fields) for phase in phases]


def decode_phases(facts: Mapping[str, Json]) -> tuple[Phase, ...]:
    """Return the phases that had begun when a checkpoint was saved."""
    return tuple(Phase(**{**phase, "named": False}) for phase in facts.get("phases", ()))


# --------------------------------------------------------------------------------------------------
# The time that was spent until a checkpoint was written, and the targets of its run.
#
# The targets are there so that an update of the run can be made again: a schedule that depends on
# the length of the run sets the same rate then.


def _save_seconds(saving: Collecting) -> dict[str, Json]:
    return {"seconds": Ownership.of(saving.state).seconds}


def _prepare_seconds(saved: Reading) -> Load:
    seconds = float(saved.facts.get("seconds", 0.0))  # those of older versions do not have it

    def load(state: TrainState) -> TrainState:
        Ownership.of(state).seconds = seconds
        return state

    return load


TARGETS = "targets"  # a key of the facts


@attrs.frozen
class Targets:
    """Where a run was to end.

    Args:
        epochs: the target for ``state.epoch``, or None.
        steps: what ``state.step`` was to be at the end, or None if that was not known.
        items: the target for ``state.items``, or None.
    """

    epochs: int | None
    steps: int | None
    items: int | None = None


def _save_targets(saving: Collecting) -> dict[str, Json]:
    run = saving.run
    if run is None:
        return {}
    by_items = {} if run.total_items is None else {"items": run.total_items}
    return {TARGETS: {"epochs": run.epochs, "steps": run.total_steps, **by_items}}


def decode_targets(facts: Mapping[str, Json]) -> Targets | None:
    """Return the targets of the run that wrote a checkpoint; None if it was written by none.

    Checkpoints of older versions do not have them.
    """
    saved = facts.get(TARGETS)
    if saved is None:
        return None
    targets = Targets(saved["epochs"], saved["steps"], saved.get("items"))
    return None if targets == Targets(None, None) else targets


# --------------------------------------------------------------------------------------------------
# The parts. Those that change what states share are loaded after all others.

COUNTER_PARTS = (
    Part("counters", _save, _prepare, of="counters"),
    *extensions("part counters"),
    Part("counters", _save_next, _prepare_next, of="counters"),
    Part("counters", _save_targets, of="counters"),  # not loaded: see `decode_targets`
)
SECONDS = Part("counters", _save_seconds, _prepare_seconds, of="counters")
