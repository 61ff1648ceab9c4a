"""Add numbers that follow from others to the reports of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fnloop._core.middleware import Middleware, middleware
from fnloop._display import checks
from fnloop._step.reports import MissingNumberError, Numbers, as_number

__all__ = ["derive"]


@middleware("step")
def derive(**functions: Callable[[Mapping[str, float]], float]) -> Middleware:
    """Add numbers that follow from those of a report, such as perplexity from the loss.

    They are made when a report is, for each loader from its own numbers, and never for a batch. A
    loader that lacks a number which a function looks up is left out. If no loader of the run ever
    has it, that is an error at the first report of all loaders. A bare ``evaluate`` leaves out what
    it cannot derive.

    Args:
        **functions: name to ``numbers -> number``. The numbers are a mapping without the loader's
            name: ``m["loss"]``; those that ``ema`` adds are ``m["ema/loss"]``. It also has what was
            derived before. An ArithmeticError, such as the OverflowError of ``math.exp(1000.0)``,
            and the logarithm of 0 give NaN.

    Returns:
        A middleware.

    Raises:
        TypeError: something is not a function of a mapping. At a report: a value is not a number.
        ValueError: there is none. When composing: another metric of the pipeline has the same name.
            At a report: a function looks up a number that is derived after it.
        KeyError: at a report: no loader has a number that a function looks up.

    Example:
        >>> import math
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(derive(perplexity=lambda m: math.exp(m["loss"])))(toy_loss)
        >>> state = fl.fit(step, toy(), ([torch.ones(2)], [torch.zeros(2)]), hooks=())
        >>> state.history["train/perplexity"], state.history["valid/perplexity"]
        ((1.0,), (1.0,))
    """
    if not functions:
        raise ValueError(
            "derive expects at least one name and function: "
            'derive(perplexity=lambda m: math.exp(m["loss"]))'
        )
    for name, function in functions.items():
        checks.own_metric_name("derive", name)
        checks.function("derive", name, function, "a function of numbers by name -> number", 1)

    def report(loader: str | None, numbers: Mapping[str, float]) -> Mapping[str, float]:
        __tracebackhide__ = True
        known = numbers if isinstance(numbers, Numbers) else Numbers(loader, numbers)
        found: dict[str, float] = {}
        waiting: dict[str, str] = {}  # a name that was looked up in vain, and by which function
        for name, function in functions.items():
            if name in waiting:
                raise ValueError(
                    f"derive: {waiting[name]!r} looks up {name!r}, which is listed after it: write "
                    f"derive({name}=..., {waiting[name]}=...)"
                )
            try:
                value = _apply(function, known)
                found[name] = as_number(f"derive: the value of {name!r}", value)
            except MissingNumberError as error:
                waiting.setdefault(error.name, name)
                continue
            except Exception as error:
                of = f", for {loader}" if loader else ""
                error.add_note(f"while in the derived metric {name!r}{of}")
                raise
            known.setdefault(name, found[name])
        return found

    return Middleware(f"derive({', '.join(functions)})", report=report)


def _apply(function: Callable[[Mapping[str, float]], object], numbers: Numbers) -> object:
    """Call a function; NaN if there is no value, so that a long run does not end for it."""
    __tracebackhide__ = True
    try:
        return function(numbers)
    except ArithmeticError:
        return math.nan
    except ValueError as error:
        if "math domain error" in str(error):
            return math.nan
        raise
