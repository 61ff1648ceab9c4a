"""Activations, gradients and updates by module, in some updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import is_sharded
from fnloop._core.metrics import Mean
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.selectors import Selector, Selectors, check_selectors, select
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._display import checks
from fnloop._step.backward import Commuting
from fnloop._step.update import report

__all__ = ["watch"]

WATCH = "watch"


@middleware("step")
def watch(every: int = 50, only: Selectors | None = None) -> Middleware:
    """Report activations, gradients and updates by module, of every ``every``-th update.

    - "watch/<module>/activation": the root mean square of the module's output in training. It is 0
      for a ReLU that is dead, and grows with depth or time where activations explode. It is that of
      modules without children, with parameters or not, and of those with parameters of their own.
    - "watch/<module>/gradient": the norm of the gradient of the module's own parameters. It is that
      of the gradient as it is where ``watch`` is listed: before ``clip``, unscaled, of the whole
      update, if it is listed after ``amp`` and ``accumulate`` and before ``clip``.
    - "watch/<module>/update": the norm of the change of these parameters, divided by their norm
      after it. Often about 1e-3 where training goes well; 0 where nothing is learned.

    They are means over the watched updates of a record, of which the first update of the run is
    one. They stay on the device until a record is made. Watched updates have hooks on the modules
    and a copy of the weights. Other updates have neither.

    Nothing is seen inside of what torch.compile has compiled, so there is no activation there. A
    functional call such as ``torch.relu(x)`` has no name: the next module shows what it does.

    Args:
        every: updates from one that is watched to the next.
        only: what it is for, as in ``freeze``: a module of the model, a glob of names, a function
            ``(name, parameter) -> bool``, or a list of these. None: all modules.

    Returns:
        A middleware of the loss, the gradient and the update ring.

    Raises:
        TypeError: every is not an int, or ``only`` is not a selector.
        ValueError: every is below 1. When composing: ``cuda_graph`` is listed too. When a run
            starts: ``only`` is for nothing in the model.
        NotImplementedError: when a run starts: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(watch())(toy_loss)
        >>> state, out = step(toy(w=2.0), torch.tensor([3.0]))       # w: 2 - 3
        >>> {name: metric.compute() for name, metric in out.metrics.items()}
        {'watch/Toy/activation': 6.0, 'watch/Toy/gradient': 3.0, 'watch/Toy/update': 3.0}
    """
    checks.integer(WATCH, "every", every, "updates from one to the next", wrong_type=TypeError)
    selectors = None if only is None else check_selectors(WATCH, only)

    def is_watched(state: TrainState) -> bool:
        return not (state.step + state.skipped) % every

    def loss(step: Step) -> Step:
        def activations(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if not is_watched(state):
                return step(state, batch)
            with _noting(_modules(state, selectors)) as found:
                state, out = step(state, batch)
            means = {name: torch.stack(values).mean() for name, values in found.items()}
            metrics = {name: Mean(value * out.weight, out.weight) for name, value in means.items()}
            return state, out if out.skip is not None else report(out, metrics, WATCH)

        return activations

    def gradient(step: Step) -> Step:
        def gradients(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            watched = is_watched(state)
            state, out = step(state, batch)
            if not watched or out.skip is not None:
                return state, out
            return state, report(out, _gradients(_parameters(state, selectors)), WATCH)

        return gradients

    def update(step: Step) -> Step:
        def updates(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if not is_watched(state):
                return step(state, batch)
            chosen = _parameters(state, selectors)
            before = {name: [p.detach().clone() for p in ps] for name, ps in chosen.items()}
            state, out = step(state, batch)
            return state, out if out.skip is not None else report(
                out, _updates(before, chosen), WATCH
            )

        return updates

    return Middleware(
        WATCH,
        loss=loss,
        gradient=Commuting(gradient),
        update=update,
        check=_check,
        check_state=lambda state, listed: _check_state(state, selectors),
    )


def _gradients(chosen: dict[str, list[Tensor]]) -> dict[str, Metric]:
    """Return the norms of gradients, by the names of their metrics."""
    found = {k: [p.grad for p in params if p.grad is not None] for k, params in chosen.items()}
    return {f"{WATCH}/{k}/gradient": Mean(_norm(grads), 1) for k, grads in found.items() if grads}


def _updates(before: dict[str, list[Tensor]], chosen: dict[str, list[Tensor]]) -> dict[str, Metric]:
    """Return how much parameters have changed, by the names of their metrics."""
    found: dict[str, Metric] = {}
    with torch.no_grad():
        for name, params in chosen.items():
            change = _norm([p - old for p, old in zip(params, before[name], strict=True)])
            ratio = change / _norm(params).clamp_min(torch.finfo(torch.float32).tiny)
            found[f"{WATCH}/{name}/update"] = Mean(ratio, 1)
    return found


def _check(listed: Sequence[Middleware]) -> None:
    for member in listed:
        if member.name == "cuda_graph":
            raise ValueError(
                f"watch looks at some updates only, but {member!r} replays each as it was "
                "captured: leave one out"
            )


def _check_state(state: TrainState, selectors: Sequence[Selector] | None) -> None:
    """Raise if the model cannot be watched, or the selectors are for nothing in it."""
    if is_sharded(state.model):
        raise NotImplementedError(
            "watch computes norms of whole parameters, but this model is sharded over processes: "
            'write grad_norm(by="module") for its gradients'
        )
    _modules(state, selectors)


def _modules(state: TrainState, selectors: Sequence[Selector] | None) -> dict[str, nn.Module]:
    """Return the modules whose outputs are watched, by name."""
    model = unwrap(state)
    chosen = None if selectors is None else select(WATCH, model, selectors)
    wanted = None if chosen is None else {id(p) for p in chosen.parameters.values()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False)]
        if not own and any(True for _ in module.children()):
            continue
        if chosen is not None and wanted is not None:
            named = module in chosen.modules
            if not named and not any(id(p) in wanted for p in own):
                continue
        found[torch_compat.strip_compile_prefix(name) or type(model).__name__] = module
    return found


def _parameters(state: TrainState, selectors: Sequence[Selector] | None) -> dict[str, list[Tensor]]:
    """Return the parameters that optimizers update, by the name of their module."""
    trained = {id(p) for p in parameters(state)}
    found: dict[str, list[Tensor]] = {}
    for name, module in _modules(state, selectors).items():
        if own := [p for p in module.parameters(recurse=False) if id(p) in trained]:
            found[name] = [*own]
            trained -= {id(p) for p in own}  # tied ones count once
    return found


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    dense = [t.detach() if t.layout is torch.strided else t.detach().to_dense() for t in tensors]
    norms = [torch.linalg.vector_norm(t, dtype=_wide(t.dtype)) for t in dense]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def _noting(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Note the root mean squares of the outputs of modules, by the names of their metrics."""
    found: dict[str, list[Tensor]] = {}
    handles: list[RemovableHandle] = []
    try:
        for name, module in modules.items():
            noted = _noter(found, f"{WATCH}/{name}/activation")
            handles.append(module.register_forward_hook(noted))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _noter(
    found: dict[str, list[Tensor]], name: str
) -> Callable[[nn.Module, object, object], None]:
    def note(module: nn.Module, given: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return  # what it adds here would become a part of the compiled code
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel():
            value = first.detach()
            norm = torch.linalg.vector_norm(value, dtype=_wide(value.dtype))
            found.setdefault(name, []).append(norm / math.sqrt(value.numel()))

    return note
