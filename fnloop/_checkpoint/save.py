"""Save a state: collect everything that a run depends on, and write it as a checkpoint.

The format is described in the module ``format``. Objects that are not plain data are saved as their
parts (see ``serialize``). They are reconstructed when a new object of their kind is available: the
slot of a middleware when its ``init`` has created one, a metric when the next batch brings one.
"""

from __future__ import annotations

import json
import os
import platform
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend.collectives import gather_objects
from fnloop._backend.fsdp import full
from fnloop._backend.public import on_main_process
from fnloop._checkpoint.atomic_write import write_checkpoint
from fnloop._checkpoint.format import COUNTERS, FORMAT, CheckpointError, Contents
from fnloop._checkpoint.history_blocks import EncodedHistory, encode_record
from fnloop._checkpoint.optimizer import NamedOptimizer, strip_compile_prefix
from fnloop._checkpoint.optimizer_save import encode_optimizer
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.history import History
from fnloop._core.serialize import Json, as_safetensor, encode
from fnloop._core.snapshot import unwrap
from fnloop._core.state import (
    PENDING,
    RECORD,
    UPDATE,
    TrainState,
    check_not_stale,
    detached_from_run,
)
from fnloop._core.types import Metric
from fnloop._display.checks import describe, folder_path
from fnloop._display.log import log
from fnloop._step.engine import engine_of
from fnloop._version import __version__

__all__ = ["collect_contents", "position_of", "save"]

_tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def save(state: TrainState, path: str | os.PathLike[str]) -> Path:
    """Write a checkpoint: a folder that is either complete or absent.

    With several processes, all of them must call it, and the main process writes.

    Args:
        state: the newest state; it may be in the middle of an epoch.
        path: the folder to create, on a disk of this machine; ``~`` is expanded. An existing
            checkpoint is replaced. Anything else that exists there is not touched.

    Returns:
        The absolute path.

    Raises:
        StaleStateError: the state has been advanced.
        CheckpointError: something in the state cannot be saved, or the path exists and is not a
            checkpoint.
        TypeError, ValueError: it is not a path, is empty, or is an address such as ``s3://...``.
        OSError: the disk is full, or another fault of the disk; what was there before is still
            there.

    Example:
        >>> import tempfile
        >>> from fnloop import restore
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(toy(w=3.0), f"{folder}/a")
        ...     restore(path, toy()).model.w.item()
        3.0
    """
    check_not_stale(state, "save")
    target = folder_path("save", "path", path)
    _warn_unless_resumable(state)
    contents = collect_contents(state)
    return on_main_process(lambda: write_checkpoint(contents, target), "fnloop.save")


def _warn_unless_resumable(state: TrainState) -> None:
    """Warn once if a run with the optimizer would not resume bit for bit. Weights can be saved."""
    if state.optimizer not in _tried:
        _tried.add(state.optimizer)
        try:
            check_resumable(state)
        except CheckpointError as error:
            log.warning("save: %s", error)


class _FullTensors(dict[str, Tensor]):
    """Tensors by name. On the main process, sharded tensors are gathered as they are added.

    The other processes take part in gathering and keep their shards.
    """

    def __init__(self, main: bool) -> None:
        super().__init__()
        self.main = main

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        whole = full(tensor)  # a collective if the tensor is sharded
        super().__setitem__(name, whole if self.main else tensor)


def collect_contents(
    state: TrainState, encode_history: Callable[[History], EncodedHistory] | None = None
) -> Contents:
    """Return the contents of a checkpoint of a state. The tensors are shared with the state.

    With several processes, all of them must call it. Only the main process gets the full contents.

    Args:
        state: the state.
        encode_history: encodes the history, if its older records are in files next to the
            checkpoint.

    Raises:
        CheckpointError: the state contains something that a checkpoint cannot.
    """
    check_not_stale(state)
    state = detached_from_run(state)
    main = state.backend.main
    model, optimizer, slots = _FullTensors(main), _FullTensors(main), _FullTensors(main)
    try:
        facts = {
            "format_version": FORMAT,
            "versions": _versions(),
            "run": state.run_id,
            "position": position_of(state),
            **{name: getattr(state, name) for name in COUNTERS},
            "processes": state.backend.world_size,
            "measured": _measured(state),
            # The key is the old name of events: the format stays.
            "news": sorted(state.events & {UPDATE, PENDING}) if PENDING in state.events else [],
            "model": _encode_model(state, model, slots),
            "optimizer": encode_optimizer(NamedOptimizer.of_state(state), optimizer),
            "slots": _encode_mapping("slots", state.slots, slots),
            **_encode_metrics(state, slots),
            "generators": encode(_generators_by_rank(state), slots, "generators"),
            "extra": _require_plain(_encode_mapping("extra", state.extra, slots), "extra"),
        }
        if encode_history is None:
            history = EncodedHistory(rest=tuple(map(encode_record, state.history)))
        else:
            history = encode_history(state.history)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from error
    facts["blocks"] = list(history.blocks)
    return Contents(model, optimizer, slots, facts, history.rest)


