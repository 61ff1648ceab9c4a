"""What authors of middleware, hooks, parts of checkpoints and engines need besides fnloop itself.

    >>> import fnloop as fl
    >>> from fnloop import extend
    >>> @fl.middleware("gradient")
    ... def normalized():
    ...     '''Give the gradient the norm 1, over all parameters and all processes.'''
    ...     def wrap(step):
    ...         def scaled(state, batch):
    ...             state, out = step(state, batch)
    ...             grads = extend.gradients(state)
    ...             norm = extend.norm(grads)
    ...             for grad in grads:
    ...                 extend.local_part(grad).div_(norm)
    ...             return state, extend.report(out, {"norm": fl.Mean(norm, 1)}, "normalized")
    ...         return scaled
    ...     return wrap
    >>> from fnloop.testing import toy, toy_loss
    >>> import torch
    >>> state, out = fl.pipeline(normalized())(toy_loss)(toy(), torch.tensor([4.0]))
    >>> state.model.w.item(), out.metrics["norm"].compute()
    (-1.0, 4.0)

The middleware and hooks of fnloop are written with these names too. *Write an extension* is a page
of the book.

- **Weights and gradients**: `parameters`, `all_parameters`, `Chosen`, `gradients`, `norm`,
  `local_part`, `is_sharded`, `fsdp`
- **Which state owns the model**: `Ownership`
- **Optimizers**: `optimizers`, `groups`, `number_in`, `set_number`, `Setting`,
  `wants_closure`
- **Steps**: `PipelineStep`, `report`, `MissingNumberError`, `then`, `with_slot`, `set_aside`,
  `Backward`, `WeightedSum`, `host`
- **Tools that try a run, or repeat one**: `Rehearsal`
- **What is saved, and what readers see**: `Part`, `Saving`, `Restoring`, `Pending`, `View`, `view`
- **Processes**: `Backend`, `Engine`, `LocalEngine`, `WindowPass`, `GradientSum`, `engine_of`,
  `refuse`, `on_main_process`, `collectives`
- **Metrics, and stacks of models**: `Metrics`, `Running`, `Several`
- **Random numbers**: `isolated`, `fold_in`
- **Hooks, moments and the end of a run**: `BuiltIn`, `Wrapper`, `Moment`, `Clock`, `Stop`
- **Records**: `Fold`, `Monitored`, `better`, `mode_of`
- **Arguments and messages**: `check_not_stale`, `checks`, `reprs`, `tables`, `name_of`, `Call`,
  `warn_once`, `short_traceback`
- **Loaders**: `Reader`, `Pass`, `Source`
- **Nested batches, files, and torch**: `containers`, `disk`, `torch_compat`
- **Types**: `Batch`, `Metric`, `Wrap`
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend import collectives, containers, fsdp, torch_compat
from fnloop._backend.collectives import on_main_process
from fnloop._backend.fsdp import is_sharded, local_part
from fnloop._backend.processes import Backend
from fnloop._core import rng
from fnloop._core.history import Fold, Monitored, mode_of
from fnloop._core.metrics import Metrics, Running
from fnloop._core.optimizers import Group, labelled_groups, optimizers_in, wants_closure
from fnloop._core.parts import Part, Restoring, Saving
from fnloop._core.records import better
from fnloop._core.rng import fold_in, isolated
from fnloop._core.runs import Stop
from fnloop._core.saved import Pending
from fnloop._core.selectors import Chosen
from fnloop._core.settings import Setting, number_in, set_number
from fnloop._core.several import Several
from fnloop._core.state import (
    Ownership,
    TrainState,
    all_parameters,
    check_not_stale,
    parameters,
    with_note,
    with_slot,
    with_used,
)
from fnloop._core.types import Batch, Call, Metric, View, Wrap, name_of
from fnloop._core.view import view
from fnloop._data.position import Pass
from fnloop._data.reader import Reader
from fnloop._data.source import Source
from fnloop._display import checks, reprs
from fnloop._display.frames import short_traceback
from fnloop._display.screen import warn_once
from fnloop._extensions import tables
from fnloop._hooks.hook import BuiltIn, Clock, Moment, Wrapper
from fnloop._loop.rehearsal import Rehearsal
from fnloop._step.engine import (
    Backward,
    Engine,
    GradientSum,
    LocalEngine,
    WindowPass,
    engine_of,
    refuse,
)
from fnloop._step.gradients import WeightedSum, norm, set_aside
from fnloop._step.pipeline import PipelineStep
from fnloop._step.reported import MissingNumberError, report
from fnloop._step.transaction import host, then

__docformat__ = "google"
__all__ = [
    "Backend",
    "Backward",
    "Batch",
    "BuiltIn",
    "Call",
    "Chosen",
    "Clock",
    "Engine",
    "Fold",
    "GradientSum",
    "LocalEngine",
    "Metric",
    "Metrics",
    "MissingNumberError",
    "Moment",
    "Monitored",
    "Ownership",
    "Part",
    "Pass",
    "Pending",
    "PipelineStep",
    "Reader",
    "Rehearsal",
    "Restoring",
    "Running",
    "Saving",
    "Setting",
    "Several",
    "Source",
    "Stop",
    "View",
    "WeightedSum",
    "WindowPass",
    "Wrap",
    "Wrapper",
    "all_parameters",
    "better",
    "check_not_stale",
    "checks",
    "collectives",
    "containers",
    "engine_of",
    "fold_in",
    "fsdp",
    "gradients",
    "groups",
    "host",
    "is_sharded",
    "isolated",
    "local_part",
    "mode_of",
    "name_of",
    "norm",
    "number_in",
    "on_main_process",
    "optimizers",
    "parameters",
    "refuse",
    "report",
    "reprs",
    "rng",
    "set_aside",
    "set_number",
    "short_traceback",
    "tables",
    "then",
    "torch_compat",
    "view",
    "wants_closure",
    "warn_once",
    "with_note",
    "with_slot",
]


def gradients(state: TrainState) -> list[Tensor]:
    """Return the gradients of the parameters that the optimizers update, where there are any.

    They are ``p.grad`` itself, so what changes them in place changes the update. Under
    ``fully_shard`` each is a DTensor: :func:`local_part` is what this process holds of it.

    Args:
        state: the state, in the gradient ring after the step inside has returned.

    Returns:
        The gradients, in the order of :func:`parameters`.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import spy, toy
        >>> state, out = spy(grad=4.0)(toy(), torch.ones(1))
        >>> gradients(state)
        [tensor(4.)]
    """
    return [p.grad for p in parameters(state) if p.grad is not None]


def optimizers(state: TrainState, *, used: bool = False) -> Mapping[str, Optimizer]:
    """Return the optimizers of a state by name. One alone has the name "".

    Args:
        state: the state.
        used: whether to leave out those that rest in the step that is running; see
            :func:`fnloop.using`.

    Returns:
        Name to optimizer, in the order in which they update.

    Example:
        >>> from fnloop.testing import toy
        >>> [*optimizers(toy())]
        ['']
    """
    return optimizers_in((with_used(state) if used else state).optimizer)


def groups(state: TrainState) -> Mapping[str, Group]:
    """Return the parameter groups of all optimizers, by the end of their names in records.

    That is "" for the first group of the only optimizer, "/1" for the second, "/head" for one with
    ``group["name"] = "head"``, and "/rest/1" where there are several optimizers.

    Args:
        state: the state.

    Returns:
        The end of a name to the group.

    Example:
        >>> from fnloop.testing import toy
        >>> {f"lr{end}": group["lr"] for end, group in groups(toy(lr=0.5)).items()}
        {'lr': 0.5}
    """
    return labelled_groups(optimizers_in(state.optimizer))


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
