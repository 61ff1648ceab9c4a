"""What watches a metric: the names that it knows beforehand, and what it says of others."""

import attrs
import pytest
import torch
from toy_runs import ONE, fit

import fnloop as fl
from fnloop.testing import toy, toy_loss


def early_stop(key, folder):
    return fl.early_stop(key, mode="min")


def restore_best(key, folder):
    return fl.restore_best(key, mode="min")


def when_improved(key, folder, moment=lambda m: m):
    return moment(fl.when_improved(key, mode="min"))(lambda state: state)


def checkpoint(key, folder):
    return fl.checkpoint(folder, best=key, mode="min")


def named(key, folder):
    return fl.checkpoint(folder, named=(key,))


BETTER = "when_improved({key!r}, mode='min')"
ALONE = {  # the function that makes a hook: its name in messages
    early_stop: "early_stop",
    restore_best: "restore_best",
    when_improved: BETTER,
    checkpoint: "checkpoint",
    named: "checkpoint",
}
WATCHERS = {
    **{make.__name__: (who, make) for make, who in ALONE.items()},
    **{f"{wrap!r}({make.__name__})": (who, lambda *a, wrap=wrap, make=make: wrap(make(*a)))
       for wrap in (fl.every(epochs=100), fl.when(bool)) for make, who in [*ALONE.items()][:3]},
    "on_main(early_stop)": ("early_stop", lambda *a: fl.on_main(early_stop(*a))),
    "every & when_improved": (f"every(epochs=100) & {BETTER}",
                              lambda *a: when_improved(*a, lambda m: fl.every(epochs=100) & m)),
    "~when_improved": (f"~{BETTER}", lambda *a: when_improved(*a, lambda m: ~m)),
}  # fmt: skip
NO_LOADER = (
    ": its first part is not the name of a loader that this run trains on or evaluates; those are: "
)
NOT_MADE = (
    "this run never makes 'valid/loss', because evaluate_every says None for the loader 'valid': "
    "give it a moment, such as every(epochs=1)"
)
ADD_IT = "list metric(lss=fn) in the pipeline, fn(aux, batch) -> scalar. Did you mean 'valid/loss'?"
MADE = "; there are: train/loss, train/lr, valid/loss. Did you mean"
RUN = {"train": 1, "valid": 1, "epochs": 10}


def watching(watcher, key, folder):
    """Return the hooks and the members of a pipeline that watch a metric."""
    if watcher == "plateau":
        return (), (fl.plateau(key, mode="min"),)
    return (WATCHERS[watcher][1](key, folder),), ()


@pytest.mark.parametrize(("key", "run", "step", "message"), [
    *((key, {}, 0, f"{NO_LOADER}train, valid. Did you mean '{near}'?")
      for key, near in (("val/loss", "valid/loss"), ("test/loss", "train/loss"),
                        ("loss", "valid/loss"), ("val_loss", "valid/loss"))),
    ("vali/loss", {"evaluate_every": None}, 0, f"{NO_LOADER}train. Did you mean 'train/loss'?"),
    *(("valid/loss", {"evaluate_every": never}, 0, NOT_MADE) for never in (None, {"valid": None})),
    ("valid/lss", {}, 0, f": this pipeline evaluates valid/loss. To add it, {ADD_IT}"),
    ("train/lss", {}, 0, f": this pipeline reports train/loss, train/lr. To add it, {ADD_IT}"
     .replace("valid/loss", "train/loss")),
    ("train/f1", {}, 0, ": this pipeline reports train/loss, train/lr. To add it, list "
     "metric(f1=fn) in the pipeline, fn(aux, batch) -> scalar"),
    # where another hook might add it: known after the first epoch
    ("train/lss", {"other": lambda state: state}, 1, f"{MADE} 'train/loss'?"),
    # where another hook might add it: known after the first evaluation
    *((key, {"other": lambda state: state, "evaluate_every": fl.every(epochs=every)}, every,
       f"{MADE} 'valid/loss'?") for key, every in (("valid/lss", 1), ("valid/los", 2))),
])  # fmt: skip
@pytest.mark.parametrize("watcher", ["plateau", *WATCHERS])
def test_an_unknown_metric_is_refused_as_soon_as_it_is_known(
    watcher, key, run, step, message, tmp_path
):
    who = "plateau" if watcher == "plateau" else WATCHERS[watcher][0]
    who = who.removeprefix("~") if step else who
    given, (watch, members) = {**RUN, **run}, watching(watcher, key, tmp_path)
    hooks = [hook for hook in (given.pop("other", None), *watch) if hook]
    state, pipe = toy(), fl.pipeline(*members)(toy_loss)
    with pytest.raises(KeyError) as caught:
        fit(fl.progress(), *hooks, step=pipe, state=state, **given)
    said = message if message == NOT_MADE else f"there is no metric '{key}'{message}"
    assert caught.value.args == (f"{who.format(key=key)}: {said}",)
    assert state.model.w.item() == -step
    if step == 0 and "evaluate_every" not in run:
        with pytest.raises(KeyError) as again:
            fl.dry_run(pipe, toy(), {"train": [ONE], "valid": [ONE]}, hooks)
        assert again.value.args == caught.value.args


# --- numbers that another hook adds


def largest(state, outputs):
    return {"last": torch.cat([out.aux["output"] for out in outputs])[-1]}


