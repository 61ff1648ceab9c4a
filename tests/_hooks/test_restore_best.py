"""restore_best: with which weights a run ends, however it ends and wherever it was resumed."""

import logging
import math
import os
import pickle
import signal

import attrs
import pytest
import torch
from sample_hooks import stop_at
from torch import nn

import fnloop as fl
from fnloop import restore_best
from fnloop.testing import assert_same, toy, toy_loss

ONE = torch.ones(1)
KEY = "restore_best(valid/loss)"
RATES = (1.0, -2.0, 3.0, -4.0, 1.0, -1.0)  # w is -1, 1, -2, 2, 1, 2
WEIGHTS = (-1.0, 1.0, -2.0, 2.0, 1.0, 2.0)


def step_of(rates=RATES):
    return fl.pipeline(fl.schedule(lambda i, total: rates[i]))(toy_loss)


def trained(state=None, hooks=None, epochs=6, rates=RATES, **settings):
    hooks = (restore_best("valid/loss"),) if hooks is None else hooks
    state = toy() if state is None else state
    return fl.fit(step_of(rates), state, ([ONE], [ONE]), epochs=epochs, hooks=hooks, **settings)


def test_the_run_ends_with_its_best_weights():
    state = trained()
    assert state.history["valid/loss"] == WEIGHTS
    assert (state.model.w.item(), state.step, state.epoch, state.stop) == (-2.0, 6, 6, None)


def test_without_the_hook_it_ends_with_the_last():
    assert trained(hooks=()).model.w.item() == 2.0


@pytest.mark.parametrize(("rates", "mode", "w"), [
    (RATES, "max", 2.0),
    ((1.0, 1.0, 1.0), "min", -3.0),  # the last is the best
    ((-1.0, -1.0, -1.0), "min", 1.0),  # the first is
    ((1.0, 0.0, 0.0), "min", -1.0),
    ((math.nan, 1.0), "min", math.nan),  # NaN is never the best, nor is there another
])  # fmt: skip
def test_whatever_is_the_best(rates, mode, w):
    hooks = (restore_best("valid/loss", mode),)
    state = trained(hooks=hooks, epochs=len(rates), rates=rates)
    assert state.model.w.item() == pytest.approx(w, nan_ok=True)


def test_of_equals_the_first_is_kept():
    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    step = fl.pipeline()(lambda model, batch: 0 * model(batch).mean() + model.weight.sum())
    ended = fl.fit(
        fl.pipeline(fl.metric(same=lambda aux, batch: torch.tensor(1.0)))(step.loss_fn),
        state, ([ONE[None]], [ONE[None]]), epochs=3, hooks=(restore_best("valid/same", "max"),),
    )  # fmt: skip
    assert ended.model.weight.item() == pytest.approx(ended.history["valid/loss"][0])


def test_the_caller_continues_with_the_module_that_it_made():
    state = toy()
    model, parameter = state.model, state.model.w
    ended = trained(state)
    assert ended.model is model and ended.model.w is parameter
    assert ended.optimizer.param_groups[0]["params"][0] is parameter


def test_a_state_from_before_the_weights_went_back_is_stale():
    kept = []
    ended = trained(
        hooks=(restore_best("valid/loss"), lambda state: (kept.append(state), state)[1])
    )
    with pytest.raises(fl.StaleStateError):
        fl.evaluate(step_of(), kept[-1], [ONE])
    assert fl.evaluate(step_of(), ended, [ONE]) == {"loss": -2.0}


def test_a_hook_that_stops_the_run_ends_it():
    assert trained(hooks=(stop_at(4), restore_best("valid/loss"))).model.w.item() == -2.0
    assert trained(hooks=(restore_best("valid/loss"), stop_at(2))).model.w.item() == -1.0
    patient = fl.early_stop("valid/loss", patience=1)
    state = trained(hooks=(restore_best("valid/loss"), patient))
    assert (state.model.w.item(), state.epoch) == (-1.0, 2)


