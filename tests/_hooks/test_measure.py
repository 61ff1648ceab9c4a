"""measure: numbers of a function of the state, in the record of the moment."""

import os
import random
import signal

import attrs
import numpy
import pytest
import torch
from sample_hooks import stop_at
from torch import nn
from toy_runs import ONE, fit, kept, of

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

ALL = "train", "valid", "two"
LOADERS = {"train": [ONE] * 3, "valid": [torch.tensor([2.0])]}


def doubled(state):
    """Return 2 × w: each update lowers w by 1."""
    return {"w": 2 * state.model.w}


def run(*hooks, loss=toy_loss, members=(), **settings):
    return fit(*hooks, step=fl.pipeline(*members)(loss), **{"loaders": LOADERS, **settings})


def places(state):
    """Return step, the number, and the first parts of the other names, for each record with one."""
    return [
        (r.step, r.metrics["two/w"], [*dict.fromkeys(k.split("/")[0] for k in r.metrics)])
        for r in state.history.having("two/w")
    ]


def test_its_numbers_join_the_record_of_an_evaluation():
    state = run(fl.measure(doubled, name="two"), epochs=2)
    assert places(state) == [(3, -6.0, [*ALL]), (6, -12.0, [*ALL])]
    assert len(state.history) == 2


@pytest.mark.parametrize(("every", "steps"), [
    (fl.every(steps=2), [2, 4, 6]), (fl.at_start() | fl.every(epochs=1), [0, 3, 6]),
    (fl.at_end(), [6]), (fl.every(steps=4) | fl.at_end(), [4, 6]), (fl.every(epochs=3), []),
    (fl.when(lambda state: state.step == 5), [5]),
], ids=repr)  # fmt: skip
def test_where_there_is_no_record_one_is_made(every, steps):
    state = run(fl.measure(doubled, name="two", every=every), epochs=2)
    plain = run(epochs=2)
    found = {r.step: r.metrics["two/w"] for r in state.history if "two/w" in r.metrics}
    assert found == {step: -2.0 * step for step in steps}
    assert {r.step for r in state.history} == {3, 6, *steps}
    assert [r.metrics["valid/loss"] for r in state.history if "valid/loss" in r.metrics] == [
        r.metrics["valid/loss"] for r in plain.history
    ]
    assert state.model.w.item() == plain.model.w.item()


def test_what_is_due_only_at_the_end_is_in_a_closing_record():
    state = run(fl.measure(doubled, name="two", every=fl.at_end()))
    assert [(r.step, r.closing) for r in state.history] == [(3, False), (3, True)]
    state = run(fl.measure(doubled, name="two", every=fl.at_end()), steps=2)
    assert [(r.step, r.closing) for r in state.history] == [(2, True)]
    assert state.history[0].metrics["two/w"] == -4.0 and "valid/loss" in state.history[0].metrics
    state = run(fl.measure(doubled, name="two", every=fl.at_end()), stop_at(2))
    assert state.history["two/w"] == (-4.0,)


def test_a_closing_record_has_none_where_it_is_not_due():
    state = run(fl.measure(doubled, name="two"), steps=2)
    assert state.history[-1].closing and "two/w" not in state.history


def test_it_needs_no_loader_to_evaluate():
    state = run(fl.measure(doubled, name="two"), loaders=[ONE] * 3)
    assert [*state.history[-1].metrics] == ["train/loss", "train/lr", "two/w"]


def test_it_is_called_once_with_the_record_as_it_is_so_far():
    seen = []

    def look(state):
        seen.append((len(state.history), state.history[-1].metrics["valid/loss"]))
        return {}

    run(fl.measure(look, name="two"), epochs=2)
    assert seen == [(1, -6.0), (2, -12.0)]


# --- the state stays as it is


class Counting(nn.Module):
    """A model with dropout that counts its calls in a buffer, in evaluation mode too."""

    def __init__(self):
        super().__init__()
        self.w, self.drop, self.frozen = nn.Parameter(torch.ones(1)), nn.Dropout(0.5), nn.Dropout()
        self.frozen.eval()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.drop(self.w * x)


