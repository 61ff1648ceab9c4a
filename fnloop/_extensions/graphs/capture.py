"""Capture whole updates as CUDA graphs, and replay them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._core.state import TrainState
from fnloop._core.types import Output, Step
from fnloop._extensions.graphs.guards import (
    CaptureError,
    GuardSet,
    NoKernels,
    TracerProxy,
    TrackedSlots,
    check_host_generators,
    check_host_state,
    check_output,
    explain,
    host_generators,
    host_state,
    identity_of,
    make_rollback,
)
from fnloop._extensions.graphs.torch_compat import (
    clear_cublas_workspaces,
    silence_capturable_warning,
)
from fnloop.extend import (
    Batch,
    Ownership,
    Setting,
    checks,
    containers,
    host,
    optimizers,
    torch_compat,
    wants_closure,
)

Group = dict[str, Any]  # a parameter group of an optimizer
Judge = Callable[[TrainState, bool], str | None]  # as decide takes it
log = logging.getLogger("fnloop")

# A graph is the device's work of one update, recorded once and started as a whole from then on. No
# Python runs inside it. What changes with every update is copied into tensors that stay in place:
# the batch, the learning rate. Results are copied out, because the next replay overwrites them.
# Randomness needs nothing. A replay draws from the device's generator as an eager update would: it
# reads the generator's seed and offset, and advances the offset by what the graph draws (Note [CUDA
# Graph-safe RNG states] in ATen/cuda/CUDAGeneratorImpl.h). So the fold positions the generator
# before every update, as it does without graphs.  Where the host has to decide (an fp16 overflow),
# the graph breaks: one part is replayed, the host decides, and the next part is replayed, or the
# update is skipped.

EAGER_IN_A_ROW = 100  # updates without a replay after which there is a warning
EAGER_KINDS = 1000  # kinds of batches to count eager updates of
_TWICE = (
    "the host decides more than once within the update, and it does not end where the first "
    "decision leaves it out. List amp and accumulate before middleware that sees gradients, and "
    "run the step inside once; or leave cuda_graph out"
)


# --- outputs


Maker = Callable[[Iterator[Tensor]], Any]


def _maker(value: Any, results: list[Tensor]) -> Maker:
    """Return what makes a value again of other tensors, in the order of its own.

    Args:
        value: a metric, or a part of one.
        results: its tensors are appended to it.
    """

    def of_leaf(leaf: Any) -> Maker:
        if isinstance(leaf, Tensor):
            results.append(leaf.detach())
            return next
        kind = type(leaf)
        if attrs.has(kind):
            fields = zip(attrs.fields(kind), attrs.astuple(leaf, recurse=False), strict=True)
            made = {field.alias: _maker(held, results) for field, held in fields}
            return lambda others: kind(**{name: make(others) for name, make in made.items()})
        if checks.has_methods(leaf, "combine"):
            return lambda _: copy.deepcopy(leaf)
        return lambda _: leaf

    if containers.parts_of(value) is None:
        return of_leaf(value)
    makers = containers.map_leaves(value, of_leaf)
    return lambda others: containers.map_leaves(makers, lambda make: make(others))


def _copier(out: Output) -> Callable[[], Output]:
    """Return what copies an output of a graph: the tensors in it, which each replay overwrites.

    Those in ``aux`` are not copied.
    """
    results: list[Tensor] = []
    loss, weight = _maker(out.loss, results), _maker(out.weight, results)
    metrics = {name: _maker(metric, results) for name, metric in out.metrics.items()}

    def copied() -> Output:
        if len(results) == 1:  # the loss: nearly always
            copies = [results[0].clone()]
        else:
            copies = [torch.empty_like(t) for t in results]
            copy_all(copies, results)
        others = iter(copies)
        made = loss(others), weight(others)
        return Output(*made, out.aux, {name: make(others) for name, make in metrics.items()})

    return copied


# --- graphs


class GraphBreak(NamedTuple):
    """Where the host decides whether a captured update continues.

    Args:
        out: what has been computed at this point.
        flag: what the host decides by, on the device.
        judge: ``(state, flag) -> why the update is to be skipped, or None``.
        put_back: functions that undo what the graph has changed, if it is.
    """

    out: Output
    flag: Tensor
    judge: Judge
    put_back: Sequence[Callable[[], object]]


def _splitting(cuts: list[GraphBreak], split: Callable[[], None]) -> AbstractContextManager[None]:
    """Split the record wherever the host is asked, and let the update be applied.

    Args:
        cuts: a list to which each split is added.
        split: what splits the record.
    """

    def ask(state: TrainState, out: Output, flag: Tensor, judge: Judge) -> None:
        attempt = host().attempt
        cuts.append(GraphBreak(out, flag, judge, attempt.put_back if attempt else ()))
        split()

    return host().replaced(ask=ask)


@contextlib.contextmanager
def _skipping(before: int) -> Iterator[None]:
    """Skip the update where the host is asked, and forbid device work from there on.

    Args:
        before: how often it is asked before that.
    """
    asked = itertools.count()
    with contextlib.ExitStack() as rest:

        def ask(state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str | None:
            if next(asked) < before:
                return None
            rest.enter_context(NoKernels())
            return "left out"

        with host().replaced(ask=ask):
            yield


class Graph(NamedTuple):
    """A captured update.

    Args:
        parts: functions that replay it, in order.
        breaks: what the host decides after each part but the last, and what copies that output.
        inputs: the tensors of the batch that it reads.
        output: copies the output at its end.
        slots: the slots that it uses: name to value, with the identities of what the slot holds.
    """

    parts: list[Callable[[], None]]
    breaks: list[tuple[GraphBreak, Callable[[], Output]]]
    inputs: list[Tensor]
    output: Callable[[], Output]
    slots: Mapping[str, tuple[object, list[int]]]

    def __call__(self, state: TrainState, tensors: list[Tensor]) -> Output:
        """Replay the update on the tensors of a batch, and return a copy of its output."""
        if any(t.requires_grad for t in tensors):
            tensors = [t.detach() for t in tensors]
        copy_all(self.inputs, tensors)
        *first, last = self.parts
        for replay, (at, output) in zip(first, self.breaks, strict=True):
            replay()
            # The host read of an eager update: see decide.
            skip = at.judge(state, bool(at.flag))
            if skip is not None:
                for each in at.put_back:
                    each()
                return attrs.evolve(output(), skip=skip)
        Ownership.give_up(state)  # the last part changes the parameters
        last()
        return self.output()

    def fits(self, state: TrainState) -> bool:
        """Return whether the slots that it uses hold the same objects as during the capture."""
        return all(
            state.slots.get(name) is value and identity_of(value) == held
            for name, (value, held) in self.slots.items()
        )


# --- the step


class GraphedStep:
    """A step that captures its updates: for each kind of batch ``warmup`` eager ones, then replays.

    It holds the graphs of one model and one optimizer at a time. They are not part of the state:
    without them the same numbers are computed.

    Args:
        step: the inner step.
        warmup: eager updates before a capture.
        limit: how many graphs to hold; the least recently used one is dropped.
        recorder: ``device -> Recorder``.
    """

    name = "cuda_graph"  # in messages

    def __init__(
        self, step: Step, warmup: int, limit: int, recorder: Callable[[torch.device], Recorder]
    ) -> None:
        self.step, self.warmup, self.limit, self.recorder_on = step, warmup, limit, recorder
        self.graphs: dict[Hashable, Graph] = {}  # the most recently used one is the last
        self.eager_updates: Counter[Hashable] = Counter()  # by kind of batch
        self.guards: GuardSet | None = None
        self.original: list[OriginalSettings] = []
        self.eager_in_a_row, self.cause = 0, "the shapes of the batches"

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        tensors: list[Tensor] = []
        key = signature(batch, tensors)
        graph = self._find(key, state)
        if graph is None and self.eager_updates[key] < self.warmup:
            return self._run_eagerly(key, state, batch)
        if graph is None:
            graph = self._capture(state, batch, tensors)
        else:
            self.eager_in_a_row = 0
        self.graphs[key] = graph
        if len(self.graphs) > self.limit:
            oldest = next(iter(self.graphs))
            del self.graphs[oldest], self.eager_updates[oldest]
        out = graph(state, tensors)
        return Ownership.advance(state, applied=out.skip is None), out

    def _find(self, key: Hashable, state: TrainState) -> Graph | None:
        """Take out the graph of a kind of batch. If it is for another state, drop all."""
        violated = self.guards.violated(state) if self.guards else "nothing"
        if violated:
            self._reset(state, violated)
        graph = self.graphs.pop(key, None)
        if graph is not None and not graph.fits(state):
            self._reset(state, "a slot that the update reads")
            graph = None
        return graph

    def _reset(self, state: TrainState, cause: str) -> None:
        """Drop all graphs, and prepare to capture the updates of this state."""
        if self.guards:
            self.cause = cause
        self.guards = None
        self.graphs.clear()
        self.eager_updates.clear()
        self.recorder = self.recorder_on(state.backend.device)
        _check_capturable(state, self.name)
        original = self._prepare(state)
        if self.original and self.original[0].group is original[0].group:
            # It was made capturable here before; groups may have been added since.
            known = {id(one.group) for one in self.original}
            original = [*self.original, *(o for o in original if id(o.group) not in known)]
        self.original = original
        self.guards = GuardSet(state)

    def _prepare(self, state: TrainState) -> list[OriginalSettings]:
        return make_capturable(optimizers(state).values(), state.backend.device)

    def _run_eagerly(
        self, key: Hashable, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        assert self.guards is not None
        if len(self.eager_updates) > EAGER_KINDS:  # nearly every batch is a kind of its own
            self.eager_updates.clear()
        self.eager_in_a_row += 1
        if self.eager_in_a_row == EAGER_IN_A_ROW:
            log.warning(
                "cuda_graph: %d consecutive updates ran eagerly because %s keeps changing. A "
                "graph is valid for one kind of batch and one set of settings, and is captured "
                "after %d updates of that kind. Pad batches to a few lengths; only the learning "
                "rate can be scheduled. Otherwise leave cuda_graph out: the results are the same",
                *(self.eager_in_a_row, self.cause, self.warmup),
            )
        try:
            new, out = self.recorder.run(lambda: self.step(state, batch))
        except Exception:
            self.release()  # the capturable settings may be the cause
            raise
        self.eager_updates[key] += out.skip is None  # a skipped update shows nothing
        self.guards.snapshot()  # the first update creates the optimizer's state
        return new, out

    def _capture(self, state: TrainState, batch: Batch, tensors: list[Tensor]) -> Graph:
        """Capture an update. If that fails, the state is restored."""
        __tracebackhide__ = True
        inputs, slots = static_inputs(tensors), TrackedSlots(state.slots)
        static, device = rebuild(batch, iter(inputs)), state.backend.device
        inside = _tracing_copy(state, slots)
        before, draws, roll_back = host_state(state), host_generators(device), make_rollback(state)
        cuts: list[GraphBreak] = []

        def update(begin: Callable[[], None]) -> tuple[TrainState, Output]:
            with _splitting(cuts, begin):
                return self.step(inside, static)

        def skipped(at: int, begin: Callable[[], None]) -> None:
            again = _tracing_copy(state, TrackedSlots(state.slots))
            with _skipping(at):
                self.step(again, static)

        try:
            parts, (new, out) = self.recorder.record(update)
            check_output(state, new, out)
            check_host_state(before, host_state(state))
            check_host_generators(draws, host_generators(device))
            for at in range(len(cuts)):
                try:
                    self.recorder.record(functools.partial(skipped, at))
                except CaptureError as error:
                    if len(cuts) > 1:
                        raise CaptureError(_TWICE) from error
                    raise
                check_host_state(before, host_state(state))  # nor may the host do anything there
        except BaseException as error:
            self.guards = None  # the recorder may be unable to record again
            roll_back()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            raise explain(error) from error
        breaks = [(cut, _copier(cut.out)) for cut in cuts]
        inputs = [t.detach() for t in inputs]  # the loss function may have asked for a gradient
        used = {name: state.slots[name] for name in slots.used if name in state.slots}
        held = {name: (value, identity_of(value)) for name, value in used.items()}
        return Graph(parts, breaks, inputs, _copier(out), held)

    def release(self) -> None:
        """Drop the graphs, and restore the optimizers' settings."""
        undo_capturable(self.original)
        self.graphs.clear()
        self.guards, self.original = None, []


