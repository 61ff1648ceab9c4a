"""Averages of the weights over the updates of a run: exponential, and of equal weights."""

from __future__ import annotations

import re
from collections.abc import Callable

from fnloop._checkpoint.format import TRAINING
from fnloop._core.averages import AVERAGED, Average
from fnloop._core.freeze import Selectors, check_selectors
from fnloop._core.parts import OWN, TENSORS
from fnloop._core.state import LOCAL_SGD, TBPTT, TrainState, explain_unknown_length
from fnloop._core.types import Middleware, middleware
from fnloop._display.screen import warn_once
from fnloop._display.tables import format_count
from fnloop._extensions.averages import (
    AverageView,
    Choice,
    Only,
    blend,
    choose_weight,
    first_average,
)
from fnloop.extend import checks, name_of
from fnloop.schedules import check_length, updates_in

_FILES = (*TENSORS, TRAINING, AVERAGED, OWN)
# Middleware that others know by their names.
_KNOWN = ("amp", "clip", "closure", "cuda_graph", LOCAL_SGD, "plateau", TBPTT, "timings")


@middleware("update")
def ema(
    decay: float | Callable[[int], float] = 0.999,
    *,
    start: float = 0,
    every: int = 1,
    evaluate: bool | str = True,
    name: str = "ema",
    only: Selectors | None = None,
) -> Middleware:
    """Keep an exponential moving average of the weights, and evaluate it beside the model.

    Up to update ``start``, the average equals the weights. Each ``every``-th applied update after
    it makes it ``decay × average + (1 - decay) × weights``. Training does not depend on it. A
    skipped update changes nothing. The average continues from phase to phase; updates count from
    the beginning of the run.

    Args:
        decay: the weight of the average so far, from 0 to 1. It averages over about ``1 / (1 -
            decay)`` of its updates. Or a function of n, the number of averages made before, from 0:
            ``lambda n: min(0.999, (1 + n) / (10 + n))`` warms up.
        start: updates (an int), or a fraction of the run (a float).
        every: applied updates from one blend to the next; at least 1.
        evaluate: True evaluates the model and the average: "valid/loss" and "valid/ema/loss", and
            so with each metric. "only" evaluates the average alone, as "valid/loss"; False the
            model alone.
        name: the name of the slot, of the file in a checkpoint, and of the metrics.
        only: what is averaged, by selectors as in ``freeze``: modules of the model, globs of names,
            or functions ``(name, parameter) -> bool``; one or a list of them. The rest is not: in
            the average, it is that of the model at the time. Buffers are averaged with a module
            that is chosen as a whole. By default everything.

    Returns:
        A middleware of the update ring, and of the step and the evaluation ring.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value. When composing: two averages
            have ``evaluate="only"``. When it runs: ``start`` is a fraction, and the length of the
            run is unknown; the function ``decay`` returns something else than a number from 0 to 1;
            a selector is for nothing in the model; or the slot is of other parts of it.
        NotImplementedError: when a run starts: the average would be evaluated, and the model is
            under ``fully_shard``. At an evaluation: the model cannot be copied.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, x = fl.pipeline(ema(0.5))(toy_loss), torch.tensor([4.0])
        >>> state = fl.fit(step, toy(w=0.0, lr=1.0), ([x, x], [x]), hooks=())
        >>> state.slots["ema"]["w"].item()           # (0 + -4) / 2, then (-2 + -8) / 2
        -5.0
        >>> state.history["valid/loss"], state.history["valid/ema/loss"]
        ((-32.0,), (-20.0,))
        >>> step = fl.pipeline(ema(lambda n: n / (n + 1)))(toy_loss)     # the mean of all updates
        >>> fl.fit(step, toy(w=0.0, lr=1.0), [x, x], hooks=()).slots["ema"]["w"].item()
        -6.0

    Notes:
        The slot ``state.slots["ema"]`` holds parameters and floating buffers (such as the
        statistics of a BatchNorm) by name, in float32 or wider; all other buffers are those of the
        model. :func:`averaged` returns a state with the average in its model. A checkpoint has
        ``ema.safetensors``, which loads into the plain module as ``model.safetensors`` does.

        A parameter that is added during the run, or replaced by one of another shape, is averaged
        from its value before its first update on. One that is replaced by another of its shape
        continues the average of its name.

        In a middleware of the forward ring, ``state.slots["ema"]`` is the average after the update
        before: a teacher. ``torch.func.functional_call(state.model, dict(state.slots["ema"]),
        inputs)`` calls the model with it. Pass copies if a BatchNorm in training mode would change
        its statistics.

        Other libraries warm up by rules that are functions of n. timm: ``lambda n: min(decay, 1 -
        (1 + n / gamma) ** -power)``. diffusers, with ``use_ema_warmup``: the same, with its
        ``inv_gamma``. DINO: ``lambda n: 1 - (1 - m) * (1 + math.cos(math.pi * n / total)) / 2``.

    Source: Polyak & Juditsky, 1992, https://doi.org/10.1137/0330046. The same numbers as timm's
    ``ModelEmaV3``, and with ``start=1``, as its first update copies the weights, those of
    ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``.

    Replaces: lightning.EMAWeightAveraging, pytorch_accelerated.ModelEmaCallback, keras.use_ema,
    by_hand.AveragedModel
    """
    meaning = "the weight of the average so far"
    if callable(decay):
        meaning = f"{meaning}, a number or a function of how many averages were made before"
        weight_of = _weights(checks.function("ema", "decay", decay, meaning, 1))
    else:
        new = 1 - checks.number("ema", "decay", decay, meaning, least=0, most=1)
        weight_of = lambda count: new
    selectors = None if only is None else check_selectors("ema", only)
    return _make("ema", weight_of, start, every, evaluate, name, selectors)


