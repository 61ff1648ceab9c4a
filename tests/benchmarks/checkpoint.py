"""The cost of a checkpoint in fnloop, in other libraries, and with safetensors and SHA-256 by hand.

    pip install 'fnloop[bench]'              # the other libraries; missing ones are left out
    python tests/benchmarks/checkpoint.py    # two tables; the raw numbers go to a JSON file

Every contender saves and restores the same model and its AdamW. A third of --megabytes are weights,
two thirds are moments. What is restored must equal what was saved, bit for bit; otherwise nothing
is reported. In a round, every contender takes a turn, in random order, in an empty folder. Ratios
are taken within a round. /tmp may be in memory: see --folder.

* save: the call, made twice, of which the second counts. The first uses memory that a virtual
  machine still has to copy from its host. The floor is two files by the save_file of safetensors,
  read again for their SHA-256.
* fsync: flushing what was written to the disk, afterwards. ``fnloop.save`` has done so before it
  returns, hence a second ratio, of save and fsync. The other libraries do not hash and do not
  flush; but for lightning, ext4 does, when a file that was created empty is closed. accelerate
  pickles the optimizer, torch and lightning pickle everything.
* restore: the call, until every tensor has been written to once, as the first update does. A mapped
  file is not read before. All contenders find in memory what was just written. The floor compares
  the SHA-256, as fnloop does, and copies what safetensors has mapped. ``torch.load`` has
  weights_only and no mmap.
* in the background: ``checkpoint(folder, background=True)``. The pause is the call of the hook, for
  which training waits. The whole lasts until the checkpoint is complete and the one before it is
  removed. The first save of a hook allocates host memory, later ones reuse it; of those the second
  is shown. Two hooks take turns, and the second counts. Nothing is trained meanwhile.

With --memory, started by ``torchrun --nproc-per-node 2``, it prints instead by how much the memory
of each process grows while it saves and restores a model under ``fully_shard``, in MiB and as a
part of the process's share of the state. Mapped files count. The target is at most 1.3.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import apart
import attrs
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

import fnloop as fl

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter
LAYERS = 4  # few and large, so that their memory comes from the system and not from the heap
SAVE_TARGET, PAUSE_TARGET = 1.3, 0.25  # of the floor; of the whole

Times = dict[str, list[float]]  # seconds, round by round


class Contender(NamedTuple):
    save: Callable[[Path], Any]  # to a path that does not exist
    restore: Callable[[Path], Any]


# --- the contenders: (model, optimizer) -> how it saves and restores
# ----------------------------------------


def version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def by_hand(model: nn.Module, optimizer: Optimizer) -> Contender:
    numbers, sums = range(len(list(model.parameters()))), []

    def sums_of(path: Path) -> list[str]:
        return [
            hashlib.file_digest(file.open("rb"), "sha256").hexdigest()
            for file in (path / "model", path / "optimizer")
        ]

    def save(path: Path) -> None:
        path.mkdir()
        moments = optimizer.state_dict()["state"]
        save_file(model.state_dict(), path / "model")
        save_file(
            {f"{i}.{key}": moments[i][key] for i in numbers for key in MOMENTS}, path / "optimizer"
        )
        sums[:] = sums_of(path)

    def restore(path: Path) -> None:
        assert sums == sums_of(path)
        model.load_state_dict(load_file(path / "model"))
        read = load_file(path / "optimizer")
        moments = {i: {key: read[f"{i}.{key}"].clone() for key in MOMENTS} for i in numbers}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})

    return Contender(save, restore)


def with_fnloop(model: nn.Module, optimizer: Optimizer) -> Contender:
    state = functools.partial(fl.TrainState.create, model, optimizer, seed=0)
    return Contender(lambda path: fl.save(state(), path), lambda path: fl.restore(path, state()))


def with_torch(model: nn.Module, optimizer: Optimizer) -> Contender:
    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def restore(path: Path) -> None:
        read = torch.load(path, weights_only=True, mmap=False)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])

    return Contender(save, restore)


def with_accelerate(model: nn.Module, optimizer: Optimizer) -> Contender:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return Contender(
        lambda path: accelerator.save_state(str(path)),
        lambda path: accelerator.load_state(str(path)),
    )


def with_lightning(model: nn.Module, optimizer: Optimizer) -> Contender:
    """It saves after a fit and restores during one. A fit of no steps takes 1 ms."""
    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise AssertionError("there are no steps")

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=0, **off)
    fit = functools.partial(trainer.fit, Module(), DataLoader([0]))
    fit()
    return Contender(trainer.save_checkpoint, lambda path: fit(ckpt_path=path))


FLOOR, OURS, SAVES = "safetensors + SHA-256", "fnloop.save", ("first save", "later save")
CONTENDERS = {  # name -> (distribution, how to build it)
    FLOOR: ("safetensors", by_hand),
    OURS: ("fnloop", with_fnloop),
    "torch.save": ("torch", with_torch),
    "accelerate": ("accelerate", with_accelerate),
    "lightning": ("lightning", with_lightning),
}


# --- the measurement
# ----------------------------------------------------------------------------------------


def make_model(
    megabytes: int, shard: Callable[[nn.Module], object] = lambda model: None
) -> tuple[nn.Module, Optimizer]:
    """Return a model and its optimizer with moments: 4 + 8 bytes a parameter."""
    torch.manual_seed(0)
    width = round((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    shard(model)
    optimizer = AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    moments = [optimizer.state[p][key] for p in model.parameters() for key in MOMENTS]
    return [*(p.detach() for p in model.parameters()), *moments]


def seconds(work: Callable[..., Any], *args: Any) -> float:
    began = time.perf_counter()
    work(*args)
    return time.perf_counter() - began


def flush(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob("*")):
        with file.open("rb") as opened:
            os.fsync(opened)


def empty(folder: Path) -> None:
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def take_turn(
    contender: Contender, model: nn.Module, optimizer: Optimizer, folder: Path
) -> dict[str, float]:
    def restore() -> None:
        contender.restore(folder / "saved")
        for t in tensors_of(model, optimizer):
            t.mul_(1)

    for _ in range(2):  # the second counts
        gc.collect()
        empty(folder)
        save = seconds(contender.save, folder / "saved")
    fsync = seconds(flush, folder)
    for p in model.parameters():
        p.detach().zero_()
    optimizer.state.clear()
    return {
        "save": save,
        "fsync": fsync,
        "save and fsync": save + fsync,
        "restore": seconds(restore),
    }


def in_background(model: nn.Module, optimizer: Optimizer, folder: Path) -> dict[str, float]:
    state, times = fl.TrainState.create(model, optimizer, seed=0), {}
    for _ in range(2):  # the second counts
        gc.collect()
        empty(folder)
        hook = fl.checkpoint(folder, keep=1, background=True)
        for step, name in enumerate((*SAVES, SAVES[1])):
            pause = seconds(hook, attrs.evolve(state, step=step))
            times |= {f"{name}: pause": pause, f"{name}: whole": pause + seconds(hook.close)}
    return times


def measure(names: list[str], megabytes: int, folder: Path, rounds: int) -> dict[str, Times]:
    model, optimizer = make_model(megabytes)
    turns = {
        name: functools.partial(take_turn, CONTENDERS[name][1](model, optimizer)) for name in names
    }
    turns["background"] = in_background
    saved = [t.clone() for t in tensors_of(model, optimizer)]
    times: dict[str, Times] = {name: defaultdict(list) for name in turns}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(turns), len(turns)):
            os.sync()
            for what, took in turns[name](model, optimizer, folder).items():
                times[name][what].append(took)
            empty(folder)
            if not all(map(torch.equal, tensors_of(model, optimizer), saved)):
                raise SystemExit(f"{name}: what was restored is not what was saved")
    return times


def peak(do: Callable[[], object]) -> int:
    """Return by how many bytes the memory of this process grows while it does something."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def sample() -> None:
        while not done.is_set():
            most[0] = max(most[0], resident())
            time.sleep(0.0005)

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # so that no memory is there to be reused
    before, most, done = resident(), [0], threading.Event()
    sampling = threading.Thread(target=sample)
    sampling.start()
    do()
    done.set()
    sampling.join()
    return most[0] - before


