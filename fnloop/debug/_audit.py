"""Updates that are made twice, or in another way, to compare their bits."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.state import TrainState, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop.debug._watch import (
    BUFFER,
    GRADIENT,
    LOSS,
    OPTIMIZER,
    SLOT,
    WEIGHT,
    Before,
    Called,
    Difference,
    Differences,
    Gradients,
    Result,
    Trace,
    find_changed,
    find_differences,
    find_sources,
    first_other_operator,
    named_tensors,
    noting,
    result_of,
    without_gradients,
)
from fnloop.extend import (
    Batch,
    checks,
    containers,
    engine_of,
    host,
    isolated,
    refuse,
    reprs,
    torch_compat,
)

# --------------------------------------------------------------------------------------------------
# Updates that are made twice, to compare their bits.

EAGER, FLOAT64 = "eager", "float64"


@middleware("step")
def audit(every: int = 1000, against: str | None = None) -> Middleware:
    """Make some updates twice from the same state, and compare the bits.

    The first update is audited too. The bits are those of the loss, the buffers, the weights, the
    state of the optimizers and the slots. If they are equal, the run continues with exactly the
    bits that it would have without ``audit``. If not, it ends with an :class:`AuditError`. It names
    the first parameter that differs and, from two more makings, what may be the cause:

    - the line with the first operator whose result differs, such as a draw from a generator that
      the run does not position, or a kernel that is not deterministic;
    - what changes with each call: a counter, a generator, an attribute of a module;
    - one disturbed making, such as by a flipped bit, if a third one agrees with the other.

    Everything is restored first, so ``error.state`` is the state before the update.

    With ``against`` an update is compared with another way to compute it:

    - "eager": without torch.compile and without CUDA graphs, with the same draws. The loss and each
      gradient may differ by 1e-3 of their norm in float32, 1e-9 in float64, and 5e-2 with autocast
      or in 16 bits. Gradients cannot be seen under ``cuda_graph``: there the changes of the weights
      may differ by 0.1 of their norm. Inductor draws other random numbers than eager code, so
      dropout needs ``torch._inductor.config.fallback_random = True``.
    - "float64": a copy of the model with the first batch in float64 and without ``nn.Dropout``. The
      outputs of all modules and the gradients are measured in units of rounding, the eps of their
      dtype. The error names the first module that is off by more than 1000 times as many as those
      before it; or, from the last parameter to the first, such a gradient.

    Args:
        every: updates from one audit to the next.
        against: "eager" or "float64"; or None, which makes the same update twice.

    Returns:
        A middleware of the step ring; with "float64" of the forward ring too.

    Raises:
        TypeError: every is not an int.
        ValueError: a setting is out of its range. In a run: an update draws random numbers that
            "eager" cannot repeat.
        AuditError: in a run: the bits differ.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> generator = torch.Generator().manual_seed(0)
        >>> def loss_fn(model, batch):           # it draws from a generator of its own
        ...     return (model.w * batch * torch.rand(2, generator=generator)).mean()
        >>> step = fl.pipeline(audit(every=100))(loss_fn)
        >>> try:
        ...     state = fl.fit(step, toy(), [torch.ones(2)], hooks=())
        ... except AuditError as error:
        ...     print(error.parameter, error.state.step, "generator" in str(error))
        w 0 True

    Notes:
        The same update made twice does not find what is wrong each time. No audit finds a bit of a
        weight that flips between two updates, because both makings begin with it.

        An audited update takes as long as two or three: at every=1000 at most 0.3 % of a run,
        unless an update takes less than about 2 ms. It reads from the device, and needs memory for
        two copies of the model, the optimizers and the slots. All other updates copy and read
        nothing. Loss functions are called more often than without it. List it last, to audit all
        other middleware.
    """
    every = checks.integer(
        "audit", "every", every, "updates from one to the next", wrong_type=TypeError
    )
    if against is not None:
        checks.choice("audit", "against", against, (EAGER, FLOAT64), ", or None")
    known: WeakKeyDictionary[nn.Module, Facts] = WeakKeyDictionary()
    forward: list[Step] = []  # that of the pipeline that was composed last

    def note_forward(step: Step) -> Step:
        forward[:] = [step]
        return step

    def wrap(step: Step) -> Step:
        inner = next(iter(forward), None)  # that of the same pipeline, composed just before

        def audited(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if (state.step + state.skipped) % every or _is_unfinished(state):
                return step(state, batch)
            facts = known.get(state.model, Facts())
            if against == EAGER:
                return compare_with_eager(step, state, batch, facts)
            if inner is not None:
                compare_with_float64(inner, state, batch, facts)
                return step(state, batch)
            return _make_twice(step, state, batch, facts)

        return audited

    return Middleware(
        "audit",
        forward=note_forward if against == FLOAT64 else None,
        step=wrap,
        check_state=lambda state, listed: known.update({state.model: Facts.of(state, listed)}),
        adds=(),
    )


def _is_unfinished(state: TrainState) -> bool:
    """Return whether the first forward will make parameters."""
    return any(nn.parameter.is_lazy(p) for p in state.model.parameters())


def _make_twice(
    step: Step, state: TrainState, batch: Batch, facts: Facts
) -> tuple[TrainState, Output]:
    """Make an update twice. Return the second one, if it has the bits of the first."""
    __tracebackhide__ = True
    before = Before(state)
    first = result_of(*step(state, batch), None, copied=True)
    before.put_back()
    new, out = step(state, batch)
    second = result_of(new, out, None, copied=False)
    found = find_differences(first, second)
    if not engine_of(state).largest(found is not None):
        return new, out
    second = [attrs.evolve(part, value=part.value.clone()) for part in second]
    before.put_back()
    makings = Makings(step, state, batch, before, first, second)
    try:
        message, parameter = explain(makings, found, facts)
    finally:
        before.put_back()
    raise AuditError(message, parameter)


# --------------------------------------------------------------------------------------------------
# What an audit raises.


class AuditError(RuntimeError):
    """An update gave different bits when it was repeated. ``state`` is the state before it.

    Args:
        message: what differs, and what may be the cause.
        parameter: the name of the first parameter that differs, or None.
    """

    __module__ = "fnloop.debug"  # the name by which a traceback shows it

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    def __reduce__(self) -> tuple[type[AuditError], tuple[str, str | None]]:
        return AuditError, (str(self), self.parameter)


# --------------------------------------------------------------------------------------------------
# Why two makings of one update differ: what an error says, from two more makings.

_STAGES = {
    LOSS: "the forward differs",
    BUFFER: "the loss is the same, but the forward leaves other buffers",
    GRADIENT: "the loss is the same, the backward differs",
    WEIGHT: "the loss is the same, the weights after it differ",
    OPTIMIZER: "the weights are the same, the state of the optimizer differs",
    SLOT: "the weights are the same, what a middleware keeps differs",
}
_UNSEEN = "a kernel that is not deterministic (try torch.use_deterministic_algorithms(True)), or "
_UNSEEN += "something that the run does not position, such as a clock"
MOST_SOURCES = 3


@attrs.frozen(eq=False)
class Makings:
    """Ways to make one update again.

    Args:
        step: what makes it.
        state: the state before it.
        batch: what the step takes.
        before: puts that state back.
        first, second: the results of the first two makings.
    """

    step: Step
    state: TrainState
    batch: Batch
    before: Before
    first: Result
    second: Result

    def make(self, facts: Facts) -> Result:
        """Make the update, and return a copy of its result, with the gradients if they are seen.

        A replay of a graph calls no hooks, and a capture would record them.
        """
        __tracebackhide__ = True
        *_, result = _make(self.step, self.state, self.batch, facts, copied=True)
        return result


def explain(makings: Makings, found: Differences | None, facts: Facts) -> tuple[str, str | None]:
    """Say why the makings of an update differ. It makes the update twice more.

    Args:
        makings: how. The state before the update has been put back.
        found: where the first two differ; None: they differ in another process.
        facts: what is known about the pipeline.

    Returns:
        The message, and the name of the first parameter that differs, or None.
    """
    __tracebackhide__ = True
    state = makings.state
    roots = {"model": state.model, "loss function": makings.step}
    before = find_sources(roots)
    third, fourth, called = _trace(makings, facts)
    changed = find_changed(before, roots)
    title = f"audit: two makings of update {state.step + 1} from the same state differ"
    if found is None:
        return f"{title} in another process, whose message says where", None
    again = find_differences(third, fourth)  # with the gradients
    seen = again or found
    parts = [f"{title}. {describe(seen)}"]
    if changed:
        names = "; ".join(str(source) for source in changed[:MOST_SOURCES])
        parts.append(f"Between the makings this changes, which a checkpoint does not hold: {names}")
    if called is not None:
        parts.append(str(called))
    if not changed and called is None:
        parts.append(_vote(makings, without_gradients(third), found))
    return ". ".join(parts), seen.parameter.name if seen.parameter else None


def _trace(makings: Makings, facts: Facts) -> tuple[Result, Result, Called | None]:
    """Make the update twice more. Return the results, and the first operator that differs."""
    __tracebackhide__ = True
    # torch.compile does not work while operators are watched.
    watch = contextlib.nullcontext if facts.compiles else Trace
    with watch() as one:
        third = makings.make(facts)
    makings.before.put_back()
    with watch() as other:
        fourth = makings.make(facts)
    called = None
    if isinstance(one, Trace) and isinstance(other, Trace):
        called = first_other_operator(one, other)
    return third, fourth, called


def _vote(makings: Makings, third: Result, found: Differences) -> str:
    """Return what to say if nothing else is known: whether one of the makings was disturbed."""
    for agrees, other, result in (
        ("first", "second", makings.first),
        ("second", "first", makings.second),
    ):
        if find_differences(result, third) is None:
            return (
                f"A third making agrees with the {agrees} one, so the {other} one was disturbed: "
                f"{_disturbed(found)}"
            )
    return f"Likely: {_UNSEEN}"


def _disturbed(found: Differences) -> str:
    first = found.first
    if first.kind != LOSS and first.elements == first.bits == 1 and found.parameters <= 1:
        return "one bit of one element is flipped, as a fault of the memory or of the device does"
    return (
        "a fault of the memory or of the device, a race of a kernel, or code that does something "
        "else at times"
    )


def describe(found: Differences) -> str:
    """Return where two results differ, and how much."""
    first, parameter = found.first, found.parameter
    stage = _STAGES[first.kind]
    if first.kind == WEIGHT and found.gradients:
        stage = "the loss and the gradients are the same, the step of the optimizer differs"
    text = f"{stage[0].upper()}{stage[1:]}"
    if first.values is not None:
        text = f"{text}: the loss is {first.values[0]!r} and {first.values[1]!r}"
    elif first is not parameter and first != parameter:
        text = f"{text}: {_amount(first)}"
    if parameter is None:
        return f"{text}. No parameter differs"
    more = f", one of {found.parameters} parameters that do" if found.parameters > 1 else ""
    return (
        f"{text}. The first parameter that differs is {parameter.name}{more}: {_amount(parameter)}"
    )


def _amount(one: Difference) -> str:
    what = {
        GRADIENT: f"the gradient of {one.name}",
        WEIGHT: f"the value of {one.name}",
        BUFFER: f"the buffer {one.name}",
        OPTIMIZER: f"{one.inside!r} in the optimizer's state of {one.name}",
        SLOT: f"slots[{one.name!r}] {one.inside}".rstrip(),
    }.get(one.kind, "the loss")
    if not one.size:
        return f"{what} is not in both, or has another shape"
    bits = f"{one.bits} bit{'s' * (one.bits != 1)}"
    return (
        f"{what} differs in {one.elements} of {one.size} elements ({bits}), by at most "
        f"{reprs.format_number(one.most)}"
    )


# --------------------------------------------------------------------------------------------------
# Updates compared with another way to compute them: without compilation, or in float64.

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
        captures: whether updates are graphs, by ``cuda_graph`` or ``compiled(update=True)``.
        rough: whether ``amp`` is, with 16 bits.
        window: the batches of an update.
    """

    compiles: bool = False
    captures: bool = False
    rough: bool = False
    window: int = 1

    @staticmethod
    def of(state: TrainState, listed: Sequence[Middleware]) -> Facts:
        """Return what is known of a state, and of what is listed."""
        rough = any(m.precision for m in listed) or state.backend.precision is not None
        loaded = any(torch_compat.uncompiled(m) is not None for m in state.model.modules())
        return Facts(
            compiles=loaded or any(m.name == "compiled" for m in listed),
            captures=any(m.device is not None for m in listed),
            rough=rough,
            window=max(m.window for m in listed),
        )


