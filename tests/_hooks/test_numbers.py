"""Numbers that functions add to records: those of inspect, of the outputs of an evaluation that the
run makes anyway, and those of measure, of the state. Each update lowers w, and so both, by 1 and 3.

The laws, resumes at every update and purity, are in tests/test_laws.py and _loop/test_cut_runs.py.
"""

import json
import random

import numpy
import pytest
import torch
from sample_hooks import stop_at
from torch import nn
from toy_runs import ONE, fit, of

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

VALID = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
LOADERS = {"train": [ONE] * 3, "valid": VALID}
LAST, TWO, EPOCH = "valid/last", "two/w", fl.every(epochs=1)


def largest(state, outputs):
    """Return 3 × w, the output of the last sample."""
    return {"last": torch.cat([out.aux["output"] for out in outputs])[-1]}


def tripled(state):
    return {"w": 3 * state.model.w}


def inspect(fn=largest, every=EPOCH, reports=("last",)):
    """Return ``inspect`` with a function of the state and the outputs."""
    return fl.inspect(fn, every=every, reports=reports)


def measure(fn=tripled, every=EPOCH):
    return fl.measure(fn, name="two", every=every)


BOTH = pytest.mark.parametrize(("make", "key"), [(inspect, LAST), (measure, TWO)])


def run(*hooks, loss=toy_loss, members=(), **settings):
    return fit(*hooks, step=fl.pipeline(*members)(loss), **{"loaders": LOADERS, **settings})


def places(state, key):
    """Return the steps of the records with a number, and which of them are closing records."""
    found = [record for record in state.history if key in record.metrics]
    assert all(record.metrics[key] == -3.0 * record.step for record in found)
    return {record.step: record.closing for record in found}


# --- both


@BOTH
def test_its_numbers_join_the_record_of_an_evaluation(make, key):
    """It is called once for each, with the record as it is so far."""
    seen = []

    def look(state, *outputs):
        seen.append((len(state.history), dict(state.history[-1].metrics)))
        return {key.split("/")[1]: seen[-1][1]["valid/loss"] / 2}

    state = run(make(look), epochs=2)
    assert state.history[key] == (-3.0, -6.0) and all(type(x) is float for x in state.history[key])
    assert [*state.history[0].metrics] == ["train/loss", "train/lr", "valid/loss", key]
    first = {"train/loss": -1.0, "train/lr": 1.0, "valid/loss": -6.0}
    assert len(state.history) == len(seen) == 2 and seen[0] == (1, first)
    assert places(run(make(), epochs=2), key) == {3: False, 6: False}


@BOTH
def test_it_can_decide_when_a_run_stops_and_what_is_kept(make, key, tmp_path):
    """The number falls from -18: with mode "max" the first is the best, and others wait for it."""
    hooks = (
        make(every=fl.every(epochs=2)),
        fl.early_stop(key, patience=1, mode="max"), fl.restore_best(key, mode="max"),
        fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=1, best=key, mode="max")),
    )  # fmt: skip
    members = (fl.plateau(key, mode="max", patience=1),) if make is measure else ()
    state = run(*hooks, members=members, epochs=9)
    assert (state.epoch, state.history[key]) == (4, (-18.0, -36.0))
    assert state.model.w.item() == -6.0
    assert fl.restore(fl.best(tmp_path), toy()).step == 6


@BOTH
def test_what_is_due_only_at_the_end_is_in_a_closing_record(make, key):
    end = make(every=fl.at_end())
    for hooks, targets in (((end,), {"steps": 2}), ((end, stop_at(2)), {})):
        state = run(*hooks, **targets)
        assert [(r.step, r.closing) for r in state.history] == [(2, True)]
        assert places(state, key) == {2: True} and "valid/loss" in state.history[0].metrics
    for hooks, targets in (((end,), {"epochs": 2}), ((end, stop_at(6)), {"epochs": 9})):
        state = run(*hooks, **targets)
        assert [(r.step, r.closing) for r in state.history] == [(3, False), (6, False), (6, True)]
        rest = {} if make is inspect else {"train/loss": -4.0, "train/lr": 1.0}
        assert state.history[-1].metrics == {key: -18.0, **rest}


