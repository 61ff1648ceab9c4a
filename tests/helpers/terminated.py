"""A script that runs a job with workers, sends SIGTERM twice to all of its processes, and reports.

Schedulers signal a job repeatedly. The first signal stops the run, the second kills the workers.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import fnloop as fl
from fnloop.testing import toy, toy_loss


class SlowOnes(Dataset):
    """Ones, each of which takes some seconds to load."""

    def __init__(self, n, seconds):
        self.n, self.seconds = n, seconds

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.ones(())


class SlowToFlush:
    """A hook that tells when to signal the run, and is so slow to flush that workers die."""

    def __init__(self, pipe, moment):
        self.pipe, self.moment = pipe, moment

    def __call__(self, state):
        if self.moment == "training" and state.step == 2:
            os.write(self.pipe, b".")
        return state

    def flush(self, state):
        for _ in range(100):
            time.sleep(0.001)
        return state


def train(folder, moment, pipe):
    """Train until a signal arrives, and return how far it came and what was saved."""

    def loss_fn(model, batch):
        if moment == "evaluation" and not model.training:
            os.write(pipe, b".")
        return toy_loss(model, batch)

    samples = 2000 if moment == "training" else 20  # the first epoch must outlast the signals
    loaders = {
        name: DataLoader(SlowOnes(n, 0.002), 2, num_workers=2)
        for name, n in (("train", samples), ("valid", 20_000))
    }
    hooks = (SlowToFlush(pipe, moment), fl.every(epochs=1)(fl.checkpoint(folder)))
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, epochs=1000, hooks=hooks)
    saved = fl.resume(folder, toy())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return {"stop": state.stop, "step": state.step, "saved": saved.step, "epoch": saved.epoch}


def attempt(folder, moment, between=0.005):
    """Train in a separate session, signal all of its processes twice, and return how it ended."""
    ready, pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            hung = os.open(Path(folder, "error"), os.O_CREAT | os.O_WRONLY)
            faulthandler.dump_traceback_later(60, exit=True, file=hung)  # rather than wait forever
            Path(folder, "result").write_text(json.dumps(train(Path(folder, "runs"), moment, pipe)))
        except BaseException:
            Path(folder, "error").write_text(traceback.format_exc())
        finally:
            os._exit(0)
    os.read(ready, 1)
    for _ in range(2):
        os.killpg(pid, signal.SIGTERM)
        time.sleep(between)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = {path.name: path.read_text() for path in Path(folder).iterdir() if path.is_file()}
    return {
        "status": status,
        "error": found.get("error", ""),
        **json.loads(found.get("result", "{}")),
    }


if __name__ == "__main__":
    folder, moment, attempts = sys.argv[1:]
    torch.set_num_threads(1)
    for n in range(int(attempts)):
        Path(folder, str(n)).mkdir()
        print(json.dumps(attempt(Path(folder, str(n)), moment)), flush=True)
