"""Which weights a reader of a state sees: those that are trained, or others in their place."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import is_sharded, reshard
from fnloop._backend.processes import delaying_interrupts
from fnloop._core.optimizers import modes_of
from fnloop._core.rng import COMPUTE, fold_in, isolated, seed_all
from fnloop._core.state import (
    Buffers,
    TrainState,
    check_not_stale,
    is_watched,
    unwatched,
    with_slots,
)
from fnloop._core.types import View
from fnloop._display.checks import fields_of

# --------------------------------------------------------------------------------------------------
# A reader says what it is, and the views of the state decide which weights it sees:
#
#   "train"        those that are trained.
#   "evaluation"   those of the views, in evaluation mode and without gradients.
#   "save"         the same weights, and the modules as they are.
#
# There is no other way to the weights of an evaluation.

Reader = Literal["train", "evaluation", "save"]
_NOT_YET = (
    'state.slots["{0}"] is from a checkpoint, and says which weights an evaluation uses. Only its '
    "step can read it: write evaluate(step, state, loader), or restore the model alone, which has "
    'these weights: restore(path, state, only=("model",)). To leave them out: '
    'attrs.evolve(state, slots={{k: v for k, v in state.slots.items() if k != "{0}"}})'
)


def views_of(state: TrainState) -> list[View]:
    """Return the views of a state: of its optimizers, then of its slots."""
    return [*modes_of(state.optimizer), *(v for v in state.slots.values() if isinstance(v, View))]


def _views_for(state: TrainState, reader: Reader, together: bool) -> list[View]:
    """Return the views that a reader sees.

    Raises:
        ValueError: a slot was restored that its step has to make a view first.
    """
    if reader == "train":
        return []
    if pending := [name for name, slot in state.slots.items() if View.is_pending(slot)]:
        raise ValueError(_NOT_YET.format(pending[0]))
    return [v for v in views_of(state) if v.changes(state) and (together or not v.apart)]


def changed_for(state: TrainState, reader: Reader) -> Set[int]:
    """Return the identities of the tensors that a reader sees with other values than are trained.

    Every process is here.
    """
    views = _views_for(state, reader, together=True)
    return {id(tensor) for each in views for tensor in each.changes(state)}


def is_apart(state: TrainState) -> bool:
    """Return whether the model has other weights in each process."""
    return any(each.apart for each in views_of(state))


def view(
    state: TrainState, reader: Reader, *, together: bool = True
) -> contextlib.AbstractContextManager[nn.Module]:
    """Read a model, within a ``with`` block, which gives it. Afterwards all is as before.

    Args:
        state: the state.
        reader: what the weights are read for: "train", "evaluation" or "save".
        together: whether every process is here. Otherwise each sees its own weights, where these
            are others in each process.

    Returns:
        The context manager. For an "evaluation" the model is in evaluation mode, without gradients.

    Raises:
        ValueError: a slot was restored that its step has to make a view first.

    Example:
        >>> from fnloop.testing import toy
        >>> with view(toy(w=2.0), "save") as model:
        ...     print(model.w.item())
        2.0
    """
    if reader == "evaluation":
        return Visits(state, together).visit()
    return _showing(state, _views_for(state, reader, together))


class Visits:
    """Looks at a model as in an evaluation, several times, with the caller in between.

    The caller may then do with the model what they like. What is the same in all visits is found
    out once.

    Args:
        state: the state.
        together: as in :func:`view`.
    """

    def __init__(self, state: TrainState, together: bool = True) -> None:
        self._state, self._views = state, _views_for(state, "evaluation", together)
        self._unchanged = _unchanged(state.model)

    def visit(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Return the context manager of a view."""
        if self._views or is_watched(self._state.model):
            return self._visit()
        return self._unchanged

    @contextlib.contextmanager
    def _visit(self) -> Iterator[nn.Module]:
        with unwatched(self._state.model), self._unchanged, _showing(self._state, self._views) as m:
            yield m


class _unchanged:
    """A model in evaluation mode, in a ``with`` block, which may be entered again.

    Afterwards its modes and its buffers are as before.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._mode, self._buffers = model, in_evaluation_mode(model), Buffers(model)

    def __enter__(self) -> nn.Module:
        # They change in evaluation mode too, as those of an observer, or a teacher's centre.
        # Those that stay are copied once. To put one back is a change too, so a copy follows it.
        self._kept = self._buffers.keep(trusting=True)
        self._mode.__enter__()
        return self._model

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._mode.__exit__(kind, error, trace)
        finally:
            self._kept.put_back()


@contextlib.contextmanager
def _showing(state: TrainState, views: Sequence[View]) -> Iterator[nn.Module]:
    """Show some views, each in the one before it."""
    with contextlib.ExitStack() as stack:
        model = state.model
        for each in views:
            model = stack.enter_context(shown(each, state))
        yield model


@contextlib.contextmanager
def shown(each: View, state: TrainState) -> Iterator[nn.Module]:
    """Show a view, within a ``with`` block, which gives the model that has its weights."""
    with _put_back(state.model, each.changes(state)), each.show(state) as model:
        if model is not state.model:
            _trained[model] = weakref.ref(state.model)
        yield model


# The model of a state, by the models that show its views.
_trained: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def trained_model(model: nn.Module) -> nn.Module | None:
    """Return the model of the state, for a model that shows one of its views or is it."""
    found = _trained.get(model)
    return model if found is None else found()


@contextlib.contextmanager
def _put_back(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put the values of tensors of a model back, bit for bit, after a ``with`` block."""
    own = {*map(id, model.buffers())}
    params = [tensor for tensor in tensors if id(tensor) not in own]
    buffers = Buffers(model).keep() if len(params) < len(tensors) else None
    kept = [p.detach().clone() for p in params]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(params, kept, strict=True):
                p.copy_(value)
        if buffers is not None:
            buffers.put_back(unseen=True)


