"""Iterate a loader that is not map-style, from a position."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader

from fnloop._backend import torch_compat
from fnloop._core.call import name_of
from fnloop._core.rng import FETCH, ORDER, fold_in, seed_all, seeded_generator
from fnloop._core.types import Batch
from fnloop._data.loaders import Loader, is_iterable, takes_position
from fnloop._data.map_style import set_epoch, sigterm_resistant_workers
from fnloop._data.window import END
from fnloop._display.checks import describe

__all__ = ["iterate"]


def iterate(loader: Loader, seed: int, epoch: int | None, start: int) -> Iterator[Batch]:
    """Yield the batches of an epoch, from the one numbered ``start`` on.

    Each batch is fetched with generators positioned by (seed, epoch, its number).
    """
    first = start if takes_position(loader) else 0  # the first batch that is read
    __tracebackhide__ = True
    set_epoch(epoch, loader, getattr(loader, "dataset", None))
    fetch = fold_in(seed, FETCH, epoch or 0)
    with _ordered_by(fold_in(seed, ORDER, epoch or 0), loader):
        batches = torch_compat.make_killable(iter(_call(loader, epoch or 0, start)))
        if start and batches is loader:
            raise ValueError(
                f"epoch {epoch} is to continue at batch {start}, but the loader is an iterator, "
                "which cannot start again: pass a function that makes it "
                "(fit(step, state, lambda: batches(...)))"
            )
        seed_all(fold_in(fetch, first))
        batch = next(batches, END)
    for n in itertools.count(first + 1):
        if batch is END:
            return
        if n > start:
            yield batch
        seed_all(fold_in(fetch, n))
        batch = next(batches, END)


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


def _call(loader: Loader, epoch: int, start: int) -> Iterable[Batch]:
    """Return the iterable that a loader is, or that it returns if it is a function."""
    __tracebackhide__ = True
    if is_iterable(loader):
        return loader
    batches = loader(epoch, start) if takes_position(loader) else loader()
    if not is_iterable(batches):
        raise TypeError(
            f"the loader {name_of(loader)} must return an iterable of batches; it returned "
            f"{describe(batches)}. Did you forget to return or yield?"
        )
    return batches