_SAME = {  # fields of a state that are the same in every update of a graph
    *("model", "optimizer", "seed", "backend", "run_id", "saved_on", "phases", "parameters")
}


def _tracing_copy(state: TrainState, slots: TrackedSlots) -> TrainState:
    """Return a state of the same handles with an ownership of its own, to record an update with.

    Args:
        state: the state.
        slots: its slots. What else may change from update to update has a placeholder.
    """
    changing: dict[str, Any] = {
        field.alias: TracerProxy(field.alias)
        for field in attrs.fields(TrainState)
        if field.alias not in _SAME
    }
    changing["counted"] = TracerProxy("items")
    changing["updates"] = {name: TracerProxy(f"updates[{name!r}]") for name in state.updates}
    given = {**changing, "slots": slots, "ownership": Ownership(), "generation": 0}
    return attrs.evolve(state, **given)


def _check_capturable(state: TrainState, name: str) -> None:
    """Raise if no update of this state can be captured by a middleware of this name.

    Raises:
        CaptureError: there are several processes or devices, the optimizer evaluates the loss
            itself, a gradient is sparse, or the state was made with ``exact=True``.
    """
    if state.backend.exact:
        raise CaptureError(
            f"{name} cannot capture an update of TrainState.create(..., exact=True), whose host "
            "positions the random draws of each batch: leave one of them out"
        )
    if state.backend.world_size > 1:
        raise CaptureError(
            f"{name} captures the updates of a single process; there are "
            f"{state.backend.world_size}. Leave {name} out"
        )
    if wants_closure(type(state.optimizer)):
        raise CaptureError(
            f"{type(state.optimizer).__name__} decides on the host how often it evaluates the "
            "loss: use another optimizer"
        )
    devices = {str(t.device) for t in (*state.model.parameters(), *state.model.buffers())}
    if len(devices) > 1:
        raise CaptureError(
            f"the model is on {' and '.join(sorted(devices))}, but a graph is on one device: move "
            "the model to one"
        )
    if any(getattr(module, "sparse", False) is True for module in state.model.modules()):
        raise CaptureError(
            "the gradient of an embedding is sparse, and the host has to know its size: leave out "
            "sparse=True"
        )