@pytest.mark.parametrize(("adds", "key", "other"), [
    (fl.inspect(largest, reports=("last",)), "valid/last", fl.inspect(largest)),
    (fl.measure(lambda state: {"any": 1.0}, name="two"), "two/any",
     fl.measure(lambda state: {"any": 1.0}, name="too")),
])  # fmt: skip
@pytest.mark.parametrize("watcher", ["plateau", *WATCHERS])
def test_numbers_that_a_hook_adds_are_known_beforehand_if_it_says_so(
    watcher, adds, key, other, tmp_path
):
    hooks, members = watching(watcher, key, tmp_path)
    run = {"step": fl.pipeline(*members)(toy_loss), **RUN, "epochs": 2}
    assert key in fit(adds, *hooks, **run).history
    state = toy()
    with pytest.raises(KeyError, match=f"there is no metric '{key}'|no loader 'two'"):
        fit(other, *hooks, state=state, **run)
    assert state.step == 0


def test_a_hook_of_the_users_own_says_it_too():
    """It reports the number of updates, which rises, so the metric never improves."""

    def count(state):
        if "record" not in state.events:
            return state
        *before, last = state.history
        more = attrs.evolve(last, metrics={**last.metrics, "mine/loss": state.step})
        return attrs.evolve(state, history=fl.History([*before, more]))

    stop = fl.early_stop("mine/loss", patience=2)
    with pytest.raises(KeyError, match="'mine/loss'"):
        fit(count, stop, **RUN)
    count.reports = ("mine/loss",)
    assert fit(count, stop, **RUN).epoch == 3


# --- an evaluation without a loss


@pytest.mark.parametrize("watcher", ["plateau", *WATCHERS])
def test_what_watches_the_loss_of_an_evaluation_without_one_is_told(watcher, tmp_path):
    def loss_fn(model, batch):
        loss, aux = toy_loss(model, batch)
        return (loss if model.training else None), aux

    hooks, members = watching(watcher, "valid/loss", tmp_path)
    message = (
        r"there is no metric 'valid/loss'; there are: .*valid/mean.* The loss function returned "
        r"\(None, aux\) in this evaluation: watch another metric, or return a loss"
    )
    members = (*members, fl.metric(mean=lambda aux, batch: aux["output"].mean()))
    with pytest.raises(KeyError, match=message):
        fit(*hooks, step=fl.pipeline(*members)(loss_fn), **{**RUN, "epochs": 2})


# --- metrics of training, which are known beforehand

REPORTING = [  # every middleware of the library that may report in training
    fl.clip(1.0),
    fl.clip(1.0, only="w", name="w"),
    fl.grad_norm(),
    fl.grad_norm(by="module"),
    fl.metric(value=lambda aux, batch: batch.mean()),
    fl.metric(value=lambda aux, batch: batch.mean(), on="training"),
    fl.metric(value=lambda aux, batch: batch.mean(), loaders=("train",)),
    fl.derive(double=lambda m: 2 * m["loss"]),
    fl.schedule(lambda i, total: 1.0),
    fl.schedule(lambda i, total: 1.0, field="weight_decay"),
    fl.torch_scheduler(lambda opt, run: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)),
    fl.timings(),
    fl.throughput(),
    fl.throughput(of="weight", flops=1.0, peak=1.0),
    fl.device_memory(),
    fl.debug.watch(every=1),
]
SILENT = [
    *(fl.accumulate(1), fl.accumulate(2), fl.microbatch(2), fl.retry_on_oom(), fl.sam(0.1)),
    *(fl.clip_value(1.0), fl.clip_adaptive(0.1), fl.closure(), fl.amp("bf16"), fl.amp(None)),
    *(fl.amp("fp16"), fl.channels_last(), fl.skip_nonfinite(), fl.spike_guard(), fl.ema(0.9)),
    *(fl.swa(0.5), fl.local_sgd(2), fl.debug.audit(every=2), fl.compiled(backend="eager")),
    *(fl.plateau("train/loss"), fl.metric(value=lambda aux, batch: batch.mean(), on="evaluation")),
]


@pytest.mark.parametrize("member", REPORTING, ids=repr)
def test_what_a_middleware_reports_in_training_may_be_watched(member):
    made = fit(step=fl.pipeline(member)(toy_loss), train=2, epochs=1).history[-1].metrics
    for key in made:
        stop = fl.early_stop(key, mode="min")
        assert key in fit(stop, step=fl.pipeline(member)(toy_loss), train=2, epochs=1).history


@pytest.mark.parametrize("member", [*REPORTING, *SILENT], ids=repr)
def test_what_no_middleware_of_the_library_reports_is_refused_before_the_first_update(member):
    state = toy()
    with pytest.raises(KeyError, match="this pipeline reports train/loss, train/lr"):
        step = fl.pipeline(member)(toy_loss)
        fit(fl.early_stop("train/other", mode="min"), step=step, state=state, train=1, epochs=1)
    assert state.step == 0 and state.model.w.item() == 0


def test_a_middleware_of_ones_own_may_report_anything_unless_it_says_what():
    def wrap(step):
        def counted(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, metrics={**out.metrics, "mine": fl.Last(3.0)})

        return counted

    stop = fl.early_stop("train/mine", mode="max")
    for says in ({}, {"adds": ("mine",)}):
        step = fl.pipeline(fl.Middleware("own", step=wrap, **says))(toy_loss)
        assert fit(stop, step=step, train=1, epochs=1).history["train/mine"] == (3.0,)
    step = fl.pipeline(fl.Middleware("own", step=wrap, adds=()))(toy_loss)
    with pytest.raises(KeyError, match="there is no metric 'train/mine'"):
        fit(stop, step=step, train=1, epochs=1)


def test_scheduled_numbers_may_be_watched():
    step = fl.pipeline(fl.scheduled(beta=lambda i, total: 0.5))(
        lambda model, batch, *, beta: beta * toy_loss(model, batch)[0]
    )
    stop = fl.early_stop("train/beta", mode="max")
    assert fit(stop, step=step, train=1, epochs=1).history["train/beta"] == (0.5,)
