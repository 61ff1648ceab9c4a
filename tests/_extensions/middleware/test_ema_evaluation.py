"""The evaluation of an average beside the model, and states that hold an average."""

import functools
import gc
import weakref

import pytest
import torch
from sample_middleware import output_mean
from torch import nn
from toy_runs import ONE, fitted, of

import fnloop as fl
from fnloop.testing import Toy, assert_same, small, stochastic, toy, toy_loss

MEAN = fl.metric(mean=output_mean)
TOP = {"top": lambda aux, batch: fl.Max(3 * aux["output"].max())}
BOTH = functools.partial(fl.metric, mean=output_mean, **TOP)
ONES = {"train": [ONE], "valid": [ONE]}


def trained(*members, problem=None):
    """Return the step and the state of two epochs of a problem."""
    problem = problem or small()
    step = fl.pipeline(*members)(problem.loss_fn)
    loaders = {"train": problem.batches, "valid": problem.batches[:3]}
    return step, fl.fit(step, problem.state(), loaders, epochs=2, hooks=())


def row(state):
    """Return the numbers of "valid" in the newest record, by their names in it."""
    found = state.history[-1].metrics
    return {k.removeprefix("valid/"): v for k, v in found.items() if k.startswith("valid/")}


# --- which numbers there are


@pytest.mark.parametrize("problem", [small(), stochastic()], ids=["small", "stochastic"])
@pytest.mark.parametrize("members", [
    (BOTH(), fl.ema(0.9)), (fl.ema(0.9), BOTH()), (BOTH(on="evaluation"), fl.ema(0.9)),
    (fl.ema(0.9), BOTH(on="evaluation")), (BOTH(loaders=("valid",)), fl.ema(0.9)),
    (fl.amp("bf16"), fl.ema(0.9), BOTH()), (fl.compiled(backend="eager"), fl.ema(0.9), BOTH()),
], ids=repr)  # fmt: skip
def test_loss_and_metrics_are_there_of_both(members, problem):
    step, state = trained(*members, problem=problem)
    found = row(state)
    assert list(found) == ["loss", "mean", "top", "ema/loss", "ema/mean", "ema/top"]
    averaged = fl.evaluate(step, fl.averaged(state), problem.batches[:3])
    for name, value in averaged.items():
        assert found[f"ema/{name}"] == pytest.approx(value, rel=1e-14)
    assert all(found[name] != found[f"ema/{name}"] for name in averaged)
    assert fl.evaluate(step, state, problem.batches[:3]) == found


def test_only_the_average_under_the_plain_names():
    both = row(trained(MEAN, fl.ema(0.9))[1])
    only = row(trained(fl.ema(0.9, evaluate="only"), MEAN)[1])
    assert only == pytest.approx({"loss": both["ema/loss"], "mean": both["ema/mean"]}, rel=1e-14)
    plain = row(trained(MEAN, fl.ema(0.9, evaluate=False))[1])
    assert plain == {"loss": both["loss"], "mean": both["mean"]}


def test_two_averages_stand_beside_each_other():
    one, two = (row(trained(member)[1]) for member in (fl.ema(0.9), fl.swa(0.5)))
    expected = {"loss": one["ema/loss"], "swa/loss": two["swa/loss"]}
    for order in (1, -1):
        assert row(trained(*(fl.ema(0.9), fl.swa(0.5))[::order])[1]) == {**one, **two}
        only = row(trained(*(fl.ema(0.9, evaluate="only"), fl.swa(0.5))[::order])[1])
        assert only == pytest.approx(expected, rel=1e-14)


def test_a_bare_evaluation_has_them_too():
    step, state = fl.pipeline(fl.ema(0.5), MEAN)(toy_loss), toy(w=2.0)
    out = step.evaluate(state, ONE)
    found = {name: m.compute() for name, m in out.metrics.items()}
    assert (out.loss.item(), found) == (2.0, {"mean": 2.0, "ema/loss": 2.0, "ema/mean": 2.0})
    state, _ = step(state, ONE)
    found = step.evaluate(state, 2 * ONE).metrics["ema/loss"].compute()
    assert found == 2 * state.slots["ema"]["w"].item() != 2 * state.model.w.item()


def test_names_of_derived_numbers_and_early_stop():
    members = fl.ema(1.0), fl.derive(double=lambda numbers: 2 * numbers["ema/loss"])
    stop = fl.early_stop("valid/ema/loss", patience=2)
    state = fitted(ONES, *members, state=toy(w=1.0), epochs=9, hooks=(stop,))
    assert (state.epoch, state.history["valid/double"]) == (3, (2.0, 2.0, 2.0))
    assert state.stop.startswith("early_stop: valid/ema/loss has not improved for 2 evaluations")


