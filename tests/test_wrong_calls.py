"""Every argument of every public function is given 22 values, most of them wrong.

A call is right if the value is accepted on purpose (the table lists those), or if fnloop itself
raises, with a message that names the function or the argument. It is wrong if it ends in a message
of Python's or of torch's: if the frame that raised is not one of fnloop's, or the statement there
is not a ``raise``.

The table says for an argument which values are accepted on purpose. An argument that is not in the
table is found by the signature of its function, and given the same values within the example of the
docstring, in the place of what the example gives. What is accepted then has to fit the annotation.

Not tried: errors of Python itself (a missing argument), records that only the library makes
(``Output``, ``RunInfo``, ``TrainState(...)`` itself), exceptions, what a step passes on in every
update (to ``decide``), and batches, whose form a loader and a loss function agree on.
"""

import contextlib
import dis
import doctest
import importlib.util
import inspect
import io
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from public_names import MODULES
from torch import nn

import fnloop as fl
from fnloop import data, schedules, testing
from fnloop.testing import toy, toy_loss

ROOT = str(Path(fl.__file__).parent)
ONE = torch.ones(1)


class Thing:
    """A class that no function expects."""


VALUES = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "''": lambda: "",
    "'x'": lambda: "x",
    "b'x'": lambda: b"x",
    "[]": list,
    "()": tuple,
    "{}": dict,
    "{1}": lambda: {1},
    "object": Thing,
    "class": lambda: Thing,
    "lambda": lambda: lambda a, b, c, d, e, f, g: None,
    "module": lambda: nn.Linear(1, 1),
    "tensor": lambda: torch.ones(2),
    "generator": lambda: (i for i in range(2)),
    "path": lambda: Path("no such folder/x"),
    "1j": lambda: 1j,
}

NUMBERS = "-1 0 1.5"
ANY = " ".join(VALUES)


class Entry(NamedTuple):
    """An argument: how to give it, the accepted values, and other words for it in messages."""

    call: object
    accepts: str = ""
    words: tuple[str, ...] = ()


def step():
    return fl.pipeline()(toy_loss)


def model_and(make):
    model = testing.Toy()
    return make(model, torch.optim.SGD(model.parameters(), lr=0.1))


def records(key="valid/loss"):
    return fl.History([fl.Record(1, 1, {key: 0.5})])


def run_entries(name, run):
    """Return the entries of ``fit`` or ``run``, which have the same arguments."""
    return {
        f"{name}(step)": Entry(lambda v: run(v, toy(), [ONE])),
        f"{name}(state)": Entry(lambda v: run(step(), v, [ONE]), "", ("fit",)),
        f"{name}(loaders)": Entry(
            lambda v: run(step(), toy(), v), "tensor", ("loader", "loss of toy_loss")
        ),
        f"{name}(loaders: train)": Entry(
            lambda v: run(step(), toy(), {"train": v}), "tensor", ("loader", "loss of toy_loss")
        ),
        f"{name}(loaders: valid)": Entry(
            lambda v: run(step(), toy(), {"train": [ONE], "valid": v}),
            "tensor",
            ("loader", "loss of toy_loss"),
        ),
        f"{name}(loaders: pair)": Entry(
            lambda v: run(step(), toy(), ([ONE], v)),
            "None",
            ("loader", "loss of toy_loss", "pair of"),
        ),
        f"{name}(epochs)": Entry(lambda v: run(step(), toy(), [ONE], epochs=v), "None 0"),
        f"{name}(steps)": Entry(lambda v: run(step(), toy(), [ONE], steps=v), "None 0"),
        f"{name}(hooks)": Entry(lambda v: run(step(), toy(), [ONE], hooks=v), "None [] ()"),
        f"{name}(hooks: one)": Entry(
            lambda v: run(step(), toy(), [ONE], hooks=(v,)), "", ("a hook",)
        ),
        f"{name}(evaluate_every)": Entry(
            lambda v: run(step(), toy(), [ONE], evaluate_every=v), "None {}"
        ),
        f"{name}(evaluate_every: one)": Entry(
            lambda v: run(step(), toy(), ([ONE], [ONE]), evaluate_every={"valid": v}), "None"
        ),
        f"{name}(record_every)": Entry(lambda v: run(step(), toy(), [ONE], record_every=v), "None"),
        f"{name}(prefetch)": Entry(lambda v: run(step(), toy(), [ONE], prefetch=v)),
    }


def fit(step, state, loaders, **kwargs):
    return fl.fit(step, state, loaders, **{"hooks": (), **kwargs})


def run(step, state, loaders, **kwargs):
    return list(fl.run(step, state, loaders, **{"hooks": (), **kwargs}))


