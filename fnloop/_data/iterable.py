"""Loaders that are not map-style, read from a position."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeGuard, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset, default_collate

from fnloop._backend import torch_compat
from fnloop._backend.containers import length_of
from fnloop._core.rng import fold_in, seed_all, seeded_generator
from fnloop._core.runs import Position
from fnloop._core.types import Batch, name_of
from fnloop._data.loaders import NONE_LEFT, Loader, is_iterable, takes_position
from fnloop._data.position import Keeper, Pass, is_next
from fnloop._display.checks import describe
from fnloop._display.screen import warn_once

# --------------------------------------------------------------------------------------------------
# Iterate a loader that is not map-style, from a position.


def iterate(loader: Loader, at: Pass) -> Iterator[Batch]:
    """Yield the batches of an epoch, from a position on.

    Each batch is fetched with generators positioned by (seed, epoch, its number).

    Args:
        loader: an iterable of batches, or a function that returns one.
        at: the position.
    """
    __tracebackhide__ = True
    position, fetch = at.positions.given(at.epoch, at.start), at.fetch
    with contextlib.ExitStack() as stack:
        opened = _open_at(
            stack, loader, at, position if position is not None and position["keeper"] else None
        )
        if opened is ELSEWHERE:
            stack.close()
            logging.getLogger("fnloop").warning(
                "fit: %s.state_dict() does not lead back to the batch that followed: a shuffle "
                "buffer, or what workers draw, is not in it, or the data have changed. The loader "
                "is read again from the beginning of the epoch, which takes longer",
                cast(Position, position)["keeper"],
            )
            opened = _open_at(stack, loader, at)
        batches, n, batch, keeper = cast(Opened, opened)
        while batch is not NONE_LEFT:
            n += 1
            if not at.positions.note(n, batch, keeper):
                keeper = None
            yield batch
            seed_all(fold_in(fetch, n))
            batch = next(batches, NONE_LEFT)
        at.positions.end(n)
        if takes_indices(loader) and n < (length_of(loader) or 0):  # for torch, it is the end
            raise RuntimeError(
                f"{type(loader.dataset).__name__} raised StopIteration in batch {n}: an iterator "
                "that it reads is at its end"
            )


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
    stack: contextlib.ExitStack, loader: Loader, at: Pass, position: Position | None = None
) -> Opened | None:
    """Begin to read a loader, up to the batch that follows a position.

    Args:
        stack: closes what is opened.
        loader, at: as in :func:`iterate`.
        position: where to begin, if the loader can be given it; None: at the beginning.

    Returns:
        The loader there, or ``ELSEWHERE``.

    Raises:
        RuntimeError: it is elsewhere, and the loader cannot be reset to its beginning.
    """
    __tracebackhide__ = True
    epoch, start, positions = at.epoch, at.start, at.positions
    at.set_epoch(*owners_of(loader))
    fetch, given = at.fetch, loader
    if is_iterable(loader):
        loader = stack.enter_context(reading(loader, position is not None))
    with _ordered_by(at.order, loader):
        made, n = _call(loader, epoch or 0, start)
        owners = None
        if made is not loader:
            made = stack.enter_context(reading(made, position is not None))
            owners = owners_of(made)
        keeper = keeper_of(made) if positions.wanted else None
        found = position if n < start else None
        if found is not None and found["keeper"] != type(keeper).__name__:  # another kind gave it
            found = None
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
            raise RuntimeError(
                f"{found['keeper']}.state_dict() does not lead back to the batch that followed "
                "when the state was saved, and the loader cannot be copied, to be read from its "
                "beginning instead: pass a function that makes it "
                "(fit(step, state, lambda: make_loader())), or "
                "attrs.evolve(state, position=None) with a new loader"
            )
        return ELSEWHERE
    return Opened(batches, n, batch, keeper)


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


def takes_indices(loader: object) -> TypeGuard[DataLoader[object]]:
    """Return whether a loader takes samples by index, in torch's own way, or torchdata's."""
    if not as_torch_reads_it(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader).__iter__ is DataLoader.__iter__ or not is_keeper(loader.dataset)


def keeper_of(loader: object) -> Keeper | None:
    """Return what knows where a loader is.

    That is the dataset if this process reads it, since a DataLoader reads no sample ahead then; or
    the loader; or nothing.
    """
    if as_torch_reads_it(loader) and not loader.num_workers and is_keeper(loader.dataset):
        return loader.dataset
    return loader if is_keeper(loader) else None


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


# --------------------------------------------------------------------------------------------------
# What a loader is asked, which may be a DataLoader.


def makes_new(loader: object) -> bool:
    """Return whether a loader surely gives new memory with each batch.

    Workers send it, and ``default_collate`` stacks samples. A list has all batches already. Any
    other loader may fill a buffer.
    """
    return type(loader) in (list, tuple) or (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and bool(
            loader.num_workers
            or (loader.batch_sampler is not None and loader.collate_fn is default_collate)
        )
    )


def samplers_of(loader: object) -> list[object]:
    """Return the samplers of a loader: its own, that of batches, and the one inside that."""
    batched = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batched, getattr(batched, "sampler", None))
    return [sampler for sampler in found if sampler is not None]


def owners_of(loader: object) -> list[object]:
    """Return the objects whose generators may decide the order of a loader."""
    return [loader, getattr(loader, "dataset", None), *samplers_of(loader)]


# --- workers


class _IgnoreFirstSigterm(NamedTuple):
    """The user's worker_init_fn, in a worker that ignores its first SIGTERM.

    Schedulers often signal every process of a job, but a run that stops after the current update
    still needs its workers.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        if self.init is not None:
            self.init(worker)


@contextlib.contextmanager
def steady_workers(loader: DataLoader[object]) -> Iterator[None]:
    """Let the workers that a loader starts in this block ignore their first SIGTERM.

    Their batches come in order, as a position is a number of batches.
    """
    init, in_order = loader.worker_init_fn, loader.in_order
    loader.worker_init_fn, loader.in_order = _IgnoreFirstSigterm(init), True
    try:
        yield
    finally:
        loader.worker_init_fn, loader.in_order = init, in_order
