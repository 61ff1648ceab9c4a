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


def records(key="valid/loss"):
    return fl.History([fl.Record(1, 1, {key: 0.5})])


def fit(**given):
    return fl.fit(**given)


def run(**given):
    return list(fl.run(**given))


def predict(**given):
    return list(fl.predict(**given))


def model_and_optimizer():
    model = testing.Toy()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def training():
    return {"step": step(), "state": toy(), "loaders": [ONE]}


def trial():
    return {"step": step(), "state": toy(), "loader": [ONE]}


def sizes():
    return {"step": step(), "state": toy(), "make_loader": lambda n: [torch.ones(n)]}


def law():
    return {"pipe": fl.pipeline(), "problem": testing.small()}


LOADER, ONES, KEY = "[] () {1} tensor generator", [ONE] * 4, {"key": "valid/loss"}
LOSS = "tensor | loader, loss of toy_loss"
FLOAT = f"{NUMBERS} nan inf"
RUN = {
    "step": "",
    "state": " | fit",
    "loaders": LOSS,
    "epochs": "None 0",
    "steps": "None 0",
    "hooks": "None [] ()",
    "evaluate_every": "None {}",
    "record_every": "None",
    "prefetch": "",
}
RINGS = ("forward", "loss", "gradient", "update", "device", "step")
TIMES = {"warmup": "0", "cooldown": "0", "min_ratio": "0"}  # 0 is a length; 1.5 is not a fraction
# A function, what it is given else, and by argument: the accepted values | other words for it.
FUNCTIONS = [
    # states
    (fl.TrainState.create, model_and_optimizer,
     {"model": " | optimizer", "optimizer": "", "seed": "None 0", "backend": "None",
      "data": "None"}),
    (fl.snapshot, {}, {"state": ""}),
    (fl.unwrap, {}, {"state": ""}),
    (fl.layers, {}, {"model": "module"}),
    # steps
    (fl.supervised, {}, {"criterion": "module"}),
    (fl.middleware, {}, {"ring": ""}),
    (fl.Middleware, {"name": "x"},
     {"name": "'x'", **dict.fromkeys(RINGS, "None"), "init": "None", "window": "",
      "loss_fn": "None", "check": "None", "call": "None", "evaluation": "None", "report": "None",
      "loaders": "()"}),
    # middleware
    (fl.accumulate, {}, {"n": "", "total": ""}),
    (fl.grad_norm, {}, {"norm_type": "1.5 inf"}),
    (fl.throughput, {}, {"of": ""}),
    (fl.throughput, {"flops": 1.0, "peak": 1.0}, {"flops": "1.5", "peak": "1.5"}),
    (fl.clip, {"max_norm": 1.0}, {"max_norm": "1.5 inf", "norm_type": "1.5 inf"}),
    (fl.clip_value, {}, {"limit": "1.5 inf"}),
    (fl.amp, {}, {"precision": "None"}),
    (fl.amp, {"precision": "fp16"}, {"init_scale": "1.5", "growth_interval": ""}),
    (fl.schedule, {"fn": schedules.cosine()}, {"fn": "", "field": "'x'", "only": "None 'x'"}),
    (fl.torch_scheduler, {"factory": lambda optimizer, run: None},
     {"factory": "", "only": "None 'x'"}),
    (fl.ema, {}, {"decay": "0", "start": "0", "every": "", "evaluate": "True", "name": "'x'"}),
    (fl.local_sgd, {}, {"every": "", "outer": "None"}),
    (fl.swa, {}, {"start": "0", "every": "", "evaluate": "True", "name": "'x'"}),
    (fl.averaged, lambda: {"state": toy()}, {"state": "", "name": ""}),
    (fl.update_batchnorm, trial, {"step": "", "state": "", "loader": LOADER}),
    (fl.metric, {"a": lambda aux, batch: 0.0}, {"on": "", "loaders": "None"}),
    (fl.compiled, {},
     {"mode": "None", "options": "None {}", "dynamic": "None True", "fullgraph": "True",
      "backend": "lambda module class"}),
    (fl.cuda_graph, {}, {"warmup": "", "fallback": "True", "limit": ""}),
    # metrics and processes
    (fl.reduce, {"tree": 1.0}, {"tree": f"True {FLOAT} [] () {{}} tensor", "how": ""}),
    (fl.broadcast, {"tree": 1.0}, {"source": "0"}),
    # runs, and what tries one
    *((function, lambda: {"hooks": (), **training()}, RUN) for function in (fit, run)),
    (fl.find_lr, lambda: {"updates": 10, **trial()},
     {"step": "", "state": "", "loader": LOSS, "low": "1.5", "high": "1.5", "updates": ""}),
    (fl.dry_run, training,
     {"step": "", "state": " | fit", "hooks": "None [] ()",
      "loaders": LOSS.replace("tensor", "tensor [] () {1}")}),  # these are problems of the report
    (fl.summary, lambda: {"state": toy(), "batch": ONE}, {"state": "", "depth": ""}),
    (fl.find_batch_size, sizes, {"step": "", "state": "", "make_loader": "", "most": ""}),
    (fl.evaluate, trial, {"step": "", "state": "", "loader": "tensor | how many items"}),
    (predict, lambda: {"fn": lambda model, batch: 0, "state": toy(), "loader": [ONE]},
     {"fn": "", "state": "", "loader": LOADER, "gather": "True"}),
    (fl.sharded, {}, {"loader": LOADER}),
    # histories
    (fl.Record, {"epoch": 1, "step": 1, "metrics": {}},
     {"epoch": "0", "step": "0", "metrics": "{}", "seconds": "0 1.5"}),
    (fl.History, {}, {"records": "[] ()"}),
    (fl.History().append, {}, {"record": ""}),
    (records().latest, {}, {"key": " | history"}),
    (records().best, KEY, {"key": " | history", "mode": "None"}),
    (records().plot, {}, {"mode": "None {}", "x": ""}),
    (fl.compare, {}, {"histories": ""}),
    (fl.compare, {"histories": {"a": records()}}, {"keys": "None"}),
    # hooks
    (fl.every, {}, {"epochs": "", "steps": "", "seconds": "1.5"}),
    (fl.paced, {}, {"failures_per_day": "1.5"}),
    (fl.inspect, {"fn": lambda state, outputs: None},
     {"fn": "", "loader": "'x'", "every": "", "reports": "() []"}),
    (fl.measure, {"fn": lambda state: {}, "name": "two"},
     {"fn": "", "name": "'x'", "every": "", "everywhere": "True"}),
    (fl.when, {}, {"predicate": ""}),
    (fl.once, {"hook": lambda state: state}, {"hook": "", "name": "None 'x'"}),
    (fl.on_main, {}, {"hook": ""}),
    (fl.early_stop, KEY,
     {"key": "", "patience": "", "min_delta": "0 1.5", "mode": "None", "reference": "",
      "stopping_threshold": f"None {NUMBERS} inf", "divergence_threshold": f"None {NUMBERS} inf",
      "min_epochs": "0", "min_steps": "0"}),
    (fl.when_improved, KEY, {"key": "", "mode": "None"}),
    (fl.restore_best, KEY, {"key": "", "mode": "None"}),
    (fl.halt_on_nonfinite, {}, {"steps": "", "keep": "True"}),
    (fl.progress, {}, {"since": "", "refresh": "1.5", "file": "None"}),
    (fl.live_plot, {"file": "x.png"}, {"file": "", "mode": "None {}", "x": "", "refresh": "0 1.5"}),
    (fl.track, {"tracker": "tensorboard", "folder": "x"},
     {"tracker": "", "folder": "'x' path", "config": "None {}", "project": "None 'x'",
      "also": "None"}),
    (fl.to_csv, {}, {"path": "'x' path"}),
    (fl.to_jsonl, {}, {"path": "'x' path"}),
    # checkpoints
    (fl.checkpoint, {"folder": "x"},
     {"folder": "'x' path", "keep": "None", "best": "None", "only": "None", "named": "() []"}),
    (fl.checkpoint, {"folder": "x", "best": "valid/loss"}, {"mode": "None", "since": ""}),
    (fl.save, lambda: {"state": toy(), "path": "x"},
     {"state": "", "path": "'x' path", "only": "None"}),
    (fl.restore, lambda: {"path": "x", "state": toy()},
     dict.fromkeys(("path", "state", "only", "shapes"), " | checkpoint")),
    (fl.resume, lambda: {"folder": "x", "state": toy()}, {"folder": "'x' path", "state": ""}),
    (fl.latest, {}, {"folder": "'x' path"}),
    (fl.follow, lambda: {"folder": "x", "state": toy()},
     {"folder": "'x' path", "state": "", "poll": "1.5", "timeout": "None 0 1.5"}),
    (fl.best, {}, {"folder": "'x' path"}),
    (fl.best, {"folder": "x", **KEY}, {"since": "None"}),
    # schedules
    (schedules.linear, {}, TIMES),
    (schedules.cosine, {}, {**TIMES, "k": "1.5"}),
    (schedules.polynomial, {}, {**TIMES, "power": "1.5"}),
    (schedules.one_cycle, {}, {"peak": "0", "start_ratio": "", "min_ratio": "0"}),
    (schedules.wsd, {}, {"warmup": "0", "decay": "0", "min_ratio": "0", "kind": ""}),
    (schedules.exponential, {}, {"gamma": "1.5"}),
    (schedules.step_decay, {"every": 1}, {"every": "", "gamma": "1.5"}),
    (schedules.multistep, {"milestones": [1]}, {"milestones": "[] ()", "gamma": "1.5"}),
    (schedules.inverse_sqrt, {}, {"warmup": ""}),
    (schedules.warmup, {"n": 1}, {"n": "0"}),
    (schedules.plot, {"schedules": schedules.linear(), "total_steps": 2},
     {"schedules": " | plot", "total_steps": ""}),
    # loaders
    (data.take, {"loader": ONES, "n": 1}, {"loader": LOADER, "n": ""}),
    (data.fraction, {"loader": ONES, "f": 1.0}, {"loader": "{1} tensor", "f": ""}),
    (data.even, {}, {"loader": LOADER}),
    (data.fixed, {"loader": ONES, "n": 1}, {"loader": LOADER, "n": ""}),
    (data.interleave, {"loaders": {"a": ONES}}, {"loaders": "", "ratios": "None"}),
    (data.bucketed, {"lengths": [1], "batch_size": 1},
     {"lengths": "tensor", "max_items": "None 1.5", "shuffle": "True"}),
    (data.bucketed, {"lengths": [1], "max_items": 1}, {"batch_size": "None"}),
    (data.pad_collate, {}, {"padding": FLOAT}),
    (data.leave_out, {"loader": ONES, "predicate": lambda epoch, batch: False},
     {"loader": LOADER, "predicate": ""}),
    # testing
    (testing.Toy, {}, {"w": FLOAT}),
    (toy, {}, {"w": FLOAT, "lr": "0 1.5"}),
    (testing.spy, {},
     {"loss": FLOAT, "grad": f"None {FLOAT}", "weight": "0", "aux": "None {}", "skip": "None 'x'"}),
    (testing.Problem, {"model": testing.Toy, "loss_fn": toy_loss, "batches": [ONE]},
     {"model": "class", "loss_fn": "", "batches": "", "optimizer": "", "cat": "None"}),
    (testing.assert_same, lambda: {"a": toy(), "b": toy()}, {"a": "", "b": "", "rtol": "0 1.5"}),
    (testing.check_laws, {}, {"pipe": ""}),
    *((function, law, {"pipe": "", "problem": ""})
      for function in (testing.law_fold, testing.law_purity, testing.law_no_host_reads,
                       testing.law_skipped_updates)),
    (testing.law_neutral, lambda: {"neutral": fl.accumulate(1), **law()},
     {"neutral": "", "pipe": "", "problem": ""}),
    (testing.law_accumulation, lambda: {"n": 2, "accumulate": fl.accumulate, **law()},
     {"pipe": "", "problem": "", "n": "", "accumulate": "", "rtol": "1.5"}),
]  # fmt: skip