def trials(name, function):
    """Return the entries of a function of a step, a state and a loader."""
    return {
        f"{name}(step)": Entry(lambda v: function(v, toy(), [ONE])),
        f"{name}(state)": Entry(lambda v: function(step(), v, [ONE])),
        f"{name}(loader)": Entry(
            lambda v: function(step(), toy(), v), "tensor", ("loader", "loss of toy_loss")
        ),
    }


STATE = {
    "TrainState.create(model)": Entry(
        lambda v: fl.TrainState.create(v, torch.optim.SGD([nn.Parameter(ONE)], lr=0.1)),
        "",
        ("optimizer",),
    ),
    "TrainState.create(optimizer)": Entry(lambda v: fl.TrainState.create(testing.Toy(), v)),
    "TrainState.create(optimizer: one)": Entry(
        lambda v: fl.TrainState.create(testing.Toy(), {"a": v}), "", ("optimizers",)
    ),
    "TrainState.create(optimizer: a name)": Entry(
        lambda v: model_and(lambda m, o: fl.TrainState.create(m, {v if v.__hash__ else 1: o})),
        "'x'",
        ("names of optimizers",),
    ),
    "TrainState.create(seed)": Entry(
        lambda v: model_and(lambda m, o: fl.TrainState.create(m, o, seed=v)), "None 0"
    ),
    "TrainState.create(backend)": Entry(
        lambda v: model_and(lambda m, o: fl.TrainState.create(m, o, backend=v)), "None"
    ),
    "snapshot(state)": Entry(fl.snapshot),
    "unwrap(state)": Entry(fl.unwrap),
    "layers(model)": Entry(fl.layers, "module"),
}

STEPS = {
    "pipeline(middleware)": Entry(fl.pipeline),
    "pipeline(loss_fn)": Entry(lambda v: fl.pipeline()(v), "", ("loss function",)),
    "step(state)": Entry(lambda v: step()(v, ONE)),
    "step(window)": Entry(
        lambda v: fl.pipeline(fl.accumulate(2))(toy_loss)(toy(), v), "", ("accumulate",)
    ),
    "step.evaluate(state)": Entry(lambda v: step().evaluate(v, ONE)),
    "supervised(criterion)": Entry(fl.supervised, "module"),
    "middleware(ring)": Entry(fl.middleware),
    "middleware(factory)": Entry(lambda v: fl.middleware("gradient")(v), "lambda"),
    "Middleware(name)": Entry(fl.Middleware, "'x'"),
    **{
        f"Middleware({ring})": Entry(lambda v, ring=ring: fl.Middleware("x", **{ring: v}), "None")
        for ring in ("forward", "loss", "gradient", "update", "device", "step")
    },
    "Middleware(init)": Entry(lambda v: fl.Middleware("x", init=v), "None"),
    "Middleware(window)": Entry(lambda v: fl.Middleware("x", window=v)),
    "Middleware(loss_fn)": Entry(lambda v: fl.Middleware("x", loss_fn=v), "None"),
    "Middleware(check)": Entry(lambda v: fl.Middleware("x", check=v), "None"),
    "Middleware(call)": Entry(lambda v: fl.Middleware("x", call=v), "None"),
}

