"""Iterate a loader that is not map-style, from a position."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader

from fnloop._backend import torch_compat
from fnloop._core.call import name_of
from fnloop._core.position import Position
from fnloop._core.rng import FETCH, ORDER, fold_in, seed_all, seeded_generator
from fnloop._core.types import Batch
from fnloop._data.loaders import Loader, is_iterable, takes_position
from fnloop._data.map_style import set_epoch, sigterm_resistant_workers
from fnloop._data.position import (
    Positions,
    checksum,
    fits,
    hint_at_stateful_loader,
    keeper_of,
    reading,
)
from fnloop._data.window import END
from fnloop._display.checks import describe
from fnloop._display.log import log

__all__ = ["iterate"]


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
    position = positions.given(epoch, start)
    if position is not None:
        try:
            yield from _iterate(loader, seed, epoch, start, positions, position)
            return
        except _ElsewhereError:
            log.warning(
                "fit: %s.state_dict() does not lead back to the batch that followed: a shuffle "
                "buffer, or what workers draw, is not in it, or the data have changed. The loader "
                "is read again from the beginning of the epoch, which takes longer",
                position["keeper"],
            )
    yield from _iterate(loader, seed, epoch, start, positions)


class _ElsewhereError(Exception):
    """The position that a loader was given leads to another batch than it did before."""


def _iterate(
    loader: Loader,
    seed: int,
    epoch: int | None,
    start: int,
    positions: Positions,
    position: Position | None = None,
) -> Iterator[Batch]:
    """Yield the batches from the one numbered ``start`` on. Begin at a position, if there is one.

    Raises:
        _ElsewhereError: what is there is not the batch that was there.
        RuntimeError: the same, and the loader cannot be put back to its beginning.
    """
    __tracebackhide__ = True
    given = loader
    set_epoch(epoch, loader, getattr(loader, "dataset", None))
    fetch = fold_in(seed, FETCH, epoch or 0)
    with contextlib.ExitStack() as stack:
        if is_iterable(loader):
            loader = stack.enter_context(reading(loader, position is not None))
        with _ordered_by(fold_in(seed, ORDER, epoch or 0), loader):
            made, n = _call(loader, epoch or 0, start)
            if made is not loader:
                made = stack.enter_context(reading(made, position is not None))
            keeper = keeper_of(made) if positions.wanted else None
            found = position if n < start and fits(position, keeper) else None
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
                batch = next(batches, END)
        positions.restart(epoch, keeper)
        while True:
            if n == start and found is not None and checksum(batch) != found["next"]:
                raise _cannot_restart(found) if made is given else _ElsewhereError
            if batch is END:
                return
            n += 1
            if n > start:
                if keeper is not None and not positions.note(n, batch, keeper):
                    keeper = None
                yield batch
            seed_all(fold_in(fetch, n))
            batch = next(batches, END)


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


@contextlib.contextmanager
def _ordered_by(seed: int, loader: Loader) -> Iterator[None]:
    """Let a loader and its samplers draw their order from a seed.

    The block has to include the first batch, because samplers take their generator when they are
    first advanced.
    """
    sampler = getattr(loader, "sampler", None)
    batched = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    owners = {id(owner): owner for owner in (loader, sampler, batched) if owner is not None}
    with contextlib.ExitStack() as stack:
        for owner in owners.values():
            stack.enter_context(seeded_generator(owner, seed))
        if isinstance(loader, DataLoader):
            # Persistent workers would continue with the generators of the epoch before.
            torch_compat.forget_workers(loader)
            stack.enter_context(sigterm_resistant_workers(loader))
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
