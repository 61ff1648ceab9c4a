"""A training loop for PyTorch that is a functional pipeline of composable step transforms.

    step = pipeline(accumulate(4), clip(1.0))(loss_fn)
    state = fit(step, TrainState.create(model, optimizer), {"train": train, "valid": valid}, epochs=8)
    state.history["valid/loss"]

A run is a fold of a *step* over batches. The step is a loss function wrapped in *middleware*; what is carried from
batch to batch is one immutable record, the *state*; *hooks* are functions of the state, called between updates.
"""

from fnloop import schedules as schedules
from fnloop._backend.public import broadcast as broadcast
from fnloop._backend.public import gather as gather
from fnloop._backend.public import reduce as reduce
from fnloop._checkpoint.format import CheckpointError as CheckpointError
from fnloop._checkpoint.restore import restore as restore
from fnloop._checkpoint.save import save as save
from fnloop._checkpoint.select import best as best
from fnloop._checkpoint.select import latest as latest
from fnloop._checkpoint.select import resume as resume
from fnloop._core.history import History as History
from fnloop._core.history import Record as Record
from fnloop._core.metrics import Last as Last
from fnloop._core.metrics import Max as Max
from fnloop._core.metrics import Mean as Mean
from fnloop._core.metrics import Min as Min
from fnloop._core.metrics import Sum as Sum
from fnloop._core.state import RunInfo as RunInfo
from fnloop._core.state import StaleStateError as StaleStateError
from fnloop._core.state import TrainState as TrainState
from fnloop._core.state import snapshot as snapshot
from fnloop._core.state import unwrap as unwrap
from fnloop._core.torchmetrics import from_torchmetrics as from_torchmetrics
from fnloop._core.types import Middleware as Middleware
from fnloop._core.types import Output as Output
from fnloop._core.types import middleware as middleware
from fnloop._data.loaders import sharded as sharded
from fnloop._graphs.guards import CaptureError as CaptureError
from fnloop._hooks.checkpoint import checkpoint as checkpoint
from fnloop._hooks.early_stop import early_stop as early_stop
from fnloop._hooks.early_stop import halt_on_nonfinite as halt_on_nonfinite
from fnloop._hooks.live_plot import live_plot as live_plot
from fnloop._hooks.on_main import on_main as on_main
from fnloop._hooks.progress import progress as progress
from fnloop._hooks.table import to_csv as to_csv
from fnloop._hooks.table import to_jsonl as to_jsonl
from fnloop._hooks.track import track as track
from fnloop._hooks.triggers import every as every
from fnloop._hooks.triggers import once as once
from fnloop._hooks.triggers import when as when
from fnloop._loop.evaluate import evaluate as evaluate
from fnloop._loop.evaluate import predict as predict
from fnloop._loop.fit import fit as fit
from fnloop._loop.fit import run as run
from fnloop._middleware.accumulate import accumulate as accumulate
from fnloop._middleware.amp import amp as amp
from fnloop._middleware.clip import clip as clip
from fnloop._middleware.clip import clip_value as clip_value
from fnloop._middleware.compiled import compiled as compiled
from fnloop._middleware.cuda_graph import cuda_graph as cuda_graph
from fnloop._middleware.metric import metric as metric
from fnloop._middleware.schedule import schedule as schedule
from fnloop._middleware.schedule import torch_scheduler as torch_scheduler
from fnloop._step.pipeline import pipeline as pipeline
from fnloop._step.supervised import supervised as supervised

__all__ = [
    "CaptureError",
    "CheckpointError",
    "History",
    "Last",
    "Max",
    "Mean",
    "Middleware",
    "Min",
    "Output",
    "Record",
    "RunInfo",
    "StaleStateError",
    "Sum",
    "TrainState",
    "accumulate",
    "amp",
    "best",
    "broadcast",
    "checkpoint",
    "clip",
    "clip_value",
    "compiled",
    "cuda_graph",
    "early_stop",
    "evaluate",
    "every",
    "fit",
    "from_torchmetrics",
    "gather",
    "halt_on_nonfinite",
    "latest",
    "live_plot",
    "metric",
    "middleware",
    "on_main",
    "once",
    "pipeline",
    "predict",
    "progress",
    "reduce",
    "restore",
    "resume",
    "run",
    "save",
    "schedule",
    "schedules",
    "sharded",
    "snapshot",
    "supervised",
    "to_csv",
    "to_jsonl",
    "torch_scheduler",
    "track",
    "unwrap",
    "when",
]

__version__ = "0.1.0"


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
