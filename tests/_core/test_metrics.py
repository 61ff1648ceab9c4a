"""Metrics: combined over batches of any size in any grouping, and computed once."""

import copy
import math

import attrs
import pytest
import torch
from sample_middleware import skip_negative
from torch.utils._python_dispatch import TorchDispatchMode

import fnloop as fl
from fnloop import Last, Max, Mean, Min, Sum
from fnloop._core import metrics
from fnloop._core.metrics import Metrics, _weighted, update_loss_
from fnloop._core.saved import Pending
from fnloop.testing import toy, toy_loss

NAN = math.nan


def same(a, b):
    """Return whether two numbers are equal. NaN equals NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))


# --- combining

MONOIDS = {  # a metric of a batch of numbers, and its value over the numbers 1 to 6
    "Mean": (lambda xs: Mean(sum(xs), len(xs)), 3.5), "Sum": (lambda xs: Sum(sum(xs)), 21.0),
    "Min": (lambda xs: Min(min(xs)), 1.0), "Max": (lambda xs: Max(max(xs)), 6.0),
    "Last": (lambda xs: Last(xs[-1]), 6.0),
}  # fmt: skip
KINDS = {
    "floats": float, "tensors": torch.tensor, "int tensors": lambda x: torch.tensor(int(x)),
    "a float, then tensors": lambda x: x if x == 1 else torch.tensor(x),
    "a tensor, then floats": lambda x: torch.tensor(x) if x == 1 else x,
}  # fmt: skip

monoids = pytest.mark.parametrize(("of", "value"), MONOIDS.values(), ids=MONOIDS)
kinds = pytest.mark.parametrize("number", KINDS.values(), ids=KINDS)


def in_batches(of, number):
    """Return the metrics of [1], [2, 3] and [4, 5, 6]."""
    return [of([number(x) for x in batch]) for batch in ([1.0], [2.0, 3.0], [4.0, 5.0, 6.0])]


@monoids
@kinds
def test_any_grouping_of_batches_gives_the_value_over_all_items_and_changes_none(of, value, number):
    a, b, c = batches = in_batches(of, number)
    before = copy.deepcopy([attrs.astuple(metric) for metric in batches])
    grouped = a.combine(b).combine(c), a.combine(b.combine(c)), accumulated(batches)
    results = [metric.compute() for metric in grouped]
    assert (results, {*map(type, results)}) == ([value] * 3, {float})
    assert [attrs.astuple(metric) for metric in batches] == before


@pytest.mark.parametrize("zero", [0, torch.tensor(0)])
def test_a_mean_of_no_items_is_nan(zero):
    assert math.isnan(Mean(0.0, zero).compute())


@pytest.mark.parametrize(("metric", "a", "b", "value"), [
    (Min, 1.0, NAN, NAN), (Min, NAN, 1.0, NAN), (Max, 1.0, NAN, NAN), (Max, NAN, 1.0, NAN),
    (Sum, 1.0, NAN, NAN), (Last, NAN, 1.0, 1.0), (Last, 1.0, NAN, NAN),
    (Min, 1.0, -math.inf, -math.inf), (Max, 1.0, -math.inf, 1.0),
])  # fmt: skip
@pytest.mark.parametrize("first", [float, torch.tensor])
@pytest.mark.parametrize("second", [float, torch.tensor])
def test_nan_propagates_except_in_last(metric, a, b, value, first, second):
    assert same(metric(first(a)).combine(metric(second(b))).compute(), value)


# --- the running metrics: in place


def accumulated(metrics):
    running = {}
    for metric in metrics:
        running = Metrics(running).update_({"m": metric})
    return running["m"]


@pytest.mark.parametrize(
    ("metric", "field"), [(Mean(torch.tensor(1.0), 1), "total"), (Sum(torch.tensor(1.0)), "value")]
)
def test_update_in_place_adds_into_the_running_tensor(metric, field):
    first = Metrics().update_({"m": metric})
    second = Metrics(first).update_({"m": metric})
    assert getattr(second["m"], field) is getattr(first["m"], field)
    assert getattr(second["m"], field).item() == 2.0


def test_update_in_place_sums_in_double_precision_and_metrics_may_come_later_or_be_missing():
    large, one = Sum(torch.tensor(2.0**24)), Sum(torch.tensor(1.0))  # in float32, 2²⁴ + 1 is 2²⁴
    assert accumulated([large, one, one]).compute() == 16777218.0
    running = {}
    for new in ({"a": Sum(1.0)}, {"b": Sum(10.0)}, {"a": Sum(2.0)}):
        running = Metrics(running).update_(new)
    assert Metrics(running).read() == {"a": 3.0, "b": 10.0}


@pytest.mark.parametrize("number", [int, torch.tensor])
def test_a_running_loss_is_the_mean_over_items(number):
    losses = [torch.tensor(4.0), torch.tensor(8.0), torch.tensor(1.0)]
    running = None
    for loss, weight in zip(losses, (3, 1, 4), strict=True):
        running = update_loss_(running, loss, number(weight))
    assert running.compute() == 3.0  # (12 + 8 + 4) / 8
    assert losses == [4.0, 8.0, 1.0]  # none was changed


# --- in a run

ONE, TWO, FOUR = (torch.tensor([x]) for x in (1.0, 2.0, 4.0))


@pytest.mark.parametrize("sizes", [[8000], [80] * 100], ids=["one batch", "100 batches"])
@pytest.mark.parametrize("window", [1, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_losses_of_half_precision_are_summed_in_double_precision(dtype, window, sizes):
    """10 over 8000 items: float16 ends at 65504. The weights are of the same type."""
    loss = lambda model, batch: (
        (0 * model.w + 10).to(dtype),
        {"weight": torch.tensor(1.0).to(dtype)},
    )
    ten = fl.metric(ten=lambda aux, batch: torch.tensor(10, dtype=dtype))
    data = [torch.ones(size) for size in sizes] * (3 if len(sizes) == 100 else 1)
    loaders = {"train": data, "valid": data}
    state = fl.fit(fl.pipeline(ten, fl.accumulate(window))(loss), toy(), loaders, hooks=())
    assert state.history[0].metrics == {
        "train/loss": 10, "train/ten": 10, "train/lr": 1, "valid/loss": 10, "valid/ten": 10,
    }  # fmt: skip


@pytest.mark.parametrize(("by_hand", "value"), [
    (Max, 0.0), (Min, -1.0), (Last, -1.0), (Sum, -1.0), (lambda x: Mean(x, 1), -0.5),
    (lambda x: Mean(x, x.exp() * 0 + 2), -0.25),
])  # fmt: skip
def test_a_metric_made_in_a_metric_function_holds_no_graph(by_hand, value):
    metric = fl.metric(m=lambda aux, batch: by_hand(aux["output"][0]))
    step, state = fl.pipeline(metric)(toy_loss), toy()
    for _ in range(2):  # the outputs are 0 and -1
        state, out = step(state, ONE)
        tensors = attrs.astuple(out.metrics["m"]) + attrs.astuple(state.metrics["m"])
        assert not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    assert Metrics(fl.snapshot(state).metrics).read() == {"m": value, "loss": -0.5}


@pytest.mark.parametrize(("vector", "message"), [
    (lambda aux, b: Sum(aux["output"]), "Sum expects value as .* add \\.sum\\(\\)"),
    (lambda aux, b: Max(b), "Max expects value as "),
    (lambda aux, b: Mean(1.0, b), "Mean expects weight as "),
])  # fmt: skip
def test_a_vector_in_a_metric_is_an_error_that_names_the_metric(vector, message):
    with pytest.raises(TypeError, match=message) as caught:
        fl.pipeline(fl.metric(total=vector))(toy_loss)(toy(), torch.ones(2))
    assert "a number or a scalar tensor; got a tensor of shape (2,)" in str(caught.value)
    assert caught.value.__notes__ == ["while in the metric 'total'"]


FACTS = fl.metric(
    mean=lambda aux, b: b.mean(),
    sum=lambda aux, b: Sum(b.sum()),
    max=lambda aux, b: Max(b.abs().max()),
)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_skipped_update_or_batch_does_not_count_in_the_metrics(window):
    step = fl.pipeline(FACTS, skip_negative(), fl.accumulate(window))(toy_loss)
    state = fl.fit(step, toy(lr=0.0), [FOUR, -100 * ONE, TWO], hooks=())
    expected = {"loss": 0, "mean": 3, "sum": 6, "max": 4, "lr": 0}
    assert state.history[0].metrics == {f"train/{name}": v for name, v in expected.items()}
    state = fl.fit(step, toy(), [-ONE] * 2, hooks=())
    assert (state.step, dict(state.history[0].metrics)) == (0, {})


# --- reading: one transfer


class Range:
    """A metric of the user's own."""

    def __init__(self, low, high):
        self.low, self.high = low, high

    def combine(self, other):
        return Range(min(self.low, other.low), max(self.high, other.high))

    def compute(self):
        return float(self.high - self.low)


