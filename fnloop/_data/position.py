"""Where a training loader is in an epoch, and whether it is there again after a resume."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from fnloop._backend.collectives import rank_and_size
from fnloop._backend.containers import attributes_of, checksum
from fnloop._core.rng import FETCH, ORDER, PART, fold_in
from fnloop._core.runs import UNKNOWN, Position
from fnloop._core.types import Batch
from fnloop._data.loaders import NONE_LEFT
from fnloop._data.sharing import Sharing
from fnloop._display.checks import has_methods

# --------------------------------------------------------------------------------------------------
# The position of a training loader: what a state has of it in mid-epoch.
#
# A stream that has `state_dict` and `load_state_dict` is asked after every batch, because it is
# read ahead: the position of a state is that of the last batch which the state has consumed. To
# continue there, the position is given back, and nothing is read again.
#
# Other loaders are read again up to there. Then one may be elsewhere: its order comes from a
# generator of its own, or its data have changed. Generators that are attributes are put back to
# where they were when the epoch began. What a position cannot keep, it says. It has the length of
# the data, a checksum of the batch that came next, and the indices that a sampler of the user's
# has given. Where they differ, there is one warning.

_SOME = "Samples may be trained twice in this epoch, and others not at all."
_LEAVE = 'attrs.evolve(state, ends="epoch")'
_MEND = (
    "Its order comes from a generator of its own, or its data or settings have changed. To "
    "continue exactly, draw from the global generators of torch, NumPy or Python, which are seeded "
    "for each epoch; or define set_epoch(epoch), or state_dict() and load_state_dict(state). To "
    f"begin the next epoch at once, pass {_LEAVE}"
)


@runtime_checkable
class Keeper(Protocol):
    """A loader or a dataset that knows where it is."""

    def state_dict(self) -> object: ...

    def load_state_dict(self, state: object, /) -> object: ...


class Noted(Protocol):
    """What a kind of loader notes of an epoch besides."""

    def up_to(self, n: int, /) -> Mapping[str, object]:
        """Return what a position has of it that is n batches after where the loader was opened."""
        ...


class Positions:
    """Where a loader was after each of its newest batches, and what is known of its epoch.

    Args:
        name: the loader, as messages name it.
        measure: returns how many samples or batches it has in the epoch that it was set to, and of
            which of the two; None if that is not known.
        contents: returns what is compared of a batch, or of what one is made from.
        owners: whose generators decide the order of each epoch.
        listed: all batches, if they are at hand: then they need not be noted.

    Attributes:
        shards: how many processes read a part of their own; 1 if each reads the whole.
        ahead: how many batches are read ahead of those that a window takes.
        noted: what else is noted of the epoch, or None.
    """

    shards, ahead = 1, 0

    def __init__(
        self,
        name: str = "",
        measure: Callable[[], tuple[int, str] | None] = lambda: None,
        contents: Callable[[Batch], object] = lambda batch: batch,
        owners: Sequence[object] = (),
        listed: Sequence[Batch] | None = None,
    ) -> None:
        self._owners = owners
        self.name, self._measure, self._listed = name, measure, listed
        self._contents = contents
        self._given: Position | None = None
        self._left: int | None = None
        self._told = False  # whether it was said that the loader is elsewhere
        self._noted: deque[tuple[int, Batch, object]] = deque(maxlen=0)
        self.forget(None, 0)

    def forget(self, epoch: int | None, start: int) -> None:
        """Forget what was noted: an epoch is read from a batch on."""
        self._noted.clear()
        self._epoch, self._first, self._kind = epoch, start, ""
        self._ended: int | None = None
        self.noted: Noted | None = None
        self._size: tuple[int, str] | None = None
        self._own: dict[str, object] = {}  # their states when the epoch began

    @property
    def wanted(self) -> bool:
        """Whether anything asks for them: a run does, an evaluation does not."""
        return self._noted.maxlen != 0

    def begin(self, given: Position | None, ahead: int, left: int | None = None) -> None:
        """Begin an epoch, or continue it.

        Args:
            given: the position to continue at, or None.
            ahead: the most batches that are read ahead of those consumed.
            left: how many batches are left, if that is known.
        """
        self._settle()
        self._given, self._left, self._told = given, left, False
        self._noted = deque(maxlen=ahead + self.ahead + 1)

    def given(self, epoch: int | None, start: int) -> Position | None:
        """Return the position from which an epoch can continue at a batch, or None."""
        given = self._given
        if given is None or not start or given["batch"] > start:
            return None
        return given if (given["epoch"], given["shards"]) == (epoch, self.shards) else None

    def open(
        self,
        epoch: int | None,
        start: int,
        owners: Sequence[object] | None = None,
        keeper: object = None,
        continues: bool = False,
    ) -> None:
        """Begin to read an epoch from a batch on, before the loader is asked for anything.

        Args:
            epoch: the epoch.
            start: the batches that were consumed already.
            owners: whose generators decide the order, if they are made for this epoch alone.
            keeper: what is asked for its position, or None.
            continues: whether it is given its position, and continues from there by itself.
        """
        self.forget(epoch, start)
        if not self.wanted:
            return
        self._kind = "" if keeper is None else type(keeper).__name__
        self._size, given = self._measure(), self._given
        own = own_generators(self._owners if owners is None else owners)
        if given is not None and given["shards"] == self.shards:
            states = given.get("later", {})  # a phase has left the epoch of the position
            if given["epoch"] == epoch:
                self._check_size(given, start)
                states = {} if bool(given["batch"]) != bool(start) else given.get("own", {})
            if not continues:
                _put_all_back(own, states)
        self._own = _states_of(own)

    # --- what is read

    def note(self, n: int, batch: Batch, keeper: Keeper | None = None) -> bool:
        """Note the batch number ``n``, and where the loader is. Return whether it says so."""
        state = None
        try:
            state = None if keeper is None else keeper.state_dict()
        except Exception as error:
            logging.getLogger("fnloop").warning(
                "fit: %s.state_dict() raised %s: %s. A run that continues in the middle of an "
                "epoch reads the loader again up to there",
                *(type(keeper).__name__, type(error).__name__, error),
            )
        if state is None:
            self._kind = ""
            if len(self._noted) + 1 == self._noted.maxlen:
                self._noted.popleft()  # consumed, and not to be kept alive
        if self.wanted:
            self._noted.append((n, batch, state if state is None else _copied(state)))
        return state is not None

    def end(self, n: int) -> None:
        """Note that the epoch has no batch after the one numbered ``n``."""
        self._ended = n
        self._settle()

    def noting(
        self, items: Callable[[], Iterator[Batch]], epoch: int | None, start: int
    ) -> Iterator[Batch]:
        """Yield the items that ``items()`` gives, from a position on, noting each."""
        __tracebackhide__ = True
        self.open(epoch, start)
        n = start
        for n, item in enumerate(items(), start + 1):
            if n == start + 1:
                self.compare(epoch, start, item)
            self.note(n, item)
            yield item
        if n == start:
            self.compare(epoch, start, NONE_LEFT)
        self.end(n)

    @property
    def draws(self) -> bool:
        """Whether the loader has generators of its own."""
        return bool(own_generators(self._owners))

    def unmoved(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation, and put generators of the loader's own back then.

        So each evaluation has the same batches, and training on the loader does not notice it.
        """
        __tracebackhide__ = True
        with kept_generators(self._owners):
            yield from batches

    # --- what is asked

    def at(self, epoch: int, batch: int) -> Position | None:
        """Return the position after a number of batches of an epoch, of all processes together."""
        n = batch // self.shards
        if not batch:
            return self._between(epoch)
        if epoch != self._epoch or n <= self._first:
            return self.given(epoch, n)
        state: object = None
        if self._kind:
            known = [(number, state) for number, _, state in self._noted if number <= n]
            if not known:
                return self.given(epoch, n)
            n, state = known[-1]
        following = next((batch for number, batch, _ in self._noted if number == n + 1), NONE_LEFT)
        ended = self._ended is not None and n >= self._ended
        if self._listed is not None:
            following = self._listed[n] if n < len(self._listed) else NONE_LEFT
        position: Position = {
            "epoch": epoch, "batch": n, "shards": self.shards, "keeper": self._kind,
            "state": state,
            "next": UNKNOWN if following is NONE_LEFT and not ended else self._mark(following),
            "size": None if self._size is None else [*self._size],
        }  # fmt: skip
        if self._own:
            position["own"] = self._own
            position["later"] = self._later()
        more = {} if self.noted is None else self.noted.up_to(n - self._first)
        position |= more  # type: ignore[typeddict-item]
        says = self._kind or self._size or self._own or more or following is not NONE_LEFT
        return position if says else None

    def _later(self) -> dict[str, object]:
        """Return the states of generators of the loader's own at the newest batch.

        A loader of loaders does not read those again of which nothing is left after a resume. So
        what stands where the epoch has begun is where it was when the position was noted.
        """
        now = _states_of(own_generators(self._owners))
        if self._given is None or self._given["epoch"] != self._epoch or not self._first:
            return now
        then, begun = self._given.get("later", {}), self._own
        mark = lambda state: checksum(state, objects=True)
        return {
            name: then[name]
            if name in then and name in begun and mark(state) == mark(begun[name])
            else state
            for name, state in now.items()
        }

    def _settle(self) -> None:
        """Put generators of the loader's own where they are after what was read of the epoch."""
        if self._own and self._given is not None:
            _put_all_back(own_generators(self._owners), self._later())

    def _between(self, epoch: int) -> Position | None:
        """Return the position at the beginning of an epoch: of that which is read, or a later one.

        There is one if generators of the loader's own decide the order.
        """
        if not self._owners:
            return None
        own = self._own if epoch == self._epoch else self._later()
        if not own:
            return None
        return {
            "epoch": epoch, "batch": 0, "shards": self.shards, "keeper": "", "state": None,
            "next": UNKNOWN, "size": None, "own": own,
        }  # fmt: skip

    def _mark(self, batch: object) -> int | None:
        if batch is NONE_LEFT:
            return None
        return checksum(self._contents(batch), objects=True)

    # --- what has changed

    def _check_size(self, given: Position, start: int) -> None:
        """Warn if the data have another length than when the epoch began."""
        size = given.get("size")
        if not start or size is None or self._size is None or tuple(size) == self._size:
            return
        self._told, batch = True, start * self.shards
        then = (
            f"after batch {batch} it continues in the data as they are now, so that samples may be "
            "trained twice, and others not at all"
            if self._left != 0
            else f"no batch is left, so it ends here, having been trained on {batch} batches"
        )
        self._warn(
            f"the training loader ({self.name}) had {_in_words(size)} when epoch "
            f"{given['epoch'] + 1} began, and has {_in_words(self._size)} now. Of this epoch, "
            f"{then}. To train each sample once, resume with the data as they were; to begin the "
            f"next epoch at once, pass {_LEAVE}"
        )

    def compare(self, epoch: int | None, start: int, batch: object) -> None:
        """Warn if the batch that follows a position is not the one that followed it before.

        Args:
            epoch: the epoch.
            start: the position.
            batch: the batch, or ``NONE_LEFT``.
        """
        given = self.given(epoch, start)
        if given is None or self._told or given["batch"] != start or "size" not in given:
            return
        if given["next"] != UNKNOWN and given["next"] != (mark := self._mark(batch)) != UNKNOWN:
            self.tell(given, "batches", "" if mark is not None else "It has no batch there.")

    def tell(self, given: Position, what: str, affected: str = "") -> None:
        """Warn, once in an epoch, that the loader gives something else than before a resume."""
        if self._told:
            return
        self._told = True
        n = given["batch"] * self.shards
        self._warn(
            f"the training loader ({self.name}) does not resume where it was: after batch {n} "
            f"of epoch {given['epoch'] + 1} it gives other {what} than before. "
            f"{affected or _SOME} {_MEND}"
        )

    def _warn(self, text: str) -> None:
        if self.shards > 1 or rank_and_size()[0] == 0:
            logging.getLogger("fnloop").warning("fit: %s", text)


