"""Restore a state from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.collectives import any_rank
from fnloop._backend.fsdp import like_sharded
from fnloop._backend.launch import Backend
from fnloop._checkpoint.files import existing, read_files
from fnloop._checkpoint.format import CheckpointError, Contents
from fnloop._checkpoint.optimizer import bare_name, optimizer_loader, owned_by
from fnloop._checkpoint.retention import run_of
from fnloop._checkpoint.save import COUNTERS, PARTS
from fnloop._core.history import History
from fnloop._core.metrics import BUILTIN_METRICS, Mean, to_accumulator_dtype
from fnloop._core.record import Record
from fnloop._core.rng import SEED_BITS, HostGenerators
from fnloop._core.serialize import Pending, decode, from_safetensor
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState, check_not_stale, take_ownership
from fnloop._display.checks import described, folder_path, listed
from fnloop._display.log import log

__all__ = ["restore", "restore_from"]


# --- restoring


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
        state: a state of the same model and the same optimizer class; its module and optimizer are loaded in place,
            and it is stale then. If anything is wrong with the checkpoint it stays as it is.
        only: which parts to take: of "model", "optimizer", "slots", "counters", "metrics", "history", "extra". All by
            default; ``("model",)`` for fine-tuning.
        strict: whether the names and shapes of the model must be the same. False takes those that match, and says which
            don't; the optimizer's state of the others is left out.

    Returns:
        The state that was saved: a run goes on with it to the bit.

    Raises:
        CheckpointError: it is no checkpoint, is damaged or newer, or doesn't match the model or the optimizer.
        StaleStateError: the state has been advanced.
        ValueError: there is no such part.

    Example:
        >>> import tempfile
        >>> from fnloop import save
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     restore(save(toy(w=3.0), f"{folder}/a"), toy(lr=0.5), only=("model",)).model.w.item()
        3.0
    """
    check_not_stale(state, "restore")
    if only is not None and (isinstance(only, str) or not _are_parts(only)):
        raise ValueError(
            f"restore expects only= as a tuple of {', '.join(PARTS)}; got {described(only)}"
        )
    parts = PARTS if only is None else tuple(only)
    if not isinstance(strict, bool):
        raise TypeError(f"restore expects strict as True or False; got {described(strict)}")
    if path is None:
        raise TypeError(
            "restore expects a path; got None, which is what latest(folder) returns where there is no checkpoint"
        )
    source = folder_path("restore", "path", path)
    _check_shared(source, state)
    return restore_from(
        read_files(source, history="history" in parts), state, parts, strict, source
    )


def _are_parts(only: Any) -> bool:
    try:
        return all(isinstance(part, str) and part in PARTS for part in only)
    except TypeError:
        return False


def _check_shared(path: Path, state: TrainState) -> None:
    """Raise if some processes see a checkpoint and this one does not."""
    there = existing(path).exists()
    if state.backend.world_size > 1 and any_rank(there) and not there:
        raise CheckpointError(
            f"process {state.backend.rank} does not see {path}, and another one does: with several machines, checkpoints "
            "have to be on a disk that all of them share"
        )


def restore_from(
    read: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path
) -> TrainState:
    try:
        # Everything is checked and decoded before anything is changed.
        fields = _decoded(read, state, parts, run_of(path, read.facts))
        loads = []
        if "model" in parts:
            loads.append(_match_model(read, state, strict, path, flags="counters" in parts))
        if "optimizer" in parts:
            shapes = {name: tensor.shape for name, tensor in _model_tensors(read).items()}
            loads.append(
                optimizer_loader(
                    owned_by(state), read.facts["optimizer"], read.optimizer, shapes, strict, path
                )
            )
        kept = (
            {k: v.clone() for k, v in unwrap(state).state_dict().items() if isinstance(v, Tensor)}
            if loads
            else {}
        )
        try:
            for load in loads:
                load()
        except BaseException:
            unwrap(state).load_state_dict(kept, strict=False)
            raise
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is that somebody has written there
        raise CheckpointError(
            f"{path} can't be restored: {type(error).__name__}: {error}"
        ) from error
    if "batch" in fields:
        fields["saved_on"] = read.facts.get("processes")
    return take_ownership(attrs.evolve(state, **fields))


