"""The three steps in the middle of a pipeline: forward, backward and update; and what becomes of what they report.

Backward takes a window of batches where ``accumulate`` asks for it, or where there are several processes. Each batch counts by
its weight, the number of items that its loss is the mean of, so the gradient is that of the mean over all items of the window,
over a ragged last window, unequal token counts and all processes. Gradients add up in ``.grad`` as autograd does: backward
starts from loss × weight / (a reference weight), and one division at the end makes the mean.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fnloop._backend import tensors_in
from fnloop._checks import described
from fnloop._joint import Joint, Weight, joint_of
from fnloop._metrics import absorb, absorb_loss, combine
from fnloop._processes import agreeing, any_process, summed, together
from fnloop._sharded import local_part
from fnloop._state import TrainState, advance, all_parameters, check_fresh, consumed, parameters, release, share_of
from fnloop._types import Batch, LossFn, Metric, Output, Step, Wrap

__all__ = [
    "OPTIMIZER", "Backward", "NoGradientError", "Total",
    "at_least_float32", "consume", "decided", "divide", "forward", "linear", "report", "update", "wants_closure",
]  # fmt: skip

OPTIMIZER = "the optimizer's step"  # the name of that layer, where a run says what it was doing
_NO_ITEM = "the batch has no item: its weight is 0"  # why it is left out

# --- the three steps in the middle


def forward(loss_fn: LossFn, name: str, listed: bool = True) -> Step:
    """Return the innermost step: call the loss function and read its reply.

    Args:
        loss_fn: the loss function.
        name: what it is called in messages.
        listed: whether the pipeline lists ``amp``; if not, the mixed precision that accelerate is configured for is used.
    """
    checked = False

    def forward(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        nonlocal checked
        __tracebackhide__ = True
        if listed or state.backend.precision is None:
            reply: Any = loss_fn(state.model, batch)
        else:
            with _configured(state):
                reply = loss_fn(state.model, batch)
        loss: Any
        aux: Any
        loss, aux = reply if reply.__class__ is tuple and len(reply) == 2 else (reply, {})
        if not checked or loss.__class__ is not Tensor or loss.ndim or aux.__class__ is not dict:
            _check_reply(reply, loss, aux, name)
            checked = True
        weight = aux["weight"] if "weight" in aux else _items_in(batch, name)
        if weight.__class__ is int and weight > 0:
            return state, Output(loss, weight, aux)
        _check_weight(weight, name)
        return state, Output(loss, weight, aux, {}, None if isinstance(weight, Tensor) else _NO_ITEM)

    return forward


def _configured(state: TrainState) -> Any:
    if state.backend.precision == "fp16":
        raise ValueError('accelerate is configured for fp16, which needs a loss scale: list it, pipeline(amp("fp16"), ...)')
    return torch.autocast(state.backend.device.type, torch.bfloat16)


class Backward:
    """The step that fills ``.grad``, starting from the loss; the loss that it reports is never scaled.

    Args:
        forward: the step inside.
        scale: ``state -> what the gradients are to be multiplied by``, on the device; or None.
        may_skip: whether a step inside may leave a batch out, in one process and not in another.
    """

    def __init__(self, forward: Step, scale: Callable[[TrainState], Tensor] | None = None, may_skip: bool = False) -> None:
        self.forward, self.scale, self.may_skip = forward, scale, may_skip

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Run forward and backward of one batch."""
        __tracebackhide__ = True
        if (joint := joint_of(state)) is not None:
            return self._over_processes(joint, state, (batch,))
        state, out = self.forward(state, batch)
        if out.skip is not None:
            return state, attrs.evolve(out, loss=out.loss.detach())
        share = _floating(_counting(out.weight) > 0, out.loss) if isinstance(out.weight, Tensor) else None  # 1, or 0
        self._start(state, out, share).backward()
        return state, Output(out.loss.detach(), out.weight, out.aux, out.metrics)

    def over(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        """Run forward and backward of a window, so that ``.grad`` is the gradient of the mean over its items."""
        __tracebackhide__ = True
        if (joint := joint_of(state)) is not None:
            return self._over_processes(joint, state, window)
        total, before = Total(), _aside(state)
        for batch in window:
            state, out = self.forward(state, batch)
            if out.skip is None:
                self._start(state, out, total.share(out)).backward()
            total.add(out)
        if total.weight is None:
            _back(state, before)
            return state, attrs.evolve(out, loss=out.loss.detach())
        divide([p.grad for p in parameters(state)], total.weight, total.reference)
        _back(state, before)
        return state, total.output()

    def _over_processes(self, joint: Joint, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        total, known, items, before, rounds, applied = Total(), False, None, None, len(window), None
        size, borrowed = share_of(state)
        joint.open(state)
        for n, batch in enumerate(window, 1):
            mine, last = not joint.borrowed(borrowed, n - 1, rounds), n == rounds
            joint.begin(last)
            if joint.blank is not None and joint.training.leaves_out(not mine):
                out = joint.blank
            elif joint.training.needed is None:
                state, out = joint.training.hear(self.forward, state, batch)
            else:
                state, out = self.forward(state, batch)
            if joint.blank is None:
                joint.blank = Output(torch.zeros_like(out.loss), _counted(out) * 0)
            if n == 1:
                known = not self.may_skip and joint.known(out, size)
                before = _aside(state) if rounds > 1 or not known else None
                total.reference = None if known else joint.reference(_counted(out))
            if known:
                joint.check(out, size)
            if not mine and out is not joint.blank:
                start = out.loss * 0
            elif not mine or out.skip is not None:
                start = joint.nothing(state, out.loss)
            else:
                start = self._start(state, out, None if known else total.share(out))
                joint.partial.update(out.metrics)
                if rounds > 1 or not known:
                    total.add(out)
            if last:
                skippable = self.may_skip or (not known and joint.counts_on_host(out))
                items = None if known else summed(_counted(out, 0 if total.weight is None else total.weight))
                start = joint.join(state, start, touch=rounds > 1)
                applied = agreeing([total.weight is not None]) if skippable else None
            start.backward()
        joint.finish(state, touched=rounds > 1)
        joint.borrows = not mine
        joint.draw(state, together=True)
        if applied is not None and not _heard(applied)[0]:
            return state, Output(out.loss.detach(), 0, out.aux, {}, out.skip or "left out by every process")
        if known:
            joint.items = size * rounds * joint.size
            if rounds == 1:
                return state, Output(out.loss.detach(), out.weight, out.aux, out.metrics)
            divide([p.grad for p in parameters(state)], rounds)
        else:
            joint.items = items()  # type: ignore[misc]
            divide([p.grad for p in parameters(state)], joint.items, total.reference * joint.size)  # type: ignore[operator]
        _back(state, before)
        if total.weight is None:
            return state, Output(torch.zeros_like(out.loss), 0, out.aux)
        return state, total.output()

    def _start(self, state: TrainState, out: Output, share: Weight | None) -> Tensor:
        """Return the number that backward starts from: the loss × what its batch counts for × the scale."""
        start = out.loss
        if not start.requires_grad:
            _fail_without_gradient(state)
        if share is not None:
            start = start * share
        return start if self.scale is None else at_least_float32(start) * self.scale(state)

    def within(self, wrap: Wrap) -> Step:
        """Put a gradient step directly around this one."""
        return wrap(self)


class Total:
    """The running sum of a window: what its batches weigh, their losses and metrics."""

    def __init__(self) -> None:
        self.weight: Weight | None = None
        self.reference: Weight | None = None  # the first weight: shares are relative to it, to keep fp16 in its range
        self.loss: Tensor | None = None
        self.last: Output | None = None
        self.metrics: Mapping[str, Metric] = {}
        self._sums: tuple[Tensor, Tensor] | None = None  # of the tensors, as given and as counted: the same if all were right
        self._weighed: tuple[Output | None, Weight] = (None, 0)

    def share(self, out: Output) -> Weight | None:
        """Return weight / reference, or None where that is 1."""
        weight = self._weight(out)
        if self.reference is None:
            self.reference = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        if isinstance(self.reference, Tensor) or isinstance(weight, Tensor):
            return weight / self.reference
        return None if weight is self.reference or weight == self.reference else weight / self.reference

    def _weight(self, out: Output) -> Weight:
        """Return what a micro-batch weighs: 0 if its tensor is NaN, infinite or negative, which is remembered on the device."""
        if not isinstance(out.weight, Tensor):
            return out.weight
        if self._weighed[0] is not out:
            given = _floating(out.weight, out.loss)
            weight = _counting(given)
            self._sums = (given, weight) if self._sums is None else (self._sums[0] + given, self._sums[1] + weight)
            self._weighed = out, weight
        return self._weighed[1]

    def add(self, out: Output) -> None:
        """Count a micro-batch; one that is skipped is left out of the window."""
        __tracebackhide__ = True
        if out.skip is not None:
            return
        loss, weight = out.loss.detach(), self._weight(out)
        if self.loss is None or self.weight is None:
            self.loss, self.weight = at_least_float32(loss) * weight, weight
        elif isinstance(weight, Tensor):
            self.loss, self.weight = self.loss + at_least_float32(loss) * weight, self.weight + weight
        else:
            self.loss, self.weight = self.loss.add_(loss, alpha=weight), self.weight + weight
        if out.metrics:
            self.metrics = combine(self.metrics, out.metrics)
        self.last = out

    def output(self) -> Output:
        assert self.loss is not None and self.last is not None and self.weight is not None
        weight: Any = self.weight
        items = torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1
        reported = weight if self._sums is None else torch.where(self._sums[0] == self._sums[1], weight, math.nan)
        return Output(self.loss / items, reported, self.last.aux, self.metrics)


def _heard(agreement: Callable[..., list[float]]) -> list[float]:
    with together("an agreement"):
        return agreement()


def _counted(out: Output, weight: Any = None) -> Tensor:
    """Return a weight, of a batch by default, as a tensor on the device; it may be one in another process, or an int."""
    weight = torch.as_tensor(out.weight if weight is None else weight, device=out.loss.device).detach()
    return _counting(weight.to(torch.float32 if weight.device.type == "mps" else torch.float64))


def _counting(weight: Tensor) -> Tensor:
    """Return a weight, or 0 where it is NaN, infinite or negative."""
    return torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp_(min=0)


def _aside(state: TrainState) -> list[Tensor | None] | None:
    """Set gradients aside that are there already, of an earlier call of the step by a middleware, if any are."""
    params = parameters(state)
    grads = [p.grad for p in params]
    if all(grad is None for grad in grads):
        return None
    for p in params:
        p.grad = None
    return grads


def _back(state: TrainState, before: list[Tensor | None] | None) -> None:
    """Add to the gradients what was set aside."""
    for p, grad in zip(parameters(state), before or (), strict=False):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad


def _floating(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in a dtype that holds it exactly beside the loss."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def divide(grads: Sequence[Tensor | None], weight: Weight, reference: Weight | None = None) -> None:
    """Turn the sum of weight/reference × gradient into the mean, in place."""
    local = [local_part(grad) for grad in grads if grad is not None]
    if not local:
        return
    divisor: Any = weight if reference is None else weight / reference
    if isinstance(divisor, Tensor):
        torch._foreach_div_(local, torch.where(divisor == 0, 1.0, divisor))  # no item at all: the gradient is zero
    elif divisor in (0, 1):
        return
    elif math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
        torch._foreach_mul_(local, 1 / divisor)
    else:
        torch._foreach_div_(local, divisor)


def at_least_float32(loss: Tensor) -> Tensor:
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def linear(wrap: Wrap) -> Wrap:
    """Mark a gradient ring's wrap as one that at most multiplies gradients by a number that is the same for a whole
    window.

    Such steps commute, so a later one may still be put directly around backward: ``step.within(wrap)``. That is how
    ``accumulate`` adds gradients up in place, and fp16 gradients are unscaled once per window, in whichever order the
    two are listed.
    """

    def wrapped(step: Any) -> Step:
        made: Any = wrap(step)
        if hasattr(step, "within"):
            made.within = lambda inner: wrapped(step.within(inner))
        return made

    return wrapped


def decided(
    state: TrainState, out: Output, flag: Tensor, judge: Callable[[TrainState, bool], str | None]
) -> tuple[TrainState, Output]:
    """Let the host decide about an update, by a flag that the device has computed.

    Args:
        state: the state.
        out: what has been found out so far.
        flag: a scalar.
        judge: ``(state, flag) -> why the update is to be left out, or None``. What it keeps it changes in place, and only where
            it leaves the update out: else that may still fail.

    Returns:
        What a step returns. While an update is recorded it goes on: there the record is cut in two, and the host decides
        between the two whenever they are played.
    """
    cut = state._lease.cut
    # A host read: whether this update counts decides the step counter, and schedules with it.
    skip = judge(state, bool(flag)) if cut is None else cut(out, flag, judge)
    return state, out if skip is None else attrs.evolve(out, skip=skip)


def update(step: Step, may_skip: bool = False) -> Step:
    """Return the step that applies the gradients, and leaves none behind.

    Args:
        step: the gradient step.
        may_skip: whether a step inside may leave an update out, in one process and not in another: then all do.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        check_fresh(state)
        params = all_parameters(state)
        for p in params:
            p.grad = None  # whatever was there is not of this batch
        try:
            if wants_closure(type(state.optimizer)):
                return _by_closure(step, state, batch)
            new, out = step(state, batch)
            if may_skip and state.backend.world_size > 1 and any_process(out.skip is not None) and out.skip is None:
                out = attrs.evolve(out, skip="left out by another process")
            applied = out.skip is None
            if applied:
                release(new)  # until the update is whole, no state owns what the optimizer changes
                _apply(new.optimizer)
        finally:
            for p in params:
                p.grad = None
        return advance(new, applied), out

    return update


@functools.cache
def wants_closure(optimizer: type[Optimizer]) -> bool:
    """Say whether an optimizer evaluates the loss by itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it wants to (LBFGS); what is reported is the first."""
    __tracebackhide__ = True
    replies: list[tuple[TrainState, Output]] = []

    def closure() -> Tensor:
        __tracebackhide__ = True
        for p in parameters(state):
            p.grad = None
        replies.append(step(state, batch))
        if replies[-1][1].skip is not None:
            raise ValueError(f"{type(state.optimizer).__name__} can't leave an update out ({replies[-1][1].skip})")
        return _of_all(state, replies[-1][1])

    release(state)  # an optimizer may change the parameters before, between and after its evaluations
    state.optimizer.step(closure)  # type: ignore[arg-type]
    new, out = replies[0]
    return advance(new, applied=True), out


def _of_all(state: TrainState, out: Output) -> Tensor:
    """Return the mean loss over all processes."""
    if state.backend.world_size == 1:
        return out.loss
    weight = torch.as_tensor(out.weight, dtype=torch.float64, device=out.loss.device)
    total, items = summed(out.loss.double() * weight), summed(weight)
    return (total() / items()).to(out.loss.dtype)


_TORCHS_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__  # type: ignore[attr-defined]


def _apply(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``, past torch's wrapper around it where that would do nothing.

    The wrapper marks the step for a profiler and calls hooks: 5 µs, with neither a profiler nor a hook.
    """
    __tracebackhide__ = True
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)
    if (
        bare is None
        or getattr(step, "__code__", None) is not _TORCHS_WRAPPER
        or "step" in vars(optimizer)  # patched, as torch's schedulers do
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    ):
        optimizer.step()
    else:
        bare(optimizer)


def report(out: Output, metrics: Mapping[str, Any], by: str) -> Output:
    """Return an output with more metrics.

    Raises:
        ValueError: there is one of that name already.
    """
    if clash := out.metrics.keys() & metrics.keys():
        name = min(clash)
        raise ValueError(f"{by} reports the metric {name!r}, which another middleware inside it reports already: rename one")
    return Output(out.loss, out.weight, out.aux, {**out.metrics, **metrics}, out.skip)


def consume(state: TrainState, out: Output, batches: int, samples: int = 0) -> TrainState:
    """Return the state with a step's batches counted and its metrics reduced into those of the epoch.

    An update that was left out has no part in them.
    """
    __tracebackhide__ = True
    running = state.metrics
    if out.skip is not None:
        return consumed(state, batches, samples, running)
    metrics = absorb(running, out.metrics) if out.metrics else {**running}
    metrics["loss"] = absorb_loss(running.get("loss"), out.loss, out.weight)  # type: ignore[arg-type]
    return consumed(state, batches, samples, metrics)


# --- the reply of a loss function


def _check_reply(reply: Any, loss: Any, aux: Any, name: str) -> None:
    """Check what a loss function returns: the first time, and whenever it does not look like the usual case."""
    if isinstance(reply, tuple) and len(reply) != 2:
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a tuple of {len(reply)}. Put the rest in aux, a dict"
        )
    if isinstance(reply, Mapping):
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a {type(reply).__name__}. Write: return "
            "reply['loss'], reply"
        )
    if not isinstance(loss, Tensor):
        hint = ". Did you forget 'return loss'?" if loss is None else ""
        raise TypeError(f"the loss that {name} returns must be a scalar tensor; got {described(loss)}{hint}")
    if loss.ndim:
        raise ValueError(
            f"the loss that {name} returns must be a scalar; got shape {tuple(loss.shape)}. Return its mean over the "
            f"batch: loss.mean()"
        )
    if not loss.is_floating_point():
        raise ValueError(f"the loss that {name} returns must have a floating dtype; got {loss.dtype}")
    if not isinstance(aux, Mapping):
        raise TypeError(
            f'the aux that {name} returns beside the loss must be a mapping, such as {{"output": output}}; got '
            f"{type(aux).__name__}"
        )


