"""Checkpoints: what is in one, and how a state comes back from it.

Everything that a run depends on goes into four files (see ``_files``): tensors by name, and facts that a person can read.
Restoring checks and decodes all of it before anything is changed. What isn't plain data comes back through a new thing of its
kind (see ``_encode``): a middleware's slot when its ``init`` has made one, a metric when the next batch has.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnloop._backend.collectives import gather_objects
from fnloop._backend.fsdp import full
from fnloop._backend.public import on_main_process
from fnloop._checkpoint.files import write
from fnloop._checkpoint.format import FORMAT, CheckpointError, Contents
from fnloop._checkpoint.history_blocks import Encoded, line_of
from fnloop._checkpoint.optimizer import bare_name, optimizer_facts, owned_by
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.history import History
from fnloop._core.serialize import as_safetensor, encode
from fnloop._core.snapshot import unwrap
from fnloop._core.state import (
    PENDING,
    RECORD,
    UPDATE,
    TrainState,
    check_not_stale,
    detached_from_run,
)
from fnloop._display.checks import described, folder_path
from fnloop._display.log import log
from fnloop._step.engine import engine_of

__all__ = ["COUNTERS", "PARTS", "contents", "position_of", "save"]

PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")


# --- what is in one


class _FullTensors(dict):
    """Tensors by name: whole on the main process; on the others, who only help to gather them, what they hold of them."""

    def __init__(self, main: bool) -> None:
        super().__init__()
        self.main = main

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        whole = full(tensor)  # a collective, where it is sharded
        super().__setitem__(name, whole if self.main else tensor)


def contents(
    state: TrainState, encode_history: Callable[[History], Encoded] | None = None
) -> Contents:
    """Return what a checkpoint of the state holds. Its tensors are those of the state: copy them to keep them.

    With several processes every one has to call it, and the main one has all of it.

    Args:
        state: the state.
        encode_history: what encodes the history, if its older records are in files beside the checkpoint.

    Raises:
        CheckpointError: there is something in it that a checkpoint can't hold.
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
            "news": sorted(state.events & {UPDATE, PENDING}) if PENDING in state.events else [],
            "model": _model_facts(state, model, slots),
            "optimizer": optimizer_facts(owned_by(state), optimizer),
            "slots": _encoded("slots", state.slots, slots),
            "metrics": encode(
                {**state.metrics, **engine_of(state).reduce_report(state.metrics)}, slots, "metrics"
            ),
            "shares": [
                encode(own, slots, f"shares.{rank}")
                for rank, own in enumerate(_per_rank_metrics(state))
            ],
            "generators": encode(_generators(state), slots, "generators"),
            "extra": _plain(_encoded("extra", state.extra, slots), "extra"),
        }
        history = (
            Encoded(rest=tuple(map(line_of, state.history)))
            if encode_history is None
            else encode_history(state.history)
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state can't be saved: {error}") from error
    return Contents(
        model, optimizer, slots, {**facts, "blocks": list(history.blocks)}, history.rest
    )


def _per_rank_metrics(state: TrainState) -> list[dict[str, Any]]:
    """Return the metrics of each process by itself: as many go on with them to the bit, which a sum of all would not give."""
    if state.backend.world_size == 1:
        return []
    metrics: Mapping[str, Any] = state.metrics
    return gather_objects(
        {name: m.to_cpu() if hasattr(m, "to_cpu") else m for name, m in metrics.items()}
    )


def _generators(state: TrainState) -> list[Any] | None:
    """Return the generators of every process, by rank; None at the beginning of an epoch."""
    own = state.generators and state.generators.to_parts()
    every = gather_objects(own) if state.backend.world_size > 1 else [own]
    return every if any(every) else None


def _encoded(part: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a mapping of the state in JSON, its tensors put into ``tensors``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{part} has to be a mapping; it is {described(value)}")
    try:
        return encode(dict(value), tensors, part)
    except RecursionError:
        raise TypeError(
            f"{part} holds something that contains itself, or is nested too deeply"
        ) from None


def _plain(encoded: Any, path: str) -> Any:
    """Return what was encoded, or raise if there is something in it that nobody would make again."""
    if '"$saved"' in json.dumps(encoded):
        raise TypeError(
            f"{path} holds an object, which nobody would make again: keep plain data, tensors and arrays there"
        )
    return encoded


def position_of(state: TrainState) -> list[int]:
    """Return what orders checkpoints: updates tried, epochs, batches."""
    return [state.step + state.skipped, state.epoch, state.batch]


def _measured(state: TrainState) -> dict[str, str]:
    """Return the metrics of the record that was made right here, if there is one: what checkpoints are ranked by."""
    if RECORD not in state.events:
        return {}
    return {name: repr(value) for name, value in state.history[-1].metrics.items()}


def _versions() -> dict[str, str]:
    import platform

    from fnloop import __version__

    return {"fnloop": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _model_facts(
    state: TrainState, tensors: dict[str, Tensor], others: dict[str, Tensor]
) -> dict[str, Any]:
    module, extra, pairs = unwrap(state), {}, []
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            encode(value, {}, name)  # checks that it can be held
            tensors[bare_name(name)] = as_safetensor(value)
            pairs += [bare_name(name)] if value.dtype is torch.complex128 else []
        else:
            extra[bare_name(name)] = encode(
                value, others, f"model.{bare_name(name)}"
            )  # a module's get_extra_state
    return {
        "class": type(module).__name__,
        "extra_state": extra,
        **({"complex": pairs} if pairs else {}),
        "frozen": [bare_name(name) for name, p in module.named_parameters() if not p.requires_grad],
        "evaluating": [bare_name(name) for name, m in module.named_modules() if not m.training],
    }


def save(state: TrainState, path: str | os.PathLike[str]) -> Path:
    """Write a checkpoint: a folder, whole or not there. With several processes all have to call it, and the main one writes.

    Args:
        state: the newest state; it may be in the middle of an epoch.
        path: the folder to be, on a disk of this machine; ``~`` is expanded. A checkpoint that is there is replaced. Anything
            else that is there is not touched.

    Returns:
        The absolute path.

    Raises:
        StaleStateError: the state has been advanced.
        CheckpointError: something in the state can't be saved, or there is something else at the path.
        TypeError, ValueError: it is not a path, is empty, or is an address such as ``s3://...``.
        OSError: the disk is full, or the like; what was there before is still there.

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
    what = contents(state)
    return on_main_process(lambda: write(what, target), "fnloop.save")


_tried: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers


def _warn_unless_resumable(state: TrainState) -> None:
    """Say so, once, if a run with the optimizer would not be resumed bit for bit. The weights can be saved all the same."""
    if state.optimizer not in _tried:
        _tried.add(state.optimizer)
        try:
            check_resumable(state)
        except CheckpointError as error:
            log.warning("save: %s", error)
