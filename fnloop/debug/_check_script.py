"""The laws of a run on the user's own step, state and loaders."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.state import TrainState
from fnloop._core.types import Step
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.format import CheckpointError
from fnloop._extensions.checkpoints.restore import restore
from fnloop._extensions.checkpoints.save import check_resumable, save
from fnloop._extensions.middleware.accumulate import accumulate, microbatch
from fnloop._extensions.tools.dry_run import (
    EVALUATED,
    Finding,
    HostReads,
    Report,
    advance,
    compiles,
    contents_of,
    trial_of,
    with_members,
)
from fnloop._hooks.hook import every
from fnloop.data import take
from fnloop.debug._audit import DROPOUTS, SMALL, audit, norm_of, tolerance_of
from fnloop.debug._watch import (
    Gradients,
    Source,
    Trace,
    find_changed,
    find_sources,
    first_other_operator,
    watch,
)
from fnloop.extend import (
    Batch,
    PipelineStep,
    Rehearsal,
    containers,
    isolated,
    name_of,
    reprs,
    short_traceback,
    torch_compat,
)

UPDATES = 3
MOST_SOURCES = 3
_FOR_GRAPHS = ": cuda_graph cannot capture that"


@short_traceback
def check_script(step: Step, state: TrainState, loaders: object) -> Report:
    """Check the laws of a run on your own script, for three updates of copies.

    - same: the same snapshot gives the same bits twice. What breaks it is named: a counter or a
      generator that code changes, with its line, and the first operator whose result differs.
    - resume: a run that is saved and restored after its first or its second update equals one that
      is not. What is not in a checkpoint has its first value there, as in a new process.
    - evaluation: a run with an evaluation after each update equals one without.
    - accumulation: two batches with ``accumulate(2)`` give the gradient of one batch of all their
      items, without dropout. A BatchNorm or a loss that is not a mean breaks it.
    - host read: no line reads the device during an update.

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

    Notes:
        Everything runs on copies. Generators stay as they are, and so does what the loss function,
        the model and the loaders keep, where it can be found: closures, globals, attributes of your
        own objects, generators. What a worker of a DataLoader keeps cannot be seen.
    """
    __tracebackhide__ = True
    # Loaders move: what they keep by themselves is what it looks for.
    trial = attrs.evolve(trial_of("check_script", step, state, loaders), moves=True)
    script = _Script(trial)
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
            findings.append(check_accumulation(trial))
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
    """What is tried, to make short runs with."""

    def __init__(self, trial: Rehearsal) -> None:
        self.trial, self.state, self.loaders = trial, trial.state, trial.loaders
        self.compiles = compiles(trial.step)
        self._roots = {
            "the loss function": trial.step,
            **{f"the {name} loader": loader for name, loader in trial.loaders.items()},
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
        copied = self.trial.copy() if begun is None else begun
        train = self.loaders["train"]
        others = {k: v for k, v in self.loaders.items() if k != "train"}
        if evaluates and not others:
            others = {"valid": train}
        loaders = {"train": train, **{name: take(loader, 1) for name, loader in others.items()}}
        roots = {"the model": copied.model, **self._roots}
        before = find_sources(roots)
        moment = every(steps=1) if evaluates else EVALUATED
        target = self.state.epoch + UPDATES + 1  # the same for all, as schedules depend on it
        trial = attrs.evolve(self.trial, loaders=loaders)
        reached = advance(trial, copied, updates, target, moment)
        return _Reached(reached, tuple(find_changed(before, roots)))

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
        return "" if called is None else f". {called}"

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
                    resumed = restore(Path(folder) / str(n), self.trial.copy())
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
            "something that no checkpoint holds, such as a buffer with persistent=False"
        )
    names = "; ".join(str(source) for source in changed[:MOST_SOURCES])
    more = len(changed) - MOST_SOURCES
    return f". This changes, and no checkpoint holds it: {names}" + (
        f"; and {more} more" if more > 0 else ""
    )


# --------------------------------------------------------------------------------------------------
# Whether accumulated batches give the gradient of one batch of all their items.

KIND, NAME = "accumulation", "update"
_LEFT_OUT = (accumulate, microbatch, audit, watch)
_Made = dict[str, Tensor]


def check_accumulation(trial: Rehearsal) -> Finding:
    """Compare the gradient of two batches, accumulated, with that of both joined."""
    __tracebackhide__ = True
    step, state = trial.step, trial.state
    if not step.has_all_rings or step.carries:
        return Finding(KIND, NAME, f"not checked: {type(step).__name__} takes no accumulate(2)")
    with isolated(state.backend.device):
        copied = trial.begun
        batches, _ = trial.read(trial.source(trial.state), 2)
        if len(batches) < 2:
            return Finding(KIND, NAME, "not checked: the loader has only one batch")
        try:
            joined = join(batches)
        except ValueError as error:
            return Finding(KIND, NAME, f"not checked: {error}")
        rough = step.precision_in(state) is not None
        whole, parts = (with_members(step, _LEFT_OUT, m) for m in ((), (accumulate(2),)))

        def compare(change: Callable[[nn.Module], None]) -> str | None:
            """Compare the gradients, after a change of the model's modes."""
            a = _gradients(parts, copied(), batches, change)
            b = _gradients(whole, copied(), joined, change)
            return _NO_GRADIENTS if not a or not b else _difference(a, b, rough)

        try:
            one, other = (_gradients(whole, copied(), joined, _without_dropout) for _ in range(2))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return Finding(KIND, NAME, f"not checked: two batches joined in one raise {text}")
        if _difference(one, other, rough) is not None:
            text = "not checked: the gradient of one batch differs with what is drawn"
            return Finding(KIND, NAME, text)
        found = compare(_without_dropout)
        if found is None:
            return Finding(KIND, NAME, "two batches give the gradient of one with all their items")
        if found == _NO_GRADIENTS:
            return Finding(KIND, NAME, f"not checked: {found}")
        norms = _norms(state.model)
        if norms and compare(_without_norms) is None:
            why = (
                f"the BatchNorm {norms[0]} normalizes by the statistics of each batch. This is "
                "usual; a GroupNorm or a LayerNorm does not"
            )
        else:
            why = _explain_loss(step, copied(), batches, joined)
    return Finding(KIND, NAME, f"accumulate(2) is not one large batch: {found}; {why}", True)


