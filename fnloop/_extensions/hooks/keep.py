"""Hooks that keep states: checkpoints on a disk, and the best weights."""

from __future__ import annotations

import copy
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._core.averages import Average
from fnloop._core.history import History
from fnloop._core.state import TrainState, unwrap
from fnloop._core.view import begin_again
from fnloop._extensions.checkpoints.files import SharedWrite
from fnloop._extensions.checkpoints.format import (
    COUNT,
    NUMBER,
    PARTS,
    Contents,
    check_shape,
)
from fnloop._extensions.checkpoints.partial import read_parts
from fnloop._extensions.checkpoints.place import place_at
from fnloop._extensions.checkpoints.retention import RunFolder
from fnloop._extensions.checkpoints.save import (
    check_saveable,
    collect_contents,
    metrics_here,
    position_of,
)
from fnloop._extensions.checkpoints.serialize import Json
from fnloop._extensions.checkpoints.shapes import forget_states, take_shapes
from fnloop._hooks.hook import Hook
from fnloop.extend import (
    BuiltIn,
    Call,
    Monitored,
    Ownership,
    checks,
    fsdp,
    local_part,
    mode_of,
    on_main_process,
    reprs,
    torch_compat,
    view,
    with_slot,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# The hook that saves a run while it trains.

HOOK = "the hook checkpoint"  # its name in messages about processes that wait


class checkpoint(BuiltIn):
    """Save a checkpoint: ``every(epochs=1)(checkpoint("runs/a", best="valid/loss"))``.

    List it after the other hooks, but before ``requeue``. A resumed run calls the hooks that are
    listed after it, which had not been called when it saved. With such hooks, the last state of a
    run is written twice. The state is also saved when a run ends, for any reason except an
    exception (see ``on_exception``), and on SIGUSR1. Each checkpoint is a folder such as
    ``step-00000812`` in ``folder``, which is either complete or absent. Pruning looks at the
    folder, so it also works after a resume. :func:`fnloop.resume` continues from the newest
    checkpoint. With several processes the main process writes; of a sharded model each process
    writes its own part.

    Args:
        folder: where to save; created if it does not exist. It is made absolute at once, with ``~``
            expanded. Or an address such as ``"s3://bucket/run"``: see below.
        keep: how many of the newest to keep, at least 1; None keeps all. The newest that is finite
            is kept too, so there may be one more: see below.
        best: a metric such as "valid/loss", of which the best checkpoints are kept too. A
            checkpoint between two evaluations has no value for this metric, so the state of the
            next evaluation is saved as well. NaN is never the best. The untrained model, if it is
            evaluated, counts if it is saved: ``(at_start() | every(epochs=1))(checkpoint(...))``.
        mode: "min" if lower is better, "max" if higher is; by default as the name of the metric
            says.
        keep_best: how many of the best to keep; at least 1.
        since: which are the best: those of each "phase", if the run has phases, or of the whole
            "run".
        background: copy the state, and write it while training continues. The copy is made in host
            memory, or first on the GPU if that has room for it, which takes milliseconds. At most
            one checkpoint is written at a time. An error is raised at the next boundary, and the
            end of the run waits for the writer. A checkpoint of a sharded model is complete at the
            boundary at which all processes have written; an exception before leaves it out.
        on_exception: also save when the run fails, as ``step-00000812-exception_ValueError``: the
            last consistent state, if there is one and it is not saved yet. The exception is raised
            as it is. In one process only.
        only: the parts to save, as in :func:`fnloop.save`; all of them by default. A run cannot be
            resumed from such a partial checkpoint: list two hooks, ``checkpoint("runs/a")`` and
            ``checkpoint("runs/a/best", best="valid/loss", only=("model",))``.
        named: metrics to put into the names, where they were measured: ``("valid/loss",)`` names
            ``step-00000812-valid-loss=0.4312``.

    Returns:
        A hook.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
        CheckpointError: when a run begins: another run has checkpoints in the folder, something in
            the state cannot be saved, or the optimizer cannot be restored exactly. When it saves:
            something that the run has put into the state cannot be saved.
        ImportError: the package for such addresses is not installed.
        OSError: when a run begins: an address cannot be read or written. When it saves: the disk is
            full, or a checkpoint could not be uploaded.
        RuntimeError: when it saves: the weights differ between processes. Nothing is saved then.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 4
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=2)(checkpoint(folder, keep=1))
        ...     state = fl.fit(step, fl.resume(folder, toy()), batches, steps=3, hooks=(saves,))
        ...     state = fl.fit(step, fl.resume(folder, toy()), batches, epochs=1, hooks=(saves,))
        ...     state.model.w.item(), fl.latest(folder).name
        (-4.0, 'step-00000004')

    Notes:
        A checkpoint says whether it is finite. It is not if there is NaN in the model, buffers
        included, in an average of weights, or in the state of the optimizer, or if there is inf in
        weights that are trained. Inf elsewhere is allowed: masks have it. Checkpoints that are not
        finite never push out the newest that is, are never the best, and are passed over by
        ``resume``, ``latest`` and ``best``. Those of older versions pass for finite.

        A folder belongs to one run (``state.run_id``). A run that was not resumed from it is
        refused before its first update, and nothing in the folder is touched. Before this update,
        all that is known to be saved is tried: what no checkpoint can hold is refused, by its place
        in the state. A tiny copy of an optimizer that is not torch's is saved, restored and
        updated; one that does not resume exactly is refused. Where that cannot be tried, a warning
        says so.

        An address is one of fsspec, such as ``"s3://bucket/run"``. It needs the extra ``remote``,
        and the package of the address, such as s3fs. A checkpoint is written to a local folder,
        then uploaded: its files first, its manifest last. So it is there whole or not at all. In
        the background, two checkpoints may be unfinished, and a save waits for the first of them. A
        request that fails is repeated for a minute. Then the error is raised at the next boundary.
        The local copy stays, the message names it, and the next ``resume`` on this machine uploads
        it. Local copies are in the folder ``FNLOOP_CACHE``, by default ``~/.cache/fnloop``, and are
        removed when they are uploaded. The machines of a run do not need to share this folder. Of a
        sharded model, each process uploads its own part.

    Replaces: lightning.ModelCheckpoint, keras.ModelCheckpoint,
    pytorch_accelerated.SaveTrainingStateCallback, fastnlp.CheckpointCallback
    """

    is_of_one_run = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int | None = 3,
        best: str | None = None,
        mode: str | None = None,
        *,
        keep_best: int = 1,
        since: str = "phase",
        background: bool = False,
        on_exception: bool = False,
        only: Sequence[str] | None = None,
        named: Sequence[str] = (),
    ) -> None:
        self._place, self._typed = place_at("checkpoint", "folder", folder), os.fspath(folder)
        self.folder = self._place.folder  # of an address, the local one, once the run is known
        if keep is not None:
            keep = checks.integer(
                "checkpoint", "keep", keep, "a number of checkpoints, or None for all"
            )
        self.keep = keep
        self.keep_best = checks.integer(
            "checkpoint", "keep_best", keep_best, "a number of checkpoints"
        )
        self.since = checks.choice("checkpoint", "since", since, Monitored.SINCE)
        self.background = checks.flag("checkpoint", "background", background)
        self.on_exception = checks.flag("checkpoint", "on_exception", on_exception)
        self.best = None if best is None else checks.metric_name("checkpoint", "best", best)
        self.parts = self.saves = read_parts("checkpoint", only)
        self.named = _read_names(named)
        if best is None and (mode is not None or keep_best != 1 or since != "phase"):
            raise ValueError(
                "checkpoint ranks by nothing, so mode, keep_best and since mean nothing: add "
                'best="valid/loss", or the metric that ranks'
            )
        self.mode = "min" if self.best is None else mode_of("checkpoint", self.best, mode)
        self._awaits_metric = False  # whether a save since the last evaluation lacks ``best``
        self._writer: threading.Thread | None = None
        self._shared: SharedWrite | None = None  # which all processes write in the background
        self._error: BaseException | None = None  # of the writer
        self._saved: TrainState | None = None  # the state that was saved at this boundary
        self._position: list[int] | None = None  # of the state that this run saved last
        self._saved_at = self._took = 0.0  # in seconds of the run: the last save, and all of them
        self._files = RunFolder(self.folder)
        self._buffers: Contents | None = None  # host memory of the last copy, for reuse

    @property
    def monitors(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metrics that rank and name the checkpoints."""
        return self.named if self.best is None else (self.best, *self.named)

    @property
    def ranks(self) -> Monitored | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metric that ranks the checkpoints."""
        if self.best is None:
            return None
        return Monitored("checkpoint", self.best, self.mode, self.since)

    def __repr__(self) -> str:
        given = {"best": self.best, "mode": self.best and self.mode, "since": self.since}
        given |= {"only": self.parts, "named": self.named}
        usual = {"best": None, "mode": None, "since": "phase", "only": PARTS, "named": ()}
        changed = {name: value for name, value in given.items() if value != usual[name]}
        return repr(Call(checkpoint, (self._typed,), {"keep": self.keep, **changed}))

    # --- called by the run

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise if another one saves to the same folder.

        Raises:
            ValueError: it does.
        """
        savers = checkpoint.among(hooks)
        places = [os.path.realpath(saver._place.folder) for saver in savers]
        if places.count(os.path.realpath(self._place.folder)) > 1:
            raise ValueError(
                f"two checkpoint hooks share {self._place.name}, and would remove each other's: "
                "give each its own folder"
            )

    def tried(self, place: Path) -> tuple[Hook, str]:
        """Return a hook that saves to another folder."""
        copied = checkpoint(
            place, self.keep, self.best, self.mode if self.best else None,
            keep_best=self.keep_best, only=self.parts, named=self.named,
        )  # fmt: skip
        copied.saves = ()  # what cannot be saved is a problem of the hook, and ends no run
        return copied, "folder"

    def begin(self, state: TrainState) -> TrainState:
        """Claim the folder for this run, and check that its state can be saved and resumed.

        Raises:
            CheckpointError: another run has checkpoints there, or the state cannot be.
        """
        check_saveable(state, self.parts)
        if state.run is not None:  # now, as the files of the code may be edited while it trains
            state.run.live.made_with()
            self._saved_at, self._took = state.run.live.stopwatch.spent(), 0.0
        self.folder = self._files.path = self._place.staging(state.run_id)
        with self._place.reading():
            self._awaits_metric = on_main_process(lambda: self._claim(state), HOOK)
        self._place.warn_unless_shared()
        return state

    def __call__(self, state: TrainState) -> TrainState:
        self._complete_shared()
        self._wait()
        if "record" in state.events:
            self.check_metrics(state)
        saved = self._saved if self._holds(state) else None
        if saved is None:
            self._awaits_metric = self.best is not None and self.best not in metrics_here(state)
            self._position = position_of(state)
            self._tell(state)  # before it is saved: then a run that is killed has told it
        # A run that is resumed would call the hooks again that were still to be called.
        if saved is None or (self.is_amid(saved) and not self.is_amid(state)):
            self._saved = state
            began = time.perf_counter()
            self._save(state)
            self._took += time.perf_counter() - began
        return state

    def _tell(self, state: TrainState) -> None:
        """Tell of a save: what a lost machine would have cost just before, and what saves cost."""
        if state.run is None:
            return
        live = state.run.live
        spent = live.stopwatch.spent()
        unsaved, took = round(spent - self._saved_at, 3), round(self._took, 3)
        self._saved_at = spent
        facts = {"folder": str(self.folder), "unsaved": unsaved, "saves_took": took}
        live.notices.tell(state, "save", **facts)

    def _holds(self, state: TrainState) -> bool:
        """Return whether a state was saved at this boundary, whatever is next."""
        return self._saved is not None and differ_only(state, self._saved, "todo", "run", "events")

    def poll(self, state: TrainState) -> TrainState:
        """Raise an error of the writer, and save the evaluation that an earlier save waits for."""
        if self._position != position_of(state):
            self._saved = None  # it would keep memory of slots
        if self._shared is not None and self._shared.poll():
            self._complete_shared()
        if self._error is not None:
            self._wait()
        self._place.check()
        awaited = self._awaits_metric and self.best in metrics_here(state)
        return self(state) if awaited else state

    def flush(self, state: TrainState) -> TrainState:
        """Save the state if it is not saved yet, and wait until it is written."""
        self(state)
        self._complete_shared()
        on_main_process(self._finish, HOOK)
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Save the last consistent state of a failed run, if asked for and not saved yet."""
        self._abandon_shared()
        self._wait()
        if self.on_exception and self._position != position_of(state):
            name = f"{_name_of(state)}-exception_{type(error).__name__}"
            self._write(self._collect(state), state.history, name)

    def settle(self, state: TrainState) -> TrainState:
        """Remove what a process left that was killed at the end of this run."""
        if state.backend.main and self.folder.is_dir():
            self._files.remove_leftovers()
        return state

    def close(self) -> None:
        """Wait for the writer when the run is left. An error can only be logged here."""
        self._saved = None
        self._abandon_shared()
        try:
            self._finish()
        except Exception as error:
            log.error("checkpoint: the last checkpoint could not be written: %s", error)
        finally:
            self._place.end()

    # --- writing

    def _claim(self, state: TrainState) -> bool:
        """Claim the folder. Return whether its newest checkpoint lacks the metric that ranks."""
        self._place.claim(self.folder, state.run_id)
        newest = self._files.newest()
        self._position = None if newest is None else newest["position"]
        if newest is None or self.best is None:
            return False
        return self.best not in newest["measured"]

    def _save(self, state: TrainState) -> None:
        contents, history = self._collect(state), state.history
        name = _name_of(state) + _name_metrics(state, self.named)
        if contents.index:
            self._save_shared(contents, history, name)
        elif not self.background:
            on_main_process(lambda: self._write(contents, history, name), HOOK)
        elif state.backend.main:
            to_host = contents.copy_aside(self._buffers)
            self._start(lambda: self._write_copy(to_host, history, name))

    def _collect(self, state: TrainState) -> Contents:
        return collect_contents(state, self._files.encode_history, self.parts)

    def _wait(self) -> None:
        """Wait for the writer, and raise its error."""
        if self._writer is not None:
            self._writer.join()
        self._writer, error, self._error = None, self._error, None
        if error is not None:
            self._saved = None
            raise error

    def _finish(self) -> None:
        """Wait until everything is written and uploaded, and raise the error of what failed."""
        try:
            self._wait()
        finally:
            self._place.wait()

    def _start(self, write: Callable[[], None]) -> None:
        """Write while training continues."""

        def write_and_note() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._writer = threading.Thread(target=write_and_note, name="checkpoint")
        self._writer.start()

    def _write_copy(self, to_host: Callable[[], Contents], history: History, name: str) -> None:
        copied = self._buffers = to_host()
        self._write(copied, history, name)

    def _write(self, contents: Contents, history: History, name: str) -> None:
        ranking = self._prepare(name)
        self._keep(self._files.write(contents, history, name, ranking), contents)

    def _prepare(self, name: str) -> dict[str, object]:
        """Return what the manifest of a checkpoint says in addition."""
        if (self.folder / name).exists():  # it may be the one that is being uploaded
            self._place.wait()
        ranking = {"best": self.best, "mode": self.mode, "since": self.since}
        return ranking if self.best else {}

    def _keep(self, written: Path, contents: Contents, at: str | None = None) -> None:
        """Upload a checkpoint that was written, if it is for an address. Remove what it replaces.

        Args:
            written: where it is.
            contents: what was written.
            at: the folder of its files at the address, if they are there already.
        """
        run, best = contents.facts["run"], (self.best, self.mode, self.keep_best, self.since)
        tidy = lambda counts: self._files.prune(written, run, self.keep, *best, counts)
        self._place.keep(written, run, at, tidy, self.background)

    # --- writing by all processes

    def _save_shared(self, contents: Contents, history: History, name: str) -> None:
        """Write a checkpoint, each process its own files; in the background, begin to."""
        if self.background:
            contents = self._buffers = contents.copied(self._buffers)
        begin = lambda: self._files.begin(contents, history, name, self._prepare(name))
        shared = self._shared = SharedWrite(contents, begin, HOOK, self._place.sender(name))
        if self.background:
            shared.start()
        else:
            shared.write()
            self._complete_shared()
            on_main_process(self._wait, HOOK)

    def _complete_shared(self) -> None:
        """Complete what all processes write, if anything. Every process must call it."""
        if (shared := self._shared) is None:
            return
        try:
            files = shared.agree()
        except BaseException:
            self._saved = None
            shared.abandon()
            raise
        finally:
            self._shared = None
        if shared.writing is not None:
            self._start(lambda: self._keep_shared(shared, files))
        if shared.faults:
            self._wait()
            shared.check_sent()

    def _keep_shared(self, shared: SharedWrite, files: dict[str, Json]) -> None:
        """Complete what all processes have written, and uploaded where that is asked for."""
        written = shared.commit(files)
        if not shared.faults:
            self._keep(written, shared.contents, shared.at)

    def _abandon_shared(self) -> None:
        """Give up what all processes write, because the others may have ended."""
        shared, self._shared = self._shared, None
        if shared is not None and shared.abandon():
            log.error("checkpoint: the last checkpoint was not completed by all processes")


def _read_names(named: Sequence[str]) -> tuple[str, ...]:
    if isinstance(named, str) or not isinstance(named, Sequence):
        raise TypeError(
            'checkpoint expects named as a tuple of metrics, such as ("valid/loss",); got '
            f"{checks.describe(named)}"
        )
    names = tuple(checks.metric_name("checkpoint", "named", name) for name in named)
    longest = _spell(dict.fromkeys(names, -1.234e-300))
    checks.name_of_file("checkpoint", "names and values of the metrics in named", longest)
    return names


def _name_metrics(state: TrainState, named: Sequence[str]) -> str:
    """Return the part of a name that shows metrics, those that were recorded at this boundary."""
    values = metrics_here(state)
    return _spell({name: values[name] for name in named if name in values})


def _spell(values: Mapping[str, float]) -> str:
    """Return metrics as names of checkpoints have them."""
    return "".join(
        f"-{re.sub(r'[^A-Za-z0-9_.]+', '-', name)}={value:.4g}" for name, value in values.items()
    )


def _name_of(state: TrainState) -> str:
    return f"step-{state.step:08d}" + (f"+{state.skipped}" if state.skipped else "")


# --------------------------------------------------------------------------------------------------
# End a run with its best weights.

OWNER = "restore_best"
_Weights = dict[str, Any]  # a state_dict, or the slot that holds one
_BEST: object = {
    "value": NUMBER,
    "step": COUNT,
    "first?": COUNT,
    "ended": (None, [COUNT]),
    "weights": (None, dict),
    "averages?": {"*": {"count": COUNT, "tensors": {"*": lambda v: isinstance(v, Tensor)}}},
}

_NOTHING: _Weights = {"value": math.nan, "weights": None, "ended": None}  # the best before any


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class restore_best(BuiltIn):
    """End a run with its best weights: ``hooks=(restore_best("valid/loss"),)``.

    Whenever the metric is better than before, the hook copies the model's parameters and buffers,
    and averages of them (``ema``, ``swa``), on their device. It copies the weights that an
    evaluation uses, also with an optimizer that trains others, which ends in its mode ``eval``. The
    copy is in ``state.slots``, so checkpoints hold it, and a resumed run ends like an uninterrupted
    one. Each process copies its own part of a sharded model.

    Args:
        key: the metric, such as "valid/loss". NaN is never the best. Of equals, the first is kept.
        mode: "min" if lower is better, "max" if higher; by default as the name of the metric says.
        since: which weights count: those of the "phase", if there is one, or of the whole "run".

    Returns:
        A hook.

    Raises:
        TypeError: key is not a str.
        ValueError: there is no such mode, or it is None and the name of the metric does not imply
            one. When a run starts: the copy in the state is of another model.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At its first evaluation: your own middleware or hook, which might add it, has not
            added it. The message lists the metrics that exist.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> rates = fl.schedule(lambda i, total: (1, 1, -5)[i])         # w is -1, -2, 3
        >>> loaders, hooks = ([torch.ones(1)], [torch.ones(1)]), (restore_best("valid/loss"),)
        >>> state = fl.fit(fl.pipeline(rates)(toy_loss), toy(), loaders, epochs=3, hooks=hooks)
        >>> state.history["valid/loss"], state.model.w.item()
        ((-1.0, -2.0, 3.0), -2.0)

    Notes:
        When the run reaches its target, or another hook stops it, the copy goes back into the
        module and its averages, and memory is released. Ctrl-C, signals and exceptions change
        nothing, because the run may continue. The closing record of a run counts too, because it is
        of the weights at the end.

        Only the weights go back. With ``restore_best("valid/ema/loss")`` the average is that of the
        best update, as it was evaluated, and the module has its own weights of that update. The
        counters and the optimizer's state stay those of the last update: a run that is continued
        afterwards starts from the best weights with the latest momentum. A checkpoint at the end
        has the best weights if ``checkpoint`` is listed after this hook. If it is listed before, it
        has the last weights, and a run that continues from it starts there. Where shapes have
        changed since the best update, they go back too, and the optimizer loses its state of those
        parameters: one line of the log names them. An evaluation with
        ``at_end()`` is of the last weights: to test the best ones, call ``evaluate`` with the state
        that ``fit`` returns.

    Replaces: keras.restore_best_weights, transformers.load_best_model_at_end,
    fastnlp.LoadBestModelCallback
    """

    key: str
    mode: str | None = None
    since: str = attrs.field(default="phase", kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.ranks: Monitored = Monitored(OWNER, self.key, self.mode, self.since)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.slot: str = f"{OWNER}({self.key})"  # pyright: ignore[reportIncompatibleVariableOverride]
        self.monitors = self.key

    def __repr__(self) -> str:
        return repr(Call.of(restore_best, self))

    # --- called by the run

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise if there is another one.

        Raises:
            ValueError: there is.
        """
        found = restore_best.among(hooks)
        if len(found) > 1:
            raise ValueError(
                f"{found[0]!r} and {found[1]!r}: a run ends with one set of weights. Leave one out"
            )

    def begin(self, state: TrainState) -> TrainState:
        """Continue with the best weights so far.

        Raises:
            ValueError: they are of another model.
            CheckpointError: what a checkpoint had in their place is something else.
        """
        best, first = self._best(state), self.ranks.first(state)
        if self.slot in state.slots:  # it may be from a checkpoint
            check_shape(best, _BEST, f'state.slots["{self.slot}"]')
        if best.get("first", 0) < first:
            best = _NOTHING  # of an earlier phase
        if best["weights"] is not None:
            kept = {**best, "weights": _fit_to(state, best["weights"], self.slot)}
        elif best["ended"] == [state.step, state.skipped]:
            kept = {**best, **_copy_weights(state)}  # the run that ended has put them back
        else:
            self._warn_of_lost_weights(state, first)
            slots = {name: slot for name, slot in state.slots.items() if name != self.slot}
            return attrs.evolve(state, slots=slots)
        return with_slot(state, self.slot, {**kept, "ended": None})

    def __call__(self, state: TrainState) -> TrainState:
        value = self.ranks.measured(state)
        if value is None or not self.ranks.better(value, self._best(state)["value"]):
            return state
        found = {"value": value, "step": state.step, "first": self.ranks.first(state)}
        return with_slot(state, self.slot, {**found, **_copy_weights(state), "ended": None})

    def flush(self, state: TrainState) -> TrainState:
        """Restore the best weights if the run has ended by its target or by a hook."""
        return self._restore(state) if "end" in state.events else state

    def settle(self, state: TrainState) -> TrainState:
        """Restore the best weights if a process was killed before it could."""
        return self._restore(state)

    # --- the best so far

    def _best(self, state: TrainState) -> _Weights:
        return state.slots.get(self.slot, _NOTHING)

    def _restore(self, state: TrainState) -> TrainState:
        """Put the best weights into the module, unless those in it are better, and release them."""
        best = self._best(state)
        if best["weights"] is None:
            return state
        here = [record for record in state.history[-1:] if record.step == state.step]
        now = here[0].metrics.get(self.key, math.nan) if here else math.nan  # of a closing record
        if self.ranks.better(now, best["value"]):
            best = {**best, "value": now, "step": state.step}
        else:
            state = self._put_back(state, best)
        ended = [state.step, state.skipped]
        return with_slot(state, self.slot, {**best, "weights": None, "ended": ended})

    def _put_back(self, state: TrainState, best: _Weights) -> TrainState:
        weights = _fit_to(state, best["weights"], self.slot)
        state = begin_again(state)
        resized = _load_weights(state, weights)
        _load_averages(state, best.get("averages", {}))
        state = Ownership.take(state)
        if state.backend.main:
            shown = reprs.format_metric(self.key, best["value"])
            log.info("%r: the weights are those of step %d (%s)", self, best["step"], shown)
        if state.backend.main and resized:
            log.warning(
                "%r: these have their shapes of step %d again: %s. The optimizer has no state for "
                "them, and begins again if the run is continued",
                *(self, best["step"], checks.join_names(resized)),
            )
        return state

    def _warn_of_lost_weights(self, state: TrainState, first: int) -> None:
        """Say that records from before this hook was listed do not count.

        ``first`` is the index of the first record that would.
        """
        known = state.history[first:]
        if self.key not in known or not state.backend.main:
            return
        record = known.best_record(self.key, self.ranks.mode)
        is_next = record.step == state.step and self.is_amid(state)  # the hook is called of it yet
        if is_next or math.isnan(record.metrics[self.key]):
            return
        log.warning(
            "%r: the best value so far, %g, is of step %d, but its weights were not kept: the run "
            "will end with the best weights from here on",
            *(self, record.metrics[self.key], record.step),
        )


def _copy_weights(state: TrainState) -> dict[str, _Weights]:
    """Return copies of what an evaluation uses and of the averages, as they are in the slot."""
    averages = {
        name: {"count": slot.count, "tensors": {k: v.detach().clone() for k, v in slot.items()}}
        for name, slot in state.slots.items()
        if isinstance(slot, Average)
    }
    with view(state, "save"):
        return {"weights": _copy_module(state), "averages": averages}


def _load_weights(state: TrainState, weights: _Weights) -> list[str]:
    """Load weights into a module. Return which of them have another shape since, in words."""
    module = unwrap(state)
    own = {k: v.shape for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    others = {
        torch_compat.strip_compile_prefix(k): (weights[k].shape, shape)
        for k, shape in own.items()
        if weights[k].shape != shape
    }
    with take_shapes(module, {k: shape for k, (shape, _) in others.items()}) as new:
        forget_states(state, new)
        module.load_state_dict(weights, strict=False)
    if new:
        Ownership.of(state).parameters.clear()
    return [f"{k}: {tuple(shape)}, was {tuple(own)}" for k, (shape, own) in others.items()]


def _load_averages(state: TrainState, kept: _Weights) -> None:
    """Put copies of averages back into those that the state still has."""
    with torch.no_grad():
        for name, best in kept.items():
            if not isinstance(average := state.slots.get(name), Average):
                continue
            for key, tensor in average.items():
                kept_one = best["tensors"].get(key, tensor)
                if kept_one.shape == tensor.shape:
                    tensor.copy_(fsdp.like_sharded(kept_one, tensor))
                else:
                    average[key] = kept_one
            average.count = best["count"]


def _copy_module(state: TrainState) -> _Weights:
    """Return a copy of what a module saves, by name: in one memory what the module has in one."""
    copies: dict[object, Tensor] = {}
    weights: _Weights = {}
    for spelled, value in unwrap(state).state_dict().items():
        name = torch_compat.strip_compile_prefix(spelled)
        if isinstance(value, Tensor):
            memory = local_part(value)
            place = (memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
            if place not in copies or not memory.numel():
                copies[place] = value.detach().clone()
            weights[name] = copies[place]
        else:  # from the module's get_extra_state
            weights[name] = copy.deepcopy(value)
    return weights


def _fit_to(state: TrainState, weights: _Weights, slot: str) -> _Weights:
    """Return weights by the names of a module, sharded as its own are.

    Raises:
        ValueError: they are of another model.
    """
    mine = unwrap(state).state_dict()
    found: _Weights = {}
    for spelled, here in mine.items():
        kept = weights.get(torch_compat.strip_compile_prefix(spelled))
        # A run may have changed sizes, but no other number of dimensions.
        fits = isinstance(kept, Tensor) and isinstance(here, Tensor) and kept.ndim == here.ndim
        if isinstance(here, Tensor) and not fits:
            other = f", but of {tuple(kept.shape)}" if isinstance(kept, Tensor) else ""
            raise ValueError(
                f'state.slots["{slot}"] has no weights for {spelled} of shape {tuple(here.shape)}'
                f"{other}. A buffer that appears in training cannot be put back: register it with "
                "persistent=False. If they are of another model, restore without them: "
                'restore(path, state, only=("model", ...)) without "slots"'
            )
        if isinstance(kept, Tensor) and kept.shape == here.shape:
            kept = fsdp.like_sharded(kept, here)
        found[spelled] = kept
    return found


def differ_only(one: TrainState, other: TrainState, *fields: str) -> bool:
    """Return whether two states hold the same objects, but for some fields."""
    mine = vars(one)
    return all(mine[name] is value or name in fields for name, value in vars(other).items())
