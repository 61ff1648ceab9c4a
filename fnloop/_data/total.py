"""How many batches make an update of a number of samples, in all processes together."""

from __future__ import annotations

from torch.utils.data import BatchSampler

from fnloop._data.composed import Composed
from fnloop._data.loaders import sharded
from fnloop._data.position import as_torch_reads_it
from fnloop._data.round_robin import batch_size_of

__all__ = ["window_of"]


def window_of(loader: object, total: int) -> int:
    """Return how many batches of a loader have ``total`` samples.

    An incomplete batch, such as the last one of an epoch, counts as a complete one.

    Raises:
        ValueError: that is not known, or not a whole number.
    """
    typed = f"accumulate(total={total})"
    if isinstance(loader, sharded):
        raise ValueError(
            f"{typed} distributes the batches of each update to as many processes as there are, "
            "but sharded(...) gives each process its own: pass the loader without sharded, or "
            "write accumulate(n)"
        )
    sizes = _batch_sizes(loader)
    if sizes is None or len(sizes) != 1:
        known = "does not say" if sizes is None else f"says differently, {sorted(sizes)}"
        raise ValueError(
            f"{typed} needs to know how many samples a batch has, which this training loader "
            f"{known}: pass DataLoader(dataset, batch_size), or write accumulate(n), n batches on "
            "each process"
        )
    (size,) = sizes
    if total % size:
        near = max(total // size, 1) * size
        raise ValueError(
            f"{typed} takes whole batches, and those of the training loader have {size} samples: "
            f"write accumulate(total={near}), or make batches of a size that divides {total}"
        )
    return total // size


def _batch_sizes(loader: object) -> set[int] | None:
    """Return the sizes of complete batches of the loaders inside; None if they are not known."""
    if isinstance(loader, Composed):
        found = [_batch_sizes(leaf) for leaf in loader.leaves()]
        known = [sizes for sizes in found if sizes is not None]
        return set().union(*known) if len(known) == len(found) else None
    if type(loader) in (list, tuple):
        return {max(map(batch_size_of, loader), default=1)}  # type: ignore[call-overload]
    if as_torch_reads_it(loader) and type(loader.batch_sampler) is BatchSampler:
        return {loader.batch_sampler.batch_size}
    return None
