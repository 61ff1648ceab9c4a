"""Loaders that are not map-style, from a position, and the position as data."""

from __future__ import annotations

import contextlib
import copy
import inspect
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeGuard, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fnloop._backend import torch_compat
from fnloop._backend.containers import parts_of
from fnloop._core.rng import FETCH, ORDER, fold_in, seed_all, seeded_generator
from fnloop._core.runs import Position
from fnloop._core.types import Batch, name_of
from fnloop._data.loaders import NONE_LEFT, Loader, is_iterable, takes_position
from fnloop._data.map_style import samplers_of, set_epoch, steady_workers
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
                batch = next(batches, NONE_LEFT)
        positions.restart(epoch, keeper)
        while True:
            if n == start and found is not None and checksum(batch) != found["next"]:
                raise _cannot_restart(found) if made is given else _ElsewhereError
            if batch is NONE_LEFT:
                return
            n += 1
            if n > start:
                if keeper is not None and not positions.note(n, batch, keeper):
                    keeper = None
                yield batch
            seed_all(fold_in(fetch, n))
            batch = next(batches, NONE_LEFT)


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
# The position of a stream: what its `state_dict` said after each of its newest batches.
#
# A stream that has `state_dict` and `load_state_dict` is asked after every batch, because it is
# read ahead: the position of a state is that of the last batch which the state has consumed. To
# continue there, the position is given back, and nothing is read again.
#
# The position also has a checksum of the batch that came next. If another batch comes there
# (because a shuffle buffer is not in the position, say), the stream is read again from its
# beginning.

Value = TypeVar("Value")


class Keeper(Protocol):
    """A loader or a dataset that knows where it is."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: object, /) -> object: ...


def is_keeper(owner: object) -> TypeGuard[Keeper]:
    """Return whether an object can be asked for its position, without arguments, and given it."""
    ask = getattr(owner, "state_dict", None)
    if not callable(ask) or not callable(getattr(owner, "load_state_dict", None)):
        return False
    with contextlib.suppress(ValueError):  # a builtin without a signature
        try:
            inspect.signature(ask).bind()
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


class Positions:
    """Where a stream was after each of its newest batches.

    Args:
        shards: how many processes read a part of their own; 1 if each reads the whole stream.
    """

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards
        self._given: Position | None = None
        self._noted: deque[tuple[int, Batch, object]] = deque(maxlen=0)
        self._epoch: int | None = None
        self._kind = ""

    @property
    def wanted(self) -> bool:
        """Whether anything asks for them: a run does, an evaluation does not."""
        return self._noted.maxlen != 0

    def begin(self, given: Position | None, ahead: int) -> None:
        """Begin an epoch.

        Args:
            given: the position to continue at, or None.
            ahead: the most batches that are read ahead of those consumed.
        """
        self._given = given
        self._noted = deque(maxlen=ahead + 1)

    def given(self, epoch: int | None, start: int) -> Position | None:
        """Return the position from which an epoch can continue at a batch, or None."""
        given = self._given
        if given is None or not start or given["batch"] > start:
            return None
        return given if (given["epoch"], given["shards"]) == (epoch, self.shards) else None

    def restart(self, epoch: int | None, keeper: Keeper | None) -> None:
        """Forget what was noted: the epoch is read from another position."""
        self._noted.clear()
        self._epoch, self._kind = epoch, type(keeper).__name__

    def note(self, n: int, batch: Batch, keeper: Keeper) -> bool:
        """Note where a stream is after its batch number ``n``. Return whether it says so."""
        try:
            state = keeper.state_dict()
        except Exception as error:
            log.warning(
                "fit: %s.state_dict() raised %s: %s. A run that continues in the middle of an "
                "epoch reads the loader again up to there",
                *(type(keeper).__name__, type(error).__name__, error),
            )
            state = None
        if state is not None:
            self._noted.append((n, batch, _copied(state)))
        return state is not None

    def at(self, epoch: int, batch: int) -> Position | None:
        """Return the position after a number of batches of an epoch, of all processes together."""
        n = batch // self.shards
        known = [i for i, (number, _, _) in enumerate(self._noted) if number <= n]
        if not known or epoch != self._epoch:
            return self.given(epoch, n)
        at = known[-1]
        number, _, state = self._noted[at]
        following = self._noted[at + 1][1] if at + 1 < len(self._noted) else NONE_LEFT
        return {
            "epoch": epoch, "batch": number, "shards": self.shards, "keeper": self._kind,
            "state": state, "next": checksum(following),
        }  # fmt: skip


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


def _copied(state: object) -> object:
    """Return a copy of what ``state_dict`` returned, which the stream may change."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))  # type: ignore[call-arg, arg-type]
    if isinstance(state, Tensor):
        return state.detach().clone()
    return state if isinstance(state, int | float | str | None) else copy.deepcopy(state)


def checksum(batch: object) -> int | None:
    """Return a checksum of the tensors, arrays, texts and numbers in a batch; None for no batch.

    Example:
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> checksum((a, b)) == checksum((a.clone(), b)) != checksum((b, a))
        True
    """
    return None if batch is NONE_LEFT else _add(batch, 0)


def _add(value: object, crc: int) -> int:
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided:
            return crc
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(value.view(torch.uint8).numpy().data, crc)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return zlib.crc32(value.tobytes(), crc)
    if isinstance(value, bytes):
        return zlib.crc32(value, crc)
    if isinstance(value, int | float | str):
        return zlib.crc32(repr(value).encode(errors="replace"), crc)
    for key, part in parts_of(value) or ():
        crc = _add(part, _add(key, crc))
    return crc
