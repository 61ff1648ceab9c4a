"""Schedules: the factor of each update, counted from 0."""

import copy
import math
import pickle

import pytest
import torch

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
from fnloop.testing import toy, toy_loss

QUARTER = (
    1 - math.sqrt(0.25),
    1 - math.sqrt(0.5),
    1 - math.sqrt(0.75),
)  # of a square-root decay: 0.5, 0.293, 0.134


def half_way(step, total):
    return 0.5


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
    (linear(warmup=2, cooldown=2, min_ratio=0.2), [0.5, 1, 1, 0.6, 0.2, 0.2]),
    (linear(warmup=0.25), [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    (linear(cooldown=0.5), [1, 0.5, 0, 0]),
    (linear(1, 1, 0.5), [1, 1, 0.75, 0.5]),  # warmup, cooldown, min_ratio: in this order
    # (1 + cos 60°) / 2 = 0.75, (1 + cos 120°) / 2 = 0.25
    (cosine(), [1, 0.75, 0.25]), (cosine(min_ratio=0.2), [1, 0.8, 0.4]),
    (cosine(warmup=2), [0.5, 1, 1, 0.75, 0.25]),
    (cosine(warmup=1, cooldown=1), [1, 1, 0.75, 0.25, 0]),
    (cosine(k=2), [1, (1 + math.cos(math.pi / 4)) / 2]),  # halfway, t² is a quarter
    (polynomial(), [1, 0.5625, 0.25, 0.0625]), (polynomial(3.0), [1, 0.125]),
    (polynomial(1.0, warmup=2, cooldown=1, min_ratio=0.5), [0.5, 1, 1, 0.75, 0.5]),
    # up from start_ratio to 1, down to min_ratio, each along half a cosine
    (one_cycle(peak=0.5, start_ratio=0.5, min_ratio=0.0), [0.5, 0.625, 0.875, 1, 0.75, 0.25]),
    (one_cycle(peak=2, start_ratio=0.2, min_ratio=0.4), [0.2, 0.6, 1, 0.7]),
    (one_cycle(peak=0), [1]), (wsd(decay=2, kind="linear"), [1, 1, 1, 0.5]),
    (wsd(warmup=2, decay=2, kind="linear"), [0.5, 1, 1, 1, 1, 0.5]),
    (wsd(warmup=0.25, decay=0.5, kind="linear", min_ratio=0.5),
        [0.5, 1, 1, 1, 1, 0.875, 0.75, 0.625]),
    (wsd(decay=3, kind="cosine"), [1, 1, 0.75, 0.25]), (wsd(decay=4), [1, *QUARTER]),
    (wsd(decay=0), [1, 1, 1]), (exponential(0.5), [1, 0.5, 0.25, 0.125]),
    (exponential(2.0), [1, 2, 4]),
    (step_decay(2, gamma=0.5), [1, 1, 0.5, 0.5, 0.25]), (step_decay(1), [1, 0.1, 0.01]),
    (step_decay(0.5, gamma=0.5), [1, 1, 1, 0.5, 0.5, 0.5]),
    (multistep([1, 3], gamma=0.5), [1, 0.5, 0.5, 0.25]),
    (multistep([3, 1], gamma=0.5), [1, 0.5, 0.5, 0.25]),  # in any order
    (multistep([0.25, 0.75], gamma=0.5), [1, 0.5, 0.5, 0.25]), (multistep([2]), [1, 1, 0.1]),
    (multistep([]), [1, 1]),
    (inverse_sqrt(4), [0.25, 0.5, 0.75, 1, math.sqrt(4 / 5), math.sqrt(4 / 6)]),
    (inverse_sqrt(0.5), [0.5, 1, math.sqrt(2 / 3), math.sqrt(2 / 4)]),
    (warmup(2)(linear()), [0.5, 1, 1, 0.75, 0.5, 0.25]), (warmup(0.5)(linear()), [0.5, 1, 1, 0.5]),
    (warmup(2)(linear(min_ratio=0.5)), [0.5, 1, 1, 0.75]),
    # up to the first factor of the schedule
    (warmup(2)(one_cycle(peak=1, start_ratio=0.5)), [0.25, 0.5, 0.5, 1]),
    (warmup(2)(lambda step, total: 0.5), [0.25, 0.5, 0.5]),  # any function
    (warmup(0)(linear()), [1, 0.5]),
    # as long as the run, or longer: up to the first factor of the schedule
    (warmup(2)(linear()), [0.5, 1]),
    (warmup(4)(linear()), [0.25, 0.5]),
    (warmup(4)(cosine(min_ratio=0.5)), [0.25, 0.5, 0.75]), (warmup(1.0)(polynomial()), [0.5, 1]),
    (warmup(4)(wsd()), [0.25, 0.5]), (warmup(4)(one_cycle()), [0.25, 0.5]),
    (warmup(4)(exponential(0.5)), [0.25, 0.5]), (warmup(4)(warmup(2)(linear())), [0.125, 0.25]),
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


def test_one_as_an_int_is_one_update_and_as_a_float_the_whole_run():
    assert factors(linear(warmup=1), 4) == pytest.approx([1, 1, 2 / 3, 1 / 3])
    assert factors(linear(warmup=1.0), 4) == [0.25, 0.5, 0.75, 1]


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


def test_a_run_shorter_than_its_warmup_only_warms_up():
    assert factors(linear(warmup=10), 3) == [0.1, 0.2, 0.3]
    assert factors(wsd(warmup=10), 3) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(("schedule", "expected"), [
    (linear(warmup=0.5, cooldown=0.5), [0.5, 1, 0, 0]),
    (cosine(warmup=0.25, cooldown=0.75), [1, 0, 0, 0]),
    (wsd(warmup=0.5, decay=0.5, kind="linear"), [0.5, 1, 1, 0.5]),
    (wsd(warmup=1.0, decay=0), [0.25, 0.5, 0.75, 1]),
], ids=repr)  # fmt: skip
def test_fractions_may_add_up_to_the_whole_run(schedule, expected):
    assert factors(schedule, 4) == pytest.approx(expected)


def test_update_i_of_a_run_uses_factor_i():
    ones = [torch.tensor([1.0])] * 4  # each update moves w by the learning rate
    step = fl.pipeline(fl.schedule(linear()))(toy_loss)
    weights = [
        state.model.w.item() for state in fl.run(step, toy(lr=1.0), ones[:1], epochs=4, hooks=())
    ]
    assert weights == [-1.0, -1.75, -2.25, -2.5]
    assert fl.fit(step, toy(lr=1.0), ones, hooks=()).model.w.item() == -2.5


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


@pytest.mark.parametrize("total", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_no_update_of_a_run_has_a_factor_of_zero_and_none_is_above_one(schedule, total):
    assert all(0 < factor <= 1 for factor in factors(schedule, total))


@pytest.mark.parametrize("total", [100, 1000])
@pytest.mark.parametrize(
    ("schedule", "minimum"), DECAYS, ids=[repr(schedule) for schedule, _ in DECAYS]
)
def test_the_last_update_is_near_the_minimum_but_not_at_it(schedule, minimum, total):
    assert minimum < schedule(total - 1, total) < minimum + 0.11


@pytest.mark.parametrize("schedule", [
    linear(warmup=10), cosine(warmup=10), polynomial(warmup=10), wsd(warmup=10), inverse_sqrt(10),
    warmup(10)(constant()), warmup(10)(cosine()),
], ids=repr)  # fmt: skip
def test_a_warmup_rises_linearly_and_ends_without_a_jump(schedule):
    up = [schedule(i, 1000) for i in range(10)]
    assert up == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert schedule(10, 1000) == pytest.approx(1.0, abs=0.05)


def test_one_cycle_passes_its_peak_without_a_jump():
    schedule = one_cycle(peak=100)
    assert [schedule(i, 1000) for i in (99, 100, 101)] == pytest.approx([1, 1, 1], abs=0.001)


def test_a_larger_k_keeps_a_cosine_high_for_longer():
    assert cosine(k=0.5)(50, 100) < cosine()(50, 100) < cosine(k=2.0)(50, 100)
    assert cosine()(50, 100) == pytest.approx(0.5)


# --- composing


def told(step, total):
    """A schedule that returns its arguments."""
    return step, total


def test_joined_schedules_count_their_own_steps_and_get_their_own_lengths():
    schedule = join(told, told, told, at=[2, 3])
    assert [schedule(i, 5) for i in range(5)] == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]


def test_without_a_length_of_the_run_only_the_last_joined_schedule_has_none():
    schedule = join(told, told, at=[2])
    assert [schedule(i, None) for i in (1, 2, 7)] == [(1, 2), (0, None), (5, None)]


def test_after_a_warmup_a_schedule_covers_the_rest_of_the_run():
    schedule = warmup(2)(lambda step, total: total + step / 10)
    assert [schedule(i, 5) for i in (1, 2, 3)] == [3.0, 3.0, 3.1]


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
    multistep([1, 0.5]), inverse_sqrt(0.1), warmup(0.1)(constant()), warmup(2)(cosine()),
    join(constant(), constant(), at=[0.5]),
], ids=repr)  # fmt: skip
def test_other_schedules_raise_without_the_length_of_the_run(schedule):
    with pytest.raises(ValueError, match=r"needs the length of the run: call it through fit\("):
        schedule(0, None)


