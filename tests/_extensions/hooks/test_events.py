"""to_jsonl(events=True): what happens in a run, between its records, also after a cut."""

import json
import os
import signal

import pytest
from sample_hooks import raise_at, stop_at
from toy_runs import fitted

import fnloop as fl
from fnloop.testing import toy

NAN, INF = float("nan"), float("inf")
VALUES = [1, NAN, 2, 3]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(path, *facts):
    """Return of each event what it is and at which update; and of each record its step."""
    return [
        (row.get("event", "record"), row["step"], *(row.get(f) for f in facts))
        for row in rows(path)
    ]


def run(tmp_path, *hooks, state=None, values=VALUES, **settings):
    writer = fl.to_jsonl(tmp_path / "a.jsonl", events=True)
    save = fl.every(steps=2)(fl.checkpoint(tmp_path / "run"))
    settings = {"epochs": 2, "hooks": (writer, save, *hooks), **settings}
    return fitted(values, fl.skip_nonfinite(), state=state, **settings)


WHOLE = [
    *(("begin", 0), ("skip", 1), ("save", 2), ("record", 3)),
    *(("save", 4), ("skip", 4), ("record", 6), ("save", 6), ("end", 6)),
]


def test_events_are_at_their_place_between_the_records(tmp_path):
    run(tmp_path)
    assert told(tmp_path / "a.jsonl") == WHOLE
    skip, save = rows(tmp_path / "a.jsonl")[1:3]
    del skip["time"]
    reason = "skip_nonfinite: the loss is nan"
    assert skip == {"event": "skip", "step": 1, "skipped": 1, "epoch": 0, "reason": reason}
    assert save["folder"] == str(tmp_path / "run")


@pytest.mark.parametrize("begun", [True, False])
def test_a_file_with_events_is_not_made_one_without(begun, tmp_path):
    """Also where the first line is that of a record, because events were asked for later."""
    path, hook = tmp_path / "a.jsonl", fl.to_jsonl(tmp_path / "a.jsonl", events=begun)
    state = fitted([1], epochs=1, hooks=(hook,))
    state = fitted([1], state=state, epochs=2, hooks=(fl.to_jsonl(path, events=True),))
    before, lines = path.read_bytes(), told(path)
    assert lines[0] == (("begin", 0) if begun else ("record", 1)) and lines[-1] == ("end", 2)
    with pytest.raises(ValueError, match=r"has events, .*: write to_jsonl\(.*', events=True"):
        fitted([1], state=state, epochs=3, hooks=(fl.to_jsonl(path),))
    with pytest.raises(ValueError, match="has the rows of another run"):
        fitted([1], hooks=(fl.to_jsonl(path),))
    assert path.read_bytes() == before


@pytest.mark.parametrize("others", [
    lambda path: [fl.to_jsonl(path, events=True)],
    lambda path: [fl.to_csv(path)],
    lambda path: [fl.every(epochs=2)(fl.to_jsonl(path, events=True))],
    lambda path: [fl.to_jsonl(path), fl.to_jsonl(path, events=True)],
])  # fmt: skip
@pytest.mark.parametrize("events", [True, False])
def test_two_hooks_that_write_other_lines_to_one_file_are_refused(others, events, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a.jsonl")
    hooks = [fl.to_jsonl(tmp_path / "a.jsonl", events=events), *others(tmp_path / "link")]
    with pytest.raises(ValueError, match="write the same file, and one would undo"):
        fitted([1], hooks=hooks)
    assert not (tmp_path / "a.jsonl").exists()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", range(1, 7))
def test_a_run_that_is_killed_and_resumed_has_the_same_events(at, tmp_path):
    """What came after the checkpoint goes: it is told again."""

    def kill(state):
        if state.step == at and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise Killed
        return state

    try:
        run(tmp_path, kill)
    except Killed:
        left = (tmp_path / "a.jsonl").read_text()
        without = left.splitlines(keepends=True)
        lines = [line for line in without if json.loads(line).get("event") != "error"]
        (tmp_path / "a.jsonl").write_text("".join(lines) + '{"event": "sk')  # cut in the middle
    state = fl.resume(tmp_path / "run", toy())
    run(tmp_path, kill, state=state)
    found = told(tmp_path / "a.jsonl")
    # At 6 the hook is called that was still to be called, so the state is saved again at the end.
    wanted = [*WHOLE[1:], *([("save", 6)] if at == 6 else [])]
    assert [row for row in found if row[0] not in ("begin", "resume")] == wanted
    again = [row[0] for row in found if row[0] in ("begin", "resume")][-1]
    assert again == ("resume" if at > 1 else "begin")


def test_spikes_and_stops_and_errors_are_told(tmp_path):
    guard = fl.spike_guard(window=2, ratio=3.0)
    writer = fl.to_jsonl(tmp_path / "a.jsonl", events=True)

    def loss_fn(model, batch):
        return (model.w * 0 + batch).mean()

    values = [1, 1, 1, 100, 1, 1, 1]
    fitted(values, guard, loss_fn=loss_fn, hooks=(writer, stop_at(5)))
    found = told(tmp_path / "a.jsonl", "reason", "median")
    assert [row[:2] for row in found] == [
        *(("begin", 0), ("skip", 3), ("spike", 3), ("record", 5), ("stop", 5), ("end", 5))
    ]
    assert found[2][3] == 1.0 and found[4][2] == "enough"
    assert rows(tmp_path / "a.jsonl")[4]["kind"] == "hook"

    other = fl.to_jsonl(tmp_path / "b.jsonl", events=True)
    with pytest.raises(ValueError, match="no"):
        fitted([1, 2], hooks=(other, raise_at(1, ValueError)))
    found = told(tmp_path / "b.jsonl", "error")
    assert found == [("begin", 0, None), ("error", 1, "ValueError: no")]


def test_an_interruption_is_a_stop(tmp_path):
    press = fl.once(lambda state: os.kill(os.getpid(), signal.SIGINT) or state)
    state = run(tmp_path, press, values=[1, 2, 3])
    (stop,) = (row for row in rows(tmp_path / "a.jsonl") if row.get("event") == "stop")
    assert (stop["kind"], stop["step"]) == ("interrupted", state.step)


def test_what_a_hook_takes_back_was_not(tmp_path, back_once):
    """It goes back from step 3 to step 1."""
    writer = fl.to_jsonl(tmp_path / "a.jsonl", events=True)
    save = fl.every(steps=1)(fl.checkpoint(tmp_path / "run"))
    fitted([1, 2, 3, 4], hooks=(writer, save, back_once))
    found = [row for row in told(tmp_path / "a.jsonl") if row[0] == "save"]
    assert found == [("save", n) for n in (1, 2, 3, 4)]


def test_without_events_it_is_as_it_was(tmp_path):
    path = tmp_path / "a.jsonl"
    fitted([1, 2], hooks=(fl.to_jsonl(path),))
    assert [row["step"] for row in rows(path)] == [2]
    assert repr(fl.to_jsonl(path, events=True)).endswith("a.jsonl', events=True)")
    with pytest.raises(TypeError, match="to_jsonl expects events as"):
        fl.to_jsonl(path, events="all")


def test_numbers_that_json_lacks_are_as_in_records(tmp_path):
    writer = fl.to_jsonl(tmp_path / "a.jsonl", events=True)
    fitted([1, INF], fl.spike_guard(window=1, ratio=2.0), state=toy(w=2.0), hooks=(writer,))
    (spike,) = (line for line in writer.path.read_text().splitlines() if '"spike"' in line)
    assert '"loss": 1e999, "median": 2.0' in spike
