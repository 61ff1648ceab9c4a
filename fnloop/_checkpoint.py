"""Checkpoints: a folder of tensors and readable facts, whole or not there at all.

    model.safetensors       the module's state_dict; loads into the plain module anywhere, without fnloop
    optimizer.safetensors   the optimizer's state, by parameter name
    slots.safetensors       what middleware keep, running metrics, generators
    state.json              counters, history, hyper-parameters, and where the tensors belong
    manifest.json           sizes and SHA-256 of the others; written last

It is written beside its place, flushed to the disk and renamed, so a folder that has a good manifest is a whole
checkpoint, whenever the process was killed. Nothing is pickled: restoring one can run no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fnloop._encode import Saved, decode, encode
from fnloop._history import History, Record, better
from fnloop._metrics import MONOIDS
from fnloop._rng import HostGenerators
from fnloop._state import RECORD, TrainState, advance_to, check_fresh, suspended, unwrap

__all__ = ["CheckpointError", "Contents", "best", "contents", "latest", "prune", "restore", "resume", "save", "write"]

FORMAT = 1
TENSORS = ("model", "optimizer", "slots")
FILES = (*(f"{name}.safetensors" for name in TENSORS), "state.json")
PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")
_log = logging.getLogger("fnloop")
_being_written: set[Path] = set()  # by this process, in whatever thread


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, newer than this fnloop, or of another model or optimizer."""


# --- what is in one


@attrs.frozen(eq=False)
class Contents:
    """What a checkpoint of a state holds: three groups of tensors, and facts in JSON.

    Args:
        model, optimizer, slots: name to tensor.
        facts: what goes into ``state.json``.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory, into the buffers of an earlier one where they fit."""

        def copy_of(name: str) -> dict[str, Tensor]:
            old: Mapping[str, Tensor] = getattr(buffers, name) if buffers else {}
            return {k: _copied(v, old.get(k)) for k, v in getattr(self, name).items()}

        return attrs.evolve(self, **{name: copy_of(name) for name in TENSORS})


