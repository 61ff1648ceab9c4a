"""restore_best: with which weights a run ends, however it ends and wherever it was resumed."""

import math
import signal

import attrs
import pytest
import torch
from sample_hooks import signal_at, start_again, stop_at
from sample_middleware import skip_negative
from torch import nn
from toy_runs import ONE, fit

import fnloop as fl
from fnloop import restore_best
from fnloop.testing import assert_same, toy, toy_loss
from fnloop.testing._laws import assert_equal

KEY = "restore_best(valid/loss)"
RATES = (1.0, -2.0, 3.0, -4.0, 1.0, -1.0)
WEIGHTS = (-1.0, 1.0, -2.0, 2.0, 1.0, 2.0)
BEST = restore_best("valid/loss")
START = fl.at_start() | fl.every(epochs=1)


def step_of(rates=RATES):
    return fl.pipeline(fl.schedule(lambda i, total: rates[i]))(toy_loss)


def trained(state=None, hooks=(BEST,), rates=RATES, **run):
    """Train for 6 epochs of an update each, and evaluate after each."""
    run = {"step": step_of(rates), "train": 1, "valid": 1, "epochs": 6, **run}
    return fit(*hooks, state=state, **({**run, "epochs": None} if "steps" in run else run))


def weight(state):
    return state.model.w.item()


def kept_at(value, step, w):
    return {"value": value, "step": step, "weights": {"w": torch.tensor(w)}, "ended": None}


@pytest.mark.parametrize(("run", "values", "w"), [
    ({}, WEIGHTS, -2.0), ({"hooks": ()}, WEIGHTS, 2.0),
    ({"hooks": (restore_best("valid/loss", "max"),)}, WEIGHTS, 2.0),
    ({"rates": (1.0, 1.0, 1.0), "epochs": 3}, (-1.0, -2.0, -3.0), -3.0),  # the last is the best
    ({"rates": (-1.0, -1.0, -1.0), "epochs": 3}, (1.0, 2.0, 3.0), 1.0),  # the first is
    ({"rates": (1.0, 0.0, 0.0), "epochs": 3}, (-1.0, -1.0, -1.0), -1.0),
    # NaN is never the best, nor is there another
    ({"rates": (torch.tensor(math.nan), 1.0), "epochs": 2}, (math.nan, math.nan), math.nan),
    # which records count: those with the metric, at the start, between epochs, and at the end
    ({"evaluate_every": fl.every(epochs=2)}, (1.0, 2.0, 2.0), 1.0),
    ({"hooks": (fl.every(epochs=2)(BEST),)}, WEIGHTS, 1.0),  # of 1, 2 and 2
    ({"rates": (-1.0, -1.0), "epochs": 2, "evaluate_every": START}, (0.0, 1.0, 2.0), 0.0),
    ({"train": 2, "steps": 4, "evaluate_every": fl.every(steps=1)}, WEIGHTS[:4], -2.0),
    ({"record_every": fl.every(steps=1)}, WEIGHTS, -2.0),
    ({"hooks": (BEST, stop_at(3)), "evaluate_every": fl.every(epochs=2) | fl.at_end()},
        (1.0, -2.0), -2.0),
    # a closing record with the best value keeps its weights, and a worse one does not
    ({"train": 2, "steps": 3}, (1.0, -2.0), -2.0),
    ({"train": 2, "steps": 3, "rates": (1.0, 1.0, -5.0)}, (-2.0, 3.0), -2.0),
    # a hook stops the run
    ({"hooks": (stop_at(4), BEST)}, WEIGHTS[:4], -2.0),
    ({"hooks": (BEST, stop_at(2))}, WEIGHTS[:2], -1.0),
    ({"hooks": (BEST, fl.early_stop("valid/loss", patience=1))}, WEIGHTS[:2], -1.0),
])  # fmt: skip
def test_the_run_ends_with_its_best_weights(run, values, w):
    state = trained(**run)
    assert state.history["valid/loss"] == pytest.approx(values, nan_ok=True)
    assert weight(state) == pytest.approx(w, nan_ok=True)


def test_of_equals_the_first_is_kept():
    step = fl.pipeline(fl.metric(same=lambda aux, batch: fl.Last(1.0)))(toy_loss)
    assert weight(trained(step=step, hooks=(restore_best("valid/same", "max"),))) == -1.0


