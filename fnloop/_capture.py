"""Updates captured as graphs: what is recorded, how it is found again, what is filled in, and what is refused.

A graph is the device's work of one update, recorded once and started as a whole from then on: no Python runs inside it. So
everything that Python knew while it was recorded is in it for good: addresses, settings, flags, counters. Hence

* what changes with every update goes in through tensors that stay where they are: the batch, the learning rate;
* what comes out is copied, as the next replay overwrites it;
* what a graph takes for granted is looked at before every replay (:class:`Watch`), and a change means new graphs;
* what would change on the host while it is recorded would never change again: that is a :class:`CaptureError`.

Randomness needs nothing: a replay draws from the device's generator as an eager update in its place would. It fills the seed
and the offset that the generator has at that moment into the graph, and moves the offset on by what the graph draws (Note
[CUDA Graph-safe RNG states] in ATen/cuda/CUDAGeneratorImpl.h). So the fold may position it before every update, as ever.

A :class:`Recorder` does the recording. That is all that knows CUDA here; the tests have one for the CPU.
"""

from __future__ import annotations

import copy
import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._pipeline import wants_closure
from fnloop._state import TrainState, advance, fenced
from fnloop._types import Batch, Metric, Output, Step

__all__ = ["CaptureError", "Captured", "Recorder", "make_capturable", "recorder_on", "undo_capturable"]

EAGER_IN_A_ROW = 100  # updates without a replay, after which there is a warning
_log = logging.getLogger("fnloop")
_FALLBACK = "write cuda_graph(fallback=True) to run such a step eagerly, or leave cuda_graph out"


class CaptureError(RuntimeError):
    """An update can't be captured as a CUDA graph; the message says why, and what to do."""


# --- recording


class Recorder(Protocol):
    """What runs an update where it can be captured, and captures it."""

    def run(self, update: Callable[[], Any], /) -> Any:
        """Run an update eagerly, and return what it returns."""
        ...

    def record(self, update: Callable[[], Any], /) -> tuple[Callable[[], None], Any]:
        """Call the function without any effect on the device; return what has it, again and again, and its reply."""
        ...


class _OnCuda:
    """CUDA graphs that share their memory: whatever is in use between two replays is outside of it, or copied."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def run(self, update: Callable[[], Any]) -> Any:
        here = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            reply = update()
        here.wait_stream(self.stream)
        return reply

    def record(self, update: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph, failed = torch.cuda.CUDAGraph(), None
        # Other threads may go on: workers' batches are pinned, checkpoints copied.
        recording = torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(self.stream), recording:  # which, where it fails, leaves its stream the current one
                try:
                    return graph.replay, update()
                except BaseException as error:
                    failed = error
                    raise
        except BaseException as error:
            raise failed or error from None  # not that the capture was cut short, but by what


def recorder_on(device: torch.device) -> Recorder:
    """Return the recorder of a device.

    Raises:
        CaptureError: it has no graphs.
    """
    if device.type != "cuda":
        raise CaptureError(f"cuda_graph needs the model on a CUDA device; it is on {device}. Move it there, or {_FALLBACK}")
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
        f"can't be filled in. Let the loader's collate_fn return a dict of tensors, or {_FALLBACK}"
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
            raise CaptureError(f"a batch to capture is made of dense tensors; there is one of layout {t.layout}: {_FALLBACK}")
    return [torch.empty_like(t) for t in tensors]


def _copy(to: list[Tensor], tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(to, tensors, non_blocking=True)


# --- outputs


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a metric with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value)
    if attrs.has(type(value)):
        return type(value)(**{f.alias: _mapped(getattr(value, f.name), change) for f in attrs.fields(type(value))})
    return copy.deepcopy(value) if hasattr(value, "combine") else value


def _filled(out: Output, change: Callable[[Tensor], Tensor]) -> Output:
    metrics: dict[str, Metric] = {name: _mapped(metric, change) for name, metric in out.metrics.items()}
    weight = change(out.weight) if isinstance(out.weight, Tensor) else out.weight
    return Output(change(out.loss), weight, out.aux, metrics)


class Graph(NamedTuple):
    """A captured update.

    Args:
        replay: runs it.
        inputs: the tensors of the batch that it reads.
        output: what it found out; its tensors are overwritten by every replay.
        results: those of them that are copied.
        slots: the slots that it uses.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    output: Output
    results: list[Tensor]
    slots: Mapping[str, Any]

    def __call__(self, tensors: list[Tensor]) -> Output:
        """Run it on these tensors, and return what is to be kept."""
        _copy(self.inputs, tensors)
        self.replay()
        kept = [torch.empty_like(t) for t in self.results]
        _copy(kept, self.results)
        copies = iter(kept)
        return _filled(self.output, lambda _: next(copies))


