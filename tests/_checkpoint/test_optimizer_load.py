"""What loading an optimizer restores, and what it refuses."""

import copy
import json

import crafted
import pytest
import torch
from safetensors.torch import load_file, save_file
from sample_optimizers import (
    ONE,
    Averaging,
    BothSaved,
    CountingSaved,
    Forgetful,
    Slow,
    Tensors,
    Typed,
    check_resumes,
    facts_of,
    toy_state,
    toy_step,
)
from torch import nn

import fnloop as fl
from fnloop._checkpoint import files, optimizer_save
from fnloop._checkpoint.compare import find_difference
from fnloop._checkpoint.trial import check_resumable
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
