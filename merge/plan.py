"""The plan of the merge: each new file, its docstring, and the files that it is made of, in order."""

PLAN = {
    "_display.checks": ("", ["checks"]),
    "_display.tables": (
        "Tables and reprs: as lines of text, as HTML, and in the signs that a console has.",
        ["tables", "html", "encoding"],
    ),
    "_display.figures": ("", ["plot"]),
    "_display.screen": (
        "The bottom line of a terminal, and the log of the library.",
        ["screen", "log"],
    ),
    "_backend.torch_compat": (
        "Every private or undocumented name of torch that fnloop uses.",
        ["torch_compat", "foreach"],
    ),
    "_backend.processes": (
        "Where a state lives: its device and its process, and how processes find each other.",
        ["launch", "rendezvous"],
    ),
    "_backend.containers": (
        "Nested batches: what a container is, copies to a device, and the memory of both.",
        ["containers", "transfer", "memory"],
    ),
    "_backend.fsdp": ("", ["fsdp"]),
    "_backend.collectives": (
        "What processes exchange besides gradients, and what each of them waits for.",
        ["collectives", "watchdog", "public", "join"],
    ),
    "_core.types": (
        "The vocabulary: losses, steps, outputs, metrics, and middleware, which transform steps.",
        ["types", "middleware", "call", "skip", "events"],
    ),
    "_core.state": (
        "The state of a run: one frozen record, which owns its model, and copies of it.",
        ["state", "ownership", "handles", "snapshot", "copies", "fork", "merge", "carry", "left_out",
         "run_length"],
    ),
    "_core.runs": (
        "What a run knows of itself: facts fixed at its start, where a stream is, why it stopped.",
        ["run_info", "stops", "position"],
    ),
    "_core.metrics": (
        "Metrics: made for a batch, combined over batches, windows and processes, computed once.",
        ["metrics", "running", "elapsed", "torchmetrics", "torchmetric_objects"],
    ),
    "_core.history": (
        "The history of a run: its records and phases, as a table and as curves.",
        ["history", "record", "phase", "monitor", "history_table", "history_numbers",
         "history_plot", "history_compare"],
    ),
    "_core.freeze": (
        "Freeze parts of a model, chosen by selectors, and train them again.",
        ["freeze", "frozen", "selectors"],
    ),
    "_core.averages": (
        "Averages of a model's weights, as values: copies, views, and states that hold them.",
        ["average", "averaged"],
    ),
    "_core.optimizers": ("", ["optimizers"]),
    "_core.rng": ("", ["rng"]),
    "_core.serialize": ("", ["serialize"]),
    "schedules": ("", ["schedules", "_schedule", "_shapes", "_combine", "_plot"]),
    "_data.loaders": (
        "Loaders: read and checked, and dealt to processes batch by batch.",
        ["loaders", "round_robin", "window"],
    ),
    "_data.map_style": (
        "Map-style loaders, read by their parts: whole batches at once, and samples by length.",
        ["map_style", "fetch", "bucketed"],
    ),
    "_data.iterable": (
        "Loaders that are not map-style, from a position, and the position as data.",
        ["iterable", "position"],
    ),
    "_data.composed": (
        "Loaders made of loaders: their parts, the samples of a batch, the size of an update.",
        ["composed", "parts", "indices", "total"],
    ),
    "_data.source": (
        "Sources: loaders as a function of (seed, epoch, position), fetched ahead of the step.",
        ["source", "prefetch"],
    ),
    "_step.pipeline": (
        "Composition: the rings of middleware around forward, backward and update.",
        ["pipeline", "raw", "composition", "layers", "first_reply", "slots", "chosen"],
    ),
    "_step.forward": (
        "The innermost step: call the loss function, check its reply and weigh the batch.",
        ["forward", "carry", "supervised"],
    ),
    "_step.update": (
        "One update from the loss to the weights: backward, the optimizers, and the report.",
        ["update", "backward", "host", "optimizer_modes", "rates", "reports"],
    ),
    "_step.guard": (
        "Updates that may not be made: guards, ways back, and batches in smaller pieces.",
        ["guard", "going_back", "pieces", "retry"],
    ),
    "_step.averages": ("", ["averaging"]),
    "_step.alternate": (
        "Whole steps in turn, each with an optimizer of its own, such as those of a GAN.",
        ["alternate", "turns"],
    ),
    "_step.engine": (
        "The gradient engine: which one a state has, and the engine of a single process.",
        ["engine", "local", "gradients", "weighted_sum", "gradient_sum", "evaluation"],
    ),
    "_step.engine_distributed": (
        "The gradient engine of several processes.",
        ["distributed", "distributed_window", "ddp", "sharded", "weight_agreement"],
    ),
    "_step.engine_exact": (
        "The gradient engine of a run that has the same bits on any number of processes.",
        ["exact", "exact_window", "tree", "rows", "parts"],
    ),
    "_graphs.capture": (
        "Capture whole updates as CUDA graphs, and replay them.",
        ["capture", "recorder", "batches", "capturable"],
    ),
    "_graphs.guards": (
        "What must not happen while an update is captured, and what must not change after.",
        ["guards", "host_reads", "watch"],
    ),
    "_checkpoint.format": (
        "The format of a checkpoint: its files, what they hold, and how tensors lie in them.",
        ["format", "shards", "slices", "shares", "host_copy"],
    ),
    "_checkpoint.files": (
        "Files that are complete or absent: checksums, power failures, locks, many machines.",
        ["files", "atomic_write", "shared_write", "disk", "history_blocks"],
    ),
    "_checkpoint.parts": (
        "The parts of a checkpoint, but for the optimizers.",
        ["parts", "model_load", "averages", "counters", "positions", "targets"],
    ),
    "_checkpoint.optimizer": (
        "Optimizers in checkpoints: saved, checked, and loaded, all of them or none.",
        ["optimizers", "optimizer", "optimizer_save", "optimizer_load", "optimizer_rollback",
         "optimizer_settings", "regroup", "compare"],
    ),
    "_checkpoint.trial": (
        "Try on a small copy of an optimizer whether it resumes bit for bit.",
        ["trial", "trial_copy"],
    ),
    "_checkpoint.save": ("", ["save"]),
    "_checkpoint.restore": (
        "Restore a state from a checkpoint, and find the checkpoint in a folder.",
        ["restore", "read", "templates", "select"],
    ),
    "_checkpoint.retention": (
        "Folders of checkpoints: which are the newest and the best, and which are removed.",
        ["retention", "listing", "shared"],
    ),
    "_middleware.accumulate": (
        "Updates of many batches, of one batch in pieces, and of windows of a sequence.",
        ["accumulate", "microbatch", "tbptt"],
    ),
    "_middleware.clip": (
        "Gradients that are changed before the optimizer sees them, or computed again for it.",
        ["clip", "clip_adaptive", "sam", "closure"],
    ),
    "_middleware.schedule": (
        "Numbers of the parameter groups as a function of time, or of a metric.",
        ["schedule", "torch_scheduler", "plateau"],
    ),
    "_middleware.precision": (
        "Mixed precision, and the order of images in memory.",
        ["amp", "channels_last"],
    ),
    "_middleware.metric": (
        "Numbers in reports: metrics, numbers that follow from others, times and memory.",
        ["metric", "derive", "times", "device_memory"],
    ),
    "_middleware.guards": (
        "Leave out updates that would do harm.",
        ["skip_nonfinite", "spike_guard"],
    ),
    "_middleware.ema": ("", ["ema"]),
    "_middleware.compiled": (
        "Faster updates: by torch.compile, and as one CUDA graph.",
        ["compiled", "cuda_graph"],
    ),
    "_hooks.hook": (
        "What a hook is, when it is called, and hooks that wrap others.",
        ["wrapper", "moments", "triggers", "when_improved"],
    ),
    "_hooks.stop": (
        "Hooks that stop a run: by a metric, a loss that is not finite, or time.",
        ["early_stop", "nonfinite", "time_limit", "requeue"],
    ),
    "_hooks.keep": (
        "Hooks that keep states: checkpoints on a disk, and the best weights.",
        ["checkpoint", "restore_best"],
    ),
    "_hooks.send": (
        "Hooks that send records somewhere: to a file, to trackers, from the main process only.",
        ["table", "track", "trackers", "on_main"],
    ),
    "_hooks.look": (
        "Hooks to look into a run: outputs, curves, profiles.",
        ["inspect", "live_plot", "profiled"],
    ),
    "_hooks.progress": (
        "Show the progress of a run: in a log, a terminal or a notebook.",
        ["progress", "progress_text", "progress_pace", "progress_terminal", "progress_notebook",
         "progress_log"],
    ),
    "_loop.fit": ("", ["fit"]),
    "_loop.beginning": (
        "What happens before the first update of a run, and the hints that are given then.",
        ["beginning", "hints"],
    ),
    "_loop.errors": ("", ["errors"]),
    "_loop.plan": (
        "The plan of a run: the arguments of ``fit``, checked; its phases and its hooks.",
        ["plan", "phases", "check_hooks"],
    ),
    "_loop.boundary": ("", ["boundary"]),
    "_loop.run": (
        "The loop. Top to bottom, this is what ``fit`` does: epochs, updates, boundaries.",
        ["epochs", "run", "report", "survival"],
    ),
    "_loop.peers": (
        "The other processes of a run, what they agree on, and the signals that each gets.",
        ["peers", "consensus", "interrupts"],
    ),
    "_loop.evaluate": (
        "Evaluation and prediction, and the statistics that an evaluation needs.",
        ["evaluate", "batchnorm"],
    ),
    "_tools.dry_run": (
        "A run on trial: two updates, one batch of each loader, each hook once, one save.",
        ["_loop.dry_run", "_loop.trials"],
    ),
    "_tools.find": (
        "Find a learning rate, and the largest batch that fits into memory.",
        ["_loop.find_lr", "_loop.find_batch_size"],
    ),
    "_tools.summary": ("", ["_loop.summary"]),
    "_tools.tune": (
        "What could make a run faster, and the time that each change saves.",
        ["_loop.tune", "_loop.changes"],
    ),
    "data._combine": (
        "Loaders made of loaders: in turn, together, shortened, or fixed.",
        ["_zip", "_interleave", "_take", "_leave_out", "_fixed"],
    ),
    "data._pad": ("", ["_pad"]),
    "debug._watch": (
        "What happens within an update: by module, by operator, by line of the user's code.",
        ["_watch", "_trace", "_bits", "_copies", "_lines", "_sources"],
    ),
    "debug._audit": (
        "Updates that are made twice, or in another way, to compare their bits.",
        ["_audit", "_audit_error", "_explain", "_references"],
    ),
    "debug._check_script": (
        "The laws of a run on the user's own step, state and loaders.",
        ["_check_script", "_check_accumulation"],
    ),
    "debug._diff": (
        "The first difference between two states, checkpoints, histories or runs.",
        ["_diff", "_difference"],
    ),
    "debug._replay": (
        "Make updates of a run again, and find the first at which two runs diverge.",
        ["_replay", "_bisect", "_update", "_recorder"],
    ),
    "testing._laws": (
        "The laws of the library as functions that raise an AssertionError.",
        ["_laws", "_compare", "_problems"],
    ),
    "testing._toys": (
        "Toys whose updates can be computed in the head, and a spy for the calls of a step.",
        ["_toys", "_spy"],
    ),
}

