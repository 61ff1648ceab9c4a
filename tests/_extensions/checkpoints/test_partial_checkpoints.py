"""Checkpoints of some parts of a state: what they hold, and what they are refused for."""

import itertools
import json
import os

import attrs
import pytest
import torch
from crafted import craft
from safetensors.torch import load_file
from sample_optimizers import Counting
from saved import ONE, check_refused, names, saved_steps, stop_at
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints.format import PARTS
from fnloop.testing import assert_same, toy, toy_loss

step = fl.pipeline(fl.schedule(fl.schedules.linear()))(toy_loss)
text_of = lambda path: json.loads((path / "state.json").read_text())


def trained(state=None, **settings):
    state = toy(w=3.0) if state is None else state
    settings = {"epochs": 2, "steps": 3, "hooks": (), **settings}
    return fl.fit(step, state, ([ONE] * 2, [ONE]), **settings)


# --- the model alone


def test_weights_alone_are_restored_into_a_new_run(tmp_path):
    state = attrs.evolve(trained(), extra={"mine": "secret"})
    path = fl.save(state, tmp_path / "a", only=("model",))
    new = fl.restore(path, toy(lr=0.5), only=("model",))
    assert (new.model.w.item(), new.step, len(new.history)) == (state.model.w.item(), 0, 0)
    assert new.optimizer.param_groups[0]["lr"] == 0.5
    assert new.slots == {} and new.run_id != state.run_id
    model = fl.testing.Toy()
    model.load_state_dict(load_file(path / "model.safetensors"))
    assert model.w.item() == state.model.w.item()
    assert load_file(path / "optimizer.safetensors") == load_file(path / "slots.safetensors") == {}
    written = text_of(path)
    assert written["history"] == [] and "secret" not in json.dumps(written)
    assert not {"optimizer", "slots", "metrics", "step", "generators"} & {*written}


@pytest.mark.parametrize("n", [1, 2, 6])
def test_any_parts_are_restored_as_from_a_whole_checkpoint(tmp_path, n):
    state = attrs.evolve(trained(), extra={"mine": [1, 2]})
    whole = fl.save(state, tmp_path / "whole")
    for i, only in enumerate(itertools.combinations(PARTS, n)):
        path = fl.save(state, tmp_path / str(i), only=only)
        mine, theirs = (fl.restore(p, toy(), only=only) for p in (path, whole))
        assert_same(mine, theirs)
        assert (mine.extra, mine.metrics.keys()) == (theirs.extra, theirs.metrics.keys())
        assert (mine.run_id == state.run_id) == (mine.step == 3) == ("counters" in only)
        assert (mine.model.w.item() != 0.0) == ("model" in only)


def test_all_parts_make_a_whole_checkpoint_in_the_format_of_before(tmp_path):
    state = trained()
    path = fl.save(state, tmp_path / "a", only=PARTS[::-1])
    assert "parts" not in text_of(path) and text_of(path)["format_version"] == 1
    assert_same(fl.resume(path, toy()), state)
    partial = fl.save(state, tmp_path / "b", only=PARTS[:-1])
    assert text_of(partial)["format_version"] == 2  # an older fnloop says that it is too new


def test_training_continues_from_all_but_the_frozen_weights(tmp_path):
    parts = ("trained", *PARTS[1:])
    state, whole = adapted(), adapted()
    path = fl.save(run(state, steps=3), tmp_path / "a", only=parts)
    resumed, whole = run(fl.restore(path, adapted(), only=parts)), run(whole)
    for name, p in resumed.model.named_parameters():
        assert torch.equal(p, whole.model.get_parameter(name))
    assert resumed.step == whole.step == 5 and resumed.run_id == state.run_id
    assert resumed.history[-1].metrics == whole.history[-1].metrics


# --- the parameters that require gradients


class Adapter(nn.Module):
    """A linear layer with a low-rank update, as LoRA has."""

    def __init__(self, n=300, rank=1):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(n, n).requires_grad_(False)
        self.norm = nn.BatchNorm1d(n, affine=False)
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, n, bias=False)
        self.again = nn.Linear(n, rank, bias=False)
        self.again.weight = self.down.weight  # tied

    def forward(self, x):
        return self.norm(self.base(x) + self.up(self.down(x) + self.again(x)))


def adapted(shift=0.0, freeze=True, **settings):
    model = Adapter(**settings)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(shift)
    model.base.requires_grad_(not freeze)
    trained = [p for p in model.parameters() if p.requires_grad]
    return fl.TrainState.create(model, torch.optim.SGD(trained, lr=0.1, momentum=0.9), seed=0)


