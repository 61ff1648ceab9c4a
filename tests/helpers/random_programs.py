"""Random programs, each cut at random places and compared with itself uncut, bit for bit.

    python tests/helpers/random_programs.py --seed 7 --programs 500
    python tests/helpers/random_programs.py --seed 7 --minutes 60      # then seed 8, 9, ...
    python tests/helpers/random_programs.py --seed 7 --only 221  # one program, as a report names it

A program is plain data: the source text of a model, loaders, a pipeline, hooks, moments and
targets. It is run whole. If it has hooks that put copies in the place of parameters, it is run once
more without them, and must come to the same. Then it is run again with cuts, and continued after
each: in memory, with a snapshot, or with new objects from the disk. A program that differs, or that
raises, is made smaller while it still does, and printed so that it can be pasted.
"""

import argparse
import contextlib
import itertools
import logging
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from loop_cases import generators
from sample_hooks import start_again
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import fnloop as fl
from fnloop._core.saved import Pending
from fnloop._core.state import TrainState
from fnloop._loop.beginning import complete

# --- what a program is


@attrs.frozen(repr=False)
class Program:
    """What is run. Texts are Python, with ``fl`` and the methods of :class:`World` as names."""

    model: tuple[str, ...] = ()  # what is beside two linear layers: some of PARTS
    optimizer: str = "sgd"  # a name in OPTIMIZERS
    loss: tuple[str, ...] = ()  # what it does: "weight", "tensor weight", "draws", "greedy"
    train: str = "batches(4)"
    valid: Mapping[str, str] = attrs.field(factory=lambda: {"valid": "batches(2, first=50)"})
    members: tuple[str, ...] = ()
    turns: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)  # pipelines of alternate
    order: tuple[str, str] = ("ab", "same")  # of the turns, and what batches they take
    hooks: tuple[str, ...] = ()
    evaluate_every: str = "fl.every(epochs=1)"
    record_every: str = "None"
    prefetch: int = 1
    saves: str = "fl.every(steps=1)"  # when a run that is killed has saved
    fits: tuple[Mapping[str, Any], ...] = ({"epochs": 2},)  # keywords, one call after another

    def __repr__(self):
        plain = Program()
        given = {a.name: getattr(self, a.name) for a in attrs.fields(Program)}
        shown = [f"{k}={v!r}" for k, v in given.items() if v != getattr(plain, k)]
        return f"Program({', '.join(shown)})"

    def has(self, *words):
        members = itertools.chain(self.members, *self.turns.values())
        text = " ".join([*members, *self.hooks, self.evaluate_every, self.record_every])
        return any(word in text for word in words)

    @property
    def has_phases(self):
        return any("phase" in given for given in self.fits)


@attrs.frozen
class Cut:
    """How and where a run is cut."""

    how: str  # an earlier "target", or one of SIGNS: at a point of a run
    at: str  # the kind of point; for "target", "steps" or "epochs"
    n: int  # which of the points of this kind, from 0; for "target", the target
    through: str = "memory"  # how the state gets to the next run: or "snapshot", or "disk"


WHOLE = Cut("", "", -1)


class Killed(BaseException):
    """The process was killed here."""


class Failed(Exception):
    """Something failed here."""


class Fault(AssertionError):
    """A program does not do what it should."""


def raising(error):
    raise error


SIGNS = {
    "stop": lambda: None,  # by a hook
    "press": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: raising(KeyboardInterrupt),
    "fail": lambda: raising(Failed),
    "kill": lambda: raising(Killed),  # continued from the newest checkpoint
}

# Faults that are known, each with whether a program with cuts may show it. Take out what is mended.
KNOWN = {
    # The host's generators are as a fetch left them that failed after some samples, or batches.
    "half-a-fetch": lambda program, cuts: (
        "draws" in program.loss
        and ("shuffled" in program.train or program.has("accumulate") or program.order[1] == "next")
        and any(c.at == "loader" and c.how in ("fail", "interrupt") for c in cuts)
    ),
    # A loader shorter than ``take`` has announced: the planned total depends on the cut.
    "shorter": lambda program, cuts: (
        bool(cuts)
        and any(
            f"fl.data.take({kind}" in program.train
            for kind in ("stream", "again", "located", "refilled")
        )
        and program.has("fl.schedule(")
    ),
}

# --- what a program is made of

MARKS = {"skip": 1.0, "nan": 2.0, "spike": 3.0}


