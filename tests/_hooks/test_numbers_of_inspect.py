"""inspect: a function that returns numbers puts them into the record of the evaluation."""

import json
import os
import signal

import attrs
import numpy
import pytest
import torch
from sample_hooks import stop_at
from toy_runs import ONE, fit, kept

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

VALID = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
LOADERS = {"train": [ONE] * 3, "valid": VALID}


def loss_fn(model, batch):
    loss, aux = toy_loss(model, batch)
    return loss, {**aux, "batch": batch}


def largest(state, outputs):
    """Return w × 3, the output of the last sample: each update lowers w by 1."""
    return {"last": torch.cat([out.aux["output"] for out in outputs])[-1]}


def run(*hooks, loss=loss_fn, members=(), **settings):
    return fit(*hooks, step=fl.pipeline(*members)(loss), **{"loaders": LOADERS, **settings})


def test_its_numbers_are_in_the_record_of_the_evaluation():
    state = run(fl.inspect(largest), epochs=2)
    assert state.history["valid/last"] == (-9.0, -18.0)
    assert [*state.history[0].metrics] == ["train/loss", "train/lr", "valid/loss", "valid/last"]
    assert all(type(value) is float for value in state.history["valid/last"])


def test_it_is_called_once_with_the_record_as_it_is_so_far():
    seen = []

    def look(state, outputs):
        seen.append((len(state.history), dict(state.history[-1].metrics)))
        return {"half": state.history[-1].metrics["valid/loss"] / 2}

    def again(state, outputs):
        seen.append(state.history[-1].metrics["valid/half"])
        return {"more": seen[-1] + 1}

    state = run(fl.inspect(look), fl.inspect(again))
    assert seen == [(1, {"train/loss": -1.0, "train/lr": 1.0, "valid/loss": -6.0}), -3.0]
    assert state.history[-1].metrics["valid/more"] == -2.0


def test_a_function_that_returns_nothing_changes_nothing():
    assert_same(run(fl.inspect(lambda state, outputs: None), epochs=2), run(epochs=2))
    assert_same(run(fl.inspect(lambda state, outputs: {}), epochs=2), run(epochs=2))


@pytest.mark.parametrize("number", [3, 3.0, True, torch.tensor(3), numpy.float32(3)])
def test_what_counts_as_a_number(number):
    state = run(fl.inspect(lambda state, outputs: {"n": number}))
    assert state.history["valid/n"] == (float(number),)
    json.dumps(state.history[-1].metrics)


def test_a_number_that_is_not_finite_is_recorded():
    state = run(fl.inspect(lambda state, outputs: {"n": float("nan")}))
    assert state.history[-1].metrics["valid/n"] != state.history[-1].metrics["valid/n"]


@pytest.mark.parametrize(("value", "error", "message"), [
    (3, TypeError, r"inspect\(look\): its function must return a mapping .*it returned 3"),
    ([("ap", 0.5)], TypeError, "it returned a? ?.*ap"),
    ({"ap": "0.5"}, TypeError, r"the number 'ap' as a number or a scalar tensor; got '0.5'"),
    ({"ap": None}, TypeError, "got None"),
    ({"ap": torch.ones(2)}, TypeError, r"tensor of shape \(2,\)"),
    ({3: 0.5}, TypeError, "the names of metrics, a str; got 3"),
    ({"": 0.5}, ValueError, "got an empty str"),
    ({"loss": 0.5}, ValueError, "adds the number 'valid/loss', which the record has already"),
])  # fmt: skip
def test_what_is_not_a_mapping_of_new_numbers_is_refused(value, error, message):
    def look(state, outputs):
        return value

    with pytest.raises(error, match=message) as info:
        run(fl.inspect(look))
    assert "while in inspect(look), train, epoch 1" in info.value.__notes__[-1]
    assert info.value.state.step == 3 and not len(info.value.state.history)


def test_two_hooks_cannot_add_one_number():
    with pytest.raises(ValueError, match="adds the number 'valid/last'"):
        run(fl.inspect(largest), fl.inspect(largest))


# --- known before the first update


