"""Metrics that hooks monitor: whether they exist, and whether lower or higher values are better."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fnloop._core.events import RECORD
from fnloop._display.checks import describe

__all__ = [
    "better",
    "check_evaluated",
    "check_loaders",
    "check_monitored",
    "check_names",
    "metrics_here",
    "mode_by_name",
    "mode_of",
    "suggestion",
]

FALLING, RISING = ("loss", "error"), ("acc", "f1", "auc", "auroc", "precision", "recall")


def better(value: float, than: float, mode: str) -> bool:
    """Return whether a value is strictly better than another. NaN is worse than anything.

    Args:
        value, than: the two.
        mode: "min" or "max".

    Raises:
        ValueError: the mode is something else.

    Example:
        >>> better(1.0, 2.0, "min"), better(math.nan, math.inf, "min")
        (True, False)
    """
    if not isinstance(mode, str) or mode not in ("min", "max"):
        raise ValueError(
            'mode expects "min" (lower is better) or "max" (higher is better); '
            f"got {describe(mode)}"
        )
    if math.isnan(value):
        return False
    return math.isnan(than) or (value < than if mode == "min" else value > than)


def mode_by_name(key: str) -> str | None:
    """Return the mode that the name of a metric suggests, "min" or "max"; None if neither or both.

    Example:
        >>> mode_by_name("valid/loss"), mode_by_name("loss/Accuracy"), mode_by_name("valid/bleu")
        ('min', 'max', None)
    """
    name = key.split("/", 1)[-1].lower()
    falls, rises = (any(word in name for word in words) for words in (FALLING, RISING))
    return None if falls == rises else "min" if falls else "max"


def mode_of(owner: str, key: str, mode: str | None) -> str:
    """Return the given mode, or the one that the name of the metric suggests.

    Args:
        owner: the name of the hook, for messages.
        key: the metric.
        mode: "min", "max", or None.

    Raises:
        ValueError: it is something else; or it is None and the name suggests no mode.

    Example:
        >>> mode_of("early_stop", "valid/loss", None), mode_of("early_stop", "valid/bleu", "max")
        ('min', 'max')
    """
    if mode is not None:
        better(0.0, 0.0, mode)  # raises if it is not a mode
        return mode
    if (found := mode_by_name(key)) is None:
        raise ValueError(
            f'{owner}("{key}"): the name does not say whether lower or higher values are better: '
            'write mode="min" or mode="max"'
        )
    return found


class Watcher(Protocol):
    """What watches metrics, and reports some: a hook."""

    monitors: str | tuple[str, ...] | None
    reports: tuple[str, ...]


def check_names(
    hooks: Iterable[Watcher], known: Sequence[str], given: Collection[str] = ()
) -> None:
    """Raise if a hook monitors a metric of a loader that is never read.

    Args:
        hooks: all hooks of a run, including those in wrappers.
        known: what names of metrics may begin with: "train", the loaders that are evaluated, and
            "recent" in a run with ``record_every``.
        given: the loaders that the run was given, evaluated or not.

    Raises:
        KeyError: there is no such loader; the message lists the known ones and suggests the nearest
            name.
    """
    hooks = [*hooks]
    reported = {name for hook in hooks for name in hook.reports}
    watched = [(hook, key) for hook in hooks for key in keys_of(hook) if key not in reported]
    for hook, key in watched:
        loader, _, metric = key.partition("/")
        if metric and loader in known:
            continue
        if metric and loader == "recent":
            raise KeyError(
                f"{watcher_name(hook)}: this run does not make metrics such as {key!r}: pass "
                "record_every=every(steps=...) to fit"
            )
        if metric and loader in given:
            raise KeyError(
                f"{watcher_name(hook)}: this run never makes {key!r}, because evaluate_every says "
                f"None for the loader {loader!r}: give it a moment, such as every(epochs=1)"
            )
        candidates = [f"{name}/{rest}" for name in known for rest in (metric or key, "loss")]
        raise KeyError(
            f"{watcher_name(hook)}: there is no metric {key!r}: its first part is not the name of "
            f"a loader that this run trains on or evaluates; those are: {', '.join(known)}"
            f"{suggestion(key, candidates, 0.5)}"
        )


def keys_of(hook: Watcher) -> tuple[str, ...]:
    """Return the metrics that a hook watches."""
    found = hook.monitors
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def watcher_name(hook: object) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def check_evaluated(owner: str, key: str, names: Collection[str]) -> None:
    """Raise unless an evaluation makes a metric, before there is any.

    Args:
        owner: what watches the metric, for messages.
        key: the metric, "valid/accuracy".
        names: the names of all metrics of its loader, or what they begin with: a metric of several
            values has their names after its own.

    Raises:
        KeyError: it does not; the message says what does.
    """
    loader, _, metric = key.partition("/")
    if metric in names or any(metric.startswith(f"{name}/") for name in names):
        return
    made = [f"{loader}/{name}" for name in names]
    advice = ""
    if metric.isidentifier():
        advice = f". To add it, list metric({metric}=fn) in the pipeline, fn(aux, batch) -> scalar"
    raise KeyError(
        f"{owner}: there is no metric {key!r}: this pipeline evaluates {', '.join(made)}{advice}"
        f"{_suggestion(key, made)}"
    )


def check_loaders(owner: str, wanted: Iterable[str], loaders: Sequence[str]) -> None:
    """Raise if something is for a loader that a run does not have.

    Args:
        owner: what is for these loaders, for messages.
        wanted: the names of the loaders.
        loaders: the names of those that the run has.

    Raises:
        KeyError: one of them is missing; the message lists those that there are.
    """
    for name in wanted:
        if name not in loaders:
            raise KeyError(
                f"{owner}: this run has no loader {name!r}; those are: {', '.join(loaders)}"
                f"{suggestion(name, loaders)}"
            )


def metrics_here(state: Any) -> Mapping[str, float]:
    """Return the metrics that were recorded at the newest boundary of a state; none, if none was.

    There are two records if the boundary had one, and the run ended there and evaluated the rest.
    """
    if RECORD not in state.events:
        return {}
    newest = state.history[-1]
    before = state.history[-2] if newest.closing and len(state.history) > 1 else newest
    if before.step != newest.step or before.closing:
        return newest.metrics
    return {**before.metrics, **newest.metrics}


def check_monitored(owner: str, key: str, state: Any) -> bool:
    """Return whether the newest record has a metric.

    Args:
        owner: the name of the hook, for messages.
        key: the metric.
        state: a state whose newest boundary added a record.

    Raises:
        KeyError: the record has other metrics of the same loader, and no record has this one. The
            message lists those of the newest record.
    """
    metrics: Mapping[str, float] = state.history[-1].metrics
    if key in metrics:
        return True
    loader = key.partition("/")[0]
    if any(name.startswith(f"{loader}/") for name in metrics) and key not in state.history:
        raise KeyError(
            f"{owner}: there is no metric {key!r}; there are: {', '.join(metrics)}"
            f"{_suggestion(key, metrics)}"
        )
    return False


def _suggestion(key: str, metrics: Collection[str]) -> str:
    """Return the question for the nearest metric, or how to get this one if it is of an average."""
    near = suggestion(key, metrics)
    loader, name, rest = (*key.split("/", 2), "", "")[:3]
    beside = f"{loader}/{rest}"
    if beside not in metrics or near not in ("", suggestion(key, [beside], 0)):
        return near  # there is an average, and its name is misspelled
    return (
        f'. An average reports it beside "{beside}" if the pipeline has ema(name="{name}"), '
        "evaluated beside the model"
    )


def suggestion(key: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question for the nearest name, or an empty str if none is near."""
    near = difflib.get_close_matches(key, [*names], 1, cutoff)
    return f". Did you mean {near[0]!r}?" if near else ""
