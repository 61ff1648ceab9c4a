"""Updates compared with another way to compute them: without compilation, or in float64."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend import torch_compat
from fnloop._backend.containers import map_leaves
from fnloop._backend.fsdp import is_sharded
from fnloop._core.middleware import Middleware
from fnloop._core.rng import isolated, mark_generators
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display.html import format_number
from fnloop._step.engine import engine_of
from fnloop._step.host import without_graphs
from fnloop.debug._audit_error import AuditError
from fnloop.debug._bits import GRADIENT, LOSS, WEIGHT, Gradients, Result, result_of
from fnloop.debug._copies import Before, named_tensors

__all__ = ["Facts", "Members", "compare_with_eager", "compare_with_float64", "tolerance_of"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # of a norm; of all other dtypes:
ROUGH = 5e-2
OF_CHANGES = 0.1  # of the change of the weights, where no gradients can be seen
SMALL = 0.01  # of the norm of all gradients: what less is compared with
MOST_UNITS = 1000.0
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@attrs.frozen
class Facts:
    """What an audit knows about a pipeline.

    Args:
        compiles: whether ``compiled`` is listed.
        captures: whether ``cuda_graph`` is.
        rough: whether ``amp`` is, with 16 bits.
        window: the batches of an update.
    """

    compiles: bool = False
    captures: bool = False
    rough: bool = False
    window: int = 1


class Members:
    """The other middleware of the pipeline that an audit is in.

    Attributes:
        forward: the forward step inside the audit, of the pipeline that was composed last.
    """

    def __init__(self) -> None:
        self.forward: Step | None = None
        self._facts: WeakKeyDictionary[nn.Module, Facts] = WeakKeyDictionary()

    def note_forward(self, step: Step) -> Step:
        """Note the forward step, and leave it as it is."""
        self.forward = step
        return step

    def note(self, state: TrainState, listed: Sequence[Middleware]) -> None:
        """Note what is listed. It is called when a step first meets a state's model."""
        names = {m.name for m in listed}
        amps = [m.call for m in listed if m.name == "amp" and m.call is not None]
        given = [(*call.args, call.kwargs.get("precision"), None)[0] for call in amps]
        rough = any(given) or state.backend.precision is not None
        window = max((m.window for m in listed), default=1)
        loaded = any(torch_compat.uncompiled(m) is not None for m in state.model.modules())
        compiles = "compiled" in names or loaded
        self._facts[state.model] = Facts(compiles, "cuda_graph" in names, rough, window)

    def of(self, state: TrainState) -> Facts:
        """Return what is known about the pipeline."""
        return self._facts.get(state.model, Facts())


# --- eager


def compare_with_eager(
    step: Step, state: TrainState, batch: Batch, members: Members
) -> tuple[TrainState, Output]:
    """Make an update without compilation and graphs, then as it is. Return the latter.

    Raises:
        AuditError: they differ by more than rounding.
    """
    __tracebackhide__ = True
    facts, before = members.of(state), Before(state)
    started = {name: t.detach().clone() for name, t in named_tensors(state)}
    generators = torch.default_generator.get_state()
    with torch.compiler.set_stance("force_eager"), without_graphs():
        eager = _make(step, state, batch, facts, copied=True)[2]
    drew = not torch.equal(generators, torch.default_generator.get_state())
    before.put_back()
    new, out, real = _make(step, state, batch, facts, copied=False)
    found = _largest_difference(real, eager, started, facts)
    if not engine_of(state).any(found is not None):
        return new, out
    parameter, why = found or (None, "in another process, whose message says where")
    title = f"audit: update {state.step + 1} differs from the one that is made eagerly"
    hint = ""
    if drew and torch_compat.draws_by_inductor():
        hint = (
            ". If the update draws random numbers, as dropout does, this is expected, because "
            "Inductor draws others: set torch._inductor.config.fallback_random = True"
        )
    before.put_back()
    raise AuditError(f"{title}, {why}{hint}", parameter)


def _make(
    step: Step, state: TrainState, batch: Batch, facts: Facts, copied: bool
) -> tuple[TrainState, Output, Result]:
    __tracebackhide__ = True
    with contextlib.nullcontext() if facts.captures else Gradients(state) as gradients:
        new, out = step(state, batch)
    return new, out, result_of(new, out, gradients, copied)


def tolerance_of(dtype: torch.dtype, rough: bool) -> float:
    """Return by how much of its norm a gradient may differ because of rounding."""
    return ROUGH if rough else TOLERANCES.get(dtype, ROUGH)


