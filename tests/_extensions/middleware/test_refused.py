"""What cannot be composed, and how middleware show. Wrong values: tests/test_wrong_calls.py."""

import copy
import pickle

import pytest
import torch
from sample_middleware import double_loss, own_guard

import fnloop as fl
from fnloop import schedules
from fnloop.testing import toy_loss

NESTED = {"triton.cudagraphs": True}


def number(aux, batch):
    return 1.0


def torch_scheduler(optimizer, run):
    return None


N, ON = {"n": number}, fl.metric(x=number, on="evaluation")
TWO = fl.derive(y=double_loss, x=double_loss)
GRAPH, CLOSURE = fl.cuda_graph(), fl.closure(create_graph=True)
SETTINGS = [  # whose messages say more than what was expected, or that are no single value
    (TypeError, lambda: fl.accumulate(4, total=64), r"got both. Write accumulate\(total=64\)"),
    (TypeError, lambda: fl.accumulate(), r"got neither. Write accumulate\(4\) or"),
    (ValueError, lambda: fl.accumulate({0: 0}), "n as an int >= 1"),
    (ValueError, lambda: fl.accumulate({-1: 2}), "an epoch of n"),
    (TypeError, lambda: fl.accumulate({0.5: 2}), "an epoch of n"),
    (TypeError, lambda: fl.accumulate({0: "4"}), "n as an int"),
    (TypeError, lambda: fl.clip(1.0, only=["0", 3]), "clip expects only as"),
    (ValueError, lambda: fl.clip(1.0, name="a/b"), "clip expects name"),
    (TypeError, lambda: fl.compiled(modes="x"), r"got 'modes'. Did you mean 'mode'\?"),
    (TypeError, lambda: fl.compiled(updates=True), r"and update; got .*Did you mean 'update'"),
    (TypeError, lambda: fl.compiled(model=toy_loss), r"takes the arguments of torch\.compile"),
    (ValueError, lambda: fl.derive(), "at least one name"),
    (ValueError, lambda: fl.derive(loss=double_loss), "choose another name"),
    (ValueError, lambda: fl.ema(name="a/b"), "ema expects name as letters, digits, _ and -"),
    (ValueError, lambda: fl.swa(name="Model"), "none of model, optimizer, slots, training, own"),
    (ValueError, lambda: fl.ema(name="closure"), "other middleware; got 'closure'"),
    (ValueError, lambda: fl.metric(on="evaluation"), "at least one name"),
    *(
        (ValueError, lambda name=name: fl.metric(**{name: number}), "choose another name")
        for name in ("lr", "lr/1", "recent/x", "loss")
    ),
    (ValueError, lambda: fl.metric(on=number), "A metric cannot have this name"),
    (TypeError, lambda: fl.metric(**N, loaders=number), "A metric cannot have this name"),
    (TypeError, lambda: fl.metric(**N, loaders="test"), r'Write loaders=\("test",\)'),
    (TypeError, lambda: fl.metric(**N, loaders=(3,)), "loaders"),
    *(
        (ValueError, lambda on=on: fl.metric(**N, on=on, loaders=("train",)), "leave out")
        for on in ("training", "evaluation")
    ),
    (ValueError, lambda: fl.plateau("valid/thing"), "mode"),
    (ValueError, lambda: fl.plateau("valid/loss", 1.0), "factor below 1"),
    (TypeError, lambda: fl.schedule(schedules.cosine), r"Call it: cosine\(\)"),
    (TypeError, lambda: fl.schedule(number, only=("first", 3)), r'such as \("rest",'),
    (TypeError, lambda: fl.schedule(number, only=("first", "")), r'such as \("rest",'),
    (ValueError, lambda: fl.spike_guard(ratio=1), "spike_guard expects ratio > 1"),
    (ValueError, lambda: fl.throughput(flops=1.0), r"together; got flops=1\.0, peak=None"),
    (ValueError, lambda: fl.throughput(peak=1.0), r"together; got flops=None, peak=1\.0"),
]
GUARDS = {"skip_nonfinite": fl.skip_nonfinite(), "spike_guard": fl.spike_guard()}
COMPANY = [  # a pipeline of these is refused
    (fl.clip(1.0), fl.clip(2.0), r"clip\(1.0\) .*one name"),
    (fl.clip(1.0), fl.clip(2.0, name="b"), r"clip\(1.0\) .*clips all parameters"),
    (fl.clip(1.0, only="0", name="a"), fl.clip(2.0), "clips all parameters, those of"),
    (fl.clip(1.0, only="0", name="a"), fl.clip(2.0, name="b"), "clips all parameters, those of"),
    (fl.clip_value(1.0), fl.clip_value(2.0), r"Leave one out\.$"),
    (fl.clip(1.0), fl.grad_norm(), r"clip\(1\.0\) reports the metric 'grad_norm' already"),
    (fl.grad_norm(), fl.clip(1.0), r"clip\(1\.0\) reports the metric 'grad_norm' already"),
    (fl.ema(0.9), fl.ema(0.99), r"have one name, 'ema'.*give one another name: name=\"...\""),
    (fl.ema(evaluate="only"), fl.swa(evaluate="only"), "would both be evaluated alone"),
    (fl.metric(a=number), fl.metric(a=number, b=number), r"metric\(a=.*, b=.* both report 'a'"),
    (ON, TWO, "both report 'x': rename one"),
    (fl.derive(x=double_loss), TWO, "both report 'x': rename one"),
    (fl.torch_scheduler(torch_scheduler), fl.plateau("valid/loss"), "use schedule with plateau"),
    (fl.closure(), CLOSURE, r"both listed: leave closure\(\) out"),
    (fl.accumulate(2), CLOSURE, "changes gradients in place"),
    (fl.amp("fp16"), CLOSURE, "changes gradients in place"),
    (CLOSURE, fl.microbatch(2), "changes gradients in place"),
    (CLOSURE, fl.retry_on_oom(), "changes gradients in place"),
    (fl.compiled(update=True), fl.closure(), "calls the optimizer with a closure"),
    (fl.tbptt(2), fl.accumulate(2), r"accumulate\(2\) makes"),
    (fl.microbatch(2), fl.tbptt(3), r"what tbptt\(3\) carries on belongs to all of them"),
    (fl.retry_on_oom(), fl.tbptt(3), r"what tbptt\(3\) carries on belongs to all of them"),
    (GRAPH, fl.tbptt(2), "a new carry"),
    (GRAPH, fl.sam(), "cannot capture sam"),
    (GRAPH, fl.closure(), "cannot capture"),
    (fl.microbatch(2), fl.retry_on_oom(), GRAPH, r"cannot capture retry.*then list microbatch"),
    (GRAPH, fl.compiled(mode="reduce-overhead"), "makes CUDA graphs of its own"),
    (GRAPH, fl.compiled(options=NESTED), "makes CUDA graphs of its own"),
    *((x, fl.amp("fp16"), r"List it first") for x in (fl.clip(1.0), fl.clip_value(1), fl.sam())),
    *(
        (*members, rf"{name}\(\) judges whole updates")
        for name, guard in GUARDS.items()
        for members in (
            *((guard, fl.amp("fp16")), (guard, fl.sam())),
            *((fl.clip(1.0), guard, fl.accumulate(2)), (guard, fl.clip(1.0), fl.accumulate(2))),
            *((fl.sam(), guard, fl.accumulate(2)), (own_guard(), guard, fl.accumulate(2))),
            (guard, fl.accumulate(2, dtype=torch.float32)),
            (guard, fl.accumulate(total=4, dtype=torch.float32)),
        )
    ),
]


