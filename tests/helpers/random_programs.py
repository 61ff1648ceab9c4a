"""Random programs, each cut at random places and compared with itself uncut, bit for bit.

    python tests/helpers/random_programs.py --seed 7 --programs 500
    python tests/helpers/random_programs.py --seed 7 --minutes 60      # then seed 8, 9, ...
    python tests/helpers/random_programs.py --seed 7 --only 221  # one program, as a report names it

A program is plain data: a model, an optimizer, loaders, a pipeline, hooks, moments and targets, as
the source text that makes them. It is run whole. Then it is run again with cuts, and continued
after each: in memory, with a snapshot, or with new objects from the disk. A program that differs,
or that raises, is made smaller while it still does, and printed so that it can be pasted.

Some programs are compared with a loop written by hand as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from toolz import partition_all
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, Dataset

import fnloop as fl
from fnloop._core.serialize import Pending
from fnloop._loop.beginning import complete

# --- what a program is


@attrs.frozen(repr=False)
class Program:
    """What is run. Texts are Python, with ``fl`` and the methods of :class:`World` as names.

    Args:
        model: parts beside two linear layers: "norm", "centre", "rebound", "dropout".
        optimizer: a name in ``OPTIMIZERS``.
        loss: what the loss function does: "weight", "tensor weight", "draws", "greedy".
        train: the training loader.
        valid: the loaders to evaluate, by name.
        members: the pipeline.
        turns: the pipelines of ``alternate``, by the name of the optimizer, inside the other one.
        order: the order of the turns, and the batches that they take: "same" or "next".
        hooks: the hooks.
        evaluate_every: when to evaluate; or by the name of the loader.
        record_every: when to make a record.
        prefetch: as in ``fit``.
        saves: when a run that is killed has saved.
        fits: the keywords of the calls of ``fit``, one after another.
    """

    model: tuple[str, ...] = ()
    optimizer: str = "sgd"
    loss: tuple[str, ...] = ()
    train: str = "batches(4)"
    valid: Mapping[str, str] = attrs.field(factory=lambda: {"valid": "batches(2, first=50)"})
    members: tuple[str, ...] = ()
    turns: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    order: tuple[str, str] = ("ab", "same")
    hooks: tuple[str, ...] = ()
    evaluate_every: str = "fl.every(epochs=1)"
    record_every: str = "None"
    prefetch: int = 1
    saves: str = "fl.every(steps=1)"
    fits: tuple[Mapping[str, Any], ...] = ({"epochs": 2},)

    def __repr__(self) -> str:
        plain = Program()
        given = {a.name: getattr(self, a.name) for a in attrs.fields(Program)}
        shown = [f"{k}={v!r}" for k, v in given.items() if v != getattr(plain, k)]
        return f"Program({', '.join(shown)})"

    @property
    def text(self) -> str:
        members = itertools.chain(self.members, *self.turns.values())
        return " ".join([*members, *self.hooks, self.evaluate_every, self.record_every])

    def has(self, *words: str) -> bool:
        return any(word in self.text for word in words)

    @property
    def has_phases(self) -> bool:
        return any("phase" in given for given in self.fits)

    @property
    def depends_on_total(self) -> bool:
        return self.has("fl.schedules.linear(", "fl.schedules.cosine(", "swa(0.")


@attrs.frozen
class Cut:
    """How and where a run is cut.

    Args:
        how: "target" (``fit`` to an earlier target), "stop" (by a hook), "press" (Ctrl-C),
            "terminate" (SIGTERM), "interrupt" (KeyboardInterrupt is raised), "fail" (an exception),
            or "kill" (continued from the newest checkpoint).
        at: the kind of point; for "target", "steps" or "epochs".
        n: which of the points of this kind, from 0; for "target", the target.
        through: how the state gets to the next run: "memory", "snapshot" or "disk".
    """

    how: str
    at: str
    n: int
    through: str = "memory"


WHOLE = Cut("", "", -1)


class Killed(BaseException):
    """The process was killed here."""


class Failed(Exception):
    """Something failed here."""


class Fault(AssertionError):
    """A program does not do what it should."""


# --- faults that are known. Empty it when they are mended.


def _waits(program: Program, cuts: Sequence[Cut]) -> bool:
    """inspect forgets that it waits for the next evaluation."""
    return program.has("fl.inspect") and bool(cuts)


def _again(program: Program, cuts: Sequence[Cut]) -> bool:
    """A hook due at an update and at the end is called twice, if a run is cut between the two."""
    both = any("at_end" in hook and ("|" in hook or "~" in hook) for hook in program.hooks)
    return both and any(cut.how not in ("target", "stop") for cut in cuts)


def _half_a_fetch(program: Program, cuts: Sequence[Cut]) -> bool:
    """The host's generators are as a batch left them that failed after some of its samples."""
    draws = "draws" in program.loss and "shuffled" in program.train
    return draws and any(c.at == "loader" and c.how in ("fail", "interrupt") for c in cuts)


def _shorter(program: Program, cuts: Sequence[Cut]) -> bool:
    """A loader shorter than ``take`` has announced: the planned total depends on the cut."""
    return bool(cuts) and "fl.data.take(stream" in program.train and program.has("fl.schedule(")


KNOWN: dict[str, Callable[[Program, Sequence[Cut]], bool]] = {
    "waits": _waits,
    "again": _again,
    "half-a-fetch": _half_a_fetch,
    "shorter": _shorter,
}


# --- what a program is made of

MARKS = {"skip": 1.0, "nan": 2.0, "spike": 3.0}


class Centre(nn.Module):
    """Subtracts a running mean: buffers as in a BatchNorm, for batches of one sample too."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.update(x.detach().float().flatten(0, -2).mean(0))
        return x - self.mean

    def update(self, new: Tensor) -> None:
        self.mean.lerp_(new, 0.25)
        self.count += 1


class Rebound(Centre):
    """Puts new tensors in the place of its buffers."""

    def update(self, new: Tensor) -> None:
        self.mean = self.mean.lerp(new, 0.25)
        self.count = self.count + 1


def make_model(parts: Sequence[str]) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        layers: list[nn.Module] = [nn.Linear(3, 4)]
        layers += [nn.BatchNorm1d(4)] if "norm" in parts else []
        layers += [Centre(4)] if "centre" in parts else []
        layers += [Rebound(4)] if "rebound" in parts else []
        layers += [nn.Tanh()]
        layers += [nn.Dropout(0.3)] if "dropout" in parts else []
        layers += [nn.Linear(4, 1)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return model


OPTIMIZERS: dict[str, Callable[[nn.Sequential], Any]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "adamw": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.1},
        ],
        lr=0.05,
    ),
    "two": lambda m: {
        "a": torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.5),
        "b": torch.optim.AdamW([p for each in m[1:] for p in each.parameters()], lr=0.05),
    },
}


def fresh(program: Program) -> fl.TrainState:
    model = make_model(program.model)
    return fl.TrainState.create(model, OPTIMIZERS[program.optimizer](model), seed=3)


def sample(i: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3,)), generator=torch.Generator().manual_seed(1000 + i))


class Samples(Dataset):
    """Samples, with noise from torch's, Python's or NumPy's generator."""

    def __init__(self, world: World, n: int, marks: Mapping[int, str], noise: str | None) -> None:
        self.world, self.n, self.marks, self.noise = world, n, marks, noise

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.world.point("loader")
        noise: Any = 0.0
        if self.noise == "torch":
            noise = torch.rand(3)
        elif self.noise == "python":
            noise = random.random()
        elif self.noise == "numpy":
            noise = np.random.rand()
        return sample(i) + noise, torch.tensor(MARKS.get(self.marks.get(i, ""), 0.0))


