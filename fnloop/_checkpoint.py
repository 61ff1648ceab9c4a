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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend import Backend
from fnloop._encode import Saved, as_number, decode, encode
from fnloop._files import FORMAT, CheckpointError, Contents, candidates, manifest_of, ranking, read_files, verify, write
from fnloop._history import History, Record
from fnloop._joint import everywhere
from fnloop._metrics import MONOIDS, Mean, wide
from fnloop._processes import gather_objects, main_only
from fnloop._rng import HostGenerators
from fnloop._sharded import full, like_sharded
from fnloop._state import PENDING, RECORD, UPDATE, TrainState, advance_to, check_fresh, suspended, unwrap

__all__ = ["CheckpointError", "best", "contents", "latest", "position_of", "restore", "resume", "save"]

PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
EXECUTION = ("foreach", "fused", "capturable")  # how an optimizer computes: no part of what it computes
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


def contents(state: TrainState) -> Contents:
    """Return what a checkpoint of the state holds. Its tensors are those of the state: copy them to keep them.

    With several processes every one has to call it, and the main one has all of it.

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
            "position": position_of(state),
            **{name: getattr(state, name) for name in COUNTERS},
            "processes": state.backend.world_size,
            "measured": _measured(state),
            "news": sorted(state.news & {UPDATE, PENDING}) if PENDING in state.news else [],
            "model": _model_facts(state, model, slots),
            "optimizer": _optimizer_facts(state, optimizer),
            "slots": encode(dict(state.slots), slots, "slots"),
            "metrics": encode({**state.metrics, **everywhere(state, state.metrics)}, slots, "metrics"),
            "shares": [encode(own, slots, f"shares.{rank}") for rank, own in enumerate(_shares(state))],
            "generators": encode(_generators(state), slots, "generators"),
            "extra": _plain(encode(dict(state.extra), slots, "extra"), "extra"),
            "history": [encode(row, slots, "history") for row in state.history.to_dicts()],
        }
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state can't be saved: {error}") from error
    return Contents(model, optimizer, slots, facts)


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
        settings = {k: as_number(v) for k, v in group.items() if k not in ("params", "param_names", *EXECUTION)}
        settings = encode(settings, tensors, f"param_groups.{i}")
        groups.append({"params": [names[id(p)] for p in group["params"]], **settings})
        for p in group["params"]:
            if id(p) not in own:
                tensors[f"parameter.{names[id(p)]}"] = p.detach()
            if p in state.optimizer.state:
                state_of[names[id(p)]] = encode(dict(state.optimizer.state[p]), tensors, names[id(p)])
    return {"class": type(state.optimizer).__name__, "param_groups": groups, "state": state_of}


def save(state: TrainState, path: str | os.PathLike[str]) -> Path:
    """Write a checkpoint: a folder, whole or not there. With several processes all have to call it, and the main one writes.

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
    what = contents(state)
    return main_only(lambda: write(what, Path(path)), "fnloop.save")


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
    check_fresh(state)
    parts = PARTS if only is None else tuple(only)
    if isinstance(only, str) or not set(parts) <= set(PARTS):
        raise ValueError(f"restore expects only= as a tuple of {', '.join(PARTS)}; got {only!r}")
    if path is None:
        raise TypeError("restore expects a path; got None, which is what latest(folder) returns where there is no checkpoint")
    return _restored(read_files(Path(path)), state, parts, strict, Path(path))


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
    if "batch" in fields:
        state._lease.saved_on = read.facts.get("processes")
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
            fields[part] = {k: _metric(v, device) for k, v in value.items()} if part == "metrics" else value
    history = History(_record(decode(row, slots)) for row in facts["history"])
    if "history" in parts:
        fields["history"] = history
    counters = {name: facts[name] for name in COUNTERS}
    for name, value in counters.items():
        right = value is None or isinstance(value, str) if name == "stop" else isinstance(value, int) and value >= 0
        if not right:
            raise TypeError(f"{name} is {value!r}")
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
    metric = MONOIDS[value.kind](**value.parts)
    if isinstance(metric, Mean) and not isinstance(metric.total, Tensor):  # several processes met on the host
        metric = Mean(wide(torch.tensor(metric.total, dtype=torch.float64, device=device)), metric.weight)
    return metric


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


def _spread(value: Any, template: Any) -> Any:
    return like_sharded(value, template) if isinstance(value, Tensor) and isinstance(template, Tensor) else value


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
    skip = ("params", *EXECUTION)
    settings = [decode({k: v for k, v in g.items() if k not in skip}, read.optimizer) for g in facts["param_groups"]]
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
                held, now = group.get(key), group.get(key.removeprefix("initial_"))
                if isinstance(held, Tensor):
                    held.copy_(value)
                elif held is None and isinstance(now, Tensor) and isinstance(value, int | float):
                    group[key] = torch.full_like(now, value)  # as a schedule has made it
                else:
                    group[key] = value
        for name, (p, _) in parameters.items():
            if f"parameter.{name}" in read.optimizer:
                p.data.copy_(like_sharded(read.optimizer[f"parameter.{name}"], p))
        optimizer.state.clear()
        for name, value in state_of.items():
            optimizer.state[parameters[name][0]] = value

    return load


def _on_device(value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Move an optimizer's state to where its parameter is; a step count stays on the host, unless it is wanted there."""
    if isinstance(value, Tensor):
        value = value.to(parameter.device)
        return like_sharded(value, parameter) if value.shape == parameter.shape else value
    if isinstance(value, list | tuple):
        return type(value)(_on_device(v, parameter, group) for v in value)
    if isinstance(value, dict):
        on_host = not (group.get("capturable") or group.get("fused"))
        return {k: v if k == "step" and on_host else _on_device(v, parameter, group) for k, v in value.items()}
    return value


# --- folders of them


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
    return _first_whole(candidates(Path(folder)))


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
    ranked = [(path, m) for path in reversed(candidates(Path(folder))) if (m := manifest_of(path)) is not None]
    if not ranked:
        return None
    key = key or next((m["best"] for _, m in reversed(ranked) if m.get("best")), None)
    mode = mode or next((str(m["mode"]) for _, m in reversed(ranked) if m.get("mode")), "min")
    if key is None:
        raise ValueError(f'the checkpoints in {folder} name no metric: write best(folder, "valid/loss")')
    return _first_whole(path for path, _ in ranking(ranked, key, mode))


def _given(folder: Path) -> Path | None:
    """Return the folder, if it is a checkpoint itself."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: resume expects a folder of checkpoints")
    return folder if (folder / "manifest.json").exists() else None


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
    if state.backend.world_size > 1:
        path = main_only(lambda: _given(folder) or _first_whole(candidates(folder)), "fnloop.resume")  # others may see others
        return state if path is None else restore(path, state)
    if (path := _given(folder)) is not None:
        return restore(path, state)
    for path in candidates(folder):
        try:
            read = read_files(path)
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
        else:
            return _restored(read, state, PARTS, True, path)
    return state
