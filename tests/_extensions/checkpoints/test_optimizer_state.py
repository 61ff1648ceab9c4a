"""How the state of an optimizer is saved, what loading it restores, and what it refuses."""

import _thread
import copy
import gc
import sys
import weakref

import pytest
import torch
from crafted import craft
from safetensors.torch import load_file, save_file
from sample_optimizers import (
    SAVED,
    CountingSaved,
    Tensors,
    Typed,
    check_resumes,
    facts_of,
    toy_state,
    toy_step,
)
from sample_tensors import Compressed, Halves, OtherCompressed, Sparse
from saved import ONE, check_continues, check_refused, sgd
from torch import nn
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop._extensions.checkpoints import files, format, named
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.named import NamedOptimizer
from fnloop._extensions.checkpoints.optimizer import encode_optimizer
from fnloop._extensions.checkpoints.save import check_resumable
from fnloop.testing import assert_same, small

SGD, Adam = torch.optim.SGD, torch.optim.Adam


class Own(Adam):
    """An optimizer with a method of its own, so that it is saved by its ``state_dict``."""

    def load_state_dict(self, saved):
        super().load_state_dict(saved)


@pytest.mark.parametrize("make", SAVED)
def test_everything_an_optimizer_keeps_is_restored(tmp_path, make):
    new = lambda seed=0: toy_state(make, w=7.0 * seed)
    check_resumes(tmp_path, new, toy_step, [ONE] * 6, splits=range(1, 8))


def test_the_settings_of_an_optimizer_are_human_readable(tmp_path):
    state = toy_state(Typed)
    state.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    facts = facts_of(fl.save(state, tmp_path / "a"))["param_groups"][0]
    found = [facts[name] for name in ("lr", "momentum_dtype", "shape_of")]
    assert found == [
        {"$scalar": 0.1, "dtype": "float32"}, {"$dtype": "float16"}, {"$setting": "max"},
    ]  # fmt: skip


def test_a_sharded_model_is_refused_if_the_optimizer_has_its_own_state_dict():
    state = toy_state(CountingSaved)
    names = NamedOptimizer.of_state(state)[""].names
    with pytest.raises(fl.CheckpointError, match="has its own state_dict and the model is sharded"):
        encode_optimizer(NamedOptimizer(state.optimizer, names, sharded=True), {})


def test_state_dict_hooks_are_called(tmp_path):
    def new(tag, lr=1.0):
        state, tags = toy_state(lambda params: SGD(params, lr=lr, momentum=0.5)), [tag]
        put = lambda optimizer, saved: {**saved, "tag": tags[-1]}
        take = lambda optimizer, saved: tags.append(saved["tag"])
        state.optimizer.register_state_dict_post_hook(put)
        state.optimizer.register_load_state_dict_pre_hook(take)
        return state, tags

    half = fl.fit(toy_step, new("a")[0], [ONE] * 2, hooks=())
    state, tags = new("b", lr=0.5)
    check_resumable(state)
    restored = fl.restore(fl.save(half, tmp_path / "a"), state)
    assert tags[-1] == "a" and restored.optimizer.param_groups[0]["lr"] == 1.0
    assert_same(restored, half)


@pytest.mark.parametrize("kind", [lambda params: SGD(params, lr=0.0, foreach=False), CountingSaved])
@pytest.mark.parametrize(
    ("saved", "here"),
    [(0.1, torch.tensor(0.5)), (torch.tensor(0.1), 0.5), (torch.tensor(0.1), torch.tensor(0.5))],
)
def test_a_learning_rate_may_be_a_number_or_a_tensor(tmp_path, kind, saved, here):
    old, new = toy_state(kind), toy_state(kind)
    old.optimizer.param_groups[0]["lr"] = saved
    new.optimizer.param_groups[0]["lr"] = here = copy.deepcopy(here)
    restored = fl.restore(fl.save(old, tmp_path / "a"), new).optimizer.param_groups[0]["lr"]
    assert type(restored) is type(here) and float(restored) == pytest.approx(0.1)
    assert restored is here or isinstance(here, float)


