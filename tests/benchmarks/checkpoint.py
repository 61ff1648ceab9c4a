"""What a checkpoint costs: fnloop, its peers, and the floor, which is safetensors and SHA-256 by hand.

    pip install 'fnloop[bench]'              # the peers; those that are missing are left out
    python tests/benchmarks/checkpoint.py    # two tables, and the raw numbers as JSON beside this file

Everybody saves one model and its AdamW, after an update: a third of --megabytes are weights, two are moments. What is
restored has to be what was saved, bit for bit; otherwise the benchmark ends. In a round everybody takes a turn, in random
order, in an empty folder. Ratios are taken within a round. Mind where the folder is: /tmp may be in memory.

* save: the call, by the wall clock. The floor is two files by ``safetensors.torch.save_file``, read again for their SHA-256.
* fsync: flushing to the disk what was written, afterwards. ``fnloop.save`` has done so itself, in "save", hence the second
  ratio, of save and fsync together. The peers neither flush nor hash.
* restore: the call, until every tensor has been written to once, as the first update does: safetensors maps a file, so that
  reading it is put off till then. All read what was just written, out of memory. The floor compares the SHA-256, as fnloop
  does, and loads the two files. torch.load has weights_only and no mmap; lightning's is ``Trainer.fit`` of no steps.
* in the background: ``checkpoint(folder, background=True)``. The pause is how long training waits, which is the call of the
  hook; the whole is until the checkpoint is in its place and the one before it removed. The first save allocates host
  memory, later ones copy into it. Nothing is trained meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import fnloop as fl

LAYERS = 4  # few: of 500 MB each weight has 42 MB, and memory that large comes fresh from the system, not from malloc's heap
SAVE_TARGET, PAUSE_TARGET = 1.3, 0.25  # of the floor; of the whole
Turn = Callable[[], dict[str, float]]  # does one thing after the other, and returns the seconds of each


class Contender(NamedTuple):
    save: Callable[[Path], Any]  # to a path that isn't there, in an empty folder
    restore: Callable[[Path], Any]


# --- the contenders: (model, optimizer) -> how it saves, how it restores -----------------------------------


def by_hand(model: nn.Module, optimizer: Optimizer) -> Contender:
    sums = {}

    def sha256(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def save(path: Path) -> None:
        path.mkdir()
        moments = optimizer.state_dict()["state"]
        save_file(model.state_dict(), path / "model")
        save_file({f"{i}.{k}": v for i, state in moments.items() for k, v in state.items()}, path / "optimizer")
        sums.update({name: sha256(path / name) for name in ("model", "optimizer")})

    def restore(path: Path) -> None:
        assert sums == {name: sha256(path / name) for name in ("model", "optimizer")}
        model.load_state_dict(load_file(path / "model"))
        moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in load_file(path / "optimizer").items():
            i, _, key = name.partition(".")
            moments[int(i)][key] = tensor
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})

    return Contender(save, restore)


def with_fnloop(model: nn.Module, optimizer: Optimizer) -> Contender:
    state = functools.partial(fl.TrainState.create, model, optimizer, seed=0)
    return Contender(lambda path: fl.save(state(), path), lambda path: fl.restore(path, state()))


def with_torch(model: nn.Module, optimizer: Optimizer) -> Contender:
    def restore(path: Path) -> None:
        read = torch.load(path, weights_only=True, mmap=False)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])

    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return Contender(save, restore)


def with_accelerate(model: nn.Module, optimizer: Optimizer) -> Contender:
    """It writes the model by safetensors, and pickles the optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return Contender(lambda path: accelerator.save_state(str(path)), lambda path: accelerator.load_state(str(path)))


def with_lightning(model: nn.Module, optimizer: Optimizer) -> Contender:
    """It can save once it has fitted, and restores when it fits: no steps, which takes 1 ms by itself."""
    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise AssertionError("nothing is to be trained")

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=0, **quiet)
    fit = functools.partial(trainer.fit, Module(), torch.utils.data.DataLoader([0]))
    fit()
    return Contender(trainer.save_checkpoint, lambda path: fit(ckpt_path=path))


FLOOR, OURS, SAVES = "safetensors + SHA-256", "fnloop.save", ("first save", "later saves")
CONTENDERS = {  # name -> (distribution, how to build it)
    FLOOR: ("safetensors", by_hand),
    OURS: ("fnloop", with_fnloop),
    "torch.save": ("torch", with_torch),
    "accelerate": ("accelerate", with_accelerate),
    "lightning": ("lightning", with_lightning),
}


# --- the measurement ----------------------------------------------------------------------------------------


