"""What an update costs on a GPU: fnloop eager, compiled and captured, its peers, and by hand.

    pip install 'fnloop[bench]'                      # the peers; missing ones are left out
    python tests/benchmarks/gpu.py                   # tables, and a JSON file beside this one
    python tests/benchmarks/gpu.py --cases mlp gpt   # some of them
    python tests/benchmarks/gpu.py --device cpu --tiny      # only to see that it runs

Every contender trains the same model from the same weights on the same batches, which are on the
device already, with AdamW. Matrix products of float32 may use TF32 ("high"). Losses have to agree
with those of the loop written by hand; a contender whose do not, or that fails, is not timed. In a
round each contender trains once on all batches, in random order; ratios are taken within a round.
A model that is too large to be there once for each contender (GPT-2) is timed by one contender
after the other.

* per update: from the call, or from the beginning of an epoch where a peer tells of it, until the
  loss is read at its end, divided by the number of updates. fnloop's is the whole call of ``fit``
  with ``hooks=()``.
* first 5: the first five updates, with compiling, warming up and capturing. Compiled code may come
  from inductor's cache on the disk: by hand is compiled first.
* peak: the most memory that was allocated at once, beyond what there was before the contender was
  built. held: what it keeps reserved, in which the memory of graphs is.

"fused" is AdamW(fused=True); the others have torch's default. "feeding" has a loader with one
worker whose batches take 80 % of an update; the ratio is to batches that are on the device already.
``transfer.py`` measures large batches and checkpoints.

Measured on 2026-11-23 on an H100 80GB HBM3: torch 2.11.0+cu130, Python 3.12.3, accelerate 1.15.0,
pytorch-accelerated 0.1.61, lightning 2.6.6. By hand ÷ contender, medians of 5 rounds (MLP in rounds
of 200 updates, CNN) or 2 (GPT-small, GPT-2):

    ==========================  =====  =====  =========  ==========
    contender                     MLP    CNN  GPT-small  GPT-2 124M
    ==========================  =====  =====  =========  ==========
    by hand, ms per update       1.36   3.09       16.4        53.1
    by hand, compiled, fused     0.92   0.91       1.32        1.50
    fnloop                       0.99   0.92       0.97        1.00
    fnloop compiled, fused       0.94   0.92       1.35        1.49
    fnloop cuda_graph, fused     10.3   3.24       7.23        1.05
    fnloop both, fused           9.76   5.26       10.3        1.50
    accelerate                   0.73   0.86       0.94        0.99
    pytorch-accelerated          0.71   0.90       0.90        0.96
    lightning                    0.66   0.80       1.05        0.98
    ==========================  =====  =====  =========  ==========

The host bounds all eager loops but those of GPT-2, so these ratios depend on its speed, too. fnloop
took as much memory as the loop by hand (cuda_graph: 67 of 67 MiB, 232 of 232, 412 of 408, 14,863 of
14,864; compiled GPT-2: 8,581 of 8,581, both 8,647). A graph of 8 updates of the MLP, made by hand,
takes 85 µs per update, and a graph of one 86: the device is busy all the time, so there is nothing
to gain.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import json
import logging
import os
import platform
import random
import statistics
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from apart import CLOCK, Loader
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

import fnloop as fl

Batch = tuple[Tensor, Tensor]
Train = Callable[[Any], float]  # trains on every batch once, and returns the mean loss

WINDOW, MAX_NORM, TOLERANCE = 4, 1.0, 0.02
PLAIN, ACCUMULATED = "plain", f"accumulate({WINDOW}) and clip({MAX_NORM})"

SETTINGS = {"plain": PLAIN, "accumulated": ACCUMULATED}


# --- the cases


class Case(NamedTuple):
    """Something to train.

    Args:
        title: what it is.
        model: makes the module.
        batch: makes a batch.
        updates: how many there are in a round.
        bf16: whether it is trained under autocast.
        alone: whether it is too large to be there once for each contender.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    updates: int
    bf16: bool = False
    alone: bool = False


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.words(x) + self.places(places))))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def cnn(width: int = 32) -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    blocks = [*block(3, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def images(n: int, *shape: int) -> Batch:
    return torch.randn(n, *shape), torch.randint(10, (n,))


def text(n: int, length: int, words: int) -> Batch:
    tokens = torch.randint(words, (n, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CASES = {
    "mlp": Case("MLP, 32", mlp, lambda: images(32, 784), 500),
    "cnn": Case("CNN, 128 × 32 × 32", cnn, lambda: images(128, 3, 32, 32), 50),
    "gpt": Case("GPT, 6 layers, 8 × 256, bf16",
        lambda: GPT(6, 384, 6, 512, 256), lambda: text(8, 256, 512), 50, True),
    "gpt2": Case("GPT-2 124M, 16 × 1024, bf16",
        lambda: GPT(12, 768, 12, 50304, 1024), lambda: text(16, 1024, 50304), 10, True, True),
}  # fmt: skip
TINY_GPT = Case("tiny GPT, bf16", lambda: GPT(2, 8, 2, 16, 8), lambda: text(2, 8, 16), 8, True)
TINY = {
    "mlp": Case("tiny MLP", mlp, lambda: images(4, 784), 8),
    "cnn": Case("tiny CNN", lambda: cnn(2), lambda: images(2, 3, 8, 8), 8),
    "gpt": TINY_GPT,
    "gpt2": TINY_GPT._replace(alone=True),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def under_autocast(device: torch.device, model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(device.type, torch.bfloat16):
        return loss_of(model, batch)


def unshared(function: Any) -> Any:
    """Return a copy of a function that no other's compiled code is used for."""
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


class Task(NamedTuple):
    """What a contender is to do."""

    case: Case
    setting: str
    device: torch.device
    model: nn.Module
    optimizer: Optimizer
    compiling: dict[str, Any]  # arguments for torch.compile

    @property
    def loss(self) -> Callable[[nn.Module, Batch], Tensor]:
        if self.case.bf16:
            return functools.partial(unshared(under_autocast), self.device)
        return unshared(loss_of)

    @property
    def window(self) -> int:
        return 1 if self.setting == PLAIN else WINDOW


# --- the contenders: task -> train


def by_hand(task: Task, compiled: bool = False) -> Train:
    model, optimizer = task.model, task.optimizer
    loss_fn = torch.compile(task.loss, **task.compiling) if compiled else task.loss

    def train(batches: Any) -> float:
        CLOCK.start()
        total, n = torch.zeros((), device=task.device), 0
        for batch in batches:
            batch = [t.to(task.device, non_blocking=True) for t in batch]
            if n % task.window == 0:
                optimizer.zero_grad()
            loss = loss_fn(model, batch)
            (loss if task.window == 1 else loss / task.window).backward()
            total += loss.detach()
            n += 1
            if n % task.window == 0:
                if task.window > 1:
                    clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
        mean = total.item() / n
        CLOCK.stop()
        return mean

    return train


def with_fnloop(task: Task, *kinds: str) -> Train:
    middleware = [fl.amp("bf16" if task.case.bf16 else None)]
    middleware += [fl.compiled(**task.compiling)] if "compiled" in kinds else []
    middleware += [] if task.setting == PLAIN else [fl.accumulate(WINDOW), fl.clip(MAX_NORM)]
    middleware += [fl.cuda_graph(fallback=task.device.type == "cpu")] if "captured" in kinds else []
    step = fl.pipeline(*middleware)(unshared(loss_of))
    state = fl.TrainState.create(task.model, task.optimizer, seed=0)

    def train(batches: Any) -> float:
        nonlocal state
        CLOCK.start()
        state = fl.fit(step, state, batches, hooks=())
        CLOCK.stop()
        return state.history["train/loss"][-1]

    return train


def with_accelerate(task: Task) -> Train:
    """The loops of its documentation, with the loss summed."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(task.model, task.optimizer)

    def plain(batches: Sequence[Batch]) -> float:
        CLOCK.start()
        total = torch.zeros((), device=task.device)
        for batch in batches:
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = total.item() / len(batches)
        CLOCK.stop()
        return mean

    def accumulated(batches: Sequence[Batch]) -> float:
        # It is process-wide: pytorch-accelerated has reset it.
        accelerator.gradient_accumulation_steps = WINDOW
        CLOCK.start()
        total = torch.zeros((), device=task.device)
        for batch in batches:
            with accelerator.accumulate(model):
                loss = task.loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = total.item() / len(batches)
        CLOCK.stop()
        return mean

    return plain if task.setting == PLAIN else accumulated


def with_lightning(task: Task) -> Train:
    """It reads a list as one of loaders, hence a Loader. Each fit gets a new barebones Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)  # its list of what barebones switches off
    losses: list[Tensor] = []

    class Module(LightningModule):
        on_train_epoch_start, on_train_epoch_end = CLOCK.start, CLOCK.stop

        def __init__(self) -> None:
            super().__init__()
            self.model = task.model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = task.loss(self.model, batch)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Optimizer:
            return task.optimizer

    module, extra = Module(), {}
    if task.setting != PLAIN:
        extra = {"accumulate_grad_batches": WINDOW, "gradient_clip_val": MAX_NORM}
    kind = "gpu" if task.device.type == "cuda" else "cpu"

    def train(batches: Sequence[Batch]) -> float:
        losses.clear()
        Trainer(accelerator=kind, devices=1, max_epochs=1, barebones=True, **extra).fit(
            module, Loader(batches)
        )
        module.to(task.device)  # it moves the model to the CPU at its end
        return torch.stack(losses).mean().item()

    return train


def with_pytorch_accelerated(task: Task) -> Train:
    """It clips by value only, and every batch, so its method for an update clips here."""
    from pytorch_accelerated import Trainer

    losses: list[Tensor] = []

    class OnBatches(Trainer):
        training_run_start, train_epoch_end = CLOCK.start, CLOCK.stop  # else empty

        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Loader:
            return Loader(self.train_dataset)

        def calculate_train_batch_loss(self, batch: Batch) -> dict[str, Any]:
            loss = task.loss(self.model, batch)
            losses.append(loss.detach().clone())  # it divides in place
            return {"loss": loss, "model_outputs": None, "batch_size": len(batch[0])}

        def optimizer_step(self) -> None:
            if task.setting != PLAIN:
                self._accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            super().optimizer_step()

    trainer = OnBatches(task.model, functional.cross_entropy, task.optimizer, callbacks=())

    def train(batches: Sequence[Batch]) -> float:
        losses.clear()
        trainer.train(batches, num_epochs=1, gradient_accumulation_steps=task.window)
        return torch.stack(losses).mean().item()

    return train


HAND = "by hand"
# Name -> (distribution, fused, how to build it).
CONTENDERS: dict[str, tuple[str, bool, Callable[[Task], Train]]] = {
    HAND: ("torch", False, by_hand),
    "by hand, compiled, fused": ("torch", True, functools.partial(by_hand, compiled=True)),
    "fnloop": ("fnloop", False, with_fnloop),
    "fnloop compiled, fused": ("fnloop", True, lambda task: with_fnloop(task, "compiled")),
    "fnloop cuda_graph, fused": ("fnloop", True, lambda task: with_fnloop(task, "captured")),
    "fnloop both, fused": ("fnloop", True, lambda task: with_fnloop(task, "compiled", "captured")),
    "accelerate": ("accelerate", False, with_accelerate),
    "pytorch-accelerated": ("pytorch-accelerated", False, with_pytorch_accelerated),
    "lightning": ("lightning", False, with_lightning),
}


# --- the measurement


class Result(NamedTuple):
    """What was measured of a contender: milliseconds per update by round, seconds, and MiB."""

    ms: list[float]
    first: float
    peak: float
    held: float


def memory(device: torch.device, what: str) -> float:
    return getattr(torch.cuda, what)(device) / 2**20 if device.type == "cuda" else 0.0


def build(name: str, case: Case, setting: str, args: argparse.Namespace) -> Train:
    torch.manual_seed(0)
    _, fused, make = CONTENDERS[name]
    model = case.model().to(args.device)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True if fused else None)
    compiling = {"backend": "eager"} if args.tiny else {}
    return make(Task(case, setting, args.device, model, optimizer, compiling))


def time_once(train: Train, batches: Any, updates: int) -> float:
    gc.collect()
    train(batches)
    return CLOCK.seconds / updates * 1e3


def rounds_of(train: Train, batches: Any, case: Case, args: argparse.Namespace) -> list[float]:
    return [time_once(train, batches, case.updates) for _ in range(args.rounds)]


def failure(name: str, error: Exception) -> str:
    """Return what is said of a contender that fails, but for the loop by hand: it has to work."""
    if name == HAND:
        raise error
    return f"failed: {type(error).__name__}: {error}".splitlines()[0]


def compare(
    case: Case, setting: str, names: list[str], args: argparse.Namespace
) -> dict[str, Result | str]:
    """Build the contenders one after the other, check that all do the same work, and time them."""
    window = 1 if setting == PLAIN else WINDOW
    torch.manual_seed(1)
    few = [tuple(t.to(args.device) for t in case.batch()) for _ in range(8)]
    batches = (few * (case.updates * window))[: case.updates * window]
    contenders: dict[str, Train] = {}
    results: dict[str, Any] = {}
    expected = float("nan")
    for name in names:
        gc.collect()
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(args.device)
        allocated = memory(args.device, "memory_allocated")
        reserved = memory(args.device, "memory_reserved")
        train = None
        try:
            train = build(name, case, setting, args)
            loss = train(batches[: 5 * window])
            first = CLOCK.seconds
            expected = loss if name == HAND else expected
            if not abs(loss - expected) <= TOLERANCE * abs(expected):
                raise ArithmeticError(f"its loss is {loss:.6g}, by hand {expected:.6g}")
            train(batches[: 5 * window])
            peak = memory(args.device, "max_memory_allocated") - allocated
            held = memory(args.device, "memory_reserved") - reserved
            results[name] = Result([], first, peak, held)
            if case.alone:
                results[name].ms.extend(rounds_of(train, batches, case, args))
            else:
                contenders[name] = train
        except Exception as error:
            results[name] = failure(name, error)
        del train
    order = random.Random(0)  # pytorch-accelerated seeds the global one whenever it trains
    for _ in range(args.rounds if contenders else 0):
        for name in order.sample(list(contenders), len(contenders)):
            try:
                results[name].ms.append(time_once(contenders[name], batches, case.updates))
            except Exception as error:
                results[name] = failure(name, error)
                del contenders[name]
    return results


def show(title: str, results: dict[str, Any]) -> None:
    print(
        f"\n{title:<40}{'ms/update':>10}{'by hand ÷':>10}{'25–75 %':>15}"
        f"{'first 5, s':>12}{'peak, MiB':>11}{'held':>8}"
    )
    for name in CONTENDERS:
        if name not in results:
            print(f"{name:<40}not installed: pip install 'fnloop[bench]'")
            continue
        if isinstance(results[name], str):
            print(f"{name:<40}{results[name]}")
            continue
        ms, first, peak, held = results[name]
        ratios = [hand / mine for mine, hand in zip(ms, results[HAND].ms, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(
            f"{name:<40}{statistics.median(ms):>10.3f}{ratio:>10.2f}{f'{low:.2f}–{high:.2f}':>15}"
            f"{first:>12.2f}{peak:>11.0f}{held:>8.0f}"
        )


# --- feeding


class Slow(Dataset):
    """A dataset of batches, each of which takes a given number of seconds."""

    def __init__(self, batches: Sequence[Batch], seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Batch:
        time.sleep(self.seconds)
        return self.batches[i]


FEEDING = [name for name in CONTENDERS if name.startswith((HAND, "fnloop")) and "both" not in name]


def feed(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Compare batches in memory with those of a loader that takes 80 % of an update for each."""
    torch.manual_seed(1)
    few = [case.batch() for _ in range(8)]
    there = [tuple(t.to(args.device) for t in batch) for batch in few] * case.updates
    there = there[: case.updates]
    results = {}
    for name in FEEDING:
        train = loader = None
        try:
            train = build(name, case, PLAIN, args)
            train(there)
            resident = statistics.median(rounds_of(train, there, case, args))
            slow = Slow((few * case.updates)[: case.updates], 0.8 * resident / 1e3)
            pinned = args.device.type == "cuda"
            loader = DataLoader(
                slow, batch_size=None, num_workers=1, pin_memory=pinned, persistent_workers=True
            )
            train(loader)
            fed = statistics.median(rounds_of(train, loader, case, args))
            results[name] = {"resident_ms": resident, "fed_ms": fed}
        except Exception as error:
            results[name] = failure(name, error)
        del train, loader
    return results


def show_feeding(title: str, results: dict[str, Any]) -> None:
    print(f"\n{f'feeding, {title}':<40}{'resident':>10}{'fed':>10}{'ratio':>8}   (ms/update)")
    for name, found in results.items():
        if isinstance(found, str):
            print(f"{name:<40}{found}")
            continue
        resident, fed = found["resident_ms"], found["fed_ms"]
        print(f"{name:<40}{resident:>10.3f}{fed:>10.3f}{fed / resident:>8.2f}")


# --- all of it


def version(distribution: str) -> str | None:
    if distribution == "fnloop":  # which may be a checkout
        return fl.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--device", type=torch.device, default=torch.device("cuda"))
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    add("--feeding", nargs="*", choices=CASES, default=["cnn", "gpt"])
    add("--rounds", type=int, default=7)
    add("--tiny", action="store_true", help="sizes that show nothing, and no code generation")
    add("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("expected 2 rounds or more")
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; to see that it runs: --device cpu --tiny")

    torch.set_float32_matmul_precision("high")
    # What peers advise about loaders and loggers, and that the CPU has no graphs.
    warnings.simplefilter("ignore")
    logging.getLogger("fnloop").setLevel(logging.ERROR)
    if args.device.type == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"  # pytorch-accelerated's Accelerator too
    else:
        CLOCK.wait = torch.cuda.synchronize
    versions = {distribution: version(distribution) for distribution, _, _ in CONTENDERS.values()}
    names = [name for name, (distribution, _, _) in CONTENDERS.items() if versions[distribution]]
    on_gpu = args.device.type == "cuda"
    where = torch.cuda.get_device_name(args.device) if on_gpu else platform.processor() or "CPU"
    print(f"{where}, Python {platform.python_version()}, {args.rounds} rounds")
    print(", ".join(f"{distribution} {found}" for distribution, found in versions.items() if found))

    tables: dict[str, Any] = {}
    facts = {"device": where, "python": platform.python_version(), "versions": versions}
    facts["tables"] = tables
    cases = TINY if args.tiny else CASES
    for setting in (SETTINGS[name] for name in args.settings):
        for name in args.cases:
            results = compare(cases[name], setting, names, args)
            show(f"{cases[name].title}, {setting}", results)
            tables.setdefault(setting, {})[name] = {
                k: v if isinstance(v, str) else v._asdict() for k, v in results.items()
            }
            # It may be stopped before the end.
            args.json.write_text(json.dumps(facts, indent=1) + "\n")
    for name in args.feeding:
        tables.setdefault("feeding", {})[name] = found = feed(cases[name], args)
        show_feeding(cases[name].title, found)
    args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