# --- eager


def compare_with_eager(
    step: Step, state: TrainState, batch: Batch, facts: Facts
) -> tuple[TrainState, Output]:
    """Make an update without compilation and graphs, then as it is. Return the latter.

    Raises:
        AuditError: they differ by more than rounding.
    """
    __tracebackhide__ = True
    before = Before(state)
    started = {name: t.detach().clone() for name, t in named_tensors(state)}
    generators = torch.default_generator.get_state()
    with torch.compiler.set_stance("force_eager"), host().replaced(records=False):
        eager = _make(step, state, batch, facts, copied=True)[2]
    drew = not torch.equal(generators, torch.default_generator.get_state())
    before.put_back()
    new, out, real = _make(step, state, batch, facts, copied=False)
    found = _largest_difference(real, eager, started, facts)
    if not engine_of(state).largest(found is not None):
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
    pairs = [
        (p, a - started[p.name], b - started[p.name]) if p.kind == WEIGHT else (p, a, b)
        for p, a, b in pairs
    ]
    norms = [norm_of(b) for p, _, b in pairs if p.kind == wanted]
    floor = SMALL * math.hypot(*norms)
    most, worst, text, parameter = 1.0, 1.0, "", None
    for p, a, b in pairs:
        least = SMALL if p.kind == LOSS else floor
        off = _distance(a, b) / max(norm_of(b), least, torch.finfo(torch.float64).tiny)
        allowed = tolerance_of(p.value.dtype, facts.rough)
        if p.kind == WEIGHT:
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