def test_it_can_decide_when_a_run_stops_and_with_which_weights():
    """The number falls from -9: with mode "max" the first is the best."""
    look, key = fl.inspect(largest, reports=("last",)), "valid/last"
    hooks = fl.early_stop(key, patience=2, mode="max"), fl.restore_best(key, mode="max")
    state = run(look, *hooks, epochs=9)
    assert (state.epoch, state.model.w.item()) == (3, -3.0)
    assert state.history[key] == (-9.0, -18.0, -27.0)


@pytest.mark.parametrize("returned", [None, {}, {"Last": 3.0}])
def test_what_it_reports_it_has_to_return(returned):
    look = fl.inspect(lambda state, outputs: returned, reports=("last",))
    with pytest.raises(
        ValueError, match=r"reports 'valid/last', but its function returned (no|va)"
    ):
        run(look)


def test_what_watches_it_waits_where_it_is_not_due():
    look = fl.inspect(largest, every=fl.every(epochs=2), reports=("last",))
    state = run(look, fl.early_stop("valid/last", patience=1, mode="max"), epochs=9)
    assert (state.epoch, state.history["valid/last"]) == (4, (-18.0, -36.0))


# --- where it is due


@pytest.mark.parametrize(("every", "evaluate_every", "records"), [
    (fl.every(epochs=2), fl.every(epochs=1), {6: False, 12: False}),
    (fl.every(steps=4), fl.every(epochs=1), {6: False, 9: False, 12: False}),
    (fl.at_start(), fl.at_start() | fl.every(epochs=1), {0: False}),
    # What is due only because the run ends is in a closing record.
    (fl.at_end(), fl.every(epochs=1), {12: True}),
    (fl.at_end(), fl.every(epochs=3), {12: True}),
    (fl.every(epochs=3) | fl.at_end(), fl.every(epochs=1), {9: False, 12: True}),
    (fl.every(epochs=4) | fl.at_end(), fl.every(epochs=1), {12: False}),
], ids=repr)  # fmt: skip
def test_its_numbers_are_in_the_records_where_it_is_due(every, evaluate_every, records):
    state = run(fl.inspect(largest, every=every), epochs=4, evaluate_every=evaluate_every)
    found = {r.step: r.closing for r in state.history if "valid/last" in r.metrics}
    assert found == records
    assert [r.metrics["valid/last"] for r in state.history.having("valid/last")] == [
        -3.0 * step for step in records
    ]


def test_the_end_adds_no_pass_over_a_loader_that_is_evaluated_there():
    evaluated = []

    def noting(model, batch):
        if not model.training:
            evaluated.append(batch.tolist())
        return loss_fn(model, batch)

    run(fl.inspect(largest, every=fl.at_end()), loss=noting, epochs=2)
    assert evaluated.count([3.0]) == 2


def test_an_end_in_mid_epoch_or_by_a_hook_is_recorded():
    state = run(fl.inspect(largest, every=fl.at_end()), steps=2)
    assert state.history[-1].closing and state.history["valid/last"] == (-6.0,)
    state = run(fl.inspect(largest, every=fl.at_end()), stop_at(6), epochs=9)
    assert [(r.step, r.closing) for r in state.history] == [(3, False), (6, False), (6, True)]
    assert state.history[-1].metrics == {"valid/last": -18.0}


@pytest.mark.parametrize("every", [fl.every(epochs=1), fl.every(epochs=2) | fl.at_end()], ids=repr)
@pytest.mark.parametrize("first", range(1, 5))
def test_a_run_in_two_calls_equals_one_but_for_closing_records(every, first):
    """Law 2: what watches the number stops both at the same update."""

    def hooks():
        look = fl.inspect(largest, every=every, reports=("last",))
        return look, fl.early_stop("valid/last", patience=1, mode="max")

    whole = run(*hooks(), epochs=9)
    parts = run(*hooks(), epochs=9, state=run(*hooks(), epochs=first))
    assert (parts.step, parts.stop) == (whole.step, whole.stop)
    assert [r for r in parts.history if not r.closing] == [
        r for r in whole.history if not r.closing
    ]


# --- cut and resumed