@pytest.mark.parametrize("members", [(), (fl.ema(evaluate=False),), (fl.ema(evaluate="only"),)])
def test_a_hook_that_monitors_an_average_which_is_not_evaluated_says_what_is_missing(members):
    with pytest.raises(KeyError) as caught:
        fitted(ONES, *members, hooks=(fl.early_stop("valid/ema/loss"),))
    assert caught.value.args[0] == (
        "early_stop: there is no metric 'valid/ema/loss': this pipeline evaluates "
        'valid/loss. An average reports it beside "valid/loss" if the pipeline has '
        'ema(name="ema"), evaluated beside the model'
    )


# --- how they are computed


class Curious(nn.Module):
    """Draws, notes its flags and what it is called with, and keeps what it computes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.temperature, self.notes = 1.0, []
        self.inner = nn.Dropout(0.5)

    def forward(self, x):
        self.kept = self.w * x
        flags = (self.training, self.inner.training, torch.is_grad_enabled())
        notes.append((flags, self.w.item(), torch.rand(()).item()))
        return self.kept / self.temperature


notes = []


def curious_loss(model, batch):
    return model(batch).mean()


def curious(*members):
    notes.clear()
    state = of(Curious())
    step = fl.pipeline(*members)(curious_loss)
    return step, fl.fit(step, state, ([ONE] * 2, [ONE] * 2), hooks=())


def test_both_have_the_same_flags_and_draw_the_same():
    curious()
    plain = [note[2] for note in notes]
    _, state = curious(fl.ema(0.5))
    assert [note[2] for note in notes[:2]] == plain[:2]  # training
    evaluated = notes[2:]
    assert [note[0] for note in evaluated] == [(False, False, False)] * 4
    assert [note[1] for note in evaluated] == [-1.25, -2.0] * 2
    assert [note[2] for note in evaluated] == [plain[2], plain[2], plain[3], plain[3]]
    assert state.model.training and state.model.inner.training
    curious(fl.swa(1, evaluate="only"))  # the average alone draws as the model would
    assert [note[2] for note in notes] == plain
    assert [note[1] for note in notes[2:]] == [-2.0, -2.0]


def test_what_changes_in_the_model_changes_in_the_next_evaluation():
    step, state = curious(fl.ema(0.5))
    first = fl.evaluate(step, state, [ONE])
    state.model.temperature = 4.0
    assert fl.evaluate(step, state, [ONE]) == {name: v / 4 for name, v in first.items()}


def test_nothing_is_left_of_an_evaluation():
    made = []

    def remembering(model, batch):
        if not model.training:
            made.append(weakref.ref(model))
        return toy_loss(model, batch)

    state = fitted(ONES, fl.ema(0.5), loss_fn=remembering)
    gc.collect()
    assert [found() is state.model for found in made] == [False, True] and made[0]() is None


class Writing(Toy):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        self.total += 1
        return super().forward(x)


def test_an_evaluation_writes_into_no_average():
    loaders = {"train": [ONE], "valid": [ONE] * 3}
    state = fitted(loaders, fl.ema(0.5), loss_fn=curious_loss, state=of(Writing()))
    assert state.slots["ema"]["total"].item() == 0.5
    assert state.model.total.item() == 1.0  # of the update: an evaluation puts its own back


def test_an_error_in_the_evaluation_of_an_average_is_placed():
    def loss_fn(model, batch):
        if not model.training and model.w != -1:
            raise OSError("no")
        return toy_loss(model, batch)

    with pytest.raises(OSError, match="no") as caught:
        fitted(ONES, fl.ema(0.5), loss_fn=loss_fn)
    place = "while in the loss function loss_fn, valid, epoch 1, batch 1, step 1"
    assert caught.value.__notes__ == [place] and caught.value.state.model.training


class Single(nn.Linear):
    error = OSError("there is one of it")

    def __deepcopy__(self, memo):
        raise self.error


def test_a_model_that_cannot_be_copied(monkeypatch):
    def run(member):
        data, loss_fn = [torch.ones(1, 1)], lambda model, batch: model(batch).mean()
        loaders = {"train": data, "valid": data}
        return fitted(loaders, member, loss_fn=loss_fn, state=of(Single(1, 1)))

    for error in (MemoryError(), RuntimeError("CUDA out of memory")):
        monkeypatch.setattr(Single, "error", error)
        with pytest.raises(type(error)) as caught:
            run(fl.ema())
        note = "ema: an evaluation needs memory for one more copy of the model. ema(..., evaluate="
        assert any(note in each for each in caught.value.__notes__)
    monkeypatch.undo()
    message = r"Single cannot be copied.*there is one of it.*ema\(..., evaluate=False\)"
    with pytest.raises(NotImplementedError, match=message):
        run(fl.ema())
    assert list(run(fl.ema(evaluate=False)).slots["ema"]) == ["weight", "bias"]


def test_a_user_s_evaluation_is_of_both():
    doubled = lambda step: lambda state, batch: step(state, 2 * batch)
    members = fl.ema(1.0), fl.Middleware("doubled", evaluation=doubled)
    state = fitted(ONES, *members, state=toy(w=1.0, lr=2.0))
    assert row(state) == {"loss": -2.0, "ema/loss": 2.0}


# --- averaged


def test_averaged_is_a_copy_that_is_evaluated_predicted_and_exported():
    _, state = trained(fl.ema(0.9), problem=stochastic())
    before, averaged = fl.snapshot(state), fl.averaged(state)
    assert averaged.model is not state.model and averaged.step == state.step
    assert averaged.history == state.history and averaged.model.training
    for name, value in state.slots["ema"].items():
        assert torch.equal(averaged.model.state_dict()[name], value)
    batch = stochastic().batches[0]
    (found,) = fl.predict(lambda model, b: model(b["x"]), averaged, [batch])
    assert torch.equal(found, averaged.model.eval()(batch["x"]))
    averaged.model[0].weight.data.zero_()
    assert_same(state, before)
    assert state.optimizer.state and not averaged.optimizer.state
    assert averaged.optimizer.param_groups[0]["params"][0] is averaged.model[0].weight


def test_averaged_can_be_saved_and_is_still_not_trained(tmp_path):
    step, state = trained(fl.ema(0.9))
    path = fl.save(fl.averaged(state), tmp_path / "a")
    assert not (path / "ema.safetensors").exists()
    restored = fl.restore(path, small().state())
    assert torch.equal(restored.model[0].weight, state.slots["ema"]["0.weight"])
    with pytest.raises(ValueError, match=r'fit: this state is averaged\(state, "ema"\)'):
        fl.fit(step, restored, small().batches)
    weights = fl.restore(path, small().state(), only=("model",))
    assert fl.fit(step, weights, small().batches, hooks=()).step == 7


@pytest.mark.parametrize("train", [
    lambda step, state: fl.fit(step, state, [ONE]),
    lambda step, state: next(fl.run(step, state, [ONE])), lambda step, state: step(state, ONE),
], ids=["fit", "run", "step"])  # fmt: skip
def test_averaged_is_not_trained(train):
    step, state = fl.pipeline(fl.ema(0.5))(toy_loss), fl.averaged(fitted([1], fl.ema(0.5)))
    with pytest.raises(ValueError, match=r"make a new state: TrainState.create\(state.model"):
        train(step, state)
    assert fitted([1], fl.ema(0.5), state=of(state.model)).model.w.item() == -1.5


def test_averaged_names_the_averages_that_there_are():
    step, state = trained(fl.swa(0.5), fl.ema(name="slow"))
    with pytest.raises(KeyError, match="no average 'ema'; those are: swa, slow"):
        fl.averaged(state)
    with pytest.raises(KeyError, match=r"it has none: list ema\(\) or swa\(\)"):
        fl.averaged(toy())
    later = fl.fit(step, state, small().batches, epochs=3, hooks=())
    with pytest.raises(fl.StaleStateError):
        fl.averaged(state, "swa")
    assert fl.averaged(later, "slow").slots == {"averaged": "slow"}
    with pytest.raises(ValueError, match=r'averaged: this state is averaged\(state, "slow"\)'):
        fl.averaged(fl.averaged(later, "slow"), "slow")


def test_averaged_with_several_optimizers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, two = (torch.optim.Adam(part.parameters(), lr=0.1) for part in model)
    state = fl.TrainState.create(model, {"one": one, "two": two}, seed=0)
    loss_fn = lambda model, batch: model(batch).square().mean()
    run = fitted([torch.ones(1, 2)] * 3, fl.ema(0.5), loss_fn=loss_fn, state=state)
    averaged = fl.averaged(run)
    assert all(found.state for found in run.optimizer.values())
    assert not any(found.state for found in averaged.optimizer.values())
    assert torch.equal(averaged.model[1].weight, run.slots["ema"]["1.weight"])