MIXED = {  # a metric, and its value
    "mean": (Mean(torch.tensor(6.0), 2), 3.0),
    "weighted": (Mean(torch.tensor(6.0), torch.tensor(4)), 1.5),
    "sum": (Sum(torch.tensor(2)), 2.0), "min": (Min(3.5), 3.5), "last": (Last(5), 5.0),
    "max": (Max(torch.tensor(4.0, dtype=torch.float64)), 4.0),
    "half": (Last(torch.tensor(0.5, dtype=torch.bfloat16)), 0.5), "mine": (Range(1, 3), 2.0),
    "nan": (Last(torch.tensor(NAN)), pytest.approx(NAN, nan_ok=True)),
}  # fmt: skip


def test_read_computes_metrics_of_all_kinds_in_their_order():
    values = Metrics({name: metric for name, (metric, _) in MIXED.items()}).read()
    assert list(values) == list(MIXED) and {*map(type, values.values())} == {float}
    assert values == {name: value for name, (_, value) in MIXED.items()}


class NoItem(TorchDispatchMode):
    """Forbids reading one number to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a number was read by itself"
        return func(*args, **(kwargs or {}))


def test_read_fetches_everything_at_once():
    mean, total = Mean(torch.tensor(6.0), torch.tensor(2)), Sum(torch.tensor(4))
    with NoItem():
        assert Metrics(a=mean, b=total).read() == {"a": 3.0, "b": 4.0}
        assert Metrics().read() == {}
        with pytest.raises(AssertionError, match="read by itself"):
            total.compute()


@pytest.mark.parametrize("weight", [0, 1, 3, 10**6 + 7, torch.tensor(3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_weighted_value_is_a_copy_with_the_bits_of_a_product_in_float64(dtype, weight):
    for number in (0.0, -0.0, 0.1, -7.3, 1e-45, 3e38, math.inf, math.nan):
        value = torch.tensor(number, dtype=dtype, requires_grad=True)
        found, expected = _weighted(value, weight), value.detach().double() * weight
        value.detach().fill_(5.0)
        assert found.dtype is torch.float64 and not found.requires_grad
        assert found.numpy().tobytes() == expected.numpy().tobytes() or (
            found.isnan() and expected.isnan()
        )


# --- a kind of the user's own: a subclass, which may hold a tensor of any shape


def by_position(metric):
    return {str(i): value.item() for i, value in enumerate(metric.value)}


class Recall(fl.Sum):
    """Hits and positives by class: shape (classes, 2)."""

    def compute(self):
        return {str(i): (hits / all_).item() for i, (hits, all_) in enumerate(self.value)}


class Widest(fl.Max):
    """The largest value of each column."""

    compute = by_position


def hits(aux, batch):
    """Batches are numbers from 0 on: the even ones are of class 0; those above 3 are missed."""
    found = torch.zeros(2, 2)
    for number in batch.long():
        found[number % 2] += torch.tensor([float(number <= 3), 1.0])
    return Recall(found)


class Newest(fl.Last):
    """The first two values of the last batch."""

    compute = by_position


OWN_KINDS = fl.metric(
    recall=hits,
    widest=lambda aux, batch: Widest(torch.stack([batch.amax(), -batch.amin()])),
    newest=lambda aux, batch: Newest(batch[:2]),
)
own_kinds = fl.pipeline(OWN_KINDS)(toy_loss)
NUMBERS = [torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0, 6.0, 5.0])]
# Class 0 has 0, 2, 4, 6 and class 1 has 1, 3, 5.
EXPECTED = {
    "recall/0": 0.5, "recall/1": 2 / 3, "widest/0": 6.0, "widest/1": -0.0, "newest/0": 4.0,
    "newest/1": 6.0,
}  # fmt: skip


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_a_kind_of_the_users_own_is_combined_over_batches_of_any_shape(exact, window):
    made = toy()
    state = fl.TrainState.create(made.model, made.optimizer, seed=0, exact=exact)
    step = fl.pipeline(OWN_KINDS, fl.accumulate(window))(toy_loss)
    state = fl.fit(step, state, (NUMBERS, NUMBERS), epochs=1, hooks=())
    for loader in ("train", "valid"):
        found = {k: state.history.latest(f"{loader}/{k}") for k in EXPECTED}
        assert found == pytest.approx(EXPECTED)


def test_a_kind_of_the_users_own_is_restored_as_itself(tmp_path):
    stopped = fl.fit(own_kinds, toy(), NUMBERS, steps=1, hooks=())
    restored = fl.restore(fl.save(stopped, tmp_path / "a"), toy())
    assert type(restored.metrics["recall"]) is Recall and type(restored.metrics["widest"]) is Widest
    assert restored.metrics["recall"].value.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    ended = fl.fit(own_kinds, restored, NUMBERS, epochs=1, hooks=())
    assert {k: ended.history.latest(f"train/{k}") for k in EXPECTED} == pytest.approx(EXPECTED)
    with pytest.raises(TypeError, match="a Recall holds"):  # a checkpoint with other fields
        metrics.Running.restored(Pending("Recall", {"count": 3.0}), torch.device("cpu"))


def test_a_number_that_is_added_up_is_restored_in_double_precision_on_the_device():
    found = metrics.Running.restored(
        Pending("fnloop.Mean", {"total": 1.5, "weight": 2}), torch.device("cpu")
    )
    assert (found.total.dtype, found.weight, found.compute()) == (torch.float64, 2, 0.75)