def named(v):
    """Give an optimizer a name."""
    given = model_and_optimizer()
    try:
        named = {v: given["optimizer"]}
    except TypeError:  # a key has a hash; one of another type stands for what has none
        named = {1: given["optimizer"]}
    return fl.TrainState.create(given["model"], named)


VALUED, MEAN = (fl.Sum, fl.Min, fl.Max, fl.Last), {"a": lambda aux, batch: 0.0}
MOMENTS = (fl.every(steps=1), fl.at_start(), fl.at_end(), fl.when(lambda state: True))
RUNS = [  # a piece of an argument of a run
    ("loaders: train", lambda v: {"loaders": {"train": v}}, LOSS),
    ("loaders: valid", lambda v: {"loaders": {"train": [ONE], "valid": v}}, LOSS),
    ("loaders: pair", lambda v: {"loaders": ([ONE], v)}, "None " + LOSS + ", pair of"),
    ("hooks: one", lambda v: {"hooks": (v,)}, " | a hook"),
    ("evaluate_every: one",
     lambda v: {"loaders": ([ONE], [ONE]), "evaluate_every": {"valid": v}}, "None"),
]  # fmt: skip
# What is a piece of an argument, or is not given by name, and other calls.
PIECES = [
    ("TrainState.create(optimizer: one)",
     lambda v: fl.TrainState.create(testing.Toy(), {"a": v}), " | optimizers"),
    ("TrainState.create(optimizer: a name)", named, "'x' | names of optimizers"),
    ("pipeline(middleware)", fl.pipeline, ""),
    ("pipeline(loss_fn)", lambda v: fl.pipeline()(v), " | loss function"),
    ("step(state)", lambda v: step()(v, ONE), ""),
    ("step(window)", lambda v: fl.pipeline(fl.accumulate(2))(toy_loss)(toy(), v), " | accumulate"),
    ("step.evaluate(state)", lambda v: step().evaluate(v, ONE), ""),
    ("middleware(factory)", lambda v: fl.middleware("gradient")(v), "lambda"),
    ("metric(function)", lambda v: fl.metric(accuracy=v), " | metric, accuracy"),
    ("metric(positional)", fl.metric, " | positional, at least one"),
    ("metric(name)",
     lambda v: fl.metric(**{v: MEAN["a"]} if isinstance(v, str) else {"a": v}), "'x'"),
    ("derive(function)", lambda v: fl.derive(double=v), " | derive, double"),
    ("Mean(total)", lambda v: fl.Mean(v, 1).compute(), f"{FLOAT} True"),
    ("Mean(weight)", lambda v: fl.Mean(1.0, v).compute(), "0 1.5 True | weights"),
    ("Mean.combine(other)", lambda v: fl.Mean(1.0, 1).combine(v), ""),
    *((f"{m.__name__}(value)", lambda v, m=m: m(v).compute(), f"{FLOAT} True") for m in VALUED),
    *((f"{m.__name__}.combine(other)", lambda v, m=m: m(1.0).combine(v), "") for m in VALUED),
    *((f"{run.__name__}({piece})",
       lambda v, run=run, of=of: run(**training() | {"hooks": ()} | of(v)), accepts)
      for run in (fit, run) for piece, of, accepts in RUNS),
    ("Record(metrics: a value)", lambda v: fl.Record(1, 1, {"loss": v}), f"{FLOAT} True"),
    ("History[key]", lambda v: records()[v], "-1 0 | history"),
    ("compare(history)", lambda v: fl.compare({"a": v}), ""),
    *((f"{type(moment).__name__}(hook)", moment, " | hook") for moment in MOMENTS),
    ("when_improved(hook)", fl.when_improved("valid/loss"), " | hook"),
    ("every(or)", lambda v: fl.every(steps=1) | v, " | combines moments"),
    ("every(and)", lambda v: v & fl.every(steps=1), " | combines moments"),
    ("schedules.warmup(schedule)", schedules.warmup(1), ""),
    ("schedules.join(schedules)", lambda v: schedules.join(schedules.linear(), v, at=[1]), ""),
    ("schedules.join(at)", lambda v: schedules.join(*[schedules.linear()] * 2, at=v), ""),
    ("linear()(step)", lambda v: schedules.linear()(v, 4), "0"),
    ("linear()(total_steps)", lambda v: schedules.linear()(0, v), "-1 0 | length of the run"),
    ("interleave(a loader)", lambda v: data.interleave({"a": v}), "[] () {1} tensor | loader"),
    ("interleave(ratios: one)", lambda v: data.interleave({"a": ONES}, {"a": v}), ""),
    ("zip_cycle(loader)", lambda v: data.zip_cycle(a=v), LOADER),
    ("zip_shortest(loader)", lambda v: data.zip_shortest(a=v), LOADER),
    ("zip_longest(loader)", lambda v: data.zip_longest(a=v), LOADER),
    ("pad_collate(padding: one)", lambda v: data.pad_collate({"a": v}), FLOAT),
    ("check_laws(problem)",
     lambda v: testing.check_laws(fl.pipeline(), testing.small() if v is None else v), "None"),
]  # fmt: skip


