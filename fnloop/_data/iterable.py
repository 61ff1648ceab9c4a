"""Iterate a loader that is not map-style, from a position."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from fnloop._backend import torch_compat
from fnloop._core.call import name_of
from fnloop._core.rng import FETCH, ORDER, fold_in, seed_all, seeded_generator
from fnloop._data.loaders import is_iterable
from fnloop._data.map_style import set_epoch, sigterm_resistant_workers
from fnloop._data.window import END
from fnloop._display.checks import describe

__all__ = ["iterate"]


# --- iterables


def iterate(loader: Any, seed: int, epoch: int | None, start: int) -> Iterator[Any]:
    __tracebackhide__ = True
    set_epoch(epoch, loader, getattr(loader, "dataset", None))
    order, fetch = fold_in(seed, ORDER, epoch or 0), fold_in(seed, FETCH, epoch or 0)
    if isinstance(loader, DataLoader):
        # Persistent workers would continue with the generators of the epoch before.
        torch_compat.forget_workers(loader)
    with (
        contextlib.ExitStack() as stack
    ):  # until the first batch is there: only then has everybody taken its generator
        samplers = (
            getattr(loader, "sampler", None),
            getattr(getattr(loader, "batch_sampler", None), "sampler", None),
        )
        for owner in {
            id(owner): owner for owner in (loader, *samplers) if owner is not None
        }.values():
            stack.enter_context(seeded_generator(owner, order))
        if isinstance(loader, DataLoader):
            stack.enter_context(sigterm_resistant_workers(loader))
        iterable: Any = loader
        seed_all(order)
        if not is_iterable(loader):
            iterable = iterable()
            if not is_iterable(iterable):
                raise TypeError(
                    f"the loader {name_of(loader)} must return an iterable of batches; it returned {describe(iterable)}. "
                    "Did you forget to return or yield?"
                )
        batches = torch_compat.make_killable(iter(iterable))
        if start and batches is loader:
            raise ValueError(
                f"epoch {epoch} is to go on at batch {start}, but the loader is an iterator, which can't start again: pass a "
                f"function that makes it (fit(step, state, lambda: batches(...)))"
            )
        seed_all(fold_in(fetch, 0))
        batch = next(batches, END)
    for n in itertools.count(1):
        if batch is END:
            return
        if n > start:
            yield batch
        seed_all(fold_in(fetch, n))
        batch = next(batches, END)