def test_a_target_of_updates_ends_it():
    loaders = ([ONE] * 2, [ONE])
    state = fl.fit(
        step_of(), toy(), loaders, steps=4, evaluate_every=fl.every(steps=1),
        hooks=(restore_best("valid/loss"),),
    )  # fmt: skip
    assert (state.model.w.item(), state.step) == (-2.0, 4)


def test_the_best_of_closing_records_is_kept_at_the_end_only():
    """The closing record after update 3 has the best value: those weights stay."""
    loaders = ([ONE] * 2, [ONE])
    state = fl.fit(step_of(), toy(), loaders, steps=3, hooks=(restore_best("valid/loss"),))
    assert state.history[-1].closing and state.history["valid/loss"] == (1.0, -2.0)
    assert state.model.w.item() == -2.0
    worse = fl.fit(
        step_of((1.0, 1.0, -5.0)), toy(), loaders, steps=3, hooks=(restore_best("valid/loss"),)
    )
    assert worse.history["valid/loss"] == (-2.0, 3.0) and worse.model.w.item() == -2.0


def test_records_without_the_metric_do_not_count():
    loaders = {"train": [ONE], "valid": [ONE]}
    state = fl.fit(
        step_of(), toy(), loaders, epochs=6, evaluate_every=fl.every(epochs=2),
        hooks=(restore_best("valid/loss"),),
    )  # fmt: skip
    assert state.history["valid/loss"] == (1.0, 2.0, 2.0) and state.model.w.item() == 1.0


def test_the_untrained_weights_may_be_the_best():
    start = fl.at_start() | fl.every(epochs=1)
    state = trained(rates=(-1.0, -1.0), epochs=2, evaluate_every=start)
    assert state.history["valid/loss"] == (0.0, 1.0, 2.0) and state.model.w.item() == 0.0


def test_an_evaluation_at_the_end_counts():
    hooks = (restore_best("valid/loss"), stop_at(3))
    state = trained(hooks=hooks, evaluate_every=fl.every(epochs=2) | fl.at_end())
    assert state.history["valid/loss"] == (1.0, -2.0) and state.model.w.item() == -2.0


def test_records_between_evaluations_are_fine():
    state = trained(record_every=fl.every(steps=1))
    assert state.model.w.item() == -2.0


# --- the run may continue


def press(number):
    def send(state):
        os.kill(os.getpid(), number)
        return state

    return send


def press_at(step):
    return fl.when(lambda state: state.step == step)(press(signal.SIGINT))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_weights_as_they_are(number):
    at_4 = fl.when(lambda state: state.step == 4)(press(number))
    stopped = trained(hooks=(restore_best("valid/loss"), at_4))
    assert (stopped.step, stopped.model.w.item()) == (4, 2.0)
    assert stopped.stop in ("interrupted", "SIGTERM")
    assert_same(trained(stopped), trained())


def test_a_save_in_between_leaves_the_weights_as_they_are(tmp_path):
    at_4 = fl.when(lambda state: state.step == 4)(press(signal.SIGUSR1))
    saves = fl.every(steps=100)(fl.checkpoint(tmp_path, keep=None))
    state = trained(hooks=(at_4, restore_best("valid/loss"), saves))
    assert_same(state, trained())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000004", "step-00000006"]
    found = [fl.restore(tmp_path / name, toy()).model.w.item() for name in names]
    assert found == [2.0, -2.0]


def test_an_exception_leaves_the_weights_as_they_are():
    def fail(state):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError) as error:
        trained(hooks=(restore_best("valid/loss"), fl.when(lambda s: s.step == 4)(fail)))
    assert error.value.state.model.w.item() == 2.0
    assert_same(trained(error.value.state), trained())


@pytest.mark.parametrize("split", range(1, 6))
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, split):
    """The copy is in the checkpoint: also if it is killed right after the save."""
    saves = fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=None))
    trained(hooks=(restore_best("valid/loss"), saves))
    state = fl.restore(tmp_path / f"step-{split:08d}", toy())
    assert state.model.w.item() == WEIGHTS[split - 1]
    assert_same(trained(state), trained())