MIDDLEWARE = {
    "accumulate(n)": Entry(fl.accumulate),
    "accumulate(total)": Entry(lambda v: fl.accumulate(total=v)),
    "grad_norm(norm_type)": Entry(fl.grad_norm, "1.5 inf"),
    "throughput(of)": Entry(fl.throughput),
    "throughput(flops)": Entry(lambda v: fl.throughput(flops=v, peak=1.0), "1.5"),
    "throughput(peak)": Entry(lambda v: fl.throughput(flops=1.0, peak=v), "1.5"),
    "clip(max_norm)": Entry(fl.clip, "1.5 inf"),
    "clip(norm_type)": Entry(lambda v: fl.clip(1.0, v), "1.5 inf"),
    "clip_value(limit)": Entry(fl.clip_value, "1.5 inf"),
    "amp(precision)": Entry(fl.amp, "None"),
    "amp(init_scale)": Entry(lambda v: fl.amp("fp16", init_scale=v), "1.5"),
    "amp(growth_interval)": Entry(lambda v: fl.amp("fp16", growth_interval=v)),
    "schedule(fn)": Entry(fl.schedule),
    "schedule(field)": Entry(lambda v: fl.schedule(schedules.cosine(), v), "'x'"),
    "schedule(only)": Entry(lambda v: fl.schedule(schedules.cosine(), only=v), "None 'x'"),
    "torch_scheduler(factory)": Entry(fl.torch_scheduler),
    "torch_scheduler(only)": Entry(
        lambda v: fl.torch_scheduler(lambda optimizer, run: None, only=v), "None 'x'"
    ),
    "ema(decay)": Entry(fl.ema, "0"),
    "ema(start)": Entry(lambda v: fl.ema(start=v), "0"),
    "ema(every)": Entry(lambda v: fl.ema(every=v)),
    "ema(evaluate)": Entry(lambda v: fl.ema(evaluate=v), "True"),
    "ema(name)": Entry(lambda v: fl.ema(name=v), "'x'"),
    "swa(start)": Entry(fl.swa, "0"),
    "swa(every)": Entry(lambda v: fl.swa(every=v)),
    "swa(evaluate)": Entry(lambda v: fl.swa(evaluate=v), "True"),
    "swa(name)": Entry(lambda v: fl.swa(name=v), "'x'"),
    "averaged(state)": Entry(fl.averaged),
    "averaged(name)": Entry(lambda v: fl.averaged(toy(), v)),
    "update_batchnorm(step)": Entry(lambda v: fl.update_batchnorm(v, toy(), [ONE])),
    "update_batchnorm(state)": Entry(lambda v: fl.update_batchnorm(step(), v, [ONE])),
    "update_batchnorm(loader)": Entry(
        lambda v: fl.update_batchnorm(step(), toy(), v), "[] () {1} tensor generator"
    ),
    "metric(function)": Entry(lambda v: fl.metric(accuracy=v), "", ("metric", "accuracy")),
    "metric(positional)": Entry(fl.metric, "", ("positional", "at least one")),
    "metric(on)": Entry(lambda v: fl.metric(a=lambda aux, batch: 0.0, on=v)),
    "metric(loaders)": Entry(lambda v: fl.metric(a=lambda aux, batch: 0.0, loaders=v), "None"),
    "derive(function)": Entry(lambda v: fl.derive(double=v), "", ("derive", "double")),
    "Middleware(evaluation)": Entry(lambda v: fl.Middleware("a", evaluation=v), "None"),
    "Middleware(report)": Entry(lambda v: fl.Middleware("a", report=v), "None"),
    "Middleware(loaders)": Entry(lambda v: fl.Middleware("a", loaders=v), "()"),
    "metric(name)": Entry(
        lambda v: fl.metric(**{v: lambda aux, batch: 0.0} if isinstance(v, str) else {"a": v}),
        "'x'",
    ),
    "compiled(mode)": Entry(lambda v: fl.compiled(mode=v), "None"),
    "compiled(options)": Entry(lambda v: fl.compiled(options=v), "None {}"),
    "compiled(dynamic)": Entry(lambda v: fl.compiled(dynamic=v), "None True"),
    "compiled(fullgraph)": Entry(lambda v: fl.compiled(fullgraph=v), "True"),
    "compiled(backend)": Entry(lambda v: fl.compiled(backend=v), "lambda module class"),
    "cuda_graph(warmup)": Entry(fl.cuda_graph),
    "cuda_graph(fallback)": Entry(lambda v: fl.cuda_graph(fallback=v), "True"),
    "cuda_graph(limit)": Entry(lambda v: fl.cuda_graph(limit=v)),
}

METRICS = {
    "Mean(total)": Entry(lambda v: fl.Mean(v, 1).compute(), "-1 0 1.5 nan inf True"),
    "Mean(weight)": Entry(lambda v: fl.Mean(1.0, v).compute(), "0 1.5 True", ("weights",)),
    "Mean.combine(other)": Entry(lambda v: fl.Mean(1.0, 1).combine(v)),
    **{
        f"{m.__name__}(value)": Entry(lambda v, m=m: m(v).compute(), "-1 0 1.5 nan inf True")
        for m in (fl.Sum, fl.Min, fl.Max, fl.Last)
    },
    **{
        f"{m.__name__}.combine(other)": Entry(lambda v, m=m: m(1.0).combine(v))
        for m in (fl.Sum, fl.Min, fl.Max, fl.Last)
    },
    "reduce(how)": Entry(lambda v: fl.reduce(1.0, v)),
    "reduce(tree)": Entry(fl.reduce, f"True {NUMBERS} nan inf [] () {{}} tensor"),
    "broadcast(source)": Entry(lambda v: fl.broadcast(1.0, v), "0"),
}