@pytest.mark.parametrize("schedule", [
    cosine(),
    cosine(warmup=2),  # the warmup itself does not need it
    wsd(warmup=2, decay=2), warmup(2)(cosine()), warmup(2)(warmup(2)(linear())),
    warmup(0.1)(constant()), step_decay(0.5), join(constant(), constant(), at=[0.5]),
], ids=repr)  # fmt: skip
def test_without_the_length_of_a_loader_they_raise_before_the_first_update(schedule):
    def loader():
        return (torch.tensor([1.0]) for _ in range(4))

    step, state = fl.pipeline(fl.schedule(schedule))(toy_loss), toy()
    with pytest.raises(
        ValueError, match=r"needs the length of the run, but the training loader has none"
    ) as caught:
        fl.fit(step, state, loader, hooks=())
    assert f"schedule({schedule!r}) needs" in str(caught.value)
    assert (caught.value.state.step, state.model.w.item()) == (0, 0.0)
    assert fl.fit(step, toy(), loader, steps=4, hooks=()).step == 4  # now it has one


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
def test_a_schedule_shows_as_it_was_typed(schedule, text):
    assert repr(schedule) == text
    assert eval(text) == schedule


@pytest.mark.parametrize("remade", [
    lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy,
], ids=["pickled", "deep-copied"])  # fmt: skip
@pytest.mark.parametrize("schedule", [schedule for schedule, _ in SHOWN], ids=repr)
def test_a_copy_is_equal_shows_the_same_and_gives_the_same(schedule, remade):
    other = remade(schedule)
    assert other == schedule
    assert hash(other) == hash(schedule)
    assert repr(other) == repr(schedule)
    assert factors(other, 7) == factors(schedule, 7)