def _copied(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer.copy_(tensor)
    return tensor.to("cpu", copy=True)


def contents(state: TrainState) -> Contents:
    """Return what a checkpoint of the state holds. Its tensors are those of the state: copy them to keep them.

    Raises:
        CheckpointError: there is something in it that a checkpoint can't hold.
    """
    check_fresh(state)
    state = suspended(state)
    model, optimizer, slots = {}, {}, {}
    try:
        facts = {
            "format_version": FORMAT,
            "versions": _versions(),
            "position": position_of(state),
            **{name: getattr(state, name) for name in COUNTERS},
            "measured": _measured(state),
            "model": _model_facts(state, model),
            "optimizer": _optimizer_facts(state, optimizer),
            "slots": encode(dict(state.slots), slots, "slots"),
            "metrics": encode(dict(state.metrics), slots, "metrics"),
            "generators": encode(state.generators and state.generators.to_parts(), slots, "generators"),
            "extra": encode(dict(state.extra), slots, "extra"),
            "history": [encode(row, slots, "history") for row in state.history.to_dicts()],
        }
    except TypeError as error:
        raise CheckpointError(f"the state can't be saved: {error}") from error
    return Contents(model, optimizer, slots, facts)


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


def _model_facts(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for name, value in unwrap(state).state_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
        else:
            extra[name] = encode(value, {}, f"model.{name}")  # a module's get_extra_state
    return {"class": type(unwrap(state)).__name__, "extra_state": extra}


def _named_parameters(state: TrainState) -> dict[int, str]:
    """Return id to name of every parameter that the optimizer updates; one that the model hasn't is named by
    position."""
    names = {id(p): name for name, p in unwrap(state).named_parameters()}
    for i, group in enumerate(state.optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            names.setdefault(id(p), f"param_groups.{i}.{j}")
    return names


def _optimizer_facts(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Any]:
    names = _named_parameters(state)
    own = {id(p) for p in unwrap(state).parameters()}
    groups, state_of = [], {}
    for i, group in enumerate(state.optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        settings = encode(settings, tensors, f"param_groups.{i}")
        groups.append({"params": [names[id(p)] for p in group["params"]], **settings})
        for p in group["params"]:
            if id(p) not in own:
                tensors[f"parameter.{names[id(p)]}"] = p.detach()
            if p in state.optimizer.state:
                state_of[names[id(p)]] = encode(dict(state.optimizer.state[p]), tensors, names[id(p)])
    return {"class": type(state.optimizer).__name__, "param_groups": groups, "state": state_of}


# --- writing


def save(state: TrainState, path: str | os.PathLike[str]) -> Path:
    """Write a checkpoint: a folder, whole or not there.

    Args:
        state: the newest state; it may be in the middle of an epoch.
        path: the folder to be; a checkpoint that is there is replaced.

    Returns:
        The path.

    Raises:
        StaleStateError: the state has been advanced.
        CheckpointError: something in the state can't be saved, or there is something else at the path.
        OSError: the disk is full, or the like; what was there before is still there.

    Example:
        >>> import tempfile
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(toy(w=3.0), f"{folder}/a")
        ...     restore(path, toy()).model.w.item()
        3.0
    """
    return write(contents(state), Path(path))


def write(what: Contents, path: Path, facts: Mapping[str, Any] | None = None) -> Path:
    """Write contents beside a path, flush them to the disk, and rename them to it.

    Args:
        what: what to write.
        path: the folder to be.
        facts: more for the manifest.
    """
    if path.exists() and not (path.is_dir() and {p.name for p in path.iterdir()} <= {*FILES, "manifest.json"}):
        raise CheckpointError(f"{path} is there, and is no checkpoint: save to another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    _clean(path.parent)
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}")
    _being_written.add(beside)
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        texts = {"state.json": json.dumps(what.facts, indent=1, allow_nan=False)}
        with ThreadPoolExecutor(2) as pool:
            sums = pool.map(lambda name: _write_file(what, texts, beside / name), FILES)
            files = dict(zip(FILES, sums, strict=True))
        about = {name: what.facts[name] for name in ("position", "stop", "measured")}
        manifest = {"format_version": FORMAT, **about, **(facts or {}), "files": files}
        _write_text(beside / "manifest.json", json.dumps({**manifest, "check": _check_of(manifest)}, indent=1))
        _flush(beside)
        _put_in_place(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        _being_written.discard(beside)
    return path


def _write_file(what: Contents, texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    if path.name in texts:
        _write_text(path, texts[path.name])
    else:
        # Tied tensors share memory, which safetensors doesn't write twice; each name gets its own copy.
        seen: set[int] = set()
        tensors = {}
        for name, tensor in getattr(what, path.stem).items():
            shared = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in seen
            seen.add(tensor.untyped_storage().data_ptr())
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            tensors[name] = tensor if whole and not shared else tensor.clone(memory_format=torch.contiguous_format)
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            raise OSError(f"{path} can't be written: {error}") from error
        _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sum_of(path)}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(beside: Path, path: Path) -> None:
    old = _aside(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # a kill from here to the next rename leaves `old`, which reading falls back to
    beside.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _check_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# --- reading


def verify(path: Path, *, deep: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        path: the folder.
        deep: compare the checksums of the files, not only their sizes.

    Raises:
        CheckpointError: it is none, or is damaged; the message names the file and the fault.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: there is no such folder")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        check = manifest.pop("check")
        intact = check == _check_of(manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no manifest.json") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}/manifest.json is damaged: {error}") from error
    if not intact:
        raise CheckpointError(f"{path}/manifest.json is damaged: its own checksum is wrong")
    if manifest["format_version"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format_version']}, and this fnloop reads up to {FORMAT}: pip install -U fnloop"
        )
    try:
        for name in FILES:
            facts, file = manifest["files"][name], path / name
            if not file.is_file():
                raise CheckpointError(f"{path} is damaged: {name} is missing")
            if (size := file.stat().st_size) != facts["bytes"]:
                raise CheckpointError(f"{path} is damaged: {name} has {size:,} bytes instead of {facts['bytes']:,}")
            if deep and _sum_of(file) != facts["sha256"]:
                raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    return manifest


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> Contents:
    if not path.exists() and _aside(path).exists():
        path = _aside(path)  # killed between two renames
    verify(path)
    try:
        # Copies: what load_file returns is mapped to the file, and would change with it.
        tensors = {name: {k: v.clone() for k, v in load_file(path / f"{name}.safetensors").items()} for name in TENSORS}
        return Contents(**tensors, facts=json.loads((path / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


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
    check_fresh(state)
    parts = PARTS if only is None else tuple(only)
    if isinstance(only, str) or not set(parts) <= set(PARTS):
        raise ValueError(f"restore expects only= as a tuple of {', '.join(PARTS)}; got {only!r}")
    path = Path(path)
    read = _read(path)
    try:
        return _restored(read, state, parts, strict, path)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path} can't be restored: {type(error).__name__}: {error}") from error


def _restored(read: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path) -> TrainState:
    facts, fields = read.facts, {}
    # Everything is checked and decoded before anything is changed.
    load_model = _match_model(read, state, strict, path) if "model" in parts else None
    load_optimizer = _match_optimizer(read, state, strict, path) if "optimizer" in parts else None
    device = state.backend.device
    slots = {k: v if k.startswith("generators") else v.to(device) for k, v in read.slots.items()}
    if "slots" in parts:
        fields["slots"] = decode(facts["slots"], slots)
    if "metrics" in parts:
        fields["metrics"] = {k: _metric(v) for k, v in decode(facts["metrics"], slots).items()}
    if "extra" in parts:
        fields["extra"] = decode(facts["extra"], slots)
    if "history" in parts:
        fields["history"] = History(_record(decode(row, slots)) for row in facts["history"])
    if "counters" in parts:
        fields.update({name: facts[name] for name in COUNTERS})
        generators = decode(facts["generators"], slots)
        fields["generators"] = generators and HostGenerators.from_parts(generators)
    for load in (load_model, load_optimizer):
        if load is not None:
            load()
    return advance_to(attrs.evolve(state, **fields))


def _record(row: dict[str, Any]) -> Record:
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    return Record(epoch, step, row, seconds)


def _metric(value: Any) -> Any:
    """Return a metric of ours as itself; another waits for the next batch, which brings one of its kind."""
    return MONOIDS[value.kind](**value.parts) if isinstance(value, Saved) and value.kind in MONOIDS else value


def _match_model(read: Contents, state: TrainState, strict: bool, path: Path) -> Any:
    module = unwrap(state)
    mine = module.state_dict()
    saved = {**read.model, **{k: decode(v, {}) for k, v in read.facts["model"]["extra_state"].items()}}
    missing, unexpected = [k for k in mine if k not in saved], [k for k in saved if k not in mine]
    both = [k for k in mine if k in saved and isinstance(saved[k], Tensor) and isinstance(mine[k], Tensor)]
    differ = [k for k in both if saved[k].shape != mine[k].shape]
    shapes = [f"{k}: {tuple(saved[k].shape)} saved, {tuple(mine[k].shape)} here" for k in differ]
    faults = [("missing in the checkpoint", missing), ("not in the model", unexpected), ("of another shape", shapes)]
    found = "; ".join(f"{what}: {_first(which)}" for what, which in faults if which)
    if found and strict:
        raise CheckpointError(
            f"{path} is of another model ({read.facts['model']['class']}). {found}. Make the same model, or "
            "take what matches: "
            f"restore(path, state, only=('model',), strict=False)"
        )
    if found:
        _log.warning("restore: left as it was: %s", found)
    fitting = {k: v for k, v in saved.items() if k in mine and k not in differ}
    return lambda: module.load_state_dict(fitting, strict=False)


def _first(names: Sequence[str], n: int = 3) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _match_optimizer(read: Contents, state: TrainState, strict: bool, path: Path) -> Any:
    facts, optimizer = read.facts["optimizer"], state.optimizer
    if facts["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{path} has the state of {facts['class']}, and the optimizer is {type(optimizer).__name__}. Make "
            "that one, or leave "
            f"it out: restore(path, state, only=('model',))"
        )
    names = _named_parameters(state)
    mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in facts["param_groups"]]
    if strict and mine != saved:
        flat, theirs = {n for g in mine for n in g}, {n for g in saved for n in g}
        difference = f"only here: {_first(sorted(flat - theirs))}; only there: {_first(sorted(theirs - flat))}"
        if flat == theirs:
            difference = "the same parameters in other groups, or in another order"
        raise CheckpointError(f"{path} has an optimizer of other parameters: {difference}. Make its groups as they were")
    parameters = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    wrong = [
        f"{name}: {tuple(read.optimizer[key].shape)} saved, {tuple(p.shape)} here"
        for name, (p, _) in parameters.items()
        if (key := f"parameter.{name}") in read.optimizer and read.optimizer[key].shape != p.shape
    ]
    if wrong:
        raise CheckpointError(f"{path} has parameters of another shape: {_first(wrong)}")
    settings = [decode({k: v for k, v in g.items() if k != "params"}, read.optimizer) for g in facts["param_groups"]]
    state_of = {
        name: _on_device(decode(value, read.optimizer), *parameters[name])
        for name, value in facts["state"].items()
        if name in parameters and _fits(decode(value, read.optimizer), parameters[name][0], strict)
    }

    def load() -> None:
        for group, values in zip(optimizer.param_groups, settings, strict=False):
            for key, value in values.items():
                held = group.get(key)
                if isinstance(held, Tensor) and isinstance(value, Tensor):
                    held.copy_(value)
                else:
                    group[key] = value
        for name, (p, _) in parameters.items():
            if f"parameter.{name}" in read.optimizer:
                p.data.copy_(read.optimizer[f"parameter.{name}"])
        optimizer.state.clear()
        for name, value in state_of.items():
            optimizer.state[parameters[name][0]] = value

    return load


def _fits(value: Mapping[str, Any], parameter: Tensor, strict: bool) -> bool:
    """Say whether an optimizer's state of a parameter is of its shape (only asked where shapes may differ)."""
    return strict or all(v.ndim == 0 or v.shape == parameter.shape for v in value.values() if isinstance(v, Tensor))


def _on_device(value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Move an optimizer's state to where its parameter is; a step count stays on the host, unless it is wanted there."""
    if isinstance(value, Tensor):
        return value.to(parameter.device)
    if isinstance(value, list | tuple):
        return type(value)(_on_device(v, parameter, group) for v in value)
    if isinstance(value, dict):
        on_host = not (group.get("capturable") or group.get("fused"))
        return {k: v if k == "step" and on_host else _on_device(v, parameter, group) for k, v in value.items()}
    return value


# --- folders of checkpoints


def _candidates(folder: Path) -> list[Path]:
    """Return what is, or was, a checkpoint, newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.is_dir() and any((p / name).exists() for name in ("manifest.json", *FILES))]
    replaced = [p for p in found if p.name.endswith(".old") and p.name.startswith(".")]
    aside = [p for p in replaced if not (folder / p.name[1:].removesuffix(".old")).exists()]
    return sorted([*(p for p in found if not p.name.startswith(".")), *aside], key=_age, reverse=True)


def _age(path: Path) -> tuple[Any, ...]:
    """Return what orders checkpoints, as the manifest has it, or, if that can't be read, as the name has it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        tried, epoch, batch = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["position"]
        return (int(tried), int(epoch), int(batch), path.name)
    return (sum(map(int, re.findall(r"\d+", path.name))), 0, 0, path.name)


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint in a folder.

    Damaged ones are passed over with a warning that names the file and the fault.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.

    Returns:
        Its path, or None if there is none.

    Example:
        >>> latest("no/such/folder") is None
        True
    """
    for path in _candidates(Path(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            return path
    return None


def best(folder: str | os.PathLike[str], key: str | None = None, mode: str | None = None) -> Path | None:
    """Return the valid checkpoint with the best value of a metric.

    Args:
        folder: what the hook ``checkpoint(folder, best=...)`` writes to.
        key: the metric; the hook's by default.
        mode: "min" or "max"; the hook's by default.

    Returns:
        Its path, or None if no checkpoint has a value that isn't NaN. Of equals, the oldest.

    Raises:
        ValueError: no metric is given, and the checkpoints name none.

    Example:
        >>> best("no/such/folder", "valid/loss") is None
        True
    """
    ranked = [(path, m) for path in reversed(_candidates(Path(folder))) if (m := _manifest(path)) is not None]
    if not ranked:
        return None
    key = key or next((m["best"] for _, m in reversed(ranked) if m.get("best")), None)
    mode = mode or next((str(m["mode"]) for _, m in reversed(ranked) if m.get("mode")), "min")
    if key is None:
        raise ValueError(f'the checkpoints in {folder} name no metric: write best(folder, "valid/loss")')
    for path, _ in _ranking(ranked, key, mode):
        try:
            verify(path)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            return path
    return None


def _manifest(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(CheckpointError):
        return verify(path, deep=False)
    return None


def _ranking(oldest_first: Iterable[tuple[Path, Mapping[str, Any]]], key: str, mode: str) -> list[tuple[Path, float]]:
    """Order checkpoints by a metric, best first, of equals the oldest first, without those that have none, or NaN."""
    ranked: list[tuple[Path, float]] = []
    for path, manifest in oldest_first:
        value = float(manifest["measured"].get(key, "nan"))
        if value == value:
            place = next((i for i, (_, other) in enumerate(ranked) if better(value, other, mode)), len(ranked))
            ranked.insert(place, (path, value))
    return ranked


def resume(folder: str | os.PathLike[str], state: TrainState) -> TrainState:
    """Return the state of the newest valid checkpoint in a folder, or the state as it is if there is none.

    One line makes a training script restartable: ``state = resume("runs/a", TrainState.create(model, optimizer))``.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.
        state: a new state of the same model and optimizer.

    Returns:
        The state to go on with.

    Raises:
        CheckpointError: the newest valid checkpoint is of another model or optimizer.

    Example:
        >>> from fnloop.testing import toy
        >>> resume("no/such/folder", toy()).step
        0
    """
    check_fresh(state)
    path = latest(folder)
    return state if path is None else restore(path, state)


def saved_as(folder: Path, state: TrainState) -> Path | None:
    """Return the checkpoint of this very state in a folder, if it is the newest and whole."""
    for path in _candidates(folder)[:1]:
        with contextlib.suppress(CheckpointError):
            about = verify(path, deep=False)
            if about["position"] == position_of(state) and about["stop"] == state.stop and verify(path):
                return path
    return None


def prune(written: Path, keep: int, key: str | None, mode: str, keep_best: int) -> None:
    """Remove all checkpoints beside one that has just been written, but the newest and the best.

    A function of what is on the disk: nothing is remembered. What was written just now is kept in any case, so there is
    always one that is whole. Those that are seen to be damaged don't count, and aren't touched.
    """
    valid = [(path, m) for path in reversed(_candidates(written.parent)) if (m := _manifest(path)) is not None]
    kept = {written, *(path for path, _ in valid[-keep:])}
    if key is not None:
        kept |= {path for path, _ in _ranking(valid, key, mode)[:keep_best]}
    for path, _ in valid:
        if path not in kept:
            removing = path.with_name(f".{path.name}.removing")
            path.rename(removing)  # at once: a half-removed one must not look like a checkpoint
            shutil.rmtree(removing, ignore_errors=True)
    _clean(written.parent)


def _clean(folder: Path) -> None:
    """Remove what killed processes have left over."""
    for path in folder.glob(".*"):
        writer = re.fullmatch(r"\..+\.writing-(\d+)", path.name)
        replaced = re.fullmatch(r"\.(.+)\.old", path.name)
        if (
            (writer and path not in _being_written and not _alive(int(writer[1])))
            or path.name.endswith(".removing")
            or (replaced and _manifest(path.with_name(replaced[1])) is not None)
        ):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # of an earlier process with this number: what this one is writing is known
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
