"""Gradients that are changed before the optimizer sees them, or computed again for it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fnloop._core.metrics import Mean
from fnloop._core.selectors import Selectors
from fnloop._core.several import Several
from fnloop._core.state import TrainState, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop.extend import (
    Batch,
    Chosen,
    checks,
    engine_of,
    fsdp,
    gradients,
    isolated,
    local_part,
    norm,
    parameters,
    refuse,
    report,
    set_aside,
    then,
    torch_compat,
)

# --------------------------------------------------------------------------------------------------
# Gradient clipping, by norm and by value, and the norm alone.
#
# It acts once per update, or once per micro-batch if it is listed before `accumulate`.

_NORM = "grad_norm"  # the name of the metric
# (state) -> the norms to report; it may scale the gradients.


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
    that the damage shows. ``skip_nonfinite()``, listed after it, skips such updates.
    ``halt_on_nonfinite()`` stops the run.

    ``only`` restricts clipping to some parameters, and uses the norm of their gradients. List
    several ``clip`` with names for parameters that do not overlap.

    Args:
        max_norm: the largest norm, above 0. ``inf`` does not clip: it only measures, always the
            gradient of the whole update, and leaves one that is not finite as it is.
        norm_type: the p of the norm, above 0; ``inf`` is the largest magnitude of an element.
        only: the parameters to clip, as in ``freeze``: a module of the model, a glob of names, a
            function ``(name, parameter) -> bool``, or a list of these. None: all that are updated.
        name: with another name than "clip", the metric is "grad_norm/<name>".

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: an argument is not a number, ``only`` is not a selector, or the name not a str.
        ValueError: a number is not above 0, or the name has a "/". When composing: it is listed
            twice, and one of them is for all parameters. When a run starts: ``only`` matches
            nothing in the model, or parameters that another ``clip`` is for.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> out.metrics["grad_norm"].compute(), round(state.model.w.item(), 4)
        (4.0, -1.0)

        Two parts: ``pipeline(clip(1.0, only="body", name="body"), clip(0.1, only="head",
        name="head"))``.

    Source: Pascanu, Mikolov and Bengio, 2013, https://arxiv.org/abs/1211.5063

    Replaces: lightning.gradient_clip_val, keras.global_clipnorm, transformers.max_grad_norm,
    accelerate.clip_grad_norm_, by_hand.clip_grad_norm_
    """
    _check_limit("clip", "max_norm", max_norm, "where inf switches clipping off")
    _check_limit("clip", "norm_type", norm_type, "the p of the norm")
    _check_name(name)
    of = parameters if only is None else Chosen("clip", only).of
    label = _NORM if name == "clip" else f"{_NORM}/{name}"

    def scale(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if isinstance(state.model, Several):
            norms = _clip_models_(state, max_norm, norm_type)
            return state, report(out, {label: state.model.metric(label, norms, 1)}, "clip")
        before = clip_to_norm_(of(state), max_norm, norm_type)
        return state, report(out, {label: Mean(before, 1)}, "clip")

    return Middleware(
        name,
        gradient=then(scale),
        check=_check_clips,
        check_state=None if only is None else _check_overlap,
        adds=(_NORM,),
        traits=("stacks", *["commutes"] * math.isinf(max_norm)),
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

    def measure(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if isinstance(state.model, Several):
            norms = _stacked_norms(gradients(state), norm_type)
            return state, report(out, {_NORM: state.model.metric(_NORM, norms, 1)}, "grad_norm")
        groups = {_NORM: parameters(state)} if by is None else _by_module(state)
        found = {k: [p.grad for p in ps if p.grad is not None] for k, ps in groups.items()}
        of_groups = {
            label: Mean(norm(grads, norm_type), 1)
            for label, grads in found.items()
            if grads or by is None
        }
        return state, report(out, of_groups, "grad_norm")

    def check_single(state: TrainState, listed: object) -> None:
        _refuse_stack(state, f"grad_norm(by={by!r})", "write grad_norm()")

    whole = by is None
    return Middleware(
        _NORM if whole else f"{_NORM}/{by}",
        gradient=then(measure),
        check=check if whole else None,
        check_state=None if whole else check_single,
        adds=(_NORM,),
        traits=("commutes", "stacks"),
    )


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


def clip_to_norm_(params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``.

    Their bits are those of ``clip_grad_norm_``, but gradients whose norm is not finite become NaN.
    An infinite ``max_norm`` changes nothing.

    Returns:
        The norm before.
    """
    grads = [p.grad for p in params if p.grad is not None]
    before = norm(grads, norm_type)
    if math.isinf(max_norm):
        return before
    finite = torch.fmod(before, math.inf)  # NaN if it is not, by which no gradient can be scaled
    factor = finite.add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    parts: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad.__class__ is not Tensor or grad.requires_grad:  # with create_graph it has a graph
            grad = local_part(grad.detach())
        parts.setdefault(grad.device, []).append(grad)
    for device, there in parts.items():
        torch_compat.foreach_mul_(there, factor if device == before.device else factor.to(device))
    return before


# --- of a stack of models


def _stacked_norms(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of each model's gradients, given the stacked gradients."""
    norms = [
        torch.linalg.vector_norm(g.reshape(len(g), -1), norm_type, dim=1)
        for g in grads
        if g.numel()
    ]
    if len(norms) == 1:
        return norms[0]
    alike = [each.to(norms[0].dtype) for each in norms]
    return torch.linalg.vector_norm(torch.stack(alike), norm_type, dim=0)


def _clip_models_(state: TrainState, max_norm: float, norm_type: float) -> Tensor:
    """Scale each model's gradients so that their norm is at most ``max_norm``.

    Returns:
        The norms before, one for each model.
    """
    grads = gradients(state)
    norms = _stacked_norms(grads, norm_type)
    if not math.isinf(max_norm):
        # A norm that is not finite gives NaN, as for a single model.
        factor = torch.fmod(norms, math.inf).add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
        for g in grads:
            g.mul_(factor.to(g.device, g.dtype).reshape(-1, *[1] * (g.ndim - 1)))
    return norms


def _refuse_stack(state: TrainState, owner: str, instead: str) -> None:
    if isinstance(state.model, Several):
        raise NotImplementedError(
            f"{owner} does not work with a stack of models: {instead}. Otherwise train these "
            "states one by one"
        )


# --- several of them


def _check_name(name: object) -> None:
    checks.text("clip", "name", name, "the last part of its metric")  # type: ignore[arg-type]
    if "/" in str(name):
        raise ValueError(f'clip expects name without "/"; got {name!r}')


def _is_clip(member: Middleware) -> bool:
    return member.call is not None and member.call.factory is clip


def _only_of(member: Middleware) -> Selectors | None:
    call = member.call
    assert call is not None
    bound = inspect.signature(call.factory).bind(*call.args, **call.kwargs)
    return bound.arguments.get("only")


def _check_clips(listed: Sequence[Middleware]) -> None:
    """Raise ValueError if there are several, and one of them is for all parameters."""
    clips = [m for m in listed if _is_clip(m)]
    for member in clips:
        if len(clips) > 1 and _only_of(member) is None:
            others = ", ".join(repr(m) for m in clips if m is not member)
            raise ValueError(
                f"{member!r} clips all parameters, those of {others} too: say which it is for, "
                "only=..., or leave one out"
            )


def _check_overlap(state: TrainState, listed: Sequence[Middleware]) -> None:
    """Raise ValueError if a parameter is chosen twice, or a selector is for nothing."""
    owners: dict[str, Middleware] = {}
    for member in listed:
        if not _is_clip(member):
            continue
        if (only := _only_of(member)) is not None:
            _refuse_stack(state, repr(member), "leave out only=, so that it is for all parameters")
        chosen = Chosen(repr(member), only)
        chosen.check(state)
        for name in chosen.select(unwrap(state)).parameters:
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
        return Middleware("clip_value", traits=("stacks",))

    def clamp(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        grads = [local_part(p.grad) for p in parameters(state) if p.grad is not None]
        if grads:
            with torch.no_grad():  # with create_graph the gradients have a graph
                torch_compat.foreach_clamp_min_(grads, -limit)
                torch_compat.foreach_clamp_max_(grads, limit)
        return state, out

    return Middleware("clip_value", gradient=then(clamp), adds=(), traits=("stacks",))


def _check_limit(owner: str, name: str, value: float, meaning: str) -> None:
    checks.number(owner, name, value, meaning, above=0, finite=False, wrong_type=TypeError)


# --------------------------------------------------------------------------------------------------
# Adaptive gradient clipping: by the norm of the weights, unit by unit.

SMALLEST_WEIGHT = 1e-3  # a norm of weights counts as at least this, so that zeros can grow
SMALLEST_GRADIENT = 1e-6  # a norm of gradients is divided by as at least this


@middleware("gradient")
def clip_adaptive(ratio: float = 0.01, only: Selectors | None = None) -> Middleware:
    """Scale each unit's gradient so that its norm is at most ``ratio`` × the norm of its weights.

    A unit is a row of a matrix, an output channel of a convolution, or a whole vector such as a
    bias. The norm of its weights counts as at least 0.001. As in ``clip``, a unit whose gradient
    has an infinite or NaN norm becomes NaN.

    The authors leave out the last linear layer: ``only=lambda name, p: not
    name.startswith("head.")``.

    Args:
        ratio: the largest norm of a gradient, as a part of the norm of the weights; above 0.
            ``inf`` changes nothing.
        only: what it is for, as in ``clip``. None: all that is updated.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the ratio is not a number, or ``only`` is not a selector.
        ValueError: the ratio is not above 0. When a run starts: ``only`` is for nothing in the
            model.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(clip_adaptive(0.5))(toy_loss)
        >>> state, out = step(toy(w=2.0), torch.tensor([4.0]))      # 4 is clipped to 0.5 * 2
        >>> state.model.w.item()
        1.0

    Source: Brock et al., 2021, https://arxiv.org/abs/2102.06171
    """
    meaning = "a part of the norm of the weights, where inf switches clipping off"
    checks.number(
        "clip_adaptive", "ratio", ratio, meaning, above=0, finite=False, wrong_type=TypeError
    )
    chosen = Chosen("clip_adaptive", only)
    if math.isinf(ratio):
        return Middleware("clip_adaptive")

    def clip_units(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        with torch.no_grad():  # with create_graph the gradients have a graph
            for p in chosen.of(state):
                if p.grad is not None:
                    _clip_(p.grad, p, ratio)
        return state, out

    def check(state: TrainState, listed: object) -> None:
        chosen.check(state)

    return Middleware(
        "clip_adaptive",
        gradient=then(clip_units),
        check_state=None if only is None else check,
        adds=(),
    )


def _clip_(gradient: Tensor, weights: Tensor, ratio: float) -> None:
    most = _norms(weights).clamp(min=SMALLEST_WEIGHT).mul_(ratio)
    # No gradient can be scaled by an infinite norm: NaN takes its place.
    norms, mine = torch.fmod(_norms(gradient), math.inf), local_part(gradient)
    scaled = mine * (most / norms.clamp(min=SMALLEST_GRADIENT))
    mine.copy_(torch.where(norms < most, mine, scaled))


def _norms(values: Tensor) -> Tensor:
    """Return the norm of each unit that this process has; of a vector, one norm of all."""
    if values.ndim <= 1:
        return fsdp.combined(torch.linalg.vector_norm(values))
    dims = tuple(range(1, values.ndim))
    return fsdp.combined(torch.linalg.vector_norm(values, dim=dims, keepdim=True))


# --------------------------------------------------------------------------------------------------
# Sharpness-aware minimization: the gradient of the worst weights nearby.

SMALLEST = 1e-12  # is added to the norm of the gradient


@middleware("gradient")
def sam(rho: float = 0.05) -> Middleware:
    """Update with the gradient at ``w + rho × g / |g|``, where g is the gradient at the weights w.

    Forward and backward run twice, on the same batch and with the same random draws. The loss and
    the metrics are those of the first pass. Buffers, such as running statistics, are those that the
    first pass leaves. The weights are restored exactly before the optimizer's step.

    Order: ``pipeline(accumulate(4), sam())`` takes the gradient of the whole window at both places.
    ``pipeline(sam(), accumulate(4))`` does so for each micro-batch, then averages. List
    ``amp("fp16")`` before it, and ``clip`` after it.

    Args:
        rho: the distance to the place where the gradient is taken, above 0.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: rho is not a number.
        ValueError: rho is not above 0. When composing: ``cuda_graph`` is listed too.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> def square(model, batch):                  # the gradient is w
        ...     return (model.w * batch).square().mean() / 2
        >>> step = fl.pipeline(sam(0.5))(square)
        >>> state, out = step(toy(w=2.0, lr=0.1), torch.ones(1))
        >>> round(state.model.w.item(), 4), out.loss.item()     # 2 - 0.1 * (2 + 0.5)
        (1.75, 2.0)

    Source: Foret et al., 2021, https://arxiv.org/abs/2010.01412
    """
    meaning = "the distance to where the gradient is taken"
    checks.number("sam", "rho", rho, meaning, above=0, wrong_type=TypeError)

    def gradient(step: Step) -> Step:
        def sharpened(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            put_back, repeat = set_aside(state), engine_of(state).mark_draws()
            with isolated(state.backend.device):
                new, out = step(state, batch)
            out, _ = engine_of(new).agree(out)
            if out.skip is None:
                repeat()
                again = _pass_nearby(step, state, batch, rho)
                out = attrs.evolve(out, skip=again.skip)
            put_back()
            return new, out

        return sharpened

    return Middleware("sam", gradient=gradient, adds=())


def _pass_nearby(step: Step, state: TrainState, batch: Batch, rho: float) -> Output:
    """Leave the gradient at the worst weights within rho, and the weights as they were."""
    __tracebackhide__ = True
    moved = [p for p in parameters(state) if p.grad is not None]
    buffers = [*state.model.buffers()]
    with torch.no_grad():
        kept: list[Tensor] = [t.detach().clone() for t in (*moved, *buffers)]
        length = norm([p.grad for p in moved])
        for p in moved:
            p.add_(p.grad * (rho / (length + SMALLEST)).to(p))
            p.grad = None
    try:
        return engine_of(state).agree(step(state, batch)[1])[0]
    finally:
        with torch.no_grad():
            for tensor, value in zip((*moved, *buffers), kept, strict=True):
                tensor.copy_(value)


# --------------------------------------------------------------------------------------------------
# Optimizers whose step evaluates the loss by itself.


@middleware("update")
def closure(*, create_graph: bool = False) -> Middleware:
    """Call ``optimizer.step(closure)``, for an optimizer that accepts a closure.

    The optimizer evaluates the loss and its gradient as often as it needs. Each evaluation passes
    through the rings inside of the update: accumulation, clipping, metrics. The first one is
    reported. An optimizer that requires a closure, such as LBFGS, gets one without this.

    Args:
        create_graph: whether gradients have a graph of their own, for optimizers that differentiate
            them once more, such as AdaHessian. It takes more memory.

    Returns:
        A middleware that says how the update is made.

    Raises:
        TypeError: ``create_graph`` is not a bool. At the first update: the optimizer's step takes
            no closure.
        ValueError: when composing: ``cuda_graph`` or another closure is listed too, or, with
            ``create_graph``, ``accumulate``, or ``amp("fp16")``. At an update: it would have to be
            skipped.
        NotImplementedError: with ``create_graph``, when a run starts: there are several processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import Toy, toy_loss
        >>> class Twice(torch.optim.SGD):
        ...     def step(self, closure=None):
        ...         for _ in range(2):
        ...             closure()
        ...             super().step()
        >>> model = Toy()
        >>> state = fl.TrainState.create(model, Twice(model.parameters(), lr=1.0))
        >>> state, out = fl.pipeline(closure())(toy_loss)(state, torch.tensor([3.0]))
        >>> state.step, state.model.w.item()
        (1, -6.0)
    """
    checks.flag("closure", "create_graph", create_graph)

    name = "closure(create_graph)" if create_graph else "closure"

    def check(listed: Sequence[Middleware]) -> None:
        for member in listed:
            if "by_closure" in member.traits and member.name != name:
                raise ValueError(
                    "closure() and closure(create_graph=True) are both listed: leave closure() out"
                )
            if create_graph and (member.window > 1 or _scales(member)):
                raise ValueError(
                    f"{member!r} changes gradients in place, which "
                    "closure(create_graph=True) differentiates: leave one out"
                )

    init = _refuse_several if create_graph else None
    traits = ("by_closure", *["create_graph"] * create_graph)
    return Middleware(name, check=check, init=init, traits=traits)


def _refuse_several(state: TrainState) -> None:
    refuse(
        state,
        "closure(create_graph=True)",
        exact="it works in one process only. Leave one of them out",
        several="the graph of a gradient does not reach the other processes",
    )


def _scales(member: Middleware) -> bool:
    return member.name == "amp" and member.gradient is not None