@pytest.mark.parametrize(("one", "other"), [
    (linear(0.1), linear(0.2)), (linear(), cosine()), (linear(1), constant()),
    (warmup(2)(linear()), warmup(3)(linear())), (warmup(2)(linear()), warmup(2)(cosine())),
    (join(linear(), cosine(), at=[2]), join(cosine(), linear(), at=[2])),
], ids=repr)  # fmt: skip
def test_schedules_from_different_calls_are_different(one, other):
    assert one != other


def test_equal_schedules_make_equal_pipelines_that_show_them():
    made = fl.pipeline(fl.schedule(cosine(warmup=0.1)))
    assert made == fl.pipeline(fl.schedule(cosine(warmup=0.1)))
    assert made != fl.pipeline(fl.schedule(cosine(warmup=0.2)))
    assert repr(made) == "pipeline(schedule(cosine(warmup=0.1)))"


# --- errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: linear(warmup=-1), ValueError, r"linear expects warmup >= 0; got -1"),
        (lambda: cosine(cooldown=-0.5), ValueError, r"cosine expects cooldown >= 0; got -0\.5"),
        (
            lambda: cosine(warmup=100.0),
            ValueError,
            r"cosine expects warmup as a fraction of the run, from 0\.0 to 1\.0; got 100\.0\. "
            r"For updates, write an int: 100$",
        ),
        (
            lambda: polynomial(warmup="2"),
            TypeError,
            r"polynomial expects warmup as updates \(an int\) or .*got '2'",
        ),
        (lambda: linear(warmup=True), TypeError, r"linear expects warmup as updates .*got True"),
        (
            lambda: linear(min_ratio=1.5),
            ValueError,
            r"linear expects min_ratio from 0 to 1, .*got 1\.5",
        ),
        (lambda: cosine(min_ratio=-0.1), ValueError, r"cosine expects min_ratio from 0 to 1"),
        (
            lambda: cosine(min_ratio=None),
            ValueError,
            r"cosine expects min_ratio from 0 to 1, .*got None",
        ),
        (
            lambda: cosine(k=0),
            ValueError,
            r"cosine expects k > 0 and finite, the exponent of k-decay; got 0",
        ),
        (
            lambda: polynomial(0),
            ValueError,
            r"polynomial expects power > 0 and finite, 1 is linear; got 0",
        ),
        (
            lambda: one_cycle(peak=1.5),
            ValueError,
            r"one_cycle expects peak as a fraction .*got 1\.5",
        ),
        (
            lambda: one_cycle(start_ratio=0),
            ValueError,
            r"start_ratio > 0: the first update would change nothing",
        ),
        (
            lambda: one_cycle(start_ratio=2),
            ValueError,
            r"one_cycle expects start_ratio from 0 to 1",
        ),
        (lambda: one_cycle(min_ratio=2), ValueError, r"one_cycle expects min_ratio from 0 to 1"),
        (lambda: wsd(decay=-1), ValueError, r"wsd expects decay >= 0"),
        (lambda: wsd(warmup=-1), ValueError, r"wsd expects warmup >= 0"),
        (lambda: wsd(min_ratio=2), ValueError, r"wsd expects min_ratio from 0 to 1"),
        (
            lambda: wsd(kind="exp"),
            ValueError,
            r"""wsd expects kind as one of "linear", "sqrt", "cosine"; got 'exp'""",
        ),
        (lambda: exponential(0), ValueError, r"exponential expects gamma > 0 and finite; got 0"),
        (
            lambda: exponential("0.9"),
            ValueError,
            r"exponential expects gamma as a number > 0 and finite; got '0\.9'",
        ),
        (lambda: step_decay(0), ValueError, r"step_decay expects every > 0, got 0"),
        (lambda: step_decay(-2), ValueError, r"step_decay expects every >= 0"),
        (
            lambda: step_decay(2, gamma=-1),
            ValueError,
            r"step_decay expects gamma > 0 and finite; got -1",
        ),
        (lambda: multistep([1, -3]), ValueError, r"multistep expects milestones >= 0; got -3"),
        (lambda: multistep([1], gamma=0), ValueError, r"multistep expects gamma > 0"),
        (lambda: inverse_sqrt(0), ValueError, r"inverse_sqrt expects warmup > 0, got 0"),
        (lambda: warmup(-1), ValueError, r"warmup expects n >= 0"),
        (
            lambda: warmup(2)(cosine),
            TypeError,
            r"warmup expects a function \(step, total_steps\) -> factor, such as cosine\(\); "
            r"got cosine\. Call it: cosine\(\)",
        ),
        (
            lambda: join(constant(), linear, at=[2]),
            TypeError,
            r"join expects a function .*got linear\. Call it: linear\(\)",
        ),
        (
            lambda: join(constant(), linear(), at=[]),
            ValueError,
            r"in at= where each but the first begins; got 2 and 0",
        ),
        (
            lambda: join(linear(), at=[2]),
            ValueError,
            r"join expects two schedules or more, .*got 1 and 1",
        ),
        (
            lambda: join(linear(), at=[]),
            ValueError,
            r"join expects two schedules or more, .*got 1 and 0",
        ),
        (
            lambda: join(constant(), linear(), at=[1.5]),
            ValueError,
            r"join expects at as a fraction .*got 1\.5",
        ),
        # more than the whole run
        (
            lambda: linear(0.6, 0.5),
            ValueError,
            r"linear: its first part, 0\.6, and its last, 0\.5, make more than the whole",
        ),
        (
            lambda: cosine(warmup=0.75, cooldown=0.5),
            ValueError,
            r"cosine: its first part, 0\.75, and its last, 0\.5, make",
        ),
        (
            lambda: polynomial(warmup=1.0, cooldown=0.1),
            ValueError,
            r"polynomial: its first part, 1\.0, and its last, 0\.1",
        ),
        (
            lambda: wsd(warmup=0.95),
            ValueError,
            r"wsd: its first part, 0\.95, and its last, 0\.1, make more",
        ),
        # neither a number of updates nor a fraction
        (
            lambda: linear(warmup=math.inf),
            ValueError,
            r"linear expects warmup as a fraction .*got inf$",
        ),
        (lambda: linear(cooldown=math.nan), ValueError, r"linear expects cooldown >= 0; got nan"),
        (
            lambda: one_cycle(peak=math.inf),
            ValueError,
            r"one_cycle expects peak as a fraction .*got inf$",
        ),
        (lambda: wsd(decay=math.nan), ValueError, r"wsd expects decay >= 0; got nan"),
        (
            lambda: step_decay(math.inf),
            ValueError,
            r"step_decay expects every as a fraction .*got inf$",
        ),
        (
            lambda: multistep([1, math.inf]),
            ValueError,
            r"multistep expects milestones as a fraction .*got inf$",
        ),
        (lambda: inverse_sqrt(math.nan), ValueError, r"inverse_sqrt expects warmup >= 0; got nan"),
        (lambda: warmup(math.inf), ValueError, r"warmup expects n as a fraction .*got inf$"),
        (
            lambda: join(constant(), linear(), at=[math.nan]),
            ValueError,
            r"join expects at >= 0; got nan",
        ),
        # not a list
        (
            lambda: multistep(3),
            TypeError,
            r"multistep expects milestones as a list of lengths; got 3",
        ),
        (
            lambda: multistep("12"),
            TypeError,
            r"multistep expects milestones as a list of lengths; got '12'",
        ),
        (
            lambda: join(constant(), linear(), at=0.5),
            TypeError,
            r"join expects at as a list of lengths; got 0\.5",
        ),
        # given to the middleware
        (
            lambda: fl.schedule(warmup(2)),
            TypeError,
            r"a function \(step, total_steps\) -> factor, such as cosine\(\); "
            r"<lambda> takes \(schedule\)",
        ),
        (
            lambda: fl.schedule(lambda i: 1.0),
            TypeError,
            r"a function \(step, total_steps\) -> factor, such as cosine\(\); <lambda> takes \(i\)",
        ),
        (
            lambda: fl.schedule(cosine),
            TypeError,
            r"a function \(step, total_steps\) -> factor, .*Call it: cosine\(\)",
        ),
    ],
)
def test_a_setting_out_of_range_is_an_error_when_the_schedule_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_falling_boundaries_are_an_error_once_the_length_is_known():
    schedule = join(constant(), constant(), constant(), at=[0.5, 3])
    assert schedule(0, 6) == 1.0
    with pytest.raises(
        ValueError,
        match=r"join expects rising boundaries; at=\[0\.5, 3\] begins at updates \[4, 3\]",
    ):
        schedule(0, 8)


