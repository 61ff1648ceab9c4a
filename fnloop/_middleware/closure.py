"""Optimizers whose step evaluates the loss by itself."""

from __future__ import annotations

from collections.abc import Sequence

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._step.engine import engine_of
from fnloop._step.exact import check_not_exact
from fnloop._step.update import CLOSURE, CREATE_GRAPH

__all__ = ["closure"]


@middleware("update")
def closure(*, create_graph: bool = False) -> Middleware:
    """Call ``optimizer.step(closure)``, for an optimizer that takes a closure by choice.

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

    name = CREATE_GRAPH if create_graph else CLOSURE

    def check(listed: Sequence[Middleware]) -> None:
        for member in listed:
            if member.name == "cuda_graph":
                raise ValueError(
                    f"{member!r} cannot capture an optimizer that evaluates the loss by itself: "
                    "leave one out"
                )
            if member.name in (CLOSURE, CREATE_GRAPH) and member.name != name:
                raise ValueError(
                    "closure() and closure(create_graph=True) are both listed: leave closure() out"
                )
            if create_graph and (member.window > 1 or _scales(member)):
                raise ValueError(
                    f"{member!r} changes gradients in place, which "
                    "closure(create_graph=True) differentiates: leave one out"
                )

    return Middleware(name, check=check, init=_refuse_several if create_graph else None)


def _refuse_several(state: TrainState) -> None:
    name = "closure(create_graph=True)"
    check_not_exact(state, name, "it works in one process only. Leave one of them out")
    if not engine_of(state).calls_every_batch:
        raise NotImplementedError(
            "closure(create_graph=True) works in one process only: the graph of a gradient does "
            "not reach the other processes"
        )


def _scales(member: Middleware) -> bool:
    return member.name == "amp" and member.gradient is not None
