"""What happens before the first update of a run, and the hints that are given then."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs
import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from fnloop._backend.torch_compat import cpu_capabilities
from fnloop._core.metrics import RECENT, without_recent
from fnloop._core.optimizers import explain_untrained, optimizers_in
from fnloop._core.runs import pending
from fnloop._core.saved import Pending
from fnloop._core.state import TrainState, bring, changed, note_buffers, trains_all
from fnloop._core.types import Metric, Middleware, name_of
from fnloop._data.loaders import Loaders, even, sharded
from fnloop._data.source import Source
from fnloop._display.checks import join_names
from fnloop._display.screen import warn_once
from fnloop._display.tables import format_count
from fnloop._extensions import extensions
from fnloop._hooks.hook import BuiltIn, Hook, begin_records, every_layer
from fnloop._loop.errors import check_returned, explain, first_change, warn_on_main
from fnloop._loop.plan import Plan
from fnloop._step.pipeline import PipelineStep
from fnloop._step.update import prefixed

# --------------------------------------------------------------------------------------------------
# What happens before the first update of a run: hooks, modes of modules, slots, and metrics.


def first_state(plan: Plan, state: TrainState) -> TrainState:
    """Return the state with which a run begins, given one that knows the facts about the run."""
    __tracebackhide__ = True
    by = (*plan.step.pipeline.middleware, *every_layer(plan.hooks))
    state = bring(state, [part for one in by for part in one.brings])
    state = _begin_hooks(plan.hooks, state)
    _to_training_mode(state)
    if plan.record_every is None:
        state = changed(state, metrics=without_recent(state.metrics))
    plan.step.begin_run(state)
    suggest(plan.loaders, state)
    try:
        state = complete(plan.step, state)
    except Exception as error:
        explain(error, state, plan.step, "the making of slots", state.batch)
        raise
    if pending(state.todo) or state.ends is not None:
        _warn_of_unknown(state)
    note_buffers(state)
    # Hooks have tried the other parts.
    if parts := BuiltIn.parts_saved(plan.hooks) & {"slots", "metrics"}:
        _try_to_save(plan.step, state, parts)
    return state


def _try_to_save(step: PipelineStep, state: TrainState, parts: Collection[str]) -> None:
    """Raise CheckpointError if no checkpoint could hold slots, or metrics as far as known."""
    known = {**_unseen_metrics(step, {}), **state.metrics}
    for check in extensions("what a checkpoint can hold"):
        check(attrs.evolve(state, metrics=known), parts)


def complete(step: PipelineStep, state: TrainState) -> TrainState:
    """Return a state with its slots, and with objects in place of what a checkpoint has of them."""
    __tracebackhide__ = True
    state = step.init_slots(state)
    if not any(map(_is_pending, state.metrics.values())):
        return state
    read = {name: metric for name, metric in state.metrics.items() if _is_pending(metric)}
    unseen = _unseen_metrics(step, read)
    made = {
        name: Pending.fill(like, metric)
        for name, metric in read.items()
        if (like := unseen.get(name.removeprefix(RECENT))) is not None
    }
    return attrs.evolve(state, metrics={**state.metrics, **made})


def _is_pending(metric: object) -> bool:
    return isinstance(metric, Pending)


def _unseen_metrics(step: PipelineStep, read: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics of a step that are known before any batch, by the names of a report.

    Args:
        step: the step.
        read: those of a checkpoint, as far as they are known, by name.
    """
    found: dict[str, Metric] = {}
    for unseen_metrics in extensions("metrics known before any batch"):
        found |= unseen_metrics(step.pipeline.middleware, read)
    for turn, inner in step.turns.items():
        found |= {
            prefixed(turn, name): metric for name, metric in _unseen_metrics(inner, {}).items()
        }
    return found


def _warn_of_unknown(state: TrainState) -> None:
    """Warn of metrics that the record with which a run begins cannot have."""
    if names := [name for name, metric in state.metrics.items() if _is_pending(metric)]:
        warn_on_main(
            state,
            f"fit: the record of step {state.step}, which the interrupted run has left to this "
            f"one, is made without {join_names(names)}: only a batch shows of which class they are",
        )


