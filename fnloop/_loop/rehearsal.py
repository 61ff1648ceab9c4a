"""Rehearsals: runs of copies, which leave everything else as it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

import attrs

from fnloop._backend.containers import own_copy
from fnloop._core.history import History, Phase
from fnloop._core.rng import isolated, reserved_generators
from fnloop._core.runs import INTERRUPTED
from fnloop._core.several import Several
from fnloop._core.state import TrainState, changed, check_not_stale, snapshot, without_metrics
from fnloop._core.types import Batch, Step
from fnloop._data.reader import Reader
from fnloop._data.source import Source
from fnloop._hooks.hook import Hook, HookFn, Moment, at_end, every
from fnloop._loop.boundary import Moments
from fnloop._loop.evaluate import open_loader
from fnloop._loop.peers import Interrupts, is_alone
from fnloop._loop.plan import Plan
from fnloop._loop.run import fold
from fnloop._step.pipeline import PipelineStep

EVALUATED = every(epochs=1)  # when a run evaluates by default
Evaluations = Sequence[tuple[Moment, Sequence[str]]]


@attrs.frozen(eq=False)
class Rehearsal:
    """Runs apart: of copies of a state, which leave the state, generators and loaders as they are.

    A tool that tries a run, or makes one again, trains with it. There is nothing to keep, so Ctrl-C
    and signals end the program as they usually do. For a variant, such as another step, write
    ``attrs.evolve(rehearsal, step=other)``.

    Args:
        step: the step.
        state: the state whose copies are trained.
        loaders: the loaders by name, "train" first.
        hooks: the hooks of the run that is rehearsed, none of which :meth:`train` calls by itself.
        assumed_items: what a schedule by items sees as the target of the run; None: that of
            :meth:`train`.
        moves: whether a loader with a position of its own stays where a run has come to.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
        >>> tried = Rehearsal.of("my_tool", fl.pipeline()(toy_loss), toy(), batches)
        >>> reached = tried.train(tried.copy(), steps=2)
        >>> reached.model.w.item(), tried.state.model.w.item()
        (-3.0, 0.0)
    """

    step: PipelineStep
    state: TrainState
    loaders: Mapping[str, object]
    hooks: tuple[Hook, ...] = ()
    assumed_items: int | None = None
    moves: bool = False

    @staticmethod
    def of(
        owner: str,
        step: Step,
        state: TrainState,
        loaders: object,
        hooks: Sequence[HookFn] | None = (),
        *,
        before: str = "",
        alone: str = "",
    ) -> Rehearsal:
        """Check what a tool was given as ``fit`` does, and return a rehearsal of it.

        Args:
            owner: the tool, for messages.
            step, state, loaders, hooks: as in ``fit``.
            before: the arguments of the tool before the step, as in "folder, ".
            alone: if the tool takes one loader only, what it is for, such as "training".

        Returns:
            A rehearsal. The state is not copied yet.

        Raises:
            StaleStateError: the state has been advanced.
            TypeError, ValueError: an argument has the wrong type or value.
        """
        step = PipelineStep.checked(step, owner, before)
        check_not_stale(state, owner)
        given = Reader.of(loaders, alone) if alone else loaders  # a reader was checked already
        plan = Plan.of(step, changed(state, phases=()), given, hooks=hooks)
        named = {"train": loaders if alone else plan.loaders.train, **plan.loaders.evaluated}
        return Rehearsal(step, state, named, plan.hooks)

    # --- states

    def copy(self) -> TrainState:
        """Return a copy of the state at the start of its epoch, without what it has measured.

        Raises:
            NotImplementedError: the model is sharded over processes.
        """
        return changed(
            without_metrics(snapshot(self.state)), batch=0, samples=0, history=History(), stop=None,
            ends=None, phases=(), generators=None, saved_on=None, events=frozenset(), todo=(),
        )  # fmt: skip

    def begun(self) -> TrainState:
        """Return a copy of the state as a run begins: with the facts about it, and all slots.

        Raises:
            NotImplementedError: the model is sharded over processes.
        """
        copied = self.copy()
        plan = self._plan(copied)
        run = plan.describe(copied, self.source(copied), (*plan.loaders.evaluated,), None)
        return self.step.init_slots(changed(copied, run=run))

    def train(
        self,
        state: TrainState,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        items: int | None = None,
        hooks: Sequence[HookFn] = (),
        evaluate_every: Moments = EVALUATED,
        evaluations: Evaluations | None = None,
        record_every: Moment | None = None,
        prefetch: int = 1,
    ) -> TrainState:
        """Train a state up to a target, as ``fit`` does, in the phase that it is in.

        Args:
            state: the state, usually :meth:`copy`. It is stale afterwards.
            epochs, steps, items: the targets for ``state.epoch``, ``state.step`` and
                ``state.items``, also in a phase.
            hooks: the hooks to call.
            evaluate_every, record_every, prefetch: as in ``fit``.
            evaluations: in place of ``evaluate_every``, pairs of a moment and the loaders that are
                evaluated then. With none of them, a record is made.

        Returns:
            The state that it reaches; the same one if it is there already.

        Raises:
            Exception: any exception of the step, a loader or a hook, as in ``fit``.
            KeyboardInterrupt: after Ctrl-C.
        """
        __tracebackhide__ = True
        plan = self._plan(state, hooks, evaluate_every, record_every, prefetch)
        plan = attrs.evolve(plan, epochs=epochs, steps=steps, items=items)
        if evaluations is not None:
            own = tuple((moment, tuple(names)) for moment, names in evaluations)
            plan = attrs.evolve(plan, evaluations=own)
        reached = state
        if not plan.resumed(state).todo:
            return reached
        with contextlib.ExitStack() as stack:
            stack.enter_context(reserved_generators())
            if not self.moves:
                stack.enter_context(Reader.unmoved(self.loaders))
            for reached in fold(plan, state, Interrupts(is_alone(state))):  # noqa: B007
                pass
        if reached.stop == INTERRUPTED:
            raise KeyboardInterrupt
        return reached

    def _plan(
        self,
        state: TrainState,
        hooks: Sequence[HookFn] = (),
        evaluate_every: Moments = None,
        record_every: Moment | None = None,
        prefetch: int = 1,
    ) -> Plan:
        """Return the plan of a run in the phase that a state is in, up to any target."""
        phase = Phase.running(state.phases).name or None
        plan = Plan.of(
            self.step, state, self.loaders, 1, None, hooks, evaluate_every, record_every, prefetch,
            phase,
        )  # fmt: skip
        return attrs.evolve(plan, assumed_items=self.assumed_items)

    def check_metrics(self) -> None:
        """Raise if the step or a hook watches a metric that a run does not have.

        Raises:
            KeyError: it does; the message says which.
        """
        plan = self._plan(changed(self.state, phases=()), self.hooks)
        if any(one.key.startswith("recent/") for one in plan.watched):
            plan = attrs.evolve(plan, record_every=at_end())  # it is fit that is told
        models = Several.names_of(self.state.model)
        plan.check_metrics(plan.loaders.evaluated, self.state.history, models)

    # --- batches

    def source(self, state: TrainState, name: str = "train", *, exchanges: bool = True) -> Source:
        """Return a loader as a run of a state reads it: a function of (seed, epoch, position).

        Args:
            state: the state.
            name: the name of the loader.
            exchanges: whether every process opens it, and they may exchange its length.

        Returns:
            A value with ``length``, ``length_in(epoch)``, ``left(epoch, batch, samples)``, all of
            them None where unknown; ``batches(epoch, batch, samples)`` and ``indices(epoch, batch,
            samples)``, both from a position on; ``why_empty()``; and ``reader.varies``, whether
            epochs differ in length.
        """
        loader, total = self.loaders[name], self.step.total if name == "train" else None
        if exchanges:
            return open_loader(loader, state, total)
        reader = Reader.of(loader)
        return Source.open(reader, state.seed) if reader.shared else open_loader(loader, state)

    def read(self, source: Source, n: int) -> tuple[list[Batch], list[float]]:
        """Return copies of the first batches of a loader, on the device, and how long each took.

        Args:
            source: what :meth:`source` returns.
            n: how many batches.

        Returns:
            The batches, and the seconds.
        """
        __tracebackhide__ = True
        batches, seconds, device = list[Batch](), list[float](), self.state.backend.device
        with isolated(device), Reader.unmoved(self.loaders):
            began = time.perf_counter()
            for batch in source.first_batches(device, n):
                seconds.append(time.perf_counter() - began)
                batches.append(own_copy(batch))
                began = time.perf_counter()
        return batches, seconds
