"""What loading an optimizer restores, and what it refuses."""

import copy
import json
import shutil
import sys
import weakref

import crafted
import pytest
import torch
from crafted import craft as craft_facts
from safetensors.torch import load_file, save_file
from sample_optimizers import (
    ONE,
    Averaging,
    BothSaved,
    Compressed,
    CountingSaved,
    Forgetful,
    Halves,
    OtherCompressed,
    Slow,
    Sparse,
    Tensors,
    Typed,
    check_resumes,
    facts_of,
    toy_state,
    toy_step,
)
from torch import nn

import fnloop as fl
from fnloop._checkpoint import files, format
from fnloop._checkpoint import optimizer as optimizer_save
from fnloop._checkpoint.save import check_resumable
from fnloop._core.serialize import find_difference
from fnloop.testing import Toy, assert_same, toy_loss

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def check_toy_resumes(folder, make):
    check_resumes(
        folder,
        lambda seed=0: toy_state(make, w=7.0 * seed),
        toy_step,
        [ONE] * 6,
        splits=range(1, 12),
    )


@pytest.mark.parametrize(
    "make", [Slow, Forgetful, BothSaved, CountingSaved, Averaging, Tensors, Typed]
)
def test_everything_an_optimizer_keeps_is_restored(tmp_path, make):
    check_toy_resumes(tmp_path, make)


def test_resumed_weights_equal_those_computed_by_hand(tmp_path):
    state = fl.fit(toy_step, toy_state(CountingSaved), [ONE] * 4, hooks=())
    assert state.model.w.item() == -(0 + 1 + 2 + 3)
    state = fl.restore(fl.save(state, tmp_path / "a"), toy_state(CountingSaved))
    state = fl.fit(toy_step, state, [ONE] * 2, epochs=2, hooks=())
    assert state.model.w.item() == -(0 + 1 + 2 + 3 + 4 + 5)
    # Each update subtracts 0.001 and the count
    state = fl.fit(toy_step, toy_state(Tensors), [ONE] * 3, hooks=())
    state = fl.restore(fl.save(state, tmp_path / "a"), toy_state(Tensors))
    assert isinstance(state.optimizer.param_groups[0]["step"], torch.Tensor)
    state = fl.fit(toy_step, state, [ONE] * 2, epochs=2, hooks=())
    assert round(state.model.w.item()) == -(1 + 2 + 3 + 4 + 5)


def test_state_dict_hooks_are_called(tmp_path):
    def new(tag, lr=1.0):
        state = toy_state(lambda params: SGD(params, lr=lr, momentum=0.5))
        tags = [tag]
        state.optimizer.register_state_dict_post_hook(
            lambda optimizer, saved: {**saved, "tag": tags[0]}
        )
        state.optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, saved: tags.__setitem__(0, saved["tag"])
        )
        return state, tags

    half = fl.fit(toy_step, new("a")[0], [ONE] * 2, hooks=())
    state, tags = new("b", lr=0.5)
    check_resumable(state)
    restored = fl.restore(fl.save(half, tmp_path / "a"), state)
    assert tags == ["a"] and restored.optimizer.param_groups[0]["lr"] == 1.0
    assert_same(restored, half)


@pytest.mark.parametrize("kind", [SGD, CountingSaved])
def test_a_learning_rate_may_be_a_number_or_a_tensor(tmp_path, kind):
    def new(lr):
        state = toy_state(
            lambda params: (
                kind(params) if kind is CountingSaved else kind(params, lr=0.0, foreach=False)
            )
        )
        state.optimizer.param_groups[0]["lr"] = lr
        return state

    for saved, here in (
        (0.1, torch.tensor(0.5)),
        (torch.tensor(0.1), 0.5),
        (torch.tensor(0.1), torch.tensor(0.5)),
    ):
        restored = fl.restore(
            fl.save(new(saved), tmp_path / "a"), new(here)
        ).optimizer.param_groups[0]["lr"]
        assert type(restored) is type(here) and float(restored) == pytest.approx(0.1)
        assert restored is here or isinstance(here, float)


def test_execution_settings_are_not_restored(tmp_path):
    class Mine(Adam):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)

    path = fl.save(toy_state(lambda params: Mine(params, foreach=True)), tmp_path / "a")
    restored = fl.restore(path, toy_state(lambda params: Mine(params, foreach=False)))
    assert restored.optimizer.param_groups[0]["foreach"] is False


