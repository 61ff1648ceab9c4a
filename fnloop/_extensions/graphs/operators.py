"""Record the operators of whole updates, and compile them as one function each."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_aggregate
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from fnloop._core.state import TrainState
from fnloop._core.types import Output, Step
from fnloop._extensions.graphs.capture import (
    Graph,
    GraphedStep,
    OriginalSettings,
    Recorder,
    copy_all,
    read_from_tensors,
    signature,
)
from fnloop._extensions.graphs.guards import CaptureError, CreatedError, explain
from fnloop._extensions.graphs.torch_compat import (
    bare_step,
    begins_constant,
    draws,
    is_foreach_norm,
    returns_values,
    shapes_by_values,
    writes,
)
from fnloop.extend import Batch, Ownership, host, optimizers, torch_compat

# A recorder runs an update once, and notes each operator below autograd: those of the forward, the
# backward, the middleware and the optimizers. What they read from outside, such as parameters and
# slots, are the inputs of the compiled function, which writes to them in place. What has been
# created and is still there after the update, such as the loss, is its output. The record has no
# effect: what was written to is put back.

T = TypeVar("T")
Memory = torch.UntypedStorage
Backend = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]
_READS = "numpy", "tolist", "__array__", "__dlpack__"  # methods that no operator is called for
_READ = "a tensor is read to the host"
_ADVICE = (
    "To compile the loss function and the optimizers apart, leave out fullgraph=True, or write "
    "compiled()"
)


# --- a record


class _NoHostReads(TorchFunctionMode):
    """Forbid what reads the memory of a tensor without an operator."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if getattr(func, "__name__", None) in _READS:
            raise RuntimeError(_READ)
        return func(*args, **(kwargs or {}))