def test_the_caller_continues_with_the_module_that_it_made():
    state, kept = toy(), []
    model, parameter = state.model, state.model.w
    ended = trained(state, (BEST, lambda state: kept.append(state) or state))
    assert ended.model is model and ended.model.w is parameter
    assert ended.optimizer.param_groups[0]["params"][0] is parameter
    assert (ended.step, ended.epoch, ended.stop) == (6, 6, None)
    with pytest.raises(fl.StaleStateError):  # a state from before the weights went back
        fl.evaluate(step_of(), kept[-1], [ONE])
    assert fl.evaluate(step_of(), ended, [ONE]) == {"loss": -2.0}


# --- the run may continue


def test_a_save_in_between_leaves_the_weights_as_they_are(tmp_path):
    saves = fl.every(steps=100)(fl.checkpoint(tmp_path, keep=None))
    state = trained(hooks=(signal_at(4, signal.SIGUSR1), BEST, saves))
    assert_same(state, trained())
    found = {path.name: weight(fl.restore(path, toy())) for path in tmp_path.iterdir()}
    assert found == {"step-00000004": 2.0, "step-00000006": -2.0}


def test_settling_keeps_the_last_weights_if_they_are_the_best():
    state = trained(hooks=(), train=2, steps=3)
    state = attrs.evolve(state, slots={**state.slots, KEY: kept_at(1.0, 2, 1.0)})
    assert weight(trained(state, train=2, steps=3)) == -2.0


# --- continuing after the end


def test_a_continued_run_starts_from_the_best_weights_and_may_end_with_them(caplog):
    first = trained(epochs=4)
    assert weight(first) == -2.0 and first.slots[KEY]["weights"] is None  # released
    worse = trained(fl.snapshot(first))  # from -2: -3, -2
    assert worse.history["valid/loss"][4:] == (-3.0, -2.0) and weight(worse) == -3.0
    none_better = trained(first, rates=(*RATES[:4], -1.0, -1.0))
    assert none_better.history["valid/loss"][4:] == (-1.0, 0.0)
    assert weight(none_better) == -2.0
    assert trained(none_better) is none_better  # it is at its end
    assert "were not kept" not in caplog.text


@pytest.mark.parametrize(("before", "w"), [
    (lambda: trained(trained(hooks=(), epochs=3), (), epochs=4), 1.0),  # of 1 and 2
    (lambda: trained(trained(epochs=3), (), epochs=5), 2.0),
])  # fmt: skip
def test_best_weights_that_were_not_kept_or_have_changed_do_not_count(caplog, before, w):
    state = trained(before())
    assert "the best value so far, -2, is of step 3, but its weights were not kept" in caplog.text
    assert weight(state) == w


def test_a_run_that_is_cut_before_the_hook_was_called_has_lost_nothing(tmp_path, caplog):
    def cut(state):
        raise KeyError

    saves = fl.checkpoint(tmp_path)
    with pytest.raises(KeyError):
        trained(hooks=(saves, cut, BEST))
    state = trained(fl.resume(tmp_path, toy()), (saves, BEST))
    assert weight(state) == weight(trained())
    assert "were not kept" not in caplog.text


def test_a_run_that_skipped_updates_continues_from_its_best_weights(caplog):
    step, loaders = fl.pipeline(skip_negative())(toy_loss), ([-ONE, ONE], [ONE])
    first = trained(step=step, loaders=loaders, epochs=3)
    assert (weight(first), first.skipped) == (-3.0, 3)
    trained(first, step=step, loaders=loaders, epochs=4)
    assert "were not kept" not in caplog.text


def test_the_value_of_an_earlier_update_is_not_that_of_the_weights():
    """The hook was called at every second epoch only, and one update was made after it."""
    history = fl.History([fl.Record(2, 2, {"valid/loss": 1.0}), fl.Record(3, 3, {"valid/loss": 0})])
    slots = {KEY: kept_at(1.0, 2, 1.0)}
    state = attrs.evolve(toy(w=7.0), slots=slots, history=history, step=4, epoch=4)
    state = trained(state, epochs=4)
    assert weight(state) == 1.0
    assert (state.slots[KEY]["value"], state.slots[KEY]["step"]) == (1.0, 2)