class Centre(nn.Module):
    """Subtracts a running mean: buffers as in a BatchNorm, for batches of one sample too."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.update(x.detach().float().flatten(0, -2).mean(0))
        return x - self.mean

    def update(self, new):
        self.mean.lerp_(new, 0.25)
        self.count += 1


class Rebound(Centre):
    """Puts new tensors in the place of its buffers."""

    def update(self, new):
        self.mean = self.mean.lerp(new, 0.25)
        self.count = self.count + 1


PARTS = {
    "norm": lambda: nn.BatchNorm1d(4), "centre": lambda: Centre(4), "rebound": lambda: Rebound(4),
    "dropout": lambda: nn.Dropout(0.3),
}  # fmt: skip


def make_model(parts):
    made = {name: [make()] if name in parts else [] for name, make in PARTS.items()}
    with torch.random.fork_rng(devices=[]):
        first, last = nn.Linear(3, 4), nn.Linear(4, 1)
    before = (*made["norm"], *made["centre"], *made["rebound"])
    model = nn.Sequential(first, *before, nn.Tanh(), *made["dropout"], last)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return model


def adamw_in_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = {"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.1}
    return torch.optim.AdamW([*groups], lr=0.05, weight_decay=0.0)


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "adamw": adamw_in_groups,
    "two": lambda m: {
        "a": torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.5),
        "b": torch.optim.AdamW([p for each in m[1:] for p in each.parameters()], lr=0.05),
    },
}


def fresh(program):
    model = make_model(program.model)
    return fl.TrainState.create(model, OPTIMIZERS[program.optimizer](model), seed=3)


def sample(i, *shape):
    return torch.randn(*(shape or (3,)), generator=torch.Generator().manual_seed(1000 + i))


NOISE = {
    None: lambda: 0.0, "torch": lambda: torch.rand(3), "python": random.random,
    "numpy": np.random.rand,
}  # fmt: skip


class Samples(Dataset):
    """Samples, with noise from torch's, Python's or NumPy's generator."""

    def __init__(self, world, n, marks, noise):
        self.world, self.n, self.marks, self.noise = world, n, marks, noise

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.world.point("loader")
        noise = NOISE[self.noise]()
        return sample(i) + noise, torch.tensor(MARKS.get(self.marks.get(i, ""), 0.0))


class Located:
    """A loader that knows where it is."""

    def __init__(self, world, n, marks):
        self.world, self.n, self.marks, self.begin, self.at = world, n, marks, 0, 0

    def __iter__(self):
        self.at, self.begin = self.begin, 0
        while self.at < self.n:
            self.world.point("loader")
            self.at += 1
            yield self.world.batch(self.at - 1, marks=self.marks)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


class Drawn(Sampler):
    """Draws its order from a generator of its own."""

    def __init__(self, n, by):
        self.n = n
        make = {"numpy": np.random.default_rng, "python": random.Random}
        self.own = make[by](0) if by in make else torch.Generator().manual_seed(0)

    def __len__(self):
        return self.n

    def __iter__(self):
        if isinstance(self.own, torch.Generator):
            return iter(torch.randperm(self.n, generator=self.own).tolist())
        if isinstance(self.own, random.Random):
            return iter(self.own.sample(range(self.n), self.n))
        return iter(self.own.permutation(self.n).tolist())


class CutHook:
    """A hook at whose calls a run may be cut."""

    def __init__(self, world, kind):
        self.world, self.kind = world, kind

    def __call__(self, state):
        stops = self.world.point(self.kind)
        return attrs.evolve(state, stop="cut") if stops and state.stop is None else state

    def flush(self, state):
        self.world.point("flush")
        return state


