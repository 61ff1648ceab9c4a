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
import itertools
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
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
_STEP = r"step-\d+(\+\d+)?"  # what the hook names them
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")
_log = logging.getLogger("fnloop")
_numbers = itertools.count()
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
    if tensor.nbytes < 4 << 20:
        return tensor.to("cpu", copy=True)
    # numpy asks the system for large pages, and torch doesn't: half the time of a first copy.
    return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape).copy_(tensor)


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
            "model": _model_facts(state, model, slots),
            "optimizer": _optimizer_facts(state, optimizer),
            "slots": encode(dict(state.slots), slots, "slots"),
            "metrics": encode(dict(state.metrics), slots, "metrics"),
            "generators": encode(state.generators and state.generators.to_parts(), slots, "generators"),
            "extra": _plain(encode(dict(state.extra), slots, "extra"), "extra"),
            "history": [encode(row, slots, "history") for row in state.history.to_dicts()],
        }
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state can't be saved: {error}") from error
    return Contents(model, optimizer, slots, facts)


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
    module, extra = unwrap(state), {}
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            encode(value, {}, name)  # checks that it can be held
            tensors[_bare(name)] = value.detach()
        else:
            extra[_bare(name)] = encode(value, others, f"model.{_bare(name)}")  # a module's get_extra_state
    return {
        "class": type(module).__name__,
        "extra_state": extra,
        "frozen": [_bare(name) for name, p in module.named_parameters() if not p.requires_grad],
        "evaluating": [_bare(name) for name, m in module.named_modules() if not m.training],
    }


def _bare(name: str) -> str:
    """Return a name in the model without what torch.compile has put into it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")


def _named_parameters(state: TrainState) -> dict[int, str]:
    """Return id to name of every parameter that the optimizer updates; one that the model hasn't is named by position."""
    names = {id(p): _bare(name) for name, p in unwrap(state).named_parameters()}
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
    path = path.resolve()
    ours = path.is_dir() and (not any(path.iterdir()) or any((path / name).exists() for name in (*FILES, "manifest.json")))
    if path.exists() and not ours:
        raise CheckpointError(f"{path} is there, and is no checkpoint: save to another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    _clean(path.parent)
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}-{next(_numbers)}")
    _being_written.add(beside)
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        texts = {"state.json": json.dumps(what.facts, indent=1, allow_nan=False, ensure_ascii=False)}
        with ThreadPoolExecutor(2) as pool:
            sums = pool.map(lambda name: _write_file(what, texts, beside / name), FILES)
            files = dict(zip(FILES, sums, strict=True))
        about = {name: what.facts[name] for name in ("position", "stop", "measured")}
        manifest = {"format_version": FORMAT, "serial": _next_serial(path), **about, **(facts or {}), "files": files}
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
            whole = whole and not tensor.is_conj() and not tensor.is_neg()
            tensors[name] = tensor if whole and not shared else tensor.clone(memory_format=torch.contiguous_format)
            tensors[name] = tensors[name].resolve_conj().resolve_neg()
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} can't be written: {error}") from error
        _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sum_of(path)}


def _next_serial(path: Path) -> int:
    """Return a number above those of all checkpoints beside a path: the one that was written last is the newest."""
    return max((_serial(p) or 0 for p in path.parent.iterdir() if p.is_dir()), default=0) + 1


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
        if not isinstance(manifest, dict) or manifest.pop("check", None) != _check_of(manifest):
            raise CheckpointError(f"{path}/manifest.json is damaged: its own checksum is wrong")
        if manifest["format_version"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format_version']}, and this fnloop reads up to {FORMAT}: pip install -U fnloop"
            )
        tuple(map(float, manifest["measured"].values())), tuple(map(int, manifest["position"]))
        for name in FILES:
            facts, file = manifest["files"][name], path / name
            if not file.is_file():
                raise CheckpointError(f"{path} is damaged: {name} is missing")
            if (size := file.stat().st_size) != facts["bytes"]:
                raise CheckpointError(f"{path} is damaged: {name} has {size:,} bytes instead of {facts['bytes']:,}")
            if deep and _sum_of(file) != facts["sha256"]:
                raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no manifest.json (for a folder of them, see latest)") from None
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is that somebody has written there
        raise CheckpointError(f"{path}/manifest.json is damaged, or can't be read: {type(error).__name__}: {error}") from error
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
    except Exception as error:
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}") from error


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
    if path is None:
        raise TypeError("restore expects a path; got None, which is what latest(folder) returns where there is no checkpoint")
    return _restored(_read(Path(path)), state, parts, strict, Path(path))


