"""state.items, and what counts by it: fit(items=), every(items=) and schedule(by="items")."""

import math

import attrs
import pytest
import torch
from toy_runs import fitted, noting

import fnloop as fl
from fnloop._core.metrics import ITEMS
from fnloop.testing import toy, toy_loss

SIZES = (3, 4, 5, 2, 6, 1, 7)  # 28 in an epoch
BATCHES = [torch.ones(n) for n in SIZES]
REACHED = (3, 7, 12, 14, 20, 21, 28, 31, 35, 40)  # after each update


def on_device(model, batch):
    """Weigh a batch by a tensor, as a loss function that counts tokens does."""
    return toy_loss(model, batch)[0], {"weight": torch.tensor(len(batch))}


LOSSES = pytest.mark.parametrize("loss_fn", [toy_loss, on_device])


def late(loss_fn, counts):
    """Return counts as they are seen after each update."""
    return [*counts] if loss_fn is toy_loss else [0, *counts[:-1]]


def followed(loss_fn, *members, hooks=(), **settings):
    look, seen = noting(lambda state: (state.step, state.items))
    state = fitted(BATCHES, *members, loss_fn=loss_fn, hooks=(look, *hooks), **settings)
    return state, seen


# --- fit(items=)


def test_a_run_ends_with_the_update_that_reaches_the_target():
    state, seen = followed(toy_loss, items=40)
    assert seen == [*enumerate(REACHED, 1)]
    assert (state.step, state.epoch, state.items, state.history[-1].items) == (10, 1, 40, 40)
    assert followed(toy_loss, items=39)[0].step == 10
    assert followed(toy_loss, items=35)[0].step == 9


def test_where_weights_are_tensors_the_count_is_that_of_the_update_before():
    state, seen = followed(on_device, items=40)
    assert [items for _, items in seen] == [0, *REACHED]
    assert (state.step, state.items, state.history[-1].items) == (11, 40, 42)  # one update more


@LOSSES
def test_the_count_is_the_same_where_nothing_depends_on_it(loss_fn):
    assert followed(loss_fn, steps=9)[1] == followed(loss_fn, items=40)[1][:9]


@LOSSES
def test_a_run_by_items_equals_one_by_updates(loss_fn):
    one = followed(loss_fn, items=40)[0]
    other = followed(loss_fn, steps=one.step)[0]
    assert torch.equal(one.model.w, other.model.w) and one.step == other.step
    assert [r.metrics for r in one.history] == [r.metrics for r in other.history]


@LOSSES
def test_the_same_target_trains_no_further_and_another_one_does(loss_fn):
    state = followed(loss_fn, items=20)[0]
    step = state.step
    state = fitted(BATCHES, loss_fn=loss_fn, state=state, items=20)
    assert state.step == step
    state = fitted(BATCHES, loss_fn=loss_fn, state=state, items=40)
    assert state.step == followed(loss_fn, items=40)[0].step


def test_the_first_target_that_is_reached_ends_the_run():
    assert followed(toy_loss, items=40, steps=4)[0].step == 4
    assert followed(toy_loss, items=12, steps=4)[0].step == 3
    assert followed(toy_loss, items=40, epochs=1)[0].step == 7
    assert followed(toy_loss, items=0)[0].step == 0


@LOSSES
@pytest.mark.parametrize("members", [(), (fl.accumulate(2),), (fl.skip_nonfinite(),)])
def test_windows_and_guards_count_what_is_applied(loss_fn, members):
    state, seen = followed(loss_fn, *members, items=28)
    if members and members[0].name == "accumulate":
        assert [items for _, items in seen] == late(loss_fn, [7, 14, 21, 28, 35][: len(seen)])
    else:
        assert [items for _, items in seen] == late(loss_fn, REACHED[: len(seen)])
    assert state.items >= 28


@LOSSES
def test_what_is_left_out_does_not_count(loss_fn):
    batches = [torch.ones(3), torch.full((4,), math.nan), torch.ones(5)]
    look, seen = noting(lambda state: state.items)
    fitted(batches, fl.skip_nonfinite(), loss_fn=loss_fn, epochs=1, hooks=(look,))
    assert seen == ([3, 3, 8] if loss_fn is toy_loss else [0, 0, 3])


def test_items_need_not_be_whole_numbers():
    half = lambda model, batch: (toy_loss(model, batch)[0], {"weight": torch.tensor(2.5)})
    state = fitted([1, 2, 3], loss_fn=half, items=6)
    assert (state.step, state.items) == (4, 7.5)


# --- cut and continued


@LOSSES
@pytest.mark.parametrize("cut", range(1, 11))
def test_a_run_that_is_cut_ends_and_counts_as_one_that_was_not(loss_fn, cut, tmp_path):
    def settings():
        return {"hooks": (fl.every(items=8)(look), fl.when(lambda s: s.step == cut)(save))}

    look, seen = noting(lambda state: (state.step, state.items))
    save = lambda state: fl.save(state, tmp_path / "a") and state
    whole = fitted(BATCHES, loss_fn=loss_fn, items=40, **settings())
    calls = [*seen]
    restored = fl.restore(tmp_path / "a", toy())
    assert restored.items == late(loss_fn, (*REACHED, 42))[cut - 1]
    seen.clear()
    cut_run = fitted(BATCHES, loss_fn=loss_fn, state=restored, items=40, **settings())
    assert seen == [call for call in calls if call[0] > cut]
    assert (cut_run.step, cut_run.items) == (whole.step, whole.items)
    assert torch.equal(cut_run.model.w, whole.model.w)


