"""accumulate: windows of n batches, or of a total of samples, and windows that vary by epoch.

With several processes: tests/processes/test_training.py.
"""

import attrs
import pytest
import torch
from sample_middleware import repeat
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from toy_runs import ONE, fitted, noting, of, stop_when, xs

import fnloop as fl
from fnloop import extend, schedules
from fnloop.data import bucketed, interleave, take
from fnloop.testing import toy, toy_loss

# Clipping each batch prevents adding their gradients up in place.
INSIDE = pytest.mark.parametrize(
    "inside", [(), (fl.clip_value(100.0),)], ids=["in place", "averaged"]
)


@pytest.mark.parametrize(("n", "epochs", "w", "steps"), [
    (1, 1, -15.0, 5), (5, 1, -3.0, 1), (9, 1, -3.0, 1),
    (2, 1, -10.0, 3),  # 1.5 + 3.5 + 5
    (4, 2, -15.0, 4),  # (2.5 + 5) twice
])  # fmt: skip
def test_windows_are_averaged_and_the_last_one_too(n, epochs, w, steps):
    state = fitted([1, 2, 3, 4, 5], fl.accumulate(n), epochs=epochs)
    assert (state.model.w.item(), state.step, state.epoch) == (w, steps, epochs)


@pytest.mark.parametrize(("members", "values", "moved"), [
    ((fl.accumulate(2), fl.clip_value(1)), (3, -3), 0.0),
    ((fl.clip_value(1), fl.accumulate(2)), (3, -3), 0.0),
    ((fl.accumulate(2), fl.clip_value(1)), (4, -1), 1.0),  # the mean, 1.5, clipped
    ((fl.clip_value(1), fl.accumulate(2)), (4, -1), 0.0),  # the mean of 1 and -1
])  # fmt: skip
def test_the_listed_order_decides_what_is_clipped(members, values, moved):
    assert fitted([*values], *members).model.w.item() == -moved


@pytest.mark.parametrize(("traits", "seen"), [((), [1.0, 3.0]), (("commutes",), [2.0])])
def test_what_commutes_acts_once_in_a_window_and_what_does_not_for_each_batch(traits, seen):
    found = []

    def look(state, batch, out):
        found.append(state.model.w.grad.item())
        return state, out

    own = fl.Middleware("own", gradient=extend.then(look), traits=traits)
    assert fitted([1, 3], own, fl.accumulate(2)).model.w.item() == -2.0
    assert found == seen


def by_tokens(model, batch):
    x, count = batch
    return (model.w * x).sum(), {"weight": count}


KINDS = pytest.mark.parametrize(
    "kind", [int, torch.tensor, lambda n: torch.tensor(float(n))], ids=["int", "tensor", "float"]
)


@INSIDE
@KINDS
def test_batches_count_by_their_items(inside, kind):
    """1 token with gradient 8 and 3 with mean gradient 4: the mean over tokens is 5, not 6."""
    step = fl.pipeline(*inside, fl.accumulate(2))(by_tokens)
    x = torch.tensor([8.0, 4.0])
    state, out = step(toy(), [(x[0], kind(1)), (x[1], kind(3))])
    assert (state.model.w.item(), float(out.weight)) == (-5.0, 4)
    state, _ = step(state, [(x[0], kind(0)), (x[1], kind(2))])
    assert state.model.w.item() == -9.0
    state, _ = step(state, [(x[0], kind(0)), (x[1], kind(0))])  # nothing: the gradient is zero
    assert state.model.w.item() == -9.0


@INSIDE
@pytest.mark.parametrize("weight", [0.0, float("nan"), -1.0])
def test_a_window_without_a_positive_weight_trains_nothing(inside, weight):
    window = [(torch.tensor(4.0), torch.tensor(weight))] * 2
    state, _ = fl.pipeline(*inside, fl.accumulate(2))(by_tokens)(toy(), window)
    assert state.model.w.item() == 0.0


def test_a_negative_weight_is_an_error_even_if_the_sum_is_positive():
    """The sum of -1 and 3 is 2, which would be a valid number of items."""
    batches = [(torch.tensor(1.0), torch.tensor(weight)) for weight in (-1.0, 3.0)]
    with pytest.raises(ValueError, match="one of them was NaN, infinite or negative"):
        fitted(batches, loss_fn=by_tokens)


@INSIDE
def test_a_parameter_that_a_batch_does_not_use_has_a_gradient_of_zero_there(inside):
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    step = fl.pipeline(*inside, fl.accumulate(2))(lambda m, b: (m[b[1]] * b[0], {"weight": 1}))
    step(of(model), [(torch.tensor(2.0), "a"), (torch.tensor(6.0), "b")])
    assert (model["a"].item(), model["b"].item()) == (-1.0, -3.0)