def measure_memory(megabytes: int, parent: Path | None) -> None:
    """Print by how much the memory of each process grows."""
    dist.init_process_group()
    folder = Path(fl.broadcast(tempfile.mkdtemp(dir=parent) if dist.get_rank() == 0 else None))
    model, optimizer = make_model(megabytes, fully_shard)
    state = fl.TrainState.create(model, optimizer, seed=0)
    other, theirs = make_model(megabytes, fully_shard)
    theirs.state.clear()
    fresh = fl.TrainState.create(other, theirs, seed=0)
    share = sum(t.to_local().nbytes for t in tensors_of(model, optimizer) if hasattr(t, "to_local"))
    grown = {"save": peak(lambda: fl.save(state, folder / "saved"))}
    grown["restore"] = peak(lambda: fl.restore(folder / "saved", fresh))
    for what, size in grown.items():
        print(
            f"process {dist.get_rank()}, {what}: {size / 2**20:.0f} MiB, "
            f"{size / share:.2f} of its share of {share / 2**20:.0f} MiB"
        )
    fl.gather(0)  # until all have read
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


def ratios(values: list[float], to: list[float]) -> list[float]:
    return [value / other for value, other in zip(values, to, strict=True)]


def row(name: str, *columns: list[float]) -> None:
    quartiles = [statistics.quantiles(values, n=4, method="inclusive") for values in columns]
    print(
        f"{name:<22}"
        + "".join(
            f"{f'{median:.2f} ({low:.2f}–{high:.2f})':>19}" for low, median, high in quartiles
        )
    )