@pytest.mark.parametrize("order", [1, -1])
def test_a_run_that_was_killed_at_its_very_end_is_settled(tmp_path, order):
    """Killed after its last checkpoint, before the weights went back."""
    saves = fl.every(epochs=1)(fl.checkpoint(tmp_path / "a", keep=None))

    class Killed(Exception): ...

    def kill(state):
        raise Killed

    hooks = [restore_best("valid/loss"), saves][::order]
    with pytest.raises(Killed):
        trained(hooks=(*hooks, fl.when(lambda state: state.epoch == 6)(kill)))
    state = fl.resume(tmp_path / "a", toy())
    assert (state.model.w.item(), state.epoch) == (2.0, 6)
    assert_same(trained(state, (*hooks,)), trained())


def test_settling_keeps_the_last_weights_if_they_are_the_best():
    loaders, hooks = ([ONE] * 2, [ONE]), (restore_best("valid/loss"),)
    state = fl.fit(step_of(), toy(), loaders, steps=3, hooks=())
    best = {"value": 1.0, "step": 2, "weights": {"w": torch.tensor(1.0)}, "ended": None}
    state = attrs.evolve(state, slots={**state.slots, KEY: best})
    assert fl.fit(step_of(), state, loaders, steps=3, hooks=hooks).model.w.item() == -2.0


# --- continuing after the end


def test_a_continued_run_starts_from_the_best_weights_and_may_end_with_them():
    first = trained(epochs=4)
    assert first.model.w.item() == -2.0 and first.slots[KEY]["weights"] is None  # released
    worse = trained(fl.snapshot(first), epochs=6)  # from -2: -3, -2
    assert worse.history["valid/loss"][4:] == (-3.0, -2.0) and worse.model.w.item() == -3.0
    rates = (*RATES[:4], -1.0, -1.0)
    none_better = trained(first, epochs=6, rates=rates)
    assert none_better.history["valid/loss"][4:] == (-1.0, 0.0)
    assert none_better.model.w.item() == -2.0


def test_a_run_at_its_end_stays_as_it_is():
    state = trained()
    assert trained(state) is state


def test_best_weights_that_were_not_kept_do_not_count(caplog):
    state = trained(hooks=(), epochs=3)  # the best, -2, is reached without the hook
    state = trained(attrs.evolve(state, stop=None), epochs=4, hooks=())
    with caplog.at_level(logging.WARNING):
        state = trained(state)
    assert "the best value so far, -2, is of step 3, but its weights were not kept" in caplog.text
    assert state.model.w.item() == 1.0  # of 1 and 2


def test_weights_that_a_run_without_the_hook_has_changed_do_not_count(caplog):
    state = trained(epochs=3)
    state = trained(state, epochs=5, hooks=())  # 2, 1
    again = trained(fl.snapshot(state), epochs=6)
    assert again.model.w.item() == 2.0
    assert "were not kept" in caplog.text
    again = trained(state, epochs=8, rates=(*RATES, 1.0, -3.0))  # 2, 1 and 4
    assert again.model.w.item() == 1.0


def test_a_run_that_skipped_updates_continues_from_its_best_weights(caplog):
    def skip(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="no" if state.batch + state.epoch == 1 else None)

        return skipping

    step = fl.pipeline(fl.Middleware("skip", gradient=skip))(toy_loss)
    settings = {"hooks": (restore_best("valid/loss"),)}
    first = fl.fit(step, toy(), ([ONE], [ONE]), epochs=3, **settings)
    assert (first.model.w.item(), first.skipped) == (-2.0, 1)
    fl.fit(step, first, ([ONE], [ONE]), epochs=4, **settings)
    assert "were not kept" not in caplog.text


def test_the_value_of_an_earlier_update_is_not_that_of_the_weights():
    """The hook was called at every second epoch only, and one update was made after it."""
    best = {"value": 1.0, "step": 2, "weights": {"w": torch.tensor(1.0)}, "ended": None}
    history = fl.History([fl.Record(2, 2, {"valid/loss": 1.0}), fl.Record(3, 3, {"valid/loss": 0})])
    state = attrs.evolve(toy(w=7.0), slots={KEY: best}, history=history, step=4, epoch=4)
    state = trained(state, epochs=4)
    assert state.model.w.item() == 1.0
    assert (state.slots[KEY]["value"], state.slots[KEY]["step"]) == (1.0, 2)