_NO_GRADIENTS = "the update is skipped, so there is no gradient"


def join(batches: Sequence[Batch]) -> Batch:
    """Return one batch of all items.

    Raises:
        ValueError: the batches cannot be joined.

    Example:
        >>> join([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])["x"].shape
        torch.Size([3, 3])
    """
    first = batches[0]
    if all(isinstance(b, Tensor) for b in batches):
        shapes = {tuple(b.shape[1:]) for b in batches}
        if len(shapes) > 1 or not all(b.ndim for b in batches):
            raise ValueError("the first two batches cannot be joined, as their shapes differ")
        return torch.cat(list(batches))
    if all(isinstance(b, Mapping | list | tuple) for b in batches):
        keyed = [dict(containers.parts_of(b) or ()) for b in batches]
        if all(one.keys() == keyed[0].keys() for one in keyed):
            return containers.with_parts(
                first, [join([one[key] for one in keyed]) for key in keyed[0]]
            )
    raise ValueError(f"batches with a {type(first).__name__} cannot be joined")


def _difference(a: _Made, b: _Made, rough: bool) -> str | None:
    """Return which gradient of a differs from that of b by more than rounding, or None."""
    least = SMALL * math.hypot(*map(norm_of, b.values()))
    for name, grad in b.items():
        off = norm_of(a[name] - grad) / max(norm_of(grad), least, 1e-300)
        if not off <= tolerance_of(grad.dtype, rough):
            return f"the gradient of {name} differs by {off:.3g} of its norm"
    return None


def _gradients(
    step: PipelineStep, copied: TrainState, batch: Batch, change: Callable[[nn.Module], None]
) -> _Made:
    """Return the gradients of an update of a copy, by the names of parameters."""
    __tracebackhide__ = True
    copied.model.train()
    change(copied.model)
    with Gradients(copied) as seen:
        step(copied, batch)
    named = copied.model.named_parameters()
    return {name: seen.found[id(p)].to_dense() for name, p in named if id(p) in seen.found}


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.eval()


def _without_norms(model: nn.Module) -> None:
    _without_dropout(model)
    for norm in torch_compat.batch_norms(model):
        norm.eval()


def _norms(model: nn.Module) -> list[str]:
    norms = {id(norm) for norm in torch_compat.batch_norms(model)}
    return [name for name, module in model.named_modules() if id(module) in norms]


def _explain_loss(
    step: PipelineStep, copied: TrainState, batches: Sequence[Batch], joined: Batch
) -> str:
    """Return what the loss of a batch may be, if it is not a mean over its items."""
    name, line = name_of(step.loss_fn), ""
    if inspect.isfunction(step.loss_fn):
        code = step.loss_fn.__code__
        line = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"
    outs = [step.evaluate(copied, batch) for batch in (*batches, joined)]
    if any(out.loss is None for out in outs):
        return f"{name}{line} returns a loss that is not a mean over the items of a batch"
    (a, b, both), (v, w, _) = (
        [float(out.loss) for out in outs],
        [float(out.weight) for out in outs],
    )
    mean = (a * v + b * w) / (v + w)
    if math.isclose(both, a + b, rel_tol=1e-4) and not math.isclose(both, mean, rel_tol=1e-4):
        return f"{name}{line} returns a sum over the items of a batch: return their mean"
    found, expected = map(reprs.format_number, (both, mean))
    return (
        f"the loss that {name}{line} returns is {found} for both batches together, and the mean of "
        f"theirs by weight is {expected}: return a mean over items, and "
        'how many they are, if not the leading dimension: return loss, {"weight": n}'
    )
