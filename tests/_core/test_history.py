"""History: records that never change, and the ways to read them."""

import copy
import math
import pickle
import sys
import threading

import attrs
import pytest
import torch

from fnloop import History, Record, compare, early_stop, halt_on_nonfinite
from fnloop._core.history import Fold
from fnloop._core.records import better
from fnloop.testing import toy

NAN, INF = math.nan, math.inf


def history(*values, key="valid/loss"):
    """Return a history with one record per value, at steps 10, 20, ..."""
    return History(Record(i, 10 * i, {key: value}) for i, value in enumerate(values, 1))


# --- persistence


def test_a_history_is_independent_of_the_dict_and_the_list_it_was_made_from():
    metrics = {"valid/loss": 0.5}
    records = [Record(1, 10, metrics)]
    made = History(records)
    metrics["valid/loss"] = 9.0
    records.clear()
    assert made["valid/loss"] == (0.5,)


@pytest.mark.parametrize(
    ("record", "field"), [(History(), "records"), (Record(1, 10, {}), "metrics")]
)
def test_records_and_histories_are_frozen(record, field):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(record, field, ())


copies = pytest.mark.parametrize(
    "remade", [History, copy.copy, copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))]
)


@pytest.mark.parametrize(("change", "arguments"), [
    ("__setitem__", ("a", 9)), ("__delitem__", ("valid/loss",)), ("setdefault", ("a", 9)),
    ("update", ({"a": 9},)), ("pop", ("valid/loss",)), ("popitem", ()), ("clear", ()),
    ("__ior__", ({"a": 9},)),
])  # fmt: skip
@copies
def test_the_metrics_of_a_record_cannot_be_changed_nor_those_of_a_copy(remade, change, arguments):
    made = remade(history(0.5))
    with pytest.raises(TypeError, match="a record's metrics cannot be changed"):
        getattr(made[0].metrics, change)(*arguments)
    assert made == history(0.5)


def test_the_metrics_of_a_record_are_floats_and_merging_them_gives_a_new_dict():
    metrics = Record(1, 10, {"an int": 2, "a tensor": torch.tensor(0.5)}).metrics
    assert (metrics, {*map(type, metrics.values())}) == ({"an int": 2, "a tensor": 0.5}, {float})
    mine = metrics | {"a": 9}
    mine["b"] = 1
    assert repr(metrics) == "{'an int': 2.0, 'a tensor': 0.5}"
    assert mine == {"an int": 2, "a tensor": 0.5, "a": 9, "b": 1}


# --- the log that histories share


def test_appending_shares_the_log_and_a_second_continuation_copies_it():
    start = history(1, 2)
    left = start.append(Record(3, 30, {"valid/loss": 3}))
    right = start.append(Record(3, 31, {"a": 4}))
    longer = left.append(Record(4, 40, {"b": 5}))
    assert start._log is left._log is longer._log is not right._log
    for made, steps, keys in (
        (start, [10, 20], ("valid/loss",)), (left, [10, 20, 30], ("valid/loss",)),
        (right, [10, 20, 31], ("valid/loss", "a")), (longer, [10, 20, 30, 40], ("valid/loss", "b")),
    ):  # fmt: skip
        assert ([r.step for r in made], made.keys(), len(made)) == (steps, keys, len(steps))
        assert [r.step for r in reversed(made)] == steps[::-1]
        assert [made[i].step for i in (-1, -len(steps), 0, 1)] == [steps[-1], 10, 10, 20]
        assert [name in made for name in "ab"] == [name in keys for name in "ab"]
    assert (start == history(1, 2), start == left, left == longer[:3]) == (True, False, True)
    assert [r.step for r in left.since(1)] == [20, 30]
    for index in (2, -3):  # out of its range, but not out of that of the log
        with pytest.raises(IndexError, match=rf"no record {index} in a history of 2 records"):
            start[index]


