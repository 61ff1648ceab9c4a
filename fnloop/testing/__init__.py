"""Tools to test your own middleware: a toy, a spy, a guard against host reads, and the laws.

    >>> import fnloop as fl, torch
    >>> from fnloop.testing import check_laws
    >>> check_laws(fl.pipeline(fl.accumulate(2), fl.clip(1.0)))  # raises if a law is broken

A middleware is tested by itself with a :func:`spy` in the place of the step that it wraps:

    >>> inner = spy(grad=4.0)
    >>> state, out = fl.clip(1.0).gradient(inner)(toy(), torch.ones(1))
    >>> round(state.model.w.grad.item(), 4), len(inner.calls)
    (1.0, 1)

The laws are those of the library's design. Each is a function of a pipeline and a :class:`Problem`.
"""

from fnloop.testing._laws import (
    Problem,
    assert_same,
    check_laws,
    law_accumulation,
    law_fold,
    law_neutral,
    law_no_host_reads,
    law_purity,
    law_skipped_updates,
    small,
    stochastic,
)
from fnloop.testing._toys import HostReadError, Spy, Toy, no_host_reads, spy, toy, toy_loss

__docformat__ = "google"
__all__ = [
    "HostReadError",
    "Problem",
    "Spy",
    "Toy",
    "assert_same",
    "check_laws",
    "law_accumulation",
    "law_fold",
    "law_neutral",
    "law_no_host_reads",
    "law_purity",
    "law_skipped_updates",
    "no_host_reads",
    "small",
    "spy",
    "stochastic",
    "toy",
    "toy_loss",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