def show(times: dict[str, Times]) -> None:
    titles = (
        "save, s",
        "of the floor",
        "fsync, s",
        "of the floor, both",
        "restore, s",
        "of the floor",
    )
    print(f"\n{'median (25–75 %)':<22}" + "".join(f"{title:>19}" for title in titles))
    for name in CONTENDERS:
        if name not in times:
            print(f"{name:<22}   not installed: pip install 'fnloop[bench]'")
            continue
        of = {
            what: ratios(values, times[FLOOR][what])
            for what, values in times[name].items()
            if what != "fsync"
        }
        save, fsync, restore = (times[name][what] for what in ("save", "fsync", "restore"))
        row(name, save, of["save"], fsync, of["save and fsync"], restore, of["restore"])

    print(
        f"\n{'in the background':<22}"
        + "".join(f"{title:>19}" for title in ("pause, s", "whole, s", "pause of whole"))
    )
    found = [
        (f"{OURS}, of the floor", ratios(times[OURS]["save"], times[FLOOR]["save"]), SAVE_TARGET)
    ]
    for name in SAVES:
        pause, whole = (times["background"][f"{name}: {what}"] for what in ("pause", "whole"))
        row(name, pause, whole, ratios(pause, whole))
        found.append((f"pause of the {name}, of the whole", ratios(pause, whole), PAUSE_TARGET))
    print()
    for what, values, target in found:
        met = "met" if statistics.median(values) <= target else "missed"
        print(f"{what}: {statistics.median(values):.2f}; the target, {target} at most, is {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(__file__).with_suffix(".json")
    parser.add_argument(
        "--rounds", type=int, default=5, help="default: %(default)s; 9 or more to quote"
    )
    parser.add_argument(
        "--megabytes", type=int, default=500, help="size of the state; default: %(default)s"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to create a temporary folder; default: as the system does",
    )
    parser.add_argument(
        "--json", type=Path, default=default, help="the output file; default: %(default)s"
    )
    parser.add_argument(
        "--memory", action="store_true", help="measure the memory of sharded models, see above"
    )
    args = parser.parse_args()
    if args.rounds < 2 or args.megabytes < 1:
        parser.error("expected 2 rounds or more, and 1 megabyte or more")

    if args.memory:
        measure_memory(args.megabytes, args.folder)
        return
    warnings.simplefilter("ignore")  # advice of the other libraries about loaders and loggers
    versions = {distribution: version(distribution) for distribution, _ in CONTENDERS.values()}
    names = [name for name, (distribution, _) in CONTENDERS.items() if versions[distribution]]
    threads = torch.get_num_threads()
    print(f"{apart.cpu()}, {threads} threads, Python {platform.python_version()}, ", end="")
    print(f"{args.rounds} rounds of {args.megabytes} MB")
    print(", ".join(f"{distribution} {found}" for distribution, found in versions.items() if found))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        tempfile.tempdir = folder  # lightning writes there before it renames
        times = measure(names, args.megabytes, Path(folder), args.rounds)
    show(times)
    facts = {
        "cpu": apart.cpu(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": versions,
    }
    args.json.write_text(
        json.dumps({**facts, "megabytes": args.megabytes, "seconds": times}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
