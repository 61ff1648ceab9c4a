"""Which optimizers of a state a step updates with."""

from __future__ import annotations

from collections.abc import Sequence

from fnloop._core.types import Middleware, middleware
from fnloop.extend import checks


@middleware("update")
def using(*names: str) -> Middleware:
    """Update with some optimizers of the state only, such as Adam first and L-BFGS later.

    All optimizers are in the state from the beginning, ``TrainState.create(model, {"adam": ...,
    "lbfgs": ...})``, so a checkpoint has all of them. Each step says which it updates with. The
    others rest: their gradients are dropped after backward, so ``clip`` sees only what is used, in
    whichever order the two are listed. ``state.updates`` counts the updates of each.

    Optimizers may have the same parameters, if no step uses two of them. One that evaluates the
    loss by itself, such as LBFGS, is used alone.

    Args:
        *names: the names of the optimizers. They update in the order of the state.

    Returns:
        A middleware that says how the update is made.

    Raises:
        TypeError: there is no name, or one is not a str.
        ValueError: a name is given twice. When composing: it is listed in a turn of ``alternate``
            or around a step that updates by itself; or ``cuda_graph`` or ``spike_guard`` with
            ``then="back"`` is listed. When a run starts: the state has no optimizer of a name,
            two that are used have one parameter, or one of several evaluates the loss by itself.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import Toy, toy_loss
        >>> model = Toy()
        >>> rates = {"large": 1.0, "small": 0.5}
        >>> optimizers = {k: torch.optim.SGD(model.parameters(), lr=v) for k, v in rates.items()}
        >>> state = fl.TrainState.create(model, optimizers)
        >>> for name in ("large", "small", "small"):
        ...     state, out = fl.pipeline(using(name))(toy_loss)(state, torch.tensor([4.0]))
        >>> state.model.w.item(), dict(state.updates)           # 0 - 4 - 2 - 2
        (-8.0, {'large': 1, 'small': 2})

    Notes:
        Backward computes the gradients of what rests, too. To save that, ``freeze`` it.

        Within the update a middleware is given a state with the used optimizers only. ``schedule``,
        ``torch_scheduler`` and ``plateau`` leave the rates of those that rest alone. They count the
        updates of their own optimizer: where it has rested in 100 of the 300 updates of a run or a
        phase, ``total_steps`` is 200.
    """
    if not names:
        raise TypeError(
            'using expects names of optimizers, such as using("adam"); got none: to update with '
            "all, leave using out"
        )
    if not all(isinstance(name, str) and name for name in names):
        given = ", ".join(map(checks.describe, names))
        raise TypeError(f'using expects names of optimizers: write using("a", "b"); got {given}')
    if len({*names}) < len(names):
        raise ValueError(f"using expects each name once; got {names!r}")
    return Middleware("using", uses=names, check=_check)


def _check(listed: Sequence[Middleware]) -> None:
    """Raise ValueError if another middleware is for all optimizers in any case."""
    for member in listed:
        if member.name == "spike_guard" and member.check_state is not None:
            raise ValueError(
                f'{member!r} goes back with every optimizer: write then="skip" or then="stop", '
                "and using lets some rest: leave one of them out"
            )