@pytest.mark.parametrize("saved", [torch.tensor([0.1, 0.2]), torch.tensor([0.1])])
@pytest.mark.parametrize("here", [torch.tensor(0.1), torch.tensor([0.1, 0.2, 0.3])])
def test_a_learning_rate_of_another_shape_is_refused(tmp_path, saved, here):
    old, new = toy_state(Tensors), toy_state(Tensors, 7.0)
    old.optimizer.param_groups[0]["lr"], new.optimizer.param_groups[0]["lr"] = saved, here
    path = fl.save(old, tmp_path / "a")
    if saved.numel() > 1 or here.ndim == 0:  # one number fits into any vector
        check_refused(path, new, "lr of a parameter group|cannot be restored")


def test_execution_settings_are_not_restored(tmp_path):
    path = fl.save(toy_state(lambda params: Own(params, foreach=True)), tmp_path / "a")
    restored = fl.restore(path, toy_state(lambda params: Own(params, foreach=False)))
    assert restored.optimizer.param_groups[0]["foreach"] is False


def test_an_error_names_a_function_that_the_new_optimizer_lacks(tmp_path):
    path, state = fl.save(toy_state(Typed), tmp_path / "a"), toy_state(Typed, w=7.0)
    del state.optimizer.param_groups[0]["shape_of"]
    message = "shape_of of a parameter group was max, which a checkpoint can only name"
    check_refused(path, state, message)


def craft_tensor(path, name, change):
    tensors = load_file(file := path / "optimizer.safetensors")
    tensors[name] = change(tensors[name])
    save_file({k: v.contiguous() for k, v in tensors.items()}, file)
    sizes = {"bytes": file.stat().st_size, "sha256": files.disk.checksum_of_file(file)}
    return craft(path, lambda made: made["files"].update({file.name: sizes}))


CRAFTED = {
    "longer": ("Adam", "exp_avg", lambda t: torch.ones(t.numel() + 1)),
    "flat": ("Adam", "exp_avg_sq", lambda t: t.flatten()),
    "whole numbers": ("Adam", "exp_avg", lambda t: t.long()),
    "a vector of steps": ("Adam", "step", lambda t: torch.ones(3)),
    "factored otherwise": ("Adafactor", "row_var", lambda t: torch.ones(7, 1)),
    "history": ("LBFGS", "prev_flat_grad", lambda t: torch.ones(9)),
    "a number": ("Adam", "exp_avg", -1), "nothing": ("AdamW", "exp_avg_sq", None),
    "a list": ("RMSprop", "square_avg", []), "a count": ("Adam", "step", 2),
    "momentum": ("SGD", "momentum_buffer", 0.5),
}  # fmt: skip


@pytest.mark.parametrize(("name", "key", "change"), CRAFTED.values(), ids=CRAFTED)
def test_state_that_no_torch_optimizer_could_have_is_refused(tmp_path, name, key, change):
    """The next update would fail inside torch: other tensors, or plain data in their place."""

    def new():
        torch.manual_seed(0)
        model, more = nn.Linear(3, 2, bias=False), {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), **more)
        return fl.TrainState.create(model, optimizer, seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).square().sum())
    path = fl.save(fl.fit(make, new(), [torch.ones(1, 3)] * 2, hooks=()), tmp_path / "a")
    fl.restore(path, new())  # unchanged, it loads
    if callable(change):
        craft_tensor(path, f"weight.{key}", change)
    else:
        craft(path, facts=lambda facts: facts["optimizer"]["state"]["weight"].update({key: change}))
    message = rf"{key} of weight in the optimizer's state is .* cannot continue with"
    check_refused(path, new(), message)


def refuse(optimizer, saved):
    optimizer.param_groups[0]["momentum"] = 0.0
    raise ValueError("not today")