# --------------------------------------------------------------------------------------------------
# Record the device's work of an update, and replay it. The only module that knows CUDA graphs.

T = TypeVar("T")
# Graphs whose capture failed: torch's allocator keeps a pointer to each of them.
_failed: list[torch.cuda.CUDAGraph] = []


class Recorder:
    """Runs an update where it can be captured, and captures it."""

    def run(self, update: Callable[[], T]) -> T:
        """Run an update eagerly, and return its result."""
        return update()

    def record(
        self, update: Callable[[Callable[[], None]], T]
    ) -> tuple[list[Callable[[], None]], T]:
        """Record an update without any effect on the device.

        Args:
            update: it is given a function that ends the current part of the record and begins
                another one.

        Returns:
            Functions that replay the parts in order, and the result of the update.
        """
        raise NotImplementedError


class CudaRecorder(Recorder):
    """Records CUDA graphs, which share memory: what is used between two replays is copied.

    A graph also uses a workspace of cuBLAS. torch keeps one for each stream, and others free it
    (Lightning does at the end of a run). So every graph gets one of its own, in its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = _stream(device), torch.cuda.graph_pool_handle()

    def run(self, update: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return update()
        finally:
            current.wait_stream(self.stream)

    def record(
        self, update: Callable[[Callable[[], None]], T]
    ) -> tuple[list[Callable[[], None]], T]:
        graphs: list[torch.cuda.CUDAGraph] = []
        failed = None
        gc.collect()  # backward would wait for the stream of an autograd graph that is still there
        try:
            # A capture that fails leaves its stream the current one, hence the outer context.
            with torch.cuda.stream(self.stream), contextlib.ExitStack() as capture:

                def begin_part() -> None:
                    capture.close()
                    clear_cublas_workspaces()
                    graphs.append(torch.cuda.CUDAGraph())
                    into: dict[str, Any] = {
                        "pool": self.pool,
                        "stream": self.stream,
                        # Other threads may use CUDA: they pin batches and copy checkpoints.
                        "capture_error_mode": "thread_local",
                    }
                    capture.enter_context(torch.cuda.graph(graphs[-1], **into))

                begin_part()
                try:
                    result = update(begin_part)
                except BaseException as error:
                    failed = error
                    raise
            return [graph.replay for graph in graphs], result
        except BaseException as error:
            _failed.extend(graphs)
            self._end_drawing()
            raise failed or error from None  # the cause, not that the capture was cut short
        finally:
            clear_cublas_workspaces()

    def _end_drawing(self) -> None:
        """Let the device's generator draw again after a capture that failed.

        It was told that a capture had begun, and only a capture that succeeds tells it of the end.
        """
        device = self.stream.device
        # If this fails too, the device is lost, and the error that is raised says so.
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self.stream):
            number = torch.zeros((), device=device)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                number += 1


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all recorders: memory that a stream has used is cached for it alone."""
    return torch.cuda.Stream(device)


