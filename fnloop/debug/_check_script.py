"""The laws of a run on the user's own step, state and loaders, for a few updates."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from fnloop._checkpoint.compare import find_difference
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.restore import restore
from fnloop._checkpoint.save import save
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.state import TrainState, check_not_stale
from fnloop._graphs.host_reads import HostReads
from fnloop._hooks.triggers import every
from fnloop._loop.dry_run import Finding, Report
from fnloop._loop.plan import check_step, make_plan
from fnloop._loop.trials import advance_copy, at_start_of_epoch, contents_of, loaders_to_try
from fnloop._step.pipeline import PipelineStep
from fnloop.data import take
from fnloop.debug._check_accumulation import check_accumulation
from fnloop.debug._sources import Source, find_sources
from fnloop.debug._trace import OUTSIDE, Trace, first_other_operator

__all__ = ["check_script"]

UPDATES = 3
MOST_SOURCES = 3
_FOR_GRAPHS = ": cuda_graph cannot capture that"


def check_script(step: PipelineStep, state: TrainState, loaders: object) -> Report:
    """Check the laws of a run on your own script, for three updates of copies.

    - same: the same snapshot gives the same bits twice. What breaks it is named: a counter or a
      generator that code changes, with its line, and the first operator whose result differs.
    - resume: a run that is saved and restored after its first or its second update equals one that
      is not. What is not in a checkpoint has its first value there, as in a new process.
    - evaluation: a run with an evaluation after each update equals one without.
    - accumulation: two batches with ``accumulate(2)`` give the gradient of one batch of all their
      items, without dropout. A BatchNorm or a loss that is not a mean breaks it.
    - host read: no line reads the device during an update.

    Everything runs on copies. Generators stay as they are, and so does what the loss function, the
    model and the loaders keep, where it can be found: closures, globals, attributes of your own
    objects, generators. What a worker of a DataLoader keeps cannot be seen.

    Args:
        step: as in ``fit``.
        state: the newest state.
        loaders: as in ``fit``. An iterator is refused, because reading it would use it up.

    Returns:
        What was seen, as of ``dry_run``: it prints as a table, and ``problems`` is a tuple of what
        breaks a law.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError, ValueError, KeyError: as ``fit``; or a loader is an iterator.
        NotImplementedError: there are several processes, or the model is sharded.
        Exception: any exception of the loss function or a loader, with a note of where.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> calls = []
        >>> def loss_fn(model, batch):
        ...     calls.append(1)
        ...     return model(batch).mean() * len(calls)
        >>> report = check_script(fl.pipeline()(loss_fn), toy(), [torch.ones(2)] * 4)
        >>> [line.split(":")[0] for line in report.problems], len(calls)
        (['same', 'resume', 'resume', 'evaluation'], 0)
    """
    __tracebackhide__ = True
    check_step(step, "check_script")
    check_not_stale(state, "check_script")
    given = (step, at_start_of_epoch(state), loaders, None, None, (), None, None, 1, None)
    found = make_plan(*given).loaders
    named = loaders_to_try("check_script", state, found)
    script = _Script(step, state, named)
    try:
        straight = script.run().contents
        findings = [*script.check_same(straight)]
        script.reset()
        if find_difference(script.run().contents, straight, "state") is None:
            findings += [*script.check_resume(straight), script.check_evaluation(straight)]
        else:
            text = "not checked, because no two runs are the same"
            findings += [Finding(kind, "update", text) for kind in ("resume", "evaluation")]
        script.reset()
        if any(finding.problem for finding in findings):
            text = "not checked, because the problems above change gradients too"
            findings.append(Finding("accumulation", "update", text))
        else:
            findings.append(check_accumulation(step, state, found.train))
        findings += script.check_host_reads()
    finally:
        script.reset()
    return Report(tuple(findings), "check_script")


@attrs.frozen(eq=False)
class _Reached:
    """What a run has come to.

    Args:
        state: its state.
        changed: the values outside of the state that have changed.
    """

    state: TrainState
    changed: tuple[Source, ...]

    @property
    def contents(self) -> dict[str, object]:
        """What two runs are compared by."""
        return contents_of(self.state)


class _Script:
    """A step, a state and loaders, to make short runs with."""

    def __init__(
        self, step: PipelineStep, state: TrainState, loaders: Mapping[str, object]
    ) -> None:
        self.step, self.state, self.loaders = step, state, loaders
        self.compiles = any(m.name == "compiled" for m in step.pipeline.middleware)
        self._roots = {
            "the loss function": step,
            **{f"the {name} loader": loader for name, loader in loaders.items()},
        }
        self._at_first = find_sources(self._roots)

    def reset(self) -> None:
        """Give everything outside of the state the value that it had at first."""
        now = find_sources(self._roots)
        for name, source in self._at_first.items():
            if name not in now or now[name].fingerprint != source.fingerprint:
                source.put_back()

    def run(
        self, updates: int = UPDATES, begun: TrainState | None = None, evaluates: bool = False
    ) -> _Reached:
        """Make updates with a copy of the state, or with one that was begun."""
        __tracebackhide__ = True
        copied = at_start_of_epoch(self.state) if begun is None else begun
        loaders = {"train": self.loaders["train"]}
        if evaluates:
            others = {k: v for k, v in self.loaders.items() if k != "train"} or {
                "valid": self.loaders["train"]
            }
            loaders |= {name: take(loader, 1) for name, loader in others.items()}
        roots = {"the model": copied.model, **self._roots}
        before = find_sources(roots)
        moment = every(steps=1) if evaluates else None
        target = self.state.epoch + UPDATES + 1  # the same for all, as schedules depend on it
        reached = advance_copy(self.step, copied, loaders, updates, target, moment)
        after = find_sources(roots)
        changed = [
            source
            for name, source in before.items()
            if name in after and after[name].fingerprint != source.fingerprint
        ]
        return _Reached(reached, tuple(changed))

    # --- the laws

    def check_same(self, straight: dict[str, object]) -> Iterator[Finding]:
        """Compare a run with the same one after it, which finds what that one has left."""
        again = self.run()
        where = find_difference(straight, again.contents, "state")
        if where is None:
            yield Finding("same", "update", f"{UPDATES} updates twice, bit for bit")
            return
        text = f"the same snapshot gives other bits the second time, {where}"
        yield Finding("same", "update", text + _named(again.changed) + self._operator(), True)

    def _operator(self) -> str:
        """Return the first operator that differs in two runs of one update."""
        if self.compiles:
            return ""
        traces = Trace(), Trace()
        for trace in traces:
            with trace:
                self.run(1)
        called = first_other_operator(*traces)
        if called is None:
            return ""
        where = f"at {called.line}" if called.line else OUTSIDE
        return f". The first operator whose result differs is {called.operator}, {where}"

    def check_resume(self, straight: dict[str, object]) -> Iterator[Finding]:
        """Compare runs that were saved and restored with one that was not."""
        with tempfile.TemporaryDirectory(prefix="fnloop-check-") as folder:
            for n in range(1, UPDATES):
                self.reset()
                place = f"update {n}"
                try:
                    check_resumable(self.state)
                    half = self.run(n)
                    save(half.state, Path(folder) / str(n))
                    self.reset()  # as in a new process
                    resumed = restore(Path(folder) / str(n), at_start_of_epoch(self.state))
                except CheckpointError as error:
                    yield Finding("resume", place, str(error), True)
                    return
                reached = self.run(UPDATES - n, resumed)
                where = find_difference(straight, reached.contents, "state")
                if where is None:
                    yield Finding("resume", place, "continues bit for bit")
                else:
                    text = f"continues with other bits after a restore, {where}"
                    yield Finding("resume", place, text + _named(half.changed), True)

    def check_evaluation(self, straight: dict[str, object]) -> Finding:
        """Compare a run with evaluations with one without."""
        self.reset()
        try:
            reached = self.run(evaluates=True)
        except ValueError as error:
            if "cannot evaluate a loader" not in str(error):  # of raw
                raise
            return Finding(
                "evaluation", "update", "not checked, because the step evaluates nothing"
            )
        where = find_difference(straight, reached.contents, "state")
        if where is None:
            return Finding("evaluation", "update", "changes no bit of training")
        text = f"an evaluation after each update changes training, {where}"
        return Finding("evaluation", "update", text + _named(reached.changed), True)

    def check_host_reads(self) -> Iterator[Finding]:
        """Find the lines that read the device during an update."""
        self.reset()
        if self.compiles:
            text = "not checked: leave compiled out to see lines that read the device"
            yield Finding("host read", "update", text)
            return
        watch = HostReads()
        with watch:
            self.run()
        for place in watch.places:
            yield Finding("host read", "update", place.removesuffix(_FOR_GRAPHS), True)
        if not watch.places:
            yield Finding("host read", "update", "no line reads the device during an update")


def _named(changed: tuple[Source, ...]) -> str:
    """Return what may be the cause: values that no checkpoint holds."""
    if not changed:
        return (
            ": a loader whose batches differ each time, a kernel that is not deterministic, or "
            "something that no checkpoint holds"
        )
    names = "; ".join(str(source) for source in changed[:MOST_SOURCES])
    more = len(changed) - MOST_SOURCES
    return f". This changes, and no checkpoint holds it: {names}" + (
        f"; and {more} more" if more > 0 else ""
    )
