"""What a training loop costs per batch: fnloop, its peers, and the same loop written by hand.

    pip install 'fnloop[bench]'              # the peers; those that are missing are left out
    python tests/benchmarks/overhead.py      # a table for each case

How it is measured is in ``apart.py``. The model is that of ``costs.py``: tiny, so that the loop
shows. A round is 400 batches. Every contender trains on one list of tensors from the same first
weights. Before it is timed, its weights after 40 batches have to be those of the loop written by
hand, bit for bit ("plain"), or to 1e-6 (with accumulation over 4 batches and clipping).

What is timed:

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
two. "none, again" is the same thing twice: how far its ratio is from 1 is the noise. One host read
per update costs next to nothing on a CPU: "reads every loss".
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import apart
import by_hand
import costs
from apart import CLOCK, Loader
from by_hand import MAX_NORM, WINDOW

PLAIN, CLIPPED = "plain", f"accumulate({WINDOW}) and clip({MAX_NORM})"
TOLERANCE = {PLAIN: 0.0, CLIPPED: 1e-6}  # how far weights may be from those by hand
BATCHES, CHECKED = 400, 40  # of a round, and those after which weights are compared
Train = Callable[[list[Any]], Any]  # trains on every batch once, and lets CLOCK time it


# --- the contenders: (model, optimizer, case) -> train


def with_nothing(model: Any, optimizer: Any, case: str, reads: bool = False) -> Train:
    loop: Any = by_hand.train_accumulated
    if case != CLIPPED:
        loop = functools.partial(by_hand.train, reads=reads)

    def train(batches: list[Any]) -> None:
        CLOCK.start()
        loop(model, optimizer, batches)
        CLOCK.stop()

    return train


def with_fnloop(
    model: Any,
    optimizer: Any,
    case: str,
    hooks: Callable[[Any], Any] = lambda fl: (),
    middleware: Callable[[Any], Any] = lambda fl: (),
    record_every: int | None = None,
) -> Train:
    import fnloop as fl

    listed = (fl.accumulate(WINDOW), fl.clip(MAX_NORM)) if case == CLIPPED else middleware(fl)
    step = fl.pipeline(*listed)(with_output if listed and case != CLIPPED else costs.loss_fn)
    state = fl.TrainState.create(model, optimizer, seed=0)
    moment = None if record_every is None else fl.every(steps=record_every)
    own = hooks(fl)

    def train(batches: list[Any]) -> None:
        nonlocal state
        CLOCK.start()
        state = fl.fit(step, state, batches, hooks=own, record_every=moment)
        CLOCK.stop()

    return train


def with_accelerate(model: Any, optimizer: Any, case: str) -> Train:
    """The loop of its documentation, with the loss summed. A list needs no preparing."""
    import torch
    from accelerate import Accelerator

    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(gradient_accumulation_steps=1 if case == PLAIN else WINDOW)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches: list[Any]) -> None:
        CLOCK.start()
        total = torch.zeros(())
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = costs.loss_fn(model, (x, y))
                accelerator.backward(loss)
                if case != PLAIN and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() * len(y)
        total.item()
        CLOCK.stop()

    return train


def with_ignite(model: Any, optimizer: Any, case: str) -> Train:
    """It takes a list. What create_supervised_trainer makes cannot clip, hence an Engine."""
    from ignite.engine import Engine, Events, create_supervised_trainer
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_

    def update(engine: Any, batch: Any) -> float:
        if (engine.state.iteration - 1) % WINDOW == 0:
            optimizer.zero_grad()
        model.train()
        loss = costs.loss_fn(model, batch)
        (loss / WINDOW).backward()
        if engine.state.iteration % WINDOW == 0:
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        return loss.item()

    plain = case == PLAIN
    trainer = (
        create_supervised_trainer(model, optimizer, cross_entropy) if plain else Engine(update)
    )
    trainer.add_event_handler(Events.EPOCH_STARTED, CLOCK.start)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, CLOCK.stop)
    return lambda batches: trainer.run(batches, max_epochs=1)


def with_pytorch_accelerated(model: Any, optimizer: Any, case: str) -> Train:
    """It clips by value only, and every batch, so its method for an update clips here."""
    from pytorch_accelerated import Trainer
    from torch.nn.functional import cross_entropy

    os.environ["ACCELERATE_USE_CPU"] = "true"

    class OnBatches(Trainer):
        training_run_start, train_epoch_end = CLOCK.start, CLOCK.stop  # else empty

        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Loader:
            return Loader(self.train_dataset)

    class Clipping(OnBatches):
        def optimizer_step(self) -> None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            super().optimizer_step()

    kind, window = (OnBatches, 1) if case == PLAIN else (Clipping, WINDOW)
    trainer = kind(model, cross_entropy, optimizer, callbacks=())
    return lambda batches: trainer.train(batches, num_epochs=1, gradient_accumulation_steps=window)


def with_lightning(model: Any, optimizer: Any, case: str, **settings: Any) -> Train:
    """It takes any iterable, but reads a list as one of loaders. Each fit gets a new Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    for name in ("lightning.pytorch", "lightning.fabric"):  # what barebones switches off
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(LightningModule):
        on_train_epoch_start, on_train_epoch_end = CLOCK.start, CLOCK.stop

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return costs.loss_fn(self.model, batch)

        def configure_optimizers(self) -> Any:
            return optimizer

    module, given = Module(), {"devices": 1, **settings}
    if case != PLAIN:
        given |= {"accumulate_grad_batches": WINDOW, "gradient_clip_val": MAX_NORM}

    def train(batches: list[Any]) -> None:
        Trainer(accelerator="cpu", max_epochs=1, barebones=True, **given).fit(
            module, Loader(batches)
        )

    return train