def recorder_on(device: torch.device) -> Recorder:
    """Return the recorder of a device.

    Raises:
        CaptureError: the device has no graphs.
    """
    if device.type != "cuda":
        raise CaptureError(
            f"cuda_graph needs the model on a CUDA device; it is on {device}. Move it there"
        )
    return CudaRecorder(device)


# --------------------------------------------------------------------------------------------------
# Batches as inputs of a graph: which graph is theirs, and the tensors that it reads.


def signature(batch: Batch, tensors: list[Tensor]) -> Hashable:
    """Return the key of a batch's graph: its structure, shapes and dtypes.

    Args:
        batch: a batch.
        tensors: the tensors of the batch are appended to it.

    Raises:
        CaptureError: the batch contains something that is neither a tensor nor plain data.
    """
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype
    parts = containers.parts_of(batch, containers.IN_BATCHES)
    if parts is not None:
        return type(batch), *[(key, signature(part, tensors)) for key, part in parts]
    if batch is None or isinstance(batch, bool | int | float | str):
        return type(batch), batch
    raise CaptureError(
        "a batch to capture consists of tensors in tuples, lists and dicts; this one contains a "
        f"{type(batch).__name__}, which cannot be copied into a graph. Let the loader's collate_fn "
        "return a dict of tensors"
    )