class World:
    """What the texts of a program name, in one run; and the points at which it may be cut."""

    def __init__(self, program, folder=None):
        self.program, self.folder = program, folder
        self.cut, self.is_cut = WHOLE, False
        self.points, self.calls = Counter(), []
        names = {k: getattr(self, k) for k in dir(self) if not k.startswith("_")}
        self._names = {**names, "fl": fl, "torch": torch, "attrs": attrs}
        inner = self._loss_fn()
        if program.turns:
            steps = {k: fl.pipeline(*map(self._read, v))(inner) for k, v in program.turns.items()}
            inner = fl.alternate(steps, order=tuple(program.order[0]), batch=program.order[1])
        self.step = fl.pipeline(*map(self._read, program.members))(inner)
        self.loaders = {"train": self._read(program.train)}
        self.loaders |= {name: self._read(text) for name, text in program.valid.items()}
        saves = () if folder is None else [self._read(program.saves)(fl.checkpoint(folder, keep=2))]
        first, last = CutHook(self, "first hook"), CutHook(self, "hook")
        self.hooks = (first, *map(self._read, program.hooks), *saves, last)

    def _read(self, text):
        return eval(text, self._names)

    def point(self, kind):
        """Cut the run here, if it is to be. Return whether a hook has to stop it."""
        n, self.points[kind] = self.points[kind], self.points[kind] + 1
        if n > 2000:
            raise Fault("it does not end")
        if self.is_cut or (kind, n) != (self.cut.at, self.cut.n):
            return False
        self.is_cut = True
        SIGNS[self.cut.how]()
        return self.cut.how == "stop"

    # --- batches

    def batch(self, i, size=2, marks=None):
        mark = MARKS.get((marks or {}).get(i, ""), 0.0)
        x = torch.stack([sample(10 * i + j) for j in range(size)])
        return x, torch.full((size,), mark)

    def batches(self, n, size=2, first=0, **marks):
        """A list. The last batch has one sample more."""
        sizes = [size] * (n - 1) + [size + 1]
        return [self.batch(first + i, s, _marks(marks)) for i, s in enumerate(sizes)]

    def stream(self, n, grow=0, size=2, **marks):
        """A function of where to begin. Each epoch has ``grow`` batches more."""

        def read(epoch, batch):
            for i in range(batch, n + grow * (epoch % 2)):
                self.point("loader")
                yield self.batch(i + 7 * epoch, size, {i + 7 * epoch: _marks(marks).get(i, "")})

        return read

    def again(self, n, **marks):
        """A function that makes one pass."""

        def read():
            for i in range(n):
                self.point("loader")
                yield self.batch(i, marks=_marks(marks))

        return read

    def located(self, n, **marks):
        return Located(self, n, _marks(marks))

    def shuffled(self, n, size=2, noise=None, drop_last=False, **marks):
        samples = Samples(self, n, _marks(marks), noise)
        return DataLoader(samples, size, shuffle=True, drop_last=drop_last)

    def sampled(self, n, size=2, by="numpy", **marks):
        """Samples in an order that a generator of the sampler's own draws."""
        return DataLoader(Samples(self, n, _marks(marks), None), size, sampler=Drawn(n, by))

    def refilled(self, n, **marks):
        """As ``again``, in one buffer."""

        def read():
            x, mark = np.empty((2, 3), np.float32), np.empty(2, np.float32)
            for i in range(n):
                self.point("loader")
                x[:], mark[:] = self.batch(i, marks=_marks(marks))
                yield torch.from_numpy(x), torch.from_numpy(mark)

        return read

    def checked(self, n, first=50):
        """Batches to evaluate, with a point before each."""

        def read():
            for i in range(n):
                self.point("evaluated loader")
                yield self.batch(first + i, 2 + i % 2)

        return read

    def sequences(self, n, length=4, first=0, **marks):
        """Batches for ``tbptt``: (2, length, 3)."""
        values = [MARKS.get(_marks(marks).get(i, ""), 0.0) for i in range(n)]
        return [
            (sample(first + i, 2, length, 3), torch.full((2, length), mark))
            for i, mark in enumerate(values)
        ]

    # --- the loss function

    def _loss_fn(self):
        does = self.program.loss

        def loss_fn(model, batch):
            x, mark = batch
            self.point("training" if model.training else "evaluation")
            if "greedy" in does and model.training and len(x) > 1:
                raise torch.OutOfMemoryError("out of memory")
            if (mark == MARKS["skip"]).any():
                return fl.skip("it is marked")
            output = model(x)
            loss = (output - x.sum(-1, keepdim=True)).square().mean()
            for kind, factor in (("nan", float("nan")), ("spike", 1000.0)):
                if model.training and (mark == MARKS[kind]).any():
                    loss = loss * factor
            if "draws" in does and model.training:
                loss = loss * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
            aux = {"output": output}
            if "weight" in does:
                aux["weight"] = 1 + int((x > 0).sum())
            if "tensor weight" in does:
                aux["weight"] = (x > 0).sum() + 1
            return loss, aux

        def carried(model, batch, carry):
            x, mark = batch
            x = x if carry is None else x + 0.1 * carry[:, None]
            found = loss_fn(model, (x, mark))
            return (*found, x.mean(1)) if isinstance(found, tuple) else found

        return carried if any("tbptt" in text for text in self.program.members) else loss_fn

    # --- hooks

    def note(self, name):
        def note(state):
            reports = [r for r in state.history if not r.closing]
            weights = [p.detach().sum().item().hex() for p in state.model.parameters()]
            at = state.step, state.epoch, state.batch, state.skipped
            self.calls.append((name, *at, len(reports), *weights))
            return state

        return note

    def see(self, name):
        return lambda state, outputs: self.calls.append(
            (name, state.step, state.epoch, len(outputs))
        )

    def numbers(self, name):
        def made(state, outputs=()):
            self.calls.append((name, state.step, state.epoch, len(outputs)))
            return {name: state.step / 2}

        return made

    def count(self, name):
        return lambda state: attrs.evolve(
            state, extra={**state.extra, name: state.extra.get(name, 0) + 1}
        )

    def stop(self, why):
        return lambda state: attrs.evolve(state, stop=why)

    def end_epoch(self):
        return lambda state: attrs.evolve(state, ends="epoch")

    def replace(self, n):
        """A hook that puts a copy in the place of the n-th parameter, which changes no number."""

        def replace(state):
            named = [*state.model.named_parameters()]
            name, old = named[n % len(named)]
            owner, _, own = name.rpartition(".")
            new = nn.Parameter(old.detach().clone(), old.requires_grad)
            setattr(state.model.get_submodule(owner), own, new)
            several = isinstance(state.optimizer, Mapping)
            for one in state.optimizer.values() if several else (state.optimizer,):
                for group in one.param_groups:
                    group["params"] = [new if p is old else p for p in group["params"]]
                if old in one.state:
                    one.state[new] = one.state.pop(old)
            return state

        return replace

    @staticmethod
    def decay(i, total):
        return 0.9**i

    @staticmethod
    def step_rates(optimizer, run):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def _marks(given):
    """Return the mark of each batch or sample: ``skip=(1, 3), nan=(2,)``."""
    return {i: kind for kind, places in given.items() for i in places}


# --- running it