def _versions() -> dict[str, str]:
    return {"fnloop": __version__, "torch": torch.__version__, "python": platform.python_version()}


def position_of(state: TrainState) -> list[int]:
    """Return what orders the checkpoints of a run: updates tried, epochs, batches."""
    return [state.step + state.skipped, state.epoch, state.batch]


def _measured(state: TrainState) -> dict[str, str]:
    """Return the metrics of the record made at this boundary, if any. They rank checkpoints."""
    if RECORD not in state.events:
        return {}
    return {name: repr(value) for name, value in state.history[-1].metrics.items()}


def _encode_model(
    state: TrainState, tensors: dict[str, Tensor], others: dict[str, Tensor]
) -> dict[str, Json]:
    """Return the facts of the model. Tensors of its extra state are added to ``others``."""
    module, extra, pairs = unwrap(state), {}, []
    for spelled, value in module.state_dict().items():
        name = strip_compile_prefix(spelled)
        if isinstance(value, Tensor):
            encode(value, {}, spelled)  # raises if a file cannot hold it
            tensors[name] = as_safetensor(value)
            pairs += [name] if value.dtype is torch.complex128 else []
        else:  # from the module's get_extra_state
            extra[name] = encode(value, others, f"model.{name}")
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    evaluating = [name for name, m in module.named_modules() if not m.training]
    return {
        "class": type(module).__name__,
        "extra_state": extra,
        **({"complex": pairs} if pairs else {}),
        "frozen": list(map(strip_compile_prefix, frozen)),
        "evaluating": list(map(strip_compile_prefix, evaluating)),
    }


def _encode_mapping(part: str, value: object, tensors: dict[str, Tensor]) -> Json:
    """Return a mapping of the state as JSON, and add its tensors to ``tensors``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{part} must be a mapping; it is {describe(value)}")
    try:
        return encode(dict(value), tensors, part)
    except RecursionError:
        raise TypeError(
            f"{part} holds something that contains itself, or is nested too deeply"
        ) from None


def _encode_metrics(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the metrics over all processes, and those of each process ("shares")."""
    merged = {**state.metrics, **engine_of(state).reduce_report(state.metrics)}
    return {
        "metrics": encode(merged, tensors, "metrics"),
        "shares": [
            encode(own, tensors, f"shares.{rank}")
            for rank, own in enumerate(_metrics_by_rank(state))
        ],
    }


def _metrics_by_rank(state: TrainState) -> list[Mapping[str, Metric]]:
    """Return the metrics of each process, so that as many processes resume bit for bit.

    The only process of a run has nothing but the merged metrics, which are saved anyway.
    """
    metrics: Mapping[str, Any] = state.metrics
    own = {name: m.to_cpu() if hasattr(m, "to_cpu") else m for name, m in metrics.items()}
    every = gather_objects(own)
    return every if len(every) > 1 else []


def _generators_by_rank(state: TrainState) -> list[dict[str, object] | None] | None:
    """Return the generators of every process, by rank; None at the beginning of an epoch."""
    every = gather_objects(state.generators and state.generators.to_parts())
    return every if any(every) else None


def _require_plain(encoded: Json, path: str) -> Json:
    """Return encoded data, or raise if it contains an object, which could not be reconstructed."""
    if '"$saved"' in json.dumps(encoded):
        raise TypeError(
            f"{path} holds an object, which could not be reconstructed: "
            "keep plain data, tensors and arrays there"
        )
    return encoded
