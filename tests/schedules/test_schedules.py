"""Schedules: the factor of each update, counted from 0."""

import copy
import math
import pickle
import re

import pytest
from pages import NASTY, check_html, texts

import fnloop as fl
from fnloop.schedules import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    join,
    linear,
    multistep,
    one_cycle,
    plot,
    polynomial,
    step_decay,
    warmup,
    wsd,
)

SQUARE_ROOT = [1 - math.sqrt(part) for part in (0.25, 0.5, 0.75)]  # 0.5, 0.293, 0.134


def factors(schedule, total):
    return [schedule(i, total) for i in range(total)]


# --- literal values

VALUES = [
    (constant(), [1, 1, 1]),
    # linear, from 1 in the first update to one stair above the minimum in the last
    (linear(), [1, 0.75, 0.5, 0.25]),
    (linear(min_ratio=0.5), [1, 0.875, 0.75, 0.625]),
    (linear(warmup=2), [0.5, 1, 1, 0.75, 0.5, 0.25]),
    (linear(cooldown=2), [1, 0.75, 0.5, 0.25, 0, 0]),
    (linear(warmup=1, cooldown=1), [1, 1, 0.5, 0]),
    (linear(warmup=0.25), [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    (linear(cooldown=0.5), [1, 0.5, 0, 0]),
    (linear(1, 1, 0.5), [1, 1, 0.75, 0.5]),  # warmup, cooldown, min_ratio: in this order
    # 1 is one update, and 1.0 the whole run
    (linear(warmup=1), [1, 1, 2 / 3, 1 / 3]), (linear(warmup=1.0), [0.25, 0.5, 0.75, 1]),
    # a run shorter than its warmup only warms up
    *((make(warmup=10), [0.1, 0.2, 0.3]) for make in (linear, cosine, polynomial, wsd)),
    (inverse_sqrt(10), [0.1, 0.2, 0.3]), (warmup(10)(constant()), [0.1, 0.2, 0.3]),
    # fractions may add up to the whole run
    (linear(warmup=0.5, cooldown=0.5), [0.5, 1, 0, 0]),
    (cosine(warmup=0.25, cooldown=0.75), [1, 0, 0, 0]),
    (wsd(warmup=0.5, decay=0.5, kind="linear"), [0.5, 1, 1, 0.5]),
    # the first factor is 1 under a cooldown as long as the run, or longer
    *((make(cooldown=cooldown, min_ratio=ratio), [1, *[ratio] * 3])
        for make in (linear, cosine, polynomial) for cooldown in (4, 9, 1.0) for ratio in (0, 0.5)),
    # a cooldown that leaves no room follows the warmup at once
    *((make(warmup=2, cooldown=9), [0.5, 1, 0, 0]) for make in (linear, cosine, polynomial)),
    # (1 + cos 60°) / 2 = 0.75, (1 + cos 120°) / 2 = 0.25
    (cosine(), [1, 0.75, 0.25]), (cosine(min_ratio=0.2), [1, 0.8, 0.4]),
    (cosine(warmup=2), [0.5, 1, 1, 0.75, 0.25]),
    (cosine(warmup=1, cooldown=1), [1, 1, 0.75, 0.25, 0]),
    (cosine(k=2), [1, (1 + math.cos(math.pi / 4)) / 2]),  # halfway, t² is a quarter: it is high
    (polynomial(), [1, 0.5625, 0.25, 0.0625]), (polynomial(3.0), [1, 0.125]),
    (polynomial(1.0, warmup=2, cooldown=1, min_ratio=0.5), [0.5, 1, 1, 0.75, 0.5]),
    # up from start_ratio to 1, down to min_ratio, each along half a cosine
    (one_cycle(peak=0.5, start_ratio=0.5, min_ratio=0.0), [0.5, 0.625, 0.875, 1, 0.75, 0.25]),
    (one_cycle(peak=2, start_ratio=0.2, min_ratio=0.4), [0.2, 0.6, 1, 0.7]),
    (one_cycle(peak=0), [1]),
    (wsd(warmup=2, decay=2, kind="linear"), [0.5, 1, 1, 1, 1, 0.5]),
    (wsd(warmup=0.25, decay=0.5, kind="linear", min_ratio=0.5),
        [0.5, 1, 1, 1, 1, 0.875, 0.75, 0.625]),
    (wsd(decay=3, kind="cosine"), [1, 1, 0.75, 0.25]), (wsd(decay=4), [1, *SQUARE_ROOT]),
    (wsd(decay=0), [1, 1, 1]), (exponential(0.5), [1, 0.5, 0.25, 0.125]),
    (step_decay(2, gamma=0.5), [1, 1, 0.5, 0.5, 0.25]), (step_decay(1), [1, 0.1, 0.01]),
    (step_decay(0.5, gamma=0.5), [1, 1, 1, 0.5, 0.5, 0.5]),
    (multistep([1, 3], gamma=0.5), [1, 0.5, 0.5, 0.25]),
    (multistep([3, 1], gamma=0.5), [1, 0.5, 0.5, 0.25]),  # in any order
    (multistep([0.25, 0.75], gamma=0.5), [1, 0.5, 0.5, 0.25]), (multistep([2]), [1, 1, 0.1]),
    (multistep([]), [1, 1]),
    (inverse_sqrt(4), [0.25, 0.5, 0.75, 1, math.sqrt(4 / 5), math.sqrt(4 / 6)]),
    (inverse_sqrt(0.5), [0.5, 1, math.sqrt(2 / 3), math.sqrt(2 / 4)]),
    (warmup(2)(linear()), [0.5, 1, 1, 0.75, 0.5, 0.25]), (warmup(0.5)(linear()), [0.5, 1, 1, 0.5]),
    # up to the first factor of the schedule
    (warmup(2)(one_cycle(peak=1, start_ratio=0.5)), [0.25, 0.5, 0.5, 1]),
    (warmup(2)(lambda step, total: 0.5), [0.25, 0.5, 0.5]),  # any function
    (warmup(0)(linear()), [1, 0.5]),
    # as long as the run, or longer: up to the first factor of the schedule
    (warmup(2)(linear()), [0.5, 1]), (warmup(1.0)(polynomial()), [0.5, 1]),
    (warmup(4)(one_cycle()), [0.25, 0.5]), (warmup(4)(warmup(2)(linear())), [0.125, 0.25]),
    (join(constant(), linear(), at=[2]), [1, 1, 1, 0.75, 0.5, 0.25]),
    (join(linear(), linear(), at=[0.5]), [1, 0.5, 1, 0.5]),
    (join(linear(), constant(), exponential(0.5), at=[2, 3]), [1, 0.5, 1, 1, 0.5]),
    (join(constant(), linear(), at=[0]), [1, 0.5]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "expected"), VALUES, ids=[f"{schedule!r}-{len(row)}" for schedule, row in VALUES]
)
def test_the_factors_of_a_whole_run(schedule, expected):
    assert factors(schedule, len(expected)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("fraction", "updates"), [
    (linear(warmup=0.25, cooldown=0.5), linear(warmup=2, cooldown=4)),
    (cosine(warmup=0.1), cosine(warmup=1)),  # 0.8 updates, rounded
    (one_cycle(peak=0.5), one_cycle(peak=4)),
    (wsd(warmup=0.25, decay=0.5), wsd(warmup=2, decay=4)), (step_decay(0.25), step_decay(2)),
    (step_decay(0.01), step_decay(1)),  # an interval is at least one update long
    (multistep([0.5, 0.75]), multistep([4, 6])), (inverse_sqrt(0.25), inverse_sqrt(2)),
    (warmup(0.5)(cosine()), warmup(4)(cosine())),
    (join(constant(), linear(), at=[0.75]), join(constant(), linear(), at=[6])),
    (linear(warmup=1.0), linear(warmup=8)),  # a float: the whole run
], ids=repr)  # fmt: skip
def test_a_float_is_a_fraction_of_the_run_and_an_int_is_updates(fraction, updates):
    assert factors(fraction, 8) == factors(updates, 8)


@pytest.mark.parametrize(("schedule", "minimum"), [
    (linear(), 0.0),
    (linear(warmup=2, cooldown=1, min_ratio=0.1), 0.1), (cosine(min_ratio=0.2), 0.2),
    (polynomial(min_ratio=0.3), 0.3), (one_cycle(min_ratio=0.4), 0.4),
    (wsd(decay=2, min_ratio=0.5), 0.5), (wsd(decay=0, min_ratio=0.5), 0.5),
    (warmup(2)(linear(min_ratio=0.1)), 0.1),
    (join(constant(), linear(min_ratio=0.1), at=[2]), 0.1),
], ids=repr)  # fmt: skip
def test_after_the_end_of_the_run_a_decay_stays_at_its_minimum(schedule, minimum):
    assert [schedule(i, 4) for i in (4, 5, 100)] == [minimum] * 3


# --- laws over all of them

DECAYS = [
    (linear(), 0), (linear(warmup=0.1, min_ratio=0.1), 0.1), (cosine(), 0),
    (cosine(warmup=0.1, min_ratio=0.1), 0.1), (cosine(k=3.0), 0), (polynomial(), 0),
    (polynomial(0.5), 0), (one_cycle(), 4e-6), (one_cycle(peak=0.0, min_ratio=0.5), 0.5),
    (wsd(), 0),
    (wsd(warmup=0.1, kind="linear", min_ratio=0.1), 0.1), (wsd(decay=1.0, kind="cosine"), 0),
    (warmup(0.1)(cosine()), 0), (join(constant(), linear(), at=[0.5]), 0),
]  # fmt: skip
ALL = [
    *(schedule for schedule, _ in DECAYS), constant(), exponential(0.9), step_decay(0.3),
    multistep([0.5, 0.9]), inverse_sqrt(0.1), warmup(0.5)(exponential(0.9)),
    warmup(10)(cosine()),  # longer than some of the runs
    warmup(1.0)(linear()),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_no_update_of_a_run_has_a_factor_of_zero_and_none_is_above_one(schedule):
    for total in (1, 2, 3, 10, 1000):
        assert all(0 < factor <= 1 for factor in factors(schedule, total)), total


@pytest.mark.parametrize(("schedule", "minimum"), DECAYS, ids=repr)
def test_the_last_update_is_near_the_minimum_but_not_at_it(schedule, minimum):
    for total in (100, 1000):
        assert minimum < schedule(total - 1, total) < minimum + 0.11


# --- composing


def told(step, total):
    """A schedule that returns its arguments."""
    return step, total


@pytest.mark.parametrize(("schedule", "total", "at", "calls"), [
    # each counts its own steps and gets its own length
    (join(told, told, told, at=[2, 3]), 5, range(5), [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]),
    # without a length of the run only the last has none
    (join(told, told, at=[2]), None, (1, 2, 7), [(1, 2), (0, None), (5, None)]),
    # after a warmup a schedule covers the rest of the run
    (warmup(2)(lambda step, total: total + step / 10), 5, (1, 2, 3), [3.0, 3.0, 3.1]),
])  # fmt: skip
def test_what_a_composed_schedule_is_called_with(schedule, total, at, calls):
    assert [schedule(i, total) for i in at] == calls


# --- the length of the run


@pytest.mark.parametrize(("schedule", "expected"), [
    (constant(), [1, 1]), (exponential(0.5), [1, 0.5]), (step_decay(1, gamma=0.5), [1, 0.5]),
    (multistep([1], gamma=0.5), [1, 0.5]), (inverse_sqrt(2), [0.5, 1]),
    (warmup(2)(constant()), [0.5, 1]), (join(linear(), constant(), at=[2]), [1, 0.5]),
], ids=repr)  # fmt: skip
def test_schedules_with_lengths_in_updates_do_not_need_the_length_of_the_run(schedule, expected):
    assert [schedule(i, None) for i in range(2)] == expected


@pytest.mark.parametrize("schedule", [
    linear(), linear(warmup=0.1), cosine(), cosine(warmup=2, cooldown=0.5), polynomial(),
    one_cycle(), one_cycle(peak=3), wsd(), wsd(warmup=2, decay=2), step_decay(0.5),
    multistep([1, 0.5]), inverse_sqrt(0.1), warmup(0.1)(constant()), warmup(2)(warmup(2)(cosine())),
    join(constant(), constant(), at=[0.5]), join(constant(), linear(), at=[2]),
], ids=repr)  # fmt: skip
def test_other_schedules_raise_without_the_length_of_the_run(schedule):
    """In a run, before the first update: tests/_extensions/middleware/test_schedule.py."""
    with pytest.raises(ValueError, match=r"needs the length of the run: call it through fit\("):
        schedule(0, None)


# --- as values

SHOWN = [
    (constant(), "constant()"), (linear(0.1), "linear(0.1)"),
    (cosine(warmup=100, min_ratio=0.1), "cosine(warmup=100, min_ratio=0.1)"),
    (polynomial(2.0), "polynomial(2.0)"), (one_cycle(peak=0.5), "one_cycle(peak=0.5)"),
    (wsd(kind="linear"), "wsd(kind='linear')"), (exponential(0.5), "exponential(0.5)"),
    (step_decay(30, gamma=0.5), "step_decay(30, gamma=0.5)"),
    (multistep([1, 3]), "multistep([1, 3])"), (inverse_sqrt(4), "inverse_sqrt(4)"),
    (warmup(2)(linear()), "warmup(2)(linear())"),
    (warmup(0.1)(join(constant(), linear(), at=[2])),
        "warmup(0.1)(join(constant(), linear(), at=[2]))"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "text"), SHOWN, ids=[text for _, text in SHOWN])
def test_a_schedule_and_its_copies_show_and_compare_as_it_was_typed(schedule, text):
    for made in (eval(text), pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert (repr(made), hash(made)) == (text, hash(schedule)) and made == schedule
        assert factors(made, 7) == factors(schedule, 7)


@pytest.mark.parametrize(("one", "other"), [
    (linear(0.1), linear(0.2)), (linear(), cosine()), (linear(1), constant()),
    (warmup(2)(linear()), warmup(3)(linear())), (warmup(2)(linear()), warmup(2)(cosine())),
    (join(linear(), cosine(), at=[2]), join(cosine(), linear(), at=[2])),
], ids=repr)  # fmt: skip
def test_schedules_from_different_calls_are_different_and_so_are_their_pipelines(one, other):
    assert one != other
    made = fl.pipeline(fl.schedule(one))
    assert made == fl.pipeline(fl.schedule(one)) != fl.pipeline(fl.schedule(other))
    assert repr(made) == f"pipeline(schedule({one!r}))"


# --- errors; other values of every argument are in tests/test_wrong_calls.py


@pytest.mark.parametrize(("make", "message"), [
    (lambda: linear(warmup=-1), r"linear expects warmup >= 0; got -1"),
    (lambda: cosine(warmup=100.0), r"cosine expects warmup as a fraction of the run, from 0\.0 to "
        r"1\.0; got 100\.0\. For updates, write an int: 100$"),
    (lambda: polynomial(warmup="2"), r"expects warmup as updates \(an int\) or .*got '2'"),
    (lambda: linear(min_ratio=1.5), r"linear expects min_ratio from 0 to 1, .*got 1\.5"),
    (lambda: cosine(k=0), r"cosine expects k > 0 and finite, the exponent of k-decay; got 0"),
    (lambda: one_cycle(start_ratio=0), r"start_ratio > 0: the first update would change nothing"),
    (lambda: wsd(kind="exp"),
        r"""wsd expects kind as one of "linear", "sqrt", "cosine"; got 'exp'"""),
    (lambda: step_decay(0), r"step_decay expects every > 0, got 0"),
    (lambda: multistep([1, -3]), r"multistep expects milestones >= 0; got -3"),
    # where a schedule is expected
    (lambda: warmup(2)(cosine), r"warmup expects a function \(step, total_steps\) -> factor, such "
        r"as cosine\(\); got cosine\. Call it: cosine\(\)"),
    (lambda: fl.schedule(cosine), r"a function \(step, total_steps\) -> .*Call it: cosine\(\)"),
    (lambda: fl.schedule(warmup(2)), r"such as cosine\(\); <lambda> takes \(schedule\)"),
    (lambda: fl.schedule(lambda: 1.0), r"such as cosine\(\); <lambda> takes \(\)"),
    (lambda: join(constant(), linear, at=[2]), r"got linear\. Call it: linear\(\)"),
    # the boundaries of join
    (lambda: join(constant(), linear(), at=[]), r"where each but the first begins; got 2 and 0"),
    (lambda: join(linear(), at=[2]), r"join expects two schedules or more, .*got 1 and 1"),
    (lambda: join(linear(), at=[]), r"join expects two schedules or more, .*got 1 and 0"),
    (lambda: join(constant(), linear(), at=[1.5]), r"join expects at as a fraction .*got 1\.5"),
    # more than the whole run
    (lambda: linear(0.6, 0.5),
        r"linear: its first part, 0\.6, and its last, 0\.5, make more than the whole"),
    (lambda: cosine(warmup=0.75, cooldown=0.5), r"cosine: its first part, 0\.75, and its last,"),
    (lambda: polynomial(warmup=1.0, cooldown=0.1), r"polynomial: its first part, 1\.0, and its"),
    (lambda: wsd(warmup=0.95), r"wsd: its first part, 0\.95, and its last, 0\.1, make more"),
])  # fmt: skip
def test_a_setting_out_of_range_is_an_error_when_the_schedule_is_made(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_falling_boundaries_are_an_error_once_the_length_is_known():
    schedule = join(constant(), constant(), constant(), at=[0.5, 3])
    assert schedule(0, 6) == 1.0
    why = r"join expects rising boundaries; at=\[0\.5, 3\] begins at updates \[4, 3\]"
    with pytest.raises(ValueError, match=why):
        schedule(0, 8)


# --- as a picture


def half_way(step, total):
    return 0.5


@pytest.mark.parametrize(("given", "labels"), [
    (linear(), ["linear()"]), ([linear(), constant()], ["linear()", "constant()"]),
    ({"down": linear(), "flat": constant()}, ["down", "flat"]), (half_way, ["half_way"]),
])  # fmt: skip
def test_a_plot_has_a_labelled_curve_per_schedule_with_the_factor_of_each_update(given, labels):
    pytest.importorskip("matplotlib")
    figure = plot(given, 4)
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.lines] == labels
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    factor = [0.5] * 4 if given is half_way else [1.0, 0.75, 0.5, 0.25]
    assert [*axis.lines[0].get_xdata()] == [0, 1, 2, 3] and axis.get_xlabel() == "update"
    assert [*axis.lines[0].get_ydata()] == factor


@pytest.mark.parametrize(("given", "total", "message"), [
    ([], 4, "at least one schedule"),
    *((given, 4, r".*a function \(step, total_steps\) -> factor")
        for given in ([linear(), linear(), 0.1], {"a": lambda step: 1.0})),
])  # fmt: skip
def test_what_cannot_be_plotted_is_refused(given, total, message):
    with pytest.raises((TypeError, ValueError), match=f"plot expects {message}"):
        plot(given, total)


@pytest.mark.parametrize(("schedule", "updates"), [
    (linear(), 200), (wsd(warmup=100, decay=0.1), 400), (multistep([100, 250]), 1000),
    (join(constant(), inverse_sqrt(1000), at=[100]), 4000), (warmup(300)(linear()), 1200),
    (warmup(100)(warmup(250)(linear())), 1000),
])  # fmt: skip
def test_a_picture_shows_every_length_that_is_given_in_updates(schedule, updates):
    assert f"over {updates:,} updates" in schedule._repr_html_()


# --- HTML


def named(schedule):
    schedule.__name__ = NASTY
    return schedule


ONE, FAILS = named(lambda step, total: 1.0), named(lambda step, total: step.mean())


@pytest.mark.parametrize("schedule", [
    warmup(2)(join(constant(), ONE, at=[1])),
    warmup(2)(FAILS),
], ids=["one", "one that fails"])  # fmt: skip
def test_the_html_of_a_schedule_is_well_formed_and_escaped(schedule):
    check_html(schedule)


def points(schedule):
    found = re.search(r'<polyline points="([^"]*)"', schedule._repr_html_())
    return [tuple(map(float, pair.split(","))) for pair in found[1].split()]


def test_a_schedule_is_drawn_over_a_run_from_0_to_its_maximum():
    drawn = points(linear())
    # y grows downwards: 60 is 0, and the last factor is 1/200
    assert (drawn[0], drawn[-1]) == ((0.0, 0.0), (220.0, 59.7))
    assert all(y == 0.0 for _, y in points(constant()))
    below = join(constant(), lambda step, total: -1.0, at=[0.5])
    assert {y for _, y in points(below)} == {0.0, 60.0}


@pytest.mark.parametrize("schedule", [
    *(join(constant(), lambda step, total, bad=bad: bad, at=[0.5])
      for bad in (float("nan"), float("inf"))),
    exponential(10.0**300),  # overflows
])  # fmt: skip
def test_a_schedule_that_cannot_be_drawn_shows_its_repr(schedule):
    assert texts(schedule) == [repr(schedule)]
    assert "<svg" not in schedule._repr_html_()