@contextlib.contextmanager
def quiet():
    """No log, no warning, no flush to the disk; SIGTERM that came too late for a run is lost."""
    fsync, raised, threads = os.fsync, signal.raise_signal, torch.get_num_threads()
    pressed = signal.signal(signal.SIGINT, signal.default_int_handler)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    os.fsync, signal.raise_signal = (lambda file: None), (lambda number: None)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.fsync, signal.raise_signal = fsync, raised
        signal.signal(signal.SIGINT, pressed)
        logging.disable(disabled)
        torch.set_num_threads(threads)


def train(world, state, cut=WHOLE):
    """Run the calls of ``fit`` of a program, from any state of it, to the cut if there is one."""
    start_again()
    program = world.program
    world.cut, world.is_cut, world.points = cut, False, Counter()
    moments = {k: world._read(getattr(program, k)) for k in ("evaluate_every", "record_every")}
    moments["evaluate_every"] = moments["evaluate_every"] if program.valid else None
    for given in program.fits:
        if cut.how == "target":
            given, world.is_cut = {**given, cut.at: min(cut.n, given.get(cut.at, cut.n))}, True
        state = fl.fit(
            world.step, state, world.loaders, hooks=world.hooks, prefetch=program.prefetch,
            **moments, **given,
        )  # fmt: skip
        if world.is_cut:
            break
    return state


def whole_run(program):
    """Run a program without a cut."""
    world = World(program)
    return train(world, fresh(program)), world


def cut_run(program, cuts, folder):
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


def facts(value, path, found):
    """Write all that is in a value, by where it is, as text that is equal where each bit is."""
    if isinstance(value, Tensor):
        found[path] = f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            facts(each, f"{path}.{key}", found)
    elif isinstance(value, list | tuple):
        found[path] = len(value)
        for i, each in enumerate(value):
            facts(each, f"{path}.{i}", found)
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


def describe(state):
    """Return what has to be equal, but for closing records."""
    found = {name: repr(getattr(state, name)) for name in (*TrainState.COUNTERS, "stop", "ends")}
    phases = [(p.name, p.step, p.epoch, p.stop, p.done, p.skipped) for p in state.phases]
    parts = {
        "model": state.model.state_dict(),
        "modes": [m.training for m in state.model.modules()],
        "optimizer": state.optimizer,
        "history": [r for r in state.history if not r.closing],
        "slots": state.slots,
        "extra": state.extra,
        "metrics": {k: m.compute() for k, m in state.metrics.items()},
        "phases": phases,
    }
    return found | {k: v for name, part in parts.items() for k, v in facts(part, name, {}).items()}


def compare(cuts, whole, cut):
    """Raise Fault unless the run that was cut has ended as the whole one."""
    expected, made = describe(whole), describe(cut)
    for path in {**expected, **made}:
        one, other = expected.get(path, "nothing"), made.get(path, "nothing")
        # A schedule keeps the length of its last run.
        kept = path.startswith("slots") and "schedule(" in path
        if one != other and not (kept and any(each.how == "target" for each in cuts)):
            raise Fault(f"{path}: {one} whole, {other} cut")
    expected, made = (
        [str(facts(r, "", {})) for r in state.history if r.closing] for state in (whole, cut)
    )
    said = f"{expected} whole, {made} cut"
    if any(each.how in ("target", "stop") for each in cuts):
        rest = iter(made)
        if not all(each in rest for each in expected):  # in this order
            raise Fault(f"a closing record is missing: {said}")
    elif expected != made:
        raise Fault(f"closing records: {said}")


def compare_calls(cuts, whole, runs):
    """Raise Fault unless the hooks were called as in the whole run.

    What is due at the end is called where a run is cut on purpose as well, and what is due at the
    start again if there was no update yet.
    """
    cut_short = any(cut.how in ("target", "stop") for cut in cuts)
    left_out = ("start", "end") if cut_short else ("start",)
    kept = lambda calls: [c for c in calls if not c[0].startswith(left_out)]
    if any(cut.how in ("fail", "interrupt") and "hook" in cut.at for cut in cuts):
        return
    expected = kept(whole)
    if any(cut.how == "kill" for cut in cuts):
        last = kept(runs[-1])
        if not cut_short and last != expected[len(expected) - len(last) :]:
            raise Fault(f"calls after the last cut: {last}, whole {expected}")
        return
    for pair in itertools.zip_longest(expected, kept(itertools.chain(*runs))):
        if pair[0] != pair[1]:
            raise Fault(f"calls: {pair[0]} whole, {pair[1]} cut")


# --- drawing programs

LENGTHS = {
    "batches": True, "stream": False, "again": False, "located": False, "shuffled": True,
    "sampled": True, "refilled": False,
}  # fmt: skip


def draw_moment(r, has_length, deep=2):
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
        f"fl.every(items={r.randint(3, 40)})",
        *(["fl.every(epochs=0.5)"] if has_length else []),
    ]
    return r.choice(kinds)


def draw_marks(r, n, kinds):
    """Draw which batches are marked, without a draw of the generator itself."""
    found, kinds = "", [*dict.fromkeys(kinds)]
    r = random.Random(repr((n, kinds, r.getstate()[1])))
    for kind in kinds:
        places = sorted(r.sample(range(n), min(n, r.randint(1, 2))))
        found += f", {kind}=({', '.join(map(str, places))},)"
    return found