def make_model(megabytes: int) -> tuple[nn.Module, Optimizer]:
    """Return a model and its optimizer with moments: 4 + 8 bytes a parameter."""
    torch.manual_seed(0)
    width = round((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def seconds(work: Callable[..., Any], *args: Any) -> float:
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def flush(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as opened:
            os.fsync(opened)


def turn_of(name: str, model: nn.Module, optimizer: Optimizer, folder: Path) -> Turn:
    contender = CONTENDERS[name][1](model, optimizer)
    path, moments = folder / "saved", dict(optimizer.state)

    def tensors() -> list[Tensor]:
        return [t for p in model.parameters() for t in (p.detach(), *(v for _, v in sorted(optimizer.state[p].items())))]

    def restore() -> None:
        contender.restore(path)
        for t in tensors():
            t.mul_(1)

    def turn() -> dict[str, float]:
        before = [t.clone() for t in tensors()]
        times = {"save": seconds(contender.save, path), "fsync": seconds(flush, folder)}
        for p in model.parameters():
            p.detach().zero_()
        optimizer.state.clear()
        times["restore"] = seconds(restore)
        if not all(map(torch.equal, tensors(), before)):
            raise SystemExit(f"{name}: what was restored isn't what was saved")
        optimizer.state.clear()
        optimizer.state.update(moments)
        return times

    return turn


def turn_in_background(model: nn.Module, optimizer: Optimizer, folder: Path) -> dict[str, float]:
    hook = fl.checkpoint(folder, keep=1, background=True)
    state = fl.TrainState.create(model, optimizer, seed=0)
    times = {}
    for step, which in enumerate(SAVES):
        began = time.perf_counter()
        times[f"{which}, pause"] = seconds(hook, attrs.evolve(state, step=step))
        hook.close()
        times[f"{which}, whole"] = time.perf_counter() - began
    return times


def measure(turns: dict[str, Turn], folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds, round by round, of everything in every turn."""
    times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in turns}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(turns), len(turns)):
            gc.collect()
            os.sync()
            for what, took in turns[name]().items():
                times[name][what].append(took)
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return times


def ratios(values: list[float], to: list[float]) -> list[float]:
    return [value / one for value, one in zip(values, to, strict=True)]


def row(name: str, *columns: list[float]) -> None:
    cells = []
    for values in columns:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        cells.append(f"{median:.2f} ({low:.2f}–{high:.2f})")
    print(f"{name:<22}" + "".join(f"{cell:>19}" for cell in cells))


def show(times: dict[str, dict[str, list[float]]]) -> None:
    for of in times.values():
        if "fsync" in of:
            of["both"] = [save + fsync for save, fsync in zip(of["save"], of["fsync"], strict=True)]
    titles = ("save, s", "of the floor", "fsync, s", "of the floor, both", "restore, s", "of the floor")
    print(f"\n{'median (25–75 %)':<22}" + "".join(f"{title:>19}" for title in titles))
    for name in CONTENDERS:
        if name not in times:
            print(f"{name:<22}   not installed: pip install 'fnloop[bench]'")
            continue
        of, floor = times[name], times[FLOOR]
        save, both, restore = (ratios(of[what], floor[what]) for what in ("save", "both", "restore"))
        row(name, of["save"], save, of["fsync"], both, of["restore"], restore)

    print(f"\n{'in the background':<22}" + "".join(f"{title:>19}" for title in ("pause, s", "whole, s", "pause of whole")))
    goals = [(f"{OURS}, of the floor", ratios(times[OURS]["save"], times[FLOOR]["save"]), SAVE_TARGET)]
    for which in SAVES:
        pause, whole = (times["background"][f"{which}, {what}"] for what in ("pause", "whole"))
        row(which, pause, whole, ratios(pause, whole))
        goals.append((f"pause of {which}, of the whole", ratios(pause, whole), PAUSE_TARGET))

    print()
    for what, values, target in goals:
        found = statistics.median(values)
        print(f"{what}: {found:.2f}; the target, {target} at most, is {'met' if found <= target else 'missed'}")


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    beside = Path(__file__).with_suffix(".json")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--megabytes", type=int, default=500, help="size of the state; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder; default: where the system does")
    parser.add_argument("--json", type=Path, default=beside, help="where numbers go; default: %(default)s")
    args = parser.parse_args()
    if args.rounds < 2 or args.megabytes < 1:
        parser.error("expected 2 rounds or more, and 1 megabyte or more")

    warnings.simplefilter("ignore")  # what peers advise about loaders and loggers
    versions = {distribution: version(distribution) for distribution, _ in CONTENDERS.values()}
    facts = {"python": platform.python_version(), "threads": torch.get_num_threads(), "megabytes": args.megabytes}
    print(", ".join(f"{name} {value}" for name, value in {**facts, **versions}.items() if value))

    model, optimizer = make_model(args.megabytes)
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        installed = [name for name, (distribution, _) in CONTENDERS.items() if versions[distribution]]
        turns = {name: turn_of(name, model, optimizer, folder) for name in installed}
        turns["background"] = lambda: turn_in_background(model, optimizer, folder)
        times = measure(turns, folder, args.rounds)
    show(times)
    args.json.write_text(json.dumps({**facts, "versions": versions, "seconds": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
