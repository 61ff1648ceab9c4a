"""The parts of a checkpoint: how each is saved, checked, and loaded. A new one is a new `Part`.

The counters, the model and the optimizers have modules of their own. Objects that are not plain
data are saved as their parts (see ``serialize``). They are reconstructed when a new object of their
kind is available: the slot of a middleware when its ``init`` has created one, a metric when the
next batch brings one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fnloop._core.state import TrainState, unwrap
from fnloop._extensions import extensions
from fnloop._extensions.checkpoints.counters import COUNTER_PARTS, SECONDS, decode_phases
from fnloop._extensions.checkpoints.files import decode_history
from fnloop._extensions.checkpoints.format import (
    COLLECTED,
    TRAINED,
    CheckpointError,
    gather_encoded,
)
from fnloop._extensions.checkpoints.model import (
    MODEL,
    Named,
    model_tensors,
    weights_kept_on_error,
)
from fnloop._extensions.checkpoints.named import NamedOptimizer
from fnloop._extensions.checkpoints.optimizer import (
    WHAT,
    SavedOptimizer,
    copies_in,
    encode_optimizers,
    merge_processes,
    optimizers_kept_on_error,
    prepare_loads,
)
from fnloop._extensions.checkpoints.serialize import (
    AsParts,
    Json,
    as_parts,
    decode,
    encode,
    plain_only,
)
from fnloop._extensions.checkpoints.shapes import forget_states
from fnloop._extensions.checkpoints.transfer import (
    Collecting,
    HeldPart,
    Load,
    Reading,
    held,
    set_fields,
)
from fnloop._step.engine import engine_of
from fnloop.extend import Ownership, Part, Running, checks

# --------------------------------------------------------------------------------------------------
# The optimizers (see the module ``optimizer``).


def _save_optimizers(saving: Collecting) -> dict[str, Json]:
    state, tensors = saving.state, saving.groups["optimizer"]
    if not saving.own_optimizers:
        facts, saving.local = merge_processes(state, tensors)
        return {"optimizer": facts}
    every = gather_encoded(lambda: encode_optimizers(state, tensors), WHAT, CheckpointError)
    if not state.backend.main:
        saving.add_own(tensors, "optimizer/")
    return {"optimizer": every[0], "own_optimizers": [None, *every[1:]]}


def _prepare_optimizers(saved: Reading) -> Load:
    module = unwrap(saved.state)
    shapes = {name: tensor.shape for name, tensor in model_tensors(saved).items()}
    facts, tensors = saved.facts["optimizer"], saved.groups["optimizer"]
    processes, rank = saved.facts.get("processes"), saved.state.backend.rank
    if rank and "own_optimizers" in saved.facts and saved.is_of_as_many:
        facts, tensors = saved.facts["own_optimizers"][rank], saved.own("optimizer/")
    optimizers = SavedOptimizer(
        facts, tensors, shapes, saved.path, processes, settings=saved.settings,
        takes=saved.undone if saved.shapes == "file" else None,
    )  # fmt: skip
    # Before the check, which makes groups as they were.
    named = NamedOptimizer.of_state(saved.state)
    saved.undone.enter_context(optimizers_kept_on_error(named.values()))
    forget_states(saved.state, saved.resized)
    loads = prepare_loads(saved.state, named, optimizers, saved.strict)

    def load(state: TrainState) -> TrainState:
        if not {"model", TRAINED} & {*saved.parts}:  # an optimizer may change them as it loads
            saved.undone.enter_context(weights_kept_on_error(module, {}))
        for load_one in loads:
            load_one()
        return state

    return load


def _save_nothing(saving: Collecting) -> dict[str, Json]:
    return {}


def _prepare_copies(saved: Reading) -> Load:
    def load(state: TrainState) -> TrainState:
        Ownership.of(state).notes["copies"] = copies_in(state, saved.facts)
        return state

    return load


def _encode_optimizers(saving: Collecting) -> None:
    encode_optimizers(saving.state, saving.groups["optimizer"])


# --------------------------------------------------------------------------------------------------
# The slots of middleware, and what the user keeps in `extra`.


def _save_slots(saving: Collecting) -> dict[str, Json]:
    # What is in other slots is saved by the parts that were brought.
    names, slots = open_parts(saving.state), saving.state.slots.items()
    plain = {k: None if k in names or parts_of(v) else v for k, v in slots}
    return {"slots": _encode_mapping("slots", plain, saving.tensors)}


def _prepare_slots(saved: Reading) -> Load:
    return set_fields(slots=_decode_mapping("slots", saved))


def _save_extra(saving: Collecting) -> dict[str, Json]:
    return {"extra": _encode_mapping("extra", saving.state.extra, saving.tensors, plain_only)}


def _prepare_extra(saved: Reading) -> Load:
    return set_fields(extra=_decode_mapping("extra", saved))


def check_mapping(part: str, value: object) -> Mapping[str, object]:
    """Return what a part of a state holds. Raise TypeError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{part} must be a mapping; it is {checks.describe(value)}")
    return value