def _restored(read: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path) -> TrainState:
    try:
        # Everything is checked and decoded before anything is changed.
        fields = _decoded(read, state, parts)
        loads = []
        if "model" in parts:
            loads.append(_match_model(read, state, strict, path, flags="counters" in parts))
        if "optimizer" in parts:
            loads.append(_match_optimizer(read, state, strict, path))
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
    return advance_to(attrs.evolve(state, **fields))


def _decoded(read: Contents, state: TrainState, parts: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the state that were saved."""
    facts, fields = read.facts, {}
    device = state.backend.device
    slots = {k: v if k.startswith("generators") else v.to(device) for k, v in read.slots.items()}
    for part in ("slots", "metrics", "extra"):
        value = decode(facts[part], slots)
        if not isinstance(value, dict):
            raise TypeError(f"{part} is a {type(value).__name__}")
        if part in parts:
            fields[part] = {k: _metric(v) for k, v in value.items()} if part == "metrics" else value
    history = History(_record(decode(row, slots)) for row in facts["history"])
    if "history" in parts:
        fields["history"] = history
    counters = {name: facts[name] for name in COUNTERS}
    for name, value in counters.items():
        right = value is None or isinstance(value, str) if name == "stop" else isinstance(value, int) and value >= 0
        if not right:
            raise TypeError(f"{name} is {value!r}")
    generators = decode(facts["generators"], slots)
    if "counters" in parts:
        fields.update(counters, generators=HostGenerators.from_parts(generators).checked() if generators else None)
    return fields


def _record(row: dict[str, Any]) -> Record:
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    return Record(epoch, step, row, seconds)


def _metric(value: Any) -> Any:
    """Return a metric of ours as itself; another waits for the next batch, which brings one of its kind."""
    if not isinstance(value, Saved):
        raise TypeError(f"a metric is {value!r}")
    return MONOIDS[value.kind](**value.parts) if value.kind in MONOIDS else value


def _match_model(read: Contents, state: TrainState, strict: bool, path: Path, flags: bool) -> Callable[[], None]:
    module, facts = unwrap(state), read.facts["model"]
    spelled = {_bare(k): k for k in module.state_dict()}
    mine = {_bare(k): v for k, v in module.state_dict().items()}
    saved = {**read.model, **{k: decode(v, read.slots) for k, v in facts["extra_state"].items()}}
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
    fitting = {spelled[k]: v for k, v in saved.items() if k in mine and k not in differ}

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


def _first(names: Sequence[str], n: int = 3) -> str:
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


def _match_optimizer(read: Contents, state: TrainState, strict: bool, path: Path) -> Callable[[], None]:
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
    shape_of = {**{k: v.shape for k, v in read.model.items()}}
    shape_of.update({k.removeprefix("parameter."): v.shape for k, v in read.optimizer.items() if k.startswith("parameter.")})
    wrong = [k for k, (p, _) in parameters.items() if k in shape_of and shape_of[k] != p.shape]
    if wrong and strict:
        shapes = [f"{k}: {tuple(shape_of[k])} saved, {tuple(parameters[k][0].shape)} here" for k in wrong]
        raise CheckpointError(f"{path} has the optimizer's state of parameters of another shape: {_first(shapes)}")
    settings = [decode({k: v for k, v in g.items() if k != "params"}, read.optimizer) for g in facts["param_groups"]]
    for group, values in zip(optimizer.param_groups, settings, strict=False):
        for key, value in values.items():
            held = group.get(key)
            if isinstance(held, Tensor) and (
                not isinstance(value, Tensor | int | float) or getattr(value, "ndim", 0) != held.ndim
            ):
                raise CheckpointError(
                    f"{path}: {key} of a parameter group is {value!r}, and a tensor of shape {tuple(held.shape)} here"
                )
            if (
                not isinstance(held, Tensor)
                and held is not None
                and type(value) is not type(held)
                and not (isinstance(held, int | float) and isinstance(value, int | float | Tensor))
                and value is not None
            ):
                raise CheckpointError(f"{path}: {key} of a parameter group is {value!r}, and {held!r} here")
    state_of = {
        name: _on_device(decode(value, read.optimizer), *parameters[name])
        for name, value in facts["state"].items()
        if name in parameters and name not in wrong
    }
    if not all(isinstance(value, dict) for value in state_of.values()):
        raise CheckpointError(f"{path}: the optimizer's state isn't a mapping")

    def load() -> None:
        for group, values in zip(optimizer.param_groups, settings, strict=False):
            for key, value in values.items():
                held = group.get(key)
                if isinstance(held, Tensor):
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
    """Return what is, or was, a checkpoint, the one that was written last first."""
    if not folder.is_dir():
        return []
    found = [
        p
        for p in folder.iterdir()
        if p.is_dir() and not p.is_symlink() and any((p / name).exists() for name in ("manifest.json", *FILES))
    ]
    replaced = [p for p in found if p.name.endswith(".old") and p.name.startswith(".")]
    aside = [p for p in replaced if not (folder / p.name[1:].removesuffix(".old")).exists()]
    return sorted([*(p for p in found if not p.name.startswith(".")), *aside], key=_age, reverse=True)


def _serial(path: Path) -> int | None:
    """Return when a checkpoint was written, in the order of those beside it; None if that can't be read."""
    with contextlib.suppress(Exception):
        return int(json.loads((path / "manifest.json").read_text(encoding="utf-8"))["serial"])
    return None


def _age(path: Path) -> tuple[Any, ...]:
    """Return what orders checkpoints: when they were written; of a damaged one, when it was changed last."""
    named = sum(map(int, re.findall(r"\d+", path.name[:60])))
    serial: float | None = _serial(path)
    if serial is None:
        changed = path.stat().st_mtime_ns
        before = [_serial(p) for p in path.parent.iterdir() if p.is_dir() and p.stat().st_mtime_ns <= changed]
        serial = max((number for number in before if number is not None), default=0) + 0.5
    return (serial, named, path.name)


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
    return _first_whole(_candidates(Path(folder)))


def _first_whole(paths: Iterable[Path]) -> Path | None:
    """Return the first checkpoint that is valid, warning of those before it."""
    for path in paths:
        try:
            verify(path)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=3)
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
    return _first_whole(path for path, _ in _ranking(ranked, key, mode))


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
    folder = Path(folder)
    if (folder / "manifest.json").exists():
        return restore(folder, state)  # it is a checkpoint itself
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: resume expects a folder of checkpoints")
    for path in _candidates(folder):
        try:
            read = _read(path)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            return _restored(read, state, PARTS, True, path)
    return state


