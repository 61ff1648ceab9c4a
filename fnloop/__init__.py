"""A training loop for PyTorch that is a functional pipeline of composable step transforms.

    step = pipeline(accumulate(4), clip(1.0))(loss_fn)
    state = TrainState.create(model, optimizer)
    state = fit(step, state, {"train": train, "valid": valid}, epochs=8)
    state.history["valid/loss"]

`fit` calls the *step* on one batch after another. The step is a loss function wrapped in
*middleware*. What is carried from batch to batch is one immutable record, the *state*. *Hooks*
are functions of the state, called between updates.

# State and steps

- `TrainState`, `RunInfo`: what a run depends on, and how long it is.
- `snapshot`, `fork`, `unwrap`: a copy of a state; several, with other rates; your own module.
- `freeze`, `unfreeze`, `layers`: which parameters are trained, and in which groups; by number.
- `pipeline`, `supervised`, `Output`: make a step from a loss function; what a step returns.
- `alternate`: whole steps in turn, each with an optimizer of its own, such as those of a GAN.
- `raw`: a step of a function of yours that does its own backward and updates.
- `StaleStateError`: raised for a state that has been advanced.

A loss function takes the module and a batch, and returns the mean loss, or `(loss, aux)`. `aux`
goes to the metrics. If the loss is not the mean over the leading dimension of the batch,
`aux["weight"]` says how many items it is the mean of (a token count on the device, for example).
Losses, gradients and metrics are averaged by this weight.

- `skip`: what it returns for a batch that is to be left out.

A state owns its module, its optimizers and its tensors, which a step updates in place. All else in
it is a value.

Several optimizers are given by name, `TrainState.create(model, {"matrices": muon, "rest": adamw})`.
Each parameter that is not frozen is in one of them. A step updates with all of them, in that order:
`clip` is over all parameters, and an overflow in one skips all. `schedule(fn, only=("rest",))` acts
on those named. Their rates are "train/lr/matrices" and "train/lr/rest" in records. A parameter
group with a name of its own, `{"params": ..., "name": "head"}`, has "train/lr/head".
`state.optimizer["rest"]` is one of them, and `state.updates` counts the updates of each.

`alternate({"d": step_d, "g": step_g}, order=("d",) * 5 + ("g",))` updates with one of them at a
time, each with the loss function, the middleware and the metrics of its own step: "train/d/loss".
Meanwhile only the parameters of that optimizer need gradients. `state.step` counts rounds. An
evaluation runs without gradients; a loss function that needs them there, such as that of a gradient
penalty, switches them on: `with torch.enable_grad():`.

# Middleware and rings

- `accumulate`, `microbatch`, `retry_on_oom`: windows of batches, and pieces of them.
- `clip`, `clip_value`, `clip_adaptive`, `grad_norm`: gradients.
- `amp`, `compiled`, `channels_last`, `cuda_graph`, `CaptureError`: precision and speed.
- `schedule`, `torch_scheduler`, `plateau`: learning rates.
- `skip_nonfinite`, `spike_guard`, `decide`: leave bad updates out, by guards of yours too.
- `sam`, `closure`: the gradient of the worst weights nearby; `optimizer.step(closure)`.
- `tbptt`: sequences in windows, with a state that is carried from one to the next.
- `ema`, `swa`, `averaged`, `update_batchnorm`: averages of the weights.
- `metric`, `derive`: numbers beside the loss; numbers that follow from those of a report.
- `timings`, `throughput`, `device_memory`: how long a run takes, and how much memory.
- `middleware`, `Middleware`: write your own.

| ring | wraps | sees |
|---|---|---|
| `forward` | the loss function, in training and evaluation | the batch; then loss, aux, metrics |
| `evaluation` | the forward ring, in evaluation only | the same |
| `loss` | the forward ring, in training only | the scalar that backward starts from |
| `gradient` | backward | gradients, in `.grad` |
| `update` | the optimizer's step | the new parameters |
| `device` | all of the above | only device work, no host values |
| `step` | everything | counters, the host |

Within a ring the listed order is kept, and the first is innermost. A pipeline has a repr that is
the code you typed; it can be compared and pickled. A middleware keeps what it needs in
`state.slots[name]`, never in a closure. `Output.skip` leaves an update out: it counts in
`state.skipped`, and no other counter changes.

# Metrics

- `Mean`, `Sum`, `Min`, `Max`, `Last`: each is made for a batch, combined over batches and
  processes, and computed once.
- `from_torchmetrics`: a metric of torchmetrics, or a collection of them.
- `History`, `Record`, `compare`: what a run has measured; several runs in one figure.
- `Phase`: a stretch of a run, with targets of its own: `fit(..., phase="head")`.

The name of a metric tells whether lower is better ("loss", "error") or higher ("acc", "f1", "auc",
"precision", "recall"). For any other name, pass `mode="min"` or `mode="max"`. A name such as
"val/loss" is refused before the first update if no loader is named "val".

# Runs

- `fit`, `run`: train up to a target. `run` yields the state after each epoch.
- `evaluate`, `predict`: leave the state unchanged.
- `data`: `fnloop.data.tune(step, state, loader)` says what would be faster, and what to write.
- `dry_run`, `summary`, `find_lr`, `find_batch_size`: try a run first; they leave it unchanged too.

Targets are absolute: `fit(..., epochs=5)` after `epochs=2` trains three more epochs, and
re-running a cell is harmless.

A record is appended at each end of an epoch and at each evaluation. A run that ends between two
records appends a *closing* record, with an evaluation, unless Ctrl-C or a signal ended it. If the
run continues, the closing record stays where it is, and hooks such as `early_stop` ignore it.

The order of a shuffled map-style DataLoader, the augmentation in its dataset and torch's random
draws are a function of (seed, epoch, position). They do not depend on the number of workers, on
evaluation, or on where a run was resumed. Random draws of the loss function from Python's and
NumPy's generators are restored too, provided the run does not switch between zero and more
workers. The global random state is restored after a run. It is shared by threads, so a second
`fit`, `run`, `evaluate` or `predict` in another thread is refused.

A loader with `state_dict` and `load_state_dict` (torchdata's `StatefulDataLoader`), or such a
dataset in a `DataLoader` without workers (Hugging Face's), continues in mid-epoch where it was, and
reads nothing again. A function of two arguments is called with `(epoch, batch)`, where to begin.
Any other stream is read again up to there.

The next window of batches is fetched, and copied to the device, while the step runs. `prefetch=n`
fetches n windows. A `TensorDataset`, an array, or a subset of one, is read a batch at a time.

Ctrl-C stops `fit` after the current update and returns the state. An exception keeps its type,
has a note that says where it happened (`while in clip(1.0), train, epoch 2, batch 37, step 812`),
and carries the last consistent state as `.state`. If an evaluation failed, a run that continues
from this state repeats the evaluation. If `optimizer.step()` failed, the weights are between two
updates: the exception has no `.state`, and the states of the model are stale. Notebooks and
pytest show your frames of the traceback, and not those of fnloop (`%xmode Plain` shows all).

# Hooks

- `every`, `when`, `at_start`, `at_end`: moments, which say when a hook runs, when to evaluate and
  when to make a record: `every(epochs=2) | at_end()`, `a & b`, `~a`.
- `when_improved`, `once`, `on_main`: at which values, how often and where a hook runs.
- `progress`, `live_plot`, `profiled`: show a run, and where its time goes.
- `inspect`: look at the outputs of an evaluation.
- `early_stop`, `halt_on_nonfinite`, `time_limit`, `requeue`: stop it; give its job back to SLURM.
- `restore_best`: end it with its best weights.
- `track`, `to_csv`, `to_jsonl`: send its records elsewhere.

A hook stops a run by `attrs.evolve(state, stop="why")`, and ends an epoch by `ends="epoch"`: list
such a hook before `checkpoint`. It may have these attributes: `monitors =
"valid/loss"`, the metric it reads; `reports = ("mine/loss",)`, the metrics it adds to records;
and the methods `begin(state) -> state`, called before the first update of a run, which starts
with the state that it returns; `failed(state, error)`, called when an exception ends it; and
`evaluating(state, loader, done, total)`, called before the first batch of an evaluation and after
each.

# Checkpoints

- `checkpoint`, `save`: save as a hook, or by hand.
- `resume`, `restore`, `latest`, `best`: read what was saved.
- `CheckpointError`: raised for a checkpoint that is damaged or does not match.

A resumed run continues with the next batch, and its result is bit for bit what it would have been
without the interruption: shuffling, workers, dropout, augmentation, fp16, schedules and running
metrics included. You may change the batch size or the number of workers: exactly the remaining
samples are trained.

A checkpoint is a folder: `model.safetensors`, `optimizer.safetensors` (by parameter name),
`slots.safetensors`, `state.json`, and a manifest with checksums. An average of the weights has its
own file, such as `ema.safetensors`, which loads into the plain module as `model.safetensors` does.
With a schedule-free optimizer, `model.safetensors` has the weights that an evaluation uses, and
`training.safetensors` those to train with.
Of a sharded model, each process has its own files (see Processes).
There is no pickle in a checkpoint, so loading one cannot execute code. It holds the module's state,
which parameters are frozen and which submodules are in evaluation mode, the optimizer (several by
their names), slots, running metrics, history, counters and generators, and `state.extra`, for your
own plain data. A slot may be plain data, tensors, an attrs record, or an object with a
`state_dict`. The records of a long history are written once, in the folder `.records` beside the
checkpoints.

`save(..., only=("model",))` and `checkpoint(..., only=...)` save parts: the model for evaluation
and fine-tuning, or "trained", the parameters that require gradients, such as adapters. `latest`,
`best` and `restore(..., only=...)` read such partial checkpoints. `resume` takes whole ones only.

A checkpoint is written to a temporary folder, flushed, and renamed. So at any moment the newest
one is complete. `latest` and `resume` take the most recent one, and skip damaged ones with a
warning. If all are damaged, `resume` raises. A disk that cannot be read is an error, and does not
count as damage. A folder of checkpoints and a table belong to one run (`state.run_id`; for a
table `a.csv` it is stored in `.a.csv.run`). A second run without `resume` is refused before its
first update, and no file is changed. `save` replaces a checkpoint only; it refuses a folder with
other files.

SIGTERM ends `fit` after the current update (`state.stop == "SIGTERM"`), and the state is saved.
An evaluation is abandoned, and a resumed run makes it. So a grace period has to be longer than an
update and a save. SIGUSR1 saves, and the run continues; with the hook `requeue`, it saves, gives
the SLURM job back to its queue, and ends the run. `time_limit(per="job")` ends a run before SLURM
does.

Before the first update of a run that keeps checkpoints, fnloop saves, restores and updates a tiny
copy of an optimizer that is not torch's. An optimizer that does not resume exactly is refused by
name. Where that cannot be tried, a warning says so.

# Processes

- `gather`, `reduce`, `broadcast`: combine nested lists, tuples and mappings; every process has to
  call them.
- `sharded`: marks a loader that gives each process its own part.

Start the same script with `torchrun --nproc-per-node 8 train.py`, on each of two machines with
`torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29500 train.py`,
or with `accelerate launch train.py`, which uses what `accelerate config` says. N processes with
batch size b train as one process with batch size N·b. With `accumulate(total=64)` an update has 64
samples of all processes together, whatever N is, so schedules and records do not depend on it.

*Data.* The batches of a loader are distributed round-robin. No sample is repeated or left out,
and sizes need not divide. Loaders stay plain: no `DistributedSampler`, no `prepare`. Where
processes have unequal numbers of batches, one without a batch takes no part in the last update,
unless the loss function exchanges data: then it is given a batch again, which a warning says;
`fl.data.even(loader)` leaves such rounds out. If each process already reads its own part of a
stream, wrap it in `sharded(loader)`; such a run can be resumed mid-epoch only on the same number of
processes. Under a mesh of your own whose processes share one sequence (context parallelism), the
data are split all the same: give every process the same stream, by `sharded(loader)`.

*The same data.* Every other loader must give the same batches in the same order in each process,
also one with a custom sampler. Some numbers of the first batch are compared before the first update
of an epoch and after an evaluation (of a `DataLoader` with indices, one sample), the order of
indices at the end of each epoch and evaluation, and the norms of the weights at the end of each
epoch and before each save. If they differ, the run fails with an explanation, and nothing is saved;
where a loader draws from generators that fnloop does not seed, so that no process would read the
same batch again, it is only a warning.

*Model.* `state.model` is your module, not a wrapper. `TrainState.create` compares the names, shapes
and dtypes of its parameters and buffers, and raises in every process if they differ.
DistributedDataParallel averages the gradients once per update, while backward runs. Buffers such as
BatchNorm statistics are taken from the main process; if that matters, use
`nn.SyncBatchNorm.convert_sync_batchnorm(model)`. A parameter that no process uses has no gradient,
as in one process. If the first update used it and a later one does not, its gradient is zero, and a
warning says how to change that.

*Numbers.* In a step, `out.loss`, `out.weight` and `state.metrics` are those of this process.
Random numbers drawn after backward are the same in all processes; those of the loss function
(dropout) differ. Metrics of the loss function and the forward ring are combined; metrics that a
middleware reports after gradients were averaged (`grad_norm`) count once. `state.backend` has
`rank`, `world_size`, `device`, and `main`: whether this is the main process.

*The same bits.* With `TrainState.create(..., exact=True)`, a run comes to the same bits on any
number of processes, if an update takes as many batches in all: `accumulate(8)` on one process,
`accumulate(4)` on two. Each batch has a backward of its own, and gradients, losses, weights and
metrics are summed in a tree that depends on the number of batches alone, uneven last windows
included. Draws are a function of the seed and of the position of the batch. A run that is saved on
N processes continues on M with the same bits. It cannot hold on other hardware, with another number
of threads (set `OMP_NUM_THREADS`; torchrun sets 1), or with other versions of libraries; nor if the
loss function gives other bits when it is called again (on GPUs, see
`torch.use_deterministic_algorithms`), or if a hook draws from the generators of Python or NumPy.
Gradients are exchanged after backward, not during it. 1, 2, 4, 8, ... processes exchange as much as
without; another number exchanges the gradients of each batch, and holds them. Metrics that are not
of fnloop's own kinds are exchanged on the host in each update. `state.metrics` are those of all
processes. Refused are layers with running statistics, sharded models, sparse gradients, loss
functions that exchange something, `sharded`, `alternate`, `raw`, `tbptt`, `cuda_graph`,
`retry_on_oom` and `closure(create_graph=True)`.

*Hooks.* All processes must decide alike: by the history, by counters, by `every(seconds=...)`,
whose clock is shared, or by `reduce(state.metrics)`. If processes diverge, also before the first
update, the run fails within a minute, and the error names the process, the call it waits in, and
the step. If one waits for the others for more than 30 seconds, it says where. A SIGTERM or SIGUSR1
to one process is obeyed by all, after the same update. Loader workers survive a SIGTERM that is
sent to all processes of a job. When a process fails or is killed, all others end within seconds,
and its traceback is on stderr.

*Restarts.* Under `torchrun --max-restarts 3`, a script with `resume` ends bit for bit as if it
had not been killed, if fnloop joins the processes. If something else does (`fully_shard` before
`TrainState.create`, or your own `Accelerator`), torch 2.13 reads addresses of dead processes.
Start such a script with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone
--max-restarts 3 ...`. A run saved on N processes can be resumed on M, mid-epoch too, if all
processes can read the folder.

*Several machines.* All of them need one shared folder for checkpoints. `resume` and `restore` raise
if a machine does not see the checkpoint that another sees, and a run that keeps checkpoints warns
when it begins. Gloo listens at the address of a machine's name. Where that is a loopback address,
`GLOO_SOCKET_IFNAME` is set to the interface that reaches the first machine, unless you set it. If
machines do not know each other by name, give torchrun `--local-addr` with the address of each, and
`--rdzv-conf is_host=1` on that of the endpoint, `is_host=0` on the others.

*Elastic jobs.* Start each machine with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:3
--max-restarts 10 --rdzv-backend c10d --rdzv-endpoint host0:29500 train.py`. When one fails or
joins, a script with `resume` and `accumulate(total=64)` continues from its last checkpoint, with
the same updates on as many as there are. Without that variable, a machine that joins torch 2.13
later waits for ever, before it runs the script. The machine of the endpoint has to stay; or hold
`torch.distributed.TCPStore(host, 29500, is_master=True, wait_for_workers=False)` somewhere else,
with `--rdzv-conf is_host=0`. When a machine joins, torchrun ends the processes by SIGTERM. After
`fit`, write `if state.stop: sys.exit(state.stop)`, because torchrun takes a machine whose script
ends without an error for one that is done.

*Large models.* Call `fully_shard(model)` before you make the optimizer, or, on GPUs, choose FSDP
version 2 in `accelerate config`. `snapshot` cannot copy such a model. All processes write its
checkpoints, each its own part, to one folder on a disk that all share:
`model-00001-of-00004.safetensors` and so on, and `index.json`, which says for each tensor which
parts to concatenate along which dimension. Any number of processes reads them, into a sharded or
an unsharded model, and each reads only what it holds. For a plain `model.safetensors`, restore in
one process and save again. DeepSpeed, Megatron and FSDP 1 run backward and the update themselves,
so middleware cannot see gradients: fnloop raises an error and suggests `fully_shard`.

*Tensor parallelism.* On a mesh of two dimensions, call `parallelize_module(model, mesh["tensor"],
plan)`, then `fully_shard(model, mesh=mesh["data"])`. Processes of a row of the mesh have the same
batches and the same random draws, and count once in metrics, `gather` and `reduce`.
`state.backend.data_rank` and `data_size` are the share of the data and how many there are. Other
layouts are refused. Dropout of activations that are split between processes draws the same mask in
each part: use it where they are whole.

*Settings.* If `accelerate config` says bf16, it is used where the pipeline lists no `amp`; for
fp16, list `amp("fp16")`. Pass settings of DistributedDataParallel as `TrainState.create(...,
backend=Accelerator(kwargs_handlers=[...]))`.

*Tested* on every change: 1, 2 and 3 processes on the CPU of one machine (gloo),
DistributedDataParallel and `fully_shard`, restarts, elastic jobs, and two machines as network
namespaces. NCCL has been tested with one process on one GPU, and not with several.

# Schedules and data

- `fnloop.schedules`: cosine, linear, wsd and others; `fnloop.schedules.plot` draws them.
- `fnloop.data`: loaders made of loaders: `take`, `fixed`, `interleave`, `zip_cycle`, `even` and
  others.

# Debugging

- `fnloop.debug`: make an update of a run again, compare two runs, and check updates while they run.

# Testing

`fnloop.testing` has a toy problem, a spy step, a guard against host reads, and the laws of the
library as checks.
"""

