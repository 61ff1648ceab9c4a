"""Try on a small copy of an optimizer whether it resumes bit for bit, before the first update.

An optimizer may keep what its updates depend on in attributes that its ``state_dict`` does not
contain, or in objects that cannot be saved. The user would notice at the first checkpoint, or
never. So a copy with small parameters is updated a few times, saved, and restored into a second
copy. Both are updated further and must stay bit-identical. Nothing outside of the copies changes.
Several processes compare what their copies keep, because not all of it can be merged.

If small parameters do not work, the trial is repeated with whole ones. If those do not work either,
a warning says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.collectives import gather_from_all
from fnloop._backend.containers import pairs_of
from fnloop._backend.launch import Backend
from fnloop._checkpoint.compare import find_difference
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import (
    NamedOptimizer,
    has_own_state_dict,
    is_torch_optimizer,
    walk_optimizers,
)
from fnloop._checkpoint.optimizer_load import SavedOptimizer, load_all, prepare_load
from fnloop._checkpoint.optimizer_save import encode_optimizer
from fnloop._checkpoint.optimizers import check_groups
from fnloop._checkpoint.trial_copy import (
    CONTAINERS,
    SMALL_EDGE,
    SMALL_TENSOR,
    WHOLE_EDGE,
    Position,
    begin_training,
    copy_small,
    subclasses_in,
    update_copy,
    without_side_effects,
)
from fnloop._core.rng import torch_seeder
from fnloop._core.serialize import Json
from fnloop._core.state import TrainState
from fnloop._display.checks import join_names
from fnloop._display.log import log

__all__ = ["check_resumable"]

MANY = 4_000_000  # elements; an optimizer of more is not copied with whole parameters
BEFORE, AFTER = 3, 3  # updates before the save, and after the restore
AFTER_IN_DOUBT = 12  # updates after the restore, if some attributes were not restored
_Kept = tuple[tuple[int, ...], float]  # the shape of a tensor, and its norm
Unrestored = tuple[str, object, object]  # path of an attribute, what it should be, what it is
_warned: weakref.WeakSet[type] = weakref.WeakSet()  # classes that a warning has named


def check_resumable(state: TrainState) -> None:
    """Raise if a run with the optimizers of this state could not be resumed bit for bit.

    With several processes, all of them must call it. If it cannot be tried, a warning names the
    optimizer and the reason, once per class.

    Raises:
        CheckpointError: something in an optimizer cannot be saved, or is not restored; the message
            names it.

    Example:
        >>> from fnloop.testing import toy
        >>> check_resumable(toy())
    """
    if state.backend.world_size > 1:
        check_groups(state)
    for name, named in NamedOptimizer.of_state(state).items():
        _check_resumable(named, f" ({name!r})" if name else "", state.backend)


def _check_resumable(named: NamedOptimizer, label: str, backend: Backend) -> None:
    optimizer = named.holder
    named = attrs.evolve(named, optimizer=optimizer)
    if is_torch_optimizer(optimizer) and not has_own_state_dict(optimizer):
        return
    if named.sharded and has_own_state_dict(optimizer):
        encode_optimizer(named, {})  # raises
    fault, obstacle, kept = _run_trial(named, backend.device)
    if backend.world_size > 1 and (odd := _compare_kept(named, gather_from_all(kept))):
        raise CheckpointError(
            f"a run with {named.class_name}{label} on {backend.world_size} processes cannot be "
            f"resumed bit for bit: {odd}, or leave out the hook checkpoint"
        )
    if fault:
        raise CheckpointError(
            f"a run with {named.class_name}{label} cannot be resumed bit for bit: {fault}. Give it "
            "a state_dict and a load_state_dict with everything that its updates depend on, as "
            "plain data and tensors, or leave out the hook checkpoint"
        )
    warned = is_torch_optimizer(optimizer) or type(optimizer) in _warned
    if obstacle and backend.main and not warned:
        _warned.add(type(optimizer))
        log.warning(
            f"could not try whether a run with {named.class_name}{label} resumes bit for bit "
            f"({obstacle}): compare a resumed run with an uninterrupted one"
        )


def _run_trial(
    named: NamedOptimizer, device: torch.device
) -> tuple[str | None, str | None, dict[str, _Kept] | None]:
    """Return what goes wrong when an optimizer is saved and restored, and why the trial failed.

    Both are None if nothing is wrong. The third is what the copy keeps, if it was tried.
    """
    fault = obstacle = kept = None
    elements = sum(p.numel() for p in named.parameters().values())
    for edge in (SMALL_EDGE, WHOLE_EDGE) if elements <= MANY else (SMALL_EDGE,):
        try:
            with without_side_effects(device):
                kept, fault = _find_fault(named, torch_seeder(device), edge)
            obstacle = None
            break
        except Exception as error:
            obstacle = " ".join(f"{type(error).__name__}: {error}".split())
    if fault is None:
        with contextlib.suppress(Exception), without_side_effects(device):
            fault = _find_fault_at_size(named, torch_seeder(device))
    return fault, obstacle, kept


def _find_fault_at_size(named: NamedOptimizer, position: Position) -> str | None:
    """Return what goes wrong with parameters of the sizes that the real ones have, or None.

    An optimizer may keep large ones in another way, such as in 8 bits. So a copy updates one
    parameter of each large size. What it then keeps in tensors of a subclass is tried further.
    """
    large = {
        (p.shape, p.dtype): name
        for name, p in named.parameters().items()
        if SMALL_TENSOR <= p.numel() <= MANY and p.requires_grad
    }
    kinds: dict[str, str] = {}
    for (shape, _), name in sorted(large.items(), key=lambda each: each[0][0].numel()):
        one = copy_small(named, torch.Generator().manual_seed(0), WHOLE_EDGE, {name})
        begin_training(one)
        update_copy(one, 0, position)
        try:
            encode_optimizer(one, {})
        except (TypeError, CheckpointError) as error:
            return f"with a parameter of shape {tuple(shape)}, {error}"
        for kind in subclasses_in(list(one.optimizer.state.values())):
            kinds.setdefault(kind, name)
    if kinds and named.sharded:
        return f"its state of {kinds.popitem()[1]} is compressed, and the model is sharded"
    return _find_fault(named, position, WHOLE_EDGE, {*kinds.values()})[1] if kinds else None


def _kept_by(named: NamedOptimizer) -> dict[str, _Kept]:
    """Return the tensors that an optimizer keeps, by their names in a checkpoint."""
    tensors: dict[str, Tensor] = {}
    with contextlib.suppress(TypeError, CheckpointError):  # found when it is saved
        encode_optimizer(named, tensors)
    return {
        name: (
            tuple(t.shape),
            float(
                torch.linalg.vector_norm(
                    t.to(torch.complex128 if t.is_complex() else torch.float64)
                )
            ),
        )
        for name, t in tensors.items()
    }


def _compare_kept(named: NamedOptimizer, every: Sequence[Mapping[str, _Kept] | None]) -> str | None:
    """Return what cannot be merged of what the copies in several processes keep, or None.

    They had the same gradients, so what all of them keep must be equal, but for rounding.
    """
    first = every[0]
    for rank, other in enumerate(every):
        if first is None or other is None:  # not tried, which a warning says
            return None
        odd = first.keys() ^ other.keys()
        if odd and (named.sharded or has_own_state_dict(named.optimizer)):
            return (
                f"processes 0 and {rank} keep state under other names ({join_names(sorted(odd))}), "
                "which cannot be merged with a state_dict of its own, or for a sharded model. Keep "
                "it in optimizer.state, by parameter"
            )
        for name in filter(other.__contains__, first):
            (shape, norm), (other_shape, other_norm) = first[name], other[name]
            if shape != other_shape or not (
                math.isclose(norm, other_norm, rel_tol=1e-3) or norm != norm
            ):
                return (
                    f"processes 0 and {rank} each keep another part of the state under the name "
                    f"{name}, and a checkpoint has one of that name. Keep all of it in one process"
                )
    return None


def _find_fault(
    named: NamedOptimizer, position: Position, edge: int, only: Collection[str] | None = None
) -> tuple[dict[str, _Kept], str | None]:
    """Return what an optimizer updates, and what goes wrong when it is saved and restored.

    The latter is None if nothing is wrong. It raises if that cannot be tried.
    """
    numbers = torch.Generator().manual_seed(0)
    one, two = (copy_small(named, numbers, edge, only) for _ in range(2))
    begin_training(one)
    before = _kept_by(one)
    for number in range(BEFORE):
        update_copy(one, number, position)
    # What an update does not change may be a copy of what another process updates.
    kept = {name: t for name, t in _kept_by(one).items() if before.get(name) != t}
    return kept, _find_fault_of(one, two, position)


def _find_fault_of(one: NamedOptimizer, two: NamedOptimizer, position: Position) -> str | None:
    """Return what goes wrong when one copy is saved and restored into the other, or None."""
    if fault := _restore_copy(one, two):
        return fault
    unrestored = list(_unrestored_attributes(one, two))
    for path, was, now in _unrestored_counts(unrestored):
        if not isinstance(was, str):  # a length may be that of a cache, which fills up again
            return (
                f"its attribute {path} is not in its state_dict: "
                f"it was {was}, and is {now} after a restore"
            )
    if fault := _update_both(one, two, position, AFTER_IN_DOUBT if unrestored else AFTER):
        return fault
    fault = find_difference(one.parameters(), two.parameters(), "weights")
    fault = fault or find_difference(_save_copy(one), _save_copy(two), "state")
    if fault:
        return f"a few updates after a restore, {fault}"
    for path, was, now in _unrestored_counts(_unrestored_attributes(one, two)):
        return (
            f"its attribute {path} is not in its state_dict: "
            f"it is {was} in an uninterrupted run, and {now} in a resumed one"
        )
    return None


def _restore_copy(one: NamedOptimizer, two: NamedOptimizer) -> str | None:
    """Save one copy and restore it into the other. Return what goes wrong, or None."""
    try:
        facts, tensors = _save_copy(one)
    except (TypeError, CheckpointError) as error:
        return str(error)
    weights = one.parameters()
    for name, p in two.parameters().items():
        p.data.copy_(weights[name])
    try:
        load_all([prepare_load(two, SavedOptimizer(facts, tensors))])
    except CheckpointError as error:
        return str(error).removeprefix("the checkpoint: ")
    return None


def _save_copy(named: NamedOptimizer) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return an optimizer as the files of a checkpoint would contain it."""
    tensors: dict[str, Tensor] = {}
    facts = json.loads(json.dumps(encode_optimizer(named, tensors)))
    contiguous = {
        name: t.resolve_conj().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in tensors.items()
    }
    return facts, contiguous


