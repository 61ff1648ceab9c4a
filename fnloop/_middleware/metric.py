"""Add metrics to the loss, in training, in evaluation, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._core.call import name_of
from fnloop._core.metrics import BUILTIN_METRICS, Mean, to_accumulator_dtype, weighted
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.monitor import suggestion
from fnloop._core.state import TrainState
from fnloop._core.torchmetrics import COLLECTION_HINT, from_torchmetrics, names_in
from fnloop._core.types import Aux, Batch, Metric, Output, Step, Wrap
from fnloop._display import checks
from fnloop._display.checks import join_names
from fnloop._step.update import report

__all__ = ["metric", "unseen_metrics"]

TRAIN = "train"
MOST_KEYS = 8  # of aux or of a batch, in a message
MetricFn = Callable[[Aux, Batch], object]
MEANING = "a function (aux, batch) -> scalar or Metric"


@middleware("forward")
def metric(
    shared: Callable[[Aux, Batch], object] | None = None,
    /,
    *,
    on: str = "both",
    loaders: Sequence[str] | None = None,
    **functions: Callable[[Aux, Batch], Tensor | Metric],
) -> Middleware:
    """Add metrics to the loss; batches of different sizes are averaged exactly.

    Args:
        shared: one function for several metrics, which bring their own names:
            ``from_torchmetrics`` of a MetricCollection, or ``(aux, batch) -> {name: metric}``.
        on: "training", "evaluation" or "both".
        loaders: the names of the loaders that the metrics are for, such as ``("test",)``; "train"
            is the training loader. By default all. A bare ``evaluate`` knows no name: it computes
            all metrics that are for evaluation.
        **functions: name to ``(aux, batch) -> metric``, where aux is what the loss function
            returned. A scalar tensor, or one of a single element, is a mean over the batch, and is
            averaged with the batch's weight. A metric (``Sum``, ``Max``, one made by
            ``from_torchmetrics``, ...) is combined by its own rule. A metric cannot be named "on"
            or "loaders", unless ``shared`` names it.

    Returns:
        A middleware of the forward ring; on="training" and on="evaluation", of the loss ring or of
        the ring "evaluation".

    Raises:
        TypeError: a metric is not a function (aux, batch). At the first batch: its value is neither
            a scalar tensor nor a metric.
        ValueError: there is no metric, one is named "loss" or has an empty name, or ``on`` and
            ``loaders`` exclude each other.
        KeyError: when a run starts: it has no loader of a name in ``loaders``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(metric(output=lambda aux, batch: aux["output"].mean()))(toy_loss)
        >>> batches = [torch.tensor([1.0, 1.0]), torch.tensor([4.0])]
        >>> fl.evaluate(step, toy(w=2.0), batches)      # (2 + 2 + 8) / 3
        {'loss': 4.0, 'output': 4.0}
    """
    only = _check_loaders(on, loaders)
    _check_functions(shared, functions)
    names = [*([] if shared is None else [_label(shared)]), *functions]
    settings = [f"on={on!r}"] * (on != "both") + [f"loaders={only!r}"] * (only is not None)
    name = f"metric({', '.join(names + settings)})"
    if only is None:
        ring = {"both": "forward", "training": "loss", "evaluation": "evaluation"}[on]
        rings: dict[str, Any] = {ring: _measure(shared, functions)}
        return Middleware(name, **rings)
    evaluated = tuple(loader for loader in only if loader != TRAIN)
    return Middleware(
        name,
        loss=_measure(shared, functions) if TRAIN in only else None,
        evaluation=_measure(shared, functions, evaluated) if evaluated else None,
        loaders=only,
    )


def unseen_metrics(members: Iterable[Middleware]) -> dict[str, Metric]:
    """Return the metrics of torchmetrics that training reports, by name, before any batch."""
    trained = [m for m in members if m.forward is not None or m.loss is not None]
    calls = [m.call for m in trained if m.call is not None and m.call.factory is metric]
    given = [(getattr(each, "key", None) or "", each) for call in calls for each in call.args]
    given += [named for call in calls for named in call.kwargs.items()]
    functions = {name: each for name, each in given if isinstance(each, from_torchmetrics)}
    return {name: function.unseen for name, function in functions.items()}


def _check_functions(shared: object, functions: Mapping[str, object]) -> None:
    if shared is None and not functions:
        raise ValueError(
            "metric expects at least one name and function: metric(accuracy=lambda aux, batch: ...)"
        )
    if shared is not None:
        meaning = (
            "from_torchmetrics(MetricCollection(...), inputs), or a function of metrics by name"
        )
        checks.function("metric", "its positional argument", shared, f"{meaning}, (aux, batch)", 2)
        if isinstance(shared, from_torchmetrics) and shared.key is None:
            raise TypeError(
                f"metric expects a name for {type(shared.metric).__name__}, which has none of its "
                "own: metric(name=from_torchmetrics(...)). Only a MetricCollection needs none"
            )
        if twice := functions.keys() & {*names_in(shared)}:
            raise ValueError(f"metric reports {min(twice)!r} twice: rename one{COLLECTION_HINT}")
    for name, function in functions.items():
        checks.own_metric_name("metric", name)
        checks.function("metric", name, function, MEANING, 2)


def _check_loaders(on: str, loaders: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the names of the loaders that metrics are for; None if they are for all."""
    hint = ". A metric cannot have this name" if callable(on) else ""
    checks.choice("metric", "on", on, ("both", "training", "evaluation"), hint)
    if loaders is None:
        return None
    expected = 'metric expects loaders as a tuple of names, such as ("test",)'
    if isinstance(loaders, str) or not isinstance(loaders, Sequence):
        hint = f'. Write loaders=("{loaders}",)' if isinstance(loaders, str) else ""
        hint = ". A metric cannot have this name" if callable(loaders) else hint
        raise TypeError(f"{expected}; got {checks.describe(loaders)}{hint}")
    if not loaders:
        raise ValueError(f"{expected}; got none, so the metrics would never be computed")
    for name in loaders:
        checks.text("metric", "loaders", name, "names")
    if on == "training":
        raise ValueError(
            'metric(on="training") is for the training loader alone: leave out loaders='
        )
    if on == "evaluation" and TRAIN in loaders:
        raise ValueError(
            'metric(on="evaluation") does not apply to the training loader: leave out on=, or '
            f'"{TRAIN}"'
        )
    return tuple(loaders)