class Pass(NamedTuple):
    """From where on a loader is read.

    Args:
        seed: the run's, or one that was derived from it.
        epoch: the epoch, or None for an evaluation.
        start: the batches of the epoch that were consumed already, by all processes.
        samples: their samples, if the loader's batches have one known size; else 0.
        sharing: how the batches are distributed to the processes.
        positions: know where the loader was then, and are told where it is.

    Example:
        >>> from fnloop.extend import Source
        >>> source = Source.open([0, 1, 2, 3], seed=0)
        >>> at = Pass(0, 2, 3, 0, source, source.positions)
        >>> at.epoch, at.start, [*source.reader.items(at)]
        (2, 3, [3])
        >>> at.order == at.part(1).order    # a loader in another one has an order of its own
        False
    """

    seed: int
    epoch: int | None
    start: int
    samples: int
    sharing: Sharing
    positions: Positions

    @property
    def place(self) -> tuple[int | None, int, int]:
        """The epoch, and the batches and samples of it that were consumed."""
        return self.epoch, self.start, self.samples

    @property
    def order(self) -> int:
        """The seed from which the order of the epoch is drawn."""
        return fold_in(self.seed, ORDER, self.epoch or 0)

    @property
    def fetch(self) -> int:
        """The seed from which those of the batches are made, each with its number."""
        return fold_in(self.seed, FETCH, self.epoch or 0)

    def set_epoch(self, *owners: object) -> None:
        """Call ``set_epoch`` of a loader, its dataset and its samplers, where there is one."""
        if self.epoch is None:
            return
        for owner in {id(owner): owner for owner in owners}.values():
            if has_methods(owner, "set_epoch"):
                owner.set_epoch(self.epoch)

    def part(self, number: int) -> Pass:
        """Return a pass over a loader that is a part of this one, with a seed of its own."""
        return self._replace(seed=fold_in(self.seed, PART, number))

    def apart(self) -> Pass:
        """Return a pass that starts at a number of batches, and of which no position is kept."""
        return self._replace(samples=0, positions=Positions())