@BOTH
def test_after_an_exception_of_the_function_the_record_is_made_with_the_numbers(make, key):
    """Modes and generators are put back."""
    calls, function, before = [], largest if make is inspect else tripled, torch.get_rng_state()

    def fails_once(state, *outputs):
        torch.rand(3)
        calls.append(state.step)
        if len(calls) == 1:
            raise ArithmeticError("boom")
        return function(state, *outputs)

    with pytest.raises(ArithmeticError) as info:
        run(make(fails_once))
    name = repr(make(fails_once, fl.every(epochs=1)))
    assert info.value.__notes__[-1] == f"while in {name}, train, epoch 1, batch 3, step 3"
    left = info.value.state
    assert left.model.training and torch.equal(torch.get_rng_state(), before)
    assert left.step == 3 and not len(left.history)
    state = run(make(fails_once), state=left, epochs=1)
    assert calls == [3, 3]
    assert_same(state, run(make()))


@pytest.mark.parametrize("number", [3, 3.0, True, torch.tensor(3), numpy.float32(3), float("nan")])
@BOTH
def test_what_counts_as_a_number(make, key, number):
    state = run(make(lambda *given: {key.split("/")[1]: number}))
    assert str(state.history[key]) == str((float(number),))
    json.dumps(state.history[-1].metrics)


@BOTH
@pytest.mark.parametrize(("value", "error", "message"), [
    (3, TypeError, r"\(look.*: its function must return a mapping .*it returned 3"),
    ([("ap", 0.5)], TypeError, "it returned a? ?.*ap"),
    (torch.ones(1), TypeError, "must return a mapping"),
    ({"ap": "0.5"}, TypeError, r"the number 'ap' as a number or a scalar tensor; got '0.5'"),
    ({"ap": None}, TypeError, "got None"),
    ({"ap": torch.ones(2)}, TypeError, r"tensor of shape \(2,\)"),
    ({3: 0.5}, TypeError, "the names of metrics, a str; got 3"),
    ({"": 0.5}, ValueError, "got an empty str"),
])  # fmt: skip
def test_what_is_not_a_mapping_of_numbers_is_refused(make, key, value, error, message):
    def look(state, *outputs):
        return value

    with pytest.raises(error, match=message) as info:
        run(make(look))
    assert f"while in {make.__name__}(look, " in info.value.__notes__[-1]
    assert info.value.state.step == 3 and not len(info.value.state.history)


@BOTH
def test_dry_run_tries_it_once_and_says_what_raises(make, key):
    calls, function = [], largest if make is inspect else tripled
    look = lambda state, *outputs: calls.append(state.step) or function(state, *outputs)
    hooks = make(look, every=fl.every(epochs=5)), fl.early_stop(key, mode="min")
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), LOADERS, hooks=hooks)
    assert len(calls) == 1 and not report.problems
    said = "last -" if make is inspect else "called"
    assert any(said in finding.text for finding in report.findings)
    hooks = (make(lambda *given: 3, fl.at_end()),)
    report = fl.dry_run(fl.pipeline()(toy_loss), toy(), LOADERS, hooks=hooks)
    assert "must return a mapping" in "".join(report.problems)


# --- inspect


def test_hooks_see_the_numbers_of_those_before_and_cannot_add_them_again():
    again = lambda state, outputs: {"more": state.history[-1].metrics[LAST] + 1}
    assert run(inspect(), inspect(again, reports=())).history["valid/more"] == (-8.0,)
    for returned in ("last", "loss"):
        look = inspect(lambda state, outputs, name=returned: {name: 0.5}, reports=())
        with pytest.raises(ValueError, match=f"adds the number 'valid/{returned}', which the rec"):
            run(inspect(), look)


