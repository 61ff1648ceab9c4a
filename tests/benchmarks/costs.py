"""What fnloop costs beside the same by hand: an update, a call, an import, a save.

    python tests/benchmarks/costs.py                       # all cases
    python tests/benchmarks/costs.py --only update         # those of a name
    python tests/benchmarks/costs.py --tree ../before      # and another checkout beside this one

How it is measured is in ``apart.py``. The model is tiny (784-128-64-10, batches of 32, SGD with
momentum, one thread), so that what is not the model shows. By hand means: the fewest lines of torch
that do the same, without fnloop imported. What it came to, with dates and versions, is in
``notebooks/benchmarks.md``.
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apart

ROUNDS = 200  # batches in a turn of an update
LARGE = 40_000  # the width of a model of 34 million parameters, 270 MB with their momentum
State = tuple[Any, Any]  # model, optimizer


def make(width: int = 128) -> State:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches(number: int) -> list[Any]:
    import torch

    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 784, generator=draw), torch.randint(0, 10, (32,), generator=draw))
        for _ in range(number)
    ]


def loss_fn(model: Any, batch: Any) -> Any:
    from torch.nn.functional import cross_entropy

    x, y = batch
    return cross_entropy(model(x), y)


# --- updates


def trained_by_hand_by(name: str) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import by_hand

        (model, optimizer), data, train = make(), batches(ROUNDS), getattr(by_hand, name)

        def once() -> None:
            model.train()
            train(model, optimizer, data)

        return once

    return set_up


def fitted(
    middleware: Callable[[Any], tuple[Any, ...]] = lambda fl: (),
    hooks: Callable[[Any], tuple[Any, ...]] = lambda fl: (),
    number: int = ROUNDS,
    valid: int = 0,
) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import fnloop as fl

        data = batches(number)
        loaders = (data, batches(valid)) if valid else data
        step = fl.pipeline(*middleware(fl))(loss_fn)
        state = fl.TrainState.create(*make(), seed=0)
        own = hooks(fl)

        def once() -> None:
            nonlocal state
            state = fl.fit(step, state, loaders, hooks=own)

        return once

    return set_up


def _in_a_file(values: Any) -> Any:
    import numpy as np

    with tempfile.NamedTemporaryFile() as file:
        found = np.memmap(file.name, values.dtype, "w+", shape=values.shape)
    found[:] = values
    return found


def _table(form: str | None) -> Callable[[Any, Any], Any]:
    def make(x: Any, y: Any) -> Any:
        import datasets

        datasets.disable_progress_bars()
        return datasets.Dataset.from_dict({"x": x.numpy(), "y": y.numpy()}).with_format(form)

    return make


def _of_torch(name: str, *args: Any, **named: Any) -> Any:
    import torch.utils.data

    return getattr(torch.utils.data, name)(*args, **named)


# Data sets of the same samples, whose batches are read at once.
DATA: dict[str, Callable[[Any, Any], Any]] = {
    "TensorDataset": lambda x, y: _of_torch("TensorDataset", x, y),
    "Subset": lambda x, y: _of_torch("Subset", _of_torch("TensorDataset", x, y), range(len(x))),
    "StackDataset": lambda x, y: _of_torch("StackDataset", x=x, y=y),
    "ConcatDataset": lambda x, y: _of_torch(
        "ConcatDataset",
        [_of_torch("TensorDataset", x[i::2], y[i::2]) for i in range(2)],
    ),
    "memmaps": lambda x, y: _of_torch("StackDataset", _in_a_file(x.numpy()), _in_a_file(y.numpy())),
    "datasets, torch": _table("torch"),
    "datasets, numpy": _table("numpy"),
    "datasets, python": _table(None),
    "columns of datasets": lambda x, y: _of_torch(
        "StackDataset", x=(rows := _table("torch")(x, y))["x"], y=rows["y"]
    ),
}
SAMPLES, FEATURES, BATCH = 4096, 64, 64


def loader(kind: str) -> Any:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    x, y = torch.randn(SAMPLES, FEATURES), torch.arange(SAMPLES) % 10
    return DataLoader(DATA[kind](x, y), BATCH, shuffle=True)


def pass_by_torch(kind: str) -> apart.Once:
    data = loader(kind)
    return lambda: sum(1 for _ in data) and None


def pass_by_fnloop(kind: str) -> apart.Once:
    from fnloop.extend import Source

    source = Source.open(loader(kind), 0)
    return lambda: sum(1 for _ in source.batches(0, 0, 0)) and None


def default_hooks(fl: Any) -> tuple[Any, ...]:
    nowhere = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    return fl.progress(file=nowhere), fl.halt_on_nonfinite()


def recorded() -> apart.Once:
    import fnloop as fl

    data, step = batches(ROUNDS), fl.pipeline()(loss_fn)
    state = fl.TrainState.create(*make(), seed=0)

    def once() -> None:
        nonlocal state
        state = fl.fit(step, state, data, hooks=(), record_every=fl.every(steps=50))

    return once


# --- single calls


def one_update_by_hand(valid: int) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import torch
        from torch.nn.functional import cross_entropy

        (model, optimizer), ((x, y), *rest) = make(), batches(1 + valid)

        def once() -> None:
            model.train()
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            loss.item()
            if valid:
                model.eval()
                with torch.no_grad():
                    sum(cross_entropy(model(a), b) for a, b in rest).item()

        return once

    return set_up


def evaluation_by_hand() -> apart.Once:
    import torch
    from torch.nn.functional import cross_entropy

    (model, _), data = make(), batches(ROUNDS)

    def once() -> None:
        model.eval()
        total, items = torch.zeros(()), 0
        with torch.no_grad():
            for x, y in data:
                total += cross_entropy(model(x), y) * len(y)
                items += len(y)
        (total / items).item()

    return once


def evaluation() -> apart.Once:
    import fnloop as fl

    data, step = batches(ROUNDS), fl.pipeline()(loss_fn)
    state = fl.TrainState.create(*make(), seed=0)
    return lambda: fl.evaluate(step, state, data) and None


def prediction_by_hand() -> apart.Once:
    import torch

    (model, _), data = make(), batches(ROUNDS)

    def once() -> None:
        model.eval()
        with torch.no_grad():
            torch.cat([model(x) for x, _ in data])

    return once


def prediction() -> apart.Once:
    import torch

    import fnloop as fl

    data = batches(ROUNDS)
    state = fl.TrainState.create(*make(), seed=0)

    def once() -> None:
        torch.cat(list(fl.predict(lambda model, batch: model(batch[0]), state, data)))

    return once


def small(number: int) -> tuple[Any, list[Any]]:
    """Return the smallest model that is of use, and batches for it."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, [torch.randn(32, 32) for _ in range(number)]