RUNS = {
    **run_entries("fit", fit),
    **run_entries("run", run),
    **trials("find_lr", fl.find_lr),
    "find_lr(low)": Entry(lambda v: fl.find_lr(step(), toy(), [ONE], low=v, updates=10), "1.5"),
    "find_lr(high)": Entry(lambda v: fl.find_lr(step(), toy(), [ONE], high=v, updates=10), "1.5"),
    "find_lr(updates)": Entry(lambda v: fl.find_lr(step(), toy(), [ONE], updates=v)),
    "dry_run(step)": Entry(lambda v: fl.dry_run(v, toy(), [ONE])),
    "dry_run(state)": Entry(lambda v: fl.dry_run(step(), v, [ONE]), "", ("fit",)),
    "dry_run(loaders)": Entry(
        lambda v: fl.dry_run(step(), toy(), v),
        "tensor [] () {1}",  # the last three are problems of the report
        ("loader", "loss of toy_loss"),
    ),
    "dry_run(hooks)": Entry(lambda v: fl.dry_run(step(), toy(), [ONE], v), "None [] ()"),
    "summary(state)": Entry(lambda v: fl.summary(v, ONE)),
    "summary(depth)": Entry(lambda v: fl.summary(toy(), ONE, depth=v)),
    "find_batch_size(step)": Entry(lambda v: fl.find_batch_size(v, toy(), lambda n: [ONE])),
    "find_batch_size(state)": Entry(lambda v: fl.find_batch_size(step(), v, lambda n: [ONE])),
    "find_batch_size(make_loader)": Entry(lambda v: fl.find_batch_size(step(), toy(), v)),
    "find_batch_size(most)": Entry(
        lambda v: fl.find_batch_size(step(), toy(), lambda n: [torch.ones(n)], most=v)
    ),
    "evaluate(step)": Entry(lambda v: fl.evaluate(v, toy(), [ONE])),
    "evaluate(state)": Entry(lambda v: fl.evaluate(step(), v, [ONE])),
    "evaluate(loader)": Entry(
        lambda v: fl.evaluate(step(), toy(), v), "tensor", ("how many items",)
    ),
    "predict(fn)": Entry(lambda v: list(fl.predict(v, toy(), [ONE]))),
    "predict(state)": Entry(lambda v: list(fl.predict(toy_loss, v, [ONE]))),
    "predict(loader)": Entry(
        lambda v: list(fl.predict(lambda m, b: 0, toy(), v)), "[] () {1} tensor generator"
    ),
    "predict(gather)": Entry(lambda v: list(fl.predict(toy_loss, toy(), [ONE], gather=v)), "True"),
    "sharded(loader)": Entry(fl.sharded, "[] () {1} tensor generator"),
}

HISTORY = {
    "Record(epoch)": Entry(lambda v: fl.Record(v, 1, {}), "0"),
    "Record(step)": Entry(lambda v: fl.Record(1, v, {}), "0"),
    "Record(metrics)": Entry(lambda v: fl.Record(1, 1, v), "{}"),
    "Record(metrics: a value)": Entry(
        lambda v: fl.Record(1, 1, {"loss": v}), f"{NUMBERS} nan inf True"
    ),
    "Record(seconds)": Entry(lambda v: fl.Record(1, 1, {}, v), "0 1.5"),
    "History(records)": Entry(fl.History, "[] ()"),
    "History.append(record)": Entry(lambda v: fl.History().append(v)),
    "History[key]": Entry(lambda v: records()[v], "-1 0", ("history",)),
    "History.latest(key)": Entry(lambda v: records().latest(v), "", ("history",)),
    "History.best(key)": Entry(lambda v: records().best(v), "", ("history",)),
    "History.best(mode)": Entry(lambda v: records().best("valid/loss", v), "None"),
    "History.plot(mode)": Entry(lambda v: records().plot(mode=v), "None {}"),
    "History.plot(x)": Entry(lambda v: records().plot(x=v)),
}