@pytest.mark.parametrize(
    "fails", [refuse, lambda self, saved: setattr(self, "updates", -1)], ids=["raises", "changes"]
)
def test_an_optimizer_that_fails_to_load_is_rolled_back(tmp_path, fails):
    class Breaks(CountingSaved):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)
            if saved["updates"] == 4:
                for group in self.param_groups:
                    group["lr"] = 99.0
                fails(self, saved)

    path = fl.save(fl.fit(toy_step, toy_state(Breaks), [ONE] * 4, hooks=()), tmp_path / "a")
    state = fl.fit(toy_step, toy_state(Breaks, w=7.0), [ONE] * 2, hooks=())
    optimizer = state.optimizer
    before = copy.deepcopy((state.model.w, optimizer.state_dict()))
    groups = optimizer.param_groups
    message = "Breaks.load_state_dict does not (accept|restore) what its state_dict returned"
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state)
    assert find_difference(before, (state.model.w, optimizer.state_dict()), "") is None
    assert optimizer.param_groups is groups and optimizer.updates == 2
    ended = fl.fit(toy_step, state, [ONE] * 3, hooks=())
    assert ended.model.w.item() == 7 - (0 + 1 + 2 + 3 + 4)  # it continues


def test_a_checkpoint_by_name_loads_into_one_with_its_own_state_dict(tmp_path, monkeypatch):
    whole, half = (fl.fit(toy_step, toy_state(Own), [ONE] * 4, steps=n, hooks=()) for n in (4, 2))
    with monkeypatch.context() as patch:
        # As older versions did
        patch.setattr(named, "has_own_state_dict", lambda optimizer: False)
        path = fl.save(half, tmp_path / "a")
    assert list(facts_of(path)) == ["class", "param_groups", "state"]
    restored = fl.restore(path, toy_state(Own))
    assert_same(fl.fit(toy_step, restored, [ONE] * 4, epochs=1, hooks=()), whole)


@pytest.mark.parametrize("kind", [Adam, Own])
def test_not_strict_leaves_out_the_state_of_other_parameters(kind, tmp_path, caplog):
    def new(size):
        model = nn.Linear(size, 1)
        return fl.TrainState.create(model, kind(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).mean())
    path = fl.save(fl.fit(make, new(2), [torch.ones(1, 2)], hooks=()), tmp_path / "a")
    assert len(fl.restore(path, new(2), strict=False).optimizer.state) == 2
    message = r"of parameters of another shape: weight: \(1, 2\) saved, \(1, 3\) here"
    check_refused(path, new(3), message, only=("optimizer",))
    left = fl.restore(path, new(3), strict=False).optimizer.state
    assert len(left) == (kind is Adam)
    assert kind is Adam or "left unchanged: the state of Own" in caplog.text


def many_state(n):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(n)])
    return sgd(model, 0.1, momentum=0.9)


def count_calls(function):
    """Return how many functions are called by this thread, in Python or in C."""
    events = []
    gc.collect()
    gc.disable()  # what it finalizes, of earlier tests too, would count
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return sum("call" in event for event in events)


def no_thread(*_):
    raise RuntimeError("can't start new thread")


def test_twice_the_parameters_take_twice_the_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(_thread, "start_new_thread", no_thread)  # this one writes every file
    step = fl.pipeline()(lambda model, x: torch.cat(tuple(model)).mean() * x)
    calls = {"save": [], "restore": []}
    for n in (50, 100):
        state = fl.fit(step, many_state(n), [torch.ones(())], hooks=())
        fl.restore(fl.save(state, tmp_path / "a"), many_state(n))  # what is found out once
        calls["save"].append(count_calls(lambda: fl.save(state, tmp_path / "a")))
        calls["restore"].append(count_calls(lambda: fl.restore(tmp_path / "a", many_state(n))))
    assert all(many <= 2.5 * few for few, many in calls.values()), calls