def small_prediction_by_hand() -> apart.Once:
    import torch

    model, data = small(ROUNDS)

    def once() -> None:
        model.eval()
        with torch.no_grad():
            _ = [model(x) for x in data]

    return once


def small_prediction() -> apart.Once:
    import torch

    import fnloop as fl

    model, data = small(ROUNDS)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)
    return lambda: list(fl.predict(lambda model, batch: model(batch), state, data)) and None


FITS, BATCHES = 30, 3  # as in a search, in folds, in rounds, in active learning


def many_fits_by_hand() -> apart.Once:
    import by_hand

    data, states = batches(BATCHES), [make() for _ in range(FITS)]

    def once() -> None:
        for model, optimizer in states:
            model.train()
            by_hand.train(model, optimizer, data)

    return once


def many_fits() -> apart.Once:
    import fnloop as fl

    data, step = batches(BATCHES), fl.pipeline()(loss_fn)
    states = [fl.TrainState.create(*make(), seed=n) for n in range(FITS)]

    def once() -> None:
        for n, state in enumerate(states):
            states[n] = fl.fit(step, state, data, hooks=())

    return once


def trained(*width: int) -> Any:
    import fnloop as fl

    step = fl.pipeline()(loss_fn)
    return fl.fit(step, fl.TrainState.create(*make(*width), seed=0), batches(3), hooks=())


def trained_by_hand(*width: int) -> State:
    model, optimizer = make(*width)
    for batch in batches(3):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return model, optimizer


def snapshot_by_hand() -> apart.Once:
    state = trained_by_hand()
    return lambda: copy.deepcopy(state) and None


def snapshot() -> apart.Once:
    import fnloop as fl

    state = trained()
    return lambda: fl.snapshot(state) and None