HOOKS = {
    **{
        f"every({name})": Entry(lambda v, name=name: fl.every(**{name: v}), accepts)
        for name, accepts in (("epochs", ""), ("steps", ""), ("seconds", "1.5"))
    },
    "inspect(fn)": Entry(fl.inspect),
    "inspect(loader)": Entry(lambda v: fl.inspect(lambda state, outputs: None, v), "'x'"),
    "inspect(every)": Entry(lambda v: fl.inspect(lambda state, outputs: None, every=v)),
    "every(hook)": Entry(lambda v: fl.every(steps=1)(v), "", ("hook",)),
    "at_start(hook)": Entry(lambda v: fl.at_start()(v), "", ("hook",)),
    "at_end(hook)": Entry(lambda v: fl.at_end()(v), "", ("hook",)),
    "every(or)": Entry(lambda v: fl.every(steps=1) | v, "", ("combines moments",)),
    "every(and)": Entry(lambda v: v & fl.every(steps=1), "", ("combines moments",)),
    "when(predicate)": Entry(fl.when),
    "when(hook)": Entry(lambda v: fl.when(lambda state: True)(v), "", ("hook",)),
    "once(hook)": Entry(fl.once),
    "once(name)": Entry(lambda v: fl.once(lambda state: state, v), "None 'x'"),
    "on_main(hook)": Entry(fl.on_main),
    "early_stop(key)": Entry(fl.early_stop),
    "early_stop(patience)": Entry(lambda v: fl.early_stop("valid/loss", v)),
    "early_stop(min_delta)": Entry(lambda v: fl.early_stop("valid/loss", min_delta=v), "0 1.5"),
    "early_stop(mode)": Entry(lambda v: fl.early_stop("valid/loss", mode=v), "None"),
    "early_stop(reference)": Entry(lambda v: fl.early_stop("valid/loss", reference=v)),
    "early_stop(stopping_threshold)": Entry(
        lambda v: fl.early_stop("valid/loss", stopping_threshold=v), f"None {NUMBERS} inf"
    ),
    "early_stop(divergence_threshold)": Entry(
        lambda v: fl.early_stop("valid/loss", divergence_threshold=v), f"None {NUMBERS} inf"
    ),
    "early_stop(min_epochs)": Entry(lambda v: fl.early_stop("valid/loss", min_epochs=v), "0"),
    "early_stop(min_steps)": Entry(lambda v: fl.early_stop("valid/loss", min_steps=v), "0"),
    "when_improved(key)": Entry(fl.when_improved),
    "when_improved(mode)": Entry(lambda v: fl.when_improved("valid/loss", v), "None"),
    "when_improved(hook)": Entry(lambda v: fl.when_improved("valid/loss")(v), "", ("hook",)),
    "restore_best(key)": Entry(fl.restore_best),
    "restore_best(mode)": Entry(lambda v: fl.restore_best("valid/loss", v), "None"),
    "halt_on_nonfinite(steps)": Entry(fl.halt_on_nonfinite),
    "halt_on_nonfinite(keep)": Entry(lambda v: fl.halt_on_nonfinite(keep=v), "True"),
    "progress(since)": Entry(lambda v: fl.progress(since=v)),
    "progress(refresh)": Entry(fl.progress, "1.5"),
    "progress(file)": Entry(lambda v: fl.progress(file=v), "None"),
    "live_plot(file)": Entry(fl.live_plot),
    "live_plot(mode)": Entry(lambda v: fl.live_plot("x.png", mode=v), "None {}"),
    "live_plot(x)": Entry(lambda v: fl.live_plot("x.png", x=v)),
    "live_plot(refresh)": Entry(lambda v: fl.live_plot("x.png", refresh=v), "0 1.5"),
    "track(tracker)": Entry(fl.track),
    "track(folder)": Entry(lambda v: fl.track("tensorboard", v), "'x' path"),
    "track(config)": Entry(lambda v: fl.track("tensorboard", "x", v), "None {}"),
    "track(project)": Entry(lambda v: fl.track("tensorboard", "x", project=v), "None 'x'"),
    "track(also)": Entry(lambda v: fl.track("tensorboard", "x", also=v), "None"),
    "to_csv(path)": Entry(fl.to_csv, "'x' path"),
    "to_jsonl(path)": Entry(fl.to_jsonl, "'x' path"),
}

CHECKPOINTS = {
    "checkpoint(folder)": Entry(fl.checkpoint, "'x' path"),
    "checkpoint(keep)": Entry(lambda v: fl.checkpoint("x", keep=v), "None"),
    "checkpoint(best)": Entry(lambda v: fl.checkpoint("x", best=v), "None"),
    "checkpoint(mode)": Entry(lambda v: fl.checkpoint("x", best="valid/loss", mode=v), "None"),
    "checkpoint(since)": Entry(lambda v: fl.checkpoint("x", best="valid/loss", since=v)),
    "checkpoint(only)": Entry(lambda v: fl.checkpoint("x", only=v), "None"),
    "checkpoint(named)": Entry(lambda v: fl.checkpoint("x", named=v), "() []"),
    "save(state)": Entry(lambda v: fl.save(v, "x")),
    "save(only)": Entry(lambda v: fl.save(toy(), "x", only=v), "None"),
    "save(path)": Entry(lambda v: fl.save(toy(), v), "'x' path"),
    "restore(path)": Entry(lambda v: fl.restore(v, toy()), "", ("checkpoint",)),
    "restore(state)": Entry(lambda v: fl.restore("x", v), "", ("checkpoint",)),
    "restore(only)": Entry(lambda v: fl.restore("x", toy(), only=v), "", ("checkpoint",)),
    "resume(folder)": Entry(lambda v: fl.resume(v, toy()), "'x' path"),
    "resume(state)": Entry(lambda v: fl.resume("x", v)),
    "latest(folder)": Entry(fl.latest, "'x' path"),
    "best(since)": Entry(lambda v: fl.best("x", "valid/loss", since=v), "None"),
    "best(folder)": Entry(fl.best, "'x' path"),
}

