"""Checkpoints: what is in one, and how a state comes back from it.

Everything that a run depends on goes into four files (see ``_files``): tensors by name, and facts that a person can read.
Restoring checks and decodes all of it before anything is changed. What isn't plain data comes back through a new thing of its
kind (see ``_encode``): a middleware's slot when its ``init`` has made one, a metric when the next batch has.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend import Backend
from fnloop._checks import described, folder_path, metric_name
from fnloop._checks import listed as _first
from fnloop._encode import Saved, as_safetensor, decode, encode, from_safetensor
from fnloop._files import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    Contents,
    NewerFormatError,
    existing,
    manifest_of,
    read_files,
    verify,
    write,
)
from fnloop._folders import candidates, claimed, may_be_checkpoint, ranking, run_of
from fnloop._history import History, Record
from fnloop._history_blocks import Encoded, line_of
from fnloop._joint import everywhere
from fnloop._metrics import MONOIDS, Mean, wide
from fnloop._monitor import better
from fnloop._optimizer_state import bare_name as _bare
from fnloop._optimizer_state import optimizer_facts, optimizer_loader, owned_by
from fnloop._processes import any_process, gather_objects, main_only
from fnloop._resumable import check_resumable
from fnloop._rng import SEED_BITS, HostGenerators
from fnloop._sharded import full, like_sharded
from fnloop._state import PENDING, RECORD, UPDATE, TrainState, advance_to, check_fresh, suspended, unwrap

__all__ = ["CheckpointError", "best", "contents", "latest", "position_of", "restore", "resume", "save"]

PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")
_log = logging.getLogger("fnloop")


# --- what is in one


class _Whole(dict):
    """Tensors by name: whole on the main process; on the others, who only help to gather them, what they hold of them."""

    def __init__(self, main: bool) -> None:
        super().__init__()
        self.main = main

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        whole = full(tensor)  # a collective, where it is sharded
        super().__setitem__(name, whole if self.main else tensor)


def contents(state: TrainState, encode_history: Callable[[History], Encoded] | None = None) -> Contents:
    """Return what a checkpoint of the state holds. Its tensors are those of the state: copy them to keep them.

    With several processes every one has to call it, and the main one has all of it.

    Args:
        state: the state.
        encode_history: what encodes the history, if its older records are in files beside the checkpoint.

    Raises:
        CheckpointError: there is something in it that a checkpoint can't hold.
    """
    check_fresh(state)
    state = suspended(state)
    main = state.backend.main
    model, optimizer, slots = _Whole(main), _Whole(main), _Whole(main)
    try:
        facts = {
            "format_version": FORMAT,
            "versions": _versions(),
            "run": state.run_id,
            "position": position_of(state),
            **{name: getattr(state, name) for name in COUNTERS},
            "processes": state.backend.world_size,
            "measured": _measured(state),
            "news": sorted(state.news & {UPDATE, PENDING}) if PENDING in state.news else [],
            "model": _model_facts(state, model, slots),
            "optimizer": optimizer_facts(owned_by(state), optimizer),
            "slots": _encoded("slots", state.slots, slots),
            "metrics": encode({**state.metrics, **everywhere(state, state.metrics)}, slots, "metrics"),
            "shares": [encode(own, slots, f"shares.{rank}") for rank, own in enumerate(_shares(state))],
            "generators": encode(_generators(state), slots, "generators"),
            "extra": _plain(_encoded("extra", state.extra, slots), "extra"),
        }
        history = Encoded(rest=tuple(map(line_of, state.history))) if encode_history is None else encode_history(state.history)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state can't be saved: {error}") from error
    return Contents(model, optimizer, slots, {**facts, "blocks": list(history.blocks)}, history.rest)


def _shares(state: TrainState) -> list[dict[str, Any]]:
    """Return the metrics of each process by itself: as many go on with them to the bit, which a sum of all would not give."""
    if state.backend.world_size == 1:
        return []
    metrics: Mapping[str, Any] = state.metrics
    return gather_objects({name: m.on_host() if hasattr(m, "on_host") else m for name, m in metrics.items()})


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
        raise TypeError(f"{part} holds something that contains itself, or is nested too deeply") from None


def _plain(encoded: Any, path: str) -> Any:
    """Return what was encoded, or raise if there is something in it that nobody would make again."""
    if '"$saved"' in json.dumps(encoded):
        raise TypeError(f"{path} holds an object, which nobody would make again: keep plain data, tensors and arrays there")
    return encoded


def position_of(state: TrainState) -> list[int]:
    """Return what orders checkpoints: updates tried, epochs, batches."""
    return [state.step + state.skipped, state.epoch, state.batch]


def _measured(state: TrainState) -> dict[str, str]:
    """Return the metrics of the record that was made right here, if there is one: what checkpoints are ranked by."""
    if RECORD not in state.news:
        return {}
    return {name: repr(value) for name, value in state.history[-1].metrics.items()}


def _versions() -> dict[str, str]:
    import platform

    from fnloop import __version__

    return {"fnloop": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _model_facts(state: TrainState, tensors: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Any]:
    module, extra, pairs = unwrap(state), {}, []
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            encode(value, {}, name)  # checks that it can be held
            tensors[_bare(name)] = as_safetensor(value)
            pairs += [_bare(name)] if value.dtype is torch.complex128 else []
        else:
            extra[_bare(name)] = encode(value, others, f"model.{_bare(name)}")  # a module's get_extra_state
    return {
        "class": type(module).__name__,
        "extra_state": extra,
        **({"complex": pairs} if pairs else {}),
        "frozen": [_bare(name) for name, p in module.named_parameters() if not p.requires_grad],
        "evaluating": [_bare(name) for name, m in module.named_modules() if not m.training],
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
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(toy(w=3.0), f"{folder}/a")
        ...     restore(path, toy()).model.w.item()
        3.0
    """
    check_fresh(state, "save")
    target = folder_path("save", "path", path)
    _warn_unless_resumable(state)
    what = contents(state)
    return main_only(lambda: write(what, target), "fnloop.save")


