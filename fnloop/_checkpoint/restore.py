"""Restore a state from a checkpoint."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.fsdp import like_sharded
from fnloop._backend.launch import Backend
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._checkpoint.averages import with_averages
from fnloop._checkpoint.counters import check_counters, updates_by_name
from fnloop._checkpoint.files import read_checkpoint
from fnloop._checkpoint.format import PARTS, TRAINED, CheckpointError, Contents
from fnloop._checkpoint.optimizer_load import SavedOptimizer, load_all
from fnloop._checkpoint.optimizers import prepare_loads
from fnloop._checkpoint.parts import check_held, held_parts, read_parts
from fnloop._checkpoint.positions import POSITIONS, decode_position
from fnloop._checkpoint.regroup import groups_kept_on_error
from fnloop._checkpoint.retention import run_of
from fnloop._checkpoint.shared import check_visible
from fnloop._core.frozen import remember_restored
from fnloop._core.history import History
from fnloop._core.metrics import BUILTIN_METRICS, Mean, to_accumulator_dtype
from fnloop._core.optimizers import optimizers_of
from fnloop._core.record import Record
from fnloop._core.rng import HostGenerators
from fnloop._core.serialize import Json, Pending, decode, from_safetensor
from fnloop._core.snapshot import unwrap
from fnloop._core.state import (
    TrainState,
    check_not_stale,
    clear_parameter_cache,
    take_ownership,
)
from fnloop._display.checks import describe, flag, folder_path, join_names
from fnloop._display.log import log

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
    contents = read_checkpoint(source, history="history" in parts)
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
        with groups_kept_on_error(optimizers_of(state).values()):
            check_held(path, contents.facts, parts)
            fields = _decode_fields(contents, state, parts, run_of(path, contents.facts))
            loads = []
            if "model" in parts or TRAINED in parts:
                loads.append(_prepare_model(contents, state, parts, strict, path))
            if "optimizer" in parts:
                shapes = {name: tensor.shape for name, tensor in _model_tensors(contents).items()}
                facts = contents.facts["optimizer"]
                saved = SavedOptimizer(facts, contents.optimizer, shapes, path)
                prepared = prepare_loads(state, saved, strict)
                loads.append(functools.partial(load_all, prepared))
            if loads:
                _load_all(loads, unwrap(state))
    except CheckpointError:
        raise
    except Exception as error:  # the files may contain anything
        raise CheckpointError(
            f"{path} cannot be restored: {type(error).__name__}: {error}"
        ) from error
    restored = take_ownership(attrs.evolve(state, **fields))
    clear_parameter_cache(restored)
    if parts == PARTS:
        remember_restored(restored)
    return restored


def _load_all(loads: Sequence[Callable[[], None]], module: torch.nn.Module) -> None:
    """Load the module and the optimizers. If that fails, the module is left unchanged."""
    before = {k: v.clone() for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    try:
        for load in loads:
            load()
    except BaseException:
        module.load_state_dict(before, strict=False)
        raise


# --- fields of the state


def _decode_fields(
    contents: Contents, state: TrainState, parts: Sequence[str], run: str
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
    history = History(_decode_record(decode(row, slots)) for row in facts["history"])
    counters, generators, position = {}, [], None
    if "counters" in held:
        counters = check_counters(facts)
        generators = _decode_generators(decode(facts["generators"], slots) or ())
        position = decode_position(facts, slots, backend)

    fields: dict[str, object] = {}
    fields |= {name: mappings[name] for name in ("slots", "extra") if name in parts}
    if "metrics" in parts:
        merged = _decode_metrics(mappings["metrics"], device)
        fields["metrics"] = _own_metrics(merged, shares, backend)
    if "history" in parts:
        fields["history"] = history
    if "counters" in parts:
        fields |= counters | {"updates": updates_by_name(facts, state)}
        fields |= {"run_id": run, "generators": _own_generators(generators, backend)}
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


def _own_generators(
    generators: Sequence[HostGenerators | None], backend: Backend
) -> HostGenerators | None:
    """Return the generators of this process if the number of processes is unchanged.

    Otherwise only the main process continues its stream, and the others begin new ones.
    """
    if backend.main or len(generators) == backend.world_size:
        return generators[backend.rank] if generators else None
    return None


def _own_metrics(
    merged: dict[str, object], shares: Sequence[dict[str, object]], backend: Backend
) -> dict[str, object]:
    """Return the metrics of this process if the number of processes is unchanged.

    Otherwise the main process continues with those of all processes together.
    """
    if len(shares) == backend.world_size:
        return shares[backend.rank]
    return merged if backend.main else {}


def _decode_record(row: dict[str, Any]) -> Record:
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    closing = row.pop("closing", False)
    return Record(epoch, step, row, seconds, closing)


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


# --- the model


def _prepare_model(
    contents: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path
) -> Callable[[], None]:
    """Check that the saved model fits, and return the function that loads it.

    With the counters, it restores which parameters are frozen and which modules are in evaluation
    mode. Then the dtypes must be the same too; weights alone may be cast.

    Args:
        contents, state, parts, strict, path: as in :func:`restore_contents`.
    """
    module, facts = unwrap(state), contents.facts["model"]
    trained = "model" not in parts
    flags = "counters" in parts and not trained
    spelled = {strip_compile_prefix(key): key for key in module.state_dict()}
    mine = {strip_compile_prefix(key): value for key, value in module.state_dict().items()}
    extra = {name: decode(value, contents.slots) for name, value in facts["extra_state"].items()}
    saved = {**_model_tensors(contents), **extra}
    if trained:
        saved = _trained_parts(saved, contents, module)
    faults = _compare_models(saved, mine, flags)
    if trained:
        _warn_of_untrained(module, faults.pop("missing in the checkpoint"))
    found = "; ".join(f"{what}: {join_names(which)}" for what, which in faults.items() if which)
    if found and strict:
        part = TRAINED if trained else "model"
        raise CheckpointError(
            f"{path} is of another model ({facts['class']}). {found}. Create the same model, or "
            f"restore what matches: restore(path, state, only=('{part}',), strict=False)"
        )
    if found:
        log.warning("restore: left unchanged: %s", found)
    fitting = {
        spelled[name]: _shard_like(value, mine[name])
        for name, value in saved.items()
        if name in mine and not _differ_in_shape(value, mine[name])
    }

    def load() -> None:
        missing = module.load_state_dict(fitting, strict=False).missing_keys
        if trained:
            missing = [name for name in missing if name in fitting]
        if strict and missing:
            raise CheckpointError(
                f"{path}: the model took no value for {join_names(missing)}: its hooks rename keys"
            )
        if flags:
            for name, p in module.named_parameters():
                p.requires_grad_(strip_compile_prefix(name) not in facts["frozen"])
            for name, submodule in module.named_modules():
                submodule.training = strip_compile_prefix(name) not in facts["evaluating"]

    return load


def _trained_parts(
    saved: Mapping[str, object], contents: Contents, module: torch.nn.Module
) -> dict[str, object]:
    """Return what a checkpoint holds of the parameters that required gradients."""
    if "model" not in held_parts(contents.facts):
        return dict(saved)
    names = {strip_compile_prefix(name) for name, _ in _parameters(module)}
    names -= {*contents.facts["model"]["frozen"]}
    return {name: value for name, value in saved.items() if name in names}


def _warn_of_untrained(module: torch.nn.Module, missing: Sequence[str]) -> None:
    """Warn if there are parameters to train that the checkpoint does not hold."""
    learning = {strip_compile_prefix(name) for name, p in _parameters(module) if p.requires_grad}
    if untrained := [name for name in missing if name in learning]:
        log.warning("restore: not in the checkpoint, left unchanged: %s", join_names(untrained))


def _parameters(module: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _compare_models(
    saved: Mapping[str, object], mine: Mapping[str, object], dtypes: bool
) -> dict[str, list[str]]:
    """Return the differences between two models, by kind; dtypes only if asked for."""
    faults: dict[str, list[str]] = {
        "missing in the checkpoint": [name for name in mine if name not in saved],
        "not in the model": [name for name in saved if name not in mine],
        "of another shape": [],
        "of another dtype": [],
    }
    for name, here in mine.items():
        there = saved.get(name)
        if isinstance(there, Tensor) and isinstance(here, Tensor):
            if there.shape != here.shape:
                shapes = f"{tuple(there.shape)} saved, {tuple(here.shape)} here"
                faults["of another shape"].append(f"{name}: {shapes}")
            if there.dtype != here.dtype and dtypes:
                faults["of another dtype"].append(f"{name}: {there.dtype} saved, {here.dtype} here")
    return faults


def _differ_in_shape(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape


def _model_tensors(contents: Contents) -> dict[str, Tensor]:
    """Return the saved tensors of the model, those of complex128 as such."""
    pairs = contents.facts.get("model", {}).get("complex", ())
    return {
        name: from_safetensor(tensor) if name in pairs else tensor
        for name, tensor in contents.model.items()
    }


def _shard_like(value: object, template: object) -> object:
    if isinstance(value, Tensor) and isinstance(template, Tensor):
        return like_sharded(value, template)
    return value