def _largest_difference(
    real: Result, eager: Result, started: dict[str, Tensor], facts: Facts
) -> tuple[str | None, str] | None:
    """Return the parameter that differs most, and how much; None if all are within tolerance."""
    wanted = WEIGHT if facts.captures else GRADIENT
    theirs = {(p.kind, p.name): p.value for p in eager}
    pairs = [
        (p, p.value, theirs[p.kind, p.name])
        for p in real
        if p.kind in (wanted, LOSS) and (p.kind, p.name) in theirs
    ]
    if facts.captures:
        changes = [
            (p, a - started[p.name], b - started[p.name]) if p.kind == WEIGHT else (p, a, b)
            for p, a, b in pairs
        ]
        pairs = changes
    norms = [_norm(b) for p, _, b in pairs if p.kind == wanted]
    floor = SMALL * math.hypot(*norms)
    most, worst, text, parameter = 1.0, 1.0, "", None
    for p, a, b in pairs:
        least = SMALL if p.kind == LOSS else floor
        off = _distance(a, b) / max(_norm(b), least, torch.finfo(torch.float64).tiny)
        allowed = tolerance_of(p.value.dtype, facts.rough)
        if facts.captures and p.kind == WEIGHT:
            allowed = max(allowed, OF_CHANGES)
        if p.kind == wanted and off / allowed > worst:
            worst, parameter = off / allowed, p.name
        if off / allowed > most:
            what = {LOSS: "the loss", GRADIENT: f"the gradient of {p.name}"}
            name = what.get(p.kind, f"the change of {p.name}")
            most = off / allowed
            text = f"most in {name}: by {off:.3g} of its norm, where {allowed:g} is allowed"
    if not text:
        return None
    losses = next((float(a), float(b)) for p, a, b in pairs if p.kind == LOSS)
    return parameter, f"{text}. The loss is {losses[0]!r}, eagerly {losses[1]!r}"


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference; infinite if only one of them is finite somewhere."""
    same = (a == b) | (a.isnan() & b.isnan())
    off = _norm(torch.where(same, 0.0, a.double() - b.double()))
    return off if math.isfinite(off) else math.inf


# --- float64


def compare_with_float64(inner: Step, state: TrainState, batch: Batch, members: Members) -> None:
    """Run forward and backward on two copies of the model, one of them in float64.

    Args:
        inner: the forward step.
        state: the state, which stays as it is.
        batch: the batch, or a window of which the first batch is taken.
        members: the middleware.

    Raises:
        AuditError: a module or a gradient is off by far more than the others.
    """
    __tracebackhide__ = True
    if is_sharded(state.model):
        raise NotImplementedError(
            'audit(against="float64") copies the model, and one that is sharded over processes '
            'cannot be copied: write against="eager", or None'
        )
    facts, device = members.of(state), state.backend.device
    first = batch[0] if facts.window > 1 else batch
    repeat, restore = engine_of(state).mark_draws(), mark_generators(device)
    with isolated(device), torch.compiler.set_stance("force_eager"):
        exact = _Copy(state, first, exact=True)
        exact.run(inner)
        restore()
        repeat()
        real = _Copy(state, first, exact=False)
        real.run(inner)
    repeat()
    found = _find_imprecise(real, exact, torch.finfo(torch.bfloat16).eps if facts.rough else 0.0)
    if engine_of(state).any(found is not None):
        name, why = found or (None, "in another process, whose message says where")
        title = f"audit: update {state.step + 1} differs from the one in float64"
        raise AuditError(f"{title}: {why}", name)


class _Copy:
    """A copy of a model, in its own precision or in float64, and what it computed.

    Attributes:
        outputs: the name of each module that was called, and its output, in the order of returns.
        gradients: by the names of the parameters.
    """

    def __init__(self, state: TrainState, batch: Batch, exact: bool) -> None:
        self._exact = exact
        model, slots = copy.deepcopy((unwrap(state), dict(state.slots)), {})
        self.model = model.double() if exact else model
        self._state = attrs.evolve(
            state, model=self.model, slots=map_leaves(slots, _widen) if exact else slots
        )
        self._batch = map_leaves(batch, _widen) if exact else batch
        self.outputs: list[tuple[str, Tensor]] = []
        self.gradients: dict[str, Tensor] = {}
        for module in model.modules():
            if isinstance(module, DROPOUTS):
                module.training = False

    def run(self, inner: Step) -> None:
        """Run forward and backward, and note the outputs of modules and the gradients."""
        __tracebackhide__ = True
        try:
            with self._noting():
                out = inner(self._state, self._batch)[1]
        except Exception as error:
            if self._exact:
                error.add_note(
                    'audit(against="float64") ran this with a float64 copy of the model and the '
                    "batch, which it must be able to compute with"
                )
            raise
        self.outputs.append(("the loss", out.loss.detach()))
        if out.skip is None and out.loss.requires_grad:
            out.loss.backward()
        named = self.model.named_parameters()
        self.gradients = {name: p.grad for name, p in named if p.grad is not None}

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        handles = [
            module.register_forward_hook(self._noter(name or type(self.model).__name__))
            for name, module in self.model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _noter(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, given: object, output: object) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.outputs.append((name, output.detach().clone()))

        return note


def _widen(leaf: object) -> object:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _find_imprecise(real: _Copy, exact: _Copy, eps: float) -> tuple[str | None, str] | None:
    """Return what is off by far more than what came before it, and why; None if nothing is.

    Args:
        real, exact: the two copies, which have run.
        eps: the least rounding to expect.
    """
    before = 1.0
    for (name, a), (other, b) in zip(real.outputs, exact.outputs, strict=False):
        if name != other or a.shape != b.shape:
            break
        eps = max(eps, torch.finfo(a.dtype).eps)
        units = _distance(a, b) / eps / max(_norm(b), SMALL if a.ndim == 0 else 1e-30)
        if units > MOST_UNITS * before:
            what = name if name == "the loss" else f"the output of the module {name}"
            return name, (
                f"{what} is off by {format_number(units)} units of rounding, and nothing before "
                f"it by more than {format_number(before)}"
            )
        before = max(before, units)
    total = SMALL * math.hypot(*map(_norm, exact.gradients.values()))
    usual = 1.0
    for name, grad in reversed(exact.gradients.items()):  # in the order of backward, nearly
        if name not in real.gradients:
            continue
        units = _distance(real.gradients[name], grad) / eps / max(_norm(grad), total, 1e-30)
        if units > MOST_UNITS * usual:
            return name, (
                f"the gradient of {name} is off by {format_number(units)} units of rounding, and "
                f"those of the parameters after it by at most {format_number(usual)}"
            )
        usual = max(usual, units)
    return None