# --- averages


def averaging(state=None, hooks=(BEST,), **settings):
    members = (fl.schedule(lambda i, total: RATES[i]), fl.ema(0.5, **settings), fl.swa(0))
    return trained(state, hooks, step=fl.pipeline(*members)(toy_loss))


@pytest.mark.parametrize(("key", "evaluate"), [
    ("valid/ema/loss", True), ("valid/loss", True), ("valid/loss", "only"),
])  # fmt: skip
def test_averages_of_the_best_update_go_back_too(key, evaluate):
    """All are the best at update 3: the weights, -1, 1, -2, and their averages."""
    state = averaging(hooks=(restore_best(key),), evaluate=evaluate)
    assert min(state.history[key]) == state.history[key][2]
    assert weight(state) == -2.0
    assert fl.averaged(state).model.w.item() == -0.875  # -0.5, 0.25, -0.875
    assert (state.slots["swa"]["w"].item(), state.slots["swa"].count) == (pytest.approx(-2 / 3), 3)


def test_an_average_that_is_left_out_or_is_new_stays_as_it_is():
    state = averaging(hooks=(BEST, signal_at(4)))
    slots = {name: slot for name, slot in state.slots.items() if name != "swa"}
    assert weight(trained(fl.snapshot(attrs.evolve(state, slots=slots)))) == -2.0
    state.slots[KEY]["averages"]["ema"]["tensors"].clear()  # as of a tensor that was not averaged
    assert weight(averaging(state)) == -2.0
    state = averaging(trained(hooks=(BEST, signal_at(4))))
    assert (weight(state), state.slots["ema"]["w"].item()) == (-2.0, 1.75)  # 2; 1.5, 1.75


# --- what is kept


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight  # tied
        self.scale = [1.0]

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def forward(self, x):
        self.scale[0] += 1.0
        return self.last(self.norm(self.first(x)))


def net(compiled=False):
    torch.manual_seed(0)
    model = Net()
    if compiled:
        model.first = torch.compile(model.first, backend="eager")
        model = torch.compile(model, backend="eager")
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.1), seed=0)


def trained_net(state, *hooks, epochs=4):
    """Train. By its distance from epoch 2, that is the best."""
    step = fl.pipeline()(lambda model, batch: model(batch).square().mean())
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    return fit(*hooks, state=state, step=step, loaders=([x, x + 1], [x]), epochs=epochs)


def by_distance():
    distance = fl.measure(lambda state: {"loss": abs(state.epoch - 2.0)}, name="mine")
    return distance, restore_best("mine/loss")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_buffers_ties_and_extra_state_go_back(compiled):
    """The optimizer stays as it is."""
    theirs = trained_net(net(), epochs=2).model.state_dict()
    ended = trained_net(net(compiled), *by_distance())
    model = fl.unwrap(ended)
    mine = {k.replace("_orig_mod.", ""): v for k, v in model.state_dict().items()}
    assert_equal(mine, dict(theirs), "model")
    assert model.last.weight is model.first.weight and model.norm.num_batches_tracked == 4
    mine, theirs = (s.optimizer.state_dict()["state"] for s in (ended, trained_net(net())))
    assert_equal(mine, theirs, "optimizer")


def test_what_the_module_has_in_one_memory_is_copied_once():
    kept = []
    look = lambda state: kept.append(state.slots.get("restore_best(mine/loss)")) or state
    trained_net(net(), *by_distance(), look)
    weights = kept[-1]["weights"]
    assert weights["first.weight"] is weights["last.weight"]
    assert weights["first.bias"] is not weights["last.bias"]