LENGTH = "0"  # accepted as a length; 1.5 is not a fraction
SCHEDULES = {
    **{
        f"schedules.{name}({argument})": Entry(
            lambda v, n=name, argument=argument: getattr(schedules, n)(**{argument: v}), accepts
        )
        for name, arguments in {
            "linear": {"warmup": LENGTH, "cooldown": LENGTH, "min_ratio": "0"},
            "cosine": {"warmup": LENGTH, "cooldown": LENGTH, "min_ratio": "0", "k": "1.5"},
            "polynomial": {"power": "1.5", "warmup": LENGTH, "cooldown": LENGTH, "min_ratio": "0"},
            "one_cycle": {"peak": LENGTH, "start_ratio": "", "min_ratio": "0"},
            "wsd": {"warmup": LENGTH, "decay": LENGTH, "min_ratio": "0", "kind": ""},
            "exponential": {"gamma": "1.5"},
            "step_decay": {"every": ""},
            "multistep": {"milestones": "[] ()"},
            "inverse_sqrt": {"warmup": ""},
            "warmup": {"n": LENGTH},
        }.items()
        for argument, accepts in arguments.items()
    },
    "schedules.step_decay(gamma)": Entry(lambda v: schedules.step_decay(1, v), "1.5"),
    "schedules.multistep(gamma)": Entry(lambda v: schedules.multistep([1], v), "1.5"),
    "schedules.warmup(schedule)": Entry(lambda v: schedules.warmup(1)(v)),
    "schedules.join(schedules)": Entry(lambda v: schedules.join(schedules.linear(), v, at=[1])),
    "schedules.join(at)": Entry(
        lambda v: schedules.join(schedules.linear(), schedules.linear(), at=v)
    ),
    "compare(histories)": Entry(fl.compare),
    "compare(history)": Entry(lambda v: fl.compare({"a": v})),
    "compare(keys)": Entry(lambda v: fl.compare({"a": records()}, v), "None"),
    "schedules.plot(schedules)": Entry(lambda v: schedules.plot(v, 2), "", ("plot",)),
    "schedules.plot(total_steps)": Entry(lambda v: schedules.plot(schedules.linear(), v)),
    "linear()(step)": Entry(lambda v: schedules.linear()(v, 4), "0"),
    "linear()(total_steps)": Entry(
        lambda v: schedules.linear()(0, v), "-1 0", ("length of the run",)
    ),
}

LOADER, ONES = "[] () {1} tensor generator", [ONE] * 4
DATA = {
    "take(loader)": Entry(lambda v: data.take(v, 1), LOADER),
    "take(n)": Entry(lambda v: data.take(ONES, v)),
    "fraction(loader)": Entry(lambda v: data.fraction(v, 1.0), "{1} tensor"),
    "fraction(f)": Entry(lambda v: data.fraction(ONES, v)),
    "even(loader)": Entry(data.even, LOADER),
    "fixed(loader)": Entry(lambda v: data.fixed(v, 1), LOADER),
    "fixed(n)": Entry(lambda v: data.fixed(ONES, v)),
    "interleave(loaders)": Entry(data.interleave),
    "interleave(a loader)": Entry(
        lambda v: data.interleave({"a": v}), "[] () {1} tensor", ("loader",)
    ),
    "interleave(ratios)": Entry(lambda v: data.interleave({"a": ONES}, v), "None"),
    "interleave(ratios: one)": Entry(lambda v: data.interleave({"a": ONES}, {"a": v})),
    "zip_cycle(loader)": Entry(lambda v: data.zip_cycle(a=v), LOADER),
    "zip_shortest(loader)": Entry(lambda v: data.zip_shortest(a=v), LOADER),
    "bucketed(lengths)": Entry(lambda v: data.bucketed(v, batch_size=1), "tensor"),
    "bucketed(batch_size)": Entry(lambda v: data.bucketed([1], batch_size=v, max_items=1), "None"),
    "bucketed(max_items)": Entry(
        lambda v: data.bucketed([1], max_items=v, batch_size=1), "None 1.5"
    ),
    "bucketed(shuffle)": Entry(lambda v: data.bucketed([1], batch_size=1, shuffle=v), "True"),
    "pad_collate(padding)": Entry(data.pad_collate, f"{NUMBERS} nan inf"),
    "pad_collate(padding: one)": Entry(lambda v: data.pad_collate({"a": v}), f"{NUMBERS} nan inf"),
    "leave_out(loader)": Entry(lambda v: data.leave_out(v, lambda epoch, batch: False), LOADER),
    "leave_out(predicate)": Entry(lambda v: data.leave_out(ONES, v)),
}