class Located:
    """A loader that knows where it is."""

    def __init__(self, world: World, n: int, marks: Mapping[int, str]) -> None:
        self.world, self.n, self.marks, self.begin, self.at = world, n, marks, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begin = self.begin, 0
        while self.at < self.n:
            self.world.point("loader")
            self.at += 1
            yield self.world.batch(self.at - 1, marks=self.marks)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.begin = state["at"]


class CutHook:
    """A hook at whose calls a run may be cut."""

    def __init__(self, world: World, kind: str) -> None:
        self.world, self.kind = world, kind

    def __call__(self, state: fl.TrainState) -> fl.TrainState:
        stops = self.world.point(self.kind)
        return attrs.evolve(state, stop="cut") if stops and state.stop is None else state

    def flush(self, state: fl.TrainState) -> fl.TrainState:
        self.world.point("flush")
        return state


class World:
    """What the texts of a program name, in one run; and the points at which it may be cut."""

    def __init__(self, program: Program, folder: Path | None = None) -> None:
        self.program, self.folder = program, folder
        self.cut, self.is_cut = WHOLE, False
        self.points: Counter[str] = Counter()
        self.calls: list[tuple[Any, ...]] = []
        names = {k: getattr(self, k) for k in dir(self) if not k.startswith("_")}
        self._names = {**names, "fl": fl, "torch": torch, "attrs": attrs}
        inner: Any = self._loss_fn()
        if program.turns:
            steps = {k: fl.pipeline(*map(self._read, v))(inner) for k, v in program.turns.items()}
            inner = fl.alternate(steps, order=tuple(program.order[0]), batch=program.order[1])
        self.step = fl.pipeline(*map(self._read, program.members))(inner)
        self.loaders = {"train": self._read(program.train)}
        self.loaders |= {name: self._read(text) for name, text in program.valid.items()}
        saves: tuple[Any, ...] = ()
        if folder is not None:
            saves = (self._read(program.saves)(fl.checkpoint(folder, keep=2)),)
        first, last = CutHook(self, "first hook"), CutHook(self, "hook")
        self.hooks = (first, *map(self._read, program.hooks), *saves, last)

    def _read(self, text: str) -> Any:
        return eval(text, self._names)

    def point(self, kind: str) -> bool:
        """Cut the run here, if it is to be. Return whether a hook has to stop it."""
        n, self.points[kind] = self.points[kind], self.points[kind] + 1
        if n > 2000:
            raise Fault("it does not end")
        if self.is_cut or (kind, n) != (self.cut.at, self.cut.n):
            return False
        self.is_cut = True
        if self.cut.how == "press":
            os.kill(os.getpid(), signal.SIGINT)
        elif self.cut.how == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.cut.how == "interrupt":
            raise KeyboardInterrupt
        elif self.cut.how == "fail":
            raise Failed
        elif self.cut.how == "kill":
            raise Killed
        return self.cut.how == "stop"

    # --- batches

    def batch(self, i: int, size: int = 2, marks: Mapping[int, str] | None = None) -> Any:
        mark = MARKS.get((marks or {}).get(i, ""), 0.0)
        x = torch.stack([sample(10 * i + j) for j in range(size)])
        return x, torch.full((size,), mark)

    def batches(self, n: int, size: int = 2, first: int = 0, **marks: Any) -> list[Any]:
        """A list. The last batch has one sample more."""
        sizes = [size] * (n - 1) + [size + 1]
        return [self.batch(first + i, s, _marks(marks)) for i, s in enumerate(sizes)]

    def stream(self, n: int, grow: int = 0, size: int = 2, **marks: Any) -> Callable[..., Any]:
        """A function of where to begin. Each epoch has ``grow`` batches more."""

        def read(epoch: int, batch: int) -> Iterator[Any]:
            for i in range(batch, n + grow * (epoch % 2)):
                self.point("loader")
                yield self.batch(i + 7 * epoch, size, {i + 7 * epoch: _marks(marks).get(i, "")})

        return read

    def again(self, n: int, **marks: Any) -> Callable[[], Iterator[Any]]:
        """A function that makes one pass."""

        def read() -> Iterator[Any]:
            for i in range(n):
                self.point("loader")
                yield self.batch(i, marks=_marks(marks))

        return read

    def located(self, n: int, **marks: Any) -> Located:
        return Located(self, n, _marks(marks))

    def shuffled(
        self, n: int, size: int = 2, noise: str | None = None, drop_last: bool = False, **marks: Any
    ) -> DataLoader[Any]:
        samples = Samples(self, n, _marks(marks), noise)
        return DataLoader(samples, size, shuffle=True, drop_last=drop_last)

    def checked(self, n: int, first: int = 50) -> Callable[[], Iterator[Any]]:
        """Batches to evaluate, with a point before each."""

        def read() -> Iterator[Any]:
            for i in range(n):
                self.point("evaluated loader")
                yield self.batch(first + i, 2 + i % 2)

        return read

    def sequences(self, n: int, length: int = 4, first: int = 0, **marks: Any) -> list[Any]:
        """Batches for ``tbptt``: (2, length, 3)."""
        found = []
        for i in range(n):
            mark = MARKS.get(_marks(marks).get(i, ""), 0.0)
            found.append((sample(first + i, 2, length, 3), torch.full((2, length), mark)))
        return found

    # --- the loss function

    def _loss_fn(self) -> Callable[..., Any]:
        does = self.program.loss

        def loss_fn(model: nn.Module, batch: Any) -> Any:
            x, mark = batch
            self.point("training" if model.training else "evaluation")
            if "greedy" in does and model.training and len(x) > 1:
                raise torch.OutOfMemoryError("out of memory")
            if (mark == MARKS["skip"]).any():
                return fl.skip("it is marked")
            output = model(x)
            loss = (output - x.sum(-1, keepdim=True)).square().mean()
            if model.training and (mark == MARKS["nan"]).any():
                loss = loss * float("nan")
            if model.training and (mark == MARKS["spike"]).any():
                loss = loss * 1000.0
            if "draws" in does and model.training:
                loss = loss * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
            aux: dict[str, Any] = {"output": output}
            if "weight" in does:
                aux["weight"] = 1 + int((x > 0).sum())
            if "tensor weight" in does:
                aux["weight"] = (x > 0).sum() + 1
            return loss, aux

        def carried(model: nn.Module, batch: Any, carry: Any) -> Any:
            x, mark = batch
            x = x if carry is None else x + 0.1 * carry[:, None]
            found = loss_fn(model, (x, mark))
            return (*found, x.mean(1)) if isinstance(found, tuple) else found

        return carried if any("tbptt" in text for text in self.program.members) else loss_fn

    # --- hooks

    def note(self, name: str) -> Callable[[fl.TrainState], fl.TrainState]:
        def note(state: fl.TrainState) -> fl.TrainState:
            reports = [r for r in state.history if not r.closing]
            weights = [p.detach().sum().item().hex() for p in state.model.parameters()]
            at = state.step, state.epoch, state.batch, state.skipped
            self.calls.append((name, *at, len(reports), *weights))
            return state

        return note

    def see(self, name: str) -> Callable[..., None]:
        def see(state: fl.TrainState, outputs: Any) -> None:
            self.calls.append((name, state.step, state.epoch, len(outputs)))

        return see

    def count(self, name: str) -> Callable[[fl.TrainState], fl.TrainState]:
        def count(state: fl.TrainState) -> fl.TrainState:
            n = state.extra.get(name, 0) + 1
            return attrs.evolve(state, extra={**state.extra, name: n})

        return count

    def stop(self, why: str) -> Callable[[fl.TrainState], fl.TrainState]:
        return lambda state: attrs.evolve(state, stop=why)

    def end_epoch(self) -> Callable[[fl.TrainState], fl.TrainState]:
        return lambda state: attrs.evolve(state, ends="epoch")