def run(state, **settings):
    x = [torch.randn(4, 300, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    loss = lambda model, batch: (model(batch) - 1).square().mean()
    return fl.fit(fl.pipeline()(loss), state, x, epochs=1, **{"hooks": (), **settings})


TRAINED = ["again.weight", "down.weight", "up.weight"]


def check_trained(model, expected, base):
    found, others = expected.state_dict(), base.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, found[name] if name in TRAINED else others[name]), name


def test_trained_parameters_are_kilobytes_and_go_into_a_model_with_other_frozen_ones(tmp_path):
    state = run(adapted())
    path = fl.save(state, tmp_path / "a", only=("trained",))
    assert sorted(load_file(path / "model.safetensors")) == TRAINED
    assert sum(file.stat().st_size for file in path.iterdir()) < 8000 < 300 * 300
    new = fl.restore(path, adapted(1.0), only=("trained",))
    check_trained(new.model, state.model, adapted(1.0).model)
    assert (new.step, new.model.base.weight.requires_grad) == (0, False)
    assert new.model.again.weight is new.model.down.weight
    model = Adapter()
    found = model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    assert found.unexpected_keys == [] and torch.equal(model.up.weight, state.model.up.weight)


@pytest.mark.parametrize("only", [None, ("model",)])
def test_trained_parameters_are_taken_out_of_a_checkpoint_with_all(tmp_path, only):
    state = run(adapted())
    path = fl.save(state, tmp_path / "a", only=only)
    new = fl.restore(path, adapted(1.0, freeze=False), only=("trained",))
    check_trained(new.model, state.model, adapted(1.0).model)


def test_trained_parameters_of_another_shape_or_name_are_refused(tmp_path):
    path = fl.save(adapted(), tmp_path / "a", only=("trained",))
    for other in (adapted(rank=2), toy()):
        message = r"is of another model .*only=\('trained',\), strict=False"
        check_refused(path, other, message, only=("trained",))
    fl.restore(path, adapted(rank=2), only=("trained",), strict=False)


def test_parameters_to_train_that_are_not_there_are_named(tmp_path, caplog):
    path = fl.save(adapted(), tmp_path / "a", only=("trained",))
    fl.restore(path, adapted(), only=("trained",))
    assert not caplog.records
    fl.restore(path, adapted(freeze=False), only=("trained",))
    assert "not in the checkpoint, left unchanged: base.weight, base.bias" in caplog.text


def test_nothing_to_train_is_nothing_to_save(tmp_path):
    state, message = toy(), "the parameters that require gradients; none does"
    state.model.requires_grad_(False)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(state, tmp_path / "a", only=("trained",))
    assert not (tmp_path / "a").exists()


# --- what a partial checkpoint is refused for


@pytest.mark.parametrize(("saved", "asked", "said"), [
    (("model", "history"), ("model", "optimizer"), "holds only model, history"),
    (("optimizer",), ("trained",), "holds only optimizer"),  # which are a part of the model
    (("trained",), ("model",), r'holds only trained.*only=\("trained",\)'),
    (("history", "model", "history"), None,
     r'/a is a partial checkpoint, which holds only model, history\. To restore that: '
     r'restore\(".*/a", state, only=\("model", "history"\)\)$'),
])  # fmt: skip
def test_parts_that_are_not_there_are_refused(tmp_path, saved, asked, said):
    check_refused(fl.save(toy(), tmp_path / "a", only=saved), toy(w=7.0), said, only=asked)


@pytest.mark.parametrize("where", [".", "step-00000003"])
def test_a_run_cannot_be_resumed_from_partial_checkpoints_only(tmp_path, where):
    trained(hooks=(fl.checkpoint(tmp_path, only=("model",)),))
    state = toy()
    with pytest.raises(fl.CheckpointError) as error:
        fl.resume(tmp_path / where, state)
    for said in (
        "a run cannot be resumed: ", 'step-00000003", state, only=("model",))',
        "checkpoint(folder) without only=",
    ):  # fmt: skip
        assert said in str(error.value)
    assert trained(state).step == 3


def test_resume_takes_the_newest_whole_checkpoint_that_is_not_damaged(tmp_path):
    state = trained(hooks=(fl.checkpoint(tmp_path),))
    fl.save(toy(w=9.0), tmp_path / "step-00000004", only=("model",))
    assert_same(fl.resume(tmp_path, toy()), state)
    assert fl.latest(tmp_path).name == "step-00000004"
    for n, only in ((5, None), (6, ("trained",))):
        fl.save(toy(w=9.0), tmp_path / f"step-{n:08d}", only=only)
        os.truncate(tmp_path / f"step-{n:08d}" / "model.safetensors", 9)
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert_same(fl.resume(tmp_path, toy()), state)


PARTS_OF = lambda parts: lambda made: made.update(parts=parts)


@pytest.mark.parametrize("parts", [["weights"], 3, [["model"]], None])
def test_a_partial_checkpoint_is_verified(tmp_path, parts):
    path = fl.save(toy(), tmp_path / "a", only=("model",))
    if parts is None:
        (file := path / "model.safetensors").write_bytes(file.read_bytes()[:-1] + b"?")
        message = r"the checksum of model\.safetensors is wrong"
    else:
        craft(path, PARTS_OF(parts))
        message = r"manifest\.json is damaged"
    check_refused(path, toy(), message, only=("model",))


@pytest.mark.parametrize("parts", [["model", "optimizer"], 3, None, ["model", "slots", "counters"]])
def test_a_list_of_parts_that_are_not_there_is_refused(tmp_path, parts):
    path = craft(fl.save(toy(), tmp_path / "a", only=("model",)), facts=PARTS_OF(parts))
    message = "cannot be restored|holds only|is damaged: parts"
    check_refused(path, toy(), message, only=("model", "optimizer"))


# --- the hook


def test_the_hook_keeps_the_best_weights_and_the_newest(tmp_path):
    rates = fl.schedule(lambda i, total: (1, 1, -1, -1, -1)[i])  # w is -1, -2, -1, 0, 1
    saves = fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=1, best="valid/loss", only=("model",)))
    fl.fit(fl.pipeline(rates)(toy_loss), toy(), ([ONE], [ONE]), epochs=5, hooks=(saves,))
    assert saved_steps(tmp_path) == [2, 5]
    assert (fl.best(tmp_path).name, fl.latest(tmp_path).name) == ("step-00000002", "step-00000005")
    assert fl.restore(fl.best(tmp_path), toy(), only=("model",)).model.w.item() == -2.0
    with pytest.raises(fl.CheckpointError, match="has checkpoints of another run"):
        trained(hooks=(fl.checkpoint(tmp_path, only=("model",)),))