@LOSSES
@pytest.mark.parametrize("epochs", [1, 2])
def test_what_continues_in_the_same_process_counts_on(loss_fn, epochs):
    part = fitted(BATCHES, loss_fn=loss_fn, epochs=epochs)
    state = fitted(BATCHES, loss_fn=loss_fn, state=fl.snapshot(part), items=84)
    assert state.step == followed(loss_fn, items=84)[0].step


@LOSSES
def test_a_later_call_of_a_script_passes_over_a_target_that_was_reached(loss_fn):
    """The script trains up to 20 items, and then up to 7 updates: it was cut in the second."""

    def script(state, steps=7):
        state = fitted(BATCHES, loss_fn=loss_fn, state=state, items=12, hooks=(atend,))
        return fitted(BATCHES, loss_fn=loss_fn, state=state, steps=steps)

    look, seen = noting(lambda state: state.step)
    atend = fl.at_end()(look)
    whole = script(toy())
    calls = [*seen]
    seen.clear()
    again = script(fl.snapshot(script(toy(), steps=calls[0] + 1)))
    assert seen == calls and torch.equal(again.model.w, whole.model.w)


# --- every(items=)


@LOSSES
@pytest.mark.parametrize(
    ("every", "steps"), [(8, [3, 5, 7, 9, 10]), (1, [*range(1, 11)]), (30, [8]), (50, [])]
)
def test_a_moment_is_due_where_a_multiple_is_reached(loss_fn, every, steps):
    look, seen = noting(lambda state: state.step)
    fitted(BATCHES, loss_fn=loss_fn, items=40, hooks=(fl.every(items=every)(look),))
    assert seen == [step + (loss_fn is on_device) for step in steps]


def test_a_moment_composes_and_evaluates():
    loaders = {"train": BATCHES, "valid": [torch.ones(1)]}
    state = fitted(loaders, steps=7, evaluate_every=fl.every(items=10))
    assert [r.items for r in state.history if "valid/loss" in r.metrics] == [12, 20]
    look, seen = noting(lambda state: state.step)
    fitted(BATCHES, epochs=1, hooks=((fl.every(items=20) | fl.every(steps=3))(look),))
    assert seen == [3, 5, 6]
    records = fitted(BATCHES, epochs=1, record_every=fl.every(items=10)).history
    assert [record.step for record in records] == [3, 5, 7]


def test_a_step_that_passes_several_multiples_is_due_once():
    look, seen = noting(lambda state: state.items)
    fitted([torch.ones(25), torch.ones(1)], epochs=1, hooks=(fl.every(items=10)(look),))
    assert seen == [25]


def test_a_hook_that_asks_a_moment_names_it():
    class Own(fl.Hook):
        def __init__(self, moments):
            self.moment, self.moments, self.seen = fl.every(items=10), moments, []

        def __call__(self, state):
            if self.moment.due(state):
                self.seen.append(state.step)
            return state

    own = Own(())
    with pytest.raises(RuntimeError, match=r"moments = \(moment,\)"):
        fitted(BATCHES, epochs=1, hooks=(own,))
    own = Own(())
    own.moments = (own.moment,)
    fitted(BATCHES, epochs=1, hooks=(own,))
    assert own.seen == [3, 5]


# --- schedule(by="items")


def called(loss_fn, state=None, **run):
    """Return what a schedule by items was called with."""
    calls = []
    rate = fl.schedule(lambda items, total: calls.append((items, total)) or 1.0, by="items")
    state = fitted(BATCHES, rate, loss_fn=loss_fn, state=state, **run)
    return state, calls


@LOSSES
def test_a_schedule_by_items_gets_those_before_the_update_and_the_target(loss_fn):
    _, calls = called(loss_fn, items=28)
    before = [0, *late(loss_fn, REACHED)]
    assert calls == [(items, 28) for items in before if items < 28]
    assert called(loss_fn, steps=2)[1] == [(items, None) for items in before[:2]]


def test_a_schedule_by_items_sets_the_rate():
    """Rates of 1, 3/4 and 2/4 on batches of 1, 1 and 2 ones: the last update is that of item 4."""
    linear = fl.schedule(lambda items, total: 1 - items / total, by="items")
    batches = [torch.ones(1), torch.ones(1), torch.ones(2)]
    state = fitted(batches, linear, items=4)
    assert state.model.w.item() == -(1 + 0.75 + 0.5)
    warm = fl.schedule(fl.schedules.cosine(warmup=2), by="items")
    run = fitted(batches, warm, items=4, record_every=fl.every(steps=1))
    assert run.history["recent/lr"] == (0.5, 1.0, 1.0)


