"""What a training loop costs per batch: fnloop, its peers, and the same loop written by hand.

    pip install 'fnloop[bench]'              # the peers; those that are missing are left out
    python tests/benchmarks/overhead.py      # the tables; and the raw numbers, as JSON beside it
    python tests/benchmarks/overhead.py --only records      # those of record_every alone

The model is tiny (784-128-64-10, batches of 32, SGD with momentum, one CPU thread), so that the
loop shows. Every contender trains on one list of tensors from the same first weights, and has to
arrive at those of the loop written by hand, bit for bit ("plain") or to 1e-6 ("accumulate(4) and
clip(1.0)"); otherwise nothing is timed. In a round each contender trains once on all batches, in
random order. Ratios are taken within a round. The last column compares the fastest rounds of both:
on a busy machine it is the steadier number.

What is timed, and divided by the number of batches (four to an update in the second table):

* by hand, accelerate: the loop, from its first line to the reading of the loss.
* fnloop: the whole call of ``fit``, with its set-up and the record at its end. First with
  ``hooks=()``, then with the default hooks, which write to os.devnull: a line per epoch, as into a
  log file, not a bar.
* the others: from the beginning of their epoch to its end, told by hooks that they call once per
  epoch. Their set-up, 0.1 s in pytorch-accelerated, is left out. They get no callbacks, and
  lightning its barebones mode.

What becomes of the loss differs. By hand, fnloop and accelerate sum it on the device and read it
once per epoch. pytorch-ignite and pytorch-accelerated read it every batch, as they do by default,
which is cheap on a CPU. lightning drops it in barebones mode.

Then what ``record_every`` costs: fnloop with a record every 50 updates and at every update,
relative to fnloop without; by itself, with accumulation, with a metric, and with a collection of
two. Each contender is one run of ``fit`` in a process of its own. They take turns of 50 updates, so
that each compares with a turn of 0.1 s ago, and the time of the thread is taken: whatever else the
machine does disturbs all of them alike. "no records, again" is the same thing twice: how far its
ratio is from 1 is the noise. Two loops by hand show what one host read per update costs: next to
nothing on a CPU; on a GPU (--device cuda) the device waits for it. There, torchmetrics reads the
device in every update, so that the rows of the collection say less.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import logging
import multiprocessing
import os
import platform
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import by_hand
import torch
from by_hand import MAX_NORM, WINDOW
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import SGD, Optimizer

import fnloop as fl

Batches = list[tuple[Tensor, Tensor]]
Train = Callable[[Batches], Any]  # trains on every batch once, and lets CLOCK time it

PLAIN, ACCUMULATED = "plain", f"accumulate({WINDOW}) and clip({MAX_NORM})"
TOLERANCE = {
    PLAIN: 0.0,
    ACCUMULATED: 1e-6,
}  # how far weights may be from those of the loop written by hand
WARM_UP = 40  # batches, after which weights are compared


class Clock:
    """A stopwatch. Its methods fit the peers' hooks."""

    now: Callable[[], float] = staticmethod(time.perf_counter)

    def start(self, *_: Any) -> None:
        self.began = self.now()

    def stop(self, *_: Any) -> None:
        self.seconds = self.now() - self.began


CLOCK = Clock()  # one for all, as they take turns