def _put_all_back(own: Mapping[str, OwnGenerator], states: Mapping[str, object]) -> None:
    for name in own.keys() & states.keys():
        with contextlib.suppress(Exception):  # of another kind
            _put_back(own[name], states[name])


def _in_words(size: Sequence[int | str]) -> str:
    n, what = cast(tuple[int, str], tuple(size))
    return f"{n:,} {what.removesuffix('es' if what == 'batches' else 's') if n == 1 else what}"


# --- generators of a loader's own

OwnGenerator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


def own_generators(owners: Sequence[object], every: bool = False) -> dict[str, OwnGenerator]:
    """Return the generators that are attributes of loaders, samplers and streams, by their paths.

    Without ``every``, torch's ``generator`` is not among them: fnloop replaces it.
    """
    found: dict[str, OwnGenerator] = {}
    if not owners:
        return found
    seen: set[int] = set()

    def look(owner: object, path: str) -> None:
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for name, value in attributes_of(owner):
            if isinstance(value, OwnGenerator):
                if every or name != "generator" or not isinstance(value, torch.Generator):
                    found[f"{path}.{name}"] = value
            elif isinstance(value, Sampler | IterableDataset):
                look(value, f"{path}.{name}")

    for i, owner in enumerate(owners):
        look(owner, str(i))
    return found


