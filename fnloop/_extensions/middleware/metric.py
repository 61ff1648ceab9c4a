"""Numbers in reports: metrics, numbers that follow from others, times and memory."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from fnloop._core.metrics import (
    COLLECTION_HINT,
    RECENT,
    Elapsed,
    Mark,
    Mean,
    Peak,
    Reduced,
    from_torchmetrics,
    mark,
    names_in,
    to_accumulator_dtype,
    weighted,
)
from fnloop._core.saved import Pending
from fnloop._core.several import Several
from fnloop._core.state import TrainState
from fnloop._core.types import Aux, Middleware, Output, Step, collection_key, middleware
from fnloop._display.screen import warn_once
from fnloop._step.forward import items_in
from fnloop._step.update import MissingNumberError, Numbers
from fnloop.extend import Batch, Metric, Wrap, checks, containers, name_of, report, then, with_slot

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
    several = any(collection_key(each) is not None for each in functions.values())
    return tuple(functions) if shared is None and not several else None


def unseen_metrics(members: Iterable[Middleware], read: Mapping[str, object]) -> dict[str, Metric]:
    """Return metrics by name, before any batch: those of torchmetrics that training reports.

    And the times of a checkpoint, whatever measured them.

    Args:
        members: the middleware of a step.
        read: the metrics of a checkpoint, as far as they are known, by name.
    """
    times: dict[str, Metric] = {
        name.removeprefix(RECENT): Elapsed(0.0, is_rate="throughput/" in name)
        for name, metric in read.items()
        if isinstance(metric, Pending) and metric.kind == "fnloop.Elapsed"
    }
    trained = [m for m in members if m.forward is not None or m.loss is not None]
    calls = [m.call for m in trained if m.call is not None and m.call.factory is metric]
    given = [(collection_key(each) or "", each) for call in calls for each in call.args]
    given += [named for call in calls for named in call.kwargs.items()]
    functions = {name: each for name, each in given if isinstance(each, from_torchmetrics)}
    return times | {name: function.unseen for name, function in functions.items()}


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
    if (key := collection_key(value)) is not None:
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
    if not isinstance(metric, Reduced):
        return metric
    values = checks.fields_of(metric, metric.reductions).values()
    own = [v.detach().clone() if isinstance(v, Tensor) else v for v in values]
    return type(metric)(*own).to_accumulator()


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
        return Mean(weighted(value, weight), to_accumulator_dtype(weight))
    if isinstance(value, Reduced) or checks.has_methods(value, "combine", "compute"):
        return _detach(value)
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

    def report(loader: str | None, numbers: Mapping[str, float]) -> Mapping[str, float]:
        __tracebackhide__ = True
        known = numbers if isinstance(numbers, Numbers) else Numbers(loader, numbers)
        found: dict[str, float] = {}
        waiting: dict[str, str] = {}  # a name that was looked up in vain, and by which function
        for name, function in functions.items():
            if name in waiting:
                raise ValueError(
                    f"derive: {waiting[name]!r} looks up {name!r}, which is listed after it: write "
                    f"derive({name}=..., {waiting[name]}=...)"
                )
            try:
                value = _apply(function, known)
                found[name] = checks.as_number(f"derive: the value of {name!r}", value)
            except MissingNumberError as error:
                waiting.setdefault(error.name, name)
                continue
            except Exception as error:
                of = f", for {loader}" if loader else ""
                error.add_note(f"while in the derived metric {name!r}{of}")
                raise
            known.setdefault(name, found[name])
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


def _apply(function: Callable[[Mapping[str, float]], object], numbers: Numbers) -> object:
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


# --------------------------------------------------------------------------------------------------
# How long updates, data and evaluations take, and how much is trained in a second.


@middleware("step")
def timings() -> Middleware:
    """Measure times, in seconds: "time/data", "time/step" and "time/evaluate".

    "time/data" is the mean time that an update waited for its batches, "time/step" the mean time of
    an update without this: on a GPU by CUDA events, which are read when a record is made.
    "time/evaluate" is the time of an evaluation, in the record that it made
    (``history["valid/time/evaluate"]``). List it last, so that it measures all other middleware.

    With several processes the means are over all of them, and "time/evaluate" is the longest. A
    bare step has no "time/data". Skipped updates do not count. Where one fetch is for several
    updates (``tbptt``, ``alternate``), the time that it took is that of the first of them.

    Returns:
        A middleware of the step ring.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(timings())(toy_loss)
        >>> state = fl.fit(step, toy(), ([torch.ones(1)] * 3, [torch.ones(1)]), hooks=())
        >>> [name for name in state.history.keys() if "time" in name]
        ['train/time/step', 'train/time/data', 'valid/time/evaluate']

    Replaces: fastnlp.TimerCallback
    """

    def wrap(step: Step) -> Step:
        def timed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            start = mark(state.backend.device)
            new, out = step(state, batch)
            times: dict[str, Metric] = {"time/step": _elapsed(1, start, mark(state.backend.device))}
            if state.run is not None:
                times["time/data"] = Elapsed(1, state.run.live.stopwatch.waited)
            return new, report(out, times, "timings")

        return timed

    return Middleware("timings", step=wrap, adds=("time",), traits=("timed", "stacks"))


@middleware("step")
def throughput(
    of: str = "samples", *, flops: float | str | None = None, peak: float | None = None
) -> Middleware:
    """Measure the samples per second of all processes together: "throughput/samples".

    A second of training is one in which an update runs or waits for its batches; evaluations do not
    count. On a GPU it is measured by CUDA events, which are read when a record is made, and a hook
    that holds the device up counts. Skipped updates do not count. List it last.

    Args:
        of: "samples", the leading dimension of the batches, with ``tbptt`` that of each window; or
            "weight", the items that the loss is the mean of, such as tokens ("throughput/weight").
        flops: floating point operations that one sample (or one item of weight) takes in forward
            and backward. Given with ``peak``, "throughput/mfu" is the model FLOPs utilization. Or
            "count": torch's ``FlopCounterMode`` counts those of matrix products, convolutions and
            attention in the first update, and they are divided by its samples, or items. Where it
            has none of them, a warning says so, and the utilization is NaN.
        peak: floating point operations per second of one device.

    Returns:
        A middleware of the loss and the step ring. With ``flops="count"`` it keeps the number in a
        slot, ``state.slots["throughput/samples"]``, 0 before it is known.

    Raises:
        ValueError: ``of`` is something else, ``flops`` or ``peak`` is not a number above 0, or one
            of the two is missing.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(throughput())(toy_loss)
        >>> state = fl.fit(step, toy(), [torch.ones(32)] * 3, hooks=())
        >>> state.history.latest("train/throughput/samples") > 0
        True

    Source: Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, for the utilization.

    Replaces: lightning.ThroughputMonitor
    """
    checks.choice("throughput", "of", of, ("samples", "weight"))
    if (flops is None) != (peak is None):
        raise ValueError(
            "throughput expects flops, of one sample or item, and peak, of one device in a second, "
            f"together; got flops={flops}, peak={peak}"
        )
    name, counts = f"throughput/{of}", flops == "count"
    if peak is not None:
        if not counts:
            meaning = 'operations per sample or item, or "count"'
            checks.number("throughput", "flops", flops, meaning, above=0)
        checks.number("throughput", "peak", peak, "operations of a device in a second", above=0)

    def wrap(step: Step) -> Step:
        def timed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            start, processes = mark(state.backend.device), state.backend.contributors
            each = cast(float, state.slots[name] if counts else flops)
            if each == 0:
                new, out = _counting_flops(step, state, batch, name)
                each = cast(float, new.slots[name])
            else:
                new, out = step(state, batch)
            trained = out.metrics.get(name, Elapsed(0, is_rate=True))
            assert isinstance(trained, Elapsed)
            spent = _training_time(state, start)
            # The seconds of all processes are added up.
            found: dict[str, Metric] = {name: _scaled(trained, processes).combine(spent)}
            if peak is not None:  # the share of a device that one sample in a second takes
                found["throughput/mfu"] = _scaled(trained, each / peak).combine(spent)
            rest = {other: metric for other, metric in out.metrics.items() if other != name}
            return new, report(attrs.evolve(out, metrics=rest), found, "throughput")

        return timed

    init = (lambda state: 0.0) if counts else None
    return Middleware(
        name,
        loss=_counting(of, name),
        step=wrap,
        init=init,
        adds=("throughput",),
        traits=("stacks",),
    )


def _counting_flops(
    step: Step, state: TrainState, batch: Batch, name: str
) -> tuple[TrainState, Output]:
    """Make an update, and keep in a slot how many operations each of its items took."""
    __tracebackhide__ = True
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        new, out = step(state, batch)
    trained = out.metrics.get(name)
    if not isinstance(trained, Elapsed):  # the update was left out
        return new, out
    # A host read, once: of how many items the update had.
    operations, items = counter.get_total_flops(), float(trained.amount)
    if not operations:
        warn_once(
            'throughput(flops="count"): torch counts matrix products, convolutions and attention, '
            "and the first update had none of them. Give the operations of one sample: flops=..."
        )
    each = operations / items if operations and items else math.nan
    return (with_slot(new, name, each) if items else new), out


def _counting(of: str, name: str) -> Wrap:
    """Return the wrap that counts what a batch has, in training."""

    def wrap(step: Step) -> Step:
        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            amount = state.backend.own_part(_samples_in(batch)) if of == "samples" else out.weight
            if isinstance(amount, Tensor):
                amount = to_accumulator_dtype(amount)
            return state, report(out, {name: Elapsed(amount, is_rate=True)}, "throughput")

        return counted

    return wrap


def _scaled(trained: Elapsed, factor: float) -> Elapsed:
    return trained if factor == 1 else attrs.evolve(trained, amount=trained.amount * factor)


def _training_time(state: TrainState, start: Mark) -> Elapsed:
    """Return the time of the update that began at a mark, with the time that its data took.

    On a GPU it is the time since the end of the update before, during which the device may have
    been idle; unless there was an evaluation in between.
    """
    end = mark(state.backend.device)
    if state.run is None:
        return _elapsed(0, start, end, is_rate=True)
    watch = state.run.live.stopwatch
    before, watch.newest = watch.newest, end
    if before is None or isinstance(end, float):
        return _elapsed(0, start, end, more=watch.waited, is_rate=True)
    return _elapsed(0, before, end, is_rate=True)


def _samples_in(batch: Batch) -> int:
    try:
        return items_in(batch, "throughput")
    except ValueError as error:
        raise ValueError(
            'throughput(of="samples") counts the leading dimension of the tensors of a batch, and '
            'there is not one: write throughput(of="weight"), which counts aux["weight"]'
        ) from error


# --------------------------------------------------------------------------------------------------
# How much memory a run takes.

NAME, GIB = "memory/peak_gib", 1 << 30


@middleware("step")
def device_memory() -> Middleware:
    """Report the peak memory use, in GiB: "memory/peak_gib".

    On a GPU it is the peak of torch's allocations since the previous record, including the
    evaluation of that record. Every record resets the peak that torch keeps
    (``torch.cuda.max_memory_allocated``). On the CPU it is the peak of the resident memory of the
    process, which cannot be reset. Nothing waits for the device. With several processes it is the
    largest of all.

    Returns:
        A middleware of the step ring.

    Raises:
        RuntimeError: at the first update: the model is on the CPU of a system that does not tell.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(device_memory())(toy_loss)
        >>> state = fl.fit(step, toy(), [torch.ones(1)] * 3, hooks=())
        >>> 0 < state.history.latest("train/memory/peak_gib") < 100
        True

    Replaces: lightning.DeviceStatsMonitor
    """

    def wrap(step: Step) -> Step:
        def measured(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            device = state.backend.device
            if state.run is not None and state.run.live.stopwatch.recorded:
                state.run.live.stopwatch.recorded = False
                running: object = state.metrics.get(NAME)
                if isinstance(running, Peak):
                    running.compute()  # keeps the peak until now
                _reset(device)
            new, out = step(state, batch)
            return new, report(out, {NAME: Peak(_gauge(device))}, "device_memory")

        return measured

    return Middleware("device_memory", step=wrap, adds=(NAME,))


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@functools.cache
def _gauge(device: torch.device) -> functools.partial[float]:
    return functools.partial(_peak_gib, device)


def _peak_gib(device: torch.device) -> float:
    """Return the peak in GiB; neither of them waits for the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        import resource
    except ImportError as error:
        raise RuntimeError(
            "device_memory: this system does not tell the memory of a process: leave it out"
        ) from error
    unit = 1 if sys.platform == "darwin" else 1024  # bytes or KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def _elapsed(
    amount: float | Tensor, start: Mark, end: Mark, *, more: float = 0.0, is_rate: bool = False
) -> Elapsed:
    """Return the seconds between two marks of one kind, and ``more``, by an amount."""
    if isinstance(start, int | float) and isinstance(end, int | float):
        return Elapsed(amount, end - start + more, (), is_rate)
    assert not isinstance(start, int | float) and not isinstance(end, int | float)
    return Elapsed(amount, more, ((start, end),), is_rate)