__docformat__ = "google"

import typing as _typing
from importlib import import_module as _import_module

from fnloop import schedules
from fnloop._backend.collectives import broadcast, gather, reduce
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.restore import best, latest, restore, resume
from fnloop._checkpoint.save import save
from fnloop._core.averages import averaged
from fnloop._core.freeze import freeze, layers, unfreeze
from fnloop._core.history import History, Phase, Record, compare
from fnloop._core.metrics import Last, Max, Mean, Min, Sum, from_torchmetrics
from fnloop._core.runs import RunInfo
from fnloop._core.state import StaleStateError, TrainState, fork, snapshot, unwrap
from fnloop._core.types import Middleware, Output, middleware, skip
from fnloop._data.loaders import sharded
from fnloop._graphs.guards import CaptureError
from fnloop._hooks.hook import Hook, at_end, at_start, every, once, when, when_improved
from fnloop._hooks.keep import checkpoint, restore_best
from fnloop._hooks.progress import progress
from fnloop._hooks.stop import early_stop, halt_on_nonfinite, requeue, time_limit
from fnloop._loop.evaluate import evaluate, predict, update_batchnorm
from fnloop._loop.fit import fit, run
from fnloop._middleware.accumulate import accumulate, microbatch, retry_on_oom, tbptt
from fnloop._middleware.clip import clip, clip_adaptive, clip_value, closure, grad_norm, sam
from fnloop._middleware.compiled import compiled, cuda_graph
from fnloop._middleware.ema import ema, swa
from fnloop._middleware.guards import skip_nonfinite, spike_guard
from fnloop._middleware.metric import derive, device_memory, metric, throughput, timings
from fnloop._middleware.precision import amp, channels_last
from fnloop._middleware.schedule import plateau, schedule, torch_scheduler
from fnloop._step.alternate import alternate
from fnloop._step.forward import supervised
from fnloop._step.pipeline import pipeline, raw
from fnloop._step.update import decide
from fnloop._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from fnloop import data, debug
    from fnloop._hooks.look import inspect, live_plot, profiled
    from fnloop._hooks.send import on_main, to_csv, to_jsonl, track
    from fnloop._tools.dry_run import dry_run
    from fnloop._tools.find import find_batch_size, find_lr
    from fnloop._tools.summary import summary