def test_an_error_names_a_function_that_the_new_optimizer_lacks(tmp_path):
    path, state = fl.save(toy_state(Typed), tmp_path / "a"), toy_state(Typed, w=7.0)
    del state.optimizer.param_groups[0]["shape_of"]
    with pytest.raises(
        fl.CheckpointError,
        match="shape_of of a parameter group was max, which a checkpoint can only name",
    ):
        fl.restore(path, state)
    assert state.model.w.item() == 7.0


def craft(path, change):
    """Change the optimizer file of a checkpoint, and write the matching checksums."""
    tensors = load_file(path / "optimizer.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "optimizer.safetensors")
    made = json.loads((path / "manifest.json").read_text())
    del made["check"]
    file = path / "optimizer.safetensors"
    made["files"][file.name] = {
        "bytes": file.stat().st_size,
        "sha256": files.checksum_of_file(file),
    }
    (path / "manifest.json").write_text(
        json.dumps({**made, "check": files.checksum_of_manifest(made)})
    )
    return path


CRAFTED = {
    "longer": ("Adam", "exp_avg", lambda t: torch.ones(t.numel() + 1)),
    "flat": ("Adam", "exp_avg_sq", lambda t: t.flatten()),
    "whole numbers": ("Adam", "exp_avg", lambda t: t.long()),
    "a vector of steps": ("Adam", "step", lambda t: torch.ones(3)),
    "factored otherwise": ("Adafactor", "row_var", lambda t: torch.ones(7, 1)),
    "history": ("LBFGS", "prev_flat_grad", lambda t: torch.ones(9)),
}


@pytest.mark.parametrize(("name", "key", "change"), CRAFTED.values(), ids=CRAFTED)
def test_state_that_no_torch_optimizer_could_have_is_refused(tmp_path, name, key, change):
    def new():
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        return fl.TrainState.create(model, getattr(torch.optim, name)(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).square().sum())
    path = fl.save(fl.fit(make, new(), [torch.ones(1, 3)] * 2, hooks=()), tmp_path / "a")
    fl.restore(path, new())  # unchanged, it loads
    state = new()
    before = fl.snapshot(state)
    with pytest.raises(
        fl.CheckpointError,
        match=rf"{key} of weight in the optimizer's state is .* cannot continue with",
    ):
        fl.restore(
            craft(
                path,
                lambda tensors: tensors.update({f"weight.{key}": change(tensors[f"weight.{key}"])}),
            ),
            state,
        )
    assert_same(state, before)


@pytest.mark.parametrize(
    "fails", [lambda self, saved: 1 / 0, lambda self, saved: setattr(self, "updates", -1)]
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
    before, groups = (
        copy.deepcopy((state.model.w, state.optimizer.state_dict())),
        state.optimizer.param_groups,
    )
    with pytest.raises(
        fl.CheckpointError,
        match=r"Breaks.load_state_dict does not (accept|restore) what its state_dict returned",
    ):
        fl.restore(path, state)
    assert find_difference(before, (state.model.w, state.optimizer.state_dict()), "") is None
    assert state.optimizer.param_groups is groups and state.optimizer.updates == 2


def test_a_checkpoint_by_name_still_loads_into_an_optimizer_with_its_own_state_dict(
    tmp_path, monkeypatch
):
    class Mine(SGD):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)

    def new():
        return toy_state(lambda params: Mine(params, lr=1.0, momentum=0.5))

    whole, half = (fl.fit(toy_step, new(), [ONE] * 4, steps=n, hooks=()) for n in (4, 2))
    with monkeypatch.context() as patch:
        # As older versions did
        patch.setattr(optimizer_save, "has_own_state_dict", lambda optimizer: False)
        path = fl.save(half, tmp_path / "a")
    assert list(facts_of(path)) == ["class", "param_groups", "state"]
    assert_same(fl.fit(toy_step, fl.restore(path, new()), [ONE] * 4, epochs=1, hooks=()), whole)


def test_numbers_in_place_of_tensors_as_in_older_checkpoints_still_load(tmp_path):
    state = toy_state(lambda params: Adam(params, lr=torch.tensor(0.5), foreach=False))
    path = fl.save(toy_state(lambda params: Adam(params, lr=0.25)), tmp_path / "a")
    assert facts_of(path)["param_groups"][0]["lr"] == 0.25
    assert fl.restore(path, state).optimizer.param_groups[0]["lr"].item() == 0.25


def test_a_restore_that_is_not_strict_leaves_out_the_state_of_other_parameters(tmp_path, caplog):
    class Mine(Adam):
        def load_state_dict(self, saved):
            super().load_state_dict(saved)

    def new(size):
        model = nn.Linear(size, 1)
        return fl.TrainState.create(model, Mine(model.parameters()), seed=0)

    make = fl.pipeline()(lambda model, batch: model(batch).mean())
    path = fl.save(fl.fit(make, new(2), [torch.ones(1, 2)], hooks=()), tmp_path / "a")
    assert len(fl.restore(path, new(2), strict=False).optimizer.state) == 2
    with pytest.raises(
        fl.CheckpointError,
        match=r"of parameters of another shape: weight: \(1, 2\) saved, \(1, 3\) here",
    ):
        fl.restore(path, new(3), only=("optimizer",))
    assert not fl.restore(path, new(3), strict=False).optimizer.state
    assert "left unchanged: the state of Mine" in caplog.text


class Refusing(torch.optim.SGD):
    """An optimizer with its own ``state_dict``. Loading one changes a setting and then fails."""

    def state_dict(self):
        return super().state_dict()

    def load_state_dict(self, state_dict):
        self.param_groups[0]["momentum"] = 0.0
        raise ValueError("not today")


def test_an_optimizer_that_refuses_a_checkpoint_keeps_its_state_and_settings(tmp_path):
    """The momentum is 1, 2 and 3 in three updates, so the weight is -1, -3 and -6."""

    def make():
        model = Toy()
        optimizer = Refusing(model.parameters(), lr=1.0, momentum=1.0)
        return fl.TrainState.create(model, optimizer, seed=0)

    step = fl.pipeline()(toy_loss)
    state = fl.fit(step, make(), [ONE] * 3, steps=2, hooks=())
    assert state.model.w.item() == -3.0
    with pytest.raises(fl.CheckpointError, match="not today"):
        fl.restore(fl.save(make(), tmp_path / "a"), state)
    state = fl.fit(step, state, [ONE] * 3, steps=3, hooks=())
    assert state.model.w.item() == -6.0


def many_state(n):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(n)])
    return fl.TrainState.create(model, SGD(model.parameters(), lr=0.1, momentum=0.9), seed=0)