def test_a_new_run_says_nothing(caplog):
    trained()
    assert not caplog.records


# --- averages


def averaging(state=None, hooks=None, epochs=6, **settings):
    hooks = (restore_best("valid/loss"),) if hooks is None else hooks
    members = (fl.schedule(lambda i, total: RATES[i]), fl.ema(0.5, **settings), fl.swa(0))
    step, state = fl.pipeline(*members)(toy_loss), toy() if state is None else state
    return fl.fit(step, state, ([ONE], [ONE]), epochs=epochs, hooks=hooks)


@pytest.mark.parametrize(
    ("key", "evaluate"), [("valid/ema/loss", True), ("valid/loss", True), ("valid/loss", "only")]
)
def test_averages_of_the_best_update_go_back_too(key, evaluate):
    """All are the best at update 3: the weights, -1, 1, -2, and their averages."""
    state = averaging(hooks=(restore_best(key),), evaluate=evaluate)
    assert min(state.history[key]) == state.history[key][2]
    assert state.model.w.item() == -2.0
    assert fl.averaged(state).model.w.item() == -0.875  # -0.5, 0.25, -0.875
    assert (state.slots["swa"]["w"].item(), state.slots["swa"].count) == (pytest.approx(-2 / 3), 3)


@pytest.mark.parametrize("split", [2, 3, 5])
def test_averages_go_back_in_a_resumed_run(tmp_path, split):
    whole = averaging()
    path = fl.save(averaging(hooks=(restore_best("valid/loss"), press_at(split))), tmp_path / "a")
    assert_same(averaging(fl.restore(path, toy())), whole)


def test_an_average_that_is_left_out_or_is_new_stays_as_it_is():
    state = averaging(hooks=(restore_best("valid/loss"), press_at(4)))
    slots = {name: slot for name, slot in state.slots.items() if name != "swa"}
    left_out = fl.snapshot(attrs.evolve(state, slots=slots))
    assert trained(left_out).model.w.item() == -2.0
    state.slots[KEY]["averages"]["ema"]["tensors"].clear()  # as of a tensor that was not averaged
    assert averaging(state).model.w.item() == -2.0
    state = averaging(trained(hooks=(restore_best("valid/loss"), press_at(4))))
    assert (state.model.w.item(), state.slots["ema"]["w"].item()) == (-2.0, 1.75)  # 2; 1.5, 1.75


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return fl.TrainState.create(model, optimizer, seed=0)


def squared(model, batch):
    return model(batch).square().mean()


def trained_net(state, hooks, epochs=4):
    """Train with an evaluation that is the best at epoch 2."""
    value = fl.metric(value=lambda aux, batch: fl.Last(0.0))
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    return fl.fit(
        fl.pipeline(value)(squared), state, {"train": [x, x + 1], "valid": [x]}, epochs=epochs,
        hooks=hooks,
    )  # fmt: skip


class at_epoch_2:
    """Stand in for a metric: make the value of the record of epoch 2 the best."""

    reports = ("mine/loss",)

    def __call__(self, state):
        if "record" not in state.events:
            return state
        *before, newest = state.history
        metrics = {**newest.metrics, "mine/loss": abs(state.epoch - 2.0)}
        return attrs.evolve(
            state, history=fl.History([*before, attrs.evolve(newest, metrics=metrics)])
        )


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_buffers_ties_and_extra_state_go_back(compiled):
    two = trained_net(net(), (), 2)
    hooks = (at_epoch_2(), restore_best("mine/loss"))
    ended = trained_net(net(compiled), hooks)
    theirs = fl.unwrap(two).state_dict()
    mine = {k.replace("_orig_mod.", ""): v for k, v in fl.unwrap(ended).state_dict().items()}
    assert list(mine) == list(theirs)
    for name in mine:
        same = mine[name] == theirs[name]
        assert same if isinstance(same, bool) else same.all(), name
    assert fl.unwrap(ended).last.weight is fl.unwrap(ended).first.weight
    assert fl.unwrap(ended).norm.num_batches_tracked == 4