def test_metrics_of_a_window_are_combined():
    top = fl.metric(top=lambda aux, batch: fl.Max(batch.max()))
    _, out = fl.pipeline(top, fl.accumulate(2), fl.clip(1e9))(toy_loss)(toy(), xs(3, 5))
    assert {k: m.compute() for k, m in out.metrics.items()} == {"top": 5.0, "grad_norm": 4.0}
    _, out = fl.pipeline(fl.clip(1e9), fl.accumulate(2))(toy_loss)(toy(), xs(3, -5))
    assert out.metrics["grad_norm"].compute() == 4.0  # the mean of the norms of each


@pytest.mark.parametrize(("window", "error", "message"), [
    (torch.ones(2), TypeError, r"with accumulate\(2\) a step takes.*\(state, \[batch\]"),
    ({"x": torch.ones(2)}, TypeError, "got one dict"),
    ([], ValueError, "takes 1 to 2 batches at once; got 0"),
    ([torch.ones(1)] * 3, ValueError, "got 3"),
])  # fmt: skip
def test_a_step_that_accumulates_wants_a_window(window, error, message):
    with pytest.raises(error, match=message):
        fl.pipeline(fl.accumulate(2))(toy_loss)(toy(), window)


# --- a middleware may call the step several times in one update: the gradients add up


THREE, EMPTY = torch.tensor([3.0]), torch.ones(0)


@INSIDE
@pytest.mark.parametrize(("calls", "moved"), [
    ((), 2 + 2),  # the mean of 1 and 3, twice
    (([THREE], [ONE, ONE]), 2 + 3 + 1),  # each divides its own gradient by its own items
    (([EMPTY], [ONE]), 2 + 0 + 1),  # one that is skipped changes nothing
])  # fmt: skip
def test_calls_with_windows_add_their_means(inside, calls, moved):
    step = fl.pipeline(*inside, fl.accumulate(2), repeat(*calls))(toy_loss)
    state, _ = step(toy(), [ONE, THREE])
    assert (state.model.w.item(), state.step) == (-moved, 1)


def by_sign(model, batch):
    """Use a for positive batches and b for others. Its gradient is the mean of the batch."""
    return (batch * (model["a"] if batch[0] > 0 else model["b"])).mean()


@pytest.mark.parametrize("first, second, a, b", [(1, -3, -1, 3), (-3, 1, -1, 3), (1, 1, -2, 0)])
def test_a_parameter_unused_in_one_call_keeps_the_gradient_of_the_other(first, second, a, b):
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    window, other = (xs(x, x) for x in (first, second))
    fl.pipeline(fl.accumulate(2), repeat(other))(by_sign)(of(model), window)
    assert (model["a"].item(), model["b"].item()) == (a, b)


# --- another window in later epochs


def by_epoch(n, state=None, batches=10, **settings):
    """Return how many batches each update of a run took, and the state."""
    calls = []
    loss_fn = lambda model, batch: calls.append(1) or toy_loss(model, batch)

    def taken(state):
        made = len(calls) * ("update" in state.events)
        calls.clear()
        return made

    note, found = noting(taken)
    settings = {"hooks": (note,), **settings}
    state = fitted([1] * batches, fl.accumulate(n), loss_fn=loss_fn, state=state, **settings)
    return [*filter(None, found)], state


def test_a_mapping_says_the_window_from_an_epoch_of_the_phase_on():
    taken, state = by_epoch({1: 4, 3: 2}, epochs=4, batches=6)
    assert taken == [1] * 6 + [4, 2] + [4, 2] + [2, 2, 2]
    assert (state.step, state.model.w.item()) == (13, -13.0)
    taken, state = by_epoch({0: 2, 1: 1}, epochs=2, batches=4, phase="a")
    more, state = by_epoch({0: 2, 1: 1}, state, epochs=2, batches=4, phase="b")
    assert taken == more == [2, 2, 1, 1, 1, 1]


def test_a_schedule_knows_the_length_of_a_run_whose_windows_vary():
    totals = []
    factor = lambda i, total: totals.append((i, total)) or 1.0
    members = fl.accumulate({0: 3, 1: 2}), fl.schedule(factor)
    note, lengths = noting(lambda state: (state.run.window, state.run.steps_per_epoch))
    stop = stop_when(lambda state: state.step == 4)
    half = fitted([1] * 6, *members, epochs=3, hooks=(note, stop))
    fitted([1] * 6, *members, state=attrs.evolve(half, stop=None), epochs=3, hooks=(note,))
    assert totals == [(i, 8) for i in range(8)]  # 2 + 3 + 3
    assert lengths == [(3, 2)] * 2 + [(2, 3)] * 6