TESTING = {
    "Toy(w)": Entry(testing.Toy, f"{NUMBERS} nan inf"),
    "toy(w)": Entry(toy, f"{NUMBERS} nan inf"),
    "toy(lr)": Entry(lambda v: toy(lr=v), "0 1.5"),
    "spy(loss)": Entry(testing.spy, f"{NUMBERS} nan inf"),
    "spy(grad)": Entry(lambda v: testing.spy(grad=v), f"None {NUMBERS} nan inf"),
    "spy(weight)": Entry(lambda v: testing.spy(weight=v), "0"),
    "spy(aux)": Entry(lambda v: testing.spy(aux=v), "None {}"),
    "spy(skip)": Entry(lambda v: testing.spy(skip=v), "None 'x'"),
    "Problem(model)": Entry(lambda v: testing.Problem(v, toy_loss, [ONE]), "class"),
    "Problem(loss_fn)": Entry(lambda v: testing.Problem(testing.Toy, v, [ONE])),
    "Problem(batches)": Entry(lambda v: testing.Problem(testing.Toy, toy_loss, v)),
    "Problem(optimizer)": Entry(lambda v: testing.Problem(testing.Toy, toy_loss, [ONE], v)),
    "Problem(cat)": Entry(lambda v: testing.Problem(testing.Toy, toy_loss, [ONE], cat=v), "None"),
    "assert_same(a)": Entry(lambda v: testing.assert_same(v, toy())),
    "assert_same(b)": Entry(lambda v: testing.assert_same(toy(), v)),
    "assert_same(rtol)": Entry(lambda v: testing.assert_same(toy(), toy(), rtol=v), "0 1.5"),
    "check_laws(pipe)": Entry(testing.check_laws),
    "check_laws(problem)": Entry(
        lambda v: testing.check_laws(fl.pipeline(), testing.small() if v is None else v), "None"
    ),
    **{
        f"{law.__name__}({argument})": Entry(
            (lambda v, law=law: law(v, testing.small()))
            if argument == "pipe"
            else (lambda v, law=law: law(fl.pipeline(), v))
        )
        for law in (
            testing.law_fold,
            testing.law_purity,
            testing.law_no_host_reads,
            testing.law_skipped_updates,
        )
        for argument in ("pipe", "problem")
    },
    "law_neutral(neutral)": Entry(lambda v: testing.law_neutral(v, fl.pipeline(), testing.small())),
    "law_neutral(pipe)": Entry(lambda v: testing.law_neutral(fl.accumulate(1), v, testing.small())),
    "law_neutral(problem)": Entry(
        lambda v: testing.law_neutral(fl.accumulate(1), fl.pipeline(), v)
    ),
    "law_accumulation(pipe)": Entry(
        lambda v: testing.law_accumulation(v, testing.small(), 2, fl.accumulate)
    ),
    "law_accumulation(problem)": Entry(
        lambda v: testing.law_accumulation(fl.pipeline(), v, 2, fl.accumulate)
    ),
    "law_accumulation(n)": Entry(
        lambda v: testing.law_accumulation(fl.pipeline(), testing.small(), v, fl.accumulate)
    ),
    "law_accumulation(accumulate)": Entry(
        lambda v: testing.law_accumulation(fl.pipeline(), testing.small(), 2, v)
    ),
    "law_accumulation(rtol)": Entry(
        lambda v: testing.law_accumulation(fl.pipeline(), testing.small(), 2, fl.accumulate, v),
        "1.5",
    ),
}

ENTRIES = {
    **STATE,
    **STEPS,
    **MIDDLEWARE,
    **METRICS,
    **RUNS,
    **HISTORY,
    **HOOKS,
    **CHECKPOINTS,
    **SCHEDULES,
    **DATA,
    **TESTING,
}

if importlib.util.find_spec("torchmetrics"):

    def template():
        from torchmetrics.classification import BinaryAccuracy

        return BinaryAccuracy()

    ENTRIES |= {
        "from_torchmetrics(metric)": Entry(
            lambda v: fl.from_torchmetrics(v, lambda aux, batch: ())
        ),
        "from_torchmetrics(inputs)": Entry(lambda v: fl.from_torchmetrics(template(), v)),
        "from_torchmetrics(names)": Entry(
            lambda v: fl.from_torchmetrics(template(), lambda aux, batch: (), names=v), "None"
        ),
    }


class Outcome(NamedTuple):
    kind: str  # "accepted", "ours", "unnamed" (by fnloop, without a name) or "theirs"
    text: str


