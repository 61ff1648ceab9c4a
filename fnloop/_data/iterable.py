"""Loaders that are not map-style, read from a position."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeGuard, TypeVar, cast

from torch.utils.data import DataLoader

from fnloop._backend import torch_compat
from fnloop._core.rng import FETCH, ORDER, fold_in, seed_all, seeded_generator
from fnloop._core.runs import Position
from fnloop._core.types import Batch, name_of
from fnloop._data.loaders import NONE_LEFT, Loader, is_iterable, takes_position
from fnloop._data.map_style import dataset_of, samplers_of, set_epoch, steady_workers
from fnloop._data.position import Keeper, Positions, is_next
from fnloop._display.checks import describe
from fnloop._display.screen import log, warn_once

# --------------------------------------------------------------------------------------------------
# Iterate a loader that is not map-style, from a position.


def iterate(
    loader: Loader, seed: int, epoch: int | None, start: int, positions: Positions
) -> Iterator[Batch]:
    """Yield the batches of an epoch, from the one numbered ``start`` on.

    Each batch is fetched with generators positioned by (seed, epoch, its number).

    Args:
        loader: an iterable of batches, or a function that returns one.
        seed: the run's.
        epoch: the epoch, or None for an evaluation.
        start: how many batches were consumed already.
        positions: knows where the loader was then, and is told where it is.
    """
    __tracebackhide__ = True
    position, fetch = positions.given(epoch, start), fold_in(seed, FETCH, epoch or 0)
    with contextlib.ExitStack() as stack:
        open_at = functools.partial(_open_at, stack, loader, seed, epoch, start, positions)
        opened = open_at(position if position is not None and position["keeper"] else None)
        if opened is ELSEWHERE:
            stack.close()
            log.warning(
                "fit: %s.state_dict() does not lead back to the batch that followed: a shuffle "
                "buffer, or what workers draw, is not in it, or the data have changed. The loader "
                "is read again from the beginning of the epoch, which takes longer",
                cast(Position, position)["keeper"],
            )
            opened = open_at(None)
        batches, n, batch, keeper = cast(Opened, opened)
        while batch is not NONE_LEFT:
            n += 1
            if not positions.note(n, batch, keeper):
                keeper = None
            yield batch
            seed_all(fold_in(fetch, n))
            batch = next(batches, NONE_LEFT)
        positions.end(n)


class Opened(NamedTuple):
    """A loader that is being read.

    Args:
        batches: its iterator.
        n: how many batches were read before ``batch``.
        batch: the next one, or ``NONE_LEFT``.
        keeper: what knows where the loader is, or None.
    """

    batches: Iterator[Batch]
    n: int
    batch: Batch
    keeper: Keeper | None


ELSEWHERE = None  # a position leads to another batch than it did when the state was saved


def _open_at(
    stack: contextlib.ExitStack,
    loader: Loader,
    seed: int,
    epoch: int | None,
    start: int,
    positions: Positions,
    position: Position | None,
) -> Opened | None:
    """Begin to read a loader, up to the batch after ``start`` others.

    Args:
        stack: closes what is opened.
        loader, seed, epoch, start, positions: as in :func:`iterate`.
        position: where to begin, if the loader can be given it; None: at the beginning.

    Returns:
        The loader there, or ``ELSEWHERE``.

    Raises:
        RuntimeError: it is elsewhere, and the loader cannot be reset to its beginning.
    """
    __tracebackhide__ = True
    set_epoch(epoch, loader, dataset_of(loader))
    fetch, given = fold_in(seed, FETCH, epoch or 0), loader
    if is_iterable(loader):
        loader = stack.enter_context(reading(loader, position is not None))
    with _ordered_by(fold_in(seed, ORDER, epoch or 0), loader):
        made, n = _call(loader, epoch or 0, start)
        owners = None
        if made is not loader:
            made = stack.enter_context(reading(made, position is not None))
            owners = owners_of(made)
        keeper = keeper_of(made) if positions.wanted else None
        found = position if n < start and fits(position, keeper) else None
        positions.open(epoch, start, owners, keeper, found is not None)
        with _explained(found):
            if keeper is not None and found is not None:
                keeper.load_state_dict(copy.deepcopy(found["state"]))
                n = found["batch"]
            elif n < start:
                hint_at_stateful_loader(made)
            batches = torch_compat.make_killable(iter(made))
            if n < start and batches is loader:
                raise ValueError(
                    f"epoch {epoch} is to continue at batch {start}, but the loader is an "
                    "iterator, which cannot start again: pass a function that makes it "
                    "(fit(step, state, lambda: batches(...)))"
                )
            seed_all(fold_in(fetch, n))
            batch = next(batches, NONE_LEFT)
    while n < start and batch is not NONE_LEFT:
        n += 1
        seed_all(fold_in(fetch, n))
        batch = next(batches, NONE_LEFT)
    if found is None:
        positions.compare(epoch, start, batch)
    elif n == start and not is_next(batch, found):
        if made is given:
            raise _cannot_restart(found)
        return ELSEWHERE
    return Opened(batches, n, batch, keeper)


def _cannot_restart(position: Position) -> RuntimeError:
    return RuntimeError(
        f"{position['keeper']}.state_dict() does not lead back to the batch that followed when the "
        "state was saved, and the loader cannot be copied, to be read from its beginning instead: "
        "pass a function that makes it (fit(step, state, lambda: make_loader())), or "
        "attrs.evolve(state, position=None) with a new loader"
    )


@contextlib.contextmanager
def _explained(position: Position | None) -> Iterator[None]:
    """Note in an error that a loader was given a position."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        if position is not None:
            error.add_note(
                f"the loader was given the position that {position['keeper']}.state_dict() "
                "returned when the state was saved; it must have the same settings as then, such "
                "as its number of workers. To read the epoch again up to there, pass "
                "attrs.evolve(state, position=None)"
            )
        raise


