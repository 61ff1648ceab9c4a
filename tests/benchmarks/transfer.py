"""What moving data costs on a GPU: batches copied beside the step, and checkpoints.

    python tests/benchmarks/transfer.py    # two tables; the raw numbers go to a JSON file

* feeding: a convolutional network trains on batches of 512 × 3 × 224 × 224 in pinned memory (308 MB
  each), and on the same batches that are on the device already. In a round both take a turn.
  The target is a speed of at least 0.95 of that without copies. "by hand" copies with
  ``non_blocking=True`` on the stream of the step. The memory is the peak beyond that of batches
  that are there already, in batches.
* checkpoints: ``checkpoint(folder, background=True)`` of GPT-2 124M and AdamW. The pause is how
  much longer an update takes that saves, until the device has done it; the write lasts until the
  checkpoint is complete. The target is a pause of at most a tenth of the write. The first save of
  a hook allocates memory, later ones reuse it: both are shown.

Measured on 2026-11-23 on an H100 80GB HBM3 (torch 2.11.0+cu130): a speed of 0.999 (fnloop), 0.998
(fnloop cuda_graph) and 0.961 (by hand) of that without copies, at 137 ms per update, with one batch
more at the peak (two with cuda_graph). Checkpoints of 1,425 MiB: a pause of 0.036 s (first), 0.020
and 0.014 s, and a write of 2.4 to 2.7 s. Before the copy was made on the device first, and went to
the host through pinned memory, the pause was 0.38 s (first) and 0.15 s.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from gpu import CASES, GPT, Batch, cnn, loss_of  # the benchmark in this folder
from torch import Tensor, nn
from torch.optim import AdamW

import fnloop as fl

Measured = dict[str, dict[str, list[float]]]


def timed(do: Callable[[], Any]) -> float:
    """Return the seconds until the device has done it; what other streams do does not count."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    do()
    torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


def by_hand(model: nn.Module, optimizer: AdamW, batches: list[Batch]) -> None:
    total = torch.zeros((), device="cuda")
    for batch in batches:
        x, y = (t.to("cuda", non_blocking=True) for t in batch)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model, (x, y))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    total.item()


def with_fnloop(model: nn.Module, optimizer: AdamW, *members: Any) -> Callable[[list[Any]], None]:
    step = fl.pipeline(fl.amp("bf16"), *members)(loss_of)
    state = fl.TrainState.create(model, optimizer, seed=0)

    def train(batches: list[Any]) -> None:
        nonlocal state
        state = fl.fit(step, state, batches, hooks=())

    return train


def feeding(rounds: int, updates: int, samples: int) -> Measured:
    torch.manual_seed(0)
    few = [(torch.randn(samples, 3, 224, 224), torch.randint(10, (samples,))) for _ in range(4)]
    pinned = [tuple(t.pin_memory() for t in batch) for batch in few]
    there = [tuple(t.cuda() for t in batch) for batch in few]
    size = sum(t.nbytes for t in few[0])
    found: Measured = defaultdict(lambda: defaultdict(list))
    for name in ("by hand", "fnloop", "fnloop cuda_graph"):
        model = cnn(32).cuda()
        optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
        train = functools.partial(by_hand, model, optimizer)
        if name != "by hand":
            train = with_fnloop(model, optimizer, *[fl.cuda_graph()] * ("graph" in name))
        for batches in (there, pinned):
            train((batches * 2)[:5])
        for _ in range(rounds):
            for kind, batches in (("resident", there), ("fed", pinned)):
                torch.cuda.reset_peak_memory_stats()
                many = (batches * updates)[:updates]
                found[name][kind].append(timed(lambda: train(many)) / updates * 1e3)
                found[name][f"{kind}: peak"].append(torch.cuda.max_memory_allocated() / size)
    return found


def checkpoints(rounds: int, tiny: bool) -> Measured:
    torch.manual_seed(0)
    case = CASES["gpt2"]
    model = (GPT(2, 64, 2, 512, 64) if tiny else case.model()).cuda()
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=True)
    state = fl.TrainState.create(model, optimizer, seed=0)
    batch: Any = tuple(t[:4, :64].cuda() % 512 for t in case.batch())
    step = fl.pipeline(fl.amp("bf16"))(loss_of)

    def update() -> None:
        nonlocal state
        state, _ = step(state, batch)

    for _ in range(5):
        update()
    moments = [t for values in optimizer.state.values() for t in values.values()]
    bytes_ = sum(t.nbytes for t in (*model.parameters(), *moments) if isinstance(t, Tensor))
    found: Measured = defaultdict(lambda: defaultdict(list))
    found["of all"]["MiB"].append(bytes_ / 2**20)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            hook = fl.checkpoint(folder, keep=1, background=True)
            for name in ("first", "second", "third"):
                plain = timed(update)
                start = time.perf_counter()
                torch.cuda.reset_peak_memory_stats()
                allocated = torch.cuda.memory_allocated()
                pause = timed(lambda: (hook(attrs.evolve(state, events=())), update()))
                hook.close()
                whole = time.perf_counter() - start
                found[name]["pause"].append(pause - plain)
                found[name]["write"].append(whole)
                grown = torch.cuda.max_memory_allocated() - allocated
                found[name]["device MiB"].append(grown / 2**20)
    return found


def show(title: str, found: Measured) -> None:
    print(f"\n{title}")
    for name, columns in found.items():
        parts = [f"{what} {statistics.median(v):.4g}" for what, v in columns.items()]
        print(f"{name:<20}{', '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = functools.partial(parser.add_argument, help="default: %(default)s")
    add("--rounds", type=int, default=5)
    add("--updates", type=int, default=40)
    add("--samples", type=int, default=512)
    add("--parts", nargs="+", default=["checkpoints", "feeding"])
    add("--tiny", action="store_true", help="a model that shows nothing")
    add("--json", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    facts: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if "checkpoints" in args.parts:
        facts["checkpoints"] = found = checkpoints(args.rounds, args.tiny)
        show("checkpoints in the background (s)", found)
    if "feeding" in args.parts:
        facts["feeding"] = found = feeding(args.rounds, args.updates, args.samples)
        show("feeding (ms per update, peak in batches)", found)
        for name, columns in found.items():
            pairs = zip(columns["resident"], columns["fed"], strict=True)
            speed = statistics.median(a / b for a, b in pairs)
            print(f"{name:<20}speed {speed:.3f} of that without copies")
    args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