def explain_uncapturable(copied: TrainState, batch: Batch) -> list[str]:
    """Return why an update could not be captured, apart from what it reads to the host.

    Args:
        copied: a copy of the state, whose optimizers are changed.
        batch: a batch.
    """
    try:
        signature(batch, [])
        make_capturable([*optimizers(copied).values()], copied.backend.device)
    except CaptureError as error:
        return [str(error)]
    return []


def rebuild(batch: Batch, tensors: Iterator[Tensor]) -> Batch:
    """Return a copy of a batch with these tensors in place of its own."""
    return containers.map_leaves(
        batch, lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf
    )


def static_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a graph reads in place of these."""
    for t in tensors:
        if t.layout is not torch.strided:
            raise CaptureError(
                "a batch to capture consists of dense tensors; one of this batch has layout "
                f"{t.layout}"
            )
    inputs = [torch.empty_like(t) for t in tensors]
    copy_all(inputs, tensors)
    return inputs


def copy_all(to: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into others, all at once."""
    if tensors:
        torch_compat.foreach_copy_(to, tensors, non_blocking=True)


# --------------------------------------------------------------------------------------------------
# Make optimizers capturable: they keep their learning rates and their counts on the device.


class OriginalSettings(NamedTuple):
    """Settings of a parameter group as the user gave them."""

    optimizer: Optimizer
    group: Group
    settings: Group