def _encode_mapping(
    part: str, value: object, tensors: dict[str, Tensor], other: AsParts = as_parts
) -> Json:
    """Return a mapping of the state as JSON, and add its tensors to ``tensors``."""
    try:
        return encode(dict(check_mapping(part, value)), tensors, part, other)
    except RecursionError:
        raise TypeError(
            f"{part} holds something that contains itself, or is nested too deeply"
        ) from None


def _decode_mapping(part: str, saved: Reading) -> Named:
    value = decode(saved.facts[part], saved.tensors)
    if not isinstance(value, dict):
        raise TypeError(f"{part} is a {type(value).__name__}")
    return value


# --------------------------------------------------------------------------------------------------
# The running metrics, and the history.


def _save_metrics(saving: Collecting) -> dict[str, Json]:
    """Save the metrics over all processes, and those of each ("shares"), so that as many resume."""
    merged, every = engine_of(saving.state).gather(saving.state, COLLECTED)
    names = {name for own, _ in every for name in own}
    return {
        "metrics": encode(merged, saving.tensors, "metrics"),
        "shares": [
            encode(share, saving.tensors, f"shares.{rank}") for rank, (_, share) in enumerate(every)
        ],
        **({"own": sorted(names)} if every else {}),
    }


def _encode_metrics(saving: Collecting) -> None:
    encode(dict(saving.state.metrics), saving.tensors, "metrics")


def _prepare_metrics(saved: Reading) -> Load:
    facts, backend = saved.facts, saved.state.backend
    merged = _decode_metrics(_decode_mapping("metrics", saved), backend.device)
    shares = [
        _decode_metrics(decode(own, saved.tensors), backend.device)
        for own in facts.get("shares", ())
    ]
    metrics = engine_of(saved.state).continued(saved.state, merged, shares)

    def load(state: TrainState) -> TrainState:
        Ownership.of(state).own_metrics.update(map(str, facts.get("own", ())))
        return attrs.evolve(state, metrics=metrics)

    return load


def _decode_metrics(metrics: Mapping[str, object], device: torch.device) -> dict[str, object]:
    return {name: Running.restored(value, device) for name, value in metrics.items()}


def _save_history(saving: Collecting) -> dict[str, Json]:
    saving.history = saving.encode_history(saving.state.history)
    return {"digest": saving.history.digest}  # it is itself written record by record


def _prepare_history(saved: Reading) -> Load:
    history = decode_history(saved.facts["history"], saved.path)
    phases = decode_phases(saved.facts)
    begun = max((phase.records for phase in phases), default=0)
    if begun > len(history):
        raise ValueError(f"a phase began with record {begun}, of {len(history)}")
    return set_fields(history=history)


# --------------------------------------------------------------------------------------------------
# The parts of every state, and those that were brought, in the order of loading.
#
# What is before the model only sets fields of a new state. Those parts that change what states
# share (`Ownership`) are last, because nothing after them can fail.


def _part(of: str, *how: Callable[..., Json]) -> Part:
    return Part(of, *how, of=of)


_FIRST = (
    *COUNTER_PARTS,
    *MODEL,
    _part("optimizer", _save_nothing, _prepare_optimizers, _encode_optimizers),
    _part("slots", _save_slots, _prepare_slots, _save_slots),
    _part("extra", _save_extra, _prepare_extra, _save_extra),
    _part("history", _save_history, _prepare_history),
)
_LAST = (
    _part("optimizer", _save_optimizers, _prepare_copies),  # after what is said of processes
    SECONDS,
    _part("metrics", _save_metrics, _prepare_metrics, _encode_metrics),
)


def parts_of(slot: object) -> tuple[Part, ...]:
    """Return the parts that the class of what is in a slot brings."""
    return getattr(type(slot), "brings", ())


def every_part(parts: Sequence[str], brought: Iterable[Part]) -> list[Part]:
    """Return all parts that belong to those which ``only=`` names, in the order of loading."""
    return [part for part in (*_FIRST, *brought, *_LAST) if part.of in parts]


def open_parts(state: TrainState) -> dict[str, Part]:
    """Return the parts that were brought to a state by name, and those that nothing has brought."""
    slots, brought = state.slots, Ownership.of(state).brought
    found = {name: part for name, part in brought.items() if name in slots}
    for name, slot in slots.items():
        if isinstance(slot, HeldPart):
            found[name] = held(name)
        found |= {part.name: part for part in parts_of(slot)}
    return found | {part.name: part for part in engine_of(state).brings}


def parts_in(facts: Mapping[str, Json], state: TrainState) -> list[Part]:
    """Return the parts beside those of every state that a checkpoint has, or a state brings."""
    known = {**Ownership.of(state).brought, **open_parts(state)}
    found = {name: known.get(name) or held(name) for name in facts.get("brought", ())}
    found |= {name: part for name in facts for part in extensions(f"part {name}")}
    found |= {part.name: part for part in engine_of(state).brings}
    return [*found.values()]