# Two files of one group that used the same private name for different things.
RENAMES = {
    ("_display.html", "_FAINT"): "_SOFT",
    ("_core.torchmetric_objects", "update_"): "update_object_",
    ("_step.update", "_Current"): "_Applying",
    ("_step.update", "_current"): "_applying",
    ("debug._watch", "_wide"): "_wide_dtype",
    ("debug._sources", "_PLAIN"): "_IMMUTABLE",
    ("_data.window", "END"): "NONE_LEFT",
    ("_core.history_compare", "_label"): "_run_label",
    ("_core.history_compare", "MOST_SHOWN"): "MOST_VALUES",
    ("_data.parts", "Item"): "PartItem",
    ("_step.raw", "_check_reply"): "_check_raw_reply",
    ("_step.parts", "combine"): "combine_parts",
    ("_step.tree", "Part"): "Node",
    ("_checkpoint.history_blocks", "BLOCK"): "IN_BLOCK",
    ("_middleware.accumulate", "_check"): "_check_accumulate",
    ("_middleware.microbatch", "_check"): "_check_pieces",
    ("_middleware.tbptt", "_check"): "_check_tbptt",
    ("_middleware.torch_scheduler", "_stretch"): "_stretch_of",
    ("_middleware.skip_nonfinite", "NAME"): "NONFINITE_NAME",
    ("_middleware.skip_nonfinite", "_examine"): "_examine_gradients",
    ("_middleware.skip_nonfinite", "_judge"): "_judge_gradients",
    ("_middleware.spike_guard", "NAME"): "SPIKE_NAME",
    ("_middleware.spike_guard", "_examine"): "_examine_loss",
    ("_middleware.spike_guard", "_judge"): "_judge_loss",
    ("_middleware.cuda_graph", "_check_members"): "_check_members_of_graph",
    ("_hooks.moments", "_Lifted"): "_LiftedMoment",
}
