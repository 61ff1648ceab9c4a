"""What all processes compare of a state: their counters, and the norms of their weights.

All processes begin with the same weights and make the same updates, so their weights have the
same bits, or nearly so on processors of different kinds. Their norms are compared at the end of
each epoch and before each save, in one small exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.state import TrainState
from fnloop._extensions.engines.exchanges import ADVICE, DIVERGED
from fnloop.extend import Ownership, View, collectives, groups, is_sharded, local_part, torch_compat

TOLERANCE = 1e-3  # by which norms may differ between different kinds of processors
# By which that may grow from one comparison to the next, and more in each update between them.
GROWTH, GROWTH_PER_UPDATE = 1e-5, 1e-6
_BY_HOOK = (
    "What a hook or a middleware does to weights must be the same everywhere: draw from torch, "
    "whose generators agree after backward, or fnloop.broadcast(...) what was drawn"
)
_BY_LOSS = (
    "It is in no optimizer, so the loss function changed it: make it a buffer "
    "(self.register_buffer), of which every process gets that of the main one"
)


def check_alike(state: TrainState, what: str) -> None:
    """Raise in every process if the counters or the weights of the processes differ. A collective.

    Args:
        state: the newest state.
        what: what it is for, as errors name it.

    Raises:
        RuntimeError: they differ; the message names the weight and two processes.
    """
    check_alike_in(state, collectives.gather_from_all(compared_of(state), what))


@attrs.frozen
class Compared:
    """What has to be the same in every process.

    Args:
        counters: ``(step, skipped, epoch)``.
        norms: name to norm, of each parameter that every process has the same copy of.
    """

    counters: tuple[int, int, int]
    norms: dict[str, float]


def compared_of(state: TrainState) -> Compared:
    """Return what the other processes compare with theirs. It is read from the device."""
    return Compared((state.step, state.skipped, state.epoch), _norms(state))


def check_alike_in(state: TrainState, every: Sequence[Compared]) -> None:
    """Raise, as :func:`check_alike` does, if what all processes have sent differs.

    Args:
        state: the newest state.
        every: by rank, what each has sent.
    """
    check_counters_alike([each.counters for each in every])
    norms = every[0].norms
    if any(each.norms.keys() != norms.keys() for each in every):
        raise RuntimeError(f"{DIVERGED}: they train different parameters. {ADVICE}")
    found = [*zip(*(each.norms.values() for each in every), strict=True)]
    most, least = [*map(max, found)], [*map(min, found)]
    owner, now = Ownership.of(state), Ownership.generation_of(state)
    then, known = owner.compared
    limit = min(TOLERANCE, known + GROWTH + GROWTH_PER_UPDATE * max(now - then, 0))
    apart = [
        (high - low) / max(abs(low), abs(high), 1e-300)
        for low, high in zip(least, most, strict=True)
    ]
    worst = max(apart, default=0.0)
    if worst > limit:
        at = apart.index(worst)
        _raise_apart(state, [*norms][at], found[at])
    owner.compared = now, worst
    owner.equal_at = owner.equal_at if worst else state.step


def check_counters_alike(every: Sequence[Sequence[float]]) -> None:
    """Raise unless the counters agree: those of each process, or the smallest and the largest."""
    if any([*each] != [*every[0]] for each in every):
        low, high = ([*map(int, map(of, zip(*every, strict=True)))] for of in (min, max))
        raise RuntimeError(
            f"{DIVERGED}: (step, skipped, epoch) is {low} in one and {high} in another. {ADVICE}"
        )


def _raise_apart(state: TrainState, name: str, every: Sequence[float]) -> NoReturn:
    low, high = min(every), max(every)
    trained = {id(p) for group in groups(state).values() for p in group["params"]}
    is_trained = id(state.model.get_parameter(name)) in trained
    step = Ownership.of(state).equal_at
    equal = "" if step is None else f"All norms were last equal at step {step}. "
    raise RuntimeError(
        f"{DIVERGED}: the norm of the weight {name} is from {low:.9g} in process "
        f"{every.index(low)} to {high:.9g} in process {every.index(high)}. {equal}"
        f"{_BY_HOOK if is_trained else _BY_LOSS}"
    )


def _norms(state: TrainState) -> dict[str, float]:
    """Return the norm of each parameter that every process has the same copy of."""
    if any(isinstance(slot, View) and slot.apart for slot in state.slots.values()):
        return {}
    every, sharded = state.model.named_parameters(), is_sharded(state.model)
    chosen = ((k, p) for k, p in every if _has_norm(p) and (p.requires_grad or not sharded))
    named = {name: p.detach() for name, p in chosen if local_part(p) is p}
    if not named:
        return {}
    norms = torch.stack([norm.double() for norm in torch_compat.foreach_norm([*named.values()])])
    return dict(zip(named, norms.nan_to_num(0.0).tolist(), strict=True))


def _has_norm(p: Tensor) -> bool:
    wide = p.is_floating_point() and p.dtype.itemsize > 1
    return type(p) is nn.Parameter and wide and p.layout is torch.strided