def test_a_fraction_of_an_epoch_knows_its_window():
    note, seen = noting(lambda state: state.step)
    by_epoch({0: 2, 1: 1}, epochs=2, batches=8, hooks=(fl.every(epochs=0.5)(note),))
    assert seen == [2, 4, 8, 12]


@pytest.mark.parametrize(("n", "epochs", "total"), [
    ({0: 2, 5: 1}, 2, 4),  # it ends before its window changes
    (2, 10**9, 2 * 10**9), ({0: 2, 3: 1}, 10**9, 3 * 2 + (10**9 - 3) * 4),
])  # fmt: skip
def test_the_length_of_a_run_is_known_at_once(n, epochs, total):
    stop = fl.once(lambda state: attrs.evolve(state, stop=f"{state.run.total_steps}"))
    assert by_epoch(n, epochs=epochs, batches=4, hooks=(stop,))[1].stop == f"{total}"


# --- a total of samples


SAMPLES = torch.arange(10.0)[:, None]
PAIRS = DataLoader(SAMPLES, 2)


def of_total(loader, total, *members, **settings):
    return fitted(loader, fl.accumulate(total=total), *members, **{"epochs": 1, **settings})


def test_an_update_has_as_many_samples_as_were_asked_for():
    note, sums = noting(lambda state: -state.model.w.item())
    state = of_total(PAIRS, 4, hooks=(note,))
    assert sums == [1.5, 1.5 + 5.5, 1.5 + 5.5 + 8.5]  # of 0..3, 4..7, and the rest
    assert (state.step, state.epoch) == (3, 1)


def test_a_schedule_and_a_run_count_updates_of_the_total():
    note, rates = noting(lambda state: state.optimizer.param_groups[0]["lr"])
    of_total(PAIRS, 4, fl.schedule(schedules.linear()), hooks=(note,))
    assert rates == pytest.approx([1, 2 / 3, 1 / 3])
    note, runs = noting(lambda state: state.run)
    of_total(PAIRS, 4, hooks=(note,), epochs=3)
    run = runs[0]
    assert (run.window, run.batches_per_epoch, run.steps_per_epoch, run.total_steps) == (2, 5, 3, 9)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@pytest.mark.parametrize(("loader", "total", "steps"), [
    (DataLoader(Stream(), 2), 4, 3), ([*SAMPLES.split(2)], 4, 3), (take(PAIRS, 5), 4, 3),
    (interleave({"a": DataLoader(SAMPLES[:4], 2), "b": [*SAMPLES[4:].split(2)]}), 4, 3),
    (DataLoader(SAMPLES, 1), 1, 10),
    (DataLoader(SAMPLES[:7], 2, drop_last=True), 4, 2),  # only an incomplete batch is dropped
], ids=["stream", "list", "take", "interleave", "one", "drop_last"])  # fmt: skip
def test_the_size_of_a_batch_is_known(loader, total, steps):
    assert of_total(loader, total).step == steps


BUCKETS = bucketed([1] * 10, batch_size=2)
REFUSED = {
    "generator": (lambda: lambda: iter(SAMPLES.split(2)), 4, "does not say: pass DataLoader"),
    "buckets": (lambda: DataLoader(SAMPLES, batch_sampler=BUCKETS), 4, "does not say"),
    "other sizes": (
        lambda: interleave({"a": PAIRS, "b": DataLoader(SAMPLES, 4)}), 4, r"differently, \[2, 4\]"
    ),
    "sharded": (lambda: fl.sharded(PAIRS), 4, "pass the loader without sharded"),
    "indivisible": (lambda: DataLoader(SAMPLES, 3), 10, r"have 3 samples.*accumulate\(total=9\)"),
    "too small": (lambda: DataLoader(SAMPLES, 3), 2, r"write accumulate\(total=3\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_whose_batches_cannot_make_the_total_is_refused(name):
    make, total, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as info:
        of_total(make(), total)
    assert str(info.value).startswith(f"accumulate(total={total})")


def test_a_bare_step_takes_the_batches_that_it_is_given():
    step = fl.pipeline(fl.accumulate(total=2))(toy_loss)
    state, _ = step(toy(), xs(1, 3))
    assert state.model.w.item() == -2
    with pytest.raises(TypeError, match=r"with accumulate\(total=2\) a step takes a sequence"):
        step(state, torch.tensor([1.0]))
