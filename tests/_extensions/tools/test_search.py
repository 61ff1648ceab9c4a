"""search: successive halving, whose runs are those that they would have been alone."""

import gc
import itertools
import math
import os
import random
import signal
import tempfile
import weakref

import attrs
import pytest
import torch
from torch.utils.data import DataLoader, Sampler
from toy_runs import ONE

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, stochastic, toy, toy_loss

RATES = {"lr": [0.003, 0.01, 0.03], "weight_decay": [0.0, 0.1, 1.0]}
PROBLEM = stochastic()
LOADERS = {"train": PROBLEM.batches, "valid": PROBLEM.batches[:2]}
STEP = fl.pipeline(fl.clip(0.5), fl.schedule(schedules.cosine(warmup=2)))(PROBLEM.loss_fn)
SEARCHED = {"rungs": (1, 2, 4)}
TOYS = {"train": [ONE] * 2, "valid": [ONE]}
TOY_STEP = fl.pipeline()(toy_loss)


def states():
    return fl.fork(PROBLEM.state(seed=3), RATES)


def alone(name, epochs=4):
    return fl.fit(STEP, states()[name], LOADERS, epochs=epochs, hooks=())


def check_alone(found):
    """Each run equals the run that it would have been alone, as far as it came."""
    assert_same(attrs.evolve(found.state, run_id=""), attrs.evolve(alone(found.best), run_id=""))
    for name, history in found.histories.items():
        whole = alone(name).history
        assert list(history) == list(whole)[: len(history)]


def shown(found):
    return [(rung.epoch, rung.name) for rung in found.rungs]


def test_each_run_is_the_one_that_it_would_have_been_alone(capsys):
    found = fl.search(STEP, states(), LOADERS, **SEARCHED)
    assert [len(history) for history in found.histories.values()].count(1) == 6
    assert sorted(len(history) for history in found.histories.values())[6:] == [2, 2, 4]
    check_alone(found)
    values = {rung.name: rung.value for rung in found.rungs if rung.epoch == 1}
    best = sorted(values, key=values.get)[:3]
    assert {name for epoch, name in shown(found) if epoch == 2} == {*best}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["epoch", "run", "valid/loss", "time"] and len(lines) == 1 + 13


class Killed(BaseException):
    pass


@pytest.mark.parametrize("makers", [False, True])
def test_a_search_that_is_killed_nine_times_continues(makers, tmp_path, capsys):
    updates, draw = [], torch.Generator().manual_seed(0)

    def kill(state):
        updates.append(state.step)
        if len(updates) >= limit:
            raise Killed
        return state

    for _ in range(9):
        updates.clear()
        limit = int(torch.randint(2, 13, (), generator=draw))
        with pytest.raises(Killed):
            given = {k: (lambda k=k: states()[k]) for k in states()} if makers else states()
            fl.search(STEP, given, LOADERS, **SEARCHED, folder=tmp_path, hooks=(kill,))
    limit = math.inf
    found = fl.search(STEP, states(), LOADERS, **SEARCHED, folder=tmp_path, hooks=(kill,))
    check_alone(found)
    again = fl.search(STEP, states(), LOADERS, **SEARCHED, folder=tmp_path, hooks=(kill,))
    assert (again.best, shown(again)) == (found.best, shown(found))
    assert_same(again.state, found.state)


def test_a_search_that_is_interrupted_says_so_and_continues(tmp_path, capsys):
    """In the first epoch, the next, at the end of one, at a later rung, and near the end."""
    epoch, signals = len(PROBLEM.batches), itertools.cycle((signal.SIGINT, signal.SIGTERM))
    at, updates = (2, epoch + 3, 2 * epoch, 9 * epoch + 2, 14 * epoch - 1), []

    def interrupt(state):
        updates.append(state.step)
        if len(updates) in at:
            os.kill(os.getpid(), next(signals))
        return state

    settings = {**SEARCHED, "folder": tmp_path, "hooks": (interrupt,)}
    for why in ("interrupted", "SIGTERM", "interrupted", "SIGTERM", "interrupted"):
        message = rf"the run 'lr=.*' was interrupted at step \d+ \({why}\)"
        with pytest.raises(KeyboardInterrupt, match=message):
            fl.search(STEP, states(), LOADERS, **settings)
    check_alone(fl.search(STEP, states(), LOADERS, **settings))
    assert len(updates) == (9 + 3 + 2) * epoch