def make_capturable(
    optimizers: Collection[Optimizer], device: torch.device
) -> list[OriginalSettings]:
    """Move what optimizers can keep on the device there: the learning rate, and counts.

    SGD and Adagrad have no setting ``capturable``. They read a learning rate on the device only in
    their fused form.

    Returns:
        What :func:`undo_capturable` needs.

    Raises:
        CaptureError: one was told not to be fused, or cannot be captured at all. Then nothing has
            been changed.
    """
    for optimizer in optimizers:
        _check_fused(optimizer)
    every = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    original = []
    for optimizer, group in every:
        kept = {k: group[k] for k in ("lr", "capturable", "fused") if k in group}
        original.append(OriginalSettings(optimizer, group, kept))
        _move_rate(group, [other for _, other in every if other is not group], device)
        if "capturable" in group:
            group["capturable"] = True
        elif "fused" in group:
            group["fused"] = True
    for optimizer in optimizers:
        _move_counts(optimizer, optimizer.state, device)
        silence_capturable_warning(optimizer)  # it runs eagerly during the warm-up
    return original


def read_from_tensors(optimizer: Optimizer) -> None:
    """Let an optimizer read its learning rates from tensors, so that compiled code fits all values.

    On a GPU it is also made capturable if it can be: compiled code then has its counts there.
    """
    groups = optimizer.param_groups
    for group in groups:
        if type(group.get("lr")) not in (int, float) or not group["params"]:
            continue  # nearly always: it was moved in an earlier update
        device = group["params"][0].device
        _move_rate(group, (), device)
        if device.type != "cpu":
            if "capturable" in group:
                group["capturable"] = True
            _move_counts(optimizer, group["params"], device)
            silence_capturable_warning(optimizer)  # it also runs eagerly


def _move_rate(group: Group, others: Collection[Group], device: torch.device) -> None:
    """Move the learning rate of a group into a tensor of its own, since each is filled alone.

    A GPU reads it in single precision.
    """
    if "lr" not in group:
        return
    given = group["lr"]
    single = torch.float64 if device.type == "cpu" else torch.float32
    dtype = None if isinstance(given, Tensor) else single
    rate = torch.as_tensor(given, dtype=dtype, device=device)
    shared = any(rate is other.get("lr") for other in others)
    Setting(group, "lr").exchange(rate.clone() if shared else rate)


def _move_counts(optimizer: Optimizer, keys: Iterable[Tensor], device: torch.device) -> None:
    """Move the scalars in the state that an optimizer keeps for these parameters."""
    for values in [optimizer.state[key] for key in keys if key in optimizer.state]:
        if isinstance(values, dict):
            counts = {k: v for k, v in values.items() if isinstance(v, Tensor) and not v.ndim}
            values.update({k: v.to(device) for k, v in counts.items()})


def _check_fused(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        ours = type(optimizer).__module__.startswith("torch.optim")
        if ours and "capturable" not in group and "fused" not in group:
            raise CaptureError(f"{name} reads numbers to the host in every update")
        fused = group.get("fused", True)
        if fused is None:
            fused = not group.get("foreach")
        if "capturable" not in group and fused is not True:
            raise CaptureError(
                f"{name} reads its learning rate to the host: write {name}(..., fused=True)"
            )


def undo_capturable(original: list[OriginalSettings]) -> None:
    """Restore the settings of optimizers, except that they keep the value of a learning rate."""
    for optimizer, group, settings in original:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            if not isinstance(settings["lr"], Tensor):
                Setting(group, "lr").exchange(Setting.as_number(rate))
            settings = {**settings, "lr": group["lr"]}
        group.update(settings)
        if not (settings.get("capturable", True) or settings.get("fused")):
            for p in group["params"]:
                values = optimizer.state.get(p, {})
                values.update({k: v.cpu() for k, v in values.items() if k == "step"})
