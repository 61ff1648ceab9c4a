"""The parameters that a middleware is for, where selectors say which."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fnloop._core.selectors import Selector, select
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState, all_parameters, parameters
from fnloop._display.checks import join_names

__all__ = ["Chosen"]


class Chosen:
    """The parameters that selectors choose, looked up once for each model.

    Args:
        owner: the middleware, for messages.
        selectors: as in ``freeze``; None are all parameters.
    """

    def __init__(self, owner: str, selectors: Sequence[Selector] | None) -> None:
        self._owner, self._selectors = owner, selectors
        # By model: all parameters when it was looked at, and those chosen.
        self._found: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[Tensor]]] = (
            WeakKeyDictionary()
        )

    def named(self, state: TrainState) -> dict[str, nn.Parameter]:
        """Return the parameters of a state's model that are chosen, by name.

        Raises:
            ValueError: a selector is for nothing in the model.
        """
        selectors = ("*",) if self._selectors is None else self._selectors
        return select(self._owner, unwrap(state), selectors).parameters

    def of(self, state: TrainState) -> list[Tensor]:
        """Return those of the parameters that a state's optimizers update that are chosen."""
        if self._selectors is None:
            return parameters(state)
        known, found = self._found.get(state.model, (None, []))
        if known is not (now := all_parameters(state)):
            ids = {id(p) for p in self.named(state).values()}
            found = [p for p in parameters(state) if id(p) in ids]
            self._found[state.model] = now, found
        return found

    def check(self, state: TrainState) -> None:
        """Raise unless the state's optimizers update one of them, or all of them are frozen.

        Raises:
            ValueError: they are for nothing in the model, or all belong to other optimizers.
        """
        named = self.named(state)
        if not self.of(state) and (trained := [n for n, p in named.items() if p.requires_grad]):
            raise ValueError(
                f"{self._owner} is for parameters that no optimizer of this step updates: "
                f"{join_names(trained)}. List it in the step of their optimizer"
            )
