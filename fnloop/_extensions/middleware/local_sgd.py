"""Processes that update by themselves, and average their weights every few updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._core.optimizers import modes_of, wants_closure
from fnloop._core.state import TrainState, ownership_of
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._extensions.engines import exchanges
from fnloop._extensions.engines.apart import Apart, apart_of
from fnloop.extend import (
    Batch,
    checks,
    engine_of,
    host,
    is_sharded,
    name_of,
    optimizers,
    refuse,
)

Outer = Callable[[list[nn.Parameter]], Optimizer]


@middleware("update")
def local_sgd(every: int = 8, outer: Outer | None = None) -> Middleware:
    """Let each process update its own weights, and average them from time to time.

    Gradients are not exchanged. After each applied update whose number is a multiple of ``every``,
    all processes continue from the mean of their weights. So slow connections carry one message
    every ``every`` updates. With ``outer`` the step from one average to the next is made by another
    optimizer, as in DiLoCo, where ``every`` is 100 to 500.

    Evaluations, records, checkpoints, ``predict`` and the state that ``fit`` returns use the
    average of the weights at that moment. Training continues from each process's own weights, also
    in a run that is resumed on as many processes. On another number, all continue from the average.

    Args:
        every: updates from one average to the next, at least 1.
        outer: a function that takes a list of parameters and returns a torch optimizer. These
            parameters are the weights after the last average. Their gradient is minus the mean of
            what the processes have moved away from them: SGD with a rate of 1 gives the average.
            DiLoCo uses ``lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9,
            nesterov=True)``. None: the average itself.

    Returns:
        A middleware of the update ring; the innermost there, so that others see the average.

    Raises:
        TypeError: an argument has the wrong type; or ``outer`` did not return an optimizer of
            the parameters that it was given.
        ValueError: ``every`` is below 1. In a run: the state was trained with ``local_sgd``, and
            the step is without it.
        NotImplementedError: when composing, or when a step first meets a state: it cannot work
            with another middleware, the optimizer, or the model. The message says what to write
            instead. In an update: the loss function or the optimizer exchanges something with the
            other processes; or with ``outer``, a parameter was frozen at first.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> x = [torch.tensor([1.0])] * 4
        >>> fl.fit(fl.pipeline(local_sgd())(toy_loss), toy(), x, hooks=()).model.w.item()
        -4.0
        >>> half = lambda params: torch.optim.SGD(params, lr=0.5)
        >>> step = fl.pipeline(local_sgd(2, outer=half))(toy_loss)
        >>> fl.fit(step, toy(), x, hooks=()).model.w.item()     # half of -2, then half of -2 again
        -2.0

    Notes:
        With one process, ``local_sgd()`` does nothing, and ``outer`` works as with one worker.

        Each process keeps optimizer state, and buffers such as the statistics of BatchNorm, of its
        own. The average has the buffers of the main process; :func:`update_batchnorm` computes
        others for it. A process without a batch in an update, or whose batches are all skipped,
        does not call its optimizer. The update counts anyway.

        In a run ``state.model`` has the process's own weights, and after a bare ``step(state,
        batch)`` too. There ``step.evaluate(state, batch)``, which one process may call alone, uses
        them. To evaluate the average, call ``evaluate(step, state, loader)`` in all processes.

        A step of an unequal number of items counts as much as any other: the mean is over
        processes. So N processes do not equal one with N times as many batches in an update.

    Source: Stich, 2019, https://arxiv.org/abs/1805.09767; and with ``outer``, Douillard et al.,
    2023, https://arxiv.org/abs/2311.08105
    """
    checks.integer("local_sgd", "every", every, "updates from one average to the next")
    if outer is not None:
        meaning = "a function that takes a list of parameters and returns an optimizer, or None"
        checks.function("local_sgd", "outer", outer, meaning, 1, also=type)
    return Middleware(
        "local_sgd",
        update=_wrap(every, outer),
        init=lambda state: Apart(),
        check=_check_members,
        check_state=_check_state,
        adds=(),
        order={"update": -1},  # what others see of an update is the average, if there is one
    )


def _wrap(every: int, outer: Outer | None) -> Callable[[Step], Step]:
    def wrap(step: Step) -> Step:
        def updating_apart(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            slot, several = apart_of(state), not engine_of(state).calls_every_batch
            if slot is None or not (several or outer):
                return step(state, batch)
            slot.take_back(state)
            slot.track(state)
            _make_outer(slot, outer)
            if several:
                state, out = _update_apart(step, state, batch, slot)
            else:
                state, out = step(state, batch)
            if out.skip is None and state.step % every == 0:
                if several:
                    slot.average(state)
                _step_outer(slot)
                slot.forget()
            return state, out

        return updating_apart

    return wrap


def _update_apart(
    step: Step, state: TrainState, batch: Batch, slot: Apart
) -> tuple[TrainState, Output]:
    """Make an update of this process alone: of none of its weights, if it has no batch."""
    __tracebackhide__ = True
    usual = host().apply

    def apply(optimizer: Optimizer) -> None:
        began = None if slot.used else exchanges.counted_collectives()
        slot.moved = True
        if slot.counted:
            usual(optimizer)
        if began is not None and exchanges.counted_collectives() != began:
            raise NotImplementedError(
                f"local_sgd: {type(optimizer).__name__} exchanges something with the other "
                "processes in each update. Take an optimizer that does not, or leave local_sgd out"
            )

    slot.training, slot.counted = True, False
    try:
        with host().replaced(apply=apply):
            state, out = step(state, batch)
    finally:
        slot.training = False
    slot.used |= out.skip is None
    if not slot.counted:  # what is reported of its gradient is of none
        return state, Output(out.loss, out.weight, out.aux, {}, out.skip)
    ownership_of(state).own_metrics.update(out.metrics)
    return state, out


def _step_outer(slot: Apart) -> None:
    """Replace the average in the model by what the outer optimizer makes of it, if there is one."""
    if slot.outer is None:
        return
    with torch.no_grad():
        for name, p in slot.tensors.items():
            slot.shared[name].grad = slot.shared[name] - p
        slot.outer.step()
        for name, p in slot.tensors.items():
            p.copy_(slot.shared[name])
    for shared in slot.shared.values():
        shared.grad = None


def _make_outer(slot: Apart, outer: Outer | None) -> None:
    """Make the outer optimizer before the first update, of the weights that all processes have.

    Raises:
        TypeError: it is not an optimizer of these.
        NotImplementedError: there are parameters that it does not have.
    """
    if outer is None:
        slot.shared, slot.outer, slot.saved = {}, None, None
        return
    known = {name: shared.shape for name, shared in slot.shared.items()}
    missing = [name for name, p in slot.tensors.items() if known.get(name) != p.shape]
    if slot.shared and missing:
        raise NotImplementedError(
            f"local_sgd(outer=...) began when {missing[0]} was frozen, not there or of another "
            "shape, and its outer optimizer cannot get more parameters: unfreeze, add or replace "
            "them before the first update, or leave outer out"
        )
    if slot.outer is not None:
        return
    if not slot.shared:
        slot.shared = {n: nn.Parameter(p.detach().clone()) for n, p in slot.tensors.items()}
    made = outer([*slot.shared.values()])
    _check_outer(made, outer, [*slot.shared.values()])
    if slot.saved is not None:
        made.load_state_dict(slot.saved)
    slot.outer, slot.saved = made, None


def _check_outer(made: object, outer: Outer, shared: Sequence[Tensor]) -> None:
    groups = made.param_groups if isinstance(made, Optimizer) else ()
    given = [p for group in groups for p in group["params"]]
    if not isinstance(made, Optimizer) or {*map(id, given)} != {*map(id, shared)}:
        raise TypeError(
            "local_sgd expects outer as a function that returns a torch optimizer of the "
            "parameters that it is given, such as lambda params: torch.optim.SGD(params, lr=0.7, "
            f"momentum=0.9, nesterov=True); {name_of(outer)} returned {checks.describe(made)}"
        )
    if wants_closure(type(made)):
        raise TypeError(
            f"local_sgd: {type(made).__name__} evaluates a loss, and outer has only a gradient: "
            "write torch.optim.SGD"
        )


# --------------------------------------------------------------------------------------------------
# What it cannot be together with, and what to write instead.

_ALONE = "leave one of them out"
_DECIDES = "decides in each update by what all processes exchange: "
_REFUSED = {
    "ema": "would average the weights of each process by themselves: leave it out. Evaluations "
    "have the average over processes already",
    "skip_nonfinite": _DECIDES + "write the hook halt_on_nonfinite()",
    "spike_guard": _DECIDES + "write clip(...)",
    "amp": _DECIDES + 'write amp("bf16")',
    "sam": _DECIDES + _ALONE,
    "retry_on_oom": _DECIDES + "write microbatch(size)",
    "closure": "lets the optimizer evaluate the loss, in each process as often as it likes: "
    + _ALONE,
    "cuda_graph": "works in one process only: write compiled()",
    "tbptt": "works in one process only: " + _ALONE,
}
_REFUSED["swa"] = _REFUSED["ema"]
# Middleware with a slot that is the same in every process, because no gradient is in it.
_ALIKE = ("local_sgd", "schedule", "scheduled", "torch_scheduler", "channels_last")


def _check_members(members: Sequence[Middleware]) -> None:
    """Raise NotImplementedError if a middleware needs what is the same in every process."""
    for member in members:
        factory = None if member.call is None else member.call.factory
        ours = checks.module_of(factory).startswith("fnloop.")
        name = checks.known_as(factory) if ours else ""
        if name == "amp" and member.gradient is None:  # in bf16
            continue
        why = _REFUSED.get(name)
        if why is None and member.init is not None and name not in _ALIKE:
            why = (
                f'keeps state.slots["{member.name}"], which may differ between processes, and a '
                "checkpoint has that of the main one: " + _ALONE
            )
        if why is not None:
            raise NotImplementedError(f"local_sgd cannot work with {member!r}, which {why}")


def _check_state(state: TrainState, members: Sequence[Middleware]) -> None:
    """Raise NotImplementedError if the processes of a state cannot update by themselves."""
    refuse(state, "local_sgd", exact="its sums depend on the number of processes. Leave one out")
    used, why = optimizers(state, used=True).values(), None
    if is_sharded(state.model):
        why = (
            "needs the whole model in every process, and here each has a part of it: leave "
            "fully_shard or the mesh out, or leave local_sgd out"
        )
    elif any(wants_closure(type(each)) for each in used):
        why = "calls an optimizer once in an update, and this one evaluates the loss: take AdamW"
    elif modes_of(state.optimizer):
        why = (
            "evaluates the average of the weights to train with, and this optimizer has others for "
            "an evaluation: take AdamW with a schedule"
        )
    if why is not None:
        raise NotImplementedError(f"local_sgd {why}")
