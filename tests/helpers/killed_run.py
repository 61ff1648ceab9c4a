"""A helper process that forks a child for every run that is to be killed.

It has imported everything and read the images before it forks. So an attempt costs no seconds of
imports, and a kill meets training or saving.
"""

import functools
import hashlib
import importlib
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

import fnloop as fl
from fnloop.schedules import one_cycle
from fnloop.testing import stochastic


def train(run, background=False, pause=0.0, save_every=5, address=None, keep=3):
    """Train the small CNN, resuming if possible, and log the batch and the weights of every update.

    The folder ``run`` has the checkpoints, the log and the result; fsync takes ``pause`` s longer.
    The checkpoints may be at an address instead.
    """
    mnist, (images, held_out) = digits()
    seen = []

    def loss_fn(model, batch):
        pixels, labels = batch
        if model.training:
            seen[:] = len(labels), digest(pixels, labels)
        output = model(pixels)
        # Python's generator is carried through an epoch and across a restart
        jitter = 1 + 0.1 * random.random()
        return functional.cross_entropy(output, labels) * jitter, {"output": output}

    def write_line(text):
        os.write(log, f"{text} .\n".encode())  # a single write, which survives a kill

    def log_update(state):
        size, images = seen
        weights = digest(*state.model.state_dict().values())
        write_line(f"update {state.step} {state.epoch} {state.batch} {size} {images} {weights}")
        return state

    def log_saved(state):
        write_line(f"saved {state.step}")
        return state

    if pause:
        flush = os.fsync
        os.fsync = lambda file: (time.sleep(pause), flush(file))
    log = os.open(Path(run) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    (Path(run) / "pid").write_text(str(os.getpid()))
    folder = Path(run) / "checkpoints" if address is None else address
    state = fl.resume(folder, new_state(mnist))
    os.write(log, b"\n")  # a kill may have truncated the line before
    write_line(f"start {state.step}")

    loaders = {
        "train": DataLoader(images, batch_size=32, shuffle=True),
        "valid": DataLoader(held_out, batch_size=100),
    }
    accuracy = fl.metric(accuracy=mnist["accuracy"])
    step = fl.pipeline(accuracy, fl.clip(1.0), fl.schedule(one_cycle()))(loss_fn)
    saves = fl.every(steps=save_every)(fl.checkpoint(folder, keep, background=background))
    log_saves = fl.every(steps=save_every)(log_saved)
    state = fl.fit(step, state, loaders, epochs=2, hooks=(log_update, saves, log_saves))
    kept = facts(fl.resume(folder, new_state(mnist)))
    result = {**facts(state), "stop": state.stop, "kept": kept}
    (Path(run) / "result.json").write_text(json.dumps(result))


MNIST = Path(__file__).parents[2] / "examples" / "mnist.py"
UPDATES = 32  # of a run on the digits: 2 epochs of 16 batches, the last of 20 images


@functools.cache  # the helper reads them before it forks
def digits():
    """Return what examples/mnist.py defines, 500 images for training, and 200 for validation."""
    mnist = runpy.run_path(str(MNIST))
    images = zip(mnist["digits"](), (500, 200), strict=True)
    return mnist, [Subset(part, range(n)) for part, n in images]


def new_state(mnist):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mnist["small_cnn"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    return fl.TrainState.create(model, optimizer, seed=0)


def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def facts(state):
    """Return what two runs must agree on, bit for bit."""
    weights, optimizer = state.model.state_dict(), state.optimizer.state_dict()
    moments = [[*map(torch.as_tensor, kept.values())] for kept in optimizer["state"].values()]
    rows = [[r.epoch, r.step, {k: v.hex() for k, v in r.metrics.items()}] for r in state.history]
    return {
        "counters": [state.step, state.epoch, state.batch, state.samples, state.skipped],
        "model": [*weights, digest(*weights.values())],
        "optimizer": [digest(*tensors) for tensors in moments],
        "settings": repr(optimizer["param_groups"]),
        "history": rows,
    }


def train_toy(folder, die_at):
    """Train a toy and save it twice, keeping one; die before the n-th file operation."""
    problem, saves = stochastic(), fl.every(steps=4)(fl.checkpoint(folder, keep=1))
    die_before_operation(die_at, Path(folder).parent)
    toy_fit(problem, problem.state(), epochs=1, hooks=(saves,))


def replace_toy(path, die_at):
    """Replace a checkpoint by another; die before the n-th file operation."""
    problem = stochastic()
    state = toy_fit(problem, problem.state(), steps=2)
    die_before_operation(die_at, Path(path).parent)
    fl.save(state, path)


def die_before_operation(n, folder):
    """Kill this process before its n-th file operation in a folder. Return a count of them."""
    operations, count = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}, [0]

    def watch(event, arguments):
        if event in {"open", *operations} and str(folder) in str(arguments[0]):
            count[0] += 1
            if count[0] == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return count


def toy_fit(problem, state, **kwargs):
    step = fl.pipeline(fl.clip(1.0), fl.schedule(one_cycle()))(problem.loss_fn)
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    return fl.fit(step, state, loaders, **{"epochs": 2, "hooks": (), **kwargs})


def serve():
    """Fork a child for every request, signal it as requested, and report how it ended."""
    torch.set_num_threads(1)
    finish_imports(new_state(digits()[0]))
    if "AWS_ENDPOINT_URL" in os.environ:
        importlib.import_module("s3fs")
    for line in sys.stdin:
        request = json.loads(line)
        log = Path(request["arguments"].get("run", "")) / "log"
        offset = log.stat().st_size if log.is_file() else 0
        pid = os.fork()
        if pid == 0:
            run_child(request)
        print(json.dumps(signal_child(pid, log, offset, **request["signal"])), flush=True)


def finish_imports(state):
    """Apply an update with zero gradients: the first update imports for a second."""
    for p in state.model.parameters():
        p.grad = torch.zeros_like(p)  # no backward pass: a process must not fork after one
    state.optimizer.step()


def run_child(request):
    status = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1), os.dup2(errors, 2)
        warnings.simplefilter("error")
        globals()[request["what"]](**request["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def signal_child(pid, log, offset, number=None, after=0.0, updates=0):
    """Send a signal some seconds after a number of updates, and wait for the end of the child."""
    begun, due, logged = time.monotonic(), None, []
    while True:
        now = time.monotonic()
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return {"status": code, "seconds": now - begun, "logged": logged}
        if due is None and count_updates(log, offset) >= updates:
            due = now + after
        if number is not None and not logged and due is not None and now >= due:
            logged.append(count_updates(log, offset))
            os.kill(pid, number)
            logged.append(count_updates(log, offset))
        if now > begun + 120:
            os.kill(pid, signal.SIGKILL)  # it hangs
        time.sleep(0.001)


def count_updates(log, offset=0):
    return log.read_bytes()[offset:].count(b"update") if log.is_file() else 0


if __name__ == "__main__":
    serve()