PEERS = {
    "by hand": with_nothing,
    "fnloop": with_fnloop,
    "fnloop, default hooks": functools.partial(with_fnloop, hooks=costs.default_hooks),
    "accelerate": with_accelerate,
    "pytorch-ignite": with_ignite,
    "pytorch-accelerated": with_pytorch_accelerated,
    "lightning": with_lightning,
}


def checked(build: Callable[..., Train], case: str) -> Callable[[], apart.Once]:
    """Return a contender that has to make the weights of the loop by hand before it is timed."""

    def set_up() -> apart.Once:
        from torch.nn.utils import parameters_to_vector

        warnings.simplefilter("ignore")  # what peers advise about loaders and loggers
        (model, optimizer), data = costs.make(), costs.batches(BATCHES)
        train = build(model, optimizer, case)
        if build is not with_nothing:
            hand, its_optimizer = costs.make()
            with_nothing(hand, its_optimizer, case)(copy.copy(data[:CHECKED]))
            train(data[:CHECKED])
            made, right = map(parameters_to_vector, (model.parameters(), hand.parameters()))
            if not (made - right).abs().max() <= TOLERANCE.get(case, 0.0):
                raise SystemExit(f"{case}: {build} makes other weights than the loop by hand")

        def once() -> float:
            train(data)
            return CLOCK.seconds

        return once

    return set_up


# --- records: fnloop with them and without


def with_output(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    x, y = batch
    output = model(x)
    return cross_entropy(output, y), {"output": output}


def correct(aux: Any, batch: Any) -> Any:
    return (aux["output"].argmax(1) == batch[1]).double().mean()


def collection(fl: Any) -> Any:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    kinds = (MulticlassAccuracy, MulticlassF1Score)
    metrics = MetricCollection([kind(10, validate_args=False) for kind in kinds])
    inputs = lambda aux, batch: (aux["output"], batch[1])
    return (fl.metric(fl.from_torchmetrics(metrics, inputs)),)


RECORDED = {
    "records": lambda fl: (),
    "records, a metric": lambda fl: (fl.metric(correct=correct),),
    "records, a MetricCollection": collection,
}
RECORDS = {"none": None, "none, again": None, "every 50": 50, "every update": 1}


def contenders() -> Iterator[tuple[str, Callable[[], apart.Once]]]:
    for case in (PLAIN, CLIPPED):
        for name, build in PEERS.items():
            yield f"{case}: {name}", checked(build, case)
    reading = functools.partial(with_nothing, reads=True)
    yield f"{PLAIN}: by hand, reads every loss", checked(reading, PLAIN)
    for case, middleware in RECORDED.items():
        for name, steps in RECORDS.items():
            build = functools.partial(with_fnloop, middleware=middleware, record_every=steps)
            yield f"{case}: {name}", checked(build, case)


CONTENDERS = dict(contenders())

if __name__ == "__main__":
    apart.main(CONTENDERS)