def take_back(state: TrainState) -> None:
    """Let a model have the weights that training continues from, after a run has ended."""
    for each in views_of(state):
        each.take_back(state)


def hand_over(state: TrainState) -> None:
    """Let a model have the weights that the caller of a run is to see."""
    for each in views_of(state):
        each.hand_over(state)


def begin_again(state: TrainState) -> TrainState:
    """Return the state for weights that are put into its model next, as readers have seen them."""
    for modes in modes_of(state.optimizer):
        modes.begin_again(state)
    views = {k: slot for k, slot in state.slots.items() if isinstance(slot, View)}
    again = {k: each.begin_again(state) for k, each in views.items()}
    slots = {**state.slots, **again}
    return with_slots(state, {k: v for k, v in slots.items() if k not in views or v is not None})


# --------------------------------------------------------------------------------------------------
# Evaluation mode.

_NO_GRADIENTS = (
    "an evaluation runs without gradients. A loss function that needs them, such as that of a "
    "gradient penalty, switches them on for itself: with torch.enable_grad(): ..."
)


class in_evaluation_mode:
    """Evaluation mode without gradients, in a ``with`` block, which may be entered again.

    Afterwards every submodule has the flag that it had. A function that needs gradients in the
    block switches them on, as torch does: ``torch.enable_grad()``.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def _look(self) -> None:
        """Note which modules there are, and whether their flags are all that their mode is."""
        self._modules = [*self._model.modules()]
        self._children = [vars(module).get("_modules", {}) for module in self._modules]
        self._known = [dict(own) for own in self._children]
        self._tables = [vars(module) for module in self._modules]
        self._plain = all(map(_has_plain_mode, self._modules)) and not is_sharded(self._model)

    def __enter__(self) -> None:
        if self._children != self._known:  # modules were replaced since the last block
            self._look()
        if self._plain:
            self._before = [table["training"] for table in self._tables]
        else:
            self._before = [module.training for module in self._modules]
        self._gradients = torch.is_grad_enabled()
        try:
            if not self._plain:
                self._model.eval()
            elif any(self._before):
                _set_flags(self._tables, itertools.repeat(False))
            torch.set_grad_enabled(False)
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and "does not require grad" in str(error):
            error.add_note(_NO_GRADIENTS)
        self._put_back()

    def _put_back(self) -> None:
        if self._plain and self._children == self._known:
            _set_flags(self._tables, self._before)
            torch.set_grad_enabled(self._gradients)
            return
        with delaying_interrupts():
            torch.set_grad_enabled(self._gradients)
            self._model.train(self._before[0])  # a module may do something in its method train
            for module, training in zip(self._modules, self._before, strict=True):
                module.training = training  # type: ignore[assignment]
            reshard(self._model)


def _has_plain_mode(module: nn.Module) -> bool:
    """Return whether the mode of a module is its flag, and nothing else is done about it."""
    kind, own, names = type(module), vars(module), ("train", "eval", "__setattr__")
    return (
        fields_of(kind, names) == fields_of(nn.Module, names)
        and own.keys() >= {"training", "_modules"}
        and own.keys().isdisjoint(names)
        and not hasattr(kind, "training")
    )


def _set_flags(tables: Sequence[dict[str, object]], flags: Iterable[object]) -> None:
    """Set the flags ``training`` in one call, which Ctrl-C cannot divide."""
    deque(map(dict.__setitem__, tables, itertools.repeat("training"), flags), maxlen=0)


# --------------------------------------------------------------------------------------------------
# Look at the model within a run.


@contextlib.contextmanager
def _evaluating(state: TrainState) -> Iterator[nn.Module]:
    """View a model as in an evaluation, with draws that are a function of the seed."""
    with isolated(state.backend.device), view(state, "evaluation", together=False) as model:
        seed_all(fold_in(state.seed, COMPUTE))
        yield model


def evaluating(state: TrainState) -> contextlib.AbstractContextManager[nn.Module]:
    """Call the model within a run, and change nothing: ``with evaluating(state) as model:``.

    Hooks are called in training mode. There a call of the model uses dropout, and changes the
    statistics of BatchNorm. In this block the model is in evaluation mode, without gradients, and
    has the weights that an evaluation uses, also with an optimizer that trains others. Afterwards
    these weights, the flag ``training`` of every module, the buffers, and all random generators are
    as they were before, even after an exception. Random draws in the block depend on the seed of
    the state.

    Args:
        state: the newest state: in a hook the one that it is called with.

    Returns:
        A context manager, which gives ``state.model``.

    Raises:
        StaleStateError: the state has been advanced.
        RuntimeError: another thread is inside ``fit``, ``run``, ``evaluate`` or ``predict``.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Dropout(0.5))
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
        >>> with evaluating(state) as model:
        ...     model(torch.tensor([[1.0], [3.0]])).round().tolist()
        [[1.0], [3.0]]
        >>> model.training, model[0].running_mean.item()
        (True, 0.0)

    Notes:
        Nothing is exchanged between processes, so one of them may enter the block alone
        (:func:`fnloop.on_main`). Each has its own buffers, and with ``local_sgd`` its own weights.
        For the average of ``ema`` or ``swa``, use the model of :func:`fnloop.averaged`. Numbers
        that belong in a record are for :func:`fnloop.measure`, which calls its function as in this
        block.
    """
    check_not_stale(state, "evaluating")
    return _evaluating(state)
