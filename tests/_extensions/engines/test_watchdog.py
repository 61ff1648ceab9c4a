"""Processes that wait for each other in different places fail and say where."""

import math
import re
import time

import attrs
import launch
import pytest
import torch
import torch.distributed as dist
from joined import rank
from process_data import batches, loader
from process_problems import by_tokens, created, entropy, network
from torch import nn

import fnloop as fl
from fnloop._extensions.engines import alike, exchanges

pytestmark = pytest.mark.slow


def hold_for(deadlock, notice, kill):
    """Set the seconds after which processes that wait are ended."""
    exchanges.DEADLOCK_SECONDS, exchanges.NOTICE_SECONDS = deadlock, notice
    exchanges.KILL_SECONDS = kill


def diverge(folder, way, hold=2):
    notice, kill = exchanges.NOTICE_SECONDS, exchanges.KILL_SECONDS
    hold_for(hold, min(hold, notice), min(hold, kill))

    def hook(state):
        if state.step == 5 and rank() == 1:
            (folder / "diverged").write_text(str(time.time()))
            change = {"ends": "epoch"} if way == "epoch" else {"stop": "mine"}
            return attrs.evolve(state, **change)
        return state

    torch.manual_seed(0)
    with_buffers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = with_buffers if way == "buffers" else network()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weights = fl.pipeline(fl.accumulate(2))(by_tokens)
    step = weights if way == "weights" else fl.pipeline(fl.clip(1.0))(entropy)
    try:
        fl.fit(step, state, loader(size=2), epochs=9, hooks=(hook,))
    finally:
        if way == "caught" and rank() == 1:
            time.sleep(60)


LONG = pytest.mark.long


@pytest.mark.parametrize(("way", "n"), [
    pytest.param("stop", 2, marks=LONG),
    pytest.param("epoch", 2, marks=LONG),
    ("weights", 2),
    pytest.param("buffers", 3, marks=LONG),
])  # fmt: skip
def test_processes_that_diverge_fail(tmp_path, way, n):
    found = launch.launch(tmp_path, n, diverge, way, forked=True)
    assert all(found.codes), found  # 1, or another one from gloo's threads
    assert max(found.ended) - float((tmp_path / "diverged").read_text()) < 20  # seconds
    assert "RuntimeError: the processes have diverged" in found.errors[1]
    assert all("the processes have diverged: " in error for error in found.errors), found.errors
    if way == "stop":
        said = "process 1 waits in the end of its run (mine) after step 5, and process 0 is in an "
        said += "update after step 5"
        assert all(said in error for error in found.errors), found.errors


def part_early(folder, way, hold=2):
    """Do something else in process 1 before the first update."""
    hold_for(hold, 1, 1)
    first = rank() == 0
    saves = [fl.checkpoint(folder / name) for name in "ab"]
    loaders = {"train": loader(size=2)}

    class Broken:
        def __call__(self, state):
            return state

        def begin(self, state):
            raise ArithmeticError("broken on 1")

    hooks = {
        "hook of one": saves[:1] if first else [],
        "number of hooks": saves if first else saves[:1],
        "table of one": [fl.to_csv(folder / "a.csv")] if first else [],
        "begin raises": saves[:1] if first else [Broken(), *saves[:1]],
    }
    if way == "loaders" and not first:
        loaders["valid"] = loader(size=2)
    state = created()
    if way == "evaluates alone" and not first:
        fl.evaluate(fl.pipeline()(entropy), state, loaders["train"])
    if way == "broadcasts alone" and not first:
        fl.broadcast("mine", source=1)
    fl.fit(fl.pipeline()(entropy), state, loaders, epochs=1, hooks=hooks.get(way, ()))


# What each waits for is named; which exchange that is depends on what the first one is.
APART = r"process 0 waits in {} before the first update, and process 1 waits in {}"
COMPARED = "a comparison of the data before the first update"
EARLY = {
    "hook of one": r"process 0 has checkpoint\(.*\), and process 1 does not",
    "number of hooks": r"process 0 has checkpoint\(.*/b.*\), and process 1 does not",
    "table of one": APART.format(r".*a\.csv.*", COMPARED),
    "broadcasts alone": "process 0 waits in the comparison of the pipelines, and process 1 waits "
    "in fnloop.broadcast from process 1",
    "evaluates alone": "process 0 waits in the comparison of the pipelines, and process 1 waits "
    "in a comparison of the data that evaluate reads",
    "loaders": "process 1 waits in ",
}


FEW = ("loaders",)
works = lambda begun, count, inside=True: place(None, begun, {"0": count}, inside)


@pytest.mark.parametrize(
    "way", [*FEW, *(pytest.param(k, marks=LONG) for k in EARLY if k not in FEW)]
)
def test_processes_that_diverge_before_the_first_update_fail(tmp_path, way):
    found = launch.launch(tmp_path, 2, part_early, way, timeout=90, forked=True)
    assert all(found.codes), found
    told = [error for error in found.errors if "the processes have diverged: " in error]
    assert told and all(re.search(EARLY[way], error) for error in told), found.errors
    # On a busy machine one may end before the other has read where both wait.
    lost = "another process has ended or stopped by itself"
    assert all(lost in error for error in found.errors if error not in told), found.errors