def _begin_hooks(hooks: Iterable[Hook], state: TrainState) -> TrainState:
    """Call the method ``begin`` of the hooks that have one. Return the state to start with.

    Raises:
        TypeError: a hook returned something other than a state.
        ValueError: a hook returned a state at another position.
        StaleStateError: a hook returned a state that has been advanced.
    """
    __tracebackhide__ = True
    run = state.run
    for hook in hooks:
        begin_records(hook, state)
        try:
            new = check_returned(hook, state, hook.begin(state), "begin")
            _check_position(hook, state, new)
        except Exception as error:
            error.add_note(f"while in {name_of(hook)}, before the first update")
            raise
        state = new if new.run is not None else attrs.evolve(new, run=run)
    return state


def _check_position(hook: Hook, before: TrainState, new: TrainState) -> None:
    if changed := first_change(before, new, ("step", "epoch", "batch")):
        raise ValueError(
            f"the method begin of {name_of(hook)} changed {changed}, but the run is planned "
            "already: restore before fit"
        )


def _to_training_mode(state: TrainState) -> None:
    """Put a model that is in evaluation mode as a whole into training mode.

    Modules that are in evaluation mode by themselves stay so, and norm layers that are frozen are
    in it whatever the script did.
    """
    if not state.model.training:
        warn_on_main(
            state,
            "fit: the model was in evaluation mode as a whole; it is trained in training mode "
            "(model.train())",
        )
        state.model.train()
    for keep_statistics in extensions("norm layers that are frozen"):
        keep_statistics(state)


# --------------------------------------------------------------------------------------------------
# Hints about settings, logged once. They are never changed: the settings are the user's.


def suggest(loaders: Loaders, state: TrainState) -> None:
    """Log once, on the main process, what is not trained, and what would make a run faster."""
    if state.backend.main:
        suggest_loaders(loaders, state.backend.device)
        suggest_precision(state)
        optimizers = optimizers_in(state.optimizer).values()
        if not trains_all(state) and (left := explain_untrained(state.model, optimizers)):
            warn_once(f"fit: {left}")


LEAST_SHARE, LEAST_SAVED = 0.05, 1.0  # of the time of an update; seconds of a run so far


def suggest_fused(
    listed: Iterable[Middleware], state: TrainState, seconds: float, updates: int
) -> None:
    """Log once, on the main process, how each optimizer would make a run faster by 5 % or more.

    A run that would have been faster by less than a second so far is told nothing, and neither is
    one whose optimizer's step is compiled.

    Args:
        listed: the middleware of the run.
        state: the state reached.
        seconds: the time of its updates, without evaluations and hooks.
        updates: how many there were.
    """
    device = state.backend.device.type
    compiles = any("compiles" in m.traits for m in listed)
    if device not in ("cuda", "cpu") or compiles or not state.backend.main:
        return
    for optimizer in optimizers_in(state.optimizer).values():
        hint = fused_hint(optimizer, device)
        saved = updates * fused_saving(optimizer, device)
        if hint and ("foreach" in hint or saved >= max(LEAST_SAVED, LEAST_SHARE * seconds)):
            warn_once(hint)


def fused_saving(optimizer: Optimizer, device: str) -> float:
    """Return how many seconds of an update a fused Adam saves at least; 0 for other optimizers.

    Measured for AdamW on one core, with torch 2.13, in percent of an update: a linear layer 20, an
    MLP of 102,000 elements 26, one of 4.2 million 35 with 64 samples in a batch and 2.7 with 1,024,
    a CNN of 72,000 elements 3, a transformer of 229,000 elements 11, one of 3.7 million 2.6 with
    1,024 tokens in a batch, and one of 20 million 8 with 256. So it depends on what else an update
    does, and only the time of an update tells. What is saved was at least 15 µs for each tensor and
    1 ns for each element. A fused SGD saved nothing.

    On a GPU what is saved is what the passes of ``foreach`` read and write more than one pass: 52
    bytes for each element, at 2.5 TB/s. That is an estimate, and leaves out the time of the host.
    """
    if not isinstance(optimizer, Adam | AdamW):
        return 0.0
    per_tensor, per_element = (15e-6, 1e-9) if device == "cpu" else (0.0, 2e-11)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return per_tensor * len(trained) + per_element * sum(p.numel() for p in trained)