def draw_train(r, marks, deep=1):
    """Draw a training loader. Return it, and whether it has a length."""
    kind, n = r.choice([*LENGTHS, "batches", "shuffled"]), r.randint(1, 6)
    length, more = LENGTHS[kind], ""
    if kind == "shuffled":
        n = r.randint(4, 11)
        noise = r.choice([None, None, "torch", "python", "numpy"])
        more = f", size={r.randint(2, 3)}" + (f", noise={noise!r}" if noise else "")
        more += ", drop_last=True" if r.random() < 0.3 else ""
    elif kind == "sampled":
        n = r.randint(4, 11)
        more = f", size={r.randint(2, 3)}, by={r.choice(['numpy', 'python', 'torch'])!r}"
    elif kind == "stream":
        more = r.choice(["", "", ", grow=1", ", grow=2"])
    text = f"{kind}({n}{draw_marks(r, n, marks)}{more})"
    if not deep or r.random() > 0.3:
        return text, length
    way = r.choice(["take", "leave_out", "interleave", "ratios", "fixed"])
    if way == "take":
        return f"fl.data.take({text}, {r.randint(2, 4)})", length
    if way == "leave_out":
        at = f"batch == {r.randint(0, 2)} + epoch % 2"
        return f"fl.data.leave_out({text}, lambda epoch, batch: {at})", False
    if way == "fixed" and kind == "shuffled":
        return f"fl.data.fixed({text}, 3)", True
    other, also = draw_train(r, (), 0)
    both = f'{{"a": {text}, "b": {other}}}'
    if way == "ratios":
        ratios = f'{{"a": {r.randint(1, 2)}, "b": {r.randint(1, 2)}}}'
        return f"fl.data.interleave({both}, {ratios})", length and also
    return (f"fl.data.interleave({both})", True) if length and also else (text, length)


BY_STEP = "fl.accumulate({0: 2, 2: 1, 5: 3}, by='step')"
WINDOWS = ("fl.accumulate(2)", "fl.accumulate(3)", "fl.accumulate({0: 1, 1: 3, 2: 2})", BY_STEP)


def draw_rows(r, rows):
    """Draw one of the texts of some rows of (chance, texts), in any order."""
    found = [r.choice(texts) for chance, texts in rows if r.random() < chance]
    r.shuffle(found)
    return found


def draw_members(r, marks, knows_total, two, key):
    """Draw the middleware of a pipeline, in any order. It may ask for marks in the data."""
    only = ', only=("a",)' if two and r.random() < 0.5 else ""
    rates = ["decay", "decay", "fl.schedules.exponential(0.9)"]
    rates += ["fl.schedules.linear()", "fl.schedules.cosine(warmup=2)"] if knows_total else []
    scheduler = f"fl.torch_scheduler(step_rates{', only=' + repr('a') if two else ''})"
    kind = r.choice(
        ["a['output'].max()", "fl.Sum(a['output'].sum())", "fl.Last(a['output'].min())"]
    )
    found = draw_rows(r, (
        (0.4, [*WINDOWS, "fl.accumulate({1: 2, 2: 1})", "fl.accumulate({0: 2, 1: 1})"]),
        (0.36, ["fl.clip(0.5)", "fl.clip(0.5)", "fl.clip(1.0, norm_type=float('inf'))",
                "fl.grad_norm()", 'fl.grad_norm(by="module")']),
        (0.15, ["fl.clip_value(0.2)"]), (0.05, ["fl.clip_adaptive(0.05)"]),
        (0.06, ["fl.sam(0.05)"]), (0.12, ["fl.microbatch(1)", "fl.microbatch(2)"]),
        (0.25, ["fl.ema(0.5)", 'fl.ema(0.8, start=2, every=2, evaluate="only")']),
        (0.15, ["fl.swa(2)", *(["fl.swa(0.5, every=2)"] if knows_total else [])]),
        (0.43, [*(f"fl.schedule({rate}{only})" for rate in rates), scheduler]),
        (0.15, [f"fl.plateau({key!r}, factor=0.5, patience={n}, mode='max')" for n in (1, 2)]),
        (0.25, [f"fl.skip_nonfinite({n})" for n in (100, 100, 1, 2)]),
        (0.25, [f"fl.spike_guard(window={n}, ratio=3.0, then={then!r})"
                for n in (1, 2, 3) for then in ("skip", "stop", "back", "back")]),
        (0.2, [f"fl.metric(top=lambda a, b: {kind}{on})"
               for on in ("", ', on="training"', ', on="evaluation"')]),
        (0.1, ["fl.derive(double=lambda m: 2 * m['loss'])"]), (0.08, ["fl.amp('bf16')"]),
    ))  # fmt: skip
    marks += ["nan"] if any("skip_nonfinite" in text for text in found) else []
    marks += ["spike"] if any("spike_guard" in text for text in found) else []
    return found


