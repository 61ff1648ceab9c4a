"""Search among runs by successive halving: the better part of them continues."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

import attrs

from fnloop._backend.collectives import broadcast
from fnloop._core.history import History
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Step
from fnloop._extensions.checkpoints.restore import resume_at
from fnloop._extensions.hooks.keep import checkpoint
from fnloop._extensions.middleware.schedule import schedule
from fnloop._extensions.stacks.states import stack, unstack
from fnloop._hooks.hook import Hook, every
from fnloop._loop.fit import run
from fnloop._step.pipeline import pipeline
from fnloop.extend import (
    BuiltIn,
    PipelineStep,
    Reader,
    Stop,
    better,
    check_not_stale,
    checks,
    mode_of,
    reprs,
    short_traceback,
    tables,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAINT = "0.8"  # the colour of runs that were left out early
OWNER, EXAMPLE = "search", "such as fork(state, {'lr': [0.1, 0.01]})"
Maker = Callable[[], TrainState]
Source = TrainState | Maker
HookFn = Hook | Callable[[TrainState], TrainState]


@attrs.frozen
class Rung:
    """A run that has come to a rung.

    Args:
        name: the name of the run.
        epoch: the epochs of the rung.
        value: the metric there.
        seconds: what this rung took.
        best: whether no run before it was better at this rung.
    """

    name: str
    epoch: int
    value: float
    seconds: float
    best: bool


@attrs.frozen(repr=False)
class Search(tables.Shown):
    """What :func:`search` has found: a table, also in a notebook; ``plot()`` draws all runs.

    Args:
        best: the name of the best run.
        state: its state, at the last rung.
        histories: the history of every run, by name, as far as it came.
        rungs: what was measured, in order.
        key: the metric.
    """

    best: str
    state: TrainState
    histories: Mapping[str, History]
    rungs: tuple[Rung, ...]
    key: str

    def _parts(self) -> Sequence[str | tables.Table]:
        return [_table(self.rungs, self.key), f"best: {self.best}"]

    def plot(self) -> Figure:
        """Draw the metric of all runs: those that were left out early as faint lines.

        Returns:
            A matplotlib Figure; ``figure.savefig("search.png")`` writes it.

        Raises:
            ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
        """
        from fnloop._extensions.histories import figures

        figure, (axis,) = figures.panels("Search.plot", [figures.LARGE])
        last = {rung.name for rung in self.rungs if rung.epoch == self.rungs[-1].epoch}
        colors = dict(zip(last, figures.palette("Search.plot", len(last)), strict=True))
        curves = []
        for name in sorted(self.histories, key=last.__contains__):  # the others are below
            having = [r for r in self.histories[name].having(self.key) if not r.closing]
            points = [(record.step, record.metrics[self.key]) for record in having]
            label = name if name in last else ""
            curves.append(figures.Curve(points, label, colors.get(name, FAINT)))
        figures.draw(axis, self.key, "step", curves, ())
        return figure


@short_traceback
def search(
    steps: Step | Mapping[str, Step],
    states: Mapping[str, Source],
    loaders: object,
    *,
    rungs: Sequence[int] = (1, 3, 9),
    keep: float = 1 / 3,
    key: str = "valid/loss",
    mode: str | None = None,
    folder: str | Path | None = None,
    hooks: Sequence[HookFn] = (),
    stacked: bool = False,
) -> Search:
    """Train many states for a short time, the better ones longer, and the best to the end.

    This is successive halving. All runs train to the first rung. The best ``keep`` of them, and at
    least one, continue to the next from where they are, and so on. The winner equals the same run
    trained alone, ``fit(..., epochs=9)``, bit for bit: its schedules see the length of the whole
    run from the beginning.

    Args:
        steps: the step of all runs; or a mapping from their names to one each.
        states: the states to begin with, by name: of ``fork``, or your own. Instead of a state, a
            function that returns a new one, so that memory holds one of them at a time.
        loaders: as in ``fit``; with the loader of the metric.
        rungs: how many epochs a run has at each rung, in all; they grow.
        keep: the part of the runs that continues after a rung, above 0 and below 1.
        key: the metric that ranks the runs.
        mode: "min" or "max"; None: what the name of the metric says. NaN is worse than anything.
        folder: where checkpoints of the runs are kept, in a folder for each. A search that is
            killed and started again with the same arguments continues from them. None: states stay
            in memory, and those of functions wait in a temporary folder.
        hooks: the hooks of each run. A run that one of them stops keeps its last value, and is not
            trained any further.
        stacked: whether the remaining runs train at once, as in :func:`fnloop.stack`: K small
            models take little longer than one. Then memory holds all of them, a run equals one that
            is trained alone up to rounding, and hooks see the stack: its metrics are
            "valid/<name>/loss", and a hook that stops it stops all. Steps may differ in their
            ``schedule`` only.

    Returns:
        The best run, with its state and the histories of all: :class:`Search`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no state, rungs do not grow, or keep is out of range; or a hook writes
            what belongs to one run (``checkpoint``, ``to_csv``, ``to_jsonl``, ``track``).
        NotImplementedError: with ``stacked``: the steps differ, or cannot train a stack.
        KeyError: a run has no such metric, before its first update; or steps and states have other
            names.
        KeyboardInterrupt: a run was interrupted: by Ctrl-C, a signal, or the end of its job's time.
            With ``folder``, the same call continues.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> states = fl.fork(toy(), {"lr": [0.1, 1.0, 0.5]})
        >>> loaders = {"train": [torch.ones(1)] * 2, "valid": [torch.ones(1)]}
        >>> found = search(fl.pipeline()(toy_loss), states, loaders, rungs=(1, 3), keep=0.4)
        epoch  run     valid/loss  time
            1  lr=0.1    -0.2000*  ...
            1  lr=1      -2.0000*  ...
            1  lr=0.5    -1.0000   ...
            3  lr=1      -6.0000*  ...
        >>> found.best, found.state.epoch, len(found.histories["lr=0.1"])
        ('lr=1', 3, 1)

    Notes:
        With several processes, each calls this, and all rank by the same numbers. What a run needs
        beyond a state, such as a table of its own, is a hook that looks at ``state.run_id``.

    Source: Jamieson and Talwalkar, 2016, https://arxiv.org/abs/1502.07943
    """
    rungs, keep = _check(states, rungs, keep)
    checks.flag(OWNER, "stacked", stacked, "whether all runs that are left train at once")
    chosen = mode_of(OWNER, checks.text(OWNER, "key", key, "a metric"), mode)
    made = _steps(steps, states)
    _check_hooks(hooks)
    with _kept_in(folder, states) as kept:
        training = _Training(loaders, rungs[-1], hooks, key, kept)
        trials = {name: _Trial(name, made[name], states[name], training) for name in states}
        found, growing, left = list[Rung](), _Growing([*states], key), [*trials.values()]
        for epoch in rungs:
            began = time.monotonic()
            if stacked:
                _train_together(left, epoch, training)
            share = (time.monotonic() - began) / len(left)
            values: dict[str, float] = {}  # of this rung
            for trial in left:
                began = time.monotonic()
                value = _value(trial.train_to(epoch), trial.name, key, epoch)
                is_best = all(better(value, other, chosen) for other in values.values())
                values[trial.name] = value
                seconds = time.monotonic() - began + share
                found.append(Rung(trial.name, epoch, value, seconds, is_best))
                growing.show(found, trial.is_main)
            left = _best_of(left, values, chosen, keep, last=epoch == rungs[-1])
        (best,) = left
        histories = {name: trial.history for name, trial in trials.items()}
        return Search(best.name, best.state(), histories, tuple(found), key)


# --------------------------------------------------------------------------------------------------
# A run of the search.


class _Watched(Hook):
    """A hook that does nothing but name metrics, which are then refused before the first update."""

    __name__ = OWNER  # in messages about its metrics

    def __init__(self, *keys: str) -> None:
        self.monitors = keys

    def __call__(self, state: TrainState) -> TrainState:
        return state


@attrs.frozen
class _Training:
    """How all runs are trained.

    Args:
        loaders: the loaders.
        epochs: the epochs of a whole run.
        hooks: the hooks of the user.
        key: the metric that ranks the runs.
        folder: the folder of all runs; None: states stay in memory.
    """

    loaders: object
    epochs: int
    hooks: Sequence[HookFn]
    key: str
    folder: Path | None

    def restored(self, name: str, state: TrainState) -> TrainState:
        """Return what was saved under a name, or the state itself if nothing was."""
        if self.folder is None:
            return state
        return resume_at(self.folder / name, state, nonfinite=True)  # one that diverged has lost

    def train(
        self, step: PipelineStep, state: TrainState, epoch: int, name: str, keys: Sequence[str],
        what: str,
    ) -> TrainState:  # fmt: skip
        """Return a state that was trained to an epoch, if it is not there yet.

        Args:
            step: the step.
            state: the state.
            epoch: the epoch.
            name: that of its folder in the folder of all runs.
            keys: the metrics that the run has to have.
            what: which run it is, for messages.

        Raises:
            KeyboardInterrupt: it was interrupted.
        """
        if not _is_left(state, epoch):
            return state
        hooks = _with(self.hooks, _Watched(*keys))
        if self.folder is not None:
            hooks = _with(hooks, every(epochs=1)(checkpoint(self.folder / name, keep=1)))
        reached = run(step, state, self.loaders, epochs=self.epochs, hooks=hooks)
        states = cast("Generator[TrainState]", reached)
        with Reader.unmoved(self.loaders), contextlib.closing(states):
            for state in states:
                if Stop.interrupts(state.stop):
                    why = f"was interrupted at step {state.step} ({state.stop})"
                    states.throw(KeyboardInterrupt(f"search: {what} {why}"))
                if state.epoch >= epoch:
                    break
        return state


class _Trial:
    """A run of the search, which trains from rung to rung.

    A state that was given stays in memory. One that a function makes waits in a checkpoint, and is
    made and restored when its turn comes.

    Args:
        name: its name.
        step: its step.
        source: its first state, or what makes it.
        training: how it is trained.
    """

    def __init__(self, name: str, step: PipelineStep, source: Source, training: _Training) -> None:
        self.name, self.step, self._source, self._training = name, step, source, training
        self._state: TrainState | None = None  # where it is held in memory
        self.history, self.is_main = History(), True

    def state(self) -> TrainState:
        """Return the state as it is now."""
        if self._state is not None:
            return self._state
        made = self._source if isinstance(self._source, TrainState) else self._source()
        if not isinstance(made, TrainState):
            raise TypeError(
                f"search expects the function of {self.name!r} to return a TrainState; "
                f"got {checks.describe(made)}"
            )
        return self._training.restored(_name_of_folder(self.name), made)

    def train_to(self, epoch: int) -> History:
        """Train to a rung, if it is not there yet, and return the history."""
        state, training = self.state(), self._training
        self.is_main = state.backend.main
        folder, what = _name_of_folder(self.name), f"the run {self.name!r}"
        state = training.train(self.step, state, epoch, folder, [training.key], what)
        self.take(state)
        if training.folder is not None and not isinstance(self._source, TrainState):
            self.release()
        return self.history

    def take(self, state: TrainState) -> None:
        """Take the state that the run has come to."""
        self._state, self.history = state, state.history

    def release(self) -> None:
        """Forget the state: it is saved, or the run does not continue."""
        self._state = None


def _is_left(state: TrainState, epoch: int) -> bool:
    """Return whether a run is still to be trained to a rung."""
    return state.epoch < epoch and not Stop.ends_run(state.stop)


def _with(hooks: Sequence[HookFn], hook: Hook) -> Sequence[HookFn]:
    """Return hooks and another one. What is not a tuple of hooks is refused by ``run``."""
    return (*hooks, hook) if checks.is_list(hooks) else hooks


# --- all that are left at once


def _train_together(trials: Sequence[_Trial], epoch: int, training: _Training) -> None:
    """Train the runs that have not come to a rung, stacked into one."""
    states = {trial.name: trial.state() for trial in trials}
    left = {trial.name: trial for trial in trials if _is_left(states[trial.name], epoch)}
    if not left:
        return
    folder, what = f"stacked to epoch {epoch}", f"a stack of {len(left)} runs"
    state = training.restored(folder, stack({name: states[name] for name in left}))
    step = joined_step({name: trial.step for name, trial in left.items()})
    loader, _, rest = training.key.partition("/")
    keys = [f"{loader}/{name}/{rest}" for name in left]
    state = training.train(step, state, epoch, folder, keys, what)
    for name, own_state in unstack(state).items():
        left[name].take(own_state)


def joined_step(steps: Mapping[str, PipelineStep]) -> PipelineStep:
    """Return one step for several runs, whose steps may differ in their schedules.

    Args:
        steps: name to step.

    Raises:
        NotImplementedError: they differ in something else.
    """
    (first_name, first), *others = steps.items()
    for name, step in others:
        mine, its = first.pipeline.middleware, step.pipeline.middleware
        pairs = [*itertools.zip_longest(mine, its)]
        of = (each.loss_fn or each for each in (first, step))
        differ = [(a, b) for a, b in pairs if a != b and not (_is_schedule(a) and _is_schedule(b))]
        if differ or len({*map(id, of)}) > 1:
            what = "have other loss functions"
            if differ:
                mine, its = ("nothing" if one is None else repr(one) for one in differ[0])
                what = f"differ, {mine} here and {its} there"
            raise NotImplementedError(
                f"search(stacked=True): the steps of {first_name!r} and {name!r} {what}. Runs that "
                "train at once may differ in their schedule only: leave stacked out"
            )
    listed: list[Middleware] = []
    for members in zip(*(step.pipeline.middleware for step in steps.values()), strict=True):
        distinct = [m for i, m in enumerate(members) if m not in members[:i]]
        if len(distinct) == 1:
            listed += distinct
            continue
        for member in distinct:
            call = member.call
            assert call is not None
            names = tuple(n for n, m in zip(steps, members, strict=True) if m == member)
            listed.append(schedule(*call.args, **{**call.kwargs, "only": names}))
    same = len(listed) == len(first.pipeline.middleware)
    return first if same else first.listing(pipeline(*listed).middleware)


def _is_schedule(member: Middleware | None) -> bool:
    """Return whether this is a schedule of all optimizers."""
    if member is None or member.call is None or member.call.factory is not schedule:
        return False
    bound = inspect.signature(member.call.factory).bind(*member.call.args, **member.call.kwargs)
    return bound.arguments.get("only") is None


@contextlib.contextmanager
def _kept_in(folder: str | Path | None, states: Mapping[str, Source]) -> Iterator[Path | None]:
    """Yield the folder of the runs: a temporary one if functions make states, or None."""
    if folder is not None:
        yield checks.folder_path(OWNER, "folder", folder)
    elif all(isinstance(source, TrainState) for source in states.values()):
        yield None
    else:
        with tempfile.TemporaryDirectory() as made:
            yield Path(broadcast(made))  # of several processes, that of the main one


# --------------------------------------------------------------------------------------------------
# Arguments, and the ranking.


def _name_of_folder(name: str) -> str:
    quoted = quote(name, safe="=,.+- ")
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted  # no folder of its own


def _check(states: object, rungs: object, keep: float) -> tuple[Sequence[int], float]:
    checks.mapping(OWNER, "states", cast("Mapping[str, object]", states), EXAMPLE)
    if not states:
        raise ValueError(f"search expects at least one state, {EXAMPLE}; got none")
    for name, source in cast("Mapping[str, object]", states).items():
        checks.text(OWNER, "states", name, "names of runs")
        checks.name_of_file(OWNER, "names in states", name, _name_of_folder(name))
        if isinstance(source, TrainState):
            check_not_stale(source, OWNER)
        elif not callable(source):
            raise TypeError(
                f"search expects a TrainState for {name!r}, or a function that makes one; "
                f"got {checks.describe(source)}"
            )
    if not checks.is_list(rungs):
        raise TypeError(
            f"search expects rungs as epochs that grow, such as (1, 3, 9); "
            f"got {checks.describe(rungs)}"
        )
    meaning = "the epochs of a rung"
    rungs = [checks.integer(OWNER, "rungs", n, meaning, wrong_type=TypeError) for n in rungs]
    if not rungs or any(a >= b for a, b in itertools.pairwise(rungs)):
        raise ValueError(f"search expects rungs that grow, such as (1, 3, 9); got {rungs}")
    keep = checks.number(OWNER, "keep", keep, "the part of the runs that continues", above=0)
    if keep >= 1:
        raise ValueError(f"search expects keep below 1, such as 1/3; got {keep}")
    return tuple(rungs), keep


def _steps(steps: object, states: Mapping[str, object]) -> Mapping[str, PipelineStep]:
    if not isinstance(steps, Mapping):
        return dict.fromkeys(states, PipelineStep.checked(steps, OWNER))
    if steps.keys() != states.keys():
        other = checks.join_names(sorted(map(str, steps.keys() ^ states.keys())))
        raise KeyError(f"search expects a step for each state, of its name; one lacks {other}")
    return {name: PipelineStep.checked(step, OWNER) for name, step in steps.items()}


def _check_hooks(hooks: Sequence[HookFn]) -> None:
    """Raise ValueError if a hook writes what belongs to one run."""
    for hook in BuiltIn.among(hooks if checks.is_list(hooks) else ()):
        if hook.is_of_one_run:
            raise ValueError(
                f"search: {hook!r} writes what belongs to one run, and all runs would share it: "
                'leave it out. search(..., folder="runs") keeps the checkpoints of each run in a '
                "folder of its own, and found.histories has all records"
            )


def _value(history: History, name: str, key: str, epoch: int) -> float:
    """Return the metric of a run at a rung; of a run that was stopped before it, the newest."""
    having = [record for record in history if key in record.metrics]
    if not having:
        raise KeyError(
            f"search: the run {name!r} has no metric {key!r} at epoch {epoch}; it has "
            f"{checks.join_names([*history.keys()]) or 'none'}"
        )
    reached = (record for record in having if record.epoch == epoch)
    return next(reached, having[-1]).metrics[key]


def _best_of(
    left: Sequence[_Trial], values: Mapping[str, float], mode: str, keep: float, last: bool
) -> list[_Trial]:
    """Return the runs that continue, in their order; after the last rung, the best one."""
    number = 1 if last else max(1, math.floor(len(left) * keep + 1e-9))

    def rank(trial: _Trial) -> tuple[bool, float]:
        value = values[trial.name]
        return (True, 0.0) if math.isnan(value) else (False, value if mode == "min" else -value)

    ranked = sorted(left, key=rank)
    for trial in ranked[number:]:
        trial.release()
    return [trial for trial in left if trial in ranked[:number]]


# --------------------------------------------------------------------------------------------------
# One table, which grows.


def _table(rows: Sequence[Rung], key: str, names: Sequence[str] = ()) -> tables.Table[Rung]:
    width = max((len(name) for name in names), default=1)
    columns = [
        tables.Column[Rung]("epoch", lambda row: str(row.epoch)),
        tables.Column[Rung]("run", lambda row: row.name, left=True, width=width),
        tables.Column[Rung](
            key,
            lambda row: reprs.format_metric(key, row.value),
            best=lambda row: row.best,
            width=9,
        ),
        tables.Column[Rung](
            "time", lambda row: tables.format_clock(row.seconds, row.seconds < 60), width=4
        ),
    ]
    return tables.Table(columns, rows)


class _Growing:
    """The table while it grows: in a notebook one output, elsewhere a line for each row.

    Args:
        names: the names of all runs.
        key: the metric.
    """

    def __init__(self, names: Sequence[str], key: str) -> None:
        self._names, self._key = names, key
        self._output = tables.Display() if reprs.in_notebook() else None
        self._fitted: tables.Table[Rung] | None = None

    def show(self, rows: Sequence[Rung], is_main: bool) -> None:
        """Show the rows, of which the last is new."""
        if not is_main:
            return
        if self._output is not None:
            table = _table(rows, self._key)
            self._output.show(tables.Rendered(table.html(), table.text()))
            return
        if self._fitted is None:
            self._fitted = _table(rows, self._key, self._names).fit()
            print(*map(reprs.printable, self._fitted.head()), sep="\n")
        print(reprs.printable(self._fitted.line(rows[-1])), flush=True)
