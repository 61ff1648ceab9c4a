"""Numbers in reports: metrics, and numbers that follow from others."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fnloop._core.metrics import Mean
from fnloop._core.several import Several
from fnloop._core.state import TrainState
from fnloop._core.types import Aux, Middleware, Output, middleware
from fnloop._extensions.torchmetrics import COLLECTION_HINT, from_torchmetrics, names_in
from fnloop.extend import (
    Batch,
    Metric,
    MissingNumberError,
    Running,
    Wrap,
    checks,
    containers,
    name_of,
    report,
    then,
    warn_once,
)

# --------------------------------------------------------------------------------------------------
# Add metrics to the loss, in training, in evaluation, or both.

TRAIN = "train"
MOST_KEYS = 8  # of aux or of a batch, in a message
MetricFn = Callable[[Aux, Batch], object]
MEANING = "a function (aux, batch) -> scalar or Metric"
# Metrics whose value over all batches is not the mean of those of the batches.
NO_MEANS = {"f1", "f1_score", "auc", "auroc", "roc_auc", "average_precision", "r2", "r2_score"}


@middleware("forward")
def metric(
    shared: Callable[[Aux, Batch], object] | None = None,
    /,
    *,
    on: str = "both",
    loaders: Sequence[str] | None = None,
    **functions: Callable[[Aux, Batch], Tensor | Metric],
) -> Middleware:
    """Report metrics such as accuracy, in training and in evaluation: ``metric(accuracy=fn)``.

    Batches of different sizes are averaged exactly.

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
    adds = _known_names(shared, functions)
    if only is None:
        ring = {"both": "forward", "training": "loss", "evaluation": "evaluation"}[on]
        rings: dict[str, Any] = {ring: _measure(shared, functions)}
        return Middleware(name, **rings, adds=adds, check=_check_reported, traits=("stacks",))
    evaluated = tuple(loader for loader in only if loader != TRAIN)
    return Middleware(
        name,
        loss=_measure(shared, functions) if TRAIN in only else None,
        evaluation=_measure(shared, functions, evaluated) if evaluated else None,
        loaders=only,
        adds=adds,
        check=_check_reported,
        traits=("stacks",),
    )


