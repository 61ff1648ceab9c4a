"""What is kept of one update while it is made again, and the step that keeps it."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.containers import map_leaves
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.optimizers import optimizers_in
from fnloop._core.snapshot import snapshot, unwrap
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._step.alternate import AlternateStep
from fnloop._step.pipeline import LossStep, Pipeline, PipelineStep
from fnloop._step.raw import RawStep

__all__ = ["Called", "Recorder", "members_of", "recording"]


class Called(NamedTuple):
    """A call of a module.

    Args:
        name: its name in the model; "" is the model itself.
        kind: its class.
        output: what it returned.
        draws: a checksum of torch's generators before the call.
    """

    name: str
    kind: str
    output: object
    draws: int


@attrs.define(eq=False, repr=False)
class Recorder:
    """What is kept of an update.

    Args:
        update: ``state.step`` after it.
        modules: whether to keep what each module returns.
        before: the state before it; None as long as it was not begun.
        window: what the step was given.
        outputs: those of the loss function.
        grads: the gradients that the optimizers took, by the name of the parameter.
        calls: the calls of modules, in the order in which they returned.
        output: that of the update; None as long as it was not applied.
    """

    update: int
    modules: bool = False
    before: TrainState | None = None
    window: Batch = None
    outputs: list[Output] = attrs.field(factory=list)
    grads: dict[str, Tensor] = attrs.field(factory=dict)
    calls: list[Called] = attrs.field(factory=list)
    output: Output | None = None
    _active: bool = False
    _kept: bool = False

    def __repr__(self) -> str:
        return f"update={self.update}"

    def around(self, step: Step) -> Step:
        """Return a step that keeps what there is to know about the update, if it makes it."""

        def replayed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if state.step + 1 != self.update or self.output is not None:
                return step(state, batch)
            self.before, self.window = snapshot(state), batch
            for kept in (self.outputs, self.grads, self.calls):  # of an update that was skipped
                kept.clear()
            with self._recording(state):
                state, out = step(state, batch)
            self.output = out if out.skip is None else None
            return state, out

        return replayed

    def inside(self, step: Step) -> Step:
        """Return a step that keeps the outputs of the loss function, as backward starts from it."""

        def noted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if self._active:
                self.outputs.append(_detached(out))
            return state, out

        return noted

    @contextlib.contextmanager
    def _recording(self, state: TrainState) -> Iterator[None]:
        __tracebackhide__ = True
        names = {id(p): strip_compile_prefix(n) for n, p in unwrap(state).named_parameters()}
        self._active = True
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_active", False)
            for optimizer in optimizers_in(state.optimizer).values():
                before = functools.partial(self._keep_gradients, names, True)
                after = functools.partial(self._keep_gradients, names, False)
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(after).remove)
            if self.modules:
                self._watch_modules(unwrap(state), stack)
            yield

    def _keep_gradients(
        self, names: dict[int, str], before: bool, optimizer: Optimizer, *_: object
    ) -> None:
        """Keep the gradients before a step; after it, those that its closure has computed."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = {names[id(p)]: p.grad for p in params if p.grad is not None and id(p) in names}
        if before:
            self._kept = bool(held)
        if before or not self._kept:
            self.grads |= {name: grad.detach().clone() for name, grad in held.items()}

    def _watch_modules(self, model: nn.Module, stack: contextlib.ExitStack) -> None:
        draws: dict[str, int] = {}
        for name, module in model.named_modules():

            def begin(module: nn.Module, given: object, name: str = name) -> None:
                draws[name] = draws_now(model)

            def end(module: nn.Module, given: object, output: object, name: str = name) -> None:
                kept = map_leaves(output, _copied)
                self.calls.append(Called(name, type(module).__name__, kept, draws[name]))

            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)


def draws_now(model: nn.Module) -> int:
    """Return a checksum of torch's generators: the CPU's, and that of the model's device."""
    states = [torch.default_generator.get_state()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return functools.reduce(lambda crc, state: zlib.crc32(state.numpy().tobytes(), crc), states, 0)


def _copied(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _detached(out: Output) -> Output:
    aux = {name: map_leaves(value, _copied) for name, value in out.aux.items()}
    return attrs.evolve(out, loss=out.loss.detach().clone(), aux=aux)


# --- the step


def members_of(step: PipelineStep) -> list[Middleware]:
    """Return all middleware of a step, those of its turns too."""
    turns = step.settings.steps.values() if isinstance(step, AlternateStep) else ()
    inner = [member for one in turns for member in one.pipeline.middleware]
    return [*step.pipeline.middleware, *inner]


def recording(step: PipelineStep, recorder: Recorder) -> PipelineStep:
    """Return the same step with a recorder around and inside of it, and without CUDA graphs.

    A graph makes the same numbers, but what is replayed calls no Python.
    """
    if isinstance(step, AlternateStep):
        given = step.settings.call
        steps = {
            name: _listing(one, (_losses(recorder),)) for name, one in step.settings.steps.items()
        }
        turns = given.factory(steps, **given.kwargs)
        assert isinstance(turns, AlternateStep)
        return Pipeline((*step.pipeline.middleware, _updates(recorder)))(turns)
    if isinstance(step, RawStep):
        return _listing(step, (_updates(recorder),))
    return _listing(step, (_losses(recorder), _updates(recorder)))


def _listing(step: PipelineStep, others: Sequence[Middleware]) -> PipelineStep:
    """Return the same step with more middleware, listed last."""
    kept = [member for member in step.pipeline.middleware if member.name != "cuda_graph"]
    if isinstance(step, RawStep):
        return RawStep(
            Pipeline((*kept, *(m for m in others if m.loss is None))), step.fn, step.evaluated_by
        )
    assert isinstance(step, LossStep)
    return Pipeline((*kept, *others))(step.loss_fn)


@middleware("loss")
def _losses(recorder: Recorder) -> Middleware:
    return Middleware("replay, losses", loss=recorder.inside)


@middleware("step")
def _updates(recorder: Recorder) -> Middleware:
    return Middleware("replay", step=recorder.around)
