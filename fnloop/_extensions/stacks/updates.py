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

from fnloop._core.several import Several
from fnloop._extensions.stacks.leaves import Leaves, leaves_of
from fnloop.extend import Batch, torch_compat

# --------------------------------------------------------------------------------------------------
# The optimizers' steps.

Kept = dict[str, Batch]  # what an optimizer keeps of a parameter
Group = dict[str, Any]  # a parameter group
Apply = Callable[[Optimizer], None]


def update_models(
    stack: Several, optimizers: Sequence[Optimizer], apply: Apply, replaced: bool
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


class _OneByOne(Exception):
    """Raised if an update cannot be made for all models at once."""


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
        groups = zip(*(one.param_groups for one in optimizers), strict=True)
        try:
            made = [self._of_group(rule, n, each, optimizers) for n, each in enumerate(groups)]
        except _OneByOne:
            return False
        for make in made:  # all of the groups, or none
            make()
        return True

    def _of_group(
        self, rule: Rule, n: int, groups: Sequence[Group], optimizers: Sequence[Optimizer]
    ) -> Callable[[], None]:
        """Return what makes the update of a group, of all optimizers."""
        chosen = [self.leaves.places.get(id(p), -1) for p in groups[0]["params"]]
        if -1 in chosen:
            raise _OneByOne
        chosen = [i for i in chosen if self.leaves.params[i].grad is not None]
        self._look(optimizers, chosen)
        return rule(self, n, groups, chosen)

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

    def number(self, n: int, key: str, groups: Sequence[Group]) -> float | Tensor:
        """Return a number of the groups: one float if it is the same for all, else a vector."""
        field, _, part = key.partition(".")
        values = tuple(
            [g[field][int(part)] for g in groups] if part else [g[field] for g in groups]
        )
        if not _NUMBERS.issuperset(map(type, values)):
            raise _OneByOne
        if values.count(values[0]) == len(values):
            return values[0]
        known = self._numbers.get((n, key))
        if known is None or known[0] != values:
            known = self._numbers[n, key] = values, torch.tensor(values, dtype=torch.float64)
        return known[1]

    def has(self, leaf: int, key: str) -> bool:
        """Return whether the optimizers keep something of a parameter: all of them, or none."""
        found = {own.get(key) is not None for own in self._own[leaf]}
        if len(found) > 1:
            raise _OneByOne
        return found.pop()

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
_banks: WeakKeyDictionary[Several, Bank] = WeakKeyDictionary()
Rule = Callable[[Bank, int, Sequence[Group], Sequence[int]], Callable[[], None]]


def _check_off(groups: Sequence[Group], *keys: str) -> None:
    if any(group.get(key) for group in groups for key in keys):
        raise _OneByOne


def _flag(groups: Sequence[Group], key: str) -> bool:
    """Return whether a setting is switched on: in all groups, or in none."""
    found = {bool(group.get(key)) for group in groups}
    if len(found) > 1:
        raise _OneByOne
    return found.pop()


def _like(value: float | Tensor, leaf: Tensor) -> Batch:
    """Return a number, or a number of each model, to multiply a stacked tensor by."""
    return _column(value, leaf) if isinstance(value, Tensor) else value


def _is_zero(value: float | Tensor) -> bool:
    return not isinstance(value, Tensor) and value == 0


def _sgd(bank: Bank, n: int, groups: Sequence[Group], chosen: Sequence[int]) -> Callable[[], None]:
    _check_off(groups, "differentiable")
    keys = ("lr", "momentum", "dampening", "weight_decay")
    lr, momentum, dampening, decay = (bank.number(n, key, groups) for key in keys)
    keys = ("nesterov", "maximize", "momentum")
    nesterov, maximize, has_momentum = (_flag(groups, key) for key in keys)
    begun = {i: bank.has(i, "momentum_buffer") for i in chosen} if has_momentum else {}

    def make() -> None:
        for i in chosen:
            leaf = bank.leaves.params[i]
            assert leaf.grad is not None
            grad = -leaf.grad if maximize else leaf.grad
            if not _is_zero(decay):
                grad = torch.addcmul(grad, leaf, _tensor(decay, leaf))
            if has_momentum:
                buffer = bank.kept(i, "momentum_buffer", lambda _, g=grad: g.clone())
                if begun[i]:
                    buffer.mul_(_like(momentum, leaf)).add_(grad * (1 - _like(dampening, leaf)))
                grad = grad + buffer * _like(momentum, leaf) if nesterov else buffer
            if isinstance(lr, Tensor):
                leaf.addcmul_(grad, _column(lr, leaf), value=-1)
            else:
                leaf.add_(grad, alpha=-lr)

    return make


def _tensor(value: float | Tensor, leaf: Tensor) -> Tensor:
    return _column(value, leaf) if isinstance(value, Tensor) else leaf.new_tensor(value)


def _adam(bank: Bank, n: int, groups: Sequence[Group], chosen: Sequence[int]) -> Callable[[], None]:
    _check_off(groups, "differentiable", "amsgrad", "capturable")
    keys = ("lr", "betas.0", "betas.1", "eps", "weight_decay")
    lr, beta1, beta2, eps, decay = (bank.number(n, key, groups) for key in keys)
    keys = ("maximize", "decoupled_weight_decay", "fused")
    maximize, decoupled, fused = (_flag(groups, key) for key in keys)
    params = [bank.leaves.params[i] for i in chosen]
    if not all(p.is_floating_point() for p in params):
        raise _OneByOne
    for i, key in itertools.product(chosen, ("step", "exp_avg", "exp_avg_sq")):
        bank.has(i, key)  # raises if only some of the models have it

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