def _marks(given: Mapping[str, Any]) -> dict[int, str]:
    """Return the mark of each batch or sample: ``skip=(1, 3), nan=(2,)``."""
    return {i: kind for kind, places in given.items() for i in places}


def small_decay(i: int, total: int | None) -> float:
    return 0.9**i


def step_rates(optimizer: Any, run: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


World.decay, World.step_rates = staticmethod(small_decay), staticmethod(step_rates)


# --- running it


@contextlib.contextmanager
def quiet(threads: int = 1) -> Iterator[None]:
    """No log, no warning, no flush to the disk; SIGTERM that came too late for a run is lost."""
    fsync, raised, before = os.fsync, signal.raise_signal, torch.get_num_threads()
    pressed = signal.signal(signal.SIGINT, signal.default_int_handler)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    os.fsync, signal.raise_signal = (lambda file: None), (lambda number: None)
    torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.fsync, signal.raise_signal = fsync, raised
        signal.signal(signal.SIGINT, pressed)
        logging.disable(disabled)
        torch.set_num_threads(before)


def train(world: World, state: fl.TrainState, cut: Cut = WHOLE) -> fl.TrainState:
    """Run the calls of ``fit`` of a program, from any state of it, to the cut if there is one."""
    program = world.program
    world.cut, world.is_cut, world.points = cut, False, Counter()
    moments = {k: world._read(getattr(program, k)) for k in ("evaluate_every", "record_every")}
    moments["evaluate_every"] = moments["evaluate_every"] if program.valid else None
    for given in program.fits:
        if cut.how == "target":
            smaller = min(cut.n, given.get(cut.at, cut.n))
            given, world.is_cut = {**given, cut.at: smaller}, True
        state = fl.fit(
            world.step, state, world.loaders, hooks=world.hooks, prefetch=program.prefetch,
            **moments, **given,
        )  # fmt: skip
        if world.is_cut:
            break
    return state


def whole_run(program: Program) -> tuple[fl.TrainState, World]:
    """Run a program without a cut."""
    world = World(program)
    return train(world, fresh(program)), world


def cut_run(
    program: Program, cuts: Sequence[Cut], folder: Path
) -> tuple[fl.TrainState, list[list[tuple[Any, ...]]]]:
    """Run a program with cuts. Return the state that it ends with, and the calls of each run."""
    kept = folder / "kept" if any(cut.how == "kill" for cut in cuts) else None
    state, world, calls = fresh(program), World(program, kept), []
    for n, cut in enumerate([*cuts, WHOLE]):
        world.calls = []
        calls.append(world.calls)
        killed = False
        try:
            state = train(world, state, cut)
        except Failed as error:
            if not hasattr(error, "state"):
                raise Fault(f"cut {n}: the exception has no state") from error
            state = error.state
        except Killed:
            killed = True
        if cut.through != "memory" or killed:
            world = World(program, kept)
        if killed:
            state = fl.resume(kept, fresh(program))
        elif cut.through == "snapshot":
            state = fl.snapshot(state)
        elif cut.through == "disk":
            fl.save(state, folder / f"saved-{n}")
            state = fl.restore(folder / f"saved-{n}", fresh(program))
        if state.stop == "cut":
            state = attrs.evolve(state, stop=None)
    return complete(world.step, state), calls  # where there was nothing left to do


# --- the comparison


@attrs.frozen
class Bits:
    """A tensor as it is compared."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes
    value: Tensor = attrs.field(eq=False)

    def __str__(self) -> str:
        return str(self.value.tolist())


def facts(value: Any, path: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write all that is in a value, by where it is, in a form that is compared bit for bit."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)
        flat = torch.where(flat.isnan(), torch.nan, flat) if flat.is_floating_point() else flat
        raw = flat.contiguous().view(torch.uint8)  # NaN equals NaN, and 0.0 differs from -0.0
        found[path] = Bits(str(value.dtype), tuple(value.shape), raw.numpy().tobytes(), value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            facts(each, f"{path}.{key}", found)
    elif isinstance(value, list | tuple):
        found[path] = len(value)
        for i, each in enumerate(value):
            facts(each, f"{path}.{i}", found)
    elif isinstance(value, float):
        found[path] = value.hex()
    elif callable(state_dict := getattr(value, "state_dict", None)):
        facts(state_dict(), path, found)
    elif isinstance(value, Pending):  # a copy from a checkpoint that was not needed yet
        facts(value.parts, path, found)
    elif attrs.has(kind := type(value)):
        for field in attrs.fields(kind):
            if field.eq:
                facts(getattr(value, field.name), f"{path}.{field.name}", found)
    elif not callable(value):
        found[path] = repr(value)
    return found


def describe(state: fl.TrainState) -> dict[str, Any]:
    """Return what has to be equal, but for closing records."""
    found: dict[str, Any] = {}
    for name in ("step", "epoch", "batch", "samples", "skipped", "updates", "seed", "stop", "ends"):
        found[name] = repr(getattr(state, name))
    facts(state.model.state_dict(), "model", found)
    facts([m.training for m in state.model.modules()], "modes", found)
    facts(state.optimizer, "optimizer", found)
    facts([r for r in state.history if not r.closing], "history", found)
    facts(state.slots, "slots", found)
    facts(state.extra, "extra", found)
    facts({k: m.compute() for k, m in state.metrics.items()}, "metrics", found)
    phases = [(p.name, p.step, p.epoch, p.stop, p.done, p.skipped) for p in state.phases]
    return facts(phases, "phases", found)


def closings(state: fl.TrainState) -> list[str]:
    return [str(facts(r, "", {})) for r in state.history if r.closing]


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    for path in [*one, *(path for path in other if path not in one)]:
        a, b = one.get(path, "nothing"), other.get(path, "nothing")
        if a != b:
            return f"{path}: {a} whole, {b} cut"
    return None


def compare(
    program: Program, cuts: Sequence[Cut], whole: fl.TrainState, cut: fl.TrainState
) -> None:
    """Raise Fault unless the run that was cut has ended as the whole one."""
    expected, made = describe(whole), describe(cut)
    if any(each.how == "target" for each in cuts):  # a schedule keeps the length of its last run
        for each in (expected, made):
            for path in [path for path in each if path[:5] == "slots" and "schedule(" in path]:
                del each[path]
    if (found := first_difference(expected, made)) is not None:
        raise Fault(found)
    expected, made = closings(whole), closings(cut)  # type: ignore[assignment]
    if any(each.how in ("target", "stop") for each in cuts):
        rest = iter(made)
        if not all(each in rest for each in expected):  # in this order
            raise Fault(f"a closing record is missing: {expected} whole, {made} cut")
    elif expected != made:
        raise Fault(f"closing records: {expected} whole, {made} cut")


def compare_calls(
    program: Program, cuts: Sequence[Cut], whole: list[Any], runs: list[list[Any]]
) -> None:
    """Raise Fault unless the hooks were called as in the whole run.

    What is due at the end is called where a run is cut on purpose as well, and what is due at the
    start again if there was no update yet.
    """
    cut_short = any(cut.how in ("target", "stop") for cut in cuts)
    left_out = ("start", "end") if cut_short else ("start",)
    kept = lambda calls: [c for c in calls if not c[0].startswith(left_out)]
    if any(cut.how in ("fail", "interrupt") and "hook" in cut.at for cut in cuts):
        return
    if any(cut.how == "kill" for cut in cuts):
        last = kept(runs[-1])
        if cut_short or last == kept(whole)[len(kept(whole)) - len(last) :]:
            return
        raise Fault(f"calls after the last cut: {last}, whole {kept(whole)}")
    found = kept(itertools.chain(*runs))
    if found != kept(whole):
        pairs = itertools.zip_longest(kept(whole), found)
        first = next(pair for pair in pairs if pair[0] != pair[1])
        raise Fault(f"calls: {first[0]} whole, {first[1]} cut")


# --- a loop by hand


def can_be_written_by_hand(program: Program) -> bool:
    known = ("fl.accumulate(", "fl.clip(0.5)", "fl.clip_value(", "fl.schedule(decay)")
    known += ("fl.ema(0.5)", "fl.skip_nonfinite(100)")
    return (
        all(text.startswith(known) for text in program.members)
        and "total" not in program.text
        and program.train.startswith(("batches(", "stream("))
        and program.optimizer != "two"
        and not program.turns
        and not program.loss
        and "dropout" not in program.model
        and ("spike" not in program.train)
        and program.fits == ({"epochs": program.fits[0].get("epochs")},)
        and not program.has("stop(", "end_epoch(", "early_stop", "restore_best", "nonfinite(1)")
        and not program.has("halt_on_nonfinite")
        and not ("nan" in program.train and not program.has("skip_nonfinite"))
    )


def by_hand(program: Program) -> dict[str, Tensor]:
    """Train as a program does, in a plain loop. Return its weights and its average."""
    model = make_model(program.model)
    optimizer = OPTIMIZERS[program.optimizer](model)
    rates = [group["lr"] for group in optimizer.param_groups]
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    world = World(program)
    call = {text.split("(")[0][3:]: text.split("(", 1)[1][:-1] for text in program.members}
    order = [text.split("(")[0][3:] for text in program.members]
    windows: Any = eval(call.get("accumulate", "1"))
    average = {k: p.detach().clone() for k, p in model.state_dict().items()}
    step = 0
    for epoch in range(program.fits[0]["epochs"]):
        train = world.loaders["train"]
        batches = [*(train if isinstance(train, list) else train(epoch, 0))]
        n = windows
        if isinstance(windows, dict):
            n = next((windows[e] for e in sorted(windows, reverse=True) if e <= epoch), 1)
        for window in partition_all(n, batches):
            buffers = [b.clone() for b in model.buffers()]
            sums, total, first, fine = None, 0, None, True
            for x, mark in window:
                if (mark == MARKS["skip"]).any():
                    continue
                loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
                loss = loss * float("nan") if (mark == MARKS["nan"]).any() else loss
                fine, first = fine and bool(loss.isfinite()), first or len(x)
                weight = len(x) / first
                # Clipped before it is accumulated, it is weighted after that; else before.
                inside = _before(order, "accumulate")
                optimizer.zero_grad()
                (loss if inside or weight == 1 else loss * weight).backward()
                for name in inside:
                    _clip(updated, name, call)
                grads = [p.grad.clone() for p in updated]
                if inside and weight != 1:
                    grads = [g * weight for g in grads]
                sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
                total += len(x)
            if sums is None or not fine:
                for b, old in zip(model.buffers(), buffers, strict=True):
                    b.copy_(old)
                continue
            for p, g in zip(updated, sums, strict=True):
                p.grad = g / (total / first)
            for name in order if "accumulate" not in order else _after(order, "accumulate"):
                _clip(updated, name, call)
            if "schedule" in call:
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * small_decay(step, None)
            optimizer.step()
            step += 1
            for key, value in model.state_dict().items():
                if value.is_floating_point():
                    average[key].lerp_(value, 0.5)
    return {
        **model.state_dict(),
        **({f"ema.{k}": v for k, v in average.items()} if "ema" in call else {}),
    }


def _before(order: list[str], name: str) -> list[str]:
    found = order[: order.index(name)] if name in order else []
    return [each for each in found if each in ("clip", "clip_value")]


def _after(order: list[str], name: str) -> list[str]:
    return order[order.index(name) + 1 :]


def _clip(parameters: list[nn.Parameter], name: str, call: Mapping[str, str]) -> None:
    if name == "clip":
        clip_grad_norm_(parameters, float(call["clip"]))
    elif name == "clip_value":
        clip_grad_value_(parameters, float(call["clip_value"]))


def compare_with_hand(program: Program, whole: fl.TrainState) -> None:
    found = dict(whole.model.state_dict())
    if "ema" in whole.slots:
        found |= {f"ema.{k}": v for k, v in whole.slots["ema"].items()}
    for key, value in by_hand(program).items():
        if key in found and not torch.equal(found[key], value):
            raise Fault(f"{key}: {value.tolist()} by hand, {found[key].tolist()} by fit")


# --- drawing programs

PARTS = ("norm", "centre", "rebound", "dropout")
LENGTHS = {"batches": True, "stream": False, "again": False, "located": False, "shuffled": True}


def draw_moment(r: random.Random, has_length: bool, deep: int = 2) -> str:
    """Draw a moment that does not depend on records."""
    if deep and r.random() < 0.4:
        one, other = (draw_moment(r, has_length, deep - 1) for _ in range(2))
        return f"({one} {r.choice('|&|')} {other})"
    if deep and r.random() < 0.1:
        return f"(~{draw_moment(r, has_length, 0)})"
    kinds = [
        *("fl.every(epochs=1)", "fl.every(epochs=1)", "fl.every(epochs=2)"),
        *(f"fl.every(steps={r.randint(1, 4)})", "fl.at_start()", "fl.at_end()", "fl.at_end()"),
        f"fl.when(lambda s: s.step % {r.randint(2, 4)} == 1)",
        *(["fl.every(epochs=0.5)"] if has_length else []),
    ]
    return r.choice(kinds)


def draw_marks(r: random.Random, n: int, kinds: Sequence[str]) -> str:
    """Draw which batches are marked, without a draw of the generator itself."""
    found, kinds = "", [*dict.fromkeys(kinds)]
    r = random.Random(repr((n, kinds, r.getstate()[1])))
    for kind in kinds:
        places = sorted(r.sample(range(n), min(n, r.randint(1, 2))))
        found += f", {kind}=({', '.join(map(str, places))},)"
    return found


def draw_train(r: random.Random, marks: Sequence[str], deep: int = 1) -> tuple[str, bool]:
    """Draw a training loader. Return it, and whether it has a length."""
    kind, n = r.choice([*LENGTHS, "batches", "shuffled"]), r.randint(1, 6)
    if kind == "shuffled":
        n = r.randint(4, 11)
        noise = r.choice([None, None, "torch", "python", "numpy"])
        text = f"shuffled({n}{draw_marks(r, n, marks)}"
        text += f", size={r.randint(2, 3)}" + (f", noise={noise!r}" if noise else "")
        text += (", drop_last=True" if r.random() < 0.3 else "") + ")"
    elif kind == "stream":
        grow = r.choice([0, 0, 1, 2])
        text = f"stream({n}{draw_marks(r, n, marks)}{f', grow={grow}' if grow else ''})"
    else:
        text = f"{kind}({n}{draw_marks(r, n, marks)})"
    length = LENGTHS[kind]
    if deep and r.random() < 0.3:
        way = r.choice(["take", "leave_out", "interleave", "ratios", "fixed"])
        if way == "take":
            return f"fl.data.take({text}, {r.randint(2, 4)})", length
        if way == "leave_out":
            at = r.randint(0, 2)
            return (
                f"fl.data.leave_out({text}, lambda epoch, batch: batch == {at} + epoch % 2)",
                False,
            )
        if way == "fixed" and kind == "shuffled":
            return f"fl.data.fixed({text}, 3)", True
        other, also = draw_train(r, (), 0)
        both = f'{{"a": {text}, "b": {other}}}'
        if way == "ratios":
            ratios = f'{{"a": {r.randint(1, 2)}, "b": {r.randint(1, 2)}}}'
            return f"fl.data.interleave({both}, {ratios})", length and also
        if length and also:
            return f"fl.data.interleave({both})", True
    return text, length


def draw_members(
    r: random.Random, marks: list[str], knows_total: bool, two: bool, key: str
) -> list[str]:
    """Draw the middleware of a pipeline, in any order. It may ask for marks in the data."""
    found = []
    maybe = lambda p: r.random() < p
    if maybe(0.4):
        found.append(
            r.choice(
                [
                    *(f"fl.accumulate({n})" for n in (2, 3)),
                    f"fl.accumulate({{0: {r.randint(1, 2)}, 1: {r.randint(1, 3)}}})",
                    "fl.accumulate({1: 2, 2: 1})",
                ]
            )
        )
    if maybe(0.25):
        found.append(r.choice(["fl.clip(0.5)", "fl.clip(1.0, norm_type=float('inf'))"]))
    elif maybe(0.15):
        found.append(r.choice(["fl.grad_norm()", 'fl.grad_norm(by="module")']))
    found += ["fl.clip_value(0.2)"] if maybe(0.15) else []
    found += ["fl.clip_adaptive(0.05)"] if maybe(0.05) else []
    found += ["fl.sam(0.05)"] if maybe(0.06) else []
    found += [r.choice(["fl.microbatch(1)", "fl.microbatch(2)"])] if maybe(0.12) else []
    if maybe(0.25):
        found.append(r.choice(["fl.ema(0.5)", 'fl.ema(0.8, start=2, every=2, evaluate="only")']))
    if maybe(0.15):
        found.append(r.choice(["fl.swa(2)", *(["fl.swa(0.5, every=2)"] if knows_total else [])]))
    only = ', only=("a",)' if two and maybe(0.5) else ""
    if maybe(0.35):
        rates = ["decay", "decay", "fl.schedules.exponential(0.9)"]
        if knows_total:
            rates += ["fl.schedules.linear()", "fl.schedules.cosine(warmup=2)"]
        found.append(f"fl.schedule({r.choice(rates)}{only})")
    elif maybe(0.12):
        found.append(f"fl.torch_scheduler(step_rates{', only=' + repr('a') if two else ''})")
    if maybe(0.15):
        found.append(f"fl.plateau({key!r}, factor=0.5, patience={r.randint(1, 2)}, mode='max')")
    if maybe(0.25):
        found.append(r.choice(["fl.skip_nonfinite(100)", f"fl.skip_nonfinite({r.randint(1, 2)})"]))
        marks.append("nan")
    if maybe(0.25):
        then, window = r.choice(["skip", "stop", "back", "back"]), r.randint(1, 3)
        found.append(f"fl.spike_guard(window={window}, ratio=3.0, then={then!r})")
        marks.append("spike")
    if maybe(0.2):
        which = r.choice(["", ', on="training"', ', on="evaluation"'])
        kind = r.choice(
            ["a['output'].max()", "fl.Sum(a['output'].sum())", "fl.Last(a['output'].min())"]
        )
        found.append(f"fl.metric(top=lambda a, b: {kind}{which})")
    found += ["fl.derive(double=lambda m: 2 * m['loss'])"] if maybe(0.1) else []
    found += ["fl.amp('bf16')"] if maybe(0.08) else []
    r.shuffle(found)
    return found


def draw_hooks(r: random.Random, has_length: bool, key: str, evaluates: bool) -> list[str]:
    found = []
    for i in range(r.choice([0, 1, 1, 2, 3])):
        moment = draw_moment(r, has_length)
        name = "start" if "at_start" in moment else "end" if "at_end" in moment else "note"
        noted = f"note({f'{name} {i}'!r})"
        if name == "note" and r.random() < 0.3:
            noted = f"count('n{i}')"
        if r.random() < 0.15:
            noted = f"fl.once({noted}, name='once {i}')"
        found.append(f"{moment}({noted})")
    if r.random() < 0.2:
        found.append(f"fl.when(lambda s: s.step == {r.randint(1, 9)})(stop('enough'))")
    if r.random() < 0.25:
        when = r.choice(
            [
                f"fl.when(lambda s: s.batch == {r.randint(1, 4)})",
                f"fl.when(lambda s: s.step == {r.randint(1, 6)})",
                f"fl.every(steps={r.randint(2, 4)})",
                "fl.every(epochs=1)",
            ]
        )
        found.append(f"{when}(end_epoch())")
    if r.random() < 0.2:
        mode = r.choice(["min", "max"])
        found.append(f"fl.early_stop({key!r}, patience={r.randint(1, 3)}, mode={mode!r})")
    if r.random() < 0.2:
        found.append(f"fl.restore_best({key!r}, {r.choice(['min', 'max'])!r})")
    if r.random() < 0.15:
        found.append(f"fl.when_improved({key!r})(note('better'))")
    if evaluates and r.random() < 0.12:
        every = r.choice(["", ", every=fl.at_end()", ", every=fl.every(epochs=2)"])
        found.append(f"fl.inspect(see('end see'){every})")
    found += ["fl.halt_on_nonfinite(2)"] if r.random() < 0.1 else []
    r.shuffle(found)
    return found


def draw_fits(r: random.Random) -> tuple[dict[str, Any], ...]:
    def target() -> dict[str, Any]:
        kind = r.random()
        if kind < 0.5:
            return {"epochs": r.randint(1, 4)}
        if kind < 0.8:
            return {"steps": r.randint(1, 10)}
        return {"epochs": r.randint(1, 3), "steps": r.randint(2, 8)}

    if r.random() < 0.25:
        return tuple({**target(), "phase": name} for name in "abc"[: r.randint(1, 3)])
    if r.random() < 0.15:
        return {"epochs": r.randint(1, 2)}, {"epochs": r.randint(2, 4)}
    return (target(),)


def draw_simple(r: random.Random) -> Program:
    """Draw a program that the loop by hand can train."""
    windows = [*(f"fl.accumulate({n})" for n in (2, 3)), "fl.accumulate({0: 1, 1: 3, 2: 2})"]
    choices = [windows, ["fl.clip(0.5)"], ["fl.clip_value(0.2)"], ["fl.schedule(decay)"]]
    choices += [["fl.ema(0.5)"]]
    members = [r.choice(each) for each in choices if r.random() < 0.5]
    r.shuffle(members)
    marks = ["skip"] if r.random() < 0.3 else []
    if r.random() < 0.3:
        members.append("fl.skip_nonfinite(100)")
        marks.append("nan")
    n = r.randint(2, 7)
    loader = r.choice(["batches", "stream"])
    hooks = [f"{draw_moment(r, loader == 'batches', 1)}(note('end'))"] if r.random() < 0.3 else []
    return Program(
        model=tuple(part for part in PARTS[:3] if r.random() < 0.2),
        optimizer=r.choice([name for name in OPTIMIZERS if name != "two"]),
        train=f"{loader}({n}{draw_marks(r, n, marks)})", members=tuple(members),
        hooks=tuple(hooks), evaluate_every=draw_moment(r, loader == "batches"),
        prefetch=r.choice([1, 1, 2]), fits=({"epochs": r.randint(1, 4)},),
    )  # fmt: skip


def draw(seed: int, number: int) -> Program:
    """Return a program; always the same for the same two numbers."""
    r = random.Random(f"{seed}/{number}")
    if r.random() < 0.2:
        return draw_simple(r)
    marks = ["skip"] if r.random() < 0.2 else []
    fits = draw_fits(r)
    loss = [each for each in ("draws", "weight", "tensor weight") if r.random() < 0.12]
    if "weight" in loss and "tensor weight" in loss:
        loss.remove("weight")
    model = [part for part in PARTS if r.random() < 0.2]
    optimizer = r.choice([*OPTIMIZERS, "sgd", "momentum"])
    loaders = {"valid": f"{r.choice(['batches', 'checked'])}({r.randint(1, 2)}, first=50)"}
    if r.random() < 0.3:
        loaders["test"] = "checked(1, first=70)"
    if r.random() < 0.15:
        loaders = {}
    carries, evaluates = r.random() < 0.06, bool(loaders) and r.random() < 0.9
    state = r.getstate()
    train, has_length = draw_train(r, marks)
    has_length = has_length and not carries
    # A schedule needs the total: by steps, or by the length of the loader.
    knows_total = all("steps" in given for given in fits) or has_length
    evaluated = draw_moment(r, has_length)
    if len(loaders) > 1 and r.random() < 0.5:
        evaluated = f"{{'valid': {evaluated}, 'test': {draw_moment(r, has_length)}}}"
    evaluated = evaluated if evaluates else "None"
    key = r.choice(["train/loss", *(["valid/loss"] * 2 if evaluates else [])])
    more: list[str] = []
    members = draw_members(r, more, knows_total, optimizer == "two", key)
    if "phase" in fits[0] and r.random() < 0.4:  # the rate, and the way back, begin with a phase
        others = ("fl.schedule(", "fl.torch_scheduler(", "fl.spike_guard(")
        members = [m for m in members if not m.startswith(others)]
        guard = f"fl.spike_guard(window={r.randint(2, 3)}, ratio=2.0, then='back')"
        members += [*r.sample(["fl.schedule(decay)", guard], 2)]
        more.append("spike")
    if more:  # the same loader, with the marks that the members are for
        r.setstate(state)
        train, _ = draw_train(r, [*marks, *more])
        r.seed(f"{seed}/{number}/marks")
    if marks or more:  # so that it ends where all of its updates are left out
        fits = tuple({"epochs": 3, **given} for given in fits)
    if carries:
        members = [m for m in members if not m.startswith(("fl.accumulate", "fl.microbatch"))]
        members = [m for m in members if "swa(0." not in m and "schedules." not in m]
        members.insert(r.randint(0, len(members)), "fl.tbptt(2)")
        model = [part for part in model if part != "norm"]
        train, has_length = f"sequences({r.randint(2, 4)}{draw_marks(r, 2, more)})", False
        loaders = dict.fromkeys(loaders, "sequences(2, first=50)")
    elif r.random() < 0.04 and optimizer != "two":
        members.append("fl.retry_on_oom()")
        loss.append("greedy")
    turns: dict[str, tuple[str, ...]] = {}
    order = "ab", "same"
    if optimizer == "two" and not carries and r.random() < 0.4:
        around = ("fl.ema", "fl.swa", "fl.plateau", "fl.derive")
        inside = [m for m in members if not m.startswith((*around, "fl.torch_scheduler"))]
        inside = [m.replace(', only=("a",)', "").replace(", only='a'", "") for m in inside]
        members = [m for m in members if m.startswith(around)]
        cut_at = r.randint(0, len(inside))
        turns = {"a": tuple(inside[:cut_at]), "b": tuple(inside[cut_at:])}
        if r.random() < 0.5:
            turns = {"a": tuple(inside), "b": tuple(inside)}
        order = r.choice(["ab", "aab", "ba", "abb"]), r.choice(["same", "next"])
    all_members = [*members, *itertools.chain(*turns.values())]
    if "norm" in model and any("microbatch" in m or "retry" in m for m in all_members):
        model.remove("norm")  # BatchNorm takes no piece of one sample
    if "norm" in model and "shuffled" in train:
        model.remove("norm")
    return Program(
        model=tuple(model), optimizer=optimizer, loss=tuple(loss), train=train, valid=loaders,
        members=tuple(members), turns=turns, order=order,
        hooks=tuple(draw_hooks(r, has_length, key, evaluates)),
        evaluate_every=evaluated,
        record_every=draw_moment(r, has_length) if r.random() < 0.35 else "None",
        prefetch=r.choice([1, 1, 1, 2, 3]),
        saves=r.choice(["fl.every(steps=1)", "fl.every(epochs=1)", "fl.every(steps=3)"]),
        fits=fits,
    )  # fmt: skip


# --- drawing cuts

DECIDES = ("early_stop", "restore_best", "count(", "end_epoch(", "stop(", "halt_on", "inspect")


WAYS = ("target", "target", "stop", "press", "terminate", "interrupt", "fail", "fail", "kill")


def is_allowed(program: Program, cut: Cut) -> bool:
    """Return whether the contract says that nothing changes with this cut."""
    if cut.how in ("target", "stop"):
        # These end the run on purpose: with its best weights, or a stop that closes a phase.
        if program.has_phases or program.has("restore_best", "halt_on_nonfinite"):
            return False
        if cut.how == "target" and (program.depends_on_total or len(program.fits) > 1):
            return False
        if program.has("~fl.at_end"):
            return False
        if cut.at == "first hook" and program.has("early_stop", "stop("):
            return False  # a hook after it may stop the run for its own reason
    if cut.how in ("fail", "interrupt"):
        if cut.at == "flush":
            return False
        if cut.at == "first hook" and program.has(*DECIDES, "once"):
            return False  # the hooks after it do not see that boundary
        if cut.at == "training" and (program.turns or program.has("tbptt")):
            return False  # a batch is several updates
        if cut.at == "training":
            # An update that failed may have changed buffers.
            several = program.has("accumulate", "microbatch", "tbptt", "sam", "retry")
            return not (several and {"norm", "centre", "rebound"} & {*program.model})
    return True


def draw_cuts(r: random.Random, program: Program, whole: fl.TrainState, world: World) -> list[Cut]:
    """Draw one to three cuts that must not change anything."""
    points = [*world.points.items()]
    cuts: list[Cut] = []
    wanted = r.choice([1, 1, 1, 2, 2, 3])
    for _ in range(30):
        how = r.choice(WAYS)
        through = r.choice(["memory", "memory", "snapshot", "disk"])
        if how == "target":
            at = r.choice(["steps", "epochs"])
            most = whole.step if at == "steps" else whole.epoch
            cut = Cut(how, at, r.randint(0, max(most, 1)), through)
        else:
            at, n = r.choice(points)
            if how == "stop":
                at = r.choice(["hook", "first hook"])
                n = world.points[at]
            cut = Cut(how, at, r.randrange(max(n, 1)), "disk" if how == "kill" else through)
        if is_allowed(program, cut):
            cuts.append(cut)
        if len(cuts) == wanted:
            break
    return cuts


# --- checking them


def check(program: Program, cuts: Sequence[Cut] = (), hand: bool = True) -> None:
    """Raise if a program does not do what it should, whole and with these cuts."""
    with quiet():
        whole, world = whole_run(program)
        if hand and can_be_written_by_hand(program):
            compare_with_hand(program, whole)
        if cuts:
            check_cuts(program, cuts, whole, world)


def check_cuts(program: Program, cuts: Sequence[Cut], whole: fl.TrainState, world: World) -> None:
    generators = _generators()
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        found, runs = cut_run(program, cuts, Path(folder))
    compare(program, cuts, whole, found)
    compare_calls(program, cuts, world.calls, runs)
    if generators != _generators():
        raise Fault("the caller's generators have changed")


def _generators() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), keys.tolist(), rest, random.getstate()


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def refusal(program: Program) -> str | None:
    """Return why a program cannot be composed, or None."""
    try:
        World(program)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def failure(program: Program, cuts: Sequence[Cut]) -> BaseException | None:
    """Return what is wrong with a program."""
    try:
        check(program, cuts)
    except (Exception, Killed, KeyboardInterrupt) as error:
        return error
    return None


def is_known(program: Program, cuts: Sequence[Cut], known: Sequence[str]) -> bool:
    return any(KNOWN[name](program, cuts) for name in known)


# --- making them smaller


def smaller(program: Program) -> Iterator[Program]:
    """Yield programs with a little less in them."""
    plain = Program()
    for name in ("members", "hooks", "model", "loss", "fits"):
        given = getattr(program, name)
        for i in range(len(given)):
            if name != "fits" or len(given) > 1:
                yield attrs.evolve(program, **{name: (*given[:i], *given[i + 1 :])})
    for turn, members in program.turns.items():
        for i in range(len(members)):
            less = {**program.turns, turn: (*members[:i], *members[i + 1 :])}
            yield attrs.evolve(program, turns=less)
    for name in (
        "turns",
        "order",
        "optimizer",
        "record_every",
        "prefetch",
        "saves",
        "evaluate_every",
        "valid",
    ):
        if getattr(program, name) != getattr(plain, name):
            yield attrs.evolve(program, **{name: getattr(plain, name)})
    if program.valid and "valid" not in program.text:
        yield attrs.evolve(program, valid={}, evaluate_every=plain.evaluate_every)
    for text in ("batches(1)", "batches(2)", "batches(3)", "stream(2)", "shuffled(4)"):
        if len(text) < len(program.train):
            yield attrs.evolve(program, train=text)
    for i, given in enumerate(program.fits):
        for key in ("epochs", "steps"):
            if given.get(key, 0) > 1:
                less = {**given, key: given[key] - 1}
                yield attrs.evolve(program, fits=(*program.fits[:i], less, *program.fits[i + 1 :]))
            if key in given and len(given) > 1 + ("phase" in given):
                less = {k: v for k, v in given.items() if k != key}
                yield attrs.evolve(program, fits=(*program.fits[:i], less, *program.fits[i + 1 :]))
    if program.has_phases:
        without = ({k: v for k, v in given.items() if k != "phase"} for given in program.fits)
        yield attrs.evolve(program, fits=tuple(without))


def fewer(cuts: Sequence[Cut]) -> Iterator[tuple[Cut, ...]]:
    """Yield cuts with a little less in them."""
    for i, cut in enumerate(cuts):
        before, after = cuts[:i], cuts[i + 1 :]
        yield (*before, *after)
        if cut.through != "memory" and cut.how != "kill":
            yield (*before, attrs.evolve(cut, through="memory"), *after)
        for n in (0, cut.n // 2, cut.n - 1):
            if 0 <= n < cut.n:
                yield (*before, attrs.evolve(cut, n=n), *after)


def signature(error: BaseException | None) -> tuple[type, str]:
    """Return what makes a failure the same as another one."""
    return type(error), str(error).split(":")[0].split(".")[0][:40]


def shrink(
    program: Program, cuts: tuple[Cut, ...], error: BaseException, known: Sequence[str], tries: int
) -> tuple[Program, tuple[Cut, ...], BaseException]:
    """Take away what is not needed for the failure. Return what is left, and how it fails."""
    kind = signature(error)
    changed = True
    while changed and tries > 0:
        changed = False
        candidates = itertools.chain(
            ((program, less) for less in fewer(cuts)), ((less, cuts) for less in smaller(program))
        )
        for less, few in candidates:
            tries -= 1
            if is_known(less, few, known) or not all(is_allowed(less, c) for c in few):
                continue
            if refusal(less) is None and signature(found := failure(less, few)) == kind:
                program, cuts, error, changed = less, tuple(few), found, True
                break
            if tries <= 0:
                break
    return program, cuts, error


# --- the smallest programs that have failed

TWO_FITS = ({"epochs": 1}, {"epochs": 3})
TWO_PHASES = ({"epochs": 1, "phase": "a"}, {"epochs": 1, "phase": "b"})

SMALLEST: dict[str, tuple[Program, tuple[Cut, ...]]] = {
    "F2": (
        Program(train="batches(2)", evaluate_every="fl.at_end()", fits=({"steps": 3},)),
        (Cut("target", "steps", 2),),
    ),
    "F5": (
        Program(train="batches(2)", hooks=("fl.every(epochs=1)(end_epoch())",)),
        (Cut("fail", "hook", 1),),
    ),
    "F9": (
        Program(
            train="batches(4, spike=(0,))",
            members=("fl.schedule(decay)", "fl.spike_guard(window=2, ratio=3.0, then='back')"),
            fits=TWO_PHASES,
        ),
        (),
    ),
    "beyond": (
        Program(train="batches(2)", hooks=("fl.restore_best('valid/loss', 'max')",), fits=TWO_FITS),
        (Cut("fail", "training", 5),),
    ),
    "a guard at the target": (
        Program(
            train="located(2, nan=(0,))",
            valid={"valid": "checked(1, first=50)"},
            members=("fl.skip_nonfinite(1)", "fl.accumulate(3)"),
            evaluate_every="fl.at_end()",
            fits=({"epochs": 1, "phase": "b"}, {"epochs": 1, "phase": "c"}),
        ),
        (Cut("interrupt", "evaluated loader", 1),),
    ),
    "a target overstepped": (
        Program(
            train="sequences(4)",
            valid={},
            members=("fl.tbptt(2)",),
            fits=({"steps": 9, "phase": "a"}, {"steps": 7, "phase": "b"}),
        ),
        (Cut("interrupt", "hook", 8),),
    ),
    "a rate that failed": (
        Program(
            train="batches(3, skip=(1, 2,))",
            valid={},
            members=("fl.schedule(decay)",),
            fits=({"epochs": 1, "steps": 3},),
        ),
        (Cut("fail", "training", 1),),
    ),
    "waits": (
        Program(
            train="batches(3)",
            hooks=("fl.inspect(see('see'))",),
            evaluate_every="fl.every(steps=4)",
        ),
        (Cut("press", "hook", 2),),
    ),
    "again": (
        Program(
            hooks=(
                "fl.when(lambda s: s.step == 1)(stop('enough'))",
                "(fl.at_end() | fl.every(steps=1))(note('note'))",
            )
        ),
        (Cut("terminate", "hook", 0),),
    ),
    "half-a-fetch": (
        Program(loss=("draws",), train="shuffled(6, size=3, noise='python')"),
        (Cut("fail", "loader", 4),),
    ),
    "twice": (
        Program(loss=("draws",), train="again(5)"),
        (Cut("fail", "loader", 1), Cut("interrupt", "loader", 0)),
    ),
    "rebound": (
        Program(
            model=("rebound",), train="batches(3, nan=(1,))", members=("fl.skip_nonfinite(100)",)
        ),
        (),
    ),
}


# --- many of them


@attrs.frozen
class Found:
    """A fault: the program that shows it, made smaller, and its number."""

    seed: int
    number: int
    program: Program
    cuts: tuple[Cut, ...]
    error: BaseException

    def __str__(self) -> str:
        last = traceback.extract_tb(self.error.__traceback__)
        where = [f"{Path(f.filename).name}:{f.lineno}" for f in last if "fnloop/" in f.filename]
        notes = "; ".join(getattr(self.error, "__notes__", ()))
        return (
            f"program {self.number} of seed {self.seed}: "
            f"{type(self.error).__name__}: {self.error} {notes} {' '.join(where[-3:])}\n"
            "  repeat: python tests/helpers/random_programs.py "
            f"--seed {self.seed} --only {self.number}\n"
            f"  paste (in tests/): from random_programs import *\n"
            f"  check({self.program!r}, {self.cuts!r})"
        )


def try_program(
    seed: int, number: int, known: Sequence[str], counts: Counter[str], cuts: int, tries: int = 300
) -> Found | None:
    """Run a program whole, and with cuts. Return its first fault, made smaller."""
    program = draw(seed, number)
    if (why := refusal(program)) is not None:
        counts["refused"] += 1
        counts[f"refused: {why[:60]}"] += 1
        return None
    if is_known(program, (), known):
        counts["known"] += 1
        return None
    counts["programs"] += 1
    given: tuple[Cut, ...] = ()
    try:
        with quiet():
            whole, world = whole_run(program)
            if can_be_written_by_hand(program):
                counts["by hand"] += 1
                compare_with_hand(program, whole)
            r = random.Random(f"{seed}/{number}/cuts")
            for _ in range(cuts):
                given = tuple(draw_cuts(r, program, whole, world))
                if is_known(program, given, known):
                    counts["known cuts"] += 1
                    continue
                counts["runs with cuts"] += 1
                counts.update(f"cut: {cut.how}" for cut in given)
                check_cuts(program, given, whole, world)
    except (Exception, Killed, KeyboardInterrupt) as error:
        if "gave no batch" in str(error):
            counts["empty epochs"] += 1
            return None
        return Found(seed, number, *shrink(program, given, error, known, tries))
    return None


def try_programs(
    seed: int, numbers: Sequence[int], known: Sequence[str] = tuple(KNOWN), cuts: int = 4
) -> tuple[list[Found], Counter[str]]:
    """Run many programs. Return their faults, and what was run."""
    counts: Counter[str] = Counter()
    found = [try_program(seed, number, known, counts, cuts) for number in numbers]
    return [each for each in found if each is not None], counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Run random programs, whole and cut.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=500, help="programs of each seed")
    parser.add_argument("--only", type=int, help="the number of one program")
    parser.add_argument("--cuts", type=int, default=4, help="cut runs of each program")
    parser.add_argument("--minutes", type=float, help="how long to continue with further seeds")
    parser.add_argument("--known", default=",".join(KNOWN), help="known faults, or none")
    given = parser.parse_args()
    known = [] if given.known == "none" else [name for name in given.known.split(",") if name]
    until = time.monotonic() + 60 * (given.minutes or 0)
    counts: Counter[str] = Counter()
    faults, began = 0, time.monotonic()
    for seed in itertools.count(given.seed):
        numbers = range(given.programs) if given.only is None else [given.only]
        for number in numbers:
            if (found := try_program(seed, number, known, counts, given.cuts)) is not None:
                faults += 1
                print(found, flush=True)
            if given.minutes is not None and time.monotonic() > until:
                break
        if given.only is not None or time.monotonic() > until:
            break
    if given.only is not None:
        print(draw(given.seed, given.only))
    for name, n in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{n:7,} {name}")
    print(f"{faults} faults in {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
