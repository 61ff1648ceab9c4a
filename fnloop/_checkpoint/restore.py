"""Restore a state from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from fnloop._backend.memory import is_out_of_memory
from fnloop._checkpoint.averages import with_averages
from fnloop._checkpoint.counters import check_counters, check_seconds, updates_by_name
from fnloop._checkpoint.format import PARTS, TRAINED, CheckpointError, Contents
from fnloop._checkpoint.history_blocks import decode_history
from fnloop._checkpoint.model_load import model_tensors, prepare_model, weights_kept_on_error
from fnloop._checkpoint.optimizer_load import SavedOptimizer, load_all
from fnloop._checkpoint.optimizers import prepare_loads
from fnloop._checkpoint.parts import check_held, held_parts, read_parts
from fnloop._checkpoint.positions import POSITIONS, decode_position
from fnloop._checkpoint.read import read_checkpoint
from fnloop._checkpoint.regroup import groups_kept_on_error
from fnloop._checkpoint.retention import run_of
from fnloop._checkpoint.shared import check_visible
from fnloop._checkpoint.shares import own_generators, own_metrics, warn_of_exact
from fnloop._core.frozen import remember_restored
from fnloop._core.metrics import BUILTIN_METRICS, Mean, to_accumulator_dtype
from fnloop._core.optimizers import optimizers_in
from fnloop._core.phase import decode_phases
from fnloop._core.rng import HostGenerators
from fnloop._core.serialize import Json, Pending, decode
from fnloop._core.snapshot import unwrap
from fnloop._core.state import (
    TrainState,
    check_not_stale,
    clear_parameter_cache,
    ownership_of,
    take_ownership,
)
from fnloop._display.checks import describe, flag, folder_path

__all__ = ["restore", "restore_contents"]


def restore(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
) -> TrainState:
    """Read a checkpoint into a state.

    Args:
        path: the folder.
        state: a state with the same model and the same optimizer class; of several optimizers, with
            the same names. Its module and optimizers are loaded in place, and it is stale
            afterwards. If anything is wrong with the checkpoint, the state stays as it is.
        only: the parts to restore, out of "model", "optimizer", "slots", "counters", "metrics",
            "history", "extra". All of them by default; ``("model",)`` for fine-tuning. And
            "trained": of the model, the parameters that required gradients when it was saved.
        strict: whether the names and shapes in the model must be the same. False restores those
            that match, and logs the others. The optimizer's state of the others is left out.

    Returns:
        The saved state; training from it is bit-identical to an uninterrupted run.

    Raises:
        CheckpointError: it is not a checkpoint, is damaged, was written by a newer fnloop, does not
            match the model or the optimizer, or does not hold a part; or another machine of the
            run does not see it.
        OSError, MemoryError: it cannot be read, or there is no memory for it.
        StaleStateError: the state has been advanced.
        TypeError, ValueError: an argument is not what it should be.

    Example:
        >>> import tempfile
        >>> from fnloop import save
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(toy(w=3.0), f"{folder}/a")
        ...     restore(path, toy(lr=0.5), only=("model",)).model.w.item()
        3.0
    """
    check_not_stale(state, "restore")
    parts = read_parts("restore", only)
    flag("restore", "strict", strict)
    if path is None:
        check_visible(None)
        raise TypeError(
            "restore expects a path; got None, which is what latest(folder) returns if there is no "
            "checkpoint"
        )
    source = folder_path("restore", "path", path)
    check_visible(source)
    contents = read_checkpoint(source, state, history="history" in parts)
    return restore_contents(contents, state, parts, strict, source)


def restore_contents(
    contents: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path
) -> TrainState:
    """Restore parts of the contents of a checkpoint into a state.

    Everything is checked and decoded before anything is changed.

    Args:
        contents: what was read.
        state, strict: as in :func:`restore`.
        parts: the parts to restore.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: the contents are not valid, or do not match the state.
    """
    try:
        with groups_kept_on_error(optimizers_in(state.optimizer).values()):
            check_held(path, contents.facts, parts)
            fields = _decode_fields(contents, state, parts, path)
            own = [str(name) for name in contents.facts.get("own", ())]
            seconds = check_seconds(contents.facts)
            load_model, prepared = None, []
            if "model" in parts or TRAINED in parts:
                load_model = prepare_model(contents, state, parts, strict, path)
            if "optimizer" in parts:
                shapes = {name: tensor.shape for name, tensor in model_tensors(contents).items()}
                facts = contents.facts["optimizer"]
                saved = SavedOptimizer(facts, contents.optimizer, shapes, path)
                prepared = prepare_loads(state, saved, strict)
            if load_model is not None or prepared:
                fitting = {} if load_model is None else load_model.fitting
                with weights_kept_on_error(unwrap(state), fitting):
                    if load_model is not None:
                        load_model()
                    load_all(prepared)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # the files may contain anything
        if is_out_of_memory(error):  # on any device
            raise
        raise CheckpointError(
            f"{path} cannot be restored: {type(error).__name__}: {error}"
        ) from error
    restored = take_ownership(attrs.evolve(state, **fields))
    clear_parameter_cache(restored)
    if parts == PARTS:
        remember_restored(restored)
    if "metrics" in parts:
        ownership_of(restored).own_metrics.update(own)
    if "counters" in parts:
        ownership_of(restored).seconds = seconds
    return restored


# --- fields of the state


def _decode_fields(
    contents: Contents, state: TrainState, parts: Sequence[str], path: Path
) -> dict[str, object]:
    """Return the fields of the state that were saved.

    All that the checkpoint holds are decoded, also those not asked for.
    """
    facts, device, backend = contents.facts, state.backend.device, state.backend
    held = held_parts(facts)
    slots = {
        k: v if k.startswith(("generators", POSITIONS)) else v.to(device)
        for k, v in contents.slots.items()
    }
    mappings = {
        name: _decode_mapping(name, facts, slots)
        for name in ("slots", "metrics", "extra")
        if name in held
    }
    if "slots" in held:
        mappings["slots"] = with_averages(mappings["slots"], contents, state)
    shares = [_decode_metrics(decode(own, slots), device) for own in facts.get("shares", ())]
    history = decode_history(facts["history"], path)
    counters, generators, position = {}, [], None
    if "counters" in held:
        counters = check_counters(facts)
        generators = _decode_generators(decode(facts["generators"], slots) or ())
        position = decode_position(facts, slots, backend)
        begun = max((phase.records for phase in decode_phases(facts.get("phases", []))), default=0)
        if "history" in parts and begun > len(history):
            raise ValueError(f"a phase began with record {begun}, of {len(history)}")

    fields: dict[str, object] = {}
    fields |= {name: mappings[name] for name in ("slots", "extra") if name in parts}
    if "metrics" in parts:
        merged = _decode_metrics(mappings["metrics"], device)
        fields["metrics"] = own_metrics(merged, shares, backend)
    if "history" in parts:
        fields["history"] = history
    if "counters" in parts:
        warn_of_exact(facts, backend)
        fields |= counters | {"updates": updates_by_name(facts, state)}
        fields |= {"run_id": run_of(path, facts), "generators": own_generators(generators, backend)}
        fields["position"] = position
        fields["saved_on"] = facts.get("processes") if facts["batch"] else None
        if facts.get("news"):
            fields["events"] = frozenset(facts["news"])
    return fields


def _decode_mapping(
    part: str, facts: Mapping[str, Json], tensors: Mapping[str, Tensor]
) -> dict[str, object]:
    value = decode(facts[part], tensors)
    if not isinstance(value, dict):
        raise TypeError(f"{part} is a {type(value).__name__}")
    return value


def _decode_generators(every: Sequence[Json]) -> list[HostGenerators | None]:
    return [own and HostGenerators.from_parts(own).checked() for own in every]


def _decode_metrics(metrics: Mapping[str, object], device: torch.device) -> dict[str, object]:
    return {name: _decode_metric(value, device) for name, value in metrics.items()}


def _decode_metric(value: object, device: torch.device) -> object:
    """Return a built-in metric. Another stays pending until a batch brings one of its kind."""
    if not isinstance(value, Pending):
        raise TypeError(f"a metric is {value!r}")
    if value.kind not in BUILTIN_METRICS:
        return value
    if not all(map(_is_scalar, value.parts.values())):
        raise TypeError(f"a {value.kind} holds {describe(dict(value.parts))}")
    metric = BUILTIN_METRICS[value.kind](**value.parts)
    if isinstance(metric, Mean) and not isinstance(metric.total, Tensor):
        # Several processes merged it on the host.
        total = torch.tensor(metric.total, dtype=torch.float64, device=device)
        metric = Mean(to_accumulator_dtype(total), metric.weight)
    return metric


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)
