"""Hooks to look into a run: outputs, numbers, curves, profiles."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from torch import Tensor, profiler

from fnloop._backend.collectives import broadcast
from fnloop._core.history import History
from fnloop._core.records import Record
from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop._extensions.histories import figures
from fnloop._extensions.histories.curves import check_plot
from fnloop._hooks.hook import Hook
from fnloop._hooks.hook import every as periodically
from fnloop.extend import (
    BuiltIn,
    Call,
    Moment,
    Stop,
    checks,
    engine_of,
    fold_in,
    is_sharded,
    isolated,
    name_of,
    on_main_process,
    reprs,
    rng,
    tables,
    view,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Number = float | Tensor  # of a function of the user's own
# What a hook notes: that it waits for an evaluation, and that its function was called here.
WAITS, RAN = "waits", "ran"

# --------------------------------------------------------------------------------------------------
# Look at what a step returns in an evaluation, for what a number cannot say.


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class inspect(BuiltIn):
    """Call a function with the outputs of an evaluation, one for each batch.

    Use it for what is not a mean over batches: an average precision, a confusion matrix, pictures
    of the worst samples. Numbers that the function returns join the record of that evaluation. It
    uses the evaluations that the run makes anyway. If the hook is due and the loader is not
    evaluated, it waits for the next evaluation. The loader is evaluated once more only if the hook
    is due ``at_end()`` and the run ends without evaluating this loader, or because another hook has
    stopped it after an evaluation. The same happens if a run was cut before the function was
    called: the outputs are not saved, and those of the second evaluation are the same.

    Args:
        fn: ``(state, outputs) -> None``, or ``-> {"ap": 0.5}``, which is "valid/ap" in the record.
            It is called once, before the record is appended. ``state.history[-1]`` is the record as
            it is so far. The list has one ``Output`` per batch.
        loader: the name of a loader that is evaluated.
        every: when the hook is due. Other evaluations keep nothing.
        reports: the names of the numbers, such as ``("ap",)``. With it ``early_stop("valid/ap")``,
            ``checkpoint(best="valid/ap")`` and others know them before the first update.

    Returns:
        A hook.

    Raises:
        TypeError: an argument has the wrong type. In a run: ``fn`` returned something other than
            None or a mapping of numbers, or returned numbers within another hook.
        ValueError: in a run: the record has a number of that name already, or ``fn`` did not return
            what ``reports`` names.
        KeyError: when a run starts: the loader is not evaluated.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> def loss_fn(model, batch):
        ...     x, target = batch
        ...     score = model(x)
        ...     return (score - target).square().mean(), {"score": score, "target": target}
        >>> def confusion(state, outputs):
        ...     predicted = torch.cat([out.aux["score"] for out in outputs]) > 0
        ...     target = torch.cat([out.aux["target"] for out in outputs]) > 0
        ...     print([[int((predicted[target == t] == p).sum()) for p in (0, 1)] for t in (0, 1)])
        >>> valid = [(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])),
        ...          (torch.tensor([-1.0]), torch.tensor([0.0]))]
        >>> step, state = fl.pipeline()(loss_fn), toy(w=1.0, lr=0.0)
        >>> state = fl.fit(step, state, (valid, valid), hooks=(inspect(confusion),))
        [[1, 1], [0, 1]]

        >>> def worst(state, outputs):
        ...     return {"worst": torch.cat([out.aux["score"] for out in outputs]).min()}
        >>> look = inspect(worst, reports=("worst",))
        >>> state = fl.fit(step, state, (valid, valid), epochs=2, hooks=(look,))
        >>> state.history["valid/worst"]
        (-1.0,)

    Notes:
        Each ``Output`` has the loss, the weight and the aux that the loss function returned, so
        return there what you want to see, such as the targets. Tensors are copies on the host, and
        ``metrics`` is empty. All outputs of the pass are in memory at once: keep aux small for a
        large loader.

        With several processes, each of them is given the outputs of all, in the order of the
        batches, and calls the function. The numbers of the main one are those of all. To call it on
        the main process only, write ``on_main(inspect(fn))``, and return no numbers.

        Within another hook, as in ``when_improved("valid/loss")(inspect(fn))``, the function is
        called after the record was appended, and cannot return numbers. Those that are due only
        because the run ends are in a closing record.

    Replaces: lightning.validation_step_outputs
    """

    fn: Callable[[TrainState, list[Output]], Mapping[str, Number] | None]
    loader: str = "valid"
    every: Moment = attrs.field(factory=lambda: periodically(epochs=1))
    said: Sequence[str] = attrs.field(default=(), alias="reports")

    def __attrs_post_init__(self) -> None:
        meaning = "a function (state, outputs) -> None or a mapping of numbers"
        checks.function("inspect", "fn", self.fn, meaning, 2)
        checks.text("inspect", "loader", self.loader, "the name of a loader")
        self.every = Moment.asked_first("inspect", self.every, f"inspect({name_of(self.fn)})")
        if not checks.is_list(self.said):
            raise TypeError(
                'inspect expects reports as a tuple of names without the loader, such as ("ap",); '
                f"got {checks.describe(self.said)}"
            )
        for name in self.said:
            checks.text("inspect", "reports", name, "names of numbers")
            if (short := name.removeprefix(f"{self.loader}/")) != name:
                raise ValueError(
                    f"inspect expects reports without the name of the loader; got {name!r}: write "
                    f"{short!r}"
                )
        self.said, self.moments = tuple(self.said), (self.every,)
        self.reports = tuple(f"{self.loader}/{name}" for name in self.said)
        self._alone = True  # whether it is within no other hook
        self._outputs: list[Output] | None = None  # of an evaluation, until the function is called
        self._late = False  # whether they are kept only because the run ends
        self._received_at: tuple[int, ...] | None = None  # where it was given the last ones

    def tried(self, place: Path) -> tuple[Hook, str]:
        """Return a hook that is due after each epoch."""
        return attrs.evolve(self, every=periodically(epochs=1)), ""

    def __repr__(self) -> str:
        given = {} if self.loader == "valid" else {"loader": self.loader}
        given |= {} if self.every == periodically(epochs=1) else {"every": self.every}
        given |= {"reports": self.said} if self.said else {}
        return repr(Call(inspect, (self.fn,), given))

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: check that the loader is evaluated in it.

        Raises:
            KeyError: it is not.
        """
        known = () if state.run is None else state.run.evaluated
        if self.loader not in known:
            names = f"those are: {', '.join(known)}" if known else "it evaluates none"
            hint = checks.suggestion(self.loader, known)
            if self.loader == "train":
                hint = '. To look at training data, give it to fit a second time: {"train": train, '
                hint += '"seen": train}'
            raise KeyError(
                f"inspect: the loader {self.loader!r} is not one that this run evaluates; {names}"
                f"{hint}"
            )
        return state

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise if it says that it has numbers, which it cannot add within another hook.

        Raises:
            TypeError: it does.
        """
        listed = hooks[self.place_in(hooks)]
        self._alone = listed is self
        if not {*self.reports} <= {*listed.reports}:
            raise TypeError(f"{self!r} {self._no_numbers()}")

    def _no_numbers(self) -> str:
        return (
            "is within another hook, which calls it after the record was made, so its numbers "
            "would be in none: list inspect(fn, every=...) by itself"
        )

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the outputs of the evaluation that begins are to be kept."""
        if loader != self.loader:
            return False
        if "end" in state.events and self._has_seen_end(state):
            return False
        waits = self.has_noted(state, WAITS)
        due, only_at_end = self.every.due_here(state)
        self._late = only_at_end and not (waits or due)
        return waits or due or self._late

    def _has_seen_end(self, state: TrainState) -> bool:
        """Return whether it has the outputs of the model with which the run ends."""
        if self._is_given(state) or self.has_noted(state, RAN):
            return True
        # The function was called for the closing record, maybe elsewhere.
        return self._alone and self._was_evaluated(state) and state.history[-1].closing

    def _was_evaluated(self, state: TrainState) -> bool:
        """Return whether a record of this boundary has the loader evaluated."""
        if "record" not in state.events:
            return False
        here = itertools.takewhile(
            lambda r: (r.step, r.epoch) == (state.step, state.epoch), reversed(state.history)
        )
        return any(name.startswith(f"{self.loader}/") for r in here for name in r.metrics)

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation."""
        self._outputs, self._received_at = list(outputs), _place_of(state)

    def numbers(self, state: TrainState) -> Mapping[str, float]:
        """Call the function. Return what it returned, with the name of the loader.

        Late outputs are for a closing record.

        Raises:
            TypeError: it returned something else than None or a mapping of numbers.
            ValueError: a number is missing that ``reports`` names.
        """
        __tracebackhide__ = True
        if self._outputs is None or (self._late and not state.history[-1].closing):
            return {}
        outputs, self._outputs = self._outputs, None
        found = self.fn(state, outputs)
        numbers = {} if found is None else read_numbers(repr(self), self.loader, found)
        if missing := [name for name in self.reports if name not in numbers]:
            raise ValueError(
                f"{self!r} reports {missing[0]!r}, but its function returned "
                f"{checks.join_names([*numbers]) or 'no number'}. Where there is none, return nan"
            )
        return broadcast(numbers)

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        given, ends = self._is_given(state), "end" in state.events
        for_end = "end" in self.every.outside
        if given or self._was_evaluated(state):
            if for_end and not (ends or self._late):
                ran = given or self.has_noted(state, WAITS)  # the second in another process
                if not ran and not self.every.clocks:  # a clock is asked once
                    ran = self.every.due(state)
                state = self.note(state, RAN, 1.0 if ran else None)
            state = self.note(state, WAITS, None)
        elif not (ends and for_end) and self.every.due(state):
            state = self.note(state, WAITS)
        if self._late and not ends:
            return state  # the end of the run comes after this boundary
        return self._show(state)

    def _is_given(self, state: TrainState) -> bool:
        """Return whether it was given the outputs of this boundary."""
        return self._received_at == _place_of(state)

    def poll(self, state: TrainState) -> TrainState:
        """Drop what was kept: a wrapper has decided that the hook is not called."""
        self._outputs, self._received_at = None, None
        return self.note(state, WAITS, None) if self._was_evaluated(state) else state

    def flush(self, state: TrainState) -> TrainState:
        """Call the function, if there are outputs. Drop those of an evaluation that was cut."""
        __tracebackhide__ = True
        return state if Stop.interrupts(state.stop) else self._show(state)

    def _show(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        if (outputs := self._outputs) is not None:
            self._outputs = None
            if self.fn(state, outputs) is not None:
                raise TypeError(f"{self!r} {self._no_numbers()}")
        return state

    def close(self) -> None:
        """Drop what was kept."""
        self._late, self._outputs, self._received_at = False, None, None


def _place_of(state: TrainState) -> tuple[int, int, int, int]:
    """Return what tells a boundary of a run from any other."""
    return state.step, state.skipped, state.epoch, state.batch


# --------------------------------------------------------------------------------------------------
# Numbers that a function of the user's own measures: by generation, or of a converted model.


def read_numbers(owner: str, prefix: str, given: object) -> dict[str, float]:
    """Return what a function of the user's own returned as numbers of a record, by their names.

    Args:
        owner: the hook, for messages.
        prefix: what the names begin with.
        given: what the function returned. Tensors are read from the device.

    Raises:
        TypeError: it is not a mapping from names to numbers.
        ValueError: a name is empty.
    """
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{owner}: its function must return a mapping from names to numbers, such as "
            f'{{"ap": 0.5}}; it returned {checks.describe(given)}'
        )
    for name in given:
        checks.text(owner, "the names of numbers", name, "the names of metrics")
    return {
        f"{prefix}/{name}": float(checks.scalar(owner, f"the number {name!r}", value))
        for name, value in given.items()
    }


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class measure(BuiltIn):
    """Measure a model with your own function, and add the numbers to the record.

    Use it for what an evaluation of batches cannot measure: a score of generated text, or the
    accuracy of a converted model. The record is that of the evaluation at the same moment; if there
    is none, one is made, with these numbers alone. So what watches other metrics, such as
    ``plateau("train/loss")``, decides as it would without this hook. Every name that begins with
    that of the hook is known before the first update, so ``early_stop("bleu/score", mode="max")``
    can watch it.

    The function is called as an evaluation is made: the model is in evaluation mode, without
    gradients. Afterwards buffers, modes and all random generators are as they were before. What it
    draws is a function of the seed of the state.

    Args:
        fn: ``state -> {"score": 0.5}``, which is "bleu/score" in the record with ``name="bleu"``.
            It is called once, before the record is appended. ``state.history[-1]`` is the record as
            it is so far.
        name: what the names of its numbers begin with; not the name of a loader.
        every: when it is due. It takes all that ``evaluate_every`` takes, such as ``at_start()``.
        everywhere: whether every process calls the function. Otherwise the main process does, while
            the others wait. The numbers of the main process are those of all.

    Returns:
        A hook.

    Raises:
        TypeError: an argument has the wrong type. When a run starts: it is within another
            hook. In a run: ``fn`` did not return a mapping of numbers.
        ValueError: the name has a slash, or is "train" or "recent". When a run starts: it is that
            of a loader or of another ``measure``; or the model is sharded, and not
            ``everywhere=True``.
        RuntimeError: in a run, on the other processes: ``fn`` failed on the main one.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def doubled(state):
        ...     return {"output": state.model(torch.tensor(2.0))}
        >>> hook = measure(doubled, name="two", every=fl.at_start() | fl.every(epochs=1))
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 3
        >>> state = fl.fit(step, toy(), batches, epochs=2, hooks=(hook,))
        >>> state.history["two/output"]                                 # w is 0, -3 and -6
        (0.0, -6.0, -12.0)

    Notes:
        With ``ema`` or ``swa`` the model has the weights that are trained. To measure the average,
        use ``fl.averaged(state).model`` in the function. With several processes, a function that
        calls ``fl.evaluate`` or ``fl.predict`` needs all of them: ``everywhere=True``.

    Replaces: transformers.predict_with_generate
    """

    fn: Callable[[TrainState], Mapping[str, Number]]
    name: str = attrs.field(kw_only=True)
    every: Moment = attrs.field(factory=lambda: periodically(epochs=1), kw_only=True)
    everywhere: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks.function("measure", "fn", self.fn, "a function state -> a mapping of numbers", 1)
        checks.text("measure", "name", self.name, "what the names of its numbers begin with")
        if "/" in self.name or self.name in Record.TRAINED:
            why = "without a slash" if "/" in self.name else "that is free"
            raise ValueError(f"measure expects name as a name {why}; got {self.name!r}")
        shown = repr(Call(measure, (self.fn,), {"name": self.name}))
        self.every = Moment.asked_first("measure", self.every, shown)
        checks.flag("measure", "everywhere", self.everywhere, "whether every process calls fn")
        self.makes_records = {self.name: self.every}

    def __repr__(self) -> str:
        given: dict[str, object] = {"name": self.name}
        given |= {} if self.every == periodically(epochs=1) else {"every": self.every}
        given |= {"everywhere": True} if self.everywhere else {}
        return repr(Call(measure, (self.fn,), given))

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: check that the main process can call the model alone.

        Raises:
            ValueError: it cannot, because each process has a part of the weights.
        """
        if is_sharded(state.model) and not self.everywhere:
            raise ValueError(
                f"{self!r} would call the model on the main process only, but each process has a "
                f"part of its weights: write measure(..., everywhere=True)"
            )
        return state

    def numbers(self, state: TrainState) -> Mapping[str, float]:
        """Call the function. Return its numbers, with the name of the hook."""
        __tracebackhide__ = True
        # In every process: they may exchange weights.
        with isolated(state.backend.device), view(state, "evaluation"):
            rng.seed_all(fold_in(state.seed, rng.COMPUTE))
            if not self.everywhere:
                return on_main_process(functools.partial(self._measured, state), repr(self))
            engine_of(state).share_buffers(state.model)
            return broadcast(self._measured(state))

    def _measured(self, state: TrainState) -> dict[str, float]:
        __tracebackhide__ = True
        return read_numbers(repr(self), self.name, self.fn(state))

    def __call__(self, state: TrainState) -> TrainState:
        return state  # its numbers are in the record already