@LOSSES
@pytest.mark.parametrize("cut", range(1, 8))
def test_a_schedule_by_items_continues(loss_fn, cut, tmp_path):
    linear = lambda: fl.schedule(lambda items, total: 1 - items / total, by="items")
    save = lambda state: fl.save(state, tmp_path / "a") and state
    hooks = (fl.when(lambda state: state.step == cut)(save),)
    whole = fitted(BATCHES, linear(), loss_fn=loss_fn, items=28, hooks=hooks)
    restored = fl.restore(tmp_path / "a", toy())
    rest = fitted(BATCHES, linear(), loss_fn=loss_fn, state=restored, items=28)
    assert torch.equal(rest.model.w, whole.model.w) and rest.items == whole.items


def test_turns_of_alternate_are_scheduled_by_the_items_of_the_run():
    model = torch.nn.Linear(1, 1)
    optimizers = {"a": torch.optim.SGD([model.weight]), "b": torch.optim.SGD([model.bias])}
    state = fl.TrainState.create(model, optimizers, seed=0)
    calls = []
    rate = fl.schedule(lambda items, total: calls.append((items, total)) or 1.0, by="items")
    make = lambda *members: fl.pipeline(*members)(lambda model, batch: model(batch).mean())
    step = fl.alternate({"a": make(), "b": make(rate)})
    state = fl.fit(step, state, [torch.ones(3, 1)] * 9, items=18, hooks=())
    assert calls == [(0, 18), (6, 18), (12, 18)] and state.step == 3


# --- phases


@LOSSES
def test_a_phase_counts_from_where_it_began(loss_fn):
    state = fitted(BATCHES, loss_fn=loss_fn, items=12, phase="one")
    assert state.step == 3 + (loss_fn is on_device)
    first = state.items
    calls = []
    rate = fl.schedule(lambda items, total: calls.append((items, total)) or 1.0, by="items")
    look, seen = noting(lambda state: state.items - first)
    settings = {"loss_fn": loss_fn, "items": 7, "phase": "two", "hooks": (look,)}
    state = fitted(BATCHES, rate, state=state, **settings)
    assert state.phases[1].items == first == 12
    assert seen == ([3, 7] if loss_fn is toy_loss else [2, 5, 9])
    assert calls == [(items, 7) for items in (0, *seen[:-1])]
    done = fitted(BATCHES, rate, state=state, **settings)
    assert done.step == state.step


def test_a_phase_that_begins_in_mid_epoch_keeps_the_count():
    state = fitted(BATCHES, steps=3, phase="one")
    state = fitted(BATCHES, state=state, steps=2, phase="two")
    assert state.items == 19 and state.history[-1].items == 19  # 3 + 4 + 5, and 3 + 4 again


# --- no host reads, and what is refused


def test_nothing_is_read_where_nothing_depends_on_it():
    from fnloop._core.items import HostCopy, _Unread

    state = fitted(BATCHES, loss_fn=on_device, steps=3)
    counted = state._counted
    assert counted.now is None and isinstance(counted.late, _Unread) and counted.copy is None
    state = fitted(BATCHES, loss_fn=on_device, items=12)
    assert isinstance(state._counted.copy, HostCopy) and state._counted.copy.read() == 14


def test_what_an_older_version_has_not_counted_is_refused():
    state = fitted(BATCHES, epochs=2)
    metrics = {name: metric for name, metric in state.metrics.items() if name != ITEMS}
    state = attrs.evolve(state, metrics=metrics)
    assert state.items is None
    with pytest.raises(ValueError, match="does not know how many items"):
        fitted(BATCHES, state=state, items=100)
    assert fitted(BATCHES, state=state, epochs=3).step == 21


def test_a_negative_weight_ends_the_run():
    wrong = lambda model, batch: (toy_loss(model, batch)[0], {"weight": torch.tensor(-1.0)})
    with pytest.raises(ValueError, match="a weight was negative"):
        fitted(BATCHES, loss_fn=wrong, items=100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fitted(BATCHES, items=2.5), "the target for state.items"),
        (lambda: fitted(BATCHES, items=-1), "the target for state.items"),
        (lambda: fl.every(items=0.5), "every expects items as an int"),
        (lambda: fl.every(items=0), "every expects items"),
        (lambda: fl.every(items=3, steps=3), "one of epochs=, steps=, items= or seconds="),
        (lambda: fl.schedule(lambda i, n: 1.0, by="tokens"), "by"),
        (lambda: fl.schedule(lambda state: 1.0, by="items"), "which takes the state"),
        (
            lambda: fitted(BATCHES, fl.schedule(lambda i, n: 1 / n, by="items"), steps=2),
            "needs the items of the whole run: call fit",
        ),
        (
            lambda: fitted(BATCHES, fl.schedule(lambda i, n: 1 / n), items=9),
            'items= ends it: write schedule.*by="items"',
        ),
    ],
)
def test_wrong_calls_say_what_to_write(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_run_that_has_nothing_to_do_says_where_it_is(caplog):
    state = fitted(BATCHES, items=12)
    with caplog.at_level("INFO"):
        fitted(BATCHES, state=state, items=12)
    assert "at epoch 0, step 3, 12 items, and the target is items=12" in caplog.text
