"""Which samples of its dataset a batch has, where the batches are taken by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fnloop._data.composed import Composed
from fnloop._data.loaders import Loader
from fnloop._data.map_style import index_in, requests
from fnloop._data.parts import Item, Request, Together, is_map_style
from fnloop._data.round_robin import sharing_among
from fnloop._data.window import Padding

__all__ = ["Indices", "indices_of", "no_indices"]

# (epoch, batch, samples) -> the indices of each batch of this process, from that position on.
Indices = Callable[[int, int, int], Iterator[object]]


def no_indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
    """Return the indices of a loader whose samples have none."""
    return iter(())


def indices_of(
    loader: Loader,
    seed: int,
    rank: int,
    processes: int,
    window: int | None = None,
    even: bool = False,
) -> Indices:
    """Return what says which samples the batches of a loader have.

    The function gives a list of indices for each batch; a mapping by name, if a batch is made of
    several; None for a batch that is not taken by index; and nothing if no batch is. It fetches no
    sample, but it seeds the global generators, as a sampler may draw from them.

    Args:
        loader: the loader.
        seed: the run's.
        rank: the number of this process.
        processes: how many processes share the batches.
        window: the batches of an update, of all processes together; None if each process takes a
            number of its own.
        even: whether an incomplete round is left out.
    """
    leaves = [*loader.leaves()] if isinstance(loader, Composed) else [loader]
    if not any(map(is_map_style, leaves)):
        return no_indices
    if any(not is_map_style(leaf) and type(leaf) not in (list, tuple) for leaf in leaves):
        return no_indices  # to know what comes next, a stream would have to be read

    def indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
        sharing = sharing_among(processes, rank, window, even)  # the run's own notes what it reads
        if isinstance(loader, Composed):
            items = loader.items(seed, epoch, batch, sharing)
            found = map(_index_of, items)
        else:
            asked = requests(loader, seed, epoch, batch, samples, sharing, sharing.complete)
            found = map(index_in, asked)
        for index in sharing.split(found, lambda index: 0):
            yield [] if isinstance(index, Padding) else index

    return indices


def _index_of(item: Item) -> object:
    if isinstance(item, Request):
        return index_in(item.request)
    if isinstance(item, Together):
        return {name: _index_of(one) for name, one in item.items.items()}
    return None
