"""States of models of one architecture, stacked into one state, and taken apart again."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from fnloop._core.history import History
from fnloop._core.metrics import Mean
from fnloop._core.optimizers import Optimizers
from fnloop._core.records import Record
from fnloop._core.several import models_of
from fnloop._core.state import (
    Ownership,
    TrainState,
    counted_of,
    snapshot,
)
from fnloop._extensions.histories.table import records_of_model
from fnloop._extensions.stacks.leaves import INSTEAD, check_architectures
from fnloop._extensions.stacks.module import PerModel, Stack
from fnloop._extensions.stacks.torch_compat import has_forward_hooks
from fnloop.extend import (
    Metric,
    check_not_stale,
    checks,
    containers,
    optimizers,
    torch_compat,
    wants_closure,
)

EXAMPLE = "such as fork(state, {'lr': [0.1, 0.01]})"
_RESERVED = ("lr", "recent", *Record.COSTS)  # what the names of numbers begin with after "train/"

# Where states are has to be the same, because a stack has it once.
_ALIKE = ("stop", "ends", "phases", "extra", "todo")


def stack(states: Mapping[str, TrainState]) -> TrainState:
    """Stack states of the same architecture into one: each step trains all of them at once.

    ``fit``, ``evaluate``, ``checkpoint`` and the others take it as any state. A step calls the loss
    function once for all models, by ``torch.func.vmap``: K small models take little longer than
    one. Each trains as it would alone, up to rounding, with the rates, the weight decay and all
    other numbers of its own optimizer. Records have the metrics of each model, "train/a/loss" and
    "valid/a/accuracy", and its rate, "train/lr/a". ``clip`` clips each model by its own norm.
    :func:`unstack` gives the states back.

    All models get the same batches, in the order of the seed of the first state. What they draw,
    such as for dropout, differs by their place in the stack.

    Args:
        states: name to state, as ``fork`` returns them. They stay as they are: the stack has copies
            of their models and optimizers.

    Returns:
        A state. ``state.model["a"]`` is the model of "a", ``state.optimizer["a"]`` its optimizer,
        which ``schedule(fn, only="a")`` names, too.

    Raises:
        TypeError: this is not a mapping from names to states.
        StaleStateError: a state has been advanced.
        ValueError: there is no state, or a name has a "/". The models are of different
            architectures, or the optimizers of different classes or for other parameters. The
            states are at different updates, or at one that they cannot have in common.
        NotImplementedError: there are several processes, a state has several optimizers or one that
            evaluates the loss by itself, hooks are around a module, or a middleware has kept
            something that is not the same for all. In a run: a middleware of the step does not work
            with a stack, or what the loss function does depends on the values of a tensor.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state = stack(fl.fork(toy(), {"lr": [1.0, 0.5]}))
        >>> state = fl.fit(fl.pipeline()(toy_loss), state, [torch.ones(1)] * 2, hooks=())
        >>> {name: state.model[name].w.item() for name in state.model}
        {'lr=1': -2.0, 'lr=0.5': -1.0}
        >>> state.history["train/lr=1/loss"], fl.unstack(state)["lr=1"].history["train/loss"]
        ((-0.5,), (-0.5,))

    Notes:
        Middleware that work with a stack are ``accumulate``, ``clip``, ``clip_value``,
        ``grad_norm``, ``schedule``, ``scheduled``, ``skip_nonfinite``, ``metric``,
        ``timings`` and ``throughput``. ``skip_nonfinite`` skips an update if it is bad for all
        models, and raises if it is bad for some: a stack has one ``state.step``. Without it, a
        model that diverges does not disturb the others.

        BatchNorm has its own statistics in each model. The updates of SGD, Adam and AdamW are
        computed for all models at once. Those of other optimizers are made one model after the
        other.
    """
    checks.mapping("stack", "states", states, EXAMPLE)
    if not states:
        raise ValueError(f"stack expects at least one state, {EXAMPLE}; got none")
    for name, state in states.items():
        _check_name(name)
        check_not_stale(state, "stack")
        _check_alone(name, state)
    _check_distinct(states)
    models = {name: state.model for name, state in states.items()}
    _check_modules(models)
    check_architectures(models)
    _check_optimizers(states)
    _check_alike(states)
    _check_slots(states)
    copies = {name: snapshot(state) for name, state in states.items()}
    return _made(
        next(iter(copies.values())),
        Stack({name: state.model for name, state in copies.items()}),
        Optimizers({name: state.optimizer for name, state in copies.items()}),
        _stack_metrics({name: state.metrics for name, state in copies.items()}),
        _stack_histories({name: state.history for name, state in copies.items()}),
    )


def unstack(state: TrainState) -> dict[str, TrainState]:
    """Return the states of a stack, each as if it had been trained alone.

    Their records have "train/loss" again. Each can be continued, saved, or stacked with others.

    Args:
        state: the newest state of a stack, as :func:`stack` made it. It stays as it is.

    Returns:
        Name to state, in the order of the stack. Each has the seed of the stack, so that it gets
        the same batches.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: it is not a state.
        ValueError: it is not the state of a stack.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, ones = fl.pipeline()(toy_loss), [torch.ones(1)] * 2
        >>> state = fl.fit(step, fl.stack({"a": toy(), "b": toy(w=5.0)}), ones, hooks=())
        >>> states = unstack(state)
        >>> fl.fit(step, states["b"], ones, epochs=2, hooks=()).model.w.item()
        1.0
    """
    check_not_stale(state, "unstack")
    names = models_of(state.model)
    if not names:
        raise ValueError(
            "unstack expects the state of a stack, as stack(states) makes it; the model of this "
            f"one is a {type(state.model).__name__}"
        )
    copied = snapshot(state)
    return {name: _taken_out(copied, i, name) for i, name in enumerate(names)}


def check_one_model(state: TrainState, owner: str) -> None:
    """Raise NotImplementedError if a state is that of a stack, which ``owner`` cannot work with."""
    if names := models_of(state.model):
        raise NotImplementedError(
            f"{owner} works with one model, and this state has {len(names)}: take one of them, "
            f"unstack(state)[{names[0]!r}]"
        )


def _taken_out(state: TrainState, place: int, name: str) -> TrainState:
    """Return the state of one model of a stack, whose copy is not used otherwise."""
    assert isinstance(state.model, Stack)
    return _made(
        state,
        state.model[name],
        state.optimizer[name],
        _metrics_of(state.metrics, place, name),
        History(records_of_model(state.history, name, state.model.names)),
    )


def _made(
    like: TrainState,
    model: nn.Module,
    optimizer: Optimizer | Optimizers,
    metrics: Mapping[str, Metric],
    history: History,
) -> TrainState:
    """Return a state of a run of its own, at the place of another one."""
    updates = dict.fromkeys(optimizer, like.step) if isinstance(optimizer, Optimizers) else {}
    made = TrainState(
        model, optimizer, seed=like.seed, run_id=secrets.token_hex(8), backend=like.backend,
        updates=updates, ownership=Ownership(),
    )  # fmt: skip
    kept = (
        *TrainState.PLACE,
        *_ALIKE,
        "events",
        "noted",
        "generators",
        "position",
        "saved_on",
        "slots",
    )
    return attrs.evolve(
        made,
        **{field: copy.deepcopy(value) for field, value in checks.fields_of(like, kept).items()},
        counted=counted_of(like),
        metrics=metrics,
        history=history,
    )


# --------------------------------------------------------------------------------------------------
# What can be stacked.


def _check_name(name: object) -> None:
    checks.text("stack", "a name in states", name, "that of a model")  # type: ignore[arg-type]
    text = str(name)
    if "/" in text or text in _RESERVED:
        raise ValueError(
            'stack expects names of models without "/", which separates the parts of a name such '
            f"as train/a/loss, and other ones than {', '.join(_RESERVED)}; got {name!r}"
        )


def _check_alone(name: str, state: TrainState) -> None:
    """Raise NotImplementedError if a state is not of one process and one optimizer."""
    if state.backend.world_size > 1 or state.backend.exact:
        what = "exact=True" if state.backend.exact else f"{state.backend.world_size} processes"
        raise NotImplementedError(
            f"stack works in one process, without exact=True, but the state {name!r} has {what}. "
            f"{INSTEAD}"
        )
    if state.backend.precision is not None:
        raise NotImplementedError(
            f"stack computes in the dtypes of the models, and accelerate is configured for "
            f"{state.backend.precision}: leave mixed_precision out. {INSTEAD}"
        )
    if type(state.model) is Stack:
        raise ValueError(f"stack: the state {name!r} is a stack already: unstack it first")
    if type(state.optimizer) is Optimizers:
        raise NotImplementedError(
            f"stack expects states with one optimizer, but {name!r} has several: "
            f"{', '.join(state.optimizer)}. {INSTEAD}"
        )
    kind = type(state.optimizer)
    if wants_closure(kind):
        raise NotImplementedError(
            f"stack: {kind.__name__}, the optimizer of {name!r}, evaluates the loss by itself, for "
            f"one model. {INSTEAD}"
        )


def _check_distinct(states: Mapping[str, TrainState]) -> None:
    """Raise ValueError if two states are one, or have a parameter in common."""
    owners: dict[int, str] = {}
    for name, state in states.items():
        for p in state.model.parameters():
            if (other := owners.setdefault(id(p), name)) != name:
                raise ValueError(
                    f"stack: the states {other!r} and {name!r} train the same parameters. Copy one "
                    "first: snapshot(state), or fork(state, settings)"
                )


def _check_optimizers(states: Mapping[str, TrainState]) -> None:
    """Raise ValueError unless the optimizers are of one class, over the same parameters."""
    (first_name, first), *others = states.items()
    known = _layout(first)
    for name, state in others:
        both = f"{first_name!r} and {name!r}"
        if type(state.optimizer) is not type(first.optimizer):
            kinds = f"{type(first.optimizer).__name__} and {type(state.optimizer).__name__}"
            raise ValueError(
                f"stack expects optimizers of one class, but those of {both} are {kinds}. {INSTEAD}"
            )
        if _layout(state) != known:
            raise ValueError(
                f"stack: the optimizers of {both} have other parameters in their groups. {INSTEAD}"
            )


def _layout(state: TrainState) -> list[list[str | None]]:
    """Return the names of the parameters of each group."""
    names = {id(p): name for name, p in state.model.named_parameters()}
    (only,) = optimizers(state).values()
    return [[names.get(id(p)) for p in group["params"]] for group in only.param_groups]


def _check_alike(states: Mapping[str, TrainState]) -> None:
    """Raise ValueError unless states are at the same place of the same run."""
    (first_name, first), *others = states.items()
    for name, state in others:
        known, found = (
            checks.fields_of(each, (*TrainState.PLACE, "items", *_ALIKE)) for each in (first, state)
        )
        for field in (*TrainState.PLACE, "items"):
            mine, its = known[field], found[field]
            if mine != its:
                what = "step" if field == "step" else f"step {first.step}, but {field}"
                raise ValueError(
                    f"stack expects states at the same update, because a stack has one "
                    f"state.step: {first_name!r} is at {what} {mine} and {name!r} at {its}. Train "
                    "them to the same one first: fit(..., steps=...)"
                )
        for field in _ALIKE:
            if known[field] != found[field]:
                raise ValueError(
                    f"stack expects states with the same {field}: that of {first_name!r} is "
                    f"{checks.describe(known[field])}, and that of {name!r} "
                    f"{checks.describe(found[field])}{_HINTS.get(field, '')}"
                )
        if state.batch and state.seed != first.seed:
            raise ValueError(
                f"stack: {first_name!r} and {name!r} are within an epoch, and their seeds, which "
                f"decide the order of the data, are {first.seed} and {state.seed}. Train them to "
                "the end of the epoch first"
            )
        if state.backend.device != first.backend.device:
            raise ValueError(
                f"stack expects states on one device: {first_name!r} is on "
                f"{first.backend.device} and {name!r} on {state.backend.device}"
            )


_HINTS = {
    "stop": ". To continue a run that was stopped: attrs.evolve(state, stop=None)",
    "extra": ". Make it the same: attrs.evolve(state, extra={})",
}


def _check_slots(states: Mapping[str, TrainState]) -> None:
    """Raise NotImplementedError if a slot differs, or holds tensors, which are of one model."""
    (first_name, first), *others = states.items()
    for name, state in others:
        for slot in {**first.slots, **state.slots}:
            mine, its = first.slots.get(slot, _MISSING), state.slots.get(slot, _MISSING)
            if _holds_tensors(mine) or not _equal(mine, its):
                raise NotImplementedError(
                    f"stack: what the middleware {slot!r} has kept is not the same for "
                    f"{first_name!r} and {name!r}, and a stack has it once. {INSTEAD}"
                )


_MISSING = object()


def _holds_tensors(value: object) -> bool:
    """Return whether there is a tensor in what a middleware has kept: it would be of one model."""
    if isinstance(value, torch.Tensor):
        return True
    if attrs.has(type(value)):
        value = attrs.asdict(value, recurse=False)
    parts = containers.parts_of(value)
    return parts is not None and any(_holds_tensors(part) for _, part in parts)


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # such as of tensors
        return False


# --------------------------------------------------------------------------------------------------
# Metrics and records of all models, and of one.


def _stack_metrics(metrics: Mapping[str, Mapping[str, Metric]]) -> dict[str, Metric]:
    """Return running metrics of several models as those of a stack."""
    names, found = tuple(metrics), dict[str, Metric]()
    first = next(iter(metrics.values()))
    for label in first:
        every = [own.get(label) for own in metrics.values()]
        if label.startswith("/"):  # the items, which are the same
            found[label] = first[label]
        elif (joined := _joined(label, every, names)) is not None:
            found[label] = joined
        else:
            own_label = label.removeprefix("recent/")
            prefix = label.removesuffix(own_label)
            found |= {
                f"{prefix}{_with_model(own_label, name)}": metric
                for name, metric in zip(names, every, strict=True)
                if metric is not None
            }
    return found


def _joined(label: str, every: Sequence[Metric | None], names: tuple[str, ...]) -> PerModel | None:
    """Return means of several models as one metric; None if they are something else."""
    means = [metric for metric in every if type(metric) is Mean]
    if len(means) < len(every) or not all(isinstance(m.total, torch.Tensor) for m in means):
        return None
    weight = means[0].weight
    if not all(mean.weight == weight for mean in means):
        return None
    totals = torch.stack([mean.total for mean in means])
    return PerModel(totals, weight, label.removeprefix("recent/"), names)


def _with_model(label: str, name: str) -> str:
    """Return the name of a number of a model: "a/loss", and "lr/a" for a rate."""
    first, _, rest = label.partition("/")
    if first == "lr":
        return f"lr/{name}/{rest}" if rest else f"lr/{name}"
    return f"{name}/{label}"


def _metrics_of(metrics: Mapping[str, Metric], place: int, name: str) -> dict[str, Metric]:
    """Return the running metrics of one model of a stack."""
    found: dict[str, Metric] = {}
    models = next((m.models for m in metrics.values() if isinstance(m, PerModel)), (name,))
    others = {*models} - {name}
    for label, metric in metrics.items():
        parts = label.split("/")
        if isinstance(metric, PerModel):
            found[label] = metric.of(place)
        elif name in parts:
            parts.remove(name)
            found["/".join(parts)] = copy.deepcopy(metric)
        elif others.isdisjoint(parts):
            found[label] = copy.deepcopy(metric)
    return found


def _stack_histories(histories: Mapping[str, History]) -> History:
    """Return the records of several models as those of a stack.

    Raises:
        ValueError: they have records at different updates.
    """
    names = [*histories]
    records = [history.records for history in histories.values()]
    places = [[(r.epoch, r.step, r.closing) for r in own] for own in records]
    for name, own in zip(names, places, strict=True):
        if own != places[0]:
            raise ValueError(
                f"stack expects states with records at the same updates: those of {names[0]!r} "
                f"and {name!r} differ. To leave the records out: attrs.evolve(state, "
                "history=History())"
            )
    return History(_joined_record(names, each) for each in zip(*records, strict=True))


def _joined_record(names: Sequence[str], records: Sequence[Record]) -> Record:
    metrics: dict[str, float] = {}
    for label in dict.fromkeys(label for record in records for label in record.metrics):
        loader, _, rest = label.partition("/")
        for name, record in zip(names, records, strict=True):
            if label in record.metrics:
                metrics[f"{loader}/{_with_model(rest, name)}"] = record.metrics[label]
    return attrs.evolve(records[0], metrics=metrics)


def _check_modules(models: Mapping[str, nn.Module]) -> None:
    """Raise if a model cannot be called for all: it has hooks, is compiled, or has no weights yet.

    Raises:
        NotImplementedError: a module has hooks, or is compiled.
        ValueError: a model waits for its first batch.
    """
    for name, model in models.items():
        if torch_compat.uncompiled(model) is not None:
            raise NotImplementedError(
                f"stack: the model {name!r} is compiled. Stack the states of the models themselves"
            )
        if any(map(nn.parameter.is_lazy, model.parameters())):
            raise ValueError(
                f"stack: the first batch decides the shapes of the parameters of {name!r}: call "
                "each model with one before"
            )
        for path, module in model.named_modules():
            if has_forward_hooks(module):
                raise NotImplementedError(
                    f"stack: the module {path or type(module).__name__!r} of {name!r} has a hook "
                    f"around its forward or backward, which would be called for one model only: "
                    f"remove it. {INSTEAD}"
                )