@pytest.mark.parametrize("returned", [None, {}])
def test_a_function_that_returns_nothing_changes_nothing(returned):
    assert_same(run(inspect(lambda *given: returned, reports=()), epochs=2), run(epochs=2))


@pytest.mark.parametrize("returned", [None, {}, {"Last": 3.0}])
def test_what_it_reports_it_has_to_return(returned):
    message = r"reports 'valid/last', but its function returned (no|va)"
    with pytest.raises(ValueError, match=message):
        run(inspect(lambda state, outputs: returned))


@pytest.mark.parametrize(("every", "evaluate_every", "steps", "closing"), [
    (fl.every(epochs=2), EPOCH, [6, 12], []), (fl.every(steps=1), EPOCH, [3, 6, 9, 12], []),
    (fl.every(steps=4), EPOCH, [6, 9, 12], []),  # due at 4, 8 and 12: it waits for the next
    (EPOCH, fl.every(steps=4), [4, 8, 12], []),  # due at 3, 6, 9 and 12
    (fl.when(lambda state: state.step == 5), EPOCH, [6], []), (fl.every(steps=99), EPOCH, [], []),
    (fl.every(seconds=1000), EPOCH, [], []), (fl.at_start(), fl.at_start() | EPOCH, [0], []),
    # What is due only because the run ends is in a closing record.
    (fl.at_end(), EPOCH, [], [12]), (fl.at_end(), fl.every(epochs=3), [], [12]),
    (fl.every(epochs=3) | fl.at_end(), EPOCH, [9], [12]),
    (fl.every(epochs=4) | fl.at_end(), EPOCH, [12], []),
], ids=repr)  # fmt: skip
def test_numbers_of_inspect_are_in_the_records_where_it_is_due(
    every, evaluate_every, steps, closing
):
    state = run(inspect(every=every), epochs=4, evaluate_every=evaluate_every)
    assert places(state, LAST) == dict.fromkeys(steps, False) | dict.fromkeys(closing, True)


@pytest.mark.parametrize("wrap", [
    fl.every(epochs=1), fl.on_main, lambda hook: fl.every(epochs=1)(fl.once(hook)),
    fl.when_improved("valid/loss"), fl.at_end(),
])  # fmt: skip
def test_within_another_hook_numbers_of_inspect_are_refused(wrap):
    with pytest.raises(TypeError, match=r"is within another hook, which calls it after the record"):
        run(wrap(inspect(reports=())))
    state = toy()
    with pytest.raises(TypeError, match=r"list inspect\(fn, every=...\) by itself"):
        run(wrap(inspect()), state=state)
    assert state.step == 0


@pytest.mark.parametrize(("reports", "error", "message"), [
    ("last", TypeError, r'reports as a tuple of names without the loader, such as \("ap",\)'),
    (("valid/last",), ValueError, "without the name of the loader; got 'valid/last': write 'last'"),
])  # fmt: skip
def test_reports_are_names_without_the_loader(reports, error, message):
    with pytest.raises(error, match=message):
        fl.inspect(largest, reports=reports)


# --- measure


@pytest.mark.parametrize(("every", "steps"), [
    (fl.every(steps=2), [2, 4, 6]), (fl.at_start() | fl.every(epochs=1), [0, 3, 6]),
    (fl.at_end(), [6]), (fl.every(steps=4) | fl.at_end(), [4, 6]), (fl.every(epochs=3), []),
    (fl.when(lambda state: state.step == 5), [5]),
], ids=repr)  # fmt: skip
def test_where_there_is_no_record_one_is_made(every, steps):
    state, plain = run(measure(every=every), epochs=2), run(epochs=2)
    assert [*places(state, TWO)] == steps
    assert {r.step for r in state.history} == {3, 6, *steps}
    assert state.history["valid/loss"] == plain.history["valid/loss"]
    assert state.model.w.item() == plain.model.w.item()