# --- as a picture


def drawn(figure):
    """Return the drawn curves: label to points."""
    (axis,) = figure.axes
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axis.lines
    }


@pytest.mark.parametrize(("given", "labels"), [
    (linear(), ["linear()"]),
    ([linear(), constant()], ["linear()", "constant()"]),
    ({"down": linear(), "flat": constant()}, ["down", "flat"]), (half_way, ["half_way"]),
])  # fmt: skip
def test_a_plot_has_a_labelled_curve_per_schedule(given, labels):
    pytest.importorskip("matplotlib")
    figure = plot(given, 4)
    assert (
        list(drawn(figure)) == labels == [text.get_text() for text in figure.legends[0].get_texts()]
    )


def test_a_plot_has_the_factor_of_each_update():
    pytest.importorskip("matplotlib")
    assert drawn(plot(linear(), 4)) == {"linear()": [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]}
    assert plot(linear(), 4).axes[0].get_xlabel() == "update"


@pytest.mark.parametrize("total", [0, -1, 1.5, True, None])
def test_a_plot_needs_the_length_of_a_run(total):
    with pytest.raises(
        ValueError, match="plot expects total_steps as an int >= 1, the updates of a run; got"
    ):
        plot(linear(), total)


@pytest.mark.parametrize("given", [linear, [linear()] * 2 + [0.1], {"a": lambda step: 1.0}])
def test_only_a_schedule_can_be_plotted(given):
    with pytest.raises(
        TypeError, match=r"plot expects .*a function \(step, total_steps\) -> factor"
    ):
        plot(given, 4)


@pytest.mark.parametrize("none", [[], {}])
def test_a_plot_needs_a_schedule(none):
    with pytest.raises(ValueError, match="plot expects at least one schedule"):
        plot(none, 4)