# --------------------------------------------------------------------------------------------------
# Plot the history while a run trains.

PAUSE = 9  # the least time between two drawings, as a multiple of the time that the first one took


class live_plot(BuiltIn):
    """Draw ``state.history.plot()`` at every record: in place in a notebook, or into a file.

    With ``fit(..., record_every=...)`` the curves grow within an epoch too. It uses only the
    history, so it reads nothing from the device. When there are several processes, the main one
    draws.

    Args:
        file: where to save the figure, in the format of its suffix (``"runs/a.png"``); None is the
            output of the cell.
        mode: "min" or "max", or a mapping from metrics to one of them, as in :meth:`History.plot`.
        x: the unit of the x axis, "step", "epoch" or "items".
        refresh: the least time between two drawings, in seconds; 0 draws every record. A drawing
            takes a fraction of a second. If it takes longer, because the history is very long, the
            hook waits longer too, and takes at most a tenth of the time. The last record of a run
            is always drawn.

    Returns:
        A hook.

    Raises:
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
        TypeError: file is not a path.
        ValueError: no file was given and this is not a notebook; or another argument is not one of
            its choices.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hook = live_plot(Path(folder, "run.png"))
        ...     state = fl.fit(step, toy(), batches, epochs=2, hooks=(hook,))
        ...     Path(folder, "run.png").read_bytes()[1:4]
        b'PNG'
    """

    untried = "it only shows the run"

    def __init__(
        self,
        file: str | os.PathLike[str] | None = None,
        *,
        mode: Mapping[str, str] | str | None = None,
        x: str = "step",
        refresh: float = 1.0,
    ) -> None:
        figures.require_matplotlib("live_plot")
        check_plot(mode, x)
        self._typed = file
        if file is not None:
            file = checks.folder_path("live_plot", "file", file, example="run.png")
            figures.check_file("live_plot", file)
        elif not reprs.in_notebook():
            raise ValueError(
                "live_plot() draws in a notebook, and this is not one. To draw into a file, write "
                "live_plot('run.png')"
            )
        refresh = checks.number(
            "live_plot", "refresh", refresh, "the seconds between two drawings", least=0
        )
        self.file, self.mode, self.x, self.refresh = file, mode, x, refresh
        self._output = tables.Display()
        self._pending: History | None = None  # not drawn yet
        self._drawn: History | None = None
        self._next = 0.0

    def __repr__(self) -> str:
        given = {"mode": self.mode, "x": self.x, "refresh": self.refresh}
        changed = {k: v for k, v in given.items() if v != {"x": "step", "refresh": 1.0}.get(k)}
        return repr(Call(live_plot, (str(self._typed),) if self.file else (), changed))

    def __call__(self, state: TrainState) -> TrainState:
        self._take(state)
        if self._pending is not None and time.monotonic() >= self._next:
            self._draw()
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Draw the last record."""
        self._take(state)
        self._draw()
        return state

    def close(self) -> None:
        """Draw what is pending, if that is possible, and release the output."""
        with contextlib.suppress(Exception):  # do not mask the exception that ended the run
            self._draw()
        self._output, self._pending, self._drawn, self._next = tables.Display(), None, None, 0.0

    def _take(self, state: TrainState) -> None:
        """Note that the history is to be drawn, if it is new."""
        if state.backend.rank == 0 and state.history is not self._drawn and state.history.keys():
            self._pending = state.history

    def _draw(self) -> None:
        if self._pending is None:
            return
        began = time.monotonic()
        history, self._pending = self._pending, None
        self._drawn = history
        figure = history.plot(mode=self.mode, x=self.x)
        if self.file is None:
            self._output.show(figure)
        else:
            _save(figure, self.file)
        now = time.monotonic()
        pause = max(self.refresh, PAUSE * (now - began)) if self.refresh else 0.0
        self._next = now + pause


def _save(figure: Figure, file: Path) -> None:
    """Save a figure. A reader of the file always finds a complete one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.stem}.unfinished{file.suffix}")
    figure.savefig(unfinished)
    os.replace(unfinished, file)