@pytest.mark.long
def test_a_begin_that_raises_in_one_process_ends_all(tmp_path):
    found = launch.launch(tmp_path, 2, part_early, "begin raises", timeout=90, forked=True)
    assert all(found.codes) and "ArithmeticError: broken on 1" in found.errors[1], found
    assert "another process has ended or stopped by itself" in found.errors[0], found.errors


@LONG
def test_processes_that_have_diverged_end_at_once_where_python_ends_them(tmp_path):
    """Gloo's threads wait for a message that never comes, and Python for these threads."""
    found = launch.launch(tmp_path, 2, part_early, "hook of one", timeout=60)
    assert found.codes == [1, 1] and re.search(EARLY["hook of one"], found.errors[0])


@LONG  # waits for 20 s
def test_a_process_that_waits_for_a_failed_one_ends(tmp_path):
    """The failed one stays alive. Torch itself would end the other after half an hour."""
    with pytest.raises(TimeoutError) as error:
        launch.launch(tmp_path, 2, diverge, "caught", timeout=20, forked=True)
    assert "Process 0 still waits and is terminated" in str(error.value)


def slow(folder):
    """Be slow in one process at each possible place, for longer than a deadlock may last."""
    hold_for(1, 0, 0)
    pause = lambda state: time.sleep(5 * (state.step == 2)) or state

    def stream():
        for n, batch in enumerate(batches(6)):
            time.sleep(5 * (rank() == 1 and n in (3, 6)))  # the seventh is the last one
            yield batch

    state = created()
    for _ in range(2 if rank() < 2 else 0):  # gloo counts it too
        dist.send(torch.ones(1), 1) if rank() == 0 else dist.recv(torch.ones(1), 0)
    hooks = (fl.on_main(pause), fl.checkpoint(folder / "saved"))
    loaders = {"train": stream, "valid": batches(3)}
    state = fl.fit(fl.pipeline()(entropy), state, loaders, epochs=1, hooks=hooks)
    if rank() == 0:
        time.sleep(5)
    return fl.reduce({"steps": state.step}, "sum")


@LONG  # waits for 20 s
def test_a_slow_process_is_waited_for(tmp_path):
    assert launch.results(tmp_path, 3, slow, timeout=180) == [{"steps": 9}] * 3


def place(waits, begun, counts, inside=False):
    """Return the place of a process by the exchanges and the collectives that it has begun."""
    numbered = [*enumerate(begun.split())]
    return {"waits": waits, "begun": numbered, "step": 5, "counts": counts, "inside": inside}


WAITS = place("the end", "a b c end", {"0": 7})


@pytest.mark.parametrize(("first", "second", "meet"), [
    (WAITS, works("a b c", 8), False),  # in another exchange of gradients
    (WAITS, works("a b c sum", 8), False),  # after one that the first has not begun
    (WAITS, works("a b c end", 8), True),  # it has begun the same
    (WAITS, works("a b c", 8, False), True),  # it has sent something, and is in a loader
    (WAITS, works("a b c", 7), True),  # in backward of the same update
    (WAITS, works("a b c end d", 8), True),  # it has finished the exchange
    (place("the end", "a b c end", {"0": 7, "2": 1}),
     place(None, "a b c", {"0": 7, "3": 5}, True), True),  # in different groups
    (WAITS, place("buffers", "a b c buffers", {"0": 7}), False),  # both wait, elsewhere
    (WAITS, WAITS, True),
    # The second has sent all of an exchange that the first takes for another one.
    (WAITS, place("buffers", "a b c send buffers", {"0": 7}), False),
    (WAITS, place("c", "a send c", {"0": 7}), False),
    # The second had sent something to one process before, or is later, not elsewhere.
    (WAITS, place("the end", "a b c end", {"0": 9}), True),
    (WAITS, place("c", "a b c", {"0": 7}), True),
    (works("a b c end", 7), works("a b c end", 9), True),  # no exchange of fnloop's
])  # fmt: skip
def test_two_places_that_never_meet_are_found(first, second, meet):
    assert exchanges.never_meet({0: first, 1: second}) == (None if meet else (0, 1))
    third = place(None, "a b", {"0": 7})  # works, or has not been heard of
    assert exchanges.never_meet({0: first, 2: third, 1: second}) == (None if meet else (0, 1))


def test_exchanges_that_only_one_process_remembers_are_not_compared():
    first, second = WAITS, place("end", "a b c end", {"0": 7})
    second["begun"] = [(number + 64, name) for number, name in first["begun"]]
    assert exchanges.never_meet({0: first, 1: second}) is None


def test_weights_without_a_norm_are_not_compared():
    model = nn.Module()
    for name, values in {"a": [3.0, 4.0], "b": [math.nan], "empty": []}.items():
        setattr(model, name, nn.Parameter(torch.tensor(values)))
    for name, dtype in {"c": torch.int64, "d": torch.float8_e4m3fn}.items():
        setattr(model, name, nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
    state = fl.TrainState.create(model, torch.optim.SGD([model.a], lr=0.1), seed=0)
    assert alike._norms(state) == {"a": 5.0, "b": 0.0, "empty": 0.0}