def _label(shared: MetricFn) -> str:
    """Return the name of a function for several metrics."""
    return shared.key or "" if isinstance(shared, from_torchmetrics) else name_of(shared)


def _measure(
    shared: MetricFn | None,
    functions: Mapping[str, MetricFn],
    only: tuple[str, ...] | None = None,
) -> Wrap:
    """Return the wrap that adds metrics, for all loaders or for some."""
    label = "" if shared is None else _label(shared)

    def wrap(step: Step) -> Step:
        def measured(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is not None:
                return state, out
            if only is not None and _is_for_another(state, only):
                return state, out
            with torch.no_grad():
                found: dict[str, Metric] = {}
                name = label
                try:  # a comprehension would add a frame to the traceback
                    if shared is not None:
                        found = _by_name(name, shared(out.aux, batch), out.weight)
                        _check_names(found, functions)
                    for name, compute in functions.items():
                        found[name] = _to_metric(name, compute(out.aux, batch), out.weight)
                except Exception as error:
                    error.add_note(f"while in the metric {name!r}")
                    if isinstance(error, KeyError) and error.args:
                        _explain_missing(error, error.args[0], out.aux, batch)
                    raise
            return state, report(out, found, "metric")

        return measured

    return wrap


def _explain_missing(error: KeyError, key: object, aux: Aux, batch: Batch) -> None:
    """Note in a KeyError what the metric was given, if that lacks the key."""
    of_batch = [*batch] if isinstance(batch, Mapping) else []
    if not isinstance(key, str) or key in aux or key in of_batch:
        return
    has = f"has {join_names([*map(repr, aux)], MOST_KEYS)}" if aux else "is empty"
    value = key if key.isidentifier() else "..."
    also = f". The batch has {join_names([*map(repr, of_batch)], MOST_KEYS)}" if of_batch else ""
    error.add_note(
        f"aux, which the loss function returns with the loss, {has}. To add {key!r}, write "
        f'return loss, {{"{key}": {value}}} there{suggestion(key, [*map(str, aux)])}{also}'
    )


def _is_for_another(state: TrainState, only: tuple[str, ...]) -> bool:
    """Return whether the loader that is evaluated is known, and is none of these."""
    loader = None if state.run is None else state.run.loader
    return loader is not None and loader not in only


def _by_name(label: str, value: object, weight: int | Tensor) -> dict[str, Metric]:
    """Return the metrics that a function for several has returned, by name."""
    if isinstance(value, Mapping):
        return {name: _to_metric(name, part, weight) for name, part in value.items()}
    if (key := getattr(value, "key", None)) is not None:
        return {key: _to_metric(key, value, weight)}
    raise TypeError(
        f"{label} must return a mapping of names to metrics; got {checks.describe(value)}. A "
        "function of one metric needs a name: metric(name=...)"
    )


def _check_names(found: Mapping[str, Metric], others: Mapping[str, object]) -> None:
    for name in found:
        checks.own_metric_name("metric", name)
        if name in others:
            raise ValueError(f"metric reports {name!r} twice: choose another name")


def _detach(metric: Any) -> Metric:
    """Return a built-in metric that owns its tensors, without a graph, in an accumulator dtype."""
    if type(metric) not in BUILTIN_METRICS.values():
        return metric
    parts = {
        k: v.detach().clone()
        for k, v in attrs.asdict(metric, recurse=False).items()
        if isinstance(v, Tensor)
    }
    metric = attrs.evolve(metric, **parts) if parts else metric
    return metric.to_accumulator() if hasattr(metric, "to_accumulator") else metric


def _to_metric(name: str, value: object, weight: int | Tensor) -> Metric:
    if isinstance(value, Tensor):
        if value.ndim:
            if value.numel() != 1:
                raise TypeError(
                    f"metric {name!r} must be a scalar, the mean over the batch; got shape "
                    f"{tuple(value.shape)}: add .mean()"
                )
            value = value.reshape(())
        if value.is_complex():
            raise TypeError(
                f"metric {name!r} must be a real number; got {value.dtype}: return its .abs() or "
                ".real"
            )
        return Mean(weighted(value, weight), to_accumulator_dtype(weight))
    if hasattr(value, "combine") and hasattr(value, "compute"):
        return _detach(value)
    if isinstance(value, int | float):
        return Mean(value * weight, weight)
    raise TypeError(
        f"metric {name!r} must return a scalar tensor or a Metric such as Sum(value); got "
        f"{value!r:.60} ({type(value).__name__})"
    )
