"""Undo the loading of an optimizer that fails, and keep its group objects if it succeeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend.containers import map_leaves
from fnloop._checkpoint.compare import find_difference
from fnloop._checkpoint.optimizer import has_own_state_dict, walk_optimizers
from fnloop._checkpoint.optimizer_settings import assign_settings
from fnloop._core.optimizers import Group

__all__ = ["rollback_on_error"]


@contextlib.contextmanager
def rollback_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Undo the loading of an optimizer if it fails. If it succeeds, keep the group objects.

    The ``load_state_dict`` of torch replaces the groups by new ones. An optimizer around another
    one may hold its groups, and so may a schedule or a graph.
    """
    before = [_OptimizerCopy(inner) for inner in walk_optimizers(optimizer)]
    reported = None
    if has_own_state_dict(optimizer):
        reported = map_leaves(
            optimizer.state_dict(), lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf
        )
    try:
        yield
    except BaseException:
        for one in before:
            one.restore()
        with contextlib.suppress(Exception):
            # It may have loaded in place into tensors that the copies share.
            if reported is not None and find_difference(reported, optimizer.state_dict(), ""):
                optimizer.load_state_dict(reported)
        raise
    _keep_group_objects(before)


class _OptimizerCopy:
    """What an optimizer held before loading; the tensors are shared with it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.attributes = dict(vars(optimizer))
        self.state = {key: map_leaves(held) for key, held in optimizer.state.items()}
        self.groups = optimizer.param_groups
        self.contents = [(group, dict(group)) for group in self.groups]

    def restore(self) -> None:
        """Give the optimizer back what it held."""
        vars(self.optimizer).clear()
        vars(self.optimizer).update(self.attributes)
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        self.groups[:] = [group for group, _ in self.contents]
        for group, settings in self.contents:
            group.clear()
            group.update(settings)


def _keep_group_objects(before: list[_OptimizerCopy]) -> None:
    """Move loaded settings into the group objects that were there before loading."""
    # Optimizers that shared one new list share one old list. The new lists stay referenced here, so
    # that their ids stay unique.
    chosen: dict[int, tuple[list[Group], list[Group]]] = {}
    for one in before:
        new = one.optimizer.param_groups
        old, _ = chosen.setdefault(id(new), (one.groups, new))
        if new is old or len(new) != len(one.contents):
            continue
        for (group, _), settings in zip(one.contents, new, strict=True):
            if group is not settings:
                for key in [key for key in group if key not in settings]:
                    del group[key]
                assign_settings(group, settings)
        old[:] = [group for group, _ in one.contents]
        if "param_groups" in vars(one.optimizer):
            one.optimizer.param_groups = old