# --------------------------------------------------------------------------------------------------
# Profile some updates of a run with torch's profiler.

ROWS = 15  # of the table


class profiled(BuiltIn):
    """Profile some updates with ``torch.profiler``: a trace, and a table of what takes longest.

    It measures ``updates`` updates of this process, after the first ``start`` ones: with what comes
    between them, such as loading, hooks and evaluations. Then it writes a trace, and the main
    process prints a table of the operators that took longest. If the run ends earlier, even by an
    exception, they cover the updates that were made. All other updates are not measured, and cost
    nothing. The trace is a file such as ``updates-11-to-20-rank-0.pt.trace.json``, one for each
    process; open it in chrome://tracing, https://ui.perfetto.dev or TensorBoard.
    ``on_main(profiled(...))`` measures the main process only. It changes no number.

    Args:
        start: the updates before those that are measured, at least 1. The profiler warms up in the
            last of them.
        updates: how many updates are measured, at least 1. Long traces are slow to open.
        folder: where to write; created if it does not exist. A trace of the same name is replaced.

    Returns:
        A hook.

    Raises:
        ValueError: a number is below 1.
        TypeError: folder is not a path.

    Example:
        >>> import contextlib, io, os, tempfile, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 5
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with contextlib.redirect_stdout(io.StringIO()) as table:
        ...         hooks = (profiled(start=1, updates=2, folder=folder),)
        ...         state = fl.fit(step, toy(), batches, hooks=hooks)
        ...     os.listdir(folder), "Self CPU" in table.getvalue()
        (['updates-2-to-3-rank-0.pt.trace.json'], True)

    Source: https://docs.pytorch.org/docs/stable/profiler.html

    Replaces: accelerate.profile
    """

    def __init__(
        self, start: int = 10, updates: int = 10, *, folder: str | os.PathLike[str]
    ) -> None:
        meaning = "the updates before those that are measured"
        self.start = checks.integer("profiled", "start", start, meaning)
        self.updates = checks.integer(
            "profiled", "updates", updates, "the updates that are measured"
        )
        self._path, self.folder = checks.folder_path("profiled", "folder", folder), folder
        self._done: int | None = None  # the updates of this process; None outside of a run
        self._tried = 0  # the updates that were tried before the last boundary, in the run
        self._measured: profiler.profile | None = None

    def __repr__(self) -> str:
        given = {"start": self.start, "updates": self.updates}
        given = {name: value for name, value in given.items() if value != 10}
        return repr(Call(profiled, (), {**given, "folder": os.fspath(self.folder)}))

    def tried(self, place: Path) -> tuple[Hook, str]:
        """Return a hook that writes to another folder."""
        return profiled(self.start, self.updates, folder=place), "folder"

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: count its updates from here."""
        self._backend, self._tried, self._done = state.backend, state.step + state.skipped, 0
        self._path.mkdir(parents=True, exist_ok=True)
        self._start_or_stop(0)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        tried = state.step + state.skipped
        if self._done is not None and tried > self._tried:
            self._tried, self._done = tried, self._done + 1
            if self._measured is not None:
                self._measured.step()
            self._start_or_stop(self._done)
        return state

    def close(self) -> None:
        """Write what was measured, if the run ends before all was."""
        if self._done is not None and self._measured is not None:
            self._stop(self._measured, self._done)
        self._done = None

    def _start_or_stop(self, done: int) -> None:
        if done == self.start - 1:
            plan = profiler.schedule(wait=0, warmup=1, active=self.updates + 1, repeat=1)
            self._measured = profiler.profile(schedule=plan, acc_events=True)  # or older ones warn
            self._measured.start()
        elif done == self.start + self.updates and self._measured is not None:
            self._stop(self._measured, done)

    def _stop(self, measured: profiler.profile, done: int) -> None:
        """Write the trace, and print the table on the main process."""
        self._measured, backend = None, self._backend
        measured.stop()
        if done <= self.start:
            return  # it was still warming up
        path = self._path / f"updates-{self.start + 1}-to-{done}-rank-{backend.rank}.pt.trace.json"
        measured.export_chrome_trace(str(path))
        if backend.rank == 0:
            by = "cpu" if backend.device.type == "cpu" else "device"
            found = measured.key_averages()
            print(found.table(sort_by=f"self_{by}_time_total", row_limit=ROWS), flush=True)
            print(f"trace: {path}", flush=True)