def count_calls(function):
    """Return how many functions are called, by Python or in C."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum("call" in event for event in events)


def test_twice_the_parameters_take_twice_the_calls(tmp_path):
    step = fl.pipeline()(lambda model, x: torch.cat(tuple(model)).mean() * x)
    calls = {"save": [], "restore": []}
    for n in (100, 200):
        state = fl.fit(step, many_state(n), [torch.ones(())], hooks=())
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
    monkeypatch.setattr(
        format.Slices, "read", lambda *given: (t := whole(*given), read.append(weakref.ref(t)))[0]
    )
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


def wide_step(n=0.75):
    """Each update subtracts the momentum of a gradient of 0.75: 0.75, 1.125, 1.3125."""
    loss = lambda model, x: n * (model["wide"].sum() + model["small"].sum()) * x
    return fl.pipeline()(loss)


def test_a_tensor_of_a_subclass_is_saved_as_its_parts_and_made_again(tmp_path):
    saves = (fl.checkpoint(tmp_path / "run"),)
    half = fl.fit(wide_step(), wide_state(Compressed), [ONE[0]] * 3, steps=2, hooks=saves)
    path = fl.latest(tmp_path / "run")
    tensors = load_file(path / "optimizer.safetensors")
    assert {name: t.dtype for name, t in tensors.items()} == {
        "wide.momentum.inner.whole": torch.int32,
        "wide.momentum.inner.rest": torch.float32,
        "small.momentum": torch.float32,
    }
    restored = fl.restore(path, wide_state(Compressed, 7.0))
    held = restored.optimizer.state[restored.model["wide"]]["momentum"]
    assert type(held) is Halves and held.note == "large" and held.joined()[0, 0] == 1.125
    assert_same(restored, half)
    assert_same(fl.snapshot(restored), restored)
    state = fl.fit(wide_step(), restored, [ONE[0]] * 3, steps=3, hooks=saves)
    assert state.model["wide"].unique().tolist() == [-(0.75 + 1.125 + 1.3125)]
    assert_same(fl.resume(tmp_path / "run", wide_state(Compressed)), state)


def test_a_class_in_a_checkpoint_is_only_compared_with_what_the_program_makes(tmp_path):
    path = fl.save(fl.fit(wide_step(), wide_state(Compressed), [ONE[0]], hooks=()), tmp_path / "a")
    for make in (OtherCompressed, lambda params: SGD(params, lr=1.0, momentum=0.5)):
        kind = type(make([nn.Parameter(torch.ones(1))]))
        crafted_path = shutil.copytree(path, tmp_path / kind.__name__)
        change = lambda facts, kind=kind: facts["optimizer"].update({"class": kind.__name__})
        state = wide_state(make, 7.0)
        before = fl.snapshot(state)
        with pytest.raises(
            fl.CheckpointError, match=f"state in Halves, and {kind.__name__} keeps none there"
        ):
            fl.restore(craft_facts(crafted_path, facts=change), state)
        assert_same(state, before)


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts["inner"].pop("rest"),
        lambda parts: parts["inner"].update(more=1),
        lambda parts: parts["inner"].update(whole=3),
        lambda parts: parts.update(size=[2, 2]),
        lambda parts: parts.update(context=None),
    ],
)
def test_parts_that_do_not_fit_are_refused_and_the_state_stays(tmp_path, change):
    path = fl.save(fl.fit(wide_step(), wide_state(Compressed), [ONE[0]], hooks=()), tmp_path / "a")
    state = fl.fit(wide_step(), wide_state(Compressed, 7.0), [ONE[0]] * 2, hooks=())
    before = fl.snapshot(state)
    facts = lambda facts: change(facts["optimizer"]["state"]["wide"]["momentum"]["parts"])
    with pytest.raises(fl.CheckpointError, match="cannot be restored"):
        fl.restore(craft_facts(path, facts=facts), state)
    assert_same(state, before)


def test_a_large_tensor_that_no_file_can_hold_is_refused_before_the_first_update(tmp_path):
    state = wide_state(Sparse)
    with pytest.raises(
        fl.CheckpointError,
        match=r"a run with Sparse cannot be resumed .*: "
        r"wide.momentum is a tensor \(torch.sparse_coo",
    ):
        fl.fit(wide_step(), state, [ONE[0]], hooks=(fl.checkpoint(tmp_path),))
    assert state.step == 0 and not state.optimizer.state and not list(tmp_path.iterdir())


def test_a_subclass_that_is_not_restored_exactly_is_refused_before_the_first_update(tmp_path):
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

    with pytest.raises(fl.CheckpointError, match=r"a run with Mine cannot .* weights.wide differs"):
        fl.fit(wide_step(), wide_state(Mine), [ONE[0]], hooks=(fl.checkpoint(tmp_path),))


# --- plain data

PLAIN = {
    "a number": ("Adam", "exp_avg", -1),
    "nothing": ("AdamW", "exp_avg_sq", None),
    "a list": ("RMSprop", "square_avg", []),
    "a count": ("Adam", "step", 2),
    "momentum": ("SGD", "momentum_buffer", 0.5),
}


@pytest.mark.parametrize(("name", "key", "value"), PLAIN.values(), ids=PLAIN)
def test_plain_data_in_the_place_of_a_tensor_is_refused(tmp_path, name, key, value):
    """The next update would fail inside torch."""
    more = {"momentum": 0.9} if name == "SGD" else {}
    state = toy_state(lambda params: getattr(torch.optim, name)(params, lr=0.1, **more))
    state = fl.fit(fl.pipeline()(toy_loss), state, [torch.ones(1)] * 2, hooks=())
    path, before = fl.save(state, tmp_path / "a"), fl.snapshot(state)
    change = lambda facts: facts["optimizer"]["state"]["w"].update({key: value})
    with pytest.raises(
        fl.CheckpointError, match=rf"{key} of w in the optimizer's state is .* cannot continue with"
    ):
        fl.restore(crafted.craft(path, facts=change), state)
    assert_same(state, before)
