"""The updates of a stack of models: their optimizers, and what is measured of their gradients.

An optimizer of a class that is known here computes the updates of all models at once, in stacked
tensors: its state becomes views of them. Every other one makes its own step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fnloop._extensions.stacks.leaves import Leaves, Models, leaves_of
from fnloop.extend import Batch, torch_compat

# --------------------------------------------------------------------------------------------------
# The optimizers' steps.

Kept = dict[str, Batch]  # what an optimizer keeps of a parameter
Group = dict[str, Any]  # a parameter group
Apply = Callable[[Optimizer], None]


def update_models(
    stack: Models, optimizers: Sequence[Optimizer], apply: Apply, replaced: bool
) -> None:
    """Update all models with their optimizers, by the stacked gradients.

    Args:
        stack: the stack.
        optimizers: the optimizers, one for each model.
        apply: makes the step of one optimizer.
        replaced: whether someone looks at each optimizer's step.
    """
    __tracebackhide__ = True
    leaves = leaves_of(stack)
    if (bank := _banks.get(stack)) is None or bank.leaves is not leaves:
        bank = _banks[stack] = Bank(leaves)
    if not replaced and bank.update(optimizers):
        return
    try:
        for leaf, owners in zip(leaves.params, leaves.owners, strict=True):
            if leaf.grad is not None:
                for p, grad in zip(owners, leaf.grad.unbind(), strict=True):
                    p.grad = grad
        for one in optimizers:
            apply(one)
    finally:
        for p in itertools.chain.from_iterable(leaves.owners):
            p.grad = None


class Bank:
    """What the optimizers of a stack keep, stacked as the parameters are.

    Args:
        leaves: the stacked parameters.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self._held: dict[tuple[object, str], tuple[Tensor, list[Tensor]]] = {}
        self._numbers: dict[tuple[int, str], tuple[tuple[float, ...], Tensor]] = {}
        # Of each optimizer, what it keeps of each parameter; and by leaf, that of all optimizers.
        self._seen: list[list[Kept]] = []
        self._own: dict[int, list[Kept]] = {}

    @torch.no_grad()
    def update(self, optimizers: Sequence[Optimizer]) -> bool:
        """Make the update of all models, if it can be made at once. Return whether it was."""
        rule = _RULES.get(type(optimizers[0]))
        if rule is None or any(map(torch_compat.has_step_hooks, optimizers)):
            return False
        places, params = self.leaves.places, self.leaves.params
        made: list[Callable[[], None]] = []
        for n, first in enumerate(optimizers[0].param_groups):
            chosen = [places.get(id(p), -1) for p in first["params"]]
            if -1 in chosen:
                return False
            groups = [one.param_groups[n] for one in optimizers]
            chosen = [i for i in chosen if params[i].grad is not None]
            self._look(optimizers, chosen)
            if (make := rule(self, n, groups, chosen)) is None:
                return False
            made.append(make)
        for make in made:  # all of the groups, or none
            make()
        return True

    def _look(self, optimizers: Sequence[Optimizer], chosen: Sequence[int]) -> None:
        """Look up what optimizers keep, if they have others than before."""
        # By identity: a look-up by a tensor takes as long as all of them together.
        if (
            len(self._seen) == len(optimizers)
            and all(
                len(one.state) == len(seen) and all(map(operator.is_, one.state.values(), seen))
                for one, seen in zip(optimizers, self._seen, strict=True)
            )
            and self._own.keys() >= {*chosen}
        ):
            return
        owners = self.leaves.owners
        for i in chosen:
            pairs = zip(optimizers, owners[i], strict=True)
            self._own[i] = [one.state[p] for one, p in pairs]
        known = {id(own) for one in optimizers for own in one.state.values()}
        self._own = {i: own for i, own in self._own.items() if known.issuperset(map(id, own))}
        self._seen = [[*one.state.values()] for one in optimizers]

    def numbers(self, n: int, groups: Sequence[Group], *keys: str) -> list[float | Tensor] | None:
        """Return numbers of the groups: one float if it is the same for all, else a vector.

        None: one is not a number in all of them.
        """
        found = [self._number(n, key, groups) for key in keys]
        return None if any(each is None for each in found) else found  # type: ignore[return-value]

    def _number(self, n: int, key: str, groups: Sequence[Group]) -> float | Tensor | None:
        field, _, part = key.partition(".")
        values = tuple(
            [g[field][int(part)] for g in groups] if part else [g[field] for g in groups]
        )
        if not _NUMBERS.issuperset(map(type, values)):
            return None
        if values.count(values[0]) == len(values):
            return values[0]
        known = self._numbers.get((n, key))
        if known is None or known[0] != values:
            known = self._numbers[n, key] = values, torch.tensor(values, dtype=torch.float64)
        return known[1]

    def has(self, leaf: int, key: str) -> bool | None:
        """Return whether the optimizers keep something of a parameter; None: only some of them."""
        found = [own.get(key) is None for own in self._own[leaf]]
        return None if True in found and False in found else not found[0]

    def kept(self, leaf: int, key: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what the optimizers keep of a parameter as one tensor, of which theirs are views.

        Args:
            leaf: the number of the stacked parameter.
            key: the name of what they keep.
            make: makes it from the stacked parameter, if they do not have it.
        """
        own, stacked = self._own[leaf], self.leaves.params[leaf]
        return self._stacked((leaf, key), key, own, lambda: make(stacked))

    def counts(self, chosen: Sequence[int], make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return how often each parameter was updated, of shape (parameters, models).

        Args:
            chosen: the numbers of the stacked parameters.
            make: makes the zeros of shape (models,), if the optimizers do not count yet.
        """
        own = [each for i in chosen for each in self._own[i]]
        leaf = self.leaves.params[chosen[0]]
        several = lambda: torch.cat([make(leaf) for _ in chosen])
        return self._stacked((*chosen,), "step", own, several).view(len(chosen), -1)

    def _stacked(
        self,
        place: object,
        key: str,
        own: Sequence[Kept],
        make: Callable[[], Tensor],
    ) -> Tensor:
        stacked, parts = self._held.get((place, key), (None, []))
        now = [each.get(key) for each in own]
        if stacked is not None and all(map(operator.is_, now, parts)):
            return stacked
        if any(part is None for part in now):  # some parameters may get their first gradient later
            now = [new if old is None else old for old, new in zip(now, make(), strict=True)]
        stacked = torch.stack(now)  # type: ignore[arg-type]
        parts = [*stacked.unbind()]
        for each, part in zip(own, parts, strict=True):
            each[key] = part
        self._held[place, key] = stacked, parts
        return stacked


def _column(values: Tensor, like: Tensor) -> Tensor:
    """Return a number of each model in a shape that multiplies a stacked tensor."""
    return values.to(like.device, like.dtype).reshape(-1, *[1] * (like.ndim - 1))


_NUMBERS = {int, float}
_banks: WeakKeyDictionary[Models, Bank] = WeakKeyDictionary()
Rule = Callable[[Bank, int, Sequence[Group], Sequence[int]], "Callable[[], None] | None"]


def _flags(groups: Sequence[Group], *keys: str) -> bool:
    """Return whether settings are switched off in all groups."""
    return not any(group.get(key) for group in groups for key in keys)


def _like(value: float | Tensor, leaf: Tensor) -> Batch:
    """Return a number, or a number of each model, to multiply a stacked tensor by."""
    return _column(value, leaf) if isinstance(value, Tensor) else value


def _is_zero(value: float | Tensor) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _sgd(
    bank: Bank, n: int, groups: Sequence[Group], chosen: Sequence[int]
) -> Callable[[], None] | None:
    if not _flags(groups, "differentiable"):
        return None
    read = bank.numbers(n, groups, "lr", "momentum", "dampening", "weight_decay")
    nesterov, maximize = ({bool(g[k]) for g in groups} for k in ("nesterov", "maximize"))
    momenta = {bool(group["momentum"]) for group in groups}
    if read is None or max(map(len, (nesterov, maximize, momenta))) > 1:
        return None
    lr, momentum, dampening, decay = read
    starts = {i: bank.has(i, "momentum_buffer") for i in chosen}
    if True in momenta and None in starts.values():
        return None

    def make() -> None:
        for i in chosen:
            leaf = bank.leaves.params[i]
            assert leaf.grad is not None
            grad = -leaf.grad if True in maximize else leaf.grad
            if not _is_zero(decay):
                grad = torch.addcmul(grad, leaf, _tensor(decay, leaf))
            if True in momenta:
                first = not starts[i]
                buffer = bank.kept(i, "momentum_buffer", lambda _, g=grad: g.clone())
                if not first:
                    buffer.mul_(_like(momentum, leaf)).add_(grad * (1 - _like(dampening, leaf)))
                grad = grad + buffer * _like(momentum, leaf) if True in nesterov else buffer
            if isinstance(lr, Tensor):
                leaf.addcmul_(grad, _column(lr, leaf), value=-1)
            else:
                leaf.add_(grad, alpha=-lr)

    return make


def _tensor(value: float | Tensor, leaf: Tensor) -> Tensor:
    return _column(value, leaf) if isinstance(value, Tensor) else leaf.new_tensor(value)


def _adam(
    bank: Bank, n: int, groups: Sequence[Group], chosen: Sequence[int]
) -> Callable[[], None] | None:
    if not _flags(groups, "differentiable", "amsgrad", "capturable"):
        return None
    read = bank.numbers(n, groups, "lr", "betas.0", "betas.1", "eps", "weight_decay")
    flags = [
        {bool(group.get(key)) for group in groups}
        for key in ("maximize", "decoupled_weight_decay", "fused")
    ]
    params = [bank.leaves.params[i] for i in chosen]
    real = all(p.is_floating_point() for p in params)
    if read is None or not real or max(map(len, flags)) > 1:
        return None
    lr, beta1, beta2, eps, decay = read
    (maximize,), (decoupled,), (fused,) = flags
    kept = ("step", "exp_avg", "exp_avg_sq")
    if any(bank.has(i, key) is None for i in chosen for key in kept):
        return None

    count = lambda leaf: torch.zeros(len(groups), device=leaf.device if fused else "cpu")

    def make() -> None:
        if not chosen:
            return
        wide = bank.counts(chosen, count).add_(1).double()
        # Of each parameter and each model: the size of the step, and what divides the root.
        rate, first, second = (
            value.to(wide.device) if isinstance(value, Tensor) else value
            for value in (lr, beta1, beta2)
        )
        sizes = (-rate / (1 - first**wide)).unbind()
        divisors = (1 - second**wide).sqrt_().unbind()
        for i, leaf, size, divisor in zip(chosen, params, sizes, divisors, strict=True):
            assert leaf.grad is not None
            mean = bank.kept(i, "exp_avg", torch.zeros_like)
            square = bank.kept(i, "exp_avg_sq", torch.zeros_like)
            grad = -leaf.grad if maximize else leaf.grad
            if not _is_zero(decay):
                if decoupled:
                    leaf.mul_(_like(1 - lr * decay, leaf))
                else:
                    grad = torch.addcmul(grad, leaf, _tensor(decay, leaf))
            mean.lerp_(grad, _like(1 - beta1, leaf))
            if isinstance(beta2, Tensor):
                square.mul_(_column(beta2, leaf)).addcmul_(grad, grad * _column(1 - beta2, leaf))
            else:
                square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = square.sqrt().div_(_column(divisor, leaf)).add_(_like(eps, leaf))
            leaf.addcmul_(mean / root, _column(size, leaf))

    return make


_RULES: Mapping[type[Optimizer], Rule] = {SGD: _sgd, Adam: _adam, AdamW: _adam}