def test_a_closing_record_has_none_where_it_is_not_due_and_no_loader_is_needed():
    state = run(measure(), steps=2)
    assert state.history[-1].closing and TWO not in state.history
    state = run(measure(), loaders=[ONE] * 3)
    assert [*state.history[-1].metrics] == ["train/loss", "train/lr", TWO]


WATCHED = ["train/loss", "valid/loss", "recent/loss"]


@pytest.mark.parametrize("key", WATCHED)
@pytest.mark.parametrize("every", [fl.every(steps=1), fl.every(steps=4)], ids=repr)
def test_what_watches_another_metric_sees_no_value_more(key, every, tmp_path):
    """Each update multiplies w - 1.2 by 1 - 2 · lr, which is -1.4 until plateau halves the rate."""

    def trained(*hooks, name):
        improved, saved = [], fl.checkpoint(tmp_path / name, keep=1, best=key)
        note = fl.when_improved(key)(lambda state: improved.append(state.step) or state)
        state = run(
            *hooks, fl.early_stop(key, patience=4), note, fl.restore_best(key),
            fl.every(steps=1)(saved),
            members=(fl.plateau(key, patience=1, factor=0.5),), record_every=fl.every(steps=3),
            loss=lambda model, x: (model.w - 1.2).square() * x.mean(), state=toy(lr=1.2), epochs=9,
        )  # fmt: skip
        best = fl.best(tmp_path / name, key)
        values = {k: state.history[k] for k in (*WATCHED, "train/lr", "recent/lr")}
        return values, improved, state.stop, state.model.w.item(), best.name.split("-")[:2]

    plain, measured = trained(name="a"), trained(measure(every=every), name="b")
    assert plain == measured
    assert len({*plain[0]["train/lr"]}) > 1 and plain[1]


def test_plateau_counts_epochs_alone_where_something_is_measured_within_them():
    """The loss is 0, -1, ... as w falls, so it never rises: by "max" each epoch is one too many."""
    for hooks in ((), (measure(every=fl.every(steps=1)),)):
        slower = fl.plateau("train/loss", patience=1, factor=0.5, mode="max")
        state = run(*hooks, members=(slower,), loaders=[ONE] * 2, epochs=4)
        assert state.history["train/lr"] == (1.0, 1.0, 0.5, 0.25)


@pytest.mark.parametrize("ends", [{"steps": 2}, {"hook": 2}], ids=str)
def test_a_run_that_ends_where_something_is_measured_is_evaluated_as_without_it(ends):
    hooks = () if "steps" in ends else (stop_at(2),)
    settings = {"epochs": 2} if hooks else ends
    plain = run(*hooks, **settings)
    state = run(measure(every=fl.every(steps=1)), *hooks, **settings)
    assert places(state, TWO) == {1: False, 2: False}
    assert [r for r in state.history if TWO not in r.metrics] == [*plain.history]
    assert plain.history[-1].closing and "valid/loss" in plain.history[-1].metrics


class Counting(nn.Module):
    """Counts its calls in a buffer, in evaluation mode too, and has a frozen submodule."""

    def __init__(self):
        super().__init__()
        self.w, self.frozen = nn.Parameter(torch.ones(1)), nn.Dropout().eval()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.w * x


def test_it_is_in_evaluation_mode_with_draws_of_the_seed_and_leaves_all_as_it_was():
    def look(state):
        state.model(torch.ones(2))
        draws = torch.rand(1).item(), random.random(), numpy.random.rand()
        flags = {"training": state.model.training, "gradients": torch.is_grad_enabled()}
        return {**dict(zip("abc", draws, strict=True)), **flags}

    def trained(*hooks):
        loss = lambda model, x: (model(x) - random.random()).square().mean()
        return run(*hooks, loss=loss, state=of(Counting(), lr=0.1), epochs=3)

    plain, state = trained(), trained(fl.measure(look, name="two", every=fl.every(steps=1)))
    assert state.history["two/training"] == state.history["two/gradients"] == (0.0,) * 9
    assert state.model.calls == plain.model.calls == 9 and state.model.w == plain.model.w
    assert state.model.training and not state.model.frozen.training
    assert all(len({*state.history[f"two/{name}"]}) == 1 for name in "abc")


