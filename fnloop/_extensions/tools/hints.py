"""Hints about settings, logged once. They are never changed: the settings are the user's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from fnloop._backend import torch_compat
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware
from fnloop._data.loaders import even, sharded
from fnloop.extend import optimizers, reprs, warn_once


def suggest(loaders: Mapping[str, object], state: TrainState) -> None:
    """Log once, on the main process, what would make a run faster."""
    if state.backend.main:
        suggest_loaders(loaders, state.backend.device)
        suggest_precision(state)


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
    for optimizer in optimizers(state).values():
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


def suggest_loaders(loaders: Mapping[str, object], device: torch.device) -> None:
    """Log once which settings of DataLoaders cannot do what they are for."""
    for name, loader in loaders.items():
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
        workers = reprs.format_count(loader.num_workers, "worker")
        yield (
            f"fit: the {name} loader has {workers} in each of {processes} processes of this "
            f"machine, which together have {reprs.format_count(cpus, 'CPU')}: "
            f"num_workers={cpus // processes} is the most that helps"
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
    if hint := precision_hint(state.run.precision, torch_compat.cpu_capabilities()):
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