class _Draws:
    """Finds out whether something else than operators moves the generator, such as ``fork_rng``.

    Args:
        device: whose generator it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._state = (
            torch.get_rng_state
            if device.type == "cpu"
            else lambda: torch.get_device_module(device).get_rng_state(device)
        )
        self._last = self._state()

    def made_by(self, draw: Callable[[], T]) -> T:
        """Return what an operator returns that draws."""
        self.check()
        made = draw()
        self._last = self._state()
        return made

    def check(self) -> None:
        """Raise if the generator has been moved since the last draw."""
        if not torch.equal(self._state(), self._last):
            raise RuntimeError(
                "the update sets the state of the random generator, as sam and activation "
                "checkpointing do to draw again"
            )


class _Part(torch_compat.DispatchMode):
    """A part of a record: a graph of operators, and the memory that it uses.

    Attributes:
        inputs: the tensors from outside, in the order in which they were met.
    """

    def __init__(self, draws: _Draws) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self._draws = draws
        self._graph, self._top = fx.Graph(), None
        self._nodes: dict[int, fx.Node] = {}
        self._noted: list[Tensor] = []  # keeps the tensors alive, as their ids are keys
        self._outside: set[int] = set()  # memory, by its address, that is not made here
        self._before: dict[int, tuple[Memory, Memory]] = {}  # what is written to, and its copy
        self._owners: dict[int, Tensor] = {}  # memory that was made here, and its first tensor
        self._function: Callable[[], Sequence[Tensor]] | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if torch_compat.is_of_profiler(func):
            return func(*args, **kwargs)
        if is_foreach_norm(func):  # Inductor fuses norms that are taken one by one
            with self:
                norm = functools.partial(torch.linalg.vector_norm, **kwargs)  # type: ignore[arg-type]
                return [norm(t, *args[1:]) for t in cast(list[Tensor], args[0])]
        _check_operator(func, args, kwargs)
        given = map_aggregate((args, kwargs), self._node_or_value)  # type: ignore[type-var]
        if writes(func):
            self._keep_written(args, kwargs)
        if draws(func):
            made = self._draws.made_by(lambda: func(*args, **kwargs))
        else:
            made = func(*args, **kwargs)
        # A constant, such as torch.tensor(0.0), may be changed in place.
        target = torch.clone if begins_constant(func) else func
        node = self._graph.call_function(target, *given)
        self._note_made(made, node)
        return made

    def _node_or_value(self, value: Argument) -> Argument:
        if not isinstance(value, Tensor):
            return value
        node = self._nodes.get(id(value))
        if node is None:
            node = self._nodes[id(value)] = self._new_input(value)
        return node

    def _new_input(self, tensor: Tensor) -> fx.Node:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__ if tensor.layout is torch.strided else tensor.layout
            raise RuntimeError(f"a tensor is not a plain dense one ({kind})")
        self._noted.append(tensor)
        self._outside.add(tensor.untyped_storage().data_ptr())
        self.inputs.append(tensor)
        with self._graph.inserting_after(self._top):
            self._top = self._graph.placeholder(f"input_{len(self.inputs)}")
        return self._top

    def _keep_written(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        for tensor in _tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in self._outside and address not in self._before:
                self._before[address] = storage, storage.clone()

    def _note_made(self, made: object, node: fx.Node) -> None:
        if isinstance(made, Tensor):
            self._nodes[id(made)] = node
            self._noted.append(made)
            address = made.untyped_storage().data_ptr()
            if address not in self._outside:
                self._owners.setdefault(address, made)
        elif isinstance(made, list | tuple):
            for i, one in enumerate(made):
                if isinstance(one, Tensor):
                    self._note_made(one, self._graph.call_function(operator.getitem, (node, i)))

    def put_back(self) -> None:
        """Restore what was written to."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def close(self) -> None:
        """End the record: what of it is still used elsewhere is its output."""
        owned = {address: owner.detach() for address, owner in self._owners.items()}
        nodes = {address: self._nodes[id(owner)] for address, owner in self._owners.items()}
        noted = [(weakref.ref(t), t.untyped_storage().data_ptr()) for t in self._noted]
        inside = {id(t) for t in self.inputs}
        noted = [(ref, address) for ref, address in noted if id(ref()) not in inside]
        self._noted, self._owners, self._nodes = [], {}, {}
        alive = {address for ref, address in noted if ref() is not None} & owned.keys()
        kept = [address for address in owned if address in alive]
        self._graph.output(tuple(nodes[address] for address in kept))
        self.results = [owned[address] for address in kept]

    def compile_by(self, backend: Backend) -> None:
        """Compile what was recorded."""
        module = fx.GraphModule(torch.nn.Module(), self._graph)
        inputs = self.inputs
        with torch.no_grad():
            compiled = backend(module, [*inputs])
        self._function = lambda: compiled(*inputs)
        self._graph = fx.Graph()

    def __call__(self) -> None:
        """Run the compiled function."""
        assert self._function is not None
        with torch.no_grad():
            copy_all(self.results, [*self._function()])


def _tensors_in(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, Mapping):
        yield from _tensors_in([*values.values()])


