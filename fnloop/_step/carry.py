"""Loss functions with a carry, ``(model, batch, carry) -> (loss, aux, carry)``, in a forward step.

The carry goes in with the batch and comes out with aux, so that the step inside is the same as for
any other loss function. What wraps the forward step sees neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import attrs
from torch import Tensor, nn

from fnloop._backend.containers import map_leaves
from fnloop._core.carry import carry_of, with_carry
from fnloop._core.skip import Skip
from fnloop._core.state import TrainState
from fnloop._core.types import Aux, Batch, LossFn, Output, Step
from fnloop._display.checks import describe
from fnloop._step.forward import items_in

__all__ = ["carrying", "takes_carry"]

_AUX, _CARRY = "aux", "carry"  # what the step inside gets as aux
_MEANING = "with tbptt a loss function takes (model, batch, carry) and returns (loss, aux, carry)"


class _Fed(NamedTuple):
    """What the loss function is called with."""

    batch: Batch
    carry: object


def takes_carry(
    loss_fn: Callable[..., object], name: str, positions: Callable[[Batch], int]
) -> LossFn:
    """Return the loss function for a forward step under :func:`carrying`.

    Args:
        loss_fn: the loss function with a carry.
        name: its name in messages.
        positions: the number of positions of a window, which its weight is multiplied by, unless
            the leading dimension counts them.
    """

    def with_carried(model: nn.Module, fed: Batch, /) -> tuple[Tensor, Aux] | Skip:
        __tracebackhide__ = True
        reply = loss_fn(model, fed.batch, fed.carry)
        if isinstance(reply, Skip):
            return reply
        if not isinstance(reply, tuple) or len(reply) != 3:
            raise TypeError(f"{_MEANING}; {name} returned {_describe(reply)}")
        loss, aux, carry = reply
        if not isinstance(aux, Mapping):
            raise TypeError(
                f"{_MEANING}, where aux is a mapping, such as {{}}; got {describe(aux)}"
            )
        weight = aux.get("weight")
        if weight is None:
            weight = items_in(fed.batch, name) * positions(fed.batch)
        return loss, {"weight": weight, _AUX: aux, _CARRY: carry}

    return with_carried


def carrying(step: Step) -> Step:
    """Return the forward step that gives the carry to the loss function, and keeps the new one."""

    def carried(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, _Fed(batch, carry_of(state)))
        if _CARRY not in out.aux:
            return state, out  # the loss function leaves the window out: the carry stays
        state = with_carry(state, map_leaves(out.aux[_CARRY], _detached))
        return state, attrs.evolve(out, aux=out.aux[_AUX])

    return carried


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _describe(reply: object) -> str:
    return f"a tuple of {len(reply)}" if isinstance(reply, tuple) else describe(reply)