def prune(written: Path, keep: int, key: str | None, mode: str, keep_best: int) -> None:
    """Remove all checkpoints beside one that has just been written, but the newest and the best.

    A function of what is on the disk: nothing is remembered. What was written just now is kept in any case, so there is
    always one that is whole. Those that are seen to be damaged don't count, and aren't touched.
    """
    written = written.resolve()
    valid = [(path, m) for path in reversed(_candidates(written.parent)) if (m := _manifest(path)) is not None]
    valid = [(path, m) for path, m in valid if re.fullmatch(_STEP, path.name)]  # what has another name was saved by hand
    kept = {written, *(path for path, _ in valid[-keep:])}
    if key is not None:
        kept |= {path for path, _ in _ranking(valid, key, mode)[:keep_best]}
    for path, _ in valid:
        if path not in kept:
            removing = path.with_name(f".{path.name}.removing")
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                path.rename(removing)  # at once: a half-removed one must not look like a checkpoint
            shutil.rmtree(removing, ignore_errors=True)
    _clean(written.parent)


def _clean(folder: Path) -> None:
    """Remove what killed processes have left over."""
    for path in folder.glob(".*"):
        writer = re.fullmatch(r"\..+\.writing-(\d+)(-\d+)?", path.name)
        replaced = re.fullmatch(r"\.(.+)\.old", path.name)
        if (
            (writer and path not in _being_written and not _alive(int(writer[1])))
            or re.fullmatch(rf"\.{_STEP}\.removing", path.name)
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