@pytest.mark.parametrize("several", [False, True])
def test_state_is_read_once_and_not_copied(tmp_path, monkeypatch, several):
    """The tensors that were read are those that the optimizer holds; of channels_last, copies."""
    torch.manual_seed(0)

    def new():
        model = nn.Sequential(nn.Conv2d(2, 2, 2, bias=False), nn.Flatten(), nn.Linear(2, 2))
        model.to(memory_format=torch.channels_last)
        first, rest = [p for p in model.parameters() if p.ndim == 4], model[2].parameters()
        adam = Adam([*first, *rest], foreach=False)
        given = {"a": Adam(first, foreach=False), "b": Adam(model[2].parameters())}
        return fl.TrainState.create(model, given if several else adam, seed=0)

    x = torch.arange(8.0).view(1, 2, 2, 2)
    state = fl.fit(fl.pipeline()(lambda model, x: model(x).square().mean()), new(), [x], hooks=())
    path, read = fl.save(state, tmp_path / "a"), []
    whole = format.Slices.read
    note = lambda *given: (t := whole(*given), read.append(weakref.ref(t)))[0]
    monkeypatch.setattr(format.Slices, "read", note)
    monkeypatch.setattr(files, "MOST_KEPT", 0)  # small files are read in another way
    restored = fl.restore(path, new())
    assert_same(restored, state)
    optimizers = restored.optimizer.values() if several else [restored.optimizer]
    held = {id(t) for o in optimizers for s in o.state.values() for t in s.values()}
    metrics = {id(metric.total) for metric in restored.metrics.values()}
    left = {id(t()) for t in read if t() is not None} - metrics
    assert left <= held and len(left) == 3 * 3 - 2  # the two moments of the convolution are copies


# --- tensors of subclasses


def wide_state(make, fill=0.0):
    model = nn.ParameterDict({"wide": torch.full((64, 64), fill), "small": torch.full((2,), fill)})
    return fl.TrainState.create(model, make(model.parameters()), seed=0)


# Each update subtracts the momentum of a gradient of 0.75: 0.75, 1.125, 1.3125.
wide_step = fl.pipeline()(lambda model, x: 0.75 * (model["wide"].sum() + model["small"].sum()) * x)


def test_a_tensor_of_a_subclass_is_saved_as_its_parts_and_made_again(tmp_path):
    saves = (fl.checkpoint(tmp_path / "run"),)
    half = fl.fit(wide_step, wide_state(Compressed), [ONE[0]] * 3, steps=2, hooks=saves)
    path = fl.latest(tmp_path / "run")
    tensors = load_file(path / "optimizer.safetensors")
    parts = ["small.momentum", "wide.momentum.inner.rest", "wide.momentum.inner.whole"]
    assert [tensors.pop(name).dtype for name in parts] == [
        torch.float32, torch.float32, torch.int32,
    ]  # fmt: skip
    assert not tensors
    restored = fl.restore(path, wide_state(Compressed, 7.0))
    held = restored.optimizer.state[restored.model["wide"]]["momentum"]
    assert type(held) is Halves and held.note == "large" and held.joined()[0, 0] == 1.125
    assert_same(restored, half)
    assert_same(fl.snapshot(restored), restored)
    state = fl.fit(wide_step, restored, [ONE[0]] * 3, steps=3, hooks=saves)
    assert state.model["wide"].unique().tolist() == [-(0.75 + 1.125 + 1.3125)]
    assert_same(fl.resume(tmp_path / "run", wide_state(Compressed)), state)


@pytest.mark.parametrize("make", [OtherCompressed, lambda params: SGD(params, 1.0, momentum=0.5)])
def test_a_class_in_a_checkpoint_is_only_compared_with_what_the_program_makes(tmp_path, make):
    path = fl.save(fl.fit(wide_step, wide_state(Compressed), [ONE[0]], hooks=()), tmp_path / "a")
    kind = type(make([nn.Parameter(torch.ones(1))])).__name__
    craft(path, facts=lambda facts: facts["optimizer"].update({"class": kind}))
    check_refused(path, wide_state(make, 7.0), f"state in Halves, and {kind} keeps none there")