def draw_hooks(r, has_length, key, evaluates):
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
    ends = [f"fl.when(lambda s: s.batch == {r.randint(1, 4)})", "fl.every(epochs=1)"]
    ends += [
        f"fl.when(lambda s: s.step == {r.randint(1, 6)})",
        f"fl.every(steps={r.randint(2, 4)})",
    ]
    modes = ("min", "max")
    found += draw_rows(r, (
        (0.2, [f"fl.when(lambda s: s.step == {r.randint(1, 9)})(stop('enough'))"]),
        (0.25, [f"{end}(end_epoch())" for end in ends]),
        (0.2, [f"fl.early_stop({key!r}, patience={r.randint(1, 3)}, mode={m!r})" for m in modes]),
        (0.2, [f"fl.restore_best({key!r}, {m!r})" for m in modes]),
        (0.15, [f"fl.when_improved({key!r})(note('better'))"]),
        (0.12 * evaluates, [f"fl.inspect(see('end see'){every})" for every in
                            ("", ", every=fl.at_end()", ", every=fl.every(epochs=2)")]),
        (0.1, ["fl.halt_on_nonfinite(2)"]),
    ))  # fmt: skip
    r.shuffle(found)
    return found


def draw_replacements(r):
    """Draw hooks that replace parameters."""
    moments = [
        f"fl.every(steps={r.randint(1, 4)})",
        f"fl.when(lambda s: s.step == {r.randint(1, 6)})",
    ]
    chosen = r.sample([*moments, "fl.every(epochs=1)"], r.choice([0, 0, 0, 1, 2]))
    return [f"{moment}(replace({r.randrange(8)}))" for moment in chosen]


def draw_fits(r):
    def target():
        epochs, steps = {"epochs": r.randint(1, 4)}, {"steps": r.randint(1, 10)}
        return r.choice([*[epochs] * 5, *[steps] * 3, *[{**epochs, **steps}] * 2])

    if r.random() < 0.25:
        return tuple({**target(), "phase": name} for name in "abc"[: r.randint(1, 3)])
    if r.random() < 0.15:
        return {"epochs": r.randint(1, 2)}, {"epochs": r.randint(2, 4)}
    return (target(),)


def draw(seed, number):
    """Return a program; always the same for the same two numbers."""
    r = random.Random(f"{seed}/{number}")
    marks = ["skip"] if r.random() < 0.2 else []
    fits = draw_fits(r)
    loss = [each for each in ("draws", r.choice(["weight", "tensor weight"])) if r.random() < 0.15]
    model = [part for part in PARTS if r.random() < 0.2]
    optimizer = r.choice([*OPTIMIZERS, "sgd", "momentum"])
    loaders = {"valid": f"{r.choice(['batches', 'checked'])}({r.randint(1, 2)}, first=50)"}
    loaders |= {"test": "checked(1, first=70)"} if r.random() < 0.3 else {}
    loaders = {} if r.random() < 0.15 else loaders
    carries, evaluates = r.random() < 0.06, bool(loaders) and r.random() < 0.9
    state = r.getstate()
    train, has_length = draw_train(r, marks)
    has_length = has_length and not carries
    # A schedule needs the total: by steps, or by the length of the loader.
    knows_total = all("steps" in given for given in fits) or has_length
    evaluated = draw_moment(r, has_length)
    if len(loaders) > 1 and r.random() < 0.5:
        evaluated = f"{{'valid': {evaluated}, 'test': {draw_moment(r, has_length)}}}"
    key = r.choice(["train/loss", *(["valid/loss"] * 2 if evaluates else [])])
    more = []
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
    turns, order = {}, ("ab", "same")
    if optimizer == "two" and not carries and r.random() < 0.4:
        around = ("fl.ema", "fl.swa", "fl.plateau", "fl.derive")
        inside = [m for m in members if not m.startswith((*around, "fl.torch_scheduler"))]
        inside = [m.replace(', only=("a",)', "") for m in inside]
        members = [m for m in members if m.startswith(around)]
        at = r.randint(0, len(inside))
        split = {"a": tuple(inside[:at]), "b": tuple(inside[at:])}
        turns = r.choice([split, dict.fromkeys("ab", tuple(inside))])
        order = r.choice(["ab", "aab", "ba", "abb"]), r.choice(["same", "next"])
    pieces = any("microbatch" in m or "retry" in m for m in (*members, *sum(turns.values(), ())))
    if pieces or any(kind in train for kind in ("shuffled", "sampled")):
        # BatchNorm takes no piece of one sample.
        model = [part for part in model if part != "norm"]
    replacements = draw_replacements(random.Random(f"{seed}/{number}/replaced"))
    return Program(
        model=tuple(model), optimizer=optimizer, loss=tuple(loss), train=train, valid=loaders,
        members=tuple(members), turns=turns, order=order,
        hooks=(*draw_hooks(r, has_length, key, evaluates), *replacements),
        evaluate_every=evaluated if evaluates else "None",
        record_every=draw_moment(r, has_length) if r.random() < 0.35 else "None",
        prefetch=r.choice([1, 1, 1, 2, 3]),
        saves=r.choice(["fl.every(steps=1)", "fl.every(epochs=1)", "fl.every(steps=3)"]),
        fits=fits,
    )  # fmt: skip


# --- drawing cuts

DECIDES = ("early_stop", "restore_best", "count(", "end_epoch(", "stop(", "halt_on", "inspect")
BY_TOTAL = ("fl.schedules.linear(", "fl.schedules.cosine(", "swa(0.")