class Loader:
    """The batches as they are, for peers that don't take a list: nothing is fetched, collated or
    moved.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.batch_sampler = SimpleNamespace()  # pytorch-accelerated sets an attribute of it

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


# --- the contenders: (model, optimizer, setting) -> train
# ---------------------------------------------------


def with_nothing(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    loop = by_hand.train if setting == PLAIN else by_hand.train_accumulated

    def train(batches: Batches) -> None:
        CLOCK.start()
        loop(model, optimizer, batches)
        CLOCK.stop()

    return train


def with_fnloop(
    model: nn.Module,
    optimizer: Optimizer,
    setting: str,
    hooks: Sequence[Any] = (),
    **settings: Any,
) -> Train:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)

    middleware = () if setting == PLAIN else (fl.accumulate(WINDOW), fl.clip(MAX_NORM))
    step = fl.pipeline(*middleware)(loss_fn)
    state = fl.TrainState.create(model, optimizer, seed=0)

    def train(batches: Batches) -> None:
        nonlocal state
        CLOCK.start()
        state = fl.fit(step, state, batches, hooks=hooks, **settings)
        CLOCK.stop()

    return train


def with_default_hooks(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    nowhere = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    return with_fnloop(
        model, optimizer, setting, hooks=(fl.progress(file=nowhere), fl.halt_on_nonfinite())
    )


def with_accelerate(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    """The loops of its documentation, with the loss summed. A list needs no preparing."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)

    def plain(batches: Batches) -> None:
        CLOCK.start()
        total = torch.zeros(())
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach() * len(y)
        total.item()
        CLOCK.stop()

    def accumulated(batches: Batches) -> None:
        accelerator.gradient_accumulation_steps = (
            WINDOW  # process-wide: pytorch-accelerated has reset it
        )
        CLOCK.start()
        total = torch.zeros(())
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() * len(y)
        total.item()
        CLOCK.stop()

    return plain if setting == PLAIN else accumulated


def with_ignite(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    """It takes a list. What create_supervised_trainer makes can't clip, hence an Engine of the same
    kind.
    """
    from ignite.engine import Engine, Events, create_supervised_trainer

    def update(engine: Engine, batch: tuple[Tensor, Tensor]) -> float:
        if (engine.state.iteration - 1) % WINDOW == 0:
            optimizer.zero_grad()
        model.train()
        x, y = batch
        loss = cross_entropy(model(x), y)
        (loss / WINDOW).backward()
        if engine.state.iteration % WINDOW == 0:
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        return loss.item()

    plain = setting == PLAIN
    trainer = (
        create_supervised_trainer(model, optimizer, cross_entropy) if plain else Engine(update)
    )
    trainer.add_event_handler(Events.EPOCH_STARTED, CLOCK.start)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, CLOCK.stop)
    return lambda batches: trainer.run(batches, max_epochs=1)