def _decoded(read: Contents, state: TrainState, parts: Sequence[str], run: str) -> dict[str, Any]:
    """Return the fields of the state that were saved."""
    facts, fields = read.facts, {}
    device = state.backend.device
    slots = {k: v if k.startswith("generators") else v.to(device) for k, v in read.slots.items()}
    for part in ("slots", "metrics", "extra"):
        value = decode(facts[part], slots)
        if not isinstance(value, dict):
            raise TypeError(f"{part} is a {type(value).__name__}")
        if part in parts:
            fields[part] = (
                {k: _metric(v, device) for k, v in value.items()} if part == "metrics" else value
            )
    history = History(_record(decode(row, slots)) for row in facts["history"])
    if "history" in parts:
        fields["history"] = history
    counters = {name: facts[name] for name in COUNTERS}
    for name, value in counters.items():
        least, most = (0, SEED_BITS) if name == "seed" else (0, 1 << 62)
        right = (
            value is None or isinstance(value, str)
            if name == "stop"
            else type(value) is int and least <= value <= most
        )
        if not right:
            raise TypeError(f"{name} is {value!r:.60}")
    counters["run_id"] = run
    generators = [
        own and HostGenerators.from_parts(own).checked()
        for own in decode(facts["generators"], slots) or ()
    ]
    if "counters" in parts:
        fields.update(counters, generators=_own(generators, state.backend))
        if facts.get("news"):
            fields["events"] = frozenset(facts["news"])
    shares = [
        {k: _metric(v, device) for k, v in decode(own, slots).items()}
        for own in facts.get("shares", ())
    ]
    if "metrics" in parts and len(shares) == state.backend.world_size:
        fields["metrics"] = shares[state.backend.rank]
    elif "metrics" in parts and not state.backend.main:
        fields["metrics"] = {}  # the main process has what all have seen
    return fields


def _own(generators: list[HostGenerators | None], backend: Backend) -> HostGenerators | None:
    """Return the generators of this process, if there are as many as there were; else the main one's go on, others begin."""
    if backend.main or len(generators) == backend.world_size:
        return generators[backend.rank] if generators else None
    return None


def _record(row: dict[str, Any]) -> Record:
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    closing = row.pop("closing", False)
    return Record(epoch, step, row, seconds, closing)


def _metric(value: Any, device: torch.device) -> Any:
    """Return a metric of ours as itself; another waits for the next batch, which brings one of its kind."""
    if not isinstance(value, Pending):
        raise TypeError(f"a metric is {value!r}")
    if value.kind not in BUILTIN_METRICS:
        return value
    if not all(_is_scalar(part) for part in value.parts.values()):
        raise TypeError(f"a {value.kind} holds {described(dict(value.parts))}")
    metric = BUILTIN_METRICS[value.kind](**value.parts)
    if isinstance(metric, Mean) and not isinstance(
        metric.total, Tensor
    ):  # several processes met on the host
        metric = Mean(
            to_accumulator_dtype(torch.tensor(metric.total, dtype=torch.float64, device=device)),
            metric.weight,
        )
    return metric


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.ndim == 0) or (
        isinstance(value, int | float) and not isinstance(value, bool)
    )


def _match_model(
    read: Contents, state: TrainState, strict: bool, path: Path, flags: bool
) -> Callable[[], None]:
    module, facts = unwrap(state), read.facts["model"]
    spelled = {bare_name(k): k for k in module.state_dict()}
    mine = {bare_name(k): v for k, v in module.state_dict().items()}
    saved = {
        **_model_tensors(read),
        **{k: decode(v, read.slots) for k, v in facts["extra_state"].items()},
    }
    missing, unexpected = [k for k in mine if k not in saved], [k for k in saved if k not in mine]
    both = [
        k
        for k in mine
        if k in saved and isinstance(saved[k], Tensor) and isinstance(mine[k], Tensor)
    ]
    differ = [k for k in both if saved[k].shape != mine[k].shape]
    shapes = [f"{k}: {tuple(saved[k].shape)} saved, {tuple(mine[k].shape)} here" for k in differ]
    dtypes = [
        f"{k}: {saved[k].dtype} saved, {mine[k].dtype} here"
        for k in both
        if saved[k].dtype != mine[k].dtype
    ]
    faults = [
        ("missing in the checkpoint", missing),
        ("not in the model", unexpected),
        ("of another shape", shapes),
    ]
    faults += [("of another dtype", dtypes)] if flags else []  # the weights alone may be cast
    found = "; ".join(f"{what}: {listed(which)}" for what, which in faults if which)
    if found and strict:
        raise CheckpointError(
            f"{path} is of another model ({facts['class']}). {found}. Make the same model, or "
            "take what matches: "
            f"restore(path, state, only=('model',), strict=False)"
        )
    if found:
        log.warning("restore: left as it was: %s", found)
    fitting = {
        spelled[k]: _shard_like(v, mine[k])
        for k, v in saved.items()
        if k in mine and k not in differ
    }

    def load() -> None:
        reply = module.load_state_dict(fitting, strict=False)
        if strict and reply.missing_keys:
            raise CheckpointError(
                f"{path}: the model took no value for {listed(reply.missing_keys)}: its hooks rename keys"
            )
        if flags:
            for name, p in module.named_parameters():
                p.requires_grad_(bare_name(name) not in facts["frozen"])
            for name, submodule in module.named_modules():
                submodule.training = bare_name(name) not in facts["evaluating"]

    return load


def _model_tensors(read: Contents) -> dict[str, Tensor]:
    """Return the tensors of the model that were saved, those of complex128 as such."""
    pairs = read.facts["model"].get("complex", ())
    return {
        name: from_safetensor(tensor) if name in pairs else tensor
        for name, tensor in read.model.items()
    }


def _shard_like(value: Any, template: Any) -> Any:
    return (
        like_sharded(value, template)
        if isinstance(value, Tensor) and isinstance(template, Tensor)
        else value
    )