class Views(nn.Module):
    """Buffers that begin at one address, and are not the same values."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.register_buffer("across", self.w.detach().T)
        self.register_buffer("bits", self.w.detach().view(torch.int32))
        self.register_buffer("row", self.w.detach()[0])
        self.register_buffer("none", torch.zeros(0))  # as a process's part of a small tensor
        self.register_buffer("nothing", torch.zeros(0))


def test_views_of_one_memory_are_copied_as_they_are():
    model, kept = Views(), []
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = fl.pipeline()(lambda model, batch: model.w.sum() * batch.mean())
    look = lambda state: kept.append(state.slots[KEY]["weights"]) or state
    fit(BEST, look, state=state, step=step, train=1, valid=1, evaluate_every=fl.at_start())
    assert all(torch.equal(kept[0][name], value) for name, value in before.items())
    assert kept[0]["none"] is not kept[0]["nothing"]


@pytest.mark.slow  # compiles
def test_a_compiled_run_resumes_as_a_plain_one(tmp_path):
    path = tmp_path / "a"
    saving = fl.when(lambda state: state.step == 6)(lambda state: fl.save(state, path) and state)
    whole = trained_net(net(True), *by_distance(), saving)
    resumed = trained_net(fl.restore(path, net()), *by_distance())
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_copy_of_another_model_is_refused_before_the_first_update(tmp_path):
    path = fl.save(trained(hooks=(BEST, signal_at(4))), tmp_path / "a")
    start_again()
    other = fl.restore(path, net(), only=("slots",))
    message = r'state.slots\["restore_best\(valid/loss\)"\] has no weights'
    with pytest.raises(ValueError, match=message) as caught:
        trained_net(other, BEST)
    assert "before the first update" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match=r"has no weights for w of shape \(\)"):
        trained(attrs.evolve(toy(), slots={KEY: kept_at(1.0, 2, [1.0, 1.0])}))


# --- shapes that change


class Row(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))


def grow_at(step):
    """A hook that appends 5 to the weights, and zero to their momentum."""

    def grow(state):
        if state.step == step and "update" in state.events:
            held = state.optimizer.state.pop(state.model.w)["momentum_buffer"]
            w = torch.cat([state.model.w.detach(), torch.full((1,), 5.0)])
            state.model.w = torch.nn.Parameter(w)
            state.optimizer.param_groups[0]["params"] = [state.model.w]
            state.optimizer.state[state.model.w]["momentum_buffer"] = torch.cat([held, held * 0])
        return state

    return grow


def row(members=(), steps=4, hooks=(), folder=None):
    """Train a row of weights: its loss is the sum of them, and each update takes off 1."""
    model = Row()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-9)
    state = fl.TrainState.create(model, optimizer, seed=0)
    state = state if folder is None else fl.resume(folder, state, shapes="file")
    step = fl.pipeline(*members)(lambda model, x: (model.w * x).sum())
    ones = [torch.ones(1)]
    return fl.fit(step, state, (ones, ones), epochs=steps, hooks=hooks)


@pytest.mark.parametrize("members", [(), (fl.ema(0.0),)])
def test_the_best_weights_go_back_in_the_shape_that_they_had(members, caplog):
    """The losses are -1, -2, 5 - 3 - 1 = 1, and 4 - 5 = -1, with 5 after update 2."""
    kept = {}

    def hold(state):
        kept[state.step] = state.model.w
        return state

    ended = row(members, hooks=(BEST, grow_at(2), hold))
    assert ended.history["valid/loss"] == (-1.0, -2.0, 1.0, -1.0)
    assert ended.model.w.tolist() == [-2.0] and ended.model.w is kept[4]
    (group,) = ended.optimizer.param_groups
    assert group["params"] == [ended.model.w] and not ended.optimizer.state
    assert "w: (1,), was (2,). The optimizer has no state for them" in caplog.text
    if members:
        assert fl.averaged(ended).model.w.tolist() == [-2.0]
    step = fl.pipeline(*members)(lambda model, x: (model.w * x).sum())
    assert fl.fit(step, ended, [torch.ones(1)], epochs=5, hooks=()).model.w.tolist() == [-3.0]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_that_was_cut_ends_with_the_best_weights_of_another_shape(tmp_path, cut):
    hooks = (BEST, grow_at(2), fl.checkpoint(tmp_path))
    assert row(hooks=(*hooks, signal_at(cut))).step == cut
    start_again()
    ended = row(hooks=hooks, folder=tmp_path)
    assert ended.history["valid/loss"] == (-1.0, -2.0, 1.0, -1.0)
    assert ended.model.w.tolist() == [-2.0]


# --- as a hook


def test_a_wrong_use_is_an_error():
    with pytest.raises(TypeError, match="needs all processes: list it without on_main"):
        fl.on_main(fl.every(epochs=1)(BEST))
    with pytest.raises(ValueError, match="a run ends with one set of weights"):
        trained(hooks=(BEST, restore_best("train/loss")))