def with_pytorch_accelerated(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    """It clips by value only, and every batch. So its method for an update is overridden, to clip
    there.
    """
    from pytorch_accelerated import Trainer

    class OnBatches(Trainer):
        training_run_start, train_epoch_end = (
            CLOCK.start,
            CLOCK.stop,
        )  # right around the epoch; else empty

        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Loader:
            return Loader(self.train_dataset)

    class Clipping(OnBatches):
        def optimizer_step(self) -> None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            super().optimizer_step()

    kind, window = (OnBatches, 1) if setting == PLAIN else (Clipping, WINDOW)
    trainer = kind(model, cross_entropy, optimizer, callbacks=())
    return lambda batches: trainer.train(batches, num_epochs=1, gradient_accumulation_steps=window)


def with_lightning(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    """It takes any iterable, but reads a list as one of loaders. Each fit gets a new Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(
        logging.ERROR
    )  # its list of what barebones switches off

    class Module(LightningModule):
        on_train_epoch_start, on_train_epoch_end = CLOCK.start, CLOCK.stop

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    module = Module()
    extra = (
        {}
        if setting == PLAIN
        else {"accumulate_grad_batches": WINDOW, "gradient_clip_val": MAX_NORM}
    )

    def train(batches: Batches) -> None:
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True, **extra)
        trainer.fit(module, Loader(batches))

    return train


HAND = "by hand"
CONTENDERS = {  # name -> (distribution, how to build it)
    HAND: ("torch", with_nothing),
    "fnloop": ("fnloop", with_fnloop),
    "fnloop, default hooks": ("fnloop", with_default_hooks),
    "accelerate": ("accelerate", with_accelerate),
    "pytorch-ignite": ("pytorch-ignite", with_ignite),
    "pytorch-accelerated": ("pytorch-accelerated", with_pytorch_accelerated),
    "lightning": ("lightning", with_lightning),
}


# --- records: fnloop with them and without
# -------------------------------------------------------------------------------------------------


class Turns:
    """Batches for a run that takes turns with others.

    Args:
        batches: the batches of a turn.
        number: how many turns there are.
        go: released when a turn may begin.
        done: released at its end.
    """

    def __init__(self, batches: Batches, number: int, go: Semaphore, done: Semaphore) -> None:
        self.batches, self.number, self.go, self.done = batches, number, go, done
        self.on_gpu = batches[0][0].is_cuda
        self.times: list[float] = []  # microseconds per batch, turn by turn

    def __len__(self) -> int:
        return self.number * len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.number):
            self.go.acquire()
            began = self.now()
            yield from self.batches
            self.times.append((self.now() - began) / len(self.batches) * 1e6)
            self.done.release()

    def now(self) -> float:
        """Return the seconds of this thread; on a GPU, those on the clock when all is done."""
        if not self.on_gpu:
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def train_in_turns(
    setting: str,
    name: str,
    device: str,
    turns: int,
    go: Semaphore,
    done: Semaphore,
    times: Connection,
) -> None:
    """Train one contender. Send the times of all turns."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        output = model(x)
        return cross_entropy(output, y), {"output": output}

    torch.set_num_threads(1)
    _, window, middleware = RECORDED[setting]
    batches = [(x.to(device), y.to(device)) for x, y in make_batches(TURN * window)]
    loader, (model, optimizer) = Turns(batches, turns, go, done), make_model()
    model.to(device)
    if name in READS:
        by_hand.train(model, optimizer, loader, READS[name])
    else:
        step, steps = fl.pipeline(*middleware())(loss_fn), RECORDS[name]
        moment = None if steps is None else fl.every(steps=steps)
        state = fl.TrainState.create(model, optimizer)
        fl.fit(step, state, loader, hooks=(), record_every=moment)
    times.send(loader.times)


def measure_in_turns(setting: str, turns: int, device: str) -> dict[str, list[float]]:
    """Return microseconds per batch, turn by turn: each contender trains in its own process."""
    context = multiprocessing.get_context("spawn")
    running = {}
    for name in in_turns(setting):
        go, done = context.Semaphore(0), context.Semaphore(0)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=train_in_turns,
            args=(setting, name, device, turns + WARM_UP_TURNS, go, done, theirs),
            daemon=True,  # so that it ends with this process
        )
        process.start()
        theirs.close()  # else recv would wait for a process that has failed
        running[name] = (process, go, done, ours)
    order = random.Random(0)
    for _ in range(turns + WARM_UP_TURNS):
        for name in order.sample(list(running), len(running)):
            process, go, done, _ = running[name]
            go.release()
            while not done.acquire(timeout=1):
                if not process.is_alive():
                    raise SystemExit(f"{setting}: {name} has failed")
    times = {name: ours.recv()[WARM_UP_TURNS:] for name, (*_, ours) in running.items()}
    for process, *_ in running.values():
        process.join()
    return times


def correct(aux: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (aux["output"].argmax(1) == batch[1]).double().mean()


def collection() -> Any:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    kinds = (MulticlassAccuracy, MulticlassF1Score)
    metrics = MetricCollection([kind(10, validate_args=False) for kind in kinds])
    return fl.metric(fl.from_torchmetrics(metrics, lambda aux, batch: (aux["output"], batch[1])))


NO_RECORDS = "no records"
RECORDS = {
    NO_RECORDS: None,
    "no records, again": None,
    "a record every 50": 50,
    "a record every update": 1,
}
READS = {"by hand": False, "by hand, a read every update": True}
RECORDED = {  # what a pipeline has -> (distribution, batches in an update, how to make it)
    PLAIN: ("fnloop", 1, lambda: ()),
    f"accumulate({WINDOW})": ("fnloop", WINDOW, lambda: (fl.accumulate(WINDOW),)),
    "one metric": ("fnloop", 1, lambda: (fl.metric(correct=correct),)),
    "a MetricCollection": ("torchmetrics", 1, lambda: (collection(),)),
}
TURN, WARM_UP_TURNS = 50, 2  # updates in a turn, and turns that are not counted


def in_turns(setting: str) -> list[str]:
    """Return the contenders that take turns."""
    return [*RECORDS, *(READS if setting == PLAIN else ())]


# --- the measurement
# ----------------------------------------------------------------------------------------


def make_model() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_batches(number: int) -> Batches:
    torch.manual_seed(0)
    return [(torch.randn(32, 784), torch.randint(10, (32,))) for _ in range(number)]


def build(setting: str, names: list[str], warm_up: Batches) -> dict[str, Train]:
    """Build the contenders and warm them up. Exit unless all have done the same work."""
    contenders, weights = {}, {}
    for name in names:
        model, optimizer = make_model()
        contenders[name] = CONTENDERS[name][1](model, optimizer, setting)
        contenders[name](warm_up)
        weights[name] = parameters_to_vector(model.parameters()).detach()
        apart = (weights[name] - weights[HAND]).abs().max().item()
        if not apart <= TOLERANCE[setting]:
            raise SystemExit(f"{setting}: weights of {name} are {apart:.2g} from those by hand")
    return contenders


def measure(contenders: dict[str, Train], batches: Batches, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per batch, round by round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(
        0
    )  # of its own: pytorch-accelerated seeds the global one whenever it trains
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            gc.collect()
            contenders[name](batches)
            times[name].append(CLOCK.seconds / len(batches) * 1e6)
    assert torch.get_num_threads() == 1, "a contender has changed the number of threads"
    return times


def show(
    setting: str,
    times: dict[str, list[float]],
    names: Iterable[str] = (),
    *,
    to: str = HAND,
    digits: int = 2,
) -> None:
    print(f"\n{setting:<28}{'µs/batch':>10}{'ratio':>8}{'25–75 %':>15}{'fastest':>10}")
    for name in names or CONTENDERS:
        if name not in times:
            print(f"{name:<28}not installed: pip install 'fnloop[bench]'")
            continue
        ratios = [theirs / hand for theirs, hand in zip(times[name], times[to], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        middle = f"{low:.{digits}f}–{high:.{digits}f}"
        median = statistics.median(times[name])
        fastest = min(times[name]) / min(times[to])
        print(f"{name:<28}{median:>10.1f}{ratio:>8.{digits}f}{middle:>15}{fastest:>10.{digits}f}")


def version(distribution: str) -> str | None:
    if distribution == "fnloop":  # which may be a checkout
        return fl.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    beside = Path(__file__).with_suffix(".json")
    parser.add_argument(
        "--rounds", type=int, default=15, help="default: %(default)s; 9 or more to quote"
    )
    parser.add_argument("--batches", type=int, default=400, help="in a round; default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=beside, help="where numbers go; default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", help="of the records; default: %(default)s")
    parser.add_argument("--only", choices=("peers", "records"), help="default: both")
    args = parser.parse_args()
    if args.rounds < 2 or args.batches < WARM_UP or args.batches % WINDOW:
        parser.error(
            f"expected 2 rounds or more, and {WARM_UP} batches or more, a multiple of {WINDOW}"
        )

    warnings.simplefilter("ignore")  # what peers advise about loaders and loggers
    os.environ["ACCELERATE_USE_CPU"] = "true"  # for every Accelerator, pytorch-accelerated's too
    torch.set_num_threads(1)
    versions = {distribution: version(distribution) for distribution, _ in CONTENDERS.values()}
    names = [name for name, (distribution, _) in CONTENDERS.items() if versions[distribution]]
    print(
        f"{cpu()}, Python {platform.python_version()}, {args.rounds} rounds of {args.batches} "
        f"batches"
    )
    print(", ".join(f"{distribution} {found}" for distribution, found in versions.items() if found))

    batches, results = make_batches(args.batches), {}
    for setting in (PLAIN, ACCUMULATED) if args.only != "records" else ():
        results[setting] = measure(build(setting, names, batches[:WARM_UP]), batches, args.rounds)
        show(setting, results[setting])
    for setting, (distribution, *_) in RECORDED.items() if args.only != "peers" else ():
        if version(distribution) is None:
            print(f"\n{setting}: not installed: pip install 'fnloop[bench]'")
            continue
        times = measure_in_turns(setting, 10 * args.rounds, args.device)
        show(setting, times, in_turns(setting), to=NO_RECORDS, digits=3)
        results[f"records: {setting}"] = times
    facts = {
        "cpu": cpu(),
        "python": platform.python_version(),
        "versions": versions,
        "batches": args.batches,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
    }
    args.json.write_text(json.dumps({**facts, "us_per_batch": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