# What a run may well do without is imported when it is first used.
_LATER = {
    "data": "fnloop.data", "debug": "fnloop.debug", "dry_run": "fnloop._tools.dry_run",
    "find_batch_size": "fnloop._tools.find", "find_lr": "fnloop._tools.find",
    "summary": "fnloop._tools.summary", "inspect": "fnloop._hooks.look",
    "live_plot": "fnloop._hooks.look", "profiled": "fnloop._hooks.look",
    "on_main": "fnloop._hooks.send", "to_csv": "fnloop._hooks.send",
    "to_jsonl": "fnloop._hooks.send", "track": "fnloop._hooks.send",
}  # fmt: skip

# fmt: off
__all__ = [
    "CaptureError", "CheckpointError", "History", "Hook", "Last", "Max", "Mean", "Middleware",
    "Min", "Output", "Phase", "Record", "RunInfo", "StaleStateError", "Sum", "TrainState",
    "accumulate", "alternate", "amp", "at_end", "at_start", "averaged", "best", "broadcast",
    "channels_last", "checkpoint", "clip", "clip_adaptive", "clip_value", "closure", "compare",
    "compiled", "cuda_graph", "data", "debug", "decide", "derive", "device_memory", "dry_run",
    "early_stop", "ema", "evaluate", "every", "find_batch_size", "find_lr", "fit", "fork",
    "freeze", "from_torchmetrics", "gather", "grad_norm", "halt_on_nonfinite", "inspect",
    "latest", "layers", "live_plot", "metric", "microbatch", "middleware", "on_main", "once",
    "pipeline", "plateau", "predict", "profiled", "progress", "raw", "reduce", "requeue",
    "restore", "restore_best", "resume", "retry_on_oom", "run", "sam", "save", "schedule",
    "schedules", "sharded", "skip", "skip_nonfinite", "snapshot", "spike_guard", "summary",
    "supervised", "swa", "tbptt", "throughput", "time_limit", "timings", "to_csv", "to_jsonl",
    "torch_scheduler", "track", "unfreeze", "unwrap", "update_batchnorm", "when",
    "when_improved",
]
# fmt: on


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(_LATER[name])
    found = module if _LATER[name] == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = found  # so that it is asked once
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
