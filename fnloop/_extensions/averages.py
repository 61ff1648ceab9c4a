"""Averages of weights in a step: blend an update in, and evaluate the average beside the model.

How much of the weights is blended in is decided in the step ring, on the host, and done in the
update ring. A recorded update reads it from a tensor on the device, which the step ring fills.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

import attrs
import toolz
import torch
from torch import Tensor, nn

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import is_sharded, local_part
from fnloop._core.averages import (
    AVERAGED,
    Average,
    begin_at,
    copy_with_average,
    make_average,
    named_tensors,
)
from fnloop._core.freeze import Selector, select
from fnloop._core.state import (
    TrainState,
    all_parameters,
    unwrap,
)
from fnloop._core.types import Output, Step, View
from fnloop._step.transaction import is_recorded
from fnloop.extend import Batch, Wrap, containers, then

Place = tuple[dict[str, Tensor | None], str]  # a table of buffers, and a name in it
# (state, average) -> how much of the weights is blended in, from 0 to 1, or None: they are copied;
# and how many averages have been made then.
Choice = Callable[[TrainState, Average], tuple[float | None, int]]
Only = Sequence[Selector] | None  # what is averaged; None is everything


def first_average(state: TrainState, name: str, evaluated: bool, only: Only = None) -> Average:
    """Return the average of a state before its first update: its weights.

    Args:
        state: the state.
        name: the name of the average.
        evaluated: whether evaluations evaluate it.
        only: what is averaged.

    Raises:
        NotImplementedError: the average would be evaluated, and the model is sharded.
        ValueError: a selector is for nothing in the model, or for nothing that has a mean.
    """
    if AVERAGED in state.slots:
        return Average()  # the model is the average
    if evaluated:
        _check_can_be_evaluated(state, name)
    module = unwrap(state)
    if only is None:
        return make_average(module)
    found = make_average(module, chosen_in(module, name, only))
    if not found:
        raise ValueError(
            f"{name}: only= chooses nothing that has a mean: no parameter, and no buffer of "
            "floating dtype that is saved with the model"
        )
    return found


def chosen_in(module: nn.Module, name: str, only: Sequence[Selector]) -> set[str]:
    """Return the names of what selectors choose: parameters, and buffers of whole modules.

    Raises:
        ValueError: a selector is for nothing in the model.
    """
    found = select(name, module, only)
    return {*found.parameters, *_buffers(module, found.modules)}


def _buffers(module: nn.Module, among: Container[nn.Module] | None = None) -> dict[str, Place]:
    """Return where the buffers of a module are, by name; of those modules in it, or of all."""
    found: dict[str, Place] = {}
    for prefix, part in module.named_modules():
        if among is None or part in among:
            for key in torch_compat.buffers_of(part):
                path = torch_compat.strip_compile_prefix(f"{prefix}.{key}" if prefix else key)
                found[path] = (torch_compat.buffers_of(part), key)
    return found


# --- updates


class _Group(NamedTuple):
    """Tensors of one device and one dtype.

    Args:
        targets: the average.
        parameters: the first of the tensors to blend in.
        buffers: where the others are: a module may put another tensor there.
        weight: how much of them is blended in, on the device; for recorded updates.
    """

    targets: list[Tensor]
    parameters: list[Tensor]
    buffers: list[Place]
    weight: Tensor

    def sources(self, sharded: bool) -> Sequence[Tensor]:
        found = self.parameters
        if self.buffers:
            found = [*found, *map(_buffer_at, self.buffers)]
        return [local_part(t) for t in found] if sharded else found


def _buffer_at(place: Place) -> Tensor:
    table, key = place
    buffer = table[key]
    assert buffer is not None
    return buffer


class _Blended:
    """The tensors of an average beside those of the model, and the weight of the next update."""

    def __init__(self, state: TrainState, average: Average, name: str, only: Only) -> None:
        self.parameters = all_parameters(state)
        self.sharded = is_sharded(state.model)
        self.weight: float | None = None
        self.groups = _pair(unwrap(state), average, name, only)
        self.filled: float | None = None

    def fill(self, weight: float | None) -> None:
        """Set how much of the weights the next update blends in."""
        self.weight = weight
        full = 1.0 if weight is None else weight
        if full != self.filled:
            self.filled = full
            for group in self.groups:
                group.weight.fill_(full)

    def blend(self) -> None:
        recorded, weight = is_recorded(), self.weight
        if weight == 0 and not recorded:
            return
        with torch.no_grad():
            for group in self.groups:
                sources = group.sources(self.sharded)
                if weight is None and not recorded:
                    torch_compat.foreach_copy_(group.targets, sources)
                    continue
                dtype = group.weight.dtype
                if any(source.dtype != dtype for source in sources):
                    sources = [source.to(dtype) for source in sources]
                if recorded or weight is None:
                    torch_compat.foreach_lerp_(
                        group.targets, sources, [group.weight] * len(sources)
                    )
                else:
                    torch_compat.foreach_lerp_(group.targets, sources, weight)


def _pair(module: nn.Module, average: Average, name: str, only: Only) -> list[_Group]:
    """Return the tensors of an average with those of a module, by device and dtype.

    Raises:
        ValueError: the average is of other parts of the module than are chosen.
    """
    _follow(module, average, name, only)
    parameters: dict[str, nn.Parameter] = {
        torch_compat.strip_compile_prefix(key): p for key, p in module.named_parameters()
    }
    buffers = _buffers(module)
    groups = toolz.groupby(lambda key: (average[key].device, average[key].dtype), average)
    made = []
    for (device, dtype), names in groups.items():
        first = [key for key in names if key in parameters]
        others = [key for key in names if key not in parameters]
        made.append(
            _Group(
                [local_part(average[key]) for key in (*first, *others)],
                [parameters[key] for key in first],
                [buffers[key] for key in others],
                torch.zeros((), device=device, dtype=dtype),
            )
        )
    return made


def _follow(module: nn.Module, average: Average, name: str, only: Only) -> None:
    """Begin the average of what is new in a module at its value, and drop that of what is gone."""
    here = dict(named_tensors(module))
    for key in average.keys() - here.keys():
        del average[key]
    chosen = here.keys() if only is None else chosen_in(module, name, only)
    if others := [key for key in average if key not in chosen]:
        raise ValueError(
            f'{name}: the average in state.slots["{name}"] is of other parts of the model than '
            f"only= chooses ({others[0]} differs). To begin a new average, take it out: "
            f'attrs.evolve(state, slots={{k: v for k, v in state.slots.items() if k != "{name}"}})'
        )
    for key, tensor in here.items():
        wanted = key in average or (key in chosen and isinstance(tensor, nn.Parameter))
        if wanted and not average.fits(key, tensor):
            average[key] = begin_at(tensor)


def _blended(state: TrainState, average: Average, name: str, only: Only) -> _Blended:
    """Return the tensors of an average beside those that the model has now."""
    blended = average.blended
    if not isinstance(blended, _Blended) or blended.parameters is not all_parameters(state):
        blended = average.blended = _Blended(state, average, name, only)
    return blended


def choose_weight(name: str, choose: Choice, only: Only = None) -> Wrap:
    """Return the wrap of the step ring: decide how much is blended in, and count it."""

    def wrap(step: Step) -> Step:
        def averaging(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            average: Average = state.slots[name]
            weight, count = choose(state, average)
            _blended(state, average, name, only).fill(weight)
            state, out = step(state, batch)
            if out.skip is None:
                average.count = count
            return state, out

        return averaging

    return wrap


def blend(name: str, only: Only = None) -> Wrap:
    """Return the wrap of the update ring: blend the new weights into the average."""

    def blending(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        average = state.slots[name]
        weight = average.blended.weight
        blended = _blended(state, average, name, only)  # the update may have replaced some
        blended.fill(weight)
        try:
            blended.blend()
        except RuntimeError as error:
            _check_shapes(unwrap(state), average, name, error)
            raise
        return state, out

    return then(blending)


def _check_shapes(module: nn.Module, average: Average, name: str, error: Exception) -> None:
    """Raise ValueError if something has another shape than its average."""
    for key, tensor in named_tensors(module):
        if key in average and average[key].shape != tensor.shape:
            advice = (
                "put a new nn.Parameter in its place, instead of other memory into p.data"
                if isinstance(tensor, nn.Parameter)
                else "leave the buffer out, with only=, or register it with persistent=False"
            )
            raise ValueError(
                f"{name}: {key} has the shape {tuple(tensor.shape)}, and its average "
                f"{tuple(average[key].shape)}: {advice}"
            ) from error


# --- evaluation


@attrs.frozen
class AverageView(View):
    """The view of an average: a copy of the model that has it.

    Args:
        name: the slot of the average.
        beside: whether the model is evaluated too.
    """

    name: str
    beside: bool

    @contextlib.contextmanager
    def show(self, state: TrainState) -> Iterator[nn.Module]:
        """Make a model with the average, for one evaluation of a loader.

        Raises:
            NotImplementedError: the model is sharded, or cannot be copied.
        """
        if AVERAGED in state.slots:
            yield state.model
            return
        _check_can_be_evaluated(state, self.name)
        try:
            made = copy_with_average(unwrap(state), state.slots[self.name])
        except Exception as error:
            if containers.is_out_of_memory(error):
                error.add_note(
                    f"{self.name}: an evaluation needs memory for one more copy of the model. "
                    f"{self.name}(..., evaluate=False) makes none"
                )
                raise
            raise NotImplementedError(
                f"{self.name}: this {type(unwrap(state)).__name__} cannot be copied, so its "
                f"average cannot be evaluated ({type(error).__name__}: {error}). Write "
                f"{self.name}(..., evaluate=False)"
            ) from error
        yield made


def _check_can_be_evaluated(state: TrainState, name: str) -> None:
    if is_sharded(state.model):
        raise NotImplementedError(
            f"{name}: the average of a model under fully_shard cannot be evaluated during the run: "
            f"write {name}(..., evaluate=False), restore a checkpoint into a model that is not "
            f'sharded, and evaluate averaged(restore(path, state), "{name}")'
        )