@contextlib.contextmanager
def kept_generators(owners: Sequence[object]) -> Iterator[None]:
    """Put the generators of loaders, samplers and streams back to where they are now."""
    own = own_generators(owners, every=True)
    states = _states_of(own)
    try:
        yield
    finally:
        _put_all_back(own, states)


def _states_of(generators: Mapping[str, OwnGenerator]) -> dict[str, object]:
    return {name: _state_of(generator) for name, generator in generators.items()}


def _state_of(generator: OwnGenerator) -> object:
    """Return the state of a generator as plain data; None if it has none, as that of the system."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    try:
        version, words, gauss = generator.getstate()
    except NotImplementedError:
        return None
    return [version, np.array(words), gauss]


def _put_back(generator: OwnGenerator, state: Batch) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState | torch.Generator):
        generator.set_state(state)
    elif state is not None:
        version, words, gauss = state
        generator.setstate((version, tuple(map(int, words)), gauss))


# --- copies and checksums


def is_next(batch: object, position: Position) -> bool:
    """Return whether a batch is the one that followed a position, as far as that is known."""
    found = None if batch is NONE_LEFT else checksum(batch, objects="size" in position)
    return position["next"] in (UNKNOWN, found)


def _copied(state: object) -> object:
    """Return a copy of what ``state_dict`` returned, which the stream may change."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))  # type: ignore[call-arg, arg-type]
    if isinstance(state, Tensor):
        return state.detach().clone()
    return state if isinstance(state, int | float | str | None) else copy.deepcopy(state)