def _check_weight(weight: Any, name: str) -> None:
    """Raise unless this can be a number of items; the value of a tensor is on the device, and is looked at by the next read."""
    if isinstance(weight, Tensor):
        fine = not weight.ndim and weight.dtype is not torch.bool and not weight.is_complex()
    else:
        fine = isinstance(weight, int) and not isinstance(weight, bool)
    if not fine:
        tensor = isinstance(weight, Tensor)
        given = f"shape {tuple(weight.shape)}, {weight.dtype}" if tensor else described(weight)
        raise TypeError(
            f'aux["weight"] must be the number of items that the loss of {name} is the mean of, an int or a scalar '
            f"tensor; got {given}"
        )
    if not isinstance(weight, Tensor) and weight < 0:
        raise ValueError(
            f'aux["weight"] must be the number of items that the loss of {name} is the mean of, at least 0; got {weight}'
        )


def _items_in(batch: Batch, name: str) -> int:
    """Return the number of items in a batch: the leading dimension of its tensors, if they have one.

    Raises:
        ValueError: they have several, or there is no tensor.
    """
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    if batch.__class__ in (tuple, list) and len(batch) == 2 and batch[0].__class__ is batch[1].__class__ is Tensor:
        x, y = batch  # the usual case
        if x.ndim and y.ndim and (size := x.size(0)) == y.size(0):
            return size
    items: int | None = None
    for part in batch.values() if batch.__class__ is dict else batch if batch.__class__ in (list, tuple) else (None,):
        if not isinstance(part, Tensor):
            items = None
            break  # something else, such as a list in a tuple: look into it
        if part.ndim:
            size = part.size(0)
            if items is not None and size != items:
                break
            items = size
    else:
        if items is not None:
            return items
    sizes = {t.size(0) for t in tensors_in(batch) if t.ndim} or {1 for t in tensors_in(batch)}
    if len(sizes) == 1:
        return sizes.pop()
    found = (
        f"its tensors have leading dimensions {sorted(sizes)}" if sizes else f"there is no tensor in a {type(batch).__name__}"
    )
    raise ValueError(
        f'how many items is the loss of {name} the mean of? {found}. Say it: return loss, {{"weight": number_of_items}}'
    )


class NoGradientError(ValueError):
    """The loss has no gradient, since gradients are switched off while the step runs."""


def _fail_without_gradient(state: TrainState) -> None:
    if not torch.is_grad_enabled():
        raise NoGradientError("the loss has no gradient: gradients are switched off while the step runs")
    trainable = any(p.requires_grad for p in state.model.parameters())
    hint = (
        "it was computed without the model's parameters, or detached (.item(), .detach(), torch.no_grad)"
        if trainable
        else "every parameter of the model has requires_grad=False"
    )
    raise ValueError(f"the loss has no gradient: {hint}")