def test_several_threads_may_extend_one_history():
    start = history(1)
    made = [None] * 8

    def extend(n):
        mine = start
        for step in range(200):
            mine = mine.append(Record(n, step, {f"{n}": step}))
        made[n] = mine

    threads = [threading.Thread(target=extend, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, mine in enumerate(made):
        assert [(r.epoch, r.step) for r in mine[1:]] == [(n, step) for step in range(200)]
        assert mine.keys() == ("valid/loss", f"{n}")


@copies
def test_a_copy_has_the_records_of_its_history_only(remade):
    start = history(1, 2)
    start.append(Record(3, 30, {"a": 1}))
    made = remade(start)
    assert (made, len(made), made.keys()) == (start, 2, ("valid/loss",))
    assert made.append(Record(3, 31, {}))[-1].step == 31


def one_more(total, record):
    return total + 1


def test_a_fold_can_be_pickled():
    fold, history = Fold(one_more, 0), History([Record(1, 1, {}), Record(2, 2, {})])
    assert fold(history) == pickle.loads(pickle.dumps(fold))(history) == 2


def test_a_fold_reads_only_new_records_and_depends_only_on_the_history():
    looked = []
    add = lambda total, record: looked.append(record.step) or total + record.metrics["valid/loss"]
    total, start = Fold(add, 0), history(1, 2)
    more = start.append(Record(3, 30, {"valid/loss": 4}))
    assert (total(start), looked) == (3, [10, 20])
    assert (total(more), looked) == (7, [10, 20, 30])
    assert (total(more), looked) == (7, [10, 20, 30])
    looked.clear()
    assert (total(start), looked) == (3, [10, 20])  # shorter: from the start
    looked.clear()
    fork = start.append(Record(3, 31, {"valid/loss": 8}))
    assert (total(fork), looked) == (11, [10, 20, 31])  # another log


@pytest.mark.parametrize("n", [10, 1_000])
def test_the_cost_of_a_record_does_not_depend_on_the_number_of_records(n):
    """Appending a record, and hooks that read it, touch no earlier record."""
    made, stop = history(*range(n)), early_stop("valid/loss", patience=n + 1)
    state = attrs.evolve(toy(), history=made, events=frozenset({"record"}))
    stop(state)
    touched = []

    class Watched(list):
        def __getitem__(self, index):
            touched.append(index)
            return super().__getitem__(index)

        def __iter__(self):
            touched.extend(range(len(self)))
            return super().__iter__()

    made._log.records = Watched(made._log.records)
    longer = made.append(Record(n + 1, n + 1, {"valid/loss": 0.0, "train/loss": 0.0}))
    assert longer.keys() == ("valid/loss", "train/loss")
    assert stop(attrs.evolve(state, history=longer)).stop is None
    halt_on_nonfinite()(attrs.evolve(state, step=n + 1, history=longer))
    assert touched
    assert all(index in (n, slice(n, n + 1)) for index in touched)


# --- closing records


def test_closing_records_are_compared_and_say_so():
    made = History(
        [Record(0, 5, {"valid/loss": 2}, closing=True), Record(1, 10, {"valid/loss": 1})]
    )
    assert [row.get("closing") for row in made.to_dicts()] == [True, None]
    assert Record(0, 5, {}) != Record(0, 5, {}, closing=True)
    assert "closing" in made[0]._repr_html_() and "closing" not in made[1]._repr_html_()


# --- reading


def test_a_key_gives_values_an_index_gives_a_record_a_slice_gives_a_history():
    made = history(0.5, 0.25, 0.125)
    assert made["valid/loss"] == (0.5, 0.25, 0.125)
    assert made[-1] == Record(3, 30, {"valid/loss": 0.125})
    assert made[:2] == history(0.5, 0.25) and isinstance(made[:2], History)
    assert (len(made), len(History()), [record.step for record in made]) == (3, 0, [10, 20, 30])
    assert "valid/loss" in made and "loss" not in made
    assert Record(1, 10, {"valid/loss": 0.5}) in made
    assert Record(1, 10, {"valid/loss": 0.25}) not in made


def test_the_values_of_a_metric_skip_records_without_it():
    made = History(
        [Record(1, 10, {"a": 1}), Record(1, 15, {"b": 7}), Record(2, 20, {"b": 3, "a": 3})]
    )
    assert (made.keys(), made["a"], made["b"]) == (("a", "b"), (1.0, 3.0), (7.0, 3.0))
    assert [record.step for record in made.having("a")] == [10, 20]
    assert made[:2].latest("a") == 1.0  # from the newest record that has it
    assert made.best("b", "min") == 3.0


@pytest.mark.parametrize("ask", ["__getitem__", "latest", "best", "having"])
def test_an_unknown_metric_is_a_key_error_that_lists_the_known_ones(ask):
    made = History([Record(1, 10, {"train/loss": 1, "valid/loss": 2})])
    with pytest.raises(KeyError, match=r"no metric 'valid/los' .* are: train/loss, valid/loss"):
        getattr(made, ask)("valid/los")
    with pytest.raises(KeyError, match="the history is empty"):
        getattr(History(), ask)("valid/los")


# --- latest and best


@pytest.mark.parametrize(("values", "mode", "step"), [
    ((3, 1, 2), "min", 20), ((3, 1, 2), "max", 10),
    ((2, 1, 1), "min", 20),  # of equal values, the older
    ((1, 2, 2), "max", 20),
    ((NAN, 2, 3), "min", 20),  # NaN is worse than anything
    ((NAN, 2, 3), "max", 30), ((2, NAN), "min", 10), ((2, NAN), "max", 10),
    ((NAN, INF), "min", 20),  # also worse than infinity
    ((NAN, -INF), "max", 20),
    ((NAN, NAN), "min", 10),  # unless there is nothing else
    ((0.0, -0.0), "min", 10),  # these two are equal
])  # fmt: skip
def test_best_record_is_the_oldest_of_the_best(values, mode, step):
    made = history(*values)
    assert made.best_record("valid/loss", mode).step == step
    assert repr(made.best("valid/loss", mode)) == repr(float(values[step // 10 - 1]))


@pytest.mark.parametrize(("key", "best"), [
    ("valid/loss", 1.0), ("valid/error_rate", 1.0), ("valid/acc", 3.0), ("valid/Accuracy", 3.0),
    ("valid/macro_f1", 3.0), ("valid/auc", 3.0), ("valid/top5/precision", 3.0),
])  # fmt: skip
def test_the_name_of_a_metric_says_which_value_is_the_best(key, best):
    made = History([Record(i, i, {key: value}) for i, value in enumerate((2.0, 3.0, 1.0), 1)])
    assert made.best(key) == made.best_record(key).metrics[key] == best
    assert (made.best(key, "min"), made.best(key, mode="max")) == (1.0, 3.0)


@pytest.mark.parametrize("key", ["valid/bleu", "valid/perplexity", "valid/loss_accuracy", "a"])
def test_of_a_name_that_says_nothing_the_lowest_value_is_the_best(key):
    made = History([Record(i, i, {key: value}) for i, value in enumerate((2.0, 1.0, 3.0), 1)])
    assert (made.best(key), made.best_record(key).step, made.best(key, "max")) == (1.0, 2, 3.0)


@pytest.mark.parametrize(("value", "than", "lower", "higher"), [
    (1.0, 2.0, True, False), (2.0, 1.0, False, True), (1.0, 1.0, False, False),
    (NAN, 1.0, False, False), (1.0, NAN, True, True), (NAN, NAN, False, False),
    (INF, NAN, True, True), (-INF, 0.0, True, False),
])  # fmt: skip
def test_better_is_strict_and_nan_is_the_worst(value, than, lower, higher):
    assert (better(value, than, "min"), better(value, than, "max")) == (lower, higher)


# --- equality


@pytest.mark.parametrize(("one", "other", "equal"), [
    ({"a": 0.5}, {"a": 0.5}, True), ({"a": NAN}, {"a": NAN}, True), ({"a": NAN}, {"a": 0.0}, False),
    ({"a": 0.0}, {"a": -0.0}, False),
    ({"a": 0.1 + 0.2}, {"a": 0.3}, False),  # 0.30000000000000004
    ({"a": 1.0}, {"b": 1.0}, False), ({"a": 1.0}, {"a": 1.0, "b": 1.0}, False),
    ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}, True), ({"a": 1}, {"a": 1.0}, True),
])  # fmt: skip
def test_histories_are_equal_if_their_metrics_are_equal_bit_for_bit(one, other, equal):
    assert (Record(1, 10, one) == Record(1, 10, other)) is equal
    assert (History([Record(1, 10, one)]) == History([Record(1, 10, other)])) is equal


def test_equality_needs_the_same_epoch_and_step_but_not_the_same_seconds():
    record = Record(1, 10, {"a": 1}, seconds=2.0)
    assert record == Record(1, 10, {"a": 1}, seconds=3.0)
    assert record != Record(2, 10, {"a": 1}, seconds=2.0)
    assert record != Record(1, 11, {"a": 1}, seconds=2.0)
    for value in (record, History([record])):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)


# --- as text


def test_an_empty_history_shows_as_the_call_that_makes_one():
    assert repr(History()) == "History()"
    assert History()._repr_html_() == "<code>History()</code>"


# --- as data


def test_to_dicts_gives_flat_rows():
    made = History([Record(1, 10, {"train/loss": 1}, 0.5), Record(2, 20, {"valid/loss": 2}, 1.5)])
    assert made.to_dicts() == [
        {"epoch": 1, "step": 10, "train/loss": 1.0, "seconds": 0.5},
        {"epoch": 2, "step": 20, "valid/loss": 2.0, "seconds": 1.5},
    ]
    assert History().to_dicts() == []


def test_to_pandas_has_a_row_per_record_and_nan_for_what_is_missing():
    pytest.importorskip("pandas")
    frame = History([Record(1, 10, {"a": 1}, 0.5), Record(2, 20, {"b": 2}, 1.5)]).to_pandas()
    assert sorted(frame.columns) == ["a", "b", "epoch", "seconds", "step"]
    assert frame["step"].tolist() == [10, 20]
    assert frame["a"][0] == 1.0
    assert math.isnan(frame["a"][1])
    assert len(History().to_pandas()) == 0


@pytest.mark.parametrize(("module", "call", "message"), [
    ("pandas", History.to_pandas, "needs pandas: pip install pandas"),
    ("matplotlib.figure", History.plot, r"needs matplotlib: pip install 'fnloop\[plot\]'"),
    ("matplotlib.figure", lambda made: compare({"a": made}), r"compare needs matplotlib: pip inst"),
])  # fmt: skip
def test_a_missing_dependency_says_what_to_install(monkeypatch, module, call, message):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ImportError, match=message):
        call(history(0.5))