def is_allowed(program, cut):
    """Return whether the contract says that nothing changes with this cut."""
    if cut.how in ("target", "stop"):
        # These end the run on purpose: with its best weights, or a stop that closes a phase.
        if program.has_phases or program.has("restore_best", "halt_on_nonfinite", "~fl.at_end"):
            return False
        if cut.how == "target" and (program.has(*BY_TOTAL) or len(program.fits) > 1):
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
            # An update that failed may have changed buffers, and drawn from the host's generators.
            several = program.has("accumulate", "microbatch", "sam", "retry")
            kept = "draws" in program.loss or {"norm", "centre", "rebound"} & {*program.model}
            return not (several and kept)
    return True


def draw_cuts(r, program, whole, world):
    """Draw one to three cuts that must not change anything."""
    cuts, wanted = [], r.choice([1, 1, 1, 2, 2, 3])
    for _ in range(30):
        how = r.choice(["target", "fail", *SIGNS])
        through = r.choice(["memory", "memory", "snapshot", "disk"])
        if how == "target":
            at = r.choice(["steps", "epochs"])
            n = max(whole.step if at == "steps" else whole.epoch, 1) + 1
        else:
            at = r.choice([*world.points] if how != "stop" else ["hook", "first hook"])
            n = max(world.points[at], 1)
        cut = Cut(how, at, r.randrange(n), "disk" if how == "kill" else through)
        if is_allowed(program, cut):
            cuts.append(cut)
        if len(cuts) == wanted:
            break
    return tuple(cuts)


# --- checking them


def check(program, cuts=()):
    """Raise if a program fails, whole or with these cuts, or differs with them."""
    with quiet():
        whole, world = whole_run(program)
        check_replaced(program, whole)
        if cuts:
            check_cuts(program, cuts, whole, world)


def check_replaced(program, whole):
    """Raise Fault if it matters that copies have taken the place of parameters."""
    hooks = tuple(hook for hook in program.hooks if "(replace(" not in hook)
    if hooks != program.hooks:
        compare((), whole_run(attrs.evolve(program, hooks=hooks))[0], whole)


def check_cuts(program, cuts, whole, world):
    before = generators()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        found, runs = cut_run(program, cuts, Path(folder))
    compare(cuts, whole, found)
    compare_calls(cuts, world.calls, runs)
    if before != generators():
        raise Fault("the caller's generators have changed")


def refusal(program):
    """Return why a program cannot be composed, or None."""
    try:
        World(program)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def failure(program, cuts):
    """Return what is wrong with a program."""
    try:
        check(program, cuts)
    except (Exception, Killed, KeyboardInterrupt) as error:
        return error
    return None


def is_known(program, cuts):
    return any(shows(program, cuts) for shows in KNOWN.values())


# --- making them smaller


def smaller(program):
    """Yield programs with a little less in them."""
    for field in attrs.fields(Program):
        given, plain = getattr(program, field.name), getattr(Program(), field.name)
        less = [{}] if field.name == "valid" else [] if field.name == "fits" else [plain]
        if isinstance(given, tuple) and field.name != "order":
            less += [(*given[:i], *given[i + 1 :]) for i in range(len(given))]
        for each in less:
            if each != given and (each or field.name != "fits"):
                yield attrs.evolve(program, **{field.name: each})
    for i, given in enumerate(program.fits):
        for key in given.keys() & {"epochs", "steps"}:
            if given[key] > 1:
                less = {**given, key: given[key] - 1}
                yield attrs.evolve(program, fits=(*program.fits[:i], less, *program.fits[i + 1 :]))