def test_it_has_the_weights_of_an_evaluation():
    """An optimizer without a schedule evaluates other weights than those that it trains."""
    schedulefree = pytest.importorskip("schedulefree")
    found = []

    def loss_fn(model, batch):
        if not model.training:
            found.append(model.w.item())
        return (model(batch) - 1).square().mean()

    state = of(toy().model, schedulefree.SGDScheduleFree, lr=0.1)
    state = run(measure(), loss=loss_fn, state=state, loaders=([ONE] * 3, [ONE]), epochs=2)
    assert state.history[TWO] == pytest.approx([3 * w for w in found]) and len({*found}) == 2


def test_a_name_that_it_does_not_return_is_refused_at_its_first_record():
    with pytest.raises(KeyError, match=r"there is no metric 'two/v'; there are: .*two/w"):
        run(measure(), fl.early_stop("two/v", mode="min"))


@pytest.mark.parametrize(("args", "settings", "error", "message"), [
    ((tripled,), {"name": "a/b"}, ValueError, "a name without a slash; got 'a/b'"),
    ((tripled,), {"name": "train"}, ValueError, "a name that is free; got 'train'"),
    ((tripled,), {"name": "two", "every": fl.when_improved("valid/loss")}, TypeError,
        "cannot depend on it"),
])  # fmt: skip
def test_a_wrong_argument_of_measure_is_an_error(args, settings, error, message):
    with pytest.raises(error, match=message):
        fl.measure(*args, **settings)


@pytest.mark.parametrize(("hooks", "error", "message"), [
    ((fl.measure(tripled, name="valid"),), ValueError, "begin with 'valid', as those of a loader"),
    ((measure(), measure()), ValueError, "as those of another hook do"),
    ((fl.every(epochs=1)(measure()),), TypeError,
        r"has measure\(tripled, name='two'\) inside, which says by itself when it is due"),
    ((fl.on_main(measure()),), TypeError, "list it alone"),
    ((fl.every(epochs=1)(fl.once(measure())),), TypeError, "list it alone"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_update(hooks, error, message):
    state = toy()
    with pytest.raises(error, match=message):
        run(*hooks, state=state)
    assert state.step == 0


def test_a_hook_of_ones_own_adds_numbers_by_the_same_rule():
    class Norm(fl.Hook):
        makes_records = {"norm": fl.every(steps=2)}

        def __call__(self, state):
            return state

        def numbers(self, state):
            return {"norm/w": abs(state.model.w.item())}

    state = run(Norm(), fl.early_stop("norm/w", mode="min"), epochs=1)
    assert state.history["norm/w"] == (2.0,) and [r.step for r in state.history] == [2, 3]


def given(numbers):
    class Gives(fl.Hook):
        def __call__(self, state):
            return state

        def numbers(self, state):
            return numbers

    return Gives()


@pytest.mark.parametrize(
    ("numbers", "error", "message"),
    [
        *(({name: 1.0}, ValueError, f"a record has {name!r} besides its metrics")
          for name in ("epoch", "step", "seconds", "items", "closing")),
        ({1: 1.0}, TypeError, "expects metrics as names of metrics"),
        ({"": 1.0}, ValueError, "expects metrics as names of metrics"),
        (None, TypeError, 'must return a mapping from names to numbers, such as {"valid/ap": 0.5}'),
        ({"train/loss": 1.0}, ValueError, "adds the number 'train/loss', which the record has"),
    ],
)  # fmt: skip
def test_numbers_that_no_checkpoint_could_tell_from_the_rest_are_refused(numbers, error, message):
    with pytest.raises(error) as raised:
        fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 2, hooks=(given(numbers),))
    assert message in str(raised.value)
    assert "Gives" in " ".join([str(raised.value), *raised.value.__notes__])
