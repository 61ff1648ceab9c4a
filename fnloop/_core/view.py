"""Which weights a reader of a state sees: those that are trained, or others in their place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence, Set
from typing import Literal

import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import reshard
from fnloop._backend.processes import delaying_interrupts
from fnloop._core.optimizers import modes_of
from fnloop._core.rng import COMPUTE, fold_in, isolated, seed_all
from fnloop._core.state import Buffers, TrainState, check_not_stale, unwatched, with_slots
from fnloop._core.types import View

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


@contextlib.contextmanager
def view(
    state: TrainState, reader: Reader, *, together: bool = True, buffers: Buffers | None = None
) -> Iterator[nn.Module]:
    """Read a model, within a ``with`` block, which gives it. Afterwards all is as before.

    Args:
        state: the state.
        reader: what the weights are read for.
        together: whether every process is here. Otherwise each sees its own weights, where these
            are others in each process.
        buffers: those of the model, if they are kept again and again.
    """
    with contextlib.ExitStack() as stack:
        if reader == "evaluation":
            stack.enter_context(unwatched(state.model))
            # They change in evaluation mode too, as those of an observer, or a teacher's centre.
            stack.callback((buffers or Buffers(state.model)).keep().put_back)
            stack.enter_context(in_evaluation_mode(state.model))
        model = state.model
        for each in _views_for(state, reader, together):
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


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards every submodule has the flag that it had.

    A function that needs gradients in it switches them on, as torch does: ``torch.enable_grad()``.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = torch.is_grad_enabled()
    try:
        model.eval()
        torch.set_grad_enabled(False)
        yield
    except RuntimeError as error:
        if "does not require grad" in str(error):
            error.add_note(_NO_GRADIENTS)
        raise
    finally:
        with delaying_interrupts():
            torch.set_grad_enabled(gradients)
            model.train(modes[0][1])  # a module may do something in its method train
            for module, training in modes:
                module.training = training
            reshard(model)


# --------------------------------------------------------------------------------------------------
# Look at the model within a run.


@contextlib.contextmanager
def as_evaluated(state: TrainState, together: bool) -> Iterator[nn.Module]:
    """View a model as in an evaluation, with draws that are a function of the seed.

    Args:
        state: the state.
        together: whether every process is here.
    """
    seen = view(state, "evaluation", together=together)
    with isolated(state.backend.device), seen as model:
        seed_all(fold_in(state.seed, COMPUTE))
        yield model


def evaluating(state: TrainState) -> contextlib.AbstractContextManager[nn.Module]:
    """Look at the model within a run, and change nothing: ``with evaluating(state) as model:``.

    Hooks are called in training mode. There a call of the model uses dropout, and moves the
    statistics of BatchNorm. In this block the model is in evaluation mode, without gradients, and
    has the weights that an evaluation uses, also with an optimizer that trains others. Afterwards
    these weights, the flag ``training`` of every module, the buffers, and all random generators are
    as they were before, also after an exception. What is drawn in the block is a function of the
    seed of the state.

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
    return as_evaluated(state, together=False)
