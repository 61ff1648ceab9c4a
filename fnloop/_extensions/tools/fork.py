"""Several runs from one state, with different settings of the optimizer."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor

from fnloop._core.state import TrainState, snapshot
from fnloop.extend import Setting, check_not_stale, checks, groups

EXAMPLE = '{"lr": [1e-3, 3e-4]}'


def fork(state: TrainState, settings: Mapping[str, Sequence[float]]) -> dict[str, TrainState]:
    """Return copies of a state, one for each combination of settings of its optimizer.

    Each is a separate run with its own ``run_id``, so its checkpoints need their own folder. The
    given state stays as it is.

    ``schedule`` multiplies the setting as the initial value. A scheduler of torch keeps the rate
    that it was made for: begin a phase, ``fit(..., phase="decay")``, which makes a new scheduler.

    Args:
        state: the newest state, or one from a checkpoint.
        settings: a key of the parameter groups to the numbers to try, which every group gets.

    Returns:
        Name to state. The names are those of the settings, such as "lr=0.001, momentum=0.9".

    Raises:
        StaleStateError: the state has been advanced.
        TypeError: the settings are not a mapping of lists.
        ValueError: there is no number to try, one is given twice, a learning rate is below 0, or a
            group has no such number.
        NotImplementedError: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> runs = fork(toy(), {"lr": [1.0, 0.5]})
        >>> step, ones = fl.pipeline()(toy_loss), [torch.ones(1)] * 2
        >>> for name, state in runs.items():
        ...     print(name, fl.fit(step, state, ones, hooks=()).model.w.item())
        lr=1 -2.0
        lr=0.5 -1.0
    """
    check_not_stale(state, "fork")
    checks.mapping("fork", "settings", settings, f"such as {EXAMPLE}")
    if not settings:
        raise ValueError(f"fork expects at least one setting, such as {EXAMPLE}; got none")
    for key, values in settings.items():
        _check(key, values, groups(state).values())
    made: dict[str, TrainState] = {}
    for values in itertools.product(*map(checks.plain, settings.values())):
        chosen = dict(zip(settings, values, strict=True))
        copied = attrs.evolve(snapshot(state), run_id=secrets.token_hex(8))
        for group in groups(copied).values():
            for key, value in chosen.items():
                Setting(group, key).begin_at(value)
        made[", ".join(f"{key}={value:g}" for key, value in chosen.items())] = copied
    return made


def _check(key: object, values: object, every: Iterable[Mapping[str, object]]) -> None:
    name = f"settings[{key!r}]"
    if not checks.is_list(values):
        raise TypeError(
            f"fork expects {name} as a list of numbers, such as {EXAMPLE}; got "
            f"{checks.describe(values)}"
        )
    for value in values:
        checks.number("fork", name, value, least=0 if key == "lr" else -math.inf)
    shown = [f"{value:g}" for value in values]
    if not shown or len({*shown}) < len(shown):
        raise ValueError(
            f"fork expects {name} as numbers that differ in their first six digits, which the "
            f"names of the states have; got {values!r}"
        )
    for group in every:
        known = [name for name in Setting.names(group) if _is_number(group[name])]
        if key not in known:
            raise ValueError(
                f"fork: the groups of the optimizer have no number {key!r}; they have "
                f"{checks.join_names(known)}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)