# --- optimizers


class _Given(NamedTuple):
    """The settings of a parameter group, as they were given."""

    group: dict[str, Any]
    settings: dict[str, Any]


def make_capturable(optimizer: Optimizer, device: torch.device) -> list[_Given]:
    """Let an optimizer keep on the device what it can: the learning rate, and the counts in its state.

    SGD and Adagrad, which have no setting ``capturable``, read a learning rate on the device in their fused form only.

    Returns:
        What :func:`undo_capturable` needs.
    """
    given = []
    for group in optimizer.param_groups:
        given.append(_Given(group, {k: group[k] for k in ("lr", "capturable", "fused") if k in group}))
        if "lr" in group:
            rate = group["lr"]
            # A copy in any case: groups may share their tensor, and it is filled for each.
            group["lr"] = torch.as_tensor(
                rate, dtype=None if isinstance(rate, Tensor) else torch.float32, device=device
            ).clone()
        if "capturable" in group:
            group["capturable"] = True
        elif group.get("fused", True) is None and not group["foreach"]:
            group["fused"] = True
    for values in optimizer.state.values():
        values.update({k: v.to(device) for k, v in values.items() if isinstance(v, Tensor) and v.device != device})
    optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]  # it is, while warming up
    return given


def undo_capturable(optimizer: Optimizer, given: list[_Given]) -> None:
    """Give an optimizer its settings back, with the learning rate that it has now."""
    for group, settings in given:
        rate = group.get("lr")
        group.update(settings)
        if isinstance(rate, Tensor):
            group["lr"] = rate if isinstance(settings["lr"], Tensor) else rate.item()
        if not (settings.get("capturable", True) or settings.get("fused")):
            for p in group["params"]:
                values = optimizer.state.get(p, {})
                values.update({k: v.cpu() for k, v in values.items() if k == "step"})


# --- what a graph takes for granted


class Watch:
    """What graphs of a model and an optimizer take for granted: they wouldn't notice if it changed.

    New modules and parameters are looked for when a run starts, and in a bare step. The learning rate may be replaced.
    """

    def __init__(self, state: TrainState) -> None:
        self.model, self.optimizer, self.seed, self.run = state.model, state.optimizer, state.seed, state.run
        groups = self.optimizer.param_groups
        self.rates = [(group, group["lr"]) for group in groups if isinstance(group.get("lr"), Tensor)]
        self.modules = list(self.model.modules())
        self.parameters = [p for group in groups for p in group["params"]]
        self.tensors = [*self.model.parameters(), *self.model.buffers(), *self.parameters]
        self.settings = [(g, k) for g in groups for k in g if k not in ("params", "lr") and not k.startswith("initial_")]
        self.taken = self.look()

    def look(self) -> dict[str, Any]:
        """Return all of it as it is now, by what it is."""
        states = self.optimizer.state
        return {
            "a module's training flag": [m.training for m in self.modules],
            "a parameter's requires_grad": [t.requires_grad for t in self.tensors],
            "where a parameter is in memory": [t.data_ptr() for t in self.tensors],
            "where the optimizer's state is": [v.data_ptr() for p in self.parameters for v in _tensors_in(states.get(p))],
            "a setting of the optimizer": [_token(group[key]) for group, key in self.settings],
        }

    def change(self, state: TrainState) -> str | None:
        """Say what isn't any more as it was taken, if anything."""
        if state.model is not self.model or state.optimizer is not self.optimizer or state.seed != self.seed:
            return "the model, the optimizer or the seed"
        if state.run is not self.run or state.run is None:
            fresh = Watch(state)
            if fresh.shape() != self.shape():
                return "the model's modules or the optimizer's groups"
            self.run = state.run
        for group, rate in self.rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
        now = self.look()
        if now == self.taken:
            return None
        what = next(name for name in now if now[name] != self.taken[name])
        differ = [key for (_, key), a, b in zip(self.settings, *(x[what] for x in (now, self.taken))) if a != b]  # noqa: B905
        return f"{what} ({differ[0]})" if what == "a setting of the optimizer" else what

    def shape(self) -> Any:
        return [*map(id, self.modules)], [*map(id, self.tensors)], [(id(group), key) for group, key in self.settings]


def _tensors_in(values: Mapping[str, Any] | None) -> list[Tensor]:
    return [v for v in values.values() if isinstance(v, Tensor)] if values else []