def test_a_shared_beginning_is_trained_once(capsys):
    """Two epochs of all runs, then rungs of one more, two more and four more."""
    step, made = fl.pipeline(fl.clip(0.5))(PROBLEM.loss_fn), []

    def branches(hooks=()):
        trunk = fl.fit(step, PROBLEM.state(seed=3), LOADERS, epochs=2, hooks=hooks)
        return fl.fork(trunk, RATES)

    count = lambda state: made.append(state.run_id) or state
    found = fl.search(step, branches((count,)), LOADERS, rungs=(3, 4, 6), hooks=(count,))
    assert len(made) == (2 + 9 * 1 + 3 * 1 + 1 * 2) * len(PROBLEM.batches)
    assert len({*made}) == 1 + 9
    for name, state in branches().items():
        whole = list(fl.fit(step, state, LOADERS, epochs=6, hooks=()).history)
        assert list(found.histories[name]) == whole[: len(found.histories[name])]


@pytest.mark.parametrize("kept", [False, True])
def test_memory_holds_one_state_of_functions_at_a_time(kept, tmp_path, monkeypatch, capsys):
    """The others wait on disk: in the folder, or in a temporary one, which does not stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = weakref.WeakSet()

    def make(name):
        gc.collect()
        assert not alive
        state = states()[name]
        alive.update((state.model, state.optimizer, *state.model.parameters()))
        return state

    def count(state):
        gc.collect()
        assert len(alive) == 2 + len([*state.model.parameters()])
        return state

    given = {name: (lambda name=name: make(name)) for name in states()}
    hooks, folder = (fl.every(epochs=1)(count),), tmp_path / "runs" if kept else None
    found = fl.search(STEP, given, LOADERS, **SEARCHED, folder=folder, hooks=hooks)
    check_alone(found)
    assert [*tmp_path.iterdir()] == ([folder] if kept else [])


def toys(*rates):
    return {f"{rate:g}": fl.fork(toy(), {"lr": [rate]})[f"lr={rate:g}"] for rate in rates}


@pytest.mark.parametrize(("mode", "keep", "best", "second"), [
    (None, 0.5, "3", ["2", "3"]),  # a higher rate has a lower loss
    ("max", 0.5, "1", ["1", "2"]),
    (None, 0.1, "3", ["3"]),  # at least one
    (None, 0.9, "3", ["1", "2", "3"]),
])  # fmt: skip
def test_the_better_part_continues(mode, keep, best, second, capsys):
    given = toys(1.0, 2.0, 3.0, 0.0)
    given = {"1": given["1"], "2": given["2"], "3": given["3"], "0": given["0"]}
    found = fl.search(TOY_STEP, given, TOYS, rungs=(1, 2), keep=keep, mode=mode)
    expected = best if mode is None else "0"
    assert found.best == expected
    names = [name for epoch, name in shown(found) if epoch == 2]
    assert names == (second if mode is None else ["1", "0"])


def test_nan_is_the_worst_and_of_equals_the_first_stays(capsys):
    loss = lambda model, batch: (model.w * 0 + model.bad).mean()

    def make(value):
        state = toy()
        state.model.register_buffer("bad", torch.tensor(value))
        return state

    given = {"nan": make(math.nan), "a": make(1.0), "b": make(1.0)}
    found = fl.search(fl.pipeline()(loss), given, TOYS, rungs=(1, 2))
    assert found.best == "a"


def test_a_run_that_a_hook_stops_keeps_its_value(capsys):
    stop = lambda s: attrs.evolve(s, stop="enough") if s.step == 3 and s.seed == 7 else s
    given = {"a": attrs.evolve(toy(), seed=7), "b": toy(), **toys(0.1)}
    found = fl.search(TOY_STEP, given, TOYS, rungs=(1, 2, 4), keep=0.9, hooks=(stop,))
    assert found.best == "b" and found.state.epoch == 4
    assert [rung.value for rung in found.rungs if rung.name == "a"] == [-2.0, -3.0]


def test_only_the_last_rung_is_the_end_of_a_run(capsys):
    ended = []
    hook = fl.at_end()(lambda state: ended.append(state.epoch) or state)
    fl.search(TOY_STEP, toys(1.0, 2.0), TOYS, rungs=(1, 3), keep=0.5, hooks=(hook,))
    assert ended == [3]


def test_each_run_may_have_a_step_of_its_own(capsys):
    steps = {"plain": TOY_STEP, "clipped": fl.pipeline(fl.clip(0.5))(toy_loss)}
    given = {"plain": toy(), "clipped": toy()}
    found = fl.search(steps, given, TOYS, rungs=(1, 2), keep=0.5)
    assert found.best == "plain"
    assert found.histories["clipped"]["valid/loss"] == pytest.approx((-1.0,), abs=1e-5)


def test_it_is_a_table_and_a_picture(capsys):
    found = fl.search(TOY_STEP, toys(1.0, 0.5, 2.0), TOYS, rungs=(1, 3), keep=0.4)
    assert capsys.readouterr().out.splitlines() == str(found).splitlines()[:-1]
    assert str(found).splitlines()[-1] == "best: 2" and "<b>-12.0000</b>" in found._repr_html_()
    lines = found.plot().axes[0].lines
    assert [list(line.get_xdata()) for line in lines if len(line.get_xdata()) > 1] == [[2, 4, 6]]


@pytest.mark.parametrize(("error", "settings", "message"), [
    (ValueError, {"states": {}}, "at least one state"),
    (TypeError, {"states": [toy()]}, "expects states as"),
    (TypeError, {"states": {"a": 1}}, "a TrainState for 'a', or a function"),
    (TypeError, {"states": {"a": lambda: 1}}, "the function of 'a' to return a TrainState"),
    (ValueError, {"states": {"a": toy(), "é" * 34: toy()}}, "at most 200 characters, .* got 204"),
    (ValueError, {"rungs": (3, 1)}, "rungs that grow"),
    (ValueError, {"rungs": ()}, "rungs that grow"),
    (TypeError, {"rungs": 3}, "rungs as epochs that grow"),
    (ValueError, {"keep": 1.0}, "keep below 1"),
    (ValueError, {"keep": 0}, "keep"),
    (KeyError, {"key": "valid/lss"}, "search: there is no metric 'valid/lss'"),
    (KeyError, {"steps": {"b": TOY_STEP}}, "of its name; one lacks a, b"),
    (KeyError, {"steps": {1: TOY_STEP}}, "of its name; one lacks 1, a"),
    (TypeError, {"steps": toy_loss}, "pipeline"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(error, settings, message, capsys):
    given = {"steps": TOY_STEP, "states": {"a": toy()}, "loaders": TOYS, "mode": "min"} | settings
    with pytest.raises(error, match=message):
        fl.search(given.pop("steps"), given.pop("states"), given.pop("loaders"), **given)


# --- all that are left at once

DIGITS = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3)
          for i in range(5)]  # fmt: skip
STACKED_LOADERS = {"train": DIGITS, "valid": DIGITS[:2]}
CLASSES = fl.supervised(torch.nn.CrossEntropyLoss())
STACKED_STEP = fl.pipeline(fl.clip(0.5), fl.schedule(schedules.cosine(warmup=2)))(CLASSES)


def classifiers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return fl.fork(fl.TrainState.create(model, optimizer, seed=3), RATES)


def check_near(found, other):
    """Two searches come to the same, up to rounding."""
    assert found.best == other.best and shown(found) == shown(other)
    for name, history in other.histories.items():
        mine = found.histories[name]
        assert [*history.keys()] == [*mine.keys()] and len(history) == len(mine)
        for key in [*history.keys()]:
            assert mine[key] == pytest.approx(history[key], rel=1e-5, abs=1e-7)


def test_runs_that_train_at_once_are_those_that_they_would_have_been_alone():
    found = fl.search(STACKED_STEP, classifiers(), STACKED_LOADERS, stacked=True, **SEARCHED)
    check_near(found, fl.search(STACKED_STEP, classifiers(), STACKED_LOADERS, **SEARCHED))
    assert [len(history) for history in found.histories.values()].count(1) == 6
    alone = fl.fit(STACKED_STEP, found.state, STACKED_LOADERS, epochs=5, hooks=())
    assert alone.epoch == 5 and "train/loss" in alone.history


@pytest.mark.parametrize("make", [
    lambda path: fl.checkpoint(path), lambda path: fl.to_jsonl(path), lambda path: fl.to_csv(path),
    lambda path: fl.every(epochs=1)(fl.checkpoint(path)),
    lambda path: fl.track("tensorboard", path),
])  # fmt: skip
@pytest.mark.parametrize("stacked", [True, False])
def test_a_hook_that_writes_what_belongs_to_one_run_is_refused(make, stacked, tmp_path):
    made = []
    given = {name: lambda: made.append(0) for name in "ab"}
    message = r'belongs to one run, .* leave it out. search\(..., folder="runs"\)'
    with pytest.raises(ValueError, match=message):
        fl.search(TOY_STEP, given, TOYS, hooks=(make(tmp_path / "a"),), stacked=stacked)
    assert made == [] and not (tmp_path / "a").exists()


def test_runs_that_train_at_once_may_have_schedules_of_their_own():
    fns = itertools.cycle([schedules.cosine(), schedules.linear(), schedules.constant()])
    steps = {
        name: fl.pipeline(fl.clip(1.0), fl.schedule(next(fns)))(CLASSES) for name in classifiers()
    }
    found = fl.search(steps, classifiers(), STACKED_LOADERS, stacked=True, **SEARCHED)
    check_near(found, fl.search(steps, classifiers(), STACKED_LOADERS, **SEARCHED))


def test_runs_that_train_at_once_may_differ_in_nothing_but_their_schedules():
    names = [*classifiers()]
    steps = {name: fl.pipeline(fl.clip(1.0 + i))(CLASSES) for i, name in enumerate(names)}
    with pytest.raises(NotImplementedError, match=r"differ, clip\(1.0\) here and clip\(2.0\)"):
        fl.search(steps, classifiers(), STACKED_LOADERS, stacked=True, **SEARCHED)
    steps = {
        name: fl.pipeline()(lambda model, batch, n=name: CLASSES(model, batch)) for name in names
    }
    with pytest.raises(NotImplementedError, match=r"of '.*' and '.*' have other loss functions"):
        fl.search(steps, classifiers(), STACKED_LOADERS, stacked=True, **SEARCHED)


def test_a_search_of_runs_that_train_at_once_resumes_bit_for_bit(tmp_path):
    given = {"stacked": True, **SEARCHED}
    whole = fl.search(STACKED_STEP, classifiers(), STACKED_LOADERS, **given)
    for cut in (1, 2, 3):
        folder, calls = tmp_path / str(cut), []

        def stops(state, calls=calls, cut=cut):
            calls.append(state.epoch)
            if len(calls) > cut:
                raise KeyError("killed")
            return state

        with pytest.raises(KeyError, match="killed"):
            hooks = (fl.every(epochs=1)(stops),)
            fl.search(
                STACKED_STEP, classifiers(), STACKED_LOADERS, folder=folder, hooks=hooks, **given
            )
        found = fl.search(STACKED_STEP, classifiers(), STACKED_LOADERS, folder=folder, **given)
        check_near(found, whole)
        pairs = zip(found.state.model.parameters(), whole.state.model.parameters(), strict=True)
        assert all(torch.equal(mine, its) for mine, its in pairs)


def test_a_metric_that_no_run_of_a_stack_has_is_refused_before_the_first_update():
    with pytest.raises(KeyError, match=r"valid/lr=0\.003, weight_decay=0/accuracy"):
        fl.search(
            STACKED_STEP, classifiers(), STACKED_LOADERS, stacked=True, key="valid/accuracy",
            **SEARCHED,
        )  # fmt: skip


class Drawn(Sampler):
    """Gives samples in an order that a generator of its own draws."""

    def __init__(self):
        self.draws = random.Random(4)

    def __iter__(self):
        return iter(self.draws.sample(range(6), 6))

    def __len__(self):
        return 6


@pytest.mark.parametrize("folder", [None, "runs"])
def test_every_run_reads_loaders_that_draw_by_themselves_as_it_would_alone(folder, tmp_path):
    def loss_fn(model, batch):
        return (model.w * batch.mean() - 1).square()

    def loaders():
        each = lambda: DataLoader(torch.arange(6.0)[:, None], sampler=Drawn())
        return each(), each()

    step, folder = fl.pipeline()(loss_fn), folder and tmp_path / folder
    states = {f"{lr}": toy(lr=lr) for lr in (0.01, 0.02, 0.03)}
    found = fl.search(step, states, loaders(), rungs=(1, 3), keep=0.5, folder=folder)
    for name, history in found.histories.items():
        alone = fl.fit(step, toy(lr=float(name)), loaders(), epochs=3, hooks=()).history
        assert history == alone[: len(history)]


def test_no_name_leads_out_of_the_folder(tmp_path):
    states = {name: toy(lr=lr) for name, lr in ((".", 0.1), ("..", 0.2), ("a/b", 0.3))}
    fl.search(TOY_STEP, states, TOYS, rungs=(1,), folder=tmp_path / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"%2E", "%2E%2E", "a%2Fb"}
