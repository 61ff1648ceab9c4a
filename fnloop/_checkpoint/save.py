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
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend.collectives import gather_objects
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._checkpoint.files import EncodedHistory, encode_record, write_by_all
from fnloop._checkpoint.format import (
    COLLECTED,
    COUNTERS,
    FORMAT,
    NEWER_FORMAT,
    PARTS,
    TRAINED,
    TRAINING,
    TRAINING_FORMAT,
    CheckpointError,
    Contents,
    keep_own_share,
)
from fnloop._checkpoint.optimizer import merge_processes
from fnloop._checkpoint.parts import (
    encode_averages,
    encode_positions,
    encode_targets,
    parts_to_save,
    without_averages,
)
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.history import History, encode_phases, metrics_here
from fnloop._core.metrics import sent
from fnloop._core.optimizers import optimizers_in
from fnloop._core.runs import encode_left, encode_stop
from fnloop._core.serialize import Json, as_safetensor, encode
from fnloop._core.state import TrainState, check_not_stale, detached_from_run, ownership_of, unwrap
from fnloop._core.types import Metric
from fnloop._display.checks import describe, folder_path
from fnloop._display.screen import log
from fnloop._step.engine import engine_of
from fnloop._step.update import evaluation_weights
from fnloop._version import __version__

_tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def save(
    state: TrainState, path: str | os.PathLike[str], *, only: Sequence[str] | None = None
) -> Path:
    """Write a checkpoint: a folder that is either complete or absent.

    It is written to a temporary folder, flushed, and renamed. It has tensors in safetensors files
    (``model``, ``optimizer`` by parameter name, ``slots``), ``state.json``, and a manifest with
    checksums. There is no pickle in it, so loading it cannot execute code. Besides the module's
    state and the optimizer, it holds which parameters are frozen and which submodules are in
    evaluation mode, slots, running metrics, history, counters, generators, and ``state.extra``, for
    your own plain data. A slot may be plain data, tensors, an attrs record, or an object with a
    ``state_dict``. The records of a long history are written once, in the folder ``.records``
    beside the checkpoints.

    With several processes, all of them must call it, and the main process writes. If the model is
    sharded over them (``fully_shard``), or each process keeps the optimizer's state of its own
    parameters (ZeRO-1, distributed Muons), each process writes its own part.

    ``model.safetensors`` has the weights that an evaluation uses. Of a schedule-free optimizer
    those of training are others, which are in ``training.safetensors``. An average of the weights
    has its own file, such as ``ema.safetensors``, which loads into the plain module too. Of a
    sharded model, ``index.json`` says for each tensor which parts to concatenate along which
    dimension.

    Args:
        state: the newest state; it may be in the middle of an epoch.
        path: the folder to create, on a disk that all processes see; ``~`` is expanded. An existing
            checkpoint is replaced. Anything else that exists there is not touched.
        only: the parts to save, as ``restore`` names them; all of them by default. ``("model",)``
            is enough for evaluation and fine-tuning. ``("trained",)`` are the parameters that
            require gradients, without buffers: a few kilobytes for a large model with adapters. A
            run cannot be resumed from such a partial checkpoint.

    Returns:
        The absolute path.

    Raises:
        StaleStateError: the state has been advanced.
        CheckpointError: something in the state cannot be saved, or the path exists and is not a
            checkpoint.
        TypeError, ValueError: it is not a path, is empty, or is an address such as ``s3://...``; or
            ``only`` names something else.
        OSError: the disk is full, or another fault of the disk; what was there before is still
            there.
        RuntimeError: the processes have diverged: their weights differ. Nothing is saved.

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
    parts = parts_to_save("save", only)
    if "optimizer" in parts:
        _warn_unless_resumable(state)
    contents = collect_contents(state, parts=parts)
    return write_by_all(contents, target, "fnloop.save")


def _warn_unless_resumable(state: TrainState) -> None:
    """Warn once if a run with the optimizers would not resume bit for bit. Weights can be saved."""
    optimizers = optimizers_in(state.optimizer).values()
    if not all(optimizer in _tried for optimizer in optimizers):
        _tried.update(optimizers)
        try:
            check_resumable(state)
        except CheckpointError as error:
            log.warning("save: %s", error)


def collect_contents(
    state: TrainState,
    encode_history: Callable[[History], EncodedHistory] | None = None,
    parts: Sequence[str] = PARTS,
) -> Contents:
    """Return the contents of a checkpoint of a state. The tensors are shared with the state.

    With several processes, all of them must call it. Each gets what it writes: the main process all
    of it, or each its part of tensors that are split over processes.

    Args:
        state: the state.
        encode_history: encodes the history, if its older records are in files next to the
            checkpoint.
        parts: the parts of the state to collect.

    Raises:
        CheckpointError: the state contains something that a checkpoint cannot.
        RuntimeError: the processes have different weights.
    """
    check_not_stale(state)
    engine_of(state).check_alike(state, COLLECTED)
    run, state = state.run, detached_from_run(state)
    model: dict[str, Tensor] = {}
    training: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    slots: dict[str, Tensor] = {}
    local: Mapping[str, bool] = {}
    averages: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        facts = _encode_identity(state, parts)
        if "counters" in parts:
            facts |= _encode_counters(state, slots) | encode_positions(state, slots)
            facts |= {} if run is None else {"targets": encode_targets(run)}
            facts["seconds"] = ownership_of(state).seconds
        if "model" in parts or TRAINED in parts:
            facts |= _encode_weights(state, parts, model, training, slots)
        if "optimizer" in parts:
            facts["optimizer"], local = merge_processes(state, optimizer)
        if "slots" in parts:
            facts["slots"] = _encode_mapping("slots", without_averages(state.slots), slots)
            if averaged := encode_averages(state, averages.__getitem__):
                version = max(NEWER_FORMAT, facts["format_version"])
                facts |= {"averages": averaged, "format_version": version}
        if "metrics" in parts:
            facts |= _encode_metrics(state, slots)
        if "extra" in parts:
            extra = _encode_mapping("extra", state.extra, slots)
            facts["extra"] = _require_plain(extra, "extra")
        if "history" not in parts:
            history = EncodedHistory()
        elif encode_history is None:
            history = EncodedHistory(rest=tuple(map(encode_record, state.history)))
        else:
            history = encode_history(state.history)
        facts["blocks"] = list(history.blocks)
        groups = {**averages, **({TRAINING: training} if training else {})}
        contents = Contents(model, optimizer, slots, facts, history.rest, groups)
        return keep_own_share(contents, state.backend, local)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from error


def _encode_identity(state: TrainState, parts: Sequence[str]) -> dict[str, Json]:
    """Return what every checkpoint says about itself."""
    partial = {*parts} != {*PARTS}
    return {
        "format_version": NEWER_FORMAT if partial or state.updates or state.phases else FORMAT,
        **({"parts": list(parts)} if partial else {}),
        "versions": _versions(),
        "run": state.run_id,
        "position": position_of(state),
        "stop": state.stop,
        "processes": state.backend.data_size,
        "measured": _measured(state),
        **({"phase": state.phases[-1].name} if state.phases else {}),
        **({"exact": True} if state.backend.exact else {}),
    }


def _encode_counters(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the position of the run, with the generators at this position."""
    return {
        **{name: getattr(state, name) for name in COUNTERS},
        **({"updates": dict(state.updates)} if state.updates else {}),
        **({"phases": encode_phases(state.phases)} if state.phases else {}),
        **({"ends": state.ends} if state.ends else {}),
        **encode_stop(state.stop),
        **({"left": encode_left(state.left)} if state.left else {}),
        # The key is the old name of events. Only what is left of a boundary needs them.
        "news": sorted(state.events) if state.left else [],
        "generators": encode(_generators_by_rank(state), tensors, "generators"),
    }


