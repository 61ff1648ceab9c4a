"""Metrics that are watched: whether a run makes them, which is known before its first update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from fnloop._core.history import History
from fnloop._core.records import Record
from fnloop._step.pipeline import PipelineStep
from fnloop.extend import checks


def check_watched(
    watched: Sequence[tuple[str, str, bool]],
    step: PipelineStep,
    known: Sequence[str],
    given: Collection[str],
    evaluated: Collection[str],
    history: History,
    models: Sequence[str],
) -> None:
    """Raise for a metric that is watched, and that a run does not have.

    Args:
        watched: who watches which metric, without those that a hook reports; and whether nothing
            may add it that says no names.
        step: the step.
        known: what names of metrics may begin with: "train", the loaders that are evaluated, and
            "recent" in a run with ``record_every``.
        given: the loaders that the run was given, evaluated or not.
        evaluated: the names of the loaders that are evaluated.
        history: the records so far. What is in one of them may come from an earlier run.
        models: the names of the models of a stack.

    Raises:
        KeyError: there will be no such metric; the message says what to list.
    """
    _check_names(watched, known, given)
    for owner, key, is_certain in watched:
        loader, _, name = key.partition("/")
        is_read = loader in Record.TRAINED or loader in evaluated
        if not is_certain or not name or not is_read or key in history:
            continue
        if (names := _names_of(step, loader)) is not None:
            _check_made(owner, key, names, _names_of_models(step, names, models))


def _check_names(
    watched: Iterable[tuple[str, str, bool]], known: Sequence[str], given: Collection[str] = ()
) -> None:
    """Raise if a metric is watched of a loader that is never read.

    Args:
        watched: who watches which metric, without those that a hook reports.
        known: what names of metrics may begin with: "train", the loaders that are evaluated, and
            "recent" in a run with ``record_every``.
        given: the loaders that the run was given, evaluated or not.

    Raises:
        KeyError: there is no such loader; the message lists the known ones and suggests the nearest
            name.
    """
    for owner, key, _ in watched:
        loader, _, metric = key.partition("/")
        if metric and loader in known:
            continue
        if metric and loader == "recent":
            raise KeyError(
                f"{owner}: this run does not make metrics such as {key!r}: pass "
                "record_every=every(steps=...) to fit"
            )
        if metric and loader in given:
            raise KeyError(
                f"{owner}: this run never makes {key!r}, because evaluate_every says "
                f"None for the loader {loader!r}: give it a moment, such as every(epochs=1)"
            )
        candidates = [f"{name}/{rest}" for name in known for rest in (metric or key, "loss")]
        raise KeyError(
            f"{owner}: there is no metric {key!r}: its first part is not the name of "
            f"a loader that this run trains on or evaluates; those are: {', '.join(known)}"
            f"{checks.suggestion(key, candidates, 0.5)}"
        )


def _check_made(
    owner: str,
    key: str,
    names: Collection[str],
    of_models: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise unless training, or an evaluation, makes a metric, before there is any.

    Args:
        owner: what watches the metric, for messages.
        key: the metric, "valid/accuracy".
        names: the names of all metrics of training, or of its loader, or what they begin with: a
            metric of several values has their names after its own.
        of_models: of those that each model of a stack has, what they are called there.

    Raises:
        KeyError: it does not; the message says what does.
    """
    loader, _, metric = key.partition("/")
    named = [name for each in dict.fromkeys(names) for name in of_models.get(each, (each,))]
    if any(metric == name or metric.startswith(f"{name}/") for name in named):
        return
    if own := of_models.get(metric):
        raise KeyError(
            f"{owner}: there is no metric {key!r}, because this state is a stack, in which each "
            f"model has its own: {checks.join_names([f'{loader}/{name}' for name in own])}"
        )
    made = [f"{loader}/{name}" for name in named]
    makes = "reports" if loader in Record.TRAINED else "evaluates"
    alone = metric.partition("/")[2] if of_models else metric
    advice = ""
    if alone.isidentifier() and alone not in names:
        advice = f". To add it, list metric({alone}=fn) in the pipeline, fn(aux, batch) -> scalar"
    raise KeyError(
        f"{owner}: there is no metric {key!r}: this pipeline {makes} "
        f"{checks.join_names(made, 6 if of_models else len(made))}{advice}"
        f"{hint(key, made)}"
    )


def _names_of_models(
    step: PipelineStep, names: Sequence[str], models: Sequence[str]
) -> dict[str, list[str]]:
    """Return what the metrics of one model are called in a stack of several.

    Args:
        step: the step.
        names: the names of the metrics of one model.
        models: the names of the models; none: there is no stack.

    Returns:
        By name, those of all models: "a/loss", and "lr/a" for a setting. What all models have in
        common, such as times, is not there.
    """
    of_all = {
        *Record.COSTS,
        *(name for member in step.pipeline.middleware for name in member.passes),
    }
    settings = {"lr"}
    for member in step.pipeline.middleware:
        if member.step is not None:
            settings.update(member.adds or ())
    return {
        name: [f"{name}/{each}" if name in settings else f"{each}/{name}" for each in models]
        for name in names
        if models and name.partition("/")[0] not in of_all
    }


def _names_of(step: PipelineStep, loader: str) -> list[str] | None:
    """Return the names of the metrics of training, or of a loader; None if they are not known."""
    if not step.has_all_rings:
        return None
    trained = loader in Record.TRAINED
    rings = {"forward", "evaluation"}
    names, views = ["loss", *(["lr"] if trained else [])], [""]
    for member in step.pipeline.middleware:
        if member.view is not None and member.view.beside and not trained:
            views.append(f"{member.name}/")
        acts = member.wraps.keys() - {"evaluation"} if trained else member.wraps.keys() & rings
        if not acts and member.report is None:
            continue
        if member.adds is None:
            return None
        if trained:
            names += (*member.adds, *member.passes)
        elif not member.loaders or loader in member.loaders:
            names += member.adds
    names = [f"{view}{name}" for view in views for name in names]
    return [*names, "time/evaluate"] if step.is_timed and not trained else names


def hint(key: str, metrics: Collection[str]) -> str:
    """Return the question for the nearest metric, or how to get this one if it is of an average."""
    loader, name, rest = (*key.split("/", 2), "", "")[:3]
    own = f"{loader}/"
    alike = [each.removeprefix(own) for each in metrics if each.startswith(own)]
    near = checks.suggestion(key.removeprefix(own), alike, of=own)
    beside = f"{loader}/{rest}"
    if beside not in metrics or near not in ("", checks.suggestion(key, [beside], 0)):
        return near  # there is an average, and its name is misspelled
    return (
        f'. An average reports it beside "{beside}" if the pipeline has ema(name="{name}"), '
        "evaluated beside the model"
    )