_tried: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers


def _warn_unless_resumable(state: TrainState) -> None:
    """Say so, once, if a run with the optimizer would not be resumed bit for bit. The weights can be saved all the same."""
    if state.optimizer not in _tried:
        _tried.add(state.optimizer)
        try:
            check_resumable(state)
        except CheckpointError as error:
            _log.warning("save: %s", error)


# --- restoring


def restore(
    path: str | os.PathLike[str], state: TrainState, *, only: Sequence[str] | None = None, strict: bool = True
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
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     restore(save(toy(w=3.0), f"{folder}/a"), toy(lr=0.5), only=("model",)).model.w.item()
        3.0
    """
    check_fresh(state, "restore")
    if only is not None and (isinstance(only, str) or not _are_parts(only)):
        raise ValueError(f"restore expects only= as a tuple of {', '.join(PARTS)}; got {described(only)}")
    parts = PARTS if only is None else tuple(only)
    if not isinstance(strict, bool):
        raise TypeError(f"restore expects strict as True or False; got {described(strict)}")
    if path is None:
        raise TypeError("restore expects a path; got None, which is what latest(folder) returns where there is no checkpoint")
    source = folder_path("restore", "path", path)
    _check_shared(source, state)
    return _restored(read_files(source, history="history" in parts), state, parts, strict, source)


def _are_parts(only: Any) -> bool:
    try:
        return all(isinstance(part, str) and part in PARTS for part in only)
    except TypeError:
        return False


def _check_shared(path: Path, state: TrainState) -> None:
    """Raise if some processes see a checkpoint and this one does not."""
    there = existing(path).exists()
    if state.backend.world_size > 1 and any_process(there) and not there:
        raise CheckpointError(
            f"process {state.backend.rank} does not see {path}, and another one does: with several machines, checkpoints "
            "have to be on a disk that all of them share"
        )


def _restored(read: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path) -> TrainState:
    try:
        # Everything is checked and decoded before anything is changed.
        fields = _decoded(read, state, parts, run_of(path, read.facts))
        loads = []
        if "model" in parts:
            loads.append(_match_model(read, state, strict, path, flags="counters" in parts))
        if "optimizer" in parts:
            shapes = {name: tensor.shape for name, tensor in _model_tensors(read).items()}
            loads.append(optimizer_loader(owned_by(state), read.facts["optimizer"], read.optimizer, shapes, strict, path))
        kept = {k: v.clone() for k, v in unwrap(state).state_dict().items() if isinstance(v, Tensor)} if loads else {}
        try:
            for load in loads:
                load()
        except BaseException:
            unwrap(state).load_state_dict(kept, strict=False)
            raise
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is that somebody has written there
        raise CheckpointError(f"{path} can't be restored: {type(error).__name__}: {error}") from error
    if "batch" in fields:
        state._lease.saved_on = read.facts.get("processes")
    return advance_to(attrs.evolve(state, **fields))


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
            fields[part] = {k: _metric(v, device) for k, v in value.items()} if part == "metrics" else value
    history = History(_record(decode(row, slots)) for row in facts["history"])
    if "history" in parts:
        fields["history"] = history
    counters = {name: facts[name] for name in COUNTERS}
    for name, value in counters.items():
        least, most = (0, SEED_BITS) if name == "seed" else (0, 1 << 62)
        right = value is None or isinstance(value, str) if name == "stop" else type(value) is int and least <= value <= most
        if not right:
            raise TypeError(f"{name} is {value!r:.60}")
    counters["run_id"] = run
    generators = [own and HostGenerators.from_parts(own).checked() for own in decode(facts["generators"], slots) or ()]
    if "counters" in parts:
        fields.update(counters, generators=_own(generators, state.backend))
        if facts.get("news"):
            fields["news"] = frozenset(facts["news"])
    shares = [{k: _metric(v, device) for k, v in decode(own, slots).items()} for own in facts.get("shares", ())]
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
    if not isinstance(value, Saved):
        raise TypeError(f"a metric is {value!r}")
    if value.kind not in MONOIDS:
        return value
    if not all(_is_scalar(part) for part in value.parts.values()):
        raise TypeError(f"a {value.kind} holds {described(dict(value.parts))}")
    metric = MONOIDS[value.kind](**value.parts)
    if isinstance(metric, Mean) and not isinstance(metric.total, Tensor):  # several processes met on the host
        metric = Mean(wide(torch.tensor(metric.total, dtype=torch.float64, device=device)), metric.weight)
    return metric


def _is_scalar(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.ndim == 0) or (isinstance(value, int | float) and not isinstance(value, bool))


def _match_model(read: Contents, state: TrainState, strict: bool, path: Path, flags: bool) -> Callable[[], None]:
    module, facts = unwrap(state), read.facts["model"]
    spelled = {_bare(k): k for k in module.state_dict()}
    mine = {_bare(k): v for k, v in module.state_dict().items()}
    saved = {**_model_tensors(read), **{k: decode(v, read.slots) for k, v in facts["extra_state"].items()}}
    missing, unexpected = [k for k in mine if k not in saved], [k for k in saved if k not in mine]
    both = [k for k in mine if k in saved and isinstance(saved[k], Tensor) and isinstance(mine[k], Tensor)]
    differ = [k for k in both if saved[k].shape != mine[k].shape]
    shapes = [f"{k}: {tuple(saved[k].shape)} saved, {tuple(mine[k].shape)} here" for k in differ]
    dtypes = [f"{k}: {saved[k].dtype} saved, {mine[k].dtype} here" for k in both if saved[k].dtype != mine[k].dtype]
    faults = [("missing in the checkpoint", missing), ("not in the model", unexpected), ("of another shape", shapes)]
    faults += [("of another dtype", dtypes)] if flags else []  # the weights alone may be cast
    found = "; ".join(f"{what}: {_first(which)}" for what, which in faults if which)
    if found and strict:
        raise CheckpointError(
            f"{path} is of another model ({facts['class']}). {found}. Make the same model, or "
            "take what matches: "
            f"restore(path, state, only=('model',), strict=False)"
        )
    if found:
        _log.warning("restore: left as it was: %s", found)
    fitting = {spelled[k]: _spread(v, mine[k]) for k, v in saved.items() if k in mine and k not in differ}

    def load() -> None:
        reply = module.load_state_dict(fitting, strict=False)
        if strict and reply.missing_keys:
            raise CheckpointError(f"{path}: the model took no value for {_first(reply.missing_keys)}: its hooks rename keys")
        if flags:
            for name, p in module.named_parameters():
                p.requires_grad_(_bare(name) not in facts["frozen"])
            for name, submodule in module.named_modules():
                submodule.training = _bare(name) not in facts["evaluating"]

    return load


def _model_tensors(read: Contents) -> dict[str, Tensor]:
    """Return the tensors of the model that were saved, those of complex128 as such."""
    pairs = read.facts["model"].get("complex", ())
    return {name: from_safetensor(tensor) if name in pairs else tensor for name, tensor in read.model.items()}


def _spread(value: Any, template: Any) -> Any:
    return like_sharded(value, template) if isinstance(value, Tensor) and isinstance(template, Tensor) else value


# --- folders of them


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint in a folder.

    Damaged ones are passed over with a warning that names the file and the fault.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.

    Returns:
        Its path, or None if there is none.

    Raises:
        TypeError, ValueError: it is not a path.
        CheckpointError: the newest was written by a newer fnloop.
        OSError: a file can't be read, for another reason than that it is not there.

    Example:
        >>> latest("no/such/folder") is None
        True
    """
    return next((path for path, _ in _whole(candidates(folder_path("latest", "folder", folder), links=True))), None)


def _whole(paths: Iterable[Path], check: Callable[[Path], Any] = verify, faults: list[str] | None = None) -> Iterator[Any]:
    """Yield the checkpoints that are valid, each with what its check found. Warn of the others, and note their faults."""
    for path in paths:
        try:
            found = check(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if faults is not None:
                faults.append(str(error))
            warnings.warn(f"passed over: {error}", stacklevel=4)
        else:
            yield path, found


def best(folder: str | os.PathLike[str], key: str | None = None, mode: str | None = None) -> Path | None:
    """Return the valid checkpoint with the best value of a metric, of the run that wrote the newest one.

    Args:
        folder: what the hook ``checkpoint(folder, best=...)`` writes to.
        key: the metric; the hook's by default.
        mode: "min" or "max"; the hook's by default.

    Returns:
        Its path, or None if no checkpoint has a value that isn't NaN. Of equals, the oldest.

    Raises:
        ValueError: no metric is given, and the checkpoints name none; or there is no such mode.
        TypeError: an argument is not what it should be.
        CheckpointError, OSError: as :func:`latest`.

    Example:
        >>> best("no/such/folder", "valid/loss") is None
        True
    """
    where = folder_path("best", "folder", folder)
    if key is not None:
        metric_name("best", "key", key)
    if mode is not None:
        better(0.0, 0.0, mode)  # checks it
    ranked = [(path, m) for path in reversed(candidates(where, links=True)) if (m := manifest_of(path)) is not None]
    if not ranked:
        return None
    run = run_of(*ranked[-1])
    ranked = [(path, m) for path, m in ranked if run_of(path, m) == run]
    key = key or next((m["best"] for _, m in reversed(ranked) if m.get("best")), None)
    mode = mode or next((str(m["mode"]) for _, m in reversed(ranked) if m.get("mode")), "min")
    if key is None:
        raise ValueError(f'the checkpoints in {folder} name no metric: write best(folder, "valid/loss")')
    return next((path for path, _ in _whole(path for path, _ in ranking(ranked, key, mode))), None)


def _given(folder: Path) -> Path | None:
    """Return where a checkpoint is if that is what was given, and not a folder of them."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: resume expects a folder of checkpoints")
    return folder if may_be_checkpoint(existing(folder)) or (existing(folder) / MANIFEST).exists() else None


def resume(folder: str | os.PathLike[str], state: TrainState) -> TrainState:
    """Return the state of the newest valid checkpoint in a folder, or the state as it is if there is none.

    One line makes a training script restartable: ``state = resume("runs/a", TrainState.create(model, optimizer))``.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.
        state: a new state of the same model and optimizer.

    Returns:
        The state to continue with.

    Raises:
        CheckpointError: the newest valid checkpoint is of another model or optimizer, or there are checkpoints and all of
            them are damaged, or the newest was written by a newer fnloop.
        TypeError, ValueError: it is not a path.
        OSError: a file can't be read, for another reason than that it is not there.

    Example:
        >>> from fnloop.testing import toy
        >>> resume("no/such/folder", toy()).step
        0
    """
    check_fresh(state, "resume")
    where = folder_path("resume", "folder", folder)
    if state.backend.world_size > 1:  # the main process decides: others may see others
        path, _, run = main_only(lambda: _newest(where, verify), "fnloop.resume")
        if path is not None:
            return restore(path, state)
    else:
        path, read, run = _newest(where, read_files)
        if path is not None:
            return _restored(read, state, PARTS, True, path)
    return state if run is None else attrs.evolve(state, run_id=run)


def _newest(folder: Path, check: Callable[[Path], Any]) -> tuple[Path | None, Any, str | None]:
    """Return the newest valid checkpoint, with what its check found; or, if there is none, the run that began in the folder.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    if (given := _given(folder)) is not None:
        return given, check(existing(given)), None
    faults: list[str] = []
    for path, found in _whole(candidates(folder, links=True), check, faults):
        return path, found, None
    if faults:
        raise CheckpointError(
            f"{folder} has {len(faults)} checkpoint{'s' * (len(faults) > 1)}, and none is whole: {'; '.join(faults[:3])}. "
            "To begin a new run, give it another folder"
        )
    return None, None, claimed(folder)
