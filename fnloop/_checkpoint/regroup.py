"""Give an optimizer the parameter groups that a checkpoint has, where ``unfreeze`` changed them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch.optim import Optimizer

from fnloop._checkpoint.optimizer import NamedOptimizer
from fnloop._core.freeze import add_group, split_group
from fnloop._core.frozen import Groups
from fnloop._core.optimizers import UNFROZEN
from fnloop._core.serialize import Json

__all__ = ["groups_kept_on_error", "regroup"]

_Names = Sequence[str]


@contextlib.contextmanager
def groups_kept_on_error(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Put the groups of optimizers back if there is an exception."""
    before = [(one, Groups.of(one)) for one in optimizers]
    try:
        yield
    except BaseException:
        for one, groups in before:
            groups.put_back(one)
        raise


def regroup(
    named: NamedOptimizer, saved: Sequence[Mapping[str, Json]], others: Collection[str]
) -> None:
    """Give an optimizer the groups of a checkpoint, if ``unfreeze`` explains the difference.

    ``unfreeze`` moves parameters out of a group into a new one, and adds new ones. So the groups on
    one side must follow from those on the other. Any other difference is left for an error.

    Args:
        named: the new optimizer.
        saved: the groups in the checkpoint: the names of their parameters, and their settings.
        others: the names of the parameters of other optimizers.
    """
    optimizer = named.optimizer
    mine, theirs = named.group_names(), [[*group["params"]] for group in saved]
    if mine == theirs:
        return
    parameters = {**named.own, **named.parameters()}
    wanted = {name for group in theirs for name in group}
    if not wanted <= parameters.keys() or not wanted.isdisjoint(others):
        return
    here = [bool(group.get(UNFROZEN)) for group in optimizer.param_groups]
    there = [bool(group.get(UNFROZEN)) for group in saved]
    if not (_follows(mine, theirs, there) or _follows(theirs, mine, here)):
        return
    del optimizer.param_groups[len(theirs) :]
    groups = optimizer.param_groups
    source = {name: i for i, group in enumerate(mine) for name in group}
    for names in theirs[len(groups) :]:
        i = source.get(names[0]) if names else None
        if i is None:
            add_group(optimizer, {name: parameters[name] for name in names})
        else:
            held = [named.names[id(p)] for p in groups[i]["params"]]
            split_group(optimizer, groups[i], map(held.index, names))
    for group, names in zip(groups, theirs, strict=True):
        group["params"][:] = [parameters[name] for name in names]
        if "param_names" in group:
            group["param_names"][:] = names


def _follows(before: Sequence[_Names], after: Sequence[_Names], made: Sequence[bool]) -> bool:
    """Return whether ``unfreeze`` can have made groups of others.

    Args:
        before: the names in each group.
        after: the names in each group after that.
        made: whether each of the latter was made by ``unfreeze``.
    """
    known = {name for group in before for name in group}
    if len(after) < len(before) or not known <= {name for group in after for name in group}:
        return False
    if not all(made[len(before) :]):
        return False
    source = {name: i for i, group in enumerate(before) for name in group}
    kept = all(
        [*filter({*new}.__contains__, old)] == [*new]
        for old, new in zip(before, after, strict=False)
    )
    return kept and all(
        len({source.get(name) for name in group}) <= 1 for group in after[len(before) :]
    )
