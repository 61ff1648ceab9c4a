"""Gradient clipping, by norm and by value, and the norm alone.

It acts once per update, or once per micro-batch if it is listed before ``accumulate``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import local_part
from fnloop._core.call import Call
from fnloop._core.metrics import Mean
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.selectors import Selectors, check_selectors
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._display import checks
from fnloop._step.backward import Commuting
from fnloop._step.chosen import Chosen
from fnloop._step.gradients import clip_to_norm_, total_norm
from fnloop._step.update import report

__all__ = ["clip", "clip_value", "grad_norm"]

_NORM = "grad_norm"  # the name of the metric
# (state) -> the norms to report; it may scale the gradients.
_Measure = Callable[[TrainState], Mapping[str, Metric]]


@middleware("gradient")
def clip(
    max_norm: float,
    norm_type: float = 2.0,
    only: Selectors | None = None,
    name: str = "clip",
) -> Middleware:
    """Scale the gradient so that its norm, over all parameters together, is at most ``max_norm``.

    The norm before clipping becomes the metric "grad_norm" (``history["train/grad_norm"]``).

    A gradient whose norm is infinite or NaN cannot be scaled: each element of it becomes NaN, so
    that the damage shows. ``skip_nonfinite()``, listed after it, leaves such updates out;
    ``halt_on_nonfinite()`` stops the run.

    With ``only`` it is for some parameters: the norm is theirs, and other gradients stay as they
    are. Several may be listed, with names, for parameters that do not overlap.

    Args:
        max_norm: the largest norm, above 0. ``inf`` does not clip: it only measures, always the
            gradient of the whole update, and leaves one that is not finite as it is.
        norm_type: the p of the norm, above 0; ``inf`` is the largest magnitude of an element.
        only: what it is for, as in ``freeze``: a module of the model, a glob of names, a function
            ``(name, parameter) -> bool``, or a list of these. None: all that is updated.
        name: with another name than "clip", the metric is "grad_norm/<name>".

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: an argument is not a number, ``only`` is not a selector, or the name not a str.
        ValueError: a number is not above 0, or the name has a "/". When composing: it is listed
            twice, and one of them is for all parameters. When a run starts: ``only`` is for nothing
            in the model, or for parameters that another ``clip`` is for.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> out.metrics["grad_norm"].compute(), round(state.model.w.item(), 4)
        (4.0, -1.0)

        Two parts: ``pipeline(clip(1.0, only="body", name="body"), clip(0.1, only="head",
        name="head"))``.

    Source: Pascanu, Mikolov and Bengio, 2013, https://arxiv.org/abs/1211.5063
    """
    _check_limit("clip", "max_norm", max_norm, "where inf switches clipping off")
    _check_limit("clip", "norm_type", norm_type, "the p of the norm")
    _check_name(name)
    selectors = None if only is None else check_selectors("clip", only)
    label = _NORM if name == "clip" else f"{_NORM}/{name}"

    def gradient(step: Step) -> Step:
        chosen = Chosen("clip", selectors)

        def scale(state: TrainState) -> Mapping[str, Metric]:
            return {label: Mean(clip_to_norm_(chosen.of(state), max_norm, norm_type), 1)}

        return _measuring(step, "clip", scale)

    wrap = Commuting(gradient) if math.isinf(max_norm) else gradient
    return Middleware(
        name,
        gradient=wrap,
        check=_check_clips,
        check_state=None if selectors is None else _check_overlap,
    )


@middleware("gradient")
def grad_norm(norm_type: float = 2.0, by: str | None = None) -> Middleware:
    """Report the norm of the gradient, over all parameters together, as the metric "grad_norm".

    Nothing is changed. It is the gradient of the whole update, and the mean over the updates of a
    record. ``clip`` reports the same before clipping, so list one of the two.

    Args:
        norm_type: the p of the norm, above 0; ``inf`` is the largest magnitude of an element.
        by: "module" reports "grad_norm/<module>" in its place, for each module that has parameters
            of its own; "grad_norm/<class>" are those of the model itself, and "grad_norm/others"
            those that are not in the model. None: one norm of all.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the norm is not a number.
        ValueError: it is not above 0, or ``by`` is something else. When composing: ``clip`` is
            listed too, and reports the same.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(grad_norm())(toy_loss)(toy(), torch.tensor([-4.0]))
        >>> out.metrics["grad_norm"].compute(), state.model.w.item()
        (4.0, 4.0)
    """
    _check_limit("grad_norm", "norm_type", norm_type, "the p of the norm")
    if by not in (None, "module"):
        raise ValueError(f'grad_norm expects by="module", or None; got {checks.describe(by)}')

    def check(listed: Sequence[Middleware]) -> None:
        if clips := [m for m in listed if _is_clip(m) and m.name == "clip"]:
            raise ValueError(
                f"{clips[0]!r} reports the metric {_NORM!r} already, the norm before clipping: "
                "leave grad_norm out"
            )

    def gradient(step: Step) -> Step:
        def measure(state: TrainState) -> Mapping[str, Metric]:
            groups = {_NORM: parameters(state)} if by is None else _by_module(state)
            found = {k: [p.grad for p in ps if p.grad is not None] for k, ps in groups.items()}
            return {
                label: Mean(total_norm(grads, norm_type), 1)
                for label, grads in found.items()
                if grads or by is None
            }

        return _measuring(step, "grad_norm", measure)

    wrap = Commuting(gradient)
    if by is None:
        return Middleware(_NORM, gradient=wrap, check=check)
    return Middleware(f"{_NORM}/{by}", gradient=wrap)


def _measuring(step: Step, owner: str, measure: _Measure) -> Step:
    """Return the gradient step that reports what is measured of the gradients of another one."""

    def measured(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, batch)
        return (state, out) if out.skip is not None else (state, report(out, measure(state), owner))

    return measured


def _by_module(state: TrainState) -> dict[str, list[Tensor]]:
    """Return the parameters of a state by the label of the module that has them."""
    model = unwrap(state)
    owners = {
        id(p): torch_compat.strip_compile_prefix(name).rpartition(".")[0] or type(model).__name__
        for name, p in model.named_parameters()
    }
    found: dict[str, list[Tensor]] = {}
    for p in parameters(state):
        found.setdefault(f"{_NORM}/{owners.get(id(p), 'others')}", []).append(p)
    return found


# --- several of them


def _check_name(name: object) -> None:
    checks.text("clip", "name", name, "the last part of its metric")  # type: ignore[arg-type]
    if "/" in str(name):
        raise ValueError(f'clip expects name without "/"; got {name!r}')


def _is_clip(member: Middleware) -> bool:
    return member.call is not None and member.call.factory is clip


def _only_of(call: Call) -> Selectors | None:
    bound = inspect.signature(call.factory).bind(*call.args, **call.kwargs)
    return bound.arguments.get("only")


def _check_clips(listed: Sequence[Middleware]) -> None:
    """Raise ValueError if there are several, and one of them is for all parameters."""
    clips = [m for m in listed if _is_clip(m)]
    for member in clips:
        if len(clips) > 1 and member.call is not None and _only_of(member.call) is None:
            others = ", ".join(repr(m) for m in clips if m is not member)
            raise ValueError(
                f"{member!r} clips all parameters, those of {others} too: say which it is for, "
                "only=..., or leave one out"
            )


def _check_overlap(state: TrainState, listed: Sequence[Middleware]) -> None:
    """Raise ValueError if a parameter is chosen twice, or a selector is for nothing."""
    owners: dict[str, Middleware] = {}
    for member in listed:
        if member.call is None or not _is_clip(member):
            continue
        only = _only_of(member.call)
        chosen = Chosen(repr(member), None if only is None else check_selectors("clip", only))
        chosen.check(state)
        for name in chosen.named(state):
            if (other := owners.setdefault(name, member)) is not member:
                raise ValueError(
                    f"{other!r} and {member!r} both clip {name}: choose parameters that do not "
                    "overlap"
                )


@middleware("gradient")
def clip_value(limit: float) -> Middleware:
    """Clamp every element of the gradient to [-limit, limit].

    Args:
        limit: the largest magnitude, above 0; ``inf`` changes nothing.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the limit is not a number.
        ValueError: the limit is not above 0.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip_value(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> state.model.w.item()
        -1.0
    """
    _check_limit("clip_value", "limit", limit, "where inf switches clipping off")
    if math.isinf(limit):
        return Middleware("clip_value")

    def gradient(step: Step) -> Step:
        def clamped(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            grads = [local_part(p.grad) for p in parameters(state) if p.grad is not None]
            if out.skip is None and grads:
                with torch.no_grad():  # with create_graph the gradients have a graph
                    torch_compat.foreach_clamp_min_(grads, -limit)
                    torch_compat.foreach_clamp_max_(grads, limit)
            return state, out

        return clamped

    return Middleware("clip_value", gradient=gradient)


def _check_limit(owner: str, name: str, value: float, meaning: str) -> None:
    checks.number(owner, name, value, meaning, above=0, finite=False, wrong_type=TypeError)