def _versions() -> dict[str, str]:
    return {"fnloop": __version__, "torch": torch.__version__, "python": platform.python_version()}


def position_of(state: TrainState) -> list[int]:
    """Return what orders the checkpoints of a run: updates tried, epochs, batches."""
    return [state.step + state.skipped, state.epoch, state.batch]


def _measured(state: TrainState) -> dict[str, str]:
    """Return the metrics that were recorded at this boundary. They rank checkpoints."""
    return {name: repr(value) for name, value in metrics_here(state).items()}


def _encode_weights(
    state: TrainState,
    parts: Sequence[str],
    model: dict[str, Tensor],
    training: dict[str, Tensor],
    others: dict[str, Tensor],
) -> dict[str, Json]:
    """Return the facts of the model, with the weights that an evaluation uses.

    With the optimizers, those of training are added to ``training`` if they may be others.
    """
    module, trained = unwrap(state), TRAINED in parts
    with evaluation_weights(state) as others_there:
        facts: dict[str, Json] = {"model": _encode_model(state, model, others, trained)}
        if not others_there:
            return facts
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        names = [  # also of what the module computes from its weights
            name
            for spelled, value in module.state_dict(keep_vars=True).items()
            if (name := strip_compile_prefix(spelled)) in model
            and (id(value) in others_there or id(value) not in own)
        ]
        model |= {name: model[name].clone() for name in names}
    if "optimizer" not in parts:
        return facts
    found: dict[str, Tensor] = {}
    _encode_model(state, found, {}, trained)
    training |= {name: found[name] for name in names}
    return facts | {TRAINING: True, "format_version": TRAINING_FORMAT}


