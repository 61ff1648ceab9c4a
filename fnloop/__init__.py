"""A training loop for PyTorch that is a functional pipeline of composable step transforms.

    state = fit(pipeline(accumulate(4), clip(1.0))(loss_fn), state, loaders, epochs=8)

The *step* is your loss function, wrapped in *middleware*. `fit` calls it on batch after batch. What
a run depends on is in one immutable record, the *state*. `evaluate` and `save` take it too, and so
do *hooks*, functions that are called between updates.

    >>> import torch
    >>> def loss_fn(model, batch):                   # plain PyTorch: the mean loss of a batch
    ...     return (model(batch) - 1.0).square().mean()
    >>> model = torch.nn.Linear(2, 1)
    >>> state = TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step = pipeline(accumulate(2), clip(1.0))(loss_fn)
    >>> state = fit(step, state, [torch.ones(8, 2)] * 100, epochs=2, hooks=())
    >>> state.step, state.history["train/loss"][-1] < 1e-6
    (100, True)

- **States**: `TrainState`, `RunInfo`, `StaleStateError`, `snapshot`, `fork`, `stack`, `unstack`,
  `unwrap`, `freeze`, `unfreeze`, `layers`
- **Steps**: `pipeline`, `supervised`, `skip`, `Output`, `alternate`, `raw`, `Step`, `LossFn`
- **Middleware**: `middleware`, `Middleware`, `decide`; of batches `accumulate`, `microbatch`,
  `retry_on_oom`, `tbptt`; of gradients `clip`, `clip_value`, `clip_adaptive`, `grad_norm`, `sam`,
  `closure`; of optimizers `using`; of rates `schedule`, `torch_scheduler`, `plateau`; of the loss
  `scheduled`; of speed `amp`, `compiled`, `channels_last`, `cuda_graph`, `CaptureError`; guards
  `skip_nonfinite`, `spike_guard`
- **Averages**: `ema`, `swa`, `averaged`, `update_batchnorm`; over processes `local_sgd`
- **Metrics**: `metric`, `derive`, `Mean`, `Sum`, `Min`, `Max`, `Last`, `from_torchmetrics`,
  `timings`, `throughput`, `device_memory`, `History`, `Record`, `Phase`, `compare`
- **Runs**: `fit`, `run`, `evaluate`, `evaluating`, `predict`, `dry_run`, `summary`, `find_lr`,
  `find_batch_size`, `search`
- **Hooks**: `Hook`; when `every`, `paced`, `when`, `at_start`, `at_end`, `when_improved`, `once`,
  `on_main`; look `progress`, `live_plot`, `inspect`, `measure`, `profiled`; send `track`, `to_csv`,
  `to_jsonl`; stop `early_stop`, `restore_best`, `halt_on_nonfinite`, `time_limit`, `requeue`
- **Checkpoints**: `checkpoint`, `save`, `resume`, `restore`, `latest`, `best`, `follow`,
  `CheckpointError`
- **Processes**: `gather`, `reduce`, `broadcast`, `sharded`
- **Modules**: `fnloop.schedules`, `fnloop.data`, `fnloop.debug`, `fnloop.testing`, `fnloop.extend`

`help(fnloop.clip)` describes a name. The folder `notebooks` has the guides.
"""

__docformat__ = "google"

import typing as _typing
from importlib import import_module as _import_module

from fnloop._backend.collectives import broadcast, gather, reduce
from fnloop._core.averages import averaged
from fnloop._core.history import History, Phase
from fnloop._core.metrics import Last, Max, Mean, Min, Sum
from fnloop._core.records import Record
from fnloop._core.runs import RunInfo
from fnloop._core.state import StaleStateError, TrainState, snapshot, unwrap
from fnloop._core.types import LossFn, Middleware, Output, Step, middleware, skip
from fnloop._core.view import evaluating
from fnloop._data.loaders import sharded
from fnloop._extensions.alternate import alternate
from fnloop._extensions.stacks.states import stack, unstack
from fnloop._hooks.hook import Hook, at_end, at_start, every, once, when, when_improved
from fnloop._loop.evaluate import evaluate, predict, update_batchnorm
from fnloop._loop.fit import fit, run
from fnloop._step.pipeline import pipeline
from fnloop._step.transaction import decide
from fnloop._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from fnloop import data, debug, schedules
    from fnloop._extensions.checkpoints.follow import follow
    from fnloop._extensions.checkpoints.format import CheckpointError
    from fnloop._extensions.checkpoints.restore import best, latest, restore, resume
    from fnloop._extensions.checkpoints.save import save
    from fnloop._extensions.freeze import freeze, layers, unfreeze
    from fnloop._extensions.graphs.guards import CaptureError
    from fnloop._extensions.histories.curves import compare
    from fnloop._extensions.hooks.keep import checkpoint, restore_best
    from fnloop._extensions.hooks.look import inspect, live_plot, measure, profiled
    from fnloop._extensions.hooks.pace import paced
    from fnloop._extensions.hooks.progress import progress
    from fnloop._extensions.hooks.send import on_main, to_csv, to_jsonl, track
    from fnloop._extensions.hooks.stop import early_stop, halt_on_nonfinite, requeue, time_limit
    from fnloop._extensions.middleware.accumulate import accumulate, microbatch, retry_on_oom, tbptt
    from fnloop._extensions.middleware.clip import (
        clip,
        clip_adaptive,
        clip_value,
        closure,
        grad_norm,
        sam,
    )
    from fnloop._extensions.middleware.compiled import compiled, cuda_graph
    from fnloop._extensions.middleware.ema import ema, swa
    from fnloop._extensions.middleware.guards import skip_nonfinite, spike_guard
    from fnloop._extensions.middleware.local_sgd import local_sgd
    from fnloop._extensions.middleware.metric import derive, metric
    from fnloop._extensions.middleware.precision import amp, channels_last
    from fnloop._extensions.middleware.schedule import plateau, schedule, scheduled, torch_scheduler
    from fnloop._extensions.middleware.times import device_memory, throughput, timings
    from fnloop._extensions.middleware.using import using
    from fnloop._extensions.raw import raw
    from fnloop._extensions.supervised import supervised
    from fnloop._extensions.tools.dry_run import dry_run
    from fnloop._extensions.tools.find import find_batch_size, find_lr
    from fnloop._extensions.tools.fork import fork
    from fnloop._extensions.tools.search import search
    from fnloop._extensions.tools.summary import summary
    from fnloop._extensions.torchmetrics import from_torchmetrics