def _update_both(
    one: NamedOptimizer, two: NamedOptimizer, position: Position, updates: int
) -> str | None:
    """Apply the same updates to both copies. Return what goes wrong in the second, or None."""
    last = BEFORE + updates
    for number in range(BEFORE, last):
        update_copy(one, number, position)
        try:
            update_copy(two, number, position)
        except Exception as error:
            return f"an update after a restore raises {type(error).__name__}: {error}"
        if number == last - 2:
            _halve_rates(one)
            _halve_rates(two)
    return None


def _halve_rates(named: NamedOptimizer) -> None:
    """Change the learning rates as a schedule does. The change must reach the updates."""
    for group in named.optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].mul_(0.5)
        elif isinstance(group.get("lr"), float):
            group["lr"] /= 2


# --- attributes that are not in a state_dict


def _unrestored_attributes(one: NamedOptimizer, two: NamedOptimizer) -> Iterator[Unrestored]:
    """Yield the attributes that differ after a restore, as they should be and as they are."""
    pairs = zip(walk_optimizers(one.optimizer), walk_optimizers(two.optimizer), strict=True)
    for before, after in pairs:
        for name, was in vars(before).items():
            now: Any = getattr(after, name, None)
            if name == "defaults":  # torch adds entries when it loads
                was, now = ({key: held[key] for key in was if key in now} for held in (was, now))
            if name not in ("state", "param_groups") and find_difference(was, now, name):
                yield name, was, now


def _unrestored_counts(unrestored: Iterable[Unrestored]) -> Iterator[Unrestored]:
    """Yield what may be a count, which may matter at a later update.

    These are numbers, tensors of one number, and lengths that differ.

    Example:
        >>> list(_unrestored_counts([("info", {"k": 3, "seen": [1, 2]}, {"k": 0, "seen": []})]))
        [('info.k', 3, 0), ('info.seen', 'of length 2', 'of length 0')]
    """
    for path, was, now in unrestored:
        if not find_difference(was, now, path):
            continue
        if _is_number(was) and _is_number(now):
            yield path, was, now
        elif isinstance(was, Tensor) and isinstance(now, Tensor):
            if all(t.numel() == 1 and t.dtype is not torch.bool for t in (was, now)):
                yield path, was.item(), now.item()
        elif isinstance(was, CONTAINERS) and isinstance(now, CONTAINERS):
            if len(was) != len(now):
                yield path, f"of length {len(was)}", f"of length {len(now)}"
            pairs = pairs_of(was, now) or ()
            yield from _unrestored_counts((f"{path}.{key}", x, y) for key, x, y in pairs)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