def _check_operator(func: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise if an operator cannot be a part of a graph."""
    if returns_values(func):
        raise RuntimeError(_READ)
    if shapes_by_values(func, args):
        raise RuntimeError(f"the shape of what {func} returns depends on values")
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError("random numbers are drawn from a generator of their own")


class OperatorRecorder(Recorder):
    """Records the operators of updates, on any device.

    Args:
        device: where the state is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(
        self, update: Callable[[Callable[[], None]], T]
    ) -> tuple[list[Callable[[], None]], T]:
        parts: list[_Part] = []
        draws = _Draws(self._device)
        others = [] if self._device.type == "cpu" else [self._device]
        kind = self._device.type if others else "cuda"
        with (
            torch.random.fork_rng(others, device_type=kind),
            contextlib.ExitStack() as recording,
        ):

            def enter() -> None:
                recording.enter_context(parts[-1])
                recording.enter_context(_NoHostReads())

            def begin() -> None:
                recording.close()
                parts.append(_Part(draws))
                enter()

            def note(module: fx.GraphModule, _: object) -> Callable[..., object]:
                def run(*args: object) -> object:
                    with parts[-1]:
                        return module.forward(*args)

                return run

            def apply(optimizer: Optimizer) -> None:
                __tracebackhide__ = True
                step = bare_step(optimizer)
                recording.close()  # torch.compile leaves code alone whose operators are watched
                with torch.no_grad():
                    torch.compile(step, backend=note, fullgraph=True, dynamic=False)(optimizer)
                enter()

            try:
                begin()
                with host().replaced(apply=apply):
                    result = update(begin)
                recording.close()
                draws.check()
            finally:
                recording.close()
                for part in reversed(parts):
                    part.put_back()
        for part in parts:
            part.close()
        return [*parts], result


# --- the step

LIMIT = 8  # kinds of batches that are compiled, and changes in a row, as torch.compile has it
FEW = 10  # updates between two changes that are in a row


class WholeStep(GraphedStep):
    """A step that compiles its updates as a whole: one function for each kind of batch.

    Which updates are not compiled depends on the state and the batch alone, so that a run that is
    resumed computes the same numbers: the first one, and each that creates something in the state
    of an optimizer, runs eagerly. What cannot be captured runs by another step.

    Args:
        step: the inner step.
        apart: the step for what cannot be captured.
        backend: compiles what was recorded.
        strict: whether to raise instead of running ``apart``.
    """

    name = "compiled(update=True)"

    def __init__(self, step: Step, apart: Step, backend: Backend, strict: bool) -> None:
        super().__init__(step, 0, LIMIT, OperatorRecorder)
        self._apart, self._backend, self._strict = apart, backend, strict
        self._refused: set[Hashable] = set()
        self._warned = self._changes = False
        self._changed_at = self._in_a_row = 0

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if not state.step:
            return self.step(state, batch)
        tensors: list[Tensor] = []
        key: Hashable = None
        try:
            key = signature(batch, tensors)
            if key in self._refused or None in self._refused:
                return self._apart(state, batch)
            graph = self._find(key, state)
            if graph is None:
                graph = self._compile(key, state, batch, tensors)
            if graph is None:  # what this update creates is there from now on
                return self.step(state, batch)
        except CaptureError as error:
            self._refuse(key, error)
            return self._apart(state, batch)
        self.graphs[key] = graph
        out = graph(state, tensors)
        return Ownership.advance(state, applied=out.skip is None), out

    def _prepare(self, state: TrainState) -> list[OriginalSettings]:
        for optimizer in optimizers(state).values():
            read_from_tensors(optimizer)
        return []

    def _reset(self, state: TrainState, cause: str) -> None:
        if self.guards:
            self._count_change(state, f"{cause} keeps changing")
        super()._reset(state, cause)

    def _count_change(self, state: TrainState, message: str) -> None:
        few = state.step - self._changed_at < FEW
        self._in_a_row, self._changed_at = self._in_a_row * few + 1, state.step
        if self._in_a_row > LIMIT:
            self._changes = True
            raise CaptureError(message)

    def _compile(
        self, key: Hashable, state: TrainState, batch: Batch, tensors: list[Tensor]
    ) -> Graph | None:
        """Return the graph of an update, or None if it creates something."""
        __tracebackhide__ = True
        if len(self.graphs) == LIMIT:
            raise CaptureError(f"there are more than {LIMIT} kinds of batches. Pad them to a few")
        guards = self.guards
        try:
            graph = self._capture(state, batch, tensors)
            for part in graph.parts:
                if isinstance(part, _Part):
                    part.compile_by(self._backend)
        except CreatedError as error:
            self._count_change(state, str(error))
            return None
        except CaptureError:
            self.guards = guards  # of the other kinds of batches
            if guards is not None:
                guards.snapshot()
            raise
        except Exception as error:
            raise explain(error) from error
        return graph

    def _refuse(self, key: Hashable, error: CaptureError) -> None:
        """Let a kind of batch run apart from now on, and say so once."""
        if self._strict:
            error.args = (f"{error}. {_ADVICE}",)
            raise error
        self._refused.add(None if self._changes else key)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name} compiles the loss function and the optimizers apart: {error}",
                stacklevel=2,
            )