def test_what_the_module_has_in_one_memory_is_copied_once():
    kept = []
    look = lambda state: (kept.append(state.slots.get("restore_best(mine/loss)")), state)[1]
    trained_net(net(), (at_epoch_2(), restore_best("mine/loss"), look))
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
    model = Views()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = fl.pipeline()(lambda model, batch: model.w.sum() * batch.mean())
    kept = []
    look = lambda state: kept.append(state.slots[KEY]["weights"]) or state
    rates = {"evaluate_every": fl.at_start(), "hooks": (restore_best("valid/loss"), look)}
    fl.fit(step, state, ([ONE], [ONE]), **rates)
    assert all(torch.equal(kept[0][name], value) for name, value in before.items())
    assert kept[0]["none"] is not kept[0]["nothing"]


def test_the_optimizer_stays_as_it_is():
    hooks = (at_epoch_2(), restore_best("mine/loss"))
    ended, plain = trained_net(net(), hooks), trained_net(net(), ())
    mine, theirs = ended.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    for i in theirs:
        for name, value in theirs[i].items():
            assert torch.equal(mine[i][name], value)


@pytest.mark.slow  # compiles
def test_a_compiled_run_resumes_as_a_plain_one(tmp_path):
    hooks = (at_epoch_2(), restore_best("mine/loss"))
    path = tmp_path / "a"

    def save(state):
        fl.save(state, path)
        return state

    saving = fl.when(lambda state: (state.epoch, state.batch) == (3, 0))(save)
    whole = trained_net(net(True), (*hooks, saving))
    resumed = trained_net(fl.restore(path, net()), hooks)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_copy_of_another_model_is_refused_before_the_first_update(tmp_path):
    saved = trained(hooks=(restore_best("valid/loss"), fl.when(lambda s: s.step == 4)(press(2))))
    path = fl.save(saved, tmp_path / "a")
    other = fl.restore(path, net(), only=("slots",))
    message = r'state.slots\["restore_best\(valid/loss\)"\] has no weights'
    with pytest.raises(ValueError, match=message) as caught:
        trained_net(other, (restore_best("valid/loss"),))
    assert "before the first update" in caught.value.__notes__[0]
    best = {"value": 1.0, "step": 2, "weights": {"w": torch.ones(2)}, "ended": None}
    with pytest.raises(ValueError, match=r"has no weights for w of shape \(\)"):
        trained(attrs.evolve(toy(), slots={KEY: best}))


# --- as a hook


def test_it_composes_with_every():
    """Only the evaluations of even epochs count: 1, 2 and 2."""
    assert trained(hooks=(fl.every(epochs=2)(restore_best("valid/loss")),)).model.w.item() == 1.0


def test_it_cannot_run_on_the_main_process_alone():
    with pytest.raises(TypeError, match="needs all processes: list it without on_main"):
        fl.on_main(fl.every(epochs=1)(restore_best("valid/loss")))


def test_two_are_refused():
    with pytest.raises(ValueError, match="a run ends with one set of weights"):
        trained(hooks=(restore_best("valid/loss"), restore_best("train/loss")))


@pytest.mark.parametrize("wrap", [lambda hook: hook, fl.every(epochs=100)])
@pytest.mark.parametrize(("key", "message"), [
    ("val/loss", "restore_best: there is no metric 'val/loss': its first part is not"),
    ("valid/lss", "restore_best: there is no metric 'valid/lss': this pipeline evaluates"),
    ("train/lss", "restore_best: there is no metric 'train/lss'; there are: train/loss"),
])  # fmt: skip
def test_an_unknown_metric_is_named(wrap, key, message):
    with pytest.raises(KeyError, match=message):
        trained(hooks=(wrap(restore_best(key, "min")),))


def test_equality_pickling_and_repr():
    made = restore_best("valid/bleu", "max")
    assert repr(made) == "restore_best('valid/bleu', mode='max')"
    assert pickle.loads(pickle.dumps(made)) == made != restore_best("valid/bleu", "min")