@pytest.mark.parametrize("change", [
    lambda parts: parts["inner"].pop("rest"), lambda parts: parts["inner"].update(more=1),
    lambda parts: parts["inner"].update(whole=3), lambda parts: parts.update(size=[2, 2]),
    lambda parts: parts.update(context=None),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused_and_the_state_stays(tmp_path, change):
    path = fl.save(fl.fit(wide_step, wide_state(Compressed), [ONE[0]], hooks=()), tmp_path / "a")
    state = fl.fit(wide_step, wide_state(Compressed, 7.0), [ONE[0]] * 2, hooks=())
    facts = lambda facts: change(facts["optimizer"]["state"]["wide"]["momentum"]["parts"])
    check_refused(craft(path, facts=facts), state, "cannot be restored")


class Noted(Halves):
    """Its parts do not tell how large it was."""

    def __tensor_flatten__(self):
        return ["whole", "rest"], {"note": self.note, "dtype": self.dtype}

    def joined(self):
        return super().joined() * (self.note == "large")

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["whole"], inner["rest"])


class Mine(Compressed):
    kind = Noted


@pytest.mark.parametrize(("make", "fault"), [
    (Sparse, r"wide.momentum is a tensor \(torch.sparse_coo"),
    (Mine, "weights.wide differs"),
])  # fmt: skip
def test_a_tensor_that_is_not_restored_exactly_is_refused_at_once(tmp_path, make, fault):
    state = wide_state(make)
    message = f"a run with {make.__name__} cannot be resumed .*{fault}"
    with pytest.raises(fl.CheckpointError, match=message):
        fl.fit(wide_step, state, [ONE[0]], hooks=(fl.checkpoint(tmp_path),))
    assert state.step == 0 and not state.optimizer.state and not list(tmp_path.iterdir())


# --- the optimizers and schedulers of torch


def sequential(optimizer, run):  # MultiStepLR keeps a Counter
    constant = lr_scheduler.ConstantLR(optimizer, 0.1, 2)
    falling = lr_scheduler.MultiStepLR(optimizer, [1, 3, 3, 4])
    return lr_scheduler.SequentialLR(optimizer, [constant, falling], milestones=[2])


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # a warning of SequentialLR
@pytest.mark.parametrize(
    "factory", [lambda opt, run: lr_scheduler.LambdaLR(opt, lambda i: 0.5**i), sequential]
)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_torch_schedulers_resume_with_a_number_or_a_tensor_as_learning_rate(tmp_path, factory, lr):
    def new():
        model, rate = small().state().model, copy.deepcopy(lr)
        adam = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        return fl.TrainState.create(model, adam, seed=0)

    step = fl.pipeline(fl.torch_scheduler(factory))(small().loss_fn)
    check_continues(tmp_path, new, step, small().batches, epochs=3)


def test_sparse_adam_resumes(tmp_path):
    def new():
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        return fl.TrainState.create(model, torch.optim.SparseAdam(model.parameters()), seed=0)

    step = fl.pipeline()(lambda model, batch: model(batch).square().mean())
    check_continues(tmp_path, new, step, [torch.tensor([0, 1]), torch.tensor([1, 4])], splits=[3])


def test_groups_schedules_complex_numbers_and_parameters_of_the_loss_are_restored(tmp_path):
    def run(steps, restored=None):
        model, data = nn.Module(), [ONE[0]] * 4
        model.z = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        model.register_buffer("turn", torch.tensor([0.5j], dtype=torch.complex128))
        own = nn.Parameter(torch.tensor([2j], dtype=torch.complex128))
        groups = [{"params": [model.z], "lr": 0.5}, {"params": [own], "lr": 0.25}]
        state = fl.TrainState.create(model, Adam(groups), seed=0)
        state = fl.restore(restored, state) if restored else state
        step = fl.pipeline(fl.schedule(fl.schedules.exponential(0.5)))
        step = step(lambda m, batch: (m.z * own * m.turn).abs().sum() * batch)
        return fl.fit(step, state, data, epochs=1, steps=steps, hooks=()), own

    (whole, own), (half, _) = run(4), run(2)
    resumed, other = run(4, fl.save(half, tmp_path / "a"))
    assert_same(resumed, whole)
    assert torch.equal(own, other) and own.item() != 2j
    assert resumed.model.z.dtype is torch.complex128
    assert [g["lr"] for g in resumed.optimizer.param_groups] == [0.5 / 8, 0.25 / 8]