@pytest.mark.parametrize("how", ["memory", "checkpoint"])
@pytest.mark.parametrize("at", range(12))
def test_a_run_that_is_resumed_at_any_update_has_the_same_record(at, how, tmp_path):
    def hooks():
        look = fl.inspect(largest, every=fl.every(steps=2), reports=("last",))
        return look, fl.early_stop("valid/last", patience=3, mode="min")

    moment = {"epochs": 4, "evaluate_every": fl.every(steps=2) | fl.every(epochs=1)}
    whole = run(*hooks(), **moment)
    state = run(*hooks(), stop_at(at), **moment) if at else toy()
    state = kept(how, attrs.evolve(state, stop=None), toy(), tmp_path)
    resumed = run(*hooks(), state=state, **moment)
    open_ended = lambda state: [r for r in state.history if not r.closing]
    assert open_ended(resumed) == open_ended(whole)
    assert resumed.model.w.item() == whole.model.w.item()


@pytest.mark.parametrize("batch", range(4))
def test_an_evaluation_that_is_cut_is_made_again_and_recorded_once(batch, tmp_path):
    """It is cut in each batch of the two loaders; the function is called when both are made."""
    called, cut = [], []

    def cuts(model, x):
        if not model.training:
            cut.append(x)
            if len(cut) == batch + 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return loss_fn(model, x)

    def look(state, outputs):
        called.append(state.step)
        return largest(state, outputs)

    loaders = {**LOADERS, "test": VALID}
    settings = {"loaders": loaders, "loss": cuts}
    state = run(fl.inspect(look), **settings)
    assert (state.step, state.stop) == (3, "SIGTERM")
    assert not len(state.history) and not called
    state = fl.restore(fl.save(state, tmp_path / "cut"), toy())
    state = run(fl.inspect(look), state=state, **settings, epochs=1)
    assert called == [3] and [r.step for r in state.history] == [3]
    assert_same(state, run(fl.inspect(largest), loaders=loaders))


def test_after_an_exception_of_the_function_the_record_is_made_with_the_numbers():
    calls = []

    def fails_once(state, outputs):
        calls.append(state.step)
        if len(calls) == 1:
            raise ArithmeticError("boom")
        return largest(state, outputs)

    with pytest.raises(ArithmeticError) as info:
        run(fl.inspect(fails_once))
    state = run(fl.inspect(fails_once), state=info.value.state, epochs=1)
    assert calls == [3, 3]
    assert_same(state, run(fl.inspect(largest)))


# --- within other hooks


@pytest.mark.parametrize("wrap", [
    fl.every(epochs=1), fl.on_main, lambda hook: fl.every(epochs=1)(fl.once(hook)),
    fl.when_improved("valid/loss"), fl.at_end(),
])  # fmt: skip
def test_within_another_hook_numbers_are_refused(wrap):
    with pytest.raises(TypeError, match=r"is within another hook, which calls it after the record"):
        run(wrap(fl.inspect(largest)))
    state = toy()
    with pytest.raises(TypeError, match=r"list inspect\(fn, every=...\) by itself"):
        run(wrap(fl.inspect(largest, reports=("last",))), state=state)
    assert state.step == 0


@pytest.mark.parametrize(("reports", "error", "message"), [
    ("last", TypeError, r'reports as a tuple of names without the loader, such as \("ap",\)'),
    (["last"], TypeError, "got"), ((3,), TypeError, "a str; got 3"), (("",), ValueError, "empty"),
    (("valid/last",), ValueError, "without the name of the loader; got 'valid/last': write 'last'"),
])  # fmt: skip
def test_reports_are_names_without_the_loader(reports, error, message):
    with pytest.raises(error, match=message):
        fl.inspect(largest, reports=reports)


def test_it_shows_and_compares_with_what_it_reports():
    look = fl.inspect(largest, "test", reports=("last",))
    assert repr(look) == "inspect(largest, loader='test', reports=('last',))"
    assert look == fl.inspect(largest, "test", reports=("last",)) != fl.inspect(largest, "test")
    assert look.reports == ("test/last",)


def test_dry_run_tries_it_and_says_what_raises():
    report = fl.dry_run(
        fl.pipeline()(loss_fn), toy(), LOADERS,
        hooks=(
            fl.inspect(largest, every=fl.every(epochs=5), reports=("last",)),
            fl.inspect(lambda state, outputs: 3), fl.early_stop("valid/last", mode="min"),
        ),
    )  # fmt: skip
    problems = [finding for finding in report.findings if finding.problem]
    assert len(problems) == 1 and "must return a mapping" in problems[0].text
    assert any("last -" in finding.text for finding in report.findings)
