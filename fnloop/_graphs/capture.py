"""Updates captured as graphs: what is recorded, how it is found again, what is filled in, and what is copied out.

A graph is the device's work of one update, recorded once and started as a whole from then on: no Python runs inside it. What
changes with every update goes in through tensors that stay where they are: the batch, the learning rate. What comes out is
copied, as the next replay overwrites it. What may not change is the subject of ``_guard``.

Randomness needs nothing: a replay draws from the device's generator as an eager update in its place would. It fills the seed
and the offset that the generator has at that moment into the graph, and moves the offset on by what the graph draws (Note
[CUDA Graph-safe RNG states] in ATen/cuda/CUDAGeneratorImpl.h). So the fold positions it before every update, as ever.

Where the host has to decide (an fp16 overflow), the record is cut: it plays up to there, the host reads and decides, and it
plays on, or doesn't.

A :class:`Recorder` does the recording. That is all that knows CUDA here; the tests have one for the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._core.state import TrainState, advance, give_up_ownership, tracing_copy
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._display.log import log
from fnloop._graphs.guards import (
    CaptureError,
    GuardSet,
    NoKernels,
    OriginalSettings,
    Slots,
    TracerProxy,
    check_draws,
    check_facts,
    check_reply,
    explain,
    host_draws,
    host_state,
    identity_of,
    make_capturable,
    make_rollback,
    undo_capturable,
)
from fnloop._step.host import Judge, replace_host
from fnloop._step.update import wants_closure

__all__ = ["Graph", "GraphedStep", "Recorder", "rebuilt", "recorder_on", "signature"]

_TWICE = (
    'amp("fp16") decides more than once within the update, and a graph is cut into two parts only. List amp and accumulate '
    "before what sees gradients, and run the step inside once; or leave cuda_graph out"
)
EAGER_IN_A_ROW = 100  # updates without a replay, after which there is a warning
_failed: list[
    Any
] = []  # graphs whose capture was cut short: torch's allocator keeps a pointer to them


# --- recording


class Recorder(Protocol):
    """What runs an update where it can be captured, and captures it."""

    def run(self, update: Callable[[], Any], /) -> Any:
        """Run an update eagerly, and return what it returns."""
        ...

    def record(
        self, update: Callable[[Callable[[], None]], Any], /
    ) -> tuple[list[Callable[[], None]], Any]:
        """Call the function without any effect on the device; return what has it, again and again, and its reply.

        The function is given another, which cuts the record where it is called: there is one more part to play then.
        """
        ...


class _OnCuda:
    """CUDA graphs that share their memory: whatever is in use between two replays is outside of it, or copied."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = _stream(device), torch.cuda.graph_pool_handle()

    def run(self, update: Callable[[], Any]) -> Any:
        here = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(here)
        try:
            with torch.cuda.stream(self.stream):
                return update()
        finally:
            here.wait_stream(self.stream)

    def record(
        self, update: Callable[[Callable[[], None]], Any]
    ) -> tuple[list[Callable[[], None]], Any]:
        graphs: list[torch.cuda.CUDAGraph] = []
        failed = None
        try:
            # A recording, where it fails, leaves its stream the current one.
            with torch.cuda.stream(self.stream), contextlib.ExitStack() as recording:

                def begin() -> None:
                    recording.close()
                    graphs.append(torch.cuda.CUDAGraph())
                    # Other threads may go on: workers' batches are pinned, checkpoints copied.
                    into = {
                        "pool": self.pool,
                        "stream": self.stream,
                        "capture_error_mode": "thread_local",
                    }
                    recording.enter_context(torch.cuda.graph(graphs[-1], **into))

                begin()
                try:
                    reply = update(begin)
                except BaseException as error:
                    failed = error
                    raise
            return [graph.replay for graph in graphs], reply
        except BaseException as error:
            _failed.extend(graphs)
            raise failed or error from None  # not that the capture was cut short, but by what


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(
        device
    )  # one for all: memory that a stream has had is cached for it alone