def test_whole_and_partial_checkpoints_of_one_run_side_by_side(tmp_path):
    def hooks():
        best = fl.checkpoint(tmp_path / "a" / "best", only=("model",))
        each = fl.every(steps=1)(fl.checkpoint(tmp_path / "a", keep=1))
        return each, fl.when_improved("valid/loss")(best)

    trained(hooks=(*hooks(), stop_at(2)))
    state = attrs.evolve(fl.resume(tmp_path / "a", toy()), stop=None)
    state = trained(state, hooks=hooks())
    assert_same(state, trained())
    assert saved_steps(tmp_path / "a" / "best") == [2, 3]


def test_in_the_background_and_on_an_exception(tmp_path):
    def fail(state):
        raise KeyError("no")

    settings = {"keep": None, "background": True, "on_exception": True}
    saves = fl.checkpoint(tmp_path, **settings, only=("trained",))
    hooks = (fl.every(steps=2)(saves), fl.when(lambda state: state.step == 3)(fail))
    with pytest.raises(KeyError):
        trained(hooks=hooks, steps=None)
    assert names(tmp_path) == ["step-00000002", "step-00000003-exception_KeyError"]
    for path in tmp_path.iterdir():
        assert fl.restore(path, toy(), only=("trained",)).model.w.item() != 0.0


def test_an_optimizer_that_is_not_saved_need_not_be_resumable(tmp_path, caplog):
    model, plain = fl.testing.Toy(), fl.pipeline()(toy_loss)
    state = fl.TrainState.create(model, Counting(model.parameters()))
    fl.save(state, tmp_path / "c", only=("model",))
    assert not caplog.records
    with pytest.raises(fl.CheckpointError, match="Counting"):
        fl.fit(plain, state, [ONE], hooks=(fl.checkpoint(tmp_path / "a"),))
    fl.fit(plain, state, [ONE], hooks=(fl.checkpoint(tmp_path / "b", only=("model",)),))
    assert saved_steps(tmp_path / "b") == [1]


CALLS = {
    "save": lambda path, only: fl.save(toy(), path, only=only),
    "restore": lambda path, only: fl.restore(path, toy(), only=only),
    "checkpoint": lambda path, only: fl.checkpoint(path, only=only),
}


WRONG = ["model", "", (), ("weights",), ("model", 3), 3, 0, [None], {"model": "x", 3: 4}]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("only", WRONG)
def test_wrong_parts_are_an_error(tmp_path, call, only):
    expected = rf"{call} expects only= as a tuple of model, .*, extra, trained; got "
    with pytest.raises(ValueError, match=expected):
        CALLS[call](tmp_path / "a", only)
    assert not (tmp_path / "a").exists()


def test_one_part_without_a_tuple_says_how_to_write_one():
    with pytest.raises(ValueError, match=r"got 'model': write only=\('model',\)$"):
        fl.checkpoint("a", only="model")
    with pytest.raises(ValueError, match=r"got 'weights'$"):
        fl.checkpoint("a", only="weights")


def test_the_repr_is_the_call(tmp_path):
    hook = fl.checkpoint("runs/a", only=["trained", "model"], named=["valid/loss"])
    assert repr(hook) == "checkpoint('runs/a', keep=3, only=('model',), named=('valid/loss',))"
