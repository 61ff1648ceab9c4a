"""The names of metrics that hooks watch: whether there are such, and whether lower or higher values are better."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fnloop._display.checks import described

__all__ = ["better", "check_monitored", "check_names", "mode_by_name", "mode_of"]

FALLING, RISING = ("loss", "error"), ("acc", "f1", "auc", "auroc", "precision", "recall")


def better(value: float, than: float, mode: str) -> bool:
    """Return whether a value is strictly better; NaN is worse than anything.

    Args:
        value, than: the two.
        mode: "min" or "max".

    Example:
        >>> better(1.0, 2.0, "min"), better(math.nan, math.inf, "min"), better(math.inf, math.nan, "min")
        (True, False, True)
    """
    if not isinstance(mode, str) or mode not in ("min", "max"):
        raise ValueError(
            f'mode expects "min" (lower is better) or "max" (higher is better); got {described(mode)}'
        )
    if math.isnan(value):
        return False
    return math.isnan(than) or (value < than if mode == "min" else value > than)


def mode_by_name(key: str) -> str | None:
    """Return "min" or "max", whichever the name of a metric says, after that of its loader; None if it says nothing, or both.

    Example:
        >>> mode_by_name("valid/loss"), mode_by_name("loss/Accuracy"), mode_by_name("valid/bleu")
        ('min', 'max', None)
    """
    name = key.split("/", 1)[-1].lower()
    falls, rises = (any(word in name for word in words) for words in (FALLING, RISING))
    return None if falls == rises else "min" if falls else "max"


def mode_of(owner: str, key: str, mode: str | None) -> str:
    """Return "min" or "max": the mode that was given, or by the name of the metric.

    Args:
        owner: the hook, as it is called in messages.
        key: the metric.
        mode: what was typed.

    Raises:
        ValueError: it is neither "min", "max" nor None; or it is None and the name does not say it.

    Example:
        >>> mode_of("early_stop", "valid/accuracy", None), mode_of("early_stop", "valid/bleu", "max")
        ('max', 'max')
    """
    if mode is not None:
        better(0.0, 0.0, mode)  # checks it
        return mode
    if (found := mode_by_name(key)) is None:
        raise ValueError(
            f'{owner}("{key}"): the name does not say whether lower or higher values are better: write mode="min" or mode="max"'
        )
    return found


def check_names(hooks: Iterable[Any], loaders: Sequence[str]) -> None:
    """Raise if a hook monitors a metric of a loader that is never read.

    Args:
        hooks: all hooks of a run, also those in wrappers. A hook may have two attributes: ``monitors``, the name of the metric
            that it watches, or None; and ``reports``, the names of the metrics that it adds to records.
        loaders: the names of the loaders that are evaluated.

    Raises:
        KeyError: there is no such loader; the message says what was typed, which loaders there are, and the nearest name.
    """
    hooks = [*hooks]
    reported = {name for hook in hooks for name in getattr(hook, "reports", ())}
    for hook in hooks:
        key = getattr(hook, "monitors", None)
        if key is None or key in reported:
            continue
        loader, _, metric = key.partition("/")
        if metric and loader in ("train", "recent", *loaders):
            continue
        known = ("train", *loaders)
        near = difflib.get_close_matches(
            key, [f"{name}/{rest}" for name in known for rest in (metric or key, "loss")], 1, 0.5
        )
        owner = getattr(hook, "__name__", type(hook).__name__)
        raise KeyError(
            f"{owner}: there is no metric {key!r}: its first part is not the name of a loader that this run trains on or "
            f"evaluates; those are: {', '.join(known)}{f'. Did you mean {near[0]!r}?' if near else ''}"
        )


def check_monitored(owner: str, key: str, state: Any) -> bool:
    """Return whether the newest record has a metric; raise if it has others of that loader, and none ever had this one.

    Args:
        owner: the hook, as it is called in messages.
        key: the metric.
        state: a state whose newest boundary has brought a record.

    Raises:
        KeyError: there is no such metric; the message lists those of the record.
    """
    metrics: Mapping[str, float] = state.history[-1].metrics
    if key in metrics:
        return True
    loader = key.partition("/")[0]
    if any(name.startswith(f"{loader}/") for name in metrics) and key not in state.history:
        near = difflib.get_close_matches(key, metrics, 1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise KeyError(
            f"{owner}: there is no metric {key!r}; there are: {', '.join(metrics)}{hint}"
        )
    return False