def entry(call, text):
    """Return an entry; in the text are the accepted values | other words for the argument."""
    accepts, _, words = text.partition(" | ")
    return Entry(call, accepts, tuple(words.split(", ")) if words else ())


def entries_of(function, given, arguments):
    """Yield the entries of a function."""
    name = function.__qualname__
    name = f"schedules.{name}" if inspect.getmodule(function) is schedules else name
    for argument, text in arguments.items():

        def call(value, argument=argument):
            return function(**(given() if callable(given) else given) | {argument: value})

        yield f"{name}({argument})", entry(call, text)


ENTRIES = {name: entry(call, text) for name, call, text in PIECES}
for row in FUNCTIONS:
    ENTRIES |= entries_of(*row)

if importlib.util.find_spec("torchmetrics"):

    def with_torchmetrics():
        from torchmetrics.classification import BinaryAccuracy

        return {"metric": BinaryAccuracy(), "inputs": lambda aux, batch: ()}

    arguments_of_it = {"metric": "", "inputs": "", "names": "None"}
    ENTRIES |= entries_of(fl.from_torchmetrics, with_torchmetrics, arguments_of_it)


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
    "search(loaders)": "loss of",
    "tune(loader)": "loss of",
    "verify(folder)": "checkpoint",
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


# Those of `extend` are called in every update, by authors who know what they give.
FOR_USERS = [module for module in MODULES if module.__name__ != "fnloop.extend"]


def slow_if_it_trains(module, name, parameter):
    marks = [pytest.mark.slow] * (name in ("bisect", "check_script", "replay", "tune"))
    return pytest.param(module, name, parameter, id=f"{name}({parameter.name})", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "name", "parameter"), [slow_if_it_trains(*found) for found in arguments(*FOR_USERS)]
)
def test_an_argument_that_is_not_in_the_table_raises_such_errors_too(
    module, name, parameter, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    check_argument(module, name, parameter)
