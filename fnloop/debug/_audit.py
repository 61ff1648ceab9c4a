"""Updates that are made twice, to compare their bits."""

from __future__ import annotations

import attrs
from torch import nn

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.engine import engine_of
from fnloop.debug._audit_error import AuditError
from fnloop.debug._bits import find_differences, result_of
from fnloop.debug._copies import Before
from fnloop.debug._explain import Makings, explain
from fnloop.debug._references import Members, compare_with_eager, compare_with_float64

__all__ = ["audit"]

EAGER, FLOAT64 = "eager", "float64"


@middleware("step")
def audit(every: int = 1000, against: str | None = None) -> Middleware:
    """Make every ``every``-th update twice from the same state, and compare the bits.

    The first update is audited too. The bits are those of the loss, the buffers, the weights, the
    state of the optimizers and the slots. If they are equal, the run continues with exactly the
    bits that it would have without ``audit``. If not, it ends with an :class:`AuditError`. It names
    the first parameter that differs and, from two more makings, what may be the cause:

    - the line with the first operator whose result differs, such as a draw from a generator that
      the run does not position, or a kernel that is not deterministic;
    - what changes with each call: a counter, a generator, an attribute of a module;
    - one disturbed making, such as by a flipped bit, if a third one agrees with the other.

    Everything is put back first, so ``error.state`` is the state before the update.

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

    The same update made twice does not find what is wrong each time. No audit finds a bit of a
    weight that flips between two updates, because both makings begin with it.

    An audited update takes as long as two or three: at every=1000 at most 0.3 % of a run, unless an
    update takes less than about 2 ms. It reads from the device, and needs memory for two copies of
    the model, the optimizers and the slots. All other updates copy and read nothing. Loss functions
    are called more often than without it. List it last, to audit all other middleware.

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
    """
    checks.integer("audit", "every", every, "updates from one to the next", wrong_type=TypeError)
    if against is not None:
        checks.choice("audit", "against", against, (EAGER, FLOAT64), ", or None")
    members = Members()

    def wrap(step: Step) -> Step:
        inner = members.forward  # that of the same pipeline, which was composed just before

        def audited(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if (state.step + state.skipped) % every or _is_unfinished(state):
                return step(state, batch)
            if against == EAGER:
                return compare_with_eager(step, state, batch, members)
            if inner is not None:
                compare_with_float64(inner, state, batch, members)
                return step(state, batch)
            return _make_twice(step, state, batch, members)

        return audited

    return Middleware(
        "audit",
        forward=members.note_forward if against == FLOAT64 else None,
        step=wrap,
        check_state=members.note,
    )


def _is_unfinished(state: TrainState) -> bool:
    """Return whether the first forward will make parameters."""
    return any(nn.parameter.is_lazy(p) for p in state.model.parameters())


def _make_twice(
    step: Step, state: TrainState, batch: Batch, members: Members
) -> tuple[TrainState, Output]:
    """Make an update twice. Return the second one, if it has the bits of the first."""
    __tracebackhide__ = True
    before = Before(state)
    first = result_of(*step(state, batch), None, copied=True)
    before.put_back()
    new, out = step(state, batch)
    second = result_of(new, out, None, copied=False)
    found = find_differences(first, second)
    if not engine_of(state).any(found is not None):
        return new, out
    second = [attrs.evolve(part, value=part.value.clone()) for part in second]
    before.put_back()
    makings = Makings(step, state, batch, before, first, second)
    try:
        message, parameter = explain(makings, found, members.of(state))
    finally:
        before.put_back()
    raise AuditError(message, parameter)
