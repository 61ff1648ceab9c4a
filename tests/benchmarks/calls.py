"""How many functions of fnloop an update and a boundary call, and in how many files.

    python tests/benchmarks/calls.py            # the counts, and those of each room
    python tests/benchmarks/calls.py --list     # and each call, in order

Three stretches of a run are traced with ``sys.setprofile``: a plain update, an update of
``accumulate(4)`` and ``clip(1.0)``, and the boundary at the end of an epoch at which an evaluation
of two batches, a checkpoint and ``early_stop`` are due. Only Python functions of the package count,
not those of torch, of the standard library or of the user. Each start of a generator counts, and
each time that it continues too. All of it is the work of one process, on the CPU.

Counts before the house was rebuilt: 42 calls in 17 files, 119 in 23, 539 in 58.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import fnloop as fl

ROOT = str(Path(fl.__file__).parent)


class Trace:
    """The calls of functions of the package while it is on: (file, function)."""

    def __init__(self):
        self.calls, self.on = [], False

    def __call__(self, frame, event, arg):
        if self.on and event == "call" and frame.f_code.co_filename.startswith(ROOT):
            file = frame.f_code.co_filename[len(ROOT) + 1 :]
            self.calls.append((file, frame.f_code.co_qualname))


def loss_fn(model, batch):
    return (model(batch) - 1).square().mean()


def trained(pipeline, batches, start, stop, **settings):
    """Return the trace between two calls of the loss function or of a hook, counted from 1.

    Args:
        pipeline: the pipeline.
        batches: batches of an epoch.
        start: the call with which the trace begins.
        stop: the call with which it ends.
        settings: those of ``fit``.
    """
    trace, count = Trace(), 0

    def counted(model, batch):
        nonlocal count
        count += model.training
        trace.on = start <= count < stop
        return loss_fn(model, batch)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters()), seed=0)
    data = [torch.randn(8, 4) for _ in range(batches)]
    sys.setprofile(trace)
    try:
        fl.fit(pipeline(counted), state, (data, data[:2]), **{"hooks": (), **settings})
    finally:
        sys.setprofile(None)
    return trace.calls


def stretches():
    """Yield each stretch: its name, its calls, and what the issue wants at most."""
    no_valid = {"evaluate_every": None, "epochs": 2}
    yield "a plain update", trained(fl.pipeline(), 12, 6, 7, **no_valid), (25, 8)
    pipeline = fl.pipeline(fl.accumulate(4), fl.clip(1.0))
    yield "accumulate(4) and clip(1.0)", trained(pipeline, 12, 5, 9, **no_valid), (75, 10)
    with tempfile.TemporaryDirectory() as folder:
        hooks = (fl.checkpoint(folder), fl.early_stop("valid/loss", patience=9))
        at_end = trained(fl.pipeline(), 4, 8, 9, epochs=3, hooks=hooks)
    plain = Counter(trained(fl.pipeline(), 12, 6, 7, **no_valid))
    rest = []
    for call in at_end:  # without those of the update
        if plain[call] > 0:
            plain[call] -= 1
        else:
            rest.append(call)
    yield "the boundary of an epoch", rest, (300, 22)


if __name__ == "__main__":
    for name, calls, (most, files) in stretches():
        found = len({file for file, _ in calls})
        print(f"{name:<28} {len(calls):>4} calls (aim {most})  {found:>3} files (aim {files})")
        rooms = Counter(file.partition("/")[0] for file, _ in calls).most_common()
        print("    " + ", ".join(f"{room} {count}" for room, count in rooms))
        if "--list" in sys.argv:
            for file, function in calls:
                print(f"    {file:<32} {function}")