def fused_hint(optimizer: Optimizer, device: str = "cuda") -> str | None:
    """Return how an optimizer would be faster, or None.

    Args:
        optimizer: any. A setting that was given explicitly (``fused=False``, ``foreach=True``) is
            respected.
        device: the type of the device. On the CPU only a fused Adam is named: ``foreach`` and a
            fused SGD make no difference there.
    """
    name = type(optimizer).__name__
    if device == "cpu" and type(optimizer) not in (Adam, AdamW):
        return None
    same = "the same" if device == "cuda" else "equal up to rounding"
    for group in optimizer.param_groups:
        dense = all(p.is_floating_point() and p.layout is torch.strided for p in group["params"])
        if not dense or group.get("fused") or group.get("differentiable"):
            continue
        if "fused" in group and group["fused"] is None and not group.get("foreach"):
            return f"fit: tip: {name}(..., fused=True) is faster; results are {same}"
        if group.get("foreach") is False:
            return (
                f"fit: {name} updates one parameter after the other; without foreach=False, it "
                "updates all at once"
            )
    return None


def suggest_loaders(loaders: Loaders, device: torch.device) -> None:
    """Log once which settings of DataLoaders cannot do what they are for."""
    for name, loader in {"train": loaders.train, **loaders.evaluated}.items():
        for hint in loader_hints(name, loader, device):
            warn_once(hint)


def loader_hints(name: str, loader: object, device: torch.device) -> Iterator[str]:
    """Yield what torch does not say itself about the settings of a DataLoader.

    Torch says if one process has more workers than CPUs, and if workers cannot pin memory.

    Args:
        name: the name of the loader.
        loader: any.
        device: that of the model.
    """
    while isinstance(loader, sharded | even):
        loader = loader.loader
    if not isinstance(loader, DataLoader):
        return
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if loader.num_workers <= cpus < loader.num_workers * processes:
        yield (
            f"fit: the {name} loader has {format_count(loader.num_workers, 'worker')} in each of "
            f"{processes} processes of this machine, which together have "
            f"{format_count(cpus, 'CPU')}: num_workers={cpus // processes} is the most that helps"
        )
    is_told = loader.num_workers and not torch.accelerator.is_available()
    if loader.pin_memory and device.type in ("cpu", "mps") and not is_told:
        yield (
            f"fit: pin_memory=True of the {name} loader is of no use to a model on {device.type}: "
            "pinned memory is for copies to a GPU"
        )


def suggest_precision(state: TrainState) -> None:
    """Log once that the CPU of a run is slow in its precision."""
    if state.run is None or state.run.precision is None or state.backend.device.type != "cpu":
        return
    if hint := precision_hint(state.run.precision, cpu_capabilities()):
        warn_once(hint)


_NATIVE = {  # what a CPU has that computes in a precision; AVX-512 alone helps with bf16
    "bf16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16", "avx512_bw"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def precision_hint(precision: str, has: Mapping[str, object]) -> str | None:
    """Return that a CPU only emulates a precision, or None.

    It was measured on one without AVX-512: bf16 takes 4 to 9 times as long as float32, and fp16 9
    times.

    Args:
        precision: "bf16", "fp16", or "bf16, fp16" if the turns of ``alternate`` differ.
        has: the instruction sets of the CPU, by name; none if they are not known.
    """
    lacking = [each for each in precision.split(", ") if not any(map(has.get, _NATIVE[each]))]
    if not has or not lacking:
        return None
    return (
        f"fit: this CPU only emulates {' and '.join(lacking)}, and is several times as fast in "
        "float32: write amp(None) in the pipeline"
    )


def check_length(source: Source, epoch: int, first: int, samples: int, batches: int) -> None:
    """Log once if a loader has given more or fewer batches in an epoch than its length says.

    Args:
        source: the training loader.
        epoch: the number of the epoch, from 0.
        first: the batches of the epoch that were consumed before, which may have had another size.
        samples: their samples, if known.
        batches: the batches of the epoch, in all processes, with the padding of the last round.
    """
    said = source.left(epoch, first, samples)
    if said is None or (given := batches - first) == source.padded(said):
        return
    length = source.length_in(epoch)
    left = f" from batch {first} on, where {said} were left" if first else ""
    warn_once(
        f"fit: the length of the training loader is {length}, but an epoch of it had {given} "
        f"batches{left}. Schedules, and the number of updates, are made for {length}: let __len__ "
        "return the number of batches, or leave it out"
    )
