"""``paced``: a hook is due each sqrt(2 · what it takes · the mean time between failures)."""

import json

import pytest
from sample_hooks import Notes
from toy_runs import ONE, fit

import fnloop as fl
from fnloop import every, paced
from fnloop._extensions.hooks import keep
from fnloop.testing import toy, toy_loss

# A failure each hour and saves of 2 s: sqrt(2 * 2 * 3600) = 120 s. An update takes 10 s.
HOURLY = paced(failures_per_day=24)
none = lambda state: {}


@pytest.fixture
def step(clock):
    return fl.pipeline()(clock.timed(toy_loss, train=10.0))


def saving(clock, notes, *seconds):
    """Return a hook that takes some seconds, each time the next ones."""
    left = list(seconds)

    def save(state):
        clock.now += left.pop(0) if len(left) > 1 else left[0]
        return notes(state)

    return save


@pytest.mark.parametrize(("moment", "seconds", "steps"), [
    (HOURLY, [2], [1, 13, 25, 37]),  # the first tells what a call takes
    (paced(failures_per_day=96), [2], [1, 7, 13, 19, 25, 31, 37]),  # four times as often: 60 s
    (paced(failures_per_day=24), [8], [1, 25]),  # four times as long: 240 s
    (HOURLY, [2, 2, 14], [1, 13, 25]),  # half of what is known is the newest: 8 s, so 240 s
    (paced(failures_per_day=864), [1800], [*range(1, 41)]),  # 600 s, but no sooner than it takes
    (HOURLY | every(steps=20), [2], [1, 13, 20, 25, 37, 40]),
    (HOURLY & every(steps=5), [2], [5, 20, 35]),  # first asked at 5, and due from 17, 32 on
])  # fmt: skip
def test_a_hook_is_due_as_often_as_it_pays(clock, step, moment, seconds, steps):
    notes = Notes()
    fit(moment(saving(clock, notes, *seconds)), step=step, train=40)
    assert notes.steps == steps


def test_each_use_of_a_moment_has_its_own_pace(clock, step):
    cheap, dear = Notes(), Notes()
    fit(HOURLY(saving(clock, cheap, 2)), HOURLY(saving(clock, dear, 8)), step=step, train=30)
    assert cheap.steps == [1, 12, 24] and dear.steps == [1, 24]  # time of the other counts too


@pytest.mark.parametrize("cut", [1, 2, 12, 13, 14, 20, 24, 25])
def test_a_run_that_is_resumed_keeps_its_pace(clock, step, cut, tmp_path):
    whole, rest = Notes(), Notes()
    keep = fl.when(lambda state: state.step == cut)(
        lambda state: fl.save(state, tmp_path / "a") and state
    )
    run = lambda state, *hooks: fl.fit(step, state, [ONE] * 40, epochs=1, hooks=hooks)
    run(toy(), HOURLY(saving(clock, whole, 2)), keep)
    clock.now += 1e6  # the time in between does not count
    run(fl.restore(tmp_path / "a", toy()), HOURLY(saving(clock, rest, 2)))
    assert whole.steps == [1, 13, 25, 37]
    assert rest.steps == [n for n in whole.steps if n > cut]


def test_a_new_run_forgets_the_pace_of_another(clock, step):
    notes = Notes()
    hooks = (HOURLY(saving(clock, notes, 2)),)
    for _ in range(2):
        fl.fit(step, toy(), [ONE] * 20, epochs=1, hooks=hooks)
    assert notes.steps == [1, 13, 1, 13]


@pytest.mark.parametrize(("make", "said"), [
    (lambda: fit(evaluate_every=HOURLY), r"evaluate_every as a moment that needs no hook; paced"),
    (lambda: fit(record_every=HOURLY | every(steps=2)), r"write \(paced\(.* \| every\(steps=2\)\)"),
    (lambda: fl.measure(none, name="a", every=HOURLY), "measure expects every as a moment"),
    (lambda: fl.on_main(HOURLY(print)), "tells all processes what its hook takes: list on_main in"),
    (lambda: paced(2), r"paced\(failures_per_day=2\)"),
    (lambda: ~HOURLY, r"~paced\(failures_per_day=24\) says nothing, because"),
    (lambda: ~(HOURLY | every(steps=2)), r"~\(paced\(.*\) \| every\(steps=2\)\) says nothing"),
])  # fmt: skip
def test_what_it_goes_by_is_a_hook(make, said):
    with pytest.raises(TypeError, match=said):
        make()


@pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf"), "1", None])
def test_the_rate_of_failures_is_above_zero(given):
    with pytest.raises((TypeError, ValueError), match="paced expects failures_per_day"):
        paced(failures_per_day=given)


def test_it_is_shown_as_it_is_written():
    assert repr(HOURLY) == "paced(failures_per_day=24)" and paced(failures_per_day=24) == HOURLY
    assert repr(paced()) == "paced(failures_per_day=1.0)"


def test_the_file_of_events_says_what_saves_cost_and_what_is_unsaved(
    clock, step, tmp_path, monkeypatch
):
    monkeypatch.setattr(keep, "time", clock)
    written = keep.checkpoint._save
    slow = lambda hook, state: (clock.takes(2)(state), written(hook, state))
    monkeypatch.setattr(keep.checkpoint, "_save", slow)
    hooks = (fl.to_jsonl(tmp_path / "a.jsonl", events=True), HOURLY(fl.checkpoint(tmp_path / "a")))
    fit(*hooks, step=step, train=30)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    saves = [row for row in lines if row.get("event") == "save"]
    assert [(row["step"], row["unsaved"], row["saves_took"]) for row in saves] == [
        (1, 10.0, 0.0), (13, 122.0, 2.0), (25, 122.0, 4.0), (30, 52.0, 6.0)
    ]  # fmt: skip