def _known_names(shared: object, functions: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return the names of the metrics, unless a collection brings names of its own."""
    made = [each for each in functions.values() if isinstance(each, from_torchmetrics)]
    several = any(each.key is not None for each in made)
    return tuple(functions) if shared is None and not several else None


def unseen_metrics(members: Iterable[Middleware], read: object) -> dict[str, Metric]:
    """Return those of torchmetrics that training reports, before any batch, by name.

    Args:
        members: the middleware of a step.
        read: the classes of those that a checkpoint has, which says nothing here.
    """
    trained = [m for m in members if m.forward is not None or m.loss is not None]
    calls = [m.call for m in trained if m.call is not None and m.call.factory is metric]
    given = [("", each) for call in calls for each in call.args]
    given += [named for call in calls for named in call.kwargs.items()]
    functions = [(name, each) for name, each in given if isinstance(each, from_torchmetrics)]
    return {name or each.key or "": each.unseen for name, each in functions}


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
        _refuse_torchmetrics(name, function)
        checks.function("metric", name, function, MEANING, 2)
        _refuse_targets(name, function)


_OUTPUTS = {"output", "outputs", "pred", "preds", "prediction", "predictions", "logits", "y_pred"}
_TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "true"}


def _refuse_torchmetrics(name: str, function: object) -> None:
    """Raise if a metric of torchmetrics is given in the place of a function."""
    kinds = type(function).__mro__[:-1]
    if any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in kinds):
        raise TypeError(
            f"metric expects {name} as {MEANING}; got the torchmetrics {type(function).__name__}. "
            f"Write metric({name}=from_torchmetrics({name}, lambda aux, batch: "
            '(aux["output"], batch[1]))), and return loss, {"output": output} in the loss function'
        )


def _refuse_targets(name: str, function: Any) -> None:
    """Raise if the arguments of a function are named as an output and a target."""
    with contextlib.suppress(ValueError):  # a builtin without a signature
        first, second, *_ = [*inspect.signature(function).parameters, "", ""]
        if first in _OUTPUTS and second in _TARGETS:
            typed = checks.known_as(function)
            fn = typed if typed.isidentifier() else "fn"
            raise TypeError(
                f"metric expects {name} as {MEANING}; {typed} takes ({first}, {second}). Write "
                f'metric({name}=lambda aux, batch: {fn}(aux["output"], batch[1])), '
                'and return loss, {"output": output} in the loss function'
            )


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
    one_by_one: set[str] = set()  # metrics of a stack that are computed for each model alone

    def measure(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if only is not None and _is_for_another(state, only):
            return state, out
        with torch.no_grad():
            found: dict[str, Metric] = {}
            name = label
            try:  # a comprehension would add a frame to the traceback
                if isinstance(state.model, Several):
                    named = functions if shared is None else {label: shared, **functions}
                    for name, compute in named.items():
                        of = None if compute is shared else name
                        found |= _of_models(of, compute, out, batch, state.model, one_by_one)
                    return state, report(out, found, "metric")
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

    return then(measure)


def _of_models(
    name: str | None,
    compute: MetricFn,
    out: Output,
    batch: Batch,
    several: Several,
    one_by_one: set[str],
) -> dict[str, Metric]:
    """Return a metric of all models of a stack: computed at once if it is one tensor.

    Args:
        name: its name; None if it brings names of its own.
        compute: the function.
        out: the output of the loss function, for all models.
        batch: the batch.
        several: the models.
        one_by_one: the names of the metrics that are computed for one model after the other.
    """
    __tracebackhide__ = True
    if name is not None and name not in one_by_one:
        kept: list[object] = []

        def of_one(aux: Aux) -> object:
            __tracebackhide__ = True
            kept.append(compute(aux, batch))
            return kept[0] if isinstance(kept[0], Tensor) and kept[0].numel() == 1 else None

        try:
            values = several.call_each(of_one, out.aux, f"the metric {name!r}")
        except NotImplementedError:
            values = None
        if isinstance(values, Tensor):
            return {name: several.metric(name, values.flatten(), out.weight)}
        one_by_one.add(name)
    found: dict[str, Metric] = {}
    for i, model in enumerate(several.names):
        value = compute(_of_model(out.aux, i), batch)
        made = (
            _by_name("", value, out.weight)
            if name is None
            else {name: _to_metric(name, value, out.weight)}
        )
        found |= {f"{model}/{key}": each for key, each in made.items()}
    return found


def _of_model(aux: Aux, model: int) -> Aux:
    """Return one model's part of a value whose tensors have a first dimension for the models."""
    return containers.map_leaves(
        aux, lambda leaf: leaf[model] if isinstance(leaf, Tensor) else leaf
    )


def _explain_missing(error: KeyError, key: object, aux: Aux, batch: Batch) -> None:
    """Note in a KeyError what the metric was given, if that lacks the key."""
    of_batch = [*batch] if isinstance(batch, Mapping) else []
    if not isinstance(key, str) or key in aux or key in of_batch:
        return
    has = f"has {checks.join_names([*map(repr, aux)], MOST_KEYS)}" if aux else "is empty"
    value = key if key.isidentifier() else "..."
    also = (
        f". The batch has {checks.join_names([*map(repr, of_batch)], MOST_KEYS)}"
        if of_batch
        else ""
    )
    error.add_note(
        f"aux, which the loss function returns with the loss, {has}. To add {key!r}, write "
        f'return loss, {{"{key}": {value}}} there{checks.suggestion(key, [*map(str, aux)])}{also}'
    )


def _is_for_another(state: TrainState, only: tuple[str, ...]) -> bool:
    """Return whether the loader that is evaluated is known, and is none of these."""
    loader = None if state.run is None else state.run.loader
    return loader is not None and loader not in only


def _by_name(label: str, value: object, weight: float | Tensor) -> dict[str, Metric]:
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


def _to_metric(name: str, value: object, weight: float | Tensor) -> Metric:
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
        return Mean.of_batch(value, weight)
    if isinstance(value, Running):
        return value.owned()
    if checks.has_methods(value, "combine", "compute"):
        return cast(Metric, value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int | float):
        if name.lower() in NO_MEANS:
            warn_once(
                f"metric {name!r} is averaged over the batches, and the {name} of all of them is "
                f"another number: give it a metric that sees all, metric({name}=from_torchmetrics("
                "...)), or compute it from the outputs of an evaluation, inspect(fn)"
            )
        return Mean(value * weight, weight)
    raise TypeError(
        f"metric {name!r} must return a scalar tensor or a Metric such as Sum(value); got "
        f"{value!r:.60} ({type(value).__name__})"
    )


# --------------------------------------------------------------------------------------------------
# Two of them that report one name.


def _check_reported(listed: Sequence[Middleware]) -> None:
    """Raise ValueError if two are known to report one name, for one loader."""
    for a, b in itertools.combinations(listed, 2):
        mine, its = _names_of(a), _names_of(b)
        if (both := mine.keys() & its.keys()) and _loaders_meet(_loaders_of(a), _loaders_of(b)):
            name = min(both)
            raise ValueError(
                f"{a!r} and {b!r} both report {name!r}: rename one"
                f"{COLLECTION_HINT if mine[name] or its[name] else ''}"
            )


def _names_of(member: Middleware) -> dict[str, bool]:
    """Return the names that ``metric`` and ``derive`` were given: whether a collection has them."""
    if member.call is None or member.call.factory not in (metric, derive):
        return {}
    found = {name: True for shared in member.call.args for name in names_in(shared)}
    return found | {name: False for name, value in member.call.kwargs.items() if callable(value)}


def _loaders_of(member: Middleware) -> set[str]:
    """Return the names of the loaders that a middleware is for; "" is any that is evaluated."""
    if member.loaders:
        return {*member.loaders}
    if member.evaluation is not None or member.view is not None:
        return {""}
    return {"train"} if member.loss is not None else {"train", ""}


def _loaders_meet(a: set[str], b: set[str]) -> bool:
    return bool(a & b or ("" in a and b != {"train"}) or ("" in b and a != {"train"}))


# --------------------------------------------------------------------------------------------------
# Add numbers that follow from others to the reports of a run.


@middleware("step")
def derive(**functions: Callable[[Mapping[str, float]], float]) -> Middleware:
    """Compute metrics from other metrics, such as perplexity from the loss.

    They are computed when a record is made, for each loader from its own numbers, and never for a
    batch. A loader that lacks a number which a function needs is left out. If no loader of the run
    ever has it, the first record of all loaders raises an error. A bare ``evaluate`` leaves out
    what it cannot derive.

    Args:
        **functions: name to ``numbers -> number``. The numbers are a mapping without the loader's
            name: ``m["loss"]``; those that ``ema`` adds are ``m["ema/loss"]``. It also has what was
            derived before. An ArithmeticError, such as the OverflowError of ``math.exp(1000.0)``,
            and the logarithm of 0 give NaN.

    Returns:
        A middleware.

    Raises:
        TypeError: something is not a function of a mapping. At a report: a value is not a number.
        ValueError: no metric is given. When composing: another metric of the pipeline has the same
            name.
            At a report: a function looks up a number that is derived after it.
        KeyError: at a report: no loader has a number that a function looks up.

    Example:
        >>> import math
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(derive(perplexity=lambda m: math.exp(m["loss"])))(toy_loss)
        >>> state = fl.fit(step, toy(), ([torch.ones(2)], [torch.zeros(2)]), hooks=())
        >>> state.history["train/perplexity"], state.history["valid/perplexity"]
        ((1.0,), (1.0,))
    """
    if not functions:
        raise ValueError(
            "derive expects at least one name and function: "
            'derive(perplexity=lambda m: math.exp(m["loss"]))'
        )
    for name, function in functions.items():
        checks.own_metric_name("derive", name)
        checks.function("derive", name, function, "a function of numbers by name -> number", 1)

    def report(loader: str | None, numbers: dict[str, float]) -> Mapping[str, float]:
        __tracebackhide__ = True
        found: dict[str, float] = {}
        waiting: dict[str, str] = {}  # a name that was looked up in vain, and by which function
        for name, function in functions.items():
            if name in waiting:
                raise ValueError(
                    f"derive: {waiting[name]!r} looks up {name!r}, which is listed after it: write "
                    f"derive({name}=..., {waiting[name]}=...)"
                )
            try:
                value = _apply(function, numbers)
                found[name] = checks.as_number(f"derive: the value of {name!r}", value)
            except MissingNumberError as error:
                waiting.setdefault(error.name, name)
                continue
            except Exception as error:
                of = f", for {loader}" if loader else ""
                error.add_note(f"while in the derived metric {name!r}{of}")
                raise
            numbers.setdefault(name, found[name])
        return found

    return Middleware(
        f"derive({', '.join(functions)})",
        report=report,
        adds=tuple(functions),
        check=_check_reported,
    )


# What the functions of math say where they have no value, since Python 3.14 in many words.
_NO_VALUE = re.compile(
    "math domain error|expected (a (positive|nonnegative|finite|number|noninteger)|argument value) "
)


def _apply(
    function: Callable[[Mapping[str, float]], object], numbers: Mapping[str, float]
) -> object:
    """Call a function; NaN if there is no value, so that a long run does not end for it."""
    __tracebackhide__ = True
    try:
        return function(numbers)
    except ArithmeticError:
        return math.nan
    except ValueError as error:
        if _NO_VALUE.match(str(error)):
            return math.nan
        raise