def _token(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


# --- what may not happen while an update is recorded


class _Changing:
    """Stands for a value of the state that is another one in every update, while one is recorded."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __add__(self, other: Any) -> _Changing:
        return self if isinstance(other, bool) else self._refuse()  # the update counts itself

    def _refuse(self, *_: Any) -> Any:
        raise CaptureError(
            f"state.{self.__dict__['name']} is read inside the update. It changes, and a graph would go on with the value "
            f"that it had when it was captured. Compute what depends on it in a middleware of the step ring, and keep it in "
            f"a tensor that is filled there; or {_FALLBACK}"
        )

    __getattr__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = _refuse  # type: ignore[assignment]
    __getitem__ = __contains__ = __call__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class _Slots(dict):
    """Slots that note which of them are read."""

    def __init__(self, slots: Mapping[str, Any]) -> None:
        super().__init__(slots)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return super().get(name, default)


def _facts(state: TrainState) -> dict[str, Any]:
    """Return what an update may change in place only, and on the device only, by where it is."""
    found: dict[str, Any] = {}
    device = state.backend.device
    for i, values in enumerate(state.optimizer.state.values()):
        _note(f"the state of the optimizer (parameter {i})", values, device, found, set())
    for name, module in state.model.named_modules():
        path = f"model.{name}" if name else "model"
        plain = {k: v for k, v in vars(module).items() if isinstance(v, Tensor | int | float | str)}
        carried = {
            k: v for k, v in plain.items() if not (isinstance(v, Tensor) and v.requires_grad)
        }  # the rest is of one update
        _note(path, {**carried, **module._buffers}, device, found, set())
    _note("state.slots", dict(state.slots), device, found, set())
    return found


def _note(path: str, value: Any, device: torch.device, found: dict[str, Any], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found[path] = (value.data_ptr(), None if value.device.type == device.type else value._version)
    elif value is None or isinstance(value, int | float | str):
        found[path] = value
    elif id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            _note(f"{path}.{name}", part, device, found, seen)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif isinstance(value, nn.Module):
        yield from value.state_dict(keep_vars=True).items()
    elif attrs.has(type(value)):
        yield from ((f.name, getattr(value, f.name)) for f in attrs.fields(type(value)))


def _check_facts(before: dict[str, Any], after: dict[str, Any]) -> None:
    for path, now in after.items():
        if now == before.get(path, _NONE):
            continue
        if path not in before:
            how = "is made while it is recorded, and a graph would never make it again"
        elif isinstance(now, tuple) and isinstance(before[path], tuple) and now[0] != before[path][0]:
            how = "is replaced by another tensor, and a graph goes on with the one that there was: change it in place"
        else:
            how = "is changed on the host, and a graph would never change it again: keep it in a tensor on the device"
        raise CaptureError(f"the update can't be captured: {path} {how}; or {_FALLBACK}")


_NONE = object()


def _host_draws(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    draws: dict[str, Any] = {"python's": random.getstate(), "numpy's": (name, keys.tobytes(), *rest)}  # type: ignore[union-attr]
    if device.type != "cpu":
        draws["torch's CPU"] = torch.get_rng_state().tolist()
    return draws


def _why(error: BaseException) -> CaptureError:
    """Return the error that says by which line the capture failed."""
    torchs = str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torchs)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}" if frames else "torch"
    what = (str(error).splitlines() or [""])[0]
    return CaptureError(
        f"the update can't be captured as a CUDA graph: {type(error).__name__}: {what} ({where}). Inside it nothing may be "
        f"read to the host (.item(), float(tensor), if tensor: ...), nor depend on a value that was. Keep it on the device, "
        f"or {_FALLBACK}"
    )


# --- the step


class Captured:
    """A step that captures its updates: ``warmup`` eager ones for each kind of batch, then replays.

    It holds graphs of one model and one optimizer at a time. They are no state: without them the same is computed.

    Args:
        step: the step inside.
        warmup: eager updates before a capture.
        limit: graphs to hold; the one that wasn't used for longest goes.
        recorder: ``device -> Recorder``.
    """

    def __init__(self, step: Step, warmup: int, limit: int, recorder: Callable[[torch.device], Recorder]) -> None:
        self.step, self.warmup, self.limit, self.recorder_on = step, warmup, limit, recorder
        self.graphs: dict[Any, Graph] = {}
        self.ran: Counter[Any] = Counter()  # eager updates, by kind of batch
        self.watch: Watch | None = None
        self.given: list[_Given] = []
        self.eager, self.changed = 0, "the shapes of the batches"

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        tensors: list[Tensor] = []
        key = signature(batch, tensors)
        change = self.watch.change(state) if self.watch else "nothing"
        if change:
            self._begin(state, change)
        graph = self.graphs.pop(key, None)
        if graph is not None and any(state.slots.get(name) is not value for name, value in graph.slots.items()):
            graph, self.changed = None, "a slot"
        if graph is None and self.ran[key] < self.warmup:
            return self._eagerly(key, state, batch)
        if graph is None:
            graph = self._recorded(state, batch, tensors)
        self.graphs[key] = graph  # the last one is the one used last
        if len(self.graphs) > self.limit:
            oldest = next(iter(self.graphs))
            del self.graphs[oldest], self.ran[oldest]
        self.eager = 0
        out = graph(tensors)
        return advance(state, applied=True), out

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
                f"cuda_graph captures the updates of one process; there are {state.backend.world_size}: {_FALLBACK}"
            )
        if wants_closure(type(optimizer)):
            name = type(optimizer).__name__
            raise CaptureError(f"{name} decides on the host how often it evaluates the loss: take another, or {_FALLBACK}")
        elsewhere = {t.device for t in (*state.model.parameters(), *state.model.buffers())} - {device}
        if elsewhere:
            raise CaptureError(f"the model is on {device} and on {', '.join(map(str, elsewhere))}: a graph is of one device")
        given = make_capturable(optimizer, device)
        if not self.given or self.given[0].group is not given[0].group:  # else it was capturable already, by us
            self.given = given
        self.watch = Watch(state)

    def _eagerly(self, key: Any, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        assert self.watch is not None
        if len(self.ran) > 1000:  # as many kinds of batches as batches
            self.ran.clear()
        self.ran[key] += 1
        self.eager += 1
        if self.eager == EAGER_IN_A_ROW:
            _log.warning(
                "cuda_graph: %d updates in a row ran eagerly: what changes from one to the next is %s. A graph is of one kind "
                "of batch and one set of settings, and is captured when they have come %d times. Pad batches to a few lengths; "
                "only the learning rate can be scheduled; else leave cuda_graph out, to the same result",
                self.eager, self.changed, self.warmup,
            )  # fmt: skip
        reply = self.recorder.run(lambda: self.step(state, batch))
        self.watch.taken = self.watch.look()  # the first update makes the optimizer's state
        return reply

    def _recorded(self, state: TrainState, batch: Batch, tensors: list[Tensor]) -> Graph:
        """Capture an update. Whatever goes wrong, the state is as it was."""
        __tracebackhide__ = True
        inputs = _buffers(tensors)
        _copy(inputs, tensors)
        static, slots, device = rebuilt(batch, iter(inputs)), _Slots(state.slots), state.backend.device
        inside = fenced(state, slots, _Changing)
        facts, draws, optimizer = _facts(state), _host_draws(device), state.optimizer
        kept = {p: {k: _kept(v, device) for k, v in values.items()} for p, values in optimizer.state.items()}
        try:
            replay, (new, out) = self.recorder.record(lambda: self.step(inside, static))
            self._check(state, new, out)
            _check_facts(facts, _facts(state))
            for whose, after in _host_draws(device).items():
                if after != draws[whose]:
                    raise CaptureError(
                        f"the update draws from {whose} generator, on the host: draw on the device, or {_FALLBACK}"
                    )
        except BaseException as error:
            optimizer.state.clear()
            optimizer.state.update(kept)
            if isinstance(error, CaptureError) or not isinstance(error, Exception):
                raise
            raise _why(error) from error
        results: list[Tensor] = []
        _filled(out, lambda t: results.append(t) or t)
        return Graph(replay, inputs, out, results, {name: state.slots[name] for name in slots.used if name in state.slots})

    def _check(self, state: TrainState, new: TrainState, out: Output) -> None:
        for name, value in new.slots.items():
            if value is not state.slots.get(name):
                raise CaptureError(
                    f"the update can't be captured: it puts another value into state.slots[{name!r}], and a graph goes on with "
                    f"the one that there was. Change its tensors in place, or {_FALLBACK}"
                )
        if out.skip is not None:
            raise CaptureError(
                f"the update can't be captured: it is left out ({out.skip}), which is decided on the host: {_FALLBACK}"
            )

    def release(self, state: TrainState) -> None:
        """Drop the graphs, and give the optimizer its settings back."""
        undo_capturable(state.optimizer, self.given)
        self.graphs.clear()
        self.watch, self.given = None, []


def _kept(value: Any, device: torch.device) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.device.type != device.type else value