def fewer(cuts):
    """Yield cuts with a little less in them."""
    for i, cut in enumerate(cuts):
        without = [(), *((attrs.evolve(cut, n=n),) for n in {0, cut.n // 2} if n < cut.n)]
        if cut.how != "kill" and cut.through != "memory":
            without.append((attrs.evolve(cut, through="memory"),))
        yield from ((*cuts[:i], *less, *cuts[i + 1 :]) for less in without)


def shrink(program, cuts, error, tries=300):
    """Take away what is not needed for the failure. Return what is left, and how it fails."""
    kind = lambda error: (type(error), str(error).split(":")[0].split(".")[0][:40])
    changed = True
    while changed:
        changed = False
        candidates = [(program, less) for less in fewer(cuts)]
        for less, few in (*candidates, *((less, cuts) for less in smaller(program))):
            tries -= 1
            if tries < 0:
                return program, cuts, error
            if is_known(less, few) or not all(is_allowed(less, c) for c in few) or refusal(less):
                continue
            if kind(found := failure(less, few)) == kind(error):
                program, cuts, error, changed = less, few, found, True
                break
    return program, cuts, error


# --- the smallest programs that have failed

PHASES = ({"epochs": 1, "phase": "a"}, {"epochs": 1, "phase": "b"})
STEPS = ({"steps": 9, "phase": "a"}, {"steps": 7, "phase": "b"})
DECAY = "fl.schedule(decay)"
BACK = "fl.spike_guard(window=2, ratio=3.0, then='back')"
END = "fl.at_end()"

SMALLEST = {
    "F2": (
        Program(train="batches(2)", evaluate_every=END, fits=({"steps": 3},)),
        Cut("target", "steps", 2)),
    "F5": (
        Program(train="batches(2)", hooks=("fl.every(epochs=1)(end_epoch())",)),
        Cut("fail", "hook", 1)),
    "F9": (Program(train="batches(4, spike=(0,))", fits=PHASES, members=(DECAY, BACK)),),
    "beyond": (
        Program(train="batches(2)", hooks=("fl.restore_best('valid/loss', 'max')",),
                fits=({"epochs": 1}, {"epochs": 3})),
        Cut("fail", "training", 5)),
    "a guard at the target": (
        Program(train="located(2, nan=(0,))", valid={"valid": "checked(1, first=50)"}, fits=PHASES,
                members=("fl.skip_nonfinite(1)", "fl.accumulate(3)"), evaluate_every=END),
        Cut("interrupt", "evaluated loader", 1)),
    "a target overstepped": (
        Program(train="sequences(4)", valid={}, members=("fl.tbptt(2)",), fits=STEPS),
        Cut("interrupt", "hook", 8)),
    "a rate that failed": (
        Program(train="batches(3, skip=(1, 2,))", valid={}, members=(DECAY,),
                fits=({"epochs": 1, "steps": 3},)),
        Cut("fail", "training", 1)),
    "waits": (
        Program(train="batches(3)", hooks=("fl.inspect(see('see'))",),
                evaluate_every="fl.every(steps=4)"),
        Cut("press", "hook", 2)),
    "again": (
        Program(hooks=("fl.when(lambda s: s.step == 1)(stop('enough'))",
                       "(fl.at_end() | fl.every(steps=1))(note('note'))")),
        Cut("terminate", "hook", 0)),
    "half-a-fetch": (
        Program(loss=("draws",), train="shuffled(6, size=3, noise='python')"),
        Cut("fail", "loader", 4)),
    "twice": (
        Program(loss=("draws",), train="again(5)"),
        Cut("fail", "loader", 1), Cut("interrupt", "loader", 0)),
    "replaced": (Program(train="batches(3)", hooks=("fl.every(epochs=1)(replace(0))",)),),
    "rebound": (
        Program(("rebound",), train="batches(3, nan=(1,))", members=("fl.skip_nonfinite(100)",)),),
}  # fmt: skip


# --- many of them


def try_program(seed, number, counts, cuts):
    """Run a program whole, and with cuts. Return what is wrong with it, made smaller, or None."""
    program, given = draw(seed, number), ()
    if (why := refusal(program)) is not None:
        counts.update(["refused", f"refused: {why[:60]}"])
        return None
    if is_known(program, ()):
        counts["known"] += 1
        return None
    counts["programs"] += 1
    r = random.Random(f"{seed}/{number}/cuts")
    try:
        with quiet():
            whole, world = whole_run(program)
            check_replaced(program, whole)
            if "refilled(" in program.train:
                fresh_ones = program.train.replace("refilled(", "again(")
                compare((), whole_run(attrs.evolve(program, train=fresh_ones))[0], whole)
            for _ in range(cuts):
                given = draw_cuts(r, program, whole, world)
                if is_known(program, given):
                    counts["known cuts"] += 1
                    continue
                counts.update(["runs with cuts", *(f"cut: {cut.how}" for cut in given)])
                check_cuts(program, given, whole, world)
    except (Exception, Killed, KeyboardInterrupt) as error:
        if "gave no batch" in str(error):
            counts["empty epochs"] += 1
            return None
        if "none is valid" in str(error) and "are not finite" in str(error):
            counts["refused: no checkpoint is finite"] += 1
            return None
        if "reuses a tensor" in str(error) and "refilled(" in program.train:
            counts["refused: the loader reuses a tensor"] += 1
            return None
        program, given, error = shrink(program, given, error)
        notes = "; ".join(getattr(error, "__notes__", ()))
        return (
            f"program {number} of seed {seed}: {type(error).__name__}: {error} {notes}\n"
            f"  repeat: python tests/helpers/random_programs.py --seed {seed} --only {number}\n"
            f"  paste (in tests/): from random_programs import *\n  check({program!r}, {given!r})"
        )
    return None


def try_programs(seed, numbers, cuts=4):
    """Run many programs. Return their faults, and what was run."""
    counts = Counter()
    found = [try_program(seed, number, counts, cuts) for number in numbers]
    return [each for each in found if each is not None], counts


def main():
    parser = argparse.ArgumentParser(description="Run random programs, whole and cut.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=500, help="programs of each seed")
    parser.add_argument("--only", type=int, help="the number of one program")
    parser.add_argument("--cuts", type=int, default=4, help="cut runs of each program")
    parser.add_argument("--minutes", type=float, default=0, help="how long to take further seeds")
    given = parser.parse_args()
    began, faults, counts = time.monotonic(), 0, Counter()
    for seed in itertools.count(given.seed):
        for number in range(given.programs) if given.only is None else [given.only]:
            if (found := try_program(seed, number, counts, given.cuts)) is not None:
                faults += 1
                print(found, flush=True)
        if given.only is not None or time.monotonic() > began + 60 * given.minutes:
            break
    if given.only is not None:
        print(draw(given.seed, given.only))
    print(*(f"{n:7,} {name}" for name, n in counts.most_common()), sep="\n")
    print(f"{faults} faults in {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