def _weights(decay: Callable[[int], float]) -> Callable[[int], float]:
    """Return how much of an update is blended in, by how many were before it."""

    def weight_of(count: int) -> float:
        __tracebackhide__ = True
        called = f"decay({count}) of {name_of(decay)}"
        return 1 - float(
            checks.number(
                "ema", called, decay(count), least=0, most=1, finite=False, wrong_type=TypeError
            )
        )

    return weight_of


@middleware("update")
def swa(
    start: float = 0.75, *, every: int = 1, evaluate: bool | str = True, name: str = "swa"
) -> Middleware:
    """Keep the mean of the weights over the last part of a run, and evaluate it beside the model.

    Up to update ``start``, the average equals the weights. Each ``every``-th applied update after
    it counts in the mean. Everything else is as with :func:`ema`. Choose the learning rate with
    ``schedule``: high and constant in the last part. The running statistics of BatchNorm are
    averaged too; :func:`update_batchnorm` computes them for the averaged weights.

    Args:
        start: updates (an int), or a fraction of the run (a float).
        every: applied updates from one that counts to the next; at least 1.
        evaluate: True evaluates the model and the average: "valid/loss" and "valid/swa/loss", and
            so with each metric. "only" evaluates the average alone, as "valid/loss"; False the
            model alone.
        name: the name of the slot, of the file in a checkpoint, and of the metrics.

    Returns:
        A middleware of the update ring, and of the step and the evaluation ring.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`ema`.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(swa(0.5))(toy_loss)
        >>> state = fl.fit(step, toy(w=0.0, lr=1.0), [torch.tensor([1.0])] * 4, hooks=())
        >>> state.model.w.item(), fl.averaged(state, "swa").model.w.item()      # (-3 + -4) / 2
        (-4.0, -3.5)

    Source: Izmailov et al., 2018, https://arxiv.org/abs/1803.05407. The same numbers as
    ``torch.optim.swa_utils.AveragedModel(use_buffers=True)``.

    Replaces: lightning.StochasticWeightAveraging
    """
    return _make("swa", lambda count: 1 / (count + 1), start, every, evaluate, name)


def _make(
    owner: str,
    weight_of: Callable[[int], float],
    start: float,
    every: int,
    evaluate: bool | str,
    name: str,
    only: Only = None,
) -> Middleware:
    """Return the middleware of an average.

    Args:
        owner: the name of the factory.
        weight_of: how many updates were blended in -> how much of the next is.
        start, every, evaluate, name, only: as in :func:`ema`.
    """
    check_length(owner, "start", start)
    checks.integer(owner, "every", every, "the applied updates from one blend to the next")
    if not isinstance(evaluate, bool) and evaluate != "only":
        raise ValueError(
            f'{owner} expects evaluate as True (the model and the average), "only" (the average '
            f"alone) or False (the model alone); got {checks.describe(evaluate)}"
        )
    _check_name(owner, name)
    choose = _choice(owner, weight_of, start, every)
    return Middleware(
        name,
        update=blend(name, only),
        step=choose_weight(name, choose, only),
        init=lambda state: first_average(state, name, bool(evaluate), only),
        view=AverageView(name, beside=evaluate is True) if evaluate else None,
        adds=(),
    )


def _choice(owner: str, weight_of: Callable[[int], float], start: float, every: int) -> Choice:
    def choose(state: TrainState, average: Average) -> tuple[float | None, int]:
        __tracebackhide__ = True
        begin = start if isinstance(start, int) else _updates_in(owner, start, state)
        after, count = state.step + 1 - begin, average.count
        more = count - max(after - 1, 0) // every
        if more and isinstance(start, float) and state.backend.main:
            _warn_of_total(owner, start, begin, more, after > 0)
        if after > 0:
            return (0.0, count) if after % every else (weight_of(count), count + 1)
        return None, 0

    return choose


def _updates_in(owner: str, start: float, state: TrainState) -> int:
    """Return a fraction of the run in updates.

    Raises:
        ValueError: the length of the run is unknown.
    """
    total = state.run.total_steps if state.run else None
    if total is None and start:
        raise ValueError(explain_unknown_length(f"{owner}(start={start})", state))
    return updates_in(start, total or 0)


def _warn_of_total(owner: str, start: float, begin: int, more: int, begun: bool) -> None:
    """Warn that an average is not of the updates that the total of its run says.

    Args:
        owner: the name of the factory.
        start: from which fraction of the run it is an average, and
        begin: how many updates that is.
        more: how many updates too many it is of; too few if below 0.
        begun: whether that many were made.
    """
    has = f"is of {format_count(abs(more), 'update')} too {'many' if more > 0 else 'few'}"
    has = has if begun else f"is the weights again through update {begin}"
    warn_once(
        f"{owner}: start={start} is update {begin} of this run, and the average {has}: the run had "
        f"another length before, or {owner} was listed later. To begin at the same update in a run "
        "of any length, write start as a number of updates"
    )


def _check_name(owner: str, name: str) -> None:
    checks.text(owner, "name", name, "the name of its slot, its file and its metrics")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name) or name.lower() in _FILES:
        raise ValueError(
            f"{owner} expects name as letters, digits, _ and -, and none of "
            f"{', '.join(_FILES)}, because a checkpoint has a file of this name; got {name!r}"
        )
    checks.name_of_file(owner, "name", name)
    if name in _KNOWN:
        raise ValueError(
            f"{owner} expects name as another one than {', '.join(_KNOWN)}, which are names of "
            f"other middleware; got {name!r}"
        )
