"""Save a state: collect everything that a run depends on, and write it as a checkpoint.

The format is described in the module ``format``. Objects that are not plain data are saved as their
parts (see ``serialize``). They are reconstructed when a new object of their kind is available: the
slot of a middleware when its ``init`` has created one, a metric when the next batch brings one.
"""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from fnloop._checkpoint.files import EncodedHistory, write_by_all
from fnloop._checkpoint.format import (
    COLLECTED,
    NEWER_FORMAT,
    PARTS,
    CheckpointError,
    Contents,
    keep_own_share,
)
from fnloop._checkpoint.parts import EVERY_PART, Saving, encode_whole_history, read_parts
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.history import History, metrics_here
from fnloop._core.optimizers import optimizers_in
from fnloop._core.serialize import Json
from fnloop._core.state import TrainState, check_not_stale, detached_from_run
from fnloop._display.checks import folder_path
from fnloop._display.screen import log
from fnloop._step.engine import engine_of
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
    parts = read_parts("save", only)
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
    encode_history = encode_history or encode_whole_history
    saving = Saving(detached_from_run(state), state.run, parts, encode_history)
    try:
        facts = _encode_identity(saving)
        for part in EVERY_PART:
            if part.name in parts:
                facts |= part.save(saving)
        facts |= {"format_version": saving.version, "blocks": list(saving.history.blocks)}
        contents = Contents(saving.groups, facts, saving.history.rest)
        return keep_own_share(contents, state.backend, saving.local)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from error


def _encode_identity(saving: Saving) -> dict[str, Json]:
    """Return what every checkpoint says about itself."""
    state, partial = saving.state, {*saving.parts} != {*PARTS}
    if partial:
        saving.require(NEWER_FORMAT)
    return {
        "format_version": saving.version,
        **({"parts": list(saving.parts)} if partial else {}),
        "versions": _versions(),
        "run": state.run_id,
        "position": position_of(state),
        "stop": state.stop,
        "processes": state.backend.data_size,
        "measured": _measured(state),
        **({"phase": state.phases[-1].name} if state.phases else {}),
        **({"exact": True} if state.backend.exact else {}),
    }


def _versions() -> dict[str, str]:
    return {"fnloop": __version__, "torch": torch.__version__, "python": platform.python_version()}


def position_of(state: TrainState) -> list[int]:
    """Return what orders the checkpoints of a run: updates tried, epochs, batches."""
    return [state.step + state.skipped, state.epoch, state.batch]


def _measured(state: TrainState) -> dict[str, str]:
    """Return the metrics that were recorded at this boundary. They rank checkpoints."""
    return {name: repr(value) for name, value in metrics_here(state).items()}
