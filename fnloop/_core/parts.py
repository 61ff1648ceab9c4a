"""What is saved of a state, part by part, and how it is put back. A checkpoint is made of parts.

A part that is not one of every state is *brought*: by a middleware, a hook, an engine, or the class
of what is in a slot. A checkpoint names those that it has. What it has of a part that nothing has
brought yet stays in the slot of that name, and is saved again as it was.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs
from torch import Tensor

from fnloop._display import checks

State = Any  # a TrainState, which knows the parts that were brought to it
Json = Any  # a JSON value
Load = Callable[[State], State]
Tensors = Mapping[str, Mapping[str, Tensor]]  # by group and name


class Saving(Protocol):
    """What ``Part.save`` is given: the state that is saved, and where its tensors go.

    Attributes:
        state: the state, as it is outside of its run.
        parts: the names of the parts that are saved, as ``only=`` names them.
        tensors: the tensors of the parts that have no file of their own, by name.
        own_optimizers: whether each process has optimizers with a state of its own; a part may set
            it.

    Example:
        >>> def save(saving):
        ...     return {"seen": saving.encode(saving.state.slots["seen"], saving.tensors, "seen")}
        >>> Part("seen", save).name
        'seen'
    """

    state: State
    parts: Sequence[str]
    tensors: dict[str, Tensor]
    own_optimizers: bool

    def encode(self, value: object, tensors: dict[str, Tensor], path: str) -> Json:
        """Return plain data as JSON, and add its tensors to ``tensors``, by names below ``path``.

        Args:
            value: plain data and tensors, such as ``{"scale": 2.0, "seen": torch.ones(1)}``.
            tensors: receives the tensors.
            path: where the value is, for names and messages.

        Returns:
            The value as JSON.

        Raises:
            TypeError: something in the value is neither.
        """
        ...

    def file(self, name: str) -> dict[str, Tensor]:
        """Return a new file of tensors by their names, which is empty."""
        ...

    def add_own(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Add tensors that this process has of its own; it writes them itself."""
        ...

    def save_slot(self, name: str, save: Callable[..., object], each: bool) -> dict[str, Json]:
        """Save what ``save`` makes of a slot, in a file of its own: see :meth:`Part.of_slot`."""
        ...

    def try_slot(self, name: str, save: Callable[..., object]) -> None:
        """Do the same in this process alone, and write nothing."""
        ...