@pytest.mark.parametrize("members", [(), (fl.ema(0.5),)], ids=repr)
def test_the_run_is_as_without_it(members):
    seen = []

    def look(state):
        seen.append((state.model.training, torch.is_grad_enabled()))
        state.model(torch.ones(2))
        draws = torch.rand(1).item(), random.random(), numpy.random.rand()
        return dict(zip("abc", draws, strict=True))

    def trained(*hooks):
        torch.manual_seed(0)
        loaders = [torch.ones(2)] * 4, [torch.ones(2)]
        loss = lambda model, x: (model(x) - random.random()).square().mean()
        state = of(Counting(), lr=0.1)
        return run(*hooks, loss=loss, members=members, loaders=loaders, state=state, epochs=3)

    plain, state = trained(), trained(fl.measure(look, name="draws", every=fl.every(steps=1)))
    assert seen == [(False, False)] * 12
    assert state.model.calls == plain.model.calls and not state.model.frozen.training
    assert state.model.training and state.model.w.item() == plain.model.w.item()
    assert [r.metrics["valid/loss"] for r in state.history if "valid/loss" in r.metrics] == [
        *plain.history["valid/loss"]
    ]
    assert all(len({*state.history[f"draws/{name}"]}) == 1 for name in "abc")  # of the seed


def test_modes_and_generators_are_put_back_after_an_exception_too():
    def explode(state):
        torch.rand(3)
        raise ArithmeticError("boom")

    state, before = toy(), torch.get_rng_state()
    with pytest.raises(ArithmeticError) as info:
        run(fl.measure(explode, name="two"), state=state)
    note = "while in measure(explode, name='two'), train, epoch 1, batch 3, step 3"
    assert info.value.__notes__[-1] == note
    assert info.value.state.model.training and torch.equal(torch.get_rng_state(), before)
    again = run(fl.measure(doubled, name="two"), state=info.value.state, epochs=1)
    assert_same(again, run(fl.measure(doubled, name="two")))


def test_it_has_the_weights_of_an_evaluation():
    """An optimizer without a schedule evaluates other weights than those that it trains."""
    schedulefree = pytest.importorskip("schedulefree")
    found = []

    def look(state):
        found.append(state.model.w.item())
        return {}

    def loss_fn(model, batch):
        if not model.training:
            found.append(model.w.item())
        return (model(batch) - 1).square().mean()

    state = of(toy().model, schedulefree.SGDScheduleFree, lr=0.1)
    run(fl.measure(look, name="two"), loss=loss_fn, state=state, epochs=2)
    assert len(found) == 4 and found[::2] == found[1::2] and len({*found}) == 2


# --- what watches it


def test_a_name_that_it_does_not_return_is_refused_at_its_first_record():
    with pytest.raises(KeyError, match=r"there is no metric 'two/v'.*Did you mean 'two/w'"):
        run(fl.measure(doubled, name="two"), fl.early_stop("two/v", mode="min"))


def test_it_can_decide_when_a_run_stops_and_what_is_kept(tmp_path):
    key = "two/w"
    hooks = (
        fl.measure(doubled, name="two", every=fl.every(epochs=2)),
        fl.early_stop(key, patience=1, mode="max"), fl.restore_best(key, mode="max"),
        fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=1, best=key, mode="max")),
    )  # fmt: skip
    state = run(*hooks, members=(fl.plateau(key, mode="max", patience=1),), epochs=9)
    assert (state.epoch, state.history[key]) == (4, (-12.0, -24.0))
    assert state.model.w.item() == -6.0
    assert fl.restore(fl.best(tmp_path), toy()).step == 6


# --- cut and resumed


@pytest.mark.parametrize("how", ["memory", "checkpoint"])
@pytest.mark.parametrize("at", range(12))
def test_a_run_that_is_resumed_at_any_update_has_the_same_record(at, how, tmp_path):
    def hooks():
        measured = fl.measure(doubled, name="two", every=fl.at_start() | fl.every(steps=2))
        return measured, fl.early_stop("two/w", patience=9, mode="max")

    whole = run(*hooks(), epochs=4)
    state = run(*hooks(), stop_at(at), epochs=4) if at else toy()
    state = kept(how, attrs.evolve(state, stop=None), toy(), tmp_path)
    resumed = run(*hooks(), state=state, epochs=4)
    open_ended = lambda state: [r for r in state.history if not r.closing]
    assert open_ended(resumed) == open_ended(whole)
    assert resumed.model.w.item() == whole.model.w.item()


@pytest.mark.parametrize("first", range(1, 5))
def test_a_run_in_two_calls_equals_one_but_for_closing_records(first):
    def hooks():
        every = fl.every(epochs=2) | fl.at_end()
        measured = fl.measure(doubled, name="two", every=every)
        return measured, fl.early_stop("two/w", patience=2, mode="max")

    whole = run(*hooks(), epochs=9)
    parts = run(*hooks(), epochs=9, state=run(*hooks(), epochs=first))
    assert (parts.step, parts.stop) == (whole.step, whole.stop)
    assert [r for r in parts.history if not r.closing] == [
        r for r in whole.history if not r.closing
    ]