def tensors_of(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    momentum = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return {"model": dict(model.state_dict()), "optimizer": momentum}


def scratch() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    return Path(folder)


def write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def save_by_hand(*width: int) -> apart.Once:
    """With the same guarantees: files flushed, sums written last, the folder renamed."""
    import torch
    from safetensors.torch import save

    model, optimizer = trained_by_hand(*width)
    folder = scratch()

    def once() -> None:
        made, path = folder / ".new", folder / "a"
        made.mkdir()
        sums = {}
        contents = {k: save(v) for k, v in tensors_of(model, optimizer).items()}
        contents["rng"] = save({"rng": torch.get_rng_state()})
        contents["state"] = json.dumps({"step": 3, "groups": [{"lr": 0.01}]}).encode()
        for name, content in contents.items():
            write(made / name, content)
            sums[name] = hashlib.sha256(content).hexdigest()
        write(made / "manifest.json", json.dumps(sums).encode())
        sync_folder(made)
        if path.exists():
            path.rename(folder / ".old")
        made.rename(path)
        sync_folder(folder)
        shutil.rmtree(folder / ".old", ignore_errors=True)

    return once


def saving(*width: int) -> apart.Once:
    import fnloop as fl

    state, path = trained(*width), scratch() / "a"
    return lambda: fl.save(state, path) and None


def restore_by_hand(*width: int) -> apart.Once:
    from safetensors.torch import load, save

    model, optimizer = trained_by_hand(*width)
    folder = scratch()
    sums = {}
    for name, tensors in tensors_of(model, optimizer).items():
        (folder / name).write_bytes(content := save(tensors))
        sums[name] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(sums))

    def once() -> None:
        import torch

        known = json.loads((folder / "manifest.json").read_text())
        found = {}
        for name, right in known.items():
            content = (folder / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == right
            found[name] = load(content)
        model.load_state_dict(found["model"])
        with torch.no_grad():
            for name, p in model.named_parameters():
                optimizer.state[p]["momentum_buffer"].copy_(found["optimizer"][name])

    return once


def restoring(*width: int) -> apart.Once:
    import fnloop as fl

    path = fl.save(trained(*width), scratch() / "a")

    def once() -> float:
        fresh = fl.TrainState.create(*make(*width), seed=0)  # a state is restored once
        began = time.process_time()
        fl.restore(path, fresh)
        return time.process_time() - began

    return once


def importing(line: str) -> Callable[[], apart.Once]:
    """Import in a new process, after torch, from compiled files, without the garbage collector.

    Whichever module comes after torch may set off a collection of its 170,000 objects, which takes
    longer than all the rest.
    """
    clock = "time.perf_counter()"
    code = f"import gc, time, torch; gc.disable(); t = {clock}; {line}; print({clock} - t)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.check_output(command, env=environment, text=True))

    return lambda: once


def contenders() -> Iterator[tuple[str, Callable[[], apart.Once]]]:
    clipped = lambda fl: (fl.accumulate(4), fl.clip(1.0))
    yield "200 updates: by hand", trained_by_hand_by("train")
    yield "200 updates: fnloop", fitted()
    yield "200 updates: default hooks", fitted(hooks=default_hooks)
    yield "200 updates: record_every 50", recorded
    yield "200 batches, accumulate and clip: by hand", trained_by_hand_by("train_accumulated")
    yield "200 batches, accumulate and clip: fnloop", fitted(clipped)
    yield "200 updates with an average: by hand", trained_by_hand_by("train_averaged")
    yield "200 updates with an average: fnloop", fitted(lambda fl: (fl.ema(0.999),))
    for kind in DATA:
        case = f"a shuffled pass over {SAMPLES // BATCH} batches of {kind}"
        yield f"{case}: by torch", functools.partial(pass_by_torch, kind)
        yield f"{case}: fnloop", functools.partial(pass_by_fnloop, kind)
    yield "fit of one batch: by hand", one_update_by_hand(0)
    yield "fit of one batch: fnloop", fitted(number=1)
    yield "fit of one batch, two to evaluate: by hand", one_update_by_hand(2)
    yield "fit of one batch, two to evaluate: fnloop", fitted(number=1, valid=2)
    yield "30 fits of 3 batches: by hand", many_fits_by_hand
    yield "30 fits of 3 batches: fnloop", many_fits
    yield "evaluate 200 batches: by hand", evaluation_by_hand
    yield "evaluate 200 batches: fnloop", evaluation
    yield "predict 200 batches: by hand", prediction_by_hand
    yield "predict 200 batches: fnloop", prediction
    yield "predict 200 batches with a smaller model: by hand", small_prediction_by_hand
    yield "predict 200 batches with a smaller model: fnloop", small_prediction
    yield "snapshot: by hand", snapshot_by_hand
    yield "snapshot: fnloop", snapshot
    yield "save: by hand", save_by_hand
    yield "save: fnloop", saving
    yield "restore: by hand", restore_by_hand
    yield "restore: fnloop", restoring
    yield "save of 270 MB: by hand", lambda: save_by_hand(LARGE)
    yield "save of 270 MB: fnloop", lambda: saving(LARGE)
    yield "restore of 270 MB: by hand", lambda: restore_by_hand(LARGE)
    yield "restore of 270 MB: fnloop", lambda: restoring(LARGE)
    yield "import: by hand", importing("import attr, toolz, safetensors.torch")
    yield "import: fnloop", importing("import fnloop")


CONTENDERS = dict(contenders())

if __name__ == "__main__":
    apart.main(CONTENDERS)