class Restoring(Protocol):
    """What ``Part.prepare`` is given: what was saved, and what it is restored into.

    Attributes:
        state: the state to load into, as it is before that.
        parts: the names of the parts to restore.
        facts: the entries of all parts, as the contents of ``state.json``.
        groups: the files of tensors that were read, by name.
        path: the checkpoint, for messages.
        undone: what changes something in place enters here how that is restored if there is an
            exception.
        tensors: the tensors of the parts that have no file of their own, on the device.
        is_of_as_many: whether as many processes saved it, so that each gets back what was its own.

    Example:
        >>> def prepare(saved):
        ...     seen = saved.decode(saved.facts["seen"], saved.tensors)
        ...     return lambda state: with_slot(state, "seen", seen)
        >>> Part("seen", vars, prepare).name
        'seen'
    """

    state: State
    parts: Sequence[str]
    facts: Mapping[str, Json]
    groups: Tensors
    path: Path
    undone: contextlib.ExitStack
    tensors: Mapping[str, Tensor]
    is_of_as_many: bool

    def decode(self, value: Json, tensors: Mapping[str, Tensor]) -> Json:
        """Return what :meth:`Saving.encode` was given."""
        ...

    def own(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors that this process added by :meth:`Saving.add_own`."""
        ...

    def prepare_slot(self, name: str, load: Callable[..., object]) -> Load:
        """Return how to load what :meth:`Saving.save_slot` has saved."""
        ...


def load_nothing(saved: Restoring) -> Load:
    """Load nothing of a part."""
    return lambda state: state


@attrs.frozen(eq=False)
class Part:
    """A part of a state in a checkpoint. Most authors write :meth:`of_slot`.

    There is no separate function that checks, since decoding is the check: what it finds is what is
    loaded.

    Args:
        name: its entry in ``state.json``.
        save: ``saving -> entries``, a mapping of JSON, which is empty if there is nothing to save.
            It adds its tensors to the files.
        prepare: ``saved -> load``: checks and decodes what was saved, and returns the function that
            loads it, ``state -> state``. Most only set fields. Where one of the two functions
            changes something in place, that can be undone.
        encode: ``saving -> ...`` that encodes what ``save`` may refuse, in this process alone; None
            if it refuses nothing.
        of: what it belongs to, as ``only=`` names it.
        templates: ``(state, entries) -> tensors`` of the state by group and name, of the shapes of
            those in the checkpoint, where they may be sharded; or None.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> seen = Part.of_slot("seen", lambda seen: {"rows": torch.stack(seen)},
        ...     lambda saved: [*saved["rows"]])
        >>> def noting(step):
        ...     def note(state, batch):
        ...         state.slots["seen"].append(batch[0])
        ...         return step(state, batch)
        ...     return note
        >>> pipe = fl.pipeline(
        ...     fl.Middleware("seen", step=noting, init=lambda state: [], brings=(seen,)))
        >>> step, ones = pipe(toy_loss), [torch.ones(1)] * 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = fl.save(fl.fit(step, toy(), ones, hooks=()), f"{folder}/a")
        ...     state = fl.fit(step, fl.restore(path, toy()), ones, epochs=2, hooks=())
        >>> len(state.slots["seen"])
        6
    """

    # Files of tensors that a checkpoint may have already.
    TAKEN: ClassVar = ("model", "optimizer", "slots", "training", "own")

    name: str
    save: Callable[..., Mapping[str, Json]]
    prepare: Callable[..., Load] = load_nothing
    encode: Callable[..., object] | None = None
    of: str = "slots"
    templates: Callable[[State, Mapping[str, Json]], Tensors] | None = None

    @staticmethod
    def of_slot(
        name: str,
        save: Callable[..., object],
        load: Callable[..., object],
        *,
        each: bool = False,
    ) -> Part:
        """Return a part that saves what is in a slot, in a file of its own.

        A run gets it back when it has a middleware or a hook that brings the part. Until then it
        stays in the checkpoint's form, and is saved again.

        Args:
            name: the name of the slot, and of the file: letters, digits, "-" and "_".
            save: ``value -> saved``, plain data and tensors.
            load: ``saved -> value``. The tensors of ``saved`` are in host memory.
            each: whether each process has its own. On another number of processes the slot is made
                again. By default that of the main process is saved, which all get.

        Raises:
            TypeError: one of the two is not a function, or ``each`` not a flag.
            ValueError: it is not a name for a file, or every checkpoint has a file of that name.

        Example:
            >>> Part.of_slot("replay", vars, dict).name
            'replay'
        """
        owner = "Part.of_slot"
        Part.check_name(owner, name)
        checks.function(owner, "save", save, "a function of what is in the slot", 1, also=type)
        checks.function(owner, "load", load, "a function of what was saved", 1, also=type)
        checks.flag(owner, "each", each)
        return Part(
            name,
            lambda saving: saving.save_slot(name, save, each),
            lambda saved: saved.prepare_slot(name, load),
            lambda saving: saving.try_slot(name, save),
        )

    @staticmethod
    def check_name(owner: str, name: str) -> None:
        """Raise unless a part, and its file, can have this name.

        Args:
            owner: what was called, for messages.
            name: the name.

        Raises:
            TypeError: it is not a text.
            ValueError: it is not a name for a file, or every checkpoint has a file of that name.
        """
        checks.text(owner, "name", name, "the name of the slot")
        taken = name.lower() in Part.TAKEN
        if taken or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
            raise ValueError(
                f"{owner} expects name as a name for a file that no checkpoint has otherwise, of "
                f'letters, digits, "-" and "_"; got {name!r}'
            )