def _encode_model(
    state: TrainState, tensors: dict[str, Tensor], others: dict[str, Tensor], trained: bool
) -> dict[str, Json]:
    """Return the facts of the model. Tensors of its extra state are added to ``others``.

    With ``trained``, only the parameters that require gradients are saved.
    """
    module, extra, pairs = unwrap(state), {}, []
    learning = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    if trained and not learning:
        raise ValueError('only=("trained",) saves the parameters that require gradients; none does')
    for spelled, value in module.state_dict().items():
        if trained and spelled not in learning:
            continue
        name = strip_compile_prefix(spelled)
        if isinstance(value, Tensor):
            encode(value, {}, spelled)  # raises if a file cannot hold it
            tensors[name] = as_safetensor(value)
            pairs += [name] if value.dtype is torch.complex128 else []
        else:  # from the module's get_extra_state
            extra[name] = encode(value, others, f"model.{name}")
    facts = {
        "class": type(module).__name__,
        "extra_state": extra,
        **({"complex": pairs} if pairs else {}),
    }
    if trained:
        return facts
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    evaluating = [name for name, m in module.named_modules() if not m.training]
    return {
        **facts,
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
    merged = {**state.metrics}
    if not state.backend.exact:  # then every process has those of all
        merged |= engine_of(state).reduce_report(state.metrics)
    every = _metrics_by_rank(state)
    names = {name for own, _ in every for name in own}
    return {
        "metrics": encode(merged, tensors, "metrics"),
        "shares": [
            encode(share, tensors, f"shares.{rank}") for rank, (_, share) in enumerate(every)
        ],
        **({"own": sorted(names)} if every else {}),
    }


def _metrics_by_rank(state: TrainState) -> list[tuple[list[str], Mapping[str, Metric]]]:
    """Return the metrics of each process, so that as many processes resume bit for bit.

    Each comes with the names of those that are of the process's own share of the data. The only
    process of a run has nothing but the merged metrics, which are saved anyway.
    """
    metrics: Mapping[str, Any] = state.metrics
    own = sent(metrics)
    if state.backend.exact:
        return []
    every = gather_objects((engine_of(state).own_names(metrics), own), COLLECTED)
    return every if len(every) > 1 else []


def _generators_by_rank(state: TrainState) -> list[dict[str, object] | None] | None:
    """Return the generators of every process, by rank; None at the beginning of an epoch."""
    every = gather_objects(state.generators and state.generators.to_parts(), COLLECTED)
    return every if any(every) else None


def _require_plain(encoded: Json, path: str) -> Json:
    """Return encoded data, or raise if it contains an object, which could not be reconstructed."""
    if '"$saved"' in json.dumps(encoded):
        raise TypeError(
            f"{path} holds an object, which could not be reconstructed: "
            "keep plain data, tensors and arrays there"
        )
    return encoded