@pytest.mark.parametrize("batch", range(2))
def test_an_evaluation_that_is_cut_is_made_again_and_measured_once(batch, tmp_path):
    called, cut = [], []

    def cuts(model, x):
        if not model.training:
            cut.append(x)
            if len(cut) == batch + 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(model, x)

    def look(state):
        called.append(state.step)
        return doubled(state)

    loaders = {"train": [ONE] * 3, "valid": [ONE] * 2}
    state = run(fl.measure(look, name="two"), loss=cuts, loaders=loaders)
    assert (state.step, state.stop, called, len(state.history)) == (3, "SIGTERM", [], 0)
    state = fl.restore(fl.save(state, tmp_path / "cut"), toy())
    state = run(fl.measure(look, name="two"), loaders=loaders, state=state, epochs=1)
    assert called == [3]
    assert_same(state, run(fl.measure(doubled, name="two"), loaders=loaders))


# --- errors


@pytest.mark.parametrize(("args", "settings", "error", "message"), [
    ((lambda: None,), {"name": "two"}, TypeError, "fn as a function state -> a mapping of numbers"),
    ((doubled,), {"name": 3}, TypeError, "name as what the names of its numbers begin with, a str"),
    ((doubled,), {"name": ""}, ValueError, "got an empty str"),
    ((doubled,), {"name": "a/b"}, ValueError, "a name without a slash; got 'a/b'"),
    ((doubled,), {"name": "train"}, ValueError, "a name that is free; got 'train'"),
    ((doubled,), {"name": "recent"}, ValueError, "a name that is free"),
    ((doubled,), {"name": "two", "every": 2}, TypeError, "measure expects every as every"),
    ((doubled,), {"name": "two", "every": fl.when_improved("valid/loss")}, TypeError,
        "cannot depend on it"),
    ((doubled,), {"name": "two", "everywhere": 1}, TypeError, "everywhere as True or False"),
])  # fmt: skip
def test_a_wrong_argument_is_an_error(args, settings, error, message):
    with pytest.raises(error, match=message):
        fl.measure(*args, **settings)


TWO = fl.measure(doubled, name="two")


@pytest.mark.parametrize(("hooks", "error", "message"), [
    ((fl.measure(doubled, name="valid"),), ValueError, "begin with 'valid', as those of a loader"),
    ((TWO, fl.measure(doubled, name="two")), ValueError, "as those of another hook do"),
    ((fl.every(epochs=1)(TWO),), TypeError,
        r"has measure\(doubled, name='two'\) inside, which says by itself when it is due"),
    ((fl.on_main(TWO),), TypeError, "list it alone"),
    ((fl.every(epochs=1)(fl.once(TWO)),), TypeError, "list it alone"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_update(hooks, error, message):
    state = toy()
    with pytest.raises(error, match=message):
        run(*hooks, state=state)
    assert state.step == 0


@pytest.mark.parametrize("returned", [None, 3, torch.ones(1), {"w": "x"}, {"w": torch.ones(2)}])
def test_what_is_not_a_mapping_of_numbers_is_refused(returned):
    with pytest.raises(TypeError, match=r"measure\(<lambda>, name='two'\).*(mapping|number)"):
        run(fl.measure(lambda state: returned, name="two"))


def test_it_shows_and_compares_as_it_was_typed():
    assert repr(TWO) == "measure(doubled, name='two')"
    other = fl.measure(doubled, name="two", every=fl.every(steps=2), everywhere=True)
    assert repr(other) == "measure(doubled, name='two', every=every(steps=2), everywhere=True)"
    assert fl.measure(doubled, name="two") == TWO != other


def test_dry_run_measures_once_and_knows_its_names():
    calls = []

    def look(state):
        calls.append(state.step)
        return doubled(state)

    hooks = (
        fl.measure(look, name="two", every=fl.every(epochs=5)),
        fl.early_stop("two/w", mode="min"),
    )
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), LOADERS, hooks=hooks)
    assert len(calls) == 1 and not [f for f in report.findings if f.problem]
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), LOADERS,
                        hooks=(fl.measure(lambda state: 3, name="two"),))  # fmt: skip
    assert "must return a mapping" in "".join(f.text for f in report.findings if f.problem)


# --- a hook of one's own


def test_a_hook_of_ones_own_adds_numbers_by_the_same_rule():
    class Norm(fl.Hook):
        makes_records = {"norm": fl.every(steps=2)}

        def __call__(self, state):
            return state

        def adds_numbers(self, state, record, names):
            return "norm" in names or record.closing

        def numbers(self, state):
            return {"norm/w": abs(state.model.w.item())}

    state = run(Norm(), fl.early_stop("norm/w", mode="min"), epochs=1)
    assert state.history["norm/w"] == (2.0,) and [r.step for r in state.history] == [2, 3]