def owners_of(loader: object) -> list[object]:
    """Return the objects whose generators may decide the order of a loader."""
    return [loader, dataset_of(loader), *samplers_of(loader)]


@contextlib.contextmanager
def _ordered_by(seed: int, loader: Loader) -> Iterator[None]:
    """Let a loader and its samplers draw their order from a seed.

    The block has to include the first batch, because samplers take their generator when they are
    first advanced.
    """
    owners = {id(owner): owner for owner in (loader, *samplers_of(loader))}
    with contextlib.ExitStack() as stack:
        for owner in owners.values():
            stack.enter_context(seeded_generator(owner, seed))
        if isinstance(loader, DataLoader):
            # Persistent workers would continue with the generators of the epoch before.
            torch_compat.forget_workers(loader)
            stack.enter_context(steady_workers(loader))
        seed_all(seed)
        yield


def _call(loader: Loader, epoch: int, start: int) -> tuple[Iterable[Batch], int]:
    """Return the iterable that a loader is, or returns if it is a function, and where it begins."""
    __tracebackhide__ = True
    if is_iterable(loader):
        return loader, 0
    placed = takes_position(loader)
    batches = loader(epoch, start) if placed else loader()
    if not is_iterable(batches):
        raise TypeError(
            f"the loader {name_of(loader)} must return an iterable of batches; it returned "
            f"{describe(batches)}. Did you forget to return or yield?"
        )
    return batches, start if placed else 0


# --------------------------------------------------------------------------------------------------
# Streams that know where they are.

Value = TypeVar("Value")


def is_keeper(owner: object) -> TypeGuard[Keeper]:
    """Return whether an object can be asked for its position, without arguments, and given it."""
    if not isinstance(owner, Keeper):
        return False
    with contextlib.suppress(ValueError):  # a builtin without a signature
        try:
            inspect.signature(owner.state_dict).bind()
        except TypeError:
            return False
    return True


def as_torch_reads_it(loader: object) -> TypeGuard[DataLoader[object]]:
    """Return whether a DataLoader reads its dataset in torch's own way, or torchdata's."""
    return isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__
        or type(loader).__module__.startswith("torchdata.")
    )


def keeper_of(loader: object) -> Keeper | None:
    """Return what knows where a loader is.

    That is the dataset if this process reads it, since a DataLoader reads no sample ahead then; or
    the loader; or nothing.
    """
    if as_torch_reads_it(loader) and not loader.num_workers and is_keeper(loader.dataset):
        return loader.dataset
    return loader if is_keeper(loader) else None


def fits(position: Position | None, keeper: Keeper | None) -> TypeGuard[Position]:
    """Return whether something of this kind gave a position."""
    return position is not None and position["keeper"] == type(keeper).__name__


def hint_at_stateful_loader(loader: object) -> None:
    """Log once that a loader is read again because only its workers know where its dataset is."""
    if keeper_of(loader) is None and as_torch_reads_it(loader) and is_keeper(loader.dataset):
        warn_once(
            "fit: the loader is read again up to the batch to continue at, because its workers "
            f"alone know where {type(loader.dataset).__name__} is: StatefulDataLoader of "
            "torchdata, in the place of DataLoader, continues there at once"
        )


# --- readers that do not disturb each other

_read: set[int] = set()  # the ids of the keepers that are being read


@contextlib.contextmanager
def reading(loader: Value, to_load: bool) -> Iterator[Value]:
    """Give a loader to read, so that nothing else that reads it notices.

    It is a copy if the loader is being read already (an evaluation on the stream that is trained
    on), or if it is to be given a position, which others that begin later must not have.

    Args:
        loader: any iterable.
        to_load: whether it will be given a position.
    """
    keeper = keeper_of(loader)
    if keeper is None:
        yield loader
    elif id(keeper) in _read:
        yield _copy(loader, keeper)
    else:
        _read.add(id(keeper))
        try:
            yield _copy(loader, keeper) if to_load else loader
        finally:
            _read.discard(id(keeper))


def _copy(loader: Value, keeper: Keeper) -> Value:
    """Return a copy of a loader with its keeper; the same loader if there can be no copy."""
    if any(hasattr(type(owner), "__del__") for owner in (loader, keeper)):
        return loader  # a copy would release what both have
    # Shallow, because a dataset may be large. Hugging Face's is not, and has its position in parts.
    in_parts = type(keeper).__module__.partition(".")[0] == "datasets"
    try:
        copied = copy.deepcopy(keeper) if in_parts else copy.copy(keeper)
        if keeper is loader:
            return cast(Value, copied)
        made = copy.copy(loader)
    except Exception:
        return loader
    vars(made)["dataset"] = copied  # a DataLoader forbids to set it
    return made
