"""The hooks of a run: each by itself, and those that would get in each other's way."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from fnloop._checkpoint.format import PARTS
from fnloop._core.call import name_of
from fnloop._core.history import History
from fnloop._core.middleware import Middleware
from fnloop._core.monitor import check_evaluated, keys_of, watcher_name
from fnloop._display import checks
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.moments import ConditionalHook, show_call
from fnloop._hooks.requeue import requeue
from fnloop._hooks.restore_best import restore_best
from fnloop._hooks.triggers import once
from fnloop._hooks.wrapper import Hook, as_hook, layers, unwrap_hook
from fnloop._middleware.amp import amp
from fnloop._middleware.channels_last import channels_last
from fnloop._middleware.compiled import compiled
from fnloop._middleware.derive import derive
from fnloop._middleware.metric import metric
from fnloop._middleware.plateau import plateau
from fnloop._middleware.tbptt import tbptt
from fnloop._step.averaging import EvaluateAverage
from fnloop._step.pipeline import LossStep, PipelineStep

__all__ = ["check_metrics", "check_together", "read_hooks"]


def read_hooks(hooks: object) -> tuple[Hook, ...]:
    """Return the argument ``hooks`` of ``fit`` as a tuple, each of them checked.

    Raises:
        TypeError: it is not a sequence of hooks.
    """
    if callable(hooks) or isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        raise TypeError(
            "fit expects hooks as a tuple, such as hooks=(progress(), early_stop(...)); got "
            f"{checks.describe(hooks)}"
        )
    for hook in hooks:
        _check_hook(hook)
        for layer in layers(hook):
            begin = as_hook(layer).begin
            checks.function(name_of(layer), "begin", begin, "a method (state) -> state", 1)
    return tuple(map(as_hook, hooks))


def check_together(hooks: Sequence[Hook]) -> None:
    """Raise ValueError for hooks that cannot work together, or where they are called."""
    every_layer = [layer for hook in hooks for layer in layers(hook)]
    _check_slots([hook.slot for hook in every_layer if isinstance(hook, once)])
    _check_folders([hook.folder for hook in every_layer if isinstance(hook, checkpoint)])
    _check_saved_first([*map(unwrap_hook, hooks)])
    _check_only_one([hook for hook in every_layer if isinstance(hook, restore_best)])
    for hook in hooks:
        _check_inspected(hook)


def check_metrics(
    step: PipelineStep, hooks: Sequence[Hook], loaders: Collection[str], history: History
) -> None:
    """Raise for a metric of an evaluation that is watched and that the pipeline cannot make.

    Only where all names are known. A middleware or a step of the user's own may add others, and a
    hook may add to the records that the hooks after it see.

    Args:
        step: the step.
        hooks: the hooks.
        loaders: the names of the loaders that are evaluated.
        history: the records so far. What is in one of them may come from an earlier run.

    Raises:
        KeyError: there will be no such metric; the message says what to list.
    """
    watched: list[tuple[str, str]] = []
    reported = {name for hook in hooks for layer in layers(hook) for name in layer.reports}
    for hook in hooks:
        of_library = (layer for layer in layers(hook) if not _is_of_user(layer))
        watched += [(watcher_name(layer), key) for layer in of_library for key in keys_of(layer)]
        if _is_of_user(unwrap_hook(hook)):
            break
    else:
        calls = [m.call for m in step.pipeline.middleware if m.call is not None]
        plateaus = [call for call in calls if call.factory is plateau]
        watched += [("plateau", str((*call.args, call.kwargs.get("key"))[0])) for call in plateaus]
    for owner, key in watched:
        loader, _, name = key.partition("/")
        if not name or loader not in loaders or key in reported or key in history:
            continue
        if (names := _evaluated_names(step, loader)) is not None:
            check_evaluated(owner, key, names)


def _is_of_user(hook: Hook) -> bool:
    """Return whether a hook is not one of the library, but the user's own, or a function."""
    module = type(hook).__module__
    return module == Hook.__module__ or not module.startswith("fnloop.")


_ADD_NOTHING = (amp, channels_last, compiled, tbptt)  # to the metrics of an evaluation


def _evaluated_names(step: PipelineStep, loader: str) -> list[str] | None:
    """Return the names of the metrics of a loader's evaluation; None if they are not known."""
    if type(step) is not LossStep:
        return None
    names, averages = ["loss"], [""]
    for member in step.pipeline.middleware:
        factory = None if member.call is None else member.call.factory
        if member.forward is None and member.evaluation is None and member.report is None:
            continue
        if isinstance(member.evaluation, EvaluateAverage):
            averages += () if member.evaluation.only else (f"{member.name}/",)
        elif factory in (metric, derive):
            assert member.call is not None
            given = {k: v for k, v in member.call.kwargs.items() if k not in ("on", "loaders")}
            several = [v for v in given.values() if getattr(v, "key", None) is not None]
            if member.call.args or several:  # which bring their own names
                return None
            names += given if not member.loaders or loader in member.loaders else ()
        elif factory not in _ADD_NOTHING:
            return None
    names = [f"{average}{name}" for average in averages for name in names]
    return [*names, "time/evaluate"] if step.is_timed else names


def _check_hook(hook: object) -> None:
    if isinstance(hook, type | torch.nn.Module) or not callable(hook):
        hint = f". Call it: {hook.__name__}(...)" if isinstance(hook, type) else ""
        if hasattr(hook, "begin") and not hint:
            hint = ", which has a method begin, but no method __call__(state)"
        if isinstance(hook, Middleware):
            hint = f", which is middleware: write pipeline({name_of(hook)})(loss_fn)"
        raise TypeError(f"a hook is a function state -> state; got {name_of(hook)}{hint}")
    if hasattr(hook, "due") and not isinstance(hook, ConditionalHook):
        raise TypeError(f"{hook!r} says when, but not what: write {show_call(hook, 'hook')}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(hook)
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"a hook takes the state and nothing else, but {name_of(hook)} takes {signature}"
            ) from error


def _check_slots(slots: Sequence[str]) -> None:
    for slot in slots:
        if slots.count(slot) > 1:
            raise ValueError(
                f"two hooks would be remembered as {slot!r}, and one of them would never run: "
                "once(hook, name=...)"
            )


def _check_folders(folders: Iterable[Path]) -> None:
    seen = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            raise ValueError(
                f"two checkpoint hooks share {folder}, and would remove each other's: give "
                "each its own folder"
            )
        seen.add(place)


def _check_only_one(hooks: Sequence[restore_best]) -> None:
    if len(hooks) > 1:
        raise ValueError(
            f"{hooks[0]!r} and {hooks[1]!r}: a run ends with one set of weights. Leave one out"
        )


def _check_saved_first(hooks: Sequence[Hook]) -> None:
    """Raise if a hook requeues a job that no hook before it saves completely."""
    for n, hook in enumerate(hooks):
        saving = (other for other in hooks[:n] if isinstance(other, checkpoint))
        if isinstance(hook, requeue) and not any(other.parts == PARTS for other in saving):
            raise ValueError(
                "requeue() saves nothing by itself, so each job would start from zero: list "
                "checkpoint(folder) before it, of all parts"
            )


def _check_inspected(hook: Hook) -> None:
    """Raise if a hook has its one call at the first update, but works only after an evaluation."""
    inner = unwrap_hook(hook)
    if not inner.wants_outputs:
        return
    for layer in layers(hook):
        if isinstance(layer, ConditionalHook):
            return
        if isinstance(layer, once):
            raise ValueError(
                f"{layer!r} would have its one call at the first update, where nothing is "
                f"evaluated: write every(epochs=1)({layer!r})"
            )