def norm_of(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference; infinite if only one of them is finite somewhere."""
    same = (a == b) | (a.isnan() & b.isnan())
    off = norm_of(torch.where(same, 0.0, a.double() - b.double()))
    return off if math.isfinite(off) else math.inf


# --- float64


def compare_with_float64(inner: Step, state: TrainState, batch: Batch, facts: Facts) -> None:
    """Run forward and backward on two copies of the model, one of them in float64.

    Args:
        inner: the forward step.
        state: the state, which stays as it is.
        batch: the batch, or a window of which the first batch is taken.
        facts: what is known about the pipeline.

    Raises:
        AuditError: a module or a gradient is off by far more than the others.
    """
    __tracebackhide__ = True
    why = (
        "copies the model, and one that is sharded over processes cannot be copied: write "
        'against="eager", or None'
    )
    refuse(state, 'audit(against="float64")', sharded=why)
    first = batch[0] if facts.window > 1 else batch
    repeat = engine_of(state).mark_draws()
    exact, real = (_Copy(state, first, exact) for exact in (True, False))
    for each in (exact, real):
        with isolated(state.backend.device), torch.compiler.set_stance("force_eager"):
            each.run(inner)
        repeat()
    found = _find_imprecise(real, exact, torch.finfo(torch.bfloat16).eps if facts.rough else 0.0)
    if engine_of(state).largest(found is not None):
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
            state, model=self.model, slots=containers.map_leaves(slots, _widen) if exact else slots
        )
        self._batch = containers.map_leaves(batch, _widen) if exact else batch
        self.outputs: list[tuple[str, Tensor]] = []
        self.gradients: dict[str, Tensor] = {}
        for module in model.modules():
            if isinstance(module, DROPOUTS):
                module.training = False

    def run(self, inner: Step) -> None:
        """Run forward and backward, and note the outputs of modules and the gradients."""
        __tracebackhide__ = True
        try:
            named = self.model.named_modules()
            with noting(((name or type(self.model).__name__, m) for name, m in named), self._note):
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

    def _note(self, name: str, module: nn.Module, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            self.outputs.append((name, output.detach().clone()))


def _widen(leaf: object) -> object:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _find_imprecise(real: _Copy, exact: _Copy, eps: float) -> tuple[str | None, str] | None:
    """Return what is off by far more than what came before it, and why; None if nothing is.

    Args:
        real, exact: the two copies, which have run.
        eps: the least rounding to expect.
    """
    outputs = list[tuple[str, float]]()
    for (name, a), (other, b) in zip(real.outputs, exact.outputs, strict=False):
        if name != other or a.shape != b.shape:
            break
        eps = max(eps, torch.finfo(a.dtype).eps)
        least = SMALL if a.ndim == 0 else 1e-30
        outputs.append((name, _distance(a, b) / eps / max(norm_of(b), least)))
    if (jump := _first_jump(outputs)) is not None:
        name, units, before = jump
        what = name if name == "the loss" else f"the output of the module {name}"
        return name, (
            f"{what} is off by {units} units of rounding, and nothing before it by more than "
            f"{before}"
        )
    total = SMALL * math.hypot(*map(norm_of, exact.gradients.values()))
    jump = _first_jump(
        (name, _distance(real.gradients[name], g) / eps / max(norm_of(g), total, 1e-30))
        for name, g in reversed(exact.gradients.items())  # in the order of backward, nearly
        if name in real.gradients
    )
    if jump is None:
        return None
    name, units, usual = jump
    return name, (
        f"the gradient of {name} is off by {units} units of rounding, and those of the parameters "
        f"after it by at most {usual}"
    )


def _first_jump(units: Iterable[tuple[str, float]]) -> tuple[str, str, str] | None:
    """Return the first name whose number is far above those before it, it, and the largest."""
    most = 1.0
    for name, number in units:
        if number > MOST_UNITS * most:
            return name, reprs.format_number(number), reprs.format_number(most)
        most = max(most, number)
    return None