def outcome(name, entry, make, root=ROOT):
    """Call, and return how it ended. ``root`` is the folder whose statements may raise."""
    try:
        entry.call(make())
    except Exception as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        code = trace.tb_frame.f_code
        text = f"{type(error).__name__}: {error}"
        if (
            not code.co_filename.startswith(root)
            or code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]
        ):
            return Outcome("theirs", text)
        function, _, argument = (
            name.removesuffix(")").removesuffix("]").replace("[", "(").partition("(")
        )
        words = (function.rpartition(".")[2], argument.partition(":")[0].strip(")("), *entry.words)
        return Outcome("ours" if any(word in text for word in words if word) else "unnamed", text)
    return Outcome("accepted", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_argument_raises_an_error_that_names_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {value: outcome(name, ENTRIES[name], make) for value, make in VALUES.items()}
    wrong = {value: end for value, end in found.items() if end.kind in ("theirs", "unnamed")}
    assert not wrong
    assert [value for value in VALUES if found[value].kind == "accepted"] == [
        v for v in VALUES if v in ENTRIES[name].accepts.split()
    ]


# --- arguments that are not in the table

NOT_TRIED = ("decide", "toy_loss")  # they are called in every update
WORDS = {  # other words in messages
    "bisect(b)": "checkpoint",
    "bisect(loaders)": "record",
    "check_script(loaders)": "loss of",
    "diff(b)": "checkpoint",
    "replay(folder)": "checkpoint",
    "tune(loader)": "loss of",
}
FIT = {  # which values fit a part of an annotation
    "None": "None",
    "bool": "True",
    "int": "-1 0",
    "float": f"{NUMBERS} nan inf",
    "str": "'' 'x'",
    "str | os.PathLike[str]": "'x' path",
}


def arguments(*modules):
    """Yield each argument of a public function that is not in the table: module, function, name."""
    for module in modules:
        for name in module.__all__:
            function = getattr(module, name)
            if not inspect.isfunction(function) or name in NOT_TRIED:
                continue
            for parameter in inspect.signature(function).parameters.values():
                row = re.compile(rf"(schedules\.)?{name}\({parameter.name}[):]")
                if parameter.annotation != "Batch" and not any(map(row.match, ENTRIES)):
                    yield module, name, parameter


class ItHasBeenCalled(BaseException):
    """Ends the example of a function after the call that was tried."""


def call_in_example(module, name, parameter, value):
    """Run the example of a function up to its first call, and make that with another argument."""
    function = getattr(module, name)

    def call(*args, **kwargs):
        bound = inspect.signature(function).bind(*args, **kwargs)
        given = value
        if parameter.kind is parameter.VAR_POSITIONAL:
            given = (value,)
        if parameter.kind is parameter.VAR_KEYWORD:
            given = dict.fromkeys(bound.arguments.get(parameter.name, ("setting",)), value)
        bound.arguments[parameter.name] = given
        result = function(*bound.args, **bound.kwargs)
        raise ItHasBeenCalled(list(result) if inspect.isgenerator(result) else result)

    names = vars(inspect.getmodule(function)) | {name: call, "__name__": "example"}
    examples = doctest.DocTestParser().get_examples(function.__doc__)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(module, name, call)
        with contextlib.suppress(ItHasBeenCalled):
            for example in examples:
                exec(compile(example.source, f"<example of {name}>", "single"), names)
            pytest.fail(f"the example of {name} does not call it")


def fitting(annotation: str) -> set[str] | None:
    """Return the values that fit an annotation, or None if that is not known."""
    if annotation in ("object", "Any"):
        return set(VALUES)
    parts = [annotation] if annotation in FIT else annotation.split(" | ")
    known = all(part in FIT for part in parts)
    return {value for part in parts for value in FIT[part].split()} if known else None


def check_argument(module, name, parameter, root=ROOT):
    """Give an argument every value, within the example of the docstring of its function."""
    call = f"{name}({parameter.name})"
    words = parameter.name.removesuffix("s"), WORDS.get(call, "")
    entry = Entry(lambda value: call_in_example(module, name, parameter, value), words=words)
    found = {value: outcome(call, entry, make, root) for value, make in VALUES.items()}
    wrong = {value: end for value, end in found.items() if end.kind in ("theirs", "unnamed")}
    assert not wrong
    accepted, fit = {v for v in found if found[v].kind == "accepted"}, fitting(parameter.annotation)
    assert "object" not in accepted if fit is None else accepted <= fit


def slow_if_it_trains(module, name, parameter):
    marks = [pytest.mark.slow] * (name in ("bisect", "check_script", "replay", "tune"))
    return pytest.param(module, name, parameter, id=f"{name}({parameter.name})", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "name", "parameter"),
    [slow_if_it_trains(*found) for found in arguments(*MODULES)],
)
def test_an_argument_that_is_not_in_the_table_raises_such_errors_too(
    module, name, parameter, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    check_argument(module, name, parameter)


if __name__ == "__main__":  # print the count of all outcomes
    import collections
    import sys
    import tempfile
    import warnings

    warnings.simplefilter("ignore")
    ends: collections.Counter[str] = collections.Counter()
    for name, (value, make) in itertools.product(ENTRIES, VALUES.items()):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            end = outcome(name, ENTRIES[name], make)
        kind = end.kind
        if kind == "accepted" and value not in ENTRIES[name].accepts.split():
            kind = "accepted, and should not be"
        elif kind == "ours" and value in ENTRIES[name].accepts.split():
            kind = "refused, and should not be"
        ends[kind] += 1
        if kind not in ("ours", "accepted") or "-a" in sys.argv:
            print(f"{name:38} {value:10} {kind:12} {end.text[:150]!r}")
    print(len(ENTRIES), "entries,", len(ENTRIES) * len(VALUES), "calls:", dict(ends))