def recorder_on(device: torch.device) -> Recorder:
    """Return the recorder of a device.

    Raises:
        CaptureError: it has no graphs.
    """
    if device.type != "cuda":
        raise CaptureError(
            f"cuda_graph needs the model on a CUDA device; it is on {device}. Move it there"
        )
    return _OnCuda(device)


# --- batches


def signature(batch: Batch, tensors: list[Tensor]) -> Any:
    """Return what a graph is found by: structure, shapes and dtypes; the batch's tensors go into ``tensors``.

    Raises:
        CaptureError: there is something in the batch that is neither a tensor nor plain data.
    """
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype
    if isinstance(batch, list | tuple):
        return type(batch), *[signature(part, tensors) for part in batch]
    if isinstance(batch, dict):
        return type(batch), *[(key, signature(part, tensors)) for key, part in batch.items()]
    if batch is None or isinstance(batch, bool | int | float | str):
        return type(batch), batch
    raise CaptureError(
        f"a batch to capture is made of tensors in tuples, lists and dicts; there is a {type(batch).__name__} in it, which "
        "can't be filled in. Let the loader's collate_fn return a dict of tensors"
    )


def rebuilt(batch: Batch, tensors: Iterator[Tensor]) -> Batch:
    """Return the batch with these tensors in the place of its own."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, dict):
        return copy.copy(batch) | {key: rebuilt(part, tensors) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [rebuilt(part, tensors) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _buffers(tensors: list[Tensor]) -> list[Tensor]:
    for t in tensors:
        if t.layout is not torch.strided:
            raise CaptureError(
                f"a batch to capture is made of dense tensors; there is one of layout {t.layout}"
            )
    return [torch.empty_like(t) for t in tensors]


def _copy(to: list[Tensor], tensors: list[Tensor]) -> None:
    if tensors:
        torch_compat.foreach_copy_(to, tensors, non_blocking=True)


# --- outputs


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a metric with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value)
    if attrs.has(type(value)):
        return type(value)(
            **{f.alias: _mapped(getattr(value, f.name), change) for f in attrs.fields(type(value))}
        )
    return copy.deepcopy(value) if hasattr(value, "combine") else value


def _filled(out: Output, change: Callable[[Tensor], Tensor]) -> Output:
    metrics: dict[str, Metric] = {
        name: _mapped(metric, change) for name, metric in out.metrics.items()
    }
    weight = change(out.weight) if isinstance(out.weight, Tensor) else out.weight
    return Output(change(out.loss), weight, out.aux, metrics)


class CapturedOutput(NamedTuple):
    """What a captured update has found out when it has come to some point.

    Args:
        output: its tensors are overwritten by every replay.
        results: those of them that are copied.
    """

    output: Output
    results: list[Tensor]

    @classmethod
    def of(cls, out: Output) -> CapturedOutput:
        results: list[Tensor] = []
        _filled(out, lambda t: results.append(t.detach()) or t)
        return cls(out, results)

    def kept(self) -> Output:
        """Return a copy."""
        copied = [torch.empty_like(t) for t in self.results]
        _copy(copied, self.results)
        copies = iter(copied)
        return _filled(self.output, lambda _: next(copies))


class GraphBreak(NamedTuple):
    """Where the host decides whether a captured update goes on.

    Args:
        found: what there is at this point.
        flag: what it decides by, on the device.
        judge: ``(state, flag) -> why the update is to be left out, or None``.
    """

    found: CapturedOutput
    flag: Tensor
    judge: Callable[[TrainState, bool], str | None]


class _RecordingHost:
    """Splits the record where the host decides, and lets the update be applied.

    Args:
        decisions: a list to which ``(out, flag, judge)`` is added.
        split: what splits the record.
    """

    def __init__(
        self, decisions: list[tuple[Output, Tensor, Judge]], split: Callable[[], None]
    ) -> None:
        self._decisions, self._split = decisions, split

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge) -> None:
        if self._decisions:
            raise CaptureError(_TWICE)
        self._decisions.append((out, flag, judge))
        self._split()


class _SkippingHost:
    """Skips the update, and forbids device work from there on.

    Args:
        rest: the context of the rest of the update.
    """

    def __init__(self, rest: contextlib.ExitStack) -> None:
        self._rest = rest

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str:
        self._rest.enter_context(NoKernels())
        return "left out"


class Graph(NamedTuple):
    """A captured update.

    Args:
        parts: what to play, one behind the other.
        cut: what the host decides behind the first, if it does.
        inputs: the tensors of the batch that it reads.
        found: what there is at the end.
        slots: the slots that it uses, each with what it holds.
    """

    parts: list[Callable[[], None]]
    cut: GraphBreak | None
    inputs: list[Tensor]
    found: CapturedOutput
    slots: Mapping[str, tuple[Any, list[int]]]

    def __call__(self, state: TrainState, tensors: list[Tensor]) -> Output:
        """Run it on these tensors, and return what is to be kept."""
        with torch.no_grad():  # a loss function may have asked for the gradient of an input
            _copy(self.inputs, tensors)
        *first, last = self.parts
        for play in first:
            play()
        if self.cut is not None:
            skip = self.cut.judge(
                state, bool(self.cut.flag)
            )  # the host read of an eager update: see _steps.decided
            if skip is not None:
                return attrs.evolve(self.cut.found.kept(), skip=skip)
        give_up_ownership(state)  # the last part changes the parameters
        last()
        return self.found.kept()

    def fits(self, state: TrainState) -> bool:
        """Say whether the slots that it uses are where they were."""
        return all(
            state.slots.get(n) is value and identity_of(value) == held
            for n, (value, held) in self.slots.items()
        )


# --- the step


class GraphedStep:
    """A step that captures its updates: ``warmup`` eager ones for each kind of batch, then replays.

    It holds graphs of one model and one optimizer at a time. They are no state: without them the same is computed.

    Args:
        step: the step inside.
        warmup: eager updates before a capture.
        limit: graphs to hold; the one that wasn't used for longest goes.
        recorder: ``device -> Recorder``.
    """

    def __init__(
        self, step: Step, warmup: int, limit: int, recorder: Callable[[torch.device], Recorder]
    ) -> None:
        self.step, self.warmup, self.limit, self.recorder_on = step, warmup, limit, recorder
        self.graphs: dict[Any, Graph] = {}
        self.ran: Counter[Any] = Counter()  # eager updates, by kind of batch
        self.watch: GuardSet | None = None
        self.given: list[OriginalSettings] = []
        self.eager, self.changed = 0, "the shapes of the batches"

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        tensors: list[Tensor] = []
        key = signature(batch, tensors)
        change = self.watch.change(state) if self.watch else "nothing"
        if change:
            self._begin(state, change)
        graph = self.graphs.pop(key, None)
        if graph is not None and not graph.fits(state):
            self._begin(state, "a slot that the update reads")
            graph = None
        if graph is None and self.ran[key] < self.warmup:
            return self._eagerly(key, state, batch)
        if graph is None:
            graph = self._recorded(state, batch, tensors)
        else:
            self.eager = 0
        self.graphs[key] = graph  # the last one is the one used last
        if len(self.graphs) > self.limit:
            oldest = next(iter(self.graphs))
            del self.graphs[oldest], self.ran[oldest]
        out = graph(state, tensors)
        return advance(state, applied=out.skip is None), out

    def _begin(self, state: TrainState, change: str) -> None:
        """Forget all graphs, and look at what there is."""
        if self.watch:
            self.changed = change
        self.watch = None
        self.graphs.clear()
        self.ran.clear()
        device, optimizer = state.backend.device, state.optimizer
        self.recorder = self.recorder_on(device)
        if state.backend.world_size > 1:
            raise CaptureError(
                f"cuda_graph captures the updates of one process; there are {state.backend.world_size}"
            )
        if wants_closure(type(optimizer)):
            name = type(optimizer).__name__
            raise CaptureError(
                f"{name} decides on the host how often it evaluates the loss: take another"
            )
        devices = {str(t.device) for t in (*state.model.parameters(), *state.model.buffers())}
        if len(devices) > 1:
            raise CaptureError(
                f"the model is on {' and '.join(sorted(devices))}: put it on one, as a graph is"
            )
        if any(getattr(module, "sparse", False) is True for module in state.model.modules()):
            raise CaptureError(
                "the gradient of an embedding is sparse, whose size the host has to know: leave out sparse=True"
            )
        given = make_capturable(optimizer, device)
        if (
            not self.given or self.given[0].group is not given[0].group
        ):  # else it was capturable already, by us
            self.given = given
        self.watch = GuardSet(state)

    def _eagerly(self, key: Any, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        assert self.watch is not None
        if len(self.ran) > 1000:  # as many kinds of batches as batches
            self.ran.clear()
        self.eager += 1
        if self.eager == EAGER_IN_A_ROW:
            log.warning(
                "cuda_graph: %d updates in a row ran eagerly: what changes from one to the next is %s. A graph is of one kind "
                "of batch and one set of settings, and is captured when they have come %d times. Pad batches to a few lengths; "
                "only the learning rate can be scheduled; else leave cuda_graph out, to the same result",
                self.eager, self.changed, self.warmup,
            )  # fmt: skip
        try:
            reply = self.recorder.run(lambda: self.step(state, batch))
        except Exception:
            self.release(state)  # it may be what was done to the optimizer that it can't stand
            raise
        self.ran[key] += reply[1].skip is None  # one that is left out shows nothing
        self.watch.take()  # the first update makes the optimizer's state
        return reply

    def _recorded(self, state: TrainState, batch: Batch, tensors: list[Tensor]) -> Graph:
        """Capture an update. Whatever goes wrong, the state is as it was."""
        __tracebackhide__ = True
        inputs = _buffers(tensors)
        _copy(inputs, tensors)
        static, slots, device = (
            rebuilt(batch, iter(inputs)),
            Slots(state.slots),
            state.backend.device,
        )
        inside = tracing_copy(state, slots, TracerProxy)
        before, draws, put_back = host_state(state), host_draws(device), make_rollback(state)
        cuts: list[Any] = []

        def update(begin: Callable[[], None]) -> tuple[TrainState, Output]:
            with replace_host(_RecordingHost(cuts, begin)):
                return self.step(inside, static)

        def left_out(begin: Callable[[], None]) -> None:
            again = tracing_copy(state, Slots(state.slots), TracerProxy)
            with contextlib.ExitStack() as rest, replace_host(_SkippingHost(rest)):
                self.step(again, static)

        try:
            parts, (new, out) = self.recorder.record(update)
            check_reply(state, new, out)
            check_facts(before, host_state(state))
            check_draws(draws, host_draws(device))
            if cuts:
                self.recorder.record(left_out)
                check_facts(before, host_state(state))  # nor may the host do anything there
        except BaseException as error:
            self.watch = None  # the recorder may not be able to record again
            put_back()
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            raise explain(error) from error
        cut = next(
            (GraphBreak(CapturedOutput.of(out), flag, judge) for out, flag, judge in cuts), None
        )
        used = {name: state.slots[name] for name in slots.used if name in state.slots}
        return Graph(
            parts,
            cut,
            inputs,
            CapturedOutput.of(out),
            {name: (value, identity_of(value)) for name, value in used.items()},
        )

    def release(self, state: TrainState) -> None:
        """Drop the graphs, and give the optimizer its settings back."""
        undo_capturable(state.optimizer, self.given)
        self.graphs.clear()
        self.watch, self.given = None, []