# What not every run uses is imported when it is first used: names by their modules.
_LATER = {
    "": "data debug schedules",
    "._extensions.checkpoints.follow": "follow",
    "._extensions.checkpoints.format": "CheckpointError",
    "._extensions.checkpoints.restore": "best latest restore resume",
    "._extensions.checkpoints.save": "save",
    "._extensions.freeze": "freeze layers unfreeze",
    "._extensions.graphs.guards": "CaptureError",
    "._extensions.histories.curves": "compare",
    "._extensions.hooks.keep": "checkpoint restore_best",
    "._extensions.hooks.look": "inspect live_plot measure profiled",
    "._extensions.hooks.pace": "paced",
    "._extensions.hooks.progress": "progress",
    "._extensions.hooks.send": "on_main to_csv to_jsonl track",
    "._extensions.hooks.stop": "early_stop halt_on_nonfinite requeue time_limit",
    "._extensions.middleware.accumulate": "accumulate microbatch retry_on_oom tbptt",
    "._extensions.middleware.clip": "clip clip_adaptive clip_value closure grad_norm sam",
    "._extensions.middleware.compiled": "compiled cuda_graph",
    "._extensions.middleware.ema": "ema swa",
    "._extensions.middleware.using": "using",
    "._extensions.middleware.guards": "skip_nonfinite spike_guard",
    "._extensions.middleware.local_sgd": "local_sgd",
    "._extensions.middleware.metric": "derive metric",
    "._extensions.middleware.times": "device_memory throughput timings",
    "._extensions.middleware.precision": "amp channels_last",
    "._extensions.middleware.schedule": "plateau schedule scheduled torch_scheduler",
    "._extensions.raw": "raw",
    "._extensions.supervised": "supervised",
    "._extensions.tools.dry_run": "dry_run",
    "._extensions.tools.find": "find_batch_size find_lr",
    "._extensions.tools.fork": "fork",
    "._extensions.tools.search": "search",
    "._extensions.tools.summary": "summary",
    "._extensions.torchmetrics": "from_torchmetrics",
}
_MODULES = {name: module for module, names in _LATER.items() for name in names.split()}

# fmt: off
__all__ = [
    "CaptureError", "CheckpointError", "History", "Hook", "Last", "LossFn", "Max", "Mean",
    "Middleware", "Min", "Output", "Phase", "Record", "RunInfo", "StaleStateError", "Step", "Sum",
    "TrainState", "accumulate", "alternate", "amp", "at_end", "at_start", "averaged", "best",
    "broadcast", "channels_last", "checkpoint", "clip", "clip_adaptive", "clip_value", "closure",
    "compare", "compiled", "cuda_graph", "data", "debug", "decide", "derive", "device_memory",
    "dry_run", "early_stop", "ema", "evaluate", "evaluating", "every", "find_batch_size", "find_lr",
    "fit", "follow", "fork", "freeze", "from_torchmetrics", "gather", "grad_norm",
    "halt_on_nonfinite", "inspect", "latest", "layers", "live_plot", "local_sgd", "measure",
    "metric", "microbatch", "middleware", "on_main", "once", "paced", "pipeline", "plateau",
    "predict", "profiled", "progress", "raw", "reduce", "requeue", "restore", "restore_best",
    "resume", "retry_on_oom", "run", "sam", "save", "schedule", "scheduled", "schedules", "search",
    "sharded", "skip", "skip_nonfinite", "snapshot", "spike_guard", "stack", "summary",
    "supervised", "swa", "tbptt", "throughput", "time_limit", "timings", "to_csv", "to_jsonl",
    "torch_scheduler", "track", "unfreeze", "unstack", "unwrap", "update_batchnorm", "using",
    "when", "when_improved",
]
# fmt: on


if not _typing.TYPE_CHECKING:  # for type checkers, any name would be right

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if module := _MODULES[name]:
            found = getattr(_import_module(f"{__name__}{module}"), name)
        else:
            found = _import_module(f"{__name__}.{name}")
        globals()[name] = found  # so that it is asked once
        return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