@pytest.mark.parametrize(("error", "make", "message"), SETTINGS)
def test_a_setting_that_cannot_be_is_refused_when_composing(error, make, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("row", COMPANY, ids=repr)
def test_middleware_that_do_not_work_together_are_refused_when_composing(row):
    with pytest.raises(ValueError, match=row[-1]):
        fl.pipeline(*row[:-1])(toy_loss)


def test_a_loss_function_without_a_carry_is_refused_when_composing():
    with pytest.raises(TypeError, match=r"takes \(model, batch, carry\)"):
        fl.pipeline(fl.tbptt(2))(toy_loss)


@pytest.mark.parametrize("typed", [
    "accumulate(total=64)", "accumulate({0: 8, 4: 4})", "clip(1.0, norm_type=3.0)",
    "compiled(mode='max-autotune-no-cudagraphs')", "compiled(dynamic=True)", "cuda_graph(warmup=5)",
    "ema(0.5, every=2)", "swa(10, evaluate='only')", "derive(double=double_loss)",
    "throughput('weight', flops=1.0, peak=2.0)", "timings()", "device_memory()",
])  # fmt: skip
def test_it_shows_compares_and_pickles_as_it_was_typed(typed):
    names = {name: getattr(fl, name) for name in fl.__all__} | {"double_loss": double_loss}
    made, again = eval(typed, names), eval(typed, names)
    assert repr(made) == typed and made == again
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made)
    pipe = fl.pipeline(fl.accumulate(1), made) if "accumulate" not in typed else fl.pipeline(made)
    assert pickle.loads(pickle.dumps(pipe(toy_loss))).pipeline == pipe != fl.pipeline()
    assert repr(pipe(toy_loss)) == f"{pipe!r}(toy_loss)"


def test_the_diagram_shows_what_acts_in_evaluation():
    text = str(fl.pipeline(fl.ema(0.5, every=2), ON)(toy_loss))
    assert "update" in text and "ema(0.5, every=2) in evaluation" in text
    assert "metric(x=number, on='evaluation') in evaluation" in text
